# SPDX-License-Identifier: Apache-2.0
"""A node's cache: memory in front of an SSD, and the events of both."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mooncake.inference.blocks import BlockPool
from mooncake.sim.serving.node_cache import NodeCache


def node(num_blocks: int, num_ssd_blocks: int = 0) -> NodeCache[int]:
    ssd: BlockPool[int] | None = BlockPool(num_ssd_blocks + 1, 512) if num_ssd_blocks else None
    return NodeCache(BlockPool(num_blocks + 1, 512), ssd)


def keep(cache: NodeCache[int], keys: list[int]) -> None:
    """As a prefill does: cached blocks are used, the rest is stored."""
    found = cache.match(keys)
    cache.pin(found)
    cache.unpin(found + cache.keep(keys[len(found) :]))


def test_the_longest_unused_leaves_last_blocks_of_a_prompt_first() -> None:
    cache = node(4)
    keep(cache, [1, 2])
    keep(cache, [3, 4])
    keep(cache, [1, 5])
    assert cache.removed == [2]
    assert cache.stored == [1, 2, 3, 4, 5]
    assert len(cache.match([3, 4])) == 2
    cache.check()


def test_what_is_pinned_stays() -> None:
    cache = node(3)
    ids = cache.keep([1, 2])
    keep(cache, [7, 8, 9])  # room for one
    assert cache.match([1, 2]) == ids and len(cache.match([7, 8])) == 1
    cache.unpin(ids)
    cache.check()


def test_what_leaves_memory_lies_on_ssd() -> None:
    cache = node(2, num_ssd_blocks=3)
    keep(cache, [1, 2])
    keep(cache, [3, 4])
    assert cache.match([1]) == [] and cache.num_on_ssd([1, 2]) == 2
    assert sorted(cache.ssd_stored) == [1, 2] and cache.ssd_removed == []
    keep(cache, [5, 6])
    assert len(cache.ssd_removed) == 1
    cache.check()


@given(st.lists(st.lists(st.integers(1, 12), unique=True, max_size=6), max_size=30))
def test_the_events_add_up_to_the_content(prompts: list[list[int]]) -> None:
    cache = node(5, num_ssd_blocks=4)
    memory: set[int] = set()
    ssd: set[int] = set()
    for keys in prompts:
        keep(cache, keys)
        memory = memory - set(cache.removed) | set(cache.stored)
        for key in cache.ssd_stored:
            ssd.add(key)
        ssd -= {key for key in cache.ssd_removed if not cache.num_on_ssd([key])}
        cache.stored, cache.removed, cache.ssd_stored, cache.ssd_removed = [], [], [], []
        assert {key for key in range(1, 13) if cache.match([key])} >= memory - set(keys)
        assert {key for key in range(1, 13) if cache.num_on_ssd([key])} == ssd
    cache.check()

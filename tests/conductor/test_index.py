"""The index answers like a plain search over sets, whatever the order of events."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake.conductor.index import PrefixIndex
from mooncake.prefix import BlockKey, block_hashes, root_hash, short_key
from mooncake.types import Tier

PROMPT = [short_key(one) for one in block_hashes(range(128), 16, root_hash())]


@pytest.fixture
def index() -> Iterator[PrefixIndex]:
    index = PrefixIndex()
    yield index
    index.check()


def test_longest_prefix_per_instance(index: PrefixIndex) -> None:
    index.store("a", PROMPT[:3])
    index.store("b", PROMPT)
    index.store("c", PROMPT[1:])  # holds everything but the first block: no prefix
    assert index.matches(PROMPT) == {"a": 3, "b": 8}
    assert index.matches([]) == {}


def test_a_block_on_two_tiers_leaves_with_the_second(index: PrefixIndex) -> None:
    index.store("a", PROMPT[:1], Tier.DEVICE)
    index.store("a", PROMPT[:1], Tier.MEMORY)
    index.remove("a", PROMPT[:1], Tier.DEVICE)
    assert index.matches(PROMPT) == {"a": 1}
    index.remove("a", PROMPT[:1], Tier.MEMORY)
    assert index.matches(PROMPT) == {}
    assert index.num_blocks == 0


def test_clear_forgets_one_instance_and_frees_its_place(index: PrefixIndex) -> None:
    index.store("a", PROMPT)
    index.store("b", PROMPT[:2])
    assert index.clear("a") == 8
    assert index.matches(PROMPT) == {"b": 2}
    index.store("c", PROMPT[:5])
    assert index.matches(PROMPT) == {"b": 2, "c": 5}
    assert index.clear("nobody") == 0


BLOCKS = [*range(6)]
step = st.tuples(
    st.sampled_from(["store", "remove", "clear"]),
    st.sampled_from(["a", "b", "c"]),
    st.lists(st.sampled_from(BLOCKS), max_size=4),
    st.sampled_from(list(Tier)),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(step, max_size=25))
def test_equals_a_search_over_sets(steps: list[tuple[str, str, list[BlockKey], Tier]]) -> None:
    index = PrefixIndex()
    truth: dict[tuple[str, BlockKey], set[Tier]] = {}
    for action, instance, blocks, tier in steps:
        if action == "store":
            index.store(instance, blocks, tier)
        elif action == "remove":
            index.remove(instance, blocks, tier)
        else:
            index.clear(instance)
        for block in BLOCKS if action == "clear" else blocks:
            tiers = truth.setdefault((instance, block), set())
            if action == "store":
                tiers.add(tier)
            elif action == "remove":
                tiers.discard(tier)
            else:
                tiers.clear()
        index.check()
    expected = {}
    for instance in "abc":
        length = 0
        while length < len(BLOCKS) and truth.get((instance, BLOCKS[length])):
            length += 1
        if length:
            expected[instance] = length
    assert index.matches(BLOCKS) == expected

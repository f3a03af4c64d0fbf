# SPDX-License-Identifier: Apache-2.0
"""A block is in use, cached or blank, and never two of these, after any sequence of operations."""

from __future__ import annotations

from random import Random

import pytest

from mooncake.inference.blocks import BlockPool, PoolBlocksRemoved, PoolBlocksStored
from mooncake.prefix import BlockHash, block_hashes, root_hash

BLOCK = 4
ROOT = root_hash()


def tokens_of(num_blocks: int, seed: int = 0) -> list[int]:
    return [seed * 1000 + index for index in range(num_blocks * BLOCK)]


def fill(pool: BlockPool[BlockHash], tokens: list[int]) -> tuple[list[int], list[BlockHash]]:
    """Allocate and publish blocks for ``tokens``; they stay in use."""
    blocks = pool.allocate(len(tokens) // BLOCK)
    assert blocks is not None
    hashes = block_hashes(tokens, BLOCK, ROOT)
    pool.publish(blocks, hashes, ROOT, tokens)
    return blocks, hashes


def test_freed_prefix_is_found_again_until_evicted() -> None:
    pool: BlockPool[BlockHash] = BlockPool(6, BLOCK)
    blocks, hashes = fill(pool, tokens_of(3))
    pool.free(blocks)
    assert pool.match(hashes) == blocks and pool.num_free == 5
    pool.check()
    # two blanks are left; the third block evicts the tail of the prefix, whose head stays useful
    taken = pool.allocate(3)
    assert taken is not None
    assert pool.match(hashes) == blocks[:2]
    assert pool.drain_events() == [
        PoolBlocksStored(tuple(hashes), ROOT, tuple(tokens_of(3))),
        PoolBlocksRemoved((hashes[2],)),
    ]
    pool.check()


def test_touched_blocks_are_not_evicted() -> None:
    pool: BlockPool[BlockHash] = BlockPool(4, BLOCK)
    blocks, hashes = fill(pool, tokens_of(2))
    pool.free(blocks)
    pool.touch(pool.match(hashes))
    assert pool.num_free == 1 and pool.allocate(2) is None
    assert pool.match(hashes) == blocks
    pool.check()


def test_least_recently_used_goes_first() -> None:
    pool: BlockPool[BlockHash] = BlockPool(4, BLOCK)
    prefixes = [fill(pool, tokens_of(1, seed)) for seed in range(3)]
    for blocks, _ in prefixes:
        pool.free(blocks)
    pool.touch(prefixes[0][0])
    pool.free(prefixes[0][0])
    pool.allocate(1)
    assert [bool(pool.match(hashes)) for _, hashes in prefixes] == [True, False, True]


def test_duplicates_keep_the_first_block() -> None:
    pool: BlockPool[BlockHash] = BlockPool(6, BLOCK)
    first, hashes = fill(pool, tokens_of(2))
    second, _ = fill(pool, tokens_of(2))
    assert pool.match(hashes) == first and len(pool.drain_events()) == 1
    pool.free(second)
    pool.check()
    assert pool.match(hashes) == first


def test_half_duplicate_is_announced_from_its_own_parent() -> None:
    pool: BlockPool[BlockHash] = BlockPool(8, BLOCK)
    fill(pool, tokens_of(1))
    pool.drain_events()
    longer = tokens_of(1) + tokens_of(1, 7)
    _, hashes = fill(pool, longer)
    assert pool.drain_events() == [PoolBlocksStored((hashes[1],), hashes[0], tuple(longer[BLOCK:]))]


def test_blocks_are_consecutive_and_leave_room_to_grow() -> None:
    pool: BlockPool[BlockHash] = BlockPool(32, BLOCK)
    first = pool.allocate(3, headroom=2)
    second = pool.allocate(3, headroom=2)
    assert (first, second) == ([1, 2, 3], [6, 7, 8])
    assert pool.allocate(1, after=3) == [4] and pool.allocate(1, after=8) == [9]
    pool.check()
    taken = pool.allocate(pool.num_free)
    assert taken is not None and len(set(taken)) == len(taken)  # headroom is not a reservation


def test_freeing_too_often_is_a_programming_error() -> None:
    pool: BlockPool[BlockHash] = BlockPool(3, BLOCK)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.free(blocks)
    with pytest.raises(AssertionError, match="freed more often"):
        pool.free(blocks)


@pytest.mark.parametrize("seed", range(20))
def test_random_use_keeps_the_invariants(seed: int) -> None:
    random = Random(seed)
    pool: BlockPool[BlockHash] = BlockPool(12, BLOCK)
    held: list[list[int]] = []
    for _ in range(300):
        tokens = tokens_of(random.randint(1, 4), random.randint(0, 5))
        hashes = block_hashes(tokens, BLOCK, ROOT)
        if held and random.random() < 0.5:
            pool.free(held.pop(random.randrange(len(held))))
        else:
            found = pool.match(hashes)
            pool.touch(found)
            fresh = pool.allocate(
                len(hashes) - len(found), found[-1] if found else None, random.randint(0, 3)
            )
            if fresh is None:
                pool.free(found)
            else:
                first = len(found)
                parent = hashes[first - 1] if first else ROOT
                if random.random() < 0.8:
                    pool.publish(fresh, hashes[first:], parent, tokens[first * BLOCK :])
                held.append(found + fresh)
        pool.check()
    for blocks in held:
        pool.free(blocks)
    assert pool.num_free == pool.num_usable
    # the events, applied in order, give exactly what is indexed
    known: dict[BlockHash, None] = {}
    for event in pool.drain_events():
        for block_hash in event.hashes:
            if isinstance(event, PoolBlocksStored):
                assert block_hash not in known
                known[block_hash] = None
            else:
                del known[block_hash]
    assert len(known) == pool.num_cached and all(pool.match([block_hash]) for block_hash in known)


def test_a_cleared_pool_finds_nothing_and_has_all_blocks() -> None:
    pool: BlockPool[bytes] = BlockPool(6, 4)
    blocks = pool.allocate(3)
    assert blocks is not None
    pool.publish(blocks, [b"a", b"b", b"c"], b"")
    with pytest.raises(AssertionError, match="in use"):
        pool.clear()
    pool.free(blocks)
    pool.drain_events()
    pool.clear()
    pool.check()
    assert pool.match([b"a"]) == [] and pool.num_cached == 0 and pool.num_free == 5
    assert pool.drain_events() == [PoolBlocksRemoved((b"a", b"b", b"c"))]
    again = pool.allocate(5)
    assert again is not None
    pool.publish(again[:1], [b"a"], b"")
    pool.free(again)
    pool.check()
    assert len(pool.match([b"a"])) == 1

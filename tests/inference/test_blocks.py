# SPDX-License-Identifier: Apache-2.0
"""A block is in use, cached or blank, and never two of these, after any sequence of operations."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from mooncake.inference.blocks import CLEARED, BlockColumn, BlockPool, PoolBlocksRemoved, PoolBlocksStored
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
    assert pool.drain_events() == [PoolBlocksRemoved((b"a", b"b", b"c"), CLEARED)]
    again = pool.allocate(5)
    assert again is not None
    pool.publish(again[:1], [b"a"], b"")
    pool.free(again)
    pool.check()
    assert len(pool.match([b"a"])) == 1


def use_as_list(pool: BlockPool[int], keys: list[int]) -> list[int]:
    """Use a prompt: its cached blocks and new ones for the rest, as far as there is room."""
    found = pool.match(keys)
    pool.touch(found)
    rest = keys[len(found) :]
    fresh = pool.allocate(min(len(rest), pool.num_free))
    assert fresh is not None
    pool.publish(fresh, rest[: len(fresh)], 0)
    return found + fresh


def use_as_column(pool: BlockPool[int], keys: list[int]) -> BlockColumn:
    found = pool.match_column(keys)
    pool.touch(found)
    rest = keys[len(found) :]
    fresh = pool.allocate(min(len(rest), pool.num_free))
    assert fresh is not None
    pool.publish(fresh, rest[: len(fresh)], 0)
    return np.append(found, np.array(fresh, np.int64))


@pytest.mark.parametrize("seed", range(20))
def test_columns_and_paths_give_the_same_as_lists(seed: int) -> None:
    random = Random(seed)
    lists, columns = (BlockPool[int](200, BLOCK) for _ in range(2))
    lengths = [random.randint(1, 40) for _ in range(8)]
    held: list[tuple[list[int], list[int], BlockColumn]] = []
    num_along = num_forgotten = 0
    for _ in range(400):
        if held and random.random() < 0.5:
            keys, ids, column = held.pop(random.randrange(len(held)))
            lists.free(ids)
            columns.free(column)
            columns.remember(keys[: len(column)], column)
        else:
            session = random.randrange(len(lengths))
            lengths[session] = lengths[session] + random.randint(0, 6) if lengths[session] < 70 else 10
            num_common = random.choice([0, 5])  # branches off a path that another session has
            keys = [*range(num_common), *(1000 * (session + 1) + at for at in range(lengths[session]))]
            if random.random() < 0.1:  # a part of a prompt, as for a transfer
                keys = keys[len(keys) // 2 :]
            num_along += any(key in columns._paths for key in keys[-16:])
            ids, column = use_as_list(lists, keys), use_as_column(columns, keys)
            assert column.tolist() == ids
            held.append((keys, ids, column))
        events = lists.drain_events()
        assert columns.drain_events() == events
        num_forgotten += sum(isinstance(event, PoolBlocksRemoved) for event in events)
        assert columns.num_free == lists.num_free
        lists.check()
        columns.check()
    assert num_along > 20 and num_forgotten > 20, (num_along, num_forgotten)


def test_a_path_with_an_evicted_block_is_no_longer_followed() -> None:
    pool: BlockPool[int] = BlockPool(7, BLOCK)
    keys = [10, 11, 12, 13]
    column = use_as_column(pool, keys)
    pool.free(column)
    pool.remember(keys, column)
    assert pool.match_column([*keys, 14]).tolist() == column.tolist()
    other = use_as_column(pool, [20, 21, 22])  # two blanks, and the last block of the path
    assert pool.match_column(keys).tolist() == column[:3].tolist()
    pool.free(other)
    pool.check()


def test_a_prompt_with_a_block_that_is_not_indexed_is_no_path() -> None:
    pool: BlockPool[int] = BlockPool(9, BLOCK)
    first = use_as_column(pool, [10, 11])
    duplicates = pool.allocate(2)
    assert duplicates is not None
    pool.publish(duplicates, [10, 11], 0)
    pool.remember([10, 11], np.array(duplicates, np.int64))
    assert pool.match_column([10, 11]).tolist() == first.tolist()
    pool.free(np.array(duplicates, np.int64))
    pool.check()
    assert pool.num_free == 6


def test_a_column_freed_too_often_is_a_programming_error() -> None:
    pool: BlockPool[int] = BlockPool(9, BLOCK)
    column = use_as_column(pool, [10, 11])
    pool.free(column)
    with pytest.raises(AssertionError, match="freed more often"):
        pool.free(column)

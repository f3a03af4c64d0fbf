# SPDX-License-Identifier: Apache-2.0
"""The table behaves like a dictionary, also when buckets overflow and while it grows."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from mooncake.conductor.key_table import KeyTable, key_column


def put(table: KeyTable, entries: dict[int, int]) -> None:
    found = table.find(key_column(entries))
    table.put(found, np.fromiter(entries.values(), found.values.dtype))


def get(table: KeyTable, *keys: int) -> list[int]:
    values: list[int] = table.find(np.array(keys, np.uint64)).values.tolist()
    return values


@pytest.mark.parametrize("seed", range(3))
def test_equals_a_dictionary(seed: int) -> None:
    random = Random(seed)
    table, truth = KeyTable(), dict[int, int]()
    keys = [random.getrandbits(64) for _ in range(6000)]
    for _ in range(120):
        some = random.sample(keys, random.choice([1, 3, 40, 500]))
        entries = {key: random.choice([0, 1, 2, 1 << 31]) for key in some}
        put(table, entries)
        truth |= entries
        table.check()
        queried = random.sample(keys, 300)
        assert get(table, *queried) == [truth.get(key, 0) for key in queried], f"seed {seed}"
    assert len(table) == sum(value > 0 for value in truth.values())


def test_keys_of_one_bucket_are_all_found() -> None:
    table = KeyTable()
    inverse = pow(0x9E3779B97F4A7C15, -1, 1 << 64)
    same = [number * inverse % (1 << 64) for number in range(1, 30)]  # their mixes are 1, 2, 3, ...
    put(table, dict.fromkeys(same, 7))
    table.check()
    assert get(table, *same, same[0] ^ 1) == [7] * 29 + [0]
    put(table, dict.fromkeys(same[::2], 0))
    table.check()
    assert get(table, *same[:4]) == [0, 7, 0, 7]
    for start in range(1, 4000, 100):  # grows now, with what did not fit
        put(table, dict.fromkeys(range(start << 40, (start + 100) << 40, 1 << 40), 1))
    table.check()
    assert get(table, *same[:4]) == [0, 7, 0, 7]


def test_a_key_may_be_0_or_the_largest() -> None:
    table = KeyTable(np.uint64)
    put(table, {0: 1, 2**64 - 1: 2**64 - 1})
    assert get(table, 0, 2**64 - 1, 1) == [1, 2**64 - 1, 0]
    assert table.counts() == {1: 1, 2**64 - 1: 1}


def test_counted_keys_fit_into_their_buckets_as_random_ones_do() -> None:
    """A simulation's keys: a number of the session, and within it one of the block."""
    sessions = np.arange(51, 8051, dtype=np.uint64)
    blocks = np.arange(39, 135, dtype=np.uint64)
    counted = np.concatenate([(session << np.uint64(20)) + blocks for session in sessions]).astype(np.uint64)
    hashes = np.random.default_rng(0).integers(1, 1 << 63, len(counted), dtype=np.uint64)
    largest_shares = []
    for keys in (counted, hashes):
        table, largest = KeyTable(), 0.0
        for part in np.split(keys, 200):
            table.put(table.find(part), np.ones(len(part), np.uint32))
            largest = max(largest, len(table._overflow) / len(table))
        largest_shares.append(largest)
    assert largest_shares[0] <= largest_shares[1], largest_shares

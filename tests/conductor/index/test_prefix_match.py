# SPDX-License-Identifier: Apache-2.0
"""The match by few runs, by many, and a plain search agree."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake.conductor.index import prefix_match
from mooncake.conductor.index.holder_sets import HolderSets, Masks
from mooncake.conductor.index.prefix_index import PrefixIndex
from mooncake.types import Tier

NUM_SLOTS = 128
bits = st.sets(st.sampled_from([0, 1, 2, 5, 63, 64, 99, 127]))
all_slots = st.just(set(range(100)))
holders = st.tuples(bits | all_slots, bits, bits)


def masks_of(sets: tuple[set[int], set[int], set[int]]) -> Masks:
    device, memory, ssd = (sum(1 << slot for slot in slots) for slots in sets)
    return device, memory, ssd


@settings(deadline=None)
@given(st.lists(holders, min_size=1, max_size=40))
def test_both_ways_equal_a_plain_search(prompt: list[tuple[set[int], set[int], set[int]]]) -> None:
    known = HolderSets()
    rows = np.array([known.move(0, masks_of(sets), 1) for sets in prompt], np.uint32)
    ends = np.arange(len(rows), dtype=np.int64) + 1
    few = prefix_match._match_few(known, rows.tolist(), ends.tolist(), NUM_SLOTS)
    many = prefix_match._match_many(known.reach(rows, NUM_SLOTS >> 6), ends)
    for level in range(2):
        plain = np.zeros(NUM_SLOTS, np.int64)
        for slot in range(NUM_SLOTS):
            held = [any(slot in tier for tier in sets[: level + 2]) for sets in prompt]
            plain[slot] = [*held, False].index(False)
        assert (few[level] == plain).all() and (many[level] == plain).all()
    for slot in (0, 64, 127):
        tiers = [sum((slot in tier) << bit for bit, tier in enumerate(sets)) for sets in prompt]
        assert known.tiers(rows, slot, NUM_SLOTS >> 6).tolist() == tiers


@pytest.fixture
def index() -> PrefixIndex:
    """Instance n has n + 1 of a prompt's 200 blocks, the last ones on another tier."""
    index = PrefixIndex()
    for number in range(100):
        index.store(f"i{number}", range(1, number + 2), Tier.MEMORY)
        index.store(f"i{number}", range(number + 2, number + 4), Tier.SSD)
    return index


def test_each_instance_drops_out_at_another_block(index: PrefixIndex) -> None:
    found = index.match(range(1, 201))
    assert found.leading_memory[:100].tolist() == [number + 1 for number in range(100)]
    assert found.leading[:100].tolist() == [number + 3 for number in range(100)]
    assert found.num_held == 102
    assert list(found.tiers_of(7)) == [2] * 8 + [4] * 2 + [0] * 190


def test_unpacked_rows_are_forgotten_with_their_row(index: PrefixIndex) -> None:
    index.match(range(1, 201))
    index.store("i0", range(1, 201))
    index.remove("i5", range(1, 201), Tier.MEMORY)
    index.store("one more", [3])
    found = index.match(range(1, 201))
    assert found.leading[:7].tolist() == [200, 4, 5, 6, 7, 0, 9]
    assert set(found.tiers_of(0)[3:]) == {1}


def test_more_rows_than_are_kept_unpacked(index: PrefixIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mooncake.conductor.index.holder_sets._UNPACKED", 40)
    for first in (1, 30, 60, 1):
        found = index.match(range(first, first + 31))
        assert found.leading[90] == 31
        assert found.leading[first + 5] == min(31, 9)
    assert index.match(range(1, 201)).leading[99] == 102


def test_slots_grow_beyond_the_unpacked_words(index: PrefixIndex) -> None:
    index.match(range(1, 201))
    for number in range(200):
        index.store(f"later {number}", range(1, 3))
    found = index.match(range(1, 201))
    assert len(found.leading) == 512
    assert found.leading[index.slot("later 199")] == 2 and found.leading[99] == 102

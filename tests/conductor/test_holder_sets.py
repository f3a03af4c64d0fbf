# SPDX-License-Identifier: Apache-2.0
"""Sets shared by many blocks: kept while a block points to them, and found again."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from mooncake.conductor.holder_sets import NO_HOLDERS, HolderSets, Masks, with_plane, without_slot


def test_a_set_is_kept_as_long_as_a_block_points_to_it() -> None:
    sets = HolderSets()
    one = sets.move(NO_HOLDERS, (1, 0, 0), 3)
    assert sets.move(NO_HOLDERS, (1, 0, 0), 2) == one and len(sets) == 1
    two = sets.move(one, (1, 2, 0), 5)
    assert len(sets) == 1 and sets.masks(two) == (1, 2, 0), "no block points to the first set now"
    sets.check({two: 5})
    assert sets.move(two, (0, 0, 0), 5) == NO_HOLDERS
    assert len(sets) == 0
    sets.check({})


def test_a_row_that_is_free_is_given_to_the_next_set() -> None:
    sets = HolderSets()
    first = sets.move(NO_HOLDERS, (1, 0, 0), 1)
    rows = np.array([first], np.int64)
    assert sets.reach(rows, 1).tolist() == [[[1], [1]]]
    sets.move(first, (0, 0, 0), 1)
    again = sets.move(NO_HOLDERS, (0, 0, 4), 1)
    assert again == first
    assert sets.reach(rows, 1).tolist() == [[[0], [4]]], "not what the row held before"
    assert list(sets.tiers(rows, 2, 1)) == [4]


@pytest.mark.parametrize("num_rows", [3, 100])
def test_bits_are_those_of_the_masks_for_any_number_of_rows(num_rows: int) -> None:
    """Few rows are processed as integers, many as a matrix."""
    random = Random(num_rows)
    sets = HolderSets()
    masks: dict[int, Masks] = {}
    while len(masks) < num_rows:
        drawn = (random.getrandbits(128), random.getrandbits(128), random.getrandbits(128))
        masks[sets.move(NO_HOLDERS, drawn, 1)] = drawn
    rows = np.array(list(masks), np.int64)
    for slot in (0, 63, 64, 127):
        expected = [sum((mask >> slot & 1) << at for at, mask in enumerate(one)) for one in masks.values()]
        assert list(sets.tiers(rows, slot, 2)) == expected
        assert list(sets.rows_with(slot, rows)) == [bool(tiers) for tiers in expected]
    near, anywhere = sets.reach(rows, 2).swapaxes(0, 1)
    for at, (device, memory, ssd) in enumerate(masks.values()):
        assert int.from_bytes(near[at].tobytes(), "little") == device | memory
        assert int.from_bytes(anywhere[at].tobytes(), "little") == device | memory | ssd
    sets.check(dict.fromkeys(masks, 1))


def test_masks_are_changed_one_slot_or_one_tier_at_a_time() -> None:
    assert without_slot((0b111, 0b010, 0b100), 1) == (0b101, 0, 0b100)
    assert [with_plane((1, 2, 4), plane, 8) for plane in range(3)] == [(8, 2, 4), (1, 8, 4), (1, 2, 8)]

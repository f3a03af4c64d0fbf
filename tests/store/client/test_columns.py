# SPDX-License-Identifier: Apache-2.0
"""Slices as columns: cut at chunks, checked against their objects. The reference is a loop over bytes."""

from __future__ import annotations

import dataclasses
from random import Random

import numpy as np
import pytest

from mooncake.errors import InvalidArgument
from mooncake.store.client.columns import (
    SliceColumns,
    check_bounds,
    check_whole_chunks,
    columns_of,
    distinct,
    whole,
)


@dataclasses.dataclass
class Grant:
    key: str
    size_bytes: int
    chunk_bytes: int


def rows(columns: SliceColumns) -> list[tuple[int, int, int, int]]:
    parts = (columns.grant, columns.offset, columns.local, columns.length)
    return list(zip(*(part.tolist() for part in parts), strict=True))


def moved(columns: SliceColumns) -> dict[tuple[int, int], int]:
    """Map of each byte: (grant, offset in its object) -> local address."""
    found: dict[tuple[int, int], int] = {}
    for grant, offset, local, length in rows(columns):
        for at in range(length):
            assert (grant, offset + at) not in found
            found[grant, offset + at] = local + at
    return found


@pytest.mark.parametrize("seed", range(30))
def test_cutting_moves_the_same_bytes_and_crosses_no_border(seed: int) -> None:
    random = Random(seed)
    grants = [Grant(f"k{i}", random.randint(1, 40), random.randint(1, 15)) for i in range(4)]
    offsets, lengths = [], []
    for grant in grants:
        first = random.randint(0, grant.size_bytes)
        second = random.randint(first, grant.size_bytes)
        offsets += [first, second]
        lengths += [second - first, grant.size_bytes - second]
    local = [1000 * (number + 1) for number in range(len(offsets))]
    columns = columns_of(grants, offsets, local, lengths)
    check_bounds(grants, columns)
    cut = columns.cut_at_chunks(grants)
    assert moved(cut) == moved(columns)
    for number, offset, _, length in rows(cut):
        chunk = grants[number].chunk_bytes
        assert length and offset // chunk == (offset + length - 1) // chunk


def test_whole_objects() -> None:
    small, large = Grant("s", 5, 5), Grant("l", 25, 10)
    assert rows(whole([small], [100])) == [(0, 0, 100, 5)]
    assert rows(whole([small, large], [100, 200])) == [
        (0, 0, 100, 5),
        (1, 0, 200, 10),
        (1, 10, 210, 10),
        (1, 20, 220, 5),
    ]
    check_whole_chunks([small, large], whole([small, large], [100, 200]))


def test_filtering_joining_and_renumbering() -> None:
    columns = whole([Grant("a", 4, 4), Grant("b", 4, 4), Grant("c", 4, 4)], [0, 10, 20])
    assert columns.only([True] * 3) is columns
    some = columns.only([True, False, True])
    assert [row[0] for row in rows(some)] == [0, 2]
    assert [row[0] for row in rows(some.renumbered(np.array([7, 8, 9])))] == [7, 9]
    assert rows(SliceColumns.joined([some, columns])) == rows(some) + rows(columns)
    assert rows(SliceColumns.joined([])) == []
    assert distinct(np.array([2, 0, 2, 1])) == [2, 0, 1]


def test_columns_of_unequal_length_are_refused() -> None:
    grants = [Grant("a", 4, 4), Grant("b", 4, 4)]
    for columns in (([0], [0], [4]), ([0, 0], [0], [4, 4]), ([0] * 3, [0] * 3, [4] * 3)):
        with pytest.raises(InvalidArgument, match="columns"):
            columns_of(grants, *columns)
    assert rows(columns_of([], [], [], [])) == []


@pytest.mark.parametrize(
    ("offset", "length"), [(0, 11), (10, 1), (11, 0), (1 << 63, 1 << 63), (5, (1 << 64) - 1)]
)
def test_a_range_beyond_its_object_is_refused(offset: int, length: int) -> None:
    grants = [Grant("k", 10, 4)]
    columns = columns_of(
        grants, np.array([offset], dtype=np.uint64), [0], np.array([length], dtype=np.uint64)
    )
    with pytest.raises(InvalidArgument, match="'k'"):
        check_bounds(grants, columns)


@pytest.mark.parametrize(
    ("slices", "is_whole"),
    [
        ([(0, 10), (10, 10), (20, 5)], True),
        ([(0, 3), (3, 7)], True),
        ([(3, 7), (0, 3)], True),
        ([(20, 2), (22, 3)], True),
        ([(0, 9)], False),
        ([(1, 9)], False),
        ([(0, 5), (4, 6)], False),
        ([(0, 4), (5, 5)], False),
        ([(20, 4)], False),
    ],
)
def test_only_whole_chunks_can_be_verified(slices: list[tuple[int, int]], is_whole: bool) -> None:
    grants = [Grant("k", 25, 10)]
    offsets, lengths = zip(*slices, strict=True)
    columns = SliceColumns(
        np.zeros(len(slices), dtype=np.intp),
        np.array(offsets, dtype=np.uint64),
        np.arange(len(slices), dtype=np.uint64) * 100,
        np.array(lengths, dtype=np.uint64),
    )
    if is_whole:
        check_whole_chunks(grants, columns)
    else:
        with pytest.raises(InvalidArgument, match="whole chunks of 10 bytes"):
            check_whole_chunks(grants, columns)

"""Slices are cut at the borders of chunks, byte for byte, and refused where they leave their object."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake.errors import InvalidArgument
from mooncake.store.columns import Columns, check_bounds, check_whole_chunks, columns_of, distinct, whole


@dataclasses.dataclass(frozen=True)
class Object:
    key: str
    size_bytes: int
    chunk_bytes: int


AB = [Object("a", 250, 100), Object("b", 90, 100)]


def bytes_of(columns: Columns) -> dict[tuple[int, int], int]:
    """(grant, offset) to local address, byte by byte."""
    found: dict[tuple[int, int], int] = {}
    rows = zip(columns.grant, columns.offset, columns.local, columns.length, strict=True)
    for grant, offset, local, length in rows:
        for at in range(int(length)):
            assert (int(grant), int(offset) + at) not in found, "a byte twice"
            found[int(grant), int(offset) + at] = int(local) + at
    return found


def test_whole_objects_are_cut_at_their_chunks() -> None:
    columns = whole(AB, [1000, 5000])
    assert columns.grant.tolist() == [0, 0, 0, 1]
    assert columns.offset.tolist() == [0, 100, 200, 0]
    assert columns.local.tolist() == [1000, 1100, 1200, 5000]
    assert columns.length.tolist() == [100, 100, 50, 90]


@given(st.lists(st.tuples(st.integers(0, 240), st.integers(0, 60)), max_size=6), st.integers(1, 130))
def test_cutting_moves_no_byte(ranges: list[tuple[int, int]], chunk_bytes: int) -> None:
    grants = [Object("a", 300, chunk_bytes)]
    spread = [(offset + 400 * at, length) for at, (offset, length) in enumerate(ranges)]
    columns = columns_of(
        grants * max(1, len(spread)) if not spread else grants,
        [offset for offset, _ in spread],
        [7 + offset for offset, _ in spread],
        [length for _, length in spread],
    )
    cut = columns.cut_at_chunks(grants)
    assert bytes_of(cut) == bytes_of(columns)
    first, last = cut.offset // chunk_bytes, (cut.offset + cut.length - np.uint64(1)) // chunk_bytes
    assert (first == last).all() and cut.length.all()


def test_slices_belong_to_the_grants_in_turn() -> None:
    columns = columns_of(AB, [0, 10, 0, 10], [1, 2, 3, 4], [5, 5, 5, 5])
    assert columns.grant.tolist() == [0, 0, 1, 1]
    only = columns.only([False, True])
    assert only.grant.tolist() == [1, 1] and only.local.tolist() == [3, 4]
    assert columns.only([True, True]) is columns
    assert only.renumbered(np.array([9, 4])).grant.tolist() == [4, 4]
    joined = Columns.joined([only, columns])
    assert joined.local.tolist() == [3, 4, 1, 2, 3, 4]
    assert len(Columns.joined([]).grant) == 0
    assert distinct(joined.grant) == [1, 0]


@pytest.mark.parametrize(("offsets", "lengths"), [([0, 0, 0], [1, 1, 1]), ([0, 0], [1]), ([0], [1])])
def test_columns_that_do_not_fit_together_are_refused(offsets: list[int], lengths: list[int]) -> None:
    with pytest.raises(InvalidArgument, match="columns"):
        columns_of(AB, offsets, [0] * len(offsets), lengths)


@pytest.mark.parametrize(("offset", "length"), [(0, 91), (91, 0), (90, 1), (2**63, 2**63), (1, 2**64 - 1)])
def test_a_range_beyond_its_object_is_named(offset: int, length: int) -> None:
    columns = columns_of(AB[1:], np.array([offset], np.uint64), [0], np.array([length], np.uint64))
    with pytest.raises(InvalidArgument, match="range of 'b'"):
        check_bounds(AB[1:], columns)
    check_bounds(AB[1:], columns_of(AB[1:], [90], [0], [0]))
    check_bounds(AB[1:], columns_of(AB[1:], [0], [0], [90]))


def test_chunks_are_read_whole_in_any_number_of_pieces() -> None:
    """Half a chunk has no checksum."""
    check_whole_chunks(AB, whole(AB, [0, 0]))
    check_whole_chunks(AB[:1], columns_of(AB[:1], [230, 200], [0, 0], [20, 30]))
    for offsets, lengths in (([200], [49]), ([200, 220], [30, 30]), ([200, 200], [25, 25]), ([210], [40])):
        with pytest.raises(InvalidArgument, match="whole chunks of 100 bytes"):
            check_whole_chunks(AB[:1], columns_of(AB[:1], offsets, [0] * len(offsets), lengths))

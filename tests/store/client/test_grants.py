# SPDX-License-Identifier: Apache-2.0
"""Grants: outcome of a put, replica by replica; order in which a reader tries replicas; slices of objects.

Slices are cut at chunks and checked against their objects; the reference is a loop over bytes.
"""

from __future__ import annotations

import dataclasses
from random import Random
from typing import Any

import numpy as np
import pytest

from mooncake.errors import InvalidArgument, Refusal
from mooncake.store import messages as m
from mooncake.store.client.grants import (
    PutGrant,
    PutTarget,
    ReadGrant,
    SliceColumns,
    check_bounds,
    check_whole_chunks,
    columns_of,
    distinct,
    peer_lost,
    put_grant,
    whole_objects,
)

LOST = Refusal("peer_lost", "gone")


def put(
    *segments: str, size_bytes: int = 25, chunk_bytes: int = 10, closed: tuple[str, ...] = ()
) -> PutGrant:
    replicas = [m.Replica(name, 1, 1000 * number) for number, name in enumerate(segments)]
    handles = {name: None if name in closed else f"handle of {name}" for name in segments}
    return put_grant("k", size_bytes, chunk_bytes, m.Reserved(7, replicas), 30.0, handles)


def write(target: PutTarget, *sums: int) -> None:
    target.checksums[:], target.is_written[:] = sums, True


def test_a_put_has_room_for_the_checksum_of_every_chunk() -> None:
    grant = put("a")
    assert (len(grant.checksums), grant.address, grant.segment, grant.failure) == (3, 0, "handle of a", None)
    assert [target.is_complete for target in grant.targets] == [False]
    write(grant.lead, 1, 2, 3)
    assert [target.is_complete for target in grant.targets] == [True]
    assert grant.settle() == [] and grant.failure is None


@pytest.mark.parametrize("order", ["forward", "backward", "shuffled"])
def test_a_chunk_in_many_parts_is_joined_once(order: str) -> None:
    """Joined after each part, thousands of them would take minutes."""
    num_parts, num_joins = 500, 0

    def combine(first: int, second: int, length: int) -> int:
        nonlocal num_joins
        num_joins += 1
        return first * int(31**length) + second

    def checksum(start: int, end: int) -> int:
        whole = 0
        for number in range(start, end):
            whole = whole * 31**3 + number
        return whole

    target = put("a", size_bytes=3 * num_parts, chunk_bytes=3 * num_parts).targets[0]
    target.checksums = np.zeros(1, dtype=object)  # the whole numbers of this test
    parts = list(range(num_parts))
    if order == "backward":
        parts.reverse()
    if order == "shuffled":
        Random(7).shuffle(parts)
    for number in parts[:-1]:
        target.wrote(3 * number, 3, number)
        target.join(combine)
    assert (target.is_complete, num_joins) == (False, 0)
    target.wrote(3 * parts[-1], 3, parts[-1])
    for number in parts[:100]:  # again
        target.wrote(3 * number, 3, number)
    target.join(combine)
    assert (target.is_complete, num_joins) == (True, num_parts - 1)
    assert target.checksums[0] == checksum(0, num_parts)
    target.wrote(2, 3, 0)
    target.join(combine)
    assert not target.is_complete, "a part of each of two others is unknown now"


def test_a_partly_written_put_is_incomplete() -> None:
    grant = put("a")
    grant.is_written[:2] = True
    assert grant.settle() == ["a"]
    assert (
        grant.failure is not None
        and grant.failure.code == "incomplete"
        and "1 chunks" in grant.failure.reason
    )


def test_a_replica_that_is_given_up_leaves_the_others() -> None:
    grant = put("a", "b")
    grant.give_up(grant.targets[0], LOST)
    assert grant.failure is None and grant.replica.segment == "b" and grant.address == 1000
    write(grant.lead, 1, 2, 3)
    assert grant.settle() == ["a"] and grant.failure is None
    grant.give_up(grant.targets[1], Refusal("expired", "late"))
    assert grant.failure == LOST, "the first reason"


def test_a_replica_that_cannot_be_opened_is_given_up_at_once() -> None:
    grant = put("a", "b", closed=("a",))
    assert grant.replica.segment == "b" and grant.failure is None
    alone = put("a", closed=("a",))
    assert alone.failure is not None and alone.failure.code == "peer_lost" and "'a'" in alone.failure.reason
    assert alone.lead is alone.targets[0]


def test_of_replicas_that_differ_the_announced_one_counts() -> None:
    grant = put("a", "b", "c")
    write(grant.targets[0], 1, 2, 3)
    write(grant.targets[1], 1, 2, 4)
    write(grant.targets[2], 1, 2, 3)
    assert grant.settle() == ["b"] and grant.failure is None
    assert grant.targets[1].failure is not None


def test_a_reader_tries_one_replica_after_the_other() -> None:
    replicas = [m.Replica(name, 1, 1000 * number) for number, name in enumerate("abc")]
    others = [(replica, f"handle of {replica.segment}") for replica in replicas[1:]]
    sums = np.zeros(1, dtype="<u4")
    grant = ReadGrant("k", 5, 5, "handle of a", 0, sums, 30.0, 7, replicas[0], list(others))
    assert [(one.address, one.segment, one.others) for one in grant.each()] == [
        (0, "handle of a", []),
        (1000, "handle of b", []),
        (2000, "handle of c", []),
    ]
    assert grant.turn_to_next() and (grant.address, grant.segment) == (1000, "handle of b")
    assert grant.turn_to_next() and grant.replica.segment == "c"
    assert not grant.turn_to_next() and grant.replica.segment == "c"


def test_the_reason_of_a_lost_peer_names_the_segment() -> None:
    refusal = peer_lost(m.Replica("a", 1, 0), "reset")
    assert refusal.code == "peer_lost" and "'a'" in refusal.reason and "reset" in refusal.reason


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
    assert rows(whole_objects([small], [100])) == [(0, 0, 100, 5)]
    assert rows(whole_objects([small, large], [100, 200])) == [
        (0, 0, 100, 5),
        (1, 0, 200, 10),
        (1, 10, 210, 10),
        (1, 20, 220, 5),
    ]
    check_whole_chunks([small, large], whole_objects([small, large], [100, 200]))


def test_filtering_joining_and_renumbering() -> None:
    columns = whole_objects([Grant("a", 4, 4), Grant("b", 4, 4), Grant("c", 4, 4)], [0, 10, 20])
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


@pytest.mark.parametrize("wrong", [[-1], [1.5], ["1"], np.array([-1]), np.array([1.0]), [1 << 64], "1"])
def test_columns_of_what_is_no_address_are_refused(wrong: Any) -> None:
    """As in a transfer; numpy would take another number in place of most of them."""
    grants = [Grant("k", 10, 4)]
    for columns in ((wrong, [0], [1]), ([0], wrong, [1]), ([0], [0], wrong)):
        with pytest.raises(InvalidArgument, match=r"columns.*integers of 0 to 2\*\*64 - 1"):
            columns_of(grants, *columns)
    pages = np.array([[0, 4], [0, 4]], dtype=np.int64)
    both = columns_of([Grant("k", 8, 4), Grant("l", 8, 4)], pages, pages + 100, np.full_like(pages, 4))
    assert rows(both) == [(0, 0, 100, 4), (0, 4, 104, 4), (1, 0, 100, 4), (1, 4, 104, 4)]


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

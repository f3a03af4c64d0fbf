# SPDX-License-Identifier: Apache-2.0
"""Outcome of a put, replica by replica; order in which a reader tries replicas."""

from __future__ import annotations

import numpy as np

from mooncake.errors import Refusal
from mooncake.store import messages as m
from mooncake.store.client.grants import PutGrant, PutTarget, ReadGrant, peer_lost, put_grant

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

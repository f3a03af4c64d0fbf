"""What a put comes to when some of its replicas could not be written, and what is read when one fails."""

from __future__ import annotations

import numpy as np

from mooncake.errors import Refusal
from mooncake.store import messages as m
from mooncake.store.grants import PutGrant, ReadGrant, Target, peer_lost, put_grant

LOST = Refusal("peer_lost", "gone")


def replica(name: str, address: int = 0) -> m.Replica:
    return m.Replica(name, 1, address)


def granted(*names: str, without: tuple[str, ...] = (), size_bytes: int = 250) -> PutGrant:
    reserved = m.Reserved(7, [replica(name, 1000 * at) for at, name in enumerate(names)])
    handles = {name: object() for name in names if name not in without}
    return put_grant("k", size_bytes, 100, reserved, 60.0, handles)


def write(target: Target, seed: int = 1) -> None:
    target.checksums[:] = np.arange(len(target.checksums)) + seed
    target.is_written[:] = True


def test_an_object_has_a_checksum_for_each_chunk_of_it() -> None:
    grant = granted("a", size_bytes=250)
    assert len(grant.checksums) == len(grant.is_written) == 3
    assert grant.address == 0 and not grant.targets[0].is_complete
    grant.is_written[:2] = True
    assert not grant.targets[0].is_complete
    grant.is_written[2] = True
    assert grant.targets[0].is_complete


def test_a_put_goes_on_without_a_replica_while_there_are_others() -> None:
    grant = granted("a", "b", without=("a",))
    assert grant.failure is None and grant.lead is grant.targets[1]
    assert grant.replica.segment == "b" and grant.address == 1000
    write(grant.targets[1])
    assert grant.settle() == ["a"] and grant.failure is None


def test_without_any_replica_it_fails_with_the_first_reason() -> None:
    grant = granted("a", "b", without=("a", "b"))
    assert grant.failure is not None and "'a' can't be reached: it can't be opened" in grant.failure.reason
    first = granted("a", "b")
    first.give_up(first.targets[0], LOST)
    first.give_up(first.targets[0], Refusal("later", "another"))
    assert first.failure is None and first.targets[0].failure == LOST
    first.give_up(first.targets[1], Refusal("later", "another"))
    assert first.failure == LOST


def test_what_was_not_written_is_no_object() -> None:
    grant = granted("a")
    grant.is_written[:2] = True
    assert grant.settle() == ["a"]
    assert grant.failure is not None and grant.failure.code == "incomplete"
    assert "1 chunks of 'k'" in grant.failure.reason
    whole = granted("a")
    write(whole.targets[0])
    assert whole.settle() == [] and whole.failure is None


def test_replicas_that_differ_are_left_out() -> None:
    """The source changed between two transfers: what is announced is what the first one holds."""
    grant = granted("a", "b", "c")
    for target, seed in zip(grant.targets, (1, 2, 1), strict=True):
        write(target, seed)
    assert grant.settle() == ["b"] and grant.failure is None
    assert grant.targets[1].failure is not None and grant.targets[1].failure.code == "incomplete"


def test_all_that_are_complete_and_alike_stay() -> None:
    grant = granted("a", "b")
    for target in grant.targets:
        write(target)
    assert grant.settle() == []


def reading() -> ReadGrant:
    others = [(replica("b", 20), "to b"), (replica("c", 30), None)]
    sums = np.zeros(1, dtype="<u4")
    return ReadGrant("k", 10, 10, "to a", 10, sums, 60.0, 7, replica("a", 10), others)


def test_the_next_replica_is_read_where_it_lies() -> None:
    grant = reading()
    assert grant.turn_to_next() and (grant.replica.segment, grant.segment, grant.address) == ("b", "to b", 20)
    assert grant.turn_to_next() and (grant.replica.segment, grant.segment, grant.address) == ("c", None, 30)
    assert not grant.turn_to_next() and grant.replica.segment == "c"


def test_each_replica_by_itself_leaves_the_grant_as_it_was() -> None:
    grant = reading()
    each = grant.each()
    assert [(one.replica.segment, one.address, one.others) for one in each] == [
        ("a", 10, []), ("b", 20, []), ("c", 30, [])
    ]  # fmt: skip
    assert all(one.expires_at == grant.expires_at and one.checksums is grant.checksums for one in each)
    assert len(grant.others) == 2


def test_a_lost_peer_is_named() -> None:
    assert peer_lost(replica("a"), "why").reason == "the node of segment 'a' can't be reached: why"

# SPDX-License-Identifier: Apache-2.0
"""Policies of a put: replicas, places, pins, durability, replacement; puts into preallocated space.

Times as in ``test_master.py``.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from mooncake.errors import Refusal
from mooncake.rpc.wire import Failure
from mooncake.store import messages as m
from mooncake.store.master.log_records import ObjectReadable, Record, SpaceHeld
from mooncake.store.master.master import Master
from mooncake.store.master.put import MAX_PIECE_BYTES, MAX_PIECES, PREALLOCATED_SHARE
from mooncake.store.master.snapshot import _without_kept
from mooncake.types import Tier
from tests.store.conftest import GRACE_S, LEASE_S, PUT_S, SETTINGS, Voice
from tests.store.nodes import SSD_BYTES, Nodes, Place, with_ssd

TWO = m.PutPolicy(num_replicas=2)
THREE = m.PutPolicy(num_replicas=3)
DURABLE = m.PutPolicy(is_durable=True)
POOL = 65536


def segments(reserved: m.Reserved | None) -> list[str]:
    assert reserved is not None
    return [replica.segment for replica in reserved.replicas]


def refusal_of(started: m.PutStarted) -> Refusal:
    assert started.reserved == [None]
    return started.refusals[0]


# Rows: many objects of one size


def addresses(started: m.PutStarted) -> list[int]:
    return [one.replicas[0].address for one in started.reserved if one is not None]


def test_objects_of_a_batch_lie_side_by_side(voice: Voice) -> None:
    """With one record for all; each is ended, aborted and expires alone."""
    voice.mount("a", POOL)
    num_records = len(voice.records)
    keys = [f"k{number}" for number in range(5)]
    started = voice.start(*keys)
    first = addresses(started)[0]
    assert addresses(started) == [first + 1024 * number for number in range(5)]
    (held,) = voice.records[num_records:]
    assert isinstance(held, SpaceHeld) and len(held.places) == 5
    ids = [one.object_id for one in started.reserved if one is not None]
    assert voice.end("k1", ids[1]) is True
    assert voice.say(m.PutAbort(["k2"], [ids[2]])).outcomes == [True]
    voice.keep_alive(PUT_S + GRACE_S)
    assert [voice.find(key) is not None for key in keys] == [False, True, False, False, False]
    assert voice.master.allocated_bytes == 1024 and voice.master.counts.expired_puts == 3
    assert voice.end("k3", ids[3]).code == "expired"


def test_a_row_has_only_what_may_be_put_and_a_repeated_request_gets_the_same(voice: Voice) -> None:
    voice.mount("a", POOL)
    voice.put("k1")
    put_id = 1000
    first = voice.start("k0", "k1", "k2", "k3", put_id=put_id)
    assert [one is None for one in first.reserved] == [False, True, False, False]
    again = voice.start("k0", "k1", "k2", "k3", put_id=put_id)
    assert again.reserved == first.reserved
    other = voice.start("k2", "k3", "k4", "k5")
    assert [one is None for one in other.reserved] == [True, True, False, False]
    assert {at: refusal.code for at, refusal in other.refusals.items()} == dict.fromkeys(
        (0, 1), "being_written"
    )


@pytest.mark.parametrize(
    "keys", [("k", "l", "k"), ("k", "", "l"), ("k", "a\0b", "l"), ("k", "x" * 2000, "l")]
)
def test_invalid_and_repeated_keys_are_answered_one_by_one(voice: Voice, keys: tuple[str, ...]) -> None:
    voice.mount("a", POOL)
    started = voice.start(*keys)
    assert [one is not None for one in started.reserved].count(True) == 2
    assert (started.reserved[1] is None) is (keys[1] != "l")
    assert set(started.refusals) == ({1} if keys[1] != "l" else {2})
    assert keys[1] != "l" or started.refusals[2].code == "being_written"


@pytest.mark.parametrize("tenant", ["", "red"])
@pytest.mark.parametrize("key", ["", "a\0b", "x" * 5000])
def test_nothing_is_kept_of_a_put_with_a_key_that_no_object_can_have(
    voice: Voice, tenant: str, key: str
) -> None:
    voice.mount("a", POOL)
    assert refusal_of(voice.start(key, tenant=tenant)).code == "invalid_key"
    assert voice.end(key, 7, tenant=tenant).code == "expired"
    written = m.PutWritten(1, "h", [key], [64], [b"crc!"], [(1, 1)], tenant=tenant)
    assert voice.say(written).outcomes[0].code == "invalid_key"
    assert voice.master.counts.refused_puts == 2 and not voice.master.catalog._lines


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("is_durable", [False, True])
def test_a_key_that_another_put_is_writing_is_not_called_stored(replace: bool, is_durable: bool) -> None:
    """That put may end without an object."""
    nodes = Nodes(SETTINGS)
    with_ssd(nodes)
    policy = DURABLE if is_durable else m.PutPolicy()
    first = nodes.start("k", host="a", policy=policy)
    reserved = first.reserved[0]
    assert reserved is not None
    refusal = refusal_of(nodes.start("k", host="a", policy=policy, replace=replace))
    assert refusal == Refusal("being_written", f"another put of the key may take {PUT_S:.3g} s longer")
    assert nodes.master.counts.refused_puts == 0, "its writer asks again"
    assert nodes.say(m.PutAbort(["k"], [reserved.object_id])).outcomes == [True]
    assert nodes.start("k", host="a", policy=policy, replace=replace).reserved[0] is not None


def test_a_stored_key_is_stored_while_it_is_being_replaced(voice: Voice) -> None:
    voice.mount("a", POOL)
    voice.put("k")
    assert voice.start("k", replace=True).reserved[0] is not None
    assert (voice.start("k").reserved, voice.start("k").refusals) == ([None], {})
    assert refusal_of(voice.start("k", replace=True)).code == "being_written"


def test_large_objects_are_spread_over_segments_and_small_ones_lie_together(voice: Voice) -> None:
    for name in ("a", "b", "c"):
        voice.mount(name, 16 << 20, host=name)
    large = voice.start(*[f"large{number}" for number in range(6)], size_bytes=1 << 20)
    assert sorted(name for one in large.reserved for name in segments(one)) == ["a", "a", "b", "b", "c", "c"]
    small = voice.start(*[f"small{number}" for number in range(6)])
    assert len({name for one in small.reserved for name in segments(one)}) == 1


def test_a_full_segment_is_filled_by_rows_of_what_is_left(voice: Voice) -> None:
    """Then objects are evicted, one for each that is put."""
    voice.mount("a", 8 * 1024)
    voice.put("k0", "k1", "k2")
    voice.put(*[f"l{number}" for number in range(8)])
    assert [voice.find(f"k{number}") for number in range(3)] == [None] * 3
    assert all(voice.find(f"l{number}") is not None for number in range(8))
    assert voice.master.counts.evicted_objects == 3


def test_a_successor_takes_over_rows_of_which_some_objects_were_put(voice: Voice) -> None:
    """The space of the others rests; that of a row all of whose objects were put is entered once."""
    voice.mount("a", POOL)
    voice.put("k0", "k1", "k2")
    started = voice.start("l0", "l1", "l2")
    ids = [one.object_id for one in started.reserved if one is not None]
    assert voice.end("l1", ids[1]) is True
    other = Voice(voice.master.settings)
    other.master.restore(voice.records, 0.0)
    other.master.check()
    assert set(other.master.objects.readable) == {"k0", "k1", "k2", "l1"}
    assert other.master.segments.mounted["a"].allocator.allocated_bytes == 6 * 1024
    promises = [one for one in voice.records if isinstance(one, SpaceHeld)]
    left = [one for one in _without_kept(voice.records) if isinstance(one, SpaceHeld)]
    assert (len(promises), left) == (2, promises[1:])


def test_rows_count_against_the_account_of_their_tenant(voice: Voice) -> None:
    voice.mount("a", POOL)
    voice.put("k", "l", tenant="red")
    (quota,) = [one for one in voice.say(m.AskQuotas()).quotas if one.tenant == "red"]
    assert quota.used_bytes == 2048 and quota.num_objects == 2
    voice.say(m.SetQuota("red", 2500))
    started = voice.start("m", "n", tenant="red")
    assert sum(one is not None for one in started.reserved) >= 1
    (quota,) = [one for one in voice.say(m.AskQuotas()).quotas if one.tenant == "red"]
    assert quota.used_bytes <= 2560


# Replicas


def test_replicas_lie_on_different_hosts_while_there_are_any(voice: Voice) -> None:
    voice.mount("a", host="left")
    voice.mount("b", 65536, host="left")
    voice.mount("c", 8192, host="right")
    voice.mount("d", 4096, host="right")
    assert segments(voice.put("k", host="left", policy=TWO)[0]) == ["b", "c"]
    assert segments(voice.put("l", host="left", policy=THREE)[0]) == ["b", "c", "a"]
    found = voice.find("k")
    assert found is not None and [one.segment for one in found.replicas] == ["b", "c"]


def test_as_many_replicas_as_fit_one_at_least(voice: Voice) -> None:
    voice.mount("a", 8192)
    voice.mount("b", 1024)
    assert segments(voice.put("k", policy=THREE)[0]) == ["a", "b"]
    assert segments(voice.put("l", size_bytes=2000, policy=THREE)[0]) == ["a"]


def test_a_replica_may_take_the_place_of_what_is_old(voice: Voice) -> None:
    voice.mount("a", 8192)
    voice.mount("b", 1024, host="other")
    voice.put("old", host="other")
    assert segments(voice.put("k", policy=TWO)[0]) == ["a", "b"]
    assert voice.there("k") == "k" and voice.inspect("old") is None


def test_preferred_segments_come_first_and_unknown_ones_are_passed_over(voice: Voice) -> None:
    for name in "abc":
        voice.mount(name, 1024, host=name)
    policy = m.PutPolicy(num_replicas=2, preferred_segments=["gone", "c", "b"])
    assert segments(voice.put("k", host="a", policy=policy)[0]) == ["c", "b"]
    voice.find("k")
    assert segments(voice.put("l", host="a", policy=policy)[0]) == ["a"]


@pytest.mark.parametrize("num_keys", [1, 3])
def test_the_names_of_preferred_segments_are_not_kept(voice: Voice, num_keys: int) -> None:
    """They would take more of the master's memory than the rest of each object."""
    voice.mount("a", POOL)
    voice.mount("b", POOL)
    policy = m.PutPolicy(preferred_segments=["b"], soft_pin_ttl_s=5.0)
    started = voice.start(*"klm"[:num_keys], policy=policy)
    assert [segments(one) for one in started.reserved] == [["b"]] * num_keys
    kept = [one.policy for one in voice.master.objects.writing.values()]
    assert kept == [m.PutPolicy(soft_pin_ttl_s=5.0)] * num_keys


def test_only_the_own_host_when_that_is_wanted(voice: Voice) -> None:
    voice.mount("a", 2048, host="left")
    voice.mount("b", host="right")
    policy = m.PutPolicy(num_replicas=2, is_same_host=True)
    assert segments(voice.start("k", host="left", policy=policy).reserved[0]) == ["a"]
    assert refusal_of(voice.start("l", host="nowhere", policy=policy)).code == "no_space"


def test_memory_objects_never_go_to_an_ssd() -> None:
    nodes = Nodes(SETTINGS)
    Place(nodes, "a/ssd", tier=Tier.SSD, content_id=5, node="a")
    assert refusal_of(nodes.start("k", host="a")).code == "no_space"


def test_a_replica_that_could_not_be_written_is_left_out_and_its_space_waits(voice: Voice) -> None:
    voice.mount("a")
    voice.mount("b", host="other")
    place = voice.start("k", policy=TWO).reserved[0]
    assert place is not None
    assert voice.end("k", place.object_id, b"crc!", "", "a", "unknown") is True
    assert voice.where("k") == ["b"]
    assert voice.allocated_bytes == 2048, "a write to it may still land"
    voice.keep_alive(35, "a", "b")
    assert voice.allocated_bytes == 1024


def test_what_was_written_nowhere_is_no_object(voice: Voice) -> None:
    voice.mount("a")
    voice.mount("b", host="other")
    place = voice.start("k", policy=TWO).reserved[0]
    assert place is not None
    assert voice.end("k", place.object_id, b"crc!", "", "a", "b").code == "incomplete"
    assert voice.inspect("k") is None and voice.end("k", place.object_id).code == "expired"


def test_an_object_outlives_all_its_nodes_but_one(voice: Voice) -> None:
    voice.mount("a")
    voice.mount("b", host="other")
    voice.put("k", policy=TWO)
    voice.lose("node a")
    found = voice.find("k")
    assert found is not None and [one.segment for one in found.replicas] == ["b"]
    assert voice.say(m.Exists(["k"])).flags == b"\1"
    voice.keep_alive(6, "b")
    assert voice.where("k") == ["b"] and voice.master.counts.lost_objects == 0
    voice.lose("node b")
    voice.wait(6)
    assert voice.inspect("k") is None and voice.master.counts.lost_objects == 1


# An object whose nodes are suspected is missing, and may come back


def on_suspected_node() -> tuple[Nodes, list[Place], int]:
    """A durable object on a node whose connection was lost; returns the node's segments and the object's
    id."""
    nodes = Nodes(SETTINGS)
    both = list(with_ssd(nodes))
    place = nodes.start("k", host="a", policy=DURABLE).reserved[0]
    assert place is not None
    nodes.post(m.PutEnd(["k"], [place.object_id], [b"crc!"]), "client", "first")
    both[1].work()
    assert nodes.late.pop("first")[0].outcomes == [True]
    for each in both:
        nodes.lose(each.connection)
    assert nodes.find("k") is None
    return nodes, both, place.object_id


def come_back(nodes: Nodes, both: list[Place]) -> list[Place]:
    """The same process mounts its segments again."""
    memory, ssd = both
    again = Place(nodes, "a", entries=list(memory.held.values()))
    held = list(ssd.held.values())
    return [again, Place(nodes, "a/ssd", SSD_BYTES, tier=Tier.SSD, content_id=99, entries=held)]


def id_of(found: m.Stored | None) -> int:
    return 0 if found is None else found.object_id


def follower_of(nodes: Nodes) -> Master:
    """A standby that has applied all records."""
    follower = Master(SETTINGS)
    for record in nodes.records:
        follower.apply([record], nodes.now)
        follower.check()
    return follower


@pytest.mark.parametrize("replace", [False, True])
def test_a_refused_put_leaves_an_object_whose_node_comes_back(replace: bool) -> None:
    nodes, both, object_id = on_suspected_node()
    assert refusal_of(nodes.start("k", replace=replace)).code == "no_space"
    assert follower_of(nodes).objects.readable["k"].object_id == object_id
    come_back(nodes, both)
    assert id_of(nodes.find("k")) == object_id and nodes.where("k") == ["a", "a/ssd"]
    assert nodes.master.counts.lost_objects == 0


@pytest.mark.parametrize("ending", ["aborted", "never ended", "written nowhere"])
def test_a_put_that_fails_leaves_an_object_whose_node_comes_back(ending: str) -> None:
    nodes, both, object_id = on_suspected_node()
    other = Place(nodes, "b")
    place = nodes.start("k").reserved[0]
    assert place is not None and segments(place) == ["b"]
    assert nodes.find("k") is None, "its reader is not sent to a node that may be dead"
    assert refusal_of(nodes.start("k")).code == "being_written"
    back = come_back(nodes, both)
    assert id_of(nodes.find("k")) == object_id, "as long as the other one is being written"
    if ending == "aborted":
        assert nodes.say(m.PutAbort(["k"], [place.object_id])).outcomes == [True]
    elif ending == "written nowhere":
        assert nodes.end("k", place.object_id, b"crc!", "", "b").code == "incomplete"
    for _ in range(int(PUT_S)):
        nodes.wait(1.0)
        for each in (other, *back):
            each.beat()
    assert nodes.master.objects.writing == {}
    assert id_of(nodes.find("k")) == object_id and nodes.master.counts.lost_objects == 0
    assert follower_of(nodes).objects.readable["k"].object_id == object_id


@pytest.mark.parametrize("comes_back_first", [False, True])
def test_a_put_that_ends_replaces_an_object_whose_node_is_suspected(comes_back_first: bool) -> None:
    nodes, both, object_id = on_suspected_node()
    Place(nodes, "b")
    place = nodes.start("k").reserved[0]
    assert place is not None
    if comes_back_first:
        both = come_back(nodes, both)
    assert nodes.end("k", place.object_id) is True
    assert nodes.master.counts.lost_objects == (not comes_back_first)
    if not comes_back_first:
        both = come_back(nodes, both)
    nodes.wait(1.0)
    for each in both:
        each.poll()
    assert id_of(nodes.find("k")) == place.object_id and nodes.where("k") == ["b"]
    assert all(object_id not in each.held for each in both), "its node drops it"
    assert follower_of(nodes).objects.readable["k"].object_id == place.object_id


def test_a_durable_put_that_is_lost_leaves_an_object_whose_node_comes_back() -> None:
    """The first object was acknowledged as durable, the second one was not."""
    nodes, both, object_id = on_suspected_node()
    memory = Place(nodes, "b")
    Place(nodes, "b/ssd", SSD_BYTES, tier=Tier.SSD, content_id=100)
    place = nodes.start("k", host="b", policy=DURABLE).reserved[0]
    assert place is not None
    nodes.post(m.PutEnd(["k"], [place.object_id], [b"new!"]), "client", "second")
    assert id_of(nodes.find("k")) == place.object_id and "second" not in nodes.late
    assert follower_of(nodes).objects.readable["k"].object_id == object_id
    come_back(nodes, both)
    nodes.lose(memory.connection)
    Place(nodes, "b", epoch=8)  # without what was in its memory
    assert [type(one) for one in nodes.late["second"][0].outcomes] == [Refusal]
    assert id_of(nodes.find("k")) == object_id and nodes.where("k") == ["a/ssd"]


def test_an_object_put_twice_leaves_memory_altogether(voice: Voice) -> None:
    """One replica left would look like two to a client that requested two."""
    voice.mount("a", 2048)
    voice.mount("b", 2048, host="other")
    voice.put("k", policy=TWO)
    voice.put("l", policy=TWO)
    voice.put("m")
    assert voice.where("k") == [] and voice.where("l") == ["a", "b"] and voice.where("m") == ["a"]


@pytest.mark.parametrize(
    "policy",
    [
        m.PutPolicy(num_replicas=0),
        m.PutPolicy(num_replicas=65),
        m.PutPolicy(preferred_segments=["a"] * 1025),
        m.PutPolicy(soft_pin_ttl_s=-1.0),
        m.PutPolicy(soft_pin_ttl_s=float("nan")),
    ],
)
def test_policies_that_make_no_sense(voice: Voice, policy: m.PutPolicy) -> None:
    voice.mount()
    assert refusal_of(voice.start("k", policy=policy)).code == "invalid_policy"


@pytest.mark.parametrize("column", [{"groups": ["g"]}, {"parents": ["p"]}])
def test_columns_that_do_not_fit(voice: Voice, column: dict[str, Any]) -> None:
    assert isinstance(voice.say(m.PutStart(1, "h", ["k", "l"], [1, 1], [1, 1], **column)), Failure)
    assert isinstance(voice.say(m.PutEnd(["k"], [1], [b"crc!"], [[], []])), Failure)


# Pins


def test_a_soft_pin_runs_from_put_end(voice: Voice) -> None:
    voice.mount(size_bytes=2048)
    place = voice.start("k", policy=m.PutPolicy(soft_pin_ttl_s=20.0)).reserved[0]
    assert place is not None
    voice.keep_alive(10)
    voice.end("k", place.object_id)
    status = voice.inspect("k")
    assert status is not None and status.pinned_s == 20.0
    voice.put("l")
    voice.put("m")
    assert voice.there("klm") == "km", "pinned ones go last"
    voice.keep_alive(20)
    voice.put("n")
    assert voice.there("kmn") == "mn"


def test_softly_pinned_objects_leave_when_no_other_can(voice: Voice) -> None:
    voice.mount(size_bytes=2048)
    voice.put("k", "l", policy=m.PutPolicy(soft_pin_ttl_s=20.0))
    voice.put("m")
    assert voice.there("klm") == "lm"


def test_hard_pinned_objects_stay_and_can_be_removed(voice: Voice) -> None:
    voice.mount(size_bytes=2048)
    voice.put("k", "l", policy=m.PutPolicy(is_hard_pinned=True))
    assert refusal_of(voice.start("m")).code == "no_space"
    assert voice.remove("k") is True
    voice.put("m")
    assert voice.there("klm") == "lm"


# Replacing


def test_readers_see_the_old_value_until_the_new_one_is_there(voice: Voice) -> None:
    voice.mount()
    old = voice.put("k")[0]
    new = voice.start("k", replace=True).reserved[0]
    assert new is not None and new.object_id != old.object_id
    found = voice.find("k")
    assert found is not None and found.object_id == old.object_id
    assert voice.end("k", new.object_id) is True
    found = voice.find("k")
    assert found is not None and found.object_id == new.object_id
    assert voice.allocated_bytes == 2048, "the old value is leased"
    voice.keep_alive(10)
    assert voice.allocated_bytes == 1024


def test_a_replacement_that_does_not_come_changes_nothing(voice: Voice) -> None:
    voice.mount()
    old = voice.put("k")[0]
    new = voice.start("k", replace=True).reserved[0]
    assert new is not None
    assert voice.start("k", replace=True).reserved == [None], "another writer is writing it"
    voice.say(m.PutAbort(["k"], [new.object_id]))
    found = voice.find("k")
    assert found is not None and found.object_id == old.object_id


def test_a_late_copy_of_a_request_that_was_ended_reserves_nothing(voice: Voice) -> None:
    voice.mount()
    place = voice.start("k", put_id=9, replace=True).reserved[0]
    assert place is not None and voice.end("k", place.object_id) is True
    assert voice.start("k", put_id=9, replace=True).reserved == [None]
    assert not voice.master.objects.writing


def test_an_object_that_is_not_there_yet_can_be_replaced(voice: Voice) -> None:
    voice.mount()
    voice.put("k", replace=True)
    assert voice.there("k") == "k"


def test_a_successor_knows_the_newer_of_two(voice: Voice) -> None:
    voice.mount()
    voice.put("k")
    new = voice.put("k", replace=True)[0]
    other = Voice(SETTINGS)
    other.master.restore(voice.records, 0.0)
    other.master.check()
    other.mount(rest_s=35.0)
    found = other.find("k")
    assert found is not None and found.object_id == new.object_id
    other.keep_alive(36)
    assert other.allocated_bytes == 1024, "the old value rests no longer"


# Groups and chains


def test_a_group_is_leased_and_leaves_as_one(voice: Voice) -> None:
    voice.mount(size_bytes=4096)
    voice.put("a", "b", group="g")
    voice.put("c", "d")
    voice.find("b")
    voice.put("e")
    assert voice.there("abcde") == "abde"
    voice.keep_alive(11)
    voice.find("d")
    voice.find("e")
    voice.put("f")
    assert voice.there("abdef") == "def"


def test_a_parent_stays_while_its_children_do() -> None:
    voice = Voice(dataclasses.replace(SETTINGS, eviction_policy="chain"))
    voice.mount(size_bytes=4096)
    voice.put("a", "b", "c", parents=["", "a", "b"])
    voice.put("d")
    voice.put("e", "f")
    assert voice.there("abcdef") == "adef"


def test_objects_that_call_each_other_parents_can_still_leave() -> None:
    voice = Voice(dataclasses.replace(SETTINGS, eviction_policy="chain"))
    voice.mount(size_bytes=4096)
    voice.put("a", "b", "c", "d", parents=["c", "a", "b", "d"])
    parents = [status.parent for key in "abcd" if (status := voice.inspect(key)) is not None]
    assert parents == ["c", "a", "", ""]
    voice.put(*"efgh")
    assert voice.there("abcdefgh") == "efgh"


# Durable


def test_a_durable_put_is_answered_when_it_is_on_ssd() -> None:
    nodes = Nodes(SETTINGS)
    _, ssd = with_ssd(nodes)
    place = nodes.start("k", host="a", policy=DURABLE).reserved[0]
    assert place is not None
    nodes.post(m.PutEnd(["k", "l"], [place.object_id, 9], [b"crc!", b""]), "client", "end")
    assert "end" not in nodes.late and nodes.there("k") == "k"
    nodes.post(m.PutEnd(["k"], [place.object_id], [b"crc!"]), "client", "again")
    assert "again" not in nodes.late
    ssd.work()
    assert nodes.where("k") == ["a", "a/ssd"]
    (answer,) = nodes.late.pop("end")
    assert answer.outcomes[0] is True and answer.outcomes[1].code == "expired"
    assert nodes.late.pop("again") == [m.Outcomes([False])]
    assert nodes.end("k", place.object_id) is False, "it is there, so no request waits"


def test_without_an_ssd_a_durable_put_is_refused() -> None:
    nodes = Nodes(SETTINGS)
    Place(nodes, "a")
    with_ssd(nodes, "b")
    assert segments(nodes.start("k", host="a", policy=DURABLE).reserved[0]) == ["b"]
    nodes.lose("node b/ssd 7")
    assert refusal_of(nodes.start("l", host="a", policy=DURABLE)).code == "no_ssd"


def test_a_durable_put_goes_where_an_ssd_takes_objects() -> None:
    """Its writer would give up before an SSD that rests takes a copy."""
    nodes = Nodes(SETTINGS)
    memory = Place(nodes, "a")
    held = [m.SegmentEntry("k", 77, 1000, 1000, b"crc!", 0)]
    ssd = Place(nodes, "a/ssd", SSD_BYTES, tier=Tier.SSD, content_id=99, entries=held)
    assert nodes.where("k") == ["a/ssd"], "it says what it holds"
    refusal = refusal_of(nodes.start("l", host="a", policy=DURABLE))
    assert refusal.code == "no_ssd" and "it takes objects in 10 s" in refusal.reason
    with_ssd(nodes, "b")
    assert segments(nodes.start("l", host="a", policy=DURABLE).reserved[0]) == ["b"]
    for _ in range(10):
        nodes.wait(1.0)
        memory.beat()
        ssd.beat()
    assert segments(nodes.start("n", host="a", policy=DURABLE).reserved[0]) == ["a"]


def test_a_durable_put_that_takes_too_long_is_refused_and_loses_no_value() -> None:
    nodes = Nodes(SETTINGS)
    memory, ssd = with_ssd(nodes)
    place = nodes.start("k", host="a", policy=DURABLE).reserved[0]
    assert place is not None
    nodes.post(m.PutEnd(["k"], [place.object_id], [b"crc!"]), "client", "end")
    for _ in range(30):
        nodes.wait(1.0)
        memory.beat()
        ssd.beat()
    (answer,) = nodes.late.pop("end")
    assert answer.outcomes[0].code == "no_ssd" and nodes.find("k") is not None
    assert refusal_of(nodes.start("k", host="a", policy=DURABLE)).code == "no_ssd", "not called stored"
    assert nodes.start("k", host="a").reserved == [None] and nodes.start("k", host="a").refusals == {}


def test_a_durable_object_that_goes_before_it_is_on_ssd() -> None:
    nodes = Nodes(SETTINGS)
    with_ssd(nodes)
    place = nodes.start("k", host="a", policy=DURABLE).reserved[0]
    assert place is not None
    nodes.post(m.PutEnd(["k"], [place.object_id], [b"crc!"]), "client", "end")
    assert nodes.remove("k", force=True) is True
    (answer,) = nodes.late.pop("end")
    assert answer.outcomes[0].code == "no_ssd"


class DurableWriter:
    """A client of a node with an SSD that has pieces for durable objects."""

    def __init__(self) -> None:
        self.nodes = Nodes(SETTINGS)
        self.memory, self.ssd = with_ssd(self.nodes)
        started = self.nodes.say(
            m.PutStart(900, "a", ["first"], [64], [64], policy=DURABLE, num_pieces=3, piece_bytes=128)
        )
        assert isinstance(started, m.PutStarted) and started.reserved[0] is not None
        self.nodes.say(m.PutAbort(["first"], [started.reserved[0].object_id]))
        assert started.advance is not None and started.advance.is_durable
        self.given = started.advance

    def put(self, key: str, number: int, origin: str, **more: Any) -> None:
        piece = self.given.advance_id, number
        more = {"policy": DURABLE, **more}
        written = m.PutWritten(5000 + number, "a", [key], [100], [b"crc!"], [piece], **more)
        self.nodes.post(written, "client", origin)

    def answer(self, origin: str) -> m.PutsWritten | None:
        replies = self.nodes.late.pop(origin, [])
        assert len(replies) <= 1
        return replies[0] if replies else None

    def live(self, seconds: int) -> None:
        for _ in range(seconds):
            self.nodes.wait(1.0)
            self.memory.beat()
            self.ssd.beat()


def refused(reply: m.PutsWritten | None) -> Refusal:
    assert reply is not None and isinstance(reply.outcomes[0], Refusal), reply
    return reply.outcomes[0]


def test_a_small_durable_put_is_answered_when_it_is_on_ssd() -> None:
    """With the space that it requested, although the answer comes later."""
    writer = DurableWriter()
    writer.put("k", 0, "put", num_pieces=2, piece_bytes=128)
    writer.put("k", 0, "again")
    assert writer.nodes.there("k") == "k", "it is readable before"
    assert (writer.answer("put"), writer.answer("again")) == (None, None)
    writer.ssd.work()
    assert writer.nodes.where("k") == ["a", "a/ssd"]
    answer = writer.answer("put")
    assert answer is not None and answer.outcomes == [True]
    assert answer.advance is not None and answer.advance.is_durable and len(answer.advance.replicas) == 2
    assert writer.answer("again") == m.PutsWritten([True])
    counts = writer.nodes.master.request_counters.counts
    assert counts["put_end_requests"] == 2, "what is answered later is counted, too"


def test_a_small_durable_put_that_takes_too_long_is_refused_and_can_be_read() -> None:
    writer = DurableWriter()
    writer.put("k", 0, "put")
    writer.live(30)
    assert refused(writer.answer("put")).code == "no_ssd" and writer.nodes.find("k") is not None


def test_a_small_durable_object_that_goes_before_it_is_on_ssd() -> None:
    writer = DurableWriter()
    writer.put("k", 0, "put")
    assert writer.nodes.remove("k", force=True) is True
    assert refused(writer.answer("put")).code == "no_ssd"
    writer.put("k", 0, "again")
    assert refused(writer.answer("again")).code == "no_ssd", "it is not known whether it was on SSD"


def test_a_small_durable_put_of_a_key_that_is_not_durable_is_refused() -> None:
    writer = DurableWriter()
    writer.nodes.put("k", host="a")
    writer.put("k", 0, "put")
    assert refused(writer.answer("put")).code == "no_ssd"


def test_a_small_durable_put_without_room_for_its_tenant_is_started() -> None:
    """The writer waits there until demotions have made room."""
    writer = DurableWriter()
    writer.nodes.say(m.SetQuota("", 10))
    writer.put("k", 0, "put")
    assert refused(writer.answer("put")).code == "not_here"
    writer.nodes.say(m.SetQuota("", None))
    writer.put("k", 0, "other")
    writer.ssd.work()
    assert writer.answer("other") == m.PutsWritten([True]), "the piece was not used"


def test_a_small_durable_put_that_another_master_has_carried_out_is_waited_for() -> None:
    """Then it is put again, and found."""
    writer = DurableWriter()
    writer.put("k", 0, "put")
    unknown = m.PutWritten(7000, "a", ["k"], [100], [b"crc!"], [(999, 0)], DURABLE)
    writer.nodes.post(unknown, "client", "again")
    assert writer.answer("again") is None
    writer.ssd.work()
    assert refused(writer.answer("again")).code == "expired"
    assert writer.nodes.start("k", host="a", policy=DURABLE) == m.PutStarted(SETTINGS.put_s, [None], {})


def test_each_durable_put_waits_for_its_own_time() -> None:
    writer = DurableWriter()
    writer.put("k", 0, "put")
    writer.live(20)
    writer.put("k", 1, "next")
    writer.live(10)
    assert refused(writer.answer("put")).code == "no_ssd" and writer.answer("next") is None
    writer.ssd.work()
    assert writer.answer("next") == m.PutsWritten([False])


def test_a_small_durable_put_needs_the_ssd_of_its_node() -> None:
    writer = DurableWriter()
    writer.nodes.lose("node a/ssd 7")
    writer.put("k", 0, "put")
    assert refused(writer.answer("put")).code == "expired" and writer.nodes.find("k") is None


# A durable object that is replaced by one that is not on SSD yet


def replaced(nodes: Nodes, ssd: Place) -> tuple[int, int]:
    """The ids of a durable object and of its successor, whose put-end waits as "end"."""
    place = nodes.start("k", host="a", policy=DURABLE).reserved[0]
    assert place is not None
    nodes.post(m.PutEnd(["k"], [place.object_id], [b"old!"]), "client", "first")
    ssd.work()
    assert nodes.late.pop("first") == [m.Outcomes([True])]
    again = nodes.start("k", host="a", policy=DURABLE, replace=True).reserved[0]
    assert again is not None
    nodes.post(m.PutEnd(["k"], [again.object_id], [b"new!"]), "client", "end")
    assert "end" not in nodes.late
    nodes.master.check()
    return place.object_id, again.object_id


def notified(nodes: Nodes, ssd: Place) -> None:
    """The node has received the removals."""
    ssd.poll()
    nodes.wait(0.1)
    ssd.answered()


def successor_of(nodes: Nodes, records: list[Record]) -> Master:
    successor = Master(SETTINGS)
    successor.restore(records, nodes.now)
    successor.check()
    return successor


def test_readers_see_the_new_one_and_a_successor_the_old_one() -> None:
    nodes = Nodes(SETTINGS)
    _, ssd = with_ssd(nodes)
    old, new = replaced(nodes, ssd)
    found = nodes.find("k")
    assert found is not None and found.object_id == new
    for records in (nodes.records, nodes.master.snapshot()):
        kept = successor_of(nodes, records).objects.readable["k"]
        assert kept.object_id == old and [e.segment.name for e in kept.complete()] == ["a/ssd"]


def test_the_old_object_goes_when_the_new_one_is_on_ssd() -> None:
    nodes = Nodes(SETTINGS)
    _, ssd = with_ssd(nodes)
    _, new = replaced(nodes, ssd)
    ssd.work()
    assert nodes.late.pop("end") == [m.Outcomes([True])]
    notified(nodes, ssd)
    assert ssd.held.keys() == {new}
    for records in (nodes.records, nodes.master.snapshot()):
        assert successor_of(nodes, records).objects.readable["k"].object_id == new
    assert len(nodes.master.segments.mounted["a/ssd"].holders) == 1, "its space is free again"


def test_the_old_object_is_back_when_the_new_one_is_lost() -> None:
    nodes = Nodes(SETTINGS)
    memory, ssd = with_ssd(nodes)
    old, _ = replaced(nodes, ssd)
    nodes.lose(memory.connection)
    Place(nodes, "a", epoch=8)
    (answer,) = nodes.late.pop("end")
    assert answer.outcomes[0].code == "no_ssd"
    found = nodes.find("k")
    assert found is not None and found.object_id == old and nodes.where("k") == ["a/ssd"]
    assert successor_of(nodes, nodes.records).objects.readable["k"].object_id == old
    assert old in ssd.held and "its successor was lost" in nodes.master.story("k")[-1]


def test_the_old_and_the_new_object_go_when_the_key_is_removed() -> None:
    nodes = Nodes(SETTINGS)
    _, ssd = with_ssd(nodes)
    replaced(nodes, ssd)
    assert nodes.remove("k", force=True) is True
    notified(nodes, ssd)
    assert nodes.find("k") is None and not ssd.held
    for records in (nodes.records, nodes.master.snapshot()):
        assert "k" not in successor_of(nodes, records).objects.readable


def test_a_third_object_is_kept_apart_from_the_first_too() -> None:
    nodes = Nodes(SETTINGS)
    memory, ssd = with_ssd(nodes)
    old, new = replaced(nodes, ssd)
    place = nodes.start("k", host="a", policy=DURABLE, replace=True).reserved[0]
    assert place is not None and place.object_id > new
    nodes.post(m.PutEnd(["k"], [place.object_id], [b"3rd!"]), "client", "third")
    assert nodes.late.pop("end")[0].outcomes[0].code == "no_ssd"
    assert successor_of(nodes, nodes.records).objects.readable["k"].object_id == old
    nodes.lose(memory.connection)
    Place(nodes, "a", epoch=8)
    found = nodes.find("k")
    assert found is not None and found.object_id == old


def test_a_plain_put_replaces_both() -> None:
    nodes = Nodes(SETTINGS)
    memory, ssd = with_ssd(nodes)
    replaced(nodes, ssd)
    place = nodes.start("k", host="a", replace=True).reserved[0]
    assert place is not None
    assert nodes.end("k", place.object_id) is True
    notified(nodes, ssd)
    assert not ssd.held
    assert successor_of(nodes, nodes.records).objects.readable["k"].object_id == place.object_id
    nodes.lose(memory.connection)
    Place(nodes, "a", epoch=8)
    assert nodes.find("k") is None, "nothing stale comes back"


def test_what_was_set_aside_may_be_lost_as_well() -> None:
    nodes = Nodes(SETTINGS)
    memory, ssd = with_ssd(nodes)
    _, new = replaced(nodes, ssd)
    nodes.say(m.Unmount("a/ssd", 7), ssd.connection)
    found = nodes.find("k")
    assert found is not None and found.object_id == new
    nodes.master.check()
    nodes.lose(memory.connection)
    Place(nodes, "a", epoch=8)
    assert nodes.find("k") is None
    nodes.master.check()


@pytest.mark.parametrize("name", ["bank\0g", "\0", "x" * 1025])
@pytest.mark.parametrize("what", ["group", "parent"])
def test_a_group_or_parent_with_a_nul_is_refused(voice: Voice, what: str, name: str) -> None:
    """It would be another tenant's, whose leases and evictions it must not affect."""
    voice.mount(size_bytes=65536)
    voice.put("k", tenant="bank", group="g")
    more: dict[str, Any] = {"group": name} if what == "group" else {"parents": [name]}
    assert voice.start("mine", **more).refusals[0].code == "invalid_key"
    assert voice.start("mine", tenant="red", **more).refusals[0].code == "invalid_key"
    assert [sorted(group.members) for group in voice.master.objects.groups.values()] == [["bank\0k"]]
    assert voice.master.objects.writing == {}


def test_a_small_put_in_one_step_is_refused_the_same(voice: Voice) -> None:
    voice.mount(size_bytes=1 << 20)
    start = m.PutStart(1 << 20, "h", ["a"], [64], [64], num_pieces=4, piece_bytes=64)
    given = voice.say(start).advance
    assert given is not None
    for number, (groups, parents) in enumerate(((["bank\0g"], []), ([], ["bank\0p"]))):
        piece = (given.advance_id, number)
        written = m.PutWritten(number, "h", ["k"], [64], [b"crc!"], [piece], None, groups, parents)
        (outcome,) = voice.say(written).outcomes
        assert outcome.code == "invalid_key"
    assert not voice.master.objects.groups


def test_a_copy_of_another_tenants_object_cannot_be_requested(voice: Voice) -> None:
    voice.mount()
    voice.mount("b", host="other")
    voice.put("k", tenant="bank")
    refused = voice.say(m.CopyObject("bank\0k", ["b"]))
    assert isinstance(refused, m.RefusedReply) and refused.refusal.code == "not_found"


# Into preallocated space: small puts in one request, with the checks of PutStart and PutEnd

POOL = 65536
SIZE = 100


class Writer:
    """A client that has pieces and reports what it has written into them."""

    def __init__(self, voice: Voice, num_pieces: int = 4, tenant: str = "") -> None:
        self.voice = voice
        self.tenant = tenant
        voice.mount("a", POOL)
        given = preallocated(voice, num_pieces, tenant=tenant)
        assert given is not None
        self.given = given
        voice.keep_alive(0.0)

    def put(self, key: str, number: int = 0, put_id: int = 5000, **more: Any) -> bool | Refusal:
        return self.say(key, number, put_id, **more).outcomes[0]

    def say(self, key: str, number: int = 0, put_id: int = 5000, **more: Any) -> m.PutsWritten:
        piece = more.pop("piece", (self.given.advance_id, number))
        size, crc = more.pop("size_bytes", SIZE), more.pop("checksums", b"crc!")
        more = {"tenant": self.tenant, **more}
        reply = self.voice.say(
            m.PutWritten(put_id + ord(key[0]) if key else put_id, "h", [key], [size], [crc], [piece], **more)
        )
        assert isinstance(reply, m.PutsWritten)
        return reply


@pytest.fixture
def writer(voice: Voice) -> Writer:
    return Writer(voice)


def test_a_small_put_is_readable_where_it_was_written_and_takes_its_own_size(
    writer: Writer, voice: Voice
) -> None:
    before = voice.allocated_bytes
    assert writer.put("k", 2, size_bytes=64) is True
    found = voice.find("k")
    assert found is not None and found.replicas == [writer.given.replicas[2]]
    assert (found.size_bytes, found.chunk_bytes, found.checksums) == (64, 64, b"crc!")
    assert voice.allocated_bytes == before - 64, "the rest of the piece is free"
    assert any("put as #" in line for line in voice.master.story("k"))


def test_the_piece_of_a_removed_object_is_free_again(writer: Writer, voice: Voice) -> None:
    assert [writer.put(key, number) for number, key in enumerate("wxyz")] == [True] * 4
    assert [voice.remove(key) for key in "wxyz"] == [True] * 4
    voice.keep_alive(PUT_S + GRACE_S + 1)
    assert voice.allocated_bytes == 0


def test_a_taken_key_leaves_the_piece_to_the_refused_writer(writer: Writer, voice: Voice) -> None:
    voice.put("k")
    assert writer.put("k") is False
    voice.start("l")
    outcome = writer.put("l")
    assert isinstance(outcome, Refusal) and outcome.code == "not_here", "another writer is writing it"
    assert writer.put("m") is True


def test_a_small_put_that_is_repeated_changes_nothing(writer: Writer, voice: Voice) -> None:
    assert [writer.put("k"), writer.put("k")] == [True, True]
    assert voice.remove("k") is True
    assert writer.put("k") is True, "it was put, whatever became of it"
    assert voice.inspect("k") is None


def test_a_piece_becomes_one_object(writer: Writer) -> None:
    assert writer.put("k", 0) is True
    outcome = writer.put("l", 0)
    assert isinstance(outcome, Refusal) and outcome.code == "expired"


def test_refusals_of_a_small_put_are_those_of_a_start(writer: Writer, voice: Voice) -> None:
    long_key = "k" * (m.MAX_KEY_BYTES + 1)
    for key, more, code in (
        ("", {}, "invalid_key"),
        (long_key, {}, "invalid_key"),
        ("k", {"size_bytes": 0}, "invalid_size"),
        ("k", {"checksums": b"long checksum"}, "invalid_checksums"),
        ("k", {"tenant": "x" * 2000}, "unknown_tenant"),
        ("k", {"policy": m.PutPolicy(num_replicas=0)}, "invalid_policy"),
        ("k", {"policy": m.PutPolicy(num_replicas=2)}, "invalid_policy"),
        ("k", {"policy": m.PutPolicy(is_durable=True)}, "expired"),
        ("k", {"policy": m.PutPolicy(preferred_segments=["a"])}, "invalid_policy"),
    ):
        outcome = writer.put(key, **more)
        assert isinstance(outcome, Refusal) and outcome.code == code, (key[:10], more)
    assert writer.put("k") is True


def test_a_tenant_pays_for_what_it_put_and_not_for_what_it_may_put(voice: Voice) -> None:
    voice.say(m.SetQuota("red", 64 + 300))
    writer = Writer(voice, tenant="red")  # the put with which it requested the pieces was aborted, and rests
    assert writer.put("k", 0) is True
    assert writer.put("l", 1) is True
    quotas = {one.tenant: one for one in voice.say(m.AskQuotas()).quotas}
    assert quotas["red"].used_bytes == 64 + 2 * 128, "they lie at multiples of 64 bytes"
    assert writer.put("m", 2) is True, "in the place of its oldest"
    assert voice.inspect("k", "red") is None and voice.inspect("m", "red") is not None
    voice.say(m.SetQuota("red", 10))
    outcome = writer.put("n", 3)
    assert isinstance(outcome, Refusal) and outcome.code == "quota_exceeded"


@pytest.mark.parametrize("thief", ["", "blue", "red\0", "Red"])
def test_a_piece_is_used_only_by_the_tenant_to_which_it_was_given(voice: Voice, thief: str) -> None:
    """Its client may be writing there: what another tenant put there would be overwritten, and what it
    removes would be given to a third writer."""
    writer = Writer(voice, tenant="red")
    places_of_red = places(writer.given)
    for number, key in enumerate("wxyz"):
        outcome = writer.put(key, number, tenant=thief)
        assert isinstance(outcome, Refusal) and outcome.code in ("expired", "unknown_tenant"), (
            thief,
            outcome,
        )
        voice.say(m.Remove([key], True, thief))
    piece = writer.given.advance_id, 0
    assert voice.master.preallocated(piece, thief, 1, SIZE, voice.now) is None, "no value is written there"
    assert voice.master.preallocated(piece, "red", 1, SIZE, voice.now) is not None
    others = [place for n in range(20) for place in voice.put(f"other{n}", size_bytes=1000)]
    assert not {(one.segment, one.address) for place in others for one in place.replicas} & set(places_of_red)
    assert [writer.put(key, number) for number, key in enumerate("wxyz")] == [True] * 4


@pytest.mark.parametrize("names", [("", "default"), ("default", "")])
def test_the_default_tenant_has_two_names(voice: Voice, names: tuple[str, str]) -> None:
    writer = Writer(voice, tenant=names[0])
    assert writer.put("k", tenant=names[1]) is True


def test_a_client_has_its_pieces_on_every_connection(writer: Writer, voice: Voice) -> None:
    """A request whose answer was lost with its connection is sent again on another one."""
    piece = writer.given.advance_id, 0
    written = m.PutWritten(7000, "h", ["k"], [SIZE], [b"crc!"], [piece])
    voice.lose("client")
    assert [voice.say(written, name).outcomes for name in ("second", "third")] == [[True], [True]]


def test_the_name_of_a_piece_cannot_be_derived_from_object_ids() -> None:
    """Only the client to which a name was sent knows it, not others of the same tenant."""
    names = []
    for secret in (b"one", b"two"):
        voice = Voice(SETTINGS)
        voice.master = Master(SETTINGS, 1000, secret)
        voice.mount("a", POOL)
        given = [preallocated(voice, 1, key=key) for key in ("first", "second")]
        own_ids = range(1000, voice.master.objects.last_id + 1)
        names += [one.advance_id for one in given if one is not None and one.advance_id not in own_ids]
    assert len(set(names)) == 4 and all(0 <= name < 1 << 63 for name in names), names
    assert abs(names[1] - names[0]) != abs(names[3] - names[2])


@pytest.mark.parametrize("piece", [(12345, 0), (None, 4), (None, -1)])
def test_space_that_was_not_given_is_refused(writer: Writer, piece: tuple[int | None, int]) -> None:
    name = (writer.given.advance_id if piece[0] is None else piece[0], piece[1])
    outcome = writer.put("k", piece=name)
    assert isinstance(outcome, Refusal) and outcome.code == "expired"


def test_an_object_larger_than_its_piece_is_refused(writer: Writer) -> None:
    outcome = writer.put("k", size_bytes=129)
    assert isinstance(outcome, Refusal) and outcome.code == "expired"


def test_a_small_put_that_comes_too_late_is_refused(writer: Writer, voice: Voice) -> None:
    voice.keep_alive(PUT_S - 1)
    assert writer.put("k") is True
    voice.keep_alive(1)
    outcome = writer.put("l", 1)
    assert isinstance(outcome, Refusal) and outcome.code == "expired"
    assert voice.master.counts.refused_puts == 0, "it is put anew"


def test_a_small_put_on_a_suspected_node_is_refused(writer: Writer, voice: Voice) -> None:
    voice.lose("node a")
    outcome = writer.put("k")
    assert isinstance(outcome, Refusal) and outcome.code == "expired"


@pytest.mark.parametrize("quota_bytes", [150, 1000])
def test_only_a_small_put_that_succeeds_replaces_an_object_on_a_suspected_node(
    voice: Voice, quota_bytes: int
) -> None:
    voice.mount("b", host="other")
    (old,) = voice.put("k", size_bytes=100, host="other", tenant="red")
    writer = Writer(voice, tenant="red")
    voice.say(m.Pin(["k"], None, "red"))  # so that it does not leave for the quota
    voice.say(m.SetQuota("red", quota_bytes))
    voice.lose("node b")
    outcome = writer.put("k")
    stored = voice.master.objects.readable["red\0k"]
    if quota_bytes < 200:
        assert isinstance(outcome, Refusal) and outcome.code == "quota_exceeded"
        assert stored.object_id == old.object_id and voice.master.counts.lost_objects == 0
        voice.mount("b", host="other")
    else:
        assert outcome is True and stored.object_id != old.object_id
        assert voice.master.counts.lost_objects == 1
    found = voice.find("k", "red")
    assert found is not None and found.object_id == stored.object_id


def test_groups_parents_and_pins_of_a_small_put_are_kept(voice: Voice) -> None:
    writer = Writer(voice, tenant="red")
    policy = m.PutPolicy(is_hard_pinned=True, data_type=3)
    assert writer.put("k", policy=policy, groups=["g"], parents=["above"]) is True
    found = voice.inspect("k", "red")
    assert found is not None and (found.group, found.parent, found.data_type) == ("g", "above", 3)
    assert found.pinned_s is None
    record = [one for one in voice.records if isinstance(one, ObjectReadable)][-1]
    assert (record.is_hard_pinned, record.data_type) == (True, 3)


def test_the_answer_may_bring_the_next_pieces(writer: Writer) -> None:
    reply = writer.say("k", num_pieces=3, piece_bytes=256)
    assert reply.outcomes == [True] and reply.advance is not None
    assert len(set(places(reply.advance))) == 3 and reply.advance.size_bytes == 256
    taken = writer.say("k", 1, put_id=1, num_pieces=3, piece_bytes=256)
    assert taken.outcomes == [False] and taken.advance is not None, "also when the key is taken"


def test_columns_of_small_puts_have_one_length(voice: Voice) -> None:
    for message in (
        m.PutWritten(1, "h", ["k"], [], [], []),
        m.PutWritten(1, "h", ["k"], [1], [b"crc!"], [(1, 1)], groups=["a", "b"]),
    ):
        assert isinstance(voice.say(message), Failure)


def test_a_lease_protects_a_small_put_like_any_other(writer: Writer, voice: Voice) -> None:
    assert writer.put("k") is True
    assert voice.find("k") is not None
    assert isinstance(voice.remove("k"), Refusal)
    voice.keep_alive(LEASE_S)
    assert voice.remove("k") is True


def test_a_successor_has_a_small_put_and_refuses_the_unused_pieces(writer: Writer, voice: Voice) -> None:
    assert writer.put("k", 1) is True
    follower = Master(SETTINGS)
    for record in voice.records:
        follower.apply([record], voice.now)
        follower.check()
    follower.settle(voice.now)
    stored = follower.objects.readable["k"]
    assert stored.extents[0].offset == writer.given.replicas[1].address - (1 << 20)
    voice.master = follower
    voice.mount("a", POOL)
    outcome = writer.put("l", 2)
    assert isinstance(outcome, Refusal) and outcome.code == "expired"
    follower.check()


def test_a_small_put_counts_as_a_start_and_an_end(writer: Writer, voice: Voice) -> None:
    counts = voice.master.request_counters.counts
    before = {name: counts[name] for name in ("put_start_requests", "put_end_requests", "put_start_failures")}
    assert writer.put("k") is True
    writer.put("", 1)
    writer.put("l", piece=(1, 1))
    after = {name: counts[name] - number for name, number in before.items()}
    assert after == {"put_start_requests": 2, "put_end_requests": 1, "put_start_failures": 1}


def preallocated(
    voice: Voice,
    count: int = 4,
    size_bytes: int = 128,
    host: str = "h",
    key: str = "first",
    tenant: str = "",
) -> m.PreallocatedSpace | None:
    """Requested with a put that is aborted at once."""
    message = m.PutStart(
        900, host, [key], [64], [64], tenant=tenant, num_pieces=count, piece_bytes=size_bytes
    )
    started = voice.say(message)
    assert isinstance(started, m.PutStarted)
    reserved = started.reserved[0]
    if reserved is not None:
        voice.say(m.PutAbort([key], [reserved.object_id], tenant))
    given = started.advance
    assert given is None or given.size_bytes == size_bytes
    return given


def places(given: m.PreallocatedSpace | None) -> list[tuple[str, int]]:
    assert given is not None
    return [(one.segment, one.address) for one in given.replicas]


def test_pieces_are_reserved_until_their_time_and_the_grace_are_over(voice: Voice) -> None:
    voice.mount("a", POOL)
    given = preallocated(voice)
    assert given is not None and given.put_s == PUT_S
    assert len({at for _, at in places(given)}) == 4
    voice.keep_alive(PUT_S + GRACE_S - 1)
    assert voice.allocated_bytes == 4 * 128 or voice.allocated_bytes == 4 * 128 + 64
    voice.keep_alive(2)
    assert voice.allocated_bytes == 0


def test_pieces_are_on_the_own_host_first(voice: Voice) -> None:
    voice.mount("a", POOL, host="left")
    voice.mount("b", 2 * POOL, host="right")
    assert {name for name, _ in places(preallocated(voice, host="left"))} == {"a"}
    assert {name for name, _ in places(preallocated(voice, host="right", key="second"))} == {"b"}


def test_only_a_share_of_a_segment_is_preallocated(voice: Voice) -> None:
    voice.mount("a", POOL)
    share = int(POOL * PREALLOCATED_SHARE)
    assert len(places(preallocated(voice, 1000, 64))) == MAX_PIECES == share // 64
    assert preallocated(voice, 1, 64, key="second") is None
    voice.keep_alive(PUT_S + 1)
    assert len(places(preallocated(voice, 1, 64, key="third"))) == 1, "unused space no longer counts"


def test_no_piece_is_allocated_where_little_is_free_and_nothing_is_evicted_for_one(voice: Voice) -> None:
    voice.mount("a", POOL)
    voice.put("old", size_bytes=POOL - POOL // 32)
    voice.wait(0.5)
    assert preallocated(voice) is None
    assert voice.inspect("old") is not None


@pytest.mark.parametrize("size_bytes", [0, -1, MAX_PIECE_BYTES + 1])
def test_pieces_have_a_size_that_small_puts_have(voice: Voice, size_bytes: int) -> None:
    voice.mount("a", 1 << 26)
    assert preallocated(voice, 1, size_bytes) is None
    assert preallocated(voice, 1, MAX_PIECE_BYTES) is not None, "it has room for that"


@pytest.mark.parametrize("num_pieces", [-1, -(1 << 62)])
def test_a_number_of_pieces_below_zero_gives_none(voice: Voice, num_pieces: int) -> None:
    voice.mount("a", 1 << 26)
    assert preallocated(voice, num_pieces) is None
    writer = Writer(voice)
    reply = writer.say("k", num_pieces=num_pieces, piece_bytes=256)
    assert reply.outcomes == [True] and reply.advance is None


def test_a_segment_that_is_gone_takes_its_pieces_with_it(voice: Voice) -> None:
    voice.mount("a", POOL)
    assert preallocated(voice) is not None
    voice.lose("node a")
    voice.mount("a", POOL, epoch=8)
    assert voice.allocated_bytes == 0
    voice.keep_alive(PUT_S + GRACE_S + 1, epoch=8)
    assert voice.allocated_bytes == 0


def test_a_successor_holds_the_space_as_long_as_a_client_may_write_it(voice: Voice) -> None:
    voice.mount("a", POOL)
    given = places(preallocated(voice))
    held = [place for record in voice.records if isinstance(record, SpaceHeld) for place in record.places]
    assert {offset + (1 << 20) for _, offset in held} >= {at for _, at in given}
    for records in (voice.records, voice.master.snapshot()):
        successor = Master(SETTINGS)
        successor.restore(records, voice.now)
        successor.check()
        allocations = successor.segments.mounted["a"].allocator.allocations
        assert {at - (1 << 20) for _, at in given} <= allocations.keys()

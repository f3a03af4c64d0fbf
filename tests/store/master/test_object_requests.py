# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from mooncake.rpc.wire import Failure
from mooncake.store import messages as m
from mooncake.store.master.catalog_events import ColdHit
from mooncake.store.master.effects import Received, Reply
from mooncake.store.master.objects import StoredObject
from mooncake.store.settings import MasterSettings
from mooncake.types import Tier
from tests.store.conftest import SETTINGS, Voice
from tests.store.nodes import Nodes, Place, with_ssd

TWO = m.PutPolicy(num_replicas=2)


class Watched(Nodes):
    """Receives cold hits."""

    def __init__(self) -> None:
        super().__init__(SETTINGS)
        self.cold: list[str] = []
        self.master.catalog.observe({ColdHit: lambda event: self.cold.append(event.stored.key)})


def test_memory_is_named_before_ssd_and_what_is_on_ssd_alone_is_a_cold_hit() -> None:
    nodes = Watched()
    memory, ssd = with_ssd(nodes)
    nodes.put("k", host="a")
    stored = nodes.master.objects.readable["k"]
    catalog = nodes.master.catalog
    segment = nodes.master.segments.mounted["a/ssd"]
    extent = catalog.add_extent(stored, segment, nodes.now, nodes.now + 10.0)
    assert extent is not None
    found = nodes.find("k")
    assert found is not None and [one.tier for one in found.replicas] == [Tier.MEMORY]
    catalog.complete_extent(stored, extent, nodes.now)
    nodes.master.check()
    found = nodes.find("k")
    assert found is not None and [one.tier for one in found.replicas] == [Tier.MEMORY, Tier.SSD]
    assert found.replicas[1].segment == "a/ssd" and not nodes.cold
    nodes.lose(memory.connection)
    found = nodes.find("k")
    assert found is not None and [one.tier for one in found.replicas] == [Tier.SSD]
    assert set(nodes.cold) == {"k"}
    nodes.lose(ssd.connection)
    assert nodes.find("k") is None
    assert nodes.say(m.Exists(["k"])).flags == b"\0"


def test_a_reply_with_too_many_checksums_is_refused_before_it_is_made(
    voice: Voice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few keys named often enough would take all memory of the master."""
    voice.mount()
    voice.put("k")
    assert len(voice.say(m.LookupObjects(["k"] * 100)).objects) == 100
    monkeypatch.setattr("mooncake.store.master.object_requests.MAX_BODY_BYTES", 300)
    assert len(voice.say(m.LookupObjects([*["k"] * 75, *["none"] * 100])).objects) == 175
    refused = voice.say(m.LookupObjects(["k"] * 76))
    assert isinstance(refused, Failure) and refused.code == "invalid_argument"
    assert "304 bytes of checksums" in refused.message


def test_uses_are_counted_by_lookups_alone(voice: Voice) -> None:
    voice.mount()
    voice.put("k")
    voice.find("k")
    voice.say(m.Exists(["k"]))
    voice.find("k")
    status = voice.inspect("k")
    assert status is not None and status.num_uses == 2 and status.leased_s == 10.0


def test_inspecting_shows_what_is_being_written_too(voice: Voice) -> None:
    voice.mount(host="left")
    voice.start("k", group="g", parents=["p"], tenant="red", policy=m.PutPolicy(data_type=3))
    status = voice.inspect("k", "red")
    assert status is not None
    assert (status.is_writing, status.group, status.parent, status.data_type) == (True, "g", "p", 3)
    replica = status.replicas[0]
    assert (replica.segment, replica.host, replica.is_complete) == ("a", "left", False)
    assert status.leased_s == 0.0 and voice.inspect("none") is None


def test_one_lookup_leases_the_whole_group(voice: Voice) -> None:
    voice.mount()
    voice.put("a", "b", group="g")
    for ask in (m.LookupObjects(["a"]), m.Exists(["a"])):
        voice.say(ask)
        status = voice.inspect("b")
        assert status is not None and status.leased_s == 10.0
        voice.keep_alive(5)
    ids = [voice.master.objects.readable["a"].object_id]
    voice.say(m.Renew(["a"], ids))
    status = voice.inspect("b")
    assert status is not None and status.leased_s == 10.0


def test_a_place_that_is_not_complete_is_given_to_no_reader() -> None:
    nodes = Nodes(SETTINGS)
    Place(nodes, "a")
    Place(nodes, "b")
    nodes.put("k", host="a")
    stored = nodes.master.objects.readable["k"]
    assert nodes.master.catalog.add_extent(stored, nodes.master.segments.mounted["b"], 0.0, 5.0) is not None
    nodes.master.check()
    assert nodes.where("k") == ["a"]


def renewed(voice: Voice, place: m.Reserved, *replicas: m.Replica) -> bytes:
    reply: m.Flags = voice.say(m.Renew(["k"], [place.object_id], "", list(replicas)))
    return reply.flags


def test_a_view_of_a_replica_that_the_master_gave_up_is_not_renewed() -> None:
    """Its node comes back, and the space is allocated again: the object's other replica is no help."""
    voice = Voice(SETTINGS)
    voice.mount("a", host="left")
    voice.mount("b", host="right")
    place = voice.put("k", policy=m.PutPolicy(num_replicas=2))[0]
    by_name = {replica.segment: replica for replica in place.replicas}
    voice.find("k")
    assert renewed(voice, place, by_name["a"]) == renewed(voice, place, by_name["b"]) == b"\1"
    voice.keep_alive(9, "b")  # a is given up
    assert renewed(voice, place, by_name["a"]) == b"\0" and renewed(voice, place, by_name["b"]) == b"\1"
    voice.mount("a", host="left", rest_s=10.0)
    assert renewed(voice, place, by_name["a"]) == b"\0" and renewed(voice, place, by_name["b"]) == b"\1"
    assert renewed(voice, place) == b"\1"  # a client without a view


def test_a_view_of_a_replica_that_left_is_renewed_by_the_master_that_keeps_its_space() -> None:
    """Its successor lets the space rest for the same reader."""
    voice = Voice(SETTINGS)
    voice.mount("a", host="left")
    voice.mount("b", host="right")
    place = voice.put("k", policy=m.PutPolicy(num_replicas=2))[0]
    gone = next(replica for replica in place.replicas if replica.segment == "b")
    voice.find("k")
    stored = voice.master.objects.readable["k"]
    extent = next(one for one in stored.extents if one.segment.name == "b")
    voice.master.catalog.drop_extent(stored, extent, "moved away", voice.now)
    assert renewed(voice, place, gone) == b"\1"
    successor = Voice(SETTINGS)
    successor.master.restore(voice.master.snapshot(), successor.now)
    for name in ("a", "b"):
        successor.mount(name, host="left" if name == "a" else "right")
    assert renewed(successor, place, gone) == b"\1"


def test_replicas_that_are_not_one_for_each_key_are_refused(voice: Voice) -> None:
    replica = m.Replica("a", 7, 0)
    assert isinstance(voice.say(m.Renew(["k", "l"], [1, 2], "", [replica])), Failure)


# Pins


def test_pinned_and_unpinned(voice: Voice) -> None:
    voice.mount(size_bytes=2048)
    voice.put("a", "b")
    assert voice.say(m.Pin(["a", "none"], None)).outcomes == [True, False]
    status = voice.inspect("a")
    assert status is not None and status.pinned_s is None
    voice.put("c")
    voice.put("d")
    assert voice.there("abcd") == "ad"
    assert voice.say(m.Pin(["a"], 0.0)).outcomes == [True]
    status = voice.inspect("a")
    assert status is not None and status.pinned_s == 0.0
    voice.put("e")
    assert voice.there("ade") == "de"


def test_a_soft_pin_takes_the_place_of_a_hard_one_and_is_cut() -> None:
    voice = Voice(MasterSettings(max_pin_s=60.0))
    voice.mount()
    voice.put("a")
    voice.say(m.Pin(["a"], None))
    voice.say(m.Pin(["a"], 1e9))
    status = voice.inspect("a")
    assert status is not None and status.pinned_s == 60.0


def test_hard_pins_are_written_down_and_soft_ones_not(voice: Voice) -> None:
    voice.mount()
    voice.put("a", "b", "c")
    voice.put("d", policy=m.PutPolicy(is_hard_pinned=True))
    voice.say(m.Pin(["a", "b"], None))
    voice.say(m.Pin(["b"], 0.0))
    voice.say(m.Pin(["c"], 10.0))
    other = Voice(voice.master.settings)
    other.master.restore(voice.records, 0.0)
    other.master.check()
    pinned = [key for key, stored in other.master.objects.readable.items() if stored.is_hard_pinned]
    assert pinned == ["a", "d"]


def test_one_pinned_member_protects_its_group(voice: Voice) -> None:
    voice.mount(size_bytes=3072)
    voice.put("a", "b", group="g")
    voice.put("c")
    voice.say(m.Pin(["b"], None))
    voice.put("d")
    assert voice.there("abcd") == "abd"
    assert voice.remove("b") is True
    voice.put("e")
    voice.put("f")
    assert voice.there("abdef") == "def"


def test_a_group_is_visited_once_for_each_change_of_its_pins(
    voice: Voice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for each member, a request for all of a large group would take many seconds."""
    keys = [f"k{number}" for number in range(50)]
    voice.mount(size_bytes=1 << 20)
    voice.put(*keys, group="g")
    eviction, visited = voice.master.catalog.eviction, list[str]()
    changed = eviction.changed

    def counted(stored: StoredObject, now: float) -> None:
        visited.append(stored.key)
        changed(stored, now)

    monkeypatch.setattr(eviction, "changed", counted)
    group = voice.master.objects.groups["g"]
    for ttl_s, num_visits, pins in (
        (60.0, 0, (0, 60.0)),  # noticed when a member surfaces
        (60.0, 0, (0, 60.0)),
        (30.0, 50, (0, 30.0)),
        (0.0, 50, (0, 0.0)),
        (None, 50, (50, 0.0)),
        (None, 0, (50, 0.0)),
    ):
        visited.clear()
        voice.say(m.Pin(keys, ttl_s))
        assert (len(visited), (group.num_hard_pinned, group.soft_pin_until)) == (num_visits, pins), ttl_s
    visited.clear()
    voice.say(m.Pin(keys[:20], 0.0))
    voice.say(m.Remove(keys[20:], True))
    assert len(visited) == 20, "the others could leave only when the last pinned one had left"


def test_a_group_is_pinned_as_long_as_the_longest_pin_of_its_members(voice: Voice) -> None:
    voice.mount()
    voice.put("a", "b", group="g")
    group = voice.master.objects.groups["g"]
    for keys, ttl_s, expected in (("a", 50.0, 50.0), ("b", 20.0, 50.0), ("b", 0.0, 50.0), ("b", 20.0, 50.0)):
        voice.say(m.Pin(list(keys), ttl_s))
        assert group.soft_pin_until == expected
    voice.say(m.Pin(["a"], 10.0))
    assert group.soft_pin_until == 20.0, "the other member's"
    voice.say(m.Pin(["a"], 50.0))
    voice.remove("a", force=True)
    assert group.soft_pin_until == 50.0
    voice.say(m.Pin(["b"], 0.0))
    assert group.soft_pin_until == 0.0, "no member of the group is pinned any longer"


def test_bad_pins(voice: Voice) -> None:
    assert isinstance(voice.say(m.Pin(["a"], -1.0)), Failure)


def two_nodes(voice: Voice) -> None:
    voice.mount("a")
    voice.mount("b", host="other")


def test_a_pattern_removes_what_it_is_found_in_and_leaves_what_is_leased(voice: Voice) -> None:
    voice.mount(size_bytes=65536)
    voice.put("kv/1", "kv/2", "kv/3", "other")
    voice.find("kv/2")
    assert voice.say(m.RemoveMatching("^kv/[12]$", force=False)) == m.Removed(1, 1)
    assert voice.say(m.RemoveMatching("v/", force=True)) == m.Removed(2, 0)
    assert voice.say(m.RemoveMatching("", force=False)) == m.Removed(1, 0)


def test_a_pattern_ends_at_the_tenant(voice: Voice) -> None:
    voice.mount(size_bytes=65536)
    voice.put("k")
    voice.put("k", tenant="red")
    voice.put("k", tenant="blue")
    assert voice.say(m.RemoveMatching("", False, "red")) == m.Removed(1, 0)
    assert voice.say(m.RemoveMatching("red", False)) == m.Removed(0, 0)
    assert [voice.find("k", tenant) is not None for tenant in ("", "red", "blue")] == [True, False, True]


@pytest.mark.parametrize("pattern", ["(", "x" * 2000])
def test_an_invalid_pattern_is_refused(voice: Voice, pattern: str) -> None:
    assert isinstance(voice.say(m.RemoveMatching(pattern, False)), Failure)


@pytest.mark.parametrize("tenant", ["", "red", "x" * 5000])
@pytest.mark.parametrize("key", ["", "a\0b", "x" * 5000])
def test_a_key_that_no_object_can_have_leaves_nothing_in_the_master(
    voice: Voice, tenant: str, key: str
) -> None:
    voice.mount()
    num_records = len(voice.records)
    keys = [key] if len(tenant) < 1000 else [key, "k"]
    assert voice.say(m.Remove(keys, False, tenant)).outcomes == [False] * len(keys)
    assert voice.say(m.LookupObjects(keys, tenant)).objects == [None] * len(keys)
    assert voice.say(m.DropReplicas(keys, "", tenant)).outcomes == [False] * len(keys)
    catalog = voice.master.catalog
    assert not catalog.tombstones and len(voice.records) == num_records
    assert {one for looked_up in catalog.recent for one in looked_up} == {""}


def test_one_replica_is_dropped_and_the_object_with_the_last(voice: Voice) -> None:
    two_nodes(voice)
    voice.put("k", "l", policy=TWO)
    assert voice.say(m.DropReplicas(["k", "k", "none"], "a")).outcomes == [True, False, False]
    assert voice.where("k") == ["b"]
    assert voice.say(m.DropReplicas(["k", "l"], "")).outcomes == [True, True]
    assert voice.there("kl") == "" and voice.allocated_bytes == 0


def test_a_leased_replica_is_not_dropped(voice: Voice) -> None:
    two_nodes(voice)
    voice.put("k", policy=TWO)
    voice.find("k")
    assert voice.say(m.DropReplicas(["k"], "a")).outcomes[0].code == "leased"


@pytest.mark.parametrize(("segment", "must_last"), [("a/ssd", True), ("a", False), ("", False)])
def test_a_replica_that_was_dropped_from_an_ssd_does_not_come_back(segment: str, must_last: bool) -> None:
    """After a loss of power the node would report it again, if the record of its removal were lost, too."""
    nodes = Nodes(SETTINGS)
    _, ssd = with_ssd(nodes)
    nodes.put("k", host="a")
    nodes.say(m.CopyObject("k", ["a/ssd"]))
    ssd.work()
    assert nodes.where("k") == ["a", "a/ssd"]
    effects = nodes.handle(Received("origin", "client", m.DropReplicas(["k"], segment)))
    (reply,) = [one for one in effects if isinstance(one, Reply) and one.origin == "origin"]
    assert reply.message == m.Outcomes([True]) and reply.must_last is must_last

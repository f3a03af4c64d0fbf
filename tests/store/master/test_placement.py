# SPDX-License-Identifier: Apache-2.0
"""Space for puts: found, freed by evicting no more than a budget, and never beyond a tenant's quota."""

from __future__ import annotations

import dataclasses

import pytest

from mooncake.store import messages as m
from mooncake.store.master.master import Master
from mooncake.store.master.placement import SegmentPlacement
from mooncake.store.master.segments import LOST, Segment, Segments
from mooncake.store.master.snapshot import Snapshot
from mooncake.store.master.tenants import Account
from mooncake.store.messages import Mount, PutPolicy
from tests.store.conftest import GRACE_S, LEASE_S, PUT_S, SETTINGS, Voice, follower
from tests.store.nodes import Nodes, Place

KIB = 1024


class Room:
    """Segments that have confirmed their mounts."""

    def __init__(self) -> None:
        self.segments = Segments(ttl_s=5.0, heartbeat_s=1.0)

    def add(self, name: str, size_bytes: int, host: str = "h") -> Segment:
        self.segments.mount(Mount(name, 1, host, 0, size_bytes, b"", 0.0), "c", 0.0)
        segment = self.segments.beat(name, 1, "c", 0.0)
        assert segment is not None
        return segment

    def placement(self, *avoid: str, now: float = 0.0) -> SegmentPlacement:
        return SegmentPlacement(self.segments, "h", avoid, now)


def places(placement: SegmentPlacement, count: int, size_bytes: int) -> str:
    names = ""
    for _ in range(count):
        place = placement.allocate(size_bytes)
        names += place[0].name if place else "-"
    return names


def test_own_host_first_then_the_emptiest() -> None:
    room = Room()
    for name, size_bytes, host in (("a", 256, "h"), ("b", 640, "far"), ("c", 512, "far")):
        room.add(name, size_bytes, host)
    assert places(room.placement(), 8, 64) == "aaaabbbc"


def test_a_batch_spreads_over_equal_nodes() -> None:
    room = Room()
    for name in "abc":
        room.add(name, 640, "far")
    assert places(room.placement(), 9, 64) == "abcabcabc"


def test_a_hole_elsewhere_is_found_when_the_emptiest_is_in_pieces() -> None:
    room = Room()
    pieces, whole = room.add("a", 1024), room.add("b", 512)
    for offset in [pieces.allocator.allocate(64) for _ in range(16)][::2]:
        assert offset is not None
        pieces.allocator.free(offset)
    taken = whole.allocator.allocate(64)
    assert taken is not None and pieces.allocator.free_bytes > whole.allocator.free_bytes
    placement = room.placement()
    assert places(placement, 1, 128) == "b"
    assert places(placement, 1, 64) == "a"


def test_only_segments_that_take_objects_count() -> None:
    room = Room()
    dead, resting, _, good = (room.add(name, 1024 * (4 - i)) for i, name in enumerate("abcd"))
    dead.move(LOST)
    resting.rests_until = 10.0
    placement = room.placement("c", now=5.0)
    assert placement.largest_bytes == 1024
    assert places(placement, 1, 64) == "d"
    assert placement.segments == [good]


def test_freed_space_changes_the_order() -> None:
    room = Room()
    room.add("a", 128)
    b = room.add("b", 128)
    placement = room.placement()
    assert places(placement, 5, 64) == "abab-"
    b.allocator.free(0)
    placement.freed(b)
    assert places(placement, 2, 64) == "b-"


def test_a_newcomer_counts_more_and_more_over_its_first_minute() -> None:
    """Five times as empty as the other, it does not come first until it has been there for some time."""
    room = Room()
    old = room.add("a", 64 * 1000)
    new = room.add("b", 64 * 1000)
    new.joined_at = 100.0
    assert old.allocator.allocate(64 * 800) is not None
    counts = []
    for now in (100.0, 130.0, 160.0):
        placed = places(room.placement(now=now), 100, 64)
        counts.append(placed.count("b"))
        for segment in (old, new):
            for offset in [at for at, size in segment.allocator.allocations.items() if size == 64]:
                segment.allocator.free(offset)
    assert counts == [0, 100, 100]


def test_where_no_other_has_room_a_newcomer_takes_everything() -> None:
    room = Room()
    room.add("a", 128)
    room.add("b", 640).joined_at = 100.0
    assert places(room.placement(now=100.0), 8, 64) == "aabbbbbb"


def test_further_replicas_go_to_other_hosts_first_and_nowhere_twice() -> None:
    room = Room()
    a, b, c, d = (room.add(name, 640, host) for name, host in zip("abcd", "hhxx", strict=True))
    placement = room.placement()
    taken, order = [a], []
    for segment in placement.others(taken):
        taken.append(segment)
        order.append(segment)
    assert order == [c, b, d]


def test_the_preferred_come_first_while_they_have_room() -> None:
    room = Room()
    room.add("a", 640)
    room.add("b", 128, "far")
    policy = PutPolicy(preferred_segments=["x", "b"])
    placement = SegmentPlacement(room.segments, "h", (), 0.0, policy)
    assert places(placement, 4, 64) == "bbaa"


def test_nothing_to_place_on() -> None:
    placement = Room().placement()
    assert placement.largest_bytes == 0 and placement.allocate(1) is None


def refusal(voice: Voice, key: str, **more: object) -> str:
    started = voice.start(key, **more)  # type: ignore[arg-type]
    assert started.reserved == [None]
    return f"{started.refusals[0].code}: {started.refusals[0].reason}"


def test_a_refusal_names_why_no_segment_takes_a_put(voice: Voice) -> None:
    assert "no segment is mounted" in refusal(voice, "k")
    voice.mount("a", 4 * KIB)
    assert refusal(voice, "k", size_bytes=5 * KIB).startswith("too_large: 5120 bytes; the largest")
    voice.lose("node a")
    assert "no segment is mounted" in refusal(voice, "k")


def test_resting_space_is_allocated_later_and_the_refusal_names_when(voice: Voice) -> None:
    voice.mount("a", 4 * KIB, rest_s=9.0)
    assert refusal(voice, "k").endswith("space is allocated again in 9 s")


def test_a_put_that_finds_no_hole_does_not_flush_the_cache(voice: Voice) -> None:
    """Pinned objects between all others: the budget is 8 times its size, or the share of an eviction."""
    voice.mount("a", 64 * KIB)
    for number in range(64):
        voice.put(f"k{number}", size_bytes=KIB, policy=m.PutPolicy(is_hard_pinned=number % 2 == 0))
    assert refusal(voice, "large", size_bytes=2 * KIB).startswith("no_space")
    num_left = len(voice.master.objects.readable)
    assert 64 - 17 <= num_left < 64


def test_replicas_are_best_effort_but_the_first(voice: Voice) -> None:
    voice.mount("a", 2 * KIB)
    voice.mount("b", 2 * KIB, host="other")
    two = m.PutPolicy(num_replicas=2, is_hard_pinned=True)
    voice.put("full", size_bytes=2 * KIB, policy=m.PutPolicy(is_hard_pinned=True), host="h")
    (place,) = voice.put("k", size_bytes=KIB, policy=two)
    assert [one.segment for one in place.replicas] == ["b"]


def test_a_tenant_over_its_quota_gives_its_own_away_first(voice: Voice) -> None:
    voice.mount("a", 64 * KIB)
    voice.say(m.SetQuota("red", 3 * KIB))
    for key in "abc":
        voice.put(key, size_bytes=KIB, tenant="red")
    voice.put("other", size_bytes=KIB)
    voice.put("d", size_bytes=KIB, tenant="red")
    assert voice.inspect("a", "red") is None and voice.inspect("other") is not None
    reason = refusal(voice, "e", size_bytes=4 * KIB, tenant="red")
    assert reason.startswith("quota_exceeded: the object takes 4096 bytes of tenant 'red'")
    assert voice.inspect("b", "red") is not None, "nothing goes for what can never fit"
    for key in "bcd":
        voice.find(key, "red")
    assert "3072 of 3072 bytes are used" in refusal(voice, "e", size_bytes=KIB, tenant="red")


def test_a_second_replica_stays_within_the_quota(voice: Voice) -> None:
    voice.mount("a", 64 * KIB)
    voice.mount("b", 64 * KIB, host="other")
    voice.say(m.SetQuota("red", 3 * KIB))
    (place,) = voice.put("k", size_bytes=2 * KIB, tenant="red", policy=m.PutPolicy(num_replicas=2))
    assert len(place.replicas) == 1


def test_what_was_pinned_or_had_children_leaves_for_the_quota_when_it_can() -> None:
    """Each search sets aside what can't leave; changes bring it back."""
    voice = Voice(dataclasses.replace(SETTINGS, eviction_policy="chain"))
    voice.mount("a", 64 * KIB)
    voice.say(m.SetQuota("red", 4 * KIB))
    voice.put("p", size_bytes=KIB, tenant="red", policy=m.PutPolicy(is_hard_pinned=True))
    voice.put("g", size_bytes=KIB, tenant="red", policy=m.PutPolicy(is_hard_pinned=True), group="g")
    voice.put("h", size_bytes=KIB, tenant="red", group="g")
    voice.put("s", size_bytes=KIB, tenant="red", policy=m.PutPolicy(soft_pin_ttl_s=20.0))
    voice.keep_alive(1.0)
    assert "4096 of 4096 bytes are used" in refusal(voice, "x", size_bytes=KIB, tenant="red")
    voice.say(m.Pin(["p"], 0.0, "red"))
    voice.put("x", size_bytes=KIB, tenant="red", parents=["s"])
    assert voice.inspect("p", "red") is None
    voice.keep_alive(20.0)
    voice.put("y", size_bytes=KIB, tenant="red", parents=["s"])
    assert voice.inspect("x", "red") is None, "its parent has another child"
    voice.put("z", size_bytes=2 * KIB, tenant="red")
    assert [voice.inspect(key, "red") is None for key in "ysghz"] == [True, True, False, False, False]
    voice.say(m.Remove(["g"], True, "red"))
    voice.put("v", size_bytes=4 * KIB, tenant="red")


def test_a_put_that_can_not_succeed_leaves_the_cache_of_its_tenant(voice: Voice) -> None:
    voice.mount("a", 8 * KIB)
    voice.mount("b", 8 * KIB)
    voice.say(m.SetQuota("red", 10 * KIB))
    for number in range(10):
        policy = m.PutPolicy(is_hard_pinned=number % 2 == 0)
        voice.put(f"k{number}", size_bytes=KIB, tenant="red", policy=policy)
    reason = refusal(voice, "large", size_bytes=9 * KIB, tenant="red")
    assert reason.startswith("too_large: 9216 bytes; the largest segment has 8192")
    reason = refusal(voice, "large", size_bytes=6 * KIB, tenant="red")
    assert reason.endswith("takes 6144 bytes of tenant 'red', and 10240 of 10240 bytes are used")
    assert len(voice.master.objects.readable) == 10
    voice.put("l", size_bytes=3 * KIB, tenant="red")
    assert len(voice.master.objects.readable) == 8, "only what had to leave"
    voice.say(m.Remove(["l"], True, "red"))
    voice.say(m.Pin([f"k{number}" for number in range(10)], 0.0, "red"))
    voice.put("all", size_bytes=8 * KIB, tenant="red")


def test_a_group_that_becomes_pinned_leaves_as_much_less_room(voice: Voice) -> None:
    voice.mount("a", 16 * KIB)
    voice.say(m.SetQuota("red", 8 * KIB))
    voice.put("a", "b", "c", size_bytes=KIB, tenant="red", group="g")
    voice.put("d", size_bytes=KIB, tenant="red")
    voice.put("p", size_bytes=KIB, tenant="red", group="g", policy=m.PutPolicy(is_hard_pinned=True))
    voice.keep_alive(1.0)
    assert "takes 5120 bytes" in refusal(voice, "x", size_bytes=5 * KIB, tenant="red")
    assert len(voice.master.objects.readable) == 5
    voice.say(m.Remove(["p"], True, "red"))
    voice.put("x", size_bytes=8 * KIB, tenant="red")


def test_space_that_rests_is_no_room_either(voice: Voice) -> None:
    """A put that needs it must not evict what is left of the tenant's cache."""
    voice.mount("a", 16 * KIB)
    voice.say(m.SetQuota("red", 4 * KIB))
    voice.put("a", "b", "c", size_bytes=KIB, tenant="red")
    place = voice.start("d", size_bytes=KIB, tenant="red").reserved[0]
    assert place is not None
    voice.say(m.PutAbort(["d"], [place.object_id], "red"))
    assert "takes 4096 bytes" in refusal(voice, "x", size_bytes=4 * KIB, tenant="red")
    assert len(voice.master.objects.readable) == 3
    voice.keep_alive(PUT_S + GRACE_S)
    voice.put("x", size_bytes=4 * KIB, tenant="red")


@pytest.mark.parametrize("group", ["", "g"])
def test_a_put_that_can_not_succeed_visits_no_object(
    voice: Voice, monkeypatch: pytest.MonkeyPatch, group: str
) -> None:
    """A tenant that repeats it would slow down all others."""
    voice.mount("a", 64 * KIB)
    voice.say(m.SetQuota("red", 8 * KIB))
    voice.put("p", size_bytes=KIB, tenant="red", policy=m.PutPolicy(is_hard_pinned=True))
    voice.put(*(f"k{number}" for number in range(100)), size_bytes=64, tenant="red", group=group)
    monkeypatch.setattr(Account, "victims", None)
    assert "takes 8192 bytes" in refusal(voice, "x", size_bytes=8 * KIB, tenant="red")


@pytest.mark.parametrize("pinned", ["", "c", "d"])
def test_a_chain_makes_room_for_a_quota_from_its_end_on(pinned: str) -> None:
    voice = Voice(dataclasses.replace(SETTINGS, eviction_policy="chain"))
    voice.mount("a", 64 * KIB)
    voice.say(m.SetQuota("red", 4 * KIB))
    for key, parent in ("a", ""), ("b", "a"), ("c", "b"), ("d", "b"):
        policy = m.PutPolicy(is_hard_pinned=key == pinned)
        voice.put(key, size_bytes=KIB, tenant="red", policy=policy, parents=[parent])
    if pinned:
        assert "3072 of 4096 bytes" in refusal(voice, "x", size_bytes=2 * KIB, tenant="red")
        assert len(voice.master.objects.readable) == 3, "a put that is refused evicts less than it takes"
        voice.put("x", size_bytes=KIB, tenant="red")
    else:
        voice.put("x", size_bytes=3 * KIB, tenant="red")
        assert sorted(voice.master.objects.readable) == ["red\0a", "red\0x"]


@pytest.mark.parametrize("num_keys", [1, 4])
def test_small_objects_count_with_what_they_take(voice: Voice, num_keys: int) -> None:
    voice.mount("a", 64 * KIB)
    keys = [f"k{number}" for number in range(num_keys)]
    voice.put(*keys, size_bytes=1, tenant="red")
    assert used_bytes(voice.master) == voice.allocated_bytes == 64 * num_keys
    voice.say(m.SetQuota("red", 64 * num_keys))
    voice.put("l", size_bytes=1, tenant="red")
    assert used_bytes(voice.master) == 64 * num_keys, "in the place of another"


def used_bytes(master: Master) -> int:
    account = master.catalog.tenants.accounts.get("red")
    return 0 if account is None else account.used_bytes


def test_aborted_puts_count_until_their_space_is_released(voice: Voice) -> None:
    """Otherwise a tenant with a small quota could take the whole pool, and have others' objects evicted."""
    voice.mount("a", 64 * KIB)
    voice.say(m.SetQuota("red", 3 * KIB))
    for key in "abc":
        place = voice.start(key, size_bytes=KIB, tenant="red").reserved[0]
        assert place is not None
        assert voice.say(m.PutAbort([key], [place.object_id], "red")).outcomes == [True]
    assert "3072 of 3072 bytes are used" in refusal(voice, "d", size_bytes=KIB, tenant="red")
    voice.keep_alive(PUT_S + GRACE_S)
    voice.put("d", size_bytes=KIB, tenant="red")


def test_leased_objects_that_were_removed_count_until_their_leases_end(voice: Voice) -> None:
    voice.mount("a", 64 * KIB)
    voice.say(m.SetQuota("red", KIB))
    voice.put("k", size_bytes=KIB, tenant="red")
    voice.find("k", "red")
    assert voice.say(m.Remove(["k"], True, "red")).outcomes == [True]
    assert "1024 of 1024 bytes are used" in refusal(voice, "k", size_bytes=KIB, tenant="red")
    voice.keep_alive(LEASE_S)
    voice.put("k", size_bytes=KIB, tenant="red")


def test_what_rests_on_a_segment_that_is_gone_counts_no_longer(voice: Voice) -> None:
    voice.mount("a", 64 * KIB)
    voice.put("k", "l", tenant="red")
    voice.find("k", "red")
    voice.say(m.Remove(["k", "l"], True, "red"))
    assert used_bytes(voice.master) == KIB
    voice.say(m.Unmount("a", 7), "node a")
    assert voice.master.catalog.tenants.accounts.keys() <= {""}


def test_a_successor_counts_only_what_is_there(voice: Voice) -> None:
    """To it, everything that was removed lately may be leased: so much that no put would be granted."""
    voice.mount("a", 64 * KIB)
    voice.say(m.SetQuota("red", 3 * KIB))
    for number in range(8):
        voice.put(f"k{number}", size_bytes=KIB, tenant="red")
    voice.find("k7", "red")
    voice.say(m.Remove(["k7"], True, "red"))
    place = voice.start("l", size_bytes=512, tenant="red").reserved[0]
    assert place is not None and used_bytes(voice.master) == 2 * KIB + 512
    other = follower(voice.records)
    assert other.segments.mounted["a"].allocator.allocated_bytes == 2 * KIB + 512
    assert used_bytes(other) == KIB
    successor = Voice(SETTINGS)
    snapshot = Snapshot(voice.master.catalog)
    while not snapshot.is_over:
        successor.master.apply(snapshot.piece(), 0.0)
        successor.master.check()
    assert used_bytes(successor.master) == KIB
    successor.wait(100.0)
    assert used_bytes(successor.master) == 0


def test_what_a_drain_leaves_behind_counts_no_longer() -> None:
    nodes = Nodes(SETTINGS)
    _, b = Place(nodes, "a"), Place(nodes, "b")
    nodes.put("k", tenant="red", host="a")
    nodes.find("k", "red")
    nodes.say(m.DrainSegments(["a"], []))
    b.work()
    assert nodes.allocated_bytes == 2048, "a reader may have the old one"
    assert used_bytes(nodes.master) == KIB


@pytest.mark.parametrize("watermark", [0.5, 0.8])
def test_eviction_ahead_of_need_follows_the_ratio(watermark: float) -> None:
    voice = Voice(dataclasses.replace(SETTINGS, high_watermark=watermark, eviction_ratio=0.2))
    voice.mount("a", 100 * KIB)
    most = 0
    for number in range(150):
        voice.put(f"k{number}", size_bytes=KIB)
        most = max(most, voice.allocated_bytes)
    assert most <= (watermark + 0.02) * 100 * KIB
    assert voice.allocated_bytes >= (watermark - 0.2) * 100 * KIB - KIB
    assert voice.inspect("k149") is not None and voice.inspect("k0") is None

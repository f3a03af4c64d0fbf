# SPDX-License-Identifier: Apache-2.0
"""Replicas that are added and removed; any sequence of requests keeps the invariants."""

from __future__ import annotations

import dataclasses
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake.store import messages as m
from mooncake.store.master.master import Master
from mooncake.store.master.objects import Extent
from mooncake.types import Tier
from tests.store.conftest import SETTINGS, Voice, contents, follower
from tests.store.master.test_catalog_events import Observer
from tests.store.nodes import Nodes, Place, with_ssd


class Room:
    """A master with two nodes and an object on the first one."""

    def __init__(self) -> None:
        self.voice = Voice(SETTINGS)
        self.voice.mount("a")
        self.voice.mount("b", host="other")
        self.voice.put("k")
        self.catalog = self.voice.master.catalog
        self.observer = Observer(self.catalog)
        self.stored = self.catalog.objects.readable["k"]
        self.b = self.catalog.segments.mounted["b"]

    def add(self, until: float = 10.0) -> Extent:
        extent = self.catalog.add_extent(self.stored, self.b, self.voice.now, until)
        assert extent is not None
        self.check()
        return extent

    def complete(self, extent: Extent) -> None:
        self.catalog.complete_extent(self.stored, extent, self.voice.now)
        self.check()

    def drop(self, extent: Extent) -> int:
        released_bytes = self.catalog.drop_extent(self.stored, extent, "the test", self.voice.now)
        self.check()
        return released_bytes

    def check(self) -> None:
        self.voice.master.check()

    @property
    def taken_bytes(self) -> int:
        return self.b.allocator.allocated_bytes


def test_a_replica_is_readable_from_its_completion_on() -> None:
    room = Room()
    extent = room.add()
    assert room.voice.where("k") == ["a"] and room.taken_bytes == 1024
    room.complete(extent)
    assert room.voice.where("k") == ["a", "b"]
    found = room.voice.find("k")
    assert found is not None and len(found.replicas) == 2
    assert room.catalog.add_extent(room.stored, room.b, 0.0, 1.0) is None, "there is one"


def test_a_replica_that_is_not_completed_in_time_is_dropped_and_rests() -> None:
    room = Room()
    room.add(until=4.0)
    room.voice.keep_alive(4, "a", "b")
    assert room.stored.on(room.b) is None and room.taken_bytes == 1024
    assert room.observer.lines == ["ReplicaRemoved k b: not written in time"]
    room.voice.keep_alive(5, "a", "b")
    assert room.taken_bytes == 0


def test_a_dropped_replica_waits_for_its_readers() -> None:
    room = Room()
    extent = room.add()
    room.complete(extent)
    room.voice.find("k")
    assert room.drop(extent) == 0 and room.voice.where("k") == ["a"]
    room.voice.keep_alive(9, "a", "b")
    room.voice.find("k")
    room.voice.keep_alive(1, "a", "b")
    assert room.taken_bytes == 0, "later readers did not get it"


def test_a_replica_that_a_task_reads_waits_for_the_task() -> None:
    room = Room()
    extent = room.add()
    room.complete(extent)
    room.catalog.hold(extent, 3.0)
    assert room.drop(extent) == 0
    room.voice.keep_alive(2, "a", "b")
    assert room.taken_bytes == 1024
    room.voice.keep_alive(1, "a", "b")
    assert room.taken_bytes == 0


def test_with_its_last_complete_replica_the_object_goes() -> None:
    room = Room()
    room.add()
    assert room.drop(room.stored.extents[0]) == 1024
    assert room.voice.inspect("k") is None
    assert room.observer.lines == [
        "ReplicaRemoved k a: the test",
        "ReplicaRemoved k b: the test",
        "ObjectRemoved k",
    ]
    assert room.taken_bytes == 1024, "someone may still write it"
    room.voice.keep_alive(15, "a", "b")
    assert room.taken_bytes == 0


def test_room_is_made_on_exactly_that_segment() -> None:
    room = Room()
    room.voice.put("p", "q", "r", "s", host="other")
    assert room.taken_bytes == 4096
    assert not room.catalog.make_room(room.b, 5000, 0.0)
    assert room.catalog.make_room(room.b, 2000, 0.0)
    room.check()
    assert room.voice.there("kpqrs") == "krs"


def test_a_replica_that_finds_no_hole_does_not_flush_the_segment() -> None:
    """Pinned objects between all others: however many are evicted, no hole opens."""
    voice = Voice(SETTINGS)
    voice.mount("a", 64 << 10)
    names = [f"k{number:02}" for number in range(64)]
    for number, name in enumerate(names):
        voice.put(name, size_bytes=1024, policy=m.PutPolicy(is_hard_pinned=number % 2 == 0))
    segment = voice.master.segments.mounted["a"]
    assert not voice.master.catalog.make_room(segment, 2048, voice.now)
    num_left = sum(voice.inspect(name) is not None for name in names)
    num_evicted = 64 - num_left
    assert num_evicted * 1024 <= 8 * 2048 + 1024, "no more than its budget, and what overdrew it"
    assert num_left > 32, "not all that may be evicted"


def test_a_second_task_that_ends_sooner_does_not_shorten_the_first_ones_hold() -> None:
    room = Room()
    extent = room.add()
    room.complete(extent)
    room.catalog.hold(extent, 8.0)
    room.catalog.hold(extent, 3.0)
    room.drop(extent)
    room.voice.keep_alive(7, "a", "b")
    assert room.taken_bytes == 1024
    room.voice.keep_alive(1, "a", "b")
    assert room.taken_bytes == 0


def test_a_successor_knows_of_a_resting_replica_that_a_reader_keeps() -> None:
    """A view that is kept open renews its lease for longer than any promise that the successor assumes."""
    room = Room()
    extent = room.add()
    room.complete(extent)
    room.voice.find("k")
    room.drop(extent)
    there = follower([*room.voice.records, *room.catalog.records])
    rest_s = int(SETTINGS.rest_s)
    for _ in range(rest_s // 5 + 1):
        first = len(room.voice.records)
        assert room.voice.say(m.Renew(["k"], [room.stored.object_id])).flags == b"\1"
        there.apply(room.voice.records[first:], 100.0 + room.voice.now)
        room.voice.keep_alive(5, "a", "b")
        there.catalog.end_rests(100.0 + room.voice.now)
    assert room.taken_bytes == 1024 and room.voice.now > rest_s
    assert there.segments.mounted["b"].allocator.allocated_bytes == 1024


def test_no_replica_where_nothing_may_be_given_out() -> None:
    room = Room()
    room.voice.lose("node b")
    assert room.catalog.add_extent(room.stored, room.b, 0.0, 1.0) is None


def test_without_a_copy_on_ssd_nothing_is_evicted_when_that_is_wanted() -> None:
    nodes = Nodes(dataclasses.replace(SETTINGS, evict_undemoted=False, demote_watermark=1.0))
    with_ssd(nodes, memory_bytes=2048)
    nodes.put("a", "b", host="a")
    assert nodes.start("c", host="a").refusals[0].code == "no_space"
    copied(nodes, "b", "a/ssd")
    nodes.put("c", host="a")
    assert [nodes.where(key) for key in "abc"] == [["a"], ["a/ssd"], ["a"]]
    counts = nodes.master.counts
    assert (counts.evicted_replicas, counts.evicted_objects) == (1, 0)


def test_a_group_stays_in_memory_while_one_of_it_is_nowhere_else() -> None:
    nodes = Nodes(dataclasses.replace(SETTINGS, evict_undemoted=False, demote_watermark=1.0))
    with_ssd(nodes, memory_bytes=3072)
    nodes.put("a", host="a", group="g")
    nodes.put("b", host="a", group="g")
    nodes.put("c", host="a")
    copied(nodes, "a", "a/ssd")
    assert nodes.start("d", host="a").refusals[0].code == "no_space"
    copied(nodes, "b", "a/ssd")
    nodes.put("d", host="a")
    assert [nodes.where(key) for key in "abcd"] == [["a/ssd"], ["a/ssd"], ["a"], ["a"]]


def copied(nodes: Nodes, key: str, segment: str) -> None:
    catalog = nodes.master.catalog
    stored = catalog.objects.readable[key]
    extent = catalog.add_extent(stored, catalog.segments.mounted[segment], nodes.now, nodes.now + 5)
    assert extent is not None
    catalog.complete_extent(stored, extent, nodes.now)
    nodes.master.check()


def test_an_ssd_gives_its_coldest_away_and_keeps_what_was_promised() -> None:
    """An object in memory that only loses its copy on SSD would no longer be durable: it is removed."""
    nodes = Nodes(dataclasses.replace(SETTINGS, demote_watermark=1.0))
    with_ssd(nodes, ssd_bytes=8192)
    nodes.put("a", "b", "c", host="a")
    nodes.master.objects.readable["a"].policy = m.PutPolicy(is_durable=True)
    copied(nodes, "a", "a/ssd")
    copied(nodes, "b", "a/ssd")
    copied(nodes, "c", "a/ssd")
    assert [nodes.where(key) for key in "abc"] == [[], ["a", "a/ssd"], ["a", "a/ssd"]]
    nodes.put("d", host="a")
    copied(nodes, "d", "a/ssd")
    assert nodes.where("b") == ["a"]


def test_clocks_are_woken_and_read_again() -> None:
    class Clock:
        def __init__(self) -> None:
            self.at: float | None = 3.0
            self.woken: list[float] = []

        def deadline(self) -> float | None:
            return self.at

        def expire(self, now: float) -> None:
            self.woken.append(now)
            self.at = 7.0 if now < 7.0 else None

    voice, clock = Voice(SETTINGS), Clock()
    voice.master.catalog.clocks.append(clock)
    voice.wait(10.0)
    assert clock.woken == [3.0, 7.0] and voice.master.deadline() is None


# Random requests


class Player:
    """Sends a master random requests."""

    def __init__(self, seed: int, policy: str) -> None:
        self.random = Random(seed)
        changes = {"eviction_policy": policy, "high_watermark": self.random.choice((0.7, 1.0))}
        self.voice = Nodes(dataclasses.replace(SETTINGS, **changes, strict_tenants=False))  # type: ignore[arg-type]
        self.places = {name: self.mount(name, 1) for name in ("a", "a/ssd", "b", "c")}
        self.keys = [f"k{number}" for number in range(12)]
        self.open: list[tuple[str, str, m.Reserved]] = []
        self.num_posts = 0

    def mount(self, name: str, epoch: int) -> Place:
        is_ssd = name == "a/ssd"
        return Place(
            self.voice,
            name,
            {"c": 8192, "a/ssd": 32768}.get(name, 16384),
            tier=Tier.SSD if is_ssd else Tier.MEMORY,
            epoch=epoch,
            content_id=99 if is_ssd else 0,
        )

    def post(self, message: msgspec.Struct) -> list[object]:
        self.num_posts += 1
        origin = f"post {self.num_posts}"
        self.voice.post(message, "client", origin)
        return self.voice.late.get(origin, [])

    def ids(self, keys: list[str], tenant: str) -> list[int]:
        found = self.voice.say(m.Inspect(keys, tenant)).objects
        return [0 if one is None else one.object_id for one in found]

    def step(self) -> None:
        random = self.random
        keys = random.sample(self.keys, random.randint(1, 3))
        tenant = random.choice(("", "", "red"))
        choice = random.randrange(16)
        if choice <= 4:
            self.put(keys, tenant)
        elif choice == 5 and self.open:
            key, owner, place = self.open.pop(random.randrange(len(self.open)))
            failed = [r.segment for r in place.replicas if random.random() < 0.2]
            self.post(m.PutEnd([key], [place.object_id], [b"crc!"], [failed], owner))
        elif choice == 6 and self.open:
            key, owner, place = self.open.pop()
            self.post(m.PutAbort([key], [place.object_id], owner))
        elif choice == 7:
            self.post(m.LookupObjects(keys, tenant))
        elif choice == 8:
            self.post(m.Renew(keys, self.ids(keys, tenant), tenant))
        elif choice == 9:
            self.post(m.Remove(keys, random.random() < 0.5, tenant))
        elif choice == 10:
            segments = random.choices(("a", "b", "a/ssd"), k=len(keys))
            self.post(m.Corrupt(keys, self.ids(keys, tenant), segments, tenant))
        elif choice == 11:
            self.post(m.Pin(keys, random.choice((None, 0.0, 0.0, 5.0)), tenant))
        elif choice == 12:
            self.post(m.DropReplicas(keys, random.choice(("", "a", "a/ssd")), tenant))
        elif choice == 13:
            self.post(m.SetQuota("red", random.choice((None, None, 2500, 9000))))
        elif choice == 14:
            self.post(m.RemoveMatching("1", random.random() < 0.5, tenant))
        else:
            self.post(m.Exists(keys, tenant))
        self.move()

    def put(self, keys: list[str], tenant: str) -> None:
        random = self.random
        policy = m.PutPolicy(
            num_replicas=random.choice((1, 1, 2, 3)),
            soft_pin_ttl_s=random.choice((None, None, 5.0)),
            is_hard_pinned=random.random() < 0.02,
            is_durable=random.random() < 0.2,
            preferred_segments=random.choice(([], ["b"])),
        )
        sizes = [random.randint(1, 3000)] * len(keys)
        groups = random.choice(([], [random.choice("gh")] * len(keys)))
        parents = random.choice(([], random.choices(self.keys, k=len(keys))))
        start = m.PutStart(
            random.getrandbits(40) << 20,
            random.choice("abcx"),
            keys,
            sizes,
            sizes,
            [],
            policy,
            groups,
            parents,
            random.random() < 0.3,
            tenant,
        )
        (started,) = self.post(start)
        assert isinstance(started, m.PutStarted)
        places = zip(keys, started.reserved, strict=True)
        for key, place in places:
            if place is not None and random.random() < 0.7:
                self.post(m.PutEnd([key], [place.object_id], [b"crc!"], [], tenant))
            elif place is not None:
                self.open.append((key, tenant, place))

    def move(self) -> None:
        """Nodes work and send heartbeats, time passes, connections break, processes die."""
        random = self.random
        for name, place in self.places.items():
            beat = m.Heartbeat(name, place.epoch)
            if random.random() < 0.03:
                continue
            if not self.voice.say(beat, place.connection).is_known:
                dies = random.random() < 0.5
                self.voice.wait(0.0 if not dies else 6.0)
                self.places[name] = self.mount(name, place.epoch + dies)
            elif random.random() < 0.4:
                place.work()
        if random.random() < 0.02:
            self.voice.lose(random.choice([place.connection for place in self.places.values()]))
        self.voice.wait(random.choice((0.0, 0.1, 1.0)))


@pytest.mark.parametrize("policy", ["lru", "lfu", "chain"])
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_any_sequence_keeps_the_invariants(policy: str, seed: int) -> None:
    """The voice checks the master after every request and wake; standbys agree with it at the end."""
    player = Player(seed, policy)
    for _ in range(80):
        player.step()
    master = follower(player.voice.records)
    assert contents(master) == contents(player.voice.master)
    together = Master(SETTINGS)
    together.apply(player.voice.records, 100.0)
    together.check()
    assert together.snapshot() == master.snapshot()
    again = Master(SETTINGS)
    again.restore(player.voice.master.snapshot(), 0.0)
    again.check()
    assert contents(again) == contents(master)
    assert {segment.tier for segment in again.segments.mounted.values()} <= {Tier.MEMORY, Tier.SSD}

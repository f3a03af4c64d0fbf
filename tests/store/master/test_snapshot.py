# SPDX-License-Identifier: Apache-2.0
"""A successor or a follower that applies a master's records has the same state, at every step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake.store import messages as m
from mooncake.store.master import snapshot
from mooncake.store.master.catalog import record_of, record_of_segment
from mooncake.store.master.log_records import (
    IdsGiven,
    ObjectGone,
    ObjectReadable,
    Record,
    SegmentGone,
    SegmentMounted,
    SpaceHeld,
)
from mooncake.store.master.master import Master
from mooncake.store.master.snapshot import Snapshot
from mooncake.types import Tier
from tests.store.conftest import PUT_S, SETTINGS, TTL_S, Voice, contents, follower, places_of
from tests.store.master.test_catalog import Player
from tests.store.nodes import Nodes, Place, with_ssd

DURABLE = m.PutPolicy(is_durable=True)
Enumerate = Callable[[Master], list[Record]]
TWO = m.PutPolicy(num_replicas=2)


def whole(master: Master) -> list[Record]:
    return master.snapshot()


def in_pieces(master: Master) -> list[Record]:
    """The records for a standby and for a compacted log."""
    copy, records = Snapshot(master.catalog), list[Record]()
    while not copy.is_over:
        records += copy.piece(3)
    return records


def restored(records: list[Record], now: float = 0.0) -> Master:
    master = Master(SETTINGS)
    for record in records:
        master.apply([record], now)
        master.check()
    return master


def known(master: Master) -> dict[str, Any]:
    """All that a successor must know, enumerated independently of ``Snapshot``."""
    catalog = master.catalog
    objects, news = {}, {}
    for key, stored in master.objects.readable.items():
        version = stored.before or stored
        places = sorted((extent.segment.name, extent.offset) for extent in version.complete())
        if places:
            record = record_of(stored) if version is stored else version.kept
            assert record is not None
            objects[key] = msgspec.structs.replace(record, places=places)
        else:
            news[key] = version.object_id
    for key, (before, since) in catalog.tombstones.items():
        if since == catalog.cleared_of(key):  # otherwise the tenant's record covers it
            news[key] = before
    return {
        "line": master.segments.line,
        "segments": {one.name: record_of_segment(one) for one in master.segments.mounted.values()},
        "taken": {name: dict(one.allocator.allocations) for name, one in master.segments.mounted.items()},
        "objects": objects,
        "news": news,
        "cleared": dict(catalog.cleared),
        "quotas": {
            name: account.quota_bytes
            for name, account in catalog.tenants.accounts.items()
            if account.quota_bytes is not None
        },
    }


class Wanderer(Player):
    """Also leaves more behind: tenants are emptied, absent keys removed, nodes lost for good."""

    def step(self) -> None:
        random = self.random
        tenant = random.choice(("", "red"))
        choice = random.randrange(14)
        keys = random.sample(self.keys, 2)
        if choice == 0:
            self.post(m.RemoveMatching("", random.random() < 0.5, tenant))
        elif choice == 1:
            self.post(m.Remove(keys, True, tenant))
        elif choice == 2:
            name = random.choice(list(self.places))
            self.post(m.Unmount(name, self.places[name].epoch))
        elif choice == 3:
            self.post(m.DrainSegments([random.choice(list(self.places))], []))
        elif choice <= 6:
            self.replace_durably(keys[0], tenant)
        else:
            super().step()
            return
        self.move()

    def replace_durably(self, key: str, tenant: str) -> None:
        size = self.random.randint(1, 3000)
        put_id = self.random.getrandbits(40) << 20
        start = m.PutStart(put_id, "a", [key], [size], [size], [], DURABLE, ["g"], [], True, tenant)
        (started,) = self.post(start)
        assert isinstance(started, m.PutStarted)
        if (place := started.reserved[0]) is not None:
            self.post(m.PutEnd([key], [place.object_id], [b"crc!"], [], tenant))


@pytest.mark.parametrize("enumerate_all", [whole, in_pieces])
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_successor_has_the_same_state(enumerate_all: Enumerate, seed: int) -> None:
    player = Wanderer(seed, "lru")
    for number in range(60):
        player.step()
        if number % 10 == 9:
            master = player.voice.master
            there = restored(enumerate_all(master), player.voice.now)
            assert known(there) == known(master), (seed, number)
            assert known(restored(enumerate_all(there), player.voice.now)) == known(master), (seed, number)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_snapshot_made_meanwhile_equals_the_whole_log(seed: int) -> None:
    player, random = Wanderer(seed, "lru"), Random(seed)
    for _ in range(40):
        player.step()
    voice = player.voice
    copy, copied = Snapshot(voice.master.catalog), list[Record]()
    while not copy.is_over:
        copied += copy.piece(random.randint(1, 2))
        first = len(voice.records)
        if random.random() < 0.5:
            player.step()
        copied += copy.between(voice.records[first:])
    for _ in range(3):
        first = len(voice.records)
        player.step()
        copied += voice.records[first:]
    by_copy, by_log = known(restored(copied)), known(restored(voice.records))
    mine = known(voice.master)
    for what in ("line", "segments", "objects", "news", "cleared", "quotas"):
        assert by_copy[what] == by_log[what] == mine[what], (seed, what)
    for name, taken in mine["taken"].items():
        assert taken.keys() <= by_copy["taken"][name].keys(), (seed, name, "space that was promised is free")


# The two enumerators that had diverged, as an operator meets them


def gone_with_its_node(nodes: Nodes) -> tuple[Place, Place]:
    """An object on an SSD whose node is away for so long that its segment was given up."""
    memory, ssd = with_ssd(nodes)
    nodes.put("k", host="a")
    while tasks := ssd.poll():
        ssd.work(*tasks)
    assert nodes.where("k") == ["a", "a/ssd"]
    nodes.lose(memory.connection)
    nodes.lose(ssd.connection)
    nodes.wait(TTL_S)
    assert not nodes.master.segments.mounted
    return memory, ssd


def successor(records: list[Record], now: float) -> Nodes:
    nodes = Nodes(SETTINGS)
    nodes.now = now
    nodes.master.restore(records, now)
    return nodes


def comes_back(nodes: Nodes, ssd: Place) -> Place:
    held = list(ssd.held.values())
    return Place(nodes, "a/ssd", 1 << 20, tier=Tier.SSD, epoch=8, content_id=99, rest_s=35.0, entries=held)


DEMOTES = dataclasses.replace(SETTINGS, demote_watermark=0.0)


@pytest.mark.parametrize("enumerate_all", [whole, in_pieces])
@pytest.mark.parametrize("removal", ["all", "key"])
def test_a_node_that_was_away_restores_no_removed_object(enumerate_all: Enumerate, removal: str) -> None:
    """After a compaction of the log and at a standby, as at the master that removed it."""
    nodes = Nodes(DEMOTES)
    _, ssd = gone_with_its_node(nodes)
    if removal == "all":
        nodes.say(m.RemoveMatching("", True))
    else:
        nodes.say(m.Remove(["k"], True))
    other = successor(enumerate_all(nodes.master), nodes.now)
    assert ssd.held, "else this shows nothing"
    again = comes_back(other, ssd)
    assert other.where("k") == [] and not again.held


@pytest.mark.parametrize("enumerate_all", [whole, in_pieces])
def test_an_unacknowledged_replacement_does_not_win(enumerate_all: Enumerate) -> None:
    nodes = Nodes(SETTINGS)
    _, ssd = with_ssd(nodes)
    started = nodes.start("k", host="a", policy=DURABLE).reserved[0]
    assert started is not None
    nodes.post(m.PutEnd(["k"], [started.object_id], [b"crc!"]), "client", "first")
    ssd.work()
    assert "first" in nodes.late
    again = nodes.start("k", host="a", policy=DURABLE, replace=True).reserved[0]
    assert again is not None
    nodes.post(m.PutEnd(["k"], [again.object_id], [b"new!"]), "client", "second")
    assert "second" not in nodes.late, "not acknowledged"
    other = restored(enumerate_all(nodes.master))
    assert other.objects.readable["k"].object_id == started.object_id
    space = nodes.master.objects.readable["k"].extents[0]
    assert space.offset in other.segments.mounted["a"].holders, "readers of the new one may be there"


@pytest.mark.parametrize("enumerate_all", [whole, in_pieces])
def test_what_was_put_while_its_tenant_was_emptied_may_come_back(enumerate_all: Enumerate) -> None:
    """Its id is older than the removal, its put-end is newer."""
    nodes = Nodes(DEMOTES)
    memory, ssd = with_ssd(nodes)
    place = nodes.start("k", host="a").reserved[0]
    assert place is not None
    nodes.say(m.RemoveMatching("", True))
    assert nodes.end("k", place.object_id) is True
    while tasks := ssd.poll():
        ssd.work(*tasks)
    for each in (memory, ssd):
        nodes.lose(each.connection)
    nodes.wait(TTL_S)
    assert nodes.where("k") == [] and ssd.held
    again = comes_back(successor(enumerate_all(nodes.master), nodes.now), ssd)
    assert place.object_id in again.held


def test_a_report_that_a_failover_cuts_short_is_continued() -> None:
    """Otherwise the successor would count unreported objects as removed, and the node drop them."""
    nodes = Nodes(DEMOTES)
    _, ssd = gone_with_its_node(nodes)
    lost = Nodes(DEMOTES)  # a master that knows nothing
    entries = list(ssd.held.values())
    mount = m.Mount("a/ssd", 8, "a", 1 << 30, 1 << 20, b"", 35.0, Tier.SSD, 99, "a")
    assert lost.say(mount, "node").wants_report
    records = [*lost.records]
    for other in (successor(records, 0.0), successor(lost.master.snapshot(), 0.0)):
        assert other.say(mount, "node").wants_report
        assert other.say(m.ReportContents("a/ssd", 8, entries, True), "node").unwanted == []
        assert other.where("k") == ["a/ssd"]
        assert not restored(other.records).segments.mounted["a/ssd"].wants_report
        assert not restored(other.master.snapshot()).segments.mounted["a/ssd"].wants_report


def test_a_removal_of_what_is_not_there_is_written_down_once(voice: Any) -> None:
    voice.mount()
    num_records = len(voice.records)
    for _ in range(5):
        voice.remove("never")
    assert len(voice.records) == num_records + 1


def test_space_of_a_pending_replacement_is_promised_anew_with_its_lease() -> None:
    nodes = Nodes(SETTINGS)
    memory, ssd = with_ssd(nodes)
    for number in range(2):
        place = nodes.start("k", host="a", policy=DURABLE, replace=True).reserved[0]
        assert place is not None
        nodes.post(m.PutEnd(["k"], [place.object_id], [b"crc!"]), "client", str(number))
        if not number:
            ssd.work()
    stored = nodes.master.objects.readable["k"]
    other = restored(nodes.records)
    for _ in range(int(PUT_S) + 9):
        nodes.wait(1.0)
        memory.beat()
    other.catalog.end_rests(nodes.now)
    assert stored.extents[0].offset not in other.segments.mounted["a"].holders, "else this shows nothing"
    first = len(nodes.records)
    assert nodes.say(m.Renew(["k"], [stored.object_id])).flags == b"\1"
    other.apply(nodes.records[first:], nodes.now)
    assert stored.extents[0].offset in other.segments.mounted["a"].holders


def facts(master: Master) -> list[Record]:
    """Records without promises: a follower knows less than its leader about removed replicas' space."""
    return [one for one in master.snapshot() if not isinstance(one, SpaceHeld | IdsGiven)]


def lived(voice: Voice) -> None:
    """Cause records of every kind."""
    voice.mount("a")
    voice.mount("b", host="other")
    voice.put("k", "l", "m", policy=TWO)
    voice.remove("l")
    voice.put("n", group="g", policy=m.PutPolicy(is_hard_pinned=True), parents=["k"])
    voice.put("k", replace=True)
    voice.say(m.DropReplicas(["m"], "a"))
    voice.say(m.SetQuota("red", 5000))
    voice.put("r", tenant="red")
    voice.start("unfinished")


def test_a_follower_has_what_the_leader_has(voice: Voice) -> None:
    lived(voice)
    master = follower(voice.records)
    assert contents(master) == contents(voice.master)
    stored = master.objects.readable["n"]
    assert (stored.is_hard_pinned, stored.group, stored.parent) == (True, "g", "k")
    assert facts(master) == facts(follower(voice.master.snapshot())) == facts(voice.master)


def test_records_that_come_again_change_nothing(voice: Voice) -> None:
    """A follower begins with a snapshot, and the log overlaps it."""
    lived(voice)
    master = follower([*voice.master.snapshot(), *voice.master.snapshot()])
    assert contents(master) == contents(voice.master)


def test_applying_makes_no_record_and_no_note(voice: Voice) -> None:
    lived(voice)
    master = follower(voice.records)
    assert not master.catalog.records and not master.catalog.notes and not master.catalog.replies


def test_space_of_what_went_is_taken_by_what_came(voice: Voice) -> None:
    voice.mount(size_bytes=4096)
    for _ in range(20):
        voice.put(*"abcd")
        voice.keep_alive(1)
        for key in "abcd":
            voice.remove(key)
    voice.put("x", size_bytes=4096)
    assert contents(follower(voice.records)) == contents(voice.master)


def test_all_promises_count_from_the_first_answer_on(voice: Voice) -> None:
    lived(voice)
    master = follower(voice.records)
    master.settle(500.0)
    master.check()
    assert master.segments.deadline() == 500.0 + SETTINGS.segment_ttl_s, "nodes have their time from then on"
    assert all(one.leased_until == 500.0 + SETTINGS.lease_s for one in master.objects.readable.values())


def test_a_lost_segment_takes_its_replicas_along(voice: Voice) -> None:
    lived(voice)
    voice.say(m.Unmount("b", 7), "node b")
    master = follower(voice.records)
    assert contents(master) == contents(voice.master)
    assert list(master.segments.mounted) == ["a"] and "m" not in master.objects.readable


def test_an_ssd_that_another_process_serves_keeps_its_content() -> None:
    nodes = Nodes(SETTINGS)
    _, ssd = with_ssd(nodes)
    place = nodes.start("k", host="a", policy=m.PutPolicy(is_durable=True)).reserved[0]
    assert place is not None
    nodes.post(m.PutEnd(["k"], [place.object_id], [b"crc!"]), "client", "end")
    ssd.work()
    nodes.lose(ssd.connection)
    Place(nodes, "a/ssd", 1 << 20, tier=Tier.SSD, epoch=8, content_id=99)
    master = follower(nodes.records)
    assert contents(master) == contents(nodes.master)
    segment = master.segments.mounted["a/ssd"]
    assert segment.epoch == 8
    stored = master.objects.readable["k"].stored
    assert stored is not None and stored.replicas[1].epoch == 8


def test_a_durable_put_repeated_to_a_successor_waits_for_the_ssd_too() -> None:
    """Its writer repeats it after the first master died between put-end and the copy."""
    nodes = Nodes(SETTINGS)
    with_ssd(nodes)
    place = nodes.start("k", host="a", policy=m.PutPolicy(is_durable=True)).reserved[0]
    assert place is not None
    end = m.PutEnd(["k"], [place.object_id], [b"crc!"])
    nodes.post(end, "client", "end")
    other = Nodes(SETTINGS)
    other.master.restore(nodes.records, 0.0)
    other.post(end, "client", "again")
    memory, ssd = with_ssd(other)
    assert other.where("k") == ["a"] and "again" not in other.late
    for _ in range(5):
        other.wait(1.0)
        memory.beat()
        ssd.beat()
        ssd.work()
    assert other.where("k") == ["a", "a/ssd"]
    assert other.late.pop("again") == [m.Outcomes([False])]


def test_a_replica_that_went_rests_and_its_object_grows_no_older(voice: Voice) -> None:
    lived(voice)
    master = follower(voice.records)
    assert master.segments.mounted["a"].allocator.allocated_bytes > sum(
        stored.size_bytes for stored in master.objects.readable.values() if "a" in dict(places_of(stored))
    )
    master.settle(100.0)
    master.check()
    assert master.objects.readable["m"].leased_until == 100.0 + SETTINGS.lease_s


@pytest.mark.parametrize("place", [("nowhere", 0), ("a", 1 << 30), ("a", 32)])
def test_places_that_there_are_not_are_passed_over(voice: Voice, place: tuple[str, int]) -> None:
    lived(voice)
    master = follower(voice.records)
    before = contents(master)
    record = next(one for one in voice.records if getattr(one, "key", "") == "k")
    master.apply([msgspec.structs.replace(record, key="z", object_id=1 << 40, places=[place])], 0.0)
    master.check()
    assert contents(master) == before
    mounted = next(one for one in voice.records if isinstance(one, SegmentMounted))
    master.apply([mounted], 0.0)
    assert contents(master) == before


def test_a_successor_that_takes_over_at_once_is_sound(voice: Voice) -> None:
    """Replicas were removed a moment ago: their space rests for longer than a lease."""
    lived(voice)
    master = follower(voice.records)
    master.settle(100.0)
    master.check()


def test_records_that_come_together_leave_what_they_leave_one_by_one(voice: Voice) -> None:
    """A promise fulfilled within them is not entered and undone; any other must rest."""
    lived(voice)
    together = Master(SETTINGS)
    together.apply(voice.records, 100.0)
    together.check()
    one_by_one = follower(voice.records)
    assert together.snapshot() == one_by_one.snapshot()
    assert any(isinstance(record, SpaceHeld) for record in together.snapshot())


def test_only_the_promise_that_was_kept_does_not_rest(voice: Voice) -> None:
    voice.mount(size_bytes=4096)
    voice.put("k")
    records = voice.records
    mounted = next(record for record in records if isinstance(record, SegmentMounted))
    held = next(record for record in records if isinstance(record, SpaceHeld))
    readable = next(record for record in records if isinstance(record, ObjectReadable))
    other = SpaceHeld([("a", 2048)], held.size_bytes)
    larger = msgspec.structs.replace(readable, size_bytes=held.size_bytes + 64)
    histories: list[list[Record]] = [[mounted, held, other, readable], [mounted, other, held, larger]]
    for history in histories:
        master = Master(SETTINGS)
        master.apply(history, 100.0)
        master.check()
        assert contents(master) == contents(voice.master)
        assert [record for record in master.snapshot() if isinstance(record, SpaceHeld)] == [other]


def test_what_rested_on_a_segment_that_went_hides_nothing_that_rests_there_now(voice: Voice) -> None:
    voice.mount(size_bytes=4096)
    voice.put("k")
    mounted = next(record for record in voice.records if isinstance(record, SegmentMounted))
    readable = next(record for record in voice.records if isinstance(record, ObjectReadable))
    large = msgspec.structs.replace(readable, key="l", size_bytes=4096, chunk_bytes=4096, places=[("a", 0)])
    small = SpaceHeld([("a", 2048)], 64)
    master = follower(
        [
            mounted,
            SpaceHeld([("a", 1024)], 64),
            SegmentGone("a", mounted.epoch),
            msgspec.structs.replace(mounted, epoch=mounted.epoch + 1, content_id=mounted.epoch + 1),
            large,
            ObjectGone("l", large.object_id),
            small,
        ]
    )
    assert [record for record in master.snapshot() if isinstance(record, SpaceHeld)] == [small]


def test_offsets_whose_space_was_released_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "MAX_RESTED", 8)
    nodes = Voice(SETTINGS)
    nodes.mount(size_bytes=1 << 20)
    master = follower(nodes.records)
    resting = master._replay._resting
    for number in range(100):
        now = 100.0 * (number + 1)
        master.apply([SpaceHeld([("a", 64 * number)], 64), SpaceHeld([("a", 1 << 19)], 64)], now)
        assert len(resting["a"]) <= 8 + 2 * 2 + 1 and 64 * number in resting["a"]
        master.catalog.end_rests(now + 99.0)
        master.check()
    mounted = next(record for record in nodes.records if isinstance(record, SegmentMounted))
    master.apply([SegmentGone("a", mounted.epoch)], 20_000.0)
    assert not resting


def test_released_offsets_are_forgotten_however_many_objects_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(snapshot, "MAX_RESTED", 8)
    nodes = Voice(SETTINGS)
    nodes.mount(size_bytes=1 << 20)
    master = follower(nodes.records)
    places = [[("a", 64 * number)] for number in range(400)]
    objects = [ObjectReadable(f"k{at}", at + 1, 64, 64, b"crc!", place) for at, place in enumerate(places)]
    master.apply(objects, 0.0)
    for number in range(200):
        now = 100.0 * (number + 1)
        master.apply([ObjectGone(f"k{number}", number + 1)], now)
        assert len(master._replay._resting["a"]) <= 8 + 2 * 2 + 1
        master.catalog.end_rests(now + 99.0)
    master.check()

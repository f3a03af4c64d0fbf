# SPDX-License-Identifier: Apache-2.0
"""A follower that applies every record equals a successor, at every step."""

from __future__ import annotations

import msgspec
import pytest

from mooncake.store import messages as m
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
from mooncake.store.master.objects import StoredObject
from mooncake.types import Tier
from tests.store.conftest import SETTINGS, Voice
from tests.store.nodes import Nodes, Place, with_ssd

TWO = m.PutPolicy(num_replicas=2)


def follower(records: list[Record]) -> Master:
    """Apply one record after the other, with a check of the invariants after each."""
    master = Master(SETTINGS)
    for record in records:
        master.apply([record], 100.0)
        master.check()
    return master


def contents(master: Master) -> dict[str, tuple[int, list[tuple[str, int]]]]:
    """The acknowledged versions: while a durable object waits for its copy, the one that it replaces
    (``Catalog.show``)."""
    versions = {key: stored.before or stored for key, stored in master.objects.readable.items()}
    return {key: (stored.object_id, places_of(stored)) for key, stored in versions.items() if stored.extents}


def places_of(stored: StoredObject) -> list[tuple[str, int]]:
    return sorted((extent.segment.name, extent.offset) for extent in stored.complete())


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

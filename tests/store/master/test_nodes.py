# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial

import msgspec
import pytest

from mooncake.rpc.wire import Failure
from mooncake.store import messages as m
from mooncake.store.master.effects import RecoveryComplete
from mooncake.store.master.log_records import Doubt, ObjectGone, Record
from mooncake.store.master.master import Master
from mooncake.store.master.objects import MAX_ID, check_put
from mooncake.types import Tier
from tests.store.conftest import SETTINGS, TTL_S
from tests.store.master.test_tiering import where, work
from tests.store.nodes import SSD_BYTES, Nodes, Place, with_ssd

BASE = 1 << 30
DEMOTES = dataclasses.replace(SETTINGS, demote_watermark=0.0)


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    nodes = Nodes(DEMOTES)
    yield nodes
    nodes.master.check()


def ssd_again(nodes: Nodes, old: Place, epoch: int = 8, **more: int) -> Place:
    """The node's process was started again and opens the same directory."""
    settings = {"size_bytes": SSD_BYTES, "content_id": 99, **more}
    return Place(nodes, old.name, tier=Tier.SSD, epoch=epoch, entries=list(old.held.values()), **settings)  # type: ignore[arg-type]


def test_objects_on_an_ssd_come_back_with_a_restarted_node(nodes: Nodes) -> None:
    memory, ssd = with_ssd(nodes)
    (place,) = nodes.put("k", host="a")
    work(nodes, ssd)
    nodes.lose(memory.connection)
    nodes.lose(ssd.connection)
    assert nodes.find("k") is None
    Place(nodes, "a", epoch=8)
    again = ssd_again(nodes, ssd)
    assert not again.mounted.wants_report and again.mounted.num_objects == 1
    found = nodes.find("k")
    assert found is not None and found.object_id == place.object_id
    assert [(one.segment, one.epoch, one.tier) for one in found.replicas] == [("a/ssd", 8, Tier.SSD)]
    assert again.held.keys() == {place.object_id}
    assert any("is back on a/ssd" in line for line in nodes.master.story("k"))


def test_an_ssd_that_comes_back_with_other_content_is_asked_for_its_disk(nodes: Nodes) -> None:
    memory, ssd = with_ssd(nodes)
    nodes.put("k", host="a")
    work(nodes, ssd)
    nodes.lose(memory.connection)
    nodes.lose(ssd.connection)
    Place(nodes, "a", epoch=8)
    Place(nodes, "a/ssd", SSD_BYTES, tier=Tier.SSD, epoch=8, content_id=100)
    gone = {
        one.fields["segment"]: str(one.fields["reason"]) for one in nodes.notes if one.event == "segment_gone"
    }
    assert gone["a"] == "another process took its name"
    assert gone["a/ssd"].endswith("its SSD folder has other content: is the disk mounted?")


def test_what_a_restart_found_is_known_to_the_next_master(nodes: Nodes) -> None:
    _, ssd = with_ssd(nodes)
    nodes.put("k", host="a")
    work(nodes, ssd)
    nodes.lose(ssd.connection)
    ssd_again(nodes, ssd)
    successor = Master(DEMOTES)
    successor.restore(nodes.records, 0.0)
    successor.check()
    assert [one.segment.name for one in successor.objects.readable["k"].complete()] == ["a", "a/ssd"]
    assert successor.segments.mounted["a/ssd"].epoch == 8


def test_tasks_of_the_process_that_died_are_done_by_the_next(nodes: Nodes) -> None:
    memory, ssd = with_ssd(nodes)
    nodes.put("k", host="a")
    (task,) = ssd.poll()
    nodes.lose(ssd.connection)
    again = ssd_again(nodes, ssd)
    assert again.poll(m.TaskDone(task.task_id, None)) == [], "it was handed out with the first poll"
    nodes.wait(1.0)
    assert where(nodes, "k") == ["a"]
    assert memory


def test_an_ssd_of_another_size_is_reported_anew(nodes: Nodes) -> None:
    _, ssd = with_ssd(nodes)
    nodes.put("k", host="a")
    work(nodes, ssd)
    nodes.lose(ssd.connection)
    again = ssd_again(nodes, ssd, size_bytes=2 * SSD_BYTES)
    assert again.mounted.wants_report
    assert where(nodes, "k") == ["a", "a/ssd"]


def reported(
    nodes: Nodes, *entries: m.SegmentEntry, name: str = "a/ssd", tier: Tier = Tier.SSD, line: int = 0
) -> Place:
    """A node that knows these comes to a master that knows nothing."""
    rest_s, content_id = (35.0, 0) if tier is Tier.MEMORY else (0.0, 5)
    place = partial(Place, nodes, name, 1 << 20, tier=tier, rest_s=rest_s, content_id=content_id)
    return place(entries=list(entries), line=line)


def entry(key: str, object_id: int, offset: int = 0, **more: object) -> m.SegmentEntry:
    return m.SegmentEntry(key, object_id, 1000, 1000, b"crc!", offset, **more)  # type: ignore[arg-type]


def test_a_master_that_lost_everything_believes_the_nodes(nodes: Nodes) -> None:
    known = entry("k", 77, 4096, is_hard_pinned=True, group="g", parent="p", is_durable=True)
    ssd = reported(nodes, known, entry("n", 78))
    assert ssd.mounted.wants_report and ssd.held.keys() == {77, 78}
    found = nodes.find("k")
    assert found is not None and found.object_id == 77
    assert found.replicas == [m.Replica("a/ssd", 7, BASE + 4096, Tier.SSD)]
    stored = nodes.master.objects.readable["k"]
    assert (stored.is_hard_pinned, stored.group, stored.parent) == (True, "g", "p")
    assert stored.policy.is_durable and not nodes.master.objects.readable["n"].policy.is_durable
    successor = Master(DEMOTES)
    successor.restore(nodes.records, 0.0)
    assert successor.objects.readable.keys() == {"k", "n"}


@pytest.mark.parametrize(("line", "rest_s"), [(0, 10.0), (77, 35.0)], ids=["new process", "earlier master"])
def test_what_was_reported_rests_and_new_objects_get_larger_ids(
    nodes: Nodes, line: int, rest_s: float
) -> None:
    """A process that had no master before has no copy under way into its SSD: leases are what may be left."""
    reported(nodes, entry("k", 1 << 40), line=line)
    Place(nodes, "m")
    (place,) = nodes.put("new", host="m")
    assert place.object_id > 1 << 40
    segment = nodes.master.segments.mounted["a/ssd"]
    assert not segment.takes_objects(nodes.now + rest_s - 0.1) and segment.takes_objects(nodes.now + rest_s)


def test_nothing_is_given_out_on_an_ssd_before_its_report_is_complete(nodes: Nodes) -> None:
    mount = m.Mount("s", 7, "h", BASE, 1 << 20, b"", 0.0, Tier.SSD, 5, "s")
    assert nodes.say(mount, "c").wants_report
    nodes.say(m.Heartbeat("s", 7), "c")
    segment = nodes.master.segments.mounted["s"]
    assert not segment.takes_objects(1e6)
    assert nodes.say(m.ReportContents("s", 7, [entry("k", 7)], False), "c") == m.Reported([])
    assert nodes.say(mount, "c").wants_report, "it asks again after a lost connection"
    assert nodes.say(m.ReportContents("s", 7, [entry("k", 7), entry("n", 8, 4096)], True), "c") == m.Reported(
        []
    )
    assert segment.takes_objects(1e6)
    assert nodes.master.objects.readable.keys() == {"k", "n"}
    assert isinstance(nodes.say(m.ReportContents("t", 7, [], True), "c"), Failure)


def test_memory_is_reported_too_and_one_object_may_be_in_both(nodes: Nodes) -> None:
    reported(nodes, entry("k", 77, 4096))
    reported(nodes, entry("k", 77, 128), name="a", tier=Tier.MEMORY)
    assert where(nodes, "k") == ["a", "a/ssd"]
    found = nodes.find("k")
    assert found is not None and found.replicas[0].address == BASE + 128


def test_of_two_contents_of_a_key_the_newer_wins(nodes: Nodes) -> None:
    old = reported(nodes, entry("k", 77), name="a/ssd")
    new = reported(nodes, entry("k", 99), name="b/ssd")
    third = reported(nodes, entry("k", 88), name="c/ssd")
    assert where(nodes, "k") == ["b/ssd"] and new.held.keys() == {99} and not third.held
    nodes.wait(0.1)
    old.answered()
    assert not old.held, "its journal notes that it lost"


@pytest.mark.parametrize(
    "bad",
    [
        entry("k", 1, offset=100),
        entry("k", 1, offset=1 << 20),
        entry("k", 1, offset=-4096),
        entry("", 1),
        entry("x" * 2000, 1),
        m.SegmentEntry("k", 1, 0, 1000, b"crc!", 0),
        m.SegmentEntry("k", 1, 1000, 0, b"crc!", 0),
        m.SegmentEntry("k", 1, 1000, 100, b"crc!", 0),
        m.SegmentEntry("k", 1, 2 << 20, 2 << 20, b"crc!", 0),
        entry("k", 1, offset=8192),
    ],
)
def test_impossible_entries_are_rejected(nodes: Nodes, bad: m.SegmentEntry) -> None:
    ssd = reported(nodes, entry("good", 9, 8192), bad)
    assert nodes.master.objects.readable.keys() == {"good"} and ssd.held.keys() == {9}


def test_an_object_with_more_small_chunks_than_writers_may_have_now_is_kept(nodes: Nodes) -> None:
    """An earlier version accepted it; after an upgrade it must not be removed from its node."""
    old = m.SegmentEntry("k", 5, 8192, 1, b"crc!" * 8192, 0, is_durable=True)
    assert check_put("k", old.size_bytes, old.chunk_bytes) is not None
    ssd = reported(nodes, old)
    assert nodes.master.objects.readable.keys() == {"k"} and ssd.held.keys() == {5}


def test_of_content_that_it_knows_the_master_is_the_authority(nodes: Nodes) -> None:
    _, ssd = with_ssd(nodes)
    k, n = nodes.put("k", "n", host="a")
    work(nodes, ssd)
    true = dict(ssd.held)
    wrong = moved(true[n.object_id], offset=1 << 16)
    ssd.held = {5: entry("never", 5, 1 << 17), n.object_id: wrong}
    assert ssd.report().unwanted == [5, n.object_id]
    nodes.wait(0.1)
    ssd.answered()
    assert ssd.held == true, "what the node had lost comes back to it"
    assert "never" not in nodes.master.objects.readable
    assert k


def moved(entry: m.SegmentEntry, offset: int) -> m.SegmentEntry:
    return m.SegmentEntry(
        entry.key, entry.object_id, entry.size_bytes, entry.chunk_bytes, entry.checksums, offset
    )


def test_what_a_task_is_writing_is_not_unwanted(nodes: Nodes) -> None:
    _, ssd = with_ssd(nodes)
    nodes.put("k", host="a")
    (task,) = ssd.poll()
    ssd.held[task.entry.object_id] = task.entry
    assert ssd.report().unwanted == []


def test_a_key_that_is_being_put_again_is_not_lost_if_that_put_fails(nodes: Nodes) -> None:
    Place(nodes, "m")
    (place,) = nodes.start("k", host="m").reserved
    assert place is not None
    reported(nodes, entry("k", 77))
    nodes.say(m.PutAbort(["k"], [place.object_id]))
    assert where(nodes, "k") == ["a/ssd"]


def test_memory_is_lost_with_its_process_and_the_ssd_after_its_ttl(nodes: Nodes) -> None:
    memory, ssd = with_ssd(nodes)
    nodes.put("k", host="a")
    work(nodes, ssd)
    nodes.lose(memory.connection)
    Place(nodes, "a", epoch=8)
    assert where(nodes, "k") == ["a/ssd"] and nodes.master.counts.lost_objects == 0
    nodes.lose(ssd.connection)
    nodes.wait(TTL_S)
    assert where(nodes, "k") == [] and nodes.master.counts.lost_objects == 1
    again = ssd_again(nodes, ssd)
    assert again.mounted.wants_report
    assert where(nodes, "k") == ["a/ssd"], "and yet it comes back, reported by its node"


def test_what_comes_back_under_another_name_is_not_lost(nodes: Nodes) -> None:
    """A process without a name of its own is called by its number."""
    memory, ssd = with_ssd(nodes)
    for key in "klm":
        nodes.put(key, host="a")
    work(nodes, ssd)
    nodes.lose(memory.connection)
    Place(nodes, "a", epoch=8)
    nodes.lose(ssd.connection)
    held = [entry for entry in ssd.held.values() if entry.key != "l"]
    Place(nodes, "b/ssd", SSD_BYTES, tier=Tier.SSD, epoch=8, entries=held, content_id=99)
    assert [where(nodes, key) for key in "klm"] == [["b/ssd"], [], ["b/ssd"]]
    assert nodes.master.counts.lost_objects == 1


def test_what_was_removed_while_its_node_was_away_stays_removed(nodes: Nodes) -> None:
    a, b = Place(nodes, "a"), Place(nodes, "b")
    old, stays = nodes.put("k", "stays", host="a")
    a.held = {
        place.object_id: entry(key, place.object_id, 1024 * n)
        for n, (key, place) in enumerate((("k", old), ("stays", stays)))
    }
    nodes.lose(a.connection)
    for _ in range(int(TTL_S) + 1):
        nodes.wait(1.0)
        b.beat()
    (new,) = nodes.put("k", host="b")
    assert new.object_id > old.object_id and nodes.remove("k") is True
    again = Place(nodes, "a", rest_s=35.0, entries=list(a.held.values()))
    assert again.mounted.wants_report
    assert again.held.keys() == {stays.object_id} and where(nodes, "k") == []
    assert where(nodes, "stays") == ["a"]


@pytest.mark.parametrize("is_cleared", [False, True])
def test_what_is_removed_after_it_was_lost_does_not_come_back_with_its_node(
    nodes: Nodes, is_cleared: bool
) -> None:
    memory, ssd = with_ssd(nodes)
    nodes.put("k", host="a")
    work(nodes, ssd)
    nodes.lose(memory.connection)
    nodes.lose(ssd.connection)
    nodes.wait(TTL_S)
    if is_cleared:
        nodes.say(m.RemoveMatching("", True))
        successor = Master(DEMOTES)
        successor.restore(nodes.master.snapshot(), nodes.now)
        assert successor.catalog.cleared == nodes.master.catalog.cleared != {}
    else:
        assert nodes.remove("k") is False
    again = ssd_again(nodes, ssd)
    assert not again.held and where(nodes, "k") == []


def test_an_older_value_does_not_come_back_when_the_newer_one_was_lost(nodes: Nodes) -> None:
    a, b = Place(nodes, "a"), Place(nodes, "b")
    (old,) = nodes.put("k", host="a")
    a.held = {old.object_id: entry("k", old.object_id)}
    nodes.lose(a.connection)
    for _ in range(int(TTL_S) + 1):
        nodes.wait(1.0)
        b.beat()
    (new,) = nodes.put("k", host="b")
    nodes.lose(b.connection)
    nodes.wait(TTL_S)
    again = Place(nodes, "a", rest_s=35.0, entries=list(a.held.values()))
    assert not again.held and where(nodes, "k") == [], "a miss, but nothing stale"
    Place(nodes, "b", rest_s=35.0, entries=[entry("k", new.object_id)])
    assert where(nodes, "k") == ["b"], "the lost one itself may come back"


def test_a_segment_is_described_with_its_host(nodes: Nodes) -> None:
    Place(nodes, "a", host="rack 1")
    described = nodes.say(m.DescribeSegments([("a", 7), ("a", 8)]))
    assert described == m.SegmentDescriptors([b"", None], ["rack 1", ""])


# Ids of masters whose clocks differ


def test_an_older_value_with_a_larger_id_never_takes_the_place_of_what_was_put_here(nodes: Nodes) -> None:
    """The earlier master had a clock that was ahead, and the node that has its object was away."""
    away = [entry("k", 1 << 40), entry("l", (1 << 40) + 1, 4096), entry("gone", (1 << 40) + 2, 8192)]
    Place(nodes, "b")
    (put,) = nodes.put("k", host="b")
    nodes.put("gone", host="b")
    nodes.say(m.Remove(["gone"], force=True))
    back = Place(nodes, "a", 1 << 20, rest_s=35.0, entries=away)
    found = nodes.find("k")
    assert found is not None and found.object_id == put.object_id
    assert [one.key for one in back.held.values()] == ["l"], "an object of the earlier master is entered"
    assert nodes.find("gone") is None


def test_new_ids_are_larger_than_any_that_a_node_knows(nodes: Nodes) -> None:
    known = 1 << 50
    mount = m.Mount("a", 7, "a", 1 << 30, 65536, b"", 0.0, largest_id=known)
    mounted = nodes.say(mount, "node a 7")
    assert mounted.last_id > known
    assert nodes.say(m.Heartbeat("a", 7), "node a 7").last_id == mounted.last_id
    (put,) = nodes.put("k", host="a")
    assert put.object_id == mounted.last_id + 1
    nodes.say(msgspec.structs.replace(mount, segment="b", largest_id=known + 5), "node b 7")
    (later,) = nodes.put("l", host="a")
    assert later.object_id == put.object_id + 1, "less than those of now"


def test_an_id_that_would_use_up_all_ids_is_refused(nodes: Nodes) -> None:
    mount = m.Mount("a", 7, "a", 1 << 30, 65536, b"", 0.0)
    for largest_id in (-1, MAX_ID + 1):
        mounted = nodes.say(msgspec.structs.replace(mount, largest_id=largest_id), "node a 7")
        assert mounted.refusal is not None and mounted.refusal.code == "invalid_id"


def test_an_orphan_on_a_slower_clock_goes_on_above_the_ids_of_its_nodes(nodes: Nodes) -> None:
    """Its first id is from its clock; the node that serves the first put knows the leader's."""
    leader = Nodes(DEMOTES)
    leader.master.objects.ids_from(1 << 45)
    theirs = Place(leader, "a")
    (old,) = leader.put("k", host="a")
    leader.say(m.Heartbeat("a", 7), theirs.connection)
    orphan = Nodes(DEMOTES)
    orphan.master.objects.ids_from(1 << 30)
    mount = m.Mount("a", 7, "a", 1 << 30, 65536, b"", 0.0, largest_id=leader.master.objects.last_id)
    orphan.say(mount, "node a 7")
    orphan.say(m.Heartbeat("a", 7), "node a 7")
    (new,) = orphan.put("k", host="a")
    assert new.object_id > old.object_id


# Records that lack some


def restored(nodes: Nodes, records: list[Record], doubt: Doubt) -> Nodes:
    """The next master, with these records of its predecessor."""
    successor = Nodes(DEMOTES)
    successor.now = nodes.now + 1.0
    successor.master.restore(records, successor.now, doubt)
    successor.master.objects.ids_from(1 << 50)
    return successor


def on_ssd(nodes: Nodes, *keys: str) -> tuple[Place, list[int]]:
    """Objects with a copy there; the index of the first record of each."""
    _, ssd = with_ssd(nodes)
    ends = []
    for key in keys:
        nodes.put(key, host="a")
        work(nodes, ssd)
        ends.append(len(nodes.records))
    return ssd, ends


@pytest.mark.parametrize("doubt", [Doubt.END, Doubt.PROMISES])
def test_objects_newer_than_the_records_are_entered_and_removed_ones_are_not(
    nodes: Nodes, doubt: Doubt
) -> None:
    ssd, ends = on_ssd(nodes, "k", "gone", "l")
    held = list(ssd.held.values())
    nodes.say(m.Remove(["gone"], force=True))
    gone = nodes.records[ends[-1] :]
    successor = restored(nodes, [*nodes.records[: ends[1]], *gone], doubt)
    ssd.held = {one.object_id: one for one in held}  # its index missed the removal
    again = ssd_again(successor, ssd)
    assert again.mounted.wants_report
    assert [one.key for one in again.held.values()] == ["k", "l"]
    assert sorted(successor.master.objects.readable) == ["k", "l"]
    successor.master.check()


@pytest.mark.parametrize("doubt", [Doubt.NONE, Doubt.END])
def test_records_without_objects_that_nodes_have_are_reported_to_operators(
    nodes: Nodes, doubt: Doubt
) -> None:
    """As after a start with an older copy of the oplog."""
    ssd, ends = on_ssd(nodes, "k", "l", "m")
    successor = restored(nodes, nodes.records[: ends[0]], doubt)
    again = ssd_again(successor, ssd)
    again.report()
    assert sorted(successor.master.objects.readable) == ["k", "l", "m"]
    (note,) = [one for one in successor.notes if one.event == "records_incomplete"]
    assert note.is_warning and (note.fields["segment"], note.fields["num_objects"]) == ("a/ssd", 2)
    assert not [one for one in nodes.notes if one.event == "records_incomplete"]


def test_an_ssd_takes_nothing_before_its_report(nodes: Nodes) -> None:
    ssd, ends = on_ssd(nodes, "k", "l")
    successor = restored(nodes, nodes.records[: ends[0]], Doubt.END)
    mount = m.Mount("a/ssd", 8, "a", 1 << 30, SSD_BYTES, b"", 0.0, Tier.SSD, 99, "a")
    assert successor.say(mount, "ssd").wants_report
    successor.say(m.Heartbeat("a/ssd", 8), "ssd")
    segment = successor.master.segments.mounted["a/ssd"]
    assert segment.is_alive and not segment.takes_objects(successor.now)
    assert successor.say(m.ReportContents("a/ssd", 8, list(ssd.held.values()), True), "ssd").unwanted == []
    assert segment.takes_objects(successor.now)


def test_after_damage_everything_is_taken_in_that_is_not_known_to_be_gone(nodes: Nodes) -> None:
    """Whatever record is missing: no object is lost by it, and the master's invariants hold."""
    ssd, _ = on_ssd(nodes, *"klmno")
    nodes.say(m.Remove(["l"], force=True))
    held = list(ssd.held.values())
    for missing in range(len(nodes.records)):
        records = [record for number, record in enumerate(nodes.records) if number != missing]
        ssd.held = {one.object_id: one for one in held}
        successor = restored(nodes, records, Doubt.ANY)
        again = ssd_again(successor, ssd)
        found = sorted(successor.master.objects.readable)
        is_removal = isinstance(nodes.records[missing], ObjectGone)
        assert [key for key in found if key != "l"] == ["k", "m", "n", "o"], nodes.records[missing]
        assert is_removal or "l" not in found
        assert {one.key for one in again.held.values()} == set(found)
        assert not successor.master.catalog.is_doubted or "a" in successor.master.segments.mounted
        successor.master.check()


def test_where_the_records_have_something_else_the_node_is_right(nodes: Nodes) -> None:
    """An old object is where a new one is: its removal and the new put are in the missing records."""
    ssd, ends = on_ssd(nodes, "old")
    (old,) = ssd.held.values()
    new = msgspec.structs.replace(old, key="new", object_id=old.object_id + 5)
    successor = restored(nodes, nodes.records[: ends[0]], Doubt.PROMISES)
    ssd.held = {new.object_id: new}
    again = ssd_again(successor, ssd)
    assert list(again.held) == [new.object_id]
    (stored,) = [one for one in successor.master.objects.readable.values() if one.key == "new"]
    assert [extent.offset for extent in stored.complete()] == [old.offset]
    successor.master.check()


def test_a_standby_that_takes_over_before_the_reports_enters_them_as_the_leader_would(nodes: Nodes) -> None:
    """The leader's doubts are in its snapshot: the segments that had not reported."""
    ssd, ends = on_ssd(nodes, "old")
    (old,) = ssd.held.values()
    new = msgspec.structs.replace(old, key="new", object_id=old.object_id + 5)
    leader = restored(nodes, nodes.records[: ends[0]], Doubt.PROMISES)
    standby = restored(nodes, leader.master.snapshot(), Doubt.NONE)
    ssd.held = {new.object_id: new}
    again = ssd_again(standby, ssd)
    assert list(again.held) == [new.object_id]
    assert "new" in standby.master.objects.readable, "it is not dropped from its SSD"
    standby.master.check()


def test_recovery_completes_with_the_last_report(nodes: Nodes) -> None:
    ssd, _ = on_ssd(nodes, "k")
    effects_seen: list[str] = []

    class Listening(Nodes):
        def _take(self, effects: list[object]) -> None:
            effects_seen.extend(type(one).__name__ for one in effects if isinstance(one, RecoveryComplete))
            super()._take([one for one in effects if not isinstance(one, RecoveryComplete)])

    successor = Listening(DEMOTES)
    successor.now = nodes.now + 1.0
    successor.master.restore(nodes.records, successor.now, Doubt.ANY)
    assert successor.master.catalog.is_doubted
    ssd_again(successor, ssd)
    assert not effects_seen, "the memory of the node was there, too"
    successor.wait(TTL_S + 1.0)
    assert effects_seen == ["RecoveryComplete"] and not successor.master.catalog.is_doubted


def test_a_node_puts_nothing_into_another_tenants_group(nodes: Nodes) -> None:
    """Its object is adopted, the relation is not."""
    nodes_entry = entry("mine", 5)
    strange = msgspec.structs.replace(nodes_entry, group="bank\0g", parent="bank\0p")
    own = msgspec.structs.replace(entry("red\0k", 6, 4096), group="red\0g", parent="red\0p")
    Place(nodes, "a", rest_s=35.0, entries=[strange, own])
    readable = nodes.master.objects.readable
    assert (readable["mine"].group, readable["mine"].parent) == ("", "")
    assert (readable["red\0k"].group, readable["red\0k"].parent) == ("red\0g", "red\0p")


@pytest.mark.parametrize("field", ["segment", "node", "host"])
def test_no_name_has_a_nul(nodes: Nodes, field: str) -> None:
    mount = m.Mount("a", 7, "h", 1 << 30, 65536, b"", 0.0, node="n")
    refusal = nodes.say(msgspec.structs.replace(mount, **{field: "x\0y"})).refusal
    assert refusal.code == "invalid_name"


@pytest.mark.parametrize(("address", "size_bytes"), [((1 << 64) - 4096, 8192), (4096, 1 << 64), (-1, 65536)])
def test_memory_that_ends_beyond_the_last_address_is_refused(
    nodes: Nodes, address: int, size_bytes: int
) -> None:
    """The address of an object there could not be sent: the puts of other clients would fail."""
    mount = m.Mount("a", 7, "h", address, size_bytes, b"", 0.0)
    refusal = nodes.say(mount, "node a 7").refusal
    assert refusal is not None and refusal.code == "invalid_size", refusal
    assert nodes.say(msgspec.structs.replace(mount, address=0, size_bytes=4096), "node a 7").refusal is None
    top = msgspec.structs.replace(mount, segment="top", address=(1 << 64) - 4096, size_bytes=4096)
    assert nodes.say(top, "node top 7").refusal is None


@pytest.mark.parametrize("object_id", [0, MAX_ID + 1, (1 << 64) - 1])
def test_an_object_with_an_impossible_id_is_rejected(nodes: Nodes, object_id: int) -> None:
    """The next id would be larger still, and could not be written down."""
    ssd = reported(nodes, entry("k", object_id), entry("good", 9, 8192))
    assert ssd.held.keys() == {9}
    assert nodes.master.objects.last_id < MAX_ID


def test_a_node_that_reports_the_largest_id_excludes_no_other(nodes: Nodes) -> None:
    mount = m.Mount("a", 7, "a", 1 << 30, 65536, b"", 0.0, largest_id=MAX_ID)
    last_id = nodes.say(mount, "node a 7").last_id
    assert last_id > MAX_ID
    honest = msgspec.structs.replace(mount, segment="b", node="b", largest_id=last_id)
    assert nodes.say(honest, "node b 7").refusal is None
    held = reported(nodes, entry("k", last_id), name="c/ssd").held
    assert held.keys() == {last_id}, "and what was put meanwhile is not lost"


@pytest.mark.parametrize("pause_s", [1.0, 4.0])
def test_a_report_that_takes_long_keeps_its_segment_mounted(nodes: Nodes, pause_s: float) -> None:
    """Millions of objects, or many nodes that report at once: no heartbeat comes before the last part."""
    mount = m.Mount("a/ssd", 7, "a", BASE, SSD_BYTES, b"", 0.0, Tier.SSD, 5, "a")
    assert nodes.say(mount, "node").wants_report
    for number in range(20):
        nodes.wait(pause_s)
        part = [entry(f"k{number}", 77 + number, 4096 * number)]
        assert nodes.say(m.ReportContents("a/ssd", 7, part, number == 19), "node") == m.Reported([])
    assert nodes.say(m.Heartbeat("a/ssd", 7), "node").is_known
    assert all(nodes.find(f"k{number}") is not None for number in range(20))
    nodes.wait(TTL_S)
    assert nodes.say(m.ReportContents("a/ssd", 7, [], True), "another connection") == m.Reported([])
    nodes.wait(TTL_S)
    assert "a/ssd" not in nodes.master.segments.mounted, "its own process is silent"

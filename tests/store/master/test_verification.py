# SPDX-License-Identifier: Apache-2.0
"""A reader's report deletes nothing: the replica's own node reads it again."""

from __future__ import annotations

import dataclasses

import pytest

from mooncake.errors import Refusal
from mooncake.rpc.wire import Failure
from mooncake.store import messages as m
from mooncake.store.master import verification as v
from mooncake.types import Tier
from tests.store.conftest import SETTINGS, Voice
from tests.store.nodes import Nodes, Place, with_ssd

TWO = m.PutPolicy(num_replicas=2)
DEMOTES = dataclasses.replace(SETTINGS, demote_watermark=0.0)
WRONG = Refusal("corrupt", "says the node")


def two_nodes(voice: Voice) -> None:
    voice.mount("a")
    voice.mount("b", host="other")


def test_a_segment_that_takes_objects_along_is_a_warning(voice: Voice) -> None:
    two_nodes(voice)
    voice.put("k", policy=TWO)
    for name in ("b", "a"):
        epoch = voice.master.segments.mounted[name].epoch
        voice.say(m.Unmount(name, epoch), name)
    gone = [(one.fields["num_lost"], one.is_warning) for one in voice.notes if one.event == "segment_gone"]
    assert gone == [(0, False), (1, True)]


def test_only_the_wrong_replica_goes(voice: Voice) -> None:
    two_nodes(voice)
    place = voice.put("k", policy=TWO)[0]
    corrupt = m.Corrupt(["k"], [place.object_id], ["b"])
    assert voice.say(corrupt).outcomes == [True] and voice.look() == 1
    assert voice.where("k") == ["a"] and voice.master.counts.corrupt_objects == 0
    assert voice.say(corrupt).outcomes == [False]
    note = voice.notes[-1]
    assert note.event == "object_corrupt" and note.fields["segment"] == "b" and note.is_warning
    assert any("readable as #" in line for line in note.fields["story"])
    assert voice.say(m.Corrupt(["k"], [place.object_id], ["a"])).outcomes == [True] and voice.look() == 1
    assert voice.inspect("k") is None and voice.master.counts.corrupt_objects == 1


def test_a_reader_of_a_dropped_replica_is_not_disturbed(voice: Voice) -> None:
    """Its space rests until the reader's lease ends, also when the reader renews it."""
    two_nodes(voice)
    place = voice.put("k", policy=TWO)[0]
    voice.find("k")
    voice.say(m.Corrupt(["k"], [place.object_id], ["b"]))
    assert voice.look() == 1
    voice.keep_alive(6, "a", "b")
    assert voice.say(m.Renew(["k"], [place.object_id])).flags == b"\1"
    voice.keep_alive(9, "a", "b")
    assert voice.allocated_bytes == 2048
    voice.keep_alive(1, "a", "b")
    assert voice.allocated_bytes == 1024


def test_segments_that_do_not_fit(voice: Voice) -> None:
    assert isinstance(voice.say(m.Corrupt(["k", "l"], [1, 2], ["a"])), Failure)
    assert isinstance(voice.say(m.Corrupt(["k", "l"], [1])), Failure)


class Scene:
    """An object on SSD and in memory of one node, and readers' reports of it."""

    def __init__(self, size_bytes: int = 1000) -> None:
        self.nodes = Nodes(DEMOTES)
        self.memory, self.ssd = with_ssd(self.nodes, memory_bytes=1 << 20)
        self.nodes.put("k", host="a", size_bytes=size_bytes)
        while tasks := self.ssd.poll():
            self.ssd.work(*tasks)
        assert self.nodes.where("k") == ["a", "a/ssd"]
        self.object_id = self.nodes.master.objects.readable["k"].object_id

    def report(self, segment: str = "a/ssd", reporter: str = "bad") -> bool | Refusal:
        message = m.Corrupt(["k"], [self.object_id], [segment], reporter=reporter)
        outcome = self.nodes.say(message).outcomes[0]
        assert isinstance(outcome, bool | Refusal)
        return outcome

    def live(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            self.nodes.wait(1.0)
            self.memory.beat()
            self.ssd.beat()

    @property
    def reporters(self) -> dict[str, m.ReporterStatus]:
        return {one.reporter: one for one in self.nodes.say(m.GetMasterStatus()).reporters}

    def poll(self, place: Place, *checked: m.TaskDone) -> list[m.Check]:
        nodes, origin = self.nodes, f"poll of {place.name}"
        poll = m.Poll(place.name, place.epoch, [], place.seen, 16, list(checked))
        nodes.post(poll, place.connection, origin)
        nodes.wait(0.0)
        checks: list[m.Check] = []
        # A Poll that was parked is answered with them, too.
        for polled in [*nodes.late.pop(place.name, []), *nodes.late.pop(origin, [])]:
            checks += polled.checks
            for change in polled.changes:
                if isinstance(change, int):
                    place.held.pop(change, None)
            place.seen = max(place.seen, polled.first + len(polled.changes) - 1)
        return checks


def test_a_durable_copy_goes_only_when_its_node_confirms() -> None:
    scene = Scene()
    assert scene.report("") is True
    assert scene.nodes.where("k") == ["a", "a/ssd"], "nothing on one client's report"
    (check,) = scene.poll(scene.ssd)
    assert check.entry.object_id == scene.object_id and check.deadline_s == v.CHECK_S
    scene.poll(scene.ssd, m.TaskDone(check.check_id, None))
    assert scene.nodes.where("k") == ["a", "a/ssd"] and scene.nodes.master.counts.refuted_reports == 1
    (check,) = scene.poll(scene.memory)
    scene.poll(scene.memory, m.TaskDone(check.check_id, WRONG))
    assert scene.nodes.where("k") == ["a/ssd"] and scene.nodes.master.counts.corrupt_replicas == 1
    bad = scene.reporters["bad"]
    assert (bad.num_reports, bad.num_confirmed, bad.num_refuted) == (2, 1, 1)
    events = [note.event for note in scene.nodes.notes]
    assert "corruption_refuted" in events and "object_corrupt" in events
    assert any("verified by its node" in line for line in scene.nodes.master.story("k"))


def test_the_last_replica_goes_when_its_node_confirms_and_can_be_put_again() -> None:
    scene = Scene()
    for segment in ("a", "a/ssd"):
        scene.report(segment)
        assert scene.nodes.look() == 1
    assert scene.nodes.inspect("k") is None and scene.nodes.master.counts.corrupt_objects == 1
    scene.nodes.put("k", host="a")


@pytest.mark.parametrize("segment", ["a", "a/ssd"])
def test_a_silent_node_confirms_nothing(segment: str) -> None:
    scene = Scene()
    assert scene.report(segment) is True
    scene.live(v.WAIT_S + v.CHECK_INTERVAL_S)
    assert scene.nodes.where("k") == ["a", "a/ssd"]
    assert scene.reporters["bad"].num_unanswered == 1 and scene.nodes.master.counts.unverified_reports == 1
    assert [note.event for note in scene.nodes.notes].count("corruption_not_verified") == 1
    scene.nodes.master.check()


def test_two_reporters_suffice_for_a_silent_node_where_another_replica_is_left() -> None:
    scene = Scene()
    for segment in ("a", "a/ssd"):
        assert scene.report(segment) is scene.report(segment, "another") is True
    scene.live(v.WAIT_S + v.CHECK_INTERVAL_S)
    assert scene.nodes.where("k") == ["a/ssd"], "never what is on SSD"


def test_a_node_that_is_slow_to_answer_is_silent() -> None:
    scene = Scene()
    scene.report()
    (check,) = scene.poll(scene.ssd)
    scene.live(v.CHECK_S + v.CHECK_INTERVAL_S)
    assert scene.nodes.master.counts.unverified_reports == 1
    scene.poll(scene.ssd, m.TaskDone(check.check_id, WRONG))
    assert scene.nodes.where("k") == ["a", "a/ssd"], "no check waits for that"


def test_an_answer_about_what_went_meanwhile_drops_nothing() -> None:
    """The space is another object's by now, and the node read that."""
    scene = Scene()
    scene.report("a")
    (check,) = scene.poll(scene.memory)
    scene.nodes.say(m.Remove(["k"], True))
    scene.nodes.put("k", host="a")
    scene.poll(scene.memory, m.TaskDone(check.check_id, WRONG))
    assert "a" in scene.nodes.where("k") and scene.nodes.master.counts.corrupt_replicas == 0


def copied_again(scene: Scene) -> None:
    """The object's replica in memory is dropped, and another one is made on the same segment."""
    assert scene.nodes.say(m.DropReplicas(["k"], "a")).outcomes == [True]
    scene.nodes.say(m.CopyObject("k", ["a"]))
    tasks = scene.memory.poll()
    tasks += [task for polled in scene.nodes.late.pop("poll of a", []) for task in polled.tasks]
    scene.memory.work(*tasks)
    assert scene.nodes.where("k") == ["a", "a/ssd"]


@pytest.mark.parametrize("is_sent", [False, True])
def test_a_report_of_a_replica_that_was_copied_again_is_of_the_new_one(is_sent: bool) -> None:
    """Whether or not the check of the first one was sent, which the node may answer late."""
    scene = Scene()
    assert scene.report("a") is True
    (first,) = scene.poll(scene.memory) if is_sent else (None,)
    copied_again(scene)
    assert scene.report("a", "other") is True
    scene.nodes.master.check()
    checks = scene.poll(scene.memory)
    second = checks[-1]
    if first is not None:
        assert len(checks) == 1
        scene.poll(scene.memory, m.TaskDone(first.check_id, WRONG))
        assert scene.nodes.where("k") == ["a", "a/ssd"], "those bytes were another replica's"
    scene.poll(scene.memory, m.TaskDone(second.check_id, WRONG))
    assert scene.nodes.where("k") == ["a/ssd"]
    assert repr(scene.nodes.master.verification) == "<Verification 0 replicas to be read>"


def test_replicas_that_are_copied_again_take_no_place_of_later_checks() -> None:
    scene = Scene()
    for _ in range(2 * v.MAX_UNDER_WAY):
        assert scene.report("a") is True
        assert len(scene.poll(scene.memory)) == 1
        copied_again(scene)


def test_another_nodes_answer_and_an_unknown_number_mean_nothing() -> None:
    scene = Scene()
    scene.report("a/ssd")
    (check,) = scene.poll(scene.ssd)
    scene.poll(scene.memory, m.TaskDone(check.check_id, WRONG))
    scene.poll(scene.ssd, m.TaskDone(12345, WRONG))
    assert scene.nodes.where("k") == ["a", "a/ssd"]


def test_a_node_that_cannot_read_confirms_nothing() -> None:
    scene = Scene()
    scene.report()
    (check,) = scene.poll(scene.ssd)
    scene.poll(scene.ssd, m.TaskDone(check.check_id, Refusal("io_error", "the disk says so")))
    assert scene.nodes.where("k") == ["a", "a/ssd"] and scene.reporters["bad"].num_unanswered == 1


def test_the_same_replica_is_not_read_again_at_once() -> None:
    scene = Scene()
    assert scene.report() is True and scene.report() is True
    assert scene.nodes.look(lambda entry, segment: True) == 1
    assert scene.report() is False and scene.nodes.look() == 0
    assert scene.reporters["bad"].num_refuted == 2
    scene.live(v.VERIFIED_S)
    assert scene.report() is True and scene.nodes.look(lambda entry, segment: True) == 1


def test_a_reporter_whose_reports_are_refuted_makes_no_node_read_forever() -> None:
    nodes = Nodes(SETTINGS)
    Place(nodes, "a", 1 << 20)
    keys = [f"k{number}" for number in range(100)]
    ids = [place.object_id for place in nodes.put(*keys, host="a", size_bytes=64)]
    outcomes = nodes.say(m.Corrupt(keys, ids, reporter="bad")).outcomes
    limit = int(v.REPORT_CREDIT)
    assert outcomes[:limit] == [True] * limit
    assert {one.code for one in outcomes[limit:] if isinstance(one, Refusal)} == {"limit"}
    assert nodes.look(lambda entry, segment: True) == limit
    other = nodes.say(m.Corrupt(keys[limit:], ids[limit:], reporter="good")).outcomes
    assert other[:limit] == [True] * limit, "others are still accepted"
    assert nodes.look() == limit
    again = nodes.say(m.Corrupt(keys[2 * limit :], ids[2 * limit :], reporter="good")).outcomes
    assert again[:limit] == [True] * limit, "a confirmed reporter may report more"


def test_checks_are_handed_out_at_a_limited_rate() -> None:
    nodes = Nodes(SETTINGS)
    size_bytes = 64 << 20
    place = Place(nodes, "a", 32 * size_bytes)
    keys = [f"k{number}" for number in range(30)]
    ids = [one.object_id for one in nodes.put(*keys, host="a", size_bytes=size_bytes)]
    nodes.say(m.Corrupt(keys, ids, reporter="x"))
    burst = int(v.BURST_S * v.BYTES_PER_S / size_bytes) + 1
    assert nodes.look(lambda entry, segment: True) == burst
    num_seconds = 6
    total = 0
    for _ in range(num_seconds):
        nodes.wait(1.0)
        place.beat()
        total += nodes.look(lambda entry, segment: True)
    assert total == num_seconds * v.BYTES_PER_S // size_bytes


def test_a_node_has_few_checks_at_a_time() -> None:
    nodes = Nodes(SETTINGS)
    Place(nodes, "a", 1 << 20)
    keys = [f"k{number}" for number in range(20)]
    ids = [one.object_id for one in nodes.put(*keys, host="a", size_bytes=64)]
    nodes.say(m.Corrupt(keys, ids, reporter="x"))
    segment = nodes.master.segments.mounted["a"]
    assert len(nodes.master.verification.take(segment, nodes.now)) == v.MAX_UNDER_WAY
    assert nodes.master.verification.take(segment, nodes.now) == []
    nodes.master.check()


def test_the_table_of_reporters_is_bounded_and_names_are_made_harmless() -> None:
    scene = Scene()
    for number in range(v.MAX_REPORTERS + 10):
        scene.report(reporter=f"r{number}")
    assert len(scene.reporters) == v.MAX_REPORTERS and "r0" not in scene.reporters
    scene.report(reporter="a\nb\0" + "x" * 1000)
    (name,) = [name for name in scene.reporters if name.startswith("a?b?")]
    assert len(name) == v.MAX_NAME
    scene.report(reporter="")
    assert "unknown" in scene.reporters


def test_a_segment_that_goes_takes_its_checks_along() -> None:
    scene = Scene()
    scene.report("a")
    scene.nodes.say(m.Unmount("a", 7))
    scene.nodes.master.check()
    scene.nodes.wait(2 * v.CHECK_INTERVAL_S)
    scene.nodes.master.check()
    assert repr(scene.nodes.master.verification) == "<Verification 0 replicas to be read>"


def test_what_the_own_node_finds_wrong_while_it_copies_goes_at_once() -> None:
    """From SSD to the memory of the same node: the owner itself found it."""
    scene = Scene()
    scene.nodes.say(m.DropReplicas(["k"], "a"))
    assert scene.nodes.where("k") == ["a/ssd"]
    scene.nodes.say(m.CopyObject("k", ["a"]))
    (task,) = scene.memory.poll()
    assert task.source.tier is Tier.SSD
    scene.memory.fail(task, "corrupt")
    assert scene.nodes.where("k") == []

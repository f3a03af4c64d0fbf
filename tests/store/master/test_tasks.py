# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from mooncake.store import messages as m
from mooncake.store.master import tasks
from mooncake.types import Tier
from tests.store.conftest import SETTINGS
from tests.store.nodes import Nodes, Place


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    nodes = Nodes(SETTINGS)
    yield nodes
    nodes.master.check()


def copy(nodes: Nodes, key: str, *targets: str, source: str = "") -> m.JobStatus:
    job = nodes.say(m.CopyObject(key, list(targets), source))
    assert isinstance(job, m.JobReply), job
    return job.status


def state(nodes: Nodes, job: m.JobStatus) -> str:
    status = nodes.say(m.AskJob(job.job_id)).status
    assert isinstance(status, m.JobStatus)
    return status.state


def where(nodes: Nodes, key: str) -> list[str]:
    found = nodes.find(key)
    return [] if found is None else [replica.segment for replica in found.replicas]


def test_a_poll_is_parked_until_there_is_a_task(nodes: Nodes) -> None:
    a, b = Place(nodes, "a"), Place(nodes, "b")
    (place,) = nodes.put("k", host="a")
    assert b.poll() == []
    copy(nodes, "k", "b")
    nodes.wait(0.0)
    (task,) = b.answered()
    assert task.source == place.replicas[0]
    assert (task.entry.key, task.entry.object_id, task.entry.size_bytes) == ("k", place.object_id, 1000)
    assert where(nodes, "k") == ["a"], "not readable there before it is done"
    b.work(task)
    assert where(nodes, "k") == ["a", "b"]
    assert nodes.allocated_bytes == 2048 and a.mounted.num_objects == 0


def test_the_deadline_counts_from_when_the_node_polled(nodes: Nodes) -> None:
    Place(nodes, "a")
    b = Place(nodes, "b")
    nodes.put("k", host="a")
    b.poll()
    nodes.wait(2.0)
    copy(nodes, "k", "b")
    nodes.wait(0.0)
    (task,) = b.answered()
    assert task.deadline_s == SETTINGS.put_s + 2.0


def test_a_poll_is_answered_after_a_while_and_when_another_comes(nodes: Nodes) -> None:
    a = Place(nodes, "a")
    a.poll()
    for _ in range(9):
        nodes.wait(1.0)
        a.beat()
    assert "a" not in nodes.late
    nodes.wait(1.0)
    (polled,) = nodes.late["a"]
    assert polled.tasks == [] and polled.changes == []
    a.answered()
    nodes.post(m.Poll("a", 7, [], a.seen, 1), a.connection, "first")
    nodes.post(m.Poll("a", 7, [], a.seen, 1), a.connection, "second")
    assert nodes.late == {"first": [m.Polled(0, [], [])]}


def test_a_poll_of_an_unmounted_segment_is_answered_as_unknown(nodes: Nodes) -> None:
    nodes.post(m.Poll("a", 7, [], 0, 1), "c", "p")
    assert nodes.late["p"] == [m.Polled(0, [], [], is_known=False)]


def test_the_journal_gets_additions_and_removals(nodes: Nodes) -> None:
    a = Place(nodes, "a")
    a.poll()
    k, n = nodes.put("k", "n", host="a")
    assert a.answered() == [] and not a.held, "changes wait for others a little"
    nodes.wait(0.1)
    a.poll()
    assert a.held.keys() == {k.object_id, n.object_id}
    assert a.held[k.object_id].offset == k.replicas[0].address - (1 << 30)
    nodes.remove("k")
    nodes.wait(0.003)
    a.answered()
    assert a.held.keys() == {n.object_id}, "removals are sent at once: its space is used again"


def test_a_node_that_missed_changes_is_brought_up_to_date_by_its_report(nodes: Nodes) -> None:
    a = Place(nodes, "a", polls=False)
    k, n = nodes.put("k", "n", host="a")
    a.held = {99: m.SegmentEntry("other", 99, 10, 10, b"crc!", 0)}
    a.poll()
    nodes.wait(0.1)
    a.answered()
    assert a.held.keys() == {k.object_id, n.object_id}


def test_a_task_that_is_late_is_tried_again_and_what_came_of_it_rests(nodes: Nodes) -> None:
    a, b = Place(nodes, "a"), Place(nodes, "b")
    nodes.put("k", host="a")
    job = copy(nodes, "k", "b")
    (first,) = b.poll()
    for _ in range(30):
        nodes.wait(1.0)
        a.beat()
        b.beat()
    second = b.poll()[0]
    assert second.task_id != first.task_id
    assert second.entry.offset != first.entry.offset, "the first one's space rests"
    b.poll(m.TaskDone(first.task_id, None))
    assert where(nodes, "k") == ["a"], "too late"
    b.work(second)
    assert where(nodes, "k") == ["a", "b"] and state(nodes, job) == "done"
    for _ in range(5):
        nodes.wait(1.0)
        a.beat()
        b.beat()
    assert nodes.allocated_bytes == 2048


def copying_to_ssd(nodes: Nodes) -> tuple[Place, Place, m.CopyTask]:
    """Node a with k, the SSD of node b, and the task that copies k to it, which has begun."""
    a, ssd = Place(nodes, "a"), Place(nodes, "b/ssd", 1 << 20, tier=Tier.SSD, content_id=5)
    nodes.put("k", host="a")
    copy(nodes, "k", "b/ssd")
    (task,) = ssd.poll()
    return a, ssd, task


def test_what_a_task_wrote_in_vain_is_dropped_from_the_index(nodes: Nodes) -> None:
    _, ssd, task = copying_to_ssd(nodes)
    nodes.remove("k", force=True)
    nodes.wait(0.1)
    ssd.answered()
    ssd.work(task)
    assert ssd.held, "written before it knew"
    nodes.wait(0.1)
    ssd.answered()
    assert not ssd.held


def test_what_is_written_again_is_not_taken_away_by_the_first_attempt(nodes: Nodes) -> None:
    a, b, first = copying_to_ssd(nodes)
    for _ in range(30):
        nodes.wait(1.0)
        a.beat()
        b.beat()
    (second,) = b.poll()
    b.poll(m.TaskDone(first.task_id, None))
    b.work(second)
    for _ in range(3):
        nodes.wait(0.1)
        b.poll()
    assert where(nodes, "k") == ["a", "b/ssd"]
    assert [entry.offset for entry in b.held.values()] == [second.entry.offset]


def test_a_report_that_was_lost_is_requested_again(nodes: Nodes) -> None:
    a = Place(nodes, "a", polls=False)
    nodes.put("k", host="a")
    nodes.post(m.Poll("a", 7, [], 0, 16), a.connection, "first")
    (polled,) = nodes.late.pop("first")
    assert polled.first > 1
    seen = polled.first + len(polled.changes) - 1
    nodes.post(m.Poll("a", 7, [], seen, 16), a.connection, "second")
    assert "second" not in nodes.late, "the report may be on its way"
    nodes.lose(a.connection)
    again = Place(nodes, "a", polls=False)
    again.connection = "another one"
    nodes.post(m.Poll("a", 7, [], seen, 16), "another one", "third")
    (polled,) = nodes.late.pop("third")
    assert polled.first > seen + 1
    nodes.say(m.ReportContents("a", 7, [], True), "another one")
    seen = polled.first + len(polled.changes) - 1
    nodes.post(m.Poll("a", 7, [], seen, 16), "a fourth", "fourth")
    assert "fourth" not in nodes.late


def test_a_source_that_is_wrong_goes_and_the_next_one_is_read(nodes: Nodes) -> None:
    a, b, c = (Place(nodes, name) for name in "abc")
    nodes.put("k", host="a")
    copy(nodes, "k", "b")
    b.work()
    job = copy(nodes, "k", "c")
    (task,) = c.poll()
    (again,) = c.fail(task, "corrupt")
    assert {task.source.segment, again.source.segment} == {"a", "b"}
    assert len(where(nodes, "k")) == 2 and nodes.look() == 1, "its own node decides"
    assert where(nodes, "k") == [again.source.segment]
    c.work(again)
    assert where(nodes, "k") == [again.source.segment, "c"] and state(nodes, job) == "done"
    assert nodes.master.counts.corrupt_replicas == 1 and nodes.master.counts.corrupt_objects == 0
    assert any("a reader found wrong checksums" in line for line in nodes.master.story("k"))
    assert a and b


def test_another_source_is_read_when_one_can_not_be_read(nodes: Nodes) -> None:
    places = [Place(nodes, name) for name in "abc"]
    nodes.put("k", host="a")
    copy(nodes, "k", "b")
    places[1].work()
    copy(nodes, "k", "c")
    (task,) = places[2].poll()
    (again,) = places[2].fail(task, "io_error")
    assert {task.source.segment, again.source.segment} == {"a", "b"}


@pytest.mark.parametrize("is_right", [False, True])
def test_the_last_source_that_is_wrong_takes_the_object_with_it(nodes: Nodes, is_right: bool) -> None:
    """If its own node confirms it: the copying node may have bad memory."""
    Place(nodes, "a")
    b = Place(nodes, "b")
    nodes.put("k", host="a")
    job = copy(nodes, "k", "b")
    (task,) = b.poll()
    (task,) = b.fail(task, "corrupt")
    assert nodes.look(lambda entry, segment: is_right) == 1
    if is_right:
        b.work(task)
        assert where(nodes, "k") == ["a", "b"] and state(nodes, job) == "done"
        return
    assert where(nodes, "k") == [] and state(nodes, job) == "failed"


def test_a_task_that_keeps_failing_is_given_up_with_the_reason(nodes: Nodes) -> None:
    Place(nodes, "a")
    b = Place(nodes, "b")
    nodes.put("k", host="a")
    job = copy(nodes, "k", "b")
    todo = b.poll()
    for _ in range(3):
        todo = b.fail(todo[0], "disk_failed", "the disk is on fire")
    assert todo == []
    status = nodes.say(m.AskJob(job.job_id)).status
    assert status.state == "failed" and "on fire" in status.reason
    assert "given up: disk_failed: the disk is on fire" in nodes.master.story("k")[-1]


def test_the_tasks_of_a_segment_are_limited() -> None:
    nodes = Nodes(dataclasses.replace(SETTINGS, tasks_per_segment=16))
    Place(nodes, "a")
    b = Place(nodes, "b")
    keys = [f"k{n}" for n in range(20)]
    nodes.put(*keys, host="a")
    for key in keys:
        copy(nodes, key, "b")
    tasks = b.poll(max_tasks=10)
    assert len(tasks) == 11, "one came at once, ten with the next answer"
    assert len(b.poll(max_tasks=10)) == 5
    assert next(s for s in nodes.say(m.GetMasterStatus()).segments if s.segment == "b").num_tasks == 20
    assert len(b.work(*tasks)) == 4


def test_an_answer_has_no_more_checksums_than_one_message_holds(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each object here has four bytes of them."""
    monkeypatch.setattr(tasks, "MAX_POLLED_BYTES", 10)
    Place(nodes, "a")
    b = Place(nodes, "b")
    keys = [f"k{n}" for n in range(5)]
    nodes.put(*keys, host="a")
    places = nodes.put(*(f"n{n}" for n in range(5)), host="b")
    nodes.remove("n0")
    for key in keys:
        copy(nodes, key, "b")
    assert b.answered() == [] and len(b.held) == 2
    assert b.poll() == [] and len(b.held) == 4, "the changes come before the tasks"
    assert len(b.poll()) == 3
    assert b.held.keys() == {place.object_id for place in places[1:]}
    assert len(b.poll()) == 2


def test_a_change_that_is_larger_than_an_answer_is_sent_alone(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "MAX_POLLED_BYTES", 1)
    a = Place(nodes, "a")
    places = nodes.put("k", "l", "m", host="a")
    nodes.wait(0.1)
    for number in range(1, 4):
        assert a.answered() == []
        assert a.held.keys() == {place.object_id for place in places[:number]}
        nodes.post(m.Poll("a", 7, [], a.seen, 16), a.connection, "a")
        nodes.wait(0.0)


def test_tasks_of_an_object_that_goes_are_cancelled(nodes: Nodes) -> None:
    Place(nodes, "a")
    b = Place(nodes, "b")
    nodes.put("k", "l", host="a")
    jobs = [copy(nodes, key, "b") for key in "kl"]
    tasks = b.poll(max_tasks=1)
    for key in "kl":
        nodes.remove(key, force=True)
    assert [state(nodes, job) for job in jobs] == ["failed", "failed"]
    assert b.work(*tasks) == []
    assert nodes.master.story("k")[-1].endswith("#1 to b given up: not_found: the object is gone")


def test_tasks_to_a_segment_that_goes_end(nodes: Nodes) -> None:
    a, b = Place(nodes, "a"), Place(nodes, "b")
    nodes.put("k", "l", host="a")
    jobs = [copy(nodes, key, "b") for key in "kl"]
    b.poll(max_tasks=1)
    nodes.say(m.Unmount("b", 7), b.connection)
    nodes.wait(1.0)
    assert [state(nodes, job) for job in jobs] == ["failed", "failed"]
    assert where(nodes, "k") == ["a"]
    assert a


FULL = "/ssd: No space left on device; make room"


def test_a_copy_to_a_full_disk_gives_its_space_back_at_once(nodes: Nodes) -> None:
    Place(nodes, "a")
    ssd = Place(nodes, "b/ssd", 1 << 20, tier=Tier.SSD, content_id=5)
    nodes.put("k", "l", host="a")
    for key in "kl":
        job = copy(nodes, key, "b/ssd")
        (task,) = ssd.poll()
        ssd.fail(task, "no_space", FULL)
        assert state(nodes, job) == "failed"
        segment = nodes.master.segments.mounted["b/ssd"]
        assert not segment.allocator.allocations, "its node writes nothing more there"
    (note,) = [one for one in nodes.notes if one.event == "disk_full"]
    assert note.is_warning and note.fields == {"segment": "b/ssd", "host": "b", "reason": FULL}
    assert [one.disk_full for one in nodes.say(m.GetMasterStatus()).segments] == ["", FULL]
    copy(nodes, "k", "b/ssd")
    ssd.work()
    assert where(nodes, "k") == ["a", "b/ssd"] and segment.disk_full == ""
    assert [one.event for one in nodes.notes][-1] == "disk_has_space"


def test_other_failures_of_a_copy_leave_its_space_at_rest(nodes: Nodes) -> None:
    _, ssd, task = copying_to_ssd(nodes)
    ssd.fail(task, "io_error")
    segment = nodes.master.segments.mounted["b/ssd"]
    assert task.entry.offset in segment.allocator.allocations and not segment.disk_full


def test_a_node_that_is_started_again_may_have_a_disk_with_space(nodes: Nodes) -> None:
    _, ssd, task = copying_to_ssd(nodes)
    ssd.fail(task, "no_space", FULL)
    nodes.lose(ssd.connection)
    Place(nodes, "b/ssd", 1 << 20, tier=Tier.SSD, content_id=5, epoch=8)
    assert nodes.master.segments.mounted["b/ssd"].disk_full == ""

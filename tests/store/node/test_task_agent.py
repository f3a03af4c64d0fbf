# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from mooncake.errors import Refusal
from mooncake.machine import Wake
from mooncake.store import messages as m
from mooncake.store.node.task_agent import (
    MAX_REPORT_BYTES,
    MAX_REPORT_ENTRIES,
    PAUSE_S,
    CheckEnded,
    Effect,
    Event,
    PollAnswered,
    PollFailed,
    Remount,
    ReportEnded,
    RunCheck,
    RunTask,
    SegmentRegistered,
    SegmentUnregistered,
    SendPoll,
    SendReport,
    TaskAgent,
    TaskEnded,
    TasksEnded,
    UpdateJournal,
    changed,
    reports,
)


def entry(object_id: int, key: str = "k") -> m.SegmentEntry:
    return m.SegmentEntry(key, object_id, 10, 10, b"crc!", 4096 * object_id)


def task(number: int, deadline_s: float = 5.0) -> m.CopyTask:
    return m.CopyTask(number, entry(number), m.Replica("src", 1, 4096), deadline_s)


class Node:
    """A task agent with its own clock; checked at every step."""

    def __init__(self) -> None:
        self.core = TaskAgent("a/ssd", 7, max_tasks=2)
        self.now = 100.0

    def post(self, event: Event | Wake) -> list[Effect]:
        effects = self.core.handle(event, self.now)
        self.core.check()
        return effects

    def begin(self) -> SendPoll:
        (poll,) = self.post(SegmentRegistered())
        assert isinstance(poll, SendPoll)
        return poll

    def answer(
        self,
        poll: SendPoll,
        *tasks: m.CopyTask,
        first: int = 0,
        changes: list[m.SegmentEntry | int] | None = None,
    ) -> list[Effect]:
        first = first or self.core.seen + 1
        return self.post(PollAnswered(poll.number, m.Polled(first, changes or [], list(tasks))))


@pytest.fixture
def node() -> Node:
    return Node()


def the_poll(effects: list[Effect]) -> SendPoll:
    (poll,) = [effect for effect in effects if isinstance(effect, SendPoll)]
    return poll


def test_polls_as_soon_as_it_is_mounted(node: Node) -> None:
    assert node.post(Wake()) == []
    assert node.begin().message == m.Poll("a/ssd", 7, [], 0, 2)
    assert node.core.deadline() is None, "the master may hold a Poll for any time"


def test_tasks_run_and_their_outcomes_are_reported(node: Node) -> None:
    poll = node.begin()
    node.now += 1
    run, again = node.answer(poll, task(1))
    assert run == RunTask(task(1), 100.0 + 5.0, 1), "the deadline counts from before the Poll was sent"
    assert isinstance(again, SendPoll) and again.message.max_tasks == 1
    refusal = Refusal("corrupt", "why")
    second = the_poll(node.post(TaskEnded(1, 1, refusal)))
    assert second.message.done == [m.TaskDone(1, refusal)]
    assert node.answer(again) == [], "the other Poll is held"


def test_no_more_polls_than_two(node: Node) -> None:
    """Tasks that end while both are open are reported with the next one, all together."""
    first = the_poll(node.answer(node.begin(), task(1), task(2)) + node.post(TaskEnded(1, 1, None)))
    second = the_poll(node.post(TaskEnded(2, 1, None)))
    node.core.handle(PollAnswered(first.number, m.Polled(1, [], [task(3), task(4)])), node.now)
    third = [e for e in node.post(TaskEnded(3, 1, None)) if isinstance(e, SendPoll)]
    assert len(third) == 1
    assert node.post(TaskEnded(4, 1, None)) == []
    assert the_poll(node.answer(second)).message.done == [m.TaskDone(4, None)]


def test_tasks_that_end_together_are_reported_together(node: Node) -> None:
    node.answer(node.begin(), task(1), task(2))
    poll = the_poll(node.post(TasksEnded([TaskEnded(1, 1, None), TaskEnded(2, 1, None)])))
    assert poll.message.done == [m.TaskDone(1, None), m.TaskDone(2, None)] and poll.message.max_tasks == 2


def check(number: int) -> m.Check:
    return m.Check(number, entry(number), 7.0)


def test_checks_run_and_are_reported_beside_the_tasks(node: Node) -> None:
    """Checks have numbers of their own; after a failed Poll they are reported again."""
    poll = node.begin()
    node.now += 1
    look, again = node.post(PollAnswered(poll.number, m.Polled(1, [], [], checks=[check(1)])))
    assert look == RunCheck(check(1), 100.0 + 7.0, 1), "the deadline counts from before the Poll was sent"
    assert isinstance(again, SendPoll) and again.message.max_tasks == 2, "it does not count as a task"
    refusal = Refusal("corrupt", "why")
    poll = the_poll(node.post(CheckEnded(1, 1, refusal)))
    assert poll.message.checked == [m.TaskDone(1, refusal)] and poll.message.done == []
    (third,) = node.post(PollFailed(poll.number))
    assert isinstance(third, SendPoll) and third.message.checked == poll.message.checked
    assert node.answer(again) == [] and node.answer(third) != []


def test_a_check_of_another_connection_is_not_reported(node: Node) -> None:
    poll = node.begin()
    node.post(PollAnswered(poll.number, m.Polled(1, [], [], checks=[check(1)])))
    node.post(SegmentUnregistered())
    assert node.post(CheckEnded(1, 1, None)) == []
    assert node.begin().message.checked == []


def test_at_the_limit_of_tasks_it_does_not_poll(node: Node) -> None:
    assert [type(effect) for effect in node.answer(node.begin(), task(1), task(2))] == [RunTask, RunTask]
    assert the_poll(node.post(TaskEnded(2, 1, None))).message == m.Poll(
        "a/ssd", 7, [m.TaskDone(2, None)], 0, 1
    )


def test_a_task_that_arrives_too_late_is_not_run(node: Node) -> None:
    poll = node.begin()
    node.now += 5.0
    poll = the_poll(node.answer(poll, task(1)))
    (done,) = poll.message.done
    assert done.refusal is not None and done.refusal.code == "expired"


def task_at(number: int, offset: int, size_bytes: int) -> m.CopyTask:
    entry = m.SegmentEntry("k", number, size_bytes, size_bytes, b"crc!", offset)
    return m.CopyTask(number, entry, m.Replica("src", 1, 4096), 5.0)


@pytest.mark.parametrize(
    ("offset", "size_bytes", "is_run"),
    [(0, 100, True), (0, 101, False), (150, 10, False), (199, 1000, False), (200, 100, True)],
)
def test_no_task_writes_where_an_earlier_one_may_still_write(
    node: Node, offset: int, size_bytes: int, is_run: bool
) -> None:
    """A write on which the disk is stuck ends later than the deadline, after which the master uses the space
    for another object."""
    poll = the_poll(node.answer(node.begin(), task_at(1, 100, 100)))
    node.now += 1000.0
    poll = the_poll(node.answer(poll))
    effects = node.answer(poll, task_at(2, offset, size_bytes))
    assert [one.task.task_id for one in effects if isinstance(one, RunTask)] == [2] * is_run
    if is_run:
        return
    poll = the_poll(effects)
    assert [done.refusal and done.refusal.code for done in poll.message.done] == ["busy"]
    poll = the_poll(node.post(TaskEnded(1, 1, Refusal("expired", "it took too long"))))
    run = node.answer(poll, task_at(3, offset, size_bytes))[0]
    assert isinstance(run, RunTask), "the first one has ended, so nothing else writes there"


def test_tasks_of_one_answer_write_to_different_places(node: Node) -> None:
    effects = node.answer(node.begin(), task_at(1, 0, 100), task_at(2, 99, 100))
    assert [one.task.task_id for one in effects if isinstance(one, RunTask)] == [1]
    assert [done.task_id for done in the_poll(effects).message.done] == [2]


def test_a_task_of_an_earlier_connection_may_still_write(node: Node) -> None:
    node.answer(node.begin(), task_at(1, 0, 100))
    node.post(SegmentUnregistered())
    effects = node.answer(the_poll(node.post(SegmentRegistered())), task_at(1, 50, 100))
    assert not any(isinstance(one, RunTask) for one in effects)
    assert [done.refusal and done.refusal.code for done in the_poll(effects).message.done] == ["busy"]


def test_changes_are_entered_once_and_before_tasks(node: Node) -> None:
    effects = node.answer(node.begin(), task(9), first=1, changes=[entry(1), entry(2)])
    assert effects[0] == UpdateJournal([entry(1), entry(2)]) and isinstance(effects[1], RunTask)
    poll = the_poll(effects)
    assert poll.message.seen == 2
    effects = node.answer(poll, first=2, changes=[entry(2), 1])
    assert effects[0] == UpdateJournal([1]), "the first one was seen already"
    assert the_poll(effects).message.seen == 3


def test_lost_changes_cause_a_report(node: Node) -> None:
    effects = node.answer(node.begin(), first=500, changes=[entry(1)])
    assert effects[:2] == [UpdateJournal([entry(1)]), SendReport()]
    poll = the_poll(effects)
    assert poll.message.seen == 500
    effects = node.answer(poll, first=700)
    assert effects[0] == SendReport() and the_poll(effects).message.seen == 699


def test_a_report_that_was_not_received_is_repeated(node: Node) -> None:
    poll = the_poll(node.answer(node.begin(), first=500))
    assert node.post(ReportEnded(is_complete=False)) == [], "the connection may just be breaking"
    assert SendReport() in node.answer(poll)
    node.post(ReportEnded(is_complete=True))
    node.post(SegmentUnregistered())
    assert SendReport() not in node.post(SegmentRegistered())


def test_outcomes_that_were_not_received_cause_a_report_after_a_loss(node: Node) -> None:
    node.answer(node.begin(), task(1), task(2))
    node.post(TaskEnded(1, 1, None))
    node.post(SegmentUnregistered())
    assert SendReport() in node.post(SegmentRegistered())


def test_a_poll_that_failed_is_sent_again_after_a_pause(node: Node) -> None:
    node.answer(node.begin(), task(1), task(2))
    poll = the_poll(node.post(TaskEnded(1, 1, None)))
    assert node.post(PollFailed(poll.number)) == []
    assert node.core.deadline() == node.now + PAUSE_S
    node.now += PAUSE_S
    assert the_poll(node.post(Wake())).message.done == [m.TaskDone(1, None)], "it may not have been received"


def test_after_a_loss_no_earlier_outcome_is_reported(node: Node) -> None:
    poll = node.begin()
    node.answer(poll, task(1), task(2))
    node.post(TaskEnded(1, 1, None))
    assert node.post(SegmentUnregistered()) == []
    assert node.post(TaskEnded(2, 1, None)) == [], "there is no connection"
    report, again = node.post(SegmentRegistered())
    assert report == SendReport(), "the objects they have written must be reported"
    assert isinstance(again, SendPoll) and again.message.done == [] and again.message.max_tasks == 2
    assert node.post(PollAnswered(poll.number, m.Polled(1, [], [task(3)]))) == [], "of another connection"


def test_a_task_of_an_earlier_connection_still_counts(node: Node) -> None:
    node.answer(node.begin(), task(1), task(2))
    node.post(SegmentUnregistered())
    assert node.post(SegmentRegistered()) == [], "the limit is reached"
    effects = node.post(TaskEnded(1, 1, None))
    assert effects[0] == SendReport() and the_poll(effects).message == m.Poll("a/ssd", 7, [], 0, 1)


def test_a_master_that_forgot_is_mounted_again(node: Node) -> None:
    poll = node.begin()
    assert node.post(PollAnswered(poll.number, m.Polled(0, [], [], is_known=False))) == [Remount()]
    assert node.core.deadline() is None


def test_the_story_names_keys(node: Node) -> None:
    node.answer(node.begin(), task(1))
    node.post(TaskEnded(1, 1, None))
    assert "copy from src" in node.core.story("k")[0] and len(node.core.story("a/ssd")) == 2
    assert node.core.story("other") == []


def test_reports_are_split_by_size() -> None:
    assert reports("a", 7, []) == [m.ReportContents("a", 7, [], True)], "even without entries"
    big = [msgspec_entry(i, MAX_REPORT_BYTES // 2) for i in range(3)]
    parts = reports("a", 7, big)
    assert [len(part.entries) for part in parts] == [1, 1, 1]
    assert [part.is_last for part in parts] == [False, False, True]
    many = [entry(i) for i in range(MAX_REPORT_ENTRIES + 1)]
    assert [len(part.entries) for part in reports("a", 7, many)] == [MAX_REPORT_ENTRIES, 1]


def msgspec_entry(object_id: int, num_bytes: int) -> m.SegmentEntry:
    return m.SegmentEntry("k", object_id, 10, 10, bytes(num_bytes), 0)


def test_a_journal_follows_the_changes() -> None:
    held: dict[int, m.SegmentEntry] = {}
    changed(held, [entry(1), entry(2), 1, 7])
    assert held == {2: entry(2)}

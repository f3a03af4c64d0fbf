from __future__ import annotations

import pytest

from mooncake.errors import Refusal
from mooncake.machine import Wake
from mooncake.store import messages as m
from mooncake.store.node.task_agent import (
    MAX_REPORT_BYTES,
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
    """Errands on a clock of their own; checked at every step."""

    def __init__(self) -> None:
        self.core = TaskAgent("a/ssd", 7, max_tasks=2)
        self.now = 100.0

    def tell(self, event: Event | Wake) -> list[Effect]:
        effects = self.core.handle(event, self.now)
        self.core.check()
        return effects

    def begin(self) -> SendPoll:
        (ask,) = self.tell(SegmentRegistered())
        assert isinstance(ask, SendPoll)
        return ask

    def answer(
        self,
        ask: SendPoll,
        *tasks: m.CopyTask,
        first: int = 0,
        changes: list[m.SegmentEntry | int] | None = None,
    ) -> list[Effect]:
        first = first or self.core.seen + 1
        return self.tell(PollAnswered(ask.number, m.Polled(first, changes or [], list(tasks))))


@pytest.fixture
def node() -> Node:
    return Node()


def the_ask(effects: list[Effect]) -> SendPoll:
    (ask,) = [effect for effect in effects if isinstance(effect, SendPoll)]
    return ask


def test_asks_as_soon_as_it_is_mounted(node: Node) -> None:
    assert node.tell(Wake()) == []
    assert node.begin().message == m.Poll("a/ssd", 7, [], 0, 2)
    assert node.core.deadline() is None, "a Poll is parked as long as the master likes"


def test_tasks_run_and_what_came_of_them_is_told(node: Node) -> None:
    ask = node.begin()
    node.now += 1
    run, again = node.answer(ask, task(1))
    assert run == RunTask(task(1), 100.0 + 5.0, 1), "the deadline counts from before the Poll was sent"
    assert isinstance(again, SendPoll) and again.message.max_tasks == 1
    refusal = Refusal("corrupt", "why")
    second = the_ask(node.tell(TaskEnded(1, 1, refusal)))
    assert second.message.done == [m.TaskDone(1, refusal)]
    assert node.answer(again) == [], "the other Poll is parked"


def test_no_more_polls_than_two(node: Node) -> None:
    """What ends while both are under way goes with the next one, all together."""
    first = the_ask(node.answer(node.begin(), task(1), task(2)) + node.tell(TaskEnded(1, 1, None)))
    second = the_ask(node.tell(TaskEnded(2, 1, None)))
    node.core.handle(PollAnswered(first.number, m.Polled(1, [], [task(3), task(4)])), node.now)
    third = [e for e in node.tell(TaskEnded(3, 1, None)) if isinstance(e, SendPoll)]
    assert len(third) == 1
    assert node.tell(TaskEnded(4, 1, None)) == []
    assert the_ask(node.answer(second)).message.done == [m.TaskDone(4, None)]


def test_what_ends_together_is_told_together(node: Node) -> None:
    node.answer(node.begin(), task(1), task(2))
    told = the_ask(node.tell(TasksEnded([TaskEnded(1, 1, None), TaskEnded(2, 1, None)])))
    assert told.message.done == [m.TaskDone(1, None), m.TaskDone(2, None)] and told.message.max_tasks == 2


def check(number: int) -> m.Check:
    return m.Check(number, entry(number), 7.0)


def test_what_is_to_be_read_is_read_and_told_beside_the_tasks(node: Node) -> None:
    """Checks have numbers of their own; a Poll that failed tells them again."""
    ask = node.begin()
    node.now += 1
    look, again = node.tell(PollAnswered(ask.number, m.Polled(1, [], [], checks=[check(1)])))
    assert look == RunCheck(check(1), 100.0 + 7.0, 1), "the deadline counts from before the Poll was sent"
    assert isinstance(again, SendPoll) and again.message.max_tasks == 2, "it is no task"
    refusal = Refusal("corrupt", "why")
    told = the_ask(node.tell(CheckEnded(1, 1, refusal)))
    assert told.message.checked == [m.TaskDone(1, refusal)] and told.message.done == []
    (third,) = node.tell(PollFailed(told.number))
    assert isinstance(third, SendPoll) and third.message.checked == told.message.checked
    assert node.answer(again) == [] and node.answer(third) != []


def test_a_check_of_another_connection_is_not_told(node: Node) -> None:
    ask = node.begin()
    node.tell(PollAnswered(ask.number, m.Polled(1, [], [], checks=[check(1)])))
    node.tell(SegmentUnregistered())
    assert node.tell(CheckEnded(1, 1, None)) == []
    assert node.begin().message.checked == []


def test_with_its_hands_full_it_does_not_ask(node: Node) -> None:
    assert [type(effect) for effect in node.answer(node.begin(), task(1), task(2))] == [RunTask, RunTask]
    assert the_ask(node.tell(TaskEnded(2, 1, None))).message == m.Poll(
        "a/ssd", 7, [m.TaskDone(2, None)], 0, 1
    )


def test_a_task_that_comes_too_late_is_not_run(node: Node) -> None:
    ask = node.begin()
    node.now += 5.0
    told = the_ask(node.answer(ask, task(1)))
    (done,) = told.message.done
    assert done.refusal is not None and done.refusal.code == "expired"


def test_changes_are_noted_once_and_before_tasks(node: Node) -> None:
    effects = node.answer(node.begin(), task(9), first=1, changes=[entry(1), entry(2)])
    assert effects[0] == UpdateJournal([entry(1), entry(2)]) and isinstance(effects[1], RunTask)
    ask = the_ask(effects)
    assert ask.message.seen == 2
    effects = node.answer(ask, first=2, changes=[entry(2), 1])
    assert effects[0] == UpdateJournal([1]), "the first one was seen already"
    assert the_ask(effects).message.seen == 3


def test_lost_changes_are_made_up_for(node: Node) -> None:
    effects = node.answer(node.begin(), first=500, changes=[entry(1)])
    assert effects[:2] == [UpdateJournal([entry(1)]), SendReport()]
    ask = the_ask(effects)
    assert ask.message.seen == 500
    effects = node.answer(ask, first=700)
    assert effects[0] == SendReport() and the_ask(effects).message.seen == 699


def test_a_report_that_was_not_heard_is_made_again(node: Node) -> None:
    ask = the_ask(node.answer(node.begin(), first=500))
    assert node.tell(ReportEnded(is_complete=False)) == [], "the connection may just be breaking"
    assert SendReport() in node.answer(ask)
    node.tell(ReportEnded(is_complete=True))
    node.tell(SegmentUnregistered())
    assert SendReport() not in node.tell(SegmentRegistered())


def test_what_was_done_and_not_heard_is_reported_after_a_loss(node: Node) -> None:
    node.answer(node.begin(), task(1), task(2))
    node.tell(TaskEnded(1, 1, None))
    node.tell(SegmentUnregistered())
    assert SendReport() in node.tell(SegmentRegistered())


def test_a_poll_that_failed_is_sent_again_after_a_pause(node: Node) -> None:
    node.answer(node.begin(), task(1), task(2))
    ask = the_ask(node.tell(TaskEnded(1, 1, None)))
    assert node.tell(PollFailed(ask.number)) == []
    assert node.core.deadline() == node.now + PAUSE_S
    node.now += PAUSE_S
    assert the_ask(node.tell(Wake())).message.done == [m.TaskDone(1, None)], "it may not have been heard"


def test_after_a_loss_nothing_of_before_is_told(node: Node) -> None:
    ask = node.begin()
    node.answer(ask, task(1), task(2))
    node.tell(TaskEnded(1, 1, None))
    assert node.tell(SegmentUnregistered()) == []
    assert node.tell(TaskEnded(2, 1, None)) == [], "there is nobody to tell"
    told, again = node.tell(SegmentRegistered())
    assert told == SendReport(), "a master must hear of what they have written"
    assert isinstance(again, SendPoll) and again.message.done == [] and again.message.max_tasks == 2
    assert node.tell(PollAnswered(ask.number, m.Polled(1, [], [task(3)]))) == [], "of another connection"


def test_a_task_of_before_still_takes_a_hand(node: Node) -> None:
    node.answer(node.begin(), task(1), task(2))
    node.tell(SegmentUnregistered())
    assert node.tell(SegmentRegistered()) == [], "both hands are full"
    effects = node.tell(TaskEnded(1, 1, None))
    assert effects[0] == SendReport() and the_ask(effects).message == m.Poll("a/ssd", 7, [], 0, 1)


def test_a_master_that_forgot_is_mounted_again(node: Node) -> None:
    ask = node.begin()
    assert node.tell(PollAnswered(ask.number, m.Polled(0, [], [], is_known=False))) == [Remount()]
    assert node.core.deadline() is None


def test_the_story_names_keys(node: Node) -> None:
    node.answer(node.begin(), task(1))
    node.tell(TaskEnded(1, 1, None))
    assert "copy from src" in node.core.story("k")[0] and len(node.core.story("a/ssd")) == 2
    assert node.core.story("other") == []


def test_reports_are_cut_to_size() -> None:
    assert reports("a", 7, []) == [m.ReportContents("a", 7, [], True)], "also when there is nothing"
    big = [msgspec_entry(i, MAX_REPORT_BYTES // 2) for i in range(3)]
    parts = reports("a", 7, big)
    assert [len(part.entries) for part in parts] == [1, 1, 1]
    assert [part.is_last for part in parts] == [False, False, True]
    many = [entry(i) for i in range(m.MAX_KEYS + 1)]
    assert [len(part.entries) for part in reports("a", 7, many)] == [m.MAX_KEYS, 1]


def msgspec_entry(object_id: int, num_bytes: int) -> m.SegmentEntry:
    return m.SegmentEntry("k", object_id, 10, 10, bytes(num_bytes), 0)


def test_a_journal_follows_the_changes() -> None:
    held: dict[int, m.SegmentEntry] = {}
    changed(held, [entry(1), entry(2), 1, 7])
    assert held == {2: entry(2)}

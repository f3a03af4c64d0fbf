# SPDX-License-Identifier: Apache-2.0
"""Task agent of one segment: polls the master for tasks, runs some at a time, and reports their outcomes.

::

    master ◀── Poll{done, seen, max_tasks} ───  held there until there is something to do
           ─── Polled{changes, tasks} ───────▶  changes: into the journal, before any task begins
                                                tasks: RunTask ... TaskEnded, reported by the next Poll

Usually one Poll is held by the master; outcomes of tasks that end meanwhile go with a second one, whose
arrival makes the master answer the first. Deadlines of tasks count from the time before their Poll was sent.
The outcome of a task that ends after its connection was lost is not reported on the next one, where the same
number may mean another task; but the objects it has written are, so that the master keeps or drops them.
A task is refused while another one may still write to the same range: the master reuses the space of a task
some time after its deadline, but a write on which the disk is stuck ends later than that.
This class opens no socket and moves no bytes: ``mounted_segment.py`` and the simulator perform its effects.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from mooncake.errors import Refusal
from mooncake.machine import Wake
from mooncake.store import messages as m

MAX_TASKS = 64
"""Limit of concurrent tasks on one segment."""
PATIENCE_S = 30.0
"""Time after which an unanswered Poll is abandoned and repeated."""
PAUSE_S = 1.0
"""Delay before a failed Poll is repeated."""
MAX_POLLS = 2
MAX_REPORT_BYTES = 512 << 10
MAX_REPORT_ENTRIES = 256
"""Limits of one part of a report. After a master that lost its log, all nodes report at once, take turns, and
wait for each answer for a limited time only; and unfinished requests of all of them have a common bound."""


@dataclasses.dataclass(frozen=True, slots=True)
class SegmentRegistered:
    """The master knows the segment (again)."""


@dataclasses.dataclass(frozen=True, slots=True)
class SegmentUnregistered:
    """The connection is gone, or the master does not know the segment."""


@dataclasses.dataclass(frozen=True, slots=True)
class PollAnswered:
    """A Poll was answered."""

    number: int
    reply: m.Polled


@dataclasses.dataclass(frozen=True, slots=True)
class PollFailed:
    """A Poll was not answered, or with an unexpected reply."""

    number: int


@dataclasses.dataclass(frozen=True, slots=True)
class TaskEnded:
    """A task ended; ``life`` as in its RunTask."""

    task_id: int
    life: int
    refusal: Refusal | None


@dataclasses.dataclass(frozen=True, slots=True)
class TasksEnded:
    """Several tasks ended together, to be reported together."""

    ends: list[TaskEnded]


@dataclasses.dataclass(frozen=True, slots=True)
class CheckEnded:
    """A replica was verified; ``life`` as in its RunCheck."""

    check_id: int
    life: int
    refusal: Refusal | None


@dataclasses.dataclass(frozen=True, slots=True)
class ReportEnded:
    """The report of ``SendReport`` ended; ``is_complete``: the master has received all of it."""

    is_complete: bool


@dataclasses.dataclass(frozen=True, slots=True)
class SendPoll:
    """Effect: send ``message``; PollAnswered or PollFailed follows, unless the connection is lost."""

    number: int
    message: m.Poll


@dataclasses.dataclass(frozen=True, slots=True)
class UpdateJournal:
    """Effect: enter ``changes`` in the journal."""

    changes: list[m.SegmentEntry | int]


@dataclasses.dataclass(frozen=True, slots=True)
class RunTask:
    """Effect: run ``task``, writing nothing after ``deadline``; TaskEnded always follows."""

    task: m.CopyTask
    deadline: float
    life: int


@dataclasses.dataclass(frozen=True, slots=True)
class RunCheck:
    """Effect: verify the replica of ``check``; CheckEnded always follows."""

    check: m.Check
    deadline: float
    life: int


@dataclasses.dataclass(frozen=True, slots=True)
class SendReport:
    """Effect: report the segment's whole content, because changes were lost; ReportEnded follows."""


@dataclasses.dataclass(frozen=True, slots=True)
class Remount:
    """Effect: mount the segment again, because the master does not know it."""


Event = (
    SegmentRegistered
    | SegmentUnregistered
    | PollAnswered
    | PollFailed
    | TaskEnded
    | TasksEnded
    | CheckEnded
    | ReportEnded
)
Effect = SendPoll | UpdateJournal | RunTask | RunCheck | SendReport | Remount


class TaskAgent:
    """State machine for one segment; starts with ``SegmentRegistered``."""

    def __init__(self, segment: str, epoch: int, max_tasks: int = MAX_TASKS) -> None:
        self._segment = segment
        self._epoch = epoch
        self._max_tasks = max_tasks
        self.is_mounted = False
        self.seen = 0
        """Number of the last change entered in the journal."""
        self._life = 0
        """Number of the connection: outcomes of tasks from an earlier one are not reported on this one."""
        self._number = 0
        self._polls: dict[int, tuple[float, list[m.TaskDone], list[m.TaskDone]]] = {}
        """Number -> (time of sending, outcomes of tasks and of checks that it reports)."""
        self._running: dict[tuple[int, int], tuple[int, int]] = {}
        """(life, task id) -> first offset that it may write, and the end of its range."""
        self._done: list[m.TaskDone] = []
        self._checked: list[m.TaskDone] = []
        self._needs_report = False
        """The journal may have entries that the master lacks, or lack some: a full report is due."""
        self._wake_at: float | None = None
        self._lines: list[str] = []

    def handle(self, event: Event | Wake, now: float) -> list[Effect]:
        effects: list[Effect] = []
        if isinstance(event, SegmentRegistered):
            self._disconnected()
            self.is_mounted = True
        elif isinstance(event, SegmentUnregistered):
            self._disconnected()
        elif isinstance(event, PollAnswered):
            effects = self._answered(event, now)
        elif isinstance(event, PollFailed):
            self._failed(event.number, now)
        elif isinstance(event, TaskEnded):
            self._ended(event, now)
        elif isinstance(event, TasksEnded):
            for end in event.ends:
                self._ended(end, now)
        elif isinstance(event, CheckEnded):
            if event.life == self._life and self.is_mounted:
                self._checked.append(m.TaskDone(event.check_id, event.refusal))
        elif self._wake_at is not None and self._wake_at <= now:
            self._wake_at = None
        if isinstance(event, ReportEnded):
            self._needs_report |= not event.is_complete  # retried at the next event
        elif self._needs_report and self.is_mounted:
            self._needs_report = False
            effects.append(SendReport())
        return effects + self._poll(now)

    def deadline(self) -> float | None:
        return self._wake_at

    def check(self) -> None:
        assert len(self._polls) <= MAX_POLLS
        assert self.is_mounted or not (self._polls or self._done or self._checked)
        assert self._wake_at is None or not self._polls
        if self.is_mounted and not self._polls and self._wake_at is None:
            assert len(self._running) >= self._max_tasks, "no poll for tasks is open"

    def story(self, key: str) -> list[str]:
        """Last tasks of the object ``key``, or of all objects when it is the segment's name."""
        return [line for line in self._lines if key == self._segment or repr(key) in line]

    def _disconnected(self) -> None:
        self.is_mounted = False
        self._life += 1
        unreported = [*self._done, *(one for _, done, _ in self._polls.values() for one in done)]
        self._needs_report |= any(one.refusal is None for one in unreported)
        self._polls.clear()
        self._done.clear()
        self._checked.clear()
        self._wake_at = None

    def _answered(self, event: PollAnswered, now: float) -> list[Effect]:
        poll = self._polls.pop(event.number, None)
        if poll is None:
            return []
        reply = event.reply
        if not reply.is_known:
            self._disconnected()
            return [Remount()]
        effects: list[Effect] = []
        fresh = reply.changes[max(0, self.seen + 1 - reply.first) :]
        if fresh:
            effects.append(UpdateJournal(list(fresh)))
        self._needs_report |= reply.first > self.seen + 1
        self.seen = max(self.seen, reply.first + len(reply.changes) - 1)
        for task in reply.tasks:
            deadline = poll[0] + task.deadline_s
            begin, end = task.entry.offset, task.entry.offset + task.entry.size_bytes
            if deadline <= now:
                self._done.append(m.TaskDone(task.task_id, Refusal("expired", "it came after its deadline")))
            elif any(first < end and begin < last for first, last in self._running.values()):
                reason = "an earlier task that has not ended may still write there"
                self._note(now, task.entry.key, f"task {task.task_id}: refused, {reason}")
                self._done.append(m.TaskDone(task.task_id, Refusal("busy", reason)))
            else:
                self._running[self._life, task.task_id] = begin, end
                self._note(now, task.entry.key, f"task {task.task_id}: copy from {task.source.segment}")
                effects.append(RunTask(task, deadline, self._life))
        for check in reply.checks:
            self._note(now, check.entry.key, f"check {check.check_id}")
            effects.append(RunCheck(check, poll[0] + check.deadline_s, self._life))
        return effects

    def _failed(self, number: int, now: float) -> None:
        poll = self._polls.pop(number, None)
        if poll is not None:
            self._done, self._checked = poll[1] + self._done, poll[2] + self._checked
            if not self._polls:
                self._wake_at = now + PAUSE_S

    def _ended(self, event: TaskEnded, now: float) -> None:
        self._running.pop((event.life, event.task_id), None)
        self._note(now, "", f"task {event.task_id}: {event.refusal or 'done'}")
        if event.life == self._life and self.is_mounted:
            self._done.append(m.TaskDone(event.task_id, event.refusal))
        elif event.refusal is None:
            self._needs_report = True

    def _poll(self, now: float) -> list[Effect]:
        num_idle = self._max_tasks - len(self._running)
        may_ask = self.is_mounted and self._wake_at is None
        has_news = bool(self._done or self._checked)
        if self._polls:
            may_ask = may_ask and has_news and len(self._polls) < MAX_POLLS
        elif not has_news:
            may_ask = may_ask and num_idle > 0
        if not may_ask:
            return []
        self._number += 1
        done, self._done = self._done, []
        checked, self._checked = self._checked, []
        self._polls[self._number] = now, done, checked
        message = m.Poll(self._segment, self._epoch, done, self.seen, max(0, num_idle), checked)
        return [SendPoll(self._number, message)]

    def _note(self, now: float, key: str, what: str) -> None:
        self._lines.append(f"{now:.6f} {what} {repr(key) if key else ''}".rstrip())
        del self._lines[:-100]

    def __repr__(self) -> str:
        return f"<TaskAgent of {self._segment!r}: {len(self._running)} running, {len(self._done)} to report>"


def reports(segment: str, epoch: int, entries: Iterable[m.SegmentEntry]) -> list[m.ReportContents]:
    """Report of a segment's content in messages of bounded size; at least one."""
    parts: list[list[m.SegmentEntry]] = [[]]
    num_bytes = 0
    for entry in entries:
        size_bytes = len(entry.key) + len(entry.checksums) + len(entry.group) + len(entry.parent) + 64
        if parts[-1] and (num_bytes + size_bytes > MAX_REPORT_BYTES or len(parts[-1]) == MAX_REPORT_ENTRIES):
            parts.append([])
            num_bytes = 0
        parts[-1].append(entry)
        num_bytes += size_bytes
    return [m.ReportContents(segment, epoch, part, part is parts[-1]) for part in parts]


def changed(held: dict[int, m.SegmentEntry], changes: Iterable[m.SegmentEntry | int]) -> None:
    """Apply ``changes`` to the journal of a segment in volatile memory."""
    for change in changes:
        if isinstance(change, int):
            held.pop(change, None)
        else:
            held[change.object_id] = change

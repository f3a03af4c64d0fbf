# SPDX-License-Identifier: Apache-2.0
"""Tasks: one more replica of one object each, copied by the node that owns the target space.

::

    plan ──▶ WAITING ──the target's node polls──▶ UNDER WAY ──TaskDone──▶ done
                ▲                                     │
                └── the source was at fault, or late ─┘ ... or given up, and its planner is notified

``tiering.py`` and ``jobs.py`` plan them and have the reasons; here is decided when they run. Space is
reserved when a task is started, not when it is planned, so that a long queue holds none. A task
has a deadline as a put has: the node writes nothing later, and the space of one that was given up
rests for the grace period beyond it.

A node polls once for each of its segments and is answered when there is work or something for its
journal, or after a timeout. Answers are composed after the current event (``expire``), so that the
puts of one message make one batch of tasks, and planning never interferes with its caller.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable
from typing import Any, Protocol, TypeAlias

from mooncake.errors import Refusal
from mooncake.store import messages as m
from mooncake.store.master.catalog import DISK_FAILING_S, Catalog
from mooncake.store.master.catalog_events import ObjectRemoved, ObjectShown, ReplicaRemoved
from mooncake.store.master.effects import Received, Reply
from mooncake.store.master.objects import Extent, StoredObject, replica_of
from mooncake.store.master.segments import Segment
from mooncake.types import Tier

JOURNAL_DELAY_S = 0.05
"""How long a change waits to be batched with others."""
GONE_DELAY_S = 0.002
"""The same if an object was removed: its space is reused, and until the node has noted that, a master that
has only the journals would take the old object to be there."""
MAX_CHANGES = 4096
"""Maximum number of changes in one answer."""
MAX_POLLED_BYTES = 8 << 20
"""Most checksums in the changes of one answer, and about as many in its tasks: an object may have 4 MiB of
them, and a message that is too large can't be sent, however often the node asks."""
NOT_OF_TARGET = ("corrupt", "peer_lost", "not_found", "cancelled", "draining")
"""Codes of copies that failed, but not because the target can't be written."""
MAX_ATTEMPTS = 3
MAX_GIVEN_UP = 4096
CHECK_INTERVAL_S = 1.0
"""Interval of the check whether a segment can run its tasks now, or never will."""

OnTaskEnd: TypeAlias = Callable[["PlannedCopy", Refusal | None, float], None]
"""Called when a task is over, with None, or with why it was given up."""


class ReplicaVerifier(Protocol):
    """Has replicas read by their own nodes (``verification.py``)."""

    def suspect(self, stored: StoredObject, extent: Extent, name: str, now: float) -> bool | Refusal: ...

    def take(self, segment: Segment, now: float) -> list[m.Check]: ...

    def answered(self, answers: list[m.TaskDone], segment: Segment, now: float) -> None: ...

    def drop(self, stored: StoredObject, extent: Extent, now: float, reporters: list[str]) -> None: ...


@dataclasses.dataclass(slots=True, eq=False)
class PlannedCopy:
    """One planned copy."""

    task_id: int
    stored: StoredObject
    target: Segment
    why: str
    makes_room: bool
    """Others may be evicted from the target to make room for it."""
    ended: list[OnTaskEnd]
    source: Extent | None = None
    extent: Extent | None = None
    """Its space on the target, while it is under way."""
    until: float = 0.0
    """When the task is given up."""
    num_attempts: int = 0
    failed_sources: list[Segment] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True)
class _SegmentQueue:
    """Tasks that wait for one segment, by id."""

    urgent: dict[int, PlannedCopy] = dataclasses.field(default_factory=dict)
    others: dict[int, PlannedCopy] = dataclasses.field(default_factory=dict)
    num_under_way: int = 0


@dataclasses.dataclass(slots=True)
class _PendingPoll:
    """A Poll without an answer yet."""

    origin: Any
    connection: Hashable
    max_tasks: int
    arrived_at: float
    changes_due: float | None = None
    """When it is answered for the journal's changes alone."""
    change_bytes: int = 0
    """Checksums in the changes that wait."""


class Tasks:
    """Answers Poll. A clock of the catalog, which also enforces the deadlines."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._last_id = 0
        self._lines: dict[Segment, _SegmentQueue] = {}
        self._under_way: dict[int, PlannedCopy] = {}
        self._given_up: dict[int, StoredObject] = {}
        """The last tasks that were given up while under way."""
        self._by_object: dict[int, list[PlannedCopy]] = {}
        """All tasks, by the id of their object."""
        self._parked: dict[Segment, _PendingPoll] = {}
        """Polls without an answer, oldest first."""
        self._due: dict[Segment, float] = {}
        """Parked Polls that are answered for their changes, in order of deadline."""
        self._soon: dict[Segment, float] = {}
        """The same, for urgent changes."""
        self._ripe: dict[Segment, float] = {}
        """Segments whose Poll may be answerable, and since when."""
        self._check_at: float | None = None
        self.checking: ReplicaVerifier | None = None
        """Its checks are sent along with tasks."""
        catalog.observe(
            {
                ObjectShown: self._shown,
                ReplicaRemoved: self._replica_removed,
                ObjectRemoved: self._object_removed,
            }
        )

    def plan(
        self,
        stored: StoredObject,
        target: Segment,
        why: str,
        now: float,
        ended: OnTaskEnd | None = None,
        *,
        makes_room: bool = False,
        is_urgent: bool = False,
    ) -> PlannedCopy:
        """Plan one more replica of ``stored`` on ``target``; returns the task that is planned already, if
        any."""
        task = self.find(stored, target)
        if task is None:
            self._last_id += 1
            task = PlannedCopy(self._last_id, stored, target, why, makes_room, [])
            self._by_object.setdefault(stored.object_id, []).append(task)
            target.num_tasks += 1
            self._enqueue(task, is_urgent, now)
        elif is_urgent and task.task_id in (line := self._lines[target]).others:
            line.urgent[task.task_id] = line.others.pop(task.task_id)
        task.makes_room |= makes_room
        if ended is not None:
            task.ended.append(ended)
        return task

    def find(self, stored: StoredObject, target: Segment) -> PlannedCopy | None:
        return next((t for t in self._by_object.get(stored.object_id, ()) if t.target is target), None)

    def of(self, stored: StoredObject) -> list[PlannedCopy]:
        """All tasks for this object."""
        return list(self._by_object.get(stored.object_id, ()))

    def cancel(self, task: PlannedCopy, reason: str, now: float) -> None:
        """Give up a task without notifying its planner."""
        task.ended.clear()
        self._give_up(task, Refusal("cancelled", reason), now)

    # Nodes

    def poll(self, message: m.Poll, event: Received, now: float) -> m.Polled | None:
        segment = self._catalog.segments.find(message.segment, message.epoch)
        if segment is None:
            return m.Polled(0, [], [], is_known=False)
        segment.polls = True
        for done in message.done:
            self._done(done, segment, now)
        if self.checking is not None:
            self.checking.answered(message.checked, segment, now)
        earlier = self._unpark(segment)
        if earlier is not None and earlier.connection == event.connection:
            self._catalog.replies.append(Reply(earlier.origin, m.Polled(0, [], [])))
        has_all = segment.changes.noted(message.seen)
        if has_all and segment.report_connection not in (None, event.connection):
            segment.changes.miss(message.seen)  # a report was requested, and lost on the way
            has_all = False
        if not has_all:
            segment.report_connection = event.connection
            return m.Polled(segment.changes.first, _fitting(segment.changes.take(MAX_CHANGES)), [])
        parked = _PendingPoll(event.origin, event.connection, max(0, message.max_tasks), now)
        parked.change_bytes = sum(map(_checksum_bytes, segment.changes.take(MAX_CHANGES)))
        self._parked[segment] = parked
        self._ripe.setdefault(segment, now)
        self._check_by(now)
        return None

    def hurry(self, segment: Segment, now: float) -> None:
        """Check for work for this segment's node, which may be waiting."""
        self._ripe.setdefault(segment, now)

    def lost(self, segment: Segment, reason: str, now: float) -> None:
        """Handle the loss of the process that ran this segment's tasks; its content may still be there."""
        self._unpark(segment)
        for task in [one for one in self._under_way.values() if one.target is segment]:
            self._failed(task, Refusal("peer_lost", reason), now)
        if not segment.is_mounted:
            line = self._lines.get(segment, _SegmentQueue())
            for task in (*line.urgent.values(), *line.others.values()):
                self._give_up(task, Refusal("peer_lost", reason), now)
            self._lines.pop(segment, None)

    def _done(self, done: m.TaskDone, segment: Segment, now: float) -> None:
        task = self._under_way.get(done.task_id)
        if task is None or task.target is not segment:
            self._done_in_vain(done, segment, now)
            return
        assert task.extent is not None and task.source is not None
        self._let_go(task)
        if done.refusal is None:
            extent = task.extent
            self._forget(task)
            self._catalog.counts.done_tasks += 1
            self._catalog.set_disk_full(segment, "", now)
            self._catalog.complete_extent(task.stored, extent, now)
            if segment.tier is not Tier.SSD:  # whose node has written it into its index already
                self.note(segment, entry_of(task.stored, extent.offset), now)
            for ended in task.ended:
                ended(task, None, now)
            return
        if done.refusal.code in ("corrupt", "peer_lost", "io_error"):
            task.failed_sources.append(task.source.segment)
        if done.refusal.code == "corrupt":
            self._doubt_source(task, now)
        if done.refusal.code == "no_space":
            task.extent.held_until = 0.0  # the attempt is over, so nothing will be written there later
            self._catalog.set_disk_full(segment, done.refusal.reason, now)
        elif _is_of_disk(task, done.refusal):
            segment.disk_failing_until = now + DISK_FAILING_S
        self._failed(task, done.refusal, now)

    def _let_go(self, task: PlannedCopy) -> None:
        """Release the source that the task read."""
        assert task.source is not None
        readers = [one.until for one in self.of(task.stored) if one.source is task.source and one is not task]
        task.source.held_until = max(readers, default=0.0)

    def _done_in_vain(self, done: m.TaskDone, segment: Segment, now: float) -> None:
        """Handle the end of a task given up meanwhile: the node may have what it was ordered to drop."""
        stored = self._given_up.pop(done.task_id, None)
        if stored is None or done.refusal is not None:
            return
        extent = stored.on(segment) if stored.is_readable else None
        if extent is None:
            self.note(segment, stored.object_id, now)
        elif extent.is_complete:
            self.note(segment, entry_of(stored, extent.offset), now)
        # Otherwise another task is writing there: its entry will replace the first one's.

    def _doubt_source(self, task: PlannedCopy, now: float) -> None:
        """Its reader found wrong bytes, twice. For another node's replica that is only a report."""
        assert task.source is not None and self.checking is not None
        if task.source not in task.stored.extents:
            return
        reader = task.target.node
        if task.source.segment.node == reader:
            self.checking.drop(task.stored, task.source, now, [reader])
        else:
            self.checking.suspect(task.stored, task.source, reader, now)

    # Life of a task

    def _enqueue(self, task: PlannedCopy, is_urgent: bool, now: float) -> None:
        line = self._lines.setdefault(task.target, _SegmentQueue())
        (line.urgent if is_urgent else line.others)[task.task_id] = task
        self._ripe.setdefault(task.target, now)
        self._check_by(now + CHECK_INTERVAL_S)

    def _start(self, task: PlannedCopy, parked: _PendingPoll, now: float) -> m.CopyTask | None:
        """Start the task; None if it is over."""
        stored, target = task.stored, task.target
        if any(extent.segment is target and extent.is_complete for extent in stored.extents):
            self._end(task, None, now)
            return None
        source = self._source(task)
        if source is None:
            self._give_up(task, Refusal("peer_lost", "no replica can be read"), now)
            return None
        put_s = self._catalog.settings.put_s
        has_room = task.makes_room or target.allocator.has_hole(stored.size_bytes)
        extent = self._catalog.add_extent(stored, target, now, now + put_s) if has_room else None
        if extent is None:
            reason = target.disk_full or f"{target.name} has no room for it"
            self._give_up(task, Refusal("no_space", reason), now)
            return None
        self._catalog.hold(source, now + put_s)
        task.source, task.extent, task.until = source, extent, now + put_s
        self._remove_from_line(task)
        self._under_way[task.task_id] = task
        self._lines[target].num_under_way += 1
        about = _about(task)
        self._catalog.add_story(now, stored.key, "{}: #{} goes to {} from {}", *about, source.segment.name)
        # The node counts from when it polled.
        deadline_s = now - parked.arrived_at + put_s
        return m.CopyTask(task.task_id, entry_of(stored, extent.offset), replica_of(source), deadline_s)

    def _source(self, task: PlannedCopy) -> Extent | None:
        """The nearest replica, preferably one that has not failed."""
        target = task.target

        def merit(extent: Extent) -> tuple[bool, ...]:
            segment = extent.segment
            is_near = segment.node == target.node, segment.host == target.host
            is_fast = segment.tier is not Tier.SSD, segment.tier is Tier.MEMORY
            return segment not in task.failed_sources, *is_near, *is_fast

        alive = [extent for extent in task.stored.complete() if extent.segment.is_alive]
        return max(alive, key=merit, default=None)

    def _failed(self, task: PlannedCopy, refusal: Refusal, now: float) -> None:
        self._drop_space(task, str(refusal), now)
        if task not in self.of(task.stored):
            return  # its object was removed, and the task with it
        task.num_attempts += 1
        if task.num_attempts < MAX_ATTEMPTS and refusal.code != "no_space" and task.target.is_mounted:
            # Under a new number: late reports of the first attempt are not about the second.
            self._last_id += 1
            task.task_id = self._last_id
            self._enqueue(task, False, now)
        else:
            self._give_up(task, refusal, now)

    def _give_up(self, task: PlannedCopy, refusal: Refusal, now: float) -> None:
        self._drop_space(task, str(refusal), now)
        self._end(task, refusal, now)

    def _end(self, task: PlannedCopy, refusal: Refusal | None, now: float) -> None:
        if task not in self.of(task.stored):
            return
        self._forget(task)
        if refusal is not None:
            self._catalog.counts.failed_tasks += 1
            self._catalog.add_story(
                now, task.stored.key, "{}: #{} to {} given up: {}", *_about(task), refusal
            )
        for ended in task.ended:
            ended(task, refusal, now)

    def _drop_space(self, task: PlannedCopy, reason: str, now: float) -> None:
        extent, task.extent = task.extent, None
        if self._under_way.pop(task.task_id, None) is not None:
            self._lines[task.target].num_under_way -= 1
            self._ripe.setdefault(task.target, now)
            self._given_up[task.task_id] = task.stored
            if len(self._given_up) > MAX_GIVEN_UP:
                del self._given_up[next(iter(self._given_up))]
        if extent is not None and task.stored.is_readable and extent in task.stored.extents:
            self._catalog.drop_extent(task.stored, extent, f"{task.why}: {reason}", now)

    def _forget(self, task: PlannedCopy) -> None:
        if self._under_way.pop(task.task_id, None) is not None:
            self._lines[task.target].num_under_way -= 1
        self._remove_from_line(task)
        about = self._by_object[task.stored.object_id]
        about.remove(task)
        if not about:
            del self._by_object[task.stored.object_id]
        task.target.num_tasks -= 1
        task.extent = None

    def _remove_from_line(self, task: PlannedCopy) -> None:
        line = self._lines.get(task.target)
        if line is not None:
            line.urgent.pop(task.task_id, None)
            line.others.pop(task.task_id, None)

    # Events of the catalog

    def _shown(self, event: ObjectShown) -> None:
        """Note the object in the journals of its segments."""
        for extent in event.stored.extents:
            if not extent.segment.polls:
                extent.segment.changes.skip()
            elif extent.is_complete:
                self.note(extent.segment, entry_of(event.stored, extent.offset), event.now)

    def _replica_removed(self, event: ReplicaRemoved) -> None:
        """Remove the replica from its node's journal, and end the task that was writing it."""
        stored, segment, now = event.stored, event.extent.segment, event.now
        self.note(segment, stored.object_id, now)
        task = self.find(stored, segment) if stored.is_readable else None
        if task is not None and task.extent is event.extent:
            task.extent = None
            if segment.is_mounted:
                self._failed(task, Refusal("timed_out", "the node missed the deadline"), now)
            else:
                self._give_up(task, Refusal("peer_lost", f"{segment.name} is gone"), now)

    def _object_removed(self, event: ObjectRemoved) -> None:
        for task in self.of(event.stored):
            self._give_up(task, Refusal("not_found", "the object is gone"), event.now)

    def note(self, segment: Segment, change: m.SegmentEntry | int, now: float) -> None:
        """Queue a change for the journal of the segment's node."""
        if not segment.is_mounted:
            return
        if not segment.polls:
            segment.changes.skip()
            return
        segment.changes.add(change)
        parked = self._parked.get(segment)
        if parked is not None:
            parked.change_bytes += _checksum_bytes(change)
            self._hurry(segment, parked, now)
        if len(segment.changes) >= MAX_CHANGES:
            self._ripe.setdefault(segment, now)
            self._catalog.keeps_deadline = False

    def _hurry(self, segment: Segment, parked: _PendingPoll, now: float) -> None:
        """Set the time at which a Poll is answered because of changes."""
        if segment.changes.has_gone:
            if segment not in self._soon and (parked.changes_due is None or segment in self._due):
                self._due.pop(segment, None)
                parked.changes_due = self._soon[segment] = now + GONE_DELAY_S
                self._catalog.keeps_deadline = False
        elif parked.changes_due is None:
            parked.changes_due = self._due[segment] = now + JOURNAL_DELAY_S
            self._catalog.keeps_deadline = False

    # A clock of the catalog

    def deadline(self) -> float | None:
        # Called after every event of the master, so it allocates nothing.
        soonest = math.inf if self._check_at is None else self._check_at
        for instant in self._ripe.values():
            soonest = min(soonest, instant)
            break
        for instant in self._soon.values():
            soonest = min(soonest, instant)
            break
        for instant in self._due.values():
            soonest = min(soonest, instant)
            break
        for parked in self._parked.values():
            soonest = min(soonest, parked.arrived_at + self._catalog.settings.poll_s)
            break
        return None if soonest == math.inf else soonest

    def expire(self, now: float) -> None:
        poll_s = self._catalog.settings.poll_s
        if self._check_at is not None and self._check_at <= now:
            self._check_queues(now)
        for queue in (self._soon, self._due):
            while queue and (first := next(iter(queue.items())))[1] <= now:
                self._ripe.setdefault(first[0], now)
                del queue[first[0]]
        for segment, parked in self._parked.items():
            if parked.arrived_at + poll_s > now:
                break
            self._ripe.setdefault(segment, now)
        # A task that is given up here may be planned again elsewhere.
        while self._ripe:
            ripe, self._ripe = self._ripe, {}
            for segment in ripe:
                self._serve(segment, now)

    def _serve(self, segment: Segment, now: float) -> None:
        """Answer its Poll, if there is something to send."""
        parked = self._parked.get(segment)
        if parked is None:
            return
        is_over = parked.arrived_at + self._catalog.settings.poll_s <= now
        if not segment.is_alive and not is_over:
            return
        # Removals must be known there before new objects come: a late change would remove these again.
        is_behind = len(segment.changes) > MAX_CHANGES or parked.change_bytes > MAX_POLLED_BYTES
        tasks = [] if is_behind else self._start_some(segment, parked, now)
        checks = [] if is_behind or self.checking is None else self.checking.take(segment, now)
        is_due = parked.changes_due is not None and parked.changes_due <= now
        changes = segment.changes.take(MAX_CHANGES)
        if is_behind:
            changes = _fitting(changes)
        if changes:
            self._hurry(segment, parked, now)
        if tasks or checks or is_due or is_over or is_behind or len(changes) == MAX_CHANGES:
            self._unpark(segment)
            self._catalog.replies.append(
                Reply(parked.origin, m.Polled(segment.changes.first, changes, tasks, checks=checks))
            )

    def _start_some(self, segment: Segment, parked: _PendingPoll, now: float) -> list[m.CopyTask]:
        line = self._lines.get(segment)
        tasks: list[m.CopyTask] = []
        if line is None or not segment.takes_objects(now):
            return tasks
        room = min(parked.max_tasks, self._catalog.settings.tasks_per_segment - line.num_under_way)
        num_bytes = 0
        while len(tasks) < room and num_bytes < MAX_POLLED_BYTES and (line.urgent or line.others):
            task = next(iter((line.urgent or line.others).values()))
            started = self._start(task, parked, now)
            if started is not None:
                tasks.append(started)
                num_bytes += len(started.entry.checksums)
        return tasks

    def _check_queues(self, now: float) -> None:
        """Give up tasks that can't be started, so that none waits forever."""
        for segment in [*self._lines, *self._parked]:
            if not segment.is_mounted:
                self.lost(segment, f"{segment.name} is gone", now)
            else:
                self._ripe.setdefault(segment, now)
        for segment, line in list(self._lines.items()):
            if segment.is_draining:
                for task in (*line.urgent.values(), *line.others.values()):
                    self._give_up(task, Refusal("draining", f"{segment.name} takes nothing new"), now)
            if not (line.urgent or line.others or line.num_under_way):
                del self._lines[segment]
        self._check_at = now + CHECK_INTERVAL_S if self._lines or self._parked else None

    def _check_by(self, instant: float) -> None:
        if self._check_at is None:
            self._check_at = instant

    def _unpark(self, segment: Segment) -> _PendingPoll | None:
        self._due.pop(segment, None)
        self._soon.pop(segment, None)
        return self._parked.pop(segment, None)

    def check(self) -> None:
        for task_id, task in self._under_way.items():
            assert task.task_id == task_id and task.extent in task.stored.extents, task
            assert task.extent is not None and not task.extent.is_complete, task
        for object_id, tasks in self._by_object.items():
            assert tasks
            for task in tasks:
                line = self._lines[task.target]
                places = (self._under_way, line.urgent, line.others)
                assert task.stored.object_id == object_id and task.stored.is_readable, task
                assert sum(task.task_id in place for place in places) == 1, task
        for segment, line in self._lines.items():
            assert line.num_under_way == sum(t.target is segment for t in self._under_way.values()), segment
            num_tasks = len(line.urgent) + len(line.others) + line.num_under_way
            assert segment.num_tasks == num_tasks, segment
        for queue in (self._due, self._soon):
            assert queue.keys() <= self._parked.keys()
            assert list(queue.values()) == sorted(queue.values())
        assert not (self._lines or self._parked) or self._check_at is not None

    def __repr__(self) -> str:
        return f"<Tasks {len(self._by_object)} objects, {len(self._under_way)} under way>"


def entry_of(stored: StoredObject, offset: int) -> m.SegmentEntry:
    """The journal's entry for a readable object."""
    assert stored.stored is not None
    return m.SegmentEntry(
        stored.key,
        stored.object_id,
        stored.size_bytes,
        stored.chunk_bytes,
        stored.stored.checksums,
        offset,
        stored.is_hard_pinned,
        stored.group,
        stored.parent,
        stored.policy.is_durable,
    )


def _is_of_disk(task: PlannedCopy, refusal: Refusal) -> bool:
    """Whether a copy failed because the disk of its target did not take it. For a copy from another disk,
    such as one that is drained because it fails, that is not known."""
    is_from_memory = task.source is not None and task.source.segment.tier is not Tier.SSD
    return task.target.tier is Tier.SSD and is_from_memory and refusal.code not in NOT_OF_TARGET


def _checksum_bytes(change: m.SegmentEntry | int) -> int:
    return 0 if isinstance(change, int) else len(change.checksums)


def _fitting(changes: list[m.SegmentEntry | int]) -> list[m.SegmentEntry | int]:
    """The first changes, as many as fit into one answer; at least one."""
    num_bytes = 0
    for number, change in enumerate(changes):
        num_bytes += _checksum_bytes(change)
        if num_bytes > MAX_POLLED_BYTES and number:
            return changes[:number]
    return changes


def _about(task: PlannedCopy) -> tuple[str, int, str]:
    return task.why, task.stored.object_id, task.target.name

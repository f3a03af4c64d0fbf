# SPDX-License-Identifier: Apache-2.0
"""Replicas that users and operators request: copies, moves, and segments that are emptied.

A job is a list of *units* (one object to one segment), some of them under way as tasks; its status can be
queried while it runs and for a time afterwards. Jobs are not written down: a new master has none, the
replicas that were made exist, and the client requests the job again.

**Drain** places nothing new on its segments and moves their content, leased objects too: the replica left
behind rests until its leases end, and the job is done when nothing is left and nothing rests. It never
evicts others to make room. An object that is safe elsewhere, when no segment has room for one more
replica, is just removed there. A durable one is safe on another SSD only. With ``unmount_after_s`` this is
the graceful shutdown of a node: the segments are unmounted when they are empty, and at the latest after so
many seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from mooncake.errors import Refusal
from mooncake.store import messages as m
from mooncake.store.master.catalog import DISK_FAILING_S, Catalog
from mooncake.store.master.catalog_events import DRAINED, MOVED
from mooncake.store.master.effects import Received
from mooncake.store.master.objects import Extent, StoredObject, scoped, split_scoped
from mooncake.store.master.segments import Segment
from mooncake.store.master.tasks import PlannedCopy, Tasks
from mooncake.types import Tier

MAX_RUNNING = 10_000
MAX_ENDED = 1000
"""Ended jobs whose status can still be queried."""
MAX_FAILURES = 3
"""Failed attempts for one object that is to leave a segment."""
SURVEY_OBJECTS = 4000
"""Objects examined per step; takes a few milliseconds."""
SURVEY_S = 0.01
"""Pause between two such steps that found nothing to move."""
CHECK_INTERVAL_S = 0.5
"""Interval at which a drain checks for objects added or released meanwhile."""


class ReplicationJob:
    """Base of all jobs."""

    kind = ""

    def __init__(self, job_id: int, about: str, now: float) -> None:
        self.job_id = job_id
        self.about = about
        self.state = "running"
        self.reason = ""
        self.num_done = 0
        self.num_failed = 0
        self.moved_bytes = 0
        self.tasks: dict[int, PlannedCopy] = {}
        """Tasks under way or waiting, by task id."""
        self.began_at = now
        self.touched_at = now

    @property
    def is_running(self) -> bool:
        return self.state == "running"

    @property
    def num_left(self) -> int:
        return len(self.tasks)

    def status(self, now: float) -> m.JobStatus:
        has_begun = self.num_done or any(task.extent is not None for task in self.tasks.values())
        is_waiting = self.is_running and not has_begun
        return m.JobStatus(
            self.job_id,
            self.kind,
            "waiting" if is_waiting else self.state,
            self.about,
            self.num_done,
            self.num_failed,
            self.num_left,
            self.moved_bytes,
            self.reason,
            now - self.began_at,
            now - self.touched_at,
        )


class CopyJob(ReplicationJob):
    """Make a replica on each of some segments; a move if one leaves another segment for the first of them."""

    def __init__(
        self,
        job_id: int,
        stored: StoredObject,
        source: Segment | None,
        message: m.CopyObject,
        now: float,
    ) -> None:
        super().__init__(job_id, _name_of(stored), now)
        self.message = message
        self.kind = "copy" if source is None else "move"
        self.stored = stored
        self.source = source


class DrainJob(ReplicationJob):
    """Empty some segments."""

    kind = "drain"

    def __init__(self, job_id: int, segments: list[Segment], message: m.DrainSegments, now: float) -> None:
        super().__init__(job_id, ", ".join(message.segments), now)
        self.message = message
        self.segments = segments
        self.waiting: deque[tuple[StoredObject, Segment]] = deque()
        self.failures: dict[int, int] = {}
        """Number of failed moves of each object, by id."""
        self.failing: dict[Segment, float] = {}
        """Until when other disks are preferred to one to which a move failed, maybe because of its source."""
        self.num_resting = 0
        """Ranges that are allocated, and hold nothing that could be moved."""
        self.to_survey: list[tuple[Segment, list[int]]] = []
        """Offsets that the survey in progress has yet to examine."""
        self.has_found = False
        """That survey has found something that could be moved."""
        ends_s = message.unmount_after_s
        self.unmounts_at = None if ends_s is None else now + ends_s

    @property
    def num_left(self) -> int:
        return len(self.tasks) + len(self.waiting) + self.num_resting


class Jobs:
    """Answers CopyObject, DrainSegments and AskJob. A clock of the catalog."""

    def __init__(self, catalog: Catalog, tasks: Tasks) -> None:
        self._catalog = catalog
        self._tasks = tasks
        self._last_id = 0
        self._jobs: dict[int, ReplicationJob] = {}
        """Running and ended jobs, oldest first."""
        self._drains: dict[int, DrainJob] = {}
        """Running drains."""
        self._check_at = 0.0

    # Requests

    def copy(self, message: m.CopyObject, _: Received, now: float) -> m.JobReply | m.RefusedReply:
        key = scoped(message.tenant, message.key)
        stored = self._catalog.objects.readable.get(key)
        if stored is None:
            return _refused("not_found", f"there is no object {message.key!r}")
        if not message.targets:
            return _refused("invalid_argument", "targets: name at least one segment")
        targets = self._named(message.targets)
        if isinstance(targets, Refusal):
            return m.RefusedReply(targets)
        source = None
        if message.source:
            source = self._catalog.segments.mounted.get(message.source)
            extent = None if source is None else stored.on(source)
            if extent is None or not extent.is_complete:
                job = self._earlier_move(message, stored, targets)
                if job is not None:
                    return m.JobReply(job.status(now))
                return _refused("not_found", f"no replica of {message.key!r} is on {message.source!r}")
            is_on_ssd = any(target.tier is Tier.SSD for target in targets)
            if extent is not None and not is_on_ssd and not _is_durable_without(stored, extent):
                return _refused("durable", f"{message.key!r} is durable, and {message.source!r} its only SSD")
            if message.source in message.targets:
                return _refused("invalid_argument", f"{message.source!r} is the source and a target")
        if self._num_running >= MAX_RUNNING:
            return _refused("limit", f"{MAX_RUNNING} jobs are running; try again later")
        self._last_id += 1
        job = CopyJob(self._last_id, stored, source, message, now)
        self._add(job)
        for target in targets:
            extent = stored.on(target)
            if extent is not None and extent.is_complete:
                self._arrived(job, stored, target, 0, now)
            elif job.is_running:
                self._begin(job, stored, target, job.kind, now)
        self._end_if_over(job, now)
        return m.JobReply(job.status(now))

    def drain(self, message: m.DrainSegments, _: Received, now: float) -> m.JobReply | m.RefusedReply:
        if not message.segments:
            return _refused("invalid_argument", "segments: name at least one")
        if not 1 <= message.max_concurrency <= m.MAX_CONCURRENCY:
            reason = f"max_concurrency: {message.max_concurrency}; 1 to {m.MAX_CONCURRENCY}"
            return _refused("invalid_argument", reason)
        if message.unmount_after_s is not None and not message.unmount_after_s >= 0:
            return _refused("invalid_argument", f"unmount_after_s: {message.unmount_after_s}; at least 0")
        segments, targets = self._named(message.segments), self._named(message.targets)
        if isinstance(segments, Refusal):
            return m.RefusedReply(segments)
        if isinstance(targets, Refusal):
            return m.RefusedReply(targets)
        both = [name for name in message.targets if name in message.segments]
        if both:
            return _refused("invalid_argument", f"{both[0]!r} is drained and a target")
        for job in self._drains.values():
            if job.message == message:  # its reply was lost
                return m.JobReply(job.status(now))
            if any(segment in segments for segment in job.segments):
                return _refused("busy", f"job {job.job_id} drains {job.about} already")
        self._last_id += 1
        job = DrainJob(self._last_id, segments, message, now)
        for segment in segments:
            segment.is_draining = True
            self._catalog.note("segment_draining", segment, job_id=job.job_id)
        self._add(job)
        self._drains[job.job_id] = job
        self._check_drain(job, now)
        return m.JobReply(job.status(now))

    def ask(self, message: m.AskJob, _: Received, now: float) -> m.JobReply | m.RefusedReply:
        job = self._jobs.get(message.job_id)
        if job is None:
            return _refused("not_found", f"there is no job {message.job_id}, or it ended too long ago")
        if message.cancel:
            self._cancel(job, now)
        return m.JobReply(job.status(now))

    def _earlier_move(
        self, message: m.CopyObject, stored: StoredObject, targets: list[Segment]
    ) -> CopyJob | None:
        """The job that has done just this, for a client that repeats a request whose reply was lost."""
        if any((extent := stored.on(target)) is None or not extent.is_complete for target in targets):
            return None
        for job in reversed(self._jobs.values()):
            if isinstance(job, CopyJob) and job.stored is stored and job.message == message:
                return job if job.state == "done" else None
        return None

    def _named(self, names: Iterable[str]) -> list[Segment] | Refusal:
        segments: dict[Segment, None] = {}
        for name in names:
            segment = self._catalog.segments.mounted.get(name)
            if segment is None:
                return Refusal("unknown_segment", f"there is no segment {name!r}")
            segments[segment] = None
        return list(segments)

    # Life of a job

    @property
    def _num_running(self) -> int:
        return sum(job.is_running for job in self._jobs.values())

    def _add(self, job: ReplicationJob) -> None:
        self._jobs[job.job_id] = job
        ended = [one for one in self._jobs.values() if not one.is_running]
        for old in ended[: len(ended) - MAX_ENDED]:
            del self._jobs[old.job_id]

    def _begin(
        self, job: ReplicationJob, stored: StoredObject, target: Segment, why: str, now: float
    ) -> None:
        def ended(task: PlannedCopy, refusal: Refusal | None, now: float) -> None:
            self._ended(job, number, stored, target, refusal, now)

        # A named target is to have the object; a drain only uses free space.
        makes_room = isinstance(job, CopyJob)
        task = self._tasks.plan(stored, target, why, now, ended, makes_room=makes_room)
        number = task.task_id
        job.tasks[number] = task

    def _ended(
        self,
        job: ReplicationJob,
        number: int,
        stored: StoredObject,
        target: Segment,
        refusal: Refusal | None,
        now: float,
    ) -> None:
        if job.tasks.pop(number, None) is None or not job.is_running:
            return
        job.touched_at = now
        if refusal is None:
            self._arrived(job, stored, target, stored.size_bytes, now)
        elif isinstance(job, DrainJob):
            if stored.is_readable:
                job.failures[stored.object_id] = job.failures.get(stored.object_id, 0) + 1
                job.reason = f"{_name_of(stored)}: {refusal}"
                if target.tier is Tier.SSD:
                    job.failing[target] = now + DISK_FAILING_S
        else:
            job.num_failed += 1
            job.reason = str(refusal)
        if isinstance(job, DrainJob):
            # Continue at once after success; a failure may have come from the step that is running.
            self._check_at = min(self._check_at, now if refusal is None else now + SURVEY_S)
        else:
            self._end_if_over(job, now)

    def _arrived(
        self, job: ReplicationJob, stored: StoredObject, target: Segment, moved_bytes: int, now: float
    ) -> None:
        """Handle a new replica where it was wanted: the one that it replaces may be removed."""
        arrived = stored.on(target)
        if arrived is not None:
            arrived.is_requested = True
        job.num_done += 1
        job.moved_bytes += moved_bytes
        if isinstance(job, DrainJob):
            for segment in job.segments:
                self._leave(stored, segment, now)
        elif isinstance(job, CopyJob) and job.source is not None:
            self._leave(stored, job.source, now)
            job.source = None

    def _leave(self, stored: StoredObject, segment: Segment, now: float) -> None:
        extent = stored.on(segment) if stored.is_readable else None
        others = [one for one in stored.lasting() if one is not extent and not one.segment.is_draining]
        if extent is not None and extent.is_complete and others and _is_durable_without(stored, extent):
            self._catalog.drop_extent(stored, extent, MOVED, now)

    def _end_if_over(self, job: ReplicationJob, now: float) -> None:
        if job.is_running and not job.num_left:
            self._end(job, "failed" if job.num_failed else "done", now)

    def _end(self, job: ReplicationJob, state: str, now: float) -> None:
        job.state = state
        job.touched_at = now
        self._drains.pop(job.job_id, None)
        tasks, job.tasks = list(job.tasks.values()), {}
        for task in tasks:
            if len(task.ended) == 1:  # no other planner wants it
                self._tasks.cancel(task, f"{job.kind} was {state}", now)

    def _cancel(self, job: ReplicationJob, now: float) -> None:
        """Stop the job; segments that were drained take objects again, even if they are empty by now."""
        if isinstance(job, DrainJob) and job.state != "cancelled":
            for segment in job.segments:
                segment.is_draining = any(
                    segment in other.segments for other in self._drains.values() if other is not job
                )
            self._end(job, "cancelled", now)
        elif job.is_running:
            self._end(job, "cancelled", now)

    # Drains

    def _check_drain(self, job: DrainJob, now: float) -> None:
        """Continue: find the content, start as many moves as allowed, and check whether the job is over."""
        if job.unmounts_at is not None and job.unmounts_at <= now:
            self._unmount(job, "its grace is over", now)
            return
        gone = [segment for segment in job.segments if not segment.is_mounted]
        job.segments = [segment for segment in job.segments if segment.is_mounted]
        if gone and not job.segments:
            is_empty = not (job.waiting or job.tasks)
            job.reason = "" if is_empty else f"{gone[0].name} is gone"
            self._end(job, "done" if is_empty else "failed", now)
            return
        if not job.waiting and not job.tasks:
            self._survey(job)
            if job.to_survey:
                self._check_at = min(self._check_at, now + SURVEY_S)
            elif not job.has_found and self._is_over(job, now):
                return
        while job.waiting and len(job.tasks) < job.message.max_concurrency:
            stored, segment = job.waiting.popleft()
            self._move_from(job, stored, segment, now)

    def _is_over(self, job: DrainJob, now: float) -> bool:
        if not job.num_resting:
            job.reason = ""
            for segment in job.segments:
                self._catalog.note("segment_drained", segment, job_id=job.job_id, num_done=job.num_done)
            if job.unmounts_at is not None:
                self._unmount(job, "drained", now)
            else:
                self._end(job, "done", now)
        elif job.num_failed == job.num_resting and job.unmounts_at is None:
            self._end(job, "failed", now)
        return not job.is_running

    def _survey(self, job: DrainJob) -> None:
        """Find the content, one slice per step so that other requests are served; then start over."""
        if not job.to_survey:
            job.num_resting = job.num_failed = 0
            job.has_found = False
            job.to_survey = [(segment, list(segment.holders)) for segment in job.segments]
        num_left = SURVEY_OBJECTS
        while job.to_survey and num_left > 0:
            segment, offsets = job.to_survey[-1]
            some = offsets[-num_left:]
            del offsets[-num_left:]
            num_left -= len(some)
            if not offsets:
                job.to_survey.pop()
            for offset in some if segment.is_mounted else ():
                self._see(job, segment, offset)

    def _see(self, job: DrainJob, segment: Segment, offset: int) -> None:
        stored = segment.holders.get(offset)
        if stored is None:
            return  # released meanwhile
        extent = stored.on(segment)
        is_here = extent is not None and extent.offset == offset and extent.is_complete
        if not (stored.is_readable and is_here):
            job.num_resting += 1  # being written, or removed already
        elif job.failures.get(stored.object_id, 0) >= MAX_FAILURES:
            job.num_resting += 1
            job.num_failed += 1
        else:
            job.has_found = True
            job.waiting.append((stored, segment))

    def _move_from(self, job: DrainJob, stored: StoredObject, segment: Segment, now: float) -> None:
        extent = stored.on(segment) if stored.is_readable else None
        if extent is None or not extent.is_complete:
            return
        if extent.is_extra and any(one.segment.is_alive for one in stored.lasting()):
            job.num_done += 1
            self._catalog.drop_extent(stored, extent, DRAINED, now)
            return
        target = self._target(job, stored, segment, now)
        if target is not None:
            self._begin(job, stored, target, job.kind, now)
            return
        elsewhere = [one for one in stored.lasting() if not one.segment.is_draining]
        if any(one.segment.is_alive for one in elsewhere) and _is_durable_without(stored, extent):
            job.num_done += 1
            self._catalog.drop_extent(stored, extent, DRAINED, now)
            return
        job.failures[stored.object_id] = job.failures.get(stored.object_id, 0) + 1
        job.reason = f"{_name_of(stored)}: no other segment has room for {stored.size_bytes} bytes"

    def _target(self, job: DrainJob, stored: StoredObject, source: Segment, now: float) -> Segment | None:
        """Select the target: same tier if possible, another host than its other replicas, most room."""
        targets = job.message.targets
        named = [self._catalog.segments.mounted.get(name) for name in targets]
        near = self._catalog.segments.mounted.values() if not targets else named
        hosts = [one.segment.host for one in stored.extents if one.segment is not source]
        found: tuple[tuple[bool, bool, bool, int], Segment] | None = None
        for segment in near:
            if segment is None or not segment.polls or not segment.takes_objects(now):
                continue
            is_same_tier = segment.tier is source.tier
            if not (is_same_tier or targets or segment.tier is Tier.SSD) or stored.on(segment) is not None:
                continue
            if not segment.allocator.has_hole(stored.size_bytes):
                continue
            is_well = max(segment.disk_failing_until, job.failing.get(segment, 0.0)) <= now
            weight = segment.allocator.free_bytes - segment.num_tasks
            merit = is_well, is_same_tier, segment.host not in hosts, weight
            if found is None or merit > found[0]:
                found = merit, segment
        return None if found is None else found[1]

    def _unmount(self, job: DrainJob, reason: str, now: float) -> None:
        is_empty = not job.num_left
        segments = [segment for segment in job.segments if segment.is_mounted]
        self._end(job, "done" if is_empty else "failed", now)
        job.reason = "" if is_empty else f"unmounted with {job.num_left} objects left: {reason}"
        for segment in segments:
            self._catalog.segments.retire(segment)
            self._catalog.empty(segment, f"unmounted: {reason}", now)

    # A clock of the catalog

    def deadline(self) -> float | None:
        return self._check_at if self._drains else None

    def expire(self, now: float) -> None:
        self._check_at = now + CHECK_INTERVAL_S
        for job in list(self._drains.values()):
            self._check_drain(job, now)
            if job.unmounts_at is not None:
                self._check_at = min(self._check_at, job.unmounts_at)

    def check(self) -> None:
        for job_id, job in self._jobs.items():
            assert job.job_id == job_id
            assert job.is_running or not job.tasks, job_id
            assert (job_id in self._drains) == (isinstance(job, DrainJob) and job.is_running), job_id
            for task in job.tasks.values():
                assert task in self._tasks.of(task.stored), task
        for job in self._drains.values():
            assert all(segment.is_draining for segment in job.segments), job.job_id

    def __repr__(self) -> str:
        return f"<Jobs {self._num_running} of {len(self._jobs)} jobs running>"


def _name_of(stored: StoredObject) -> str:
    """The object as its users know it: an operator's list of jobs has objects of all tenants."""
    tenant, key = split_scoped(stored.key)
    return f"{key} of tenant {tenant}" if tenant else key


def _refused(code: str, reason: str) -> m.RefusedReply:
    return m.RefusedReply(Refusal(code, reason))


def _is_durable_without(stored: StoredObject, extent: Extent) -> bool:
    """Whether the durability promised to its writer holds without that replica."""
    if not stored.policy.is_durable or extent.segment.tier is not Tier.SSD:
        return True
    others = [one for one in stored.complete(Tier.SSD) if one is not extent]
    return any(not one.segment.is_draining for one in others)

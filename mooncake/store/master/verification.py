# SPDX-License-Identifier: Apache-2.0
"""Verification of a replica whose bytes a reader found wrong: its own node reads it again, and decides.

::

    Corrupt ──▶ waiting ──the node polls──▶ being read ──wrong──▶ the replica is dropped
                   │                             ├──right──▶ it stays, the report was wrong
                   └────── the node is silent ───┴──▶ it stays, but see below

A reader may be wrong: the bits may have been flipped by its memory, its network card or its kernel. So no
replica is dropped on a reader's report alone. Reports are counted by reporter, so that a faulty machine is
found among those whose reports are refuted.

A node that does not answer (an older release, or an overloaded one) confirms nothing. Then a replica is
dropped only if reports came from at least two machines, it is in memory, and another replica can be read.

A reporter must not be able to keep a node's disk busy. Each report that starts a check costs its reporter
one of ``REPORT_CREDIT``, which is restored when the report was right, otherwise slowly; a replica that its
node found right is not read again for some time; and checks are sent at a limited rate for each segment,
a few at a time.
"""

from __future__ import annotations

import dataclasses

from mooncake.errors import Refusal
from mooncake.rpc.wire import Failure
from mooncake.store import messages as m
from mooncake.store.master.catalog import Catalog
from mooncake.store.master.effects import OperatorEvent, Received
from mooncake.store.master.objects import Extent, StoredObject, scoped_all
from mooncake.store.master.segments import Segment
from mooncake.store.master.tasks import Tasks, entry_of
from mooncake.types import Tier

STORY_LINES = 8
"""How many lines of a corrupt object's story are logged."""
MAX_REPORTERS = 256
MAX_NAME = 128
"""Characters of a reporter's name."""
REPORT_CREDIT = 32.0
"""Checks that one reporter may start before one of its reports is confirmed."""
REPORT_CREDIT_PER_S = 0.1
MAX_SUSPECTED_REPLICAS = 4096
MAX_REPORTERS_PER_REPLICA = 8
"""Reporters that are recorded for one replica."""
MAX_UNDER_WAY = 4
"""Concurrent checks of one segment's node."""
BYTES_PER_S = 64 << 20
"""Average rate of reading for checks on one segment."""
BURST_S = 4.0
"""How far that rate may be exceeded in advance."""
WAIT_S = 60.0
"""Age at which a check that was not sent is given up."""
CHECK_S = 30.0
"""How long the node may take to answer."""
VERIFIED_S = 60.0
"""How long a replica that its node found right is not read again."""
MAX_VERIFIED = 4096
CHECK_INTERVAL_S = 1.0


@dataclasses.dataclass(slots=True)
class Reporter:
    """A machine that reported wrong bytes. It chooses its own name."""

    name: str
    credit: float = REPORT_CREDIT
    credit_at: float = 0.0
    last_at: float = 0.0
    num_reports: int = 0
    num_confirmed: int = 0
    num_refuted: int = 0
    num_unanswered: int = 0

    def may_report(self, now: float) -> bool:
        self.credit = min(REPORT_CREDIT, self.credit + REPORT_CREDIT_PER_S * (now - self.credit_at))
        self.credit_at = now
        if self.credit < 1.0:
            return False
        self.credit -= 1.0
        return True

    def status(self, now: float) -> m.ReporterStatus:
        return m.ReporterStatus(
            self.name,
            self.num_reports,
            self.num_confirmed,
            self.num_refuted,
            self.num_unanswered,
            now - self.last_at,
        )


@dataclasses.dataclass(slots=True, eq=False)
class _SuspectedReplica:
    """One replica that its node is to read."""

    check_id: int
    stored: StoredObject
    extent: Extent
    until: float
    reporters: dict[str, None]
    is_under_way: bool = False

    @property
    def place(self) -> tuple[int, str]:
        return self.stored.object_id, self.extent.segment.name


class Verification:
    """Answers Corrupt. A clock of the catalog; ``Tasks`` sends its checks and delivers the answers."""

    def __init__(self, catalog: Catalog, tasks: Tasks) -> None:
        self._catalog = catalog
        self._tasks = tasks
        self._last_id = 0
        self._doubts: dict[tuple[int, str], _SuspectedReplica] = {}
        """Suspected replicas by object id and segment."""
        self._waiting: dict[Segment, dict[int, _SuspectedReplica]] = {}
        self._under_way: dict[Segment, dict[int, _SuspectedReplica]] = {}
        self._paid_until: dict[Segment, float] = {}
        """Until when its checks have used up their rate."""
        self._right: dict[tuple[int, str], float] = {}
        """Replicas found right by their nodes, and until when that result is valid."""
        self._reporters: dict[str, Reporter] = {}
        """Reporters, the latest last."""
        self._check_at: float | None = None
        tasks.checking = self

    def reporters(self, now: float) -> list[m.ReporterStatus]:
        return [reporter.status(now) for reporter in self._reporters.values()]

    def corrupt(self, message: m.Corrupt, _: Received, now: float) -> m.Outcomes | Failure:
        if len(message.segments) not in (0, len(message.keys)):
            return Failure("invalid_argument", "corrupt: segments, but not one for each key")
        if len(message.object_ids) != len(message.keys):
            return Failure("invalid_argument", "corrupt: keys and object_ids differ in length")
        outcomes: list[bool | Refusal] = []
        keys = scoped_all(message.tenant, message.keys)
        for index, (key, object_id) in enumerate(zip(keys, message.object_ids, strict=True)):
            stored = self._catalog.objects.readable.get(key)
            segment = message.segments[index] if message.segments else ""
            wrong: list[Extent] = []
            if stored is not None and stored.object_id == object_id:
                wrong = [e for e in stored.complete() if segment in ("", e.segment.name)]
            if stored is None or not wrong:
                outcomes.append(False)
                continue
            each = [self.suspect(stored, extent, message.reporter, now) for extent in wrong]
            refused = next((one for one in each if isinstance(one, Refusal)), None)
            outcomes.append(refused or any(each))
        return m.Outcomes(outcomes)

    def suspect(self, stored: StoredObject, extent: Extent, name: str, now: float) -> bool | Refusal:
        """Handle a report by ``name``. True: the node is to check; False: it has just refuted another one."""
        reporter = self._reporter(name, now)
        reporter.num_reports += 1
        self._catalog.counts.corrupt_reports += 1
        place = stored.object_id, extent.segment.name
        doubt = self._doubts.get(place)
        if doubt is not None and doubt.extent is extent:
            if len(doubt.reporters) < MAX_REPORTERS_PER_REPLICA:
                doubt.reporters[reporter.name] = None
            return True
        if doubt is not None:
            self._forget(doubt)  # that replica is gone, and the object was copied there again
        if self._right.get(place, 0.0) > now:
            self._refuted(reporter)
            return False
        if len(self._doubts) >= MAX_SUSPECTED_REPLICAS:
            return Refusal(
                "limit", f"{MAX_SUSPECTED_REPLICAS} replicas are to be read again; report it later"
            )
        if not reporter.may_report(now):
            reason = f"too many reports of {reporter.name!r} were not confirmed; check that machine"
            return Refusal("limit", reason)
        self._last_id += 1
        doubt = _SuspectedReplica(self._last_id, stored, extent, now + WAIT_S, {reporter.name: None})
        self._doubts[place] = doubt
        self._waiting.setdefault(extent.segment, {})[doubt.check_id] = doubt
        self._catalog.add_story(now, stored.key, "#{} on {} reported corrupt by {}", *place, reporter.name)
        self._tasks.hurry(extent.segment, now)
        if self._check_at is None:
            self._check_at = now + CHECK_INTERVAL_S
        return True

    def _forget(self, doubt: _SuspectedReplica) -> None:
        """Drop a suspected replica from all tables; an answer that comes later has no effect."""
        for table in (self._waiting, self._under_way):
            table.get(doubt.extent.segment, {}).pop(doubt.check_id, None)
        if self._doubts.get(doubt.place) is doubt:
            del self._doubts[doubt.place]

    def _reporter(self, name: str, now: float) -> Reporter:
        name = "".join(char if char.isprintable() else "?" for char in name[:MAX_NAME]) or "unknown"
        reporter = self._reporters.pop(name, None)
        if reporter is None:
            reporter = Reporter(name, credit_at=now)
        reporter.last_at = now
        self._reporters[name] = reporter
        if len(self._reporters) > MAX_REPORTERS:
            del self._reporters[next(iter(self._reporters))]
        return reporter

    # Called by ``Tasks``

    def take(self, segment: Segment, now: float) -> list[m.Check]:
        """Checks to send to its node now."""
        waiting = self._waiting.get(segment)
        checks: list[m.Check] = []
        if not waiting:
            return checks
        under_way = self._under_way.setdefault(segment, {})
        for doubt in list(waiting.values()):
            paid_until = max(self._paid_until.get(segment, 0.0), now)
            if len(under_way) >= MAX_UNDER_WAY or paid_until > now + BURST_S:
                break
            del waiting[doubt.check_id]
            if not _is_there(doubt):
                self._forget(doubt)
                continue
            self._paid_until[segment] = paid_until + doubt.stored.size_bytes / BYTES_PER_S
            doubt.is_under_way, doubt.until = True, now + CHECK_S
            under_way[doubt.check_id] = doubt
            checks.append(m.Check(doubt.check_id, entry_of(doubt.stored, doubt.extent.offset), CHECK_S))
        return checks

    def answered(self, answers: list[m.TaskDone], segment: Segment, now: float) -> None:
        """Handle the results of its node's checks."""
        for answer in answers:
            doubt = self._under_way.get(segment, {}).get(answer.task_id)
            if doubt is None:
                continue
            self._forget(doubt)
            self._tasks.hurry(segment, now)
            if not _is_there(doubt):
                continue  # it was removed meanwhile, and its node may have read its successor's bytes
            if answer.refusal is None:
                self._is_right(doubt, now)
            elif answer.refusal.code == "corrupt":
                for name in doubt.reporters:
                    if (reporter := self._reporters.get(name)) is not None:
                        reporter.num_confirmed += 1
                        reporter.credit = min(REPORT_CREDIT, reporter.credit + 1.0)
                self.drop(doubt.stored, doubt.extent, now, list(doubt.reporters))
            else:
                self._not_verified(doubt, str(answer.refusal), now)

    def drop(self, stored: StoredObject, extent: Extent, now: float, reporters: list[str]) -> None:
        """Drop a replica that its own node found corrupt. The object is lost with its last replica."""
        where = extent.segment.name
        fields = {"key": stored.key, "object_id": stored.object_id, "segment": where, "reporters": reporters}
        story = self._catalog.story(stored.key)[-STORY_LINES:]
        self._catalog.notes.append(
            OperatorEvent("object_corrupt", {**fields, "story": story}, is_warning=True)
        )
        self._catalog.counts.corrupt_replicas += 1
        reason = "a reader found wrong checksums, and so did its node"
        self._catalog.drop_extent(stored, extent, reason, now)
        self._catalog.counts.corrupt_objects += not stored.is_readable

    def _is_right(self, doubt: _SuspectedReplica, now: float) -> None:
        self._right.pop(doubt.place, None)
        self._right[doubt.place] = now + VERIFIED_S
        if len(self._right) > MAX_VERIFIED:
            del self._right[next(iter(self._right))]
        self._catalog.add_story(now, doubt.stored.key, "#{} on {} verified by its node", *doubt.place)
        for name in doubt.reporters:
            if (reporter := self._reporters.get(name)) is not None:
                self._refuted(reporter)
        fields = {"key": doubt.stored.key, "segment": doubt.extent.segment.name}
        self._catalog.notes.append(
            OperatorEvent("corruption_refuted", {**fields, "reporters": list(doubt.reporters)})
        )

    def _refuted(self, reporter: Reporter) -> None:
        reporter.num_refuted += 1
        self._catalog.counts.refuted_reports += 1

    def _not_verified(self, doubt: _SuspectedReplica, reason: str, now: float) -> None:
        """Handle a check without a result."""
        stored, extent = doubt.stored, doubt.extent
        self._catalog.counts.unverified_reports += 1
        for name in doubt.reporters:
            if (reporter := self._reporters.get(name)) is not None:
                reporter.num_unanswered += 1
        others = [one for one in stored.complete() if one is not extent and one.segment.is_alive]
        if len(doubt.reporters) > 1 and others and extent.segment.tier is not Tier.SSD:
            self.drop(stored, extent, now, list(doubt.reporters))
            return
        self._catalog.add_story(now, stored.key, "#{} on {} was not verified: {}", *doubt.place, reason)
        fields = {"key": stored.key, "segment": extent.segment.name, "reason": reason}
        self._catalog.notes.append(
            OperatorEvent("corruption_not_verified", {**fields, "reporters": list(doubt.reporters)})
        )

    # A clock of the catalog

    def deadline(self) -> float | None:
        return self._check_at

    def expire(self, now: float) -> None:
        for doubt in [one for one in self._doubts.values() if one.until <= now or not _is_there(one)]:
            self._forget(doubt)
            if _is_there(doubt):
                self._not_verified(doubt, "its node did not answer", now)
        for table in (self._waiting, self._under_way):
            for segment in [one for one, doubts in table.items() if not doubts]:
                del table[segment]
        for segment in [one for one, until in self._paid_until.items() if until <= now]:
            del self._paid_until[segment]
        for segment in self._waiting:
            self._tasks.hurry(segment, now)
        self._check_at = now + CHECK_INTERVAL_S if self._doubts or self._paid_until else None

    def check(self) -> None:
        assert len(self._reporters) <= MAX_REPORTERS and len(self._doubts) <= MAX_SUSPECTED_REPLICAS
        assert len(self._right) <= MAX_VERIFIED
        assert self._check_at is not None or not self._doubts
        listed = 0
        for table, is_under_way in ((self._waiting, False), (self._under_way, True)):
            for segment, doubts in table.items():
                assert not is_under_way or len(doubts) <= MAX_UNDER_WAY, segment
                for check_id, doubt in doubts.items():
                    assert doubt.check_id == check_id and doubt.extent.segment is segment, doubt
                    assert doubt.is_under_way is is_under_way and self._doubts[doubt.place] is doubt, doubt
                    listed += 1
        assert listed == len(self._doubts)

    def __repr__(self) -> str:
        return f"<Verification {len(self._doubts)} replicas to be read>"


def _is_there(doubt: _SuspectedReplica) -> bool:
    return doubt.stored.is_readable and doubt.extent in doubt.stored.extents

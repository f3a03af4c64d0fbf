# SPDX-License-Identifier: Apache-2.0
"""Mounted segments and the processes that own them: alive, suspected, gone.

``STATE_MOVES`` has the moves, drawn in docs/reference/state-machines.md.

A suspected segment keeps its objects but hides them at once: better a miss now than a reader that
waits for a dead node. The epoch identifies one run of the owning process, hence one content of the
memory: the same epoch brings everything back, another one means that the bytes are new.

After a change of the master all segments are suspected, and almost all nodes are alive: they only have to
mount again. Such a segment is *awaited* until its node has mounted and sent a heartbeat, for ``RETURN_S`` at
most, and requests that depend on it wait (``put_queue.py``).

``rests_until``: memory that served a master of another line (or this one, before it was given up) may
still be read and written under promises unknown here. It is mounted at once, but nothing is allocated
on it until every such promise has run out. Nor is anything before the first heartbeat, which shows
that the node has received the answer to its Mount and knows how long it is bound: otherwise a master
that dies right after mounting could have made promises that its successor never learns of.

A tier is a kind of segment: memory, an SSD, a device's memory. The content of an SSD outlives the
process that serves it, so it has its own name, ``content_id``: a process that brings a known content
under the same name *rebases* the segment, and its objects are back at another address. A master that
does not know the content requests a report from the node (``wants_report``), and allocates nothing
there before it has come: on SSD however long that takes, in memory while it rests, because objects in
memory are not promised to last.

A change log has what was added to a segment and removed from it, numbered, until its node has noted it. A
node keeps a journal of what its segments hold, so that a master that lost everything can request it. This is
the master's end of that stream: changes wait here until a Poll acknowledges them (``seen``). It is bounded: a
node that lags too far finds that numbers are missing (``Polled.first``) and reports what it holds instead of
catching up. Numbers start at ``first``, which differs for each run of a master: a node with a number from an
earlier run must never appear to be up to date.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING

from mooncake.errors import Refusal
from mooncake.state_table import StateTable, move
from mooncake.store.allocator import ALIGNMENT_BYTES, PAGE_BYTES, Allocator
from mooncake.store.master.log_records import Doubt
from mooncake.store.messages import Mount, SegmentEntry
from mooncake.types import Tier

if TYPE_CHECKING:
    from mooncake.store.master.objects import StoredObject

MAX_WAITING_CHANGES = 1 << 16
"""Changes that wait for one node."""
MISSED_BEATS = 3
RETURN_S = 4.0
"""How long requests wait for nodes after a change of the master. A node notices the change and connects again
within that time (``node/membership.py``), and clients have longer timeouts."""
MAX_RETIRED = 10_000


class ChangeLog:
    """``first`` is the number of the oldest waiting change."""

    def __init__(self, first: int) -> None:
        self.first = first
        self._waiting: deque[SegmentEntry | int] = deque()
        self._last_gone = first - 1

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def last(self) -> int:
        """The number of the newest change so far."""
        return self.first + len(self._waiting) - 1

    def add(self, change: SegmentEntry | int) -> None:
        """Add a ``SegmentEntry`` (it is held now) or an object's id (its replica here was removed)."""
        self._waiting.append(change)
        if isinstance(change, int):
            self._last_gone = self.last
        if len(self._waiting) > MAX_WAITING_CHANGES:
            self._waiting.popleft()
            self.first += 1

    @property
    def has_gone(self) -> bool:
        """A removal is among the waiting changes."""
        return self._last_gone >= self.first

    def skip(self) -> None:
        """Skip a number: something changed while the node does not poll."""
        self.first = self.last + 2
        self._waiting.clear()

    def noted(self, seen: int) -> bool:
        """The node has everything up to ``seen``. False: some that it lacks are no longer here."""
        if seen > self.last:
            # A number of another run, larger by accident.
            self.miss(seen)
            return False
        while self._waiting and self.first <= seen:
            self._waiting.popleft()
            self.first += 1
        return self.first == seen + 1

    def miss(self, seen: int) -> None:
        """Skip enough numbers for a node that has noted ``seen`` to notice a gap."""
        self.first = seen + 2

    def take(self, limit: int) -> list[SegmentEntry | int]:
        """The oldest changes; they stay until they are noted."""
        return list(itertools.islice(self._waiting, limit))

    def __repr__(self) -> str:
        return f"<ChangeLog {self.first} to {self.last}>"


class SegmentState(enum.StrEnum):
    ALIVE = "alive"
    SUSPECTED = "suspected"
    GONE = "gone"


RESTORED, MOUNTED, BEAT, LOST, SILENT, DROPPED = (
    "known from an earlier master",
    "mounted",
    "heartbeat",
    "connection lost",
    "heartbeats missing",
    "given up, replaced or unmounted",
)
STATE_MOVES: StateTable[SegmentState] = StateTable(
    "segment, as the master sees it",
    SegmentState,
    {
        (SegmentState.ALIVE, RESTORED): move(SegmentState.SUSPECTED),
        (SegmentState.SUSPECTED, RESTORED): move(SegmentState.SUSPECTED),
        (SegmentState.ALIVE, MOUNTED): move(SegmentState.ALIVE),
        (SegmentState.ALIVE, LOST): move(SegmentState.SUSPECTED),
        (SegmentState.ALIVE, SILENT): move(SegmentState.SUSPECTED),
        (SegmentState.ALIVE, DROPPED): move(SegmentState.GONE),
        (SegmentState.SUSPECTED, MOUNTED): move(SegmentState.ALIVE),
        (SegmentState.SUSPECTED, BEAT): move(SegmentState.ALIVE),
        (SegmentState.SUSPECTED, DROPPED): move(SegmentState.GONE),
    },
)


class Segment:
    """Memory or an SSD of one node, as the master knows it."""

    __slots__ = (
        "address",
        "allocator",
        "changes",
        "connection",
        "content_id",
        "descriptor",
        "disk_failing_until",
        "disk_full",
        "doubt",
        "epoch",
        "expected",
        "gone_at",
        "holders",
        "host",
        "is_alive",
        "is_confirmed",
        "is_draining",
        "is_fresh",
        "joined_at",
        "last_heartbeat_at",
        "name",
        "node",
        "num_lacking",
        "num_objects",
        "num_tasks",
        "polls",
        "preallocated_bytes",
        "report_connection",
        "reported",
        "rests_until",
        "state",
        "tier",
        "wants_report",
        "was_restored",
    )

    def __init__(self, mount: Mount, connection: Hashable, now: float, first_change: int = 1) -> None:
        self.name = mount.segment
        self.node = mount.node or mount.segment
        self.tier = mount.tier
        self.content_id = mount.content_id or mount.epoch
        self.epoch = mount.epoch
        self.host = mount.host
        self.address = mount.address
        self.descriptor = mount.descriptor
        alignment_bytes = PAGE_BYTES if mount.tier is Tier.SSD else ALIGNMENT_BYTES
        self.allocator = Allocator(mount.size_bytes, alignment_bytes)
        self.connection: Hashable = connection
        self.last_heartbeat_at = now
        self.joined_at = now
        """When it was first mounted; placement does not flood a new segment (``placement.py``)."""
        self.rests_until = now + mount.rest_s
        self.state = SegmentState.ALIVE
        self.is_alive = True
        """``state is ALIVE``, as a plain attribute because every lookup of every key reads it."""
        self.was_restored = False
        """Known from an earlier master's records, and not mounted since."""
        self.doubt = Doubt.NONE
        """How much of its content those records may lack, until its node has reported."""
        self.is_confirmed = False
        """A heartbeat has come since the mount."""
        self.is_fresh = False
        """Its process had no master before this one, so no copy into it is under way."""
        self.gone_at = 0.0
        """When a suspected segment is given up."""
        self.holders: dict[int, StoredObject] = {}
        """The object that has each allocated offset, or had it until its release."""
        self.changes = ChangeLog(first_change)
        """Changes that the node has yet to enter in its journal."""
        self.wants_report = False
        """Its content is not known; a report has been requested from the node."""
        self.reported: dict[int, None] = {}
        """The object ids of a report that is in progress."""
        self.num_lacking = 0
        """Number of objects in it that an earlier master's records lacked."""
        self.expected: list[int] = []
        """The ids of objects that were dropped because this content came back under another name or from
        another process: the report has those that are not lost."""
        self.report_connection: Hashable = None
        """The connection on which a report was requested because changes are missing, until it has come."""
        self.is_draining = False
        """No new objects may be placed here."""
        self.preallocated_bytes = 0
        """Preallocated for writers and not used yet (``put.py``)."""
        self.polls = False
        """Its node has polled for tasks, so it can run some."""
        self.num_objects = 0
        """Number of readable objects with a complete replica here."""
        self.num_tasks = 0
        """Number of tasks that wait or run with this segment as the target."""
        self.disk_full = ""
        """Why its node could not write the last copy: the disk has no space. "" again when one is written."""
        self.disk_failing_until = 0.0
        """Until then, what may be copied to several disks is copied to another one, and nothing is evicted
        here, because copies may fail in the space of evicted objects, too. Later, a copy that needs one may
        be the only one to show that the disk has space."""

    @property
    def is_mounted(self) -> bool:
        return self.state is not SegmentState.GONE

    def takes_objects(self, now: float) -> bool:
        """Whether space may be allocated here."""
        return (
            self.is_alive
            and self.is_confirmed
            and self.rests_until <= now
            and not self.is_draining
            and not (self.wants_report and self.tier is Tier.SSD)
        )

    def rebase(self, mount: Mount, connection: Hashable, now: float) -> None:
        """Another process serves the same content, at another address."""
        assert mount.content_id == self.content_id and mount.size_bytes >= self.allocator.size_bytes
        self.epoch = mount.epoch
        self.address = mount.address
        self.descriptor = mount.descriptor
        self.connection = connection
        self.last_heartbeat_at = now
        self.was_restored = self.is_confirmed = self.polls = False
        self.disk_full, self.disk_failing_until = "", 0.0
        self.move(MOUNTED)

    def move(self, event: str) -> None:
        """Enter the state that follows ``event``."""
        self.state = STATE_MOVES.next(self.state, event)
        self.is_alive = self.state is SegmentState.ALIVE

    def __repr__(self) -> str:
        return f"<Segment {self.name!r} epoch {self.epoch:x} {self.state} {self.allocator!r}>"


class Segments:
    """All segments that are alive or suspected, by name."""

    def __init__(self, ttl_s: float, heartbeat_s: float, first_change: int = 1) -> None:
        self._ttl_s = ttl_s
        self.line = first_change
        """Identifies this line of masters (``log_records.LineBegan``)."""
        self._first_change = first_change
        self._patience_s = MISSED_BEATS * heartbeat_s
        self.mounted: dict[str, Segment] = {}
        self.num_ssds = 0
        """Number of SSD segments."""
        self.num_devices = 0
        """Number of device segments."""
        self._by_host: dict[str, dict[str, Segment]] = {}
        """The same segments, by host and name: a put tries its own host first, and rarely another."""
        self._by_node: dict[str, dict[str, Segment]] = {}
        """The same segments, by node and name."""
        self._retired: dict[str, int] = {}
        """The epoch of each name that was unmounted and may not be mounted again."""
        self.awaited: dict[str, Segment] = {}
        """Segments of an earlier master whose nodes have yet to mount and send a heartbeat."""
        self.awaited_until = -math.inf
        self.on_return: Callable[[Segment], None] = lambda segment: None
        """Called when a segment was mounted that was awaited, or is awaited no longer."""
        self._expire_at: float | None = None
        """No segment changes its state by the passing of time before this instant. Heartbeats only put that
        off, so they leave it alone, and a client's request costs nothing with a thousand nodes."""

    def mount(
        self, mount: Mount, connection: Hashable, now: float
    ) -> tuple[Segment, Segment | None] | Refusal:
        """Return the segment and the one it replaces (which the caller must empty), or a refusal.

        A segment that is neither new nor of the same epoch as before was rebased.
        """
        if self._retired.get(mount.segment) == mount.epoch:
            reason = "it was drained and unmounted; start its process anew to mount it again"
            return Refusal("unmounted", reason)
        known = self.mounted.get(mount.segment)
        if known is not None:
            if known.epoch == mount.epoch:
                known.connection = connection
                known.last_heartbeat_at = now
                if known.was_restored:
                    known.was_restored = False
                    self.on_return(known)
                    known.rests_until = max(known.rests_until, now + self._rest_s(known, mount))
                known.move(MOUNTED)
                self._expire_by(now + self._patience_s)
                return known, None
            if known.is_alive:
                return Refusal(
                    "name_taken",
                    f"segment {mount.segment!r} is served by another process (on {known.host}); "
                    "give each node its own name, or wait until the old one is given up",
                )
            if _is_same_content(known, mount):
                known.rebase(mount, connection, now)
                self.on_return(known)
                known.rests_until = max(known.rests_until, now + self._rest_s(known, mount))
                self._expire_by(now + self._patience_s)
                return known, None
        if known is None:
            known = self._elsewhere(mount)
        was_awaited = known is not None and known.name in self.awaited
        if known is not None:
            self.drop(known)
        segment = Segment(mount, connection, now, self._first_change)
        segment.wants_report = mount.rest_s > 0 or mount.tier is Tier.SSD
        segment.is_fresh = mount.line == 0
        self._add(segment)
        if was_awaited:  # its objects are lost, but it may have space from its first heartbeat on
            self.awaited[segment.name] = segment
        self._expire_by(now + self._patience_s)
        return segment, known

    def restore(self, mount: Mount, now: float) -> Segment:
        """Add a segment of an earlier master: suspected until its node mounts it here."""
        segment = Segment(mount, None, now, self._first_change)
        segment.was_restored = True
        self._add(segment)
        self._suspect(segment, RESTORED, now)
        return segment

    def _elsewhere(self, mount: Mount) -> Segment | None:
        """The segment with the same content under its former name."""
        if mount.tier is not Tier.SSD:
            return None
        for segment in self.mounted.values():
            if segment.content_id == mount.content_id and not segment.is_alive:
                return segment
        return None

    def follow(self, segment: Segment, mount: Mount) -> None:
        """Another process serves the same content at another address, as another master has recorded."""
        segment.epoch, segment.address, segment.descriptor = mount.epoch, mount.address, mount.descriptor

    def settle(self, now: float, doubt: Doubt = Doubt.NONE) -> None:
        """This master takes over: nodes have to mount from now on.

        Where its records may lack some, nodes report what they hold before space is allocated: SSDs always,
        because their objects were promised to last; memory, if promises may be missing as well.
        """
        self._expire_at = None
        self.awaited = dict(self.mounted)
        self.awaited_until = now + min(self._ttl_s, RETURN_S)
        for segment in self.mounted.values():
            segment.was_restored = True
            if segment.wants_report:
                segment.doubt = Doubt.ANY  # the earlier master had no report of it either
            elif doubt >= (Doubt.END if segment.tier is Tier.SSD else Doubt.PROMISES):
                segment.doubt, segment.wants_report = doubt, True
            self._suspect(segment, RESTORED, now)

    def _rest_s(self, segment: Segment, mount: Mount) -> float:
        """How long a segment rests that this master knows from its predecessors.

        They wrote down what they promised. A master of another line, which may have used the memory
        in between, wrote it elsewhere.
        """
        return 0.0 if mount.line == self.line and segment.doubt < Doubt.PROMISES else mount.rest_s

    def _add(self, segment: Segment) -> None:
        self.mounted[segment.name] = segment
        self._by_host.setdefault(segment.host, {})[segment.name] = segment
        self._by_node.setdefault(segment.node, {})[segment.name] = segment
        self.num_ssds += segment.tier is Tier.SSD
        self.num_devices += segment.tier is Tier.DEVICE

    def beat(self, name: str, epoch: int, connection: Hashable, now: float) -> Segment | None:
        """Enter a heartbeat; None when the sender must mount again."""
        segment = self.find(name, epoch)
        if segment is None or segment.connection != connection:
            return None
        segment.last_heartbeat_at = now
        segment.is_confirmed = True
        if self.awaited:
            self._no_longer_awaited(segment)
        if not segment.is_alive:
            segment.move(BEAT)
            self._expire_by(now + self._patience_s)
        return segment

    def reporting(self, segment: Segment, connection: Hashable, now: float) -> None:
        """Enter a part of a report as a sign of life: before the last one, its node sends no heartbeat."""
        if segment.connection == connection:
            segment.last_heartbeat_at = now
            if not segment.is_alive:
                segment.gone_at = now + self._ttl_s

    def find(self, name: str, epoch: int) -> Segment | None:
        segment = self.mounted.get(name)
        return segment if segment is not None and segment.epoch == epoch else None

    def on(self, host: str) -> Iterable[Segment]:
        """The segments of one host."""
        return self._by_host.get(host, {}).values()

    def of(self, node: str) -> Iterable[Segment]:
        """The segments of one node."""
        return self._by_node.get(node, {}).values()

    def connection_lost(self, connection: Hashable, now: float) -> list[Segment]:
        """Suspect everything that was mounted over ``connection``; returns what is newly suspected."""
        lost = [s for s in self.mounted.values() if s.connection == connection and s.is_alive]
        for segment in lost:
            self._suspect(segment, LOST, now)
            self._no_longer_awaited(segment)
        return lost

    def expire(self, now: float) -> tuple[list[Segment], list[Segment]]:
        """(newly suspected for silence, given up). The caller must empty the latter."""
        silent: list[Segment] = []
        gone: list[Segment] = []
        if self._expire_at is None or now < self._expire_at:
            return silent, gone
        for segment in list(self.mounted.values()):
            if segment.is_alive and segment.last_heartbeat_at + self._patience_s <= now:
                self._suspect(segment, SILENT, now)
                self._no_longer_awaited(segment)
                silent.append(segment)
            elif not segment.is_alive and segment.gone_at <= now:
                self.drop(segment)
                gone.append(segment)
        self._expire_at = min(map(self._changes_at, self.mounted.values()), default=None)
        return silent, gone

    def drop(self, segment: Segment) -> None:
        """Remove the segment. The caller must empty it."""
        assert self.mounted.get(segment.name) is segment
        del self.mounted[segment.name]
        for index, name in ((self._by_host, segment.host), (self._by_node, segment.node)):
            del index[name][segment.name]
            if not index[name]:
                del index[name]
        self._no_longer_awaited(segment)
        self.num_ssds -= segment.tier is Tier.SSD
        self.num_devices -= segment.tier is Tier.DEVICE
        segment.move(DROPPED)

    def retire(self, segment: Segment) -> None:
        """Remove it, and refuse further mounts of its process in this epoch. The caller must empty it."""
        self.drop(segment)
        self._retired[segment.name] = segment.epoch
        if len(self._retired) > MAX_RETIRED:
            del self._retired[next(iter(self._retired))]

    def deadline(self) -> float | None:
        """When to call ``expire``, which may find nothing to do yet."""
        return self._expire_at

    def _changes_at(self, segment: Segment) -> float:
        return segment.last_heartbeat_at + self._patience_s if segment.is_alive else segment.gone_at

    def _expire_by(self, instant: float) -> None:
        if self._expire_at is None or instant < self._expire_at:
            self._expire_at = instant

    def _no_longer_awaited(self, segment: Segment) -> None:
        if self.awaited.pop(segment.name, None) is not None:
            self.on_return(segment)

    def end_waiting(self) -> None:
        """Wait no longer for nodes that have not come back."""
        for segment in list(self.awaited.values()):
            self._no_longer_awaited(segment)

    def _suspect(self, segment: Segment, event: str, now: float) -> None:
        segment.move(event)
        segment.gone_at = now + self._ttl_s
        self._expire_by(segment.gone_at)

    def check(self) -> None:
        for index in (self._by_host, self._by_node):
            indexed = [segment for segments in index.values() for segment in segments.values()]
            assert {id(segment) for segment in indexed} == {id(segment) for segment in self.mounted.values()}
        for segment in self.awaited.values():
            assert self.mounted[segment.name] is segment and not segment.is_confirmed, segment
        assert self.num_ssds == sum(one.tier is Tier.SSD for one in self.mounted.values())
        assert self.num_devices == sum(one.tier is Tier.DEVICE for one in self.mounted.values())
        for name, segment in self.mounted.items():
            assert segment.name == name and segment.is_mounted, segment
            assert segment.is_alive == (segment.state is SegmentState.ALIVE)
            assert segment.holders.keys() == segment.allocator.allocations.keys(), segment
            segment.allocator.check()
            assert self._expire_at is not None and self._expire_at <= self._changes_at(segment), segment

    def __repr__(self) -> str:
        return f"<Segments {list(self.mounted.values())!r}>"


def _is_same_content(known: Segment, mount: Mount) -> bool:
    """Memory never outlives its process; an SSD with a changed size counts as another one."""
    kept = known.allocator
    return (
        mount.tier is Tier.SSD
        and known.content_id == mount.content_id
        and kept.size_bytes == mount.size_bytes - mount.size_bytes % kept.alignment_bytes
        and known.host == mount.host
        and known.node == (mount.node or mount.segment)
    )

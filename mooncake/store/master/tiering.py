# SPDX-License-Identifier: Apache-2.0
"""Movement between memory and SSD: down ahead of need, up when objects are wanted again.

::

    memory ──demote: durable, or the coldest beyond the watermark──▶ ssd of the same node
       ▲                                                              │
       └───────────── promote: found cold often enough ───────────────┘

**Demotion** copies; the replica in memory stays until space is needed, and eviction then finds
victims that cost nothing (``eviction.py``). As with the dirty pages of an operating system, objects
without a copy on SSD may take ``demote_watermark`` of a node's memory; beyond it the coldest objects
are copied. A full SSD evicts its own coldest objects. Where its node found no space on the disk, one copy at
a time is tried, and nothing is evicted soon after one (``Segment.disk_failing_until``). The same holds for a
disk that fails otherwise, as a file system does that has become read-only. An object evicted from
SSD while it is still in memory is not copied again: otherwise a small SSD would be rewritten continually.

**Promotion** is for objects that are read repeatedly. An object is admitted when it was found cold
``promote_after_hits`` times among the last lookups of that kind: counts are halved periodically, so
that they measure *recent* frequency (TinyLFU: Einziger, Friedman and Manes, "TinyLFU: A Highly
Efficient Cache Admission Policy", ACM Transactions on Storage 13, 2017; a plain table replaces its
sketch here, because only objects that exist are counted). It never takes memory beyond the high
watermark: colder objects that are on SSD make room, or the promotion is skipped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections import deque
from collections.abc import Callable

from mooncake.errors import Refusal
from mooncake.store.master.catalog import Catalog
from mooncake.store.master.catalog_events import (
    ColdHit,
    ObjectRemoved,
    ObjectShown,
    ReplicaCompleted,
    ReplicaRemoved,
)
from mooncake.store.master.objects import StoredObject
from mooncake.store.master.segments import Segment
from mooncake.store.master.tasks import PlannedCopy, Tasks
from mooncake.types import Tier

CHECK_INTERVAL_S = 1.0
"""Interval of the check for new SSDs and for demotions to be retried."""
SCAN_S = 0.02
SCAN_OBJECTS = 10_000
"""Objects scanned per step when an SSD has come to memory that is full already."""
MAX_OWED = 1000
"""Durable objects without a copy for which one is planned in a step."""
MAX_OWED_VISITED = 16_000
"""Durable objects visited in it, most of which may be planned already."""
WORTH_WHILE = 16
"""Least number of objects for a search for the coldest while others are being copied."""
MAX_WAITING = 4096
"""Demotions queued for one SSD; later ones wait for the next search."""
MAX_VICTIMS = 64
"""Maximum number of replicas that leave memory for one promotion."""


@dataclasses.dataclass(slots=True)
class _NodeTiers:
    """Objects in the memory of one node that may have to be copied."""

    segment: Segment
    num_dirty: int = 0
    dirty_bytes: int = 0
    """Bytes of the objects without a copy on SSD."""
    planned_bytes: int = 0
    """Bytes of those that are being copied."""
    blocked_until: float = 0.0
    """Copying failed, or no object may be copied."""


class Frequency:
    """How often each object of a stream occurred recently."""

    def __init__(self, sample_size: int = 1 << 16) -> None:
        self._sample_size = sample_size
        self._num_seen = 0
        self._counts: dict[int, int] = {}

    def add(self, object_id: int) -> int:
        """Count an occurrence; returns the count."""
        self._num_seen += 1
        if self._num_seen >= self._sample_size:
            self._num_seen //= 2
            self._counts = {one: count // 2 for one, count in self._counts.items() if count > 1}
        count = self._counts[object_id] = self._counts.get(object_id, 0) + 1
        return count

    def forget(self, object_id: int) -> None:
        self._counts.pop(object_id, None)


class Tiering:
    """Plans those copies. A clock of the catalog."""

    def __init__(self, catalog: Catalog, tasks: Tasks) -> None:
        self._catalog = catalog
        self._tasks = tasks
        self._homes: dict[Segment, _NodeTiers] = {}
        self._dirty: dict[int, tuple[_NodeTiers, StoredObject]] = {}
        """Objects without a copy on SSD, by id."""
        self._planned: dict[int, PlannedCopy] = {}
        """Demotions, by object id."""
        self._pairs: dict[tuple[Segment, Segment], None] = {}
        """Memory and SSD of one node, both in use."""
        self._owed: dict[int, StoredObject] = {}
        """Durable objects without a copy, by object id."""
        self._scans: deque[list[StoredObject]] = deque()
        self._check_at = 0.0
        self._frequency = Frequency()
        self.on_demoted: Callable[[], None] = lambda: None
        """Called when a demotion has ended, with or without success."""
        self.on_failed: Callable[[StoredObject, Refusal], None] = lambda stored, refusal: None
        """Called when a demotion was given up."""
        catalog.observe(
            {
                ObjectShown: self._shown,
                ColdHit: self._cold_hit,
                ReplicaCompleted: self._replica_completed,
                ReplicaRemoved: self._replica_removed,
                ObjectRemoved: self._object_removed,
            }
        )

    @property
    def is_freeing(self) -> bool:
        """Whether objects are being copied to SSD that may leave memory only after that."""
        return bool(self._planned) and not self._catalog.settings.evict_undemoted

    # Down

    def _make_durable(self, stored: StoredObject, now: float) -> None:
        """Plan the copy on SSD that a writer waits for: on its own node if that has one, else elsewhere."""
        self._owed[stored.object_id] = stored
        alive = [one for one in self._catalog.alive(Tier.SSD) if not one.is_draining]
        if not alive or stored.object_id in self._planned:
            return
        nodes = [extent.segment.node for extent in stored.complete()]
        hosts = [extent.segment.host for extent in stored.complete()]

        def merit(ssd: Segment) -> tuple[bool, bool, bool, bool, int]:
            return (
                ssd.disk_failing_until <= now,
                ssd.node in nodes,
                ssd.host in hosts,
                ssd.takes_objects(now),
                ssd.allocator.free_bytes - ssd.num_tasks * stored.size_bytes,
            )

        ssd = max(alive, key=merit)
        if not _is_tried(ssd, now):
            self._demote(stored, ssd, now, is_urgent=True)
        elif ssd.disk_full:
            self.on_failed(stored, Refusal("no_space", ssd.disk_full))

    def _demote_at_once(self, stored: StoredObject, now: float) -> None:
        """Demote without a search for the coldest objects: all are to be copied."""
        home, _ = self._dirty.get(stored.object_id, (None, None))
        ssd = None if home is None else self._ssd_of(home.segment)
        is_open = ssd is not None and ssd.num_tasks < MAX_WAITING and not _is_tried(ssd, now)
        if ssd is not None and is_open and stored.object_id not in self._planned:
            self._demote(stored, ssd, now)

    def _demote(self, stored: StoredObject, ssd: Segment, now: float, *, is_urgent: bool = False) -> None:
        self._planned[stored.object_id] = self._tasks.plan(
            stored, ssd, "demote", now, self._demoted, makes_room=True, is_urgent=is_urgent
        )
        self._count_planned(stored, 1)

    def _demoted(self, task: PlannedCopy, refusal: Refusal | None, now: float) -> None:
        del self._planned[task.stored.object_id]
        if refusal is None:
            self._catalog.counts.demoted_objects += 1
            self._catalog.counts.demoted_bytes += task.stored.size_bytes
        else:
            self.on_failed(task.stored, refusal)
        self._count_planned(task.stored, -1)
        self.on_demoted()
        for extent in task.stored.complete(Tier.MEMORY):
            home = self._homes.get(extent.segment)
            if home is not None:
                if refusal is not None:
                    home.blocked_until = now + CHECK_INTERVAL_S
                self._relieve(home, now)

    def _count_planned(self, stored: StoredObject, sign: int) -> None:
        if stored.object_id in self._dirty:
            self._dirty[stored.object_id][0].planned_bytes += sign * stored.size_bytes

    def _relieve(self, home: _NodeTiers, now: float) -> None:
        """Copy the coldest objects while more than allowed have no copy."""
        settings = self._catalog.settings
        limit_bytes = settings.demote_watermark * home.segment.allocator.size_bytes
        excess_bytes = home.dirty_bytes - home.planned_bytes - limit_bytes
        if excess_bytes <= 0 or home.blocked_until > now:
            return
        ssd = self._ssd_of(home.segment)
        if ssd is None:
            return
        # A search goes over the planned ones again, so it should find several; each end starts another.
        room = (1 if _is_failing(ssd, now) else 2 * settings.tasks_per_segment) - ssd.num_tasks
        wanted = min(room, 1 + int(excess_bytes * home.num_dirty / home.dirty_bytes))
        if wanted <= 0 or (wanted < WORTH_WHILE and ssd.num_tasks):
            return
        num_before = len(self._planned)
        for stored in self._catalog.eviction.coldest(home.segment, wanted + ssd.num_tasks):
            if excess_bytes <= 0 or len(self._planned) >= num_before + room:
                return
            known = self._dirty.get(stored.object_id)
            if known is None or known[0] is not home or stored.object_id in self._planned:
                continue
            if stored.size_bytes <= ssd.allocator.size_bytes:
                self._demote(stored, ssd, now)
                excess_bytes -= stored.size_bytes
        if len(self._planned) == num_before:
            home.blocked_until = now + CHECK_INTERVAL_S

    def _ssd_of(self, memory: Segment) -> Segment | None:
        """The emptiest SSD of its node."""
        ssds = [s for s in self._catalog.segments.of(memory.node) if s.tier is Tier.SSD and _is_open(s)]
        return max(ssds, key=lambda ssd: ssd.allocator.free_bytes, default=None)

    def _note_dirty(self, stored: StoredObject, now: float) -> None:
        """Note an object in memory that may have to be copied later."""
        if stored.object_id in self._dirty or stored.complete(Tier.SSD):
            return
        for extent in stored.extents:
            segment = extent.segment
            if not extent.is_complete or segment.tier is not Tier.MEMORY:
                continue
            if any(one.tier is Tier.SSD for one in self._catalog.segments.of(segment.node)):
                home = self._homes.setdefault(extent.segment, _NodeTiers(extent.segment))
                self._dirty[stored.object_id] = home, stored
                home.num_dirty += 1
                home.dirty_bytes += stored.size_bytes
                if stored.object_id in self._planned:
                    home.planned_bytes += stored.size_bytes
                self._relieve(home, now)
                return

    def _note_clean(self, stored: StoredObject) -> None:
        home, _ = self._dirty.get(stored.object_id, (None, None))
        if home is None:
            return
        if stored.object_id in self._planned:
            home.planned_bytes -= stored.size_bytes
        home.num_dirty -= 1
        home.dirty_bytes -= stored.size_bytes
        del self._dirty[stored.object_id]

    # Up

    def _cold_hit(self, event: ColdHit) -> None:
        stored, now = event.stored, event.now
        counts, after_hits = self._catalog.counts, self._catalog.settings.promote_after_hits
        if any(task.target.tier is Tier.MEMORY for task in self._tasks.of(stored)):
            return
        if not after_hits or self._frequency.add(stored.object_id) < after_hits:
            counts.promotions_too_rare += 1
            return
        for extent in stored.complete(Tier.SSD):
            for memory in self._catalog.segments.of(extent.segment.node):
                if memory.tier is Tier.MEMORY and memory.polls and self._has_room(memory, stored, now):
                    self._frequency.forget(stored.object_id)
                    self._tasks.plan(stored, memory, "promote", now, self._promoted, is_urgent=True)
                    counts.promotions_admitted += 1
                    return
        counts.promotions_no_room += 1

    def _promoted(self, task: PlannedCopy, refusal: Refusal | None, now: float) -> None:
        if refusal is None:
            self._catalog.counts.promoted_objects += 1
            self._catalog.counts.promoted_bytes += task.stored.size_bytes
        else:
            self._catalog.counts.promotions_failed += 1

    def _has_room(self, memory: Segment, stored: StoredObject, now: float) -> bool:
        """Whether it fits below the watermark, if necessary after colder ones that are on SSD have left."""
        if not memory.takes_objects(now):
            return False
        allocator = memory.allocator
        limit_bytes = int(self._catalog.settings.high_watermark * allocator.size_bytes)
        if stored.size_bytes > limit_bytes:
            return False
        if _fits(memory, stored, limit_bytes):
            return True
        num_left = MAX_VICTIMS
        victims = self._catalog.eviction.victims([memory], now, stored, whole=False)
        with contextlib.closing(victims):
            for victim, extent in victims:
                self._catalog.evict(victim, extent, "others are read more often", now)
                num_left -= 1
                if not num_left or _fits(memory, stored, limit_bytes):
                    break
        return stored.is_readable and _fits(memory, stored, limit_bytes)

    # Events of the catalog

    def _shown(self, event: ObjectShown) -> None:
        stored, now = event.stored, event.now
        if stored.policy.is_durable:
            self._make_durable(stored, now)
        if self._catalog.segments.num_ssds:
            self._catalog.keeps_deadline = False
            self._note_dirty(stored, now)
            if not self._catalog.settings.demote_watermark:
                self._demote_at_once(stored, now)

    def _replica_completed(self, event: ReplicaCompleted) -> None:
        if event.extent.segment.tier is Tier.SSD:
            self._owed.pop(event.stored.object_id, None)
            self._note_clean(event.stored)
        else:
            self._note_dirty(event.stored, event.now)

    def _object_removed(self, event: ObjectRemoved) -> None:
        self._owed.pop(event.stored.object_id, None)
        self._note_clean(event.stored)
        self._frequency.forget(event.stored.object_id)

    def _replica_removed(self, event: ReplicaRemoved) -> None:
        stored, extent, now = event.stored, event.extent, event.now
        if not (stored.is_readable and extent.is_complete) or event.is_replayed:
            return  # nothing to copy: no replica of the object is left, or another master leads
        known = self._dirty.get(stored.object_id)
        if known is not None and known[0].segment is extent.segment:
            self._note_clean(stored)
        if extent.segment.tier is not Tier.SSD:
            self._note_dirty(stored, now)
        elif not event.is_evicted and not stored.complete(Tier.SSD):
            # Its bytes were corrupt, or its node is gone.
            self._note_dirty(stored, now)
            if stored.policy.is_durable:
                self._make_durable(stored, now)

    # A clock of the catalog

    def deadline(self) -> float | None:
        return self._check_at if self._catalog.segments.mounted else None

    def expire(self, now: float) -> None:
        if self._scans:
            self._scan(now)
        pairs: dict[tuple[Segment, Segment], None] = {}
        for ssd in self._catalog.alive(Tier.SSD):
            for memory in self._catalog.segments.of(ssd.node):
                if memory.tier is Tier.MEMORY and memory.takes_objects(now) and _is_open(ssd):
                    pairs[memory, ssd] = None
        for memory, ssd in pairs:
            if (memory, ssd) not in self._pairs:
                self._scans.append(list(memory.holders.values()))
        self._pairs = pairs
        has_more = self._plan_owed(now)
        for home in list(self._homes.values()):
            if home.segment.is_mounted:
                self._relieve(home, now)
            elif not home.dirty_bytes:
                del self._homes[home.segment]
        self._check_at = now + (SCAN_S if self._scans or has_more else CHECK_INTERVAL_S)

    def _plan_owed(self, now: float) -> bool:
        """Plan copies of some durable objects that have none yet, the next ones first. While all disks are
        full they may become millions. Returns whether all of these were planned, and more may be."""
        num_left, num_before = MAX_OWED, len(self._planned)
        for object_id in list(itertools.islice(self._owed, MAX_OWED_VISITED)):
            stored = self._owed[object_id] = self._owed.pop(object_id)  # the last one from now on
            if object_id not in self._planned:
                self._make_durable(stored, now)
                num_left -= 1
                if not num_left:
                    break
        return len(self._planned) - num_before >= MAX_OWED

    def _scan(self, now: float) -> None:
        """Scan objects that were in memory before their node had an SSD, or before this master led."""
        objects = self._scans[0]
        for stored in objects[-SCAN_OBJECTS:]:
            if stored.is_readable:
                if stored.policy.is_durable and not stored.complete(Tier.SSD):
                    self._make_durable(stored, now)
                self._note_dirty(stored, now)
        del objects[-SCAN_OBJECTS:]
        if not objects:
            self._scans.popleft()

    def check(self) -> None:
        for home in self._homes.values():
            dirty = [stored for where, stored in self._dirty.values() if where is home]
            assert home.num_dirty == len(dirty)
            assert home.dirty_bytes == sum(stored.size_bytes for stored in dirty), home
            planned = [stored for stored in dirty if stored.object_id in self._planned]
            assert home.planned_bytes == sum(stored.size_bytes for stored in planned), home
        for object_id, (home, stored) in self._dirty.items():
            assert stored.object_id == object_id and stored.is_readable, stored
            assert self._homes[home.segment] is home and stored.on(home.segment) is not None, stored
            assert not stored.complete(Tier.SSD), stored
        for object_id, stored in self._owed.items():
            assert stored.object_id == object_id and stored.is_readable, stored
            assert not stored.complete(Tier.SSD), stored
        for task in self._planned.values():
            assert task in self._tasks.of(task.stored), task

    def __repr__(self) -> str:
        return f"<Tiering not_on_ssd={len(self._dirty)} being_copied={len(self._planned)}>"


def _is_open(ssd: Segment) -> bool:
    return ssd.is_alive and ssd.polls and not ssd.is_draining and not ssd.wants_report


def _is_failing(ssd: Segment, now: float) -> bool:
    """Whether its disk was full, or did not take the last copy for another reason."""
    return bool(ssd.disk_full) or ssd.disk_failing_until > now


def _is_tried(ssd: Segment, now: float) -> bool:
    """Whether its disk was failing, and a copy is under way that will show whether it still is."""
    return _is_failing(ssd, now) and ssd.num_tasks > 0


def _fits(memory: Segment, stored: StoredObject, limit_bytes: int) -> bool:
    is_below = memory.allocator.allocated_bytes + stored.size_bytes <= limit_bytes
    return is_below and memory.allocator.has_hole(stored.size_bytes)

# SPDX-License-Identifier: Apache-2.0
"""A master's state and the few ways in which it may change, shared by the parts of ``master.py``.

Segments, objects and the order of eviction belong together: an object or a replica that becomes
unfindable must leave all three, and its space may be used again only when every promise about it
has run out. These rules are written here once; the parts decide which requests apply them.

The space of a removed replica *rests* (is quarantined): until the leases that existed then have ended
(and views that are kept open are no longer renewed), until no writer can still be writing it, and until
no task reads it. Until then it counts in the account of the object's tenant: otherwise a tenant with a small
quota could take the whole pool by puts that it aborts. Three kinds count in no account. What rests on a
segment that is being drained is space that no put gets again. A successor holds more space than its
predecessor did, as it knows neither leases nor whose promised space is; a failover must not exhaust quotas.
And of space that was preallocated for small objects (``preallocate``), only those that were written count.
"""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any, Protocol, get_args

import msgspec

from mooncake.store.master.catalog_events import (
    EVICTED,
    CatalogEvent,
    ObjectRemoved,
    ObjectShown,
    ReplicaCompleted,
    ReplicaRemoved,
)
from mooncake.store.master.effects import OperatorEvent, Reply
from mooncake.store.master.eviction import Eviction
from mooncake.store.master.lease_bounds import LeaseBounds
from mooncake.store.master.log_records import (
    AllRemoved,
    ObjectGone,
    ObjectPinned,
    ObjectReadable,
    Record,
    ReplicaAdded,
    ReplicaGone,
    SegmentGone,
    SegmentMounted,
    SpaceHeld,
)
from mooncake.store.master.objects import Extent, Group, Objects, ObjectState, StoredObject, split_scoped
from mooncake.store.master.segments import Segment, Segments
from mooncake.store.master.tenants import Account, Tenants
from mooncake.store.messages import Mount
from mooncake.store.settings import MasterSettings
from mooncake.types import ObjectKey, Tier

STORY_LINES = 100_000
MAX_TOMBSTONES = 1 << 18
DISK_FAILING_S = 10.0
"""How long after a disk did not take a copy other disks are preferred to it, and nothing on it is evicted."""
NEVER = 1 << 63
"""Larger than any object id."""


@dataclasses.dataclass
class MasterCounts:
    """Counters of a master's events; the shell exports them."""

    puts: int = 0
    lookups: int = 0
    lookup_hits: int = 0
    cold_hits: int = 0
    cold_hit_bytes: int = 0
    refused_puts: int = 0
    expired_puts: int = 0
    evicted_objects: int = 0
    evicted_bytes: int = 0
    evicted_replicas: int = 0
    removed_objects: int = 0
    corrupt_objects: int = 0
    corrupt_replicas: int = 0
    corrupt_reports: int = 0
    refuted_reports: int = 0
    unverified_reports: int = 0
    lost_objects: int = 0
    done_tasks: int = 0
    failed_tasks: int = 0
    demoted_objects: int = 0
    demoted_bytes: int = 0
    promoted_objects: int = 0
    promoted_bytes: int = 0
    promotions_admitted: int = 0
    promotions_failed: int = 0
    promotions_too_rare: int = 0
    promotions_no_room: int = 0
    device_copied_objects: int = 0
    device_copied_bytes: int = 0
    device_dropped_replicas: int = 0
    device_dropped_bytes: int = 0
    device_copies_failed: int = 0
    device_copies_no_room: int = 0
    reported_objects: int = 0


class TimedPart(Protocol):
    """A part with its own deadlines."""

    def deadline(self) -> float | None: ...

    def expire(self, now: float) -> None: ...


class Catalog:
    """State of one master."""

    def __init__(self, settings: MasterSettings, first_object_id: int) -> None:
        self.settings = settings
        self.segments = Segments(settings.segment_ttl_s, settings.heartbeat_s, first_object_id)
        self.objects = Objects(first_object_id - 1)
        self.eviction = Eviction(settings.eviction_policy)
        self.tenants = Tenants()
        self.counts = MasterCounts()
        self.lease_bounds = LeaseBounds(settings, lambda record: self.records.append(record))
        self.clocks: list[TimedPart] = [self.lease_bounds]
        self._observers: dict[type[CatalogEvent], list[Callable[[Any], None]]] = {
            kind: [] for kind in get_args(CatalogEvent)
        }
        self.is_replaying = False
        """Another master's records are being entered."""
        self.recent: deque[list[ObjectKey]] = deque(maxlen=256)
        """The keys of the last lookups, a list each; ``hot_replicas.py`` samples them periodically."""
        self.tombstones: dict[ObjectKey, tuple[int, int]] = {}
        """For each of the last removed keys: the least object id that counts as new (a returning node's
        report of an older one is out of date), and the value of ``cleared`` for its tenant at that time."""
        self.cleared: dict[str, int] = {}
        """The same id for all keys of a tenant that was emptied, except those removed since."""
        self.notes: list[OperatorEvent] = []
        """Log events for operators about the event that is being handled."""
        self.replies: list[Reply] = []
        """Delayed replies that are ready now. A part that delays a request returns None first."""
        self.records: list[Record] = []
        """Records to be written down before that event is answered."""
        self.keeps_records = True
        """Whether there is a log or a standby for them; without either they are not made where that costs."""
        self.must_last = False
        """Its answer promises durability across a loss of power, so its records must be durable too."""
        self.keeps_deadline = False
        """The event that is being handled changes no deadline: set by the handlers of the most frequent
        requests, because to find the next deadline takes longer than to look up a key. Whatever sets an
        earlier deadline meanwhile withdraws it."""
        self.known_until = NEVER
        """Objects of earlier masters with ids up to this one are in their replayed records, or are removed;
        later ones may have been lost with the end of those records."""
        self.is_doubted = False
        """Records may be missing, and some node that may have the objects has not reported yet."""
        self.lost: dict[int, None] = {}
        """Meanwhile: ids of objects lost with a node that may be on another node, which has not reported
        yet."""
        self._timers: list[tuple[float, int, StoredObject | list[StoredObject], Extent | None]] = []
        """(instant, tie-breaker, object, its extent): a deadline for writing, perhaps of several objects, or
        the release of space."""
        self._order = itertools.count()
        self._stories: deque[ObjectKey] = deque()
        """The key of each line, oldest first."""
        self._lines: dict[ObjectKey, list[tuple[float, str, tuple[object, ...]]]] = {}
        """Lines by key: (instant, format, its arguments), formatted only when they are read."""

    # Observers

    def observe(self, handlers: Mapping[type[CatalogEvent], Callable[[Any], None]]) -> None:
        """Call these functions with each event of their type, after those of earlier observers."""
        for kind, handler in handlers.items():
            self._observers[kind].append(handler)

    def emit(self, event: CatalogEvent) -> None:
        for handler in self._observers[type(event)]:
            handler(event)

    # Space

    @property
    def capacity_bytes(self) -> int:
        """Capacity of the memory segments that are alive."""
        return sum(segment.allocator.size_bytes for segment in self.alive(Tier.MEMORY))

    @property
    def allocated_bytes(self) -> int:
        """Allocated bytes of the memory segments that are alive."""
        return sum(segment.allocator.allocated_bytes for segment in self.alive(Tier.MEMORY))

    def alive(self, tier: Tier) -> list[Segment]:
        return [s for s in self.segments.mounted.values() if s.is_alive and s.tier is tier]

    def make_room(
        self, segment: Segment, size_bytes: int, now: float, spare: StoredObject | None = None
    ) -> bool:
        """Evict on exactly this segment, sparing ``spare``, until ``size_bytes`` fit in one piece."""
        if segment.allocator.has_hole(size_bytes):
            return True
        if size_bytes > segment.allocator.size_bytes or now < segment.disk_failing_until:
            return False
        # A hole need not open where the oldest objects are, but a search without success must not
        # flush the whole segment either.
        budget_bytes = max(8 * size_bytes, segment.allocator.size_bytes // 16)
        with contextlib.closing(self.victims([segment], now, spare)) as victims:
            for victim, extent in victims:
                budget_bytes -= self.evict(victim, extent, "no space on its segment", now)
                if segment.allocator.has_hole(size_bytes):
                    return True
                if budget_bytes < 0:
                    break
        return False

    def set_disk_full(self, segment: Segment, reason: str, now: float) -> None:
        """The segment's node has written a copy (""), or could not because its disk is full."""
        if reason and not segment.disk_full:
            self.note("disk_full", segment, is_warning=True, reason=reason)
        elif segment.disk_full and not reason:
            self.note("disk_has_space", segment)
        segment.disk_full, segment.disk_failing_until = reason, now + DISK_FAILING_S if reason else 0.0

    def victims(
        self, segments: list[Segment], now: float, spare: StoredObject | None = None
    ) -> Generator[tuple[StoredObject, Extent], None, None]:
        """Replicas to evict from these segments of one tier, in order."""
        is_ssd = bool(segments) and segments[0].tier is Tier.SSD
        return self.eviction.victims(segments, now, spare, whole=is_ssd or self.settings.evict_undemoted)

    def evict(self, stored: StoredObject, extent: Extent, reason: str, now: float) -> int:
        """Evict a victim, and with it its group, from the extent's tier, or altogether without another
        replica. Returns the bytes that were released at once: all, because a victim has no lease."""
        if stored.joint is None:
            return self._evict(stored, extent, reason, now)
        return sum(self._evict(one, extent, reason, now) for one in list(stored.joint.members.values()))

    def _evict(self, stored: StoredObject, extent: Extent, reason: str, now: float) -> int:
        if stored.is_plain and stored.extents[0] is extent:  # it has no other replica
            self.counts.evicted_objects += 1
            self.counts.evicted_bytes += stored.size_bytes
            return self.unlink(stored, f"{EVICTED}{reason}", now)
        tier = extent.segment.tier
        leaving = stored.complete(tier)
        staying = [e for e in stored.complete() if e.segment.tier is not tier and not e.is_extra]
        if not leaving:
            return 0
        if extent in leaving and len(leaving) > stored.policy.num_replicas:
            leaving, staying = [extent], stored.extents  # more than its writer asked for
        is_promised = tier is Tier.SSD and stored.policy.is_durable
        if not staying or is_promised:
            self.counts.evicted_objects += 1
            self.counts.evicted_bytes += stored.size_bytes
            if self.segments.num_devices and tier is not Tier.DEVICE:
                for one in stored.complete(Tier.DEVICE):  # its bytes do not count as released
                    self.drop_extent(stored, one, f"{EVICTED}{reason}", now)
            return self.unlink(stored, f"{EVICTED}{reason}", now)
        self.counts.evicted_replicas += len(leaving)
        return sum(self.drop_extent(stored, one, f"{EVICTED}{reason}", now) for one in leaving)

    # Objects

    def begin(
        self,
        key: ObjectKey,
        put_id: int,
        size_bytes: int,
        chunk_bytes: int,
        extents: list[Extent],
        write_until: float,
    ) -> StoredObject:
        """Put-start: ``extents`` have been allocated for the object."""
        stored = self.objects.begin(key, put_id, size_bytes, chunk_bytes, extents, write_until)
        for extent in extents:
            extent.held_until = write_until + self.settings.grace_s
            self.tenants.charge(stored, extent)
        self.records.append(_held(extents, size_bytes))
        self._wake(write_until, stored, None)
        return stored

    def begin_row(
        self,
        keys: list[ObjectKey],
        put_ids: list[int],
        size_bytes: int,
        chunk_bytes: int,
        segment: Segment,
        offsets: list[int],
        account: Account,
        write_until: float,
    ) -> list[StoredObject]:
        """Put-start of a tenant's objects of one size, each at one of these offsets: as ``begin`` for each,
        with one record and one timer for all."""
        held_until, row = write_until + self.settings.grace_s, list[StoredObject]()
        is_charged = segment.tier is Tier.MEMORY
        for key, put_id, offset in zip(keys, put_ids, offsets, strict=True):
            extent = Extent(segment, offset)
            extent.held_until, extent.is_charged = held_until, is_charged
            stored = self.objects.begin(key, put_id, size_bytes, chunk_bytes, [extent], write_until)
            stored.account = account
            row.append(stored)
        self.tenants.charge_row(account, segment, size_bytes, len(row))
        self.records.append(SpaceHeld([(segment.name, offset) for offset in offsets], size_bytes))
        self._wake(write_until, row, None)
        return row

    def show(self, stored: StoredObject, checksums: bytes, now: float) -> None:
        """Put-end: readable from now on, in place of what was readable under the key."""
        old = self.objects.readable.get(stored.key)
        if old is not None:
            self.counts.lost_objects += not old.is_visible  # for its readers it was missing already
            if stored.policy.is_durable:
                stored.before = self._set_aside(old, now)
            elif old.before is not None:
                before, old.before = old.before, None
                self.let_go(before, now)
            # The record of the new one implies it, so that a torn log can't lack both.
            self.unlink(old, "replaced by a newer put", now, is_recorded=False)
        self.objects.finish(stored, checksums, now)
        for extent in stored.extents:
            extent.held_until = 0.0  # its writer has finished
        self._add(stored, now)
        self.tombstones.pop(stored.key, None)
        if stored.before is None and self.keeps_records:
            self.records.append(record_of(stored))
        self.emit(ObjectShown(stored, now))

    def adopt(self, record: ObjectReadable, extents: list[Extent], now: float) -> StoredObject:
        """Enter an object of another master; its extents have been taken."""
        stored = self.objects.adopt(record, extents, now)
        for extent in extents:
            self.tenants.charge(stored, extent)
        self._add(stored, now)
        self.tombstones.pop(stored.key, None)
        return stored

    def _add(self, stored: StoredObject, now: float) -> None:
        """Enter ``stored``, which has become readable, in its account and the orders of eviction."""
        self.tenants.shown(stored)
        self.eviction.add(stored, now)
        group = stored.joint
        if group is not None and stored.is_hard_pinned and group.num_hard_pinned == 1:
            self._regrouped(group, now)

    def unlink(self, stored: StoredObject, reason: str, now: float, *, is_recorded: bool = True) -> int:
        """Make the object unfindable now, and release its space as soon as every promise is over.

        Returns the bytes that were released at once.
        """
        self.keeps_deadline = False
        was_readable, leased_until, joint = stored.is_readable, stored.leased_until, stored.joint
        extents, stored.extents = stored.extents, []
        for extent in extents:
            extent.segment.num_objects -= extent.is_complete
            self.eviction.left(stored, extent)
        self.objects.unlink(stored)
        if was_readable:
            self.tenants.hidden(stored)
            self.eviction.unlinked(stored)
            if joint is not None and stored.is_hard_pinned and not joint.num_hard_pinned:
                self._regrouped(joint, now)
            if is_recorded:
                self.records.append(ObjectGone(stored.key, stored.object_id))
        self.add_story(now, stored.key, "#{} unlinked: {}", stored.object_id, reason)
        released_bytes = 0
        for extent in extents:
            released_bytes += self._rest(stored, extent, leased_until, now)
        if was_readable:
            self._removed(stored, extents, reason, now)
            self._may_free_its_parent(stored, now)
            self.emit(ObjectRemoved(stored, now))
            before, stored.before = stored.before, None
            if before is not None:
                self._bring_back(before, now)
        return released_bytes

    # A durable object is replaced by one that is not durable yet: put-end is answered only when the new one
    # is on SSD too, so until then the old one is what was acknowledged. Readers see the new one, but its
    # record is not written, and the old one's bytes on SSD stay taken: if the new one is lost, the old one is
    # restored.

    def _set_aside(self, old: StoredObject, now: float) -> StoredObject | None:
        """Separate from ``old``, about to be unlinked, the part to keep. None if it is not durable."""
        if old.before is not None:
            before, old.before = old.before, None  # that one is durable: ``old`` never was
            return before
        kept = old.complete(Tier.SSD)
        if not kept:
            return None
        record = record_of(old)
        for extent in old.complete():
            if extent not in kept:
                self.records.append(ReplicaGone(old.key, old.object_id, extent.segment.name))
        for extent in kept:
            extent.segment.num_objects -= 1
            self.eviction.left(old, extent)
            old.extents.remove(extent)
        before = StoredObject(old.key, old.object_id, 0, old.size_bytes, old.chunk_bytes, kept, 0.0)
        before.state, before.account = ObjectState.UNLINKED, old.account
        before.lease_until = old.leased_until
        before.kept = record
        for extent in kept:
            extent.segment.holders[extent.offset] = before
        return before

    def confirm(self, stored: StoredObject, now: float) -> None:
        """``stored`` is durable: what it replaced is removed finally."""
        before, stored.before = stored.before, None
        if before is not None:
            self.records.append(record_of(stored))
            self.let_go(before, now)

    def let_go(self, before: StoredObject, now: float) -> None:
        """Remove an object that was set aside, once it can't be restored any longer."""
        extents, before.extents = before.extents, []
        self._removed(before, extents, "replaced by a newer put", now)
        for extent in extents:
            self._rest(before, extent, before.lease_until, now)

    def _bring_back(self, before: StoredObject, now: float) -> None:
        """Restore the old object: the new one was lost before it was acknowledged."""
        extents, before.extents = before.extents, []
        assert before.kept is not None, before
        if not extents:
            # Its node is away, and may return: the object that replaced it was never acknowledged.
            self.tombstones[before.key] = before.object_id, self.cleared_of(before.key)
            return
        self.adopt(before.kept, extents, now).lease_until = max(now, before.lease_until)
        self.add_story(now, before.key, "#{} is back: its successor was lost", before.object_id)

    def forget_before(self, key: ObjectKey, object_id: int) -> None:
        """Accept what a returning node holds under ``key`` only from this id on."""
        if key in self.objects.readable:
            return  # the readable object's id is the limit
        cleared = self.cleared_of(key)
        before, since = self.tombstones.pop(key, (0, 0))
        # An older entry is no limit for an object that was being written when its tenant was emptied.
        self.tombstones[key] = max(object_id, before if since == cleared else 0), cleared
        if len(self.tombstones) > MAX_TOMBSTONES:
            del self.tombstones[next(iter(self.tombstones))]

    def remove_absent(self, key: ObjectKey) -> None:
        """Keep an unreadable ``key`` removed: it may be on a node that is away, and must not come back with
        it, to this master or another."""
        before = self.objects.last_id + 1
        if self.news_of(key) < before:
            self.forget_before(key, before)
            self.records.append(ObjectGone(key, 0, before))

    def clear_before(self, tenant: str, object_id: int) -> None:
        """The same as ``forget_before`` for all keys of a tenant."""
        object_id = max(object_id, self.cleared.get(tenant, 0))  # of two removals the later may end first
        self.cleared[tenant] = object_id
        self.records.append(AllRemoved(tenant, object_id))

    def news_of(self, key: ObjectKey) -> int:
        """The least object id that is new for ``key``, which is not readable."""
        before, since = self.tombstones.get(key, (0, 0))
        cleared = self.cleared_of(key)
        return before if since == cleared else max(before, cleared)

    def cleared_of(self, key: ObjectKey) -> int:
        """The least object id given out after the key's tenant was last emptied; 0 if it never was."""
        return self.cleared.get(split_scoped(key)[0], 0) if self.cleared else 0

    def is_news(self, key: ObjectKey, object_id: int) -> bool:
        """Whether an earlier master's object is newer than all that is known of ``key``.

        An object with an id from this master is newer than that, whatever the numbers are: an earlier
        master's clock may have been ahead.
        """
        stored, objects = self.objects.readable.get(key), self.objects
        least = self.news_of(key) if stored is None else stored.object_id + 1
        is_ours = objects.is_own(least) or objects.is_own(least - 1)
        return object_id >= least and (not is_ours or objects.is_own(object_id))

    def is_later(self, object_id: int) -> bool:
        """Whether its record may have been lost with the end of an earlier master's records."""
        return object_id > self.known_until and not self.objects.is_own(object_id)

    def is_lost(self, object_id: int) -> bool:
        """Whether its node was lost and it was not removed."""
        return object_id in self.lost

    # Replicas

    def add_extent(self, stored: StoredObject, segment: Segment, now: float, until: float) -> Extent | None:
        """Allocate one more replica on ``segment``, to be written until ``until``; None if it does not fit.

        A replica that is not complete by then is dropped.
        """
        assert stored.is_readable, stored
        if stored.on(segment) is not None or not segment.takes_objects(now):
            return None
        if not self.make_room(segment, stored.size_bytes, now, spare=stored):
            return None
        if stored.state is ObjectState.UNLINKED:
            return None  # evicted with its group, to make room for its own copy
        offset = segment.allocator.allocate(stored.size_bytes)
        assert offset is not None, segment
        extent = Extent(segment, offset)
        extent.write_until = until
        extent.held_until = until + self.settings.grace_s
        stored.extents.append(extent)
        self.records.append(_held([extent], stored.size_bytes))
        segment.holders[offset] = stored
        self.tenants.charge(stored, extent)
        stored.refresh()
        self._wake(until, stored, extent)
        return extent

    def complete_extent(self, stored: StoredObject, extent: Extent, now: float) -> None:
        """The replica is written: readers may have it from now on."""
        assert stored.is_readable and extent in stored.extents and not extent.is_complete, (stored, extent)
        extent.is_complete = True
        extent.segment.num_objects += 1
        extent.held_until = 0.0
        stored.refresh()
        self._changed(stored, now)
        self.records.append(ReplicaAdded(stored.key, stored.object_id, extent.segment.name, extent.offset))
        self.add_story(now, stored.key, "#{} readable on {} too", stored.object_id, extent.segment.name)
        self.emit(ReplicaCompleted(stored, extent, now))

    def adopt_extent(self, stored: StoredObject, extent: Extent, now: float) -> None:
        """Enter a replica of another master; its space has been taken."""
        assert stored.on(extent.segment) is None and extent.is_complete, (stored, extent)
        stored.extents.append(extent)
        extent.segment.num_objects += 1
        extent.segment.holders[extent.offset] = stored
        self.tenants.charge(stored, extent)
        stored.refresh()
        self._changed(stored, now)

    def drop_extent(
        self, stored: StoredObject, extent: Extent, reason: str, now: float, *, is_recorded: bool = True
    ) -> int:
        """Remove that replica, and the object with its last complete one.

        Returns the bytes that were released at once.
        """
        assert extent in stored.extents, (stored, extent)
        is_readable = stored.is_readable
        left = [e for e in stored.extents if e is not extent and e.is_complete is is_readable]
        if not left:
            return self.unlink(stored, reason, now)
        self._cut(stored, extent, now)
        if extent.is_complete and is_recorded:
            self.records.append(ReplicaGone(stored.key, stored.object_id, extent.segment.name))
        name = extent.segment.name
        self.add_story(now, stored.key, "#{} left {}: {}", stored.object_id, name, reason)
        leased_until = stored.leased_until if extent.is_complete else 0.0
        released_bytes = self._rest(stored, extent, leased_until, now)
        if is_readable:
            self._removed(stored, [extent], reason, now)
        return released_bytes

    def drop_extras(self, stored: StoredObject, reason: str, now: float) -> None:
        """Remove the object if only extra replicas are left after others were removed."""
        if stored.is_readable and not stored.lasting():
            self.unlink(stored, reason, now)

    def hold(self, extent: Extent, until: float) -> None:
        """Protect a replica that a task reads: its space is not reused before ``until``, nor is it
        evicted."""
        extent.held_until = max(extent.held_until, until)

    def pin(self, stored: StoredObject, *, is_hard: bool, soft_until: float, now: float) -> None:
        """Pin or unpin the object; ``soft_until`` 0 means no soft pin."""
        self.pin_all([stored], is_hard=is_hard, soft_until=soft_until, now=now)

    def pin_all(self, objects: list[StoredObject], *, is_hard: bool, soft_until: float, now: float) -> None:
        """The same for many objects: a group is visited once, and only if its own pins have changed."""
        groups: dict[str, tuple[Group, bool, float]] = {}  # with each group's pins before
        shorter: dict[str, Group] = {}
        for stored in objects:
            group = stored.joint
            if stored.is_hard_pinned is not is_hard:
                self.records.append(ObjectPinned(stored.key, stored.object_id, is_hard))
            if group is None:
                stored.is_hard_pinned, stored.soft_pin_until = is_hard, soft_until
                self._changed(stored, now)
                continue
            groups.setdefault(group.name, (group, bool(group.num_hard_pinned), group.soft_pin_until))
            if group.pin(stored, is_hard=is_hard, soft_until=soft_until):
                shorter[group.name] = group
        for group in shorter.values():
            group.shorten()
        for group, was_hard, was_until in groups.values():
            if bool(group.num_hard_pinned) is not was_hard or group.soft_pin_until < was_until:
                self._regrouped(group, now)

    def renew(self, stored: StoredObject, lease_until: float) -> None:
        """Renew a reader's lease, which may be on a replica that was removed."""
        stored.lease(lease_until)
        for extent in stored.resting:
            extent.release_at = max(extent.release_at, lease_until)
        # A successor does not know this space is in use: all of it, while the object's record is withheld.
        if stored.before is not None:
            self.records.append(_held([*stored.resting, *stored.extents], stored.size_bytes))
        elif stored.resting:
            places = [(extent.segment.name, extent.offset) for extent in stored.resting]
            self.records.append(SpaceHeld(places, stored.size_bytes, stored.key, stored.object_id))

    def _removed(self, stored: StoredObject, extents: list[Extent], reason: str, now: float) -> None:
        """Note and report that these replicas of an object that was readable were removed."""
        is_readable = stored.is_readable
        for extent in extents:
            if not is_readable:
                # A lost object may come back itself, a removed one not. An incomplete copy implies neither.
                is_removed = extent.is_complete and extent.segment.is_mounted
                self.forget_before(stored.key, stored.object_id + is_removed)
                if self.is_doubted and not extent.segment.is_mounted:
                    self.lost[stored.object_id] = None
            self.emit(ReplicaRemoved(stored, extent, reason, now, self.is_replaying))

    def _cut(self, stored: StoredObject, extent: Extent, now: float) -> None:
        """Remove ``extent`` from an object that has others."""
        extent.segment.num_objects -= extent.is_complete
        stored.extents.remove(extent)
        self.eviction.left(stored, extent)
        if stored.is_readable:
            stored.refresh()
            if extent.is_complete:
                self._changed(stored, now)
                self._may_free_its_parent(stored, now)

    def _changed(self, stored: StoredObject, now: float) -> None:
        """Update the orders of eviction after its replicas or pins have changed, or a descendant has left."""
        self.eviction.changed(stored, now)
        stored.account.changed(stored)

    def _regrouped(self, group: Group, now: float) -> None:
        """The same after a group was pinned hard or unpinned, or its soft pin has become shorter. (That one
        has become longer is noticed when a member surfaces.)"""
        for member in group.members.values():
            self._changed(member, now)

    def _may_free_its_parent(self, stored: StoredObject, now: float) -> None:
        parent = self.objects.readable.get(self.eviction.parent_of(stored))
        if parent is not None:
            self._changed(parent, now)

    def _rest(self, stored: StoredObject, extent: Extent, leased_until: float, now: float) -> int:
        """Release the space of a removed replica, now or when the last promise about it has run out."""
        segment = extent.segment
        if self.is_replaying or segment.is_draining or not segment.is_mounted:
            self.tenants.discharge(stored, extent)
        if not segment.is_mounted:
            return 0
        extent.release_at = max(extent.held_until, leased_until)
        self.tenants.rests(stored, extent)
        stored.resting.append(extent)
        if extent.release_at <= now:
            return self._release(stored, extent)
        self._wake(extent.release_at, stored, extent)
        return 0

    def rest(
        self,
        extents: list[Extent],
        size_bytes: int,
        until: float,
        *,
        put_id: int = 0,
        of: StoredObject | None = None,
    ) -> None:
        """Quarantine extents of ``size_bytes`` each: promised space without a replica, or former replicas of
        ``of``.

        Args:
            put_id: the put that it was promised to; 0: by an earlier master.
        """
        if of is None:
            of = StoredObject("", 0, put_id, size_bytes, size_bytes, [], 0.0)
            of.state = ObjectState.UNLINKED
        of.resting += extents
        for extent in extents:
            extent.is_resting, extent.is_complete, extent.release_at = True, False, until
            extent.segment.holders[extent.offset] = of
            self._wake(until, of, extent)

    def preallocate(self, extents: list[Extent], size_bytes: int, until: float) -> None:
        """Enter allocated space that a writer may write until then, for objects to be named later."""
        self.records.append(_held(extents, size_bytes))
        self.rest(extents, size_bytes, until + self.settings.grace_s, put_id=1)

    def begin_written(
        self, key: ObjectKey, put_id: int, size_bytes: int, given: Extent, now: float
    ) -> StoredObject:
        """Begin an object whose bytes are in preallocated space. The caller shows it in the same step."""
        segment, offset = given.segment, given.offset
        segment.holders[offset].resting.remove(given)
        segment.allocator.trim(offset, size_bytes)
        stored = self.objects.begin(key, put_id, size_bytes, size_bytes, [Extent(segment, offset)], now)
        self.tenants.charge(stored, stored.extents[0])
        return stored

    def held(self, segment: Segment, offset: int) -> SpaceHeld | None:
        """The record of the space there, if it is promised without being a replica that ``acknowledged``
        has."""
        stored = segment.holders.get(offset)
        if stored is None:
            return None
        extent = stored.on(segment)
        is_recorded = extent is not None and extent.offset == offset and extent.is_complete
        if stored.before is not None:
            return _held_at(segment, offset, stored.size_bytes)
        if is_recorded:
            return None
        rests = any(one.segment is segment and one.offset == offset for one in stored.resting)
        whose = (stored.key, stored.object_id) if rests and stored.is_readable else ("", 0)
        return SpaceHeld([(segment.name, offset)], stored.size_bytes, *whose)

    def release(self, segment: Segment, offset: int) -> None:
        """Free resting space at once: another master has allocated it again."""
        stored = segment.holders[offset]
        extent = next(e for e in stored.resting if e.segment is segment and e.offset == offset)
        self._release(stored, extent)

    def _release(self, stored: StoredObject, extent: Extent) -> int:
        stored.resting.remove(extent)
        self.tenants.discharge(stored, extent)
        del extent.segment.holders[extent.offset]
        return extent.segment.allocator.free(extent.offset)

    def follow(self, segment: Segment, mount: Mount) -> None:
        """Another process serves the same content: its replicas have new addresses."""
        self.segments.follow(segment, mount)
        for stored in segment.holders.values():
            if stored.is_readable:
                stored.refresh()

    def empty(self, segment: Segment, reason: str, now: float, back: Segment | None = None) -> None:
        """Remove the objects of a segment that is gone; ``back``: that is about to report the same content,
        so that only what it does not report is lost."""
        assert not segment.is_mounted, segment
        self.records.append(SegmentGone(segment.name, segment.epoch))
        lost, segment.expected = segment.expected, []
        for stored in list(segment.holders.values()):
            for resting in [one for one in stored.resting if one.segment is segment]:
                stored.resting.remove(resting)
                self.tenants.discharge(stored, resting)
            extent = stored.on(segment)
            if extent is None:
                continue
            if stored.state is ObjectState.UNLINKED:
                stored.extents.remove(extent)  # it was set aside
                continue
            was_readable = stored.is_readable
            # SegmentGone implies the record of each.
            self.drop_extent(stored, extent, f"lost: {segment.name}, {reason}", now, is_recorded=False)
            if was_readable and not stored.is_readable:
                lost.append(stored.object_id)
        segment.holders.clear()
        self.eviction.forget(segment)
        if back is not None:
            back.expected, lost = lost, []
        self.counts.lost_objects += len(lost)
        self.note("segment_gone", segment, is_warning=bool(lost), reason=reason, num_lost=len(lost))
        self.look_for_doubt()

    def look_for_doubt(self) -> None:
        """After a report or the loss of a node: recovery is complete if no other may know what is missing."""
        if self.is_doubted and not any(one.doubt for one in self.segments.mounted.values()):
            self.is_doubted = False
            self.lost = {}
            self.notes.append(OperatorEvent("recovery_complete", {"num_objects": len(self.objects.readable)}))

    # Time

    def _wake(self, instant: float, stored: StoredObject | list[StoredObject], extent: Extent | None) -> None:
        self.keeps_deadline = False
        heapq.heappush(self._timers, (instant, next(self._order), stored, extent))

    def deadline(self) -> float | None:
        soonest = self.segments.deadline()
        if self._timers and (soonest is None or self._timers[0][0] < soonest):
            soonest = self._timers[0][0]
        for clock in self.clocks:
            instant = clock.deadline()
            if instant is not None and (soonest is None or instant < soonest):
                soonest = instant
        return soonest

    def expire(self, now: float) -> None:
        """Handle what is due: late writers, resting space, silent nodes."""
        self.end_rests(now)
        deadline = self.segments.deadline()
        if deadline is not None and now >= deadline:
            silent, gone = self.segments.expire(now)
            for segment in silent:
                self.note("segment_suspected", segment, reason="no heartbeat")
            for segment in gone:
                self.empty(segment, "given up", now)
        for clock in self.clocks:
            instant = clock.deadline()
            if instant is not None and instant <= now:
                clock.expire(now)

    def end_rests(self, now: float) -> None:
        """Handle what is due of objects and their space, which is all that a standby may do."""
        while self._timers and self._timers[0][0] <= now:
            _, _, of, extent = heapq.heappop(self._timers)
            for stored in of if isinstance(of, list) else (of,):
                self._timer(stored, extent, now)

    def _timer(self, stored: StoredObject, extent: Extent | None, now: float) -> None:
        if extent is None:
            if stored.state is ObjectState.WRITING:
                self.counts.expired_puts += 1
                self.unlink(stored, "the writer missed its deadline", now)
        elif not extent.segment.is_mounted:
            pass
        elif extent.is_resting:
            if extent.release_at > now:  # renewed meanwhile
                self._wake(extent.release_at, stored, extent)
            elif extent in stored.resting:
                self._release(stored, extent)
        elif not extent.is_complete and stored.is_readable:
            self.drop_extent(stored, extent, "not written in time", now)

    # Logs

    def note(self, event: str, segment: Segment, *, is_warning: bool = False, **fields: Any) -> None:
        named = {"segment": segment.name, "host": segment.host, **fields}
        self.notes.append(OperatorEvent(event, named, is_warning))

    def add_story(self, now: float, key: ObjectKey, what: str, *of: object) -> None:
        if not key:
            return  # a request named a key that no object can have
        self._stories.append(key)
        self._lines.setdefault(key, []).append((now, what, of))
        if len(self._stories) > STORY_LINES:
            oldest = self._stories.popleft()
            lines = self._lines[oldest]
            del lines[0]
            if not lines:
                del self._lines[oldest]

    def story(self, key: str) -> list[str]:
        return [f"{at:.6f} {what.format(*of)}" for at, what, of in self._lines.get(key, ())]

    def _holders(self) -> list[StoredObject]:
        """All objects that have space, or whose space rests."""
        held = [one for segment in self.segments.mounted.values() for one in segment.holders.values()]
        return list({id(stored): stored for stored in held}.values())

    def check(self) -> None:
        self.segments.check()
        self.objects.check()
        assert not self.tombstones.keys() & self.objects.readable.keys(), "a readable key has no tombstone"
        self.eviction.check(self.objects.readable)
        self.tenants.check(self._holders())
        timed = {
            (id(stored), id(extent))
            for _, _, of, extent in self._timers
            for stored in (of if isinstance(of, list) else (of,))
        }
        for segment in self.segments.mounted.values():
            readable = [one.on(segment) for one in segment.holders.values() if one.is_readable]
            found = {id(extent) for extent in readable if extent is not None and extent.is_complete}
            assert segment.num_objects == len(found), segment
            for offset, stored in segment.holders.items():
                extents = [e for e in (*stored.extents, *stored.resting) if e.segment is segment]
                here = [extent for extent in extents if extent.offset == offset]
                assert len(here) == 1, stored
                assert here[0].is_resting is (here[0] in stored.resting), stored
                if stored.state is ObjectState.WRITING:
                    assert (id(stored), id(None)) in timed, f"{stored} never expires"
                elif here[0].is_resting or not here[0].is_complete:
                    assert (id(stored), id(here[0])) in timed, f"{stored} leaks"


def _held(extents: Iterable[Extent], size_bytes: int) -> SpaceHeld:
    return SpaceHeld([(extent.segment.name, extent.offset) for extent in extents], size_bytes)


def _held_at(segment: Segment, offset: int, size_bytes: int) -> SpaceHeld:
    return SpaceHeld([(segment.name, offset)], size_bytes)


def acknowledged(stored: StoredObject) -> ObjectReadable | ObjectGone:
    """The record of a readable object for a successor: the version of its key that was acknowledged.

    That is the object itself, or the durable one that it is to replace (``Catalog.show``), whose node may be
    away.
    """
    before = stored.before
    if before is None:
        return record_of(stored)
    assert before.kept is not None, before
    if not before.extents:
        return ObjectGone(before.key, 0, before.object_id)
    places = [(extent.segment.name, extent.offset) for extent in before.extents]
    return msgspec.structs.replace(before.kept, places=places)


def record_of(stored: StoredObject) -> ObjectReadable:
    assert stored.stored is not None
    return ObjectReadable(
        stored.key,
        stored.object_id,
        stored.size_bytes,
        stored.chunk_bytes,
        stored.stored.checksums,
        [(extent.segment.name, extent.offset) for extent in stored.complete()],
        stored.is_hard_pinned,
        stored.group,
        stored.parent,
        stored.data_type,
        stored.policy.num_replicas,
        stored.policy.is_durable,
    )


def record_of_segment(segment: Segment) -> SegmentMounted:
    size_bytes = segment.allocator.size_bytes
    where = (segment.host, segment.address, size_bytes, segment.descriptor)
    what = (segment.tier, segment.content_id, segment.node, segment.wants_report)
    return SegmentMounted(segment.name, segment.epoch, *where, *what)

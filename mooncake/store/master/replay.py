# SPDX-License-Identifier: Apache-2.0
"""Replay of another master's records into this one: after a restart, or while following a leader.

A record changes tables, allocators and orders just as the event that caused it, but makes no promise,
sends nothing and is not written down again. Leases are not in the records. So every object counts as
leased when it is removed and when this master begins to answer (``settle``), and space that was promised
to a writer (``SpaceHeld``) or given up by a reader rests as long as any promise lasts. Where the other
master has allocated such space again, it knew better, and the rest ends: records are applied in the
order in which they were made.

Records may come again (a snapshot that overlaps the log): the second time they change nothing.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from mooncake.store import messages as m
from mooncake.store.master.catalog import Catalog
from mooncake.store.master.log_records import (
    AllRemoved,
    Doubt,
    IdsGiven,
    LineBegan,
    ObjectGone,
    ObjectPinned,
    ObjectReadable,
    QuotaSet,
    Record,
    ReplicaAdded,
    ReplicaGone,
    SegmentGone,
    SegmentMounted,
    SpaceHeld,
)
from mooncake.store.master.objects import Extent, StoredObject
from mooncake.store.master.segments import Segment
from mooncake.types import ObjectKey


class LogReplay:
    """Applies records."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._resting: dict[str, list[int]] = {}
        """Offsets, in order, of space that rests or has rested, by segment."""
        self._unseen: dict[ObjectKey, int] = {}
        """Removed objects without a record of their put."""
        self._how: dict[type, Callable[[Any, float], None]] = {
            SegmentMounted: self._segment_mounted,
            SegmentGone: self._segment_gone,
            ObjectReadable: self._object_readable,
            ObjectGone: self._object_gone,
            ReplicaAdded: self._replica_added,
            ReplicaGone: self._replica_gone,
            ObjectPinned: self._object_pinned,
            SpaceHeld: self._space_held,
            LineBegan: self._line_began,
            QuotaSet: self._quota_set,
            AllRemoved: self._all_removed,
            IdsGiven: self._ids_given,
        }

    def apply(self, records: Sequence[Record], now: float) -> None:
        self._catalog.is_replaying = True
        for record in _without_kept(records):
            self._how[type(record)](record, now)
        self._catalog.is_replaying = False
        self._catalog.records = []
        self._catalog.notes = []

    def settle(self, now: float, doubt: Doubt) -> None:
        self._catalog.known_until = 0 if doubt is Doubt.ANY else self._catalog.objects.last_id
        self._catalog.is_doubted = doubt is not Doubt.NONE
        if doubt is Doubt.ANY:  # their records are missing, and they must not come back
            for key, object_id in self._unseen.items():
                self._catalog.forget_before(key, object_id + 1)
        self._unseen = {}
        self._catalog.segments.settle(now, doubt)
        # The leader whose snapshot this is may have been in doubt.
        self._catalog.is_doubted |= any(one.doubt for one in self._catalog.segments.mounted.values())
        self._catalog.look_for_doubt()
        lease_until = now + self._catalog.lease_bounds.lease_s
        for stored in self._catalog.objects.readable.values():
            stored.lease_until = max(stored.lease_until, lease_until)

    def _segment_mounted(self, record: SegmentMounted, now: float) -> None:
        fields = msgspec.structs.asdict(record)
        wants_report = fields.pop("wants_report")
        mount = m.Mount(**fields, rest_s=0.0)
        known = self._catalog.segments.mounted.get(record.segment)
        if known is not None and known.content_id == (mount.content_id or mount.epoch):
            self._catalog.follow(known, mount)
            known.wants_report = wants_report
            return
        if known is not None:
            self._catalog.segments.drop(known)
            self._catalog.empty(known, "another process took its name", now)
        self._catalog.segments.restore(mount, now).wants_report = wants_report

    def _segment_gone(self, record: SegmentGone, now: float) -> None:
        segment = self._catalog.segments.find(record.segment, record.epoch)
        if segment is not None:
            self._catalog.segments.drop(segment)
            self._catalog.empty(segment, "gone", now)

    def _object_readable(self, record: ObjectReadable, now: float) -> None:
        known = self._catalog.objects.readable.get(record.key)
        if known is not None and known.object_id == record.object_id:
            return
        if known is not None:
            self._unlink(known, "replaced by a newer put", now)
        taken: list[Extent] = []
        for name, offset in record.places:
            extent = self._taken(name, offset, record.size_bytes)
            if extent is not None:
                taken.append(extent)
        if taken:
            self._catalog.adopt(record, taken, now)
            self._catalog.add_story(now, record.key, "restored as #{} of {}", record.object_id, record.places)

    def _object_gone(self, record: ObjectGone, now: float) -> None:
        stored = self._find(record.key, record.object_id)
        if stored is not None:
            self._unlink(stored, "gone", now)
        elif record.object_id:
            self._unseen[record.key] = record.object_id
        self._catalog.objects.saw(max(record.object_id, record.before - 1))
        if record.before and record.key not in self._catalog.objects.readable:
            self._catalog.forget_before(record.key, record.before)

    def _replica_added(self, record: ReplicaAdded, now: float) -> None:
        stored = self._find(record.key, record.object_id)
        segment = self._catalog.segments.mounted.get(record.segment)
        if stored is None or segment is None or stored.on(segment) is not None:
            return
        extent = self._taken(record.segment, record.offset, stored.size_bytes)
        if extent is not None:
            self._catalog.adopt_extent(stored, extent, now)

    def _replica_gone(self, record: ReplicaGone, now: float) -> None:
        stored = self._find(record.key, record.object_id)
        segment = self._catalog.segments.mounted.get(record.segment)
        extent = None if stored is None or segment is None else stored.on(segment)
        if stored is not None and extent is not None:
            self._catalog.hold(extent, now + self._catalog.lease_bounds.rest_s)
            self._catalog.drop_extent(stored, extent, "gone", now)
            self._rests(extent)
            if not stored.is_readable:
                # It has other replicas, which the records lack: it is not removed.
                self._catalog.tombstones[stored.key] = stored.object_id, self._catalog.cleared_of(stored.key)

    def _object_pinned(self, record: ObjectPinned, now: float) -> None:
        stored = self._find(record.key, record.object_id)
        if stored is not None:
            self._catalog.pin(stored, is_hard=record.is_hard_pinned, soft_until=0.0, now=now)

    def _quota_set(self, record: QuotaSet, now: float) -> None:
        readable = self._catalog.objects.readable.values()
        self._catalog.tenants.set_quota(record.tenant, record.size_bytes, readable)

    def _space_held(self, record: SpaceHeld, now: float) -> None:
        until = now + self._catalog.lease_bounds.rest_s
        for name, offset in record.places:
            extent = self._taken(name, offset, record.size_bytes)
            if extent is not None:
                owner = self._find(record.key, record.object_id) if record.key else None
                self._catalog.rest([extent], record.size_bytes, until, of=owner)
                self._rests(extent)

    def _line_began(self, record: LineBegan, _: float) -> None:
        self._catalog.segments.line = record.line
        self._catalog.lease_bounds.applied(record)

    def _unlink(self, stored: StoredObject, reason: str, now: float) -> None:
        extents = list(stored.extents)
        stored.lease_until = now + self._catalog.lease_bounds.rest_s
        self._catalog.unlink(stored, reason, now)
        for extent in extents:
            self._rests(extent)

    def _rests(self, extent: Extent) -> None:
        offsets = self._resting.setdefault(extent.segment.name, [])
        at = bisect.bisect_left(offsets, extent.offset)
        if offsets[at : at + 1] != [extent.offset]:
            offsets.insert(at, extent.offset)

    def _ids_given(self, record: IdsGiven, _: float) -> None:
        self._catalog.objects.saw(record.last)

    def _all_removed(self, record: AllRemoved, _: float) -> None:
        cleared = self._catalog.cleared
        cleared[record.tenant] = max(record.before, cleared.get(record.tenant, 0))
        self._catalog.objects.saw(record.before - 1)

    def _find(self, key: ObjectKey, object_id: int) -> StoredObject | None:
        stored = self._catalog.objects.readable.get(key)
        return stored if stored is not None and stored.object_id == object_id else None

    def _taken(self, name: str, offset: int, size_bytes: int) -> Extent | None:
        """Take that space; None where the segment is gone or another object has it."""
        segment = self._catalog.segments.mounted.get(name)
        if segment is None:
            return None
        if not segment.allocator.take(offset, size_bytes):
            self._end_rests(segment, offset, offset + size_bytes)
            if not segment.allocator.take(offset, size_bytes):
                return None
        return Extent(segment, offset, is_complete=True)

    def _end_rests(self, segment: Segment, start: int, end: int) -> None:
        """End the rest of all space in that range."""
        offsets = self._resting.get(segment.name, [])
        at = bisect.bisect_right(offsets, start)
        while at and not _rests_at(segment, offsets[at - 1]):
            at -= 1  # space that has ended its rest may lie within space that rests
            del offsets[at]
        at = max(0, at - 1)
        while at < len(offsets) and offsets[at] < end:
            offset = offsets[at]
            if offset + segment.allocator.allocations.get(offset, 0) <= start:
                at += 1
                continue
            del offsets[at]
            if _rests_at(segment, offset):
                self._catalog.release(segment, offset)


def _rests_at(segment: Segment, offset: int) -> bool:
    holder = segment.holders.get(offset)
    return holder is not None and any(e.offset == offset and e.segment is segment for e in holder.resting)


def _without_kept(records: Sequence[Record]) -> Iterable[Record]:
    """Skip promises of space that were fulfilled: the space is the object's by now.

    No other object had that space in between. In a log this is every second record, and applying the
    promise only to end it again would be most of the work.
    """
    held: dict[tuple[str, int], tuple[int, SpaceHeld]] = {}
    """By first place: the number and the record of its last promise."""
    kept: dict[int, None] = {}
    for number, record in enumerate(records):
        if type(record) is SpaceHeld:
            if record.places:
                held[record.places[0]] = number, record
        elif type(record) is ObjectReadable and held and record.places:
            of, promise = held.pop(record.places[0], (0, None))
            if (
                promise is not None
                and promise.places == record.places
                and promise.size_bytes == record.size_bytes
            ):
                kept[of] = None
    return (record for number, record in enumerate(records) if number not in kept) if kept else records

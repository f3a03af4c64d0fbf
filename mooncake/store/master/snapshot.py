# SPDX-License-Identifier: Apache-2.0
"""State of a master as records: its snapshot, and the replay of another master's records into this one.

**Snapshot.** Nothing else defines what belongs to a master's state. Compaction of the log, a new standby, a
restart, the simulator and the tests all take it from here, so none of them can know less than another. It
consists of: the line of masters, segments, quotas, tenants that were emptied, for each key the version that
was acknowledged, which old versions of a key are out of date, and space that is promised without being a
replica. Leases and soft pins are not part of it, because a successor assumes the longest ones that could
exist; and jobs end with the master that has them (``jobs.py``).

A snapshot is taken in pieces, because neither a standby nor a log may block the master for as long as it
takes to write down a million objects. Records made meanwhile go between the pieces, except those about a key
that is still to come, whose piece will include them. So at every instant the snapshot is the master's state
without the keys still to come. Then comes the space that was promised, and last, the largest id that was
given out: a snapshot without that record was cut off, and objects that it lacks are not removed for that
reason.

**Replay** is done after a restart, or while following a leader. A record changes tables, allocators and
orders just as the event that caused it, but makes no promise, sends nothing and is not written down again.
Leases are not in the records. So every object counts as leased when it is removed and when this master begins
to answer (``settle``), and space that was promised to a writer (``SpaceHeld``) or given up by a reader rests
as long as any promise lasts. Where the other master has allocated such space again, it knew better, and the
rest ends: records are applied in the order in which they were made. Records may come again (a snapshot that
overlaps the log): the second time they change nothing.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from mooncake.store import messages as m
from mooncake.store.master.catalog import Catalog, acknowledged, record_of_segment
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

ItemT = TypeVar("ItemT")

OBJECTS_PER_PIECE = 1000
"""Objects copied at a time; takes a few milliseconds."""
NEVER = (0, -1)
MAX_RESTED = 1000
"""Offsets of one segment that are kept, beyond twice those that rested when released ones last went."""


class Snapshot:
    """A snapshot of ``catalog`` that begins now."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        segments = catalog.segments
        self._head: list[Record] = [catalog.lease_bounds.record(segments.line)]
        self._head += [record_of_segment(one) for one in segments.mounted.values()]
        self._head += catalog.tenants.records()
        self._head += [AllRemoved(tenant, before) for tenant, before in catalog.cleared.items()]
        self._keys = list(reversed(catalog.objects.readable))
        self._to_come = catalog.objects.readable.copy()  # much faster than ``dict.fromkeys`` with millions
        self._tombstones = list(reversed(catalog.tombstones))
        """Keys of which only the limit of outdated versions is recorded. Their order does not matter: later
        records of them say the same or more."""
        self._segments: list[Segment] | None = None
        """Segments whose promised space is still to be recorded; None before that begins, after the last key.
        What is promised or given up later has records of its own."""
        self._offsets: list[int] = []
        """Remaining offsets of the last of them."""
        self._is_ended = False

    @property
    def is_over(self) -> bool:
        return self._is_ended

    def piece(self, count: int = OBJECTS_PER_PIECE) -> list[Record]:
        """The next records of the snapshot."""
        records, self._head = self._head, []
        if self._keys:
            for key in _taken(self._keys, count):
                del self._to_come[key]
                self._record_key(key, records)
        elif self._tombstones:
            for key in _taken(self._tombstones, count):
                if key not in self._catalog.objects.readable:
                    self._record_key(key, records)
        else:
            self._record_held(10 * count, records)
            if not self._segments:
                self._is_ended = True
                records.append(IdsGiven(self._catalog.objects.last_id))
        return records

    def _record_key(self, key: ObjectKey, records: list[Record]) -> None:
        catalog = self._catalog
        stored = catalog.objects.readable.get(key)
        if stored is not None:
            records.append(acknowledged(stored))
        elif catalog.tombstones.get(key, NEVER)[1] == catalog.cleared_of(key):
            records.append(ObjectGone(key, 0, catalog.news_of(key)))

    def _record_held(self, count: int, records: list[Record]) -> None:
        if self._segments is None:
            self._segments = list(reversed(self._catalog.segments.mounted.values()))
            self._offsets = self._offsets_of_next()
        if not self._segments:
            return
        segment = self._segments[-1]
        for offset in _taken(self._offsets, count):
            held = self._catalog.held(segment, offset) if segment.is_mounted else None
            if held is not None:
                records.append(held)
        if not self._offsets:
            self._segments.pop()
            self._offsets = self._offsets_of_next()

    def _offsets_of_next(self) -> list[int]:
        return list(reversed(self._segments[-1].holders)) if self._segments else []

    def between(self, records: list[Record]) -> list[Record]:
        """The part of ``records``, just written down, that belongs after the pieces so far."""
        if not self._to_come:
            return records
        return [record for record in records if getattr(record, "key", None) not in self._to_come]

    def __repr__(self) -> str:
        return f"<Snapshot [{len(self._keys)} objects to come]>"


def _taken(items: list[ItemT], count: int) -> list[ItemT]:
    """Remove the last ``count`` items from the list; returns them, the last one first."""
    taken = items[-count:]
    del items[-count:]
    taken.reverse()
    return taken


class LogReplay:
    """Applies records."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._resting: dict[str, list[int]] = {}
        """Offsets, in order, of space that rests, by segment; and of a limited amount that has rested."""
        self._limits: dict[str, int] = {}
        """Number of those offsets with which released ones are dropped, by segment. It does not grow with the
        number of objects: an insertion among millions would take longer than the rest of a record."""
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
        self._catalog.known_until = 0 if doubt is Doubt.ANY else self._catalog.objects.largest_seen
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
            self._resting.pop(segment.name, None)
            self._limits.pop(segment.name, None)

    def _object_readable(self, record: ObjectReadable, now: float) -> None:
        self._catalog.objects.saw(record.object_id)
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
            if len(offsets) > self._limits.get(extent.segment.name, MAX_RESTED):
                offsets[:] = [one for one in offsets if _rests_at(extent.segment, one)]
                self._limits[extent.segment.name] = MAX_RESTED + 2 * len(offsets)

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
    """By place: the number and the record of its last promise."""
    num_left: dict[int, int] = {}
    """By number of a promise: how many of its places, of one object or several, are not fulfilled."""
    kept: dict[int, None] = {}
    for number, record in enumerate(records):
        if type(record) is SpaceHeld:
            num_left[number] = len(record.places)
            for place in record.places:
                held[place] = number, record
        elif type(record) is ObjectReadable and held:
            for place in record.places:
                of, promise = held.pop(place, (0, None))
                if promise is not None and promise.size_bytes == record.size_bytes:
                    num_left[of] -= 1
                    if not num_left[of]:
                        kept[of] = None
    return (record for number, record in enumerate(records) if number not in kept) if kept else records

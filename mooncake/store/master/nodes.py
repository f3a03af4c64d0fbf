# SPDX-License-Identifier: Apache-2.0
"""The master's handlers for nodes: segments are mounted, served and unmounted, and their content is reported.

A report on a segment whose content this master does not know is trusted: that is how an index is rebuilt
that was lost with its master. Of two contents of one key the newer has the larger object id, but an id of
this master is newer than all ids of earlier ones (``catalog.is_news``). On a segment whose content it knows,
the master is the authority, and the report updates the node.

A master that read another's records knows what these contain. They may lack their end, or, after damage,
any part (``log_records.Doubt``). What a node holds is never discarded for that reason: an object whose id is
beyond the records is entered, after damage every object that the records don't list as removed, and where
they have something else in its place, the node is right.
"""

from __future__ import annotations

from mooncake.errors import Refusal
from mooncake.rpc.wire import Failure
from mooncake.store import messages as m
from mooncake.store.allocator import ALIGNMENT_BYTES, PAGE_BYTES
from mooncake.store.master.catalog import Catalog, record_of_segment
from mooncake.store.master.catalog_events import ReplicaCompleted
from mooncake.store.master.effects import OperatorEvent, Received
from mooncake.store.master.log_records import Doubt, ObjectReadable, ReplicaAdded
from mooncake.store.master.objects import MAX_ID, Extent, StoredObject, check_shape, is_of, split_scoped
from mooncake.store.master.segments import Segment
from mooncake.store.master.tasks import Tasks, entry_of
from mooncake.types import Tier

MAX_REST_S = 3600.0
END_OF_ADDRESSES = 1 << 64
INCOMPLETE = (
    "objects are not in the earlier master's records: its oplog is an older copy, or lost some of them"
)
BETWEEN_REPORTS_S = 5.0
"""How long the next part of a report may take before memory is allocated without it."""


class NodeRequests:
    """Answers Mount, ReportContents, Heartbeat, Unmount and DescribeSegments."""

    def __init__(self, catalog: Catalog, tasks: Tasks) -> None:
        self._catalog = catalog
        self._tasks = tasks

    def mount(self, message: m.Mount, event: Received, now: float) -> m.Mounted:
        settings = self._catalog.settings
        refusal = _check_mount(message, self._largest_id)
        before = self._catalog.segments.mounted.get(message.segment)
        epoch = None if before is None else before.epoch
        outcome = refusal or self._catalog.segments.mount(message, event.connection, now)
        if isinstance(outcome, Refusal):
            fields = {"segment": message.segment, "reason": str(outcome)}
            self._catalog.notes.append(OperatorEvent("mount_refused", fields))
            return m.Mounted(outcome, 0, settings.heartbeat_s, message.rest_s)
        segment, replaced = outcome
        is_back = segment is before
        if replaced is not None:
            why = "another process took its name"
            if replaced.tier is Tier.SSD and replaced.holders:
                # Its node can't know this: an empty folder is what it finds at its first start, too.
                why += ", and its SSD folder has other content: is the disk mounted?"
            has_content = segment.wants_report and replaced.content_id == segment.content_id
            if has_content:
                why = f"its content came back as {segment.name}"
            self._catalog.empty(replaced, why, now, segment if has_content else None)
        self._catalog.objects.ids_above(message.largest_id)
        if is_back and segment.epoch != epoch:
            self._rebased(segment, now)
        if not is_back or segment.epoch != epoch:
            self._catalog.records.append(record_of_segment(segment))
        num_objects = sum(
            stored.is_readable and stored.on(segment) is not None for stored in segment.holders.values()
        )
        what = "segment_back" if is_back else "segment_mounted"
        rest_s = max(0.0, segment.rests_until - now)
        self._catalog.note(what, segment, num_objects=num_objects, rest_s=rest_s)
        what_next = (segment.wants_report, self._catalog.segments.line, self._catalog.objects.last_id)
        directory = (settings.cluster_id, settings.root_fs_dir, settings.root_fs_size_bytes)
        return m.Mounted(None, num_objects, settings.heartbeat_s, settings.rest_s, *what_next, *directory)

    def _rebased(self, segment: Segment, now: float) -> None:
        """Another process serves the content: its objects are readable at other addresses."""
        self._tasks.lost(segment, f"the process that served {segment.name} is gone", now)
        for stored in segment.holders.values():
            if stored.is_readable:
                stored.refresh()
                self._catalog.add_story(now, stored.key, "#{} is back on {}", stored.object_id, segment.name)

    @property
    def _largest_id(self) -> int:
        """The largest object id that a node may report."""
        return max(MAX_ID, self._catalog.objects.last_id)

    def report(self, message: m.ReportContents, event: Received, now: float) -> m.Reported | Failure:
        segment = self._catalog.segments.find(message.segment, message.epoch)
        if segment is None:
            return Failure("not_found", f"segment {message.segment!r} is not mounted; mount it first")
        self._catalog.segments.reporting(segment, event.connection, now)
        settings = self._catalog.settings
        if segment.wants_report and segment.doubt is not Doubt.END:
            # Any part of it may have been promised; and a report in progress keeps its space. On an SSD
            # only its node's process writes: where that is a new one, leases of readers are what is left.
            is_first = message.entries and not segment.reported
            has_no_writers = segment.tier is Tier.SSD and segment.is_fresh
            promised_s = self._catalog.lease_bounds.lease_s if has_no_writers else settings.rest_s
            rest_s = promised_s if is_first else 0.0 if message.is_last else BETWEEN_REPORTS_S
            segment.rests_until = max(segment.rests_until, now + rest_s)
        unwanted, num_before = list[int](), self._catalog.counts.reported_objects
        for entry in message.entries:
            if self._accepts(segment, entry, now):
                segment.reported[entry.object_id] = None
            else:
                unwanted.append(entry.object_id)
        if segment.doubt or not segment.wants_report:
            segment.num_lacking += self._catalog.counts.reported_objects - num_before
        if message.is_last:
            if segment.num_lacking:
                fields = {"segment": segment.name, "num_objects": segment.num_lacking, "reason": INCOMPLETE}
                self._catalog.notes.append(OperatorEvent("records_incomplete", fields, is_warning=True))
            self._end_report(segment, now)
        return m.Reported(unwanted)

    def _accepts(self, segment: Segment, entry: m.SegmentEntry, now: float) -> bool:
        """Whether the master's state has this entry from now on."""
        if self._knows(segment, entry):
            return True
        if not 0 < entry.object_id <= self._largest_id:
            return False
        if segment.wants_report and not segment.doubt:
            return self._adopt(segment, entry, now)
        stored = self._catalog.objects.readable.get(entry.key)
        is_replica = stored is not None and stored.object_id == entry.object_id
        is_there = is_replica or self._catalog.is_lost(entry.object_id) or segment.doubt is Doubt.ANY
        if not (self._catalog.is_later(entry.object_id) or (segment.doubt and is_there)):
            return False
        return self._makes_way(segment, entry, now) and self._adopt(segment, entry, now)

    def _makes_way(self, segment: Segment, entry: m.SegmentEntry, now: float) -> bool:
        """Remove what an earlier master's records have in place of ``entry``; False where that is not
        allowed."""
        if not _is_sound(entry) or entry.offset + entry.size_bytes > segment.allocator.size_bytes:
            return False
        catalog = self._catalog
        stored = catalog.objects.readable.get(entry.key)
        is_elsewhere = stored is not None and stored.object_id == entry.object_id and _is_same(stored, entry)
        extent = stored.on(segment) if stored is not None and is_elsewhere else None
        if stored is not None and extent is not None:
            if not segment.doubt:
                return False
            self._give_up(stored, extent, now)
        elif not catalog.is_news(entry.key, entry.object_id) and not is_elsewhere:
            return False
        at, end = entry.offset, entry.offset + entry.size_bytes
        # Mostly resting space that was promised for this very object.
        if at in segment.holders and not self._vacates(segment, at, now):
            return False
        if segment.allocator.take(at, entry.size_bytes):
            segment.allocator.free(at)
            return True
        taken = list(segment.allocator.allocations.items())
        there = [offset for offset, size_bytes in taken if offset < end and offset + size_bytes > at]
        return all(self._vacates(segment, offset, now) for offset in there)

    def _vacates(self, segment: Segment, offset: int, now: float) -> bool:
        """Remove what an earlier master's records have there; False if it is a promise of this master."""
        holder = segment.holders.get(offset)
        if holder is None:
            return True  # removed with its group
        if self._catalog.objects.is_own(holder.object_id) or holder.put_id:
            return False
        extent = holder.on(segment)
        if holder.is_readable and extent is not None and extent.offset == offset:
            if not extent.is_complete:
                return False
            self._give_up(holder, extent, now)
        else:
            self._catalog.release(segment, offset)
        return True

    def _give_up(self, stored: StoredObject, extent: Extent, now: float) -> None:
        """Remove a replica that its node does not have. The object itself may come with the next entry."""
        catalog, tombstones = self._catalog, self._catalog.tombstones.get(stored.key)
        catalog.drop_extent(stored, extent, "its node has something else there", now)
        if extent.is_resting and extent in stored.resting:
            catalog.release(extent.segment, extent.offset)
        if tombstones is None:
            catalog.tombstones.pop(stored.key, None)
        else:
            catalog.tombstones[stored.key] = tombstones

    def _knows(self, segment: Segment, entry: m.SegmentEntry) -> bool:
        """Whether the master has this entry, or a task is writing it."""
        stored = self._catalog.objects.readable.get(entry.key)
        if stored is not None and stored.before is not None and stored.before.object_id == entry.object_id:
            stored = stored.before
        extent = None if stored is None or stored.object_id != entry.object_id else stored.on(segment)
        return extent is not None and extent.offset == entry.offset

    def _adopt(self, segment: Segment, entry: m.SegmentEntry, now: float) -> bool:
        """Enter an object that the node reports on its segment."""
        if not _is_sound(entry):
            return False
        stored = self._catalog.objects.readable.get(entry.key)
        if stored is not None and stored.object_id == entry.object_id:
            if stored.on(segment) is not None or not _is_same(stored, entry):
                return self._knows(segment, entry)
            if not segment.allocator.take(entry.offset, entry.size_bytes):
                return False
            extent = Extent(segment, entry.offset, is_complete=True)
            self._catalog.adopt_extent(stored, extent, now)
            self._catalog.emit(ReplicaCompleted(stored, extent, now))
            added = ReplicaAdded(stored.key, stored.object_id, segment.name, entry.offset)
            self._catalog.records.append(added)
            self._catalog.add_story(now, stored.key, "#{} reported on {} too", *_what(entry, segment))
            return True
        if not self._catalog.is_news(entry.key, entry.object_id):
            return False
        if not segment.allocator.take(entry.offset, entry.size_bytes):
            return False
        if stored is not None:
            self._catalog.unlink(stored, f"#{entry.object_id} is newer and on {segment.name}", now)
        tenant = split_scoped(entry.key)[0]
        record = ObjectReadable(
            entry.key,
            entry.object_id,
            entry.size_bytes,
            entry.chunk_bytes,
            entry.checksums,
            [(segment.name, entry.offset)],
            entry.is_hard_pinned,
            entry.group if is_of(tenant, entry.group) else "",
            entry.parent if is_of(tenant, entry.parent) else "",
            is_durable=entry.is_durable,
        )
        self._catalog.counts.reported_objects += 1
        adopted = self._catalog.adopt(record, [Extent(segment, entry.offset, is_complete=True)], now)
        # A reader of the last master may have a lease on it.
        adopted.lease_until = now + self._catalog.settings.lease_s
        self._catalog.records.append(record)
        self._catalog.add_story(now, entry.key, "#{} reported on {}", *_what(entry, segment))
        return True

    def _end_report(self, segment: Segment, now: float) -> None:
        """Send what the report lacked to the node's journal."""
        for stored in segment.holders.values():
            extent = stored.on(segment) if stored.is_readable else None
            if extent is not None and extent.is_complete and stored.object_id not in segment.reported:
                self._tasks.note(segment, entry_of(stored, extent.offset), now)
        if segment.wants_report:
            num_lost = sum(object_id not in segment.reported for object_id in segment.expected)
            self._catalog.counts.lost_objects += num_lost
            segment.expected = []
            self._catalog.note(
                "segment_reported", segment, num_objects=len(segment.reported), num_lost=num_lost
            )
            segment.wants_report = False
            self._catalog.records.append(record_of_segment(segment))
        segment.doubt = Doubt.NONE
        segment.report_connection = None
        segment.reported, segment.num_lacking = {}, 0
        self._catalog.look_for_doubt()

    def heartbeat(self, message: m.Heartbeat, event: Received, now: float) -> m.Beat:
        segment = self._catalog.segments.beat(message.segment, message.epoch, event.connection, now)
        return m.Beat(segment is not None, self._catalog.objects.last_id)

    def unmount(self, message: m.Unmount, _: Received, now: float) -> m.Beat:
        segment = self._catalog.segments.find(message.segment, message.epoch)
        if segment is not None:
            self._catalog.segments.drop(segment)
            self._catalog.empty(segment, "unmounted", now)
        return m.Beat(segment is not None)

    def describe(self, message: m.DescribeSegments, _: Received, now: float) -> m.SegmentDescriptors:
        found = [self._catalog.segments.find(name, epoch) for name, epoch in message.segments]
        descriptors = [None if segment is None else segment.descriptor for segment in found]
        return m.SegmentDescriptors(
            descriptors, ["" if segment is None else segment.host for segment in found]
        )


def _what(entry: m.SegmentEntry, segment: Segment) -> tuple[int, str]:
    return entry.object_id, segment.name


def _is_sound(entry: m.SegmentEntry) -> bool:
    """Whether such an object can exist: perhaps one that is no longer accepted from writers, but was."""
    _, name = split_scoped(entry.key)
    has_shape = check_shape(name, entry.size_bytes, entry.chunk_bytes) is None
    return has_shape and len(entry.checksums) == 4 * -(-entry.size_bytes // entry.chunk_bytes)


def _is_same(stored: StoredObject, entry: m.SegmentEntry) -> bool:
    assert stored.stored is not None
    shape = stored.size_bytes, stored.chunk_bytes, stored.stored.checksums
    return shape == (entry.size_bytes, entry.chunk_bytes, entry.checksums)


def _check_mount(message: m.Mount, largest_id: int) -> Refusal | None:
    for what, name in (("segment", message.segment), ("node", message.node), ("host", message.host)):
        if len(name.encode()) > m.MAX_KEY_BYTES or not (name or what != "segment") or "\0" in name:
            return Refusal("invalid_name", f"a {what}'s name has 1 to {m.MAX_KEY_BYTES} bytes and no NUL")
    least_bytes = PAGE_BYTES if message.tier is Tier.SSD else ALIGNMENT_BYTES
    if message.size_bytes < least_bytes:
        return Refusal("invalid_size", f"{message.size_bytes} bytes; at least {least_bytes}")
    if message.address < 0 or message.address + message.size_bytes > END_OF_ADDRESSES:
        # The address of an object there could not be sent: the request of its writer would fail.
        where = f"{message.size_bytes} bytes at {message.address:#x}"
        return Refusal("invalid_size", f"{where}; from 0 to below 2^64")
    if not 0 <= message.rest_s <= MAX_REST_S:
        return Refusal("invalid_rest", f"{message.rest_s} s; 0 to {MAX_REST_S:.0f}")
    if not 0 <= message.largest_id <= largest_id:
        return Refusal("invalid_id", f"{message.largest_id}; 0 to {largest_id}")
    return None

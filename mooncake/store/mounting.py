"""The master's part for nodes: segments come, stay and go."""

from __future__ import annotations

import msgspec

from mooncake.errors import Refusal
from mooncake.store import messages as m
from mooncake.store.allocator import ALIGNMENT_BYTES, PAGE_BYTES
from mooncake.store.catalog import Catalog, record_of_segment
from mooncake.store.effects import Note, Received
from mooncake.store.objects import State
from mooncake.store.segments import Segment
from mooncake.types import Tier

MAX_REST_S = 3600.0


class Mounting:
    """Answers Mount, Heartbeat, Unmount and Describe."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def mount(self, message: m.Mount, event: Received, now: float) -> m.Mounted:
        settings = self._catalog.settings
        refusal = _check_mount(message)
        before = self._catalog.segments.mounted.get(message.segment)
        epoch = None if before is None else before.epoch
        outcome = refusal or self._catalog.segments.mount(message, event.connection, now)
        if isinstance(outcome, Refusal):
            fields = {"segment": message.segment, "reason": str(outcome)}
            self._catalog.notes.append(Note("mount_refused", fields))
            return m.Mounted(outcome, 0, settings.heartbeat_s, message.rest_s)
        segment, replaced = outcome
        is_back = segment is before
        if replaced is not None:
            is_renamed = replaced.name != segment.name
            why = (
                f"its content came back as {segment.name}" if is_renamed else "another process took its name"
            )
            self._catalog.empty(replaced, why, now)
        if is_back and segment.epoch != epoch:
            self._rebased(segment, now)
        if not is_back or segment.epoch != epoch:
            self._catalog.records.append(record_of_segment(segment))
        num_objects = sum(stored.state is State.READABLE for stored in segment.holders.values())
        what = "segment_back" if is_back else "segment_mounted"
        rest_s = max(0.0, segment.rests_until - now)
        self._catalog.note(what, segment, num_objects=num_objects, rest_s=rest_s)
        return m.Mounted(None, num_objects, settings.heartbeat_s, settings.rest_s, segment.wants_report)

    def _rebased(self, segment: Segment, now: float) -> None:
        """Another process serves the content: what lies there is readable at other addresses."""
        for stored in segment.holders.values():
            if stored.stored is not None:
                stored.stored = msgspec.structs.replace(stored.stored, replicas=stored.replicas())
                self._catalog.tell(now, stored.key, "#{} is back on {}", stored.object_id, segment.name)

    def heartbeat(self, message: m.Heartbeat, event: Received, now: float) -> m.Beat:
        segment = self._catalog.segments.beat(message.segment, message.epoch, event.connection, now)
        return m.Beat(segment is not None)

    def unmount(self, message: m.Unmount, _: Received, now: float) -> m.Beat:
        segment = self._catalog.segments.find(message.segment, message.epoch)
        if segment is not None:
            self._catalog.segments.drop(segment)
            self._catalog.empty(segment, "unmounted", now)
        return m.Beat(segment is not None)

    def describe(self, message: m.Describe, _: Received, now: float) -> m.Described:
        found = [self._catalog.segments.find(name, epoch) for name, epoch in message.segments]
        descriptors = [None if segment is None else segment.descriptor for segment in found]
        return m.Described(descriptors, ["" if segment is None else segment.host for segment in found])


def _check_mount(message: m.Mount) -> Refusal | None:
    if not 0 < len(message.segment.encode()) <= m.MAX_KEY_BYTES:
        return Refusal("invalid_name", f"a segment's name has 1 to {m.MAX_KEY_BYTES} bytes")
    least_bytes = PAGE_BYTES if message.tier is Tier.SSD else ALIGNMENT_BYTES
    if message.size_bytes < least_bytes:
        return Refusal("invalid_size", f"{message.size_bytes} bytes; at least {least_bytes}")
    if not 0 <= message.rest_s <= MAX_REST_S:
        return Refusal("invalid_rest", f"{message.rest_s} s; 0 to {MAX_REST_S:.0f}")
    return None

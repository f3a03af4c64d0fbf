"""What a master knows, and the few ways in which it may change: shared by the parts of ``master.py``.

Segments, objects and the order of eviction belong together: an object that becomes unfindable must
leave all three, and its space may be used again only when every promise about it has run out. That
is written here once; which requests bring it about, the parts decide.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections import deque
from typing import Any

import msgspec

from mooncake.store.effects import Note, Reply
from mooncake.store.eviction import Eviction
from mooncake.store.objects import Objects, State, StoredObject
from mooncake.store.records import ObjectGone, ObjectReadable, Record, SegmentGone, SegmentMounted
from mooncake.store.segments import Segment, Segments
from mooncake.store.settings import MasterSettings
from mooncake.types import ObjectKey

STORY_LINES = 100_000


@dataclasses.dataclass
class Counts:
    """What has happened so far; the shell exports it."""

    puts: int = 0
    lookups: int = 0
    lookup_hits: int = 0
    refused_puts: int = 0
    expired_puts: int = 0
    evicted_objects: int = 0
    evicted_bytes: int = 0
    removed_objects: int = 0
    corrupt_objects: int = 0
    lost_objects: int = 0


class Catalog:
    """The state of one master."""

    def __init__(self, settings: MasterSettings, first_object_id: int) -> None:
        self.settings = settings
        self.segments = Segments(settings.segment_ttl_s, settings.heartbeat_s, first_object_id)
        self.objects = Objects(first_object_id - 1)
        self.eviction = Eviction()
        self.counts = Counts()
        self.notes: list[Note] = []
        """What operators should know of the event that is being handled."""
        self.replies: list[Reply] = []
        """Answers that had to wait and are ready now. A part that parks a request answers None first."""
        self.records: list[Record] = []
        """What must be written down before that event is answered."""
        self._timers: list[tuple[float, int, StoredObject]] = []
        """(instant, tie-breaker, object): a writer's deadline, or the release of unlinked space."""
        self._order = itertools.count()
        self._stories: deque[tuple[float, ObjectKey, str, tuple[object, ...]]] = deque(maxlen=STORY_LINES)
        """(instant, key, format, its arguments): put together only when somebody asks."""

    # Space

    @property
    def capacity_bytes(self) -> int:
        """Of the segments that are alive."""
        return sum(s.allocator.size_bytes for s in self.segments.mounted.values() if s.is_alive)

    @property
    def allocated_bytes(self) -> int:
        """Of the segments that are alive."""
        return sum(s.allocator.allocated_bytes for s in self.segments.mounted.values() if s.is_alive)

    def unlink(self, stored: StoredObject, reason: str, now: float) -> int:
        """Make the object unfindable now, and release its space as soon as every promise is over.

        Returns the bytes that were released at once.
        """
        if stored.state is State.WRITING:
            stored.release_at = stored.write_until + self.settings.grace_s
            self.objects.unlink(stored)
        else:
            stored.release_at = stored.lease_until
            self.records.append(ObjectGone(stored.key, stored.object_id))
            self.objects.unlink(stored)
            self.eviction.unlinked(stored)
        self.tell(now, stored.key, "#{} unlinked: {}", stored.object_id, reason)
        if stored.release_at <= now:
            return self.release(stored)
        self.wake_for(stored, stored.release_at)
        return 0

    def release(self, stored: StoredObject) -> int:
        assert stored.state is State.UNLINKED, stored
        released_bytes = 0
        for extent in stored.extents:
            if extent.segment.is_mounted:
                released_bytes += extent.segment.allocator.free(extent.offset)
                del extent.segment.holders[extent.offset]
        stored.extents = []
        return released_bytes

    def empty(self, segment: Segment, reason: str, now: float) -> None:
        """Forget what lay on a segment that is gone."""
        self.records.append(SegmentGone(segment.name, segment.epoch))
        num_lost = 0
        for stored in list(segment.holders.values()):
            others = [extent for extent in stored.extents if extent.segment is not segment]
            if stored.state is not State.UNLINKED and not others:
                num_lost += stored.state is State.READABLE
                self.unlink(stored, f"{segment.name}: {reason}", now)
            stored.extents = others
            if stored.stored is not None and others:
                stored.stored = msgspec.structs.replace(stored.stored, replicas=stored.replicas())
        segment.holders.clear()
        self.counts.lost_objects += num_lost
        self.note("segment_gone", segment, reason=reason, num_lost=num_lost)

    # Time

    def wake_for(self, stored: StoredObject, instant: float) -> None:
        """``expire`` looks at ``stored`` at ``instant``."""
        heapq.heappush(self._timers, (instant, next(self._order), stored))

    def deadline(self) -> float | None:
        segments = self.segments.deadline()
        if not self._timers:
            return segments
        return self._timers[0][0] if segments is None else min(segments, self._timers[0][0])

    def expire(self, now: float) -> None:
        """Do what has become due: give up writers that are late, space that rests, nodes that are silent."""
        while self._timers and self._timers[0][0] <= now:
            _, _, stored = heapq.heappop(self._timers)
            if stored.state is State.WRITING:
                self.counts.expired_puts += 1
                self.unlink(stored, "the writer missed its deadline", now)
            elif stored.state is State.UNLINKED and stored.release_at <= now:
                self.release(stored)
        deadline = self.segments.deadline()
        if deadline is None or now < deadline:
            return
        silent, gone = self.segments.expire(now)
        for segment in silent:
            self.note("segment_suspected", segment, reason="no heartbeat")
        for segment in gone:
            self.empty(segment, "given up", now)

    # Telling

    def note(self, event: str, segment: Segment, **fields: Any) -> None:
        self.notes.append(Note(event, {"segment": segment.name, "host": segment.host, **fields}))

    def tell(self, now: float, key: ObjectKey, what: str, *of: object) -> None:
        self._stories.append((now, key, what, of))

    def story(self, key: str) -> list[str]:
        return [f"{at:.6f} {what.format(*of)}" for at, about, what, of in self._stories if about == key]

    def check(self) -> None:
        self.segments.check()
        self.objects.check()
        self.eviction.check(self.objects.readable)
        waiting = {id(stored) for _, _, stored in self._timers}
        for segment in self.segments.mounted.values():
            for offset, stored in segment.holders.items():
                assert any(e.segment is segment and e.offset == offset for e in stored.extents), stored
                assert stored.state is State.READABLE or id(stored) in waiting, f"{stored} leaks"


def record_of(stored: StoredObject) -> ObjectReadable:
    assert stored.stored is not None
    places = [(extent.segment.name, extent.offset) for extent in stored.extents]
    return ObjectReadable(
        stored.key, stored.object_id, stored.size_bytes, stored.chunk_bytes, stored.stored.checksums, places
    )


def record_of_segment(segment: Segment) -> SegmentMounted:
    size_bytes = segment.allocator.size_bytes
    where = (segment.host, segment.address, size_bytes, segment.descriptor)
    what = (segment.tier, segment.content_id, segment.node)
    return SegmentMounted(segment.name, segment.epoch, *where, *what)

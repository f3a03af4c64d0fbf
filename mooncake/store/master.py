"""The master: which objects there are, where their bytes lie, and when space may be used again.

It composes the other cores of this room behind ``handle``: a client's or node's message and the
present instant go in, replies come out. It never touches a byte of an object and never calls
anyone; nodes and clients come to it. What it must never get wrong, whatever is lost or late:

* A key is readable whole or not at all, and never shows another content than the one put-end
  announced.
* Space is given out again only when nobody may touch it under an old promise: not before a reader's
  lease ends, not before a writer's deadline plus ``grace_s`` (a write posted in time may land late).
  So an object that goes while promised is *unlinked* at once and its space *released* later.
* What it acknowledged it can write down first (``Keep``), and a successor that reads it (``restore``)
  has every object again. Promises are not written down: memory rests until those of the predecessor
  have run out (``segments.py``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from typing import Annotated, Any

import msgspec

from mooncake.errors import InvalidArgument, Refusal
from mooncake.machine import Wake
from mooncake.rpc.wire import Failure
from mooncake.store import messages as m
from mooncake.store.allocator import ALIGNMENT_BYTES
from mooncake.store.eviction import Eviction
from mooncake.store.objects import Extent, Objects, State, StoredObject, check_put
from mooncake.store.placement import Placement
from mooncake.store.records import ObjectGone, ObjectReadable, Record, SegmentGone, SegmentMounted
from mooncake.store.segments import Segment, Segments
from mooncake.types import ObjectKey

STORY_LINES = 100_000
WATCH_SHARE = 0.005
"""Of the capacity; the watermark is overshot by no more than this."""
MAX_REST_S = 3600.0


Seconds = Annotated[float, msgspec.Meta(gt=0)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]


@dataclasses.dataclass(frozen=True)
class MasterSettings:
    """Keep the store's metadata: which objects there are and where their bytes lie."""

    host: str = "127.0.0.1"
    "Address to listen on."

    port: Port = 50051
    "Port for clients and nodes; 0 takes a free one."

    metrics_port: Port = 0
    "Port of `/metrics`; 0 takes a free one."

    oplog: str = ""
    "File that keeps the metadata over a restart of the master; empty keeps it in memory only."

    lease_s: Seconds = 10.0
    "Seconds that a lookup protects an object from removal, eviction and reuse of its space."

    put_s: Seconds = 30.0
    "Seconds between the start and the end of a put; an older reservation is given up."

    grace_s: Annotated[float, msgspec.Meta(ge=0)] = 5.0
    "Seconds after a missed put deadline until the space is used again, because writes may land late."

    heartbeat_s: Seconds = 1.0
    "Seconds between two heartbeats of a node; one that misses three is suspected."

    segment_ttl_s: Seconds = 5.0
    "Seconds that a suspected node has to come back before its objects are forgotten."

    high_watermark: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.95
    "Share of the capacity in use beyond which a put evicts ahead of need."

    eviction_ratio: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.05
    "Share of the capacity that such an eviction frees below the watermark."

    def __post_init__(self) -> None:
        if self.eviction_ratio >= self.high_watermark:
            raise InvalidArgument("eviction_ratio", self.eviction_ratio, "less than high_watermark")

    @property
    def rest_s(self) -> float:
        """How long after its last word a promise of this master may still be used by someone."""
        return max(self.lease_s, self.put_s + self.grace_s)


@dataclasses.dataclass(frozen=True, slots=True)
class Received:
    """A message came in. ``origin`` goes back in the Reply; ``connection`` is lost as a whole."""

    origin: Any
    connection: Hashable
    message: msgspec.Struct


@dataclasses.dataclass(frozen=True, slots=True)
class ConnectionLost:
    connection: Hashable


@dataclasses.dataclass(frozen=True, slots=True)
class Reply:
    """Effect: send ``message`` to ``origin``."""

    origin: Any
    message: msgspec.Struct


@dataclasses.dataclass(frozen=True, slots=True)
class Note:
    """Effect: log this event; an operator wants to know."""

    event: str
    fields: dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Keep:
    """Effect: write these records down before anything that follows is sent."""

    records: list[Record]


Event = Received | ConnectionLost
Effect = Reply | Note | Keep


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


class Master:
    """A machine (see ``machine.py``) over ``Received`` and ``ConnectionLost``.

    ``first_object_id`` should be random: then no request about an object of an earlier master can
    mean one of this master's.
    """

    def __init__(self, settings: MasterSettings = MasterSettings(), first_object_id: int = 1) -> None:
        self.settings = settings
        self.segments = Segments(settings.segment_ttl_s, settings.heartbeat_s)
        self.objects = Objects(first_object_id - 1)
        self.eviction = Eviction()
        self.counts = Counts()
        self._timers: list[tuple[float, int, StoredObject]] = []
        """(instant, tie-breaker, object): a writer's deadline, or the release of unlinked space."""
        self._order = itertools.count()
        self._unwatched_bytes = 0
        self._watch_bytes = 0.0
        """Adding up a thousand nodes for every put would cost more than the put, so the watermark is
        looked at once so many bytes were given out."""
        self._stories: deque[tuple[float, ObjectKey, str, tuple[object, ...]]] = deque(maxlen=STORY_LINES)
        """(instant, key, format, its arguments): put together only when somebody asks."""
        self._notes: list[Effect] = []
        self._records: list[Record] = []
        self._answers: dict[type, Callable[[Any, Hashable, float], msgspec.Struct]] = {
            m.Lookup: self._lookup,
            m.Exists: self._exists,
            m.Renew: self._renew,
            m.PutStart: self._put_start,
            m.PutEnd: self._put_end,
            m.PutAbort: self._put_abort,
            m.Remove: self._remove,
            m.Corrupt: self._corrupt,
            m.Describe: self._describe,
            m.Mount: self._mount,
            m.Heartbeat: self._heartbeat,
            m.Unmount: self._unmount,
            m.Status: self._status,
            m.ListKeys: self._list_keys,
            m.Story: self._tell,
        }

    # The contract of a machine

    def handle(self, event: Event | Wake, now: float) -> list[Effect]:
        self._expire(now)
        effects: list[Effect] = []
        if isinstance(event, Received):
            effects.append(Reply(event.origin, self._answer(event, now)))
        elif isinstance(event, ConnectionLost):
            for segment in self.segments.connection_lost(event.connection, now):
                self._note("segment_suspected", segment, reason="connection lost")
        if self._notes:
            effects += self._notes
            self._notes = []
        if self._records:
            effects.insert(0, Keep(self._records))
            self._records = []
        return effects

    def deadline(self) -> float | None:
        segments = self.segments.deadline()
        if not self._timers:
            return segments
        return self._timers[0][0] if segments is None else min(segments, self._timers[0][0])

    def check(self) -> None:
        self.segments.check()
        self.objects.check()
        self.eviction.check(self.objects.readable)
        waiting = {id(stored) for _, _, stored in self._timers}
        for segment in self.segments.mounted.values():
            for offset, stored in segment.holders.items():
                assert any(e.segment is segment and e.offset == offset for e in stored.extents), stored
                assert stored.state is State.READABLE or id(stored) in waiting, f"{stored} leaks"

    def story(self, key: str) -> list[str]:
        return [f"{at:.6f} {what.format(*of)}" for at, about, what, of in self._stories if about == key]

    def _answer(self, event: Received, now: float) -> msgspec.Struct:
        message = event.message
        keys = getattr(message, "keys", ())
        if len(keys) > m.MAX_KEYS:
            return Failure("invalid_argument", f"{len(keys)} keys in one message; at most {m.MAX_KEYS}")
        return self._answers[type(message)](message, event.connection, now)

    # What an earlier master knew

    def restore(self, records: Iterable[Record], now: float) -> None:
        """Begin with what ``records`` say; call before anything else.

        Objects are hidden until their nodes mount again, then all there. Nothing is known of promises,
        so every object is taken to be leased, and every segment rests.
        """
        segments: dict[str, SegmentMounted] = {}
        readable: dict[ObjectKey, ObjectReadable] = {}
        for record in records:
            if isinstance(record, SegmentMounted):
                segments[record.segment] = record
            elif isinstance(record, ObjectReadable):
                readable[record.key] = record
            elif isinstance(record, ObjectGone):
                readable.pop(record.key, None)
            else:
                segments.pop(record.segment, None)
                gone = [key for key, one in readable.items() if one.places[0][0] == record.segment]
                for key in gone:
                    del readable[key]
        by_segment: dict[str, list[ObjectReadable]] = {}
        for one in readable.values():
            by_segment.setdefault(one.places[0][0], []).append(one)
        for name, mounted in segments.items():
            self._restore_segment(mounted, by_segment.get(name, []), now)

    def _restore_segment(self, mounted: SegmentMounted, objects: list[ObjectReadable], now: float) -> None:
        mount = m.Mount(**msgspec.structs.asdict(mounted), rest_s=self.settings.rest_s)
        segment = self.segments.restore(mount, now)
        segment.allocator.adopt((one.places[0][1], one.size_bytes) for one in objects)
        lease_until = now + self.settings.lease_s
        for one in objects:
            extents = [Extent(segment, one.places[0][1])]
            stored = self.objects.adopt(
                one.key, one.object_id, one.size_bytes, one.chunk_bytes, one.checksums, extents, lease_until
            )
            self.eviction.add(stored)
            self._tell_story(now, one.key, "restored as #{} on {}", one.object_id, segment.name)

    def snapshot(self) -> list[Record]:
        """The shortest records from which ``restore`` makes this state."""
        records: list[Record] = [_record_of_segment(one) for one in self.segments.mounted.values()]
        records += [_record_of(stored) for stored in self.objects.readable.values()]
        return records

    # Reading

    def _lookup(self, message: m.Lookup, _: Hashable, now: float) -> m.Found:
        readable = self.objects.readable
        lease_until = now + self.settings.lease_s
        found: list[m.Stored | None] = []
        num_hits = 0
        for key in message.keys:
            stored = readable.get(key)
            if stored is None or not (stored.extents[0].segment.is_alive or _is_visible(stored)):
                found.append(None)
                continue
            stored.lease_until = lease_until
            num_hits += 1
            found.append(stored.stored if len(stored.extents) == 1 else _visible_part(stored))
        self.counts.lookups += len(found)
        self.counts.lookup_hits += num_hits
        return m.Found(self.settings.lease_s, found)

    def _exists(self, message: m.Exists, _: Hashable, now: float) -> m.Flags:
        readable = self.objects.readable
        lease_until = now + self.settings.lease_s
        flags = bytearray(len(message.keys))
        for index, key in enumerate(message.keys):
            stored = readable.get(key)
            if stored is not None and (stored.extents[0].segment.is_alive or _is_visible(stored)):
                stored.lease_until = lease_until
                flags[index] = 1
        return m.Flags(self.settings.lease_s, bytes(flags))

    def _renew(self, message: m.Renew, _: Hashable, now: float) -> m.Flags:
        lease_until = now + self.settings.lease_s
        flags = bytearray(len(message.keys))
        for index, (key, object_id) in enumerate(zip(message.keys, message.object_ids, strict=False)):
            stored = self.objects.readable.get(key)
            if stored is not None and stored.object_id == object_id and _is_visible(stored):
                stored.lease_until = lease_until
                flags[index] = 1
        return m.Flags(self.settings.lease_s, bytes(flags))

    def _describe(self, message: m.Describe, _: Hashable, now: float) -> m.Described:
        found = [self.segments.find(name, epoch) for name, epoch in message.segments]
        return m.Described([None if segment is None else segment.descriptor for segment in found])

    # Writing

    def _put_start(self, message: m.PutStart, _: Hashable, now: float) -> m.PutStarted | Failure:
        if not len(message.keys) == len(message.sizes) == len(message.chunk_bytes):
            return Failure("invalid_argument", "put_start: keys, sizes and chunk_bytes differ in length")
        placement = Placement(self.segments, message.host, message.avoid, now)
        reserved: list[m.Reserved | None] = []
        refusals: dict[int, Refusal] = {}
        columns = zip(message.keys, message.sizes, message.chunk_bytes, strict=True)
        for put_id, (key, size_bytes, chunk_bytes) in enumerate(columns, message.put_id):
            outcome = self._reserve(put_id, key, size_bytes, chunk_bytes, placement, now)
            if isinstance(outcome, Refusal):
                self.counts.refused_puts += 1
                self._tell_story(now, key, "put refused: {}", outcome)
                refusals[len(reserved)] = outcome
                outcome = None
            reserved.append(outcome)
        self._evict_to_watermark(now)
        return m.PutStarted(self.settings.put_s, reserved, refusals)

    def _reserve(
        self, put_id: int, key: ObjectKey, size_bytes: int, chunk_bytes: int, placement: Placement, now: float
    ) -> m.Reserved | Refusal | None:
        refusal = check_put(key, size_bytes, chunk_bytes)
        if refusal is not None:
            return refusal
        stored = self.objects.readable.get(key)
        if stored is not None:
            if _is_visible(stored):
                return None
            # Its node may be dead. Who puts the key now has the bytes at hand, so they win.
            self.counts.lost_objects += 1
            self._unlink(stored, "replaced while its node is suspected", now)
        stored = self.objects.writing.get(key)
        if stored is not None:
            is_reachable = _is_visible(stored)
            if stored.put_id == put_id and is_reachable:
                # The same request again: its first answer was lost. Its deadline stays what it was,
                # and the writer counts from its first question, so the promise is not stretched.
                return m.Reserved(stored.object_id, stored.replicas())
            if is_reachable:
                return None
            self._unlink(stored, "its node is suspected", now)
        room = self._make_room(size_bytes, placement, now)
        if isinstance(room, Refusal):
            return room
        write_until = now + self.settings.put_s
        stored = self.objects.begin(key, put_id, size_bytes, chunk_bytes, [room], write_until)
        heapq.heappush(self._timers, (write_until, next(self._order), stored))
        self._tell_story(now, key, "put started as #{} on {}", stored.object_id, room.segment.name)
        return m.Reserved(stored.object_id, stored.replicas())

    def _put_end(self, message: m.PutEnd, _: Hashable, now: float) -> m.Outcomes | Failure:
        if not len(message.keys) == len(message.object_ids) == len(message.checksums):
            return Failure("invalid_argument", "put_end: keys, object_ids and checksums differ in length")
        outcomes: list[bool | Refusal] = []
        for key, object_id, checksums in zip(
            message.keys, message.object_ids, message.checksums, strict=True
        ):
            outcome = self.objects.finish(key, object_id, checksums, now)
            outcomes.append(outcome)
            if outcome is True:
                self.counts.puts += 1
                stored = self.objects.readable[key]
                self.eviction.add(stored)
                self._records.append(_record_of(stored))
                self._tell_story(now, key, "readable as #{}", object_id)
            elif outcome is not False:
                self._tell_story(now, key, "put of #{} refused at its end: {}", object_id, outcome)
        return m.Outcomes(outcomes)

    def _put_abort(self, message: m.PutAbort, _: Hashable, now: float) -> m.Outcomes:
        outcomes: list[bool | Refusal] = []
        for key, object_id in zip(message.keys, message.object_ids, strict=False):
            stored = self.objects.writing.get(key)
            is_ours = stored is not None and stored.object_id == object_id
            if stored is not None and is_ours:
                self._unlink(stored, "put aborted", now)
            outcomes.append(is_ours)
        return m.Outcomes(outcomes)

    # Removing

    def _remove(self, message: m.Remove, _: Hashable, now: float) -> m.Outcomes:
        outcomes: list[bool | Refusal] = []
        for key in message.keys:
            stored = self.objects.readable.get(key)
            if stored is None:
                outcomes.append(False)
            elif stored.lease_until > now and not message.force:
                left_s = stored.lease_until - now
                outcomes.append(Refusal("leased", f"a reader may hold it for another {left_s:.3g} s"))
            else:
                self.counts.removed_objects += 1
                self._unlink(stored, "removed by force" if message.force else "removed", now)
                outcomes.append(True)
        return m.Outcomes(outcomes)

    def _corrupt(self, message: m.Corrupt, _: Hashable, now: float) -> m.Outcomes:
        outcomes: list[bool | Refusal] = []
        for key, object_id in zip(message.keys, message.object_ids, strict=False):
            stored = self.objects.readable.get(key)
            is_that = stored is not None and stored.object_id == object_id
            if stored is not None and is_that:
                self.counts.corrupt_objects += 1
                self._notes.append(Note("object_corrupt", {"key": key, "object_id": object_id}))
                self._unlink(stored, "a reader found wrong checksums", now)
            outcomes.append(is_that)
        return m.Outcomes(outcomes)

    # Nodes

    def _mount(self, message: m.Mount, connection: Hashable, now: float) -> m.Mounted:
        refusal = _check_mount(message)
        known = self.segments.find(message.segment, message.epoch)
        outcome = refusal or self.segments.mount(message, connection, now)
        if isinstance(outcome, Refusal):
            self._notes.append(Note("mount_refused", {"segment": message.segment, "reason": str(outcome)}))
            return m.Mounted(outcome, 0, self.settings.heartbeat_s, message.rest_s)
        segment, replaced = outcome
        if replaced is not None:
            self._empty(replaced, "another process took its name", now)
        if known is None:
            self._records.append(_record_of_segment(segment))
        num_objects = sum(stored.state is State.READABLE for stored in segment.holders.values())
        event = "segment_mounted" if known is None else "segment_back"
        self._note(event, segment, num_objects=num_objects, rest_s=max(0.0, segment.rests_until - now))
        return m.Mounted(None, num_objects, self.settings.heartbeat_s, self.settings.rest_s)

    def _heartbeat(self, message: m.Heartbeat, connection: Hashable, now: float) -> m.Beat:
        segment = self.segments.beat(message.segment, message.epoch, connection, now)
        return m.Beat(segment is not None)

    def _unmount(self, message: m.Unmount, _: Hashable, now: float) -> m.Beat:
        segment = self.segments.find(message.segment, message.epoch)
        if segment is not None:
            self.segments.drop(segment)
            self._empty(segment, "unmounted", now)
        return m.Beat(segment is not None)

    # People

    def _status(self, _: m.Status, __: Hashable, now: float) -> m.MasterStatus:
        segments = [
            m.SegmentStatus(
                segment=segment.name,
                epoch=segment.epoch,
                host=segment.host,
                state=str(segment.state),
                size_bytes=segment.allocator.size_bytes,
                allocated_bytes=segment.allocator.allocated_bytes,
                largest_free_bytes=segment.allocator.largest_free_bytes,
                num_objects=len(segment.holders),
                rests_s=max(0.0, segment.rests_until - now),
            )
            for segment in self.segments.mounted.values()
        ]
        return m.MasterStatus(
            num_objects=len(self.objects.readable),
            num_writing=len(self.objects.writing),
            capacity_bytes=self.capacity_bytes,
            allocated_bytes=self.allocated_bytes,
            counts=dataclasses.asdict(self.counts),
            segments=segments,
        )

    def _list_keys(self, message: m.ListKeys, _: Hashable, now: float) -> m.Keys:
        matching = (
            key
            for key, stored in self.objects.readable.items()
            if key.startswith(message.prefix) and _is_visible(stored)
        )
        return m.Keys(list(itertools.islice(matching, max(0, message.limit))))

    def _tell(self, message: m.Story, _: Hashable, now: float) -> m.Told:
        return m.Told(self.story(message.key))

    # Space

    @property
    def capacity_bytes(self) -> int:
        """Of the segments that are alive."""
        return sum(s.allocator.size_bytes for s in self.segments.mounted.values() if s.is_alive)

    @property
    def allocated_bytes(self) -> int:
        """Of the segments that are alive."""
        return sum(s.allocator.allocated_bytes for s in self.segments.mounted.values() if s.is_alive)

    def _make_room(self, size_bytes: int, placement: Placement, now: float) -> Extent | Refusal:
        """Space for one replica, evicting for it when none is free."""
        place = placement.allocate(size_bytes)
        if place is None and size_bytes > placement.largest_bytes:
            return self._no_segment(size_bytes, now)
        if place is None:
            place = self._evict_for(size_bytes, placement, now)
        if place is not None:
            self._unwatched_bytes += size_bytes
            return Extent(*place)
        reason = f"no hole of {size_bytes} bytes, and what is stored is leased, being written or not enough"
        return Refusal("no_space", reason)

    def _evict_for(self, size_bytes: int, placement: Placement, now: float) -> tuple[Segment, int] | None:
        # A hole need not open where the oldest objects are, but neither may one put that finds
        # none flush the whole cache.
        budget_bytes = max(8 * size_bytes, int(self.settings.eviction_ratio * self.capacity_bytes))
        victims = self.eviction.victims(now, lambda v: placement.covers(v.extents[0].segment))
        with contextlib.closing(victims):
            for victim in victims:
                segments = [extent.segment for extent in victim.extents]
                budget_bytes -= self._evict(victim, "no space for a put", now)
                for segment in segments:
                    placement.freed(segment)
                place = placement.allocate(size_bytes)
                if place is not None or budget_bytes < 0:
                    return place
        return None

    def _no_segment(self, size_bytes: int, now: float) -> Refusal:
        """Why no segment may be tried at all."""
        alive = [segment for segment in self.segments.mounted.values() if segment.is_alive]
        if not alive:
            return Refusal("no_space", "no segment is mounted; is a node running?")
        largest_bytes = max(segment.allocator.size_bytes for segment in alive)
        if size_bytes > largest_bytes:
            return Refusal("too_large", f"{size_bytes} bytes; the largest segment has {largest_bytes}")
        rests_s = [segment.rests_until - now for segment in alive if segment.rests_until > now]
        if not rests_s:
            return Refusal("no_space", "the segments that are left were just mounted, or can't be reached")
        reason = "promises of an earlier master may still be in use; space is given out in"
        return Refusal("no_space", f"{reason} {min(rests_s):.3g} s")

    def _evict_to_watermark(self, now: float) -> None:
        if self._unwatched_bytes < self._watch_bytes:
            return
        capacity_bytes, allocated_bytes = self.capacity_bytes, self.allocated_bytes
        self._unwatched_bytes = 0
        self._watch_bytes = WATCH_SHARE * capacity_bytes
        if allocated_bytes <= self.settings.high_watermark * capacity_bytes:
            return
        target_bytes = (self.settings.high_watermark - self.settings.eviction_ratio) * capacity_bytes
        victims = self.eviction.victims(now, lambda victim: victim.extents[0].segment.is_alive)
        with contextlib.closing(victims):
            for victim in victims:
                allocated_bytes -= self._evict(victim, "watermark", now)
                if allocated_bytes <= target_bytes:
                    break

    def _evict(self, victim: StoredObject, reason: str, now: float) -> int:
        """The space that was won: nobody leases a victim, so all of it and at once."""
        self.counts.evicted_objects += 1
        self.counts.evicted_bytes += victim.size_bytes
        return self._unlink(victim, f"evicted: {reason}", now)

    def _unlink(self, stored: StoredObject, reason: str, now: float) -> int:
        """Make the object unfindable now, and release its space as soon as every promise is over.

        Returns the bytes that were released at once.
        """
        if stored.state is State.WRITING:
            stored.release_at = stored.write_until + self.settings.grace_s
            self.objects.unlink(stored)
        else:
            stored.release_at = stored.lease_until
            self._records.append(ObjectGone(stored.key, stored.object_id))
            self.objects.unlink(stored)
            self.eviction.unlinked(stored)
        self._tell_story(now, stored.key, "#{} unlinked: {}", stored.object_id, reason)
        if stored.release_at <= now:
            return self._release(stored)
        heapq.heappush(self._timers, (stored.release_at, next(self._order), stored))
        return 0

    def _release(self, stored: StoredObject) -> int:
        assert stored.state is State.UNLINKED, stored
        released_bytes = 0
        for extent in stored.extents:
            if extent.segment.is_mounted:
                released_bytes += extent.segment.allocator.free(extent.offset)
                del extent.segment.holders[extent.offset]
        stored.extents = []
        return released_bytes

    def _empty(self, segment: Segment, reason: str, now: float) -> None:
        """Forget what lay on a segment that is gone."""
        self._records.append(SegmentGone(segment.name, segment.epoch))
        num_lost = 0
        for stored in list(segment.holders.values()):
            others = [extent for extent in stored.extents if extent.segment is not segment]
            if stored.state is not State.UNLINKED and not others:
                num_lost += stored.state is State.READABLE
                self._unlink(stored, f"{segment.name}: {reason}", now)
            stored.extents = others
            if stored.stored is not None and others:
                stored.stored = msgspec.structs.replace(stored.stored, replicas=stored.replicas())
        segment.holders.clear()
        self.counts.lost_objects += num_lost
        self._note("segment_gone", segment, reason=reason, num_lost=num_lost)

    # Time

    def _expire(self, now: float) -> None:
        while self._timers and self._timers[0][0] <= now:
            _, _, stored = heapq.heappop(self._timers)
            if stored.state is State.WRITING:
                self.counts.expired_puts += 1
                self._unlink(stored, "the writer missed its deadline", now)
            elif stored.state is State.UNLINKED and stored.release_at <= now:
                self._release(stored)
        deadline = self.segments.deadline()
        if deadline is None or now < deadline:
            return
        silent, gone = self.segments.expire(now)
        for segment in silent:
            self._note("segment_suspected", segment, reason="no heartbeat")
        for segment in gone:
            self._empty(segment, "given up", now)

    # Telling

    def _note(self, event: str, segment: Segment, **fields: Any) -> None:
        self._notes.append(Note(event, {"segment": segment.name, "host": segment.host, **fields}))

    def _tell_story(self, now: float, key: ObjectKey, what: str, *of: object) -> None:
        self._stories.append((now, key, what, of))

    def __repr__(self) -> str:
        return f"<Master {self.objects!r} {self.segments!r}>"


def _record_of(stored: StoredObject) -> ObjectReadable:
    assert stored.stored is not None
    places = [(extent.segment.name, extent.offset) for extent in stored.extents]
    return ObjectReadable(
        stored.key, stored.object_id, stored.size_bytes, stored.chunk_bytes, stored.stored.checksums, places
    )


def _record_of_segment(segment: Segment) -> SegmentMounted:
    size_bytes = segment.allocator.size_bytes
    where = (segment.host, segment.address, size_bytes, segment.descriptor)
    return SegmentMounted(segment.name, segment.epoch, *where)


def _is_visible(stored: StoredObject) -> bool:
    return any(extent.segment.is_alive for extent in stored.extents)


def _visible_part(stored: StoredObject) -> m.Stored | None:
    assert stored.stored is not None
    replicas = [
        replica
        for replica, extent in zip(stored.stored.replicas, stored.extents, strict=True)
        if extent.segment.is_alive
    ]
    return msgspec.structs.replace(stored.stored, replicas=replicas)


def _check_mount(message: m.Mount) -> Refusal | None:
    if not 0 < len(message.segment.encode()) <= m.MAX_KEY_BYTES:
        return Refusal("invalid_name", f"a segment's name has 1 to {m.MAX_KEY_BYTES} bytes")
    if message.size_bytes < ALIGNMENT_BYTES:
        return Refusal("invalid_size", f"{message.size_bytes} bytes; at least {ALIGNMENT_BYTES}")
    if not 0 <= message.rest_s <= MAX_REST_S:
        return Refusal("invalid_rest", f"{message.rest_s} s; 0 to {MAX_REST_S:.0f}")
    return None

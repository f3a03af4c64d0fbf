"""The master's part for writers: space is reserved, written by others, and becomes an object or nothing."""

from __future__ import annotations

from mooncake.errors import Refusal
from mooncake.rpc.wire import Failure
from mooncake.store import messages as m
from mooncake.store.catalog import Catalog
from mooncake.store.effects import Received
from mooncake.store.objects import StoredObject, check_put
from mooncake.store.placement import Placement
from mooncake.store.space import Space
from mooncake.types import ObjectKey


class Writing:
    """Answers PutStart, PutEnd and PutAbort."""

    def __init__(self, catalog: Catalog, space: Space) -> None:
        self._catalog = catalog
        self._space = space

    def put_start(self, message: m.PutStart, _: Received, now: float) -> m.PutStarted | Failure:
        if not len(message.keys) == len(message.sizes) == len(message.chunk_bytes):
            return Failure("invalid_argument", "put_start: keys, sizes and chunk_bytes differ in length")
        placement = Placement(self._catalog.segments, message.host, message.avoid, now)
        reserved: list[m.Reserved | None] = []
        refusals: dict[int, Refusal] = {}
        columns = zip(message.keys, message.sizes, message.chunk_bytes, strict=True)
        for put_id, (key, size_bytes, chunk_bytes) in enumerate(columns, message.put_id):
            outcome = self._reserve(put_id, key, size_bytes, chunk_bytes, placement, now)
            if isinstance(outcome, Refusal):
                self._catalog.counts.refused_puts += 1
                self._catalog.tell(now, key, "put refused: {}", outcome)
                refusals[len(reserved)] = outcome
                outcome = None
            reserved.append(outcome)
        self._space.evict_to_watermark(now)
        return m.PutStarted(self._catalog.settings.put_s, reserved, refusals)

    def _reserve(
        self, put_id: int, key: ObjectKey, size_bytes: int, chunk_bytes: int, placement: Placement, now: float
    ) -> m.Reserved | Refusal | None:
        refusal = check_put(key, size_bytes, chunk_bytes)
        if refusal is not None:
            return refusal
        stored = self._catalog.objects.readable.get(key)
        if stored is not None:
            if stored.is_visible:
                return None
            # Its node may be dead. Who puts the key now has the bytes at hand, so they win.
            self._catalog.counts.lost_objects += 1
            self._catalog.unlink(stored, "replaced while its node is suspected", now)
        stored = self._catalog.objects.writing.get(key)
        if stored is not None:
            is_reachable = stored.is_visible
            if stored.put_id == put_id and is_reachable:
                # The same request again: its first answer was lost. Its deadline stays what it was,
                # and the writer counts from its first question, so the promise is not stretched.
                return m.Reserved(stored.object_id, stored.replicas())
            if is_reachable:
                return None
            self._catalog.unlink(stored, "its node is suspected", now)
        room = self._space.make_room(size_bytes, placement, now)
        if isinstance(room, Refusal):
            return room
        write_until = now + self._catalog.settings.put_s
        stored = self._catalog.begin(key, put_id, size_bytes, chunk_bytes, [room], write_until)
        self._catalog.tell(now, key, "put started as #{} on {}", stored.object_id, room.segment.name)
        return m.Reserved(stored.object_id, stored.replicas())

    def put_end(self, message: m.PutEnd, _: Received, now: float) -> m.Outcomes | Failure:
        if not len(message.keys) == len(message.object_ids) == len(message.checksums):
            return Failure("invalid_argument", "put_end: keys, object_ids and checksums differ in length")
        outcomes: list[bool | Refusal] = []
        for key, object_id, checksums in zip(
            message.keys, message.object_ids, message.checksums, strict=True
        ):
            stored = self._catalog.objects.find_writing(key, object_id, checksums, now)
            outcome = stored if isinstance(stored, Refusal) else stored is not None
            outcomes.append(outcome)
            if isinstance(stored, StoredObject):
                self._catalog.counts.puts += 1
                self._catalog.show(stored, checksums, now)
                self._catalog.tell(now, key, "readable as #{}", object_id)
            elif stored is not None:
                self._catalog.tell(now, key, "put of #{} refused at its end: {}", object_id, outcome)
        return m.Outcomes(outcomes)

    def put_abort(self, message: m.PutAbort, _: Received, now: float) -> m.Outcomes:
        outcomes: list[bool | Refusal] = []
        for key, object_id in zip(message.keys, message.object_ids, strict=False):
            stored = self._catalog.objects.writing.get(key)
            is_ours = stored is not None and stored.object_id == object_id
            if stored is not None and is_ours:
                self._catalog.unlink(stored, "put aborted", now)
            outcomes.append(is_ours)
        return m.Outcomes(outcomes)

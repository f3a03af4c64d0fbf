# SPDX-License-Identifier: Apache-2.0
"""KV events of the store in the existing master's format, an extension of vLLM's.

One event for each medium (``cpu``, ``disk``, ``gpu``) on which an object becomes readable, and one when its
last replica there is removed. Observes the catalog; ``kv_publisher.py`` sends what ``take`` returns. A queue
that grows beyond its bound loses its oldest events, and the sequence skips a number, so that subscribers
notice and request a replay. A late subscriber gets the present content (``summary``).
"""

from __future__ import annotations

import itertools
import re
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from mooncake.store.master.catalog import Catalog
from mooncake.store.master.catalog_events import ObjectShown, ReplicaCompleted, ReplicaRemoved
from mooncake.store.master.objects import ObjectState, StoredObject, split_scoped
from mooncake.types import Tier

BATCH_EVENTS = 64
MEDIA = {Tier.MEMORY: "cpu", Tier.SSD: "disk", Tier.DEVICE: "gpu"}
_NUMBER = re.compile(r"0[xX][0-9a-fA-F]{1,16}|[0-9]{1,20}")
_encoder = msgspec.msgpack.Encoder()

Batch = tuple[int, bytes]
"""Sequence number and payload."""


class KvEvents:
    """Queues events until they are taken.

    Args:
        wall_s: added to ``now`` to get the time of day.
        wake: called when the queue is no longer empty.
    """

    def __init__(
        self,
        catalog: Catalog,
        backend: str,
        *,
        is_legacy: bool = True,
        has_object_key: bool = True,
        capacity: int = 65536,
        wall_s: float = 0.0,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._catalog, self._backend = catalog, backend
        self._is_legacy, self._has_object_key = is_legacy, has_object_key
        self._capacity, self._wall_s, self._wake = capacity, wall_s, wake
        self._queue: deque[dict[str, Any]] = deque()
        self._last_gone: tuple[int, str] | None = None
        self._is_gap = False
        self.num_stored = self.num_removed = self.num_dropped = 0
        # Low numbers are left for the summary of what was there before the first event.
        self.next_sequence = -(-len(MEDIA) * len(catalog.objects.readable) // BATCH_EVENTS)
        catalog.observe(
            {ObjectShown: self._shown, ReplicaCompleted: self._completed, ReplicaRemoved: self._removed}
        )

    # Events of the catalog

    def _shown(self, event: ObjectShown) -> None:
        for medium in _media(event.stored):
            self._add(event.stored, medium, None, event.now)

    def _completed(self, event: ReplicaCompleted) -> None:
        medium = MEDIA[event.extent.segment.tier]
        others = [e for e in event.stored.extents if e.is_complete and e is not event.extent]
        if all(MEDIA[e.segment.tier] != medium for e in others):
            self._add(event.stored, medium, None, event.now)

    def _removed(self, event: ReplicaRemoved) -> None:
        stored, extent = event.stored, event.extent
        medium = MEDIA[extent.segment.tier]
        if not extent.is_complete or medium in _media(stored):
            return
        if stored.state is ObjectState.UNLINKED and self._last_gone == (stored.object_id, medium):
            return  # two replicas there were removed at once
        self._last_gone = (stored.object_id, medium)
        self._add(stored, medium, event.reason, event.now)

    # Events

    def _add(self, stored: StoredObject, medium: str, reason: str | None, now: float) -> None:
        self.num_stored += reason is None
        self.num_removed += reason is not None
        event = self._event(stored, medium, reason, now)
        event["event_id"] = self.num_stored + self.num_removed
        if len(self._queue) >= self._capacity:
            self._queue.popleft()
            self.num_dropped += 1
            self._is_gap = True
        self._queue.append(event)
        if len(self._queue) == 1:
            self._wake()

    def _event(self, stored: StoredObject, medium: str, reason: str | None, now: float) -> dict[str, Any]:
        """The event of a removal for that reason; None: the object became readable."""
        is_stored = reason is None
        tenant, _, key = stored.key.rpartition("\0")
        hashes = [int(key, 0 if key[:2].lower() == "0x" else 10)] if _NUMBER.fullmatch(key) else []
        hashes = [number for number in hashes if number < 1 << 64]
        event: dict[str, Any] = {
            "event_id": 0,
            "timestamp": self._milliseconds(now),
            "event_type": "stored" if is_stored else "removed",
            "model_name": None,
            "block_size": None,
            "additional_salt": None,
            "lora_name": None,
            "dp_rank": None,
            "tenant_id": tenant or "default",
            "backend_id": self._backend,
            "group_id": split_scoped(stored.group)[1] or None,
            "medium": medium,
            "seq_hashes": hashes,
            "base_block_idx": 0 if hashes else None,
        }
        if is_stored:
            event |= {"parent_hash": None, "token_ids": None}
        else:
            event["reason"] = reason
        if self._has_object_key:
            event["object_key"] = key
        if self._is_legacy:
            event["type"] = "BlockStored" if is_stored else "BlockRemoved"
            event["block_hashes"] = [number - (1 << 64) if number >> 63 else number for number in hashes]
            if is_stored:
                event["parent_block_hash"] = None
        return event

    def _milliseconds(self, now: float) -> int:
        return int((now + self._wall_s) * 1000)

    # Batches

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    def take(self, now: float) -> list[Batch]:
        """All new events as batches to be sent."""
        if self._is_gap:
            self.next_sequence += 1
            self._is_gap = False
        batches: list[Batch] = []
        while self._queue:
            events = [self._queue.popleft() for _ in range(min(BATCH_EVENTS, len(self._queue)))]
            batches.append((self.next_sequence, self._encode(events, now)))
            self.next_sequence += 1
        return batches

    def summary(self, before: int, now: float) -> Iterator[Batch]:
        """The present content, in at most ``before`` batches with numbers below it; the first one clears.

        Objects may be added and removed between two of them: later events report those.
        """
        if before <= 0:
            return
        keys = list(self._catalog.objects.readable)
        num_batches = min(before, 1 + len(MEDIA) * len(keys) // BATCH_EVENTS)
        a_batch = 1 + len(MEDIA) * len(keys) // num_batches
        cleared: dict[str, Any] = {"event_type": "cleared", "backend_id": self._backend}
        if self._is_legacy:
            cleared["type"] = "AllBlocksCleared"
        events = itertools.chain([cleared], self._known(keys, now))
        for sequence in range(before - num_batches, before):
            is_last = sequence == before - 1
            yield sequence, self._encode(list(itertools.islice(events, None if is_last else a_batch)), now)

    def _known(self, keys: list[str], now: float) -> Iterator[dict[str, Any]]:
        for key in keys:
            stored = self._catalog.objects.readable.get(key)
            if stored is not None:
                for medium in _media(stored):
                    yield self._event(stored, medium, None, now)

    def _encode(self, events: list[dict[str, Any]], now: float) -> bytes:
        return _encoder.encode([self._milliseconds(now), events, 0])


def _media(stored: StoredObject) -> dict[str, None]:
    """The media on which it is readable."""
    return {MEDIA[extent.segment.tier]: None for extent in stored.extents if extent.is_complete}

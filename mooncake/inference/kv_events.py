# SPDX-License-Identifier: Apache-2.0
"""Publishes what a worker's KV cache holds, in vLLM's event format over ZeroMQ.

It owns sequence numbers and the history for subscribers that detect a gap, or connect late. It is given the
events, and does not know its subscribers. Only the last batches are kept; the result of the older ones is
kept as a set of blocks and replayed as one batch (cleared, then stored), so that a conductor which restarts
after days still receives the whole cache. Sockets and frames are ``KvEventPublisher``'s.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from mooncake import clock
from mooncake.http.openai import KvEventSource
from mooncake.kv_events import (
    AllBlocksCleared,
    BlockStored,
    EventBatch,
    ForeignHash,
    KvEvent,
    encode_batch,
    read_batch,
)
from mooncake.kv_events.publisher import Batch, KvEventPublisher

_KEPT_BATCHES = 10_000


class WorkerKvEventPublisher:
    """Publishes batches of events. All of it runs on the event loop that called ``start``."""

    def __init__(self, host: str = "127.0.0.1", topic: str = "kv-events") -> None:
        self._host = host
        self._topic = topic
        self._publisher = KvEventPublisher(topic, self._replay)
        self._next_sequence = 0
        self._kept: deque[Batch] = deque()  # encoded: a tenth of the memory of their tokens
        # Blocks held before _kept[0], by their medium, and their sizes in tokens.
        self._before: dict[tuple[ForeignHash, str | None], int | None] = {}
        self.source: KvEventSource | None = None
        """The addresses to subscribe to; set by ``start``."""

    async def start(self, port: int = 0, replay_port: int = 0) -> KvEventSource:
        """Listen on the two ports; 0 selects a free one.

        Raises:
            AddressInUse: a port is taken.
            InvalidArgument: the host is not one of this machine's.
        """
        endpoint = self._publisher.listen("kv_events_port", f"tcp://{self._host}:{port or '*'}")
        replay_endpoint = self._publisher.serve_replay(
            "replay_port", f"tcp://{self._host}:{replay_port or '*'}"
        )
        self.source = KvEventSource(endpoint, replay_endpoint, self._topic)
        return self.source

    def publish(self, events: Sequence[KvEvent]) -> None:
        """Send one batch. Never blocks. Call on the loop's thread."""
        if not events:
            return
        payload = encode_batch(EventBatch(clock.wall(), list(events)))
        sequence = self._next_sequence
        self._next_sequence += 1
        self._kept.append((sequence, payload))
        while len(self._kept) > _KEPT_BATCHES:
            self._forget(read_batch(self._kept.popleft()[1]))
        self._publisher.send(sequence, payload)

    async def close(self) -> None:
        await self._publisher.close()

    def _forget(self, batch: EventBatch) -> None:
        """Fold a batch that is no longer kept into the set of blocks held before the kept ones."""
        for event in batch.events:
            if isinstance(event, BlockStored):
                for block_hash in event.block_hashes:
                    self._before[block_hash, event.medium] = event.block_size
            elif isinstance(event, AllBlocksCleared):
                self._before.clear()
            else:
                for block_hash in event.block_hashes:
                    self._before.pop((block_hash, event.medium), None)

    def _replay(self, start: int) -> list[Batch]:
        batches = [(sequence, payload) for sequence, payload in self._kept if sequence >= start]
        oldest = self._kept[0][0] if self._kept else 0
        if start < oldest:
            batches.insert(0, (oldest - 1, self._summary()))
        return batches

    def _summary(self) -> bytes:
        """The result of all batches no longer kept, as one batch. Parents and tokens are not kept."""
        groups: dict[tuple[str | None, int | None], list[ForeignHash]] = {}
        for (block_hash, medium), block_size in self._before.items():
            groups.setdefault((medium, block_size), []).append(block_hash)
        events: list[KvEvent] = [AllBlocksCleared()]
        for (medium, block_size), hashes in groups.items():
            events.append(BlockStored(hashes, None, [], block_size, medium))
        return encode_batch(EventBatch(read_batch(self._kept[0][1]).ts, events))

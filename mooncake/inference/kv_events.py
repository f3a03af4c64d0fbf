"""Publishes what a worker's KV cache holds, in vLLM's event format over ZeroMQ.

It owns the wire side only: frames, sequence numbers, the replay of what a subscriber missed. Which blocks
exist is told to it; who listens it does not know. Two sockets::

    PUB     [topic, sequence (8 bytes, big-endian), msgpack [timestamp, events, data-parallel rank]]
    ROUTER  asked [b"", first sequence] answers [b"", topic, sequence, batch]…, the last with sequence -1

A subscriber that sees a gap, or comes late, asks for a replay. Only the last batches are kept; what the
older ones amounted to is kept as a set of blocks and replayed as one batch (cleared, then stored), so that
a conductor which restarts after days still learns the whole cache.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Sequence

import msgspec
import zmq
import zmq.asyncio

from mooncake import clock
from mooncake.errors import AddressInUse
from mooncake.http.openai import KvEventSource
from mooncake.log import get_logger
from mooncake.prefix import BlockHash

log = get_logger(__name__)

MEDIUM_DEVICE = "GPU"
"""vLLM's word for the worker's own pool, whatever device it lies on."""

END_OF_REPLAY = -1
_KEPT_BATCHES = 10_000


class _PublishedEvent(msgspec.Struct, frozen=True, tag_field="type", tag=True):
    pass


class BlockStored(_PublishedEvent, frozen=True, kw_only=True):
    """Blocks that follow each other, after ``parent_block_hash`` (None: they open a prompt)."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    "The tokens of all these blocks, in order."
    block_size: int
    "Tokens per block."
    medium: str | None = MEDIUM_DEVICE


class BlockRemoved(_PublishedEvent, frozen=True, kw_only=True):
    block_hashes: list[BlockHash]
    medium: str | None = MEDIUM_DEVICE
    reason: str | msgspec.UnsetType = msgspec.UNSET
    "Why, in words; vLLM has no such field."


class AllBlocksCleared(_PublishedEvent, frozen=True):
    pass


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KvEventBatch(msgspec.Struct, frozen=True, array_like=True):
    """``ts`` is wall-clock seconds."""

    ts: float
    events: list[KvEvent]
    data_parallel_rank: int | None = None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(KvEventBatch)


class WorkerKvEventPublisher:
    """Publishes batches of events. Everything happens on the event loop that called ``start``."""

    def __init__(self, host: str = "127.0.0.1", topic: str = "kv-events") -> None:
        self._host = host
        self._topic = topic
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._replay_context = zmq.asyncio.Context()
        self._router = self._replay_context.socket(zmq.ROUTER)
        self._next_sequence = 0
        self._kept: deque[tuple[int, bytes]] = deque()  # encoded: a tenth of the memory of their tokens
        self._before: dict[tuple[BlockHash, str | None], int] = {}  # held before _kept[0] -> block size
        self._task: asyncio.Task[None] | None = None
        self.source: KvEventSource | None = None
        """Where to subscribe; known after ``start``."""

    async def start(self, port: int = 0, replay_port: int = 0) -> KvEventSource:
        """Listen on the two ports; 0 takes a free one.

        Raises:
            AddressInUse: a port is taken.
        """
        # A batch that a slow subscriber loses comes back by replay; a queue without bound does not.
        self._pub.setsockopt(zmq.SNDHWM, 100_000)
        for socket in (self._pub, self._router):
            socket.setsockopt(zmq.LINGER, 0)
        endpoint = _bind(self._pub, self._host, port)
        replay_endpoint = _bind(self._router, self._host, replay_port)
        self.source = KvEventSource(endpoint, replay_endpoint, self._topic)
        self._task = asyncio.get_running_loop().create_task(self._serve_replay())
        return self.source

    def publish(self, events: Sequence[KvEvent]) -> None:
        """Send one batch. Never blocks. Call on the loop's thread."""
        if not events:
            return
        payload = _encoder.encode(KvEventBatch(clock.wall(), list(events)))
        sequence = self._next_sequence
        self._next_sequence += 1
        self._kept.append((sequence, payload))
        while len(self._kept) > _KEPT_BATCHES:
            self._forget(_decoder.decode(self._kept.popleft()[1]))
        self._pub.send_multipart([self._topic.encode(), _sequence(sequence), payload])

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._pub.close()
        self._router.close()
        self._context.term()
        self._replay_context.term()

    def _forget(self, batch: KvEventBatch) -> None:
        """Fold a batch that is no longer kept into the set of blocks held before the kept ones."""
        for event in batch.events:
            if isinstance(event, BlockStored):
                for block_hash in event.block_hashes:
                    self._before[block_hash, event.medium] = event.block_size
            elif isinstance(event, BlockRemoved):
                for block_hash in event.block_hashes:
                    self._before.pop((block_hash, event.medium), None)
            else:
                self._before.clear()

    async def _serve_replay(self) -> None:
        while True:
            frames = await self._router.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                log.warning(
                    "replay_request_malformed",
                    reason="not [identity, empty, 8 bytes]",
                    num_frames=len(frames),
                )
                continue
            client, _, asked = frames
            start = int.from_bytes(asked, "big")
            for sequence, payload in self._replay(start):
                await self._answer(client, sequence, payload)
            await self._answer(client, END_OF_REPLAY, b"")

    def _replay(self, start: int) -> list[tuple[int, bytes]]:
        batches = [(sequence, payload) for sequence, payload in self._kept if sequence >= start]
        oldest = self._kept[0][0] if self._kept else 0
        if start < oldest:
            batches.insert(0, (oldest - 1, self._summary()))
        return batches

    def _summary(self) -> bytes:
        """What all forgotten batches amount to, as one batch. Parents and tokens are not kept."""
        groups: dict[tuple[str | None, int], list[BlockHash]] = {}
        for (block_hash, medium), block_size in self._before.items():
            groups.setdefault((medium, block_size), []).append(block_hash)
        events: list[KvEvent] = [AllBlocksCleared()]
        for (medium, block_size), hashes in groups.items():
            events.append(
                BlockStored(
                    block_hashes=hashes,
                    parent_block_hash=None,
                    token_ids=[],
                    block_size=block_size,
                    medium=medium,
                )
            )
        return _encoder.encode(KvEventBatch(_decoder.decode(self._kept[0][1]).ts, events))

    async def _answer(self, client: bytes, sequence: int, payload: bytes) -> None:
        frames = [client, b"", self._topic.encode(), _sequence(sequence), payload]
        await self._router.send_multipart(frames)


def _sequence(number: int) -> bytes:
    return number.to_bytes(8, "big", signed=True)


def _bind(socket: zmq.Socket[bytes] | zmq.asyncio.Socket, host: str, port: int) -> str:
    """Bind and return the endpoint that others connect to."""
    try:
        socket.bind(f"tcp://{host}:{port or '*'}")
    except zmq.ZMQError as error:
        if error.errno == zmq.EADDRINUSE:
            raise AddressInUse(f"KV event port {host}:{port} is in use; free it or choose another") from error
        raise
    endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    return endpoint.rstrip(b"\0").decode()

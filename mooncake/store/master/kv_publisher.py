"""Publishes the store's KV events: a PUB socket, and a ROUTER that replays missed ones.

::

    PUB     [empty topic, sequence (8 bytes, big-endian), msgpack [milliseconds, events, 0]]
    ROUTER  request [b"", first sequence], answer [b"", b"", sequence, batch]…, the last with sequence -1
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import Any

import zmq
import zmq.asyncio

from mooncake import clock
from mooncake.errors import AddressInUse, InvalidArgument
from mooncake.log import get_logger
from mooncake.store.master.context import MasterContext
from mooncake.store.master.kv_events import Batch, KvEvents

log = get_logger(__name__)

REPLAY_BATCHES = 4096
END_OF_REPLAY = -1
LOOK_S = 0.5


class MasterKvEventPublisher:
    """Runs on the event loop that it is made on. Only a leader's events are sent."""

    def __init__(self, context: MasterContext) -> None:
        settings = context.settings
        self._master_context, self._settings = context, settings
        self._loop = asyncio.get_running_loop()
        self.events = self._attach()
        self._kept: deque[Batch] = deque(maxlen=REPLAY_BATCHES)
        self._num_published = 0
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._replay_context = zmq.asyncio.Context()
        self._router = self._replay_context.socket(zmq.ROUTER)
        self._tasks: list[asyncio.Task[None]] = []
        self.endpoint = self.replay_endpoint = ""

    def start(self) -> None:
        """Begin to listen.

        Raises:
            AddressInUse: an endpoint is taken.
            InvalidArgument: an endpoint is invalid.
        """
        self._pub.setsockopt(zmq.SNDHWM, 100_000)
        for socket in (self._pub, self._router):
            socket.setsockopt(zmq.LINGER, 0)
        self.endpoint = _bind(self._pub, "kv_events_endpoint", self._settings.kv_events_endpoint)
        replay = self._settings.kv_events_replay_endpoint
        if replay:
            self.replay_endpoint = _bind(self._router, "kv_events_replay_endpoint", replay)
            self._tasks.append(self._loop.create_task(self._serve_replay()))
        self._tasks.append(self._loop.create_task(self._follow_master()))
        log.info("kv_events", endpoint=self.endpoint, replay=self.replay_endpoint)

    def _attach(self) -> KvEvents:
        settings = self._settings
        self._followed = self._master_context.master
        return KvEvents(
            self._followed.catalog,
            settings.kv_events_backend,
            is_legacy=settings.kv_events_legacy,
            has_object_key=settings.kv_events_object_key,
            capacity=settings.kv_events_queue,
            wall_s=clock.wall() - clock.monotonic(),
            wake=self._wake,
        )

    def _wake(self) -> None:
        self._loop.call_soon(self._flush)

    async def _follow_master(self) -> None:
        """Attach again when a standby's state was replaced as a whole; subscribers then request a replay."""
        while True:
            await asyncio.sleep(LOOK_S)
            if self._master_context.master is not self._followed:
                before = self.events.next_sequence
                self._kept.clear()
                self.events = self._attach()
                self.events.next_sequence = max(self.events.next_sequence, before) + 1

    def _flush(self) -> None:
        if self._pub.closed:
            return
        batches = self.events.take(clock.monotonic())
        if not self._master_context.leadership.is_leader:
            return
        for sequence, payload in batches:
            self._kept.append((sequence, payload))
            self._pub.send_multipart([b"", _eight_bytes(sequence), payload])
        self._num_published += len(batches)

    def status(self) -> dict[str, Any]:
        events = self.events
        return {
            "enabled": True,
            "endpoint": self.endpoint,
            "replay_endpoint": self.replay_endpoint,
            "backend_id": self._settings.kv_events_backend,
            "published_batches": self._num_published,
            "stored_events": events.num_stored,
            "removed_events": events.num_removed,
            "dropped_events": events.num_dropped,
            "queue_size": events.num_queued,
            "queue_capacity": self._settings.kv_events_queue,
            "next_sequence": events.next_sequence,
        }

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._pub.close()
        self._router.close()
        self._context.term()
        self._replay_context.term()

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
            client, start = frames[0], int.from_bytes(frames[2], "big")
            kept = [batch for batch in self._kept if batch[0] >= start]
            oldest = self._kept[0][0] if self._kept else self.events.next_sequence
            if start < oldest:
                for sequence, payload in self.events.summary(oldest, clock.monotonic()):
                    await self._answer(client, sequence, payload)
            for sequence, payload in kept:
                await self._answer(client, sequence, payload)
            await self._answer(client, END_OF_REPLAY, b"")

    async def _answer(self, client: bytes, sequence: int, payload: bytes) -> None:
        await self._router.send_multipart([client, b"", b"", _eight_bytes(sequence), payload])


def _eight_bytes(number: int) -> bytes:
    return number.to_bytes(8, "big", signed=True)


def _bind(socket: zmq.Socket[bytes] | zmq.asyncio.Socket, field: str, endpoint: str) -> str:
    """Bind the socket; returns the endpoint that others connect to."""
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        if error.errno == zmq.EADDRINUSE:
            raise AddressInUse(f"{endpoint} is in use; choose another {field}") from error
        raise InvalidArgument(field, endpoint, f"an endpoint such as tcp://*:5557 ({error})") from error
    bound = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(bound, bytes)
    return bound.rstrip(b"\0").decode()

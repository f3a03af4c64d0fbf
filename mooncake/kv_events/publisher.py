# SPDX-License-Identifier: Apache-2.0
"""The sockets of a publisher of KV events, as vLLM's has them, over ZeroMQ.

It owns frames and the replay service. Sequence numbers, payloads and the batches that are kept for a replay
are its owner's: a worker's cache and a master's catalog keep them differently. Two sockets::

    PUB     [topic, sequence (8 bytes, big-endian), payload]
    ROUTER  [b"", first sequence] is answered by [b"", topic, sequence, payload]…, the last with sequence -1

A router drops messages for a receiver whose queue is full, and a replay may be longer than any queue. So the
rest of a replay waits until its receiver has read: a replay is whole, or it ends without its last message.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable

import zmq
import zmq.asyncio

from mooncake.errors import AddressInUse, InvalidArgument
from mooncake.log import get_logger

log = get_logger(__name__)

END_OF_REPLAY = -1

PATIENCE_S = 5.0
"""A receiver that reads nothing of its replay for so long gets no more of it."""

REPLAY_S = 60.0
"""Longest time of one replay; a receiver that reads it more slowly requests the rest again."""

LOG_EVERY_S = 1.0
"""Shortest interval between two log lines about malformed requests."""

_PAUSE_S = 0.01
_BATCHES_PER_TURN = 64
_MOST_REPLAYS = 64
"""Replays at the same time; further requests wait in the socket."""

Batch = tuple[int, bytes]
"""Sequence number and payload."""


class KvEventPublisher:
    """Sends batches and replays earlier ones. All of it runs on one event loop.

    Args:
        replay: the batches from a sequence number on. Read one by one, while answers are sent.
    """

    def __init__(self, topic: str, replay: Callable[[int], Iterable[Batch]]) -> None:
        self._topic = topic.encode()
        self._replay = replay
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._replay_context = zmq.asyncio.Context()
        self._router = self._replay_context.socket(zmq.ROUTER)
        # A message to a full queue is then refused instead of dropped.
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._task: asyncio.Task[None] | None = None
        self._replays: dict[asyncio.Task[None], None] = {}
        self._next_log_at, self._num_unlogged = 0.0, 0
        # A batch that a slow subscriber loses is recovered by replay; an unbounded queue is not.
        self._pub.setsockopt(zmq.SNDHWM, 100_000)
        for socket in (self._pub, self._router):
            socket.setsockopt(zmq.LINGER, 0)

    def listen(self, field: str, endpoint: str) -> str:
        """Accept subscribers at ``endpoint``; returns the address that they connect to.

        Raises:
            AddressInUse: the endpoint, which came from ``field``, is taken.
            InvalidArgument: it is not an endpoint of this host.
        """
        return _bind(self._pub, field, endpoint)

    def serve_replay(self, field: str, endpoint: str) -> str:
        """Answer requests for a replay at ``endpoint``; returns and raises as ``listen`` does."""
        address = _bind(self._router, field, endpoint)
        self._task = asyncio.get_running_loop().create_task(self._serve_replay())
        return address

    @property
    def is_closed(self) -> bool:
        return self._pub.closed

    def send(self, sequence: int, payload: bytes) -> None:
        """Send one batch. Never blocks."""
        self._pub.send_multipart([self._topic, _eight_bytes(sequence), payload])

    async def close(self) -> None:
        if self._task is not None:  # first, as it begins the others
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for task in self._replays:
            task.cancel()
        await asyncio.gather(*self._replays, return_exceptions=True)
        self._pub.close()
        self._router.close()
        self._context.term()
        self._replay_context.term()

    async def _serve_replay(self) -> None:
        while True:
            frames = await self._router.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                self._log_malformed(len(frames))
                continue
            while len(self._replays) >= _MOST_REPLAYS:
                await asyncio.wait(self._replays, return_when=asyncio.FIRST_COMPLETED)
            start = int.from_bytes(frames[2], "big")
            task = asyncio.get_running_loop().create_task(self._send_replay(frames[0], start))
            self._replays[task] = None
            task.add_done_callback(self._replays.pop)

    def _log_malformed(self, num_frames: int) -> None:
        """Log at most one such request a second, as a peer may send any number of them."""
        now = asyncio.get_running_loop().time()
        if now < self._next_log_at:
            self._num_unlogged += 1
            return
        log.warning(
            "replay_request_malformed",
            reason="not [identity, empty, 8 bytes]",
            num_frames=num_frames,
            num_more=self._num_unlogged,
        )
        self._next_log_at, self._num_unlogged = now + LOG_EVERY_S, 0

    async def _send_replay(self, client: bytes, start: int) -> None:
        num_sent = 0
        try:
            async with asyncio.timeout(REPLAY_S):
                for sequence, payload in itertools.chain(self._replay(start), [(END_OF_REPLAY, b"")]):
                    async with asyncio.timeout(PATIENCE_S):
                        await self._answer(client, sequence, payload)
                    num_sent += 1
                    if not num_sent % _BATCHES_PER_TURN:
                        await asyncio.sleep(0)  # sending to a queue with room does not yield
        except (zmq.ZMQError, TimeoutError) as error:
            reason = str(error) or "its receiver reads too slowly, or not at all"
            log.info("kv_event_replay_ended_early", num_sent=num_sent, reason=reason)

    async def _answer(self, client: bytes, sequence: int, payload: bytes) -> None:
        """Send one message of a replay when its receiver has room for it.

        Raises:
            zmq.ZMQError: the receiver is gone.
        """
        message = [client, b"", self._topic, _eight_bytes(sequence), payload]
        while True:
            try:
                await self._router.send_multipart(message, zmq.NOBLOCK)
            except zmq.Again:
                await asyncio.sleep(_PAUSE_S)  # the socket does not report room in one receiver's queue
            else:
                return


def allow_ipv6(socket: zmq.Socket[bytes] | zmq.asyncio.Socket, endpoint: str) -> None:
    """Allow IPv6 for the socket if the endpoint has such an address, before it is bound or connected.

    Not for names: of one that has addresses of both kinds, ZeroMQ would then use the IPv6 address only, at
    which the other side may not listen.
    """
    host = endpoint.removeprefix("tcp://").rpartition(":")[0]
    socket.setsockopt(zmq.IPV6, endpoint.startswith("tcp://") and ":" in host)


def _eight_bytes(number: int) -> bytes:
    return number.to_bytes(8, "big", signed=True)


def _bind(socket: zmq.Socket[bytes] | zmq.asyncio.Socket, field: str, endpoint: str) -> str:
    """Bind the socket; returns the endpoint that others connect to."""
    allow_ipv6(socket, endpoint)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        if error.errno == zmq.EADDRINUSE:
            raise AddressInUse(f"{endpoint} is in use; choose another {field}") from error
        raise InvalidArgument(field, endpoint, f"an endpoint such as tcp://*:5557 ({error})") from error
    bound = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(bound, bytes)
    return bound.rstrip(b"\0").decode()

# SPDX-License-Identifier: Apache-2.0
"""Load of requests on a master or a Redis: many connections of one process, several requests open on each.

The generator must cost less than the server, or it would measure itself. So a connection has a *burst*: the
frames of some requests, encoded once, sent whole and sent again as soon as all replies have arrived. Queries
of the same keys have the same replies each time, so these are compared as bytes and not decoded. Puts need
new keys and are encoded each time; their replies are decoded. What a put announces was not written, and is
not read: the load is on the master alone.
"""

from __future__ import annotations

import itertools
import secrets
import select
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from mooncake.rpc.wire import OPEN_GREETING, FrameDecoder, decoder_for, encode, header
from mooncake.store import messages as m

PATIENCE_S = 30.0
READ_BYTES = 1 << 20
PIECE_BYTES, PIECES = 4096, 64
SLOW_BYTES_S = 1.0
"""Seconds between two bytes of a slow client."""


class Burst(Protocol):
    """The requests that one connection sends at once, and the check of their replies."""

    num_done: int
    """Operations so far."""

    def requests(self) -> bytes: ...

    def take(self, data: bytes) -> bool:
        """Take received bytes; True: ``requests`` may be sent next. Raises RuntimeError for a wrong reply."""
        ...


class QueryBurst:
    """Requests that have the same replies each time: the first ones, which ``is_whole`` found complete."""

    def __init__(self, requests: Sequence[bytes], is_whole: Callable[[bytes], bool]) -> None:
        self.num_done = 0
        self._num_requests = len(requests)
        self._requests = b"".join(requests)
        self._is_whole = is_whole
        self._replies = b""
        self._received: list[bytes] = []
        self._num_bytes = 0

    def requests(self) -> bytes:
        return self._requests

    def take(self, data: bytes) -> bool:
        self._received.append(data)
        self._num_bytes += len(data)
        if self._num_bytes < len(self._replies):
            return False
        received = b"".join(self._received)
        if not self._replies:
            if not self._is_whole(received):
                return False
            self._replies = received
        if received != self._replies:
            raise RuntimeError("a query had another reply than the first time")
        self._received, self._num_bytes = [], 0
        self.num_done += self._num_requests
        return True


def our_queries(message: Callable[[list[str]], msgspec.Struct], batches: Sequence[list[str]]) -> QueryBurst:
    """A burst of one of our queries for each of ``batches``; the first replies must find every key."""
    frames = [bytes(encode(number, message(keys))) for number, keys in enumerate(batches, 1)]

    def is_whole(received: bytes) -> bool:
        replies = [_replies.decode(body) for _, body in FrameDecoder().feed(received)]
        for reply in replies:
            found = reply.flags if isinstance(reply, m.Flags) else [one is not None for one in reply.objects]
            if not all(found):
                raise RuntimeError("a key was not found")
        return len(replies) == len(batches)

    return QueryBurst(frames, is_whole)


def redis_exists(batches: Sequence[list[str]]) -> QueryBurst:
    """A burst of one EXISTS of all its keys for each of ``batches``."""
    commands = [resp("EXISTS", *keys) for keys in batches]
    expected = b"".join(b":%d\r\n" % len(keys) for keys in batches)

    def is_whole(received: bytes) -> bool:
        if len(received) >= len(expected) and received != expected:
            raise RuntimeError(f"Redis did not find every key: {received[:64]!r}")
        return received == expected

    return QueryBurst(commands, is_whole)


def resp(*words: str | bytes) -> bytes:
    """A command of Redis, encoded."""
    encoded = [word if isinstance(word, bytes) else word.encode() for word in words]
    return b"*%d\r\n" % len(encoded) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in encoded)


_replies = decoder_for((m.PutStarted, m.PutsWritten, m.Outcomes, m.Flags, m.LookupReply))
_serial = itertools.count(secrets.randbits(40))


class PutBurst:
    """Puts of small objects: one request for ``num_keys`` of them in preallocated space, as clients do.

    ``in_two_steps``: PutStart and PutEnd instead, as for large objects; both together are one operation.
    """

    def __init__(self, num_keys: int, in_two_steps: bool = False) -> None:
        self.num_done = 0
        self._num_keys, self._in_two_steps = num_keys, in_two_steps
        self._frames = FrameDecoder()
        self._pieces: list[tuple[int, int]] = []
        self._begun: tuple[list[str], list[int]] | None = None

    def requests(self) -> bytes:
        count, checksums = self._num_keys, [b"\0\0\0\0"] * self._num_keys
        if self._begun is not None:
            (keys, object_ids), self._begun = self._begun, None
            return bytes(encode(1, m.PutEnd(keys, object_ids, checksums)))
        serial = next(_serial)
        self._keys = keys = [f"put/{serial:032x}/{number:028x}" for number in range(count)]
        put_id, sizes = serial << 10, [PIECE_BYTES] * count
        if self._in_two_steps:
            return bytes(encode(1, m.PutStart(put_id, "bench", keys, sizes, sizes)))
        if len(self._pieces) < count:
            start = m.PutStart(put_id, "bench", [], [], [], num_pieces=PIECES, piece_bytes=PIECE_BYTES)
            return bytes(encode(1, start))
        pieces, self._pieces = self._pieces[:count], self._pieces[count:]
        written = m.PutWritten(put_id, "bench", keys, sizes, checksums, pieces)
        if len(self._pieces) < count:
            more = {"num_pieces": PIECES, "piece_bytes": PIECE_BYTES}
            written = msgspec.structs.replace(written, **more)
        return bytes(encode(1, written))

    def take(self, data: bytes) -> bool:
        for _, body in self._frames.feed(data):
            reply: Any = _replies.decode(body)
            if isinstance(reply, m.PutStarted) and not reply.refusals:
                if self._in_two_steps:
                    self._begun = self._keys, [one.object_id for one in reply.reserved if one is not None]
                else:
                    self._keep(reply.advance)
                return True
            if not isinstance(reply, m.PutsWritten | m.Outcomes) or set(reply.outcomes) != {True}:
                raise RuntimeError(f"a put was refused: {str(reply)[:300]}")
            if isinstance(reply, m.PutsWritten):
                self._keep(reply.advance)
            self.num_done += 1
            return True
        return False

    def _keep(self, given: m.PreallocatedSpace | None) -> None:
        if given is not None:
            self._pieces += [(given.advance_id, number) for number in range(len(given.replicas))]


@dataclass
class LoadResult:
    """What a load found; a time is that of a burst, so of all requests that were open on a connection."""

    seconds: float
    counts: list[int]
    "Number of operations of each connection."
    times: list[list[float]]
    "Times of each connection's bursts."

    @property
    def per_s(self) -> float:
        return sum(self.counts) / self.seconds


class OtherConnections:
    """Connections that take room and do nothing: every second one is idle, the others send half a request, a
    byte each second."""

    def __init__(self, address: tuple[str, int], number: int) -> None:
        self._all = [opened(address, OPEN_GREETING) for _ in range(number)]
        self._slow = self._all[::2]
        self._due = time.perf_counter()
        for one in self._slow:
            one.sendall(header(1 << 20, 1, 0)[:-1])

    def drip(self) -> None:
        if time.perf_counter() < self._due:
            return
        self._due += SLOW_BYTES_S
        for one in self._slow:
            one.sendall(b"\0")

    def close(self) -> None:
        for one in self._all:
            one.close()


def opened(address: tuple[str, int], opening: bytes) -> socket.socket:
    sock = socket.create_connection(address, PATIENCE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.sendall(opening)
    return sock


def load(
    address: tuple[str, int],
    bursts: Sequence[Burst],
    seconds: float,
    opening: bytes = OPEN_GREETING,
    others: OtherConnections | None = None,
) -> LoadResult:
    """Send each of ``bursts`` again and again on a connection of its own, at least once."""
    poll = select.epoll()
    lines = {(sock := opened(address, opening)).fileno(): (sock, burst) for burst in bursts}
    try:
        for number, (sock, burst) in lines.items():  # once before the clock starts
            done = burst.num_done
            sock.sendall(burst.requests())
            while burst.num_done == done:
                if burst.take(sock.recv(READ_BYTES)) and burst.num_done == done:
                    sock.sendall(burst.requests())
            poll.register(number, select.EPOLLIN)
        before = [burst.num_done for burst in bursts]
        times: dict[int, list[float]] = {number: [] for number in lines}
        began = time.perf_counter()
        since = dict.fromkeys(lines, began)
        for sock, burst in lines.values():
            sock.sendall(burst.requests())
        under_way = len(lines)
        while under_way:  # at the end, operations under way are finished and count
            for number, _ in poll.poll(PATIENCE_S):
                sock, burst = lines[number]
                done = burst.num_done
                if not burst.take(sock.recv(READ_BYTES)):
                    continue
                now = time.perf_counter()
                if burst.num_done > done:
                    times[number].append(now - since[number])
                    since[number] = now
                    if now >= began + seconds:
                        under_way -= 1
                        continue
                sock.sendall(burst.requests())
            if others is not None:
                others.drip()
        now = time.perf_counter()
        counts = [burst.num_done - done for burst, done in zip(bursts, before, strict=True)]
        return LoadResult(now - began, counts, list(times.values()))
    finally:
        poll.close()
        for sock, _ in lines.values():
            sock.close()

# SPDX-License-Identifier: Apache-2.0
"""Forwards a connection that uses another protocol to the server of that protocol, byte for byte.

So one port can serve clients of this package and those of gRPC: HTTP/2 opens with other bytes. The forwarder
is transparent to both sides, and passes on backpressure: it reads no faster than the other side takes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from mooncake.errors import ProtocolError
from mooncake.log import get_logger
from mooncake.rpc.limits import Limits, RefusalLog
from mooncake.rpc.tls import TlsTransport

log = get_logger(__name__)

OPENING_BYTES = 24
"""Length of what an HTTP/2 client sends before its first frame."""


class _ForwardedEnd(asyncio.Protocol):
    """One of two connections that are joined."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | TlsTransport | None = None
        self.other: _ForwardedEnd | None = None
        self.tls: TlsTransport | None = None
        self.num_bytes = 0
        """Bytes received from this end."""
        self.has_ended = False
        """Set when this end sends nothing more."""
        self.on_lost: Callable[[], object] = lambda: None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.num_bytes += len(data)
        if self.tls is not None:
            try:
                data = self.tls.feed(data)
            except ProtocolError:
                self.close()
                return
        if data and self.other is not None and self.other.transport is not None:
            self.other.transport.write(data)
        if self.tls is not None and self.tls.has_ended:
            self.eof_received()

    def eof_received(self) -> bool:
        other = self.other
        if self.has_ended or other is None:
            return True
        self.has_ended = True
        if not other.has_ended:
            if other.transport is not None:
                other.transport.write_eof()
            return True
        for end in (other, self):  # what was written before is still sent
            if end.transport is not None:
                end.transport.close()
        return True

    def pause_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.resume_reading()

    def join(self, other: _ForwardedEnd, there: asyncio.Transport) -> None:
        """Forward all further bytes ``there``, unless the client has left meanwhile."""
        self.other = other
        if self.transport is None:
            there.close()
        else:
            self.transport.resume_reading()

    def close(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self.on_lost()
        if self.other is not None and self.other.transport is not None:
            self.other.transport.close()


class TcpForwarder:
    """Connections forwarded to the server at the Unix socket ``path``: counted and limited in time.

    A client that has not sent the opening of HTTP/2 by the deadline of a greeting is disconnected, and so is
    one with no traffic in either direction for ``Limits.splice_idle_s``.
    """

    def __init__(self, path: str, limits: Limits, refusals: RefusalLog) -> None:
        self._path = path
        self._limits = limits
        self._refusals = refusals
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._ends: dict[_ForwardedEnd, _Activity] = {}
        """Client's ends of the open connections."""

    @property
    def num_open(self) -> int:
        return len(self._ends)

    def add(
        self, transport: asyncio.Transport | TlsTransport, first: bytes, tls: TlsTransport | None = None
    ) -> None:
        """Take over ``transport``; ``first`` is what it has received already."""
        transport.pause_reading()
        end = _ForwardedEnd()
        end.transport, end.tls, end.num_bytes = transport, tls, len(first)
        end.on_lost = lambda: self._ends.pop(end, None)
        transport.set_protocol(end)
        self._ends[end] = _Activity(asyncio.get_running_loop().time())
        task = asyncio.get_running_loop().create_task(self._join(end, first))
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)

    async def _join(self, outer: _ForwardedEnd, first: bytes) -> None:
        inner = _ForwardedEnd()
        inner.other = outer  # before it connects: some servers send first
        try:
            there, _ = await asyncio.get_running_loop().create_unix_connection(lambda: inner, self._path)
        except OSError as error:
            log.warning("forward_failed", path=self._path, reason=str(error))
            outer.close()
            self._ends.pop(outer, None)
            return
        there.write(first)
        outer.join(inner, there)

    def make_room(self) -> bool:
        """Close the connection that has been idle for longest; False when there is none."""
        rested = min(self._ends, key=lambda end: self._ends[end].moved_at, default=None)
        if rested is not None:
            self._cut(rested, "crowded", "all connections were taken")
        return rested is not None

    def look(self, now: float) -> None:
        """Close connections that have exceeded a time limit."""
        for end, watch in list(self._ends.items()):
            if end.transport is None:
                del self._ends[end]
                continue
            num_bytes = end.num_bytes + (end.other.num_bytes if end.other is not None else 0)
            if num_bytes != watch.num_bytes:
                watch.num_bytes, watch.moved_at = num_bytes, now
            if end.num_bytes < OPENING_BYTES and now > watch.since + self._limits.greeting_s:
                self._cut(end, "greeting", "it did not open with an HTTP/2 request")
            elif now > watch.moved_at + self._limits.splice_idle_s:
                self._cut(end, "idle", "no traffic for too long")

    def _cut(self, end: _ForwardedEnd, reason: str, detail: str) -> None:
        self._refusals.add("forward_closed", reason, detail=detail)
        self._ends.pop(end, None)
        end.close()

    def close(self) -> None:
        """Close all of them."""
        for task in list(self._tasks):
            task.cancel()
        for end in list(self._ends):
            end.close()


class _Activity:
    """Time of the last traffic on a connection."""

    def __init__(self, now: float) -> None:
        self.since = self.moved_at = now
        self.num_bytes = 0

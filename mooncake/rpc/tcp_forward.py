"""Hands a connection that speaks another protocol on to the server of that protocol, byte for byte.

So one port can serve our clients and those of gRPC: HTTP/2 opens with other bytes than we do. Neither side
notices; what one sends faster than the other takes is held back where it comes from.
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
"""Of what an HTTP/2 client sends before its first frame."""


class _ForwardedEnd(asyncio.Protocol):
    """One of two connections that are made one."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | TlsTransport | None = None
        self.other: _ForwardedEnd | None = None
        self.tls: TlsTransport | None = None
        self.num_bytes = 0
        """That came in from here."""
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
        if self.other is not None and self.other.transport is not None:
            self.other.transport.write_eof()
        return True

    def pause_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.resume_reading()

    def join(self, other: _ForwardedEnd, there: asyncio.Transport) -> None:
        """What comes from now on goes ``there``, unless the client left meanwhile."""
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
    """Connections handed on to the server at the Unix socket ``path``: counted, and not for ever.

    Whoever has not sent what HTTP/2 opens with by the deadline of a greeting, or has sent and been sent
    nothing for ``Limits.splice_idle_s``, is cut off.
    """

    def __init__(self, path: str, limits: Limits, refusals: RefusalLog) -> None:
        self._path = path
        self._limits = limits
        self._refusals = refusals
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._ends: dict[_ForwardedEnd, _Activity] = {}
        """Of those that are open, the client's side."""

    @property
    def num_open(self) -> int:
        return len(self._ends)

    def add(
        self, transport: asyncio.Transport | TlsTransport, first: bytes, tls: TlsTransport | None = None
    ) -> None:
        """Take ``transport`` over; ``first`` is what came already."""
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
        inner.other = outer  # before it connects: some servers speak first
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
        """Cut off the one for which nothing has gone to and fro for longest; False: there is none."""
        rested = min(self._ends, key=lambda end: self._ends[end].moved_at, default=None)
        if rested is not None:
            self._cut(rested, "crowded", "all connections were taken")
        return rested is not None

    def look(self, now: float) -> None:
        """Cut off those that have used up their time."""
        for end, watch in list(self._ends.items()):
            if end.transport is None:
                del self._ends[end]
                continue
            num_bytes = end.num_bytes + (end.other.num_bytes if end.other is not None else 0)
            if num_bytes != watch.num_bytes:
                watch.num_bytes, watch.moved_at = num_bytes, now
            if end.num_bytes < OPENING_BYTES and now > watch.since + self._limits.greeting_s:
                self._cut(end, "greeting", "it opened with something else than a request")
            elif now > watch.moved_at + self._limits.splice_idle_s:
                self._cut(end, "idle", "nothing was said for long")

    def _cut(self, end: _ForwardedEnd, reason: str, detail: str) -> None:
        self._refusals.add("forward_closed", reason, detail=detail)
        self._ends.pop(end, None)
        end.close()

    def close(self) -> None:
        """Cut all of them off."""
        for task in list(self._tasks):
            task.cancel()
        for end in list(self._ends):
            end.close()


class _Activity:
    """When something last went over a connection."""

    def __init__(self, now: float) -> None:
        self.since = self.moved_at = now
        self.num_bytes = 0

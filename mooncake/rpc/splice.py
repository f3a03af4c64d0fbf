"""Hands a connection that speaks another protocol on to the server of that protocol, byte for byte.

So one port can serve our clients and those of gRPC: HTTP/2 opens with other bytes than we do. Neither side
notices; what one sends faster than the other takes is held back where it comes from.
"""

from __future__ import annotations

import asyncio
from typing import cast

from mooncake.log import get_logger

log = get_logger(__name__)


class _End(asyncio.Protocol):
    """One of two connections that are made one."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.other: _End | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.write(data)

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

    def join(self, other: _End, there: asyncio.Transport) -> None:
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
        if self.other is not None and self.other.transport is not None:
            self.other.transport.close()


class Splices:
    """Connections handed on to the server at the Unix socket ``path``."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._ends: dict[_End, None] = {}

    def add(self, transport: asyncio.Transport, first: bytes) -> None:
        """Take ``transport`` over; ``first`` is what came already."""
        transport.pause_reading()
        end = _End()
        end.connection_made(transport)
        transport.set_protocol(end)
        task = asyncio.get_running_loop().create_task(self._join(end, first))
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)

    async def _join(self, outer: _End, first: bytes) -> None:
        inner = _End()
        inner.other = outer  # before it connects: some servers speak first
        try:
            there, _ = await asyncio.get_running_loop().create_unix_connection(lambda: inner, self._path)
        except OSError as error:
            log.warning("splice_failed", path=self._path, reason=str(error))
            outer.close()
            return
        self._ends = {end: None for end in self._ends if end.transport is not None}
        self._ends[outer] = None
        there.write(first)
        outer.join(inner, there)

    def close(self) -> None:
        """Cut all of them off."""
        for task in list(self._tasks):
            task.cancel()
        for end in self._ends:
            end.close()

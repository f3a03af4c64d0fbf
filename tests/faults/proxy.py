# SPDX-License-Identifier: Apache-2.0
"""A TCP proxy in a thread that can reset connections, truncate frames, flip bits and stop forwarding."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from typing import Any

CHUNK_BYTES = 64 << 10


class Proxy:
    """Forwards from a port of its own to ``target_port``, both on loopback, each connection at most
    ``bytes_per_s`` (0: no limit)."""

    def __init__(self, target_port: int, bytes_per_s: float = 0.0) -> None:
        self._bytes_per_s = bytes_per_s
        self._target_port = target_port
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._breaks_after: dict[bool, int | None] = {True: None, False: None}
        self._flips: dict[bool, tuple[int, int] | None] = {True: None, False: None}
        self.num_flipped = 0
        """Number of flipped bits."""
        self._loop = asyncio.new_event_loop()
        self._loop.run_until_complete(self._start())
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()

    async def _start(self) -> None:
        self._flows = asyncio.Event()
        self._flows.set()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port: int = self._server.sockets[0].getsockname()[1]

    def reset(self) -> None:
        """Reset all connections at both ends."""
        self._call(self._reset)

    def break_frame(self, num_bytes: int, to_peer: bool) -> None:
        """Close the connection on which this many more bytes have arrived in one direction."""
        self._call(lambda: self._breaks_after.__setitem__(to_peer, num_bytes))

    def flip(self, num_bytes: int, bit: int, to_peer: bool) -> None:
        """Flip one bit of the byte that follows this many more bytes in one direction."""
        self._call(lambda: self._flips.__setitem__(to_peer, (num_bytes, bit)))

    def silence(self, is_silent: bool) -> None:
        """Stop forwarding until ``heal``."""
        self._call(self._flows.clear if is_silent else self._flows.set)

    def heal(self) -> None:
        self._call(self._heal)

    def close(self) -> None:
        self._call(self._reset)
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _stop(self) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _call(self, what: Callable[[], object]) -> None:
        async def call() -> None:
            what()

        coroutine: Coroutine[Any, Any, None] = call()
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)

    def _reset(self) -> None:
        for writer in list(self._writers):
            end: socket.socket = writer.get_extra_info("socket")
            with contextlib.suppress(OSError):  # it may have ended meanwhile
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

    def _heal(self) -> None:
        self._flows.set()
        self._breaks_after = {True: None, False: None}
        self._flips = {True: None, False: None}

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        other: asyncio.StreamWriter | None = None
        try:
            there, other = await asyncio.open_connection("127.0.0.1", self._target_port)
            self._writers.add(other)
            ways = [
                asyncio.ensure_future(self._pump(reader, other, to_peer=True)),
                asyncio.ensure_future(self._pump(there, writer, to_peer=False)),
            ]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        except OSError:
            pass  # the target is not listening at the moment
        finally:
            for end in (writer, other):
                if end is not None:
                    self._writers.discard(end)
                    end.close()
            self._tasks.discard(task)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, to_peer: bool) -> None:
        """Forward until one end is closed, or a frame is to be truncated here."""
        while data := await reader.read(CHUNK_BYTES):
            if self._bytes_per_s:
                await asyncio.sleep(len(data) / self._bytes_per_s)
            await self._flows.wait()
            left = self._breaks_after[to_peer]
            if left is not None:
                self._breaks_after[to_peer] = None if left <= len(data) else left - len(data)
            breaks = left is not None and left <= len(data)
            data = self._flipped(data, to_peer)
            writer.write(data[:left] if breaks else data)
            await writer.drain()
            if breaks:
                return

    def _flipped(self, data: bytes, to_peer: bool) -> bytes:
        planned = self._flips[to_peer]
        if planned is None:
            return data
        num_bytes, bit = planned
        if num_bytes >= len(data):
            self._flips[to_peer] = (num_bytes - len(data), bit)
            return data
        self._flips[to_peer] = None
        self.num_flipped += 1
        changed = bytearray(data)
        changed[num_bytes] ^= 1 << bit
        return bytes(changed)

"""The asyncio server: connections, dispatch by message type, backpressure.

One ``asyncio.Protocol`` per connection rather than streams: a request that a plain function can
answer is decoded, handled and answered inside ``data_received``, without a task or a wake-up, which
is what keeps a one-key call of the store under 50 microseconds. Who owns which state is not known
here; a handler gets the message and the ``Call`` to answer, now or later.
"""

from __future__ import annotations

import asyncio
import errno
import math
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import msgspec

from mooncake.errors import AddressInUse, InvalidArgument, MooncakeError, ProtocolError
from mooncake.log import get_logger
from mooncake.rpc import looking
from mooncake.rpc.looking import Looking
from mooncake.rpc.splice import Splices
from mooncake.rpc.wire import (
    MAX_BODY_BYTES,
    PREFACE,
    Failure,
    FrameDecoder,
    Message,
    decoder_for,
    encode,
)

log = get_logger(__name__)

MAX_OPEN_CALLS = 1024
"""Calls of one connection that may wait for an answer; beyond it the server stops reading from it."""

LOOK_S = 1.0
"""Between looks for connections that take too long."""


@dataclass(frozen=True)
class Limits:
    """What strangers and sick clients can cost a server."""

    greeting_s: float = 10.0
    "From accepting a connection to the end of its greeting, with TLS of the handshake."
    stall_s: float = 60.0
    "For one request to arrive, or replies to be taken, and a second more per MiB."
    max_connections: int = 16384
    max_body_bytes: int = MAX_BODY_BYTES


Handler: TypeAlias = Callable[[Any, "Call"], Message | Awaitable[Message | None] | None]
"""``handler(message, call)``: returns the reply, or an awaitable of it, or None to answer later."""


class Call:
    """One request that waits for its answer. Answer exactly once; a lost connection swallows it."""

    __slots__ = ("connection", "request_id")

    def __init__(self, connection: Connection, request_id: int) -> None:
        self.connection = connection
        self.request_id = request_id

    def reply(self, message: Message) -> None:
        self.connection.answer(self.request_id, message)

    def fail(self, error: MooncakeError) -> None:
        self.reply(Failure(error.code, str(error)))

    def __repr__(self) -> str:
        return f"<Call {self.request_id} of {self.connection.peer}>"


class Connection(asyncio.Protocol):
    """One client, as the server sees it. Compared and hashed by identity."""

    def __init__(self, server: RpcServer) -> None:
        self._server = server
        self._decoder = FrameDecoder(expects_preface=True, max_body_bytes=server.limits.max_body_bytes)
        self._transport: asyncio.Transport | None = None
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._num_open = 0
        self._out: list[bytearray] | None = None
        self._is_write_blocked = False
        self._is_read_paused = False
        self._num_taken = 0
        self._is_new = True
        self._looked_at: tuple[int, bool] | None = None
        self._overdue_at = math.inf
        self.peer = "unknown"

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast: uvloop's transports don't inherit from asyncio's.
        transport = cast(asyncio.Transport, transport)
        self._transport = transport
        sock = transport.get_extra_info("socket")
        if sock is not None:
            # A client whose machine is gone says no goodbye; the kernel finds out.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        name = transport.get_extra_info("peername")
        self.peer = f"{name[0]}:{name[1]}" if name else "unknown"
        if len(self._server.connections) >= self._server.limits.max_connections:
            log.warning("connection_refused", peer=self.peer, reason="too many connections")
            transport.abort()
            return
        self._server.connections[self] = None
        self._overdue_at = asyncio.get_running_loop().time() + self._server.limits.greeting_s

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._server.connections.pop(self, None)
        for task in self._tasks:
            task.cancel()
        if self._server.on_lost is not None:
            self._server.on_lost(self)

    def data_received(self, data: bytes) -> None:
        if self._is_new:
            self._is_new = False
            if self._server.other is not None and data[:1] != PREFACE[:1]:
                self._hand_on(self._server.other, data)
                return
        # Answers given while this chunk is worked off leave in one write.
        self._out = []
        try:
            for request_id, body in self._decoder.feed(data):
                self._take(request_id, body)
        except ProtocolError as error:
            log.warning("connection_refused", peer=self.peer, reason=str(error))
            self.close()
        finally:
            out, self._out = self._out, None
            if out and self._transport is not None:
                self._transport.write(out[0] if len(out) == 1 else b"".join(out))
            self._server.stay_awake()

    def _hand_on(self, other: Splices, first: bytes) -> None:
        """The client speaks another protocol; from now on its connection is none of ours."""
        assert self._transport is not None
        transport, self._transport = self._transport, None
        self._server.connections.pop(self, None)
        other.add(transport, first)

    def pause_writing(self) -> None:
        self._is_write_blocked = True
        self._regulate()

    def resume_writing(self) -> None:
        self._is_write_blocked = False
        self._regulate()

    # the server's side

    def answer(self, request_id: int, message: Message) -> None:
        """Send the reply to ``request_id``; does nothing when the connection is gone."""
        self._num_open -= 1
        if self._transport is None:
            return
        try:
            frame = encode(request_id, message)
        except InvalidArgument as error:
            frame = encode(request_id, Failure(error.code, f"the reply is too large: {error}"))
        if self._out is not None:
            self._out.append(frame)
        else:
            self._transport.write(frame)
            self._regulate()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def look(self, now: float) -> None:
        """Cut the connection off if it has used up the time for what it is doing.

        That is its greeting, or one frame; taking replies counts as one. Between frames it may rest.
        """
        if self._transport is None:
            return
        missing_bytes = self._decoder.missing_bytes
        if self._is_write_blocked:
            missing_bytes += self._transport.get_write_buffer_size()
        state = (self._num_taken, self._is_write_blocked)
        if self._decoder.is_greeted and (not missing_bytes or state != self._looked_at):
            self._looked_at = state if missing_bytes else None
            self._overdue_at = now + self._server.limits.stall_s + missing_bytes / (1 << 20)
        elif now > self._overdue_at:
            what = "a request or its replies" if self._decoder.is_greeted else "its greeting"
            log.warning("connection_cut", peer=self.peer, reason=f"{what} took too long")
            self._transport.abort()

    def fileno(self) -> int:
        """Of its socket; -1 when it is closed."""
        sock = self._transport.get_extra_info("socket") if self._transport is not None else None
        return -1 if sock is None else int(sock.fileno())

    def _take(self, request_id: int, body: memoryview) -> None:
        self._num_open += 1
        self._num_taken += 1
        call = Call(self, request_id)
        try:
            message = self._server.decoder.decode(body)
            handler = self._server.handlers.get(type(message))
            if handler is None:
                raise ProtocolError(f"{type(message).__name__} is no request")
            result = handler(message, call)
        except Exception as error:
            self._fail(call, error)
            return
        if result is None:
            self._regulate()
        elif isinstance(result, msgspec.Struct):
            self.answer(request_id, result)
        else:
            task = asyncio.ensure_future(self._finish(call, result))
            self._tasks[task] = None
            task.add_done_callback(self._tasks.pop)
            self._regulate()

    async def _finish(self, call: Call, result: Awaitable[Message | None]) -> None:
        try:
            reply = await result
        except Exception as error:
            self._fail(call, error)
        else:
            if reply is not None:
                call.reply(reply)

    def _fail(self, call: Call, error: Exception) -> None:
        if isinstance(error, MooncakeError):
            call.fail(error)
        elif isinstance(error, msgspec.MsgspecError):
            call.fail(ProtocolError(f"the request can't be read: {error}"))
        else:
            log.exception("handler_failed", peer=self.peer)
            call.fail(MooncakeError(f"the handler failed with {type(error).__name__}; see the server's log"))

    def _regulate(self) -> None:
        """Read only from a client that takes its answers and doesn't flood us with open calls."""
        wanted = self._is_write_blocked or self._num_open >= MAX_OPEN_CALLS
        if self._transport is None or wanted == self._is_read_paused or self._transport.is_closing():
            return
        self._is_read_paused = wanted
        if wanted:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def __repr__(self) -> str:
        return f"<Connection {self.peer} [{self._num_open} open]>"


class RpcServer:
    """Serves ``handlers`` (message type -> handler) to any number of connections."""

    def __init__(
        self,
        handlers: Mapping[type[Message], Handler],
        on_lost: Callable[[Connection], None] | None = None,
        *,
        limits: Limits | None = None,
        tls: ssl.SSLContext | None = None,
        other: str = "",
    ) -> None:
        """``other``: Unix socket of the server for clients that open with another protocol."""
        self.handlers = dict(handlers)
        self.decoder = decoder_for(self.handlers)
        self.on_lost = on_lost
        self.connections: dict[Connection, None] = {}
        self.limits = limits or Limits()
        self._tls = tls
        self.other = Splices(other) if other else None
        self._look: asyncio.TimerHandle | None = None
        self.port = 0
        self._server: asyncio.Server | None = None
        self._looking = Looking()
        self._awake_until = 0.0
        self._is_awake = False

    def stay_awake(self) -> None:
        """Keep the loop awake for a moment, if that pays: whoever asked just now often asks again."""
        if not self._is_awake and self._looking.pays:
            self._is_awake = True
            asyncio.get_running_loop().call_soon(self._stay_awake)
        self._awake_until = time.perf_counter() + looking.LOOK_S

    def _stay_awake(self) -> None:
        self._is_awake = time.perf_counter() < self._awake_until
        if self._is_awake:
            asyncio.get_running_loop().call_soon(self._stay_awake)

    async def start(self, host: str, port: int) -> int:
        """Listen; port 0 takes a free one. Returns the port.

        Raises:
            AddressInUse: the port is taken.
            InvalidArgument: the host is not an address of this machine.
        """
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(
                lambda: Connection(self),
                host,
                port,
                ssl=self._tls,
                ssl_handshake_timeout=self.limits.greeting_s if self._tls is not None else None,
            )
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise AddressInUse(f"{host}:{port} is in use; free it or choose another port") from error
            raise InvalidArgument("address", f"{host}:{port}", f"one to listen on ({error})") from error
        self.port = self._server.sockets[0].getsockname()[1]
        self._look_around()
        return self.port

    def _look_around(self) -> None:
        loop = asyncio.get_running_loop()
        for connection in list(self.connections):
            connection.look(loop.time())
        self._look = loop.call_later(LOOK_S, self._look_around)

    def descriptors(self) -> list[int]:
        """Numbers of its open sockets, for a forked child that has to let go of them."""
        listening = self._server.sockets if self._server is not None else ()
        return [sock.fileno() for sock in listening] + [
            number for number in (connection.fileno() for connection in self.connections) if number >= 0
        ]

    async def close(self) -> None:
        """Stop listening and close every connection."""
        if self._look is not None:
            self._look.cancel()
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            connection.close()
        if self.other is not None:
            self.other.close()
        if self._server is not None:
            await self._server.wait_closed()
            self._server = None

    def __repr__(self) -> str:
        return f"<RpcServer :{self.port} [{len(self.connections)} connections]>"

# SPDX-License-Identifier: Apache-2.0
"""The asyncio server: connections, dispatch by message type, backpressure.

One ``asyncio.Protocol`` per connection rather than streams: a request that a plain function can
answer is decoded, handled and answered inside ``data_received``, without a task or a wake-up, which
is what keeps a one-key call of the store under 50 microseconds. The server knows no application
state; a handler gets the message and the ``Call`` to answer, now or later.

A small request that comes alone is handled at once. Large ones, and many at once, are handled in turns: in
each pass of the loop for ``TURN_S``, one connection after the other. So clients that send batches, or
hundreds of requests, delay the others by one turn and not by all of them, however many do so.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import itertools
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias, cast

import msgspec

from mooncake.errors import AccessDenied, AddressInUse, InvalidArgument, MooncakeError, ProtocolError
from mooncake.file_limit import default_max_connections
from mooncake.log import get_logger
from mooncake.rpc import adaptive_spin
from mooncake.rpc.adaptive_spin import AdaptiveSpin
from mooncake.rpc.client import keep_alive
from mooncake.rpc.limits import (
    CONNECTIONS,
    CROWDED_GREETING_S,
    PENDING_BYTES,
    Limits,
    RefusalLog,
)
from mooncake.rpc.local_socket import listen_beside, loopback_of, peer_credentials
from mooncake.rpc.tcp_forward import TcpForwarder
from mooncake.rpc.tls import TlsTransport
from mooncake.rpc.wire import (
    GREETING_ID,
    PREFACE,
    Failure,
    FrameDecoder,
    GreetingDecoder,
    Message,
    decoder_for,
    encode,
)
from mooncake.security import OPEN, TRUSTED, Access, Identity, Principal, process_identity
from mooncake.security.greeting import Hello, ServerGreeting, binding_of
from mooncake.security.principal import principal_of
from mooncake.security.tls_contexts import server_context

log = get_logger(__name__)

MAX_OPEN_CALLS = 1024
"""Calls of one connection that may wait for an answer; beyond it the server stops reading from it."""

TURN_S = 0.0005
"""Seconds of handling after which a connection's further requests wait for the other connections' turns: some
50 small ones. One request is never divided."""

SMALL_BYTES = 4096
"""Size up to which a request that came alone is handled at once, before others' turns: a node's heartbeat
does not wait for sixty batches of puts."""

MAX_DEFERRED_BYTES = 64 << 20
"""Bound of the received bytes that wait for turns, of all connections; beyond it a request does not wait."""

DEADLINE_CHECK_S = 0.25
"""Interval of the check for connections that exceed a deadline."""

REFUSAL_GRACE_S = 0.5
"""Time for a refused peer to read the reason and close."""

BACKLOG = 1024
"""Backlog of connections that the kernel accepts meanwhile."""


Handler: TypeAlias = Callable[[Any, "Call"], Message | Awaitable[Message | None] | None]
"""``handler(message, call)`` returns the reply, or an awaitable of it, or None to answer later."""


class Call:
    """One request that waits for its answer. Answer exactly once; on a lost connection that has no effect."""

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
    """One client's connection. Compared and hashed by identity.

    It begins as unauthenticated: until its greeting has ended nothing else is read from it. Without
    authentication it counts as such until its first valid request. Unauthenticated connections make room
    for others.
    """

    def __init__(self, server: RpcServer, local_host: str = "") -> None:
        """``local_host``: address beside which the Unix socket of this connection listens."""
        self._server = server
        self._local_host = local_host
        self._decoder = FrameDecoder(max_body_bytes=server.limits.max_body_bytes)
        self._early: GreetingDecoder | None = GreetingDecoder()
        self._greeting: ServerGreeting | None = None
        self._handlers = server.handlers
        self._transport: asyncio.Transport | TlsTransport | None = None
        self._tls: TlsTransport | None = None
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._num_open = 0
        self._out: list[bytearray] | None = None
        self._is_write_blocked = False
        self._is_read_paused = False
        self._num_taken = 0
        self._deferred: deque[tuple[int, memoryview]] = deque()
        """Received requests that wait for this connection's next turn; meanwhile nothing more is read."""
        self._deferred_bytes = 0
        self._is_new = True
        self._is_unauthenticated = True
        self._is_refused = False
        self._looked_at: tuple[int, bool] | None = None
        self._accepted_at = self._overdue_at = math.inf
        self._pending_bytes = 0
        self._free: frozenset[type] | None = frozenset()
        """Message types allowed without a further check; None means all."""
        self.principal = OPEN
        """The authenticated principal; undefined before the greeting has ended."""
        self.peer = "unknown"

    # Protocol methods, called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast: uvloop's transports don't inherit from asyncio's.
        raw = cast(asyncio.Transport, transport)
        self._transport = raw
        sock = raw.get_extra_info("socket")
        keep_alive(sock)
        name = raw.get_extra_info("peername")
        if name:
            self.peer = f"{name[0]}:{name[1]}"
        elif self._local_host:
            # In the form of an address, since logs are searched by host, and different for each connection.
            number = next(self._server.local_numbers)
            self.peer = f"{self._local_host}:pid-{peer_credentials(sock)[0]}.{number}"
        if not self._server.admit(self):
            raw.abort()
            return
        self._accepted_at = asyncio.get_running_loop().time()
        self._overdue_at = self._accepted_at + self._server.limits.greeting_s
        if self._server.tls is not None:
            self._transport = self._tls = TlsTransport(raw, self._server.tls, None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._keep_account(0)
        self._take_rest()
        self._server.dismiss(self)
        for task in self._tasks:
            task.cancel()
        if self._server.on_lost is not None:
            self._server.on_lost(self)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        # Replies made while this chunk is processed are sent in one write.
        self._out, num_taken = [], self._num_taken
        try:
            if self._tls is not None:
                data = self._tls.feed(data)
            if self._early is not None:
                data = self._greet(data)
            if data:
                self._take_all(self._decoder.feed(data))
            if self._tls is not None and self._tls.has_ended:
                self._take_rest()
                self.close()
        except (ProtocolError, AccessDenied) as error:
            self._refuse(error)
        finally:
            self._write_replies()
            if self._num_taken != num_taken:  # a part of a request is not soon followed by another one
                self._server.stay_awake()
        if self._pending_bytes != self._decoder.kept_bytes:
            self._keep_account(self._decoder.kept_bytes)

    def _take_all(self, frames: list[tuple[int, memoryview]]) -> None:
        """Handle these requests: a small one at once, others in turns."""
        if self._deferred:  # some transports deliver what they had read before reading was paused
            self._deferred += frames
        elif len(frames) == 1 and len(frames[0][1]) <= SMALL_BYTES:
            self._take(*frames[0])
        elif frames:
            self._deferred += frames
            self._account_deferred(memoryview(frames[0][1].obj).nbytes)
            self._server.add_turn(self)
            self._regulate()

    def take_turn(self, until: float) -> bool:
        """Handle deferred requests, at least one, until that instant; returns whether some are left."""
        deferred = self._deferred
        is_outermost = self._out is None
        if is_outermost:
            self._out = []
        try:
            while deferred:
                self._take(*deferred.popleft())
                if deferred and time.perf_counter() >= until:
                    return True
            self._account_deferred(0)
            self._regulate()
            return False
        finally:
            if is_outermost:
                self._write_replies()

    def _take_rest(self) -> None:
        """Handle all deferred requests, because their client has gone: what arrived whole is handled."""
        while self._deferred:
            self._take(*self._deferred.popleft())
        self._account_deferred(0)

    def _account_deferred(self, num_bytes: int) -> None:
        self._server.deferred_bytes += num_bytes - self._deferred_bytes
        self._deferred_bytes = num_bytes

    def _write_replies(self) -> None:
        """Send the replies that were made while requests were handled."""
        out, self._out = self._out, None
        if out and self._transport is not None:
            self._transport.write(out[0] if len(out) == 1 else b"".join(out))

    def _greet(self, data: bytes) -> bytes:
        """Process the greeting; return the rest of ``data`` when it has ended."""
        if not data:
            return b""
        if self._is_new:
            self._is_new = False
            if self._server.other is not None and data[:1] != PREFACE[:1]:
                if self._tls is not None and principal_of(self._tls.certificate).level not in TRUSTED:
                    raise AccessDenied("not authenticated: the certificate's role is not admitted here")
                self._hand_on(self._server.other, data)
                return b""
        assert self._early is not None
        while (message := self._early.take(data)) is not None:
            data = b""
            if self._greeting is None:
                certified = None
                if self._tls is not None:
                    certified = principal_of(self._tls.certificate)
                self._greeting = self._server.identity.server_greeting(certified, self._server.binding)
            if isinstance(message, Hello):
                challenge = self._greeting.hello(message)
                if challenge is not None:
                    self._send(encode(GREETING_ID, challenge))
            else:
                self._greeting.prove(message)
            if self._greeting.principal is not None:
                return self._greeted(self._greeting.principal)
        return b""

    def _greeted(self, principal: Principal) -> bytes:
        """End the greeting; return the rest of the received bytes, for the next decoder."""
        assert self._early is not None
        rest, self._early, self._greeting = self._early.rest, None, None
        self.principal = principal
        self._free = self._server.access.free(principal)
        if not principal.is_open:
            self._known()
        return rest

    def _known(self) -> None:
        self._is_unauthenticated = False
        self._server.mark_known(self)

    def _refuse(self, error: MooncakeError) -> None:
        """Send the reason, if the peer can decode it, and close."""
        is_denied = isinstance(error, AccessDenied)
        self._server.refusals.add(
            "connection_refused", "denied" if is_denied else "protocol", peer=self.peer, detail=str(error)
        )
        if self._early is not None and not self._early.is_ours:
            self.close()  # it uses another protocol and could not decode the reason
            return
        if self._transport is not None and (self._tls is None or self._tls.is_ready):
            self._send(encode(GREETING_ID, Failure(error.code, str(error))))
        # Closed at once, the connection would be reset by the client's next bytes and the reason lost.
        self._early = self._early or GreetingDecoder()
        self._is_refused = True
        self._server.watch(self)
        self._overdue_at = asyncio.get_running_loop().time() + REFUSAL_GRACE_S

    def _send(self, frame: bytearray) -> None:
        if self._out is not None:
            self._out.append(frame)
        elif self._transport is not None:
            self._transport.write(frame)

    def _keep_account(self, kept_bytes: int) -> None:
        """Update the total of unfinished frames by this connection's bytes."""
        self._server.pending_bytes += kept_bytes - self._pending_bytes
        self._pending_bytes = kept_bytes
        if kept_bytes:
            self._server.watch(self)
        if self._server.pending_bytes > self._server.limits.max_pending_bytes:
            self._server.shed_pending_bytes()

    @property
    def pending_bytes(self) -> int:
        return self._pending_bytes

    def cut(self, reason: str, detail: str) -> None:
        """Abort the connection."""
        self._server.refusals.add("connection_dropped", reason, peer=self.peer, detail=detail)
        self._keep_account(0)
        self._decoder = FrameDecoder(0)
        self._deferred.clear()
        self._account_deferred(0)
        if self._transport is not None:
            self._transport.abort()

    def _hand_on(self, other: TcpForwarder, first: bytes) -> None:
        """Pass the connection to ``other``, because its client uses another protocol."""
        assert self._transport is not None
        transport, self._transport = self._transport, None
        self._server.dismiss(self)
        other.add(transport, first, self._tls)
        self._early = self._tls = None

    def pause_writing(self) -> None:
        self._is_write_blocked = True
        self._server.watch(self)
        self._regulate()

    def resume_writing(self) -> None:
        self._is_write_blocked = False
        self._regulate()

    @property
    def is_from_this_host(self) -> bool:
        """Whether the peer is a process of this host, or of this network name space."""
        if self._local_host:
            return True
        names = ("peername", "sockname")
        ends = [self._transport.get_extra_info(name) for name in names] if self._transport is not None else []
        return len(ends) == 2 and bool(ends[0]) and ends[0][0] == ends[1][0]

    # Methods called by the server

    def answer(self, request_id: int, message: Message) -> None:
        """Send the reply to ``request_id``; does nothing when the connection is gone."""
        self._num_open -= 1
        if self._transport is None:
            return
        try:
            frame = encode(request_id, message)
        except Exception as error:  # the client and the connection's other requests get answers all the same
            frame = encode(request_id, self._failure_in_place_of(message, error))
        if self._out is not None:
            self._out.append(frame)
        else:
            self._transport.write(frame)
            self._regulate()

    def _failure_in_place_of(self, message: Message, error: Exception) -> Failure:
        """A reply that can be encoded, in place of one that can't."""
        if isinstance(error, InvalidArgument):
            return Failure(error.code, f"the reply is too large: {error}")
        if isinstance(message, Failure):  # the name of a file is text with surrogates where it is not UTF-8
            return Failure(message.code, message.message.encode(errors="backslashreplace").decode())
        log.exception("handler_failed", peer=self.peer)
        what = f"the reply {type(message).__name__} can't be encoded ({type(error).__name__})"
        return Failure(MooncakeError.code, f"{what}; see the server's log")

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def look(self, now: float) -> bool:
        """Abort the connection if it has exceeded the time for its greeting or for one frame.

        Taking replies counts as a frame. Between frames there is no limit. Returns whether the connection
        rests between two frames.
        """
        if self._transport is None:
            return True
        if self._early is not None:
            allowed_s = self._server.greeting_s()
            if self._is_refused:
                if now > self._overdue_at:
                    self._transport.abort()
            elif now > min(self._overdue_at, self._accepted_at + allowed_s):
                self.cut("greeting", f"not greeted within {allowed_s:g} s")
            return False
        missing_bytes = self._decoder.missing_bytes
        if self._is_write_blocked:
            missing_bytes += self._transport.get_write_buffer_size()
        state = (self._num_taken, self._is_write_blocked)
        if not missing_bytes or state != self._looked_at:
            self._looked_at = state if missing_bytes else None
            self._overdue_at = now + self._server.limits.stall_s + missing_bytes / (1 << 20)
        elif now > self._overdue_at:
            self.cut("stall", "receiving a request or sending its replies took too long")
        return not missing_bytes

    def fileno(self) -> int:
        """Socket's file descriptor, -1 when closed."""
        sock = self._transport.get_extra_info("socket") if self._transport is not None else None
        return -1 if sock is None else int(sock.fileno())

    def _take(self, request_id: int, body: memoryview) -> None:
        self._num_open += 1
        self._num_taken += 1
        call = Call(self, request_id)
        try:
            message = self._server.decoder.decode(body)
            handler = self._handlers.get(type(message))
            if handler is None:
                raise ProtocolError(f"{type(message).__name__} is no request")
            if self._free is not None and type(message) not in self._free:
                self._check(message)
            if self._is_unauthenticated:
                self._known()
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

    def _check(self, message: Message) -> None:
        """Raise AccessDenied if this peer may not send the message."""
        refusal = self._server.access.refusal(message, self.principal)
        if refusal:
            self._server.refusals.add("request_refused", "forbidden", peer=self.peer, detail=refusal)
            raise AccessDenied(refusal)

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
            call.fail(ProtocolError(f"the request can't be decoded: {error}"))
        else:
            log.exception("handler_failed", peer=self.peer)
            call.fail(MooncakeError(f"the handler failed with {type(error).__name__}; see the server's log"))

    def _regulate(self) -> None:
        """Stop reading from a client that does not take its replies, has too many open calls, or has requests
        that wait for their turn."""
        wanted = self._is_write_blocked or self._num_open >= MAX_OPEN_CALLS or bool(self._deferred)
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
    """Server of ``handlers`` (message type -> handler) for any number of connections."""

    def __init__(
        self,
        handlers: Mapping[type[Message], Handler],
        on_lost: Callable[[Connection], None] | None = None,
        *,
        access: Access | None = None,
        identity: Identity | None = None,
        limits: Limits | None = None,
        other: str = "",
        name: str = "rpc",
        is_peer: bool = False,
        has_local_socket: bool = False,
    ) -> None:
        """
        Args:
            access: which roles may send what, where peers are authenticated; without it all is refused.
            identity: identity to use instead of the process's.
            other: Unix socket of the server for clients that open with another protocol.
            name: label of this server in metrics.
            is_peer: any process may run such a server; a proof for it is not valid at masters or conductors.
            has_local_socket: listen on a Unix socket beside a loopback port, too (``local_socket.py``).
        """
        self.handlers = dict(handlers)
        self.decoder = decoder_for(self.handlers)
        self.on_lost = on_lost
        self.access = access or Access()
        self.identity = identity or process_identity()
        self.name = name
        self.binding = binding_of(is_peer, self.identity.certificate_digest)
        self.refusals = RefusalLog(name)
        self.connections: dict[Connection, None] = {}
        self._unauthenticated: dict[Connection, None] = {}
        """Unauthenticated ones of ``connections``, the oldest first."""
        self.watched: dict[Connection, None] = {}
        """Those that may have a deadline. To look at a thousand resting ones takes a third of a percent of a
        core."""
        self.limits = limits or Limits()
        self._max_connections = self.limits.max_connections or default_max_connections()
        self.pending_bytes = 0
        self.deferred_bytes = 0
        """Bytes of received requests that wait for the turns of their connections."""
        self._turns: deque[Connection] = deque()
        """Connections with deferred requests, in the order of their next turns."""
        self._has_turn = False
        """Turns were taken in this pass of the loop."""
        self.other = TcpForwarder(other, self.limits, self.refusals) if other else None
        self.tls = self.identity.server_tls
        if self.tls is not None and other:
            self.tls = server_context(self.identity.settings)
            self.tls.set_alpn_protocols(["h2"])  # required by clients of gRPC
        self._look: asyncio.TimerHandle | None = None
        self.port = 0
        self._server: asyncio.Server | None = None
        self._has_local_socket = has_local_socket and self.tls is None
        self._local_servers: list[asyncio.Server] = []
        self.local_numbers = itertools.count(1)
        self._spin = AdaptiveSpin()
        self._awake_until = self._polled_at = 0.0
        self._is_awake = False

    def admit(self, connection: Connection) -> bool:
        """Admit a connection if there is room. The oldest unauthenticated one makes room."""
        if self._num_connections >= self._max_connections:
            if not self._unauthenticated and self.other is not None and self.other.make_room():
                pass  # forwarded connections are not authenticated here
            elif not self._unauthenticated:
                self.refusals.add(
                    "connection_refused", "full", peer=connection.peer, limit=self._max_connections
                )
                return False
            else:
                oldest = next(iter(self._unauthenticated))
                oldest.cut("crowded", f"all {self._max_connections} connections were taken")
                self.dismiss(oldest)
        self.connections[connection] = None
        self._unauthenticated[connection] = self.watched[connection] = None
        CONNECTIONS.labels(self.name).inc()
        return True

    def dismiss(self, connection: Connection) -> None:
        """Remove a connection that has ended or was forwarded."""
        if connection in self.connections:
            del self.connections[connection]
            CONNECTIONS.labels(self.name).dec()
        self._unauthenticated.pop(connection, None)
        self.watched.pop(connection, None)

    def watch(self, connection: Connection) -> None:
        """Look at the connection's deadlines until it rests."""
        if connection in self.connections:
            self.watched[connection] = None

    def mark_known(self, connection: Connection) -> None:
        """Mark a connection as authenticated."""
        self._unauthenticated.pop(connection, None)

    def greeting_s(self) -> float:
        """Time limit of a greeting at the present load."""
        is_crowded = 4 * self._num_connections >= 3 * self._max_connections
        return min(self.limits.greeting_s, CROWDED_GREETING_S) if is_crowded else self.limits.greeting_s

    @property
    def _num_connections(self) -> int:
        return len(self.connections) + (self.other.num_open if self.other is not None else 0)

    def shed_pending_bytes(self) -> None:
        """Abort connections with the most bytes of unfinished frames, unauthenticated ones first."""
        while self.pending_bytes > self.limits.max_pending_bytes:
            worst = max(
                (one for one in self.connections if one.pending_bytes),
                key=lambda one: (one in self._unauthenticated, one.pending_bytes),
                default=None,
            )
            if worst is None:
                return
            worst.cut("bytes", f"unfinished requests of all peers have {self.pending_bytes} bytes")

    def add_turn(self, connection: Connection) -> None:
        """Let a connection handle its deferred requests: now, if this pass of the loop has had no turn."""
        if self.deferred_bytes > MAX_DEFERRED_BYTES:
            connection.take_turn(math.inf)
            return
        self._turns.append(connection)
        if not self._has_turn:
            self._has_turn = True
            self._take_turns()

    def _take_turns(self) -> None:
        turns, until = self._turns, time.perf_counter() + TURN_S
        try:
            while turns:
                connection = turns.popleft()
                try:
                    has_more = connection.take_turn(until)
                except BaseException:  # its other requests would wait for a turn that does not come
                    connection.close()
                    raise
                if has_more:
                    turns.append(connection)
                if time.perf_counter() >= until:
                    break
        finally:  # one connection that fails must not end the turns of all
            asyncio.get_running_loop().call_soon(self._next_turns)

    def _next_turns(self) -> None:
        self._has_turn = bool(self._turns)
        if self._has_turn:
            self._take_turns()

    def stay_awake(self) -> None:
        """Keep the loop spinning for a moment, if that pays: a request is often followed by another."""
        if not self._is_awake and self._spin.is_worthwhile:
            self._is_awake = True
            asyncio.get_running_loop().call_soon(self._stay_awake)
        self._polled_at = time.perf_counter()
        self._awake_until = self._polled_at + adaptive_spin.SPIN_S

    def _stay_awake(self) -> None:
        now = time.perf_counter()
        spun_s, self._polled_at = now - self._polled_at, now
        self._spin.spun(spun_s, spun_s if spun_s > adaptive_spin.GAP_S else 0.0)
        self._is_awake = now < self._awake_until
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
                backlog=BACKLOG,
            )
        except (OSError, ValueError) as error:  # ValueError: no host can have this name
            if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
                raise AddressInUse(f"{host}:{port} is in use; free it or choose another port") from error
            raise InvalidArgument("address", f"{host}:{port}", f"one to listen on ({error})") from error
        self.port = self._server.sockets[0].getsockname()[1]
        if self._has_local_socket:
            await self._listen_beside()
        self._look_around()
        return self.port

    async def _listen_beside(self) -> None:
        assert self._server is not None
        loop = asyncio.get_running_loop()
        for listening in self._server.sockets:
            try:
                beside = listen_beside(listening, BACKLOG)
            except OSError as error:
                log.warning("local_socket_taken", port=self.port, reason=error.strerror)
                continue
            if beside is not None:
                connection = functools.partial(Connection, self, loopback_of(listening))
                local = await loop.create_unix_server(connection, sock=beside, backlog=BACKLOG)
                self._local_servers.append(local)

    def _look_around(self) -> None:
        loop = asyncio.get_running_loop()
        for connection in list(self.watched):
            if connection.look(loop.time()):
                self.watched.pop(connection, None)
        if self.other is not None:
            self.other.look(loop.time())
        PENDING_BYTES.labels(self.name).set(self.pending_bytes)
        self._look = loop.call_later(DEADLINE_CHECK_S, self._look_around)

    def descriptors(self) -> list[int]:
        """File descriptors of its open sockets, for a forked child that has to release them."""
        servers = [*self._local_servers, *([self._server] if self._server is not None else [])]
        return [sock.fileno() for server in servers for sock in server.sockets] + [
            number for number in (connection.fileno() for connection in self.connections) if number >= 0
        ]

    async def close(self) -> None:
        """Stop listening and close every connection."""
        if self._look is not None:
            self._look.cancel()
        for server in (self._server, *self._local_servers):
            if server is not None:
                server.close()
        for connection in list(self.connections):
            connection.close()
        if self.other is not None:
            self.other.close()
        if self._server is not None:
            await self._server.wait_closed()
            self._server = None
        for local in self._local_servers:
            await local.wait_closed()
        self._local_servers = []

    def __repr__(self) -> str:
        return f"<RpcServer :{self.port} [{len(self.connections)} connections]>"

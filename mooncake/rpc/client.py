# SPDX-License-Identifier: Apache-2.0
"""The two clients: ``AsyncClient`` for event loops, ``BlockingClient`` for threads.

Both connect on first use, again after a loss (with back-off: connecting is always safe to repeat),
and put a deadline on every call. A request that was sent and not answered is *not* sent again here,
because only the caller knows whether it is idempotent; it gets ``PeerLost``. The blocking client runs
on a plain socket in the calling thread, because a hop to a loop's thread would double the latency
of a one-key call.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import select
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, cast

import msgspec

from mooncake.errors import (
    AccessDenied,
    DeadlineExceeded,
    InvalidArgument,
    MooncakeError,
    PeerLost,
    ProtocolError,
)
from mooncake.rpc.adaptive_spin import AdaptiveSpin
from mooncake.rpc.limits import Limits
from mooncake.rpc.local_socket import connect_beside
from mooncake.rpc.tls import TlsSession, TlsTransport
from mooncake.rpc.wire import (
    GREETING_ID,
    Failure,
    FrameDecoder,
    Message,
    client_greeting_reply,
    client_opening,
    decoder_for,
    encode,
    error_of,
)
from mooncake.security import NODES_AND_ADMINS, Identity, process_identity
from mooncake.security.greeting import ClientGreeting, binding_of
from mooncake.security.principal import Level, Principal, principal_of

ATTEMPT_S = Limits.greeting_s
"""Time limit of one attempt of an ``AsyncClient`` to connect: that of the greeting on the server's side."""
KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_PROBES = 30, 10, 3
"""A connection without traffic to a host that has failed ends after a minute; by default after hours."""
FIRST_BACKOFF_S = 0.02
MAX_BACKOFF_S = 1.0
SILENT_PEER_HINTS = (
    "; it has answered nothing: if it wants TLS, use the same `tls` settings on both sides",
    "; it has answered nothing: both sides need certificates of the same `tls_ca`",
)
"""Likely causes when a peer closes the connection before its first answer, without TLS and with it."""

_READ_BYTES = 256 << 10
_ID_MASK = 0xFFFFFFFF


_closed_at_once: set[str] = set()
"""Addresses that closed the last connection without an answer, as a server of version 2 does: the next one is
opened in that version. For the whole process, because many clients live for one connection only."""
_MAX_CLOSED_AT_ONCE = 4096


def _toggle_version(address: str) -> None:
    """Open the next connection in the other version: a server that was only stopped accepts both."""
    if address in _closed_at_once:
        _closed_at_once.discard(address)
    elif len(_closed_at_once) < _MAX_CLOSED_AT_ONCE:
        _closed_at_once.add(address)


def split_address(address: str) -> tuple[str, int]:
    """Split ``host:port`` (or ``[v6]:port``) into its parts; raises InvalidArgument."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InvalidArgument("address", address, "host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _shown(address: str) -> str:
    """The address for messages, which must not contain half of a surrogate pair."""
    return address if address.isprintable() else ascii(address)


def keep_alive(sock: socket.socket | None) -> None:
    """Let the kernel end a TCP connection whose peer's host no longer answers."""
    if sock is None or sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)


def check_server(
    certificate: dict[str, Any] | None, servers: frozenset[Level], identity: Identity, peer: str
) -> None:
    """Check that a certificate is a server's, where no key proves it.

    A server proves that it has the key of this client's role. It proves nothing where other clients have it.

    Raises:
        AccessDenied: the certificate's role may only connect to servers.
    """
    principal, proven = principal_of(certificate), identity.credential
    is_proven = (
        proven is not None and Principal(proven.role, proven.tenant).level in servers | NODES_AND_ADMINS
    )
    if not is_proven and principal.level not in servers:
        raise AccessDenied(
            f"{peer} shows the certificate of a {principal}; a server needs one of the role node "
            "(`mooncake certs --role node`)"
        )


class _Wire(asyncio.Protocol):
    """One connection of an ``AsyncClient``."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._frames = FrameDecoder()
        self._client_greeting = client.identity.client_greeting()
        self._tls: TlsTransport | None = None
        self._has_greeted = False
        self._has_answered = False
        self.transport: asyncio.Transport | TlsTransport | None = None
        self.waiting: dict[int, asyncio.Future[Any]] = {}
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Set when the greeting has ended; holds the exception when it failed."""
        self.loss: MooncakeError | None = None
        """Reason of the loss of the connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast: uvloop's transports don't inherit from asyncio's.
        raw = cast(asyncio.Transport, transport)
        self.transport = raw
        keep_alive(raw.get_extra_info("socket"))
        context = self._client.identity.client_tls
        if context is None:
            self._greet()
        else:
            self.transport = self._tls = TlsTransport(raw, context, self._client.host)

    def _greet(self) -> None:
        assert self.transport is not None
        self._has_greeted = True
        shown = self._tls.certificate_digest if self._tls is not None else b""
        self._client_greeting.binding = binding_of(self._client.servers != NODES_AND_ADMINS, shown)
        self.transport.write(client_opening(self._client_greeting, self._client.address in _closed_at_once))
        if self._client_greeting.is_over:
            self._begin()

    def _begin(self) -> None:
        if not self.ready.done():
            self.ready.set_result(None)

    def data_received(self, data: bytes) -> None:
        try:
            if self._tls is not None:
                data = self._tls.feed(data)
                if self._tls.is_ready and not self._has_greeted:
                    client = self._client
                    check_server(self._tls.certificate, client.servers, client.identity, client.peer)
                    self._greet()
            for request_id, body in self._frames.feed(data) if data else ():
                self._has_answered = True
                if request_id == GREETING_ID:
                    self._answer_greeting(body)
                    continue
                future = self.waiting.pop(request_id, None)
                if future is not None and not future.done():
                    future.set_result(self._client.decoder.decode(body))
            if self._tls is not None and self._tls.has_ended:
                self.lose("it closed the connection")
        except AccessDenied as error:
            self.lose(str(error), AccessDenied)
        except (ProtocolError, msgspec.MsgspecError) as error:
            kind = PeerLost if self.ready.done() else ProtocolError
            self.lose(f"it sent a frame that can't be decoded: {error}", kind)

    def _answer_greeting(self, body: memoryview) -> None:
        answer = client_greeting_reply(self._client_greeting, body)
        if self.transport is not None:
            self.transport.write(answer)
        self._begin()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lose(str(exc) if exc else "it closed the connection")

    def lose(self, reason: str, kind: type[MooncakeError] = PeerLost) -> None:
        """Fail all waiting calls. Harmless when repeated."""
        if self.transport is None:
            return
        self.transport.abort()
        self.transport = None
        self.loss = kind(reason)
        if self._has_greeted and not self._has_answered:
            _toggle_version(self._client.address)
        waiting, self.waiting = self.waiting, {}
        if not self.ready.done():
            self.ready.set_exception(kind(reason))
            self.ready.exception()  # retrieved, so that asyncio does not log it; waiting calls get it, too
        for future in waiting.values():
            if not future.done():
                future.set_exception(kind(reason))
        self._client.wire_lost(self)


class AsyncClient:
    """Client of ``address`` for an event loop. ``replies``: all message types that a reply may have.

    ``name`` names the peer in errors ("the master"); the other arguments are as in ``BlockingClient``.
    """

    def __init__(
        self,
        address: str,
        replies: Iterable[type[Message]],
        name: str = "peer",
        *,
        is_patient: bool = True,
        identity: Identity | None = None,
        servers: frozenset[Level] = NODES_AND_ADMINS,
    ) -> None:
        self.address = address
        self.host, self._port = split_address(address)
        self._is_patient = is_patient
        self.identity = identity or process_identity()
        self.servers = servers
        self.peer = f"{name} at {_shown(address)}"
        self.decoder = decoder_for(replies)
        self._ids = itertools.count(1)
        self._wire: _Wire | None = None
        self._connecting: asyncio.Task[_Wire] | None = None
        self._is_closed = False
        self._why = ""
        """Reason why the last attempt to connect failed, where a peer answered."""
        self.lost = asyncio.Event()
        """Set while there is no connection; lets callers detect a loss before their next call."""
        self.lost.set()

    async def call(self, message: Message, timeout_s: float) -> Any:
        """Send ``message``, return the reply.

        Raises:
            PeerLost: the connection broke after the request was sent, or the client was closed.
            DeadlineExceeded: no connection or no answer within ``timeout_s``.
            MooncakeError: the peer answered with a failure, as the class that its code names.
        """
        what = type(message).__name__
        future: asyncio.Future[Any] | None = None
        request_id = 0
        wire: _Wire | None = None
        try:
            async with asyncio.timeout(timeout_s):
                wire = self._wire or await self._connected()
                request_id = _next_id(self._ids)
                future = asyncio.get_running_loop().create_future()
                wire.waiting[request_id] = future
                if wire.transport is None:  # refused as soon as it was connected
                    raise wire.loss or PeerLost("it closed the connection")
                wire.transport.write(encode(request_id, message))
                reply = await future
        except TimeoutError:
            stage = "can't be reached" if future is None else f"didn't answer {what}"
            why = self._why if future is None else ""
            raise DeadlineExceeded(f"{self.peer} {stage} within {timeout_s:.3g} s{why}") from None
        except PeerLost as error:
            if future is None:
                raise
            raise PeerLost(f"lost {self.peer} during {what}: {error}") from None
        except AccessDenied as error:
            raise AccessDenied(f"{self.peer}: {error}") from None
        finally:
            if wire is not None:
                wire.waiting.pop(request_id, None)
        if type(reply) is Failure:
            raise error_of(reply, self.peer)
        return reply

    def post(self, message: Message) -> None:
        """Send ``message`` if there is a connection, else raise PeerLost. Its reply is dropped."""
        if self._wire is None or self._wire.transport is None:
            raise PeerLost(f"{self.peer}: there is no connection to send {type(message).__name__}")
        self._wire.transport.write(encode(_next_id(self._ids), message))

    async def connect(self, timeout_s: float) -> None:
        """Connect now rather than at the first call; raises DeadlineExceeded."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._connected()
        except TimeoutError:
            raise DeadlineExceeded(f"{self.peer} can't be reached within {timeout_s:.3g} s") from None

    async def close(self) -> None:
        """Close the connection; calls under way raise PeerLost."""
        self._is_closed = True
        if self._connecting is not None:
            self._connecting.cancel()
        if self._wire is not None:
            self._wire.lose("the client was closed")

    def wire_lost(self, wire: _Wire) -> None:
        if self._wire is wire:
            self._wire = None
            self.lost.set()

    async def _connected(self) -> _Wire:
        if self._is_closed:
            raise PeerLost("the client was closed")
        if self._wire is not None:
            return self._wire
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._connect())
            self._connecting.add_done_callback(self._connecting_done)
        connecting = self._connecting
        try:
            # Shielded: a caller whose deadline passes must not cancel the attempt that others wait for.
            return await asyncio.shield(connecting)
        except asyncio.CancelledError:
            if connecting.cancelled():  # only close() does that
                raise PeerLost("the client was closed") from None
            raise

    def _connecting_done(self, task: asyncio.Task[_Wire]) -> None:
        self._connecting = None
        if not task.cancelled():
            task.exception()  # retrieved, so that asyncio does not log it; waiting calls get it, too

    async def _connect(self) -> _Wire:
        loop = asyncio.get_running_loop()
        backoff_s = FIRST_BACKOFF_S
        while True:
            wire: _Wire | None = None
            try:
                async with asyncio.timeout(ATTEMPT_S):
                    beside = None if self.identity.client_tls else connect_beside(self.host, self._port)
                    if beside is not None:
                        _, wire = await loop.create_unix_connection(lambda: _Wire(self), sock=beside)
                    else:
                        _, wire = await loop.create_connection(lambda: _Wire(self), self.host, self._port)
                    await wire.ready
                if wire.loss is not None:
                    raise wire.loss
            except AccessDenied:
                raise
            except (OSError, ValueError, PeerLost) as error:  # ValueError: no host can have this name
                if isinstance(error, TimeoutError) and not error.errno:  # perhaps its host has failed
                    error = PeerLost(f"it did not complete the greeting within {ATTEMPT_S:g} s")
                if wire is not None:
                    wire.lose(str(error))
                number = error.errno if isinstance(error, OSError) else None
                said = error.strerror if isinstance(error, OSError) else None
                reason = os.strerror(number) if number and number > 0 else said or str(error)
                if not self._is_patient:
                    raise PeerLost(f"{self.peer} can't be reached: {reason}; is it running?") from error
                self._why = f": {reason}" if reason else ""
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
            except ProtocolError as error:
                raise ProtocolError(f"{self.peer}: {error}") from error
            except asyncio.CancelledError:
                if wire is not None:
                    wire.lose("the client was closed")
                raise
            else:
                self._wire = wire
                self.lost.clear()
                return wire

    def __repr__(self) -> str:
        state = "connected" if self._wire else "not connected"
        return f"<AsyncClient to {self.peer} [{state}]>"


def _next_id(ids: Iterator[int]) -> int:
    """Make a request id, which is never that of greetings."""
    return next(ids) & _ID_MASK or next(ids) & _ID_MASK


def _acquire(lock: threading.Lock, deadline: float) -> None:
    """Acquire ``lock``; raises TimeoutError at the deadline."""
    if not lock.acquire(blocking=False) and not lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
        raise TimeoutError


def _poll_ms(timeout_s: float) -> float:
    """Timeout for ``poll``, which takes at most 2**31 ms."""
    return min(timeout_s * 1000, 1e9)


class _NothingSent(TimeoutError):
    """The socket took no byte of a frame before the deadline."""


class _Waiter:
    """A thread that waits for its reply, or for its turn to read the socket for all waiting threads."""

    __slots__ = ("gate", "reply", "spin")

    def __init__(self, spin: AdaptiveSpin) -> None:
        self.spin = spin
        self.reply: Any = None
        self.gate: threading.Lock | None = None

    def has_reply(self) -> bool:
        return self.reply is not None


class _Socket:
    """One connection of a ``BlockingClient``. ``lock`` guards ``waiting`` and ``has_reader``.

    A call is in ``waiting`` for as long as it uses the socket.
    """

    def __init__(self, sock: socket.socket, tls: TlsSession | None, client_greeting: ClientGreeting) -> None:
        self.sock = sock
        # Each call has its own deadline, and Python's own timeouts take two more system calls a message.
        sock.setblocking(False)
        self._tls = tls
        self.client_greeting = client_greeting
        self.readable = select.poll()
        self.readable.register(sock.fileno(), select.POLLIN)
        self._received = bytearray(_READ_BYTES)
        self._content = memoryview(self._received)
        self.frames = FrameDecoder()
        self.lock = threading.Lock()
        self.send_lock = threading.Lock()
        self.waiting: dict[int, _Waiter] = {}
        self.has_reader = False
        self.has_answered = False
        self.lost: str | None = None

    def send(self, frame: bytes | bytearray, deadline: float) -> None:
        """Send all of ``frame``; raises TimeoutError at the deadline. With ``send_lock`` held.

        After ``_NothingSent`` other frames may follow; after another TimeoutError none can.
        """
        if self._tls is not None:
            frame = self._tls.encrypt(frame)
        try:
            sent = self.sock.send(frame)
        except BlockingIOError:
            sent = 0
        if sent < len(frame):
            self._send_rest(memoryview(frame)[sent:], deadline, sent > 0 or self._tls is not None)

    def _send_rest(self, rest: memoryview, deadline: float, has_begun: bool) -> None:
        writable = select.poll()
        writable.register(self.sock.fileno(), select.POLLOUT)
        while rest:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0 or not writable.poll(_poll_ms(remaining_s)):
                raise TimeoutError if has_begun else _NothingSent
            with contextlib.suppress(BlockingIOError):
                rest = rest[self.sock.send(rest) :]
                has_begun = True

    def receive(self, timeout_s: float, spin: AdaptiveSpin | None = None) -> bytes | None:
        """What has arrived, b"" at the end; raises as a socket with this timeout does. For the reader.

        None: the kernel woke this thread for nothing, or a part of a record came.
        """
        if self._tls is not None and (early := self._tls.take_early()):
            return early
        is_ready = spin is not None and spin.is_worthwhile and spin.wait(self.readable.poll)
        if not is_ready and not self.readable.poll(_poll_ms(timeout_s)):
            raise TimeoutError
        try:
            data = bytes(self._content[: self.sock.recv_into(self._received)])
        except BlockingIOError:
            return None
        except ConnectionResetError:
            if self._tls is None:
                raise
            data = b""  # the session may still have the reason
        return data if self._tls is None else self._tls.decrypt(data)

    def close_if_unused(self) -> None:
        """Close the socket when the connection is lost and no call uses it. With ``lock`` held.

        A thread may be blocked on the descriptor's number, which the kernel gives to the next file that is
        opened; so the last call closes it.
        """
        if self.lost is not None and not self.waiting:
            self.sock.close()


class BlockingClient:
    """Client of ``address`` for any thread.

    Threads share one connection. One waiting thread reads for all of them and passes the reading on
    when it has its own reply, so a single caller pays for no lock hand-over and no second thread.

    Args:
        is_patient: try to connect until the call's deadline; otherwise the first failure is PeerLost.
        identity: identity of this client, instead of the process's. A peer that fails to authenticate
            raises AccessDenied at once, one whose TLS settings differ raises ProtocolError.
        servers: roles that a server's certificate may have, where no key proves its role. With roles other
            than nodes and administrators, the server must be made with ``is_peer``.
    """

    def __init__(
        self,
        address: str,
        replies: Iterable[type[Message]],
        name: str = "peer",
        *,
        is_patient: bool = True,
        identity: Identity | None = None,
        servers: frozenset[Level] = NODES_AND_ADMINS,
    ) -> None:
        self._address = address
        self._host, self._port = split_address(address)
        self.peer = f"{name} at {_shown(address)}"
        self._is_patient = is_patient
        self._identity = identity or process_identity()
        self._servers = servers
        self._spins: defaultdict[tuple[type, int], AdaptiveSpin] = defaultdict(AdaptiveSpin)
        """By a request's type and size in powers of 16: a large one takes long where a small one does not."""
        self._decoder = decoder_for(replies)
        self._ids = itertools.count(1)
        self._connect_lock = threading.Lock()
        self._socket: _Socket | None = None
        self._is_closed = False

    def call(self, message: Message, timeout_s: float) -> Any:
        """Send ``message``, return the reply. Raises as ``AsyncClient.call``."""
        deadline = time.monotonic() + timeout_s
        connection = self._socket
        if connection is None or connection.lost is not None:
            connection = self._connected(deadline, timeout_s)
        what = type(message).__name__
        request_id = _next_id(self._ids)
        frame = encode(request_id, message)
        waiter = _Waiter(self._spins[type(message), len(frame).bit_length() >> 2])
        with connection.lock:
            connection.waiting[request_id] = waiter
        try:
            self._send(connection, frame, deadline)
            reply = self._await_reply(connection, waiter, deadline)
        except TimeoutError:
            raise DeadlineExceeded(f"{self.peer} didn't answer {what} within {timeout_s:.3g} s") from None
        except AccessDenied as error:
            self._lose(connection, str(error))
            raise AccessDenied(f"{self.peer}: {error}") from None
        except (OSError, ProtocolError, msgspec.MsgspecError) as error:
            self._lose(connection, str(error))
            if isinstance(error, ProtocolError) and not connection.has_answered:  # a retry would, too
                raise ProtocolError(f"{self.peer}: {error}") from None
            hint = "" if connection.has_answered else SILENT_PEER_HINTS[self._identity.has_tls]
            raise PeerLost(f"lost {self.peer} during {what}: {connection.lost}{hint}") from None
        except PeerLost as error:
            raise PeerLost(f"lost {self.peer} during {what}: {error}") from None
        except BaseException:
            # By a signal's handler, at any instruction: part of a frame may have been sent, what was read may
            # be lost, or this thread may just have become the reader. Other threads connect anew.
            self._lose(connection, "a call was interrupted")
            raise
        finally:
            with connection.lock:  # another thread may be going through the waiting ones
                connection.waiting.pop(request_id, None)
                connection.close_if_unused()
        if type(reply) is Failure:
            raise error_of(reply, self.peer)
        return reply

    def post(self, message: Message, timeout_s: float) -> None:
        """Send ``message`` if there is a connection. Its reply is not awaited, and dropped when it comes.

        Raises:
            PeerLost: there is no connection, it broke, or it did not take the message within ``timeout_s``.
        """
        connection, what = self._socket, type(message).__name__
        request_id = _next_id(self._ids)
        frame = encode(request_id, message)
        if connection is None:
            raise PeerLost(f"{self.peer}: there is no connection to send {what}")
        waiter = _Waiter(AdaptiveSpin())  # for which the socket is kept open
        with connection.lock:
            if connection.lost is not None:
                raise PeerLost(f"{self.peer}: there is no connection to send {what}")
            connection.waiting[request_id] = waiter
        try:
            self._send(connection, frame, time.monotonic() + timeout_s)
        except TimeoutError:
            raise PeerLost(f"{self.peer} didn't take {what} within {timeout_s:.3g} s") from None
        except OSError as error:
            self._lose(connection, str(error))
            raise PeerLost(f"lost {self.peer} during {what}: {error}") from None
        except BaseException:
            self._lose(connection, "a call was interrupted")  # as in ``call``
            raise
        finally:
            with connection.lock:
                connection.waiting.pop(request_id, None)
                connection.close_if_unused()

    @property
    def is_cut_off(self) -> bool:
        """Whether the client was connected and the connection broke."""
        return self._socket is not None and self._socket.lost is not None

    def close(self) -> None:
        """Close the connection; calls under way raise PeerLost."""
        self._is_closed = True
        connection = self._socket
        if connection is not None:
            self._lose(connection, "the client was closed")

    def _send(self, connection: _Socket, frame: bytearray, deadline: float) -> None:
        _acquire(connection.send_lock, deadline)  # another thread's large request may take long
        try:
            connection.send(frame, deadline)
        except _NothingSent:
            raise
        except TimeoutError:
            # Part of the frame has been sent; no other frame can follow it on this connection.
            self._lose(connection, "it takes no more requests")
            raise
        finally:
            connection.send_lock.release()

    def _await_reply(self, connection: _Socket, waiter: _Waiter, deadline: float) -> Any:
        gate: threading.Lock | None = None
        with connection.lock:
            if waiter.has_reply():
                return waiter.reply
            if connection.has_reader:
                gate = waiter.gate = threading.Lock()
                gate.acquire()
            else:
                connection.has_reader = True
        if gate is not None:
            gate.acquire(timeout=max(0.0, deadline - time.monotonic()))
            with connection.lock:
                if waiter.has_reply():
                    return waiter.reply
                if connection.lost is not None:
                    raise PeerLost(connection.lost)
                if waiter.gate is not None:  # the deadline passed before this thread became the reader
                    waiter.gate = None
                    raise TimeoutError
        try:
            return self._read_until(connection, waiter, deadline)
        finally:
            self._hand_over(connection)

    def _read_until(self, connection: _Socket, waiter: _Waiter, deadline: float) -> Any:
        while waiter.reply is None:
            if connection.lost is not None:
                raise PeerLost(connection.lost)
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                raise TimeoutError
            data = connection.receive(remaining_s, waiter.spin)
            if data is None:
                continue
            if not data:
                raise ConnectionResetError("it closed the connection")
            for request_id, body in connection.frames.feed(data):
                if request_id == GREETING_ID:  # the server's refusal before it closes
                    client_greeting_reply(connection.client_greeting, body)
                other = connection.waiting.get(request_id)
                if other is None:
                    continue
                reply = self._decoder.decode(body)
                connection.has_answered = True
                with connection.lock:
                    other.reply = reply
                    if other.gate is not None:
                        other.gate.release()
                        other.gate = None
        return waiter.reply

    def _hand_over(self, connection: _Socket) -> None:
        with connection.lock:
            connection.has_reader = False
            for other in connection.waiting.values():
                if other.gate is not None and other.reply is None:
                    connection.has_reader = True
                    other.gate.release()
                    other.gate = None
                    return

    def _connected(self, deadline: float, timeout_s: float) -> _Socket:
        try:
            _acquire(self._connect_lock, deadline)  # another thread may be connecting, and have more time
        except TimeoutError as error:
            raise DeadlineExceeded(f"{self.peer} can't be reached within {timeout_s:.3g} s") from error
        try:
            backoff_s, why = FIRST_BACKOFF_S, ""
            while True:
                if self._is_closed:
                    raise PeerLost(f"{self.peer}: the client was closed")
                connection = self._socket
                if connection is not None and connection.lost is None:
                    return connection
                remaining_s = deadline - time.monotonic()
                try:
                    if remaining_s <= 0:
                        raise TimeoutError
                    opened = self._opened(deadline)
                except AccessDenied as error:
                    raise AccessDenied(f"{self.peer}: {error}") from error
                except ProtocolError as error:
                    raise ProtocolError(f"{self.peer}: {error}") from error
                except (OSError, ValueError) as error:  # ValueError: no host can have this name
                    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
                    if not isinstance(error, TimeoutError):
                        why = f": {reason}"
                    remaining_s = deadline - time.monotonic()
                    if remaining_s <= 0:
                        message = f"{self.peer} can't be reached within {timeout_s:.3g} s{why}"
                        raise DeadlineExceeded(message) from error
                    if not self._is_patient:
                        raise PeerLost(f"{self.peer} can't be reached: {reason}; is it running?") from error
                    time.sleep(min(backoff_s, remaining_s))
                    backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
                else:
                    self._socket = opened
        finally:
            self._connect_lock.release()

    def _opened(self, deadline: float) -> _Socket:
        """Open a connection and complete its greeting."""
        remaining_s = max(0.001, deadline - time.monotonic())
        beside = None if self._identity.client_tls else connect_beside(self._host, self._port)
        if beside is not None:
            beside.settimeout(remaining_s)
        sock = beside or socket.create_connection((self._host, self._port), remaining_s)
        tls: TlsSession | None = None
        try:
            if beside is None:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                keep_alive(sock)
            if self._identity.client_tls is not None:
                tls = TlsSession(sock, self._identity.client_tls, self._host, deadline - time.monotonic())
                check_server(tls.certificate, self._servers, self._identity, "it")
            client_greeting = self._identity.client_greeting()
            shown = tls.certificate_digest if tls is not None else b""
            client_greeting.binding = binding_of(self._servers != NODES_AND_ADMINS, shown)
            connection = _Socket(sock, tls, client_greeting)
            connection.send(client_opening(client_greeting, self._address in _closed_at_once), deadline)
            while not client_greeting.is_over:
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0:
                    raise TimeoutError
                data = connection.receive(remaining_s)
                if data is None:
                    continue
                if not data:
                    raise ConnectionResetError(
                        f"it closed the connection{SILENT_PEER_HINTS[self._identity.has_tls]}"
                    )
                for _, body in connection.frames.feed(data):
                    connection.send(client_greeting_reply(client_greeting, body), deadline)
        except BaseException:
            sock.close()
            raise
        return connection

    def _lose(self, connection: _Socket, reason: str) -> None:
        with connection.lock:
            if connection.lost is not None:
                return
            connection.lost = reason
            if not connection.has_answered:
                _toggle_version(self._address)
            # Wakes a reader that blocks in recv().
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)
            for other in connection.waiting.values():
                if other.gate is not None:
                    other.gate.release()
                    other.gate = None
            connection.close_if_unused()

    def __repr__(self) -> str:
        connection = self._socket
        state = "connected" if connection is not None and connection.lost is None else "not connected"
        return f"<BlockingClient to {self.peer} [{state}]>"

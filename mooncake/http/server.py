# SPDX-License-Identifier: Apache-2.0
"""Serves an ASGI application on the loop that is already running, to untrusted peers.

Owns the socket and the edge that all HTTP servers here share: the limit of connections (below the
process's limit of files), the deadlines of each (``connections.py``), the size of a body and
the total of bytes of bodies held at a time, and that a taken port raises ``AddressInUse`` before anything
starts. Signals are left to the code that runs the role.

uvicorn has no deadline for a header, a body or a reader, and no limit of connections; so they are
accepted here, and its protocol reports the phase of each.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import errno
import logging
import socket
import ssl
import sys
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any

import uvicorn
from prometheus_client import Counter, Gauge
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from uvicorn.config import STARTUP_FAILURE
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from mooncake import clock, metrics
from mooncake.errors import AddressInUse, MooncakeError
from mooncake.file_limit import connection_limit
from mooncake.http.connections import ConnectionPhase, ConnectionState, ConnectionTable, Deadlines
from mooncake.log import get_logger

log = get_logger(__name__)

MAX_PAGE_CONNECTIONS = 64
"""Limit of connections of a server that serves only status pages."""

DEADLINE_CHECK_S = 0.25
"""Interval of the check of deadlines."""

CLOSE_GRACE_S = 0.5
"""Time that a closing server waits for its peers to read what it has written."""

BODY_BUDGET_BYTES = 64 << 20
"""Bytes of bodies that a server holds at a time, or twice the largest that it accepts, if that is more."""

CLOSE_EXTENSION = "mooncake.cut"
"""Extension of the ASGI scope by which an application closes a connection whose peer reads nothing."""

_connections = Gauge(
    "mooncake_http_connections", "Open connections of this process's HTTP servers.", registry=metrics.registry
)
_cut = Counter(
    "mooncake_http_cut",
    "Connections closed by the server, by the deadline that they missed (header, body, idle, unread, "
    "refused), full for those closed at the limit of connections, or large for an oversized header or "
    "trailer.",
    ["reason"],
    registry=metrics.registry,
)

Asgi = Callable[[Any, Any, Any], Awaitable[None]]


class BodyTooLarge(MooncakeError):
    """Error for a body beyond ``most_bytes``; it was not read."""

    code = "body_too_large"

    def __init__(self, most_bytes: int) -> None:
        super().__init__(f"the body is larger than {most_bytes} bytes")
        self.most_bytes = most_bytes


class BodyBudgetExceeded(MooncakeError):
    """Error while other requests' bodies take all the memory for bodies; a later retry may succeed."""

    code = "overloaded"

    def __init__(self) -> None:
        super().__init__("other requests' bodies take all the memory for them; try again in a moment")


class BodyBudget:
    """Memory for bodies of requests whose answers have not ended."""

    def __init__(self, most_bytes: int = BODY_BUDGET_BYTES) -> None:
        self.most_bytes = most_bytes
        self.num_held = 0

    def take(self, num_bytes: int) -> None:
        """Reserve memory; raises BodyBudgetExceeded."""
        if self.num_held + num_bytes > self.most_bytes:
            raise BodyBudgetExceeded
        self.num_held += num_bytes

    def give_back(self, num_bytes: int) -> None:
        self.num_held -= num_bytes
        assert self.num_held >= 0


_BODIES, _HELD = "mooncake.bodies", "mooncake.held"


async def read_body(http: Request, most_bytes: int) -> bytes:
    """Read the body of a request; a larger one than allowed is refused before it is read.

    Raises:
        BodyTooLarge: it is larger than ``most_bytes``.
        BodyBudgetExceeded: bodies of other requests take the memory.
    """
    announced = http.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > most_bytes:
        raise BodyTooLarge(most_bytes)
    bodies: BodyBudget | None = http.scope.get(_BODIES)
    if bodies is not None:
        bodies.most_bytes = max(bodies.most_bytes, 2 * most_bytes)
    body = bytearray()
    async for part in http.stream():
        if len(body) + len(part) > most_bytes:
            raise BodyTooLarge(most_bytes)
        if bodies is not None:
            bodies.take(len(part))
            http.scope[_HELD].append(len(part))
        body += part
    return bytes(body)


def listen(host: str, port: int) -> socket.socket:
    """Open a listening TCP socket; ``port`` 0 takes a free one.

    Raises:
        AddressInUse: the port is taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    opened = socket.socket(family, socket.SOCK_STREAM)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        opened.bind((host, port))
        opened.listen(2048)
    except OSError as error:
        opened.close()
        if error.errno == errno.EADDRINUSE:
            raise AddressInUse(
                f"port {port} on {host} is in use; stop its owner or choose another"
            ) from error
        raise
    opened.setblocking(False)
    return opened


def listen_for_metrics(host: str, port: int) -> socket.socket:
    """Do as ``listen`` at a role's ``--metrics-port``, which the error names instead of ``--port``."""
    try:
        return listen(host, port)
    except AddressInUse as error:
        raise AddressInUse(f"{error}: --metrics-port") from error


class ConnectionAcceptor:
    """Accepts connections of one listening socket, counts them, and closes those that are overdue."""

    def __init__(
        self,
        listening: socket.socket,
        deadlines: Deadlines,
        max_connections: int = 0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.connections = ConnectionTable(deadlines, connection_limit(max_connections))
        self.keeps_connections = True
        """Whether a connection may carry another request after the one that arrives now."""
        self._socket = listening
        self._tls = tls
        self._watched: dict[ConnectionState, CountingTransport | None] = {}
        self._beginning: dict[ConnectionState, socket.socket] = {}
        """Connections that have no transport yet, or whose TLS handshake has not ended."""
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._lifts: list[asyncio.Task[None]] = []

    def open(self, factory: Callable[[ConnectionState], asyncio.Protocol]) -> None:
        """Start accepting; ``factory`` makes the protocol of a connection."""
        loop = asyncio.get_running_loop()
        self._lifts = [loop.create_task(self._accept(factory)), loop.create_task(self._look())]

    def close(self) -> None:
        """Stop accepting. Open connections go on."""
        for task in self._lifts[:1]:
            task.cancel()

    async def wait_closed(self) -> None:
        """Complete ``close``; uvicorn calls this when all connections have ended."""

    async def end(self) -> None:
        """Close all remaining connections, after giving peers time to read what was written."""
        for watched in list(self._watched.values()):
            if watched is not None:
                watched.close()
        give_up_at = clock.monotonic() + CLOSE_GRACE_S
        while self._watched and clock.monotonic() < give_up_at:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        for one in list(self._watched):
            self._end(one)
        for task in (*self._lifts, *self._tasks):
            task.cancel()
        await asyncio.gather(*self._lifts, *self._tasks, return_exceptions=True)
        for one in list(self._watched):
            self.closed(one)

    def made(self, one: ConnectionState, transport: asyncio.Transport) -> CountingTransport:
        """Register the transport of a connection's protocol, which uses the returned one in its place."""
        watched = CountingTransport(transport, one)
        if one in self._watched:
            self._watched[one] = watched
        else:
            transport.abort()  # the connection was closed during its handshake
        return watched

    def closed(self, one: ConnectionState) -> None:
        """Harmless when repeated."""
        if self._watched.pop(one, self) is not self:
            self.connections.closed(one)
            _connections.dec()

    def cut(self, one: ConnectionState, reason: str) -> None:
        """Close a connection without waiting for its peer."""
        _cut.labels(reason).inc()
        self._end(one)

    def _end(self, one: ConnectionState) -> None:
        watched, sock = self._watched.get(one), self._beginning.get(one)
        if watched is not None:
            watched.abort()
        elif sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # makes its handshake fail

    async def _accept(self, factory: Callable[[ConnectionState], asyncio.Protocol]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(self._socket)
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    if self._socket.fileno() < 0:
                        return
                    continue  # the peer had left before it was accepted
                log.warning("out_of_file_descriptors", reason=str(error), connections=len(self.connections))
                self._make_room()
                await asyncio.sleep(DEADLINE_CHECK_S)
                continue
            if self.connections.is_full and not self._make_room():
                self._turn_away(sock)
                continue
            one = self.connections.opened(clock.monotonic())
            self._watched[one], self._beginning[one] = None, sock
            _connections.inc()
            task = loop.create_task(self._begin(sock, one, factory))
            self._tasks[task] = None
            task.add_done_callback(self._tasks.pop)

    async def _begin(
        self,
        sock: socket.socket,
        one: ConnectionState,
        factory: Callable[[ConnectionState], asyncio.Protocol],
    ) -> None:
        handshake_s = self.connections.deadlines.header_s if self._tls is not None else None
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.get_running_loop().connect_accepted_socket(
                partial(factory, one), sock, ssl=self._tls, ssl_handshake_timeout=handshake_s
            )
        except (OSError, TimeoutError) as error:  # ssl.SSLError is one
            log.debug("connection_setup_failed", reason=str(error))
            sock.close()
            self.closed(one)
        except BaseException:
            sock.close()
            self.closed(one)
            raise
        finally:
            self._beginning.pop(one, None)

    def _make_room(self) -> bool:
        victim = self.connections.victim(clock.monotonic())
        if victim is None:
            return False
        self.cut(victim, "full")
        self.closed(victim)
        return True

    def _turn_away(self, sock: socket.socket) -> None:
        """Refuse a connection while all others are being served."""
        _cut.labels("full").inc()
        if self._tls is None:
            with contextlib.suppress(OSError):
                sock.setblocking(False)
                sock.send(
                    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\n"
                    b"Connection: close\r\n\r\n"
                )
        sock.close()

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(DEADLINE_CHECK_S)
            now = clock.monotonic()
            for one, watched in self._watched.items():
                if watched is not None:
                    num_unread = watched.get_write_buffer_size()
                    self.connections.read(one, watched.num_written - num_unread, num_unread, now)
            for one, reason in self.connections.overdue(now):
                self.cut(one, reason)


class CountingTransport:
    """Transport that counts what is written to it, which reveals a peer that reads nothing."""

    def __init__(self, transport: asyncio.Transport, one: ConnectionState) -> None:
        self._transport = transport
        self.one = one
        self.num_written = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: Any) -> None:
        if self._transport.is_closing():
            return  # its peer has left, and uvloop would raise
        self.num_written += len(data)
        self._transport.write(data)

    def writelines(self, parts: Any) -> None:
        self.write(b"".join(parts))

    def abort(self) -> None:
        self._transport.abort()

    def get_write_buffer_size(self) -> int:
        try:
            return self._transport.get_write_buffer_size()
        except (AttributeError, RuntimeError, NotImplementedError):
            return 0  # it is closed


class TrackedProtocol(asyncio.Protocol):
    """Another server's protocol behind ``ConnectionAcceptor``, for an application that reports its requests.

    Its transport is a ``CountingTransport``: when that application calls ``header_received``,
    ``body_received`` and ``response_sent`` of ``ConnectionAcceptor.connections`` for
    ``CountingTransport.one``, all deadlines apply to a connection.
    """

    def __init__(self, acceptor: ConnectionAcceptor, one: ConnectionState, inner: Any) -> None:
        self._acceptor, self._one, self._inner = acceptor, one, inner

    def connection_made(self, transport: Any) -> None:
        self._inner.connection_made(self._acceptor.made(self._one, transport))

    def connection_lost(self, exc: Exception | None) -> None:
        self._acceptor.closed(self._one)
        self._inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._acceptor.connections.received(self._one, len(data), clock.monotonic())
        self._inner.data_received(data)

    def eof_received(self) -> Any:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()


class _AsEvents(logging.Filter):
    """Logs messages of uvicorn's protocol as events; what peers cause at will is only for debugging."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info:
            log.exception("http_request_failed", reason=record.getMessage())
        elif record.levelno >= logging.ERROR:
            log.error("http_request_failed", reason=record.getMessage())
        else:
            log.debug("http_request_malformed", reason=record.getMessage())
        return False


# Not uvicorn's own: the process may run another server with it.
_protocol_log = logging.getLogger(f"{__name__}.protocol")
_protocol_log.setLevel(logging.WARNING)
_protocol_log.addFilter(_AsEvents())


class _TrackedUvicornProtocol(HttpToolsProtocol):
    """uvicorn's protocol, which reports a connection's phase to ``ConnectionAcceptor``."""

    def __init__(self, acceptor: ConnectionAcceptor, one: ConnectionState, **options: Any) -> None:
        super().__init__(**options)
        self.logger = _protocol_log
        self._acceptor, self._one = acceptor, one
        self._unanswered: deque[RequestResponseCycle] = deque()
        """Requests that run or wait for an earlier one of the connection, in order."""
        self._is_in_trailer = False
        """Whether fields that the parser reports are not of a header."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(self._acceptor.made(self._one, transport))  # type: ignore[arg-type]

    def connection_lost(self, exc: Exception | None) -> None:
        self._acceptor.closed(self._one)
        self._disconnect()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        # The scope refers to this object: without its references to the scope, headers are freed at once, and
        # not by a garbage collection some time later.
        self._unanswered.clear()
        self.scope = self.headers = self.cycle = None  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        connections, now = self._acceptor.connections, clock.monotonic()
        while data and not self.transport.is_closing():
            room = connections.header_room(self._one)
            if not room:
                self._refuse_header()
                return
            part, data = data[:room], data[room:]
            connections.received(self._one, len(part), now)
            super().data_received(part)

    def _refuse_header(self) -> None:
        """Close the connection, whose header or trailer is too large; with an answer where none has begun."""
        is_answered = self._one.phase is ConnectionPhase.REFUSED or any(
            cycle.response_started for cycle in self._unanswered
        )
        self._disconnect()
        if is_answered:
            self._acceptor.cut(self._one, "large")
            return
        _cut.labels("large").inc()
        self.transport.write(
            b"HTTP/1.1 431 Request Header Fields Too Large\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        )
        self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_trailer = False
        self.scope["extensions"] = {CLOSE_EXTENSION: {"now": self._cut}}
        # The peer's certificate, for ``mooncake.security.http_auth``.
        self.scope["mooncake.certificate"] = self.transport.get_extra_info("peercert")  # type: ignore[typeddict-unknown-key]

    def on_header(self, name: bytes, value: bytes) -> None:
        # uvicorn would add the fields of a trailer to the header that the application already has: proxies do
        # not check them, and they may hold credentials (RFC 9110, 6.5.1).
        if not self._is_in_trailer:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._acceptor.connections.header_received(self._one, clock.monotonic())
        self._is_in_trailer = True
        super().on_headers_complete()
        if not self._acceptor.keeps_connections:
            self.cycle.keep_alive = False
        self._unanswered.append(self.cycle)

    def on_body(self, body: bytes) -> None:
        self._acceptor.connections.body_part_received(self._one)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._acceptor.connections.body_received(self._one, clock.monotonic())
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._acceptor.connections.response_sent(self._one, clock.monotonic())
        self._unanswered.popleft()
        super().on_response_complete()

    def _cut(self) -> None:
        """End the answer and the connection."""
        self._disconnect()
        self._acceptor.cut(self._one, "unread")

    def _disconnect(self) -> None:
        """Let the application of the request that runs find that its client is gone: uvicorn informs only the
        last request of the connection, which may be one that waits."""
        self.pipeline.clear()
        for cycle in self._unanswered:
            cycle.disconnected = True
            cycle.message_event.set()


class _UvicornServer(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, acceptor: ConnectionAcceptor) -> None:
        super().__init__(config)
        self._acceptor = acceptor

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            sys.exit(STARTUP_FAILURE)

        def protocol(one: ConnectionState) -> asyncio.Protocol:
            return _TrackedUvicornProtocol(
                self._acceptor,
                one,
                config=self.config,
                server_state=self.server_state,
                app_state=self.lifespan.state,
                _loop=asyncio.get_running_loop(),
            )

        self._acceptor.open(protocol)
        self.servers = [self._acceptor]  # type: ignore[list-item]
        self.started = True


class HttpServer:
    """Server of ``app`` on ``listening``; ``close`` gives answers under way ``grace_s`` seconds to end.

    Args:
        deadlines: deadlines of its connections.
        max_connections: limit in addition to the one from the limit of files; 0 for no other limit.
        body_budget_bytes: bytes of bodies that it holds at a time; at least twice the largest one.
    """

    def __init__(
        self,
        app: Any,
        listening: socket.socket,
        grace_s: float = 2.0,
        tls: ssl.SSLContext | None = None,
        *,
        deadlines: Deadlines | None = None,
        max_connections: int = 0,
        body_budget_bytes: int = BODY_BUDGET_BYTES,
    ) -> None:
        self._socket = listening
        self.port: int = listening.getsockname()[1]
        deadlines = deadlines or Deadlines()
        self.bodies = BodyBudget(body_budget_bytes)
        self.acceptor = ConnectionAcceptor(listening, deadlines, max_connections, tls)
        config = uvicorn.Config(
            self._with_bodies(app),
            timeout_keep_alive=max(1, round(deadlines.idle_s)),
            http=_TrackedUvicornProtocol,
            ws="none",
            lifespan="on",
            log_config=None,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=max(1, round(grace_s)),
        )
        config.load()
        config.ssl = tls
        self._server = _UvicornServer(config, self.acceptor)
        self._task: asyncio.Task[None] | None = None

    def _with_bodies(self, app: Asgi) -> Asgi:
        async def edge(scope: Any, receive: Any, send: Any) -> None:
            held: list[int] = []  # a list: applications copy scopes
            scope[_BODIES], scope[_HELD] = self.bodies, held
            try:
                await app(scope, receive, send)
            except ClientDisconnect:
                pass  # the client left, or was disconnected, before its body was complete
            finally:
                self.bodies.give_back(sum(held))

        return edge

    async def start(self) -> None:
        """Start, and return once requests are accepted.

        Raises:
            RuntimeError: the application's own start failed; the log has the traceback.
        """
        self._task = asyncio.get_running_loop().create_task(self._serve())
        while not self._server.started:
            if self._task.done():
                raise RuntimeError("the application did not start; see the log")
            await asyncio.sleep(0.005)

    async def _serve(self) -> None:
        # uvicorn exits the process when the application does not start; here the caller decides.
        with contextlib.suppress(SystemExit):
            await self._server.serve(sockets=[self._socket])

    async def wait(self) -> None:
        """Wait until the server has ended."""
        assert self._task is not None
        await asyncio.shield(self._task)

    def stop_keeping(self) -> None:
        """From now on close each connection after its next answer, which says so. New ones are accepted."""
        self.acceptor.keeps_connections = False

    async def close(self, grace_s: float | None = None) -> None:
        """Stop. ``grace_s`` replaces the time that answers under way have to end."""
        if grace_s is not None:
            self._server.config.timeout_graceful_shutdown = round(grace_s)
        self._server.should_exit = True
        if self._task is not None:
            await self._task
        if self._server.server_state.tasks:  # cancelled: they write an error to their peers
            await asyncio.wait([*self._server.server_state.tasks], timeout=CLOSE_GRACE_S)
        await self.acceptor.end()
        self._socket.close()


class HttpServerThread:
    """``HttpServer`` of status pages on a loop of its own, in a thread, for processes without a loop."""

    def __init__(self, app: Any, listening: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        self._web = HttpServer(app, listening, tls=tls, max_connections=MAX_PAGE_CONNECTIONS)
        self.port = self._web.port
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run, args=(started,), name="web", daemon=True)
        self._thread.start()
        started.result()

    def close(self) -> None:
        """Stop. Harmless when repeated."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._over.set)
            self._thread.join()

    def _run(self, started: concurrent.futures.Future[None]) -> None:
        try:
            self._loop.run_until_complete(self._serve(started))
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
        finally:
            self._loop.close()

    async def _serve(self, started: concurrent.futures.Future[None]) -> None:
        try:
            await self._web.start()
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(None)
        await self._over.wait()
        await self._web.close()


def serve_metrics(host: str, port: int, tls: ssl.SSLContext | None = None) -> HttpServerThread:
    """Serve the metrics at every path, from a thread, for roles that have no HTTP server of their own.

    Raises:
        AddressInUse: the port is taken.
    """

    def page(request: Request) -> Response:
        """Metrics in the text format of Prometheus."""
        body, headers = metrics.page_for(request.headers)
        return Response(body, headers=headers)

    listening = listen_for_metrics(host, port)
    return HttpServerThread(Starlette(routes=[Route("/{path:path}", page)]), listening, tls)

# SPDX-License-Identifier: Apache-2.0
"""The gRPC server of an endpoint picker: streams of proxies, and health checks.

Owns what an unauthenticated or broken client may cost: connections, streams, the memory of bodies, and the
time of each stream are bounded, and a key or certificate is checked before a message is read. The order of
messages is decided in ``ext_proc_stream.py``; whatever ends a stream, its request's account ends, too.
"""

from __future__ import annotations

import asyncio
import hmac
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from prometheus_client import Counter, Gauge

from mooncake import clock, metrics
from mooncake.errors import AccessDenied, AddressInUse, InvalidArgument
from mooncake.gateway.endpoint_picker import EndpointPicker, PickedCall, PickedRequest
from mooncake.gateway.ext_proc_messages import (
    HEALTH,
    SERVICE,
    HealthCheckRequest,
    HealthCheckResponse,
    ProcessingRequest,
    event_of,
    message_of,
)
from mooncake.gateway.ext_proc_stream import (
    Closed,
    Effect,
    Ended,
    EndStream,
    Event,
    ExtProcStream,
    FirstPiece,
    Immediate,
    Measured,
    Pick,
    ProxyReply,
    Refused,
    RequestBody,
    Served,
    StreamState,
)
from mooncake.http.openai import ApiError
from mooncake.http.server import BodyBudget, BodyBudgetExceeded
from mooncake.log import get_logger
from mooncake.machine import Wake
from mooncake.security import TRUSTED
from mooncake.security.http_auth import secret_bytes
from mooncake.security.principal import principal_of

log = get_logger(__name__)

LIVENESS, READINESS = "liveness", "readiness"
MAX_WATCHERS = 16
"""Most streams that watch the health; further ones are refused."""

WATCH_INTERVAL_S = 1.0
_SERVING, _NOT_SERVING, _SERVICE_UNKNOWN = 1, 2, 3
LOG_INTERVAL_S = 10.0
"""Least time between two log entries of a kind that clients cause; metrics count them all."""

_MESSAGE_SLACK_BYTES = 1 << 20
"""Size of a message beyond its body: headers and metadata."""

_streams = Gauge(
    "mooncake_gateway_ext_proc_streams",
    "Open streams of proxies, one per request.",
    registry=metrics.registry,
)
_ends = Counter(
    "mooncake_gateway_ext_proc_ends",
    "Ended streams of proxies: complete, refused, closed (before a good answer ended), out_of_turn, late, "
    "denied (no valid credential), or failed (a fault of this server).",
    ["how"],
    registry=metrics.registry,
)


class PickerServer:
    """Serves ``picker`` to proxies. Construct it on the loop where it runs; ``start``, later ``close``."""

    def __init__(
        self,
        picker: EndpointPicker,
        *,
        max_streams: int,
        max_connections: int,
        max_body_bytes: int,
        body_timeout_s: float,
        request_timeout_s: float,
        proxy_key: str = "",
    ) -> None:
        """``proxy_key``: the bearer token that proxies send; empty for none."""
        self._picker = picker
        self._max_body_bytes = max_body_bytes
        self._timeouts = (body_timeout_s, request_timeout_s)
        self._proxy_key = secret_bytes(proxy_key)
        self._checks_certificates = False
        self._bodies = BodyBudget()
        self._bodies.most_bytes = max(self._bodies.most_bytes, 2 * max_body_bytes)
        self._num_watchers = 0
        self._denials, self._cuts = LogInterval(), LogInterval()
        options = [
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", max_body_bytes + _MESSAGE_SLACK_BYTES),
            # More than are served: further ones are refused at once instead of waiting in the proxy.
            ("grpc.max_concurrent_streams", 2 * (max_streams + MAX_WATCHERS)),
            ("grpc.max_allowed_incoming_connections", max_connections),
            ("grpc.server_handshake_timeout_ms", 10_000),
            # Finds proxies that are gone without a word, whose streams would keep their accounts.
            ("grpc.keepalive_time_ms", 30_000),
            ("grpc.keepalive_timeout_ms", 10_000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ]
        self._server = grpc.aio.server(options=options, maximum_concurrent_rpcs=max_streams + MAX_WATCHERS)
        stream = grpc.stream_stream_rpc_method_handler(
            self._process, ProcessingRequest.FromString, lambda message: message.SerializeToString()
        )
        handlers = grpc.method_handlers_generic_handler(SERVICE, {"Process": stream})
        self._server.add_generic_rpc_handlers((handlers, self._health_handlers()))
        self._health_server: grpc.aio.Server | None = None

    async def start(self, address: str, tls: ServerTlsFiles | None = None) -> int:
        """Listen at ``host:port``, with TLS if there are files for it; returns the port.

        Raises:
            AddressInUse: the address is taken.
            InvalidArgument: a file can't be read, or is no certificate or key.
        """
        if tls is None:
            port = _add_port(address, lambda: self._server.add_insecure_port(address))
        else:
            self._checks_certificates = bool(tls.ca)
            credentials = tls.credentials()
            port = _add_port(address, lambda: self._server.add_secure_port(address, credentials))
        await self._server.start()
        return port

    async def start_health(self, address: str) -> int:
        """Answer health checks, and nothing else, at ``host:port`` without TLS; returns the port.

        Raises:
            AddressInUse: the address is taken.
        """
        options = [
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", 4096),
            ("grpc.max_allowed_incoming_connections", 4 * MAX_WATCHERS),
            ("grpc.max_connection_idle_ms", 60_000),
        ]
        server = grpc.aio.server(options=options, maximum_concurrent_rpcs=4 * MAX_WATCHERS)
        server.add_generic_rpc_handlers((self._health_handlers(),))
        port = _add_port(address, lambda: server.add_insecure_port(address))
        await server.start()
        self._health_server = server
        return port

    async def close(self, grace_s: float) -> None:
        """Take no new streams, and cancel those that have not ended after ``grace_s``."""
        for server in (self._health_server, self._server):
            if server is not None:
                await server.stop(grace_s)

    # --- streams of proxies

    async def _process(self, requests: AsyncIterator[Any], context: Any) -> None:
        if reason := self._denial(context):
            _ends.labels("denied").inc()
            if self._denials.may_log(clock.monotonic()):
                log.warning("proxy_denied", peer=context.peer(), reason=reason)
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, reason)
        with _streams.track_inprogress():
            core = ExtProcStream(self._max_body_bytes, *self._timeouts, clock.monotonic())
            stream = _ProxyStream(self._picker, self._bodies, core, context, self._timeouts[1], self._cuts)
            await stream.run()

    def _denial(self, context: Any) -> str:
        """Why a client may not ask for endpoints; empty if it may."""
        if self._proxy_key:
            given = dict(context.invocation_metadata() or ()).get("authorization", "")
            scheme, _, key = str(given).partition(" ")
            is_right = hmac.compare_digest(secret_bytes(key.strip()), self._proxy_key)
            if scheme.lower() != "bearer" or not is_right:
                return "the proxy's key is missing or wrong; send it as metadata authorization: Bearer KEY"
        if self._checks_certificates:
            names = context.auth_context().get("x509_subject_alternative_name", ())
            found = {"subjectAltName": [("URI", one.decode(errors="replace")) for one in names]}
            try:
                principal = principal_of(found)
            except AccessDenied as error:
                return str(error)
            if principal.level not in TRUSTED:
                return f"you are {principal}; endpoints are for {', '.join(sorted(TRUSTED))}"
        return ""

    # --- health

    def _health_handlers(self) -> grpc.GenericRpcHandler[Any, Any]:
        codec = (HealthCheckRequest.FromString, lambda message: message.SerializeToString())
        handlers: grpc.GenericRpcHandler[Any, Any] = grpc.method_handlers_generic_handler(
            HEALTH,
            {
                "Check": grpc.unary_unary_rpc_method_handler(self._check, *codec),
                "Watch": grpc.unary_stream_rpc_method_handler(self._watch, *codec),
            },
        )
        return handlers

    async def _health(self, service: str) -> int:
        if service == LIVENESS:
            return _SERVING
        if service in ("", READINESS, SERVICE):
            return _NOT_SERVING if await self._picker.why_not_ready() else _SERVING
        return _SERVICE_UNKNOWN

    async def _check(self, request: Any, context: Any) -> Any:
        found = await self._health(request.service)
        if found == _SERVICE_UNKNOWN:
            known = f"{LIVENESS}, {READINESS}, {SERVICE}"
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no such service; there are {known}")
        return HealthCheckResponse(status=found)

    async def _watch(self, request: Any, context: Any) -> None:
        if self._num_watchers >= MAX_WATCHERS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_WATCHERS} watch already")
        self._num_watchers += 1
        try:
            shown = 0
            while True:
                found = await self._health(request.service)
                if found != shown:
                    await context.write(HealthCheckResponse(status=found))
                    shown = found
                await asyncio.sleep(WATCH_INTERVAL_S)
        finally:
            self._num_watchers -= 1


class LogInterval:
    """Limits how often one kind of event is logged."""

    def __init__(self) -> None:
        self._last = float("-inf")

    def may_log(self, now: float) -> bool:
        if now < self._last + LOG_INTERVAL_S:
            return False
        self._last = now
        return True


class ServerTlsFiles:
    """PEM files of the server's certificate and key; ``ca``: the authority of clients, empty for none."""

    def __init__(self, cert: str, key: str, ca: str = "") -> None:
        self.cert, self.key, self.ca = cert, key, ca

    def credentials(self) -> grpc.ServerCredentials:
        """Raises InvalidArgument."""
        pair = [(_read(self.key), _read(self.cert))]
        if not self.ca:
            return grpc.ssl_server_credentials(pair)
        return grpc.ssl_server_credentials(pair, _read(self.ca), require_client_auth=True)


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidArgument("tls", path, f"a PEM file that can be read ({error.strerror})") from error


def _add_port(address: str, add: Any) -> int:
    try:
        port: int = add()
    except RuntimeError as error:
        message = f"{address} can't be listened on; free it, choose another --port, or check the certificate"
        raise AddressInUse(message) from error
    return port


class _ProxyStream:
    """Runs the core of one stream on its RPC."""

    def __init__(
        self,
        picker: EndpointPicker,
        bodies: BodyBudget,
        core: ExtProcStream,
        context: Any,
        write_timeout_s: float,
        cuts: LogInterval,
    ) -> None:
        self._cuts = cuts
        self._picker, self._bodies, self._core, self._context = picker, bodies, core, context
        self._write_timeout_s = write_timeout_s
        self._account: PickedRequest | PickedCall | None = None
        self._num_held = 0
        self._how = "closed"
        self._reading: asyncio.Task[Any] | None = None

    async def run(self) -> None:
        try:
            while self._core.state is not StreamState.ENDED:
                await self._perform(self._handle(await self._next()))
                if self._core.state is not StreamState.READING:
                    self._give_back()
        except asyncio.CancelledError:
            raise  # the proxy has cancelled the stream, or the server stops
        except Exception as error:
            if not isinstance(error, grpc.aio.AbortError):
                self._how = "failed"
                log.exception("proxy_stream_failed", error=repr(error))
            raise
        finally:
            self._release()

    def _handle(self, event: Event) -> list[Effect]:
        return self._core.handle(event, clock.monotonic())

    def _release(self) -> None:
        for effect in self._handle(Closed()):
            self._end(effect)
        if self._account is not None:
            self._account.finish(False, Measured())  # nothing, if it has ended
        self._give_back()
        if self._reading is not None:
            self._reading.cancel()
        _ends.labels(self._how).inc()

    def _give_back(self) -> None:
        self._bodies.give_back(self._num_held)
        self._num_held = 0

    async def _next(self) -> Event:
        """The next message of the proxy, or the reason that there is none."""
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._context.read())
        done, _ = await asyncio.wait({self._reading}, timeout=self._left_s())
        if not done:
            return Wake()  # a read that is cancelled would cancel the whole stream, and the refusal with it
        message, self._reading = self._reading.result(), None
        if message is grpc.aio.EOF:  # type: ignore[attr-defined]
            return Closed()
        event = event_of(message)
        if isinstance(event, RequestBody):
            try:
                self._bodies.take(len(event.data))
            except BodyBudgetExceeded as error:
                return Refused.of(ApiError(503, str(error), code=error.code, retry_after_s=1.0))
            self._num_held += len(event.data)
        return event

    def _left_s(self) -> float:
        deadline = self._core.deadline()
        assert deadline is not None
        return max(0.0, deadline - clock.monotonic())

    async def _perform(self, effects: list[Effect]) -> None:
        waiting = deque(effects)
        while waiting:
            effect = waiting.popleft()
            match effect:
                case Pick():
                    waiting.extend(self._handle(await self._pick(effect)))
                case ProxyReply() | Immediate():
                    await self._write(effect)
                case Served() if self._account is not None:
                    await self._account.served(effect.status, effect.endpoint)
                case FirstPiece() if self._account is not None:
                    self._account.first_piece()
                case Ended():
                    self._end(effect)
                case EndStream():
                    await self._cut(effect)

    def _end(self, effect: Effect) -> None:
        if not isinstance(effect, Ended):
            return
        self._how = "complete" if effect.is_complete else self._how
        if self._account is not None:
            self._account.finish(effect.is_complete, effect.measured)

    async def _pick(self, effect: Pick) -> Event:
        try:
            answer, self._account = await self._picker.pick(effect.head, effect.body)
        except Exception as error:
            log.exception("pick_failed", error=repr(error))
            message = "the endpoint picker failed; its log has the traceback"
            return Refused.of(ApiError(500, message, code="internal_error"))
        return answer

    async def _write(self, effect: ProxyReply | Immediate) -> None:
        if isinstance(effect, Immediate):
            self._how = "refused"
        try:
            async with asyncio.timeout(self._write_timeout_s):
                await self._context.write(message_of(effect))
        except TimeoutError:
            self._how = "late"
            await self._context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the proxy reads no replies")

    async def _cut(self, effect: EndStream) -> None:
        self._how = "late" if effect.is_late else "out_of_turn"
        if self._cuts.may_log(clock.monotonic()):
            log.warning("proxy_stream_cut", peer=self._context.peer(), reason=effect.reason)
        code = grpc.StatusCode.DEADLINE_EXCEEDED if effect.is_late else grpc.StatusCode.INVALID_ARGUMENT
        await self._context.abort(code, effect.reason)

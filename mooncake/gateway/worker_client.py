# SPDX-License-Identifier: Apache-2.0
"""Calls to workers: prefill a prompt, follow an answer, list models.

Owns the distinction that every retry rests on: a worker that *failed* (lost, silent, broken) must not get
this request again, a *busy* one is fine but full, one whose *weights were replaced* is fine but what it has
sent may not be continued, and a request that was *refused* (4xx) would be refused everywhere. It does not
know which worker is next. Foreign exceptions of the HTTP client are translated here and nowhere else.

Silence alone does not distinguish a long prompt from a dead process. After a while without a byte the
worker's health is probed beside the call: no answer means failed, an answer extends the wait. How long that
may be is the caller's deadline while nothing of an answer is there, since it may queue, and may be computed
as a whole; a stream that has begun has a limit. The probe has a connection of its own: one whose other end no
longer exists is found by the kernel.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from typing import Annotated, Any, TypeVar

import aiohttp
import msgspec
from msgspec import Meta

from mooncake import tracing
from mooncake.errors import MooncakeError, ProtocolError
from mooncake.http.openai import (
    WEIGHTS_REPLACED,
    ApiError,
    CompletionChoice,
    ErrorDetail,
    ErrorResponse,
    ModelCard,
    ModelList,
    Usage,
)
from mooncake.http.sse import EventParser, name_of
from mooncake.rpc.client import keep_alive
from mooncake.security.http_auth import HttpClientAuth
from mooncake.types import InstanceId

ResultT = TypeVar("ResultT")

CONNECT_TIMEOUT_S = 3.0
HEALTH_TIMEOUT_S = 5.0
COMPLETIONS = "/v1/completions"
HAND_OVER = "/v1/kv/hand_over"
DONE = b"[DONE]"
SILENCE_BEFORE_PROBE_S = 5.0
_BUSY = (429, 503)


class WorkerFailed(MooncakeError):
    """A call failed through the fault of ``instance``. ``was_reached``: it may have begun the work."""

    code = "worker_failed"

    def __init__(self, instance: InstanceId, reason: str, was_reached: bool = True) -> None:
        super().__init__(f"worker {instance}: {reason}")
        self.instance = instance
        self.reason = reason
        self.was_reached = was_reached


class WorkerBusy(MooncakeError):
    """``instance`` accepts no more requests now; ``answer`` is its error."""

    code = "worker_busy"

    def __init__(self, instance: InstanceId, answer: ApiError) -> None:
        super().__init__(f"worker {instance} is busy: {answer}")
        self.instance = instance
        self.answer = answer


class WeightsReplaced(ApiError):
    """The worker's weights were replaced under the request, or are others than those that began its answer:
    it can only be computed from its beginning."""

    def __init__(self, message: str) -> None:
        super().__init__(409, message, code=WEIGHTS_REPLACED)


class CompletionChunk(msgspec.Struct):
    """One event of a completion's stream."""

    choices: list[CompletionChoice] = []
    usage: Usage | None = None
    error: ErrorDetail | None = None
    kv_transfer_params: dict[str, Any] | None = None


class HandedOver(msgspec.Struct):
    """A worker's answer to a hand-over."""

    push_port: Annotated[int, Meta(ge=0, lt=1 << 16)] = 0


class WholeCompletion(msgspec.Struct):
    """A completion that was not streamed."""

    choices: list[CompletionChoice]
    usage: Usage | None = None
    kv_transfer_params: dict[str, Any] | None = None


class WorkerClient:
    """The HTTP client side of every worker. ``open`` it on the loop where it is used."""

    def __init__(self, stall_timeout_s: float, caller: HttpClientAuth | None = None) -> None:
        """
        Args:
            stall_timeout_s: limit of the silence in a stream that has begun.
            caller: sends the requests; by default with this process's identity.
        """
        self._stall_timeout_s = stall_timeout_s
        self._caller = caller or HttpClientAuth()
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
        # Shorter than a worker keeps idle connections: a request must not use a connection that is closing.
        connector = aiohttp.TCPConnector(
            limit=0, keepalive_timeout=2.0, ssl=self._caller.tls or True, socket_factory=_socket
        )
        # No cookies: one of a client's answer would go with the requests of others.
        self._session = aiohttp.ClientSession(
            timeout=timeout, connector=connector, cookie_jar=aiohttp.DummyCookieJar()
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def complete(
        self, instance: InstanceId, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> WholeCompletion:
        """Request a completion in one piece.

        Raises:
            WorkerFailed, WorkerBusy: try elsewhere.
            WeightsReplaced: try from the beginning, if nothing of the answer has been passed on.
            ApiError: the request itself was refused.
        """
        content = await self.whole(instance, COMPLETIONS, body, headers)
        try:
            return msgspec.json.decode(content, type=WholeCompletion)
        except msgspec.MsgspecError as error:
            raise WorkerFailed(instance, f"its answer can't be read: {error}") from error

    async def whole(
        self, instance: InstanceId, path: str, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> bytes:
        """The body of an answer that is not streamed. Raises as ``complete``."""
        async with self._post(instance, path, body, headers) as response:
            return await self._while_alive(instance, response.read())

    async def stream(
        self, instance: InstanceId, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> AsyncGenerator[CompletionChunk, None]:
        """Yield the chunks of a streamed completion, up to its ``[DONE]``. Raises as ``complete``."""
        events = self.events(instance, COMPLETIONS, body, headers)
        async with contextlib.aclosing(events):
            async for event in events:
                if event == DONE:
                    return
                yield self._chunk(instance, event)

    async def hand_over(
        self, instance: InstanceId, move_id: str, transfer_id: str, headers: Mapping[str, str]
    ) -> int:
        """Have the stream ``move_id`` ended at its next token, for another worker to continue it.

        Returns the port from which that gets the KV as ``transfer_id``; 0 where none is pushed. Raises as
        ``complete``.
        """
        body = {"move_id": move_id, "transfer_id": transfer_id}
        content = await self.whole(instance, HAND_OVER, body, headers)
        try:
            return msgspec.json.decode(content, type=HandedOver).push_port
        except msgspec.MsgspecError as error:
            raise WorkerFailed(instance, f"its answer can't be read: {error}") from error

    async def events(
        self, instance: InstanceId, path: str, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> AsyncGenerator[bytes, None]:
        """Yield the data of a stream's events, up to and including its ``[DONE]``. Raises as ``complete``."""
        async with self._post(instance, path, body, headers) as response:
            parser, has_begun = EventParser(), False
            while True:
                data = await self._next(instance, response.content, has_begun)
                if not data:
                    raise WorkerFailed(instance, "its stream ended before the answer did")
                for event in parser.feed(data):
                    has_begun = True
                    yield event
                    if event == DONE:
                        return

    async def named_events(
        self,
        instance: InstanceId,
        path: str,
        body: Mapping[str, Any],
        headers: Mapping[str, str],
        is_opening: Callable[[str], bool],
    ) -> AsyncGenerator[bytes, None]:
        """Yield a stream's events as they were sent, until the engine ends it. Raises as ``complete``.

        ``is_opening``: whether an event of this name comes before the first token.
        """
        async with self._post(instance, path, body, headers) as response:
            parser, has_begun = EventParser(), False
            while data := await self._next(instance, response.content, has_begun):
                for event in parser.whole(data):
                    has_begun = has_begun or not is_opening(name_of(event))
                    yield event
            if parser.rest:
                yield parser.rest

    async def models(self, instance: InstanceId, headers: Mapping[str, str] | None = None) -> list[ModelCard]:
        """The models that the worker serves. Raises WorkerFailed."""
        content = await self.get(instance, "/v1/models", headers)
        try:
            return msgspec.json.decode(content, type=ModelList).data
        except msgspec.MsgspecError as error:
            raise WorkerFailed(instance, f"its list of models can't be read: {error}") from error

    def _chunk(self, instance: InstanceId, event: bytes) -> CompletionChunk:
        try:
            chunk = msgspec.json.decode(event, type=CompletionChunk)
        except msgspec.MsgspecError as error:
            raise WorkerFailed(instance, f"its stream can't be read: {error}") from error
        if chunk.error is not None:
            if chunk.error.code == WEIGHTS_REPLACED:
                raise WeightsReplaced(chunk.error.message)
            raise WorkerFailed(instance, f"it aborted: {chunk.error.message}")
        return chunk

    @contextlib.asynccontextmanager
    async def _post(
        self, instance: InstanceId, path: str, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Post a request and open its response, which has status 200."""
        assert self._session is not None, "open() first"
        data = msgspec.json.encode(body)
        content = {"Content-Type": "application/json", **headers, **self._caller.headers("POST", path, data)}
        try:
            with tracing.call(f"POST {path}", server__address=instance) as names:
                content |= names
                request = self._session.post(self._caller.url(instance, path), data=data, headers=content)
                del data  # which may be large, while the response may last long
                response = await self._while_alive(instance, request)
                async with response:
                    if response.status != 200:
                        await self._refuse(instance, response)
                    yield response
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise WorkerFailed(instance, f"can't be reached: {error}", was_reached=False) from error
        except (aiohttp.ClientError, OSError, ProtocolError) as error:
            raise WorkerFailed(instance, f"the connection broke: {error}") from error

    async def _refuse(self, instance: InstanceId, response: aiohttp.ClientResponse) -> None:
        content = await self._while_alive(instance, response.read())
        detail = _detail_of(content)
        if detail is None:
            text = content[:200].decode(errors="replace")
            detail = ErrorDetail(f"worker {instance} answered {response.status}: {text}", "server_error")
        if response.status == 409 and detail.code == WEIGHTS_REPLACED:
            raise WeightsReplaced(detail.message)
        answer = engine_error(response.status, detail)
        with contextlib.suppress(ValueError):
            answer.retry_after_s = float(response.headers.get("Retry-After", ""))
        raise meaning_of(instance, answer, f"answered {response.status}: {detail.message}")

    async def _while_alive(self, instance: InstanceId, call: Awaitable[ResultT]) -> ResultT:
        """Await ``call`` while the worker seems alive."""
        waiting = asyncio.ensure_future(call)
        try:
            while True:
                done, _ = await asyncio.wait({waiting}, timeout=SILENCE_BEFORE_PROBE_S)
                if done:
                    return waiting.result()
                await self.get(instance, "/health")
        finally:
            if not waiting.done():
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)

    async def _next(self, instance: InstanceId, content: aiohttp.StreamReader, has_begun: bool) -> bytes:
        """Like ``_while_alive``, for reads, which can be cancelled and restarted: no task per token.

        ``has_begun``: whether a part of the stream is there, and the silence has a limit.
        """
        limit_s = self._stall_timeout_s if has_begun else math.inf
        waited_s = 0.0
        while True:
            # A limit shorter than the probe's interval decides alone.
            pause_s = min(SILENCE_BEFORE_PROBE_S, limit_s - waited_s)
            try:
                async with asyncio.timeout(pause_s):
                    return await content.readany()
            except TimeoutError:
                waited_s += pause_s
            if waited_s >= limit_s:
                raise WorkerFailed(instance, f"stalled: not a byte for {limit_s:g} s")
            await self.get(instance, "/health")

    async def get(self, instance: InstanceId, path: str, headers: Mapping[str, str] | None = None) -> bytes:
        """The body of a GET that is answered quickly or fails. Raises WorkerFailed."""
        assert self._session is not None, "open() first"
        url, timeout_s = self._caller.url(instance, path), HEALTH_TIMEOUT_S
        headers = {**(headers or {}), **self._caller.headers("GET", path)}
        try:
            timeout = aiohttp.ClientTimeout(total=timeout_s)
            async with self._session.get(url, timeout=timeout, headers=headers) as response:
                if response.status != 200:
                    raise WorkerFailed(instance, f"GET {path} answered {response.status}")
                return await response.read()
        except TimeoutError:
            raise WorkerFailed(instance, f"GET {path} was not answered within {timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise WorkerFailed(instance, f"GET {path} failed: {error}") from error


def _detail_of(content: bytes) -> ErrorDetail | None:
    """The error object in an engine's answer; None without one."""
    with contextlib.suppress(msgspec.MsgspecError):
        return msgspec.json.decode(content, type=ErrorResponse).error
    with contextlib.suppress(msgspec.MsgspecError):  # of SGLang the body itself is the object
        return msgspec.json.decode(content, type=ErrorDetail)
    return None


def engine_error(status: int, detail: ErrorDetail) -> ApiError:
    """An engine's error as that of its client, with the object unchanged."""
    error = ApiError(status, detail.message)
    error.detail = detail
    return error


def meaning_of(instance: InstanceId, answer: ApiError, reason: str) -> MooncakeError:
    """What to raise for an error of an engine: it is busy, it finds the request wrong, or it failed.

    ``reason``: why it failed.
    """
    if answer.status in _BUSY:
        return WorkerBusy(instance, answer)
    if 400 <= answer.status < 499 or answer.status == 501:
        # Engines answer 501 for an API that their model can't serve, which is no fault of theirs.
        return answer
    return WorkerFailed(instance, reason)


def _socket(address: aiohttp.connector.AddrInfoType) -> socket.socket:
    """A socket for a connection to a worker, which the kernel ends when the other end no longer exists.

    A worker's host that restarts, or a firewall that forgets the connection, would leave a call waiting for
    bytes that nothing sends, while the worker answers every probe.
    """
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    keep_alive(made)
    return made

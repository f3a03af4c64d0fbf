# SPDX-License-Identifier: Apache-2.0
"""Requests to engines that are not our workers: the endpoints, and the calls of each request.

The endpoints read only the fields of the body that they need (the model, the prompt's beginning, whether to
stream); the engine checks all others and reports errors in them. APIs differ in ``engine_apis.py``. A request
that generates nothing (embeddings, tokens) is one call to any ready engine, and is not placed.

``ProxiedRequest`` owns the order of the calls to the chosen engines (``handoff.py`` makes their bodies), and
retries elsewhere while nothing has reached the client. An engine's answer is forwarded event by event; in
completions and chats the count of cached tokens is corrected, since the decoding engine counts all KV that it
received. Events with names are forwarded as they were sent; those that an engine sends before the first token
wait for it, or the request could not be retried. An engine
whose answer reports that it was aborted counts as failed, like a lost one. An answer that has begun can't
move to another engine: a failure then becomes an error event.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Awaitable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from fastapi import Request, Response

from mooncake import clock, tracing
from mooncake.conductor.client import ConductorClient
from mooncake.conductor.messages import Decision, Failed, Finished, Place, Prefilled
from mooncake.gateway.backends import Backends
from mooncake.gateway.cache_misses import origin_of
from mooncake.gateway.clients import Client
from mooncake.gateway.engine_apis import (
    EngineApi,
    EngineUsage,
    failure_in,
    read_object,
    read_request,
    reason_of,
    usage_in,
)
from mooncake.gateway.gateway import Gateway
from mooncake.gateway.handoff import (
    EngineEndpoint,
    Handoff,
    Protocol,
    decode_body,
    make_handoff,
    prefill_body,
    supports,
    without_transfers,
)
from mooncake.gateway.limiter import Permit
from mooncake.gateway.metrics import Timing, record_answer
from mooncake.gateway.prompts import PromptKeys
from mooncake.gateway.request_ids import RequestIds
from mooncake.gateway.request_parsing import (
    PRIORITY_HEADER,
    RANK_HEADER,
    SESSION_HEADERS,
    affinity_of,
    names_of,
    priority_of,
    rank_of,
    request_id_of,
    session_at_engines,
    session_of,
    slo_of,
)
from mooncake.gateway.retries import MAX_FAILURES, Attempts, PlacedRequest, Route
from mooncake.gateway.worker_client import (
    DONE,
    WeightsReplaced,
    WorkerBusy,
    WorkerClient,
    WorkerFailed,
    engine_error,
    meaning_of,
)
from mooncake.http import large_json
from mooncake.http.latency import itl_seconds, ttft_seconds
from mooncake.http.openai import WEIGHTS_REPLACED, ApiError, ErrorDetail, Usage, model_not_found
from mooncake.http.sse import EventStreamResponse, cancel_on_disconnect, data_of, name_of
from mooncake.log import get_logger
from mooncake.types import InstanceId

log = get_logger(__name__)

EMBEDDINGS = "/v1/embeddings"

_FORWARDED_HEADERS = ("traceparent", "tracestate", "authorization")


async def serve_any_engine(gateway: Gateway, http: Request, api: EngineApi, content: bytes) -> Response:
    """Answer a request, whole or streamed. Raises ApiError."""
    request = await large_json.decoded(content, partial(read_request, api))
    request = without_transfers(request, gateway.settings.trust_clients)
    slo = slo_of(http)
    client: Client | None = http.state.client
    entry = Permit(gateway.limiter, client, api.num_answers(request), clock.monotonic())

    def leave() -> None:
        entry.leave(clock.monotonic())

    if client is not None:
        request["cache_salt"] = client.entry.salt_at_engines
    try:
        adapter = await settle_model(gateway, request)
        answer = await _proxied_request_of(gateway, http, api, request, adapter)
        pieces = _accounted(answer, http, slo)
        first = await cancel_on_disconnect(http, anext(pieces))
        headers = {**names_of(http), **answer.route.headers()}
        if not request.get("stream"):
            async with contextlib.aclosing(pieces):
                async for _ in pieces:
                    raise AssertionError("an unstreamed answer has one piece")
            leave()
            return Response(first, 200, headers, media_type="application/json")
    except BaseException:
        leave()
        raise
    return EventStreamResponse(first, pieces, headers, leave, answer.deadline, api.error_event)


async def serve_call(gateway: Gateway, http: Request, path: str, content: bytes) -> Response:
    """Answer a request that generates nothing, by any ready engine. Raises ApiError."""
    request = await large_json.decoded(content, read_object)
    request = without_transfers(request, gateway.settings.trust_clients)
    client: Client | None = http.state.client
    permit = Permit(gateway.limiter, client, 1, clock.monotonic())
    try:
        if client is not None and path == EMBEDDINGS:
            request["cache_salt"] = client.entry.salt_at_engines
        await settle_model(gateway, request)
        headers = _headers_for_engines(gateway, http)
        deadline = clock.monotonic() + gateway.settings.request_timeout_s
        calling = _before(deadline, _call(gateway, path, request, headers))
        answer = await cancel_on_disconnect(http, calling)
        found = usage_in(answer) if client is not None else None
        if client is not None and found is not None:
            client.used(found.prompt_tokens, 0, clock.monotonic())
    finally:
        permit.leave(clock.monotonic())
    return Response(answer, 200, names_of(http), media_type="application/json")


async def _call(gateway: Gateway, path: str, request: Mapping[str, Any], headers: Mapping[str, str]) -> bytes:
    """The answer of the first engine that gives one. Raises ApiError."""
    tried: dict[InstanceId, None] = {}
    refusal = ApiError(503, "no instance is ready", code="no_instance", retry_after_s=1.0)
    while len(tried) < MAX_FAILURES:
        instance = await gateway.backends.pick_instance(gateway.scheduling, tried)
        if instance is None:
            break
        tried[instance] = None
        try:
            return await gateway.workers.whole(instance, path, request, headers)
        except WorkerBusy as error:
            refusal = error.answer
        except WorkerFailed as error:
            log.warning("call_failed", instance=instance, path=path, reason=error.reason)
            gateway.scheduling.post(Failed(instance, error.reason))
            message = f"{len(tried)} attempts failed, the last on {error}"
            refusal = ApiError(503, message, code="workers_failed", retry_after_s=1.0)
    raise refusal


async def _accounted(answer: ProxiedRequest, http: Request, slo: Any) -> AsyncGenerator[bytes, None]:
    """Yield the pieces for the client. Raises ApiError at any time."""
    is_complete = has_begun = False
    pieces = answer.answer()
    try:
        async with contextlib.aclosing(pieces):
            while True:
                try:
                    piece = await _before(answer.deadline, anext(pieces))
                except StopAsyncIteration:
                    break
                yield answer.api.framed(piece) if answer.is_stream else piece
                has_begun = True
        is_complete = True
        record_answer(
            http.state.answer_id, answer.route, answer.usage_so_far, answer.timing, slo, http.state.client
        )
    except Exception as error:
        if not has_begun:
            raise
        if not isinstance(error, ApiError):
            log.exception("answer_failed", id=http.state.answer_id, error=error)
            message = "the gateway failed while answering; its log has the traceback"
            error = ApiError(500, message, code="internal_error")
        log.warning("stream_interrupted", id=http.state.answer_id, reason=str(error))
        raise error
    finally:
        client: Client | None = http.state.client
        if not is_complete and client is not None:
            client.charge(answer.num_computed, clock.monotonic())
        answer.finish(is_complete)


async def _before(deadline: float, piece: Awaitable[bytes]) -> bytes:
    try:
        async with asyncio.timeout(max(0.0, deadline - clock.monotonic())):
            return await piece
    except TimeoutError:
        message = "no complete answer within the time limit; ask for fewer tokens or try again later"
        raise ApiError(504, message, code="deadline_exceeded") from None


def _headers_for_engines(gateway: Gateway, http: Request) -> dict[str, str]:
    """The headers of every call to an engine for this request."""
    headers = {**gateway.backends.headers, "X-Request-ID": request_id_of(http)}
    # A client's key for this gateway must not reach engines.
    handed_on = _FORWARDED_HEADERS if http.state.client is None else _FORWARDED_HEADERS[:-1]
    return headers | {name: http.headers[name] for name in handed_on if name in http.headers}


@dataclass(frozen=True)
class PreparedRequest:
    """What the conductor and the engines get for a request, of this gateway or of a proxy."""

    place: Place
    headers: Mapping[str, str]
    "Headers of every call to an engine."
    rank: int | None
    "Data-parallel rank that the client wants."
    prompt: PromptKeys


async def prepare(
    gateway: Gateway, http: Request, api: EngineApi, request: dict[str, Any], adapter: str
) -> PreparedRequest:
    """Name the prompt's blocks and the session, and note the request's ids. Raises ApiError, 400."""
    settings = gateway.settings
    request_id = request_id_of(http)
    answer_id = f"{api.answer_prefix}-{uuid.uuid4().hex}"
    tracing.note(
        gen_ai__request__model=str(request.get("model") or settings.model_name),
        gen_ai__request__stream=bool(request.get("stream")),
    )
    headers = _headers_for_engines(gateway, http)
    session = session_of(http, request, settings.session_header)
    if session:
        headers[SESSION_HEADERS[0]] = session_at_engines(http, session)
    if isinstance(request.get("session_id"), str):  # engines prefer it to the header
        if session and request["session_id"] == session:
            request["session_id"] = headers[SESSION_HEADERS[0]]
        else:
            del request["session_id"]
    more = request.get("vllm_xargs")
    if isinstance(more, Mapping) and "session_id" in more:  # vLLM reads it where neither of the others is
        request["vllm_xargs"] = {name: value for name, value in more.items() if name != "session_id"}
    priority, rank = request.get("priority"), rank_of(http)
    if priority is None and (priority := priority_of(http)) is not None:
        # Not beside a priority in the body: engines would prefer the header.
        headers[PRIORITY_HEADER] = str(priority)
    tracing.phase("tokenize")
    names = await gateway.prompts.name(api, request, adapter, headers, gateway.scheduling)
    slo = slo_of(http)
    place = Place(
        answer_id,
        names.num_tokens,
        names.keys,
        affinity_of(http, session),
        lifetime_s=settings.request_timeout_s + 60.0,
        slo_ttft_s=(slo.ttft_ms or 0.0) / 1000.0,
        slo_tbt_s=(slo.tbt_ms or 0.0) / 1000.0,
        priority=_as_int(priority),
        max_output_tokens=max(0, _as_int(api.max_output_tokens(request))),
        scope=adapter,
        bare_keys=names.bare_keys,
        is_text=names.is_text,
    )
    is_secret = request_id != http.headers.get("x-request-id")
    name = http.state.client.name if http.state.client is not None else ""
    gateway.request_ids.note(RequestIds(answer_id, request_id, is_secret, [answer_id], name, place.affinity))
    http.state.answer_id = answer_id
    return PreparedRequest(place, headers, rank, names)


async def _proxied_request_of(
    gateway: Gateway, http: Request, api: EngineApi, request: dict[str, Any], adapter: str
) -> ProxiedRequest:
    found = await prepare(gateway, http, api, request, adapter)
    proxied = ProxiedRequest(
        gateway.scheduling,
        gateway.workers,
        gateway.backends,
        protocol=gateway.protocol,
        api=api,
        request=request,
        place=found.place,
        num_prompt_tokens=found.prompt.num_all_tokens,
        headers=found.headers,
        rank_header={} if found.rank is None else {RANK_HEADER: str(found.rank)},
        deadline=clock.monotonic() + gateway.settings.request_timeout_s,
    )
    gateway.recorder.watch(proxied, http)
    origin = origin_of(http, str(request.get("cache_salt") or ""), adapter or gateway.settings.model_name)
    if (observed := gateway.misses.prompt_arrived(found.place, origin, found.prompt)) is not None:
        proxied.end_listeners.append(observed.request_ended)
    return proxied


async def settle_model(gateway: Gateway, request: dict[str, Any]) -> str:
    """Put the engines' own name of the model into ``request``; returns the adapter's name, if it is one.

    Raises:
        ApiError: 404, none of the engines has such a model.
    """
    wanted = request.get("model")
    aliases = (gateway.settings.model_name, gateway.settings.model)
    cards = await gateway.backends.models(gateway.scheduling, "" if wanted in aliases else wanted or "")
    if not cards:
        return ""
    for card in cards:
        if card.id == wanted:
            # All names of one model have the same root, an adapter has its own.
            return card.id if card.root != cards[0].root else ""
    if wanted is None or wanted in aliases:
        request["model"] = cards[0].id
        return ""
    base, _, name = wanted.partition(":")
    if name and cards[0].owned_by == "sglang" and base in (*aliases, *(card.id for card in cards)):
        request["model"] = f"{cards[0].id if base in aliases else base}:{name}"
        return str(name)  # SGLang lists no adapters by this name; it refuses one that it does not have
    raise model_not_found(wanted, ", ".join(card.id for card in cards))


def _as_int(found: object) -> int:
    return found if isinstance(found, int) and abs(found) < 1 << 31 else 0


# --- one request


_PREFILL_ANSWER_S = 1.0
"""How long the usage of an answer that has ended waits for the prefill engine's."""
_PARSED_MARKERS = (b'"usage":{', b'"usage": {', b'"error"', b'"abort"')
"""Substrings of events that need parsing. A text can't contain them: its quotation marks are escaped."""


class _Prefilled(msgspec.Struct):
    """The answer to a prefill."""

    usage: EngineUsage | None = None
    kv_transfer_params: dict[str, Any] | None = None


class _Ending(msgspec.Struct):
    finish_reason: Any = None


class _StreamEvent(msgspec.Struct):
    usage: Usage | None = None
    error: Any = None
    choices: list[_Ending] = []

    @property
    def has_new_weights(self) -> bool:
        """Whether the answer ends because the engine's weights were replaced."""
        return isinstance(self.error, Mapping) and self.error.get("code") == WEIGHTS_REPLACED

    @property
    def failure(self) -> str:
        """Why the engine aborted the answer; empty if it did not."""
        if self.error:
            return reason_of(self.error)
        is_aborted = any(choice.finish_reason == "abort" for choice in self.choices)
        return "it aborted the answer" if is_aborted else ""

    @property
    def answer(self) -> ApiError | None:
        """The error with the status that it would have had; None where that is unknown.

        Engines send the status of a stream before they have checked the whole request.
        """
        if not isinstance(self.error, Mapping) or not isinstance(self.error.get("code"), int):
            return None
        code, param = self.error["code"], self.error.get("param")
        message, kind = (str(self.error.get(name) or "") for name in ("message", "type"))
        return engine_error(code, ErrorDetail(message, kind, param if isinstance(param, str) else None, code))


class ProxiedRequest(PlacedRequest):
    """One proxied request. Use ``answer``, once, then ``end``."""

    def __init__(
        self,
        scheduling: ConductorClient,
        workers: WorkerClient,
        backends: Backends,
        *,
        protocol: Protocol,
        api: EngineApi,
        request: Mapping[str, Any],
        place: Place,
        num_prompt_tokens: int,
        headers: Mapping[str, str],
        rank_header: Mapping[str, str],
        deadline: float,
    ) -> None:
        """
        Args:
            num_prompt_tokens: tokens of all prompts, as far as the gateway knows them.
            rank_header: the client's data-parallel rank, for an engine that serves the request alone.
        """
        super().__init__(scheduling, place)
        self.usage = Usage(prompt_tokens=num_prompt_tokens)
        self._workers, self._backends = workers, backends
        self._protocol = protocol
        self.api = api
        self._path, self._body, self._headers = api.path, request, headers
        self._rank_header = rank_header
        self.is_stream = bool(request.get("stream"))
        self._is_one_answer = api.num_answers(request) == 1
        self.deadline = deadline
        self._began = self._last = clock.monotonic()
        self._ttft_s = 0.0
        """0: unknown, as an answer that an engine sends whole shows no times of its tokens."""
        self._longest_gap_s = 0.0
        self._num_events = 0
        self._num_believed = 0
        """Prompt tokens that the chosen engine was believed to hold."""
        self._prefill: Usage | None = None
        """The prefill engine's usage."""
        self._computing: asyncio.Future[dict[str, Any]] | None = None
        """The prefill engine's answer, until the usage has waited for it."""
        self._is_computed = False
        """Whether the conductor knows that the prompt is computed, or the prefill engine will report it."""

    @property
    def timing(self) -> Timing:
        return Timing(self._ttft_s or None, self._longest_gap_s, clock.monotonic() - self._began)

    @property
    def usage_so_far(self) -> Usage:
        """The engines' usage; without one, what was observed."""
        found = self.usage
        if not found.completion_tokens:
            found = msgspec.structs.replace(self._prefill or found, completion_tokens=self._num_events)
        return found

    @property
    def num_computed(self) -> int:
        """Tokens that were computed so far, as far as that was observed: the prompt's, and output."""
        if not self._num_events and self.prefilled is None:
            return 0
        found = self.usage_so_far
        num_output = max(found.completion_tokens, self._num_events)  # some usages begin with a count of 1
        return found.prompt_tokens + num_output

    async def answer(self) -> AsyncGenerator[bytes, None]:
        """Yield the data of the answer's events, or its whole body. Raises ApiError."""
        attempts = Attempts()
        while True:
            decision = await self._place(self._request_id, attempts, True, 0.0)
            self.route = Route(decision.prefill, decision.decode, decision.degraded)
            self._num_believed = decision.num_cached_tokens
            pieces = self._attempt(decision)
            try:
                async with contextlib.aclosing(pieces):
                    async for piece in pieces:
                        self._note_time()
                        yield piece
                return
            except (WorkerFailed, WorkerBusy) as error:
                self._backends.forget(error.instance)
                stage = "prefill" if error.instance == decision.prefill else "decode"
                self._note(error, self._request_id, attempts, stage)
                if self._num_events:
                    message = f"the engine was lost in the middle of the answer: {error}"
                    raise ApiError(503, message, code="engine_lost", retry_after_s=1.0) from error

    def finish(self, is_complete: bool) -> None:
        """Report to the conductor that the engines are done with this request."""
        num_tokens = self.usage.completion_tokens or self._num_events
        tbt_s = (self._last - self._began - self._ttft_s) / max(1, num_tokens - 1) if self._ttft_s else 0.0
        details = self.usage_so_far.prompt_tokens_details
        # An engine that does not count cached tokens had what it was believed to hold.
        self.num_cached_tokens = details.cached_tokens if details is not None else self._num_believed
        self.end(Finished(self._request_id, num_tokens, self._ttft_s, tbt_s, is_complete))

    async def _attempt(self, decision: Decision) -> AsyncGenerator[bytes, None]:
        self._prefill = self._computing = None
        if decision.prefill is None or not supports(self._protocol, self.api, self._body):
            self._is_computed = False
            async for piece in self._decode(decision, {}, {**self._headers, **self._rank_header}):
                yield piece
            return
        self._is_computed = True
        async with contextlib.AsyncExitStack() as stack:
            prefill = await self._backends.side(decision.prefill, self._protocol)
            decode = EngineEndpoint(
                decision.decode.rpartition(":")[0], self._backends.ports.get(decision.decode)
            )
            handoff = make_handoff(self._protocol, uuid.uuid4().hex, prefill, decode)
            tracing.phase("prefill", instance=decision.prefill)
            self._computing = computing = asyncio.ensure_future(self._compute(decision, handoff, prefill))
            stack.push_async_callback(_cancelled, computing)
            answered = {} if handoff.is_concurrent else await computing
            params = answered if handoff.decode is None else handoff.decode
            pieces = self._decode(decision, params, self._headers)
            await stack.enter_async_context(contextlib.aclosing(pieces))
            yield await self._first(pieces, computing)
            async for piece in pieces:
                yield piece

    async def _first(
        self, pieces: AsyncGenerator[bytes, None], computing: asyncio.Future[dict[str, Any]]
    ) -> bytes:
        """The first piece of the answer, or the error of the prefill that it waits for."""
        coming: asyncio.Future[Any] = asyncio.ensure_future(anext(pieces))
        try:
            both: set[asyncio.Future[Any]] = {coming, computing}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not coming.done():
                await computing
            first: bytes = await coming
            return first
        finally:
            await _cancelled(coming)

    async def _compute(self, decision: Decision, handoff: Handoff, side: EngineEndpoint) -> dict[str, Any]:
        """Have the prompt computed. Returns the engine's ``kv_transfer_params``."""
        assert decision.prefill is not None
        headers = dict(self._headers)
        if side.rank is not None:
            headers[RANK_HEADER] = str(side.rank)
        began = clock.monotonic()
        body = prefill_body(self.api, self._body, handoff.prefill)
        content = await self._workers.whole(decision.prefill, self._path, body, headers)
        try:
            found = msgspec.json.decode(content, type=_Prefilled)
        except msgspec.MsgspecError as error:
            raise WorkerFailed(decision.prefill, f"its answer can't be read: {error}") from error
        usage = self._prefill = found.usage.counted() if found.usage else None
        details = usage.prompt_tokens_details if usage else None
        num_tokens = usage.prompt_tokens if usage else self._place_event.num_tokens
        num_cached = details.cached_tokens if details else decision.num_cached_tokens
        fact = self._estimated_prefilled(decision, num_tokens, num_cached, clock.monotonic() - began)
        if self._num_events:  # decode was called at the same time, and answers already
            self._scheduling.post(msgspec.structs.replace(fact, has_begun=True))
        else:
            refused = await self._scheduling.prefilled(fact)
            if refused is not None:
                raise self._refused(refused)
        return found.kv_transfer_params or {}

    async def _decode(
        self, decision: Decision, params: dict[str, Any], headers: Mapping[str, str]
    ) -> AsyncGenerator[bytes, None]:
        tracing.phase("first token" if self.is_stream else "answer", instance=decision.decode)
        body = decode_body(self._body, params)
        has_begun = False
        if not self.is_stream:
            if not self._is_computed:
                self._expect_first_token(decision)
            content = await self._workers.whole(decision.decode, self._path, body, headers)
            yield await self._read(decision, content)
            return
        if self.api.has_named_events:
            named = self._decode_named(decision, body, headers)
            async with contextlib.aclosing(named):
                async for event in named:
                    yield event
            return
        events = self._workers.events(decision.decode, self._path, body, headers)
        async with contextlib.aclosing(events):
            async for event in events:
                self._computed()
                if event == DONE and not has_begun:
                    raise WorkerFailed(decision.decode, "its stream ended before it began")
                is_plain = event == DONE or not any(mark in event for mark in _PARSED_MARKERS)
                yield event if is_plain else await self._read(decision, event)
                has_begun = True

    async def _decode_named(
        self, decision: Decision, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> AsyncGenerator[bytes, None]:
        """Yield whole events; the first piece has all up to the first token."""
        held: list[bytes] | None = []
        has_ended = False
        events = self._workers.named_events(decision.decode, self._path, body, headers, self.api.is_opening)
        try:
            async with contextlib.aclosing(events):
                async for event in events:
                    name = name_of(event)
                    if name in self.api.failures:
                        reason = failure_in(data_of(event)) or "it aborted the answer"
                        raise WorkerFailed(decision.decode, reason)
                    usage = usage_in(data_of(event))
                    if name in self.api.endings:
                        has_ended = True
                        await self._prefill_answered()
                        usage = usage or self.usage
                    self._note_usage(usage)
                    if held is not None and self.api.is_opening(name):
                        held.append(event)
                        continue
                    self._computed()
                    yield b"".join([*(held or ()), event])
                    held = None
        except WorkerFailed:
            if not has_ended:
                raise
        if not has_ended:
            raise WorkerFailed(decision.decode, "its stream ended before the answer did")

    def _note_usage(self, usage: Usage | None) -> None:
        """Note the usage of an API with named events, which is sent in parts. The answer has the engine's."""
        if usage is None:
            return
        details = usage.prompt_tokens_details or self.usage.prompt_tokens_details
        if self._prefill is not None:
            details = self._prefill.prompt_tokens_details
        num_prompt = usage.prompt_tokens or self.usage.prompt_tokens
        num_output = usage.completion_tokens
        self.usage = Usage(num_prompt, num_output, num_prompt + num_output, details)

    def _computed(self) -> None:
        """Note the decoding engine's first event: the prompt is computed."""
        if not self._is_computed:
            # There was no separate prefill: this engine has computed the prompt.
            self._is_computed = True
            self._scheduling.post(Prefilled(self._request_id, has_begun=True))

    async def _prefill_answered(self) -> None:
        """Wait, not long, for the prefill engine's answer, which has the count of cached tokens: where KV is
        pushed, decode may have ended a short answer before it arrives."""
        computing, self._computing = self._computing, None
        if computing is not None:
            await asyncio.wait({computing}, timeout=_PREFILL_ANSWER_S)

    async def _read(self, decision: Decision, content: bytes) -> bytes:
        """An answer or event, with the cached tokens of the prefill engine in its usage.

        Raises:
            WorkerFailed, WorkerBusy, WeightsReplaced: it reports that the answer will not be completed.
            ApiError: it reports that the request is wrong.
        """
        if self.api.has_named_events:
            if reason := failure_in(content):
                raise WorkerFailed(decision.decode, reason)
            await self._prefill_answered()
            self._note_usage(usage_in(content))
            return content
        try:
            event = msgspec.json.decode(content, type=_StreamEvent)
        except msgspec.MsgspecError:
            return content
        if event.failure:
            if event.has_new_weights:
                raise WeightsReplaced(event.failure)
            if (answer := event.answer) is not None:
                raise meaning_of(decision.decode, answer, event.failure)
            raise WorkerFailed(decision.decode, event.failure)
        usage = event.usage
        if usage is None:
            return content
        await self._prefill_answered()
        if self._is_one_answer or not (self.is_stream and event.choices):
            # Beside one choice of several, an engine counts this choice and its prompt only.
            self.usage = usage
        if self._prefill is None:
            return content
        usage.prompt_tokens_details = self._prefill.prompt_tokens_details
        whole = msgspec.json.decode(content)
        whole["usage"]["prompt_tokens_details"] = msgspec.to_builtins(usage.prompt_tokens_details)
        return msgspec.json.encode(whole)

    def _note_time(self) -> None:
        now = clock.monotonic()
        if self.is_stream and not self._num_events:
            tracing.phase("stream")
            self._ttft_s = now - self._began
            ttft_seconds.observe(self._ttft_s, tracing.exemplar())
        elif self.is_stream:
            self._longest_gap_s = max(self._longest_gap_s, now - self._last)
            itl_seconds.observe(now - self._last, tracing.exemplar())
        self._num_events += 1
        self._last = now


async def _cancelled(task: asyncio.Future[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

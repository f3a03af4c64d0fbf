# SPDX-License-Identifier: Apache-2.0
"""Requests to our workers: the OpenAI endpoints, the whole answer, and the calls of each prompt.

The endpoint converts an HTTP request to an ``OwnWorkersAnswer`` and back: the prompts' tokens, their
``Place`` events, and the headers. The answer owns the fan-out (an ``OwnWorkersRequest`` per prompt, a decode
per choice), the deadline, the counts of ``usage`` and the latencies; formats are ``http/answers.py``.

``OwnWorkersRequest`` hides from clients which workers there are and that they fail. The prompt travels as
token ids. An answer is followed token by token; when its decode worker is lost, the tokens generated so far
are appended to the prompt and another worker continues, so that the client sees one uninterrupted answer. An
answer whose worker's weights were replaced is not continued, which would mix two versions: it begins again if
nothing of it was passed on, and ends with that error otherwise. The request to continue an
answer names the digest of the weights that began it, and a worker that has others refuses.
Correctness never depends on the transfer of KV: a decode worker that finds no KV computes it. Calls are
``worker_client.py``.

An answer whose decode instance drains, or for which an operator orders it, moves to another one
(``moves.py``), which gets the KV from the old one. Should that fail before its next token, the old instance,
which has not failed, goes on with the answer. A prompt is moved by having the instance load its KV: that is a
prefill there of which nothing follows.

Where the conductor chooses a push, prefill and decode get the prompt at the same time, and decode's first
piece waits for the KV that prefill sends to it. When prefill fails before that, decode's call is closed and
the prompt placed again, without a push.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from array import array
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from fastapi import Request, Response

from mooncake import clock, tracing
from mooncake.conductor.client import ConductorClient
from mooncake.conductor.messages import Decision, Failed, Finished, Place, Prefilled
from mooncake.errors import MooncakeError
from mooncake.gateway.cache_misses import origin_of
from mooncake.gateway.clients import Client
from mooncake.gateway.gateway import Gateway
from mooncake.gateway.limiter import Permit
from mooncake.gateway.metrics import Slo, Timing, record_answer
from mooncake.gateway.moves import AnswerMoves, MovedPrompt, Moves, outcome_of
from mooncake.gateway.request_ids import RequestIds
from mooncake.gateway.request_parsing import (
    affinity_of,
    names_of,
    priority_of,
    rank_of,
    request_id_of,
    session_of,
    slo_of,
)
from mooncake.gateway.retries import AnswerConcurrency, Attempts, PlacedRequest, Route, as_error
from mooncake.gateway.worker_client import WeightsReplaced, WorkerBusy, WorkerClient, WorkerFailed
from mooncake.http.answers import AnswerPiece, ChatWriter, CompletionWriter, bound_logprobs
from mooncake.http.api_requests import tokenize
from mooncake.http.latency import itl_seconds, mean_of_longest, ttft_seconds
from mooncake.http.openai import (
    STREAM_END,
    AnyRequest,
    ApiError,
    ChatCompletionRequest,
    CompletionRequest,
    Usage,
    model_not_found,
    to_json,
)
from mooncake.http.sse import EventStreamResponse, cancel_on_disconnect
from mooncake.http.worker_stats import PromptStats, ResumedStats
from mooncake.log import get_logger
from mooncake.prefix import BlockHash, BlockKey, block_hashes, root_hash, short_key
from mooncake.types import InstanceId

log = get_logger(__name__)


async def serve_own_workers(gateway: Gateway, http: Request, request: AnyRequest) -> Response:
    """Answer a request, whole or streamed. Raises ApiError."""
    settings = gateway.settings
    if request.model is not None and request.model != settings.model_name:
        raise model_not_found(request.model, settings.model_name)
    slo = slo_of(http)
    rank_of(http)  # our workers have no ranks, but what engines would refuse is refused here
    num_prompts = len(request.prompts) if isinstance(request, CompletionRequest) else 1
    num_answers = num_prompts * request.n
    client: Client | None = http.state.client
    entry = Permit(gateway.limiter, client, num_answers, clock.monotonic())

    def leave() -> None:
        entry.leave(clock.monotonic())

    if client is not None:
        request.cache_salt = client.entry.cache_salt
    try:
        max_model_len = await gateway.context_length()
        assert gateway.tokenizer is not None, "without a tokenizer requests are proxied"
        tracing.phase("tokenize")
        tracing.note(gen_ai__request__model=settings.model_name, gen_ai__request__stream=bool(request.stream))
        prompts = await tokenize(gateway.tokenizer, request, max_model_len)
        bound_logprobs(request, (max_model_len - len(prompt) for prompt in prompts))
        tracing.phase("hash blocks", prompts=len(prompts))
        answer = _answer(gateway, http, request, prompts, max_model_len, slo)
        if not request.stream:
            body = to_json(await cancel_on_disconnect(http, answer.whole()))
            leave()
            return Response(body, 200, {**names_of(http), **answer.headers()}, media_type="application/json")
        # The first event is awaited here, so that a refusal still has a status of its own.
        events = answer.stream()
        first = await cancel_on_disconnect(http, anext(events))
    except BaseException:
        leave()
        raise
    return EventStreamResponse(first, events, {**names_of(http), **answer.headers()}, leave, answer.deadline)


def _answer(
    gateway: Gateway,
    http: Request,
    request: AnyRequest,
    prompts: list[list[int]],
    max_model_len: int,
    slo: Slo,
) -> OwnWorkersAnswer:
    settings = gateway.settings
    prefix = "chatcmpl" if isinstance(request, ChatCompletionRequest) else "cmpl"
    answer_id = f"{prefix}-{uuid.uuid4().hex}"
    passed_on = {"X-Request-ID": request_id_of(http)}
    for name in ("traceparent", "tracestate"):
        if name in http.headers:
            passed_on[name] = http.headers[name]
    in_body = {"session_id": request.session_id, "prompt_cache_key": request.prompt_cache_key}
    session = session_of(http, in_body, settings.session_header)
    priority = priority_of(http) if request.priority is None else request.priority

    columns = [array("I", prompt) for prompt in prompts]

    def place_of(number: int, prompt: array[int]) -> Place:
        keys, bare_keys, tails[number] = _keys_of(prompt, request.cache_salt or "", settings.block_tokens)
        return Place(
            answer_id if len(prompts) == 1 else f"{answer_id}/p{number}",
            len(prompt),
            keys,
            affinity_of(http, session),
            lifetime_s=settings.request_timeout_s + 60.0,
            slo_ttft_s=(slo.ttft_ms or 0.0) / 1000.0,
            slo_tbt_s=(slo.tbt_ms or 0.0) / 1000.0,
            priority=priority or 0,
            max_output_tokens=request.output_limit or 0,
            bare_keys=bare_keys,
        )

    tails: dict[int, BlockHash] = {}
    places = [place_of(number, prompt) for number, prompt in enumerate(columns)]
    request_id = request_id_of(http)
    is_secret = request_id != http.headers.get("x-request-id")
    name = http.state.client.name if http.state.client is not None else ""
    place_ids = [place.request_id for place in places]
    gateway.request_ids.note(
        RequestIds(answer_id, request_id, is_secret, place_ids, name, affinity_of(http, session))
    )
    http.state.answer_id = answer_id
    concurrency = AnswerConcurrency(max(1, MAX_TOKENS_AT_ONCE // max(map(len, prompts))))
    worker_requests = [
        OwnWorkersRequest(
            gateway.scheduling,
            gateway.workers,
            gateway.moves,
            place=place,
            prompt=prompt,
            headers=passed_on,
            block_tokens=settings.block_tokens,
            concurrency=concurrency,
        )
        for place, prompt in zip(places, prompts, strict=True)
    ]
    for number, one in enumerate(worker_requests):
        gateway.recorder.watch(one, http, tails[number])
    origin = origin_of(http, request.cache_salt, settings.model_name)
    for one, place, column in zip(worker_requests, places, columns, strict=True):
        if (observed := gateway.misses.tokens_arrived(place, origin, column)) is not None:
            one.end_listeners.append(observed.request_ended)
    return OwnWorkersAnswer(
        request,
        worker_requests,
        answer_id=answer_id,
        model=settings.model_name,
        max_model_len=max_model_len,
        deadline=clock.monotonic() + settings.request_timeout_s,
        slo=slo,
        concurrency=concurrency,
        client=http.state.client,
    )


def _keys_of(
    prompt: Sequence[int], salt: str, block_tokens: int
) -> tuple[list[BlockKey], list[BlockKey], BlockHash]:
    """Keys of a prompt's full blocks; of the same without a salt, where it has one; the last one's hash."""
    bare = block_hashes(prompt, block_tokens, root_hash()) if salt else []
    hashes = block_hashes(prompt, block_tokens, root_hash(salt))
    tail = hashes[-1] if hashes else root_hash(salt)
    return [short_key(one) for one in hashes], [short_key(one) for one in bare], tail


async def prompt_to_move(gateway: Gateway, http: Request, request: AnyRequest) -> OwnWorkersRequest:
    """The prompt of ``request``, for ``move_to`` and then ``end``. Raises ApiError, 400 or 503."""
    settings = gateway.settings
    max_model_len = await gateway.context_length()
    assert gateway.tokenizer is not None, "without a tokenizer requests are proxied"
    prompts = await tokenize(gateway.tokenizer, request, max_model_len)
    if len(prompts) != 1:
        message = f"prompt has {len(prompts)} prompts; allowed: one"
        raise ApiError(400, message, param="prompt", code="invalid_value")
    [prompt] = prompts
    keys, bare_keys, _ = _keys_of(prompt, request.cache_salt or "", settings.block_tokens)
    return OwnWorkersRequest(
        gateway.scheduling,
        gateway.workers,
        gateway.moves,
        place=Place(
            f"kvmove-{uuid.uuid4().hex}",
            len(prompt),
            keys,
            lifetime_s=settings.request_timeout_s + 60.0,
            bare_keys=bare_keys,
        ),
        prompt=prompt,
        headers={"X-Request-ID": request_id_of(http)},
        block_tokens=settings.block_tokens,
    )


# --- one HTTP answer


MAX_UNREAD_PIECES = 256
"""Most pieces of an answer that are buffered for a client that does not read them."""

MAX_TOKENS_AT_ONCE = 8 << 20
"""Tokens of prompts in calls that one answer makes at a time; a single call may have a longer one."""

_FORWARDED_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "min_tokens",
    "cache_salt",
)
"""Fields that workers need. Each choice's call repeats them, so that the size of each is bounded."""


class OwnWorkersAnswer:
    """The answer to ``request``. Use ``whole`` or ``stream``, once."""

    def __init__(
        self,
        request: AnyRequest,
        worker_requests: Sequence[OwnWorkersRequest],
        *,
        answer_id: str,
        model: str,
        max_model_len: int,
        deadline: float,
        slo: Slo,
        concurrency: AnswerConcurrency,
        client: Client | None = None,
    ) -> None:
        """``concurrency``: that of ``worker_requests``."""
        self._request = request
        self._answer_id = answer_id
        self._worker_requests = worker_requests
        self._choices = [AnswerChoice(index) for index in range(len(worker_requests) * request.n)]
        self._concurrency = concurrency
        self._max_model_len = max_model_len
        self.deadline = deadline
        self._slo = slo
        self._client = client
        self._began = clock.monotonic()
        self._num_output_tokens = 0
        """Output tokens in the pieces yielded so far; workers may be ahead."""
        self._longest_gap_s = 0.0
        self._gaps_s: list[list[float]] = [[] for _ in worker_requests]
        """By prompt: the times between two pieces of its answers."""
        self._ttfts_s = [0.0] * len(worker_requests)
        self._ttft_s: float | None = None
        writer = ChatWriter if isinstance(request, ChatCompletionRequest) else CompletionWriter
        self._writer = writer(answer_id, int(clock.wall()), model, request.return_token_ids)

    def headers(self) -> dict[str, str]:
        """Headers with the instances of the (first) prompt, as far as they are known now."""
        return self._worker_requests[0].route.headers()

    async def whole(self) -> msgspec.Struct:
        """The body of an answer that is not streamed. Raises ApiError."""
        joined = [self._writer.joined(choice.index) for choice in self._choices]
        merged = self._merged()
        async with contextlib.aclosing(merged):
            async for piece in merged:
                joined[piece.index].add(piece)
        return self._writer.whole([one.whole() for one in joined], self._usage())

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Yield server-sent events. The first comes with the first token. Raises ApiError at any time."""
        opening: bytes | None = self._writer.opening(len(self._choices))
        options = self._request.stream_options
        merged = self._merged()
        async with contextlib.aclosing(merged):
            async for piece in merged:
                if not (piece.text or piece.token_ids or piece.finish_reason):
                    continue
                if opening:
                    yield opening
                opening = None
                with_usage = options is not None and options.continuous_usage_stats
                yield self._writer.chunk(piece, self._usage() if with_usage else None)
        if self._request.include_usage:
            yield self._writer.usage_chunk(self._usage())
        yield STREAM_END

    async def _merged(self) -> AsyncGenerator[AnswerPiece, None]:
        """Yield pieces of all choices in order of arrival. Raises ApiError, 504 after the deadline."""
        # Bounded: while a client reads nothing, nothing more is read from its workers either.
        queue: asyncio.Queue[AnswerPiece | ApiError | None] = asyncio.Queue(MAX_UNREAD_PIECES)
        tasks = [
            asyncio.get_running_loop().create_task(self._serve_prompt(number, worker_request, queue))
            for number, worker_request in enumerate(self._worker_requests)
        ]
        num_open = len(tasks)
        is_complete = False
        try:
            while num_open:
                piece = await self._before_deadline(queue)
                if isinstance(piece, ApiError):
                    raise piece
                if piece is None:
                    num_open -= 1
                else:
                    self._num_output_tokens += len(piece.token_ids)
                    yield piece
            is_complete = True
            self._account()
        finally:
            if not is_complete and self._client is not None:
                self._client.charge(self._num_computed(), clock.monotonic())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _before_deadline(
        self, queue: asyncio.Queue[AnswerPiece | ApiError | None]
    ) -> AnswerPiece | ApiError | None:
        try:
            async with asyncio.timeout(max(0.0, self.deadline - clock.monotonic())):
                return await queue.get()
        except TimeoutError:
            waited_s = clock.monotonic() - self._began
            message = f"no complete answer within {waited_s:.0f} s; ask for fewer tokens or try again later"
            return ApiError(504, message, code="deadline_exceeded")

    async def _serve_prompt(
        self,
        number: int,
        worker_request: OwnWorkersRequest,
        queue: asyncio.Queue[AnswerPiece | ApiError | None],
    ) -> None:
        """Serve one prompt from prefill to the end of its last choice."""
        request = self._request
        if len(self._worker_requests) > 1:
            tracing.split("prompt", number=number)
        first = number * request.n
        is_complete = False
        try:
            await self._concurrency.enter()
            worker_request.turn_at = clock.monotonic()
            await worker_request.prefill(request.cache_salt, may_push=request.n == 1)
            async with asyncio.TaskGroup() as group:
                for choice in self._choices[first : first + request.n]:
                    group.create_task(
                        self._decode(number, worker_request, choice, choice.index - first, queue)
                    )
            is_complete = True
            await queue.put(None)
        except* ApiError as errors:
            await queue.put(self._in_client_terms(_first(errors)))
        except* Exception as errors:
            log.exception("answer_failed", error=repr(errors.exceptions[0]))
            message = "the gateway failed while answering; its log has the traceback"
            await queue.put(ApiError(500, message, code="internal_error"))
        finally:
            try:
                await worker_request.close()
            finally:  # also when cancelled there, or the conductor counts the request until it expires
                tokens = max((one.token_ids for one in self._choices[first : first + request.n]), key=len)
                worker_request.end(self._finished(number, tokens, is_complete), tokens)
                if request.n == 1:
                    self._concurrency.leave()

    async def _decode(
        self,
        number: int,
        worker_request: OwnWorkersRequest,
        choice: AnswerChoice,
        seed_offset: int,
        queue: asyncio.Queue[AnswerPiece | ApiError | None],
    ) -> None:
        last: float | None = None
        if self._request.n > 1:
            tracing.split("choice", index=choice.index)
        turn_at = worker_request.turn_at
        if seed_offset > 0:  # the first follows its prompt
            await self._concurrency.enter()
            turn_at = clock.monotonic()
        pieces = worker_request.decode(choice, self._sampling(seed_offset), self._max_tokens(worker_request))
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                now = clock.monotonic()
                tracing.phase("stream")
                if last is None:
                    ttft_seconds.observe(now - self._began, tracing.exemplar())
                    self._ttft_s = max(self._ttft_s or 0.0, now - self._began)
                    self._ttfts_s[number] = max(self._ttfts_s[number], now - turn_at)
                else:
                    self._gaps_s[number].append(now - last)
                    itl_seconds.observe(now - last, tracing.exemplar())
                    self._longest_gap_s = max(self._longest_gap_s, now - last)
                last = now
                await queue.put(piece)
        if self._request.n > 1:
            # Further prompts and choices may wait for its place.
            place_id = worker_request.place_id_of(choice)
            finished = Finished(place_id) if seed_offset else self._finished(number, choice.token_ids, True)
            worker_request.release(finished)
            self._concurrency.leave()

    def _finished(self, number: int, token_ids: Sequence[int], is_complete: bool) -> Finished:
        """The report that a prompt has ended, with its longest answer and the measurements until now."""
        tbt_s, ttft_s = mean_of_longest(self._gaps_s[number]), self._ttfts_s[number]
        place_id = self._worker_requests[number].place_id
        return Finished(place_id, len(token_ids), ttft_s, tbt_s, is_complete)

    def _in_client_terms(self, error: ApiError) -> ApiError:
        """Convert a worker's error about token ids to one about the field that the client sent."""
        if error.detail.param == "prompt" and isinstance(self._request, ChatCompletionRequest):
            error.detail.param = "messages"
        return error

    def _max_tokens(self, worker_request: OwnWorkersRequest) -> int:
        room = self._max_model_len - len(worker_request.prompt)
        limit = self._request.output_limit
        return room if limit is None else min(limit, room)

    def _sampling(self, seed_offset: int) -> Mapping[str, Any]:
        """The sampling fields of a worker's request for one choice."""
        request = self._request
        given = request.model_dump(include={*_FORWARDED_FIELDS}, exclude_unset=True, exclude_none=True)
        if request.seed is not None:
            # The seed is a 64-bit number and wraps.
            given["seed"] = (request.seed + seed_offset + 2**63) % 2**64 - 2**63
        if isinstance(request, CompletionRequest):
            if request.logprobs is not None:
                given["logprobs"] = request.logprobs
        elif request.logprobs:
            given["logprobs"] = request.top_logprobs or 0
        return given

    def _usage(self) -> Usage:
        return Usage.of(
            sum(len(worker_request.prompt) for worker_request in self._worker_requests),
            self._num_output_tokens,
            sum(worker_request.num_cached_tokens for worker_request in self._worker_requests),
        )

    def _num_computed(self) -> int:
        """Tokens that were computed so far: prompts, from their prefill or first token on, and output."""
        num_tokens, n = 0, self._request.n
        for number, worker_request in enumerate(self._worker_requests):
            num_output = sum(len(one.token_ids) for one in self._choices[number * n : (number + 1) * n])
            if num_output or worker_request.is_computed:
                num_tokens += len(worker_request.prompt) + num_output
        return num_tokens

    def _account(self) -> None:
        timing = Timing(self._ttft_s or 0.0, self._longest_gap_s, clock.monotonic() - self._began)
        record_answer(
            self._answer_id, self._worker_requests[0].route, self._usage(), timing, self._slo, self._client
        )


def _first(errors: BaseExceptionGroup[ApiError]) -> ApiError:
    """The first error in a group of groups."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, ApiError)
    return error


# --- one prompt


RESUME_TIMEOUT_S = 30.0
"""How long an answer that has begun waits for another worker: long, as its client has part of it."""


@dataclass
class AnswerChoice:
    """One choice of an answer, as far as it was generated."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    num_chars: int = 0
    weights: str = ""
    """Digest of the weights that computed ``token_ids``; empty if the worker did not report it."""
    resumed: ResumedStats | None = None
    """Where the worker that continues it has found the KV, if it has reported that."""
    is_finished: bool = False


class AnswerLeft(Exception):
    """A worker has ended its stream, so that another one continues the answer."""


class PromptNotComputed(Exception):
    """The prefill that should push a prompt's KV has failed, and the prompt is to be placed again."""


class OwnWorkersRequest(PlacedRequest):
    """One prompt: ``prefill`` once, then ``decode`` once per choice, then ``close`` and ``end``."""

    def __init__(
        self,
        scheduling: ConductorClient,
        workers: WorkerClient,
        moves: Moves,
        *,
        place: Place,
        prompt: list[int],
        headers: Mapping[str, str],
        block_tokens: int,
        concurrency: AnswerConcurrency | None = None,
    ) -> None:
        """``place``: the event that places the prompt. ``concurrency``: that of its whole answer."""
        super().__init__(scheduling, place)
        self._concurrency = concurrency or AnswerConcurrency()
        self.turn_at = self.arrived_at
        """When it no longer waited for other prompts of the answer."""
        self.prompt = self.prompt_tokens = prompt
        self._workers = workers
        self._moves = moves
        self._block_tokens = block_tokens
        self._headers = headers
        self._transfer: dict[str, Any] = {}
        self._is_prefilled = False
        self._is_computed = False
        self._decision: Decision | None = None
        self._cache_salt: str | None = None
        self._attempts = Attempts()
        self._computing: asyncio.Task[bool] | None = None
        """The call of a prefill that pushes, until its result was used."""
        self._has_begun = False
        """Whether a piece of the answer has arrived."""

    @property
    def is_computed(self) -> bool:
        """Whether an instance has reported that the prompt is computed."""
        return self._is_computed

    async def prefill(self, cache_salt: str | None, may_push: bool = False) -> None:
        """Place the prompt and have its KV computed; with a push it is still computed when this returns.

        Raises:
            ApiError: the request was refused, or no instance can serve it.
        """
        self._cache_salt = cache_salt
        while True:
            decision = await self._place_in_turn(self._request_id, self._attempts, True, 0.0)
            self._decision = decision
            self.route = Route(decision.prefill, decision.decode, decision.degraded)
            if decision.prefill is None:
                return
            if decision.push_from and may_push:
                # Not to be guessed: who knows it may request the prompt's KV.
                transfer_id = uuid.uuid4().hex
                self.route.is_push = True
                self._transfer = {"transfer_id": transfer_id, "push_from": decision.push_from}
                call = self._compute(decision, transfer_id)
                self._computing = asyncio.get_running_loop().create_task(call)
                return
            tracing.phase("prefill", instance=decision.prefill)
            if await self._compute(decision):
                return

    async def _compute(self, decision: Decision, transfer_id: str = "") -> bool:
        """Have the prompt computed; False if it is to be placed again. Raises as ``prefill``."""
        assert decision.prefill is not None
        body = self._prefill_body(decision)
        if transfer_id:
            body["kv_transfer_params"]["transfer_id"] = transfer_id
        began = clock.monotonic()
        try:
            answer = await self._workers.complete(decision.prefill, body, self._headers)
        except (WorkerFailed, WorkerBusy) as error:
            self._note(error, self._request_id, self._attempts, "prefill")
            return False
        except WeightsReplaced as error:
            self._note_replaced(error, self._attempts, "prefill")
            return False
        self._attempts.found_room()
        transfer = answer.kv_transfer_params or {}
        measured = transfer.pop("measured", None)
        if not transfer_id:
            self._transfer = transfer
        self._is_prefilled = self._is_computed = True
        if answer.usage is not None:
            self._count_cached(answer.usage)
        fact = self._prefilled(measured, decision, clock.monotonic() - began)
        if self._has_begun:
            fact = msgspec.structs.replace(fact, has_begun=True)
        refused = await self._scheduling.prefilled(fact)
        if refused is not None:
            raise self._refused(refused)
        return True

    async def move_to(
        self, target: InstanceId, others: Sequence[InstanceId], cache_salt: str | None
    ) -> MovedPrompt:
        """Have ``target`` load the prompt's KV from the pool, and compute what is not there.

        ``others``: all other instances.

        Raises:
            ApiError: the conductor or the instance has refused it, or the instance has failed.
        """
        self._cache_salt = cache_salt
        began = clock.monotonic()
        try:
            measured = await self._load_at(target, others)
        except ApiError as error:
            # The message of a request that is wrong may repeat parts of the prompt.
            reason = str(error) if error.status >= 500 else f"{error.status} {error.detail.code}"
            self._moves.prompt_refused(self._request_id, target, reason)
            raise
        num_total = len(self.prompt) // self._block_tokens
        num_local = min(num_total, measured.num_local_tokens // self._block_tokens)
        num_loaded = min(num_total - num_local, measured.num_loaded_tokens // self._block_tokens)
        num_kept = measured.num_local_tokens + measured.num_loaded_tokens
        # A prompt that was found whole is computed for one token all the same, to have an output.
        num_computed = len(self.prompt) - min(num_kept, len(self.prompt))
        found = MovedPrompt(
            self._request_id,
            target,
            outcome_of(ResumedStats(measured.num_local_tokens, measured.num_loaded_tokens, num_computed)),
            blocks_total=num_total,
            blocks_local=num_local,
            blocks_loaded=num_loaded,
            blocks_computed=num_total - num_local - num_loaded,
            seconds=round(clock.monotonic() - began, 6),
        )
        self._moves.prompt_moved(found, num_computed, num_kept)
        return found

    async def _load_at(self, target: InstanceId, others: Sequence[InstanceId]) -> PromptStats:
        """Raises ApiError."""
        self._placed_ids[self._request_id] = None
        try:
            placed = await self._scheduling.place(
                msgspec.structs.replace(self._place_event, exclude=list(others))
            )
        except MooncakeError as error:
            raise ApiError(503, str(error), code=error.code, retry_after_s=1.0) from error
        if not isinstance(placed, Decision):
            raise as_error(placed)
        if placed.decode != target:
            message = f"{target} can't be chosen now: {placed.decode} was"
            raise ApiError(409, message, param="to", code="instance_not_ready")
        # Whatever the conductor would have computed: all that can be loaded is.
        body = self._prefill_body(msgspec.structs.replace(placed, fetches=[]))
        try:
            answer = await self._workers.complete(target, body, self._headers)
        except WorkerBusy as error:
            raise error.answer from error
        except WorkerFailed as error:
            self._scheduling.post(Failed(target, error.reason, self._request_id))
            raise ApiError(503, str(error), code=error.code) from error
        try:
            measured = msgspec.convert((answer.kv_transfer_params or {}).get("measured"), PromptStats)
        except msgspec.ValidationError as error:
            message = f"{target} did not report what it has loaded: {error}"
            raise ApiError(503, message, code="worker_failed") from error
        self._scheduling.post(self._reported(measured, has_begun=True))
        return measured

    def _prefill_body(self, decision: Decision) -> dict[str, Any]:
        """A worker's request for the prompt's KV."""
        body: dict[str, Any] = {
            "prompt": self.prompt,
            "max_tokens": 1,
            "temperature": 0.0,
            "stream": False,
            "kv_transfer_params": self._hints(decision),
        }
        if self._cache_salt is not None:
            body["cache_salt"] = self._cache_salt
        return body

    def place_id_of(self, choice: AnswerChoice) -> str:
        """The id by which a choice after the first one is placed."""
        return f"{self._request_id}/{choice.index}"

    async def _place_in_turn(
        self, place_id: str, attempts: Attempts, needs_prefill: bool, timeout_s: float
    ) -> Decision:
        """Do as ``_place``, but wait for room while others of the answer are in progress, or were."""
        while True:
            try:
                return await self._place(place_id, attempts, needs_prefill, timeout_s)
            except ApiError as error:
                is_full = error.status == 429 or error is attempts.busy
                if not is_full or not await self._concurrency.wait_for_room(attempts):
                    raise
            attempts.busy, self.refusal = None, ""
            attempts.exclude.clear()
            if needs_prefill:
                self.turn_at = clock.monotonic()

    async def close(self) -> None:
        """Stop a prefill that is still under way; to be called when the answer has ended, well or not."""
        if self._computing is not None:
            computing, self._computing = self._computing, None
            computing.cancel()
            await asyncio.gather(computing, return_exceptions=True)

    async def decode(
        self, choice: AnswerChoice, sampling: Mapping[str, Any], max_tokens: int
    ) -> AsyncGenerator[AnswerPiece, None]:
        """Yield the pieces of one choice; the last has a ``finish_reason``. Raises as ``prefill``."""
        decision, self._decision = self._decision, None
        place_id = self._request_id if decision is not None else self.place_id_of(choice)
        attempts = Attempts()
        with AnswerMoves(self._moves, self._place_event, self._headers, choice.index) as moves:
            following = self._decode(choice, sampling, max_tokens, decision, place_id, attempts, moves)
            async with contextlib.aclosing(following):
                async for piece in following:
                    yield piece

    async def _decode(
        self,
        choice: AnswerChoice,
        sampling: Mapping[str, Any],
        max_tokens: int,
        decision: Decision | None,
        place_id: str,
        attempts: Attempts,
        moves: AnswerMoves,
    ) -> AsyncGenerator[AnswerPiece, None]:
        while not choice.is_finished:
            if decision is None:
                timeout_s = RESUME_TIMEOUT_S if choice.token_ids else 0.0
                decision = await self._place_in_turn(place_id, attempts, False, timeout_s)
                self.route.decode = decision.decode
                self.route.degraded = self.route.degraded or decision.degraded
            if len(choice.token_ids) >= max_tokens:
                # The worker was lost between its last token and its finish reason.
                choice.is_finished = True
                yield AnswerPiece(choice.index, finish_reason="length")
                return
            tracing.phase("resume" if choice.token_ids else "first token", instance=decision.decode)
            pieces = self._follow(decision.decode, choice, sampling, max_tokens, moves.params())
            if self._computing is not None:
                pieces = self._while_computed(pieces, self._computing)
            try:
                async with contextlib.aclosing(pieces):
                    async for piece in pieces:
                        attempts.found_room()
                        if not choice.is_finished:
                            num_tokens = len(self.prompt) + len(choice.token_ids)
                            moves.advance(place_id, decision, num_tokens, attempts.exclude, choice.resumed)
                        yield piece
            except AnswerLeft:
                await self._await_prefill()
                decision = await moves.leave() or decision
                self.route.decode = decision.decode
                continue
            except PromptNotComputed:
                self._transfer = {}
                await self.prefill(self._cache_salt)
                decision, self._decision = self._decision, None
                place_id = self._request_id
                continue
            except (WorkerFailed, WorkerBusy, WeightsReplaced) as error:
                if not choice.is_finished and (origin := moves.failed(str(error))) is not None:
                    attempts.exclude[decision.decode] = None
                    if isinstance(error, WorkerFailed):
                        self._scheduling.post(Failed(decision.decode, error.reason, place_id))
                    decision, self.route.decode = origin, origin.decode
                    continue
                if not isinstance(error, WeightsReplaced):
                    if not choice.is_finished:
                        await self._await_prefill()
                        self._note(error, place_id, attempts, "resumed" if choice.token_ids else "decode")
                elif choice.token_ids or choice.num_chars:
                    if not choice.is_finished:
                        log.warning("answer_not_continued", instance=decision.decode, reason=str(error))
                        raise
                else:
                    if self.route.is_push:  # its transfer is for one decode worker only
                        await self._await_prefill()
                    self._note_replaced(error, attempts, "decode")
            decision = None

    async def _while_computed(
        self, pieces: AsyncGenerator[AnswerPiece, None], computing: asyncio.Task[bool]
    ) -> AsyncGenerator[AnswerPiece, None]:
        """Yield the pieces of an answer whose prompt's KV is pushed to its worker.

        Raises:
            PromptNotComputed: prefill has failed before the first piece.
            ApiError: the request was refused after its prompt was computed.
        """
        async with contextlib.aclosing(pieces):
            first = asyncio.ensure_future(anext(pieces))
            try:
                await asyncio.wait({first, computing}, return_when=asyncio.FIRST_COMPLETED)
                if not first.done():
                    self._computing = None
                    if not computing.result():
                        raise PromptNotComputed
                yield await first
            finally:
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)
            async for piece in pieces:
                yield piece
            await self._await_prefill()

    async def _await_prefill(self) -> None:
        """Return when a prefill that pushes has ended: from then on its KV comes from the pool.

        What became of it does not matter, as decode has begun, or will look for the KV in the pool.
        """
        self._transfer = {}
        if self._computing is not None:
            computing, self._computing = self._computing, None
            try:
                await asyncio.wait({computing})
            finally:
                computing.cancel()
            if not computing.cancelled() and (error := computing.exception()) is not None:
                log.info("prefill_not_used", request=self._request_id, reason=str(error))

    def _hints(self, decision: Decision) -> dict[str, Any]:
        """Fields for our prefill workers that others don't know."""
        hints: dict[str, Any] = {"do_remote_decode": True}
        if decision.turn > 0:
            hints["turn"] = round(decision.turn * 1000)
        if decision.fetches:
            end = max(fetch.first_block + fetch.num_blocks for fetch in decision.fetches)
            hints["max_load_tokens"] = end * self._block_tokens
        return hints

    def _prefilled(self, measured: Any, decision: Decision, elapsed_s: float) -> Prefilled:
        """The worker's measurements; for one that measures nothing, estimates from here."""
        with contextlib.suppress(msgspec.ValidationError):
            return self._reported(msgspec.convert(measured, PromptStats))
        return self._estimated_prefilled(decision, len(self.prompt), self.num_cached_tokens, elapsed_s)

    def _reported(self, found: PromptStats, has_begun: bool = False) -> Prefilled:
        self.prefilled = Prefilled(
            self._request_id,
            found.queued_s,
            found.computed_s,
            found.num_computed_tokens,
            found.num_local_tokens,
            found.loaded_s,
            found.num_loaded_tokens,
            has_begun=has_begun,
            stages=found.stages,
        )
        return self.prefilled

    async def _follow(
        self,
        instance: InstanceId,
        choice: AnswerChoice,
        sampling: Mapping[str, Any],
        max_tokens: int,
        params: Mapping[str, Any],
    ) -> AsyncGenerator[AnswerPiece, None]:
        """Yield pieces from one worker, which continues after the tokens of ``choice``.

        ``params``: further ``kv_transfer_params``. Raises AnswerLeft when the worker hands the answer over.
        """
        transfer = {**self._transfer, **params}
        num_before, choice.resumed = len(choice.token_ids), None
        if choice.token_ids:
            transfer |= {
                "num_output_tokens": len(choice.token_ids),
                "output_text_offset": choice.num_chars,
            }
            if choice.weights:
                transfer["weights"] = choice.weights
        body: dict[str, Any] = {
            **sampling,
            "prompt": self.prompt + choice.token_ids if choice.token_ids else self.prompt,
            "max_tokens": max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        body["kv_transfer_params"] = transfer
        chunks = self._workers.stream(instance, body, self._headers)
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                is_computed_here = self._computing is None and not self._is_prefilled
                if chunk.usage is not None and is_computed_here:
                    self._count_cached(chunk.usage)
                self._has_begun = self._has_begun or bool(chunk.choices)
                if chunk.choices and is_computed_here and not self._is_computed:
                    # There was no prefill instance: this one has computed the prompt.
                    self._is_computed = True
                    self._scheduling.post(Prefilled(self._request_id, has_begun=True))
                reported = chunk.kv_transfer_params or {}
                if isinstance(weights := reported.get("weights"), str):
                    choice.weights = weights
                if "resumed" in reported:
                    with contextlib.suppress(msgspec.ValidationError):
                        choice.resumed = msgspec.convert(reported["resumed"], ResumedStats)
                for part in chunk.choices:
                    if part.finish_reason == "abort":
                        raise WorkerFailed(instance, "it aborted the answer")
                    if part.finish_reason == "moved":
                        # Without a token between them, moves could follow each other without end.
                        if len(choice.token_ids) == num_before:
                            raise WorkerFailed(instance, "it handed the answer over without a token")
                        raise AnswerLeft
                    token_ids = list(part.token_ids or [])
                    choice.token_ids += token_ids
                    choice.num_chars += len(part.text)
                    choice.is_finished = part.finish_reason is not None
                    yield AnswerPiece(
                        choice.index,
                        part.text,
                        token_ids,
                        part.logprobs,
                        part.finish_reason,
                        part.stop_reason,
                    )
        if not choice.is_finished:
            raise WorkerFailed(instance, "its stream ended before the answer did")

    def _count_cached(self, usage: Usage) -> None:
        if usage.prompt_tokens_details is not None:
            self.num_cached_tokens = usage.prompt_tokens_details.cached_tokens

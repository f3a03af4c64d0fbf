# SPDX-License-Identifier: Apache-2.0
"""A worker's HTTP API: the OpenAI API with ``kv_transfer_params``, health, metrics, event sources.

Owns what a request means for the engine (prompt to token ids, parameters, the hand-over between
workers) and how its end looks to the client. A client that disconnects aborts its request.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Annotated, Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from msgspec import Meta
from prometheus_client import Counter, Gauge
from starlette.exceptions import HTTPException

import mooncake
from mooncake import clock, metrics, tracing
from mooncake.connectors.kv_link import PushSource
from mooncake.errors import InvalidArgument, MooncakeError
from mooncake.http import large_json
from mooncake.http.answers import AnswerPiece, ChatWriter, CompletionWriter, bound_logprobs
from mooncake.http.api_requests import not_served, read_body, tokenize
from mooncake.http.latency import e2e_seconds, itl_seconds, ttft_seconds
from mooncake.http.openai import (
    SHOWN_CHARS,
    STREAM_END,
    WEIGHTS_REPLACED,
    AnyRequest,
    ApiError,
    ChatCompletionRequest,
    CompletionRequest,
    KvEventSource,
    KvEventSources,
    ModelCard,
    ModelList,
    RequestT,
    Usage,
    check_content_type,
    internal_error,
    model_not_found,
    parse_request,
    to_json,
)
from mooncake.http.sse import unnamed_error
from mooncake.http.worker_stats import KvMemoryStats
from mooncake.inference.engine import EngineStats
from mooncake.inference.generator import GenerationFailed, GenerationRefused, Generator, TokenCounts
from mooncake.inference.request import AnswerWeights, SamplingParams
from mooncake.inference.request import Request as EngineRequest
from mooncake.inference.request_spans import trace_requests
from mooncake.log import get_logger
from mooncake.rpc.client import split_address
from mooncake.types import WorkerRole

log = get_logger(__name__)

MAX_BODY_BYTES = 32 << 20
"""A prompt of a million tokens as numbers has 8 MiB, and a request may carry several."""

MAX_SEQUENCES = 4096
"""Most answers, of all prompts and choices together, that one request may ask for."""

MAX_DIGEST_CHARS = 256
"""Longest name of weights that a request may carry."""

MAX_UNREAD_PIECES = 256
"""Limit of an answer's pieces that wait for a client which does not read them."""

MAX_TRANSFER_ID_CHARS = 200

MAX_MOVE_BODY_BYTES = 4096

queries = Counter(
    "vllm:prefix_cache_queries",
    "Prompt tokens looked up in this worker's KV cache.",
    registry=metrics.registry,
)
hits = Counter(
    "vllm:prefix_cache_hits", "Prompt tokens found in this worker's KV cache.", registry=metrics.registry
)
external_queries = Counter(
    "vllm:external_prefix_cache_queries", "Prompt tokens looked up in the pool.", registry=metrics.registry
)
external_hits = Counter(
    "vllm:external_prefix_cache_hits",
    "Prompt tokens from the pool or another worker.",
    registry=metrics.registry,
)
requests_total = Counter(
    "mooncake_inference_requests",
    "Sequences (each choice of each prompt) by the end of their answer: finished, refused, failed or aborted "
    "because the client left.",
    ["end"],
    registry=metrics.registry,
)


class MoveRequest(msgspec.Struct):
    """The body of ``/v1/kv/hand_over``."""

    move_id: Annotated[str, Meta(min_length=1, max_length=MAX_TRANSFER_ID_CHARS)]
    "The ``move_id`` in the ``kv_transfer_params`` of the request whose answer is to move."
    transfer_id: Annotated[str, Meta(min_length=1, max_length=MAX_TRANSFER_ID_CHARS)]
    "The name under which the worker that continues the answer requests its KV."


@dataclasses.dataclass
class Api:
    """What the endpoints need of the worker."""

    generator: Generator
    model: str
    role: WorkerRole
    events: KvEventSource
    kv_identity: str = ""
    push_port: int = 0
    """Port at which other workers request KV of this one; 0: nothing is pushed from or to this worker."""
    echoes_transfers: bool = False
    """Whether an answer repeats the ``kv_transfer_params`` of its request."""
    add_routes: Callable[[FastAPI], None] | None = None
    """Adds endpoints that this kind of worker has besides."""
    movable: dict[str, str] = dataclasses.field(default_factory=dict)
    """Ids of the engine's requests by the ``move_id`` of their streams, while these last."""
    mean_answer_s: float = 1.0
    """Running mean of the duration of recent answers, from the tokens of their prompts on."""

    def __post_init__(self) -> None:
        self.created = int(clock.wall())
        _watch(self.generator)

    @property
    def next_place_s(self) -> float:
        """Expected time until a place in the queue is free: until the first running request ends."""
        return self.mean_answer_s / max(1, self.generator.engine.scheduler.num_running)

    @property
    def max_model_len(self) -> int:
        return self.generator.engine.scheduler.max_total_tokens


def create_app(api: Api) -> FastAPI:
    """The worker's ASGI application."""
    app = FastAPI(title="Mooncake worker", version=mooncake.__version__, docs_url=None, redoc_url=None)

    @app.exception_handler(MooncakeError)
    async def _refused(request: Request, error: MooncakeError) -> Response:
        shown = _as_api_error(error)
        if shown.status == 429:
            shown.retry_after_s = api.next_place_s
        return _json(shown.body(), shown.status, shown.headers())

    @app.exception_handler(HTTPException)
    async def _not_served(request: Request, error: HTTPException) -> Response:
        return _json(not_served(request, error).body(), error.status_code, dict(error.headers or {}))

    @app.exception_handler(Exception)
    async def _broken(request: Request, error: Exception) -> Response:
        return _json(internal_error("worker").body(), 500)  # Starlette logs the traceback after this

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        """Complete one or more prompts; the gateway's requests carry which part this worker computes."""
        return await _answer(api, request, CompletionRequest)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        """Answer a chat; the gateway's requests carry which part of it this worker computes."""
        return await _answer(api, request, ChatCompletionRequest)

    @app.post("/v1/kv/hand_over")
    async def hand_over(request: Request) -> Response:
        """End a stream at its next token, for another worker that continues it and gets its KV from here."""
        return _json(_hand_over(api, await _body(request, MAX_MOVE_BODY_BYTES)))

    @app.get("/v1/models")
    async def models() -> Response:
        """Describe the model that is loaded."""
        card = ModelCard(id=api.model, created=api.created, root=api.model, max_model_len=api.max_model_len)
        return _json(to_json(ModelList([card])))

    @app.get("/kv_event_sources")
    async def kv_event_sources() -> Response:
        """The ports at which this worker publishes its KV events, and the identity of its KV cache."""
        block_tokens = api.generator.engine.runner.layout.block_tokens
        return _json(to_json(KvEventSources([api.events], block_tokens, api.kv_identity)))

    @app.head("/health", include_in_schema=False)
    @app.head("/ready", include_in_schema=False)
    @app.get("/health")
    @app.get("/ready")
    async def health() -> dict[str, Any]:
        """The role, the load and the latest measured steps."""
        engine = api.generator.engine
        steps, stats = msgspec.structs.asdict(engine.step_log.read()), engine.stats()
        memory = msgspec.structs.asdict(_kv_memory(stats, engine.runner.layout.block_tokens))
        reports = {"measured": steps, "push_port": api.push_port, "kv_memory": memory}
        return {"status": "ok", "role": api.role, **dataclasses.asdict(stats), **reports}

    @app.get("/v1/spans/{parent_id}")
    async def spans(parent_id: str) -> Response:
        """The spans of the requests that a gateway has sent with this span of its own."""
        return _json(msgspec.json.encode(tracing.process_tracing().ring.below(parent_id)))

    @app.get("/version")
    async def version() -> dict[str, str]:
        """Version of the program."""
        return {"version": mooncake.__version__}

    @app.get("/metrics")
    async def metrics_page(request: Request) -> Response:
        """Metrics in the text format of Prometheus, or in that of OpenMetrics with exemplars."""
        body, headers = metrics.page_for(request.headers)
        return Response(body, headers=headers)

    if api.add_routes is not None:
        api.add_routes(app)
    return app


def _kv_memory(stats: EngineStats, block_tokens: int) -> KvMemoryStats:
    num_used = stats.num_blocks - stats.num_free_blocks
    return KvMemoryStats(
        stats.num_blocks * block_tokens,
        num_used * block_tokens,
        stats.num_running,
        stats.num_context_tokens,
    )


def _hand_over(api: Api, body: bytes) -> bytes:
    """Begin to hand an answer over. Raises ApiError: 400, or 404 for one that is not streamed here now."""
    try:
        move = large_json.decode_as(body, MoveRequest)
    except msgspec.MsgspecError as error:
        raise ApiError(400, str(error), code="invalid_value") from error
    request_id = api.movable.pop(move.move_id, None)
    if request_id is None:
        message = "no answer with this move_id is streamed here now"
        raise ApiError(404, message, param="move_id", code="request_not_found")
    api.generator.engine.hand_over(request_id, move.transfer_id)
    log.info("answer_leaves", request=request_id, transfer=move.transfer_id)
    return msgspec.json.encode({"status": "leaving", "push_port": api.push_port})


async def _answer(api: Api, http: Request, shape: type[RequestT]) -> Response:
    began = clock.monotonic()
    api_request = await _parsed(shape, http)
    if api_request.model is not None and api_request.model != api.model:
        raise model_not_found(api_request.model, api.model)
    num_prompts = len(api_request.prompts) if isinstance(api_request, CompletionRequest) else 1
    if (num_sequences := num_prompts * api_request.n) > MAX_SEQUENCES:
        message = f"the request asks for {num_sequences} answers; allowed: at most {MAX_SEQUENCES}"
        raise ApiError(400, message, param="prompt" if num_prompts > 1 else "n", code="invalid_value")
    prompts = await tokenize(api.generator.tokenizer, api_request, api.max_model_len)
    bound_logprobs(api_request, (api.max_model_len - len(prompt) for prompt in prompts))
    answer_id = http.headers.get("x-request-id") or uuid.uuid4().hex
    prefix = "chatcmpl" if isinstance(api_request, ChatCompletionRequest) else "cmpl"
    # One for all: those that wait for their turn must not be computed by weights that came meanwhile.
    weights = AnswerWeights(_weights_of(api_request))
    requests = [
        _engine_request(
            api, api_request, prompt, f"{answer_id}-{uuid.uuid4().hex[:8]}-{number}-{choice}", choice, weights
        )
        for number, prompt in enumerate(prompts)
        for choice in range(api_request.n)
    ]
    if (scope := tracing.current()) is not None:
        trace_requests(scope, _name_of(api_request), requests, api.generator.engine.runner.layout)
    answer = _Answer(api, api_request, requests, f"{prefix}-{answer_id}", began)
    if not api_request.stream:
        return _json(to_json(await _unless_disconnected(http, answer.whole())))
    # The first piece is awaited here, so that a refusal still has a status of its own.
    stream = answer.stream()
    first = await _unless_disconnected(http, anext(stream))
    return StreamingResponse(_rest(first, stream), media_type="text/event-stream")


async def _rest(first: bytes, stream: AsyncGenerator[bytes, None]) -> AsyncIterator[bytes]:
    async with contextlib.aclosing(stream):
        yield first
        async for event in stream:
            yield event


class _Answer:
    """One HTTP answer: one or more sequences, written whole or as a stream."""

    def __init__(
        self,
        api: Api,
        api_request: AnyRequest,
        requests: Sequence[EngineRequest],
        answer_id: str,
        began: float,
    ) -> None:
        """``began``: when the HTTP request arrived, before it was parsed and its prompts tokenized."""
        self._api = api
        self._api_request = api_request
        self._requests = requests
        self._counts = [TokenCounts() for _ in requests]
        # The rest waits here and leaves the engine's queue, which is bounded, to other answers.
        self._at_once = asyncio.Semaphore(api.generator.engine.scheduler.settings.max_running)
        writer = ChatWriter if isinstance(api_request, ChatCompletionRequest) else CompletionWriter
        self._writer = writer(answer_id, int(clock.wall()), api.model, api_request.return_token_ids)
        self._began, self._tokenized = began, clock.monotonic()
        self._end = "aborted"
        """How the answer ends: so, unless something else has happened before the client leaves."""
        self._text_offset = _transfer_count(api_request, "output_text_offset")
        self._is_prefill = _is_prefill(api_request)
        self._move_id = _text_of(api_request, "move_id", MAX_TRANSFER_ID_CHARS)

    async def whole(self) -> Any:
        joined = [self._writer.joined(index) for index in range(len(self._requests))]

        async def collect(index: int) -> None:
            async for piece in self._pieces(index):
                joined[index].add(piece)

        try:
            async with asyncio.TaskGroup() as group:
                for index in range(len(self._requests)):
                    group.create_task(collect(index))
            self._account()
            choices = [one.whole() for one in joined]
            return self._writer.whole(choices, self._usage(), self._hand_over())
        except ExceptionGroup as errors:
            raise self._failed(errors.exceptions[0]) from errors
        finally:
            requests_total.labels(self._end).inc(len(self._requests))

    async def stream(self) -> AsyncGenerator[bytes, None]:
        merged: asyncio.Queue[AnswerPiece | BaseException | None] = asyncio.Queue(MAX_UNREAD_PIECES)

        async def feed(index: int) -> None:
            try:
                async for piece in self._pieces(index):
                    await merged.put(piece)
                await merged.put(None)
            except Exception as error:
                await merged.put(error)

        feeds = [asyncio.create_task(feed(index)) for index in range(len(self._requests))]
        movable, move_id = self._api.movable, self._move_id
        if move_id and len(self._requests) == 1:
            movable[move_id] = self._requests[0].id
        try:
            opening: bytes | None = self._writer.opening(len(feeds))
            num_open = len(feeds)
            while num_open:
                news = await merged.get()
                if isinstance(news, BaseException):
                    error = self._failed(news)
                    if opening is not None:
                        raise error
                    yield unnamed_error(error)
                    return
                if opening:
                    yield opening
                opening = None
                if news is None:
                    num_open -= 1
                elif news.text or news.token_ids or news.finish_reason:
                    with_usage = (
                        self._api_request.stream_options
                        and self._api_request.stream_options.continuous_usage_stats
                    )
                    yield self._writer.chunk(news, self._usage() if with_usage else None)
            if self._api_request.include_usage:
                yield self._writer.usage_chunk(self._usage(), self._hand_over())
            self._account()
            yield STREAM_END
        finally:
            requests_total.labels(self._end).inc(len(self._requests))
            if movable.get(move_id) == self._requests[0].id:
                del movable[move_id]
            for task in feeds:
                task.cancel()
            await asyncio.gather(*feeds, return_exceptions=True)

    async def _pieces(self, index: int) -> AsyncIterator[AnswerPiece]:
        last: float | None = None
        pieces = self._api.generator.pieces(
            self._requests[index], self._counts[index], text_offset=self._text_offset, index=index
        )
        async with self._at_once, contextlib.aclosing(pieces):
            async for piece in pieces:
                now = clock.monotonic()
                if last is None:
                    ttft_seconds.observe(now - self._began, tracing.exemplar())
                else:
                    itl_seconds.observe(now - last, tracing.exemplar())
                last = now
                yield piece

    def _usage(self) -> Usage:
        first_of_prompts = self._counts[:: self._api_request.n]
        return Usage.of(
            sum(counts.num_prompt_tokens for counts in first_of_prompts),
            sum(counts.num_output_tokens for counts in self._counts),
            sum(counts.num_cached_tokens for counts in first_of_prompts),
        )

    def _hand_over(self) -> dict[str, Any] | None:
        echoed = (self._api_request.kv_transfer_params or {}) if self._api.echoes_transfers else {}
        if not self._is_prefill:
            return echoed or None
        counts = self._counts[0]
        params: dict[str, Any] = {name: echoed[name] for name in echoed if name != "do_remote_decode"}
        params |= {"do_remote_prefill": True, "num_stored_tokens": counts.num_stored_tokens}
        if counts.measured is not None:
            params["measured"] = msgspec.structs.asdict(counts.measured)
        return params

    def _failed(self, error: BaseException) -> ApiError:
        """The error of an answer that ends with ``error``."""
        shown = _as_api_error(error)
        self._end = "refused" if isinstance(error, GenerationRefused | InvalidArgument) else "failed"
        return shown

    def _account(self) -> None:
        self._end = "finished"
        now = clock.monotonic()
        e2e_seconds.observe(now - self._began, tracing.exemplar())
        # Without the upload and the tokenizing, which take no place in the queue.
        self._api.mean_answer_s += 0.1 * (now - self._tokenized - self._api.mean_answer_s)
        has_pool = self._api.generator.engine.scheduler.settings.has_external_cache
        for counts in self._counts:
            queries.inc(counts.num_prompt_tokens)
            hits.inc(counts.num_local_tokens)
            if has_pool:
                external_queries.inc(counts.num_prompt_tokens - counts.num_local_tokens)
                external_hits.inc(counts.num_cached_tokens - counts.num_local_tokens)


def _engine_request(
    api: Api,
    api_request: AnyRequest,
    prompt: list[int],
    request_id: str,
    choice: int,
    weights: AnswerWeights,
) -> EngineRequest:
    num_prior = _transfer_count(api_request, "num_output_tokens")
    room = api.max_model_len - len(prompt) + num_prior
    push_source, push_id = _push_of(api, api_request)
    try:
        sampling = SamplingParams(
            max_tokens=min(api_request.output_limit or room, room),
            min_tokens=min(api_request.min_tokens, room),
            temperature=1.0 if api_request.temperature is None else api_request.temperature,
            top_p=1.0 if api_request.top_p is None else api_request.top_p,
            top_k=max(0, api_request.top_k or 0),
            seed=None if api_request.seed is None else _signed(api_request.seed + choice),
            stop=tuple(api_request.stop),
            stop_token_ids=tuple(api_request.stop_token_ids),
            include_stop_str_in_output=api_request.include_stop_str_in_output,
            skip_special_tokens=api_request.skip_special_tokens,
            ignore_eos=api_request.ignore_eos,
            logprobs=api_request.num_logprobs,
        )
        return EngineRequest(
            request_id,
            prompt,
            sampling,
            salt=api_request.cache_salt or "",
            num_prior_output_tokens=num_prior,
            save_tail=_is_prefill(api_request),
            priority=_transfer_count(api_request, "turn"),
            max_external_tokens=_transfer_count(api_request, "max_load_tokens") or None,
            weights=weights,
            push_source=push_source,
            push_id=push_id,
        )
    except InvalidArgument as error:
        raise _as_api_error(error) from error


def _push_of(api: Api, api_request: AnyRequest) -> tuple[PushSource | None, str]:
    """(who pushes the prompt's KV, the transfer by which it is pushed elsewhere), where the request names it.

    A worker that pushes nothing, and a request with several answers, ignore it: the pool has the KV, too."""
    params = api_request.kv_transfer_params or {}
    transfer_id, address = params.get("transfer_id"), params.get("push_from")
    num_prompts = len(api_request.prompts) if isinstance(api_request, CompletionRequest) else 1
    if not api.push_port or not transfer_id or api_request.n != 1 or num_prompts != 1:
        return None, ""
    if not isinstance(transfer_id, str) or len(transfer_id) > MAX_TRANSFER_ID_CHARS:
        allowed = f"up to {MAX_TRANSFER_ID_CHARS} characters"
        message = f"kv_transfer_params.transfer_id is {str(transfer_id)[:SHOWN_CHARS]!r}; allowed: {allowed}"
        raise ApiError(400, message, param="kv_transfer_params", code="invalid_value")
    if _is_prefill(api_request):
        return None, transfer_id
    if not address:
        return None, ""
    try:
        split_address(str(address))
    except InvalidArgument as error:
        raise _as_api_error(error) from error
    return PushSource(transfer_id, str(address)), ""


def _is_prefill(api_request: AnyRequest) -> bool:
    """Whether another worker will decode this prompt and waits for its KV in the pool."""
    return bool((api_request.kv_transfer_params or {}).get("do_remote_decode"))


def _name_of(api_request: AnyRequest) -> str:
    """The name of a request in its trace: the part of the work that is done here."""
    if _is_prefill(api_request):
        return "worker prefill"
    is_decode = bool((api_request.kv_transfer_params or {}).get("do_remote_prefill"))
    return "worker decode" if is_decode else "worker generate"


def _transfer_count(api_request: AnyRequest, name: str) -> int:
    value = (api_request.kv_transfer_params or {}).get(name) or 0
    if not isinstance(value, int) or value < 0:
        shown = repr(value)[:SHOWN_CHARS]
        message = f"kv_transfer_params.{name} is {shown}; allowed: a count of 0 or more"
        raise ApiError(400, message, param="kv_transfer_params", code="invalid_value")
    return value


def _weights_of(api_request: AnyRequest) -> str:
    """Digest of the weights that may continue this answer; empty for all."""
    return _text_of(api_request, "weights", MAX_DIGEST_CHARS)


def _text_of(api_request: AnyRequest, name: str, most_chars: int) -> str:
    value = (api_request.kv_transfer_params or {}).get(name) or ""
    if not isinstance(value, str) or len(value) > most_chars:
        message = f"kv_transfer_params.{name} is no string of at most {most_chars} characters"
        raise ApiError(400, message, param="kv_transfer_params", code="invalid_value")
    return value


def _signed(seed: int) -> int:
    return (seed + 2**63) % 2**64 - 2**63


def _as_api_error(error: BaseException) -> ApiError:
    """The OpenAI error that a failed answer ends with."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, GenerationRefused):
        code = error.refusal.code
        if code == "queue_full":
            return ApiError(429, error.refusal.reason, code=code)
        return ApiError(400, error.refusal.reason, param="prompt", code=code)
    if isinstance(error, InvalidArgument):
        return ApiError(400, str(error), param=error.field, code="invalid_value")
    if isinstance(error, GenerationFailed):
        status = 409 if error.code == WEIGHTS_REPLACED else 500
        return ApiError(status, str(error), code=error.code)
    log.error("answer_failed", error=repr(error))
    return internal_error("worker")


async def _unless_disconnected(http: Request, answer: Any) -> Any:
    """The result of ``answer``, which is cancelled when the client disconnects."""
    answering = asyncio.ensure_future(answer)
    leaving = asyncio.ensure_future(_disconnected(http))
    try:
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            raise ApiError(499, "the client went away", code="client_closed_request")
        return answering.result()
    finally:
        for task in (answering, leaving):
            task.cancel()
        await asyncio.gather(answering, leaving, return_exceptions=True)


async def _disconnected(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def _body(http: Request, most_bytes: int = MAX_BODY_BYTES) -> bytes:
    check_content_type(http.headers)
    return await read_body(http, most_bytes)


async def _parsed(shape: type[RequestT], http: Request) -> RequestT:
    """The decoded request; a large body is decoded in a thread."""
    return await large_json.decoded(await _body(http), functools.partial(parse_request, shape))


def _json(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(body, status, headers, media_type="application/json")


def _watch(generator: Generator) -> None:
    """Register gauges that read the engine's own counts when the metrics page is rendered."""

    def gauge(name: str, text: str, read: Any) -> None:
        found = metrics.registry._names_to_collectors.get(name)
        instrument = found if isinstance(found, Gauge) else Gauge(name, text, registry=metrics.registry)
        instrument.set_function(lambda: read(generator.engine.stats()))

    def usage(stats: EngineStats) -> float:
        return 1.0 - stats.num_free_blocks / max(1, stats.num_blocks)

    gauge("vllm:num_requests_running", "Requests being computed.", lambda stats: stats.num_running)
    gauge("vllm:num_requests_waiting", "Requests waiting to be admitted.", lambda stats: stats.num_waiting)
    gauge("vllm:kv_cache_usage_perc", "Share of the KV pool in use, 0 to 1.", usage)

"""``mooncake dev fake-engine``: the fake engine behind as much of the OpenAI API as a gateway asks for.

Owns the settings, the order of starting and stopping, and what a request means for this engine: a token
is a byte of UTF-8, answers are greedy whatever the temperature, and what it can't do it refuses. The
shapes and the keys of ``kv_transfer_params`` that mean something are our worker's (``openai.py``);
all others come back in the answer as they were sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from msgspec import Meta

from mooncake import clock
from mooncake.config import Port
from mooncake.connectors.blocks import StoreLink
from mooncake.connectors.link import AnyLink
from mooncake.errors import InvalidArgument
from mooncake.inference import openai
from mooncake.inference.answers import ChatWriter, Piece, TextWriter
from mooncake.inference.fake.engine import FakeEngine, Latency, News
from mooncake.inference.fake.faults import Faults, FaultyLink
from mooncake.inference.fake.model import FakeModel
from mooncake.inference.openai import ApiError
from mooncake.inference.request import Request as EngineRequest
from mooncake.inference.request import SamplingParams
from mooncake.inference.scheduler import SchedulerSettings
from mooncake.kvlayout import KvLayout
from mooncake.log import get_logger
from mooncake.store import AsyncStore, StoreSettings
from mooncake.transfer import TransferEngine, TransferSettings
from mooncake.web import WebServer, listen

log = get_logger(__name__)

Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(ge=0)]
AnyRequest = openai.CompletionRequest | openai.ChatCompletionRequest


@dataclass(frozen=True)
class FakeEngineSettings:
    """Run an engine without a model: true KV bytes, one answer for one prompt, faults on request."""

    host: str = "127.0.0.1"
    "Address to listen on."

    port: Port = 8100
    "Port of the HTTP server; 0 takes a free one."

    master: str = ""
    "`host:port` of the store's master; empty runs without a store."

    served_model_name: str = "fake"
    "The model's name in the API."

    seed: Count = 0
    "The weights. Engines of other seeds give other answers and can't read each other's blocks."

    num_layers: Positive = 4
    "Layers of KV."

    head_dim: Positive = 16
    "Numbers in a key; a token has one key and one value of this length in each layer."

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    "What the KV is said to be; decides how many bytes a number has."

    block_tokens: Annotated[int, Meta(ge=1, le=1024)] = 16
    "Tokens of one KV block."

    num_blocks: Annotated[int, Meta(ge=2)] = 1024
    "Blocks of this engine's own KV pool."

    max_model_len: Positive = 8192
    "Most tokens of prompt and answer together."

    max_running: Annotated[int, Meta(ge=1, le=512)] = 64
    "Most requests computed at the same time."

    prefill_token_s: Seconds = 0.0
    "How long computing one token of a prompt takes."

    decode_token_s: Seconds = 0.0
    "How long one step of decoding takes."

    load_layer_s: Seconds = 0.0
    "How much longer each layer of each load takes."

    fail_load_every: Count = 0
    "Every so manieth load fails in its middle; 0: none does."

    corrupt_load_every: Count = 0
    "Every so manieth load brings one wrong bit, unnoticed; 0: none does."

    die_in_load: Count = 0
    "The process kills itself in the middle of this load (counted from 1); 0: never."

    @property
    def faults(self) -> Faults:
        return Faults(self.load_layer_s, self.fail_load_every, self.corrupt_load_every, self.die_in_load)

    def model(self) -> FakeModel:
        layout = KvLayout(self.num_layers, 1, self.head_dim, self.dtype, self.block_tokens)
        return FakeModel(self.seed, layout, self.num_blocks)


async def serve(settings: FakeEngineSettings) -> None:
    """Run a fake engine until cancelled. Raises AddressInUse when the port is taken."""
    listening = listen(settings.host, settings.port)
    async with running(settings) as engine:
        server = WebServer(create_app(engine, settings), listening)
        try:
            await server.start()
            log.info("ready", address=f"http://{settings.host}:{server.port}", seed=settings.seed)
            await server.wait()
        finally:
            await server.close()


@contextlib.asynccontextmanager
async def running(settings: FakeEngineSettings) -> AsyncIterator[FakeEngine]:
    """The engine and its link to the store."""
    model = settings.model()
    async with contextlib.AsyncExitStack() as stack:
        link: AnyLink | None = None
        if settings.master:
            transfer = TransferEngine(TransferSettings(listen_host=settings.host))
            stack.callback(transfer.close)
            store = AsyncStore(settings.master, transfer, StoreSettings(timeout_s=1.0))
            stack.push_async_callback(store.close)
            real = StoreLink(store, transfer, model.identity, model.memory(), asyncio.get_running_loop())
            stack.push_async_callback(real.close)
            link = FaultyLink(real, settings.faults, settings.num_layers, model.flip)
        limits = SchedulerSettings(
            settings.num_blocks, max_model_len=settings.max_model_len, max_running=settings.max_running
        )
        latency = Latency(settings.prefill_token_s, settings.decode_token_s)
        engine = FakeEngine(model, limits, link, latency)
        stack.push_async_callback(engine.close)
        yield engine


def create_app(engine: FakeEngine, settings: FakeEngineSettings) -> FastAPI:
    """The fake engine's ASGI application."""
    app = FastAPI(title="Mooncake fake engine")
    name = settings.served_model_name

    @app.exception_handler(ApiError)
    async def _refused(request: Request, error: ApiError) -> Response:
        return Response(error.body(), error.status, media_type="application/json")

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        asked = openai.parse_request(openai.CompletionRequest, await request.body())
        return await _respond(_Answer(engine, name, asked))

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        asked = openai.parse_request(openai.ChatCompletionRequest, await request.body())
        return await _respond(_Answer(engine, name, asked))

    @app.get("/v1/models")
    async def models() -> Response:
        most = engine.scheduler.max_total_tokens
        card = openai.ModelCard(id=name, created=int(clock.wall()), root=name, max_model_len=most)
        return Response(openai.to_json(openai.ModelList([card])), media_type="application/json")

    @app.get("/health")
    async def health() -> dict[str, Any]:
        scheduler = engine.scheduler
        return {
            "status": "ok",
            "num_running": scheduler.num_running,
            "num_waiting": scheduler.num_waiting,
            "num_failed_loads": engine.num_failed_loads,
            "num_preemptions": scheduler.num_preemptions,
        }

    return app


async def _respond(answer: _Answer) -> Response:
    if not answer.asked.stream:
        return Response(await answer.whole(), media_type="application/json")
    # The first token is awaited here, so that a refusal still has a status of its own.
    stream = answer.stream()
    first = await anext(stream)

    async def rest() -> AsyncGenerator[bytes, None]:
        async with contextlib.aclosing(stream):
            yield first
            async for event in stream:
                yield event

    return StreamingResponse(rest(), media_type="text/event-stream")


class _Answer:
    """One request and its answer, whole or as a stream."""

    def __init__(self, engine: FakeEngine, name: str, asked: AnyRequest) -> None:
        """Raises ApiError for what this engine can't do."""
        if asked.model not in (None, name):
            raise openai.model_not_found(asked.model or "", name)
        if asked.n != 1 or asked.stop or asked.stop_token_ids or asked.logprobs:
            raise ApiError(400, "the fake engine gives one choice, without stop strings or log probabilities")
        self.asked = asked
        self._engine = engine
        self._params = asked.kv_transfer_params or {}
        self._request = self._engine_request()
        kind, writer = ("cmpl", TextWriter) if _is_text(asked) else ("chatcmpl", ChatWriter)
        answer_id = f"{kind}-{uuid.uuid4().hex}"
        self._writer = writer(answer_id, int(clock.wall()), name, asked.return_token_ids)
        self._last = News()
        self._num_output = self._request.num_prior_output_tokens
        # What an answer begun elsewhere has, and the client has not received yet.
        first = self._request.num_prompt_tokens - self._num_output
        self._unsent = _text(self._request.token_ids[first:])[self._count("output_text_offset") :]

    async def whole(self) -> bytes:
        joined = Piece()
        async with contextlib.aclosing(self._pieces()) as pieces:
            async for piece in pieces:
                joined.join(piece)
        return openai.to_json(self._writer.whole([joined], self._usage(), self._hand_over()))

    async def stream(self) -> AsyncGenerator[bytes, None]:
        opening = self._writer.opening(1)
        try:
            async with contextlib.aclosing(self._pieces()) as pieces:
                async for piece in pieces:
                    yield opening + self._writer.chunk(piece)
                    opening = b""
        except ApiError as error:
            if opening or not self._num_output:
                raise
            yield b"data: " + error.body() + b"\n\n"
            return
        if self.asked.include_usage:
            yield self._writer.usage_chunk(self._usage(), self._hand_over())
        yield openai.STREAM_END

    async def _pieces(self) -> AsyncGenerator[Piece, None]:
        async with contextlib.aclosing(self._engine.answer(self._request)) as answer:
            async for news in answer:
                if news.refusal is not None:
                    code = news.refusal.code
                    status = 429 if code == "queue_full" else 400
                    raise ApiError(status, news.refusal.reason, code=code)
                if news.error is not None or news.token is None:
                    raise ApiError(500, news.error or "no token came", code="generation_failed")
                self._last = news
                self._num_output += 1
                text, self._unsent = self._unsent + _text([news.token]), ""
                reason = None if news.finish_reason is None else str(news.finish_reason)
                yield Piece(text=text, token_ids=[news.token], finish_reason=reason)

    def _engine_request(self) -> EngineRequest:
        asked = self.asked
        prompt = _prompt(asked)
        num_prior = self._count("num_output_tokens")
        room = max(1, self._engine.scheduler.max_total_tokens - len(prompt) + num_prior)
        try:
            return EngineRequest(
                uuid.uuid4().hex,
                prompt,
                SamplingParams(max_tokens=min(asked.output_limit or room, room)),
                salt=asked.cache_salt or "",
                num_prior_output_tokens=num_prior,
                save_tail=bool(self._params.get("do_remote_decode")),
                priority=self._count("turn"),
                max_external_tokens=self._count("max_load_tokens") or None,
            )
        except InvalidArgument as error:
            raise ApiError(400, str(error), param=error.field, code="invalid_value") from error

    def _count(self, name: str) -> int:
        value = self._params.get(name) or 0
        if not isinstance(value, int) or value < 0:
            raise ApiError(400, f"kv_transfer_params.{name} is {value!r}; allowed: a count of 0 or more")
        return value

    def _usage(self) -> openai.Usage:
        num_prompt = self._request.num_prompt_tokens - self._request.num_prior_output_tokens
        return openai.Usage.of(num_prompt, self._num_output, self._last.num_cached_tokens)

    def _hand_over(self) -> dict[str, Any] | None:
        if not self._request.save_tail:
            return self._params or None
        told = {"do_remote_prefill": True, "num_stored_tokens": self._last.num_stored_tokens}
        return {**self._params, "do_remote_decode": False, **told}


def _is_text(asked: AnyRequest) -> bool:
    return isinstance(asked, openai.CompletionRequest)


def _prompt(asked: AnyRequest) -> list[int]:
    if isinstance(asked, openai.ChatCompletionRequest):
        lines = [f"{message.role}: {message.content or ''}\n" for message in asked.messages]
        return list("".join([*lines, "assistant: "]).encode())
    if len(asked.prompts) != 1:
        raise ApiError(400, "the fake engine takes one prompt at a time", param="prompt", code="unsupported")
    (prompt,) = asked.prompts
    return list(prompt.encode()) if isinstance(prompt, str) else prompt


def _text(token_ids: list[int]) -> str:
    return bytes(token for token in token_ids if token < 128).decode("ascii")

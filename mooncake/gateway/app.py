"""The gateway process: settings, what it is made of, and the OpenAI endpoints.

Owns the way from an HTTP request to an ``Answer``: reading and checking it, tokenizing, hashing, the
headers in and out. What happens to a prompt then is ``route.py``; who serves it is the conductor's choice,
which runs inside this process or, with ``--conductor``, in one of its own. No torch is needed here: the
gateway must start quickly and fit on a small machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import re
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

from fastapi import FastAPI, Request, Response
from msgspec import Meta
from prometheus_client import Counter
from starlette.exceptions import HTTPException

import mooncake
from mooncake import clock, metrics
from mooncake.conductor.conductor import AddInstance
from mooncake.conductor.load import SchedulingSettings, Seconds
from mooncake.conductor.server import ConductorService, RemoteConductor, Scheduling
from mooncake.config import AlsoFrom, Port, Secret
from mooncake.errors import InvalidArgument
from mooncake.gateway import admin
from mooncake.gateway.answer import Answer, AnyRequest, Slo
from mooncake.gateway.gate import Gate
from mooncake.gateway.route import Walk
from mooncake.gateway.stream import EventStream, unless_left
from mooncake.gateway.workers import WorkerFailed, Workers
from mooncake.inference.openai import (
    ApiError,
    ChatCompletionRequest,
    CompletionRequest,
    ModelCard,
    ModelList,
    context_length_exceeded,
    model_not_found,
    parse_request,
    to_json,
)
from mooncake.log import get_logger
from mooncake.prefix import block_hashes, root_hash
from mooncake.rpc.client import split_address
from mooncake.types import InstanceId, Role
from mooncake.web import WebServer, listen

log = get_logger(__name__)

MAX_BODY_BYTES = 32 << 20
INLINE_CHARS = 4096
"""Shorter texts are tokenized at once; a thread would cost more than it frees."""

_requests = Counter(
    "mooncake_gateway_requests",
    "HTTP requests by endpoint and status.",
    ["endpoint", "status"],
    registry=metrics.registry,
)


@dataclass(frozen=True)
class GatewaySettings(SchedulingSettings):
    """Serve the OpenAI API and spread requests over workers."""

    model: str = "smollm2"
    "A local Hugging Face folder, or `smollm2`; only its tokenizer is used."

    served_model_name: str = ""
    "The model's name in the API; empty takes the last part of `model`."

    host: str = "127.0.0.1"
    "Address to listen on."

    port: Port = 8000
    "Port of the HTTP server; 0 takes a free one."

    prefill: tuple[str, ...] = ()
    "Prefill workers, `host:port`; more can be added while running."

    decode: tuple[str, ...] = ()
    "Decode workers, `host:port`; more can be added while running."

    conductor: str = ""
    "`host:port` of a conductor; empty runs one inside this process with the scheduling settings."

    admin_api_key: Annotated[str, Secret, AlsoFrom("ADMIN_API_KEY")] = ""
    "What admin calls must send as X-API-Key; empty refuses them all."

    request_timeout_s: Seconds = 600.0
    "How long one answer may take, prefill and decode together."

    stall_timeout_s: Seconds = 120.0
    "A worker that sends nothing for so long counts as failed, even if it answers health probes."

    max_in_flight: Annotated[int, Meta(ge=1)] = 1024
    "Answers under way at a time; beyond that clients are told when to come back."

    def __post_init__(self) -> None:
        for name in ("prefill", "decode"):
            for address in getattr(self, name):
                try:
                    split_address(address)
                except InvalidArgument as error:
                    raise InvalidArgument(name, address, "host:port") from error

    @property
    def model_name(self) -> str:
        return self.served_model_name or self.model.rstrip("/").rpartition("/")[2]


class PromptTokenizer(Protocol):
    """What a gateway needs of ``mooncake.inference.tokenizer.Tokenizer``."""

    def encode(self, text: str) -> list[int]: ...

    def chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **options: Any
    ) -> list[int]: ...


async def serve(settings: GatewaySettings) -> None:
    """Run a gateway until cancelled.

    Raises:
        ModelError: the model has no usable tokenizer.
        AddressInUse: the port is taken.
    """
    listening = listen(settings.host, settings.port)
    tokenizer = await asyncio.to_thread(_load_tokenizer, settings.model)
    gateway = Gateway(settings, tokenizer)
    server = WebServer(create_app(gateway), listening)
    try:
        await server.start()
        address = f"http://{settings.host}:{server.port}"
        log.info("ready", role="gateway", address=address, model=settings.model_name)
        await server.wait()
    finally:
        await server.close()


def _load_tokenizer(model: str) -> PromptTokenizer:
    from mooncake.inference.tokenizer import Tokenizer  # late: transformers takes a while

    folder = Path(model)
    if not folder.is_dir():
        from mooncake.inference.gguf import resolve_model  # late: it needs torch

        folder = resolve_model(model)
    return Tokenizer(folder)


class Gateway:
    """Everything of the process but its HTTP server. ``start`` and ``close`` it on one loop."""

    def __init__(self, settings: GatewaySettings, tokenizer: PromptTokenizer) -> None:
        self.settings = settings
        self.tokenizer = tokenizer
        self.workers = Workers(settings.stall_timeout_s)
        self.gate = Gate(settings.max_in_flight)
        self.created = int(clock.wall())
        self.max_model_len: int | None = None
        """Context of the model; known when a worker has been asked."""
        self._service: ConductorService | RemoteConductor | None = None

    @property
    def scheduling(self) -> Scheduling:
        assert self._service is not None, "start() first"
        return self._service

    @property
    def conductor_state(self) -> str:
        """Where the conductor is, in words."""
        if not self.settings.conductor:
            return "inside this gateway"
        assert isinstance(self._service, RemoteConductor)
        state = "connected" if self._service.is_connected else "can't be reached: workers are used in turn"
        return f"{self.settings.conductor} ({state})"

    async def start(self) -> None:
        settings = self.settings
        # Made here: what it holds belongs to the loop that runs now.
        self._service = (
            RemoteConductor(settings.conductor) if settings.conductor else ConductorService(settings)
        )
        await self.workers.open()
        await self._service.start()
        for role, instances in ((Role.PREFILL, settings.prefill), (Role.DECODE, settings.decode)):
            for instance in instances:
                self._service.post(AddInstance(instance, role))

    async def close(self) -> None:
        if self._service is not None:
            await self._service.close()
        await self.workers.close()

    def model_card(self) -> ModelCard:
        name = self.settings.model_name
        return ModelCard(id=name, created=self.created, root=name, max_model_len=self.max_model_len)

    async def context_length(self) -> int:
        """Most tokens of prompt and answer together, asked of the workers once.

        Raises:
            ApiError: 503, no worker could be asked.
        """
        if self.max_model_len is not None:
            return self.max_model_len
        rows = await self.scheduling.status()
        for row in sorted(rows, key=lambda row: row.health != "ready"):
            found = None if row.health == "down" else await self._context_length_of(row.instance)
            if found is not None:
                self.max_model_len = found
                return found
        states = ", ".join(f"{row.instance} is {row.health}" for row in rows) or "none was added"
        message = f"no instance can serve: {states}"
        raise ApiError(503, message, code="no_instance", retry_after_s=1.0)

    async def _context_length_of(self, instance: InstanceId) -> int | None:
        try:
            cards = await self.workers.models(instance)
        except WorkerFailed as error:
            log.info("model_unknown", instance=instance, reason=error.reason)
            return None
        return cards[0].max_model_len if cards else None


_ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"description": "A field is wrong; `error.param` names it"},
    404: {"description": "No such model"},
    413: {"description": "The body is too large"},
    429: {"description": "Too much at once; `Retry-After` says when to come back"},
    500: {"description": "A fault of this server"},
    503: {"description": "No instance can serve; `Retry-After` says when to come back"},
    504: {"description": "The deadline has passed"},
}


def create_app(gateway: Gateway) -> FastAPI:
    """The gateway's ASGI application; its lifespan starts and closes ``gateway``."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        try:
            await gateway.start()
            yield
        finally:
            await gateway.close()

    app = FastAPI(title="Mooncake gateway", version=mooncake.__version__, lifespan=lifespan)

    @app.exception_handler(ApiError)
    async def _refused(http: Request, error: ApiError) -> Response:
        _requests.labels(_endpoint(http), error.status).inc()
        headers = {**error.headers(), "X-Request-ID": _request_id(http)}
        return Response(error.body(), error.status, headers, media_type="application/json")

    @app.exception_handler(HTTPException)
    async def _not_served(http: Request, error: HTTPException) -> Response:
        # Unknown paths and methods; bounded label values, so the path itself is not counted.
        _requests.labels("unknown", error.status_code).inc()
        refusal = ApiError(error.status_code, f"{http.method} {http.url.path}: {error.detail}")
        headers = {**(error.headers or {}), "X-Request-ID": _request_id(http)}
        return Response(refusal.body(), error.status_code, headers, media_type="application/json")

    @app.exception_handler(Exception)
    async def _broken(http: Request, error: Exception) -> Response:
        # Starlette logs the traceback after this.
        _requests.labels(_endpoint(http), 500).inc()
        broken = ApiError(500, "the gateway failed; its log has the traceback", code="internal_error")
        return Response(broken.body(), 500, media_type="application/json")

    @app.post("/v1/completions", openapi_extra=_takes(CompletionRequest), responses=_ERRORS)
    async def completions(http: Request) -> Response:
        return await _serve(gateway, http, parse_request(CompletionRequest, await read_body(http)))

    @app.post("/v1/chat/completions", openapi_extra=_takes(ChatCompletionRequest), responses=_ERRORS)
    async def chat_completions(http: Request) -> Response:
        return await _serve(gateway, http, parse_request(ChatCompletionRequest, await read_body(http)))

    @app.get("/v1/models")
    async def models() -> Response:
        return Response(to_json(ModelList([gateway.model_card()])), media_type="application/json")

    @app.get("/v1/models/{model:path}", responses={404: _ERRORS[404]})
    async def model(model: str) -> Response:
        if model != gateway.settings.model_name:
            raise model_not_found(model, gateway.settings.model_name)
        return Response(to_json(gateway.model_card()), media_type="application/json")

    admin.add_routes(app, gateway)
    return app


def _takes(shape: type[AnyRequest]) -> dict[str, Any]:
    """The request's schema for ``/openapi.json``; the body is read by us, for the sake of its errors."""
    schema = shape.model_json_schema(ref_template=f"#/components/schemas/{shape.__name__}/$defs/{{model}}")
    definitions = schema.pop("$defs", {})
    return {
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": _inlined(schema, definitions)}},
        }
    }


def _inlined(schema: Any, definitions: Mapping[str, Any]) -> Any:
    """``schema`` with its references replaced by what they refer to."""
    if isinstance(schema, list):
        return [_inlined(one, definitions) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    return {name: _inlined(value, definitions) for name, value in schema.items()}


async def _serve(gateway: Gateway, http: Request, asked: AnyRequest) -> Response:
    """One answer, whole or streamed."""
    settings = gateway.settings
    if asked.model is not None and asked.model != settings.model_name:
        raise model_not_found(asked.model, settings.model_name)
    slo = _slo(http)
    num_prompts = len(asked.prompts) if isinstance(asked, CompletionRequest) else 1
    num_answers = num_prompts * asked.n
    began = clock.monotonic()
    gateway.gate.enter(num_answers)

    def leave() -> None:
        gateway.gate.leave(num_answers, clock.monotonic() - began)

    headers = {"X-Request-ID": _request_id(http)}
    try:
        max_model_len = await gateway.context_length()
        prompts = await _tokenize(gateway, asked, max_model_len)
        answer = _answer(gateway, http, asked, prompts, max_model_len, slo)
        if not asked.stream:
            body = to_json(await unless_left(http, answer.whole()))
            leave()
            _requests.labels(_endpoint(http), 200).inc()
            return Response(body, 200, {**headers, **answer.headers()}, media_type="application/json")
        # The first event is awaited here, so that a refusal still has a status of its own.
        events = answer.stream()
        first = await unless_left(http, anext(events))
    except BaseException:
        leave()
        raise
    _requests.labels(_endpoint(http), 200).inc()
    return EventStream(first, events, {**headers, **answer.headers()}, leave)


def _endpoint(http: Request) -> str:
    """The path as it was declared: a label with few values."""
    return str(getattr(http.scope.get("route"), "path", "unknown"))


def _answer(
    gateway: Gateway,
    http: Request,
    asked: AnyRequest,
    prompts: list[list[int]],
    max_model_len: int,
    slo: Slo,
) -> Answer:
    settings = gateway.settings
    prefix = "chatcmpl" if isinstance(asked, ChatCompletionRequest) else "cmpl"
    answer_id = f"{prefix}-{uuid.uuid4().hex}"
    passed_on = {"X-Request-ID": _request_id(http)}
    for name in ("traceparent", "tracestate"):
        if name in http.headers:
            passed_on[name] = http.headers[name]
    root = root_hash(asked.cache_salt or "")
    walks = [
        Walk(
            gateway.scheduling,
            gateway.workers,
            request_id=answer_id if len(prompts) == 1 else f"{answer_id}/p{number}",
            prompt=prompt,
            hashes=block_hashes(prompt, settings.block_tokens, root),
            headers=passed_on,
            affinity=http.headers.get("x-session-affinity", "")[:256],
            lifetime_s=settings.request_timeout_s + 60.0,
        )
        for number, prompt in enumerate(prompts)
    ]
    return Answer(
        asked,
        walks,
        answer_id=answer_id,
        model=settings.model_name,
        max_model_len=max_model_len,
        deadline=clock.monotonic() + settings.request_timeout_s,
        slo=slo,
    )


async def _tokenize(gateway: Gateway, asked: AnyRequest, max_model_len: int) -> list[list[int]]:
    """Token ids of every prompt. Raises ApiError, 400."""
    param = "messages" if isinstance(asked, ChatCompletionRequest) else "prompt"

    def tokenize() -> list[list[int]]:
        if isinstance(asked, CompletionRequest):
            encode = gateway.tokenizer.encode
            return [encode(one) if isinstance(one, str) else one for one in asked.prompts]
        messages = [message.model_dump(exclude_none=True) for message in asked.messages]
        options = dict(asked.chat_template_kwargs or {})
        if asked.continue_final_message:
            options["continue_final_message"] = True
        return [gateway.tokenizer.chat(messages, asked.add_generation_prompt, **options)]

    try:
        prompts = tokenize() if _num_chars(asked) < INLINE_CHARS else await asyncio.to_thread(tokenize)
    except InvalidArgument as error:
        raise ApiError(400, str(error), param=param, code="invalid_value") from error
    for prompt in prompts:
        if not prompt:
            raise ApiError(400, f"{param} has no tokens", param=param, code="invalid_value")
        if len(prompt) >= max_model_len:
            raise context_length_exceeded(len(prompt), max_model_len, param)
    return prompts


def _num_chars(asked: AnyRequest) -> int:
    if isinstance(asked, ChatCompletionRequest):
        return sum(len(message.content or "") for message in asked.messages)
    return sum(len(one) for one in asked.prompts if isinstance(one, str))


def _slo(http: Request) -> Slo:
    """The SLOs in the request's headers. Raises ApiError, 400 naming the header."""
    found: dict[str, float] = {}
    for field in dataclasses.fields(Slo):
        name = f"x-slo-{field.name.replace('_', '-')}"
        text = http.headers.get(name)
        if text is None:
            continue
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value > 0):
            message = f"header {name} is {text[:40]!r}; allowed: a number of milliseconds above 0"
            raise ApiError(400, message, param=name, code="invalid_value")
        found[field.name] = value
    return Slo(**found)


def _request_id(http: Request) -> str:
    """The client's, if it is fit for a header and a log, else one of ours; the same all along."""
    found: str | None = getattr(http.state, "request_id", None)
    if found is None:
        given = http.headers.get("x-request-id", "")
        found = given if re.fullmatch(r"[\x21-\x7e]{1,128}", given) else uuid.uuid4().hex
        http.state.request_id = found
    return found


async def read_body(http: Request) -> bytes:
    """The body. Raises ApiError, 413 for one that is too large."""
    body = bytearray()
    async for part in http.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise ApiError(413, f"the body is larger than {MAX_BODY_BYTES} bytes", code="body_too_large")
    return bytes(body)

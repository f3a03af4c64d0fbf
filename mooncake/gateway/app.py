"""The gateway process and its OpenAI endpoints.

Owns the endpoints, and what is counted and said when one fails. A request goes to our workers
(``routing.py``) or to other engines (``relaying.py``); who serves it is the conductor's choice, which runs
inside this process or, with ``--conductor``, in one of its own. No torch is needed here: the gateway must
start quickly and fit on a small machine.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from prometheus_client import Counter
from starlette.exceptions import HTTPException

import mooncake
from mooncake import metrics
from mooncake.errors import ModelError
from mooncake.gateway import admin, explaining
from mooncake.gateway.answer import AnyRequest
from mooncake.gateway.gateway import Gateway, GatewaySettings, PromptTokenizer
from mooncake.gateway.reading import decoded, names_of, read_body, request_id_of
from mooncake.gateway.relaying import relay
from mooncake.gateway.routing import route
from mooncake.inference.openai import (
    ApiError,
    ChatCompletionRequest,
    CompletionRequest,
    ModelCard,
    ModelList,
    model_not_found,
    parse_request,
    to_json,
)
from mooncake.log import get_logger
from mooncake.security import check_address
from mooncake.web import WebServer, listen

log = get_logger(__name__)

_requests = Counter(
    "mooncake_gateway_requests",
    "HTTP requests by endpoint and status.",
    ["endpoint", "status"],
    registry=metrics.registry,
)


async def serve(settings: GatewaySettings) -> None:
    """Run a gateway until cancelled.

    Raises:
        ModelError: the model has no usable tokenizer.
        AddressInUse: the port is taken.
    """
    check_address(settings.host)
    listening = listen(settings.host, settings.port)
    tokenizer = await asyncio.to_thread(_load_tokenizer, settings)
    gateway = Gateway(settings, tokenizer)
    server = WebServer(create_app(gateway), listening, max_connections=settings.max_connections)
    try:
        await server.start()
        address = f"http://{settings.host}:{server.port}"
        log.info("ready", role="gateway", address=address, model=settings.model_name)
        await server.wait()
    finally:
        await server.close()


def _load_tokenizer(settings: GatewaySettings) -> PromptTokenizer | None:
    """None where there is none and engines can do without."""
    folder = Path(settings.model)
    try:
        from mooncake.inference.tokenizer import Tokenizer  # late: transformers takes a while

        if not folder.is_dir():
            from mooncake.inference.gguf import resolve_model  # late: it needs torch

            folder = resolve_model(settings.model)
        return Tokenizer(folder)
    except (ModelError, ModuleNotFoundError) as error:
        if settings.protocol == "workers":
            raise
        log.info("no_tokenizer", model=settings.model, reason=str(error))
        return None


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
        headers = {**error.headers(), **names_of(http)}
        return Response(error.body(), error.status, headers, media_type="application/json")

    @app.exception_handler(HTTPException)
    async def _not_served(http: Request, error: HTTPException) -> Response:
        # Unknown paths and methods; bounded label values, so the path itself is not counted.
        _requests.labels("unknown", error.status_code).inc()
        refusal = ApiError(error.status_code, f"{http.method} {http.url.path}: {error.detail}")
        headers = {**(error.headers or {}), "X-Request-ID": request_id_of(http)}
        return Response(refusal.body(), error.status_code, headers, media_type="application/json")

    @app.exception_handler(Exception)
    async def _broken(http: Request, error: Exception) -> Response:
        # Starlette logs the traceback after this.
        _requests.labels(_endpoint(http), 500).inc()
        broken = ApiError(500, "the gateway failed; its log has the traceback", code="internal_error")
        return Response(broken.body(), 500, media_type="application/json")

    @app.post("/v1/completions", openapi_extra=_takes(CompletionRequest), responses=_ERRORS)
    async def completions(http: Request) -> Response:
        return await _either(gateway, http, partial(parse_request, CompletionRequest))

    @app.post("/v1/chat/completions", openapi_extra=_takes(ChatCompletionRequest), responses=_ERRORS)
    async def chat_completions(http: Request) -> Response:
        return await _either(gateway, http, partial(parse_request, ChatCompletionRequest))

    @app.get("/v1/models")
    async def models() -> Response:
        return Response(to_json(ModelList(await _cards(gateway))), media_type="application/json")

    @app.get("/v1/models/{model:path}", responses={404: _ERRORS[404]})
    async def model(model: str) -> Response:
        cards = await _cards(gateway)
        for card in cards:
            if card.id == model:
                return Response(to_json(card), media_type="application/json")
        raise model_not_found(model, ", ".join(card.id for card in cards))

    admin.add_routes(app, gateway)
    explaining.add_routes(app, gateway)
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


async def _either(
    gateway: Gateway, http: Request, parse: Callable[[bytes], CompletionRequest | ChatCompletionRequest]
) -> Response:
    """One answer, by our workers or by other engines."""
    content = await read_body(http, gateway.settings.max_body_bytes)
    if await gateway.fronts_engines():
        response = await relay(gateway, http, _endpoint(http), content)
    else:
        response = await route(gateway, http, await decoded(content, parse))
    _requests.labels(_endpoint(http), 200).inc()
    return response


async def _cards(gateway: Gateway) -> list[ModelCard]:
    """The model by our name of it, and by those of engines that are not ours."""
    own = gateway.model_card()
    if not await gateway.fronts_engines():
        return [own]
    found = await gateway.engines.models(gateway.scheduling)
    return [*found, *([own] if own.id not in [card.id for card in found] else [])]


def _endpoint(http: Request) -> str:
    """The path as it was declared: a label with few values."""
    return str(getattr(http.scope.get("route"), "path", "unknown"))

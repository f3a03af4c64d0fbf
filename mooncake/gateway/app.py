# SPDX-License-Identifier: Apache-2.0
"""The gateway process and its OpenAI endpoints.

Owns the endpoints, and the metrics and messages of their failures. A request goes to our workers
(``own_workers.py``) or to other engines (``any_engine.py``); the instances are chosen by the conductor, which
runs inside this process or, with ``--conductor``, in one of its own. torch is not needed here: the gateway
must start quickly and fit on a small machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from prometheus_client import Counter
from starlette.exceptions import HTTPException

import mooncake
from mooncake import metrics
from mooncake.errors import InvalidArgument, ModelError
from mooncake.gateway import admin
from mooncake.gateway.any_engine import EMBEDDINGS, serve_any_engine, serve_call
from mooncake.gateway.engine_apis import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from mooncake.gateway.gateway import Gateway, GatewaySettings, Public
from mooncake.gateway.own_workers import serve_own_workers
from mooncake.gateway.prompt_hygiene import cleaned
from mooncake.gateway.request_parsing import names_of, request_id_of
from mooncake.gateway.traces import add_trace_routes, add_tracing
from mooncake.http import large_json
from mooncake.http.api_requests import PromptTokenizer, not_served, read_body
from mooncake.http.openai import (
    AnyRequest,
    ApiError,
    ChatCompletionRequest,
    CompletionRequest,
    ModelCard,
    ModelList,
    check_content_type,
    internal_error,
    model_not_found,
    parse_request,
    to_json,
)
from mooncake.http.server import HttpServer, listen, listen_for_metrics
from mooncake.http.sse import EventStreamResponse, StreamOutcome
from mooncake.log import get_logger
from mooncake.security import Identity, check_address, is_loopback, process_identity, show_remaining

log = get_logger(__name__)

_requests = Counter(
    "mooncake_gateway_requests",
    "HTTP requests by endpoint and status, when their answers have ended; broken: a stream that began with "
    "status 200 and ended with an error event or without its end.",
    ["endpoint", "status"],
    registry=metrics.registry,
)


AddPages = Callable[[Gateway, FastAPI, FastAPI], contextlib.AbstractAsyncContextManager[None]]
"""Adds pages to the application of clients, which may use that of operators; they are served within it."""


async def serve(settings: GatewaySettings, add_pages: AddPages | None = None) -> None:
    """Run a gateway until cancelled; then answers in progress have ``drain_s``, unless it is cancelled again.

    Args:
        settings: see ``GatewaySettings``.
        add_pages: adds the pages of rooms above this one.

    Raises:
        InvalidArgument: it would serve unauthenticated clients, or a file of keys or certificates is invalid.
        ModelError: the model has no usable tokenizer.
        AddressInUse: the port is taken.
    """
    check_address(settings.host)
    check_exposure(settings, process_identity())
    tls = tls_of(settings, process_identity())
    listening = listen(settings.host, settings.port)
    for_operators = listen_for_metrics(settings.metrics_host, settings.metrics_port)
    tokenizer = await asyncio.to_thread(load_tokenizer, settings)
    gateway = Gateway(settings, tokenizer)
    app, operator_app = create_app(gateway), create_operator_app(gateway)
    server = HttpServer(
        app,
        listening,
        tls=tls,
        max_connections=settings.max_connections,
        body_budget_bytes=settings.max_bodies_bytes,
    )
    operator_server = HttpServer(operator_app, for_operators, max_connections=MAX_OPERATORS)
    key_watch = asyncio.create_task(watch_client_keys(gateway))
    pages = contextlib.AsyncExitStack()
    grace_s: float | None = None
    try:
        if add_pages is not None:
            await pages.enter_async_context(add_pages(gateway, app, operator_app))
        await server.start()
        await operator_server.start()
        address = f"{'https' if tls else 'http'}://{settings.host}:{server.port}"
        metrics_address = f"http://{settings.metrics_host}:{operator_server.port}"
        log.info(
            "ready",
            role="gateway",
            address=address,
            metrics=metrics_address,
            model=settings.model_name,
            clients=0 if gateway.clients is None else len(gateway.clients),
        )
        await server.wait()
    except asyncio.CancelledError:
        server.stop_keeping()
        try:
            await gateway.drain()
        except asyncio.CancelledError:
            grace_s = 0.0
        raise
    finally:
        key_watch.cancel()
        await pages.aclose()
        await operator_server.close()
        await server.close(grace_s)


def check_exposure(settings: GatewaySettings, identity: Identity) -> None:
    """Check that clients beyond loopback are authenticated, since any host on the network can be one.

    Raises:
        InvalidArgument: it would serve unauthenticated clients.
    """
    if not is_loopback(settings.metrics_host) and not settings.admin_api_key:
        raise InvalidArgument(
            "--metrics-host", settings.metrics_host, "a loopback address without ADMIN_API_KEY"
        )
    if settings.api_keys_file or identity.has_tls or is_loopback(settings.host):
        return
    if identity.is_open:
        check_address(settings.host, identity)
    elif not identity.settings.insecure:
        allowed = "a loopback address; for others --api-keys-file or --insecure"
        raise InvalidArgument("--host", settings.host, allowed)


def tls_of(settings: GatewaySettings, identity: Identity) -> ssl.SSLContext | None:
    """The TLS context for clients, according to ``settings.public``; None without TLS.

    Raises:
        InvalidArgument: a file is not a valid certificate or key.
    """
    if settings.public(identity) is not Public.HTTPS:
        return identity.server_tls
    cert, key = settings.https_cert, settings.https_key
    if not cert:
        cert, key = identity.settings.tls_cert, identity.settings.tls_key
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(cert, key, password=lambda: "")
    except (OSError, ValueError) as error:
        raise InvalidArgument("https_cert", cert, f"a PEM certificate with its key ({error})") from error
    show_remaining(cert)
    return context


async def watch_client_keys(gateway: Gateway) -> None:
    """Reload the file of keys when it changes, and at SIGHUP."""
    if gateway.clients is None:
        return
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, gateway.reload_clients)
    while True:
        await asyncio.sleep(KEYS_CHECK_INTERVAL_S)
        gateway.reload_clients(is_forced=False)


def create_operator_app(gateway: Gateway, why_not_ready: admin.WhyNotReady | None = None) -> FastAPI:
    """The application of the operators' port; ``create_app`` starts and closes ``gateway``.

    ``why_not_ready``: as of ``admin.add_routes``.
    """
    title = "Mooncake gateway, for operators"
    app = FastAPI(title=title, version=mooncake.__version__, docs_url=None, redoc_url=None)
    _answer_errors(app)
    is_inside = is_loopback(gateway.settings.metrics_host)
    admin.add_routes(app, gateway, is_inside, why_not_ready)
    add_trace_routes(app, gateway, is_inside)
    return app


def load_tokenizer(settings: GatewaySettings) -> PromptTokenizer | None:
    """The model's tokenizer; None where there is none and engines can do without."""
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
        log.info("tokenizer_unavailable", model=settings.model, reason=str(error))
        return None


MAX_OPERATORS = 64
"""Most connections to the operators' port."""

LENGTH_TIMEOUT_S = 2.0
"""How long the list of models waits for a worker that reports its context length."""

KEYS_CHECK_INTERVAL_S = 2.0
"""Interval at which the file of keys is checked for changes."""

_ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"description": "A field is wrong; `error.param` names it"},
    401: {"description": "Clients need a key here, and it is missing or wrong"},
    404: {"description": "No such model"},
    413: {"description": "The body is too large"},
    415: {"description": "A browser's page sends the body as a form or as text; allowed: application/json"},
    429: {"description": "Too many requests at once; `Retry-After` is the time to retry"},
    500: {"description": "A fault of this server"},
    503: {"description": "No instance can serve; `Retry-After` is the time to retry"},
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

    # FastAPI's pages of the API would have browsers load programs from other hosts.
    app = FastAPI(
        title="Mooncake gateway",
        version=mooncake.__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    _answer_errors(app, gateway)
    _add_models(app, gateway)
    admin.add_routes(app, gateway)
    add_trace_routes(app, gateway)
    add_tracing(app, gateway)
    return app


def _answer_errors(app: FastAPI, gateway: Gateway | None = None) -> None:
    """Report every error in the form of the public API.

    ``gateway``: where its clients need a key, only callers with one learn which paths there are.
    """

    @app.exception_handler(ApiError)
    async def _refused(http: Request, error: ApiError) -> Response:
        _requests.labels(_endpoint(http), error.status).inc()
        headers = {**error.headers(), **names_of(http)}
        body = MESSAGES.error_body(error) if _is_of_messages(http) else error.body()
        return Response(body, error.status, headers, media_type="application/json")

    @app.exception_handler(HTTPException)
    async def _not_served(http: Request, error: HTTPException) -> Response:
        # Unknown paths and methods; bounded label values, so the path itself is not counted.
        if gateway is not None and not gateway.admin_key.matches(http.headers):
            try:
                _authenticate(gateway, http)
            except ApiError as refused:
                return await _refused(http, refused)
        _requests.labels("unknown", error.status_code).inc()
        refusal = not_served(http, error)
        headers = {**(error.headers or {}), "X-Request-ID": request_id_of(http)}
        return Response(refusal.body(), error.status_code, headers, media_type="application/json")

    @app.exception_handler(Exception)
    async def _broken(http: Request, error: Exception) -> Response:
        # Starlette logs the traceback after this.
        if not getattr(http.state, "is_counted", False):
            _requests.labels(_endpoint(http), 500).inc()
        broken = internal_error("gateway")
        return Response(broken.body(), 500, names_of(http), media_type="application/json")


def _add_models(app: FastAPI, gateway: Gateway) -> None:
    """Add the endpoints of the public API."""

    @app.post("/v1/completions", openapi_extra=_takes(CompletionRequest), responses=_ERRORS)
    async def completions(http: Request) -> Response:
        """Complete one or more prompts, whole or as server-sent events."""
        return await _dispatch(gateway, http, partial(parse_request, CompletionRequest))

    @app.post("/v1/chat/completions", openapi_extra=_takes(ChatCompletionRequest), responses=_ERRORS)
    async def chat_completions(http: Request) -> Response:
        """Answer a chat, whole or as server-sent events."""
        return await _dispatch(gateway, http, partial(parse_request, ChatCompletionRequest))

    @app.post("/v1/messages", openapi_extra=_TAKES_OBJECT, responses=_ERRORS)
    async def messages(http: Request) -> Response:
        """Answer a chat in the form of Anthropic's API, by an engine that has it."""
        return await _relay(gateway, http, partial(serve_any_engine, gateway, http, MESSAGES))

    @app.post("/v1/responses", openapi_extra=_TAKES_OBJECT, responses=_ERRORS)
    async def engine_responses(http: Request) -> Response:
        """Answer in the form of OpenAI's responses, by an engine that has them."""
        return await _relay(gateway, http, partial(serve_any_engine, gateway, http, RESPONSES))

    @app.post(EMBEDDINGS, openapi_extra=_TAKES_OBJECT, responses=_ERRORS)
    async def embeddings(http: Request) -> Response:
        """Embeddings of texts, by any ready engine that has the endpoint."""
        return await _relay(gateway, http, partial(serve_call, gateway, http, EMBEDDINGS), has_rules=False)

    @app.post("/tokenize", openapi_extra=_TAKES_OBJECT, responses=_ERRORS)
    async def engine_tokens(http: Request) -> Response:
        """The tokens of a text or chat, by any ready engine that has the endpoint."""
        return await _relay(gateway, http, partial(serve_call, gateway, http, "/tokenize"))

    @app.post("/detokenize", openapi_extra=_TAKES_OBJECT, responses=_ERRORS)
    async def engine_text(http: Request) -> Response:
        """The text of tokens, by any ready engine that has the endpoint."""
        return await _relay(gateway, http, partial(serve_call, gateway, http, "/detokenize"))

    @app.post(_COUNT_TOKENS, openapi_extra=_TAKES_OBJECT, responses=_ERRORS)
    async def count_tokens(http: Request) -> Response:
        """The number of tokens of a message of Anthropic's API, by any ready engine that has the endpoint."""
        return await _relay(gateway, http, partial(serve_call, gateway, http, _COUNT_TOKENS))

    @app.get("/v1/models")
    async def models(http: Request) -> Response:
        """List the model, or the models of the engines behind the gateway."""
        _authenticate(gateway, http)
        return Response(to_json(ModelList(await _cards(gateway))), media_type="application/json")

    @app.get("/v1/models/{model:path}", responses={404: _ERRORS[404]})
    async def model(http: Request, model: str) -> Response:
        """Describe one model."""
        _authenticate(gateway, http)
        cards = await _cards(gateway)
        for card in cards:
            if card.id == model:
                return Response(to_json(card), media_type="application/json")
        raise model_not_found(model, ", ".join(card.id for card in cards))


def _takes(shape: type[AnyRequest]) -> dict[str, Any]:
    """The request's schema for ``/openapi.json``; we parse the body ourselves, for better errors."""
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


_COUNT_TOKENS = "/v1/messages/count_tokens"
_TAKES_OBJECT: dict[str, Any] = {
    "requestBody": {"required": True, "content": {"application/json": {"schema": {"type": "object"}}}}
}


async def _fronts_engines(gateway: Gateway) -> bool:
    """Whether requests go to other engines. Raises ApiError, 503, while no instance has shown what it is."""
    if await gateway.fronts_engines():
        return True
    if gateway.settings.protocol == "auto" and gateway.backends.are_own_workers is None:
        raise await gateway.no_instance()
    return False


async def _relay(
    gateway: Gateway,
    http: Request,
    serve: Callable[[bytes], Awaitable[Response]],
    has_rules: bool = True,
) -> Response:
    """Answer one request by other engines. Raises ApiError, 404 where only our workers are."""
    _authenticate(gateway, http)
    check_content_type(http.headers)
    content = await read_body(http, gateway.settings.max_body_bytes)
    if not await _fronts_engines(gateway):
        message = (
            f"{_endpoint(http)} is not served: the workers behind this gateway are mooncake workers, which "
            "have /v1/completions and /v1/chat/completions; other engines, such as vLLM, may have more"
        )
        raise ApiError(404, message, code="endpoint_not_served")
    if has_rules:  # what is embedded is not a prompt
        content = await cleaned(gateway.hygiene_rules, http, content)
    response = await serve(content)
    _count_answer(http, response)
    return response


async def _dispatch(
    gateway: Gateway, http: Request, parse: Callable[[bytes], CompletionRequest | ChatCompletionRequest]
) -> Response:
    """Answer one request, by our workers or by other engines."""
    _authenticate(gateway, http)  # before a byte of the body is read
    check_content_type(http.headers)
    content = await read_body(http, gateway.settings.max_body_bytes)
    content = await cleaned(gateway.hygiene_rules, http, content)
    if await _fronts_engines(gateway):
        api = CHAT if _endpoint(http) == CHAT.path else COMPLETIONS
        response = await serve_any_engine(gateway, http, api, content)
    else:
        response = await serve_own_workers(gateway, http, await large_json.decoded(content, parse))
    _count_answer(http, response)
    return response


_STATUS_OF = {StreamOutcome.COMPLETE: "200", StreamOutcome.BROKEN: "broken", StreamOutcome.CLIENT_LEFT: "499"}


def _count_answer(http: Request, response: Response) -> None:
    """Count a request that was served: a stream at its end, as it may break until then."""
    http.state.is_counted = True
    endpoint = _endpoint(http)
    if isinstance(response, EventStreamResponse):
        response.on_outcome = lambda outcome: _requests.labels(endpoint, _STATUS_OF[outcome]).inc()
    else:
        _requests.labels(endpoint, 200).inc()


def _authenticate(gateway: Gateway, http: Request) -> None:
    """Note the client in the request's state. Raises ApiError, 401, where a key is needed and wrong."""
    clients = gateway.clients
    http.state.client = None if clients is None else clients.of(http.headers, _is_of_messages(http))


def _is_of_messages(http: Request) -> bool:
    return _endpoint(http).startswith(MESSAGES.path)


async def _cards(gateway: Gateway) -> list[ModelCard]:
    """The model under our name, and under the names of other engines."""
    if not await gateway.fronts_engines():
        with contextlib.suppress(ApiError, TimeoutError):  # without a worker the length is left out
            async with asyncio.timeout(LENGTH_TIMEOUT_S):
                await gateway.context_length()
        return [gateway.model_card()]
    own = gateway.model_card()
    found = await gateway.backends.models(gateway.scheduling)
    return [*found, *([own] if own.id not in [card.id for card in found] else [])]


def _endpoint(http: Request) -> str:
    """The path template of the route: a label with few values."""
    return str(getattr(http.scope.get("route"), "path", "unknown"))

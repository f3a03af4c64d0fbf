# SPDX-License-Identifier: Apache-2.0
"""The admin API: instances are added and removed at run time, KV is moved to them; health, state and
explanations are shown.

Owns the admin calls and their authorization. Clients without the key change nothing and learn little: that
the gateway is alive and whether it can serve. Details (``/status``, ``/story``, ``/metrics``) need the key,
or come from a port of their own (``metrics_port``), which listens on loopback by default.

``GET /v1/requests/{id}/explain`` answers why a request was served as it was. That reveals what was cached
and how busy workers were, so it is for the client of that request and for operators. An id that this server
generated (of the answer, or a request id that the client omitted) can't be guessed: knowing it proves that
one has the answer. A request id that a client chose can be guessed, so it needs the admin key. Where clients
have keys of their own, an explanation is for the key of the request. Operators may query all: with the admin
key, or at the operators' port.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse
from msgspec import Meta

import mooncake
from mooncake import clock, metrics
from mooncake.conductor.explanation import Explanation
from mooncake.conductor.messages import AddInstance, Drain, Finished
from mooncake.errors import InvalidArgument, MooncakeError
from mooncake.gateway.cache_misses import MissReport
from mooncake.gateway.gateway import Gateway
from mooncake.gateway.limiter import Permit
from mooncake.gateway.moves import MovedChoice, MovedPrompt
from mooncake.gateway.own_workers import prompt_to_move
from mooncake.gateway.request_ids import RequestIds
from mooncake.gateway.request_parsing import names_of
from mooncake.http import large_json
from mooncake.http.api_requests import read_body
from mooncake.http.openai import (
    STREAM_END,
    AnyRequest,
    ApiError,
    ChatCompletionRequest,
    CompletionRequest,
    gateway_stopping,
    model_not_found,
    parse_request,
)
from mooncake.http.sse import EventStreamResponse, cancel_on_disconnect
from mooncake.rpc.client import split_address
from mooncake.types import InstanceId, WorkerRole

ShapeT = TypeVar("ShapeT", bound=msgspec.Struct)

MAX_ADMIN_BODY_BYTES = 64 << 10


class InstanceChange(msgspec.Struct):
    """The body of ``/instances/…``."""

    type: Literal["prefill", "decode"]
    instance: Annotated[str, Meta(min_length=3, max_length=300)]
    port: Annotated[int, Meta(gt=0, lt=1 << 16)] | None = None
    "Port of its connector, if the other side needs it."


class MoveBody(msgspec.Struct):
    """The body of ``/v1/kv/move``. A prompt's other fields are those of a completion or a chat."""

    to: Annotated[str, Meta(min_length=3, max_length=300)]
    id: Annotated[str, Meta(min_length=1, max_length=200)] | None = None
    model: str | None = None
    prompt: msgspec.Raw = msgspec.Raw(b"null")
    messages: msgspec.Raw = msgspec.Raw(b"null")
    stream: bool | None = None


class MovedAnswer(msgspec.Struct):
    """The outcome for each choice of an answer in progress."""

    id: str
    to: InstanceId
    choices: list[MovedChoice]
    seconds: float


WhyNotReady = Callable[[], Awaitable[str]]
"""Returns why a process can't serve a request; empty if it can."""


def add_routes(
    app: FastAPI, gateway: Gateway, is_inside: bool = False, why_not_ready: WhyNotReady | None = None
) -> None:
    """Add all endpoints but OpenAI's.

    Args:
        is_inside: every client of this application is an operator.
        why_not_ready: of a process that needs more of an instance than that it is ready.
    """

    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> dict[str, str]:
        """Whether the gateway's process answers."""
        return {"status": "ok"}

    @app.head("/ready", include_in_schema=False)
    @app.get("/ready", responses={503: {"description": "No instance is ready, or the gateway is stopping"}})
    async def ready() -> dict[str, str]:
        """Whether a request can be served: 503 while no instance is ready, or the gateway is stopping."""
        if gateway.limiter.is_stopping:
            raise gateway_stopping()
        if why_not_ready is not None and (reason := await why_not_ready()):
            raise ApiError(503, reason, code="no_instance", retry_after_s=1.0)
        rows = await gateway.scheduling.status()
        if not any(row.health == "ready" for row in rows):
            states = ", ".join(f"one is {row.health}" for row in rows) or "none was added"
            raise ApiError(503, f"no instance is ready: {states}", code="no_instance", retry_after_s=1.0)
        return {"status": "ready"}

    @app.get("/version")
    async def version() -> dict[str, str]:
        """Version of the program."""
        return {"version": mooncake.__version__}

    @app.get("/metrics", response_class=PlainTextResponse, responses=KEY_ERRORS)
    async def metrics_page(http: Request) -> Response:
        """Metrics: Prometheus reads them at the operators' port, or sends the key as its bearer token."""
        _check_key(gateway, http, is_inside)
        body, headers = metrics.page_for(http.headers)
        return Response(body, headers=headers)

    @app.get("/status")
    async def status(http: Request) -> Response:
        """The instances in detail with the key; without it only their number."""
        found = await _status(gateway)
        if not is_inside and gateway.admin_key.refusal(http.headers) is not None:
            found = {name: found[name] for name in _PUBLIC_FIELDS}
        return _json(found)

    @app.get("/story/{key:path}", responses={**KEY_ERRORS, 404: _ERRORS[404], 503: _ERRORS[503]})
    async def story(http: Request, key: str) -> Response:
        """The conductor's actions for an answer (by its ``id``) or an instance, with reasons."""
        _check_key(gateway, http, is_inside)
        try:
            return _json({"key": key, "story": await gateway.scheduling.story(key)})
        except MooncakeError as error:
            raise ApiError(503, str(error), code=error.code, retry_after_s=1.0) from error

    @app.post("/instances/add", openapi_extra=_TAKES_CHANGE, responses=_ERRORS)
    async def add(http: Request) -> Response:
        """Add an instance, or change its role; needs the admin key."""
        change = await _change(gateway, http)
        if change.port is not None:
            gateway.backends.ports[change.instance] = change.port
        gateway.backends.joined(change.instance)
        gateway.max_model_len = None
        await _apply(gateway, AddInstance(change.instance, WorkerRole(change.type)))
        return _json({"message": f"added {change.instance} to {change.type}", "status": "added"})

    @app.post("/instances/remove", openapi_extra=_TAKES_CHANGE, responses=_ERRORS)
    async def remove(http: Request) -> Response:
        """Stop sending requests to an instance, move its answers, and remove it when all are done."""
        change = await _known(gateway, await _change(gateway, http))
        await _apply(gateway, Drain(change.instance))
        await gateway.moves.refresh()
        for row in await gateway.scheduling.status():
            if row.instance == change.instance:
                message = f"{change.instance} leaves {change.type} when its {row.num_requests} requests end"
                return _json({"message": message, "status": "draining"})
        return _json({"message": f"removed {change.instance} from {change.type}", "status": "removed"})

    @app.get("/healthcheck")
    async def healthcheck() -> Response:
        """Health in the form of the existing packages' proxies."""
        rows = await gateway.scheduling.status()
        counts = {f"{role}_instances": sum(row.role is role for row in rows) for role in WorkerRole}
        return _json({"status": "ok", **counts})

    @app.post("/instances/drain", openapi_extra=_TAKES_CHANGE, responses=_ERRORS)
    async def drain(http: Request) -> Response:
        """Send an instance no more requests, and move its answers; then it leaves. Needs the admin key."""
        change = await _known(gateway, await _change(gateway, http))
        await _apply(gateway, Drain(change.instance))
        await gateway.moves.refresh()
        return _json({"message": f"draining {change.instance}", "status": "draining"})

    @app.post("/v1/kv/move", openapi_extra=_TAKES_MOVE, responses=_MOVE_ERRORS)
    async def move(http: Request) -> Response:
        """Move a prompt's KV, or an answer in progress with its KV, to an instance; needs the admin key."""
        _check_key(gateway, http, is_inside=False)
        content = await read_body(http, gateway.settings.max_body_bytes)
        body = await large_json.decoded(content, partial(_read, MoveBody))
        body.to = _address("to", body.to)
        return await _move(gateway, http, body, content)

    _add_explanation(app, gateway, is_inside)


_ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"description": "A field is wrong; `error.param` names it"},
    401: {"description": "The key is missing or wrong"},
    403: {"description": "No admin key is set here"},
    404: {"description": "No such instance"},
    503: {"description": "The conductor can't be reached"},
}
KEY_ERRORS: dict[int | str, dict[str, Any]] = {number: _ERRORS[number] for number in (401, 403)}
_PUBLIC_FIELDS = ("model", "degraded", "prefill_node_count", "decode_node_count")
"""Fields of ``/status`` that clients without the key may see."""


def _takes(schema: dict[str, Any]) -> dict[str, Any]:
    """The description of an endpoint that reads a JSON body itself."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


_TAKES_CHANGE = _takes(
    {
        "type": "object",
        "required": ["type", "instance"],
        "properties": {
            "type": {"enum": ["prefill", "decode"]},
            "instance": {"type": "string", "examples": ["127.0.0.1:8101"]},
            "port": {"type": "integer", "minimum": 1, "maximum": 65535},
        },
    }
)


async def _status(gateway: Gateway) -> dict[str, Any]:
    rows = await gateway.scheduling.status()
    ready = {role: sum(row.role is role and row.health == "ready" for row in rows) for role in WorkerRole}
    degraded = ""
    if not any(ready.values()):
        degraded = "no instance is ready"
    elif not all(ready.values()):
        missing = WorkerRole.DECODE if ready[WorkerRole.PREFILL] else WorkerRole.PREFILL
        degraded = f"no {missing} instance is ready"
    admission = await gateway.scheduling.admission()
    found: dict[str, Any] = {
        "model": gateway.settings.model_name,
        "max_model_len": gateway.max_model_len,
        "scheduling": admission.scheduling or gateway.settings.scheduling,
        "block_tokens": gateway.settings.block_tokens,
        "admission": admission,
        "scaling": await gateway.scheduling.scaling(),
        "protocol": gateway.protocol if gateway.seems_to_front_engines else "workers",
        "conductor": gateway.conductor_state,
        "conductors": gateway.conductors,
        "degraded": degraded,
        "requests_in_flight": gateway.limiter.num_in_flight,
        "instances": rows,
    }
    for role in WorkerRole:
        nodes = [row.instance for row in rows if row.role is role]
        found |= {f"{role}_node_count": len(nodes), f"{role}_nodes": nodes}
    return found


async def _change(gateway: Gateway, http: Request) -> InstanceChange:
    """The body of an admin call after its key was checked.

    Raises:
        ApiError: 401 wrong key, 403 no key is set here, 400 naming the wrong field.
    """
    _check_key(gateway, http, is_inside=False)
    change = _read(InstanceChange, await read_body(http, MAX_ADMIN_BODY_BYTES))
    change.instance = _address("instance", change.instance)
    return change


def _read(shape: type[ShapeT], body: bytes) -> ShapeT:
    """Decode a body. Raises ApiError, 400 naming the wrong field."""
    try:
        return large_json.decode_as(body, shape)
    except msgspec.ValidationError as error:
        field = str(error).partition("`$.")[2].rstrip("`") or None
        if "required field" in str(error):
            field = str(error).partition("required field `")[2].partition("`")[0]
        raise ApiError(400, f"{error}", param=field, code="invalid_value") from error
    except msgspec.DecodeError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error


def _address(field: str, text: str) -> InstanceId:
    """The instance that a field names. Raises ApiError, 400."""
    instance = text.removeprefix("http://").rstrip("/")
    try:
        split_address(instance)
    except InvalidArgument as error:
        message = f"{field} is {instance!r}; allowed: host:port"
        raise ApiError(400, message, param=field, code="invalid_value") from error
    return instance


def _check_key(gateway: Gateway, http: Request, is_inside: bool) -> None:
    """Raises ApiError: 401 wrong key, 403 no key is set here."""
    refusal = None if is_inside else gateway.admin_key.refusal(http.headers)
    if refusal is not None:
        raise ApiError(refusal.status, refusal.message, code=refusal.code)


async def _apply(gateway: Gateway, event: AddInstance | Drain) -> None:
    try:
        await gateway.scheduling.change(event)
    except MooncakeError as error:
        raise ApiError(503, f"nothing was changed: {error}", code=error.code, retry_after_s=1.0) from error


async def _known(gateway: Gateway, change: InstanceChange) -> InstanceChange:
    for row in await gateway.scheduling.status():
        if row.instance == change.instance:
            if row.role.value == change.type:
                return change
            message = f"{change.instance} is a {row.role} instance, not a {change.type} instance"
            raise ApiError(404, message, param="type", code="no_such_instance")
    raise _no_instance(change.instance, "instance")


def _json(answer: Any) -> Response:
    return Response(msgspec.json.encode(answer), media_type="application/json")


# --- moves of KV


_TAKES_MOVE = _takes(
    {
        "type": "object",
        "required": ["to"],
        "oneOf": [{"required": [name]} for name in ("id", "prompt", "messages")],
        "properties": {
            "to": {"type": "string", "examples": ["127.0.0.1:8101"]},
            "id": {"type": "string", "maxLength": 200, "examples": ["cmpl-5f0c"]},
            "prompt": {"type": ["string", "array"]},
            "messages": {"type": "array"},
            "cache_salt": {"type": "string", "maxLength": 1024},
            "model": {"type": "string"},
            "stream": {"type": "boolean"},
        },
    }
)
_MOVE_ERRORS: dict[int | str, dict[str, Any]] = {
    **_ERRORS,
    404: {"description": "No such instance, model or answer in progress; or other engines than our workers"},
    409: {"description": "The instance is not ready, drains, or has the wrong role"},
    429: {"description": "Too much is in progress, here or at the instance"},
    504: {"description": "The deadline has passed"},
}


async def _move(gateway: Gateway, http: Request, body: MoveBody, content: bytes) -> Response:
    """Carry out a move. Errors before its beginning have a status of their own. Raises ApiError."""
    is_chat, is_prompt = bytes(body.messages) != b"null", bytes(body.prompt) != b"null"
    if (body.id is not None) + is_chat + is_prompt != 1:
        message = "a move has exactly one of id, prompt and messages"
        raise ApiError(400, message, param="id" if body.id is not None else "prompt", code="invalid_value")
    if body.model is not None and body.model != gateway.settings.model_name:
        raise model_not_found(body.model, gateway.settings.model_name)
    request: AnyRequest | None = None
    if is_chat:
        request = await large_json.decoded(content, partial(parse_request, ChatCompletionRequest))
    elif is_prompt:
        request = await large_json.decoded(content, partial(parse_request, CompletionRequest))
    if await gateway.fronts_engines():
        message = "KV is moved between mooncake workers only, and other engines are behind this gateway"
        raise ApiError(404, message, code="endpoint_not_served")
    others = await _others(gateway, body.to, is_answer=request is None)
    began = clock.monotonic()
    if request is None:
        answer_id = body.id or ""

        async def act() -> MovedPrompt | MovedAnswer:
            choices = await gateway.moves.move_answer(answer_id, body.to, others)
            if choices is None:
                message = f"no answer {answer_id!r} is generated through this gateway now"
                raise ApiError(404, message, param="id", code="request_not_found")
            return MovedAnswer(answer_id, body.to, choices, round(clock.monotonic() - began, 6))

        return await _moved(http, body, act, lambda: None)
    prompt = await prompt_to_move(gateway, http, request)
    entry = Permit(gateway.limiter, None, 1, began)

    def leave() -> None:
        prompt.end(Finished(prompt.place_id))
        entry.leave(clock.monotonic())

    async def load() -> MovedPrompt | MovedAnswer:
        timeout_s = gateway.settings.request_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await prompt.move_to(body.to, others, request.cache_salt)
        except TimeoutError:
            message = f"{body.to} did not have the prompt's KV within {timeout_s:g} s"
            gateway.moves.prompt_refused(prompt.place_id, body.to, message)
            raise ApiError(504, message, code="deadline_exceeded") from None

    return await _moved(http, body, load, leave)


async def _moved(
    http: Request,
    body: MoveBody,
    act: Callable[[], Awaitable[MovedPrompt | MovedAnswer]],
    leave: Callable[[], None],
) -> Response:
    """The result of a move, or two events, of its beginning and its end; ``leave`` is called in any case."""
    if not body.stream:
        try:
            return _json(await cancel_on_disconnect(http, act()))
        finally:
            leave()

    async def events() -> AsyncGenerator[bytes, None]:
        yield _event({"status": "started", "to": body.to})
        found = await act()
        yield _event({"status": "done", **msgspec.to_builtins(found)})
        yield STREAM_END

    following = events()
    first = await anext(following)
    return EventStreamResponse(first, following, names_of(http), leave)


def _event(fields: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(fields) + b"\n\n"


async def _others(gateway: Gateway, target: InstanceId, is_answer: bool) -> list[InstanceId]:
    """All instances but ``target``, to which an answer or a prompt can move now.

    Raises:
        ApiError: 404 there is no such instance; 409 it can't get the KV now, or has the wrong role.
    """
    try:
        rows = await gateway.scheduling.status()
    except MooncakeError as error:
        raise ApiError(503, f"nothing was moved: {error}", code=error.code, retry_after_s=1.0) from error
    found = next((row for row in rows if row.instance == target), None)
    if found is None:
        raise _no_instance(target, "to")
    if found.health != "ready":
        message = f"{target} is {found.health}: {found.detail}"
        raise ApiError(409, message, param="to", code="instance_not_ready")
    if is_answer and found.role is not WorkerRole.DECODE:
        message = f"{target} is a {found.role} instance, and answers move to decode instances"
        raise ApiError(409, message, param="to", code="wrong_role")
    return [row.instance for row in rows if row.instance != target]


def _no_instance(instance: InstanceId, field: str) -> ApiError:
    message = f"there is no instance {instance}; GET /status lists them"
    return ApiError(404, message, param=field, code="no_such_instance")


# --- explanations


MOST_EXPLAINED = 16
"""Prompts of one request that are explained: each takes milliseconds in which nothing else is served."""


class ExplainAnswer(msgspec.Struct):
    """``prompts``: one explanation for each of the first prompts of the request that is still remembered."""

    id: str
    request_id: str
    prompts: list[Explanation]
    misses: list[MissReport | None]
    "For each of them: where it left its nearest sibling, and what became of its tokens; null: unknown here."
    num_left_off: int = 0
    "Number of its prompts after these."


def _add_explanation(app: FastAPI, gateway: Gateway, is_inside: bool) -> None:
    one_at_a_time = asyncio.Lock()

    @app.get("/v1/requests/{name:path}/explain", responses=EXPLANATION_ERRORS)
    async def explain(http: Request, name: str) -> Response:
        """Candidates, choice, prediction and measurements of a request, and why its blocks missed."""
        names = allowed_ids(gateway, http, name, is_inside)
        # Clients without keys of their own are not distinguished.
        may_see_sibling = is_operator(gateway, http, is_inside) or gateway.clients is not None
        try:
            place_ids = names.place_ids[:MOST_EXPLAINED]
            found = [await gateway.scheduling.explain(place_id) for place_id in place_ids]
        except MooncakeError as error:
            raise ApiError(503, str(error), code=error.code, retry_after_s=1.0) from error
        known = [one for one in found if one is not None]
        if not known:
            raise unknown_request(name)
        reports = [
            await asyncio.to_thread(gateway.misses.report, one.request_id, may_see_sibling) for one in known
        ]
        num_left_off = len(names.place_ids) - len(place_ids)
        return _json(ExplainAnswer(names.id, names.request_id, known, reports, num_left_off))

    @app.get("/v1/cache/misses", responses=KEY_ERRORS)
    async def misses(http: Request) -> Response:
        """What became of prompts' tokens, by cause: the asking client's tenant, or all with the admin key."""
        tenant = None
        if not is_operator(gateway, http, is_inside):
            if gateway.clients is None:
                _check_key(gateway, http, is_inside)
            else:
                tenant = gateway.clients.of(http.headers).entry.tenant_name
        async with one_at_a_time:  # it classifies what was not asked for yet
            return _json(await asyncio.to_thread(gateway.misses.sums, tenant))


def allowed_ids(gateway: Gateway, http: Request, name: str, is_inside: bool) -> RequestIds:
    """The ids of the request ``name``, if this client may see what was done for it. Raises ApiError."""
    names = gateway.request_ids.find(name)
    if is_operator(gateway, http, is_inside):
        return names or RequestIds(name, "", True, [name])
    if gateway.clients is not None:
        client = gateway.clients.of(http.headers)
        if names is None or names.client != client.name:
            raise unknown_request(name)  # as if it did not exist: it may be another client's
    elif names is None:
        # The conductor may remember a request from before this gateway was started.
        names = RequestIds(name, "", True, [name])
    elif name != names.id and not names.is_secret:
        _check_key_for_chosen_id(gateway, http)
    return names


def is_operator(gateway: Gateway, http: Request, is_inside: bool) -> bool:
    """Whether the request comes from an operator."""
    return is_inside or gateway.admin_key.refusal(http.headers) is None


def client_or_refusal(gateway: Gateway, http: Request) -> str:
    """Name of the client whose key the request has. Raises ApiError, 401 or 403, where it has none."""
    if gateway.clients is not None:
        return gateway.clients.of(http.headers).name
    _check_key(gateway, http, is_inside=False)
    return ""


EXPLANATION_ERRORS: dict[int | str, dict[str, str]] = {
    401: {"description": "A request id that its client chose needs the admin key"},
    404: {"description": "No such request is remembered"},
    503: {"description": "The conductor can't be reached"},
}


def unknown_request(name: str) -> ApiError:
    message = f"no request {name[:128]!r} is remembered; only the latest ones are"
    return ApiError(404, message, param="id", code="request_not_found")


def _check_key_for_chosen_id(gateway: Gateway, http: Request) -> None:
    if gateway.admin_key.refusal(http.headers) is not None:
        message = (
            "this X-Request-ID was chosen by its client and could be guessed: ask by the answer's id "
            "(X-Mooncake-ID), or send X-API-Key"
        )
        raise ApiError(401, message, code="invalid_api_key")

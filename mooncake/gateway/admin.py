# SPDX-License-Identifier: Apache-2.0
"""The admin API: instances are added and removed at run time; health, state and explanations are shown.

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

from typing import Annotated, Any, Literal

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse
from msgspec import Meta

import mooncake
from mooncake import metrics
from mooncake.conductor.explanation import Explanation
from mooncake.conductor.messages import AddInstance, Drain
from mooncake.errors import InvalidArgument, MooncakeError
from mooncake.gateway.gateway import Gateway
from mooncake.gateway.request_ids import RequestIds
from mooncake.gateway.request_parsing import read_body
from mooncake.http.openai import ApiError
from mooncake.rpc.client import split_address
from mooncake.types import WorkerRole

MAX_ADMIN_BODY_BYTES = 64 << 10


class InstanceChange(msgspec.Struct):
    """The body of ``/instances/…``."""

    type: Literal["prefill", "decode"]
    instance: Annotated[str, Meta(min_length=3, max_length=300)]
    port: Annotated[int, Meta(gt=0, lt=1 << 16)] | None = None
    "Port of its connector, if the other side needs it."


def add_routes(app: FastAPI, gateway: Gateway, is_inside: bool = False) -> None:
    """Add all endpoints but OpenAI's. ``is_inside``: every client of this application is an operator."""

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Whether the gateway's process answers."""
        return {"status": "ok"}

    @app.get("/ready", responses={503: {"description": "No instance is ready"}})
    async def ready() -> dict[str, str]:
        """Whether a request can be served: 503 while no instance is ready."""
        rows = await gateway.scheduling.status()
        if not any(row.health == "ready" for row in rows):
            states = ", ".join(f"one is {row.health}" for row in rows) or "none was added"
            raise ApiError(503, f"no instance is ready: {states}", code="no_instance", retry_after_s=1.0)
        return {"status": "ready"}

    @app.get("/version")
    async def version() -> dict[str, str]:
        """Version of the program."""
        return {"version": mooncake.__version__}

    @app.get("/metrics", response_class=PlainTextResponse, responses=_KEY_ERRORS)
    async def metrics_page(http: Request) -> Response:
        """Metrics: Prometheus reads them at the operators' port, or sends the key as its bearer token."""
        _check_key(gateway, http, is_inside)
        return Response(metrics.page(), headers={"Content-Type": metrics.CONTENT_TYPE})

    @app.get("/status")
    async def status(http: Request) -> Response:
        """The instances in detail with the key; without it only their number."""
        found = await _status(gateway)
        if not is_inside and gateway.admin_key.refusal(http.headers) is not None:
            found = {name: found[name] for name in _PUBLIC_FIELDS}
        return _json(found)

    @app.get("/story/{key:path}", responses={**_KEY_ERRORS, 404: _ERRORS[404], 503: _ERRORS[503]})
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
        gateway.backends.forget(change.instance)
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

    _add_explanation(app, gateway, is_inside)


_ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"description": "A field is wrong; `error.param` names it"},
    401: {"description": "The key is missing or wrong"},
    403: {"description": "No admin key is set here"},
    404: {"description": "No such instance"},
    503: {"description": "The conductor can't be reached"},
}
_KEY_ERRORS: dict[int | str, dict[str, Any]] = {number: _ERRORS[number] for number in (401, 403)}
_PUBLIC_FIELDS = ("model", "degraded", "prefill_node_count", "decode_node_count")
"""Fields of ``/status`` that clients without the key may see."""

_TAKES_CHANGE: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "required": ["type", "instance"],
                    "properties": {
                        "type": {"enum": ["prefill", "decode"]},
                        "instance": {"type": "string", "examples": ["127.0.0.1:8101"]},
                        "port": {"type": "integer", "minimum": 1, "maximum": 65535},
                    },
                }
            }
        },
    }
}


async def _status(gateway: Gateway) -> dict[str, Any]:
    rows = await gateway.scheduling.status()
    ready = {role: sum(row.role is role and row.health == "ready" for row in rows) for role in WorkerRole}
    degraded = ""
    if not any(ready.values()):
        degraded = "no instance is ready"
    elif not all(ready.values()):
        missing = WorkerRole.DECODE if ready[WorkerRole.PREFILL] else WorkerRole.PREFILL
        degraded = f"no {missing} instance is ready"
    found: dict[str, Any] = {
        "model": gateway.settings.model_name,
        "max_model_len": gateway.max_model_len,
        "scheduling": gateway.settings.scheduling,
        "admission": await gateway.scheduling.admission(),
        "scaling": await gateway.scheduling.scaling(),
        "protocol": gateway.protocol if gateway.seems_to_front_engines else "workers",
        "conductor": gateway.conductor_state,
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
    body = await read_body(http, MAX_ADMIN_BODY_BYTES)
    try:
        change = msgspec.json.decode(body, type=InstanceChange)
    except msgspec.ValidationError as error:
        field = str(error).partition("`$.")[2].rstrip("`") or None
        if "required field" in str(error):
            field = str(error).partition("required field `")[2].partition("`")[0]
        raise ApiError(400, f"{error}", param=field, code="invalid_value") from error
    except msgspec.DecodeError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    change.instance = change.instance.removeprefix("http://").rstrip("/")
    try:
        split_address(change.instance)
    except InvalidArgument as error:
        message = f"instance is {change.instance!r}; allowed: host:port"
        raise ApiError(400, message, param="instance", code="invalid_value") from error
    return change


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
    message = f"there is no instance {change.instance}; GET /status lists them"
    raise ApiError(404, message, param="instance", code="no_such_instance")


def _json(answer: Any) -> Response:
    return Response(msgspec.json.encode(answer), media_type="application/json")


# --- explanations


class ExplainAnswer(msgspec.Struct):
    """``prompts``: one explanation for each prompt of the request that is still remembered."""

    id: str
    request_id: str
    prompts: list[Explanation]


def _add_explanation(app: FastAPI, gateway: Gateway, is_inside: bool) -> None:

    @app.get("/v1/requests/{name:path}/explain", responses=_EXPLANATION_ERRORS)
    async def explain(http: Request, name: str) -> Response:
        """Candidates, choice, prediction and measurements of a request, and why its blocks missed."""
        names = gateway.request_ids.find(name)
        if is_inside or gateway.admin_key.refusal(http.headers) is None:
            names = names or RequestIds(name, "", True, [name])
        elif gateway.clients is not None:
            client = gateway.clients.of(http.headers)
            if names is None or names.client != client.name:
                raise _unknown(name)  # as if it did not exist: it may be another client's
        elif names is None:
            # The conductor may remember a request from before this gateway was started.
            names = RequestIds(name, "", True, [name])
        elif name != names.id and not names.is_secret:
            _check_key_for_chosen_id(gateway, http)
        try:
            found = [await gateway.scheduling.explain(place_id) for place_id in names.place_ids]
        except MooncakeError as error:
            raise ApiError(503, str(error), code=error.code, retry_after_s=1.0) from error
        known = [one for one in found if one is not None]
        if not known:
            raise _unknown(name)
        answer = ExplainAnswer(names.id, names.request_id, known)
        return _json(answer)


_EXPLANATION_ERRORS: dict[int | str, dict[str, str]] = {
    401: {"description": "A request id that its client chose needs the admin key"},
    404: {"description": "No such request is remembered"},
    503: {"description": "The conductor can't be reached"},
}


def _unknown(name: str) -> ApiError:
    message = f"no request {name[:128]!r} is remembered; only the latest ones are"
    return ApiError(404, message, param="id", code="request_not_found")


def _check_key_for_chosen_id(gateway: Gateway, http: Request) -> None:
    if gateway.admin_key.refusal(http.headers) is not None:
        message = (
            "this X-Request-ID was chosen by its client and could be guessed: ask by the answer's id "
            "(X-Mooncake-ID), or send X-API-Key"
        )
        raise ApiError(401, message, code="invalid_api_key")

# SPDX-License-Identifier: Apache-2.0
"""Traces of requests at the gateway: their root span, their collection from other processes, their endpoints.

``GET /v1/requests`` lists the latest requests, ``GET /v1/requests/{id}/trace`` returns the spans of one, of
every process that took part. Both need what an explanation needs (``admin.py``): an operator sees all, a
client with a key what it has sent, and a client without one its own by the id of the answer. Workers and
conductors keep their part of a trace and are asked for it only then.
"""

from __future__ import annotations

import asyncio
import re

import msgspec
from fastapi import FastAPI, Request, Response

from mooncake import clock
from mooncake.gateway import admin
from mooncake.gateway.any_engine import EMBEDDINGS
from mooncake.gateway.engine_apis import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from mooncake.gateway.gateway import Gateway
from mooncake.gateway.worker_client import WorkerFailed
from mooncake.http.openai import ApiError
from mooncake.log import get_logger
from mooncake.tracing import Attribute, RequestSpans, Span, process_tracing
from mooncake.tracing.asgi import TracedRequests
from mooncake.tracing.spans import align_clocks, reachable
from mooncake.types import InstanceId

log = get_logger(__name__)

SERVICE = "mooncake-gateway"
DEFAULT_LISTED = 100
MAX_LISTED = 1000
MAX_CALLS = 64
"""Most calls of one request whose spans are collected from other processes."""

_OPERATIONS = {
    COMPLETIONS.path: "text_completion",
    CHAT.path: "chat",
    MESSAGES.path: "chat",
    RESPONSES.path: "chat",
    EMBEDDINGS: "embeddings",
}
"""By path: the name of the operation in OpenTelemetry's conventions for generative AI."""


class RecentRequest(msgspec.Struct):
    """A request as the list has it. None and 0 where something is not known, or not yet."""

    id: str
    request_id: str
    trace_id: str
    operation: str
    model: str
    client: str
    "Client whose key the request had; for operators only."
    start_s: float
    ttft_s: float | None
    latency_s: float | None
    status: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    prefill: InstanceId
    decode: InstanceId


class RecentRequests(msgspec.Struct):
    """``kept``: most requests that are remembered, ``--tracing-requests``; 0 where none are."""

    kept: int
    requests: list[RecentRequest]


class TraceAnswer(msgspec.Struct):
    """The spans of a request: the root, and then the others by their start."""

    id: str
    request_id: str
    trace_id: str
    spans: list[Span]
    missing: list[str]
    "Processes that did not return their part."


def add_tracing(app: FastAPI, gateway: Gateway) -> None:
    """Begin the trace of each request that generates. Without traces the application is left as it is."""
    tracing = process_tracing()
    if tracing.is_on:
        app.add_middleware(
            TracedRequests,
            tracing=tracing,
            service=SERVICE,
            instance=f"{gateway.settings.host}:{gateway.settings.port}",
            names=_OPERATIONS,
            first_phase="receive",
        )


def add_trace_routes(app: FastAPI, gateway: Gateway, is_inside: bool = False) -> None:
    """``is_inside``: every client of this application is an operator."""

    @app.get("/v1/requests", responses=admin.KEY_ERRORS)
    async def requests(http: Request) -> Response:
        """The latest requests, newest first: all for operators, its own for a client with a key."""
        limit = _limit_of(http)
        name = None if admin.is_operator(gateway, http, is_inside) else admin.client_or_refusal(gateway, http)
        found = []
        for one in process_tracing().ring.latest(SERVICE):
            if name is None or one.root.attributes.get("mooncake.client") == name:
                found.append(_listed(one, with_client=name is None))
            if len(found) >= limit:
                break
        return _json(RecentRequests(process_tracing().ring.num_requests, found))

    @app.get("/v1/requests/{name:path}/trace", responses=admin.EXPLANATION_ERRORS)
    async def trace(http: Request, name: str) -> Response:
        """What each process did for a request, and when: the spans of its trace."""
        names = admin.allowed_ids(gateway, http, name, is_inside)
        found = next((one for one in process_tracing().ring.latest(SERVICE) if _id_of(one) == names.id), None)
        if found is None:
            raise admin.unknown_request(name)
        spans, missing = await collect(gateway, found)
        answer = TraceAnswer(names.id, names.request_id, found.root.trace_id, spans, missing)
        return _json(answer)


def _limit_of(http: Request) -> int:
    """Most requests in the list. Raises ApiError, 400."""
    text = http.query_params.get("limit", str(DEFAULT_LISTED))
    if re.fullmatch(r"[0-9]{1,6}", text, re.ASCII) and 1 <= int(text) <= MAX_LISTED:
        return int(text)
    message = f"limit is {text[:40]!r}; allowed: a number from 1 to {MAX_LISTED}"
    raise ApiError(400, message, param="limit", code="invalid_value")


async def collect(gateway: Gateway, request: RequestSpans) -> tuple[list[Span], list[str]]:
    """The spans of a request, with those of the processes that it called; and which ones did not answer."""
    now = clock.wall()
    own = [msgspec.structs.replace(span, end_s=span.end_s or now) for span in request.spans]
    calls = [span for span in own if span.kind == "client"][:MAX_CALLS]
    asks_workers = not gateway.seems_to_front_engines
    missing: dict[str, None] = {}

    async def ask(span: Span) -> list[Span]:
        if here := process_tracing().ring.below(span.span_id):
            return here
        instance = span.attributes.get("server.address")
        if instance is None:
            return await gateway.scheduling.spans(span.span_id)
        if not asks_workers:
            return []
        try:
            content = await gateway.workers.get(str(instance), f"/v1/spans/{span.span_id}")
            return msgspec.json.decode(content, type=list[Span])
        except (WorkerFailed, msgspec.MsgspecError) as error:
            log.info("spans_not_collected", instance=instance, reason=str(error))
            missing[str(instance)] = None
            return []

    others = await asyncio.gather(*(ask(span) for span in calls))
    spans = reachable(own[0], [*own, *(span for found in others for span in found)])
    return align_clocks(own[0], spans), list(missing)


def _listed(request: RequestSpans, with_client: bool) -> RecentRequest:
    root, attributes = request.root, request.root.attributes
    return RecentRequest(
        id=_id_of(request),
        request_id=str(attributes.get("mooncake.client_request.id", "")),
        trace_id=root.trace_id,
        operation=root.name,
        model=str(attributes.get("gen_ai.request.model", "")),
        client=str(attributes.get("mooncake.client", "")) if with_client else "",
        start_s=root.start_s,
        ttft_s=_number(attributes.get("gen_ai.latency.time_to_first_token")),
        latency_s=root.end_s - root.start_s if root.end_s else None,
        status=int(_number(attributes.get("http.response.status_code")) or 0),
        prompt_tokens=int(_number(attributes.get("gen_ai.usage.input_tokens")) or 0),
        cached_tokens=int(_number(attributes.get("gen_ai.usage.cache_read.input_tokens")) or 0),
        output_tokens=int(_number(attributes.get("gen_ai.usage.output_tokens")) or 0),
        prefill=str(attributes.get("mooncake.prefill", "")),
        decode=str(attributes.get("mooncake.decode", "")),
    )


def _id_of(request: RequestSpans) -> str:
    return str(request.root.attributes.get("mooncake.request.id", ""))


def _number(found: Attribute | None) -> float | None:
    return found if isinstance(found, int | float) else None


def _json(answer: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(answer), media_type="application/json")

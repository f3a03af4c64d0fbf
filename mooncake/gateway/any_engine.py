# SPDX-License-Identifier: Apache-2.0
"""The OpenAI endpoints in front of engines that are not our workers.

Owns the conversion of an HTTP request to a ``ProxiedRequest`` and back. It reads only the fields of the body
that it needs (the model, the prompt's beginning, whether to stream); the engine checks all others and reports
errors in them.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Awaitable
from functools import partial
from typing import Any

import msgspec
from fastapi import Request, Response

from mooncake import clock
from mooncake.conductor.messages import Place
from mooncake.gateway.any_engine_request import ProxiedRequest
from mooncake.gateway.clients import Client
from mooncake.gateway.gateway import Gateway
from mooncake.gateway.handoff import without_transfers
from mooncake.gateway.limiter import Permit
from mooncake.gateway.metrics import record_answer
from mooncake.gateway.request_ids import RequestIds
from mooncake.gateway.request_parsing import decoded, names_of, request_id_of, slo_of
from mooncake.http import large_json
from mooncake.http.openai import MAX_PRIORITY, ApiError, model_not_found
from mooncake.http.sse import EventStreamResponse, cancel_on_disconnect
from mooncake.log import get_logger

log = get_logger(__name__)

_FORWARDED_HEADERS = ("traceparent", "tracestate", "authorization")


async def serve_any_engine(gateway: Gateway, http: Request, path: str, content: bytes) -> Response:
    """Answer a request, whole or streamed. Raises ApiError."""
    request = await decoded(content, partial(_read, "messages" if "chat" in path else "prompt"))
    request = without_transfers(request, gateway.settings.trust_clients)
    slo = slo_of(http)
    num_answers = _num_answers(request)
    client: Client | None = http.state.client
    entry = Permit(gateway.limiter, client, num_answers, clock.monotonic())

    def leave() -> None:
        entry.leave(clock.monotonic())

    if client is not None:
        request["cache_salt"] = client.entry.cache_salt
    try:
        adapter = await _settle_model(gateway, request)
        answer = await _proxied_request_of(gateway, http, path, request, adapter)
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
    return EventStreamResponse(first, pieces, headers, leave, answer.deadline)


async def _accounted(answer: ProxiedRequest, http: Request, slo: Any) -> AsyncGenerator[bytes, None]:
    """Yield the pieces for the client. An error before the first raises ApiError; a later one is an event."""
    is_complete = has_begun = False
    pieces = answer.answer()
    try:
        async with contextlib.aclosing(pieces):
            while True:
                try:
                    piece = await _before(answer.deadline, anext(pieces))
                except StopAsyncIteration:
                    break
                yield b"data: " + piece + b"\n\n" if answer.is_stream else piece
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
        yield b"data: " + error.body() + b"\n\n"
    finally:
        answer.finish(is_complete)


async def _before(deadline: float, piece: Awaitable[bytes]) -> bytes:
    try:
        async with asyncio.timeout(max(0.0, deadline - clock.monotonic())):
            return await piece
    except TimeoutError:
        message = "no complete answer within the time limit; ask for fewer tokens or try again later"
        raise ApiError(504, message, code="deadline_exceeded") from None


async def _proxied_request_of(
    gateway: Gateway, http: Request, path: str, request: dict[str, Any], adapter: str
) -> ProxiedRequest:
    settings = gateway.settings
    request_id = request_id_of(http)
    answer_id = f"{'chatcmpl' if 'chat' in path else 'cmpl'}-{uuid.uuid4().hex}"
    headers = {**gateway.backends.headers, "X-Request-ID": request_id}
    # A client's key for this gateway must not reach engines.
    handed_on = _FORWARDED_HEADERS if http.state.client is None else _FORWARDED_HEADERS[:2]
    headers |= {name: http.headers[name] for name in handed_on if name in http.headers}
    names = await gateway.prompts.name(request, adapter, headers, gateway.scheduling)
    slo = slo_of(http)
    place = Place(
        answer_id,
        names.num_tokens,
        names.keys,
        http.headers.get("x-session-affinity", "")[:256],
        lifetime_s=settings.request_timeout_s + 60.0,
        slo_ttft_s=(slo.ttft_ms or 0.0) / 1000.0,
        slo_tbt_s=(slo.tbt_ms or 0.0) / 1000.0,
        priority=_int_of(request, "priority"),
        max_output_tokens=_int_of(request, "max_completion_tokens") or _int_of(request, "max_tokens"),
        scope=adapter,
        bare_keys=names.bare_keys,
        is_text=names.is_text,
    )
    is_secret = request_id != http.headers.get("x-request-id")
    name = http.state.client.name if http.state.client is not None else ""
    gateway.request_ids.note(RequestIds(answer_id, request_id, is_secret, [answer_id], name))
    http.state.answer_id = answer_id
    return ProxiedRequest(
        gateway.scheduling,
        gateway.workers,
        gateway.backends,
        protocol=gateway.protocol,
        path=path,
        request=request,
        place=place,
        headers=headers,
        deadline=clock.monotonic() + settings.request_timeout_s,
    )


def _read(param: str, content: bytes) -> dict[str, Any]:
    """Parse the body. Raises ApiError, 400."""
    try:
        request: Any = large_json.decode(content)
    except msgspec.DecodeError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(request, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_type")
    if request.get(param) is None:
        raise ApiError(400, f"{param} is missing", param=param, code="missing_required_parameter")
    kinds: tuple[tuple[str, type | tuple[type, ...], str], ...] = (
        (param, list if param == "messages" else (str, list), "a list" if param == "messages" else "text"),
        ("model", str, "a string"),
        ("stream", bool, "true or false"),
        ("n", int, "a number"),
        ("kv_transfer_params", dict, "an object"),
    )
    for name, kind, allowed in kinds:
        found = request.get(name)
        if found is not None and not isinstance(found, kind):
            message = f"{name} is {str(found)[:100]!r}; allowed: {allowed}"
            raise ApiError(400, message, param=name, code="invalid_type")
    priority = request.get("priority")
    if isinstance(priority, int) and abs(priority) > MAX_PRIORITY:
        message = f"priority is {str(priority)[:100]}; allowed: {-MAX_PRIORITY} to {MAX_PRIORITY}"
        raise ApiError(400, message, param="priority", code="invalid_value")
    if not request[param]:
        raise ApiError(400, f"{param} may not be empty", param=param, code="invalid_value")
    return request


async def _settle_model(gateway: Gateway, request: dict[str, Any]) -> str:
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
    raise model_not_found(wanted, ", ".join(card.id for card in cards))


def _num_answers(request: dict[str, Any]) -> int:
    prompt = request.get("prompt")
    is_batch = isinstance(prompt, list) and not isinstance(prompt[0], int)
    return max(1, request.get("n") or 1) * (len(prompt) if is_batch and isinstance(prompt, list) else 1)


def _int_of(request: dict[str, Any], name: str) -> int:
    found = request.get(name)
    return found if isinstance(found, int) and abs(found) < 1 << 31 else 0

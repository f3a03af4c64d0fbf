"""The OpenAI endpoints in front of engines that are not our workers.

Owns the way from an HTTP request to a ``Relay`` and back. Of the body it reads what it needs (the model, the
prompt's beginning, whether to stream); all else is between the client and the engine, which says best what is
wrong with it.
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
from mooncake.gateway.accounting import account
from mooncake.gateway.clients import Client
from mooncake.gateway.gate import Entry
from mooncake.gateway.gateway import Gateway
from mooncake.gateway.naming import Names
from mooncake.gateway.protocols import without_transfers
from mooncake.gateway.reading import decoded, names_of, request_id_of, slo_of
from mooncake.gateway.relay import Relay
from mooncake.gateway.stream import EventStream, unless_left
from mooncake.inference import bigjson
from mooncake.inference.openai import MAX_PRIORITY, ApiError, model_not_found
from mooncake.log import get_logger

log = get_logger(__name__)

_HANDED_ON = ("traceparent", "tracestate", "authorization")


async def relay(gateway: Gateway, http: Request, path: str, content: bytes) -> Response:
    """The answer to a request, whole or streamed. Raises ApiError."""
    asked = await decoded(content, partial(_read, "messages" if "chat" in path else "prompt"))
    asked = without_transfers(asked, gateway.settings.trust_clients)
    slo = slo_of(http)
    num_answers = _num_answers(asked)
    client: Client | None = http.state.client
    entry = Entry(gateway.gate, client, num_answers, clock.monotonic())

    def leave() -> None:
        entry.leave(clock.monotonic())

    if client is not None:
        asked["cache_salt"] = client.entry.cache_salt
    try:
        adapter = await _settle_model(gateway, asked)
        answer = await _relay_of(gateway, http, path, asked, adapter)
        pieces = _accounted(answer, http, slo)
        first = await unless_left(http, anext(pieces))
        headers = {**names_of(http), **answer.route.headers()}
        if not asked.get("stream"):
            async with contextlib.aclosing(pieces):
                async for _ in pieces:
                    raise AssertionError("a whole answer is one piece")
            leave()
            return Response(first, 200, headers, media_type="application/json")
    except BaseException:
        leave()
        raise
    return EventStream(first, pieces, headers, leave, answer.deadline)


async def _accounted(answer: Relay, http: Request, slo: Any) -> AsyncGenerator[bytes, None]:
    """What goes to the client. Before the first piece it raises ApiError; after it, that is an event."""
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
        account(http.state.answer_id, answer.route, answer.counted, answer.timing, slo, http.state.client)
    except Exception as error:
        if not has_begun:
            raise
        if not isinstance(error, ApiError):
            log.exception("answer_failed", id=http.state.answer_id, error=error)
            message = "the gateway failed while answering; its log has the traceback"
            error = ApiError(500, message, code="internal_error")
        log.warning("answer_broken", id=http.state.answer_id, reason=str(error))
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


async def _relay_of(gateway: Gateway, http: Request, path: str, asked: dict[str, Any], adapter: str) -> Relay:
    settings = gateway.settings
    request_id = request_id_of(http)
    answer_id = f"{'chatcmpl' if 'chat' in path else 'cmpl'}-{uuid.uuid4().hex}"
    headers = {**gateway.engines.headers, "X-Request-ID": request_id}
    # A client's key for this gateway is no business of engines.
    handed_on = _HANDED_ON if http.state.client is None else _HANDED_ON[:2]
    headers |= {name: http.headers[name] for name in handed_on if name in http.headers}
    names = await gateway.prompts.name(asked, adapter, headers, gateway.scheduling)
    slo = slo_of(http)
    place = Place(
        answer_id,
        names.num_tokens,
        names.keys,
        http.headers.get("x-session-affinity", "")[:256],
        lifetime_s=settings.request_timeout_s + 60.0,
        slo_ttft_s=(slo.ttft_ms or 0.0) / 1000.0,
        slo_tbt_s=(slo.tbt_ms or 0.0) / 1000.0,
        priority=_int_of(asked, "priority"),
        max_output_tokens=_int_of(asked, "max_completion_tokens") or _int_of(asked, "max_tokens"),
        scope=adapter,
        bare_keys=names.bare_keys,
        is_text=names.is_text,
    )
    is_secret = request_id != http.headers.get("x-request-id")
    name = http.state.client.name if http.state.client is not None else ""
    gateway.named.note(Names(answer_id, request_id, is_secret, [answer_id], name))
    http.state.answer_id = answer_id
    return Relay(
        gateway.scheduling,
        gateway.workers,
        gateway.engines,
        protocol=gateway.protocol,
        path=path,
        asked=asked,
        place=place,
        headers=headers,
        deadline=clock.monotonic() + settings.request_timeout_s,
    )


def _read(param: str, content: bytes) -> dict[str, Any]:
    """The body. Raises ApiError, 400."""
    try:
        asked: Any = bigjson.decode(content)
    except msgspec.DecodeError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(asked, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_type")
    if asked.get(param) is None:
        raise ApiError(400, f"{param} is missing", param=param, code="missing_required_parameter")
    kinds: tuple[tuple[str, type | tuple[type, ...], str], ...] = (
        (param, list if param == "messages" else (str, list), "a list" if param == "messages" else "text"),
        ("model", str, "a string"),
        ("stream", bool, "true or false"),
        ("n", int, "a number"),
        ("kv_transfer_params", dict, "an object"),
    )
    for name, kind, allowed in kinds:
        found = asked.get(name)
        if found is not None and not isinstance(found, kind):
            message = f"{name} is {str(found)[:100]!r}; allowed: {allowed}"
            raise ApiError(400, message, param=name, code="invalid_type")
    priority = asked.get("priority")
    if isinstance(priority, int) and abs(priority) > MAX_PRIORITY:
        message = f"priority is {str(priority)[:100]}; allowed: {-MAX_PRIORITY} to {MAX_PRIORITY}"
        raise ApiError(400, message, param="priority", code="invalid_value")
    if not asked[param]:
        raise ApiError(400, f"{param} may not be empty", param=param, code="invalid_value")
    return asked


async def _settle_model(gateway: Gateway, asked: dict[str, Any]) -> str:
    """Put the engines' own name of the model into ``asked``; returns that of the adapter, if it is one.

    Raises:
        ApiError: 404, none of the engines has such a model.
    """
    wanted = asked.get("model")
    aliases = (gateway.settings.model_name, gateway.settings.model)
    cards = await gateway.engines.models(gateway.scheduling, "" if wanted in aliases else wanted or "")
    if not cards:
        return ""
    for card in cards:
        if card.id == wanted:
            # Several names of one model have one root, an adapter has its own.
            return card.id if card.root != cards[0].root else ""
    if wanted is None or wanted in aliases:
        asked["model"] = cards[0].id
        return ""
    raise model_not_found(wanted, ", ".join(card.id for card in cards))


def _num_answers(asked: dict[str, Any]) -> int:
    prompt = asked.get("prompt")
    is_batch = isinstance(prompt, list) and not isinstance(prompt[0], int)
    return max(1, asked.get("n") or 1) * (len(prompt) if is_batch and isinstance(prompt, list) else 1)


def _int_of(asked: dict[str, Any], name: str) -> int:
    found = asked.get(name)
    return found if isinstance(found, int) and abs(found) < 1 << 31 else 0

# SPDX-License-Identifier: Apache-2.0
"""Parsing of requests: body, token ids, and the headers that the gateway uses.

Owns the checks that need no worker; a request that fails them never reaches one.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
import uuid
from collections.abc import Mapping
from typing import Any

from fastapi import Request
from starlette.requests import ClientDisconnect

from mooncake.errors import InvalidArgument
from mooncake.forensics.hygiene import AppliedRules
from mooncake.gateway.clients import Client
from mooncake.gateway.gateway import PromptTokenizer
from mooncake.gateway.metrics import Slo
from mooncake.http import large_json, server
from mooncake.http.openai import (
    MAX_PRIORITY,
    AnyRequest,
    ApiError,
    ChatCompletionRequest,
    CompletionRequest,
    context_length_exceeded,
)

INLINE_CHARS = 4096
"""Shorter texts are tokenized on the event loop; a thread would cost more than it saves."""

LARGE_CHARS = 256 << 10
PIECE_CHARS = 64 << 10
CUT_TOKENS = 8
LONG_TOKEN_CHARS = 8
"""Texts that fit only with longer tokens than this on average are counted before they are tokenized."""

PRIORITY_HEADER = "X-Vllm-Priority"
RANK_HEADER = "X-data-parallel-rank"
MAX_RANK = 9999

SLO_HEADERS = {
    "ttft_ms": ("x-slo-ttft-ms", "x-llm-d-slo-ttft-ms"),
    "tbt_ms": ("x-slo-tbt-ms", "x-slo-tpot-ms", "x-llm-d-slo-tpot-ms"),
}
"""Headers of each SLO; of several in one request the first of this list counts."""

SESSION_HEADERS = (
    "X-Session-ID",
    "X-Session-Affinity",
    "X-Claude-Code-Session-ID",
    "Session-ID",
    "session_id",
    "X-SMG-Routing-Key",
    "X-Dynamo-Session-ID",
)
"""Headers in which programs name the session of a request, in the order in which they are read."""

LAST_SESSION_HEADER = "X-Correlation-ID"
"""Read after all other names: some programs make a new one for each request."""

MAX_SESSION_CHARS = 256


async def tokenize(tokenizer: PromptTokenizer, request: AnyRequest, max_model_len: int) -> list[list[int]]:
    """Token ids of every prompt. Raises ApiError, 400."""
    param = "messages" if isinstance(request, ChatCompletionRequest) else "prompt"
    _check_length(tokenizer, request, max_model_len, param)

    def in_thread() -> list[list[int]]:
        for text in _texts(request):
            if len(text) > max(LARGE_CHARS, LONG_TOKEN_CHARS * max_model_len):
                _count(tokenizer, text, max_model_len, param)
        if isinstance(request, CompletionRequest):
            encode = tokenizer.encode
            return [encode(one) if isinstance(one, str) else one for one in request.prompts]
        return [
            tokenizer.chat(
                [message.for_template() for message in request.messages],
                request.add_generation_prompt,
                continue_final_message=request.continue_final_message,
                variables=request.chat_template_kwargs,
            )
        ]

    try:
        num_chars = sum(_chars(request)) + _num_chars_of_calls(request)
        if num_chars < INLINE_CHARS:
            prompts = in_thread()
        elif num_chars < LARGE_CHARS:
            prompts = await asyncio.to_thread(in_thread)
        else:
            prompts = await large_json.beside(in_thread)
    except InvalidArgument as error:
        wrong = error.field if error.field == "chat_template_kwargs" else param
        raise ApiError(400, str(error), param=wrong, code="invalid_value") from error
    for prompt in prompts:
        if not prompt:
            raise ApiError(400, f"{param} has no tokens", param=param, code="invalid_value")
        if len(prompt) >= max_model_len:
            raise context_length_exceeded(len(prompt), max_model_len, param)
    return prompts


def _check_length(tokenizer: PromptTokenizer, request: AnyRequest, max_model_len: int, param: str) -> None:
    """Check that a prompt can fit at all, before work is done on it. Raises ApiError, 400."""
    for num_chars in _chars(request):
        num_tokens = num_chars // tokenizer.longest_token_chars
        if num_tokens >= max_model_len:
            raise context_length_exceeded(num_tokens, max_model_len, param, is_at_least=True)
    if isinstance(request, CompletionRequest):
        for one in request.prompts:
            if not isinstance(one, str) and len(one) >= max_model_len:
                raise context_length_exceeded(len(one), max_model_len, param)


def _count(tokenizer: PromptTokenizer, text: str, max_model_len: int, param: str) -> None:
    """Count the tokens of a text that is likely too long piece by piece, and no further than needed.

    Raises:
        ApiError: 400, it is too long.
    """
    num_tokens = 0
    for start in range(0, len(text), PIECE_CHARS):
        # The cut, and special tokens around a piece, add a few tokens to the true number.
        num_tokens += max(0, len(tokenizer.encode(text[start : start + PIECE_CHARS])) - CUT_TOKENS)
        if num_tokens >= max_model_len:
            raise context_length_exceeded(num_tokens, max_model_len, param, is_at_least=True)


def _texts(request: AnyRequest) -> list[str]:
    if isinstance(request, ChatCompletionRequest):
        return [message.content or "" for message in request.messages]
    return [one for one in request.prompts if isinstance(one, str)]


def _chars(request: AnyRequest) -> list[int]:
    """The length of each prompt's text in characters."""
    lengths = [len(text) for text in _texts(request)]
    return [sum(lengths)] if isinstance(request, ChatCompletionRequest) else lengths


def _num_chars_of_calls(request: AnyRequest) -> int:
    """Length of the tool calls in a chat, which are tokens only where the model's template reads them."""
    if not isinstance(request, ChatCompletionRequest):
        return 0
    return sum(call.num_chars for message in request.messages for call in message.tool_calls)


def slo_of(http: Request) -> Slo:
    """The SLOs in the request's headers. Raises ApiError, 400 naming the header."""
    return Slo(**{field: _milliseconds_of(http, names) for field, names in SLO_HEADERS.items()})


def _milliseconds_of(http: Request, names: tuple[str, ...]) -> float | None:
    """The value of the first of these headers that the request has."""
    name = next((one for one in names if one in http.headers), None)
    if name is None:
        return None
    text = http.headers[name]
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        message = f"header {name} is {text[:40]!r}; allowed: a number of milliseconds above 0"
        raise ApiError(400, message, param=name, code="invalid_value")
    return value


def session_of(http: Request, body: Mapping[str, Any], operator_header: str) -> str:
    """The name of the request's session; empty without one that is fit for a header.

    The operator's header comes first, then the body's ``session_id``, because engines prefer it to headers.
    A name is a client's claim: it may only decide where a request goes.
    """
    names = (operator_header,) if operator_header else ()
    given = [http.headers.get(name) for name in names]
    given.append(body.get("session_id"))
    given += [http.headers.get(name) for name in SESSION_HEADERS]
    given += [body.get("prompt_cache_key"), http.headers.get(LAST_SESSION_HEADER)]
    return next((one for one in given if isinstance(one, str) and _is_session(one)), "")


def affinity_of(http: Request, session: str) -> str:
    """The conductor's name of a session: equal names of different tenants are different sessions."""
    client: Client | None = http.state.client
    # No session has a space in it.
    return f"{session} {client.entry.tenant_name}" if client is not None and session else session


def session_at_engines(http: Request, session: str) -> str:
    """The name of a session as engines get it, which is different for each tenant as well.

    It ends in a digest of the tenant, of fixed length, so that no tenant can choose a name of another's.
    """
    client: Client | None = http.state.client
    if client is None or not session:
        return session
    return f"{session}.{hashlib.sha256(client.entry.tenant_name.encode()).hexdigest()[:16]}"


def _is_session(name: str) -> bool:
    return re.fullmatch(rf"[\x21-\x7e]{{1,{MAX_SESSION_CHARS}}}", name) is not None


def priority_of(http: Request) -> int | None:
    """The priority in the request's header, for a body without one. Raises ApiError, 400."""
    return _number_of(http, PRIORITY_HEADER, -MAX_PRIORITY, MAX_PRIORITY)


def rank_of(http: Request) -> int | None:
    """The data-parallel rank that a client wants its engine to use. Raises ApiError, 400."""
    return _number_of(http, RANK_HEADER, 0, MAX_RANK)


def _number_of(http: Request, name: str, least: int, most: int) -> int | None:
    text = http.headers.get(name)
    if text is None:
        return None
    if re.fullmatch(r"-?[0-9]{1,6}", text) and least <= int(text) <= most:
        return int(text)
    message = f"header {name} is {text[:40]!r}; allowed: a number from {least} to {most}"
    raise ApiError(400, message, param=name, code="invalid_value")


def request_id_of(http: Request) -> str:
    """The client's request id if it is fit for a header and a log, else a generated one."""
    found: str | None = getattr(http.state, "request_id", None)
    if found is None:
        given = http.headers.get("x-request-id", "")
        found = given if re.fullmatch(r"[\x21-\x7e]{1,128}", given) else uuid.uuid4().hex
        http.state.request_id = found
    return found


def names_of(http: Request) -> dict[str, str]:
    """Headers: the ids of a request, under which its explanation can be queried, and what rules changed."""
    answer_id = getattr(http.state, "answer_id", None)
    names = {"X-Request-ID": request_id_of(http)} | ({"X-Mooncake-ID": answer_id} if answer_id else {})
    applied: AppliedRules | None = getattr(http.state, "hygiene", None)
    if applied is not None and applied.counts:
        names["x-mooncake-hygiene"] = applied.header()
    return names


async def read_body(http: Request, most_bytes: int) -> bytes:
    """Read the body. Raises ApiError, 413 for one that is too large, 503 when others' take all the memory."""
    try:
        return await server.read_body(http, most_bytes)
    except server.BodyTooLarge as error:
        raise ApiError(413, str(error), code=error.code) from error
    except ClientDisconnect as error:
        raise ApiError(499, "the client disconnected", code="client_closed_request") from error
    except server.BodyBudgetExceeded as error:
        raise ApiError(503, str(error), code=error.code, retry_after_s=1.0) from error

"""Reads requests: body, token ids, and the headers that mean something.

Owns the checks that need no worker; what it refuses never reaches one.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import re
import uuid

from fastapi import Request

from mooncake.errors import InvalidArgument
from mooncake.gateway.accounting import Slo
from mooncake.gateway.answer import AnyRequest
from mooncake.gateway.gateway import PromptTokenizer
from mooncake.inference.openai import (
    ApiError,
    ChatCompletionRequest,
    CompletionRequest,
    context_length_exceeded,
)

MAX_BODY_BYTES = 32 << 20
INLINE_CHARS = 4096
"""Shorter texts are tokenized at once; a thread would cost more than it frees."""


async def tokenize(tokenizer: PromptTokenizer, asked: AnyRequest, max_model_len: int) -> list[list[int]]:
    """Token ids of every prompt. Raises ApiError, 400."""
    param = "messages" if isinstance(asked, ChatCompletionRequest) else "prompt"

    def in_thread() -> list[list[int]]:
        if isinstance(asked, CompletionRequest):
            encode = tokenizer.encode
            return [encode(one) if isinstance(one, str) else one for one in asked.prompts]
        messages = [message.model_dump(exclude_none=True) for message in asked.messages]
        options = dict(asked.chat_template_kwargs or {})
        if asked.continue_final_message:
            options["continue_final_message"] = True
        return [tokenizer.chat(messages, asked.add_generation_prompt, **options)]

    try:
        is_short = _num_chars(asked) < INLINE_CHARS
        prompts = in_thread() if is_short else await asyncio.to_thread(in_thread)
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


def slo_of(http: Request) -> Slo:
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


def request_id_of(http: Request) -> str:
    """The client's, if it is fit for a header and a log, else one of ours; the same all along."""
    found: str | None = getattr(http.state, "request_id", None)
    if found is None:
        given = http.headers.get("x-request-id", "")
        found = given if re.fullmatch(r"[\x21-\x7e]{1,128}", given) else uuid.uuid4().hex
        http.state.request_id = found
    return found


def names_of(http: Request) -> dict[str, str]:
    """The names of a request as headers, under which its explanation can be asked for."""
    answer_id = getattr(http.state, "answer_id", None)
    return {"X-Request-ID": request_id_of(http)} | ({"X-Mooncake-ID": answer_id} if answer_id else {})


async def read_body(http: Request) -> bytes:
    """The body. Raises ApiError, 413 for one that is too large."""
    body = bytearray()
    async for part in http.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise ApiError(413, f"the body is larger than {MAX_BODY_BYTES} bytes", code="body_too_large")
    return bytes(body)

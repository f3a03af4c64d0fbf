# SPDX-License-Identifier: Apache-2.0
"""Requests of the OpenAI API, from the connection to token ids: their bodies, their prompts, unknown paths.

The gateway and the workers share what has to be checked before work is done on a request, which may come
from any client. The module knows no model: a tokenizer is passed in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from fastapi import Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from mooncake.errors import InvalidArgument
from mooncake.http import large_json, server
from mooncake.http.openai import (
    AnyRequest,
    ApiError,
    ChatCompletionRequest,
    CompletionRequest,
    context_length_exceeded,
)

INLINE_CHARS = 4096
"""Shorter texts are tokenized on the event loop; a thread would cost more than it saves."""

LARGE_CHARS = 256 << 10
MESSAGE_CHARS = 32
"""The work for a message or a tool call besides its text, in characters: a template writes some around it."""

PIECE_CHARS = 64 << 10
CUT_TOKENS = 8
LONG_TOKEN_CHARS = 8
"""Texts that fit only with longer tokens than this on average are counted before they are tokenized."""


class PromptTokenizer(Protocol):
    """The part of ``mooncake.inference.tokenizer.Tokenizer`` that prompts need."""

    longest_token_chars: int
    """Most characters of a token."""

    def encode(self, text: str) -> list[int]: ...

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]: ...

    def text_of(self, token_ids: Sequence[int]) -> str: ...


def not_served(http: Request, error: HTTPException) -> ApiError:
    """The error of an unknown path or method."""
    return ApiError(error.status_code, f"{http.method} {http.url.path}: {error.detail}")


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
        num_chars = sum(_chars(request)) + _num_chars_around(request)
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
    if isinstance(request, ChatCompletionRequest):
        if len(request.messages) >= max_model_len:  # a template writes at least a token for each
            raise context_length_exceeded(len(request.messages), max_model_len, param, is_at_least=True)
        return
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


def _num_chars_around(request: AnyRequest) -> int:
    """What a chat has besides its text, in characters: it is tokens only where the template reads it."""
    if not isinstance(request, ChatCompletionRequest):
        return 0
    num_chars = _num_chars_in(request.chat_template_kwargs or {})
    for message in request.messages:
        num_chars += MESSAGE_CHARS + len(message.name or "") + len(message.tool_call_id or "")
        num_chars += sum(MESSAGE_CHARS + call.num_chars for call in message.tool_calls)
    return num_chars


def _num_chars_in(value: Any) -> int:
    """Number of characters and values in a JSON value; of more than ``LARGE_CHARS`` at least these."""
    num_chars, waiting = 0, [value]
    while waiting and num_chars < LARGE_CHARS:
        one = waiting.pop()
        num_chars += len(one) if isinstance(one, str) else 1
        if isinstance(one, dict):
            waiting += [*one, *one.values()]
        elif isinstance(one, list):
            waiting += one
    return num_chars

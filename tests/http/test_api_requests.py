# SPDX-License-Identifier: Apache-2.0
"""Prompts become tokens where their length allows it, each on the thread that their length calls for."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from mooncake.http import api_requests
from mooncake.http.api_requests import tokenize
from mooncake.http.openai import ApiError, ChatCompletionRequest, CompletionRequest, parse_request


class CharTokenizer:
    """A token for each character, and one for each chat, as of a template that reads no message.

    It keeps the threads in which it has worked.
    """

    longest_token_chars = 4

    def __init__(self) -> None:
        self.threads: list[str] = []

    def encode(self, text: str) -> list[int]:
        self.threads.append(threading.current_thread().name)
        return [ord(character) for character in text]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        return self.encode("<")

    def text_of(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))


def completion(prompt: object) -> CompletionRequest:
    return parse_request(CompletionRequest, json.dumps({"prompt": prompt}).encode())


async def test_a_long_text_waits_for_the_thread_of_large_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many at once would take as many threads and as much memory."""
    monkeypatch.setattr(api_requests, "INLINE_CHARS", 10)
    monkeypatch.setattr(api_requests, "LARGE_CHARS", 100)
    tokenizer = CharTokenizer()
    for text in ("ab", "ab" * 10, "ab" * 100):
        assert await tokenize(tokenizer, completion(text), 1000) == [[ord(one) for one in text]]
    here, other, large = tokenizer.threads
    assert here == threading.current_thread().name and other.startswith("asyncio")
    assert large.startswith("large-requests")


@pytest.mark.parametrize("prompt", ["ab" * 200, ["ab", "ab" * 200], [7] * 100, [[7], [7] * 100]])
async def test_what_can_not_fit_is_not_tokenized(prompt: object) -> None:
    tokenizer = CharTokenizer()
    with pytest.raises(ApiError) as refused:
        await tokenize(tokenizer, completion(prompt), 100)
    assert (refused.value.status, refused.value.detail.code) == (400, "context_length_exceeded")
    assert not tokenizer.threads


@pytest.mark.parametrize(
    "more",
    [
        {"messages": [{"role": "user", "content": ""}] * 50},
        {"messages": [{"role": "user", "content": "a", "name": "n" * 200}]},
        {"messages": [{"role": "tool", "content": "a", "tool_call_id": "n" * 200}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": ""}}] * 50}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "n" * 200, "function": {"name": ""}}]}]},
        {"chat_template_kwargs": {"a": "n" * 200}},
        {"chat_template_kwargs": {"n" * 200: 1}},
        {"chat_template_kwargs": {"a": {"b": [[1] * 100, {"c": None}] * 2}}},
    ],
)
async def test_what_a_chat_has_besides_its_text_is_no_work_for_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    """A template writes some characters around an empty message, and may read each other field."""
    monkeypatch.setattr(api_requests, "INLINE_CHARS", 100)
    monkeypatch.setattr(api_requests, "LARGE_CHARS", 200)
    tokenizer = CharTokenizer()
    few = {"messages": [{"role": "user", "content": "a"}]}
    for fields in (few, {**few, **more}):
        await tokenize(tokenizer, parse_request(ChatCompletionRequest, json.dumps(fields).encode()), 1000)
    here, large = tokenizer.threads
    assert here == threading.current_thread().name and large.startswith("large-requests")


async def test_more_messages_than_tokens_that_fit_are_not_tokenized() -> None:
    tokenizer = CharTokenizer()
    for number in (99, 100):
        messages = [{"role": "user", "content": ""}] * number
        chat = parse_request(ChatCompletionRequest, json.dumps({"messages": messages}).encode())
        if number < 100:
            await tokenize(tokenizer, chat, 100)
            continue
        with pytest.raises(ApiError) as refused:
            await tokenize(tokenizer, chat, 100)
        assert (refused.value.status, refused.value.detail.code) == (400, "context_length_exceeded")
        assert refused.value.detail.param == "messages"
    assert len(tokenizer.threads) == 1


async def test_what_has_too_many_tokens_is_refused() -> None:
    assert await tokenize(CharTokenizer(), completion("a" * 99), 100)
    with pytest.raises(ApiError, match="the prompt has 100 tokens"):
        await tokenize(CharTokenizer(), completion("a" * 100), 100)

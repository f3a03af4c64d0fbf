# SPDX-License-Identifier: Apache-2.0
"""Requests that are refused before work is done on them, and clients that don't read their answers."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from dataclasses import replace
from typing import Any

import pytest
from fastapi import Request

from mooncake.conductor.messages import Place
from mooncake.conductor.request_lifecycle import invalid_number
from mooncake.gateway.clients import ClientEntry, Clients
from mooncake.gateway.metrics import Slo
from mooncake.gateway.request_parsing import (
    LAST_SESSION_HEADER,
    MAX_SESSION_CHARS,
    SESSION_HEADERS,
    SLO_HEADERS,
    affinity_of,
    session_of,
    slo_of,
)
from mooncake.http import answers, api_requests, large_json
from mooncake.http.openai import MAX_PRIORITY, ApiError
from mooncake.inference.tokenizer import Tokenizer
from tests.gateway.conftest import Stack, running
from tests.gateway.doubles import MAX_MODEL_LEN, WorkerDouble
from tests.gateway.engines import fronting

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"


async def test_a_large_body_is_refused_by_its_size(tokenizer: Tokenizer) -> None:
    async with running(tokenizer, max_body_bytes=2000) as stack:
        status, answer, _ = await stack.post(TEXT, {"prompt": "w20 " * 600})
        assert (status, answer["error"]["code"]) == (413, "body_too_large")
        assert not stack.prefill[0].calls and stack.gateway.limiter.num_in_flight == 0


@pytest.mark.parametrize("is_chat", [False, True])
async def test_a_prompt_that_cannot_fit_is_never_tokenized(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, is_chat: bool
) -> None:
    tokenizer = stack.gateway.tokenizer
    assert tokenizer is not None
    text = "w20 " * (MAX_MODEL_LEN * tokenizer.longest_token_chars // 4)

    def encode(*arguments: Any, **more: Any) -> list[int]:
        raise AssertionError("it was tokenized")

    monkeypatch.setattr(tokenizer, "encode", encode)
    monkeypatch.setattr(tokenizer, "chat", encode)
    body: dict[str, Any] = {"messages": [{"role": "user", "content": text}]} if is_chat else {"prompt": text}
    status, answer, _ = await stack.post(CHAT if is_chat else TEXT, body)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert "at least" in answer["error"]["message"]


async def test_a_long_tool_call_is_not_tokenized_on_the_event_loop(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = stack.gateway.tokenizer
    assert tokenizer is not None
    seen: list[tuple[int, Any]] = []

    def chat(messages: list[dict[str, Any]], *arguments: Any, **more: Any) -> list[int]:
        seen.append((threading.get_ident(), messages))
        return [10, 11]

    monkeypatch.setattr(tokenizer, "chat", chat)
    for size in (10, api_requests.INLINE_CHARS):
        function = {"name": "f", "arguments": "x" * size}
        message = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": function}]}
        status, _, _ = await stack.post(CHAT, {"messages": [message], "max_tokens": 1})
        assert status == 200
    here, other = (thread for thread, _ in seen)
    assert here == threading.get_ident() != other
    assert seen[0][1] == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "x" * 10}}],
        }
    ]


async def test_a_prompt_that_likely_does_not_fit_is_counted_no_further_than_needed(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_requests, "LARGE_CHARS", 100)
    monkeypatch.setattr(api_requests, "PIECE_CHARS", 400)
    tokenizer = stack.gateway.tokenizer
    assert tokenizer is not None
    seen: list[int] = []
    encode = tokenizer.encode

    def counted(text: str) -> list[int]:
        seen.append(len(text))
        return encode(text)

    monkeypatch.setattr(tokenizer, "encode", counted)
    status, answer, _ = await stack.post(TEXT, {"prompt": "w20 " * 3000})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert seen == [400], "one piece has as many tokens as fit"


async def test_log_probabilities_of_a_whole_answer_are_bounded(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All are in the gateway's memory until it ends; a stream is passed on as it arrives."""
    monkeypatch.setattr(answers, "MAX_WHOLE_LOGPROBS", 2 * 2 * 5 * 3)
    body = {"prompt": ["w20", "w21"], "n": 2, "max_tokens": 5, "logprobs": 2}
    assert (await stack.post(TEXT, body))[0] == 200
    status, answer, _ = await stack.post(TEXT, {**body, "max_tokens": 6})
    assert (status, answer["error"]["param"]) == (400, "logprobs")
    assert "may have 72 log probabilities" in answer["error"]["message"]
    assert stack.gateway.limiter.num_in_flight == 0


@pytest.mark.parametrize("priority", [MAX_PRIORITY + 1, -MAX_PRIORITY - 1, 10**18])
async def test_priority_is_bounded(stack: Stack, priority: int) -> None:
    status, answer, _ = await stack.post(TEXT, {"prompt": "w20", "priority": priority})
    assert (status, answer["error"]["param"]) == (400, "priority")
    async with fronting() as front:
        status, answer, _ = await front.post(TEXT, {"prompt": "w20", "priority": priority})
        assert (status, answer["error"]["param"]) == (400, "priority")


@pytest.mark.parametrize("priority", ["1001", "1e9", 1e9, 2.5, "5", [5]])
async def test_a_priority_is_a_whole_number(priority: Any) -> None:
    """Engines read numbers in texts and floats as well, so that these would have no bound."""
    async with fronting() as front:
        status, answer, _ = await front.post(TEXT, {"prompt": "w20", "priority": priority})
        assert (status, answer["error"]["param"]) == (400, "priority")
        assert not front.decode[0].calls


@pytest.mark.parametrize("size", [0, large_json.LARGE_BYTES], ids=["small", "large"])
@pytest.mark.parametrize("depth", [large_json.MAX_NESTING, 400, 900, 100_000])
@pytest.mark.parametrize("opening", ["[", '{"a":'])
async def test_values_nested_too_deep_are_refused(stack: Stack, depth: int, opening: str, size: int) -> None:
    nested = opening * depth + "1" + ("]" if opening == "[" else "}") * depth
    async with fronting() as front:
        for path, form in (
            (front.url + TEXT, '{"prompt": "w20", "pad": "%s", "deep": %s}'),
            (front.url + "/v1/embeddings", '{"input": "w20", "pad": "%s", "deep": %s}'),
            (front.url + "/v1/messages", '{"pad": "%s", "messages": [{"role": "user", "content": %s}]}'),
            (front.url + "/v1/responses", '{"pad": "%s", "input": %s}'),
            (stack.url + CHAT, '{"pad": "%s", "messages": [{"role": "user", "content": %s}]}'),
        ):
            body = (form % ("x" * size, nested)).encode()
            headers = {"Content-Type": "application/json"}
            async with front.session.post(path, data=body, headers=headers) as response:
                answer = await response.json()
                assert response.status == 400, (path, answer)
                assert "Recursion" not in str(answer)


async def test_values_nested_less_deep_are_passed_on() -> None:
    nested: Any = "w20"
    for _ in range(large_json.MAX_NESTING - 10):
        nested = [nested]
    async with fronting(0, 1) as front:
        for path in ("/v1/messages", "/v1/responses"):
            name = "messages" if path == "/v1/messages" else "input"
            body = {"model": "tiny", "max_tokens": 1, name: [{"role": "user", "content": nested}]}
            status, answer, _ = await front.post(path, body)
            assert status == 200, answer


@pytest.mark.parametrize(
    "name", ["messages", "self", "tokenizer_kwargs", "conversation", "chat_template", "tokenize", "kwargs"]
)
async def test_no_variable_of_a_template_is_an_argument_of_its_renderer(stack: Stack, name: str) -> None:
    body = {"messages": [{"role": "user", "content": "w20"}], "chat_template_kwargs": {name: []}}
    status, answer, _ = await stack.post(CHAT, body)
    assert (status, answer["error"]["param"]) == (400, "chat_template_kwargs"), answer


async def test_a_template_s_error_reveals_nothing_of_the_server(stack: Stack, tmp_path: Any) -> None:
    tokenizer = stack.gateway.tokenizer
    assert isinstance(tokenizer, Tokenizer)
    before = tokenizer._tokenizer.chat_template
    tokenizer._tokenizer.chat_template = None
    try:
        body = {"messages": [{"role": "user", "content": "w20"}]}
        status, answer, _ = await stack.post(CHAT, body)
    finally:
        tokenizer._tokenizer.chat_template = before
    assert status == 400 and "/" not in answer["error"]["message"].replace("and/or", "")
    assert "Tokenizer" not in answer["error"]["message"]


# --- clients that don't read


def unread_request(stack: Stack, body: dict[str, Any]) -> socket.socket:
    """Send a request on a socket that is never read."""
    content = json.dumps(body).encode()
    opened = socket.socket()
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    opened.connect(("127.0.0.1", int(stack.url.rpartition(":")[2])))
    opened.sendall(
        b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (TEXT.encode(), len(content))
    )
    opened.sendall(content)
    return opened


class Flood(WorkerDouble):
    """A worker whose answers are larger than any socket buffer."""

    num_written = 0

    async def _event(self, response: Any, fields: dict[str, Any]) -> None:
        if fields["choices"]:
            fields["choices"][0]["text"] = "x" * 65536
        await super()._event(response, fields)
        self.num_written += 1


async def test_a_slot_comes_back_at_the_deadline_of_a_client_that_does_not_read(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.gateway.doubles.WorkerDouble", Flood)
    async with running(tokenizer, request_timeout_s=1.5, max_in_flight=2) as stack:
        worker_max = {"prompt": [20, 21], "max_tokens": 50, "stream": True}
        for one in stack.decode:
            one.token_pause_s = 0.001
            monkeypatch.setattr("tests.gateway.doubles.MAX_MODEL_LEN", 10**6)
        stack.gateway.max_model_len = 10**6
        body = {**worker_max, "max_tokens": 100_000}
        sockets = [unread_request(stack, body) for _ in range(2)]
        try:
            async with asyncio.timeout(20):
                while stack.gateway.limiter.num_in_flight < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                status, _, _ = await stack.post(TEXT, {"prompt": "w20", "max_tokens": 1})
                assert status == 429
                while stack.gateway.limiter.num_in_flight:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                while sum(one.num_cancelled for one in stack.decode) < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            most = sum(one.num_written for one in stack.decode)  # type: ignore[attr-defined]
            assert most < 2000, f"workers went on: {most} pieces of 64 KiB"
        finally:
            for opened in sockets:
                opened.close()


async def test_a_client_that_reads_slowly_gets_all_of_it(stack: Stack) -> None:
    streamed = await stack.stream([20, 21], 40)
    assert len(streamed.token_ids()) == 40


# --- names of sessions


def http_with(headers: dict[str, str], client: Any = None) -> Request:
    encoded = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    http = Request({"type": "http", "headers": encoded})
    http.state.client = client
    return http


def test_the_first_of_a_session_s_names_counts() -> None:
    headers = {name: f"of {name}".replace(" ", "-") for name in (*SESSION_HEADERS, LAST_SESSION_HEADER)}
    body = {"session_id": "b", "prompt_cache_key": "k"}
    assert session_of(http_with({**headers, "X-Mine": "m"}), body, "X-Mine") == "m"
    assert session_of(http_with({**headers, "X-Mine": "m"}), body, "") == "b"
    del body["session_id"]
    for name in SESSION_HEADERS:
        assert session_of(http_with(headers), body, "") == headers.pop(name)
    assert session_of(http_with(headers), body, "") == "k"
    assert session_of(http_with(headers), {}, "") == headers[LAST_SESSION_HEADER]
    assert session_of(http_with({}), {}, "X-Mine") == ""


@pytest.mark.parametrize("unfit", ["", "a b", "a\nb", "é", "s" * (MAX_SESSION_CHARS + 1), 7, None, ["s"]])
def test_a_name_that_is_not_fit_for_a_header_is_ignored(unfit: object) -> None:
    assert session_of(http_with({}), {"session_id": unfit}, "") == ""
    assert session_of(http_with({"X-Session-Affinity": "s"}), {"session_id": unfit}, "") == "s"


def test_equal_names_of_two_tenants_are_two_sessions() -> None:
    entries = [ClientEntry(name=name, key=f"{name}-{'k' * 20}") for name in "ab"]
    clients = Clients(entries, 0.0)
    of_both = [
        affinity_of(http_with({}, clients.of({"authorization": f"Bearer {one.key}"})), "s") for one in entries
    ]
    assert len({*of_both, affinity_of(http_with({}), "s")}) == 3
    assert affinity_of(http_with({}, clients.of({"authorization": f"Bearer {entries[0].key}"})), "") == ""


# --- names of SLOs


@pytest.mark.parametrize("field", ["ttft_ms", "tbt_ms"])
def test_the_first_of_an_slo_s_names_counts(field: str) -> None:
    headers = {name: str(10.0 * number) for number, name in enumerate(SLO_HEADERS[field], 1)}
    for number, name in enumerate(SLO_HEADERS[field], 1):
        assert slo_of(http_with(headers)) == replace(Slo(), **{field: 10.0 * number})
        assert name == f"x-slo-{field.replace('_', '-')}" or number > 1, "ours is the first"
        del headers[name]
    assert slo_of(http_with(headers)) == Slo()


@pytest.mark.parametrize("name", ["x-slo-tpot-ms", "x-llm-d-slo-ttft-ms", "x-llm-d-slo-tpot-ms"])
async def test_a_wrong_slo_is_named_as_the_client_named_it(stack: Stack, name: str) -> None:
    status, answer, _ = await stack.post(TEXT, {"prompt": "w20"}, {name: "soon"})
    assert (status, answer["error"]["param"]) == (400, name)


@pytest.mark.parametrize("name", [name for names in SLO_HEADERS.values() for name in names])
@pytest.mark.parametrize("text", ["1e13", "inf", "nan", "0", "-1"])
def test_an_slo_that_the_conductor_would_refuse_is_named_by_its_header(name: str, text: str) -> None:
    with pytest.raises(ApiError, match=f"header {name} is '{text}'") as refused:
        slo_of(http_with({name: text}))
    assert (refused.value.status, refused.value.detail.param) == (400, name)


def test_the_longest_slo_is_one_that_the_conductor_takes() -> None:
    given = slo_of(http_with({"x-slo-ttft-ms": "1e12", "x-slo-tbt-ms": "1e12"}))
    assert given.ttft_ms is not None and given.tbt_ms is not None
    place = Place("r", 1, slo_ttft_s=given.ttft_ms / 1000.0, slo_tbt_s=given.tbt_ms / 1000.0)
    assert invalid_number(place) is None


async def test_headers_reach_the_conductor(stack: Stack) -> None:
    places: list[Place] = []
    place = stack.gateway.scheduling.place

    async def placed(request: Place) -> Any:
        places.append(request)
        return await place(request)

    stack.gateway.scheduling.place = placed  # type: ignore[method-assign]
    headers = {"x-llm-d-slo-ttft-ms": "60000", "x-slo-tpot-ms": "5000", "X-Vllm-Priority": "-7"}
    status, answer, _ = await stack.post(TEXT, {"prompt": "w20"}, headers)
    assert status == 200, answer
    assert [(one.slo_ttft_s, one.slo_tbt_s, one.priority) for one in places] == [(60.0, 5.0, -7)] * len(
        places
    )
    await stack.post(TEXT, {"prompt": "w20", "priority": 3}, headers)
    assert places[-1].priority == 3

# SPDX-License-Identifier: Apache-2.0
"""The OpenAI API as clients use it: the official client, every kind of bad request, headers, limits."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import aiohttp
import openai
import pytest
from fastapi import Response

from mooncake.errors import InvalidArgument
from mooncake.gateway import app as gateway_app
from mooncake.gateway.app import create_app, create_operator_app, serve
from mooncake.gateway.gateway import GatewaySettings
from mooncake.http.server import listen
from mooncake.http.sse import EventStreamResponse
from mooncake.inference.tokenizer import Tokenizer
from mooncake.metrics import registry
from tests.gateway.conftest import ADMIN_KEY, Stack, running
from tests.gateway.doubles import MAX_MODEL_LEN, answer_ids, answer_text, doubles
from tests.gateway.engines import Engine, Wire
from tests.waiting import until

PROMPT = list(range(20, 32))
HELLO: list[Any] = [{"role": "user", "content": "w20 w21"}]
HELLO_IDS = [3, 20, 21, 4]
"""HELLO rendered by the template: <user> w20 w21 <assistant>."""

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def client_of(stack: Stack) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0)


# --- the official client


async def test_chat_with_the_official_client(stack: Stack) -> None:
    async with client_of(stack) as client:
        answer = await client.chat.completions.create(
            model="tiny", messages=HELLO, max_completion_tokens=5, logprobs=True, top_logprobs=1
        )
    [choice] = answer.choices
    assert choice.message.content == answer_text(HELLO_IDS, 5)
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert "".join(one.token for one in choice.logprobs.content) == choice.message.content
    assert len(choice.logprobs.content) == 5
    assert answer.usage is not None and answer.usage.prompt_tokens == len(HELLO_IDS)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.id.startswith("chatcmpl-")


async def test_streamed_chat_with_the_official_client(stack: Stack) -> None:
    async with client_of(stack) as client:
        stream = await client.chat.completions.create(
            model="tiny",
            messages=HELLO,
            max_tokens=5,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == answer_text(HELLO_IDS, 5)
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 5


async def test_completions_with_the_official_client(stack: Stack) -> None:
    async with client_of(stack) as client:
        answer = await client.completions.create(model="tiny", prompt="w20 w21", max_tokens=4, logprobs=1)
        models = await client.models.list()
        assert (await client.models.retrieve("tiny")).id == "tiny"
    assert answer.choices[0].text == answer_text([20, 21], 4)
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.token_logprobs == [-0.5] * 4
    assert [model.id for model in models.data] == ["tiny"]


async def test_errors_reach_the_official_client_as_its_own(stack: Stack) -> None:
    async with client_of(stack) as client:
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.chat.completions.create(model="gpt-7", messages=HELLO)
        with pytest.raises(openai.BadRequestError) as wrong:
            await client.chat.completions.create(model="tiny", messages=HELLO, temperature=9)
    assert unknown.value.code == "model_not_found"
    assert wrong.value.param == "temperature"


async def test_a_chat_without_limit_may_fill_the_context(stack: Stack) -> None:
    _, answer, _ = await stack.post(CHAT, {"messages": HELLO})
    assert answer["usage"]["total_tokens"] == MAX_MODEL_LEN


# --- several answers in one


async def test_several_choices_share_one_prefill(stack: Stack) -> None:
    answer = await stack.complete(PROMPT, 4, n=3, seed=5)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts == [answer_text(PROMPT, 4, seed) for seed in (5, 6, 7)]
    assert len(stack.prefill[0].calls) == 1
    assert answer["usage"]["prompt_tokens"] == len(PROMPT)
    assert answer["usage"]["completion_tokens"] == 12


async def test_a_batch_of_prompts_is_answered_in_order(stack: Stack) -> None:
    answer = await stack.complete(["w20 w21", "w30"], 3, n=2)
    assert [choice["text"] for choice in answer["choices"]] == [
        answer_text(ids, 3) for ids in ([20, 21], [20, 21], [30], [30])
    ]
    streamed = await stack.stream([[20, 21], [30]], 3)
    assert streamed.token_ids(0) == answer_ids([20, 21], 3)
    assert streamed.token_ids(1) == answer_ids([30], 3)


async def test_usage_can_come_with_every_chunk(stack: Stack) -> None:
    streamed = await stack.stream(PROMPT, 3, stream_options={"continuous_usage_stats": True})
    assert [chunk["usage"]["completion_tokens"] for chunk in streamed.chunks] == [1, 2, 3]


# --- bad requests

BAD: list[tuple[str, str, Any, int, str | None, str | None]] = [
    ("malformed JSON", CHAT, b'{"model": ', 400, None, "invalid_json"),
    ("not an object", TEXT, b"[1]", 400, None, None),
    ("empty body", TEXT, b"", 400, None, "invalid_json"),
    ("unknown model", CHAT, {"model": "gpt-7", "messages": HELLO}, 404, "model", "model_not_found"),
    ("no messages", CHAT, {}, 400, "messages", "missing_required_parameter"),
    ("unknown role", CHAT, {"messages": [{"role": "king", "content": "x"}]}, 400, "messages[0].role", None),
    ("text as number", CHAT, {"messages": HELLO, "temperature": "hot"}, 400, "temperature", "invalid_type"),
    ("out of range", TEXT, {"prompt": "w20", "max_tokens": 0}, 400, "max_tokens", "invalid_value"),
    ("wrong prompt", TEXT, {"prompt": {"a": 1}}, 400, "prompt", None),
    ("echo", TEXT, {"prompt": "w20", "echo": True}, 400, "echo", None),
    ("blank text", TEXT, {"prompt": "   "}, 400, "prompt", "invalid_value"),
    ("too long", TEXT, {"prompt": [20] * MAX_MODEL_LEN}, 400, "prompt", "context_length_exceeded"),
    (
        "too long a chat",
        CHAT,
        {"messages": [{"role": "user", "content": "w20 " * 99}]},
        400,
        "messages",
        "context_length_exceeded",
    ),
    ("tools", CHAT, {"messages": HELLO, "tools": [{"type": "function"}]}, 400, "tools", None),
]


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "code"), [case[1:] for case in BAD], ids=[case[0] for case in BAD]
)
async def test_a_bad_request_is_named(
    stack: Stack, path: str, body: Any, status: int, param: str | None, code: str | None
) -> None:
    found, answer, _ = await stack.post(path, body)
    assert found == status
    error = answer["error"]
    assert error["message"] and error["type"]
    assert error["param"] == param
    if code is not None:
        assert error["code"] == code
    assert not stack.prefill[0].calls


async def test_unknown_paths_and_methods_are_error_objects(stack: Stack) -> None:
    status, answer = await stack.get("/v1/nothing")
    assert (status, answer["error"]["type"]) == (404, "not_found_error")
    status, answer = await stack.get(CHAT)
    assert status == 405 and answer["error"]["message"]


FORMS = ["application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "Text/Plain;charset=UTF-8"]


@pytest.mark.parametrize("path", [CHAT, TEXT, "/v1/messages", "/v1/embeddings", "/tokenize"])
@pytest.mark.parametrize("content_type", FORMS, ids=["form", "parts", "text"])
async def test_a_body_that_a_form_of_another_site_could_send_is_refused(
    stack: Stack, path: str, content_type: str
) -> None:
    body = json.dumps({"prompt": PROMPT, "messages": HELLO, "max_tokens": 1}).encode()
    for name, value in (("Origin", "null"), ("Sec-Fetch-Site", "cross-site")):
        status, answer, _ = await stack.post(path, body, {"Content-Type": content_type, name: value})
        assert (status, answer["error"]["param"]) == (415, "Content-Type")
    assert not stack.prefill[0].calls


@pytest.mark.parametrize(
    "content_type", ["application/json; charset=utf-8", "application/x+json", FORMS[0], None]
)
async def test_a_body_of_json_is_taken(stack: Stack, content_type: str | None) -> None:
    """Programs that do not name its type, as ``curl -d``, say that it is a form."""
    body = json.dumps({"prompt": PROMPT, "max_tokens": 1}).encode()
    headers = {} if content_type is None else {"Content-Type": content_type}
    asking = stack.session.post(
        stack.url + TEXT, data=body, headers=headers, skip_auto_headers=["Content-Type"]
    )
    async with asking as response:
        assert response.status == 200


async def test_no_page_loads_programs_from_other_hosts(stack: Stack) -> None:
    for path in ("/docs", "/docs/oauth2-redirect", "/redoc"):
        assert (await stack.get(path))[0] == 404
    apps = create_operator_app(stack.gateway), create_app(stack.gateway)
    paths = {getattr(route, "path", "") for app in apps for route in app.routes}
    assert "/openapi.json" in paths and not {"/docs", "/redoc"} & paths


@pytest.mark.parametrize("path", ["/health", "/ready"])
async def test_health_is_asked_with_head_too(stack: Stack, path: str) -> None:
    async with stack.session.head(stack.url + path) as response:
        assert (response.status, await response.read()) == (200, b"")


async def test_the_schema_names_the_fields(stack: Stack) -> None:
    _, schema = await stack.get("/openapi.json")
    body = schema["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert "messages" in body["required"]
    assert "role" in json.dumps(body["properties"]["messages"])
    assert "$ref" not in json.dumps(body)


async def test_a_fault_of_the_gateway_has_the_ids_of_its_request(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken() -> int:
        raise RuntimeError("boom")

    monkeypatch.setattr(stack.gateway, "context_length", broken)
    status, answer, headers = await stack.post(TEXT, {"prompt": PROMPT}, {"X-Request-ID": "mine-1"})
    assert (status, answer["error"]["code"]) == (500, "internal_error")
    assert headers["x-request-id"] == "mine-1"


# --- headers


async def test_request_id_and_trace_travel(stack: Stack) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    given = {"X-Request-ID": "mine-1", "traceparent": trace}
    _, _, headers = await stack.post(TEXT, {"prompt": PROMPT}, given)
    assert headers["x-request-id"] == "mine-1"
    assert stack.prefill[0].headers[0]["traceparent"] == trace
    assert stack.prefill[0].headers[0]["X-Request-ID"] == "mine-1"
    _, _, headers = await stack.post(TEXT, {"prompt": 5}, {"X-Request-ID": "not fit for a log"})
    assert len(headers["x-request-id"]) == 32


@pytest.mark.parametrize("value", ["-1", "0", "soon", "nan", "inf"])
async def test_a_wrong_slo_is_named(stack: Stack, value: str) -> None:
    status, answer, _ = await stack.post(TEXT, {"prompt": PROMPT}, {"x-slo-ttft-ms": value})
    assert (status, answer["error"]["param"]) == (400, "x-slo-ttft-ms")


@pytest.mark.parametrize("value", ["-1", "10000", "first", "1.0", ""])
async def test_a_wrong_rank_is_named(stack: Stack, value: str) -> None:
    status, answer, _ = await stack.post(TEXT, {"prompt": PROMPT}, {"X-data-parallel-rank": value})
    assert (status, answer["error"]["param"]) == (400, "X-data-parallel-rank")
    status, _, _ = await stack.post(TEXT, {"prompt": PROMPT}, {"X-data-parallel-rank": "3"})
    assert status == 200


async def test_the_list_of_models_has_the_context_length_once_a_worker_is_there(tokenizer: Tokenizer) -> None:
    async with doubles(1, 0) as ([worker], _), running(tokenizer, num_prefill=0, num_decode=0) as stack:
        _, models = await stack.get("/v1/models")
        assert "max_model_len" not in models["data"][0]
        body = {"type": "decode", "instance": worker.address}
        status, _, _ = await stack.post("/instances/add", body, {"X-API-Key": ADMIN_KEY})
        assert status == 200
        _, models = await stack.get("/v1/models")
        assert models["data"][0]["max_model_len"] == MAX_MODEL_LEN
        _, model = await stack.get("/v1/models/tiny")
        assert model["max_model_len"] == MAX_MODEL_LEN


async def test_slos_are_counted(stack: Stack) -> None:
    await stack.post(TEXT, {"prompt": PROMPT}, {"x-slo-ttft-ms": "60000", "x-slo-tbt-ms": "0.000001"})
    async with stack.session.get(stack.url + "/metrics", headers={"X-API-Key": ADMIN_KEY}) as response:
        page = await response.text()
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert 'mooncake_gateway_slo_total{met="yes",slo="ttft"}' in page
    assert 'mooncake_gateway_slo_total{met="no",slo="tbt"}' in page
    assert "vllm:time_to_first_token_seconds_bucket" in page


async def test_affinity_sends_a_session_to_one_instance(tokenizer: Tokenizer) -> None:
    async with running(tokenizer, num_prefill=4, scheduling="cache_aware") as stack:
        for session in ("a", "b", "c"):
            found = set()
            for number in range(3):
                body = {"prompt": [20 + number]}
                _, _, headers = await stack.post(TEXT, body, {"X-Session-Affinity": session})
                found.add(headers["x-mooncake-prefill"])
            assert len(found) == 1


async def test_a_session_in_the_body_is_followed_as_one_in_a_header(tokenizer: Tokenizer) -> None:
    async with running(tokenizer, num_prefill=4, scheduling="cache_aware") as stack:
        found = set()
        for number in range(4):
            body = {"prompt": [20 + number], **({} if number % 2 else {"session_id": "s"})}
            _, _, headers = await stack.post(TEXT, body, {"Session-ID": "s"} if number % 2 else {})
            found.add(headers["x-mooncake-prefill"])
        assert len(found) == 1


async def test_the_salt_reaches_both_workers(stack: Stack) -> None:
    await stack.complete(PROMPT, cache_salt="tenant")
    calls = [call for worker in [*stack.prefill, *stack.decode] for call in worker.calls]
    assert [call["cache_salt"] for call in calls] == ["tenant", "tenant"]


# --- limits


async def test_the_deadline_is_a_504(tokenizer: Tokenizer) -> None:
    async with running(tokenizer, request_timeout_s=0.3) as stack:
        stack.prefill[0].stall_after = 0
        status, answer, _ = await stack.post(TEXT, {"prompt": PROMPT})
        assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")


async def test_a_deadline_in_mid_stream_is_an_event(tokenizer: Tokenizer) -> None:
    async with running(tokenizer, num_decode=1, request_timeout_s=0.5) as stack:
        stack.decode[0].stall_after = 2
        streamed = await stack.stream(PROMPT, 8)
        assert json.loads(streamed.events[-1].removeprefix("data: "))["error"]["code"] == "deadline_exceeded"


def num_streams(status: str) -> float:
    labels = {"endpoint": TEXT, "status": status}
    return registry.get_sample_value("mooncake_gateway_requests_total", labels) or 0.0


@pytest.mark.parametrize(("how", "status"), [("whole", "200"), ("late", "broken"), ("left", "499")])
async def test_a_stream_is_counted_by_its_end(tokenizer: Tokenizer, how: str, status: str) -> None:
    seen = {one: num_streams(one) for one in ("200", "499", "broken")}
    body = {"prompt": PROMPT, "max_tokens": 8, "stream": True}
    async with running(tokenizer, num_decode=1, request_timeout_s=0.5 if how == "late" else 60.0) as stack:
        stack.decode[0].stall_after = None if how == "whole" else 2
        async with stack.session.post(stack.url + TEXT, json=body) as response:
            await response.content.readuntil(b"\n\n")
            if how != "left":
                await response.read()
        await until(lambda: num_streams(status) > seen[status])
    changed = {one: num_streams(one) - before for one, before in seen.items() if num_streams(one) > before}
    assert changed == {status: 1.0}


async def test_a_stream_that_a_fault_of_the_gateway_breaks_is_counted_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def broken() -> AsyncGenerator[bytes, None]:
        yield b"data: 2\n\n"
        raise RuntimeError("boom")

    async def serve_broken(*given: Any) -> Response:
        return EventStreamResponse(b"data: 1\n\n", broken(), {}, lambda: None)

    monkeypatch.setattr(gateway_app, "serve_any_engine", serve_broken)
    seen = {one: num_streams(one) for one in ("200", "500", "broken")}
    engine = Engine(Wire())
    async with (
        serving(engine, monkeypatch, drain_s=0.0) as (url, session, _),
        session.post(url + TEXT, json=STREAM) as response,
    ):
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()
    assert {one: num_streams(one) - before for one, before in seen.items()} == {
        "200": 0,
        "500": 0,
        "broken": 1,
    }


async def test_too_many_at_once_are_refused_with_the_time_to_retry(tokenizer: Tokenizer) -> None:
    async with running(tokenizer, max_in_flight=2) as stack:
        for worker in stack.decode:
            worker.stall_after = 0
        waiting = [asyncio.create_task(stack.post(TEXT, {"prompt": PROMPT})) for _ in range(2)]
        async with asyncio.timeout(10):
            while sum(len(worker.calls) for worker in stack.decode) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        status, answer, headers = await stack.post(TEXT, {"prompt": PROMPT})
        assert (status, answer["error"]["code"]) == (429, "overloaded")
        assert int(headers["retry-after"]) >= 1
        status, answer, _ = await stack.post(TEXT, {"prompt": PROMPT, "n": 3})
        assert (status, answer["error"]["param"]) == (400, "n")
        for task in waiting:
            task.cancel()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_disconnects_stops_the_worker(stack: Stack, stream: bool) -> None:
    for worker in stack.decode:
        worker.stall_after = 2
    body = {"prompt": PROMPT, "stream": stream}
    pending = asyncio.create_task(stack.post(TEXT, body))
    async with asyncio.timeout(10):
        while not any(worker.calls for worker in stack.decode):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        pending.cancel()
        while not any(worker.num_cancelled for worker in stack.decode):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


# --- stop


STREAM = {"prompt": "w20 w21", "max_tokens": 3, "stream": True}


@contextlib.asynccontextmanager
async def serving(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, drain_s: float, **more: Any
) -> AsyncIterator[tuple[str, aiohttp.ClientSession, asyncio.Task[None]]]:
    """The URL, a client and the task of a gateway as its process runs it, in front of ``engine``."""
    listening = listen("127.0.0.1", 0)
    monkeypatch.setattr(gateway_app, "listen", lambda host, port: listening)
    monkeypatch.setattr(gateway_app, "load_tokenizer", lambda settings: None)
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    await engine.start()
    settings = GatewaySettings(decode=(engine.address,), probe_interval_s=0.05, drain_s=drain_s, **more)
    task = asyncio.create_task(serve(settings))
    async with aiohttp.ClientSession() as session:

        async def is_ready() -> bool:
            async with session.get(f"{url}/ready") as response:
                return response.status == 200

        try:
            await until(is_ready)
            yield url, session, task
        finally:
            task.cancel()
            await asyncio.wait([task])
            await engine.stop()


async def test_a_stopping_gateway_ends_its_answers_and_takes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(Wire(), gate=asyncio.Event())
    async with (
        serving(engine, monkeypatch, drain_s=60.0) as (url, session, task),
        session.post(url + TEXT, json=STREAM) as response,
    ):
        await response.content.readuntil(b"\n\n")
        task.cancel()

        async def is_refused() -> bool:
            async with session.get(f"{url}/ready") as ready:
                return ready.status == 503

        await until(is_refused)
        async with session.post(url + TEXT, json=STREAM) as refused:
            assert (refused.status, (await refused.json())["error"]["code"]) == (503, "gateway_stopping")
            assert (refused.headers["Retry-After"], refused.headers["Connection"]) == ("1", "close")
        assert not task.done()
        assert engine.gate is not None
        engine.gate.set()
        assert (await response.read()).endswith(b"data: [DONE]\n\n")
        await asyncio.wait([task])
        assert task.cancelled()


@pytest.mark.parametrize("how", ["after its time", "at once"])
async def test_answers_that_do_not_end_are_cut(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    engine = Engine(Wire(), gate=asyncio.Event())
    async with (
        serving(engine, monkeypatch, drain_s=0.05 if how == "after its time" else 1e6) as (
            url,
            session,
            task,
        ),
        session.post(url + TEXT, json=STREAM) as response,
    ):
        await response.content.readuntil(b"\n\n")
        task.cancel()
        if how == "at once":
            await asyncio.sleep(0)
            assert not task.done()
            task.cancel()
        assert b"gateway_stopping" in await response.read()
        await asyncio.wait([task])


async def test_bodies_of_answers_in_progress_have_the_memory_that_is_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Agents send their whole context with each request, and many answers at a time hold such a body."""
    limits = {"max_body_bytes": 1 << 10, "max_bodies_bytes": 4 << 10}
    engine = Engine(Wire(), gate=asyncio.Event())
    body = {**STREAM, "user": "x" * 900}
    async with (
        serving(engine, monkeypatch, 60.0, **limits) as (url, session, _),
        contextlib.AsyncExitStack() as s,
    ):
        held = [await s.enter_async_context(session.post(url + TEXT, json=body)) for _ in range(4)]
        assert [one.status for one in held] == [200] * 4
        async with session.post(url + TEXT, json=body) as refused:
            assert (refused.status, (await refused.json())["error"]["code"]) == (503, "overloaded")
        assert engine.gate is not None
        engine.gate.set()
        assert all([(await one.read()).endswith(b"data: [DONE]\n\n") for one in held])
        async with session.post(url + TEXT, json=body) as later:
            assert later.status == 200


def test_wrong_instances_are_named() -> None:
    with pytest.raises(InvalidArgument, match="decode"):
        GatewaySettings(decode=("nowhere",))


@pytest.mark.parametrize("conductor", ["foo", "10.0.0.1:8400,", "10.0.0.1:8400,10.0.0.2:0"])
def test_a_wrong_address_of_a_conductor_is_named(conductor: str) -> None:
    with pytest.raises(InvalidArgument, match=r"^conductor is '.*'; allowed: host:port\[,host:port\]"):
        GatewaySettings(conductor=conductor)
    found = GatewaySettings(conductor="10.0.0.1:8400, [::1]:8401")
    assert found.conductor_addresses == ["10.0.0.1:8400", "[::1]:8401"]
    assert GatewaySettings().conductor_addresses == []

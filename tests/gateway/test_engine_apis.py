# SPDX-License-Identifier: Apache-2.0
"""Messages, responses and calls without an answer: as the engine sent them, scheduled like chats."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from aiohttp import web

from mooncake.gateway.engine_apis import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    EngineApi,
    as_chat,
    failure_in,
    read_request,
    usage_in,
)
from mooncake.http.openai import ApiError
from mooncake.metrics import registry
from tests.gateway.conftest import running
from tests.gateway.doubles import answer_text
from tests.gateway.engines import Front, fronting
from tests.gateway.test_any_engine import CHAT_IDS, HOSTILE, IDS, PROMPT, PROTOCOLS, READ_BY_ENGINES
from tests.waiting import until

NUM_TOKENS = 5
MESSAGE = {
    "model": "tiny",
    "max_tokens": NUM_TOKENS,
    "messages": [{"role": "user", "content": PROMPT}],
}
RESPONSE = {"model": "tiny", "max_output_tokens": NUM_TOKENS, "input": PROMPT}
BODIES = {MESSAGES.path: MESSAGE, RESPONSES.path: RESPONSE}
PATHS = [*BODIES]


async def streamed(front: Any, path: str, **fields: Any) -> bytes:
    body = {**BODIES[path], "stream": True, **fields}
    async with front.session.post(front.url + path, json=body) as response:
        assert response.status == 200, await response.text()
        assert response.content_type == "text/event-stream"
        found: bytes = await response.read()
    return found


def names(stream: bytes) -> list[str]:
    lines = stream.decode().split("\n")
    return [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]


def text_in(path: str, answer: dict[str, Any]) -> str:
    content = answer["content"] if path == MESSAGES.path else answer["output"][0]["content"]
    return "".join(part["text"] for part in content)


# --- answers


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("path", PATHS)
async def test_the_prompt_is_computed_once_and_the_answer_is_what_the_engine_sent(
    path: str, protocol: str
) -> None:
    async with fronting(protocol=protocol) as front:
        [prefill], [decode] = front.prefill, front.decode
        assert await streamed(front, path) == decode.sent[-1]
        async with front.session.post(front.url + path, json=BODIES[path]) as response:
            assert response.status == 200
            assert response.headers["x-mooncake-prefill"] == prefill.address
            body = await response.read()
        assert body == decode.sent[-1]
        assert text_in(path, json.loads(body)) == answer_text(CHAT_IDS, NUM_TOKENS)
        assert prefill.paths == decode.paths == [path, path]
        assert prefill.num_computed == [12, 0]
        assert decode.num_computed == ([0, 0] if protocol == "pool" else [1, 1])
        for call in prefill.calls:
            limit = "max_tokens" if path == MESSAGES.path else "max_output_tokens"
            assert (call[limit], call["stream"]) == (1, False)
            assert ("max_tokens" in call) is (path == MESSAGES.path)
            assert call.get("store", True) is (path == MESSAGES.path)


@pytest.mark.parametrize("path", PATHS)
async def test_an_answer_is_counted_and_explained(path: str) -> None:
    def count(kind: str) -> float:
        return registry.get_sample_value("mooncake_gateway_tokens_total", {"kind": kind}) or 0.0

    async with fronting() as front:
        await streamed(front, path)
        before = {kind: count(kind) for kind in ("prompt", "cached", "output")}
        for stream in (False, True):
            status, _, headers = await post_read(front, path, {**BODIES[path], "stream": stream})
            assert status == 200
        # The prefill engine's cached tokens, though decode received all but one.
        grown = {kind: count(kind) - number for kind, number in before.items()}
        assert grown == {"prompt": 24, "cached": 24, "output": 2 * NUM_TOKENS}
        _, explained = await front.get(f"/v1/requests/{headers['x-mooncake-id']}/explain")
        assert explained["prompts"], explained


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
async def test_what_is_counted_waits_for_the_prefill_that_counts_cached_tokens(
    path: str, stream: bool
) -> None:
    """With a push, decode may have ended a short answer before prefill has reported its end."""

    def cached() -> float:
        return registry.get_sample_value("mooncake_gateway_tokens_total", {"kind": "cached"}) or 0.0

    async with fronting(1, 1, protocol="push") as front:
        await streamed(front, path)
        before, hold = cached(), asyncio.Event()
        front.prefill[0].hold = hold
        asking = asyncio.ensure_future(post_read(front, path, {**BODIES[path], "stream": stream}))
        await asyncio.sleep(0.2)
        assert not asking.done()
        hold.set()
        status, _, _ = await asking
        assert status == 200
        assert cached() - before == 12, "those of prefill"


async def post_read(front: Any, path: str, body: Any) -> tuple[int, bytes, dict[str, str]]:
    async with front.session.post(front.url + path, json=body) as response:
        found = {name.lower(): value for name, value in response.headers.items()}
        return response.status, await response.read(), found


@pytest.mark.parametrize("path", PATHS)
async def test_a_stream_is_not_buffered_and_a_client_that_leaves_cancels_it(path: str) -> None:
    async with fronting() as front:
        [decode] = front.decode
        gate = decode.gate = asyncio.Event()
        body = {**BODIES[path], "stream": True}
        async with front.session.post(front.url + path, json=body) as response:
            found = b""
            while b"delta" not in found:
                found += await response.content.readany()
            assert not gate.is_set()
        await until(lambda: decode.num_cancelled == 1)


async def test_sdks_read_responses() -> None:
    async with (
        fronting() as front,
        openai.AsyncOpenAI(base_url=f"{front.url}/v1", api_key="k-1", max_retries=0) as client,
    ):
        answer = await client.responses.create(model="tiny", input=PROMPT, max_output_tokens=NUM_TOKENS)
        assert answer.output_text == answer_text(CHAT_IDS, NUM_TOKENS)
        stream = await client.responses.create(
            model="tiny", input=PROMPT, max_output_tokens=NUM_TOKENS, stream=True
        )
        events = [event async for event in stream]
        assert "".join(one.delta for one in events if one.type == "response.output_text.delta") == (
            answer.output_text
        )
        assert front.decode[0].calls[0]["model"] == "org/tiny", "the engine's name for it"


@pytest.mark.parametrize("path", PATHS)
async def test_a_session_and_other_headers_are_handed_on(path: str) -> None:
    async with fronting(0, 1) as front:
        async with front.session.post(
            front.url + path, json=BODIES[path], headers=READ_BY_ENGINES
        ) as response:
            assert response.status == 200
        [headers] = front.decode[0].headers
        assert {name: headers.get(name.lower()) for name in READ_BY_ENGINES} == READ_BY_ENGINES


# --- what one engine alone can serve


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (RESPONSES.path, {"previous_response_id": "resp_1"}),
        (RESPONSES.path, {"tools": [{"type": "mcp", "server_label": "x"}]}),
        (MESSAGES.path, {"thinking": {"type": "enabled", "budget_tokens": 2}}),
    ],
)
async def test_what_two_engines_cannot_serve_goes_to_one(
    path: str, fields: dict[str, Any], protocol: str
) -> None:
    async with fronting(protocol=protocol) as front:
        status, _, _ = await post_read(front, path, {**BODIES[path], **fields})
        assert status == 200
        is_split = path == MESSAGES.path and protocol != "pool"
        assert len(front.prefill[0].calls) == int(is_split)
        [call] = front.decode[0].calls
        assert ("kv_transfer_params" in call) is is_split


async def test_own_tools_may_be_split() -> None:
    async with fronting() as front:
        tools = [{"type": "function", "name": "f", "parameters": {}}]
        status, _, _ = await post_read(front, RESPONSES.path, {**RESPONSE, "tools": tools})
        assert (status, len(front.prefill[0].calls)) == (200, 1)


# --- failures


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("path", PATHS)
async def test_a_failure_before_the_first_token_is_hidden(path: str, side: str) -> None:
    async with fronting(2, 2) as front:
        for one in getattr(front, side):
            one.die_after = 0
        found = await streamed(front, path)
        assert found in [sent for one in front.engines for sent in one.sent]
        assert names(found)[-1] in (*MESSAGES.endings, *RESPONSES.endings)


@pytest.mark.parametrize("path", PATHS)
async def test_an_error_before_the_first_token_is_hidden_with_the_events_before_it(path: str) -> None:
    async with fronting(0, 2) as front:
        broken = front.decode[0]
        real = broken._answer_named

        async def fail(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            broken._answer_named = real  # type: ignore[method-assign]
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            name = "message_start" if path == MESSAGES.path else "response.created"
            await response.write(f'event: {name}\ndata: {{"type": "{name}"}}\n\n'.encode())
            await response.write(b'event: error\ndata: {"type": "error", "message": "no KV"}\n\n')
            return response

        broken._answer_named = fail  # type: ignore[method-assign]
        found = [await streamed(front, path) for _ in range(2)]
        assert broken._answer_named == real, "it failed once"
        sent = [sent for one in front.decode for sent in one.sent]
        assert sorted(found) == sorted(sent)


@pytest.mark.parametrize("how", ["die", "error", "cut"])
@pytest.mark.parametrize("path", PATHS)
async def test_a_failure_in_the_middle_is_an_event_of_the_api(path: str, how: str) -> None:
    async with fronting(0, 1) as front:
        [decode] = front.decode
        if how == "die":
            decode.die_after = 1
            gate = decode.gate = asyncio.Event()
        elif how == "error":
            decode.give_up = (2, "error")
        else:

            async def cut(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
                """End the stream normally, without its last event."""
                response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
                await response.prepare(request)
                name = "content_block_delta" if path == MESSAGES.path else "response.output_text.delta"
                await response.write(f'event: {name}\ndata: {{"type": "{name}"}}\n\n'.encode())
                return response

            decode._answer_named = cut  # type: ignore[method-assign]
        found = b""
        async with front.session.post(front.url + path, json={**BODIES[path], "stream": True}) as response:
            while data := await response.content.readany():
                found += data
                if how == "die" and b"delta" in found:
                    gate.set()  # the client has the beginning of the answer
        assert names(found)[-1] == "error" and names(found).count("error") == 1
        assert not {*names(found)} & {*MESSAGES.endings, *RESPONSES.endings}
        event = json.loads(found.rsplit(b"data: ", 1)[1])
        assert event["type"] == "error"
        detail = event["error"] if path == MESSAGES.path else event
        assert detail["code"] == "engine_lost" and "engine was lost" in detail["message"]


@pytest.mark.parametrize("path", PATHS)
async def test_an_engine_without_the_endpoint_answers_404_once(path: str) -> None:
    async with fronting(0, 2, engine={"has_named_apis": False}) as front:
        status, body, _ = await post_read(front, path, BODIES[path])
        answer = json.loads(body)
        assert status == 404 and "404" in answer["error"]["message"]
        assert answer.get("type") == ("error" if path == MESSAGES.path else None)
        assert set((await front.health()).values()) == {"ready"}, "it is no failure of theirs"


@pytest.mark.parametrize("path", PATHS)
async def test_an_engine_s_refusal_reaches_the_client(path: str) -> None:
    async with fronting(0, 2) as front:
        for status in (400, 501):
            refusal = {"type": "BadRequestError", "message": "too long"}
            for one in front.decode:
                one.refuse = (status, refusal)
                one.calls.clear()
            found, body, _ = await post_read(front, path, BODIES[path])
            assert (found, json.loads(body)["error"]["message"]) == (status, "too long")
            assert sum(len(one.calls) for one in front.decode) == 1, "it would be refused everywhere"
            assert set((await front.health()).values()) == {"ready"}


@pytest.mark.parametrize("path", PATHS)
async def test_our_own_workers_do_not_serve_it(tokenizer: Any, path: str) -> None:
    async with running(tokenizer, protocol="workers") as stack:
        status, answer, _ = await stack.post(path, BODIES[path])
        assert (status, answer["error"]["code"]) == (404, "endpoint_not_served")
        assert "mooncake workers" in answer["error"]["message"]
        assert not any(worker.calls for worker in (*stack.prefill, *stack.decode))


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (MESSAGES.path, {"messages": []}, "messages"),
        (MESSAGES.path, {"messages": "w20"}, "messages"),
        (MESSAGES.path, {"stream": "yes"}, "stream"),
        (RESPONSES.path, {"input": None}, "input"),
        (RESPONSES.path, {"input": 7}, "input"),
        (RESPONSES.path, {"background": True}, "background"),
        (RESPONSES.path, {"priority": 1001}, "priority"),
    ],
)
async def test_a_wrong_field_is_refused_by_name(path: str, fields: dict[str, Any], param: str) -> None:
    async with fronting() as front:
        status, answer, _ = await front.post(path, {**BODIES[path], **fields})
        assert (status, answer["error"]["param"]) == (400, param)
        assert not any(one.calls for one in front.engines)


# --- hostile fields and clients


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("path", PATHS)
async def test_no_engine_gets_a_client_s_transfer(path: str, protocol: str) -> None:
    async with fronting(protocol=protocol) as front:
        hostile = {
            "kv_transfer_params": HOSTILE,
            "ec_transfer_params": HOSTILE,
            "bootstrap_host": "10.6.6.6",
            "vllm_xargs": {"kv_transfer_params": HOSTILE},
            "routed_dp_rank": 1,
            "request_id": "resp_of_another",
        }
        status, _, _ = await post_read(front, path, {**BODIES[path], **hostile})
        assert status == 200
        for call in (call for one in front.engines for call in one.calls):
            assert "10.6.6.6" not in json.dumps(call) and "another request" not in json.dumps(call)
            assert not {"bootstrap_host", "routed_dp_rank", "ec_transfer_params"} & {*call}
            assert path == MESSAGES.path or "request_id" not in call


KEY = "anna-anna-anna-anna"


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[Front]:
    """A gateway with a client's key."""
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"keys": [{"name": "anna", "key": KEY, "max_in_flight": 1}]}))
    keys.chmod(0o600)
    async with fronting(0, 1, api_keys_file=str(keys)) as front:
        yield front


@pytest.mark.parametrize("path", [*PATHS, "/v1/embeddings", "/tokenize", "/detokenize"])
async def test_a_key_is_needed_before_the_body(guarded: Front, path: str) -> None:
    status, answer, _ = await guarded.post(path, b"{")
    assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
    status, answer, _ = await guarded.post(path, b"{", {"Authorization": f"Bearer {KEY}"})
    assert (status, answer["error"]["code"]) == (400, "invalid_json")


async def test_messages_take_the_key_as_anthropic_s_clients_send_it(guarded: Front) -> None:
    for path, allowed in ((MESSAGES.path, 200), (RESPONSES.path, 401)):
        status, _, _ = await guarded.post(path, BODIES[path], {"X-API-Key": KEY})
        assert status == allowed
    status, answer, _ = await guarded.post(MESSAGES.path, MESSAGE, {"X-API-Key": "wrong"})
    assert (status, answer["type"], answer["error"]["type"]) == (401, "error", "authentication_error")
    [engine] = guarded.decode
    [call], [headers] = engine.calls, engine.headers
    assert len(call["cache_salt"]) == 64 and KEY not in str(headers), "the tenant's salt, not the key"


@pytest.mark.parametrize(
    ("api", "request_", "num_answers"),
    [
        (COMPLETIONS, {"prompt": "one"}, 1),
        (COMPLETIONS, {"prompt": ["one", "two"], "n": 3}, 6),
        (COMPLETIONS, {"prompt": [1, 2, 3]}, 1),
        (COMPLETIONS, {"prompt": [[1], [2]]}, 2),
        (COMPLETIONS, {"prompt": []}, 1),
        (COMPLETIONS, {"messages": [], "prompt": ["one", "two"]}, 2),
        (COMPLETIONS, {"prompt": "one", "prompt_embeds": ["a", "b"], "n": 2}, 6),
        (COMPLETIONS, {"prompt": "one", "prompt_embeds": "a"}, 2),
        (CHAT, {"messages": [], "prompt": []}, 1),
        (CHAT, {"messages": [{}, {}], "prompt": ["one", "two"], "prompt_embeds": ["a"], "n": 2}, 2),
        (MESSAGES, {"messages": [{}, {}], "prompt": ["one", "two"], "n": 2}, 1),
        (RESPONSES, {"input": [{}, {}], "prompt": ["one", "two"], "n": 2}, 1),
    ],
)
def test_answers_are_the_prompts_of_the_endpoint_times_n(
    api: EngineApi, request_: dict[str, Any], num_answers: int
) -> None:
    assert api.num_answers(request_) == num_answers


# --- calls without an answer


def counting(front: Front, path: str, answer: Callable[[dict[str, Any]], web.Response]) -> list[int]:
    """Serve ``path`` at every engine; the numbers of the engines that are called."""
    called: list[int] = []
    for number, one in enumerate(front.engines):

        async def serve(request: web.Request, number: int = number) -> web.Response:
            called.append(number)
            return answer(await request.json())

        one.plain[path] = serve
    return called


EMBEDDED = {
    "object": "list",
    "data": [{"object": "embedding", "index": 0, "embedding": [0.25, 0.5]}],
    "usage": {"prompt_tokens": 3, "total_tokens": 3},
}


async def test_embeddings_come_from_engines_in_turn_as_they_were_sent() -> None:
    async with fronting(0, 2) as front:
        seen: list[dict[str, Any]] = []

        def answer(body: dict[str, Any]) -> web.Response:
            seen.append(body)
            return web.json_response(EMBEDDED)

        called = counting(front, "/v1/embeddings", answer)
        hostile = {"kv_transfer_params": HOSTILE, "model": "tiny", "input": ["w20"]}
        for _ in range(4):
            status, found, headers = await front.post("/v1/embeddings", hostile, {"X-Request-ID": "mine"})
            assert (status, found, headers["x-request-id"]) == (200, EMBEDDED, "mine")
        assert sorted(called) == [0, 0, 1, 1]
        assert seen == [{"model": "org/tiny", "input": ["w20"]}] * 4


async def test_tokens_are_those_of_the_engine() -> None:
    async with fronting() as front:
        status, found, _ = await front.post("/tokenize", {"prompt": PROMPT})
        assert (status, found["tokens"]) == (200, IDS)


async def test_a_call_that_fails_is_tried_elsewhere() -> None:
    async with fronting(0, 3) as front:
        statuses = iter([500, 429, 200])

        def answer(body: dict[str, Any]) -> web.Response:
            status = next(statuses)
            return web.json_response(EMBEDDED if status == 200 else {"error": "x"}, status=status)

        called = counting(front, "/v1/embeddings", answer)
        status, found, _ = await front.post("/v1/embeddings", {"input": "w20"})
        assert (status, found) == (200, EMBEDDED)
        assert sorted(called) == [0, 1, 2]


@pytest.mark.parametrize(("status", "num_calls"), [(404, 1), (501, 1), (429, 2), (500, 2)])
async def test_a_refused_call_is_not_repeated_where_it_would_be_refused(status: int, num_calls: int) -> None:
    async with fronting(0, 2) as front:

        def answer(body: dict[str, Any]) -> web.Response:
            return web.json_response({"error": {"message": "no", "type": "x"}}, status=status)

        called = counting(front, "/detokenize", answer)
        found, body, _ = await front.post("/detokenize", {"tokens": [20]})
        assert found == (503 if status == 500 else status) and "no" in body["error"]["message"]
        assert len(called) == num_calls


async def test_a_client_that_leaves_cancels_its_call() -> None:
    async with fronting(0, 1) as front:
        began, ended = asyncio.Event(), asyncio.Event()

        async def serve(request: web.Request) -> web.Response:
            began.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()
            raise AssertionError("it is cancelled")

        front.decode[0].plain["/v1/embeddings"] = serve
        calling = asyncio.ensure_future(front.post("/v1/embeddings", {"input": "w20"}))
        async with asyncio.timeout(20):
            await began.wait()
            calling.cancel()
            await ended.wait()


async def test_a_call_has_a_deadline() -> None:
    async with fronting(0, 1, request_timeout_s=0.2) as front:

        async def serve(request: web.Request) -> web.Response:
            await asyncio.Event().wait()
            raise AssertionError("it is cancelled")

        front.decode[0].plain["/v1/embeddings"] = serve
        status, answer, _ = await front.post("/v1/embeddings", {"input": "w20"})
        assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")


# --- prompts as chats


BLOCK = {"type": "text", "text": "a"}
LARGE = {"type": "image", "source": {"data": "x" * 100_000}}


@pytest.mark.parametrize(
    ("api", "request_", "messages"),
    [
        (
            MESSAGES,
            {"system": "s", "messages": [{"role": "user", "content": "a"}]},
            [("system", "s"), ("user", "a")],
        ),
        (
            MESSAGES,
            {
                "system": [
                    {"type": "text", "text": "x-anthropic-billing-header: 7"},
                    {"type": "text", "text": "s"},
                ],
                "messages": [{"role": "user", "content": [BLOCK, {"type": "text", "text": "b"}]}],
            },
            [("system", "s"), ("user", "a\nb")],
        ),
        (
            MESSAGES,
            {
                "messages": [
                    {
                        "role": "assistant",
                        "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}],
                    },
                    {
                        "role": "user",
                        "content": [{"type": "tool_result", "tool_use_id": "1", "content": [BLOCK]}],
                    },
                ]
            },
            [("assistant", ""), ("tool", "a")],
        ),
        (RESPONSES, {"instructions": "s", "input": "a"}, [("system", "s"), ("user", "a")]),
        (
            RESPONSES,
            {
                "input": [
                    {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
                    {"type": "reasoning", "summary": []},
                    {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "1", "output": "b"},
                ]
            },
            [("user", "a"), ("assistant", ""), ("tool", "b")],
        ),
        (
            MESSAGES,
            {"messages": [7, None, {"role": 7, "content": {"x": 1}}]},
            [("user", "7"), ("7", '{"x":1}')],
        ),
        (RESPONSES, {"input": [7, [8]]}, [("user", "7"), ("user", "8")]),
    ],
)
def test_a_prompt_is_hashed_as_a_chat(
    api: EngineApi, request_: dict[str, Any], messages: list[tuple[str, str]]
) -> None:
    chat = as_chat(api, request_)
    assert [(one["role"], one["content"]) for one in chat["messages"]] == messages


def test_a_large_item_is_a_digest_and_a_chat_stays_itself() -> None:
    [message] = as_chat(MESSAGES, {"messages": [{"role": "user", "content": [LARGE]}]})["messages"]
    assert len(message["content"]) == 64
    assert as_chat(CHAT, MESSAGE) is MESSAGE


def test_tools_are_named_as_in_a_chat() -> None:
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    of_messages = {"name": "f", "description": "d", "input_schema": {"type": "object"}}
    for api, tool in ((MESSAGES, of_messages), (RESPONSES, {"type": "function", **function})):
        chat = as_chat(api, {**BODIES[api.path], "tools": [tool], "cache_salt": "s"})
        assert chat["tools"] == [{"type": "function", "function": function}]
        assert (chat["cache_salt"], chat["model"]) == ("s", "tiny")


@pytest.mark.parametrize("path", PATHS)
async def test_a_prefix_is_found_again(path: str) -> None:
    settings = {"scheduling": "cache_aware", "tokenizing": "engine"}
    async with fronting(0, 4, **settings) as front:
        found = set()
        for _ in range(4):
            _, _, headers = await post_read(front, path, BODIES[path])
            found.add(headers["x-mooncake-decode"])
        assert len(found) == 1
        assert sum(one.num_tokenized for one in front.decode) == 4


# --- usage


def test_usage_counts_the_whole_prompt() -> None:
    message = {"usage": {"input_tokens": 3, "cache_read_input_tokens": 8, "output_tokens": 2}}
    response = {"response": {"usage": {"input_tokens": 11, "input_tokens_details": {"cached_tokens": 8}}}}
    embedded = {"usage": {"prompt_tokens": 11, "total_tokens": 11}}
    for event in (message, {"message": message}, response, embedded):
        found = usage_in(json.dumps(event).encode())
        assert found is not None and found.prompt_tokens == 11
    assert usage_in(b'{"usage": null}') is None and usage_in(b'{"usage": "x"}') is None


def test_a_failure_has_its_reason() -> None:
    assert failure_in(b'{"type": "error", "error": {"message": "boom"}}') == "it aborted: boom"
    assert failure_in(b'{"type": "error", "message": "boom"}') == "it aborted: boom"
    assert failure_in(b'{"response": {"error": {"message": "boom"}}}') == "it aborted: boom"
    assert failure_in(b'{"id": "x", "error": null}') == "" == failure_in(b"[]")


def test_a_body_is_an_object() -> None:
    with pytest.raises(ApiError, match="JSON object"):
        read_request(MESSAGES, b"[]")

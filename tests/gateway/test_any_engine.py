# SPDX-License-Identifier: Apache-2.0
"""Third-party engines: each protocol transfers KV, answers are as of one engine, failures are retried."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from aiohttp import web
from msgspec.structs import replace

from mooncake.conductor.client import RemoteConductor
from mooncake.conductor.messages import Decision, Failed, Finished, Prefilled, StepMeasured
from mooncake.conductor.server import ConductorServer, ConductorService
from mooncake.conductor.settings import SchedulingSettings
from mooncake.gateway import any_engine
from mooncake.gateway.clients import Client
from mooncake.inference.tokenizer import Tokenizer
from mooncake.metrics import registry
from tests.gateway.conftest import running
from tests.gateway.doubles import answer_text
from tests.gateway.engines import Engine, Front, fronting
from tests.waiting import until

PROMPT = "w20 w21 w22 w23 w24 w25 w26 w27 w28 w29"
IDS = list(range(20, 30))
CHAT: list[Any] = [{"role": "user", "content": PROMPT}]
CHAT_IDS = [3, *IDS, 4]
PROTOCOLS = ["pool", "sequential", "push", "bootstrap"]
TEXT = "/v1/completions"


# --- protocols


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_the_prompt_is_computed_once_and_the_answer_is_the_engine_s(
    protocol: str, stream: bool
) -> None:
    async with fronting(protocol=protocol) as front:
        for turn in range(2):
            if stream:
                streamed = await front.stream(PROMPT, 5, stream_options={"include_usage": True})
                text, usage = streamed.text(), streamed.chunks[-1]["usage"]
                assert streamed.chunks[0]["choices"][0]["of_this_engine"] == {"only": 0}
            else:
                answer = await front.complete(PROMPT, 5)
                text, usage = answer["choices"][0]["text"], answer["usage"]
            assert text == answer_text(IDS, 5)
            assert usage["completion_tokens"] == 5
            # The cached tokens of the prefill engine, not those transferred to the decoding one.
            assert usage["prompt_tokens_details"]["cached_tokens"] == 8 * turn
        [prefill], [decode] = front.prefill, front.decode
        assert prefill.num_computed == [10, 2]
        assert decode.num_computed == ([2, 2] if protocol == "pool" else [1, 1])
        request = prefill.calls[0]
        assert (request["max_tokens"], request["stream"], "stream_options" in request) == (1, False, False)
        assert decode.calls[0]["max_tokens"] == 5
        params = [call.get("kv_transfer_params") for call in (prefill.calls[0], decode.calls[0])]
        if protocol == "pool":
            assert params == [None, None]
        elif protocol != "sequential":
            assert params[0] is not None and params[1] is not None
            assert params[0]["transfer_id"] == params[1]["transfer_id"]
            assert prefill.calls[1]["kv_transfer_params"]["transfer_id"] != params[0]["transfer_id"]


async def test_a_push_gets_the_address_of_the_other_side() -> None:
    async with fronting(protocol="push") as front:
        await front.complete(PROMPT)
        params = front.decode[0].calls[0]["kv_transfer_params"]
        assert (params["remote_host"], params["remote_port"]) == ("127.0.0.1", front.prefill[0].port)


async def test_without_a_port_of_its_connector_an_engine_is_named_by_its_http_server() -> None:
    async with fronting(protocol="push") as front:
        front.gateway.backends.ports = {}
        await front.complete(PROMPT)
        params = front.decode[0].calls[0]["kv_transfer_params"]
        http_port = int(front.prefill[0].address.rpartition(":")[2])
        assert (params["remote_host"], params["remote_port"]) == ("127.0.0.1", http_port)


async def test_the_engine_that_computes_a_prompt_reports_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fronting(protocol="push") as front:
        events: list[Any] = []
        scheduling = front.gateway.scheduling
        real = scheduling.post

        def post(event: Any) -> None:
            events.append(event)
            real(event)

        monkeypatch.setattr(scheduling, "post", post)
        hold = front.prefill[0].hold = asyncio.Event()
        async with asyncio.timeout(20):
            streamed = await front.stream(PROMPT, 5)
        assert streamed.text() == answer_text(IDS, 5)
        assert not [event for event in events if isinstance(event, Prefilled)], "decode did not compute it"
        hold.set()
        await front.stream(PROMPT, 5, n=2)  # no transfer carries it
        assert len([event for event in events if isinstance(event, Prefilled)]) == 1


async def test_ranks_of_a_prefill_take_turns(caplog: pytest.LogCaptureFixture) -> None:
    async with fronting(protocol="bootstrap", engine={"num_ranks": 2}) as front:
        for _ in range(4):
            await front.complete(PROMPT)
        [prefill], [decode] = front.prefill, front.decode
        ranks = [headers["x-data-parallel-rank"] for headers in prefill.headers]
        assert sorted(ranks) == ["0", "0", "1", "1"]
        for rank, call in zip(ranks, decode.calls, strict=True):
            params = call["kv_transfer_params"]
            assert params["remote_engine_id"] == prefill.rank_name(int(rank))
            assert params["remote_bootstrap_addr"] == f"http://{prefill.address}"


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_several_sequences_go_where_they_can_go(protocol: str) -> None:
    async with fronting(protocol=protocol) as front:
        answer = await front.complete(PROMPT, 3, n=2)
        assert [one["text"] for one in answer["choices"]] == [answer_text(IDS, 3, seed) for seed in (0, 1)]
        answer = await front.complete([PROMPT, "w50 w51"], 3)
        assert [one["text"] for one in answer["choices"]] == [answer_text(IDS, 3), answer_text([50, 51], 3)]
        # A transfer moves one sequence to one reader; a store can be read any number of times.
        assert len(front.prefill[0].calls) == (2 if protocol == "pool" else 0)


async def test_engines_may_do_both() -> None:
    async with fronting(0, 2) as front:
        for _ in range(2):
            answer = await front.complete(PROMPT, 4)
            assert answer["choices"][0]["text"] == answer_text(IDS, 4)
            assert answer["headers"]["x-mooncake-route"] == "decode"
        assert [len(one.calls) for one in front.decode] == [1, 1]
        assert all("kv_transfer_params" not in one.calls[0] for one in front.decode)


# --- answers to clients


async def test_a_chat_with_tools_is_forwarded_unchanged() -> None:
    async with (
        fronting() as front,
        openai.AsyncOpenAI(base_url=f"{front.url}/v1", api_key="k-1", max_retries=0) as client,
    ):
        tools: Any = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
        answer = await client.chat.completions.create(
            model="org/tiny",
            messages=CHAT,
            max_completion_tokens=4,
            tools=tools,
            response_format={"type": "json_object"},
            extra_body={"guided": "x"},
        )
        assert answer.choices[0].message.content == answer_text(CHAT_IDS, 4)
        [call] = front.decode[0].calls
        assert (call["tools"], call["guided"]) == (tools, "x")
        assert call["response_format"] == {"type": "json_object"}
        assert front.prefill[0].calls[0]["max_completion_tokens"] == 1
        assert front.prefill[0].paths == ["/v1/chat/completions"]
        assert all(one.headers[0]["authorization"] == "Bearer k-1" for one in front.engines)
        stream = await client.chat.completions.create(
            model="tiny", messages=CHAT, max_tokens=4, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == answer_text(CHAT_IDS, 4)
        assert front.decode[0].calls[1]["model"] == "org/tiny", "the engine's name for it"


async def test_a_stream_is_not_buffered_and_an_abort_reaches_the_engine() -> None:
    async with fronting() as front:
        front.decode[0].gate = asyncio.Event()
        body = {"prompt": PROMPT, "max_tokens": 5, "stream": True}
        async with front.session.post(front.url + "/v1/completions", json=body) as response:
            first = await response.content.readuntil(b"\n\n")
            assert b"of_this_engine" in first and not front.decode[0].gate.is_set()
            assert front.decode[0].num_cancelled == 0
        # The client has left in the middle.
        async with asyncio.timeout(5):
            while not front.decode[0].num_cancelled:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


# --- headers that engines read


READ_BY_ENGINES = {
    "X-Session-ID": "session-1",
    "X-Vllm-Priority": "-5",
    "X-data-parallel-rank": "3",
    "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    "tracestate": "a=b",
}


async def test_an_engine_that_serves_alone_gets_every_header_that_it_reads() -> None:
    async with fronting(0, 1) as front:
        status, _, _ = await front.post(TEXT, {"prompt": PROMPT}, READ_BY_ENGINES)
        assert status == 200
        [headers] = front.decode[0].headers
        assert {name: headers.get(name.lower()) for name in READ_BY_ENGINES} == READ_BY_ENGINES


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_client_chooses_no_rank_of_a_pair(protocol: str) -> None:
    async with fronting(protocol=protocol, engine={"num_ranks": 2}) as front:
        for number in range(2):
            status, _, _ = await front.post(TEXT, {"prompt": f"w{20 + number} {PROMPT}"}, READ_BY_ENGINES)
            assert status == 200
        [prefill], [decode] = front.prefill, front.decode
        chosen = ["0", "1"] if protocol == "bootstrap" else [None, None]
        assert [headers.get("x-data-parallel-rank") for headers in prefill.headers] == chosen
        assert not any("x-data-parallel-rank" in headers for headers in decode.headers)
        for headers in (*prefill.headers, *decode.headers):
            assert (headers["x-session-id"], headers["x-vllm-priority"]) == ("session-1", "-5")


async def test_a_body_s_priority_is_not_overridden() -> None:
    """vLLM prefers the header; the conductor and the engine must see the same one."""
    async with fronting(0, 1) as front:
        status, _, _ = await front.post(TEXT, {"prompt": PROMPT, "priority": 7}, READ_BY_ENGINES)
        assert status == 200
        [headers], [call] = front.decode[0].headers, front.decode[0].calls
        assert call["priority"] == 7 and "x-vllm-priority" not in headers


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("X-Vllm-Priority", "soon"),
        ("X-Vllm-Priority", "1001"),
        ("X-Vllm-Priority", "9" * 5000),
        ("X-data-parallel-rank", "-1"),
        ("X-data-parallel-rank", "0x1"),
    ],
)
async def test_a_wrong_number_in_a_header_reaches_no_engine(name: str, value: str) -> None:
    async with fronting(0, 1) as front:
        status, answer, _ = await front.post(TEXT, {"prompt": PROMPT}, {name: value})
        assert (status, answer["error"]["param"]) == (400, name)
        assert not front.decode[0].calls


async def session_at_engine(front: Any, headers: dict[str, str], **fields: Any) -> tuple[Any, Any]:
    """The session's name at an engine: in the header, in the body."""
    status, answer, _ = await front.post(TEXT, {"prompt": PROMPT, **fields}, headers)
    assert status == 200, answer
    [engine] = front.decode
    return engine.headers[-1].get("x-session-id"), engine.calls[-1].get("session_id")


async def test_an_engine_gets_one_session() -> None:
    async with fronting(0, 1, session_header="X-Mine") as front:
        assert await session_at_engine(front, {}) == (None, None)
        assert await session_at_engine(front, {"x-claude-code-session-id": "c"}) == ("c", None)
        assert await session_at_engine(front, {"X-Session-ID": "h"}, session_id="b") == ("b", "b")
        assert await session_at_engine(front, {"X-Mine": "m"}, session_id="b") == ("m", None)
        assert await session_at_engine(front, {"X-Session-ID": "h"}, session_id="b" * 257) == ("h", None)
        hostile = "s\r\nX-data-parallel-rank: 3"
        assert await session_at_engine(front, {}, session_id=hostile) == (None, None)
        assert await session_at_engine(front, {}, session_id="") == (None, None)
        assert await session_at_engine(front, {}, prompt_cache_key="key") == ("key", None)


async def test_names_of_models() -> None:
    models = (("org/tiny", "r"), ("alias", "r"), ("sql", "adapters/sql"))
    async with fronting(engine={"models": models}, scheduling="cache_aware") as front:
        for model in (None, "tiny", "/somewhere/tiny", "org/tiny", "alias", "sql"):
            await front.complete(PROMPT, model=model)
        sent = [call["model"] for call in front.decode[0].calls]
        assert sent == ["org/tiny", "org/tiny", "org/tiny", "org/tiny", "alias", "sql"]
        status, answer, _ = await front.post("/v1/completions", {"prompt": PROMPT, "model": "gpt-7"})
        assert (status, answer["error"]["code"]) == (404, "model_not_found")
        _, listed = await front.get("/v1/models")
        assert [card["id"] for card in listed["data"]] == ["org/tiny", "alias", "sql", "tiny"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{", None),
        (b"[]", None),
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": 7}, "prompt"),
        ({"prompt": "w20", "stream": "yes"}, "stream"),
        ({"prompt": "w20", "n": "many"}, "n"),
        ({"prompt": "w20", "kv_transfer_params": []}, "kv_transfer_params"),
    ],
)
async def test_an_unreadable_field_is_refused_by_name(body: Any, param: str | None) -> None:
    async with fronting() as front:
        status, answer, _ = await front.post("/v1/completions", body)
        assert (status, answer["error"]["param"]) == (400, param)
        assert not any(one.calls for one in front.engines)


# --- failures


async def test_an_engine_s_refusal_reaches_the_client_unchanged() -> None:
    refusal = {"message": "too long", "type": "BadRequestError", "param": "prompt", "code": 400}
    async with fronting(2, 2) as front:
        front.prefill[0].refuse = front.prefill[1].refuse = (400, refusal)
        status, answer, _ = await front.post("/v1/completions", {"prompt": PROMPT})
        assert (status, answer["error"]) == (400, refusal)
        assert sum(len(one.calls) for one in front.engines) == 1, "it would be refused everywhere"


async def test_a_stream_that_an_engine_refuses_after_its_status_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Engines check a part of a request, as its grammar, after they have sent the status of its stream."""
    refusal = {"message": "no such grammar", "type": "BadRequestError", "param": None, "code": 400}
    async with fronting(0, 2) as front:
        posted = front.posted(monkeypatch)
        for one in front.decode:
            one.late_refusal = refusal
        status, answer, _ = await front.post(TEXT, {"prompt": PROMPT, "stream": True})
        assert (status, answer["error"]) == (400, refusal)
        assert sum(len(one.calls) for one in front.engines) == 1, "it would be refused everywhere"
        assert posted and not any(isinstance(event, Failed) for event in posted)


@pytest.mark.parametrize("code", [429, 503])
async def test_a_stream_for_which_an_engine_has_no_room_after_its_status_is_tried_elsewhere(
    monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    async with fronting(0, 2) as front:
        posted = front.posted(monkeypatch)
        front.decode[0].late_refusal = {"message": "full", "type": "ServiceUnavailableError", "code": code}
        for _ in range(2):
            streamed = await front.stream(PROMPT, 5)
            assert streamed.text() == answer_text(IDS, 5)
        assert front.decode[0].calls and not any(isinstance(event, Failed) for event in posted)


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_failure_before_the_first_token_is_hidden(protocol: str, side: str) -> None:
    async with fronting(2, 2, protocol=protocol) as front:
        for number in range(4):
            broken = getattr(front, side)[number % 2]
            if number < 2:
                broken.die_after = 0
            else:
                broken.refuse = (500, {"message": "boom", "type": "InternalServerError"})
            streamed = await front.stream(PROMPT, 5)
            assert streamed.text() == answer_text(IDS, 5)
            broken.refuse = broken.die_after = None
            await front.until(lambda health: set(health.values()) == {"ready"})


async def test_kv_that_can_t_be_loaded_is_computed_elsewhere() -> None:
    async with fronting(1, 2) as front:
        front.decode[0].fail_load = front.decode[1].fail_load = True
        streamed = await front.stream(PROMPT, 5)
        assert streamed.text() == answer_text(IDS, 5)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_usage_waits_for_the_prefill_that_counts_cached_tokens(stream: bool) -> None:
    """With a push, decode may have ended a short answer before prefill has reported its end."""
    async with fronting(1, 1, protocol="push") as front:
        await front.complete(PROMPT, 2)
        hold = front.prefill[0].hold = asyncio.Event()
        options = {"stream_options": {"include_usage": True}} if stream else {}
        asking = asyncio.ensure_future((front.stream if stream else front.complete)(PROMPT, 2, **options))
        await asyncio.sleep(0.2)
        assert not asking.done()
        hold.set()
        answer = await asking
        usage = answer.chunks[-1]["usage"] if stream else answer["usage"]  # type: ignore[index,attr-defined]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 8, "of prefill's own"


async def test_a_lost_prefill_does_not_leave_its_decode_waiting() -> None:
    async with fronting(1, 1, protocol="push") as front:
        front.prefill[0].refuse = (500, {"message": "boom", "type": "InternalServerError"})
        answer = await front.complete(PROMPT, 5)
        assert answer["choices"][0]["text"] == answer_text(IDS, 5)
        assert "degraded" in answer["headers"]["x-mooncake-route"]
        waited, alone = front.decode[0].calls
        assert waited["kv_transfer_params"]["transfer_id"] and "kv_transfer_params" not in alone
        async with asyncio.timeout(5):
            while not front.decode[0].num_cancelled:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_an_answer_that_breaks_in_the_middle_reports_it() -> None:
    async with fronting() as front:
        front.decode[0].die_after = 1
        gate = front.decode[0].gate = asyncio.Event()
        body = {"prompt": PROMPT, "max_tokens": 5, "stream": True}
        async with front.session.post(front.url + "/v1/completions", json=body) as response:
            assert b"of_this_engine" in await response.content.readuntil(b"\n\n")
            gate.set()
            rest = (await response.read()).decode()
        assert "engine_lost" in rest and "[DONE]" not in rest


@pytest.mark.parametrize("how", ["error", "abort"])
async def test_an_aborted_answer_never_looks_complete(how: str) -> None:
    async with fronting(1, 2) as front:
        for one in front.decode:
            one.give_up = (2, how)
        body = {"prompt": PROMPT, "max_tokens": 5, "stream": True}
        async with front.session.post(front.url + "/v1/completions", json=body) as response:
            text = (await response.read()).decode()
        assert "engine_lost" in text.strip().split("\n\n")[-1] and "[DONE]" not in text
        await front.until(lambda health: set(health.values()) == {"ready"})
        for one in front.decode:
            one.give_up = (0, how)
        streamed = await front.stream(PROMPT, 5)
        assert streamed.text() == answer_text(IDS, 5), "before the first token it is tried elsewhere"


async def test_an_engine_whose_weights_were_replaced_did_not_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fronting(1, 1) as front:
        posted = front.posted(monkeypatch)
        front.decode[0].give_up = (2, "replaced")
        body = {"prompt": PROMPT, "max_tokens": 5, "stream": True}
        async with front.session.post(front.url + "/v1/completions", json=body) as response:
            text = (await response.read()).decode()
        assert "weights_replaced" in text.strip().split("\n\n")[-1] and "[DONE]" not in text
        assert posted and not any(isinstance(event, Failed) for event in posted)


async def test_an_engine_that_refuses_in_the_middle_did_not_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fronting(1, 1) as front:
        posted = front.posted(monkeypatch)
        front.decode[0].give_up = (2, "refused")
        body = {"prompt": PROMPT, "max_tokens": 5, "stream": True}
        async with front.session.post(front.url + TEXT, json=body) as response:
            text = (await response.read()).decode()
        assert '"message":"boom"' in text.strip().split("\n\n")[-1] and "[DONE]" not in text
        assert posted and not any(isinstance(event, Failed) for event in posted)


async def test_a_fault_of_the_gateway_in_the_middle_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fronting() as front:

        async def events(*call: Any) -> AsyncIterator[bytes]:
            yield b"{}"
            raise RuntimeError("a bug")

        monkeypatch.setattr(front.gateway.workers, "events", events)
        body = {"prompt": PROMPT, "max_tokens": 5, "stream": True}
        async with front.session.post(front.url + "/v1/completions", json=body) as response:
            first, last = (await response.read()).decode().strip().split("\n\n")
        assert first == "data: {}" and "internal_error" in last


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_client_that_disconnects_early_frees_the_engines(side: str) -> None:
    async with fronting(protocol="push") as front:
        engine = getattr(front, side)[0]
        engine.stall = asyncio.Event()
        pending = asyncio.ensure_future(front.complete(PROMPT))
        async with asyncio.timeout(20):
            while not all(one.calls for one in front.engines):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        pending.cancel()
        async with asyncio.timeout(20):
            while not engine.num_cancelled:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_no_ready_instance_is_a_503() -> None:
    async with fronting() as front:
        for one in front.engines:
            await one.stop()
        await front.until(lambda health: "ready" not in health.values())
        status, answer, headers = await front.post("/v1/completions", {"prompt": PROMPT})
        assert status == 503 and answer["error"]["message"] and "retry-after" in headers
        for one in front.engines:
            await one.start()
        await front.until(lambda health: set(health.values()) == {"ready"})
        await front.complete(PROMPT)


# --- measurements of answers


class Ticking:
    """A clock that advances by half a second at each reading: two for an event, its deadline and its time."""

    def __init__(self) -> None:
        self._now = 0.0

    def monotonic(self) -> float:
        self._now += 0.5
        return self._now


async def test_the_time_between_tokens_is_that_of_the_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The conductor learns from it how full a decode may be: five tokens have four gaps."""
    async with fronting(0, 1) as front:
        events: list[Any] = []
        scheduling = front.gateway.scheduling
        real = scheduling.post

        def post(event: Any) -> None:
            events.append(event)
            real(event)

        monkeypatch.setattr(scheduling, "post", post)
        monkeypatch.setattr(any_engine, "clock", Ticking())
        streamed = await front.stream(PROMPT, 5, stream_options={"include_usage": True})
        num_events = len(streamed.events)  # five tokens, the usage, and the end
        async with asyncio.timeout(10):
            while not any(isinstance(event, Finished) for event in events):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        [finished] = [event for event in events if isinstance(event, Finished)]
        assert (finished.num_output_tokens, finished.ttft_s) == (5, 1.0)
        assert finished.tbt_s == pytest.approx((num_events - 1) / 4)


async def test_a_proxied_answer_is_counted_with_its_time_to_the_first_token() -> None:
    def count(name: str) -> float:
        return registry.get_sample_value(f"{name}_count") or 0.0

    async with fronting() as front:
        before = count("vllm:time_to_first_token_seconds"), count("vllm:inter_token_latency_seconds")
        streamed = await front.stream(PROMPT, 5)
        after = count("vllm:time_to_first_token_seconds"), count("vllm:inter_token_latency_seconds")
        assert after[0] - before[0] == 1, "one first token, however many follow"
        assert after[1] - before[1] == len(streamed.events) - 1


@pytest.mark.parametrize("is_due", [False, True])
async def test_the_prompt_of_a_whole_answer_counts_as_computed_when_that_was_predicted(
    monkeypatch: pytest.MonkeyPatch, is_due: bool
) -> None:
    def num_ttfts() -> float:
        return registry.get_sample_value("vllm:time_to_first_token_seconds_count") or 0.0

    async with fronting(0, 1) as front:
        [engine] = front.decode
        stall = engine.stall = asyncio.Event()
        scheduling, events = front.gateway.scheduling, list[Any]()
        assert isinstance(scheduling, ConductorService)
        place, post = scheduling.place, scheduling.post

        async def placed(request: Any) -> Any:
            decision = await place(request)
            assert isinstance(decision, Decision) and decision.prediction is not None
            prediction = replace(decision.prediction, ttft_s=0.0 if is_due else 1e6)
            return replace(decision, prediction=prediction)

        def noted(event: Any) -> None:
            events.append(event)
            post(event)

        monkeypatch.setattr(scheduling, "place", placed)
        monkeypatch.setattr(scheduling, "post", noted)
        before = num_ttfts()
        pending = asyncio.ensure_future(front.complete(PROMPT, 5))
        await until(lambda: engine.calls)
        await until(lambda: bool(events) is is_due)
        [row] = await scheduling.status()
        assert row.num_requests == 1 and (row.queued_tokens == 0) is is_due
        stall.set()
        answer = await pending
        assert answer["choices"][0]["text"] == answer_text(IDS, 5)
        await until_free(front)
        assert [one.is_assumed for one in events if isinstance(one, Prefilled)] == [True] * is_due
        [finished] = [one for one in events if isinstance(one, Finished)]
        assert (finished.num_output_tokens, finished.ttft_s, finished.tbt_s) == (5, 0.0, 0.0)
        assert finished.is_complete and num_ttfts() == before
        assert not scheduling.core.predict.accuracy["ttft_s"].num_seen


async def test_an_answer_without_prefill_counts_its_own_engine_s_cached_tokens() -> None:
    """The first attempt's prefill answered, its decode aborted, and no instance could prefill the second."""
    async with fronting(1, 2) as front:
        [prefill] = front.prefill
        for _ in range(2):
            await front.complete(PROMPT, 5, n=2)  # which a decode computes alone: both know the prompt now
        assert not prefill.calls and all(one.local for one in front.decode)
        save = prefill._save

        def save_and_fail(ids: list[int], body: dict[str, Any]) -> None:
            save(ids, body)
            prefill.refuse = (500, {"message": "boom", "type": "InternalServerError"})

        def fail_first_stream_of(one: Engine) -> Any:
            stream = one._stream

            async def fail(*call: Any) -> Any:
                one.fail_load = not failed
                failed.append(one)
                return await stream(*call)

            return fail

        failed: list[Engine] = []
        prefill._save = save_and_fail  # type: ignore[method-assign]
        for one in front.decode:
            one._stream = fail_first_stream_of(one)  # type: ignore[method-assign]
        streamed = await front.stream(PROMPT, 5, stream_options={"include_usage": True})
        assert streamed.text() == answer_text(IDS, 5)
        assert len(prefill.calls) >= 2, "it was called again, in vain"
        usage = streamed.chunks[-1]["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 8, "not the lost prefill's cached tokens"


KEY = "anna-anna-anna-anna"


@contextlib.asynccontextmanager
async def charging(tmp_path: Path, tokenizer: Any) -> AsyncIterator[tuple[Front, Client]]:
    """A gateway with one engine, and its only client."""
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": [{"name": "anna", "key": KEY, "tokens_per_minute": 1_000_000}]}))
    path.chmod(0o600)
    settings = {"tokenizing": "model", "scheduling": "cache_aware", "api_keys_file": str(path)}
    async with fronting(0, 1, tokenizer, **settings) as front:
        assert front.gateway.clients is not None
        client = front.gateway.clients.of({"authorization": f"Bearer {KEY}"}, False)
        yield front, client


@pytest.mark.parametrize("usage", ["none", "of each choice", "of all"])
async def test_a_streamed_batch_is_charged_for_all_its_prompts(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, usage: str
) -> None:
    prompts = ["w20 w21", PROMPT, "w30 w31 w32"]
    async with charging(tmp_path, tokenizer) as (front, client):
        charged: list[int] = []
        monkeypatch.setattr(client, "charge", lambda num_tokens, now: charged.append(num_tokens))
        [engine] = front.decode
        send = engine._event

        async def with_usage(response: web.StreamResponse, fields: dict[str, Any]) -> None:
            counts = {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3}
            await send(response, {"usage": counts, **fields} if usage == "of each choice" else fields)

        monkeypatch.setattr(engine, "_event", with_usage)
        body: dict[str, Any] = {"prompt": prompts, "max_tokens": 4, "stream": True}
        if usage == "of all":
            body["stream_options"] = {"include_usage": True}
        headers = {"Authorization": f"Bearer {KEY}"}
        async with front.session.post(front.url + TEXT, json=body, headers=headers) as response:
            text = await response.text()
        assert text.endswith("data: [DONE]\n\n")
        # The double streams the first choice only, but counts all in its usage. An event without usage counts
        # as one token, and so does the end.
        assert charged == [2 + len(IDS) + 3 + (3 * 4 if usage == "of all" else 5)]


async def test_a_failed_engine_s_identity_is_queried_anew() -> None:
    """Its address may belong to another process now, whose connector waits under another name."""
    async with fronting(1, 1, protocol="bootstrap") as front:
        [prefill], [decode] = front.prefill, front.decode
        await front.complete(PROMPT, 5)
        assert decode.calls[0]["kv_transfer_params"]["remote_engine_id"] == prefill.rank_name(0)
        prefill.refuse = (500, {"message": "boom", "type": "InternalServerError"})
        await front.complete(PROMPT, 5)  # by the decode alone
        prefill.refuse, prefill.name = None, "started anew"
        async with asyncio.timeout(20):
            while decode.calls[-1].get("kv_transfer_params") is None:
                await front.complete(PROMPT, 5)
        assert decode.calls[-1]["kv_transfer_params"]["remote_engine_id"] == prefill.rank_name(0)


# --- membership


async def test_an_instance_is_drained_before_it_is_removed() -> None:
    key = {"X-API-Key": "correct-horse"}
    async with fronting(0, 2) as front:
        leaving, staying = front.decode
        for one in front.decode:
            one.gate = asyncio.Event()
        body = {"prompt": PROMPT, "max_tokens": 3, "stream": True}
        async with (
            front.session.post(front.url + "/v1/completions", json=body) as first,
            front.session.post(front.url + "/v1/completions", json=body) as second,
        ):
            change = {"type": "decode", "instance": leaving.address}
            status, _, _ = await front.post("/instances/remove", change, {"X-API-Key": "wrong"})
            assert status == 401 and (await front.health())[leaving.address] == "ready"
            status, answer, _ = await front.post("/instances/remove", change, key)
            assert (status, answer["status"]) == (200, "draining")
            assert (await front.health())[leaving.address] == "draining"
            for one in front.decode:
                assert one.gate is not None
                one.gate.set()
            for response in (first, second):
                assert (await response.read()).endswith(b"data: [DONE]\n\n")
        await front.until(lambda health: leaving.address not in health)
        for _ in range(2):
            await front.complete(PROMPT)
        assert (len(leaving.calls), len(staying.calls)) == (1, 3)
        status, answer, _ = await front.post("/instances/add", {**change, "port": 8998}, key)
        assert (status, answer["status"]) == (200, "added")
        await front.until(lambda health: health.get(leaving.address) == "ready")
        _, status_page = await front.get("/status")
        assert (status_page["protocol"], status_page["decode_node_count"]) == ("sequential", 2)
        _, health = await front.get("/healthcheck")
        assert health == {"status": "ok", "prefill_instances": 0, "decode_instances": 2}


async def test_auto_detects_other_engines(tokenizer: Any) -> None:
    async with fronting(tokenizer=tokenizer, scheduling="cache_aware") as front:
        answer = await front.complete(PROMPT, 4)
        assert answer["choices"][0]["text"] == answer_text(IDS, 4)
        assert isinstance(front, Front) and front.decode[0].calls[0]["prompt"] == PROMPT, "not its tokens"


async def test_until_an_engine_has_answered_every_request_is_to_come_back(tokenizer: Any) -> None:
    """Engines take minutes to start, and only then it is known that they have tools, and the model's name."""
    async with fronting(tokenizer=tokenizer) as front:
        for one in front.engines:
            await one.stop()
        await front.until(lambda health: "ready" not in health.values())
        tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
        for fields in ({"tools": tools}, {"model": "org/tiny"}):
            body = {"messages": CHAT, **fields}
            status, answer, headers = await front.post("/v1/chat/completions", body)
            assert (status, answer["error"]["code"]) == (503, "no_instance"), answer
            assert front.decode[0].address in answer["error"]["message"] and "retry-after" in headers


# --- late refusals and hostile fields


HOSTILE: dict[str, Any] = {
    "remote_host": "10.6.6.6",
    "remote_port": 666,
    "remote_bootstrap_addr": "http://10.6.6.6:666",
    "remote_engine_id": "x",
    "remote_block_ids": [1, 2],
    "do_remote_prefill": True,
    "do_remote_decode": True,
    "transfer_id": "another request's",
}


# --- clients' transfer fields


@pytest.mark.parametrize("are_trusted", [False, True])
@pytest.mark.parametrize("more", [{}, {"n": 2}])
@pytest.mark.parametrize("protocol", ["pool", "sequential", "push", "bootstrap"])
async def test_no_engine_gets_a_client_s_address_to_connect_to(
    protocol: str, more: dict[str, Any], are_trusted: bool
) -> None:
    settings = {"trust_clients": True} if are_trusted else {}
    async with fronting(protocol=protocol, **settings) as front:
        hostile = {**HOSTILE, "kept": 1}
        answer = await front.complete(PROMPT, 3, kv_transfer_params=hostile, **more)
        assert answer["choices"][0]["text"] == answer_text(IDS, 3)
        calls = [call for one in front.engines for call in one.calls]
        assert calls
        for call in calls:
            found = call.get("kv_transfer_params") or {}
            assert found.get("transfer_id") != HOSTILE["transfer_id"]
            assert "10.6.6.6" not in str(found) and found.get("remote_port") != 666
        handed = [(call.get("kv_transfer_params") or {}).get("kept") for call in calls]
        # With `sequential` decode gets only the parameters of prefill's answer; there prefill received the
        # client's.
        assert (1 in handed) is are_trusted


# --- late refusals


QUICK_S, SLOW_S = 0.01, 5.0


def steps(front: Any, is_slow: bool) -> list[StepMeasured]:
    """Steps of decode instances that are quick, or become slow gradually (outliers are damped)."""
    slow = [min(QUICK_S * 1.2 ** (number // 8), SLOW_S) for number in range(400)]
    found = slow if is_slow else slow[::-1]
    return [
        StepMeasured(one.address, 1 + number % 4, 100 * (1 + number % 4), seconds)
        for one in front.decode
        for number, seconds in enumerate(found + found[-1:] * 200)
    ]


def measure(front: Any, is_slow: bool) -> None:
    for event in steps(front, is_slow):
        front.gateway.scheduling.post(event)


async def state_of(front: Any, name: str) -> str:
    return str((await front.gateway.scheduling.explain(name)).state)


async def accounts(front: Any) -> list[int]:
    return [row.num_requests for row in await front.gateway.scheduling.status()]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("protocol", ["pool", "sequential", "push", "bootstrap"])
async def test_a_refusal_after_the_prompt_is_computed_reaches_the_client(protocol: str, stream: bool) -> None:
    async with fronting(protocol=protocol, admission="baseline", audit_share=0.0) as front:
        measure(front, False)
        [prefill], [decode] = front.prefill, front.decode
        stall = prefill.stall = asyncio.Event()
        decode.stall = asyncio.Event()  # never set: a refused request gets no answer
        body = {"prompt": PROMPT, "max_tokens": 5, "stream": stream}
        pending = asyncio.ensure_future(front.post(TEXT, body, {"x-slo-tbt-ms": "30"}))
        await until(lambda: prefill.calls)
        measure(front, True)
        stall.set()
        async with asyncio.timeout(20):
            status, answer, headers = await pending
        assert (status, answer["error"]["code"]) == (429, "slo_tbt")
        assert "decoding" in answer["error"]["message"] and int(headers["retry-after"]) >= 1
        is_called_at_once = protocol in ("push", "bootstrap")
        await until(lambda: decode.num_cancelled == int(is_called_at_once))
        assert len(decode.calls) == int(is_called_at_once)
        await until_free(front)
        prefill.stall = decode.stall = None
        measure(front, False)
        answered = await front.complete(PROMPT, 5)
        assert answered["choices"][0]["text"] == answer_text(IDS, 5), "the next one is not refused"


async def until_free(front: Any) -> None:
    async with asyncio.timeout(20):
        while any(await accounts(front)):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_our_own_workers_are_as_strict(tokenizer: Any) -> None:
    async with running(tokenizer, admission="baseline", audit_share=0.0) as stack:
        measure(stack, False)
        place = stack.gateway.scheduling.place

        async def placed(request: Any) -> Any:
            decision = await place(request)
            measure(stack, True)
            return decision

        stack.gateway.scheduling.place = placed  # type: ignore[method-assign]
        body = {"prompt": IDS, "max_tokens": 5}
        status, answer, headers = await stack.post(TEXT, body, {"x-slo-tbt-ms": "30"})
        assert (status, answer["error"]["code"]) == (429, "slo_tbt") and "retry-after" in headers
        assert not any(worker.calls for worker in stack.decode)
        await until_free(stack)


@pytest.mark.parametrize("has_prefill", [False, True])
async def test_an_answer_that_has_begun_keeps_its_account(has_prefill: bool) -> None:
    """Decode answers before prefill has reported its end, or has computed the prompt itself."""
    settings = {"protocol": "push", "admission": "baseline", "audit_share": 0.0}
    async with fronting(int(has_prefill), 1, **settings) as front:
        measure(front, False)
        [decode] = front.decode
        gate = decode.gate = asyncio.Event()
        hold = asyncio.Event()
        for one in front.prefill:
            one.hold = hold
        place = front.gateway.scheduling.place

        async def placed(request: Any) -> Any:
            decision = await place(request)
            measure(front, True)
            return decision

        front.gateway.scheduling.place = placed  # type: ignore[method-assign]
        body = {"prompt": PROMPT, "max_tokens": 5, "stream": True}
        headers = {"x-slo-tbt-ms": "30"}
        async with front.session.post(front.url + TEXT, json=body, headers=headers) as response:
            assert response.status == 200
            await response.content.readuntil(b"\n\n")
            hold.set()
            if has_prefill:
                request_ids = response.headers["x-mooncake-id"]
                async with asyncio.timeout(20):
                    while await state_of(front, request_ids) == "prefill":  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
            assert (await accounts(front))[-1] == 1, "it goes on, so its account does too"
            gate.set()
            assert (await response.read()).endswith(b"data: [DONE]\n\n")
        await until_free(front)


async def test_a_conductor_of_its_own_refuses_late_as_well() -> None:
    settings = SchedulingSettings(
        admission="baseline", audit_share=0.0, probe_interval_s=0.05, suspect_probe_interval_s=0.02
    )
    service = ConductorService(settings)
    server = ConductorServer(service)
    port = await server.start("127.0.0.1", 0)
    await service.start()
    try:
        async with fronting(protocol="sequential", conductor=f"127.0.0.1:{port}") as front:
            remote = front.gateway.scheduling
            assert isinstance(remote, RemoteConductor)
            await until(lambda: remote.is_connected)
            for event in steps(front, False):
                service.post(event)
            stall = front.prefill[0].stall = asyncio.Event()
            body = {"prompt": PROMPT, "max_tokens": 5}
            pending = asyncio.ensure_future(front.post(TEXT, body, {"x-slo-tbt-ms": "30"}))
            await until(lambda: front.prefill[0].calls)
            for event in steps(front, True):
                service.post(event)
            stall.set()
            status, answer, _ = await pending
            assert (status, answer["error"]["code"]) == (429, "slo_tbt")
            await until_free(front)
    finally:
        await server.close()
        await service.close()

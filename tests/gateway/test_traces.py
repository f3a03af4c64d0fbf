# SPDX-License-Identifier: Apache-2.0
"""Traces at the gateway: phases, calls, the list, and which clients may read them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from mooncake.inference.tokenizer import Tokenizer
from mooncake.tracing import Tracing, install_tracing, read_traceparent
from tests.gateway.conftest import Stack, running

TRACE = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = f"00-{TRACE}-b7ad6b7169203331-01"
ANNA, BEN = "anna-" + "a" * 40, "ben-" + "b" * 40


@pytest.fixture
def tracing() -> Iterator[Tracing]:
    found = Tracing(8)
    install_tracing(found)
    yield found
    install_tracing(None)


@pytest.fixture
async def traced(tokenizer: Tokenizer, tracing: Tracing) -> AsyncIterator[Stack]:
    async with running(tokenizer) as stack:
        yield stack


async def spans_of(stack: Stack, name: str) -> list[dict[str, Any]]:
    status, answer = await stack.get(f"/v1/requests/{name}/trace")
    assert status == 200, answer
    found: list[dict[str, Any]] = answer["spans"]
    return found


def phases_of(spans: list[dict[str, Any]]) -> list[str]:
    return [span["name"] for span in spans if span["parent_id"] == spans[0]["span_id"]]


async def test_the_phases_of_a_request_add_up_to_it(traced: Stack) -> None:
    streamed = await traced.stream([1, 2, 3] * 20)
    spans = await spans_of(traced, streamed.headers["x-mooncake-id"])
    root = spans[0]
    assert phases_of(spans) == [
        *("receive", "tokenize", "hash blocks", "place", "prefill", "first token", "stream")
    ]
    phases = [span for span in spans if span["parent_id"] == root["span_id"]]
    total_s = sum(span["end_s"] - span["start_s"] for span in phases)
    assert total_s == pytest.approx(root["end_s"] - root["start_s"], rel=1e-6)
    assert root["attributes"]["gen_ai.usage.input_tokens"] == 60
    assert root["attributes"]["gen_ai.usage.output_tokens"] == len(streamed.token_ids())
    calls = [span for span in spans if span["name"] == "POST /v1/completions"]
    assert [span["attributes"]["server.address"] for span in calls] == [
        *(traced.prefill[0].address, root["attributes"]["mooncake.decode"])
    ]
    assert not any(span["error"] for span in spans)


async def test_a_worker_gets_the_span_of_its_call(traced: Stack) -> None:
    status, answer, _ = await traced.post(
        "/v1/completions", {"prompt": "abc", "max_tokens": 2}, {"traceparent": TRACEPARENT}
    )
    assert status == 200
    spans = await spans_of(traced, answer["id"])
    assert spans[0]["parent_id"] == "b7ad6b7169203331"
    call = next(span for span in spans if span["name"] == "POST /v1/completions")
    context = read_traceparent(traced.prefill[0].headers[0]["traceparent"])
    assert context is not None and (context.trace_id, context.span_id) == (TRACE, call["span_id"])


async def test_every_prompt_has_phases_of_its_own(traced: Stack) -> None:
    answer = await traced.complete(["abc", "defg"])
    spans = await spans_of(traced, answer["id"])
    prompts = [span for span in spans if span["name"] == "prompt"]
    assert len(prompts) == 2
    for prompt in prompts:
        below = [span["name"] for span in spans if span["parent_id"] == prompt["span_id"]]
        assert below == ["place", "prefill", "first token", "stream"]


async def test_a_retry_is_a_phase_and_the_failed_call_has_a_code(traced: Stack) -> None:
    traced.decode[0].die_after = 2
    answers = [await traced.complete([5, 6, 7] * 10) for _ in range(2)]
    found = [await spans_of(traced, answer["id"]) for answer in answers]
    [spans] = [spans for spans in found if any(span["error"] for span in spans)]
    failed = [span for span in spans if span["error"]]
    assert [span["name"] for span in failed] == ["POST /v1/completions"]
    assert failed[0]["attributes"]["server.address"] == traced.decode[0].address
    assert phases_of(spans)[-4:] == ["stream", "place", "resume", "stream"]


async def test_the_conductor_s_part_is_there(traced: Stack) -> None:
    answer = await traced.complete("abc")
    spans = await spans_of(traced, answer["id"])
    chosen = next(span for span in spans if span["service"] == "mooncake-conductor")
    assert chosen["name"] == "choose instances"
    assert chosen["attributes"]["mooncake.prefill"] == traced.prefill[0].address


async def test_the_list_has_refused_requests_as_well(traced: Stack) -> None:
    answer = await traced.complete("abc")
    status, _, _ = await traced.post("/v1/completions", {"prompt": "abc", "model": "other"})
    assert status == 404
    status, found = await traced.get("/v1/requests")
    assert status == 200 and found["kept"] == 8
    assert [(one["id"], one["status"]) for one in found["requests"]] == [("", 404), (answer["id"], 200)]
    assert (await traced.get("/v1/requests?limit=1"))[1]["requests"][0]["status"] == 404
    for wrong in ("0", "-1", "1001", "many", "1" * 999):
        status, refused = await traced.get(f"/v1/requests?limit={wrong}")
        assert (status, refused["error"]["param"]) == (400, "limit")


async def test_without_the_key_no_requests_of_others_are_seen(traced: Stack) -> None:
    status, answer, _ = await traced.post(
        "/v1/completions", {"prompt": "abc", "max_tokens": 2}, {"X-Request-ID": "mine"}
    )
    assert status == 200
    assert (await traced.get("/v1/requests", {}))[0] == 401
    assert (await traced.get("/v1/requests/mine/trace", {}))[0] == 401, "a chosen id can be guessed"
    assert (await traced.get(f"/v1/requests/{answer['id']}/trace", {}))[0] == 200
    assert (await traced.get("/v1/requests/unknown/trace", {}))[0] == 404


async def test_a_client_with_a_key_sees_its_own(
    tokenizer: Tokenizer, tracing: Tracing, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.json"
    rows = [{"name": name, "key": key, "tenant": name} for name, key in (("anna", ANNA), ("ben", BEN))]
    keys.write_text(json.dumps({"keys": rows}))
    keys.chmod(0o600)
    async with running(tokenizer, api_keys_file=str(keys)) as stack:
        anna, ben = ({"Authorization": f"Bearer {key}"} for key in (ANNA, BEN))
        body = {"prompt": "abc", "max_tokens": 2}
        _, hers, _ = await stack.post("/v1/completions", body, anna)
        _, his, _ = await stack.post("/v1/completions", body, ben)
        _, found = await stack.get("/v1/requests", anna)
        assert [(one["id"], one["client"]) for one in found["requests"]] == [(hers["id"], "")]
        assert (await stack.get(f"/v1/requests/{hers['id']}/trace", anna))[0] == 200
        assert (await stack.get(f"/v1/requests/{his['id']}/trace", anna))[0] == 404
        _, every = await stack.get("/v1/requests")
        assert [one["client"] for one in every["requests"]] == ["ben", "anna"]
        assert (await stack.get("/v1/requests", {}))[0] == 401


async def test_without_traces_nothing_is_kept(stack: Stack) -> None:
    answer = await stack.complete("abc")
    status, found = await stack.get("/v1/requests")
    assert (status, found) == (200, {"kept": 0, "requests": []})
    assert (await stack.get(f"/v1/requests/{answer['id']}/trace"))[0] == 404
    assert "traceparent" not in stack.prefill[0].headers[0]


async def test_no_span_has_text_of_a_prompt(traced: Stack) -> None:
    answer = await traced.complete("sesame sesame sesame")
    await traced.post("/v1/completions", {"prompt": "sesame", "max_tokens": -1})
    assert "sesame" not in json.dumps(await spans_of(traced, answer["id"]))
    assert "sesame" not in json.dumps((await traced.get("/v1/requests"))[1])

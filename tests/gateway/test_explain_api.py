# SPDX-License-Identifier: Apache-2.0
"""Explanations of requests by the gateway, and the errors of rejected ones."""

from __future__ import annotations

import asyncio
import re
from typing import Any

from mooncake.conductor.messages import ChunkMeasured
from mooncake.inference.tokenizer import Tokenizer
from tests.gateway.conftest import ADMIN_KEY, Stack, running

PROMPT = list(range(20, 44))


async def explained(stack: Stack, name: str, key: str = "") -> tuple[int, dict[str, Any]]:
    headers = {"X-API-Key": key} if key else {}
    async with stack.session.get(f"{stack.url}/v1/requests/{name}/explain", headers=headers) as response:
        return response.status, await response.json()


async def finished(stack: Stack, name: str) -> dict[str, Any]:
    """The explanation of a request's only prompt, once its end was reported."""
    async with asyncio.timeout(5):
        while True:
            status, answer = await explained(stack, name)
            assert status == 200, answer
            [prompt] = answer["prompts"]
            if prompt["state"] in ("finished", "failed", "refused"):
                return dict(prompt)
            await asyncio.sleep(0.01)


async def test_choice_and_measurements(stack: Stack) -> None:
    answer = await stack.complete(PROMPT, 6)
    assert answer["headers"]["x-mooncake-id"] == answer["id"]
    found = await finished(stack, answer["id"])
    assert (found["prefill"], found["policy"]) == (stack.prefill[0].address, "round_robin")
    assert found["decode"] == answer["headers"]["x-mooncake-decode"]
    assert found["num_tokens"] == len(PROMPT)
    assert found["actual"]["output_tokens"] == 6 and found["actual"]["is_complete"]
    assert found["actual"]["ttft_s"] > 0
    assert found["blocks"] == [
        {"first": 0, "num": 6, "verdict": "never_stored", "where": "", "rule": "", "seconds_before": 0.0}
    ]


async def test_the_workers_own_measurements_are_used(stack: Stack) -> None:
    stack.prefill[0].measured = {
        "queued_s": 0.25,
        "loaded_s": 0.125,
        "computed_s": 0.5,
        "num_local_tokens": 8,
        "num_loaded_tokens": 4,
        "num_computed_tokens": 12,
    }
    answer = await stack.complete(PROMPT, 6)
    found = await finished(stack, answer["id"])
    actual = found["actual"]
    assert (actual["queue_s"], actual["load_s"], actual["prefill_s"]) == (0.25, 0.125, 0.5)
    assert [(one["verdict"], one["where"], one["num"]) for one in found["blocks"]] == [
        ("hit", f"{stack.prefill[0].address} device", 2),
        ("hit", "pool", 1),
        ("never_stored", "", 3),
    ]
    decode = next(worker for worker in stack.decode if worker.calls)
    assert "measured" not in decode.calls[0]["kv_transfer_params"], "it is not forwarded"


async def test_authorization(stack: Stack) -> None:
    answer = await stack.complete(PROMPT, 2)
    made_here = answer["headers"]["x-request-id"]
    assert (await explained(stack, made_here))[0] == 200
    body = {"prompt": PROMPT, "max_tokens": 2}
    await stack.post("/v1/completions", body, {"X-Request-ID": "mine"})
    status, refused = await explained(stack, "mine")
    assert status == 401 and "guessed" in refused["error"]["message"]
    assert (await explained(stack, "mine", "wrong"))[0] == 401
    status, found = await explained(stack, "mine", ADMIN_KEY)
    assert status == 200 and found["request_id"] == "mine"
    assert (await explained(stack, found["id"]))[0] == 200, "only the answer's client knows its id"


async def test_unknown_requests_are_not_found(stack: Stack) -> None:
    status, answer = await explained(stack, "cmpl-unknown")
    assert (status, answer["error"]["code"]) == (404, "request_not_found")
    assert "cmpl-unknown" in answer["error"]["message"]


async def test_each_prompt_has_its_own(stack: Stack) -> None:
    answer = await stack.complete([PROMPT, PROMPT[:8]], 2)
    status, found = await explained(stack, answer["id"])
    assert status == 200
    assert [prompt["num_tokens"] for prompt in found["prompts"]] == [24, 8]


async def test_a_rejection_names_its_numbers_and_the_time_to_retry(tokenizer: Tokenizer) -> None:
    async with running(tokenizer, admission="early", audit_share=0.0) as stack:
        for number in range(20):  # so slow that 24 tokens take 24 s
            stack.gateway.scheduling.post(
                ChunkMeasured(stack.prefill[0].address, 0, 10 + number % 5, 10.0 + number % 5)
            )
        body = {"prompt": PROMPT, "max_tokens": 2}
        status, answer, headers = await stack.post("/v1/completions", body, {"x-slo-ttft-ms": "500"})
        assert (status, answer["error"]["code"]) == (429, "slo_ttft")
        assert "its TTFT SLO is 0.5 s" in answer["error"]["message"]
        assert re.fullmatch(r"[1-9]\d*", headers["retry-after"])
        assert not stack.prefill[0].calls, "it cost nothing downstream"
        found = await finished(stack, headers["x-mooncake-id"])
        assert found["admission"]["rule"] == "early" and found["admission"]["code"] == "slo_ttft"
        assert found["admission"]["reason"] == answer["error"]["message"]
        assert found["prediction"]["ttft_s"] > 0.5
        status, _, _ = await stack.post("/v1/completions", body)
        assert status == 200, "without an SLO there is no deadline"


async def test_an_audited_request_is_served_and_marked(tokenizer: Tokenizer) -> None:
    async with running(tokenizer, admission="early", audit_share=1.0) as stack:
        for number in range(20):
            stack.gateway.scheduling.post(
                ChunkMeasured(stack.prefill[0].address, 0, 10 + number % 5, 10.0 + number % 5)
            )
        body = {"prompt": PROMPT, "max_tokens": 2}
        status, answer, _ = await stack.post("/v1/completions", body, {"x-slo-ttft-ms": "5000"})
        assert status == 200
        found = await finished(stack, answer["id"])
        assert found["admission"]["is_audited"] and found["admission"]["code"] == "slo_ttft"
        _, shown = await stack.get("/status")
        assert shown["admission"] == {
            "rule": "early",
            "rejected": {"slo_ttft": 1},
            "audited": 1,
            "audited_ended": 1,
            "audited_in_slo": 1,
        }


async def test_priority_and_slos_reach_the_conductor(stack: Stack) -> None:
    seen = []
    place = stack.gateway.scheduling.place

    async def listen(request: Any) -> Any:
        seen.append(request)
        return await place(request)

    stack.gateway.scheduling.place = listen  # type: ignore[method-assign]
    body = {"prompt": PROMPT, "max_tokens": 2, "priority": -3, "cache_salt": "s"}
    headers = {"x-slo-ttft-ms": "1500", "x-slo-tbt-ms": "100"}
    status, _, _ = await stack.post("/v1/completions", body, headers)
    assert status == 200
    [one] = seen
    assert (one.slo_ttft_s, one.slo_tbt_s, one.priority, one.max_output_tokens) == (1.5, 0.1, -3, 2)
    assert len(one.bare_keys) == len(one.keys) == 6
    assert set(one.bare_keys).isdisjoint(one.keys)

"""Why a request was served as it was, asked of the gateway; and what a rejected one is told."""

from __future__ import annotations

import asyncio
import re
from typing import Any

from mooncake.conductor.messages import ChunkMeasured
from mooncake.inference.tokenizer import Tokenizer
from tests.gateway.conftest import ADMIN_KEY, House, running

PROMPT = list(range(20, 44))


async def explained(house: House, name: str, key: str = "") -> tuple[int, dict[str, Any]]:
    headers = {"X-API-Key": key} if key else {}
    async with house.session.get(f"{house.url}/v1/requests/{name}/explain", headers=headers) as response:
        return response.status, await response.json()


async def finished(house: House, name: str) -> dict[str, Any]:
    """The explanation of a request's only prompt, once its end was reported."""
    async with asyncio.timeout(5):
        while True:
            status, answer = await explained(house, name)
            assert status == 200, answer
            [prompt] = answer["prompts"]
            if prompt["state"] in ("finished", "failed", "refused"):
                return dict(prompt)
            await asyncio.sleep(0.01)


async def test_what_was_chosen_and_what_was_measured(house: House) -> None:
    answer = await house.complete(PROMPT, 6)
    assert answer["headers"]["x-mooncake-id"] == answer["id"]
    found = await finished(house, answer["id"])
    assert (found["prefill"], found["policy"]) == (house.prefill[0].address, "round_robin")
    assert found["decode"] == answer["headers"]["x-mooncake-decode"]
    assert found["num_tokens"] == len(PROMPT)
    assert found["actual"]["output_tokens"] == 6 and found["actual"]["is_complete"]
    assert found["actual"]["ttft_s"] > 0
    assert found["blocks"] == [
        {"first": 0, "num": 6, "verdict": "never_stored", "where": "", "rule": "", "seconds_before": 0.0}
    ]


async def test_the_workers_own_measurements_are_believed(house: House) -> None:
    house.prefill[0].measured = {
        "queued_s": 0.25,
        "loaded_s": 0.125,
        "computed_s": 0.5,
        "num_local_tokens": 8,
        "num_loaded_tokens": 4,
        "num_computed_tokens": 12,
    }
    answer = await house.complete(PROMPT, 6)
    found = await finished(house, answer["id"])
    actual = found["actual"]
    assert (actual["queue_s"], actual["load_s"], actual["prefill_s"]) == (0.25, 0.125, 0.5)
    assert [(one["verdict"], one["where"], one["num"]) for one in found["blocks"]] == [
        ("hit", f"{house.prefill[0].address} device", 2),
        ("hit", "pool", 1),
        ("never_stored", "", 3),
    ]
    decode = next(worker for worker in house.decode if worker.calls)
    assert "measured" not in decode.calls[0]["kv_transfer_params"], "it is not handed on"


async def test_who_may_ask(house: House) -> None:
    answer = await house.complete(PROMPT, 2)
    made_here = answer["headers"]["x-request-id"]
    assert (await explained(house, made_here))[0] == 200
    body = {"prompt": PROMPT, "max_tokens": 2}
    await house.post("/v1/completions", body, {"X-Request-ID": "mine"})
    status, refused = await explained(house, "mine")
    assert status == 401 and "guessed" in refused["error"]["message"]
    assert (await explained(house, "mine", "wrong"))[0] == 401
    status, found = await explained(house, "mine", ADMIN_KEY)
    assert status == 200 and found["request_id"] == "mine"
    assert (await explained(house, found["id"]))[0] == 200, "the answer's id is known to whom it answered"


async def test_nothing_is_known_of_strangers(house: House) -> None:
    status, answer = await explained(house, "cmpl-nobody")
    assert (status, answer["error"]["code"]) == (404, "request_not_found")
    assert "cmpl-nobody" in answer["error"]["message"]


async def test_each_prompt_has_its_own(house: House) -> None:
    answer = await house.complete([PROMPT, PROMPT[:8]], 2)
    status, found = await explained(house, answer["id"])
    assert status == 200
    assert [prompt["num_tokens"] for prompt in found["prompts"]] == [24, 8]


async def test_a_rejection_names_its_numbers_and_when_to_come_back(tokenizer: Tokenizer) -> None:
    async with running(tokenizer, admission="early", audit_share=0.0) as house:
        for number in range(20):  # so slow that 24 tokens take 24 s
            house.gateway.scheduling.post(
                ChunkMeasured(house.prefill[0].address, 0, 10 + number % 5, 10.0 + number % 5)
            )
        body = {"prompt": PROMPT, "max_tokens": 2}
        status, answer, headers = await house.post("/v1/completions", body, {"x-slo-ttft-ms": "500"})
        assert (status, answer["error"]["code"]) == (429, "slo_ttft")
        assert "its TTFT SLO is 0.5 s" in answer["error"]["message"]
        assert re.fullmatch(r"[1-9]\d*", headers["retry-after"])
        assert not house.prefill[0].calls, "it cost nothing downstream"
        found = await finished(house, headers["x-mooncake-id"])
        assert found["admission"]["rule"] == "early" and found["admission"]["code"] == "slo_ttft"
        assert found["admission"]["reason"] == answer["error"]["message"]
        assert found["prediction"]["ttft_s"] > 0.5
        status, _, _ = await house.post("/v1/completions", body)
        assert status == 200, "without a wish there is no deadline"


async def test_an_audited_request_is_served_and_marked(tokenizer: Tokenizer) -> None:
    async with running(tokenizer, admission="early", audit_share=1.0) as house:
        for number in range(20):
            house.gateway.scheduling.post(
                ChunkMeasured(house.prefill[0].address, 0, 10 + number % 5, 10.0 + number % 5)
            )
        body = {"prompt": PROMPT, "max_tokens": 2}
        status, answer, _ = await house.post("/v1/completions", body, {"x-slo-ttft-ms": "5000"})
        assert status == 200
        found = await finished(house, answer["id"])
        assert found["admission"]["is_audited"] and found["admission"]["code"] == "slo_ttft"
        _, shown = await house.get("/status")
        assert shown["admission"] == {
            "rule": "early",
            "rejected": {"slo_ttft": 1},
            "audited": 1,
            "audited_ended": 1,
            "audited_in_slo": 1,
        }


async def test_priority_and_slos_reach_the_conductor(house: House) -> None:
    seen = []
    place = house.gateway.scheduling.place

    async def listen(request: Any) -> Any:
        seen.append(request)
        return await place(request)

    house.gateway.scheduling.place = listen  # type: ignore[method-assign]
    body = {"prompt": PROMPT, "max_tokens": 2, "priority": -3, "cache_salt": "s"}
    headers = {"x-slo-ttft-ms": "1500", "x-slo-tbt-ms": "100"}
    status, _, _ = await house.post("/v1/completions", body, headers)
    assert status == 200
    [one] = seen
    assert (one.slo_ttft_s, one.slo_tbt_s, one.priority, one.max_output_tokens) == (1.5, 0.1, -3, 2)
    assert len(one.bare_keys) == len(one.keys) == 6
    assert set(one.bare_keys).isdisjoint(one.keys)

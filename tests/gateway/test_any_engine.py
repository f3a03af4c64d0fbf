# SPDX-License-Identifier: Apache-2.0
"""From HTTP to other engines: clients' transfer fields, and requests that are refused late."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mooncake.conductor.client import RemoteConductor
from mooncake.conductor.messages import StepMeasured
from mooncake.conductor.server import ConductorServer, ConductorService
from mooncake.conductor.settings import SchedulingSettings
from tests.gateway.conftest import running
from tests.gateway.doubles import answer_text
from tests.gateway.engines import fronting
from tests.waiting import until

PROMPT = "w20 w21 w22 w23 w24 w25 w26 w27 w28 w29"
IDS = list(range(20, 30))
TEXT = "/v1/completions"

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

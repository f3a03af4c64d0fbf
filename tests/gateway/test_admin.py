# SPDX-License-Identifier: Apache-2.0
"""Instances are added and removed with the right key; a request is explained to those who may know of it."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from mooncake.conductor.messages import ChunkMeasured
from mooncake.conductor.server import ConductorServer, ConductorService
from mooncake.conductor.settings import SchedulingSettings
from mooncake.errors import InvalidArgument
from mooncake.gateway.app import check_exposure, create_operator_app
from mooncake.gateway.gateway import GatewaySettings
from mooncake.http.server import HttpServer, listen
from mooncake.inference.tokenizer import Tokenizer
from mooncake.security import Identity, SecuritySettings
from mooncake.security.keys import format_secret
from tests.gateway.conftest import ADMIN_KEY, Stack, running
from tests.gateway.doubles import BLOCK_TOKENS
from tests.waiting import until

KEY = {"X-API-Key": ADMIN_KEY}


async def instances(stack: Stack) -> dict[str, str]:
    _, status = await stack.get("/status")
    return {row["instance"]: row["role"] for row in status["instances"]}


async def test_an_instance_leaves_and_comes_back(stack: Stack) -> None:
    change = {"type": "decode", "instance": stack.decode[0].address}
    status, answer, _ = await stack.post("/instances/remove", change, KEY)
    assert (status, answer["status"]) == (200, "removed")
    assert stack.decode[0].address not in await instances(stack)
    for _ in range(3):
        await stack.complete([20, 21])
    assert not stack.decode[0].calls
    status, answer, _ = await stack.post("/instances/add", change, KEY)
    assert (status, answer["status"]) == (200, "added")
    await stack.until(lambda health: health.get(stack.decode[0].address) == "ready")
    for _ in range(2):
        await stack.complete([20, 21])
    assert stack.decode[0].calls


async def test_draining_ends_with_leaving(stack: Stack) -> None:
    change = {"type": "decode", "instance": stack.decode[0].address}
    status, _, _ = await stack.post("/instances/drain", change, KEY)
    assert status == 200
    assert stack.decode[0].address not in await instances(stack)


@pytest.mark.parametrize("headers", [{}, {"X-API-Key": "wrong"}, {"X-API-Key": ""}])
@pytest.mark.parametrize("action", ["add", "remove", "drain"])
async def test_without_the_key_nothing_changes(stack: Stack, action: str, headers: dict[str, str]) -> None:
    before = await instances(stack)
    for address in ("127.0.0.1:9", stack.decode[0].address):
        body = {"type": "decode", "instance": address}
        status, answer, _ = await stack.post(f"/instances/{action}", body, headers)
        assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
    assert await instances(stack) == before


async def test_without_a_key_set_it_says_how_to_set_one(tokenizer: Tokenizer) -> None:
    async with running(tokenizer, admin_api_key="") as stack:
        body = {"type": "decode", "instance": "127.0.0.1:9"}
        for headers in ({}, {"X-API-Key": ""}, KEY):
            status, answer, _ = await stack.post("/instances/add", body, headers)
            assert status == 403
            assert "ADMIN_API_KEY" in answer["error"]["message"]
        assert len(await stack.health()) == 3


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (b"{", 400, None),
        (b"[]", 400, None),
        ({"type": "decode"}, 400, "instance"),
        ({"instance": "127.0.0.1:9"}, 400, "type"),
        ({"type": "king", "instance": "127.0.0.1:9"}, 400, "type"),
        ({"type": "decode", "instance": 9}, 400, "instance"),
        ({"type": "decode", "instance": "nowhere"}, 400, "instance"),
        ({"type": "decode", "instance": "host:99999"}, 400, "instance"),
    ],
)
async def test_a_wrong_change_names_the_field(
    stack: Stack, body: Any, status: int, param: str | None
) -> None:
    found, answer, _ = await stack.post("/instances/add", body, KEY)
    assert (found, answer["error"]["param"]) == (status, param)
    assert len(await instances(stack)) == 3


async def test_removing_what_is_not_there_is_a_404(stack: Stack) -> None:
    for body in (
        {"type": "decode", "instance": "127.0.0.1:9"},
        {"type": "prefill", "instance": stack.decode[0].address},
    ):
        status, answer, _ = await stack.post("/instances/remove", body, KEY)
        assert (status, answer["error"]["code"]) == (404, "no_such_instance")


async def test_status_lists_the_instances(stack: Stack) -> None:
    await stack.complete([20, 21])
    _, status = await stack.get("/status")
    assert status["prefill_nodes"] == [stack.prefill[0].address]
    assert status["decode_node_count"] == 2
    assert (status["model"], status["conductor"], status["degraded"]) == ("tiny", "inside this gateway", "")
    [prefill] = [row for row in status["instances"] if row["role"] == "prefill"]
    assert (prefill["health"], prefill["num_placed"], prefill["has_answered"]) == ("ready", 1, True)
    assert status["conductors"] == []


async def test_status_shows_which_instances_never_answered(stack: Stack) -> None:
    change = {"type": "decode", "instance": "127.0.0.1:9"}
    assert (await stack.post("/instances/add", change, KEY))[0] == 200
    _, status = await stack.get("/status")
    answered = {row["instance"]: row["has_answered"] for row in status["instances"]}
    assert answered.pop("127.0.0.1:9") is False
    assert set(answered.values()) == {True}


async def test_status_names_the_conductors_that_it_reaches(tokenizer: Tokenizer) -> None:
    service = ConductorService(SchedulingSettings(block_tokens=BLOCK_TOKENS, suspect_probe_interval_s=0.05))
    server = ConductorServer(service)
    await service.start()
    reached, lost = await server.start("127.0.0.1", 0), 9
    try:
        async with running(tokenizer, conductor=f"127.0.0.1:{reached},127.0.0.1:{lost}") as stack:
            await until(lambda: any(one.is_connected for one in stack.gateway.conductors))
            _, status = await stack.get("/status")
    finally:
        await server.close()
        await service.close()
    assert status["conductors"] == [
        {"address": f"127.0.0.1:{reached}", "is_connected": True},
        {"address": f"127.0.0.1:{lost}", "is_connected": False},
    ]


async def test_the_story_says_why(stack: Stack) -> None:
    answer = await stack.complete([20, 21])
    _, found = await stack.get(f"/story/{answer['id']}")
    assert any("its turn" in line for line in found["story"])
    _, found = await stack.get(f"/story/{stack.decode[0].address}")
    assert any("is ready" in line for line in found["story"])


async def test_health_ready_and_version(stack: Stack) -> None:
    for path in ("/health", "/ready", "/version"):
        status, _ = await stack.get(path)
        assert status == 200


# --- unauthenticated clients


@pytest.mark.parametrize("headers", [{}, {"X-API-Key": "wrong"}, {"Authorization": "Bearer wrong"}])
async def test_unauthenticated_clients_see_neither_instances_nor_answers(
    stack: Stack, headers: dict[str, str]
) -> None:
    answer = await stack.complete([20, 21])
    addresses = [one.address for one in (*stack.prefill, *stack.decode)]
    for path in ("/status", "/story/" + addresses[0], "/story/" + answer["id"], "/metrics", "/ready"):
        async with stack.session.get(stack.url + path, headers=headers) as response:
            text = await response.text()
            assert response.status == (200 if path in ("/status", "/ready") else 401), path
        assert not any(address in text for address in addresses) and answer["id"] not in text, path
    _, status = await stack.get("/status", headers)
    assert status == {"model": "tiny", "degraded": "", "prefill_node_count": 1, "decode_node_count": 2}


async def test_operators_see_everything_at_their_port(stack: Stack) -> None:
    answer = await stack.complete([20, 21])
    server = HttpServer(create_operator_app(stack.gateway), listen("127.0.0.1", 0))
    await server.start()
    url = f"http://127.0.0.1:{server.port}"
    try:
        for path in ("/metrics", "/status", f"/story/{answer['id']}", f"/v1/requests/{answer['id']}/explain"):
            async with stack.session.get(url + path) as response:
                assert response.status == 200, path
        async with stack.session.get(url + "/status") as response:
            assert len((await response.json())["instances"]) == 3
        async with stack.session.post(url + "/v1/completions", json={"prompt": "w20"}) as response:
            assert response.status == 404, "it serves no clients"
        change = {"type": "decode", "instance": stack.decode[0].address}
        async with stack.session.post(url + "/instances/remove", json=change) as response:
            assert response.status == 401, "reading does not allow changes"
    finally:
        await server.close()


async def test_a_scraper_may_send_the_key_as_bearer_token(stack: Stack) -> None:
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    async with stack.session.get(stack.url + "/metrics", headers=headers) as response:
        assert response.status == 200 and "mooncake_gateway_requests" in await response.text()


async def test_beyond_loopback_operators_need_the_key(tokenizer: Tokenizer) -> None:
    async with running(tokenizer, metrics_host="0.0.0.0") as stack:
        server = HttpServer(create_operator_app(stack.gateway), listen("127.0.0.1", 0))
        await server.start()
        try:
            for headers, status in (({}, 401), (KEY, 200)):
                async with stack.session.get(
                    f"http://127.0.0.1:{server.port}/metrics", headers=headers
                ) as response:
                    assert response.status == status
        finally:
            await server.close()


@pytest.mark.parametrize(
    ("fields", "may"),
    [
        ({}, True),
        ({"host": "0.0.0.0"}, False),
        ({"host": "0.0.0.0", "api_keys_file": "keys"}, True),
        ({"metrics_host": "0.0.0.0"}, False),
        ({"metrics_host": "0.0.0.0", "admin_api_key": "k"}, True),
    ],
)
def test_beyond_loopback_clients_must_be_authenticated(fields: dict[str, Any], may: bool) -> None:
    settings = GatewaySettings(**fields)
    if may:
        check_exposure(settings, Identity())
    else:
        with pytest.raises(InvalidArgument, match="loopback"):
            check_exposure(settings, Identity())


def test_the_cluster_s_key_is_not_a_client_s_key(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(format_secret(b"k" * 32))
    file.chmod(0o600)
    identity = Identity(SecuritySettings(cluster_key_file=str(file)))
    with pytest.raises(InvalidArgument, match="api-keys-file"):
        check_exposure(GatewaySettings(host="0.0.0.0"), identity)
    insecure = Identity(SecuritySettings(cluster_key_file=str(file), insecure=True))
    check_exposure(GatewaySettings(host="0.0.0.0"), insecure)


# --- explanations


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


STAGE = {
    "first_layer": 0,
    "end_layer": 15,
    "num_chunks": 3,
    "began_s": 0.0,
    "ended_s": 0.5,
    "computed_s": 0.375,
    "waited_s": 0.125,
}


async def test_the_workers_own_measurements_are_used(stack: Stack) -> None:
    stack.prefill[0].measured = {
        "queued_s": 0.25,
        "loaded_s": 0.125,
        "computed_s": 0.5,
        "num_local_tokens": 8,
        "num_loaded_tokens": 4,
        "num_computed_tokens": 12,
        "stages": [STAGE],
    }
    answer = await stack.complete(PROMPT, 6)
    found = await finished(stack, answer["id"])
    actual = found["actual"]
    assert (actual["queue_s"], actual["load_s"], actual["prefill_s"]) == (0.25, 0.125, 0.5)
    assert actual["stages"] == [STAGE]
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
    assert found["num_left_off"] == 0


async def test_of_many_prompts_the_first_are_explained(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mooncake.gateway.admin.MOST_EXPLAINED", 2)
    answer = await stack.complete([PROMPT, PROMPT[:8], PROMPT[:16]], 2)
    _, found = await explained(stack, answer["id"])
    assert [prompt["num_tokens"] for prompt in found["prompts"]] == [24, 8]
    assert len(found["misses"]) == 2 and found["num_left_off"] == 1


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
            "scheduling": "round_robin",
            "slo_ttft_s": 0.0,
            "slo_tbt_s": 0.0,
            "audit_share": 1.0,
            "turn_share": 0.05,
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

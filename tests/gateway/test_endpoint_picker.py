# SPDX-License-Identifier: Apache-2.0
"""A proxy's requests are placed as the gateway's are, and their accounts follow what the proxy reports."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

pytest.importorskip("grpc", reason="grpcio is not installed (extra grpc)")
pytest.importorskip("envoy.service.ext_proc", reason="xds-protos is not installed (extra dev)")

from mooncake.conductor.client import RemoteConductor
from mooncake.conductor.messages import AddInstance, InstanceStatus, Place, RemoveInstance
from mooncake.conductor.server import ConductorServer, ConductorService
from mooncake.conductor.settings import SchedulingSettings
from mooncake.gateway.app import create_operator_app
from mooncake.gateway.endpoint_picker import normalized, why_none
from mooncake.http.server import HttpServer, listen
from mooncake.metrics import registry
from mooncake.types import WorkerRole
from tests.gateway.engines import BLOCK, Front, fronting
from tests.gateway.envoy import Proxy, health_of, proxied
from tests.waiting import until

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
KEY = "anna-anna-anna-anna"


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("10.0.0.1:80", "10.0.0.1:80"),
        ("10.0.0.1:00080", "10.0.0.1:80"),
        ("[2001:DB8::0:1]:80", "[2001:db8::1]:80"),
        ("2001:db8::1:80", None),
        ("[10.0.0.1]:80", None),
        ("localhost:80", None),
        ("10.0.0.1", None),
        ("10.0.0.1:0", None),
        ("10.0.0.1:65536", None),
        ("10.0.0.1:8o", None),
        ("10.0.0.1:80,10.0.0.2:80", None),
        ("10.0.0.1:80\n", None),
        ("", None),
    ],
)
def test_addresses_have_one_form(address: str, expected: str | None) -> None:
    assert normalized(address) == expected


# --- as the gateway


@dataclass
class Both:
    """A gateway and a picker with one conductor and the same engines."""

    front: Front
    proxy: Proxy
    service: ConductorService
    placed: list[Place]


@contextlib.asynccontextmanager
async def both(num_prefill: int = 0, num_decode: int = 3, **settings: Any) -> AsyncIterator[Both]:
    given = SchedulingSettings(
        block_tokens=BLOCK,
        probe_interval_s=0.05,
        suspect_probe_interval_s=0.02,
        slow_start_s=0.0,
        **settings,
    )
    service = ConductorService(given)
    server = ConductorServer(service)
    port = await server.start("127.0.0.1", 0)
    await service.start()
    placed: list[Place] = []
    place_now = service.place_now

    def noted(request: Place) -> Any:
        placed.append(request)
        return place_now(request)

    service.place_now = noted  # type: ignore[method-assign]
    address = f"127.0.0.1:{port}"
    try:
        async with fronting(num_prefill, num_decode, conductor=address, scheduling="overlap") as front:
            engines = [*front.decode, *front.prefill]
            async with proxied(num_prefill=num_prefill, shared=engines, conductor=address) as proxy:
                for gateway in (front.gateway, proxy.gateway):
                    remote = gateway.scheduling
                    assert isinstance(remote, RemoteConductor)
                    await until(lambda remote=remote: remote.is_connected)  # type: ignore[misc]
                placed.clear()
                yield Both(front, proxy, service, placed)
    finally:
        await server.close()
        await service.close()


def words(random: Random, num: int) -> str:
    return " ".join(f"w{random.randrange(20, 90)}" for _ in range(num))


@pytest.mark.parametrize("epp_first", [False, True])
@pytest.mark.parametrize("is_chat", [False, True])
async def test_a_request_goes_to_the_same_instance_by_picker_and_by_gateway(
    is_chat: bool, epp_first: bool
) -> None:
    random = Random(5)
    async with both() as found:

        async def by_gateway(body: dict[str, Any], path: str) -> str:
            status, answer, headers = await found.front.post(path, body)
            assert status == 200, answer
            return headers["x-mooncake-decode"]

        async def by_picker(body: dict[str, Any], path: str) -> str:
            answer = await found.proxy.forward(body, path=path)
            assert answer.status == 200
            assert answer.served == answer.headers["x-mooncake-decode"] == answer.endpoints[0]
            return answer.served

        ways = [by_picker, by_gateway] if epp_first else [by_gateway, by_picker]
        used: dict[str, None] = {}
        prefixes = [words(random, 64) for _ in range(6)]
        for number in range(24):
            text = f"{prefixes[number % len(prefixes)]} {words(random, 8)}"
            body: dict[str, Any] = {"max_tokens": 2}
            body |= {"messages": [{"role": "user", "content": text}]} if is_chat else {"prompt": text}
            path = CHAT if is_chat else TEXT
            first, second = [await way(body, path) for way in ways]
            assert first == second, f"request {number}"
            used[first] = None
        assert len(used) > 1, "the conductor uses more than one instance"


@pytest.mark.parametrize(
    ("path", "body", "headers"),
    [
        (TEXT, {"prompt": "w20 w21 w22 w23 w24", "max_tokens": 7}, {}),
        (TEXT, {"prompt": [20, 21, 22, 23, 24]}, {"x-slo-ttft-ms": "900", "x-slo-tbt-ms": "40"}),
        (TEXT, {"prompt": ["w20 w21", "w22"], "n": 2, "cache_salt": "s"}, {"x-vllm-priority": "3"}),
        (CHAT, {"messages": [{"role": "user", "content": "w20 w21"}], "model": "org/tiny"}, {}),
        (CHAT, {"messages": [{"role": "user", "content": "w20"}], "priority": -4}, {"x-session-id": "s1"}),
        (CHAT, {"messages": [{"role": "user", "content": "w20"}], "session_id": "s2"}, {}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "w20 w21"}], "max_tokens": 3}, {}),
        ("/v1/responses", {"input": "w20 w21 w22", "max_output_tokens": 3}, {}),
    ],
)
async def test_the_conductor_is_asked_the_same(
    path: str, body: dict[str, Any], headers: dict[str, str]
) -> None:
    async with both() as found:
        body = {"model": "org/tiny", **body}
        status, answer, _ = await found.front.post(path, body, headers)
        assert status == 200, answer
        assert (await found.proxy.forward(body, headers, path)).status == 200
        ours, theirs = (msgspec.structs.replace(one, request_id="") for one in found.placed)
        assert ours == theirs
        engine_gets = [one.calls for one in found.proxy.engines if one.calls]
        bodies = [call for calls in engine_gets for call in calls]
        assert bodies[0] == bodies[1], "and so are the engines"


async def test_admission_is_the_same_and_is_explained() -> None:
    async with both(num_decode=1, max_requests_per_instance=1) as found:
        holding = found.proxy.exchange()
        await holding.completed({"prompt": "w1", "max_tokens": 1})
        body = {"prompt": "w2", "max_tokens": 1}
        status, by_gateway, headers = await found.front.post(TEXT, body)
        refused = found.proxy.exchange()
        await refused.request_headers()
        await refused.request_body(msgspec.json.encode(body))
        by_picker = await refused.refusal()
        assert (status, by_gateway) == (by_picker.status, by_picker.body)
        assert status == 429
        ids = headers["x-mooncake-id"], by_picker.headers["x-mooncake-id"]
        explained = [found.service.explain_now(one) for one in ids]
        assert all(one is not None for one in explained)
        await holding.end()


async def test_both_name_the_same_prefill_instance() -> None:
    async with both(num_prefill=2, num_decode=2) as found:
        body = {"prompt": "w20 w21 w22 w23 w24 w25 w26 w27", "max_tokens": 2}
        status, _, headers = await found.front.post(TEXT, body)
        assert status == 200
        exchange = found.proxy.exchange()
        picked = await exchange.completed(body)
        assert picked.set_headers["x-prefiller-host-port"] == headers["x-mooncake-prefill"]
        await exchange.end()


# --- what only a picker has


async def test_an_instance_without_an_address_is_never_picked(caplog: pytest.LogCaptureFixture) -> None:
    async with proxied(1) as proxy:
        name = proxy.engines[0].address.replace("127.0.0.1", "localhost")
        await proxy.gateway.scheduling.change(AddInstance(name, WorkerRole.DECODE))

        async def is_ready() -> bool:
            return (await proxy.rows())[name].health == "ready"

        await until(is_ready)
        for _ in range(4):
            exchange = proxy.exchange()
            picked = await exchange.completed({"prompt": "w1", "max_tokens": 1})
            assert picked.endpoints == [proxy.engines[0].address]
            await exchange.end()
        assert "endpoint_not_addressable" in caplog.text


def row(instance: str, health: str) -> InstanceStatus:
    return InstanceStatus(instance, WorkerRole.DECODE, health, "", 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("rows", "parts"),
    [
        ([], ["no instance is known"]),
        ([row("10.0.0.1:80", "starting")], ["10.0.0.1:80 is starting"]),
        (
            [row("engine-1:80", "ready"), row("10.0.0.2:80", "draining")],
            ["engine-1:80 is ready, but its name is not ip:port", "10.0.0.2:80 is draining"],
        ),
        ([row(f"10.0.0.{number}:80", "down") for number in range(20)], ["10.0.0.7:80 is down; 12 more"]),
    ],
)
def test_where_no_endpoint_can_be_picked_the_reason_is_named(
    rows: list[InstanceStatus], parts: list[str]
) -> None:
    found = why_none(rows)
    assert all(part in found for part in parts), found
    assert why_none([*rows, row("10.0.9.9:80", "ready")]) == ""


async def test_a_picker_of_instances_without_addresses_is_not_ready(caplog: pytest.LogCaptureFixture) -> None:
    async with proxied(1) as proxy:
        address = proxy.engines[0].address
        name = address.replace("127.0.0.1", "localhost")
        assert await proxy.picker.why_not_ready() == ""
        await proxy.gateway.scheduling.change(AddInstance(name, WorkerRole.DECODE))
        await proxy.gateway.scheduling.change(RemoveInstance(address))

        async def is_explained() -> bool:
            return await proxy.picker.why_not_ready() == (
                f"no endpoint can be picked: {name} is ready, but its name is not ip:port"
            )

        await until(is_explained)
        assert await health_of(proxy.channel, "readiness") == 2
        app = create_operator_app(proxy.gateway, proxy.picker.why_not_ready)
        server = HttpServer(app, listen("127.0.0.1", 0))
        await server.start()
        try:
            async with proxy.session.get(f"http://127.0.0.1:{server.port}/ready") as response:
                assert response.status == 503 and name in await response.text()
        finally:
            await server.close()
        assert "picker_not_ready" in caplog.text


async def test_an_instance_that_joined_since_the_list_was_made_is_not_picked_outside_the_subset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with proxied(2, scheduling="round_robin") as proxy:
        known = proxy.engines[0].address
        status = proxy.gateway.scheduling.status

        async def older() -> Any:
            return [row for row in await status() if row.instance == known]

        monkeypatch.setattr(proxy.gateway.scheduling, "status", older)
        await until(lambda: True)
        for _ in range(4):
            exchange = proxy.exchange()
            picked = await exchange.completed({"prompt": "w1", "max_tokens": 1}, subset=[known])
            assert picked.endpoints == [known]
            await exchange.end()
        monkeypatch.setattr(proxy.gateway.scheduling, "status", status)


@pytest.mark.parametrize("priority", [None, 7])
async def test_an_engine_gets_a_priority_in_a_header_only_without_one_in_the_body(
    priority: int | None,
) -> None:
    """vLLM prefers the header; the conductor and the engine must see the same one."""
    async with proxied(1) as proxy:
        answer = await proxy.forward({"prompt": "w20", "priority": priority}, {"x-vllm-priority": "-5"})
        assert answer.status == 200
        [headers] = proxy.engines[0].headers
        assert headers.get("x-vllm-priority") == ("-5" if priority is None else None)


async def test_the_prompt_of_a_whole_answer_counts_as_computed_when_that_was_predicted() -> None:
    def num_ttfts() -> float:
        return registry.get_sample_value("vllm:time_to_first_token_seconds_count") or 0.0

    async with proxied(1) as proxy:
        before = num_ttfts()
        exchange = proxy.exchange()
        await exchange.completed({"prompt": "w1 w2 w3", "max_tokens": 3})

        async def is_decoding() -> bool:
            [row] = (await proxy.rows()).values()
            return row.num_requests == 1 and row.queued_tokens == 0

        await until(is_decoding, "the predicted first token")
        scheduling = proxy.gateway.scheduling
        assert isinstance(scheduling, ConductorService)
        [name] = scheduling.core.placements
        await exchange.response_headers()
        await exchange.receive()
        await exchange.response_body(b'{"usage": {"completion_tokens": 3}}')
        await exchange.receive()
        await exchange.end()
        await proxy.until_idle()
        explained = await scheduling.explain(name)
        assert explained is not None and explained.state == "finished"
        actual = explained.actual
        assert (actual.output_tokens, actual.ttft_s, actual.tbt_s) == (3, 0.0, 0.0)
        assert num_ttfts() == before and not scheduling.core.predict.accuracy["ttft_s"].num_seen


@pytest.mark.parametrize("served", ["10.9.9.9:1", "nonsense"])
async def test_an_unknown_endpoint_that_served_changes_no_account(served: str) -> None:
    async with proxied(2) as proxy:
        exchange = proxy.exchange()
        await exchange.completed({"prompt": "w1", "max_tokens": 1})
        await exchange.response_headers(served=served)
        await exchange.receive()
        assert await proxy.num_placed() == 1
        await exchange.end()


@pytest.mark.parametrize("prompt", ["w1 w2 w3", [[1], [1, 2, 3]]])
async def test_an_answer_that_ends_early_is_charged_for_what_was_computed(
    tmp_path: Path, prompt: Any
) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"keys": [{"name": "anna", "key": KEY, "tokens_per_minute": 5}]}))
    keys.chmod(0o600)
    async with proxied(1, api_keys_file=str(keys)) as proxy:
        body, headers = {"prompt": prompt, "max_tokens": 9}, {"authorization": f"Bearer {KEY}"}
        unanswered = proxy.exchange()
        await unanswered.completed(body, headers=headers)
        await unanswered.end()
        await proxy.until_idle()
        exchange = proxy.exchange()
        await exchange.completed(body, headers=headers)  # of the first one nothing was computed
        await exchange.response_headers(kind="text/event-stream")
        await exchange.receive()
        await exchange.response_body(b"data: {}\n\ndata: {}\n\n", False)
        await exchange.receive()
        await exchange.end()
        await proxy.until_idle()
        refused = proxy.exchange()
        await refused.request_headers(headers)
        await refused.request_body(msgspec.json.encode(body))
        assert (await refused.refusal()).details == "quota_tokens"


@pytest.mark.parametrize(
    ("path", "is_charged"),
    [
        ("/v1/embeddings", True),
        ("/tokenize", False),
        ("/detokenize", False),
        ("/v1/messages/count_tokens", False),
    ],
)
async def test_a_request_that_generates_nothing_has_the_quotas_and_the_salt(
    tmp_path: Path, path: str, is_charged: bool
) -> None:
    quotas = {"max_in_flight": 1, "tokens_per_minute": 5}
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"keys": [{"name": "anna", "key": KEY, **quotas}]}))
    keys.chmod(0o600)
    body = {
        "model": "tiny",
        "input": "w1",
        "cache_salt": "of another",
        "kv_transfer_params": {"remote_host": "10.6.6.6"},
    }
    async with proxied(1, api_keys_file=str(keys)) as proxy:
        headers = {"authorization": f"Bearer {KEY}"}
        exchange = proxy.exchange()
        picked = await exchange.completed(body, path=path, headers=headers)
        assert "kv_transfer_params" not in picked.request
        assert picked.request["model"] == "org/tiny", "the engine's name for it"
        assert (picked.request["cache_salt"] == "of another") is not is_charged
        assert not await proxy.num_placed()

        async def outcome() -> str:
            again = proxy.exchange()
            await again.request_headers(headers, path=path)
            await again.request_body(msgspec.json.encode(body))
            reply = await again.receive()
            await again.end()
            return str(reply.immediate_response.details)

        assert await outcome() == "quota_in_flight"
        await exchange.response_headers()
        await exchange.receive()
        await exchange.response_body(b'{"data": [], "usage": {"prompt_tokens": 5, "input_tokens": 5}}')
        await exchange.receive()
        await exchange.end()
        await proxy.until_idle()
        assert await outcome() == ("quota_tokens" if is_charged else "")
        await proxy.until_idle()


async def test_a_request_that_generates_nothing_and_is_refused_holds_no_quota() -> None:
    async with proxied(1) as proxy:
        exchange = proxy.exchange()
        await exchange.request_headers(path="/tokenize")
        await exchange.request_body(b'{"model": "unheard"}')
        assert (await exchange.refusal()).status == 404
        assert proxy.gateway.limiter.num_in_flight == 0


async def test_measurements_reach_the_conductor(monkeypatch: pytest.MonkeyPatch) -> None:
    async with proxied(1) as proxy:
        events: list[Any] = []
        post: Callable[[Any], None] = proxy.gateway.scheduling.post

        def noted(event: Any) -> None:
            events.append(event)
            post(event)

        monkeypatch.setattr(proxy.gateway.scheduling, "post", noted)
        await proxy.forward({"prompt": "w20 w21 w22", "max_tokens": 5, "stream": True})
        await proxy.until_idle()
        prefilled, finished = events
        assert prefilled.has_begun
        assert (finished.is_complete, finished.num_output_tokens >= 5) == (True, True)
        assert finished.ttft_s > 0.0

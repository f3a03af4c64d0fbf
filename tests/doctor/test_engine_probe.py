# SPDX-License-Identifier: Apache-2.0
"""Facts are read from the pages of each kind of engine; the pages here are as vLLM and SGLang show them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from mooncake.conductor.event_subscriptions import EventSource
from mooncake.doctor.engine_probe import MetricsPage, read_engine
from mooncake.doctor.facts import EngineFacts, EngineKind, Trouble
from mooncake.doctor.http_probe import HttpProbe, HttpServerAt
from mooncake.security import Identity

VLLM_METRICS = """\
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="128",cache_dtype="auto",enable_prefix_caching="True",\
prefix_caching_hash_algo="sha256"} 1.0
# TYPE vllm:external_prefix_cache_queries counter
vllm:external_prefix_cache_queries_total{engine="0"} 300.0
vllm:external_prefix_cache_queries_total{engine="1"} 200.0
# TYPE vllm:request_prompt_tokens histogram
vllm:request_prompt_tokens_sum{engine="0"} 1000.0
vllm:request_prompt_tokens_count{engine="0"} 50.0
vllm:request_prompt_tokens_bucket{engine="0",le="+Inf"} 50.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0"} 4.0
# TYPE process_max_fds gauge
process_max_fds 1024.0
"""
PUBLISHER = {
    "enable_kv_cache_events": True,
    "publisher": "zmq",
    "endpoint": "tcp://*:5557",
    "replay_endpoint": "tcp://*:5558",
    "topic": "kv",
}


def models(owner: str, *names: str) -> dict[str, Any]:
    cards = [{"id": name, "owned_by": owner, "max_model_len": 2048} for name in names]
    return {"object": "list", "data": [*cards, {"id": "adapter", "owned_by": owner, "parent": names[0]}]}


@asynccontextmanager
async def a_server(
    pages: Mapping[str, Any], status: int = 200, port: int = 0, host: str = "127.0.0.1"
) -> AsyncIterator[HttpServerAt]:
    async def answer(http: web.Request) -> web.Response:
        page = pages.get(http.path)
        if page is None:
            return web.json_response({"detail": "Not Found"}, status=404)
        if isinstance(page, str):
            return web.Response(text=page, status=status)
        return web.json_response(page, status=status)

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    yield HttpServerAt(f"http://{f'[{host}]' if ':' in host else host}:{runner.addresses[0][1]}")
    await runner.cleanup()


async def facts_of(
    pages: Mapping[str, Any], status: int = 200, given: Sequence[EventSource] = ()
) -> EngineFacts:
    async with a_server(pages, status) as server, HttpProbe(Identity(), 5.0) as http:
        sources = {server.address: given} if given else {}
        facts, _ = await read_engine(http, server, "decode", sources)
        assert facts.address == server.address
        return facts


async def test_vllm() -> None:
    pages = {
        "/v1/models": models("vllm", "m"),
        "/version": {"version": "0.32.0"},
        "/metrics": VLLM_METRICS,
        "/kv_event_sources": {"0": PUBLISHER, "1": {**PUBLISHER, "enable_kv_cache_events": False}},
    }
    facts = await facts_of(pages)
    assert (facts.kind, facts.version, facts.models) == (EngineKind.VLLM, "0.32.0", ("m",))
    assert (facts.block_tokens, facts.has_prefix_cache, facts.hash_algorithm) == (128, True, "sha256")
    assert (facts.max_files, facts.num_waiting, facts.max_model_len) == (1024, 4, 2048)
    assert (facts.mean_prompt_tokens, facts.num_prompts) == (20.0, 50)
    assert facts.publishers is not None and len(facts.publishers) == 1
    (one,) = facts.publishers
    assert (one.endpoint, one.replay_endpoint, one.topic) == (
        "tcp://127.0.0.1:5557",
        "tcp://127.0.0.1:5558",
        "kv",
    )
    assert not one.may_connect and facts.connectors is None, "unknown outside of the development mode"


async def test_vllm_in_its_development_mode_shows_its_connectors() -> None:
    transfer = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"connectors": [{"kv_connector": "MooncakeStoreConnector"}]},
    }
    config = {"kv_transfer_config": transfer, "model_config": {"dtype": "torch.bfloat16"}}
    pages = {
        "/v1/models": models("vllm", "m"),
        "/metrics": VLLM_METRICS,
        "/server_info": {"vllm_config": config},
    }
    facts = await facts_of(pages)
    assert facts.connectors == ("MultiConnector", "MooncakeStoreConnector")
    assert (facts.connector_role, facts.cache_dtype) == ("kv_producer", "bfloat16")
    config["kv_transfer_config"] = {}
    assert (await facts_of(pages)).connectors == ()


async def test_sglang() -> None:
    info = {
        "version": "0.5.1",
        "page_size": 64,
        "disable_radix_cache": True,
        "dtype": "auto",
        "kv_cache_dtype": "auto",
        "kv_events_config": '{"publisher": "zmq", "endpoint": "tcp://*:5600", "topic": "kv"}',
        "hicache_storage_backend": "mooncake",
    }
    facts = await facts_of({"/v1/models": models("sglang", "m"), "/get_server_info": info})
    assert (facts.kind, facts.version, facts.block_tokens) == (EngineKind.SGLANG, "0.5.1", 64)
    assert facts.has_prefix_cache is False and facts.connectors == ("mooncake",)
    assert facts.publishers is not None and facts.publishers[0].endpoint == "tcp://127.0.0.1:5600"
    info["kv_events_config"] = None
    assert (await facts_of({"/v1/models": models("sglang", "m"), "/get_server_info": info})).publishers == []


async def test_our_worker() -> None:
    sources = {"sources": [{"endpoint": "tcp://127.0.0.1:7000"}], "block_size": 32, "kv_identity": "abc"}
    facts = await facts_of({"/v1/models": models("mooncake", "m"), "/kv_event_sources": sources})
    assert (facts.kind, facts.block_tokens, facts.kv_identity) == (EngineKind.OWN, 32, "abc")
    assert facts.publishers is not None and facts.publishers[0].replay_endpoint == ""


async def test_other_servers_leave_most_unknown() -> None:
    facts = await facts_of({"/v1/models": models("others", "m"), "/metrics": "no metrics { at all"})
    assert facts.reach.is_fine and facts.kind is EngineKind.OTHER
    assert (facts.block_tokens, facts.publishers, facts.has_prefix_cache) == (None, None, None)


@pytest.mark.parametrize("page", ["<html>welcome</html>", [1], {"status": "ok"}, {"data": None}])
async def test_what_has_no_list_of_models_is_no_engine(page: Any) -> None:
    facts = await facts_of({"/v1/models": page})
    assert facts.reach.trouble is Trouble.OTHER and "/v1/models was answered with 200" in facts.reach.detail


async def test_publishers_that_the_operator_names() -> None:
    """One for each rank."""
    given = [EventSource("tcp://10.0.0.1:5557", "tcp://10.0.0.1:5559"), EventSource("tcp://10.0.0.1:5558")]
    facts = await facts_of({"/v1/models": models("sglang", "m")}, given=given)
    assert [one.replay_endpoint for one in facts.publishers or ()] == ["tcp://10.0.0.1:5559", ""]


async def test_refusals() -> None:
    pages = {"/v1/models": {"error": {"message": "a key is missing"}}}
    facts = await facts_of(pages, status=401)
    assert facts.reach.trouble is Trouble.DENIED and "a key is missing" in facts.reach.detail
    assert (await facts_of(pages, status=500)).reach.trouble is Trouble.OTHER
    assert (await facts_of({})).reach.trouble is Trouble.OTHER


def test_metrics_are_added_up_over_engines() -> None:
    page = MetricsPage.parse(VLLM_METRICS)
    assert page.get(["absent", "vllm:external_prefix_cache_queries"]) == 500.0
    assert page.get(["absent"]) is None


async def test_pages_of_another_form_are_a_finding_and_no_failure() -> None:
    sources = {"sources": [{"endpoint": 7}], "block_size": 32}
    facts = await facts_of({"/v1/models": models("mooncake", "m"), "/kv_event_sources": sources})
    assert facts.reach.trouble is Trouble.OTHER and "can't be read" in facts.reach.detail
    facts = await facts_of(
        {"/v1/models": models("sglang", "m"), "/get_server_info": {"kv_events_config": [1]}}
    )
    assert facts.publishers == []

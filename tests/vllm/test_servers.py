# SPDX-License-Identifier: Apache-2.0
"""Two vLLM servers behind the gateway, each with both of our connectors: prefill and decode, and a pool.

Prefill writes each prompt's KV into decode's blocks and saves it to the pool; what a server answers alone is
requested from it directly, with a ``cache_salt`` under which no engine has blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import Answer, OpenAiServer, wait_for
from tests.vllm.engine import BLOCK_TOKENS, a_prompt
from tests.vllm_server import (
    HOST,
    Gateway,
    VllmServer,
    direct_connector,
    free_port,
    num_stored,
    running_gateway,
    running_store,
    store_connector,
)

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1200)]

PROMPT = a_prompt("Zanzibar", 20)
NUM_TOKENS = 8
HITS = "vllm:external_prefix_cache_hits_total"


@dataclass(frozen=True)
class Servers:
    prefill: VllmServer
    decode: VllmServer
    push: Gateway
    pool: Gateway
    store: str


def both(role: str, store: str, **extra: Any) -> dict[str, Any]:
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "connectors": [direct_connector(role, **extra), store_connector(store)]
        },
    }


@pytest.fixture(scope="module")
def servers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp("servers")
    port = free_port()
    with ExitStack() as stack:
        store = stack.enter_context(running_store(folder))
        connectors = [
            both("kv_producer", store, listen_addr=f"{HOST}:{port}"),
            both("kv_consumer", store, prefill_addr=f"{HOST}:{port}", listener_offset=0),
        ]
        pair: list[VllmServer] = []
        for core, (name, connector) in enumerate(zip(("prefill", "decode"), connectors, strict=True)):
            pair.append(VllmServer(name, model, folder, connector, core, "float32"))
            stack.callback(pair[-1].close)
        prefill, decode = pair
        roles = ["--prefill", prefill.address, str(port), "--decode", decode.address]
        push = stack.enter_context(running_gateway(folder, model, "--protocol", "push", *roles))
        flags = ["--protocol", "pool", "--scheduling", "round_robin", "--decode"]
        pool = stack.enter_context(running_gateway(folder, model, *flags, prefill.address, decode.address))
        for one in pair:
            one.wait_until_ready()
        push.wait_until_routable()
        pool.wait_until_routable()
        yield Servers(prefill, decode, push, pool, store)


def chat(server: OpenAiServer, **more: Any) -> Answer:
    messages = [{"role": "user", "content": PROMPT}]
    body = {"model": "smollm2", "messages": messages, "max_tokens": NUM_TOKENS, "temperature": 0}
    return server.post("/v1/chat/completions", {**body, **more})


def token_ids(answer: Answer) -> list[int]:
    assert answer.status == 200, answer.body
    found: list[int] = answer.body["choices"][0]["token_ids"]
    return found


def num_cached(answer: Answer) -> int:
    found: int = answer.body["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def test_push_hands_over_and_what_comes_is_right(servers: Servers) -> None:
    alone = servers.decode.complete(PROMPT, NUM_TOKENS, cache_salt="alone")
    assert num_cached(alone) == 0
    hits = servers.decode.metric(HITS)
    answer = servers.push.complete(PROMPT, NUM_TOKENS)
    assert token_ids(answer) == token_ids(alone)
    assert answer.headers["x-mooncake-prefill"] == servers.prefill.address
    assert answer.headers["x-mooncake-decode"] == servers.decode.address
    num_tokens = answer.body["usage"]["prompt_tokens"]
    assert servers.decode.metric(HITS) - hits >= num_tokens - 1, "decode computed the prompt"

    streamed = servers.push.stream(PROMPT, NUM_TOKENS)
    assert streamed.error is None and streamed.token_ids == token_ids(alone)
    cached = streamed.usage["prompt_tokens_details"]["cached_tokens"]
    assert cached == num_tokens // BLOCK_TOKENS * BLOCK_TOKENS > 0, (
        "what prefill found, not what decode was given"
    )

    said = chat(servers.push)
    assert said.status == 200, said.body
    assert said.body["choices"] == chat(servers.decode, cache_salt="alone").body["choices"]


def prompts(*subjects: str) -> list[str]:
    """Several: a lookup in the pool that takes a second is a miss, and on a busy machine one may."""
    return [a_prompt(subject, 20) for subject in subjects]


def computed(servers: Servers, gateway: Gateway, wanted: list[str]) -> list[Answer]:
    """The answers, once all of their blocks are in the pool."""
    num_before = num_stored(servers.store)
    found = [gateway.complete(prompt, NUM_TOKENS) for prompt in wanted]
    assert [num_cached(one) for one in found] == [0] * len(wanted)
    num_blocks = sum(map(num_full_blocks, found))
    wait_for(lambda: num_stored(servers.store) >= num_before + num_blocks, "blocks to be stored", 120.0)
    return found


def num_full_blocks(answer: Answer) -> int:
    found: int = answer.body["usage"]["prompt_tokens"] // BLOCK_TOKENS
    return found


def test_from_the_pool_the_other_server_loads(servers: Servers) -> None:
    wanted = prompts("Timbuktu", "Havana", "Quito")
    num_loaded = 0
    for prompt, before in zip(wanted, computed(servers, servers.pool, wanted), strict=True):
        for _ in range(8):  # by turns, though one that came later is looked up less often at first
            answer = servers.pool.complete(prompt, NUM_TOKENS)
            assert token_ids(answer) == token_ids(before)
            if answer.headers["x-mooncake-decode"] != before.headers["x-mooncake-decode"]:
                break
        else:
            raise AssertionError("the other server got no request")
        num_loaded += num_cached(answer) == num_full_blocks(before) * BLOCK_TOKENS > 0
    assert num_loaded


def test_killed_and_started_again_they_find_their_prefixes(servers: Servers) -> None:
    wanted = prompts("Nairobi", "Oslo", "Lima")
    right = computed(servers, servers.push, wanted)
    for server in (servers.prefill, servers.decode):
        server.kill()
    refused = servers.push.complete(PROMPT, NUM_TOKENS)
    assert refused.status == 503 and refused.body["error"]["message"], refused
    for server in (servers.prefill, servers.decode):
        server.start()
    for server in (servers.prefill, servers.decode):
        server.wait_until_ready()
    servers.push.wait_until_routable()
    found = [servers.push.complete(prompt, NUM_TOKENS) for prompt in wanted]
    assert [token_ids(one) for one in found] == [token_ids(one) for one in right]
    assert any(num_cached(one) == num_full_blocks(one) * BLOCK_TOKENS > 0 for one in found)
    assert servers.prefill.metric(HITS) > 0, "from the pool: its own cache was new"
    assert servers.decode.metric(HITS) > 0, "and handed over"

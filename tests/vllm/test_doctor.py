# SPDX-License-Identifier: Apache-2.0
"""``mooncake doctor`` beside two real vLLM servers with our store connector: healthy, and with faults.

The second server differs in its hash seed, a fault that is there from the start. ``scripts/faults-doctor``
has the long list of faults.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.vllm_server import VllmServer, free_port, running_store, store_connector

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1200)]


@dataclass(frozen=True)
class Pair:
    first: VllmServer
    second: VllmServer
    store: str


def events(topic: str) -> tuple[str, ...]:
    endpoints = {name: f"tcp://*:{free_port()}" for name in ("endpoint", "replay_endpoint")}
    config = {"enable_kv_cache_events": True, "publisher": "zmq", "topic": topic, **endpoints}
    return ("--kv-events-config", json.dumps(config))


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("doctor")
    with ExitStack() as stack:
        store = stack.enter_context(running_store(folder))
        servers = []
        for core, (name, seed) in enumerate((("first", {}), ("second", {"PYTHONHASHSEED": "7"}))):
            connector = store_connector(store)
            servers.append(VllmServer(name, model, folder, connector, core, "float32", seed, events("kv")))
            stack.callback(servers[-1].close)
        for one in servers:
            one.wait_until_ready()
        yield Pair(servers[0], servers[1], store)


def examine(*flags: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "mooncake", "doctor", "--json", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.stdout, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def alarms(found: dict[str, Any]) -> set[str]:
    return {one["code"] for one in found["findings"] if one["severity"] in ("broken", "wasteful")}


def test_one_healthy_server_has_no_finding(pair: Pair) -> None:
    found = examine("--engine", pair.first.url, "--master", pair.store)
    assert alarms(found) == set()
    (engine,) = found["facts"]["engines"]
    assert engine["kind"] == "vllm" and engine["block_tokens"] == 128 and engine["has_prefix_cache"]
    assert engine["first"]["cached_tokens"] == 0 and engine["second"]["cached_tokens"] == 256
    assert engine["other_salt"]["cached_tokens"] == 0
    assert engine["store_growth"] > 0 and engine["has_external_lookups"]
    (publisher,) = engine["publishers"]
    assert publisher["is_canary_seen"] and publisher["replay_answers"] and publisher["topics"] == ["kv"]


def test_another_hash_seed_is_found_from_the_events(pair: Pair) -> None:
    found = examine("--engine", pair.first.url, pair.second.url, "--master", pair.store)
    assert "hash_seed_differs" in alarms(found)
    assert alarms(found) <= {"hash_seed_differs", "pool_not_shared"}
    assert found["facts"]["engines"][1]["crossed_tokens"] == 0


def test_another_topic_and_short_prompts(pair: Pair) -> None:
    more = ("--events-topic", "kv@other", "--prompt-tokens", "100")
    found = examine("--engine", pair.first.url, *more)
    assert alarms(found) == {"events_wrong_topic", "prompt_shorter_than_block"}


def test_engines_at_another_store(pair: Pair, tmp_path: Path) -> None:
    with running_store(tmp_path, 0.05) as other:
        found = examine("--engine", pair.first.url, "--master", other)
    assert alarms(found) & {"pool_not_written", "store_without_memory"}


def test_a_killed_server(pair: Pair) -> None:
    pair.second.kill()
    found = examine("--engine", pair.first.url, pair.second.url)
    assert alarms(found) == {"engine_unreachable"}

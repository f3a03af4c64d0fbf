# SPDX-License-Identifier: Apache-2.0
"""vLLM's own Mooncake connectors, unmodified, on our ``mooncake.store`` and ``mooncake.engine``."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import wait_for
from tests.vllm.engine import BLOCK_TOKENS, Answered, Engine, a_prompt
from tests.vllm_server import (
    HOST,
    VllmServer,
    free_port,
    num_stored,
    running_store,
    store_configuration,
)

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]

STORE = {
    "kv_connector": "MooncakeStoreConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"load_async": True, "lookup_rpc_port": "1"},
}
PROMPT = a_prompt("Zanzibar")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_store(tmp_path_factory.mktemp("store")) as address:
        yield address


@pytest.fixture(scope="module")
def environment(store: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return store_configuration(tmp_path_factory.mktemp("configuration"), store)


@pytest.fixture(scope="module")
def computed(
    store: str, environment: dict[str, str], model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Answered:
    """The answer of an engine that computed the prompt and was killed when its blocks were stored."""
    engine = Engine(model, tmp_path_factory.mktemp("first") / "engine.log", STORE, environment)
    try:
        answered = engine.wait_until_ready().complete(PROMPT)
        num_blocks = answered.num_prompt // BLOCK_TOKENS
        wait_for(lambda: num_stored(store) >= num_blocks, "the prompt's blocks to be stored", 120.0)
    finally:
        engine.kill()
    return answered


@pytest.fixture(scope="module")
def second(
    computed: Answered, environment: dict[str, str], model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """An engine that starts when the first is dead."""
    engine = Engine(model, tmp_path_factory.mktemp("second") / "engine.log", STORE, environment)
    try:
        yield engine.wait_until_ready()
    finally:
        engine.close()


def test_what_a_killed_engine_computed_another_loads(computed: Answered, second: Engine) -> None:
    assert computed.num_cached == 0 and "Zanzibar" in computed.text
    loaded = second.complete(PROMPT)
    assert loaded.num_cached == computed.num_prompt // BLOCK_TOKENS * BLOCK_TOKENS > 0
    assert loaded.token_ids == computed.token_ids


def test_an_engine_that_forgot_loads_again(computed: Answered, second: Engine) -> None:
    second.forget()
    again = second.complete(PROMPT)
    assert again.num_cached > 0 and again.token_ids == computed.token_ids


def test_another_prompt_is_computed(second: Engine) -> None:
    assert second.complete(a_prompt("Timbuktu")).num_cached == 0


def a_transfer(role: str) -> dict[str, Any]:
    return {
        "kv_connector": "MooncakeConnector",
        "kv_connector_module_path": "tests.vllm.mooncake_connector_on_cpu",
        "kv_role": role,
        "kv_connector_extra_config": {"mooncake_protocol": "tcp"},
    }


def test_prefill_writes_into_decode_with_our_engine(model: Path, tmp_path: Path) -> None:
    """Two servers on two cores; the proxy's part, both halves at the same time, is done here."""
    bootstrap = f"http://{HOST}:{(port := free_port())}"
    where = {"VLLM_MOONCAKE_BOOTSTRAP_PORT": str(port)}
    with ExitStack() as stack:
        pair = []
        for core, (name, role) in enumerate((("prefill", "kv_producer"), ("decode", "kv_consumer"))):
            pair.append(VllmServer(name, model, tmp_path, a_transfer(role), core, "float32", where))
            stack.callback(pair[-1].close)
        prefill, decode = pair
        for server in pair:
            server.wait_until_ready()
        with urllib.request.urlopen(f"{bootstrap}/query", timeout=30) as answer:
            engine_id = json.load(answer)["0"]["engine_id"]
        ask = {"transfer_id": "test-1", "do_remote_decode": True, "do_remote_prefill": False}
        take = {"transfer_id": "test-1", "do_remote_decode": False, "do_remote_prefill": True}
        take |= {"remote_bootstrap_addr": bootstrap, "remote_engine_id": engine_id}
        with ThreadPoolExecutor() as pool:
            computing = pool.submit(prefill.complete, PROMPT, 1, kv_transfer_params=ask)
            answered = decode.stream(PROMPT, 16, kv_transfer_params=take)
            assert computing.result().status == 200
        assert answered.error is None, answered.error
        assert decode.metric("vllm:external_prefix_cache_hits_total") >= answered.usage["prompt_tokens"] - 1
        alone = prefill.stream(PROMPT, 16)
        assert answered.token_ids == alone.token_ids and "Zanzibar" in alone.text

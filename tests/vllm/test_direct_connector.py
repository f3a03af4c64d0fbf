# SPDX-License-Identifier: Apache-2.0
"""Our MooncakeConnector in the real vLLM: prefill writes into decode's blocks, and what fails is computed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engine import BLOCK_TOKENS, Answered, Engine, a_prompt
from tests.vllm_server import HOST, free_port

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

PROMPT = a_prompt("Zanzibar", 20)
NUM_TOKENS = 5


def connector(role: str, **extra: Any) -> dict[str, Any]:
    return {
        "kv_connector": "MooncakeConnector",
        "kv_connector_module_path": "mooncake.connectors.vllm",
        "kv_role": role,
        "kv_connector_extra_config": extra,
    }


def under_multi(ours: dict[str, Any]) -> dict[str, Any]:
    """Under MultiConnector, which is strict about statistics; with one connector, so that no other loads."""
    outer: dict[str, Any] = {"kv_connector": "MultiConnector", "kv_role": ours["kv_role"]}
    outer["kv_load_failure_policy"] = "recompute"
    return {**outer, "kv_connector_extra_config": {"connectors": [ours]}}


def producer(model: Path, log: Path, address: str, dtype: str = "float32") -> Engine:
    return Engine(model, log, connector("kv_producer", listen_addr=address), dtype=dtype)


def prefill(engine: Engine, prompt: str, name: str) -> Answered:
    params = {"kv_transfer_params": {"do_remote_decode": True, "transfer_id": name}}
    return engine.complete(prompt, 1, extra_args=params)


def decode(engine: Engine, prompt: str, name: str, address: str = "") -> Answered:
    params: dict[str, Any] = {"do_remote_prefill": True, "transfer_id": name}
    if address:
        params["remote_host"], params["remote_port"] = address.split(":")
    return engine.complete(prompt, NUM_TOKENS, extra_args={"kv_transfer_params": params})


def test_decode_takes_what_prefill_computed_and_computes_what_it_cannot_have(
    model: Path, tmp_path: Path
) -> None:
    """One pair of engines for all of it: they take long to start."""
    address, other_address = f"{HOST}:{free_port()}", f"{HOST}:{free_port()}"
    first = producer(model, tmp_path / "prefill.log", address)
    ours = connector(
        "kv_consumer", prefill_addr=f"{address},{other_address}", listener_offset=0, timeout_s=60
    )
    consumer = Engine(model, tmp_path / "decode.log", under_multi(ours), core=1)
    other_kind = producer(model, tmp_path / "bfloat16.log", other_address, "bfloat16")
    engines = [first, consumer, other_kind]
    try:
        for engine in engines:
            engine.wait_until_ready()
        computed = prefill(first, PROMPT, "one")
        assert computed.num_cached == 0
        taken = decode(consumer, PROMPT, "one")
        assert taken.num_cached >= taken.num_prompt - 1, "decode computed the prompt"
        num_blocks = -(-taken.num_prompt // BLOCK_TOKENS)
        consumer.forget()
        alone = consumer.complete(PROMPT, NUM_TOKENS)
        assert alone.num_cached == 0
        assert taken.token_ids == alone.token_ids

        # Decode requests first, and has the first blocks already.
        longer = PROMPT + " Zanzibar, and the word that comes after it is the same one, once more:"
        with ThreadPoolExecutor() as pool:
            decoded = pool.submit(decode, consumer, longer, "two")
            prefill(first, longer, "two")
            answered = decoded.result()
        assert answered.num_cached >= answered.num_prompt - 1
        consumer.forget()
        assert answered.token_ids == consumer.complete(longer, NUM_TOKENS).token_ids

        # Another prompt under that name is not accepted as ours.
        other = a_prompt("Timbuktu", 20)
        prefill(first, PROMPT, "three")
        refused = decode(consumer, other, "three")
        assert refused.num_cached == 0
        assert "the prompts differ" in (tmp_path / "decode.log").read_text()

        consumer.forget()
        prefill(other_kind, PROMPT, "five")
        differs = decode(consumer, PROMPT, "five", other_address)
        assert differs.num_cached == 0 and differs.token_ids == alone.token_ids
        assert "the blocks have layout" in (tmp_path / "decode.log").read_text()

        first.complete("One step more, which takes along what was counted.", 1)
        counted = first.metric("vllm:mooncake_direct_pushed_blocks")
        assert counted >= num_blocks and first.metric("vllm:mooncake_direct_pushed_bytes") > 0
        assert first.metric("vllm:mooncake_direct_refused_blocks") >= num_blocks
        assert consumer.metric("vllm:mooncake_direct_received_blocks") == counted

        first.kill()
        consumer.forget()
        assert decode(consumer, PROMPT, "four").token_ids == alone.token_ids
        assert consumer.metric("vllm:mooncake_direct_recomputed_blocks") >= num_blocks
    finally:
        for engine in engines:
            engine.close()

# SPDX-License-Identifier: Apache-2.0
"""Engines of one rank and of three read each other's blocks, although their ranks hold different heads.

Run by name only, as three ranks on two cores are slow: ``scripts/test-vllm tests/vllm/tensor_parallel.py``.
There are three because SmolLM2-135M has three KV heads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cluster import wait_for
from tests.vllm.engine import BLOCK_TOKENS, Answered, Engine, a_prompt
from tests.vllm_server import num_stored, running_store

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1800)]

NUM_HEADS = 3
NUM_TOKENS = 6


def wait_until_stored(store: str, count: int) -> None:
    wait_for(lambda: num_stored(store) >= count, f"{count} shards of blocks to be stored", 300.0)


def complete(engine: Engine, prompt: str) -> Answered:
    return engine.complete(prompt, NUM_TOKENS, ignore_eos=True)


def test_engines_of_one_rank_and_of_three_read_each_other(model: Path, tmp_path: Path) -> None:
    with running_store(tmp_path) as store:
        connector: dict[str, Any] = {
            "kv_connector": "MooncakeStoreConnector",
            "kv_connector_module_path": "mooncake.connectors.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"mooncake_store_addr": store, "store_tp_size": NUM_HEADS},
        }
        ranks = (1, NUM_HEADS)
        engines = [
            Engine(model, tmp_path / f"{count}.log", connector, core=1, num_ranks=count) for count in ranks
        ]
        try:
            for engine in engines:
                engine.wait_until_ready()
            num_keys = 0
            for writer, reader in (engines, engines[::-1]):
                prompt = a_prompt("Zanzibar" if num_keys else "Timbuktu")
                computed = complete(writer, prompt)
                num_blocks = computed.num_prompt // BLOCK_TOKENS
                assert computed.num_cached == 0 and num_blocks > 1
                num_keys += num_blocks * NUM_HEADS
                wait_until_stored(store, num_keys)
                loaded = complete(reader, prompt)
                assert loaded.num_cached == num_blocks * BLOCK_TOKENS
                assert loaded.token_ids == computed.token_ids
        finally:
            for engine in engines:
                engine.close()

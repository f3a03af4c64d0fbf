# SPDX-License-Identifier: Apache-2.0
"""Engines of one rank and of two use each other's encoder outputs.

Run by name only, as two ranks are slow on two cores:
``scripts/test-vllm tests/vllm/encoder_tensor_parallel.py``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster import wait_for
from tests.vllm.vision_engine import VisionEngine
from tests.vllm.vision_model import make_model
from tests.vllm_server import num_stored, running_store

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1800)]


def wait_until_stored(store: str, count: int) -> None:
    wait_for(lambda: num_stored(store) == count, "one object per image", 300.0)


def test_engines_of_one_rank_and_of_two_use_each_others_outputs(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    with running_store(tmp_path) as store:
        connector = {
            "ec_connector": "MooncakeECConnector",
            "ec_connector_module_path": "mooncake.connectors.vllm",
            "ec_role": "ec_both",
            "ec_connector_extra_config": {"mooncake_store_addr": store},
        }
        engines = [VisionEngine(model, tmp_path / f"{n}.log", connector, core=1, num_ranks=n) for n in (1, 2)]
        try:
            for engine in engines:
                engine.wait_until_ready()
            for image, (writer, reader) in enumerate((engines, engines[::-1]), 1):
                computed = writer.ask(image)
                wait_until_stored(store, image)
                loaded = reader.ask(image)
                assert reader.metric("vllm:mooncake_encoder_hits") == 1
                assert loaded.token_ids == computed.token_ids
                for ours, theirs in zip(loaded.logprobs, computed.logprobs, strict=True):
                    assert ours == pytest.approx(theirs, abs=1e-3), "ranks add up in another order"
        finally:
            for engine in engines:
                engine.close()

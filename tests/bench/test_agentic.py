# SPDX-License-Identifier: Apache-2.0
"""The correction of costs by a small load."""

import argparse

import pytest

from bench.agentic import LEAST_BUSY, busier, busy_factor, predicted, probe_of
from mooncake.conductor.prediction import DecodeModel, PrefillModel
from mooncake.sim.serving.node_costs import NodeCosts


@pytest.mark.parametrize("factor", [0.7, 1.3, 2.5])
def test_a_small_load_finds_how_much_longer_steps_take(factor: float) -> None:
    arguments = argparse.Namespace(
        pool_gb=3.0, num_servers=2, block_tokens=32, divide=30, seed=1, trace=None, sessions=24
    )
    costs = NodeCosts(
        title="a small model on two cores",
        source="a test",
        kv_bytes_per_token=23_040,
        num_layers=30,
        prefill=PrefillModel(0.04, 7e-4, 2e-7),
        decode=DecodeModel(0.019, 0.004, 1e-6),
        device_tokens=5_130,
        cache_tokens=0,
        nic_bytes_per_s=0.7e9,
        nic_latency_s=0.012,
        ssd_bytes_per_s=1e12,
        device_load_bytes_per_s=1e12,
    )
    probe = probe_of(arguments)
    latency_s = float(predicted(probe, "b", busier(costs, factor), arguments).latency_s.mean())
    assert busy_factor(probe, "b", costs, latency_s, arguments) == pytest.approx(factor, rel=0.02)
    assert busy_factor(probe, "b", costs, latency_s / 10, arguments) == pytest.approx(LEAST_BUSY, rel=0.01)

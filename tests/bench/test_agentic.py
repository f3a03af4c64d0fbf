# SPDX-License-Identifier: Apache-2.0
"""The correction of costs by a small load, and the costs of loads from the pool."""

import argparse

import pytest

from bench.agentic import LEAST_BUSY, busier, busy_factor, predicted, probe_of, with_loads
from mooncake.conductor.prediction import DecodeModel, PrefillModel
from mooncake.sim.serving.node_costs import NodeCosts

COSTS = NodeCosts(
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


@pytest.mark.parametrize("factor", [0.7, 1.3, 2.5])
def test_a_small_load_finds_how_much_longer_steps_take(factor: float) -> None:
    arguments = argparse.Namespace(
        pool_gb=3.0, num_servers=2, block_tokens=32, divide=30, seed=1, trace=None, sessions=24
    )
    probe = probe_of(arguments)
    latency_s = float(predicted(probe, "b", busier(COSTS, factor), arguments).latency_s.mean())
    assert busy_factor([probe], "b", COSTS, latency_s, arguments) == pytest.approx(factor, rel=0.02)
    assert busy_factor([probe], "b", COSTS, latency_s / 10, arguments) == pytest.approx(LEAST_BUSY, rel=0.01)


def test_loads_take_as_long_as_the_connectors_counted_and_delay_steps_on_a_cpu() -> None:
    counted = {"mooncake_connector_loaded_blocks_total": 50.0, "mooncake_connector_load_seconds_sum": 0.25}
    cpu, device = (with_loads(COSTS, counted, 1 << 20, is_cpu) for is_cpu in (True, False))
    assert cpu.nic_bytes_per_s == device.nic_bytes_per_s == pytest.approx(200 * (1 << 20))
    assert cpu.move_s_per_byte == pytest.approx(1 / cpu.nic_bytes_per_s)
    assert device.move_s_per_byte == 0.0
    assert with_loads(COSTS, {}, 1 << 20, True) == COSTS

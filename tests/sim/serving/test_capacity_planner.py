# SPDX-License-Identifier: Apache-2.0
"""The search finds the smallest cluster of a world whose limits are known."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import msgspec
import pytest

from mooncake.errors import InvalidArgument
from mooncake.sim.serving.capacity_planner import CapacityPlanner, Objectives, Prices
from mooncake.sim.serving.cluster import ClusterSpec
from mooncake.sim.serving.node_costs import load_costs
from mooncake.sim.serving.results import Quantiles, Summary

HARDWARE = "llama3-70b-8xH100"
PRICES = Prices(gpu={"A100": 1.0, "H100": 2.5}, dram_tb=1.0)
OBJECTIVES = Objectives(30.0, 0.1, 0.9)
BASE = ClusterSpec(costs=load_costs(HARDWARE), num_prefill=1, num_decode=1)
FULL_TOKENS = BASE.costs.cache_tokens

Limits = Callable[[ClusterSpec], tuple[float, float]]


def summary(share: float) -> Summary:
    zero = Quantiles(0.0, 0.0, 0.0, 0.0)
    return Summary(
        num_requests=1000,
        num_done=1000,
        num_rejected=0,
        num_rejected_after_prefill=0,
        num_failed=0,
        num_good=round(1000 * share),
        goodput_per_s=share,
        good_tokens_per_s=0.0,
        slo_ttft_s=30.0,
        slo_tbt_s=0.1,
        span_s=1000.0,
        ttft_s=zero,
        tbt_s=zero,
        e2e_s=zero,
        hit_rate=0.0,
        fetched_share=0.0,
        prefill_gpu_s=0.0,
    )


def planner(shares: Limits) -> tuple[CapacityPlanner, list[ClusterSpec]]:
    tried: list[ClusterSpec] = []

    def simulate(spec: ClusterSpec, load: float) -> tuple[Summary, float, float]:
        tried.append(spec)
        ttft, tbt = shares(spec)
        return summary(min(ttft, tbt) / load), ttft, tbt

    return CapacityPlanner(BASE, HARDWARE, OBJECTIVES, PRICES, simulate), tried


def needs(num_prefill: int, num_decode: int, one_pool: int, tokens: int = 0, nic: float = 0.0) -> Limits:
    """Requests are good from so many nodes on, and with so much memory and network."""

    def shares(spec: ClusterSpec) -> tuple[float, float]:
        if spec.mode != "disaggregated":
            share = min(1.0, spec.num_prefill / one_pool * 0.9) if spec.mode == "chunked" else 0.0
            return share, share
        costs = spec.node_costs
        is_enough = costs.cache_tokens >= tokens and costs.nic_bytes_per_s >= nic
        return (
            min(1.0, 0.9 * spec.num_prefill / num_prefill) if is_enough else 0.5,
            min(1.0, 0.9 * spec.num_decode / num_decode),
        )

    return shares


def test_smallest_split_memory_and_network_are_found() -> None:
    nic = BASE.costs.nic_bytes_per_s
    one, tried = planner(needs(7, 3, 12, tokens=FULL_TOKENS // 5, nic=nic / 3))
    plan = one.plan()
    best = plan.best
    assert best is not None and plan.one_pool is not None
    assert (best.num_prefill, best.num_decode) == (7, 3)
    assert best.cache_tokens == FULL_TOKENS // 4, "the last half that is still enough"
    assert best.nic_bytes_per_s == nic / 2
    assert (plan.one_pool.mode, plan.one_pool.num_nodes) == ("chunked", 12)
    assert plan.num_simulated == len(tried)
    assert len(set(map(repr, tried))) + 2 == len(tried), "nothing is simulated twice but at other loads"
    kv = BASE.costs.kv_bytes_per_token
    assert best.dollars_per_hour == pytest.approx(10 * 8 * 2.5 + 7 * FULL_TOKENS // 4 * kv / 1e12)
    assert best.good_per_dollar == pytest.approx(0.9 * 3600 / best.dollars_per_hour)


def test_pools_that_are_short_only_together_grow() -> None:
    def shares(spec: ClusterSpec) -> tuple[float, float]:
        if spec.mode != "disaggregated":
            return 0.0, 0.0
        # With few decode nodes the prefill pool must be larger than alone.
        share = min(1.0, spec.num_prefill / (4 if spec.num_decode > 4 else 6))
        return share, min(1.0, spec.num_decode / 2)

    plan = planner(shares)[0].plan()
    assert plan.best is not None
    assert (plan.best.num_prefill, plan.best.num_decode) == (6, 2)
    assert plan.one_pool is None


def test_sensitivity_says_what_a_step_changes() -> None:
    plan = planner(needs(7, 3, 12))[0].plan()
    by_note = {one.note: one for one in plan.sensitivity}
    assert not by_note["one prefill node less"].meets
    assert not by_note["one decode node less"].meets
    assert by_note["one prefill node more"].meets
    assert not by_note["25 % more load"].meets
    assert by_note["one prefill node less"].num_nodes == 9


def test_unreachable_objectives_have_no_plan() -> None:
    """With a node for each of the 1000 requests, more nodes are not tried."""
    search, tried = planner(lambda spec: (0.5, 0.5))
    plan = search.plan()
    assert plan.best is None and plan.one_pool is None and not plan.sensitivity
    assert max(spec.num_prefill for spec in tried) == 1024


def test_the_search_ends_at_the_most_nodes() -> None:
    tried: list[int] = []

    def simulate(spec: ClusterSpec, load: float) -> tuple[Summary, float, float]:
        tried.append(spec.num_prefill + spec.num_decode)
        return summary(0.5), 0.5, 0.5

    one = CapacityPlanner(BASE, HARDWARE, OBJECTIVES, PRICES, simulate, most_nodes=16)
    assert one.smallest() is None and max(tried) == 16


def test_ssd_that_is_not_needed_is_left_out() -> None:
    base = dataclasses.replace(BASE, ssd_tokens=10_000_000)
    one = CapacityPlanner(base, HARDWARE, OBJECTIVES, PRICES, lambda spec, load: (summary(1.0), 1.0, 1.0))
    best = one.plan().best
    assert best is not None and best.ssd_tokens == 0


def test_memory_is_not_halved_below_a_block() -> None:
    costs = msgspec.structs.replace(BASE.costs, cache_tokens=3 * BASE.block_tokens)
    tried: list[int] = []

    def simulate(spec: ClusterSpec, load: float) -> tuple[Summary, float, float]:
        tried.append(spec.node_costs.cache_tokens)
        return summary(1.0), 1.0, 1.0

    base = dataclasses.replace(BASE, costs=costs)
    plan = CapacityPlanner(base, HARDWARE, OBJECTIVES, PRICES, simulate).plan()
    assert plan.best is not None and plan.best.cache_tokens == min(tried) == 3 * BASE.block_tokens // 2
    notes = {one.note for one in plan.sensitivity}
    assert "twice the memory" in notes and "half the memory" not in notes


def test_colocated_nodes_pay_for_no_memory_but_the_pool_s() -> None:
    prices = Prices(gpu={"H100": 2.5}, dram_tb=100.0, ssd_tb=10.0)
    node = ClusterSpec(costs=BASE.costs, num_prefill=4, num_decode=0, mode="chunked_prefix")
    assert prices.cluster(node, HARDWARE, HARDWARE) == 4 * 8 * 2.5
    pooled = dataclasses.replace(node, store_tokens=1_000_000)
    pool_tb = 4 * 1_000_000 * BASE.costs.kv_bytes_per_token / 1e12
    assert prices.cluster(pooled, HARDWARE, HARDWARE) == pytest.approx(4 * 8 * 2.5 + 100 * pool_tb)


@pytest.mark.parametrize("price", [-50.0, float("nan"), float("inf")])
def test_prices_are_amounts_of_money(price: float) -> None:
    with pytest.raises(InvalidArgument, match="dram_tb is"):
        Prices(gpu={"H100": 2.5}, dram_tb=price)
    with pytest.raises(InvalidArgument, match=r"gpu\.H100 is"):
        Prices(gpu={"H100": price}).of_gpu(HARDWARE)


@pytest.mark.parametrize(
    ("hardware", "objectives", "named"),
    [
        ("mine-8xB200", OBJECTIVES, "priced GPU: A100, H100"),
        (HARDWARE, Objectives(30.0, 0.1, 0.0), "attainment is 0.0"),
        (HARDWARE, Objectives(30.0, 0.1, 1.5), "attainment is 1.5"),
    ],
)
def test_bad_input_is_named(hardware: str, objectives: Objectives, named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        CapacityPlanner(BASE, hardware, objectives, PRICES, lambda spec, load: (summary(1.0), 1.0, 1.0))
    with pytest.raises(InvalidArgument, match=r"gpu\.H100 is -1"):
        CapacityPlanner(
            BASE, HARDWARE, OBJECTIVES, Prices(gpu={"H100": -1.0}), lambda spec, load: (summary(1), 1, 1)
        )

# SPDX-License-Identifier: Apache-2.0
"""The largest load is found, and what a unit of throughput costs is arithmetic."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from mooncake.errors import InvalidArgument
from mooncake.sim.serving.capacity_planner import Objectives, Prices
from mooncake.sim.serving.cluster import ClusterSpec
from mooncake.sim.serving.cost_comparison import (
    MOST_LOAD,
    PRECISION,
    ClusterOffer,
    CostComparison,
    dollars_per_1000_good,
    dollars_per_unit,
)
from mooncake.sim.serving.node_costs import load_costs
from mooncake.sim.serving.results import Quantiles, Summary

H100, H200, TWO_H100 = (f"llama3-70b-fp8-{name}" for name in ("1xH100", "1xH200", "2xH100"))
PRICES = Prices(gpu={"H100": 2.54, "H200": 3.70}, spot={"H100": 1.43}, store_node=0.5, dram_tb=1.0)
OBJECTIVES = Objectives(30.0, 0.1, 0.9)
ZERO = Quantiles(0.0, 0.0, 0.0, 0.0)
COLOCATED = ClusterSpec(costs=load_costs(TWO_H100), num_prefill=1, num_decode=0, mode="chunked_prefix")
UNLIKE = ClusterSpec(costs=load_costs(H100), decode_costs=load_costs(H200), num_prefill=1, num_decode=1)
FREE = Prices(gpu=PRICES.gpu, spot=PRICES.spot)


def simulate(spec: ClusterSpec, load: float) -> tuple[Summary, float, float]:
    """One pool carries 0.4 of the load, unlike nodes 2.5 times that, a tenth less with interruptions."""
    limit = 0.4 if spec.mode != "disaggregated" else 1.0
    num_good = 1000 if load <= limit else 500
    if spec.spot == "prefill":
        num_good = 930 if load <= 0.9 * limit else 500
    found = Summary(
        num_requests=1000,
        num_done=1000,
        num_rejected=0,
        num_rejected_after_prefill=0,
        num_failed=0,
        num_good=num_good,
        goodput_per_s=num_good / 100 * load,
        good_tokens_per_s=0.0,
        slo_ttft_s=30.0,
        slo_tbt_s=0.1,
        span_s=100.0,
        ttft_s=ZERO,
        tbt_s=ZERO,
        e2e_s=ZERO,
        hit_rate=0.5,
        fetched_share=0.0,
        prefill_gpu_s=0.0,
        num_interruptions=2 if spec.spot == "prefill" else 0,
    )
    return found, 1.0, 1.0


def offers() -> list[ClusterOffer]:
    spot = dataclasses.replace(UNLIKE, spot="prefill")
    return [
        ClusterOffer("two", COLOCATED, TWO_H100, TWO_H100),
        ClusterOffer("unlike", UNLIKE, H100, H200),
        ClusterOffer("spot", spot, H100, H200),
    ]


def test_the_rows_of_the_table_are_arithmetic() -> None:
    two, unlike, spot = CostComparison(offers(), "two", OBJECTIVES, FREE, simulate).compare()
    assert [round(one.dollars_per_hour, 2) for one in (two, unlike, spot)] == [5.08, 6.24, 5.13]
    assert two.load == pytest.approx(0.4, rel=PRECISION) and two.load <= 0.4
    assert unlike.load == pytest.approx(1.0, rel=PRECISION)
    assert two.relative_throughput == 1 and two.dollars_per_unit == two.dollars_per_hour
    assert unlike.relative_throughput == pytest.approx(unlike.good_per_s / two.good_per_s)
    assert unlike.dollars_per_unit == pytest.approx(6.24 / unlike.relative_throughput)
    assert unlike.dollars_per_1000_good == pytest.approx(6.24 / 3600 / unlike.good_per_s * 1000)
    assert (spot.num_interruptions, spot.num_good_lost, unlike.num_good_lost) == (2, 70, 0)


def test_the_baseline_is_the_named_one() -> None:
    two, unlike, _ = CostComparison(offers(), "unlike", OBJECTIVES, FREE, simulate).compare()
    assert unlike.relative_throughput == 1 and unlike.dollars_per_unit == pytest.approx(6.24)
    assert two.relative_throughput < 0.5


def test_units_without_throughput_have_no_price() -> None:
    assert dollars_per_unit(5.0, 2.5) == 2.0 and dollars_per_unit(5.0, 0.0) is None
    assert dollars_per_1000_good(3.6, 1.0) == pytest.approx(1.0)
    assert dollars_per_1000_good(3.6, 0.0) is None


def test_a_cluster_that_carries_nothing_has_a_price_only() -> None:
    def short(spec: ClusterSpec, load: float) -> tuple[Summary, float, float]:
        found, ttft, tbt = simulate(spec, load)
        num_good = 0 if spec.mode == "disaggregated" else found.num_good
        return msgspec.structs.replace(found, num_good=num_good), ttft, tbt

    two, unlike, _ = CostComparison(offers(), "two", OBJECTIVES, FREE, short).compare()
    assert two.load and not unlike.load
    assert unlike.dollars_per_unit is None and unlike.dollars_per_hour == pytest.approx(6.24)
    with pytest.raises(InvalidArgument, match="--baseline is 'unlike'"):
        CostComparison(offers(), "unlike", OBJECTIVES, FREE, short).compare()


def test_a_store_node_has_a_price_and_memory() -> None:
    costs = load_costs(H100)
    with_store = ClusterSpec(costs=costs, num_prefill=1, num_decode=1, num_store=2, store_tokens=1_000_000)
    tb = costs.kv_bytes_per_token / 1e12
    memory = (costs.cache_tokens + 2 * 1_000_000) * tb
    assert PRICES.cluster(with_store, H100, H100) == pytest.approx(2 * 2.54 + 2 * 0.5 + memory)


def test_a_price_is_that_of_the_card_and_not_of_the_end_of_its_name() -> None:
    prices = Prices(gpu={"B200": 4.0, "H100": 2.0})
    assert [prices.of_gpu(one) for one in ("m-4xB200", "m-8xh100", "B200", "m-b200")] == [4.0, 2.0, 4.0, 4.0]
    for other in ("m-4xGB200", "GH100"):
        with pytest.raises(InvalidArgument, match="priced GPU"):
            prices.of_gpu(other)


@pytest.mark.parametrize(
    ("names", "baseline", "named"),
    [(["a", "a"], "a", "--cluster is 'a'"), (["a", "b"], "c", "--baseline is 'c'.*a, b")],
)
def test_bad_names_are_refused(names: list[str], baseline: str, named: str) -> None:
    those = [ClusterOffer(name, UNLIKE, H100, H200) for name in names]
    with pytest.raises(InvalidArgument, match=named):
        CostComparison(those, baseline, OBJECTIVES, FREE, simulate)


def test_hardware_without_a_spot_price_is_refused() -> None:
    only_gpu = Prices(gpu=PRICES.gpu, spot={"A100": 0.79})
    with pytest.raises(InvalidArgument, match=r"--gpu-prices is 'llama3-70b-fp8-1xH100'.*spot price: A100"):
        CostComparison(offers(), "two", OBJECTIVES, only_gpu, simulate)


def test_the_end_of_the_search_is_no_result() -> None:
    """A cluster that is idle at the largest load that is tried carries more than that."""

    def idle(spec: ClusterSpec, load: float) -> tuple[Summary, float, float]:
        found, ttft, tbt = simulate(spec, load if spec.mode != "disaggregated" else 0.0)
        return msgspec.structs.replace(found, goodput_per_s=load), ttft, tbt

    two, unlike, _ = CostComparison(offers(), "two", OBJECTIVES, FREE, idle).compare()
    assert unlike.carries_more and unlike.load >= MOST_LOAD
    assert not two.carries_more and two.load < 1

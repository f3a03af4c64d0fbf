# SPDX-License-Identifier: Apache-2.0
"""Unlike nodes, a pool of blocks outside the prefill nodes, and spot nodes that are interrupted."""

from __future__ import annotations

import dataclasses
from random import Random

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake.conductor.prediction import DecodeModel
from mooncake.errors import InvalidArgument
from mooncake.sim.serving import ClusterSpec, simulate
from mooncake.sim.serving.node_costs import load_costs
from mooncake.sim.serving.results import DONE, FAILED, RunResults
from mooncake.sim.traces.trace import TraceRow

COSTS, FASTER = load_costs("llama3-70b-fp8-1xH100"), load_costs("llama3-70b-fp8-1xH200")
ROOMY = msgspec.structs.replace(COSTS, device_tokens=400_000)
BLOCK = 256


def spec(**changes: object) -> ClusterSpec:
    shared = {"costs": ROOMY, "num_prefill": 1, "num_decode": 1, "block_tokens": BLOCK}
    return ClusterSpec(**{**shared, **changes})  # type: ignore[arg-type]


def prompts(num_requests: int, every_s: float, num_blocks: int = 20, num_output: int = 50) -> list[TraceRow]:
    """Independent prompts at equal distances."""
    return [
        TraceRow(
            every_s * number,
            num_blocks * BLOCK,
            num_output,
            tuple(range(number * num_blocks, (number + 1) * num_blocks)),
        )
        for number in range(num_requests)
    ]


def chats(seed: int, num_requests: int, rate_per_s: float) -> list[TraceRow]:
    random, now, next_key = Random(seed), 0.0, 1
    known: list[list[int]] = [[0]]
    rows: list[TraceRow] = []
    for _ in range(num_requests):
        now += random.expovariate(rate_per_s)
        if random.random() < 0.3:
            known.append([0])
        keys = random.choice(known)
        for _ in range(random.randint(1, 8)):
            keys.append(next_key)
            next_key += 1
        rows.append(TraceRow(now, len(keys) * BLOCK, random.randint(1, 200), tuple(keys)))
    return rows


def is_same(a: RunResults, b: RunResults) -> bool:
    return a.to_json() == b.to_json()


# --- unlike nodes


def test_a_faster_decode_node_changes_times_between_tokens_only() -> None:
    rows = prompts(40, 1.5)
    alike, unlike = simulate(rows, spec(), "load"), simulate(rows, spec(decode_costs=FASTER), "load")
    np.testing.assert_array_equal(alike.ttft_s, unlike.ttft_s)
    assert (unlike.tbt_mean_s < 0.8 * alike.tbt_mean_s).all()
    assert unlike.tbt_mean_s[0] == pytest.approx(FASTER.decode.seconds(1, 20 * BLOCK + 25), rel=0.05)


def test_a_faster_prefill_node_changes_times_to_the_first_token_only() -> None:
    rows = prompts(40, 2.0)
    quick = msgspec.structs.replace(ROOMY, prefill=load_costs("llama3-70b-fp8-2xH100").prefill)
    alike = simulate(rows, spec(), "load")
    unlike = simulate(rows, spec(costs=quick, decode_costs=ROOMY), "load")
    assert (unlike.ttft_s < 0.7 * alike.ttft_s).all()
    np.testing.assert_allclose(alike.tbt_mean_s, unlike.tbt_mean_s, rtol=1e-3)


@pytest.mark.parametrize("detail", ["flow", "step"])
def test_decode_makes_the_first_token_after_the_handover(detail: str) -> None:
    """As our workers do; a time between tokens contains nothing of the handover."""
    costs = msgspec.structs.replace(
        ROOMY,
        first_token_s=0.5,
        decode_makes_first_token=True,
        nic_bytes_per_s=1e15,
        nic_latency_s=0.0,
        decode=DecodeModel(0.1, 0.0, 0.0),
    )
    rows = [*prompts(3, every_s=20.0, num_output=4), TraceRow(100.0, BLOCK, 1, (1000,))]
    outcome = simulate(rows, spec(costs=costs, detail=detail))
    assert outcome.is_done.all()
    prefill_s = [costs.prefill_s(0, row.num_input) for row in rows]
    assert outcome.ttft_s == pytest.approx([one + 0.5 + 0.1 for one in prefill_s], rel=1e-3)
    assert outcome.tbt_mean_s == pytest.approx([0.1, 0.1, 0.1, 0.0], rel=1e-3)
    assert outcome.tbt_s == pytest.approx([0.1, 0.1, 0.1, 0.0], rel=1e-3)


def test_what_delays_the_first_token_delays_all_and_no_interval() -> None:
    rows = [*prompts(3, every_s=20.0, num_output=4), TraceRow(100.0, BLOCK, 1, (1000,))]
    late = msgspec.structs.replace(ROOMY, first_token_s=0.5)
    for mode in ("disaggregated", "chunked", "vllm"):
        plain, delayed = (simulate(rows, spec(costs=costs, mode=mode)) for costs in (ROOMY, late))
        assert delayed.ttft_s == pytest.approx(plain.ttft_s + 0.5), mode
        assert delayed.e2e_s == pytest.approx(plain.e2e_s + 0.5), mode
        assert (delayed.e2e_s >= delayed.ttft_s).all(), mode
        assert delayed.tbt_s == pytest.approx(plain.tbt_s), mode
        assert delayed.tbt_mean_s == pytest.approx(plain.tbt_mean_s), mode


def test_each_node_has_its_own_memory() -> None:
    long = prompts(1, 1.0, num_blocks=100)  # 25,600 tokens
    assert simulate(long, spec(costs=COSTS), "load").status.tolist() == [FAILED]
    assert simulate(long, spec(decode_costs=COSTS), "load").status.tolist() == [FAILED]
    assert simulate(long, spec(decode_costs=FASTER), "load").status.tolist() == [DONE]


# --- the pool


def revisited() -> list[TraceRow]:
    """A hundred prompts, each twice, with more between than a prefill node keeps."""
    once = prompts(100, 2.0)
    return [*once, *(row._replace(timestamp_s=row.timestamp_s + 200) for row in once)]


def test_a_pool_keeps_what_prefill_nodes_have_not_room_for() -> None:
    small = spec(cache_tokens=10 * 20 * BLOCK)
    without = simulate(revisited(), small, "overlap")
    nodes = dataclasses.replace(small, num_store=1, store_tokens=150 * 20 * BLOCK)
    on_decode = dataclasses.replace(small, store_tokens=150 * 20 * BLOCK)
    for cluster in (nodes, on_decode):
        outcome = simulate(revisited(), cluster, "overlap")
        assert (outcome.status == DONE).all()
        assert (without.cached_tokens == 0).all() and (outcome.cached_tokens[:100] == 0).all()
        assert (outcome.cached_tokens[100:] == 20 * BLOCK - 1).all()
        assert (outcome.fetched_tokens[100:] > 0).all()
        assert (outcome.ttft_s[100:] < 0.6 * without.ttft_s[100:]).all()


def test_the_pool_has_ssd_behind_its_memory() -> None:
    small = spec(cache_tokens=10 * 20 * BLOCK, num_store=1, store_tokens=30 * 20 * BLOCK)
    memory = simulate(revisited(), small, "overlap")
    with_ssd = simulate(revisited(), dataclasses.replace(small, store_ssd_tokens=200 * 20 * BLOCK), "overlap")
    assert memory.summary().hit_rate == 0
    assert (with_ssd.cached_tokens[100:] > 0).all()


def test_any_node_loads_what_another_wrote() -> None:
    rows = prompts(4, 5.0)
    again = [row._replace(timestamp_s=row.timestamp_s + 30) for row in rows]
    cluster = spec(num_prefill=3, num_store=1, store_tokens=100 * 20 * BLOCK)
    outcome = simulate([*rows, *again], cluster, "overlap")
    assert (outcome.cached_tokens[4:] > 0).all()


# --- interruptions

SPOT = {"spot": "prefill", "interruptions_per_hour": 60.0, "restart_s": 20.0}


def test_interruptions_are_drawn_from_the_seed() -> None:
    rows = chats(1, 300, 2.0)
    first, same, other = (simulate(rows, spec(**SPOT), seed=seed) for seed in (1, 1, 2))
    assert is_same(first, same) and not is_same(first, other)
    assert first.summary().num_interruptions > 0
    calm = simulate(rows, spec(), seed=1)
    assert is_same(calm, simulate(rows, spec(**{**SPOT, "interruptions_per_hour": 0.0}), seed=1))


@settings(max_examples=12, deadline=None)
@given(
    st.integers(0, 1000),
    st.integers(1, 3),
    st.sampled_from(["overlap", "cache_aware", "kvcache_centric", "random"]),
    st.booleans(),
    st.floats(20, 400),
)
def test_no_request_is_lost(seed: int, num_prefill: int, policy: str, has_pool: bool, rate: float) -> None:
    rows = chats(seed, 80, 3.0)
    pool = {"num_store": 1, "store_tokens": 400 * BLOCK} if has_pool else {}
    cluster = spec(
        num_prefill=num_prefill,
        cache_tokens=200 * BLOCK,
        **{**SPOT, "interruptions_per_hour": rate, "restart_s": 5.0},
        **pool,
    )
    outcome = simulate(rows, cluster, policy, seed=seed)
    assert len(outcome) == 80 and (outcome.status == DONE).all(), seed
    assert np.isfinite(outcome.e2e_s).all() and (outcome.e2e_s >= outcome.ttft_s).all()
    assert outcome.time_line.num_queued[-1] == 0 and outcome.time_line.num_running[-1] == 0
    assert outcome.time_line.queue_s[-1] == pytest.approx(0, abs=1e-6)


def test_what_was_computed_in_vain_is_counted() -> None:
    rows = prompts(200, 0.7)
    calm, spot = simulate(rows, spec()), simulate(rows, spec(**SPOT))
    summary = spot.summary()
    assert summary.num_interruptions >= summary.num_retries > 0
    assert spot.prefill_gpu_s.sum() > calm.prefill_gpu_s.sum() + 0.01
    assert summary.num_good < calm.summary().num_good
    retried = spot.num_retries > 0
    assert (spot.ttft_s[retried] >= 20).all(), "they waited for the only node to be back"


def test_blocks_in_the_pool_outlive_their_node() -> None:
    rows = prompts(200, 2.0, num_blocks=40)
    rows += [row._replace(timestamp_s=row.timestamp_s + 420) for row in rows]
    alone = simulate(rows, spec(**SPOT), seed=1)
    pooled = simulate(rows, spec(**SPOT, store_tokens=300 * 40 * BLOCK), seed=1)
    assert alone.summary().num_interruptions == pooled.summary().num_interruptions > 3
    assert alone.cached_tokens[200:].sum() < 0.5 * pooled.cached_tokens[200:].sum()
    assert (pooled.cached_tokens[200:] > 0).mean() > 0.97


# --- what is refused


@pytest.mark.parametrize("detail", ["flow", "step"])
def test_hardware_needs_the_memory_of_its_stage_alone(detail: str) -> None:
    only_prefill = msgspec.structs.replace(COSTS, device_tokens=1 if detail == "step" else 1 << 20)
    only_decode = msgspec.structs.replace(COSTS, cache_tokens=0)
    found = spec(detail=detail, costs=only_prefill, decode_costs=only_decode)
    assert found.decode_node_costs.cache_tokens == 0


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"decode_costs": load_costs("llama3-70b-8xH100")}, "kv_bytes_per_token of .*163840 as of"),
        ({"mode": "vllm", "decode_costs": FASTER}, "decode_costs is .*1xH200.*colocated"),
        ({"mode": "chunked", "spot": "prefill"}, "spot is 'prefill'.*mode is chunked"),
        ({"mode": "prefix", "num_store": 1}, "num_store is 1"),
        ({"store_ssd_tokens": 5}, "store_ssd_tokens is 5.*0 without"),
        ({"detail": "step", "spot": "prefill"}, "detail is 'step'.*spot"),
        ({"detail": "step", "num_store": 1}, "detail is 'step'.*pool"),
        ({"mode": "chunked", "cache_tokens": 51200}, "cache_tokens is 51200.*mode is chunked"),
        ({"mode": "vllm", "ssd_tokens": 51200}, "ssd_tokens is 51200.*mode is vllm"),
        ({"mode": "chunked", "num_prefill": 2, "pipeline_nodes": 2}, "pipeline_nodes is 2.*colocated"),
        ({"num_store": 1, "store_tokens": 0}, "store_tokens is 0.*where there is a pool"),
        (
            {"costs": msgspec.structs.replace(COSTS, cache_tokens=255)},
            "cache_tokens of .* is 255.*256 tokens",
        ),
        (
            {"mode": "chunked", "costs": msgspec.structs.replace(COSTS, device_tokens=100)},
            "device_tokens of .* is 100.*256 tokens",
        ),
        (
            {"detail": "step", "decode_costs": msgspec.structs.replace(COSTS, device_tokens=100)},
            "device_tokens of .* is 100.*256 tokens",
        ),
    ],
)
def test_what_does_not_go_together_is_named(changes: dict[str, object], named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        spec(**changes)

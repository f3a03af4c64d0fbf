# SPDX-License-Identifier: Apache-2.0
"""The serving simulator as a whole: nothing is lost, runs repeat, both levels of detail agree."""

from __future__ import annotations

from random import Random

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake.conductor.prediction import PrefillModel
from mooncake.sim.serving import ClusterSpec, simulate
from mooncake.sim.serving.node_costs import load_costs
from mooncake.sim.serving.results import DONE, FAILED, REJECTED, REJECTED_AFTER_PREFILL, RunResults
from mooncake.sim.traces.trace import TraceRow

COSTS = load_costs("llama3-70b-8xA800")
BLOCK = 512


def conversations(seed: int, num_requests: int, rate_per_s: float = 2.0) -> list[TraceRow]:
    """Chats of several turns behind a common first block."""
    random = Random(seed)
    chats: list[list[int]] = []
    rows, now, next_key = [], 0.0, 1
    for _ in range(num_requests):
        now += random.expovariate(rate_per_s)
        if not chats or random.random() < 0.4:
            chats.append([0])
        keys = random.choice(chats)
        for _ in range(random.randint(1, 20)):
            keys.append(next_key)
            next_key += 1
        num_input = len(keys) * BLOCK - random.randint(0, BLOCK - 1)
        rows.append(TraceRow(now, num_input, random.randint(1, 400), tuple(keys)))
        if num_input % BLOCK:
            keys.pop()  # its last block was not full: the next turn's is another
    return rows


def spec(**changes: object) -> ClusterSpec:
    return ClusterSpec(**{"costs": COSTS, "num_prefill": 2, "num_decode": 2, **changes})  # type: ignore[arg-type]


def same(a: RunResults, b: RunResults) -> bool:
    return a.to_json() == b.to_json()


@pytest.mark.parametrize("mode", ["disaggregated", "vllm", "prefix", "chunked"])
def test_every_request_ends_once(mode: str) -> None:
    rows = conversations(1, 300)
    outcome = simulate(rows, spec(mode=mode), "cache_aware")
    assert len(outcome) == 300
    assert (outcome.status == DONE).all()
    assert outcome.num_input.tolist() == [row.num_input for row in rows]
    assert (outcome.ttft_s > 0).all()
    assert (outcome.e2e_s >= outcome.ttft_s).all()
    several = outcome.num_output > 2
    assert (outcome.tbt_s[several] >= outcome.tbt_mean_s[several] * 0.999).all()
    assert (outcome.tbt_mean_s[several] > COSTS.decode.base_s).all()
    if mode in ("vllm", "chunked"):
        assert outcome.summary().hit_rate == 0
    else:
        assert outcome.summary().hit_rate > 0.2


def test_a_seed_is_a_whole_run() -> None:
    rows = conversations(2, 200)
    assert same(simulate(rows, spec(), "random", seed=5), simulate(rows, spec(), "random", seed=5))
    assert not same(simulate(rows, spec(), "random", seed=5), simulate(rows, spec(), "random", seed=6))


def test_one_request_alone_takes_what_the_formulas_say() -> None:
    outcome = simulate([TraceRow(7.0, 8000, 101, tuple(range(16)))], spec(), "cache_aware")
    assert outcome.arrival_s.tolist() == [0.0]
    assert outcome.ttft_s[0] == pytest.approx(COSTS.prefill.seconds(0, 8000))
    steps = [COSTS.decode.seconds(1, 8001 + n) for n in range(100)]
    last_layer_s = 8000 * COSTS.kv_bytes_per_token / COSTS.nic_bytes_per_s / COSTS.num_layers
    wait_s = last_layer_s + COSTS.nic_latency_s
    assert outcome.e2e_s[0] - outcome.ttft_s[0] == pytest.approx(sum(steps) + wait_s, rel=1e-4)
    assert outcome.tbt_mean_s[0] == pytest.approx((sum(steps) + wait_s) / 100, rel=1e-4)
    longest = sorted([steps[0] + wait_s, *steps[1:]])[-10:]
    assert outcome.tbt_s[0] == pytest.approx(sum(longest) / 10, rel=1e-4)


def test_the_second_turn_finds_the_first() -> None:
    first = TraceRow(0.0, 5120, 2, tuple(range(10)))
    second = TraceRow(20.0, 7680, 2, tuple(range(15)))
    outcome = simulate([first, second], spec(), "cache_aware")
    assert outcome.cached_tokens.tolist() == [0, 5120]
    assert outcome.ttft_s[1] == pytest.approx(COSTS.prefill_s(5120, 7680))


def test_a_whole_prompt_in_the_cache_still_computes_its_last_token() -> None:
    row = TraceRow(0.0, 5120, 2, tuple(range(10)))
    outcome = simulate([row, row._replace(timestamp_s=20.0)], spec(), "cache_aware")
    assert outcome.cached_tokens.tolist() == [0, 5119]


def test_what_does_not_fit_fails_and_disturbs_no_other() -> None:
    small = ClusterSpec(costs=COSTS, num_prefill=1, num_decode=1)
    too_long = TraceRow(0.0, COSTS.device_tokens, 2, ())
    outcome = simulate([too_long, TraceRow(1.0, 100, 2, ())], small, "load")
    assert outcome.status.tolist() == [3, 0]
    assert outcome.summary().num_failed == 1


@pytest.mark.parametrize("mode", ["disaggregated", "chunked"])
def test_what_does_not_fit_is_no_work_of_the_instance_that_was_chosen(mode: str) -> None:
    """Else its predicted seconds would keep all later requests from there."""
    rows = [TraceRow(0.6 * n, 8_000, 200, ()) for n in range(60)]
    too_long = rows[5]._replace(num_input=COSTS.device_tokens + 1)
    outcome = simulate([*rows[:5], too_long, *rows[6:]], spec(mode=mode))
    assert outcome.status[5] == FAILED and (np.delete(outcome.status, 5) == DONE).all()
    chosen = np.bincount(outcome.prefill_instance[6:], minlength=2 if mode == "disaggregated" else 4)
    assert (chosen >= 6).all(), chosen


def test_prompts_go_first_and_interrupt_the_others() -> None:
    """Plain colocated serving: a long prompt is one long interval for all decoding requests."""
    rows = [TraceRow(0.0, 512, 400, (1,)), TraceRow(0.0, 512, 400, (2,)), TraceRow(3.0, 60_000, 2, ())]
    outcome = simulate(rows, spec(num_prefill=1, num_decode=1, mode="vllm"), "round_robin")
    chunked = simulate(rows, spec(num_prefill=1, num_decode=1, mode="chunked"), "round_robin")
    apart = simulate(rows, spec(), "load")
    blocked_s = COSTS.prefill.seconds(0, 60_000)
    assert outcome.tbt_s[0] == pytest.approx(blocked_s / 40 + 0.0267, rel=0.02)
    assert outcome.tbt_s[0] > 2 * chunked.tbt_s[0] > 2 * apart.tbt_s[0]
    assert chunked.ttft_s[2] > outcome.ttft_s[2]


def test_decode_memory_is_never_exceeded_and_the_first_come_first() -> None:
    costs = msgspec.structs.replace(COSTS, device_tokens=20_000)
    rows = [TraceRow(0.01 * n, 9_000, 200, ()) for n in range(8)]
    outcome = simulate(rows, ClusterSpec(costs=costs, num_prefill=8, num_decode=1), "load")
    ends = outcome.arrival_s + outcome.e2e_s
    assert (outcome.status == DONE).all()
    assert sorted(ends.tolist()) == ends.tolist()
    assert ends[2] > ends[1] + 150 * COSTS.decode.base_s  # two at a time


def test_a_pipeline_computes_long_prompts_faster_and_short_ones_not() -> None:
    long, short = TraceRow(0.0, 64 * 1024, 1, ()), TraceRow(60.0, 300, 1, ())
    alone = simulate([long, short], spec(), "load")
    piped = simulate([long, short], spec(num_prefill=4, pipeline_nodes=4), "load")
    assert alone.ttft_s[0] / piped.ttft_s[0] == pytest.approx(4, rel=0.1)
    assert piped.ttft_s[1] == pytest.approx(alone.ttft_s[1], rel=0.1)


def test_a_pipeline_has_a_plan_where_tokens_alone_cost_nothing() -> None:
    costs = msgspec.structs.replace(COSTS, prefill=PrefillModel(0.01, 0.0, 1e-8))
    long = TraceRow(0.0, 64 * 1024, 1, ())
    alone, piped = (simulate([long], spec(costs=costs, pipeline_nodes=n), "load") for n in (1, 2))
    assert alone.ttft_s[0] / piped.ttft_s[0] == pytest.approx(2, rel=0.1)


def test_step_by_step_a_prompt_longer_than_the_memory_fails() -> None:
    cluster = spec(detail="step", cache_tokens=20 * BLOCK)
    rows = [TraceRow(0.0, 20 * BLOCK + 1, 2, ()), TraceRow(1.0, 20 * BLOCK, 2, ())]
    assert simulate(rows, cluster, "load").status.tolist() == [FAILED, DONE]


@pytest.mark.parametrize("mode", ["disaggregated", "chunked"])
def test_step_by_step_gives_the_same_result(mode: str) -> None:
    rows = conversations(3, 120, rate_per_s=1.5)
    flow = simulate(rows, spec(mode=mode), "round_robin")
    step = simulate(rows, spec(mode=mode, detail="step"), "round_robin")
    assert flow.prefill_instance.tolist() == step.prefill_instance.tolist()
    assert flow.cached_tokens.tolist() == step.cached_tokens.tolist()
    np.testing.assert_allclose(flow.ttft_s, step.ttft_s, rtol=0.02, atol=0.07)
    np.testing.assert_allclose(flow.e2e_s, step.e2e_s, rtol=0.02, atol=0.1)
    several = flow.num_output > 100
    np.testing.assert_allclose(flow.tbt_mean_s[several], step.tbt_mean_s[several], rtol=0.05)
    np.testing.assert_allclose(np.mean(flow.tbt_s[several]), np.mean(step.tbt_s[several]), rtol=0.05)


def test_what_left_memory_is_read_from_ssd() -> None:
    cluster = spec(num_prefill=1, cache_tokens=20 * BLOCK, ssd_tokens=100 * BLOCK)
    rows = [TraceRow(30.0 * n, 10_240, 2, tuple(range(100 * (n % 3), 100 * (n % 3) + 20))) for n in range(6)]
    with_ssd = simulate(rows, cluster, "cache_aware")
    without = simulate(rows, spec(num_prefill=1, cache_tokens=20 * BLOCK), "cache_aware")
    assert without.cached_tokens.tolist() == [0] * 6
    assert with_ssd.cached_tokens.tolist() == [0, 0, 0, 10_239, 10_239, 10_239]
    assert with_ssd.fetched_tokens.tolist()[3:] == [10_239] * 3
    assert (with_ssd.ttft_s[3:] < without.ttft_s[3:] / 2).all()


def test_the_time_line_adds_up() -> None:
    rows = conversations(4, 200)
    outcome = simulate(rows, spec(watches_blocks=True, sample_s=1.0), "cache_aware")
    line = outcome.time_line
    assert (np.diff(line.at_s) == 1).all()
    assert line.num_arrived[-1] == 200 and line.num_running[-1] == 0 and line.num_queued[-1] == 0
    assert line.input_tokens[-1] == sum(row.num_input for row in rows)
    assert line.queue_s[-1] == pytest.approx(0, abs=1e-6)
    assert line.replicas_top10[-1] >= line.replicas_top100[-1] > 0


def test_hot_blocks_are_watched_step_by_step_too() -> None:
    """Their keys are hashes there. A page of plots watches them."""
    rows = conversations(3, 20)
    watched, plain = (
        simulate(rows, spec(detail="step", sample_s=1.0, watches_blocks=is_watched), "overlap")
        for is_watched in (True, False)
    )
    assert watched.time_line.replicas_top10.max() > 0
    assert watched.ttft_s.tolist() == plain.ttft_s.tolist()


@settings(max_examples=15, deadline=None)
@given(
    st.integers(0, 1000),
    st.sampled_from(["disaggregated", "vllm", "prefix", "chunked"]),
    st.sampled_from(["random", "load", "cache_aware", "round_robin"]),
    st.floats(0.5, 20),
)
def test_any_run_ends_with_everything_done(seed: int, mode: str, scheduling: str, rate: float) -> None:
    rows = conversations(seed, 60, rate)
    cluster = spec(mode=mode, cache_tokens=100 * BLOCK if mode == "disaggregated" else None)
    outcome = simulate(rows, cluster, scheduling, seed=seed)
    assert (outcome.status == DONE).all()
    assert (outcome.cached_tokens < outcome.num_input).all()
    assert (outcome.ttft_s >= 0).all() and np.isfinite(outcome.e2e_s).all()


def test_a_late_refusal_wastes_a_prefill_and_an_early_one_nothing() -> None:
    rows = [TraceRow(0.05 * n, 4_000, 300, ()) for n in range(200)]
    cluster = spec(num_prefill=8, num_decode=1)
    late, early, ours = (
        simulate(rows, cluster, "load", rule, slo_tbt_s=0.03) for rule in ("baseline", "early", "goodput")
    )
    for outcome in (late, early, ours):
        assert set(outcome.status.tolist()) <= {DONE, REJECTED, REJECTED_AFTER_PREFILL}
        assert (outcome.prefill_gpu_s[outcome.status == REJECTED] == 0).all()
        assert (outcome.prefill_gpu_s[outcome.status != REJECTED] > 0).all()
        assert np.isnan(outcome.e2e_s[outcome.status != DONE]).all()
    assert (early.status == REJECTED).any() and (ours.status == REJECTED).any()
    late_ones = [int((one.status == REJECTED_AFTER_PREFILL).sum()) for one in (late, early, ours)]
    assert late_ones[0] > late_ones[1] >= late_ones[2] == 0, late_ones
    assert late.time_line.num_rejected[-1] == (late.status != DONE).sum()


def test_a_run_that_missed_too_often_ends_early() -> None:
    rows = conversations(5, 200, rate_per_s=20.0)
    whole = simulate(rows, spec(), slo_ttft_s=1.0)
    num_missed = int((~whole.is_good()).sum())
    assert num_missed > 50
    enough = simulate(rows, spec(), slo_ttft_s=1.0, max_missed=num_missed)
    assert same(whole, enough)
    early = simulate(rows, spec(), slo_ttft_s=1.0, max_missed=20)
    ended = early.is_done
    assert int((ended & ~early.is_good()).sum()) == 21
    assert (early.status[~ended] == 3).all() and not ended.all()

# SPDX-License-Identifier: Apache-2.0
"""Nodes that prefill and decode, with a pool behind them, under a closed load of agents' sessions."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from mooncake.errors import InvalidArgument
from mooncake.sim.serving import ClusterSpec, simulate, simulate_sessions
from mooncake.sim.serving.node_costs import load_costs
from mooncake.sim.serving.results import DONE, FAILED, RunResults
from mooncake.sim.traces.generators import Agentic
from mooncake.sim.traces.sessions import AgentSession, ClosedLoop, Turn, recipe_sessions
from mooncake.sim.traces.trace import TraceRow

BLOCK = 32
COSTS = msgspec.structs.replace(
    load_costs("llama3-70b-8xA800"), device_tokens=6400, nic_bytes_per_s=1e12, nic_latency_s=0.01
)
RECIPE = Agentic(common_tokens=640, first_tokens=320, turn_tokens=64, output_tokens=30, turns=20, pause_s=0.2)


def run(
    loop: ClosedLoop, scheduling: str = "round_robin", pool_tokens: int | None = None, **changes: object
) -> RunResults:
    spec = ClusterSpec(
        costs=msgspec.structs.replace(COSTS, **changes),
        num_prefill=2,
        num_decode=0,
        mode="chunked_prefix",
        block_tokens=BLOCK,
        store_tokens=pool_tokens,
    )
    return simulate_sessions(loop, spec, scheduling)


def hit_rate(results: RunResults, num_first: int) -> float:
    return float(results.cached_tokens[num_first:].sum() / results.num_input[num_first:].sum())


def one_session(*turns: Turn) -> ClosedLoop:
    return ClosedLoop([AgentSession("s", 0, turns)], 1, len(turns) - 1)


def test_the_next_turn_is_sent_after_the_answer_and_its_pause() -> None:
    results = run(one_session(Turn(0, 640, 3), Turn(643, 64, 2, 7.0), Turn(709, 64, 2, 5.0)))
    ends_s = results.arrival_s + results.e2e_s
    assert results.num_input.tolist() == [640, 707, 773]
    # The load begins in the middle of the first pause.
    assert 0 <= results.arrival_s[1] - ends_s[0] <= 7.0
    assert results.arrival_s[2] - ends_s[1] == pytest.approx(5.0)


def test_the_next_turn_is_sent_when_the_client_has_the_answer() -> None:
    results = run(
        one_session(Turn(0, 640, 3), Turn(643, 64, 2, 7.0), Turn(709, 64, 2, 5.0)), first_token_s=0.5
    )
    assert results.arrival_s[2] - (results.arrival_s + results.e2e_s)[1] == pytest.approx(5.0)
    assert (results.e2e_s >= results.ttft_s).all()


def test_a_turn_finds_the_answer_before_it_in_the_engine_s_cache() -> None:
    # Two nodes in turn: only the third request comes where the first was.
    loop = one_session(Turn(0, 640, 33), Turn(673, 64, 33, 1.0), Turn(770, 64, 2, 1.0))
    results = run(loop)
    assert results.cached_tokens.tolist() == [0, 0, 672], "640 of the prompt and 32 of the answer"


def test_with_a_pool_every_node_finds_what_any_has_computed() -> None:
    loop = one_session(Turn(0, 640, 33), Turn(673, 64, 33, 1.0), Turn(770, 64, 2, 1.0))
    results = run(loop, pool_tokens=100_000)
    assert results.cached_tokens.tolist() == [0, 672, 768]
    assert results.fetched_tokens.tolist() == [0, 672, 96], "what was in its own cache is not loaded"


def test_a_whole_prompt_from_the_pool_still_computes_its_last_token() -> None:
    rows = [TraceRow(5.0 * number, 640, 2, tuple(range(20))) for number in range(2)]
    spec = ClusterSpec(
        costs=COSTS, num_prefill=2, num_decode=0, mode="chunked_prefix", block_tokens=BLOCK, store_tokens=6400
    )
    results = simulate(rows, spec, "round_robin")
    assert results.decode_instance.tolist() == [0, 1] and (results.status == DONE).all()
    assert results.cached_tokens.tolist() == results.fetched_tokens.tolist() == [0, 639]


def test_a_load_takes_its_time_and_others_go_on_meanwhile() -> None:
    turns = (Turn(0, 640, 2), Turn(642, 64, 2, 1.0))
    fast, slow = (
        run(one_session(*turns), pool_tokens=100_000, nic_latency_s=latency_s) for latency_s in (0.0, 3.0)
    )
    assert slow.ttft_s[1] - fast.ttft_s[1] == pytest.approx(3.0, abs=0.01)
    sessions = recipe_sessions(RECIPE, 60)
    few, many = (
        run(ClosedLoop(sessions, number, 60), pool_tokens=100_000, nic_latency_s=3.0) for number in (2, 8)
    )
    assert (many.status == DONE).all()
    assert len(many) / span_s(many) > 2 * len(few) / span_s(few), "loads overlap"


def test_copies_by_the_cores_that_compute_delay_the_steps_meanwhile_and_nothing_else() -> None:
    turns = (Turn(0, 641, 2), Turn(643, 64, 2, 1.0))
    move_s_per_byte = 2.0 / (640 * COSTS.kv_bytes_per_token)
    free, costly = (
        run(one_session(*turns), pool_tokens=100_000, move_s_per_byte=one) for one in (0.0, move_s_per_byte)
    )
    # The first token comes before its prompt is saved, and a load delays nothing where nothing is computed.
    assert costly.ttft_s == pytest.approx(free.ttft_s)
    assert costly.fetched_tokens[1] == 640
    assert costly.e2e_s - free.e2e_s == pytest.approx(np.array([2.0, 2.0 * 64 / 640]))


def span_s(results: RunResults) -> float:
    return float((results.arrival_s + results.e2e_s).max())


def test_the_pool_holds_no_more_than_its_size() -> None:
    sessions = recipe_sessions(RECIPE, 60)
    small, large = (run(ClosedLoop(sessions, 12, 120), pool_tokens=tokens) for tokens in (3_200, 100_000))
    none = run(ClosedLoop(sessions, 12, 120))
    assert hit_rate(none, 12) < hit_rate(small, 12) < hit_rate(large, 12)
    assert hit_rate(large, 12) > 0.9


def test_no_policy_plans_loads_where_no_node_can_load() -> None:
    """Without a pool, blocks of another node are computed again: a plan to load them misplaces prompts."""
    sessions = recipe_sessions(RECIPE, 60)
    overlap, aware = (
        run(ClosedLoop(sessions, 12, 120), scheduling, nic_bytes_per_s=2e10)
        for scheduling in ("overlap", "cache_aware")
    )
    assert hit_rate(overlap, 12) >= hit_rate(aware, 12)
    assert overlap.ttft_s.mean() <= 1.01 * aware.ttft_s.mean()


@pytest.mark.parametrize("scheduling", ["round_robin", "overlap", "cache_aware"])
def test_every_request_of_a_closed_load_ends_once(scheduling: str) -> None:
    sessions = recipe_sessions(RECIPE, 60)
    runs = [run(ClosedLoop(sessions, 10, 90), scheduling, 100_000) for _ in range(2)]
    assert (runs[0].status == DONE).all() and len(runs[0]) >= 100
    assert (np.diff(runs[0].arrival_s) >= 0).all()
    assert runs[0].to_json() == runs[1].to_json(), "a seed is a whole run"
    assert set(runs[0].decode_instance.tolist()) == {0, 1}


def test_a_session_goes_on_after_a_request_that_fits_nowhere() -> None:
    results = run(one_session(Turn(0, 640, 2), Turn(642, 9000, 2, 1.0), Turn(0, 320, 2, 1.0)))
    assert results.status.tolist() == [DONE, FAILED, DONE]


def test_only_chunked_nodes_that_keep_blocks_have_a_pool() -> None:
    with pytest.raises(InvalidArgument, match="store_tokens"):
        ClusterSpec(costs=COSTS, mode="chunked", store_tokens=1000)

# SPDX-License-Identifier: Apache-2.0
"""Placement, failure and membership, as events and their effects."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mooncake.conductor.conductor import Conductor
from mooncake.conductor.explanation import Explanation
from mooncake.conductor.health import ProbeOutcome
from mooncake.conductor.messages import (
    POOL,
    AddInstance,
    Assumed,
    BlocksCleared,
    BlocksStored,
    ChunkMeasured,
    Decision,
    Drain,
    Effect,
    Failed,
    Fetch,
    FetchMeasured,
    Finished,
    Moved,
    Place,
    Placed,
    Prediction,
    Prefilled,
    PrefixWindows,
    Probe,
    Probed,
    Refuse,
    RemoveInstance,
    Silent,
    StateChanged,
    StepMeasured,
    TransferMeasured,
    Unwatch,
    Watch,
    Window,
)
from mooncake.conductor.prediction import CostModels, DecodeModel
from mooncake.conductor.prefix_index import window_scope
from mooncake.conductor.scaling_signal import INTERVAL_S
from mooncake.conductor.settings import SchedulingSettings
from mooncake.inference.pipeline import ChunkPlan, pass_through
from mooncake.machine import Wake
from mooncake.prefix import block_hashes, root_hash, short_key
from mooncake.types import Tier, WorkerRole

SETTINGS = SchedulingSettings(block_tokens=16, slow_start_s=0.0, max_requests_per_instance=4)
SLOW = SchedulingSettings(block_tokens=16, slow_start_s=10.0)
KEYS = [short_key(one) for one in block_hashes(range(64), 16, root_hash())]


@pytest.fixture
def conductor() -> Iterator[Conductor]:
    conductor = Conductor(SETTINGS, Random(0))
    yield conductor
    conductor.check()


def add(conductor: Conductor, *names: str, now: float = 0.0) -> None:
    """Add ready instances: p1, p2 prefill, d1, d2 decode."""
    for name in names:
        role = WorkerRole.PREFILL if name.startswith("p") else WorkerRole.DECODE
        effects = conductor.handle(AddInstance(name, role), now)
        assert effects == [Probe(name)]
        effects = conductor.handle(Probed(name, ProbeOutcome.READY), now)
        assert Watch(name) in effects


def place(conductor: Conductor, request_id: str = "r", now: float = 1.0, **fields: Any) -> Decision | Refuse:
    effects = conductor.handle(Place(request_id, **{"num_tokens": 64, **fields}), now)
    assert isinstance(effects[-1], Decision | Refuse)
    return effects[-1]


def decided(conductor: Conductor, request_id: str = "r", **fields: Any) -> Decision:
    decision = place(conductor, request_id, **fields)
    assert isinstance(decision, Decision)
    return decision


def fail(conductor: Conductor, instance: str, now: float = 2.0) -> list[Effect]:
    return conductor.handle(Failed(instance, "connection reset", "r"), now)


def lose(conductor: Conductor, instance: str, now: float = 2.0) -> list[Effect]:
    """Fail probes until the instance counts as down."""
    effects = fail(conductor, instance, now)
    for _ in range(SETTINGS.failures_to_down):
        effects = conductor.handle(Probed(instance, ProbeOutcome.FAILED, "refused"), now)
        now += SETTINGS.suspect_probe_interval_s
        assert Probe(instance) in conductor.handle(Wake(), now)
    return effects


def test_a_pair_is_chosen_with_its_reason(conductor: Conductor) -> None:
    add(conductor, "p1", "p2", "d1")
    conductor.handle(BlocksStored("p2", KEYS[:3]), 0.0)
    decision = decided(conductor, keys=KEYS)
    assert (decision.prefill, decision.decode, decision.degraded) == ("p2", "d1", "")
    assert decision.num_cached_tokens == 48
    assert "48 of 64 tokens cached" in decision.reason
    assert decision.reason in conductor.story("r")[0]


def test_load_spreads_requests(conductor: Conductor) -> None:
    add(conductor, "p1", "p2", "d1", "d2")
    pairs = [(one.prefill, one.decode) for one in (decided(conductor, f"r{n}") for n in range(4))]
    assert sorted(pairs) == [("p1", "d1"), ("p1", "d1"), ("p2", "d2"), ("p2", "d2")]
    conductor.handle(Prefilled("r0"), 1.0)
    conductor.handle(Finished("r1"), 1.0)
    [p1, p2, d1, d2] = conductor.status()
    assert (p1.queued_tokens, p2.queued_tokens) == (64, 64)
    assert (p1.num_requests + p2.num_requests, d1.num_requests + d2.num_requests) == (2, 3)


def test_only_a_decode_instance_when_the_prompt_is_computed(conductor: Conductor) -> None:
    add(conductor, "p1", "d1")
    decision = decided(conductor, needs_prefill=False)
    assert (decision.prefill, decision.decode, decision.degraded) == (None, "d1", "")


def test_placing_again_replaces_the_earlier_placement(conductor: Conductor) -> None:
    add(conductor, "p1", "p2", "d1")
    first = decided(conductor)
    assert first.prefill is not None
    second = decided(conductor, exclude=[first.prefill])
    assert second.prefill not in (None, first.prefill)
    assert sum(one.queued_tokens for one in conductor.status()) == 64


@pytest.mark.parametrize(
    ("names", "prefill", "decode", "degraded"),
    [
        (["d1"], None, "d1", ""),  # one pool: no instance only prefills
        (["p1"], None, "p1", "no decode instance is ready"),
    ],
)
def test_one_role_does_the_work_of_both(
    conductor: Conductor, names: list[str], prefill: str | None, decode: str, degraded: str
) -> None:
    add(conductor, *names)
    decision = decided(conductor)
    assert (decision.prefill, decision.decode, decision.degraded) == (prefill, decode, degraded)


def test_decode_instances_help_out_while_no_prefill_instance_is_ready(conductor: Conductor) -> None:
    add(conductor, "d1")
    conductor.handle(AddInstance("p1", WorkerRole.PREFILL), 0.0)
    decision = decided(conductor)
    assert (decision.prefill, decision.degraded) == (None, "no prefill instance is ready")


def test_in_one_pool_a_prompt_goes_where_it_is_done_first(conductor: Conductor) -> None:
    add(conductor, "d1", "d2")
    first = decided(conductor, "r1")
    assert first.prediction is not None and first.prediction.prefill_s > 0
    second = decided(conductor, "r2")
    assert {first.decode, second.decode} == {"d1", "d2"}
    conductor.handle(Prefilled("r2"), 1.0)
    assert decided(conductor, "r3").decode == second.decode


def test_a_restarted_instance_starts_slowly_and_a_suspect_does_not() -> None:
    conductor = Conductor(SLOW, Random(0))
    add(conductor, "p1", "p2", "d1")
    [p1, p2] = (conductor.instances[name].slot for name in ("p1", "p2"))
    assert conductor.loads.ready_since[p1] == 0.0
    fail(conductor, "p1")
    conductor.handle(Probed("p1", ProbeOutcome.READY), 3.0)
    assert conductor.loads.ready_since[p1] == 0.0
    lose(conductor, "p2", 5.0)
    conductor.handle(Probed("p2", ProbeOutcome.READY), 20.0)
    assert conductor.loads.ready_since[p2] == 20.0


def test_an_instance_that_joins_later_does_not_get_all_ties(conductor: Conductor) -> None:
    add(conductor, "d1", "d2")
    for number in range(20):
        decided(conductor, f"r{number}")
        conductor.handle(Finished(f"r{number}"), 1.0)
    add(conductor, "d3", now=1.0)
    later = []
    for number in range(9):
        later.append(decided(conductor, f"s{number}").decode)
        conductor.handle(Finished(f"s{number}"), 1.0)
    assert {name: later.count(name) for name in later} == {"d1": 3, "d2": 3, "d3": 3}
    assert [row.num_placed for row in conductor.status()] == [13, 13, 3]


def test_predictions_are_compared_with_measurements(conductor: Conductor) -> None:
    add(conductor, "p1", "d1")
    decision = decided(conductor, "r", num_tokens=6400)
    assert decision.prediction is not None
    predicted_s = decision.prediction.prefill_s
    conductor.handle(Prefilled("r", 0.0, 2 * predicted_s, 6400), 1.0 + 2 * predicted_s)
    conductor.handle(Finished("r", 100, 1.0, 0.05, is_complete=True), 9.0)
    accuracy = conductor.predict.accuracy
    assert accuracy["prefill_s"].ratio_sum == pytest.approx(2.0)
    assert accuracy["ttft_s"].ratio_sum == pytest.approx(2.0)
    assert accuracy["tbt_s"].num_seen == 1
    assert accuracy["output_tokens"].num_seen == 0  # nothing was predicted
    for number in range(8):  # an instance that reports no chunks is learned from whole prompts
        decided(conductor, f"s{number}", num_tokens=6400)
        conductor.handle(Prefilled(f"s{number}", 0.0, 2 * predicted_s, 6400), 2.0)
        conductor.handle(Finished(f"s{number}"), 2.0)
    second = decided(conductor, "r2", num_tokens=6400)
    assert second.prediction is not None
    assert second.prediction.prefill_s == pytest.approx(2 * predicted_s)
    assert second.prediction.output_tokens == 100


def test_measured_chunks_steps_and_transfers_are_learned(conductor: Conductor) -> None:
    add(conductor, "p1", "p2", "d1")
    for _ in range(20):
        conductor.handle(ChunkMeasured("p1", 0, 1000, 5.0), 1.0)
        conductor.handle(ChunkMeasured("p2", 0, 1000, 1.0), 1.0)
        conductor.handle(StepMeasured("d1", 4, 4000, 2.0), 1.0)
        conductor.handle(TransferMeasured("p1", "p2", 10**9, 10.0), 1.0)
        conductor.handle(TransferMeasured("p1", "gone", 10**9, 10.0), 1.0)
    decision = decided(conductor, num_tokens=1000)
    assert decision.prefill == "p2" and decision.prediction is not None
    decision = decided(conductor, "r2", num_tokens=1000, exclude=["p2"])
    assert decision.prediction is not None
    assert decision.prediction.prefill_s == pytest.approx(5.0, rel=0.01)
    assert decision.prediction.tbt_s > 1.0
    assert conductor.predict.links.s_per_byte == pytest.approx(1e-8, rel=0.3)


@pytest.mark.parametrize("num_stages", [2, 4])
def test_a_group_gets_long_prompts_and_a_worker_short_ones(conductor: Conductor, num_stages: int) -> None:
    """A group reports whole prompts: a short one takes it as long as a worker, and what the hops take."""
    token_s, hop_s, fixed = 1e-3, 5e-3, 512.0
    plan = ChunkPlan(num_stages, 4e-4, fixed, 512, 32)
    alone = ChunkPlan(1, 4e-4, fixed, 512, 32)

    def in_group_s(num_tokens: int) -> float:
        free_at, start, ends_at = [0.0] * num_stages, 0, 0.0
        for end in plan.cuts(0, num_tokens):
            stage_s = token_s * (plan.work(start, end) + fixed) / num_stages
            ends_at, start = pass_through(free_at, 0.0, [stage_s] * num_stages, hop_s) + hop_s, end
        return ends_at

    add(conductor, "p1", "p2", "d1")
    for number in range(200):
        num_tokens, start = (64, 160, 256, 1024, 4096)[number % 5], 0
        conductor.handle(ChunkMeasured("p2", 0, num_tokens, in_group_s(num_tokens)), 1.0)
        for end in alone.cuts(0, num_tokens):
            seconds = token_s * (alone.work(start, end) + fixed)
            conductor.handle(ChunkMeasured("p1", start, end - start, seconds), 1.0)
            start = end
    for num_tokens, expected in ((64, "p1"), (160, "p1"), (1024, "p2"), (4096, "p2")):
        decision = decided(conductor, f"r{num_tokens}", num_tokens=num_tokens)
        assert decision.prefill == expected and decision.prediction is not None
        conductor.handle(Finished(f"r{num_tokens}"), 1.0)
        grouped = decided(conductor, f"g{num_tokens}", num_tokens=num_tokens, exclude=["p1"])
        assert grouped.prediction is not None
        assert grouped.prediction.prefill_s == pytest.approx(in_group_s(num_tokens), rel=0.1)
        conductor.handle(Finished(f"g{num_tokens}"), 1.0)
    decided(conductor, "r-long", num_tokens=4096)
    assert decided(conductor, "short", num_tokens=256).prefill == "p1"


def test_what_a_peer_has_is_fetched_where_it_is_idle(conductor: Conductor) -> None:
    add(conductor, "p1", "p2", "d1")
    conductor.handle(BlocksStored("p1", KEYS), 0.0)
    decided(conductor, "long", num_tokens=10**6, exclude=["p2"])
    decision = decided(conductor, "r1", keys=KEYS, num_tokens=64_000)
    assert decision.prefill == "p2"
    assert decision.fetches == [Fetch("p1", 0, 4)]


def test_a_fetch_of_an_older_conductor_is_read() -> None:
    """It had one field more; gateways and conductors are updated one after the other."""
    payload = msgspec.msgpack.encode(["p1", 0, 4, True])
    assert msgspec.msgpack.decode(payload, type=Fetch) == Fetch("p1", 0, 4)


def test_a_prefix_whose_window_is_gone_is_not_cached(conductor: Conductor) -> None:
    add(conductor, "p1", "d1")
    conductor.handle(PrefixWindows("p1", [Window(2, 1)]), 0.0)
    conductor.handle(BlocksStored("p1", KEYS), 0.0)
    assert decided(conductor, "r1", keys=KEYS, num_tokens=64_000).num_cached_tokens == 0
    conductor.handle(BlocksStored("p1", KEYS[1:3], scope=window_scope("", 2)), 0.0)
    assert decided(conductor, "r2", keys=KEYS, num_tokens=64_000).num_cached_tokens == 48
    conductor.handle(BlocksStored("p1", KEYS[2:], Tier.SSD, window_scope("", 2)), 0.0)
    conductor.handle(PrefixWindows("p1", []), 0.0)
    assert decided(conductor, "r3", keys=KEYS, num_tokens=64_000).num_cached_tokens == 64
    conductor.handle(PrefixWindows("gone", [Window(2, 1)]), 0.0)
    conductor.check()


def test_what_the_store_has_need_not_be_computed(conductor: Conductor) -> None:
    add(conductor, "p1", "p2", "d1")
    conductor.handle(BlocksStored(POOL, KEYS, Tier.MEMORY, "kv/abc"), 0.0)
    conductor.handle(BlocksStored("p2", KEYS[:1]), 0.0)
    decided(conductor, "long", num_tokens=10**6, exclude=["p1"])
    decision = decided(conductor, keys=KEYS, num_tokens=64_000)
    assert decision.prefill == "p1"
    assert [(one.source, one.first_block, one.num_blocks) for one in decision.fetches] == [(POOL, 0, 4)]
    assert decision.num_cached_tokens == 64
    assert decided(conductor, "other", num_tokens=64_000, keys=[1, 2]).fetches == []


def test_of_a_slow_pool_is_loaded_what_comes_in_time(conductor: Conductor) -> None:
    """A load is predicted with what the instance's own loads have taken."""
    add(conductor, "p1", "p2", "d1")
    conductor.handle(FetchMeasured("p1", 1000, 9.0), 0.0)  # before the pool is known
    prompts = [[key ^ number for key in KEYS] for number in range(4)]
    for keys in prompts:
        conductor.handle(BlocksStored(POOL, keys, Tier.MEMORY, "kv/abc"), 0.0)

    def num_loaded(number: int, exclude: str) -> int:
        decision = decided(conductor, f"r{number}", keys=prompts[number], num_tokens=2000, exclude=[exclude])
        conductor.handle(Finished(f"r{number}"), 1.0)
        assert all(one.source == POOL for one in decision.fetches)
        return sum(one.num_blocks for one in decision.fetches)

    assert (num_loaded(0, "p2"), num_loaded(1, "p1")) == (4, 4)
    for _ in range(8):
        conductor.handle(FetchMeasured("gone", 1000, 1e-6), 1.0)
        conductor.handle(FetchMeasured("p2", 1000, 0.01), 1.0)
        conductor.handle(FetchMeasured("p1", 1000, 9.0), 1.0)
    assert (num_loaded(2, "p2"), num_loaded(3, "p1")) == (1, 4)
    assert conductor.predict.links.s_per_byte == 1e-10, "other paths are as before"
    conductor.check()


def test_lower_priority_numbers_go_first(conductor: Conductor) -> None:
    add(conductor, "p1", "d1")
    late = decided(conductor, "late", priority=1)
    urgent = decided(conductor, "urgent", num_tokens=100_000)
    assert urgent.turn < late.turn


def test_without_instances_a_request_is_refused_with_the_reason(conductor: Conductor) -> None:
    refuse = place(conductor)
    assert isinstance(refuse, Refuse) and refuse.refusal.code == "no_instance"
    add(conductor, "d1")
    lose(conductor, "d1")
    refuse = place(conductor, now=50.0)
    assert isinstance(refuse, Refuse) and "d1 is down" in refuse.refusal.reason


def test_full_instances_refuse_with_a_computed_pause(conductor: Conductor) -> None:
    add(conductor, "d1")
    for number in range(4):
        conductor.handle(Place(f"r{number}", 64), 0.0)
    refuse = place(conductor, "late")
    assert isinstance(refuse, Refuse) and refuse.refusal.code == "overloaded"
    conductor.handle(Finished("r0"), 101.0)  # took 101 s: the mean rises
    decided(conductor, "r4", now=101.0)
    later = place(conductor, "late", now=101.0)
    assert isinstance(later, Refuse) and later.retry_after_s > refuse.retry_after_s


def test_a_refused_request_that_asks_again_is_no_more_work_and_waits_a_while(conductor: Conductor) -> None:
    add(conductor, "d1")
    for number in range(4):
        conductor.handle(Place(f"r{number}", 64), 0.0)
        conductor.handle(Finished(f"r{number}", 5, 0.001, 0.001, True), 0.001)
        conductor.handle(Place(f"r{number}", 64), 0.002)
    conductor._mean_duration_s = 0.001
    measured = conductor.scaling._prompts.measure(10.0)
    refused = [place(conductor, "late", now=10.0) for _ in range(50)]
    assert all(isinstance(one, Refuse) and one.retry_after_s >= 0.05 for one in refused)
    after = conductor.scaling._prompts.measure(10.0)
    assert measured.rate < after.rate == pytest.approx(measured.rate * 5 / 4, rel=0.01)
    conductor.handle(Wake(), 20.0)
    other = [place(conductor, f"other{number}", now=20.0) for number in (1, 1, 1, 2)]
    assert all(isinstance(one, Refuse) for one in other)
    assert conductor.scaling._pools[WorkerRole.DECODE].num_behind == 2


def refused_late(has_begun: bool) -> tuple[Conductor, list[Any]]:
    """A conductor and its effects: decode had become too slow for a request whose prompt is computed."""
    rule = SchedulingSettings(admission="baseline", audit_share=0.0)
    conductor = Conductor(rule, Random(1), CostModels(decode=DecodeModel(0.01, 0.0, 0.0)))
    add(conductor, "p1", "d1")
    assert isinstance(conductor.handle(Place("r", 64, slo_tbt_s=0.03), 0.0)[-1], Decision)
    for number in range(200):
        conductor.handle(StepMeasured("d1", 1, 64, min(5.0, 0.01 * 1.2 ** (number // 8))), 1.0)
    return conductor, conductor.handle(Prefilled("r", has_begun=has_begun), 1.0)


def test_a_late_refused_request_keeps_its_account_until_its_end_is_reported() -> None:
    """The refusal may be lost on its way: the request then goes on, and the instance works on it."""
    conductor, effects = refused_late(has_begun=False)
    [refuse] = effects
    assert isinstance(refuse, Refuse) and refuse.refusal.code == "slo_tbt" and refuse.retry_after_s > 0
    assert {row.instance: row.num_requests for row in conductor.status()} == {"p1": 0, "d1": 1}
    conductor.handle(Finished("r"), 2.0)
    assert not any(row.num_requests for row in conductor.status()) and not conductor.placements
    conductor.check()


def test_an_answer_that_has_begun_is_not_refused() -> None:
    conductor, effects = refused_late(has_begun=True)
    assert effects == []
    assert {row.instance: row.num_requests for row in conductor.status()} == {"p1": 0, "d1": 1}
    conductor.handle(Finished("r", 5, 0.1, 0.1, True), 2.0)
    assert not conductor.placements
    conductor.check()


def test_a_full_role_is_not_helped_out_by_the_other(conductor: Conductor) -> None:
    add(conductor, "p1", "d1")
    for number in range(4):
        conductor.handle(Place(f"r{number}", 64), 0.0)
        conductor.handle(Prefilled(f"r{number}"), 0.0)
    refuse = place(conductor, "late")
    assert isinstance(refuse, Refuse) and "decode" in refuse.refusal.reason
    for number in range(4):
        conductor.handle(Finished(f"r{number}"), 0.0)
        conductor.handle(Place(f"s{number}", 64, exclude=["d1"]), 0.0)  # decoded by p1
    refuse = place(conductor, "late")
    assert isinstance(refuse, Refuse) and "prefill" in refuse.refusal.reason


def test_a_suspect_serves_only_when_no_other_instance_can(conductor: Conductor) -> None:
    add(conductor, "p1", "d1", "d2")
    effects = fail(conductor, "d1")
    assert Probe("d1") in effects
    assert any(isinstance(one, StateChanged) and one.after == "suspect" for one in effects)
    assert {decided(conductor, f"r{n}").decode for n in range(3)} == {"d2"}
    fail(conductor, "d2")
    assert decided(conductor, "last").decode in ("d1", "d2")
    conductor.handle(Probed("d1", ProbeOutcome.READY), 2.0)  # it was sent before the failure
    conductor.handle(Wake(), 3.0)
    assert Watch("d1", was_suspect=True) in conductor.handle(Probed("d1", ProbeOutcome.READY), 3.0)


def test_a_lost_instance_loses_its_blocks_and_is_watched_again(conductor: Conductor) -> None:
    add(conductor, "p1", "p2", "d1")
    conductor.handle(BlocksStored("p1", KEYS), 0.0)
    assert Unwatch("p1") in lose(conductor, "p1")
    assert conductor.index.num_blocks == 0
    conductor.handle(Wake(), 100.0)
    assert Watch("p1") in conductor.handle(Probed("p1", ProbeOutcome.READY), 100.0)


def test_an_instance_that_vanishes_while_it_shuts_down_loses_its_blocks(conductor: Conductor) -> None:
    add(conductor, "p1", "p2", "d1")
    conductor.handle(BlocksStored("p1", KEYS), 0.0)
    slot = conductor.instances["p1"].slot
    now, effects = 2.0, list[Effect]()
    outcomes = [ProbeOutcome.ALIVE, *[ProbeOutcome.FAILED] * SETTINGS.failures_to_down]
    for outcome in outcomes:
        assert not effects and conductor.index.num_blocks == len(KEYS)
        assert slot in conductor.cluster.sources
        while conductor.instances["p1"].next_probe_at is not None:
            now += 0.5
            conductor.handle(Wake(), now)
        effects = conductor.handle(Probed("p1", outcome, "for a test"), now)
        effects = [one for one in effects if not isinstance(one, StateChanged)]
    assert effects == [Unwatch("p1")]
    assert conductor.index.num_blocks == 0 and slot not in conductor.cluster.sources
    conductor.handle(Wake(), now + 100.0)
    assert Watch("p1") in conductor.handle(Probed("p1", ProbeOutcome.READY), now + 100.0)
    assert slot in conductor.cluster.sources


def test_ready_instances_are_probed_on_time(conductor: Conductor) -> None:
    add(conductor, "p1", now=10.0)
    assert conductor.deadline() == 10.0 + SETTINGS.probe_interval_s
    assert conductor.handle(Wake(), 11.0) == []
    assert conductor.handle(Wake(), 12.0) == [Probe("p1")]
    assert conductor.deadline() == 10.0 + INTERVAL_S, "only the scaling signal is due"


def test_draining_lets_requests_end(conductor: Conductor) -> None:
    add(conductor, "p1", "d1", "d2")
    decision = decided(conductor)
    conductor.handle(Drain(decision.decode), 1.0)
    assert decided(conductor, "other").decode != decision.decode
    effects = conductor.handle(Finished("r"), 2.0)
    assert Unwatch(decision.decode) in effects
    assert decision.decode not in [one.instance for one in conductor.status()]


def test_a_reminder_of_an_instance_does_not_end_its_drain(conductor: Conductor) -> None:
    add(conductor, "p1", "d1", "d2")
    decision = decided(conductor)
    conductor.handle(Drain(decision.decode), 1.0)
    assert conductor.handle(AddInstance(decision.decode, WorkerRole.DECODE, is_reminder=True), 2.0) == []
    assert decided(conductor, "other").decode != decision.decode
    conductor.handle(AddInstance(decision.decode, WorkerRole.DECODE), 3.0)
    assert not conductor.instances[decision.decode].is_draining


def test_an_answer_that_moves_lets_its_instance_leave(conductor: Conductor) -> None:
    add(conductor, "p1", "d1", "d2")
    first = decided(conductor)
    conductor.handle(Prefilled("r"), 0.5)
    conductor.handle(Drain(first.decode), 1.0)
    second = conductor.handle(Place("r/m", 40, exclude=[first.decode], needs_prefill=False), 1.0)[-1]
    assert isinstance(second, Decision) and second.decode != first.decode
    assert [row.num_requests for row in conductor.status()] == [0, 1, 1]
    effects = conductor.handle(Moved("r", "r/m", "pushed"), 2.0)
    conductor.check()
    assert Unwatch(first.decode) in effects, "it has no requests and leaves"
    assert [(row.instance, row.num_requests) for row in conductor.status()] == [("p1", 0), (second.decode, 1)]
    line = f"2.000 moved r from {first.decode} to {second.decode}: KV pushed"
    for key in ("r", first.decode, second.decode):
        assert line in conductor.story(key)
    assert conductor.handle(Moved("r", "r/m", "pushed"), 2.0) == [], "once"
    conductor.handle(Finished("r/m"), 2.0)
    assert conductor.status()[1].num_requests == 1
    conductor.handle(Finished("r"), 3.0)
    assert not conductor.placements and conductor.status()[1].num_requests == 0


def test_a_moved_answer_that_is_not_known_takes_the_new_placement(conductor: Conductor) -> None:
    """The conductor may have been restarted, or the lifetime of the first placement be over."""
    add(conductor, "d1", "d2")
    decided(conductor, "r/m", needs_prefill=False)
    conductor.handle(Drain("d1"), 1.0)
    conductor.handle(Drain("d2"), 1.0)
    conductor.handle(Moved("r", "unknown", "pool"), 1.0)
    conductor.handle(Moved("r", "r", "pool"), 1.0)
    assert not conductor.handle(Moved("r", "r/m", "pool"), 1.0), "the only request of a draining instance"
    conductor.check()
    assert [*conductor.placements] == ["r"]
    conductor.handle(Finished("r"), 2.0)
    assert conductor.status() == []


def test_a_drain_can_be_taken_back(conductor: Conductor) -> None:
    add(conductor, "d1")
    decided(conductor)
    conductor.handle(Drain("d1"), 1.0)
    assert isinstance(place(conductor, "late"), Refuse)
    conductor.handle(AddInstance("d1", WorkerRole.DECODE), 1.0)
    assert decided(conductor, "late").decode == "d1"


def test_removing_forgets_and_late_events_are_harmless(conductor: Conductor) -> None:
    add(conductor, "p1", "d1")
    decided(conductor)
    conductor.handle(RemoveInstance("p1"), 1.0)
    for late in (
        Probed("p1", ProbeOutcome.READY),
        BlocksStored("p1", KEYS),
        BlocksCleared("p1"),
        Failed("p1", "gone"),
        Prefilled("r"),
        Finished("r"),
        Finished("unknown"),
        RemoveInstance("p1"),
        Drain("p1"),
    ):
        conductor.handle(late, 1.0)
    assert [one.instance for one in conductor.status()] == ["d1"]
    assert conductor.index.num_blocks == 0


def test_an_instance_can_change_its_role(conductor: Conductor) -> None:
    add(conductor, "d1")
    conductor.handle(AddInstance("d1", WorkerRole.PREFILL), 1.0)
    [row] = conductor.status()
    assert (row.role, row.health) == (WorkerRole.PREFILL, "starting")


def test_a_request_without_a_reported_end_expires(conductor: Conductor) -> None:
    add(conductor, "d1")
    decided(conductor, lifetime_s=30.0)
    conductor.handle(Wake(), 32.0)
    assert conductor.status()[0].num_requests == 0
    assert "its end was not reported" in conductor.story("r")[-1]


def test_an_admitted_request_that_no_instance_is_left_for_expires() -> None:
    """Its gateway may be gone: nothing else would end its place in the forecasts."""
    conductor = Conductor(SchedulingSettings(admission="goodput", slow_start_s=0.0), Random(0))
    add(conductor, "d1")
    decided(conductor, lifetime_s=30.0, now=1.0)
    conductor.handle(Prefilled("r"), 2.0)
    assert isinstance(place(conductor, exclude=["d1"], lifetime_s=30.0, now=3.0), Refuse)
    admission = conductor.lifecycle.admission
    assert not conductor.placements and admission.knows("r"), "it is not decided again when it asks again"
    for number in range(2000):  # enough for timers to be dropped
        conductor.handle(Place(f"r{number}", 64), 3.0)
        conductor.handle(Finished(f"r{number}"), 3.0)
    conductor.check()
    conductor.handle(Wake(), 32.0)
    assert not admission.knows("r") and admission.decode_forecast.decoding.num_requests == 0
    conductor.check()


def test_such_a_request_expires_with_its_latest_placement() -> None:
    conductor = Conductor(SchedulingSettings(admission="goodput", slow_start_s=0.0), Random(0))
    add(conductor, "d1")
    decided(conductor, lifetime_s=30.0, now=1.0)
    decided(conductor, lifetime_s=30.0, now=20.0)
    assert isinstance(place(conductor, exclude=["d1"], lifetime_s=30.0, now=21.0), Refuse)
    admission = conductor.lifecycle.admission
    conductor.handle(Wake(), 49.0)
    assert admission.knows("r"), "31 was the end of the placement before"
    conductor.handle(Wake(), 50.0)
    assert not admission.knows("r")
    conductor.check()


def test_ended_requests_leave_no_timers(conductor: Conductor) -> None:
    add(conductor, "p1", "d1")
    for number in range(5000):
        conductor.handle(Place(f"r{number}", 64), 1.0)
        conductor.handle(Finished(f"r{number}"), 1.0)
        assert len(conductor._timers) < 2000
    assert conductor.deadline() is not None
    for _ in range(5000):
        conductor.handle(Place("again", 64), 1.0)
        assert len(conductor._timers) < 2000, "nor do earlier placements of one that is placed anew"
    conductor.check()


NAMES = ["p1", "p2", "d1", "d2"]
names = st.sampled_from(NAMES)
requests = st.sampled_from(["r1", "r2", "r3", "r4", "r5", "r6"])


class AnyOrder(RuleBasedStateMachine):
    """In any order of events the invariants hold and a live instance is always probed."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.conductor = Conductor(SETTINGS, Random(0))
        self.probing: dict[str, None] = {}

    def send(self, event: Any) -> list[Effect]:
        effects = self.conductor.handle(event, self.now)
        for effect in effects:
            if isinstance(effect, Probe):
                self.probing[effect.instance] = None
        return effects

    @rule(name=names)
    def add(self, name: str) -> None:
        self.send(AddInstance(name, WorkerRole.PREFILL if name.startswith("p") else WorkerRole.DECODE))

    @rule(name=names)
    def remove(self, name: str) -> None:
        self.send(RemoveInstance(name))

    @rule(name=names)
    def drain(self, name: str) -> None:
        self.send(Drain(name))

    @rule(name=names)
    def fail(self, name: str) -> None:
        self.send(Failed(name, "reset"))

    @rule(name=names, outcome=st.sampled_from([*ProbeOutcome, ProbeOutcome.READY]))
    def answer(self, name: str, outcome: ProbeOutcome) -> None:
        if name in self.probing:
            del self.probing[name]
            self.send(Probed(name, outcome))

    @rule(request=requests, exclude=st.lists(names, max_size=2), needs_prefill=st.booleans())
    def place(self, request: str, exclude: list[str], needs_prefill: bool) -> None:
        effect = self.send(Place(request, 40, KEYS[:2], "", exclude, needs_prefill, 20.0))[-1]
        if isinstance(effect, Decision):
            assert not {effect.prefill, effect.decode} & {*exclude}
            states = {row.instance: row.health for row in self.conductor.status()}
            assert states[effect.decode] in ("ready", "suspect")
        else:
            assert isinstance(effect, Refuse)

    @rule(request=requests)
    def prefilled(self, request: str) -> None:
        self.send(Prefilled(request))

    @rule(request=requests)
    def finish(self, request: str) -> None:
        self.send(Finished(request))

    @rule(request=requests, other=requests)
    def move(self, request: str, other: str) -> None:
        self.send(Moved(request, other, "pool"))

    @rule(name=names)
    def blocks(self, name: str) -> None:
        self.send(BlocksStored(name, KEYS))

    @rule(step=st.floats(0.0, 8.0))
    def wait(self, step: float) -> None:
        self.now += step
        self.send(Wake())

    @invariant()
    def holds(self) -> None:
        self.conductor.check()


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def test_the_pool_is_a_source_but_serves_no_requests(conductor: Conductor) -> None:
    add(conductor, *(f"d{number}" for number in range(64)))  # so that the pool's slot is one too many
    conductor.handle(BlocksStored(POOL, KEYS[:2], Tier.MEMORY, "kv/0"), 1.0)
    conductor.handle(BlocksStored("unknown", KEYS, Tier.MEMORY, "kv/0"), 1.0)
    assert conductor.index.matches(KEYS, "kv/0") == {POOL: 2}
    decision = decided(conductor, keys=KEYS)
    assert POOL not in (decision.prefill, decision.decode)
    assert all(row.instance != POOL for row in conductor.status())
    conductor.handle(BlocksCleared(POOL, "restarted"), 2.0)
    assert conductor.index.matches(KEYS, "kv/0") == {}


# --- explanations


def explained(conductor: Conductor, request_id: str) -> Explanation:
    found = conductor.explain(request_id, lambda _: "", 5.0)
    assert found is not None
    return found


def test_an_explanation_shows_the_index_as_it_was_before_the_decision(conductor: Conductor) -> None:
    """What a silent instance is assumed to hold because of it, it did not hold before."""
    add(conductor, "d1", "d2", "d3")
    conductor.handle(Silent("d1"), 0.0)
    conductor.handle(BlocksStored("d2", KEYS[:2]), 0.0)
    conductor.handle(BlocksStored("d3", KEYS[2:]), 0.0)
    decided(conductor, keys=KEYS, exclude=["d2", "d3"])
    assert conductor.index.matches(KEYS)["d1"] == len(KEYS)
    blocks = [(one.verdict, one.where, one.num) for one in explained(conductor, "r").blocks]
    assert blocks == [("elsewhere", "d2", 2), ("never_stored", "", 2)]


def test_an_explanation_names_instances_that_are_full(conductor: Conductor) -> None:
    add(conductor, "d1", "d2")
    for number in range(4):
        decided(conductor, f"r{number}", exclude=["d2"])
    decided(conductor, "last")
    [chosen, full] = explained(conductor, "last").candidates
    assert (chosen.instance, chosen.why_not) == ("d2", "")
    assert full.instance == "d1" and "full: it has 4 requests" in full.why_not
    decided(conductor, "excluding", exclude=["d1", "unknown"])
    assert [one.why_not[:8] for one in explained(conductor, "excluding").candidates] == ["", "excluded"]
    for number in range(4):
        place(conductor, f"s{number}")
    refused = explained(conductor, "s3")
    assert [one.instance for one in refused.candidates] == ["d1", "d2"] and refused.state == "refused"
    assert all("full" in one.why_not for one in refused.candidates)


# --- engines that are not our workers


def test_an_instance_without_events_is_assumed_to_hold_its_prompts(conductor: Conductor) -> None:
    add(conductor, "p1", "p2", "d1")
    conductor.handle(Silent("p1"), 1.0)
    conductor.handle(Silent("d1"), 1.0)
    decision = place(conductor, keys=KEYS, exclude=["p2"])
    assert isinstance(decision, Decision)
    assert conductor.index.matches(KEYS) == {"p1": len(KEYS), "d1": len(KEYS)}
    place(conductor, "r2", keys=KEYS, exclude=["p1"])
    assert "p2" not in conductor.index.matches(KEYS), "this one publishes events"
    place(conductor, "r3", keys=[1, 2], is_text=True, exclude=["p1"])
    assert conductor.index.matches([1, 2])["p2"] == 2, "but never for text"
    conductor.handle(BlocksCleared("p1"), 2.0)  # its events are followed now
    place(conductor, "r4", keys=KEYS, exclude=["p2"])
    assert "p1" not in conductor.index.matches(KEYS)


def test_no_more_is_assumed_than_an_instance_can_keep() -> None:
    for limit in (0, 2):
        conductor = Conductor(SchedulingSettings(block_tokens=16, assumed_tokens=16 * limit), Random(0))
        add(conductor, "d1")
        conductor.handle(Silent("d1"), 0.0)
        for number in range(20):
            keys = list(range(10 * number, 10 * number + 4))
            decided(conductor, f"r{number}", keys=keys)
            conductor.handle(Finished(f"r{number}"), 1.0)
        conductor.handle(Assumed("d1", list(range(1000, 1009))), 2.0)
        assert conductor.index.num_blocks == limit
        assert all(len(assumed.keys) == limit for assumed in conductor.assumptions(100))
        conductor.check()


@pytest.mark.parametrize("share", [False, True])
def test_engines_are_sources_only_if_they_share_a_store(share: bool) -> None:
    conductor = Conductor(SchedulingSettings(block_tokens=16, engines_share_blocks=share), Random(0))
    add(conductor, "p1", "d1")
    conductor.handle(AddInstance("p2", WorkerRole.PREFILL), 0.0)
    conductor.handle(Probed("p2", ProbeOutcome.READY, "", True), 0.0)
    slot = conductor.instances["p2"].slot
    assert (slot in conductor.cluster.sources) is share
    assert conductor.instances["p1"].slot in conductor.cluster.sources
    conductor.check()


@pytest.mark.parametrize("admission", ["early", "predicted", "goodput"])
@pytest.mark.parametrize("scheduling", ["overlap", "kvcache_centric", "cache_aware", "load"])
def test_the_clock_may_begin_anywhere(scheduling: Any, admission: Any) -> None:
    """A live clock counts from the machine's start; decay and waiting must not depend on it."""
    chosen = SchedulingSettings(block_tokens=16, scheduling=scheduling, admission=admission)
    early, late = (served(Conductor(chosen, Random(0)), began_at) for began_at in (0.0, 2.0**25))
    assert early == late
    assert {len(outcome) for outcome in early} == {1, 2}, "some were refused, some were not"


def served(conductor: Conductor, began_at: float) -> list[tuple[str | None, ...]]:
    """The outcomes of a minute of requests, more than two instances can serve: a code, or a pair."""
    random = Random(7)
    outcomes: list[tuple[str | None, ...]] = []
    add(conductor, "p1", "p2", "d1", now=began_at)
    for tick in range(400):
        now, name = began_at + tick / 8, f"r{tick}"
        wishes: dict[str, Any] = {"slo_ttft_s": 2.0, "slo_tbt_s": 0.25, "keys": KEYS[: random.randrange(5)]}
        outcome = place(conductor, name, now, num_tokens=random.choice([64, 512, 4096]), **wishes)
        if isinstance(outcome, Refuse):
            outcomes.append((outcome.refusal.code,))
            continue
        outcomes.append((outcome.prefill, outcome.decode))
        assert outcome.prefill is not None
        conductor.handle(ChunkMeasured(outcome.prefill, 0, 512, 0.5), now + 1 / 64)
        conductor.handle(StepMeasured(outcome.decode, 4, 2048, 0.0625), now + 1 / 64)
        conductor.handle(Prefilled(name, 0.25, 0.5, 512), now + 1 / 32)
        conductor.handle(Finished(name, 8, 0.75, 0.125, True), now + 1 / 16)
    conductor.check()
    return outcomes


# --- numbers out of range


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_tokens", 2**63),
        ("num_tokens", -5000),
        ("lifetime_s", float("nan")),
        ("lifetime_s", float("inf")),
        ("lifetime_s", -1.0),
        ("slo_ttft_s", float("nan")),
        ("slo_tbt_s", float("inf")),
        ("priority", 2**63),
        ("max_output_tokens", -5),
        ("max_output_tokens", 2**63),
    ],
)
def test_a_number_out_of_range_is_refused_by_name(conductor: Conductor, field: str, value: float) -> None:
    add(conductor, "p1", "d1")
    decided(conductor, now=1.0)
    fields: dict[str, Any] = {field: value}
    refused = place(conductor, now=2.0, **fields)
    assert isinstance(refused, Refuse)
    assert refused.refusal.code == "invalid_argument"
    assert refused.refusal.reason.startswith(f"{field} is {value!r}; allowed: ")
    assert str(refused.refusal) in conductor.story("r")[-1]
    assert not conductor.placements, "it replaces the earlier placement as others do"


def test_a_limit_that_no_answer_reaches_is_none(conductor: Conductor) -> None:
    add(conductor, "d1")
    limited = decided(conductor, max_output_tokens=2**63 - 1)
    assert limited.prediction is not None and limited.prediction.output_tokens == 512


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -1.0, 2**63])
def test_what_can_t_be_a_measurement_is_none(conductor: Conductor, number: float) -> None:
    add(conductor, "p1", "d1")
    decided(conductor, is_text=True, scope="s")
    tokens = int(number) if abs(number) < float("inf") else -1
    conductor.handle(Prefilled("r", number, number, tokens, tokens, number, tokens), 2.0)
    conductor.handle(Finished("r", tokens, number, number, True), 3.0)
    assert [row.num_requests for row in conductor.status()] == [0, 0], "it has ended all the same"
    assert conductor.predict.lengths.expected("s", 0) == 0
    measured = {name: one.num_seen for name, one in conductor.predict.accuracy.items()}
    assert measured == {**dict.fromkeys(measured, 0), "ttft_s": 1}, "the conductor has measured this itself"
    found = explained(conductor, "r").actual
    assert (found.queue_s, found.prefill_s, found.ttft_s, found.tbt_s, found.output_tokens) == (0,) * 5


def test_a_first_token_that_was_not_seen_moves_the_prompt_and_teaches_nothing(conductor: Conductor) -> None:
    add(conductor, "d1")
    decided(conductor, now=1.0)
    conductor.handle(Prefilled("r", has_begun=True, is_assumed=True), 1.5)
    [row] = conductor.status()
    assert (row.num_requests, row.queued_tokens) == (1, 0)
    assert conductor.lifecycle.admission.decode_forecast.decoding.num_requests == 1
    conductor.handle(Finished("r", 5, is_complete=True), 9.0)
    assert not conductor.predict.accuracy["ttft_s"].num_seen
    assert explained(conductor, "r").actual.ttft_s == 0.0


def test_measured_chunks_and_steps_without_sense_are_ignored(conductor: Conductor) -> None:
    add(conductor, "p1")
    for first, num_tokens in ((-1, 5), (0, 0), (0, -5), (0, 2**63), (2**63, 5)):
        conductor.handle(ChunkMeasured("p1", first, num_tokens, 0.1), 1.0)
    for batch_size, context_tokens in ((0, 5), (-1, 5), (1, -5), (1, 2**63), (2**63, 5)):
        conductor.handle(StepMeasured("p1", batch_size, context_tokens, 0.1), 1.0)
    fits = conductor.predict.prefill.common, conductor.predict.decode.common
    assert [fit.num_samples for fit in fits] == [0, 0]


def test_an_instance_has_no_negative_memory(conductor: Conductor) -> None:
    conductor.handle(AddInstance("d1", WorkerRole.DECODE, -5), 0.0)
    assert conductor.loads.capacity_tokens[conductor.instances["d1"].slot] == float("inf")


# --- placements of other conductors


def test_a_placement_of_another_conductor_counts_as_load(conductor: Conductor) -> None:
    add(conductor, "p1", "p2", "d1", "d2")
    decision = Decision("there", "p1", "d1", "", 16, prediction=Prediction(prefill_s=2.0))
    assert conductor.handle(Placed(Place("there", 64), decision), 1.0) == []
    [p1, _, d1, _] = conductor.status()
    assert (p1.num_requests, p1.queued_tokens, d1.num_requests) == (1, 48, 1)
    assert decided(conductor).prefill == "p2", "the other one has less to do"
    conductor.handle(Placed(Place("there", 64), decision, 3.0), 4.0)
    assert conductor.status()[0].queued_tokens == 48, "repeated, it changes nothing"
    conductor.handle(Placed(Place("there", 64), decision, 3.0, is_prefilled=True), 4.0)
    assert conductor.status()[0].num_requests == 0, "but that it is computed is news"
    moved = Decision("there", None, "d2", "", prediction=Prediction(prefill_s=2.0))
    conductor.handle(Placed(Place("there", 64), moved), 5.0)
    conductor.check()
    assert [row.num_requests for row in conductor.status()] == [0, 1, 0, 2]
    conductor.handle(Finished("there"), 6.0)
    assert [row.num_requests for row in conductor.status()] == [0, 1, 0, 1]


def test_a_placement_of_another_conductor_expires(conductor: Conductor) -> None:
    add(conductor, "d1")
    late = Placed(Place("late", 64, lifetime_s=10.0), Decision("late", None, "d1", ""), age_s=9.0)
    conductor.handle(late, 100.0)
    conductor.handle(
        msgspec.structs.replace(late, age_s=11.0, place=Place("over", 64, lifetime_s=10.0)), 100.0
    )
    assert conductor.placements.keys() == {"late"}
    conductor.handle(Wake(), 101.0)
    assert not conductor.placements


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -5.0, 1e300])
@pytest.mark.parametrize("field", ["prefill_s", "ttft_s", "tbt_s", "queue_s"])
def test_numbers_of_another_conductor_are_bounded(seconds: float, field: str) -> None:
    conductor = Conductor(SchedulingSettings(slow_start_s=0.0), Random(0), CostModels())
    add(conductor, "d1")
    prediction = Prediction(**{field: seconds}, output_tokens=2**63)
    decision = Decision("r", None, "d1", "", 999, prediction=prediction, turn=seconds)
    sizes: dict[str, Any] = {
        "num_tokens": 2**63,
        "slo_ttft_s": seconds,
        "slo_tbt_s": seconds,
        "lifetime_s": 1e9,
        "priority": 2**63,
        "max_output_tokens": -(2**63),
    }
    conductor.handle(Placed(Place("r", **sizes), decision, age_s=seconds), 1.0)
    conductor.check()
    decided(conductor, "other")
    conductor.handle(Finished("r"), 2.0)
    assert conductor.status()[0].num_requests == 1
    conductor.handle(Wake(), 10.0)
    conductor.handle(Wake(), 1e6)
    assert conductor.status()[0].num_requests == 0 and not conductor.placements
    conductor.check()


def test_a_placement_on_unknown_instances_is_only_remembered(conductor: Conductor) -> None:
    conductor.handle(Placed(Place("r", 64), Decision("r", "p9", "d9", "")), 1.0)
    add(conductor, "p9", "d9")
    conductor.handle(Placed(Place("r", 64), Decision("r", "p9", "d9", ""), is_prefilled=True), 1.0)
    conductor.handle(Finished("r"), 2.0)
    assert [row.num_requests for row in conductor.status()] == [0, 0]


def test_keys_travel_only_where_blocks_are_inferred(conductor: Conductor) -> None:
    add(conductor, "p1", "d1")
    there = Conductor(SETTINGS, Random(1))
    add(there, "p1", "d1")
    request = Place("r", 64, KEYS, bare_keys=KEYS)
    placed = conductor.placed_of(request, decided(conductor, keys=KEYS), 1.0)
    assert (placed.place.keys, placed.place.bare_keys) == ([], [])
    for one in conductor, there:
        one.handle(Silent("p1"), 1.0)
    placed = conductor.placed_of(request, decided(conductor, keys=KEYS), 1.0)
    there.handle(placed, 1.0)
    assert there.index.matches(KEYS) == conductor.index.matches(KEYS) == {"p1": 4}


def test_inferred_blocks_are_handed_over_with_their_order() -> None:
    settings = SchedulingSettings(block_tokens=16, slow_start_s=0.0, assumed_tokens=8 * 16)
    here, there = Conductor(settings, Random(0)), Conductor(settings, Random(1))
    for one in here, there:
        add(one, "d1")
        one.handle(Silent("d1"), 0.0)
    for first in (1, 101, 201):
        decided(here, f"r{first}", keys=list(range(first, first + 3)), num_tokens=48)
    found = list(here.assumptions(3))
    assert [len(one.keys) for one in found] == [3, 3, 2]
    for assumed in found:
        there.handle(assumed, 1.0)
    assert list(there.inferred_blocks.all()) == list(here.inferred_blocks.all())
    there.handle(Assumed("unknown", [1]), 1.0)
    for conductor in here, there:
        decided(conductor, "next", keys=[301, 302, 303], num_tokens=48)
    for first in (1, 101, 201, 301):
        keys = list(range(first, first + 3))
        assert there.index.matches(keys) == here.index.matches(keys)
    there.check()

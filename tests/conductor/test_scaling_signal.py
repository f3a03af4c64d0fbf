# SPDX-License-Identifier: Apache-2.0
"""The scaling signal alone with drawn arrivals, and in a simulated cluster that starts and stops instances by
it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from mooncake.conductor.messages import Drain, RemoveInstance
from mooncake.conductor.prediction import DecodeModel
from mooncake.conductor.scaling_signal import (
    INTERVAL_S,
    LATE_SHARE,
    DesiredChanged,
    LoadMeasured,
    OfferedLoad,
    PoolNow,
    Requirement,
    ScalingSignal,
)
from mooncake.conductor.settings import SchedulingSettings
from mooncake.machine import Wake
from mooncake.sim.serving.cluster import ClusterSpec
from mooncake.sim.serving.disaggregated_cluster import DisaggregatedCluster
from mooncake.sim.serving.node_costs import load_costs
from mooncake.sim.serving.nodes import PrefillNode
from mooncake.sim.serving.results import RunResults
from mooncake.sim.traces.trace import TraceRow
from mooncake.types import WorkerRole

PREFILL, DECODE = WorkerRole.PREFILL, WorkerRole.DECODE
STEP = DecodeModel(0.02, 1e-4, 1e-7)
WINDOW_S = SchedulingSettings().scaling_window_s
WARM_S = 2 * WINDOW_S + 30
"""One window in which nothing is removed, and one in which the numbers of the first seconds still count."""


# --- the smallest number


def prompts(load: float, mean: float = 1.0, variation: float = 1.0, slo_s: float = 2.0) -> LoadMeasured:
    return LoadMeasured(load, 0.0, mean, variation, slo_s, 0.0)


def needs(found: LoadMeasured, utilization: float = 0.85) -> Requirement:
    requirement = Requirement(PoolNow(1, 0), utilization)
    requirement.add_prompts(found)
    return requirement


@pytest.mark.parametrize("load", [0.3, 1.7, 6.0, 14.0])
@pytest.mark.parametrize("wait_s", [0.2, 1.0, 4.0])
def test_the_smallest_number_holds_the_slo_in_a_queue_and_one_less_does_not(
    load: float, wait_s: float
) -> None:
    """Erlang's formula against a queue that is played through, with prompts of exponential length."""
    num = needs(prompts(load, 1.0, 2.0, wait_s), 0.999).least()

    def late_share(num: int) -> float:
        random, free_at, now, late = Random(7), [0.0] * num, 0.0, 0
        for _ in range(60_000):
            now += random.expovariate(load)
            first = min(range(num), key=free_at.__getitem__)
            begin = max(now, free_at[first])
            late += begin - now > wait_s
            free_at[first] = begin + random.expovariate(1.0)
        return late / 60_000

    assert late_share(num) <= 1.3 * LATE_SHARE
    if num - 1 > load:
        assert late_share(num - 1) > 0.7 * LATE_SHARE


def test_an_instance_is_not_loaded_beyond_the_setting() -> None:
    assert needs(prompts(8.4, 0.01, slo_s=100.0)).least() == 10
    assert needs(prompts(8.6, 0.01, slo_s=100.0)).least() == 11
    assert "at most 85%" in needs(prompts(8.6, 0.01, slo_s=100.0)).lack(10)
    assert needs(prompts(0.0)).least() == 1


def test_answers_need_as_many_as_the_slo_and_memory_allow() -> None:
    def least(tokens_per_s: float, slo_s: float = 0.04, kv_tokens: float = math.inf) -> int:
        requirement = Requirement(PoolNow(1, 0, step=STEP, kv_tokens=kv_tokens), 0.85)
        requirement.add_answers(LoadMeasured(tokens_per_s, 0.0, 100.0, 1.0, slo_s, 1000.0), 256)
        return requirement.least()

    # 1.15 times the room in steps of 40 ms is for 100 requests of 1,000 tokens: 87, 2,326 tokens a second.
    assert least(1400.0) == 1 and least(3400.0) == 2 and least(19_500.0) == 10
    # 50 of them fit into memory: their steps take 30 ms, 1,667 tokens a second.
    assert least(3400.0, kv_tokens=50_000.0) == 3
    # Without an SLO the limit of a batch counts: 256 in 71 ms, 3,600 tokens a second.
    assert least(6000.0, slo_s=0.0) == 2
    # No number of instances meets an SLO below an empty pool's step, so it counts for nothing.
    assert least(6000.0, slo_s=0.01) == 2


# --- the load


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10_000), st.floats(2.0, 40.0), st.integers(60, 900))
def test_the_load_is_measured_and_its_error_is_stated(seed: int, rate: float, seconds: int) -> None:
    random, load, now = Random(seed), OfferedLoad(), 0.0
    while (now := now + random.expovariate(rate)) < seconds:
        load.add(random.uniform(0.5, 1.5), 0.0, 0.0, now)
    found = load.measure(float(seconds))
    load.check()
    assert abs(found.rate - rate) < 6 * found.error + 0.02 * rate, f"seed {seed}"
    assert found.mean == pytest.approx(1.0, abs=0.3)


def test_a_change_cuts_the_window_and_one_huge_prompt_does_not() -> None:
    load = OfferedLoad()
    for number in range(3000):
        load.add(0.1, 0.0, 0.0, number / 10)
    load.add(20.0, 0.0, 0.0, 290.0)
    assert load.measure(300.0).rate == pytest.approx(1.0 + 20 / 300, rel=0.01)
    for number in range(6000, 6600):
        load.add(0.1, 0.0, 0.0, number / 20)
    assert load.measure(330.0).rate == pytest.approx(2.0, rel=0.1)
    assert load.measure(2000.0).rate == 0.0


# --- decisions


def pool(num: int, **changes: Any) -> dict[WorkerRole, PoolNow]:
    return {PREFILL: PoolNow(num, 0, **changes), DECODE: PoolNow(2, 0)}


def decided(
    signal: ScalingSignal, first_s: float, end_s: float, rate: float, num: int, **changes: Any
) -> list[DesiredChanged]:
    """Let even arrivals of 1 s of prefill each come, with this number of prefill instances."""
    found, now, due = list[DesiredChanged](), first_s, first_s + INTERVAL_S
    signal.started(first_s)
    while now < end_s:
        if rate:
            signal.offered(1.0, 2.0, now)
        now += 1 / rate if rate else INTERVAL_S
        while due <= now:
            found += [one for one in signal.decide(pool(num, **changes), due) if one.role is PREFILL]
            due += INTERVAL_S
            signal.check()
    return found


def desired(signal: ScalingSignal) -> int:
    return next(one.desired for one in signal.status() if one.role is PREFILL)


def test_nothing_is_decided_at_once_and_nothing_removed_in_the_first_window() -> None:
    signal = ScalingSignal(SchedulingSettings())
    assert decided(signal, 0.0, 25.0, 0.5, 4) == [] and desired(signal) == 0
    assert [one.after for one in decided(signal, 25.0, WINDOW_S - 10, 0.5, 4)] == [4]
    assert "not observed for long" in signal.status()[0].reason


def test_time_that_was_not_measured_removes_none_and_no_load_needs_no_measurement() -> None:
    signal = ScalingSignal(SchedulingSettings())
    decided(signal, 0.0, 900.0, 0.5, 4, is_measured=False)
    assert desired(signal) == 4 and "not measured" in signal.status()[0].reason
    decided(signal, 900.0, 4000.0, 0.0, 4, is_measured=False)
    assert desired(signal) == 1


def test_a_silent_cluster_shrinks_by_half_in_a_window() -> None:
    signal = ScalingSignal(SchedulingSettings())
    decided(signal, 0.0, 900.0, 8.0, 12)
    before = desired(signal)
    changes = decided(signal, 900.0, 5000.0, 0.0, before)
    numbers = [before, *(one.after for one in changes)]
    assert numbers[-1] == 1 and all(after >= one / 2 for one, after in pairwise(numbers))


def test_a_step_is_limited() -> None:
    signal = ScalingSignal(SchedulingSettings())
    decided(signal, 0.0, WARM_S, 0.5, 1)
    changes = decided(signal, WARM_S, WARM_S + 100, 60.0, 1)
    assert changes[0].after == changes[0].before + 4 and "most for this step" in changes[0].reason
    assert changes[-1].after == needs(prompts(60.0)).least()


def test_a_request_is_new_once() -> None:
    signal = ScalingSignal(SchedulingSettings())
    assert [signal.is_new(name) for name in ("a", "b", "a", "b")] == [True, True, False, False]
    for number in range(1 << 16):
        assert signal.is_new(f"r{number}")
    assert signal.is_new("a"), "the oldest are forgotten"
    signal.check()


def test_no_more_numbers_are_tried_than_can_be_desired() -> None:
    """A load may be wrong by any factor, and Erlang's formula takes a step for each instance."""
    for load in (1e4, math.inf):
        requirement = Requirement(PoolNow(1, 0), 0.85, 20)
        requirement.add_prompts(prompts(load))
        assert requirement.least() == 20
    signal = ScalingSignal(SchedulingSettings())
    decided(signal, 0.0, WARM_S, 0.5, 1)
    pools = {PREFILL: PoolNow(1, 0), DECODE: PoolNow(2, 0, step=STEP)}
    signal.answer_offered(1e8, 1000.0, 0.0, WARM_S)
    [change] = [one for one in signal.decide(pools, WARM_S) if one.role is DECODE]
    assert change.after == 5 and "more are needed than 5, the most for this step" in change.reason


def test_a_standing_queue_adds_one_when_all_serve_and_it_is_remembered() -> None:
    signal = ScalingSignal(SchedulingSettings())
    decided(signal, 0.0, WARM_S, 2.0, 4)
    num = desired(signal)
    assert decided(signal, WARM_S, WARM_S + 200, 2.0, num - 1, wait_s=9.0) == [], "one is still missing"
    first, *more = decided(signal, WARM_S + 200, WARM_S + 300, 2.0, num, wait_s=9.0)
    assert first.after == num + 1 and "prompts wait 9 s" in first.reason and not more
    assert decided(signal, WARM_S + 300, WARM_S + 1500, 2.0, num + 1) == []
    assert "did not hold work for 2" in signal.status()[0].reason
    decided(signal, WARM_S + 1500, WARM_S + 4500, 2.0, num + 1)
    assert desired(signal) == num, "after an hour the prediction is tried again"


def test_answers_that_are_late_after_the_load_has_ended_prove_nothing_of_a_number() -> None:
    signal = ScalingSignal(SchedulingSettings())
    decided(signal, 0.0, WARM_S, 0.5, 1)
    for number in range(1, 30):
        for _ in range(10):
            signal.served(PREFILL, True)
        decided(signal, WARM_S + number * 20, WARM_S + number * 20 + 20, 0.0, desired(signal))
    assert desired(signal) >= 1
    assert "did not hold" not in signal.status()[0].reason


def test_rejections_add_one_but_never_more_than_twice_what_the_load_needs() -> None:
    signal = ScalingSignal(SchedulingSettings())
    decided(signal, 0.0, WARM_S, 2.0, 4)
    num, now = desired(signal), WARM_S
    for _ in range(200):
        for number in range(40):
            signal.served(PREFILL, number < 20)
        decided(signal, now, now + 20, 2.0, desired(signal))
        now += 20
    assert num < desired(signal) <= 2 * num


def test_one_pool_computes_prompts_and_answers() -> None:
    signal = ScalingSignal(SchedulingSettings())
    for second in range(int(WARM_S)):
        signal.offered(1.5, 0.0, float(second))
        signal.answer_offered(2300.0, 1000.0, 0.04, float(second))
        if second % 5 == 4:
            signal.decide({DECODE: PoolNow(3, 0, step=STEP)}, second + 1.0)
    [row] = signal.status()
    assert row.load == pytest.approx(2.5, rel=0.05) and row.desired == 3
    assert signal.decide({}, WARM_S) == [] and signal.status() == [] and signal.deadline() is None


# --- drawn arrivals

LEVELS = st.tuples(
    st.integers(0, 1 << 30), st.floats(6.0, 40.0), st.floats(0.2, 1.5), st.sampled_from([0, 2])
)


class Arrivals:
    """Poisson arrivals at a signal whose pool follows it after a minute."""

    def __init__(self, seed: int, mean_s: float, shape: int) -> None:
        self.signal = ScalingSignal(SchedulingSettings())
        self.random, self.mean_s, self.shape = Random(seed), mean_s, shape
        self.now, self.num, self.coming = 0.0, 2, list[float]()
        self.signal.started(0.0)

    def run(self, seconds: float, rate: float) -> list[tuple[float, int]]:
        """Changes with their instants, since the beginning of this call."""
        began_at, end, changes = self.now, self.now + seconds, list[tuple[float, int]]()
        at = self.now + self.random.expovariate(rate)
        while self.now < end:
            self.now += INTERVAL_S
            while at <= self.now:
                each = self.random.gammavariate(self.shape, self.mean_s / self.shape) if self.shape else 0.0
                self.signal.offered(each or self.mean_s, 2.0, at)
                at += self.random.expovariate(rate)
            self.num += sum(due <= self.now for due in self.coming)
            self.coming = [due for due in self.coming if due > self.now]
            for one in self.signal.decide({PREFILL: PoolNow(self.num, 0)}, self.now):
                changes.append((self.now - began_at, one.after))
                missing = one.after - self.num - len(self.coming)
                self.coming += [self.now + 60] * max(0, missing)
                self.num = min(self.num, one.after)
            self.signal.check()
        return changes

    @property
    def desired(self) -> int:
        return self.signal.status()[0].desired

    def right(self, rate: float, factor: float) -> int:
        """The smallest number for a part or a multiple of the load."""
        variation = 1 + 1 / self.shape if self.shape else 1.0
        return needs(prompts(rate * self.mean_s, self.mean_s, variation)).least(factor)


@settings(deadline=None, max_examples=8, derandomize=True, phases=[Phase.generate])
@given(LEVELS)
def test_constant_load_changes_nothing_and_others_are_followed(level: tuple[int, float, float, int]) -> None:
    """Half a minute after a change the number holds at least 85 % of the load and at most 130 %: the arrivals
    of so short a time are off by as much."""
    seed, rate, mean_s, shape = level
    world = Arrivals(seed, mean_s, shape)
    world.run(WARM_S, rate)
    low, high = world.right(rate, 0.85), world.right(rate, 1.2)
    assert low <= world.desired <= high + 1, f"{level}"
    steady = world.run(600.0, rate)
    # The largest number of the first window may still be above what is needed: one change, to a right number.
    assert len(steady) == 0 or (len(steady) == 1 and low <= steady[0][1] <= high + 1), f"{level}: {steady}"
    world.run(30.0, 2 * rate)
    assert world.right(rate, 2 * 0.85) <= world.desired <= world.right(rate, 2 * 1.3) + 1, f"{level}"
    world.run(2 * WARM_S, 2 * rate)
    changes = [number for _, number in world.run(1500.0, rate)]
    assert low <= world.desired <= high + 1, f"{level}: {changes}"
    assert len(changes) <= 4, f"{level}: {changes}"


# --- a simulated cluster

COSTS = msgspec.structs.replace(load_costs("llama3-70b-fp8-1xH100"), device_tokens=400_000)
SLO_TTFT_S, SLO_TBT_S = 2.0, 0.035
START_S, SYNC_S = 45.0, 15.0


class ElasticCluster(DisaggregatedCluster):
    """An autoscaler reads the signal every 15 s; an instance serves 45 s after it was wanted."""

    def __init__(self, seed: int, num_prefill: int, num_decode: int, **changes: Any) -> None:
        cluster = ClusterSpec(
            costs=COSTS, num_prefill=num_prefill, num_decode=num_decode, measure_s=1.0, cache_tokens=16384
        )
        given: dict[str, Any] = {"probe_interval_s": 1e12, "slow_start_s": 0.0, "explained_requests": 0}
        given |= {"slo_ttft_s": SLO_TTFT_S, "slo_tbt_s": SLO_TBT_S, "block_tokens": 512, "admission": "none"}
        chosen = SchedulingSettings(**(given | changes))
        super().__init__(cluster, chosen, (SLO_TTFT_S, SLO_TBT_S), seed, None)
        self.members = {PREFILL: [one.id for one in self.prefill], DECODE: [one.id for one in self.decode]}
        self.coming = {PREFILL: 0, DECODE: 0}
        self.seen: list[tuple[float, dict[WorkerRole, int]]] = []
        self.reasons: list[str] = []
        self.lost_at = math.inf
        self.kernel.call_at(INTERVAL_S, self._tick, None)

    def _tick(self, _: object) -> None:
        now = self.kernel.now
        effects = self.conductor.handle(Wake(), now)
        self.reasons += [f"{now:.0f} {one.reason}" for one in effects if isinstance(one, DesiredChanged)]
        rows = {one.role: one for one in self.conductor.scaling.status()}
        self.seen.append((now, {role: row.desired for role, row in rows.items()}))
        if now >= self.lost_at:
            self._lose_one()
        if now % SYNC_S == 0:
            for role, row in rows.items():
                if row.desired:
                    self._follow(role, row.desired)
        if now % 60 == 0:
            self.conductor.check()
        if self.sampler.num_open or self.sampler.has_more:
            self.kernel.call_at(now + INTERVAL_S, self._tick, None)

    def _follow(self, role: WorkerRole, wanted: int) -> None:
        members = self.members[role]
        for _ in range(wanted - len(members) - self.coming[role]):
            self.coming[role] += 1
            self.kernel.call_at(self.kernel.now + START_S, self._start_one, role)
        while len(members) > wanted:
            self.post(Drain(members.pop()))

    def _start_one(self, role: WorkerRole) -> None:
        self.coming[role] -= 1
        if role is PREFILL:
            node = self._prefill_node(len(self.prefill))
            self.prefill.append(node)
            self._prefill_by_id[node.id] = node
            name = node.id
        else:
            decode = self._decode_node(len(self.decode))
            self.decode.append(decode)
            self._decode_by_id[decode.id] = decode
            name = decode.id
        self.members[role].append(name)
        self.join(name, role)

    def _lose_one(self) -> None:
        self.lost_at = math.inf
        name = self.members[PREFILL].pop(0)
        self.post(RemoveInstance(name))
        node = self._prefill_by_id.pop(name)
        assert isinstance(node, PrefillNode)
        for request in node.interrupt():
            if request.prefill_began_at < 0:
                self.sampler.withdrawn(request)
            self.place(request.begin_anew(self.kernel.now))

    def desired(self, role: WorkerRole, first_s: float, end_s: float) -> list[int]:
        """The numbers that were desired between two instants, without repetition."""
        found = [row[role] for at, row in self.seen if first_s <= at <= end_s]
        return [one for number, one in enumerate(found) if not number or found[number - 1] != one]


def arrivals(seed: int, *parts: tuple[float, float]) -> Iterable[TraceRow]:
    """Poisson arrivals, ``(seconds, rate)`` each; a prompt takes 0.45 s on average."""
    random, now, key = Random(seed), 0.0, 0
    yield TraceRow(0.0, 4000, 100, tuple(range(1 << 40, (1 << 40) + 7)))
    for seconds, rate in parts:
        began_at = now
        while rate and (now := now + random.expovariate(rate)) < began_at + seconds:
            num_blocks = random.randint(4, 12)
            yield TraceRow(
                now, num_blocks * 512, random.randint(50, 350), tuple(range(key, key + num_blocks))
            )
            key += num_blocks
        now = began_at + seconds
    yield TraceRow(now, 4000, 100, tuple(range(1 << 41, (1 << 41) + 7)))


def share_in_time(results: RunResults, first_s: float, end_s: float) -> float:
    within = (results.arrival_s >= first_s) & (results.arrival_s < end_s)
    return float((results.ttft_s[within] <= SLO_TTFT_S).mean())


@pytest.mark.parametrize("seed", [1, 5])
def test_a_simulated_cluster_follows_its_load_and_is_steady_under_a_constant_one(seed: int) -> None:
    """Ten minutes of constant load, twice the load, then the first load; the window is shorter than usual."""
    run = ElasticCluster(seed, 2, 2, scaling_window_s=120.0)
    results = run.run(arrivals(seed, (840, 4.0), (300, 8.0), (500, 4.0)), 1.0)
    shown = "\n".join([f"seed {seed}", *run.reasons])
    [before] = run.desired(PREFILL, 240, 840)
    assert len(run.desired(DECODE, 240, 840)) == 1, shown
    doubled = run.desired(PREFILL, 870, 1130)
    assert len(doubled) <= 3 and before < doubled[0] and max(doubled) <= 2 * before, shown
    assert run.desired(DECODE, 240, 840)[0] < run.desired(DECODE, 870, 870)[0], shown
    assert share_in_time(results, 240, 840) > 1 - LATE_SHARE, shown
    assert share_in_time(results, 840, 940) < 0.9, "while instances start, prompts wait"
    assert share_in_time(results, 1060, 1140) > 1 - LATE_SHARE, shown
    for role in (PREFILL, DECODE):
        numbers = run.desired(role, 1140, 1640)
        assert numbers == sorted(numbers, reverse=True) and len(numbers) <= 3, shown
    assert abs(run.desired(PREFILL, 1640, 1640)[0] - before) <= 1, shown
    assert share_in_time(results, 1140, 1640) > 1 - LATE_SHARE, shown


def test_a_lost_instance_is_replaced_and_no_load_leaves_one() -> None:
    run = ElasticCluster(3, 3, 3, scaling_window_s=60.0)
    run.lost_at = 200.0
    results = run.run(arrivals(3, (400, 4.0), (400, 0.0)), 1.0)
    shown = "\n".join(run.reasons)
    [num] = run.desired(PREFILL, 150, 260)
    assert len(run.prefill) == 4 and num == 3, shown
    assert share_in_time(results, 300, 400) > 1 - LATE_SHARE, shown
    assert run.desired(PREFILL, 795, 800) == [1] == run.desired(DECODE, 795, 800), shown
    assert run.members == {PREFILL: ["prefill-1"], DECODE: ["decode-0"]} and not run.conductor.placements

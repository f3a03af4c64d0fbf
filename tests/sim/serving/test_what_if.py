# SPDX-License-Identifier: Apache-2.0
"""Answers about a cluster are compared with clusters that are simulated as they would be."""

from __future__ import annotations

import dataclasses
from random import Random
from typing import Any

import msgspec
import pytest

from mooncake.conductor.prediction import DecodeModel, PrefillModel
from mooncake.conductor.settings import SchedulingSettings
from mooncake.errors import InvalidArgument
from mooncake.recorded_requests import RecordedRequest
from mooncake.sim.serving import simulate
from mooncake.sim.serving.cluster import ClusterSpec
from mooncake.sim.serving.node_costs import NodeCosts
from mooncake.sim.serving.what_if import (
    Change,
    WhatIfAnswer,
    WhatIfQuestion,
    answer_what_if,
    costs_of,
    limit_of_batch,
)
from mooncake.sim.traces.trace import TraceRow

BLOCK = 32
COSTS = NodeCosts(
    title="known",
    source="this test",
    kv_bytes_per_token=1,
    num_layers=1,
    prefill=PrefillModel(0.02, 2e-4, 1e-8),
    decode=DecodeModel(0.01, 2e-3, 1e-7),
    device_tokens=1 << 30,
    cache_tokens=0,
    nic_bytes_per_s=1e12,
    nic_latency_s=0.0,
    ssd_bytes_per_s=1e12,
    device_load_bytes_per_s=1e12,
    decode_makes_first_token=True,
)
SPEC = ClusterSpec(
    costs=COSTS, num_prefill=1, num_decode=1, block_tokens=BLOCK, cache_tokens=3000 * BLOCK, measure_s=1.0
)


def load(num_rows: int, seed: int = 0) -> list[TraceRow]:
    """Sessions whose prompts grow by a few blocks each turn."""
    random, fresh = Random(seed), iter(range(1, 1 << 40))
    keys: dict[int, tuple[int, ...]] = {}
    rows, now = [], 0.0
    for _ in range(num_rows):
        now += random.expovariate(4.0)
        session = random.randrange(60)
        grown = keys.get(session, ()) + tuple(next(fresh) for _ in range(random.randrange(2, 20)))
        keys[session] = grown if len(grown) < 150 else ()
        num_input = len(grown) * BLOCK + random.randrange(1, BLOCK)
        rows.append(TraceRow(now, num_input, random.randrange(20, 120), grown))
    return rows


def recording_of(rows: list[TraceRow], spec: ClusterSpec) -> list[RecordedRequest]:
    """What a gateway before such a cluster would record."""
    found = simulate(rows, spec, "cache_aware")
    recorded = []
    for number, row in enumerate(rows):
        ttft_ms, computed_ms = found.ttft_s[number] * 1e3, found.prefill_gpu_s[number] * 1e3
        num_cached = int(found.cached_tokens[number])
        recorded.append(
            RecordedRequest(
                row.timestamp_s * 1e3,
                row.num_input,
                row.num_output,
                list(row.keys),
                ttft_ms=float(ttft_ms),
                tbt_ms=float(found.tbt_s[number]) * 1e3,
                e2e_ms=float(found.e2e_s[number]) * 1e3,
                cached_tokens=num_cached,
                queued_ms=max(0.0, float(ttft_ms - computed_ms - 13.0)),
                computed_ms=float(computed_ms),
                computed_tokens=row.num_input - num_cached,
                prefill=0,
                decode=int(found.decode_instance[number]),
            )
        )
    return recorded


ROWS = load(400)
RECORDED = recording_of(ROWS, SPEC)


SETTINGS = SchedulingSettings(scheduling="cache_aware", admission="none")


def ask(change: Change, rows: list[RecordedRequest] = RECORDED, **fields: Any) -> WhatIfAnswer:
    question = WhatIfQuestion(rows, BLOCK, 1, 1, SETTINGS, change)
    return answer_what_if(msgspec.structs.replace(question, **fields))


def test_costs_are_found_in_the_requests() -> None:
    found = costs_of(RECORDED, [])
    for first, end in ((0, 500), (1000, 4000)):
        assert found.prefill.seconds(first, end) == pytest.approx(COSTS.prefill.seconds(first, end), rel=0.05)
    for size in (2, 8):
        expected = COSTS.decode.seconds(size, size * 2000)
        assert found.decode.seconds(size, size * 2000) == pytest.approx(expected, rel=0.1)


def test_the_cluster_as_it_is_is_simulated_as_it_was_measured() -> None:
    found = ask(Change(decode=1))
    assert found.rows == len(ROWS)
    assert abs(found.model_error["hit_rate"]) < 0.01
    assert abs(found.model_error["tbt_mean_s"]) < 0.1
    assert abs(found.model_error["e2e_mean_s"]) < 0.1


@pytest.mark.parametrize(
    ("change", "spec"),
    [
        (Change(decode=1), dataclasses.replace(SPEC, num_decode=2)),
        (Change(prefill=1), dataclasses.replace(SPEC, num_prefill=2)),
        (Change(memory=4.0), dataclasses.replace(SPEC, cache_tokens=12_000 * BLOCK)),
    ],
    ids=["decode", "prefill", "memory"],
)
def test_the_effect_is_that_of_making_the_change(change: Change, spec: ClusterSpec) -> None:
    found = ask(change)
    after = simulate(ROWS, spec, "cache_aware")
    assert found.expected["e2e_mean_s"] == pytest.approx(after.summary().e2e_s.mean, rel=0.2)
    assert found.expected["tbt_mean_s"] == pytest.approx(float(after.tbt_mean_s.mean()), rel=0.2)
    assert found.expected["hit_rate"] == pytest.approx(after.summary().hit_rate, abs=0.03)
    for effect in found.effect.values():
        assert effect.low <= effect.value <= effect.high


def test_waiting_for_a_batch_is_understood() -> None:
    """An instance that decodes three answers at a time makes others wait; a second one ends that."""
    narrow = dataclasses.replace(SPEC, max_batch=3)
    slow = [row._replace(timestamp_s=2 * row.timestamp_s) for row in ROWS]
    # At this load no prompt waits for another one: what is not computing is waiting for the batch.
    recorded = [msgspec.structs.replace(row, queued_ms=0.0) for row in recording_of(slow, narrow)]
    notes: list[str] = []
    assert limit_of_batch(recorded, notes) == 3
    assert "3 answers" in notes[0]
    assert limit_of_batch(RECORDED) == 0
    found = ask(Change(decode=1), recorded)
    after = simulate(slow, dataclasses.replace(narrow, num_decode=2), "cache_aware")
    assert found.expected["e2e_mean_s"] == pytest.approx(after.summary().e2e_s.mean, rel=0.2)


def test_no_change_has_no_effect() -> None:
    found = ask(Change())
    assert all(effect.value == 0 for effect in found.effect.values())
    assert found.expected["ttft_mean_s"] == pytest.approx(found.measured.ttft_s.mean)


def test_earlier_requests_only_fill_the_caches() -> None:
    found = ask(Change(load=2.0), since_ms=RECORDED[200].timestamp)
    assert found.rows == 200
    assert found.effect["e2e_mean_s"].value > 0


def test_goodput_counts_what_meets_the_objectives() -> None:
    strict = ask(Change(decode=1), slo_tbt_s=COSTS.decode.seconds(4, 8000))
    assert 0 < strict.measured.goodput_per_s < ask(Change()).measured.goodput_per_s
    assert strict.effect["goodput_per_s"].value > 0


def test_too_few_requests_are_refused_with_their_number() -> None:
    with pytest.raises(InvalidArgument, match="minutes is 'a time with 5 requests'; allowed: a time with 20"):
        ask(Change(), RECORDED[:5])


@pytest.mark.parametrize(
    ("change", "rows"),
    [
        (Change(decode=-1), RECORDED),
        (Change(prefill=-1), RECORDED),
        (Change(), [msgspec.structs.replace(row, status="failed") for row in RECORDED]),
    ],
)
def test_what_cannot_be_answered_is_refused(change: Change, rows: list[RecordedRequest]) -> None:
    with pytest.raises(InvalidArgument):
        ask(change, rows)


TOGETHER = dataclasses.replace(SPEC, mode="chunked_prefix", num_decode=0, cache_tokens=None)
"""One instance that does both, where steps take little of each other's time."""
QUICK = msgspec.structs.replace(
    COSTS,
    prefill=PrefillModel(0.005, 2e-5, 1e-9),
    decode=DecodeModel(0.02, 5e-4, 1e-8),
    device_tokens=1 << 20,
)


def alone(num_rows: int, rate: float) -> list[TraceRow]:
    """Prompts that share nothing, with long answers: some dozens are in progress at a time."""
    random, now = Random(1), 0.0
    rows = []
    for number in range(num_rows):
        now += random.expovariate(rate)
        num_input = random.randrange(600, 1400)
        keys = tuple(range(number * 100, number * 100 + num_input // BLOCK))
        rows.append(TraceRow(now, num_input, random.randrange(300, 500), keys))
    return rows


@pytest.mark.parametrize("change", [Change(decode=1), Change(load=2.0)], ids=["decode", "load"])
def test_instances_that_do_both_have_room_for_what_is_in_progress(change: Change) -> None:
    rows, spec = alone(300, 1.6), dataclasses.replace(TOGETHER, costs=QUICK)
    recorded = recording_of(rows, spec)
    in_progress_s = sum(row.e2e_ms for row in recorded) / 1e3
    assert in_progress_s / rows[-1].timestamp_s > 15
    found = ask(change, recorded, num_prefill=0)
    assert abs(found.model_error["ttft_mean_s"]) < 0.1
    assert abs(found.model_error["e2e_mean_s"]) < 0.05
    after = simulate(
        rows, dataclasses.replace(spec, num_prefill=1 + change.decode), "cache_aware", speedup=change.load
    )
    assert found.expected["ttft_mean_s"] == pytest.approx(after.summary().ttft_s.mean, rel=0.25)
    assert found.expected["e2e_mean_s"] == pytest.approx(after.summary().e2e_s.mean, rel=0.1)
    assert any("memory suffices" in note for note in found.notes) == (change.load > 1)


def test_instances_that_do_both_have_as_many_places_as_now() -> None:
    spec = dataclasses.replace(TOGETHER, costs=QUICK, max_batch=4)
    rows = alone(300, 0.36)
    recorded = [msgspec.structs.replace(row, queued_ms=0.0) for row in recording_of(rows, spec)]
    assert limit_of_batch(recorded) == 4
    found = ask(Change(), recorded, num_prefill=0)
    assert found.measured.ttft_s.mean > 1.0, "most of it is waiting for a place"
    assert abs(found.model_error["ttft_mean_s"]) < 0.1


def test_rejected_requests_are_left_out_of_both_simulations() -> None:
    """A live gateway refused them; as requests of one token they would take prefill's time."""
    rejected = [
        msgspec.structs.replace(row, status="rejected", output_length=0, ttft_ms=0.0, e2e_ms=0.0, tbt_ms=0.0)
        for row in RECORDED[1:-1:2]
    ]
    among = sorted([*RECORDED, *rejected], key=lambda row: row.timestamp)
    found, without = ask(Change(decode=1), among), ask(Change(decode=1))
    assert any("rejected are left out" in note for note in found.notes) and not without.notes
    assert msgspec.structs.replace(found, notes=[]) == msgspec.structs.replace(without, notes=[])


def test_admission_is_the_live_conductor_s() -> None:
    """With three times the load, most prompts would wait: the live rule would not admit them."""
    live = dataclasses.replace(SETTINGS, admission="predicted", slo_ttft_s=2.0, audit_share=0.0)
    found, without = ask(Change(load=3.0), settings=live), ask(Change(load=3.0))
    assert found.changed.num_done < 0.9 * without.changed.num_done == 0.9 * len(ROWS)
    assert found.changed.ttft_s.p90 < 0.5 * without.changed.ttft_s.p90
    (note,) = [one for one in found.notes if "admission by 'predicted' rejects" in one]
    assert f"{len(ROWS) - found.changed.num_done} after the change" in note
    assert not any("admission" in one for one in without.notes)


@pytest.mark.parametrize("num_prefill", [1, 0])
def test_a_rule_that_rejects_what_it_has_admitted_is_left_out(num_prefill: int) -> None:
    """All of these were admitted, so the rule does not see in the simulation what it saw in the cluster."""
    live = dataclasses.replace(SETTINGS, admission="predicted", slo_ttft_s=0.001, audit_share=0.0)
    found = ask(Change(decode=1), settings=live, num_prefill=num_prefill)
    without = ask(Change(decode=1), num_prefill=num_prefill)
    assert found.effect == without.effect and found.effect["e2e_mean_s"].value < -0.1
    (note,) = [one for one in found.notes if "both simulations admit all requests" in one]
    assert note.startswith("admission by 'predicted' would reject 400 of the 400 requests")


def test_a_figure_with_nothing_to_divide_by_has_no_effect() -> None:
    found = ask(Change(decode=1), slo_ttft_s=1e-9)
    assert found.measured.goodput_per_s == found.baseline.goodput_per_s == 0.0
    for figures in (found.effect, found.expected, found.model_error):
        assert "goodput_per_s" not in figures and "e2e_mean_s" in figures
    assert any("no effect is stated on goodput_per_s" in note for note in found.notes)


def test_objectives_of_the_goodput_are_not_those_of_admission() -> None:
    strict = ask(Change(), slo_ttft_s=0.001)
    assert strict.baseline.num_done == len(ROWS), "nothing is rejected for the objectives of the question"
    assert strict.baseline.goodput_per_s == 0.0


def test_no_more_good_requests_are_expected_than_come() -> None:
    """The simulated cluster misses more objectives than the measured one, so the effect on them is larger."""
    lucky = [msgspec.structs.replace(row, tbt_ms=min(row.tbt_ms, 24.0)) for row in RECORDED]
    found = ask(Change(decode=3), lucky, slo_tbt_s=0.03)
    measured, effect = found.measured.goodput_per_s, found.effect["goodput_per_s"].value
    rate = len(ROWS) / (ROWS[-1].timestamp_s - ROWS[0].timestamp_s)
    assert measured * (1 + effect) > 1.2 * rate
    assert found.expected["goodput_per_s"] == pytest.approx(rate)


def test_instances_that_do_both_can_become_more() -> None:
    found = ask(Change(decode=1), num_prefill=0)
    assert found.effect["e2e_mean_s"].value < 0
    with pytest.raises(InvalidArgument, match="every instance"):
        ask(Change(prefill=1), num_prefill=0)


def with_whole(rows: list[RecordedRequest]) -> list[RecordedRequest]:
    """Every second answer came whole: a prefill engine computed its prompt, but no token was seen."""
    return [
        msgspec.structs.replace(row, ttft_ms=0.0, tbt_ms=0.0) if number % 2 else row
        for number, row in enumerate(rows)
    ]


def test_whole_answers_are_simulated_but_not_compared() -> None:
    mixed = with_whole(RECORDED)
    assert costs_of(RECORDED, []).first_token_s > 0
    assert costs_of(mixed, []).first_token_s == pytest.approx(costs_of(RECORDED, []).first_token_s, abs=2e-3)
    assert limit_of_batch(mixed) == 0
    found = ask(Change(decode=1), mixed)
    assert found.rows == found.measured.num_done == found.baseline.num_done == len(ROWS) // 2
    assert found.measured.hit_rate == pytest.approx(found.baseline.hit_rate, abs=0.01)
    assert found.model_error["goodput_per_s"] == 0.0
    assert abs(found.model_error["e2e_mean_s"]) < 0.1
    (note,) = found.notes
    assert note.startswith("200 answers that engines sent whole")


def test_whole_answers_take_places_in_the_batch() -> None:
    slow = [row._replace(timestamp_s=2 * row.timestamp_s) for row in ROWS]
    recorded = recording_of(slow, dataclasses.replace(SPEC, max_batch=3))
    assert limit_of_batch(with_whole([msgspec.structs.replace(row, queued_ms=0.0) for row in recorded])) == 3


def test_whole_answers_alone_are_too_few_requests() -> None:
    whole = [msgspec.structs.replace(row, ttft_ms=0.0, tbt_ms=0.0) for row in RECORDED]
    with pytest.raises(InvalidArgument, match=r"with 0 requests.*, not counting answers that came whole"):
        ask(Change(), whole)

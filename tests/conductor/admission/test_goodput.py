# SPDX-License-Identifier: Apache-2.0
"""Admission under "goodput": of requests that can meet their SLOs and are worth what they would displace."""

from __future__ import annotations

from typing import Any

import pytest

from mooncake.conductor.admission.decode_forecast import DecodeForecast
from mooncake.conductor.admission.goodput import TARGET_BACKLOG, GoodputRule
from mooncake.conductor.admission.result import AdmissionRequest, PoolCapacity
from mooncake.conductor.prediction import DecodeModel

POOLS = PoolCapacity(1, 1, DecodeModel(0.02, 0.002, 1e-6))


def rule() -> GoodputRule:
    return GoodputRule(DecodeForecast(), 30.0, 0.05)


def applicant(name: str = "r", **fields: Any) -> AdmissionRequest:
    """A request that waits 1 s and is computed in 1 s; its SLOs are 10 s and steps of 50 ms."""
    given = {"queue_s": 1.0, "prefill_s": 1.0, "ttft_s": 2.0, "tbt_s": 0.03, "output_tokens": 100}
    return AdmissionRequest(
        name, **{"num_tokens": 1000, "slo_ttft_s": 10.0, "slo_tbt_s": 0.05, **given, **fields}
    )


def test_a_request_that_meets_its_slos_is_admitted_with_its_part_of_both_loads() -> None:
    verdict = rule().decide(applicant(), POOLS, 0.0)
    assert verdict.is_admitted and verdict.prefill_load == pytest.approx(0.2)
    assert 0 < verdict.decode_load < 1 and verdict.tbt_room_s > 0


def test_forecasts_that_were_late_are_allowed_for() -> None:
    goodput = rule()
    nearly = applicant(ttft_s=9.0)
    assert goodput.decide(nearly, POOLS, 0.0).is_admitted
    for _ in range(500):
        goodput.learn(3.0, 0.0)
    verdict = goodput.decide(nearly, POOLS, 1.0)
    assert (verdict.is_admitted, verdict.code) == (False, "slo_ttft")
    assert "predictions may be" in verdict.reason


def test_some_requests_are_admitted_however_wrong_forecasts_were() -> None:
    """Else no samples would be left to correct the forecasts."""
    goodput = rule()
    for _ in range(5000):
        goodput.learn(1000.0, 0.0)
    assert goodput.decide(applicant(ttft_s=TARGET_BACKLOG * 10.0), POOLS, 1.0).is_admitted


def test_steps_that_went_beyond_the_room_leave_less_of_it() -> None:
    goodput = rule()
    first = goodput.decide(applicant("a"), POOLS, 0.0)
    for _ in range(500):
        goodput.learn(0.0, 2.5)
    later = goodput.decide(applicant("b"), POOLS, 1.0)
    assert later.tbt_room_s < first.tbt_room_s
    before = later.tbt_room_s
    for _ in range(500):
        goodput.learn(0.0, 0.1)  # an empty pool is no sample of a full one
    assert goodput.decide(applicant("c"), POOLS, 2.0).tbt_room_s == pytest.approx(before)
    goodput.check()


def test_the_worst_moment_of_its_stay_counts_not_the_first() -> None:
    decode_forecast = DecodeForecast()
    goodput = GoodputRule(decode_forecast, 30.0, 0.05)
    for number in range(12):  # they decode from 4 s on, and this one from 1 s
        decode_forecast.expect(f"d{number}", 4.0, 1000, 0.0)
    verdict = goodput.decide(applicant(ttft_s=1.0), POOLS, 0.0)
    assert (verdict.is_admitted, verdict.code) == (False, "slo_tbt")
    assert verdict.retry_after_s > 0


def test_a_context_must_lie_whole_in_one_instance() -> None:
    """Half of its memory in each of two instances does not hold it."""
    decode_forecast = DecodeForecast()
    pools = PoolCapacity(1, 2, DecodeModel(0.001, 0.0, 0.0), kv_tokens=10_000)
    goodput = GoodputRule(decode_forecast, 30.0, 0.05)
    for number in range(2):
        decode_forecast.expect(f"d{number}", 0.0, 6_000, 0.0)
        decode_forecast.started(f"d{number}", 0.0)
    wide = applicant(num_tokens=6_000, ttft_s=0.0, output_tokens=1)
    verdict = goodput.decide(wide, pools, 0.0)
    assert (verdict.is_admitted, verdict.code) == (False, "slo_tbt") and "memory" in verdict.reason
    assert goodput.decide(applicant(num_tokens=3_000, ttft_s=0.0, output_tokens=1), pools, 0.0).is_admitted


def test_in_overload_the_cheaper_of_equal_value_goes_first() -> None:
    goodput = rule()
    verdicts = {}
    for number in range(400):  # ten times what one instance can compute, with a queue at its target length
        now = number * 0.1
        cost_s = 0.1 if number % 2 else 2.0
        one = applicant(str(number), prefill_s=cost_s, queue_s=5.0, ttft_s=5.0 + cost_s, slo_tbt_s=0.0)
        verdicts[number] = goodput.decide(one, POOLS, now)
    late = range(300, 400)
    cheap = sum(verdicts[number].is_admitted for number in late if number % 2)
    expensive = sum(verdicts[number].is_admitted for number in late if not number % 2)
    assert cheap > 40 and 0 <= expensive < 10
    refused = next(verdicts[number] for number in late if not verdicts[number].is_admitted)
    assert refused.code == "overload" and refused.retry_after_s > 0


def test_a_level_of_priority_is_worth_twice_as_much() -> None:
    goodput = rule()
    admitted = {0: 0, -1: 0}
    for number in range(800):
        now, priority = number * 0.1, -(number % 2)
        one = applicant(str(number), prefill_s=0.5, queue_s=5.0, ttft_s=5.5, slo_tbt_s=0.0, priority=priority)
        admitted[priority] += goodput.decide(one, POOLS, now).is_admitted and number >= 400
    assert admitted[-1] > 2 * admitted[0]

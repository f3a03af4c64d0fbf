# SPDX-License-Identifier: Apache-2.0
"""The rules of admission at their limits, and compared in a small simulation on virtual time.

Under "goodput", of the requests that can meet their SLOs those are admitted that are worth what they would
displace: the price of a second, and the turns of classes.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Any

import pytest

from mooncake.conductor.admission import (
    TARGET_BACKLOG,
    AdmissionController,
    AdmissionRequest,
    AdmissionResult,
    ForecastErrors,
    GoodputRule,
    PoolCapacity,
    Rule,
    ShadowPrice,
)
from mooncake.conductor.decode_forecast import DecodeForecast
from mooncake.conductor.keyed_prompt import KeyedPrompt
from mooncake.conductor.prediction import DecodeModel

STEP = DecodeModel(0.02, 0.002, 1e-6)
POOLS = PoolCapacity(1, 1, STEP)


def applicant(name: str = "r", **fields: Any) -> AdmissionRequest:
    """A request that waits 2 s and is computed in 1 s; its SLOs are 10 s and steps of 50 ms."""
    given = {"queue_s": 2.0, "prefill_s": 1.0, "ttft_s": 3.0, "tbt_s": 0.03}
    return AdmissionRequest(
        name, **{"num_tokens": 1000, "slo_ttft_s": 10.0, "slo_tbt_s": 0.05, **given, **fields}
    )


def decoding(admission: AdmissionController, num: int, now: float = 0.0) -> None:
    """Let ``num`` requests decode."""
    for number in range(num):
        verdict = admission.decide(applicant(f"d{number}", ttft_s=0.0, slo_tbt_s=0.0), POOLS, now)
        assert verdict.is_admitted and admission.prefilled(f"d{number}", POOLS, now).is_admitted


@pytest.mark.parametrize("rule", ["baseline", "early", "predicted", "goodput"])
def test_a_deadline_that_cannot_be_met_is_refused_with_the_time_the_queue_needs(rule: Rule) -> None:
    admission = AdmissionController(rule)
    late = applicant(queue_s=12.0, prefill_s=1.0, ttft_s=13.0)
    verdict = admission.decide(late, POOLS, 0.0)
    assert (verdict.is_admitted, verdict.code) == (False, "slo_ttft")
    assert verdict.retry_after_s == pytest.approx(3.0), "13 s become 10 s when 3 s of queue are gone"
    for number in ("13 s", "12 s", "1 s", "10 s"):
        assert number in verdict.reason
    assert admission.decide(applicant(queue_s=9.0, ttft_s=10.0), POOLS, 3.0).is_admitted, "as promised"
    assert admission.num_rejected == {"slo_ttft": 1}


def test_a_prompt_too_long_for_its_deadline_is_refused_with_the_reason() -> None:
    verdict = AdmissionController("early").decide(applicant(prefill_s=15.0, ttft_s=17.0), POOLS, 0.0)
    assert "even without a queue" in verdict.reason
    assert verdict.retry_after_s == pytest.approx(2.0), "when the queue is gone"


def test_none_admits_everything_and_no_slo_means_no_deadline() -> None:
    assert AdmissionController("none").decide(applicant(ttft_s=1e6), POOLS, 0.0).is_admitted
    for rule in ("baseline", "early", "predicted", "goodput"):
        wishless = applicant(ttft_s=1e6, slo_ttft_s=0.0, slo_tbt_s=0.0)
        assert AdmissionController(rule).decide(wishless, POOLS, 0.0).is_admitted


def test_early_checks_decode_now() -> None:
    admission = AdmissionController("early")
    decoding(admission, 9)  # 20 ms + 9 * 3 ms
    assert admission.decide(applicant("fits"), POOLS, 0.0).is_admitted
    decoding(admission, 10)
    verdict = admission.decide(applicant(), POOLS, 0.0)
    assert (verdict.is_admitted, verdict.code) == (False, "slo_tbt")
    assert "10 requests are decoding" in verdict.reason and "53 ms" in verdict.reason
    # Ten leave in ten seconds (the first guess), one must.
    assert verdict.retry_after_s == pytest.approx(1.0)


def test_memory_is_a_limit_like_time() -> None:
    """Ten contexts of 1,000 tokens are in memory for ten."""
    pools = PoolCapacity(1, 1, DecodeModel(0.001, 0.0, 0.0), kv_tokens=10_500)
    for rule in ("early", "predicted", "goodput"):
        admission = AdmissionController(rule)
        for number in range(10):
            one = applicant(str(number), ttft_s=0.0)
            assert admission.decide(one, pools, 0.0).is_admitted
            admission.prefilled(str(number), pools, 0.0)
        verdict = admission.decide(applicant(ttft_s=0.0), pools, 0.0)
        assert (verdict.is_admitted, verdict.code) == (False, "slo_tbt")
        assert "105% of the decode instances' memory" in verdict.reason
        assert verdict.retry_after_s > 0


def test_predicted_checks_decode_at_the_end_of_prefill() -> None:
    admission = AdmissionController("predicted")
    decoding(admission, 10)
    assert not admission.decide(applicant(ttft_s=3.0), POOLS, 0.0).is_admitted
    # They stay ten seconds: after that there is room.
    assert admission.decide(applicant(ttft_s=10.0), POOLS, 0.5).is_admitted


def test_predicted_includes_requests_still_in_prefill() -> None:
    rules: list[Rule] = ["early", "predicted"]
    admissions = [AdmissionController(rule) for rule in rules]
    for admission in admissions:
        for number in range(10):
            assert admission.decide(applicant(str(number)), POOLS, 0.0).is_admitted
    verdicts = [admission.decide(applicant(), POOLS, 0.0) for admission in admissions]
    assert [verdict.is_admitted for verdict in verdicts] == [True, False]
    assert verdicts[1].retry_after_s == pytest.approx(10.0, abs=0.2), (
        "the first of them leaves after its stay"
    )


@pytest.mark.parametrize("rule", ["baseline", "early", "predicted"])
def test_decode_is_checked_again_when_the_prompt_is_computed(rule: Rule) -> None:
    """More requests than forecast may have arrived meanwhile."""
    admission = AdmissionController(rule)
    assert admission.decide(applicant(), POOLS, 0.0).is_admitted
    decoding(admission, 10)
    verdict = admission.prefilled("r", POOLS, 3.0)
    assert (verdict.is_admitted, verdict.code) == (False, "slo_tbt")
    assert verdict.retry_after_s > 0
    assert admission.decode_forecast.decoding.num_requests == 10
    admission.check()


@pytest.mark.parametrize("rule", ["baseline", "early", "predicted"])
def test_an_audited_request_is_not_rejected_later(rule: Rule) -> None:
    """The audit measures its outcome without the rejection; the second check would reject every one."""
    admission = AdmissionController(rule, audit_share=1.0)
    if rule == "baseline":  # which checks decode only when the prompt is computed
        late = {"queue_s": 12.0, "ttft_s": 13.0}
    else:
        late = {}
        decoding(admission, 10)
    verdict = admission.decide(applicant("audited", **late), POOLS, 0.0)
    assert verdict.is_admitted and verdict.is_audited
    decoding(admission, 10)
    assert admission.prefilled("audited", POOLS, 3.0).is_admitted
    admission.finished("audited", 3.0, 0.03, True, 9.0)
    assert (admission.audit.num_admitted, admission.audit.num_ended, admission.audit.num_in_slo) == (1, 1, 1)
    admission.check()


def test_goodput_rejects_no_request_whose_prompt_is_computed() -> None:
    admission = AdmissionController("goodput")
    assert admission.decide(applicant(), POOLS, 0.0).is_admitted
    decoding(admission, 10)
    assert admission.prefilled("r", POOLS, 3.0).is_admitted


def test_goodput_needs_the_memory_of_one_instance() -> None:
    """Free memory in two of them can't hold one context."""
    pools = PoolCapacity(1, 2, DecodeModel(0.001, 0.0, 0.0), kv_tokens=2_400)
    verdicts = {}
    rules: list[Rule] = ["predicted", "goodput"]
    for rule in rules:
        admission = AdmissionController(rule)
        decoding(admission, 3)  # of 1,000 tokens each
        verdicts[rule] = admission.decide(applicant(ttft_s=0.0), pools, 0.0)
    assert verdicts["predicted"].is_admitted and verdicts["goodput"].code == "slo_tbt", verdicts
    assert "memory" in verdicts["goodput"].reason


def test_waits_for_memory_do_not_count_as_long_steps() -> None:
    admission = AdmissionController("goodput")
    short_of_memory = PoolCapacity(1, 1, DecodeModel(0.001, 0.001, 0.0), kv_tokens=3_000)
    assert admission.decide(applicant(), short_of_memory, 0.0).tbt_room_s == 0.0
    assert admission.decide(applicant(), POOLS, 0.0).tbt_room_s > 0.0


def test_a_second_report_of_the_same_prefill_changes_nothing() -> None:
    admission = AdmissionController("early")
    admission.decide(applicant(), POOLS, 0.0)
    admission.prefilled("r", POOLS, 1.0)
    admission.prefilled("r", POOLS, 2.0)
    assert admission.decode_forecast.decoding.num_requests == 1
    assert admission.prefilled("unknown", POOLS, 2.0).is_admitted


def test_audit_admits_a_share_and_counts_its_outcomes() -> None:
    admission = AdmissionController("early", audit_share=0.25)
    late = [admission.decide(applicant(str(number), ttft_s=20.0), POOLS, 0.0) for number in range(8)]
    audited = [number for number, verdict in enumerate(late) if verdict.is_audited]
    assert len(audited) == 2 == admission.audit.num_admitted
    assert all(late[number].is_admitted and late[number].code == "slo_ttft" for number in audited)
    assert admission.num_rejected == {"slo_ttft": 8}, "an audited one was rejected, too"
    for number, ttft_s in zip(audited, (9.0, 21.0), strict=True):
        admission.prefilled(str(number), POOLS, ttft_s)
        admission.finished(str(number), ttft_s, 0.03, True, ttft_s + 1)
    assert (admission.audit.num_ended, admission.audit.num_in_slo) == (2, 1)


def test_an_audited_answer_whose_times_are_unknown_is_no_outcome() -> None:
    admission = AdmissionController("early", audit_share=1.0)
    for name in ("whole", "failed"):
        assert admission.decide(applicant(name, ttft_s=30.0, slo_ttft_s=10.0), POOLS, 0.0).is_audited
    admission.finished("whole", 0.0, 0.0, True, 40.0, 100)
    assert admission.audit.num_ended == 0
    admission.finished("failed", 0.0, 0.0, False, 40.0)
    assert (admission.audit.num_ended, admission.audit.num_in_slo) == (1, 0)
    admission.check()


def test_goodput_learns_how_late_its_forecasts_are() -> None:
    admission = AdmissionController("goodput")
    for number in range(300):
        now = number * 10.0
        admission.decide(applicant(str(number), queue_s=3.0, ttft_s=4.0), POOLS, now)
        admission.prefilled(str(number), POOLS, now + 6.0)
        admission.finished(str(number), 6.0, 0.03, True, now + 7.0)  # 4 s were predicted
    verdict = admission.decide(applicant(ttft_s=9.0, queue_s=8.0), POOLS, 3010.0)
    assert not verdict.is_admitted and "short" in verdict.reason
    assert admission.decide(applicant(ttft_s=7.0, queue_s=6.0), POOLS, 3010.0).is_admitted
    admission.check()


@pytest.mark.parametrize(("num_output_tokens", "is_learned"), [(40, False), (41, True), (0, True)])
def test_goodput_learns_no_steps_from_answers_of_a_few_tokens(
    num_output_tokens: int, is_learned: bool
) -> None:
    admission = AdmissionController("goodput")
    for number in range(200):
        now = number * 10.0
        admission.decide(applicant(str(number)), POOLS, now)
        admission.prefilled(str(number), POOLS, now + 3.0)
        admission.finished(str(number), 3.0, 0.2, True, now + 4.0, num_output_tokens)
    there = [applicant(f"more{number}") for number in range(20)]
    num_admitted = sum(admission.decide(one, POOLS, 3000.0).is_admitted for one in there)
    # A request adds 3 ms to a step: ten fit into the 30 ms beside an empty pool's step. As long as nothing is
    # learned, 1 / (1 + 0.67 / sqrt(10)) of them are filled, at least 1/3.
    assert num_admitted == (3 if is_learned else 8)
    admission.check()


def test_goodput_recovers_after_a_time_of_wrong_forecasts() -> None:
    """Else no request would be admitted whose outcome could show that they are right again."""
    admission = AdmissionController("goodput")
    for number in range(100):
        learn(admission.goodput, 3600.0)
        assert admission.decide(applicant(f"soon{number}"), POOLS, float(number)).is_admitted
        admission.forget(f"soon{number}")
    verdict = admission.decide(applicant("late", queue_s=5.0, ttft_s=6.0), POOLS, 100.0)
    assert verdict.code == "slo_ttft" and "5 s short" in verdict.reason
    assert verdict.retry_after_s == pytest.approx(1.0)


def test_goodput_prefers_value_per_second_and_reports_the_limit() -> None:
    admission, random = AdmissionController("goodput"), Random(1)
    verdicts: dict[tuple[float, int], list[AdmissionResult]] = {}
    now = 0.0
    for number in range(3000):
        now += 0.1
        # Almost 6 s of prefill are demanded per second of one instance.
        cost_s, priority = random.choice([(0.1, 0), (0.8, 0), (0.8, -2)])
        one = applicant(str(number), prefill_s=cost_s, queue_s=5.0, ttft_s=5.0 + cost_s, slo_tbt_s=0.0)
        verdict = admission.decide(AdmissionRequest(**{**_fields(one), "priority": priority}), POOLS, now)
        if number > 1000:
            verdicts.setdefault((cost_s, priority), []).append(verdict)
        admission.finished(str(number), 0.0, 0.0, False, now)
    shares = {key: sum(one.is_admitted for one in found) / len(found) for key, found in verdicts.items()}
    assert shares[0.1, 0] > 0.95
    assert shares[0.8, 0] < 0.2
    assert shares[0.8, -2] > 2 * shares[0.8, 0], "four times the value"
    refused = next(one for one in verdicts[0.8, 0] if not one.is_admitted)
    assert refused.code == "overload" and "0.8 s of the prefill instances" in refused.reason
    assert refused.retry_after_s > 0
    assert any(one.is_admitted for one in verdicts[0.8, 0]), "none starves"


def _fields(one: AdmissionRequest) -> dict[str, Any]:
    return {name: getattr(one, name) for name in one.__slots__}


@dataclass
class World:
    """A minimal simulation: prefill instances with queues, decode steps that grow with their requests."""

    admission: AdmissionController
    num_prefill: int
    num_decode: int
    slo_ttft_s: float
    slo_tbt_s: float
    step: DecodeModel
    num_good: int = 0
    num_rejected: int = 0
    wasted_s: float = 0.0
    free_at: list[float] = field(default_factory=list)
    running: list[dict[int, list[float]]] = field(default_factory=list)

    def run(self, arrivals: list[tuple[float, float, int, int]]) -> World:
        """``arrivals``: instant, seconds of prefill, tokens, tokens of output."""
        self.free_at = [0.0] * self.num_prefill
        self.running = [
            {} for _ in range(self.num_decode)
        ]  # request -> [tokens left, tokens, longest step, ttft]
        pools = PoolCapacity(self.num_prefill, self.num_decode, self.step)
        seen_at = [0.0] * self.num_decode
        events: list[tuple[float, int, int, int]] = [
            (row[0], 0, number, 0) for number, row in enumerate(arrivals)
        ]
        heapq.heapify(events)
        versions = [0] * self.num_decode
        while events:
            now, kind, which, version = heapq.heappop(events)
            if kind == 0:
                _, cost_s, num_tokens, _ = arrivals[which]
                instance = min(range(self.num_prefill), key=lambda one: self.free_at[one])
                queue_s = max(0.0, self.free_at[instance] - now)
                name, ttft_s = str(which), queue_s + cost_s
                one = AdmissionRequest(
                    name, num_tokens, queue_s, cost_s, ttft_s, 0.0, 0, self.slo_ttft_s, self.slo_tbt_s
                )
                if not self.admission.decide(one, pools, now).is_admitted:
                    self.num_rejected += 1
                    continue
                self.free_at[instance] = now + ttft_s
                heapq.heappush(events, (now + ttft_s, 1, which, 0))
                continue
            if kind == 1:
                if not self.admission.prefilled(str(which), pools, now).is_admitted:
                    self.num_rejected += 1
                    self.wasted_s += arrivals[which][1]
                    continue
                instance = min(range(self.num_decode), key=self._step_s)
                self._advance(instance, now, seen_at)
                _, _, num_tokens, num_output = arrivals[which]
                ttft_s = now - arrivals[which][0]
                self.running[instance][which] = [num_output, num_tokens, 0.0, ttft_s]
            else:
                instance = which
                if version != versions[instance]:
                    continue
                self._advance(instance, now, seen_at)
                ended = [key for key, row in self.running[instance].items() if row[0] < 1e-6]
                for key in ended:
                    _, _, tbt_s, ttft_s = self.running[instance].pop(key)
                    self.num_good += ttft_s <= self.slo_ttft_s and tbt_s <= self.slo_tbt_s
                    self.admission.finished(str(key), ttft_s, tbt_s, True, now)
            versions[instance] += 1
            if self.running[instance]:
                left = min(row[0] for row in self.running[instance].values())
                ends_at = now + left * self._step_s(instance)
                heapq.heappush(events, (ends_at, 2, instance, versions[instance]))
        self.admission.check()
        return self

    def _step_s(self, instance: int) -> float:
        there = self.running[instance].values()
        return self.step.seconds(len(there), sum(row[1] for row in there))

    def _advance(self, instance: int, now: float, seen_at: list[float]) -> None:
        step_s = self._step_s(instance)
        for row in self.running[instance].values():
            row[0] -= (now - seen_at[instance]) / step_s
            row[2] = max(row[2], step_s)
        seen_at[instance] = now


def overload(seed: int, num_requests: int = 2500) -> list[tuple[float, float, int, int]]:
    """Twice the capacity of 4 prefill and 2 decode instances: prompts of very different lengths, in waves."""
    random, now, rows = Random(seed), 0.0, []
    for number in range(num_requests):
        rate = 14.0 if number // 250 % 2 else 6.0
        now += random.expovariate(rate)
        num_tokens = min(100_000, int(random.lognormvariate(8.6, 1.1)))
        cost_s = 1.1e-4 * num_tokens + 7.4e-10 * num_tokens**2
        rows.append((now, cost_s, num_tokens, max(1, int(random.expovariate(1 / 300)))))
    return rows


@pytest.mark.parametrize("seed", [1, 2])
def test_goodput_completes_more_within_its_slos(seed: int) -> None:
    step = DecodeModel(0.026, 0.00014, 3.5e-8)
    rules: list[Rule] = ["none", "baseline", "early", "predicted", "goodput"]
    arrivals = overload(seed)
    worlds = {rule: World(AdmissionController(rule), 4, 2, 20.0, 0.06, step).run(arrivals) for rule in rules}
    good = {rule: world.num_good for rule, world in worlds.items()}
    assert good["goodput"] > max(good[rule] for rule in rules[:-1]), f"prefill is scarce: {good}"
    # Where decode is scarce and prefill is not, a late check costs nothing and needs no forecast: the paper's
    # rules complete more there, and waste the prompts they reject.
    worlds = {rule: World(AdmissionController(rule), 4, 1, 20.0, 0.06, step).run(arrivals) for rule in rules}
    assert worlds["goodput"].num_good > 4 * worlds["none"].num_good, "decode is scarce"
    assert worlds["baseline"].wasted_s > worlds["early"].wasted_s > 0 == worlds["goodput"].wasted_s


def test_a_request_that_finds_decode_full_counts_as_demand() -> None:
    """A price that only counts requests that fit is zero in the worst overload."""
    admission = AdmissionController("goodput")
    decoding(admission, 12)
    for number in range(200):
        assert admission.decide(applicant(str(number)), POOLS, number * 0.02).code == "slo_tbt"
    assert admission.goodput.decode_price.rate(4.0) > POOLS.num_decode


def test_the_price_of_decode_is_that_of_its_memory_where_that_is_scarce() -> None:
    """Steps cost next to nothing; a context takes a tenth of the memory for ten seconds: one second."""
    pools = PoolCapacity(1, 1, DecodeModel(0.001, 0.0, 0.0), kv_tokens=10_000)
    admission = AdmissionController("goodput", horizon_s=1.0)
    assert admission.decide(applicant(ttft_s=0.0), pools, 0.0).is_admitted
    assert admission.goodput.decode_price.rate(0.0) == pytest.approx(1.0, rel=0.05)


def test_an_answer_that_has_begun_is_no_longer_rejected() -> None:
    admission = AdmissionController("baseline")
    assert admission.decide(applicant(), POOLS, 0.0).is_admitted
    decoding(admission, 10)
    assert admission.prefilled("r", POOLS, 3.0, has_begun=True).is_admitted
    assert admission.decode_forecast.decoding.num_requests == 11, "it decodes with the others"
    assert not admission.num_rejected
    admission.check()


# --- the rule "goodput"


def rule() -> GoodputRule:
    return GoodputRule(DecodeForecast(), 30.0, 0.05)


def one_ahead(name: str = "r", **fields: Any) -> AdmissionRequest:
    """A request that waits 1 s and is computed in 1 s; its SLOs are 10 s and steps of 50 ms."""
    given = {"queue_s": 1.0, "prefill_s": 1.0, "ttft_s": 2.0, "tbt_s": 0.03, "output_tokens": 100}
    return AdmissionRequest(
        name, **{"num_tokens": 1000, "slo_ttft_s": 10.0, "slo_tbt_s": 0.05, **given, **fields}
    )


def learn(goodput: GoodputRule, late_s: float, over: float = 0.0) -> None:
    """Let it learn from a request behind a queue, which came so much later than predicted."""
    ahead = one_ahead(queue_s=4.0, ttft_s=5.0)
    goodput.learn(ahead, ahead.ttft_s + late_s, over, 0.0)


def test_a_request_that_meets_its_slos_is_admitted_with_its_part_of_both_loads() -> None:
    verdict = rule().decide(one_ahead(), POOLS, 0.0)
    assert verdict.is_admitted and verdict.prefill_load == pytest.approx(0.2)
    assert 0 < verdict.decode_load < 1 and verdict.tbt_room_s > 0


def test_forecasts_that_were_late_are_allowed_for() -> None:
    goodput = rule()
    nearly = one_ahead(ttft_s=9.0)
    assert goodput.decide(nearly, POOLS, 0.0).is_admitted
    for _ in range(500):
        learn(goodput, 3.0)
    verdict = goodput.decide(nearly, POOLS, 1.0)
    assert (verdict.is_admitted, verdict.code) == (False, "slo_ttft")
    assert "predictions may be" in verdict.reason


def test_the_chance_of_a_first_token_counts_the_last_errors() -> None:
    """Those of long ago are forgotten."""
    errors = ForecastErrors()
    assert errors.chance(0.0) == 1.0
    for late_s in (*[9.0] * 50, *[-1.0] * 10, *[2.0] * 10):
        errors.learn(late_s, one_ahead(ttft_s=0.1), 0.0)
    assert [errors.chance(slack_s) for slack_s in (-2.0, -1.0, 1.9, 2.0)] == [0.0, 0.5, 0.5, 1.0]
    assert errors.margin_s(10.0, 0.5, 0.0) == 0.0, "they were not behind a queue"


@pytest.mark.parametrize(
    ("late_s", "margin_s"),
    [
        ([], 0.0),
        ([-3.0, -1.0, 0.0], 0.0),
        ([1.0] * 20, 1.0),
        ([0.5] * 10 + [1.0] * 10, 1.0),  # half of them for half a second of the queue
        ([0.5] * 19 + [6.0], 0.5),  # one of them for most of it
        ([-1.0] * 10 + [6.0] * 10, 0.0),
        ([-1.0] * 10 + [4.0] * 10, 4.0),
        ([10.0, 99.0, 10.0, 10.0], 10.0),
        ([9.0, 9.0, 9.0], 0.0),  # too few to say anything
    ],
)
def test_a_margin_gains_more_requests_than_its_part_of_the_queue(
    late_s: list[float], margin_s: float
) -> None:
    errors = ForecastErrors()
    for one in late_s:
        errors.learn(one, one_ahead(ttft_s=5.0, prefill_s=0.5), 100.0)
    assert errors.margin_s(10.0, 0.5, 200.0) == pytest.approx(margin_s)
    assert errors.margin_s(1.0, 0.5, 200.0) == pytest.approx(margin_s / 10.0), "in proportion to the queue"
    assert errors.margin_s(10.0, 0.5, 500.0) == 0.0, "that was long ago"


def test_a_long_prompt_s_errors_say_nothing_of_a_short_one() -> None:
    """Long ones are overtaken."""
    errors = ForecastErrors()
    for _ in range(10):
        errors.learn(4.0, one_ahead(ttft_s=5.0, prefill_s=2.0), 100.0)
    assert errors.margin_s(10.0, 2.0, 101.0) == errors.margin_s(10.0, 0.3, 101.0) == pytest.approx(4.0)
    assert errors.margin_s(10.0, 0.2, 101.0) == errors.margin_s(10.0, 17.0, 101.0) == 0.0


def test_those_admitted_although_they_would_be_late_teach_nothing() -> None:
    goodput = rule()
    for _ in range(20):
        goodput.learn(one_ahead(queue_s=0.0, prefill_s=15.0, ttft_s=15.0), 25.0, 0.0, 0.0)
    assert goodput.decide(one_ahead(ttft_s=9.9, queue_s=8.9), POOLS, 1.0).is_admitted


def test_a_prompt_that_its_length_makes_unlikely_is_served_while_there_is_room() -> None:
    goodput = rule()
    for _ in range(20):
        learn(goodput, 1.5)
    assert goodput.decide(one_ahead(queue_s=8.0, ttft_s=9.0), POOLS, 1.0).code == "slo_ttft"
    assert goodput.decide(one_ahead(queue_s=0.0, prefill_s=9.0, ttft_s=9.0), POOLS, 1.0).is_admitted


def test_a_likely_request_is_worth_more_than_an_unlikely_one() -> None:
    """In overload the price then rejects the one whose first token may be late."""
    goodput, num_admitted = rule(), {5.0: 0, 1.0: 0}
    for number in range(400):
        learn(goodput, 4.0 if number % 4 == 0 else 0.0)
        slack_s = 1.0 if number % 2 else 5.0
        ahead = one_ahead(str(number), ttft_s=10.0 - slack_s, queue_s=4.0)
        num_admitted[slack_s] += goodput.decide(ahead, POOLS, number * 0.5).is_admitted
    goodput.check()
    assert 0 < num_admitted[1.0] < num_admitted[5.0]


def test_a_prompt_that_its_own_length_makes_late_is_served_while_there_is_room() -> None:
    """A session whose prompt has grown so long would be rejected at each turn, on idle machines too."""
    goodput, endless = rule(), one_ahead("long", queue_s=0.0, prefill_s=15.0, ttft_s=15.0)
    assert goodput.decide(endless, POOLS, 0.0).is_admitted
    assert goodput.decide(endless, POOLS, 1.0).code == "slo_ttft", "the only instance has one"
    assert goodput.decide(endless, POOLS, 200.0).is_admitted
    behind = one_ahead("behind", queue_s=6.0, prefill_s=15.0, ttft_s=21.0)
    assert goodput.decide(behind, POOLS, 400.0).code == "slo_ttft", "others wait"
    three = PoolCapacity(3, 1, STEP)
    for number in range(400):
        goodput.decide(one_ahead(str(number)), three, 400.0 + number)
    assert goodput.decide(endless, three, 800.0).is_admitted, "the others take one instance of three"
    for number in range(400):
        goodput.decide(one_ahead(str(number)), three, 800.0 + 0.5 * number)
    verdict = goodput.decide(endless, three, 1000.0)
    assert (verdict.is_admitted, verdict.code) == (
        False,
        "slo_ttft",
    ) and "even without a queue" in verdict.reason
    goodput.check()


def test_a_prompt_whose_computing_was_refused_before_is_computed_for_those_that_come_after() -> None:
    """Else a prefix that is too long to be computed in time is refused to each of those that share it."""
    goodput, common = rule(), range(100)
    for number in range(200):
        goodput.decide(one_ahead(str(number)), POOLS, number * 3.0)

    def sharing(name: int, num_cached: int = 0, **fields: Any) -> AdmissionResult:
        prompt = KeyedPrompt([*common, *range(1000 * name, 1000 * name + 10)], num_cached)
        given = {"queue_s": 0.0, "prefill_s": 15.0, "ttft_s": 15.0, **fields}
        return goodput.decide(one_ahead(str(name), **given), POOLS, 600.0, prompt)

    assert sharing(1).code == "slo_ttft", "the machine is busy with others"
    assert sharing(2, queue_s=6.0, ttft_s=21.0).code == "slo_ttft", "others wait"
    assert sharing(3).is_admitted, "the prefix was wanted before"
    assert sharing(4).code == "slo_ttft", "it is being computed"
    assert sharing(5, num_cached=100).code == "slo_ttft", "what it adds itself was not wanted before"
    goodput.check()


def test_in_overload_a_prompt_is_computed_for_others_only_if_enough_want_it() -> None:
    goodput, now = rule(), 0.0
    for number in range(600):
        now += 0.1
        goodput.decide(one_ahead(str(number), queue_s=4.9, prefill_s=0.5, ttft_s=5.4), POOLS, now)
    assert goodput.prefill_price.rate(now) > 2.0, "an overload"
    long = one_ahead("long", queue_s=4.9, prefill_s=15.0, ttft_s=19.9)
    prompts = [KeyedPrompt([*range(50), 1000 + number]) for number in range(60)]
    codes = [goodput.decide(long, POOLS, now, prompt).code for prompt in prompts]
    wanted = codes.index("admitted")
    assert codes[0] == "slo_ttft" and set(codes[1:wanted]) == {"overload"}
    assert wanted > 15, "as many at least as short ones are computed in its time"
    goodput.check()


def test_some_requests_are_admitted_however_wrong_forecasts_were() -> None:
    """Else no samples would be left to correct the forecasts."""
    goodput = rule()
    for _ in range(5000):
        learn(goodput, 1000.0)
    assert goodput.decide(one_ahead(ttft_s=TARGET_BACKLOG * 10.0), POOLS, 1.0).is_admitted


def test_steps_that_went_beyond_the_room_leave_less_of_it() -> None:
    goodput = rule()
    first = goodput.decide(one_ahead("a"), POOLS, 0.0)
    for _ in range(500):
        learn(goodput, 0.0, 2.5)
    later = goodput.decide(one_ahead("b"), POOLS, 1.0)
    assert later.tbt_room_s < first.tbt_room_s
    before = later.tbt_room_s
    for _ in range(500):
        learn(goodput, 0.0, 0.1)  # an empty pool is no sample of a full one
    assert goodput.decide(one_ahead("c"), POOLS, 2.0).tbt_room_s == pytest.approx(before)
    goodput.check()


def test_a_few_stalled_answers_do_not_lower_the_limit_for_long() -> None:
    rooms = []
    for num_stalled in (0, 20):
        goodput = rule()
        goodput.decide(one_ahead("a"), POOLS, 0.0)
        for over in (*[1000.0] * num_stalled, *[1.0] * 60):
            learn(goodput, 0.0, over)
        rooms.append(goodput.decide(one_ahead("b"), POOLS, 1.0).tbt_room_s)
        goodput.check()
    assert rooms[0] == pytest.approx(rooms[1], rel=0.05) and rooms[0] > 0.02


def test_a_request_that_fits_into_no_pool_says_nothing_of_those_that_do() -> None:
    pools = PoolCapacity(1, 100, DecodeModel(0.01, 0.003, 0.0))
    rooms = []
    for slo_tbt_s in (0.05, 0.011):
        goodput = rule()
        goodput.decide(one_ahead(slo_tbt_s=slo_tbt_s, ttft_s=0.0), PoolCapacity(1, 1, pools.step), 0.0)
        rooms.append(goodput.decide(one_ahead(ttft_s=0.0), pools, 0.0).tbt_room_s)
    alone = rule().decide(one_ahead(ttft_s=0.0), pools, 0.0).tbt_room_s
    assert rooms[0] < alone == rooms[1]


def test_before_anything_is_learned_a_pool_of_few_requests_keeps_more_room() -> None:
    """The number that comes by chance varies by its square root."""
    rooms = []
    for num_decode in (1, 100):
        pools = PoolCapacity(1, num_decode, DecodeModel(0.01, 0.003, 0.0), decode_makes_first_token=True)
        rooms.append(rule().decide(one_ahead(ttft_s=0.0), pools, 0.0).tbt_room_s)
    assert rooms[0] < 0.95 * rooms[1]


def test_the_worst_moment_of_its_stay_counts_not_the_first() -> None:
    decode_forecast = DecodeForecast()
    goodput = GoodputRule(decode_forecast, 30.0, 0.05)
    for number in range(12):  # they decode from 4 s on, and this one from 1 s
        decode_forecast.expect(f"d{number}", 4.0, 1000, 0.0)
    verdict = goodput.decide(one_ahead(ttft_s=1.0), POOLS, 0.0)
    assert (verdict.is_admitted, verdict.code) == (False, "slo_tbt")
    assert verdict.retry_after_s > 0


def test_requests_that_have_ended_are_not_forecast_whatever_stay_was_guessed() -> None:
    decode_forecast = DecodeForecast()
    goodput = GoodputRule(decode_forecast, 30.0, 0.05)
    for number in range(40):
        decode_forecast.expect(f"d{number}", 0.001 * number, 1000, 0.001 * number)
        decode_forecast.started(f"d{number}", 0.001 * number)
        decode_forecast.left(f"d{number}", 0.001 * number + 0.0005)
    assert decode_forecast.at(0.1, 0.1).num_requests == 40, "by the mean stay"
    assert goodput.decide(one_ahead(ttft_s=0.0), POOLS, 0.1).is_admitted


def test_a_context_must_lie_whole_in_one_instance() -> None:
    """Half of its memory in each of two instances does not hold it."""
    decode_forecast = DecodeForecast()
    pools = PoolCapacity(1, 2, DecodeModel(0.001, 0.0, 0.0), kv_tokens=10_000)
    goodput = GoodputRule(decode_forecast, 30.0, 0.05)
    for number in range(2):
        decode_forecast.expect(f"d{number}", 0.0, 6_000, 0.0)
        decode_forecast.started(f"d{number}", 0.0)
    wide = one_ahead(num_tokens=6_000, ttft_s=0.0, output_tokens=1)
    verdict = goodput.decide(wide, pools, 0.0)
    assert (verdict.is_admitted, verdict.code) == (False, "slo_tbt") and "memory" in verdict.reason
    assert goodput.decide(one_ahead(num_tokens=3_000, ttft_s=0.0, output_tokens=1), pools, 0.0).is_admitted


def test_a_wait_for_decode_s_memory_is_no_rejection_where_the_first_token_waits_too() -> None:
    """Decode makes the first token: it may come as late as the TTFT SLO allows."""
    decode_forecast = DecodeForecast()
    step = DecodeModel(0.001, 0.0, 4e-6)
    pools = PoolCapacity(1, 1, step, kv_tokens=10_000, decode_makes_first_token=True)
    goodput = GoodputRule(decode_forecast, 30.0, 0.05)
    for number in range(2):
        decode_forecast.expect(f"d{number}", 0.0, 4_000, 0.0)
        decode_forecast.started(f"d{number}", 0.0)
    wide = one_ahead(num_tokens=4_000, ttft_s=0.5, output_tokens=1, slo_ttft_s=12.0)
    assert goodput.decide(wide, pools, 0.0).is_admitted, "8,000 of 10,000 tokens are taken"
    before = goodput.decide(wide, dataclasses.replace(pools, decode_makes_first_token=False), 0.0)
    assert not before.is_admitted and "memory" in before.reason, "it would wait amid its answer"
    hasty = dataclasses.replace(wide, slo_ttft_s=10.0)
    assert not goodput.decide(hasty, pools, 0.0).is_admitted, "the memory is free again too late"
    slow = dataclasses.replace(pools, step=DecodeModel(0.001, 0.0, 8e-6))
    assert not goodput.decide(wide, slow, 0.0).is_admitted, "with its memory full, steps are too long"


def test_decode_is_filled_further_where_no_wait_follows_the_first_token() -> None:
    """Room for 12.7 requests with a margin of 1.05, for 11.6 with 1.15."""
    admitted = {}
    for holds in (True, False):
        decode_forecast = DecodeForecast()
        goodput = GoodputRule(decode_forecast, 30.0, 0.05)
        pools = PoolCapacity(1, 1, DecodeModel(0.01, 0.003, 0.0), decode_makes_first_token=holds)
        one = one_ahead(ttft_s=0.0, num_tokens=100, output_tokens=1)
        goodput.decide(one, pools, 0.0)
        assert goodput._over is not None
        goodput._over.value = 1.0  # what was learned
        for number in range(11):
            decode_forecast.expect(f"d{number}", 0.0, 100, 0.0)
            decode_forecast.started(f"d{number}", 0.0)
        admitted[holds] = goodput.decide(one, pools, 0.0).is_admitted
    assert admitted == {True: True, False: False}


def test_in_overload_the_cheaper_of_equal_value_goes_first() -> None:
    goodput = rule()
    verdicts = {}
    for number in range(400):  # ten times what one instance can compute, with a queue at its target length
        now = number * 0.1
        cost_s = 0.1 if number % 2 else 2.0
        one = one_ahead(str(number), prefill_s=cost_s, queue_s=5.0, ttft_s=5.0 + cost_s, slo_tbt_s=0.0)
        verdicts[number] = goodput.decide(one, POOLS, now)
    late = range(300, 400)
    cheap = sum(verdicts[number].is_admitted for number in late if number % 2)
    expensive = sum(verdicts[number].is_admitted for number in late if not number % 2)
    assert cheap > 40 and 0 <= expensive < 10
    refused = next(verdicts[number] for number in late if not verdicts[number].is_admitted)
    assert refused.code == "overload" and refused.retry_after_s > 0


def test_an_overload_has_a_price_from_its_first_seconds_on() -> None:
    """Not only when it has lasted for the horizon over which demand is counted."""
    goodput = rule()
    found = []
    for number in range(80):  # twelve seconds of ten times what one instance can compute
        now, cost_s = number * 0.15, 0.1 if number % 2 else 2.9
        one = one_ahead(str(number), prefill_s=cost_s, queue_s=5.0, ttft_s=5.0 + cost_s, slo_tbt_s=0.0)
        found.append((now, cost_s, goodput.decide(one, POOLS, now).is_admitted))
    cheap = [is_admitted for now, cost_s, is_admitted in found if now >= 6.0 and cost_s < 1.0]
    dear = [is_admitted for now, cost_s, is_admitted in found if now >= 6.0 and cost_s > 1.0]
    assert all(cheap) and sum(dear) <= 3 < len(dear) / 5
    few = rule()
    for number in range(3):  # a few at once are no overload: there is room for half of the SLO
        one = one_ahead(str(number), prefill_s=1.0, queue_s=float(number), ttft_s=1.0 + number, slo_tbt_s=0.0)
        assert few.decide(one, POOLS, 0.0).is_admitted


def test_a_level_of_priority_is_worth_twice_as_much() -> None:
    goodput = rule()
    admitted = {0: 0, -1: 0}
    for number in range(800):
        now, priority = number * 0.1, -(number % 2)
        one = one_ahead(str(number), prefill_s=0.5, queue_s=5.0, ttft_s=5.5, slo_tbt_s=0.0, priority=priority)
        admitted[priority] += goodput.decide(one, POOLS, now).is_admitted and number >= 400
    assert admitted[-1] > 2 * admitted[0]


# --- what a scarce resource is worth


def offered(
    cost_rates: dict[float, float], *, horizon_s: float = 30.0, turn_share: float = 0.1
) -> ShadowPrice:
    """A price after five horizons of arrivals, given as cost -> seconds of the resource per second."""
    price = ShadowPrice(horizon_s, turn_share)
    for tick in range(int(5 * horizon_s)):
        for cost_s, rate in cost_rates.items():
            for _ in range(round(rate / cost_s)):
                price.offer(1.0, cost_s, float(tick))
    return price


def test_without_overload_nothing_has_a_price() -> None:
    price = offered({0.5: 2.0, 2.0: 2.0})
    assert price.rate(150.0) == pytest.approx(4.0, rel=0.05)
    assert price.per_second(4.5, 150.0) == 0.0


@pytest.mark.parametrize("began_at", [0.0, 1e5, 1e9])
def test_the_clock_may_begin_anywhere_and_nights_may_be_silent(began_at: float) -> None:
    price = ShadowPrice(30.0, 0.1)
    for evening in (began_at, began_at + 8 * 3600.0, began_at + 30 * 86400.0):
        for second in range(150):
            price.offer(1.0, 2.0, evening + second)
        assert price.rate(evening + 150.0) == pytest.approx(2.0, rel=0.05)
        assert price.per_second(1.0, evening + 150.0) > 0.0
        price.check()


@pytest.mark.parametrize("silence_s", [None, 120.0, 3600.0])
def test_each_load_is_seen_from_its_beginning_on(silence_s: float | None) -> None:
    """One request some minutes before must not make the first seconds of an overload look like a horizon."""
    price, began_at = ShadowPrice(30.0, 0.1), 1e6
    if silence_s is not None:
        price.offer(1.0, 0.5, began_at - silence_s)
    for tick in range(60):
        price.offer(1.0, 0.5, began_at + tick / 10)
    now = began_at + 6.0
    seen = price.seen_part(1.0, now)
    assert seen == pytest.approx(1 - math.exp(-0.2), rel=0.02)
    assert price.rate(now, seen) == pytest.approx(5.0, rel=0.1)
    assert price.per_second(2.0 * seen, now) > 0.0, "two seconds a second are given, five demanded"


def test_in_overload_expensive_requests_are_not_worth_it() -> None:
    price = offered({0.5: 2.0, 2.0: 2.0})
    assert 0.4 < price.per_second(2.5, 150.0) <= 0.5
    paid = {cost: sum(price.is_paid(1.0, cost, 2.5, 150.0) for _ in range(100)) for cost in (0.5, 2.0)}
    assert paid[0.5] == 100
    assert paid[2.0] == pytest.approx(25, abs=5), "half a second of two is left for those at the price"
    assert price.is_paid(4.0, 2.0, 2.5, 150.0), "four times the value makes up for four times the cost"


def test_a_long_backlog_leaves_room_for_the_cheapest_only() -> None:
    price = offered({0.25: 1.0, 0.5: 1.0, 2.0: 2.0})
    assert price.per_second(0.9, 150.0) > 1 / 0.5
    assert not price.is_paid(1.0, 0.5, 0.9, 150.0)
    assert not price.is_paid(1.0, 0.25, 0.0, 150.0)


def test_old_arrivals_fade() -> None:
    price = offered({1.0: 8.0})
    assert price.per_second(4.0, 150.0) > 0.0
    assert price.per_second(4.0, 250.0) == 0.0


def test_no_class_starves() -> None:
    """However high the price, each class gets its share of seconds."""
    price = ShadowPrice(30.0, 0.1)
    taken = {0.5: 0.0, 8.0: 0.0}
    waited: dict[float, list[float]] = {0.5: [0.0], 8.0: [0.0]}
    for tick in range(20_000):
        now = tick / 10
        for cost_s in taken:
            bound_s = price.turn_in_s(cost_s, 4)
            if price.has_turn(cost_s, 4, now):
                price.take_turn(cost_s)
                taken[cost_s] += cost_s
                waited[cost_s].append(now)
            elif waited[cost_s][-1]:
                assert bound_s <= cost_s * 2 / (0.1 * 4) + 0.1
    assert taken[0.5] == pytest.approx(2000 * 4 * 0.1 / 2, rel=0.1)
    assert taken[8.0] == pytest.approx(2000 * 4 * 0.1 / 2, rel=0.1)
    price.check()


def test_no_class_starves_where_both_resources_are_scarce() -> None:
    """A turn at prefill must not be lost to decode's price, nor what was earned at decode to prefill's."""
    goodput = rule()
    admitted: dict[bool, list[float]] = {True: [], False: []}
    for tick in range(4000):
        now, is_long = tick / 2, tick % 10 == 9
        size: dict[str, Any] = {"prefill_s": 8.0, "num_tokens": 8000} if is_long else {}
        one = one_ahead(queue_s=15.0, ttft_s=20.0, slo_ttft_s=30.0, output_tokens=1000, **size)
        verdict = goodput.decide(one, POOLS, now)
        if verdict.is_admitted:
            admitted[is_long].append(now)
        elif is_long and now > 100.0:
            assert verdict.code == "overload"
    # Either price alone refuses it until its class, one of two, has earned 8 s of 1/20, and 12 s at decode.
    gaps = [after - before for before, after in pairwise([0.0, *admitted[True], 2000.0])]
    assert max(gaps) <= 2 * (8.0 + 12.0) / 0.05 + 5.0, admitted[True]
    assert len(admitted[False]) > 10 * len(admitted[True]), "they are worth more per second"
    goodput.check()

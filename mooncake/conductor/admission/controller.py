# SPDX-License-Identifier: Apache-2.0
"""Admission control: whether a request is accepted, given its predicted times.

It owns the question "is it worth starting?" and the record of admitted requests, and refuses to know how
instances are chosen: it decides when the best pair is known, with the prediction for that pair. Five rules:

``none``       every request is admitted.
``baseline``   (paper §7) each stage checks its own load: prefill at arrival, decode when the prompt is done.
``early``      (paper §7) both are checked at arrival: predicted TTFT against its SLO, and the decode pool's
               *present* TBT against its SLO. The present is not what the request will meet: prefill takes
               seconds, so the load of both pools swings.
``predicted``  (paper §7) as ``early``, with the decode load expected when the prefill ends.
``goodput``    ours (``goodput.py``).

Under each of the paper's rules decode checks again when the prompt is computed (§3: the anticipated load may
have changed). The prompt of a request rejected then was computed in vain; ours rejects none so late. A
rejection's ``Retry-After`` is computed from the same forecast: the first instant at which the rule would
admit the request if nothing else changed. A share of the rejected requests (``audit_share``) is admitted all
the same and marked: their outcome shows how often a rejection was wrong.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from mooncake.conductor.admission.decode_forecast import DecodeForecast
from mooncake.conductor.admission.goodput import GoodputRule
from mooncake.conductor.admission.result import (
    AdmissionRequest,
    AdmissionResult,
    PoolCapacity,
    decode_full,
    too_late,
)

Rule = Literal["none", "baseline", "early", "predicted", "goodput"]

RECHECKED_RULES: tuple[Rule, ...] = ("baseline", "early", "predicted")
"""Under the paper's rules (§3) decode checks the TBT SLO once more when a prompt is computed."""


@dataclass(slots=True)
class Audit:
    """The outcomes of requests that were admitted although the rule rejected them."""

    num_admitted: int = 0
    num_ended: int = 0
    num_in_slo: int = 0


@dataclass(slots=True)
class _AdmittedRequest:
    request: AdmissionRequest
    verdict: AdmissionResult
    base_s: float
    is_prefilled: bool = False


class AdmissionController:
    """One of the rules with its state."""

    def __init__(
        self,
        rule: Rule,
        *,
        audit_share: float = 0.0,
        turn_share: float = 0.05,
        horizon_s: float = 30.0,
    ) -> None:
        self.rule = rule
        self.audit = Audit()
        self.num_rejected: dict[str, int] = {}
        self.decode_forecast = DecodeForecast()
        self.goodput = GoodputRule(self.decode_forecast, horizon_s, turn_share)
        self._audit_share = audit_share
        self._audit_due = 0.0
        self._admitted: dict[str, _AdmittedRequest] = {}

    def __repr__(self) -> str:
        return (
            f"<AdmissionController {self.rule} admitted={len(self._admitted)} rejected={self.num_rejected}>"
        )

    def knows(self, request_id: str) -> bool:
        """Whether the request was admitted and has not ended."""
        return request_id in self._admitted

    def decide(self, request: AdmissionRequest, pools: PoolCapacity, now: float) -> AdmissionResult:
        """Decide whether ``request`` is admitted; if so it counts from now on."""
        verdict = self._decide(request, pools, now)
        if not verdict.is_admitted:
            self._count(verdict)
            self._audit_due += self._audit_share
            if self._audit_due < 1.0:
                return verdict
            self._audit_due -= 1.0
            self.audit.num_admitted += 1
            verdict = dataclasses.replace(verdict, is_admitted=True, is_audited=True)
        self._admitted[request.request_id] = _AdmittedRequest(request, verdict, pools.step.base_s)
        self.decode_forecast.expect(request.request_id, now + request.ttft_s, request.num_tokens, now)
        return verdict

    def prefilled(
        self, request_id: str, pools: PoolCapacity, now: float, has_begun: bool = False
    ) -> AdmissionResult:
        """Record that the prompt is computed. Under the paper's rules decode checks again, and may still
        reject.

        ``has_begun``: its answer has begun, so it can no longer be rejected.
        """
        promise = self._admitted.get(request_id)
        if promise is None or promise.is_prefilled:
            return AdmissionResult(True)
        if self.rule in RECHECKED_RULES and not promise.verdict.is_audited and not has_begun:
            verdict = self._present_decode(promise.request, pools)
            if verdict is not None:
                self._count(verdict)
                self.forget(request_id)
                return verdict
        promise.is_prefilled = True
        self.decode_forecast.started(request_id, now)
        return AdmissionResult(True)

    def finished(self, request_id: str, ttft_s: float, tbt_s: float, is_complete: bool, now: float) -> None:
        """Record the end of a request; ``ttft_s`` 0: not measured."""
        promise = self._admitted.pop(request_id, None)
        if promise is None:
            return
        self.decode_forecast.left(request_id, now)
        request, is_answered = promise.request, is_complete and ttft_s > 0
        if promise.verdict.is_audited:
            self.audit.num_ended += 1
            in_time = not request.slo_ttft_s or ttft_s <= request.slo_ttft_s
            in_pace = not request.slo_tbt_s or tbt_s <= request.slo_tbt_s
            self.audit.num_in_slo += is_answered and in_time and in_pace
        elif is_answered:
            room_s, over_s = promise.verdict.tbt_room_s, tbt_s - promise.base_s
            self.goodput.learn(ttft_s - request.ttft_s, over_s / room_s if room_s else 0.0)

    def forget(self, request_id: str) -> None:
        """Forget a request that is placed anew or not at all, as if it had never arrived."""
        self._admitted.pop(request_id, None)
        self.decode_forecast.forget(request_id)

    def check(self) -> None:
        self.decode_forecast.check()
        self.goodput.check()
        assert 0.0 <= self._audit_due < 1.0
        assert self.audit.num_in_slo <= self.audit.num_ended <= self.audit.num_admitted

    def _decide(self, request: AdmissionRequest, pools: PoolCapacity, now: float) -> AdmissionResult:
        if self.rule == "goodput":
            return self.goodput.decide(request, pools, now)
        load = request.ttft_s / request.slo_ttft_s if request.slo_ttft_s else 0.0
        if self.rule != "none" and load > 1.0:
            return too_late(request)
        refused = None
        if self.rule == "early":
            refused = self._present_decode(request, pools)
        elif self.rule == "predicted":
            refused = self._predicted_decode(request, pools, now)
        return refused or AdmissionResult(True, prefill_load=load)

    def _present_decode(self, request: AdmissionRequest, pools: PoolCapacity) -> AdmissionResult | None:
        """Why the decode pool is too full now; a request leaves it every ``mean_stay_s / n`` seconds."""
        there = self.decode_forecast.decoding
        step_s, memory_load = pools.step_s(there, request), pools.memory_load(there, request)
        if not request.slo_tbt_s or not pools.num_decode:
            return None
        if step_s <= request.slo_tbt_s and memory_load <= 1.0:
            return None
        num_over = max(1.0, there.num_requests + 1 - pools.most_requests(there, request.slo_tbt_s))
        wait_s = num_over * self.decode_forecast.mean_stay_s / max(1, there.num_requests)
        return decode_full(there.num_requests, request.slo_tbt_s, step_s, memory_load, wait_s, "are decoding")

    def _predicted_decode(
        self, request: AdmissionRequest, pools: PoolCapacity, now: float
    ) -> AdmissionResult | None:
        instant = now + request.ttft_s
        there = self.decode_forecast.at(instant, now)
        step_s, memory_load = pools.step_s(there, request), pools.memory_load(there, request)
        if not request.slo_tbt_s or not pools.num_decode:
            return None
        if step_s <= request.slo_tbt_s and memory_load <= 1.0:
            return None
        most = pools.most_requests(there, request.slo_tbt_s)
        wait_s = self.decode_forecast.falls_to(most - 1, instant, now) - instant
        when = f"will be decoding in {request.ttft_s:.3g} s when its prompt is computed"
        return decode_full(there.num_requests, request.slo_tbt_s, step_s, memory_load, wait_s, when)

    def _count(self, verdict: AdmissionResult) -> None:
        self.num_rejected[verdict.code] = self.num_rejected.get(verdict.code, 0) + 1

# SPDX-License-Identifier: Apache-2.0
"""The admission rule "goodput": admit the requests that bring the most value within their SLOs. Ours.

Value is a request completed within its SLOs; a level of priority is worth a factor of two. Two questions:

*Can it meet its own SLOs?* If not, all of its work would be worth nothing. Forecasts decide this, and
forecasts err, so their recent error counts: how late first tokens were (a running quantile of seconds), and
how far steps went beyond the room (between an empty pool's step and the SLO) that was to be filled. For
decode the worst moment of its stay counts, not the first: no request may be admitted that breaks the SLO of
one admitted before. And a context lies whole in one instance: memory left in fragments over the pool can't
hold one.

*Is it worth what it would displace?* In overload some requests must be rejected, and other rules choose those
that arrive when the queue is full. If a request is worth v and takes c seconds of the bottleneck, taking the
largest v / c first brings the most: one prompt of 100,000 tokens takes the place of fifty short ones. So
prefill seconds and decode seconds each have a price (``shadow_price.py``), 0 without overload, and a request
must be worth its cost at both. A cached prefix makes a request cheap, so sessions that have paid for their
history go on. Turns keep expensive requests from starving.
"""

from __future__ import annotations

from dataclasses import dataclass

from mooncake.conductor.admission.decode_forecast import DecodeForecast
from mooncake.conductor.admission.result import (
    AdmissionRequest,
    AdmissionResult,
    PoolCapacity,
    decode_full,
    too_expensive,
    too_late,
)
from mooncake.conductor.admission.shadow_price import ShadowPrice

TARGET_BACKLOG = 0.5
"""Target of the queue in overload as a part of the TTFT SLO, with room for errors on both sides."""

TARGET_FILLING = 0.9
"""The part of the decode pool's room that is to be taken in overload."""

_ON_TIME = 0.9
"""The part of first tokens that should come no later than forecast."""

_IN_PACE = 0.75
"""The part of answers that should stay within the room: a fuller pool makes more late, an emptier one rejects
more. Chosen among 0.5 to 0.9 on the three traces of ``bench/paper.py``'s overload."""

_NEAR_LIMIT = 0.9

_LEAST_OVER = 1.15
"""A pool that is filled up to the limit exactly goes over it with every second arrival."""

_MOST_OVER = 3.0
"""Even a worse forecast does not lower the limit further."""


@dataclass(slots=True)
class _Quantile:
    """A running quantile: a part ``share`` of what was learned lately lies below ``value``."""

    share: float
    value: float
    spread: float = 0.0

    def learn(self, found: float) -> None:
        # Up by q, down by 1 - q of a step: there it rests.
        self.spread += 0.05 * (abs(found - self.value) - self.spread)
        self.value += 0.1 * self.spread * (self.share if found > self.value else self.share - 1.0)


class GoodputRule:
    """The rule with its learned forecast errors."""

    def __init__(self, decode_forecast: DecodeForecast, horizon_s: float, turn_share: float) -> None:
        self.prefill_price = ShadowPrice(horizon_s, turn_share)
        self.decode_price = ShadowPrice(horizon_s, turn_share)
        self._decode_forecast = decode_forecast
        self._late_s = _Quantile(_ON_TIME, 0.0)
        self._over = _Quantile(_IN_PACE, _LEAST_OVER)

    @property
    def _over_factor(self) -> float:
        return min(_MOST_OVER, max(_LEAST_OVER, self._over.value))

    def decide(self, request: AdmissionRequest, pools: PoolCapacity, now: float) -> AdmissionResult:
        # Above the target queue no request is admitted by mistake; below it some must be, or a period of
        # wrong forecasts would reject all requests, and with them all samples that could correct the
        # forecasts.
        most_s = (1.0 - TARGET_BACKLOG) * request.slo_ttft_s
        late_s = min(max(0.0, self._late_s.value), most_s)
        if request.slo_ttft_s and request.ttft_s + late_s > request.slo_ttft_s:
            return too_late(request, late_s)
        room_s = max(0.0, request.slo_tbt_s - pools.step.base_s) / self._over_factor
        limit_s = pools.step.base_s + room_s
        step_s = time_load = memory_load = 0.0
        if request.slo_tbt_s and pools.num_decode:
            full, step_s, time_load, memory_load = self._decode_refusal(request, pools, limit_s, now)
            if full is not None:
                # It counts as demand for decode all the same: a price that only sees requests that fit stays
                # at zero.
                self.decode_price.offer(_value(request), self._decode_cost_s(request, pools, room_s), now)
                return full
        if request.slo_ttft_s:
            price, num = self.prefill_price, pools.num_prefill
            short_s = TARGET_BACKLOG * request.slo_ttft_s - request.queue_s
            budget = num * (1.0 + short_s / price.horizon_s)
            refused = _at_price("prefill", price, request.prefill_s, request, num, budget, now)
            if refused is not None:
                return refused
        if step_s:
            price, num = self.decode_price, pools.num_decode
            budget = num * (1.0 + TARGET_FILLING - max(time_load, memory_load))
            cost_s = self._decode_cost_s(request, pools, room_s)
            refused = _at_price("decode", price, cost_s, request, num, budget, now)
            if refused is not None:
                return refused
        prefill_load = request.ttft_s / request.slo_ttft_s if request.slo_ttft_s else 0.0
        decode_load = step_s / request.slo_tbt_s if request.slo_tbt_s else 0.0
        # Where memory is the scarcer of both, late answers waited for it: shorter steps would not help.
        stated_s = room_s if time_load >= memory_load else 0.0
        return AdmissionResult(True, "admitted", "", 0.0, prefill_load, decode_load, stated_s)

    def learn(self, late_s: float, over: float) -> None:
        """Learn from an answered request: ``late_s`` after the prediction, with steps that took ``over``
        times the room they were given; 0: they were given none."""
        self._late_s.learn(late_s)
        if over > _NEAR_LIMIT:  # an empty pool is no sample of a full one
            self._over.learn(max(1.0, over))

    def check(self) -> None:
        self.prefill_price.check()
        self.decode_price.check()
        assert _LEAST_OVER <= self._over_factor <= _MOST_OVER

    def _decode_refusal(
        self, request: AdmissionRequest, pools: PoolCapacity, limit_s: float, now: float
    ) -> tuple[AdmissionResult | None, float, float, float]:
        """Why the decode pool will be too full, or None; the longest step while it decodes; and what parts of
        the pool's time and memory are taken."""
        instant = now + request.ttft_s
        there = self._decode_forecast.peak(instant, now)
        step_s, memory_load = pools.step_s(there, request), pools.whole_memory_load(there, request)
        base_s = pools.step.base_s
        time_load = (step_s - base_s) / max(1e-9, limit_s - base_s)
        if step_s <= limit_s and memory_load <= 1.0:
            return None, step_s, time_load, memory_load
        most = pools.most_requests(there, limit_s)
        wait_s = self._decode_forecast.falls_to(most - 1, instant, now) - instant
        when = f"will be decoding while it does, from {request.ttft_s:.3g} s on"
        full = decode_full(there.num_requests, request.slo_tbt_s, step_s, memory_load, wait_s, when)
        return full, step_s, time_load, memory_load

    def _decode_cost_s(self, request: AdmissionRequest, pools: PoolCapacity, room_s: float) -> float:
        """Seconds of a decode instance that it takes: its part of time or memory, for as long as it stays."""
        stay_s = request.output_tokens * request.tbt_s or self._decode_forecast.mean_stay_s
        part = max(
            pools.added_s(request.num_tokens) / max(1e-9, room_s), request.num_tokens / pools.kv_tokens
        )
        return part * stay_s


def _value(request: AdmissionRequest) -> float:
    return 2.0 ** -max(-20, min(20, request.priority))


def _at_price(
    resource: str,
    price: ShadowPrice,
    cost_s: float,
    request: AdmissionRequest,
    capacity: int,
    budget: float,
    now: float,
) -> AdmissionResult | None:
    """Why the request is not worth its cost; None if it is, or if its class has a turn."""
    if cost_s <= 0 or not capacity:
        return None
    value = _value(request)
    price.offer(value, cost_s, now)
    if price.is_paid(value, cost_s, budget, now) or price.take_turn(cost_s, capacity, now):
        return None
    wait_s = price.turn_in_s(cost_s, capacity)
    most_s = value / price.per_second(budget, now)
    return too_expensive(resource, cost_s, most_s, price.rate(now), capacity, wait_s)

# SPDX-License-Identifier: Apache-2.0
"""Admission control: whether a request is accepted, given its predicted times.

It owns the question "is it worth starting?", the record of admitted requests and the texts of refusals, so
that every rule words the same reason in the same way. It refuses to know how instances are chosen: it
decides when the best pair is known, with the prediction for that pair. Five rules:

``none``       every request is admitted.
``baseline``   (paper §7) each stage checks its own load: prefill at arrival, decode when the prompt is done.
``early``      (paper §7) both are checked at arrival: predicted TTFT against its SLO, and the decode pool's
               *present* TBT against its SLO. The present is not what the request will meet: prefill takes
               seconds, so the load of both pools swings.
``predicted``  (paper §7) as ``early``, with the decode load expected when the prefill ends.
``goodput``    ours (``GoodputRule``).

Under each of the paper's rules decode checks again when the prompt is computed (§3: the anticipated load may
have changed). The prompt of a request rejected then was computed in vain; ours rejects none so late. A
rejection's ``Retry-After`` is computed from the same forecast: the first instant at which the rule would
admit the request if nothing else changed. A share of the rejected requests (``audit_share``) is admitted all
the same and marked: their outcome shows how often a rejection was wrong.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from mooncake.conductor.decode_forecast import DecodeForecast, DecodeLoad
from mooncake.conductor.keyed_prompt import NO_KEYS, KeyedPrompt
from mooncake.conductor.prediction import DecodeModel
from mooncake.conductor.refused_prompts import RefusedPrompts
from mooncake.types import WorkerRole

CODES = ("slo_ttft", "slo_tbt", "overload")
"""Why requests are rejected."""

SOONEST_RETRY_S = 0.05


@dataclass(frozen=True, slots=True)
class AdmissionRequest:
    """A request to be decided, with its predicted times on the best pair of instances."""

    request_id: str
    num_tokens: int
    queue_s: float
    prefill_s: float
    "Seconds that its prompt takes on the prefill instance."
    ttft_s: float
    tbt_s: float
    output_tokens: int = 0
    slo_ttft_s: float = 0.0
    "0: none."
    slo_tbt_s: float = 0.0
    priority: int = 0


@dataclass(frozen=True, slots=True)
class PoolCapacity:
    """The instances of both pools; ``step`` models a decode instance's step, ``kv_tokens`` is its memory."""

    num_prefill: int
    num_decode: int
    step: DecodeModel
    kv_tokens: float = math.inf
    decode_makes_first_token: bool = False
    """Whether a request without memory at decode waits before its first token, not amid its answer."""

    def step_s(self, load: DecodeLoad, one_more: AdmissionRequest | None = None) -> float:
        """Seconds of a step when the load (and one more request) is spread evenly."""
        num_requests, num_tokens = load.num_requests, load.num_tokens
        if one_more is not None:
            num_requests, num_tokens = num_requests + 1, num_tokens + one_more.num_tokens
        # No request decodes in half a batch: an average below 1 is a batch of 1.
        share = max(1, min(self.num_decode, num_requests))
        return self.step.seconds(num_requests / share, num_tokens / share)

    def memory_load(self, load: DecodeLoad, one_more: AdmissionRequest) -> float:
        """The part of the decode instances' memory that the contexts take."""
        return (load.num_tokens + one_more.num_tokens) / (max(1, self.num_decode) * self.kv_tokens)

    def whole_memory_load(self, load: DecodeLoad, one_more: AdmissionRequest) -> float:
        """The part of an instance's memory that is taken with this request in it: its context can't be spread
        over several, and every request needs room for its answer, too."""
        answer = one_more.output_tokens
        each = (load.num_tokens + load.num_requests * answer) / max(1, self.num_decode)
        return (each + one_more.num_tokens + answer) / self.kv_tokens

    def full_step_s(self, load: DecodeLoad) -> float:
        """Seconds of a step when contexts like those in ``load`` fill the memory."""
        return self.step.seconds(
            self.kv_tokens * load.num_requests / max(1.0, load.num_tokens), self.kv_tokens
        )

    def most_requests(self, load: DecodeLoad, step_s: float) -> float:
        """How many requests with contexts like those in ``load`` fit, and keep a step that short."""
        mean_tokens = load.num_tokens / max(1, load.num_requests)
        in_time = max(0.0, step_s - self.step.base_s) / max(1e-9, self.added_s(mean_tokens))
        return self.num_decode * min(in_time, self.kv_tokens / max(1.0, mean_tokens))

    def added_s(self, context_tokens: float) -> float:
        """Seconds that a request adds to every step."""
        return self.step.per_request_s + self.step.per_token_s * context_tokens


@dataclass(frozen=True, slots=True)
class AdmissionResult:
    """The result. The loads are expected ones, as parts of what the SLOs allow."""

    is_admitted: bool
    code: str = "admitted"
    reason: str = ""
    retry_after_s: float = 0.0
    prefill_load: float = 0.0
    decode_load: float = 0.0
    tbt_room_s: float = 0.0
    "Seconds by which its steps may exceed those of an empty pool, if later results are right; 0: not given."
    is_audited: bool = False
    "It was rejected, and is admitted to check whether that was right."
    lacks: WorkerRole | None = None
    "The role of which more instances could have met it, if it was rejected."


def too_late(request: AdmissionRequest, late_s: float = 0.0) -> AdmissionResult:
    """The rejection for a TTFT SLO that can't be met; ``late_s``: how much later than predicted it may be."""
    over_s = request.ttft_s + late_s - request.slo_ttft_s
    reason = (
        f"its first token would come after {request.ttft_s:.3g} s (queue {request.queue_s:.3g} s, prompt "
        f"{request.prefill_s:.3g} s), its TTFT SLO is {request.slo_ttft_s:.3g} s"
    )
    if late_s:
        reason += f", and predictions may be {late_s:.3g} s short"
    lacks: WorkerRole | None = WorkerRole.PREFILL
    if over_s > request.queue_s:
        # An empty queue is the most that waiting can bring, and more instances, too.
        lacks, reason = None, f"{reason}; it could not be met even without a queue"
    wait_s = max(SOONEST_RETRY_S, min(over_s, request.queue_s))
    load = request.ttft_s / request.slo_ttft_s
    return AdmissionResult(False, "slo_ttft", reason, wait_s, load, lacks=lacks)


def decode_full(
    num_requests: int, slo_tbt_s: float, step_s: float, memory_load: float, wait_s: float, when: str
) -> AdmissionResult:
    """The rejection for a TBT SLO that can't be met; without memory, a request waits amid its answer."""
    reason = (
        f"{num_requests} requests {when}, a step with it would take {step_s * 1000:.3g} ms, its TBT SLO is "
        f"{slo_tbt_s * 1000:.3g} ms"
    )
    if memory_load > 1.0:
        reason += f"; with it they would need {memory_load:.0%} of the decode instances' memory"
    wait_s = max(SOONEST_RETRY_S, wait_s)
    load = max(step_s / slo_tbt_s, memory_load)
    return AdmissionResult(False, "slo_tbt", reason, wait_s, decode_load=load, lacks=WorkerRole.DECODE)


def too_expensive(
    resource: WorkerRole, cost_s: float, most_s: float, demand_rate: float, capacity: int, wait_s: float
) -> AdmissionResult:
    """The rejection of a request that is worth less than what it would displace."""
    reason = (
        f"overload: it would take {cost_s:.3g} s of the {resource} instances, and at most {most_s:.3g} s are "
        f"given now to a request of its priority ({demand_rate:.3g} s are demanded per second, there are "
        f"{capacity})"
    )
    return AdmissionResult(False, "overload", reason, max(SOONEST_RETRY_S, wait_s), lacks=resource)


# --- what a scarce resource is worth


_BINS_PER_DECADE = 16
_LOWEST = -6.0  # log10 of value per second
_DECADES = 12
_NUM_BINS = _BINS_PER_DECADE * _DECADES
_MOST_AGE = 50.0
"""After this many horizons nothing is left of old demand; e to the power of much more overflows a float."""


class ShadowPrice:
    """What a second of one scarce resource is worth now, as value per second of it.

    Suppose that the arrivals of the last ``horizon_s`` come again. Which of them should be taken, if the
    resource has only so many seconds to give? Those with the most value per second of it, until the seconds
    are used up: the fractional knapsack. The value per second of the last one taken is the price; a request
    that brings less is not worth what it would displace. If there is enough for all, the price is 0, and a
    burst alone does not raise it, because what counts is the offered rate, not the queue. The queue comes in
    through the budget that the caller names: it is larger than the capacity while the backlog is short,
    smaller while it is long, so that forecast errors are corrected.

    A price alone would let expensive requests starve. So a share of the resource is given by turns: requests
    are sorted into classes by cost (factors of two), each class that was refused lately earns an equal part
    of that share, and a class that has earned the cost of a request may take it at any price. Thus a class
    whose requests cost c is never refused by price for longer than ``c * num_classes / (share * capacity)``
    seconds. A request that needs a turn at several resources takes none before it has all: what its class has
    earned at one stays while it earns at another.
    """

    def __init__(self, horizon_s: float, turn_share: float) -> None:
        self.horizon_s = horizon_s
        self._turn_share = turn_share
        # Seconds of the resource that were demanded, by value per second, fading with age. The unit grows by
        # the factor e every horizon instead of each entry shrinking.
        self._offered: npt.NDArray[np.float64] = np.zeros(_NUM_BINS)
        self._unit = 1.0
        self._faded_at = 0.0
        self._begun_at: float | None = None
        self._at_margin = 0.0
        self._earned: dict[int, float] = {}  # class of cost -> seconds it may take out of turn
        self._refused_at: dict[int, float] = {}
        self._earned_until = 0.0

    def offer(self, value: float, cost_s: float, now: float) -> None:
        """Record a request for ``cost_s`` seconds of the resource."""
        self._fade(now)
        if self._begun_at is None or self._offered.sum() < NEGLIGIBLE * self.horizon_s * self._unit:
            self._begun_at = now
        if cost_s > 0:
            self._offered[_bin(value / cost_s)] += cost_s * self._unit

    def rate(self, now: float, seen: float = 1.0) -> float:
        """Seconds of the resource that are demanded each second, where what was demanded is that of the part
        ``seen`` of a horizon."""
        self._fade(now)
        return float(self._offered.sum()) / (self._unit * self.horizon_s * seen)

    def seen_part(self, least_s: float, now: float) -> float:
        """The part of the horizon, by the weight of its arrivals, that has passed since there was next to
        nothing, at least ``least_s``. What can be given in that part is to be compared with them: after the
        first seconds of an overload they are a fraction of a horizon's."""
        seen_s = 0.0 if self._begun_at is None else now - self._begun_at
        return -math.expm1(-max(least_s, seen_s) / self.horizon_s)

    def per_second(self, budget: float, now: float) -> float:
        """The price when ``budget`` seconds of the resource can be given for those of each second of a
        horizon."""
        margin, _ = self._margin(budget, now)
        return 0.0 if margin < 0 else float(10.0 ** (margin / _BINS_PER_DECADE + _LOWEST))

    def is_paid(self, value: float, cost_s: float, budget: float, now: float) -> bool:
        """Whether a request is worth its cost; of those exactly at the price, as many as there is room
        for."""
        margin, part = self._margin(budget, now)
        own = _bin(value / cost_s)
        if own != margin:
            return own > margin
        self._at_margin += part
        is_in = self._at_margin >= 1.0
        self._at_margin -= is_in
        return is_in

    def has_turn(self, cost_s: float, capacity: float, now: float) -> bool:
        """Whether a request that the price refuses may go all the same, because it is its class's turn.
        ``take_turn`` must follow if it goes."""
        kind = _class(cost_s)
        self._earn(capacity, now)
        self._refused_at[kind] = now
        return self._earned.get(kind, 0.0) >= cost_s

    def take_turn(self, cost_s: float) -> None:
        self._earned[_class(cost_s)] -= cost_s

    def keep(self, cost_s: float, now: float) -> None:
        """Keep what the class of such a request has earned: this price could not be asked for it."""
        kind = _class(cost_s)
        if kind in self._refused_at:
            self._refused_at[kind] = now

    def turn_in_s(self, cost_s: float, capacity: float) -> float:
        """How long until the class of such a request has earned one."""
        missing_s = cost_s - self._earned.get(_class(cost_s), 0.0)
        return max(0.0, missing_s) / (self._turn_share * capacity / max(1, len(self._refused_at)) or 1e-9)

    def check(self) -> None:
        assert (self._offered >= 0).all()
        assert all(seconds >= 0 for seconds in self._earned.values())

    def _margin(self, budget: float, now: float) -> tuple[int, float]:
        """The bin at which the budget ends, and how much of it is within; (-1, 0): enough for all."""
        self._fade(now)
        room = max(0.0, budget) * self._unit * self.horizon_s
        from_best = np.cumsum(self._offered[::-1])
        if from_best[-1] <= room:
            return -1, 0.0
        position = int(np.searchsorted(from_best, room, side="right"))
        before = float(from_best[position - 1]) if position else 0.0
        return _NUM_BINS - 1 - position, (room - before) / float(from_best[position] - before)

    def _earn(self, capacity: float, now: float) -> None:
        elapsed_s = min(now - self._earned_until, self.horizon_s)
        self._earned_until = now
        for kind, at in list(self._refused_at.items()):
            if now - at > 2 * self.horizon_s:
                del self._refused_at[kind]
                self._earned.pop(kind, None)
        for kind in self._refused_at:
            # Two requests' worth at most: turns can't be accumulated.
            most_s = 2.0 * 2.0 ** (kind + 1)
            gain_s = elapsed_s * capacity * self._turn_share / len(self._refused_at)
            self._earned[kind] = min(most_s, self._earned.get(kind, 0.0) + gain_s)

    def _fade(self, now: float) -> None:
        age = max(0.0, now - self._faded_at) / self.horizon_s
        self._faded_at = max(self._faded_at, now)
        if age > _MOST_AGE:
            self._offered[:] = 0.0
            return
        self._unit *= math.exp(age)
        if self._unit > 1e100:
            self._offered /= self._unit
            self._unit = 1.0


def _bin(density: float) -> int:
    position = math.floor((math.log10(density) - _LOWEST) * _BINS_PER_DECADE)
    return min(_NUM_BINS - 1, max(0, position))


def _class(cost_s: float) -> int:
    return math.floor(math.log2(max(cost_s, 1e-6)))


@dataclass(frozen=True, slots=True)
class _Bid:
    """What a request would take of one resource, and what it is worth."""

    resource: WorkerRole
    price: ShadowPrice
    cost_s: float
    value: float
    capacity: int
    budget: float
    "As of ``ShadowPrice.per_second``."
    seen: float = 1.0
    "As of ``ShadowPrice.rate``."

    def refusal(self, now: float) -> AdmissionResult:
        wait_s = self.price.turn_in_s(self.cost_s, self.capacity)
        most_s = self.value / self.price.per_second(self.budget, now)
        rate = self.price.rate(now, self.seen)
        return too_expensive(self.resource, self.cost_s, most_s, rate, self.capacity, wait_s)


def _at_prices(bids: Sequence[_Bid], now: float) -> AdmissionResult | None:
    """Why a request is not worth one of its costs; None if it is worth all, or if its class has a turn where
    it is not. It is demand for a resource only if those before it do not refuse it."""
    bids, turns = [bid for bid in bids if bid.cost_s > 0 and bid.capacity], []
    for bid in bids:
        bid.price.offer(bid.value, bid.cost_s, now)
        if bid.price.is_paid(bid.value, bid.cost_s, bid.budget, now):
            continue
        if not bid.price.has_turn(bid.cost_s, bid.capacity, now):
            for other in bids:
                if other is not bid:
                    other.price.keep(other.cost_s, now)
            return bid.refusal(now)
        turns.append(bid)
    for bid in turns:
        bid.price.take_turn(bid.cost_s)
    return None


# --- the rule "goodput"


TARGET_BACKLOG = 0.5
"""Target of the queue in overload as a part of the TTFT SLO, with room for errors on both sides."""

NEGLIGIBLE = 0.02
"""Part of an instance's time: less than that demanded is nothing, and what comes next begins a load."""
SEEN_SLOS = 2.0
"""Arrivals of a shorter time than so many TTFT SLOs are taken as those of that time: a few at once are no
rate."""

TARGET_FILLING = 0.9
"""The part of the decode pool's room that is to be taken in overload."""

SPARE_PART = 0.5
"""A prompt that its own length makes late is served while all else takes no more than this part of the other
prefill instances' time."""
LEAST_REPEATS = 0.5
"""Else it is served when so much of its computing has been refused before: what it leaves in the cache makes
others short."""
IDLE_PART = 0.02
"""Machines of which no more is taken are idle: such a prompt may have the only one."""

_IN_PACE = 0.75
"""The part of answers that should stay within the room: a fuller pool makes more late, an emptier one rejects
more. Chosen among 0.5 to 0.9 on the three traces of ``bench/paper.py``'s overload."""

_UPPER_QUARTILE = 0.67
"""The same part of a normal distribution lies below so many standard deviations above its mean."""

_NEAR_LIMIT = 0.9

_REMEMBERED_S = 300.0
_LEAST_SAMPLES = 4
_LONG_PART = 0.4
"""Part of the TTFT SLO from which on a predicted time is one behind a long queue."""

SHORT_ANSWER = 40
"""An answer of so few tokens is no sample of steps: the longest tenth of its intervals is mostly the wait for
its KV after the first token, which a decode pool with fewer requests does not shorten."""

LEAST_OVER = 1.15
"""A pool that is filled up to the limit exactly goes over it with every second arrival."""

LEAST_OVER_STEPS = 1.05
"""The same where only steps count, because decode makes the first token: no wait for KV comes after it. With
1.15 a seventh of decode's time was left unused (``tools 4P1D x2``: 82 % good, with this 87)."""

MOST_WAITED = 0.9
"""Part of the TTFT SLO within which a wait for decode's memory must end: when answers end is not known."""

_MOST_OVER = 3.0
"""Even a worse forecast does not lower the limit further."""

_LIKE = 8.0
"""Prompts are alike for a forecast's errors if neither takes more than so many times as long as the other."""


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


class ForecastErrors:
    """How much later than predicted first tokens came lately; below 0: earlier."""

    SIZE = 20
    __slots__ = ("_behind_queues", "_recent")

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=self.SIZE)
        self._behind_queues: deque[tuple[float, float, float]] = deque(maxlen=2 * self.SIZE)
        """Instant, seconds of the prompt, and lateness as a part of the SLO."""

    def learn(self, late_s: float, request: AdmissionRequest, now: float) -> None:
        self._recent.append(late_s)
        slo_s = request.slo_ttft_s
        if request.ttft_s >= _LONG_PART * slo_s > 0.0:
            self._behind_queues.append((now, request.prefill_s, late_s / slo_s))

    def chance(self, slack_s: float) -> float:
        """The part that came no later than ``slack_s`` after the prediction; 1 before anything is known."""
        if not self._recent:
            return 1.0
        return sum(one <= slack_s for one in self._recent) / len(self._recent)

    def margin_s(self, slo_s: float, prefill_s: float, now: float) -> float:
        """How much before its SLO a first token should be predicted, so that most requests meet theirs.
        ``prefill_s``: what the prompt takes.

        In overload the queue is as long as admission lets it become, so that nearly all requests are as close
        to their SLO as is allowed. A margin costs its part of the queue, which a burst could have filled, and
        gains those that would have been late. Errors grow with the queue: only those behind long ones count,
        in proportion to it, and only as long as they are recent. And they grow with the prompt: long ones are
        overtaken, so that their errors say nothing of short ones.
        """
        alike = [
            part
            for at, seconds, part in self._behind_queues
            if at > now - _REMEMBERED_S and prefill_s / _LIKE <= seconds <= prefill_s * _LIKE
        ]
        late = sorted(alike[-self.SIZE :])
        if len(late) < _LEAST_SAMPLES:
            return 0.0
        best = float(sum(one <= 0.0 for one in late))
        margin = 0.0 if best else 1.0
        for place, one in enumerate(late):
            if 0.0 < one < 1.0 and (place + 1) * (1.0 - one) > best:
                margin, best = one, (place + 1) * (1.0 - one)
        return margin * slo_s


class GoodputRule:
    """The rule "goodput": admit the requests that bring the most value within their SLOs. Ours.

    Value is a request completed within its SLOs; a level of priority is worth a factor of two. Two questions:

    *Can it meet its own SLOs?* If not, all of its work would be worth nothing. Forecasts decide this, and
    forecasts err, so their recent errors count: they give the margin that is kept before the SLO, and the
    chance that its first token comes in time, by which its value is multiplied. And they say how far steps
    went beyond the room (between an empty pool's step and the SLO) that was to be filled.
    For decode the worst moment of its stay counts, not the first: no request may be admitted that breaks the
    SLO of one admitted before. And a context lies whole in one instance: memory left in fragments over the
    pool can't hold one.

    A prompt that takes longer than its SLO by itself is late however it is served. It is served while there
    is room, because a session whose prompt has grown so long would be rejected at each turn: only a computed
    prompt makes the next one short. And it is served when at least half of its computing was refused before
    (``RefusedPrompts``), at the price of as many requests as were refused for it.

    *Is it worth what it would displace?* In overload some requests must be rejected, and other rules choose
    those that arrive when the queue is full. If a request is worth v and takes c seconds of the bottleneck,
    taking the largest v / c first brings the most: one prompt of 100,000 tokens takes the place of fifty
    short ones. So prefill seconds and decode seconds each have a price (``ShadowPrice``), 0 without
    overload, and a request must be worth its cost at both. A cached prefix makes a request cheap, so
    sessions that have paid for their history go on. Turns keep expensive requests from starving.
    """

    def __init__(self, decode_forecast: DecodeForecast, horizon_s: float, turn_share: float) -> None:
        self.prefill_price = ShadowPrice(horizon_s, turn_share)
        self.decode_price = ShadowPrice(horizon_s, turn_share)
        self._decode_forecast = decode_forecast
        self._errors = ForecastErrors()
        self._refused = RefusedPrompts()
        self._over: _Quantile | None = None
        """None until a request has a TBT SLO that it can meet in an empty pool."""

    def _over_factor(self, request: AdmissionRequest, pools: PoolCapacity) -> float:
        least = LEAST_OVER_STEPS if pools.decode_makes_first_token else LEAST_OVER
        if self._over is None:
            # Before anything is learned: a number of requests that come by chance varies by its square root.
            most = pools.most_requests(DecodeLoad(1, request.num_tokens), request.slo_tbt_s)
            first = max(least, 1.0 + _UPPER_QUARTILE / math.sqrt(max(1.0, most)))
            if most < 1.0:  # it fits into no pool, and says nothing of those that do
                return first
            self._over = _Quantile(_IN_PACE, first)
        return min(_MOST_OVER, max(least, self._over.value))

    def decide(
        self, request: AdmissionRequest, pools: PoolCapacity, now: float, prompt: KeyedPrompt = NO_KEYS
    ) -> AdmissionResult:
        # Below the target queue some requests must be admitted, or a period of wrong forecasts would reject
        # all, and with them all samples that could correct the forecasts.
        chance, slo_s, repeats = 1.0, request.slo_ttft_s, 0.0
        is_too_long = is_late_by_itself = False
        if slo_s:
            slack_s = slo_s - request.ttft_s
            chance = max(self._errors.chance(slack_s), 1.0 / self._errors.SIZE)
            margin_s = self._errors.margin_s(slo_s, request.prefill_s, now)
            is_unlikely = slack_s < margin_s and request.ttft_s > TARGET_BACKLOG * slo_s
            # To refuse what is late without a queue helps no other request where machines have time for it.
            is_too_long = slo_s < request.ttft_s - request.queue_s + is_unlikely * margin_s
            is_late_by_itself = is_too_long and request.queue_s <= TARGET_BACKLOG * slo_s
            if is_late_by_itself:
                repeats = self._refused.repeats(prompt)
                is_late = repeats < LEAST_REPEATS and not self._has_spare(request, pools, now)
            else:
                is_late = slack_s < 0 or is_unlikely
            if is_late:
                if is_too_long:
                    self._refused.add(prompt, now)
                return too_late(request, is_unlikely * min(margin_s, (1.0 - TARGET_BACKLOG) * slo_s))
        is_repeated = repeats >= LEAST_REPEATS
        # One that comes again is worth those that were refused for it, as if they came once more.
        value = _value(request) * (repeats if is_repeated else chance)
        room_s = limit_s = step_s = time_load = memory_load = 0.0
        if request.slo_tbt_s and pools.num_decode:
            room_s = max(0.0, request.slo_tbt_s - pools.step.base_s) / self._over_factor(request, pools)
            limit_s = pools.step.base_s + room_s
            full, step_s, time_load, memory_load = self._decode_refusal(request, pools, limit_s, now)
            if full is not None:
                # It counts as demand for decode all the same: a price that only sees requests that fit stays
                # at zero.
                self.decode_price.offer(value, self._decode_cost_s(request, pools, room_s), now)
                return full
        bids = []
        if request.slo_ttft_s and (is_repeated or not is_late_by_itself):
            price, num = self.prefill_price, pools.num_prefill
            short_s = TARGET_BACKLOG * request.slo_ttft_s - request.queue_s
            seen = price.seen_part(SEEN_SLOS * request.slo_ttft_s, now)
            # A short queue may become longer at once, a long one becomes shorter over a horizon.
            budget = num * (seen + short_s / price.horizon_s * (1.0 if short_s > 0 else seen))
            bids.append(_Bid(WorkerRole.PREFILL, price, request.prefill_s, value, num, budget, seen))
        if step_s:
            price, num = self.decode_price, pools.num_decode
            budget = num * (1.0 + TARGET_FILLING - max(time_load, memory_load))
            cost_s = self._decode_cost_s(request, pools, room_s)
            bids.append(_Bid(WorkerRole.DECODE, price, cost_s, value, num, budget))
        refused = _at_prices(bids, now)
        if refused is not None:
            if is_repeated and refused.lacks is WorkerRole.PREFILL:
                self._refused.add(prompt, now)
            return refused
        if is_too_long:
            self._refused.forget(prompt)
        prefill_load = request.ttft_s / request.slo_ttft_s if request.slo_ttft_s else 0.0
        decode_load = step_s / request.slo_tbt_s if request.slo_tbt_s else 0.0
        # Where memory is the scarcer of both, late answers waited for it: shorter steps would not help.
        stated_s = room_s if time_load >= memory_load else 0.0
        return AdmissionResult(True, "admitted", "", 0.0, prefill_load, decode_load, stated_s)

    def _has_spare(self, request: AdmissionRequest, pools: PoolCapacity, now: float) -> bool:
        """Whether prefill has time for a prompt that will be late: an instance of its own, as it were."""
        price, idle = self.prefill_price, IDLE_PART * pools.num_prefill
        seen = price.seen_part(SEEN_SLOS * request.slo_ttft_s, now)
        if price.rate(now, seen) > idle + SPARE_PART * (pools.num_prefill - 1):
            return False
        price.offer(_value(request) / self._errors.SIZE, request.prefill_s, now)
        return True

    def learn(self, request: AdmissionRequest, ttft_s: float, over: float, now: float) -> None:
        """Learn from an answered request, whose steps took ``over`` times the room they were given; 0: they
        were given none."""
        if not 0.0 < request.slo_ttft_s < request.ttft_s:  # else it was admitted although it would be late
            self._errors.learn(ttft_s - request.ttft_s, request, now)
        if over > _NEAR_LIMIT and self._over is not None:  # an empty pool is no sample of a full one
            # Beyond the limit all are equal: a single stall would count as much as hundreds of answers.
            self._over.learn(min(_MOST_OVER, max(1.0, over)))

    def check(self) -> None:
        self.prefill_price.check()
        self.decode_price.check()
        self._refused.check()
        assert self._over is None or 0.0 < self._over.value < 2.0 * _MOST_OVER

    def _decode_refusal(
        self, request: AdmissionRequest, pools: PoolCapacity, limit_s: float, now: float
    ) -> tuple[AdmissionResult | None, float, float, float]:
        """Why the decode pool will be too full, or None; the longest step while it decodes; and what parts of
        the pool's time and memory are taken."""
        instant, forecast = now + request.ttft_s, self._decode_forecast
        forecast.set_step_s(pools.step_s(forecast.decoding), now)
        there, most = forecast.peak(instant, now), forecast.most
        if pools.step_s(most, request) > limit_s:
            there = forecast.followed(instant, now, pools.step_s)
        there = DecodeLoad(min(there.num_requests, most.num_requests), min(there.num_tokens, most.num_tokens))
        step_s, memory_load = pools.step_s(there, request), pools.whole_memory_load(there, request)
        base_s = pools.step.base_s
        time_load = (step_s - base_s) / max(1e-9, limit_s - base_s)
        if step_s <= limit_s and memory_load <= 1.0:
            return None, step_s, time_load, memory_load
        wait_s = forecast.falls_to(pools.most_requests(there, limit_s) - 1, instant, now) - instant
        if memory_load > 1.0 and pools.decode_makes_first_token and request.slo_ttft_s:
            # It waits at decode until it fits, and no step is longer than with the memory full.
            is_in_time = request.ttft_s + wait_s <= MOST_WAITED * request.slo_ttft_s
            if is_in_time and pools.full_step_s(there) <= request.slo_tbt_s:
                return None, min(step_s, limit_s), min(time_load, 1.0), 1.0
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


# --- all rules


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

    @property
    def request_ids(self) -> Collection[str]:
        """Those that were admitted and have not ended."""
        return self._admitted.keys()

    def knows(self, request_id: str) -> bool:
        """Whether the request was admitted and has not ended."""
        return request_id in self._admitted

    def decide(
        self, request: AdmissionRequest, pools: PoolCapacity, now: float, prompt: KeyedPrompt = NO_KEYS
    ) -> AdmissionResult:
        """Decide whether ``request`` is admitted; if so it counts from now on."""
        verdict = self._decide(request, pools, now, prompt)
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

    def placed_elsewhere(self, request: AdmissionRequest, pools: PoolCapacity, now: float) -> None:
        """Record a request that was admitted by another conductor: it is demand and load like others."""
        verdict = dataclasses.replace(self._decide(request, pools, now, NO_KEYS), is_admitted=True)
        self._admitted[request.request_id] = _AdmittedRequest(request, verdict, pools.step.base_s)
        self.decode_forecast.expect(request.request_id, now + request.ttft_s, request.num_tokens, now)

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

    def finished(
        self,
        request_id: str,
        ttft_s: float,
        tbt_s: float,
        is_complete: bool,
        now: float,
        num_output_tokens: int = 0,
    ) -> None:
        """Record the end of a request; ``ttft_s`` and ``num_output_tokens`` 0: not measured. A whole answer
        whose times were not measured says nothing of its SLOs."""
        promise = self._admitted.pop(request_id, None)
        if promise is None:
            return
        self.decode_forecast.left(request_id, now)
        request, is_answered = promise.request, is_complete and ttft_s > 0
        if is_complete and not is_answered:
            return
        if promise.verdict.is_audited:
            self.audit.num_ended += 1
            in_time = not request.slo_ttft_s or ttft_s <= request.slo_ttft_s
            in_pace = not request.slo_tbt_s or tbt_s <= request.slo_tbt_s
            self.audit.num_in_slo += is_answered and in_time and in_pace
        elif is_answered:
            room_s, over_s = promise.verdict.tbt_room_s, tbt_s - promise.base_s
            if 0 < num_output_tokens <= SHORT_ANSWER:
                room_s = 0.0
            self.goodput.learn(request, ttft_s, over_s / room_s if room_s else 0.0, now)

    def forget(self, request_id: str) -> None:
        """Forget a request that is placed anew or not at all, as if it had never arrived."""
        self._admitted.pop(request_id, None)
        self.decode_forecast.forget(request_id)

    def check(self) -> None:
        self.decode_forecast.check()
        self.goodput.check()
        assert 0.0 <= self._audit_due < 1.0
        assert self.audit.num_in_slo <= self.audit.num_ended <= self.audit.num_admitted

    def _decide(
        self, request: AdmissionRequest, pools: PoolCapacity, now: float, prompt: KeyedPrompt
    ) -> AdmissionResult:
        if self.rule == "goodput":
            return self.goodput.decide(request, pools, now, prompt)
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

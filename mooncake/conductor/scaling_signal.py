# SPDX-License-Identifier: Apache-2.0
"""How many instances each pool should have, with the reason.

It owns the account of the work that arrives, admitted or not, and the number that holds the SLOs; it refuses
to know which instances there are, and starts and stops none: an autoscaler of the platform reads the number.
What counts is work in instance seconds, not how busy processors are: a pool that is too small is 100 % busy
at any load beyond it, and one that batches is busy at any load at all.

*The smallest number.* Prefill: prompts arrive at random and wait for the first free instance, a queue M/G/c.
Erlang's C gives the part that waits, and the wait's tail falls like ``exp(-(c - load) * wait / mean)`` with
the mean scaled by the variation of the prompts (Allen and Cunneen's approximation); at most ``LATE_SHARE`` of
them may wait longer than their TTFT SLO leaves. Decode: by Little's law the answers that arrive in the time
that one takes are there at once; each instance holds as many as the TBT SLO and its memory allow, and the
square root of the number is kept free for chance. In both, ``scaling_utilization`` bounds the load of an
instance.

*Quick and steady.* The load is a mean over a window that grows up to ``_MOST_BINS`` seconds while nothing
changes and is cut where the newest part differs by more than chance explains (ADWIN, Bifet and Gavaldà 2007;
the variance comes from the work itself, so that one huge prompt is no change). Beyond that the number stays
until the load is beyond it by ``_UP`` or below it by ``_DOWN``, or by two standard errors if these are more
(the HPA of Kubernetes has a tolerance of 0.1 both ways). It rises at once,
by no more than a factor of two in ``_STEP_S``, and falls only to the largest number of the last
``scaling_window_s`` (the HPA's stabilization window), at most by half in such a time.

*When the prediction is wrong.* A queue that stands (CoDel's measure: even its minimum over some time is too
long), rejections and answers behind their SLO add an instance, if all that were asked for have been serving
for a while. The number that was too few is remembered, so that the window's end does not bring it back.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import numpy as np

from mooncake.conductor.admission import LEAST_OVER
from mooncake.conductor.prediction import DecodeModel, Floats
from mooncake.conductor.settings import SchedulingSettings
from mooncake.types import WorkerRole

INTERVAL_S = 5.0
"""Time from one decision to the next."""

LATE_SHARE = 0.05
"""Part of the prompts that may wait for longer than their SLO leaves."""

WAIT_WITHOUT_SLO_S = 10.0
"""Longest wait of prompts where no SLO bounds it."""

_UP, _DOWN = 0.05, 0.15
"""The load must leave the range of a number by so much of itself before another number is chosen."""
_MOST_BINS = 600
"""Seconds of the longest window; one bin each."""
_LEAST_S = 5
_ERRORS = 4.5
"""Standard errors between two parts of the window from which on they differ: less than one false alarm in a
thousand windows of ten minutes."""
_PART_AGES = (8, 11, 16, 23, 32, 45, 64, 90, 128, 181, 256, 362)
_PEAK = 3.0
"""Standard deviations by which the number of answers at a time goes beyond its mean during one of them: an
answer is late by its slowest steps."""
_STEP_S = 15.0
_LEAST_STEP = 4
_SETTLED_S = 30.0
_STANDS = int(_SETTLED_S / INTERVAL_S) + 1
"""Decisions in a row with a queue that is too long."""
_CLEARED_S = 60.0
"""A queue that is too long adds an instance unless it is over within this time at its present pace."""
_NUM_BEHIND = 5
_REMEMBERED_S = 3600.0
_MOST_RECORDED = 1 << 16
"""Requests that are recognized when they ask again."""


class ScalingStatus(msgspec.Struct, frozen=True):
    """The signal of one pool; a row of ``/status``."""

    role: WorkerRole
    desired: int
    "Instances that should serve; 0: not decided yet."
    serving: int
    "Instances that can be chosen; those that drain or are lost are not among them."
    starting: int
    "Instances that answer and are not ready yet."
    load: float
    "Work that arrives, in instances that would do nothing else."
    queue_s: float
    "Seconds of prompts that are placed and not computed, all instances together."
    reason: str


class DesiredChanged(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Another number of instances is wanted."""

    role: WorkerRole
    before: int
    after: int
    reason: str


NO_STEP = DecodeModel(0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class PoolNow:
    """The pool of one role at this instant."""

    num_serving: int
    num_starting: int
    wait_s: float = 0.0
    "Predicted wait of the next prompt, where it is shortest."
    queue_s: float = 0.0
    is_measured: bool = True
    "Whether the times of its work were given or measured; else they are guesses."
    step: DecodeModel = NO_STEP
    "An average decode instance's step."
    kv_tokens: float = math.inf


class OfferedLoad:
    """Work that arrives, by second, and its mean rate since it last changed."""

    _ROWS = ("num", "work", "squares", "num_slo", "slo_s", "context")

    def __init__(self) -> None:
        self._bins: Floats = np.zeros((len(self._ROWS), _MOST_BINS))
        self._present = [0.0] * len(self._ROWS)
        """The newest bin's sums, which are more up to date than those in ``_bins``: every request adds to
        them, and adding to six numbers of a list takes a third of the time."""
        self._newest: int | None = None
        self._first = 0

    def add(self, work: float, slo_s: float, context: float, now: float) -> None:
        """Add a request. ``slo_s`` 0: it has none; ``context``: any quantity that is averaged by work."""
        bin_now = int(now)
        if bin_now != self._newest:
            self._advance(now)
        has_slo = float(slo_s > 0)
        row = (1.0, work, work * work, has_slo, has_slo * slo_s, context * work)
        if bin_now != self._newest:  # of an instant before the newest
            self._bins[:, bin_now % _MOST_BINS] += row
            return
        present = self._present
        for position, amount in enumerate(row):
            present[position] += amount

    def measure(self, now: float) -> LoadMeasured:
        """Measure the load since it last changed."""
        self._advance(now)
        self._note_present()
        first, newest = self._first, int(now)
        bins = self._bins[:, np.arange(first, newest + 1) % _MOST_BINS]
        seconds = now - first
        found, most = None, _ERRORS
        sums = bins[:3].cumsum(axis=1)
        for age in _PART_AGES:
            cut = newest - age
            if cut - first < _LEAST_S:
                break
            for total, squares in ((sums[0], sums[0]), (sums[1], sums[2])):
                errors = _difference(total, squares, cut - first, now - cut)
                if errors > most:
                    found, most = cut, errors
        if found is not None:
            bins = bins[:, found - first :]
            self._first, seconds = found, now - found
        num, total, square, num_slo, slo_s, context = bins.sum(axis=1).tolist()
        seconds = max(seconds, float(_LEAST_S))
        return LoadMeasured(
            rate=total / seconds,
            error=math.sqrt(square) / seconds,
            mean=total / num if num else 0.0,
            variation=num * square / total**2 if total else 1.0,
            slo_s=slo_s / num_slo if num_slo else 0.0,
            context=context / total if total else 0.0,
        )

    def _advance(self, now: float) -> None:
        bin_now = int(now)
        if self._newest is None:
            self._newest = self._first = bin_now
        if bin_now <= self._newest:
            return
        self._note_present()
        self._present = [0.0] * len(self._ROWS)
        num_new = min(bin_now - self._newest, _MOST_BINS)
        self._bins[:, np.arange(bin_now - num_new + 1, bin_now + 1) % _MOST_BINS] = 0.0
        self._newest = bin_now
        self._first = max(self._first, bin_now - _MOST_BINS + 1)

    def _note_present(self) -> None:
        if self._newest is not None:
            self._bins[:, self._newest % _MOST_BINS] = self._present

    def check(self) -> None:
        self._note_present()
        assert (self._bins >= 0).all()
        assert self._newest is None or 0 <= self._newest - self._first < _MOST_BINS


def _difference(total: Floats, squares: Floats, before_s: int, after_s: float) -> float:
    """By how many standard errors the rates before and after a cut differ, of requests or of their work."""
    before, of_before = float(total[before_s - 1]), float(squares[before_s - 1])
    after, of_after = float(total[-1]) - before, float(squares[-1]) - of_before
    # Each part's own variance, or the one that the other part lets expect: a part without any request would
    # seem to be certain otherwise.
    each = max(of_before / before_s, of_after / after_s)
    if each <= 0.0:
        return 0.0
    return abs(after / after_s - before / before_s) / math.sqrt(each / before_s + each / after_s)


@dataclass(frozen=True, slots=True)
class LoadMeasured:
    """The mean load of a window, in units of work per second."""

    rate: float
    error: float
    "Standard error of ``rate``."
    mean: float
    "Work of one request."
    variation: float
    "Mean square of the work as a multiple of its mean's square; 1 where all requests are alike."
    slo_s: float
    "Mean of the requests' SLOs; 0: none has one."
    context: float


class Requirement:
    """What a pool needs for the load of an instant, which a caller varies by a factor."""

    def __init__(self, now: PoolNow, utilization: float, most: int = 1 << 14) -> None:
        """``most``: limit of the numbers that are tried. A load may be wrong by any factor, and the formula
        takes a step for each instance."""
        self.load = 0.0
        "Work that arrives, in instances that would do nothing else."
        self.error = 0.0
        self._now, self._utilization, self._most = now, utilization, most
        self._prompts: LoadMeasured | None = None
        self._answers = 0.0
        "Requests that decode at a time, at the longest step that is allowed."
        self._most_answers = 1.0

    def add_prompts(self, found: LoadMeasured) -> None:
        self._prompts = found
        self._add(found.rate, found.error)

    def add_answers(self, found: LoadMeasured, most_requests: int) -> None:
        """``found`` in tokens; ``most_requests``: limit of one instance's batch."""
        if not found.rate:
            return
        step, context = self._now.step, max(1.0, found.context)
        most = min(float(most_requests), self._now.kv_tokens / context)
        if found.slo_s:
            each_s = max(1e-12, step.per_request_s + step.per_token_s * context)
            in_time = (found.slo_s - step.base_s) / (LEAST_OVER * each_s)
            if in_time >= 1.0:  # else no number of instances meets it
                most = min(most, in_time)
        most = max(1.0, most)
        token_s = step.seconds(most, most * context) / most
        self._most_answers = most
        self._answers = found.rate * token_s * most
        self._add(found.rate * token_s, found.error * token_s)

    def _add(self, load: float, error: float) -> None:
        self.load, self.error = self.load + load, math.hypot(self.error, error)

    @property
    def wait_s(self) -> float:
        """How long a prompt may wait."""
        return (self._prompts.slo_s if self._prompts else 0.0) or WAIT_WITHOUT_SLO_S

    def least(self, factor: float = 1.0) -> int:
        """The smallest number of instances for ``factor`` times the load, or the limit of what is tried."""
        num = max(1, math.ceil(min(self._most, factor * self.load / self._utilization - 1e-9)))
        while num < self._most and self._lack(num, factor):
            num += 1
        return num

    def lack(self, num: int) -> str:
        """Why so many instances are too few for the load; empty if they are enough."""
        if self.load > self._utilization * num:
            part = f"{self.load / num:.0%} of their time, at most {self._utilization:.0%} is to be used"
            return f"it would take {part}"
        return self._lack(num, 1.0)

    def _lack(self, num: int, factor: float) -> str:
        late = self._late_share(num, factor)
        if late > LATE_SHARE:
            return f"{late:.0%} of the prompts would wait longer than {self.wait_s:.2g} s"
        answers = factor * self._answers
        needed = answers + _PEAK * math.sqrt(answers)
        if needed > num * self._most_answers and answers > self._most_answers:
            return f"they hold {num * self._most_answers:.0f} answers at a time, {needed:.0f} are expected"
        return ""

    def _late_share(self, num: int, factor: float) -> float:
        """The part of the prompts that waits too long at this number of instances."""
        prompts, load = self._prompts, factor * self.load
        if prompts is None or not prompts.rate:
            return 0.0
        if load >= num:
            return 1.0
        blocked = 1.0  # Erlang's B by its recursion
        for servers in range(1, num + 1):
            blocked = load * blocked / (servers + load * blocked)
        waits = num * blocked / (num - load * (1.0 - blocked))
        mean_s = max(1e-9, prompts.mean * prompts.variation / 2.0)
        return waits * math.exp(-(num - load) * self.wait_s / mean_s)


@dataclass(frozen=True, slots=True)
class _TooFew:
    """A number of instances that did not hold its load."""

    num: int
    predicted: int
    "The number that was predicted to hold it."
    load: float
    at: float


class _Pool:
    """The decisions about one role's instances."""

    def __init__(self, now: float) -> None:
        self.since = now
        self.predicted = 0
        "The smallest number by prediction."
        self.wanted = 0
        "The present recommendation, before limits."
        self.desired = 0
        self.reason = ""
        self.load = 0.0
        self.now = PoolNow(0, 0)
        self.wants: deque[tuple[float, int]] = deque()
        "Recommendations within the window."
        self.past: deque[tuple[float, int]] = deque()
        "Numbers that were desired within the window."
        self.waits: deque[float] = deque(maxlen=_STANDS)
        self.num_seen = self.num_behind = 0
        "Requests since ``seen_since``, and those that were rejected or late here."
        self.seen_since = now
        self.settled_at: float | None = None
        "Since when as many as desired are serving."
        self.too_few: _TooFew | None = None

    def most(self, there: PoolNow) -> int:
        """One more than can be desired in the next step: how many more are needed changes nothing."""
        return _step(max([there.num_serving + there.num_starting, *(num for _, num in self.past)])) + 1


def _step(base: int) -> int:
    """The most instances that may be desired where ``base`` were ``_STEP_S`` ago."""
    return max(2 * base, base + _LEAST_STEP)


class ScalingSignal:
    """The signal of all pools. ``offered`` and its like record; ``decide`` decides, every ``INTERVAL_S``."""

    def __init__(self, settings: SchedulingSettings) -> None:
        self._settings = settings
        self._prompts, self._answers = OfferedLoad(), OfferedLoad()
        self._pools: dict[WorkerRole, _Pool] = {}
        self._due_at: float | None = None
        self._stood_at = -math.inf
        "When a queue was last too long for a while: answers that began before are late because of it."
        self._recorded: OrderedDict[str, None] = OrderedDict()

    def deadline(self) -> float | None:
        """When ``decide`` is due; None while there are no pools."""
        return self._due_at

    def is_new(self, request_id: str) -> bool:
        """Whether a request was not recorded yet; from now on it is. One that was refused may ask many times
        in a second, and is no more work and no more behind than if it asked once."""
        if request_id in self._recorded:
            return False
        self._recorded[request_id] = None
        if len(self._recorded) > _MOST_RECORDED:
            self._recorded.popitem(last=False)
        return True

    def offered(self, prefill_s: float, wait_s: float, now: float) -> None:
        """Record a prompt that takes ``prefill_s`` of an instance, whether it is admitted or not; ``wait_s``:
        how long it may wait, 0: no SLO says."""
        self._prompts.add(min(prefill_s, _REMEMBERED_S), max(0.0, wait_s), 0.0, now)

    def answer_offered(self, num_tokens: float, context: float, slo_tbt_s: float, now: float) -> None:
        """Record an expected answer; ``context``: mean tokens while it is made."""
        if num_tokens > 0:
            self._answers.add(num_tokens, slo_tbt_s, context, now)

    def served(self, role: WorkerRole, is_behind: bool) -> None:
        """Record whether a request was within its SLO at ``role``, or was rejected or late there."""
        pool = self._pools.get(role) or next(iter(self._pools.values()), None)
        if pool is not None:
            pool.num_seen += 1
            pool.num_behind += is_behind

    def started(self, now: float) -> None:
        """An instance was added: decide from now on."""
        if self._due_at is None:
            self._due_at = now + INTERVAL_S

    def decide(self, pools: Mapping[WorkerRole, PoolNow], now: float) -> list[DesiredChanged]:
        """Decide the numbers; a role without any instance is no pool. One pool without the other computes
        prompts and answers."""
        self._due_at = now + INTERVAL_S if pools else None
        for role in [role for role in self._pools if role not in pools]:
            del self._pools[role]
        prompts, answers = self._prompts.measure(now), self._answers.measure(now)
        changes = []
        for role, pool_now in pools.items():
            pool = self._pools.setdefault(role, _Pool(now))
            needs = Requirement(pool_now, self._settings.scaling_utilization, pool.most(pool_now))
            if role is WorkerRole.PREFILL or len(pools) == 1:
                needs.add_prompts(prompts)
            if role is WorkerRole.DECODE or len(pools) == 1:
                needs.add_answers(answers, self._settings.max_requests_per_instance)
            stay_s = answers.mean * answers.slo_s * (role is WorkerRole.DECODE)
            before = pool.desired
            self._decide(role, pool, needs, pool_now, stay_s, now)
            if pool.desired != before:
                changes.append(DesiredChanged(role, before, pool.desired, pool.reason))
        return changes

    def status(self) -> list[ScalingStatus]:
        """The latest decisions, by role."""
        return [
            ScalingStatus(
                role,
                pool.desired,
                pool.now.num_serving,
                pool.now.num_starting,
                pool.load,
                pool.now.queue_s,
                pool.reason,
            )
            for role, pool in self._pools.items()
        ]

    def check(self) -> None:
        self._prompts.check()
        self._answers.check()
        assert len(self._recorded) <= _MOST_RECORDED
        for pool in self._pools.values():
            assert pool.desired >= 0 and pool.num_behind <= pool.num_seen
            assert all(num >= 1 for _, num in [*pool.wants, *pool.past])
        assert (self._due_at is not None) or not self._pools

    def _decide(
        self, role: WorkerRole, pool: _Pool, needs: Requirement, there: PoolNow, stay_s: float, now: float
    ) -> None:
        pool.now, pool.load = there, needs.load
        num_present = there.num_serving + there.num_starting
        why = self._want(pool, needs, there, stay_s, now)
        window_s = self._settings.scaling_window_s
        if now - pool.since < window_s and num_present > pool.wanted:
            # A conductor that was just started has no past to compare with: it removes nothing.
            pool.wanted, why = num_present, "so many were found, and the load was not observed for long"
        pool.wants.append((now, pool.wanted))
        while pool.wants[0][0] < now - window_s:
            pool.wants.popleft()
        desired = max(wanted for _, wanted in pool.wants)
        if desired > pool.wanted:
            why = f"{pool.wanted} are needed now, {desired} were within the last {window_s:g} s"
        while pool.past and pool.past[0][0] < now - window_s:
            pool.past.popleft()
        if pool.past:
            desired = max(desired, (max(num for _, num in pool.past) + 1) // 2)
        base = next((num for at, num in pool.past if at >= now - _STEP_S), num_present)
        most = _step(base)
        if desired > most:
            desired, why = most, f"{why}; more are needed than {most}, the most for this step"
        if now - pool.since < _SETTLED_S and not pool.desired:
            return  # instances may still be reported one after the other
        if desired != pool.desired:
            pool.settled_at = None
        pool.past.append((now, desired))
        pool.desired = desired
        pool.reason = f"{role}: {desired} of {there.num_serving}: {why}"

    def _want(self, pool: _Pool, needs: Requirement, there: PoolNow, stay_s: float, now: float) -> str:
        """Set the number that is needed now; the reason."""
        pool.wanted = max(1, pool.wanted)
        if needs.load and not there.is_measured:
            pool.wanted = max(pool.wanted, there.num_serving + there.num_starting)
            return "how long its work takes was not measured yet"
        error = min(0.5, 2.0 * needs.error / needs.load) if needs.load else 0.0
        low, high = needs.least(1.0 - max(_UP, error)), needs.least(1.0 + max(_DOWN, error))
        if not low <= pool.predicted <= high:
            pool.predicted = needs.least()
        num, why = self._corrected(pool, needs, now), ""
        if num > pool.predicted and pool.too_few is not None:
            why = f"{pool.too_few.num} did not hold work for {pool.too_few.load:.3g} before"
        behind = self._stands(pool, needs, there, stay_s, now)
        if behind and num <= pool.desired < max(2 * pool.predicted, pool.predicted + 1):
            # Where twice the number that the load needs is not enough, more of them will not be, either.
            # Not while they only clear a queue from before; and of no load it can't be known what holds it.
            if needs.load and pool.waits[-1] >= 0.9 * pool.waits[0]:
                pool.too_few = _TooFew(pool.desired, pool.predicted, needs.load, now)
            num, why = pool.desired + 1, behind
        pool.wanted = num
        work = f"work for {needs.load:.3g} arrives"
        if why:
            return f"{work}; {why}"
        lack = needs.lack(num - 1) if num > 1 else ""
        return f"{work}; with {num - 1}, {lack}" if lack else work

    def _corrected(self, pool: _Pool, needs: Requirement, now: float) -> int:
        """The predicted number, or more if as many for their load were too few within the last hour."""
        failed = pool.too_few
        if failed is None or now - failed.at > _REMEMBERED_S:
            pool.too_few = None
            return pool.predicted
        num = pool.predicted * failed.num // failed.predicted + 1
        # But no more than it takes for each to have clearly less work than those had.
        enough = math.floor(needs.load * failed.num / ((1.0 - _DOWN) * failed.load)) + 1
        return max(pool.predicted, min(num, enough))

    def _stands(self, pool: _Pool, needs: Requirement, there: PoolNow, stay_s: float, now: float) -> str:
        """Why the pool is too small although as many as desired have been serving for a while; or empty."""
        pool.waits.append(there.wait_s)
        stands = len(pool.waits) == _STANDS and min(pool.waits) > needs.wait_s
        if stands:
            self._stood_at = now
        if not pool.desired or there.num_serving < pool.desired:
            pool.settled_at = None
        elif pool.settled_at is None:
            pool.settled_at = now
        if pool.settled_at is None or now - max(pool.settled_at, self._stood_at) < _SETTLED_S + stay_s:
            pool.num_seen = pool.num_behind = 0
            pool.seen_since = now
        if pool.settled_at is None or now - pool.settled_at < _SETTLED_S:
            return ""
        # A queue from before the last instances came may soon be over without more of them.
        pace = (pool.waits[0] - pool.waits[-1]) / _SETTLED_S
        if stands and pace * _CLEARED_S < there.wait_s - needs.wait_s:
            return f"prompts wait {there.wait_s:.2g} s, at most {needs.wait_s:.2g} s are allowed"
        if now - pool.seen_since < _SETTLED_S:
            return ""
        num_seen, num_behind = pool.num_seen, pool.num_behind
        pool.num_seen, pool.num_behind, pool.seen_since = 0, 0, now
        if num_behind >= _NUM_BEHIND and num_behind > 2 * LATE_SHARE * num_seen:
            return f"{num_behind} of the last {num_seen} requests were rejected or late here"
        return ""

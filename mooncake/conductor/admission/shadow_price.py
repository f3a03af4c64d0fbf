# SPDX-License-Identifier: Apache-2.0
"""What a second of a scarce resource is worth now: the shadow price behind the admission rule "goodput".

Suppose that the arrivals of the last ``horizon_s`` come again. Which of them should be taken, if the resource
has only so many seconds to give? Those with the most value per second of it, until the seconds are used up:
the fractional knapsack. The value per second of the last one taken is the price; a request that brings less
is not worth what it would displace. If there is enough for all, the price is 0, and a burst alone does not
raise it, because what counts is the offered rate, not the queue. The queue comes in through the budget that
the caller names: it is larger than the capacity while the backlog is short, smaller while it is long, so that
forecast errors are corrected.

A price alone would let expensive requests starve. So a share of the resource is given by turns: requests are
sorted into classes by cost (factors of two), each class that was refused lately earns an equal part of that
share, and a class that has earned the cost of a request may take it at any price. Thus a class whose requests
cost c is never refused by price for longer than ``c * num_classes / (share * capacity)`` seconds.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

_BINS_PER_DECADE = 16
_LOWEST = -6.0  # log10 of value per second
_DECADES = 12
_NUM_BINS = _BINS_PER_DECADE * _DECADES
_MOST_AGE = 50.0
"""After this many horizons nothing is left of old demand; e to the power of much more overflows a float."""


class ShadowPrice:
    """The price of one resource, in value per second of it."""

    def __init__(self, horizon_s: float, turn_share: float) -> None:
        self.horizon_s = horizon_s
        self._turn_share = turn_share
        # Seconds of the resource that were demanded, by value per second, fading with age. The unit grows by
        # the factor e every horizon instead of each entry shrinking.
        self._offered: npt.NDArray[np.float64] = np.zeros(_NUM_BINS)
        self._unit = 1.0
        self._faded_at = 0.0
        self._at_margin = 0.0
        self._earned: dict[int, float] = {}  # class of cost -> seconds it may take out of turn
        self._refused_at: dict[int, float] = {}
        self._earned_until = 0.0

    def offer(self, value: float, cost_s: float, now: float) -> None:
        """Record a request for ``cost_s`` seconds of the resource."""
        self._fade(now)
        if cost_s > 0:
            self._offered[_bin(value / cost_s)] += cost_s * self._unit

    def rate(self, now: float) -> float:
        """Seconds of the resource that are demanded each second."""
        self._fade(now)
        return float(self._offered.sum()) / (self._unit * self.horizon_s)

    def per_second(self, budget: float, now: float) -> float:
        """The price when ``budget`` seconds of the resource can be given each second."""
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

    def take_turn(self, cost_s: float, capacity: float, now: float) -> bool:
        """Whether a request that the price refuses may go all the same, because it is its class's turn."""
        kind = _class(cost_s)
        self._earn(capacity, now)
        self._refused_at[kind] = now
        if self._earned.get(kind, 0.0) < cost_s:
            return False
        self._earned[kind] -= cost_s
        return True

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

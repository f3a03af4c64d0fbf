# SPDX-License-Identifier: Apache-2.0
"""The last half hour of chosen metrics, for the console's charts.

Owns a ring of samples. Each value is the sample of the same name at ``/metrics``, so a chart can't differ
from what Prometheus stores; rates and shares are computed from differences of these samples, here only.
Bounded by the number of samples and of series: memory is taken once per series.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence

EVERY_S = 2.0
KEPT_S = 1800.0
NUM_SAMPLES = int(KEPT_S / EVERY_S)
MAX_SERIES = 400
_NAN = math.nan


class MetricHistory:
    """A ring of samples by series name."""

    def __init__(self, num_samples: int = NUM_SAMPLES, max_series: int = MAX_SERIES) -> None:
        self._num_samples, self._max_series = num_samples, max_series
        self._at = array("d", [_NAN]) * num_samples
        self._series: dict[str, array[float]] = {}
        self.num_added = 0
        self.num_left_out = 0
        """Series that were not kept because there are too many."""

    def add(self, now: float, values: Mapping[str, float]) -> None:
        position = self.num_added % self._num_samples
        self._at[position] = now
        self.num_left_out = 0
        for name, value in values.items():
            column = self._series.get(name)
            if column is None:
                if len(self._series) >= self._max_series:
                    self.num_left_out += 1
                    continue
                column = self._series[name] = array("d", [_NAN]) * self._num_samples
            column[position] = value
        for name, column in self._series.items():
            if name not in values:
                column[position] = _NAN
        self.num_added += 1

    def positions(self, since: float = -math.inf) -> list[int]:
        """Positions of the samples after ``since``, the oldest first."""
        num = min(self.num_added, self._num_samples)
        order = [number % self._num_samples for number in range(self.num_added - num, self.num_added)]
        return [position for position in order if self._at[position] > since]

    def times(self, positions: Sequence[int]) -> list[float]:
        return [self._at[position] for position in positions]

    def values(self, name: str, positions: Sequence[int]) -> list[float]:
        """A series' samples; 0 where it did not exist yet, as counters start at 0."""
        column = self._series.get(name)
        if column is None:
            return [0.0] * len(positions)
        return [0.0 if math.isnan(column[position]) else column[position] for position in positions]

    def names(self, family: str) -> list[str]:
        """Names of the series of one sample name, with their labels."""
        return [name for name in self._series if name == family or name.startswith(family + "{")]

    def latest(self) -> dict[str, float]:
        """The newest sample of each series that it has."""
        if not self.num_added:
            return {}
        position = (self.num_added - 1) % self._num_samples
        newest = ((name, column[position]) for name, column in self._series.items())
        return {name: value for name, value in newest if not math.isnan(value)}

    def check(self) -> None:
        assert len(self._series) <= self._max_series
        assert all(len(column) == self._num_samples for column in self._series.values())


def quantile(bounds: Sequence[float], counts: Sequence[float], share: float) -> float | None:
    """The value below which ``share`` of the observations lie, as Prometheus computes it from buckets.

    ``counts``: observations per bucket, not cumulative; the last bucket has no upper bound.
    """
    total = sum(counts)
    if total <= 0:
        return None
    wanted, seen, below = share * total, 0.0, 0.0
    for bound, count in zip(bounds, counts, strict=True):
        if count and seen + count >= wanted:
            return below if math.isinf(bound) else below + (bound - below) * (wanted - seen) / count
        seen += count
        below = below if math.isinf(bound) else bound
    return below


def thinned(positions: Sequence[int], most: int) -> list[int]:
    """At most ``most`` of the positions, with the first and the last."""
    if len(positions) <= most:
        return list(positions)
    step = (len(positions) - 1) / (most - 1)
    return [positions[round(number * step)] for number in range(most)]

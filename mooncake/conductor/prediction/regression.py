# SPDX-License-Identifier: Apache-2.0
"""Coefficients that follow measurements: how many seconds each term of a formula costs on an instance.

``LeastSquares`` forgets old samples and is kept as its normal equations, so that a sample costs the same
however many came before. Three guards, because measurements come from busy machines. It minimises *relative*
errors, or one long prompt would outweigh a thousand short ones. Where samples don't separate terms, the ratio
of the prior coefficients stays: prompts of one length carry no information about the square of the length. No
coefficient goes below zero, so that no work takes negative time. ``FittedColumns`` has a fit for every
instance and one for all: an instance is estimated from its own samples when it has some, from those of all
until then, from the prior when there are none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Slots = NDArray[np.int64]

TRUSTED_SAMPLES = 8
"""Number of own samples from which on an instance is estimated from them."""

_KEPT = 0.5 ** (1 / 256)  # part of a sample's weight that is left after the next one
_RIDGE = 1e-5  # weight of the prior's shape beside all samples
_OUTLIER = 4.0
_OFTEN = 16  # the first samples each update the coefficients; later ones do in groups
_GATHERED = 8  # two roles' instances, before and after recent changes of membership
_SHORTEST_S, _LONGEST_S = 1e-9, 1e6


class LeastSquares:
    """The coefficients of a sum of terms."""

    def __init__(self, prior: Sequence[float], scale: Sequence[float]) -> None:
        self.coefficients = list(prior)
        self.num_samples = 0
        # A prior of zero may be wrong: no term's scale is smaller than is plausible.
        self._prior = [max(pair) for pair in zip(prior, scale, strict=True)]
        self._gram = [[0.0] * len(prior) for _ in prior]
        self._moment = [0.0] * len(prior)

    def expected(self, terms: Sequence[float]) -> float:
        return sum(term * one for term, one in zip(terms, self.coefficients, strict=True))

    def add(self, terms: Sequence[float], seconds: float) -> bool:
        """Add one sample; returns whether the coefficients changed. An impossible duration is ignored."""
        expected = self.expected(terms)
        if not (_SHORTEST_S < seconds < _LONGEST_S and expected > 0):
            return False
        # Errors are relative to the expected value; to the measured one while expectations may be far off.
        scale = seconds
        if self.num_samples >= TRUSTED_SAMPLES:
            seconds = min(max(seconds, expected / _OUTLIER), expected * _OUTLIER)
            scale = expected
        self.num_samples += 1
        # Plain loops: for three terms an array costs more to make than to fill.
        relative = [prior * term / scale for prior, term in zip(self._prior, terms, strict=True)]
        for row, one in zip(self._gram, relative, strict=True):
            for column, other in enumerate(relative):
                row[column] = row[column] * _KEPT + one * other
        for row_number, one in enumerate(relative):
            self._moment[row_number] = self._moment[row_number] * _KEPT + one * seconds / scale
        if self.num_samples > _OFTEN and self.num_samples % _OFTEN:
            return False
        self._solve()
        return True

    def _solve(self) -> None:
        """Solve the least squares over the coefficients that don't become negative.

        Where samples don't separate terms, these keep the proportion of the prior: the simplest assumption is
        that an instance is faster or slower as a whole.
        """
        gram, moment = np.array(self._gram), np.array(self._moment)
        ridge = _RIDGE * gram.trace()
        moment += ridge * moment.sum() / gram.sum()
        gram.reshape(-1)[:: len(gram) + 1] += ridge
        free = list(range(len(gram)))
        while free:
            is_whole = len(free) == len(gram)
            rows = gram if is_whole else gram[np.ix_(free, free)]
            found = np.linalg.solve(rows, moment if is_whole else moment[free])
            worst = int(found.argmin())
            if found[worst] >= 0:
                break
            del free[worst]
        self.coefficients = [0.0] * len(self._prior)
        for position, factor in zip(free, found.tolist(), strict=True):
            self.coefficients[position] = factor * self._prior[position]

    def check(self) -> None:
        assert all(0 <= one < math.inf for one in self.coefficients)


class FittedColumns:
    """Coefficients of all instances as ``columns[term, slot]``."""

    def __init__(self, prior: Sequence[float], scale: Sequence[float]) -> None:
        self.common = LeastSquares(prior, scale)
        self.columns: Floats = np.empty((len(prior), 0))
        self._prior, self._scale = tuple(prior), tuple(scale)
        self._own: dict[int, LeastSquares] = {}
        self._is_trusted = np.empty(0, dtype=bool)
        self._gathered: dict[int, tuple[Slots, Floats]] = {}  # valid until a coefficient changes

    @property
    def _unmeasured(self) -> Floats:
        """Coefficients of an instance with few samples or none."""
        is_known = self.common.num_samples >= TRUSTED_SAMPLES
        return np.array(self.common.coefficients if is_known else self._prior)

    def of(self, slots: Slots) -> Floats:
        """``columns`` of these instances, cached if ``slots`` is a read-only array."""
        known = self._gathered.get(id(slots))
        if known is not None and known[0] is slots:
            return known[1]
        columns = self.columns.take(slots, axis=1)
        if not slots.flags.writeable:
            if len(self._gathered) >= _GATHERED:
                self._gathered.clear()
            self._gathered[id(slots)] = (slots, columns)
        return columns

    def grow(self, num_slots: int) -> None:
        self._gathered.clear()
        added = num_slots - self.columns.shape[1]
        self.columns = np.hstack([self.columns, np.tile(self._unmeasured[:, None], added)])
        self._is_trusted = np.append(self._is_trusted, np.zeros(added, dtype=bool))

    def add(self, slot: int, terms: Sequence[float], seconds: float) -> None:
        if self.common.add(terms, seconds):
            self._gathered.clear()
            self.columns[:, ~self._is_trusted] = self._unmeasured[:, None]
        own = self._own.get(slot)
        if own is None:
            own = self._own[slot] = LeastSquares(self._prior, self._scale)
        if own.add(terms, seconds) and own.num_samples >= TRUSTED_SAMPLES:
            self._gathered.clear()
            self._is_trusted[slot] = True
            self.columns[:, slot] = own.coefficients

    def forget(self, slot: int) -> None:
        """Reset a slot, which another instance has now."""
        self._gathered.clear()
        self._own.pop(slot, None)
        self._is_trusted[slot] = False
        self.columns[:, slot] = self._unmeasured

    def check(self) -> None:
        assert (self.columns >= 0).all() and np.isfinite(self.columns).all()
        for slots, columns in self._gathered.values():
            assert (columns == self.columns[:, slots]).all()

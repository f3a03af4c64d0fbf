"""Coefficients that follow measurements: how many seconds each term of a formula costs on an instance.

A ``Fit`` is least squares that forgets, kept as its normal equations, so that a sample costs the same
however many came before. Three guards, because what is measured is measured on busy machines. It
minimises *relative* errors, or one long prompt would outweigh a thousand short ones. Where samples don't
tell terms apart, the shape of what was believed before stays: prompts of one length tell nothing about
the square of the length. No coefficient goes below zero, so that no work ever takes less than none. A
``FittedColumns`` has a fit for every instance and one for all: an instance is judged by its own samples
when it has some, by everybody's until then, by what was believed when nobody has any.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

TRUSTED_SAMPLES = 8
"""So many samples of its own, and an instance is judged by them."""

_KEPT = 0.5 ** (1 / 256)  # of a sample's weight, when the next one comes
_RIDGE = 1e-5  # how much the shape of what was believed before weighs beside all samples
_OUTLIER = 4.0
_SHORTEST_S, _LONGEST_S = 1e-9, 1e6


class Fit:
    """The coefficients of a sum of terms."""

    def __init__(self, prior: Sequence[float]) -> None:
        assert all(one > 0 for one in prior), "a coefficient that is believed to be 0 stays there"
        self.coefficients = np.array(prior)
        self.num_samples = 0
        self._prior = np.array(prior)
        self._gram = np.zeros((len(prior), len(prior)))
        self._moment = np.zeros(len(prior))

    def add(self, terms: Sequence[float], seconds: float) -> bool:
        """Take one sample; returns whether the coefficients moved. What can't be a duration is ignored."""
        expected = float(self.coefficients @ terms)
        if not (_SHORTEST_S < seconds < _LONGEST_S and expected > 0):
            return False
        # Errors count as a part of what is expected; of what is measured, while expectations may be far off.
        scale = seconds
        if self.num_samples >= TRUSTED_SAMPLES:
            seconds = min(max(seconds, expected / _OUTLIER), expected * _OUTLIER)
            scale = expected
        self.num_samples += 1
        relative = self._prior * terms / scale
        self._gram = self._gram * _KEPT + np.outer(relative, relative)
        self._moment = self._moment * _KEPT + relative * (seconds / scale)
        if self.num_samples > 32 and self.num_samples % 16:
            return False
        self._solve()
        return True

    def _solve(self) -> None:
        """Least squares over those coefficients that don't want to be negative.

        Where samples don't tell terms apart, these keep the proportion in which they were believed: an
        instance is faster or slower as a whole before it is anything else.
        """
        size = len(self._prior)
        ridge = _RIDGE * self._gram.trace()
        pull = ridge * self._moment.sum() / self._gram.sum()
        factors = np.zeros(size)
        free = list(range(size))
        while free:
            gram = self._gram[np.ix_(free, free)] + ridge * np.eye(len(free))
            found = np.linalg.solve(gram, self._moment[free] + pull)
            if (worst := int(found.argmin())) >= 0 and found[worst] >= 0:
                factors[free] = found
                break
            del free[worst]
        self.coefficients = factors * self._prior

    def check(self) -> None:
        assert (self.coefficients >= 0).all() and np.isfinite(self.coefficients).all()


class FittedColumns:
    """``columns[term, slot]``: what each instance's work costs."""

    def __init__(self, prior: Sequence[float]) -> None:
        self.common = Fit(prior)
        self.columns: Floats = np.empty((len(prior), 0))
        self._prior = tuple(prior)
        self._own: dict[int, Fit] = {}
        self._is_trusted = np.empty(0, dtype=bool)

    @property
    def _unmeasured(self) -> Floats:
        """What an instance costs that has told little or nothing."""
        is_known = self.common.num_samples >= TRUSTED_SAMPLES
        return self.common.coefficients if is_known else np.array(self._prior)

    def grow(self, num_slots: int) -> None:
        added = num_slots - self.columns.shape[1]
        self.columns = np.hstack([self.columns, np.tile(self._unmeasured[:, None], added)])
        self._is_trusted = np.append(self._is_trusted, np.zeros(added, dtype=bool))

    def add(self, slot: int, terms: Sequence[float], seconds: float) -> None:
        if self.common.add(terms, seconds):
            self.columns[:, ~self._is_trusted] = self._unmeasured[:, None]
        own = self._own.get(slot)
        if own is None:
            own = self._own[slot] = Fit(self._prior)
        if own.add(terms, seconds) and own.num_samples >= TRUSTED_SAMPLES:
            self._is_trusted[slot] = True
            self.columns[:, slot] = own.coefficients

    def forget(self, slot: int) -> None:
        """Another instance has the slot now."""
        self._own.pop(slot, None)
        self._is_trusted[slot] = False
        self.columns[:, slot] = self._unmeasured

    def check(self) -> None:
        assert (self.columns >= 0).all() and np.isfinite(self.columns).all()

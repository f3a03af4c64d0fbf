# SPDX-License-Identifier: Apache-2.0
"""Predictions of TTFT and TPOT from measured rows, with intervals that hold what they promise.

The prediction is a Gaussian process over the logarithm of a time's ratio to its physical estimate (Rasmussen
and Williams, 2006, chapters 2 and 5): rows are alike by their quantities and estimates on logarithmic scales,
and by how many of their names are equal; a linear kernel carries on where no row is near. How much each
column matters is found by the marginal likelihood's gradient. Intervals are widened until 90 % of the fitted
rows, each predicted from the others only, lie inside (conformal prediction: Vovk, Gammerman and Shafer,
2005), by mode; for a model, a card or an engine that the fit has not seen, until 90 % of whole ones do.
All these leave-out predictions follow from one inverse (chapter 5.4.2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from random import Random
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from mooncake.sim.silicon.measured_rows import DERIVED_NAMES, NAMES, TARGETS, Floats, MeasuredRow

NORMAL_90 = 1.6449
"""Standard deviations on each side of a normal distribution's 90 %."""
SEARCHED = 700
"""Rows on which the columns' weights are searched."""
NUM_STEPS = 40
NOISE = 1e-3
"""Variance of equal configurations' measurements. Not searched: a few configurations that differ in what no
column says would make it large, and all others smooth; intervals are calibrated, whatever it is."""
LINEAR = 0.3
"""Variance of the linear kernel, per column."""
FEWEST = 20
"""Rows of a mode from which its own intervals are calibrated."""
FEWEST_TO_NARROW = SEARCHED
"""Rows from which intervals may be narrower than the process itself says: the errors of fewer are less than
those of others, because the columns are weighed by all of them."""
_KERNEL_NAMES = tuple(
    (*NAMES, *DERIVED_NAMES).index(one)
    for one in (*(one for one in NAMES if one != "model_path"), *DERIVED_NAMES)
)
_MOST_SCALED = 6.0
"""Standard deviations from the mean at which a quantity stops being further away."""
_MOST_LINEAR = 3.0


class _Group(NamedTuple):
    """Rows of equal ``columns`` are left out together to calibrate the intervals of new ones."""

    columns: tuple[str, ...]
    fewest: int = 3
    "So many groups tell how far another may be off."
    factor: float = 3.0
    "By how much intervals are wider where there are fewer."


_GROUPS = {
    "pair": _Group(("architecture", "system")),
    "model": _Group(("architecture",)),
    "card": _Group(("system",)),
    "engine": _Group(("backend",), fewest=2),  # three were measured: each lies where the other two say
    "mode": _Group(("mode",), factor=2.0),  # there are two: a fit without one can have no groups
}
"""What a fit may not have seen of a row."""
RANGE = "range"
"""A length or a number of cards beyond those of the fitted rows, or more requests at once, are new, too. For
fewer, intervals hold as they are: such requests wait for little, as the physical estimate says."""
_RANGED = ("isl", "osl", "concurrency", "prefill_gpus", "decode_gpus")
_BEYOND = math.log(1.25)
"""What is less beyond counts as the same."""
_WIDER = 0.5
"""By how much intervals are wider for each natural logarithm by which a row is beyond."""
_OUTER = 0.4
"""Share of the rows that are left out at most to calibrate the intervals of rows beyond the others."""
_FEWEST_ENDS, _FACTOR_BEYOND = 3, 3.0
"""So many ends of ranges tell how far off predictions beyond them are, else intervals are so much wider."""
_OF_FACTS = ("model", "card")
"""Those of which physical facts may be known; else other intervals hold."""
KNOWN = "known"
"""The novelty of a row of which the fit has seen all of these."""


class TimePrediction(msgspec.Struct, frozen=True):
    """Predicted times of shape (n,), in seconds, and the factors by which they may be wrong: the standard
    deviation of the logarithm."""

    seconds: Floats
    deviation: Floats

    def interval(self) -> tuple[Floats, Floats]:
        """Bounds between which nine of ten new measurements lie."""
        width = NORMAL_90 * self.deviation
        return self.seconds * np.exp(-width), self.seconds * np.exp(width)


class _Columns(NamedTuple):
    scaled: Floats
    codes: NDArray[np.int64]


class _Kernels(NamedTuple):
    """Parts of the covariances, of shape (rows of left, rows of right), and the distance of quantities."""

    fine: Floats
    smooth: Floats
    linear: Floats
    distance: Floats

    @property
    def total(self) -> Floats:
        return self.fine + self.smooth + self.linear


class TimePredictor:
    """Predicts one of ``TARGETS`` from rows."""

    def __init__(self, rows: Sequence[MeasuredRow], target: str, seed: int = 0) -> None:
        """``seed`` chooses the rows on which columns are weighed, where there are many."""
        self._target, self._rows = target, rows
        quantities = _quantities(rows)
        has_any = ~np.isnan(quantities).all(axis=0)
        self._centre, deviations = np.zeros(quantities.shape[1]), np.zeros(quantities.shape[1])
        self._centre[has_any] = np.nanmean(quantities[:, has_any], axis=0)
        deviations[has_any] = np.nanstd(quantities[:, has_any], axis=0)
        # A column that never changes says nothing of what its changes do: a change counts on its own scale.
        # One that no row has says nothing at all.
        self._scale = np.where(has_any, np.where(deviations > 1e-6, deviations, 1.0), math.inf)
        self._codes: list[dict[str, int]] = [{} for _ in _KERNEL_NAMES]
        self._known = self._columns(rows)
        estimates = np.log([row.estimate_s(target) for row in rows])
        self._has_estimates = not np.isnan(estimates).all()
        self._usual = float(np.nanmean(estimates)) if self._has_estimates else 0.0
        ratios = np.log([getattr(row, f"{target}_s") for row in rows]) - np.nan_to_num(
            estimates, nan=self._usual
        )
        self._mean, self._ratios = float(ratios.mean()), ratios - ratios.mean()
        num_quantities = quantities.shape[1]
        # Logarithms: the length over which each quantity matters, the distance of two names, and of the two
        # kernels their variances.
        self._start = np.concatenate(
            [np.full(num_quantities, 1.0), np.full(len(_KERNEL_NAMES), -1.5), np.log([0.5, 1.0])]
        )
        self._weights = self._start.copy()
        chosen = list(range(len(rows)))
        Random(seed).shuffle(chosen)
        self._search(np.array(sorted(chosen[:SEARCHED])))
        matrix = self._kernels(self._known, self._known).total
        matrix[np.diag_indices_from(matrix)] += NOISE
        self._inverse = np.linalg.inv(matrix)
        self._solved = self._inverse @ self._ratios
        self.residuals: Floats = self._solved / np.sqrt(np.diag(self._inverse))
        """Errors of the fitted rows, each predicted from all others, in predicted deviations."""
        self._seen = {
            kind: {tuple(row.named(one) for one in group.columns) for row in rows}
            for kind, group in _GROUPS.items()
        }
        self._ranges = _ranges_of(rows)
        self._widths = self._calibrated(rows)
        self._widths_without_facts: dict[str, float] = {}
        """By what is new, of rows whose model or card is in no table; found when such a row is predicted."""

    def novelty(self, row: MeasuredRow) -> str:
        """``known``, or what the fit has not seen: ``new model and card``."""
        unseen = self._unseen(row)
        return f"new {' and '.join(unseen)}" if unseen else KNOWN

    def _unseen(self, row: MeasuredRow) -> list[str]:
        unseen = [
            kind
            for kind, group in _GROUPS.items()
            if tuple(row.named(one) for one in group.columns) not in self._seen[kind]
        ]
        if "model" in unseen or "card" in unseen:
            unseen.remove("pair")
        if self.is_beyond(row):
            unseen.append(RANGE)
        return unseen

    def is_beyond(self, row: MeasuredRow) -> bool:
        """Whether a length, the load or a number of cards is beyond those of the fitted rows."""
        return _distance(row, self._ranges) > _BEYOND

    def predict(self, rows: Sequence[MeasuredRow]) -> TimePrediction:
        """What the rows' times will be; their own are not read."""
        found = [self._predict(rows[first : first + 1000]) for first in range(0, len(rows), 1000)]
        return TimePrediction(
            np.concatenate([one.seconds for one in found]), np.concatenate([one.deviation for one in found])
        )

    def draws(self, rows: Sequence[MeasuredRow], normals: Floats) -> Floats:
        """Times of shape (draws, rows) as they may be together: rows that are alike err alike. ``normals`` of
        the same shape are independent standard normal numbers."""
        columns = self._columns(rows)
        between = self._kernels(columns, self._known).total
        covariance = self._kernels(columns, columns).total - between @ self._inverse @ between.T
        covariance[np.diag_indices_from(covariance)] += NOISE
        widths = self._widths_of(rows)
        covariance *= widths[:, None] * widths[None, :]
        values, vectors = np.linalg.eigh(covariance)
        root = vectors * np.sqrt(np.maximum(values, 0.0))
        return np.asarray(np.exp(self._logarithms(rows, between) + normals @ root.T))

    def _predict(self, rows: Sequence[MeasuredRow]) -> TimePrediction:
        columns = self._columns(rows)
        between = self._kernels(columns, self._known).total
        own = math.exp(self._weights[-2]) + math.exp(self._weights[-1]) + NOISE + _linear_variance(columns)
        variance = np.maximum(own - ((between @ self._inverse) * between).sum(axis=1), NOISE)
        return TimePrediction(
            np.exp(self._logarithms(rows, between)), np.sqrt(variance) * self._widths_of(rows)
        )

    def _logarithms(self, rows: Sequence[MeasuredRow], between: Floats) -> Floats:
        estimates = np.nan_to_num(self._estimates(rows), nan=self._usual)
        return np.asarray(estimates + self._mean + between @ self._solved)

    def _estimates(self, rows: Sequence[MeasuredRow]) -> Floats:
        """NaN: unknown, as all are to a fit to none: it says nothing of times as ratios to them."""
        if not self._has_estimates:
            return np.full(len(rows), np.nan)
        return np.log([row.estimate_s(self._target) for row in rows])

    def _columns(self, rows: Sequence[MeasuredRow]) -> _Columns:
        """Scaled quantities and codes of names, of shape (n, columns). A new name is like no other; an
        unknown quantity is the mean one."""
        codes = [
            [
                known.setdefault(row.names[place], len(known))
                for known, place in zip(self._codes, _KERNEL_NAMES, strict=True)
            ]
            for row in rows
        ]
        scaled = np.nan_to_num((_quantities(rows) - self._centre) / self._scale)
        return _Columns(np.clip(scaled, -_MOST_SCALED, _MOST_SCALED), np.array(codes))

    def _kernels(self, left: _Columns, right: _Columns) -> _Kernels:
        """An exponential kernel for details, a smooth one for the whole, and a linear one."""
        num_quantities = left.scaled.shape[1]
        lengths = np.exp(-self._weights[:num_quantities])
        first, second = left.scaled * lengths, right.scaled * lengths
        squares = (first**2).sum(axis=1)[:, None] + (second**2).sum(axis=1)[None, :] - 2 * first @ second.T
        squares = np.maximum(squares, 0.0)
        differing = np.zeros_like(squares)
        for column, weight in enumerate(np.exp(self._weights[num_quantities:-2])):
            differing += weight * (left.codes[:, column, None] != right.codes[None, :, column])
        distance = np.sqrt(squares + 1e-10)
        fine = math.exp(self._weights[-2]) * np.exp(-distance - differing)
        smooth = math.exp(self._weights[-1]) * np.exp(-0.15 * squares - 0.3 * differing)
        linear = LINEAR * (_clipped(left) @ _clipped(right).T / num_quantities + 1)
        return _Kernels(fine, smooth, linear, distance)

    # --- the columns' weights

    def _search(self, chosen: NDArray[np.int64]) -> None:
        """Weights of a large posterior probability given the chosen rows: steps along the gradient, each
        divided by its usual size (Adam: Kingma and Ba, 2015)."""
        known = _Columns(self._known.scaled[chosen], self._known.codes[chosen])
        target = self._ratios[chosen]
        differing = [(column[:, None] != column[None, :]).astype(np.float64) for column in known.codes.T]
        mean, square = np.zeros_like(self._weights), np.zeros_like(self._weights)
        for step in range(NUM_STEPS):
            gradient = self._gradient(known, target, differing)
            mean = 0.8 * mean + 0.2 * gradient
            square = 0.95 * square + 0.05 * gradient**2
            size = 0.2 * (1 - 0.7 * step / NUM_STEPS)
            usual = np.sqrt(square / (1 - 0.95 ** (step + 1))) + 1e-9
            self._weights = self._weights - size * mean / (1 - 0.8 ** (step + 1)) / usual

    def _gradient(self, known: _Columns, target: Floats, differing: list[Floats]) -> Floats:
        """Gradient of the negative logarithm of the weights' posterior probability."""
        kernels = self._kernels(known, known)
        matrix = kernels.total
        matrix[np.diag_indices_from(matrix)] += NOISE
        inverse = np.linalg.inv(matrix)
        solved = inverse @ target
        slope = inverse - np.outer(solved, solved)
        # Each weight's prior: a normal distribution about its start, 1.5 wide.
        gradient: Floats = (self._weights - self._start) / 1.5**2
        num_quantities = known.scaled.shape[1]
        scaled = known.scaled * np.exp(-self._weights[:num_quantities])
        by_distance = slope * (kernels.fine / kernels.distance + 0.3 * kernels.smooth)
        products = np.einsum("ij,ij->j", scaled, by_distance @ scaled)
        gradient[:num_quantities] += (scaled**2).T @ by_distance.sum(axis=1) - products
        by_names = slope * (kernels.fine + 0.3 * kernels.smooth)
        for column, is_other in enumerate(differing, num_quantities):
            gradient[column] -= 0.5 * math.exp(self._weights[column]) * float((by_names * is_other).sum())
        gradient[-2] += 0.5 * float((slope * kernels.fine).sum())
        gradient[-1] += 0.5 * float((slope * kernels.smooth).sum())
        return gradient

    # --- intervals

    def _calibrated(self, rows: Sequence[MeasuredRow]) -> dict[tuple[str, bool], float]:
        """By which factor predicted deviations are widened, by what is new and by mode."""
        is_disaggregated = np.array([row.is_disaggregated for row in rows])
        errors = np.abs(self.residuals)
        widths = {kind: self._width_of_groups(rows, group) for kind, group in _GROUPS.items()}
        found: dict[tuple[str, bool], float] = {}
        for mode in (False, True):
            of_mode = errors[is_disaggregated == mode]
            usual = _quantile_90(of_mode if len(of_mode) >= FEWEST else errors) / NORMAL_90
            if len(rows) < FEWEST_TO_NARROW:
                # One row alone has no error, and a few have less than others: columns are weighed by them.
                usual = max(usual, 1.0)
            found[KNOWN, mode] = usual
            for kind, width in widths.items():
                found[kind, mode] = max(usual, width)
        return found

    def _width_without_facts(self, kind: str) -> float:
        """The same factor where all rows of a group of ``kind`` are predicted from the others as if no facts
        of them were known: the estimates, of which predictions are ratios, are then the usual ones."""
        if kind not in self._widths_without_facts:
            self._widths_without_facts[kind] = self._calibrated_without_facts(_GROUPS[kind])
        return self._widths_without_facts[kind]

    def _calibrated_without_facts(self, group: _Group) -> float:
        groups = _grouped(self._rows, group)
        if len(groups) < group.fewest:
            return 2 * group.factor
        bare = [
            msgspec.structs.replace(row, estimates=(math.nan,) * len(row.estimates)) for row in self._rows
        ]
        measured = np.log([getattr(row, f"{self._target}_s") for row in self._rows])
        errors, shares = [], []
        for numbers in groups.values():
            columns = self._columns([bare[number] for number in numbers])
            between = self._kernels(columns, self._known).total
            between[:, numbers] = 0.0
            # The inverse without the group's rows, from the whole one (Rasmussen and Williams, appendix A.3).
            across = self._inverse[:, numbers]
            block = np.linalg.inv(self._inverse[np.ix_(numbers, numbers)])
            solved = self._solved - across @ (block @ self._solved[numbers])
            reduced = between @ self._inverse - (between @ across) @ block @ across.T
            own = (
                math.exp(self._weights[-2]) + math.exp(self._weights[-1]) + NOISE + _linear_variance(columns)
            )
            variance = np.maximum(own - (reduced * between).sum(axis=1), NOISE)
            error = measured[numbers] - self._usual - self._mean - between @ solved
            errors.append(np.abs(error) / np.sqrt(variance))
            shares.append(np.full(len(numbers), 1 / len(numbers)))
        return _quantile_90(np.concatenate(errors), np.concatenate(shares)) / NORMAL_90

    @cached_property
    def _width_beyond(self) -> float:
        """The same where the rows with the least or the most of a quantity are predicted from the others,
        whose errors count less by how far beyond they are, as their intervals would be wider."""
        groups = _outer_groups(self._rows)
        if len(groups) < _FEWEST_ENDS:
            return _FACTOR_BEYOND
        return self._width_without(groups, [_wider_without(self._rows, one) for one in groups])

    def _width_of_groups(self, rows: Sequence[MeasuredRow], group: _Group) -> float:
        """The same where all rows of a group are predicted from the others; every group counts alike, because
        the next one is a group, too."""
        groups = _grouped(rows, group)
        return self._width_without(list(groups.values())) if len(groups) >= group.fewest else group.factor

    def _width_without(self, groups: Sequence[list[int]], wider: Sequence[Floats] | None = None) -> float:
        """``wider``: for each row of each group, by how much its own interval is wider than the others'."""
        errors, shares = [], []
        for place, numbers in enumerate(groups):
            block = np.linalg.inv(self._inverse[np.ix_(numbers, numbers)])
            deviations = np.sqrt(np.diag(block)) * (1.0 if wider is None else wider[place])
            errors.append(np.abs(block @ self._solved[numbers]) / deviations)
            shares.append(np.full(len(numbers), 1 / len(numbers)))
        return _quantile_90(np.concatenate(errors), np.concatenate(shares)) / NORMAL_90

    def _widths_of(self, rows: Sequence[MeasuredRow]) -> Floats:
        return np.array(
            [math.hypot(*map(partial(self._width_of, row), self._unseen(row) or (KNOWN,))) for row in rows]
        )

    def _width_of(self, row: MeasuredRow, kind: str) -> float:
        if kind == RANGE:
            width = max(self._widths[KNOWN, row.is_disaggregated], self._width_beyond)
            return width * _wider(row, self._ranges)
        width = self._widths[kind, row.is_disaggregated]
        if kind in _OF_FACTS and not row.has_facts:
            return max(width, self._width_without_facts(kind))
        return width


class RowPredictor:
    """Both times of rows."""

    def __init__(self, rows: Sequence[MeasuredRow], seed: int = 0) -> None:
        # A measurement that is given twice is one sample: predicted from its twin it would have no error, and
        # the intervals that are calibrated by such errors would hold nothing.
        rows = list({repr((one.names, one.quantities, one.ttft_s, one.tpot_s)): one for one in rows}.values())
        self.rows = rows
        self._by_target = {name: TimePredictor(rows, name, seed) for name in TARGETS}
        first, second = (self._by_target[name].residuals for name in TARGETS)
        spread = float(first.std() * second.std())
        self._correlation = (
            float(((first - first.mean()) * (second - second.mean())).mean()) / spread if spread else 0.0
        )

    def novelty(self, row: MeasuredRow) -> str:
        return self._by_target[TARGETS[0]].novelty(row)

    def is_beyond(self, row: MeasuredRow) -> bool:
        return self._by_target[TARGETS[0]].is_beyond(row)

    def predict(self, rows: Sequence[MeasuredRow]) -> dict[str, TimePrediction]:
        """By target."""
        return {name: one.predict(rows) for name, one in self._by_target.items()}

    def draws(self, rows: Sequence[MeasuredRow], num_draws: int, seed: int = 0) -> tuple[Floats, Floats]:
        """TTFT and TPOT of shape (draws, rows), as they may be together."""
        random = np.random.default_rng(seed)
        first, other = (random.standard_normal((num_draws, len(rows))) for _ in range(2))
        second = self._correlation * first + math.sqrt(max(0.0, 1 - self._correlation**2)) * other
        ttft, tpot = (self._by_target[name] for name in TARGETS)
        return ttft.draws(rows, first), tpot.draws(rows, second)


def _quantities(rows: Sequence[MeasuredRow]) -> Floats:
    counts = np.log1p(np.array([row.quantities for row in rows], dtype=np.float64))
    return np.hstack([counts, np.log(np.array([row.estimates for row in rows], dtype=np.float64))])


def _clipped(columns: _Columns) -> Floats:
    """Beyond the rows, a line is no longer continued."""
    return np.asarray(np.clip(columns.scaled, -_MOST_LINEAR, _MOST_LINEAR))


def _linear_variance(columns: _Columns) -> Floats:
    return np.asarray(LINEAR * ((_clipped(columns) ** 2).mean(axis=1) + 1))


def _grouped(rows: Sequence[MeasuredRow], group: _Group) -> dict[tuple[str, ...], list[int]]:
    """Numbers of the rows that are left out together."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for number, row in enumerate(rows):
        groups.setdefault(tuple(row.named(one) for one in group.columns), []).append(number)
    return groups


def _ranges_of(rows: Sequence[MeasuredRow]) -> dict[str, tuple[float, float]]:
    """Least and most of each quantity that has a range."""
    columns = {one: [row.quantity(one) for row in rows] for one in _RANGED}
    lows = {one: min(values) for one, values in columns.items()} | {"concurrency": 0.0}
    return {one: (lows[one], max(values)) for one, values in columns.items()}


def _distance(row: MeasuredRow, ranges: dict[str, tuple[float, float]]) -> float:
    """The natural logarithm of the factor by which a row is beyond one of the ranges; 0: beyond none."""
    ratios = [max(low / row.quantity(one), row.quantity(one) / high) for one, (low, high) in ranges.items()]
    return math.log(max(1.0, *ratios))


def _wider(row: MeasuredRow, ranges: dict[str, tuple[float, float]]) -> float:
    """The factor by which a row's interval is wider because it is beyond one of the ranges."""
    return 1 + _WIDER * _distance(row, ranges)


def _wider_without(rows: Sequence[MeasuredRow], numbers: list[int]) -> Floats:
    """By how much intervals of some rows are wider where the others are fitted."""
    left_out = set(numbers)
    ranges = _ranges_of([row for number, row in enumerate(rows) if number not in left_out])
    return np.array([_wider(rows[number], ranges) for number in numbers])


def _outer_groups(rows: Sequence[MeasuredRow]) -> list[list[int]]:
    """Numbers of the rows at each end of each range."""
    groups: list[list[int]] = []
    for column in _RANGED:
        values = np.array([row.quantity(column) for row in rows])
        for outer in (-values,) if column == "concurrency" else (values, -values):
            steps = np.unique(outer)[:-1]
            fewest = [step for step in steps if (outer <= step).mean() <= _OUTER]
            group = np.flatnonzero(outer <= fewest[-1]).tolist() if fewest else []
            if group and group not in groups:  # prefill and decode of aggregated rows have the same cards
                groups.append(group)
    return groups


def _quantile_90(values: Floats, shares: Floats | None = None) -> float:
    """The least value that nine tenths of the weight, and of one value more, do not exceed."""
    order = np.argsort(values)
    weights = np.ones(len(values)) if shares is None else shares[order]
    reached = np.cumsum(weights) / (weights.sum() + weights.mean())
    place = int(np.searchsorted(reached, 0.9))
    return float(values[order[min(place, len(values) - 1)]])


# --- the grade


class GroupError(msgspec.Struct, frozen=True):
    """Relative errors of the predictions of a group of rows."""

    num_rows: int
    median: float
    mean: float
    p90: float
    within: float
    "Share of measurements inside the predicted interval of 90 %."
    median_width: float
    "Half of the interval, as the factor by which its ends differ from the prediction."


def group_errors(
    rows: Sequence[MeasuredRow],
    prediction: TimePrediction,
    target: str,
    label: Callable[[MeasuredRow], str | None] = lambda row: "all",
) -> dict[str, GroupError]:
    """By the label of each row; rows without a label (None) or a measured time are not graded."""
    measured = np.array([getattr(row, f"{target}_s") for row in rows])
    errors = np.abs(prediction.seconds / measured - 1)
    low, high = prediction.interval()
    names = [label(row) for row in rows]
    is_graded = ~np.isnan(measured) & np.array([name is not None for name in names], dtype=bool)
    is_within = (measured >= low) & (measured <= high)
    labels = np.array([name or "unnamed" for name in names])
    return {
        str(name): GroupError(
            int(of.sum()),
            float(np.median(errors[of])),
            float(errors[of].mean()),
            float(np.quantile(errors[of], 0.9)),
            float(is_within[of].mean()),
            float(np.median((high / prediction.seconds)[of])),
        )
        for name in sorted(set(labels[is_graded].tolist()))
        for of in [is_graded & (labels == name)]
    }

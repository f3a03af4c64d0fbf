# SPDX-License-Identifier: Apache-2.0
"""Measured TTFT and TPOT by model, card, engine and parallelism, and predictions of others.

Rows have the form of aiconfigurator's table of measurements. The prediction is a Gaussian process over the
logarithm of a time (Rasmussen and Williams, 2006, chapters 2 and 5): rows are alike by their lengths, loads
and numbers of cards on logarithmic scales, and by how many of their names (model, card, engine, precision)
are equal. It returns the standard deviation of every prediction; far from all rows it returns their mean
with a wide one. How much each column matters is found from the rows by the marginal likelihood, one
coordinate at a time. Knows nothing of steps; ``engine_run.py`` does.
"""

from __future__ import annotations

import csv
import gzip
import io
import math
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from random import Random

import msgspec
import numpy as np
from numpy.typing import NDArray

from mooncake.errors import InvalidArgument

Floats = NDArray[np.float64]

NAMES = (
    "backend",
    "backend_version",
    "model_path",
    "system",
    "precision",
    "mode",
    "gemm_quant_mode",
    "moe_quant_mode",
)
"""Columns whose values are equal or not."""
QUANTITIES = (
    "isl",
    "osl",
    "concurrency",
    "load",
    "prefill_gpus",
    "decode_gpus",
    "prefill_workers",
    "decode_workers",
)
PARALLELISM = ("tp", "attention_dp", "moe_tp", "moe_ep")
"""Columns that each side has."""
TARGETS = ("ttft", "tpot")
MOST_ROWS = 20_000
"""A prediction needs memory with the square of the rows."""
SEARCHED = 700
"""Rows on which the search for the columns' weights is done."""


class MeasuredRow(msgspec.Struct, frozen=True):
    """One measured configuration."""

    id: str
    names: tuple[str, ...]
    "In the order of ``NAMES``."
    quantities: tuple[float, ...]
    "In the order of ``QUANTITIES``, then ``PARALLELISM`` of prefill and of decode."
    ttft_s: float
    tpot_s: float

    @property
    def is_disaggregated(self) -> bool:
        return self.names[NAMES.index("mode")] == "disagg"

    @property
    def cell(self) -> tuple[object, ...]:
        """What is equal in rows that are compared: all but the mode and the engine's cards and load."""
        names = dict(zip(NAMES, self.names, strict=True))
        return (
            *(names[one] for one in ("model_path", "system", "precision", "backend")),
            *self.quantities[:2],
        )

    def tokens_per_s_and_gpu(self, ttft_s: float, tpot_s: float) -> float:
        """Output tokens per second and card at these times."""
        found = dict(zip(QUANTITIES, self.quantities, strict=False))
        gpus = found["decode_gpus"] + (found["prefill_gpus"] if self.is_disaggregated else 0)
        return found["concurrency"] * found["osl"] / (ttft_s + tpot_s * (found["osl"] - 1)) / max(1.0, gpus)


def read_rows(path: Path) -> list[MeasuredRow]:
    """Rows of a CSV file, which may be compressed with gzip.

    Raises:
        InvalidArgument: it is no such file, or has no usable rows or too many.
    """
    try:
        content = path.read_bytes()
        text = (gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content).decode()
        rows = [_row(fields) for fields in csv.DictReader(io.StringIO(text))]
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, csv.Error) as error:
        problem = f"column {error} is missing" if isinstance(error, KeyError) else str(error)
        raise InvalidArgument(
            "rows", str(path), f"a CSV file of measured TTFT and TPOT ({problem})"
        ) from error
    found = [row for row in rows if row is not None]
    if not 0 < len(found) <= MOST_ROWS:
        raise InvalidArgument("rows", str(path), f"1 to {MOST_ROWS} rows with both times, not {len(found)}")
    return found


def _row(fields: dict[str, str]) -> MeasuredRow | None:
    ttft_s, tpot_s = (_number(fields[f"silicon_{name}_ms"]) / 1000 for name in TARGETS)
    if not (ttft_s > 0 and tpot_s > 0 and math.isfinite(ttft_s) and math.isfinite(tpot_s)):
        return None
    sides = ("prefill_", "decode_") if fields["mode"] == "disagg" else ("", "")
    parallel = [[_number(fields.get(f"{side}{one}_size", "")) for one in PARALLELISM] for side in sides]
    workers = [_number(fields.get(f"{side}num_workers", "")) or 1.0 if side else 1.0 for side in sides]
    pipelines = [_number(fields.get(f"{side}pp_size", "")) or 1.0 for side in sides]
    gpus = [
        max(1.0, one[0]) * number * pipeline
        for one, number, pipeline in zip(parallel, workers, pipelines, strict=True)
    ]
    named = re.search(r"silicon_concurrency=(\d+)", fields.get("silicon_data_source", ""))
    concurrency = float(named[1]) if named else _number(fields.get("batch_size", "")) or 1.0
    lengths = [_number(fields[one]) for one in ("isl", "osl")]
    quantities = (*lengths, concurrency, concurrency / gpus[1], *gpus, *workers, *parallel[0], *parallel[1])
    names = tuple(fields.get(one, "") for one in NAMES)
    return MeasuredRow(fields["id"], names, quantities, ttft_s, tpot_s)


def _number(text: str) -> float:
    return float(text) if text else 0.0


# --- the prediction


class TimePrediction(msgspec.Struct, frozen=True):
    """Predicted times of shape (n,), in seconds, and the factors by which they may be wrong: the standard
    deviation of the logarithm."""

    seconds: Floats
    deviation: Floats

    def interval(self, share: float = 0.9) -> tuple[Floats, Floats]:
        """Bounds between which a new measurement lies with this probability (0.8 or 0.9)."""
        width = {0.8: 1.2816, 0.9: 1.6449}[share] * self.deviation
        return self.seconds * np.exp(-width), self.seconds * np.exp(width)


class TimePredictor:
    """Predicts one of ``TARGETS`` from rows. ``fit`` first."""

    def __init__(self, rows: Sequence[MeasuredRow], target: str, seed: int = 0) -> None:
        """``seed`` chooses the rows on which columns are weighed, where there are many."""
        self._rows, self._target = rows, target
        quantities = _quantities(rows)
        self._centre, self._scale = quantities.mean(axis=0), quantities.std(axis=0) + 1e-9
        self._codes: list[dict[str, int]] = [{} for _ in NAMES]
        self._known = self._columns(rows)
        logarithms = np.log([getattr(row, f"{target}_s") for row in rows])
        self._mean, self._logarithms = float(logarithms.mean()), logarithms - logarithms.mean()
        num_quantities = quantities.shape[1]
        # Logarithms: the length over which each quantity matters, the distance of two names, and of the two
        # kernels and the noise their variances.
        self._weights = np.concatenate(
            [np.full(num_quantities, 1.0), np.full(len(NAMES), -1.5), np.log([0.5, 1.0, 1e-3])]
        )
        chosen = list(range(len(rows)))
        Random(seed).shuffle(chosen)
        self._search(np.array(sorted(chosen[:SEARCHED])))
        matrix = self._kernel(self._known, self._known)
        matrix[np.diag_indices_from(matrix)] += math.exp(self._weights[-1])
        self._factor = np.linalg.cholesky(matrix)
        self._solved = np.linalg.solve(self._factor.T, np.linalg.solve(self._factor, self._logarithms))

    def predict(self, rows: Sequence[MeasuredRow]) -> TimePrediction:
        """What the rows' times will be; their own are not read."""
        found = [self._predict(rows[first : first + 1000]) for first in range(0, len(rows), 1000)]
        return TimePrediction(
            np.concatenate([one.seconds for one in found]), np.concatenate([one.deviation for one in found])
        )

    def _predict(self, rows: Sequence[MeasuredRow]) -> TimePrediction:
        between = self._kernel(self._columns(rows), self._known)
        own = math.exp(self._weights[-3]) + math.exp(self._weights[-2]) + math.exp(self._weights[-1])
        explained = np.linalg.solve(self._factor, between.T)
        variance = np.maximum(own - (explained**2).sum(axis=0), math.exp(self._weights[-1]))
        return TimePrediction(np.exp(self._mean + between @ self._solved), np.sqrt(variance))

    def _columns(self, rows: Sequence[MeasuredRow]) -> tuple[Floats, NDArray[np.int64]]:
        """Scaled quantities and codes of names, of shape (n, columns). A new name is like no other."""
        codes = [
            [known.setdefault(name, len(known)) for known, name in zip(self._codes, row.names, strict=True)]
            for row in rows
        ]
        return (_quantities(rows) - self._centre) / self._scale, np.array(codes)

    def _kernel(
        self, left: tuple[Floats, NDArray[np.int64]], right: tuple[Floats, NDArray[np.int64]]
    ) -> Floats:
        """Covariances, of shape (rows of left, rows of right): an exponential kernel for details and a smooth
        one for the whole."""
        num_quantities = left[0].shape[1]
        lengths = np.exp(-self._weights[:num_quantities])
        first, second = left[0] * lengths, right[0] * lengths
        squares = (first**2).sum(axis=1)[:, None] + (second**2).sum(axis=1)[None, :] - 2 * first @ second.T
        squares = np.maximum(squares, 0.0)
        differing = np.zeros_like(squares)
        for column, weight in enumerate(np.exp(self._weights[num_quantities:-3])):
            differing += weight * (left[1][:, column, None] != right[1][None, :, column])
        fine = math.exp(self._weights[-3]) * np.exp(-np.sqrt(squares + 1e-12) - differing)
        smooth = math.exp(self._weights[-2]) * np.exp(-0.15 * squares - 0.3 * differing)
        return np.asarray(fine + smooth)

    def _search(self, chosen: NDArray[np.int64]) -> None:
        """Weights of the largest marginal likelihood of the chosen rows, one coordinate at a time."""
        known, target = (self._known[0][chosen], self._known[1][chosen]), self._logarithms[chosen]

        def loss() -> float:
            matrix = self._kernel(known, known)
            matrix[np.diag_indices_from(matrix)] += math.exp(self._weights[-1])
            try:
                factor = np.linalg.cholesky(matrix)
            except np.linalg.LinAlgError:
                return math.inf
            solved = np.linalg.solve(factor, target)
            return float(0.5 * solved @ solved + np.log(np.diag(factor)).sum())

        best = loss()
        for scale in (1.0, 0.5):
            for place in range(len(self._weights)):
                for step in (scale, -scale, scale / 2, -scale / 2):
                    before = self._weights[place]
                    self._weights[place] = before + step
                    value = loss()
                    if value < best:
                        best = value
                        break
                    self._weights[place] = before


def _quantities(rows: Sequence[MeasuredRow]) -> Floats:
    return np.log1p(np.array([row.quantities for row in rows], dtype=np.float64))


# --- the grade


class GroupError(msgspec.Struct, frozen=True):
    """Relative errors of the predictions of a group of rows."""

    num_rows: int
    median: float
    mean: float
    p90: float
    within: float
    "Share of measurements inside the predicted interval of 90 %."


def group_errors(
    rows: Sequence[MeasuredRow], prediction: TimePrediction, target: str, column: str = ""
) -> dict[str, GroupError]:
    """By the value of one of ``NAMES``, or, without, of all under the name "all"."""
    measured = np.array([getattr(row, f"{target}_s") for row in rows])
    errors = np.abs(prediction.seconds / measured - 1)
    low, high = prediction.interval()
    is_within = (measured >= low) & (measured <= high)
    place = NAMES.index(column) if column else 0
    labels = np.array([row.names[place] or "unnamed" if column else "all" for row in rows])
    return {
        str(label): GroupError(
            int(of.sum()),
            float(np.median(errors[of])),
            float(errors[of].mean()),
            float(np.quantile(errors[of], 0.9)),
            float(is_within[of].mean()),
        )
        for label in sorted(set(labels.tolist()))
        for of in [labels == label]
    }


class ModeChoice(msgspec.Struct, frozen=True):
    """Whether disaggregation makes more tokens per second and card in a cell."""

    cell: str
    tpot_s: float | None
    "Objective that both modes must meet; None: none."
    measured_gain: float
    "Best of the disaggregated rows divided by the best of the aggregated ones."
    predicted_gain: float
    "The same, where predicted times choose the rows, too."

    @property
    def is_right(self) -> bool:
        return (self.measured_gain > 1) == (self.predicted_gain > 1)


def mode_choices(
    rows: Sequence[MeasuredRow], predicted_ttft_s: Floats, predicted_tpot_s: Floats
) -> list[ModeChoice]:
    """Every comparable cell: equal model, card, engine, precision and lengths, measured in both modes. First
    without an objective, then with every measured TPOT that some row of each mode meets."""
    measured = np.array([row.ttft_s for row in rows]), np.array([row.tpot_s for row in rows])
    predicted = predicted_ttft_s, predicted_tpot_s
    cells: dict[tuple[object, ...], tuple[list[int], list[int]]] = {}
    for number, row in enumerate(rows):
        cells.setdefault(row.cell, ([], []))[row.is_disaggregated].append(number)
    found: list[ModeChoice] = []
    for cell, modes in cells.items():
        if not all(modes):
            continue
        least_s = max(min(rows[one].tpot_s for one in mode) for mode in modes)
        objectives = sorted(
            {rows[one].tpot_s for mode in modes for one in mode if rows[one].tpot_s >= least_s}
        )
        for objective_s in (None, *objectives):
            gains = [_gain(rows, modes, times, objective_s) for times in (measured, predicted)]
            found.append(ModeChoice(" ".join(map(str, cell)), objective_s, *gains))
    return found


def _gain(
    rows: Sequence[MeasuredRow],
    modes: tuple[list[int], list[int]],
    times: tuple[Floats, Floats],
    objective_s: float | None,
) -> float:
    ttft_s, tpot_s = times
    aggregated, disaggregated = (
        max(
            (
                rows[one].tokens_per_s_and_gpu(float(ttft_s[one]), float(tpot_s[one]))
                for one in mode
                if objective_s is None or tpot_s[one] <= objective_s
            ),
            default=0.0,
        )
        for mode in modes
    )
    return disaggregated / aggregated if aggregated else math.inf if disaggregated else 0.0

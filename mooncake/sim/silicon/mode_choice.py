# SPDX-License-Identifier: Apache-2.0
"""Whether disaggregation makes more tokens per card, measured and predicted.

It compares configurations of one cell: equal model, card, engine, precision and lengths. The prediction is a
vote of joint draws, not a comparison of two predicted times: the best of several configurations within an
objective depends on which of them meet it, and a configuration that is predicted just above an objective is
often below.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from mooncake.sim.silicon.measured_rows import Floats, MeasuredRow

Draw = Callable[[list[MeasuredRow]], tuple[Floats, Floats]]
"""Possible TTFT and TPOT of rows, both of shape (draws, rows)."""
SURE = 0.8
"""Share of draws from which a choice is called sure."""


class ModeChoice(msgspec.Struct, frozen=True):
    """Whether disaggregation makes more tokens per second and card in a cell."""

    cell: str
    tpot_s: float | None
    "Objective that both modes must meet; None: none."
    measured_gain: float
    "Best of the disaggregated rows divided by the best of the aggregated ones."
    probability: float
    "Share of draws in which it is above 1."

    @property
    def is_right(self) -> bool:
        return (self.measured_gain > 1) == (self.probability > 0.5)

    @property
    def is_sure(self) -> bool:
        return not 1 - SURE < self.probability < SURE


def mode_choices(rows: Sequence[MeasuredRow], draw: Draw) -> list[ModeChoice]:
    """Every comparable cell: measured in both modes. First without an objective, then with every measured
    TPOT that some row of each mode meets."""
    cells: dict[tuple[object, ...], tuple[list[MeasuredRow], list[MeasuredRow]]] = {}
    for row in rows:
        cells.setdefault(row.cell, ([], []))[row.is_disaggregated].append(row)
    found: list[ModeChoice] = []
    for cell, modes in cells.items():
        if not all(modes):
            continue
        compared = [*modes[0], *modes[1]]
        measured = np.array([[row.ttft_s for row in compared]]), np.array([[row.tpot_s for row in compared]])
        drawn = draw(compared)
        least_s = max(min(row.tpot_s for row in mode) for mode in modes)
        objectives = sorted({row.tpot_s for row in compared if row.tpot_s >= least_s})
        for objective_s in (None, *objectives):
            aggregated, disaggregated = _best(compared, measured, objective_s)
            gain = _ratio(float(disaggregated[0]), float(aggregated[0]))
            aggregated, disaggregated = _best(compared, drawn, objective_s)
            # Where neither meets the objective in a draw, it says nothing: half a vote for each.
            votes = (disaggregated > aggregated) + 0.5 * (disaggregated == aggregated)
            found.append(ModeChoice(" ".join(map(str, cell)), objective_s, gain, float(votes.mean())))
    return found


def tokens_per_s_and_gpu(row: MeasuredRow, ttft_s: Floats, tpot_s: Floats) -> Floats:
    """Output tokens per second and card at these times."""
    num_output = row.quantity("osl")
    answer_s = ttft_s + tpot_s * (num_output - 1)
    return row.quantity("concurrency") * num_output / answer_s / max(1.0, row.num_gpus)


def _best(
    rows: Sequence[MeasuredRow], times: tuple[Floats, Floats], objective_s: float | None
) -> tuple[Floats, Floats]:
    """Most tokens per second and card of each mode, of shape (draws,); 0 where none meets the objective."""
    ttft_s, tpot_s = times
    best = np.zeros((2, len(ttft_s)))
    for number, row in enumerate(rows):
        speed = tokens_per_s_and_gpu(row, ttft_s[:, number], tpot_s[:, number])
        if objective_s is not None:
            speed = np.where(tpot_s[:, number] <= objective_s, speed, 0.0)
        best[int(row.is_disaggregated)] = np.maximum(best[int(row.is_disaggregated)], speed)
    return best[0], best[1]


def _ratio(disaggregated: float, aggregated: float) -> float:
    return disaggregated / aggregated if aggregated else math.inf if disaggregated else 0.0

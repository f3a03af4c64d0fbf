# SPDX-License-Identifier: Apache-2.0
"""Fit the cost models to measured times of a live cluster: least squares with non-negative coefficients.

It owns the fits and refuses to know how something was measured. Relative errors are minimised, because a
model is used for short prompts as much as for long ones. A coefficient that would be negative is noise
about a cost too small to measure: it becomes 0 and the others are fitted again.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from mooncake.conductor.prediction import DecodeModel, PrefillModel
from mooncake.errors import InvalidArgument


class PrefillSample(msgspec.Struct, frozen=True):
    """An instance was busy for ``seconds`` computing prompt tokens [first, end)."""

    first: int
    end: int
    seconds: float


class StepSample(msgspec.Struct, frozen=True):
    """A step of decode."""

    batch_size: int
    context_tokens: int
    seconds: float


class CostFit(msgspec.Struct, frozen=True):
    """The coefficients and the remaining mean absolute relative error."""

    coefficients: tuple[float, ...]
    error: float


def fit_prefill(samples: Sequence[PrefillSample]) -> tuple[PrefillModel, float]:
    """The model and its mean absolute relative error. Raises InvalidArgument: too few different lengths."""
    if len({one.end for one in samples}) < 3:
        raise InvalidArgument("samples", len(samples), "prompts of at least three different lengths")
    rows = [(1.0, one.end - one.first, float(one.end**2 - one.first**2)) for one in samples]
    fit = _fit(rows, [one.seconds for one in samples])
    c0, c1, c2 = fit.coefficients
    return PrefillModel(c0, c1, c2), fit.error


def fit_decode(samples: Sequence[StepSample]) -> tuple[DecodeModel, float]:
    """As ``fit_prefill``. Raises InvalidArgument: too few different batches."""
    if len({(one.batch_size, one.context_tokens) for one in samples}) < 2:
        raise InvalidArgument("samples", len(samples), "steps of at least two different batches")
    rows = [(1.0, float(one.batch_size), float(one.context_tokens)) for one in samples]
    fit = _fit(rows, [one.seconds for one in samples])
    base_s, per_request_s, per_token_s = fit.coefficients
    return DecodeModel(base_s, per_request_s, per_token_s), fit.error


def _fit(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> CostFit:
    for value in seconds:
        if not value > 0:
            raise InvalidArgument("seconds", value, "more than 0")
    matrix, target = np.array(rows, dtype=np.float64), np.array(seconds, dtype=np.float64)
    weighted = matrix / target[:, None]
    used = [column for column in range(matrix.shape[1]) if weighted[:, column].any()]
    while True:
        scale = np.abs(weighted[:, used]).max(axis=0)
        found, *_ = np.linalg.lstsq(weighted[:, used] / scale, np.ones(len(target)), rcond=None)
        found = found / scale
        if (found >= 0).all() or len(used) == 1:
            break
        used.pop(int(np.argmin(found * scale)))
    coefficients = np.zeros(matrix.shape[1])
    coefficients[used] = np.maximum(found, 0.0)
    error = float(np.abs(matrix @ coefficients / target - 1.0).mean())
    return CostFit(tuple(float(one) for one in coefficients), error)

# SPDX-License-Identifier: Apache-2.0
"""Coefficients are found from few samples, follow change, and never go below zero."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake.conductor.prediction.regression import TRUSTED_SAMPLES, FittedColumns, LeastSquares

PRIOR = (0.01, 1e-4, 1e-9)
SCALE = (1e-2, 1e-6, 1e-11)


def terms(first: int, end: int) -> tuple[float, float, float]:
    return 1.0, end - first, end * end - first * first


def seconds(of: tuple[float, float, float], *truth: float) -> float:
    return sum(term * one for term, one in zip(of, truth, strict=True))


def test_the_truth_is_found_through_noise() -> None:
    fit, random = LeastSquares(PRIOR, SCALE), Random(1)
    truth = (0.07, 1.1e-4, 7e-10)
    for _ in range(300):
        sample = terms(0, random.randrange(100, 100_000))
        fit.add(sample, seconds(sample, *truth) * random.uniform(0.9, 1.1))
    for length in (500, 5_000, 50_000):
        sample = terms(0, length)
        assert fit.expected(sample) == pytest.approx(seconds(sample, *truth), rel=0.05)


def test_a_prior_of_zero_may_be_corrected() -> None:
    fit, random = LeastSquares((0.0, 1e-4, 1e-9), SCALE), Random(4)
    for _ in range(300):
        sample = terms(0, random.randrange(100, 20_000))
        fit.add(sample, seconds(sample, 0.07, 1e-4, 1e-9))
    assert fit.expected(terms(0, 200)) == pytest.approx(0.09, rel=0.05)


def test_prompts_of_one_length_change_the_speed_and_keep_the_shape() -> None:
    fit = LeastSquares(PRIOR, SCALE)
    for _ in range(20):
        fit.add(terms(0, 1000), 50 * seconds(terms(0, 1000), *PRIOR))
    assert fit.coefficients == pytest.approx([50 * one for one in PRIOR], rel=0.01)


def test_a_slowdown_is_followed() -> None:
    fit, random = LeastSquares(PRIOR, SCALE), Random(2)
    for slower in (1.0, 3.0):
        for _ in range(1000):
            sample = terms(0, random.randrange(100, 50_000))
            fit.add(sample, slower * seconds(sample, *PRIOR))
    assert fit.expected(terms(0, 10_000)) == pytest.approx(3 * seconds(terms(0, 10_000), *PRIOR), rel=0.15)


def test_one_absurd_sample_moves_little() -> None:
    fit = LeastSquares(PRIOR, SCALE)
    for length in range(1000, 31_000, 1000):
        fit.add(terms(0, length), seconds(terms(0, length), *PRIOR))
    fit.add(terms(0, 1000), 3600.0)
    assert fit.expected(terms(0, 5000)) == pytest.approx(seconds(terms(0, 5000), *PRIOR), rel=0.15)


@given(st.lists(st.tuples(st.integers(1, 200_000), st.floats(allow_nan=True)), max_size=60))
def test_no_sample_makes_work_negative(samples: list[tuple[int, float]]) -> None:
    fit = LeastSquares(PRIOR, SCALE)
    for length, measured in samples:
        fit.add(terms(0, length), measured)
        fit.check()


def test_an_instance_is_estimated_from_all_until_it_has_samples() -> None:
    columns = FittedColumns(PRIOR, SCALE)
    columns.grow(3)
    for number in range(TRUSTED_SAMPLES - 1):
        columns.add(0, terms(0, 1000), 10.0)
        assert columns.columns[:, 1] == pytest.approx(PRIOR), f"after {number + 1} samples"
    columns.add(0, terms(0, 1000), 10.0)
    assert columns.columns[:, 0] @ terms(0, 1000) == pytest.approx(10.0)
    assert columns.columns[:, 1] == pytest.approx(columns.common.coefficients)
    for _ in range(TRUSTED_SAMPLES):
        columns.add(2, terms(0, 1000), 1.0)
    assert columns.columns[:, 2] @ terms(0, 1000) == pytest.approx(1.0)
    columns.forget(2)
    assert columns.columns[:, 2] == pytest.approx(columns.common.coefficients)
    columns.check()

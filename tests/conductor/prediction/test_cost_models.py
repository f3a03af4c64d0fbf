# SPDX-License-Identifier: Apache-2.0
"""The formulas that convert tokens to seconds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake.conductor.prediction.cost_models import CostModels, DecodeModel, LinkModel, PrefillModel

MODEL = PrefillModel(0.01, 1e-4, 1e-9)


def test_a_prompt_costs_its_length_and_the_square_of_it() -> None:
    assert MODEL.seconds(0, 10_000) == pytest.approx(0.01 + 1.0 + 0.1)
    assert MODEL.seconds(10_000, 10_000) == pytest.approx(0.01), "an empty prefill costs a step's constant"


@given(st.integers(0, 200_000), st.integers(0, 200_000), st.integers(0, 200_000))
def test_computing_in_parts_costs_what_the_whole_costs(first: int, more: int, rest: int) -> None:
    """Except for each part's constant cost: attention to earlier tokens is paid once per token."""
    middle, end = first + more, first + more + rest
    parts = MODEL.seconds(first, middle) + MODEL.seconds(middle, end)
    assert parts == pytest.approx(MODEL.seconds(first, end) + MODEL.c0)


def test_the_same_tokens_cost_more_behind_a_long_prefix() -> None:
    assert MODEL.seconds(50_000, 51_000) > MODEL.seconds(0, 1_000)


def test_a_step_reads_the_weights_once_and_every_context_once() -> None:
    step = DecodeModel(0.02, 0.001, 1e-6)
    assert step.seconds(0, 0) == pytest.approx(0.02)
    assert step.seconds(8, 10_000) == pytest.approx(0.02 + 0.008 + 0.01)


def test_a_transfer_is_its_latency_and_its_bytes() -> None:
    assert LinkModel(0.001, 1e9).seconds(5e8) == pytest.approx(0.501)
    assert CostModels().ssd.seconds(0) == CostModels().ssd.latency_s

# SPDX-License-Identifier: Apache-2.0
"""The formulas give the published values; estimates follow measurements."""

from __future__ import annotations

import pytest

from mooncake.conductor.prediction.cost_models import DecodeModel, LinkModel, PrefillModel


def test_prefill_by_halves_is_a_prefill() -> None:
    model = PrefillModel(0.0, 1.129e-4, 7.404e-10)
    assert model.seconds(0, 131072) == pytest.approx(27.5, rel=0.025)
    assert model.seconds(0, 1000) + model.seconds(1000, 5000) == pytest.approx(model.seconds(0, 5000))


def test_a_step_of_decode() -> None:
    assert DecodeModel(0.0261, 0.14e-3, 3.5e-8).seconds(10, 80_000) == pytest.approx(0.0303)


def test_a_transfer() -> None:
    assert LinkModel(0.001, 1e9).seconds(5e8) == pytest.approx(0.501)

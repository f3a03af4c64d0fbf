# SPDX-License-Identifier: Apache-2.0
"""The table of ``mooncake what-if``."""

from __future__ import annotations

from mooncake.cli.simulation.what_if import _NAMES, _table


def test_a_figure_without_an_effect_has_its_measurement_only() -> None:
    names = [name for name in _NAMES if name != "goodput_per_s"]
    quantiles = {"mean": 0.5, "p50": 0.5, "p90": 0.5}
    answer = {
        "rows": 30,
        "minutes": 1.0,
        "change": {"decode": 1},
        "measured": {
            "ttft_s": quantiles,
            "tbt_s": quantiles,
            "e2e_s": quantiles,
            "hit_rate": 0.5,
            "goodput_per_s": 0.0,
        },
        "expected": dict.fromkeys(names, 0.4),
        "effect": {name: {"value": -0.2, "low": -0.3, "high": -0.1} for name in names},
        "model_error": dict.fromkeys(names, 0.05),
    }
    rows = list(zip(*(column._cells for column in _table(answer).columns), strict=True))
    assert rows[-1] == ("good requests/s", "0.00", "", "", "", "")
    assert rows[0] == ("TTFT mean", "500.0 ms", "400.0 ms", "-20.0%", "-30.0% to -10.0%", "+5.0%")

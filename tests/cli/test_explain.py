# SPDX-License-Identifier: Apache-2.0
"""What ``mooncake explain`` prints of an answer; the query itself is tested with a cluster."""

from __future__ import annotations

import io
from typing import Any

import msgspec
from rich.console import Console

from mooncake.cli.explain import show
from mooncake.conductor.explanation import ActualTimes, Explanation
from mooncake.http.worker_stats import StageStats


def shown(actual: ActualTimes) -> str:
    explanation = Explanation(
        "r", 1.0, 100, "finished", "overlap", "soonest", "p", "d", "", 1, [], None, actual, None, []
    )
    found: dict[str, Any] = msgspec.to_builtins(explanation)
    output = io.StringIO()
    show(Console(file=output, width=120), found)
    return output.getvalue()


def test_the_stages_of_a_group_are_bars_on_one_axis() -> None:
    stages = [StageStats(0, 16, 4, 0.0, 3.0, 2.9, 0.1), StageStats(16, 30, 4, 1.0, 4.0, 2.5, 1.4)]
    lines = shown(ActualTimes(prefill_s=4.1, stages=stages)).splitlines()
    assert any("4 chunks in 4.000 s" in line for line in lines)
    first, second = (line for line in lines if "━━━━━" in line and " s " in line)
    assert "0-15" in first and "2.900 s" in first and "0.100 s" in first
    assert "16-29" in second and "2.500 s" in second and "1.400 s" in second
    assert first.count("━") == second.count("━") == 30, "three quarters of the time each"
    assert first.index("━") + 10 == second.index("━")


def test_without_a_group_there_is_no_such_table() -> None:
    assert "stages" not in shown(ActualTimes(prefill_s=4.1))

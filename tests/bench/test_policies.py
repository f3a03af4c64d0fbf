# SPDX-License-Identifier: Apache-2.0
"""The bench of policies: its rows, and what the default lacks."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import pytest

from bench import policies
from bench.drawn_workloads import drawn
from bench.policies import Outcome, regret
from bench.policy_workloads import WORKLOADS


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """The bench switches the collector off for its process."""
    yield
    gc.enable()


def test_the_regret_is_against_the_best_and_its_ttft_against_those_nearly_as_good() -> None:
    outcomes = {
        "overlap": Outcome(95.0, 2.0, 40.0, 0.0),
        "load": Outcome(97.0, 1.0, 40.0, 0.0),
        "random": Outcome(60.0, 0.1, 40.0, 0.0),
    }
    assert regret(outcomes, "overlap") == (2.0, 2.0)
    assert regret(outcomes, "load") == (0.0, 1.0)


def test_a_quick_run_has_a_row_for_each_policy_with_and_without_admission_and_for_each_rule(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--quick", "--only", "bursts 2P2D", "--policies", "overlap", "load", "--rules", "goodput"]
    monkeypatch.setattr(sys, "argv", ["bench.policies", *words])
    policies.main()
    shown = capsys.readouterr().out
    assert "Admission rules in overload" in shown and "Policies" not in shown, "it is an overload only"
    name = WORKLOADS[-1].name
    monkeypatch.setattr(sys, "argv", ["bench.policies", "--quick", "--only", name, *words[3:]])
    policies.main()
    shown = capsys.readouterr().out
    assert shown.count(f"| {name} ") == 6, "two policies, without and with admission, and two regrets"
    assert "Policies, without admission" in shown and "Policies, with admission by goodput" in shown


@pytest.mark.parametrize("number", range(12))
def test_a_drawn_workload_is_the_same_each_time_and_near_what_its_nodes_can_take(number: int) -> None:
    one, again = drawn(number, policies.COSTS), drawn(number, policies.COSTS)
    rows, _ = one.read(None, 10) or ([], 0)
    assert len(rows) == 200 and (again.read(None, 10) or ([], 0))[0] == rows
    assert one.name == again.name and drawn(number + 1, policies.COSTS).name != one.name
    times = [row.timestamp_s for row in rows]
    assert times == sorted(times) and all(row.num_input > 0 < row.num_output for row in rows)


def test_drawn_workloads_take_the_place_of_the_given_ones(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--quick", "--drawn", "5", "7", "--policies", "overlap", "load", "--rules", "goodput"]
    monkeypatch.setattr(sys, "argv", ["bench.policies", *words])
    policies.main()
    shown = capsys.readouterr().out
    assert "policy without admission, judged: 2 workloads" in shown
    assert "policy with admission by goodput, judged: 2 workloads" in shown and "conversation" not in shown

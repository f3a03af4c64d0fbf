# SPDX-License-Identifier: Apache-2.0
"""Runs as a table and as a page: what they are called, and that nothing in a name is markup."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console
from rich.table import Table

from mooncake.cli.simulation.report import ClusterRun, PlainTable, objectives_text, render_html, table
from mooncake.sim.serving.results import DONE, Recorder, Timeline


def run(name: str, *, is_measured: bool = False, slo_ttft_s: float = 30.0) -> ClusterRun:
    recorder = Recorder()
    recorder.add(0.0, 100, 10)
    recorder.status[0] = DONE
    recorder.ttft_s[0], recorder.tbt_s[0], recorder.e2e_s[0] = 1.0, 0.05, 2.0
    outcome = recorder.outcome(Timeline(1.0, *np.ones((10, 20))), slo_ttft_s, 0.1 if slo_ttft_s else 0.0)
    return ClusterRun(name, outcome, outcome.summary(), 1.5, is_measured)


def shown(one: Table) -> str:
    output = io.StringIO()
    Console(file=output, width=240).print(one)
    return " ".join(output.getvalue().split())


def test_the_table_says_what_became_of_failed_requests() -> None:
    simulated, measured = run("predicted"), run("measured", is_measured=True)
    assert "failed: longer than a node's memory. prefill s:" in shown(table("t", [simulated]))
    alone = shown(table("t", [measured]))
    assert "failed: not answered, or not with all tokens." in alone
    assert "memory" not in alone and "prefill s:" not in alone
    both = shown(table("t", [simulated, measured]))
    assert "failed: longer than a node's memory; measured: not answered, or not with all tokens." in both


def test_a_page_calls_runs_what_they_are_and_draws_what_is_known_of_them() -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install '.[plot]'")
    simulated, measured = run("predicted"), run("measured", is_measured=True)
    for runs, how, num_plots in (
        ([simulated], "simulated", 7),
        ([measured], "measured", 5),
        ([simulated, measured], "simulated and measured", 7),
    ):
        page = render_html("t", runs)
        assert f"<title>t: {how}</title>" in page and f"<h1>t, {how}</h1>" in page
        assert page.count("<svg") == num_plots
        assert ("requests being decoded</text>" in page) == (runs == [simulated])
        assert ("requests sent and not ended</text>" in page) == (runs != [simulated])
        assert "measured in 1.5 s" in page or measured not in runs


def test_a_page_without_objectives_names_none() -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install '.[plot]'")
    page = render_html("t", [run("a", slo_ttft_s=0.0)])
    assert "completed, for there are no objectives;" in page and "0 s and" not in page
    assert objectives_text(0.0, 0.1) == "TBT <= 100 ms" and not objectives_text(0.0, 0.0)


def test_brackets_of_names_are_no_markup() -> None:
    name = "[fd00::11]:8101 [/x]"
    text = shown(table(f"a{name}", [replace(run("x"), name=f"b{name}")]))
    assert f"a{name}" in text and f"b{name}" in text
    text = shown(PlainTable(f"c{name}", ("h", f"d{name}"), [("r", f"e{name}")], f"f{name}").on_console())
    assert all(f"{letter}{name}" in text for letter in "cdef"), text

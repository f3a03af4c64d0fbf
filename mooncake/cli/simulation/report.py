# SPDX-License-Identifier: Apache-2.0
"""Runs as a table, one column per figure and one row per run; the same with plots as an HTML file.

A run is simulated, or measured on a live cluster, of which its clients see less: both are named as what they
are. The HTML file needs nothing but a browser. Its plots are matplotlib's, drawn as SVG into the page. Lines
of all runs share each plot, because the questions to a report are "which of them, and when did it go wrong?".
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich import box
from rich.markup import escape
from rich.table import Table

from mooncake.cli.bench.report import COLOURS
from mooncake.cli.output import check_writable
from mooncake.sim.serving.cluster import ClusterSpec
from mooncake.sim.serving.results import RunResults, Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class ClusterRun:
    """The run of one trace through one cluster under one policy."""

    name: str
    outcome: RunResults
    summary: Summary
    took_s: float
    is_measured: bool = False
    """It ran on a live cluster, which does not report what prefill took on its GPUs."""


HEADINGS = (
    "run",
    "rejected",
    "good",
    "good/s",
    "TTFT s\nmean p50 p90 p99",
    "TBT ms\nmean p90 p99",
    "hit rate",
    "prefill s",
)


def cells(run: ClusterRun) -> tuple[str, ...]:
    """The figures under ``HEADINGS``."""
    one = run.summary
    rejected = f"{one.num_rejected + one.num_rejected_after_prefill:,}"
    if one.num_rejected_after_prefill:
        rejected += f" ({one.num_rejected_after_prefill:,} late)"
    if one.num_failed:
        rejected += f" + {one.num_failed:,} failed"
    return (
        run.name,
        rejected,
        f"{one.num_good:,} ({one.num_good / max(1, one.num_requests):.1%})",
        f"{one.goodput_per_s:.2f}",
        *(_times_of(one) if one.num_done else ("-", "-", "-")),
        f"{one.prefill_gpu_s:.2f}" if one.num_done and not run.is_measured else "-",
    )


def _times_of(one: Summary) -> tuple[str, str, str]:
    ttft_s = (one.ttft_s.mean, one.ttft_s.p50, one.ttft_s.p90, one.ttft_s.p99)
    tbt_s = (one.tbt_s.mean, one.tbt_s.p90, one.tbt_s.p99)
    return (
        " ".join(f"{value:.2f}" for value in ttft_s),
        " ".join(f"{value * 1000:.0f}" for value in tbt_s),
        f"{one.hit_rate:.3f}",
    )


def table(trace: str, runs: list[ClusterRun]) -> Table:
    first = runs[0].summary
    caption = (
        f"good: completed{_within(first)}; TBT is the mean of the longest tenth of a request's intervals.\n"
    )
    simulated, measured = "longer than a node's memory", "not answered, or not with all tokens"
    if all(run.is_measured for run in runs):
        caption += f"failed: {measured}."
    else:
        also = f"; measured: {measured}" if any(run.is_measured for run in runs) else ""
        caption += f"late: rejected after prefill. failed: {simulated}{also}. "
        caption += "prefill s: of a node's time, mean over requests."
    shown = Table(
        title=escape(f"{trace}: {first.num_requests:,} requests"),
        caption=caption,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE,
    )
    for number, heading in enumerate(HEADINGS):
        shown.add_column(heading, justify="right" if number else "left", overflow="fold")
    for run in runs:
        shown.add_row(*map(escape, cells(run)))
    return shown


def objectives_text(slo_ttft_s: float, slo_tbt_s: float) -> str:
    """``TTFT <= 30 s, TBT <= 100 ms``; empty where neither is one."""
    objectives = [f"TTFT <= {slo_ttft_s:g} s"] if slo_ttft_s else []
    objectives += [f"TBT <= {slo_tbt_s * 1000:g} ms"] if slo_tbt_s else []
    return ", ".join(objectives)


def _within(one: Summary) -> str:
    objectives = objectives_text(one.slo_ttft_s, one.slo_tbt_s)
    return f" within {objectives}" if objectives else ", for there are no objectives"


@dataclass(frozen=True)
class PlainTable:
    """A table of text, for the terminal and for a page."""

    title: str
    headings: tuple[str, ...]
    rows: list[tuple[str, ...]]
    caption: str = ""

    def on_console(self) -> Table:
        title, caption = escape(self.title) or None, escape(self.caption) or None
        shown = Table(title=title, caption=caption, box=box.SIMPLE)
        shown.title_justify = shown.caption_justify = "left"
        for number, heading in enumerate(self.headings):
            # A name is folded where there is no room: two that are cut short may look the same.
            shown.add_column(escape(heading), justify="right" if number else "left", overflow="fold")
        for row in self.rows:
            shown.add_row(*map(escape, row))
        return shown

    def in_html(self) -> str:
        heading = "".join(f"<th>{html.escape(one)}</th>" for one in self.headings)
        rows = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in self.rows
        )
        title = f"<h2>{html.escape(self.title)}</h2>\n" if self.title else ""
        caption = f"<p>{html.escape(self.caption)}</p>\n" if self.caption else ""
        return f"{title}<table><tr>{heading}</tr>{rows}</table>\n{caption}"


def costs_tables(specs: Iterable[ClusterSpec]) -> list[PlainTable]:
    """Where fitted costs come from and how far they may be off; none where all costs are plain files."""
    costs = dict.fromkeys(one for spec in specs for one in (spec.costs, spec.decode_costs or spec.costs))
    fitted = [one for one in costs if one.has_errors]
    rows: list[tuple[str, ...]] = [
        (one.title, f"{one.prefill_error:.0%}", f"{one.decode_error:.0%}") for one in fitted
    ]
    caption = " ".join(f"{one.title}: {one.source}" for one in fitted)
    headings = ("", "error of TTFT", "error of TPOT")
    return [PlainTable("Costs from measured rows", headings, rows, caption)] if rows else []


def render_tables(title: str, tables: list[PlainTable]) -> str:
    """A page of tables without plots."""
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{html.escape(title)}</title><style>{_STYLE}</style>
<h1>{html.escape(title)}</h1>
{"".join(one.in_html() for one in tables)}</html>
"""


NUM_POINTS = 1000
"""Points of a curve: more can't be seen and make the file large."""

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem;
  color: #1a1a1a }
table { border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto }
th, td { padding: .3rem .7rem; text-align: right; border-bottom: 1px solid #ddd; white-space: pre }
th:first-child, td:first-child { text-align: left }
figure { margin: 1.5rem 0 } figcaption { color: #555 } svg { max-width: 100%; height: auto }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(30rem, 1fr)); gap: 0 2rem }
"""


def check_html(file: Path | None) -> None:
    """Check, before long work, that ``render_html`` can draw for this file; None is right.

    Raises:
        InvalidArgument: it can't be written.
        ModuleNotFoundError: matplotlib is not installed.
    """
    check_writable(file, "--html")
    if file is not None:
        import matplotlib  # noqa: F401


def render_html(trace: str, runs: list[ClusterRun]) -> str:
    """The report. Raises ModuleNotFoundError without matplotlib."""
    figures = "\n".join(
        f"<figure>{_svg(plot.draw, shown)}<figcaption>{html.escape(plot.caption)}</figcaption></figure>"
        for plot in PLOTS
        if (shown := [run for run in runs if not (plot.is_inside and run.is_measured)])
    )
    heading = "".join(f"<th>{html.escape(one)}</th>" for one in HEADINGS)
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells(run)) + "</tr>" for run in runs
    )
    kinds = dict.fromkeys("measured" if run.is_measured else "simulated" for run in runs)
    how = " and ".join(kinds)
    took = ", ".join(f"{html.escape(run.name)} in {run.took_s:.1f} s" for run in runs)
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{html.escape(trace)}: {how}</title><style>{_STYLE}</style>
<h1>{html.escape(trace)}, {how}</h1>
<p>Good requests are completed{html.escape(_within(runs[0].summary))}; TBT is the mean of the longest tenth of
a request's intervals between tokens. Dotted lines are the objectives. The runs took: {took}.</p>
<table><tr>{heading}</tr>{rows}</table>
<div class="plots">{figures}</div></html>
"""


def _svg(draw: Callable[[Axes, list[ClusterRun]], None], runs: list[ClusterRun]) -> str:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    # A fixed salt and no date: the same run gives the same file.
    with matplotlib.rc_context({"svg.hashsalt": "mooncake", "svg.fonttype": "none", "font.size": 9}):
        figure, axes = pyplot.subplots(figsize=(7, 3.8), layout="constrained")
        draw(axes, runs)
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False)
        out = io.StringIO()
        metadata: dict[str, Any] = {"Date": None, "Creator": None}
        figure.savefig(out, format="svg", metadata=metadata)
        pyplot.close(figure)
    return re.sub(r"^.*?(?=<svg)|<metadata>.*?</metadata>", "", out.getvalue(), flags=re.DOTALL)


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _cdf(axes: Axes, runs: list[ClusterRun], column: str, scale: float, objective: float) -> None:
    shares = np.linspace(0.0, 1.0, NUM_POINTS)
    for number, run in enumerate(runs):
        values = getattr(run.outcome, column)[run.outcome.is_done]
        if len(values):
            axes.plot(np.quantile(values, shares) * scale, shares, color=_colour(number), label=run.name)
    if objective:
        axes.axvline(objective * scale, color="#777777", linestyle=":")
    axes.set_xlim(left=0)
    axes.set_ylim(0, 1)
    axes.set_ylabel("share of completed requests")


def _ttft(axes: Axes, runs: list[ClusterRun]) -> None:
    _cdf(axes, runs, "ttft_s", 1, runs[0].summary.slo_ttft_s)
    axes.set_xscale("symlog", linthresh=0.1)
    axes.set_xlabel("TTFT, s")


def _tbt(axes: Axes, runs: list[ClusterRun]) -> None:
    _cdf(axes, runs, "tbt_s", 1000, runs[0].summary.slo_tbt_s)
    axes.set_xlabel("TBT, ms")


def _over_time(
    axes: Axes, runs: list[ClusterRun], label: str, values: Callable[[Any], Any], styles: str = "-"
) -> None:
    for number, run in enumerate(runs):
        line = run.outcome.time_line
        if len(line.at_s):
            step = max(1, len(line.at_s) // NUM_POINTS)
            at_min = line.at_s[::step] / 60
            axes.plot(at_min, values(line)[::step], styles, color=_colour(number), label=run.name)
    axes.set_xlabel("minutes")
    axes.set_ylabel(label)
    axes.set_ylim(bottom=0)


def _queue(axes: Axes, runs: list[ClusterRun]) -> None:
    _over_time(axes, runs, "prefill work that waits, s", lambda line: line.queue_s)


def _running(axes: Axes, runs: list[ClusterRun]) -> None:
    label = (
        "requests sent and not ended" if any(run.is_measured for run in runs) else "requests being decoded"
    )
    _over_time(axes, runs, label, lambda line: line.num_running)


def _hits(axes: Axes, runs: list[ClusterRun]) -> None:
    def lately(line: Any) -> Any:
        """The value over the last tenth of the run's samples, at least six of them."""
        width = max(6, len(line.at_s) // 10)
        cached = line.cached_tokens - np.concatenate([np.zeros(width), line.cached_tokens])[: len(line.at_s)]
        requested = line.input_tokens - np.concatenate([np.zeros(width), line.input_tokens])[: len(line.at_s)]
        return cached / np.maximum(requested, 1.0)

    _over_time(axes, runs, "recent hit rate of prompt tokens", lately)


def _rejections(axes: Axes, runs: list[ClusterRun]) -> None:
    _over_time(axes, runs, "rejected so far", lambda line: line.num_rejected)


def _replicas(axes: Axes, runs: list[ClusterRun]) -> None:
    _over_time(axes, runs, "instances that hold a hot block", lambda line: line.replicas_top10)
    for number, run in enumerate(runs):
        line = run.outcome.time_line
        step = max(1, len(line.at_s) // NUM_POINTS)
        axes.plot(line.at_s[::step] / 60, line.replicas_top100[::step], ":", color=_colour(number))


@dataclass(frozen=True)
class ReportPlot:
    draw: Callable[[Axes, list[ClusterRun]], None]
    caption: str
    is_inside: bool = False
    """It shows the inside of a cluster, which is not known of a measured one."""


PLOTS = (
    ReportPlot(_ttft, "Time to the first token: the share of completed requests that had it by then."),
    ReportPlot(_tbt, "Time between tokens, longest tenth."),
    ReportPlot(_queue, "Load of prefill over time.", is_inside=True),
    ReportPlot(_running, "Load over time: requests being decoded; measured, those sent and not ended."),
    ReportPlot(_hits, "Prompt tokens that were not computed, of those requested."),
    ReportPlot(_rejections, "Rejections."),
    ReportPlot(
        _replicas,
        "Replicas of hot blocks, on average: the 10 most used (solid) and the 100 most used (dotted).",
        is_inside=True,
    ),
)

# SPDX-License-Identifier: Apache-2.0
"""Runs as a table, one column per figure and one row per run; and reports as files."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from mooncake.errors import InvalidArgument
from mooncake.sim.serving.results import RunResults, Summary

MIN_WIDTH = 130
"""Width of output to a file or a pipe: nothing is folded there to fit a screen."""


@dataclass(frozen=True)
class ClusterRun:
    """The run of one trace through one cluster under one policy."""

    name: str
    outcome: RunResults
    summary: Summary
    took_s: float


HEADINGS = (
    "run",
    "rejected",
    "good",
    "good/s",
    "TTFT s\nmean p50 p90 p99",
    "TBT ms\nmean p90 p99",
    "hit rate",
    "GPU s",
)


def cells(run: ClusterRun) -> tuple[str, ...]:
    """The figures under ``HEADINGS``."""
    one = run.summary
    rejected = f"{one.num_rejected + one.num_rejected_after_prefill:,}"
    if one.num_rejected_after_prefill:
        rejected += f" ({one.num_rejected_after_prefill:,} late)"
    return (
        run.name,
        rejected,
        f"{one.num_good:,} ({one.num_good / max(1, one.num_requests):.1%})",
        f"{one.goodput_per_s:.2f}",
        " ".join(
            f"{value:.2f}" for value in (one.ttft_s.mean, one.ttft_s.p50, one.ttft_s.p90, one.ttft_s.p99)
        ),
        " ".join(f"{value * 1000:.0f}" for value in (one.tbt_s.mean, one.tbt_s.p90, one.tbt_s.p99)),
        f"{one.hit_rate:.3f}",
        f"{one.prefill_gpu_s:.2f}",
    )


def table(trace: str, runs: list[ClusterRun]) -> Table:
    first = runs[0].summary
    objectives = f"TTFT <= {first.slo_ttft_s:g} s, TBT <= {first.slo_tbt_s * 1000:g} ms"
    caption = (
        f"good: completed within {objectives}; TBT is the mean of the longest tenth of a request's intervals."
        "\nlate: rejected after prefill. GPU s: prefill, mean over requests."
    )
    shown = Table(
        title=f"{trace}: {first.num_requests:,} requests",
        caption=caption,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE,
    )
    for number, heading in enumerate(HEADINGS):
        shown.add_column(heading, justify="right" if number else "left")
    for run in runs:
        shown.add_row(*cells(run))
    return shown


def wide_console() -> Console:
    """Standard output, as wide as the terminal, and wide enough where there is none."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, MIN_WIDTH))


def write_whole(file: Path, text: str) -> None:
    """Write the whole file or none. Raises InvalidArgument."""
    fresh = file.with_name(file.name + ".new")
    try:
        fresh.write_text(text)
        os.replace(fresh, file)
    except OSError as error:
        raise InvalidArgument("file", str(file), f"a file that can be written ({error.strerror})") from error

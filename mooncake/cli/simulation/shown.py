"""Runs as a table: one column per figure, one row per run."""

from __future__ import annotations

from dataclasses import dataclass

from rich.table import Table

from mooncake.sim.outcome import Outcome, Summary


@dataclass(frozen=True)
class Run:
    """What one cluster under one policy made of a trace."""

    name: str
    outcome: Outcome
    summary: Summary
    took_s: float


HEADINGS = (
    "run",
    "requests",
    "done",
    "rejected",
    "good",
    "goodput/s",
    "TTFT mean",
    "p50",
    "p90",
    "p99 s",
    "TBT mean",
    "p90 ms",
    "hit rate",
    "GPU s/request",
)


def cells(run: Run) -> tuple[str, ...]:
    """The figures under ``HEADINGS``."""
    one = run.summary
    rejected = one.num_rejected + one.num_rejected_after_prefill
    late = f" ({one.num_rejected_after_prefill} after prefill)" if one.num_rejected_after_prefill else ""
    ttft, tbt = one.ttft_s, one.tbt_s
    return (
        run.name,
        f"{one.num_requests:,}",
        f"{one.num_done:,}",
        f"{rejected:,}{late}",
        f"{one.num_good:,} ({one.num_good / max(1, one.num_requests):.1%})",
        f"{one.goodput_per_s:.3f}",
        f"{ttft.mean:.2f}",
        f"{ttft.p50:.2f}",
        f"{ttft.p90:.2f}",
        f"{ttft.p99:.2f}",
        f"{tbt.mean * 1000:.1f}",
        f"{tbt.p90 * 1000:.1f}",
        f"{one.hit_rate:.3f}",
        f"{one.prefill_gpu_s:.3f}",
    )


def table(trace: str, runs: list[Run]) -> Table:
    first = runs[0].summary
    objectives = f"TTFT <= {first.slo_ttft_s:g} s, TBT <= {first.slo_tbt_s * 1000:g} ms"
    caption = f"good: completed within {objectives}. TBT: mean of the longest tenth of the intervals."
    shown = Table(title=trace, caption=caption, title_justify="left", caption_justify="left")
    for number, heading in enumerate(HEADINGS):
        shown.add_column(heading, justify="right" if number else "left", overflow="fold")
    for run in runs:
        shown.add_row(*cells(run))
    return shown

# SPDX-License-Identifier: Apache-2.0
"""The output of a bench: tables, one JSON object for programs, a picture, and which targets were met.

Rows come in, lines go out. The targets are those that the transfer engine was built to. The picture shows the
bandwidth by size in both directions, and the time of one call; it needs matplotlib (the extra ``plot``),
which is imported only to draw.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mooncake.cli.bench.gloo import GLOO, GlooRow
from mooncake.cli.bench.measurements import KIB, MIB, CeilingRow, Row
from mooncake.cli.output import check_writable
from mooncake.errors import InvalidArgument

if TYPE_CHECKING:
    from matplotlib.axes import Axes

REFERENCES = (
    "references are libc's memmove by one thread, as one thread carries a call of ours, which however stores "
    "around the cache from 1 MiB on and may be faster (one thread); as many TCP connections of a C program "
    "as ours uses, with buffers as large (raw streams); and fio on the same file, by one job with as many "
    "requests under way"
)
CANNOT_SHOW = (
    "cannot show: a real network (loopback has no wire and both ends share the cores), many clients at once, "
    "NUMA, latency under load"
)

GLOO_TIMES = (
    "medians of all calls of all rounds; a time of gloo is half of a message there and an equal one back, "
    "one of ours includes the acknowledgement; in flight: one batch of ours, as many sends of gloo"
)


@dataclass(frozen=True)
class Goal:
    """A figure that one row must reach: a ratio to its ceiling, or a median time."""

    path: str
    op: str
    size_bytes: int
    count: int = 1
    least_ratio: float | None = None
    most_p50_us: float | None = None


@dataclass(frozen=True)
class GoalResult:
    """The result of one goal."""

    what: str
    wanted: str
    seen: str
    is_met: bool | None
    "None: it was not measured."


LARGE = (MIB, 16 * MIB, 128 * MIB)
BOTH = ("write", "read")
GOALS = (
    *(Goal("tcp", op, size, least_ratio=0.9) for op in BOTH for size in LARGE),
    *(Goal("tcp", op, 128 * KIB, 512, least_ratio=0.85) for op in BOTH),
    *(Goal("tcp", op, 4 * KIB, most_p50_us=50.0) for op in BOTH),
    *(Goal("shm", op, size, least_ratio=0.9) for op in BOTH for size in LARGE),
    *(Goal("file", op, size, least_ratio=0.9) for op in BOTH for size in LARGE),
)


@dataclass(frozen=True)
class BenchReport:
    """All results of one run."""

    machine: str
    command: str
    rounds: int
    ceilings: list[CeilingRow]
    ping_us: float | None
    "Round trip of 4 KiB and one byte back, of a C program."
    rows: list[Row]
    skipped: dict[str, str]
    beside_gloo: list[GlooRow] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "cannot_show": CANNOT_SHOW,
            "references": REFERENCES,
            "targets": [asdict(verdict) for verdict in check_goals(self.rows)],
        }


def check_goals(rows: Sequence[Row]) -> list[GoalResult]:
    """Compare each goal with its row."""
    known = {(row.path, row.op, row.size_bytes, row.count): row for row in rows}
    shapes = {(row.size_bytes, row.count): row.shape for row in rows}
    verdicts = []
    for goal in GOALS:
        shape = shapes.get((goal.size_bytes, goal.count))
        row = known.get((goal.path, goal.op, goal.size_bytes, goal.count))
        what = f"{goal.path} {goal.op} {shape or f'{goal.count} x {goal.size_bytes} bytes'}"
        if goal.least_ratio is not None:
            wanted = (
                f">= {goal.least_ratio:g} x {row.ceiling if row is not None and row.ceiling else 'ceiling'}"
            )
            seen = None if row is None else row.ratio
            is_met = None if seen is None else seen >= goal.least_ratio
            verdicts.append(GoalResult(what, wanted, "" if seen is None else f"{seen:.2f} x", is_met))
        else:
            assert goal.most_p50_us is not None
            is_met = None if row is None else row.p50_us <= goal.most_p50_us
            shown = "" if row is None else f"{row.p50_us:.1f} us"
            verdicts.append(GoalResult(what, f"p50 <= {goal.most_p50_us:g} us", shown, is_met))
    return verdicts


def render(report: BenchReport) -> str:
    """Render the whole report as text lines."""
    lines = [f"machine: {report.machine}", f"command: {report.command}", CANNOT_SHOW]
    if report.rows:
        lines += _beside_references(report)
    lines += _beside_gloo(report.beside_gloo)
    lines += [f"skipped: {path}: {why}" for path, why in report.skipped.items()]
    if report.rows:
        lines += _targets(report.rows)
    return "\n".join(lines)


def _beside_references(report: BenchReport) -> list[str]:
    lines = [REFERENCES, ""]
    lines += [f"{'reference':12} {'op':6} {'size':>13} {'GB/s':>7} {'CPU s/GB':>9}"]
    lines += [
        f"{row.name:12} {row.op:6} {row.shape:>13} {row.gb_s:7.2f} {row.cpu_s_per_gb:9.3f}"
        for row in report.ceilings
    ]
    if report.ping_us is not None:
        lines += [f"round trip of 4 KiB over one raw socket: {report.ping_us:.1f} us"]
    return [
        *lines,
        "",
        f"{'path':8} {'op':6} {'size':>13} {'GB/s':>7} {'reference GB/s':>18} {'ratio':>6}"
        f" {'p50 us':>10} {'p99 us':>10} {'CPU s/GB':>9} {'of it':>10}",
        *map(_line, report.rows),
        "",
        f"each row: median of {report.rounds} rounds, ours and its reference in turns; every byte compared",
    ]


def _targets(rows: Sequence[Row]) -> list[str]:
    words: Mapping[bool | None, str] = {True: "met", False: "NOT MET", None: "not measured"}
    return [
        "",
        "targets:",
        *(
            f"  {verdict.what:24} {verdict.wanted:20} {verdict.seen:>9}  {words[verdict.is_met]}"
            for verdict in check_goals(rows)
        ),
    ]


def _beside_gloo(rows: Sequence[GlooRow]) -> list[str]:
    if not rows:
        return []
    ours = [name for name in rows[0].p50_us if name != GLOO]
    names = "".join(f" {name:>9}" for name in (*ours, GLOO))
    lines = [
        "",
        "writes of ours beside send and recv of torch.distributed's gloo, two processes on loopback:",
        f"{'size':>8} {'us of one:':>10}{names} {'in flight':>10} {'GB/s:':>6}{names}  gloo is ahead in",
    ]
    for row in rows:
        times = "".join(f" {row.p50_us[name]:9.1f}" for name in (*ours, GLOO))
        speeds = "".join(f" {row.gb_s[name]:9.2f}" for name in (*ours, GLOO))
        behind = [f"time of {name}" for name in ours if row.p50_us[name] > row.p50_us[GLOO]]
        behind += [f"GB/s of {name}" for name in ours if row.gb_s[name] < row.gb_s[GLOO]]
        ahead = ", ".join(behind) or "nothing"
        lines.append(f"{row.size:>8} {'':10}{times} {row.num_in_flight:>10} {'':6}{speeds}  {ahead}")
    return [*lines, GLOO_TIMES, ""]


def _line(row: Row) -> str:
    against, ratio, cpu = "", "", ""
    rare = "" if row.p99_us is None else f"{row.p99_us:.1f}"
    if row.ceiling_gb_s is not None and row.ratio is not None and row.ceiling_cpu_s_per_gb is not None:
        against, ratio = f"{row.ceiling} {row.ceiling_gb_s:.2f}", f"{row.ratio:.2f}"
        cpu = f"{row.ceiling_cpu_s_per_gb:.3f}"
    return (
        f"{row.path:8} {row.op:6} {row.shape:>13} {row.gb_s:7.2f} {against:>18} {ratio:>6}"
        f" {row.p50_us:10.1f} {rare:>10} {row.cpu_s_per_gb:9.3f} {cpu:>10}"
    )


def describe_machine() -> str:
    """Processor, cores and kernel."""
    model = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return f"{model}, {os.cpu_count()} cores, Linux {platform.release()}"


CEILING_STYLE = {"one thread": "--", "fio": "-."}
"""Raw streams, whose name has their number, are dotted."""
COLOURS = ("#0072b2", "#56b4e9", "#d55e00", "#e69f00", "#009e73", "#cc79a7", "#000000", "#8c6d31")
"""Colours that colour-blind readers can distinguish."""
GB_TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200)


def check_plot(file: Path | None) -> None:
    """Check that ``draw`` can write this file; None is right.

    Raises:
        InvalidArgument: it can't be written, or its suffix names no format of pictures.
        ModuleNotFoundError: matplotlib is not installed.
    """
    check_writable(file, "--plot")
    if file is None:
        return
    from matplotlib.backend_bases import FigureCanvasBase

    formats = sorted(FigureCanvasBase.get_supported_filetypes())
    if file.suffix[1:].lower() not in formats:
        raise InvalidArgument("--plot", str(file), f"a name that ends in one of .{', .'.join(formats)}")


def draw(report: BenchReport, file: Path) -> None:
    """Write ``file``; its suffix is the format.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in report.rows if row.count == 1]
    paths = list(dict.fromkeys(row.path for row in rows))
    colours = {path: COLOURS[i % len(COLOURS)] for i, path in enumerate(paths)}
    figure, panels = pyplot.subplots(1, 3, figsize=(16, 5.8), layout="constrained")
    for panel, op in zip(panels, ("write", "read"), strict=False):
        _draw_bandwidth(panel, [row for row in rows if row.op == op], colours)
        panel.set_title(f"{op}: bandwidth by size")
    _draw_time(panels[2], [row for row in rows if row.op == "write"], colours)
    handles, labels = panels[0].get_legend_handles_labels()
    order = sorted(range(len(labels)), key=lambda i: "(ceiling)" in labels[i])
    figure.legend(
        [handles[i] for i in order],
        [labels[i] for i in order],
        loc="outside lower center",
        ncols=min(8, len(labels)),
        frameon=False,
    )
    figure.suptitle(f"mooncake bench transfer: {report.machine}", fontsize=11)
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def _draw_bandwidth(panel: Axes, rows: Sequence[Row], colours: dict[str, str]) -> None:
    drawn: set[str] = set()
    for path, colour in colours.items():
        mine = [row for row in rows if row.path == path]
        panel.plot(
            [row.size_bytes for row in mine], [row.gb_s for row in mine], "o-", color=colour, label=path, ms=4
        )
        compared = [row for row in mine if row.ceiling_gb_s is not None]
        if compared and compared[0].ceiling not in drawn:
            name = compared[0].ceiling
            drawn.add(name)
            panel.plot(
                [row.size_bytes for row in compared],
                [row.ceiling_gb_s or 0.0 for row in compared],
                CEILING_STYLE.get(name, ":"),
                color="#777777",
                label=f"{name} (ceiling)",
            )
    _label_sizes(panel, rows)
    panel.set_yscale("log")
    ticks = [tick for tick in GB_TICKS if panel.get_ylim()[0] <= tick <= panel.get_ylim()[1]]
    panel.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    panel.minorticks_off()
    panel.set_ylabel("GB/s")


def _draw_time(panel: Axes, rows: Sequence[Row], colours: dict[str, str]) -> None:
    for path, colour in colours.items():
        mine = [row for row in rows if row.path == path]
        sizes = [row.size_bytes for row in mine]
        panel.plot(sizes, [row.p50_us for row in mine], "o-", color=colour, ms=4)
        rare = [(row.size_bytes, row.p99_us) for row in mine if row.p99_us is not None]
        panel.plot([size for size, _ in rare], [us for _, us in rare], ":", color=colour, lw=1)
    _label_sizes(panel, rows)
    panel.set_yscale("log")
    panel.set_ylabel("microseconds")
    panel.set_title("write: time of one call, p50 (line) and p99 (dots)")


def _label_sizes(panel: Axes, rows: Sequence[Row]) -> None:
    sizes = {row.size_bytes: row.shape for row in rows}
    panel.set_xscale("log", base=2)
    panel.set_xticks(list(sizes), list(sizes.values()), rotation=45, fontsize=8)
    panel.minorticks_off()
    panel.grid(True, color="#dddddd", lw=0.6)
    panel.set_axisbelow(True)

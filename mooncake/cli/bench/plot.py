# SPDX-License-Identifier: Apache-2.0
"""The report as a picture: bandwidth by size in both directions, and the time of one call.

Needs matplotlib (the extra ``plot``), which is imported only here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mooncake.cli.bench.measurements import Row
from mooncake.cli.bench.report import BenchReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CEILING_STYLE = {"one thread": "--", "one stream": ":", "fio": "-."}
COLOURS = ("#0072b2", "#56b4e9", "#d55e00", "#e69f00", "#009e73", "#cc79a7", "#000000", "#8c6d31")
"""Colours that colour-blind readers can distinguish."""
GB_TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200)


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
                CEILING_STYLE.get(name, "--"),
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
        panel.plot(sizes, [row.p99_us for row in mine], ":", color=colour, lw=1)
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

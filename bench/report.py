# SPDX-License-Identifier: Apache-2.0
"""Results of a bench, as JSON with everything that is needed to trust them; the text is rendered from that.

Owns the form of results: tables of values with their units, the samples behind them, notes, and the
circumstances (commit and whether the tree was changed, date, machine, load before and after, command). A run
is kept in ``build/bench/<name>.json``, with ``--save`` in ``bench/results/``, where results that are quoted
belong; beside each is the same as text. ``python -m bench.render`` renders the texts again. A bench measures,
and uses only ``table``, ``add`` and ``note`` of this form.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

import msgspec

from mooncake.cli.bench.measurements import LEAST_FOR_P99 as LEAST_FOR_P99
from mooncake.cli.bench.measurements import p99 as p99
from mooncake.cli.bench.report import describe_machine

ROOT = Path(__file__).parent.parent
KEPT, SAVED = ROOT / "build" / "bench", ROOT / "bench" / "results"
NOT_RUN = 77
"""The exit status of a bench that can't run here, as of a skipped test in automake."""

LIMIT, OF_LIMIT, OVER, FASTER_THAN = "limit", "of the limit", "over", "faster than "
"""Columns that ``bench/summary.py`` finds: the name of the row's limit, the speed as a share of it, and
behind ``FASTER_THAN`` another system, ``OVER`` which transport that one was used."""

Cell = str | float | int | None


class Column(msgspec.Struct, frozen=True):
    """A column of a table: what is in it and its unit; ``digits`` behind the point."""

    name: str
    digits: int = 0

    @property
    def is_p99(self) -> bool:
        return "p99" in self.name


class Table(msgspec.Struct):
    columns: list[Column]
    rows: list[list[Cell]] = []
    title: str = ""
    note: str = ""
    samples: list[dict[str, list[float]]] = []
    "For each row: the samples, by name, in the order of measuring."

    def add(
        self,
        *cells: Cell,
        samples: Mapping[str, Sequence[float]] | None = None,
        num_samples: int | None = None,
    ) -> None:
        """Add one row, which is also printed at once.

        A 99th percentile is left out if it is of fewer than ``LEAST_FOR_P99`` samples: ``num_samples``, or
        as many as ``samples`` has at most by one name. A row that has one must have either.
        """
        assert len(cells) == len(self.columns), (cells, self.columns)
        if any(column.is_p99 and cell is not None for column, cell in zip(self.columns, cells, strict=True)):
            lengths = [len(values) for values in (samples or {}).values()] if num_samples is None else []
            num_samples = max(lengths) if lengths else num_samples
            assert num_samples is not None, "a p99 without a number of samples"
            if num_samples < LEAST_FOR_P99:
                cells = tuple(
                    None if column.is_p99 else cell for column, cell in zip(self.columns, cells, strict=True)
                )
        self.rows.append([*cells])
        self.samples.append({name: [*values] for name, values in (samples or {}).items()})
        shown = (shown_as(cell, column) for cell, column in zip(cells, self.columns, strict=True))
        print("  ".join(filter(None, shown)), file=sys.stderr, flush=True)


class Result(msgspec.Struct):
    """One run of one bench."""

    bench: str
    command: str
    commit: str
    is_dirty: bool
    "Whether the tree differed from the commit."
    date: str
    machine: str
    load_before: list[float]
    load_after: list[float] = []
    tables: list[Table] = []
    notes: list[str] = []
    seconds: float = 0.0

    def table(self, *columns: str | tuple[str, int], title: str = "", note: str = "") -> Table:
        """Add a table to this result; a column is a name, or a name and its digits."""
        made = [Column(one) if isinstance(one, str) else Column(*one) for one in columns]
        self.tables.append(Table(made, title=title, note=note))
        return self.tables[-1]

    def note(self, text: str) -> None:
        self.notes.append(text)
        print(text, file=sys.stderr, flush=True)


def options(doc: str | None, prog: str) -> argparse.ArgumentParser:
    """A parser with the options of every bench."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {prog}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a short run, whose figures are not reliable")
    parser.add_argument("--save", action="store_true", help="keep the result in bench/results/")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    return parser


def exit_on_sigterm() -> None:
    """End at SIGTERM as at an error, so that what a bench has started or made is ended and removed."""

    def exit_(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, exit_)


@contextlib.contextmanager
def measured(bench: str, arguments: argparse.Namespace, command: str | None = None) -> Iterator[Result]:
    """Run ``bench``: its result is kept and printed at the end. If it raises, nothing is kept."""
    exit_on_sigterm()
    words = shlex.join(word for word in sys.argv[1:] if word not in ("--save", "--json"))
    began = datetime.datetime.now(datetime.UTC)
    result = Result(
        bench,
        command or f"python -m bench.{bench} {words}".strip(),
        *commit(),
        began.isoformat(timespec="seconds"),
        describe_machine(),
        list(os.getloadavg()),
    )
    yield result
    result.load_after = list(os.getloadavg())
    result.seconds = (datetime.datetime.now(datetime.UTC) - began).total_seconds()
    folder = SAVED if arguments.save else KEPT
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{bench}.json").write_bytes(encoded(result))
    (folder / f"{bench}.txt").write_text(render(result))
    print(encoded(result).decode() if arguments.json else render(result), end="", flush=True)


def not_run(why: str) -> NoReturn:
    """Report that this bench can't run here."""
    print(f"NOT RUN: {why}")
    sys.exit(NOT_RUN)


def commit() -> tuple[str, bool]:
    """Commit of this checkout; ("unknown", True) where there is none."""
    git = ["git", "-C", str(ROOT)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        status = [*git, "status", "--porcelain", "--untracked-files=no"]
        changed = subprocess.run(status, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown", True
    # The results themselves may have been written just before.
    return head.stdout.strip(), any(" bench/results/" not in line for line in changed.stdout.splitlines())


def encoded(result: Result) -> bytes:
    return msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n"


def decoded(content: bytes) -> Result:
    """Decode a result. Raises msgspec.ValidationError."""
    return msgspec.json.decode(content, type=Result)


def shown_as(cell: Cell, column: Column) -> str:
    if cell is None:
        return ""
    return cell if isinstance(cell, str) else f"{cell:,.{column.digits}f}"


def render(result: Result) -> str:
    """Render the result as text."""
    dirty = ", changed since" if result.is_dirty else ""
    before, after = (
        " ".join(f"{one:.1f}" for one in load) for load in (result.load_before, result.load_after)
    )
    lines = [
        f"command: {result.command}",
        f"machine: {result.machine}; load {before} before, {after} after",
        f"commit:  {result.commit[:12]}{dirty}; {result.date}, {result.seconds:.0f} s",
    ]
    for table in result.tables:
        lines += ["", *([f"## {table.title}"] if table.title else []), *rows_of(table)]
        lines += table.note.splitlines()
    lines += ["", *result.notes] if result.notes else []
    return "\n".join(lines) + "\n"


def rows_of(table: Table) -> list[str]:
    cells = [
        [shown_as(cell, column) for cell, column in zip(row, table.columns, strict=True)]
        for row in table.rows
    ]
    widths = [
        max(len(column.name), *(len(row[at]) for row in cells), 3) for at, column in enumerate(table.columns)
    ]
    is_text = [all(isinstance(row[at], str | None) for row in table.rows) for at in range(len(table.columns))]

    def line(words: Sequence[str]) -> str:
        padded = (
            word.ljust(width) if left else word.rjust(width)
            for word, width, left in zip(words, widths, is_text, strict=True)
        )
        return f"| {' | '.join(padded)} |"

    rule = "|" + "|".join(
        "-" * (width + 1) + ("-" if left else ":") for width, left in zip(widths, is_text, strict=True)
    )
    return [line([column.name for column in table.columns]), rule + "|", *map(line, cells)]

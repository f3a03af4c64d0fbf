# SPDX-License-Identifier: Apache-2.0
"""One page of all results: the share of its limit that a row reaches, and its speed beside other systems.

Run ``python -m bench.summary`` (``scripts/bench`` does, at its end). It reads the results in
``build/bench/``, and of benches that have none there those in ``bench/results/`` (only these with
``--saved``), and takes every row that has one of the columns of ``report.py``: ``of the limit``, and ``faster
than`` another system. A number below 1 says that ours is slower. Which commit a result is of stands below the
table, because a page may mix them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

from bench import report
from bench.report import FASTER_THAN, LIMIT, OF_LIMIT, Cell, Column, Result, Table

NAMES = 3
"""A row is named by so many of its first columns of words at most."""


def results(folders: Iterable[Path]) -> list[Result]:
    """The results, by bench; of a bench that several folders have, that of the first."""
    found: dict[str, Result] = {}
    for folder in folders:
        for file in sorted(folder.glob("*.json")):
            if file.stem not in found:
                found[file.stem] = report.decoded(file.read_bytes())
    return [found[name] for name in sorted(found)]


def summary(of: Iterable[Result]) -> Table:
    """The rows of these results that are compared with anything."""
    made = list(of)
    systems = list(
        dict.fromkeys(
            column.name.removeprefix(FASTER_THAN)
            for one in made
            for table in one.tables
            for column in table.columns
            if column.name.startswith(FASTER_THAN)
        )
    )
    columns = [Column("bench"), Column("row"), Column(LIMIT), Column(OF_LIMIT, 2)]
    page = Table([*columns, *(Column(f"{FASTER_THAN}{one}", 2) for one in systems)])
    wanted = [column.name for column in page.columns[2:]]
    for one in made:
        for table in one.tables:
            names = [column.name for column in table.columns]
            for row in table.rows:
                cells = dict(zip(names, row, strict=True))
                ratios = [cells.get(name) for name in wanted]
                if any(isinstance(ratio, int | float) for ratio in ratios):
                    page.rows.append([one.bench, _name(table, row), *ratios])
    return page


def _name(table: Table, row: list[Cell]) -> str:
    """The words with which the row begins."""
    words: list[str] = []
    for cell, column in zip(row, table.columns, strict=True):
        if not isinstance(cell, str) or column.name == LIMIT or len(words) == NAMES:
            break
        words.append(cell)
    return " ".join(words)


def rendered(of: list[Result]) -> str:
    page = summary(of)
    if not page.rows:
        return "no result has a row that is compared with a limit or another system\n"
    lines = [*report.rows_of(page), ""]
    shown = {row[0] for row in page.rows}
    for one in of:
        if one.bench in shown:
            dirty = ", changed since" if one.is_dirty else ""
            lines.append(f"{one.bench}: commit {one.commit[:12]}{dirty}; {one.date}; {one.machine}")
            lines += [f"{one.bench}: {note}" for note in one.notes if note.startswith("NOT RUN")]
    return "\n".join([*lines, "below 1: ours is slower; an empty cell: not compared", ""])


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.summary",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--saved", action="store_true", help="only of results in bench/results/")
    saved = parser.parse_args().saved
    sys.stdout.write(rendered(results([report.SAVED] if saved else [report.KEPT, report.SAVED])))


if __name__ == "__main__":
    main()

"""What `python -m bench.paper` prints: tables of the papers' values beside ours, each with its verdict.

It owns the form and where the traces are looked for; the tables themselves are made in ``paper.py`` (caches)
and ``paper_scheduling.py`` (clusters).
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One published value and ours. ``low`` and ``high`` bound what passes; without them it is only shown."""

    what: str
    ours: float | str
    paper: float | str = ""
    low: float | None = None
    high: float | None = None
    digits: int = 3

    @property
    def is_short(self) -> bool:
        if self.low is None and self.high is None:
            return False
        assert not isinstance(self.ours, str), self.what
        return (
            not (self.low if self.low is not None else self.ours)
            <= self.ours
            <= (self.high if self.high is not None else self.ours)
        )

    def cells(self) -> list[str]:
        deviation = ""
        if not isinstance(self.ours, str) and not isinstance(self.paper, str) and self.paper:
            deviation = f"{self.ours - self.paper:+.{self.digits}f} ({self.ours / self.paper - 1:+.1%})"
        verdict = "shown" if self.low is None and self.high is None else "short" if self.is_short else "PASS"
        return [
            self.what,
            *(_number(value, self.digits) for value in (self.paper, self.ours)),
            deviation,
            self._allowed(),
            verdict,
        ]

    def _allowed(self) -> str:
        low, high = (None if end is None else _number(end, self.digits) for end in (self.low, self.high))
        if low is not None and high is not None:
            return f"{low} to {high}"
        return f"at least {low}" if low is not None else f"at most {high}" if high is not None else ""


def near(what: str, paper: float, ours: float, within: float, digits: int = 3) -> Check:
    """Ours may be ``within`` off."""
    # Rounding must not decide: a value at the bound to the last printed digit is within.
    slack = 0.5 * 10**-digits * 1e-6
    low, high = paper - within - slack, paper + within + slack
    return Check(what=what, paper=paper, ours=ours, low=low, high=high, digits=digits)


def exactly(what: str, paper: float, ours: float, digits: int) -> Check:
    """Equal in every digit that was published."""
    half = 0.5000001 * 10**-digits
    return Check(what=what, paper=paper, ours=ours, low=paper - half, high=paper + half, digits=digits)


@dataclasses.dataclass(frozen=True, slots=True)
class Table:
    title: str
    checks: list[Check]
    note: str = ""

    @property
    def num_short(self) -> int:
        return sum(check.is_short for check in self.checks)

    def show(self) -> None:
        rows = [["", "paper", "ours", "deviation", "allowed", ""], *(check.cells() for check in self.checks)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        print(f"\n## {self.title}")
        for number, row in enumerate(rows):
            cells = (
                cell.ljust(width) if not at else cell.rjust(width)
                for at, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            print("| " + " | ".join(cells) + " |")
            if not number:
                print(
                    "|"
                    + "|".join(
                        ("-" if not at else "") + "-" * (width + 1) + ("" if not at else ":")
                        for at, width in enumerate(widths)
                    )
                    + "|"
                )
        if self.note:
            print(self.note)
        sys.stdout.flush()


def _number(value: float | str, digits: int) -> str:
    return value if isinstance(value, str) else f"{value:.{digits}f}"


def traces_folder(given: str | None) -> Path:
    """The folder that was named, or the first ``data/traces`` beside this project or above it."""
    if given is not None:
        folder = Path(given)
        if not folder.is_dir():
            sys.exit(f"--traces {given}: no such folder")
        return folder
    for parent in Path(__file__).resolve().parents:
        for name in ("data/traces", "shared/data/traces"):
            if (parent / name).is_dir():
                return parent / name
    sys.exit("no data/traces beside or above this project: name the folder with --traces DIR")

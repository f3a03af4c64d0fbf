# SPDX-License-Identifier: Apache-2.0
"""What `python -m bench.paper` prints: tables of reference values beside ours, each with its result.

It owns the layout and the search for the traces; the tables themselves are made in ``paper.py`` (caches)
and ``paper_scheduling.py`` (clusters).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from bench.report import Cell, Result


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A reference value and ours. ``low`` and ``high`` bound what passes; without them it is only shown.

    ``paper`` is what the paper printed, or, in a table that says so, what an independent simulation of ours
    found.
    """

    what: str
    ours: float
    paper: float | None = None
    low: float | None = None
    high: float | None = None
    digits: int = 3
    is_explained: bool = False
    "That it falls short is known, and the table's note explains it: it fails no run."

    @property
    def is_short(self) -> bool:
        if self.low is None and self.high is None:
            return False
        return (
            not (self.low if self.low is not None else self.ours)
            <= self.ours
            <= (self.high if self.high is not None else self.ours)
        )

    def cells(self) -> list[Cell]:
        deviation = ""
        if self.paper:
            deviation = f"{self.ours - self.paper:+.{self.digits}f} ({self.ours / self.paper - 1:+.1%})"
        short = "short, explained" if self.is_explained else "SHORT"
        verdict = "shown" if self.low is None and self.high is None else short if self.is_short else "PASS"
        return [
            self.what,
            *("" if value is None else _number(value, self.digits) for value in (self.paper, self.ours)),
            deviation,
            self._allowed(),
            verdict,
        ]

    def samples(self) -> dict[str, list[float]]:
        """The numbers, with all their digits."""
        return {"ours": [self.ours]} | ({} if self.paper is None else {"reference": [self.paper]})

    def _allowed(self) -> str:
        low, high = (None if end is None else _number(end, self.digits) for end in (self.low, self.high))
        if low is not None and high is not None:
            return f"{low} to {high}"
        return f"at least {low}" if low is not None else f"at most {high}" if high is not None else ""


def near(what: str, paper: float, ours: float, within: float, digits: int = 3) -> Check:
    """Ours may differ by ``within``."""
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
    reference: str = "paper"
    """Source of the reference values: the paper, or ``reference``, our own independent simulation."""

    @property
    def num_short(self) -> int:
        """Values that fall short without an explanation."""
        return sum(check.is_short and not check.is_explained for check in self.checks)

    def show(self, result: Result) -> None:
        columns = ("", self.reference, "ours", "deviation", "allowed", "verdict")
        table = result.table(*columns, title=self.title, note=self.note)
        for check in self.checks:
            table.add(*check.cells(), samples=check.samples())


def _number(value: float, digits: int) -> str:
    return f"{value:.{digits}f}"


def traces_folder(given: str | None) -> Path | None:
    """The given folder, or the first ``data/traces`` beside this project or above it.

    Raises:
        SystemExit: the given folder does not exist.
    """
    if given is not None:
        folder = Path(given)
        if not folder.is_dir():
            raise SystemExit(f"--traces {given}: no such folder")
        return folder
    for parent in Path(__file__).resolve().parents:
        for name in ("data/traces", "shared/data/traces"):
            if (parent / name).is_dir():
                return parent / name
    return None

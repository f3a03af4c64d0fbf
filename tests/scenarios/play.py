# SPDX-License-Identifier: Apache-2.0
"""Plays text scenarios of cores: a line is a command, the indented lines below it are what was decided.

The rooms' tests bring the stage that understands their commands; how a scenario is read, compared and
(with ``--rewrite``) written again is the same for all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import pytest

FOLDER = Path(__file__).parent


class Stage(Protocol):
    """One core with whatever a scenario needs around it."""

    def perform(self, line: str) -> list[str]:
        """Do what ``line`` says; what the core decided, a line each."""
        ...


def performed(stage: Stage, text: str) -> str:
    """The scenario ``text`` with what is decided on ``stage``."""
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith("  "):
            continue
        lines.append(line)
        if line and not line.startswith("#"):
            lines += [f"  {decided}" for decided in stage.perform(line)]
    return "\n".join(lines) + "\n"


def play(stage: Stage, path: Path, request: pytest.FixtureRequest) -> None:
    """Assert that the scenario in ``path`` is what happens."""
    text = path.read_text()
    actual = performed(stage, text)
    if request.config.getoption("--rewrite"):
        path.write_text(actual)
    assert actual == text

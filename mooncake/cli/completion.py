# SPDX-License-Identifier: Apache-2.0
"""Completion of commands and flags in a shell: which command must be built in full for it.

The shell starts ``mooncake`` without arguments and passes the line so far in variables, whose names and
format are those of typer's scripts (``mooncake --install-completion``). A command line is built in full only
for the command that its first word selects, so the words are needed before it is built.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

WANTED = "_MOONCAKE_COMPLETE"
"""Set by a shell that wants completions, to its own name."""
LINES = ("COMP_WORDS", "_TYPER_COMPLETE_ARGS")
"""The line so far: bash's, and that of other shells."""
MAX_LINE = 1 << 16


def completed_words(environment: Mapping[str, str]) -> Sequence[str] | None:
    """Words behind the program's name of the line that a shell wants to complete; None if none does."""
    if WANTED not in environment:
        return None
    line = next((environment[name] for name in LINES if name in environment), "")[:MAX_LINE]
    try:
        words = shlex.split(line)
    except ValueError:  # an open quotation mark
        words = line.split()
    return words[1:]

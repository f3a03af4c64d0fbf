# SPDX-License-Identifier: Apache-2.0
"""Patterns for keys: regular expressions that are matched in bounded time.

The expression is the client's, the thread that matches it is the master's only one. So it is RE2, which
does not backtrack: the time is at most the length of the key times the size of the compiled expression, and
that size is bounded here. All of Python's and ECMAScript's syntax is supported except look-around and
back-references, which are impossible without backtracking; an expression with these is refused. An expression
that is only text, from the beginning (``^prefix``), whole (``^key$``) or anywhere, needs no engine at all.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Protocol

from mooncake.rpc.wire import Failure

MAX_PATTERN = 1024
"""Maximum length in characters."""
MAX_PROGRAM = 1000
"""Maximum number of instructions of a compiled expression."""
MAX_MEMORY_BYTES = 1 << 18
"""Memory of the engine for one expression; where it is not enough, matching is slower, within its bound."""
STEPS_PER_UNIT = 64
"""Instructions times characters that take about a microsecond, as one comparison of a key does."""

_LITERAL = re.compile(r"(\^?)((?:[^\\.^$*+?{}\[\]|()]|\\[^A-Za-z0-9])*)(\$?)", re.DOTALL)


class KeyPattern(Protocol):
    """A pattern. ``cost``: an upper bound of the time to match a key, in microseconds, roughly."""

    def is_found_in(self, name: str) -> bool: ...

    def cost(self, name: str) -> int: ...


class LiteralPattern:
    """An expression that is plain text."""

    def __init__(self, text: str, is_from_start: bool, is_to_end: bool) -> None:
        self._text = text
        self._test: Callable[[str], bool]
        if is_from_start:
            self._test = text.__eq__ if is_to_end else self._begins
        else:
            self._test = self._ends if is_to_end else self._holds

    def is_found_in(self, name: str) -> bool:
        return self._test(name)

    def cost(self, name: str) -> int:
        return 1

    def _begins(self, name: str) -> bool:
        return name.startswith(self._text)

    def _ends(self, name: str) -> bool:
        return name.endswith(self._text)

    def _holds(self, name: str) -> bool:
        return self._text in name


class RegexPattern:
    """A compiled regular expression."""

    def __init__(self, search: Callable[[str], object], size: int) -> None:
        self._search = search
        self._size = size

    def is_found_in(self, name: str) -> bool:
        return self._search(name) is not None

    def cost(self, name: str) -> int:
        return 1 + len(name) * self._size // STEPS_PER_UNIT


def compiled(pattern: str) -> KeyPattern | Failure:
    """Compile ``pattern``; a Failure has the reason if it can't be."""
    if len(pattern) > MAX_PATTERN:
        return Failure("invalid_argument", f"a pattern of more than {MAX_PATTERN} characters")
    literal = _LITERAL.fullmatch(pattern)
    if literal is not None:
        start, text, end = literal.groups()
        return LiteralPattern(re.sub(r"\\(.)", r"\1", text, flags=re.DOTALL), bool(start), bool(end))
    try:
        import re2  # late: without regular expressions no engine is needed
    except ImportError:
        reason = "a regular expression, but the package google-re2 is not installed where the master runs"
        return Failure("unavailable", f"{pattern!r} is {reason}; plain text and ^text work without it")
    options = re2.Options()
    options.max_mem, options.log_errors, options.never_capture = MAX_MEMORY_BYTES, False, True
    try:
        found = re2.compile(pattern, options)
    except re2.error as error:
        why = error.args[0].decode(errors="replace") if error.args else "it can't be compiled"
        reason = f"is no regular expression of RE2: {why}; look-around and back-references are not supported"
        return Failure("invalid_argument", f"{pattern!r} {reason}")
    except UnicodeEncodeError:
        return Failure("invalid_argument", f"{pattern!r} is not text")
    if found.programsize > MAX_PROGRAM:
        reason = f"is too large: {found.programsize} instructions, at most {MAX_PROGRAM}"
        return Failure("invalid_argument", f"{pattern!r} {reason}; write shorter repetitions")
    return RegexPattern(found.search, found.programsize)

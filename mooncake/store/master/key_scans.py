# SPDX-License-Identifier: Apache-2.0
"""Requests that examine every key, a slice at a time, so that others are answered in between.

A scan begins with a list of the keys that are readable then, and examines each in turn, with its state at
that time. Objects put meanwhile may be seen or not, removed ones are not. Whatever a scan has not done in
its first slice, which is part of the request, is done in slices of about a millisecond, one per ``PAUSE_S``,
and the request is answered at the end. So heartbeats and the election's lease are never late because of a
scan, however many keys there are, and a small store answers at once.

Few scans may be under way, and fewer of one connection; they take turns. One more is refused.

A scan may select keys by a pattern, a regular expression that is matched in bounded time. The expression is
the client's, the thread that matches it is the master's only one. So it is RE2, which does not backtrack: the
time is at most the length of the key times the size of the compiled expression, and that size is bounded
here. All of Python's and ECMAScript's syntax is supported except look-around and back-references, which are
impossible without backtracking; an expression with these is refused. An expression that is only text, from
the beginning (``^prefix``), whole (``^key$``) or anywhere, needs no engine at all.
"""

from __future__ import annotations

import dataclasses
import re
from collections import deque
from collections.abc import Callable, Hashable
from typing import Protocol

import msgspec

from mooncake.rpc.wire import Failure
from mooncake.store.master.catalog import Catalog
from mooncake.store.master.effects import Received, Reply
from mooncake.store.messages import Removed
from mooncake.types import ObjectKey

MAX_PATTERN = 1024
"""Maximum length of an expression in characters."""
MAX_PROGRAM = 1000
"""Maximum number of instructions of a compiled expression."""
MAX_MEMORY_BYTES = 1 << 18
"""Memory of the engine for one expression; where it is not enough, matching is slower, within its bound."""
STEPS_PER_UNIT = 64
"""Instructions times characters that take about a microsecond, as one comparison of a key does."""
MAX_SCANS = 8
MAX_SCANS_PER_CONNECTION = 2
"""Scans of one connection."""
SLICE_COST = 1000
"""Budget of one slice, in microseconds roughly; a slice has one key at least."""
PAUSE_S = 0.002
"""Pause between two slices, of any scan."""

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


@dataclasses.dataclass(slots=True, eq=False)
class KeyScan:
    """``visit(key, now)`` returns its cost, or None to end the scan. ``end(now)`` makes the answer."""

    event: Received
    keys: list[ObjectKey]
    """Remaining keys, the next one last."""
    visit: Callable[[ObjectKey, float], int | None]
    end: Callable[[float], msgspec.Struct]

    @property
    def connection(self) -> Hashable:
        return self.event.connection


class KeyScans:
    """Scans that are under way. A clock of the catalog."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._scans: deque[KeyScan] = deque()
        """The scan whose turn is next comes first."""
        self._slice_at: float | None = None
        self.on_end: Callable[[msgspec.Struct, msgspec.Struct], None] = lambda message, reply: None
        """Called with requests that were not answered at once, and their answers."""

    def begin(
        self,
        event: Received,
        visit: Callable[[ObjectKey, float], int | None],
        end: Callable[[float], msgspec.Struct],
        now: float,
    ) -> msgspec.Struct | None:
        """The answer, if the first slice was enough; None: it comes later."""
        num_own = sum(scan.connection == event.connection for scan in self._scans)
        if len(self._scans) >= MAX_SCANS or num_own >= MAX_SCANS_PER_CONNECTION:
            what = f"{len(self._scans)} requests that examine all keys are under way, {num_own} of them yours"
            return Failure("unavailable", f"{what}; try again when one is answered")
        scan = KeyScan(event, list(reversed(self._catalog.objects.readable)), visit, end)
        if self._is_over(scan, now):
            return scan.end(now)
        self._scans.append(scan)
        if self._slice_at is None:
            self._slice_at = now + PAUSE_S
        return None

    def _is_over(self, scan: KeyScan, now: float) -> bool:
        """Do one slice; returns whether the scan is over."""
        left = SLICE_COST
        while scan.keys and left > 0:
            cost = scan.visit(scan.keys.pop(), now)
            if cost is None:
                scan.keys.clear()
            else:
                left -= cost
        return not scan.keys

    def deadline(self) -> float | None:
        return self._slice_at

    def expire(self, now: float) -> None:
        scan = self._scans.popleft()
        if self._is_over(scan, now):
            reply = scan.end(now)
            self.on_end(scan.event.message, reply)
            self._catalog.replies.append(
                Reply(scan.event.origin, reply, must_last=isinstance(reply, Removed))
            )
        else:
            self._scans.append(scan)
        self._slice_at = now + PAUSE_S if self._scans else None

    def check(self) -> None:
        assert len(self._scans) <= MAX_SCANS
        assert (self._slice_at is not None) == bool(self._scans)
        assert all(scan.keys for scan in self._scans)

    def __repr__(self) -> str:
        return f"<KeyScans {len(self._scans)} under way>"

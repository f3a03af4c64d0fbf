# SPDX-License-Identifier: Apache-2.0
"""Objects and bytes under each prefix of keys, as a tree of bounded size.

Keys are cut at a separator into a path. A prefix is a row with its own objects: those whose path ends there,
or goes on below the wanted depth. When there are as many rows as are wanted, what would begin another one
counts at the nearest prefix above it that has a row, so that the sums stay right for any number of keys.
"""

from __future__ import annotations

MAX_DEPTH = 16
MAX_ROWS = 10_000
"""Maximum number of rows of one answer, whatever is asked for."""


class PrefixCounts:
    """Counts keys that begin with ``prefix``. ``depth``: levels of prefixes below it."""

    def __init__(self, prefix: str, separator: str, depth: int, limit: int) -> None:
        self._start = len(prefix)
        self._separator = separator
        self._depth = max(0, min(depth, MAX_DEPTH))
        self._limit = max(1, min(limit, MAX_ROWS))
        self.rows: dict[str, tuple[int, int]] = {prefix: (0, 0)}
        """Number of own objects and their bytes, by prefix."""
        self.num_folded = 0
        """Objects that count at a prefix above their own, because there were as many rows as wanted."""

    def add(self, key: str, size_bytes: int) -> None:
        """Count a key, which begins with the prefix."""
        ends = self._ends(key)
        own = ends[-1]
        while key[: ends[-1]] not in self.rows:
            if len(self.rows) < self._limit:
                self.rows[key[: ends[-1]]] = (0, 0)
                break
            ends.pop()
        self.num_folded += ends[-1] != own
        number, size = self.rows[key[: ends[-1]]]
        self.rows[key[: ends[-1]]] = (number + 1, size + size_bytes)

    def _ends(self, key: str) -> list[int]:
        """Where the prefixes of a key end, the shortest, which always has a row, first."""
        ends = [self._start]
        while len(ends) <= self._depth:
            at = key.find(self._separator, ends[-1])
            if at < 0:
                break
            ends.append(at + len(self._separator))
        return ends

    def check(self) -> None:
        assert len(self.rows) <= self._limit
        assert all(number >= 0 and size >= 0 for number, size in self.rows.values())

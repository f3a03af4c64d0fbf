# SPDX-License-Identifier: Apache-2.0
"""Log of what was added to a segment and removed from it, numbered, until its node has noted it.

A node keeps a journal of what its segments hold, so that a master that lost everything can request
it. This is the master's end of that stream: changes wait here until a Poll acknowledges them
(``seen``). It is bounded: a node that lags too far finds that numbers are missing (``Polled.first``)
and reports what it holds instead of catching up.

Numbers start at ``first``, which differs for each run of a master: a node with a number from an
earlier run must never appear to be up to date.
"""

from __future__ import annotations

import itertools
from collections import deque

from mooncake.store.messages import SegmentEntry

MAX_WAITING = 1 << 16
"""Changes that wait for one node."""


class ChangeLog:
    """``first`` is the number of the oldest waiting change."""

    def __init__(self, first: int) -> None:
        self.first = first
        self._waiting: deque[SegmentEntry | int] = deque()
        self._last_gone = first - 1

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def last(self) -> int:
        """The number of the newest change so far."""
        return self.first + len(self._waiting) - 1

    def add(self, change: SegmentEntry | int) -> None:
        """Add a ``SegmentEntry`` (it is held now) or an object's id (its replica here was removed)."""
        self._waiting.append(change)
        if isinstance(change, int):
            self._last_gone = self.last
        if len(self._waiting) > MAX_WAITING:
            self._waiting.popleft()
            self.first += 1

    @property
    def has_gone(self) -> bool:
        """A removal is among the waiting changes."""
        return self._last_gone >= self.first

    def skip(self) -> None:
        """Skip a number: something changed while the node does not poll."""
        self.first = self.last + 2
        self._waiting.clear()

    def noted(self, seen: int) -> bool:
        """The node has everything up to ``seen``. False: some that it lacks are no longer here."""
        if seen > self.last:
            # A number of another run, larger by accident.
            self.miss(seen)
            return False
        while self._waiting and self.first <= seen:
            self._waiting.popleft()
            self.first += 1
        return self.first == seen + 1

    def miss(self, seen: int) -> None:
        """Skip enough numbers for a node that has noted ``seen`` to notice a gap."""
        self.first = seen + 2

    def take(self, limit: int) -> list[SegmentEntry | int]:
        """The oldest changes; they stay until they are noted."""
        return list(itertools.islice(self._waiting, limit))

    def __repr__(self) -> str:
        return f"<ChangeLog {self.first} to {self.last}>"

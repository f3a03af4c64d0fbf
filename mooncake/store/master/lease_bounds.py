# SPDX-License-Identifier: Apache-2.0
"""Upper bounds of the promises made by masters of this line, this one and those before it.

A successor assumes the longest promise that could exist: every object is leased, space that was held rests.
The longest is set by the master that made the promise, and its successor's settings may be shorter: settings
are changed one master at a time. So each leader writes down how long its own promises last when its term
begins, never less than what it found while promises of its predecessors may still be in use.
"""

from __future__ import annotations

from collections.abc import Callable

from mooncake.store.master.log_records import LineBegan, Record
from mooncake.store.settings import MasterSettings


class LeaseBounds:
    """Durations in seconds. A clock of the catalog.

    Args:
        keep: called with a record to be written down.
    """

    def __init__(self, settings: MasterSettings, keep: Callable[[Record], None]) -> None:
        self._keep = keep
        self._own = settings.lease_s, settings.rest_s
        self._known = (0.0, 0.0)
        """The pair written down last in this line."""
        self._ends_at: float | None = None
        """When no promise of a predecessor is in use any longer."""
        self._line = 0

    @property
    def lease_s(self) -> float:
        """Duration of the longest lease that any of them gave."""
        return max(self._own[0], self._known[0])

    @property
    def rest_s(self) -> float:
        """Duration after which every promise of any of them has expired."""
        return max(self._own[1], self._known[1])

    def applied(self, record: LineBegan) -> None:
        """Enter another master's record."""
        self._line, self._known = record.line, (record.lease_s, record.rest_s)

    def record(self, line: int) -> LineBegan:
        """The record that a successor must have."""
        return LineBegan(line, self.lease_s, self.rest_s)

    def begin(self, line: int, now: float) -> None:
        """This master leads from now on."""
        before, self._line = self._known, line
        self._known = self.lease_s, self.rest_s
        self._ends_at = now + self.rest_s if self._known != self._own else None
        if self._known != before:
            self._keep(self.record(line))

    def deadline(self) -> float | None:
        return self._ends_at

    def expire(self, now: float) -> None:
        """Drop the predecessors' bounds: only promises of this master are left."""
        if self._ends_at is not None and self._ends_at <= now:
            self._ends_at, self._known = None, self._own
            self._keep(self.record(self._line))

    def __repr__(self) -> str:
        return f"<LeaseBounds: leases {self.lease_s} s, rests {self.rest_s} s>"

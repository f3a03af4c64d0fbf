# SPDX-License-Identifier: Apache-2.0
"""The instants at which the conductor has to do something by itself: probe an instance, end a request.

Owns one instant per kind and key, and refuses to know what is done then. An instant that is set again or
cancelled leaves its entry in the heap, where it no longer counts; when most entries do not, they are dropped,
as a request that has ended would otherwise be held for an hour.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Literal

Kind = Literal["expiry", "probe"]

_FEW = 1024
"""Entries that are never worth a search for those that no longer count."""


class DueTimes:
    """The instants of all kinds, by key."""

    def __init__(self) -> None:
        self._due: dict[tuple[Kind, str], float] = {}
        self._heap: list[tuple[float, Kind, str]] = []

    def __len__(self) -> int:
        """Number of entries, including those that no longer count."""
        return len(self._heap)

    @property
    def next_at(self) -> float | None:
        """The instant of the next entry, which may no longer count; None if there is none."""
        return self._heap[0][0] if self._heap else None

    def at(self, kind: Kind, key: str) -> float | None:
        """The instant that is set for a key; None if there is none."""
        return self._due.get((kind, key))

    def keys(self, kind: Kind) -> list[str]:
        """The keys of a kind."""
        return [key for one, key in self._due if one == kind]

    def set(self, kind: Kind, key: str, at: float) -> None:
        """Set the instant of a key, in the place of an earlier one."""
        self._due[kind, key] = at
        heapq.heappush(self._heap, (at, kind, key))
        if len(self._heap) >= _FEW + 4 * len(self._due):
            self._heap = [(at, *key) for key, at in self._due.items()]
            heapq.heapify(self._heap)

    def cancel(self, kind: Kind, key: str) -> None:
        self._due.pop((kind, key), None)

    def take_due(self, now: float) -> Iterator[tuple[Kind, str]]:
        """Yield what is due, in order, each no longer set then; more may be set meanwhile."""
        while self._heap and self._heap[0][0] <= now:
            at, kind, key = heapq.heappop(self._heap)
            if self._due.get((kind, key)) == at:
                del self._due[kind, key]
                yield kind, key

    def check(self) -> None:
        entries = dict.fromkeys(self._heap)
        assert all((at, *key) in entries for key, at in self._due.items())

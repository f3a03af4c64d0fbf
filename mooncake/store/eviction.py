"""Who leaves, in which order: the object whose last lease ended first. Never one that is leased.

A heap of (lease end, object), repaired only when something is taken from it: a lookup moves an
object's lease end without touching the heap, and an entry that turns out to be older than its
object goes back with the true value. Since lease ends only grow, the first entry that is up to date
is the least recently used object of all; and if its lease still runs, so does every other.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator

from mooncake.store.objects import StoredObject

MAX_SPARED = 4096
"""Entries set aside in one search, so that a large suspected node can't make every put slow."""


class Eviction:
    """Every readable object has exactly one entry; unlinked ones keep theirs until it surfaces."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, StoredObject]] = []
        self._num_dead = 0

    def __len__(self) -> int:
        """Entries, those of unlinked objects included."""
        return len(self._heap)

    def add(self, stored: StoredObject) -> None:
        """``stored`` has become readable."""
        heapq.heappush(self._heap, (stored.lease_until, stored.object_id, stored))

    def unlinked(self, stored: StoredObject) -> None:
        """``stored`` was readable and is no more."""
        self._num_dead += 1
        if self._num_dead > 1024 and 2 * self._num_dead > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[2].is_readable]
            heapq.heapify(self._heap)
            self._num_dead = 0

    def victims(
        self, now: float, may_leave: Callable[[StoredObject], bool]
    ) -> Generator[StoredObject, None, None]:
        """Objects to evict, first the least recently used. The caller unlinks each before the next.

        Those that ``may_leave`` spares (their node is suspected: no space would be won) stay.
        """
        spared: list[tuple[float, int, StoredObject]] = []
        try:
            while self._heap and len(spared) < MAX_SPARED:
                lease_until, object_id, stored = self._heap[0]
                if not stored.is_readable:
                    heapq.heappop(self._heap)
                    self._num_dead -= 1
                elif stored.lease_until > lease_until:
                    heapq.heapreplace(self._heap, (stored.lease_until, object_id, stored))
                elif lease_until > now:
                    return
                elif not may_leave(stored):
                    spared.append(heapq.heappop(self._heap))
                else:
                    yield stored
                    assert not stored.is_readable, stored
        finally:
            for entry in spared:
                heapq.heappush(self._heap, entry)

    def check(self, readable: dict[str, StoredObject]) -> None:
        alive = [entry for entry in self._heap if entry[2].is_readable]
        assert len(self._heap) - len(alive) == self._num_dead, (len(self._heap), len(alive), self._num_dead)
        assert {entry[2].object_id for entry in alive} == {s.object_id for s in readable.values()}
        assert len(alive) == len(readable)
        assert all(lease_until <= stored.lease_until for lease_until, _, stored in alive)

# SPDX-License-Identifier: Apache-2.0
"""Snapshot of a master's state as records: all at once, or piece by piece while it runs.

This is the only module that defines what belongs to a master's state. Compaction of the log, a new standby,
a restart, the simulator and the tests all take it from here, so none of them can know less than another. It
consists of: the line of masters, segments, quotas, tenants that were emptied, for each key the version that
was acknowledged, which old versions of a key are out of date, and space that is promised without being a
replica. Leases and soft pins are not part of it, because a successor assumes the longest ones that could
exist; and jobs end with the master that has them (``jobs.py``).

A snapshot is taken in pieces, because neither a standby nor a log may block the master for as long as it
takes to write down a million objects. Records made meanwhile go between the pieces, except those about a key
that is still to come, whose piece will include them. So at every instant the snapshot is the master's state
without the keys still to come. Then comes the space that was promised, and last, the largest id that was
given out: a snapshot without that record was cut off, and objects that it lacks are not removed for that
reason.
"""

from __future__ import annotations

from typing import TypeVar

from mooncake.store.master.catalog import Catalog, acknowledged, record_of_segment
from mooncake.store.master.log_records import AllRemoved, IdsGiven, ObjectGone, Record
from mooncake.store.master.segments import Segment
from mooncake.types import ObjectKey

ItemT = TypeVar("ItemT")

OBJECTS_PER_PIECE = 1000
"""Objects copied at a time; takes a few milliseconds."""
NEVER = (0, -1)


class Snapshot:
    """A snapshot of ``catalog`` that begins now."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        segments = catalog.segments
        self._head: list[Record] = [catalog.lease_bounds.record(segments.line)]
        self._head += [record_of_segment(one) for one in segments.mounted.values()]
        self._head += catalog.tenants.records()
        self._head += [AllRemoved(tenant, before) for tenant, before in catalog.cleared.items()]
        self._keys = list(reversed(catalog.objects.readable))
        self._to_come: dict[ObjectKey, None] = dict.fromkeys(self._keys)
        self._tombstones = list(reversed(catalog.tombstones))
        """Keys of which only the limit of outdated versions is recorded. Their order does not matter: later
        records of them say the same or more."""
        self._segments: list[Segment] | None = None
        """Segments whose promised space is still to be recorded; None before that begins, after the last key.
        What is promised or given up later has records of its own."""
        self._offsets: list[int] = []
        """Remaining offsets of the last of them."""
        self._is_ended = False

    @property
    def is_over(self) -> bool:
        return self._is_ended

    def piece(self, count: int = OBJECTS_PER_PIECE) -> list[Record]:
        """The next records of the snapshot."""
        records, self._head = self._head, []
        if self._keys:
            for key in _taken(self._keys, count):
                del self._to_come[key]
                self._record_key(key, records)
        elif self._tombstones:
            for key in _taken(self._tombstones, count):
                if key not in self._catalog.objects.readable:
                    self._record_key(key, records)
        else:
            self._record_held(10 * count, records)
            if not self._segments:
                self._is_ended = True
                records.append(IdsGiven(self._catalog.objects.last_id))
        return records

    def _record_key(self, key: ObjectKey, records: list[Record]) -> None:
        catalog = self._catalog
        stored = catalog.objects.readable.get(key)
        if stored is not None:
            records.append(acknowledged(stored))
        elif catalog.tombstones.get(key, NEVER)[1] == catalog.cleared_of(key):
            records.append(ObjectGone(key, 0, catalog.news_of(key)))

    def _record_held(self, count: int, records: list[Record]) -> None:
        if self._segments is None:
            self._segments = list(reversed(self._catalog.segments.mounted.values()))
            self._offsets = self._offsets_of_next()
        if not self._segments:
            return
        segment = self._segments[-1]
        for offset in _taken(self._offsets, count):
            held = self._catalog.held(segment, offset) if segment.is_mounted else None
            if held is not None:
                records.append(held)
        if not self._offsets:
            self._segments.pop()
            self._offsets = self._offsets_of_next()

    def _offsets_of_next(self) -> list[int]:
        return list(reversed(self._segments[-1].holders)) if self._segments else []

    def between(self, records: list[Record]) -> list[Record]:
        """The part of ``records``, just written down, that belongs after the pieces so far."""
        if not self._to_come:
            return records
        return [record for record in records if getattr(record, "key", None) not in self._to_come]

    def __repr__(self) -> str:
        return f"<Snapshot [{len(self._keys)} objects to come]>"


def _taken(items: list[ItemT], count: int) -> list[ItemT]:
    """Remove the last ``count`` items from the list; returns them, the last one first."""
    taken = items[-count:]
    del items[-count:]
    taken.reverse()
    return taken

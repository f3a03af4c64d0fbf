"""A copy of what a master knows, made piece by piece while it goes on.

For a standby that begins to follow and for a log that is written anew: neither may keep the master from
answering for as long as it takes to write down a million objects. What happens in the meantime goes
between the pieces, but for what is about an object that is still to come: that will tell by itself. So at
every instant the copy is what the master knows, less the objects that are still to come. Then comes the
space that was promised and is no replica, and last, how far ids have been given out: a copy without that
has lost its end, and no object is gone only because such a copy does not have it.
"""

from __future__ import annotations

from mooncake.store.catalog import Catalog, record_of, record_of_segment
from mooncake.store.records import IdsGiven, LineBegan, Record, SpaceHeld
from mooncake.types import ObjectKey

PIECE = 1000
"""Objects copied at a time; some milliseconds."""


class Copy:
    """A copy of ``catalog`` that begins now."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        segments = catalog.segments
        self._head: list[Record] = [LineBegan(segments.line)]
        self._head += [record_of_segment(one) for one in segments.mounted.values()]
        self._head += catalog.tenants.records()
        self._keys = list(catalog.objects.readable)
        self._to_come: dict[ObjectKey, None] = dict.fromkeys(self._keys)
        self._offsets = [(one, list(one.holders)) for one in segments.mounted.values()]
        """Where space may be promised that is no replica. What is promised later is written down."""
        self._is_ended = False

    @property
    def is_over(self) -> bool:
        return self._is_ended

    def piece(self, count: int = PIECE) -> list[Record]:
        """The next records."""
        records, self._head = self._head, []
        if not self._keys:
            records += self._held(count)
            if not self._offsets:
                self._is_ended = True
                records.append(IdsGiven(self._catalog.objects.last_id))
            return records
        readable = self._catalog.objects.readable
        for key in self._keys[-count:]:
            del self._to_come[key]
            stored = readable.get(key)
            if stored is not None:
                records.append(record_of(stored))
        del self._keys[-count:]
        return records

    def _held(self, count: int) -> list[Record]:
        if not self._offsets:
            return []
        segment, offsets = self._offsets[-1]
        records: list[Record] = []
        for offset in offsets[-10 * count :]:
            if segment.is_mounted and self._catalog.is_held(segment, offset):
                records.append(SpaceHeld([(segment.name, offset)], segment.holders[offset].size_bytes))
        del offsets[-10 * count :]
        if not offsets:
            self._offsets.pop()
        return records

    def between(self, records: list[Record]) -> list[Record]:
        """What of ``records``, which have just been written down, belongs after the pieces so far."""
        if not self._to_come:
            return records
        return [record for record in records if getattr(record, "key", None) not in self._to_come]

    def __repr__(self) -> str:
        return f"<Copy [{len(self._keys)} objects to come]>"

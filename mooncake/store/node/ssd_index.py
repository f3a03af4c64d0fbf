# SPDX-License-Identifier: Apache-2.0
"""Index of an SSD segment: entries and tombstones, replayed from a log and encoded for it.

The log survives the process: an entry is appended after its bytes are in place, a tombstone (``EntryGone``)
before its space is written again. Bytes and entry are made durable at the same time, because one flush after
the other would take twice as long; so after a loss of power an entry may be there without its bytes. Until
they are durable, it is therefore *unflushed* (``EntryWritten``, until ``EntriesFlushed``), and the next
process that opens the log verifies the bytes of those that still are (``ssd.py``). Replay drops a torn tail;
of entries that overlap, the later one counts, because its bytes were written over the earlier one's.
``ssd_index_log.py`` owns the file and handles damage; this module defines the meaning of the records and when
most of the log is obsolete (``wants_compaction``).
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right, insort
from collections.abc import Container, Iterable, Iterator

import msgspec

from mooncake.files.frames import PLAIN, Framing, Scan
from mooncake.store.messages import SegmentEntry

MIN_COMPACTION_BYTES = 4 << 20
HALF_LIST = 1000
"""Numbers in each half of a list of ``SortedOffsets`` that is divided."""


class EntryHeld(msgspec.Struct, frozen=True, array_like=True, tag="held"):
    """Record: the segment holds this object."""

    entry: SegmentEntry


class EntryWritten(msgspec.Struct, frozen=True, array_like=True, tag="written"):
    """Record: the segment holds this object, whose bytes were not known to be durable."""

    entry: SegmentEntry


class EntriesFlushed(msgspec.Struct, frozen=True, array_like=True, tag="flushed"):
    """Record: the bytes of these objects are durable."""

    object_ids: list[int]


class EntryGone(msgspec.Struct, frozen=True, array_like=True, tag="gone"):
    """Record: the segment no longer holds these objects."""

    object_ids: list[int]


IndexRecord = EntryHeld | EntryWritten | EntriesFlushed | EntryGone

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[IndexRecord] = msgspec.msgpack.Decoder(IndexRecord)


class SortedOffsets:
    """Ascending numbers in lists of bounded length: with millions of objects, an insertion into one long list
    would take longer than the copy of an object."""

    def __init__(self, offsets: Iterable[int] = ()) -> None:
        ordered = sorted(offsets)
        self._lists = [ordered[at : at + HALF_LIST] for at in range(0, len(ordered), HALF_LIST)]
        self._firsts = [one[0] for one in self._lists]

    def __iter__(self) -> Iterator[int]:
        return itertools.chain.from_iterable(self._lists)

    def add(self, offset: int) -> None:
        if not self._lists:
            self._lists, self._firsts = [[]], [offset]
        at = max(0, bisect_right(self._firsts, offset) - 1)
        numbers = self._lists[at]
        insort(numbers, offset)
        if len(numbers) > 2 * HALF_LIST:
            self._lists[at : at + 1] = [numbers[:HALF_LIST], numbers[HALF_LIST:]]
            self._firsts.insert(at + 1, numbers[HALF_LIST])
        self._firsts[at] = numbers[0]

    def remove(self, offset: int) -> None:
        at = bisect_right(self._firsts, offset) - 1
        numbers = self._lists[at]
        del numbers[bisect_left(numbers, offset)]
        if numbers:
            self._firsts[at] = numbers[0]
        else:
            del self._lists[at], self._firsts[at]

    def around(self, start: int, end: int) -> Iterator[int]:
        """The last number up to ``start``, and those behind it that are less than ``end``."""
        for at in range(max(0, bisect_right(self._firsts, start) - 1), len(self._lists)):
            numbers = self._lists[at]
            for offset in numbers[max(0, bisect_right(numbers, start) - 1) :]:
                if offset >= end:
                    return
                yield offset

    def check(self) -> None:
        assert self._firsts == [numbers[0] for numbers in self._lists]
        assert all(len(numbers) <= 2 * HALF_LIST for numbers in self._lists)
        assert list(self) == sorted(self)


class SsdIndex:
    """Entries by object. Methods that change it return the bytes to be appended to the log.

    ``content`` is the log so far, with records from ``begin`` on; ``num_bytes`` of it are sound: up to the
    first damage, or the torn tail (``found``).

    Raises:
        msgspec.MsgspecError: this version can't decode a sound record.
    """

    def __init__(self, content: bytes = b"", framing: Framing = PLAIN, begin: int = 0) -> None:
        self._framing = framing
        self.entries: dict[int, SegmentEntry] = {}
        """Object id -> entry."""
        self.unflushed: dict[int, None] = {}
        """Ids of entries whose bytes are not known to be durable."""
        self._offsets = SortedOffsets()
        """Offsets of all entries; entries don't overlap."""
        self._at: dict[int, int] = {}
        """Offset -> object id."""
        self.found: Scan = framing.scan(content, begin)
        self.num_bytes = self.found.num_bytes
        self._fold([_decoder.decode(body) for body in self.found.bodies])
        self._compacted_bytes = 0
        """Size of the log after the last compaction."""

    def __len__(self) -> int:
        return len(self.entries)

    def has(self, entry: SegmentEntry) -> bool:
        """Whether its object is where ``entry`` says: it may have been removed, or copied elsewhere since."""
        held = self.entries.get(entry.object_id)
        return held is not None and held.offset == entry.offset

    def overlapping(self, offset: int, size_bytes: int) -> list[int]:
        """Ids of the objects that have bytes in this range."""
        found = [self.entries[self._at[at]] for at in self._offsets.around(offset, offset + size_bytes)]
        return [entry.object_id for entry in found if entry.offset + entry.size_bytes > offset]

    def hold(self, entry: SegmentEntry, *, is_flushed: bool = True) -> bytes:
        """Add ``entry``, whose bytes are in place, and drop entries that it overlaps.

        ``is_flushed``: its bytes are durable, or need not be."""
        if self.entries.get(entry.object_id) == entry and (entry.object_id in self.unflushed) != is_flushed:
            return b""
        self._remove([entry.object_id, *self.overlapping(entry.offset, entry.size_bytes)])
        self._insert(entry)
        if is_flushed:
            return self._record(EntryHeld(entry))
        self.unflushed[entry.object_id] = None
        return self._record(EntryWritten(entry))

    def mark_flushed(self, object_ids: Iterable[int]) -> bytes:
        """Note that the bytes of these objects are durable; returns no bytes when that was known."""
        known = [object_id for object_id in object_ids if object_id in self.unflushed]
        if not known:
            return b""
        for object_id in known:
            del self.unflushed[object_id]
        return self._record(EntriesFlushed(known))

    def drop(self, object_ids: Iterable[int]) -> bytes:
        """Drop these objects; returns no bytes when none of them was held."""
        known = [object_id for object_id in object_ids if object_id in self.entries]
        if not known:
            return b""
        self._remove(known)
        return self._record(EntryGone(known))

    @property
    def wants_compaction(self) -> bool:
        return self.num_bytes > max(MIN_COMPACTION_BYTES, 4 * self._compacted_bytes)

    def in_order(self) -> list[SegmentEntry]:
        """All entries by offset."""
        return [self.entries[self._at[at]] for at in self._offsets]

    def compacted_to(self, num_bytes: int, framing: Framing | None = None) -> None:
        """Note that the log was compacted to ``num_bytes`` and is continued in ``framing``."""
        self.num_bytes = self._compacted_bytes = num_bytes
        self._framing = framing or self._framing

    def check(self) -> None:
        self._offsets.check()
        assert list(self._offsets) == sorted(self._at) and len(self._at) == len(self.entries)
        end = 0
        for at in self._offsets:
            entry = self.entries[self._at[at]]
            assert entry.offset == at >= end, f"{entry} overlaps"
            end = at + entry.size_bytes
        assert self.unflushed.keys() <= self.entries.keys()

    def _record(self, record: IndexRecord) -> bytes:
        content = self._framing.frame([_encoder.encode(record)], self.num_bytes)
        self.num_bytes += len(content)
        return content

    def _insert(self, entry: SegmentEntry) -> None:
        self._offsets.add(entry.offset)
        self._at[entry.offset] = entry.object_id
        self.entries[entry.object_id] = entry

    def _remove(self, object_ids: Iterable[int]) -> None:
        for object_id in object_ids:
            self.unflushed.pop(object_id, None)
            entry = self.entries.pop(object_id, None)
            if entry is not None:
                del self._at[entry.offset]
                self._offsets.remove(entry.offset)

    def _fold(self, records: list[IndexRecord]) -> None:
        """Apply ``records`` all at once, because insertion one by one would take minutes."""
        held = [record.entry for record in records if isinstance(record, EntryHeld | EntryWritten)]
        overwritten = _overwritten(held)
        number = 0
        for record in records:
            if isinstance(record, EntryGone):
                for object_id in record.object_ids:
                    self.entries.pop(object_id, None)
                    self.unflushed.pop(object_id, None)
                continue
            if isinstance(record, EntriesFlushed):
                for object_id in record.object_ids:
                    self.unflushed.pop(object_id, None)
                continue
            entry = record.entry
            self.entries.pop(entry.object_id, None)
            self.unflushed.pop(entry.object_id, None)
            if number not in overwritten:
                self.entries[entry.object_id] = entry
                if isinstance(record, EntryWritten):
                    self.unflushed[entry.object_id] = None
            number += 1
        self._at = {entry.offset: entry.object_id for entry in self.entries.values()}
        self._offsets = SortedOffsets(self._at)

    def __repr__(self) -> str:
        return f"<SsdIndex of {len(self.entries)} objects, {self.num_bytes} bytes>"


def compacted(
    entries: Iterable[SegmentEntry],
    framing: Framing = PLAIN,
    begin: int = 0,
    unflushed: Container[int] = (),
) -> bytes:
    """Shortest log of these entries, to be written from offset ``begin`` on.

    ``unflushed``: ids, as in ``SsdIndex``."""
    records = (EntryWritten(one) if one.object_id in unflushed else EntryHeld(one) for one in entries)
    return framing.frame(map(_encoder.encode, records), begin)


def _overwritten(held: list[SegmentEntry]) -> dict[int, None]:
    """Positions in ``held`` of entries that a later one overlaps."""
    overwritten: dict[int, None] = {}
    open_numbers: list[int] = []
    for number in sorted(range(len(held)), key=lambda number: held[number].offset):
        offset = held[number].offset
        open_numbers = [one for one in open_numbers if held[one].offset + held[one].size_bytes > offset]
        for other in open_numbers:
            overwritten[min(number, other)] = None
        open_numbers.append(number)
    return overwritten

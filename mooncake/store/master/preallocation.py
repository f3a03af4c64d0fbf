# SPDX-License-Identifier: Apache-2.0
"""Preallocated space for writers, so that a small put takes one request instead of two.

For a put of a few KiB two requests would take longer than the transfer. So a writer of many may get a
*preallocation*: pieces of space of one size, promised like that of a started put, but for no object yet.
It writes into a piece and then reports once what it wrote, and where (``PutWritten``).

A preallocation is a promise like every other. Its pieces may be written for ``put_s``, and rest for
``grace_s`` when their use was not reported by then; a successor knows that they are held, but not for whom,
so it knows no preallocation. It must not starve others: nothing is evicted for it, and only a small share of
each segment is preallocated, while there is room.
"""

from __future__ import annotations

import dataclasses

from mooncake.errors import Refusal
from mooncake.store import messages as m
from mooncake.store.master.catalog import Catalog
from mooncake.store.master.objects import Extent, replica_of
from mooncake.store.master.placement import FreeSpace, SegmentPlacement
from mooncake.store.master.segments import Segment

MAX_PIECES = 64
MAX_PIECE_BYTES = 64 << 10
PREALLOCATED_SHARE = 1 / 16
"""Largest share of a segment that may be preallocated."""
FREE_SHARE = 1 / 32
"""Least share of a segment that must be free after a preallocation."""


@dataclasses.dataclass(slots=True)
class Preallocation:
    """One preallocation, until its deadline."""

    until: float
    size_bytes: int
    pieces: list[Extent | int]
    """An int is the identity of the put that used the piece."""


class Preallocations:
    """Preallocations that may still be written."""

    def __init__(self, catalog: Catalog, space: FreeSpace) -> None:
        self._catalog = catalog
        self._space = space
        self._given: dict[int, Preallocation] = {}
        """By id, oldest first."""

    def give(
        self, num_pieces: int, size_bytes: int, placement: SegmentPlacement, now: float
    ) -> m.PreallocatedSpace | None:
        """As many of the pieces as are available; None if none is."""
        if not 0 < size_bytes <= MAX_PIECE_BYTES:
            return None
        extents = self._in_a_row(min(num_pieces, MAX_PIECES), size_bytes, placement)
        while len(extents) < min(num_pieces, MAX_PIECES):
            place = placement.allocate(size_bytes)
            if place is None:
                break
            if not _has_room(place[0], size_bytes):
                place[0].allocator.free(place[1])
                placement.freed(place[0])
                break
            place[0].preallocated_bytes += size_bytes
            extents.append(Extent(*place))
        if not extents:
            return None
        self._space.given(size_bytes * len(extents))
        put_s, advance_id = self._catalog.settings.put_s, self._catalog.objects.new_id()
        self._given[advance_id] = Preallocation(now + put_s, size_bytes, list[Extent | int](extents))
        replicas = [replica_of(extent) for extent in extents]
        self._catalog.preallocate(extents, size_bytes, now + put_s)
        return m.PreallocatedSpace(advance_id, put_s, size_bytes, replicas)

    def _in_a_row(self, num_pieces: int, size_bytes: int, placement: SegmentPlacement) -> list[Extent]:
        """All of them from one hole, or none: mostly there is one, and that costs less than many."""
        place = placement.allocate(num_pieces * size_bytes)
        if place is None:
            return []
        segment, offset = place
        if size_bytes % segment.allocator.alignment_bytes or not _has_room(segment, num_pieces * size_bytes):
            segment.allocator.free(offset)
            placement.freed(segment)
            return []
        segment.allocator.split(offset, size_bytes)
        segment.preallocated_bytes += num_pieces * size_bytes
        return [Extent(segment, offset + number * size_bytes) for number in range(num_pieces)]

    def find(
        self, piece: tuple[int, int], put_id: int, size_bytes: int, now: float
    ) -> Extent | Refusal | None:
        """The piece, if it may become an object of that size; None: it became one by this very put."""
        advance_id, number = piece
        given = self._given.get(advance_id)
        if given is None or now >= given.until or not 0 <= number < len(given.pieces):
            return Refusal("expired", "the space was not preallocated by this master, or its time is over")
        extent = given.pieces[number]
        if extent == put_id:
            return None
        if isinstance(extent, int):
            return Refusal("expired", "another object is there")
        if not extent.segment.takes_objects(now) or size_bytes > given.size_bytes:
            return Refusal("expired", f"an object of {size_bytes} bytes may not be put there now")
        return extent

    def use(self, piece: tuple[int, int], put_id: int) -> None:
        """Mark the piece, which was found, as used by an object."""
        given = self._given[piece[0]]
        extent, given.pieces[piece[1]] = given.pieces[piece[1]], put_id
        assert isinstance(extent, Extent)
        extent.segment.preallocated_bytes -= given.size_bytes

    def deadline(self) -> float | None:
        for given in self._given.values():
            return given.until
        return None

    def expire(self, now: float) -> None:
        """Let unused pieces rest; their use can no longer be reported."""
        while self._given:
            advance_id, given = next(iter(self._given.items()))
            if given.until > now:
                break
            del self._given[advance_id]
            for extent in given.pieces:
                if isinstance(extent, Extent):
                    extent.segment.preallocated_bytes -= given.size_bytes

    def check(self) -> None:
        preallocated: dict[Segment, int] = {}
        for given in self._given.values():
            for extent in given.pieces:
                if isinstance(extent, int):
                    continue
                segment = extent.segment
                preallocated[segment] = preallocated.get(segment, 0) + given.size_bytes
                if segment.is_mounted:
                    assert extent in segment.holders[extent.offset].resting, f"{extent} was allocated again"
        for segment in self._catalog.segments.mounted.values():
            assert segment.preallocated_bytes == preallocated.get(segment, 0), segment


def _has_room(segment: Segment, size_bytes: int) -> bool:
    """Whether these bytes, which have been allocated, may be preallocated."""
    allocator = segment.allocator
    is_little = segment.preallocated_bytes + size_bytes <= PREALLOCATED_SHARE * allocator.size_bytes
    return is_little and allocator.free_bytes >= FREE_SHARE * allocator.size_bytes

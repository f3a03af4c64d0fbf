# SPDX-License-Identifier: Apache-2.0
"""Allocator of offsets within one segment: allocate, free, coalesce. Knows sizes, not objects.

A two-level segregated fit (after Masmano et al., "TLSF: a new dynamic memory allocator for
real-time systems", 2004): holes are kept in bins by size, eight bins per power of two, and the bits of one
integer mark the bins that are not empty, so that finding a hole takes a few bit operations whatever the
number of holes. Adjacent holes are merged at once. All bookkeeping is outside the managed memory, which
belongs to another process.

Holes are cut from their bottom, and the newest hole of a bin is used first, which reuses pages that have
already been touched.
"""

from __future__ import annotations

import bisect

from mooncake.errors import InvalidArgument

ALIGNMENT_BYTES = 64
"""Alignment of offsets and allocated sizes: a cache line, so that no two objects share one."""
PAGE_BYTES = 4096
"""Alignment on SSD, where O_DIRECT reads and writes whole pages."""

_MANTISSA_BITS = 3
_SCAN = 16
"""Number of holes examined in the bin whose holes may be too small, before a larger bin is used."""


def _bin_of(size_bytes: int) -> int:
    """Number of the bin for holes of this size. All holes in higher bins are larger."""
    exponent = size_bytes.bit_length() - 1 - _MANTISSA_BITS
    if exponent <= 0:
        return size_bytes
    return (exponent << _MANTISSA_BITS) + (size_bytes >> exponent)


class Allocator:
    """Allocates ranges of ``[0, size_bytes)`` at multiples of ``alignment_bytes``."""

    def __init__(self, size_bytes: int, alignment_bytes: int = ALIGNMENT_BYTES) -> None:
        if size_bytes < alignment_bytes:
            raise InvalidArgument("size_bytes", size_bytes, f"at least {alignment_bytes}")
        self.alignment_bytes = alignment_bytes
        self.size_bytes = size_bytes - size_bytes % alignment_bytes
        self.allocated_bytes = 0
        self.allocations: dict[int, int] = {}
        """Offset -> size of every range in use."""
        self._holes: dict[int, int] = {}
        """Offset -> size of every hole; consistent with ``_hole_ends`` and ``_bins``."""
        self._hole_ends: dict[int, int] = {}
        """End -> offset of every hole."""
        self._bins: dict[int, dict[int, None]] = {}
        """Bin -> offsets of its holes, oldest first."""
        self._filled = 0
        """Bit b is set when bin b is not empty."""
        self._starts: list[int] | None = None
        """Sorted offsets of the holes while ``take`` needs them; else None, to save the cost of sorting."""
        self._add_hole(0, self.size_bytes)

    @property
    def free_bytes(self) -> int:
        return self.size_bytes - self.allocated_bytes

    @property
    def largest_free_bytes(self) -> int:
        """Size of the largest object that fits now."""
        if not self._filled:
            return 0
        return max(self._holes[offset] for offset in self._bins[self._filled.bit_length() - 1])

    def has_hole(self, size_bytes: int) -> bool:
        """Whether ``allocate`` would succeed."""
        return self._find(size_bytes + -size_bytes % self.alignment_bytes) is not None

    def allocate(self, size_bytes: int) -> int | None:
        """The offset of a range of at least ``size_bytes``, or None when no hole is large enough."""
        assert size_bytes > 0, size_bytes
        wanted = size_bytes + -size_bytes % self.alignment_bytes
        self._starts = None
        offset = self._find(wanted)
        if offset is None:
            return None
        self._shrink(offset, wanted)
        self.allocations[offset] = wanted
        self.allocated_bytes += wanted
        return offset

    def take(self, offset: int, size_bytes: int) -> bool:
        """Mark a range as allocated that another allocator of this memory allocated; False: it is not free.

        Until the next ``allocate``, the holes are kept sorted: a standby master takes millions of ranges
        and allocates none.
        """
        size_bytes += -size_bytes % self.alignment_bytes
        if self._starts is None:
            self._starts = sorted(self._holes)
        at = bisect.bisect_right(self._starts, offset) - 1
        if at < 0 or offset % self.alignment_bytes or size_bytes <= 0:
            return False
        start = self._starts[at]
        end = start + self._holes[start]
        if offset + size_bytes > end:
            return False
        if start == offset:
            self._shrink(offset, size_bytes, at)
        else:
            self._remove_hole(start)
            self._add_hole(start, offset - start)
            if offset + size_bytes < end:
                self._add_hole(offset + size_bytes, end - offset - size_bytes)
        self.allocations[offset] = size_bytes
        self.allocated_bytes += size_bytes
        return True

    def free(self, offset: int) -> int:
        """Free a range; returns its size."""
        size_bytes = freed_bytes = self.allocations.pop(offset)
        self.allocated_bytes -= freed_bytes
        before = self._hole_ends.get(offset)
        if before is not None:
            size_bytes += self._remove_hole(before)
            offset = before
        if offset + size_bytes in self._holes:
            size_bytes += self._remove_hole(offset + size_bytes)
        self._add_hole(offset, size_bytes)
        return freed_bytes

    def split(self, offset: int, size_bytes: int) -> None:
        """Split a range into ranges of exactly ``size_bytes``; its size is a multiple of that."""
        whole_bytes = self.allocations[offset]
        assert whole_bytes % size_bytes == 0 and size_bytes % self.alignment_bytes == 0, size_bytes
        for start in range(offset, offset + whole_bytes, size_bytes):
            self.allocations[start] = size_bytes

    def trim(self, offset: int, size_bytes: int) -> int:
        """Free the part of a range behind its first ``size_bytes``; returns its size."""
        wanted = size_bytes + -size_bytes % self.alignment_bytes
        freed_bytes = self.allocations[offset] - wanted
        if freed_bytes:
            self.allocations[offset] = wanted
            self.allocations[offset + wanted] = freed_bytes
            self.free(offset + wanted)
        return freed_bytes

    def check(self) -> None:
        """Assert that ranges and holes tile the segment, and that the bins are consistent."""
        at, previous_is_hole = 0, False
        for offset, size_bytes in sorted([*self.allocations.items(), *self._holes.items()]):
            assert offset == at, f"range at {offset}, expected {at}"
            assert size_bytes > 0 and size_bytes % self.alignment_bytes == 0, (offset, size_bytes)
            is_hole = offset in self._holes
            assert not (is_hole and previous_is_hole), f"two holes in a row at {offset}"
            at, previous_is_hole = offset + size_bytes, is_hole
        assert at == self.size_bytes, (at, self.size_bytes)
        assert self.allocated_bytes == sum(self.allocations.values())
        assert self._hole_ends == {offset + size: offset for offset, size in self._holes.items()}
        binned = {offset: number for number, holes in self._bins.items() for offset in holes}
        assert binned == {offset: _bin_of(size) for offset, size in self._holes.items()}
        assert self._filled == sum(1 << number for number in self._bins)
        assert self._starts is None or self._starts == sorted(self._holes)

    def _find(self, wanted: int) -> int | None:
        number = _bin_of(wanted)
        # Its holes may be smaller than wanted, but a hole of exactly this size is in this bin too.
        same = self._bins.get(number, {})
        if same:
            for _, offset in zip(range(_SCAN), reversed(same), strict=False):
                if self._holes[offset] >= wanted:
                    return offset
        larger = self._filled >> (number + 1)
        if larger:
            number += (larger & -larger).bit_length()
            return next(reversed(self._bins[number]))
        for offset in same:
            if self._holes[offset] >= wanted:
                return offset
        return None

    def _add_hole(self, offset: int, size_bytes: int) -> None:
        self._holes[offset] = size_bytes
        self._hole_ends[offset + size_bytes] = offset
        number = _bin_of(size_bytes)
        self._bins.setdefault(number, {})[offset] = None
        self._filled |= 1 << number
        if self._starts is not None:
            bisect.insort(self._starts, offset)

    def _shrink(self, offset: int, size_bytes: int, at: int = 0) -> None:
        """Cut ``size_bytes`` from the front of a hole, which is at ``_starts[at]``: the usual case."""
        hole_bytes = self._holes[offset]
        rest_bytes = hole_bytes - size_bytes
        number = _bin_of(hole_bytes)
        if not rest_bytes or _bin_of(rest_bytes) != number:
            self._remove_hole(offset)
            if rest_bytes:
                self._add_hole(offset + size_bytes, rest_bytes)
            return
        rest = offset + size_bytes
        del self._holes[offset]
        self._holes[rest] = rest_bytes
        self._hole_ends[rest + rest_bytes] = rest
        holes = self._bins[number]
        del holes[offset]
        holes[rest] = None
        if self._starts is not None:
            self._starts[at] = rest

    def _remove_hole(self, offset: int) -> int:
        size_bytes = self._holes.pop(offset)
        del self._hole_ends[offset + size_bytes]
        number = _bin_of(size_bytes)
        holes = self._bins[number]
        del holes[offset]
        if not holes:
            del self._bins[number]
            self._filled &= ~(1 << number)
        if self._starts is not None:
            del self._starts[bisect.bisect_left(self._starts, offset)]
        return size_bytes

    def __repr__(self) -> str:
        return f"<Allocator {self.allocated_bytes}/{self.size_bytes} bytes, {len(self._holes)} holes>"

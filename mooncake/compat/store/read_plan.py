# SPDX-License-Identifier: Apache-2.0
"""Plans reads of parts of an object: directly to their destination, or through whole chunks.

Part of a chunk cannot be verified, so the store reads whole chunks only. Parts that make up whole chunks
are read directly to their destination; every other chunk that is touched is fetched to a staging area
and the parts are copied from there once it is verified.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypeAlias

Part: TypeAlias = tuple[int, int, int]
"""Triple (offset in the object, local address, length)."""


@dataclasses.dataclass(slots=True)
class ReadPlan:
    """Plan for one object. Every list is in the order of offsets, except for overlapping parts."""

    direct: list[Part] = dataclasses.field(default_factory=list)
    staged: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    """Pairs (offset, length) of the chunks to fetch, consecutively, into the staging area."""
    copies: list[Part] = dataclasses.field(default_factory=list)
    """Triples (offset in this object's staging area, local address, length)."""
    staged_bytes: int = 0

    @property
    def moved_bytes(self) -> int:
        return self.staged_bytes + sum(length for _, _, length in self.direct)

    def split(self, chunk_bytes: int, max_bytes: int) -> list[ReadPlan]:
        """Plans of about ``max_bytes``, at least a chunk, that together read the same."""
        plans, left = [ReadPlan()], max_bytes
        step = max(1, max_bytes // chunk_bytes) * chunk_bytes

        def plan_with_room(length: int, may_begin: bool = True) -> ReadPlan:
            nonlocal left
            if length > left and left < max_bytes and may_begin:
                plans.append(ReadPlan())
                left = max_bytes
            left -= length
            return plans[-1]

        for offset, address, length in self.direct:
            for start in range(0, length, step):
                num_bytes = min(step, length - start)
                # Several parts may make up one chunk, the first of them begins with it.
                plan = plan_with_room(num_bytes, (offset + start) % chunk_bytes == 0)
                plan.direct.append((offset + start, address + start, num_bytes))
        at = 0
        copies = iter(self.copies)
        copy = next(copies, None)
        for offset, length in self.staged:
            plan = plan_with_room(length)
            plan.staged.append((offset, length))
            while copy is not None and copy[0] < at + length:
                plan.copies.append((copy[0] - at + plan.staged_bytes, *copy[1:]))
                copy = next(copies, None)
            plan.staged_bytes += length
            at += length
        return plans


def plan_reads(size_bytes: int, chunk_bytes: int, parts: Sequence[Part]) -> ReadPlan:
    """Plan the read of ``parts``, which lie within the object and may touch, overlap and be empty."""
    plan = ReadPlan()
    edges: dict[int, list[Part]] = {}
    """Parts by the number of their chunk."""
    for offset, address, length in parts:
        end = offset + length
        whole_from = -(-offset // chunk_bytes) * chunk_bytes
        whole_to = end if end == size_bytes else end // chunk_bytes * chunk_bytes
        if whole_from >= whole_to:  # no chunk is covered completely; two may be touched
            whole_from = whole_to = min(end, whole_from)
        if whole_from < whole_to:
            plan.direct.append((whole_from, address + whole_from - offset, whole_to - whole_from))
        for start, stop in ((offset, whole_from), (whole_to, end)):
            if start < stop:
                piece = (start, address + start - offset, stop - start)
                edges.setdefault(start // chunk_bytes, []).append(piece)
    for chunk, pieces in edges.items():
        first = chunk * chunk_bytes
        length = min(chunk_bytes, size_bytes - first)
        if _tile(pieces, first, length):
            plan.direct += sorted(pieces)
            continue
        plan.copies += [(plan.staged_bytes + offset - first, address, n) for offset, address, n in pieces]
        plan.staged.append((first, length))
        plan.staged_bytes += length
    return plan


def chunk_bytes_for(sizes: Sequence[int], largest: int, smallest: int = 4096) -> int:
    """Chunk size equal to an object's buffers, so that each of them can be read by itself.

    Only when all have one size (the last may be smaller) between ``smallest`` and ``largest``;
    else ``largest``.
    """
    if not sizes:
        return largest
    first = sizes[0]
    are_alike = all(size == first for size in sizes[:-1]) and sizes[-1] <= first
    return first if are_alike and smallest <= first <= largest else largest


def _tile(pieces: Sequence[Part], first: int, length: int) -> bool:
    at = first
    for offset, _, num_bytes in sorted(pieces):
        if offset != at:
            return False
        at += num_bytes
    return at == first + length

# SPDX-License-Identifier: Apache-2.0
"""Slices as columns: index of the grant, offset in its object, local address, length.

Batches of thousands of slices are cut at the borders of chunks, filtered and checked here, vectorized where
possible. Segments and transfers belong to ``operations.py``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from mooncake.errors import InvalidArgument
from mooncake.types import ObjectKey

Addresses: TypeAlias = npt.NDArray[np.uint64]


class Sized(Protocol):
    """The fields of a grant that this module needs."""

    @property
    def key(self) -> ObjectKey: ...

    @property
    def size_bytes(self) -> int: ...

    @property
    def chunk_bytes(self) -> int: ...


@dataclasses.dataclass(frozen=True, slots=True)
class SliceColumns:
    """Slices: index of the grant, offset in its object, local address, length."""

    grant: npt.NDArray[np.intp]
    offset: Addresses
    local: Addresses
    length: Addresses

    def where(self, mask: npt.NDArray[np.bool_]) -> SliceColumns:
        """The slices whose flag in ``mask`` is set."""
        if mask.all():
            return self
        return SliceColumns(self.grant[mask], self.offset[mask], self.local[mask], self.length[mask])

    def only(self, flags: list[bool]) -> SliceColumns:
        """The slices of the grants whose flag is set."""
        return self if all(flags) else self.where(np.array(flags, dtype=bool)[self.grant])

    def renumbered(self, numbers: npt.NDArray[np.intp]) -> SliceColumns:
        """The same slices, with grant index i replaced by ``numbers[i]``."""
        return SliceColumns(numbers[self.grant], self.offset, self.local, self.length)

    @staticmethod
    def joined(parts: Sequence[SliceColumns]) -> SliceColumns:
        """All slices of ``parts``, in order."""
        if not parts:
            nothing = np.zeros(0, dtype=np.uint64)
            return SliceColumns(np.zeros(0, dtype=np.intp), nothing, nothing, nothing)
        return SliceColumns(
            np.concatenate([part.grant for part in parts]),
            np.concatenate([part.offset for part in parts]),
            np.concatenate([part.local for part in parts]),
            np.concatenate([part.length for part in parts]),
        )

    def cut_at_chunks(self, grants: Sequence[Sized]) -> SliceColumns:
        """The same bytes in slices that cross no chunk border; empty slices are dropped."""
        chunk = np.array([grant.chunk_bytes for grant in grants], dtype=np.uint64)[self.grant]
        kept = self if self.length.all() else self.where(self.length > 0)
        if kept is not self:
            return kept.cut_at_chunks(grants)
        first = self.offset // chunk
        num_cuts = (self.offset + self.length - np.uint64(1)) // chunk - first + np.uint64(1)
        if not (num_cuts > 1).any():
            return self
        of = np.repeat(np.arange(len(self.grant)), num_cuts.astype(np.intp))
        starts = np.concatenate(([0], np.cumsum(num_cuts.astype(np.intp))[:-1]))
        turn = (np.arange(len(of)) - starts[of]).astype(np.uint64)
        begin = np.maximum((first[of] + turn) * chunk[of], self.offset[of])
        end = np.minimum((first[of] + turn + np.uint64(1)) * chunk[of], self.offset[of] + self.length[of])
        return SliceColumns(self.grant[of], begin, self.local[of] + (begin - self.offset[of]), end - begin)


def distinct(column: npt.NDArray[np.intp]) -> list[int]:
    """Each number once, in order of appearance; for short columns faster than ``np.unique``."""
    return list(dict.fromkeys(column.tolist()))


def columns_of(
    grants: Sequence[Sized],
    object_offsets: npt.ArrayLike,
    local_addresses: npt.ArrayLike,
    lengths: npt.ArrayLike,
) -> SliceColumns:
    """Columns from a caller's arrays, k slices for each grant. Raises InvalidArgument."""
    offset = np.asarray(object_offsets, dtype=np.uint64).reshape(-1)
    local = np.asarray(local_addresses, dtype=np.uint64).reshape(-1)
    length = np.asarray(lengths, dtype=np.uint64).reshape(-1)
    if not offset.size == local.size == length.size or (grants and offset.size % len(grants)):
        sizes = (offset.size, local.size, length.size)
        raise InvalidArgument("columns", sizes, f"equal lengths, a multiple of the {len(grants)} grants")
    num_slices = offset.size // len(grants) if grants else 0
    return SliceColumns(np.repeat(np.arange(len(grants)), num_slices), offset, local, length)


def whole(grants: Sequence[Sized], addresses: Sequence[int]) -> SliceColumns:
    """Slices of all bytes of all objects, cut at the borders of chunks."""
    columns = SliceColumns(
        np.arange(len(grants)),
        np.zeros(len(grants), dtype=np.uint64),
        np.array(addresses, dtype=np.uint64),
        np.array([grant.size_bytes for grant in grants], dtype=np.uint64),
    )
    if all(grant.size_bytes <= grant.chunk_bytes for grant in grants):
        return columns
    return columns.cut_at_chunks(grants)


def check_bounds(grants: Sequence[Sized], columns: SliceColumns) -> None:
    """Raise InvalidArgument if a slice exceeds its object."""
    sizes = np.array([grant.size_bytes for grant in grants], dtype=np.uint64)[columns.grant]
    bad = (columns.offset > sizes) | (columns.length > sizes - np.minimum(columns.offset, sizes))
    if bad.any():
        at = int(np.argmax(bad))
        grant = grants[int(columns.grant[at])]
        value = (int(columns.offset[at]), int(columns.length[at]))
        raise InvalidArgument(f"range of {grant.key!r}", value, f"within its {grant.size_bytes} bytes")


def check_whole_chunks(grants: Sequence[Sized], columns: SliceColumns) -> None:
    """Raise InvalidArgument unless every chunk is read completely or not at all, and no byte of it twice."""
    chunk = np.array([grant.chunk_bytes for grant in grants], dtype=np.uint64)[columns.grant]
    sizes = np.array([grant.size_bytes for grant in grants], dtype=np.uint64)[columns.grant]
    number = columns.offset // chunk
    whole = np.minimum(chunk, sizes - number * chunk)
    partial = np.flatnonzero(columns.length != whole)
    covered: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for at in partial.tolist():
        place = (int(columns.grant[at]), int(number[at]))
        start = int(columns.offset[at] - number[at] * chunk[at])
        covered.setdefault(place, []).append((start, int(columns.length[at])))
    for (index, number_of_chunk), pieces in covered.items():
        grant = grants[index]
        size = min(grant.chunk_bytes, grant.size_bytes - number_of_chunk * grant.chunk_bytes)
        at = 0
        for start, length in sorted(pieces):
            if start != at:
                break
            at += length
        if at != size:
            raise InvalidArgument(
                f"ranges of {grant.key!r}", sorted(pieces), f"whole chunks of {grant.chunk_bytes} bytes"
            )

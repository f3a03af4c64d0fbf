# SPDX-License-Identifier: Apache-2.0
"""Grants of the master to a client: space to write an object's replicas to, or an object under a lease.

A grant records where the bytes are, until when they may be accessed, and which chunks have been written. The
master decides access; ``operations.py`` moves the bytes. What it moves are slices of granted objects, as
columns: index of the grant, offset in its object, local address, length. Batches of thousands of slices are
cut at the borders of chunks, filtered and checked here, vectorized where possible.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from mooncake.errors import InvalidArgument, Refusal
from mooncake.store import messages as m
from mooncake.transfer.batch import Addresses, checked_column
from mooncake.transfer.descriptor import Column
from mooncake.types import ObjectKey

Checksums: TypeAlias = npt.NDArray[np.uint32]


@dataclasses.dataclass(slots=True, eq=False)
class PutTarget:
    """One replica of an object that is being put."""

    segment: Any
    """Handle of the transfer engine, or None when the segment can't be opened."""
    address: int
    """Address of the object's first byte in the peer."""
    replica: m.Replica
    size_bytes: int
    chunk_bytes: int
    checksums: Checksums
    """CRC32C per chunk."""
    is_written: npt.NDArray[np.bool_]
    """Flag per chunk: it is complete. Set together with ``checksums``."""
    failure: Refusal | None = None
    """Why this replica can no longer be written."""
    pieces: dict[int, list[tuple[int, int, int]]] = dataclasses.field(default_factory=dict)
    """Chunk -> (offset in it, length, CRC32C) of its parts that were written since it was written whole, in
    order and without overlaps."""
    missing_bytes: dict[int, int] = dataclasses.field(default_factory=dict)
    """Chunk -> bytes that are in none of its ``pieces``."""
    covered: set[int] = dataclasses.field(default_factory=set)
    """Chunks whose ``pieces`` have all of their bytes, and are to be joined."""

    @property
    def is_complete(self) -> bool:
        return self.failure is None and b"\0" not in self.is_written.tobytes()

    def wrote(self, offset: int, length: int, crc: int) -> None:
        """Record a slice that was written, within one chunk, and its checksum; then ``join`` the slices.

        It replaces what was written there before. Where that was longer, the checksum of its remaining bytes
        is unknown: the chunk is incomplete again, until all of its bytes were written again.
        """
        chunk, start = divmod(offset, self.chunk_bytes)
        size_bytes = self._size_of(chunk)
        if length == size_bytes:
            self.pieces.pop(chunk, None)
            self.missing_bytes.pop(chunk, None)
            self.covered.discard(chunk)
            self.checksums[chunk], self.is_written[chunk] = crc, True
            return
        pieces = self.pieces.setdefault(chunk, [])
        first, end = bisect.bisect_left(pieces, (start,)), bisect.bisect_left(pieces, (start + length,))
        if first and sum(pieces[first - 1][:2]) > start:
            first -= 1
        missing = self.missing_bytes.get(chunk, size_bytes) - length
        missing += sum(length for _, length, _ in pieces[first:end])
        pieces[first:end] = [(start, length, crc)]
        self.missing_bytes[chunk] = missing
        self.is_written[chunk] = False
        if missing:
            self.covered.discard(chunk)
        else:
            self.covered.add(chunk)

    def join(self, combine: Callable[[int, int, int], int]) -> None:
        """Complete the chunks that were written in parts; once for many slices, because each part counts."""
        for chunk in sorted(self.covered):
            whole = tiled_checksum(self.pieces[chunk], self._size_of(chunk), combine)
            assert whole is not None
            self.checksums[chunk], self.is_written[chunk] = whole, True
        self.covered.clear()

    def _size_of(self, chunk: int) -> int:
        return min(self.chunk_bytes, self.size_bytes - chunk * self.chunk_bytes)


@dataclasses.dataclass(slots=True, eq=False)
class PutGrant:
    """Space in one or more segments, to be written before ``expires_at`` (this process's monotonic clock).

    Code that writes the bytes itself instead of calling ``write_ranges`` uses the first target that can be
    written, fills in its ``checksums`` and ``is_written``, and thereby gives up the other targets.
    """

    key: ObjectKey
    size_bytes: int
    chunk_bytes: int
    expires_at: float
    object_id: int
    targets: list[PutTarget]
    failure: Refusal | None = None
    """Why this put can no longer succeed."""

    @property
    def lead(self) -> PutTarget:
        """First target that can be written."""
        for target in self.targets:
            if target.failure is None:
                return target
        return self.targets[0]

    @property
    def segment(self) -> Any:
        return self.lead.segment

    @property
    def address(self) -> int:
        return self.lead.address

    @property
    def replica(self) -> m.Replica:
        return self.lead.replica

    @property
    def checksums(self) -> Checksums:
        return self.lead.checksums

    @property
    def is_written(self) -> npt.NDArray[np.bool_]:
        return self.lead.is_written

    def give_up(self, target: PutTarget, failure: Refusal) -> None:
        """Continue without that replica; the put fails when no replica is left."""
        target.failure = target.failure or failure
        if self.failure is None and all(one.failure is not None for one in self.targets):
            self.failure = self.targets[0].failure

    def settle(self) -> list[str]:
        """Decide the outcome after the last write; returns the segments that do not hold the object."""
        complete = [one for one in self.targets if one.is_complete]
        if self.failure is None and not complete:
            missing = int(self.is_written.size - self.is_written.sum())
            what = "chunks were not written, or only in part since they were complete"
            self.failure = Refusal("incomplete", f"{self.key!r}: {missing} {what}")
        if len(complete) == len(self.targets) == 1:
            return []
        # Replicas differ when the source changed between two transfers. The announced one counts.
        sums = [one.checksums.tobytes() for one in complete]
        good = [one for one, each in zip(complete, sums, strict=True) if each == sums[0]]
        left_out = [one for one in self.targets if one not in good]
        for one in left_out:
            one.failure = one.failure or Refusal("incomplete", "not written like the others")
        return [one.replica.segment for one in left_out]


@dataclasses.dataclass(slots=True, eq=False)
class ReadGrant:
    """A readable object under a lease that ends at ``expires_at`` (this process's monotonic clock)."""

    key: ObjectKey
    size_bytes: int
    chunk_bytes: int
    segment: Any
    address: int
    checksums: Checksums
    expires_at: float
    object_id: int
    replica: m.Replica
    others: list[tuple[m.Replica, Any]]
    """(replica, transfer handle) of the replicas to try when this one fails, nearest first."""

    def turn_to_next(self) -> bool:
        """Switch to the next replica; False: there is none."""
        if not self.others:
            return False
        self.replica, self.segment = self.others.pop(0)
        self.address = self.replica.address
        return True

    @property
    def places(self) -> list[tuple[m.Replica, Any]]:
        """(replica, transfer handle) of the replica in use and of those to try next."""
        return [(self.replica, self.segment), *self.others]

    def use(self, places: list[tuple[m.Replica, Any]]) -> None:
        """Read from the first of ``places``, and try the others after it."""
        (self.replica, self.segment), *self.others = places
        self.address = self.replica.address

    def each(self) -> list[ReadGrant]:
        """One grant per replica."""
        places = self.places
        return [
            dataclasses.replace(self, replica=replica, segment=handle, address=replica.address, others=[])
            for replica, handle in places
        ]


Grant: TypeAlias = PutGrant | ReadGrant
Place: TypeAlias = PutTarget | ReadGrant
"""Remote side of a slice: where its bytes are moved to or from."""


def put_grant(
    key: ObjectKey,
    size_bytes: int,
    chunk_bytes: int,
    reserved: m.Reserved,
    expires_at: float,
    handles: dict[str, Any],
) -> PutGrant:
    """Grant for the reservation ``reserved``; targets whose segment has no handle are given up."""
    num_chunks = -(-size_bytes // chunk_bytes)
    targets = [
        PutTarget(
            segment=handles.get(replica.segment),
            address=replica.address,
            replica=replica,
            size_bytes=size_bytes,
            chunk_bytes=chunk_bytes,
            checksums=np.zeros(num_chunks, dtype="<u4"),
            is_written=np.zeros(num_chunks, dtype=np.bool_),
        )
        for replica in reserved.replicas
    ]
    grant = PutGrant(key, size_bytes, chunk_bytes, expires_at, reserved.object_id, targets)
    for target in targets:
        if target.segment is None:
            grant.give_up(target, peer_lost(target.replica, "it can't be opened"))
    return grant


def read_grant(
    key: ObjectKey,
    stored: m.Stored,
    expires_at: float,
    handles: dict[str, Any],
    distance: Callable[[m.Replica], Any],
) -> ReadGrant | None:
    """Grant on the reachable replicas, nearest first; None: no replica can be reached."""
    places = [(one, handle) for one in stored.replicas if (handle := handles.get(one.segment)) is not None]
    if not places:
        return None
    if len(places) > 1:
        places.sort(key=lambda place: distance(place[0]))
    replica, handle = places[0]
    return ReadGrant(
        key=key,
        size_bytes=stored.size_bytes,
        chunk_bytes=stored.chunk_bytes,
        segment=handle,
        address=replica.address,
        checksums=np.frombuffer(stored.checksums, dtype="<u4"),
        expires_at=expires_at,
        object_id=stored.object_id,
        replica=replica,
        others=places[1:],
    )


def peer_lost(replica: m.Replica, reason: str) -> Refusal:
    """Refusal for a replica whose node can't be reached."""
    return Refusal("peer_lost", f"the node of segment {replica.segment!r} can't be reached: {reason}")


class Sized(Protocol):
    """The fields of either kind of grant that its slices depend on."""

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
    offset: Column
    local: Column
    length: Column

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
    grants: Sequence[Sized], object_offsets: Addresses, local_addresses: Addresses, lengths: Addresses
) -> SliceColumns:
    """Columns from a caller's arrays, k slices for each grant. Raises InvalidArgument."""
    offset = checked_column(object_offsets).reshape(-1)
    local = checked_column(local_addresses).reshape(-1)
    length = checked_column(lengths).reshape(-1)
    if not offset.size == local.size == length.size or (grants and offset.size % len(grants)):
        sizes = (offset.size, local.size, length.size)
        raise InvalidArgument("columns", sizes, f"equal lengths, a multiple of the {len(grants)} grants")
    num_slices = offset.size // len(grants) if grants else 0
    return SliceColumns(np.repeat(np.arange(len(grants)), num_slices), offset, local, length)


def whole_objects(grants: Sequence[Sized], addresses: Sequence[int]) -> SliceColumns:
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


class OneSlice(msgspec.Struct, frozen=True, eq=False):
    """A transfer of one slice, as ``Slices`` of the operations without arrays, which take longer to make."""

    handle: Any
    local_address: int
    remote_address: int
    length: int
    is_checked: bool = True
    has_others: bool = False

    @property
    def local(self) -> Column:
        return np.array([self.local_address], dtype=np.uint64)

    @property
    def remote(self) -> Column:
        return np.array([self.remote_address], dtype=np.uint64)

    @property
    def lengths(self) -> Column:
        return np.array([self.length], dtype=np.uint64)


@dataclasses.dataclass
class ReadOutcome:
    """Indices of grants whose bytes did not arrive, or not as the writer announced them."""

    failed: list[int] = dataclasses.field(default_factory=list)
    """The transfer failed while the lease lasted."""
    mismatched: list[int] = dataclasses.field(default_factory=list)
    late: list[int] = dataclasses.field(default_factory=list)
    """The lease ended first."""
    unfinished: set[int] = dataclasses.field(default_factory=set)
    """Those of ``late`` whose bytes have not come at all."""
    now: float = 0.0


def spread(
    grants: Sequence[PutGrant], columns: SliceColumns
) -> tuple[list[PutTarget], list[PutGrant], SliceColumns]:
    """Slices for all targets that can still be written: (targets, grant of each target, slices)."""
    num_ranks = max((len(grant.targets) for grant in grants), default=0)
    if num_ranks == 1:
        flags = [grant.failure is None for grant in grants]
        return [grant.targets[0] for grant in grants], list(grants), columns.only(flags)
    places: list[PutTarget] = []
    owners: list[PutGrant] = []
    parts: list[SliceColumns] = []
    for rank in range(num_ranks):
        numbers = np.full(len(grants), -1)
        for index, grant in enumerate(grants):
            if grant.failure is None and rank < len(grant.targets) and grant.targets[rank].failure is None:
                numbers[index] = len(places)
                places.append(grant.targets[rank])
                owners.append(grant)
        part = columns.where(numbers[columns.grant] >= 0)
        parts.append(part.renumbered(numbers))
    return places, owners, SliceColumns.joined(parts)


def tiled_checksum(
    pieces: list[tuple[int, int, int]], whole: int, combine: Callable[[int, int, int], int]
) -> int | None:
    """The checksum of a chunk of ``whole`` bytes that ``pieces`` (start, length, checksum) cover exactly, or
    None."""
    pieces.sort()
    at, crc = 0, 0
    for start, length, piece_crc in pieces:
        if start != at:
            return None
        crc = piece_crc if at == 0 else combine(crc, piece_crc, length)
        at += length
    return crc if at == whole else None


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

# SPDX-License-Identifier: Apache-2.0
"""Grants of the master to a client: space to write an object's replicas to, or an object under a lease.

A grant records where the bytes are, until when they may be accessed, and which chunks have been written. The
master decides access; ``operations.py`` moves the bytes.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from mooncake.errors import Refusal
from mooncake.store import messages as m
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
    """Chunk -> (offset in it, length, CRC32C) of the written parts of a chunk that isn't complete yet."""

    @property
    def is_complete(self) -> bool:
        return self.failure is None and b"\0" not in self.is_written.tobytes()


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
            self.failure = Refusal("incomplete", f"{missing} chunks of {self.key!r} were not written")
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

    def each(self) -> list[ReadGrant]:
        """One grant per replica."""
        places = [(self.replica, self.segment), *self.others]
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


def peer_lost(replica: m.Replica, reason: str) -> Refusal:
    """Refusal for a replica whose node can't be reached."""
    return Refusal("peer_lost", f"the node of segment {replica.segment!r} can't be reached: {reason}")

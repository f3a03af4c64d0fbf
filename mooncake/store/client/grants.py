"""What a client holds of the master: space to be written, in each of its replicas, or an object to be read.

A grant says where the bytes are and until when they may be touched, and keeps account of what has
been written. Who may touch what, the master decided; how bytes move, ``operations.py`` does.
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
    """Transfer's handle, or None when it can't be opened."""
    address: int
    """Of the object's first byte, absolute in the peer."""
    replica: m.Replica
    size_bytes: int
    chunk_bytes: int
    checksums: Checksums
    """CRC32C per chunk."""
    is_written: npt.NDArray[np.bool_]
    """Which chunks are complete; set together with ``checksums``."""
    failure: Refusal | None = None
    """Why this replica can't be written any more."""
    pieces: dict[int, list[tuple[int, int, int]]] = dataclasses.field(default_factory=dict)
    """Chunk -> (offset in it, length, CRC32C) of parts of a chunk that isn't complete yet."""

    @property
    def is_complete(self) -> bool:
        return self.failure is None and b"\0" not in self.is_written.tobytes()


@dataclasses.dataclass(slots=True, eq=False)
class PutGrant:
    """Space in one or more segments, to be written before ``expires_at`` (this process's monotonic clock).

    Who writes by itself instead of with ``write_ranges`` sees the first target that can be written,
    fills in its ``checksums`` and ``is_written``, and so gives up the others.
    """

    key: ObjectKey
    size_bytes: int
    chunk_bytes: int
    expires_at: float
    object_id: int
    targets: list[PutTarget]
    failure: Refusal | None = None
    """Why this put can't succeed any more."""

    @property
    def lead(self) -> PutTarget:
        """The first target that can be written."""
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
        """Go on without that replica, while there are others."""
        target.failure = target.failure or failure
        if self.failure is None and all(one.failure is not None for one in self.targets):
            self.failure = self.targets[0].failure

    def settle(self) -> list[str]:
        """All that could be written is: decide what the put comes to. The segments without the object."""
        complete = [one for one in self.targets if one.is_complete]
        if self.failure is None and not complete:
            missing = int(self.is_written.size - self.is_written.sum())
            self.failure = Refusal("incomplete", f"{missing} chunks of {self.key!r} were not written")
        if len(complete) == len(self.targets) == 1:
            return []
        # Replicas that differ: the source changed between two transfers. The announced one counts.
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
    """(replica, transfer's handle) of what to try when this one fails, the nearest first."""

    def turn_to_next(self) -> bool:
        """Read another replica from now on; False: there is none."""
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
"""Where the bytes of a slice are moved to or from."""


def put_grant(
    key: ObjectKey,
    size_bytes: int,
    chunk_bytes: int,
    reserved: m.Reserved,
    expires_at: float,
    handles: dict[str, Any],
) -> PutGrant:
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
    return Refusal("peer_lost", f"the node of segment {replica.segment!r} can't be reached: {reason}")

# SPDX-License-Identifier: Apache-2.0
"""Pool of preallocated space of a client, and how much more it requests.

A piece stays in the pool until a put of its size takes it. A piece has one user at a time: it is taken and
returned whole, and both are safe from several threads. A piece that may have been used, or to which a write
may still be in progress, is never returned; its reservation expires.

Pieces for durable objects are on nodes with an SSD and are kept apart from the others.

The amount requested adapts to use, per size: nothing with the first put of a size, then twice as much
whenever the pool runs low, and less again when pieces were not used in time. A client that rarely puts
therefore holds no space.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from mooncake.store import messages as m
from mooncake.store.allocator import ALIGNMENT_BYTES
from mooncake.store.master.objects import DEFAULT_POLICY

MAX_SMALL_BYTES = 64 << 10
"""Largest object that is written before the master is asked whether its key is free, over a network."""
MAX_DIRECT_BYTES = 1 << 20
"""The same where this process copies the bytes itself: a MiB takes it less time than a request."""
FIRST_GOAL = 2
MAX_PIECES = 32
MAX_BYTES = 2 << 20
"""Limit of the pieces of one size."""
REFUSED_PUTS = 16
"""Number of puts after which space is requested again when the master granted none."""
USE_SHARE = 0.75
"""Share of the reservation time in which a write may begin; a later one might not end in time."""


def may_be_preallocated(size_bytes: int, policy: m.PutPolicy) -> bool:
    """Whether such a put may use preallocated space."""
    if policy is DEFAULT_POLICY:
        return 0 < size_bytes <= MAX_DIRECT_BYTES
    is_anywhere = not policy.preferred_segments and not policy.is_same_host
    return policy.num_replicas == 1 and is_anywhere and 0 < size_bytes <= MAX_DIRECT_BYTES


class PreallocatedPiece(NamedTuple):
    """One reserved range of memory, not yet assigned to an object."""

    advance_id: int
    number: int
    replica: m.Replica
    size_bytes: int
    write_until: float
    """Time after which no write may begin."""
    expires_at: float
    is_durable: bool = False
    """Whether it is for durable objects."""


class PreallocatedPieces:
    """Pool of the pieces of one client, by size."""

    def __init__(self) -> None:
        self._pieces: dict[tuple[int, bool], deque[PreallocatedPiece]] = {}
        """Size and whether for durable objects -> such pieces, oldest first."""
        self._goals: dict[tuple[int, bool], int] = {}
        """The same -> number of pieces requested last; negative: number of puts until the next request."""

    def __len__(self) -> int:
        return sum(map(len, self._pieces.values()))

    def take(self, size_bytes: int, is_durable: bool = False) -> PreallocatedPiece | None:
        """A piece for an object of that size, or None. It may have expired: writing to it checks that."""
        pieces = self._pieces.get((piece_bytes(size_bytes), is_durable))
        try:
            return pieces.popleft() if pieces else None
        except IndexError:  # another thread took the last one
            return None

    def give_back(self, piece: PreallocatedPiece) -> None:
        """Return a piece that was not used and to which no write is in progress."""
        self._pieces.setdefault((piece.size_bytes, piece.is_durable), deque()).appendleft(piece)

    def wanted(self, size_bytes: int, is_durable: bool = False) -> int:
        """Number of further pieces to request with the put of an object of that size; call once per put."""
        size_bytes = piece_bytes(size_bytes)
        kind = size_bytes, is_durable
        goal = self._goals.get(kind, 0)
        if goal < 0:
            self._goals[kind] = goal + 1
            return 0
        if goal == 0:
            self._goals[kind] = FIRST_GOAL
            return 0
        if len(self._pieces.get(kind, ())) > goal // 4:
            return 0
        goal = self._goals[kind] = min(2 * goal, MAX_PIECES, max(1, MAX_BYTES // size_bytes))
        return goal

    def add(
        self,
        advance: m.PreallocatedSpace | None,
        size_bytes: int,
        asked_at: float,
        is_durable: bool = False,
    ) -> None:
        """Add the space granted (None: none) for objects of ``size_bytes``, requested at ``asked_at``."""
        if advance is None or advance.is_durable != is_durable:
            self._goals[piece_bytes(size_bytes), is_durable] = -REFUSED_PUTS
            return
        write_until, expires_at = asked_at + USE_SHARE * advance.put_s, asked_at + advance.put_s
        self._pieces.setdefault((advance.size_bytes, is_durable), deque()).extend(
            PreallocatedPiece(
                advance.advance_id,
                number,
                replica,
                advance.size_bytes,
                write_until,
                expires_at,
                is_durable,
            )
            for number, replica in enumerate(advance.replicas)
        )

    def drop_late(self, now: float) -> None:
        """Drop pieces that may no longer be written, and request fewer of their sizes."""
        for kind in list(self._pieces):
            if self._drop(kind, lambda piece: piece.write_until <= now):
                self._goals[kind] = max(0, self._goals.get(kind, 0)) // 4

    def drop_on(self, segment: str) -> None:
        """Drop the pieces on a segment whose node can't be reached."""
        for kind in list(self._pieces):
            self._drop(kind, lambda piece: piece.replica.segment == segment)

    def _drop(self, kind: tuple[int, bool], is_useless: Callable[[PreallocatedPiece], bool]) -> int:
        """Drop useless pieces of one kind, one at a time so that threads share none; returns how many."""
        num_dropped = 0
        pieces = self._pieces.get(kind, deque())
        for _ in range(len(pieces)):
            try:
                piece = pieces.popleft()
            except IndexError:  # other threads took the rest
                break
            if is_useless(piece):
                num_dropped += 1
            else:
                pieces.append(piece)
        return num_dropped

    def clear(self) -> None:
        """Drop all pieces: the master that granted them no longer leads."""
        self._pieces = {}


def piece_bytes(size_bytes: int) -> int:
    """Size of the pieces used for such objects: slightly larger, so that few different sizes suffice."""
    unit = max(ALIGNMENT_BYTES, 1 << max(0, (size_bytes - 1).bit_length() - 4))
    return size_bytes + -size_bytes % unit

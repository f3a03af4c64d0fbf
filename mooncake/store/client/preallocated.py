"""What a client has of space given in advance, and how much more it asks for.

A piece lies here until a put of its size takes it. Nobody else may have it then, so pieces are taken and
given back whole, and safely from several threads. A piece that may have been used, or in which a write may
still be under way, never comes back: its promise runs out by itself.

How much is asked for follows what is used, per size: nothing for the first put of a size, then twice as much
whenever the stock runs low, and less again when pieces were not used in time. So who puts seldom holds
nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from mooncake.store import messages as m
from mooncake.store.allocator import ALIGNMENT_BYTES

MAX_SMALL_BYTES = 64 << 10
"""Larger puts spend their time on bytes, not on questions."""
FIRST_GOAL = 2
MAX_PIECES = 32
MAX_BYTES = 512 << 10
"""Of pieces of one size."""
REFUSED_PUTS = 16
"""After so many puts space is asked for again, when none was given."""
USE_SHARE = 0.75
"""Of the time that is promised; a write that begins later might not end in it."""


class PreallocatedPiece(NamedTuple):
    advance_id: int
    number: int
    replica: m.Replica
    size_bytes: int
    write_until: float
    """Begin no write later than this."""
    expires_at: float


class PreallocatedPieces:
    """One client's."""

    def __init__(self) -> None:
        self._pieces: dict[int, deque[PreallocatedPiece]] = {}
        """By size, the oldest first."""
        self._goals: dict[int, int] = {}
        """By size, how many were asked for last; negative: so many puts until any are."""

    def __len__(self) -> int:
        return sum(map(len, self._pieces.values()))

    def take(self, size_bytes: int) -> PreallocatedPiece | None:
        """A piece for an object of that size. Whether it is still in time, the attempt to write it shows."""
        pieces = self._pieces.get(piece_bytes(size_bytes))
        try:
            return pieces.popleft() if pieces else None
        except IndexError:  # another thread took the last one
            return None

    def give_back(self, piece: PreallocatedPiece) -> None:
        """It was not used, and nothing is being written there."""
        self._pieces.setdefault(piece.size_bytes, deque()).appendleft(piece)

    def wanted(self, size_bytes: int) -> int:
        """How many more pieces to ask for with the put of an object of that size; call once for each."""
        size_bytes = piece_bytes(size_bytes)
        goal = self._goals.get(size_bytes, 0)
        if goal < 0:
            self._goals[size_bytes] = goal + 1
            return 0
        if goal == 0:
            self._goals[size_bytes] = FIRST_GOAL
            return 0
        if len(self._pieces.get(size_bytes, ())) > goal // 4:
            return 0
        goal = self._goals[size_bytes] = min(2 * goal, MAX_PIECES, max(1, MAX_BYTES // size_bytes))
        return goal

    def add(self, advance: m.PreallocatedSpace | None, size_bytes: int, asked_at: float) -> None:
        """What was wanted for objects of ``size_bytes``, or that there is none; asked for at ``asked_at``."""
        if advance is None:
            self._goals[piece_bytes(size_bytes)] = -REFUSED_PUTS
            return
        write_until, expires_at = asked_at + USE_SHARE * advance.put_s, asked_at + advance.put_s
        self._pieces.setdefault(advance.size_bytes, deque()).extend(
            PreallocatedPiece(
                advance.advance_id, number, replica, advance.size_bytes, write_until, expires_at
            )
            for number, replica in enumerate(advance.replicas)
        )

    def drop_late(self, now: float) -> None:
        """Forget what may not be written any more, and want less of it."""
        for size_bytes in list(self._pieces):
            if self._drop(size_bytes, lambda piece: piece.write_until <= now):
                self._goals[size_bytes] = max(0, self._goals.get(size_bytes, 0)) // 4

    def drop_on(self, segment: str) -> None:
        """That node can't be reached."""
        for size_bytes in list(self._pieces):
            self._drop(size_bytes, lambda piece: piece.replica.segment == segment)

    def _drop(self, size_bytes: int, is_useless: Callable[[PreallocatedPiece], bool]) -> int:
        """How many were. One by one through everybody's hands, so that no piece is in two at a time."""
        num_dropped = 0
        pieces = self._pieces.get(size_bytes, deque())
        for _ in range(len(pieces)):
            try:
                piece = pieces.popleft()
            except IndexError:  # others took the rest
                break
            if is_useless(piece):
                num_dropped += 1
            else:
                pieces.append(piece)
        return num_dropped

    def clear(self) -> None:
        """The master that gave it is no more."""
        self._pieces = {}


def piece_bytes(size_bytes: int) -> int:
    """The size of the pieces that such objects are put in: little larger, so that few sizes do for all."""
    unit = max(ALIGNMENT_BYTES, 1 << max(0, (size_bytes - 1).bit_length() - 4))
    return size_bytes + -size_bytes % unit

# SPDX-License-Identifier: Apache-2.0
"""One batch's state machine: slices are assigned to paths, a failed path is replaced by the next.

The batch knows only names of paths and which slices each can carry; the slices themselves are the rows of
``TransferColumns``, the form that the native side takes. It moves nothing and reads no
clock: ``PartDone`` and ``now`` go in, ``Carry`` and ``Finish`` come out. A batch finishes when none
of its parts is under way, failed or not, because only then is its memory unused. Moving a
slice twice is harmless (the same bytes to the same place), so a retry repeats the whole part.

A big batch to a peer with several rails is split into pieces, with a few at a time on each rail, so that
a fast rail takes more of them and a failed rail costs no more than its pieces::

    waiting  p9 p8 p7 p6 ──▶ rail A  p5 p4     the next goes where it is predicted to arrive first
                         ──▶ rail B  p3        (``rails.py`` predicts; a slow rail gets none at the end)
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from mooncake.errors import InvalidArgument
from mooncake.machine import Wake
from mooncake.transfer.descriptor import Column, scheme_of
from mooncake.transfer.rails import Rails

Indices = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Addresses = Sequence[int] | npt.NDArray[np.unsignedinteger[Any]] | npt.NDArray[np.signedinteger[Any]]
"""Numbers, one per slice."""

OK = 0
"""The status of success. Others are opaque here except ``RETRIED_STATUSES`` and ``TIMED_OUT``."""

RETRIED_STATUSES = frozenset({1, 6})
"""PEER_LOST and PROTOCOL_ERROR: the path failed, not the request."""

TIMED_OUT = 4
"""Before the batch's own deadline, this is the path's failure, too."""

STATUS_REASONS = {1: "peer lost", TIMED_OUT: "too slow", 6: "protocol error"}
"""Text for each status of a failed path."""

PARTS_PER_RAIL = 2
"""Pieces of one batch: one on the wire and one to follow it."""

PIECES_PER_RAIL = 8
MIN_PIECE_BYTES, MAX_PIECE_BYTES = 1 << 20, 16 << 20
"""Smaller pieces cost more calls; bigger ones cost more to repeat and make a longer tail."""


@dataclass(frozen=True, slots=True)
class StartBatch:
    """Event: the batch may begin."""


@dataclass(frozen=True, slots=True)
class PartDone:
    """Event: the part that ``Carry`` started has ended."""

    part: int
    status: int
    failed_slice: int = -1
    "Index within the part, or -1."
    num_bytes: int = 0
    checksums: npt.NDArray[np.uint32] | None = None
    reason: str = ""
    "Text for log and error, where the status alone does not explain the failure."


@dataclass(frozen=True, slots=True)
class Carry:
    """Effect: move these slices over this path."""

    part: int
    path: str
    slices: Indices | None
    "Rows of the batch's columns; None means all of them."
    deadline: float
    "The part's deadline: earlier than the batch's when another path could be tried afterwards."


@dataclass(frozen=True, slots=True)
class Finish:
    """Effect: the batch has ended with this result."""

    status: int
    failed_slice: int
    num_bytes: int
    checksums: npt.NDArray[np.uint32] | None
    reason: str = ""


@dataclass(slots=True)
class _Piece:
    """Slices that are moved together."""

    slices: Indices | None
    num_bytes: int
    tried: list[str] = field(default_factory=list)
    too_slow: list[str] = field(default_factory=list)
    "Those of ``tried`` that ran into the part's deadline, so that another path could be tried."
    cause: tuple[int, int, str] | None = None
    "Status, failed row and reason of the last attempt."


@dataclass(slots=True)
class _Part:
    path: str
    piece: _Piece
    sent_at: float
    deadline: float


class Batch:
    """One batch.

    Args:
        num_slices: rows of the columns.
        paths: per path, in order of preference, a flag for each slice it can carry; None means all.
        deadline: the instant after which a failed path is not replaced.
        no_path: status when a slice has no path at all.
        lengths: bytes of each slice; needed with ``rails`` only.
        rails: measurements of the paths; without them, the first path that can carry a slice is used.
        piece_bytes: approximate size of the pieces that the batch is split into; 0 means one piece.
        ranks: per path, its distance from the memory that is moved.
    """

    def __init__(
        self,
        num_slices: int,
        paths: Mapping[str, Flags | None],
        deadline: float,
        no_path: int,
        has_checksums: bool = False,
        *,
        lengths: Column | None = None,
        rails: Rails | None = None,
        piece_bytes: int = 0,
        ranks: Mapping[str, int] | None = None,
    ) -> None:
        self._num_slices = num_slices
        self._paths = dict(paths)
        self._tiers = _tiers_of(paths)
        self._deadline = deadline
        self._no_path = no_path
        self._lengths = lengths
        self._rails = rails
        self._ranks = ranks
        self.is_sprayed = piece_bytes > 0
        "True when the batch is split into pieces that are under way at the same time."
        self._waiting = deque(self._pieces_of(piece_bytes))
        self._under_way: dict[int, _Part] = {}
        self._next_part = 0
        self._status = OK
        self._failed_slice = -1
        self._reason = ""
        self.num_bytes = 0
        "Bytes that have arrived so far."
        self._checksums = np.zeros(num_slices, dtype=np.uint32) if has_checksums else None
        self._is_finished = False
        self._story: deque[str] = deque(maxlen=64)

    def handle(self, event: StartBatch | PartDone | Wake, now: float) -> list[Carry | Finish]:
        if isinstance(event, PartDone):
            self._ended(event, now)
        if self._status != OK:
            self._waiting.clear()
        effects: list[Carry | Finish] = [*self._deal(now)]
        if not self._under_way and not self._is_finished:
            self._is_finished = True
            failed = self._status != OK
            sums = None if failed else self._checksums
            num_bytes = 0 if failed else self.num_bytes
            effects.append(Finish(self._status, self._failed_slice, num_bytes, sums, self._reason))
        return effects

    def deadline(self) -> float | None:
        """None, because each part carries its own deadline."""
        return None

    def check(self) -> None:
        assert not (self._is_finished and (self._under_way or self._waiting))
        assert self._under_way or not self._waiting or not self._next_part, "pieces wait, no part runs"
        parts = self._under_way.values()
        assert all(part.path not in part.piece.tried for part in parts)
        pieces = [*(part.piece for part in parts), *self._waiting]
        rows = [row for piece in pieces for row in self._rows(piece.slices)]
        assert len(rows) == len(dict.fromkeys(rows)), "a slice is under way twice"
        if self._rails is not None:
            self._rails.check()

    def story(self, key: str = "") -> list[str]:
        """The latest parts of this batch; ``key`` restricts them to one path."""
        return [line for line in self._story if key in line]

    def take_path_events(self) -> list[tuple[str, str, str]]:
        """Events of paths that were not logged yet: (event, path, reason)."""
        if self._rails is None or not self._rails.path_events:
            return []
        path_events, self._rails.path_events = self._rails.path_events, []
        return path_events

    # Completed parts

    def _ended(self, event: PartDone, now: float) -> None:
        part = self._under_way.pop(event.part)
        piece = part.piece
        self._record(f"{part.path} ended with status {event.status}")
        is_the_path = event.status in RETRIED_STATUSES or (event.status == TIMED_OUT and now < self._deadline)
        if self._rails is not None:
            if event.status == OK:
                self._rails.arrived(part.path, piece.num_bytes, part.sent_at, now)
            elif is_the_path:
                self._rails.failed(
                    part.path, piece.num_bytes, part.sent_at, now, STATUS_REASONS[event.status]
                )
            else:
                self._rails.dropped(part.path, piece.num_bytes)
        if event.status == OK:
            self._take(piece, event)
        elif is_the_path and self._status == OK and now < self._deadline:
            piece.tried.append(part.path)
            if event.status == TIMED_OUT and part.deadline < self._deadline:
                piece.too_slow.append(part.path)
            piece.cause = (event.status, self._row(piece.slices, event.failed_slice), event.reason)
            self._waiting.appendleft(piece)
        else:
            self._fail(event.status, self._row(piece.slices, event.failed_slice), event.reason)

    def _take(self, piece: _Piece, event: PartDone) -> None:
        self.num_bytes += event.num_bytes
        if self._checksums is not None and event.checksums is not None:
            self._checksums[slice(None) if piece.slices is None else piece.slices] = event.checksums

    def _fail(self, status: int, failed_slice: int, reason: str) -> None:
        if self._status == OK:
            self._status, self._failed_slice, self._reason = status, failed_slice, reason

    # Parts to start

    def _deal(self, now: float) -> list[Carry]:
        """Send waiting pieces while there is room; a piece that no path can carry ends the batch."""
        effects: list[Carry] = []
        held: list[_Piece] = []
        while self._waiting and self._status == OK:
            piece = self._waiting.popleft()
            sent = self._place(piece, now)
            if sent is not None:
                effects += sent
                continue
            held.append(piece)
            if not piece.tried:
                break  # the pieces behind it would find no room either
        self._waiting.extendleft(reversed(held))
        if self._status != OK:
            self._waiting.clear()
        return effects

    def _place(self, piece: _Piece, now: float) -> list[Carry] | None:
        """Send every slice over the best path that can carry it and has not failed it before.

        Return None when there is a path but no room on it now.
        """
        effects: list[Carry] = []
        if not self._num_slices:
            return effects
        order = self._order(piece, now)
        if order is None:
            return None
        left = piece.slices
        for path in order:
            if left is not None and not len(left):
                break
            able = self._paths[path]
            rows = np.arange(self._num_slices) if left is None and able is not None else left
            if able is None or rows is None:
                mine, left = left, np.empty(0, dtype=np.int64)
            else:
                mine, left = rows[able[rows]], rows[~able[rows]]
                if len(mine) == self._num_slices:
                    mine = None
            if mine is None or len(mine):
                effects.append(self._send(path, mine, piece, now))
        if left is None or len(left):
            self._fail(*(piece.cause or (self._no_path, self._row(left, 0), "")))
        return effects

    def _order(self, piece: _Piece, now: float) -> list[str] | None:
        """Paths to try for a piece, best first; None when the best one has no room for it yet."""
        untried = [[path for path in tier if path not in piece.tried] for tier in self._tiers]
        if piece.too_slow and not any(untried):
            again = piece.too_slow.pop(0)  # no other path is left: it gets all the remaining time
            piece.tried.remove(again)
            untried = [[again]]
        if self._rails is None:
            return [path for tier in untried for path in tier]
        chosen: list[str] = []
        masked: list[str] = []
        for tier in untried:
            must_fit = self.is_sprayed and not chosen
            usable = self._with_room(tier) if must_fit else tier
            path = self._rails.choose(usable, piece.num_bytes, now, self._ranks)
            if path is not None:
                if must_fit and not self._is_worth_it(path, tier, piece):
                    return None
                chosen.append(path)
            elif must_fit and self._rails.in_order(tier):
                return None
            elif tier:
                masked.append(self._rails.first_to_unmask(tier))
        if not chosen and self.is_sprayed and self._under_way:
            return None  # one part at a time when all rails are masked
        return chosen + masked

    def _with_room(self, paths: Sequence[str]) -> list[str]:
        parts = [part.path for part in self._under_way.values()]
        return [path for path in paths if parts.count(path) < PARTS_PER_RAIL]

    def _is_worth_it(self, path: str, tier: Sequence[str], piece: _Piece) -> bool:
        """Return False when the other rails would carry all the rest before this one ended its piece."""
        assert self._rails is not None
        others = [other for other in self._rails.in_order(tier) if other != path]
        if not self._under_way or not others:
            return True
        rest = piece.num_bytes + sum(waiting.num_bytes for waiting in self._waiting)
        return self._rails.predicted_s(path, piece.num_bytes) <= self._rails.together_s(others, rest)

    def _send(self, path: str, slices: Indices | None, piece: _Piece, now: float) -> Carry:
        number = self._next_part
        self._next_part += 1
        mine = _Piece(slices, self._bytes_of(slices), [*piece.tried], [*piece.too_slow], piece.cause)
        until = self._deadline
        if self._rails is not None:
            others = [other for other in self._paths if other != path and other not in piece.tried]
            if others:
                until = min(until, now + max(0.0, until - now) / 2)  # later there is nothing to halve
            if self._rails.in_order(others):
                until = min(until, now + self._rails.patience_s(path, mine.num_bytes))
            self._rails.sent(path, mine.num_bytes)
        self._under_way[number] = _Part(path, mine, now, until)
        count = self._num_slices if slices is None else len(slices)
        self._record(
            f"{path} carries {count} slices{' after ' + ', '.join(piece.tried) if piece.tried else ''}"
        )
        return Carry(number, path, slices, until)

    def _pieces_of(self, piece_bytes: int) -> list[_Piece]:
        if not piece_bytes:
            return [_Piece(None, self._bytes_of(None))]
        assert self._lengths is not None
        ends = np.cumsum(self._lengths)
        cuts = np.unique(np.searchsorted(ends, np.arange(piece_bytes, int(ends[-1]), piece_bytes)) + 1)
        runs = np.split(np.arange(self._num_slices), cuts[cuts < self._num_slices])
        return [_Piece(run, self._bytes_of(run)) for run in runs]

    def _bytes_of(self, slices: Indices | None) -> int:
        if self._lengths is None:
            return 0
        return int((self._lengths if slices is None else self._lengths[slices]).sum())

    def _row(self, slices: Indices | None, index: int) -> int:
        return index if index < 0 or slices is None else int(slices[index])

    def _rows(self, slices: Indices | None) -> list[int]:
        return list(range(self._num_slices)) if slices is None else [int(row) for row in slices]

    def _record(self, line: str) -> None:
        self._story.append(line)


def piece_bytes_of(num_bytes: int, num_rails: int) -> int:
    """Size of the pieces of a batch of ``num_bytes`` that is spread over ``num_rails`` rails."""
    return min(max(num_bytes // (PIECES_PER_RAIL * num_rails), MIN_PIECE_BYTES), MAX_PIECE_BYTES)


def _tiers_of(paths: Mapping[str, Flags | None]) -> list[list[str]]:
    """Group paths by scheme; paths of one scheme are equals."""
    tiers: dict[str, list[str]] = {}
    for path in paths:
        tiers.setdefault(scheme_of(path), []).append(path)
    return list(tiers.values())


@dataclass(slots=True)
class TransferColumns:
    """The rows of a batch."""

    local: Column
    remote: Column
    lengths: Column
    origin: Indices | None = None
    "After ``cut``: for each row, the row of ``whole`` that it is a part of."
    whole: TransferColumns | None = None

    def cut(self, max_bytes: int) -> TransferColumns:
        """The same bytes in rows of at most ``max_bytes``."""
        if not len(self.lengths) or int(self.lengths.max()) <= max_bytes:
            return self
        num_parts = np.maximum(1, -(-self.lengths.astype(np.int64) // max_bytes))
        origin = np.repeat(np.arange(len(self.lengths)), num_parts)
        part = np.arange(len(origin)) - np.repeat(np.cumsum(num_parts) - num_parts, num_parts)
        offset = part.astype(np.uint64) * np.uint64(max_bytes)
        lengths = np.minimum(self.lengths[origin] - offset, np.uint64(max_bytes))
        return TransferColumns(
            self.local[origin] + offset, self.remote[origin] + offset, lengths, origin, self
        )

    def rows(self, carry: Carry) -> tuple[Column, Column, Column]:
        if carry.slices is None:
            return self.local, self.remote, self.lengths
        return self.local[carry.slices], self.remote[carry.slices], self.lengths[carry.slices]


def transfer_columns(local: Addresses, remote: Addresses, lengths: Addresses) -> TransferColumns:
    """Columns as the native side takes them.

    Raises:
        InvalidArgument: not one number per slice, or negative ones.
    """
    columns = TransferColumns(checked_column(local), checked_column(remote), checked_column(lengths))
    shape = columns.lengths.shape
    if len(shape) != 1 or columns.local.shape != shape or columns.remote.shape != shape:
        shapes = (columns.local.shape, columns.remote.shape, shape)
        raise InvalidArgument("columns", shapes, "three columns of equal length")
    return columns


def checked_column(values: Addresses) -> Column:
    """One column; numpy itself would truncate floats, parse texts and wrap negative numbers around.

    Raises:
        InvalidArgument: they are not integers of 64 bits, or one of them is negative.
    """
    try:
        return _column(values)
    except (OverflowError, TypeError, ValueError) as error:
        raise InvalidArgument("columns", error, "integers of 0 to 2**64 - 1, one per slice") from error


def _column(values: Addresses) -> Column:
    """See ``checked_column``.

    Raises:
        TypeError: the values are no integers.
        OverflowError: one of them is negative, or has more than 64 bits.
        ValueError: they are not numbers in one row.
    """
    if hasattr(values, "__array__"):
        array = np.asarray(values)
        if array.size and array.dtype.kind not in "iu":
            raise TypeError(f"an array of {array.dtype}")
        if array.size and array.dtype.kind == "i" and array.min() < 0:
            raise OverflowError("a negative number")
        return np.asarray(array, dtype=np.uint64)
    if set(map(type, values)) - {int}:
        values = [operator.index(value) for value in values]
    return np.asarray(values, dtype=np.uint64)

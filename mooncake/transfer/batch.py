"""A batch's life: slices are dealt to paths, a path that fails is replaced by the next, one end.

The batch knows only names of paths and which slices each can carry. It moves nothing and reads no
clock: ``PartDone`` and ``now`` go in, ``Carry`` and ``Finish`` come out. A batch finishes when no part
of it is under way any more, failed or not, because only then is its memory nobody's business. Moving a
slice twice is harmless (the same bytes to the same place), so a retry repeats the whole part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mooncake.machine import Wake

Indices = npt.NDArray[np.int64]

OK = 0
"""The status of success. Others are opaque here but for those of ``RETRIED``."""

RETRIED = frozenset({1, 6})
"""PEER_LOST and PROTOCOL_ERROR: the path failed, not the request."""


@dataclass(frozen=True, slots=True)
class Start:
    """Event: the batch may begin."""


@dataclass(frozen=True, slots=True)
class PartDone:
    """Event: what ``Carry`` asked for has ended."""

    part: int
    status: int
    failed_slice: int = -1
    "Within the part, or -1."
    num_bytes: int = 0
    checksums: npt.NDArray[np.uint32] | None = None


@dataclass(frozen=True, slots=True)
class Carry:
    """Effect: move these slices over this path."""

    part: int
    path: str
    slices: Indices | None
    "Rows of the batch's columns; None is all of them."


@dataclass(frozen=True, slots=True)
class Finish:
    """Effect: the batch is over, and this is what came of it."""

    status: int
    failed_slice: int
    num_bytes: int
    checksums: npt.NDArray[np.uint32] | None


@dataclass(slots=True)
class _Part:
    path: str
    slices: Indices | None
    tried: list[str]


class Batch:
    """One batch.

    Args:
        num_slices: rows of the columns.
        paths: per path, in order of preference, a flag for each slice it can carry; None is all.
        deadline: the instant after which a failed path is not replaced.
        no_path: status when a slice has no path at all.
    """

    def __init__(
        self,
        num_slices: int,
        paths: Mapping[str, npt.NDArray[np.bool_] | None],
        deadline: float,
        no_path: int,
        has_checksums: bool = False,
    ) -> None:
        self._num_slices = num_slices
        self._paths = dict(paths)
        self._deadline = deadline
        self._no_path = no_path
        self._under_way: dict[int, _Part] = {}
        self._next_part = 0
        self._status = OK
        self._failed_slice = -1
        self._num_bytes = 0
        self._checksums = np.zeros(num_slices, dtype=np.uint32) if has_checksums else None
        self._is_finished = False
        self._story: list[str] = []

    def handle(self, event: Start | PartDone | Wake, now: float) -> list[Carry | Finish]:
        effects: list[Carry | Finish] = []
        if isinstance(event, Start):
            effects += self._deal(None, [])
        elif isinstance(event, PartDone):
            part = self._under_way.pop(event.part)
            self._tell(f"{part.path} ended with status {event.status}")
            if event.status == OK:
                self._take(part, event)
            elif event.status in RETRIED and self._status == OK and now < self._deadline:
                effects += self._deal(part.slices, [*part.tried, part.path], event)
            else:
                self._fail(event.status, self._row(part.slices, event.failed_slice))
        if not self._under_way and not self._is_finished:
            self._is_finished = True
            failed = self._status != OK
            sums = None if failed else self._checksums
            effects.append(Finish(self._status, self._failed_slice, 0 if failed else self._num_bytes, sums))
        return effects

    def deadline(self) -> float | None:
        """None: the parts carry the deadline themselves."""
        return None

    def check(self) -> None:
        assert not (self._is_finished and self._under_way)
        assert all(part.path not in part.tried for part in self._under_way.values())
        rows = [row for part in self._under_way.values() for row in self._rows(part.slices)]
        assert len(rows) == len(dict.fromkeys(rows)), "a slice travels twice at once"

    def story(self, key: str = "") -> list[str]:
        """The parts of this batch in order; ``key`` narrows it to one path."""
        return [line for line in self._story if key in line]

    def _deal(
        self, slices: Indices | None, tried: Sequence[str], cause: PartDone | None = None
    ) -> list[Carry]:
        """Every slice goes to the first path that can carry it and has not failed it before."""
        effects: list[Carry] = []
        if not self._num_slices:
            return effects
        left = slices
        for path, able in self._paths.items():
            if path in tried or (left is not None and not len(left)):
                continue
            rows = np.arange(self._num_slices) if left is None and able is not None else left
            if able is None or rows is None:
                mine, left = left, np.empty(0, dtype=np.int64)
            else:
                mine, left = rows[able[rows]], rows[~able[rows]]
                if len(mine) == self._num_slices:
                    mine = None
            if mine is None or len(mine):
                effects.append(self._send(path, mine, list(tried)))
        if left is None or len(left):
            status = cause.status if cause is not None else self._no_path
            failed = self._row(slices, cause.failed_slice) if cause is not None else self._row(left, 0)
            self._fail(status, failed)
        return effects

    def _send(self, path: str, slices: Indices | None, tried: list[str]) -> Carry:
        number = self._next_part
        self._next_part += 1
        self._under_way[number] = _Part(path, slices, tried)
        count = self._num_slices if slices is None else len(slices)
        self._tell(f"{path} carries {count} slices{' after ' + ', '.join(tried) if tried else ''}")
        return Carry(number, path, slices)

    def _take(self, part: _Part, event: PartDone) -> None:
        self._num_bytes += event.num_bytes
        if self._checksums is not None and event.checksums is not None:
            self._checksums[slice(None) if part.slices is None else part.slices] = event.checksums

    def _fail(self, status: int, failed_slice: int) -> None:
        if self._status == OK:
            self._status, self._failed_slice = status, failed_slice

    def _row(self, slices: Indices | None, index: int) -> int:
        return index if index < 0 or slices is None else int(slices[index])

    def _rows(self, slices: Indices | None) -> list[int]:
        return list(range(self._num_slices)) if slices is None else [int(row) for row in slices]

    def _tell(self, line: str) -> None:
        if len(self._story) < 32:
            self._story.append(line)

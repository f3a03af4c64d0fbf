# SPDX-License-Identifier: Apache-2.0
"""A selection of rows, from what programs pass to the byte ranges of a member whose rows have one size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mooncake.compat.objects.values import StructuredMemberSlice


@dataclass(frozen=True, slots=True)
class RowSelection:
    """Numbers of rows, each checked to be a row of the member; rows may be repeated and in any order."""

    indices: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.indices)

    def byte_runs(self, row_bytes: int) -> list[tuple[int, int]]:
        """(start, length) of the rows, neighbours joined."""
        starts, counts = self._runs()
        return [
            (start * row_bytes, count * row_bytes)
            for start, count in zip(starts.tolist(), counts.tolist(), strict=True)
            if row_bytes
        ]

    def ragged_runs(self, offsets: npt.NDArray[np.int64], unit: int) -> list[tuple[int, int]]:
        """(start, length) of rows that lie between ``offsets`` of ``unit`` bytes, neighbours joined."""
        starts, counts = self._runs()
        begins, ends = offsets[starts] * unit, offsets[starts + counts] * unit
        return [
            (begin, end - begin)
            for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)
            if end > begin
        ]

    def _runs(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        if not len(self.indices):
            return self.indices, self.indices
        breaks = np.flatnonzero(np.diff(self.indices) != 1) + 1
        firsts = np.concatenate(([0], breaks))
        counts = np.diff(np.concatenate((firsts, [len(self.indices)])))
        return self.indices[firsts], counts


def select_rows(rows: Any, num_rows: int) -> RowSelection | None:
    """Selection from a ``slice``, a ``StructuredMemberSlice`` or row numbers; None is all rows.

    Raises:
        IndexError: a row that is not there.
        TypeError, ValueError: no selection of rows.
    """
    if rows is None:
        return None
    if isinstance(rows, RowSelection):
        if len(rows) and int(rows.indices.max()) >= num_rows:
            raise IndexError(f"row index is out of range: {rows.indices.max()} of {num_rows} rows")
        return rows
    if isinstance(rows, StructuredMemberSlice):
        if rows.axis != 0:
            raise ValueError(f"rows can be sliced on axis=0 only, not {rows.axis}")
        rows = slice(rows.start, rows.end, rows.step)
    if isinstance(rows, slice):
        if rows.step is not None and rows.step < 1:
            raise ValueError(f"slice step must be positive, not {rows.step}")
        return RowSelection(np.arange(*rows.indices(num_rows), dtype=np.int64))
    is_list = isinstance(rows, Sequence) and not isinstance(rows, str | bytes | bytearray | memoryview)
    if not is_list and not (isinstance(rows, np.ndarray) and rows.ndim == 1):
        raise TypeError("rows must be a slice, a StructuredMemberSlice or a sequence of row indices")
    if not all(isinstance(row, int | np.integer) and not isinstance(row, bool) for row in rows):
        raise TypeError("row indices must be integers")
    indices = [int(row) + num_rows if row < 0 else int(row) for row in rows]
    for row in indices:
        if not 0 <= row < num_rows:
            raise IndexError(f"row index is out of range: {row} of {num_rows} rows")
    return RowSelection(np.array(indices, dtype=np.int64))

# SPDX-License-Identifier: Apache-2.0
"""Arguments and results of the calls for structured objects, by the existing package's names.

A selection of rows goes from what programs pass to the byte ranges of a member whose rows have one size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mooncake.compat.objects.manifest import RemoteBundleRef

PUT_MODES = ("auto", "batch", "parallel")
COPY_MODES = ("auto", "zero_copy", "copy")


class BundleStore(Protocol):
    """The calls that a store must have. Others (batches, ranges, tensors) are used if it has them."""

    def put(self, key: str, value: Any, /) -> int: ...

    def get(self, key: str, /) -> bytes: ...

    def remove(self, key: str, force: bool = False, /) -> int: ...


@dataclass(frozen=True)
class BundleTransferPolicy:
    """How members are written.

    Args:
        max_inflight_put: accepted; the store itself sends the chunks of a batch side by side.
        put_mode: "auto" writes small members by value; "batch" and "parallel" write all from their memory.
        copy_mode: "zero_copy" fails where bytes would have to be copied, "copy" writes everything by value.
    """

    max_inflight_put: int = 1
    put_mode: str = "auto"
    copy_mode: str = "auto"

    def check(self) -> None:
        if type(self.max_inflight_put) is not int or self.max_inflight_put < 1:
            raise ValueError(f"max_inflight_put must be positive, not {self.max_inflight_put!r}")
        if self.put_mode not in PUT_MODES:
            raise ValueError(f"unsupported put_mode: {self.put_mode}; one of {', '.join(PUT_MODES)}")
        if self.copy_mode not in COPY_MODES:
            raise ValueError(f"unsupported copy_mode: {self.copy_mode}; one of {', '.join(COPY_MODES)}")


@dataclass(frozen=True)
class FieldSchema:
    """Encoding of a field. ``metadata``: ``section``, ``dtype`` and, for dicts of tensors, ``keys``."""

    codec: str
    nullable: bool = True
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StructuredMemberSlice:
    """Rows ``start:end:step`` of a member; only ``axis`` 0 can be sliced."""

    axis: int
    start: int
    end: int
    step: int = 1


@dataclass(frozen=True, init=False)
class StructuredObjectPayload:
    """An object to be stored: named members, and metadata that JSON can represent."""

    metadata: Mapping[str, Any]
    buffers: Mapping[str, Any]

    def __init__(
        self, metadata: Mapping[str, Any] | None = None, buffers: Mapping[str, Any] | None = None
    ) -> None:
        object.__setattr__(self, "metadata", {} if metadata is None else metadata)
        object.__setattr__(self, "buffers", {} if buffers is None else buffers)


@dataclass(frozen=True)
class StructuredObjectReadSpec:
    """What to read of a stored object: all of it, unless members are selected or sliced."""

    ref: RemoteBundleRef | Mapping[str, Any]
    member_names: tuple[str, ...] | None = None
    member_slices: tuple[tuple[str, StructuredMemberSlice], ...] = ()

    def select_members(self, names: Sequence[str] | None) -> StructuredObjectReadSpec:
        return replace(self, member_names=None if names is None else tuple(names))

    def slice_member(
        self, name: str, axis: int, start: int, end: int, step: int = 1
    ) -> StructuredObjectReadSpec:
        others = tuple(pair for pair in self.member_slices if pair[0] != name)
        return replace(self, member_slices=(*others, (name, StructuredMemberSlice(axis, start, end, step))))

    def member_slice(self, name: str) -> StructuredMemberSlice | None:
        return dict(self.member_slices).get(name)


@dataclass
class StructuredObjectResult:
    metadata: dict[str, Any]
    objects: dict[str, Any]


@dataclass(frozen=True)
class TensorObjectBuffer:
    """Registered memory that holds, or receives, a tensor in the store's format: header, then elements."""

    ptr: int
    size: int
    owner: Any = None
    batch_size: int | None = None


@dataclass(frozen=True)
class RawDestination:
    """Memory of the caller that receives the bytes of a member."""

    ptr: int
    size: int
    owner: Any = None
    pre_registered: bool = False


def tensor_object_buffer(
    ptr: int, size: int, owner: Any = None, batch_size: int | None = None
) -> TensorObjectBuffer:
    """Describe a tensor object in registered memory, as a value to put or as a destination.

    Args:
        owner: referenced while the buffer is, so that its memory stays.
        batch_size: number of the tensor's rows; needed when it is a DataProto's field.
    """
    _check_memory("tensor_object_buffer", ptr, size)
    return TensorObjectBuffer(int(ptr), int(size), owner, batch_size)


def raw_destination(
    ptr: int, size: int, owner: Any = None, *, pre_registered: bool = False
) -> RawDestination:
    """Describe memory for a read; ``pre_registered``: the store knows it, as it does the leases of a pool."""
    _check_memory("raw_destination", ptr, size)
    return RawDestination(int(ptr), int(size), owner, pre_registered)


def _check_memory(what: str, ptr: int, size: int) -> None:
    if int(ptr) <= 0 or int(size) < 0:
        raise ValueError(f"{what}: no memory of {size} bytes at {ptr:#x}")


# Rows ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RowSelection:
    """Numbers of rows, each checked to be a row of the member; rows may be repeated and in any order.

    A range stays one, whatever number of rows a description claims.
    """

    rows: npt.NDArray[np.int64] | range

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def indices(self) -> npt.NDArray[np.int64]:
        rows = self.rows
        return (
            np.arange(rows.start, rows.stop, rows.step, dtype=np.int64) if isinstance(rows, range) else rows
        )

    @property
    def largest(self) -> int:
        """Largest row, -1 when there is none."""
        if not len(self):
            return -1
        return self.rows[-1] if isinstance(self.rows, range) else int(self.rows.max())

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
        if not len(self):
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        if isinstance(self.rows, range) and self.rows.step == 1:
            return np.array([self.rows.start]), np.array([len(self)])
        indices = self.indices
        breaks = np.flatnonzero(np.diff(indices) != 1) + 1
        firsts = np.concatenate(([0], breaks))
        counts = np.diff(np.concatenate((firsts, [len(indices)])))
        return indices[firsts], counts


def select_rows(rows: Any, num_rows: int) -> RowSelection | None:
    """Selection from a ``slice``, a ``StructuredMemberSlice`` or row numbers; None is all rows.

    Raises:
        IndexError: a row that is not there.
        TypeError, ValueError: no selection of rows.
    """
    if rows is None:
        return None
    if isinstance(rows, RowSelection):
        if rows.largest >= num_rows:
            raise IndexError(f"row index is out of range: {rows.largest} of {num_rows} rows")
        return rows
    if isinstance(rows, StructuredMemberSlice):
        if rows.axis != 0:
            raise ValueError(f"rows can be sliced on axis=0 only, not {rows.axis}")
        rows = slice(rows.start, rows.end, rows.step)
    if isinstance(rows, slice):
        if rows.step is not None and rows.step < 1:
            raise ValueError(f"slice step must be positive, not {rows.step}")
        return RowSelection(range(*rows.indices(num_rows)))
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

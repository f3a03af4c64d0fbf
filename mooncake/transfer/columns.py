"""The rows of a batch as columns: what callers pass, checked and in the form the native side takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mooncake.errors import InvalidArgument
from mooncake.transfer.batch import Carry, Indices
from mooncake.transfer.descriptor import Column

Addresses = Sequence[int] | npt.NDArray[np.unsignedinteger[Any]] | npt.NDArray[np.signedinteger[Any]]
"""Numbers, one per slice."""


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
    try:
        columns = TransferColumns(
            np.asarray(local, dtype=np.uint64),
            np.asarray(remote, dtype=np.uint64),
            np.asarray(lengths, dtype=np.uint64),
        )
    except (OverflowError, TypeError, ValueError) as error:
        raise InvalidArgument("columns", error, "integers of 0 to 2**64 - 1, one per slice") from error
    shape = columns.lengths.shape
    if len(shape) != 1 or columns.local.shape != shape or columns.remote.shape != shape:
        shapes = (columns.local.shape, columns.remote.shape, shape)
        raise InvalidArgument("columns", shapes, "three columns of equal length")
    return columns

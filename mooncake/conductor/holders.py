"""Who holds a block, on which tiers: sets that many blocks share.

It owns the sets and refuses to know blocks. Ten million blocks are held by few different sets of instances:
most by one, the blocks of a conversation by the same two or three, a system prompt's by nearly all. So a
block points to a row here, and each row is kept once, as long as a block points to it.

A row is three integers, one for each tier, whose bits are the slots of instances: one AND tells which of a
thousand instances still hold the next block of a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mooncake.conductor.keytable import Values
from mooncake.types import Tier

Masks = tuple[int, int, int]
"""Slots that hold a block in the order of ``Tier``."""

PLANE = {tier: position for position, tier in enumerate(Tier)}
NOBODY = 0
"""The row of blocks that nobody holds."""

_WORTH_KEEPING = 32
"""Holders of a row from which on it is likely to be asked for again and again."""


class HolderSets:
    """Rows of masks, each with the number of blocks that point to it."""

    def __init__(self) -> None:
        self._masks: list[Masks] = [(0, 0, 0)]
        self._counts: list[int] = [0]
        self._rows: dict[Masks, int] = {(0, 0, 0): NOBODY}
        self._free: list[int] = []
        self._packed: dict[int, bytes] = {}
        self._width = 0

    def __len__(self) -> int:
        return len(self._rows) - 1

    def masks(self, row: int) -> Masks:
        return self._masks[row]

    def rows_with(self, slot: int, rows: Values | None = None) -> npt.NDArray[np.bool_]:
        """Which of ``rows`` hold a slot; or, by row, which of all."""
        if rows is not None:
            several, which = np.unique(rows, return_inverse=True)
            return np.array([self._has(row, slot) for row in several.tolist()], np.bool_)[which]
        return np.array([self._has(row, slot) for row in range(len(self._masks))], np.bool_)

    def _has(self, row: int, slot: int) -> bool:
        device, memory, ssd = self._masks[row]
        return bool((device | memory | ssd) >> slot & 1)

    def packed(self, rows: Sequence[int], width: int) -> bytearray:
        """The masks of rows one after the other, each in ``width`` bytes."""
        if width != self._width:
            self._packed.clear()
            self._width = width
        kept = self._packed.get
        return bytearray().join([kept(row) or self._pack(row) for row in rows])

    def _pack(self, row: int) -> bytes:
        masks = self._masks[row]
        packed = b"".join([mask.to_bytes(self._width, "little") for mask in masks])
        if sum(mask.bit_count() for mask in masks) > _WORTH_KEEPING:
            self._packed[row] = packed
        return packed

    def move(self, before: int, masks: Masks, num_blocks: int) -> int:
        """``num_blocks`` blocks leave the row ``before`` for the row of ``masks``, which is returned."""
        row = self._rows.get(masks)
        if row is None:
            if self._free:
                row = self._free.pop()
                self._masks[row] = masks
            else:
                row = len(self._masks)
                self._masks.append(masks)
                self._counts.append(0)
            self._rows[masks] = row
        if row != NOBODY:
            self._counts[row] += num_blocks
        if before != NOBODY:
            self._counts[before] -= num_blocks
            if not self._counts[before]:
                del self._rows[self._masks[before]]
                self._masks[before] = (0, 0, 0)
                self._packed.pop(before, None)
                self._free.append(before)
        return row

    def check(self, counts: dict[int, int]) -> None:
        """``counts``: how many blocks point to each row."""
        assert counts == {row: self._counts[row] for row in self._rows.values() if row != NOBODY}
        assert len(self._rows) + len(self._free) == len(self._masks)
        assert all(self._masks[row] == masks for masks, row in self._rows.items())


def without_slot(masks: Masks, slot: int) -> Masks:
    keep = ~(1 << slot)
    device, memory, ssd = masks
    return device & keep, memory & keep, ssd & keep


def with_plane(masks: Masks, plane: int, mask: int) -> Masks:
    device, memory, ssd = masks
    if plane == 0:
        return mask, memory, ssd
    return (device, mask, ssd) if plane == 1 else (device, memory, mask)

# SPDX-License-Identifier: Apache-2.0
"""Sets of instances and tiers that hold a block, each shared by many blocks.

It owns the sets and refuses to know blocks. Ten million blocks are held by few different sets of instances:
most by one, the blocks of a conversation by the same two or three, a system prompt's by nearly all. So a
block points to a row here, and each row is kept once, as long as a block points to it.

A row is three integers, one for each tier, whose bits are the slots of instances: one AND yields which of a
thousand instances still hold the next block of a prompt.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mooncake.conductor.key_table import Values
from mooncake.types import Tier

Masks = tuple[int, int, int]
"""Slots that hold a block in the order of ``Tier``."""

Words = npt.NDArray[np.uint64]

PLANE = {tier: position for position, tier in enumerate(Tier)}
NO_HOLDERS = 0
"""The row of blocks that no instance holds."""

_FEW_ROWS = 24
_UNPACKED = 4096
_TIER_BITS = np.array([1, 2, 4], np.uint64)


class HolderSets:
    """Rows of masks, each with the number of blocks that point to it."""

    def __init__(self) -> None:
        self._masks: list[Masks] = [(0, 0, 0)]
        self._counts: list[int] = [0]
        self._rows: dict[Masks, int] = {(0, 0, 0): NO_HOLDERS}
        self._free: list[int] = []
        self._unpacked = _Unpacked()

    def __len__(self) -> int:
        return len(self._rows) - 1

    def masks(self, row: int) -> Masks:
        return self._masks[row]

    def rows_with(self, slot: int, rows: Values | None = None) -> npt.NDArray[np.bool_]:
        """By element of ``rows`` whether its row contains a slot; without ``rows``, by row of all."""
        if rows is not None:
            several, which = np.unique(rows, return_inverse=True)
            return np.array([self._has(row, slot) for row in several.tolist()], np.bool_)[which]
        return np.array([self._has(row, slot) for row in range(len(self._masks))], np.bool_)

    def _has(self, row: int, slot: int) -> bool:
        device, memory, ssd = self._masks[row]
        return bool((device | memory | ssd) >> slot & 1)

    def reach(self, rows: Values, num_words: int) -> Words:
        """Holders of rows on the device or in memory, and on any tier: by row, level and word of slots."""
        places = self._unpacked.places(rows, self._masks, num_words)
        return self._unpacked.reach.take(places, axis=0)

    def tiers(self, rows: Values, slot: int, num_words: int) -> npt.NDArray[np.uint8]:
        """The tiers on which a slot is in each row, as bits in the order of ``Tier``."""
        if len(rows) <= _FEW_ROWS:
            few = [self._masks[row] for row in rows.tolist()]
            found = [
                one >> slot & 1 | (two >> slot & 1) << 1 | (three >> slot & 1) << 2 for one, two, three in few
            ]
            return np.array(found, np.uint8)
        places = self._unpacked.places(rows, self._masks, num_words)
        words = self._unpacked.planes[places, :, slot >> 6]
        return ((words >> np.uint64(slot & 63) & np.uint64(1)) @ _TIER_BITS).astype(np.uint8)

    def move(self, before: int, masks: Masks, num_blocks: int) -> int:
        """Move ``num_blocks`` blocks from the row ``before`` to the row of ``masks``, which is returned."""
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
        if row != NO_HOLDERS:
            self._counts[row] += num_blocks
        if before != NO_HOLDERS:
            self._counts[before] -= num_blocks
            if not self._counts[before]:
                del self._rows[self._masks[before]]
                self._masks[before] = (0, 0, 0)
                self._unpacked.forget(before)
                self._free.append(before)
        return row

    def check(self, counts: dict[int, int]) -> None:
        """Assert the invariants; ``counts``: how many blocks point to each row."""
        assert counts == {row: self._counts[row] for row in self._rows.values() if row != NO_HOLDERS}
        assert len(self._rows) + len(self._free) == len(self._masks)
        assert all(self._masks[row] == masks for masks, row in self._rows.items())


class _Unpacked:
    """Rows as arrays of words, for prompts that meet many rows: a cache, emptied when it is full."""

    def __init__(self) -> None:
        self.planes: Words = np.empty((0, 3, 0), np.uint64)
        """Words by place and tier."""
        self.reach: Words = np.empty((0, 2, 0), np.uint64)
        """Words by place and level: on the device or in memory; on any tier."""
        self._place_of = np.full(64, -1, np.int32)  # by row
        self._num_places = 0

    def forget(self, row: int) -> None:
        """Drop a row, which another set has now."""
        if row < len(self._place_of):
            self._place_of[row] = -1

    def places(self, rows: Values, masks: list[Masks], num_words: int) -> npt.NDArray[np.int32]:
        """The place of each of ``rows``; rows that had none get one."""
        if len(masks) > len(self._place_of):
            new = np.full(2 * len(masks) - len(self._place_of), -1, np.int32)
            self._place_of = np.concatenate([self._place_of, new])
        if num_words != self.planes.shape[2]:
            self._empty(_UNPACKED, num_words)
        places: npt.NDArray[np.int32] = self._place_of.take(rows)
        if np.count_nonzero(places < 0):
            missing = np.unique(rows[places < 0])
            if self._num_places + len(missing) > len(self.planes):
                missing = np.unique(rows)
                self._empty(max(_UNPACKED, len(missing)), num_words)
            self._unpack(missing, masks)
            places = self._place_of.take(rows)
        return places

    def _empty(self, num_places: int, num_words: int) -> None:
        self.planes = np.empty((num_places, 3, num_words), np.uint64)
        self.reach = np.empty((num_places, 2, num_words), np.uint64)
        self._place_of.fill(-1)
        self._num_places = 0

    def _unpack(self, rows: Values, masks: list[Masks]) -> None:
        first, end = self._num_places, self._num_places + len(rows)
        width = 8 * self.planes.shape[2]
        packed = b"".join([mask.to_bytes(width, "little") for row in rows.tolist() for mask in masks[row]])
        planes = np.frombuffer(packed, np.uint64).reshape(len(rows), 3, -1)
        self.planes[first:end] = planes
        self.reach[first:end, 0] = planes[:, 0] | planes[:, 1]
        self.reach[first:end, 1] = self.reach[first:end, 0] | planes[:, 2]
        self._place_of[rows] = range(first, end)
        self._num_places = end


def without_slot(masks: Masks, slot: int) -> Masks:
    keep = ~(1 << slot)
    device, memory, ssd = masks
    return device & keep, memory & keep, ssd & keep


def with_plane(masks: Masks, plane: int, mask: int) -> Masks:
    device, memory, ssd = masks
    if plane == 0:
        return mask, memory, ssd
    return (device, mask, ssd) if plane == 1 else (device, memory, mask)

# SPDX-License-Identifier: Apache-2.0
"""Prefix matching: how much of a prompt's beginning each slot holds, given the holders' row of each block.

It owns the answer of ``PrefixIndex.match`` and refuses to know how keys are found. Adjacent blocks with equal
holders are one run. Most prompts have few runs (the blocks that all have, those that a session's instances
have), and integers of a thousand bits process one in a microsecond. A prompt that each instance holds to
another length has hundreds: then all runs are one matrix of bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mooncake.conductor.index.holder_sets import NO_HOLDERS, HolderSets
from mooncake.conductor.index.key_table import Keys, Values

BlockCounts = npt.NDArray[np.int64]

_FEW_RUNS = 24
_FEW_SLOTS = 12


class PrefixMatch:
    """Numbers of leading blocks of a prompt by slot."""

    __slots__ = ("_ends", "_holders", "_runs", "keys", "leading", "leading_memory", "num_held")

    def __init__(self, holders: HolderSets, keys: Keys, rows: Values, num_slots: int) -> None:
        self.keys = keys
        self._holders = holders
        self._runs, self._ends = _runs(rows)
        runs = self._runs.tolist()
        num_runs = runs.index(NO_HOLDERS) if NO_HOLDERS in runs else len(runs)
        ends = self._ends[:num_runs]
        self.num_held = int(ends[-1]) if num_runs else 0
        "Number of leading blocks that any instance holds."
        if num_runs <= _FEW_RUNS:
            self.leading_memory, self.leading = _match_few(holders, runs[:num_runs], ends.tolist(), num_slots)
        else:
            held = holders.reach(self._runs[:num_runs], num_slots >> 6)
            self.leading_memory, self.leading = _match_many(held, ends)
        """Leading blocks on the device or in memory, and on any tier. One array if both are equal."""

    def tiers_of(self, slot: int) -> bytes:
        """The tiers on which a slot has each block of the prompt, as bits in the order of ``Tier``."""
        tiers = self._holders.tiers(self._runs, slot, len(self.leading) >> 6)
        lengths = self._ends.copy()
        lengths[1:] -= self._ends[:-1]
        return tiers.repeat(lengths).tobytes()


def _runs(rows: Values) -> tuple[Values, BlockCounts]:
    """Runs of adjacent blocks with equal holders: the row of each run, and its end."""
    last = (rows[1:] != rows[:-1]).nonzero()[0]
    if len(rows):
        last = np.append(last, len(rows) - 1)
    return rows[last], last + 1


def _match_few(
    holders: HolderSets, runs: Sequence[int], ends: Sequence[int], num_slots: int
) -> tuple[BlockCounts, BlockCounts]:
    masks = [holders.masks(run) for run in runs]
    in_memory = [device | memory for device, memory, _ in masks]
    leading_memory = _leading(in_memory, ends, num_slots)
    if not any(ssd for _, _, ssd in masks):
        return leading_memory, leading_memory
    anywhere = [fast | ssd for fast, (_, _, ssd) in zip(in_memory, masks, strict=True)]
    return leading_memory, _leading(anywhere, ends, num_slots)


def _leading(masks: Sequence[int], ends: Sequence[int], num_slots: int) -> BlockCounts:
    """Intersect the masks run by run; note where each slot drops out."""
    counts = np.zeros(num_slots, np.int64)
    alive, reached = -1, 0
    for mask, end in zip(masks, ends, strict=True):
        still = alive & mask
        if still != alive and reached:
            _note(counts, alive ^ still, reached)
        alive, reached = still, end
        if not alive:
            return counts
    if reached:
        _note(counts, alive, reached)
    return counts


def _note(counts: BlockCounts, slots: int, reached: int) -> None:
    """Set the count of ``slots``, given as bits, to ``reached``."""
    if slots.bit_count() > _FEW_SLOTS:
        packed = np.frombuffer(slots.to_bytes(len(counts) >> 3, "little"), np.uint8)
        counts[np.unpackbits(packed, bitorder="little").view(np.bool_)] = reached
        return
    while slots:
        slot = slots.bit_length() - 1
        counts[slot] = reached
        slots ^= 1 << slot


def _match_many(held: npt.NDArray[np.uint64], ends: BlockCounts) -> tuple[BlockCounts, BlockCounts]:
    """Counts for all runs at once, one row per level; ``held``: by run, level and word of slots."""
    num_runs, num_levels, num_words = held.shape
    counts = np.zeros((num_levels, num_words << 6), np.int64)
    alive = np.bitwise_and.accumulate(held.reshape(num_runs, -1), axis=0)
    alive[:-1] ^= alive[1:]  # now: the slots for which this run was the last
    # Few words have a bit set, and few of their bytes.
    words = (alive.reshape(-1) != 0).nonzero()[0]
    octets = alive.reshape(-1)[words].view(np.uint8)
    places = (octets != 0).nonzero()[0]
    bits = np.unpackbits(octets[places], bitorder="little").view(np.bool_).nonzero()[0]
    places = places[bits >> 3]
    words = words[places >> 3]
    width = num_levels * num_words  # a power of two
    run, word = words >> (width.bit_length() - 1), words & (width - 1)
    counts.reshape(-1)[(word << 6) + ((places & 7) << 3) + (bits & 7)] = ends[run]
    leading_memory, leading = counts
    return leading_memory, leading

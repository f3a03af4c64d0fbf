"""The walk down a prompt: who holds how much of its beginning, given the row of holders of each block.

It owns the answer of ``PrefixIndex.match`` and refuses to know how keys are found. Neighbours with equal
holders are one run. A prompt is mostly a few (what everybody has, what a session's instances have), and
integers of a thousand bits walk one in a microsecond. What everybody holds to another length has hundreds:
then all runs are one matrix of bits.
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
    """Who holds how much of the beginning of a prompt: numbers of blocks, by slot."""

    __slots__ = ("_ends", "_holders", "_runs", "keys", "leading", "leading_memory", "num_held")

    def __init__(self, holders: HolderSets, keys: Keys, rows: Values, num_slots: int) -> None:
        self.keys = keys
        self._holders = holders
        self._runs, self._ends = _runs(rows)
        runs = self._runs.tolist()
        num_runs = runs.index(NO_HOLDERS) if NO_HOLDERS in runs else len(runs)
        ends = self._ends[:num_runs]
        self.num_held = int(ends[-1]) if num_runs else 0
        "Leading blocks that anybody holds."
        if num_runs <= _FEW_RUNS:
            self.leading_memory, self.leading = _walk_few(holders, runs[:num_runs], ends.tolist(), num_slots)
        else:
            held = holders.reach(self._runs[:num_runs], num_slots >> 6)
            self.leading_memory, self.leading = _walk_many(held, ends)
        """Leading blocks on the device or in memory; anywhere. One array if these are the same."""

    def tiers_of(self, slot: int) -> bytes:
        """For each block of the prompt the tiers on which a slot has it, as bits in the order of ``Tier``."""
        tiers = self._holders.tiers(self._runs, slot, len(self.leading) >> 6)
        lengths = self._ends.copy()
        lengths[1:] -= self._ends[:-1]
        return tiers.repeat(lengths).tobytes()


def _runs(rows: Values) -> tuple[Values, BlockCounts]:
    """Neighbours with equal holders: the row of each run, and where it ends."""
    last = (rows[1:] != rows[:-1]).nonzero()[0]
    if len(rows):
        last = np.append(last, len(rows) - 1)
    return rows[last], last + 1


def _walk_few(
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
    """Follow the prompt with everybody; note who stays behind where."""
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
    """``slots``, as bits, came so far."""
    if slots.bit_count() > _FEW_SLOTS:
        packed = np.frombuffer(slots.to_bytes(len(counts) >> 3, "little"), np.uint8)
        counts[np.unpackbits(packed, bitorder="little").view(np.bool_)] = reached
        return
    while slots:
        slot = slots.bit_length() - 1
        counts[slot] = reached
        slots ^= 1 << slot


def _walk_many(held: npt.NDArray[np.uint64], ends: BlockCounts) -> tuple[BlockCounts, BlockCounts]:
    """The same for all runs at once; ``held``: by run, level and word of slots. A row of counts by level."""
    num_runs, num_levels, num_words = held.shape
    counts = np.zeros((num_levels, num_words << 6), np.int64)
    alive = np.bitwise_and.accumulate(held.reshape(num_runs, -1), axis=0)
    alive[:-1] ^= alive[1:]  # now: those for whom this run was the last
    # Of many words few have a bit, and of their bytes few.
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

# SPDX-License-Identifier: Apache-2.0
"""Block key to the instances and tiers that hold it, and from that the longest cached prefix on each.

It owns this one relation and refuses to know load, health or tokens. Its contents are hints: a wrong entry
never makes an answer wrong, so it may keep 64 bits of a hash where correctness would need 256.

Scopes (whatever makes equal keys mean different blocks: tenants, models, adapters) have a table each, from a
block to a row of ``holder_sets.py``. Each instance has a slot, a small number that it keeps until it is
forgotten; every array "by slot" has ``num_slots`` places. An instance's blocks are also listed, so that
forgetting it costs its own blocks and no more; the list is cleaned when half of it is stale. An instance with
a large part of all blocks (such as the pool) needs no list: a scan of the whole table costs no more.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from mooncake.conductor.index.holder_sets import NO_HOLDERS, PLANE, HolderSets, with_plane, without_slot
from mooncake.conductor.index.key_table import Keys, KeyTable, Values, key_column
from mooncake.conductor.index.prefix_match import PrefixMatch
from mooncake.conductor.index.removals import Removal, RemovalLog
from mooncake.prefix import BlockKey
from mooncake.types import InstanceId, Tier

_FIRST_SLOTS = 64
_LISTED = 1 << 16
_LISTED_PART = 64  # a list is kept up to 1/64 of all blocks


class PrefixIndex:
    """Which instance holds which blocks. ``remembered``: capacity of ``removal_log`` in blocks."""

    def __init__(self, remembered: int = 0) -> None:
        self.slots: dict[InstanceId, int] = {}
        self.num_slots = _FIRST_SLOTS
        self.removal_log = RemovalLog(remembered)
        self._instances: dict[int, InstanceId] = {}  # slot -> instance, the inverse of slots
        self._tables: dict[str, KeyTable] = {}
        self._holders = HolderSets()
        self._num_held: dict[int, dict[str, int]] = {}  # slot -> scope -> blocks
        self._lists: dict[int, dict[str, array[int]]] = {}  # slot -> scope -> its keys, some stale

    def __repr__(self) -> str:
        return f"<PrefixIndex {len(self.slots)} instances, {self.num_blocks} blocks>"

    @property
    def num_blocks(self) -> int:
        """Number of distinct blocks that any instance holds."""
        return sum(len(table) for table in self._tables.values())

    def num_blocks_of(self, instance: InstanceId) -> int:
        return sum(self._num_held.get(self.slots.get(instance, -1), {}).values())

    def slot(self, instance: InstanceId) -> int:
        """The slot of an instance, assigned at the first call."""
        slot = self.slots.get(instance)
        if slot is None:
            # The lowest free one, so that masks stay as short as there are instances.
            slot = next(slot for slot in range(len(self.slots) + 1) if slot not in self._instances)
            self.slots[instance] = slot
            self._instances[slot] = instance
            while self.num_slots <= slot:
                self.num_slots *= 2
        return slot

    def instance_at(self, slot: int) -> InstanceId:
        return self._instances[slot]

    # --- what happens to blocks

    def store(
        self,
        instance: InstanceId,
        keys: Iterable[BlockKey],
        tier: Tier = Tier.DEVICE,
        scope: str = "",
    ) -> None:
        """Record that ``instance`` now holds these blocks on ``tier``."""
        column = key_column(keys)
        if not len(column):
            return
        slot, plane = self.slot(instance), PLANE[tier]
        table = self._tables.get(scope)
        if table is None:
            table = self._tables[scope] = KeyTable()
        bit = 1 << slot
        num_held = self._num_held.setdefault(slot, {})
        lists = self._lists.setdefault(slot, {})
        if scope not in num_held:
            num_held[scope], lists[scope] = 0, array("Q")
        found = table.find(column)
        rows = found.values.copy()
        for row, which, count in _groups(found.values):
            masks = self._holders.masks(row)
            if masks[plane] & bit:
                continue
            rows[which] = self._holders.move(row, with_plane(masks, plane, masks[plane] | bit), count)
            if not (masks[0] | masks[1] | masks[2]) & bit:
                num_held[scope] += count
                if scope in lists:
                    lists[scope].frombytes(column[which].tobytes())
        table.put(found, rows)
        self._clean(slot, scope)

    def remove(
        self,
        instance: InstanceId,
        keys: Iterable[BlockKey],
        tier: Tier = Tier.DEVICE,
        scope: str = "",
        reason: str = "evicted",
        now: float = 0.0,
    ) -> None:
        """Record that ``instance`` no longer holds these blocks on ``tier``. Unknown blocks are ignored."""
        slot, table = self.slots.get(instance), self._tables.get(scope)
        if slot is None or table is None:
            return
        column = key_column(keys)
        if not len(column):
            return
        plane, bit = PLANE[tier], 1 << slot
        found = table.find(column)
        rows = found.values.copy()
        num_gone = 0
        for row, which, count in _groups(found.values):
            masks = self._holders.masks(row)
            if not masks[plane] & bit:
                continue
            after = with_plane(masks, plane, masks[plane] & ~bit)
            rows[which] = self._holders.move(row, after, count)
            if not (after[0] | after[1] | after[2]) & bit:
                num_gone += count
        table.put(found, rows)
        self.removal_log.note_removed(scope, column, Removal(now, instance, tier, reason))
        if num_gone:
            self._num_held[slot][scope] -= num_gone
            self._clean(slot, scope)
            self._drop_if_empty(scope)

    def clear(self, instance: InstanceId, reason: str = "cleared", now: float = 0.0) -> int:
        """Record that an instance holds nothing now; returns the number of its blocks."""
        slot = self.slots.get(instance, -1)
        num_blocks = 0
        for scope in list(self._num_held.get(slot, ())):
            table = self._tables[scope]
            found = table.find(self._held_by(slot, scope))
            rows = found.values.copy()
            for row, which, count in _groups(found.values):
                rows[which] = self._holders.move(row, without_slot(self._holders.masks(row), slot), count)
            table.put(found, rows)
            num_blocks += len(rows)
            self.removal_log.note_removed(scope, found.keys, Removal(now, instance, None, reason))
            del self._num_held[slot][scope]
            self._lists[slot].pop(scope, None)
            self._drop_if_empty(scope)
        return num_blocks

    def forget(self, instance: InstanceId, reason: str = "lost", now: float = 0.0) -> int:
        """Remove an instance with its blocks and free its slot. Returns the number of its blocks."""
        num_blocks = self.clear(instance, reason, now)
        slot = self.slots.pop(instance, None)
        if slot is not None:
            del self._instances[slot]
        return num_blocks

    # --- questions

    def match(self, keys: Sequence[BlockKey], scope: str = "") -> PrefixMatch:
        """The leading blocks of a prompt that each slot holds."""
        table, column = self._tables.get(scope), np.fromiter(keys, np.uint64, len(keys))
        rows: Values = np.zeros(len(keys), np.uint32) if table is None else table.find(column).values
        return PrefixMatch(self._holders, column, rows, self.num_slots)

    def matches(self, keys: Sequence[BlockKey], scope: str = "") -> dict[InstanceId, int]:
        """Number of leading blocks by instance; instances without any are absent."""
        leading = self.match(keys, scope).leading
        return {self._instances[slot]: int(leading[slot]) for slot in leading.nonzero()[0].tolist()}

    def scopes_of(self, key: BlockKey, prefix: str = "") -> list[str]:
        """The scopes whose names begin with ``prefix`` in which an instance holds a block of this key."""
        column = np.array([key], np.uint64)
        tables = ((scope, table) for scope, table in self._tables.items() if scope.startswith(prefix))
        return [scope for scope, table in tables if table.find(column).values[0] != NO_HOLDERS]

    def check(self) -> None:
        assert {slot: instance for instance, slot in self.slots.items()} == self._instances
        assert all(slot < self.num_slots for slot in self._instances)
        counts: dict[int, int] = {}
        held: dict[tuple[int, str], int] = {}
        for scope, table in self._tables.items():
            table.check()
            for row, count in table.counts().items():
                counts[row] = counts.get(row, 0) + count
                device, memory, ssd = self._holders.masks(row)
                for slot in _slots_in(device | memory | ssd):
                    held[slot, scope] = held.get((slot, scope), 0) + count
        self._holders.check(counts)
        known = {(slot, scope): num for slot, those in self._num_held.items() for scope, num in those.items()}
        assert held == {at: num for at, num in known.items() if num}
        for slot, scope in known:
            assert len(self._held_by(slot, scope)) == known[slot, scope]

    def _held_by(self, slot: int, scope: str) -> Keys:
        listed, table = self._lists[slot].get(scope), self._tables[scope]
        if listed is None:
            return table.keys_with(self._holders.rows_with(slot))
        keys = np.unique(np.frombuffer(listed, np.uint64))
        return keys[self._holders.rows_with(slot, table.find(keys).values)]

    def _clean(self, slot: int, scope: str) -> None:
        """Drop stale entries when they are half of a slot's list of blocks, and the list when it is too
        long."""
        listed = self._lists[slot].get(scope)
        if listed is None:
            return
        if len(listed) > 1024 + 2 * self._num_held[slot][scope]:
            listed = self._lists[slot][scope] = array("Q", self._held_by(slot, scope).tobytes())
        if len(listed) > max(_LISTED, len(self._tables[scope]) // _LISTED_PART):
            del self._lists[slot][scope]

    def _drop_if_empty(self, scope: str) -> None:
        if not len(self._tables[scope]):
            del self._tables[scope]
            for slot, num_held in self._num_held.items():
                num_held.pop(scope, None)
                self._lists[slot].pop(scope, None)


def _groups(rows: Values) -> Iterator[tuple[int, slice | npt.NDArray[np.bool_], int]]:
    """(row, its positions, their number) for each different row."""
    first = rows[:1]
    if np.count_nonzero(rows != first) == 0:
        if len(rows):
            yield int(first[0]), slice(None), len(rows)
        return
    for row, count in zip(*(column.tolist() for column in np.unique(rows, return_counts=True)), strict=True):
        yield row, rows == row, count


def _slots_in(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest

# SPDX-License-Identifier: Apache-2.0
"""Block key to the instances and tiers that hold it, and from that the longest cached prefix on each.

It owns this one relation, the memory of what was removed from it and the guess for instances that publish no
events; it refuses to know load, health or tokens. Its contents are hints: a wrong entry never makes an answer
wrong, so it may keep 64 bits of a hash where correctness would need 256.

Scopes (whatever makes equal keys mean different blocks: tenants, models, adapters) have a table each, from a
block to a row of ``holder_sets.py``. Each instance has a slot, a small number that it keeps until it is
forgotten; every array "by slot" has ``num_slots`` places. An instance's blocks are also listed, so that
forgetting it costs its own blocks and no more; the list is cleaned when most of it is stale. An instance with
a large part of all blocks (such as the pool) needs no list: a scan of the whole table costs no more.

An instance may be able to use only some of the prefixes whose blocks it holds (``cache_groups.py``). What is
needed beside the blocks is stored like blocks, in scopes of its own (``window_scope``), and the number of
leading blocks of such instances is reduced by a second look-up. Other instances pay nothing for it.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mooncake.conductor.holder_sets import NO_HOLDERS, PLANE, HolderSets, with_plane, without_slot
from mooncake.conductor.key_table import Keys, KeyTable, Values, key_column
from mooncake.conductor.messages import Window
from mooncake.prefix import BlockKey
from mooncake.types import InstanceId, Tier

_FIRST_SLOTS = 64
_LISTED = 1 << 16
_LISTED_PART = 64  # a list is kept up to 1/64 of all blocks
_ALL = slice(None)
_FEW_ROWS = 32
_WINDOW = "\x1fwindow "


def window_scope(scope: str, num_blocks: int) -> str:
    """The scope of the blocks of ``scope`` that count for the ``Window`` of ``num_blocks``."""
    return f"{scope}{_WINDOW}{num_blocks}"


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
        self._windows: dict[
            int, tuple[Window, ...]
        ] = {}  # slot -> conditions on the prefixes that it can use

    def __repr__(self) -> str:
        return f"<PrefixIndex {len(self.slots)} instances, {self.num_blocks} blocks>"

    @property
    def num_blocks(self) -> int:
        """Number of distinct blocks that any instance holds."""
        return sum(len(table) for scope, table in self._tables.items() if _WINDOW not in scope)

    def num_blocks_of(self, instance: InstanceId) -> int:
        num_held = self._num_held.get(self.slots.get(instance, -1), {})
        return sum(count for scope, count in num_held.items() if _WINDOW not in scope)

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
        holders, found = self._holders, table.find(column)
        rows = found.values if found.is_all_new else found.values.copy()
        for row, which, count in _groups(found.values):
            masks = holders.masks(row)
            if masks[plane] & bit:
                continue
            rows[which] = holders.move(row, with_plane(masks, plane, masks[plane] | bit), count)
            if not (masks[0] | masks[1] | masks[2]) & bit:
                num_held[scope] += count
                if scope in lists:
                    lists[scope].frombytes((column if which is _ALL else column[which]).tobytes())
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
            num_blocks += 0 if _WINDOW in scope else len(rows)
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
            self._windows.pop(slot, None)
        return num_blocks

    def set_windows(self, instance: InstanceId, windows: Sequence[Window]) -> None:
        """Replace the conditions on the prefixes that an instance can use."""
        self._windows.pop(self.slots.get(instance, -1), None)
        if windows:
            self._windows[self.slot(instance)] = tuple(windows)

    # --- questions

    def match(self, keys: Sequence[BlockKey], scope: str = "") -> PrefixMatch:
        """The leading blocks of a prompt that each slot holds."""
        table, column = self._tables.get(scope), np.fromiter(keys, np.uint64, len(keys))
        rows: Values = np.zeros(len(keys), np.uint32) if table is None else table.find(column).values
        match = PrefixMatch(self._holders, column, rows, self.num_slots)
        if self._windows:
            self._reduce(match, scope)
        return match

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

    def _reduce(self, match: PrefixMatch, scope: str) -> None:
        """Reduce numbers of leading blocks to those of prefixes that their instances can use."""
        alike: dict[tuple[Window, ...], list[int]] = {}
        for slot, windows in self._windows.items():
            if match.leading[slot]:
                alike.setdefault(windows, []).append(slot)
                match.reduced[slot] = None
        keys = match.keys[: match.num_held]
        for windows, some in alike.items():
            slots = np.array(some)
            runs = []
            for window in windows:
                table = self._tables.get(window_scope(scope, window.num_blocks))
                rows: Values = np.zeros(len(keys), np.uint32) if table is None else table.find(keys).values
                runs.append(_runs(rows))
            levels = [(match.leading_memory, 0)]
            if match.leading is not match.leading_memory:
                levels.append((match.leading, 1))
            for leading, level in levels:
                marked = []
                for window, (which, ends) in zip(windows, runs, strict=True):
                    words = self._holders.reach(which, self.num_slots >> 6)[:, level][:, slots >> 6]
                    marks = (words >> (slots & 63).astype(np.uint64) & np.uint64(1)).astype(np.bool_)
                    marked.append((window, marks.repeat(np.diff(ends, prepend=0), axis=0)))
                leading[slots] = _usable(leading[slots], marked)

    def _held_by(self, slot: int, scope: str) -> Keys:
        listed, table = self._lists[slot].get(scope), self._tables[scope]
        if listed is None:
            return table.keys_with(self._holders.rows_with(slot))
        keys = np.frombuffer(listed, np.uint64)
        return np.unique(keys[self._holders.rows_with(slot, table.find(keys).values)])

    def _clean(self, slot: int, scope: str) -> None:
        """Drop stale entries when they are three quarters of a slot's list of blocks, and the list when it is
        too long."""
        listed = self._lists[slot].get(scope)
        if listed is None:
            return
        if len(listed) > 1024 + 4 * self._num_held[slot][scope]:
            listed = self._lists[slot][scope] = array("Q", self._held_by(slot, scope).tobytes())
        if len(listed) > max(_LISTED, len(self._tables[scope]) // _LISTED_PART):
            del self._lists[slot][scope]

    def _drop_if_empty(self, scope: str) -> None:
        if not len(self._tables[scope]):
            del self._tables[scope]
            for slot, num_held in self._num_held.items():
                num_held.pop(scope, None)
                self._lists[slot].pop(scope, None)


def _usable(leading: BlockCounts, marked: Sequence[tuple[Window, npt.NDArray[np.bool_]]]) -> BlockCounts:
    """The longest prefixes of at most ``leading`` blocks that fulfil all conditions, given the marks of each
    by block and slot. A prefix reduced by one may no longer fulfil an earlier one, so all are tried again."""
    while True:
        before = leading
        for window, marks in marked:
            ends = np.arange(1, len(marks) + 1)[:, None]
            begins = np.maximum.accumulate(np.where(marks, 0, ends), axis=0)  # of the marked blocks before
            usable = (ends - begins >= window.num_blocks) | (begins == 0)
            usable &= (ends % window.step == 0) & (ends <= leading)
            leading = np.where(usable, ends, 0).max(axis=0, initial=0)
        if np.array_equal(leading, before):
            return leading


def _groups(rows: Values) -> Iterator[tuple[int, slice | npt.NDArray[np.bool_], int]]:
    """(row, its positions, their number) for each different row."""
    if len(rows) <= _FEW_ROWS:
        listed = rows.tolist()
        if listed and listed.count(listed[0]) == len(listed):
            yield listed[0], _ALL, len(listed)
            return
        for row in sorted(set(listed)):
            yield row, rows == row, listed.count(row)
        return
    first = rows[:1]
    if np.count_nonzero(rows != first) == 0:
        yield int(first[0]), _ALL, len(rows)
        return
    for row, count in zip(*(column.tolist() for column in np.unique(rows, return_counts=True)), strict=True):
        yield row, rows == row, count


def _slots_in(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


# --- how much of a prompt each slot holds


BlockCounts = npt.NDArray[np.int64]

_ONE = np.array(1)
_FEW_RUNS = 24
_FEW_SLOTS = 12


class PrefixMatch:
    """Numbers of leading blocks of a prompt by slot, given the holders' row of each block.

    Adjacent blocks with equal holders are one run. Most prompts have few runs (the blocks that all have,
    those that a session's instances have), and integers of a thousand bits process one in a microsecond. A
    prompt that each instance holds to another length has hundreds: then all runs are one matrix of bits.
    """

    __slots__ = ("_ends", "_holders", "_runs", "keys", "leading", "leading_memory", "num_held", "reduced")

    def __init__(self, holders: HolderSets, keys: Keys, rows: Values, num_slots: int) -> None:
        self.keys = keys
        self._holders = holders
        self.reduced: dict[int, None] = {}
        "Slots that may be unable to use blocks which they hold."
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
        column = tiers.repeat(lengths)
        if slot in self.reduced:
            column[int(self.leading[slot]) :] = 0
        return column.tobytes()


def _runs(rows: Values) -> tuple[Values, BlockCounts]:
    """Runs of adjacent blocks with equal holders: the row of each run, and its end."""
    num_rows = len(rows)
    if not num_rows:
        return rows, np.zeros(0, np.int64)
    last = (rows[1:] != rows[:-1]).nonzero()[0]
    ends = np.empty(len(last) + 1, np.int64)
    ends[:-1] = last
    ends[-1] = num_rows - 1
    runs = rows.take(ends)
    ends += _ONE
    return runs, ends


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


# --- recent removals


_MAX_NOTES = 20_000


class Removal(NamedTuple):
    """Why an instance no longer holds a block."""

    at: float
    instance: InstanceId
    tier: Tier | None
    "Tier it was on; None: every tier."
    reason: str
    "Reason given by the remover (``evicted``, ...), or ``cleared``, ``restarted``, ``lost``."


class RemovalLog:
    """Remembers the last ``capacity`` removed blocks, and as many blocks of prompts, to explain misses.

    Of a removal it knows when and why; of prompts, the other names under which the same tokens were
    requested. A note costs eight bytes a block and no loop; the query pays for the search, and covers all of
    a request's blocks at once. What it searches is one array, kept until the next note: the prompts of a
    request are explained one after the other.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._removed: deque[tuple[str, Keys, Removal]] = deque()
        self._num_removed = 0
        self._prompts: deque[tuple[Keys, Keys]] = deque()
        self._num_prompt_blocks = 0
        self._all_removed: tuple[Keys, npt.NDArray[np.int64], list[tuple[str, Keys, Removal]]] | None = None
        """All removed keys, where each note's end in them, and the notes."""
        self._all_prompts: tuple[Keys, Keys] | None = None

    def note_removed(self, scope: str, keys: Keys, removal: Removal) -> None:
        keys = keys[-self._capacity :] if self._capacity else keys[:0]
        if not len(keys):
            return
        self._all_removed = None
        self._removed.append((scope, keys, removal))
        self._num_removed += len(keys)
        while self._num_removed > self._capacity or len(self._removed) > _MAX_NOTES:
            self._num_removed -= len(self._removed.popleft()[1])

    def removals(self, keys: Keys, scope: str = "") -> BlockRemovals:
        """The last remembered removal of each block."""
        numbers = np.full(len(keys), -1)
        if not self._removed:
            return BlockRemovals(numbers, [])
        if self._all_removed is None:
            notes = list(self._removed)
            ends = np.cumsum([len(gone) for _, gone, _ in notes])
            self._all_removed = np.concatenate([gone for _, gone, _ in notes]), ends, notes
        gone, ends, notes = self._all_removed
        order = keys.argsort()
        wanted = keys[order]
        at, which = _found(gone, wanted)
        note_of = np.searchsorted(ends, at, side="right")
        found = np.unique(note_of)
        is_in_scope = np.zeros(len(notes), np.bool_)
        is_in_scope[found[[notes[number][0] == scope for number in found.tolist()]]] = True
        is_wanted = is_in_scope[note_of]
        # Of several removals of one block the last one stays; a block may be wanted twice.
        last = np.full(len(keys), -1)
        last[which[is_wanted]] = note_of[is_wanted]
        numbers[order] = last[np.searchsorted(wanted, wanted)]
        return BlockRemovals(numbers, notes)

    def note_prompt(self, keys: Keys, bare_keys: Sequence[BlockKey] = ()) -> None:
        """Note a requested prompt; without its salt, if it has one, its blocks would be ``bare_keys``."""
        if len(bare_keys) not in (0, len(keys)) or not 0 < len(keys) <= self._capacity:
            return
        self._all_prompts = None
        self._prompts.append((keys, np.array(bare_keys, np.uint64) if bare_keys else keys))
        self._num_prompt_blocks += len(keys)
        while self._num_prompt_blocks > self._capacity or len(self._prompts) > _MAX_NOTES:
            self._num_prompt_blocks -= len(self._prompts.popleft()[0])

    def has_other_salt(self, keys: Keys, bare_keys: Keys) -> npt.NDArray[np.bool_]:
        """Whether each block's tokens were requested under another key, that is with another salt."""
        is_other = np.zeros(len(keys), np.bool_)
        if not self._prompts or not len(bare_keys):
            return is_other
        if self._all_prompts is None:
            ours = np.concatenate([prompt[0] for prompt in self._prompts])
            self._all_prompts = ours, np.concatenate([prompt[1] for prompt in self._prompts])
        ours, bare = self._all_prompts
        order = bare_keys.argsort()
        wanted = bare_keys[order]
        at, which = _found(bare, wanted)
        found = np.zeros(len(keys), np.bool_)
        found[which[ours[at] != keys[order][which]]] = True
        is_other[order] = found[np.searchsorted(wanted, wanted)]
        return is_other


class BlockRemovals(NamedTuple):
    """The last removals of a prompt's blocks."""

    numbers: npt.NDArray[np.int64]
    "By block: the place of its removal in ``notes``; -1 for none."
    notes: list[tuple[str, Keys, Removal]]

    def of(self, block: int) -> Removal | None:
        number = int(self.numbers[block])
        return self.notes[number][2] if number >= 0 else None


def _found(keys: Keys, wanted: Keys) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Where ``keys`` has one of ``wanted``, which is sorted, in order; and where that is in ``wanted``. The
    lowest bits exclude most of a million keys, in a hundredth of the time that it takes to sort them."""
    mask = np.uint64((1 << max(16, (16 * len(wanted)).bit_length())) - 1)
    is_likely = np.zeros(int(mask) + 1, np.bool_)
    is_likely[(wanted & mask).astype(np.int64)] = True
    [likely] = is_likely.take((keys & mask).astype(np.int64)).nonzero()
    which = np.minimum(np.searchsorted(wanted, keys[likely]), len(wanted) - 1)
    is_found = wanted[which] == keys[likely]
    return likely[is_found], which[is_found]


# --- instances without KV events


class InferredBlocks:
    """Blocks that instances without KV events are assumed to hold: those of their prompts, latest first.

    Up to ``limit_blocks`` of each instance. The guess may be wrong, since an engine evicts by its own rules;
    but it makes the second turn of a session go where the first one went.
    """

    def __init__(self, limit_blocks: int) -> None:
        self._limit_blocks = limit_blocks
        self._blocks: dict[InstanceId, OrderedDict[BlockKey, None]] = {}

    def note(
        self, instance: InstanceId, keys: Sequence[BlockKey]
    ) -> tuple[Sequence[BlockKey], list[BlockKey]]:
        """Record a prompt given to an instance. Returns the blocks of it that it is assumed to hold now, and
        those that it is assumed to have evicted for them."""
        blocks, kept = self._blocks.setdefault(instance, OrderedDict()), keys[: self._limit_blocks]
        for key in reversed(kept):  # a prefix is evicted after what follows it
            blocks[key] = None
            blocks.move_to_end(key)
        return kept, [blocks.popitem(last=False)[0] for _ in range(len(blocks) - self._limit_blocks)]

    def all(self) -> Iterator[tuple[InstanceId, list[BlockKey]]]:
        """Every instance with its blocks, the latest used last."""
        for instance, blocks in self._blocks.items():
            yield instance, list(blocks)

    def forget(self, instance: InstanceId) -> None:
        self._blocks.pop(instance, None)

# SPDX-License-Identifier: Apache-2.0
"""KV cache groups: which of a hybrid model's blocks make a prefix that its engine can use.

The layers of a hybrid model attend differently, so vLLM keeps their KV in groups and publishes the blocks of
each group by themselves. This module owns the rule by which they together are of use, which is vLLM's own:

* a group with full attention must have every block of the prefix;
* a group with a sliding window must have the blocks of the window before the prefix's end, or all if the
  prefix is shorter; a Mamba group the last block, with which its state is kept;
* other kinds can't be judged from events, nor can groups whose blocks differ in size. Then nothing counts as
  held, and the instance is treated like one without events (``Silent``).

So a long prefix may be of use where a shorter one is not, and no set of blocks says which. The index is given
the blocks that all full-attention groups have, and beside them, in scopes of their own, the blocks that count
for each window (``PrefixWindows``); it applies the windows to the prefix that is asked for.

A model with one group, or an engine that names none, passes by: its events go to its ``KeyTranslation``
directly. For others this module keeps each engine's block with the groups that have it, by tier. Blocks of
groups other than full attention are known by their hashes only, because vLLM leaves blocks without use out of
their events but not the tokens of these blocks. A prefix whose window is gone is computed again although its
other blocks are there; the engine then has these twice, says so twice, and is without them after the second
removal only. So its stores are counted, except reports of reused blocks, which any client can request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil
from typing import NamedTuple

import msgspec

from mooncake.conductor.holder_sets import PLANE
from mooncake.conductor.key_translation import Fact, KeyTranslation, tier_of
from mooncake.conductor.messages import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    PrefixWindows,
    Silent,
    Window,
)
from mooncake.conductor.prefix_index import window_scope
from mooncake.kv_events import BlockRemoved, BlockStored, ForeignHash, KvEvent
from mooncake.prefix import BlockKey
from mooncake.types import InstanceId, Tier

FULL = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
SLIDING = frozenset({"sliding_window", "sliding_window_mla"})
STATE = frozenset({"mamba"})
MOST_GROUPS = 32
"""Models have fewer than ten; a publisher that names more is refused."""

TOO_MANY = "too many groups"
UNKNOWN_KIND = "unknown kind"
NO_FULL_ATTENTION = "no full attention"
BLOCK_SIZE = "block size"

_WHOLE = 1 << MOST_GROUPS
"""Bit of blocks that were stored without a group: they count for every group."""


class _Group(NamedTuple):
    kind: str
    window: int
    block_tokens: int
    "0 until known, -1 when they differ."


class _View(NamedTuple):
    """What follows from the groups that are known."""

    is_plain: bool = True
    refusal: str = ""
    "Why nothing can be said about blocks."
    block_tokens: int = 0
    full: int = 0
    "Bits of the full-attention groups."
    windows: tuple[tuple[Window, int], ...] = ()
    "Windows with the bits of their groups."


class _Block:
    """An engine's block: the keys of ours that it is, and bits of the groups that have it, by tier."""

    __slots__ = ("copies", "groups", "keys", "scope")

    def __init__(self, scope: str, keys: list[BlockKey]) -> None:
        self.scope, self.keys = scope, keys
        self.groups = [0] * len(PLANE)
        self.copies: dict[int, int] = {}  # by bit: how often more than once it is on the device


class CacheGroups:
    """The groups of one publisher, and the blocks of those groups."""

    def __init__(self, instance: InstanceId, translation: KeyTranslation) -> None:
        self._instance = instance
        self._translation = translation
        self._groups: dict[int, _Group] = {}
        self._bits: dict[int, int] = {}
        self._view: _View | None = None
        # An earlier publisher of this instance may have announced windows; our own workers have none.
        self._announced: tuple[Window, ...] | None = None if translation.block_tokens else ()
        self._blocks: dict[ForeignHash, _Block] = {}
        self._added: dict[tuple[ForeignHash, int], int] = {}
        """Bits that stores of the batch at hand have added, by block and tier."""

    @property
    def is_plain(self) -> bool:
        """Whether blocks are whole, so that the translation alone is enough."""
        return self._view is None or self._view.is_plain

    @property
    def refusal(self) -> str:
        """Why the publisher's blocks count as unknown; empty when they are known."""
        return "" if self._view is None else self._view.refusal

    def learn(self, events: Iterable[KvEvent]) -> list[Fact]:
        """Note the groups that a batch names. When they change the meaning of blocks, all are forgotten."""
        has_news = self._view is None
        for event in events:
            if isinstance(event, BlockStored):
                number = event.group_idx
                if number is not None and not self._agrees(self._groups.get(number), event):
                    has_news = True
                    self._note(number, event)
        if not has_news:
            return []
        before, self._view = self._view, self._judge()
        if before == self._view:
            return []
        facts: list[Fact] = []
        if before is not None:
            self.clear()
            facts.append(BlocksCleared(self._instance, "regrouped"))
        windows = tuple(window for window, _ in self._view.windows)
        if windows != self._announced:
            facts.append(PrefixWindows(self._instance, list(windows)))
            self._announced = windows
        return [*facts, Silent(self._instance)] if self._view.refusal else facts

    def facts(self, events: Sequence[BlockStored | BlockRemoved]) -> list[Fact]:
        """What changes for the index by events of a hybrid model, those of one batch without a clear in it.

        They are applied in the publisher's order: a block may be removed and stored again in one batch. Only
        the tokens are read in advance, because an engine may store a block for a window before the group
        with full attention, whose event has the tokens. So a block is forgotten at the end of the events.
        """
        assert self._view is not None and not self._view.is_plain and not self._view.refusal
        for event in events:
            if isinstance(event, BlockStored) and self._may_have_tokens(event):
                self._translate(event)
        self._added.clear()
        facts: list[Fact] = []
        empty: dict[ForeignHash, None] = {}
        for event in events:
            if isinstance(event, BlockRemoved) or not self._is_report(event):
                facts += self._applied(event, empty)
        dead = [foreign for foreign in empty if not any(self._blocks[foreign].groups)]
        for foreign in dead:
            del self._blocks[foreign]
        if dead:
            self._translation.removed(BlockRemoved(dead))
        return facts

    def _applied(self, event: BlockStored | BlockRemoved, empty: dict[ForeignHash, None]) -> list[Fact]:
        """Apply an event; blocks that no group has any longer are entered in ``empty``."""
        plane = PLANE[tier_of(event)]
        bit = _WHOLE if event.group_idx is None else self._bits.get(event.group_idx, 0)
        changed: dict[tuple[str, bool], list[BlockKey]] = {}
        for foreign in event.block_hashes:
            block = self._blocks.get(foreign)
            if block is None:
                continue
            before = block.groups[plane]
            after = block.groups[plane] = _after(block, event, plane, bit)
            if new := after & ~before:
                self._added[foreign, plane] = self._added.get((foreign, plane), 0) | new
            for scope, mask in self._scopes(block.scope):
                was, is_held = _has(before, mask), _has(after, mask)
                if was != is_held:
                    changed.setdefault((scope, is_held), []).extend(block.keys)
            if not any(block.groups):
                empty[foreign] = None
        tier = tier_of(event)
        return [self._fact(event, keys, tier, scope, is_held) for (scope, is_held), keys in changed.items()]

    def clear(self) -> None:
        """Forget all blocks; the groups stay known."""
        self._blocks.clear()
        self._translation.clear()

    def restart(self) -> None:
        """Forget all."""
        self.clear()
        self._groups.clear()
        self._bits.clear()
        self._view = None

    # --- groups

    def _agrees(self, known: _Group | None, event: BlockStored) -> bool:
        """Whether an event says nothing new about its group. Only the device's blocks are all of one size."""
        if known is None:
            return self.refusal == TOO_MANY
        is_sized = not event.block_size or tier_of(event) is not Tier.DEVICE
        return (is_sized or known.block_tokens in (event.block_size, -1)) and (
            event.kv_cache_spec_kind is None
            or (event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window or 0) == known[:2]
        )

    def _note(self, number: int, event: BlockStored) -> None:
        if number not in self._groups and len(self._groups) > MOST_GROUPS:
            return  # refused already by this batch
        kind, window, size = self._groups.get(number, _Group("", 0, 0))
        if event.kv_cache_spec_kind is not None:
            kind, window = event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window or 0
        if event.block_size and tier_of(event) is Tier.DEVICE:
            size = event.block_size if size in (0, event.block_size) else -1
        self._groups[number] = _Group(kind, window, size)
        self._bits.setdefault(number, 1 << len(self._bits))

    def _judge(self) -> _View:
        groups = [*self._groups.values()]
        if not groups or (len(groups) == 1 and groups[0].kind in FULL | {""}):
            return _View()
        if len(groups) > MOST_GROUPS:
            return _View(False, TOO_MANY)
        if any(not _is_judged(one) for one in groups):
            return _View(False, UNKNOWN_KIND)
        if not any(one.kind in FULL for one in groups):
            return _View(False, NO_FULL_ATTENTION)
        size, ours = max(one.block_tokens for one in groups), self._translation.block_tokens
        if size < 1 or not ours or size % ours or any(one.block_tokens not in (0, size) for one in groups):
            return _View(False, BLOCK_SIZE)
        full, step = 0, size // ours
        windows: dict[int, int] = {}
        for number, one in self._groups.items():
            if one.kind in FULL:
                full |= self._bits[number]
            else:
                tokens = one.window - 1 if one.kind in SLIDING else 1
                num_blocks = max(1, ceil(tokens / size)) * step
                windows[num_blocks] = windows.get(num_blocks, 0) | self._bits[number]
        return _View(
            False, "", size, full, tuple((Window(num, step), bits) for num, bits in sorted(windows.items()))
        )

    # --- blocks

    def _may_have_tokens(self, event: KvEvent) -> bool:
        if not isinstance(event, BlockStored) or self._view is None:
            return False
        return event.group_idx is None or bool(self._bits.get(event.group_idx, 0) & self._view.full)

    def _is_report(self, event: BlockStored) -> bool:
        """Whether an event names blocks that were reused, from the first of a prompt on: they could be used
        as they were. (vLLM then names blocks of a window, too, that are gone.) Stores of the same batch don't
        count: a computed block is stored for one group after the other."""
        if event.parent_block_hash is not None or event.group_idx is None or not self._is_dense(event):
            return False
        assert self._view is not None
        plane, width = PLANE[tier_of(event)], self._view.windows[0][0].step if self._view.windows else 1
        groups = [self._earlier(foreign, plane) for foreign in event.block_hashes]
        return all(_has(one, self._view.full) for one in groups) and all(
            _has(one, bits)
            for window, bits in self._view.windows
            for one in groups[-(window.num_blocks // width) :]
        )

    def _earlier(self, foreign: ForeignHash, plane: int) -> int:
        """The bits of a block without those that stores of this batch have added."""
        block = self._blocks.get(foreign)
        return 0 if block is None else block.groups[plane] & ~self._added.get((foreign, plane), 0)

    def _is_dense(self, event: BlockStored) -> bool:
        """Whether the event has the tokens of each of its blocks, and no others."""
        assert self._view is not None
        size = self._view.block_tokens
        return event.block_size == size and len(event.token_ids or ()) == size * len(event.block_hashes)

    def _translate(self, event: BlockStored) -> None:
        """Enter the event's blocks, as far as they can be translated."""
        assert self._view is not None
        if not self._is_dense(event):
            return
        scope, keys = self._translation.stored(msgspec.structs.replace(event, medium=None))
        width = self._view.block_tokens // self._translation.block_tokens
        for at, foreign in zip(range(0, len(keys) - width + 1, width), event.block_hashes, strict=False):
            if foreign not in self._blocks:
                self._blocks[foreign] = _Block(scope, keys[at : at + width])

    def _scopes(self, scope: str) -> list[tuple[str, int]]:
        assert self._view is not None
        windows = [(window_scope(scope, one.num_blocks), bits) for one, bits in self._view.windows]
        return [(scope, self._view.full), *windows]

    def _fact(
        self,
        event: BlockStored | BlockRemoved,
        keys: list[BlockKey],
        tier: Tier,
        scope: str,
        is_held: bool,
    ) -> Fact:
        if is_held:
            return BlocksStored(self._instance, keys, tier, scope)
        reason = event.reason if isinstance(event, BlockRemoved) and event.reason else "evicted"
        return BlocksRemoved(self._instance, keys, tier, scope, reason)


def _is_judged(group: _Group) -> bool:
    return group.kind in FULL | STATE or (group.kind in SLIDING and group.window > 0)


def _after(block: _Block, event: BlockStored | BlockRemoved, plane: int, bit: int) -> int:
    """The bits of a block on a tier after an event; copies on the device are counted."""
    before = block.groups[plane]
    is_counted = plane == PLANE[Tier.DEVICE] and bit != _WHOLE
    if isinstance(event, BlockStored):
        if is_counted and before & bit:
            block.copies[bit] = block.copies.get(bit, 0) + 1
        return before | bit
    if event.group_idx is None:
        if plane == PLANE[Tier.DEVICE]:
            block.copies.clear()
        return 0
    if is_counted and block.copies.get(bit):
        block.copies[bit] -= 1
        return before & ~_WHOLE
    return before & ~(bit | _WHOLE)


def _has(groups: int, wanted: int) -> bool:
    return bool(groups & _WHOLE) or groups & wanted == wanted

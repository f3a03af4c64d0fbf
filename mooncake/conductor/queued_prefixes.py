# SPDX-License-Identifier: Apache-2.0
"""What an instance will have in its cache once the prompts that wait there are computed.

It owns this relation, from blocks to the instances on which a prompt with them waits, and refuses to know
loads. The index of blocks learns of a prompt's blocks when they are computed. In a burst many prompts with a
new prefix arrive before that, and each would seem to need all of its computing: they would be spread over
instances that each compute the prefix, and be rejected for a queue that is much shorter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from mooncake.conductor.keyed_prompt import KeyedPrompt
from mooncake.prefix import BlockKey

_MOST_DEPTHS = 8
"""A decision must not take long because prompts with many lengths of a prefix wait."""


class AwaitedBlocks(NamedTuple):
    """Instances on which prompts with this number of leading blocks wait."""

    num_blocks: int
    slots: list[int]
    turns: list[float]
    "By instance: the lowest turn of those prompts, -inf for one that is being computed."


class QueuedPrefixes:
    """The blocks of the prompts that wait or are computed, by slot."""

    def __init__(self) -> None:
        # By block and slot: the number of prompts with it that wait there, and the lowest turn of them.
        self._slots: dict[BlockKey, dict[int, tuple[int, float]]] = {}

    def __repr__(self) -> str:
        return f"<QueuedPrefixes {len(self._slots)} keys>"

    def add(self, slot: int, prompt: KeyedPrompt, turn: float) -> Sequence[BlockKey]:
        """Add a prompt, which is computed in the order of turns; returns the keys with which to remove it."""
        added = prompt.keys_at(prompt.points())
        for key in added:
            slots = self._slots.get(key)
            if slots is None:
                self._slots[key] = {slot: (1, turn)}
            else:
                num_prompts, lowest = slots.get(slot, (0, turn))
                slots[slot] = num_prompts + 1, min(lowest, turn)
        return added

    def remove(self, slot: int, added: Sequence[BlockKey]) -> None:
        for key in added:
            slots = self._slots[key]
            num_prompts, lowest = slots[slot]
            if num_prompts > 1:
                slots[slot] = num_prompts - 1, lowest
            elif len(slots) > 1:
                del slots[slot]
            else:
                del self._slots[key]

    def begin(self, slot: int, added: Sequence[BlockKey]) -> None:
        """Record that a prompt is being computed, and is no longer overtaken."""
        for key in added:
            slots = self._slots[key]
            slots[slot] = slots[slot][0], -math.inf

    def reach(self, prompt: KeyedPrompt) -> list[AwaitedBlocks]:
        """The leading blocks of ``prompt`` that will be there, the most first; a slot may be in several.

        A prompt that waits with some of its blocks mostly waits with those before, so that only places with
        more slots than deeper ones are looked at.
        """
        points, found = prompt.points(), list[AwaitedBlocks]()
        keys = prompt.keys_at(points)
        if self._slots.keys().isdisjoint(keys):
            return found
        num_slots = 0
        for place, key in zip(reversed(points), reversed(keys), strict=True):
            slots = self._slots.get(key, {})
            if len(slots) > num_slots:
                num_slots = len(slots)
                found.append(AwaitedBlocks(place + 1, [*slots], [turn for _, turn in slots.values()]))
                if len(found) == _MOST_DEPTHS:
                    break
        return found

    @property
    def num_entries(self) -> int:
        """Number of keys of all prompts together."""
        return sum(num for slots in self._slots.values() for num, _ in slots.values())

    def check(self) -> None:
        for slots in self._slots.values():
            assert slots and all(num_prompts > 0 for num_prompts, _ in slots.values())

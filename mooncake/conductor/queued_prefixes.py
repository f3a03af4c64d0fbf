# SPDX-License-Identifier: Apache-2.0
"""What an instance will have in its cache once the prompts that wait there are computed.

It owns this relation, from blocks to the instances on which a prompt with them waits, and refuses to know
loads. The index of blocks learns of a prompt's blocks when they are computed. In a burst many prompts with a
new prefix arrive before that, and each would seem to need all of its computing: they would be spread over
instances that each compute the prefix, and be rejected for a queue that is much shorter.
"""

from __future__ import annotations

from collections.abc import Sequence

from mooncake.conductor.keyed_prompt import KeyedPrompt
from mooncake.prefix import BlockKey


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

    def reach(self, prompt: KeyedPrompt) -> dict[int, tuple[int, float]]:
        """By slot: the number of leading blocks of ``prompt`` that will be there, and after which turn."""
        found: dict[int, tuple[int, float]] = {}
        points = prompt.points()
        keys = prompt.keys_at(points)
        if not self._slots.keys().isdisjoint(keys):
            for place, key in zip(reversed(points), reversed(keys), strict=True):
                for slot, (_, turn) in self._slots.get(key, {}).items():
                    found.setdefault(slot, (place + 1, turn))
        return found

    def check(self) -> None:
        for slots in self._slots.values():
            assert slots and all(num_prompts > 0 for num_prompts, _ in slots.values())

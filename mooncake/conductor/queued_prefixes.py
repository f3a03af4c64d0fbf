# SPDX-License-Identifier: Apache-2.0
"""What an instance will have in its cache once the prompts that wait there are computed.

It owns this relation, from blocks to the instances on which a prompt with them waits, and refuses to know
loads. The index of blocks learns of a prompt's blocks when they are computed. In a burst many prompts with a
new prefix arrive before that, and each would seem to need all of its computing: they would be spread over
instances that each compute the prefix, and be rejected for a queue that is much shorter.
"""

from __future__ import annotations

from dataclasses import dataclass

from mooncake.conductor.keyed_prompt import KeyedPrompt
from mooncake.prefix import BlockKey


@dataclass(slots=True)
class _Waiting:
    """The prompts with one block that wait on one instance."""

    turn: float
    "The lowest turn of them."
    num_prompts: int = 1


class QueuedPrefixes:
    """The blocks of the prompts that wait or are computed, by slot."""

    def __init__(self) -> None:
        self._slots: dict[BlockKey, dict[int, _Waiting]] = {}

    def __repr__(self) -> str:
        return f"<QueuedPrefixes {len(self._slots)} keys>"

    def add(self, slot: int, prompt: KeyedPrompt, turn: float) -> list[BlockKey]:
        """Add a prompt, which is computed in the order of turns; returns the keys with which to remove it."""
        added = [prompt.keys[place] for place in prompt.points()]
        for key in added:
            slots = self._slots.setdefault(key, {})
            waiting = slots.get(slot)
            if waiting is None:
                slots[slot] = _Waiting(turn)
            else:
                waiting.turn = min(waiting.turn, turn)
                waiting.num_prompts += 1
        return added

    def remove(self, slot: int, added: list[BlockKey]) -> None:
        for key in added:
            slots = self._slots[key]
            waiting = slots[slot]
            waiting.num_prompts -= 1
            if not waiting.num_prompts:
                del slots[slot]
                if not slots:
                    del self._slots[key]

    def reach(self, prompt: KeyedPrompt) -> dict[int, tuple[int, float]]:
        """By slot: the number of leading blocks of ``prompt`` that will be there, and after which turn."""
        found: dict[int, tuple[int, float]] = {}
        if self._slots:
            for place in reversed(prompt.points()):
                for slot, waiting in self._slots.get(prompt.keys[place], {}).items():
                    found.setdefault(slot, (place + 1, waiting.turn))
        return found

    def check(self) -> None:
        for slots in self._slots.values():
            assert slots and all(waiting.num_prompts > 0 for waiting in slots.values())

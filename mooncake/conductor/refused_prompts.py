# SPDX-License-Identifier: Apache-2.0
"""Prompts that were refused for their own length, to recognize those that come again.

It owns the counts and refuses to know seconds, SLOs and instances. A prompt that takes longer to compute
than its TTFT SLO is late however it is served, but once it is computed, those that begin like it are short. A
prefix that many prompts share would never be computed if each of them were refused for it. To compute it is
worth its time once the computing that was refused would have paid for it: the rule for renting or buying (ski
rental: Karlin et al., "Competitive snoopy caching", 1988).
"""

from __future__ import annotations

import math
from collections import OrderedDict

from mooncake.conductor.keyed_prompt import KeyedPrompt
from mooncake.prefix import BlockKey

ONCE_S = 60.0
"""A prompt that is sent again within this time is a repetition by its client, not another one."""


class RefusedPrompts:
    """How often each prefix was refused; ``capacity``: number of keys, of which the oldest are dropped."""

    def __init__(self, capacity: int = 1 << 16) -> None:
        self._capacity = capacity
        self._counts: OrderedDict[BlockKey, int] = OrderedDict()
        self._counted_at: OrderedDict[BlockKey, float] = OrderedDict()
        """By the last block of a prompt: when it was counted."""

    def __repr__(self) -> str:
        return f"<RefusedPrompts {len(self._counts)} keys>"

    def add(self, prompt: KeyedPrompt, now: float) -> None:
        """Count a refused prompt."""
        if not prompt.keys or now < self._counted_at.get(prompt.keys[-1], -math.inf) + ONCE_S:
            return
        self._counted_at.pop(prompt.keys[-1], None)
        self._counted_at[prompt.keys[-1]] = now
        for key in prompt.keys_at(prompt.points()):
            self._counts[key] = self._counts.pop(key, 0) + 1
        for table in (self._counts, self._counted_at):
            while len(table) > self._capacity:
                table.popitem(last=False)

    def repeats(self, prompt: KeyedPrompt) -> float:
        """How many times what must be computed of this prompt was refused, as the mean of its blocks."""
        counts = [self._counts.get(key, 0) for key in prompt.keys_at(prompt.points())]
        return sum(counts) / len(counts) if counts else 0.0

    def forget(self, prompt: KeyedPrompt) -> None:
        """Forget a prompt that is computed now."""
        for key in prompt.keys[prompt.num_cached :]:
            self._counts.pop(key, None)

    def check(self) -> None:
        assert max(len(self._counts), len(self._counted_at)) <= self._capacity
        assert all(count >= 1 for count in self._counts.values())

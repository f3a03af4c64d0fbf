# SPDX-License-Identifier: Apache-2.0
"""Prompts that were refused for their own length, to recognize those that come again.

It owns the counts and refuses to know seconds, SLOs and instances. A prompt that takes longer to compute
than its TTFT SLO is late however it is served, but once it is computed, those that begin like it are short. A
prefix that many prompts share would never be computed if each of them were refused for it. To compute it is
worth its time once the computing that was refused would have paid for it: the rule for renting or buying (ski
rental: Karlin et al., "Competitive snoopy caching", 1988).

A block's key stands for all tokens up to its end, so it is enough to look at some blocks of a prompt: those
at multiples of a power of two, of which every prompt has at most ``POINTS``. A longer prompt looks at a part
of the blocks that a shorter one was counted at.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mooncake.prefix import BlockKey

POINTS = 64
"""Number of blocks of a prompt that are looked at, at most."""


class KeyedPrompt(NamedTuple):
    """A prompt by the keys of its blocks."""

    keys: Sequence[BlockKey] = ()
    "Its full blocks, in order."
    num_cached: int = 0
    "Leading blocks that need not be computed."


NO_KEYS = KeyedPrompt()


class RefusedPrompts:
    """How often each prefix was refused; ``capacity``: number of keys, of which the oldest are dropped."""

    def __init__(self, capacity: int = 1 << 16) -> None:
        self._capacity = capacity
        self._counts: OrderedDict[BlockKey, int] = OrderedDict()

    def __repr__(self) -> str:
        return f"<RefusedPrompts {len(self._counts)} keys>"

    def add(self, prompt: KeyedPrompt) -> None:
        """Count a refused prompt."""
        for key in _points(prompt):
            self._counts[key] = self._counts.pop(key, 0) + 1
        while len(self._counts) > self._capacity:
            self._counts.popitem(last=False)

    def repeats(self, prompt: KeyedPrompt) -> float:
        """How many times what must be computed of this prompt was refused, as the mean of its blocks."""
        counts = [self._counts.get(key, 0) for key in _points(prompt)]
        return sum(counts) / len(counts) if counts else 0.0

    def forget(self, prompt: KeyedPrompt) -> None:
        """Forget a prompt that is computed now."""
        for key in _points(prompt):
            self._counts.pop(key, None)

    def check(self) -> None:
        assert len(self._counts) <= self._capacity
        assert all(count >= 1 for count in self._counts.values())


def _points(prompt: KeyedPrompt) -> Iterator[BlockKey]:
    """The keys at the blocks that are looked at, without those cached."""
    (keys, num_cached), stride = prompt, 1
    while stride * POINTS < len(keys):
        stride *= 2
    first = -(-(num_cached + 1) // stride) * stride - 1
    return (keys[position] for position in range(first, len(keys), stride))

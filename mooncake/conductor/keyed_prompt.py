# SPDX-License-Identifier: Apache-2.0
"""A prompt by the keys of its blocks, and the few of them by which prompts are compared.

A block's key stands for all tokens up to its end, so two prompts that have a block in common begin alike. It
is enough to look at some of those that are not cached: at multiples of a power of two, of which every prompt
has at most ``POINTS``. A longer prompt looks at a part of the blocks that a shorter one looks at.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mooncake.prefix import BlockKey

POINTS = 32
"""Number of blocks of a prompt that are looked at, at most."""


class KeyedPrompt(NamedTuple):
    """A prompt by the keys of its blocks."""

    keys: Sequence[BlockKey] = ()
    "Its full blocks, in order."
    num_cached: int = 0
    "Leading blocks that need not be computed."

    def points(self) -> range:
        """The places of the blocks that are looked at, without those cached."""
        (keys, num_cached), stride = self, 1
        while stride * POINTS < len(keys) - num_cached:
            stride *= 2
        return range(-(-(num_cached + 1) // stride) * stride - 1, len(keys), stride)

    def keys_at(self, points: range) -> Sequence[BlockKey]:
        return self.keys[points.start :: points.step]


NO_KEYS = KeyedPrompt()

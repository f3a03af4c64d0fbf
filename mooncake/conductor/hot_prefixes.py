# SPDX-License-Identifier: Apache-2.0
"""Which prefixes are hot, and whether one more instance should keep a copy.

A prefix that many requests begin with makes its only holder's card and processor the bottleneck of all of
them; a copy on every instance would evict what others need. So copies follow use: a prefix deserves one
holder per ``uses_per_copy`` uses a minute, gets another when it has fewer than it deserves, and none once it
has enough. Nothing is removed here: a copy that is no longer used is the first that its instance evicts.
"""

from __future__ import annotations

import math

from mooncake.prefix import BlockKey

_HALF_LIFE_S = 60.0
_MAX_KEYS = 65_536


class HotPrefixes:
    """How often prefixes are used, by the key of their last block."""

    def __init__(self, uses_per_copy: float) -> None:
        self._uses_per_copy = uses_per_copy
        self._heat: dict[BlockKey, tuple[float, float]] = {}  # decayed uses, and their instant; latest last

    def note(self, key: BlockKey, now: float) -> None:
        """Record that a request begins with the prefix that ends in ``key``."""
        uses = self.uses(key, now) + 1
        self._heat.pop(key, None)
        self._heat[key] = (uses, now)
        if len(self._heat) > _MAX_KEYS:
            del self._heat[next(iter(self._heat))]

    def uses(self, key: BlockKey, now: float) -> float:
        """Exponentially decayed number of uses; a use counts half after a minute."""
        uses, at = self._heat.get(key, (0.0, now))
        return uses * math.exp2((at - now) / _HALF_LIFE_S)

    def wants_copy(self, key: BlockKey, num_holders: int, now: float) -> bool:
        return self.uses(key, now) >= num_holders * self._uses_per_copy

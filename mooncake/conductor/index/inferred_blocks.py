# SPDX-License-Identifier: Apache-2.0
"""Blocks that instances without KV events are assumed to hold: those of their prompts, latest first.

Owns the guess and its bound. It may be wrong, since an engine evicts by its own rules, and the index that it
feeds holds only hints; but it makes the second turn of a session go where the first one went.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from mooncake.prefix import BlockKey
from mooncake.types import InstanceId


class InferredBlocks:
    """Up to ``limit_blocks`` assumed blocks of each instance."""

    def __init__(self, limit_blocks: int) -> None:
        self._limit_blocks = limit_blocks
        self._blocks: dict[InstanceId, OrderedDict[BlockKey, None]] = {}

    def note(self, instance: InstanceId, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Record a prompt given to an instance. Returns the blocks it is assumed to have evicted for it."""
        blocks = self._blocks.setdefault(instance, OrderedDict())
        for key in reversed(keys[: self._limit_blocks]):  # a prefix is evicted after what follows it
            blocks[key] = None
            blocks.move_to_end(key)
        return [blocks.popitem(last=False)[0] for _ in range(len(blocks) - self._limit_blocks)]

    def forget(self, instance: InstanceId) -> None:
        self._blocks.pop(instance, None)

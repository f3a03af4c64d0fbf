"""What instances that don't tell are taken to hold: the blocks of the prompts they were given, latest first.

Owns the guess and its bound. It is one, since an engine keeps what it likes, and the index it goes into is
only hints; but it is what makes a second turn go where the first one went.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from mooncake.prefix import BlockKey
from mooncake.types import InstanceId


class InferredBlocks:
    """Up to ``limit_blocks`` of each instance."""

    def __init__(self, limit_blocks: int) -> None:
        self._limit_blocks = limit_blocks
        self._blocks: dict[InstanceId, OrderedDict[BlockKey, None]] = {}

    def note(self, instance: InstanceId, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """It was given a prompt of these blocks. Returns those that it is taken to have dropped for them."""
        blocks = self._blocks.setdefault(instance, OrderedDict())
        for key in reversed(keys[: self._limit_blocks]):  # a prefix outlives what follows it
            blocks[key] = None
            blocks.move_to_end(key)
        return [blocks.popitem(last=False)[0] for _ in range(len(blocks) - self._limit_blocks)]

    def forget(self, instance: InstanceId) -> None:
        self._blocks.pop(instance, None)

# SPDX-License-Identifier: Apache-2.0
"""The KV cache of one simulated node: blocks in its memory, and behind them those on its SSD.

It owns what happens between the two tiers and the events that the conductor gets; the order of eviction is
that of ``inference.blocks.BlockPool``, the same object that an engine has. What leaves memory goes to SSD if
there is one; what is read from SSD is in memory again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic

from mooncake.inference.blocks import BlockPool, KeyT, PoolBlocksStored


class NodeCache(Generic[KeyT]):
    """``stored``, ``removed`` and the like collect the changes until the caller takes and empties them."""

    __slots__ = ("pool", "removed", "ssd", "ssd_removed", "ssd_stored", "stored")

    def __init__(self, pool: BlockPool[KeyT], ssd: BlockPool[KeyT] | None = None) -> None:
        self.pool = pool
        self.ssd = ssd
        self.stored: list[KeyT] = []
        self.removed: list[KeyT] = []
        self.ssd_stored: list[KeyT] = []
        self.ssd_removed: list[KeyT] = []

    def __repr__(self) -> str:
        return f"NodeCache({self.pool} ssd={self.ssd})"

    def match(self, keys: Sequence[KeyT]) -> list[int]:
        """Ids of the leading blocks in memory."""
        return self.pool.match(keys)

    def num_on_ssd(self, keys: Sequence[KeyT]) -> int:
        """How many of ``keys``, from the first on, are on SSD."""
        return len(self.ssd.match(keys)) if self.ssd is not None else 0

    def pin(self, block_ids: Sequence[int]) -> None:
        self.pool.touch(block_ids)

    def unpin(self, block_ids: Sequence[int]) -> None:
        self.pool.free(block_ids)

    def keep(self, keys: Sequence[KeyT]) -> list[int]:
        """Keep new blocks, as many from the first on as find room; return their ids, pinned."""
        block_ids = self.pool.allocate(min(len(keys), self.pool.num_free))
        assert block_ids is not None
        self.name(block_ids, keys[: len(block_ids)])
        return block_ids

    def name(self, block_ids: Sequence[int], keys: Sequence[KeyT]) -> None:
        """These pinned blocks now hold ``keys``, and can be found."""
        if keys:
            self.pool.publish(block_ids, keys, keys[0])
        self.note_events()

    def note_events(self) -> None:
        """Record what the pool did since the last call as events."""
        for event in self.pool.drain_events():
            if isinstance(event, PoolBlocksStored):
                self.stored.extend(event.hashes)
            else:
                self.removed.extend(event.hashes)
                if self.ssd is not None:
                    self._demote(event.hashes)

    def _demote(self, keys: Sequence[KeyT]) -> None:
        ssd = self.ssd
        assert ssd is not None
        known = [key for key in keys if ssd.match((key,))]
        for key in known:  # they were used: move them to the end of the eviction order
            ids = ssd.match((key,))
            ssd.touch(ids)
            ssd.free(ids)
        held = dict.fromkeys(known)
        fresh = [key for key in keys if key not in held][: ssd.num_free]
        block_ids = ssd.allocate(len(fresh))
        assert block_ids is not None
        if fresh:
            ssd.publish(block_ids, fresh, fresh[0])
        ssd.free(block_ids)
        for event in ssd.drain_events():
            if isinstance(event, PoolBlocksStored):
                self.ssd_stored.extend(event.hashes)
            else:
                self.ssd_removed.extend(event.hashes)

    def check(self) -> None:
        self.pool.check()
        if self.ssd is not None:
            self.ssd.check()

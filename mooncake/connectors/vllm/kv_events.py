"""KV events of blocks that came to the pool, in the shape in which vLLM publishes its own.

A block is told of when all ranks have stored their shards of it: only then can it be found.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_events import BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from mooncake.connectors.planner import BlockName, SavePlan

MEDIUM = "cpu"
"""The memory of the pool's nodes, as others' connectors call it."""


class StoredEvents:
    """Blocks on their way to the pool, until they can be told of or are known not to have arrived."""

    def __init__(self, num_ranks: int, block_tokens: int) -> None:
        self._num_ranks = num_ranks
        self._block_tokens = block_tokens
        self._coming: dict[BlockName, tuple[int, Any]] = {}
        self._names: dict[int, tuple[tuple[BlockName, ...], int]] = {}
        """By save: its blocks, and how many ranks are not done with it."""
        self._told: list[Any] = []

    def saves(self, plan: SavePlan, request: Any) -> None:
        """These blocks of the request are being saved, the last it has full."""
        tokens = self._block_tokens
        adapter = request.lora_request
        self._names[plan.number] = (plan.names, self._num_ranks)
        for name, index in zip(
            plan.names, range(plan.first_block, plan.first_block + len(plan.names)), strict=True
        ):
            hashes = request.block_hashes
            event = BlockStored(
                block_hashes=[maybe_convert_block_hash(hashes[index])],
                parent_block_hash=maybe_convert_block_hash(hashes[index - 1]) if index else None,
                token_ids=list(request.all_token_ids[index * tokens : (index + 1) * tokens]),
                block_size=tokens,
                lora_id=adapter.adapter_id if adapter else None,
                medium=MEDIUM,
                lora_name=adapter.lora_name if adapter else None,
                group_idx=0,
            )
            self._coming[name] = (self._num_ranks, event)

    def stored(self, stored: Mapping[BlockName, int], saved: Mapping[int, int]) -> None:
        """So many ranks have stored these blocks, and are done with these saves."""
        for name, num_ranks in stored.items():
            if name in self._coming:
                missing, event = self._coming[name]
                self._coming[name] = (missing - num_ranks, event)
                if missing == num_ranks:
                    self._told.append(self._coming.pop(name)[1])
        for number, num_ranks in saved.items():
            if number in self._names:
                names, missing = self._names[number]
                self._names[number] = (names, missing - num_ranks)
                if missing == num_ranks:
                    del self._names[number]
                    for name in names:
                        self._coming.pop(name, None)

    def take(self) -> list[Any]:
        told, self._told = self._told, []
        return told

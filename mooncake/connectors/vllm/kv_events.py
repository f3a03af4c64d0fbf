# SPDX-License-Identifier: Apache-2.0
"""KV events of blocks that were stored in the pool, in the format in which vLLM publishes its own.

A block's event is published when all ranks have stored their shards of it: only then can it be found.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_events import BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from mooncake.connectors.planner import BlockName, SavePlan

MEDIUM = "cpu"
"""Medium of the pool's memory in the events, the same as in other projects' connectors."""


class StoredEvents:
    """Blocks that are being saved, until their events can be published or they are known not to be stored."""

    def __init__(self, num_ranks: int, block_tokens: int) -> None:
        self._num_ranks = num_ranks
        self._block_tokens = block_tokens
        self._pending: dict[BlockName, tuple[int, Any]] = {}
        self._names: dict[int, tuple[tuple[BlockName, ...], int]] = {}
        """By save: its blocks, and the number of ranks that are not done with it."""
        self._events: list[Any] = []

    def saves(self, plan: SavePlan, request: Any) -> None:
        """Record that blocks of the request are being saved."""
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
            self._pending[name] = (self._num_ranks, event)

    def stored(self, stored: Mapping[BlockName, int], saved: Mapping[int, int]) -> None:
        """Record the numbers of ranks that have stored blocks and that are done with saves."""
        for name, num_ranks in stored.items():
            if name in self._pending:
                missing, event = self._pending[name]
                self._pending[name] = (missing - num_ranks, event)
                if missing == num_ranks:
                    self._events.append(self._pending.pop(name)[1])
        for number, num_ranks in saved.items():
            if number in self._names:
                names, missing = self._names[number]
                self._names[number] = (names, missing - num_ranks)
                if missing == num_ranks:
                    del self._names[number]
                    for name in names:
                        self._pending.pop(name, None)

    def take(self) -> list[Any]:
        events, self._events = self._events, []
        return events

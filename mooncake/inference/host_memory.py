# SPDX-License-Identifier: Apache-2.0
"""A worker's KV as transfer sees it: in the pool itself, or in a staging area in front of a device.

Transfer moves host memory. A pool on the CPU *is* host memory, so blocks are read and written in
place. A pool on a device is reached through a pinned staging area: slots of one block each, filled
from the device after a layer is computed, emptied into it before a layer is needed. Both have the same
interface (``connectors.memory.HostMemory``), so that the link need not know where torch computes.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from mooncake.connectors.memory import DeviceEvent, HostMemory, SlabMemory, StagedBlocks
from mooncake.kvlayout import Column, KvLayout


class StagedMemory:
    """The pool of a device worker, behind ``num_slots`` blocks of pinned host memory."""

    def __init__(self, layout: KvLayout, pool: torch.Tensor, num_slots: int) -> None:
        self._layout = layout
        self._pool = pool
        self._is_cuda = pool.device.type == "cuda"
        # A slot has the layout of a pool of one block, so that addresses come from the same formula.
        self.tensor = torch.zeros(
            (num_slots, *layout.pool_shape(1)), dtype=pool.dtype, pin_memory=self._is_cuda
        )
        self.buffers = [self.tensor]
        self._lock = threading.Lock()
        self._free = list(range(num_slots))
        self._draining: list[StagedBlocks] = []
        """Released slots from which the device still reads."""

    def hold(self, block_ids: Sequence[int]) -> StagedBlocks | None:
        with self._lock:
            self._draining = [held for held in self._draining if not self._reclaim(held)]
            if len(block_ids) > len(self._free):
                return None
            slots = [self._free.pop() for _ in block_ids]
        return StagedBlocks(list(block_ids), slots)

    def addresses(self, held: StagedBlocks, layer: int, members: Sequence[int]) -> Column:
        stride = self.tensor.stride(0) * self.tensor.element_size()
        first = self._layout.pool_addresses(self.tensor.data_ptr(), 1, layer, [0])
        column = first[None, :].repeat(len(members), axis=0)
        for row, index in enumerate(members):
            column[row] += held.slots[index] * stride
        return column.reshape(-1)

    def leave(self, held: StagedBlocks, layer: int, is_last: bool) -> int:
        for slot, block in zip(held.slots, held.block_ids, strict=True):
            self.tensor[slot, layer, :, 0].copy_(self._pool[layer, :, block], non_blocking=True)
        event = self._event()
        held.copied.append(event)
        if is_last and event is not None:
            event.synchronize()
        return next(
            (count for count, event in enumerate(held.copied) if event is not None and not event.query()),
            len(held.copied),
        )

    def enter(self, held: StagedBlocks, layer: int) -> None:
        for slot, block in zip(held.slots, held.block_ids, strict=True):
            self._pool[layer, :, block].copy_(self.tensor[slot, layer, :, 0], non_blocking=True)
        held.copied.append(self._event())

    def release(self, held: StagedBlocks) -> None:
        with self._lock:
            if not held.is_released:
                held.is_released = True
                if not self._reclaim(held):
                    self._draining.append(held)

    def _reclaim(self, held: StagedBlocks) -> bool:
        """Free the slots unless the device still copies; events end in order, the last one decides."""
        last = held.copied[-1] if held.copied else None
        if last is not None and not last.query():
            return False
        self._free.extend(held.slots)
        held.slots = []
        return True

    def _event(self) -> DeviceEvent | None:
        if not self._is_cuda:
            return None
        cuda: Any = torch.cuda
        event: Any = cuda.Event()
        event.record()
        found: DeviceEvent = event
        return found


def host_memory(layout: KvLayout, pool: torch.Tensor, staging_bytes: int) -> HostMemory:
    """The host memory for the device of ``pool``; ``staging_bytes`` bounds a device's staging area."""
    if pool.device.type == "cpu":
        assert pool.is_contiguous()
        base, num_blocks = pool.data_ptr(), int(pool.shape[2])
        layers = range(layout.num_layers)
        first = np.stack([layout.pool_addresses(base, num_blocks, layer, [0]) for layer in layers])
        return SlabMemory([pool], first, layout.chunk_bytes(layout.block_tokens))
    num_slots = max(1, min(int(pool.shape[2]), staging_bytes // layout.pool_bytes(1)))
    return StagedMemory(layout, pool, num_slots)

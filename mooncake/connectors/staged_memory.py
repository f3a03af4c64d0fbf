# SPDX-License-Identifier: Apache-2.0
"""A pool on a device as transfer sees it: through a bounded staging area of pinned host memory.

Transfer moves host memory. A layer that was computed is copied into slots of this area and stored from
there; a layer that was loaded into slots is copied into the pool before it is read. A slot has room for one
block of all layers. Saves and loads have halves of their own: a save keeps its slots until the engine has
computed all layers, which may need a load first.

The blocks of an operation are gathered on the device, then cross the bus in few large copies::

    pool     block 7 … block 2 … block 9        (one index_select per slab and layer)
    scratch  7 2 9
    host     slots 0 1 2 of layer, slab         (one copy per run of consecutive slots)

When copies begin and end is decided by events (``device_streams.py``); who waits for these, by
``store_link.py``.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mooncake.connectors.device_streams import KvDevice
from mooncake.connectors.memory import DeviceEvent, Purpose, SlabMemory, StagedBlocks
from mooncake.errors import InvalidArgument
from mooncake.kvlayout import Column

PIECES = 4
"""Operations that half of the area has room for: while one is moved, the next is copied."""

WORD_BYTES = 8
"""Size of the items that are gathered, where the slabs allow it: single bytes take several times as long."""


class _Half:
    """The slots of one purpose, and the stream of its copies."""

    def __init__(self, device: KvDevice, slots: range, slab_bytes: int, dtype: torch.dtype) -> None:
        self.free = list(slots)
        """A heap: the lowest slots first, so that an operation's slots tend to follow each other."""
        self.num_slots = len(slots)
        self.stream = device.new_stream()
        self.scratch = device.scratch_bytes(len(slots) * slab_bytes).view(dtype).view(len(slots), -1)


class StagedMemory:
    """The pool of a device, behind ``num_slots`` blocks of pinned host memory; see ``HostMemory``.

    Args:
        slabs: by layer and slab, the slabs of all blocks of the pool (``slab_views``): [blocks, items].
        num_slots: at least 2.
    """

    def __init__(self, device: KvDevice, slabs: Sequence[Sequence[Tensor]], num_slots: int) -> None:
        assert num_slots >= 2
        self._device, self._slabs = device, slabs
        rows = slabs[0][0]
        slab_bytes = rows.shape[1] * rows.element_size()
        shape = (len(slabs), len(slabs[0]), num_slots)
        host = device.host_bytes(int(np.prod(shape)) * slab_bytes)
        self._host = host.view(rows.dtype).view(*shape, rows.shape[1])
        self.buffers = [host]
        first = np.arange(shape[0] * shape[1], dtype=np.uint64).reshape(shape[:2])
        first = first * np.uint64(num_slots * slab_bytes) + np.uint64(host.data_ptr())
        self._slots = SlabMemory((), first, slab_bytes)
        self._lock = threading.Lock()
        middle = num_slots // 2
        self._halves: dict[Purpose, _Half] = {
            "save": _Half(device, range(middle), slab_bytes, rows.dtype),
            "load": _Half(device, range(middle, num_slots), slab_bytes, rows.dtype),
        }
        self.most_blocks = max(1, middle // PIECES)

    def has_room(self, num_blocks: int, purpose: Purpose) -> bool:
        return num_blocks <= len(self._halves[purpose].free)

    def hold(
        self, block_ids: Sequence[int], purpose: Purpose, after: DeviceEvent | None = None
    ) -> StagedBlocks | None:
        free = self._halves[purpose].free
        with self._lock:
            if len(block_ids) > len(free):
                return None
            slots = [heapq.heappop(free) for _ in block_ids]
        return StagedBlocks(list(block_ids), slots, purpose, after)

    def addresses(self, held: StagedBlocks, layer: int, members: Sequence[int]) -> Column:
        return self._slots.addresses(StagedBlocks(held.slots), layer, members)

    def computed(self) -> DeviceEvent | None:
        return self._device.computed()

    def leave(self, held: StagedBlocks, layer: int, computed: DeviceEvent | None) -> DeviceEvent | None:
        half, members = self._halves[held.purpose], tuple(range(len(held.slots)))
        scratch = half.scratch[: len(members)]
        runs = _runs(held.slots)

        def copy() -> None:
            blocks = self._indices(held, members)
            for slab, rows in enumerate(self._slabs[layer]):
                torch.index_select(rows, 0, blocks, out=scratch)
                for at, slot, count in runs:
                    here = self._host[layer, slab, slot : slot + count]
                    here.copy_(scratch[at : at + count], non_blocking=True)

        return half.stream.run(copy, computed)

    def enter(self, held: StagedBlocks, layer: int, members: Sequence[int]) -> DeviceEvent | None:
        half = self._halves[held.purpose]
        scratch = half.scratch[: len(members)]
        runs = _runs([held.slots[member] for member in members])

        def copy() -> None:
            blocks = self._indices(held, tuple(members))
            for slab, rows in enumerate(self._slabs[layer]):
                for at, slot, count in runs:
                    here = self._host[layer, slab, slot : slot + count]
                    scratch[at : at + count].copy_(here, non_blocking=True)
                rows.index_copy_(0, blocks, scratch)

        held.entered[layer] = event = half.stream.run(copy, held.after)
        return event

    def compute_after(self, held: StagedBlocks, layer: int) -> None:
        if (
            layer in held.entered
        ):  # the last copies of the layer, in a stream with order: the others end before
            self._device.compute_after(held.entered[layer])

    def release(self, held: StagedBlocks) -> None:
        with self._lock:
            if not held.is_released:
                held.is_released = True
                for slot in held.slots:
                    heapq.heappush(self._halves[held.purpose].free, slot)

    def _indices(self, held: StagedBlocks, members: tuple[int, ...]) -> Any:
        """Ids of these blocks on the device, in the stream that copies them."""
        if members not in held.indices:
            held.indices[members] = self._device.to_device([held.block_ids[member] for member in members])
        return held.indices[members]


def _runs(slots: Sequence[int]) -> list[tuple[int, int, int]]:
    """(position, slot, number) of the runs of consecutive slots."""
    starts = [at for at, slot in enumerate(slots) if at == 0 or slot != slots[at - 1] + 1]
    ends = [*starts[1:], len(slots)]
    return [(start, slots[start], end - start) for start, end in zip(starts, ends, strict=True)]


def slab_views(
    tensors: Sequence[Tensor], placed: SlabMemory, num_blocks: int, slab_bytes: int
) -> list[list[Tensor]]:
    """By layer and slab, the slabs of ``num_blocks`` blocks that ``placed`` describes: [blocks, items].

    Args:
        tensors: by layer, a tensor in whose storage its blocks lie.

    Raises:
        InvalidArgument: the blocks reach beyond the storage.
    """
    first, strides = placed.description()
    storages = [tensor.untyped_storage() for tensor in tensors]
    offsets = [
        [int(address) - storage.data_ptr() for address in row]
        for row, storage in zip(first, storages, strict=True)
    ]
    numbers = [slab_bytes, *map(int, strides), *(offset for row in offsets for offset in row)]
    item = WORD_BYTES if all(number % WORD_BYTES == 0 for number in numbers) else 1
    dtype = torch.int64 if item == WORD_BYTES else torch.uint8
    views = []
    for row, storage, stride in zip(offsets, storages, map(int, strides), strict=True):
        end = max(row) + (num_blocks - 1) * stride + slab_bytes
        if min(row) < 0 or end > storage.nbytes():
            # Not left to torch, which would enlarge the storage.
            raise InvalidArgument("kv_caches", f"blocks up to byte {end}", f"at most {storage.nbytes()}")
        shape, steps = (num_blocks, slab_bytes // item), (stride // item, 1)
        empty = torch.empty(0, dtype=dtype, device=storage.device)
        views.append([empty.clone().set_(storage, offset // item, shape, steps) for offset in row])
    return views


def staged(
    device: KvDevice,
    tensors: Sequence[Tensor],
    placed: SlabMemory,
    num_blocks: int,
    slab_bytes: int,
    staging_bytes: int,
) -> StagedMemory:
    """The blocks that ``placed`` describes, behind a staging area of about ``staging_bytes``.

    Raises:
        InvalidArgument: as ``slab_views``.
        OutOfMemory: the system does not lock so much memory.
    """
    slabs = slab_views(tensors, placed, num_blocks, slab_bytes)
    block_bytes = len(slabs) * len(slabs[0]) * slab_bytes
    return StagedMemory(device, slabs, max(2, min(2 * num_blocks, staging_bytes // block_bytes)))

# SPDX-License-Identifier: Apache-2.0
"""The blocks of an engine in memory that transfer can move: their addresses, and when they may be used.

An engine's KV cache is layers; a block has the same number of slabs in each, all of one length::

    layer 0   slab 0: block 0, block 1, block 2 …      slab 1: block 0, block 1, block 2 …
    layer 1   …                                        (K and V apart: two slabs; together: one)

``SlabMemory`` is the usual case, memory that is read and written in place. Where bytes must pass
through other memory first (a device that transfer can't reach), the engine's package has its own
``HostMemory``.

The slabs of an engine's tensors follow from their shapes and strides alone. A block of a tensor is what one
index of its block dimension selects. In memory that is one run of bytes or several equal ones, depending on
the order of the other dimensions; a run is a slab. Its contents (keys, values, packed for some instruction
set) do not matter.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from mooncake.errors import InvalidArgument
from mooncake.kvlayout import Column, SlabLayout
from mooncake.prefix import BlockHash
from mooncake.types import ObjectKey


class ObjectLayout(Protocol):
    """Layout of a block as an object of the store: chunks of equal length, layer by layer.

    ``KvLayout`` and ``SlabLayout`` implement it.
    """

    @property
    def num_layers(self) -> int: ...

    @property
    def num_slabs(self) -> int: ...

    def chunk_bytes(self, num_tokens: int) -> int: ...

    def object_bytes(self, num_tokens: int) -> int: ...

    def object_offsets(self, layer: int, num_tokens: int) -> tuple[int, ...]: ...


class CacheIdentity(Protocol):
    """Identity of the blocks' contents, part of each key: ``KvIdentity`` or ``ForeignIdentity``."""

    @property
    def layout(self) -> ObjectLayout: ...

    def key(self, block_hash: BlockHash) -> ObjectKey: ...


class DeviceEvent(Protocol):
    """The part of ``torch.cuda.Event`` that is used here."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


@dataclasses.dataclass(eq=False)
class StagedBlocks:
    """Host memory for some blocks of the pool, from ``hold`` to ``release``."""

    block_ids: list[int]
    slots: list[int] = dataclasses.field(default_factory=list)
    copied: list[DeviceEvent | None] = dataclasses.field(default_factory=list)
    """With a device: one event for each layer that is being copied to the host."""
    is_released: bool = False


class HostMemory(Protocol):
    """The host memory of a KV pool. ``leave`` and ``enter`` are called on the engine's thread."""

    @property
    def buffers(self) -> Sequence[Any]:
        """The host memory, to be registered with transfer."""
        ...

    def hold(self, block_ids: Sequence[int]) -> StagedBlocks | None:
        """Host memory for these blocks, or None when there is none left."""
        ...

    def addresses(self, held: StagedBlocks, layer: int, members: Sequence[int]) -> Column:
        """Addresses of the slabs of ``layer`` of some of the blocks: u64 [slabs * n], block by block."""
        ...

    def leave(self, held: StagedBlocks, layer: int, is_last: bool) -> int:
        """Number of leading layers in host memory, now that ``layer`` was computed; all if ``is_last``."""
        ...

    def enter(self, held: StagedBlocks, layer: int) -> None:
        """Copy ``layer``, which lies in host memory, into the pool before the next computation reads it."""
        ...

    def release(self, held: StagedBlocks) -> None:
        """Release the memory. May be called more than once."""
        ...


class SlabMemory:
    """Memory that transfer reads and writes in place: nothing to stage.

    Args:
        buffers: memory to register; every slab lies in one of them.
        first_addresses: u64 [layers, slabs]; addresses of the slabs of block 0.
        strides: bytes from a slab of one block to that of the next; one for all layers, or one per layer.
    """

    def __init__(self, buffers: Sequence[Any], first_addresses: Column, strides: int | Sequence[int]) -> None:
        assert first_addresses.ndim == 2 and first_addresses.dtype == np.uint64
        self.buffers = list(buffers)
        self._first = first_addresses
        self._strides = np.broadcast_to(np.asarray(strides, dtype=np.uint64), (len(first_addresses),))

    def description(self) -> tuple[Column, Column]:
        """First addresses (u64 [layers, slabs]) and strides (u64 [layers]), to send to a peer."""
        return self._first, self._strides

    def hold(self, block_ids: Sequence[int]) -> StagedBlocks | None:
        return StagedBlocks(list(block_ids))

    def addresses(self, held: StagedBlocks, layer: int, members: Sequence[int]) -> Column:
        ids = np.array([held.block_ids[index] for index in members], dtype=np.uint64)
        column: Column = self._first[layer][None, :] + (ids * self._strides[layer])[:, None]
        return column.reshape(-1)

    def leave(self, held: StagedBlocks, layer: int, is_last: bool) -> int:
        return layer + 1

    def enter(self, held: StagedBlocks, layer: int) -> None:
        pass

    def release(self, held: StagedBlocks) -> None:
        pass


@dataclasses.dataclass(frozen=True)
class Slabs:
    """Offsets of the slabs of a tensor's blocks, in bytes."""

    offsets: tuple[int, ...]
    """Offset of each slab of block 0 from the tensor's beginning."""
    slab_bytes: int
    stride: int
    """Distance from a block to the next."""
    outermost: int | None
    """The outermost dimension inside a block; the block dimension if a block is several of its indices."""


def slabs_of(shape: Sequence[int], strides: Sequence[int], item_bytes: int, num_blocks: int) -> Slabs:
    """The slabs of a tensor with these dimensions; ``strides`` in items.

    The block dimension is the first whose size is a multiple of ``num_blocks``: a kernel may cut the
    engine's block into several of its own, which follow each other.

    Raises:
        InvalidArgument: there is no such dimension, or the blocks overlap.
    """
    dims = [dim for dim, size in enumerate(shape) if size % num_blocks == 0]
    if not dims:
        raise InvalidArgument("shape", tuple(shape), f"a dimension of {num_blocks} blocks")
    block_dim = dims[0]
    pieces = shape[block_dim] // num_blocks
    others = [(size, strides[dim], dim) for dim, size in enumerate(shape) if dim != block_dim]
    others = [dim for dim in [*others, (pieces, strides[block_dim], block_dim)] if dim[0] > 1]
    others.sort(key=lambda dim: dim[1])
    outermost = others[-1][2] if others else None
    run = 1
    while others and others[0][1] == run:
        run *= others.pop(0)[0]
    stride = strides[block_dim] * pieces
    if run > stride and num_blocks > 1:
        raise InvalidArgument("strides", tuple(strides), "blocks that do not overlap")
    places = itertools.product(*([stride_items * i for i in range(size)] for size, stride_items, _ in others))
    offsets = sorted(sum(place) for place in places)
    starts = tuple(offset * item_bytes for offset in offsets)
    return Slabs(starts, run * item_bytes, stride * item_bytes, outermost)


def order_of(strides: Sequence[int]) -> list[int]:
    """The dimensions from the innermost to the outermost.

    One of size 1 (a rank's only head) has the stride of its contents; then the later dimension is inside, as
    it is in a larger tensor.
    """
    return sorted(range(len(strides)), key=lambda dim: (strides[dim], -dim))


def memory_of(
    tensors: Sequence[Any],
    num_blocks: int,
    block_tokens: int,
    num_shards: int = 1,
    heads_dim: int | None = None,
) -> tuple[SlabLayout, SlabMemory]:
    """Memory with one block for each of ``num_shards`` equal shards of each block of the layers' tensors.

    Args:
        heads_dim: the dimension that is cut into shards; None where it isn't known, and nothing can be cut.

    Raises:
        InvalidArgument: the layers differ, or the shards of a block don't follow each other.
    """
    found = [slabs_of(tensor.shape, tensor.stride(), tensor.element_size(), num_blocks) for tensor in tensors]
    first = found[0]
    if any(
        (len(slabs.offsets), slabs.slab_bytes) != (len(first.offsets), first.slab_bytes) for slabs in found
    ):
        sizes = sorted({len(slabs.offsets) * slabs.slab_bytes for slabs in found})
        raise InvalidArgument("kv_caches", f"layers with blocks of {sizes} bytes", "layers that are alike")
    block_bytes = first.slab_bytes * len(first.offsets)
    is_dense = len(first.offsets) == 1 and all(slabs.stride == block_bytes for slabs in found)
    is_cut = heads_dim is not None and all(
        slabs.outermost == heads_dim and tensor.shape[heads_dim] % num_shards == 0
        for tensor, slabs in zip(tensors, found, strict=True)
    )
    if num_shards > 1 and not (is_dense and is_cut):
        raise InvalidArgument(
            "store_tp_size", num_shards, "1 where the heads of a block are not apart in memory"
        )
    bases = [
        [tensor.data_ptr() + offset for offset in slabs.offsets]
        for tensor, slabs in zip(tensors, found, strict=True)
    ]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    buffers = [(pointer, storage.nbytes()) for pointer, storage in storages.items()]
    layout = SlabLayout(len(tensors), len(first.offsets), first.slab_bytes // num_shards, block_tokens)
    strides = [slabs.stride // num_shards for slabs in found]
    return layout, SlabMemory(buffers, np.array(bases, dtype=np.uint64), strides)

# SPDX-License-Identifier: Apache-2.0
"""The blocks of an engine in memory that transfer can move: their addresses, and when they may be used.

An engine's KV cache is layers; a block has the same number of slabs in each, all of one length::

    layer 0   slab 0: block 0, block 1, block 2 …      slab 1: block 0, block 1, block 2 …
    layer 1   …                                        (K and V apart: two slabs; together: one)

``SlabMemory`` is the usual case, memory that is read and written in place. Where bytes pass through other
memory first (blocks on a device), ``staged_memory.py`` has another ``HostMemory``.

The slabs of an engine's tensors follow from their shapes and strides alone. A block of a tensor is what one
index of its block dimension selects. In memory that is one run of bytes or several equal ones, depending on
the order of the other dimensions; a run is a slab. Its contents (keys, values, packed for some instruction
set) do not matter.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Sequence
from typing import Any, Literal, Protocol

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
    """An instant in the work of a device: whether it has been reached. May be called from any thread."""

    def query(self) -> bool:
        """Whether everything before the event has been done."""
        ...

    def synchronize(self) -> None:
        """Block until it has."""
        ...


Purpose = Literal["load", "save"]
"""What blocks are held for."""


@dataclasses.dataclass(eq=False)
class StagedBlocks:
    """Host memory for some blocks of the pool, from ``hold`` to ``release``."""

    block_ids: list[int]
    slots: list[int] = dataclasses.field(default_factory=list)
    purpose: Purpose = "save"
    after: DeviceEvent | None = None
    """For a load: work of the device that may still use the blocks, and ends before they are written."""
    entered: dict[int, DeviceEvent] = dataclasses.field(default_factory=dict)
    """For a load: by layer, the end of its copies into the pool that were begun."""
    indices: dict[tuple[int, ...], Any] = dataclasses.field(default_factory=dict)
    """Ids of some of the blocks, by their positions in ``block_ids``, as the device reads them."""
    is_released: bool = False


class HostMemory(Protocol):
    """The host memory of a KV pool, and the copies between both where they are not the same."""

    @property
    def buffers(self) -> Sequence[Any]:
        """The host memory, to be registered with transfer."""
        ...

    @property
    def most_blocks(self) -> int:
        """Number of blocks that one load or save should hold at most; more are moved one after the other."""
        ...

    def has_room(self, num_blocks: int, purpose: Purpose) -> bool:
        """Whether ``hold`` has memory for so many blocks now."""
        ...

    def hold(
        self, block_ids: Sequence[int], purpose: Purpose, after: DeviceEvent | None = None
    ) -> StagedBlocks | None:
        """Host memory for these blocks, or None when there is none left. ``after``: see ``StagedBlocks``."""
        ...

    def addresses(self, held: StagedBlocks, layer: int, members: Sequence[int]) -> Column:
        """Addresses of the slabs of ``layer`` of some of the blocks: u64 [slabs * n], block by block."""
        ...

    def computed(self) -> DeviceEvent | None:
        """The end of all work that the calling thread, the engine's, has begun so far. None: it has ended."""
        ...

    def leave(self, held: StagedBlocks, layer: int, computed: DeviceEvent | None) -> DeviceEvent | None:
        """Begin to copy ``layer`` into host memory, after ``computed``. Its end; None: it is there."""
        ...

    def enter(self, held: StagedBlocks, layer: int, members: Sequence[int]) -> DeviceEvent | None:
        """Begin to copy ``layer`` of some of the blocks from host memory into the pool, after ``held.after``.

        The end of that; None: it is there.
        """
        ...

    def compute_after(self, held: StagedBlocks, layer: int) -> None:
        """Let work that the calling thread, the engine's, begins now wait for ``enter`` of a layer."""
        ...

    def release(self, held: StagedBlocks) -> None:
        """Release the memory, which nothing reads or writes any longer. May be called more than once."""
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

    @property
    def most_blocks(self) -> int:
        return sys.maxsize

    def has_room(self, num_blocks: int, purpose: Purpose) -> bool:
        return True

    def hold(
        self, block_ids: Sequence[int], purpose: Purpose, after: DeviceEvent | None = None
    ) -> StagedBlocks | None:
        return StagedBlocks(list(block_ids), purpose=purpose)

    def addresses(self, held: StagedBlocks, layer: int, members: Sequence[int]) -> Column:
        ids = np.array([held.block_ids[index] for index in members], dtype=np.uint64)
        column: Column = self._first[layer][None, :] + (ids * self._strides[layer])[:, None]
        return column.reshape(-1)

    def computed(self) -> DeviceEvent | None:
        return None

    def leave(self, held: StagedBlocks, layer: int, computed: DeviceEvent | None) -> DeviceEvent | None:
        return None

    def enter(self, held: StagedBlocks, layer: int, members: Sequence[int]) -> DeviceEvent | None:
        return None

    def compute_after(self, held: StagedBlocks, layer: int) -> None:
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


def slabs_of(
    shape: Sequence[int],
    strides: Sequence[int],
    item_bytes: int,
    num_blocks: int,
    block_stride: int | None = None,
) -> Slabs:
    """The slabs of a tensor with these dimensions; ``strides`` in items.

    The size of the block dimension is a multiple of ``num_blocks``: a kernel may cut the engine's block into
    several of its own, which follow each other. Other dimensions may have such a size by chance; where the
    engine says how far its blocks are apart (``block_stride``, in bytes), that decides, else the first does.

    Raises:
        InvalidArgument: there is no such dimension, or the blocks overlap.
    """
    dims = [dim for dim, size in enumerate(shape) if size % num_blocks == 0]
    if not dims:
        raise InvalidArgument("shape", tuple(shape), f"a dimension of {num_blocks} blocks")
    if block_stride is not None:
        found = {dim: strides[dim] * (shape[dim] // num_blocks) * item_bytes for dim in dims}
        dims = [dim for dim in dims if found[dim] == block_stride]
        if not dims:
            what = (
                f"shape {tuple(shape)}, strides {tuple(strides)}, blocks {sorted(found.values())} bytes apart"
            )
            raise InvalidArgument("kv_caches", what, f"{num_blocks} blocks {block_stride} bytes apart")
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
    block_strides: Sequence[int | None] | None = None,
) -> tuple[SlabLayout, SlabMemory]:
    """Memory with one block for each of ``num_shards`` equal shards of each block of the layers' tensors.

    Args:
        heads_dim: the dimension that is cut into shards; None where it isn't known, and nothing can be cut.
        block_strides: by tensor, how many bytes its blocks are apart; None where the engine does not say it.

    Raises:
        InvalidArgument: the layers differ, or the shards of a block don't follow each other.
    """
    found = [
        slabs_of(tensor.shape, tensor.stride(), tensor.element_size(), num_blocks, block_stride)
        for tensor, block_stride in zip(tensors, block_strides or [None] * len(tensors), strict=True)
    ]
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

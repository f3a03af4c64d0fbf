"""The slabs of an engine's KV tensors, from their shapes and strides alone.

A block of a tensor is what one index of its block dimension selects. In memory that is one run of bytes
or several equal ones, depending on the order of the other dimensions; a run is a slab. Its contents
(keys, values, packed for some instruction set) do not matter.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from mooncake.connectors.memory import SlabMemory
from mooncake.errors import InvalidArgument
from mooncake.kvlayout import SlabLayout


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

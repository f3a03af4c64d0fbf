"""The blocks of an engine in memory that transfer can move: their addresses, and when they may be used.

An engine's KV cache is layers; a block has the same number of slabs in each, all of one length::

    layer 0   slab 0: block 0, block 1, block 2 …      slab 1: block 0, block 1, block 2 …
    layer 1   …                                        (K and V apart: two slabs; together: one)

``SlabMemory`` is the usual case, memory that is read and written in place. Where bytes must pass
through other memory first (a device that transfer can't reach), the engine's package has its own
``HostMemory``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from mooncake.kvlayout import Column
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

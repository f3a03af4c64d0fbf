# SPDX-License-Identifier: Apache-2.0
"""A worker's KV as transfer sees it: in the pool itself, or in a staging area in front of a device.

A pool on the CPU *is* host memory, so blocks are read and written in place; a pool on a device is reached
through ``connectors.staged_memory``. Both have the same interface (``connectors.memory.HostMemory``), so that
the link need not know where torch computes.
"""

from __future__ import annotations

import numpy as np
import torch

from mooncake.connectors.cuda_device import device_of
from mooncake.connectors.memory import HostMemory, SlabMemory
from mooncake.connectors.staged_memory import staged
from mooncake.kvlayout import KvLayout


def host_memory(layout: KvLayout, pool: torch.Tensor, staging_bytes: int) -> HostMemory:
    """The host memory for the device of ``pool``; ``staging_bytes`` bounds a device's staging area.

    ``pool``: ``layout.pool_shape(num_blocks)``, contiguous.

    Raises:
        InvalidArgument: neither on a CPU nor on a CUDA device.
        OutOfMemory: the system does not lock so much memory.
    """
    assert pool.is_contiguous()
    base, num_blocks = pool.data_ptr(), int(pool.shape[2])
    layers = range(layout.num_layers)
    first = np.stack([layout.pool_addresses(base, num_blocks, layer, [0]) for layer in layers])
    slab_bytes = layout.chunk_bytes(layout.block_tokens)
    placed = SlabMemory([pool], first, slab_bytes)
    device = device_of(pool)
    if device is None:
        return placed
    return staged(device, [pool] * layout.num_layers, placed, num_blocks, slab_bytes, staging_bytes)

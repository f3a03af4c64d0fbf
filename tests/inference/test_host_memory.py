# SPDX-License-Identifier: Apache-2.0
"""A pool as host memory: in place where it is, refused on a device whose copies were not written."""

from __future__ import annotations

import pytest
import torch

from mooncake.connectors.memory import SlabMemory
from mooncake.errors import InvalidArgument
from mooncake.inference import host_memory as module
from mooncake.inference.host_memory import host_memory
from mooncake.kvlayout import KvLayout
from tests.connectors.late_device import LateDevice

LAYOUT = KvLayout(num_layers=4, num_kv_heads=2, head_dim=8, dtype="float32", block_tokens=4)
NUM_BLOCKS = 12


def test_a_pool_on_the_cpu_is_read_and_written_in_place() -> None:
    pool = torch.randn(LAYOUT.pool_shape(NUM_BLOCKS))
    memory = host_memory(LAYOUT, pool, 0)
    assert isinstance(memory, SlabMemory)
    held = memory.hold([3], "load")
    assert held is not None
    addresses = memory.addresses(held, 2, [0]).tolist()
    assert addresses == [pool[2, 0, 3].data_ptr(), pool[2, 1, 3].data_ptr()]


def test_a_pool_on_a_device_is_staged_within_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "device_of", lambda pool: LateDevice())
    pool = torch.randn(LAYOUT.pool_shape(NUM_BLOCKS))
    memory = host_memory(LAYOUT, pool, 6 * LAYOUT.pool_bytes(1))
    assert sum(buffer.numel() for buffer in memory.buffers) == 6 * LAYOUT.pool_bytes(1)
    held = memory.hold([7, 2], "save")
    assert held is not None
    end = memory.leave(held, 1, memory.computed())
    assert end is not None
    end.synchronize()
    staged = memory.buffers[0].view(torch.float32).view(4, 2, 6, *pool.shape[3:])
    assert torch.equal(staged[1, :, held.slots], pool[1, :, [7, 2]])


def test_a_pool_on_another_device_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="cpu or cuda"):
        host_memory(LAYOUT, torch.zeros(LAYOUT.pool_shape(NUM_BLOCKS), device="meta"), 1 << 20)

# SPDX-License-Identifier: Apache-2.0
"""Tests of the staging area of a device's pool."""

from __future__ import annotations

import torch

from mooncake.inference.host_memory import StagedMemory
from mooncake.kvlayout import KvLayout

LAYOUT = KvLayout(num_layers=4, num_kv_heads=2, head_dim=8, dtype="float32", block_tokens=4)
NUM_BLOCKS = 12


def test_staging_gives_out_what_it_has_and_takes_it_back() -> None:
    pool = torch.randn(LAYOUT.pool_shape(NUM_BLOCKS))
    memory = StagedMemory(LAYOUT, pool, 3)
    held = memory.hold([1, 2])
    assert held is not None
    assert memory.hold([3, 4]) is None
    memory.release(held)
    memory.release(held)
    assert memory.hold([3, 4, 5]) is not None
    assert memory.hold([6]) is None

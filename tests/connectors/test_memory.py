"""Where the slabs of blocks lie: by layer and slab, with a stride for each layer."""

from __future__ import annotations

import numpy as np
import pytest

from mooncake.connectors.memory import SlabMemory

FIRST = np.array([[1_000, 5_000], [20_000, 60_000], [100_000, 200_000]], dtype=np.uint64)


def test_addresses_come_block_by_block_slab_by_slab() -> None:
    memory = SlabMemory([], FIRST, [100, 100, 400])
    held = memory.hold([0, 7, 3])
    assert held is not None and held.block_ids == [0, 7, 3]
    assert memory.addresses(held, 0, [0, 1, 2]).tolist() == [1_000, 5_000, 1_700, 5_700, 1_300, 5_300]
    assert memory.addresses(held, 2, [1]).tolist() == [102_800, 202_800]
    assert memory.addresses(held, 1, []).tolist() == []


def test_one_stride_is_that_of_every_layer() -> None:
    one, each = SlabMemory([], FIRST, 64), SlabMemory([], FIRST, [64, 64, 64])
    held = one.hold([9])
    assert held is not None
    for layer in range(3):
        assert one.addresses(held, layer, [0]).tolist() == each.addresses(held, layer, [0]).tolist()
    first, strides = one.description()
    assert first is FIRST and strides.tolist() == [64, 64, 64]


def test_addresses_beyond_four_gigabytes_stay_whole() -> None:
    memory = SlabMemory([], np.array([[1 << 46]], dtype=np.uint64), 1 << 21)
    held = memory.hold([50_000])
    assert held is not None
    assert memory.addresses(held, 0, [0]).tolist() == [(1 << 46) + (50_000 << 21)]


def test_nothing_is_staged() -> None:
    memory = SlabMemory([b"x"], FIRST, 64)
    held = memory.hold([1])
    assert held is not None and memory.leave(held, 1, False) == 2
    memory.enter(held, 0)
    memory.release(held)
    memory.release(held)


def test_addresses_of_another_kind_are_a_mistake_of_the_program() -> None:
    with pytest.raises(AssertionError):
        SlabMemory([], FIRST.astype(np.int64), 64)

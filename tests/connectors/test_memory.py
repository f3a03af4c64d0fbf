"""Addresses of slabs, in their order in an object."""

from __future__ import annotations

import numpy as np

from mooncake.connectors.memory import SlabMemory


def test_addresses_are_block_by_block_and_slab_by_slab() -> None:
    first = np.array([[1000, 5000], [20_000, 70_000]], dtype=np.uint64)
    memory = SlabMemory([], first, [10, 100])
    held = memory.hold([3, 0, 2])
    assert held is not None
    assert memory.addresses(held, 0, [0, 1, 2]).tolist() == [1030, 5030, 1000, 5000, 1020, 5020]
    assert memory.addresses(held, 1, [2]).tolist() == [20_200, 70_200]


def test_the_description_for_a_peer_gives_the_same_addresses() -> None:
    first = np.array([[7], [900]], dtype=np.uint64)
    sent_first, sent_strides = SlabMemory([], first, 64).description()
    other = SlabMemory([], sent_first, sent_strides.tolist())
    held = other.hold([5])
    assert held is not None and sent_strides.tolist() == [64, 64]
    assert other.addresses(held, 1, [0]).tolist() == [900 + 5 * 64]


def test_memory_in_place_is_readable_as_soon_as_it_is_computed() -> None:
    memory = SlabMemory([], np.zeros((4, 1), dtype=np.uint64), 1)
    held = memory.hold([0])
    assert held is not None and not held.slots, "nothing is staged"
    assert [memory.leave(held, layer, layer == 3) for layer in range(4)] == [1, 2, 3, 4]

# SPDX-License-Identifier: Apache-2.0
"""Addresses of slabs, in their order in an object, and slabs that cover exactly a block of any tensor."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from mooncake.connectors.memory import SlabMemory, StagedBlocks, memory_of, order_of, slabs_of
from mooncake.errors import InvalidArgument

NUM_BLOCKS, HEADS, TOKENS, DIM = 7, 3, 4, 5

SIZE = NUM_BLOCKS * HEADS * TOKENS * DIM
ONE, TWO = torch.arange(SIZE), torch.arange(2 * SIZE)

LAYOUTS = {
    "block-head": (ONE.view(NUM_BLOCKS, HEADS, TOKENS, DIM), 0, 1),
    "kv-first": (TWO.view(2, NUM_BLOCKS, TOKENS, HEADS, DIM), 1, 2),
    "kv-inside": (TWO.view(NUM_BLOCKS, 2, TOKENS, HEADS, DIM), 0, 1),
    "permuted": (TWO.view(2, NUM_BLOCKS, HEADS, TOKENS, DIM).permute(0, 1, 3, 2, 4), 1, 2),
    "gaps": (TWO.view(NUM_BLOCKS, 2, HEADS, TOKENS, DIM)[:, 0], 0, 1),
    "heads-first": (ONE.view(HEADS, NUM_BLOCKS, TOKENS, DIM), 1, HEADS),
}


def test_addresses_are_block_by_block_and_slab_by_slab() -> None:
    first = np.array([[1000, 5000], [20_000, 70_000]], dtype=np.uint64)
    memory = SlabMemory([], first, [10, 100])
    held = memory.hold([3, 0, 2], "load")
    assert held is not None
    assert memory.addresses(held, 0, [0, 1, 2]).tolist() == [1030, 5030, 1000, 5000, 1020, 5020]
    assert memory.addresses(held, 1, [2]).tolist() == [20_200, 70_200]


def test_the_description_for_a_peer_gives_the_same_addresses() -> None:
    first = np.array([[7], [900]], dtype=np.uint64)
    sent_first, sent_strides = SlabMemory([], first, 64).description()
    other = SlabMemory([], sent_first, sent_strides.tolist())
    held = other.hold([5], "load")
    assert held is not None and sent_strides.tolist() == [64, 64]
    assert other.addresses(held, 1, [0]).tolist() == [900 + 5 * 64]


def test_memory_in_place_is_readable_as_soon_as_it_is_computed() -> None:
    memory = SlabMemory([], np.zeros((4, 1), dtype=np.uint64), 1)
    held = memory.hold([0], "save")
    assert held is not None and not held.slots, "nothing is staged"
    assert [memory.leave(held, layer, None) for layer in range(4)] == [None] * 4


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_slabs_of_a_block_are_its_items(name: str) -> None:
    tensor, block_dim, num_slabs = LAYOUTS[name]
    tensor = tensor.to(torch.int16)
    slabs = slabs_of(tensor.shape, tensor.stride(), 2, NUM_BLOCKS)
    assert len(slabs.offsets) == num_slabs
    flat = tensor.as_strided((tensor.untyped_storage().nbytes() // 2,), (1,))
    for block in range(NUM_BLOCKS):
        items: list[int] = []
        for offset in slabs.offsets:
            start = (offset + block * slabs.stride) // 2
            items += flat[start : start + slabs.slab_bytes // 2].tolist()
        assert sorted(items) == sorted(tensor.select(block_dim, block).flatten().tolist())


def test_a_block_that_a_kernel_cuts_into_several_is_one() -> None:
    tensor = torch.zeros(NUM_BLOCKS * 4, HEADS, TOKENS)
    slabs = slabs_of(tensor.shape, tensor.stride(), 4, NUM_BLOCKS)
    assert slabs.offsets == (0,)
    assert slabs.stride == slabs.slab_bytes == 4 * HEADS * TOKENS * 4


def test_a_tensor_without_blocks_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="11 blocks"):
        slabs_of((3, 4), (4, 1), 4, 11)


def test_shards_of_a_block_follow_each_other() -> None:
    tensors = [torch.zeros(NUM_BLOCKS, 4, TOKENS, DIM) for _ in range(2)]
    layout, memory = memory_of(tensors, NUM_BLOCKS, TOKENS, num_shards=2, heads_dim=1)
    assert (layout.num_layers, layout.num_slabs, layout.slab_bytes) == (2, 1, 2 * TOKENS * DIM * 4)
    (address,) = memory.addresses(StagedBlocks([3 * 2 + 1]), 1, [0])
    assert address == tensors[1][3, 2].data_ptr()
    assert len(memory.buffers) == 2


def test_layers_of_one_storage_are_registered_once() -> None:
    pool = torch.zeros(3, NUM_BLOCKS, 4, TOKENS)
    _, memory = memory_of(list(pool), NUM_BLOCKS, TOKENS)
    assert memory.buffers == [(pool.data_ptr(), pool.untyped_storage().nbytes())]


def test_layers_that_differ_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="layers that are alike"):
        memory_of([torch.zeros(NUM_BLOCKS, 4), torch.zeros(NUM_BLOCKS, 5)], NUM_BLOCKS, TOKENS)


UNCUT: dict[str, tuple[torch.Tensor, int | None]] = {
    "keys and values apart": (torch.zeros(2, NUM_BLOCKS, TOKENS, 4, DIM), 3),
    "heads inside tokens": (torch.zeros(NUM_BLOCKS, TOKENS, 4, DIM), 2),
    "heads inside keys and values": (torch.zeros(NUM_BLOCKS, 2, 4, TOKENS, DIM), 2),
    "heads that two don't divide": (torch.zeros(NUM_BLOCKS, 3, TOKENS, DIM), 1),
    "blocks of a kernel's smaller ones": (torch.zeros(NUM_BLOCKS * 2, 4, TOKENS, DIM), 1),
    "unknown heads": (torch.zeros(NUM_BLOCKS, 4, TOKENS, DIM), None),
}


@pytest.mark.parametrize("name", UNCUT)
def test_heads_that_are_not_apart_are_not_sharded(name: str) -> None:
    tensor, heads_dim = UNCUT[name]
    memory_of([tensor], NUM_BLOCKS, TOKENS)
    with pytest.raises(InvalidArgument, match="store_tp_size"):
        memory_of([tensor], NUM_BLOCKS, TOKENS, num_shards=2, heads_dim=heads_dim)


def test_a_rank_with_one_head_has_the_order_of_one_with_all() -> None:
    every, one = torch.zeros(NUM_BLOCKS, 3, TOKENS, DIM), torch.zeros(NUM_BLOCKS, 1, TOKENS, DIM)
    assert order_of(every.stride()) == order_of(one.stride()) == [3, 2, 1, 0]
    assert order_of(every.permute(0, 2, 1, 3).stride()) != [3, 2, 1, 0]


def test_a_head_is_the_same_slab_of_a_rank_with_all_and_of_one_with_one() -> None:
    whole = torch.arange(NUM_BLOCKS * 3 * TOKENS * DIM).view(NUM_BLOCKS, 3, TOKENS, DIM)
    layout, memory = memory_of([whole], NUM_BLOCKS, TOKENS, num_shards=3, heads_dim=1)
    parts = [whole[:, head : head + 1].contiguous() for head in range(3)]
    for head, part in enumerate(parts):
        its_layout, its_memory = memory_of([part], NUM_BLOCKS, TOKENS)
        assert its_layout == layout
        for block in range(NUM_BLOCKS):
            (mine,) = memory.addresses(StagedBlocks([block * 3 + head]), 0, [0])
            (its,) = its_memory.addresses(StagedBlocks([block]), 0, [0])
            assert _bytes(mine, layout.slab_bytes) == _bytes(its, layout.slab_bytes)


def _bytes(address: int, size_bytes: int) -> bytes:
    return ctypes.string_at(int(address), size_bytes)

# SPDX-License-Identifier: Apache-2.0
"""The staging area of a device's pool: the bytes of every layout, the order of copies, and bounded room."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from torch import Tensor

from mooncake.connectors.memory import SlabMemory, memory_of
from mooncake.connectors.staged_memory import PIECES, StagedMemory, slab_views, staged
from mooncake.errors import InvalidArgument
from tests.connectors.late_device import LateDevice

NUM_BLOCKS, NUM_LAYERS, HEADS, TOKENS, DIM = 8, 3, 2, 4, 6


def _noise(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randint(-100, 100, shape).to(dtype)


def _layers(pool: Tensor) -> list[Tensor]:
    return list(pool)


def _padded() -> list[Tensor]:
    """Pages of 64 bytes that are 80 bytes apart, as with vLLM's ``page_size_padded``."""
    storage = _noise(NUM_LAYERS, NUM_BLOCKS, 40)
    return [layer[:, :32].unflatten(1, (2, 4, 4)) for layer in storage]


L, B = NUM_LAYERS, NUM_BLOCKS
LAYOUTS = {
    "layers, blocks, heads, tokens": lambda: _layers(_noise(L, B, HEADS, TOKENS, 2 * DIM)),
    "layers, blocks, tokens, heads": lambda: _layers(_noise(L, B, TOKENS, HEADS, 2 * DIM).transpose(2, 3)),
    "layers, heads, blocks": lambda: _layers(_noise(L, HEADS, B, TOKENS, 2 * DIM).transpose(1, 2)),
    "blocks, layers, heads": lambda: _layers(_noise(B, L, HEADS, TOKENS, 2 * DIM).transpose(0, 1)),
    "blocks, heads, layers": lambda: _layers(_noise(B, HEADS, L, TOKENS, 2 * DIM).permute(2, 0, 1, 3, 4)),
    "one latent vector (MLA)": lambda: _layers(_noise(L, B, TOKENS, 9)),
    "bytes that no word divides": lambda: _layers(_noise(L, B, 1, 3, 5, dtype=torch.int8)),
    "keys before values": lambda: _layers(_noise(L, 2, B, TOKENS, HEADS, DIM)),
    "keys beside values": lambda: _layers(_noise(L, B, 2, TOKENS, HEADS, DIM)),
    "a kernel's half blocks": lambda: _layers(_noise(L, 2 * B, HEADS, TOKENS // 2, 2 * DIM)),
    "padded pages": _padded,
}


def _staged(tensors: list[Tensor], num_slots: int, device: LateDevice) -> tuple[StagedMemory, int]:
    layout, placed = memory_of(tensors, NUM_BLOCKS, TOKENS)
    views = slab_views(tensors, placed, NUM_BLOCKS, layout.slab_bytes)
    return StagedMemory(device, views, num_slots), layout.slab_bytes


def _block(tensor: Tensor, block_id: int) -> Tensor:
    """All items of a block, wherever its dimension is."""
    dim = next(dim for dim, size in enumerate(tensor.shape) if size % NUM_BLOCKS == 0)
    pieces = tensor.shape[dim] // NUM_BLOCKS
    return tensor.narrow(dim, block_id * pieces, pieces)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_block_of_any_layout_arrives_in_another_pool_as_it_was(name: str) -> None:
    source, target = LAYOUTS[name](), LAYOUTS[name]()
    before = [tensor.clone() for tensor in target]
    device = LateDevice()
    (out, slab_bytes), (into, _) = _staged(source, 6, device), _staged(target, 16, device)
    left, entered = out.hold([5, 0, 7], "save"), into.hold([1, 6, 2], "load")
    assert left is not None and entered is not None
    for layer in range(NUM_LAYERS):
        out_end = out.leave(left, layer, None)
        assert out_end is not None
        out_end.synchronize()
        here, there = out.addresses(left, layer, [0, 1, 2]), into.addresses(entered, layer, [0, 1, 2])
        for one, other in zip(here, there, strict=True):
            ctypes.memmove(int(other), int(one), slab_bytes)
        for members in ([2, 0], [1]):
            in_end = into.enter(entered, layer, members)
            assert in_end is not None
            in_end.synchronize()
    for layer in range(NUM_LAYERS):
        for block, original in ((1, 5), (6, 0), (2, 7)):
            assert torch.equal(_block(target[layer], block), _block(source[layer], original)), repr(device)
        for block in (0, 3, 4, 5, 7):
            assert torch.equal(_block(target[layer], block), _block(before[layer], block)), repr(device)


def test_words_are_gathered_where_the_slabs_allow_it() -> None:
    for name, dtype in (("keys before values", torch.int64), ("bytes that no word divides", torch.uint8)):
        tensors = LAYOUTS[name]()
        layout, placed = memory_of(tensors, NUM_BLOCKS, TOKENS)
        views = slab_views(tensors, placed, NUM_BLOCKS, layout.slab_bytes)
        assert {view.dtype for layer in views for view in layer} == {dtype}


def test_blocks_beyond_the_memory_are_refused_and_nothing_is_enlarged() -> None:
    tensors = LAYOUTS["layers, blocks, heads, tokens"]()
    layout, placed = memory_of(tensors, NUM_BLOCKS, TOKENS)
    size_bytes = tensors[0].untyped_storage().nbytes()
    with pytest.raises(InvalidArgument, match=f"at most {size_bytes}"):
        slab_views(tensors, placed, NUM_BLOCKS + 1, layout.slab_bytes)
    other = SlabMemory((), placed.description()[0] - np.uint64(64), placed.description()[1].tolist())
    with pytest.raises(InvalidArgument, match="kv_caches"):
        slab_views(tensors, other, NUM_BLOCKS, layout.slab_bytes)
    assert tensors[0].untyped_storage().nbytes() == size_bytes


def test_saves_and_loads_have_room_of_their_own_and_give_it_back() -> None:
    memory, _ = _staged(LAYOUTS["keys before values"](), 8, LateDevice())
    assert memory.most_blocks == 4 // PIECES
    held = memory.hold([1, 2, 3], "save")
    assert held is not None
    assert memory.has_room(1, "save") and not memory.has_room(2, "save")
    assert memory.hold([4, 5], "save") is None
    assert memory.has_room(4, "load") and not memory.has_room(5, "load")
    memory.release(held)
    memory.release(held)
    assert memory.has_room(4, "save") and not memory.has_room(5, "save")


def test_slots_of_one_operation_follow_each_other_again_after_others_were_released() -> None:
    memory, _ = _staged(LAYOUTS["keys before values"](), 16, LateDevice())
    several = [memory.hold([one], "save") for one in range(8)]
    for held in reversed(several):
        assert held is not None
        memory.release(held)
    again = memory.hold([3, 1, 2], "save")
    assert again is not None and again.slots == [0, 1, 2]


def test_the_area_is_bounded_by_bytes_and_never_larger_than_the_pool_needs() -> None:
    tensors = LAYOUTS["keys before values"]()
    layout, placed = memory_of(tensors, NUM_BLOCKS, TOKENS)
    block_bytes = layout.object_bytes(TOKENS)
    for staging_bytes, num_slots in ((1, 2), (5 * block_bytes, 5), (1 << 40, 2 * NUM_BLOCKS)):
        memory = staged(LateDevice(), tensors, placed, NUM_BLOCKS, layout.slab_bytes, staging_bytes)
        assert sum(buffer.numel() for buffer in memory.buffers) == num_slots * block_bytes


@pytest.mark.parametrize("seed", range(20))
def test_a_copy_out_waits_for_the_computation_and_a_copy_in_for_earlier_work(seed: int) -> None:
    tensors = LAYOUTS["layers, blocks, heads, tokens"]()
    device = LateDevice(seed)
    memory, slab_bytes = _staged(tensors, 8, device)
    computed = torch.full_like(tensors[0][2], 7)
    device.compute(lambda: tensors[0][2].copy_(computed))
    held = memory.hold([2], "save")
    assert held is not None
    end = memory.leave(held, 0, memory.computed())
    device.compute(lambda: tensors[0][3].fill_(9))  # an earlier request's last work on block 3
    target = memory.hold([3], "load", memory.computed())
    assert target is not None and end is not None
    while not end.query():
        pass
    (left,), (staged_at,) = memory.addresses(held, 0, [0]), memory.addresses(target, 0, [0])
    assert ctypes.string_at(int(left), slab_bytes) == computed.numpy().tobytes()
    ctypes.memmove(int(staged_at), int(left), slab_bytes)
    memory.enter(target, 0, [0])
    memory.compute_after(target, 0)
    read = []
    device.compute(lambda: read.append(tensors[0][3].clone()))
    device.finish_all()
    assert torch.equal(read[0], computed)


def test_the_double_notices_a_copy_that_does_not_wait() -> None:
    """Without the event some order of the double copies what was there before the computation."""

    def copies_the_old(seed: int) -> bool:
        tensors = [torch.zeros(NUM_BLOCKS, 8) for _ in range(NUM_LAYERS)]
        device = LateDevice(seed)
        memory, slab_bytes = _staged(tensors, 8, device)
        device.compute(lambda: tensors[0].fill_(1))
        held = memory.hold([2], "save")
        assert held is not None
        end = memory.leave(held, 0, None)
        assert end is not None
        end.synchronize()
        (address,) = memory.addresses(held, 0, [0])
        return not any(ctypes.string_at(int(address), slab_bytes))

    assert any(copies_the_old(seed) for seed in range(20))

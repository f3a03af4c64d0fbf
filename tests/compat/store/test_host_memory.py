# SPDX-License-Identifier: Apache-2.0
"""Allocation of host memory by address, and NUMA binding."""

from __future__ import annotations

import ctypes
import os

import numpy as np
import pytest

from mooncake.compat.store.host_memory import (
    MooncakeHostMemAllocator,
    bind_to_numa_node,
    get_alloc_func_addr,
    get_free_func_addr,
)


def test_memory_is_usable_until_freed() -> None:
    allocator = MooncakeHostMemAllocator()
    address = allocator.alloc(100_000)
    ctypes.memset(address, 7, 100_000)
    assert ctypes.string_at(address, 3) == b"\x07" * 3
    assert MooncakeHostMemAllocator().free(address) == 0
    assert allocator.free(address) == -1


@pytest.mark.parametrize("size", [0, 1 << 62, (1 << 64) - 1])
def test_memory_that_cannot_be_had(size: int) -> None:
    """An address of 0 would be written to: programs do not check it."""
    with pytest.raises(RuntimeError, match="alloc"):
        MooncakeHostMemAllocator().alloc(size)


def test_sizes_are_whole_numbers() -> None:
    allocator = MooncakeHostMemAllocator()
    for size in (-1, 1 << 64, 4096.0, "4096"):
        with pytest.raises(TypeError):
            allocator.alloc(size)  # type: ignore[arg-type]
    address = allocator.alloc(np.int32(4096))  # type: ignore[arg-type]
    assert allocator.free(np.uint64(address)) == 0  # type: ignore[arg-type]


def test_functions_can_be_called_by_address() -> None:
    alloc = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)(get_alloc_func_addr())
    free = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t)(get_free_func_addr())
    address = alloc(1000)
    ctypes.memset(address, 1, 1000)
    free(address, 1000)


def test_an_unknown_numa_node_changes_nothing() -> None:
    before = os.sched_getaffinity(0)
    bind_to_numa_node(4096)
    with pytest.raises(TypeError, match="node"):
        bind_to_numa_node("0")  # type: ignore[arg-type]
    assert os.sched_getaffinity(0) == before
    bind_to_numa_node(0)
    assert os.sched_getaffinity(0)
    os.sched_setaffinity(0, before)

# SPDX-License-Identifier: Apache-2.0
"""Allocation of host memory by address, and NUMA binding."""

from __future__ import annotations

import ctypes
import os

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
    assert allocator.alloc(0) == allocator.alloc(-1) == allocator.alloc(1 << 62) == 0


def test_functions_can_be_called_by_address() -> None:
    alloc = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)(get_alloc_func_addr())
    free = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t)(get_free_func_addr())
    address = alloc(1000)
    ctypes.memset(address, 1, 1000)
    free(address, 1000)


def test_an_unknown_numa_node_changes_nothing() -> None:
    before = os.sched_getaffinity(0)
    bind_to_numa_node(4096)
    assert os.sched_getaffinity(0) == before
    bind_to_numa_node(0)
    assert os.sched_getaffinity(0)
    os.sched_setaffinity(0, before)

# SPDX-License-Identifier: Apache-2.0
"""Functions of the existing package for this host's memory: allocators and NUMA binding."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import threading
from pathlib import Path

import numpy as np

from mooncake.compat import public_in
from mooncake.compat.store.arguments import number
from mooncake.log import get_logger

log = get_logger("mooncake.store")

NODES = Path("/sys/devices/system/node")
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_PREFERRED = 1


_lock = threading.Lock()
_maps: dict[int, mmap.mmap] = {}
"""Allocated memory that is not freed, by address."""


class MooncakeHostMemAllocator:
    """Allocator of shared memory, which outlives this object: until it is freed or the process ends."""

    def alloc(self, size: int, /) -> int:
        """Allocate ``size`` zero bytes; their address.

        Raises:
            TypeError: not a size of 64 bits.
            RuntimeError: there is no such memory. Callers use the address without checking it.
        """
        size = number("alloc", "size", size)
        if not 0 <= size < 1 << 64:
            raise TypeError(f"alloc(): size must be a size of 64 bits, not {size}")
        try:
            memory = os.memfd_create("mooncake-host", os.MFD_CLOEXEC)
            try:
                os.ftruncate(memory, size)
                mapped = mmap.mmap(memory, size)
            finally:
                os.close(memory)
        except (OSError, OverflowError, ValueError) as error:
            raise RuntimeError(f"alloc: {size} bytes of shared memory: {error}") from error
        address = int(np.frombuffer(mapped, np.uint8).ctypes.data)
        with _lock:
            _maps[address] = mapped
        return address

    def free(self, ptr: int, /) -> int:
        """Free memory: 0; -1 when ``alloc`` did not return it, or it is already free."""
        address = number("free", "ptr", ptr)
        with _lock:
            mapped = _maps.pop(address, None)
        if mapped is None:
            return -1
        mapped.close()
        return 0


def get_alloc_func_addr() -> int:
    """Address of a C function ``alloc(size, ...)``, the system's, for programs that need one."""
    return _address("malloc")


def get_free_func_addr() -> int:
    """Address of the matching C function ``free(pointer, ...)``."""
    return _address("free")


def _address(name: str) -> int:
    return int(ctypes.cast(getattr(ctypes.CDLL(None), name), ctypes.c_void_p).value or 0)


def bind_to_numa_node(node: int) -> None:
    """Run this thread on the cores of a NUMA node and prefer its memory; warn if there is no such node."""
    node = number("bind_to_numa_node", "node", node)
    try:
        cores = _cores((NODES / f"node{node:d}" / "cpulist").read_text())
        os.sched_setaffinity(0, cores)
    except (OSError, ValueError) as error:
        log.warning(f"bind_to_numa_node: node {node} does not exist ({error})")
        return
    call = _SET_MEMPOLICY.get(platform.machine())
    mask = (ctypes.c_ulong * (node // 64 + 1))()
    mask[node // 64] = 1 << (node % 64)
    if call is not None and ctypes.CDLL(None).syscall(call, _PREFERRED, mask, len(mask) * 64 + 1):
        log.warning(f"bind_to_numa_node: memory of node {node} is not preferred: the kernel refuses")


def _cores(text: str) -> set[int]:
    """Parse a list of cores such as ``0-3,8``."""
    cores: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores


public_in("mooncake.store", MooncakeHostMemAllocator)

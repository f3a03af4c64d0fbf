# SPDX-License-Identifier: Apache-2.0
"""Arrays in a lease of the program's buffer pool, and the return of such leases.

The lease of a result goes back to the pool when ``release_result`` is called with it, or else with the last
array that refers to its memory. After ``release_result`` the result must not be used: the pool may have
given its memory to another one.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

OWNER = "_mooncake_pool_owner"
"""Attribute of an array in a lease, and of all views of it: the object to release."""


class PoolLease:
    """A lease that is released once, by the first of several calls."""

    def __init__(self, lease: Any) -> None:
        self._lease = lease
        self._lock = threading.Lock()

    def release(self) -> None:
        with self._lock:
            lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()


class LeasedArray(np.ndarray[Any, Any]):
    """Array in a lease."""

    def __array_finalize__(self, parent: Any) -> None:
        setattr(self, OWNER, getattr(parent, OWNER, None))


def lease_array(pool: Any, dtype: np.dtype[Any], shape: tuple[int, ...], size_bytes: int) -> LeasedArray:
    """New array in memory of ``pool``, which is registered."""
    lease = pool.acquire(size_bytes)
    memory = (ctypes.c_uint8 * size_bytes).from_address(int(lease.ptr))
    owner = PoolLease(lease)
    weakref.finalize(memory, owner.release)
    flat = np.frombuffer(memoryview(memory), dtype=np.uint8)
    array: LeasedArray = flat.view(dtype).reshape(shape).view(LeasedArray)
    setattr(array, OWNER, owner)
    return array


def release_leases(result: Any) -> None:
    """Release every lease in which a value of ``result`` lies: arrays in dicts, lists and object arrays."""
    owners = {id(owner): owner for owner in _owners(result, set())}
    for owner in owners.values():
        owner.release()


def _owners(value: Any, seen: set[int]) -> Iterator[Any]:
    if isinstance(value, np.ndarray):
        owner = getattr(value, OWNER, None)
        if owner is not None:
            yield owner
        if value.dtype != np.dtype(object):
            return
        parts = value.ravel().tolist()
    elif isinstance(value, Mapping):
        parts = list(value.values())
    elif isinstance(value, list | tuple):
        parts = list(value)
    elif hasattr(value, "batch") and hasattr(value, "non_tensor_batch"):
        parts = [value.batch, value.non_tensor_batch]
    else:
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    for part in parts:
        yield from _owners(part, seen)

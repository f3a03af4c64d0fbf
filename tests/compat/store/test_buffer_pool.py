# SPDX-License-Identifier: Apache-2.0
"""Leases from the local buffer or with memory of their own, and their release."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from mooncake.compat.store.buffer_pool import BufferPool
from mooncake.store import BufferHandle, MooncakeDistributedStore

MIB = 1 << 20


def test_a_lease_is_registered_memory(store: MooncakeDistributedStore) -> None:
    pool = BufferPool(store)
    with pool.acquire(300_000) as lease:
        lease.buffer[:] = bytes(range(250)) * 1200
        assert store.put_from("leased", lease.ptr, lease.size) == 0
        assert store.register_buffer(lease.ptr, lease.size) in (0, -600)
    assert store.get("leased") == bytes(range(250)) * 1200
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        pool.acquire(1)


def test_a_large_lease_has_memory_of_its_own(store: MooncakeDistributedStore) -> None:
    pool = BufferPool(store, alignment=1 << 16)
    lease = pool.acquire(17 * MIB)
    assert lease.ptr % (1 << 16) == 0
    assert store.register_buffer(lease.ptr, 4096) == -600, "it is already registered"
    lease.release()
    lease.release()
    with pytest.raises(RuntimeError, match="released"):
        _ = lease.ptr


def test_memory_with_a_view_is_not_released(store: MooncakeDistributedStore) -> None:
    lease = BufferPool(store).acquire(100)
    array = np.frombuffer(lease.buffer, np.uint8)
    with pytest.raises(RuntimeError, match="exported views"):
        lease.release()
    del array
    view = lease.buffer
    with pytest.raises(RuntimeError, match="exported views"):
        lease.release()
    part = view[10:20]
    del view
    with pytest.raises(RuntimeError, match="exported views"):
        lease.release()
    lease.buffer[10] = 7
    assert part[0] == 7
    part.release()
    lease.release()


@pytest.mark.parametrize("num_bytes", [1, 17 * MIB])
def test_a_lease_without_references_is_returned_when_its_last_view_is_gone(
    store: MooncakeDistributedStore, num_bytes: int
) -> None:
    pool = BufferPool(store, max_bytes=32 * MIB, alignment=1 << 16)
    view = pool.acquire(num_bytes).buffer
    address = np.frombuffer(view, np.uint8).ctypes.data
    with pytest.raises(RuntimeError, match="1 active leases"):
        pool.close()
    view[:] = bytes([7]) * num_bytes
    assert store.put_from("of a lease without references", address, num_bytes) == 0
    del view
    pool.acquire(32 * MIB).release()
    pool.close()


def test_waiting_ends_when_a_lease_is_collected(store: MooncakeDistributedStore) -> None:
    pool = BufferPool(store, max_bytes=1 << 16)
    leases = [pool.acquire(1)]
    found = []
    waiting = threading.Thread(target=lambda: found.append(pool.acquire(2, timeout=30)))
    waiting.start()
    leases.clear()
    waiting.join(30)
    assert found[0].size == 2
    found[0].release()
    pool.close()


def test_sizes_from_zero_to_the_capacity(store: MooncakeDistributedStore) -> None:
    pool = BufferPool(store, max_bytes=MIB)
    with pool.acquire(0) as lease:
        assert lease.size == len(lease.buffer) == 0
    for size in (MIB + 1, 1 << 64, (1 << 64) - 1):
        with pytest.raises(RuntimeError, match="capacity"):
            pool.acquire(size)
    with pytest.raises(RuntimeError, match="capacity"):
        BufferPool(store).acquire((1 << 64) - 1)
    with pytest.raises(TypeError):
        pool.acquire(-1)


def test_a_pool_with_open_leases_does_not_close(store: MooncakeDistributedStore) -> None:
    pool = BufferPool(store)
    lease = pool.buffer(1)
    with pytest.raises(RuntimeError, match="1 active leases"):
        pool.close()
    lease.release()
    pool.close()


def test_an_exhausted_pool_waits_or_fails(store: MooncakeDistributedStore) -> None:
    pool = BufferPool(store, max_bytes=1 << 16)
    lease = pool.acquire(1)
    with pytest.raises(RuntimeError, match="exhausted"):
        pool.acquire(1, block=False)
    with pytest.raises(TimeoutError):
        pool.acquire(1, timeout=0.01)
    found = []
    waiting = threading.Thread(target=lambda: found.append(pool.acquire(1, timeout=30)))
    waiting.start()
    lease.release()
    waiting.join(30)
    found[0].release()


def test_regions_are_limited(store: MooncakeDistributedStore) -> None:
    pool = BufferPool(store, max_regions=2, prewarm_size=1 << 16, prewarm_count=2)
    leases = [pool.acquire(1), pool.acquire(17 * MIB)]
    for size in (1, 17 * MIB):
        with pytest.raises(RuntimeError, match="exhausted"):
            pool.acquire(size, block=False)
    leases.pop().release()
    pool.acquire(1, block=False).release()


def test_bad_arguments_are_named(store: MooncakeDistributedStore) -> None:
    for bad in ({"alignment": 3}, {"max_bytes": -1}, {"min_size_class": 0}, {"max_size_class": 1}):
        arguments: dict[str, Any] = bad
        with pytest.raises(RuntimeError, match=next(iter(arguments))):
            BufferPool(store, **arguments)


def test_a_pool_of_a_store_that_is_not_set_up() -> None:
    with pytest.raises(RuntimeError, match="set up"):
        BufferPool(MooncakeDistributedStore()).acquire(1)


def test_a_handle_is_a_buffer(store: MooncakeDistributedStore) -> None:
    assert store.put("handle", b"bytes of the object") == 0
    handle = store.get_buffer("handle")
    assert isinstance(handle, BufferHandle) and len(handle) == handle.size() == 19
    view = memoryview(handle)
    assert (view.format, view.ndim, view.readonly) == ("b", 1, False)
    assert bytes(view) == b"bytes of the object"
    assert np.frombuffer(handle, np.uint8).ctypes.data == handle.ptr()
    assert store.get_buffer("no such") is None
    handles = store.batch_get_buffer(["no such", "handle"])
    assert handles[0] is None and handles[1] is not None

# SPDX-License-Identifier: Apache-2.0
"""Leases from the local buffer or with memory of their own, and their release."""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import pytest

from mooncake.compat.store.buffer_pool import BufferPool
from mooncake.store import BufferHandle, MooncakeDistributedStore
from mooncake.store.allocator import Allocator
from mooncake.transfer.memory import is_mapped
from tests.waiting import wait_until

MIB = 1 << 20


class RegistrationsOnly:
    """A store that only registers memory, and may collect garbage while it holds its lock."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.registered: set[int] = set()
        self.collects = False
        self.is_empty = threading.Event()

    def register_buffer(self, address: int, size: int) -> int:
        with self.lock:
            if self.collects:
                gc.collect()
            self.registered.add(address)
            return 0

    def unregister_buffer(self, address: int) -> int:
        with self.lock:
            self.registered.remove(address)
            if not self.registered:
                self.is_empty.set()
            return 0


def ends(act: Any) -> bool:
    """Whether ``act`` comes to an end, in a thread that is left behind if it does not."""
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(20)
    return not thread.is_alive()


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


def test_waiting_ends_when_a_lease_is_collected() -> None:
    pool = BufferPool(RegistrationsOnly(), max_bytes=2, alignment=1 << 16)
    leases = [pool.acquire(1)]
    found = []
    waiting = threading.Thread(target=lambda: found.append(pool.acquire(2, timeout=30)))
    waiting.start()
    leases.clear()
    waiting.join(30)
    assert found[0].size == 2
    found[0].release()
    pool.close()


class Cycle:
    """Garbage that only the collector finds."""

    def __init__(self, *held: Any) -> None:
        self.itself = self, held


@pytest.mark.parametrize("num_bytes", [1, 17 * MIB])
def test_a_lease_may_be_collected_while_the_locks_are_held(
    store: MooncakeDistributedStore, num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = BufferPool(store, alignment=1 << 16)
    pool.acquire(1).release()
    other = BufferPool(store)
    Cycle(pool.acquire(num_bytes), other.acquire(1))
    allocate = Allocator.allocate

    def collect(pages: Allocator, size_bytes: int) -> int | None:
        gc.collect()
        return allocate(pages, size_bytes)

    monkeypatch.setattr(Allocator, "allocate", collect)
    assert ends(lambda: pool.acquire(5).release())
    monkeypatch.undo()
    pool.close()
    other.close()


def test_a_lease_may_be_released_while_the_locks_are_held(
    store: MooncakeDistributedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Releases(Cycle):
        def __del__(self) -> None:
            self.itself[1][0].release()

    pool = BufferPool(store)
    Releases(pool.acquire(1))
    allocate = Allocator.allocate

    def collect(pages: Allocator, size_bytes: int) -> int | None:
        gc.collect()
        return allocate(pages, size_bytes)

    monkeypatch.setattr(Allocator, "allocate", collect)
    assert ends(lambda: pool.acquire(5).release())
    monkeypatch.undo()
    pool.close()


def test_a_pool_that_is_dropped_with_its_lease_leaves_no_registration() -> None:
    store = RegistrationsOnly()
    pool = BufferPool(store, alignment=1 << 16)
    lease = pool.acquire(MIB)
    assert len(store.registered) == 1
    del pool, lease
    assert store.is_empty.wait(20)


def test_a_view_keeps_the_registration_of_a_pool_that_is_gone() -> None:
    store = RegistrationsOnly()
    pool = BufferPool(store, alignment=1 << 16)
    view = pool.acquire(MIB).buffer
    del pool
    assert len(store.registered) == 1 and view[0] == 0
    del view
    assert store.is_empty.wait(20)


def test_a_pool_may_be_collected_while_the_locks_of_its_store_are_held() -> None:
    store = RegistrationsOnly()
    dropped = BufferPool(store, alignment=1 << 16)
    Cycle(dropped.acquire(MIB), dropped)
    del dropped
    pool = BufferPool(store, alignment=1 << 16)
    store.collects = True
    assert ends(lambda: pool.acquire(MIB).release())
    pool.close()
    assert store.is_empty.wait(20)


def test_memory_is_kept_until_it_is_unregistered() -> None:
    class Looks(RegistrationsOnly):
        def unregister_buffer(self, address: int) -> int:
            assert is_mapped(address, MIB), "another allocation could have got the address"
            return super().unregister_buffer(address)

    pool = BufferPool(Looks(), alignment=1 << 16)
    pool.acquire(MIB).release()
    pool.close()


def test_memory_that_could_not_be_unregistered_stays_leased_until_it_can(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Fails(RegistrationsOnly):
        fails = True

        def unregister_buffer(self, address: int) -> int:
            if self.fails:
                raise OSError("the session is lost")
            return super().unregister_buffer(address)

    store = Fails()
    pool = BufferPool(store, alignment=1 << 16)
    leases = [pool.acquire(MIB), pool.acquire(MIB)]
    addresses = {lease.ptr for lease in leases}
    for lease in leases:
        lease.release()
    other = pool.acquire(MIB)
    assert store.registered == addresses | {other.ptr} and all(is_mapped(one, MIB) for one in addresses)
    other.release()
    with pytest.raises(RuntimeError, match="3 active leases"):
        pool.close()
    logged = [one for one in caplog.records if one.getMessage() == "lease_not_unregistered"]
    assert len(logged) == 3, "once for each lease"
    store.fails = False
    pool.close()
    assert not store.registered


def test_pages_of_a_dropped_pool_can_be_leased_again(store: MooncakeDistributedStore) -> None:
    local = store._local_buffer()
    assert local is not None
    pool = BufferPool(store)
    lease = pool.acquire(12 * MIB)
    assert local.take(12 * MIB) is None
    address = lease.ptr
    del pool, lease
    found: list[Any] = []
    wait_until(lambda: found.append(local.take(12 * MIB)) or found[-1] is not None)  # type: ignore[func-returns-value]
    assert found[-1].ctypes.data == address and local.give_back(address)


def test_sizes_from_zero_to_the_capacity(store: MooncakeDistributedStore) -> None:
    pool = BufferPool(RegistrationsOnly(), max_bytes=MIB)
    with pool.acquire(0) as lease:
        assert lease.size == len(lease.buffer) == 0
    for size in (MIB + 1, 1 << 64, (1 << 64) - 1):
        with pytest.raises(RuntimeError, match="capacity"):
            pool.acquire(size)
    with pytest.raises(RuntimeError, match="capacity"):
        BufferPool(store).acquire((1 << 64) - 1)
    with pytest.raises(TypeError):
        pool.acquire(-1)


def test_sizes_of_numpy_do_not_wrap_around(store: MooncakeDistributedStore) -> None:
    pool = BufferPool(store, max_bytes=64 * MIB, block_on_exhaustion=False)
    size: Any = np.int8(100)
    leases = [pool.acquire(size) for _ in range(3)]
    assert pool._leased.total_bytes == 300 and all(type(lease.size) is int for lease in leases)
    for lease in leases:
        lease.release()
    for wrong in (1.5, "1", None):
        with pytest.raises(TypeError):
            pool.acquire(wrong)  # type: ignore[arg-type]


def test_a_pool_with_open_leases_does_not_close(store: MooncakeDistributedStore) -> None:
    pool = BufferPool(store)
    lease = pool.buffer(1)
    with pytest.raises(RuntimeError, match="1 active leases"):
        pool.close()
    lease.release()
    pool.close()


@pytest.mark.parametrize(("max_mib", "num_leases"), [(1, 16), (16, 16), (18, 18)])
def test_a_pool_has_at_least_the_local_buffer(
    store: MooncakeDistributedStore, max_mib: int, num_leases: int
) -> None:
    pool = BufferPool(store, max_bytes=max_mib * MIB, alignment=1 << 16, block_on_exhaustion=False)
    leases = [pool.acquire(MIB) for _ in range(num_leases)]
    with pytest.raises(RuntimeError, match="exhausted"):
        pool.acquire(MIB)
    for lease in leases:
        lease.release()
    pool.acquire(16 * MIB).release()
    leases = [
        pool.acquire(3 * MIB) for _ in range(num_leases // 3)
    ]  # no size is rounded up to a power of two
    assert len({lease.ptr for lease in leases}) == num_leases // 3
    for lease in leases:
        lease.release()
    with pytest.raises(RuntimeError, match="capacity"):
        pool.acquire(max(16, max_mib) * MIB + 1)
    pool.close()


def test_an_exhausted_pool_waits_or_fails() -> None:
    pool = BufferPool(RegistrationsOnly(), max_bytes=1, alignment=1 << 16)
    lease = pool.acquire(1)
    with pytest.raises(RuntimeError, match="exhausted"):
        pool.acquire(1, block=False)
    with pytest.raises(TimeoutError, match="timed out"):
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
    for bad in ({"alignment": 3}, {"max_bytes": -1}, {"min_size_class": 0}):
        arguments: dict[str, Any] = bad
        with pytest.raises(RuntimeError, match=next(iter(arguments))):
            BufferPool(store, **arguments)
    for no_store in (None, "store"):
        with pytest.raises(RuntimeError, match="store must be"):
            BufferPool(no_store)
    pool = BufferPool(store, max_size_class=4096)  # below the smallest class, and without effect
    with pytest.raises(TypeError, match="negative"):
        pool.prewarm(4096, -1)
    pool.acquire(8192).release()


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
    other = handles[1]
    assert bytes(other) == bytes(handle) and other != handle and handle == handle, "equal only to itself"
    assert {handle: 1, other: 2}[handle] == 1

# SPDX-License-Identifier: Apache-2.0
"""Memory for programs: what ``get_buffer`` returns, and pools of registered buffers with leases.

Leases use the local buffer whose size ``setup`` was given, which is allocated with the first lease;
a lease that does not fit there gets registered memory of its own. Memory is only reused when nothing
refers to it: a view of a lease's bytes makes ``release`` fail. A lease that is dropped without ``release``
is returned when its last view is gone. Errors are ``RuntimeError``, as in the existing package.

The garbage collector may drop a lease at any moment, also in a thread that holds a lock of the pool or of
the store. Its callbacks therefore take no lock: they note what was returned, and it is freed later.
"""

from __future__ import annotations

import array
import contextlib
import math
import mmap
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from mooncake.compat import public_in
from mooncake.compat.store.arguments import number
from mooncake.errors import MooncakeError
from mooncake.log import get_logger
from mooncake.store.allocator import PAGE_BYTES, Allocator
from mooncake.transfer import Region, TransferEngine

log = get_logger(__name__)

ItemT = TypeVar("ItemT")

MIN_SIZE_CLASS = 64 << 10
ALIGNMENT = 8 << 20
MOST_BYTES = 1 << 46
"""Largest lease: half of the addresses of a process."""
COLLECTED_S = 0.05
"""How often a waiting ``acquire`` looks for leases that were dropped without ``release``."""


class BufferHandle(array.array):  # type: ignore[type-arg]
    """An object's bytes in memory of its own, for as long as they are referenced.

    ``memoryview(handle)`` is one-dimensional, of format ``b``, and writable. A subclass of ``array``, because
    only types implemented in C can export a buffer; equal only to itself, so that it can be a key.
    """

    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__
    __ne__ = object.__ne__

    def __new__(cls, size_bytes: int) -> BufferHandle:
        handle: BufferHandle = super().__new__(cls, "b", bytes(size_bytes))  # type: ignore[assignment]
        return handle

    def ptr(self) -> int:
        """Address of the first byte."""
        return self.buffer_info()[0]

    def size(self) -> int:
        return len(self)

    def __repr__(self) -> str:
        return f"<BufferHandle {len(self)} bytes>"


class LocalBuffer:
    """Registered memory of a session, allocated in pages. Uses no real memory before it is written."""

    def __init__(self, engine: TransferEngine, size_bytes: int) -> None:
        self._engine = engine
        self.size_bytes = size_bytes
        self._lock = threading.Lock()
        self._region: Region | None = None
        self._pages: Allocator | None = None
        self._returned: deque[int] = deque()
        """Offsets that the next ``take`` frees."""

    def take(self, size_bytes: int) -> npt.NDArray[np.uint8] | None:
        """Allocate bytes; None when it is full or has no memory."""
        if size_bytes > self.size_bytes or self.size_bytes < PAGE_BYTES:
            return None
        with self._lock:
            if self._region is None or self._pages is None:
                try:
                    size = self.size_bytes
                    self._region = self._engine.allocate(size, huge_pages=False, populate=False)
                except MooncakeError:
                    return None
                self._pages = Allocator(size, PAGE_BYTES)
            for returned in emptied(self._returned):
                self._pages.free(returned)
            offset = self._pages.allocate(size_bytes)
            if offset is None:
                return None
            return np.frombuffer(self._region.view(), np.uint8, size_bytes, offset)

    def give_back(self, address: int) -> bool:
        """Free an allocation, without a lock; False when the address is not in this buffer."""
        region = self._region
        if region is None or not 0 <= address - region.address < region.size_bytes:
            return False
        self._returned.append(address - region.address)
        return True


def emptied(returned: deque[ItemT]) -> Iterator[ItemT]:
    """Remove the items one by one, while other threads may add some or remove some, too."""
    with contextlib.suppress(IndexError):
        while True:
            yield returned.popleft()


class LeasedMemory:
    """Memory that one pool has leased: how much it is, and its return.

    Outlives the pool for as long as a view of a lease exists. What is returned after that is freed in a
    thread of its own, because nothing calls the pool any longer.
    """

    def __init__(self, store: Any, local: LocalBuffer | None) -> None:
        self.changed = threading.Condition(threading.Lock())
        self.total_bytes = 0
        self.num_leases = 0
        self._store = store
        self._local = local
        self._returned: deque[tuple[int, int]] = deque()
        self._own: dict[int, mmap.mmap] = {}
        """Registered memory of leases that did not fit in the local buffer, by address."""
        self._stuck: set[int] = set()
        """Addresses that were returned, and that the store has failed to unregister."""
        self._has_pool = True

    def find(self, size: int, alignment: int) -> npt.NDArray[np.uint8]:
        """Allocate memory for a lease of ``size`` bytes, in whole pages, with the lock held.

        Raises:
            MemoryError: the host has no more memory.
            RuntimeError: the store does not register it.
        """
        room = max(1, -(-size // PAGE_BYTES)) * PAGE_BYTES
        memory = None if self._local is None else self._local.take(room)
        if memory is None:
            memory = self._allocate(room, alignment)
        self.total_bytes += size
        self.num_leases += 1
        address = memory.ctypes.data
        # The array outlives the lease for as long as a view of it exists, and so does its memory.
        weakref.finalize(memory, self._note_return, address, size).atexit = False
        return memory

    def settle(self) -> None:
        """Free what was returned since, and wake those that wait for it; with the lock held.

        What the store fails to unregister stays leased until a later call succeeds.
        """
        failed: list[tuple[int, int]] = []
        for address, size in emptied(self._returned):
            if address in self._own:
                if not self._unregister(address):
                    failed.append((address, size))
                    continue
                del self._own[address]  # only now may the address get another use
            elif self._local is not None:
                self._local.give_back(address)
            self.total_bytes -= size
            self.num_leases -= 1
            self.changed.notify_all()
        for entry in reversed(failed):
            self._returned.appendleft(entry)

    def _unregister(self, address: int) -> bool:
        try:
            self._store.unregister_buffer(address)
        except Exception as error:  # any store's; the caller may have nothing to do with this lease
            if address not in self._stuck:
                self._stuck.add(address)
                remedy = "it is tried again; look for why the store fails"
                log.warning("lease_not_unregistered", address=hex(address), error=str(error), remedy=remedy)
            return False
        self._stuck.discard(address)
        return True

    def settle_unless_busy(self) -> None:
        """Free what was returned, unless the lock is held, which may be by a caller further up."""
        if self.changed.acquire(blocking=False):
            try:
                self.settle()
            finally:
                self.changed.release()

    def pool_is_gone(self) -> None:
        """Note that nothing calls ``settle`` any longer. Called by the garbage collector."""
        self._has_pool = False
        if self._returned:
            self._settle_in_thread()

    def _note_return(self, address: int, size: int) -> None:
        """Note memory that nothing refers to any longer. Called by the garbage collector."""
        self._returned.append((address, size))
        if not self._has_pool:
            self._settle_in_thread()

    def _settle_in_thread(self) -> None:
        def settle() -> None:
            with self.changed:
                self.settle()

        threading.Thread(target=settle, name="buffer-pool", daemon=True).start()

    def _allocate(self, room: int, alignment: int) -> npt.NDArray[np.uint8]:
        try:
            owner = mmap.mmap(-1, room + alignment)
        except (OSError, ValueError, OverflowError) as error:
            raise MemoryError(f"acquire {room} bytes: {error}") from error
        whole = np.frombuffer(owner, np.uint8)
        start = -whole.ctypes.data % alignment
        memory = np.frombuffer(owner, np.uint8, room, start)
        code = self._store.register_buffer(memory.ctypes.data, room)
        if code:
            raise RuntimeError(f"acquire: register_buffer returned {code}; is the store set up?")
        self._own[memory.ctypes.data] = owner
        return memory


class BufferLeaseView:
    """Bytes of a lease as a ``memoryview``."""

    def __init__(self, buffer: memoryview) -> None:
        self.buffer = buffer


class BufferPoolTimeout(RuntimeError, TimeoutError):
    """No memory was released in time."""


class BufferLease:
    """Memory for exclusive use: until ``release``, the end of a ``with`` block, or its last reference."""

    def __init__(self, pool: BufferPool, memory: npt.NDArray[np.uint8], size: int) -> None:
        self._pool = pool
        self._memory: npt.NDArray[np.uint8] | None = memory
        self._ptr = memory.ctypes.data
        self._size = size

    @property
    def ptr(self) -> int:
        """Address of the first byte."""
        self._held()
        return self._ptr

    @property
    def size(self) -> int:
        return self._size

    @property
    def buffer(self) -> memoryview:
        """Writable view of the bytes. The memory cannot be released while the view exists."""
        return self._held()[: self._size].data

    def release(self) -> None:
        """Return the memory to the pool. Idempotent.

        Raises:
            RuntimeError: a view of it still exists.
        """
        if self._memory is None:
            return
        reference = weakref.ref(self._memory)
        self._memory = None
        self._memory = reference()
        if self._memory is not None:
            raise RuntimeError("release: exported views of this lease's bytes are still in use")
        self._pool._leased.settle_unless_busy()

    def _held(self) -> npt.NDArray[np.uint8]:
        if self._memory is None:
            raise RuntimeError("this lease was released")
        return self._memory

    def __enter__(self) -> BufferLease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        state = "released" if self._memory is None else f"at {self._ptr:#x}"
        return f"<BufferLease {self._size} bytes {state}>"


class BufferPool:
    """Pool of registered buffers of a store, in sizes of whole pages.

    Args:
        store: a ``MooncakeDistributedStore``, or anything with ``register_buffer``, ``unregister_buffer``.
        max_bytes: limit for all leases together, at least the store's local buffer; 0 is no limit.
        min_size_class, max_size_class: without effect.
        alignment: alignment of memory that is allocated for one lease.
        block_on_exhaustion: wait for a release, for ``default_timeout`` seconds if that is given.
        max_regions: most leases at a time; None is no limit.
    """

    def __init__(
        self,
        store: Any,
        max_bytes: int = 0,
        min_size_class: int = MIN_SIZE_CLASS,
        max_size_class: int | None = None,
        alignment: int = ALIGNMENT,
        block_on_exhaustion: bool = True,
        default_timeout: float | None = None,
        max_regions: int | None = None,
        prewarm_size: int | None = None,
        prewarm_count: int = 0,
    ) -> None:
        max_bytes = number("BufferPool", "max_bytes", max_bytes)
        min_size_class = number("BufferPool", "min_size_class", min_size_class)
        alignment = number("BufferPool", "alignment", alignment)
        if max_bytes < 0 or min_size_class < 1 or alignment < 1 or alignment & (alignment - 1):
            raise RuntimeError(
                f"BufferPool: max_bytes ({max_bytes}) must not be negative, min_size_class "
                f"({min_size_class}) must be positive, alignment ({alignment}) a power of two"
            )
        if not callable(getattr(store, "register_buffer", None)):
            raise RuntimeError(f"BufferPool: store must be a MooncakeDistributedStore, not {store!r}")
        local: LocalBuffer | None = getattr(store, "_local_buffer", lambda: None)()
        self._leased = LeasedMemory(store, local)
        # ``setup`` has already granted the local buffer: the limit is for the memory beyond it.
        self._max_bytes = max(max_bytes, local.size_bytes) if max_bytes and local is not None else max_bytes
        self._alignment = alignment
        self._blocks = block_on_exhaustion
        self._timeout_s = default_timeout
        self._max_regions = max_regions
        self._is_closed = False
        weakref.finalize(self, self._leased.pool_is_gone).atexit = False
        if prewarm_size is not None and prewarm_count:
            self.prewarm(prewarm_size, prewarm_count)

    def acquire(self, size: int, block: bool | None = None, timeout: float | None = None) -> BufferLease:
        """Acquire a lease on ``size`` bytes.

        Raises:
            TypeError: the size is negative, or no integer.
            RuntimeError: the size exceeds the pool's capacity; the pool is closed, or is exhausted and may
                not wait.
            BufferPoolTimeout: nothing was released in time.
            MemoryError: the host has no more memory.
        """
        size = number("acquire", "size", size)  # a total of numpy's integers would wrap around
        if size < 0:
            raise TypeError(f"acquire: size {size} is negative")
        if size > MOST_BYTES or (self._max_bytes and size > self._max_bytes):
            most = self._max_bytes or MOST_BYTES
            raise RuntimeError(f"acquire: size {size} exceeds the capacity of the pool, {most} bytes")
        waits = self._blocks if block is None else block
        timeout_s = self._timeout_s if timeout is None else timeout
        until = None if timeout_s is None else time.monotonic() + timeout_s
        with self._leased.changed:
            while (memory := self._find(size)) is None:
                if not waits:
                    leased = self._leased.total_bytes
                    raise RuntimeError(
                        f"acquire: the pool is exhausted: {leased} bytes are leased, {size} asked"
                    )
                left_s = math.inf if until is None else until - time.monotonic()
                if left_s <= 0:
                    raise BufferPoolTimeout(f"acquire: timed out: no {size} bytes released in {timeout_s} s")
                self._leased.changed.wait(min(left_s, COLLECTED_S))
        return BufferLease(self, memory, size)

    def buffer(self, size: int, block: bool | None = None, timeout: float | None = None) -> BufferLease:
        """Same as ``acquire``, for ``with pool.buffer(size) as lease:``."""
        return self.acquire(size, block, timeout)

    def prewarm(self, size: int, count: int) -> None:
        """Touch memory for ``count`` leases, so that the first ones find it resident."""
        if number("prewarm", "count", count) < 0:
            raise TypeError(f"prewarm: count {count} is negative")
        leases = [self.acquire(size, block=False) for _ in range(count)]
        for lease in leases:
            np.frombuffer(lease.buffer, np.uint8)[:: mmap.PAGESIZE] = 0
            lease.release()

    def close(self) -> None:
        """Release the memory. Idempotent.

        Raises:
            RuntimeError: leases are open.
        """
        with self._leased.changed:
            self._leased.settle()
            if self._leased.num_leases:
                raise RuntimeError(f"close: {self._leased.num_leases} active leases; release them first")
            self._is_closed = True

    def _find(self, size: int) -> npt.NDArray[np.uint8] | None:
        """Allocate memory for a lease, if any is available now."""
        self._leased.settle()
        if self._is_closed:
            raise RuntimeError("acquire: this pool is closed")
        if self._max_bytes and self._leased.total_bytes + size > self._max_bytes:
            return None
        if self._max_regions is not None and self._leased.num_leases >= self._max_regions:
            return None
        return self._leased.find(size, self._alignment)


public_in("mooncake.store", BufferHandle, BufferLease, BufferLeaseView, BufferPool)

RegisteredBufferLease = BufferLease
RegisteredBufferLeaseView = BufferLeaseView
RegisteredBufferPool = BufferPool

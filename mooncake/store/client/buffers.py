# SPDX-License-Identifier: Apache-2.0
"""Makes the memory of callers accessible to transfer, which uses registered memory only.

Large buffers are registered for the duration of one operation (cheap: no page is touched or pinned on
transports that need no pinning); several operations that use one buffer at the same time register it each for
itself. Small ones are copied through a staging region that is registered once, because a copy of a few KiB
costs less than a registration. Memory that the caller registered, such as a worker's KV pool, is used as it
is; ``write_ranges`` and ``read_ranges`` accept its addresses directly.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any, TypeAlias

from mooncake.errors import InvalidArgument, MooncakeError, Unavailable
from mooncake.store.allocator import Allocator
from mooncake.transfer import Region, TransferEngine
from mooncake.transfer.memory import is_readable, span_and_export

Buffer: TypeAlias = Any
"""Anything with the buffer protocol, a contiguous CPU tensor, or ``(address, size_bytes)``."""

STAGED_BYTES = 256 << 10
"""Largest operation, in bytes over all its buffers, that goes through the staging region."""
STAGING_BYTES = 8 << 20
SLOT_BYTES, NUM_SLOTS = 64 << 10, 16
SLOTS_END = NUM_SLOTS * SLOT_BYTES
"""The beginning of the staging region is divided into slots for small operations, which take the one that was
freed last: its memory is still in the processor's cache, and nothing is searched."""

_BYTES_HEADER = bytes.__basicsize__ - 1
"""Offset of the content of a ``bytes`` object: CPython stores it, and a final NUL, inside the object."""

_new_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.restype = ctypes.py_object
_new_bytes.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t]


def span_to_write(buffer: Buffer, exports: list[object]) -> tuple[int, int]:
    """(address, size in bytes) of a buffer that a get may fill; raises InvalidArgument.

    What keeps the memory in its place while it is referenced is appended to ``exports``.
    """
    address, size_bytes, is_writable, export = span_and_export(buffer)
    if not is_writable:
        export = None  # the traceback would keep it
        raise InvalidArgument("buffer", "read-only", "a writable buffer")
    exports.append(export)
    return address, size_bytes


def span_to_read(buffer: Buffer, exports: list[object] | None = None) -> tuple[int, int]:
    """(address, size in bytes) of a buffer that a put may read, as ``span_to_write``.

    Without ``exports`` the caller keeps the memory in its place.
    """
    export: object = buffer
    if type(buffer) is bytes:
        address, size_bytes = id(buffer) + _BYTES_HEADER, len(buffer)
    else:
        address, size_bytes, _, export = span_and_export(buffer)
    if exports is not None:
        exports.append(export)
    return address, size_bytes


class RegisteredBuffers:
    """Buffers of one operation, at addresses that transfer may use until the ``with`` block ends.

    Until then callers can neither resize nor close the buffers that are used in place.
    """

    __slots__ = ("_exports", "_memory", "_regions", "_staged", "_staging", "addresses", "sizes")

    def __init__(self, memory: LocalMemory, sizes: list[int]) -> None:
        self._memory = memory
        self._regions: list[Region] = []
        self._staged: int | None = None
        self._staging: Region | None = None
        """Keeps the staging region mapped when the store is closed while this operation is under way."""
        self._exports: list[object] = []
        self.addresses: list[int] = []
        self.sizes = sizes

    def __enter__(self) -> RegisteredBuffers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def release(self) -> None:
        """Unregister the buffers and give them back to their owners; none of them is being moved."""
        try:
            self._memory.release(self._regions, self._staged)
        finally:
            self._exports.clear()
            self._staging = None

    def keep(self, exports: list[object]) -> None:
        """Keep the memory of the buffers in its place until they are released."""
        self._exports = exports

    def register(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Register ``ranges``; adjacent ones, such as rows of one array, as one range."""
        self.addresses = [address for address, _ in ranges]
        start = end = 0
        try:
            for address, size_bytes in sorted(ranges):
                if address <= end and start < end:
                    end = max(end, address + size_bytes)
                    continue
                self._register(start, end)
                start, end = address, address + size_bytes
            self._register(start, end)
        except MooncakeError:
            self._memory.release(self._regions, None)  # no other object refers to them yet
            raise

    def _register(self, start: int, end: int) -> None:
        if start < end and not self._memory.has(start, end - start):
            self._regions.append(self._memory.engine.register((start, end - start), is_brief=True))

    def stage(self, offset: int, staging: Region) -> None:
        """Place the buffers in a row at ``offset`` of the staging region."""
        self._staged, self._staging = offset, staging
        at = staging.address + offset
        for size_bytes in self.sizes:
            self.addresses.append(at)
            at += size_bytes

    def copy_in(self, buffers: Sequence[Buffer], ranges: Sequence[tuple[int, int]]) -> bool:
        """Copy ``buffers``, whose memory is ``ranges``, to their places in the staging region.

        Addresses that a caller has given are checked, as a registration checks those of larger buffers.
        False: one of them is a device's, which the processor cannot copy.
        """
        try:
            for buffer, (address, size_bytes), staged in zip(buffers, ranges, self.addresses, strict=True):
                if type(buffer) is tuple and size_bytes and not is_readable(address, size_bytes):
                    if self._memory.engine.is_device_memory(address):
                        return False
                    raise InvalidArgument(
                        "buffer", buffer, "memory of this process; some of it cannot be read here"
                    )
                ctypes.memmove(staged, address, size_bytes)
        except InvalidArgument:
            self.release()
            raise
        return True

    @property
    def is_staged(self) -> bool:
        return self._staged is not None


class LocalMemory:
    """Prepares callers' buffers for transfer. Thread-safe."""

    def __init__(self, engine: TransferEngine) -> None:
        self.engine = engine
        self._lock = threading.Lock()
        self._is_closed = False
        self._staging: Region | None = None
        self._slots = [number * SLOT_BYTES for number in reversed(range(NUM_SLOTS))]
        """Offsets of the free ones. Its methods are safe from several threads."""
        self._ranges = Allocator(STAGING_BYTES - SLOTS_END)
        """The part of the staging region behind the slots."""
        self._last: Region | None = None
        """Region of the caller that the last lookup found; the next buffer usually lies in it as well."""

    def source(self, buffers: Sequence[Buffer]) -> RegisteredBuffers:
        """The contents of ``buffers``, to be read from ``addresses``."""
        exports: list[object] = []
        try:
            ranges = [span_to_read(buffer, exports) for buffer in buffers]
            prepared = self._prepare(ranges)
            if prepared.is_staged and prepared.copy_in(buffers, ranges):
                return prepared
            if prepared.is_staged:  # some of them are in a device's memory, which only a transfer reads
                prepared.release()
                prepared = RegisteredBuffers(self, prepared.sizes)
                prepared.register(ranges)
            prepared.keep(exports)
        except MooncakeError:
            exports.clear()  # the traceback would keep them
            raise
        return prepared

    def target(self, buffers: Sequence[Buffer]) -> RegisteredBuffers:
        """``buffers`` themselves, to be written at ``addresses``."""
        exports: list[object] = []
        try:
            ranges = [span_to_write(buffer, exports) for buffer in buffers]
            prepared = RegisteredBuffers(self, [size_bytes for _, size_bytes in ranges])
            if len(ranges) == 1 and self.has(*ranges[0]):
                prepared.addresses.append(ranges[0][0])
            else:
                prepared.register(ranges)
        except MooncakeError:
            exports.clear()  # the traceback would keep them
            raise
        prepared.keep(exports)
        return prepared

    def fresh(self, sizes: list[int]) -> tuple[RegisteredBuffers, list[bytes]]:
        """New ``bytes`` objects of these sizes, to be filled at ``addresses`` before they are published."""
        values = [_new_bytes(None, size_bytes) for size_bytes in sizes]
        ranges = [(id(value) + _BYTES_HEADER, len(value)) for value in values]
        return self._prepare(ranges), values

    def unstage(self, prepared: RegisteredBuffers, values: Sequence[bytes], arrived: Sequence[bool]) -> None:
        """Copy what has ``arrived`` in the staging region into ``values`` of ``fresh``."""
        if prepared.is_staged:
            for staged, value, is_here in zip(prepared.addresses, values, arrived, strict=True):
                if is_here:
                    ctypes.memmove(id(value) + _BYTES_HEADER, staged, len(value))

    def close(self) -> None:
        """Unregister the staging region; it stays mapped until the operations that use it have ended."""
        with self._lock:
            self._is_closed = True
            if self._staging is not None:
                self.engine.unregister(self._staging)
                self._staging = None

    def has(self, address: int, size_bytes: int) -> bool:
        """Whether the caller has already registered that memory."""
        last = self._last
        if last is None or last.is_closed or not 0 <= address - last.address <= last.size_bytes - size_bytes:
            last = self._last = self.engine.region_of(address, size_bytes)
        return last is not None

    def _prepare(self, ranges: Sequence[tuple[int, int]]) -> RegisteredBuffers:
        prepared = RegisteredBuffers(self, [size_bytes for _, size_bytes in ranges])
        if all(itertools.starmap(self.has, ranges)):
            prepared.addresses += [address for address, _ in ranges]
            return prepared
        total_bytes = sum(prepared.sizes)
        if 0 < total_bytes <= STAGED_BYTES:
            staging = self._staging or self._allocate_staging()
            offset = self._free_range(total_bytes)
            if offset is not None:
                prepared.stage(offset, staging)
                return prepared
        prepared.register(ranges)
        return prepared

    def _allocate_staging(self) -> Region:
        with self._lock:
            if self._is_closed:  # by another thread: a new region would stay registered
                raise Unavailable("this store was closed")
            if self._staging is None:
                self._staging = self.engine.allocate(STAGING_BYTES, huge_pages=False, populate=False)
            return self._staging

    def _free_range(self, size_bytes: int) -> int | None:
        """Offset of a range of the staging region, until it is released; None: none is free."""
        if size_bytes <= SLOT_BYTES:
            try:
                return self._slots.pop()
            except IndexError:  # that many threads are at work
                pass
        with self._lock:
            offset = self._ranges.allocate(size_bytes)
        return None if offset is None else SLOTS_END + offset

    def release(self, regions: list[Region], staged: int | None) -> None:
        """Unregister ``regions`` and free the staged range at offset ``staged``."""
        for region in regions:
            self.engine.unregister(region)
        if staged is None:
            return
        if staged < SLOTS_END:
            self._slots.append(staged)
            return
        with self._lock:
            self._ranges.free(staged - SLOTS_END)

# SPDX-License-Identifier: Apache-2.0
"""Memory that a program has registered, by the rules of the existing engine: no overlaps, found by address.

Also its managed buffers: memory that the engine provides in power-of-two sizes out of slabs that are
registered once, shared with peers on this host, and backed by real memory only once they are written to.
"""

from __future__ import annotations

import bisect
import ctypes
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from mooncake.compat.transfer.error_codes import EngineCode, EngineCodeError
from mooncake.errors import InvalidArgument
from mooncake.transfer.descriptor import Column
from mooncake.transfer.engine import TransferEngine
from mooncake.transfer.memory import is_readable, is_writable
from mooncake.transfer.topology import ANYWHERE, is_location
from mooncake.transfer.transports import Region

SLAB_BYTES = 2 << 30
SMALLEST_BYTES = 8 << 10


class MemoryUse:
    """Memory that a call in progress uses."""

    __slots__ = ("_columns", "ended", "num_bytes", "spans", "thread")

    def __init__(self, spans: Sequence[tuple[int, int]] | npt.NDArray[np.uint64]) -> None:
        self.spans = spans
        self.thread = threading.get_ident()
        self.ended: threading.Event | None = None
        """Made by the first thread that waits for it."""
        self._columns: tuple[list[int], list[int]] | None = None
        """Starts in order, and the highest end up to each; with them ``num_bytes`` is set."""

    def overlaps(self, region: Region) -> bool:
        """Whether some of the region's bytes are used. The spans are sorted when this is first asked."""
        if self._columns is None:
            spans = [span for span in self.spans if span[1]]  # an empty one may have any address
            columns = np.array(spans, dtype=np.uint64).reshape(-1, 2)
            columns = columns[np.argsort(columns[:, 0])]
            self.num_bytes = int(columns[:, 1].sum())
            self._columns = columns[:, 0].tolist(), np.maximum.accumulate(columns.sum(axis=1)).tolist()
        starts, ends = self._columns
        before = bisect.bisect_left(starts, region.address + region.size_bytes)
        return before > 0 and ends[before - 1] > region.address


class RegisteredMemory:
    """Registered regions and managed buffers of one engine. Thread-safe.

    ``transfer_s``: seconds that a call may take to move so many bytes.
    """

    def __init__(self, engine: TransferEngine, transfer_s: Callable[[int], float]) -> None:
        self._engine = engine
        self._transfer_s = transfer_s
        self._lock = threading.RLock()
        self._starts: list[int] = []
        self._regions: dict[int, Region] = {}
        self._columns: tuple[Column, Column, npt.NDArray[np.bool_]] | None = None
        """Starts, ends, and flags of the regions that are writable; None until they are needed again."""
        self._locations: dict[int, str] = {}
        """Locations of the regions that were given one, by their starts."""
        self._uses: dict[MemoryUse, None] = {}
        """Those of the calls in progress."""
        self._retired: dict[tuple[int, int], tuple[Region, str]] = {}
        """Regions, with their locations, that the program has unregistered while a call used their memory, by
        their spans."""
        self._slabs: list[tuple[Region, int]] = []
        self._free: dict[int, list[int]] = {}
        self._allocated: dict[int, int] = {}

    def add(self, addresses: Sequence[int], sizes: Sequence[int], location: str = ANYWHERE) -> None:
        """Register all of them or none. ``location``: ``cpu:<node>`` or ``cuda:<n>``; others are ignored.

        Raises:
            InvalidArgument: a size that is not positive, memory that cannot be registered.
            EngineCodeError: a range overlaps one that is registered, or another of these.
        """
        if len(addresses) != len(sizes):
            raise InvalidArgument(
                "capacities", f"{len(sizes)} sizes", f"one for each of {len(addresses)} addresses"
            )
        where = location if is_location(location) else ANYWHERE
        with self._lock:
            added: list[int] = []
            try:
                for address, size in zip(addresses, sizes, strict=True):
                    can_be_written = self._can_be_written(address, size)
                    self._check_overlap(address, size)
                    memory = (address, size) if can_be_written else _read_only_view(address, size)
                    region, retired_where = self._retired.get((address, size), (None, ""))
                    is_same = retired_where == where
                    if region is not None and is_same and region.is_writable == can_be_written:
                        del self._retired[address, size]
                    else:
                        region = self._engine.register(memory, where)
                    self._insert(address, region)
                    if where != ANYWHERE:
                        self._locations[address] = where
                    added.append(address)
            except BaseException:
                for address in added:
                    self._drop(address)
                raise

    def remove(self, addresses: Sequence[int]) -> None:
        """Unregister memory; addresses that are registered are removed even when another is not.

        The program may free the memory afterwards, so this waits for the calls of other threads that use it.
        A thread that is within a call itself does not, because they may wait for that call: theirs are
        cancelled, as are those that are late.

        Raises:
            EngineCodeError: one of them is not the start of registered memory.
        """
        with self._lock:
            slabs = [slab.address for slab, _ in self._slabs]
            unknown = [a for a in addresses if a not in self._regions or a in slabs]
            retired: list[Region] = []
            for address in addresses:
                if address not in unknown and address in self._regions:
                    region = self._regions[address]
                    if self._drop(address):
                        retired.append(region)
            uses = [use for use in self._uses if any(map(use.overlaps, retired))] if retired else []
            for use in uses:
                use.ended = use.ended or threading.Event()
        if retired:
            self._wait_and_unregister(retired, uses)
        if unknown:
            raise EngineCodeError(
                EngineCode.ADDRESS_NOT_REGISTERED,
                f"unregister {unknown[0]:#x}: nothing registered begins there",
            )

    def _wait_and_unregister(self, retired: Sequence[Region], uses: Sequence[MemoryUse]) -> None:
        """Wait for the end of ``uses`` and unregister what is not registered again by then.

        What a call uses that began meanwhile is unregistered at the end of that one: such a call moves bytes
        of memory that its own thread keeps.
        """
        with self._lock:
            is_within_call = any(use.thread == threading.get_ident() for use in self._uses)
        began, have_ended = time.monotonic(), not is_within_call
        for use in uses if have_ended else ():
            assert use.ended is not None
            left_s = began + self._transfer_s(use.num_bytes) - time.monotonic()
            have_ended = use.ended.wait(max(0.0, left_s)) and have_ended
        with self._lock:
            for region in retired:
                span = region.address, region.size_bytes
                is_left = self._retired.get(span, (None, ""))[0] is region
                if is_left and not (have_ended and self._is_in_use(region)):
                    del self._retired[span]
                    self._engine.unregister(region)

    def begin_use(self, spans: Sequence[tuple[int, int]] | npt.NDArray[np.uint64]) -> MemoryUse:
        """Keep what is registered of these spans, (address, size) each, in the engine until ``end_use``.

        Another thread may register and unregister the same memory around each of its own calls, and the
        engine takes any region that contains the bytes: it would cancel the transfers of this call.
        """
        use = MemoryUse(spans)
        with self._lock:
            self._uses[use] = None
        return use

    def end_use(self, use: MemoryUse) -> None:
        with self._lock:
            del self._uses[use]
            if self._retired:
                for span, (region, _) in list(self._retired.items()):
                    if not self._is_in_use(region):
                        del self._retired[span]
                        self._engine.unregister(region)
            if use.ended is not None:
                use.ended.set()

    def _is_in_use(self, region: Region) -> bool:
        return any(use.overlaps(region) for use in self._uses)

    def uncovered(
        self, addresses: Column, sizes: Column, to_write: bool = False
    ) -> npt.NDArray[np.bool_] | None:
        """Flags of the ranges that do not lie in one registered region; None when all do. Empty ones do.

        With ``to_write`` the regions that may only be read do not count.
        """
        if len(addresses) == 1 and self._covers(int(addresses[0]), int(sizes[0]), to_write):
            return None  # takes a tenth of the time of the general case
        with self._lock:
            if self._columns is None:
                regions = [self._regions[start] for start in self._starts]
                starts = np.array(self._starts, dtype=np.uint64)
                region_sizes = np.array([region.size_bytes for region in regions], dtype=np.uint64)
                are_writable = np.array([region.is_writable for region in regions], dtype=np.bool_)
                self._columns = starts, starts + region_sizes, are_writable
            starts, ends, are_writable = self._columns
        at = np.searchsorted(starts, addresses, side="right").astype(np.int64) - 1
        if not len(starts):
            missing = sizes > 0
        else:
            nearest = np.maximum(at, 0)
            missing = ((at < 0) | (addresses + sizes > ends[nearest])) & (sizes > 0)
            if to_write:
                missing |= ~are_writable[nearest] & (sizes > 0)
        return missing if missing.any() else None

    def _covers(self, address: int, size: int, to_write: bool) -> bool:
        with self._lock:
            at = bisect.bisect_right(self._starts, address) - 1
            if at < 0:
                return False
            region = self._regions[self._starts[at]]
            is_inside = address + size <= region.address + region.size_bytes
            return is_inside and (region.is_writable or not to_write)

    def end_of(self, address: int) -> int | None:
        """Address after the region in which ``address`` lies; None when that is not registered."""
        with self._lock:
            at = bisect.bisect_right(self._starts, address) - 1
            if at < 0:
                return None
            end = self._starts[at] + self._regions[self._starts[at]].size_bytes
            return end if address < end else None

    def first(self) -> int:
        """Address of the oldest registered memory; 0 without any."""
        with self._lock:
            return next(iter(self._regions), 0)

    # Managed buffers --------------------------------------------------------------------------------

    def allocate(self, size: int) -> int:
        """Allocate ``size`` bytes until ``free``; their address.

        Raises:
            OutOfMemory: no address space left.
            InvalidArgument: ``size`` is not positive.
        """
        if size <= 0:
            raise InvalidArgument("length", size, "more than 0")
        room = max(SMALLEST_BYTES, 1 << (size - 1).bit_length())
        with self._lock:
            free = self._free.setdefault(room, [])
            address = free.pop() if free else self._carve(room)
            self._allocated[address] = room
            return address

    def free(self, address: int) -> None:
        """Free a managed buffer.

        Raises:
            EngineCodeError: it is not a managed buffer.
        """
        with self._lock:
            room = self._allocated.pop(address, 0)
            if not room:
                raise EngineCodeError(
                    EngineCode.ADDRESS_NOT_REGISTERED, f"free {address:#x}: no managed buffer begins there"
                )
            self._free[room].append(address)

    def _carve(self, room: int) -> int:
        for at, (slab, used) in enumerate(self._slabs):
            if used + room <= slab.size_bytes:
                self._slabs[at] = slab, used + room
                return slab.address + used
        slab = self._engine.allocate(max(SLAB_BYTES, room), huge_pages=False, populate=False)
        self._insert(slab.address, slab)
        self._slabs.append((slab, room))
        return slab.address

    # The list ---------------------------------------------------------------------------------------

    def _can_be_written(self, address: int, size: int) -> bool:
        """Whether bytes may be moved into that memory, and not only from it.

        Memory that may only be written counts: where a page may be written, no processor refuses to read it.

        Raises:
            InvalidArgument: not all of it is memory that may be accessed.
        """
        if address <= 0 or size <= 0:
            raise InvalidArgument("memory", (address, size), "an address and a size above 0")
        if is_writable(address, size) or self._engine.is_device_memory(address):
            return True
        if not is_readable(address, size):
            allowed = "memory of this process that may be read or written, or a device's"
            raise InvalidArgument("memory", f"[{address:#x}, +{size})", allowed)
        return False

    def _check_overlap(self, address: int, size: int) -> None:
        at = bisect.bisect_left(self._starts, address + size) - 1
        if at >= 0:
            other = self._regions[self._starts[at]]
            if other.address + other.size_bytes > address:
                raise EngineCodeError(
                    EngineCode.ADDRESS_OVERLAPPED,
                    f"register [{address:#x}, +{size}): overlaps [{other.address:#x}, +{other.size_bytes}), "
                    "which is registered; unregister that first",
                )

    def _insert(self, address: int, region: Region) -> None:
        bisect.insort(self._starts, address)
        self._regions[address] = region
        self._columns = None

    def _drop(self, address: int) -> bool:
        """Unregister a region, or retire it when it is in use; whether it is retired."""
        self._starts.remove(address)
        self._columns = None
        region, where = self._regions.pop(address), self._locations.pop(address, ANYWHERE)
        if not self._is_in_use(region):
            self._engine.unregister(region)
            return False
        span = address, region.size_bytes
        if span in self._retired:  # that one had another location, or could not be written
            self._engine.unregister(self._retired[span][0])
        self._retired[span] = region, where
        return True


def _read_only_view(address: int, size: int) -> memoryview:
    """View of memory at an address, which the caller has checked; nothing is moved into a read-only view."""
    return memoryview((ctypes.c_uint8 * size).from_address(address)).toreadonly()


def copy_in(address: int, data: bytes) -> None:
    """Copy from Python to an address, which the caller has checked."""
    ctypes.memmove(address, data, len(data))


def copy_out(address: int, size: int) -> bytes:
    """Copy from an address, which the caller has checked, to Python."""
    return bytes((ctypes.c_char * size).from_address(address))  # ``string_at`` takes 2 GiB at most

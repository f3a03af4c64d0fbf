# SPDX-License-Identifier: Apache-2.0
"""Address ranges of Python buffers, and the memory that is available.

Recognises numpy, torch and the buffer protocol by their behaviour only; imports no heavy library.
"""

from __future__ import annotations

import bisect
import ctypes
import errno
import fcntl
import itertools
import mmap
import operator
import re
import struct
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from mooncake import _native
from mooncake.errors import InvalidArgument

_NUMPY = (np.ndarray, np.generic)

_msync = ctypes.PyDLL(None).msync
"""Called with the interpreter's lock, because it waits for nothing here."""
_msync.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

_madvise = ctypes.PyDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

_POPULATE_READ, _POPULATE_WRITE = 22, 23
"""Advice that touches every page of a range, as a read or a write of it would; since Linux 5.14."""
POPULATED_BYTES = 64 << 10
"""Largest range whose pages are touched in order to check it; of a larger one, the mappings are checked."""
_READABLE, _WRITABLE = 1, 2
_PROCMAP_QUERY = 0xC0686611
"""Request for the mapping that contains an address, from /proc/self/maps; since Linux 6.11."""
_PROCMAP_BYTES = 104


class SpanIndex:
    """Address ranges, which may overlap, in the order that finds the one around another range."""

    def __init__(self, spans: Sequence[tuple[int, int]]) -> None:
        """``spans``: (address, size in bytes)."""
        self._order = sorted(range(len(spans)), key=lambda at: spans[at])
        self._starts = [spans[at][0] for at in self._order]
        self._ends = [sum(spans[at]) for at in self._order]
        self._farthest = list(itertools.accumulate(self._ends, max))
        """For each, the largest end of it and those before it."""

    def around(self, address: int, size_bytes: int) -> int | None:
        """Position in ``spans`` of one that contains all of the range; None: none does."""
        at = bisect.bisect_right(self._starts, address) - 1
        while at >= 0 and self._farthest[at] >= address + size_bytes:
            if self._ends[at] >= address + size_bytes:
                return self._order[at]
            at -= 1
        return None


def span_of(buffer: Any) -> tuple[int, int, bool]:
    """(address, size in bytes, is writable) of a contiguous buffer, as ``span_and_export``.

    Raises:
        InvalidArgument: it is not contiguous, not in main memory, or no buffer at all.
    """
    return span_and_export(buffer)[:3]


def span_and_export(buffer: Any) -> tuple[int, int, bool, object]:
    """(address, size in bytes, is writable, export) of a contiguous buffer.

    ``buffer`` is anything with the buffer protocol, a torch tensor on the CPU, or a tuple
    ``(address, size_bytes)`` whose memory the caller guarantees. While the export is referenced, Python
    neither frees nor resizes the memory: ``bytearray.clear`` and ``mmap.close`` raise BufferError. It is None
    for a tuple; for a tensor it is the storage, which torch itself can still resize.

    Raises:
        InvalidArgument: it is not contiguous, not in main memory, or no buffer at all; its memory does not
            hold its values, as those of an array of objects or a conjugated or sparse tensor.
    """
    if isinstance(buffer, tuple):
        try:
            address, size = map(operator.index, buffer)
        except (TypeError, ValueError) as error:
            raise InvalidArgument("buffer", buffer, "(address, size_bytes), two integers") from error
        if address < 0 or size < 0 or address + size > 1 << 64:
            raise InvalidArgument("buffer", buffer, "(address, size_bytes), neither negative, within 64 bits")
        return address, size, True, None
    if hasattr(buffer, "data_ptr"):
        if buffer.device.type != "cpu":
            raise InvalidArgument("buffer", type(buffer), "a contiguous tensor in CPU memory")
        return *_tensor_span(buffer), True, buffer.untyped_storage()
    # No view is bound to a name where an exception is raised: its traceback would keep the memory exported.
    try:
        if _holds_objects(buffer):
            raise InvalidArgument("buffer", type(buffer), "bytes or numbers, not addresses of Python objects")
        flat = np.frombuffer(buffer, dtype=np.uint8)
    except TypeError as error:
        raise InvalidArgument("buffer", type(buffer), "a buffer, a tensor or (address, size)") from error
    except (ValueError, BufferError) as error:
        raise InvalidArgument("buffer", type(buffer), f"contiguous memory ({error})") from error
    if flat.nbytes == 0:
        return 0, 0, flat.flags.writeable, None
    if flat.flags.writeable:  # three times as fast as ``flat.ctypes.data``
        return ctypes.addressof(ctypes.c_char.from_buffer(flat.data)), flat.nbytes, True, flat
    return int(flat.ctypes.data), flat.nbytes, False, flat


def _tensor_span(tensor: Any) -> tuple[int, int]:
    """(address, size in bytes) of a tensor whose memory holds its values, one behind the other.

    Raises:
        InvalidArgument: torch would compute the values from what the memory holds, or it holds only some.
    """
    if tensor.is_conj() or tensor.is_neg():
        what = "conjugated" if tensor.is_conj() else "negated"
        allowed = "a tensor whose values are in memory: call resolve_conj() and resolve_neg() first"
        raise InvalidArgument("buffer", f"a tensor that is only marked as {what}", allowed)
    if not _is_strided(tensor.layout):
        raise InvalidArgument(
            "buffer", f"a {tensor.layout} tensor", "a contiguous tensor: call to_dense() first"
        )
    if not tensor.is_contiguous():
        raise InvalidArgument("buffer", type(tensor), "a contiguous tensor")
    address, size = int(tensor.data_ptr()), int(tensor.numel() * tensor.element_size())
    if size and not address:
        raise InvalidArgument("buffer", "a tensor without memory", "a tensor whose storage is allocated")
    return address, size


@cache
def _is_strided(layout: Any) -> bool:
    """Whether a layout of torch, which is not imported here, is the usual one."""
    return str(layout) == "torch.strided"


def _holds_objects(buffer: Any) -> bool:
    """Whether the items of a Python buffer are, or contain, references to Python objects."""
    if isinstance(buffer, _NUMPY):  # not all of numpy's types have a format
        return bool(buffer.dtype.hasobject)
    form = memoryview(buffer).format
    return "O" in form and "O" in re.sub(":[^:]*:", "", form)  # names of fields are in colons


def device_span_of(buffer: Any) -> tuple[int, int, bool] | None:
    """(address, size in bytes, is writable) of a contiguous CUDA tensor or of anything else with
    ``__cuda_array_interface__``; None when ``buffer`` is neither.

    Raises:
        InvalidArgument: it is not contiguous, or a tensor whose memory does not hold its values.
    """
    if hasattr(buffer, "data_ptr") and hasattr(buffer, "device"):
        if buffer.device.type != "cuda":
            return None
        return *_tensor_span(buffer), True
    described = getattr(buffer, "__cuda_array_interface__", None)
    if described is None:
        return None
    item = np.dtype(described["typestr"]).itemsize
    shape = tuple(int(length) for length in described["shape"])
    packed = tuple(item * int(np.prod(shape[i + 1 :], dtype=np.int64)) for i in range(len(shape)))
    strides = described.get("strides")
    if strides is not None and any(a != b for a, b, n in zip(strides, packed, shape, strict=True) if n > 1):
        raise InvalidArgument("buffer", type(buffer), "contiguous device memory")
    address, is_read_only = described["data"]
    return int(address), item * int(np.prod(shape, dtype=np.int64)), not is_read_only


def _is_range(address: int, size: int) -> bool:
    """Whether a process can have this range: it is not empty, and no address has more than 57 bits."""
    return address > 0 and size > 0 and address + size <= 1 << 57


def is_mapped(address: int, size: int) -> bool:
    """Whether all of the range is mapped in this process, with any protection."""
    if not _is_range(address, size):
        return False
    start = address & -mmap.PAGESIZE
    return bool(_msync(start, address + size - start, 1) == 0)  # MS_ASYNC: checks, writes nothing


def is_readable(address: int, size: int) -> bool:
    """Whether the processor may read all of the range, which it may not where device memory is mapped."""
    return _permits(address, size, _READABLE, _POPULATE_READ)


def is_writable(address: int, size: int) -> bool:
    """Whether the processor may write all of the range; a mapped file may be read-only."""
    return _permits(address, size, _WRITABLE, _POPULATE_WRITE)


def _permits(address: int, size: int, permission: int, populate: int) -> bool:
    if not _is_range(address, size):
        return False
    start, end = address & -mmap.PAGESIZE, address + size
    if end - start <= POPULATED_BYTES:  # then it takes little longer than ``msync``
        if _madvise(start, end - start, populate) == 0:
            return True
        if ctypes.get_errno() in (errno.ENOMEM, errno.EFAULT):
            return False
    try:
        return _mappings_permit(start, end, permission)
    except OSError:  # there is no /proc
        return is_mapped(address, size)


def _mappings_permit(start: int, end: int, permission: int) -> bool:
    """Whether mappings with ``permission`` cover the range. Raises OSError: /proc cannot be read."""
    with open("/proc/self/maps", "rb", buffering=0) as maps:  # not kept open: a child has mappings of its own
        query = bytearray(_PROCMAP_BYTES)
        while start < end:
            struct.pack_into("<QQQ", query, 0, _PROCMAP_BYTES, permission, start)
            try:
                fcntl.ioctl(maps, _PROCMAP_QUERY, query)
            except OSError as error:
                if error.errno == errno.ENOENT:
                    return False
                break  # an older kernel
            start = struct.unpack_from("<Q", query, 32)[0]
        if start >= end:
            return True
        listed = maps.readall()
    at, letter = permission - 1, b"rw"[permission - 1]
    for line in listed.splitlines():
        bounds, permissions = line.split(b" ", 2)[:2]
        first, last = (int(bound, 16) for bound in bounds.split(b"-"))
        if last > start:
            if first > start or permissions[at] != letter:
                return False
            start = last
            if start >= end:
                return True
    return False


def is_device_memory(address: int, library: str) -> bool:
    """Whether the address is in memory of a device, which the processor cannot read; starts nothing.

    The CUDA driver is asked if this process already uses it, and only where the processor cannot read: it
    takes longer than a small transfer to find out that there is none.
    """
    return (
        _is_range(address, 1)
        and not is_readable(address, 1)
        and _native.Cuda.is_device_memory(library, address)
    )


def check_mapped(address: int, size: int) -> None:
    """Raise InvalidArgument unless all of the range is mapped in this process, or it is empty."""
    if size and not is_mapped(address, size):
        where = f"[{address:#x}, +{size})"
        raise InvalidArgument("buffer", where, "memory of this process; some of it is not mapped here")


def available_bytes() -> int:
    """Memory available without evicting other processes: the kernel's estimate, or less under a cgroup.

    Checked before memory is populated, because requesting too much from the kernel does not fail: it
    kills some process, perhaps this one.
    """
    available = 1 << 62
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    limit, used = _read("/sys/fs/cgroup/memory.max"), _read("/sys/fs/cgroup/memory.current")
    if limit.strip().isdigit() and used.strip().isdigit():
        available = min(available, max(0, int(limit) - int(used)))
    return available


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""

# SPDX-License-Identifier: Apache-2.0
"""``SharedSegment``: memory that the ranks of one host share, mapped by each of them.

The owner creates it and each rank publishes a blob; a rank that has all blobs maps the owner's memory
through ``/proc``, which the kernel permits to processes of the same user. The memory has no name in the
file system, so a process that dies leaves nothing behind.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import operator
import os
from collections.abc import Sequence

from mooncake.compat import public_in
from mooncake.errors import InvalidArgument


class SharedSegment:
    """Shared memory made by ``create`` and usable after ``complete``."""

    def __init__(self, name: str, size: int, world_size: int, owner_rank: int, memory: int) -> None:
        self._name = name
        self._size = size
        self._world_size = world_size
        self._owner_rank = owner_rank
        self._memory = memory
        self._map: mmap.mmap | None = None

    def __del__(self) -> None:
        if getattr(self, "_memory", -1) >= 0:
            os.close(self._memory)

    @staticmethod
    def supported(mmap: bool = True, host_register: bool = False, hugetlb: bool = False) -> bool:
        """Whether this kind is supported: mappings, also of huge pages; memory pinned for a GPU is not."""
        return mmap and not host_register and (not hugetlb or hasattr(os, "MFD_HUGETLB"))

    @staticmethod
    def create(
        name: str,
        size: int,
        world_size: int,
        rank_id: int,
        owner_rank: int = 0,
        device_id: int = 0,
        mmap: bool = True,
        host_register: bool = False,
        hugetlb: bool = False,
    ) -> tuple[SharedSegment, bytes]:
        """Make this rank's segment, and the blob that the other ranks need.

        With ``hugetlb`` the memory is made of huge pages of the host's pool, which must have enough.

        Raises:
            RuntimeError: not ``supported``, or the kernel refuses the memory.
            InvalidArgument: invalid sizes or ranks.
            TypeError: one of them is no integer.
        """
        size, world_size, rank_id, owner_rank = map(operator.index, (size, world_size, rank_id, owner_rank))
        if not SharedSegment.supported(mmap, host_register, hugetlb):
            raise RuntimeError(
                "SharedSegment: only mmap=True, host_register=False is supported; "
                "register the memory with cudaHostRegister yourself if a GPU is to use it"
            )
        if size <= 0 or not 0 <= rank_id < world_size or not 0 <= owner_rank < world_size:
            raise InvalidArgument(
                "segment",
                (size, world_size, rank_id, owner_rank),
                "a size above 0 and ranks below world_size",
            )
        memory = -1
        if rank_id == owner_rank:
            memory = _memory(name, size, hugetlb)
        segment = SharedSegment(name, size, world_size, owner_rank, memory)
        blob = {
            "name": name,
            "size": size,
            "rank": rank_id,
            "process": os.getpid(),
            "memory": memory,
        }
        return segment, json.dumps(blob).encode()

    def complete(self, blobs: Sequence[bytes | str]) -> None:
        """Map the owner's memory, once. ``blobs``: those of all ranks, in any order.

        Raises:
            InvalidArgument: a blob is missing or belongs to another segment.
            RuntimeError: the owner has ended, or runs as another user or on another host.
        """
        try:
            known = {blob["rank"]: blob for blob in map(json.loads, blobs)}
            owner = known[self._owner_rank]
            is_ours = len(known) == self._world_size and all(
                (blob["name"], blob["size"]) == (self._name, self._size) for blob in known.values()
            )
            path = f"/proc/{int(owner['process'])}/fd/{int(owner['memory'])}"
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidArgument("blobs", list(blobs), "one from each rank's create()") from error
        if not is_ours:
            raise InvalidArgument(
                "blobs", list(blobs), f"{self._world_size}, one from each rank's create() of {self._name!r}"
            )
        if self._map is not None:
            return  # another mapping would take the place of this one, whose address the program may use
        if self._memory >= 0:
            self._map = self._mapped(self._memory)
            return
        try:
            theirs = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise RuntimeError(
                f"SharedSegment {self._name!r}: the owner's memory cannot be opened ({error.strerror}); "
                "all ranks must run on one host, as one user, and must still be running"
            ) from error
        try:
            found = os.readlink(f"/proc/self/fd/{theirs}")  # not ``path``: the owner may end now
            is_it = _memory_name(self._name) in found
            if not is_it or os.fstat(theirs).st_size < self._size:
                raise RuntimeError(
                    f"SharedSegment {self._name!r}: the owner has ended and another process has its id"
                )
            self._map = self._mapped(theirs)
        finally:
            os.close(theirs)

    def _mapped(self, memory: int) -> mmap.mmap:
        try:
            return mmap.mmap(memory, os.fstat(memory).st_size)
        except OSError as error:
            raise RuntimeError(
                f"SharedSegment {self._name!r}: {self._size} bytes cannot be mapped ({error.strerror}); "
                "for huge pages, raise vm.nr_hugepages"
            ) from error

    def ready(self) -> bool:
        """Whether the memory is mapped."""
        return self._map is not None

    def size(self) -> int:
        return self._size

    def base_addr(self) -> int:
        """Address of the memory in this process; 0 until it is mapped."""
        if self._map is None:
            return 0
        return ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def device_addr(self) -> int:
        """Address of the memory for a GPU: 0, because without ``host_register`` no GPU reaches it."""
        return 0


def _memory(name: str, size: int, hugetlb: bool) -> int:
    """File descriptor of new memory. Raises RuntimeError: the kernel refuses."""
    memory = -1
    try:
        memory = os.memfd_create(_memory_name(name), os.MFD_CLOEXEC | (os.MFD_HUGETLB if hugetlb else 0))
        page = os.fstat(memory).st_blksize  # of huge pages, a file has only whole ones
        os.ftruncate(memory, -(-size // page) * page)
    except (OSError, OverflowError) as error:
        if memory >= 0:
            os.close(memory)
        reason = error.strerror if isinstance(error, OSError) else str(error)
        advice = "for huge pages, raise vm.nr_hugepages; " if hugetlb else ""
        raise RuntimeError(
            f"SharedSegment {name!r}: {size} bytes of memory cannot be made ({reason}); "
            f"{advice}use a smaller size, or raise the limit of open files"
        ) from error
    return memory


def _memory_name(name: str) -> str:
    """The memory's name in ``/proc``, of at most 249 bytes and without the byte 0."""
    encoded = f"mooncake-{name}".replace("\0", "?").encode(errors="replace")
    return encoded[:200].decode(errors="ignore")


public_in("mooncake.engine", SharedSegment)

"""``SharedSegment``: memory that the ranks of one host share, mapped by each.

The owner makes it, each rank gives out a blob, and when a rank has all blobs it maps the owner's memory
through ``/proc``, which the kernel allows to processes of the same user. Nothing has a name in the file
system, so nothing is left behind by a process that dies.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
from collections.abc import Sequence

from mooncake.errors import InvalidArgument


class SharedSegment:
    """Made by ``create``; usable after ``complete``."""

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
    def supported(mmap: bool = True, host_register: bool = False) -> bool:
        """Plain mappings are; memory pinned for a GPU is not."""
        return mmap and not host_register

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
    ) -> tuple[SharedSegment, bytes]:
        """This rank's end, and the blob that the other ranks need.

        Raises:
            RuntimeError: not ``supported``.
            InvalidArgument: sizes or ranks that cannot be.
        """
        if not SharedSegment.supported(mmap, host_register):
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
            memory = os.memfd_create(f"mooncake-{name}"[:200], os.MFD_CLOEXEC)
            os.ftruncate(memory, size)
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
        """Map the owner's memory. ``blobs``: of all ranks, in any order.

        Raises:
            InvalidArgument: a blob is missing or of another segment.
            RuntimeError: the owner is gone, or of another user or host.
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
        if self._memory >= 0:
            self._map = mmap.mmap(self._memory, self._size)
            return
        try:
            theirs = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise RuntimeError(
                f"SharedSegment {self._name!r}: the owner's memory cannot be opened ({error.strerror}); "
                "all ranks must run on one host, as one user, and still run"
            ) from error
        try:
            is_it = f"mooncake-{self._name}"[:200] in os.readlink(path)
            if not is_it or os.fstat(theirs).st_size != self._size:
                raise RuntimeError(
                    f"SharedSegment {self._name!r}: the owner has gone and another took its number"
                )
            self._map = mmap.mmap(theirs, self._size)
        finally:
            os.close(theirs)

    def ready(self) -> bool:
        """It is mapped."""
        return self._map is not None

    def size(self) -> int:
        return self._size

    def base_addr(self) -> int:
        """Where it begins in this process; 0 until it is complete."""
        if self._map is None:
            return 0
        return ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def device_addr(self) -> int:
        """Raises RuntimeError: a GPU cannot reach it."""
        raise RuntimeError(
            "SharedSegment.device_addr needs host_register=True, which is not supported; use base_addr()"
        )

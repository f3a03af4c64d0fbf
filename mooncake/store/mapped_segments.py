# SPDX-License-Identifier: Apache-2.0
"""Memory of nodes on a master's own host, mapped for the bytes of small objects in the master's messages.

A client that reaches a node only over a network or TCP saves a round trip if the master moves the bytes of
a small object (``client/small_values.py``). The master acts as such a client would: it reads what it has just
leased, and writes only to space that is promised to the writer, and memory that it does not map is moved
by the client as usual. Nothing is mapped until a client asks, and on another host nothing ever is.

A segment is mapped in a thread, because its node may be slow to answer. Afterwards a copy needs no answer of
the node.
"""

from __future__ import annotations

import asyncio
from typing import Any

from prometheus_client import Counter

from mooncake.errors import MooncakeError
from mooncake.log import get_logger
from mooncake.metrics import registry
from mooncake.security import Identity
from mooncake.store.master.segments import Segment
from mooncake.store.messages import MAX_VALUE_BYTES
from mooncake.types import Tier

log = get_logger(__name__)

MAP_S = 5.0
"""Time limit for a node to let its memory be mapped."""
COPY_S = 0.01
"""Time limit of one copy: the master handles nothing else meanwhile."""

MOVED_BYTES = Counter(
    "mooncake_master_value_bytes",
    "Bytes of small objects that the master moved for clients, by operation",
    ["operation"],
    registry=registry,
)


class MappedSegments:
    """The mapped segments. For one event loop."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._engine: Any = None
        self._staging: Any = None
        self._view = memoryview(b"")
        self._handles: dict[str, tuple[int, Any]] = {}
        """Segment -> (epoch, handle); the handle is None while it is being mapped, and where it can't be."""
        self._mapping = asyncio.Lock()
        self._is_closed = False
        self._tasks: set[asyncio.Task[None]] = set()

    def maps(self, segment: Segment) -> bool:
        """Whether the segment is mapped. If it has not been tried, that begins now."""
        epoch, handle = self._handles.get(segment.name, (None, None))
        if epoch != segment.epoch:
            if handle is not None:
                self._engine.forget(handle)
            # A segment that a successor knows from records has no connection yet: it is tried later.
            if segment.tier is Tier.MEMORY and getattr(segment.connection, "is_from_this_host", False):
                self._handles[segment.name] = segment.epoch, None
                task = asyncio.get_running_loop().create_task(self._map(segment))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            else:
                self._handles.pop(segment.name, None)
            return False
        return handle is not None

    def read(self, segment: Segment, address: int, size_bytes: int, checksum: bytes) -> bytes | None:
        """The bytes there, if they are mapped and have that CRC32C."""
        moved = self._move(segment, address, size_bytes, is_write=False)
        if moved != checksum:
            return None
        MOVED_BYTES.labels("read").inc(size_bytes)
        return bytes(self._view[:size_bytes])

    def write(self, segment: Segment, address: int, value: bytes, checksum: bytes) -> bool:
        """Write the bytes there. False: they are not mapped, or have another CRC32C."""
        if len(value) > MAX_VALUE_BYTES or not self.maps(segment):
            return False
        self._view[: len(value)] = value
        is_written = self._move(segment, address, len(value), is_write=True) == checksum
        if is_written:
            MOVED_BYTES.labels("write").inc(len(value))
        return is_written

    def close(self) -> None:
        """Unmap all."""
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        self._handles.clear()
        self._view.release()
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def _move(self, segment: Segment, address: int, size_bytes: int, *, is_write: bool) -> bytes | None:
        """Copy between the segment and the staging memory; the CRC32C of the bytes, or None."""
        if size_bytes > MAX_VALUE_BYTES or not self.maps(segment):
            return None
        from mooncake.transfer import Op  # late: transfer takes long to load

        _, handle = self._handles[segment.name]
        op = Op.WRITE if is_write else Op.READ
        moved = self._engine.run_slice(
            op, handle, self._staging.address, address, size_bytes, timeout_s=COPY_S, checksum=True
        )
        if isinstance(moved, int):
            return moved.to_bytes(4, "little")
        self._handles[segment.name] = segment.epoch, None
        self._engine.forget(handle)
        log.warning("segment_unmapped", segment=segment.name, reason=moved.status.name.lower())
        return None

    async def _map(self, segment: Segment) -> None:
        name, epoch = segment.name, segment.epoch
        try:
            async with self._mapping:
                handle = await asyncio.to_thread(self._mapped, segment.descriptor, segment.address)
        except MooncakeError as error:
            log.warning("segment_not_mapped", segment=name, reason=str(error))
            return
        if self._handles.get(name, (None, None))[0] == epoch:
            self._handles[name] = epoch, handle
            log.info("segment_mapped" if handle is not None else "segment_not_shared", segment=name)

    def _mapped(self, descriptor: bytes, address: int) -> Any:
        """A handle over which bytes are copied by this process; None if the node shares no memory with it."""
        from mooncake.transfer import Op, TransferEngine, TransferSettings
        from mooncake.transfer.descriptor import decode_descriptor

        if self._engine is None:
            settings = TransferSettings(transports=("shm",)).for_tool()
            engine = TransferEngine(settings, identity=self._identity)
            # Behind the values is the place of the first access, which may be in progress in this thread.
            self._staging = engine.allocate(MAX_VALUE_BYTES + 64, huge_pages=False)
            self._view = memoryview(self._staging.view()).cast("B")
            self._engine = engine
            if self._is_closed:  # while this thread was making it
                engine.close()
                return None
        handle = self._engine.open(decode_descriptor(descriptor))
        if not handle.is_direct:
            return None
        # The first access is the one that waits for the node.
        here = self._staging.address + MAX_VALUE_BYTES
        first = self._engine.run_slice(Op.READ, handle, here, address, 1, timeout_s=MAP_S)
        return handle if isinstance(first, int) else None

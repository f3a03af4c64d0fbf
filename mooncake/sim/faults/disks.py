# SPDX-License-Identifier: Apache-2.0
"""A node's SSD: what outlives its process, and what of that a power loss takes.

What was written and not flushed is in the system's cache: it survives the death of a process, while a power
loss takes any part of it, including half of a write and half of a record. A disk may be slow, and it may
lie: then a flush that it acknowledged has done nothing, until the disk happens to write by itself. It may be
full: then it accepts no index record, but space that was preallocated for data can be written.
"""

from __future__ import annotations

from collections.abc import Iterable

from mooncake.errors import OutOfSpace
from mooncake.sim.faults.cluster_faults import ClusterFaults
from mooncake.sim.kernel import Kernel
from mooncake.store.messages import SegmentEntry
from mooncake.store.node.ssd_index import SsdIndex, compacted

COMPACTION_CHANCE = 0.02


class SimDisk:
    """One directory. A node opens it (``opened``) and holds entries in ``index``."""

    def __init__(self, kernel: Kernel, faults: ClusterFaults, size_bytes: int) -> None:
        self._kernel = kernel
        self.faults = faults
        self.content_id = kernel.random.getrandbits(60) | 1
        self.data = bytearray(size_bytes)
        self._log = bytearray()
        self._unflushed: list[tuple[int, bytes]] = []
        """Content before each write since the last flush: (offset, bytes)."""
        self._num_flushed = 0
        """Writes with a smaller number than this are flushed."""
        self._flushed_log_bytes = 0
        self._num_compactions = 0
        self.full_until = 0.0
        """Until this time no record is accepted."""
        self.index = SsdIndex()

    def opened(self) -> None:
        """Another process reads the log; a torn tail is cut off."""
        self.index = SsdIndex(bytes(self._log))
        self.index.check()
        del self._log[self.index.num_bytes :]
        self._flushed_log_bytes = min(self._flushed_log_bytes, len(self._log))

    # As ``ssd.py`` and ``ssd_index_log.py`` do it; all of these raise OutOfSpace

    def vacate(self, offset: int, size_bytes: int) -> None:
        self.drop(self.index.overlapping(offset, size_bytes))

    def hold(self, entry: SegmentEntry) -> None:
        before = self.index.num_bytes
        try:
            self._append(self.index.hold(entry), before)
        except OutOfSpace:
            self.index.drop([entry.object_id])
            self.index.num_bytes = before
            raise

    def drop(self, object_ids: Iterable[int]) -> None:
        before = self.index.num_bytes
        known = [entry for one in object_ids if (entry := self.index.entries.get(one)) is not None]
        try:
            self._append(self.index.drop(entry.object_id for entry in known), before)
        except OutOfSpace:
            for entry in known:
                self.index.hold(entry)
            self.index.num_bytes = before
            raise

    def write(self, offset: int, data: bytes) -> None:
        end = offset + len(data)
        self._unflushed.append((offset, bytes(self.data[offset:end])))
        self.data[offset:end] = data

    @property
    def flush_s(self) -> float:
        """How long the next flush takes."""
        random, faults = self._kernel.random, self.faults
        if random.random() < faults.slow_disk_chance:
            return random.uniform(0.0, faults.slow_disk_s)
        return random.uniform(0.0001, 0.002)

    def flush(self) -> tuple[int, int, int]:
        """Begin a flush; pass the returned value to ``flushed`` when it has ended."""
        return self._num_flushed + len(self._unflushed), len(self._log), self._num_compactions

    def flushed(self, begun: tuple[int, int, int]) -> None:
        if self._kernel.chance(self.faults.lying_disk_chance):
            return
        num_writes, num_log_bytes, num_compactions = begun
        if num_writes > self._num_flushed:
            del self._unflushed[: num_writes - self._num_flushed]
            self._num_flushed = num_writes
        if num_compactions == self._num_compactions:
            self._flushed_log_bytes = max(self._flushed_log_bytes, num_log_bytes)

    def _append(self, content: bytes, before: int) -> None:
        if not content:
            return
        if self._kernel.now < self.full_until:
            self.index.num_bytes = before
            raise OutOfSpace("the disk is full")
        self._log += content
        if self._kernel.chance(COMPACTION_CHANCE):  # the new file is flushed before it takes its place
            self._log = bytearray(compacted(self.index.in_order()))
            self.index.compacted_to(len(self._log))
            self._flushed_log_bytes = len(self._log)
            self._num_compactions += 1

    # Faults

    def fill(self, seconds: float) -> None:
        """Another program takes all free space for so long."""
        self.full_until = self._kernel.now + seconds

    def fails_to_read(self) -> bool:
        """Whether the next read fails (EIO)."""
        chance = self.faults.read_error_chance
        return bool(chance) and self._kernel.chance(chance)

    def lose_power(self) -> None:
        """Revert any of what was not flushed to what it was before, or half of it."""
        random = self._kernel.random
        for offset, before in reversed(self._unflushed):
            if random.random() < 0.5:
                kept = random.randrange(len(before)) if random.random() < 0.5 else 0
                self.data[offset + kept : offset + len(before)] = before[kept:]
        self._num_flushed += len(self._unflushed)
        self._unflushed.clear()
        del self._log[random.randint(self._flushed_log_bytes, len(self._log)) :]
        self._flushed_log_bytes = len(self._log)
        self._kernel.trace_line(f"power is lost: {len(self._log)} bytes of the index are left")

    def __repr__(self) -> str:
        return f"<SimDisk {self.index!r}>"

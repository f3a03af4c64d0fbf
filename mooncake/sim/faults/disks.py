# SPDX-License-Identifier: Apache-2.0
"""What outlives a process, and what of that a power loss takes: a node's SSD, and a directory of files.

What was written and not flushed is in the system's cache: it survives the death of a process (``crash``),
while a power loss takes any part of it, including half of a write and half of a record. ``SimDisk`` is a
node's SSD. It may be slow, and it may lie: then a flush that it acknowledged has done nothing, until the disk
happens to write by itself. It may be full: then it accepts no index record, but space that was preallocated
for data can be written.

``SimDirectory`` is the contract of ``mooncake.files`` in memory. A loss of power (``lose_power``) takes from
every file any part of what was appended or cut since its last sync: the end of it, half a record, or the
bytes but not the length, which leaves zeros at the end. Of the names that were made, changed or removed since
the directory was synced, the last ones are as they were before. A failed sync loses what it was to write, and
the next one does not restore it, as with a real disk.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random

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

    def opened(self, checksum: Callable[[bytes], int]) -> None:
        """Another process reads the log; a torn tail is cut off, and unflushed entries are verified."""
        self.index = SsdIndex(bytes(self._log))
        self.index.check()
        del self._log[self.index.num_bytes :]
        self._flushed_log_bytes = min(self._flushed_log_bytes, len(self._log))
        unflushed = [self.index.entries[one] for one in self.index.unflushed]
        if unflushed:
            lost = [entry.object_id for entry in unflushed if not self._is_whole(entry, checksum)]
            self._log += self.index.drop(lost)
            self.flushed(self.flush())
            self._log += self.index.mark_flushed(list(self.index.unflushed))

    def _is_whole(self, entry: SegmentEntry, checksum: Callable[[bytes], int]) -> bool:
        if not self.faults.has_checksums:
            return True
        data = self.data[entry.offset : entry.offset + entry.size_bytes]
        pieces = (bytes(data[at : at + entry.chunk_bytes]) for at in range(0, len(data), entry.chunk_bytes))
        return b"".join(checksum(piece).to_bytes(4, "little") for piece in pieces) == entry.checksums

    # As ``ssd.py`` and ``ssd_index_log.py`` do it; all of these raise OutOfSpace

    def vacate(self, offset: int, size_bytes: int) -> None:
        self.drop(self.index.overlapping(offset, size_bytes))

    def hold(self, entry: SegmentEntry, *, is_flushed: bool = True) -> None:
        before = self.index.num_bytes
        try:
            self._append(self.index.hold(entry, is_flushed=is_flushed), before)
        except OutOfSpace:
            self.index.drop([entry.object_id])
            self.index.num_bytes = before
            raise

    def drop(self, object_ids: Iterable[int]) -> None:
        before = self.index.num_bytes
        known = [entry for one in object_ids if (entry := self.index.entries.get(one)) is not None]
        unflushed = dict(self.index.unflushed)
        try:
            self._append(self.index.drop(entry.object_id for entry in known), before)
        except OutOfSpace:
            for entry in known:
                self.index.hold(entry, is_flushed=entry.object_id not in unflushed)
            self.index.num_bytes = before
            raise

    def mark_flushed(self, object_ids: Iterable[int]) -> None:
        content = self.index.mark_flushed(object_ids)
        if self._kernel.now < self.full_until:
            self.index.num_bytes -= len(content)
        else:
            self._log += content

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
            self._log = bytearray(compacted(self.index.in_order(), unflushed=self.index.unflushed))
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


ZEROS_CHANCE = 0.3
"""Probability that a file keeps its length in a power loss, but not all of its bytes."""


class _Inode:
    """One file, whatever its names are."""

    def __init__(self) -> None:
        self.content = bytearray()
        self.synced = bytearray()
        """Content at its last sync."""
        self.changes: list[bytes | int] = []
        """Changes since then: bytes that were appended, or the length to which it was cut."""
        self.is_lossy = False
        """A sync has failed: no later one guarantees anything."""
        self.holder: SimFile | None = None
        """The open file that has the lock."""

    def change(self, change: bytes | int) -> None:
        _apply(self.content, change)
        self.changes.append(change)

    def sync(self) -> None:
        if not self.is_lossy:
            for change in self.changes:
                _apply(self.synced, change)
            self.changes = []

    def lose_power(self, random: Random) -> None:
        num_kept = random.randint(0, len(self.changes))
        for change in self.changes[:num_kept]:
            _apply(self.synced, change)
        torn = self.changes[num_kept] if num_kept < len(self.changes) else 0
        if isinstance(torn, bytes):
            num_bytes = random.randint(0, len(torn))
            _apply(self.synced, torn[:num_bytes])
            if random.random() < ZEROS_CHANCE:
                _apply(self.synced, bytes(len(torn) - num_bytes))
        self.become(bytes(self.synced))

    def become(self, content: bytes) -> None:
        self.content, self.synced, self.changes = bytearray(content), bytearray(content), []
        self.is_lossy, self.holder = False, None


def _apply(content: bytearray, change: bytes | int) -> None:
    if isinstance(change, bytes):
        content += change
    else:
        content += bytes(max(0, change - len(content)))
        del content[change:]


class SimFile:
    """An open file of a ``SimDirectory``."""

    def __init__(self, directory: SimDirectory, inode: _Inode) -> None:
        self._directory = directory
        self._inode = inode
        self._life = directory.life
        self._is_open = True

    @property
    def size_bytes(self) -> int:
        self._check()
        return len(self._inode.content)

    def read(self) -> bytes:
        self._check()
        return bytes(self._inode.content)

    def append(self, content: bytes) -> None:
        self._check()
        self._directory.take_time("write", len(content))
        left = self._directory.left_bytes
        written = content if left is None else content[:left]
        if self._directory.write_error:
            written = written[: self._directory.random.randint(0, len(written))]
        if written:
            self._inode.change(bytes(written))
        if self._directory.write_error:
            raise _error(self._directory.write_error)
        if len(written) < len(content):
            raise _error(errno.ENOSPC)

    def truncate(self, size_bytes: int) -> None:
        self._check()
        self._inode.change(size_bytes)

    def sync(self) -> None:
        self._check()
        self._directory.take_time("sync", 0)
        if self._directory.sync_error:
            self._inode.is_lossy = True  # from now on the system considers the pages written
            raise _error(self._directory.sync_error)
        self._inode.sync()

    def is_at(self, path: Path) -> bool:
        return self._directory.is_named(path.name, self._inode)

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            if self._inode.holder is self:
                self._inode.holder = None

    def lock(self) -> None:
        holder = self._inode.holder
        if holder is not None and holder._life == self._directory.life:
            raise BlockingIOError(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK))
        self._inode.holder = self

    def _check(self) -> None:
        if not self._is_open or self._life != self._directory.life:
            raise _error(errno.EBADF)

    def __repr__(self) -> str:
        return f"<SimFile [{len(self._inode.content)} bytes]>"


class SimDirectory:
    """A directory whose files exist only here.

    Its fields define the faults, from when they are set: ``capacity_bytes`` (None: no bound) makes appends
    fail with ENOSPC after writing what fits, ``write_error`` and ``sync_error`` are error numbers (0: none),
    ``delay_s`` says how long a "write" or "sync" of so many bytes takes; ``late_s`` adds that up, for a world
    that pauses its process for so long (``take_late_s``).
    """

    def __init__(self, random: Random, path: str = "/simulated") -> None:
        self.random = random
        self.capacity_bytes: int | None = None
        self.write_error = 0
        self.sync_error = 0
        self.delay_s: Callable[[str, int], float] = lambda what, num_bytes: 0.0
        self.late_s = 0.0
        self.num_syncs = 0
        self.life = 0
        """Grows when all that was open is closed by force."""
        self._path = Path(path)
        self._names: dict[str, _Inode] = {}
        self._versions: list[dict[str, _Inode]] = [{}]
        """Names at the last sync of the directory, and after each change since."""

    @property
    def path(self) -> Path:
        return self._path

    @property
    def left_bytes(self) -> int | None:
        """Bytes that may still be written; None: no bound."""
        if self.capacity_bytes is None:
            return None
        inodes = {id(inode): inode for inode in self._names.values()}
        return max(0, self.capacity_bytes - sum(len(inode.content) for inode in inodes.values()))

    def names(self) -> list[str]:
        return sorted(self._names)

    def open(self, name: str, *, is_locked: bool = False) -> SimFile:
        inode = self._names.get(name)
        if inode is None:
            inode = _Inode()
            self._change({**self._names, name: inode})
        file = SimFile(self, inode)
        if is_locked:
            file.lock()
        return file

    def is_named(self, name: str, inode: _Inode) -> bool:
        """Whether the file of that name is this one."""
        return self._names.get(name) is inode

    def rename(self, old: str, new: str) -> None:
        names = dict(self._names)
        if old not in names:
            raise _error(errno.ENOENT)
        names[new] = names.pop(old)
        self._change(names)

    def remove(self, name: str) -> None:
        names = dict(self._names)
        if names.pop(name, None) is None:
            raise _error(errno.ENOENT)
        self._change(names)

    def sync(self) -> None:
        self.take_time("sync", 0)
        if self.sync_error:
            raise _error(self.sync_error)
        self._versions = [self._names]

    def close(self) -> None:
        """A directory needs no closing here."""

    def take_time(self, what: str, num_bytes: int) -> None:
        self.num_syncs += what == "sync"
        self.late_s += self.delay_s(what, num_bytes)

    def take_late_s(self) -> float:
        """How long the calls since the last ``take_late_s`` would have taken."""
        late_s, self.late_s = self.late_s, 0.0
        return late_s

    # Faults

    def crash(self) -> None:
        """The process ends: what is open is closed, and everything that was written is kept."""
        self.life += 1

    def lose_power(self) -> None:
        """Also takes what was not synced, or a part of it."""
        self.crash()
        random = self.random
        self._names = dict(random.choice(self._versions))
        self._versions = [self._names]
        for inode in {id(inode): inode for inode in self._names.values()}.values():
            inode.lose_power(random)

    # For tests

    def content(self, name: str) -> bytes:
        return bytes(self._names[name].content)

    def damage(self, name: str, content: bytes) -> None:
        """Replace the file's content, as permanent damage."""
        self._names[name].become(content)

    def _change(self, names: dict[str, _Inode]) -> None:
        self._names = names
        self._versions.append(names)

    def __repr__(self) -> str:
        return f"<SimDirectory {self.names()}>"


def _error(number: int) -> OSError:
    return OSError(number, os.strerror(number))

# SPDX-License-Identifier: Apache-2.0
"""The contract of ``mooncake.files`` in memory, on a disk that fails and loses unsynced data in a power loss.

What the files hold survives the end of a process (``crash``). A loss of power (``lose_power``) takes from
every file any part of what was appended or cut since its last sync: the end of it, half a record, or the
bytes but not the length, which leaves zeros at the end. Of the names that were made, changed or removed since
the directory was synced, the last ones are as they were before. A failed sync loses what it was to write, and
the next one does not restore it, as with a real disk.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from random import Random

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

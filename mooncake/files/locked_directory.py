# SPDX-License-Identifier: Apache-2.0
"""A directory that one process owns: its lock, and files that are replaced atomically.

It is refused unless it belongs to this user and no other may write to it (``mooncake/files``). Errors of
system calls are translated here, once for all writers, into messages that say what to do.
"""

from __future__ import annotations

import errno
from pathlib import Path

from mooncake.errors import InvalidArgument, MooncakeError, OutOfSpace, StorageError
from mooncake.files import Directory, File, OsDirectory, UntrustedFile

LOCK = "mooncake.lock"


class LockedDirectory:
    """A directory under the lock of this process, once ``take`` has returned.

    ``field`` names the setting that chose ``path``, for error messages. ``directory``: the directory at
    ``path`` if it is not one of the operating system (the simulator's).
    """

    def __init__(self, path: Path, field: str, directory: Directory | None = None) -> None:
        self.path = path
        self._field = field
        self._directory = directory
        self._lock: File | None = None

    @property
    def directory(self) -> Directory:
        """The open directory, once ``take`` has returned."""
        assert self._directory is not None, "take() comes first"
        return self._directory

    def take(self) -> None:
        """Create the directory if it does not exist, and lock it. Raises OSError, InvalidArgument."""
        if self._directory is None:
            self._directory = OsDirectory(self.path, is_private=True)
        try:
            self._lock = self._directory.open(LOCK, is_locked=True)
        except BlockingIOError:
            raise self.wrong("a directory that no other process uses") from None

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
        self._lock = None
        if self._directory is not None:
            self._directory.close()

    def has(self, name: str) -> bool:
        return name in self.directory.names()

    def read(self, name: str) -> bytes:
        """The whole content of a file. Raises OSError."""
        file = self.directory.open(name)
        try:
            return file.read()
        finally:
            file.close()

    def fresh(self, name: str, content: bytes) -> File:
        """Create the file by which ``put`` replaces ``name``, open for appending. Raises OSError."""
        file = self.directory.open(f"{name}.new")
        try:
            file.truncate(0)
            file.append(content)
            file.sync()
        except OSError:
            file.close()
            raise
        return file

    def put(self, name: str) -> None:
        """Replace ``name`` by the file that ``fresh`` made, durably. Raises OSError."""
        self.rename(name)
        self.directory.sync()

    def rename(self, name: str) -> None:
        """Replace as ``put`` does, but a loss of power may undo it until the directory is synced."""
        self.directory.rename(f"{name}.new", name)

    def replace(self, name: str, content: bytes) -> None:
        """Replace the content of ``name`` atomically and durably. Raises OSError."""
        self.fresh(name, content).close()
        self.put(name)

    def wrong(self, allowed: str) -> InvalidArgument:
        return InvalidArgument(self._field, str(self.path), allowed)

    def trouble(self, error: OSError) -> MooncakeError:
        """Translate ``error`` for the user who chose the directory."""
        if isinstance(error, UntrustedFile):
            return self.wrong(error.requirement)
        match error.errno:
            case errno.ENOSPC | errno.EDQUOT:
                return OutOfSpace(f"{self.path}: {error.strerror}; make room")
            case errno.ENOTDIR | errno.EEXIST:
                return self.wrong("a directory")
            case errno.EACCES | errno.EPERM | errno.EROFS | errno.ENOENT:
                return self.wrong(f"a directory that this process may write to ({error.strerror})")
            case errno.EFBIG | errno.EINVAL:
                return self.wrong(f"a file system that supports files of this size ({error.strerror})")
            case _:
                return StorageError(f"{self.path}: {error.strerror}; check the disk")

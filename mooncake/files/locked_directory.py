"""A directory that one process owns: its lock, and files that are replaced whole or not at all.

It is refused unless it is ours and nobody else may write to it (``mooncake/files``). What a system call
refuses is said in words that help, here once for all who write to the directory.
"""

from __future__ import annotations

import errno
from pathlib import Path

from mooncake.errors import InvalidArgument, MooncakeError, OutOfSpace, StorageError
from mooncake.files import Directory, File, OsDirectory, UntrustedFile

LOCK = "mooncake.lock"


class LockedDirectory:
    """``field`` names the setting that chose ``path``, for errors. ``directory``: the one of ``path``, if it
    is none of the operating system's."""

    def __init__(self, path: Path, field: str, directory: Directory | None = None) -> None:
        self.path = path
        self._field = field
        self._directory = directory
        self._lock: File | None = None

    @property
    def directory(self) -> Directory:
        """Once it was taken."""
        assert self._directory is not None, "take it first"
        return self._directory

    def take(self) -> None:
        """Make the directory if it is not there, and keep others out. Raises OSError, InvalidArgument."""
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
        """All of a file. Raises OSError."""
        file = self.directory.open(name)
        try:
            return file.read()
        finally:
            file.close()

    def fresh(self, name: str, content: bytes) -> File:
        """A file that ``put`` puts in the place of ``name``, open for appending. Raises OSError."""
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
        self.rename(name)
        self.directory.sync()

    def rename(self, name: str) -> None:
        """As ``put``, but a loss of power may undo it until the directory is synced."""
        self.directory.rename(f"{name}.new", name)

    def replace(self, name: str, content: bytes) -> None:
        """All of it or nothing. Raises OSError."""
        self.fresh(name, content).close()
        self.put(name)

    def wrong(self, allowed: str) -> InvalidArgument:
        return InvalidArgument(self._field, str(self.path), allowed)

    def trouble(self, error: OSError) -> MooncakeError:
        """What it means for whoever chose the directory."""
        if isinstance(error, UntrustedFile):
            return self.wrong(error.told)
        match error.errno:
            case errno.ENOSPC | errno.EDQUOT:
                return OutOfSpace(f"{self.path}: {error.strerror}; make room")
            case errno.ENOTDIR | errno.EEXIST:
                return self.wrong("a directory")
            case errno.EACCES | errno.EPERM | errno.EROFS | errno.ENOENT:
                return self.wrong(f"a directory that this process may write to ({error.strerror})")
            case errno.EFBIG | errno.EINVAL:
                return self.wrong(f"a file system that takes files of this size ({error.strerror})")
            case _:
                return StorageError(f"{self.path}: {error.strerror}; look at the disk")

"""A directory that one process owns: its lock, and files that are replaced whole or not at all.

What a system call refuses is said in words that help, here once for all who write to the directory.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from mooncake.errors import InvalidArgument, MooncakeError, OutOfSpace, StorageError

LOCK = "mooncake.lock"


class Folder:
    """``field`` names the setting that chose ``path``, for errors."""

    def __init__(self, path: Path, field: str) -> None:
        self.path = path
        self._field = field
        self._lock = -1

    def take(self) -> None:
        """Make the directory if it is not there, and keep others out. Raises OSError, InvalidArgument."""
        self.path.mkdir(parents=True, exist_ok=True)
        file = os.open(self.path / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            raise self.wrong("a directory that no other process uses") from None
        self._lock = file

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1

    def fresh(self, name: str, content: bytes) -> int:
        """A file that ``put`` puts in the place of ``name``, open for appending. Raises OSError."""
        flags = os.O_CREAT | os.O_TRUNC | os.O_RDWR | os.O_APPEND | os.O_CLOEXEC
        file = os.open(self.path / f"{name}.new", flags, 0o600)
        try:
            write_all(file, content)
            os.fsync(file)
        except OSError:
            os.close(file)
            raise
        return file

    def put(self, name: str) -> None:
        os.rename(self.path / f"{name}.new", self.path / name)
        self.keep_names()

    def replace(self, name: str, content: bytes) -> None:
        """All of it or nothing. Raises OSError."""
        os.close(self.fresh(name, content))
        self.put(name)

    def keep_names(self) -> None:
        """Files that were made or renamed have their names after a loss of power."""
        directory = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def wrong(self, allowed: str) -> InvalidArgument:
        return InvalidArgument(self._field, str(self.path), allowed)

    def trouble(self, error: OSError) -> MooncakeError:
        """What it means for whoever chose the directory."""
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


def write_all(file: int, content: bytes) -> None:
    """Raises OSError; then a part of it may have been written."""
    view = memoryview(content)
    while view:
        view = view[os.write(file, view) :]

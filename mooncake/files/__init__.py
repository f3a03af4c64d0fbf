"""Files that must outlast a crash: a directory, and files in it that are only appended to, cut or replaced.

What is written survives the end of the process. It survives a loss of power once the file was synced, and
a name that was made, changed or removed once its directory was synced; ``Directory`` and ``File`` say so as
a contract, because ``sim/faults/sim_files.py`` keeps it on virtual time, with disks that fail and forget.
Everything is plain and synchronous, and raises ``OSError`` with the number that the system gives. What is
in a file, others know.

A file of the real directory is opened without following links, is for its owner alone (0600), and is
refused when it, or its directory, is another user's: see ``OsDirectory``.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import threading
from pathlib import Path
from typing import Protocol

_SHARED = "open for others to write to"
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class File(Protocol):
    """An open file. ``append`` and ``sync`` may run beside each other, in two threads."""

    @property
    def size_bytes(self) -> int: ...

    def read(self) -> bytes:
        """All of it."""
        ...

    def append(self, content: bytes) -> None:
        """When it raises, any part of ``content`` may have been written."""
        ...

    def truncate(self, size_bytes: int) -> None:
        """Cut off what is behind."""
        ...

    def sync(self) -> None:
        """What was appended before survives a loss of power. Blocks, for long perhaps.

        When it raises, nobody knows what is on the disk of what was appended since the last one, and a
        later one that does not raise says nothing about it either.
        """
        ...

    def close(self) -> None:
        """Gives the lock back; harmless when repeated."""
        ...


class Directory(Protocol):
    """An open directory. Names have no slash."""

    @property
    def path(self) -> Path:
        """For people."""
        ...

    def names(self) -> list[str]:
        """In order."""
        ...

    def open(self, name: str, *, is_locked: bool = False) -> File:
        """Open a file, and make an empty one where there is none.

        ``is_locked``: raises ``BlockingIOError`` when it is locked already; the lock ends with the file's
        ``close`` or with the process.
        """
        ...

    def rename(self, old: str, new: str) -> None:
        """In one step; what was ``new`` is gone."""
        ...

    def remove(self, name: str) -> None: ...

    def sync(self) -> None:
        """Files that were made, renamed or removed before are so after a loss of power as well. Blocks."""
        ...

    def close(self) -> None:
        """Does not close its files; harmless when repeated."""
        ...


BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Of the running system; as long as it is the same, nothing that was written is lost. "": it has none."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""


class UntrustedFile(PermissionError):
    """A file or directory that another user owns, or may change: it is ``found``, and only ``allowed`` is."""

    def __init__(self, path: Path, found: str, allowed: str) -> None:
        super().__init__(errno.EPERM, f"is {found}; allowed: {allowed}", str(path))
        self.told = f"{allowed}; {path} is {found}"
        """For whoever chose the path."""


class OsFile:
    """A file of the operating system. ``OsDirectory.open`` makes it."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._closing = threading.Lock()

    @property
    def size_bytes(self) -> int:
        return os.fstat(self._number).st_size

    def read(self) -> bytes:
        parts: list[bytes] = []
        at = 0
        while part := os.pread(self._number, 1 << 24, at):
            parts.append(part)
            at += len(part)
        return b"".join(parts)

    def append(self, content: bytes) -> None:
        view = memoryview(content)
        while view:
            view = view[os.write(self._number, view) :]

    def truncate(self, size_bytes: int) -> None:
        os.ftruncate(self._number, size_bytes)

    def sync(self) -> None:
        # A number of its own, because the file may be closed meanwhile and its number given to another.
        with self._closing:
            own = os.dup(self._number)
        try:
            os.fdatasync(own)
        finally:
            os.close(own)

    def close(self) -> None:
        with self._closing:
            number, self._number = self._number, -1
            if number >= 0:
                os.close(number)

    def __repr__(self) -> str:
        return f"<OsFile {self._number}>"


class OsDirectory:
    """A directory of the operating system.

    Args:
        path: where it is.
        is_private: make it (0700, its parents as usual) if it is not there, and refuse it unless it is ours
            and nobody else may write to it. Otherwise it must be there, be ours or root's, and others may
            write to it only where the sticky bit keeps them from each other's files.

    Raises:
        NotOurs: as said, or a link that is another user's leads there.
        OSError: it can't be made or opened.
    """

    def __init__(self, path: Path, *, is_private: bool = False) -> None:
        self._path = path
        if is_private:
            path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                path.mkdir(0o700)
        _check_link(path)
        self._number = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _check_directory(path, os.fstat(self._number), is_private)
            if is_private:
                # Who may rename the directory may put another in its place.
                _check_parent(path.resolve().parent)
        except OSError:
            self.close()
            raise

    @property
    def path(self) -> Path:
        return self._path

    def names(self) -> list[str]:
        return sorted(os.listdir(self._number))

    def open(self, name: str, *, is_locked: bool = False) -> OsFile:
        flags = os.O_CREAT | os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        path = self._path / name
        try:
            number = os.open(name, flags, 0o600, dir_fd=self._number)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise UntrustedFile(path, "a link", "a file") from error
            raise OSError(error.errno, os.strerror(error.errno or 0), str(path)) from error
        try:
            check_file(path, os.fstat(number))
            os.fchmod(number, 0o600)
            if is_locked:
                fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(number)
            raise
        return OsFile(number)

    def rename(self, old: str, new: str) -> None:
        os.rename(old, new, src_dir_fd=self._number, dst_dir_fd=self._number)

    def remove(self, name: str) -> None:
        os.unlink(name, dir_fd=self._number)

    def sync(self) -> None:
        os.fsync(self._number)

    def close(self) -> None:
        number, self._number = self._number, -1
        if number >= 0:
            os.close(number)

    def __repr__(self) -> str:
        return f"<OsDirectory {self._path}>"


def check_file(path: Path, found: os.stat_result) -> None:
    """Raises NotOurs when that file is none, another user's, or one that others may write to."""
    if not stat.S_ISREG(found.st_mode):
        raise UntrustedFile(path, "something else", "a file")
    if found.st_uid != os.geteuid():
        raise UntrustedFile(path, f"of user {found.st_uid}", f"a file of user {os.geteuid()}")
    if found.st_mode & WRITABLE_BY_OTHERS:
        raise UntrustedFile(path, _SHARED, f"a file that only its owner may write to (chmod go-w {path})")


def _check_directory(path: Path, found: os.stat_result, is_private: bool) -> None:
    owners = (os.geteuid(),) if is_private else (os.geteuid(), 0)
    if found.st_uid not in owners:
        raise UntrustedFile(path, f"of user {found.st_uid}", f"a directory of user {os.geteuid()}")
    if is_private and found.st_mode & WRITABLE_BY_OTHERS:
        raise UntrustedFile(
            path, _SHARED, f"a directory that only its owner may write to (chmod go-w {path})"
        )
    if not is_private and found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
        raise UntrustedFile(path, _SHARED, f"a directory that others may not write to (chmod o-w {path})")


def _check_parent(path: Path) -> None:
    found = path.stat()
    if found.st_uid not in (os.geteuid(), 0):
        raise UntrustedFile(path, f"of user {found.st_uid}", f"a directory of user {os.geteuid()} or of root")
    if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
        raise UntrustedFile(path, _SHARED, f"a directory that others may not write to (chmod o-w {path})")


def _check_link(path: Path) -> None:
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode) and found.st_uid not in (os.geteuid(), 0):
        raise UntrustedFile(path, f"a link that user {found.st_uid} has made", "a directory")

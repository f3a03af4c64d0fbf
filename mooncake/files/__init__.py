# SPDX-License-Identifier: Apache-2.0
"""Files that must survive a crash: a directory, and files in it that are appended to, truncated or replaced.

Written data survives the end of the process. It survives a loss of power once the file was synced; a created,
renamed or removed name does once its directory was synced. ``Directory`` and ``File`` are protocols because
``sim/faults/disks.py`` implements the same contract on virtual time, with disks that fail and lose data.
All calls are synchronous and raise ``OSError`` with the error number of the operating system. The content of
the files is defined by other modules.

A file of the real directory is opened without following links, is readable by its owner only (0600), and is
refused when it, or its directory, belongs to another user: see ``OsDirectory``. ``LockedDirectory`` is one
that this process alone uses; it translates the errors of system calls, once for all writers, into messages
that say what to do.
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

from mooncake.errors import InvalidArgument, MooncakeError, OutOfSpace, StorageError

_SHARED = "writable by other users"
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH

LOCK = "mooncake.lock"


class File(Protocol):
    """An open file. ``append`` and ``sync`` may run concurrently, in two threads."""

    @property
    def size_bytes(self) -> int: ...

    def read(self) -> bytes:
        """The whole content."""
        ...

    def append(self, content: bytes) -> None:
        """Append ``content``; when this raises, any part of it may have been written."""
        ...

    def truncate(self, size_bytes: int) -> None:
        """Drop everything after the first ``size_bytes``."""
        ...

    def sync(self) -> None:
        """Make everything appended so far survive a loss of power. Blocks, perhaps for long.

        When it raises, it is unknown which bytes appended since the last successful sync are on the disk,
        and a later sync that succeeds does not change that.
        """
        ...

    def is_at(self, path: Path) -> bool:
        """Whether this file is the one at ``path``: it is not, once it was removed or replaced."""
        ...

    def close(self) -> None:
        """Close the file and release its lock; idempotent."""
        ...


class Directory(Protocol):
    """An open directory. Names have no slash."""

    @property
    def path(self) -> Path:
        """Path of the directory, for messages."""
        ...

    def names(self) -> list[str]:
        """Names of its files, sorted."""
        ...

    def open(self, name: str, *, is_locked: bool = False) -> File:
        """Open a file, and create an empty one if it does not exist.

        ``is_locked``: take its lock, or raise ``BlockingIOError`` when it is locked already; the lock ends
        with the file's ``close`` or with the process.
        """
        ...

    def rename(self, old: str, new: str) -> None:
        """Rename atomically, replacing a file ``new`` that exists."""
        ...

    def remove(self, name: str) -> None: ...

    def sync(self) -> None:
        """Make all creations, renames and removals so far survive a loss of power. Blocks."""
        ...

    def close(self) -> None:
        """Close the directory, but not its files; idempotent."""
        ...


BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Boot id of the running system; while it is the same, no written data is lost. "": there is none."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""


def file_state(status: os.stat_result) -> tuple[int, int, int, int, int]:
    """What differs after a file was changed or replaced: device, inode, size and both times in ns."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


class UntrustedFile(PermissionError):
    """A file or directory that another user owns or may change: ``found`` where ``allowed`` is required."""

    def __init__(self, path: Path, found: str, allowed: str) -> None:
        super().__init__(errno.EPERM, f"is {found}; allowed: {allowed}", str(path))
        self.requirement = f"{allowed}; {path} is {found}"
        """What is required and what was found, for the message about the setting that chose the path."""


class DirectoryInUse(InvalidArgument):
    """Another process has the lock of the directory."""


class OsFile:
    """A file of the operating system, made by ``OsDirectory.open``."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._closing = threading.Lock()

    @property
    def size_bytes(self) -> int:
        return os.fstat(self._fd).st_size

    def read(self) -> bytes:
        parts: list[bytes] = []
        at = 0
        while part := os.pread(self._fd, 1 << 24, at):
            parts.append(part)
            at += len(part)
        return b"".join(parts)

    def append(self, content: bytes) -> None:
        view = memoryview(content)
        while view:
            view = view[os.write(self._fd, view) :]

    def truncate(self, size_bytes: int) -> None:
        os.ftruncate(self._fd, size_bytes)

    def sync(self) -> None:
        # A duplicate descriptor, because the file may be closed meanwhile and its descriptor reused.
        with self._closing:
            own = os.dup(self._fd)
        try:
            os.fdatasync(own)
        finally:
            os.close(own)

    def is_at(self, path: Path) -> bool:
        try:
            return os.path.samestat(os.stat(path), os.fstat(self._fd))
        except (FileNotFoundError, NotADirectoryError):
            return False

    def close(self) -> None:
        with self._closing:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)

    def __repr__(self) -> str:
        return f"<OsFile {self._fd}>"


class OsDirectory:
    """A directory of the operating system.

    Args:
        path: path of the directory.
        is_private: create it (0700, its parents with the default mode) if it does not exist, and refuse it
            unless it belongs to this user and is writable by no other. Otherwise it must exist and belong
            to this user or root, and others may write to it only if its sticky bit is set.

    Raises:
        UntrustedFile: its owner or mode is not as required, or a link of another user leads there.
        OSError: it can't be created or opened.
    """

    def __init__(self, path: Path, *, is_private: bool = False) -> None:
        self._path = path
        if is_private:
            path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                path.mkdir(0o700)
        _check_link(path)
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _check_directory(path, os.fstat(self._fd), is_private)
            if is_private:
                # A user who may rename the directory may replace it by another.
                _check_parent(path.resolve().parent)
        except OSError:
            self.close()
            raise

    @property
    def path(self) -> Path:
        return self._path

    def names(self) -> list[str]:
        return sorted(os.listdir(self._fd))

    def open(self, name: str, *, is_locked: bool = False) -> OsFile:
        flags = os.O_CREAT | os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        path = self._path / name
        try:
            fd = os.open(name, flags, 0o600, dir_fd=self._fd)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise UntrustedFile(path, "a link", "a file") from error
            raise OSError(error.errno, os.strerror(error.errno or 0), str(path)) from error
        try:
            check_file(path, os.fstat(fd))
            os.fchmod(fd, 0o600)
            if is_locked:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            raise
        return OsFile(fd)

    def rename(self, old: str, new: str) -> None:
        os.rename(old, new, src_dir_fd=self._fd, dst_dir_fd=self._fd)

    def remove(self, name: str) -> None:
        os.unlink(name, dir_fd=self._fd)

    def sync(self) -> None:
        os.fsync(self._fd)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __repr__(self) -> str:
        return f"<OsDirectory {self._path}>"


def check_in_place(file: File, path: Path) -> None:
    """Raise OSError if ``file`` is no longer the one at ``path``, so that no later process finds its content.

    The operating system accepts writes to a file that was removed, and drops them when it is closed.
    """
    if not file.is_at(path):
        raise OSError(errno.ESTALE, f"{path.name} was removed or replaced while in use")


def check_file(path: Path, found: os.stat_result) -> None:
    """Raise UntrustedFile unless it is a regular file of this user that no other may write to."""
    if not stat.S_ISREG(found.st_mode):
        raise UntrustedFile(path, "not a regular file", "a file")
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


def keep_copy(directory: Directory, name: str, content: bytes, why: str) -> str:
    """Save ``content`` beside ``name`` under a name that is not in use, and return its path. Raises OSError.

    A file with damage is neither truncated nor rewritten before its content has been saved like this.
    """
    names = set(directory.names())
    copies = (f"{name}.{why}" + (f".{number}" if number else "") for number in range(len(names) + 1))
    copy = next(one for one in copies if one not in names)
    file = directory.open(copy)
    try:
        file.append(content)
        file.sync()
    except OSError:
        directory.remove(copy)
        raise
    finally:
        file.close()
    directory.sync()
    return str(directory.path / copy)


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
        """Create the directory if it does not exist, and lock it.

        Raises:
            DirectoryInUse: another process has the lock.
            OSError: the directory can't be created, trusted or locked.
        """
        if self._directory is None:
            self._directory = OsDirectory(self.path, is_private=True)
        try:
            self._lock = self._directory.open(LOCK, is_locked=True)
        except BlockingIOError:
            allowed = "a directory that no other process uses"
            raise DirectoryInUse(self._field, str(self.path), allowed) from None

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
            case errno.ENOENT:
                return self.wrong("a directory that exists or can be created; is its disk mounted?")
            case errno.EACCES | errno.EPERM | errno.EROFS:
                return self.wrong(f"a directory that this process may write to ({error.strerror})")
            case errno.ESTALE:
                return StorageError(f"{self.path}: {error.strerror}; restart the process that uses it")
            case errno.EFBIG | errno.EINVAL:
                return self.wrong(f"a file system that supports files of this size ({error.strerror})")
            case _:
                return StorageError(f"{self.path}: {error.strerror}; check the disk")

# SPDX-License-Identifier: Apache-2.0
"""The SSD tier of a node that has none of its own: a folder in the directory that its cluster shares.

::

    <root_fs_dir>/<cluster_id>/<host name>        the first process of a host
    <root_fs_dir>/<cluster_id>/<host name>-2      the second one, and so on

Each folder is an ordinary SSD directory (``ssd.py``): its lock says which process has it, and a process that
is started again finds the content of the first folder that is free. The master names the directory in its
reply to a mount, so this module says what a master may make a node write: only below a directory that exists
already, in folders that belong to this user alone, and never more than a share of what is free there, where
the space of other folders that is not yet allocated counts as taken.

The directory may be on a file system of another host that no longer answers. A system call there can't be
interrupted, so ``FolderOpening`` opens the folder in a thread that does not keep the process from ending.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import socket
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from mooncake.errors import InvalidArgument, OutOfSpace
from mooncake.files import DirectoryInUse, LockedDirectory, OsDirectory
from mooncake.store import messages as m
from mooncake.store.node.ssd import DATA, HEADER, PAGE_BYTES, Disk
from mooncake.store.settings import MasterSettings, check_cluster_id, check_root_fs_dir
from mooncake.transfer import TransferEngine

FIELD = "root_fs_dir"
SHARE = 0.9
"""Largest fraction of the free space of a file system that a new folder may take."""
MAX_FOLDERS = 256
"""Largest number of processes of one host."""
ADVICE = (
    "this process goes on without an SSD tier; make that directory usable on this host (it exists, belongs "
    "to this user or root, has room) and start the process again"
)

_FOLDER_NAME = re.compile("[A-Za-z0-9_][A-Za-z0-9_.-]{0,254}")


@dataclass(frozen=True, slots=True)
class SharedDirectory:
    """The directory that a cluster shares, and the limit of each process there (0: none)."""

    path: str
    cluster_id: str
    size_bytes: int = 0


def choose(
    root_fs_dir: str, cluster_id: str, accepts: bool, mounted: m.Mounted
) -> SharedDirectory | InvalidArgument | None:
    """Choose between a node's own settings, which come first, and what its master replied.

    Args:
        root_fs_dir: the node's own directory; "": the master's, if the node ``accepts`` it.
        cluster_id: the node's own name of the cluster; "": the master's.

    Returns:
        None when neither names a directory; an error, not raised, when the master's can't be used.
    """
    path = root_fs_dir or (mounted.root_fs_dir if accepts else "")
    if not path:
        return None
    name = cluster_id or mounted.cluster_id or MasterSettings.cluster_id
    try:
        check_root_fs_dir(path)
        check_cluster_id(name)
    except InvalidArgument as error:
        return error
    return SharedDirectory(path, name, max(0, mounted.root_fs_size_bytes))


def open_folder(engine: TransferEngine, place: SharedDirectory, repairs: bool = False) -> Disk:
    """Open this process's folder: the first of its host's that no other process has. Blocks.

    Raises:
        InvalidArgument: the directory does not exist, or can't be written or trusted.
        OutOfSpace, StorageError: the file system refuses.
    """
    root = Path(place.path)
    host = socket.gethostname()
    if _FOLDER_NAME.fullmatch(host) is None:
        raise InvalidArgument("host name", host, "letters, digits, `.`, `_` and `-`, for its folder")
    try:
        with closing(OsDirectory(root)):  # which is not created: a file system may not be mounted there
            cluster = root / place.cluster_id
            with closing(OsDirectory(cluster, is_private=True)):
                pass
        for number in range(1, MAX_FOLDERS + 1):
            folder = cluster / (host if number == 1 else f"{host}-{number}")
            size_bytes = _size_bytes(folder, place.size_bytes)
            try:
                return Disk(engine, folder, size_bytes, repairs, field=FIELD, keeps_larger=True)
            except DirectoryInUse:
                continue
    except OSError as error:
        raise LockedDirectory(root, FIELD).trouble(error) from error
    raise InvalidArgument(FIELD, place.path, f"at most {MAX_FOLDERS} processes of one host")


def _size_bytes(folder: Path, limit_bytes: int) -> int:
    """Capacity that the folder is to have, at least; an existing one keeps its own, or grows to the limit.

    Raises:
        OutOfSpace: there is no room for a new folder.
        OSError: the file system does not say what is free.
    """
    own_bytes, _ = _allocated(folder)
    others = [_allocated(one) for one in folder.parent.iterdir() if one.name != folder.name]
    claimed_bytes = sum(max(0, size - allocated) for allocated, size in others)
    room_bytes = max(0, shutil.disk_usage(folder.parent).free + own_bytes - claimed_bytes)
    share_bytes = int(room_bytes * SHARE)
    if (folder / HEADER).exists():
        return min(limit_bytes, share_bytes)
    size_bytes = min(limit_bytes, share_bytes) if limit_bytes else share_bytes
    if size_bytes < PAGE_BYTES:
        raise OutOfSpace(f"{folder}: {size_bytes} bytes are free for it; make room")
    return size_bytes


def _allocated(folder: Path) -> tuple[int, int]:
    """Bytes that the file system has allocated for a folder's content, and the most that it may become.

    The file of the content is sparse: it has its whole size from the beginning, and no space.
    """
    try:
        found = (folder / DATA).stat()
    except OSError:  # there is none yet, or the folder is no folder of a process
        return 0, 0
    return found.st_blocks * 512, found.st_size


class FolderOpening:
    """A folder that is being opened by ``work``, in a thread of its own, from the event loop of its maker."""

    def __init__(self, work: Callable[[], Disk]) -> None:
        self._work = work
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._is_abandoned = False
        self._disk: Disk | None = None
        self._error: BaseException | None = None
        self._ended = asyncio.Event()
        # Not a thread of the loop: asyncio, and the interpreter at its end, wait for theirs.
        threading.Thread(target=self._run, name="mooncake-root-fs", daemon=True).start()

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Whether it has ended, at most after ``timeout_s``."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._ended.wait()
        except TimeoutError:
            return False
        return True

    def result(self) -> Disk:
        """The open folder, once ``wait`` has returned True. Raises what ``work`` raised."""
        if self._error is not None:
            raise self._error
        assert self._disk is not None
        return self._disk

    def abandon(self) -> None:
        """Close the folder, now or when it has been opened."""
        with self._lock:
            self._is_abandoned = True
            disk, self._disk = self._disk, None
        if disk is not None:
            disk.close()

    def _run(self) -> None:
        disk: Disk | None = None
        try:
            disk = self._work()
        except BaseException as error:
            self._error = error
        with self._lock:
            if not self._is_abandoned:
                self._disk, disk = disk, None
        if disk is not None:
            disk.close()
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            self._loop.call_soon_threadsafe(self._ended.set)

# SPDX-License-Identifier: Apache-2.0
"""Folder of a version that is not whole yet: its files, and beside them which chunks are there.

``<folder>.partial`` has the manifest, a log of chunks, and the files in ``content``. The log is appended to
without a flush, because it is not trusted: at a new start every chunk that it names is read and compared with
its digest. When every chunk is there, the files are flushed and ``content`` is renamed to the folder in one
step, so that a folder under its own name is always whole. A lock keeps other processes away. All calls block:
they are made in threads.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np

from mooncake.errors import InvalidArgument, OutOfSpace, StorageError
from mooncake.files import LOCK, File, LockedDirectory
from mooncake.log import get_logger
from mooncake.p2p.content import FolderContent
from mooncake.p2p.download import Bits
from mooncake.p2p.manifest import Manifest

log = get_logger(__name__)

MANIFEST = "manifest"
CHUNKS = "chunks"
CONTENT = "content"
OWN_NAMES = frozenset((LOCK, MANIFEST, f"{MANIFEST}.new", CHUNKS, CONTENT))
SUFFIX = ".partial"
RESERVE_BYTES = 16 << 20
"""Space that is left on the disk."""


class PartialFolder:
    """The files of ``manifest`` on their way to ``folder``.

    Args:
        folder: must not exist.
        manifest: the version.

    Raises:
        InvalidArgument: the folder exists, another process loads into it, it may not have its name, or
            ``<folder>.partial`` is no load's.
        OutOfSpace: the disk has no room.
        StorageError: the disk reports an error.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        check_target(folder)
        self.folder = folder
        self._manifest = manifest
        self.path = folder.with_name(f"{folder.name}{SUFFIX}")
        self._check_own()
        self._directory = LockedDirectory(self.path, "folder")
        self._chunks: File | None = None
        self._is_finished = False
        try:
            self._directory.take()
            self.content = FolderContent(self.path / CONTENT, manifest.items, is_writable=True)
            self.have = self._resume()
        except OSError as error:
            self.close()
            raise self._directory.trouble(error) from error
        except BaseException:
            self.close()
            raise

    def _check_own(self) -> None:
        """Check that a folder that is there already was made by a load: its content will be removed."""
        try:
            found = set(os.listdir(self.path))
        except OSError:
            return  # none, or one that can't be locked, which then says why
        others = sorted(found - OWN_NAMES)
        if others or (found and LOCK not in found):
            what = f"it has {others[0]}" if others else f"it has no {LOCK}"
            raise InvalidArgument(
                "folder",
                str(self.folder),
                f"a folder beside which {self.path.name} is free; that one is not a load's ({what}): move it",
            )

    def record(self, chunk: int) -> None:
        """Note that a chunk has been verified and written."""
        assert self._chunks is not None
        try:
            self._chunks.append(chunk.to_bytes(4, "little"))
        except OSError as error:
            raise self._directory.trouble(error) from error

    def finish(self) -> None:
        """Flush everything and give the folder its name. ``content`` is then that of the folder."""
        try:
            self.content.sync()
            if self.folder.exists():  # made by another program meanwhile
                raise InvalidArgument("folder", str(self.folder), "a folder that does not exist; remove it")
            self.content.move(self.folder)
            self._is_finished = True
            self.close()
            shutil.rmtree(self.path, ignore_errors=True)
            _sync_folder(self.folder.parent)
        except OSError as error:
            raise self._directory.trouble(error) from error

    def close(self) -> None:
        """Release the lock. What is there stays, for the next start."""
        if self._chunks is not None:
            self._chunks.close()
            self._chunks = None
        if hasattr(self, "content") and not self._is_finished:
            self.content.close()
        self._directory.close()

    def remove(self) -> None:
        """Remove what is there."""
        self.close()
        shutil.rmtree(self.path, ignore_errors=True)

    def _resume(self) -> Bits:
        """Chunks that are there: those of the log whose bytes have the right digest."""
        have = np.zeros(len(self._manifest.chunks), dtype=np.bool_)
        found = self._directory.read(MANIFEST) if self._directory.has(MANIFEST) else b""
        if found != self._manifest.encoded:
            if found:
                log.info("p2p_partial_discarded", path=str(self.path), reason="it is of another version")
            self._start_anew()
            return have
        self._remove_others()
        self.content.make()
        self._chunks = self._directory.directory.open(CHUNKS)
        noted = self._chunks.read()
        numbers = np.unique(np.frombuffer(noted[: len(noted) // 4 * 4], dtype="<u4"))
        for chunk in numbers[numbers < len(have)]:
            have[chunk] = self._is_there(int(chunk))
        num_wrong = len(numbers) - int(np.count_nonzero(have))
        self._chunks.truncate(0)
        self._chunks.append(np.flatnonzero(have).astype("<u4").tobytes())
        num_have = int(np.count_nonzero(have))
        log.info(
            "p2p_resumed", path=str(self.path), num_have=num_have, num_chunks=len(have), num_wrong=num_wrong
        )
        return have

    def _remove_others(self) -> None:
        """Remove everything that the manifest does not have; a link in the place of a folder, too."""
        files = {item.name for item in self._manifest.items}
        folders = {name[:at] for name in files for at, letter in enumerate(name) if letter == "/"}
        waiting = [""]
        while waiting:
            prefix = waiting.pop()
            for one in list(os.scandir(self.path / CONTENT / prefix)):
                name = f"{prefix}{one.name}"
                if one.is_dir(follow_symlinks=False):
                    if name in folders:
                        waiting.append(f"{name}/")
                    else:
                        shutil.rmtree(one.path)
                elif name not in files:
                    os.unlink(one.path)

    def _is_there(self, chunk: int) -> bool:
        try:
            return self._manifest.holds(chunk, self.content.read(*self._manifest.chunks[chunk]))
        except StorageError:
            return False

    def _start_anew(self) -> None:
        shutil.rmtree(self.path / CONTENT, ignore_errors=True)
        room = shutil.disk_usage(self.path).free - RESERVE_BYTES
        if self._manifest.size_bytes > room:
            raise OutOfSpace(
                f"{self.path}: the version has {self._manifest.size_bytes:,} bytes, {max(0, room):,} are "
                "free; make room"
            )
        (self.path / CONTENT).mkdir(mode=0o755)
        self.content.make()
        self._chunks = self._directory.directory.open(CHUNKS)
        self._chunks.truncate(0)
        self._directory.replace(MANIFEST, self._manifest.encoded)


def is_there(path: Path) -> bool:
    """Whether there is a file, folder or link of that name.

    Raises:
        InvalidArgument: no disk can have such a name.
    """
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        raise InvalidArgument("folder", str(path)[:80], f"a name that a folder can have ({error})") from error
    return True


def check_target(folder: Path) -> None:
    """Check that a version may be loaded into ``folder``.

    Raises:
        InvalidArgument: it exists, or has the name of a load in progress.
    """
    if is_there(folder):
        raise InvalidArgument(
            "folder", str(folder), "a folder that does not exist; each version has a folder of its own"
        )
    if folder.name.endswith(SUFFIX):
        raise InvalidArgument("folder", str(folder), f"a name that does not end in {SUFFIX}")


def remove_partial(folder: Path) -> None:
    """Remove what a load into ``folder`` has left.

    Raises:
        InvalidArgument: a load is under way there.
        StorageError: it can't be removed.
    """
    path = folder.with_name(f"{folder.name}{SUFFIX}")
    if not path.is_dir() or not {LOCK} <= set(os.listdir(path)) <= OWN_NAMES:
        return
    directory = LockedDirectory(path, "folder")
    try:
        directory.take()
        shutil.rmtree(path)
    except OSError as error:
        raise directory.trouble(error) from error
    finally:
        directory.close()


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

"""A directory on an SSD as a segment: what lies where outlives the process.

::

    mooncake.ssd     header: version, content id, capacity; written whole, by renaming
    mooncake.data    the segment itself: one file with holes, room set aside in steps of 1 GiB
    mooncake.index   log of entries and tombstones (index.py), compacted by renaming
    mooncake.lock    held while a process serves the directory

Bytes go to the data file by transfer, never through here. Which object lies where the master decides;
this module keeps it, and gives it back after a restart. See docs/decisions/018.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterable
from pathlib import Path

import msgspec

from mooncake.errors import InvalidArgument, MooncakeError, OutOfSpace, StorageError
from mooncake.log import get_logger
from mooncake.store.framing import framed, unframed
from mooncake.store.index import Index, compacted
from mooncake.store.messages import Entry
from mooncake.transfer import Region, TransferEngine

log = get_logger(__name__)

MAGIC = b"mooncake ssd tier\n"
VERSION = 1
STEP_BYTES = 1 << 30
"""Room is set aside in such steps."""
PAGE_BYTES = 4096


class Header(msgspec.Struct, frozen=True, array_like=True):
    version: int
    content_id: int
    size_bytes: int


class Disk:
    """An open directory; nobody else opens it until ``close``.

    Args:
        path: created when it is not there.
        size_bytes: the capacity; may grow from one start to the next (then the content gets a new id,
            so that a master asks what it is), not shrink.

    Raises:
        InvalidArgument: not a directory, not writable, in use, of another version, damaged, or larger.
        OutOfSpace, StorageError: the disk refuses.
    """

    def __init__(self, engine: TransferEngine, path: Path, size_bytes: int) -> None:
        self._engine = engine
        self._path = path
        self._lock = self._log = -1
        self._provided: dict[int, None] = {}
        """Steps that have their room."""
        self._since: list[bytes] | None = None
        """What was appended since a compaction began; None: none is under way."""
        size_bytes -= size_bytes % PAGE_BYTES
        try:
            self._lock = self._take()
            header = self._header(size_bytes)
            self.content_id = header.content_id
            self.index = self._recovered()
            self.region: Region = self._data(header)
        except OSError as error:
            self.close()
            raise self._trouble(error) from error
        except MooncakeError:
            self.close()
            raise
        free_bytes = shutil.disk_usage(path).free + os.stat(path / "mooncake.data").st_blocks * 512
        if free_bytes < size_bytes:
            log.warning(
                "ssd_smaller_than_asked", path=str(path), free_bytes=free_bytes, size_bytes=size_bytes
            )
        log.info("ssd_opened", path=str(path), num_objects=len(self.index), how=self.region.how)

    @property
    def size_bytes(self) -> int:
        return self.region.size_bytes

    def is_provided(self, offset: int, size_bytes: int) -> bool:
        """The file system has room for this range, as far as is known without asking."""
        return all(step in self._provided for step in _steps(offset, size_bytes))

    def provide(self, offset: int, size_bytes: int) -> None:
        """See that the file system has room for this range; it may block.

        Raises:
            OutOfSpace, StorageError: it has none.
        """
        for step in _steps(offset, size_bytes):
            if step not in self._provided:
                start = step * STEP_BYTES
                try:
                    self._engine.provide(self.region, start, min(STEP_BYTES, self.size_bytes - start))
                except OutOfSpace:  # perhaps there is room for this much
                    return self._engine.provide(self.region, offset, size_bytes)
                self._provided[step] = None
        return None

    def vacate(self, offset: int, size_bytes: int) -> None:
        """This range is about to be written: what the index has there is not there any more.

        Raises:
            OutOfSpace, StorageError: that can't be written down, so nothing may be written.
        """
        self.drop(self.index.overlapping(offset, size_bytes))

    def hold(self, entry: Entry) -> None:
        """Its bytes are in place.

        Raises:
            OutOfSpace, StorageError: that can't be written down.
        """
        before = self.index.num_bytes
        try:
            self._append(self.index.hold(entry), before)
        except MooncakeError:
            self.index.drop([entry.object_id])
            self.index.num_bytes = before
            raise

    def drop(self, object_ids: Iterable[int]) -> None:
        """They are not here any more.

        Raises:
            OutOfSpace, StorageError: that can't be written down.
        """
        self._append(self.index.drop(object_ids), self.index.num_bytes)

    def flush(self) -> None:
        """What was written and held before survives a loss of power; it blocks.

        Raises:
            StorageError: the disk refuses.
        """
        self._engine.flush(self.region)
        try:
            os.fdatasync(self._log)
        except OSError as error:
            raise self._trouble(error) from error

    # Compaction, in three steps, because the long one must not keep anybody waiting

    @property
    def wants_compaction(self) -> bool:
        return self._since is None and self.index.wants_compaction

    def begin_compaction(self) -> list[Entry]:
        self._since = []
        return self.index.in_order()

    def write_compacted(self, entries: list[Entry]) -> int | None:
        """A new log, to be brought up to date; it blocks, and may run beside everything else.

        None: the disk refuses, and the old one stays.
        """
        try:
            return self._fresh("mooncake.index", compacted(entries))
        except OSError as error:
            log.warning("index_not_compacted", path=str(self._path), reason=str(error))
            return None

    def end_compaction(self, fresh: int | None) -> None:
        """The new log takes the place of the old one."""
        since, self._since = b"".join(self._since or []), None
        was_bytes = self.index.num_bytes
        if fresh is None:
            self.index.compacted_to(was_bytes)  # not again at once
            return
        try:
            _write(fresh, since)
            os.fsync(fresh)
            self._put("mooncake.index")
        except OSError as error:
            os.close(fresh)
            self.index.compacted_to(was_bytes)
            log.warning("index_not_compacted", path=str(self._path), reason=str(error))
            return
        os.close(self._log)
        self._log = fresh
        self.index.compacted_to(os.fstat(fresh).st_size)
        fields = {"was_bytes": was_bytes, "num_bytes": self.index.num_bytes}
        log.info("index_compacted", path=str(self._path), **fields)

    def close(self) -> None:
        for file in (self._log, self._lock):
            if file >= 0:
                os.close(file)
        self._log = self._lock = -1

    # Opening

    def _take(self) -> int:
        self._path.mkdir(parents=True, exist_ok=True)
        file = os.open(self._path / "mooncake.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            raise self._wrong("a directory that no other process uses") from None
        return file

    def _header(self, size_bytes: int) -> Header:
        file = self._path / "mooncake.ssd"
        fresh = Header(VERSION, secrets.randbits(63) | 1, size_bytes)
        if not file.exists():
            index = self._path / "mooncake.index"
            if index.exists() and index.stat().st_size:
                raise self._wrong(f"a directory with its header {file.name}, or an empty one")
            self._replace("mooncake.ssd", MAGIC + framed([msgspec.msgpack.encode(fresh)]))
            return fresh
        content = file.read_bytes()
        bodies, _ = unframed(content[len(MAGIC) :])
        if not content.startswith(MAGIC) or len(bodies) != 1:
            raise self._wrong(f"a directory whose header {file.name} is whole, or an empty one")
        try:
            header = msgspec.msgpack.decode(bodies[0], type=Header)
        except msgspec.MsgspecError as error:
            raise self._wrong(f"a directory of this release ({error})") from error
        if header.version != VERSION:
            raise self._wrong(f"a directory of version {VERSION}, not {header.version}; use that release")
        if size_bytes < header.size_bytes:
            allowed = f"at least {header.size_bytes}, as when {self._path} was made; or another directory"
            raise InvalidArgument("ssd_size", size_bytes, allowed)
        if size_bytes == header.size_bytes:
            return header
        self._replace("mooncake.ssd", MAGIC + framed([msgspec.msgpack.encode(fresh)]))
        return fresh

    def _recovered(self) -> Index:
        file = self._path / "mooncake.index"
        self._log = os.open(file, os.O_CREAT | os.O_RDWR | os.O_APPEND | os.O_CLOEXEC, 0o600)
        content = file.read_bytes()
        try:
            index = Index(content)
        except msgspec.MsgspecError as error:
            raise self._wrong(f"a directory of this release ({error})") from error
        if index.num_bytes < len(content):
            log.warning("index_tail_dropped", path=str(file), num_bytes=len(content) - index.num_bytes)
            os.ftruncate(self._log, index.num_bytes)
        return index

    def _data(self, header: Header) -> Region:
        file = self._path / "mooncake.data"
        ends = [entry.offset + entry.size_bytes for entry in self.index.entries.values()]
        there = file.stat().st_size if file.exists() else 0
        if there < max(ends, default=0):
            raise self._wrong(f"a directory whose {file.name} has not been cut short")
        if there < header.size_bytes:
            with file.open("ab") as data:
                data.truncate(header.size_bytes)
            self._keep_names()
        file.chmod(0o600)
        return self._engine.open_file(file, header.size_bytes)

    # Writing

    def _append(self, content: bytes, before: int) -> None:
        """All of it or nothing: what follows a torn record would be lost with it."""
        if not content:
            return
        try:
            _write(self._log, content)
        except OSError as error:
            os.ftruncate(self._log, before)
            self.index.num_bytes = before
            raise self._trouble(error) from error
        if self._since is not None:
            self._since.append(content)

    def _fresh(self, name: str, content: bytes) -> int:
        """A file that ``_put`` puts in the place of ``name``."""
        flags = os.O_CREAT | os.O_TRUNC | os.O_RDWR | os.O_APPEND | os.O_CLOEXEC
        file = os.open(self._path / f"{name}.new", flags, 0o600)
        try:
            _write(file, content)
            os.fsync(file)
        except OSError:
            os.close(file)
            raise
        return file

    def _put(self, name: str) -> None:
        os.rename(self._path / f"{name}.new", self._path / name)
        self._keep_names()

    def _replace(self, name: str, content: bytes) -> None:
        """All of it or nothing."""
        os.close(self._fresh(name, content))
        self._put(name)

    def _keep_names(self) -> None:
        """Files that were made or renamed have their names after a loss of power."""
        directory = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def _wrong(self, allowed: str) -> InvalidArgument:
        return InvalidArgument("ssd_path", str(self._path), allowed)

    def _trouble(self, error: OSError) -> MooncakeError:
        match error.errno:
            case errno.ENOSPC | errno.EDQUOT:
                return OutOfSpace(f"{self._path}: {error.strerror}; make room")
            case errno.ENOTDIR | errno.EEXIST:
                return self._wrong("a directory")
            case errno.EACCES | errno.EPERM | errno.EROFS | errno.ENOENT:
                return self._wrong(f"a directory that this process may write to ({error.strerror})")
            case errno.EFBIG | errno.EINVAL:
                return self._wrong(f"a file system that takes files of this size ({error.strerror})")
            case _:
                return StorageError(f"{self._path}: {error.strerror}; look at the disk")


def _steps(offset: int, size_bytes: int) -> range:
    return range(offset // STEP_BYTES, (offset + size_bytes - 1) // STEP_BYTES + 1)


def _write(file: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(file, view) :]

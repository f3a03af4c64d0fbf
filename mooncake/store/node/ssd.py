# SPDX-License-Identifier: Apache-2.0
"""A directory on an SSD as a segment whose content survives the process.

::

    mooncake.ssd     header: version, content id, capacity; written whole, by renaming
    mooncake.data    the segment itself: one sparse file, space allocated in steps of 1 GiB
    mooncake.index   log of entries and tombstones (ssd_index.py, ssd_index_log.py), compacted by renaming
    mooncake.lock    locked while a process serves the directory

Transfer moves bytes to and from the data file, not this module. The master decides which object lies where;
this module stores it and restores it after a restart. An object's bytes and its entry are flushed at the same
time, so a loss of power may leave an entry without its bytes: entries of which the log does not say that
their bytes were flushed are verified here, before they are reported. See docs/decisions/018 and 046.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import shutil
from pathlib import Path

import msgspec

from mooncake.errors import InvalidArgument, MooncakeError, OutOfSpace
from mooncake.files import LockedDirectory, check_in_place, keep_copy
from mooncake.files.frames import framed, unframed
from mooncake.log import get_logger
from mooncake.store.messages import SegmentEntry
from mooncake.store.node.ssd_index import SsdIndex
from mooncake.store.node.ssd_index_log import NAME as INDEX
from mooncake.store.node.ssd_index_log import SsdIndexLog
from mooncake.transfer import Region, TransferEngine, crc32c

log = get_logger(__name__)

MAGIC = b"mooncake ssd tier\n"
VERSION = 1
STEP_BYTES = 1 << 30
"""Unit in which the file system allocates space."""
PAGE_BYTES = 4096
PIECE_BYTES = 1 << 20
"""Bytes read at a time to verify an entry."""
HEADER, DATA = "mooncake.ssd", "mooncake.data"
OR_EMPTY = (
    "or move the directory away: the node then starts empty, objects that others hold remain, and those that "
    "only it held are lost"
)
"""What to do instead of a repair."""


class SsdHeader(msgspec.Struct, frozen=True, array_like=True):
    version: int
    content_id: int
    size_bytes: int


@dataclasses.dataclass(frozen=True)
class LostData:
    """Objects of an index of which the data file lacks bytes, because it is missing or was cut short."""

    num_bytes: int | None
    """Size of the file; None: there is none."""
    end: int
    """Where the last object of the index ends."""
    num_objects: int
    """Objects of the index, with those that are whole."""
    object_ids: list[int]
    """Those that lack bytes."""

    def __str__(self) -> str:
        if self.num_bytes is None:
            return f"{DATA} is missing, and {INDEX} names {self.num_objects} objects in it"
        return (
            f"{DATA} was cut short: it has {self.num_bytes} bytes, and {INDEX} names objects up to byte "
            f"{self.end}, of which {len(self.object_ids)} of {self.num_objects} lack bytes"
        )


def lost_data(index: SsdIndex, path: Path) -> LostData | None:
    """What the data file in directory ``path`` lacks; None: nothing.

    A missing file is not created, because the next start would find one that was cut short. Raises OSError.
    """
    try:
        num_bytes = (path / DATA).stat().st_size
    except FileNotFoundError:
        num_bytes = None
    ends = {one: entry.offset + entry.size_bytes for one, entry in index.entries.items()}
    lost = [one for one, end in ends.items() if end > (num_bytes or 0)]
    return LostData(num_bytes, max(ends.values()), len(ends), lost) if lost else None


def drop_lost(folder: LockedDirectory, index: SsdIndexLog, loss: LostData) -> None:
    """Drop the objects that lack bytes from the index, durably, and keep a copy of it.

    The content gets a new id, because a master that knows the content has the node enter what it lacks.

    Raises:
        InvalidArgument: the header is damaged.
        OSError: the header or the copy can't be written.
        OutOfSpace, StorageError: the index can't be written.
    """
    if folder.has(HEADER):  # first, so that a crash leaves no old id with an index that lacks objects
        folder.replace(HEADER, _content(_fresh_header(read_header(folder).size_bytes)))
    copy = keep_copy(folder.directory, INDEX, folder.read(INDEX), "damaged")
    index.drop(loss.object_ids)
    index.flush()
    path = str(folder.path / DATA)
    log.error("ssd_data_lost", path=path, reason=str(loss), num_objects=len(loss.object_ids), copy=copy)


def report_missing_parent(folder: Path) -> None:
    """Log that a directory above ``folder`` will be created: where a disk should have been mounted, its data
    goes to the root file system."""
    if not folder.parent.exists():
        log.warning("parent_directory_created", path=str(folder), hint="is its disk mounted?")


class Disk:
    """An open SSD directory, locked by this process until ``close``.

    Args:
        path: created if it does not exist.
        size_bytes: the capacity; may grow from one start to the next (the content then gets a new id,
            so that a master requests a report of it), not shrink.
        repairs: recover the whole records of a damaged index, and drop objects of which the data file lacks
            bytes.
        field: the setting that chose ``path``, for error messages.
        keeps_larger: keep the capacity of a directory that is larger than ``size_bytes``.

    Raises:
        DirectoryInUse: another process serves it.
        InvalidArgument: not a directory, not writable, of another version, damaged, or larger.
        OutOfSpace, StorageError: the disk refuses.
    """

    def __init__(
        self,
        engine: TransferEngine,
        path: Path,
        size_bytes: int,
        repairs: bool = False,
        *,
        field: str = "ssd_path",
        keeps_larger: bool = False,
    ) -> None:
        self._engine = engine
        self._folder = LockedDirectory(path, field)
        self._keeps_larger = keeps_larger
        self._provided: dict[int, None] = {}
        """Steps whose space is allocated."""
        self._closers = contextlib.ExitStack()
        self._is_reported_removed = False
        size_bytes -= size_bytes % PAGE_BYTES
        report_missing_parent(path)
        try:
            self._folder.take()
            self._closers.callback(self._folder.close)
            header = self._header(size_bytes)
            self.log = SsdIndexLog(self._folder, repairs)
            """Log of the index, to which writers of the segment add their entries."""
            self._closers.callback(self.log.close)
            self.region: Region = self._data(header, repairs)
            self.content_id = read_header(self._folder).content_id  # a repair gives it a new one
            self._verify_unflushed()
            free_bytes = shutil.disk_usage(path).free + (path / DATA).stat().st_blocks * 512
        except OSError as error:
            self.close()
            raise self._folder.trouble(error) from error
        except MooncakeError:
            self.close()
            raise
        if free_bytes < size_bytes:
            fields = {"path": str(path), "free_bytes": free_bytes, "size_bytes": size_bytes}
            log.warning("ssd_smaller_than_requested", **fields)
        log.info("ssd_opened", path=str(path), num_objects=len(self.index), how=self.region.how)

    @property
    def index(self) -> SsdIndex:
        return self.log.index

    @property
    def size_bytes(self) -> int:
        return self.region.size_bytes

    def is_provided(self, offset: int, size_bytes: int) -> bool:
        """Whether space for this range is known to be allocated; makes no system call."""
        return all(step in self._provided for step in _steps(offset, size_bytes))

    def provide(self, offset: int, size_bytes: int) -> None:
        """Allocate space of the file system for this range; may block.

        Raises:
            OutOfSpace, StorageError: the file system has no space, or fails.
        """
        for step in _steps(offset, size_bytes):
            if step not in self._provided:
                start = step * STEP_BYTES
                try:
                    self._engine.provide(self.region, start, min(STEP_BYTES, self.size_bytes - start))
                except OutOfSpace:  # there may be space for this much
                    return self._engine.provide(self.region, offset, size_bytes)
                self._provided[step] = None
        return None

    def vacate(self, offset: int, size_bytes: int) -> None:
        """Drop the index entries in a range that is about to be written.

        Raises:
            OutOfSpace, StorageError: the index can't be written, so the range must not be either; or a file
                of the directory was removed, so that nothing that is written would outlast this process.
        """
        self._check_in_place()
        self.log.drop(self.index.overlapping(offset, size_bytes))

    def flush(self) -> None:
        """Make written bytes survive a loss of power; blocks. For index entries see ``SsdIndexLog.flush``.

        Raises:
            StorageError: the disk refuses.
        """
        self._engine.flush(self.region)

    def close(self) -> None:
        self._closers.close()

    def _check_in_place(self) -> None:
        try:
            check_in_place(self._data_file, self._folder.path / DATA)
        except OSError as error:
            if not self._is_reported_removed:
                log.error("ssd_removed", path=str(self._folder.path), reason=str(error))
                self._is_reported_removed = True
            raise self._folder.trouble(error) from error
        self._is_reported_removed = False

    # Opening

    def _header(self, size_bytes: int) -> SsdHeader:
        folder = self._folder
        fresh = _fresh_header(size_bytes)
        content = _content(fresh)
        if not folder.has(HEADER):
            if folder.has(INDEX) and folder.read(INDEX):
                raise folder.wrong(f"a directory with its header {HEADER}, or an empty one")
            folder.replace(HEADER, content)
            return fresh
        header = read_header(folder)
        if size_bytes < header.size_bytes and self._keeps_larger:
            return header
        if size_bytes < header.size_bytes:
            allowed = f"at least {header.size_bytes} bytes, as when {folder.path} was made; or another one"
            raise InvalidArgument("ssd_size", size_bytes, allowed)
        if size_bytes == header.size_bytes:
            return header
        folder.replace(HEADER, content)
        return fresh

    def _data(self, header: SsdHeader, repairs: bool) -> Region:
        loss = lost_data(self.index, self._folder.path)
        if loss is not None:
            if not repairs:
                how = f"`mooncake store repair {self._folder.path}` shows what can be kept"
                raise self._folder.wrong(f"a directory whose {DATA} is whole, but {loss}; {how}; {OR_EMPTY}")
            drop_lost(self._folder, self.log, loss)
        data = self._data_file = self._folder.directory.open(DATA)
        self._closers.callback(data.close)
        if data.size_bytes < header.size_bytes:
            data.truncate(header.size_bytes)
            self._folder.directory.sync()
        return self._engine.open_file(self._folder.path / DATA, header.size_bytes)  # no link: it was opened

    def _verify_unflushed(self) -> None:
        """Drop entries whose bytes a loss of power took, and make durable what is left of the others."""
        unflushed = [self.index.entries[one] for one in self.index.unflushed]
        if not unflushed:
            return
        path = self._folder.path / DATA
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            lost = [entry for entry in unflushed if not _is_whole(fd, entry)]
        finally:
            os.close(fd)
        self.log.drop(entry.object_id for entry in lost)
        # The process may have been killed, without a loss of power, before the flush.
        self.flush()
        self.log.mark_flushed(list(self.index.unflushed))
        self.log.flush()
        if lost:
            num_bytes = sum(entry.size_bytes for entry in lost)
            log.warning("unflushed_dropped", path=str(path), num_objects=len(lost), num_bytes=num_bytes)


def read_header(folder: LockedDirectory) -> SsdHeader:
    """The directory's header.

    Raises:
        InvalidArgument: it is damaged, or of another version.
        OSError: it can't be read.
    """
    content = folder.read(HEADER)
    bodies, _ = unframed(content[len(MAGIC) :])
    if not content.startswith(MAGIC) or len(bodies) != 1:
        raise folder.wrong(f"a directory whose header {HEADER} is whole, or an empty one")
    try:
        header = msgspec.msgpack.decode(bodies[0], type=SsdHeader)
    except msgspec.MsgspecError as error:
        raise folder.wrong(f"a directory of this release ({error})") from error
    if header.version != VERSION:
        allowed = f"a directory of version {VERSION}, not {header.version}; use that release"
        raise folder.wrong(allowed)
    return header


def _fresh_header(size_bytes: int) -> SsdHeader:
    return SsdHeader(VERSION, secrets.randbits(63) | 1, size_bytes)


def _content(header: SsdHeader) -> bytes:
    return MAGIC + framed([msgspec.msgpack.encode(header)])


def _is_whole(fd: int, entry: SegmentEntry) -> bool:
    """Whether the entry's bytes in the file have its checksums."""
    if entry.chunk_bytes <= 0:
        return False
    found = bytearray()
    for start in range(0, entry.size_bytes, entry.chunk_bytes):
        end, checksum = min(start + entry.chunk_bytes, entry.size_bytes), 0
        for at in range(start, end, PIECE_BYTES):
            try:
                piece = os.pread(fd, min(PIECE_BYTES, end - at), entry.offset + at)
            except OSError:  # an object that can't be read is a miss as well
                return False
            checksum = crc32c(piece, checksum)
        found += checksum.to_bytes(4, "little")
    return bytes(found) == entry.checksums


def _steps(offset: int, size_bytes: int) -> range:
    return range(offset // STEP_BYTES, (offset + size_bytes - 1) // STEP_BYTES + 1)

# SPDX-License-Identifier: Apache-2.0
"""The log file of an SSD's index: append, recovery after a crash, and compaction.

An append is one ``write``: data that the kernel has accepted survives the end of the process; ``flush`` makes
it survive a loss of power. After a flush that failed it is unknown what of the file is on the disk, and a
later one that succeeds would not change that: none succeeds until a compaction has written the index to a new
file. A record that could not be written whole is truncated, because records behind a torn one would be lost
with it. Where the disk refuses that, too, it is truncated before the next append.

A torn tail left by a crash (``frames.py``) is saved beside the file and truncated. Other damage fails the
start, with the offset, unless repair is enabled: then the file is saved beside it, and a new one is written
from the whole records. The file begins with a header that has a random number (the salt), to which its
records are bound; a file without the header is of an earlier release and is rewritten.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
from collections.abc import Iterable

import msgspec

from mooncake.errors import MooncakeError, StorageError
from mooncake.files import File, LockedDirectory, check_in_place, keep_copy
from mooncake.files.frames import (
    PLAIN,
    UNBEGUN_BYTES,
    BoundFraming,
    Damage,
    Framing,
    describe_damage,
    header_num_bytes,
    header_of,
    headers_in,
    is_unbegun,
)
from mooncake.log import get_logger
from mooncake.store.messages import SegmentEntry
from mooncake.store.node.ssd_index import SsdIndex, compacted

log = get_logger(__name__)

NAME = "mooncake.index"
MAGIC = b"mooncake-index-2 "
_HEADER_BYTES = header_num_bytes(MAGIC)
_PLAIN_BEGINS = (b"\x92\xa4held", b"\x92\xa4gone")
"""Beginnings of record bodies in an index of an earlier release."""


class SsdIndexLog:
    """An open log, with its index.

    Raises:
        OSError: it can't be opened.
        InvalidArgument: it is of another version, or it is damaged and ``repairs`` is not set.
    """

    def __init__(self, folder: LockedDirectory, repairs: bool = False) -> None:
        self._folder = folder
        self._since: list[bytes] | None = None
        """Records appended since a compaction began; None: no compaction is in progress."""
        self._framing: Framing = PLAIN
        self._fresh: Framing = PLAIN
        """Framing of the log that a compaction writes."""
        self._unflushed: dict[int, None] = {}
        """Ids of entries that were unflushed when a compaction began."""
        self._num_renames = self._num_kept_renames = 0
        self._file = folder.directory.open(NAME)
        self._doubtful: File | None = None
        """The file of which it is unknown what is on the disk, because a sync failed."""
        self._is_torn = False
        """Part of a record may be behind the last whole one, and must be truncated before the next append."""
        try:
            self._read(repairs)
        except (OSError, MooncakeError):
            self._file.close()
            raise

    def _read(self, repairs: bool) -> None:
        content = self._file.read()
        path = str(self._folder.path / NAME)
        self.index, self._framing = parsed(self._folder, content)
        found = self.index.found
        if found.damages and not repairs:
            how = f"`mooncake store repair {self._folder.path}` shows what can be saved"
            raise self._folder.wrong(
                f"a directory whose {NAME} is whole, but there is {describe_damage(found)}; {how}"
            )
        if found.damages:
            copy = keep_copy(self._folder.directory, NAME, content, "damaged")
            for one in found.damages:
                at = {"offset": one.offset, "num_bytes": one.num_bytes}
                log.error("index_damaged", path=path, copy=copy, **at)
        elif found.torn is not None:
            torn = content[found.torn.offset :]
            copy = keep_copy(self._folder.directory, NAME, torn, "torn")
            log.warning("index_tail_dropped", path=path, num_bytes=len(torn), copy=copy)
            self._file.truncate(self.index.num_bytes)
        if found.damages or self._framing is PLAIN:
            fresh = self._folder.fresh(NAME, self._compacted(self.begin_compaction()))
            self.end_compaction(fresh)
            if found.damages and self._file is not fresh:
                raise OSError(errno.EIO, "the repaired index could not take its place")

    def hold(self, entry: SegmentEntry, *, is_flushed: bool = True) -> None:
        """Add an entry whose bytes are in place; ``is_flushed``: and durable, or they need not be.

        Raises:
            OutOfSpace, StorageError: the entry can't be written.
        """
        before = self.index.num_bytes
        try:
            self._append(self.index.hold(entry, is_flushed=is_flushed), before)
        except MooncakeError:
            self.index.drop([entry.object_id])
            self.index.num_bytes = before
            raise

    def drop(self, object_ids: Iterable[int]) -> None:
        """Drop objects.

        Raises:
            OutOfSpace, StorageError: the tombstones can't be written, so the objects stay.
        """
        before = self.index.num_bytes
        known = [entry for one in object_ids if (entry := self.index.entries.get(one)) is not None]
        unflushed = dict(self.index.unflushed)
        try:
            self._append(self.index.drop(entry.object_id for entry in known), before)
        except MooncakeError:
            for entry in known:
                self.index.hold(entry, is_flushed=entry.object_id not in unflushed)
            self.index.num_bytes = before
            raise

    def mark_flushed(self, object_ids: Iterable[int]) -> None:
        """Note that the bytes of these objects are durable. If the disk refuses the record, they are verified
        when the directory is opened again, which does no harm."""
        before = self.index.num_bytes
        try:
            self._append(self.index.mark_flushed(object_ids), before)
        except MooncakeError as error:
            log.warning("index_mark_not_written", path=str(self._folder.path), reason=str(error))

    def flush(self) -> None:
        """Make the log survive a loss of power. Blocks, and may run concurrently with everything else.

        Raises:
            StorageError: the disk refuses, or has refused and the log is not yet written anew.
        """
        while True:
            file, num_renames = self._file, self._num_renames
            if file is self._doubtful:
                raise StorageError(
                    f"{self._folder.path / NAME}: a sync failed, and the index has not been written to a new "
                    "file since; check the disk and make room on it"
                )
            try:
                file.sync()
            except OSError as error:
                if file is self._file:
                    self._doubtful = file
                    raise self._folder.trouble(error) from error
                continue  # a compacted log has replaced the file
            try:
                if num_renames != self._num_kept_renames:
                    self._folder.directory.sync()
                    self._num_kept_renames = num_renames
                return
            except OSError as error:
                raise self._folder.trouble(error) from error

    # Compaction, in three steps, because the long one must not block the event loop

    @property
    def wants_compaction(self) -> bool:
        return self._since is None and (self.index.wants_compaction or self._doubtful is self._file)

    def begin_compaction(self) -> list[SegmentEntry]:
        self._since = []
        self._unflushed = dict(self.index.unflushed)
        self._fresh = BoundFraming(secrets.randbits(32))
        return self.index.in_order()

    def write_compacted(self, entries: list[SegmentEntry]) -> File | None:
        """Write a new log of ``entries``. Blocks, and may run concurrently with everything else.

        None: the disk refuses, and the old log stays.
        """
        try:
            return self._folder.fresh(NAME, self._compacted(entries))
        except OSError as error:
            log.warning("index_not_compacted", path=str(self._folder.path), reason=str(error))
            return None

    def end_compaction(self, fresh: File | None) -> None:
        """Append what was added meanwhile to the new log, and replace the old log by it."""
        since, self._since = self._since or [], None
        was_bytes = self.index.num_bytes
        self.index.compacted_to(was_bytes)  # if this fails, don't retry at once
        if fresh is None:
            return
        try:
            if since:
                fresh.append(self._fresh.frame(since, fresh.size_bytes))
                fresh.sync()
            self._folder.rename(NAME)
        except OSError as error:
            fresh.close()
            log.warning("index_not_compacted", path=str(self._folder.path), reason=str(error))
            return
        self._num_renames += 1  # first: a flush of the new file must also sync the directory
        old, self._file, self._is_torn = self._file, fresh, False
        old.close()
        self._framing = self._fresh
        self.index.compacted_to(fresh.size_bytes, self._framing)
        fields = {"was_bytes": was_bytes, "num_bytes": self.index.num_bytes}
        log.info("index_compacted", path=str(self._folder.path), **fields)
        try:
            self._folder.directory.sync()
            self._num_kept_renames = self._num_renames
        except OSError as error:  # the file is renamed nevertheless, and ``flush`` syncs again
            log.warning("index_directory_not_synced", path=str(self._folder.path), reason=str(error))

    def close(self) -> None:
        self._file.close()

    def _compacted(self, entries: list[SegmentEntry]) -> bytes:
        assert isinstance(self._fresh, BoundFraming)
        header = header_of(MAGIC, secrets.token_hex(8), self._fresh.salt)
        return header + compacted(entries, self._fresh, len(header), self._unflushed)

    def _append(self, content: bytes, before: int) -> None:
        if not content:
            return
        try:
            if self._is_torn:
                self._file.truncate(before)
            self._is_torn = True
            self._file.append(content)
            check_in_place(self._file, self._folder.path / NAME)
        except OSError as error:
            with contextlib.suppress(OSError):  # a file system that became read-only refuses this, too
                self._file.truncate(before)
                self._is_torn = False
            self.index.num_bytes = before
            raise self._folder.trouble(error) from error
        self._is_torn = False
        if self._since is not None:
            self._since += self._framing.bodies(content)


def parsed(folder: LockedDirectory, content: bytes) -> tuple[SsdIndex, Framing]:
    """Index from the content of its file, and its framing; damage of the header is in ``SsdIndex.found``.

    Raises:
        InvalidArgument: the file is of another version, or not an index.
    """
    headers = headers_in(MAGIC, content)
    framing: Framing = PLAIN
    begin = 0
    if is_unbegun(MAGIC, content):
        content = b""
    elif headers:
        begin = _HEADER_BYTES
        # If neither header line is whole, the salt with which records are found is the right one.
        framings = [BoundFraming(one.salt) for one in headers]
        if headers[0].is_whole:
            framing = framings[0]
        else:
            framing = max(framings, key=lambda one: len(one.scan(content, begin).bodies))
    elif (
        len(content) > UNBEGUN_BYTES
        and not PLAIN.scan(content).bodies
        and not content[PLAIN.header_bytes :].startswith(_PLAIN_BEGINS)
    ):
        raise folder.wrong(f"a directory whose {NAME} is an index; it is something else")
    try:
        index = SsdIndex(content, framing, begin)
    except msgspec.MsgspecError as error:
        raise folder.wrong(f"a directory of this release ({error})") from error
    if headers and content and not (len(headers) == 2 and headers[0] == headers[1] and headers[1].is_whole):
        index.found.damages.insert(0, Damage(0, _HEADER_BYTES))
    return index, framing

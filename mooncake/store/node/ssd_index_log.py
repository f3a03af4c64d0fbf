"""The file of an SSD's index: what ``ssd_index.py`` says goes here, and comes back after a restart.

An append is one ``write``: what the kernel has taken survives the death of the process; ``flush`` makes it
survive a loss of power. A record that could not be written whole is cut off again, because what follows a
torn record would be lost with it.

What a crash leaves at the end (``frames.py``: a torn tail) is kept beside the file and cut off. Other damage
ends the start, with the offset, unless a repair was asked for: then the file is kept beside it, and a new
one holds what the whole records say. The file begins with a line that has a number of its own, to which its
records are bound; one without that line is of an earlier release, and is written anew.
"""

from __future__ import annotations

import errno
import secrets
from collections.abc import Iterable

import msgspec

from mooncake.errors import MooncakeError
from mooncake.files import File, keep_copy
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
from mooncake.files.locked_directory import LockedDirectory
from mooncake.log import get_logger
from mooncake.store.messages import SegmentEntry
from mooncake.store.node.ssd_index import SsdIndex, compacted

log = get_logger(__name__)

NAME = "mooncake.index"
MAGIC = b"mooncake-index-2 "
_HEADER_BYTES = header_num_bytes(MAGIC)
_PLAIN_BEGINS = (b"\x92\xa4held", b"\x92\xa4gone")
"""What follows the frame's header in an index of an earlier release."""


class SsdIndexLog:
    """An open log, with its index.

    Raises:
        OSError: it can't be opened.
        InvalidArgument: it is of another version, or damaged; not where ``repairs`` is set.
    """

    def __init__(self, folder: LockedDirectory, repairs: bool = False) -> None:
        self._folder = folder
        self._since: list[bytes] | None = None
        """Records that were appended since a compaction began; None: none is under way."""
        self._framing: Framing = PLAIN
        self._fresh: Framing = PLAIN
        """Of the log that a compaction writes."""
        self._num_renames = self._num_kept_renames = 0
        self._file = folder.directory.open(NAME)
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

    def hold(self, entry: SegmentEntry) -> None:
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
            OutOfSpace, StorageError: that can't be written down, so they still are.
        """
        before = self.index.num_bytes
        known = [entry for one in object_ids if (entry := self.index.entries.get(one)) is not None]
        try:
            self._append(self.index.drop(entry.object_id for entry in known), before)
        except MooncakeError:
            for entry in known:
                self.index.hold(entry)
            self.index.num_bytes = before
            raise

    def flush(self) -> None:
        """It blocks, and may run beside everything else.

        Raises:
            StorageError: the disk refuses.
        """
        while True:
            file, num_renames = self._file, self._num_renames
            try:
                file.sync()
            except OSError as error:
                if file is self._file:
                    raise self._folder.trouble(error) from error
                continue  # another has taken its place
            try:
                if num_renames != self._num_kept_renames:
                    self._folder.directory.sync()
                    self._num_kept_renames = num_renames
                return
            except OSError as error:
                raise self._folder.trouble(error) from error

    # Compaction, in three steps, because the long one must not keep anybody waiting

    @property
    def wants_compaction(self) -> bool:
        return self._since is None and self.index.wants_compaction

    def begin_compaction(self) -> list[SegmentEntry]:
        self._since = []
        self._fresh = BoundFraming(secrets.randbits(32))
        return self.index.in_order()

    def write_compacted(self, entries: list[SegmentEntry]) -> File | None:
        """A new log, to be brought up to date; it blocks, and may run beside everything else.

        None: the disk refuses, and the old one stays.
        """
        try:
            return self._folder.fresh(NAME, self._compacted(entries))
        except OSError as error:
            log.warning("index_not_compacted", path=str(self._folder.path), reason=str(error))
            return None

    def end_compaction(self, fresh: File | None) -> None:
        """The new log takes the place of the old one."""
        since, self._since = self._since or [], None
        was_bytes = self.index.num_bytes
        self.index.compacted_to(was_bytes)  # if it can't be: not again at once
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
        old, self._file = self._file, fresh
        old.close()
        self._num_renames += 1
        self._framing = self._fresh
        self.index.compacted_to(fresh.size_bytes, self._framing)
        fields = {"was_bytes": was_bytes, "num_bytes": self.index.num_bytes}
        log.info("index_compacted", path=str(self._folder.path), **fields)
        try:
            self._folder.directory.sync()
            self._num_kept_renames = self._num_renames
        except OSError as error:  # the file has its name all the same, and ``flush`` tries again
            log.warning("index_directory_not_synced", path=str(self._folder.path), reason=str(error))

    def close(self) -> None:
        self._file.close()

    def _compacted(self, entries: list[SegmentEntry]) -> bytes:
        assert isinstance(self._fresh, BoundFraming)
        header = header_of(MAGIC, secrets.token_hex(8), self._fresh.salt)
        return header + compacted(entries, self._fresh, len(header))

    def _append(self, content: bytes, before: int) -> None:
        if not content:
            return
        try:
            self._file.append(content)
        except OSError as error:
            self._file.truncate(before)
            self.index.num_bytes = before
            raise self._folder.trouble(error) from error
        if self._since is not None:
            self._since += self._framing.bodies(content)


def parsed(folder: LockedDirectory, content: bytes) -> tuple[SsdIndex, Framing]:
    """An index from its file, and how that is framed; damage of its header is among ``SsdIndex.found``.

    Raises:
        InvalidArgument: it is of another version, or something else.
    """
    headers = headers_in(MAGIC, content)
    framing: Framing = PLAIN
    begin = 0
    if is_unbegun(MAGIC, content):
        content = b""
    elif headers:
        begin = _HEADER_BYTES
        # With neither line whole, a number under which there are records is the right one.
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

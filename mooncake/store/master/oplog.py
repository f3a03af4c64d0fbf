# SPDX-License-Identifier: Apache-2.0
"""The master's operation log: appended to before anything is acknowledged, compacted when it has grown.

Appended records survive the death of the process. They survive a loss of power once they were flushed, which
``oplog_writer.py`` ensures before an object is reported as durable. The file begins with an id that
compaction preserves: a master that starts with the log of a leader is that leader (``election.py``).

What a crash leaves at the end (``frames.py``: a torn tail) is saved beside the file and cut off. Other damage
makes the start fail, with the offset, unless a repair was requested: then a copy of the whole file is saved,
every intact record is written to a new one, and a mark there makes the master trust the nodes' reports until
all have reported. ``doubt`` says how complete the records are::

    header, twice:  "mooncake-oplog-3 <id> <salt> <check>\\n"
    records         in frames that are bound to the file and the place in it

Files of version 2 are read, and rewritten.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
from collections.abc import Iterable
from pathlib import Path

import msgspec

from mooncake.errors import InvalidArgument
from mooncake.files import Directory, File, OsDirectory, UntrustedFile, boot_id, check_in_place, keep_copy
from mooncake.files.frames import (
    PLAIN,
    BoundFraming,
    Damage,
    Framing,
    Scan,
    describe_damage,
    header_num_bytes,
    header_of,
    headers_in,
    is_unbegun,
)
from mooncake.log import get_logger
from mooncake.store.master.log_records import (
    Doubt,
    IdsGiven,
    LineBegan,
    LogClosed,
    LogComplete,
    LogOpened,
    LogRepaired,
    Mark,
    Record,
    bodies_of,
    records_of,
)

log = get_logger(__name__)

MIN_COMPACTION_BYTES = 16 << 20
MAGIC = b"mooncake-oplog-3 "
_KIND = MAGIC[:-2]
_OLD = _KIND + b"2 "
_OLD_HEADER_BYTES = len(_OLD) + 17
_HEADER_BYTES = header_num_bytes(MAGIC)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of a disk that may accept the write later."""


class Oplog:
    """One file, locked by the one master that writes it.

    Args:
        path: path of the file.
        repairs: read the intact records of a damaged file.
        directory: the directory of ``path``, if it is not the operating system's.
        boot: identifies this boot of the machine.
    """

    def __init__(
        self,
        path: Path,
        repairs: bool = False,
        directory: Directory | None = None,
        boot: str | None = None,
    ) -> None:
        self.path = path
        self.id = ""
        """The log's id; "" before it has been read."""
        self.doubt = Doubt.NONE
        """How complete the records that were read are."""
        self._repairs = repairs
        self._directory = directory
        self._boot = boot_id() if boot is None else boot
        self._file: File | None = None
        self._framing: Framing = PLAIN
        self._size_bytes = 0
        """Size of the intact part; the rest is to be cut off."""
        self._compacted_bytes = 0
        """Size of the snapshot at its start, which the last compaction has left."""
        self._torn: bytes | None = None
        self._is_open = False
        """All that must be done before the first record is appended is done."""
        self._anew: list[Record] | None = None
        """Records with which the file must be rewritten before anything is appended."""
        self._num_renames = self._num_kept_renames = 0

    def read(self) -> list[Record]:
        """An earlier master's records; none without a file. Locks the file; later records are appended to it.

        Raises:
            InvalidArgument: the file can't be read or written, is damaged or locked, or is no such log.
        """
        try:
            return self._read()
        except BlockingIOError as error:
            raise self._wrong("a file that no other master uses") from error
        except UntrustedFile as error:
            raise self._wrong(error.requirement) from error
        except OSError as error:
            raise self._wrong(f"a file that can be read and written ({error})") from error
        except msgspec.MsgspecError as error:
            raise self._wrong(f"a file of this version ({error})") from error

    def _read(self) -> list[Record]:
        if self._directory is None:
            self._directory = OsDirectory(self.path.parent)
        self._file = self._directory.open(self.path.name, is_locked=True)
        content = self._file.read()
        is_new = is_unbegun(MAGIC, content) or (
            len(content) < _OLD_HEADER_BYTES and _OLD.startswith(content[: len(_OLD)])
        )
        if is_new:
            self._torn = content or None
            self.id, self._framing = secrets.token_hex(8), BoundFraming(secrets.randbits(32))
            self._size_bytes, found = 0, Scan([], 0, 0, [])
        else:
            found = self._scan(content)
        records: list[Record] = []
        marks: list[Mark] = []
        is_closed = is_new
        decoded = records_of(found.bodies)
        for record in decoded:
            is_closed = isinstance(record, LogClosed)
            (marks if isinstance(record, Mark) else records).append(record)  # type: ignore[arg-type]
        if found.damages:
            self._repair(content, found)
        elif found.torn is not None:
            self._torn = content[found.torn.offset :]
        is_plain = self._framing is PLAIN
        has_lost = bool(found.damages) or not (is_plain or _has_all_of_copy(records))
        self.doubt = self._doubt(marks, is_closed, bool(found.torn), has_lost)
        if found.damages:
            self._anew = records
        elif is_plain:
            ids = (getattr(record, "object_id", 0) for record in records)
            self._anew = [*records, IdsGiven(max(ids, default=0))]
        # Not the present size: a log whose master is restarted often enough would never be compacted.
        num_copied = next((n for n, record in enumerate(decoded, 1) if isinstance(record, IdsGiven)), 0)
        self._compacted_bytes = sum(self._framing.header_bytes + len(b) for b in found.bodies[:num_copied])
        try:
            self._open()
        except OSError as error:
            if error.errno not in _FULL:
                raise
            log.warning("oplog_not_written", path=str(self.path), reason=str(error))
        return records

    def look(self, content: bytes) -> Scan:
        """Scan the content of such a file, without changes. Raises InvalidArgument when it is something
        else."""
        self._repairs = True
        try:
            if is_unbegun(MAGIC, content):
                return Scan([], 0, 0, [])
            found = self._scan(content)
            records_of(found.bodies)
        except msgspec.MsgspecError as error:
            raise self._wrong(f"a file of this version ({error})") from error
        return found

    def append(self, records: Iterable[Record | Mark]) -> None:
        """Append records. Raises OSError when the disk does not take them; then nothing may be acknowledged,
        and these must be appended again."""
        self._open()
        self._append(records)

    def flush(self) -> None:
        """Make all that was appended survive a loss of power. Blocks; safe beside all other calls.

        Raises OSError: then it is unknown what survives, and the log has to be rewritten.
        """
        while True:
            file, num_renames, directory = self._file, self._num_renames, self._directory
            assert file is not None and directory is not None
            try:
                file.sync()
            except OSError:
                if file is self._file:
                    raise
                continue  # another file has replaced it
            if num_renames != self._num_kept_renames:
                directory.sync()
                self._num_kept_renames = num_renames
            return

    @property
    def wants_compaction(self) -> bool:
        """Most records are about removed objects."""
        return self._size_bytes > max(MIN_COMPACTION_BYTES, 4 * self._compacted_bytes)

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    def put_off_compaction(self) -> None:
        """Postpone compaction: there is no room for it now."""
        self._compacted_bytes = self._size_bytes

    def begin_anew(self, has_all: bool = False) -> OplogRewrite:
        """Begin a file that will replace this one; raises OSError.

        Args:
            has_all: it will hold a leader's complete state, so that the gaps of this one do not matter.
        """
        assert self._directory is not None
        return OplogRewrite(self, self._directory, Doubt.NONE if has_all else self.doubt)

    def replaced(self, file: File, framing: Framing, size_bytes: int, doubt: Doubt) -> None:
        """The OplogRewrite is complete, and has its name; ``doubt`` is what the new file lacks."""
        self._num_renames += 1  # first: a flush of the new file must also sync the directory
        old, self._file = self._file, file
        if old is not None:
            old.close()
        self._framing = framing
        self._size_bytes = self._compacted_bytes = size_bytes
        self._torn = self._anew = None
        self.doubt = doubt
        self._is_open = True

    def is_whole(self, last_id: int) -> None:
        """All nodes have reported: nothing is in doubt, and objects up to that id that are not in the log are
        removed. Raises OSError."""
        if self.doubt:
            self.append([IdsGiven(last_id), LogComplete()])
            self.doubt = Doubt.NONE

    def close(self) -> None:
        """Close the log with a mark that nothing is missing, if that is so and the disk takes it."""
        if self._file is not None and self._is_open and not self.doubt:
            with contextlib.suppress(OSError):
                self._file.append(self._framing.frame(bodies_of([LogClosed()]), self._size_bytes))
                self._file.sync()
        self.abandon()

    def abandon(self) -> None:
        """Close the log without such a mark."""
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._directory is not None:
            self._directory.close()

    # Reading

    def _scan(self, content: bytes) -> Scan:
        """Scan the records of the file; raises InvalidArgument for another kind of file and for damage."""
        headers = headers_in(MAGIC, content)
        good = [one for one in headers if one.is_whole]
        if content.startswith(_OLD) and not good:
            self.id = content[len(_OLD) : _OLD_HEADER_BYTES - 1].decode("ascii", "replace")
            self._framing, begin = PLAIN, _OLD_HEADER_BYTES
        else:
            if not good:
                self._check_magic(content)
            # With neither line intact, the number under which there are records is the right one.
            scans = {one: BoundFraming(one.salt).scan(content, _HEADER_BYTES) for one in good[:1] or headers}
            header = max(scans, key=lambda one: len(scans[one].bodies))
            self.id, self._framing, begin = header.id, BoundFraming(header.salt), _HEADER_BYTES
            if len(good) < 2 or good[0] != good[1]:
                found = scans[header]
                wrong = [Damage(0, _HEADER_BYTES), *found.damages]
                self._size_bytes = _HEADER_BYTES
                return self._checked(Scan(found.bodies, 0, _HEADER_BYTES, wrong, found.torn))
        found = self._framing.scan(content, begin)
        self._size_bytes = found.num_bytes
        return self._checked(found)

    def _checked(self, found: Scan) -> Scan:
        if found.damages and not self._repairs:
            how = f"`mooncake store repair {self.path}` shows what can be saved"
            raise self._wrong(f"a file without damage, but there is {describe_damage(found)}; {how}")
        return found

    def _check_magic(self, content: bytes) -> None:
        version = content[len(_KIND) : len(MAGIC)].strip()
        if content.startswith(_KIND) and version.isdigit() and version > MAGIC[len(_KIND) :].strip():
            raise self._wrong(f"a file of this version, not of version {version.decode()}; use that release")
        if not headers_in(MAGIC, content):
            raise self._wrong("a file that this version of a master wrote")

    def _repair(self, content: bytes, found: Scan) -> None:
        assert self._directory is not None
        copy = keep_copy(self._directory, self.path.name, content, "damaged")
        for one in found.damages:
            at = {"offset": one.offset, "num_bytes": one.num_bytes}
            log.error("oplog_damaged", path=str(self.path), copy=copy, **at)
        fields = {"num_records": len(found.bodies), "num_before": found.num_before}
        log.warning("oplog_repaired", path=str(self.path), copy=copy, **fields)

    def _doubt(self, marks: list[Mark], is_closed: bool, is_torn: bool, is_damaged: bool) -> Doubt:
        repairs = [mark for mark in marks if isinstance(mark, LogRepaired | LogComplete)]
        if is_damaged or (repairs and isinstance(repairs[-1], LogRepaired)):
            return Doubt.ANY
        if is_closed:
            return Doubt.NONE
        boots: list[str] = []
        """Boots in which it was opened since nothing was in doubt: a log that was opened again before it was
        complete still lacks what it lacked then."""
        for mark in marks:
            if isinstance(mark, LogOpened):
                boots.append(mark.boot)
            else:
                boots = [] if isinstance(mark, LogClosed) else boots[-1:]
        is_same = self._framing is PLAIN or (boots and set(boots) == {self._boot} and self._boot != "")
        return Doubt.END if is_same and not is_torn else Doubt.PROMISES

    def _wrong(self, allowed: str) -> InvalidArgument:
        self.abandon()
        return InvalidArgument("oplog", str(self.path), allowed)

    # Writing

    def _open(self) -> None:
        """Do what must be done before a record is appended; failed steps are tried again."""
        if self._is_open:
            return
        directory, file = self._directory, self._file
        assert directory is not None and file is not None
        if self._torn is not None:
            copy = keep_copy(directory, self.path.name, self._torn, "torn")
            fields = {"offset": self._size_bytes, "num_bytes": len(self._torn), "copy": copy}
            log.warning("oplog_tail_cut", path=str(self.path), **fields)
            self._torn = None
        if self._anew is not None:
            anew = self.begin_anew()
            try:
                anew.append(self._anew)
                anew.commit()
            except OSError:
                anew.abandon()
                raise
            directory.sync()
            return
        file.truncate(self._size_bytes)
        if not self._size_bytes:
            assert isinstance(self._framing, BoundFraming)
            header = header_of(MAGIC, self.id, self._framing.salt)
            file.append(header)
            self._size_bytes = len(header)
        self._append(self.marks(self.doubt))
        file.sync()
        directory.sync()
        self._is_open = True

    def marks(self, doubt: Doubt) -> list[Mark]:
        """Marks with which a file of this doubt begins, or continues."""
        if doubt is Doubt.PROMISES:  # it was opened in an earlier boot
            return [LogOpened(""), LogOpened(self._boot)]
        return [LogOpened(self._boot), LogRepaired()] if doubt is Doubt.ANY else [LogOpened(self._boot)]

    def _append(self, records: Iterable[Record | Mark]) -> None:
        assert self._file is not None
        content = self._framing.frame(bodies_of(records), self._size_bytes)
        try:
            self._file.append(content)
            check_in_place(self._file, self.path)
        except OSError:
            # Records behind half a record would be lost with it. While the log is being opened, what is left
            # to be done for that, such as to make its name durable, must still be done.
            was_open, self._is_open = self._is_open, False
            self._file.truncate(self._size_bytes)
            self._is_open = was_open
            raise
        self._size_bytes += len(content)


class OplogRewrite:
    """The log's next content; the log itself is unchanged before ``commit``. All methods raise OSError."""

    def __init__(self, log: Oplog, directory: Directory, doubt: Doubt) -> None:
        self._log = log
        self._directory = directory
        self._doubt = doubt
        self._name = log.path.name + ".new"
        self._framing = BoundFraming(secrets.randbits(32))
        self._size_bytes = self._synced_bytes = 0
        self._file: File | None = directory.open(self._name, is_locked=True)
        try:
            self._file.truncate(0)
            header = header_of(MAGIC, log.id, self._framing.salt)
            self._file.append(header)
            self._size_bytes = len(header)
            self.append(log.marks(doubt))
        except OSError:
            self.abandon()  # or its lock would keep every later one from the file
            raise

    def append(self, records: Iterable[Record | Mark]) -> None:
        assert self._file is not None
        content = self._framing.frame(bodies_of(records), self._size_bytes)
        self._file.append(content)
        self._size_bytes += len(content)

    def sync(self) -> None:
        """Put what was appended before on the disk. May take long; thread-safe."""
        file, size_bytes = self._file, self._size_bytes
        if file is None:
            raise OSError(errno.EBADF, "the file was discarded meanwhile")
        file.sync()
        self._synced_bytes = size_bytes

    def commit(self) -> None:
        """Replace the log. The content is synced first, because a rename may survive a loss of power without
        its content; ``Oplog.flush`` syncs the directory before any later record is reported as durable."""
        assert self._file is not None
        if self._doubt and not self._log.doubt:  # all nodes have reported meanwhile
            self.append([LogComplete()])
            self._doubt = Doubt.NONE
        if self._synced_bytes < self._size_bytes:
            self.sync()
        check_in_place(self._file, self._log.path.with_name(self._name))
        self._directory.rename(self._name, self._log.path.name)
        self._log.replaced(self._file, self._framing, self._size_bytes, self._doubt)
        self._file = None

    def abandon(self) -> None:
        """Discard the file. No effect after ``commit``."""
        if self._file is not None:
            self._file.close()
            self._file = None
            with contextlib.suppress(OSError):
                self._directory.remove(self._name)


def _has_all_of_copy(records: list[Record]) -> bool:
    """Whether the snapshot at the log's start (``snapshot.py``) is complete; without its last record it was
    cut off."""
    is_copy = bool(records) and type(records[0]) is LineBegan
    return not is_copy or any(type(record) is IdsGiven for record in records)

"""The file of the master's records: appended before anything is acknowledged, written anew when it grew.

An append is one ``write`` without ``fsync``: what the kernel has taken survives the death of the
process, which is what happens; the loss of the whole machine takes the nodes' promises with it, and
costs the cache's index as it would without a log. The file begins with an id that stays its own when it
is written anew: a master that comes with the log of a leader is that leader (``election.py``).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterable
from pathlib import Path

import msgspec

from mooncake.errors import InvalidArgument
from mooncake.store.records import Record, decode, encode

MIN_COMPACTION_BYTES = 16 << 20
MAGIC = b"mooncake-oplog-2 "
_HEADER_BYTES = len(MAGIC) + 17


class Oplog:
    """One file, locked by the one master that writes it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.id = ""
        """Of the log; known once it has been read."""
        self._file = -1
        self._size_bytes = 0
        self._compacted_bytes = 0

    def read(self) -> list[Record]:
        """What an earlier master wrote; nothing when there was none. Locks the file; append from there.

        A tail that was never acknowledged is cut off.

        Raises:
            InvalidArgument: the file can't be read or written, is another's, or something else.
        """
        try:
            self._file = _open_locked(self.path)
            content = self.path.read_bytes()
            if MAGIC.startswith(content[: len(MAGIC)]) and len(content) < _HEADER_BYTES:
                content = _header(secrets.token_hex(8))
                os.ftruncate(self._file, 0)
                _write(self._file, content)
            if not content.startswith(MAGIC):
                self.close()
                raise InvalidArgument("oplog", str(self.path), "a file that this version of a master wrote")
            self.id = content[len(MAGIC) : _HEADER_BYTES - 1].decode("ascii", "replace")
            records, size_bytes = decode(content[_HEADER_BYTES:])
            self._size_bytes = self._compacted_bytes = _HEADER_BYTES + size_bytes
            os.ftruncate(self._file, self._size_bytes)
        except BlockingIOError as error:
            raise InvalidArgument("oplog", str(self.path), "a file that no other master uses") from error
        except OSError as error:
            raise InvalidArgument(
                "oplog", str(self.path), f"a file that can be read and written ({error})"
            ) from error
        except msgspec.MsgspecError as error:
            raise InvalidArgument("oplog", str(self.path), f"a file of this version ({error})") from error
        return records

    def append(self, records: Iterable[Record]) -> None:
        """Raises OSError when the disk does not take it; then nothing may be acknowledged any more."""
        content = encode(records)
        _write(self._file, content)
        self._size_bytes += len(content)

    @property
    def wants_compaction(self) -> bool:
        """Most of it is about objects that are gone."""
        return self._size_bytes > max(MIN_COMPACTION_BYTES, 4 * self._compacted_bytes)

    def put_off_compaction(self) -> None:
        """There is no room for it now."""
        self._compacted_bytes = self._size_bytes

    def begin_anew(self) -> Rewriting:
        """A file that will take this one's place; raises OSError."""
        return Rewriting(self)

    def replaced(self, file: int, size_bytes: int) -> None:
        """The Rewriting is complete, and has its name."""
        self.close()
        self._file = file
        self._size_bytes = self._compacted_bytes = size_bytes

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class Rewriting:
    """The log's next content; the log itself is not touched before ``commit``. All raise OSError."""

    def __init__(self, log: Oplog) -> None:
        self._log = log
        self._path = log.path.with_name(log.path.name + ".new")
        self._file = _open_locked(self._path)
        os.ftruncate(self._file, 0)
        header = _header(log.id)
        _write(self._file, header)
        self._size_bytes = len(header)

    def append(self, records: Iterable[Record]) -> None:
        content = encode(records)
        _write(self._file, content)
        self._size_bytes += len(content)

    def sync(self) -> None:
        """To disk, so that a rename can't come before the content. May take long; from any thread."""
        os.fsync(self._file)

    def commit(self) -> None:
        os.rename(self._path, self._log.path)
        self._log.replaced(self._file, self._size_bytes)
        self._file = -1

    def abandon(self) -> None:
        """Does nothing after ``commit``."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            with contextlib.suppress(OSError):
                self._path.unlink()


def _header(log_id: str) -> bytes:
    return MAGIC + log_id.encode() + b"\n"


def _open_locked(path: Path) -> int:
    """A descriptor to append with; raises BlockingIOError when another process has the lock."""
    file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_APPEND, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise
    return file


def _write(file: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(file, view) :]

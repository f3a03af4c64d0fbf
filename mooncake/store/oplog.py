"""The file of the master's records: appended before anything is acknowledged, compacted when it grew.

An append is one ``write`` without ``fsync``: what the kernel has taken survives the death of the
process, which is what happens; the loss of the whole machine takes the nodes' promises with it, and
costs the cache's index as it would without a log.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from mooncake.errors import InvalidArgument
from mooncake.store.records import Record, decode, encode

MIN_COMPACTION_BYTES = 16 << 20


class Oplog:
    """One file, locked by the one master that writes it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = -1
        self._size_bytes = 0
        self._compacted_bytes = 0

    def read(self) -> list[Record]:
        """What an earlier master wrote; nothing when there was none. Locks the file.

        Raises:
            InvalidArgument: the file can't be read, is another's, or something else.
        """
        try:
            self._file = _open_locked(self._path)
            return decode(self._path.read_bytes())[0]
        except BlockingIOError as error:
            raise InvalidArgument("oplog", str(self._path), "a file that no other master uses") from error
        except OSError as error:
            raise InvalidArgument("oplog", str(self._path), f"a readable file ({error})") from error
        except msgspec.MsgspecError as error:
            raise InvalidArgument("oplog", str(self._path), f"a file of this version ({error})") from error

    def rewrite(self, records: Iterable[Record]) -> None:
        """Replace the content by ``records``, all or nothing, and append from there.

        Raises:
            InvalidArgument: the file can't be written.
        """
        content = encode(records)
        fresh = self._path.with_name(self._path.name + ".new")
        try:
            file = _open_locked(fresh)
            os.ftruncate(file, 0)
            _write(file, content)
            os.fsync(file)
            os.rename(fresh, self._path)
        except OSError as error:
            raise InvalidArgument("oplog", str(self._path), f"a writable file ({error})") from error
        self.close()
        self._file = file
        self._size_bytes = self._compacted_bytes = len(content)

    def append(self, records: Iterable[Record]) -> None:
        """Raises OSError when the disk does not take it; then nothing may be acknowledged any more."""
        content = encode(records)
        _write(self._file, content)
        self._size_bytes += len(content)

    @property
    def wants_compaction(self) -> bool:
        """Most of it is about objects that are gone."""
        return self._size_bytes > max(MIN_COMPACTION_BYTES, 4 * self._compacted_bytes)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


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

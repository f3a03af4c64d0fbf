"""The file of an SSD's index: what ``index.py`` says goes here, and comes back after a restart.

An append is one ``write``: what the kernel has taken survives the death of the process; ``flush`` makes it
survive a loss of power. A record that could not be written whole is cut off again, because what follows a
torn record would be lost with it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable

import msgspec

from mooncake.errors import MooncakeError
from mooncake.log import get_logger
from mooncake.store.folder import Folder, write_all
from mooncake.store.index import Index, compacted
from mooncake.store.messages import Entry

log = get_logger(__name__)

NAME = "mooncake.index"


class IndexLog:
    """An open log, with its index.

    Raises:
        OSError: it can't be opened.
        InvalidArgument: it is of another version.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._since: list[bytes] | None = None
        """What was appended since a compaction began; None: none is under way."""
        self._swap = threading.Lock()
        """Held while the file is exchanged for another."""
        path = folder.path / NAME
        self._file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_APPEND | os.O_CLOEXEC, 0o600)
        content = path.read_bytes()
        try:
            self.index = Index(content)
        except msgspec.MsgspecError as error:
            raise folder.wrong(f"a directory of this release ({error})") from error
        if self.index.num_bytes < len(content):
            log.warning("index_tail_dropped", path=str(path), num_bytes=len(content) - self.index.num_bytes)
            os.ftruncate(self._file, self.index.num_bytes)

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
        with self._swap:
            file = os.dup(self._file)
        try:
            os.fdatasync(file)
        except OSError as error:
            raise self._folder.trouble(error) from error
        finally:
            os.close(file)

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
            return self._folder.fresh(NAME, compacted(entries))
        except OSError as error:
            log.warning("index_not_compacted", path=str(self._folder.path), reason=str(error))
            return None

    def end_compaction(self, fresh: int | None) -> None:
        """The new log takes the place of the old one."""
        since, self._since = b"".join(self._since or []), None
        was_bytes = self.index.num_bytes
        self.index.compacted_to(was_bytes)  # if it can't be: not again at once
        if fresh is None:
            return
        try:
            write_all(fresh, since)
            os.fsync(fresh)
            self._folder.put(NAME)
        except OSError as error:
            os.close(fresh)
            log.warning("index_not_compacted", path=str(self._folder.path), reason=str(error))
            return
        with self._swap:
            os.close(self._file)
            self._file = fresh
        self.index.compacted_to(os.fstat(fresh).st_size)
        fields = {"was_bytes": was_bytes, "num_bytes": self.index.num_bytes}
        log.info("index_compacted", path=str(self._folder.path), **fields)

    def close(self) -> None:
        with self._swap:
            if self._file >= 0:
                os.close(self._file)
            self._file = -1

    def _append(self, content: bytes, before: int) -> None:
        if not content:
            return
        try:
            write_all(self._file, content)
        except OSError as error:
            os.ftruncate(self._file, before)
            self.index.num_bytes = before
            raise self._folder.trouble(error) from error
        if self._since is not None:
            self._since.append(content)

"""Keeps the master's records on disk, if they are to be kept: the log, and its being written anew.

A log that grew is copied into a new file a piece at a time, between requests; what is written down
meanwhile goes to both. So is a leader's log when this master begins to follow it: the old one stays
whole until the new one is.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from mooncake.errors import Unavailable
from mooncake.log import get_logger
from mooncake.store.catalog import Catalog
from mooncake.store.copying import Copy
from mooncake.store.oplog import Oplog, Rewriting
from mooncake.store.records import Doubt, Record

log = get_logger(__name__)

PAUSE_S = 0.002
"""Between two pieces."""


class Keeping:
    """``path``: empty keeps nothing. Whatever raises Unavailable: the master must not go on."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._log = Oplog(Path(path)) if path else None
        self._anew: Rewriting | None = None
        self._copy: Copy | None = None
        """Of this master's own state, while its log is compacted."""
        self._compacting: asyncio.Task[None] | None = None

    @property
    def id(self) -> str:
        """Of the log, once it has been read; "" when there is none."""
        return self._log.id if self._log is not None else ""

    @property
    def is_whole(self) -> bool:
        """What was read is all that was written: the machine has not gone down with the end of it."""
        return self._log is None or self._log.doubt <= Doubt.END

    def read(self) -> list[Record]:
        """What was kept; raises InvalidArgument as ``Oplog.read``."""
        return [] if self._log is None else self._log.read()

    def keep(self, records: list[Record], catalog: Catalog) -> None:
        """Write down what ``catalog`` wants kept."""
        if self._log is None:
            return
        try:
            self._log.append(records)
        except OSError as error:
            raise self._failure(error) from error
        if self._anew is not None and self._copy is not None:
            try:
                self._anew.append(self._copy.between(records))
            except OSError as error:
                self._give_up(error)
        elif self._log.wants_compaction and self._compacting is None:
            self._compacting = asyncio.get_running_loop().create_task(self._compact(catalog))

    # The log of a leader

    def begin_copy(self) -> None:
        """What follows by ``copied`` will take the place of everything."""
        self.stop_compacting()
        if self._anew is not None:
            self._anew.abandon()
            self._anew = None
        if self._log is not None:
            try:
                self._anew = self._log.begin_anew()
            except OSError as error:
                raise self._failure(error) from error

    def copied(self, records: list[Record], is_complete: bool) -> None:
        if self._anew is None:
            return
        try:
            self._anew.append(records)
            if is_complete:
                self._anew.commit()
                self._anew = None
        except OSError as error:
            raise self._failure(error) from error

    def stop_compacting(self) -> None:
        if self._compacting is not None:
            self._compacting.cancel()
            self._compacting = None
        if self._copy is not None and self._anew is not None:
            self._anew.abandon()
            self._anew = None
        self._copy = None

    def close(self) -> None:
        self.stop_compacting()
        if self._anew is not None:
            self._anew.abandon()
        if self._log is not None:
            self._log.close()

    async def _compact(self, catalog: Catalog) -> None:
        assert self._log is not None
        try:
            anew, copy = self._log.begin_anew(), Copy(catalog)
            self._anew, self._copy = anew, copy
            while self._anew is anew and not copy.is_over:
                anew.append(copy.piece())
                await asyncio.sleep(PAUSE_S)
            if self._anew is anew:
                await asyncio.to_thread(anew.sync)
            if self._anew is anew:
                anew.commit()
                log.info("oplog_compacted", path=self.path)
                self._anew = self._copy = None
        except OSError as error:
            self._give_up(error)
        self._compacting = None

    def _give_up(self, error: OSError) -> None:
        """The log itself is whole; it goes on growing."""
        assert self._log is not None
        log.warning("oplog_not_compacted", path=self.path, reason=str(error))
        if self._anew is not None:
            self._anew.abandon()
        self._anew = self._copy = None
        self._log.put_off_compaction()

    def _failure(self, error: OSError) -> Unavailable:
        return Unavailable(f"the oplog {self.path} can't be written ({error}); free some space")

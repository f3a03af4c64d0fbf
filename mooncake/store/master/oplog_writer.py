# SPDX-License-Identifier: Apache-2.0
"""Writes the master's records to the operation log, if there is one: appends, flushes, compaction.

A log that has grown is compacted by writing a snapshot to a new file, a piece at a time between requests;
records written meanwhile go to both. So does a leader's log when this master begins to follow it: the old
one stays complete until the new one is.

A reply that promises durability waits until the log has been flushed (``flushed``): one flush, in a thread,
for all replies that wait when it begins.

A disk that does not take a record stops nothing: unwritten records wait, in order, and ``trouble`` has the
reason, until the disk takes them. The caller acknowledges nothing meanwhile. After a failed flush the content
of the disk is unknown (``mooncake.files``), so the log is then rewritten as a whole. So is one whose file was
removed or replaced.
"""

from __future__ import annotations

import asyncio
import errno
from collections import deque
from collections.abc import Callable
from pathlib import Path

from prometheus_client import Counter, Gauge, Histogram

from mooncake import clock
from mooncake.errors import Unavailable
from mooncake.files import Directory
from mooncake.log import get_logger
from mooncake.metrics import registry
from mooncake.store.master.catalog import Catalog
from mooncake.store.master.log_records import Doubt, Record
from mooncake.store.master.oplog import Oplog, OplogRewrite
from mooncake.store.master.snapshot import Snapshot

log = get_logger(__name__)

PAUSE_S = 0.002
"""Pause between two pieces."""
RETRY_S = 1.0
"""Pause before a failed write is tried again."""
MAX_UNWRITTEN = 1 << 16
"""Records that wait for the disk; with more, the log is rewritten when the disk takes writes again."""

FLUSH = Histogram(
    "mooncake_store_oplog_flush_seconds",
    "Flushes of the oplog, for replies that promise durability",
    registry=registry,
    buckets=(0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10),
)
UNWRITABLE = Gauge("mooncake_store_oplog_unwritable", "1 while the oplog can't be written", registry=registry)
FAILED = Counter(
    "mooncake_store_oplog_failures", "Writes and flushes of the oplog that failed", registry=registry
)

OnFlushed = Callable[[str], None]
"""Called with "" when the records survive a loss of power, or with the reason why that is unknown."""


class OplogWriter:
    """Methods that raise Unavailable: the master must stop.

    Args:
        path: "" writes nothing.
        flushes: replies may wait for a flush; otherwise they don't, and a loss of power may undo them.
        repairs: as for ``Oplog``.
        directory: as for ``Oplog``.
    """

    def __init__(
        self, path: str, flushes: bool = True, repairs: bool = False, directory: Directory | None = None
    ) -> None:
        self.path = path
        self.trouble = ""
        """Why nothing can be written now; "" if it can."""
        self._log = Oplog(Path(path), repairs, directory) if path else None
        self._flushes = flushes
        self._anew: OplogRewrite | None = None
        self._copy: Snapshot | None = None
        """A snapshot of this master's own state, while its log is compacted."""
        self._compacting: asyncio.Task[None] | None = None
        self._catalog: Catalog | None = None
        """The catalog whose records were written last."""
        self._unwritten: list[Record] = []
        self._must_be_anew = False
        """The content of the log is unknown, or incomplete."""
        self._healing: asyncio.Task[None] | None = None
        self._num_kept = self._num_flushed = 0
        self._waiting: deque[tuple[int, OnFlushed]] = deque()
        self._flushing: asyncio.Task[None] | None = None

    @property
    def id(self) -> str:
        """The log's id, once it has been read; "" when there is none."""
        return self._log.id if self._log is not None else ""

    @property
    def doubt(self) -> Doubt:
        """How complete the records that were read are."""
        return self._log.doubt if self._log is not None else Doubt.NONE

    @property
    def is_whole(self) -> bool:
        """All records that were written were read: the machine has not gone down with the last ones."""
        return self._log is None or self._log.doubt <= Doubt.END

    def read(self) -> list[Record]:
        """Read the log's records; raises InvalidArgument as ``Oplog.read``."""
        return [] if self._log is None else self._log.read()

    def recovery_complete(self, catalog: Catalog) -> None:
        """Write down that all nodes have reported what the records lacked."""
        if self._log is not None and not self.trouble:
            try:
                self._log.is_whole(catalog.objects.last_id)
            except OSError as error:
                log.warning("oplog_not_written", path=self.path, reason=str(error))

    def keep(self, records: list[Record], catalog: Catalog) -> None:
        """Write down records of ``catalog``; the caller checks ``trouble`` afterwards."""
        if self._log is None:
            return
        self._catalog = catalog
        self._num_kept += 1
        if self.trouble:
            self._set_aside(records)
            return
        try:
            self._log.append(records)
        except OSError as error:
            self._set_aside(records)
            self._fail(error)
            return
        if self._anew is not None and self._copy is not None:
            try:
                self._anew.append(self._copy.between(records))
            except OSError as error:
                self._give_up(error)
        elif self._log.wants_compaction and self._compacting is None:
            self._compacting = asyncio.get_running_loop().create_task(self._compact(catalog))

    # Durability

    def flushed(self, then: OnFlushed) -> None:
        """Call ``then`` once all records so far have been flushed: at once, if they are, or if none is
        written."""
        if self._log is None or not self._flushes or self.trouble or self._num_flushed == self._num_kept:
            then(self.trouble)
        else:
            self._waiting.append((self._num_kept, then))
            if self._flushing is None:
                self._flushing = asyncio.get_running_loop().create_task(self._flush(self._log))

    async def _flush(self, oplog: Oplog) -> None:
        try:
            while self._waiting and not self.trouble:
                num_kept, began = self._num_kept, clock.monotonic()
                try:
                    await asyncio.to_thread(oplog.flush)
                except OSError as error:
                    self._must_be_anew = True
                    self._fail(error)
                    break
                FLUSH.observe(clock.monotonic() - began)
                self._num_flushed = num_kept
                while self._waiting and self._waiting[0][0] <= num_kept:
                    self._waiting.popleft()[1]("")
        finally:
            self._flushing = None

    # Disk errors

    def _set_aside(self, records: list[Record]) -> None:
        if len(self._unwritten) + len(records) > MAX_UNWRITTEN:
            self._must_be_anew = True
        self._unwritten = [] if self._must_be_anew else self._unwritten + records

    def _fail(self, error: OSError) -> None:
        assert self._log is not None
        FAILED.inc()
        UNWRITABLE.set(1)
        self._set_trouble(error)
        log.error("oplog_unwritable", path=self.path, reason=str(error))
        self.stop_compacting()
        waiting, self._waiting = self._waiting, deque()
        for _, then in waiting:
            then(self.trouble)
        if self._healing is None:
            self._healing = asyncio.get_running_loop().create_task(self._heal(self._log))

    def _set_trouble(self, error: OSError) -> None:
        advice = "check the disk"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            advice = "free some space"
        elif error.errno in (errno.ESTALE, errno.ENOENT):
            # Its file is gone, and can be rewritten if the directory is there.
            self._must_be_anew = True
            advice = "restore its directory and restart the master"
        self.trouble = f"the oplog {self.path} can't be written ({error.strerror or error}); {advice}"

    async def _heal(self, oplog: Oplog) -> None:
        """Retry until the disk has taken all records."""
        while self.trouble:
            await asyncio.sleep(RETRY_S)
            try:
                if self._must_be_anew:
                    self._write_anew(oplog)
                else:
                    oplog.append(self._unwritten)
                    self._unwritten = []
            except OSError as error:
                self._set_trouble(error)
                log.debug("oplog_still_unwritable", path=self.path, reason=str(error))
                continue
            try:
                await asyncio.to_thread(oplog.flush)
            except OSError as error:
                self._must_be_anew = True  # it is unknown what of it is on the disk
                self._set_trouble(error)
                log.debug("oplog_still_unwritable", path=self.path, reason=str(error))
                continue
            if not self._unwritten and not self._must_be_anew:
                self._is_well()
        self._healing = None

    def _is_well(self) -> None:
        if self.trouble:
            log.info("oplog_writable", path=self.path)
        self.trouble = ""
        UNWRITABLE.set(0)

    def _write_anew(self, oplog: Oplog) -> None:
        """Rewrite the log in one step: no record may come meanwhile, and nothing is acknowledged anyway."""
        assert self._catalog is not None
        anew = oplog.begin_anew()
        try:
            copy = Snapshot(self._catalog)
            while not copy.is_over:
                anew.append(copy.piece())
            anew.commit()
        except OSError:
            anew.abandon()
            raise
        self._unwritten, self._must_be_anew = [], False

    # Log of a leader

    def begin_copy(self) -> None:
        """Begin a snapshot: what follows by ``copied`` will replace the whole log."""
        self.stop_compacting()
        if self._anew is not None:
            self._anew.abandon()
            self._anew = None
        if self._log is not None:
            try:
                self._anew = self._log.begin_anew(has_all=True)
            except OSError as error:
                raise self._failure(error) from error

    def copied(self, records: list[Record], is_complete: bool) -> None:
        if self._anew is None or self._log is None:
            return
        try:
            self._anew.append(records)
            if is_complete:
                self._anew.commit()
                self._anew = None
                self._log.flush()
                self._unwritten, self._must_be_anew = [], False
                self._is_well()
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
        for task in (self._healing, self._flushing):
            if task is not None:
                task.cancel()
        if self._anew is not None:
            self._anew.abandon()
        if self._log is not None:
            if self.trouble:
                self._log.abandon()
            else:
                self._log.close()

    async def _compact(self, catalog: Catalog) -> None:
        assert self._log is not None
        try:
            anew, copy = self._log.begin_anew(), Snapshot(catalog)
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
        """Abandon compaction. The log itself is intact and continues to grow."""
        assert self._log is not None
        log.warning("oplog_not_compacted", path=self.path, reason=str(error))
        if self._anew is not None:
            self._anew.abandon()
        self._anew = self._copy = None
        self._log.put_off_compaction()

    def _failure(self, error: OSError) -> Unavailable:
        return Unavailable(f"the oplog {self.path} can't be written ({error}); free some space")

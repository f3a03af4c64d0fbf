"""Keeps the master's records on disk, if they are to be kept: the log, its flushing, its being written anew.

A log that grew is copied into a new file a piece at a time, between requests; what is written down
meanwhile goes to both. So is a leader's log when this master begins to follow it: the old one stays
whole until the new one is.

What says that something survives a loss of power waits until the log has been flushed (``flushed``): one
flush, in a thread, for all that waits when it begins.

A disk that does not take a record ends nothing: what was not written waits, in order, and ``trouble`` says
why, until the disk takes it. The caller acknowledges nothing meanwhile. After a flush that failed nobody
knows what is on the disk (``mooncake/files/__init__.py``), so the log is then written anew as a whole.
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
"""Between two pieces."""
RETRY_S = 1.0
"""Until a disk that refused is tried again."""
MAX_UNWRITTEN = 1 << 16
"""Records that wait for the disk; with more, the log is written anew when it takes something again."""

FLUSH = Histogram(
    "mooncake_store_oplog_flush_seconds",
    "Flushes of the oplog, for answers that promise to survive a loss of power",
    registry=registry,
    buckets=(0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10),
)
UNWRITABLE = Gauge(
    "mooncake_store_oplog_unwritable", "1 while the disk of the oplog takes nothing", registry=registry
)
FAILED = Counter(
    "mooncake_store_oplog_failures", "Writes and flushes of the oplog that failed", registry=registry
)

OnFlushed = Callable[[str], None]
"""Called with "" when what was kept survives a loss of power, or with the reason why that can't be said."""


class OplogWriter:
    """What may raise Unavailable: the master must not go on.

    Args:
        path: "" keeps nothing.
        flushes: answers may wait for a flush; else they don't, and a loss of power may take what they said.
        repairs: see ``Oplog``.
        directory: the same.
    """

    def __init__(
        self, path: str, flushes: bool = True, repairs: bool = False, directory: Directory | None = None
    ) -> None:
        self.path = path
        self.trouble = ""
        """Why nothing can be written now; "": it can."""
        self._log = Oplog(Path(path), repairs, directory) if path else None
        self._flushes = flushes
        self._anew: OplogRewrite | None = None
        self._copy: Snapshot | None = None
        """Of this master's own state, while its log is compacted."""
        self._compacting: asyncio.Task[None] | None = None
        self._catalog: Catalog | None = None
        """Whose records were kept last."""
        self._unwritten: list[Record] = []
        self._must_be_anew = False
        """What is in the log is not known, or not enough."""
        self._healing: asyncio.Task[None] | None = None
        self._num_kept = self._num_flushed = 0
        self._waiting: deque[tuple[int, OnFlushed]] = deque()
        self._flushing: asyncio.Task[None] | None = None

    @property
    def id(self) -> str:
        """Of the log, once it has been read; "" when there is none."""
        return self._log.id if self._log is not None else ""

    @property
    def doubt(self) -> Doubt:
        """Of what was read."""
        return self._log.doubt if self._log is not None else Doubt.NONE

    @property
    def is_whole(self) -> bool:
        """What was read is all that was written: the machine has not gone down with the end of it."""
        return self._log is None or self._log.doubt <= Doubt.END

    def read(self) -> list[Record]:
        """What was kept; raises InvalidArgument as ``Oplog.read``."""
        return [] if self._log is None else self._log.read()

    def heard(self, catalog: Catalog) -> None:
        """The nodes have said what the records lacked; it is written down."""
        if self._log is not None and not self.trouble:
            try:
                self._log.is_whole(catalog.objects.last_id)
            except OSError as error:
                log.warning("oplog_not_written", path=self.path, reason=str(error))

    def keep(self, records: list[Record], catalog: Catalog) -> None:
        """Write down what ``catalog`` wants kept; afterwards, look at ``trouble``."""
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

    # What is to survive a loss of power

    def flushed(self, then: OnFlushed) -> None:
        """Call ``then`` once all that was kept so far has been flushed: at once, if it has, or nothing is."""
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

    # A disk that refuses

    def _set_aside(self, records: list[Record]) -> None:
        if len(self._unwritten) + len(records) > MAX_UNWRITTEN:
            self._must_be_anew = True
        self._unwritten = [] if self._must_be_anew else self._unwritten + records

    def _fail(self, error: OSError) -> None:
        assert self._log is not None
        FAILED.inc()
        UNWRITABLE.set(1)
        self.trouble = f"the oplog {self.path} can't be written ({error.strerror or error}); free some space"
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            self.trouble = (
                f"the oplog {self.path} can't be written ({error.strerror or error}); look at the disk"
            )
        log.error("oplog_unwritable", path=self.path, reason=str(error))
        self.stop_compacting()
        waiting, self._waiting = self._waiting, deque()
        for _, then in waiting:
            then(self.trouble)
        if self._healing is None:
            self._healing = asyncio.get_running_loop().create_task(self._heal(self._log))

    async def _heal(self, oplog: Oplog) -> None:
        """Until the disk has taken all that it refused."""
        while self.trouble:
            await asyncio.sleep(RETRY_S)
            try:
                if self._must_be_anew:
                    self._write_anew(oplog)
                else:
                    oplog.append(self._unwritten)
                    self._unwritten = []
            except OSError as error:
                log.debug("oplog_still_unwritable", path=self.path, reason=str(error))
                continue
            try:
                await asyncio.to_thread(oplog.flush)
            except OSError as error:
                self._must_be_anew = True  # nobody knows what of it is on the disk
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
        """In one go, because nothing may be kept meanwhile; nobody is acknowledged anything anyway."""
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

    # The log of a leader

    def begin_copy(self) -> None:
        """What follows by ``copied`` will take the place of everything."""
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
        """The log itself is whole; it goes on growing."""
        assert self._log is not None
        log.warning("oplog_not_compacted", path=self.path, reason=str(error))
        if self._anew is not None:
            self._anew.abandon()
        self._anew = self._copy = None
        self._log.put_off_compaction()

    def _failure(self, error: OSError) -> Unavailable:
        return Unavailable(f"the oplog {self.path} can't be written ({error}); free some space")

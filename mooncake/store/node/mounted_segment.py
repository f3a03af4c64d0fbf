# SPDX-License-Identifier: Apache-2.0
"""One mounted segment of a node: its membership, its tasks for the master, and its journal.

``membership.py`` and ``task_agent.py`` decide; this module has the connection to the master that both share,
the journal (in memory for memory, ``ssd.py`` for an SSD), and the log of blocks written and removed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import math
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from random import Random
from typing import Any

import msgspec
from prometheus_client import Counter

from mooncake.driver import Driver
from mooncake.errors import AccessDenied, MooncakeError, PeerLost, Refusal
from mooncake.log import get_logger
from mooncake.machine import Wake
from mooncake.metrics import registry
from mooncake.store import messages as m
from mooncake.store.ha.leader_search import WhoLeads
from mooncake.store.ha.master_client import AsyncMasterClient, MasterResolver
from mooncake.store.node import membership as ms
from mooncake.store.node import task_agent as e
from mooncake.store.node.replica_copier import (
    CoalescedFlush,
    CopyTarget,
    Flushes,
    ReplicaCopier,
    refusal_of,
)
from mooncake.store.node.ssd import Disk
from mooncake.store.node.ssd_index_log import SsdIndexLog
from mooncake.transfer import Region, TransferEngine
from mooncake.types import Tier

log = get_logger(__name__)

COPIED = Counter(
    "mooncake_store_copied_bytes", "Bytes copied here by tasks", ["source", "target"], registry=registry
)
FAILED = Counter(
    "mooncake_store_node_failed_tasks", "Failed tasks of this node", ["reason"], registry=registry
)

CHECKED = Counter(
    "mooncake_store_checked_replicas",
    "Replicas of this node that were verified because a reader reported them as corrupt",
    ["outcome"],
    registry=registry,
)

COALESCED_BYTES = 16 << 20
"""Approximate size of the copies that are moved in one transfer."""
RETRY_S = 1.0
"""Delay before a change of the index that the disk refused is retried."""


@dataclasses.dataclass(frozen=True, slots=True)
class SegmentConfig:
    """Configuration of a segment: its memory and how it is used."""

    name: str
    """Name of the segment."""
    region: Region
    tier: Tier = Tier.MEMORY
    disk: Disk | None = None
    """The open SSD directory with the index, for a segment on SSD."""
    is_flushed: bool = False
    """A copy on SSD is made durable before it is announced."""
    log_blocks: bool = False
    log_writes: bool = True
    """Whether ``log_blocks`` includes what clients write."""
    """Log every block that is written or read at level info instead of debug."""


class MountedSegment:
    """A segment that is kept mounted with the master from ``start`` until ``close``.

    ``own`` finds the region of a segment of the same node; ``on_change`` is called on mount and loss;
    ``on_mounted`` receives each reply with which the master mounts the segment, before ``on_change``.
    """

    def __init__(
        self,
        config: SegmentConfig,
        engine: TransferEngine,
        master: str,
        node: str,
        own: Callable[[str], Region | None],
        on_change: Callable[[], None],
        on_mounted: Callable[[m.Mounted], None],
    ) -> None:
        self.config = config
        self._engine = engine
        self._master = master
        self._resolver = MasterResolver(master)
        self._on_change = on_change
        self._on_mounted = on_mounted
        descriptor = engine.describe()
        self._membership = ms.Membership(
            segment=config.name,
            epoch=descriptor.epoch,
            host=descriptor.host,
            address=config.region.address,
            size_bytes=config.region.size_bytes,
            descriptor=descriptor.encode(),
            random=Random(f"{descriptor.epoch} {config.name}"),
            tier=config.tier,
            content_id=descriptor.epoch if config.disk is None else config.disk.content_id,
            node=node,
            held=self.entries,
        )
        self._agent = e.TaskAgent(config.name, descriptor.epoch)
        self._copier = ReplicaCopier(engine, own, self._describe)
        flushes: Flushes | None = None
        if config.disk is not None and config.is_flushed:
            flushes = Flushes(CoalescedFlush(config.disk.flush), CoalescedFlush(config.disk.log.flush))
        self._target = CopyTarget(config.region, config.tier, config.disk, flushes)
        self._held: dict[int, m.SegmentEntry] = {}
        """The journal of a segment in memory: object id -> entry."""
        self._unwritten: deque[list[m.SegmentEntry] | list[int]] = deque()
        """Changes not yet written to the index of the SSD: entries, or ids of objects that are gone."""
        self._write_trouble = Refusal("storage_error", "not tried yet")
        """Why the last attempt to write one of them failed."""
        self._retry: asyncio.TimerHandle | None = None
        self._left = asyncio.Event()
        self._link: AsyncMasterClient | None = None
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._compacting: asyncio.Task[None] | None = None
        """The last compaction of the SSD's index, which ``close`` waits for: after it, another process may
        write a file of that name."""
        self._check_lock = asyncio.Lock()
        """Held while a replica is verified for the master: one at a time."""
        self._runs: list[e.RunTask] = []
        """Tasks of the last reply that are not yet started."""
        self._disconnecting: asyncio.Task[None] | None = None
        self._driver = Driver(self._membership, self._perform)
        self._agent_driver = Driver(self._agent, self._perform_agent)

    @property
    def is_mounted(self) -> bool:
        """Whether the master has mounted the segment."""
        return self._membership.phase is ms.MembershipPhase.MOUNTED

    @property
    def is_usable(self) -> bool:
        """Whether the segment is mounted and the master allocates space on it."""
        return self._membership.is_usable

    def entries(self) -> Iterable[m.SegmentEntry]:
        """Content of the segment according to the journal.

        Changes that are not yet written to the index of the SSD count as written: a later master would keep
        an object whose removal is pending, and the index would drop it as soon as it can be written. An entry
        that is being flushed does not count: a later master would acknowledge a durable put of it. Its task
        ends after that, and then everything is reported again (``task_agent.py``).
        """
        if self.config.disk is None:
            return list(self._held.values())
        index = self.config.disk.index
        if not self._unwritten and not index.unflushed:
            return list(index.entries.values())
        held = {one: entry for one, entry in index.entries.items() if one not in index.unflushed}
        e.changed(held, itertools.chain.from_iterable(self._unwritten))
        return list(held.values())

    async def ask(self, message: msgspec.Struct) -> Any:
        """Send a message to the master on the segment's connection; returns the reply.

        Raises:
            PeerLost, DeadlineExceeded: the master can't be reached, or does not reply in time.
        """
        if self._link is None:
            raise PeerLost("the master can't be reached now")
        return await self._link.call(message, ms.ANSWER_S)

    def start(self) -> None:
        self._driver.post(Wake())

    async def close(self) -> None:
        """Unmount the segment; afterwards no task accesses it."""
        self._post(ms.Leave())
        await self._left.wait()
        if self._disconnecting is not None:
            await self._disconnecting  # otherwise the master would consider the node still connected
        self._driver.close()
        self._agent_driver.close()
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._compacting is not None:
            await asyncio.wait([self._compacting])
        await asyncio.to_thread(self._copier.close)
        await asyncio.to_thread(self._resolver.close)

    # Membership

    def _post(self, event: ms.Event) -> None:
        self._driver.post(event)
        self._follow()

    def _follow(self) -> None:
        """Register the segment with the task agent exactly while it is mounted."""
        if self.is_mounted and not self._agent.is_mounted:
            self._agent_driver.post(e.SegmentRegistered())
        elif self._agent.is_mounted and not self.is_mounted:
            self._agent_driver.post(e.SegmentUnregistered())
        self._on_change()

    def _perform(self, effect: ms.Effect) -> None:
        if isinstance(effect, ms.Connect):
            self._link = AsyncMasterClient(
                self._resolver, m.REPLIES, doubt_s=math.inf, identity=self._engine.identity
            )
            self._spawn(self._connect(self._link))
        elif isinstance(effect, ms.Disconnect):
            link, self._link = self._link, None
            if link is not None:
                self._disconnecting = self._spawn(link.close())
            self._follow()
        elif isinstance(effect, ms.Send):
            assert self._link is not None
            self._spawn(self._send(self._link, effect.message))
        elif isinstance(effect, ms.LogEvent):
            report = log.info if effect.event == "mounted" else log.warning
            report(effect.event, master=self._master, **effect.fields)
        elif isinstance(effect, ms.DropObjects):
            self._drop(effect.object_ids)
        else:
            assert isinstance(effect, ms.Left)
            self._left.set()

    async def _connect(self, link: AsyncMasterClient) -> None:
        """Connect, and report the loss of the connection when it comes."""
        try:
            # A request: its error has the reason why there is no connection.
            await link.call(WhoLeads(), ms.CONNECT_S)
        except MooncakeError as error:
            if isinstance(error, AccessDenied):
                log.warning("mount_denied", segment=self.config.name, reason=str(error))
            self._report(link, ms.ConnectionClosed(str(error)))
            return
        self._report(link, ms.ConnectionOpened())
        await link.lost.wait()
        self._report(link, ms.ConnectionClosed("connection lost"))

    async def _send(self, link: AsyncMasterClient, message: msgspec.Struct) -> None:
        try:
            reply = await link.call(message, ms.ANSWER_S)
        except PeerLost:
            return  # reported by ``_connect``, which watches the connection
        except MooncakeError as error:
            if isinstance(error, AccessDenied):
                log.warning("mount_denied", segment=self.config.name, reason=str(error))
            self._report(link, ms.ConnectionClosed(str(error)))
        else:
            if isinstance(reply, m.Mounted) and reply.refusal is None and link is self._link:
                self._on_mounted(reply)
            self._report(link, ms.ReplyReceived(reply))

    def _report(self, link: AsyncMasterClient, event: ms.Event) -> None:
        """Deliver an event of ``link``; events of an earlier connection are ignored."""
        if link is self._link:
            self._post(event)

    # Tasks

    def _perform_agent(self, effect: e.Effect) -> None:
        if isinstance(effect, e.SendPoll):
            assert self._link is not None
            self._start_runs()  # a durable put waits for them; nothing waits for the next poll
            self._spawn(self._send_poll(self._link, effect))
        elif isinstance(effect, e.UpdateJournal):
            self._enter(effect.changes)
        elif isinstance(effect, e.RunTask):
            self._runs.append(effect)  # tasks of one reply are copied together
        elif isinstance(effect, e.RunCheck):
            self._spawn(self._run_check(effect))
        elif isinstance(effect, e.SendReport):
            assert self._link is not None
            self._spawn(self._send_report(self._link))
        else:
            assert isinstance(effect, e.Remount)
            self._post(ms.ReplyReceived(m.Beat(is_known=False)))

    async def _send_poll(self, link: AsyncMasterClient, poll: e.SendPoll) -> None:
        if not poll.message.done:
            await asyncio.sleep(0)  # a copy that has just begun is handed to its thread first
        try:
            reply = await link.call(poll.message, e.PATIENCE_S)
        except PeerLost:
            return
        except MooncakeError as error:
            log.debug("poll_failed", segment=self.config.name, reason=str(error))
            self._agent_driver.post(e.PollFailed(poll.number))
        else:
            self._agent_driver.post(e.PollAnswered(poll.number, reply))
            self._start_runs()

    def _start_runs(self) -> None:
        """Group tasks by source; groups are large enough to keep the device busy while others are flushed."""
        runs, self._runs = self._runs, []
        groups: dict[tuple[str, int], list[e.RunTask]] = {}
        num_bytes: dict[tuple[str, int], int] = {}
        for run in runs:
            source = run.task.source.segment, run.task.source.epoch
            if num_bytes.get(source, 0) >= COALESCED_BYTES:
                self._spawn(self._run(groups.pop(source)))
                num_bytes[source] = 0
            groups.setdefault(source, []).append(run)
            num_bytes[source] = num_bytes.get(source, 0) + run.task.entry.size_bytes
        for group in groups.values():
            self._spawn(self._run(group))

    async def _run(self, runs: list[e.RunTask]) -> None:
        refusals: list[Refusal | None] = [Refusal("cancelled", "the node stopped")] * len(runs)
        deadline = min(run.deadline for run in runs)
        self._write_pending()  # removals from before the task must be written before the new entries
        try:
            if self._unwritten:
                trouble = self._write_trouble
                what = f"the index of {self.config.name} can't be written"
                refusals = [Refusal(trouble.code, f"{what}: {trouble.reason}")] * len(runs)
            else:
                refusals = await self._copier.copy([run.task for run in runs], self._target, deadline)
        finally:
            ends = [
                e.TaskEnded(r.task.task_id, r.life, refusal)
                for r, refusal in zip(runs, refusals, strict=True)
            ]
            self._agent_driver.post(e.TasksEnded(ends))
        for run, refusal in zip(runs, refusals, strict=True):
            self._log_task(run.task, refusal)
        self._compact_if_due()

    async def _run_check(self, run: e.RunCheck) -> None:
        """Verify a replica that a reader reported as corrupt."""
        refusal: Refusal | None = Refusal("cancelled", "the node stopped")
        entry = run.check.entry
        try:
            async with self._check_lock:
                refusal = await self._copier.verify(entry, self._target, run.deadline)
        finally:
            self._agent_driver.post(e.CheckEnded(run.check.check_id, run.life, refusal))
        outcome = "right" if refusal is None else refusal.code
        CHECKED.labels(outcome).inc()
        report = log.info if refusal is None else log.warning
        report("replica_checked", segment=self.config.name, key=entry.key, outcome=outcome)

    def _log_task(self, task: m.CopyTask, refusal: Refusal | None) -> None:
        entry, source = task.entry, task.source
        if refusal is not None:
            self._log_block("block_read", entry, source.tier, source.segment, refused=refusal.code)
            FAILED.labels(refusal.code).inc()
            log.warning("task_failed", segment=self.config.name, key=entry.key, reason=str(refusal))
            return
        COPIED.labels(str(source.tier), str(self.config.tier)).inc(entry.size_bytes)
        self._log_block("block_read", entry, source.tier, source.segment)
        if self.config.disk is not None:  # for memory, the master sends the change that is logged
            self._log_block("block_write", entry, self.config.tier, self.config.name)

    async def _send_report(self, link: AsyncMasterClient) -> None:
        """Report the whole content after a loss of changes; the master then sends what is missing."""
        entries = list(self.entries())
        parts = e.reports(self.config.name, self._engine.epoch, entries)
        log.info("journal_reported", segment=self.config.name, num_objects=len(entries))
        for part in parts:
            try:
                reply = await link.call(part, ms.ANSWER_S)
            except MooncakeError as error:
                log.warning("report_failed", segment=self.config.name, reason=str(error))
                self._agent_driver.post(e.ReportEnded(is_complete=False))
                return
            self._drop(reply.unwanted)
        self._agent_driver.post(e.ReportEnded(is_complete=True))

    async def _describe(self, segment: str, epoch: int) -> bytes | None:
        reply = await self.ask(m.DescribeSegments([(segment, epoch)]))
        descriptor: bytes | None = reply.descriptors[0]
        return descriptor

    # The journal

    def _enter(self, changes: list[m.SegmentEntry | int]) -> None:
        disk = self.config.disk
        if disk is None:
            e.changed(self._held, changes)
            for change in changes:
                if self.config.log_writes and isinstance(change, m.SegmentEntry):
                    self._log_block("block_write", change, self.config.tier, self.config.name)
            return
        for change in changes:
            if isinstance(change, int):
                self._drop([change])
                continue
            # Usually a task has already entered it; otherwise the index lost its tail, and the master knows.
            self._note_down([change])

    def _drop(self, object_ids: list[int]) -> None:
        disk = self.config.disk
        if disk is None:
            e.changed(self._held, object_ids)
        else:
            self._note_down(object_ids)

    def _note_down(self, change: list[m.SegmentEntry] | list[int]) -> None:
        """Write a change, which the master considers written: while the disk refuses it, retry in order."""
        self._unwritten.append(change)
        if self._retry is None:
            self._write_pending()

    def _write_pending(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        while self._unwritten:
            try:
                self._write(self._unwritten[0])
            except MooncakeError as error:
                self._write_trouble = refusal_of(error)
                fields = {"num_changes": len(self._unwritten), "retry_in_s": RETRY_S}
                log.error("index_not_written", segment=self.config.name, reason=str(error), **fields)
                self._retry = asyncio.get_running_loop().call_later(RETRY_S, self._write_pending)
                break
            self._unwritten.popleft()
        self._compact_if_due()

    def _write(self, change: list[m.SegmentEntry] | list[int]) -> None:
        """Enter one change in the index of the SSD.

        Raises:
            OutOfSpace, StorageError: it can't be written.
        """
        assert self.config.disk is not None
        gone = []
        for one in change:
            if isinstance(one, m.SegmentEntry):
                self.config.disk.log.hold(one)
            else:
                gone.append(one)
        if gone:
            self.config.disk.log.drop(gone)

    def _compact_if_due(self) -> None:
        disk = self.config.disk
        if disk is not None and disk.log.wants_compaction:
            self._compacting = asyncio.create_task(self._compact(disk.log, disk.log.begin_compaction()))

    async def _compact(self, index: SsdIndexLog, entries: list[m.SegmentEntry]) -> None:
        index.end_compaction(await asyncio.to_thread(index.write_compacted, entries))

    def _log_block(self, event: str, entry: m.SegmentEntry, tier: Tier, segment: str, **more: Any) -> None:
        tenant, _, key = entry.key.rpartition("\0")
        fields = {"tenant": tenant} if tenant else {}
        report = log.info if self.config.log_blocks else log.debug
        report(event, key=key, bytes=entry.size_bytes, tier=str(tier), node=segment, **fields, **more)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        return task

    def __repr__(self) -> str:
        return f"<MountedSegment {self.config.name!r} [{self._membership.phase}] {self._agent!r}>"

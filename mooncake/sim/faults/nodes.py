# SPDX-License-Identifier: Apache-2.0
"""Nodes on the kernel: segments of memory and SSD, each with its membership and its task agent.

What ``mounted_segment.py`` and ``replica_copier.py`` do with sockets and transfers is done here on virtual
time; when to mount, report, poll and copy is decided by the same cores.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from mooncake.errors import OutOfSpace, Refusal
from mooncake.machine import Wake
from mooncake.rpc.wire import Failure, decoder_for
from mooncake.sim.faults.disks import SimDisk
from mooncake.sim.faults.network import ConnectionEnd, over_the_wire
from mooncake.sim.kernel import Process, SimDriver
from mooncake.store import messages as m
from mooncake.store.node import membership as ms
from mooncake.store.node import task_agent as e
from mooncake.types import Tier

if TYPE_CHECKING:
    from mooncake.sim.faults.store_run import StoreCluster

NODE_ADDRESS = 1 << 30
"""Where a segment begins in its node's address space: far from zero, so that offsets are not addresses."""
RETIRED = "it was drained and unmounted"
RETRY_S = 1.0
"""As in ``mounted_segment.py``."""
CHANGES = 0
"""Number of the frames of a segment's membership; polls and reports count on from it."""

requests = decoder_for(m.REQUESTS)

_PRIME = 1_000_003
_MASK = 0xFFFFFFFF


def checksum(data: bytes) -> int:
    """A polynomial hash: as combinable as a CRC, in one line."""
    value = len(data) and 1
    for byte in data:
        value = (value * _PRIME + byte + 1) & _MASK
    return value


def combine(a: int, b: int, length_b: int) -> int:
    """``checksum(x + y)`` from the checksums of x and y."""
    # b = P^n + rest, for the leading 1; a * P^n + rest is needed.
    power = pow(_PRIME, length_b, 1 << 32)
    return (a * power + b - power) & _MASK


class SimNode:
    """One incarnation of a node: its segments, the process that serves them."""

    def __init__(
        self,
        cluster: StoreCluster,
        name: str,
        host: str,
        size_bytes: int,
        disk: SimDisk | None,
        device_bytes: int = 0,
    ) -> None:
        kernel = cluster.kernel
        self.name = name
        self.host = host
        self.epoch = kernel.random.getrandbits(32)
        self.process = Process(kernel, name, cluster.new_clock())
        self.disk = disk
        self.slow_until = 0.0
        """Every transfer with it takes long; it has no other fault."""
        self.is_retired = False
        """A master refuses to mount one of its segments again: it was drained and unmounted."""
        self._num_leaving = 0
        self.memory = SimSegment(cluster, self, name, Tier.MEMORY, size_bytes, None)
        self.segments = {name: self.memory}
        if disk is not None:
            disk.opened(checksum)
            ssd = f"{name}/ssd"
            self.segments[ssd] = SimSegment(cluster, self, ssd, Tier.SSD, len(disk.data), disk)
        if device_bytes:
            device = f"{name}/hbm"
            self.segments[device] = SimSegment(cluster, self, device, Tier.DEVICE, device_bytes, None)

    @property
    def is_alive(self) -> bool:
        return self.process.is_alive

    @property
    def is_leaving(self) -> bool:
        return self._num_leaving > 0

    def leave(self, ended: Callable[[], None]) -> None:
        """Announce it to the master, end when all segments have left, and then call ``ended``."""
        self._num_leaving = len(self.segments)

        def left() -> None:
            self._num_leaving -= 1
            if not self._num_leaving:
                self.process.crash()
                ended()

        for segment in self.segments.values():
            segment.leave(left)


class SimSegment:
    """The behaviour of one segment of a node, and its bytes."""

    def __init__(
        self,
        cluster: StoreCluster,
        node: SimNode,
        name: str,
        tier: Tier,
        size_bytes: int,
        disk: SimDisk | None,
    ) -> None:
        kernel = cluster.kernel
        self._cluster = cluster
        self.node = node
        self.name = name
        self.tier = tier
        self.disk = disk
        self.epoch = node.epoch
        self.process = node.process
        self.bytes = bytearray(size_bytes) if disk is None else disk.data
        self._held: dict[int, m.SegmentEntry] = {}
        self._membership = ms.Membership(
            name,
            node.epoch,
            node.host,
            NODE_ADDRESS,
            size_bytes,
            b"",
            Random(kernel.random.getrandbits(32)),
            tier=tier,
            content_id=node.epoch if disk is None else disk.content_id,
            node=node.name,
            held=self.entries,
        )
        self._task_agent = e.TaskAgent(name, node.epoch)
        self._end: ConnectionEnd | None = None
        self._attempt = 0
        self._is_reporting = False
        self._number = CHANGES
        self._waiting: dict[int, Callable[[Any], None]] = {}
        """Callback for the reply to a frame; called with None when there is none in time."""
        self._driver: SimDriver[ms.Event, ms.Effect] = SimDriver(
            self.process, self._membership, self._perform
        )
        self._task_driver: SimDriver[e.Event, e.Effect] = SimDriver(
            self.process, self._task_agent, self._perform_task_effect
        )
        self._unwritten: deque[tuple[Callable[[Any], None], Any]] = deque()
        """Changes that the index of the SSD has not taken yet."""
        self._left: Callable[[], None] | None = None
        self._driver.post(Wake())

    def leave(self, left: Callable[[], None]) -> None:
        """Announce to the master that the segment leaves; ``left``: it knows, or can't be reached."""
        self._left = left
        self._post(ms.Leave())

    @property
    def is_alive(self) -> bool:
        return self.process.is_alive

    @property
    def is_slow(self) -> bool:
        return self._cluster.kernel.now < self.node.slow_until

    def entries(self) -> Iterable[m.SegmentEntry]:
        """The segment's journal, with the changes that the index has not taken yet."""
        if self.disk is None:
            return list(self._held.values())
        index = self.disk.index
        held = {one: entry for one, entry in index.entries.items() if one not in index.unflushed}
        for _, what in self._unwritten:
            e.changed(held, what if isinstance(what, list) else [what])
        return list(held.values())

    # Bytes

    def read(self, address: int, length: int) -> bytes:
        start = address - NODE_ADDRESS
        assert start >= 0 and start + length <= len(self.bytes), (address, length)
        return bytes(self.bytes[start : start + length])

    def write(self, address: int, data: bytes) -> None:
        start = address - NODE_ADDRESS
        assert start >= 0 and start + len(data) <= len(self.bytes), (address, len(data))
        if self.disk is not None:
            self.disk.write(start, data)
        else:
            self.bytes[start : start + len(data)] = data

    # Membership

    def _post(self, event: ms.Event) -> None:
        self._driver.post(event)
        self._follow()

    def _follow(self) -> None:
        is_mounted = self._membership.phase is ms.MembershipPhase.MOUNTED
        if is_mounted and not self._task_agent.is_mounted:
            self._task_driver.post(e.SegmentRegistered())
        elif self._task_agent.is_mounted and not is_mounted:
            self._task_driver.post(e.SegmentUnregistered())

    def _perform(self, effect: ms.Effect) -> None:
        if isinstance(effect, ms.Connect):
            self._connect()
        elif isinstance(effect, ms.Disconnect):
            self._attempt += 1
            if self._end is not None:
                self._end.on_closed = None
                self._end.close()
                self._end = None
            self._report_ended(is_complete=False)
            self._follow()
        elif isinstance(effect, ms.Send):
            self._send(effect.message, ms.ANSWER_S, self._answered)
        elif isinstance(effect, ms.DropObjects):
            self._drop(effect.object_ids)
        elif isinstance(effect, ms.LogEvent):
            self._cluster.kernel.trace_line(f"{self.name}: {effect.event} {effect.fields}")
            self.node.is_retired |= RETIRED in str(effect.fields.get("reason"))
        elif isinstance(effect, ms.Left) and self._left is not None:
            self._left()

    def _answered(self, reply: Any) -> None:
        if reply is None or isinstance(reply, Failure):
            self._post(ms.ConnectionClosed("no answer" if reply is None else reply.message))
        else:
            self._post(ms.ReplyReceived(reply))

    def _connect(self) -> None:
        self._attempt += 1
        attempt = self._attempt
        self._waiting = {}

        def opened(end: ConnectionEnd) -> None:
            if attempt != self._attempt:
                end.close()
                return
            self._end = end
            end.on_message = replied
            end.on_closed = closed
            self._post(ms.ConnectionOpened())

        def replied(frame: tuple[int, Any]) -> None:
            if attempt == self._attempt and (answered := self._waiting.pop(frame[0], None)) is not None:
                answered(frame[1])

        def closed(reason: str) -> None:
            if attempt == self._attempt:
                self._end = None
                self._waiting = {}
                self._report_ended(is_complete=False)
                self._post(ms.ConnectionClosed(reason))

        self._cluster.network.connect(self.process, self._cluster.leader, opened, closed)

    def _send(self, message: msgspec.Struct, patience_s: float, answered: Callable[[Any], None]) -> None:
        if self._end is None:
            return  # its loss is noticed by the process that sent the request
        self._number += 1
        number, waiting = self._number, self._waiting
        waiting[number] = answered
        self._end.send((number, over_the_wire(message, requests)))

        def too_late() -> None:
            if waiting is self._waiting and waiting.pop(number, None) is not None:
                answered(None)

        self.process.after(patience_s, too_late)

    # Tasks

    def _perform_task_effect(self, effect: e.Effect) -> None:
        if isinstance(effect, e.SendPoll):
            number = effect.number

            def polled(reply: Any) -> None:
                is_polled = isinstance(reply, m.Polled)
                self._task_driver.post(e.PollAnswered(number, reply) if is_polled else e.PollFailed(number))

            self._send(effect.message, e.PATIENCE_S, polled)
        elif isinstance(effect, e.UpdateJournal):
            self._enter(effect.changes)
        elif isinstance(effect, e.RunTask):
            SimReplicaCopy(self._cluster, self, effect, self._ended)
        elif isinstance(effect, e.RunCheck):
            self.process.after(0.001, lambda: self._look(effect))
        elif isinstance(effect, e.SendReport):
            self._send_reports(e.reports(self.name, self.epoch, self.entries()))
        else:
            self._post(ms.ReplyReceived(m.Beat(is_known=False)))

    def _look(self, look: e.RunCheck) -> None:
        """What ``ReplicaCopier.verify`` does, in one instant."""
        entry, refusal = look.check.entry, None
        expected = np.frombuffer(entry.checksums, dtype="<u4").tolist()
        for start, announced in zip(range(0, entry.size_bytes, entry.chunk_bytes), expected, strict=True):
            length = min(entry.chunk_bytes, entry.size_bytes - start)
            data = self.read(NODE_ADDRESS + entry.offset + start, length)
            if (checksum(data) if self._cluster.faults.has_checksums else 0) != announced:
                refusal = Refusal("corrupt", "not what its writer announced")
        self._cluster.kernel.trace_line(f"{self.name}: check of {entry.key}: {refusal}")
        self._task_driver.post(e.CheckEnded(look.check.check_id, look.life, refusal))

    def _ended(self, run: e.RunTask, refusal: Refusal | None) -> None:
        self._cluster.kernel.trace_line(
            f"{self.name}: task {run.task.task_id} for {run.task.entry.key}: {refusal}"
        )
        self._task_driver.post(e.TaskEnded(run.task.task_id, run.life, refusal))

    def _send_reports(self, parts: list[m.ReportContents]) -> None:
        self._is_reporting = True

        def reported(reply: Any) -> None:
            if not isinstance(reply, m.Reported):
                self._report_ended(is_complete=False)
                return
            self._drop(reply.unwanted)
            if parts[1:]:
                self._send_reports(parts[1:])
            else:
                self._report_ended(is_complete=True)

        self._send(parts[0], ms.ANSWER_S, reported)

    def _report_ended(self, is_complete: bool) -> None:
        if self._is_reporting:
            self._is_reporting = False
            self._task_driver.post(e.ReportEnded(is_complete))

    # The journal, as ``mounted_segment.py`` keeps it

    def _enter(self, changes: list[m.SegmentEntry | int]) -> None:
        if self.disk is None:
            e.changed(self._held, changes)
            return
        for change in changes:
            if isinstance(change, int):
                self._drop([change])
            else:
                self._record(self.disk.hold, change)

    def _drop(self, object_ids: list[int]) -> None:
        if self.disk is None:
            e.changed(self._held, object_ids)
        else:
            self._record(self.disk.drop, object_ids)

    def _record(self, write: Callable[[Any], None], what: Any) -> None:
        """Write a change to the index, in order; while the disk refuses, retry."""
        self._unwritten.append((write, what))
        if len(self._unwritten) == 1:
            self._write_pending()

    def has_written_all(self) -> bool:
        """Whether nothing waits: what was removed before a task came is written before what comes with it."""
        self._write_pending(is_again=False)
        return not self._unwritten

    def _write_pending(self, is_again: bool = True) -> None:
        while self._unwritten:
            write, what = self._unwritten[0]
            try:
                write(what)
            except OutOfSpace as error:
                self._cluster.kernel.trace_line(f"{self.name}: index_not_written {error}")
                if is_again:
                    self.process.after(RETRY_S, self._write_pending)
                return
            self._unwritten.popleft()

    def __repr__(self) -> str:
        return f"<SimSegment {self.name} {self._membership!r} {self._task_agent!r}>"


class SimReplicaCopy:
    """One task under way, as ``replica_copier.py`` does it: chunk by chunk, each at an instant of its own."""

    def __init__(
        self,
        cluster: StoreCluster,
        target: SimSegment,
        run: e.RunTask,
        ended: Callable[[e.RunTask, Refusal | None], None],
    ) -> None:
        self._cluster = cluster
        self._target = target
        self._run = run
        self._ended = ended
        self._source = cluster.segment(run.task.source.segment, run.task.source.epoch)
        self._sums: dict[int, int] = {}
        entry = run.task.entry
        self._chunks = [
            (start, min(entry.chunk_bytes, entry.size_bytes - start))
            for start in range(0, entry.size_bytes, entry.chunk_bytes)
        ]
        ends_at = target.process.clock.instant(run.deadline)
        self._promise = cluster.checkers.task_promised(target, run.task, ends_at)
        try:
            if not target.has_written_all():
                raise OutOfSpace("the index can't be written")
            if target.disk is not None:
                target.disk.vacate(entry.offset, entry.size_bytes)
        except OutOfSpace as error:
            self._end(Refusal("no_space", str(error)))
            return
        self._begin()

    def _begin(self) -> None:
        kernel, faults, process = self._cluster.kernel, self._cluster.faults, self._target.process
        took_s = 0.001 * kernel.random.uniform(0.1, 2.0)
        is_slow = any(one is not None and one.is_slow for one in (self._source, self._target))
        if kernel.chance(faults.slow_transfer_chance) or is_slow:
            took_s = kernel.random.uniform(0.0, faults.slow_transfer_s)
        if self._target.disk is not None and kernel.chance(faults.slow_disk_chance):
            took_s += kernel.random.uniform(0.0, faults.slow_disk_s)
        if self._source is None:
            process.after(took_s, lambda: self._end(Refusal("peer_lost", "no process serves the source")))
            return
        left_s = self._run.deadline - process.now
        fails = kernel.chance(faults.transfer_failure_chance)
        if self._source.disk is not None and self._source.disk.fails_to_read():
            process.after(took_s, lambda: self._end(Refusal("io_error", "the disk can't be read")))
            return
        for number in range(len(self._chunks)):
            at_s = kernel.random.uniform(0.0, took_s)
            if at_s < left_s and not (fails and kernel.chance(0.5)):
                # Threads that carry bytes continue while the loop is held, and late when they were stopped.
                copy = lambda number=number: process.when_running(lambda: self._copy(number))  # noqa: E731
                kernel.after(process.clock.true_s(at_s), copy)
        if took_s >= left_s:
            process.after(max(0.0, left_s), lambda: self._end(Refusal("expired", "it took too long")))
        elif fails:
            process.after(took_s, lambda: self._end(Refusal("peer_lost", "the transfer failed")))
        else:
            process.after(took_s, self._arrived)

    def _copy(self, number: int) -> None:
        source, task = self._source, self._run.task
        if source is None or not source.is_alive or not self._target.is_alive:
            return
        start, length = self._chunks[number]
        data = source.read(task.source.address + start, length)
        self._target.write(NODE_ADDRESS + task.entry.offset + start, data)
        self._sums[number] = checksum(data) if self._cluster.faults.has_checksums else 0

    def _arrived(self) -> None:
        entry = self._run.task.entry
        expected = np.frombuffer(entry.checksums, dtype="<u4").tolist()
        if len(self._sums) < len(self._chunks):
            self._end(Refusal("peer_lost", "the source died"))
        elif [self._sums[number] for number in range(len(self._chunks))] != expected:
            self._end(Refusal("corrupt", "not what its writer announced"))
        elif self._target.process.now >= self._run.deadline:
            self._end(Refusal("expired", "it took too long"))
        elif (disk := self._target.disk) is None:
            self._end(None)
        else:
            # Every byte is in place, and flushed together with the entry.
            self._cluster.checkers.released([self._promise])
            try:
                disk.hold(entry, is_flushed=False)
            except OutOfSpace as error:
                self._end(Refusal("no_space", str(error)))
                return
            begun = disk.flush()

            def flushed() -> None:
                disk.flushed(begun)
                if not disk.index.has(entry):
                    self._end(Refusal("expired", "it was removed or copied elsewhere meanwhile"))
                    return
                disk.mark_flushed([entry.object_id])
                self._end(None)

            self._target.process.after(disk.flush_s, flushed)

    def _end(self, refusal: Refusal | None) -> None:
        self._cluster.checkers.released([self._promise])
        self._ended(self._run, refusal)

# SPDX-License-Identifier: Apache-2.0
"""Copies replicas into space of a segment of this node, as tasks require, and verifies every copy.

Bytes go directly between the source (another node, or another tier of this one) and the target's memory or
file, those of many tasks in one transfer. The checksum of every chunk is computed on the way, and a task is
done only if the checksums are those that the object's writer announced. ``task_agent.py`` decides when tasks
run and reports their outcomes.

A copy from memory of this node to its SSD is what a durable put waits for, so one thread writes the bytes and
flushes them, and each wake-up that this saves is a tenth of the put. Its entry is in the index before, as one
whose bytes are not flushed, and the index is flushed at the same time. If an entry survives the end of the
process or a loss of power without its bytes, that is found when the directory is opened again, because the
index knows it as unflushed until both flushes have ended (``ssd_index.py``).
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from mooncake import clock
from mooncake.errors import MooncakeError, OutOfSpace, Refusal, StorageError
from mooncake.log import get_logger
from mooncake.store import messages as m
from mooncake.store.node.ssd import Disk
from mooncake.transfer import Completion, Op, Region, RemoteSegment, Status, TransferEngine, crc32c_combine
from mooncake.transfer.completion_queue import wait_until_done
from mooncake.transfer.descriptor import decode_descriptor
from mooncake.types import Tier

log = get_logger(__name__)

CODES = {
    Status.PEER_LOST: "peer_lost",
    Status.ACCESS_DENIED: "peer_lost",
    Status.PROTOCOL_ERROR: "peer_lost",
    Status.TIMED_OUT: "expired",
    Status.IO_ERROR: "io_error",
}
"""Status of a failed transfer -> code of the task's refusal."""

PIECE_BYTES = 1 << 20
"""Bytes read at a time to verify a replica."""
MAX_THREADS = 64
"""Limit of the threads that write and flush for one segment; as many as it has concurrent tasks."""

ResultT = TypeVar("ResultT")


@dataclasses.dataclass(frozen=True, slots=True)
class Flushes:
    """Functions that block until what was written before is durable. Any thread may call them."""

    data: CoalescedFlush
    index: CoalescedFlush


@dataclasses.dataclass(frozen=True, slots=True)
class CopyTarget:
    """Segment that a task writes to."""

    region: Region
    tier: Tier
    disk: Disk | None
    """The SSD directory with its index, for a segment on SSD."""
    flushes: Flushes | None = None
    """Makes a copy durable; None: not required."""


class _Load:
    """One task: its position in the batch, and its chunks."""

    def __init__(self, place: int, task: m.CopyTask) -> None:
        entry = task.entry
        self.place = place
        self.task = task
        self.expected = np.frombuffer(entry.checksums, dtype="<u4")
        chunk_bytes, size_bytes = np.uint64(entry.chunk_bytes), np.uint64(entry.size_bytes)
        self.offsets = np.arange(len(self.expected), dtype=np.uint64) * chunk_bytes
        self.lengths = np.minimum(chunk_bytes, size_bytes - self.offsets)


class ReplicaCopier:
    """Copies replicas for all segments of a node. ``own``: finds the region of a segment of this node.

    ``describe(segment, epoch)``: the descriptor of another node, from the master; None: unknown there.
    """

    def __init__(
        self,
        engine: TransferEngine,
        own: Callable[[str], Region | None],
        describe: Callable[[str, int], Awaitable[bytes | None]],
    ) -> None:
        self._engine = engine
        self._own = own
        self._describe = describe
        self._opened: dict[tuple[str, int], RemoteSegment] = {}
        self._threads = ThreadPoolExecutor(MAX_THREADS, "copy")

    def close(self) -> None:
        """End the threads; no copy may be in progress."""
        self._threads.shutdown()

    async def copy(
        self, tasks: Sequence[m.CopyTask], target: CopyTarget, deadline: float
    ) -> list[Refusal | None]:
        """Run tasks with one source, together. None: every byte is in place and entered in the index."""
        outcomes: list[Refusal | None] = [await self._prepared(task, target) for task in tasks]
        loads = [_Load(place, tasks[place]) for place, refusal in enumerate(outcomes) if refusal is None]
        disk, flushes = target.disk, target.flushes
        earlier: dict[int, m.SegmentEntry] = {}
        if disk is not None and flushes is not None:
            earlier = _durable(loads, disk)
            loads = _entered(loads, disk, outcomes, is_flushed=False)
        if not loads:
            return outcomes
        done: list[_Load] = []
        try:
            moved = await self._moved_and_kept(loads, target, deadline)
            is_late = clock.monotonic() >= deadline
            for load, refusal in zip(loads, moved, strict=True):
                if refusal is None and is_late:
                    refusal = Refusal("expired", f"copy of {load.task.entry.key!r} took too long")
                outcomes[load.place] = refusal
                if refusal is None:
                    done.append(load)
        finally:
            if disk is not None and flushes is not None:
                _settle(loads, done, earlier, disk, outcomes)
        if disk is not None and flushes is None:
            _entered(done, disk, outcomes, is_flushed=True)
        return outcomes

    async def _moved_and_kept(
        self, loads: Sequence[_Load], target: CopyTarget, deadline: float
    ) -> list[Refusal | None]:
        """Move the bytes of all tasks, and make them and their entries durable if required."""
        if target.flushes is None:
            return await self._moved(loads, target, deadline)
        keeping = asyncio.create_task(self._in_thread(target.flushes.index))
        try:
            moved = await self._moved(loads, target, deadline)
        finally:
            await asyncio.wait([keeping])
        error = keeping.exception()
        if error is None:
            return moved
        if not isinstance(error, MooncakeError):
            raise error
        return [refusal or refusal_of(error) for refusal in moved]

    async def _in_thread(self, function: Callable[[], ResultT]) -> ResultT:
        """Run a blocking function. Cancelling this waits for its end, until which the memory is in use."""
        return await wait_until_done(asyncio.get_running_loop().run_in_executor(self._threads, function))

    async def _prepared(self, task: m.CopyTask, target: CopyTarget) -> Refusal | None:
        """Ensure that the target has space and its index no entries there; a Refusal says why not."""
        entry, disk = task.entry, target.disk
        num_chunks = -(-entry.size_bytes // entry.chunk_bytes) if entry.chunk_bytes > 0 else -1
        is_inside = entry.offset + entry.size_bytes <= target.region.size_bytes
        if not is_inside or len(entry.checksums) != 4 * num_chunks:
            return Refusal("invalid_size", f"{entry.key!r} does not fit its checksums or its place")
        try:
            if disk is not None and not disk.is_provided(entry.offset, entry.size_bytes):
                await asyncio.to_thread(disk.provide, entry.offset, entry.size_bytes)
            if disk is not None:
                disk.vacate(entry.offset, entry.size_bytes)
        except MooncakeError as error:
            return refusal_of(error)
        return None

    async def _moved(
        self, loads: Sequence[_Load], target: CopyTarget, deadline: float, *, is_again: bool = False
    ) -> list[Refusal | None]:
        """Move the bytes of all tasks together, or each by itself if that fails; returns the outcomes."""
        done = await self._move(loads, target, deadline)
        if isinstance(done, Refusal):
            if len(loads) == 1:
                return [done]
            return [(await self._moved([load], target, deadline))[0] for load in loads]
        outcomes: list[Refusal | None] = []
        ends = np.cumsum([len(load.expected) for load in loads])
        for load, found in zip(loads, np.split(done, ends[:-1]), strict=True):
            refusal: Refusal | None = None
            if (found != load.expected).any():
                source = load.task.source
                where = f"{source.segment} ({source.tier})"
                reason = f"{load.task.entry.key!r} on {where} is not what its writer announced"
                refusal = Refusal("corrupt", reason)
                if not is_again:  # the error may have occurred on the path
                    refusal = (await self._moved([load], target, deadline, is_again=True))[0]
            outcomes.append(refusal)
        return outcomes

    async def _move(
        self, loads: Sequence[_Load], target: CopyTarget, deadline: float
    ) -> npt.NDArray[np.uint32] | Refusal:
        """Move all loads in one transfer; returns the checksums of all chunks, or why it failed."""
        source = loads[0].task.source
        what = f"copy of {loads[0].task.entry.key!r}"
        here = np.concatenate(
            [load.offsets + target.region.address + load.task.entry.offset for load in loads]
        )
        there = np.concatenate([load.offsets + load.task.source.address for load in loads])
        lengths = np.concatenate([load.lengths for load in loads])
        own = self._own(source.segment) if source.epoch == self._engine.epoch else None
        flush: Callable[[], None] | None = None
        if target.flushes is not None:
            flush = partial(target.flushes.data.since, target.flushes.data.num_failures)
        try:
            peer = self._engine.open(self._engine.describe()) if own is not None else await self._open(source)
            if peer is None:
                return Refusal("peer_lost", f"{what}: the node of {source.segment!r} can't be reached")
            left_s = deadline - clock.monotonic()
            if own is not None and target.disk is not None and own.kind != "file":
                # From memory to a file, the transport `file` writes directly, without a staging copy.
                write = partial(self._engine.run, Op.WRITE, peer, there, here, lengths)
                written = partial(_written, partial(write, timeout_s=left_s, checksum=True), flush)
                done = await self._in_thread(written)
            else:
                row = Op.READ, peer, here, there, lengths
                done = await self._engine.transfer(*row, timeout_s=left_s, checksum=True)
                if flush is not None and done.status == Status.OK:
                    await self._in_thread(flush)
        except MooncakeError as error:
            return refusal_of(error)
        if done.status == Status.OK and done.checksums is not None:
            return done.checksums
        self._opened.pop((source.segment, source.epoch), None)
        reason = done.reason or done.status.name.lower().replace("_", " ")
        return Refusal(CODES.get(done.status, "cancelled"), f"{what}: {reason}")

    async def _open(self, source: m.Replica) -> RemoteSegment | None:
        place = source.segment, source.epoch
        known = self._opened.get(place)
        if known is not None:
            return known
        descriptor = await self._describe(*place)
        if descriptor is None:
            return None
        self._opened = {known: peer for known, peer in self._opened.items() if known[0] != place[0]}
        self._opened[place] = self._engine.open(decode_descriptor(descriptor))
        return self._opened[place]

    async def verify(self, entry: m.SegmentEntry, target: CopyTarget, deadline: float) -> Refusal | None:
        """Check the bytes at the entry's offset against its checksums; ``corrupt``: they differ, read twice.

        Needs memory for one piece, however large the object is."""
        expected = np.frombuffer(entry.checksums[: len(entry.checksums) // 4 * 4], dtype="<u4")
        num_chunks = -(-entry.size_bytes // entry.chunk_bytes) if entry.chunk_bytes > 0 else -1
        is_inside = entry.offset + entry.size_bytes <= target.region.size_bytes
        if not is_inside or len(entry.checksums) != 4 * num_chunks:
            return Refusal("invalid_size", f"{entry.key!r} does not fit its checksums or its place")
        try:
            scratch = self._engine.register(np.zeros(PIECE_BYTES, dtype=np.uint8), is_brief=True)
        except MooncakeError as error:
            return refusal_of(error)
        try:
            for number in range(num_chunks):
                for is_again in (False, True):
                    found = await self._sum(entry, number, target.region, scratch, deadline)
                    if isinstance(found, Refusal):
                        return found
                    if found == expected[number]:
                        break
                    if is_again:
                        return Refusal("corrupt", f"chunk {number} of {entry.key!r} is not as it was written")
        finally:
            await asyncio.to_thread(self._engine.unregister, scratch)
        return None

    async def _sum(
        self, entry: m.SegmentEntry, number: int, region: Region, scratch: Region, deadline: float
    ) -> int | Refusal:
        """Checksum of one chunk, read piece by piece."""
        start = number * entry.chunk_bytes
        end = min(start + entry.chunk_bytes, entry.size_bytes)
        found: int | None = None
        peer = self._engine.open(self._engine.describe())
        for at in range(start, end, PIECE_BYTES):
            length = min(PIECE_BYTES, end - at)
            here, there = scratch.address, region.address + entry.offset + at
            columns = [np.array([value], dtype=np.uint64) for value in (here, there, length)]
            left_s = deadline - clock.monotonic()
            if left_s <= 0:
                return Refusal("expired", f"check of {entry.key!r} took too long")
            try:
                done = await self._engine.transfer(Op.READ, peer, *columns, timeout_s=left_s, checksum=True)
            except MooncakeError as error:
                return refusal_of(error)
            if done.status != Status.OK or done.checksums is None:
                return Refusal(CODES.get(done.status, "cancelled"), f"check of {entry.key!r}: {done.reason}")
            part = int(done.checksums[0])
            found = part if found is None else crc32c_combine(found, part, length)
        assert found is not None
        return found


class CoalescedFlush:
    """Coalesces flushes: all calls made while a flush is in progress share the next one.

    Called by threads, one of which runs the flush that they share. Raises what that flush raised. A flush
    that fails may have lost what others have written meanwhile, and the next one succeeds all the same:
    writers note ``num_failures`` before they write, and flush with ``since``.
    """

    def __init__(self, flush: Callable[[], None]) -> None:
        self._flush = flush
        self._changed = threading.Condition()
        self._is_running = False
        self._num_ended = 0
        self._failure: tuple[int, Exception] | None = None
        """Number of the last flush that failed, and its error."""
        self.num_failures = 0

    def __call__(self) -> None:
        with self._changed:
            # The one in progress may have begun before the caller's bytes were written.
            number = self._num_ended + 1 + self._is_running
            while self._is_running and self._num_ended < number:
                self._changed.wait()
            if self._num_ended >= number:
                if self._failure is not None and self._failure[0] >= number:
                    raise self._failure[1]
                return
            self._is_running = True
        failure: Exception | None = None
        try:
            self._flush()
        except Exception as error:
            failure = error
        with self._changed:
            self._is_running = False
            self._num_ended += 1
            if failure is not None:
                self._failure = self._num_ended, failure
                self.num_failures += 1
            self._changed.notify_all()
        if failure is not None:
            raise failure

    def since(self, num_failures: int) -> None:
        """Flush what was written after ``num_failures`` was read.

        Raises:
            StorageError: this flush failed, or another one while the bytes were written.
        """
        self()
        if self.num_failures != num_failures:
            raise StorageError("a flush failed while this was written; it must be written again")


def _written(write: Callable[[], Completion], flush: Callable[[], None] | None) -> Completion:
    """Write bytes, and flush them if required."""
    done = write()
    if flush is not None and done.status == Status.OK:
        flush()
    return done


def _entered(
    loads: Sequence[_Load], disk: Disk, outcomes: list[Refusal | None], *, is_flushed: bool
) -> list[_Load]:
    """Enter objects in the index. Returns those that it took; ``outcomes`` has why it did not take others."""
    taken: list[_Load] = []
    for load in loads:
        try:
            disk.log.hold(load.task.entry, is_flushed=is_flushed)
            taken.append(load)
        except MooncakeError as error:
            outcomes[load.place] = refusal_of(error)
    return taken


def _durable(loads: Sequence[_Load], disk: Disk) -> dict[int, m.SegmentEntry]:
    """Durable entries that the index already has of these objects, by object id."""
    ids = [load.task.entry.object_id for load in loads]
    entries, unflushed = disk.index.entries, disk.index.unflushed
    return {one: entries[one] for one in ids if one in entries and one not in unflushed}


def _settle(
    loads: Sequence[_Load],
    done: Sequence[_Load],
    earlier: dict[int, m.SegmentEntry],
    disk: Disk,
    outcomes: list[Refusal | None],
) -> None:
    """Note in the index which of the entered objects are durable; of the others it has what it had before.

    A copy that took too long may end after the master has let another one of the same object begin elsewhere
    in the segment. The index has one entry for each object, and then it is that of the other copy: this one
    must neither mark nor drop it, and is refused, because nothing leads to its bytes.
    """
    kept = {load.place for load in done}
    flushed: list[int] = []
    lost: list[int] = []
    for load in loads:
        entry = load.task.entry
        if disk.index.has(entry):
            (flushed if load.place in kept else lost).append(entry.object_id)
        elif load.place in kept:
            reason = f"{entry.key!r} was removed or copied elsewhere in the segment meanwhile"
            outcomes[load.place] = Refusal("expired", reason)
    disk.log.mark_flushed(flushed)
    try:
        disk.log.drop(lost)
        for object_id in lost:
            before = earlier.get(object_id)
            # What was entered there since was written over its bytes.
            if before is not None and not disk.index.overlapping(before.offset, before.size_bytes):
                disk.log.hold(before)
    except MooncakeError as error:  # they stay unflushed until their place is used again
        log.warning("index_entry_not_dropped", num_objects=len(lost), reason=str(error))


def refusal_of(error: MooncakeError) -> Refusal:
    """Why a copy was not made. A full disk has a code of its own: the master sends it none for a while."""
    return Refusal("no_space" if isinstance(error, OutOfSpace) else error.code, str(error))

# SPDX-License-Identifier: Apache-2.0
"""Copies replicas into space of a segment of this node, as tasks require, and verifies every copy.

Bytes go directly between the source (another node, or another tier of this one) and the target's memory or
file, those of many tasks in one transfer. The checksum of every chunk is computed on the way, and a task is
done only if the checksums are those that the object's writer announced. ``task_agent.py`` decides when tasks
run and reports their outcomes.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Sequence

import numpy as np
import numpy.typing as npt

from mooncake import clock
from mooncake.errors import MooncakeError, OutOfSpace, Refusal
from mooncake.store import messages as m
from mooncake.store.node.ssd import Disk
from mooncake.transfer import Op, Region, RemoteSegment, Status, TransferEngine, crc32c_combine
from mooncake.transfer.descriptor import decode_descriptor
from mooncake.types import Tier

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


@dataclasses.dataclass(frozen=True, slots=True)
class CopyTarget:
    """Segment that a task writes to."""

    region: Region
    tier: Tier
    disk: Disk | None
    """The SSD directory with its index, for a segment on SSD."""
    flush: Callable[[], Awaitable[None]] | None
    """Makes written bytes durable; None: not required."""
    flush_index: Callable[[], Awaitable[None]] | None = None
    """Makes index entries durable; None: not required."""


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

    async def copy(
        self, tasks: Sequence[m.CopyTask], target: CopyTarget, deadline: float
    ) -> list[Refusal | None]:
        """Run tasks with one source, together. None: every byte is in place and entered in the index."""
        outcomes: list[Refusal | None] = [await self._prepared(task, target) for task in tasks]
        loads = [_Load(place, tasks[place]) for place, refusal in enumerate(outcomes) if refusal is None]
        if not loads:
            return outcomes
        moved = await self._moved(loads, target, deadline)
        is_late = clock.monotonic() >= deadline
        good: list[_Load] = []
        for load, refusal in zip(loads, moved, strict=True):
            if refusal is None and is_late:
                refusal = Refusal("expired", f"copy of {load.task.entry.key!r} took too long")
            outcomes[load.place] = refusal
            if refusal is None:
                good.append(load)
        if target.disk is not None:
            for load, refusal in zip(good, await _entered(good, target, target.disk), strict=True):
                outcomes[load.place] = refusal
        return outcomes

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
            return _refusal_of(error)
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
        try:
            peer = self._engine.open(self._engine.describe()) if own is not None else await self._open(source)
            if peer is None:
                return Refusal("peer_lost", f"{what}: the node of {source.segment!r} can't be reached")
            row = (Op.READ, peer, here, there)
            if own is not None and target.disk is not None and own.kind != "file":
                # From memory to a file, the transport `file` writes directly, without a staging copy.
                row = (Op.WRITE, peer, there, here)
            left_s = deadline - clock.monotonic()
            done = await self._engine.transfer(*row, lengths, timeout_s=left_s, checksum=True)
        except MooncakeError as error:
            return _refusal_of(error)
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
            return _refusal_of(error)
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
                return _refusal_of(error)
            if done.status != Status.OK or done.checksums is None:
                return Refusal(CODES.get(done.status, "cancelled"), f"check of {entry.key!r}: {done.reason}")
            part = int(done.checksums[0])
            found = part if found is None else crc32c_combine(found, part, length)
        assert found is not None
        return found


class CoalescedFlush:
    """Coalesces flushes: all calls made while a flush is in progress share the next one."""

    def __init__(self, flush: Callable[[], None]) -> None:
        self._flush = flush
        self._turn = asyncio.Lock()
        self._next: asyncio.Task[None] | None = None

    async def __call__(self) -> None:
        if self._next is None:
            self._next = asyncio.create_task(self._run())
        await asyncio.shield(self._next)

    async def _run(self) -> None:
        async with self._turn:
            self._next = None
            await asyncio.to_thread(self._flush)


async def _entered(loads: Sequence[_Load], target: CopyTarget, disk: Disk) -> list[Refusal | None]:
    """Enter copied objects in the index, and make bytes and index durable if required.

    Both at the same time: two flushes of one device that run together take no longer than one. If an entry
    survives a loss of power without its bytes, it is found when the directory is opened again, because the
    index knows it as unflushed until both have ended (``ssd_index.py``).
    """
    flushes = [one for one in (target.flush, target.flush_index) if one is not None]
    outcomes: list[Refusal | None] = []
    for load in loads:
        try:
            disk.log.hold(load.task.entry, is_flushed=not flushes)
            outcomes.append(None)
        except MooncakeError as error:
            outcomes.append(_refusal_of(error))
    if not flushes:
        return outcomes
    object_ids = [load.task.entry.object_id for load in loads]
    ends = await asyncio.gather(*(flush() for flush in flushes), return_exceptions=True)
    failures = [one for one in ends if one is not None]
    if not failures:
        disk.log.mark_flushed(object_ids)
        return outcomes
    disk.log.drop(object_ids)
    for failure in failures:
        if not isinstance(failure, MooncakeError):
            raise failure
        outcomes = [_refusal_of(failure) for _ in loads]
    return outcomes


def _refusal_of(error: MooncakeError) -> Refusal:
    return Refusal("no_space" if isinstance(error, OutOfSpace) else error.code, str(error))

"""Does what a task says: copies one replica into space of a segment of this node, and believes nothing.

Bytes go straight between the source (another node, or another tier of this one) and the target's memory or
file; the transfer computes the checksum of every chunk on the way, and only an object whose checksums are
those its writer announced is reported as done. Knows segments by what transfer needs of them; when tasks
come and what is told of them is ``errands.py``'s business.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable

import numpy as np

from mooncake import clock
from mooncake.errors import MooncakeError, OutOfSpace, Refusal
from mooncake.store import messages as m
from mooncake.store.disk import Disk
from mooncake.transfer import Completion, Op, Region, Segment, Status, TransferEngine
from mooncake.transfer.segment import decode_descriptor
from mooncake.types import Tier

CODES = {
    Status.PEER_LOST: "peer_lost",
    Status.ACCESS_DENIED: "peer_lost",
    Status.PROTOCOL_ERROR: "peer_lost",
    Status.TIMED_OUT: "expired",
    Status.IO_ERROR: "io_error",
}
"""Refusal of a task whose transfer ended so."""


ATTEMPTS = 2
"""Before the source is said to be wrong: it may have been the way."""


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """Where a task writes."""

    region: Region
    tier: Tier
    disk: Disk | None
    """Of an SSD: its index."""
    flush: Callable[[], Awaitable[None]] | None
    """Makes what was written and entered durable; None: not asked for."""


class Porter:
    """Carries for all segments of a node. ``own``: which segments are this node's, with their regions.

    ``describe(segment, epoch)`` asks the master how another node is reached; None: not any more.
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
        self._opened: dict[tuple[str, int], Segment] = {}

    async def carry(self, task: m.Task, target: Target, deadline: float) -> Refusal | None:
        """None: every byte is in place, and entered where the target keeps an index."""
        try:
            return await self._carry(task, target, deadline)
        except OutOfSpace as error:
            return Refusal("no_space", str(error))
        except MooncakeError as error:
            return Refusal(error.code, str(error))

    async def _carry(self, task: m.Task, target: Target, deadline: float) -> Refusal | None:
        entry = task.entry
        expected = np.frombuffer(entry.checksums, dtype="<u4")
        if entry.offset + entry.size_bytes > target.region.size_bytes or not _fits(entry, expected):
            return Refusal("invalid_size", f"{entry.key!r} does not fit its checksums or its place")
        if target.disk is not None:
            if not target.disk.is_provided(entry.offset, entry.size_bytes):
                await asyncio.to_thread(target.disk.provide, entry.offset, entry.size_bytes)
            target.disk.vacate(entry.offset, entry.size_bytes)
        for _ in range(ATTEMPTS):
            done = await self._move(task, target, deadline)
            if done is None:
                return Refusal("peer_lost", f"the node of segment {task.source.segment!r} can't be reached")
            if done.status != Status.OK:
                reason = done.reason or done.status.name.lower().replace("_", " ")
                return Refusal(CODES.get(done.status, "cancelled"), f"copy of {entry.key!r}: {reason}")
            if done.checksums is not None and (done.checksums == expected).all():
                break
        else:
            where = f"{task.source.segment} ({task.source.tier})"
            return Refusal("corrupt", f"{entry.key!r} on {where} is not what its writer announced")
        if clock.monotonic() >= deadline:
            return Refusal("expired", f"copy of {entry.key!r} took too long")
        if target.disk is not None:
            target.disk.log.hold(entry)
            if target.flush is not None:
                try:
                    await target.flush()
                except MooncakeError:
                    target.disk.log.drop([entry.object_id])
                    raise
        return None

    async def _move(self, task: m.Task, target: Target, deadline: float) -> Completion | None:
        entry, source = task.entry, task.source
        offsets = np.arange(0, entry.size_bytes, entry.chunk_bytes, dtype=np.uint64)
        lengths = np.minimum(np.uint64(entry.chunk_bytes), np.uint64(entry.size_bytes) - offsets)
        here = np.uint64(target.region.address + entry.offset) + offsets
        there = np.uint64(source.address) + offsets
        own = self._own(source.segment) if source.epoch == self._engine.epoch else None
        left_s = deadline - clock.monotonic()
        if own is not None and target.disk is not None and own.kind != "file":
            # From memory to a file the path `file` leads the other way, without staging between.
            home = self._engine.open(self._engine.describe())
            moving = self._engine.transfer(
                Op.WRITE, home, there, here, lengths, timeout_s=left_s, checksum=True
            )
            return await moving
        peer = self._engine.open(self._engine.describe()) if own is not None else await self._open(source)
        if peer is None:
            return None
        done = await self._engine.transfer(
            Op.READ, peer, here, there, lengths, timeout_s=deadline - clock.monotonic(), checksum=True
        )
        if done.status != Status.OK:
            self._opened.pop((source.segment, source.epoch), None)
        return done

    async def _open(self, source: m.Replica) -> Segment | None:
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


class Together:
    """Flushes for whoever asks; those who ask while one is under way share the next."""

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


def _fits(entry: m.Entry, expected: np.ndarray[tuple[int], np.dtype[np.uint32]]) -> bool:
    return entry.chunk_bytes > 0 and len(expected) == -(-entry.size_bytes // entry.chunk_bytes)

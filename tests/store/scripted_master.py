# SPDX-License-Identifier: Apache-2.0
"""A master that mounts every node and sends what the test orders: parks Polls, keeps reports."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from mooncake.rpc import Call, RpcServer
from mooncake.store import messages as m
from mooncake.store.ha.leader_search import Leads, WhoLeads
from mooncake.transfer import crc32c

CHUNK_BYTES = 1 << 20


class ScriptedMaster:
    def __init__(self) -> None:
        handlers: dict[type[msgspec.Struct], Callable[[Any, Call], Any]] = {
            m.Mount: self._mount,
            m.Heartbeat: lambda message, call: m.Beat(message.segment in self.mounts),
            m.Unmount: self._unmount,
            m.ReportContents: self._report,
            m.Poll: self._poll,
            m.DescribeSegments: self._describe,
            WhoLeads: lambda message, call: Leads("", 1, is_here=True),
        }
        self._rpc = RpcServer(handlers)
        self.mounts: dict[str, m.Mount] = {}
        self.asks: dict[str, bool] = {}
        """Segments whose Mount is answered with ``wants_report``."""
        self.reports: dict[str, list[m.SegmentEntry]] = {}
        self.unwanted: list[int] = []
        self.unmounted: list[str] = []
        self.parked: dict[str, Call] = {}
        self.done: dict[int, m.TaskDone] = {}
        self.checked: dict[int, m.TaskDone] = {}
        self.seen: dict[str, int] = {}
        self._task_id = 0
        self._last_change: dict[str, int] = {}
        self._changed = asyncio.Condition()

    async def start(self) -> str:
        return f"127.0.0.1:{await self._rpc.start('127.0.0.1', 0)}"

    async def close(self) -> None:
        await self._rpc.close()

    async def until_polled(self, segment: str) -> m.Mount:
        """Wait until the segment's node has polled."""
        await self._until(lambda: segment in self.parked)
        return self.mounts[segment]

    async def until_reported(self, segment: str) -> None:
        await self._until(lambda: segment in self.reports)

    async def run(
        self, segment: str, entry: m.SegmentEntry, source: m.Replica, deadline_s: float = 20.0
    ) -> m.TaskDone:
        """Have the node copy; returns the result."""
        return (await self.run_all(segment, [(entry, source)], deadline_s))[0]

    async def run_all(
        self, segment: str, pairs: list[tuple[m.SegmentEntry, m.Replica]], deadline_s: float = 20.0
    ) -> list[m.TaskDone]:
        """The same for many tasks at once."""
        first = self._task_id + 1
        self._task_id += len(pairs)
        tasks = [m.CopyTask(first + i, entry, source, deadline_s) for i, (entry, source) in enumerate(pairs)]
        await self._answer(segment, [], tasks)
        await self._until(lambda: all(task.task_id in self.done for task in tasks))
        return [self.done[task.task_id] for task in tasks]

    async def check(self, segment: str, entry: m.SegmentEntry, deadline_s: float = 20.0) -> m.TaskDone:
        """Have the node check a replica; returns the result."""
        self._task_id += 1
        number = self._task_id
        await self._answer(segment, [], [], [m.Check(number, entry, deadline_s)])
        await self._until(lambda: number in self.checked)
        return self.checked[number]

    async def change(self, segment: str, changes: list[m.SegmentEntry | int], skip: int = 0) -> None:
        """Send changes to the node (after losing ``skip`` others), and wait until it has noted them."""
        self._last_change[segment] = self._last_change.get(segment, 0) + skip
        await self._answer(segment, changes, [])
        await self._until(lambda: self.seen[segment] == self._last_change[segment])

    async def _answer(
        self,
        segment: str,
        changes: list[m.SegmentEntry | int],
        tasks: list[m.CopyTask],
        checks: list[m.Check] | None = None,
    ) -> None:
        await self.until_polled(segment)
        first = self._last_change.get(segment, 0) + 1
        self._last_change[segment] = first - 1 + len(changes)
        self.parked.pop(segment).reply(m.Polled(first, changes, tasks, checks=checks or []))

    async def _until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20), self._changed:
            await self._changed.wait_for(condition)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _mount(self, message: m.Mount, call: Call) -> m.Mounted:
        self.mounts[message.segment] = message
        self.parked.pop(message.segment, None)
        return m.Mounted(None, 0, 0.05, 1.0, wants_report=self.asks.get(message.segment, False))

    def _unmount(self, message: m.Unmount, call: Call) -> m.Beat:
        self.unmounted.append(message.segment)
        return m.Beat(True)

    async def _report(self, message: m.ReportContents, call: Call) -> m.Reported:
        self.reports.setdefault(message.segment, []).extend(message.entries)
        await self._notify()
        return m.Reported(self.unwanted if message.is_last else [])

    async def _poll(self, message: m.Poll, call: Call) -> None:
        older = self.parked.pop(message.segment, None)
        if older is not None:
            older.reply(m.Polled(message.seen + 1, [], []))
        self.parked[message.segment] = call
        self.seen[message.segment] = message.seen
        self.done |= {done.task_id: done for done in message.done}
        self.checked |= {done.task_id: done for done in message.checked}
        await self._notify()

    def _describe(self, message: m.DescribeSegments, call: Call) -> m.SegmentDescriptors:
        found = [self.mounts.get(name) for name, _ in message.segments]
        return m.SegmentDescriptors([None if mount is None else mount.descriptor for mount in found])


def entry_of(
    data: bytes, offset: int, object_id: int = 1, chunk_bytes: int = 1 << 20, key: str = "k"
) -> m.SegmentEntry:
    """The entry of a segment that has ``data`` at ``offset``."""
    chunks = (data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES))
    sums = np.array([crc32c(chunk) for chunk in chunks], dtype="<u4").tobytes()
    return m.SegmentEntry("k", object_id, len(data), CHUNK_BYTES, sums, offset)

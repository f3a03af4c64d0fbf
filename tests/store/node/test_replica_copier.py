# SPDX-License-Identifier: Apache-2.0
"""Durable copies of one object whose flushes end in another order than they began, into a real index."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mooncake import clock
from mooncake.errors import Refusal
from mooncake.files import LockedDirectory
from mooncake.store import messages as m
from mooncake.store.node.replica_copier import CoalescedFlush, CopyTarget, Flushes, ReplicaCopier
from mooncake.store.node.ssd_index_log import SsdIndexLog
from mooncake.transfer import Completion, Status
from mooncake.types import Tier

CHECKSUMS = b"crc!"


class OpenDisk:
    """The part of ``Disk`` that a copier uses: space everywhere, and an index in a file."""

    def __init__(self, path: Path) -> None:
        self._folder = LockedDirectory(path, "path")
        self._folder.take()
        self.log = SsdIndexLog(self._folder)

    @property
    def index(self) -> Any:
        return self.log.index

    def is_provided(self, offset: int, size_bytes: int) -> bool:
        return True

    def vacate(self, offset: int, size_bytes: int) -> None:
        self.log.drop(self.index.overlapping(offset, size_bytes))

    def close(self) -> None:
        self.log.close()
        self._folder.close()


class Node:
    """A copier whose transfers move nothing, and whose flushes of data end when the test lets them."""

    def __init__(self, path: Path) -> None:
        self.disk = OpenDisk(path)
        self.begun = [threading.Event() for _ in range(2)]
        self.may_end = [threading.Event() for _ in range(2)]
        self._num_flushes = 0
        region: Any = SimpleNamespace(address=0, size_bytes=1 << 20, kind="memory")
        engine: Any = SimpleNamespace(
            epoch=1, describe=lambda: None, open=lambda descriptor: "peer", run=self._run
        )

        async def describe(segment: str, epoch: int) -> None:
            raise AssertionError("the source is on this node")

        disk: Any = self.disk
        self._copier = ReplicaCopier(engine, lambda name: region, describe)
        flushes = Flushes(CoalescedFlush(self._flush), CoalescedFlush(self.disk.log.flush))
        self._target = CopyTarget(region, Tier.SSD, disk, flushes)

    def _run(self, *columns: object, timeout_s: float, checksum: bool) -> Completion:
        checksums: Any = np.frombuffer(CHECKSUMS, dtype="<u4")
        return Completion(status=Status.OK, checksums=checksums)

    def _flush(self) -> None:
        number, self._num_flushes = self._num_flushes, self._num_flushes + 1
        if number < len(self.may_end):
            self.begun[number].set()
            assert self.may_end[number].wait(20)

    async def begin(self, entry: m.SegmentEntry, left_s: float) -> asyncio.Task[list[Refusal | None]]:
        """Begin to copy; on return the entry is in the index."""
        task = m.CopyTask(1, entry, m.Replica("a", 1, 0), left_s)
        deadline = clock.monotonic() + left_s
        copying = asyncio.create_task(self._copier.copy([task], self._target, deadline))
        await asyncio.sleep(0)
        assert self.disk.index.entries[entry.object_id] == entry
        return copying

    async def until_flushing(self, number: int) -> None:
        assert await asyncio.to_thread(self.begun[number].wait, 20)

    def close(self) -> None:
        for event in self.may_end:
            event.set()
        self._copier.close()
        self.disk.close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path / "ssd")
    yield node
    node.close()


def entry_at(offset: int, object_id: int = 7) -> m.SegmentEntry:
    return m.SegmentEntry("k", object_id, 100, 100, CHECKSUMS, offset, is_durable=True)


async def test_a_copy_that_ends_late_leaves_the_entry_of_the_next_one(node: Node, tmp_path: Path) -> None:
    """The master has timed the first one out and planned it again, elsewhere in the segment."""
    first = await node.begin(entry_at(0), left_s=0.0)
    await node.until_flushing(0)
    second = await node.begin(entry_at(4096), left_s=60.0)
    for event in node.may_end:
        event.set()
    (refusal,) = await first
    assert refusal is not None and refusal.code == "expired"
    assert await second == [None]
    assert node.disk.index.entries == {7: entry_at(4096)} and not node.disk.index.unflushed
    node.disk.close()
    node.disk = OpenDisk(tmp_path / "ssd")
    assert node.disk.index.entries == {7: entry_at(4096)}, "a restart finds what was reported as durable"


async def test_a_copy_in_time_does_not_make_the_entry_of_another_one_durable(node: Node) -> None:
    first = await node.begin(entry_at(0), left_s=60.0)
    await node.until_flushing(0)
    second = await node.begin(entry_at(4096), left_s=60.0)
    node.may_end[0].set()
    (refusal,) = await first
    assert refusal is not None and refusal.code == "expired", "nothing leads to its bytes"
    assert list(node.disk.index.unflushed) == [7], "the bytes of the other copy are still being flushed"
    node.may_end[1].set()
    assert await second == [None] and not node.disk.index.unflushed


async def test_a_copy_that_fails_leaves_what_the_index_had_before(node: Node) -> None:
    node.disk.log.hold(entry_at(8192))
    copying = await node.begin(entry_at(0), left_s=0.0)
    node.may_end[0].set()
    (refusal,) = await copying
    assert refusal is not None
    assert node.disk.index.entries == {7: entry_at(8192)} and not node.disk.index.unflushed


async def test_an_earlier_entry_does_not_return_where_another_object_was_written(node: Node) -> None:
    node.disk.log.hold(entry_at(8192))
    copying = await node.begin(entry_at(0), left_s=0.0)
    await node.until_flushing(0)
    other = await node.begin(entry_at(8200, object_id=8), left_s=60.0)
    for event in node.may_end:
        event.set()
    (refusal,) = await copying
    assert refusal is not None and await other == [None]
    assert node.disk.index.entries == {8: entry_at(8200, object_id=8)}

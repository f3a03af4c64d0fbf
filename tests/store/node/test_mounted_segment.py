# SPDX-License-Identifier: Apache-2.0
"""Tasks and journals of a real node with all its tiers, for a master whose replies the test defines."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from mooncake.errors import InvalidArgument, OutOfSpace, StorageError, Unavailable
from mooncake.files import File
from mooncake.metrics import registry
from mooncake.store import messages as m
from mooncake.store.node.node import Node, NodeSettings
from mooncake.store.node.replica_copier import CoalescedFlush
from mooncake.store.node.ssd import Disk
from mooncake.store.node.ssd_index_log import SsdIndexLog
from mooncake.transfer import Completion, Op, Region, Status, TransferEngine, TransferSettings
from mooncake.types import Tier
from tests.contract import cuda_double
from tests.store.scripted_master import ScriptedMaster, entry_of

MIB = 1 << 20
SIZE = 3 * MIB + 777
DOWN = {"source": "memory", "target": "ssd"}


@pytest.fixture
async def master() -> AsyncIterator[ScriptedMaster]:
    master = ScriptedMaster()
    yield master
    await master.close()


@contextlib.asynccontextmanager
async def node_of(address: str, path: Path | None, name: str = "n") -> AsyncIterator[Node]:
    settings = NodeSettings(
        master=address,
        name=name,
        pool_size_bytes=16 * MIB,
        huge_pages=False,
        ssd_path=str(path or ""),
        ssd_size_bytes=16 * MIB if path is not None else 0,
        log_blocks=True,
    )
    node = Node(settings)
    try:
        await node.start()
        yield node
    finally:
        await node.close()


def content(size: int = SIZE, seed: int = 1) -> bytes:
    return np.random.default_rng(seed).bytes(size)


def place(mount: m.Mount, offset: int) -> m.Replica:
    return m.Replica(mount.segment, mount.epoch, mount.address + offset, mount.tier)


def memory_of(node: Node) -> Region:
    return node.segments["n"].config.region


def disk_of(node: Node) -> Disk:
    disk = node.segments["n/ssd"].config.disk
    assert disk is not None
    return disk


async def test_a_node_mounts_every_tier(master: ScriptedMaster, tmp_path: Path) -> None:
    async with node_of(await master.start(), tmp_path) as node:
        await node.mounted.wait()
        memory, ssd = master.mounts["n"], master.mounts["n/ssd"]
        assert (memory.tier, memory.node, memory.content_id) == (Tier.MEMORY, "n", memory.epoch)
        assert (ssd.tier, ssd.node, ssd.epoch) == (Tier.SSD, "n", memory.epoch)
        assert ssd.content_id not in (0, ssd.epoch) and ssd.size_bytes == 16 * MIB
    assert master.unmounted == ["n"], "content on SSD survives"


async def test_copies_to_ssd_and_back(
    master: ScriptedMaster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    data = content()
    async with node_of(await master.start(), tmp_path) as node:
        memory = await master.until_polled("n")
        ssd = await master.until_polled("n/ssd")
        memory_of(node).view()[4096 : 4096 + SIZE] = data
        copied = registry.get_sample_value("mooncake_store_copied_bytes_total", DOWN) or 0
        down = entry_of(data, 8192)
        assert (await master.run("n/ssd", down, place(memory, 4096))).refusal is None
        assert list(node.segments["n/ssd"].entries()) == [down]
        assert registry.get_sample_value("mooncake_store_copied_bytes_total", DOWN) == copied + SIZE
        up = entry_of(data, 8 * MIB)
        assert (await master.run("n", up, place(ssd, 8192))).refusal is None
        assert bytes(memory_of(node).view()[8 * MIB : 8 * MIB + SIZE]) == data
        await master.change("n", [up])
        assert list(node.segments["n"].entries()) == [up]
    events = [record.getMessage() for record in caplog.records]
    assert events.count("block_write") == 2 and events.count("block_read") == 2
    fields = next(r.__dict__["fields"] for r in caplog.records if r.getMessage() == "block_write")
    assert fields == {"key": "k", "bytes": SIZE, "tier": "ssd", "node": "n/ssd"}


async def test_content_on_ssd_is_reported_after_a_restart(master: ScriptedMaster, tmp_path: Path) -> None:
    address, data = await master.start(), content()
    async with node_of(address, tmp_path) as node:
        memory = await master.until_polled("n")
        memory_of(node).view()[:SIZE] = data
        entries = [entry_of(data, 4 * MIB * i, object_id=i) for i in range(3)]
        for entry in entries:
            assert (await master.run("n/ssd", entry, place(memory, 0))).refusal is None
        await master.change("n/ssd", [1])
        content_id = master.mounts["n/ssd"].content_id
    master.asks["n/ssd"], master.unwanted = True, [2]
    master.parked.clear()
    async with node_of(address, tmp_path) as node:
        ssd = await master.until_polled("n/ssd")
        assert ssd.content_id == content_id and ssd.epoch != memory.epoch
        assert master.reports["n/ssd"] == [entries[0], entries[2]]
        assert list(node.segments["n/ssd"].entries()) == [entries[0]], "the master did not want the other"
        await master.until_polled("n")
        assert (await master.run("n", entry_of(data, 0), place(ssd, 0))).refusal is None
        assert bytes(memory_of(node).view()[:SIZE]) == data


async def test_a_copy_from_another_node(master: ScriptedMaster, tmp_path: Path) -> None:
    address, data = await master.start(), content()
    async with node_of(address, tmp_path / "n") as node, node_of(address, tmp_path / "o", "o") as other:
        memory = await master.until_polled("n")
        await master.until_polled("o")
        memory_of(node).view()[:SIZE] = data
        assert (await master.run("o", entry_of(data, 4096), place(memory, 0))).refusal is None
        assert bytes(other.segments["o"].config.region.view()[4096 : 4096 + SIZE]) == data
        assert (await master.run("o/ssd", entry_of(data, 0), place(memory, 0))).refusal is None
        ssd = await master.until_polled("o/ssd")
        assert (await master.run("n/ssd", entry_of(data, 4096), place(ssd, 0))).refusal is None
        assert (await master.run("n", entry_of(data, 4 * MIB), place(ssd, 0))).refusal is None
        assert bytes(memory_of(node).view()[4 * MIB : 4 * MIB + SIZE]) == data


async def test_wrong_bytes_are_not_copied(master: ScriptedMaster, tmp_path: Path) -> None:
    """This holds for memory and SSD as the source; the index has no entry for a failed copy."""
    data = content()
    async with node_of(await master.start(), tmp_path) as node:
        memory, ssd = await master.until_polled("n"), await master.until_polled("n/ssd")
        memory_of(node).view()[:SIZE] = data
        entry = entry_of(data, 0)
        assert (await master.run("n/ssd", entry, place(memory, 0))).refusal is None
        with (tmp_path / "mooncake.data").open("r+b") as file:
            file.seek(2 * MIB)
            file.write(bytes([data[2 * MIB] ^ 1]))
        for segment, source in (("n", place(ssd, 0)), ("n/ssd", place(memory, 1))):
            done = await master.run(segment, msgspec.structs.replace(entry, offset=8 * MIB), source)
            assert done.refusal is not None and done.refusal.code == "corrupt"
        assert list(node.segments["n/ssd"].entries()) == [entry]


async def test_bytes_changed_in_transit_are_read_again(
    master: ScriptedMaster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = content()
    async with node_of(await master.start(), tmp_path) as node:
        memory = await master.until_polled("n")
        memory_of(node).view()[:SIZE] = data
        run, moved = node.engine.run, []

        def flip(*rows: Any, **how: Any) -> Completion:
            done = run(*rows, **how)
            moved.append(done)
            if len(moved) > 1:
                return done
            return Completion(checksums=[0] * len(rows[4]), num_bytes=done.num_bytes)

        monkeypatch.setattr(node.engine, "run", flip)
        assert (await master.run("n/ssd", entry_of(data, 0), place(memory, 0))).refusal is None
        assert len(moved) == 2


async def test_a_node_verifies_its_own_replicas(master: ScriptedMaster, tmp_path: Path) -> None:
    """An object of several chunks, in memory and on SSD; a corrupt one stays until the master drops it."""
    data = content()
    async with node_of(await master.start(), tmp_path) as node:
        memory = await master.until_polled("n")
        await master.until_polled("n/ssd")
        memory_of(node).view()[4096 : 4096 + SIZE] = data
        on_ssd, in_memory = entry_of(data, 0), entry_of(data, 4096)
        assert (await master.run("n/ssd", on_ssd, place(memory, 4096))).refusal is None
        num_regions = len(node.engine.describe().regions)
        for segment, entry in (("n", in_memory), ("n/ssd", on_ssd)):
            assert (await master.check(segment, entry)).refusal is None
        memory_of(node).view()[4096 + SIZE - 1] ^= 1
        with (tmp_path / "mooncake.data").open("r+b") as file:
            file.seek(2 * MIB)
            file.write(bytes([data[2 * MIB] ^ 1]))
        for segment, entry in (("n", in_memory), ("n/ssd", on_ssd)):
            refusal = (await master.check(segment, entry)).refusal
            assert refusal is not None and refusal.code == "corrupt"
        assert list(node.segments["n/ssd"].entries()) == [on_ssd]
        outside = (await master.check("n", msgspec.structs.replace(in_memory, offset=16 * MIB))).refusal
        assert outside is not None and outside.code == "invalid_size"
        late = (await master.check("n", in_memory, deadline_s=0.0)).refusal
        assert late is not None and late.code == "expired"
        assert len(node.engine.describe().regions) == num_regions, "the scratch region is unregistered"


@pytest.mark.parametrize(("num_flips", "code"), [(1, ""), (2, "corrupt")])
async def test_a_wrong_chunk_is_read_twice_before_the_replica_is_corrupt(
    master: ScriptedMaster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_flips: int, code: str
) -> None:
    data = content()
    async with node_of(await master.start(), None) as node:
        await master.until_polled("n")
        memory_of(node).view()[:SIZE] = data
        transfer, moved = node.engine.transfer, []

        async def flip(*rows: Any, **how: Any) -> Completion:
            done = await transfer(*rows, **how)
            moved.append(done)
            if len(moved) > num_flips:
                return done
            return Completion(checksums=[0] * len(rows[4]), num_bytes=done.num_bytes)

        monkeypatch.setattr(node.engine, "transfer", flip)
        refusal = (await master.check("n", entry_of(data, 0))).refusal
        assert ("" if refusal is None else refusal.code) == code


class CountingCondition(threading.Condition):
    """Counts the waits that have begun."""

    def __init__(self) -> None:
        super().__init__()
        self.num_waits = 0

    def wait(self, timeout: float | None = None) -> bool:
        self.num_waits += 1
        return super().wait(timeout)


def until_waiting(together: CoalescedFlush, num_waits: int) -> None:
    """Return when so many callers wait for the flush in progress to end."""
    counting, deadline = together._changed, time.monotonic() + 10
    assert isinstance(counting, CountingCondition)
    while counting.num_waits < num_waits:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_flushes_are_shared() -> None:
    """All calls made while a flush is in progress wait for the same next one."""
    running, going_on, count = threading.Event(), threading.Event(), list[int]()

    def flush() -> None:
        count.append(1)
        running.set()
        assert going_on.wait(10)

    together = CoalescedFlush(flush)
    together._changed = CountingCondition()
    with ThreadPoolExecutor(6) as threads:
        first = threads.submit(together)
        assert running.wait(10)
        others = [threads.submit(together) for _ in range(5)]
        until_waiting(together, 5)
        assert not first.done() and len(count) == 1
        going_on.set()
        for one in (first, *others):
            one.result(10)
    assert len(count) == 2


def test_a_flush_that_fails_fails_for_all_that_share_it_and_for_no_later_one() -> None:
    running, going_on, failures = threading.Event(), threading.Event(), [StorageError("gone")] * 2

    def flush() -> None:
        running.set()
        assert going_on.wait(10)
        if failures:
            raise failures.pop()

    together = CoalescedFlush(flush)
    together._changed = CountingCondition()
    with ThreadPoolExecutor(4) as threads:
        first = threads.submit(together)
        assert running.wait(10)
        others = [threads.submit(together) for _ in range(3)]
        until_waiting(together, 3)
        going_on.set()
        assert isinstance(first.exception(10), StorageError)
        assert all(isinstance(one.exception(10), StorageError) for one in others)
    assert not failures
    together()


def test_bytes_written_while_a_flush_failed_are_not_durable_by_the_next_one() -> None:
    failures = [StorageError("gone")]

    def flush() -> None:
        if failures:
            raise failures.pop()

    together = CoalescedFlush(flush)
    before = together.num_failures
    with pytest.raises(StorageError, match="gone"):
        together()
    with pytest.raises(StorageError, match="written again"):
        together.since(before)
    together.since(together.num_failures)


async def test_an_object_is_reported_only_when_bytes_and_entry_are_durable(
    master: ScriptedMaster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are flushed at the same time; until both have ended, another master must not learn of it."""
    data = content()
    both, going_on = threading.Barrier(3), threading.Event()
    flush, flush_index = Disk.flush, SsdIndexLog.flush

    def slow(self: Disk) -> None:
        both.wait(20)
        flush(self)

    def slow_index(self: SsdIndexLog) -> None:
        both.wait(20)
        assert going_on.wait(20)
        flush_index(self)

    monkeypatch.setattr(Disk, "flush", slow)
    monkeypatch.setattr(SsdIndexLog, "flush", slow_index)
    async with node_of(await master.start(), tmp_path) as node:
        memory = await master.until_polled("n")
        memory_of(node).view()[:SIZE] = data
        running = asyncio.create_task(master.run("n/ssd", entry_of(data, 0), place(memory, 0)))
        await asyncio.to_thread(both.wait, 20)  # both flushes are in progress
        index = disk_of(node).index
        assert list(index.entries) == [1] == list(index.unflushed)
        assert list(node.segments["n/ssd"].entries()) == [] and not running.done()
        going_on.set()
        assert (await running).refusal is None
        assert not index.unflushed
        assert list(node.segments["n/ssd"].entries()) == [entry_of(data, 0)]


@pytest.mark.parametrize("which", [Disk, SsdIndexLog])
async def test_what_could_not_be_flushed_is_refused_and_not_held(
    master: ScriptedMaster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: type
) -> None:
    data, flush = content(), which.flush  # type: ignore[attr-defined]
    failures = [True]

    def sometimes(self: object) -> None:
        if failures:
            raise StorageError("the disk is gone")
        flush(self)

    monkeypatch.setattr(which, "flush", sometimes)
    async with node_of(await master.start(), tmp_path) as node:
        memory = await master.until_polled("n")
        memory_of(node).view()[:SIZE] = data
        pairs = [(entry_of(data, at * 4 * MIB, object_id=at + 1), place(memory, 0)) for at in range(2)]
        done = await master.run_all("n/ssd", pairs)
        assert [one.refusal is not None and "is gone" in one.refusal.reason for one in done] == [True, True]
        assert list(node.segments["n/ssd"].entries()) == [] == list(disk_of(node).index.entries)
        failures.clear()
        assert (await master.run("n/ssd", *pairs[0])).refusal is None
        assert list(node.segments["n/ssd"].entries()) == [pairs[0][0]]


async def test_overwritten_objects_are_dropped_from_the_index(master: ScriptedMaster, tmp_path: Path) -> None:
    """This holds even when the copy that overwrites them fails."""
    data = content()
    async with node_of(await master.start(), tmp_path) as node:
        memory = await master.until_polled("n")
        memory_of(node).view()[:SIZE] = data
        assert (await master.run("n/ssd", entry_of(data, 0), place(memory, 0))).refusal is None
        other = entry_of(data, MIB, object_id=2)
        done = await master.run("n/ssd", other, place(memory, 1))
        assert done.refusal is not None and list(node.segments["n/ssd"].entries()) == []


async def test_many_tasks_are_moved_together_and_fail_separately(
    master: ScriptedMaster, tmp_path: Path
) -> None:
    """A corrupt task, one that does not fit and one without its source do not affect the others."""
    size, count = 100_000, 40
    async with node_of(await master.start(), tmp_path) as node:
        memory = await master.until_polled("n")
        blocks = [content(size, seed) for seed in range(count)]
        for number, block in enumerate(blocks):
            memory_of(node).view()[number * size : (number + 1) * size] = block
        memory_of(node).view()[7 * size] ^= 1
        step = 102_400
        pairs = [
            (entry_of(block, number * step, number), place(memory, number * size))
            for number, block in enumerate(blocks)
        ]
        pairs[9] = entry_of(blocks[9], 16 * MIB - 10, 9), pairs[9][1]
        pairs[11] = pairs[11][0], m.Replica("gone", 5, 4096)
        done = await master.run_all("n/ssd", pairs)
        refused = {number: one.refusal.code for number, one in enumerate(done) if one.refusal is not None}
        assert refused == {7: "corrupt", 9: "invalid_size", 11: "peer_lost"}
        assert [entry.object_id for entry in node.segments["n/ssd"].entries()] == [
            number for number in range(count) if number not in refused
        ]
        ssd = await master.until_polled("n/ssd")
        back = [
            (entry_of(block, 8 * MIB + number * step, number), place(ssd, number * step))
            for number, block in enumerate(blocks)
            if number not in refused
        ]
        assert not any(one.refusal for one in await master.run_all("n", back))
        for entry, _ in back:
            there = memory_of(node).view()[entry.offset : entry.offset + size]
            assert bytes(there) == blocks[entry.object_id]


async def test_missing_sources_and_invalid_offsets_are_refused(
    master: ScriptedMaster, tmp_path: Path
) -> None:
    async with node_of(await master.start(), tmp_path):
        memory = await master.until_polled("n")
        entry = entry_of(content(), 0)
        gone = await master.run("n", entry, m.Replica("gone", 5, 4096))
        assert gone.refusal is not None and gone.refusal.code == "peer_lost"
        late = await master.run("n", entry, place(memory, 8 * MIB), deadline_s=0.0)
        assert late.refusal is not None and late.refusal.code == "expired"
        beyond = await master.run("n", entry_of(content(), 15 * MIB), place(memory, 0))
        assert beyond.refusal is not None and beyond.refusal.code == "invalid_size"


async def test_a_full_disk_refuses_a_task_and_keeps_its_content(
    master: ScriptedMaster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = content()
    async with node_of(await master.start(), tmp_path) as node:
        memory = await master.until_polled("n")
        memory_of(node).view()[:SIZE] = data
        first = entry_of(data, 0)
        assert (await master.run("n/ssd", first, place(memory, 0))).refusal is None
        disk = node.segments["n/ssd"].config.disk
        assert disk is not None

        def full(offset: int, size_bytes: int) -> None:
            raise OutOfSpace("no room")

        monkeypatch.setattr(disk, "is_provided", lambda *_: False)
        monkeypatch.setattr(disk, "provide", full)
        done = await master.run("n/ssd", entry_of(data, 8 * MIB, 2), place(memory, 0))
        assert done.refusal is not None and done.refusal.code == "no_space"
        assert list(node.segments["n/ssd"].entries()) == [first]


async def test_lost_changes_cause_a_report(master: ScriptedMaster, tmp_path: Path) -> None:
    async with node_of(await master.start(), tmp_path) as node:
        await master.until_polled("n")
        entries = [entry_of(b"x", 4096 * i, i) for i in range(3)]
        await master.change("n", [entries[0], entries[1]])
        master.unwanted = [0]
        await master.change("n", [entries[2]], skip=5)
        await master.until_reported("n")
        assert master.reports["n"] == entries
        async with asyncio.timeout(10):
            while [entry.object_id for entry in node.segments["n"].entries()] != [1, 2]:  # noqa: ASYNC110
                await asyncio.sleep(0.005)


async def test_segments_come_and_go_at_run_time(master: ScriptedMaster) -> None:
    async with node_of(await master.start(), None) as node:
        region = node.engine.allocate(MIB)
        node.mount_region(region, "extra")
        await master.until_polled("extra")
        assert master.mounts["extra"].node == "n"
        with pytest.raises(InvalidArgument, match="no other segment"):
            node.mount_region(region, "extra")
        await node.unmount("extra", grace_s=0.01)
        assert master.unmounted == ["extra"] and list(node.segments) == ["n"]
        with pytest.raises(InvalidArgument, match="name of a segment"):
            await node.unmount("extra")


async def test_an_engine_can_be_shared(master: ScriptedMaster, tmp_path: Path) -> None:
    """It stays open when the node is closed, without the node's regions."""
    address = await master.start()
    async with node_of(address, None) as host:
        settings = NodeSettings(
            master=address, name="guest", pool_size_bytes=0, ssd_path=str(tmp_path), ssd_size_bytes=MIB
        )
        node = Node(settings, engine=host.engine)
        await node.start()
        await master.until_polled("guest/ssd")
        await node.close()
        mine = host.engine.open(host.engine.describe())
        region = memory_of(host)
        assert len(mine.descriptor.regions) == 1
        done = host.engine.run(Op.READ, mine, [region.address], [region.address + 4096], [4096])
        assert done.status == Status.OK


async def test_device_memory_is_a_tier(master: ScriptedMaster, tmp_path: Path) -> None:
    """Copies with a test double of the driver: to the device, back, and from it to the SSD."""
    if not cuda_double.built():
        pytest.skip("no C++ compiler for the test double of the CUDA driver; install g++")
    address, data = await master.start(), content()
    settings = NodeSettings(
        master=address,
        name="n",
        pool_size_bytes=16 * MIB,
        hbm_size_bytes=8 * MIB,
        ssd_path=str(tmp_path),
        ssd_size_bytes=16 * MIB,
        huge_pages=False,
    )
    with TransferEngine(TransferSettings(cuda_library=str(cuda_double.LIBRARY))) as engine:
        node = Node(settings, engine)
        await node.start()
        memory, device = await master.until_polled("n"), await master.until_polled("n/hbm")
        ssd = await master.until_polled("n/ssd")
        assert device.tier is Tier.DEVICE and node.segments["n/hbm"].config.region.kind == "cuda:0"
        memory_of(node).view()[:SIZE] = data
        for target, offset, source in (
            ("n/hbm", 4096, place(memory, 0)),
            ("n", 4 * MIB, place(device, 4096)),
            ("n/ssd", 0, place(device, 4096)),
            ("n/hbm", 4 * MIB, place(ssd, 0)),
        ):
            assert (await master.run(target, entry_of(data, offset), source)).refusal is None, target
        assert bytes(memory_of(node).view()[4 * MIB : 4 * MIB + SIZE]) == data
        await node.close()


async def test_a_node_without_devices_fails_with_the_reason(master: ScriptedMaster) -> None:
    settings = NodeSettings(master=await master.start(), pool_size_bytes=0, hbm_size_bytes=MIB)
    with TransferEngine(TransferSettings(cuda_library="libnothing.so")) as engine:
        node = Node(settings, engine)
        with pytest.raises(Unavailable, match="libnothing"):
            await node.start()
        await node.close()


async def test_entries_that_do_not_fit_are_refused(master: ScriptedMaster, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="ssd_size_bytes is 0"):
        NodeSettings(ssd_path="/somewhere")
    with pytest.raises(InvalidArgument, match="pool_size_bytes is 7"):
        NodeSettings(pool_size_bytes=7)
    file = tmp_path / "file"
    file.touch()
    node = Node(NodeSettings(pool_size_bytes=0, ssd_path=str(file), ssd_size_bytes=MIB))
    with pytest.raises(InvalidArgument, match="a directory"):
        await node.start()
    await node.close()


async def test_a_change_that_the_disk_refuses_is_retried_before_the_next_task(
    master: ScriptedMaster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The master considers the change written."""
    monkeypatch.setattr("mooncake.store.node.mounted_segment.RETRY_S", 0.01)
    data = content(1000)
    async with node_of(await master.start(), tmp_path) as node:
        mount = await master.until_polled("n")
        await master.until_polled("n/ssd")
        memory_of(node).view()[: len(data)] = data
        disk = node.segments["n/ssd"].config.disk
        assert disk is not None
        source, entry = place(mount, 0), entry_of(data, 0, 1)
        assert (await master.run("n/ssd", entry, source)).refusal is None
        drop, is_full, is_noted = disk.log.drop, True, asyncio.Event()

        def refuse(object_ids: list[int]) -> None:
            if is_full:
                raise OutOfSpace("the disk is full")
            drop(object_ids)
            is_noted.set()

        monkeypatch.setattr(disk.log, "drop", refuse)
        await master.change("n/ssd", [1])
        done = await master.run("n/ssd", entry_of(data, 8192, 2), source)
        assert done.refusal is not None and done.refusal.code == "no_space"
        assert list(disk.index.entries) == [1]
        assert list(node.segments["n/ssd"].entries()) == [], "a later master must not learn of it"
        is_full = False
        async with asyncio.timeout(20):
            await is_noted.wait()
        assert not disk.index.entries


async def test_a_node_ends_after_the_compaction_of_its_index(
    master: ScriptedMaster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would write to a file of the same name as the next process that has the directory."""
    monkeypatch.setattr("mooncake.store.node.ssd_index.MIN_COMPACTION_BYTES", 0)
    write, may_write, was_locked = SsdIndexLog.write_compacted, threading.Event(), list[bool]()

    def late(log: SsdIndexLog, entries: list[m.SegmentEntry]) -> File | None:
        may_write.wait(20)
        was_locked.append(log._folder._lock is not None)
        return write(log, entries)

    monkeypatch.setattr(SsdIndexLog, "write_compacted", late)
    data = content(1000)
    async with node_of(await master.start(), tmp_path) as node:
        mount = await master.until_polled("n")
        await master.until_polled("n/ssd")
        memory_of(node).view()[: len(data)] = data
        pairs = [(entry_of(data, 4096 * number, 1 + number), place(mount, 0)) for number in range(20)]
        assert all(done.refusal is None for done in await master.run_all("n/ssd", pairs))
        asyncio.get_running_loop().call_later(0.2, may_write.set)
    assert was_locked == [True]

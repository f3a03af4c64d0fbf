# SPDX-License-Identifier: Apache-2.0
"""The log on disk of a working master: compacted between requests, intact after failures."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import shutil
from pathlib import Path
from random import Random
from typing import Any

import pytest

from mooncake.metrics import page
from mooncake.sim.faults.disks import SimDirectory
from mooncake.store.master import oplog, oplog_writer
from mooncake.store.master.effects import AppendRecords
from mooncake.store.master.log_records import Doubt, Record
from mooncake.store.master.master import Master
from mooncake.store.master.oplog import Oplog
from mooncake.store.master.oplog_writer import OplogWriter
from mooncake.store.master.snapshot import Snapshot
from tests.store.conftest import SETTINGS, Voice


class Kept:
    """A master whose records are kept in ``path``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.writer = self._new_writer()
        self.writer.read()
        self.voice = Voice(SETTINGS)
        self.writer.keep(self.voice.master.snapshot(), self.voice.master.catalog)
        handle = self.voice.master.handle

        def kept(event: Any, now: float) -> Any:
            effects = handle(event, now)
            for effect in effects:
                if isinstance(effect, AppendRecords):
                    self.writer.keep(effect.records, self.voice.master.catalog)
            return effects

        self.voice.master.handle = kept  # type: ignore[method-assign]

    def _new_writer(self) -> OplogWriter:
        return OplogWriter(str(self.path))

    def restored(self) -> dict[str, int]:
        """The state of a successor."""
        copy = self.path.with_suffix(".copy")
        copy.write_bytes(self.path.read_bytes())
        return self._known_by(Oplog(copy))

    def _known_by(self, log: Oplog) -> dict[str, int]:
        records = log.read()
        log.close()
        master = Master(SETTINGS)
        master.restore(records, 0.0)
        master.check()
        return {key: one.object_id for key, one in master.objects.readable.items()}

    def known(self) -> dict[str, int]:
        return {key: one.object_id for key, one in self.voice.master.objects.readable.items()}


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kept:
    monkeypatch.setattr(oplog, "MIN_COMPACTION_BYTES", 30_000)
    kept = Kept(tmp_path / "log")
    kept.voice.mount(size_bytes=1 << 20)
    return kept


async def work(kept: Kept, rounds: int) -> None:
    """Put and remove the same keys; the loop may run its tasks in between."""
    for number in range(rounds):
        for key in range(20):
            kept.voice.remove(f"k{key}", force=True)
            kept.voice.put(f"k{key}", size_bytes=100)
            kept.voice.wait(0.01)
        if number % 3 == 0:
            await asyncio.sleep(0.005)
        kept.voice.keep_alive(1.0)


async def test_a_log_that_grew_is_written_anew_while_the_master_works(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Snapshot.piece, "__defaults__", (3,))
    monkeypatch.setattr(oplog_writer, "PAUSE_S", 0.0)
    sizes = []
    for _ in range(20):
        await work(kept, 3)
        sizes.append(kept.path.stat().st_size)
        assert kept.restored() == kept.known()
    assert any(after < before for before, after in itertools.pairwise(sizes)), sizes
    assert kept.writer.id.encode() in kept.path.read_bytes().split(b"\n")[0]
    kept.writer.close()


async def test_a_disk_that_is_full_while_it_is_written_anew_costs_nothing(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(log: Oplog) -> Any:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(Oplog, "begin_anew", refuse)
    await work(kept, 30)
    assert kept.path.stat().st_size > 60_000
    assert kept.restored() == kept.known()
    monkeypatch.undo()
    monkeypatch.setattr(oplog, "MIN_COMPACTION_BYTES", 30_000)
    sizes = [kept.path.stat().st_size]
    while sizes[-1] >= sizes[0]:  # there is room again
        assert len(sizes) < 60, sizes
        await work(kept, 3)
        sizes.append(kept.path.stat().st_size)
    assert kept.restored() == kept.known()
    kept.writer.close()


class Simulated(Kept):
    """On a disk that may fail."""

    def __init__(self, path: Path, **more: Any) -> None:
        self.disk = SimDirectory(Random(1))
        self._more = more
        super().__init__(path)

    def _new_writer(self) -> OplogWriter:
        return OplogWriter(str(self.path), directory=self.disk, **self._more)

    def restored(self) -> dict[str, int]:
        copy = SimDirectory(Random(1))
        copy.open("log").append(self.disk.content("log"))
        return self._known_by(Oplog(self.path, directory=copy))


@pytest.fixture
def simulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Simulated:
    monkeypatch.setattr(oplog_writer, "RETRY_S", 0.0)
    kept = Simulated(tmp_path / "log")
    kept.voice.mount(size_bytes=1 << 20)
    return kept


async def until_well(kept: Kept) -> None:
    async with asyncio.timeout(10):
        while kept.writer.trouble:  # noqa: ASYNC110
            await asyncio.sleep(0)


async def until_refused(kept: Simulated, num_writes: int) -> None:
    """The disk has refused so many writes."""
    refused = 0

    def delay_s(what: str, num_bytes: int) -> float:
        nonlocal refused
        refused += what == "write"
        return 0.0

    kept.disk.delay_s = delay_s
    async with asyncio.timeout(10):
        while refused < num_writes:  # noqa: ASYNC110
            await asyncio.sleep(0)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG, errno.EIO])
async def test_what_a_disk_refuses_is_written_when_it_takes_it(simulated: Simulated, number: int) -> None:
    simulated.voice.put("before", size_bytes=100)
    simulated.disk.write_error = number
    simulated.voice.put("during", size_bytes=100)
    simulated.voice.put("during too", size_bytes=100)
    assert "the oplog" in simulated.writer.trouble and os.strerror(number) in simulated.writer.trouble
    assert list(simulated.restored()) == ["before"], "what was cut off was never acknowledged"
    await asyncio.sleep(0.01)
    assert simulated.writer.trouble, "it is full still"
    simulated.disk.write_error = 0
    await until_well(simulated)
    simulated.voice.put("after", size_bytes=100)
    assert simulated.restored() == simulated.known() and len(simulated.known()) == 4
    assert "mooncake_store_oplog_unwritable 0.0" in page().decode()
    simulated.writer.close()


async def test_with_too_much_to_write_the_log_is_written_anew(
    simulated: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oplog_writer, "MAX_UNWRITTEN", 10)
    simulated.voice.put("before", size_bytes=100)
    simulated.disk.capacity_bytes = len(simulated.disk.content("log"))
    for number in range(20):
        simulated.voice.put(f"k{number}", size_bytes=100)
    simulated.disk.capacity_bytes = None
    await until_well(simulated)
    assert simulated.restored() == simulated.known() and len(simulated.known()) == 21
    simulated.writer.close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
async def test_a_log_that_must_be_rewritten_is_rewritten_when_there_is_room_again(
    simulated: Simulated, number: int
) -> None:
    simulated.disk.sync_error = number
    simulated.voice.put("k", size_bytes=100)
    assert await flushed(simulated)
    simulated.disk.sync_error, simulated.disk.write_error = 0, errno.ENOSPC
    await until_refused(simulated, 3)
    assert "free some space" in simulated.writer.trouble
    simulated.disk.write_error = 0
    await until_well(simulated)
    assert await flushed(simulated) == "" and simulated.disk.names() == ["log"]
    simulated.disk.lose_power()
    assert list(simulated.restored()) == ["k"]


async def flushed(kept: Kept) -> str:
    result: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    kept.writer.flushed(result.set_result)
    return await asyncio.wait_for(result, 10)


async def test_one_flush_serves_all_waiting_replies(simulated: Simulated) -> None:
    before = simulated.disk.num_syncs
    simulated.voice.put("k", size_bytes=100)
    results: list[str] = []
    for _ in range(10):
        simulated.writer.flushed(results.append)
    assert not results, "a flush blocks, so it is another thread's"
    assert await flushed(simulated) == "" and results == [""] * 10
    assert simulated.disk.num_syncs == before + 1
    simulated.writer.flushed(results.append)
    assert len(results) == 11, "nothing was kept since"
    simulated.disk.lose_power()
    assert list(simulated.restored()) == ["k"]


async def test_without_flushes_no_reply_waits_for_one(tmp_path: Path) -> None:
    kept = Simulated(tmp_path / "log", flushes=False)
    kept.voice.mount(size_bytes=1 << 20)
    before = kept.disk.num_syncs
    kept.voice.put("k", size_bytes=100)
    assert await flushed(kept) == "" and kept.disk.num_syncs == before
    kept.writer.close()


async def test_after_a_failed_flush_the_log_is_not_trusted_but_rewritten(
    simulated: Simulated,
) -> None:
    """The system marks failed writes as clean: a second flush would report success."""
    simulated.disk.sync_error = errno.EIO
    simulated.voice.put("k", size_bytes=100)
    assert "check the disk" in await flushed(simulated)
    simulated.voice.put("l", size_bytes=100)
    assert "check the disk" in await flushed(simulated)
    simulated.disk.sync_error = 0
    await until_well(simulated)
    assert await flushed(simulated) == ""
    simulated.disk.lose_power()
    assert list(simulated.restored()) == ["k", "l"]


async def test_a_compaction_does_not_lose_what_was_flushed_while_it_ran(
    simulated: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records in the new file after its sync are flushed only in the old one."""
    monkeypatch.setattr(oplog, "MIN_COMPACTION_BYTES", 1000)
    for seed in range(20):
        simulated.disk.random.seed(seed)
        for number in range(30):
            simulated.voice.put(f"{seed} {number}", size_bytes=100)
            assert await flushed(simulated) == ""
        assert simulated.restored() == simulated.known(), f"seed {seed}"
    simulated.disk.lose_power()
    assert simulated.restored() == simulated.known()


async def test_a_log_whose_file_was_removed_is_rewritten(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oplog_writer, "RETRY_S", 0.0)
    kept.voice.put("before", size_bytes=100)
    kept.path.unlink()
    kept.voice.put("during", size_bytes=100)
    assert "removed or replaced while in use" in kept.writer.trouble
    await until_well(kept)
    kept.voice.put("after", size_bytes=100)
    assert await flushed(kept) == ""
    assert kept.restored() == kept.known() and len(kept.known()) == 3
    kept.writer.close()


async def test_a_log_whose_file_is_removed_while_the_disk_is_full_is_rewritten(simulated: Simulated) -> None:
    simulated.voice.put("before", size_bytes=100)
    simulated.disk.write_error = errno.ENOSPC
    simulated.voice.put("during", size_bytes=100)
    assert "free some space" in simulated.writer.trouble
    simulated.disk.remove("log")
    simulated.disk.write_error = 0
    await until_well(simulated)
    simulated.voice.put("after", size_bytes=100)
    assert await flushed(simulated) == ""
    assert simulated.restored() == simulated.known() and len(simulated.known()) == 3
    simulated.writer.close()


@pytest.mark.parametrize("how", ["removed", "moved"])
async def test_without_its_directory_a_log_stays_unwritable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    retries = asyncio.Semaphore(0)
    write_anew = OplogWriter._write_anew

    def counted(writer: OplogWriter, log: Oplog) -> None:
        retries.release()
        write_anew(writer, log)

    monkeypatch.setattr(OplogWriter, "_write_anew", counted)
    monkeypatch.setattr(oplog_writer, "RETRY_S", 0.0)
    folder = tmp_path / "folder"
    folder.mkdir()
    kept = Kept(folder / "log")
    kept.voice.mount(size_bytes=1 << 20)
    kept.voice.put("before", size_bytes=100)
    if how == "removed":
        shutil.rmtree(folder)
    else:
        folder.rename(tmp_path / "elsewhere")
    kept.voice.put("after", size_bytes=100)
    async with asyncio.timeout(10):
        for _ in range(3):
            await retries.acquire()
    await asyncio.sleep(0)
    assert "restore its directory and restart the master" in await flushed(kept)
    assert "mooncake_store_oplog_unwritable 1.0" in page().decode()
    kept.writer.close()


async def test_without_a_file_no_record_is_kept() -> None:
    writer = OplogWriter("")
    assert writer.read() == [] and writer.id == ""
    records: list[Record] = []
    writer.keep(records, Master(SETTINGS).catalog)
    writer.begin_copy()
    writer.copied(records, is_complete=True)
    writer.close()


async def test_a_leaders_log_takes_the_place_of_the_own_when_it_is_complete(kept: Kept) -> None:
    kept.voice.put("own", size_bytes=100)
    leader = Voice(SETTINGS)
    leader.mount(size_bytes=1 << 20)
    leader.put("theirs", size_bytes=100)
    snapshot = leader.master.snapshot()
    kept.writer.begin_copy()
    kept.writer.copied(snapshot[:2], is_complete=False)
    assert list(kept.restored()) == ["own"]
    kept.writer.begin_copy()
    kept.writer.copied(snapshot, is_complete=True)
    assert list(kept.restored()) == ["theirs"]
    kept.writer.keep([], leader.master.catalog)
    kept.writer.close()


async def test_a_flush_that_fails_while_the_disk_recovers_is_not_made_good_by_the_next(
    simulated: Simulated,
) -> None:
    simulated.disk.write_error = errno.ENOSPC
    simulated.voice.put("k", size_bytes=100)
    assert await flushed(simulated)
    simulated.disk.sync_error, simulated.disk.write_error = errno.EIO, 0
    num_syncs = simulated.disk.num_syncs
    async with asyncio.timeout(10):
        while simulated.disk.num_syncs == num_syncs:  # noqa: ASYNC110
            await asyncio.sleep(0)
    simulated.disk.sync_error = 0
    await until_well(simulated)
    assert await flushed(simulated) == ""
    simulated.disk.lose_power()
    assert list(simulated.restored()) == ["k"]


async def test_a_copy_of_the_leaders_log_leaves_nothing_in_doubt(tmp_path: Path) -> None:
    """The gaps of this master's own log no longer matter: it may lead with the snapshot."""
    disk, leader = SimDirectory(Random(1)), Voice(SETTINGS)
    leader.mount(size_bytes=1 << 20)
    kept = Oplog(tmp_path / "log", directory=disk, boot="before")
    kept.read()
    kept.append(leader.master.snapshot())
    kept.abandon()
    doubts: list[tuple[Doubt, bool]] = []
    for is_copied in (True, False):
        writer = OplogWriter(str(tmp_path / "log"), directory=disk)
        writer.read()
        doubts.append((writer.doubt, writer.is_whole))
        if is_copied:
            writer.begin_copy()
            writer.copied(leader.master.snapshot(), is_complete=True)
            assert writer.doubt is Doubt.NONE
        writer.close()
    assert doubts == [(Doubt.PROMISES, False), (Doubt.NONE, True)]

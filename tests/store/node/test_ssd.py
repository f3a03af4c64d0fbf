# SPDX-License-Identifier: Apache-2.0
"""The directory of an SSD segment: what survives, and what is refused with which message."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mooncake.errors import InvalidArgument, OutOfSpace, StorageError
from mooncake.files import OsDirectory, OsFile
from mooncake.store.messages import SegmentEntry
from mooncake.store.node.ssd import Disk
from mooncake.store.node.ssd_index import compacted
from mooncake.transfer import Op, Region, Status, TransferEngine, TransferSettings, crc32c

MIB = 1 << 20


@pytest.fixture
def engine() -> Iterator[TransferEngine]:
    with TransferEngine(TransferSettings(transports=("file",))) as engine:
        yield engine


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ssd"


def entry(object_id: int, offset: int = 0, size_bytes: int = 4096) -> SegmentEntry:
    return SegmentEntry(f"k{object_id}", object_id, size_bytes, size_bytes, b"crc!", offset)


def test_bytes_and_entries_survive(engine: TransferEngine, path: Path) -> None:
    disk = Disk(engine, path, 8 * MIB)
    data = np.random.default_rng(1).integers(0, 256, MIB, dtype=np.uint8)
    here = engine.register(data)
    disk.provide(2 * MIB, MIB)
    there = disk.region.address + 2 * MIB
    own = engine.open(engine.describe())
    assert engine.run(Op.WRITE, own, [here.address], [there], [MIB]).status == Status.OK
    disk.log.hold(entry(1, 2 * MIB, MIB))
    disk.log.hold(entry(2))
    disk.log.drop([2])
    disk.flush()
    content_id = disk.content_id
    disk.close()
    engine.unregister(disk.region)
    again = Disk(engine, path, 8 * MIB)
    assert again.content_id == content_id
    assert list(again.index.entries.values()) == [entry(1, 2 * MIB, MIB)]
    expected = data.copy()
    data[:] = 0
    own = engine.open(engine.describe())
    there = again.region.address + 2 * MIB
    assert engine.run(Op.READ, own, [here.address], [there], [MIB]).status == Status.OK
    assert (data == expected).all()
    again.close()


def test_space_is_allocated_as_needed(engine: TransferEngine, path: Path) -> None:
    disk = Disk(engine, path, 3 << 30)
    file = path / "mooncake.data"
    assert file.stat().st_size == 3 << 30 and file.stat().st_blocks == 0
    disk.provide((1 << 30) + 4096, 4096)
    assert file.stat().st_blocks * 512 >= 1 << 30
    disk.close()


def test_a_directory_in_use_is_refused(engine: TransferEngine, path: Path) -> None:
    disk = Disk(engine, path, MIB)
    with pytest.raises(InvalidArgument, match="no other process uses"):
        Disk(engine, path, MIB)
    disk.close()
    Disk(engine, path, MIB).close()


def test_a_larger_capacity_is_other_content(engine: TransferEngine, path: Path) -> None:
    """The entries stay; a master that knew the segment requests a report because of the new id."""
    disk = Disk(engine, path, MIB)
    disk.log.hold(entry(1))
    disk.close()
    larger = Disk(engine, path, 2 * MIB + 1)
    assert larger.size_bytes == 2 * MIB and larger.content_id != disk.content_id
    assert list(larger.index.entries) == [1]
    larger.close()
    with pytest.raises(InvalidArgument, match="ssd_size is 1048576; allowed: at least 2097152 bytes"):
        Disk(engine, path, MIB)


def test_a_disk_that_is_smaller_than_the_tier_is_reported(
    engine: TransferEngine, path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for free, num_reports in ((64 * MIB, 0), (MIB, 1)):
        found = shutil.disk_usage(path.parent)
        monkeypatch.setattr(shutil, "disk_usage", lambda _, found=found, free=free: found._replace(free=free))
        Disk(engine, path, 8 * MIB).close()
        monkeypatch.undo()
        events = [one for one in caplog.records if one.getMessage() == "ssd_smaller_than_requested"]
        assert len(events) == num_reports
    assert events[0].__dict__["fields"]["size_bytes"] == 8 * MIB


def test_a_directory_above_that_is_missing_too_is_made_and_reported(
    engine: TransferEngine, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its disk may not be mounted."""
    for folder in (path, path / "below", path / "other" / "ssd"):
        Disk(engine, folder, MIB).close()
    found = [record.getMessage() for record in caplog.records]
    assert found.count("parent_directory_created") == 1


def test_unusable_directories_are_refused(engine: TransferEngine, path: Path) -> None:
    path.write_bytes(b"a file")
    with pytest.raises(InvalidArgument, match=r"ssd_path .*allowed: a directory"):
        Disk(engine, path, MIB)
    with pytest.raises(InvalidArgument, match=r"ssd_path .*allowed: a directory"):
        Disk(engine, path / "below", MIB)
    with pytest.raises(InvalidArgument, match="is its disk mounted"):
        Disk(engine, Path("/proc/nothing"), MIB)


def test_damaged_and_foreign_headers_are_refused(engine: TransferEngine, path: Path) -> None:
    disk = Disk(engine, path, MIB)
    disk.log.hold(entry(1))
    content_id = disk.content_id
    disk.close()
    header = path / "mooncake.ssd"
    sound = header.read_bytes()
    for place in (0, len(sound) - 1):
        damaged = bytearray(sound)
        damaged[place] ^= 1
        header.write_bytes(damaged)
        with pytest.raises(InvalidArgument, match=r"header .* is whole"):
            Disk(engine, path, MIB)
    header.unlink()
    with pytest.raises(InvalidArgument, match="with its header"):
        Disk(engine, path, MIB)
    header.write_bytes(sound)
    os.truncate(path / "mooncake.data", 100)
    with pytest.raises(InvalidArgument, match=r"was cut short: it has 100 bytes.*mooncake store repair"):
        Disk(engine, path, MIB)
    (path / "mooncake.data").unlink()
    for _ in range(2):
        with pytest.raises(InvalidArgument, match=r"mooncake.data is missing.*move the directory away"):
            Disk(engine, path, MIB)
    disk = Disk(engine, path, MIB, repairs=True)
    assert (
        disk.content_id != content_id
    )  # a master that knows the content would have the entries written again
    assert not disk.index.entries and (path / "mooncake.data").stat().st_size == MIB
    disk.close()


def test_another_version_is_refused_by_name(
    engine: TransferEngine, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("mooncake.store.node.ssd.VERSION", 7)
        Disk(engine, path, MIB).close()
    with pytest.raises(InvalidArgument, match="version 1, not 7"):
        Disk(engine, path, MIB)


def test_a_torn_index_loses_its_tail_only(engine: TransferEngine, path: Path) -> None:
    disk = Disk(engine, path, MIB)
    disk.log.hold(entry(1))
    disk.log.hold(entry(2, 4096))
    disk.close()
    index = path / "mooncake.index"
    os.truncate(index, index.stat().st_size - 1)
    again = Disk(engine, path, MIB)
    assert list(again.index.entries) == [1]
    again.log.hold(entry(3, 8192))
    again.close()
    assert list(Disk(engine, path, MIB).index.entries) == [1, 3]


def test_a_compacted_log_replaces_the_old_one(
    engine: TransferEngine, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mooncake.store.node.ssd_index.MIN_COMPACTION_BYTES", 4096)
    disk = Disk(engine, path, MIB)
    for number in range(1000):
        disk.log.hold(entry(number, number % 3 * 4096))
    before = (path / "mooncake.index").stat().st_size
    wanted = [disk.log.wants_compaction]
    entries = disk.log.begin_compaction()
    disk.log.hold(entry(5000, 4 * 4096))
    wanted.append(disk.log.wants_compaction)
    fresh = disk.log.write_compacted(entries)
    disk.log.drop([998])
    disk.log.end_compaction(fresh)
    wanted.append(disk.log.wants_compaction)
    assert wanted == [True, False, False], "not while it is in progress, nor again at once"
    size = (path / "mooncake.index").stat().st_size
    assert disk.index.num_bytes == size < before / 100
    disk.log.hold(entry(5001, 5 * 4096))
    disk.close()
    assert sorted(Disk(engine, path, MIB).index.entries) == [997, 999, 5000, 5001]


def test_a_log_that_can_not_be_compacted_goes_on(
    engine: TransferEngine, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mooncake.store.node.ssd_index.MIN_COMPACTION_BYTES", 100)
    disk = Disk(engine, path, MIB)
    for number in range(10):
        disk.log.hold(entry(number, number % 3 * 4096))
    (path / "mooncake.index.new").mkdir()
    disk.log.end_compaction(disk.log.write_compacted(disk.log.begin_compaction()))
    assert not disk.log.wants_compaction, "not again at once"
    disk.log.hold(entry(50, 4 * 4096))
    disk.close()
    assert list(Disk(engine, path, MIB).index.entries) == [7, 8, 9, 50]


def test_an_entry_that_cannot_be_written_is_not_held(
    engine: TransferEngine, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full in the middle of a record: earlier records stay, later ones are not lost."""
    disk = Disk(engine, path, MIB)
    disk.log.hold(entry(1))
    write = os.write

    def full(file: int, content: memoryview) -> int:
        if len(content) < 20:
            raise OSError(28, "No space left on device")
        return write(file, content[:10])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(OutOfSpace, match="make room"):
            disk.log.hold(entry(2, 4096))
    assert list(disk.index.entries) == [1]
    disk.log.hold(entry(3, 8192))
    disk.close()
    assert list(Disk(engine, path, MIB).index.entries) == [1, 3]


def test_an_index_that_a_read_only_file_system_kept_torn_is_cut_off_before_it_goes_on(
    engine: TransferEngine, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that became read-only for an error of its disk refuses to truncate as well."""
    disk = Disk(engine, path, MIB)
    disk.log.hold(entry(1))
    write = os.write

    def torn(file: int, content: memoryview) -> int:
        write(file, content[:10])
        raise OSError(errno.EROFS, "Read-only file system")

    def refused(file: int, size_bytes: int) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", torn)
        patch.setattr(os, "ftruncate", refused)
        for _ in range(2):
            with pytest.raises(InvalidArgument, match="may write to"):
                disk.log.hold(entry(2, 4096))
            with pytest.raises(InvalidArgument, match="may write to"):
                disk.vacate(0, 4096)
    assert list(disk.index.entries) == [1]
    disk.index.check()
    disk.log.hold(entry(3, 8192))
    disk.close()
    assert list(Disk(engine, path, MIB).index.entries) == [1, 3]


@pytest.mark.parametrize("how", ["removed", "moved"])
def test_a_directory_that_is_gone_takes_no_more_objects(
    engine: TransferEngine, path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its open files accept writes, which no later process would find."""
    disk = Disk(engine, path, MIB)
    disk.vacate(0, 4096)
    disk.log.hold(entry(1))
    if how == "removed":
        shutil.rmtree(path)
    else:
        path.rename(path.with_name("elsewhere"))
    for _ in range(2):
        with pytest.raises(StorageError, match=r"mooncake\.data was removed or replaced while in use"):
            disk.vacate(4096, 4096)
    with pytest.raises(StorageError, match=r"mooncake\.index was removed or replaced while in use"):
        disk.log.hold(entry(2, 4096))
    assert list(disk.index.entries) == [1]
    disk.close()
    assert [record.message for record in caplog.records].count("ssd_removed") == 1


def test_an_entry_whose_tombstone_cannot_be_written_stays(
    engine: TransferEngine, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise its space would be overwritten while the log still has the entry."""
    disk = Disk(engine, path, MIB)
    disk.log.hold(entry(1))

    def full(file: int, content: memoryview) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        for _ in range(2):
            with pytest.raises(OutOfSpace, match="make room"):
                disk.vacate(0, 4096)
    assert list(disk.index.entries) == [1]
    disk.index.check()
    disk.vacate(0, 4096)
    disk.close()
    assert not Disk(engine, path, MIB).index.entries


def test_a_nearly_full_disk_provides_the_space_it_has(
    engine: TransferEngine, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(engine, path, 3 << 30)
    requested: list[tuple[int, int]] = []

    def provide(region: Region, offset: int, size_bytes: int) -> None:
        requested.append((offset, size_bytes))
        if size_bytes > MIB:
            raise OutOfSpace("no room")

    monkeypatch.setattr(engine, "provide", provide)
    disk.provide(5 * MIB, MIB)
    assert requested == [(0, 1 << 30), (5 * MIB, MIB)]
    with pytest.raises(OutOfSpace):
        disk.provide(5 * MIB, 2 * MIB)
    disk.close()


def test_a_compacted_index_is_renamed_even_if_the_directory_is_not_synced(
    engine: TransferEngine, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Subsequent entries go to the file that the next start reads."""
    disk = Disk(engine, path, MIB)
    disk.log.hold(entry(1))

    def refused(self: OsDirectory) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    fresh = disk.log.write_compacted(disk.log.begin_compaction())
    with monkeypatch.context() as patch:
        patch.setattr(OsDirectory, "sync", refused)
        disk.log.end_compaction(fresh)
        disk.log.hold(entry(2, 4096))
        with pytest.raises(StorageError):
            disk.log.flush()
    disk.log.flush()
    disk.close()
    assert list(Disk(engine, path, MIB).index.entries) == [1, 2]


def test_a_flush_while_the_index_is_replaced_syncs_the_directory(
    engine: TransferEngine, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(engine, path, MIB)
    disk.log.hold(entry(1))
    fresh = disk.log.write_compacted(disk.log.begin_compaction())
    close, sync = OsFile.close, OsDirectory.sync
    calls: list[str] = []

    def flush_meanwhile(self: OsFile) -> None:
        disk.log.flush()
        calls.append("flushed")
        close(self)

    def counted(self: OsDirectory) -> None:
        calls.append("directory")
        sync(self)

    with monkeypatch.context() as patch:
        patch.setattr(OsFile, "close", flush_meanwhile)
        patch.setattr(OsDirectory, "sync", counted)
        disk.log.end_compaction(fresh)
    assert calls[:2] == ["directory", "flushed"]
    disk.close()


def test_an_index_that_could_not_be_synced_is_written_anew(
    engine: TransferEngine, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later sync that succeeds does not say that what was appended before is on the disk."""
    disk = Disk(engine, path, MIB)
    disk.log.hold(entry(1))
    disk.log.flush()

    def is_rewritten() -> bool:
        return not disk.log.wants_compaction

    assert is_rewritten()

    def refused(file: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    disk.log.hold(entry(2, 4096))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", refused)
        with pytest.raises(StorageError):
            disk.log.flush()
        assert not is_rewritten()
        disk.log.end_compaction(disk.log.write_compacted(disk.log.begin_compaction()))
    assert not is_rewritten(), "it could not be written anew either"
    with pytest.raises(StorageError, match="a sync failed"):
        disk.log.flush()
    disk.log.end_compaction(disk.log.write_compacted(disk.log.begin_compaction()))
    disk.log.flush()
    assert is_rewritten()
    disk.close()
    again = Disk(engine, path, MIB)
    assert list(again.index.entries) == [1, 2]
    again.close()


def test_an_index_of_an_earlier_release_whose_only_record_is_torn_is_read(
    engine: TransferEngine, path: Path
) -> None:
    Disk(engine, path, MIB).close()
    torn = compacted([SegmentEntry("k", 1, 4096, 4, b"crc!" * 1024, 0)])[:-1500]
    (path / "mooncake.index").write_bytes(torn)
    disk = Disk(engine, path, MIB)
    assert not disk.index.entries
    assert (path / "mooncake.index.torn").read_bytes() == torn
    disk.log.hold(entry(2))
    disk.close()
    disk = Disk(engine, path, MIB)
    assert list(disk.index.entries) == [2]
    disk.close()
    (path / "mooncake.index").write_bytes(b"something else " * 100)
    with pytest.raises(InvalidArgument, match="something else"):
        Disk(engine, path, MIB)


def filled(path: Path, object_id: int, offset: int, chunk_bytes: int = 5000) -> SegmentEntry:
    """Write an object past the engine; returns its entry."""
    data = np.random.default_rng(object_id).bytes(12_000)
    sums = [crc32c(data[at : at + chunk_bytes]) for at in range(0, len(data), chunk_bytes)]
    with (path / "mooncake.data").open("r+b") as file:
        file.seek(offset)
        file.write(data)
    checksums = np.array(sums, dtype="<u4").tobytes()
    return SegmentEntry(f"k{object_id}", object_id, len(data), chunk_bytes, checksums, offset)


def test_unflushed_entries_are_verified_when_the_directory_is_opened(
    engine: TransferEngine, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A loss of power may take the bytes and leave the entry, as both are flushed together."""
    disk = Disk(engine, path, MIB)
    whole, torn, flushed = (filled(path, number, number * 16384) for number in (1, 2, 3))
    for one in (whole, torn, flushed):
        disk.log.hold(one, is_flushed=False)
    disk.log.mark_flushed([3])
    with (path / "mooncake.data").open("r+b") as file:
        for one in (torn, flushed):
            file.seek(one.offset + 9000)
            file.write(bytes(100))
    disk.close()
    again = Disk(engine, path, MIB)
    assert list(again.index.entries) == [1, 3], "what is known to be flushed is not read at every start"
    assert not again.index.unflushed
    fields = [one.__dict__["fields"] for one in caplog.records if one.getMessage() == "unflushed_dropped"]
    assert [(one["num_objects"], one["num_bytes"]) for one in fields] == [(1, 12_000)]
    again.close()
    last = Disk(engine, path, MIB)
    assert list(last.index.entries) == [1, 3] and not last.index.unflushed
    last.close()


def test_what_was_not_flushed_before_a_kill_is_flushed_at_the_next_start(
    engine: TransferEngine, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(engine, path, MIB)
    disk.log.hold(filled(path, 1, 0), is_flushed=False)
    disk.close()
    flushed: list[str] = []

    def refused(self: TransferEngine, region: Region) -> None:
        raise StorageError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(TransferEngine, "flush", refused)
        with pytest.raises(StorageError, match="is gone"):
            Disk(engine, path, MIB)
    with monkeypatch.context() as patch:
        patch.setattr(TransferEngine, "flush", lambda self, region: flushed.append(region.kind))
        again = Disk(engine, path, MIB)
    assert flushed == ["file"] and not again.index.unflushed and list(again.index.entries) == [1]
    again.close()
    with monkeypatch.context() as patch:
        patch.setattr(TransferEngine, "flush", refused)
        Disk(engine, path, MIB).close()  # nothing is unflushed


def test_compaction_keeps_what_is_unflushed(engine: TransferEngine, path: Path) -> None:
    disk = Disk(engine, path, MIB)
    disk.log.hold(filled(path, 1, 0), is_flushed=False)
    disk.log.hold(entry(2, 32768), is_flushed=False)
    disk.log.hold(entry(3, 65536))
    entries = disk.log.begin_compaction()
    fresh = disk.log.write_compacted(entries)
    disk.log.mark_flushed([1])
    disk.log.end_compaction(fresh)
    disk.close()
    again = Disk(engine, path, MIB)
    assert list(again.index.entries) == [1, 3], "the second was unflushed still, and is not there"
    again.close()


def test_an_entry_that_could_not_be_dropped_is_as_unflushed_as_before(
    engine: TransferEngine, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(engine, path, MIB)
    disk.log.hold(entry(1), is_flushed=False)
    disk.log.hold(entry(2, 4096))

    def full(self: OsFile, content: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(OsFile, "append", full)
    with pytest.raises(OutOfSpace):
        disk.log.drop([1, 2])
    assert list(disk.index.entries) == [1, 2] and list(disk.index.unflushed) == [1]
    disk.log.mark_flushed([1])
    assert not disk.index.unflushed, "the record is lost, and the entry is verified at the next start"
    disk.close()

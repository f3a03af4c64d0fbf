# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from mooncake.errors import InvalidArgument
from mooncake.files import frames
from mooncake.sim.faults.disks import SimDirectory, SimFile
from mooncake.store.master import oplog
from mooncake.store.master.log_records import Doubt, IdsGiven, LineBegan, ObjectGone, Record, encode
from mooncake.store.master.oplog import Oplog


def records(first: int, count: int) -> list[Record]:
    return [ObjectGone(f"k{number}", number) for number in range(first, first + count)]


def opened(path: Path) -> tuple[Oplog, list[Record]]:
    log = Oplog(path)
    return log, log.read()


def damaged(path: Path, at: int, flip: int = 1) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= flip
    path.write_bytes(bytes(content))


def logged(caplog: pytest.LogCaptureFixture, event: str) -> list[dict[str, object]]:
    return [getattr(one, "fields", {}) for one in caplog.records if one.message == event]


def rewrite(log: Oplog, records: list[Record]) -> None:
    anew = log.begin_anew()
    anew.append(records)
    anew.sync()
    anew.commit()


def test_appended_records_are_there_for_the_next_master(tmp_path: Path) -> None:
    log, found = opened(tmp_path / "log")
    assert found == []
    log.append(records(0, 3))
    log.append(records(3, 1))
    log.close()
    log, found = opened(tmp_path / "log")
    assert found == records(0, 4)
    log.close()


def test_a_torn_tail_is_gone_after_the_next_start(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log, _ = opened(path)
    log.append(records(0, 2))
    size_bytes = log.size_bytes
    log.append(records(9, 1))
    log.abandon()
    torn = path.read_bytes()[size_bytes:-3]
    path.write_bytes(path.read_bytes()[:-3])
    log, found = opened(path)
    assert found == records(0, 2) and log.doubt is Doubt.PROMISES
    assert (tmp_path / "log.torn").read_bytes() == torn
    log.append(records(2, 1))
    log.close()
    assert opened(path)[1] == records(0, 3)


def test_two_masters_cannot_share_a_file(tmp_path: Path) -> None:
    log, _ = opened(tmp_path / "log")
    with pytest.raises(InvalidArgument, match="no other master"):
        Oplog(tmp_path / "log").read()
    log.close()
    Oplog(tmp_path / "log").read()


def test_a_log_wants_compaction_when_most_of_it_is_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oplog, "MIN_COMPACTION_BYTES", 1000)
    log, _ = opened(tmp_path / "log")
    wanted: list[bool] = []
    for count in (10, 100):
        log.append(records(0, count))
        wanted.append(log.wants_compaction)
    rewrite(log, records(0, 100))
    assert [*wanted, log.wants_compaction] == [False, True, False]
    log.append(records(0, 1))
    log.close()
    assert opened(tmp_path / "log")[1] == [*records(0, 100), *records(0, 1)]


def test_a_log_is_compacted_however_often_its_master_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What counts is the size of the last snapshot, and not that of the log at the start."""
    monkeypatch.setattr(oplog, "MIN_COMPACTION_BYTES", 1000)
    log, _ = opened(tmp_path / "log")
    rewrite(log, [LineBegan(1), *records(0, 100), IdsGiven(100)])
    wanted: list[bool] = []
    for _ in range(5):
        log.append(records(0, 100))
        wanted.append(log.wants_compaction)
        log.close()
        log, _ = opened(tmp_path / "log")
    assert not any(wanted[:2]) and wanted[-1]
    log.close()


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="missing"):
        Oplog(tmp_path / "missing" / "log").read()


def test_a_file_of_another_kind_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"#!/bin/sh\n" * 100)
    with pytest.raises(InvalidArgument, match="this version"):
        Oplog(path).read()
    assert path.read_bytes() == b"#!/bin/sh\n" * 100


def test_a_file_whose_first_write_was_cut_off_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(oplog.MAGIC[:5])
    log, found = opened(path)
    log.append(records(0, 1))
    log.close()
    assert found == [] and opened(path)[1] == records(0, 1)


def test_a_log_keeps_its_id_and_no_two_have_the_same(tmp_path: Path) -> None:
    log, _ = opened(tmp_path / "log")
    first = log.id
    rewrite(log, records(0, 5))
    log.append(records(5, 1))
    log.close()
    log, found = opened(tmp_path / "log")
    assert log.id == first and found == records(0, 6)
    assert opened(tmp_path / "other")[0].id != first


def test_a_rewriting_that_is_given_up_changes_nothing(tmp_path: Path) -> None:
    log, _ = opened(tmp_path / "log")
    log.append(records(0, 2))
    anew = log.begin_anew()
    anew.append(records(5, 100))
    anew.abandon()
    with pytest.raises(OSError, match="discarded"):
        anew.sync()  # in its thread, which may begin late
    log.append(records(2, 1))
    log.close()
    assert [path.name for path in tmp_path.iterdir()] == ["log"]
    assert opened(tmp_path / "log")[1] == records(0, 3)


def test_a_rewriting_that_a_full_disk_refuses_can_be_begun_again() -> None:
    disk = SimDirectory(Random(1))
    log = Oplog(Path("/simulated/log"), directory=disk)
    log.read()
    log.append(records(0, 2))
    for num_bytes in (0, oplog._HEADER_BYTES):  # not the header, and not the first mark
        disk.capacity_bytes = log.size_bytes + num_bytes
        with pytest.raises(OSError, match="No space"):
            log.begin_anew()
        assert disk.names() == ["log"]
    disk.capacity_bytes = None
    rewrite(log, records(5, 1))
    log.close()
    assert Oplog(Path("/simulated/log"), directory=disk).read() == records(5, 1)


# Damaged files


def test_damage_ends_the_start_and_its_offset_is_named(tmp_path: Path) -> None:
    """A wrong bit is no torn tail: the records behind it were acknowledged."""
    path = tmp_path / "log"
    log, _ = opened(path)
    log.append(records(0, 1))
    at = log.size_bytes
    log.append(records(1, 100))
    log.close()
    damaged(path, at + 20)
    before = path.read_bytes()
    with pytest.raises(
        InvalidArgument, match=rf"bytes at offset {at}; 2 whole records before it, 100 behind"
    ):
        Oplog(path).read()
    assert path.read_bytes() == before and [one.name for one in tmp_path.iterdir()] == ["log"]


def test_a_repair_keeps_the_file_and_uses_every_intact_record(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "log"
    log, _ = opened(path)
    log.append(records(0, 1))
    at = log.size_bytes
    for number in range(1, 100):
        log.append(records(number, 1))
    log.close()
    damaged(path, at + 20)
    before = path.read_bytes()
    log = Oplog(path, repairs=True)
    assert log.read() == [*records(0, 1), *records(2, 98)]
    assert (log.doubt, log.id != "") == (Doubt.ANY, True)
    assert (tmp_path / "log.damaged").read_bytes() == before
    (event,) = logged(caplog, "oplog_damaged")
    assert event["offset"] == at and event["num_bytes"] == 30
    log.append(records(200, 1))
    log.close()
    # It is as good as any other file now, except for what nodes have yet to report.
    log, found = opened(path)
    assert found == [*records(0, 1), *records(2, 98), *records(200, 1)] and log.doubt is Doubt.ANY
    rewrite(log, found)
    log.abandon()
    log, _ = opened(path)
    assert log.doubt is Doubt.ANY
    log.is_whole(0)
    log.close()
    log, _ = opened(path)
    assert log.doubt is Doubt.NONE
    log.close()


def test_no_copy_takes_the_place_of_an_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / "log"
    for _ in range(3):
        log = Oplog(path, repairs=True)
        log.read()
        log.append(records(0, 5))
        at = log.size_bytes
        log.append(records(5, 5))
        log.abandon()
        damaged(path, at + 20)
    Oplog(path, repairs=True).read()
    names = sorted(one.name for one in tmp_path.iterdir())
    assert names == ["log", "log.damaged", "log.damaged.1", "log.damaged.2"]


def test_a_wrong_bit_in_the_header_is_damage_and_the_other_line_has_it_all(tmp_path: Path) -> None:
    log, _ = opened(tmp_path / "log")
    log.append(records(0, 5))
    log.close()
    whole = (tmp_path / "log").read_bytes()
    for at in range(frames.header_num_bytes(oplog.MAGIC)):
        path = tmp_path / f"log{at}"
        path.write_bytes(whole)
        damaged(path, at)
        with pytest.raises(InvalidArgument, match="damage of 104 bytes at offset 0"):
            Oplog(path).read()
        again = Oplog(path, repairs=True)
        assert again.read() == records(0, 5) and again.id == log.id
        again.close()


def test_zeros_that_a_loss_of_power_left_are_a_torn_tail(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log, _ = opened(path)
    log.append(records(0, 5))
    log.abandon()
    path.write_bytes(path.read_bytes() + bytes(4096))
    log, found = opened(path)
    assert found == records(0, 5) and log.doubt is Doubt.PROMISES
    log.close()
    for content in (b"", bytes(100), path.read_bytes()[:60], path.read_bytes()[:60] + bytes(100)):
        begun = tmp_path / "begun"
        begun.write_bytes(content)
        log, found = opened(begun)
        log.append(records(0, 1))
        log.close()
        assert found == []
        log, found = opened(begun)
        log.close()
        assert found == records(0, 1)


def test_a_file_of_zeros_is_not_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(bytes(100_000))
    with pytest.raises(InvalidArgument, match="this version"):
        Oplog(path).read()


def test_a_file_of_a_later_version_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"mooncake-oplog-4 whatever comes then" * 100)
    for repairs in (False, True):
        with pytest.raises(InvalidArgument, match="not of version 4; use that release"):
            Oplog(path, repairs=repairs).read()


def test_a_file_of_the_version_before_is_read_and_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"mooncake-oplog-2 0123456789abcdef\n" + encode(records(0, 5)))
    log, found = opened(path)
    assert (found, log.id, log.doubt) == (records(0, 5), "0123456789abcdef", Doubt.END)
    log.append(records(5, 1))
    log.close()
    assert path.read_bytes().startswith(oplog.MAGIC)
    assert opened(path)[1] == [*records(0, 5), IdsGiven(4), *records(5, 1)]


def test_a_snapshot_without_its_end_implies_no_removal(tmp_path: Path) -> None:
    """A log begins with a snapshot of its master's state: without its end, a missing object is not
    removed."""
    doubts: list[Doubt] = []
    begins: list[list[Record]] = [[LineBegan(1), *records(0, 3)], [LineBegan(1), IdsGiven(7)]]
    for number, begin in enumerate(begins):
        log, _ = opened(tmp_path / f"{number}")
        log.append(begin)
        log.close()
        log, _ = opened(tmp_path / f"{number}")
        doubts.append(log.doubt)
        log.close()
    assert doubts == [Doubt.ANY, Doubt.NONE]


def test_damage_in_a_file_of_the_version_before_is_no_torn_tail(tmp_path: Path) -> None:
    path = tmp_path / "log"
    content = b"mooncake-oplog-2 0123456789abcdef\n" + encode(records(0, 5))
    for at in range(34, 34 + len(encode(records(0, 4)))):
        path.write_bytes(content)
        damaged(path, at)
        with pytest.raises(InvalidArgument, match="damage of 26 bytes at offset"):
            Oplog(path).read()
    log = Oplog(path, repairs=True)
    assert log.read() == [*records(0, 3), *records(4, 1)] and log.doubt is Doubt.ANY


def test_what_a_log_is_worth_depends_on_how_its_master_ended(tmp_path: Path) -> None:
    path = tmp_path / "log"

    def next_life(boot: str, is_clean: bool) -> Doubt:
        log = Oplog(path, boot=boot)
        log.read()
        log.append(records(0, 1))
        log.close() if is_clean else log.abandon()
        return log.doubt

    lives = [("a", True), ("b", False), ("b", False), ("c", True), ("d", True), ("", False), ("", True)]
    expected = [Doubt.NONE, Doubt.NONE, Doubt.END, Doubt.PROMISES, Doubt.PROMISES, Doubt.PROMISES]
    assert [next_life(*life) for life in lives] == [*expected, Doubt.PROMISES]


# Loss of power, and disk errors


def lose_power(seed: int, live: Callable[[SimDirectory], object]) -> tuple[Oplog, list[Record]]:
    disk = SimDirectory(Random(seed))
    live(disk)
    disk.lose_power()
    log = Oplog(Path("/simulated/log"), directory=disk, boot="after")
    return log, log.read()


@pytest.mark.parametrize("seed", range(60))
def test_what_was_flushed_survives_a_loss_of_power_and_the_rest_is_a_torn_tail(seed: int) -> None:
    def live(disk: SimDirectory) -> None:
        log = Oplog(Path("/simulated/log"), directory=disk, boot="before")
        log.read()
        log.append(records(0, 5))
        log.flush()
        for number in range(5, 15):
            log.append(records(number, 1))

    log, found = lose_power(seed, live)
    assert records(0, 5) == found[:5] and found == records(0, len(found)), f"seed {seed}"
    assert log.doubt is Doubt.PROMISES


@pytest.mark.parametrize("seed", range(60))
def test_a_log_that_takes_the_place_of_another_is_one_or_the_other_after_a_loss_of_power(seed: int) -> None:
    """Nothing syncs between the rename and the loss: the file must have been synced before."""

    def live(disk: SimDirectory) -> None:
        log = Oplog(Path("/simulated/log"), directory=disk, boot="before")
        log.read()
        log.append(records(0, 5))
        log.flush()
        anew = log.begin_anew()
        anew.append(records(100, 5))
        anew.commit()

    _, found = lose_power(seed, live)
    assert found in (records(0, 5), records(100, 5)), f"seed {seed}"


@pytest.mark.parametrize("seed", range(60))
def test_what_is_flushed_after_a_rename_does_not_go_with_it(seed: int) -> None:
    def live(disk: SimDirectory) -> None:
        log = Oplog(Path("/simulated/log"), directory=disk, boot="before")
        log.read()
        rewrite(log, records(100, 5))
        log.append(records(200, 1))
        log.flush()

    assert lose_power(seed, live)[1] == [*records(100, 5), *records(200, 1)], f"seed {seed}"


def test_a_flush_while_the_log_is_replaced_syncs_the_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SimDirectory(Random(1))
    log = Oplog(Path("/simulated/log"), directory=disk)
    log.read()
    log.append(records(0, 1))
    anew = log.begin_anew()
    anew.append(records(0, 1))
    anew.sync()
    close, num_synced = SimFile.close, []

    def flush_meanwhile(file: SimFile) -> None:
        before = disk.num_syncs
        log.flush()
        num_synced.append(disk.num_syncs - before)
        close(file)

    with monkeypatch.context() as patch:
        patch.setattr(SimFile, "close", flush_meanwhile)
        anew.commit()
    assert num_synced == [2], "the new file and its name"


def test_a_record_written_in_part_is_cut_off_again() -> None:
    disk = SimDirectory(Random(1))
    log = Oplog(Path("/simulated/log"), directory=disk)
    log.read()
    log.append(records(0, 1))
    disk.capacity_bytes = log.size_bytes + 10
    with pytest.raises(OSError, match="No space"):
        log.append(records(1, 1))
    assert len(disk.content("log")) == log.size_bytes
    disk.capacity_bytes = None
    log.append(records(2, 1))
    log.close()
    log = Oplog(Path("/simulated/log"), directory=disk)
    assert log.read() == [*records(0, 1), *records(2, 1)]


def test_a_full_disk_lets_a_log_be_read_and_takes_it_on_when_there_is_room() -> None:
    disk = SimDirectory(Random(1))
    log = Oplog(Path("/simulated/log"), directory=disk)
    log.read()
    log.append(records(0, 2))
    disk.damage("log", disk.content("log")[:-1])
    disk.crash()
    disk.capacity_bytes = len(disk.content("log"))
    log = Oplog(Path("/simulated/log"), directory=disk)
    assert log.read() == records(0, 1)
    with pytest.raises(OSError, match="No space"):
        log.append(records(5, 1))
    assert disk.names() == ["log"], "half a copy is none"
    disk.capacity_bytes = None
    log.append(records(5, 1))
    log.close()
    log = Oplog(Path("/simulated/log"), directory=disk)
    assert log.read() == [*records(0, 1), *records(5, 1)] and disk.names() == ["log", "log.torn"]


@pytest.mark.parametrize("seed", range(20))
def test_a_new_log_whose_first_mark_was_refused_is_durable_with_its_name_later(seed: int) -> None:
    def live(disk: SimDirectory) -> None:
        log = Oplog(Path("/simulated/log"), directory=disk, boot="before")
        disk.capacity_bytes = oplog._HEADER_BYTES + 3
        assert log.read() == []
        assert len(disk.content("log")) == oplog._HEADER_BYTES, "the half mark is cut off"
        with pytest.raises(OSError, match="No space"):
            log.append(records(0, 1))
        disk.capacity_bytes = None
        log.append(records(0, 3))
        log.flush()

    log, found = lose_power(seed, live)
    assert found == records(0, 3), f"seed {seed}"
    assert log.doubt is Doubt.PROMISES, "the mark says that it was opened before the loss of power"


# Owners and permissions of the file


def test_a_link_and_a_file_that_others_may_write_are_refused(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"")
    (tmp_path / "log").symlink_to(tmp_path / "target")
    with pytest.raises(InvalidArgument, match="is a link"):
        Oplog(tmp_path / "log").read()
    (tmp_path / "target").chmod(0o666)
    with pytest.raises(InvalidArgument, match="only its owner may write"):
        Oplog(tmp_path / "target").read()


def test_a_folder_that_everybody_may_write_to_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(InvalidArgument, match="others may not write to"):
        Oplog(folder / "log").read()
    folder.chmod(0o1777)
    Oplog(folder / "log").read()
    assert (folder / "log").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("has_reports", [False, True])
@pytest.mark.parametrize("doubt", [Doubt.PROMISES, Doubt.ANY])
def test_a_rewritten_log_keeps_what_is_still_in_doubt(
    tmp_path: Path, doubt: Doubt, has_reports: bool
) -> None:
    path = tmp_path / "log"
    log = Oplog(path, boot="before")
    log.read()
    log.append([LineBegan(1), IdsGiven(9), *records(0, 5)])
    size_bytes = log.size_bytes
    log.append(records(5, 5))
    log.abandon()
    if doubt is Doubt.ANY:
        damaged(path, size_bytes)
    log = Oplog(path, repairs=True, boot="now")
    found = log.read()
    assert log.doubt is doubt
    anew = log.begin_anew()
    anew.append(found)
    if has_reports:
        log.is_whole(9)
    anew.commit()
    log.abandon()
    log = Oplog(path, boot="now")
    log.read()
    assert log.doubt is (Doubt.END if has_reports else doubt)
    log.close()

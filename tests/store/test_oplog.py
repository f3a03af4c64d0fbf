from __future__ import annotations

from pathlib import Path

import pytest

from mooncake.errors import InvalidArgument
from mooncake.store import oplog
from mooncake.store.oplog import Oplog
from mooncake.store.records import ObjectGone, Record


def records(first: int, count: int) -> list[Record]:
    return [ObjectGone(f"k{number}", number) for number in range(first, first + count)]


def opened(path: Path) -> tuple[Oplog, list[Record]]:
    log = Oplog(path)
    return log, log.read()


def rewrite(log: Oplog, records: list[Record]) -> None:
    anew = log.begin_anew()
    anew.append(records)
    anew.sync()
    anew.commit()


def test_what_is_appended_is_there_for_the_next_one(tmp_path: Path) -> None:
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
    log.close()
    path.write_bytes(path.read_bytes() + b"half a record")
    log, found = opened(path)
    assert found == records(0, 2)
    log.append(records(2, 1))
    log.close()
    assert opened(path)[1] == records(0, 3)


def test_two_masters_cannot_share_a_file(tmp_path: Path) -> None:
    log, _ = opened(tmp_path / "log")
    with pytest.raises(InvalidArgument, match="no other master"):
        Oplog(tmp_path / "log").read()
    log.close()
    Oplog(tmp_path / "log").read()


def test_it_asks_for_compaction_when_most_of_it_is_old(
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
    log.append(records(2, 1))
    log.close()
    assert [path.name for path in tmp_path.iterdir()] == ["log"]
    assert opened(tmp_path / "log")[1] == records(0, 3)

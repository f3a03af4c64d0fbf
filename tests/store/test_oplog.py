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
    found = log.read()
    log.rewrite(found)
    return log, found


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
    log.rewrite(records(0, 100))
    assert [*wanted, log.wants_compaction] == [False, True, False]
    log.append(records(0, 1))
    log.close()
    assert opened(tmp_path / "log")[1] == [*records(0, 100), *records(0, 1)]


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="missing"):
        Oplog(tmp_path / "missing" / "log").read()


def test_a_file_of_another_kind_counts_as_torn(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"#!/bin/sh\n" * 100)
    assert Oplog(tmp_path / "log").read() == []

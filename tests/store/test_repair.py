# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from mooncake.cli.store import make_application
from mooncake.errors import InvalidArgument
from mooncake.files import LockedDirectory
from mooncake.store.master.log_records import Doubt, ObjectGone
from mooncake.store.master.oplog import Oplog
from mooncake.store.messages import SegmentEntry
from mooncake.store.node.ssd import DATA
from mooncake.store.node.ssd_index_log import NAME, SsdIndexLog
from mooncake.store.repair import plan, repair


def entry(object_id: int) -> SegmentEntry:
    return SegmentEntry(f"k{object_id}", object_id, 4096, 4096, b"crc!", 4096 * object_id)


def opened(path: Path, repairs: bool = False) -> tuple[LockedDirectory, SsdIndexLog]:
    folder = LockedDirectory(path, "ssd_path")
    folder.take()
    try:
        return folder, SsdIndexLog(folder, repairs)
    except InvalidArgument:
        folder.close()
        raise


@pytest.fixture
def oplog(tmp_path: Path) -> Path:
    """A log with one damaged record out of ten."""
    path = tmp_path / "log"
    log = Oplog(path)
    log.read()
    for number in range(10):
        log.append([ObjectGone(f"k{number}", number)])
    log.close()
    flip(path, -300)
    return path


@pytest.fixture
def ssd(tmp_path: Path) -> Path:
    """The same for an index."""
    path = tmp_path / "ssd"
    hold_ten(path)
    (path / DATA).write_bytes(bytes(4096 * 11))
    flip(path / NAME, -150)
    return path


def hold_ten(path: Path) -> None:
    """Write an index of ten objects."""
    folder, log = opened(path)
    for number in range(10):
        log.hold(entry(number))
    log.close()
    folder.close()


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(bytes(content))


def files(path: Path) -> dict[str, bytes]:
    return {str(one): one.read_bytes() for one in sorted(path.rglob("*")) if one.is_file()}


def test_a_plan_names_the_damage_and_changes_nothing(oplog: Path, ssd: Path, tmp_path: Path) -> None:
    before = files(tmp_path)
    for path in (oplog, ssd):
        what = plan(path)
        (damage,) = what.found.damages
        text = "\n".join(what.lines())
        assert what.is_damaged and len(what.found.bodies) >= 9
        assert f"damaged: {damage.num_bytes} bytes at offset {damage.offset} (" in text
        assert f"{what.found.num_before} records before the damage and" in text
    assert files(tmp_path) == before


def test_the_start_is_refused_until_it_was_repaired(oplog: Path, ssd: Path, tmp_path: Path) -> None:
    before = files(tmp_path)
    with pytest.raises(InvalidArgument, match=rf"mooncake store repair {oplog}"):
        Oplog(oplog).read()
    with pytest.raises(InvalidArgument, match=rf"bytes at offset \d+.*mooncake store repair {ssd}"):
        opened(ssd)
    assert {name: content for name, content in files(tmp_path).items() if "lock" not in name} == {
        name: content for name, content in before.items() if "lock" not in name
    }
    repair(oplog)
    repair(ssd)
    log = Oplog(oplog)
    assert len(log.read()) == 9 and log.doubt is Doubt.ANY
    log.close()
    folder, index = opened(ssd)
    assert len(index.index.entries) == 9
    index.close()
    folder.close()
    after = files(tmp_path)
    for path in (oplog, ssd / NAME):
        assert after[f"{path}.damaged"] == before[str(path)]
        assert not plan(path if path is oplog else ssd).is_damaged


@pytest.mark.parametrize(
    ("num_bytes", "what", "num_kept"),
    [(None, "is missing, and", 0), (4096 * 5 + 100, "was cut short: it has 20580 bytes", 5)],
)
def test_objects_beyond_the_data_file_are_named_and_dropped(
    tmp_path: Path, num_bytes: int | None, what: str, num_kept: int
) -> None:
    path = tmp_path / "ssd"
    hold_ten(path)
    if num_bytes is not None:
        (path / DATA).write_bytes(bytes(num_bytes))
    before = files(path)
    damaged = plan(path)
    text = "\n".join(damaged.lines())
    assert damaged.is_damaged and f"damaged: {DATA} {what}" in text
    assert f"a repair keeps the {num_kept} objects" in text and "move the directory away" in text
    assert files(path) == before
    repair(path)
    assert not plan(path).is_damaged
    assert files(path)[f"{path / NAME}.damaged"] == before[str(path / NAME)]
    folder, log = opened(path)
    assert list(log.index.entries) == list(range(num_kept))
    log.close()
    folder.close()


def test_a_node_may_repair_at_its_start(ssd: Path) -> None:
    folder, index = opened(ssd, repairs=True)
    assert len(index.index.entries) == 9
    index.close()
    folder.close()


def test_a_file_in_use_and_other_files_are_left_alone(oplog: Path, ssd: Path, tmp_path: Path) -> None:
    log = Oplog(oplog, repairs=True)
    log.read()
    with pytest.raises(InvalidArgument, match="no other master uses"):
        repair(oplog)
    log.close()
    folder, _ = opened(ssd, repairs=True)
    with pytest.raises(InvalidArgument, match="no other process uses"):
        repair(ssd)
    folder.close()
    other = tmp_path / "other"
    other.write_bytes(b"something else " * 100)
    for path, why in (
        (other, "this version"),
        (tmp_path / "nothing", "can be read"),
        (tmp_path, "can be read"),
    ):
        with pytest.raises(InvalidArgument, match=why):
            plan(path)
    assert other.read_bytes() == b"something else " * 100


def test_the_command_shows_a_plan_and_repairs_only_on_request(oplog: Path) -> None:
    run, before = CliRunner(), oplog.read_bytes()
    shown = run.invoke(make_application(), ["repair", str(oplog)])
    assert shown.exit_code == 1 and "nothing was changed" in shown.output and "at offset" in shown.output
    assert oplog.read_bytes() == before
    done = run.invoke(make_application(), ["repair", str(oplog), "--yes"])
    assert done.exit_code == 0 and "repaired" in done.output and oplog.read_bytes() != before
    again = run.invoke(make_application(), ["repair", str(oplog)])
    assert again.exit_code == 0 and "nothing to repair" in again.output


def test_a_torn_tail_is_no_damage_and_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "ssd"
    folder, log = opened(path)
    log.hold(entry(0))
    size_bytes = log.index.num_bytes
    log.hold(entry(1))
    log.close()
    folder.close()
    (path / DATA).write_bytes(bytes(4096 * 3))
    content = (path / NAME).read_bytes()
    (path / NAME).write_bytes(content[:-3])
    assert not plan(path).is_damaged and "cut off by a crash" in "\n".join(plan(path).lines())
    folder, log = opened(path)
    assert list(log.index.entries) == [0]
    assert (path / f"{NAME}.torn").read_bytes() == content[size_bytes:-3]
    log.hold(entry(2))
    log.close()
    folder.close()
    folder, log = opened(path)
    assert list(log.index.entries) == [0, 2]
    log.close()
    folder.close()


def test_an_index_of_the_release_before_is_read_and_written_anew(tmp_path: Path) -> None:
    from mooncake.store.node.ssd_index import compacted

    path = tmp_path / "ssd"
    folder, log = opened(path)
    log.close()
    folder.close()
    (path / NAME).write_bytes(compacted(entry(number) for number in range(5)))
    folder, log = opened(path)
    assert list(log.index.entries) == [0, 1, 2, 3, 4]
    log.drop([1])
    log.close()
    folder.close()
    folder, log = opened(path)
    assert list(log.index.entries) == [0, 2, 3, 4]
    log.close()
    folder.close()

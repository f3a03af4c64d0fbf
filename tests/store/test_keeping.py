"""The log on disk while a master works: written anew between requests, whole when that goes wrong."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
from pathlib import Path
from typing import Any

import pytest

from mooncake.errors import Unavailable
from mooncake.store import copying, keeping, oplog
from mooncake.store.effects import Keep
from mooncake.store.keeping import Keeping
from mooncake.store.master import Master
from mooncake.store.oplog import Oplog
from mooncake.store.records import Record
from tests.store.conftest import SETTINGS, Voice


class Kept:
    """A master whose records are kept in ``path``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.keeping = Keeping(str(path))
        self.keeping.read()
        self.voice = Voice(SETTINGS)
        self.keeping.keep(self.voice.master.snapshot(), self.voice.master.catalog)
        handle = self.voice.master.handle

        def kept(event: Any, now: float) -> Any:
            effects = handle(event, now)
            for effect in effects:
                if isinstance(effect, Keep):
                    self.keeping.keep(effect.records, self.voice.master.catalog)
            return effects

        self.voice.master.handle = kept  # type: ignore[method-assign]

    def restored(self) -> dict[str, int]:
        """What a successor would know."""
        copy = self.path.with_suffix(".copy")
        copy.write_bytes(self.path.read_bytes())
        log = Oplog(copy)
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
    """The same keys are put and removed; the loop may do what it has to do in between."""
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
    monkeypatch.setattr(copying.Copy.piece, "__defaults__", (3,))
    monkeypatch.setattr(keeping, "PAUSE_S", 0.0)
    sizes = []
    for _ in range(20):
        await work(kept, 3)
        sizes.append(kept.path.stat().st_size)
        assert kept.restored() == kept.known()
    assert any(after < before for before, after in itertools.pairwise(sizes)), sizes
    assert kept.keeping.id.encode() in kept.path.read_bytes().split(b"\n")[0]
    kept.keeping.close()


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
    kept.keeping.close()


async def test_a_disk_that_is_full_ends_the_master_with_the_file_named(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept.voice.put("before", size_bytes=100)
    write = os.write

    def half(file: int, content: Any) -> int:
        if len(content) > 20:
            return write(file, content[:20])
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(Unavailable, match=f"{kept.path} can't be written.*no space left"):
        kept.voice.put("after", size_bytes=100)
    monkeypatch.undo()
    assert list(kept.restored()) == ["before"], "a record that was cut off was never acknowledged"
    kept.keeping.close()


async def test_without_a_file_nothing_is_kept() -> None:
    keeping = Keeping("")
    assert keeping.read() == [] and keeping.id == ""
    records: list[Record] = []
    keeping.keep(records, Master(SETTINGS).catalog)
    keeping.begin_copy()
    keeping.copied(records, is_complete=True)
    keeping.close()


async def test_a_leaders_log_takes_the_place_of_the_own_when_it_is_complete(kept: Kept) -> None:
    kept.voice.put("own", size_bytes=100)
    leader = Voice(SETTINGS)
    leader.mount(size_bytes=1 << 20)
    leader.put("theirs", size_bytes=100)
    snapshot = leader.master.snapshot()
    kept.keeping.begin_copy()
    kept.keeping.copied(snapshot[:2], is_complete=False)
    assert list(kept.restored()) == ["own"]
    kept.keeping.begin_copy()
    kept.keeping.copied(snapshot, is_complete=True)
    assert list(kept.restored()) == ["theirs"]
    kept.keeping.keep([], leader.master.catalog)
    kept.keeping.close()

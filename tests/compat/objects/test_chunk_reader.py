# SPDX-License-Identifier: Apache-2.0
"""Reads end where their memory ends, and many members are read in one call."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mooncake.compat.objects.chunk_reader import ChunkReader, MemberRead, carry_out
from mooncake.compat.objects.manifest import StoredChunk, StoredMember
from mooncake.compat.objects.rows import RowSelection, select_rows
from mooncake.store import MooncakeDistributedStore
from tests.compat.objects.plain_store import PlainStore

DATA = bytes(range(100))


def a_member(store: Any, name: str) -> StoredMember:
    sizes = (40, 40, 20)
    chunks = tuple(StoredChunk(f"{name}/{number}", size) for number, size in enumerate(sizes))
    for number, chunk in enumerate(chunks):
        store.put(chunk.key, DATA[number * 40 : number * 40 + chunk.size_bytes])
    return StoredMember(name, 100, chunks)


def a_read(member: StoredMember, runs: list[tuple[int, int]], memory: Any, **more: Any) -> MemberRead:
    return MemberRead(member, runs, int(memory.ctypes.data), memory.nbytes, **more)


RUNS = [[(0, 100)], [(39, 2)], [(99, 1), (0, 1), (35, 50)], [(10, 0)], [(5, 3), (5, 3)]]


@pytest.mark.parametrize("runs", RUNS)
def test_runs_arrive_one_after_the_other(
    store: MooncakeDistributedStore, plain: PlainStore, runs: list[tuple[int, int]]
) -> None:
    wanted = b"".join(DATA[start : start + length] for start, length in runs)
    for each in (store, plain):
        member = a_member(each, "runs")
        memory = np.full(len(wanted) + 8, 255, np.uint8)
        ChunkReader(each).read([a_read(member, runs, memory)])
        assert memory.tobytes() == wanted + b"\xff" * 8


@pytest.mark.parametrize("runs", [[(0, 101)], [(100, 1)], [(-1, 1)], [(0, 60), (0, 5)], [(5, -1)]])
def test_what_does_not_fit_is_not_read(plain: PlainStore, runs: list[tuple[int, int]]) -> None:
    memory = np.zeros(64, np.uint8)
    with pytest.raises(ValueError, match=r"outside its 100 bytes|do not fit"):
        ChunkReader(plain).read([a_read(a_member(plain, "x"), runs, memory)])
    assert not memory.any()


def _counted(calls: list[str], name: str, call: Any) -> Any:
    def counted(*args: Any) -> Any:
        calls.append(name)
        return call(*args)

    return counted


def test_many_members_are_one_call(store: MooncakeDistributedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("get_into_ranges", "batch_get_into", "get_into", "get"):
        monkeypatch.setattr(store, name, _counted(calls, name, getattr(store, name)))
    memories = [np.zeros(100, np.uint8) for _ in range(4)]
    reads = [
        a_read(a_member(store, f"many{n}"), [(0, 100)], memory, by_chunk=n > 1)
        for n, memory in enumerate(memories)
    ]

    def plan(read: MemberRead) -> Any:
        yield [read]
        return read.member.key

    found = carry_out(ChunkReader(store), {read.member.key: plan(read) for read in reads})
    assert list(found) == ["many0", "many1", "many2", "many3"]
    assert sorted(calls) == ["batch_get_into", "get_into_ranges"]
    assert all(memory.tobytes() == DATA for memory in memories)


def test_a_failed_read_ends_all_plans(plain: PlainStore) -> None:
    ended: list[str] = []

    def plan(name: str, member: StoredMember) -> Any:
        try:
            yield [a_read(member, [(0, 100)], np.zeros(100, np.uint8))]
        finally:
            ended.append(name)

    good, lost = a_member(plain, "good"), a_member(plain, "lost")
    plain.remove("lost/1")
    with pytest.raises(RuntimeError, match="lost/1: expected 40 bytes, got 0"):
        carry_out(ChunkReader(plain), {"good": plan("good", good), "lost": plan("lost", lost)})
    assert sorted(ended) == ["good", "lost"]


def test_neighbouring_rows_are_one_run() -> None:
    assert RowSelection(np.array([1, 2, 3, 7, 7, 0])).byte_runs(10) == [(10, 30), (70, 10), (70, 10), (0, 10)]
    assert RowSelection(np.array([], dtype=np.int64)).byte_runs(10) == []
    offsets = np.array([0, 2, 2, 5, 9])
    assert RowSelection(np.array([1, 2, 0])).ragged_runs(offsets, 4) == [(8, 12), (0, 8)]
    selected = select_rows([-1, 0], 4)
    assert selected is not None and selected.indices.tolist() == [3, 0]
    with pytest.raises(IndexError, match="3 of 2 rows"):
        select_rows(selected, 2)

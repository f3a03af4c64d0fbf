# SPDX-License-Identifier: Apache-2.0
"""Every wanted byte is read, and only whole chunks are."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from mooncake.compat.store.read_plan import Part, chunk_bytes_for, plan_reads

BASE = 1 << 20


@st.composite
def objects_and_parts(draw: st.DrawFn) -> tuple[int, int, list[Part]]:
    size, chunk = draw(st.integers(1, 64)), draw(st.integers(1, 17))
    parts: list[Part] = []
    at = BASE
    for _ in range(draw(st.integers(0, 6))):
        offset = draw(st.integers(0, size))
        length = draw(st.integers(0, size - offset))
        parts.append((offset, at, length))
        at += length
    return size, chunk, parts


@given(objects_and_parts())
def test_every_wanted_byte_is_read(case: tuple[int, int, list[Part]]) -> None:
    size, chunk, parts = case
    content = bytes(range(size))
    memory = bytearray(sum(length for _, _, length in parts))
    plan = plan_reads(size, chunk, parts)
    staging = bytearray()
    for offset, length in plan.staged:
        assert offset % chunk == 0 and length == min(chunk, size - offset), "a whole chunk"
        staging += content[offset : offset + length]
    assert len(staging) == plan.staged_bytes
    for offset, address, length in plan.direct:
        memory[address - BASE : address - BASE + length] = content[offset : offset + length]
    for offset, address, length in plan.copies:
        memory[address - BASE : address - BASE + length] = staging[offset : offset + length]
    assert bytes(memory) == b"".join(content[offset : offset + length] for offset, _, length in parts)


@given(objects_and_parts())
def test_direct_reads_make_up_whole_chunks(case: tuple[int, int, list[Part]]) -> None:
    size, chunk, parts = case
    times = [0] * size
    for offset, _, length in plan_reads(size, chunk, parts).direct:
        for at in range(offset, offset + length):
            times[at] += 1
    for start in range(0, size, chunk):
        of_chunk = times[start : start + chunk]
        assert len(set(of_chunk)) == 1, "all of its bytes equally often"


def test_pages_that_are_chunks_are_not_staged() -> None:
    plan = plan_reads(1 << 16, 4096, [(8192, BASE, 4096), (0, BASE + 4096, 4096)])
    assert not plan.staged and len(plan.direct) == 2


def test_two_halves_of_a_chunk_are_not_staged() -> None:
    plan = plan_reads(4096, 4096, [(2048, BASE, 2048), (0, BASE + 9000, 2048)])
    assert not plan.staged and len(plan.direct) == 2


def test_the_chunk_size_is_that_of_equal_pages() -> None:
    assert chunk_bytes_for([8192, 8192, 100], 1 << 20) == 8192
    assert chunk_bytes_for([8192, 4096, 8192], 1 << 20) == 1 << 20
    assert chunk_bytes_for([64, 64], 1 << 20) == 1 << 20, "too small to be checked one by one"
    assert chunk_bytes_for([], 1 << 20) == 1 << 20


@given(objects_and_parts(), st.integers(1, 40))
def test_a_plan_is_split_between_chunks(case: tuple[int, int, list[Part]], max_bytes: int) -> None:
    size, chunk, parts = case
    plan = plan_reads(size, chunk, parts)
    pieces = plan.split(chunk, max_bytes)
    content = bytes(range(size))
    memory = bytearray(sum(length for _, _, length in parts))
    for piece in pieces:
        times = [0] * size
        for offset, address, length in piece.direct:
            memory[address - BASE : address - BASE + length] = content[offset : offset + length]
            times[offset : offset + length] = [count + 1 for count in times[offset : offset + length]]
        for start in range(0, size, chunk):
            assert len(set(times[start : start + chunk])) == 1, "a chunk is read by one of the plans"
        staging = b"".join(content[offset : offset + length] for offset, length in piece.staged)
        assert len(staging) == piece.staged_bytes
        for offset, address, length in piece.copies:
            memory[address - BASE : address - BASE + length] = staging[offset : offset + length]
    assert bytes(memory) == b"".join(content[offset : offset + length] for offset, _, length in parts)
    assert sum(piece.moved_bytes for piece in pieces) == plan.moved_bytes
    assert all(one.moved_bytes + two.moved_bytes > max_bytes for one, two in itertools.pairwise(pieces))


def test_pieces_of_a_large_read() -> None:
    plan = plan_reads(100 << 20, 1 << 20, [(0, BASE, 100 << 20)])
    assert [piece.moved_bytes >> 20 for piece in plan.split(1 << 20, 30 << 20)] == [30, 30, 30, 10]
    assert [piece.direct for piece in plan.split(1 << 20, 100 << 20)] == [plan.direct]

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import sys
import threading

from hypothesis import given
from hypothesis import strategies as st

from mooncake.store import messages as m
from mooncake.store.allocator import ALIGNMENT_BYTES
from mooncake.store.client.preallocated import (
    FIRST_GOAL,
    MAX_BYTES,
    MAX_DIRECT_BYTES,
    MAX_PIECES,
    REFUSED_PUTS,
    PreallocatedPieces,
    piece_bytes,
)

HERE = m.Replica("a", 7, 0)
THERE = m.Replica("b", 7, 0)


def advance(
    count: int,
    size_bytes: int = 1024,
    number: int = 1,
    place: m.Replica = HERE,
    is_durable: bool = False,
) -> m.PreallocatedSpace:
    return m.PreallocatedSpace(number, 40.0, size_bytes, [place] * count, is_durable)


def wants(pool: PreallocatedPieces, num_puts: int, size_bytes: int = 1000) -> list[int]:
    """Number of pieces that each of several puts requests when none is ever granted."""
    return [pool.wanted(size_bytes) for _ in range(num_puts)]


@given(st.integers(1, 1 << 20))
def test_a_piece_is_slightly_larger_and_aligned(size_bytes: int) -> None:
    size = piece_bytes(size_bytes)
    assert size_bytes <= size <= max(size_bytes * 1.125, size_bytes + ALIGNMENT_BYTES)
    assert size % ALIGNMENT_BYTES == 0 and piece_bytes(size) == size


def test_few_different_sizes_suffice() -> None:
    assert len({piece_bytes(size) for size in range(1, 65537)}) < 80
    assert len({piece_bytes(size) for size in range(1, MAX_DIRECT_BYTES + 1)}) < 120
    assert piece_bytes(4096) == 4096


def test_requests_start_with_the_second_put_of_a_size_and_double() -> None:
    pool = PreallocatedPieces()
    assert wants(pool, 6) == [0, 4, 8, 16, 32, MAX_PIECES]
    assert pool.wanted(5000) == 0, "another size"
    assert wants(PreallocatedPieces(), 6, 500_000)[-1] == MAX_BYTES // piece_bytes(500_000)


def test_more_is_requested_before_the_last_is_taken() -> None:
    pool = PreallocatedPieces()
    wanted = wants(pool, 2)
    pool.add(advance(wanted[1]), 1000, asked_at=0.0)
    requested = []
    while pool.take(1000) is not None:
        requested.append(pool.wanted(1000))
    assert requested == [0, 0, 8, 16]


def test_pieces_are_taken_in_order_and_come_back_first() -> None:
    pool = PreallocatedPieces()
    pool.add(advance(2), 1000, asked_at=10.0)
    first = pool.take(1024)
    assert first is not None and (first.advance_id, first.number) == (1, 0)
    assert (first.write_until, first.expires_at) == (40.0, 50.0)
    assert pool.take(1025) is None
    pool.give_back(first)
    assert pool.take(1000) == first and len(pool) == 1


def test_after_a_refusal_the_request_is_not_repeated_with_each_put() -> None:
    pool = PreallocatedPieces()
    assert wants(pool, 2) == [0, 2 * FIRST_GOAL]
    pool.add(None, 1000, asked_at=0.0)
    assert wants(pool, REFUSED_PUTS + 2) == [0] * (REFUSED_PUTS + 1) + [2 * FIRST_GOAL]


def test_pieces_not_used_in_time_are_dropped_and_fewer_requested() -> None:
    pool = PreallocatedPieces()
    assert wants(pool, 4)[-1] == 16
    pool.add(advance(16), 1000, asked_at=0.0)
    pool.add(advance(1, number=2), 1000, asked_at=20.0)
    pool.drop_late(29.0)
    assert len(pool) == 17
    pool.drop_late(30.0)
    left = pool.take(1000)
    assert left is not None and left.advance_id == 2 and pool.take(1000) is None
    assert pool.wanted(1000) == 8, "a quarter, doubled"


def test_a_client_that_rarely_puts_holds_nothing() -> None:
    pool = PreallocatedPieces()
    wanted = wants(pool, 2)[1]
    pool.add(advance(wanted), 1000, asked_at=0.0)
    pool.drop_late(30.0)
    assert pool.wanted(1000) == 2
    pool.add(advance(2), 1000, asked_at=30.0)
    pool.drop_late(60.0)
    assert pool.wanted(1000) == 0


def test_pieces_of_a_lost_node_or_a_lost_master_are_dropped() -> None:
    pool = PreallocatedPieces()
    pool.add(advance(2), 1000, asked_at=0.0)
    pool.add(advance(3, place=THERE, number=2), 1000, asked_at=0.0)
    pool.drop_on("a")
    assert len(pool) == 3
    pool.clear()
    assert len(pool) == 0 and pool.take(1000) is None


def test_pieces_for_durable_objects_are_kept_apart() -> None:
    pool = PreallocatedPieces()
    pool.add(advance(1, number=1), 1000, 0.0)
    pool.add(advance(1, number=2, is_durable=True), 1000, 0.0, is_durable=True)
    piece = pool.take(1000, is_durable=True)
    assert piece is not None and piece.advance_id == 2
    assert pool.take(1000, is_durable=True) is None
    pool.give_back(piece)
    assert pool.take(1000, is_durable=True) is piece
    other = pool.take(1000)
    assert other is not None and other.advance_id == 1
    assert (wants(pool, 2), pool.wanted(1000, is_durable=True)) == ([0, 4], 0), "the first of its kind"


def test_pieces_of_a_master_that_refuses_durable_puts_there_are_not_used() -> None:
    """An earlier release gives them, and refuses what is written to them."""
    pool = PreallocatedPieces()
    pool.add(advance(1), 1000, 0.0, is_durable=True)
    assert len(pool) == 0
    assert [pool.wanted(1000, is_durable=True) for _ in range(REFUSED_PUTS + 2)][-2:] == [0, 4]


def test_threads_never_have_the_same_piece() -> None:
    """This also holds while other threads drop late or lost pieces."""
    pool = PreallocatedPieces()
    pool.add(advance(200), 1000, asked_at=0.0)
    pool.add(advance(200, number=2, place=THERE), 1000, asked_at=10.0)
    taken: list[tuple[int, int]] = []

    def take() -> None:
        while (piece := pool.take(1000)) is not None:
            taken.append((piece.advance_id, piece.number))

    def drop() -> None:
        for _ in range(20):
            pool.drop_late(20.0)
            pool.drop_on("nowhere")

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work) for work in (take, drop, take, drop)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    take()
    assert len(set(taken)) == len(taken)
    assert {number for advance_id, number in taken if advance_id == 2} == set(range(200))

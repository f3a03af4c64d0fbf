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
    MAX_PIECES,
    REFUSED_PUTS,
    PreallocatedPieces,
    piece_bytes,
)

HERE = m.Replica("a", 7, 0)
THERE = m.Replica("b", 7, 0)


def advance(
    count: int, size_bytes: int = 1024, number: int = 1, place: m.Replica = HERE
) -> m.PreallocatedSpace:
    return m.PreallocatedSpace(number, 40.0, size_bytes, [place] * count)


def wants(stock: PreallocatedPieces, num_puts: int, size_bytes: int = 1000) -> list[int]:
    """What each of so many puts asks for, when nothing is ever given."""
    return [stock.wanted(size_bytes) for _ in range(num_puts)]


@given(st.integers(1, 1 << 20))
def test_a_piece_is_a_little_larger_and_aligned(size_bytes: int) -> None:
    size = piece_bytes(size_bytes)
    assert size_bytes <= size <= max(size_bytes * 1.125, size_bytes + ALIGNMENT_BYTES)
    assert size % ALIGNMENT_BYTES == 0 and piece_bytes(size) == size


def test_few_sizes_do_for_all() -> None:
    assert len({piece_bytes(size) for size in range(1, 65537)}) < 80
    assert piece_bytes(4096) == 4096


def test_the_first_put_of_a_size_asks_for_nothing_and_then_it_doubles() -> None:
    stock = PreallocatedPieces()
    assert wants(stock, 6) == [0, 4, 8, 16, 32, MAX_PIECES]
    assert stock.wanted(5000) == 0, "another size"
    assert wants(PreallocatedPieces(), 6, 60_000)[-1] == MAX_BYTES // piece_bytes(60_000)


def test_more_is_asked_for_before_the_last_is_taken() -> None:
    stock = PreallocatedPieces()
    wanted = wants(stock, 2)
    stock.add(advance(wanted[1]), 1000, asked_at=0.0)
    asked = []
    while stock.take(1000) is not None:
        asked.append(stock.wanted(1000))
    assert asked == [0, 0, 8, 16]


def test_pieces_are_taken_in_order_and_come_back_first() -> None:
    stock = PreallocatedPieces()
    stock.add(advance(2), 1000, asked_at=10.0)
    first = stock.take(1024)
    assert first is not None and (first.advance_id, first.number) == (1, 0)
    assert (first.write_until, first.expires_at) == (40.0, 50.0)
    assert stock.take(1025) is None
    stock.give_back(first)
    assert stock.take(1000) == first and len(stock) == 1


def test_when_nothing_is_given_it_is_not_asked_for_each_time() -> None:
    stock = PreallocatedPieces()
    assert wants(stock, 2) == [0, 2 * FIRST_GOAL]
    stock.add(None, 1000, asked_at=0.0)
    assert wants(stock, REFUSED_PUTS + 2) == [0] * (REFUSED_PUTS + 1) + [2 * FIRST_GOAL]


def test_what_was_not_used_in_time_is_forgotten_and_less_is_asked_for() -> None:
    stock = PreallocatedPieces()
    assert wants(stock, 4)[-1] == 16
    stock.add(advance(16), 1000, asked_at=0.0)
    stock.add(advance(1, number=2), 1000, asked_at=20.0)
    stock.drop_late(29.0)
    assert len(stock) == 17
    stock.drop_late(30.0)
    left = stock.take(1000)
    assert left is not None and left.advance_id == 2 and stock.take(1000) is None
    assert stock.wanted(1000) == 8, "a quarter, doubled"


def test_who_puts_seldom_holds_nothing() -> None:
    stock = PreallocatedPieces()
    wanted = wants(stock, 2)[1]
    stock.add(advance(wanted), 1000, asked_at=0.0)
    stock.drop_late(30.0)
    assert stock.wanted(1000) == 2
    stock.add(advance(2), 1000, asked_at=30.0)
    stock.drop_late(60.0)
    assert stock.wanted(1000) == 0


def test_what_is_on_a_lost_node_and_what_a_lost_master_gave_goes() -> None:
    stock = PreallocatedPieces()
    stock.add(advance(2), 1000, asked_at=0.0)
    stock.add(advance(3, place=THERE, number=2), 1000, asked_at=0.0)
    stock.drop_on("a")
    assert len(stock) == 3
    stock.clear()
    assert len(stock) == 0 and stock.take(1000) is None


def test_threads_never_have_the_same_piece() -> None:
    """Also while others drop what is late or lost."""
    stock = PreallocatedPieces()
    stock.add(advance(200), 1000, asked_at=0.0)
    stock.add(advance(200, number=2, place=THERE), 1000, asked_at=10.0)
    taken: list[tuple[int, int]] = []

    def take() -> None:
        while (piece := stock.take(1000)) is not None:
            taken.append((piece.advance_id, piece.number))

    def drop() -> None:
        for _ in range(20):
            stock.drop_late(20.0)
            stock.drop_on("nowhere")

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

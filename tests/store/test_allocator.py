# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake.errors import InvalidArgument
from mooncake.store.allocator import ALIGNMENT_BYTES, Allocator

KIB = 1024


def test_ranges_are_aligned_and_never_overlap() -> None:
    allocator = Allocator(4 * KIB)
    offsets = [allocator.allocate(size) for size in (1, 64, 65, 1000)]
    assert offsets == [0, 64, 128, 256]
    assert allocator.allocated_bytes == 64 + 64 + 128 + 1024
    allocator.check()


def test_freed_neighbours_merge_whatever_the_order() -> None:
    for order in ((0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)):
        allocator = Allocator(3 * KIB)
        offsets = [allocator.allocate(KIB) for _ in range(3)]
        assert allocator.allocate(1) is None
        for index in order:
            offset = offsets[index]
            assert offset is not None
            allocator.free(offset)
            allocator.check()
        assert allocator.largest_free_bytes == 3 * KIB


def test_what_is_trimmed_off_is_free_and_merges_with_the_hole_behind_it() -> None:
    allocator = Allocator(4 * KIB)
    first, second = allocator.allocate(KIB), allocator.allocate(KIB)
    assert first == 0 and second == KIB
    assert allocator.trim(first, 100) == KIB - 128
    allocator.check()
    assert allocator.trim(first, 128) == 0, "nothing is behind it"
    assert allocator.trim(second, 64) == KIB - 64
    allocator.check()
    assert allocator.allocated_bytes == 128 + 64 and allocator.largest_free_bytes == 3 * KIB - 64
    assert allocator.allocate(KIB - 128) == 128
    allocator.free(first)
    allocator.check()


def test_the_parts_of_a_range_are_ranges() -> None:
    allocator = Allocator(KIB)
    offset = allocator.allocate(512)
    assert offset == 0
    allocator.split(offset, 128)
    allocator.check()
    assert allocator.allocations == {0: 128, 128: 128, 256: 128, 384: 128}
    assert allocator.free(128) == 128
    assert allocator.allocate(128) == 128
    allocator.check()


def test_a_hole_of_exactly_the_size_is_found() -> None:
    """1472 KiB isn't a bin's border, so the holes are in the bin below the one that surely fits."""
    size = 1472 * KIB
    allocator = Allocator(40 * size)
    offsets = [allocator.allocate(size) for _ in range(40)]
    for offset in offsets[::2]:
        assert offset is not None
        allocator.free(offset)
    assert all(allocator.allocate(size) is not None for _ in range(20))
    assert allocator.free_bytes == 0
    allocator.check()


def test_a_fitting_hole_is_found_behind_many_that_do_not_fit() -> None:
    small, large = 1025 * 64, 1100 * 64  # the same bin
    allocator = Allocator(large + 64 + 100 * (small + 64))
    first = allocator.allocate(large)
    assert first is not None
    allocator.allocate(64)
    for _ in range(100):
        offset = allocator.allocate(small)
        assert offset is not None
        allocator.allocate(64)
    holes = [offset for offset, size in allocator.allocations.items() if size == small]
    for offset in [first, *holes]:
        allocator.free(offset)
    assert allocator.allocate(large) == first
    allocator.check()


@pytest.mark.parametrize("alignment_bytes", [64, 4096])
def test_ranges_of_another_allocator_are_taken_over(alignment_bytes: int) -> None:
    old = Allocator(256 * KIB, alignment_bytes)
    offsets = [old.allocate(size) for size in (100, 5000, 64, 7000, 1)]
    for offset in offsets[1::2]:
        assert offset is not None
        old.free(offset)
    allocator = Allocator(256 * KIB, alignment_bytes)
    for offset, size in reversed(old.allocations.items()):
        assert allocator.take(offset, size - 3)
        allocator.check()
    assert allocator.allocations == old.allocations
    assert allocator.largest_free_bytes == old.largest_free_bytes
    full = Allocator(4 * KIB, alignment_bytes)
    assert full.take(0, 4 * KIB) and full.allocate(1) is None and not full.has_hole(1)
    full.free(0)
    full.check()


def test_what_is_not_free_cannot_be_taken() -> None:
    allocator = Allocator(4 * KIB)
    assert allocator.take(1024, 1000)
    for offset, size in ((1024, 1), (960, 65), (1984, 64), (0, 4097), (4096, 1), (100, 1), (-64, 1)):
        assert not allocator.take(offset, size), (offset, size)
    assert allocator.take(960, 64) and allocator.take(2048, 2048)
    assert [allocator.allocate(size) for size in (960, 1)] == [0, None]
    allocator.check()


def test_pages_are_aligned_to_pages() -> None:
    allocator = Allocator(20_000, 4096)
    assert allocator.size_bytes == 16384
    assert [allocator.allocate(size) for size in (1, 4097, 1, 1)] == [0, 4096, 12288, None]
    allocator.check()


def test_a_segment_must_hold_something() -> None:
    with pytest.raises(InvalidArgument, match="size_bytes"):
        Allocator(ALIGNMENT_BYTES - 1)
    assert Allocator(100).size_bytes == 64


@given(st.integers(0, 2**32), st.integers(1, 200))
def test_any_sequence_keeps_the_invariants(seed: int, num_steps: int) -> None:
    random = Random(seed)
    allocator = Allocator(64 * KIB)
    held: list[int] = []
    for _ in range(num_steps):
        if held and random.random() < 0.45:
            allocator.free(held.pop(random.randrange(len(held))))
        elif random.random() < 0.2:
            place, size = 64 * random.randrange(1024), random.randint(1, 5000)
            is_free = all(
                at + length <= place or at >= place + size for at, length in allocator.allocations.items()
            )
            is_taken = allocator.take(place, size)
            assert is_taken is (is_free and place + size <= allocator.size_bytes)
            if is_taken:
                held.append(place)
        else:
            size = random.choice((1, 64, 100, 1000, 4096, random.randint(1, 20000)))
            offset = allocator.allocate(size)
            if offset is None:
                assert allocator.largest_free_bytes < size
            else:
                held.append(offset)
    allocator.check()
    for offset in held:
        allocator.free(offset)
    allocator.check()
    assert allocator.largest_free_bytes == allocator.size_bytes

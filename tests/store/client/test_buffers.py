# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Iterator

import numpy as np
import pytest

from mooncake.errors import InvalidArgument, Unavailable
from mooncake.store.client.buffers import NUM_SLOTS, SLOT_BYTES, STAGED_BYTES, STAGING_BYTES, LocalMemory
from mooncake.transfer import TransferEngine, TransferSettings
from mooncake.transfer.memory import check_mapped, span_of
from tests.contract import cuda_double


@pytest.fixture
def memory() -> Iterator[LocalMemory]:
    with TransferEngine() as engine:
        memory = LocalMemory(engine)
        yield memory
        memory.close()
        assert not engine.regions.all(), "a region is still registered"


def registered(memory: LocalMemory) -> list[int]:
    return [region.size_bytes for region in memory.engine.regions.all()]


def test_small_buffers_are_copied_to_the_staging_region(memory: LocalMemory) -> None:
    with memory.source([b"one", bytearray(b"three"), np.frombuffer(b"five!", dtype=np.uint8)]) as prepared:
        assert prepared.is_staged and prepared.sizes == [3, 5, 5]
        assert registered(memory) == [STAGING_BYTES]
        staging = memory.engine.regions.all()[0]
        offset = prepared.addresses[0] - staging.address
        assert bytes(staging.view()[offset : offset + 13]) == b"onethreefive!"
        with memory.source([b"four"]) as other:
            assert other.addresses[0] >= prepared.addresses[0] + 13


def test_small_operations_share_no_memory_even_if_there_are_more_than_slots(memory: LocalMemory) -> None:
    sizes = [1, SLOT_BYTES, SLOT_BYTES + 1, STAGED_BYTES] * NUM_SLOTS
    values = [bytes([number]) * size for number, size in enumerate(sizes)]
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(memory.source([value])) for value in values]
        staged = [prepared for prepared in held if prepared.is_staged]
        assert len(staged) > 2 * NUM_SLOTS
        for prepared, value in zip(held, values, strict=True):
            assert ctypes.string_at(prepared.addresses[0], len(value)) == value
    with contextlib.ExitStack() as stack:  # all of it is free again
        pieces = [
            stack.enter_context(memory.source([bytes(SLOT_BYTES)]))
            for _ in range(STAGING_BYTES // SLOT_BYTES)
        ]
        assert all(prepared.is_staged for prepared in pieces)
        assert len({prepared.addresses[0] for prepared in pieces}) == len(pieces)


def test_a_small_operation_uses_the_memory_that_was_freed_last(memory: LocalMemory) -> None:
    with memory.source([b"1"]) as first, memory.source([b"2"]):
        used = first.addresses[0]
    with memory.source([b"3"]) as next_one:
        assert next_one.addresses == [used]


def test_large_buffers_are_registered_until_the_operation_ends(memory: LocalMemory) -> None:
    value = bytes(STAGED_BYTES + 1)
    with memory.source([value]) as prepared:
        assert not prepared.is_staged and registered(memory) == [len(value)]
    assert registered(memory) == []


def test_rows_of_an_array_are_registered_as_one_range(memory: LocalMemory) -> None:
    rows = np.zeros((8, STAGED_BYTES), dtype=np.uint8)
    first = rows.ctypes.data
    with memory.target([rows[3], rows[1], rows[2], rows[7]]) as prepared:
        assert prepared.addresses == [first + index * STAGED_BYTES for index in (3, 1, 2, 7)]
        assert sorted(registered(memory)) == [STAGED_BYTES, 3 * STAGED_BYTES]


def test_the_same_buffer_twice_is_one_range(memory: LocalMemory) -> None:
    row = np.zeros(STAGED_BYTES, dtype=np.uint8)
    with memory.target([row, row]) as prepared:
        assert prepared.addresses == [row.ctypes.data] * 2
        assert registered(memory) == [STAGED_BYTES]


def test_memory_registered_by_the_caller_is_used_directly(memory: LocalMemory) -> None:
    pool = memory.engine.allocate(2 * STAGED_BYTES, huge_pages=False, populate=False)
    small, large = (pool.address + 8, 100), (pool.address, 2 * STAGED_BYTES)
    with memory.source([small]) as prepared, memory.target([large]) as other:
        assert prepared.addresses == [small[0]] and other.addresses == [large[0]]
        assert registered(memory) == [pool.size_bytes]
    memory.engine.unregister(pool)
    assert not memory.has(*small)


def test_a_brief_registration_of_another_operation_is_not_relied_on(memory: LocalMemory) -> None:
    row = np.zeros(2 * STAGED_BYTES, dtype=np.uint8)
    with memory.target([row]), memory.target([row]):
        assert registered(memory) == [row.nbytes, row.nbytes]


@pytest.mark.parametrize("size", [5, STAGED_BYTES + 5])
@pytest.mark.parametrize("direction", ["source", "target"])
def test_buffers_used_in_place_can_be_neither_resized_nor_closed(
    memory: LocalMemory, direction: str, size: int
) -> None:
    data, mapped = bytearray(size), mmap.mmap(-1, size)
    with getattr(memory, direction)([data, mapped]) as prepared:
        if not prepared.is_staged:
            for resize in (data.clear, mapped.close):
                with pytest.raises(BufferError):
                    resize()
        assert prepared.is_staged == (direction == "source" and size < STAGED_BYTES)
    data.clear()
    mapped.close()


def test_memory_that_the_caller_registered_stays_in_its_place_until_the_operation_ends(
    memory: LocalMemory,
) -> None:
    data = bytearray(STAGED_BYTES)
    region = memory.engine.register(data)
    with memory.target([data]) as prepared:
        memory.engine.unregister(region)
        assert prepared.addresses == [region.address]
        with pytest.raises(BufferError):
            data.clear()
    data.clear()


@pytest.mark.parametrize("direction", ["source", "target"])
@pytest.mark.parametrize("bad", [3.14, np.zeros((4, 4))[:, 1], (1 << 56, 2 * STAGED_BYTES)], ids=str)
def test_after_an_invalid_buffer_the_others_can_be_resized(
    memory: LocalMemory, direction: str, bad: object
) -> None:
    data = bytearray(STAGED_BYTES)
    with pytest.raises(InvalidArgument) as failure:
        getattr(memory, direction)([data, bad])
    data.clear()  # although the exception, and with it its traceback, is still referenced
    assert failure.value.field == "buffer"


@pytest.mark.parametrize("span", [(0, 10), (4096, 100), (1 << 63, 100), (1 << 70, 5)], ids=str)
@pytest.mark.parametrize("direction", ["source", "target"])
def test_an_address_that_is_no_memory_is_refused(
    memory: LocalMemory, direction: str, span: tuple[int, int]
) -> None:
    for buffers in ([span], [b"before", span]):
        with pytest.raises(InvalidArgument, match="buffer is"):
            getattr(memory, direction)(buffers if direction == "source" else buffers[-1:])
    with contextlib.ExitStack() as stack:  # the staging region is free again
        slots = [stack.enter_context(memory.source([b"x"])).addresses[0] for _ in range(NUM_SLOTS)]
        assert max(slots) - min(slots) == (NUM_SLOTS - 1) * SLOT_BYTES


def test_an_address_that_is_memory_is_copied(memory: LocalMemory) -> None:
    values = np.arange(100, dtype=np.uint8)
    with memory.source([(values.ctypes.data, 100), (0, 0)]) as prepared:
        assert prepared.is_staged
        assert ctypes.string_at(prepared.addresses[0], 100) == values.tobytes()


def test_an_address_that_may_not_be_read_is_refused(memory: LocalMemory) -> None:
    mapped = mmap.mmap(-1, 4096)
    address = span_of(mapped)[0]
    libc = ctypes.CDLL(None)
    assert libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(4096), 0) == 0
    with pytest.raises(InvalidArgument, match="cannot be read"):
        memory.source([b"before", (address, 5)])
    with contextlib.ExitStack() as stack:  # the staging region is free again
        assert all(stack.enter_context(memory.source([b"x"])).is_staged for _ in range(NUM_SLOTS))


def test_several_buffers_that_the_caller_registered_are_used_directly(memory: LocalMemory) -> None:
    pool = memory.engine.allocate(4096)
    spans = [(pool.address, 10), (pool.address + 50, 20)]
    with memory.source(spans) as prepared:
        assert not prepared.is_staged and prepared.addresses == [address for address, _ in spans]
    with memory.source([*spans, b"elsewhere"]) as prepared:
        assert prepared.is_staged
    memory.engine.unregister(pool)


@pytest.mark.parametrize("num_registered", [0, 1, 2])
def test_small_buffers_of_a_device_are_not_copied_by_the_processor(num_registered: int) -> None:
    if not cuda_double.built():
        pytest.skip("the double of the CUDA driver is not built")
    settings = TransferSettings(cuda_library=str(cuda_double.LIBRARY))
    with TransferEngine(settings) as owner, TransferEngine(settings) as engine:
        memory = LocalMemory(engine)
        regions = [owner.allocate(4096, device="cuda:0") for _ in range(2)]
        held = [engine.register((region.address, 4096)) for region in regions[:num_registered]]
        for region in regions:
            with memory.source([(region.address + 5, 10)]) as prepared:
                assert prepared.addresses == [region.address + 5] and not prepared.is_staged
        spans = [(region.address, 100) for region in regions]
        with memory.source([b"host", *spans, (0, 0)]) as prepared:
            assert prepared.addresses[1:3] == [address for address, _ in spans] and not prepared.is_staged
            kinds = {region.address: region.kind for region in engine.regions.all()}
            assert all(kinds[region.address] == "cuda:0" for region in regions)
        assert len(engine.regions.all()) == num_registered + 1, "those of the caller, and the staging region"
        for region in held:
            engine.unregister(region)
        memory.close()


def test_a_read_only_buffer_that_is_refused_can_be_resized(memory: LocalMemory) -> None:
    data = bytearray(100)
    with memoryview(data).toreadonly() as view, pytest.raises(InvalidArgument) as failure:
        memory.target([view])
    data.clear()
    assert "writable" in str(failure.value)


@pytest.mark.parametrize("size", [5, STAGED_BYTES + 5])
def test_fresh_bytes_are_filled_before_they_are_published(memory: LocalMemory, size: int) -> None:
    prepared, values = memory.fresh([size])
    with prepared:
        region = memory.engine.regions.all()[0]
        start = prepared.addresses[0] - region.address
        region.view()[start : start + size] = b"x" * size
        memory.unstage(prepared, values, [True])
    assert values == [b"x" * size]


def test_only_what_has_arrived_is_copied_from_the_staging_region(memory: LocalMemory) -> None:
    prepared, values = memory.fresh([3, 3])
    with prepared:
        for address, content in zip(prepared.addresses, (b"old", b"new"), strict=True):
            ctypes.memmove(address, content, 3)
        untouched = bytes(values[0])
        memory.unstage(prepared, values, [False, True])
    assert values == [untouched, b"new"] and untouched != b"old"


@pytest.mark.parametrize("direction", ["source", "fresh"])
def test_the_staging_region_stays_mapped_until_the_last_operation_has_ended(direction: str) -> None:
    """A client is closed while a call of another thread is under way."""
    with TransferEngine() as engine:
        memory = LocalMemory(engine)
        prepared = memory.fresh([5])[0] if direction == "fresh" else memory.source([b"bytes"])
        address = prepared.addresses[0]
        with prepared:
            memory.close()
            assert not engine.regions.all()
            check_mapped(address, 5)
        with pytest.raises(InvalidArgument):
            check_mapped(address, 5)
        with pytest.raises(Unavailable, match="closed"):
            memory.source([b"late"])
        assert not engine.regions.all()


def test_an_empty_value_needs_no_memory(memory: LocalMemory) -> None:
    with memory.source([b""]) as prepared:
        assert prepared.sizes == [0] and registered(memory) == []


def test_an_invalid_buffer_leaves_none_of_the_others_registered(memory: LocalMemory) -> None:
    row = np.zeros(STAGED_BYTES + 1, dtype=np.uint8)
    with pytest.raises(InvalidArgument, match="not mapped"):
        memory.target([row, (1 << 56, STAGED_BYTES)])
    assert registered(memory) == []


def test_bad_buffers_are_named(memory: LocalMemory) -> None:
    with pytest.raises(InvalidArgument, match="writable"):
        memory.target([b"read-only"])
    with pytest.raises(InvalidArgument, match="buffer"):
        memory.source([3.14])
    with pytest.raises(InvalidArgument, match="contiguous"):
        memory.source([np.zeros((4, 4))[:, 1]])

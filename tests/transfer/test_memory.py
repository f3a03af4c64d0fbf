# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import array
import ctypes
import fcntl
import mmap
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from mooncake.errors import InvalidArgument
from mooncake.transfer import TransferEngine, TransferSettings, memory
from mooncake.transfer.memory import (
    POPULATED_BYTES,
    SpanIndex,
    available_bytes,
    device_span_of,
    is_device_memory,
    is_mapped,
    is_readable,
    is_writable,
    span_and_export,
    span_of,
)
from tests.contract import cuda_double


def test_buffers_of_every_kind() -> None:
    numbers = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert span_of(numbers) == (numbers.ctypes.data, 48, True)
    assert span_of(numbers[1]) == (numbers.ctypes.data + 16, 16, True)
    tensor = torch.zeros(5, 3, dtype=torch.bfloat16)
    assert span_of(tensor) == (tensor.data_ptr(), 30, True)
    items = array.array("d", [1, 2])
    assert span_of(items) == (items.buffer_info()[0], 16, True)
    writable = bytearray(b"abc")
    address, size, is_writable = span_of(memoryview(writable)[1:])
    assert (size, is_writable) == (2, True) and address == span_of(writable)[0] + 1
    assert span_of(b"abc")[1:] == (3, False)
    assert span_of(b"")[1:] == (0, False)
    assert span_of((1 << 40, 77)) == (1 << 40, 77, True)


def test_one_of_many_ranges_is_around_another() -> None:
    generator = np.random.default_rng(3)
    spans = [(int(start), int(size)) for start, size in generator.integers(1, 60, (40, 2))]
    index = SpanIndex(spans)
    for address in range(125):
        for size_bytes in range(1, 30):
            around = {
                at
                for at, (start, size) in enumerate(spans)
                if start <= address and address + size_bytes <= start + size
            }
            found = index.around(address, size_bytes)
            assert found in around if around else found is None, (address, size_bytes)
    assert SpanIndex([]).around(1, 1) is None


def test_memory_stays_in_its_place_while_its_export_is_referenced() -> None:
    data, items, mapped = bytearray(b"abc"), array.array("d", [1, 2]), mmap.mmap(-1, 4096)
    exports = [span_and_export(buffer)[3] for buffer in (data, items, mapped)]
    for resize in (data.clear, items.pop, mapped.close):
        with pytest.raises(BufferError):
            resize()
    exports.clear()
    data.clear()
    items.pop()
    mapped.close()


@pytest.mark.parametrize(
    "buffer",
    [
        np.zeros((4, 4))[:, 1],
        torch.zeros(4, 4).t(),
        torch.zeros(3, device="meta"),
        5,
        "text",
        None,
        (-1, 5),
        (5, -1),
        (1 << 64, 1),
        (5, 1 << 64),
        ("5", 1),
        (5, 1.5),
        (5,),
        (5, 1, 1),
    ],
    ids=str,
)
def test_what_is_no_buffer(buffer: object) -> None:
    with pytest.raises(InvalidArgument, match="buffer is"):
        span_of(buffer)


def emptied() -> torch.Tensor:
    tensor = torch.zeros(3)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    ("buffer", "advice"),
    [
        (torch.tensor([1 + 2j, 3 + 4j]).conj(), "resolve_conj"),
        (torch._neg_view(torch.tensor([1.0, 2.0])), "resolve_neg"),
        (torch.tensor([1 + 2j]).conj().imag, "resolve_neg"),
        (torch.eye(3).to_sparse(), "to_dense"),
        (emptied(), "allocated"),
        (np.array([{}, []], dtype=object), "Python objects"),
        (np.zeros(2, dtype=[("n", "i8"), ("o", "O")]), "Python objects"),
        (memoryview(np.array([{}], dtype=object).data), "Python objects"),
        (memoryview(np.zeros(2, dtype=[("n", "i8"), ("o", "O")]).data), "Python objects"),
        ((ctypes.py_object * 2)(), "Python objects"),
    ],
    ids=lambda value: "" if isinstance(value, str) else type(value).__name__,
)
def test_memory_that_does_not_hold_the_values_is_refused(buffer: object, advice: str) -> None:
    with pytest.raises(InvalidArgument, match=advice):
        span_of(buffer)
    if not isinstance(buffer, torch.Tensor):
        return
    with pytest.raises(InvalidArgument, match=advice), TransferEngine() as engine:
        engine.register(buffer)


@pytest.mark.parametrize(
    "array",
    [
        np.array(["2026-01-02", "2026-03-04"], dtype="datetime64[s]"),
        np.array([5, 6], dtype="timedelta64[ms]"),
        np.array([("ab", 1)], dtype=[("text", "U3"), ("O", "i4")]),
        np.array([1.5, 2.5], dtype=">f4"),
        np.array(7.0),
        np.float16(7),
        np.datetime64("2026-01-02"),
    ],
    ids=lambda array: str(array.dtype),
)
def test_every_other_type_of_numpy_is_its_bytes(array: np.ndarray | np.generic) -> None:
    address, size, _ = span_of(array)
    assert ctypes.string_at(address, size) == array.tobytes()


def test_a_resolved_tensor_is_its_values() -> None:
    tensor = torch.tensor([1 + 2j, 3 + 4j]).conj().resolve_conj()
    address, size, _ = span_of(tensor)
    assert ctypes.string_at(address, size) == tensor.numpy().tobytes()


class OnDevice:
    """The interface of arrays of cupy, numba and jax."""

    def __init__(self, **described: object) -> None:
        self.__cuda_array_interface__ = {"version": 3, "data": (4096, False), **described}


class CudaTensor:
    """The interface of a torch tensor on a GPU."""

    def __init__(self, is_contiguous: bool, is_marked: bool = False) -> None:
        self.device = torch.device("cuda:1")
        self.layout = torch.strided
        self.is_conj = self.is_neg = lambda: is_marked
        self.is_contiguous = lambda: is_contiguous
        self.data_ptr = lambda: 1 << 40
        self.numel = lambda: 12
        self.element_size = lambda: 2


def test_buffers_in_device_memory() -> None:
    assert device_span_of(CudaTensor(True)) == (1 << 40, 24, True)
    assert device_span_of(OnDevice(shape=(3, 4), typestr="<f4")) == (4096, 48, True)
    assert device_span_of(OnDevice(shape=(), typestr="<f8", strides=None)) == (4096, 8, True)
    assert device_span_of(OnDevice(shape=(3, 4), typestr="<f2", strides=(8, 2))) == (4096, 24, True)
    assert device_span_of(OnDevice(shape=(1, 4), typestr="<f2", strides=(99, 2))) == (4096, 8, True)
    assert device_span_of(OnDevice(shape=(5,), typestr="|u1", data=(64, True))) == (64, 5, False)
    for elsewhere in (torch.zeros(3), torch.zeros(3, requires_grad=True), np.zeros(3), b"abc", (1, 2), None):
        assert device_span_of(elsewhere) is None


def test_device_memory_with_gaps_is_no_buffer() -> None:
    with pytest.raises(InvalidArgument, match="resolve_conj"):
        device_span_of(CudaTensor(True, is_marked=True))
    for gaps in (CudaTensor(False), OnDevice(shape=(3, 4), typestr="<f4", strides=(32, 4))):
        with pytest.raises(InvalidArgument, match="contiguous"):
            device_span_of(gaps)
    with pytest.raises(InvalidArgument, match="CPU memory"):
        span_of(CudaTensor(True))


def test_some_memory_is_available() -> None:
    assert 1 << 20 < available_bytes() < 1 << 60


PAGE = mmap.PAGESIZE


@contextmanager
def protected(num_bytes: int, protection: int) -> Iterator[int]:
    """Address of ``num_bytes`` of writable memory, one page of ``protection``, and a writable page again."""
    libc = ctypes.CDLL(None, use_errno=True)
    with mmap.mmap(-1, num_bytes + 2 * PAGE) as mapped:
        address = span_of(mapped)[0]
        page = ctypes.c_void_p(address + num_bytes)
        assert libc.mprotect(page, ctypes.c_size_t(PAGE), protection) == 0
        yield address
        assert libc.mprotect(page, ctypes.c_size_t(PAGE), mmap.PROT_READ | mmap.PROT_WRITE) == 0


@pytest.fixture(params=["query", "list", "old kernel"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A kernel that knows all requests; one without the query for mappings; one without both."""
    if request.param != "query":

        def unknown(*_: object) -> int:
            raise OSError(25, "Inappropriate ioctl for device")

        monkeypatch.setattr(fcntl, "ioctl", unknown)
    if request.param == "old kernel":
        monkeypatch.setattr(memory, "_POPULATE_READ", 9999)
        monkeypatch.setattr(memory, "_POPULATE_WRITE", 9999)
    return str(request.param)


@pytest.mark.parametrize("num_bytes", [PAGE, 4 * POPULATED_BYTES])
def test_permissions_of_memory(kernel: str, num_bytes: int) -> None:
    with protected(num_bytes, mmap.PROT_READ) as address:
        assert is_writable(address, num_bytes) and is_writable(address + 5, num_bytes - 5)
        assert not is_writable(address, num_bytes + 1)
        assert not is_writable(address + num_bytes, 1)
        assert is_readable(address, num_bytes + 2 * PAGE)
        assert is_writable(address + num_bytes + PAGE, PAGE)
    with protected(num_bytes, 0) as address:
        assert is_readable(address, num_bytes) and is_writable(address, num_bytes)
        assert is_mapped(address, num_bytes + 2 * PAGE) and not is_readable(address, num_bytes + 2 * PAGE)
        assert not is_readable(address + num_bytes, PAGE) and not is_writable(address + num_bytes, PAGE)


def test_no_permissions_where_nothing_is_mapped(kernel: str) -> None:
    gone = mmap.mmap(-1, 8 * POPULATED_BYTES)
    address = span_of(gone)[0]
    gone.close()
    for place, size in ((address, PAGE), (address, 8 * POPULATED_BYTES), (0, 1), (-5, 9), (1 << 57, 1)):
        assert not is_readable(place, size) and not is_writable(place, size)


def test_permissions_without_proc(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(*_: object) -> bool:
        raise FileNotFoundError

    monkeypatch.setattr(memory, "_mappings_permit", nowhere)
    data = bytearray(4 * POPULATED_BYTES)
    assert is_writable(span_of(data)[0], len(data))


def test_a_driver_knows_the_memory_of_its_devices() -> None:
    if not cuda_double.built():
        pytest.skip("the double of the CUDA driver is not built")
    data, library = bytearray(10), str(cuda_double.LIBRARY)
    with (
        TransferEngine(TransferSettings(cuda_library=library)) as engine,
        TransferEngine(TransferSettings(transports=("tcp",), cuda_library=library)) as other,
    ):
        region = engine.allocate(5000, device="cuda:0")
        assert is_device_memory(region.address + 4999, library) and not is_device_memory(0, library)
        assert not is_device_memory(span_of(data)[0], library)
        assert engine.is_device_memory(region.address + 4999)
        assert not engine.is_device_memory(span_of(data)[0])
        assert not other.is_device_memory(region.address), "it does not move it"

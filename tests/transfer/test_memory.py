# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import array
import mmap

import numpy as np
import pytest
import torch

from mooncake.errors import InvalidArgument
from mooncake.transfer.memory import available_bytes, device_span_of, span_and_export, span_of


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
    ],
    ids=str,
)
def test_what_is_no_buffer(buffer: object) -> None:
    with pytest.raises(InvalidArgument, match="buffer is"):
        span_of(buffer)


class OnDevice:
    """The interface of arrays of cupy, numba and jax."""

    def __init__(self, **described: object) -> None:
        self.__cuda_array_interface__ = {"version": 3, "data": (4096, False), **described}


class CudaTensor:
    """The interface of a torch tensor on a GPU."""

    def __init__(self, is_contiguous: bool) -> None:
        self.device = torch.device("cuda:1")
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
    for gaps in (CudaTensor(False), OnDevice(shape=(3, 4), typestr="<f4", strides=(32, 4))):
        with pytest.raises(InvalidArgument, match="contiguous"):
            device_span_of(gaps)
    with pytest.raises(InvalidArgument, match="CPU memory"):
        span_of(CudaTensor(True))


def test_some_memory_is_available() -> None:
    assert 1 << 20 < available_bytes() < 1 << 60

from __future__ import annotations

import array

import numpy as np
import pytest
import torch

from mooncake.errors import InvalidArgument
from mooncake.transfer.memory import available_bytes, span_of


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


def test_some_memory_is_available() -> None:
    assert 1 << 20 < available_bytes() < 1 << 60

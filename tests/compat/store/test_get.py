# SPDX-License-Identifier: Apache-2.0
"""An object that the host has no memory for is a miss; the others of a batch are read."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch

from mooncake.compat.store import get, tensor_memory
from mooncake.compat.store.buffer_pool import BufferHandle
from mooncake.store import MooncakeDistributedStore
from mooncake.store.client import buffers
from tests.compat.store.servers import LONG_LEASES

MASTER = LONG_LEASES
ROOM = 100_000
"""Most bytes that the host of these tests has."""


@pytest.fixture
def small_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host where larger allocations for objects fail, as the system's fail."""
    new_bytes, new_tensor = buffers._new_bytes, torch.empty

    def allocate(start: None, size_bytes: int) -> Any:
        if size_bytes > ROOM:
            raise MemoryError
        return new_bytes(start, size_bytes)

    def handle(size_bytes: int) -> BufferHandle:
        if size_bytes > ROOM:
            raise MemoryError
        return BufferHandle(size_bytes)

    class Torch:
        uint8 = torch.uint8

        @staticmethod
        def empty(size: Any, **options: Any) -> torch.Tensor:
            if prod(size if isinstance(size, tuple) else (size,)) > ROOM:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
            return new_tensor(size, **options)

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    monkeypatch.setattr(buffers, "_new_bytes", allocate)
    monkeypatch.setattr(get, "BufferHandle", handle)
    monkeypatch.setattr(tensor_memory, "load_torch", Torch)


def test_bytes(store: MooncakeDistributedStore, small_host: None, caplog: pytest.LogCaptureFixture) -> None:
    large, small = bytes(ROOM + 1), b"small"
    assert store.put("large", large) == store.put("small", small) == 0
    assert store.get("large") == b"" and "no memory" in caplog.text
    assert store.get_batch(["large", "small", "missing"]) == [b"", small, b""]
    assert store.get_buffer("large") is None
    first, second = store.batch_get_buffer(["large", "small"])
    assert first is None and second is not None and bytes(second) == small
    assert store.is_exist("large") == 1 and store.get_size("large") == ROOM + 1


def test_tensors(store: MooncakeDistributedStore, small_host: None) -> None:
    large, small = torch.zeros(ROOM + 1, dtype=torch.uint8), torch.arange(9)
    assert store.batch_put_tensor(["large tensor", "small tensor"], [large, small]) == [0, 0]
    assert store.get_tensor("large tensor") is None
    first, second = store.batch_get_tensor(["large tensor", "small tensor"])
    assert first is None and second is not None and torch.equal(second, small)
    assert store.get_tensor_with_parallelism("large tensor") is None


def test_without_memory_for_the_call_itself(
    store: MooncakeDistributedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(*_: object) -> Any:
        raise MemoryError

    assert store.put("object", b"value") == 0 and store._store is not None
    monkeypatch.setattr(store._store, "open_reads", nothing)
    assert store.get_buffer("object") is None and store.get_size("object") == -200
    assert store.batch_get_into_multi_buffers(["object"], [[1, 2]], [[1, 1]]) == [-200]

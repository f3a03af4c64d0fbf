# SPDX-License-Identifier: Apache-2.0
"""Tensors of every type and shape are stored and read unchanged; other values are refused."""

from __future__ import annotations

import itertools
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake.compat.store import tensors
from mooncake.compat.store.public_types import ReplicateConfig
from mooncake.compat.store.store import MooncakeDistributedStore
from mooncake.compat.store.tensor_format import DTYPES, TensorHeader, encode
from mooncake.compat.store.tensor_memory import tensor_at
from mooncake.compat.store.tensors import _deserialize_tensor, _serialize_tensor, _tensor_metadata_size
from tests.compat.store.servers import LONG_LEASES

MASTER = LONG_LEASES
_numbers = itertools.count()


def new_key() -> str:
    return f"tensor/{next(_numbers)}"


def a_tensor(dtype: str, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    kind = getattr(torch, dtype)
    if dtype == "bool":
        return torch.randint(0, 2, shape, generator=generator).to(kind)
    count = torch.Size(shape).numel() * DTYPES[dtype][1]
    return torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8).view(kind).reshape(shape)


def same(a: Any, b: torch.Tensor) -> bool:
    """Compare bit for bit, so that NaN is equal to itself."""
    if not isinstance(a, torch.Tensor) or a.dtype != b.dtype or a.shape != b.shape:
        return False
    flat = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b)]
    return torch.equal(*flat)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(list(DTYPES)), st.lists(st.integers(0, 5), max_size=8).map(tuple))
def test_every_type_and_shape(store: MooncakeDistributedStore, dtype: str, shape: tuple[int, ...]) -> None:
    key, tensor = new_key(), a_tensor(dtype, shape)
    assert store.put_tensor(key, tensor) == 0
    assert same(store.get_tensor(key), tensor)


def test_a_large_tensor_is_not_copied(store: MooncakeDistributedStore) -> None:
    key, tensor = new_key(), torch.randn(1100, 1001)
    assert store.put_tensor(key, tensor) == 0
    assert store.get_size(key) == 304 + 1100 * 1001 * 4
    found = store.get_tensor(key)
    assert found is not None and same(found, tensor)
    assert found.data_ptr() % 64 == 0 and found.is_contiguous()
    found += 1  # the tensor belongs to the caller
    assert same(store.get_tensor(key), tensor)


def test_views_are_stored_contiguously(store: MooncakeDistributedStore) -> None:
    base = torch.arange(60, dtype=torch.int32).reshape(3, 4, 5)
    views = [base.permute(2, 0, 1), base[:, ::2], base.expand(2, 3, 4, 5), base[1, 2, 3]]
    keys = [new_key() for _ in views]
    assert store.batch_put_tensor(keys, views) == [0] * len(views)
    found = store.batch_get_tensor(keys)
    assert all(same(a, b) and a.is_contiguous() for a, b in zip(found, views, strict=True) if a is not None)
    assert all(tensor is not None for tensor in found)


def test_a_parameter_is_stored_without_its_gradient(store: MooncakeDistributedStore) -> None:
    key, parameter = new_key(), torch.nn.Parameter(torch.ones(3))
    assert store.put_tensor(key, parameter) == 0
    found = store.get_tensor(key)
    assert found is not None and same(found, torch.ones(3)) and not found.requires_grad


def test_a_key_that_exists_keeps_its_tensor(store: MooncakeDistributedStore) -> None:
    key = new_key()
    assert store.put_tensor(key, torch.zeros(2)) == 0
    assert store.put_tensor(key, torch.ones(2)) == 0
    assert same(store.get_tensor(key), torch.zeros(2))


def test_a_tensor_is_replaced(store: MooncakeDistributedStore) -> None:
    key = new_key()
    assert store.upsert_tensor(key, torch.zeros(2)) == 0
    assert store.upsert_tensor(key, torch.ones(3)) == 0
    assert same(store.get_tensor(key), torch.ones(3))
    assert store.batch_upsert_tensor([key, key], [torch.ones(1), None]) == [0, -600]
    config = ReplicateConfig()
    assert store.upsert_pub_tensor(key, torch.ones(4), config) == 0
    assert store.batch_upsert_pub_tensor([key], [torch.ones(5)], config) == [0]
    assert same(store.get_tensor(key), torch.ones(5))
    head, _, _, _ = _serialize_tensor(torch.ones(2))
    buffer = np.frombuffer(head + torch.ones(2).numpy().tobytes(), dtype=np.uint8)
    assert store.upsert_tensor_from(key, buffer.ctypes.data, buffer.size) == 0
    assert store.batch_upsert_tensor_from([key], [buffer.ctypes.data], [3]) == [-600]
    assert same(store.get_tensor(key), torch.ones(2))


def test_tensors_with_a_configuration(store: MooncakeDistributedStore) -> None:
    config, keys = ReplicateConfig(), [new_key(), new_key()]
    assert store.pub_tensor(keys[0], torch.ones(2), config) == 0
    assert store.batch_pub_tensor(keys[1:], [torch.ones(2)], config) == [0]
    config.replica_num = 0
    assert store.pub_tensor(new_key(), torch.ones(2), config) == -600


def test_misses_and_other_objects_are_none(store: MooncakeDistributedStore) -> None:
    key, other = new_key(), new_key()
    assert store.put(other, b"\0" * 400) == 0
    assert store.put_tensor(key, torch.ones(1)) == 0
    found = store.batch_get_tensor(["missing", key, other, ""])
    assert [tensor is not None for tensor in found] == [False, True, False, False]
    assert store.get_tensor("missing") is None
    assert store.batch_get_tensor([]) == []


@pytest.mark.parametrize(
    "bad",
    [
        None,
        [1.0, 2.0],
        np.ones(3),
        torch.ones(2, dtype=torch.complex64),
        torch.ones(2).to_sparse(),
        torch.ones((1,) * 9),
        torch.ones(2, device="meta"),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    ],
)
def test_other_values_are_refused(store: MooncakeDistributedStore, bad: Any) -> None:
    key = new_key()
    assert store.put_tensor(key, bad) == -600
    assert store.batch_put_tensor([key, key + "/good"], [bad, torch.ones(1)]) == [-600, 0]
    assert store.is_exist(key) == 0
    assert store.batch_put_tensor([key], []) == [-600]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_refused(store: MooncakeDistributedStore) -> None:
    """Its layout is that of a dense one."""
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.strided)
    assert store.put_tensor(new_key(), nested) == -600


def test_memory_of_the_caller(store: MooncakeDistributedStore) -> None:
    key, tensor = new_key(), torch.arange(100.0)
    buffer = np.zeros(1000, dtype=np.uint8)
    address = buffer.ctypes.data
    head, data, size, owner = _serialize_tensor(tensor)
    assert (len(head), data, size) == (304, owner.data_ptr(), 400)
    buffer[:304] = np.frombuffer(head, dtype=np.uint8)
    buffer[304:704] = tensor.numpy().view(np.uint8)
    assert store.put_tensor_from(key, address, 1000) == 0
    assert store.get_size(key) == 704, "only the tensor, not all of the buffer"
    assert store.batch_put_tensor_from([key + "b"], [address], [704]) == [0]
    buffer[:] = 0
    found = store.get_tensor_into(key, address, 1000)
    assert found is not None and same(found, tensor) and found.data_ptr() == address + 304
    buffer[304:308] = np.frombuffer(np.float32(7.0).tobytes(), dtype=np.uint8)
    assert found[0] == 7.0, "the tensor is in the caller's memory"
    assert same(store.batch_get_tensor_into([key + "b"], [address], [704])[0], tensor)
    assert store.get_tensor_into(key, address, 703) is None
    assert store.get_tensor_into("missing", address, 1000) is None
    assert store.batch_get_tensor_into([key], [address], []) == [-600]


def test_a_buffer_without_a_tensor_is_refused(store: MooncakeDistributedStore) -> None:
    buffer = np.zeros(1000, dtype=np.uint8)
    key = new_key()
    assert store.put_tensor_from(key, buffer.ctypes.data, 1000) == -600
    assert store.put_tensor_from(key, buffer.ctypes.data, 10) == -600
    assert store.put_tensor_from(key, 0, 1000) == -600
    assert store.put_tensor_from(key, 4096, 1000) == -600
    assert store.batch_put_tensor_from([key], [buffer.ctypes.data], []) == [-600]
    assert store.is_exist(key) == 0


def test_a_tensor_of_the_caller_is_filled(store: MooncakeDistributedStore) -> None:
    key, target = new_key(), torch.zeros(3, 4)
    assert store.put_tensor(key, torch.ones(3, 4)) == 0
    assert store.get_tensor_into_cuda(key, target) == 48
    assert same(target, torch.ones(3, 4))
    assert store.batch_get_tensor_into_cuda(["missing", key], [target, target[0]]) == [-704, -600]
    assert store.batch_get_tensor_into_cuda([key], []) == [-600]
    assert store.get_tensor_into_cuda(key, torch.empty(tuple(reversed(target.shape))).t()) == -600


def test_functions_of_the_module() -> None:
    tensor = torch.arange(6, dtype=torch.int16).reshape(2, 3)
    head, address, size, owner = _serialize_tensor(tensor)
    assert type(head) is bytes and size == 12 and address == owner.data_ptr()
    assert same(_deserialize_tensor(head + tensor.numpy().tobytes()), tensor)
    assert _tensor_metadata_size() == 304
    for bad in (b"", head, head[:-1], b"\0" * 316):
        with pytest.raises(ValueError):
            _deserialize_tensor(bad)


def test_an_empty_tensor_in_memory() -> None:
    buffer = np.frombuffer(encode(TensorHeader("int8", (2, 0), (2, 0))), dtype=np.uint8)
    assert tensor_at(buffer.ctypes.data, 304).shape == (2, 0)


def test_calls_before_setup() -> None:
    store = MooncakeDistributedStore()
    assert store.put_tensor("key", torch.ones(1)) == -600
    assert store.get_tensor("key") is None
    assert store.batch_get_tensor(["a", "b"]) == [None, None]
    assert store.batch_put_tensor(["a"], [torch.ones(1)]) == [-600]
    assert store.get_tensor_into("key", 0, 0) is None


def test_torch_is_imported_by_the_first_call() -> None:
    code = (
        "import sys; from mooncake.compat.store.store import MooncakeDistributedStore as S; "
        "assert 'torch' not in sys.modules; s = S(); assert s.get_tensor('k') is None; "
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_only_bytes_that_arrived_are_counted_as_read(
    store: MooncakeDistributedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = ["arrives", "does not arrive"]
    assert store.batch_put_tensor(keys, [torch.zeros(1000), torch.zeros(3000)]) == [0, 0]
    session = store._session
    assert session is not None
    before = session.client_metrics._bytes["read"]
    monkeypatch.setattr(tensors, "read_parts", lambda *_: [True, False])
    assert store.batch_get_tensor(keys)[1] is None
    assert session.client_metrics._bytes["read"] == before + store.get_size(keys[0])

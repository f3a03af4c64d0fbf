# SPDX-License-Identifier: Apache-2.0
"""Arrays, tensors and bytes: whole, rows of them, and to memory of the caller."""

from __future__ import annotations

import ctypes
import gc
import threading
from typing import Any

import numpy as np
import pytest
import torch

from mooncake.compat.objects import manifest
from mooncake.compat.objects.members import OWNER, SPECS, ScatteredBuffers
from mooncake.compat.objects.transfer import (
    MooncakeBundleTransfer,
    StructuredObjectPayload,
    raw_destination,
    tensor_object_buffer,
)
from mooncake.store import BufferPool, MooncakeDistributedStore
from mooncake.store.allocator import Allocator
from tests.compat.objects.plain_store import PlainStore

ARRAY = np.arange(60, dtype=np.int32).reshape(10, 6)


def put(transfer: MooncakeBundleTransfer, **values: Any) -> Any:
    return transfer.put_structured_object(StructuredObjectPayload(buffers=values), chunk_bytes=40)


@pytest.fixture(params=["real", "plain"])
def transfer(request: pytest.FixtureRequest) -> MooncakeBundleTransfer:
    return MooncakeBundleTransfer(request.getfixturevalue("store" if request.param == "real" else "plain"))


@pytest.mark.parametrize(
    "array",
    [
        ARRAY,
        ARRAY[::2, 1:3],
        np.asfortranarray(ARRAY),
        np.array(3.5),
        np.arange(3, dtype=">i4"),
        np.array(["a", "bc"]),
        np.array(["2020-01-01"], dtype="M8[D]"),
        np.array([True, False]),
        np.array([1j]),
    ],
)
def test_an_array_comes_back(transfer: MooncakeBundleTransfer, array: np.ndarray[Any, Any]) -> None:
    found = transfer.get_object(put(transfer, x=array))["x"]
    assert found.dtype == array.dtype and found.shape == array.shape
    assert np.array_equal(found, array)


@pytest.mark.parametrize("value", [np.array([object()]), np.zeros(2, dtype=[("a", "i4")]), [1], 5, None])
def test_what_is_no_member_is_refused(plain: PlainStore, value: Any) -> None:
    with pytest.raises(TypeError):
        put(MooncakeBundleTransfer(plain), x=value)
    assert plain.objects == {}


@pytest.mark.parametrize(
    ("start", "end", "step"), [(2, 9, 1), (0, 10, 3), (-3, -1, 1), (5, 2, 1), (8, 99, 1)]
)
def test_rows_of_arrays_and_tensors(
    transfer: MooncakeBundleTransfer, start: int, end: int, step: int
) -> None:
    ref = put(transfer, array=ARRAY, tensor=torch.from_numpy(ARRAY))
    spec = transfer.read_spec(ref)
    for name in ("array", "tensor"):
        spec = spec.slice_member(name, 0, start, end, step)
    found = transfer.materialize(spec).objects
    wanted = ARRAY[start:end:step]
    assert np.array_equal(found["array"], wanted)
    assert torch.equal(found["tensor"], torch.from_numpy(wanted.copy()))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).reshape(3, 4),
        torch.tensor(1.5),
        torch.zeros(0, 3),
        torch.zeros(3, dtype=torch.bfloat16),
        torch.tensor([True]),
        torch.tensor([1j]),
        torch.arange(6).reshape(2, 3).T,
        torch.zeros([1] * 9),
    ],
)
def test_a_tensor_comes_back(transfer: MooncakeBundleTransfer, tensor: torch.Tensor) -> None:
    found = transfer.get_object(put(transfer, x=tensor))["x"]
    assert found.dtype == tensor.dtype
    assert torch.equal(found, tensor)


def test_rows_of_a_nested_tensor(transfer: MooncakeBundleTransfer) -> None:
    rows = [torch.arange(n) + n for n in (2, 4, 1)]
    nested = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    ref = transfer.put_dataproto({"tokens": nested})
    for selection in (None, slice(1, 3), [2, 0, 2], []):
        found = transfer.get_dataproto(ref, rows=selection)["batch"]["tokens"]
        numbers = range(3) if selection is None else np.arange(3)[selection]
        wanted = [rows[int(number)] for number in numbers]
        assert found.layout == torch.jagged and len(found) == len(wanted)
        assert all(torch.equal(a, b) for a, b in zip(found.unbind(), wanted, strict=True))


def test_memory_of_the_caller(store: MooncakeDistributedStore) -> None:
    transfer = MooncakeBundleTransfer(store)
    ref = put(transfer, array=ARRAY, tensor=torch.from_numpy(ARRAY), raw=b"abcdef")
    array = np.zeros_like(ARRAY)
    raw = np.zeros(6, np.uint8)
    size = int(ref.manifest["buffers"]["tensor"]["bytes"])
    memory = ctypes.create_string_buffer(size)
    address = ctypes.addressof(memory)
    found = transfer.materialize_into(
        transfer.read_spec(ref),
        {
            "array": array,
            "raw": raw_destination(raw.ctypes.data, 6, raw),
            "tensor": tensor_object_buffer(address, size, memory),
        },
    ).objects
    assert found["array"] is array and np.array_equal(array, ARRAY)
    assert raw.tobytes() == b"abcdef"
    assert torch.equal(found["tensor"], torch.from_numpy(ARRAY))
    assert address < found["tensor"].data_ptr() < address + size


@pytest.mark.parametrize(
    ("destination", "reason"),
    [
        (np.zeros((10, 6), np.int64), "dtype"),
        (np.zeros((9, 6), np.int32), "shape"),
        (np.zeros((6, 10), np.int32).T, "contiguous"),
        (np.broadcast_to(np.int32(0), (10, 6)), "contiguous"),
        (bytearray(240), "numpy.ndarray"),
        (raw_destination(4096, 239), "do not fit"),
    ],
)
def test_memory_that_does_not_fit_is_not_written(plain: PlainStore, destination: Any, reason: str) -> None:
    transfer = MooncakeBundleTransfer(plain)
    ref = put(transfer, x=ARRAY)
    with pytest.raises((TypeError, ValueError), match=reason):
        transfer.materialize_into(transfer.read_spec(ref), {"x": destination})


@pytest.mark.parametrize(
    "spec",
    [
        {"encoding": "pickle"},
        {"encoding": "ndarray", "dtype": "O", "shape": [30]},
        {"encoding": "ndarray", "dtype": "<i4", "shape": [61]},
        {"encoding": "ndarray", "dtype": "<i4", "shape": [-1, -60]},
        {"encoding": "ndarray", "dtype": "<i4", "shape": [1 << 62, 1 << 62]},
        {"encoding": "ndarray", "dtype": "<i4", "shape": [1 << 47, 1 << 47, 0]},
        {"encoding": "ndarray", "dtype": "V4", "shape": [60]},
        {"encoding": "ndarray", "dtype": "nonsense(", "shape": [60]},
        {"encoding": "ndarray", "dtype": "<i4", "shape": None},
        {"encoding": "torch_tensor", "dtype": "torch.int32", "shape": [60]},
        {"encoding": "torch_tensor", "nested": True, "format": "tensor_parts", "part_bytes": [120, 121]},
        {"encoding": "torch_tensor", "nested": True, "format": "tensor_parts", "part_bytes": [120, 120]},
        {"encoding": "torch_tensor", "nested": True, "format": "pickle"},
        [],
    ],
)
def test_metadata_that_does_not_fit_the_member_is_refused(plain: PlainStore, spec: Any) -> None:
    transfer = MooncakeBundleTransfer(plain)
    ref = put(transfer, x=ARRAY)
    found = manifest.check(ref.manifest, ref.manifest_key, "bundle")
    meta = manifest.encode({"layout": "structured", SPECS: {"x": spec}})
    plain.objects[found.meta.key] = meta
    ref.manifest["meta"] = {
        "key": found.meta.key,
        "bytes": len(meta),
        "chunks": [{"key": found.meta.key, "bytes": len(meta)}],
    }
    with pytest.raises(ValueError, match=r"."):
        transfer.materialize(transfer.read_spec(ref))


@pytest.mark.parametrize("shape", [5, None, [[1]], "ab"])
def test_a_tensor_of_another_shape_is_refused(plain: PlainStore, shape: Any) -> None:
    transfer = MooncakeBundleTransfer(plain)
    ref = put(transfer, x=torch.arange(4))
    found = manifest.check(ref.manifest, ref.manifest_key, "bundle")
    specs = {"x": {"encoding": "torch_tensor", "dtype": "torch.int64", "shape": shape}}
    meta = manifest.encode({"layout": "structured", SPECS: specs})
    plain.objects[found.meta.key] = meta
    chunk = {"key": found.meta.key, "bytes": len(meta)}
    ref.manifest["meta"] = chunk | {"chunks": [chunk]}
    with pytest.raises(ValueError, match=r"is torch\.int64 of"):
        transfer.materialize(transfer.read_spec(ref))


@pytest.mark.parametrize("wrong", [[0, (1 << 63) - 1, 5], [0, 2, (1 << 63) - 1], [-1, 2, 5]])
def test_a_nested_tensor_whose_offsets_wrap_around_is_refused(plain: PlainStore, wrong: list[int]) -> None:
    right = torch.tensor([0, 2, 5])
    nested = torch.nested.nested_tensor_from_jagged(torch.arange(9), right, torch.tensor([2, 1]))
    transfer = MooncakeBundleTransfer(plain)
    ref = transfer.put_dataproto({"tokens": nested})
    (key,) = (key for key in plain.order if "buffer" in key)
    before = right.numpy().tobytes()
    assert plain.objects[key].count(before) == 1
    plain.objects[key] = plain.objects[key].replace(before, np.array(wrong).tobytes())
    with pytest.raises(ValueError, match="offsets do not fit 9 values"):
        transfer.get_dataproto(ref)


def test_a_saved_tensor_that_is_damaged_is_named(plain: PlainStore) -> None:
    transfer = MooncakeBundleTransfer(plain)
    ref = put(transfer, x=torch.tensor([1j]))
    for key in [key for key in plain.order if "buffer" in key]:
        plain.objects[key] = b"\0" * len(plain.objects[key])
    with pytest.raises(ValueError, match="field x cannot be loaded"):
        transfer.get_object(ref)


def test_a_saved_tensor_runs_no_code(plain: PlainStore, tmp_path: Any) -> None:
    import pickle

    marker = tmp_path / "ran"

    class Harmful:
        def __reduce__(self) -> Any:
            return (open, (str(marker), "w"))

    transfer = MooncakeBundleTransfer(plain)
    ref = put(transfer, x=torch.tensor([1j]))
    member = ref.manifest["buffers"]["x"]
    data = pickle.dumps(Harmful())
    for chunk in member["chunks"]:
        del plain.objects[chunk["key"]]
    plain.objects[member["key"]] = data
    member |= {"bytes": len(data), "chunks": [{"key": member["key"], "bytes": len(data)}]}
    with pytest.raises(Exception, match=r"(?i)weights"):
        transfer.get_object(ref)
    assert not marker.exists()


def test_a_leased_array_goes_back_to_its_pool(store: MooncakeDistributedStore) -> None:
    pool = BufferPool(store, max_bytes=1 << 20)
    transfer = MooncakeBundleTransfer(store, buffer_pool=pool)
    ref = put(transfer, x=ARRAY)
    found = transfer.get_object(ref)
    rows = [found["x"][:2], None, {"y": found["x"][2:]}]
    assert np.array_equal(found["x"], ARRAY)
    with pytest.raises(RuntimeError, match="leases"):
        pool.close()
    transfer.release_result(rows)
    transfer.release_result(found)
    again = transfer.get_object(ref)
    assert getattr(again["x"], OWNER) is not None
    del again, found, rows  # a lease also ends with the last array
    pool.close()


def test_a_leased_array_may_be_collected_while_the_locks_of_its_pool_are_held(
    store: MooncakeDistributedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = BufferPool(store)
    transfer = MooncakeBundleTransfer(store, buffer_pool=pool)
    cycle = [transfer.get_object(put(transfer, x=ARRAY))["x"]]
    cycle.append(cycle)
    del cycle
    allocate = Allocator.allocate

    def collect(pages: Allocator, size_bytes: int) -> int | None:
        gc.collect()
        return allocate(pages, size_bytes)

    monkeypatch.setattr(Allocator, "allocate", collect)
    acquiring = threading.Thread(target=lambda: pool.acquire(1).release(), daemon=True)
    acquiring.start()
    acquiring.join(20)
    monkeypatch.undo()
    assert not acquiring.is_alive()
    pool.close()


def test_scattered_buffers_are_one_member(plain: PlainStore) -> None:
    transfer = MooncakeBundleTransfer(plain, default_chunk_bytes=5)
    parts = (np.arange(3, dtype=np.int32), np.arange(3, 6, dtype=np.int32))
    buffers = {
        "array": ScatteredBuffers(buffers=parts, dtype="<i4", shape=(2, 3)),
        "bytes": ScatteredBuffers((b"ab", bytearray(b"cde"), b"")),
    }
    ref = transfer.put_structured_object(StructuredObjectPayload({}, buffers))
    found = transfer.materialize(transfer.read_spec(ref)).objects
    assert found["array"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert bytes(found["bytes"]) == b"abcde"


def test_scattered_buffers_that_are_no_such_array_are_refused(plain: PlainStore) -> None:
    value = ScatteredBuffers((b"12345678",), dtype="<i4", shape=(3,))
    with pytest.raises(ValueError, match="8 bytes are no int32"):
        MooncakeBundleTransfer(plain).put_structured_object(StructuredObjectPayload({}, {"x": value}))
    assert plain.objects == {}

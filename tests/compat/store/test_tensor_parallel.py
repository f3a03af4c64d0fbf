# SPDX-License-Identifier: Apache-2.0
"""Every reader gets the part that torch would cut from the whole, however the tensor was written."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake.compat.store import tensor_gather
from mooncake.compat.store.parallelism import ParallelAxis, ReadTarget, TensorParallelism
from mooncake.compat.store.public_types import ReplicateConfig
from mooncake.compat.store.store import MooncakeDistributedStore
from mooncake.compat.store.tensor_format import (
    MAX_PARTS,
    Axis,
    AxisKind,
    TensorHeader,
    TensorManifest,
    decode,
    decode_manifest,
    encode,
    encode_manifest,
)
from mooncake.compat.store.tensors import _serialize_tensor
from tests.compat.store.servers import LONG_LEASES

MASTER = LONG_LEASES
_numbers = itertools.count()


def new_key() -> str:
    return f"parallel/{next(_numbers)}"


def tp(rank: int, size: int, dim: int = 0) -> TensorParallelism:
    return TensorParallelism([ParallelAxis("tp", rank, size, dim)])


def part(tensor: torch.Tensor, rank: int, size: int, dim: int) -> torch.Tensor:
    """One of equal parts."""
    length = tensor.shape[dim] // size
    return tensor.narrow(dim, rank * length, length)


def put_parts(
    store: MooncakeDistributedStore,
    key: str,
    tensor: torch.Tensor,
    size: int,
    dim: int,
    replace: bool = False,
) -> list[int]:
    """Every rank puts its part."""
    put = store.upsert_tensor_with_parallelism if replace else store.put_tensor_with_parallelism
    return [put(key, part(tensor, rank, size, dim), tp(rank, size, dim)) for rank in range(size)]


def equal(found: Any, tensor: torch.Tensor) -> bool:
    return isinstance(found, torch.Tensor) and found.dtype == tensor.dtype and torch.equal(found, tensor)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 6), min_size=1, max_size=3))
    dtype = draw(st.sampled_from([torch.int64, torch.uint8, torch.float16]))
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)


@st.composite
def divisions(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[int, int]:
    """Number of equal parts, and the dimension along which they lie."""
    dim = draw(st.integers(0, len(shape) - 1))
    return draw(st.sampled_from([size for size in range(1, 5) if shape[dim] % size == 0])), dim


@settings(max_examples=60, deadline=None)
@given(tensors(), st.data())
def test_every_reader_gets_its_part_of_every_layout(
    store: MooncakeDistributedStore, tensor: torch.Tensor, data: st.DataObject
) -> None:
    key = new_key()
    writer = data.draw(st.sampled_from(["whole", "with_tp", "parallelism", "writers"]))
    size, dim = data.draw(divisions(tuple(tensor.shape)))
    if writer == "whole":
        assert store.put_tensor(key, tensor) == 0
    elif writer == "with_tp":
        assert store.put_tensor_with_tp(key, tensor, 0, size, dim) == 0
    elif writer == "parallelism":
        assert put_parts(store, key, tensor, size, dim) == [0] * size
    else:
        for rank in data.draw(st.permutations(range(size))):
            partition = (rank, size, dim)
            assert store.put_tensor_with_parallelism(key, tensor, writer_partition=partition) == 0

    with mock.patch.object(tensor_gather, "MAX_RUNS", data.draw(st.sampled_from([0, 4096]))):
        check_readers(store, key, tensor, *data.draw(divisions(tuple(tensor.shape))))


def check_readers(
    store: MooncakeDistributedStore, key: str, tensor: torch.Tensor, size: int, dim: int
) -> None:
    assert equal(store.get_tensor_with_parallelism(key), tensor)
    assert equal(store.get_tensor_with_parallelism(key, ReadTarget("full")), tensor)
    wanted = [part(tensor, rank, size, dim) for rank in range(size)]
    targets = [ReadTarget("shard", tp(rank, size, dim)) for rank in range(size)]
    found = store.batch_get_tensor_with_parallelism([key] * size, targets)
    for tensor_found, tensor_wanted in zip(found, wanted, strict=True):
        assert tensor_found is not None and equal(tensor_found, tensor_wanted)
        assert tensor_found.is_contiguous()
    buffers = [np.zeros(304 + max(1, t.nbytes), dtype=np.uint8) for t in wanted]
    addresses = [buffer.ctypes.data for buffer in buffers]
    sizes = [buffer.size for buffer in buffers]
    placed = store.batch_get_tensor_with_parallelism_into([key] * size, addresses, sizes, targets)
    assert all(equal(a, b) for a, b in zip(placed, wanted, strict=True))
    for tensor_there, address in zip(placed, addresses, strict=True):
        assert not tensor_there.numel() or tensor_there.data_ptr() == address + 304


def test_addresses_and_sizes_of_numpy(store: MooncakeDistributedStore) -> None:
    key, tensor = new_key(), torch.arange(24).reshape(4, 6)
    assert store.put_tensor(key, tensor) == 0
    memory = np.zeros(4096, np.uint8)
    there: Any = np.array([memory.ctypes.data], np.uint64)
    sizes: Any = np.array([4096], np.int16)
    (found,) = store.batch_get_tensor_with_parallelism_into([key], there, sizes)
    assert equal(found, tensor) and found.data_ptr() == memory.ctypes.data + 304
    found = store.get_tensor_with_parallelism_into(key, there[0], sizes[0], ReadTarget("shard", tp(1, 2, 0)))
    assert found is not None and equal(found, tensor[2:])


def test_a_rank_of_tensor_parallelism_stores_the_part_that_it_passes(store: MooncakeDistributedStore) -> None:
    key, tensor = new_key(), torch.arange(24).reshape(4, 6)
    assert store.put_tensor_with_parallelism(key, part(tensor, 0, 3, 1), tp(0, 3, 1)) == 0
    assert equal(store.get_tensor_with_tp(key, 0, 3), part(tensor, 0, 3, 1))
    assert store.get_tensor_with_tp(key, 1, 3) is None
    assert store.get_tensor_with_parallelism(key, ReadTarget("shard", tp(1, 3, 1))) is None
    assert store.get_tensor_with_parallelism(key, ReadTarget("full", tp(0, 3, 1))) is None
    assert put_parts(store, key, tensor, 3, 1) == [0, 0, 0]
    assert equal(store.get_tensor_with_parallelism(key, ReadTarget("full")), tensor)
    assert equal(
        store.get_tensor_with_parallelism(key, ReadTarget("shard", tp(1, 2, 1))), part(tensor, 1, 2, 1)
    )
    manifest = decode_manifest(store.get(f"{key}__parallelism_manifest"))
    assert (manifest.shape, manifest.split_dim, manifest.count) == ((4, 6), 1, 3)


def test_a_dimension_is_divided_into_equal_parts_only(store: MooncakeDistributedStore) -> None:
    key, tensor = new_key(), torch.arange(24).reshape(4, 6)
    assert store.put_tensor_with_tp(key, tensor, 0, 4, 1) == -600
    assert store.put_tensor_with_parallelism(key, tensor, writer_partition=(0, 3, 0)) == -600
    dp_tp = TensorParallelism([ParallelAxis("dp", 0, 2), ParallelAxis("tp", 0, 4, 1)])
    assert store.put_tensor_with_parallelism(key, tensor, dp_tp) == -600
    assert put_parts(store, key, tensor, 3, 1) == [0, 0, 0]
    assert store.get_tensor_with_parallelism(key, ReadTarget("shard", tp(1, 4, 1))) is None


def test_parts_have_the_keys_of_the_existing_package(store: MooncakeDistributedStore) -> None:
    key, tensor = new_key(), torch.arange(12).reshape(3, 4)
    assert store.put_tensor_with_tp(key, tensor, tp_rank=1, tp_size=2, split_dim=1) == 0
    for rank in range(2):
        wanted = part(tensor, rank, 2, 1)
        assert equal(store.get_tensor(f"{key}_tp_{rank}"), wanted)
        assert equal(store.get_tensor_with_tp(key, rank, 2, 1), wanted)
        header = decode(store.get(f"{key}_tp_{rank}"), store.get_size(f"{key}_tp_{rank}"))
        assert (header.global_shape, header.shape) == ((3, 4), (3, 2))
        (axis,) = header.axes
        assert (axis.kind, axis.rank, axis.count, axis.split_dim) == (AxisKind.TP, rank, 2, 1)
        assert axis.extent == 2
    assert store.is_exist(key) == 0
    assert store.get_tensor_with_tp(key, 0, 1) is None
    assert store.get_tensor_with_tp(key, 2, 3) is None


def test_writers_have_the_keys_and_the_manifest_of_the_format(store: MooncakeDistributedStore) -> None:
    key, tensor = new_key(), torch.arange(24.0)
    assert store.put_tensor_with_parallelism(key, tensor, writer_partition=(1, 4, 0)) == 0
    assert equal(store.get_tensor(f"{key}__writer_1of4_sd0"), part(tensor, 1, 4, 0))
    manifest = decode_manifest(store.get(f"{key}__writer_manifest"))
    assert (manifest.shape, manifest.split_dim, manifest.count) == ((24,), 0, 4)
    assert store.get_tensor_with_parallelism(key) is None, "three writers have not stored their parts yet"
    assert equal(
        store.get_tensor_with_parallelism(key, ReadTarget("shard", tp(3, 8))), part(tensor, 3, 8, 0)
    ), "this part lies within that of writer 1"


def dp_tp(dp_rank: int, rank: int, size: int, dim: int) -> TensorParallelism:
    return TensorParallelism([ParallelAxis("dp", dp_rank, 2), ParallelAxis("tp", rank, size, dim)])


def test_with_several_axes_a_rank_stores_its_part_of_the_whole(store: MooncakeDistributedStore) -> None:
    key, tensor = new_key(), torch.arange(24).reshape(4, 6)
    get = store.get_tensor_with_parallelism
    assert store.put_tensor_with_parallelism(key, tensor, dp_tp(1, 0, 2, 1)) == 0
    assert equal(store.get_tensor(f"{key}__dp_1of2__tp_0of2_sd1"), part(tensor, 0, 2, 1))
    assert get(key, ReadTarget("full", dp_tp(1, 0, 2, 1))) is None, "the other rank has not stored its part"
    assert store.put_tensor_with_parallelism(key, tensor, dp_tp(1, 1, 2, 1)) == 0
    other_order = TensorParallelism(list(reversed(dp_tp(1, 1, 2, 1).axes)))
    for way in (dp_tp(1, 1, 2, 1), other_order):
        assert equal(get(key, ReadTarget("shard", way)), part(tensor, 1, 2, 1))
        assert equal(get(key, ReadTarget("full", way)), tensor)
    assert equal(get(key, ReadTarget("shard", dp_tp(1, 2, 3, 1))), part(tensor, 2, 3, 1))
    assert equal(get(key, ReadTarget("shard", dp_tp(1, 1, 2, 0))), part(tensor, 1, 2, 0))
    assert get(key, ReadTarget("shard", dp_tp(0, 1, 2, 1))) is None, "another data parallel rank's"
    assert get(key, ReadTarget("full")) is None


def test_ranks_experts_and_stages_have_tensors_of_their_own(store: MooncakeDistributedStore) -> None:
    key = new_key()
    ways = [
        TensorParallelism([axis])
        for axis in (
            ParallelAxis("dp", 0, 2),
            ParallelAxis("dp", 1, 2),
            ParallelAxis("ep", 0, 2, expert_id=3),
            ParallelAxis("ep", 0, 2, expert_id=4),
            ParallelAxis("pp", 1, 2, stage_id=0),
        )
    ]
    for number, way in enumerate(ways):
        assert store.put_tensor_with_parallelism(key, torch.full((3,), number), way) == 0
    for number, way in enumerate(ways):
        for mode in ("shard", "full", "as_stored"):
            found = store.get_tensor_with_parallelism(key, ReadTarget(mode, way))
            assert equal(found, torch.full((3,), number))
    assert store.get_tensor_with_parallelism(key) is None


def test_a_header_cannot_name_any_number_of_parts(store: MooncakeDistributedStore) -> None:
    for num_parts, wanted in ((4, (0,)), (MAX_PARTS + 1, None)):
        key = new_key()
        axis = Axis(AxisKind.TP, 0, num_parts, 0)
        assert store.put(f"{key}_tp_0", encode(TensorHeader("int8", (0,), (0,), (axis,)))) == 0
        found = store.get_tensor_with_parallelism(key, ReadTarget("full"))
        assert (None if found is None else tuple(found.shape)) == wanted


@pytest.mark.parametrize("shape", [(1 << 53,), (1 << 61,), (-4, 0), (1 << 62, 1 << 62, 0)])
def test_a_manifest_of_a_tensor_that_no_host_can_have(
    store: MooncakeDistributedStore, shape: tuple[int, ...]
) -> None:
    key = new_key()
    assert store.put(f"{key}__writer_manifest", encode_manifest(TensorManifest("int64", shape, 0, 4))) == 0
    assert store.get_tensor_with_parallelism(key, ReadTarget("full")) is None


def test_puts_from_memory_in_the_format(store: MooncakeDistributedStore) -> None:
    tensor = torch.arange(24).reshape(4, 6)
    head, _, _, _ = _serialize_tensor(tensor)
    buffer = np.frombuffer(head + tensor.numpy().tobytes(), dtype=np.uint8)
    address, size = buffer.ctypes.data, buffer.size
    key = new_key()
    assert store.put_tensor_with_tp_from(key, address, size, 0, 2, 1) == 0
    assert equal(store.get_tensor_with_tp(key, 1, 2), part(tensor, 1, 2, 1))
    assert store.batch_put_tensor_with_tp_from([key + "w"], [address], [size], 0, 1) == [0]
    assert equal(store.get_tensor(key + "w"), tensor)
    target = np.zeros(304 + 96, dtype=np.uint8)
    found = store.get_tensor_with_tp_into(key, target.ctypes.data, target.size, 0, 2, 1)
    assert found is not None and equal(found, part(tensor, 0, 2, 1))
    assert found.data_ptr() == target.ctypes.data + 304
    found = store.batch_get_tensor_with_tp_into([key, "missing"], [target.ctypes.data] * 2, [400] * 2, 1, 2)
    assert equal(found[0], part(tensor, 1, 2, 1)) and found[1] is None
    assert store.put_tensor_with_parallelism_from(key + "p", address, size, tp(0, 2, 0)) == 0
    assert equal(store.get_tensor_with_parallelism(key + "p", ReadTarget("full")), tensor)
    assert store.put_tensor_with_parallelism_from(key + "m", address, size, dp_tp(0, 1, 3, 1)) == 0
    assert equal(store.get_tensor_with_parallelism(key + "m", ReadTarget("full", dp_tp(0, 0, 3, 1))), tensor)
    assert store.put_tensor_with_parallelism_from(key + "q", address, 300, tp(0, 2, 0)) == -600
    assert store.batch_put_tensor_with_tp_from([key], [address], []) == [-600]


def test_batches(store: MooncakeDistributedStore) -> None:
    keys, tensors = [new_key() for _ in range(3)], [torch.full((4,), n) for n in range(3)]
    assert store.batch_put_tensor_with_tp(keys, tensors, 0, 2) == [0, 0, 0]
    found = store.batch_get_tensor_with_tp(["missing", *keys], 1, 2)
    assert found[0] is None
    assert all(equal(a, b[2:]) for a, b in zip(found[1:], tensors, strict=True))
    more = [new_key() for _ in range(3)]
    ways = [None, tp(0, 2), None]
    writers = [None, None, (0, 1, 0)]
    codes = store.batch_put_tensor_with_parallelism(more, tensors, ways, writer_partitions=writers)
    assert codes == [0, 0, 0]
    found = store.batch_get_tensor_with_parallelism(more, [None, ReadTarget("shard", tp(0, 2)), None])
    assert all(equal(a, b) for a, b in zip(found, tensors, strict=True))
    assert store.batch_put_tensor_with_parallelism(more, tensors, ways[:2]) == [-600] * 3
    assert store.batch_get_tensor_with_parallelism(more, [None]) == [None] * 3
    assert store.batch_put_tensor_with_tp(more, tensors[:2]) == [-600] * 3


def test_an_upsert_replaces_every_part(store: MooncakeDistributedStore) -> None:
    key, tensor = new_key(), torch.arange(24).reshape(4, 6)
    for new, size, dim in ((tensor, 2, 0), (tensor + 1, 3, 1), (tensor + 2, 2, 1)):
        assert put_parts(store, key, new, size, dim, replace=True) == [0] * size
        assert equal(store.get_tensor_with_parallelism(key), new)
        assert equal(store.get_tensor_with_parallelism(key, ReadTarget("shard", tp(1, 2))), new[2:])
    other = new_key()
    head, _, _, _ = _serialize_tensor(tensor)
    buffer = np.frombuffer(head + tensor.numpy().tobytes(), dtype=np.uint8)
    for rank in range(2):
        code = store.upsert_tensor_with_parallelism_from(
            other, buffer.ctypes.data, buffer.size, writer_partition=(rank, 2, 1)
        )
        assert code == 0
    assert equal(store.get_tensor_with_parallelism(other), tensor)
    assert store.batch_upsert_tensor_with_parallelism(
        [other], [tensor + 1], writer_partitions=[(0, 1, 0)]
    ) == [0]
    assert equal(store.get_tensor_with_parallelism(other), tensor + 1)


def test_groups_reach_every_part(store: MooncakeDistributedStore) -> None:
    config, keys = ReplicateConfig(), [new_key(), new_key()]
    config.group_ids = ["a", "b"]
    tensors = [torch.arange(4)] * 2
    assert store.batch_pub_tensor_with_tp(keys, tensors, config, 0, 2) == [0, 0]
    assert store.pub_tensor_with_tp(new_key(), tensors[0], config, 0, 2) == -600, "two groups for one"
    assert config.group_ids == ["a", "b"]


def test_invalid_arguments(store: MooncakeDistributedStore) -> None:
    tensor = torch.arange(4)
    put = store.put_tensor_with_parallelism
    bad_axis = TensorParallelism([ParallelAxis("tp", 2, 2, 0)])
    assert put(new_key(), tensor, bad_axis) == -600
    assert put(new_key(), tensor, tp(0, 2, 1)) == -600
    assert put(new_key(), tensor, tp(0, 2), writer_partition=(0, 2, 0)) == -600
    assert put(new_key(), tensor, "tp") == -600  # type: ignore[arg-type]
    for partition in [(2, 2, 0), (0, 2, 1), (0, 2), "abc", (None, 2, 0)]:
        assert put(new_key(), tensor, writer_partition=partition) == -600
    assert put(new_key(), tensor, TensorParallelism([ParallelAxis("dp")] * 5)) == -600
    assert store.put_tensor_with_tp(new_key(), tensor, 2, 2) == 0, "the rank does not matter"
    assert store.put_tensor_with_tp(new_key(), tensor, 0, 2, 1) == -600
    key = new_key()
    assert store.put_tensor(key, tensor) == 0
    get = store.get_tensor_with_parallelism
    assert get(key, ReadTarget("shard", bad_axis)) is None
    assert get(key, ReadTarget("shard", tp(0, 2, 1))) is None
    assert get(key, ReadTarget("as_stored", tp(0, 2))) is None
    assert get(key, "full") is None  # type: ignore[arg-type]
    assert get("missing") is None


def test_attributes_are_checked_when_they_are_set() -> None:
    with pytest.raises(RuntimeError):
        ReadTarget().mode = "whole"
    with pytest.raises(TypeError):
        ParallelAxis().rank = None  # type: ignore[assignment]
    for thing in (ParallelAxis(), TensorParallelism(), ReadTarget()):
        with pytest.raises(AttributeError):
            thing.other = 1
    target = ReadTarget()
    target.mode = "shard"
    target.parallelism = TensorParallelism()
    target.parallelism.axes = [ParallelAxis()]
    assert (target.mode, len(target.parallelism.axes)) == ("shard", 1)

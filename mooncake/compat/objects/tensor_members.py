# SPDX-License-Identifier: Apache-2.0
"""Tensors as members: by the store's tensor calls where it has them, else as bytes of the same format.

A jagged nested tensor is stored as its parts (values, offsets, lengths). A tensor of a dtype or layout that
the format does not have is stored by ``torch.save``, and loaded with ``weights_only``, which runs no code of
the writer's. Torch is imported by the first tensor.
"""

from __future__ import annotations

import ctypes
import io
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

from mooncake.compat.objects.chunk_reader import ChunkReader, MemberPlan, MemberRead, whole
from mooncake.compat.objects.chunk_writer import ByteSource, ChunkWriter, source_of
from mooncake.compat.objects.manifest import TENSOR, TORCH_SAVE, StoredChunk, StoredMember
from mooncake.compat.objects.rows import RowSelection, select_rows
from mooncake.compat.objects.values import RawDestination, TensorObjectBuffer
from mooncake.compat.store.tensor_format import DTYPES, HEADER_BYTES, MAX_DIMS, TensorHeader, decode, encode
from mooncake.compat.store.tensor_memory import (
    FetchedObject,
    Tensor,
    header_of,
    in_memory,
    load_torch,
    tensor_at,
    tensor_from,
)

PARTS = "tensor_parts"


def is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


@dataclass(frozen=True, slots=True)
class TensorMember:
    tensor: Tensor

    def write(self, writer: ChunkWriter, key: str) -> StoredMember:
        writer.refuse_zero_copy(key)
        held = in_memory(self.tensor)
        size = HEADER_BYTES + held.numel() * held.element_size()
        if writer.put_tensor(key, held):
            chunk = StoredChunk(key, size)
            shape = tuple(held.shape)
            return StoredMember(key, size, (chunk,), TENSOR, None, HEADER_BYTES, str(held.dtype), shape)
        return replace(writer.put(key, ByteSource(tuple(_spans(held)))), header_bytes=HEADER_BYTES)


@dataclass(frozen=True, slots=True)
class TensorPartsMember:
    parts: tuple[Tensor, ...]

    def write(self, writer: ChunkWriter, key: str) -> StoredMember:
        writer.refuse_zero_copy(key)
        return writer.put(key, ByteSource(tuple(span for part in self.parts for span in _spans(part))))


@dataclass(frozen=True, slots=True)
class SavedTensorMember:
    tensor: Tensor

    def write(self, writer: ChunkWriter, key: str) -> StoredMember:
        writer.refuse_zero_copy(key)
        file = io.BytesIO()
        load_torch().save(self.tensor.detach().cpu(), file)
        return replace(writer.put(key, source_of(file.getbuffer())), format=TORCH_SAVE)


@dataclass(frozen=True, slots=True)
class TensorObjectMember:
    buffer: TensorObjectBuffer

    def write(self, writer: ChunkWriter, key: str) -> StoredMember:
        return writer.put_tensor_object(key, self.buffer)


def tensor_object_source(value: TensorObjectBuffer) -> tuple[dict[str, Any], TensorObjectMember]:
    return {"encoding": "torch_tensor"}, TensorObjectMember(value)


def tensor_source(tensor: Tensor) -> tuple[dict[str, Any], Any]:
    """Specification and source of a tensor."""
    torch = load_torch()
    spec: dict[str, Any] = {"encoding": "torch_tensor", "dtype": str(tensor.dtype)}
    dtype = spec["dtype"].removeprefix("torch.")
    if tensor.is_nested and tensor.layout == torch.jagged and dtype in DTYPES:
        parts = [tensor.values(), tensor.offsets()]
        if tensor.lengths() is not None:
            parts.append(tensor.lengths())
        held = tuple(in_memory(part) for part in parts)
        spec |= {
            "nested": True,
            "format": PARTS,
            "part_bytes": [header_of(part).size_bytes for part in held],
            "has_lengths": len(held) == 3,
            "ragged_idx": tensor._ragged_idx,
        }
        return spec, TensorPartsMember(held)
    if tensor.is_nested:
        return spec | {"nested": True, "format": TORCH_SAVE}, SavedTensorMember(tensor)
    spec |= {"shape": list(tensor.shape), "element_size": tensor.element_size()}
    is_plain = tensor.layout == torch.strided and not tensor.is_quantized
    if is_plain and dtype in DTYPES and tensor.ndim <= MAX_DIMS:
        return spec, TensorMember(tensor)
    return spec, SavedTensorMember(tensor)


def read_tensor(
    reader: ChunkReader, name: str, spec: Mapping[str, Any], member: StoredMember, rows: Any, destination: Any
) -> MemberPlan:
    """Plan to read a tensor, or some of its rows."""
    if destination is not None and not isinstance(destination, TensorObjectBuffer | RawDestination):
        raise TypeError(f"structured tensor field {name}: needs a tensor_object_buffer or a raw_destination")
    if spec.get("nested") or member.format == TORCH_SAVE:
        if destination is not None:
            raise ValueError(f"structured tensor field {name} does not support destinations")
        return _read_packed(name, spec, member, rows)
    if rows is not None:
        return _read_rows(name, spec, member, rows, destination)
    if destination is not None:
        return _read_to(name, spec, member, destination)
    return _read_whole(reader, name, spec, member)


def _read_whole(reader: ChunkReader, name: str, spec: Mapping[str, Any], member: StoredMember) -> MemberPlan:
    if member.kind == TENSOR:
        tensor = reader.get_tensor(member.key)
        _compare(name, spec, str(tensor.dtype), tuple(tensor.shape))
        return tensor
    fetched = FetchedObject(member.size_bytes)
    yield [MemberRead(member, whole(member), fetched.address, member.size_bytes)]
    _check_header(name, spec, fetched.header())
    return fetched.tensor()


def _read_to(
    name: str, spec: Mapping[str, Any], member: StoredMember, destination: TensorObjectBuffer | RawDestination
) -> MemberPlan:
    yield [_into(member, whole(member), destination.ptr, destination)]
    if "dtype" not in spec or isinstance(destination, RawDestination):
        return destination
    tensor = tensor_at(destination.ptr, member.size_bytes)
    _compare(name, spec, str(tensor.dtype), tuple(tensor.shape))
    tensor._mooncake_owner = destination.owner  # the memory lives as long as the tensor
    return tensor


def _read_rows(
    name: str,
    spec: Mapping[str, Any],
    member: StoredMember,
    rows: Any,
    destination: TensorObjectBuffer | RawDestination | None,
) -> MemberPlan:
    head = np.empty(min(HEADER_BYTES, member.size_bytes), dtype=np.uint8)
    yield [MemberRead(member, [(0, head.nbytes)], int(head.ctypes.data), head.nbytes)]
    header = decode(head.tobytes(), member.size_bytes)
    _check_header(name, spec, header)
    if not header.shape:
        raise ValueError(f"structured tensor field {name} is a scalar and does not support slicing")
    selected = select_rows(rows, header.shape[0])
    assert selected is not None, "only called with rows"
    shape = (len(selected), *header.shape[1:])
    row_bytes = prod(shape[1:]) * DTYPES[header.dtype][1]
    runs = [(HEADER_BYTES + start, length) for start, length in selected.byte_runs(row_bytes)]
    new_head = encode(TensorHeader(header.dtype, shape, shape))
    size = HEADER_BYTES + row_bytes * len(selected)
    if destination is None:
        fetched = FetchedObject(size)
        ctypes.memmove(fetched.address, new_head, HEADER_BYTES)
        yield [MemberRead(member, runs, fetched.address + HEADER_BYTES, size - HEADER_BYTES)]
        return fetched.tensor()
    if size > destination.size:
        raise ValueError(f"structured tensor field {name}: {size} bytes do not fit in {destination.size}")
    yield [_into(member, runs, destination.ptr + HEADER_BYTES, destination, HEADER_BYTES)]
    ctypes.memmove(destination.ptr, new_head, HEADER_BYTES)
    return destination


def _read_packed(name: str, spec: Mapping[str, Any], member: StoredMember, rows: Any) -> MemberPlan:
    memory = np.empty(member.size_bytes, dtype=np.uint8)
    yield [MemberRead(member, whole(member), int(memory.ctypes.data), memory.nbytes, by_chunk=True)]
    if member.format == TORCH_SAVE:
        tensor = load_torch().load(io.BytesIO(memory.tobytes()), map_location="cpu", weights_only=True)
        if not is_tensor(tensor):
            raise ValueError(f"structured tensor field {name} is a {type(tensor).__name__}, not a tensor")
        if rows is None:
            return tensor
        selected = select_rows(rows, tensor.size(0))
        assert selected is not None, "only called with rows"
        if tensor.is_nested:
            parts = tensor.unbind()
            return load_torch().nested.nested_tensor([parts[row] for row in selected.indices.tolist()])
        return tensor[load_torch().from_numpy(selected.indices)]
    if spec.get("format") != PARTS:
        raise ValueError(f"structured tensor field {name}: unknown format {spec.get('format')!r}")
    return _jagged(name, spec, memory, rows)


def _jagged(name: str, spec: Mapping[str, Any], memory: np.ndarray[Any, Any], rows: Any) -> Tensor:
    torch = load_torch()
    sizes, dim = spec.get("part_bytes"), spec.get("ragged_idx", 1)
    num_parts = 3 if spec.get("has_lengths") else 2
    if (
        not isinstance(sizes, list)
        or len(sizes) != num_parts
        or not all(type(size) is int and size >= 0 for size in sizes)
        or sum(sizes) != memory.nbytes
    ):
        raise ValueError(f"structured tensor field {name}: parts of {sizes!r} bytes in {memory.nbytes}")
    ends = np.cumsum([0, *sizes]).tolist()
    values, offsets, *more = [tensor_from(memory[start:end].data) for start, end in pairwise(ends)]
    if type(dim) is not int or not 1 <= dim <= values.ndim:
        raise ValueError(f"structured tensor field {name}: ragged dimension {dim!r} of {values.ndim + 1}")
    starts = offsets.to(torch.int64)
    lengths = more[0].to(torch.int64) if more else starts[1:] - starts[:-1]
    total = values.shape[dim - 1]
    is_good = starts.ndim == 1 and starts.numel() > 0 and lengths.shape == (starts.numel() - 1,)
    if is_good and lengths.numel():
        is_good = bool(
            (starts >= 0).all() and (lengths >= 0).all() and (starts[:-1] + lengths <= total).all()
        )
    if not is_good:
        raise ValueError(f"structured tensor field {name}: offsets do not fit {total} values")
    _compare(name, {"dtype": spec.get("dtype")}, str(values.dtype), ())
    if rows is not None:
        selected = select_rows(rows, lengths.numel())
        assert selected is not None, "only called with rows"
        values, starts, lengths = _pick(values, starts, lengths, dim - 1, selected)
        more = []
    more = [lengths] if more else []
    return torch.nested.nested_tensor_from_jagged(values, starts, *more, jagged_dim=dim)


def _pick(
    values: Tensor, starts: Tensor, lengths: Tensor, dim: int, selected: RowSelection
) -> tuple[Tensor, Tensor, Tensor]:
    torch = load_torch()
    places = [(int(starts[row]), int(lengths[row])) for row in selected.indices.tolist()]
    parts = [values.narrow(dim, start, length) for start, length in places]
    joined = torch.cat(parts, dim) if parts else values.narrow(dim, 0, 0)
    found = torch.tensor([length for _, length in places], dtype=torch.int64)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), found.cumsum(0)])
    return joined, offsets, found


def _spans(tensor: Tensor) -> list[np.ndarray[Any, Any]]:
    head = np.frombuffer(encode(header_of(tensor)), dtype=np.uint8)
    elements = tensor.reshape(-1).view(load_torch().uint8).numpy()
    return [head, elements]


def _into(
    member: StoredMember,
    runs: list[tuple[int, int]],
    address: int,
    destination: TensorObjectBuffer | RawDestination,
    used: int = 0,
) -> MemberRead:
    is_registered = isinstance(destination, RawDestination) and destination.pre_registered
    return MemberRead(member, runs, address, destination.size - used, is_registered, is_callers=True)


def _check_header(name: str, spec: Mapping[str, Any], header: TensorHeader) -> None:
    _compare(name, spec, f"torch.{header.dtype}", header.shape)


def _compare(name: str, spec: Mapping[str, Any], dtype: str, shape: tuple[int, ...]) -> None:
    """A tensor of another dtype or shape than the metadata says is not the one that was stored."""
    wanted = spec.get("dtype", dtype), list(spec.get("shape", shape))
    if wanted != (dtype, list(shape)):
        raise ValueError(
            f"structured tensor field {name} is {dtype} of {shape}, not {wanted[0]} of {wanted[1]}"
        )

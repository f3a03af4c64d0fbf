# SPDX-License-Identifier: Apache-2.0
"""Members of a structured object: arrays, bytes and tensors, each with a specification in the metadata.

Owns how a value becomes a member and how a member, or some of its rows, becomes a value again. What is read
may have been written by anyone who can write to the store: the specification must fit the size in the
manifest before memory is allocated.

Tensors are stored by the store's tensor calls where it has them, else as bytes of the same format. A jagged
nested tensor is stored as its parts (values, offsets, lengths). A tensor of a dtype or layout that the format
does not have is stored by ``torch.save``, and loaded with ``weights_only``, which runs no code of the
writer's; nothing else is unpickled. Torch is imported by the first tensor.

Arrays may lie in a lease of the program's buffer pool. It goes back to the pool when ``release_result`` is
called with the result, or else with the last array that refers to its memory. After ``release_result`` the
result must not be used: the pool may have given its memory to another one.
"""

from __future__ import annotations

import ctypes
import io
import sys
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

from mooncake.compat.objects.bundles import (
    ByteSource,
    ChunkReader,
    ChunkWriter,
    MemberPlan,
    MemberRead,
    memory_for,
    source_of,
    whole,
)
from mooncake.compat.objects.manifest import MAX_MEMBER_BYTES, TENSOR, TORCH_SAVE, StoredChunk, StoredMember
from mooncake.compat.objects.values import RawDestination, RowSelection, TensorObjectBuffer, select_rows
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

# Leases -------------------------------------------------------------------------------------------------

OWNER = "_mooncake_pool_owner"
"""Attribute of an array in a lease, and of all views of it: the object to release."""


class PoolLease:
    """A lease that is released once, by the first of several calls."""

    def __init__(self, lease: Any) -> None:
        self._held = [lease]

    def release(self) -> None:
        try:
            lease = self._held.pop()
        except IndexError:
            return
        lease.release()

    def drop(self) -> None:
        """Drop the reference to the lease. Called by the garbage collector, perhaps in a thread that holds a
        lock of the pool, which ``release`` would take: the pool itself finds a lease without references."""
        self._held.clear()


class LeasedArray(np.ndarray[Any, Any]):
    """Array in a lease."""

    def __array_finalize__(self, parent: Any) -> None:
        setattr(self, OWNER, getattr(parent, OWNER, None))


def lease_array(pool: Any, dtype: np.dtype[Any], shape: tuple[int, ...], size_bytes: int) -> LeasedArray:
    """New array in memory of ``pool``, which is registered."""
    lease = pool.acquire(size_bytes)
    memory = (ctypes.c_uint8 * size_bytes).from_address(int(lease.ptr))
    owner = PoolLease(lease)
    weakref.finalize(memory, owner.drop)
    flat = np.frombuffer(memoryview(memory), dtype=np.uint8)
    array: LeasedArray = flat.view(dtype).reshape(shape).view(LeasedArray)
    setattr(array, OWNER, owner)
    return array


def release_leases(result: Any) -> None:
    """Release every lease in which a value of ``result`` lies: arrays in dicts, lists and object arrays."""
    owners = {id(owner): owner for owner in _owners(result, set())}
    for owner in owners.values():
        owner.release()


def _owners(value: Any, seen: set[int]) -> Iterator[Any]:
    if isinstance(value, np.ndarray):
        owner = getattr(value, OWNER, None)
        if owner is not None:
            yield owner
        if value.dtype != np.dtype(object):
            return
        parts = value.ravel().tolist()
    elif isinstance(value, Mapping):
        parts = list(value.values())
    elif isinstance(value, list | tuple):
        parts = list(value)
    elif hasattr(value, "batch") and hasattr(value, "non_tensor_batch"):
        parts = [value.batch, value.non_tensor_batch]
    else:
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    for part in parts:
        yield from _owners(part, seen)


# Tensors ------------------------------------------------------------------------------------------------

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
    memory = memory_for(member.key, (member.size_bytes,))
    yield [MemberRead(member, whole(member), int(memory.ctypes.data), memory.nbytes, by_chunk=True)]
    if member.format == TORCH_SAVE:
        file = io.BytesIO(memory.tobytes())
        try:
            tensor = load_torch().load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # torch's, its pickle's or its archive's
            raise ValueError(f"structured tensor field {name} cannot be loaded: {error}") from error
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
    if is_good:
        is_good = bool(((starts >= 0) & (starts <= total)).all())
    if is_good:  # a sum of start and length could wrap around
        is_good = bool(((lengths >= 0) & (lengths <= total - starts[:-1])).all())
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
    wanted = spec.get("dtype", dtype), spec.get("shape", list(shape))
    if wanted != (dtype, list(shape)):
        raise ValueError(
            f"structured tensor field {name} is {dtype} of {shape}, not {wanted[0]} of {wanted[1]}"
        )


# All members --------------------------------------------------------------------------------------------

SPECS = "__mooncake_structured_fields__"
"""Key of the specifications in an object's metadata."""
MAX_ARRAY_DIMS = 64


@dataclass(frozen=True, slots=True)
class BytesMember:
    """A member that is stored as it lies in memory."""

    source: ByteSource

    def write(self, writer: ChunkWriter, key: str) -> StoredMember:
        return writer.put(key, self.source)


@dataclass(frozen=True, slots=True)
class ScatteredBuffers:
    """A member whose bytes lie in several buffers, not joined before they are written.

    With a ``dtype`` it is read as an array of ``shape``, otherwise as bytes. ``owners`` are referenced while
    the value is, so that the memory of the buffers stays.
    """

    buffers: tuple[Any, ...]
    owners: tuple[Any, ...] = ()
    dtype: str | None = None
    shape: tuple[int, ...] | None = None

    def encoded(self, name: str) -> tuple[dict[str, Any], BytesMember]:
        """Specification and source of the member."""
        source = ByteSource(tuple(span for part in self.buffers for span in source_of(part).spans))
        if self.dtype is None:
            return {"encoding": "bytes"}, BytesMember(source)
        dtype = np.dtype(self.dtype)
        shape = (source.size_bytes // (dtype.itemsize or 1),) if self.shape is None else tuple(self.shape)
        if prod(shape) * dtype.itemsize != source.size_bytes:
            raise ValueError(f"{name}: {source.size_bytes} bytes are no {dtype} of {shape}")
        return _array_spec(dtype, shape), BytesMember(source)


def encode_member(name: str, value: Any) -> tuple[dict[str, Any], Any]:
    """Specification of a value and its ``MemberSource``.

    Raises:
        TypeError: a value of a type that cannot be stored.
        ValueError: buffers of another size than their array.
    """
    if isinstance(value, TensorObjectBuffer):
        return tensor_object_source(value)
    if is_tensor(value):
        return tensor_source(value)
    if isinstance(value, ScatteredBuffers):
        return value.encoded(name)
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        if array.dtype.hasobject or array.dtype.kind == "V":
            raise TypeError(f"{name}: an array of dtype {array.dtype} cannot be stored")
        held = np.ascontiguousarray(array).reshape(-1)
        flat = held.view(np.uint8) if held.nbytes else np.empty(0, np.uint8)
        return _array_spec(array.dtype, array.shape), BytesMember(ByteSource((flat,)))
    try:
        view = memoryview(value)
    except TypeError:
        raise TypeError(f"{name} must be bytes-like, got {type(value).__name__}") from None
    held_bytes = view if view.c_contiguous else view.tobytes()
    return {"encoding": "bytes"}, BytesMember(source_of(held_bytes))


def read_member(
    reader: ChunkReader,
    name: str,
    spec: Any,
    member: StoredMember,
    *,
    rows: Any = None,
    destination: Any = None,
    pool: Any = None,
) -> MemberPlan:
    """Plan to read a member, or some of its rows, to new memory or to ``destination``.

    Raises:
        TypeError, ValueError: the destination does not fit, or the member is not what it says.
    """
    spec = {"encoding": "bytes"} if spec is None else spec
    encoding = spec.get("encoding") if isinstance(spec, Mapping) else None
    if encoding == "ndarray":
        return _read_array(name, spec, member, rows, destination, pool)
    if encoding == "torch_tensor":
        return read_tensor(reader, name, spec, member, rows, destination)
    if encoding == "bytes":
        if rows is not None:
            raise ValueError(f"structured field {name} of bytes does not support slicing")
        return _read_bytes(name, member, destination)
    raise ValueError(f"unsupported structured field encoding of {name}: {encoding!r}")


def array_layout(
    name: str, spec: Mapping[str, Any], size_bytes: int
) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Checked dtype and shape of an array of ``size_bytes``.

    Raises:
        ValueError: they are not those of such an array.
    """
    shape = spec.get("shape")
    try:
        dtype = np.dtype(str(spec.get("dtype")))
    except (TypeError, ValueError, SyntaxError) as error:
        raise ValueError(f"structured ndarray field {name}: dtype {spec.get('dtype')!r}") from error
    if dtype.hasobject or dtype.kind == "V" or dtype.itemsize < 1:
        raise ValueError(f"structured ndarray field {name}: dtype {dtype} is not supported")
    if not isinstance(shape, list) or len(shape) > MAX_ARRAY_DIMS:
        raise ValueError(f"structured ndarray field {name}: shape {shape!r}")
    if not all(type(length) is int and 0 <= length <= MAX_MEMBER_BYTES for length in shape):
        raise ValueError(f"structured ndarray field {name}: shape {shape!r}")
    if prod(length for length in shape if length) * dtype.itemsize > MAX_MEMBER_BYTES:
        raise ValueError(f"structured ndarray field {name}: shape {shape!r}")
    if prod(shape) * dtype.itemsize != size_bytes:
        raise ValueError(f"structured ndarray field {name}: {size_bytes} bytes are not {dtype} of {shape}")
    return dtype, tuple(shape)


def _array_spec(dtype: np.dtype[Any], shape: tuple[int, ...]) -> dict[str, Any]:
    return {"encoding": "ndarray", "dtype": dtype.str, "shape": list(shape)}


def _read_bytes(name: str, member: StoredMember, destination: Any) -> MemberPlan:
    if destination is None:
        memory = memory_for(member.key, (member.size_bytes,))
        address = int(memory.ctypes.data)
        yield [MemberRead(member, whole(member), address, memory.nbytes, by_chunk=True)]
        return memory.tobytes()
    if not isinstance(destination, RawDestination):
        raise TypeError(f"structured field {name} of bytes: the destination must be a raw_destination")
    yield [into(member, whole(member), destination)]
    return destination


def _read_array(
    name: str, spec: Mapping[str, Any], member: StoredMember, rows: Any, destination: Any, pool: Any
) -> MemberPlan:
    dtype, shape = array_layout(name, spec, member.size_bytes)
    runs = whole(member)
    if rows is not None:
        if not shape:
            raise ValueError(f"structured ndarray field {name} is a scalar and does not support slicing")
        selected = select_rows(rows, shape[0])
        if selected is not None:
            runs = selected.byte_runs(prod(shape[1:]) * dtype.itemsize)
            shape = (len(selected), *shape[1:])
    size = prod(shape) * dtype.itemsize
    if isinstance(destination, RawDestination):
        memory = (ctypes.c_uint8 * size).from_address(destination.ptr)
        memory._mooncake_owner = destination.owner  # type: ignore[attr-defined]  # array -> memory -> its owner
        yield [into(member, runs, destination)]
        return (
            np.frombuffer(memoryview(memory), dtype=np.uint8).view(dtype).reshape(shape)
            if size
            else np.empty(shape, dtype)
        )
    if destination is not None:
        _check_destination(name, destination, dtype, shape)
        yield [MemberRead(member, runs, int(destination.ctypes.data), destination.nbytes, is_callers=True)]
        return destination
    if pool is None or not size:
        array = memory_for(member.key, shape, dtype)
        yield [MemberRead(member, runs, int(array.ctypes.data), size)]
        return array
    leased = lease_array(pool, dtype, shape, size)
    try:
        yield [MemberRead(member, runs, int(leased.ctypes.data), size, is_registered=True)]
    except BaseException:
        getattr(leased, OWNER).release()
        raise
    return leased


def into(member: StoredMember, runs: list[tuple[int, int]], destination: RawDestination) -> MemberRead:
    return MemberRead(
        member,
        runs,
        destination.ptr,
        destination.size,
        is_registered=destination.pre_registered,
        is_callers=True,
    )


def _check_destination(name: str, array: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    what = f"structured ndarray field {name} destination"
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{what} must be a numpy.ndarray or a raw_destination")
    if array.dtype != dtype:
        raise ValueError(f"{what} dtype mismatch: expected {dtype.str}, got {array.dtype.str}")
    if array.shape != shape:
        raise ValueError(f"{what} shape mismatch: expected {shape}, got {array.shape}")
    if not array.flags.c_contiguous:
        raise ValueError(f"{what} must be C-contiguous")
    if not array.flags.writeable:
        raise ValueError(f"{what} must be writeable")

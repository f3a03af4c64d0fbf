# SPDX-License-Identifier: Apache-2.0
"""Members of a structured object: arrays, bytes and tensors, each with a specification in the metadata.

Owns how a value becomes a member and how a member, or some of its rows, becomes a value again. What is read
may have been written by anyone who can write to the store: the specification must fit the size in the
manifest before memory is allocated, and nothing is unpickled here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from mooncake.compat.objects.chunk_reader import ChunkReader, MemberPlan, MemberRead, whole
from mooncake.compat.objects.chunk_writer import ByteSource, ChunkWriter, source_of
from mooncake.compat.objects.leased_arrays import OWNER, lease_array
from mooncake.compat.objects.manifest import MAX_MEMBER_BYTES, StoredMember
from mooncake.compat.objects.rows import select_rows
from mooncake.compat.objects.tensor_members import is_tensor, read_tensor, tensor_object_source, tensor_source
from mooncake.compat.objects.values import RawDestination, TensorObjectBuffer

SPECS = "__mooncake_structured_fields__"
"""Key of the specifications in an object's metadata."""
MAX_DIMS = 64


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
    if not isinstance(shape, list) or len(shape) > MAX_DIMS:
        raise ValueError(f"structured ndarray field {name}: shape {shape!r}")
    if not all(type(length) is int and 0 <= length <= MAX_MEMBER_BYTES for length in shape):
        raise ValueError(f"structured ndarray field {name}: shape {shape!r}")
    if prod(shape) * dtype.itemsize != size_bytes:
        raise ValueError(f"structured ndarray field {name}: {size_bytes} bytes are not {dtype} of {shape}")
    return dtype, tuple(shape)


def _array_spec(dtype: np.dtype[Any], shape: tuple[int, ...]) -> dict[str, Any]:
    return {"encoding": "ndarray", "dtype": dtype.str, "shape": list(shape)}


def _read_bytes(name: str, member: StoredMember, destination: Any) -> MemberPlan:
    if destination is None:
        memory = np.empty(member.size_bytes, dtype=np.uint8)
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
        array = np.empty(shape, dtype)
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

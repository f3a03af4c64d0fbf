# SPDX-License-Identifier: Apache-2.0
"""A tensor as an object: a header of 304 bytes, then its elements.

The format is the existing package's, so that a program can read with ``get_into`` and its own arithmetic
what another stored with a tensor call. Owns that format and the manifests of tensors stored in parts;
knows numbers and shapes only: no torch, no memory, no store.

    0 u32 magic | 4 u16 version | 6 u16 header size | 8 i32 dtype | 12 i32 ndim | 16 u32 layout | 20 u32 flags
    24 u64 data offset | 32 u64 data bytes | 40 i64[8] global shape | 104 i64[8] local shape (-1: no such dim)
    168 u32 axes | 172 u32 0 | 176 4 x (i32 kind, index, rank, count, split dim, expert or stage; i64 extent)
"""

from __future__ import annotations

import dataclasses
import struct
from enum import IntEnum
from math import prod

MAGIC = 0x4D4F4F4E
MANIFEST_MAGIC = 0x574D414E
VERSION = 1
MAX_DIMS = 8
MAX_AXES = 4
MAX_PARTS = 1 << 16
MAX_BYTES = 1 << 56
"""Most bytes of a tensor, of one without elements too if its empty dimensions had one: more than any host
has, and few enough for torch's arithmetic."""

_FIXED = struct.Struct("<IHHiiIIQQ8q8qII")
_AXIS = struct.Struct("<6iq")
_MANIFEST = struct.Struct("<IHHiiiIQ8q")

HEADER_BYTES = _FIXED.size + MAX_AXES * _AXIS.size
MANIFEST_BYTES = _MANIFEST.size

DTYPES: dict[str, tuple[int, int]] = {
    "float32": (0, 4),
    "float64": (1, 8),
    "int8": (2, 1),
    "uint8": (3, 1),
    "int16": (4, 2),
    "uint16": (5, 2),
    "int32": (6, 4),
    "uint32": (7, 4),
    "int64": (8, 8),
    "uint64": (9, 8),
    "bool": (10, 1),
    "float16": (11, 2),
    "bfloat16": (12, 2),
    "float8_e4m3fn": (13, 1),
    "float8_e5m2": (14, 1),
}
"""Maps torch's name to (the format's number, bytes of one element)."""

_BY_NUMBER = {number: (name, size) for name, (number, size) in DTYPES.items()}


class AxisKind(IntEnum):
    DP = 0
    TP = 1
    EP = 2
    PP = 3


class Layout(IntEnum):
    FULL = 0
    SHARD = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Axis:
    """One way in which a job is divided, and this part's position in it."""

    kind: AxisKind
    rank: int
    count: int
    split_dim: int = -1
    member_id: int = 0
    """Number of the expert (EP) or the stage (PP); 0 for the other kinds."""
    extent: int = 0
    """Length of the part along ``split_dim``."""


@dataclasses.dataclass(frozen=True, slots=True)
class TensorHeader:
    """Description of a tensor. ``shape`` is that of the stored part, ``global_shape`` that of the whole."""

    dtype: str
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    axes: tuple[Axis, ...] = ()

    @property
    def data_bytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype][1]

    @property
    def size_bytes(self) -> int:
        """Size of the whole object."""
        return HEADER_BYTES + self.data_bytes

    @property
    def is_shard(self) -> bool:
        return any(axis.kind == AxisKind.TP for axis in self.axes)


@dataclasses.dataclass(frozen=True, slots=True)
class TensorManifest:
    """Description of the parts in which a tensor is stored."""

    dtype: str
    shape: tuple[int, ...]
    split_dim: int
    count: int


def encode(header: TensorHeader) -> bytes:
    """Encode the header to 304 bytes.

    Raises:
        ValueError: the format cannot represent such a tensor.
    """
    _check(header)
    number, _ = DTYPES[header.dtype]
    fixed = _FIXED.pack(
        MAGIC,
        VERSION,
        HEADER_BYTES,
        number,
        len(header.shape),
        Layout.SHARD if header.axes else Layout.FULL,
        0,
        HEADER_BYTES,
        header.data_bytes,
        *_padded(header.global_shape),
        *_padded(header.shape),
        len(header.axes),
        0,
    )
    return fixed + _axes_bytes(header.axes)


def decode(head: bytes | bytearray | memoryview, size_bytes: int) -> TensorHeader:
    """Decode the first 304 bytes of an object of ``size_bytes``.

    Raises:
        ValueError: it is not a tensor.
    """
    if len(head) < HEADER_BYTES or size_bytes < HEADER_BYTES:
        raise ValueError(
            f"{min(len(head), size_bytes)} bytes are not a tensor: its header alone has {HEADER_BYTES}"
        )
    fields = _FIXED.unpack_from(head)
    magic, version, header_bytes, number, ndim, layout, _, data_offset, data_bytes = fields[:9]
    if magic != MAGIC or version != VERSION or header_bytes != HEADER_BYTES or data_offset != HEADER_BYTES:
        raise ValueError(f"not a tensor: magic {magic:#x}, version {version}, header of {header_bytes} bytes")
    num_axes = fields[25]
    if number not in _BY_NUMBER or not 0 <= ndim <= MAX_DIMS or num_axes > MAX_AXES or layout not in (0, 1):
        raise ValueError(f"not a tensor: dtype {number}, {ndim} dimensions, {num_axes} axes, layout {layout}")
    shape, global_shape = tuple(fields[17 : 17 + ndim]), tuple(fields[9 : 9 + ndim])
    header = TensorHeader(_BY_NUMBER[number][0], shape, global_shape, _axes_in(head, _FIXED.size, num_axes))
    _check(header)
    if header.data_bytes != data_bytes or size_bytes < header.size_bytes:
        raise ValueError(f"not a tensor: {data_bytes} bytes of {size_bytes} for the shape {shape}")
    return header


def encode_manifest(manifest: TensorManifest) -> bytes:
    """Encode the manifest to 96 bytes."""
    number, _ = DTYPES[manifest.dtype]
    shape, ndim = _padded(manifest.shape), len(manifest.shape)
    return _MANIFEST.pack(
        MANIFEST_MAGIC, VERSION, MANIFEST_BYTES, number, ndim, manifest.split_dim, manifest.count, 0, *shape
    )


def decode_manifest(data: bytes) -> TensorManifest:
    """Decode a manifest.

    Raises:
        ValueError: it is not a manifest.
    """
    if len(data) < MANIFEST_BYTES:
        raise ValueError(f"{len(data)} bytes are not a manifest")
    magic, version, size, number, ndim, split_dim, count, _, *shape = _MANIFEST.unpack_from(data)
    if magic != MANIFEST_MAGIC or version != VERSION or size != len(data) or number not in _BY_NUMBER:
        raise ValueError(f"not a manifest: magic {magic:#x}, version {version}, {size} bytes, dtype {number}")
    if not 0 <= ndim <= MAX_DIMS or not 1 <= count <= MAX_PARTS or not -1 <= split_dim < max(ndim, 1):
        raise ValueError(f"not a manifest: {count} parts along {split_dim} of {ndim} dimensions")
    manifest = TensorManifest(_BY_NUMBER[number][0], tuple(shape[:ndim]), split_dim, count)
    _check_shape(manifest.dtype, manifest.shape)
    return manifest


def _check(header: TensorHeader) -> None:
    if header.dtype not in DTYPES:
        raise ValueError(f"dtype {header.dtype} cannot be stored; these can: {', '.join(DTYPES)}")
    if len(header.shape) > MAX_DIMS or len(header.global_shape) != len(header.shape):
        raise ValueError(f"shape {header.shape} of {header.global_shape}: at most {MAX_DIMS} dimensions")
    if len(header.axes) > MAX_AXES:
        raise ValueError(f"{len(header.axes)} axes: at most {MAX_AXES}")
    _check_shape(header.dtype, header.shape)
    _check_shape(header.dtype, header.global_shape)


def _check_shape(dtype: str, shape: tuple[int, ...]) -> None:
    if any(length < 0 for length in shape):
        raise ValueError(f"shape {shape}: lengths must not be negative")
    if prod(length for length in shape if length) * DTYPES[dtype][1] > MAX_BYTES:
        raise ValueError(f"shape {shape}: more than {MAX_BYTES} bytes")


def _padded(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape + (-1,) * (MAX_DIMS - len(shape))


def _axes_bytes(axes: tuple[Axis, ...]) -> bytes:
    packed = [
        _AXIS.pack(axis.kind, index, axis.rank, axis.count, axis.split_dim, axis.member_id, axis.extent)
        for index, axis in enumerate(axes)
    ]
    return b"".join(packed).ljust(MAX_AXES * _AXIS.size, b"\0")


def _axes_in(data: bytes | bytearray | memoryview, start: int, num_axes: int) -> tuple[Axis, ...]:
    axes: list[Axis] = []
    for index in range(num_axes):
        kind, _, rank, count, split_dim, member_id, extent = _AXIS.unpack_from(
            data, start + index * _AXIS.size
        )
        if not 0 <= kind <= 3 or not 0 <= rank < count:
            raise ValueError(f"not a tensor: axis of kind {kind}, rank {rank} of {count}")
        axes.append(Axis(AxisKind(kind), rank, count, split_dim, member_id, extent))
    return tuple(axes)

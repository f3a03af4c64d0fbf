"""torch's tensors and the memory they lie in. The only module of the store that loads torch, when called.

A tensor that is read lies where its bytes arrived: the object, header and all, is fetched to fresh memory
that only the tensor keeps, so that nothing is copied after the transfer.
"""

from __future__ import annotations

import ctypes
import importlib
from typing import Any, TypeAlias

import numpy as np

from mooncake.compat.store.tensor_format import DTYPES, HEADER_BYTES, TensorHeader, decode, encode
from mooncake.transfer.memory import is_mapped

Tensor: TypeAlias = Any
"""A ``torch.Tensor``; this package is used without torch as well."""

_ALIGNMENT = 64
_LEAD_BYTES = -HEADER_BYTES % _ALIGNMENT
"""In front of a header, so that the elements behind it are aligned."""


class FetchedObject:
    """Memory of one object of ``size_bytes`` that is to become a tensor."""

    __slots__ = ("_memory", "address", "size_bytes")

    def __init__(self, size_bytes: int) -> None:
        self._memory = _torch().empty(_LEAD_BYTES + size_bytes, dtype=_torch().uint8)
        self.address: int = self._memory.data_ptr() + _LEAD_BYTES
        self.size_bytes = size_bytes

    def content(self) -> bytes:
        """A copy of what arrived."""
        return ctypes.string_at(self.address, self.size_bytes)

    def header(self) -> TensorHeader:
        """Raises:
        ValueError: what arrived is no tensor.
        """
        return decode(ctypes.string_at(self.address, min(HEADER_BYTES, self.size_bytes)), self.size_bytes)

    def tensor(self) -> Tensor:
        """What arrived, in place.

        Raises:
            ValueError: it is no tensor.
        """
        header = self.header()
        start = _LEAD_BYTES + HEADER_BYTES
        return _shaped(self._memory[start : start + header.data_bytes], header)


def tensor_at(address: int, size_bytes: int) -> Tensor:
    """The tensor whose object lies at ``address``; it is the caller's memory that it shows.

    Raises:
        ValueError: there is no tensor.
    """
    if not is_mapped(address, max(1, size_bytes)):
        raise ValueError(f"{size_bytes} bytes at {address:#x} are not in main memory")
    header = decode(ctypes.string_at(address, min(HEADER_BYTES, size_bytes)), size_bytes)
    if not header.data_bytes:
        return _shaped(_torch().empty(0, dtype=_torch().uint8), header)
    memory = (ctypes.c_uint8 * header.data_bytes).from_address(address + HEADER_BYTES)
    return _shaped(_torch().frombuffer(memory, dtype=_torch().uint8), header)


def place(tensor: Tensor, header: TensorHeader, address: int, size_bytes: int) -> Tensor:
    """Write ``tensor`` as an object to ``address``; the tensor that lies there.

    Raises:
        ValueError: ``size_bytes`` are not enough for it.
    """
    if not is_mapped(address, max(1, size_bytes)):
        raise ValueError(f"{size_bytes} bytes at {address:#x} are not in main memory")
    if header.size_bytes > size_bytes:
        raise ValueError(f"a tensor of {header.size_bytes} bytes does not fit into {size_bytes}")
    ctypes.memmove(address, encode(header), HEADER_BYTES)
    there = tensor_at(address, size_bytes)
    return there.copy_(tensor)


def tensor_from(data: bytes | bytearray | memoryview) -> Tensor:
    """A tensor of its own out of an object's bytes.

    Raises:
        ValueError: they are no tensor.
    """
    fresh = FetchedObject(len(data))
    if data:
        ctypes.memmove(fresh.address, np.frombuffer(data, dtype=np.uint8).ctypes.data, len(data))
    return fresh.tensor()


def in_memory(tensor: Tensor) -> Tensor:
    """``tensor`` in main memory, its elements in order; itself, if it is so.

    Raises:
        ValueError: it is no dense tensor.
    """
    torch = _torch()
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or tensor.is_quantized:
        raise ValueError(f"{type(tensor).__name__} is no dense torch.Tensor")
    return tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()


def span_of(tensor: Tensor) -> tuple[int, int]:
    """(address, bytes) of a tensor from ``in_memory``."""
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()


def header_of(tensor: Tensor) -> TensorHeader:
    """Of all of ``tensor``.

    Raises:
        ValueError: its type or its shape has no place in the format.
    """
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype} can't be stored; these can: {', '.join(DTYPES)}")
    return TensorHeader(dtype, tuple(tensor.shape), tuple(tensor.shape))


def empty(dtype: str, shape: tuple[int, ...]) -> Tensor:
    return _torch().empty(shape, dtype=getattr(_torch(), dtype))


def _shaped(memory: Tensor, header: TensorHeader) -> Tensor:
    dtype = getattr(_torch(), header.dtype)
    if not header.data_bytes:
        return _torch().empty(header.shape, dtype=dtype)
    return memory.view(dtype).view(header.shape)


def _torch() -> Any:
    return importlib.import_module("torch")

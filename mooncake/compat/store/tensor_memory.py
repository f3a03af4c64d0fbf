# SPDX-License-Identifier: Apache-2.0
"""torch's tensors and their memory. The only module of the store that imports torch, when it is called.

A tensor that is read lies where its bytes arrived: the whole object with its header is fetched to fresh
memory that only the tensor references, so that nothing is copied after the transfer.
"""

from __future__ import annotations

import ctypes
import importlib
from typing import Any, TypeAlias

import numpy as np

from mooncake.compat.store.tensor_format import DTYPES, HEADER_BYTES, TensorHeader, decode, encode
from mooncake.transfer.memory import is_readable, is_writable

Tensor: TypeAlias = Any
"""A ``torch.Tensor``; ``Any``, because this package also works without torch."""

_ALIGNMENT = 64
_LEAD_BYTES = -HEADER_BYTES % _ALIGNMENT
"""Padding in front of a header, so that the elements behind it are aligned."""


class FetchedObject:
    """Memory for an object of ``size_bytes`` that becomes a tensor. MemoryError when there is none."""

    __slots__ = ("_memory", "address", "size_bytes")

    def __init__(self, size_bytes: int) -> None:
        try:
            self._memory = load_torch().empty(_LEAD_BYTES + size_bytes, dtype=load_torch().uint8)
        except RuntimeError as error:  # torch's allocator raises no MemoryError
            raise MemoryError(str(error)) from error
        self.address: int = self._memory.data_ptr() + _LEAD_BYTES
        self.size_bytes = size_bytes

    def content(self) -> bytes:
        """Copy of the object's bytes."""
        return ctypes.string_at(self.address, self.size_bytes)

    def header(self) -> TensorHeader:
        """Decode the header.

        Raises:
            ValueError: the object is not a tensor.
        """
        return decode(ctypes.string_at(self.address, min(HEADER_BYTES, self.size_bytes)), self.size_bytes)

    def tensor(self) -> Tensor:
        """Tensor in this memory.

        Raises:
            ValueError: the object is not a tensor.
        """
        header = self.header()
        start = _LEAD_BYTES + HEADER_BYTES
        return _shaped(self._memory[start : start + header.data_bytes], header)


def tensor_at(address: int, size_bytes: int) -> Tensor:
    """Tensor whose object lies at ``address``, in the caller's memory.

    Raises:
        ValueError: there is no tensor.
    """
    if not is_readable(address, max(1, size_bytes)):
        raise ValueError(f"{size_bytes} bytes at {address:#x} are not in main memory")
    header = decode(ctypes.string_at(address, min(HEADER_BYTES, size_bytes)), size_bytes)
    if not header.data_bytes:
        return _shaped(load_torch().empty(0, dtype=load_torch().uint8), header)
    memory = (ctypes.c_uint8 * header.data_bytes).from_address(address + HEADER_BYTES)
    return _shaped(load_torch().frombuffer(memory, dtype=load_torch().uint8), header)


def place(tensor: Tensor, header: TensorHeader, address: int, size_bytes: int) -> Tensor:
    """Write ``tensor`` as an object to ``address``; returns the tensor there.

    Raises:
        ValueError: ``size_bytes`` are not enough for it.
    """
    if not is_writable(address, max(1, size_bytes)):
        raise ValueError(f"{size_bytes} bytes at {address:#x} are not memory that can be written")
    if header.size_bytes > size_bytes:
        raise ValueError(f"a tensor of {header.size_bytes} bytes does not fit into {size_bytes}")
    ctypes.memmove(address, encode(header), HEADER_BYTES)
    there = tensor_at(address, size_bytes)
    return there.copy_(tensor)


def tensor_from(data: bytes | bytearray | memoryview) -> Tensor:
    """Make a new tensor from an object's bytes.

    Raises:
        ValueError: they are not a tensor.
    """
    fresh = FetchedObject(len(data))
    if data:
        ctypes.memmove(fresh.address, np.frombuffer(data, dtype=np.uint8).ctypes.data, len(data))
    return fresh.tensor()


def in_memory(tensor: Tensor) -> Tensor:
    """``tensor`` in main memory and contiguous; the tensor itself, if it already is.

    Raises:
        ValueError: it is not a dense tensor, or has no data.
    """
    torch = load_torch()
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or tensor.is_quantized:
        raise ValueError(f"{type(tensor).__name__} is not a dense torch.Tensor")
    if tensor.is_meta or tensor.is_nested:
        kind = "meta" if tensor.is_meta else "nested"
        raise ValueError(f"a {kind} tensor has no elements in one piece of memory")
    return tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()


def span_of(tensor: Tensor) -> tuple[int, int]:
    """Address and size of a tensor from ``in_memory``."""
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()


def header_of(tensor: Tensor) -> TensorHeader:
    """Header of a whole tensor.

    Raises:
        ValueError: the format does not have its type or shape.
    """
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype} cannot be stored; these can: {', '.join(DTYPES)}")
    return TensorHeader(dtype, tuple(tensor.shape), tuple(tensor.shape))


def empty(dtype: str, shape: tuple[int, ...]) -> Tensor:
    """New tensor.

    Raises:
        ValueError: this host does not have the memory.
    """
    try:
        return load_torch().empty(shape, dtype=getattr(load_torch(), dtype))
    except RuntimeError as error:
        raise ValueError(f"no memory for a tensor of {dtype} and {shape}: {error}") from error


def _shaped(memory: Tensor, header: TensorHeader) -> Tensor:
    dtype = getattr(load_torch(), header.dtype)
    if not header.data_bytes:
        return load_torch().empty(header.shape, dtype=dtype)
    return memory.view(dtype).view(header.shape)


def load_torch() -> Any:
    """The module ``torch``, imported with the first call that needs it."""
    return importlib.import_module("torch")

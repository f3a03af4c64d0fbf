# SPDX-License-Identifier: Apache-2.0
"""The calls that put and get torch's tensors, whole or as the parts of tensor parallel ranks.

A put sends the header and the elements from where they are, as one object of two spans; a get fetches the
object to fresh memory, or to memory of the caller, and returns the tensor that lies in it. The first of
these calls imports torch.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

from mooncake.compat.store.arguments import check_keys, numbers
from mooncake.compat.store.caller_memory import allocated
from mooncake.compat.store.error_codes import StoreCode
from mooncake.compat.store.get import ReadCalls
from mooncake.compat.store.public_types import ObjectDataType, ReplicateConfig
from mooncake.compat.store.put import WriteCalls
from mooncake.compat.store.range_reads import open_reads, read_parts
from mooncake.compat.store.store_session import StoreSession
from mooncake.compat.store.tensor_format import HEADER_BYTES, TensorHeader, decode, encode
from mooncake.compat.store.tensor_memory import (
    FetchedObject,
    Tensor,
    header_of,
    in_memory,
    span_of,
    tensor_at,
    tensor_from,
)
from mooncake.log import get_logger
from mooncake.transfer.memory import is_readable

log = get_logger("mooncake.store")

INVALID = int(StoreCode.INVALID_PARAMS)
ResultT = TypeVar("ResultT")
ArgumentsP = ParamSpec("ArgumentsP")


class TensorObject:
    """An object to be stored: its spans, with the memory behind them kept alive while it is sent."""

    __slots__ = ("_head", "_owner", "key", "spans")

    def __init__(
        self, key: str, head: bytes, elements: tuple[int, int] = (0, 0), owner: object = None
    ) -> None:
        self.key = key
        self._head = ctypes.create_string_buffer(head, len(head))
        self._owner = owner
        self.spans = [(ctypes.addressof(self._head), len(head))]
        if elements[1]:
            self.spans.append(elements)


def tensor_object(key: str, tensor: Tensor, header: TensorHeader | None = None) -> TensorObject:
    """Make the object ``key`` from ``tensor``; with ``header``, as the part that it describes.

    Raises:
        ValueError: not a tensor that can be stored.
    """
    held = in_memory(tensor)
    return TensorObject(key, encode(header_of(held) if header is None else header), span_of(held), held)


def _whole_object(key: str, tensor: Tensor) -> list[TensorObject]:
    return [tensor_object(key, tensor)]


class TensorCalls(ReadCalls, WriteCalls):
    """Tensors by their keys. A miss and any failure is None, or a code where numbers are returned."""

    # Whole tensors --------------------------------------------------------------------------------------

    def put_tensor(self, key: str, tensor: Tensor) -> int:
        """Store a tensor: 0, also when the key exists and is unchanged; -600 when it is not a tensor."""
        return self._put_tensors("put_tensor", [key], [tensor])[0]

    def batch_put_tensor(self, keys: Sequence[str], tensors_list: Sequence[Tensor]) -> list[int]:
        return self._put_tensors("batch_put_tensor", keys, tensors_list)

    def pub_tensor(self, key: str, tensor: Tensor, config: ReplicateConfig | None = None) -> int:
        """As ``put_tensor``, with a configuration for the object."""
        return self._put_tensors("pub_tensor", [key], [tensor], config)[0]

    def batch_pub_tensor(
        self, keys: Sequence[str], tensors_list: Sequence[Tensor], config: ReplicateConfig | None = None
    ) -> list[int]:
        return self._put_tensors("batch_pub_tensor", keys, tensors_list, config)

    def upsert_tensor(self, key: str, tensor: Tensor) -> int:
        """Create or replace; 0 or a code."""
        return self._put_tensors("upsert_tensor", [key], [tensor], replace=True)[0]

    def batch_upsert_tensor(self, keys: Sequence[str], tensors_list: Sequence[Tensor]) -> list[int]:
        return self._put_tensors("batch_upsert_tensor", keys, tensors_list, replace=True)

    def upsert_pub_tensor(self, key: str, tensor: Tensor, config: ReplicateConfig | None = None) -> int:
        return self._put_tensors("upsert_pub_tensor", [key], [tensor], config, replace=True)[0]

    def batch_upsert_pub_tensor(
        self, keys: Sequence[str], tensors_list: Sequence[Tensor], config: ReplicateConfig | None = None
    ) -> list[int]:
        return self._put_tensors("batch_upsert_pub_tensor", keys, tensors_list, config, replace=True)

    def get_tensor(self, key: str) -> Tensor | None:
        """A new tensor in main memory; None for a miss and for an object that is not a tensor."""
        return self._get_tensors("get_tensor", [key])[0]

    def batch_get_tensor(self, keys: Sequence[str]) -> list[Tensor | None]:
        return self._get_tensors("batch_get_tensor", keys)

    # Memory of the caller, which holds or receives the whole object --------------------------------------

    def put_tensor_from(self, key: str, buffer_ptr: int, size: int) -> int:
        """Store the object at ``buffer_ptr``, header first; -600 when it is not a tensor."""
        return self._put_from("put_tensor_from", [key], [buffer_ptr], [size])[0]

    def batch_put_tensor_from(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        return self._put_from("batch_put_tensor_from", keys, buffer_ptrs, sizes)

    def upsert_tensor_from(self, key: str, buffer_ptr: int, size: int) -> int:
        return self._put_from("upsert_tensor_from", [key], [buffer_ptr], [size], replace=True)[0]

    def batch_upsert_tensor_from(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        return self._put_from("batch_upsert_tensor_from", keys, buffer_ptrs, sizes, replace=True)

    def get_tensor_into(self, key: str, buffer_ptr: int, size: int) -> Tensor | None:
        """Fetch the object to ``buffer_ptr``; returns the tensor in that memory."""
        return self._get_into_memory("get_tensor_into", [key], [buffer_ptr], [size])[0]

    def batch_get_tensor_into(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[Any]:
        """As ``get_tensor_into`` of each; -600 for each key when the lists differ in length."""
        if not len(keys) == len(buffer_ptrs) == len(sizes):
            return [INVALID] * len(keys)
        return self._get_into_memory("batch_get_tensor_into", keys, buffer_ptrs, sizes)

    def get_tensor_into_cuda(self, key: str, tensor: Tensor) -> int:
        """Fill the contiguous ``tensor`` on any device; its bytes, -704, or -600 if shape or type differ."""
        return self.batch_get_tensor_into_cuda([key], [tensor])[0]

    def batch_get_tensor_into_cuda(self, keys: Sequence[str], tensors_list: Sequence[Tensor]) -> list[int]:
        if len(keys) != len(tensors_list):
            return [INVALID] * len(keys)
        found = self._get_tensors("batch_get_tensor_into_cuda", keys)
        return [_filled(target, source) for target, source in zip(tensors_list, found, strict=True)]

    # Implementation -------------------------------------------------------------------------------------

    def _put_tensors(
        self,
        what: str,
        keys: Sequence[str],
        tensors: Sequence[Tensor],
        config: ReplicateConfig | None = None,
        replace: bool = False,
    ) -> list[int]:
        keys = check_keys(what, keys)
        if len(keys) != len(tensors):
            return [INVALID] * len(keys)
        objects = [
            or_none(what, key, _whole_object, key, tensor) for key, tensor in zip(keys, tensors, strict=True)
        ]
        return self._put_objects(what, objects, config, replace)

    def _put_from(
        self,
        what: str,
        keys: Sequence[str],
        addresses: Sequence[int],
        sizes: Sequence[int],
        replace: bool = False,
    ) -> list[int]:
        keys, addresses = check_keys(what, keys), numbers(what, "buffer_ptrs", addresses)
        sizes = numbers(what, "sizes", sizes)
        if not len(keys) == len(addresses) == len(sizes):
            return [INVALID] * len(keys)
        results = [INVALID] * len(keys)
        held: list[tuple[int, list[tuple[int, int]]]] = []
        for number, (key, address, size) in enumerate(zip(keys, addresses, sizes, strict=True)):
            header = or_none(what, key, header_at, address, size)
            if header is not None:
                held.append((number, [(address, header.size_bytes)]))
        spans = [spans for _, spans in held]
        codes = self._put(what, [keys[i] for i, _ in held], spans, tensor_config(None), replace=replace)
        for (number, _), code in zip(held, codes, strict=True):
            results[number] = code
        return results

    def _put_objects(
        self,
        what: str,
        objects: Sequence[Sequence[TensorObject] | None],
        config: ReplicateConfig | None,
        replace: bool,
    ) -> list[int]:
        """Store tensors of several objects each; a tensor's code is its objects' first that is not 0."""
        every = [entry for several in objects if several is not None for entry in several]
        put_config = config_per_object(tensor_config(config), [len(several or ()) for several in objects])
        if put_config is None:
            return [INVALID] * len(objects)
        spans = [entry.spans for entry in every]
        codes = iter(self._put(what, [entry.key for entry in every], spans, put_config, replace=replace))
        results: list[int] = []
        for several in objects:
            of_tensor = [next(codes) for _ in several or ()]
            results.append(INVALID if several is None else next((code for code in of_tensor if code), 0))
        return results

    def _get_tensors(self, what: str, keys: Sequence[str]) -> list[Tensor | None]:
        keys = check_keys(what, keys)
        fetched = self._fetch(what, keys)
        return [
            None if fresh is None else or_none(what, key, fresh.tensor)
            for key, fresh in zip(keys, fetched, strict=True)
        ]

    def _fetch(self, what: str, keys: Sequence[str]) -> list[FetchedObject | None]:
        """Fetch whole objects to fresh memory; None for each miss."""

        def act(session: StoreSession) -> list[FetchedObject | None]:
            found = open_reads(session, keys)
            fetched = [
                None if grant is None else allocated(what, grant.size_bytes, FetchedObject) for grant in found
            ]
            present = [(g, f) for g, f in zip(found, fetched, strict=True) if g is not None and f is not None]
            parts = [[(0, fresh.address, fresh.size_bytes)] for _, fresh in present]
            good = iter(read_parts(session, [grant for grant, _ in present], parts))
            read = [fresh if fresh is not None and next(good) else None for fresh in fetched]
            session.client_metrics.count_bytes("read", sum(fresh.size_bytes for fresh in read if fresh))
            return read

        return self._in_session(what, act, lambda _: [None] * len(keys))

    def _get_into_memory(
        self, what: str, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]
    ) -> list[Tensor | None]:
        keys, addresses = check_keys(what, keys), numbers(what, "buffer_ptrs", addresses)
        sizes = numbers(what, "sizes", sizes)
        parts = [[(address, size)] for address, size in zip(addresses, sizes, strict=True)]
        arrived = self._get_into(what, keys, parts)
        return [
            or_none(what, key, tensor_at, address, size) if size > 0 else None
            for key, address, size in zip(keys, addresses, arrived, strict=True)
        ]


def or_none(
    what: str,
    key: str,
    make: Callable[ArgumentsP, ResultT],
    *args: ArgumentsP.args,
    **kwargs: ArgumentsP.kwargs,
) -> ResultT | None:
    """Result of ``make``; None, with a log line, when it raises because of something that is not a tensor."""
    try:
        return make(*args, **kwargs)
    except ValueError as error:
        log.error(f"{what} of {key!r}: {error}")
        return None


def header_at(address: int, size_bytes: int) -> TensorHeader:
    """Header of the object at ``address``.

    Raises:
        ValueError: it is not a tensor.
    """
    if size_bytes < HEADER_BYTES or not is_readable(address, size_bytes):
        raise ValueError(f"{size_bytes} bytes at {address:#x} are no tensor")
    return decode(ctypes.string_at(address, HEADER_BYTES), size_bytes)


def tensor_config(config: ReplicateConfig | None) -> ReplicateConfig:
    """``config``, or the default one for tensors."""
    if config is None:
        config = ReplicateConfig()
        config.data_type = ObjectDataType.TENSOR
    return config


def config_per_object(config: ReplicateConfig, num_objects: Sequence[int]) -> ReplicateConfig | None:
    """``config`` for tensors of several objects each, which share their tensor's group.

    None when the number of groups is not that of the tensors.
    """
    if config.group_ids is None:
        return config
    if len(config.group_ids) != len(num_objects):
        return None
    own = copy.copy(config)
    own.group_ids = [
        group for group, count in zip(config.group_ids, num_objects, strict=True) for _ in range(count)
    ]
    return own


def _filled(target: Tensor, source: Tensor | None) -> int:
    if source is None:
        return int(StoreCode.OBJECT_NOT_FOUND)
    if getattr(target, "dtype", None) != source.dtype or target.shape != source.shape:
        return INVALID
    if not target.is_contiguous():
        return INVALID
    target.copy_(source)
    return int(source.numel() * source.element_size())


# Functions of the existing package's module --------------------------------------------------------------


def _serialize_tensor(tensor: Tensor) -> tuple[bytes, int, int, Tensor]:
    """Tuple of header, address of the elements, their size and the object that keeps them alive.

    Raises:
        ValueError: not a tensor that can be stored.
    """
    held = in_memory(tensor)
    address, num_bytes = span_of(held)
    return encode(header_of(held)), address, num_bytes, held


def _deserialize_tensor(data: bytes) -> Tensor:
    """Make a tensor from an object's bytes.

    Raises:
        ValueError: the bytes are not a tensor.
    """
    return tensor_from(data)


def _tensor_metadata_size() -> int:
    return HEADER_BYTES

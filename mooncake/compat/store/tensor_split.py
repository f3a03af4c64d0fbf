# SPDX-License-Identifier: Apache-2.0
"""Makes the objects of ranks or writers from a whole tensor, or from the part that a rank has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mooncake.compat.store.arguments import check_keys, numbers
from mooncake.compat.store.parallelism import (
    axes_of,
    group_key,
    parallelism_manifest_key,
    part_key,
    shard_header,
    tp_axes,
    writer_cut,
    writer_key,
    writer_manifest_key,
)
from mooncake.compat.store.partition import all_cuts, axes_with, box_of, cuts_of, slices_of
from mooncake.compat.store.public_types import ReplicateConfig
from mooncake.compat.store.tensor_format import Axis, AxisKind, TensorHeader, TensorManifest, encode_manifest
from mooncake.compat.store.tensor_memory import Tensor, header_of, in_memory, tensor_at
from mooncake.compat.store.tensors import (
    INVALID,
    TensorCalls,
    TensorObject,
    header_at,
    or_none,
    tensor_object,
)


class TensorSplitCalls(TensorCalls):
    def _put_tp(
        self,
        what: str,
        keys: Sequence[str],
        tensors: Sequence[Tensor],
        config: ReplicateConfig | None,
        size: int,
        split_dim: int,
    ) -> list[int]:
        keys = check_keys(what, keys)
        if len(keys) != len(tensors):
            return [INVALID] * len(keys)
        objects = [
            or_none(what, key, split_tensor, key, tensor, tp_axes(size, split_dim))
            for key, tensor in zip(keys, tensors, strict=True)
        ]
        return self._put_objects(what, objects, config, False)

    def _put_parallel(
        self,
        what: str,
        keys: Sequence[str],
        tensors: Sequence[Tensor],
        parallelisms: Any,
        config: ReplicateConfig | None,
        partitions: Any,
        replace: bool = False,
        is_from: bool = False,
    ) -> list[int]:
        keys = check_keys(what, keys)
        ways, writers = per_key(parallelisms, len(keys)), per_key(partitions, len(keys))
        if not len(keys) == len(tensors) == len(ways) == len(writers):
            return [INVALID] * len(keys)
        objects = [
            or_none(what, key, _parts_of, key, tensor, way, writer, is_from)
            for key, tensor, way, writer in zip(keys, tensors, ways, writers, strict=True)
        ]
        return self._put_objects(what, objects, config, replace)


def per_key(values: Any, num_keys: int) -> list[Any]:
    """A list unchanged; a single value, or None, repeated for every key."""
    return list(values) if isinstance(values, list | tuple) else [values] * num_keys


def tensors_at(
    what: str, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]
) -> list[Tensor | None]:
    """Tensors whose objects lie at ``addresses``; None where there is none."""
    addresses, sizes = numbers(what, "buffer_ptrs", addresses), numbers(what, "sizes", sizes)
    if not len(keys) == len(addresses) == len(sizes):
        return []

    def look(address: int, size_bytes: int) -> Tensor:
        header_at(address, size_bytes)
        return tensor_at(address, size_bytes)

    return [
        or_none(what, key, look, address, size)
        for key, address, size in zip(keys, addresses, sizes, strict=True)
    ]


def split_tensor(key: str, tensor: Tensor, axes: Sequence[Axis]) -> list[TensorObject]:
    """Split ``tensor`` into all the parts that ``axes`` describe.

    Raises:
        ValueError: an invalid tensor, rank or dimension.
    """
    held = in_memory(tensor)
    whole = header_of(held)
    return [
        _part(part_key(key, own), held, whole, own)
        for cuts in all_cuts(cuts_of(axes))
        for own in [axes_with(axes, cuts, whole.shape)]
    ]


def _parts_of(
    key: str, tensor: Tensor, parallelism: Any, partition: Any, is_from: bool
) -> list[TensorObject]:
    """Objects of one put.

    What the tensor is follows the existing package: with tensor parallelism alone, the part of that rank;
    with other axes besides, the whole, of which this rank's part is stored; in the caller's memory
    (``is_from``), the whole, of which all parts are stored.
    """
    if partition is not None:
        if parallelism is not None:
            raise ValueError("a writer_partition excludes a parallelism")
        return _of_writer(key, in_memory(tensor), partition)
    axes, held = axes_of(parallelism), in_memory(tensor)
    given = header_of(held)
    if not cuts_of(axes):
        return split_tensor(key, held, axes)
    if is_from:
        whole, parts = given, split_tensor(key, held, axes)
    elif len(axes) == 1:
        whole = _whole_of(given, axes)
        parts = [tensor_object(part_key(key, axes), held, shard_header(whole, axes))]
    else:
        whole, parts = given, [_part(part_key(key, axes), held, given, axes)]
    cut = cuts_of(axes)[0]
    manifest = TensorManifest(whole.dtype, whole.shape, cut.dim, cut.count)
    name = parallelism_manifest_key(group_key(key, axes))
    return [*parts, TensorObject(name, encode_manifest(manifest))]


def _whole_of(part: TensorHeader, axes: Sequence[Axis]) -> TensorHeader:
    """Header of the tensor of which each rank has a part like this one.

    Raises:
        ValueError: there is no such dimension.
    """
    shape = list(part.shape)
    for cut in cuts_of(axes):
        if not 0 <= cut.dim < len(shape):
            raise ValueError(f"split_dim {cut.dim}: the tensor has {len(shape)} dimensions")
        shape[cut.dim] *= cut.count
    return TensorHeader(part.dtype, tuple(shape), tuple(shape))


def _of_writer(key: str, held: Tensor, partition: Any) -> list[TensorObject]:
    whole = header_of(held)
    cut = writer_cut(partition, len(whole.shape))
    manifest = TensorManifest(whole.dtype, whole.shape, cut.dim, cut.count)
    own = axes_with([Axis(AxisKind.TP, cut.rank, cut.count, cut.dim)], [cut], whole.shape)
    return [
        _part(writer_key(key, cut), held, whole, own),
        TensorObject(writer_manifest_key(key), encode_manifest(manifest)),
    ]


def _part(key: str, held: Tensor, whole: TensorHeader, axes: Sequence[Axis]) -> TensorObject:
    box = box_of(whole.shape, cuts_of(axes))
    return tensor_object(key, held[slices_of(box)], shard_header(whole, axes))

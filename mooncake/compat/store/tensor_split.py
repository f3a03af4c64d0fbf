# SPDX-License-Identifier: Apache-2.0
"""Splits a whole tensor into the objects of its ranks or writers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
from mooncake.compat.store.partition import Cut, all_cuts, axes_with, box_of, cuts_of, slices_of
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
        rank: int,
        size: int,
        split_dim: int,
    ) -> list[int]:
        if len(keys) != len(tensors):
            return [INVALID] * len(keys)
        objects = [
            or_none(what, key, _for_tp, key, tensor, rank, size, split_dim)
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
    ) -> list[int]:
        ways, writers = per_key(parallelisms, len(keys)), per_key(partitions, len(keys))
        if not len(keys) == len(tensors) == len(ways) == len(writers):
            return [INVALID] * len(keys)
        objects = [
            or_none(what, key, _parts_of, key, tensor, way, writer)
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


def _for_tp(key: str, tensor: Tensor, rank: int, size: int, split_dim: int) -> list[TensorObject]:
    return split_tensor(key, tensor, tp_axes(rank, size, split_dim))


def _parts_of(key: str, tensor: Tensor, parallelism: Any, partition: Any) -> list[TensorObject]:
    if partition is not None:
        if parallelism is not None:
            raise ValueError("a writer_partition excludes a parallelism")
        return _of_writer(key, in_memory(tensor), partition)
    axes = axes_of(parallelism)
    parts = split_tensor(key, tensor, axes)
    if cuts_of(axes):
        parts.append(TensorObject(parallelism_manifest_key(group_key(key, axes)), _manifest(tensor, axes)))
    return parts


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


def _manifest(tensor: Tensor, axes: Sequence[Axis]) -> bytes:
    whole = header_of(tensor)
    cuts: list[Cut] = cuts_of(axes)
    own = axes_with(axes, cuts, whole.shape)
    first = cuts_of(own)[0]
    return encode_manifest(TensorManifest(whole.dtype, whole.shape, first.dim, first.count, own))

"""How a whole tensor becomes the objects of its ranks or writers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mooncake.store.compat.parallelism import (
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
from mooncake.store.compat.partition import Cut, all_cuts, axes_with, box_of, cuts_of, slices_of
from mooncake.store.compat.tensor_memory import Tensor, header_of, in_memory, tensor_at
from mooncake.store.compat.tensors import INVALID, Stowed, TensorCalls, checked, header_at, stow
from mooncake.store.compat.tensorwire import Axis, AxisKind, Header, Manifest, encode_manifest
from mooncake.store.compat.values import ReplicateConfig


class DividingCalls(TensorCalls):
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
        stows = [
            checked(what, key, _for_tp, key, tensor, rank, size, split_dim)
            for key, tensor in zip(keys, tensors, strict=True)
        ]
        return self._put_stowed(what, stows, config, False)

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
        stows = [
            checked(what, key, _parts_of, key, tensor, way, writer)
            for key, tensor, way, writer in zip(keys, tensors, ways, writers, strict=True)
        ]
        return self._put_stowed(what, stows, config, replace)


def per_key(values: Any, num_keys: int) -> list[Any]:
    """A list as it is; one value, or None, for every key."""
    return list(values) if isinstance(values, list | tuple) else [values] * num_keys


def tensors_at(
    what: str, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]
) -> list[Tensor | None]:
    """The tensors whose objects lie at ``addresses``; None where there is none."""
    if not len(keys) == len(addresses) == len(sizes):
        return []

    def look(address: int, size_bytes: int) -> Tensor:
        header_at(address, size_bytes)
        return tensor_at(address, size_bytes)

    return [
        checked(what, key, look, address, size)
        for key, address, size in zip(keys, addresses, sizes, strict=True)
    ]


def divided(key: str, tensor: Tensor, axes: Sequence[Axis]) -> list[Stowed]:
    """``tensor`` in all the parts that ``axes`` make of it.

    Raises:
        ValueError: no such tensor, rank or dimension.
    """
    held = in_memory(tensor)
    whole = header_of(held)
    return [
        _part(part_key(key, own), held, whole, own)
        for cuts in all_cuts(cuts_of(axes))
        for own in [axes_with(axes, cuts, whole.shape)]
    ]


def _for_tp(key: str, tensor: Tensor, rank: int, size: int, split_dim: int) -> list[Stowed]:
    return divided(key, tensor, tp_axes(rank, size, split_dim))


def _parts_of(key: str, tensor: Tensor, parallelism: Any, partition: Any) -> list[Stowed]:
    if partition is not None:
        if parallelism is not None:
            raise ValueError("a writer_partition excludes a parallelism")
        return _of_writer(key, in_memory(tensor), partition)
    axes = axes_of(parallelism)
    parts = divided(key, tensor, axes)
    if cuts_of(axes):
        parts.append(Stowed(parallelism_manifest_key(group_key(key, axes)), _manifest(tensor, axes)))
    return parts


def _of_writer(key: str, held: Tensor, partition: Any) -> list[Stowed]:
    whole = header_of(held)
    cut = writer_cut(partition, len(whole.shape))
    manifest = Manifest(whole.dtype, whole.shape, cut.dim, cut.count)
    own = axes_with([Axis(AxisKind.TP, cut.rank, cut.count, cut.dim)], [cut], whole.shape)
    return [
        _part(writer_key(key, cut), held, whole, own),
        Stowed(writer_manifest_key(key), encode_manifest(manifest)),
    ]


def _part(key: str, held: Tensor, whole: Header, axes: Sequence[Axis]) -> Stowed:
    box = box_of(whole.shape, cuts_of(axes))
    return stow(key, held[slices_of(box)], shard_header(whole, axes))


def _manifest(tensor: Tensor, axes: Sequence[Axis]) -> bytes:
    whole = header_of(tensor)
    cuts: list[Cut] = cuts_of(axes)
    own = axes_with(axes, cuts, whole.shape)
    first = cuts_of(own)[0]
    return encode_manifest(Manifest(whole.dtype, whole.shape, first.dim, first.count, own))

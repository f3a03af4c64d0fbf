# SPDX-License-Identifier: Apache-2.0
"""Assembles the part of a tensor that a reader wants from the parts that were stored.

Looks first for exactly this part, then for the other layouts under the key: the whole tensor, the parts
of writers, the parts of other ranks. Fetches only what the wanted part needs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from math import prod
from typing import Any, TypeAlias

import numpy as np

from mooncake.compat.store.arguments import check_keys, numbers
from mooncake.compat.store.parallelism import (
    ReadTarget,
    axes_of,
    group_key,
    parallelism_manifest_key,
    part_key,
    writer_key,
    writer_manifest_key,
)
from mooncake.compat.store.partition import (
    Box,
    BoxOverlap,
    Cut,
    all_cuts,
    axes_with,
    box_of,
    cuts_of,
    num_runs,
    plan_overlaps,
    runs,
    shape_of,
    slices_of,
)
from mooncake.compat.store.range_reads import open_reads, read_parts
from mooncake.compat.store.read_plan import Part
from mooncake.compat.store.store_session import StoreSession
from mooncake.compat.store.tensor_format import (
    HEADER_BYTES,
    MAX_PARTS,
    Axis,
    AxisKind,
    TensorHeader,
    TensorManifest,
    decode,
    decode_manifest,
)
from mooncake.compat.store.tensor_memory import FetchedObject, Tensor, empty, place, span_of
from mooncake.compat.store.tensor_split import per_key
from mooncake.compat.store.tensors import TensorCalls, header_at, or_none
from mooncake.store.client.grants import ReadGrant

Shape: TypeAlias = tuple[int, ...]

MAX_RUNS = 4096
"""Most runs to read one by one; beyond that, whole stored parts are read."""


@dataclasses.dataclass(frozen=True, slots=True)
class WantedShard:
    """Part that a reader wants of one key."""

    key: str
    mode: str
    axes: tuple[Axis, ...]

    @property
    def exact_key(self) -> str:
        """Key of the part, if it was stored in exactly this form."""
        return group_key(self.key, self.axes) if self.mode == "full" else part_key(self.key, self.axes)

    def cuts(self) -> list[Cut]:
        return [] if self.mode == "full" else cuts_of(self.axes)

    def is_met_by(self, header: TensorHeader) -> bool:
        """Whether that object is the wanted part."""
        if self.mode == "as_stored":
            return True
        cuts = self.cuts()
        if not cuts:
            return not header.is_shard
        return cuts_of(header.axes) == cuts


@dataclasses.dataclass(frozen=True, slots=True)
class TensorWithHeader:
    """A tensor with the header that describes it."""

    header: TensorHeader
    tensor: Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class StoredLayout:
    """One way in which a tensor was stored: the keys and boxes of its parts."""

    dtype: str
    shape: tuple[int, ...]
    keys: list[str]
    boxes: list[Box]


class TensorGatherCalls(TensorCalls):
    def _read_parallel(self, what: str, keys: Sequence[str], targets: Any) -> list[TensorWithHeader | None]:
        return self._read_wanted(what, _wanted_shards(what, check_keys(what, keys), targets))

    def _read_wanted(self, what: str, shards: Sequence[WantedShard | None]) -> list[TensorWithHeader | None]:
        fetched = self._fetch(what, ["" if wanted is None else wanted.exact_key for wanted in shards])
        results: list[TensorWithHeader | None] = []
        for wanted, fresh in zip(shards, fetched, strict=True):
            found = None if wanted is None or fresh is None else _with_header(what, wanted.key, fresh)
            if wanted is not None and (found is None or not wanted.is_met_by(found.header)):
                found = self._assemble(what, wanted) if wanted.mode != "as_stored" else None
            results.append(found)
        return results

    def _read_parallel_into(
        self,
        what: str,
        keys: Sequence[str],
        addresses: Sequence[int],
        sizes: Sequence[int],
        targets: Any,
    ) -> list[Any]:
        """Read parts stored in exactly this form to the caller's memory; assemble and copy the others."""
        addresses, sizes = numbers(what, "buffer_ptrs", addresses), numbers(what, "sizes", sizes)
        shards = _wanted_shards(what, check_keys(what, keys), targets)
        exact = ["" if wanted is None else wanted.exact_key for wanted in shards]
        results = self._get_into_memory(what, exact, addresses, sizes)
        for number, (wanted, tensor) in enumerate(zip(shards, results, strict=True)):
            address, size = addresses[number], sizes[number]
            if wanted is None or (tensor is not None and wanted.is_met_by(header_at(address, size))):
                continue
            found = self._read_parallel(
                what, [wanted.key], per_key(targets, len(shards))[number : number + 1]
            )[0]
            results[number] = None
            if found is not None:
                results[number] = or_none(what, wanted.key, place, found.tensor, found.header, address, size)
        return results

    def _assemble(self, what: str, wanted: WantedShard) -> TensorWithHeader | None:
        base = group_key(wanted.key, wanted.axes)
        others = tuple(axis for axis in wanted.axes if axis.kind != AxisKind.TP)
        divided = [axis for axis in wanted.axes if axis.kind == AxisKind.TP] or [Axis(AxisKind.TP, 0, 1)]
        first_key = part_key(wanted.key, (*others, dataclasses.replace(divided[0], rank=0)))
        whole, first = self._read_headers(what, [base, first_key])
        manifests = [writer_manifest_key(wanted.key), parallelism_manifest_key(base)]
        of_writers, of_ranks = map(_manifest, self._fetch(what, manifests))
        layouts: list[StoredLayout] = []
        if whole is not None and not whole.is_shard:
            layouts.append(StoredLayout(whole.dtype, whole.shape, [base], [box_of(whole.shape, [])]))
        if of_writers is not None:
            layouts += _layout_of_writers(wanted.key, of_writers)
        if of_ranks is not None:
            axes = (*others, Axis(AxisKind.TP, 0, of_ranks.count, of_ranks.split_dim))
            layouts += _layout_of_axes(wanted.key, of_ranks.dtype, of_ranks.shape, axes)
        if first is not None and first.is_shard:
            layouts += _layout_of_axes(wanted.key, first.dtype, first.global_shape, first.axes)
        for layout in layouts:
            found = self._from_layout(what, wanted, layout)
            if found is not None:
                return found
        return None

    def _from_layout(self, what: str, wanted: WantedShard, layout: StoredLayout) -> TensorWithHeader | None:
        """Assemble from one layout; None when some of it is missing or does not match."""
        box = or_none(what, wanted.key, box_of, layout.shape, wanted.cuts())
        pieces = None if box is None else plan_overlaps(box, layout.boxes)
        if box is None or pieces is None:
            return None
        axes = axes_with(wanted.axes, wanted.cuts(), layout.shape) if wanted.cuts() else ()
        header = TensorHeader(layout.dtype, shape_of(box), layout.shape, axes)
        tensor = or_none(what, wanted.key, empty, layout.dtype, header.shape)
        if tensor is None:
            return None
        shapes = [shape_of(layout.boxes[piece.number]) for piece in pieces]
        count = sum(
            max(num_runs(shape, piece.source), num_runs(header.shape, piece.target))
            for shape, piece in zip(shapes, pieces, strict=True)
        )
        fill = self._fill_by_runs if count <= MAX_RUNS else self._fill_by_parts
        return TensorWithHeader(header, tensor) if fill(what, layout, pieces, shapes, tensor) else None

    def _fill_by_runs(
        self,
        what: str,
        layout: StoredLayout,
        pieces: Sequence[BoxOverlap],
        shapes: Sequence[tuple[int, ...]],
        tensor: Tensor,
    ) -> bool:
        """Read only the wanted elements, each run to its place."""
        item = tensor.element_size()
        start, _ = span_of(tensor)
        parts: list[list[Part]] = []
        for piece, shape in zip(pieces, shapes, strict=True):
            found = runs(shape, piece.source, tensor.shape, piece.target)
            parts.append([(HEADER_BYTES + a * item, start + b * item, n * item) for a, b, n in found])
        keys = [layout.keys[piece.number] for piece in pieces]
        headers = self._read_headers(what, keys, parts)
        return all(
            header is not None and header.shape == shape and header.dtype == layout.dtype
            for header, shape in zip(headers, shapes, strict=True)
        )

    def _fill_by_parts(
        self,
        what: str,
        layout: StoredLayout,
        pieces: Sequence[BoxOverlap],
        shapes: Sequence[tuple[int, ...]],
        tensor: Tensor,
    ) -> bool:
        """Read stored parts whole and copy from them, because the wanted runs are too many."""
        keys = [layout.keys[piece.number] for piece in pieces]
        for key, piece, shape, fresh in zip(keys, pieces, shapes, self._fetch(what, keys), strict=True):
            part = None if fresh is None else _with_header(what, key, fresh)
            if part is None or part.header.shape != shape or part.header.dtype != layout.dtype:
                return False
            tensor[slices_of(piece.target)].copy_(part.tensor[slices_of(piece.source)])
        return True

    def _read_headers(
        self, what: str, keys: Sequence[str], parts: Sequence[Sequence[Part]] | None = None
    ) -> list[TensorHeader | None]:
        """Read the header of each object, and with ``parts`` those ranges of it, too."""

        def act(session: StoreSession) -> list[TensorHeader | None]:
            heads = np.empty((len(keys), HEADER_BYTES), dtype=np.uint8)
            rows: list[list[Part]] = []
            grants: list[ReadGrant | None] = []
            for number, grant in enumerate(open_reads(session, keys)):
                row: list[Part] = [(0, int(heads[number].ctypes.data), HEADER_BYTES)]
                row += () if parts is None else parts[number]
                rows.append(row)
                is_there = grant is not None and max(a + n for a, _, n in row) <= grant.size_bytes
                grants.append(grant if is_there else None)
            held = [(grant, row) for grant, row in zip(grants, rows, strict=True) if grant is not None]
            good = iter(read_parts(session, [grant for grant, _ in held], [row for _, row in held]))
            return [
                or_none(what, key, decode, head.tobytes(), grant.size_bytes)
                if grant is not None and next(good)
                else None
                for key, head, grant in zip(keys, heads, grants, strict=True)
            ]

        return self._in_session(what, act, lambda _: [None] * len(keys))


def _wanted_shards(what: str, keys: Sequence[str], targets: Any) -> list[WantedShard | None]:
    wanted = per_key(targets, len(keys))
    if len(wanted) != len(keys):
        return [None] * len(keys)
    return [or_none(what, key, _wanted_shard, key, target) for key, target in zip(keys, wanted, strict=True)]


def _wanted_shard(key: str, target: Any) -> WantedShard:
    if target is None:
        return WantedShard(key, "full", ())
    try:
        checked = ReadTarget(target.mode, target.parallelism)
    except (AttributeError, RuntimeError):
        raise ValueError(f"target {target!r}: a ReadTarget") from None
    axes = axes_of(checked.parallelism)
    if checked.mode == "shard" and not axes:
        raise ValueError("a shard is named by a parallelism")
    return WantedShard(key, checked.mode, axes)


def _with_header(what: str, key: str, fresh: FetchedObject) -> TensorWithHeader | None:
    header, tensor = or_none(what, key, fresh.header), or_none(what, key, fresh.tensor)
    return None if header is None else TensorWithHeader(header, tensor)


def _manifest(fresh: FetchedObject | None) -> TensorManifest | None:
    try:
        return None if fresh is None else decode_manifest(fresh.content())
    except ValueError:
        return None


def _layout_of_writers(key: str, manifest: TensorManifest) -> list[StoredLayout]:
    cuts = [Cut(rank, manifest.count, manifest.split_dim) for rank in range(manifest.count)]
    try:
        boxes = [box_of(manifest.shape, [cut]) for cut in cuts]
    except ValueError:
        return []  # no writer stores such a manifest
    return [StoredLayout(manifest.dtype, manifest.shape, [writer_key(key, cut) for cut in cuts], boxes)]


def _layout_of_axes(key: str, dtype: str, shape: tuple[int, ...], axes: Sequence[Axis]) -> list[StoredLayout]:
    if prod(axis.count for axis in axes if axis.kind == AxisKind.TP) > MAX_PARTS:
        return []  # a header may claim any number of ranks
    try:
        every = [axes_with(axes, cuts, shape) for cuts in all_cuts(cuts_of(axes))]
        boxes = [box_of(shape, cuts_of(own)) for own in every]
    except ValueError:
        return []  # no rank stores such a header or manifest
    return [StoredLayout(dtype, shape, [part_key(key, own) for own in every], boxes)]

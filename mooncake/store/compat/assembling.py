"""How the part that a reader wants comes out of the parts that were stored.

First where exactly this part would be. Then whatever else there is under the key: the whole tensor, what
writers contributed, the parts of other ranks. Only what the wanted part needs is fetched.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from mooncake.store.compat.arguments import check_keys
from mooncake.store.compat.dividing import per_key
from mooncake.store.compat.parallelism import (
    ReadTarget,
    axes_of,
    group_key,
    parallelism_manifest_key,
    part_key,
    tp_key,
    writer_key,
    writer_manifest_key,
)
from mooncake.store.compat.partial import open_reads, read_parts
from mooncake.store.compat.partition import (
    Box,
    Cut,
    Piece,
    all_cuts,
    axes_with,
    box_of,
    cuts_of,
    num_runs,
    plan,
    runs,
    shape_of,
    slices_of,
)
from mooncake.store.compat.ranges import Part
from mooncake.store.compat.session import Session
from mooncake.store.compat.tensor_memory import Fresh, Tensor, empty, place, span_of
from mooncake.store.compat.tensors import TensorCalls, checked, header_at
from mooncake.store.compat.tensorwire import HEADER_BYTES, Axis, Header, Manifest, decode, decode_manifest
from mooncake.store.grants import ReadGrant

Shape: TypeAlias = tuple[int, ...]

MAX_RUNS = 4096
"""In more bits than this nothing is read: then whole parts are."""


@dataclasses.dataclass(frozen=True, slots=True)
class Wish:
    """What one reader wants of one key."""

    key: str
    mode: str
    axes: tuple[Axis, ...]

    @property
    def exact_key(self) -> str:
        """Where it is, if it was stored just so."""
        return group_key(self.key, self.axes) if self.mode == "full" else part_key(self.key, self.axes)

    def cuts(self) -> list[Cut]:
        return [] if self.mode == "full" else cuts_of(self.axes)

    def is_met_by(self, header: Header) -> bool:
        """That object is what is wanted."""
        if self.mode == "as_stored":
            return True
        cuts = self.cuts()
        if not cuts:
            return not header.is_shard
        ndim = len(header.shape)
        return cuts_of(header.axes) == [Cut(cut.rank, cut.count, cut.dim % max(1, ndim)) for cut in cuts]


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """A tensor, and what it is of what."""

    header: Header
    tensor: Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Stock:
    """One way in which a tensor was stored: where its parts are."""

    dtype: str
    shape: tuple[int, ...]
    keys: list[str]
    boxes: list[Box]


class AssemblingCalls(TensorCalls):
    def _read_parallel(self, what: str, keys: Sequence[str], targets: Any) -> list[Found | None]:
        return self._read_wishes(what, _wishes(what, check_keys(what, keys), targets))

    def _read_wishes(self, what: str, wishes: Sequence[Wish | None]) -> list[Found | None]:
        fetched = self._fetch(what, ["" if wish is None else wish.exact_key for wish in wishes])
        results: list[Found | None] = []
        for wish, fresh in zip(wishes, fetched, strict=True):
            found = None if wish is None or fresh is None else _found(what, wish.key, fresh)
            if wish is not None and (found is None or not wish.is_met_by(found.header)):
                found = self._assemble(what, wish) if wish.mode != "as_stored" else None
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
        """Straight to the caller's memory what was stored just so; the rest is assembled and copied there."""
        wishes = _wishes(what, check_keys(what, keys), targets)
        exact = ["" if wish is None else wish.exact_key for wish in wishes]
        results = self._get_into_memory(what, exact, addresses, sizes)
        for number, (wish, tensor) in enumerate(zip(wishes, results, strict=True)):
            address, size = addresses[number], sizes[number]
            if wish is None or (tensor is not None and wish.is_met_by(header_at(address, size))):
                continue
            found = self._read_parallel(what, [wish.key], per_key(targets, len(wishes))[number : number + 1])[
                0
            ]
            results[number] = None
            if found is not None:
                results[number] = checked(what, wish.key, place, found.tensor, found.header, address, size)
        return results

    def _assemble(self, what: str, wish: Wish) -> Found | None:
        base = group_key(wish.key, wish.axes)
        whole, first = self._read_headers(what, [base, tp_key(base, 0, 2)])
        manifests = [writer_manifest_key(wish.key), parallelism_manifest_key(base)]
        of_writers, of_ranks = map(_manifest, self._fetch(what, manifests))
        stocks: list[Stock] = []
        if whole is not None and not whole.is_shard:
            stocks.append(Stock(whole.dtype, whole.shape, [base], [box_of(whole.shape, [])]))
        if of_writers is not None:
            stocks.append(_stock_of_writers(wish.key, of_writers))
        if of_ranks is not None:
            stocks.append(_stock_of_axes(wish.key, of_ranks.dtype, of_ranks.shape, of_ranks.axes))
        if first is not None and first.is_shard:
            stocks.append(_stock_of_axes(wish.key, first.dtype, first.global_shape, first.axes))
        for stock in stocks:
            found = self._from_stock(what, wish, stock)
            if found is not None:
                return found
        return None

    def _from_stock(self, what: str, wish: Wish, stock: Stock) -> Found | None:
        """None: some of it is not there, or is not what it should be."""
        box = checked(what, wish.key, box_of, stock.shape, wish.cuts())
        pieces = None if box is None else plan(box, stock.boxes)
        if box is None or pieces is None:
            return None
        axes = axes_with(wish.axes, wish.cuts(), stock.shape) if wish.cuts() else ()
        header = Header(stock.dtype, shape_of(box), stock.shape, axes)
        tensor = empty(stock.dtype, header.shape)
        shapes = [shape_of(stock.boxes[piece.number]) for piece in pieces]
        count = sum(
            max(num_runs(shape, piece.source), num_runs(header.shape, piece.target))
            for shape, piece in zip(shapes, pieces, strict=True)
        )
        fill = self._fill_by_runs if count <= MAX_RUNS else self._fill_by_parts
        return Found(header, tensor) if fill(what, stock, pieces, shapes, tensor) else None

    def _fill_by_runs(
        self,
        what: str,
        stock: Stock,
        pieces: Sequence[Piece],
        shapes: Sequence[tuple[int, ...]],
        tensor: Tensor,
    ) -> bool:
        """Only what is wanted is read, straight to its place."""
        item = tensor.element_size()
        start, _ = span_of(tensor)
        parts: list[list[Part]] = []
        for piece, shape in zip(pieces, shapes, strict=True):
            found = runs(shape, piece.source, tensor.shape, piece.target)
            parts.append([(HEADER_BYTES + a * item, start + b * item, n * item) for a, b, n in found])
        keys = [stock.keys[piece.number] for piece in pieces]
        headers = self._read_headers(what, keys, parts)
        return all(
            header is not None and header.shape == shape and header.dtype == stock.dtype
            for header, shape in zip(headers, shapes, strict=True)
        )

    def _fill_by_parts(
        self,
        what: str,
        stock: Stock,
        pieces: Sequence[Piece],
        shapes: Sequence[tuple[int, ...]],
        tensor: Tensor,
    ) -> bool:
        """Stored parts are read whole and copied from, because what is wanted of them is in tiny bits."""
        keys = [stock.keys[piece.number] for piece in pieces]
        for key, piece, shape, fresh in zip(keys, pieces, shapes, self._fetch(what, keys), strict=True):
            part = None if fresh is None else _found(what, key, fresh)
            if part is None or part.header.shape != shape or part.header.dtype != stock.dtype:
                return False
            tensor[slices_of(piece.target)].copy_(part.tensor[slices_of(piece.source)])
        return True

    def _read_headers(
        self, what: str, keys: Sequence[str], parts: Sequence[Sequence[Part]] | None = None
    ) -> list[Header | None]:
        """What each object is; with ``parts`` of it, which go where they say."""

        def act(session: Session) -> list[Header | None]:
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
                checked(what, key, decode, head.tobytes(), grant.size_bytes)
                if grant is not None and next(good)
                else None
                for key, head, grant in zip(keys, heads, grants, strict=True)
            ]

        return self._in_session(what, act, lambda _: [None] * len(keys))


def _wishes(what: str, keys: Sequence[str], targets: Any) -> list[Wish | None]:
    wanted = per_key(targets, len(keys))
    if len(wanted) != len(keys):
        return [None] * len(keys)
    return [checked(what, key, _wish, key, target) for key, target in zip(keys, wanted, strict=True)]


def _wish(key: str, target: Any) -> Wish:
    if target is None:
        return Wish(key, "full", ())
    if not isinstance(target, ReadTarget):
        raise ValueError(f"target {target!r}: a ReadTarget")
    return Wish(key, target.mode, axes_of(target.parallelism))


def _found(what: str, key: str, fresh: Fresh) -> Found | None:
    header, tensor = checked(what, key, fresh.header), checked(what, key, fresh.tensor)
    return None if header is None else Found(header, tensor)


def _manifest(fresh: Fresh | None) -> Manifest | None:
    try:
        return None if fresh is None else decode_manifest(fresh.content())
    except ValueError:
        return None


def _stock_of_writers(key: str, manifest: Manifest) -> Stock:
    cuts = [Cut(rank, manifest.count, manifest.split_dim) for rank in range(manifest.count)]
    boxes = [box_of(manifest.shape, [cut]) for cut in cuts]
    return Stock(manifest.dtype, manifest.shape, [writer_key(key, cut) for cut in cuts], boxes)


def _stock_of_axes(key: str, dtype: str, shape: tuple[int, ...], axes: Sequence[Axis]) -> Stock:
    every = [axes_with(axes, cuts, shape) for cuts in all_cuts(cuts_of(axes))]
    boxes = [box_of(shape, cuts_of(own)) for own in every]
    return Stock(dtype, shape, [part_key(key, own) for own in every], boxes)

"""How the part that a reader wants comes out of the parts that were stored.

First where exactly this part would be. Then whatever else there is under the key: the whole tensor, what
writers contributed, the parts of other ranks. Only what the wanted part needs is fetched.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

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
from mooncake.store.compat.partition import (
    Box,
    Cut,
    all_cuts,
    axes_with,
    box_of,
    cuts_of,
    plan,
    shape_of,
    slices_of,
)
from mooncake.store.compat.tensor_memory import Fresh, Tensor, empty, place
from mooncake.store.compat.tensors import TensorCalls, checked, header_at
from mooncake.store.compat.tensorwire import Axis, Header, Manifest, decode_manifest


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
        fetched = self._fetch(what, [base, writer_manifest_key(wish.key), parallelism_manifest_key(base)])
        whole = None if fetched[0] is None else _found(what, base, fetched[0])
        if whole is not None and not whole.header.is_shard:
            return _part_of(wish, whole)
        stocks: list[Stock] = []
        for manifest, of_writers in zip(map(_manifest, fetched[1:]), (True, False), strict=True):
            if manifest is not None:
                stocks.append(_stock(wish.key, base, manifest, of_writers))
        for stock in stocks:
            found = self._from_stock(what, wish, stock)
            if found is not None:
                return found
        first = self._fetch(what, [tp_key(base, 0, 2)])[0]
        header = None if first is None else checked(what, base, first.header)
        if header is None or not header.is_shard:
            return None
        return self._from_stock(what, wish, _stock_of_parts(wish.key, header))

    def _from_stock(self, what: str, wish: Wish, stock: Stock) -> Found | None:
        """None: some of it is not there, or is not what it should be."""
        box = checked(what, wish.key, box_of, stock.shape, wish.cuts())
        pieces = None if box is None else plan(box, stock.boxes)
        if box is None or pieces is None:
            return None
        parts: list[Found] = []
        keys = [stock.keys[piece.number] for piece in pieces]
        for key, piece, fresh in zip(keys, pieces, self._fetch(what, keys), strict=True):
            part = None if fresh is None else _found(what, key, fresh)
            expected = shape_of(stock.boxes[piece.number])
            if part is None or part.header.shape != expected or part.header.dtype != stock.dtype:
                return None
            parts.append(part)
        header = Header(stock.dtype, shape_of(box), stock.shape, _described(wish, stock.shape))
        if len(pieces) == 1 and shape_of(pieces[0].source) == parts[0].header.shape:
            return Found(header, parts[0].tensor)
        tensor = empty(stock.dtype, header.shape)
        for piece, part in zip(pieces, parts, strict=True):
            tensor[slices_of(piece.target)].copy_(part.tensor[slices_of(piece.source)])
        return Found(header, tensor)


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


def _part_of(wish: Wish, whole: Found) -> Found | None:
    shape = whole.header.shape
    box = checked("get_tensor_with_parallelism", wish.key, box_of, shape, wish.cuts())
    if box is None:
        return None
    header = Header(whole.header.dtype, shape_of(box), shape, _described(wish, shape))
    return Found(header, whole.tensor[slices_of(box)].contiguous())


def _described(wish: Wish, shape: tuple[int, ...]) -> tuple[Axis, ...]:
    return axes_with(wish.axes, wish.cuts(), shape) if wish.cuts() else ()


def _manifest(fresh: Fresh | None) -> Manifest | None:
    try:
        return None if fresh is None else decode_manifest(fresh.content())
    except ValueError:
        return None


def _stock(key: str, base: str, manifest: Manifest, of_writers: bool) -> Stock:
    if not of_writers:
        return _stock_of_axes(key, manifest.dtype, manifest.shape, manifest.axes)
    cuts = [Cut(rank, manifest.count, manifest.split_dim) for rank in range(manifest.count)]
    boxes = [box_of(manifest.shape, [cut]) for cut in cuts]
    return Stock(manifest.dtype, manifest.shape, [writer_key(key, cut) for cut in cuts], boxes)


def _stock_of_parts(key: str, header: Header) -> Stock:
    return _stock_of_axes(key, header.dtype, header.global_shape, header.axes)


def _stock_of_axes(key: str, dtype: str, shape: tuple[int, ...], axes: Sequence[Axis]) -> Stock:
    every = [axes_with(axes, cuts, shape) for cuts in all_cuts(cuts_of(axes))]
    boxes = [box_of(shape, cuts_of(own)) for own in every]
    return Stock(dtype, shape, [part_key(key, own) for own in every], boxes)

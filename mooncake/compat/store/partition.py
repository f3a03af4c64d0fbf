# SPDX-License-Identifier: Apache-2.0
"""Partition of a tensor: the box of each rank, and a wanted box from stored ones.

A dimension is cut into equal parts; one that is not a multiple of their number cannot be cut. Several cuts
are applied in order, each to the result of the one before. Knows shapes and ranks only;
``tensor_parallel.py`` knows where the parts are stored and how they are read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import TypeAlias

from mooncake.compat.store.tensor_format import Axis, AxisKind

Box: TypeAlias = tuple[tuple[int, int], ...]
"""Pair (start, stop) for each dimension."""


@dataclasses.dataclass(frozen=True, slots=True)
class Cut:
    """Selection of part ``rank`` of ``count`` along ``dim``."""

    rank: int
    count: int
    dim: int


@dataclasses.dataclass(frozen=True, slots=True)
class BoxOverlap:
    """Overlap of a stored part with a wanted box: its number, and what to copy from where to where."""

    number: int
    source: Box
    """Box within the stored part."""
    target: Box
    """Box within the wanted box."""


def box_of(shape: Sequence[int], cuts: Sequence[Cut]) -> Box:
    """Box that ``cuts`` select from ``shape``.

    Raises:
        ValueError: there is no such rank or no such dimension, or its length is not a multiple of the count.
    """
    box = [(0, length) for length in shape]
    for cut in cuts:
        if cut.count < 1 or not 0 <= cut.rank < cut.count:
            raise ValueError(f"rank {cut.rank} of {cut.count}: from 0 to one less than the size")
        if not 0 <= cut.dim < len(box):
            raise ValueError(f"split_dim {cut.dim}: the tensor has {len(box)} dimensions")
        start, stop = box[cut.dim]
        length, rest = divmod(stop - start, cut.count)
        if rest:
            raise ValueError(f"split_dim {cut.dim}: {stop - start} is not a multiple of {cut.count}")
        box[cut.dim] = (start + cut.rank * length, start + (cut.rank + 1) * length)
    return tuple(box)


def shape_of(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def slices_of(box: Box) -> tuple[slice, ...]:
    """Slices for indexing a tensor."""
    return tuple(slice(start, stop) for start, stop in box)


def all_cuts(cuts: Sequence[Cut]) -> Iterator[tuple[Cut, ...]]:
    """Cuts of every rank, in the order of ranks; one empty tuple when there are no cuts."""
    yield from product(*([Cut(rank, cut.count, cut.dim) for rank in range(cut.count)] for cut in cuts))


def plan_overlaps(wanted: Box, stored: Sequence[Box]) -> list[BoxOverlap] | None:
    """Plan to assemble ``wanted`` from ``stored`` boxes, which do not overlap; None when some is missing."""
    pieces: list[BoxOverlap] = []
    covered = 0
    for number, box in enumerate(stored):
        common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(wanted, box, strict=True))
        if any(start >= stop for start, stop in common):
            continue
        pieces.append(BoxOverlap(number, _within(common, box), _within(common, wanted)))
        covered += prod(shape_of(common))
    return pieces if covered == prod(shape_of(wanted)) else None


def num_runs(shape: Sequence[int], box: Box) -> int:
    """Number of contiguous runs of memory in ``box``; the last dimension varies fastest."""
    return prod(shape_of(box)[: _first_whole(shape, box)])


def runs(
    source_shape: Sequence[int], source: Box, target_shape: Sequence[int], target: Box
) -> Iterator[tuple[int, int, int]]:
    """Yield (element of the source, element of the target, number of elements) for each run of equal boxes.

    A run is contiguous in both.
    """
    extents = shape_of(source)
    split = max(_first_whole(source_shape, source), _first_whole(target_shape, target))
    length = prod(extents[split:])
    for place in product(*map(range, extents[:split])):
        inner = (0,) * (len(extents) - split)
        yield (
            _element(source_shape, source, place + inner),
            _element(target_shape, target, place + inner),
            length,
        )


def _first_whole(shape: Sequence[int], box: Box) -> int:
    """Dimension along which a run extends: the box covers all later ones completely."""
    dim = len(shape)
    while dim > 0:
        dim -= 1
        if box[dim] != (0, shape[dim]):
            break
    return dim


def _element(shape: Sequence[int], box: Box, place: Sequence[int]) -> int:
    at = 0
    for length, (start, _), step in zip(shape, box, place, strict=True):
        at = at * length + start + step
    return at


def cuts_of(axes: Sequence[Axis]) -> list[Cut]:
    """Cuts of the axes: only tensor parallelism divides a tensor."""
    return [Cut(axis.rank, axis.count, axis.split_dim) for axis in axes if axis.kind == AxisKind.TP]


def axes_with(axes: Sequence[Axis], cuts: Sequence[Cut], shape: Sequence[int]) -> tuple[Axis, ...]:
    """``axes``, those of tensor parallelism with the ranks of ``cuts`` and the part's length there."""
    described: list[Axis] = []
    made: list[Cut] = []
    left = iter(cuts)
    for axis in axes:
        if axis.kind == AxisKind.TP:
            made.append(next(left))
            start, stop = box_of(shape, made)[made[-1].dim]
            axis = dataclasses.replace(axis, rank=made[-1].rank, extent=stop - start)
        described.append(axis)
    return tuple(described)


def _within(inner: Box, outer: Box) -> Box:
    return tuple((a - c, b - c) for (a, b), (c, _) in zip(inner, outer, strict=True))

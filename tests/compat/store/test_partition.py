# SPDX-License-Identifier: Apache-2.0
"""Parts are equal, and any box can be assembled from any partition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mooncake.compat.store.partition import (
    Cut,
    all_cuts,
    box_of,
    num_runs,
    plan_overlaps,
    runs,
    shape_of,
    slices_of,
)

shapes = st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple)


@st.composite
def shapes_and_cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Cut], list[Cut]]:
    shape = draw(shapes)

    def cuts() -> list[Cut]:
        made: list[Cut] = []
        for _ in range(draw(st.integers(0, 2))):
            dim = draw(st.integers(0, len(shape) - 1))
            length = shape_of(box_of(shape, made))[dim]
            count = draw(st.sampled_from([n for n in range(1, 6) if length % n == 0]))
            made.append(Cut(draw(st.integers(0, count - 1)), count, dim))
        return made

    return shape, cuts(), cuts()


@given(shapes, st.integers(1, 5), st.data())
def test_cuts_are_torchs_chunks_when_they_are_equal(
    shape: tuple[int, ...], count: int, data: st.DataObject
) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    if shape[dim] % count:
        with pytest.raises(ValueError, match="not a multiple"):
            box_of(shape, [Cut(0, count, dim)])
        return
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape)
    chunks = list(tensor.chunk(count, dim))
    for rank in range(count):
        mine = tensor[slices_of(box_of(shape, [Cut(rank, count, dim)]))]
        if rank < len(chunks):
            assert torch.equal(mine, chunks[rank])
        else:
            assert mine.numel() == 0


@given(shapes_and_cuts())
def test_any_box_is_assembled_from_any_partition(case: tuple[tuple[int, ...], list[Cut], list[Cut]]) -> None:
    shape, wanted_cuts, stored_cuts = case
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape)
    boxes = [box_of(shape, cuts) for cuts in all_cuts(stored_cuts)]
    wanted = box_of(shape, wanted_cuts)
    pieces = plan_overlaps(wanted, boxes)
    assert pieces is not None
    out, by_runs = torch.full(shape_of(wanted), -1), torch.full(shape_of(wanted), -1)
    for piece in pieces:
        stored = tensor[slices_of(boxes[piece.number])].contiguous()
        out[slices_of(piece.target)] = stored[slices_of(piece.source)]
        found = list(runs(stored.shape, piece.source, out.shape, piece.target))
        for source, target, length in found:
            by_runs.view(-1)[target : target + length] = stored.view(-1)[source : source + length]
        assert len(found) == max(num_runs(stored.shape, piece.source), num_runs(out.shape, piece.target)), (
            "the minimal number of runs"
        )
    assert torch.equal(out, tensor[slices_of(wanted)])
    assert torch.equal(by_runs, out)


def test_a_missing_part_gives_no_plan() -> None:
    boxes = [box_of((8,), [Cut(rank, 4, 0)]) for rank in (0, 1, 3)]
    assert plan_overlaps(((0, 4),), boxes) is not None
    assert plan_overlaps(((0, 5),), boxes) is None


@pytest.mark.parametrize("cut", [Cut(2, 2, 0), Cut(-1, 2, 0), Cut(0, 0, 0), Cut(0, 2, 1), Cut(0, 2, -1)])
def test_invalid_cuts(cut: Cut) -> None:
    with pytest.raises(ValueError):
        box_of((4,), [cut])

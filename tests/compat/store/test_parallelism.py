# SPDX-License-Identifier: Apache-2.0
"""Descriptions of ranks that share a tensor, and the keys that follow, as in the existing package."""

from __future__ import annotations

from typing import Any

import pytest

from mooncake.compat.store.parallelism import (
    ParallelAxis,
    ReadTarget,
    TensorParallelism,
    axes_of,
    group_key,
    parallelism_manifest_key,
    part_key,
    shard_header,
    tp_axes,
    tp_key,
    writer_cut,
    writer_key,
    writer_manifest_key,
)
from mooncake.compat.store.partition import Cut
from mooncake.compat.store.tensor_format import MAX_AXES, AxisKind, TensorHeader


def axes(*axes: ParallelAxis) -> Any:
    return axes_of(TensorParallelism(axes))


def test_only_tensor_parallelism_divides_a_tensor() -> None:
    found = axes(ParallelAxis("dp", 3, 4), ParallelAxis("tp", 1, 2, 1), ParallelAxis("pp", 0, 2, stage_id=5))
    assert [axis.kind for axis in found] == [AxisKind.DP, AxisKind.TP, AxisKind.PP]
    assert part_key("k", found) == "k_pp_5_tp_1", "data parallel ranks share their keys"
    assert group_key("k", found) == "k_pp_5"


def test_keys_of_experts_and_stages_have_their_number_or_else_their_rank() -> None:
    assert group_key("k", axes(ParallelAxis("ep", 2, 4))) == "k_ep_2"
    assert group_key("k", axes(ParallelAxis("ep", 2, 4, expert_id=9))) == "k_ep_9"
    assert group_key("k", axes(ParallelAxis("tp", 1, 2))) == "k"


def test_keys_are_those_of_the_existing_package() -> None:
    assert tp_key("k", 1, 2) == "k_tp_1" and tp_key("k", 0, 1) == "k"
    assert writer_key("k", Cut(1, 4, 0)) == "k__writer_1of4_sd0"
    assert writer_manifest_key("k") == "k__writer_manifest"
    assert parallelism_manifest_key("k") == "k__parallelism_manifest"


def test_invalid_attributes_are_refused_when_they_are_set() -> None:
    with pytest.raises(RuntimeError, match="tp, dp, ep or pp"):
        ParallelAxis("xp")
    axis = ParallelAxis()
    with pytest.raises(RuntimeError, match="kind"):
        axis.kind = ""
    with pytest.raises(AttributeError):
        axis.ranks = 1  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="as_stored, shard, full"):
        ReadTarget("half")


@pytest.mark.parametrize(
    "wrong",
    [
        "tp",
        [ParallelAxis()],
        TensorParallelism(["tp"]),  # type: ignore[list-item]
        TensorParallelism([ParallelAxis("tp", 2, 2)]),
        TensorParallelism([ParallelAxis("tp", -1, 2)]),
        TensorParallelism([ParallelAxis()] * (MAX_AXES + 1)),
    ],
)
def test_an_invalid_parallelism_is_named(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"parallelism|axis|rank"):
        axes_of(wrong)
    assert axes_of(None) == ()


def test_axes_of_the_calls_with_tp() -> None:
    assert tp_axes(0, 1, 0) == ()
    [axis] = tp_axes(1, 2, 3)
    assert (axis.kind, axis.rank, axis.count, axis.split_dim) == (AxisKind.TP, 1, 2, 3)
    for rank in (-1, 2):
        with pytest.raises(ValueError, match=f"tp_rank {rank} of 2"):
            tp_axes(rank, 2, 0)


def test_a_split_dimension_may_be_negative() -> None:
    assert writer_cut((1, 4, -1), 3) == Cut(1, 4, 2)
    for wrong in ((4, 4, 0), (0, 4, 3), (0, 4, -4), (0, 4), None, ("a", 1, 0)):
        with pytest.raises(ValueError, match="writer_partition"):
            writer_cut(wrong, 3)


def test_shards_are_those_of_torch_chunk() -> None:
    whole = TensorHeader("F32", (5, 6), (5, 6), ())
    shapes = [shard_header(whole, tp_axes(rank, 2, 0)).shape for rank in range(2)]
    assert shapes == [(3, 6), (2, 6)]
    part = shard_header(whole, tp_axes(1, 2, 1))
    assert part.shape == (5, 3) and part.dtype == whole.dtype
    with pytest.raises(ValueError):
        shard_header(whole, tp_axes(0, 2, 5))

# SPDX-License-Identifier: Apache-2.0
"""Descriptions of ranks that share a tensor, and the keys that follow, as in the existing package."""

from __future__ import annotations

from types import SimpleNamespace
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
    found = axes(ParallelAxis("pp", 0, 2, stage_id=5), ParallelAxis("tp", 1, 2, 1), ParallelAxis("dp", 3, 4))
    assert [axis.kind for axis in found] == [AxisKind.PP, AxisKind.TP, AxisKind.DP]
    assert part_key("k", found) == "k__dp_3of4__tp_1of2_sd1__pp_0of2_sid5", "whatever the order of the axes"
    assert group_key("k", found) == "k__dp_3of4__pp_0of2_sid5"


def test_keys_of_experts_and_stages_have_their_number() -> None:
    assert part_key("k", axes(ParallelAxis("ep", 2, 4, expert_id=9))) == "k__ep_2of4_eid9"
    assert part_key("k", axes(ParallelAxis("tp", 1, 2, 0))) == "k_tp_1"
    assert group_key("k", axes(ParallelAxis("tp", 1, 2, 0))) == "k"


def test_keys_are_those_of_the_existing_package() -> None:
    assert tp_key("k", 1, 2) == "k_tp_1" and tp_key("k", 0, 1) == "k"
    assert writer_key("k", Cut(1, 4, 0)) == "k__writer_1of4_sd0"
    assert writer_manifest_key("k") == "k__writer_manifest"
    assert parallelism_manifest_key("k") == "k__parallelism_manifest"


def test_invalid_attributes_are_refused_when_they_are_set() -> None:
    axis = ParallelAxis()
    assert (axis.kind, axis.rank, axis.size, axis.split_dim) == ("", 0, 1, None)
    for name, wrong in (("kind", None), ("rank", None), ("size", 1.5), ("split_dim", "1")):
        with pytest.raises(TypeError):
            setattr(axis, name, wrong)
    with pytest.raises(AttributeError):
        axis.ranks = 1
    with pytest.raises(RuntimeError, match="as_stored, shard, full"):
        ReadTarget("half")
    target, parallelism = ReadTarget(), TensorParallelism([axis])
    target.parallelism = parallelism
    for owner, name, value in (
        (target, "mode", 3),
        (target, "parallelism", 3),
        (parallelism, "axes", 3),
        (parallelism, "axes", "tp"),
    ):
        with pytest.raises(TypeError, match=name):
            setattr(owner, name, value)
    assert (target.mode, target.parallelism, parallelism.axes) == ("as_stored", parallelism, [axis])


@pytest.mark.parametrize(
    "wrong",
    [
        "tp",
        [ParallelAxis()],
        TensorParallelism(["tp"]),  # type: ignore[list-item]
        TensorParallelism(),
        TensorParallelism([ParallelAxis()]),
        TensorParallelism([ParallelAxis("xp", 0, 2)]),
        TensorParallelism([ParallelAxis("tp", 2, 2, 0)]),
        TensorParallelism([ParallelAxis("tp", -1, 2, 0)]),
        TensorParallelism([ParallelAxis("tp", 0, 2)]),
        TensorParallelism([ParallelAxis("dp", 0, 2, 0)]),
        TensorParallelism([ParallelAxis("ep", 0, 2)]),
        TensorParallelism([ParallelAxis("pp", 0, 2)]),
        TensorParallelism([ParallelAxis("dp", 0, 2), ParallelAxis("dp", 0, 2)]),
        TensorParallelism([ParallelAxis("dp")] * (MAX_AXES + 1)),
    ],
)
def test_an_invalid_parallelism_is_named(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"parallelism|axis|Axis"):
        axes_of(wrong)
    assert axes_of(None) == ()


def test_any_object_with_the_attributes_describes_ranks() -> None:
    given = ParallelAxis("tp", 1, 2, 0)
    like = SimpleNamespace(kind="tp", rank=1, size=2, split_dim=0, expert_id=None, stage_id=None)
    assert axes_of(SimpleNamespace(axes=[like])) == axes(given)


def test_axes_of_the_calls_with_tp() -> None:
    assert tp_axes(1, 0) == ()
    [axis] = tp_axes(2, 3)
    assert (axis.kind, axis.rank, axis.count, axis.split_dim) == (AxisKind.TP, 0, 2, 3)


def test_a_writer_partition_is_an_object_or_a_tuple() -> None:
    assert writer_cut((1, 4, 2), 3) == Cut(1, 4, 2)
    assert writer_cut(SimpleNamespace(rank=1, size=4, split_dim=2), 3) == Cut(1, 4, 2)
    for wrong in (
        (4, 4, 0),
        (0, 4, 3),
        (0, 4, -1),
        (0, 4),
        None,
        ("a", 1, 0),
        SimpleNamespace(rank=0, size=1),
    ):
        with pytest.raises(ValueError, match="writer_partition"):
            writer_cut(wrong, 3)


def test_shards_are_equal_parts() -> None:
    whole = TensorHeader("F32", (5, 6), (5, 6), ())
    part = shard_header(whole, tp_axes(2, 1))
    assert part.shape == (5, 3) and part.dtype == whole.dtype
    for dim in (0, 5):
        with pytest.raises(ValueError):
            shard_header(whole, tp_axes(2, dim))

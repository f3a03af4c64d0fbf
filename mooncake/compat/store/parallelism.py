# SPDX-License-Identifier: Apache-2.0
"""How a program describes the ranks that share a tensor, and the keys that follow from it.

Only tensor parallelism (TP) divides a tensor. Data parallel (DP) ranks hold the same one, so they share its
keys: a second put finds it stored. Experts (EP) and stages (PP) have tensors of their own under one name,
distinguished by a suffix. The classes are the existing package's: attributes are checked when they are set,
and one that does not exist is an AttributeError.

    key                          the whole tensor
    key_tp_1                     part 1 of it
    key__parallelism_manifest    how many parts there are, and along which dimension
    key__writer_1of4_sd0         what writer 1 of 4 contributed
    key__writer_manifest         how many writers there are
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mooncake.compat.store.partition import Cut, axes_with, box_of, cuts_of, shape_of
from mooncake.compat.store.tensor_format import MAX_AXES, Axis, AxisKind, TensorHeader

MODES = ("as_stored", "shard", "full")
_SUFFIXES = {AxisKind.TP: "tp", AxisKind.EP: "ep", AxisKind.PP: "pp"}


class ParallelAxis:
    """One way in which a job is divided, and this process's place in it."""

    __slots__ = ("_kind", "expert_id", "rank", "size", "split_dim", "stage_id")

    def __init__(
        self,
        kind: str = "tp",
        rank: int = 0,
        size: int = 1,
        split_dim: int | None = None,
        expert_id: int | None = None,
        stage_id: int | None = None,
    ) -> None:
        self.kind = kind
        self.rank = rank
        self.size = size
        self.split_dim = split_dim
        self.expert_id = expert_id
        self.stage_id = stage_id

    @property
    def kind(self) -> str:
        """Kind of parallelism: tp, dp, ep or pp."""
        return self._kind

    @kind.setter
    def kind(self, value: str) -> None:
        if value not in ("tp", "dp", "ep", "pp"):
            raise RuntimeError(f"kind {value!r}: tp, dp, ep or pp")
        self._kind = value

    def __repr__(self) -> str:
        return f"<ParallelAxis {self.kind} {self.rank} of {self.size}>"


class TensorParallelism:
    """Every way in which a job is divided, the outermost first."""

    __slots__ = ("axes",)

    def __init__(self, axes: Sequence[ParallelAxis] = ()) -> None:
        self.axes = list(axes)

    def __repr__(self) -> str:
        return f"<TensorParallelism {self.axes}>"


class ReadTarget:
    """What to read: an object as it was stored, any part (``shard``), or the whole (``full``)."""

    __slots__ = ("_mode", "parallelism")

    def __init__(self, mode: str = "as_stored", parallelism: TensorParallelism | None = None) -> None:
        self.mode = mode
        self.parallelism = parallelism

    @property
    def mode(self) -> str:
        return self._mode

    @mode.setter
    def mode(self, value: str) -> None:
        if value not in MODES:
            raise RuntimeError(f"mode {value!r}: {', '.join(MODES)}")
        self._mode = value

    def __repr__(self) -> str:
        return f"<ReadTarget {self.mode} {self.parallelism}>"


def axes_of(parallelism: Any) -> tuple[Axis, ...]:
    """Axes of a ``TensorParallelism``; none for None.

    Raises:
        ValueError: it is not one, or is invalid.
    """
    if parallelism is None:
        return ()
    if not isinstance(parallelism, TensorParallelism) or len(parallelism.axes) > MAX_AXES:
        raise ValueError(f"parallelism {parallelism!r}: a TensorParallelism of at most {MAX_AXES} axes")
    return tuple(_axis_of(axis) for axis in parallelism.axes)


def _axis_of(axis: Any) -> Axis:
    if not isinstance(axis, ParallelAxis):
        raise ValueError(f"axis {axis!r}: a ParallelAxis")
    if not 0 <= axis.rank < axis.size:
        raise ValueError(f"{axis!r}: the rank is from 0 to one less than the size")
    kind = AxisKind[axis.kind.upper()]
    member = {AxisKind.EP: axis.expert_id, AxisKind.PP: axis.stage_id}.get(kind)
    split_dim = (axis.split_dim or 0) if kind == AxisKind.TP else -1
    return Axis(kind, axis.rank, axis.size, split_dim, -1 if member is None else member)


def tp_axes(rank: int, size: int, split_dim: int) -> tuple[Axis, ...]:
    """Axes for the calls ``..._with_tp``; none when ``size`` is 1.

    Raises:
        ValueError: there is no such rank.
    """
    if size <= 1:
        return ()
    if not 0 <= rank < size:
        raise ValueError(f"tp_rank {rank} of {size}: the rank is from 0 to one less than the size")
    return (Axis(AxisKind.TP, rank, size, split_dim),)


def writer_cut(partition: Any, ndim: int) -> Cut:
    """Cut for ``(rank, size, split_dim)`` of a tensor with ``ndim`` dimensions.

    Raises:
        ValueError: it is not such a tuple, or is out of range.
    """
    try:
        rank, size, split_dim = (int(number) for number in partition)
    except (TypeError, ValueError):
        raise ValueError(f"writer_partition {partition!r}: (rank, size, split_dim)") from None
    if not 0 <= rank < size or not -ndim <= split_dim < ndim:
        raise ValueError(f"writer_partition {partition!r}: no such rank, or no such dimension of {ndim}")
    return Cut(rank, size, split_dim % ndim)


def shard_header(whole: TensorHeader, axes: Sequence[Axis]) -> TensorHeader:
    """Header of the part of ``whole`` that ``axes`` select.

    Raises:
        ValueError: there is no such dimension.
    """
    cuts = cuts_of(axes)
    box = box_of(whole.shape, cuts)
    return TensorHeader(whole.dtype, shape_of(box), whole.shape, axes_with(axes, cuts, whole.shape))


def group_key(key: str, axes: Sequence[Axis]) -> str:
    """Key of the tensor that these ranks share, with suffixes for expert and stage."""
    own = [axis for axis in axes if axis.kind in (AxisKind.EP, AxisKind.PP)]
    return key + "".join(f"_{_SUFFIXES[axis.kind]}_{_member(axis)}" for axis in own)


def part_key(key: str, axes: Sequence[Axis]) -> str:
    """Key of the part of exactly these ranks."""
    ranks = "".join(f"_tp_{axis.rank}" for axis in axes if axis.kind == AxisKind.TP)
    return group_key(key, axes) + ranks


def tp_key(key: str, rank: int, size: int) -> str:
    """Key of a part for the calls ``..._with_tp``."""
    return f"{key}_tp_{rank}" if size > 1 else key


def writer_key(key: str, cut: Cut) -> str:
    return f"{key}__writer_{cut.rank}of{cut.count}_sd{cut.dim}"


def writer_manifest_key(key: str) -> str:
    return key + "__writer_manifest"


def parallelism_manifest_key(key: str) -> str:
    return key + "__parallelism_manifest"


def _member(axis: Axis) -> int:
    return axis.rank if axis.member_id < 0 else axis.member_id

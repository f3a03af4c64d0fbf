# SPDX-License-Identifier: Apache-2.0
"""How a program describes the ranks that share a tensor, and the keys that follow from it.

Only tensor parallelism (TP) divides a tensor, into equal parts. Ranks of data parallelism (DP), experts (EP)
and stages (PP) have tensors of their own under one name, distinguished by a suffix. The classes are the
existing package's: attributes are checked when they are set, and one that does not exist is an
AttributeError. An object with the same attributes serves as well.

    key                                  the whole tensor
    key_tp_1                             part 1 of it
    key__parallelism_manifest            how many parts there are, and along which dimension
    key__dp_0of2                         the whole tensor of data parallel rank 0 of 2
    key__dp_0of2__tp_1of4_sd0            part 1 of 4 of it, along dimension 0
    key__dp_0of2__parallelism_manifest   how many parts it has
    key__ep_0of2_eid7, key__pp_1of2_sid3 the tensor of expert 7, or of stage 3
    key__writer_1of4_sd0                 what writer 1 of 4 contributed
    key__writer_manifest                 how many writers there are
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from mooncake.compat import public_in
from mooncake.compat.store.partition import Cut, axes_with, box_of, cuts_of, shape_of
from mooncake.compat.store.tensor_format import MAX_AXES, Axis, AxisKind, TensorHeader

MODES = ("as_stored", "shard", "full")
_ORDER = (AxisKind.DP, AxisKind.TP, AxisKind.EP, AxisKind.PP)
"""Order of the axes in a key, whatever their order in the program."""
_PARTITION = operator.attrgetter("rank", "size", "split_dim")


class ParallelAxis:
    """One way in which a job is divided, and this process's place in it."""

    __slots__ = ("expert_id", "kind", "rank", "size", "split_dim", "stage_id")

    kind: str
    """Kind of parallelism: tp, dp, ep or pp."""
    rank: int
    size: int
    split_dim: int | None
    expert_id: int | None
    stage_id: int | None

    def __init__(
        self,
        kind: str = "",
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

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "kind" and not isinstance(value, str):
            raise TypeError(f"kind {value!r}: a str")
        if name in ("rank", "size") or (name != "kind" and value is not None):
            value = operator.index(value)
        object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        return f"<ParallelAxis {self.kind} {self.rank} of {self.size}>"


class TensorParallelism:
    """Every way in which a job is divided, the outermost first."""

    __slots__ = ("axes",)

    axes: list[ParallelAxis]

    def __init__(self, axes: Sequence[ParallelAxis] = ()) -> None:
        self.axes = list(axes)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "axes":
            if not isinstance(value, list | tuple):
                raise TypeError(f"axes {value!r}: a list of ParallelAxis")
            value = list(value)
        object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        return f"<TensorParallelism {self.axes}>"


class ReadTarget:
    """What to read: an object as it was stored, any part (``shard``), or the whole (``full``)."""

    __slots__ = ("_mode", "parallelism")

    def __init__(self, mode: str = "as_stored", parallelism: TensorParallelism | None = None) -> None:
        self.mode = mode
        self.parallelism = parallelism

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "parallelism" and not (value is None or hasattr(value, "axes")):
            raise TypeError(f"parallelism {value!r}: a TensorParallelism, or None")
        object.__setattr__(self, name, value)

    @property
    def mode(self) -> str:
        return self._mode

    @mode.setter
    def mode(self, value: str) -> None:
        if not isinstance(value, str):
            raise TypeError(f"mode {value!r}: a str")
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
    given = getattr(parallelism, "axes", None)
    if not isinstance(given, list | tuple) or not 1 <= len(given) <= MAX_AXES:
        raise ValueError(f"parallelism {parallelism!r}: a TensorParallelism of 1 to {MAX_AXES} axes")
    axes = tuple(_axis_of(axis) for axis in given)
    if len({axis.kind for axis in axes}) != len(axes):
        raise ValueError(f"parallelism {parallelism!r}: one axis of a kind")
    return axes


def _axis_of(given: Any) -> Axis:
    """Check an axis.

    Raises:
        ValueError: it is not one, or has a field that its kind does not have, or lacks one that it needs.
    """
    try:
        axis = ParallelAxis(given.kind, given.rank, given.size, given.split_dim)
        axis.expert_id, axis.stage_id = given.expert_id, given.stage_id
        kind = AxisKind[axis.kind.upper()]
    except (AttributeError, TypeError, KeyError):
        raise ValueError(f"axis {given!r}: a ParallelAxis of kind tp, dp, ep or pp") from None
    if not 0 <= axis.rank < axis.size:
        raise ValueError(f"{axis!r}: the rank is from 0 to one less than the size")
    if (kind == AxisKind.TP) != (axis.split_dim is not None):
        raise ValueError(f"{axis!r}: a split_dim for tp, and for no other kind")
    member = {AxisKind.EP: axis.expert_id, AxisKind.PP: axis.stage_id}.get(kind, 0)
    if member is None:
        raise ValueError(f"{axis!r}: an expert_id for ep, a stage_id for pp")
    return Axis(kind, axis.rank, axis.size, -1 if axis.split_dim is None else axis.split_dim, member)


def tp_axes(size: int, split_dim: int) -> tuple[Axis, ...]:
    """Axes of the first part for the calls ``..._with_tp``; none when ``size`` is 1."""
    return (Axis(AxisKind.TP, 0, size, split_dim),) if size > 1 else ()


def writer_cut(partition: Any, ndim: int) -> Cut:
    """Cut for an object with ``rank``, ``size`` and ``split_dim``, or a tuple of them.

    Raises:
        ValueError: it is neither, or is out of range.
    """
    try:
        fields = partition if isinstance(partition, list | tuple) else _PARTITION(partition)
        rank, size, split_dim = (operator.index(number) for number in fields)
    except (TypeError, ValueError, AttributeError):
        raise ValueError(f"writer_partition {partition!r}: rank, size and split_dim") from None
    if not 0 <= rank < size or not 0 <= split_dim < ndim:
        raise ValueError(f"writer_partition {partition!r}: no such rank, or no such dimension of {ndim}")
    return Cut(rank, size, split_dim)


def shard_header(whole: TensorHeader, axes: Sequence[Axis]) -> TensorHeader:
    """Header of the part of ``whole`` that ``axes`` select.

    Raises:
        ValueError: there is no such dimension.
    """
    cuts = cuts_of(axes)
    box = box_of(whole.shape, cuts)
    return TensorHeader(whole.dtype, shape_of(box), whole.shape, axes_with(axes, cuts, whole.shape))


def group_key(key: str, axes: Sequence[Axis]) -> str:
    """Key of the tensor that the ranks of tensor parallelism share."""
    return part_key(key, [axis for axis in axes if axis.kind != AxisKind.TP])


def part_key(key: str, axes: Sequence[Axis]) -> str:
    """Key of the part of exactly these ranks."""
    if [axis.kind for axis in axes] == [AxisKind.TP]:
        return f"{key}_tp_{axes[0].rank}"
    return key + "".join(_suffix(axis) for axis in sorted(axes, key=lambda axis: _ORDER.index(axis.kind)))


def tp_key(key: str, rank: int, size: int) -> str:
    """Key of a part for the calls ``..._with_tp``."""
    return f"{key}_tp_{rank}" if size > 1 else key


def writer_key(key: str, cut: Cut) -> str:
    return f"{key}__writer_{cut.rank}of{cut.count}_sd{cut.dim}"


def writer_manifest_key(key: str) -> str:
    return key + "__writer_manifest"


def parallelism_manifest_key(key: str) -> str:
    return key + "__parallelism_manifest"


def _suffix(axis: Axis) -> str:
    number = {
        AxisKind.DP: "",
        AxisKind.TP: f"_sd{axis.split_dim}",
        AxisKind.EP: f"_eid{axis.member_id}",
        AxisKind.PP: f"_sid{axis.member_id}",
    }[axis.kind]
    return f"__{axis.kind.name.lower()}_{axis.rank}of{axis.count}{number}"


public_in("mooncake.store", ParallelAxis, TensorParallelism, ReadTarget)

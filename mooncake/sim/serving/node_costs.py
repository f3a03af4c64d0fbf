# SPDX-License-Identifier: Apache-2.0
"""What work costs on a kind of node: named data files, and the fit of such costs to measured times.

It owns the files' form and nothing about how costs are used. A file has a description of where its numbers
come from, and is read into the conductor's own models; ``mooncake calibrate`` writes one from a live cluster.

A fit is least squares with non-negative coefficients, whatever made the measurements. Relative errors are
minimised, because a model is used for short prompts as much as for long ones. A coefficient that would be
negative is noise about a cost too small to measure: it becomes 0 and the others are fitted again.
"""

from __future__ import annotations

import importlib.resources
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from mooncake.conductor.prediction import CostModels, DecodeModel, LinkModel, PrefillModel
from mooncake.errors import InvalidArgument

Positive = Annotated[float, Meta(gt=0)]
Count = Annotated[int, Meta(gt=0)]


class NodeCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Costs of one node: its times, its memory, its links. A token is one token of KV, in all layers."""

    title: str
    source: str
    "Description of where the numbers come from."
    kv_bytes_per_token: Count
    num_layers: Count
    prefill: PrefillModel
    decode: DecodeModel
    device_tokens: Count
    "Tokens of KV that fit into device memory beside the weights."
    cache_tokens: Annotated[int, Meta(ge=0)]
    "Tokens of KV that the node's DRAM keeps."
    nic_bytes_per_s: Positive
    "All network cards of the node together, in one direction."
    nic_latency_s: Annotated[float, Meta(ge=0)]
    ssd_bytes_per_s: Positive
    device_load_bytes_per_s: Positive
    "From the node's DRAM to its devices."
    reuse_s: Annotated[float, Meta(ge=0)] = 0.0
    "Fixed cost of using a cached prefix."
    first_token_s: Annotated[float, Meta(ge=0)] = 0.0
    """From a prompt's last computed layer to the client's first token; its prefill instance is free by then.
    Later tokens take as long to the client."""
    decode_makes_first_token: bool = False
    "Whether a step of decode makes the first token (our workers); `first_token_s` ends before that step."
    num_gpus: Count = 1
    move_s_per_byte: Annotated[float, Meta(ge=0)] = 0.0
    "Delay of steps by each byte loaded from the pool or saved to it; 0: no computing core copies."
    prefill_error: Annotated[float, Meta(ge=0)] = 0.0
    "Relative error that nine of ten measured times to first token stay below; 0: unknown."
    decode_error: Annotated[float, Meta(ge=0)] = 0.0
    "The same of times per output token."

    def __post_init__(self) -> None:
        """Times that are negative, or no numbers, would set the clock back. Raises InvalidArgument."""
        values = {name: getattr(self, name) for name in self.__struct_fields__}
        for one in ("prefill", "decode"):
            values |= {f"{one}.{name}": getattr(values[one], name) for name in values[one].__struct_fields__}
        for name, value in values.items():
            if isinstance(value, int | float) and not 0 <= value < math.inf:
                raise InvalidArgument(name, value, "a number from 0 on")
        if not any(msgspec.structs.astuple(self.decode)):
            raise InvalidArgument("decode", self.decode, "a step that takes time")

    @property
    def has_errors(self) -> bool:
        return self.prefill_error > 0 or self.decode_error > 0

    def at_bound(self, sign: int) -> NodeCosts:
        """Costs at the slow (1) or the fast (-1) end of their errors, without any of their own."""
        slower = (1 + self.prefill_error) ** sign
        prefill = PrefillModel(*(slower * one for one in msgspec.structs.astuple(self.prefill)))
        slower = (1 + self.decode_error) ** sign
        decode = DecodeModel(*(slower * one for one in msgspec.structs.astuple(self.decode)))
        return msgspec.structs.replace(
            self,
            prefill=prefill,
            decode=decode,
            first_token_s=self.first_token_s * (1 + self.prefill_error) ** sign,
            prefill_error=0.0,
            decode_error=0.0,
        )

    @property
    def link(self) -> LinkModel:
        return LinkModel(self.nic_latency_s, self.nic_bytes_per_s)

    @property
    def models(self) -> CostModels:
        """What a conductor assumes about such nodes before any measurement."""
        return CostModels(
            self.prefill,
            self.decode,
            self.link,
            self.kv_bytes_per_token,
            self.num_layers,
            LinkModel(1e-4, self.ssd_bytes_per_s),
            self.reuse_s,
            self.decode_makes_first_token,
        )

    def prefill_s(self, num_cached: int, num_tokens: int) -> float:
        """Time to compute a prompt behind a cached prefix."""
        computed_s = self.prefill.seconds(num_cached, num_tokens)
        if not num_cached:
            return computed_s
        return (
            max(computed_s, num_cached * self.kv_bytes_per_token / self.device_load_bytes_per_s)
            + self.reuse_s
        )


def builtin_costs() -> list[str]:
    """Names that ``load_costs`` resolves without a path."""
    folder = importlib.resources.files("mooncake.sim") / "data"
    return sorted(one.name.removesuffix(".toml") for one in folder.iterdir() if one.name.endswith(".toml"))


def load_costs(name_or_path: str) -> NodeCosts:
    """Load a built-in node type by name, or a file. Raises InvalidArgument."""
    text: str
    if name_or_path in builtin_costs():
        text = (importlib.resources.files("mooncake.sim") / "data" / f"{name_or_path}.toml").read_text()
    elif os.path.isfile(name_or_path):  # False also of a text that is too long for a path
        text = Path(name_or_path).read_text()
    else:
        raise InvalidArgument("costs", name_or_path, f"a file, or one of {', '.join(builtin_costs())}")
    try:
        return msgspec.toml.decode(text, type=NodeCosts)
    except (msgspec.MsgspecError, InvalidArgument) as error:
        raise InvalidArgument("costs", name_or_path, f"a file of costs ({error})") from error


class PrefillSample(msgspec.Struct, frozen=True):
    """An instance was busy for ``seconds`` computing prompt tokens [first, end)."""

    first: int
    end: int
    seconds: float


class StepSample(msgspec.Struct, frozen=True):
    """A step of decode."""

    batch_size: int
    context_tokens: int
    seconds: float


class CostFit(msgspec.Struct, frozen=True):
    """The coefficients and the remaining mean absolute relative error."""

    coefficients: tuple[float, ...]
    error: float


def fit_prefill(samples: Sequence[PrefillSample]) -> tuple[PrefillModel, float]:
    """The model and its mean absolute relative error. Raises InvalidArgument: too few different lengths."""
    if len({one.end for one in samples}) < 3:
        raise InvalidArgument("samples", len(samples), "prompts of at least three different lengths")
    rows = [(1.0, one.end - one.first, float(one.end**2 - one.first**2)) for one in samples]
    fit = fit_costs(rows, [one.seconds for one in samples])
    c0, c1, c2 = fit.coefficients
    return PrefillModel(c0, c1, c2), fit.error


def fit_decode(samples: Sequence[StepSample]) -> tuple[DecodeModel, float]:
    """As ``fit_prefill``. Raises InvalidArgument: too few different batches."""
    if len({(one.batch_size, one.context_tokens) for one in samples}) < 2:
        raise InvalidArgument("samples", len(samples), "steps of at least two different batches")
    rows = [(1.0, float(one.batch_size), float(one.context_tokens)) for one in samples]
    fit = fit_costs(rows, [one.seconds for one in samples])
    base_s, per_request_s, per_token_s = fit.coefficients
    return DecodeModel(base_s, per_request_s, per_token_s), fit.error


def fit_costs(
    rows: Sequence[Sequence[float]], seconds: Sequence[float], least: Sequence[float] = ()
) -> CostFit:
    """Coefficients of the terms in ``rows`` whose sums are ``seconds``, none below 0 or that of ``least``."""
    for value in seconds:
        if not value > 0:
            raise InvalidArgument("seconds", value, "more than 0")
    matrix, target = np.array(rows, dtype=np.float64), np.array(seconds, dtype=np.float64)
    weighted = matrix / target[:, None]
    lowest = np.array(least, dtype=np.float64) if len(least) else np.zeros(matrix.shape[1])
    rest = 1.0 - weighted @ lowest
    used = [column for column in range(matrix.shape[1]) if weighted[:, column].any()]
    while True:
        scale = np.abs(weighted[:, used]).max(axis=0)
        found, *_ = np.linalg.lstsq(weighted[:, used] / scale, rest, rcond=None)
        found = found / scale
        if (found >= 0).all() or len(used) == 1:
            break
        used.pop(int(np.argmin(found * scale)))
    coefficients = lowest.copy()
    coefficients[used] += np.maximum(found, 0.0)
    error = float(np.abs(matrix @ coefficients / target - 1.0).mean())
    return CostFit(tuple(float(one) for one in coefficients), error)

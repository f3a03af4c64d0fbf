# SPDX-License-Identifier: Apache-2.0
"""What work costs on a kind of node: named data files, read into the conductor's own models.

It owns the files' form and nothing about how costs are used. A file has a description of where its numbers
come from; ``mooncake calibrate`` writes one from a live cluster.
"""

from __future__ import annotations

import importlib.resources
from pathlib import Path
from typing import Annotated

import msgspec
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
    "From a prompt's last computed layer to the client's first token; its prefill instance is free by then."
    num_gpus: Count = 1

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
    elif Path(name_or_path).is_file():
        text = Path(name_or_path).read_text()
    else:
        raise InvalidArgument("costs", name_or_path, f"a file, or one of {', '.join(builtin_costs())}")
    try:
        return msgspec.toml.decode(text, type=NodeCosts)
    except msgspec.MsgspecError as error:
        raise InvalidArgument("costs", name_or_path, f"a file of costs ({error})") from error

# SPDX-License-Identifier: Apache-2.0
"""The specification of a simulated cluster: its machines, and how they are used."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from mooncake.conductor.prediction import CostModels, LinkModel, PrefillModel
from mooncake.errors import InvalidArgument
from mooncake.inference.blocks import BlockPool
from mooncake.inference.scheduler import Scheduler, SchedulerSettings
from mooncake.sim.serving.node_costs import NodeCosts

Count = Annotated[int, Meta(gt=0)]
Mode: TypeAlias = Literal["disaggregated", "vllm", "prefix", "chunked"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """The machines, and how they are used."""

    costs: NodeCosts
    """Costs of every node."""
    num_prefill: Count = 8
    num_decode: Annotated[int, Meta(ge=0)] = 8
    """0 only where nodes are colocated."""
    mode: Mode = "disaggregated"
    """The values other than ``mooncake`` are one pool of ``num_prefill + num_decode`` colocated nodes:
    ``vllm`` computes prompts before it continues decoding, ``prefix`` also keeps their blocks for later ones,
    ``chunked`` mixes chunks of prompts into the steps."""
    detail: Literal["flow", "step"] = "flow"
    """``step``: the real batch scheduler, step by step and block by block. For small traces."""
    block_tokens: Count = 512
    """Tokens that a key of the trace stands for."""
    cache_tokens: int | None = None
    """Cache of a prefill node in DRAM; None: as in ``costs``."""
    ssd_tokens: int = 0
    """Cache of a prefill node on its SSD."""
    nic_bytes_per_s: float = 0.0
    """Bandwidth of a node in one direction; 0: as in ``costs``."""
    pipeline_nodes: Count = 1
    """Prefill nodes that form one instance and compute the chunks of a prompt as a pipeline."""
    chunk_tokens: Count = 1024
    """Tokens of such a chunk."""
    step_tokens: Count = 512
    """Tokens of one step that prompts and answers share (``chunked``, ``step``)."""
    max_batch: Count = 256
    """Requests that one instance decodes at a time."""
    obeys_turns: bool = True
    """Whether waiting prompts are computed in the conductor's order, or first come first served."""
    measure_s: float = 10.0
    """Interval of an instance's measurements for the conductor; steps between them are reported without
    times."""
    sample_s: float = 10.0
    """The interval of the timeline."""
    watches_blocks: bool = False
    """Count how often each block is used, and where the most used ones are. Needs memory per block."""

    def __post_init__(self) -> None:
        if self.mode == "disaggregated" and not self.num_decode:
            allowed = "1 or more when prefill and decode are disaggregated"
            raise InvalidArgument("num_decode", self.num_decode, allowed)
        if self.num_prefill % self.pipeline_nodes:
            allowed = f"a divisor of num_prefill ({self.num_prefill})"
            raise InvalidArgument("pipeline_nodes", self.pipeline_nodes, allowed)
        if self.detail == "step":
            if self.mode not in ("disaggregated", "chunked"):
                raise InvalidArgument("detail", self.detail, f"flow when mode is {self.mode}")
            if self.pipeline_nodes > 1 or self.ssd_tokens:
                raise InvalidArgument("detail", self.detail, "flow with pipelines or SSDs")

    def scheduler(
        self, num_tokens: int, step_tokens: int, max_running: int, *, has_external_cache: bool = False
    ) -> Scheduler:
        """An engine's scheduler, with room for so many tokens of KV."""
        return Scheduler(
            SchedulerSettings(
                num_blocks=num_tokens // self.block_tokens + 1,
                block_tokens=self.block_tokens,
                max_model_len=1 << 30,
                max_batch_tokens=max(step_tokens, max_running),
                max_running=max_running,
                max_waiting=1 << 30,
                has_external_cache=has_external_cache,
            )
        )

    def pool(self, num_tokens: int) -> BlockPool[int]:
        return BlockPool(num_tokens // self.block_tokens + 1, self.block_tokens)

    @property
    def num_prefill_instances(self) -> int:
        return self.num_prefill // self.pipeline_nodes

    @property
    def models(self) -> CostModels:
        """What the conductor assumes about an instance before any measurement."""
        models, num_nodes = self.node_costs.models, self.pipeline_nodes
        if num_nodes == 1:
            return models
        one = models.prefill
        fill_s = (num_nodes - 1) / num_nodes * one.seconds(0, self.chunk_tokens)
        piped = PrefillModel(one.c0 + fill_s, one.c1 / num_nodes, one.c2 / num_nodes)
        link = LinkModel(models.link.latency_s, models.link.bytes_per_s * num_nodes)
        return msgspec.structs.replace(models, prefill=piped, link=link)

    @property
    def node_costs(self) -> NodeCosts:
        """``costs`` with this spec's overrides."""
        changes: dict[str, Any] = {}
        if self.cache_tokens is not None:
            changes["cache_tokens"] = self.cache_tokens
        if self.nic_bytes_per_s:
            changes["nic_bytes_per_s"] = self.nic_bytes_per_s
        return msgspec.structs.replace(self.costs, **changes)

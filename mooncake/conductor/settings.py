# SPDX-License-Identifier: Apache-2.0
"""The settings of the conductor: how instances are chosen and watched."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from mooncake.errors import InvalidArgument
from mooncake.types import KvTransfer

Seconds = Annotated[float, Meta(gt=0)]

Scheduling = Literal["overlap", "kvcache_centric", "cache_aware", "load", "round_robin", "random"]


@dataclass(frozen=True)
class SchedulingSettings:
    """How instances are chosen and watched."""

    scheduling: Scheduling = "overlap"
    "How instances are chosen: by completion with overlapped loading, the paper, cache, load, turn or chance."

    kvcache_balancing_threshold: Annotated[float, Meta(ge=1)] = 1.5
    "`kvcache_centric` transfers a prefix that is longer than an instance's own by more than this factor."

    kv_transfer: KvTransfer = "auto"
    "How KV goes from prefill to decode: through the `pool`, by `push` where possible, or the faster one."

    shares_blocks: bool = True
    "Whether instances can load blocks that others hold; from the store, once that publishes what it has."

    engines_share_blocks: bool = False
    "Whether engines that are not our workers (vLLM) can load each other's blocks, through the store."

    admission: Literal["none", "baseline", "early", "predicted", "goodput"] = "goodput"
    "Requests admitted: all, by each stage alone, by present or predicted load, or by value and SLO."

    slo_ttft_s: Annotated[float, Meta(ge=0)] = 0.0
    "Time to the first token wanted by requests that name none; 0 for no limit."

    slo_tbt_s: Annotated[float, Meta(ge=0)] = 0.0
    "Time between tokens wanted by requests that name none; 0 for no limit."

    audit_share: Annotated[float, Meta(ge=0, le=1)] = 0.01
    "Share of rejected requests that are served all the same, to measure how many of them meet their SLOs."

    turn_share: Annotated[float, Meta(gt=0, le=1)] = 0.05
    "Share of the instances' time that `goodput` gives to requests which its price would refuse."

    scaling_utilization: Annotated[float, Meta(gt=0, lt=1)] = 0.85
    "Largest part of an instance's time that the number of instances desired for its pool lets it be busy."

    scaling_window_s: Annotated[float, Meta(ge=30)] = 300.0
    "The desired number of instances falls only to the largest one that was needed within this time."

    explained_requests: Annotated[int, Meta(ge=0)] = 10_000
    "Number of latest requests that can be explained; 0 remembers none."

    explained_size_bytes: Annotated[int, Meta(ge=0)] = 128 << 20
    "Memory for these explanations."

    block_tokens: Annotated[int, Meta(gt=0)] = 32
    "Tokens per KV block in the workers; prompts are matched in such blocks."

    max_requests_per_instance: Annotated[int, Meta(gt=0)] = 256
    "Requests that one instance may have at a time; beyond that requests are refused with a time to retry."

    probe_interval_s: Seconds = 2.0
    "Interval between health probes of a ready instance."

    suspect_probe_interval_s: Seconds = 0.5
    "Interval between health probes of an instance that is starting, or that failed once."

    max_probe_interval_s: Seconds = 10.0
    "Longest interval between health probes of a lost instance; the interval doubles up to it."

    probe_timeout_s: Seconds = 5.0
    "How long an instance may take to answer a probe."

    failures_to_down: Annotated[int, Meta(gt=0)] = 3
    "Consecutive failed probes after which an instance counts as lost and its cached blocks as gone."

    slow_start_s: Annotated[float, Meta(ge=0)] = 10.0
    "Time for which an instance that just became ready gets less than its share of the work."

    pool_events: str = ""
    "ZeroMQ endpoint of the store's KV events, such as `tcp://10.0.0.1:5557`; empty: its blocks are unknown."

    pool_events_replay: str = ""
    "Endpoint that replays the store's KV events to subscribers that joined late or missed some."

    kv_events_listen: str = ""
    "Endpoint for engines that connect here to publish KV events; empty: the address that they name."

    event_sources: tuple[str, ...] = ()
    "KV events of engines that name none: `host:port=tcp://host:5557[=tcp://host:5558]`, one for each rank."

    assumed_tokens: Annotated[int, Meta(ge=0)] = 262_144
    "Tokens of its prompts whose KV an instance without KV events is assumed to keep."

    plain_engines: bool = False
    "Probe engines without TLS although the cluster has it: for engines without certificates of this cluster."

    def __post_init__(self) -> None:
        for given in self.event_sources:
            if not re.fullmatch(r"[^=\s]+:\d{1,5}(=(tcp|ipc)://[^=\s]+){1,2}", given):
                raise InvalidArgument("event_sources", given, "host:port=tcp://host:port")

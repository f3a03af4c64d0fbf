"""The settings of the conductor: how instances are chosen and watched."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from mooncake.errors import InvalidArgument

Seconds = Annotated[float, Meta(gt=0)]

Scheduling = Literal["overlap", "kvcache_centric", "cache_aware", "load", "round_robin", "random"]


@dataclass(frozen=True)
class SchedulingSettings:
    """How instances are chosen and watched."""

    scheduling: Scheduling = "overlap"
    "How an instance is chosen: soonest done when loads overlap, by the paper, by cache, load, turn, chance."

    kvcache_balancing_threshold: Annotated[float, Meta(ge=1)] = 1.5
    "`kvcache_centric` transfers a prefix that is longer than an instance's own by more than this factor."

    shares_blocks: bool = True
    "Whether an instance can load blocks that another one holds. Once the store tells what it has, it lends."

    engines_share_blocks: bool = False
    "Whether engines that are not our workers (vLLM) can load each other's blocks, through the store."

    uses_per_copy: Annotated[float, Meta(gt=0)] = 10.0
    "Uses in a minute for which a hot prefix deserves one more instance that keeps a copy."

    admission: Literal["none", "baseline", "early", "predicted", "goodput"] = "goodput"
    "Who is let in: all, by each stage for itself, by present load, by predicted load, or by worth and SLO."

    slo_ttft_s: Annotated[float, Meta(ge=0)] = 0.0
    "Time within which the first token is wanted by requests that don't say; 0 for no limit."

    slo_tbt_s: Annotated[float, Meta(ge=0)] = 0.0
    "Time between tokens that is wanted by requests that don't say; 0 for no limit."

    audit_share: Annotated[float, Meta(ge=0, le=1)] = 0.01
    "Share of rejected requests that are served all the same, to see how many of them meet their SLOs."

    turn_share: Annotated[float, Meta(gt=0, le=1)] = 0.05
    "Share of the instances' time that `goodput` gives to requests which its price would refuse."

    explained_requests: Annotated[int, Meta(ge=0)] = 10_000
    "So many of the latest requests can be explained; 0 remembers none."

    explained_size_bytes: Annotated[int, Meta(ge=0)] = 128 << 20
    "Memory for these explanations."

    block_tokens: Annotated[int, Meta(gt=0)] = 32
    "Tokens per KV block in the workers; prompts are matched in such blocks."

    max_requests_per_instance: Annotated[int, Meta(gt=0)] = 256
    "Requests that one instance may have at a time; beyond that clients are told to come back later."

    probe_interval_s: Seconds = 2.0
    "How often a ready instance is asked for its health."

    suspect_probe_interval_s: Seconds = 0.5
    "How often an instance is asked that is starting, or that failed once."

    max_probe_interval_s: Seconds = 10.0
    "The slowest rate at which a lost instance is asked; the interval doubles up to it."

    probe_timeout_s: Seconds = 5.0
    "How long an instance may take to answer a probe."

    failures_to_down: Annotated[int, Meta(gt=0)] = 3
    "Failed probes in a row after which an instance counts as lost and its cached blocks as gone."

    slow_start_s: Annotated[float, Meta(ge=0)] = 10.0
    "How long an instance that just became ready gets less than its share of the work."

    pool_events: str = ""
    "ZeroMQ endpoint of the store's KV events, such as `tcp://10.0.0.1:5557`; empty: its blocks are unknown."

    pool_events_replay: str = ""
    "Endpoint that replays the store's KV events to those who come late or missed some."

    kv_events_listen: str = ""
    "Endpoint for engines whose KV events come by a connection of theirs; empty: the address that they name."

    event_sources: tuple[str, ...] = ()
    "KV events of engines that name none: `host:port=tcp://host:5557`, and `=tcp://host:5558` for replay."

    assumed_tokens: Annotated[int, Meta(ge=0)] = 262_144
    "Tokens whose KV an instance without KV events is taken to keep of the prompts it was given."

    plain_engines: bool = False
    "Engines are asked without TLS although the cluster has it: those of others, which know none of ours."

    def __post_init__(self) -> None:
        for given in self.event_sources:
            if not re.fullmatch(r"[^=\s]+:\d{1,5}(=(tcp|ipc)://[^=\s]+){1,2}", given):
                raise InvalidArgument("event_sources", given, "host:port=tcp://host:port")

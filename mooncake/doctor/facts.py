# SPDX-License-Identifier: Apache-2.0
"""The facts of one examination: what gateway, engines, store and host answered.

It owns their shapes only. None means unknown, which is never a fault by itself: checks judge what is known.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class Trouble(enum.StrEnum):
    """Why a server did not give the expected answer."""

    NONE = ""
    REFUSED = "refused"
    "Nothing listens, or the host is not reached."

    SILENT = "silent"
    "It does not answer in time."

    TLS = "tls"
    "One side uses TLS, the other does not."

    CERTIFICATE = "certificate"
    "A certificate was not accepted."

    DENIED = "denied"
    "The credential was not accepted."

    NO_HTTP = "no_http"
    "Something listens that does not answer in HTTP."

    OTHER = "other"


@dataclass
class Reach:
    """Whether a server answered; ``detail`` explains a trouble as text."""

    trouble: Trouble = Trouble.NONE
    detail: str = ""

    @property
    def is_fine(self) -> bool:
        return self.trouble is Trouble.NONE


class EngineKind(enum.StrEnum):
    OWN = "mooncake"
    VLLM = "vllm"
    SGLANG = "sglang"
    OTHER = "other"


@dataclass
class PublisherFacts:
    """Where an engine publishes KV events, and what came from there while it computed a prompt."""

    endpoint: str
    replay_endpoint: str = ""
    topic: str = ""
    may_connect: bool = False
    "The publisher may connect to a subscriber instead of listening: silence here proves nothing."
    num_batches: int = 0
    num_unreadable: int = 0
    topics: tuple[str, ...] = ()
    "Topics of the batches that arrived."
    is_canary_seen: bool = False
    "The blocks of the prompt were among the events."
    canary_hashes: tuple[str, ...] = ()
    "The engine's own names of these blocks, in order."
    replay_answers: bool | None = None
    "Whether a replay came to its end."
    problem: str = ""


@dataclass
class Shot:
    """One canary request and its answer."""

    status: int = 0
    error: str = ""
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    "None: the answer does not say."
    counted_hits: int | None = None
    "By how many tokens the engine's counters of cached tokens rose."
    counted_external_hits: int | None = None
    text: str = ""
    logprob: float | None = None
    "Log probability of the first token of the answer."
    route: str = ""
    "How the gateway says that the request was routed."
    prefill: str = ""
    decode: str = ""
    seconds: float = 0.0

    @property
    def is_answered(self) -> bool:
        return self.status == 200

    @property
    def reused(self) -> int | None:
        """Tokens that were not computed, from the answer or else from counters."""
        if self.cached_tokens:
            return self.cached_tokens
        counted = [one for one in (self.counted_hits, self.counted_external_hits) if one is not None]
        return max([*counted, self.cached_tokens or 0]) if counted or self.cached_tokens is not None else None


@dataclass
class EngineFacts:
    """One engine; ``role`` is that in the gateway's list, "" where there is none."""

    address: str
    reach: Reach = field(default_factory=Reach)
    kind: EngineKind = EngineKind.OTHER
    role: str = ""
    version: str = ""
    models: tuple[str, ...] = ()
    max_model_len: int | None = None
    block_tokens: int | None = None
    has_prefix_cache: bool | None = None
    hash_algorithm: str = ""
    hash_seed: str | None = None
    "PYTHONHASHSEED of the engine, where it shows it;  for none."
    cache_dtype: str = ""
    kv_identity: str = ""
    connectors: tuple[str, ...] | None = None
    "Names of its connectors; None: it does not say."
    connector_role: str = ""
    has_external_lookups: bool | None = None
    "Whether it has looked for a prompt outside its own memory."
    mean_prompt_tokens: float | None = None
    num_prompts: int = 0
    num_waiting: int = 0
    usage: float | None = None
    "Share of its KV memory in use."
    clock_skew_s: float | None = None
    max_files: int | None = None
    started_at: float | None = None
    publishers: list[PublisherFacts] | None = None
    "None: it does not say whether it publishes."
    first: Shot | None = None
    "The shared prompt, sent there for the first time."
    second: Shot | None = None
    "The same once more."
    other_salt: Shot | None = None
    "The same under another salt."
    crossed_tokens: int | None = None
    "Tokens of the shared prompt that it had from elsewhere, in the best of its tries."
    earlier: Shot | None = None
    "The prompt of an earlier examination."
    store_growth: int | None = None
    "By how many objects the store grew while it computed a new prompt."
    skipped: str = ""
    "Why no canary was sent."


@dataclass
class InstanceFacts:
    """One row of the gateway's status."""

    address: str
    role: str
    health: str
    detail: str = ""
    num_blocks: int = 0
    is_silent: bool | None = None
    "The conductor reads no events of it."
    has_answered: bool | None = None
    "It has answered a probe of the conductor; None: the gateway does not show it."


@dataclass
class GatewayFacts:
    """The gateway, or another server of the OpenAI API in front of engines."""

    address: str
    reach: Reach = field(default_factory=Reach)
    is_ours: bool = False
    version: str = ""
    models: tuple[str, ...] = ()
    key_refused: str = ""
    "Message with which it refused the client's key."
    status_refused: str = ""
    scheduling: str = ""
    protocol: str = ""
    conductor: str = ""
    conductors: dict[str, bool] = field(default_factory=dict)
    "Whether it reaches each conductor, by address; empty where the conductor runs inside it."
    degraded: str = ""
    block_tokens: int | None = None
    instances: list[InstanceFacts] | None = None
    "None: it does not show them."
    clock_skew_s: float | None = None
    max_files: int | None = None
    first: Shot | None = None
    second: Shot | None = None

    @property
    def absent(self) -> list[InstanceFacts]:
        """Instances that never answered, while another one of their role did.

        A gateway may list instances by name before they exist, as that of a rendered cluster does. A role of
        which no instance ever answered is a fault all the same.
        """
        rows = self.instances or []
        served = {row.role for row in rows if row.has_answered is not False}
        return [row for row in rows if row.has_answered is False and row.role in served]


@dataclass
class StoreFacts:
    """The store, as its master reports it, and an object that was put and read back."""

    address: str
    reach: Reach = field(default_factory=Reach)
    capacity_bytes: int = 0
    allocated_bytes: int = 0
    num_objects: int = 0
    idle_segments: tuple[str, ...] = ()
    "Segments that take no objects, with their states."
    num_segments: int = 0
    num_writable: int = 1
    "Segments of memory that take objects."
    num_wrong_reports: int = 0
    put_refusal: str = ""
    put_refusal_code: str = ""
    ssd_failures: dict[str, str] = field(default_factory=dict)
    "SSD segment -> why a durable object was not copied to it."
    ssd_delays: dict[str, str] = field(default_factory=dict)
    "SSD segment -> how long a durable object was not copied to it, although no copy failed."
    is_read_back: bool | None = None
    object_problem: str = ""


@dataclass
class HostFacts:
    """The host on which the examination runs."""

    is_of_cluster: bool = True
    "Whether any of the examined processes run here."
    shared_memory_bytes: int | None = None
    locked_memory_bytes: int | None = None
    "Limit of locked memory; negative: none."
    num_rdma_devices: int = 0
    num_huge_pages: int | None = None
    disk: str = ""
    disk_bytes_per_s: float | None = None
    disk_problem: str = ""


@dataclass
class Facts:
    """Everything known after one examination."""

    engines: list[EngineFacts] = field(default_factory=list)
    gateway: GatewayFacts | None = None
    store: StoreFacts | None = None
    host: HostFacts | None = None
    not_examined: list[tuple[str, str]] = field(default_factory=list)
    "Parts that were left out, with the reason."


@dataclass(frozen=True)
class Expectations:
    """What the operator expects of the deployment."""

    prompt_tokens: int = 0
    "Length of typical prompts; 0: unknown."
    events_topic: str = ""
    disk_bytes_per_s: float = 0.0
    min_files: int = 4096
    max_skew_s: float = 5.0
    shares_store: bool = False
    "Whether the engines share a store: one was named."

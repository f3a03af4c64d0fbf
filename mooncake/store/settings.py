"""How a master behaves: what an operator may choose, and what follows from it."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

import msgspec

from mooncake.errors import InvalidArgument
from mooncake.setting_types import AlsoFrom, Port, Secret

Seconds = Annotated[float, msgspec.Meta(gt=0)]

ELECTIONS = ("etcd", "redis", "file")
"""Where masters may elect a leader."""


@dataclasses.dataclass(frozen=True)
class MasterSettings:
    """Keep the store's metadata: which objects there are and where their bytes lie."""

    host: str = "127.0.0.1"
    "Address to listen on."

    port: Port = 50051
    "Port for clients and nodes; 0 takes a free one."

    metrics_port: Port = 0
    "Port of `/metrics` and the admin calls; 0 takes a free one."

    metrics_host: str = ""
    "Address that these are served on; empty takes `host`."

    admin_api_key: Annotated[str, Secret, AlsoFrom("ADMIN_API_KEY")] = ""
    "What admin calls that change something must send as X-API-Key; empty refuses them all."

    oplog: str = ""
    "File that keeps the metadata over a restart of the master; empty keeps it in memory only."

    oplog_flush: bool = True
    "Answer durable puts, and removals from SSD, when the oplog would show them after a loss of power."

    oplog_repair: bool = False
    "Start with what is whole of a damaged oplog, keep a copy of it, and ask all nodes what they hold."

    election: str = ""
    "`etcd://host:port[;host:port]`, `redis://host:port` or `file:///path` that elects; empty: leads alone."

    cluster_id: Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9_.-]{1,64}$")] = "mooncake_cluster"
    "Names the masters that stand for each other, where several clusters elect through one server."

    advertise: str = ""
    "`host:port` at which clients, nodes and standbys reach this master; empty takes `host` and the port."

    election_lease_s: Annotated[float, msgspec.Meta(ge=0.2, le=60)] = 2.0
    "Seconds that a leader leads without renewing; a standby takes over when so much time has passed."

    standby_ack_s: Seconds = 1.0
    "Seconds that an answer waits for a standby; one that takes longer is struck off before it is given."

    orphan_s: Annotated[float, msgspec.Meta(ge=0)] = 10.0
    "Seconds without the leader and its standbys until another begins with what nodes report; 0: never."

    lease_s: Seconds = 10.0
    "Seconds that a lookup protects an object from removal, eviction and reuse of its space."

    put_s: Seconds = 30.0
    "Seconds between the start and the end of a put; an older reservation is given up."

    grace_s: Annotated[float, msgspec.Meta(ge=0)] = 5.0
    "Seconds after a missed put deadline until the space is used again, because writes may land late."

    heartbeat_s: Seconds = 1.0
    "Seconds between two heartbeats of a node; one that misses three is suspected."

    segment_ttl_s: Seconds = 5.0
    "Seconds that a suspected node has to come back before its objects are forgotten."

    high_watermark: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.95
    "Share of the capacity in use beyond which a put evicts ahead of need."

    eviction_ratio: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.05
    "Share of the capacity that such an eviction frees below the watermark."

    demote_watermark: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.5
    "Share of a node's memory that objects without a copy on its SSD may take; 0 copies each at once."

    promote_after_hits: Annotated[int, msgspec.Meta(ge=0)] = 2
    "Lookups that find an object only on SSD, lately, until it is copied to memory again; 0: it never is."

    hot_uses_per_s: Annotated[float, msgspec.Meta(ge=0)] = 100.0
    "Lookups of one object in a second from which on it gets more replicas; 0: it never does."

    max_hot_replicas: Annotated[int, msgspec.Meta(ge=1)] = 3
    "Replicas in memory that an object may have because it is hot."

    poll_s: Seconds = 10.0
    "Seconds after which a node that waits for tasks is answered that there are none."

    tasks_per_segment: Annotated[int, msgspec.Meta(ge=1)] = 64
    "Copies that may be under way to one segment of a node at a time."

    eviction_policy: Literal["lru", "lfu", "chain"] = "lru"
    "Who leaves first: `lru`, `lfu` (fewest lookups), or `chain` (lru, but no block before those after it)."

    evict_undemoted: bool = True
    "Whether objects without a copy on SSD may be evicted from memory, as a last resort."

    strict_tenants: bool = False
    "Whether only tenants that have a quota may put."

    max_pin_s: Seconds = 3600.0
    "Seconds that a soft pin may last; longer ones are cut to that."

    report_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    "Seconds between two summaries in the log; 0: none."

    tenants_file: str = ""
    "YAML file with tenants' quotas (`tenants: [{name, quota}]`), rewritten when one is set; empty: none."

    kv_events_endpoint: str = ""
    "ZeroMQ endpoint on which KV events are published, such as `tcp://*:5557`; empty: none are."

    kv_events_replay_endpoint: str = ""
    "ZeroMQ endpoint that answers subscribers who missed events; empty: none does."

    kv_events_backend: str = "mooncake"
    "What the events call this store (`backend_id`)."

    kv_events_legacy: bool = True
    "Whether events carry vLLM's fields (`type`, `block_hashes`), too."

    kv_events_object_key: bool = True
    "Whether events carry the object's key."

    kv_events_queue: Annotated[int, msgspec.Meta(ge=1)] = 65536
    "Events that may wait to be sent; beyond it the oldest are dropped."

    def __post_init__(self) -> None:
        scheme, found, rest = self.election.partition("://")
        if self.election and not (found and rest and scheme in ELECTIONS):
            allowed = "etcd://host:port[;host:port], redis://host:port, file:///path, or nothing"
            raise InvalidArgument("election", self.election, allowed)
        if self.eviction_ratio >= self.high_watermark:
            raise InvalidArgument("eviction_ratio", self.eviction_ratio, "less than high_watermark")

    @property
    def rest_s(self) -> float:
        """How long after its last word a promise of this master may still be used by someone."""
        return max(self.lease_s, self.put_s + self.grace_s)

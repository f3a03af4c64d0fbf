# SPDX-License-Identifier: Apache-2.0
"""Settings of a master: what an operator may choose, and what follows from it."""

from __future__ import annotations

import dataclasses
import re
from typing import Annotated, Literal

import msgspec

from mooncake.errors import InvalidArgument
from mooncake.setting_types import AlsoFrom, Port, Secret, Size

Seconds = Annotated[float, msgspec.Meta(gt=0)]

CLUSTER_ID = "^[A-Za-z0-9_-][A-Za-z0-9_.-]{0,63}$"
"""Names of clusters. One is also the name of a folder, so it is neither ``..`` nor contains a slash."""

ELECTIONS = ("etcd", "redis", "k8s", "file")
"""Services and files through which masters may elect a leader."""


@dataclasses.dataclass(frozen=True)
class MasterSettings:
    """Keep the store's metadata: which objects exist and where their bytes are."""

    host: str = "127.0.0.1"
    "Address to listen on."

    port: Port = 50051
    "Port for clients and nodes; 0 takes a free one."

    metrics_port: Port = 0
    "Port of `/metrics` and the admin calls; 0 takes a free one."

    metrics_host: str = ""
    "Address that these are served on; empty takes `host`."

    admin_api_key: Annotated[str, Secret, AlsoFrom("ADMIN_API_KEY")] = ""
    "Key that admin calls with side effects must send as X-API-Key; empty refuses them all."

    oplog: str = ""
    "File that keeps the metadata over a restart of the master; empty keeps it in memory only."

    oplog_flush: bool = True
    "Answer durable puts, and removals from SSD, only when the oplog records them durably."

    oplog_repair: bool = False
    "Start with the intact records of a damaged oplog, keep a copy of it, and ask all nodes to report."

    election: str = ""
    "`etcd://host:port[;host:port]`, `redis://…`, `k8s://namespace` or `file:///path`; empty: no others."

    cluster_id: Annotated[str, msgspec.Meta(pattern=CLUSTER_ID)] = "mooncake_cluster"
    "Name of this cluster, where several elect through one server or have folders in one `root_fs_dir`."

    root_fs_dir: str = ""
    "Directory on each host in which nodes without an SSD tier have one (`docs/servers.md`); empty: none."

    root_fs_size_bytes: Annotated[int, Size, msgspec.Meta(ge=0)] = 0
    "Limit of each process's SSD tier there; 0: 90 % of what is free on that file system."

    advertise: str = ""
    "`host:port` at which clients, nodes and standbys reach this master; empty takes `host` and the port."

    election_lease_s: Annotated[float, msgspec.Meta(ge=0.2, le=60)] = 2.0
    "Seconds that a leader leads without renewal; after them a standby takes over."

    standby_ack_s: Seconds = 1.0
    "Seconds that an answer waits for a standby; a slower one is removed from the list before it is sent."

    orphan_s: Annotated[float, msgspec.Meta(ge=0)] = 10.0
    "Seconds without the leader and its standbys until another begins with nodes' reports; 0: never."

    lease_s: Seconds = 10.0
    "Seconds that a lookup protects an object from removal, eviction and reuse of its space."

    put_s: Seconds = 30.0
    "Seconds between the start and the end of a put; an older reservation is given up."

    grace_s: Annotated[float, msgspec.Meta(ge=0)] = 5.0
    "Seconds after a missed put deadline until the space is reused, because writes may land late."

    heartbeat_s: Seconds = 1.0
    "Seconds between two heartbeats of a node; one that misses three is suspected."

    segment_ttl_s: Seconds = 5.0
    "Seconds that a suspected node has to return before its objects are removed."

    high_watermark: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.95
    "Share of the capacity in use beyond which a put evicts ahead of need."

    eviction_ratio: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.05
    "Share of the capacity that such an eviction frees below the watermark."

    demote_watermark: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.5
    "Share of a node's memory that objects without a copy on its SSD may take; 0 copies each at once."

    promote_after_hits: Annotated[int, msgspec.Meta(ge=0)] = 2
    "Recent lookups that find an object only on SSD until it is copied to memory again; 0: it never is."

    hot_uses_per_s: Annotated[float, msgspec.Meta(ge=0)] = 100.0
    "Lookups of one object per second above which it gets more replicas; 0: it never does."

    max_hot_replicas: Annotated[int, msgspec.Meta(ge=1)] = 3
    "Replicas in memory that a hot object may have."

    device_uses_per_s: Annotated[float, msgspec.Meta(ge=0)] = 5.0
    "Lookups per second above which an object gets a copy in device memory of its host; 0: it never does."

    device_hot_s: Annotated[float, msgspec.Meta(ge=0)] = 2.0
    "Seconds that it must be looked up that often before it gets that copy."

    device_cool_s: Annotated[float, msgspec.Meta(ge=0)] = 30.0
    "Seconds that it must be looked up less than a quarter as often until that copy is removed."

    poll_s: Seconds = 10.0
    "Seconds after which a node that waits for tasks gets an empty answer."

    tasks_per_segment: Annotated[int, msgspec.Meta(ge=1)] = 64
    "Copies to one segment of a node that may be under way at a time."

    eviction_policy: Literal["lru", "lfu", "chain"] = "lru"
    "Which goes first: `lru`, `lfu` (fewest lookups), or `chain` (lru, but no block before its successors)."

    evict_undemoted: bool = True
    "Whether objects without a copy on SSD may be evicted from memory, as a last resort."

    strict_tenants: bool = False
    "Whether only tenants that have a quota may put."

    max_pin_s: Seconds = 3600.0
    "Seconds that a soft pin may last; longer ones are shortened."

    log_blocks: bool = False
    "Log every object that a client writes or may read (`block_write`, `block_read`), with its address."

    report_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    "Seconds between two summaries in the log; 0: none."

    tenants_file: str = ""
    "YAML file with tenants' quotas (`tenants: [{name, quota}]`), rewritten when one is set; empty: none."

    kv_events_endpoint: str = ""
    "ZeroMQ endpoint on which KV events are published, such as `tcp://*:5557`; empty: none are."

    kv_events_replay_endpoint: str = ""
    "ZeroMQ endpoint that replays missed events to subscribers; empty: no replay."

    kv_events_backend: str = "mooncake"
    "Name of this store in the events (`backend_id`)."

    kv_events_legacy: bool = True
    "Whether events carry vLLM's fields (`type`, `block_hashes`) as well."

    kv_events_object_key: bool = True
    "Whether events carry the object's key."

    kv_events_queue: Annotated[int, msgspec.Meta(ge=1)] = 65536
    "Events that may wait to be sent; beyond it the oldest are dropped."

    def __post_init__(self) -> None:
        scheme, found, rest = self.election.partition("://")
        if self.election and not (found and rest and scheme in ELECTIONS):
            allowed = (
                "etcd://host:port[;host:port], redis://host:port, k8s://namespace, file:///path, or nothing"
            )
            raise InvalidArgument("election", self.election, allowed)
        check_cluster_id(self.cluster_id)
        check_root_fs_dir(self.root_fs_dir)
        if self.eviction_ratio >= self.high_watermark:
            raise InvalidArgument("eviction_ratio", self.eviction_ratio, "less than high_watermark")

    @property
    def rest_s(self) -> float:
        """How long after the last reply of this master its promises may still be in use."""
        return max(self.lease_s, self.put_s + self.grace_s)


def check_cluster_id(name: str) -> None:
    """Check the name of a cluster.

    Raises:
        InvalidArgument: it can't be used as the name of a folder.
    """
    if re.fullmatch(CLUSTER_ID, name) is None or not name.isprintable():
        allowed = "1 to 64 of letters, digits, `_`, `-` and, after the first, `.`"
        raise InvalidArgument("cluster_id", name, allowed)


def check_root_fs_dir(path: str) -> None:
    """Check the path of a ``root_fs_dir``; an empty one is allowed.

    Raises:
        InvalidArgument: it is relative, has a part ``..``, or a character that can't be printed.
    """
    if path and (not path.startswith("/") or ".." in path.split("/") or not path.isprintable()):
        raise InvalidArgument("root_fs_dir", path, "an absolute path without `..`")

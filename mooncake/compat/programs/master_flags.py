# SPDX-License-Identifier: Apache-2.0
"""Every flag of the existing ``mooncake_master``: its default, its type, and its meaning here.

A flag either sets a field of ``MasterSettings`` (``field``), is used by ``master.py`` (``TRANSLATED``), or
has no effect here, for the reason given; then the program warns when the flag has another value than
its default, because a launcher should know that a requested feature is missing.
"""

from __future__ import annotations

from dataclasses import dataclass

from mooncake.compat.programs.gflags import (
    BOOLEAN,
    DURATION,
    NO_ARENA,
    PORT,
    POSITIVE_DURATION,
    RATIO,
    SECONDS,
    SIZE,
    TEXT,
    FlagType,
    choice,
    number,
    whole,
)

TRANSLATED = "used"
COUNT = whole(0)
OBJECT_STORE = choice("local", "s3", empty="local")
CATALOG = choice("embedded", "redis", "payload", empty="embedded")
UNLIMITED_BYTES = (1 << 63) - 1


@dataclass(frozen=True)
class Flag:
    """One flag. ``default`` is that of the existing program, as text."""

    default: str
    kind: FlagType
    field: str = ""
    """Field of MasterSettings; TRANSLATED when ``master.py`` uses the flag; "" when it has no effect."""
    why_not: str = ""


def _without_effect(why: str, **flags: tuple[str, FlagType]) -> dict[str, Flag]:
    return {name: Flag(default, kind, why_not=why) for name, (default, kind) in flags.items()}


FLAGS: dict[str, Flag] = {
    "config_path": Flag("", TEXT, TRANSLATED),
    # RPC
    "rpc_port": Flag("0", PORT, TRANSLATED),
    "port": Flag("50051", PORT, TRANSLATED),
    "rpc_address": Flag("0.0.0.0", TEXT, "host"),
    **_without_effect(
        "one event loop serves all connections", rpc_thread_num=("0", COUNT), max_threads=("16", COUNT)
    ),
    **_without_effect("the address to listen on is --rpc_address", rpc_interface=("", TEXT)),
    **_without_effect("idle connections cost nothing and are kept", rpc_conn_timeout_seconds=("0", COUNT)),
    **_without_effect("it is always on", rpc_enable_tcp_no_delay=("true", BOOLEAN)),
    # HTTP
    "metrics_port": Flag("9003", PORT, "metrics_port"),
    "metrics_host": Flag("0.0.0.0", TEXT, "metrics_host"),
    "enable_metric_reporting": Flag("true", BOOLEAN, TRANSLATED),
    "enable_http_metadata_server": Flag("false", BOOLEAN, TRANSLATED),
    "http_metadata_server_host": Flag("0.0.0.0", TEXT, TRANSLATED),
    "http_metadata_server_port": Flag("8080", PORT, TRANSLATED),
    **_without_effect(
        "entries expire when their owners stop renewing them",
        enable_metadata_cleanup_on_timeout=("false", BOOLEAN),
    ),
    # Leases and eviction
    "default_kv_lease_ttl": Flag("10000", DURATION, "lease_s"),
    **_without_effect(
        "clients set how long a soft pin lasts; ours request 30 minutes by default",
        default_kv_soft_pin_ttl=("1800000", DURATION),
    ),
    "max_kv_soft_pin_ttl": Flag("86400000", POSITIVE_DURATION, "max_pin_s"),
    **_without_effect(
        "softly pinned objects are evicted last; use a hard pin for objects that must stay",
        allow_evict_soft_pinned_objects=("true", BOOLEAN),
    ),
    "eviction_ratio": Flag("0.05", number(0, 1), "eviction_ratio"),
    "eviction_high_watermark_ratio": Flag("0.9", number(0, 1), "high_watermark"),
    "client_ttl": Flag("10", number(0), "segment_ttl_s"),
    "put_start_discard_timeout_sec": Flag("30", number(0), "put_s"),
    "put_start_release_timeout_sec": Flag("600", SECONDS, TRANSLATED),
    # Placement
    **_without_effect(
        "of a few segments the one with the most free space is used, a writer's own and preferred ones first",
        allocation_strategy=(
            "random",
            choice("random", "free_ratio_first", "ssd_free_ratio_first", "cxl", "local_first"),
        ),
    ),
    **_without_effect("there is one allocator", memory_allocator=("offset", choice("offset", "cachelib"))),
    **_without_effect(
        NO_ARENA, use_mmap_arena_allocator=("false", BOOLEAN), mmap_arena_pool_size=("8589934592", COUNT)
    ),
    # SSD
    **_without_effect(
        "nodes that have an SSD tier always use it (--root_fs_dir, mooncaked --nvme-path)",
        enable_offload=("false", BOOLEAN),
        offload_on_evict=("false", BOOLEAN),
    ),
    "root_fs_dir": Flag("", TEXT, "root_fs_dir"),
    "global_file_segment_size": Flag(str(UNLIMITED_BYTES), SIZE, TRANSLATED),
    **_without_effect("a full SSD tier always evicts", enable_disk_eviction=("true", BOOLEAN)),
    **_without_effect(
        "--global_file_segment_size limits what each process keeps in --root_fs_dir",
        quota_bytes=("0", SIZE),
    ),
    "offload_force_evict": Flag("false", BOOLEAN, TRANSLATED),
    "promotion_on_hit": Flag("false", BOOLEAN, TRANSLATED),
    "promotion_admission_threshold": Flag("2", COUNT, TRANSLATED),
    **_without_effect(
        "nodes request as many copies as they have room for",
        offloading_queue_limit=("50000", COUNT),
        offload_cap_ratio=("0.5", RATIO),
        promotion_max_per_heartbeat=("1", whole(1)),
        promotion_queue_limit=("50000", COUNT),
    ),
    # Hot objects
    "dynamic_replication_mode": Flag("off", choice("off", "observe", "enforce"), TRANSLATED),
    "dynamic_replication_admission_qps_threshold": Flag("0.8", number(0), TRANSLATED),
    **_without_effect(
        "uses are counted per second",
        dynamic_replication_heat_window_seconds=("10", SECONDS),
    ),
    "dynamic_replication_max_memory_replicas": Flag("2", whole(1, 64), TRANSLATED),
    # High availability
    "enable_ha": Flag("false", BOOLEAN, TRANSLATED),
    "ha_backend_type": Flag("etcd", choice("etcd", "redis", "k8s"), TRANSLATED),
    "ha_backend_connstring": Flag("", TEXT, TRANSLATED),
    "etcd_endpoints": Flag("", TEXT, TRANSLATED),
    "cluster_id": Flag("mooncake_cluster", TEXT, "cluster_id"),
    "enable_oplog": Flag("false", BOOLEAN, TRANSLATED),
    **_without_effect(
        "standbys receive records as they are written",
        oplog_poll_interval_ms=("1000", COUNT),
        oplog_batch_max_entries=("1024", COUNT),
        batch_oplog_retry_timeout_sec=("180", COUNT),
    ),
    "pod_namespace": Flag("", TEXT, TRANSLATED),
    **_without_effect("a Lease names its holder by its address", pod_name=("", TEXT)),
    # Snapshots
    "enable_snapshot": Flag("false", BOOLEAN, TRANSLATED),
    "enable_snapshot_restore": Flag("false", BOOLEAN, TRANSLATED),
    "snapshot_backup_dir": Flag("", TEXT, TRANSLATED),
    **_without_effect(
        "the log is appended to before each reply and compacted when it has grown",
        snapshot_interval_seconds=("600", COUNT),
        snapshot_retention_count=("2", COUNT),
        snapshot_child_timeout_seconds=("300", COUNT),
    ),
    **_without_effect(
        "the log is a file of this host; standbys keep copies",
        snapshot_object_store_type=("", OBJECT_STORE),
        snapshot_catalog_store_type=("", CATALOG),
        snapshot_catalog_store_connstring=("", TEXT),
        snapshot_catalog_backend_type=("", CATALOG),
        snapshot_catalog_backend_connstring=("", TEXT),
        snapshot_payload_store_type=("", OBJECT_STORE),
        snapshot_payload_backend_type=("", OBJECT_STORE),
    ),
    # Jobs
    **_without_effect(
        "nodes request tasks when they have capacity, and a task that is late is planned again",
        max_total_finished_tasks=("10000", COUNT),
        max_total_pending_tasks=("10000", COUNT),
        max_total_processing_tasks=("10000", COUNT),
        pending_task_timeout_sec=("300", COUNT),
        processing_task_timeout_sec=("300", COUNT),
        max_retry_attempts=("10", COUNT),
    ),
    # Tenants
    "enable_multi_tenants": Flag("false", BOOLEAN, "strict_tenants"),
    "tenant_quota_connector_type": Flag("file", choice("file", "etcd"), TRANSLATED),
    "tenant_quota_connector_uri": Flag("", TEXT, TRANSLATED),
    # KV events
    "enable_kv_events": Flag("false", BOOLEAN, TRANSLATED),
    "kv_events_bind_endpoint": Flag("", TEXT, "kv_events_endpoint"),
    "kv_events_replay_endpoint": Flag("", TEXT, "kv_events_replay_endpoint"),
    "kv_events_backend_id": Flag("", TEXT, "kv_events_backend"),
    "kv_events_emit_legacy_compat": Flag("true", BOOLEAN, "kv_events_legacy"),
    "kv_events_emit_object_key": Flag("true", BOOLEAN, "kv_events_object_key"),
    "kv_events_queue_capacity": Flag("65536", whole(1, 1 << 24), "kv_events_queue"),
    **_without_effect(
        "the existing program ignores it, too: it cannot be derived from an object's key",
        kv_events_model_name=("", TEXT),
        kv_events_tenant_id=("default", TEXT),
        kv_events_additional_salt=("", TEXT),
        kv_events_lora_name=("", TEXT),
        kv_events_block_size=("0", COUNT),
        kv_events_dp_rank=("0", COUNT),
    ),
    # Hardware for which the master has no segments
    **_without_effect(
        "memory behind CXL is mounted by a node like any other",
        enable_cxl=("false", BOOLEAN),
        cxl_path=("/dev/dax0.0", TEXT),
        cxl_size=("8589934592", SIZE),
    ),
    **_without_effect(
        "NVMe over Fabrics is a file of the node that attaches it (mooncaked --nvme-path)",
        nof_eviction_ratio=("0.05", RATIO),
        nof_eviction_high_watermark_ratio=("0.9", RATIO),
        nof_heartbeat_interval_sec=("10", COUNT),
        nof_heartbeat_probe_timeout_ms=("1000", COUNT),
        nof_heartbeat_failures_threshold=("3", COUNT),
    ),
}
LEAST: dict[str, float] = {
    "default_kv_lease_ttl": 0.1,
    "client_ttl": 0.1,
    "put_start_discard_timeout_sec": 1.0,
    "eviction_high_watermark_ratio": 0.01,
    "promotion_admission_threshold": 1,
}
"""What 0 counts as, which the existing program accepts and which has no meaning here."""
BOOLEANS = frozenset(name for name, flag in FLAGS.items() if flag.kind is BOOLEAN)

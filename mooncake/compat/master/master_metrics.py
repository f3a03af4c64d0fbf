# SPDX-License-Identifier: Apache-2.0
"""The metrics page's part with the existing master's names, so that its dashboards go on working.

Written out here and not by prometheus-client, because some of these counters do not end in ``_total``.
Every value is read when the page is requested; the core counts (``request_counters.py`` and the counts of
its parts). Names that stay 0, because the events they count do not occur here, are in ``docs/metrics.md``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from mooncake import clock
from mooncake.store import messages as m
from mooncake.store.master.context import MasterContext
from mooncake.store.master.effects import Received
from mooncake.store.master.request_counters import SIZE_BOUNDS, RequestCounters
from mooncake.types import Tier

REQUESTS = (
    "exist_key",
    "put_start",
    "put_end",
    "put_revoke",
    "get_replica_list",
    "get_replica_list_by_regex",
    "remove",
    "remove_by_regex",
    "remove_all",
    "mount_segment",
    "unmount_segment",
    "remount_segment",
    "ping",
    "copy_start",
    "copy_end",
    "copy_revoke",
    "move_start",
    "move_end",
    "move_revoke",
    "evict_disk_replica",
    "create_copy_task",
    "create_move_task",
    "update_task",
    "query_task",
    "fetch_tasks",
)
BATCHES = (
    "exist_key",
    "query_ip",
    "replica_clear",
    "get_replica_list",
    "put_start",
    "put_end",
    "put_revoke",
)
OUTCOMES = ("requests", "failures", "partial_successes", "items", "failed_items")

_OF_COUNTS = {
    "master_evicted_key_count": "evicted_objects",
    "master_evicted_size_bytes": "evicted_bytes",
    "master_evicted_key_count_mem": "evicted_objects",
    "master_evicted_size_bytes_mem": "evicted_bytes",
    "master_put_start_discard_cnt": "expired_puts",
    "master_put_start_release_cnt": "expired_puts",
    "master_promotion_admitted_total": "promotions_admitted",
    "master_promotion_completed_total": "promoted_objects",
    "master_promotion_completed_bytes_total": "promoted_bytes",
    "master_promotion_failed_total": "promotions_failed",
    "master_promotion_rejected_frequency_total": "promotions_too_rare",
    "master_promotion_rejected_watermark_total": "promotions_no_room",
}
"""Counters, each with the name of the core's count."""
OF_REPLICATION = (
    "ha_oplog_last_sequence_id",
    "ha_oplog_applied_sequence_id",
    "ha_oplog_standby_lag",
    "ha_oplog_pending_entries",
    "ha_standby_state",
)
ALWAYS_0 = (
    "master_nof_allocated_bytes",
    "master_total_nof_capacity_bytes",
    *(f"master_promotion_candidate_{what}_total" for what in ("recorded", "admitted", "admission_rejected")),
    *(f"master_promotion_candidate_expired_{what}_total" for what in ("evaluated", "unevaluated")),
    "master_promotion_candidate_dropped_limit_total",
    "master_promotion_expired_total",
    "master_promotion_cancelled_total",
    "master_promotion_rejected_cap_total",
    "master_put_start_discarded_staging_size",
    "ha_pending_mutation_queue_size",
)
"""Metrics of events that do not occur here; the docs give the reasons."""


def page(context: MasterContext, status: m.MasterStatus, quotas: Iterable[m.QuotaStatus]) -> str:
    """Render the metrics as Prometheus text 0.0.4."""
    counters = context.master.request_counters
    counts = {**dataclasses.asdict(context.master.counts), **counters.counts}
    lines: list[str] = []
    for name, value in _gauges(context, status).items():
        _write(lines, name, "gauge", [("", value)])
    _write_segments(lines, status)
    _write_sizes(lines, counters)
    for name, value in _counters(counts).items():
        _write(lines, name, "counter", [("", value)])
    _write_quotas(lines, list(quotas))
    if counters.rejected:
        samples = [
            (f'{_label(tenant)[:-1]},reason="{reason}"}}', float(number))
            for (tenant, reason), number in counters.rejected.items()
        ]
        _write(lines, "mooncake_tenant_quota_reject_total", "counter", samples)
    return "\n".join(lines) + "\n"


def local_status(context: MasterContext) -> m.MasterStatus:
    """Status as this process knows it; a standby's is slightly older than the leader's."""
    now = clock.monotonic()
    return context.master.introspection.status(
        m.GetMasterStatus(), Received(None, None, m.GetMasterStatus()), now
    )


def _gauges(context: MasterContext, status: m.MasterStatus) -> dict[str, float]:
    by_tier: dict[Tier, list[m.SegmentStatus]] = {tier: [] for tier in Tier}
    for one in status.segments:
        if one.state == "alive":
            by_tier[one.tier].append(one)
    near, ssd = [*by_tier[Tier.MEMORY], *by_tier[Tier.DEVICE]], by_tier[Tier.SSD]
    counters = context.master.request_counters
    gauges: dict[str, float] = {
        "master_allocated_bytes": sum(one.allocated_bytes for one in near),
        "master_total_capacity_bytes": sum(one.size_bytes for one in near),
        "master_allocated_file_size_bytes": sum(one.allocated_bytes for one in ssd),
        "master_total_file_capacity_bytes": sum(one.size_bytes for one in ssd),
        "master_key_count": status.num_objects,
        "master_soft_pin_key_count": counters.num_soft_pinned(clock.monotonic()),
        "master_active_clients": context.num_clients,
        "mem_cache_nums_": sum(one.num_objects for one in near),
        "file_cache_nums_": sum(one.num_objects for one in ssd),
        "master_promotion_in_flight": sum(one.num_tasks for one in by_tier[Tier.MEMORY]),
        **dict.fromkeys(OF_REPLICATION, 0),
        **context.replication,
    }
    return gauges | {name: 0.0 for name in ALWAYS_0 if not name.endswith("_total")}


def _counters(counts: Mapping[str, Any]) -> dict[str, int]:
    counters: dict[str, int] = {}
    for name in REQUESTS:
        for what in ("requests", "failures"):
            counters[f"master_{name}_{what}_total"] = counts.get(f"{name}_{what}", 0)
    for name in BATCHES:
        for what in OUTCOMES:
            counters[f"master_batch_{name}_{what}_total"] = counts.get(f"batch_{name}_{what}", 0)
    for what in ("alloc_failures", "partial_allocations"):
        counters[f"master_put_start_{what}_total"] = counts.get(f"put_start_{what}", 0)
    hits, hit_bytes = counts.get("hit_nums", 0), counts.get("hit_bytes", 0)
    cold, cold_bytes = counts.get("cold_hits", 0), counts.get("cold_hit_bytes", 0)
    num_evicted = counts.get("evicted_objects", 0) + counts.get("evicted_replicas", 0)
    counters |= {
        "master_successful_evictions_total": num_evicted,
        "master_successful_evictions_mem": num_evicted,
        "master_attempted_evictions_mem": num_evicted + counts.get("put_start_alloc_failures", 0),
        "master_attempted_evictions_total": num_evicted + counts.get("put_start_alloc_failures", 0),
        "mem_cache_hit_nums_": hits - cold,
        "file_cache_hit_nums_": cold,
        "mem_cache_hit_bytes_total": hit_bytes - cold_bytes,
        "file_cache_hit_bytes_total": cold_bytes,
        "valid_get_nums_": hits,
        "total_get_nums_": counts.get("lookups", 0),
    }
    counters |= {name: counts.get(ours, 0) for name, ours in _OF_COUNTS.items()}
    return counters | {name: 0 for name in ALWAYS_0 if name.endswith("_total")}


def summary(context: MasterContext, status: m.MasterStatus) -> str:
    """The most important values in one line."""
    gauges, counts = _gauges(context, status), context.master.request_counters.counts
    used, capacity = gauges["master_allocated_bytes"], gauges["master_total_capacity_bytes"]
    ssd, ssd_capacity = gauges["master_allocated_file_size_bytes"], gauges["master_total_file_capacity_bytes"]

    def done(name: str) -> str:
        total = counts[f"{name}_requests"] + counts[f"batch_{name}_items"]
        return f"{total - counts[f'{name}_failures'] - counts[f'batch_{name}_failed_items']}/{total}"

    requests = {"Put": "put_end", "Get": "get_replica_list", "Exist": "exist_key", "Del": "remove"}
    return (
        f"Mem Storage: {_share(used, capacity)} | SSD Storage: {_share(ssd, ssd_capacity)}"
        f" | Keys: {status.num_objects} | Clients: {context.num_clients}"
        f" | Requests (Success/Total): {', '.join(f'{kind}={done(name)}' for kind, name in requests.items())}"
        f" | Eviction: keys={context.master.counts.evicted_objects}"
        f", bytes={context.master.counts.evicted_bytes}"
    )


def _share(used_bytes: float, capacity_bytes: float) -> str:
    percent = 100 * used_bytes / capacity_bytes if capacity_bytes else 0.0
    return f"{used_bytes / 2**30:.2f} GiB / {capacity_bytes / 2**30:.2f} GiB ({percent:.1f}%)"


def _write(lines: list[str], name: str, kind: str, samples: Iterable[tuple[str, float]]) -> None:
    lines.append(f"# TYPE {name} {kind}")
    lines += [f"{name}{labels} {value}" for labels, value in samples]


def _write_segments(lines: list[str], status: m.MasterStatus) -> None:
    alive = [one for one in status.segments if one.state == "alive" and one.tier is not Tier.SSD]
    if not alive:
        return
    for name, field in (
        ("segment_allocated_bytes", "allocated_bytes"),
        ("segment_total_capacity_bytes", "size_bytes"),
    ):
        samples = [(f'{{segment="{_escaped(one.segment)}"}}', float(getattr(one, field))) for one in alive]
        _write(lines, name, "gauge", samples)


def _write_sizes(lines: list[str], counters: RequestCounters) -> None:
    name, so_far = "master_value_size_bytes", 0
    lines.append(f"# TYPE {name} histogram")
    for bound, number in zip((*SIZE_BOUNDS, "+Inf"), counters.num_by_size, strict=True):
        so_far += number
        lines.append(f'{name}_bucket{{le="{bound}"}} {so_far}')
    lines += [f"{name}_sum {counters.put_bytes}", f"{name}_count {so_far}"]


def _write_quotas(lines: list[str], quotas: list[m.QuotaStatus]) -> None:
    if not quotas:
        return
    limited = [one for one in quotas if one.quota_bytes is not None]
    for what in ("requested", "effective"):
        samples = [(_label(one.tenant), float(one.quota_bytes or 0)) for one in limited]
        _write(lines, f"mooncake_tenant_quota_{what}_bytes", "gauge", samples)
    charged = [(_label(one.tenant), float(one.used_bytes)) for one in quotas]
    _write(lines, "mooncake_tenant_quota_charged_bytes", "gauge", charged)


def _label(tenant: str) -> str:
    return f'{{tenant_id="{_escaped(tenant) or "default"}"}}'


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

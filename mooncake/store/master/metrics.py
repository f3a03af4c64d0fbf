# SPDX-License-Identifier: Apache-2.0
"""Metrics of a master's process by our names; ``compat/master/master_metrics.py`` has the existing ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mooncake.store import messages as m
from mooncake.store.master.context import Leadership
from mooncake.store.master.master import Master
from mooncake.types import Tier


class MasterProcess(Protocol):
    """The part of the process that is read."""

    @property
    def master(self) -> Master: ...
    @property
    def leadership(self) -> Leadership: ...
    @property
    def num_standbys(self) -> int: ...
    @property
    def replication(self) -> dict[str, float]: ...


_GAUGES = {
    "objects": "Objects that can be read",
    "objects_writing": "Objects being written",
    "capacity_bytes": "Memory of the nodes that are alive",
    "allocated_bytes": "Memory of the nodes that are alive, in use or reserved",
    "device_capacity_bytes": "Device memory of the nodes that are alive",
    "device_allocated_bytes": "Device memory of the nodes that are alive, in use or reserved",
    "segments": "Nodes' segments that are alive",
    "full_disks": "SSDs whose disk had no space for the last copy",
    "ha_leads": "1 while this master leads",
    "ha_term": "Term of the leader; 0 where masters are not elected",
    "ha_standbys": "Standbys that have everything, when this master leads",
    "ha_number": "Number of the last records that were sent to standbys",
    "ha_lag": "How many numbers the slowest standby is behind",
    "ha_held_replies": "Replies that wait for standbys",
}
_COUNTERS = {
    "puts": "Objects that became readable",
    "refused_puts": "Puts that were refused",
    "expired_puts": "Puts whose writer missed its deadline",
    "lookups": "Keys looked up",
    "lookup_hits": "Keys looked up and found",
    "evicted_objects": "Objects evicted",
    "evicted_bytes": "Bytes evicted",
    "evicted_replicas": "Replicas evicted whose object stayed readable on another tier",
    "removed_objects": "Objects removed by request",
    "corrupt_objects": "Objects dropped because a reader, and then their node, found wrong bytes",
    "corrupt_replicas": "Replicas dropped because a reader, and then their node, found wrong bytes",
    "corrupt_reports": "Replicas that were reported to have wrong bytes",
    "refuted_reports": "Such reports that the replica's node found to be wrong: check the reporter",
    "unverified_reports": "Reported replicas that their node did not read again in time",
    "lost_objects": "Objects dropped because their node was lost",
    "done_tasks": "Copies that nodes made",
    "failed_tasks": "Copies that were given up",
    "demoted_objects": "Objects copied from memory to SSD",
    "demoted_bytes": "Bytes copied from memory to SSD",
    "promoted_objects": "Objects copied from SSD to memory because they were read again",
    "promoted_bytes": "Bytes copied from SSD to memory because they were read again",
    "promotions_admitted": "Such copies that were begun",
    "promotions_failed": "Such copies that were given up",
    "promotions_too_rare": "Lookups that found an object only on SSD, and too rarely",
    "promotions_no_room": "Lookups that found an object only on SSD, and no memory for it",
    "device_copied_objects": "Objects copied to device memory because they are looked up often",
    "device_copied_bytes": "Bytes copied to device memory because they are looked up often",
    "device_dropped_replicas": "Such copies removed for hotter objects, or because they were cool",
    "device_dropped_bytes": "Bytes of the copies removed for hotter objects, or because they were cool",
    "device_copies_failed": "Such copies that were given up",
    "device_copies_no_room": "Times that an object was hot enough, and everything in device memory as hot",
    "reported_objects": "Objects known from their node's report",
}


MAX_REPORTERS = 32
"""The last ones are exported, each with a label."""


class MasterMetrics(Collector):
    """Exports the core's counts at the time of the scrape."""

    def __init__(self, process: MasterProcess) -> None:
        self._process = process

    def describe(self) -> list[Metric]:
        return []  # so that a second master in one process (a test) is not a duplicate

    def collect(self) -> Generator[Metric, None, None]:
        master, lead = self._process.master, self._process.leadership
        devices = master.catalog.alive(Tier.DEVICE)
        gauges = {
            "objects": len(master.objects.readable),
            "objects_writing": len(master.objects.writing),
            "capacity_bytes": master.capacity_bytes,
            "allocated_bytes": master.allocated_bytes,
            "device_capacity_bytes": sum(one.allocator.size_bytes for one in devices),
            "device_allocated_bytes": sum(one.allocator.allocated_bytes for one in devices),
            "segments": sum(segment.is_alive for segment in master.segments.mounted.values()),
            "full_disks": sum(bool(one.disk_full) for one in master.catalog.alive(Tier.SSD)),
            "ha_leads": lead.is_leader,
            "ha_term": lead.term,
            "ha_standbys": self._process.num_standbys,
            "ha_number": self._process.replication.get("ha_oplog_last_sequence_id", 0),
            "ha_lag": self._process.replication.get("ha_oplog_standby_lag", 0),
            "ha_held_replies": self._process.replication.get("ha_oplog_pending_entries", 0),
        }
        for name, documentation in _GAUGES.items():
            yield GaugeMetricFamily(f"mooncake_store_{name}", documentation, value=gauges[name])
        counts = dataclasses.asdict(master.counts)
        for name, documentation in _COUNTERS.items():
            yield CounterMetricFamily(f"mooncake_store_{name}", documentation, value=counts[name])
        yield _by_reporter(master.verification.reporters(0.0)[-MAX_REPORTERS:])


def _by_reporter(reporters: list[m.ReporterStatus]) -> Metric:
    documentation = "Reports of wrong bytes by the last machines that reported; lost with the master"
    family = GaugeMetricFamily("mooncake_store_reporters", documentation, labels=["reporter", "outcome"])
    for one in reporters:
        outcomes = {"confirmed": one.num_confirmed, "refuted": one.num_refuted, "all": one.num_reports}
        for outcome, number in outcomes.items():
            family.add_metric([one.reporter, outcome], number)
    return family

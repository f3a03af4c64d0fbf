# SPDX-License-Identifier: Apache-2.0
"""Settings and requests of a simulated cluster beyond puts and gets. One seed draws one mix.

As with faults, a seed decides which kinds of requests occur at all. ``PLAIN`` is the mix without any.
"""

from __future__ import annotations

import dataclasses
from random import Random
from typing import Literal

from mooncake.store.settings import MasterSettings

SETTINGS = MasterSettings(
    lease_s=4.0, put_s=6.0, grace_s=2.0, heartbeat_s=0.5, segment_ttl_s=3.0, high_watermark=0.9
)


@dataclasses.dataclass(frozen=True)
class WorkloadMix:
    """Weights are relative to those of ``workload.WorkloadClient``: a get has 6."""

    eviction_policy: Literal["lru", "lfu", "chain"] = "lru"
    hot_uses_per_s: float = 100.0
    """When low, objects that are read often are copied to other nodes."""
    demote_watermark: float = 0.5
    promote_after_hits: int = 2
    evict_undemoted: bool = True
    drain: float = 0.0
    """Drain segments, query the progress, and cancel it or not."""
    copy: float = 0.0
    """Copy or move one object."""
    quota: float = 0.0
    """Set a tenant's quota."""
    remove_matching: float = 0.0
    """Remove what matches a pattern."""
    drop_replicas: float = 0.0
    """Drop the replicas of objects on one segment, or in memory."""
    view: float = 0.0
    """Keep a view open for long, with its lease renewed."""
    tenants: tuple[str, ...] = ("",)
    """Tenants of clients, in turn; "" is the default one."""

    def settings(self) -> MasterSettings:
        return dataclasses.replace(
            SETTINGS,
            eviction_policy=self.eviction_policy,
            hot_uses_per_s=self.hot_uses_per_s,
            demote_watermark=self.demote_watermark,
            promote_after_hits=self.promote_after_hits,
            evict_undemoted=self.evict_undemoted,
        )


PLAIN = WorkloadMix()


def draw(random: Random) -> WorkloadMix:
    """Draw a swarm: each kind of request is present or absent, and then rare or frequent."""

    def often(choices: tuple[float, ...]) -> float:
        return random.choice(choices) if random.random() < 0.4 else 0.0

    return WorkloadMix(
        eviction_policy=random.choice(("lru", "lfu", "chain")),
        hot_uses_per_s=random.choice((0.0, 0.5, 2.0, 100.0)),
        demote_watermark=random.choice((0.0, 0.2, 0.5)),
        promote_after_hits=random.choice((0, 1, 2)),
        evict_undemoted=random.random() < 0.7,
        drain=often((0.2, 1.0)),
        copy=often((0.5, 2.0)),
        quota=often((0.2, 1.0)),
        remove_matching=often((0.1, 0.5)),
        drop_replicas=often((0.2, 1.0)),
        view=often((1.0, 4.0)),
        tenants=random.choice((("",), ("",), ("", "bank"), ("shop", "bank"))),
    )

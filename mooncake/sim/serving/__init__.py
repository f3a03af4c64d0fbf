# SPDX-License-Identifier: Apache-2.0
"""Simulate a serving cluster: a trace's requests through the real conductor and simulated nodes.

It owns the calls that run a cluster; what happens on the way is in ``disaggregated_cluster.py`` (prefill
and decode on instances of their own) and ``colocated_cluster.py`` (every node does both). Runs are
deterministic by seed and keep no request that has ended, only its row of the results.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from mooncake.conductor.settings import SchedulingSettings
from mooncake.sim.serving.cluster import ClusterSpec, ServingCluster
from mooncake.sim.serving.colocated_cluster import ColocatedCluster
from mooncake.sim.serving.disaggregated_cluster import DisaggregatedCluster
from mooncake.sim.serving.results import RunResults
from mooncake.sim.traces.sessions import ClosedLoop
from mooncake.sim.traces.trace import TraceRow

__all__ = ["ClusterSpec", "simulate", "simulate_sessions"]

NEVER_S = 1e12


def simulate(
    rows: Iterable[TraceRow],
    cluster: ClusterSpec,
    scheduling: str = "overlap",
    admission: str = "none",
    seed: int = 0,
    speedup: float = 1.0,
    slo_ttft_s: float = 30.0,
    slo_tbt_s: float = 0.1,
    settings: SchedulingSettings | None = None,
    progress: Callable[[int, float], None] | None = None,
    max_missed: int | None = None,
) -> RunResults:
    """Run ``rows`` through the cluster. ``progress(requests arrived, virtual time)`` is called repeatedly.

    ``settings`` are the conductor's, for objectives and thresholds; ``scheduling``, ``admission`` and what
    only makes sense with real instances (probes, slow start, limits) are overridden. ``max_missed`` ends the
    run when more requests than so many missed an objective; those that have not ended then count as failed.
    """
    run = _world(cluster, scheduling, admission, seed, (slo_ttft_s, slo_tbt_s), settings, progress)
    run.max_missed = max_missed
    return run.run(rows, speedup)


def simulate_sessions(
    loop: ClosedLoop,
    cluster: ClusterSpec,
    scheduling: str = "overlap",
    admission: str = "none",
    seed: int = 0,
    slo_ttft_s: float = 30.0,
    slo_tbt_s: float = 0.1,
    settings: SchedulingSettings | None = None,
) -> RunResults:
    """As ``simulate``, for a closed load: what a session sends depends on when its answers end."""
    return _world(cluster, scheduling, admission, seed, (slo_ttft_s, slo_tbt_s), settings, None).run_sessions(
        loop
    )


def _world(
    cluster: ClusterSpec,
    scheduling: str,
    admission: str,
    seed: int,
    objectives: tuple[float, float],
    settings: SchedulingSettings | None,
    progress: Callable[[int, float], None] | None,
) -> ServingCluster:
    changes: dict[str, Any] = {"scheduling": scheduling, "admission": admission}
    if cluster.mode != "disaggregated" and not cluster.has_pool:
        changes["shares_blocks"] = False  # no node loads another's blocks there
    settings = dataclasses.replace(
        settings or SchedulingSettings(audit_share=0.0),
        **changes,
        slo_ttft_s=objectives[0],
        slo_tbt_s=objectives[1],
        explained_requests=0,
        block_tokens=cluster.block_tokens,
        max_requests_per_instance=1_000_000_000,
        probe_interval_s=NEVER_S,
        slow_start_s=0.0,
    )
    world = DisaggregatedCluster if cluster.mode == "disaggregated" else ColocatedCluster
    return world(cluster, settings, objectives, seed, progress)

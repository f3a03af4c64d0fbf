# SPDX-License-Identifier: Apache-2.0
"""The store under faults: a short sweep, seeds that once failed, and proof that the checkers detect bugs."""

from __future__ import annotations

import dataclasses

import pytest

from mooncake.sim.faults.cluster_faults import ClusterFaults
from mooncake.sim.faults.store_run import ReplicasRun, StoreRun
from mooncake.sim.faults.workload import PLAIN

CALM = ClusterFaults()
ROUGH = ClusterFaults(
    slow_chance=0.05,
    break_chance=0.01,
    partition_every_s=10.0,
    crash_master_every_s=15.0,
    crash_node_every_s=10.0,
    crash_client_every_s=15.0,
    transfer_failure_chance=0.1,
    slow_transfer_chance=0.1,
    corruption_every_s=5.0,
    power_loss_chance=0.3,
    slow_disk_chance=0.1,
    clock_offset_s=1000.0,
    clock_drift=2e-5,
)


@pytest.mark.parametrize("seed", range(20))
def test_seeds(seed: int) -> None:
    StoreRun(seed).run()


@pytest.mark.parametrize("seed", range(6))
def test_seeds_with_several_replicas(seed: int) -> None:
    ReplicasRun(seed).run()


def test_objects_with_several_replicas_outlive_nodes() -> None:
    """Otherwise that world would prove nothing."""
    survived = 0
    for seed in range(4):
        run = ReplicasRun(seed, ClusterFaults(crash_node_every_s=10.0))
        run.run()
        survived += len(run.cluster.checkers.history.promised())
    assert survived > 8


@pytest.mark.parametrize(
    "seed",
    [
        5054,  # clients that started in the calm part continued working
        5497,  # a writer counted as writing until it was notified of its end
        40278,  # a write was begun after its reservation's deadline
        4124,  # a copy that was only being flushed was considered still being written
        584,  # a write was reported a moment before its last slice had landed, by a clock that was fast
        5238,  # an object left memory because it was on an SSD, which had lied
    ],
)
def test_seeds_that_once_failed(seed: int) -> None:
    StoreRun(seed, load=PLAIN).run()


@pytest.mark.parametrize(
    "seed",
    [
        77,  # the checker: an object on SSD stays until its replacement is there too
        691,  # a later master got reports of objects whose removal a full SSD had not written yet
    ],
)
def test_seeds_of_the_usual_world_that_once_failed(seed: int) -> None:
    StoreRun(seed).run()


@pytest.mark.parametrize("seed", range(100, 104))
@pytest.mark.parametrize("has_oplog", [False, True])
def test_everything_fails_at_once(seed: int, has_oplog: bool) -> None:
    run = StoreRun(seed, dataclasses.replace(ROUGH, has_oplog=has_oplog))
    run.run()
    assert run.cluster.checkers.counts["hits"] > 0


def test_without_faults_nothing_is_lost_and_no_client_gets_an_error() -> None:
    totals: dict[str, int] = {}
    for seed in range(3):
        run = StoreRun(seed, CALM)
        run.run()
        assert run.cluster.checkers.counts["errors"] == 0
        assert run.cluster.master.master.counts.lost_objects == 0
        for name, count in run.cluster.checkers.counts.items():
            totals[name] = totals.get(name, 0) + count
    assert min(totals[name] for name in ("hits", "misses", "puts", "looks")) > 10


def test_a_seed_is_one_history() -> None:
    first, second = StoreRun(5), StoreRun(5)
    first.run()
    second.run()
    assert first.kernel.trace == second.kernel.trace
    assert first.kernel.num_steps == second.kernel.num_steps
    assert first.cluster.checkers.counts == second.cluster.checkers.counts

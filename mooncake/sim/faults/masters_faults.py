# SPDX-License-Identifier: Apache-2.0
"""Faults among several masters, how often and for how long; the settings of each of them.

One seed draws one set, as in ``cluster_faults.py``, whose faults of messages, nodes and clients are included.
"""

from __future__ import annotations

import dataclasses
from random import Random

from mooncake.sim.faults.cluster_faults import ClusterFaults
from mooncake.store.settings import MasterSettings

SETTINGS = MasterSettings(
    lease_s=4.0,
    put_s=2.5,
    grace_s=1.5,
    heartbeat_s=0.5,
    segment_ttl_s=6.0,
    high_watermark=0.9,
    election_lease_s=2.0,
    standby_ack_s=1.0,
    orphan_s=6.0,
    poll_s=4.0,
)


@dataclasses.dataclass(frozen=True)
class MastersFaults:
    """Times in seconds, probabilities per event."""

    cluster: ClusterFaults = dataclasses.field(default_factory=lambda: ClusterFaults(has_oplog=True))
    """Faults of connections, nodes and clients; that world's faults of the master are not used here."""
    crash_every_s: float = 0.0
    """Mean time between two deaths of a master's process."""
    power_loss_chance: float = 0.0
    """Probability that its machine fails with it, and loses what was not synced."""
    restart_s: float = 1.0
    stop_every_s: float = 0.0
    """Mean time between two orders to a master to stop in good order (SIGTERM)."""
    pause_every_s: float = 0.0
    """Mean time between two pauses of a master: stopped, or a virtual machine that is not scheduled."""
    pause_s: float = 2.0
    step_every_s: float = 0.0
    """Mean time between two changes of a master's wall clock."""
    step_s: float = 100.0
    cut_every_s: float = 0.0
    """Mean time between partitions in which one group does not receive from the other."""
    cut_s: float = 3.0
    one_way_chance: float = 0.5
    """Probability that such a partition is one-way: the others still receive from the group."""
    lease_store_loss_chance: float = 0.0
    """Probability that the lease store does not answer, although it may have applied the request."""
    lease_store_slow_chance: float = 0.0
    """Probability that it answers late."""
    full_every_s: float = 0.0
    """Mean time between two periods in which the disk under a master's log is full."""
    broken_every_s: float = 0.0
    """The same for errors (EIO) in writing it."""
    bad_disk_s: float = 2.0
    """How long either lasts."""
    slow_disk_chance: float = 0.0
    """Probability that a write or a sync of the log takes up to ``slow_disk_s``, during which the process
    does nothing."""
    slow_disk_s: float = 2.0
    settings_every_s: float = 0.0
    """Mean time between two changes of settings, with which the masters are restarted one after the other."""
    old_chance: float = 0.0
    """Probability that a master begins as an older version, which does not know the latest optional
    fields."""
    forbids_orphans: bool = False
    """Whether ``orphan_s`` is 0."""


def draw(random: Random) -> MastersFaults:
    """Draw a swarm: each kind of fault is present or absent, and then rare or frequent."""

    def often(choices: tuple[float, ...]) -> float:
        return random.choice(choices) if random.random() < 0.5 else 0.0

    cluster = ClusterFaults(
        delay_s=random.choice((0.0002, 0.001, 0.01)),
        slow_chance=often((0.005, 0.05)),
        break_chance=often((0.001, 0.01)),
        crash_node_every_s=often((15.0,)),
        crash_client_every_s=often((20.0,)),
        restart_s=random.choice((0.1, 1.0)),
        slow_transfer_chance=often((0.05,)),
        transfer_failure_chance=often((0.05,)),
        slow_transfer_s=2.0,
        has_oplog=True,
        clock_offset_s=random.choice((0.0, 1000.0)),
        clock_drift=random.choice((0.0, 2e-5)),
    )
    forbids_orphans = random.random() < 0.2
    return MastersFaults(
        cluster=cluster,
        crash_every_s=often((5.0, 15.0)),
        # Where no master may begin with nothing, none leads when the only whole log is lost.
        power_loss_chance=0.0 if forbids_orphans else often((0.3, 1.0)),
        restart_s=random.choice((0.1, 1.0, 4.0)),
        stop_every_s=often((10.0, 30.0)),
        pause_every_s=often((3.0, 10.0)),
        pause_s=random.choice((0.5, 2.0, 5.0)),
        step_every_s=often((5.0, 20.0)),
        step_s=random.choice((1.0, 1000.0, 1e7)),
        cut_every_s=often((5.0, 15.0)),
        cut_s=random.choice((0.5, 2.0, 6.0)),
        one_way_chance=random.choice((0.0, 0.5, 1.0)),
        lease_store_loss_chance=often((0.02, 0.1)),
        lease_store_slow_chance=often((0.05, 0.2)),
        full_every_s=often((20.0,)),
        broken_every_s=often((20.0,)),
        slow_disk_chance=often((0.002, 0.02)),
        slow_disk_s=random.choice((0.1, 3.0)),
        settings_every_s=often((10.0,)),
        old_chance=often((0.5,)),
        forbids_orphans=forbids_orphans,
    )


def other_settings(settings: MasterSettings, random: Random) -> MasterSettings:
    """Settings that an operator may have changed."""
    return dataclasses.replace(
        settings,
        election_lease_s=random.choice((1.0, 2.0, 4.0)),
        standby_ack_s=random.choice((0.5, 1.0, 2.0)),
        lease_s=random.choice((2.0, 4.0, 6.0)),
        put_s=random.choice((1.5, 2.5, 4.0)),
        grace_s=random.choice((1.5, 2.5)),
    )

# SPDX-License-Identifier: Apache-2.0
"""What goes wrong, how often and for how long. One seed draws one set, from mild to hostile.

Faults are probabilities and durations rather than scripts, and a seed decides which kinds occur at
all: a run in which everything fails at once hides what a run with one kind of fault would show. Faults among
several masters include those of messages, nodes and clients, and come with the settings of each master.
"""

from __future__ import annotations

import dataclasses
from random import Random

from mooncake.store.settings import MasterSettings


@dataclasses.dataclass(frozen=True)
class ClusterFaults:
    """Times in seconds, probabilities per event."""

    delay_s: float = 0.0002
    """Typical one-way delay of a message; drawn for each message."""
    slow_chance: float = 0.0
    """Probability that a message is late by up to ``slow_s``."""
    slow_s: float = 0.5
    break_chance: float = 0.0
    """Probability that a message breaks its connection, before or after it was delivered."""
    partition_every_s: float = 0.0
    """Mean time between partitions of two processes; 0: never."""
    partition_s: float = 4.0
    crash_master_every_s: float = 0.0
    crash_node_every_s: float = 0.0
    crash_client_every_s: float = 0.0
    restart_s: float = 1.0
    """Mean time until a crashed process is started again."""
    transfer_failure_chance: float = 0.0
    """Probability that a transfer fails although the node is alive, with some of its writes landing later."""
    slow_transfer_chance: float = 0.0
    """Probability that a transfer takes up to ``slow_transfer_s``."""
    slow_transfer_s: float = 8.0
    late_write_s: float = 1.0
    """How long after its transfer was abandoned a write may land; less than the master's grace period."""
    corruption_every_s: float = 0.0
    """Mean time between corruptions of two bytes of a node's memory or SSD."""
    power_loss_chance: float = 0.0
    """Probability that the crash of a node also loses what its SSD had not flushed."""
    slow_disk_chance: float = 0.0
    """Probability that a write, a read or a flush takes up to ``slow_disk_s``."""
    slow_disk_s: float = 5.0
    lying_disk_chance: float = 0.0
    """Probability that a flush is acknowledged without having been done."""
    clock_offset_s: float = 0.0
    """Upper bound of the initial offset of clocks."""
    clock_drift: float = 0.0
    """Upper bound of the relative rate error of clocks, in either direction."""
    one_way_every_s: float = 0.0
    """Mean time between one-way partitions of two processes, each for ``partition_s``."""
    split_every_s: float = 0.0
    """Mean time between partitions of the processes into two groups."""
    pause_master_every_s: float = 0.0
    """Mean time between pauses of the master: its event loop does nothing, then everything that became
    due."""
    pause_node_every_s: float = 0.0
    pause_client_every_s: float = 0.0
    pause_s: float = 2.0
    """Mean length of a pause. With checksums it may also stop the threads that carry bytes (SIGSTOP)."""
    overload_every_s: float = 0.0
    """Mean time between two periods in which the master takes ``handler_s`` for each message."""
    handler_s: float = 0.05
    full_disk_every_s: float = 0.0
    """Mean time between periods of ``outage_s`` in which an SSD accepts no index record."""
    read_error_chance: float = 0.0
    """Probability that a read from an SSD fails (EIO)."""
    slow_node_every_s: float = 0.0
    """Mean time between periods of ``outage_s`` in which every transfer with one node takes up to
    ``slow_transfer_s``."""
    outage_s: float = 4.0
    leave_node_every_s: float = 0.0
    """Mean time between orderly exits of a node, which is then started again."""
    torn_append_chance: float = 0.0
    """Probability that the master ends in the middle of a log write: a part is there, and no request was
    answered."""
    slow_append_chance: float = 0.0
    """Probability that a log write takes the master up to ``slow_disk_s``, during which it does nothing
    else."""
    has_checksums: bool = True
    """False: checksums always match, so that only leases and deadlines protect a reader."""
    has_standby: bool = False
    """Whether a second master applies each record of the first one as it comes, and is its successor."""

    has_oplog: bool = False
    """Whether the master logs its metadata, and its successor reads the log."""

    @property
    def is_calm(self) -> bool:
        return self == dataclasses.replace(self.calmed, delay_s=self.delay_s)

    @property
    def calmed(self) -> ClusterFaults:
        """The faults of a cluster in which nothing fails, with the settings kept."""
        return ClusterFaults(
            has_checksums=self.has_checksums,
            has_oplog=self.has_oplog,
            has_standby=self.has_standby,
            clock_offset_s=self.clock_offset_s,
            clock_drift=self.clock_drift,
        )

    @property
    def is_slow_to_answer(self) -> bool:
        """Whether the master may take long for a message that it has received."""
        return bool(self.pause_master_every_s or self.overload_every_s or self.slow_append_chance)

    @property
    def may_write_late(self) -> bool:
        """Whether a process that was stopped may continue in the middle of a write, at any later time."""
        return self.has_checksums and bool(self.pause_node_every_s or self.pause_client_every_s)


def draw(random: Random) -> ClusterFaults:
    """Draw a swarm: each kind of fault is present or absent, and then rare or frequent."""

    def often(choices: tuple[float, ...]) -> float:
        return random.choice(choices) if random.random() < 0.5 else 0.0

    has_checksums = random.random() < 0.6
    return ClusterFaults(
        delay_s=random.choice((0.0001, 0.001, 0.01)),
        slow_chance=often((0.01, 0.1)),
        break_chance=often((0.002, 0.02)),
        partition_every_s=often((5.0, 20.0)),
        partition_s=random.choice((0.5, 4.0, 12.0)),
        crash_master_every_s=often((10.0, 30.0)),
        crash_node_every_s=often((5.0, 20.0)),
        crash_client_every_s=often((5.0, 20.0)),
        restart_s=random.choice((0.1, 1.0, 8.0)),
        transfer_failure_chance=often((0.02, 0.2)),
        slow_transfer_chance=often((0.02, 0.2)),
        # Without checksums, corruption would go unnoticed.
        corruption_every_s=often((2.0, 10.0)) if has_checksums else 0.0,
        has_checksums=has_checksums,
        has_oplog=random.random() < 0.5,
        power_loss_chance=often((0.3, 1.0)) if has_checksums else 0.0,
        slow_disk_chance=often((0.02, 0.2)),
        lying_disk_chance=often((0.1, 1.0)) if has_checksums else 0.0,
        clock_offset_s=random.choice((0.0, 1000.0)),
        clock_drift=random.choice((0.0, 2e-5)),
    )


def draw_further(faults: ClusterFaults, random: Random) -> ClusterFaults:
    """``faults`` with further kinds, drawn in the same way from a random source of their own."""

    def often(choices: tuple[float, ...], chance: float = 0.35) -> float:
        return random.choice(choices) if random.random() < chance else 0.0

    has_standby = random.random() < 0.3
    return dataclasses.replace(
        faults,
        one_way_every_s=often((5.0, 20.0)),
        split_every_s=often((10.0, 30.0)),
        pause_master_every_s=often((5.0, 20.0)),
        pause_node_every_s=often((3.0, 15.0)),
        pause_client_every_s=often((3.0, 15.0)),
        pause_s=random.choice((0.5, 2.0, 6.0)),
        overload_every_s=often((10.0, 20.0)),
        handler_s=random.choice((0.005, 0.05)),
        full_disk_every_s=often((5.0, 20.0)),
        read_error_chance=often((0.02, 0.2)),
        slow_node_every_s=often((5.0, 20.0)),
        outage_s=random.choice((0.5, 4.0, 15.0)),
        leave_node_every_s=often((10.0, 30.0)),
        has_standby=has_standby,
        has_oplog=faults.has_oplog or has_standby,
        torn_append_chance=often((0.001, 0.005)),
        slow_append_chance=often((0.001, 0.01)),
    )


MASTERS_SETTINGS = MasterSettings(
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
    device_uses_per_s=0.5,
    device_hot_s=0.0,
    device_cool_s=3.0,
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


def draw_among_masters(random: Random) -> MastersFaults:
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

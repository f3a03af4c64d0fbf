# SPDX-License-Identifier: Apache-2.0
"""What goes wrong, how often and for how long. One seed draws one set, from mild to hostile.

Faults are probabilities and durations rather than scripts, and a seed decides which kinds occur at
all: a run in which everything fails at once hides what a run with one kind of fault would show.
"""

from __future__ import annotations

import dataclasses
from random import Random


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

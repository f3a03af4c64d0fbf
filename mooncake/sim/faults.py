"""What goes wrong, how often and for how long. One seed draws one set, from mild to hostile.

Faults are probabilities and durations rather than scripts, and a seed decides which kinds occur at
all: a run in which everything fails at once hides what a run with one kind of fault would show.
"""

from __future__ import annotations

import dataclasses
from random import Random


@dataclasses.dataclass(frozen=True)
class Faults:
    """Times in seconds, probabilities per event."""

    delay_s: float = 0.0002
    """Typical one-way delay of a message; each one is drawn anew."""
    slow_chance: float = 0.0
    """That a message is late by up to ``slow_s``."""
    slow_s: float = 0.5
    break_chance: float = 0.0
    """That a message breaks its connection, before or after it was delivered."""
    partition_every_s: float = 0.0
    """Mean time between partitions of two processes; 0: never."""
    partition_s: float = 4.0
    crash_master_every_s: float = 0.0
    crash_node_every_s: float = 0.0
    crash_client_every_s: float = 0.0
    restart_s: float = 1.0
    """Mean time until a crashed process is started again."""
    transfer_failure_chance: float = 0.0
    """That a transfer fails although the node lives, with some of its writes landing later."""
    slow_transfer_chance: float = 0.0
    """That a transfer takes up to ``slow_transfer_s``."""
    slow_transfer_s: float = 8.0
    late_write_s: float = 1.0
    """How long after its transfer was given up a write may land; less than the master's grace."""
    corruption_every_s: float = 0.0
    """Mean time between two bytes of a node's memory or SSD changing by themselves."""
    power_loss_chance: float = 0.0
    """That a node which crashes takes what its SSD had not flushed with it."""
    slow_disk_chance: float = 0.0
    """That a write, a read or a flush takes up to ``slow_disk_s``."""
    slow_disk_s: float = 5.0
    lying_disk_chance: float = 0.0
    """That a flush is acknowledged and has done nothing."""
    clock_offset_s: float = 0.0
    """Clocks begin anywhere up to here."""
    clock_drift: float = 0.0
    """And are too fast or too slow by up to this part."""
    has_checksums: bool = True
    """False: checksums always match, so that only leases and deadlines protect a reader."""

    has_oplog: bool = False
    """The master writes its metadata down, and its successor reads it."""

    @property
    def is_calm(self) -> bool:
        return self == Faults(
            delay_s=self.delay_s,
            has_checksums=self.has_checksums,
            has_oplog=self.has_oplog,
            clock_offset_s=self.clock_offset_s,
            clock_drift=self.clock_drift,
        )


def draw(random: Random) -> Faults:
    """A swarm: each kind of fault is present or absent, and then rare or frequent."""

    def often(choices: tuple[float, ...]) -> float:
        return random.choice(choices) if random.random() < 0.5 else 0.0

    has_checksums = random.random() < 0.6
    return Faults(
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
        # Without checksums nobody could notice.
        corruption_every_s=often((2.0, 10.0)) if has_checksums else 0.0,
        has_checksums=has_checksums,
        has_oplog=random.random() < 0.5,
        power_loss_chance=often((0.3, 1.0)) if has_checksums else 0.0,
        slow_disk_chance=often((0.02, 0.2)),
        lying_disk_chance=often((0.1, 1.0)) if has_checksums else 0.0,
        clock_offset_s=random.choice((0.0, 1000.0)),
        clock_drift=random.choice((0.0, 2e-5)),
    )

# SPDX-License-Identifier: Apache-2.0
"""Plan of a seed: its processes, the batches that they move, and the times of its faults.

All of it is drawn before the start, so a seed determines the plan; only the interleaving of threads and
processes varies.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Literal

NUM_WORKERS = 3
AREA_BYTES = 1 << 20
"""Size of the area that each worker has to itself in each peer, so that the content there is known."""
MOST_PEERS = 2
STRIKING_S = 0.9
"""Faults begin within this many seconds of the start."""

Kind = Literal["kill", "stop", "reset", "half_frame", "silence", "metadata_kill", "metadata_stop"]
KINDS: tuple[Kind, ...] = ("kill", "stop", "reset", "half_frame", "silence", "metadata_kill", "metadata_stop")


@dataclass(frozen=True)
class Transfer:
    """A batch of one worker; its ranges are disjoint and lie in the worker's area."""

    peer: int
    is_write: bool
    ranges: tuple[tuple[int, int], ...]
    "Offset in the area, and length."
    timeout_s: float
    how: Literal["run", "submit", "await"]
    checksum: bool
    pause_s: float
    "Before it."

    @property
    def num_bytes(self) -> int:
        return sum(length for _, length in self.ranges)


@dataclass(frozen=True)
class Fault:
    """A failure that begins ``at_s`` after the start and lasts ``duration_s``."""

    at_s: float
    kind: Kind
    peer: int
    duration_s: float
    num_bytes: int
    "After which a frame breaks off."
    to_peer: bool
    "The direction in which it does."


@dataclass(frozen=True)
class Plan:
    """One seed."""

    seed: int
    num_peers: int
    transports: tuple[str, ...]
    num_streams: int
    has_handshake: bool
    bytes_per_s: float
    "How fast the proxies forward: so slowly that faults strike in the middle of frames, or 0 for no limit."
    transfers: tuple[tuple[Transfer, ...], ...]
    "Per worker, in order."
    faults: tuple[Fault, ...]


def draw(seed: int) -> Plan:
    """The plan of a seed."""
    random = Random(seed)
    num_peers = random.randint(1, MOST_PEERS)
    return Plan(
        seed,
        num_peers,
        random.choice([("tcp",), ("tcp",), ("shm", "tcp")]),
        random.choice([1, 1, 2, 3]),
        random.random() < 0.5,
        random.choice([0, 10e6, 40e6]),
        tuple(
            tuple(_transfer(random, num_peers) for _ in range(random.randint(8, 16)))
            for _ in range(NUM_WORKERS)
        ),
        tuple(sorted((_fault(random, num_peers) for _ in range(random.randint(1, 5))), key=lambda f: f.at_s)),
    )


def _transfer(random: Random, num_peers: int) -> Transfer:
    num_ranges = random.choice([1, 1, 2, 8, 40])
    cuts = sorted(random.sample(range(AREA_BYTES), 2 * num_ranges))
    ranges = [(begin, end - begin) for begin, end in zip(cuts[::2], cuts[1::2], strict=True)]
    if random.random() < 0.3:
        ranges = [(begin, min(length, 4096)) for begin, length in ranges]
    random.shuffle(ranges)
    return Transfer(
        random.randrange(num_peers),
        random.random() < 0.6,
        tuple(ranges),
        random.choice([0.1, 0.3, 1.0, 3.0]),
        random.choice(["run", "submit", "await"]),
        random.random() < 0.3,
        random.choice([0.0, 0.0, 0.02, 0.15, 0.3]),
    )


def _fault(random: Random, num_peers: int) -> Fault:
    return Fault(
        random.uniform(0, STRIKING_S),
        random.choice(KINDS),
        random.randrange(num_peers),
        random.uniform(0.05, 0.8),
        random.choice([1, 16, 40, 100, 5_000, 200_000]),
        random.random() < 0.7,
    )

# SPDX-License-Identifier: Apache-2.0
"""``python -m mooncake.sim --seeds 100``: many runs, each under faults of its own seed.

Five worlds: the store's cluster (``store``), the same with several replicas of each object (``replicas``),
transfers over links that fail (``transfer``), masters that elect one of them (``election``), and masters with
their logs, standbys, nodes and clients (``masters``).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Protocol

from mooncake.sim.faults.election_run import ElectionRun
from mooncake.sim.faults.invariants import Violation
from mooncake.sim.faults.masters_run import MastersRun
from mooncake.sim.faults.store_run import ReplicasRun, StoreRun
from mooncake.sim.faults.transfer_run import TransferRun
from mooncake.sim.faults.workload import PLAIN
from mooncake.sim.kernel import Kernel
from mooncake.state_table import Faults


class FaultRun(Protocol):
    """A world under one seed."""

    kernel: Kernel

    def run(self) -> None: ...

    @property
    def counts(self) -> dict[str, int]: ...


def main() -> int:
    Faults.raises = True
    parser = argparse.ArgumentParser(prog="python -m mooncake.sim", description=__doc__)
    parser.add_argument(
        "--world",
        choices=("store", "replicas", "transfer", "election", "masters", "all"),
        default="all",
        help="what to run",
    )
    parser.add_argument("--seeds", type=int, default=100, help="how many seeds to run")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--batches", type=int, default=100, help="transfers per seed, at least")
    parser.add_argument(
        "--plain",
        action="store_true",
        help="store and replicas: only puts, gets and the first kinds of faults, as in old reports",
    )
    parser.add_argument("--trace", action="store_true", help="print what happened in each run")
    given = parser.parse_args()
    load = PLAIN if given.plain else None
    worlds: dict[str, Callable[[int], FaultRun]] = {
        "store": lambda seed: StoreRun(seed, load=load),
        "replicas": lambda seed: ReplicasRun(seed, load=load),
        "transfer": lambda seed: TransferRun(seed, given.batches),
        "election": ElectionRun,
        "masters": MastersRun,
    }
    for name, world in worlds.items():
        more = f" --batches {given.batches}" if name == "transfer" else " --plain" if given.plain else ""
        if given.world in (name, "all") and not sweep(
            f"{name}{more}", world, given.first, given.seeds, given.trace
        ):
            return 1
    return 0


def sweep(name: str, world: Callable[[int], FaultRun], first: int, num_seeds: int, is_traced: bool) -> bool:
    """Run seeds until one fails. Returns False if one did."""
    totals: dict[str, int] = {}
    begin = time.monotonic()
    for seed in range(first, first + num_seeds):
        run = world(seed)
        try:
            run.run()
        except Violation as violation:
            if is_traced:
                print("\n".join(run.kernel.trace))
            print(
                f"FAILED ({violation.rule}) {violation}\nrepeat with: "
                f"python -m mooncake.sim --world {name} --first {seed} --seeds 1 --trace"
            )
            return False
        if is_traced:
            print("\n".join(run.kernel.trace))
        for what, count in run.counts.items():
            totals[what] = totals.get(what, 0) + count
    shown = ", ".join(f"{count} {what}" for what, count in totals.items())
    print(f"{name}: {num_seeds} seeds, nothing violated in {time.monotonic() - begin:.0f} s: {shown}")
    return True


if __name__ == "__main__":
    sys.exit(main())

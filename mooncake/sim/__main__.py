"""``python -m mooncake.sim --seeds 100``: many runs of the store, each under faults of its own seed."""

from __future__ import annotations

import argparse
import sys

from mooncake.sim.checkers import Violation
from mooncake.sim.store_run import StoreRun


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m mooncake.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="how many seeds to run")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--trace", action="store_true", help="print what happened in each run")
    given = parser.parse_args()
    totals: dict[str, int] = {}
    for seed in range(given.first, given.first + given.seeds):
        run = StoreRun(seed)
        try:
            run.run()
        except Violation as violation:
            if given.trace:
                print("\n".join(run.kernel.trace))
            print(f"FAILED {violation}\nrepeat with: python -m mooncake.sim --first {seed} --seeds 1 --trace")
            return 1
        if given.trace:
            print("\n".join(run.kernel.trace))
        for name, count in run.cluster.checkers.counts.items():
            totals[name] = totals.get(name, 0) + count
    print(f"{given.seeds} seeds, nothing violated: " + ", ".join(f"{n} {what}" for what, n in totals.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""``scripts/faults``: real processes under seeded faults. Exit status 1: a guarantee was violated."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter

from tests.faults.plan import draw
from tests.faults.run import run


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/faults", description=__doc__)
    parser.add_argument("--seeds", type=int, default=20, help="how many (default 20)")
    parser.add_argument("--first", type=int, default=1, help="the first seed (default 1)")
    parser.add_argument("--verbose", action="store_true", help="what is planned and what the processes say")
    args = parser.parse_args()
    if args.verbose:
        os.environ["FAULTS_VERBOSE"] = "1"
    counts: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    worst_s, num_bad, began = 0.0, 0, time.monotonic()
    for seed in range(args.first, args.first + args.seeds):
        plan = draw(seed)
        if args.verbose:
            print(seed, plan.transports, *plan.faults, sep="\n  ", flush=True)
        outcome = run(plan)
        counts += outcome.counts
        faults.update(fault.kind for fault in plan.faults)
        worst_s = max(worst_s, outcome.worst_overrun_s)
        if outcome.wrong:
            num_bad += 1
            print(f"seed {seed}:", *outcome.wrong, sep="\n  ", flush=True)
        elif args.verbose:
            print(
                f"seed {seed}: {dict(outcome.counts)}, worst overrun {outcome.worst_overrun_s:.3f} s",
                flush=True,
            )
    num_batches = sum(n for what, n in counts.items() if not what.startswith("("))
    print(f"{args.seeds} seeds, {num_batches} batches, {num_bad} seeds with broken promises, "
          f"{time.monotonic() - began:.0f} s")  # fmt: skip
    print("faults: " + ", ".join(f"{n} {kind}" for kind, n in sorted(faults.items())))
    for what, n in counts.most_common():
        print(f"  {n:6}  {what}")
    print(f"latest end: {worst_s * 1000:+.0f} ms after the deadline")
    return 1 if num_bad else 0


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""``scripts/kill``: SIGKILL under load, and a check of every acknowledged object. Exits 1 if one is lost."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Sequence

from mooncake.cli.bench.report import describe_machine
from tests.kill.run import SCENARIOS, Outcome, play

BUCKETS_S = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)
BAR = 40


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/kill", description=__doc__)
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help=f"{', '.join(SCENARIOS)}; none: all")
    parser.add_argument("--rounds", type=int, default=50, help="kills of each (default 50)")
    parser.add_argument("--seed", type=int, default=0, help="of who and when (default 0)")
    args = parser.parse_args()
    for name in args.scenarios:
        if name not in SCENARIOS:
            parser.error(f"no scenario {name!r}; there are {', '.join(SCENARIOS)}")
    print(f"machine: {describe_machine()}")
    print(f"command: {shlex.join(['scripts/kill', *sys.argv[1:]])}")
    num_violations = 0
    for name in args.scenarios or SCENARIOS:
        began = time.monotonic()
        outcome = play(name, args.rounds, args.seed)
        show(name, outcome, time.monotonic() - began)
        num_violations += len(outcome.violations)
    return 1 if num_violations else 0


def show(name: str, outcome: Outcome, took_s: float) -> None:
    print(
        f"\n{name}: {outcome.num_rounds} kills in {took_s:.0f} s, {outcome.num_acknowledged} actions"
        f" acknowledged, {outcome.num_checked} reads of promised objects;"
        f" lost {len(outcome.lost)}, wrong {len(outcome.wrong)}, phantoms {len(outcome.phantoms)}"
    )
    for line in outcome.violations:
        print(f"  VIOLATED {line}")
    histogram("kill to the first get of an object from before", outcome.reading_s)
    histogram("kill to the first put that was got again", outcome.recovery_s)
    sys.stdout.flush()


def histogram(what: str, seconds: Sequence[float]) -> None:
    if not seconds:
        return
    ordered = sorted(seconds)
    p50, p99 = ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]
    print(f"  {what}: {len(ordered)} times, p50 {p50:.2f} s, p99 {p99:.2f} s, worst {ordered[-1]:.2f} s")
    lower = 0.0
    for upper in (*BUCKETS_S, float("inf")):
        number = sum(lower <= one < upper for one in seconds)
        if number:
            print(f"    {lower:5.2f} to {upper:5.2f} s {number:4} {'#' * -(-number * BAR // len(seconds))}")
        lower = upper


if __name__ == "__main__":
    sys.exit(main())

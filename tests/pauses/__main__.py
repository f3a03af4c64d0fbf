# SPDX-License-Identifier: Apache-2.0
"""``scripts/pauses``: engines paused during saves and loads. Exits 1 if memory was reused too early."""

from __future__ import annotations

import argparse
import shlex
import sys
import time

from mooncake.cli.bench.report import describe_machine
from tests.pauses.engines import ENGINES
from tests.pauses.run import PAUSE_S, USUAL_PAUSE_S, Outcome, play, staged


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/pauses", description=__doc__)
    parser.add_argument("--points", type=int, default=200, help="all connectors together (default 200)")
    parser.add_argument("--seed", type=int, default=0, help="of where it stands still (default 0)")
    parser.add_argument("--connector", choices=ENGINES, action="append", help="may be repeated; none: all")
    parser.add_argument(
        "--default-patience",
        action="store_true",
        help=f"engines wait as long as by default and stand still for {USUAL_PAUSE_S:g} s; else they have"
        f" little patience and stand still for {PAUSE_S:g} s",
    )
    args = parser.parse_args()
    print(f"machine: {describe_machine()}")
    print(f"command: {shlex.join(['scripts/pauses', *sys.argv[1:]])}")
    names = args.connector or list(ENGINES)
    outcomes: list[Outcome] = []
    for number, name in enumerate(names):
        num_points = args.points * (number + 1) // len(names) - args.points * number // len(names)
        began = time.monotonic()
        with staged(args.default_patience) as stage:
            outcomes.append(play(stage, name, num_points, args.seed))
        show(name, outcomes[-1], time.monotonic() - began)
    num_points = sum(one.num_points for one in outcomes)
    num_wrong = sum(len(one.wrong) for one in outcomes)
    num_overwritten = sum(len(one.overwritten) for one in outcomes)
    print(
        f"\nall: {num_points} points, {num_wrong} loads with another prefix's bytes,"
        f" {num_overwritten} overwritten blocks"
    )
    return 1 if any(one.violations for one in outcomes) else 0


def show(name: str, outcome: Outcome, took_s: float) -> None:
    print(
        f"\n{name}: stood still at {outcome.num_points} points in {took_s:.0f} s"
        f" ({outcome.num_missed_points} operations were over before)"
    )
    for kind, count in sorted(outcome.points.items()):
        print(f"  {kind}: {count}")
    print(
        f"  blocks loaded {outcome.num_loaded}, not loaded {outcome.num_not_loaded};"
        f" saved and found {outcome.num_found}, not found {outcome.num_not_found};"
        f" wrong {len(outcome.wrong)}, overwritten {len(outcome.overwritten)}"
    )
    for line in outcome.violations:
        print(f"  VIOLATED {line}")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())

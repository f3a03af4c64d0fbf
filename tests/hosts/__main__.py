# SPDX-License-Identifier: Apache-2.0
"""``scripts/test-hosts``: rounds of failures in a cluster over four hosts, with figures and their bounds."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType

from tests.hosts.cluster import Figures, play
from tests.hosts.network import why_impossible

MAX_AFTER_CUT_S, MAX_FALSE_HITS_S, MIN_RAILS_SHARE = 0.5, 1.0, 0.9


def ended(number: int, frame: FrameType | None) -> None:
    """Handle SIGTERM like a normal exit, so that the hosts are removed."""
    raise SystemExit(128 + number)


def show(figures: Figures, took_s: float) -> list[str]:
    """Print what was measured; returns what misses its bound or was wrong."""
    rails = figures.rails_mb_s
    share = rails["both"] / rails["limits"]
    after, false = max(figures.after_cut_s, default=0.0), max(figures.false_hits_s, default=0.0)
    print(
        f"one rail {rails['one']:.0f} MB/s, the other {rails['other']:.0f}, both {rails['both']:.0f}: ",
        end="",
    )
    print(f"{share:.2f} of the sum of their limits (at least {MIN_RAILS_SHARE})")
    cuts = ", ".join(f"{one:.2f}" for one in figures.after_cut_s)
    print(f"a rail cut in the middle of a batch: whole after {cuts} s (at most {MAX_AFTER_CUT_S})")
    hits = ", ".join(f"{one:.2f}" for one in figures.false_hits_s)
    print(f"last false hit after the loss of a host: {hits} s (at most {MAX_FALSE_HITS_S})")
    print(f"{figures.num_bytes} bytes stored on two hosts, {figures.num_carried} carried by the networks")
    print(
        f"{figures.num_acknowledged} requests of the load acknowledged, {figures.num_checked} reads checked"
    )
    print(f"{figures.num_answers} right answers, {figures.num_errors} proper errors; {took_s:.0f} s in all")
    bounds = {
        f"both rails carry {share:.2f} of the sum of their limits": share >= MIN_RAILS_SHARE,
        f"a batch was whole {after:.2f} s after a cut": 0 < after <= MAX_AFTER_CUT_S,
        f"a false hit {false:.2f} s after the loss of a host": false <= MAX_FALSE_HITS_S,
    }
    return figures.broken + [text for text, holds in bounds.items() if not holds]


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/test-hosts", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="times that every failure is played")
    parser.add_argument("--folder", type=Path, help="keep logs and journals in this folder")
    arguments = parser.parse_args()
    if reason := why_impossible():
        print(f"NOT RUN: no hosts can be made here: {reason}", file=sys.stderr)
        return 77
    signal.signal(signal.SIGTERM, ended)
    with tempfile.TemporaryDirectory(prefix="mooncake-hosts-") as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        wrong = show(play(folder, arguments.rounds), time.monotonic() - began)
    for one in wrong:
        print(f"WRONG: {one}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

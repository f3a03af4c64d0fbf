# SPDX-License-Identifier: Apache-2.0
"""``scripts/integrity``: bit flips in memory, on SSD, on the wire and in a master's log; and lost power.

Exits 1 if a flipped bit was read as good, or an object is gone that was acknowledged as durable.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time

from tests.integrity import flips, logs

KINDS = {**flips.KINDS, **logs.KINDS}


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/integrity", description=__doc__)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"{', '.join(KINDS)}; none: all")
    parser.add_argument("--flips", type=int, default=1000, help="bits to change, of each kind (default 1000)")
    parser.add_argument("--seed", type=int, default=0, help="of what is changed when (default 0)")
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)  # the cores warn of each damage
    num_wrong = 0
    for kind in args.kinds or KINDS:
        if kind not in KINDS:
            parser.error(f"no kind {kind!r}; there are {', '.join(KINDS)}")
        began = time.monotonic()
        outcome = KINDS[kind](args.flips, args.seed)
        print(f"{kind}: {outcome}; {time.monotonic() - began:.0f} s", flush=True)
        for line in outcome.wrong[:20]:
            print(f"  WRONG {line}")
        num_wrong += len(outcome.wrong)
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())

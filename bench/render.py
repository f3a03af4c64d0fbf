# SPDX-License-Identifier: Apache-2.0
"""``python -m bench.render [FILE.json]``: render the texts beside results again from their JSON.

Without files, those of ``bench/results/``. ``--check`` writes nothing, and exits with 1 when a text differs
from its JSON.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench.report import SAVED, decoded, render


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.render", description=__doc__)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    status = 0
    for file in arguments.files or sorted(SAVED.glob("*.json")):
        text, target = render(decoded(file.read_bytes())), file.with_suffix(".txt")
        if arguments.check and (not target.exists() or target.read_text() != text):
            print(f"{target} does not match {file.name}; run python -m bench.render", file=sys.stderr)
            status = 1
        elif not arguments.check:
            target.write_text(text)
    return status


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""A sysfs tree built from a recording: ``path = text`` and ``path -> path``, one a line."""

from __future__ import annotations

import os
from pathlib import Path

RECORDINGS = Path(__file__).with_name("hosts")


def build(recording: str, root: Path) -> Path:
    for line in (RECORDINGS / f"{recording}.txt").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        is_link = " -> " in line
        path, _, what = line.partition(" -> " if is_link else " = ")
        place = root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        if is_link:
            place.symlink_to(os.path.relpath(root / what, place.parent))
        else:
            place.write_text(what + "\n")
    return root

# SPDX-License-Identifier: Apache-2.0
"""Result of a run: the number of damages, the results of reads afterwards, and the violations."""

from __future__ import annotations

import dataclasses
from collections import Counter


@dataclasses.dataclass
class Outcome:
    num_flips: int = 0
    counts: Counter[str] = dataclasses.field(default_factory=Counter)
    """Results of the reads after a flip: ``miss``, ``right``, ``error``."""
    wrong: list[str] = dataclasses.field(default_factory=list)

    def __str__(self) -> str:
        ended = ", ".join(f"{number} {what}" for what, number in sorted(self.counts.items()))
        return f"{self.num_flips} flips; reads after them: {ended}; {len(self.wrong)} wrong"

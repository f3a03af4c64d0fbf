"""Whether to look for what comes next instead of sleeping until it is there.

Waking an idle core of a virtual machine takes about 25 us on each side, and a small question is answered in
little more, so who looks for a moment before he sleeps is faster by half. But where cores are fewer than
those who want them, the one that is looked for can't run as long as somebody looks: then looking costs all
of its time, every time. Nobody can tell beforehand, so each side counts what came of it: while looking finds
something often enough it goes on, else it sleeps at once and only tries now and then.
"""

from __future__ import annotations

LOOK_S = 100e-6
"""For so long: the time between the two questions of a put, or that of an answer."""
MAX_TRUST = 16
FOUND = 2
"""What finding adds to the trust; not finding takes 1 away."""
EVERY = 32
"""Without trust one of so many times is a try."""


class Looking:
    """One side's experience. Threads may share it: a count that is lost does no harm."""

    __slots__ = ("_num_slept", "_trust")

    def __init__(self) -> None:
        self._trust = MAX_TRUST
        self._num_slept = 0

    @property
    def pays(self) -> bool:
        """Ask once before each time."""
        if self._trust > 0:
            return True
        self._num_slept += 1
        return self._num_slept % EVERY == 0

    def found(self, is_found: bool) -> None:
        """What came of it."""
        trust = self._trust + (FOUND if is_found else -1)
        self._trust = min(MAX_TRUST, max(0, trust))

    def __repr__(self) -> str:
        return f"<Looking {self._trust}/{MAX_TRUST}>"

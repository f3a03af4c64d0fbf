"""Trace rows as prompts: equal keys become equal tokens, so that a real cache hits where the trace does."""

from __future__ import annotations

from random import Random

from mooncake.sim.traces.trace_row import TraceRow

LOWEST_TOKEN, HIGHEST_TOKEN = 1000, 30_000
"""Plain tokens in every common vocabulary; special ones are at the ends."""
_SALT = 0x5EED


class TracePrompts:
    """Generates token ids from keys: a block's tokens depend on its key alone."""

    def __init__(self, block_tokens: int, seed: int = 0) -> None:
        self._block_tokens = block_tokens
        self._seed = seed

    def tokens(self, row: TraceRow, number: int) -> list[int]:
        """The prompt of row ``number``. Tokens that no key covers are unique to the row."""
        found: list[int] = []
        for key in row.keys:
            found += self._draw(f"{_SALT}/{self._seed}/{key}", self._block_tokens)
        missing = row.num_input - len(found)
        if missing > 0:
            found += self._draw(f"{_SALT}/{self._seed}/row {number}", missing)
        return found[: row.num_input]

    @staticmethod
    def _draw(seed: str, num_tokens: int) -> list[int]:
        return Random(seed).choices(range(LOWEST_TOKEN, HIGHEST_TOKEN), k=num_tokens)

"""What a trace is made of: one request per row, and the error that a bad row raises.

``keys`` name the row's prefix block by block: an equal key means an equal whole prefix up to the end
of that block, across all sessions and rows, so that a cache needs nothing but them. They cover the
input rounded up to whole blocks (the last one may be partial) or rounded down, as the trace has them;
how many tokens a block has, the trace says (``Trace.block_tokens``).
"""

from __future__ import annotations

from typing import NamedTuple

from mooncake.errors import InvalidArgument


class TraceRow(NamedTuple):
    """One request: when it came, how long its prompt and answer are, and what it shares with others."""

    timestamp_s: float
    num_input: int
    num_output: int
    keys: tuple[int, ...]
    session: str | None = None


class TraceError(InvalidArgument):
    """A trace is not what its format says. Nothing that was read before it may pass for the whole."""

    def __init__(self, path: str, row: int, field: str, value: object, allowed: str) -> None:
        super().__init__(field, value, allowed)
        place = f"{path}, row {row}" if row else path
        self.args = (f"{place}: {self.args[0]}",)
        self.path = path
        self.row = row
        """Counted from 1, as an editor counts lines; 0: the file as a whole."""

"""The elements of a trace: one request per row, and the error that a bad row raises.

``keys`` name the row's prefix block by block: an equal key means an equal whole prefix up to the end
of that block, across all sessions and rows, so that a cache needs nothing but them. They cover the
input rounded up to whole blocks (the last one may be partial) or rounded down, as the trace has them;
``Trace.block_tokens`` is the size of a block.
"""

from __future__ import annotations

from typing import NamedTuple

from mooncake.errors import InvalidArgument


class TraceRow(NamedTuple):
    """One request: its arrival, the lengths of its prompt and answer, and the prefix that it shares with
    others."""

    timestamp_s: float
    num_input: int
    num_output: int
    keys: tuple[int, ...]
    session: str | None = None


class TraceError(InvalidArgument):
    """A trace violates its format. Rows read before the error must not be used as the whole trace."""

    def __init__(self, path: str, row: int, field: str, value: object, allowed: str) -> None:
        super().__init__(field, value, allowed)
        place = f"{path}, row {row}" if row else path
        self.args = (f"{place}: {self.args[0]}",)
        self.path = path
        self.row = row
        """Counted from 1, as in an editor; 0: the file as a whole."""

# SPDX-License-Identifier: Apache-2.0
"""Traces: files of requests, read row by row, and the same requests faster, shorter or in other blocks.

``read_trace`` gives a ``Trace``, which can be iterated again and again; each time it streams the file, so a
file of any size takes the memory of a row (of the running sessions, where a file has sessions). A row that
violates the format raises ``TraceError`` out of the iteration, so that no caller summarises a part as the
whole. The formats are in ``formats.py``; times and lengths change here and nowhere else.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, count, islice
from typing import Literal

from mooncake.errors import InvalidArgument
from mooncake.sim.traces import formats
from mooncake.sim.traces.trace_file import TraceError, TraceFile, TraceRow

__all__ = ["Trace", "TraceError", "TraceOptions", "TraceRow", "read_trace"]

_BLOCK_TOKENS: dict[formats.Format, int] = {"mooncake": 512, "sessions": 64, "azure": 512}
_EXTRA_HALF = 1 << 62
"""Bit in the key of the half block that everything behind one first block shares (``is_halved``)."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """How to read a trace."""

    format: Literal["auto", "mooncake", "sessions", "azure"] = "auto"
    """Name of the format; ``auto``: by the first line."""
    block_tokens: int = 0
    """Tokens a key stands for in the file; 0: the format's own (512; sessions: 64)."""
    num_rows: int = 0
    """Read only the first rows, this many; 0: all. A file that has fewer is an error."""
    speedup: float = 1.0
    """Factor by which requests come faster."""
    divide_lengths: int = 1
    """Factor by which prompts, answers and blocks are shorter, for small machines; sharing is unchanged."""
    coarsen: int = 1
    """Number of blocks that become one. 2: the 1,024-token blocks of Table 1."""
    is_halved: bool = False
    """Read full blocks of half the size, and count the half block after the first block as shared by all
    that share the first: the 256-token blocks of FAST'25, whose system prompts end in the second block."""
    max_silence_s: float = 3600.0
    """A longer time without a request is an error: lost rows, or times in another unit. 0: no limit.
    Between the turns of sessions it is cut to this instead."""
    is_spread: bool = False
    """Rows of one instant come evenly until the next one: where a trace's times are rounded (to 3 s in
    Mooncake's), the arrivals were not."""
    num_concurrent: int = 32
    """sessions: number that run at once; when one ends the next one begins. Bounds the memory."""
    stagger_s: float = 10.0
    """sessions: interval between the starts of the first ones."""


class Trace:
    """A trace file under its options."""

    def __init__(self, path: str, options: TraceOptions) -> None:
        self.path = path
        self.options = options
        _check(options)
        self.format: formats.Format = formats.sniff(path) if options.format == "auto" else options.format
        in_file = options.block_tokens or _BLOCK_TOKENS[self.format]
        divisor = options.divide_lengths * (2 if options.is_halved else 1)
        if in_file % divisor:
            raise InvalidArgument("divide_lengths", options.divide_lengths, f"a divisor of {in_file} tokens")
        if options.is_halved and self.format != "mooncake":
            raise InvalidArgument("is_halved", self.format, "format mooncake, whose blocks are halved")
        self._block_tokens_in_file = in_file
        self.block_tokens = in_file * options.coarsen // divisor
        """Tokens that a key of a row stands for."""
        self._lines = TraceFile(path)

    @property
    def size_bytes(self) -> int:
        """Size of the file, for a progress bar; 0 before the first row."""
        return self._lines.size_bytes

    @property
    def read_bytes(self) -> int:
        return self._lines.read_bytes

    def __iter__(self) -> Iterator[TraceRow]:
        self._lines = lines = TraceFile(self.path)
        changed: Callable[[TraceRow], TraceRow] | None = self._reshape if self._is_reshaped else None
        rows = self._rows(lines)
        if self.options.is_spread:
            rows = _spread(rows)
        num_rows = 0
        for row in islice(rows, self.options.num_rows or None):
            num_rows += 1
            yield changed(row) if changed is not None else row
        if num_rows < self.options.num_rows:
            raise TraceError(
                self.path, 0, "num_rows", self.options.num_rows, f"1 to {num_rows}, all its rows"
            )

    @property
    def _is_reshaped(self) -> bool:
        options = self.options
        return options.speedup != 1 or options.divide_lengths > 1 or options.coarsen > 1 or options.is_halved

    def _rows(self, lines: TraceFile) -> Iterator[TraceRow]:
        if self.format == "sessions":
            options = self.options
            whole = formats.sessions(lines, self._block_tokens_in_file)
            return _side_by_side(whole, options.num_concurrent, options.stagger_s, options.max_silence_s)
        rows = (
            formats.azure(lines)
            if self.format == "azure"
            else formats.mooncake(lines, self._block_tokens_in_file)
        )
        return self._without_silence(rows, lines)

    def _without_silence(self, rows: Iterable[TraceRow], lines: TraceFile) -> Iterator[TraceRow]:
        most = self.options.max_silence_s
        last_s: float | None = None
        for row in rows:
            if most and last_s is not None and row.timestamp_s - last_s > most:
                lines.refuse(
                    "timestamp",
                    f"{row.timestamp_s - last_s:g} s after the row before",
                    f"at most {most:g} s (max_silence_s; 0 allows any)",
                )
            last_s = row.timestamp_s
            yield row

    def _reshape(self, row: TraceRow) -> TraceRow:
        options = self.options
        num_input, num_output, keys = row.num_input, row.num_output, row.keys
        if options.is_halved:
            keys = _halved(keys, num_input, self._block_tokens_in_file // 2)
        if options.coarsen > 1:
            tail = keys[-1:] if self.format != "sessions" and len(keys) % options.coarsen else ()
            keys = keys[options.coarsen - 1 :: options.coarsen] + tail
        if options.divide_lengths > 1:
            # Rounded like the keys, so that as many blocks as before have keys.
            up = 0 if self.format == "sessions" else options.divide_lengths - 1
            num_input = max(1, (num_input + up) // options.divide_lengths)
            num_output = -(-num_output // options.divide_lengths)
        return TraceRow(row.timestamp_s / options.speedup, num_input, num_output, keys, row.session)


def read_trace(path: str, options: TraceOptions | None = None) -> Trace:
    """Open a trace file. Its format is detected at once, its rows are checked as they are read."""
    return Trace(path, options or TraceOptions())


def _check(options: TraceOptions) -> None:
    for field, least in (
        ("block_tokens", 0),
        ("num_rows", 0),
        ("divide_lengths", 1),
        ("coarsen", 1),
        ("num_concurrent", 1),
    ):
        if getattr(options, field) < least:
            raise InvalidArgument(field, getattr(options, field), f"{least} or more")
    for field in ("stagger_s", "max_silence_s"):
        if not 0 <= getattr(options, field) < float("inf"):
            raise InvalidArgument(field, getattr(options, field), "0 or more")
    if not 0 < options.speedup < float("inf"):
        raise InvalidArgument("speedup", options.speedup, "more than 0")


def _spread(rows: Iterator[TraceRow]) -> Iterator[TraceRow]:
    """Spread rows of one instant evenly until the next; the last ones as far as those before them."""
    gap_s = 0.0
    now: list[TraceRow] = []
    for row in chain(rows, (None,)):
        if row is not None and (not now or row.timestamp_s == now[0].timestamp_s):
            now.append(row)
            continue
        if row is not None:
            gap_s = row.timestamp_s - now[0].timestamp_s
        for number, one in enumerate(now):
            yield one._replace(timestamp_s=one.timestamp_s + gap_s * number / len(now))
        now = [row] if row is not None else []


def _halved(keys: tuple[int, ...], num_input: int, half_tokens: int) -> tuple[int, ...]:
    """Keys of the full half blocks."""
    halves = [half for key in keys for half in (2 * key, 2 * key + 1)][: num_input // half_tokens]
    if len(halves) > 2:
        halves[2] = _EXTRA_HALF | keys[0]
    return tuple(halves)


def _side_by_side(
    whole: Iterator[list[TraceRow]], num_concurrent: int, stagger_s: float, max_pause_s: float
) -> Iterator[TraceRow]:
    """Interleave the rows of sessions that run at once, in the order of time."""
    numbers = count()
    waiting: list[tuple[float, int, Iterator[TraceRow], TraceRow]] = []

    def begin(now: float) -> None:
        rows = next(whole, None)
        if rows is not None:
            timed = iter(_timed(rows, now, max_pause_s))
            first = next(timed)
            heapq.heappush(waiting, (first.timestamp_s, next(numbers), timed, first))

    for place in range(num_concurrent):
        begin(place * stagger_s)
    while waiting:
        now, number, timed, row = waiting[0]
        yield row
        following = next(timed, None)
        if following is not None:
            heapq.heapreplace(waiting, (following.timestamp_s, number, timed, following))
        else:
            heapq.heappop(waiting)
            begin(now)


def _timed(rows: list[TraceRow], begin_s: float, max_pause_s: float) -> Iterator[TraceRow]:
    """The session from ``begin_s`` on, with its pauses cut."""
    now, last_s = begin_s, rows[0].timestamp_s
    for row in rows:
        pause_s = row.timestamp_s - last_s
        now += min(pause_s, max_pause_s) if max_pause_s else pause_s
        last_s = row.timestamp_s
        yield row._replace(timestamp_s=now)

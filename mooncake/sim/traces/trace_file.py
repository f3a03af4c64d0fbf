# SPDX-License-Identifier: Apache-2.0
"""The elements of a trace, one request per row, and its file as lines: plain or gzip.

``TraceRow.keys`` name the row's prefix block by block: an equal key means an equal whole prefix up to the end
of that block, across all sessions and rows, so that a cache needs nothing but them. They cover the
input rounded up to whole blocks (the last one may be partial) or rounded down, as the trace has them;
``Trace.block_tokens`` is the size of a block.

``TraceFile`` holds never more than one line in memory. It owns the reader's position (row, bytes) and turns
failures below the format into ``TraceError``: no such file, a truncated compressed file, a line without end,
an empty line.
"""

from __future__ import annotations

import gzip
import io
import os
import zlib
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple, Never

from mooncake.errors import InvalidArgument

MAX_LINE_BYTES = 16 << 20
"""A prompt of 100 million tokens in 512-token blocks fits; a file without line ends does not."""


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


class TraceFile:
    """One pass over a file, from its beginning."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.row = 0
        self.size_bytes = 0
        self.read_bytes = 0
        """Bytes of the file as stored, compressed or not: for a progress bar."""

    def refuse(self, field: str, value: object, allowed: str) -> Never:
        """Return the error for the line that was read last."""
        raise TraceError(self.path, self.row, field, value, allowed)

    def __iter__(self) -> Iterator[bytes]:
        try:
            with io.BufferedReader(io.FileIO(self.path), 1 << 20) as raw:
                self.size_bytes = os.fstat(raw.fileno()).st_size
                is_gzip = raw.peek(2)[:2] == b"\x1f\x8b"
                if is_gzip:
                    with gzip.open(raw) as plain:
                        yield from self._lines(plain, raw)
                else:
                    yield from self._lines(raw, raw)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            self.row += 1
            self.refuse("gzip stream", str(error), "a whole file; fetch it again")
        except OSError as error:
            raise TraceError(self.path, 0, "file", error.strerror or str(error), "a readable file") from None
        if self.row == 0:
            raise TraceError(self.path, 0, "file", "empty", "at least one row")

    def _lines(self, source: BinaryIO | gzip.GzipFile, raw: BinaryIO) -> Iterator[bytes]:
        while line := source.readline(MAX_LINE_BYTES + 1):
            self.row += 1
            if len(line) > MAX_LINE_BYTES:
                self.refuse("line", line[:40], f"at most {MAX_LINE_BYTES} bytes")
            if not line.strip():
                self.refuse("line", line, "a row; no empty lines, which may be lost rows")
            self.read_bytes = raw.tell()
            yield line

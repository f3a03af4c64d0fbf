# SPDX-License-Identifier: Apache-2.0
"""Traces: files of requests, read row by row, and the same requests faster, shorter or in other blocks.

``read_trace`` gives a ``Trace``, which can be iterated again and again; each time it streams the file, so a
file of any size takes the memory of a row (of the running sessions, where a file has sessions). A row that
violates the format raises ``TraceError`` out of the iteration, so that no caller summarises a part as the
whole. Times and lengths change in ``Trace`` and nowhere else.

``TraceRow.keys`` name the row's prefix block by block: an equal key means an equal whole prefix up to the end
of that block, across all sessions and rows, so that a cache needs nothing but them. They cover the input
rounded up to whole blocks (the last one may be partial) or rounded down, as the trace has them;
``Trace.block_tokens`` is the size of a block.

``TraceFile`` is the file as lines, plain or gzip. It holds never more than one line in memory, owns the
reader's position (row, bytes) and turns failures below the format into ``TraceError``: no such file, a
truncated compressed file, a line without end, an empty line. Each format is a generator of rows that
validates everything:

* ``mooncake``: JSON lines ``timestamp`` (ms), ``input_length``, ``output_length``, ``hash_ids``; one id per
  block of 512 tokens, the last of which may be partial. Other fields are not read, which a note says.
* ``sessions``: JSON lines of agents' sessions, one session after the other, each from its own time 0, with
  ids of its own and one id per *full* block of 64 tokens.
* ``recording``: what our gateway records (``recorded_requests``): a header, then a row for each request in
  the order of their ends, with one id per full block of the header's size, or none where no prefix is known.
  Rows are given in the order of arrival, those that were rejected with answers of the mean length.
* ``csv``: a column of times (dates, or seconds), of prompts' and of answers' tokens, in any order and with
  the names of Azure's, BurstGPT's or Vidur's traces (``CSV_NAMES``): arrivals and lengths, nothing about
  prefixes.

An id names a whole prefix, so behind each id there is one parent, and ``BlockParents`` holds every row to
that in bounded memory.
"""

from __future__ import annotations

import codecs
import csv
import dataclasses
import datetime
import gzip
import heapq
import io
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, count, islice
from typing import Annotated, Any, BinaryIO, Literal, NamedTuple, Never, TypeAlias, TypeVar

import msgspec
import numpy as np

from mooncake.errors import InvalidArgument
from mooncake.recorded_requests import RECORDING_VERSION, RecordedRequest, RecordingHeader

MAX_LINE_BYTES = 16 << 20
"""A prompt of 100 million tokens in 512-token blocks fits; a file without line ends does not."""

OTHER_FORMATS = {"zstd": b"\x28\xb5\x2f\xfd", "xz": b"\xfd7zXZ\0", "bzip2": b"BZh", "zip": b"PK\x03\x04"}
"""First bytes of compressed files that are not read."""


class TraceRow(NamedTuple):
    """One request: its arrival, the lengths of its prompt and answer, and the prefix that it shares with
    others."""

    timestamp_s: float
    num_input: int
    num_output: int
    keys: tuple[int, ...]
    session: str | None = None
    recorded: RecordedRequest | None = None
    """All that was recorded of it, its outcome and times included."""
    pause_s: float = 0.0
    """From the end of the session's former answer until it was sent, where a file says that."""


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
        self.notes: list[str] = []
        """Sentences on how the file is read, known after the first row of a trace."""

    def refuse(self, field: str, value: object, allowed: str) -> Never:
        """Return the error for the line that was read last."""
        raise TraceError(self.path, self.row, field, value, allowed)

    def __iter__(self) -> Iterator[bytes]:
        try:
            with io.BufferedReader(io.FileIO(self.path), 1 << 20) as raw:
                self.size_bytes = os.fstat(raw.fileno()).st_size
                begin = raw.peek(8)
                for name, magic in OTHER_FORMATS.items():
                    if begin.startswith(magic):
                        self.refuse("file", f"compressed with {name}", "a plain file, or one of gzip")
                if begin.startswith(b"\x1f\x8b"):
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
            if self.row == 1 and line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                allowed = f"UTF-8; iconv -f UTF-16 -t UTF-8 {self.path} makes that of it"
                self.refuse("file", "text in UTF-16", allowed)
            if self.row == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if self.row == 1 and line.lstrip()[:1] == b"[":
                allowed = f"one JSON object a line, not an array; jq -c '.[]' {self.path} makes lines of it"
                self.refuse("file", line[:40], allowed)
            if len(line) > MAX_LINE_BYTES:
                self.refuse("line", line[:40], f"at most {MAX_LINE_BYTES} bytes")
            if not line.strip():
                self.refuse("line", line, "a row; no empty lines, which may be lost rows")
            self.read_bytes = raw.tell()
            yield line


Format: TypeAlias = Literal["mooncake", "sessions", "csv", "azure", "recording"]
"""``azure`` is an older name of ``csv``."""
TimeUnit: TypeAlias = Literal["auto", "s", "ms", "us", "ns"]
UNITS_PER_S = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}
EPOCH_S = (1e9, 1e10)
"""A first time from 2001 to 2286 is one since 1970: no trace begins 30 years after its time 0."""

MAX_TOKENS = 100_000_000
MAX_ID = (1 << 60) - 1
MAX_SESSION_ID = (1 << 32) - 1
MAX_SESSIONS = 1 << 24
MAX_NAMED = 12
"""Names that a note lists."""
USUAL_BLOCK_TOKENS = (16, 32, 64, 128, 256, 512, 1024)
"""Sizes of blocks that a refusal suggests."""
_CHAIN_SLOTS = 1 << 22
_ALLOWED = {
    "timestamp": "milliseconds from 0 to 1e12, or (not in sessions) a time since 1970",
    "input_length": f"a whole number from 1 to {MAX_TOKENS}",
    "output_length": f"a whole number from 0 to {MAX_TOKENS}",
    "think_ms": "milliseconds, 0 or more",
    "api_ms": "milliseconds, 0 or more",
    "hash_ids": f"whole numbers from 0 to {MAX_ID}; within sessions to {MAX_SESSION_ID}",
    "session": "a name of 1 to 200 characters",
    "status": "done, rejected or failed",
}

_INSTANT = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(\.\d{1,9})?(Z|[+-]\d\d:?\d\d)?")

_SECONDS = re.compile(r"\d{1,19}(\.\d*)?([eE][+-]?\d{1,2})?")
CSV_NAMES = {
    "times": ("timestamp", "arrivedat", "arrivaltime"),
    "prompts' tokens": ("contexttokens", "requesttokens", "numprefilltokens", "inputtokens", "prompttokens"),
    "answers' tokens": (
        "generatedtokens",
        "responsetokens",
        "numdecodetokens",
        "outputtokens",
        "completiontokens",
    ),
}
"""Names of the columns of CSV files, without regard to case, spaces and underscores: Azure's, BurstGPT's,
Vidur's and some that are usual."""

_Line = TypeVar("_Line")
_Millis = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
_Time = Annotated[float, msgspec.Meta(ge=0, le=1e19)]
_Input = Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
_Output = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
_Id = Annotated[int, msgspec.Meta(ge=0, le=MAX_ID)]
_SessionId = Annotated[int, msgspec.Meta(ge=0, le=MAX_SESSION_ID)]


class MooncakeLine(msgspec.Struct, gc=False):
    timestamp: _Time
    input_length: _Input
    output_length: _Output
    hash_ids: list[_Id] = []
    """None where no prefix is known."""


class SessionLine(msgspec.Struct, gc=False):
    session: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    timestamp: _Millis
    input_length: _Input
    output_length: _Output
    hash_ids: list[_SessionId]
    think_ms: _Millis = 0.0
    api_ms: _Millis = 0.0


class BlockParents:
    """Checks that each id has one parent, for the most recent ids that fit in its table.

    Ids that a trace numbers from 0, as the published ones do, are all remembered up to 4 million blocks.
    """

    def __init__(self) -> None:
        # Plus 1, so that 0 is none: zeros take no memory until they are written.
        self._ids = np.zeros(_CHAIN_SLOTS, np.int64)
        self._parents = np.zeros(_CHAIN_SLOTS, np.int64)

    def check(self, lines: TraceFile, keys: list[int]) -> None:
        if len(set(keys)) != len(keys):
            lines.refuse("hash_ids", _first_twice(keys), "each id once in a row: it names one whole prefix")
        ids = np.array(keys, np.int64) + 1
        parents = np.empty_like(ids)
        parents[:1] = 0
        parents[1:] = ids[:-1]
        slots = ids & (_CHAIN_SLOTS - 1)
        wrong = (self._ids[slots] == ids) & (self._parents[slots] != parents)
        if wrong.any():
            place = int(wrong.argmax())
            allowed = f"{_after(int(self._parents[slots[place]]))} as before: an id names one whole prefix"
            lines.refuse(f"hash_ids[{place}]", f"{keys[place]} {_after(int(parents[place]))}", allowed)
        self._ids[slots] = ids
        self._parents[slots] = parents


def _first_twice(keys: list[int]) -> int:
    """The first key that is equal to one before it. There must be one."""
    seen: set[int] = set()
    for key in keys:
        if key in seen:
            return key
        seen.add(key)
    raise AssertionError("no key is there twice")


def _after(parent: int) -> str:
    return f"after {parent - 1}" if parent else "in first place"


def sniff_format(path: str) -> Format:
    """The format of the first line."""
    lines = TraceFile(path)
    first = next(iter(lines))
    if first.lstrip()[:1] != b"{":
        return "csv"
    if b'"conversations"' in first and b'"timestamp"' not in first:
        allowed = "a trace: rows with times and lengths, which conversations (as ShareGPT's) lack"
        lines.refuse("file", first[:40], allowed)
    if b'"recording"' in first:
        return "recording"
    return "sessions" if b'"session"' in first else "mooncake"


class ArrivalTimes:
    """Arrival times of one pass over a file: numbers in one unit and in order, as seconds."""

    def __init__(self, lines: TraceFile, units_per_s: float, time_unit: TimeUnit) -> None:
        self._lines = lines
        self._units_per_s = UNITS_PER_S.get(time_unit, units_per_s)
        self._is_known = time_unit != "auto"
        self._has_begun = False
        self._origin = 0.0
        self._last = 0.0

    def seconds(self, field: str, time: float) -> float:
        """Seconds since the file's time 0, or since its first row where times are since 1970."""
        if not self._has_begun:
            self._has_begun = True
            self._begin(time)
        if time < self._last:
            allowed = f"{self._last:.15g} (the row before) or more; sort the rows by time"
            self._lines.refuse(field, time, allowed)
        self._last = time
        return (time - self._origin) / self._units_per_s

    def _begin(self, first: float) -> None:
        for name, units_per_s in UNITS_PER_S.items():
            is_given = not self._is_known or units_per_s == self._units_per_s
            if is_given and EPOCH_S[0] <= first / units_per_s < EPOCH_S[1]:
                self._units_per_s, self._origin = units_per_s, first
                self._lines.notes.append(
                    f"its times are read as {name} since 1970 and count from the first row; "
                    "--time-unit states another unit"
                )
                return
        if self._units_per_s == UNITS_PER_S["ms"] and not self._is_known and first % 1:
            self._lines.notes.append("its times are read as milliseconds; --time-unit s if they are seconds")


def mooncake_rows(lines: TraceFile, block_tokens: int, time_unit: TimeUnit) -> Iterator[TraceRow]:
    chain = BlockParents()
    times = ArrivalTimes(lines, UNITS_PER_S["ms"], time_unit)
    decode = msgspec.json.Decoder(MooncakeLine).decode
    rounds_up: bool | None = None  # unknown until a row shows it
    for text in lines:
        line = _decoded(lines, text, decode)
        if lines.row == 1:
            _note_fields(lines, text, MooncakeLine.__struct_fields__)
            if not line.hash_ids:
                lines.notes.append("the first row has no hash_ids: it shares no prefix")
        timestamp_s = times.seconds("timestamp", line.timestamp)
        if line.hash_ids:
            if rounds_up is None and line.input_length % block_tokens:
                rounds_up = len(line.hash_ids) != line.input_length // block_tokens
            _count(lines, line.hash_ids, line.input_length, block_tokens, rounds_up is not False)
            chain.check(lines, line.hash_ids)
        yield TraceRow(timestamp_s, line.input_length, line.output_length, tuple(line.hash_ids))


def session_rows(lines: TraceFile, block_tokens: int) -> Iterator[list[TraceRow]]:
    """Whole sessions, in the order of the file; their ids are made global, their times stay their own."""
    decode = msgspec.json.Decoder(SessionLine).decode
    chain, seen = BlockParents(), set[str]()
    rows: list[TraceRow] = []
    ids: list[int] = []
    last_ms = 0.0
    for text in lines:
        line = _decoded(lines, text, decode)
        if lines.row == 1:
            _note_fields(lines, text, SessionLine.__struct_fields__)
        if not rows or line.session != rows[-1].session:
            if rows:
                yield rows
            if line.session in seen:
                lines.refuse("session", line.session, "all rows of a session one after another")
            seen.add(line.session)
            if len(seen) > MAX_SESSIONS:
                lines.refuse("session", line.session, f"at most {MAX_SESSIONS} sessions")
            rows, ids = [], []
            chain = BlockParents()
        elif line.timestamp < last_ms:
            lines.refuse("timestamp", line.timestamp, f"{last_ms:g} (the turn before) or more")
        last_ms = line.timestamp
        _count(lines, line.hash_ids, line.input_length, block_tokens, False)
        chain.check(lines, line.hash_ids)
        # What a turn shares with the one before it is kept once in memory.
        num_same = _num_shared(ids, line.hash_ids)
        ids, base = line.hash_ids, len(seen) << 32
        keys = (rows[-1].keys[:num_same] if rows else ()) + tuple([base + key for key in ids[num_same:]])
        row = TraceRow(line.timestamp / 1e3, line.input_length, line.output_length, keys, line.session)
        rows.append(row._replace(pause_s=line.think_ms / 1e3))
    yield rows


def recording_header(path: str) -> RecordingHeader:
    """The first line of a recording. Raises TraceError."""
    lines = TraceFile(path)
    return _header(lines, next(iter(lines)))


def _header(lines: TraceFile, text: bytes) -> RecordingHeader:
    try:
        header = msgspec.json.decode(text, type=RecordingHeader)
    except msgspec.MsgspecError as error:
        lines.refuse("header", text[:60], f"the first line of a recording ({error})")
    if header.recording != RECORDING_VERSION:
        lines.refuse(
            "recording", header.recording, f"{RECORDING_VERSION}, the version that this program reads"
        )
    return header


class _RecordedEnd(msgspec.Struct, gc=False):
    """What of a line says how a request ended. The header is read as one without tokens."""

    output_length: int = 0
    status: str = "done"


def num_output_of_rejected(lines: TraceFile) -> int:
    """Tokens that an answer to a rejected request of a recording would have had: the mean of those that are
    done. Notes that this is assumed, if it is."""
    num_rejected = num_done = num_tokens = 0
    decode = msgspec.json.Decoder(_RecordedEnd).decode
    try:
        for text in TraceFile(lines.path):
            line = decode(text)
            if line.status == "rejected":
                num_rejected += 1
            elif line.status == "done" and line.output_length:
                num_done += 1
                num_tokens += line.output_length
    except (TraceError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass  # refused with its place if it is read as a row: a run may end before it
    expected = max(1, round(num_tokens / max(1, num_done)))
    if num_rejected:
        lines.notes.append(
            f"{num_rejected:,} of its requests were rejected; their answers, of unknown length, are "
            f"taken to have {expected:,} tokens, the mean of those that are done"
        )
    return expected


def recording_rows(lines: TraceFile) -> Iterator[TraceRow]:
    """Rows by arrival. Those that arrived while others were in progress are held until no earlier one can
    come. A request that was rejected is one of the load, which another cluster may serve."""
    rejected_output = num_output_of_rejected(lines)
    parents, waiting, numbers = BlockParents(), list[tuple[float, int, TraceRow]](), count()
    decode = msgspec.json.Decoder(RecordedRequest).decode
    header: RecordingHeader | None = None
    ended_ms = last_ms = 0.0
    for text in lines:
        if header is None:
            header = _header(lines, text)
            continue
        line = _decoded(lines, text, decode)
        size = header.block_tokens
        if line.hash_ids:
            _count(lines, line.hash_ids, line.input_length, size, False)
        parents.check(lines, [*line.hash_ids, *line.output_hash_ids])
        if line.timestamp < last_ms:
            allowed = f"{last_ms:g} or more: no request lasts longer than {header.longest_s:g} s"
            lines.refuse("timestamp", line.timestamp, allowed)
        ended_ms = max(ended_ms, line.ends_ms)
        row = TraceRow(
            line.timestamp / 1e3,
            line.input_length,
            rejected_output if line.status == "rejected" else line.output_length,
            tuple(line.hash_ids),
            line.session or None,
            line,
        )
        heapq.heappush(waiting, (line.timestamp, next(numbers), row))
        while waiting and waiting[0][0] <= ended_ms - header.longest_s * 1e3:
            last_ms, _, row = heapq.heappop(waiting)
            yield row
    while waiting:
        yield heapq.heappop(waiting)[2]


def csv_rows(lines: TraceFile, time_unit: TimeUnit) -> Iterator[TraceRow]:
    times = ArrivalTimes(lines, UNITS_PER_S["s"], time_unit)
    delimiter = ","
    columns: CsvColumns | None = None
    begin: datetime.datetime | None = None
    last_s = 0.0
    for text in lines:
        line = text.decode("utf-8", "backslashreplace").strip("\r\n")
        if columns is None:
            delimiter = max(",;\t", key=line.count)
            columns = _csv_columns(lines, _cells(lines, line, delimiter))
            continue
        cells = _cells(lines, line, delimiter)
        if len(cells) != len(columns.names):
            lines.refuse("row", line, f"{len(columns.names)} values: {','.join(columns.names)}")
        time = cells[columns.time].strip()
        if lines.row == 2:
            columns.has_dates = not _SECONDS.fullmatch(time)
        if columns.has_dates:
            now = _instant(lines, columns.names[columns.time], time)
            begin = begin or now
            timestamp_s = (now - begin).total_seconds()
            if timestamp_s < last_s:
                allowed = "not before the row above; sort the rows by time"
                lines.refuse(columns.names[columns.time], time, allowed)
            last_s = timestamp_s
        elif _SECONDS.fullmatch(time):
            timestamp_s = times.seconds(columns.names[columns.time], float(time))
        else:
            lines.refuse(columns.names[columns.time], time, "seconds, as in the first row")
        num_input = _number(lines, columns.names[columns.num_input], cells[columns.num_input], 1)
        num_output = _number(lines, columns.names[columns.num_output], cells[columns.num_output], 0)
        yield TraceRow(timestamp_s, num_input, num_output, ())
    if lines.row == 1:
        lines.refuse("file", "only a header", "at least one row")


@dataclasses.dataclass(slots=True)
class CsvColumns:
    """Places of the columns of a CSV file that are read."""

    names: list[str]
    time: int
    num_input: int
    num_output: int
    has_dates: bool = False


def _cells(lines: TraceFile, line: str, delimiter: str) -> list[str]:
    if '"' not in line:
        return line.split(delimiter)
    try:
        return next(csv.reader([line], delimiter=delimiter))
    except csv.Error as error:
        lines.refuse("row", line, f"values between {delimiter!r} ({error})")


def _csv_columns(lines: TraceFile, names: list[str]) -> CsvColumns:
    names = [name.strip() for name in names]
    plain = [re.sub(r"[ _]", "", name.lower()) for name in names]
    places = list[int]()
    for what, known in CSV_NAMES.items():
        place = next((plain.index(name) for name in known if name in plain), None)
        if place is None:
            allowed = (
                f"a column of {what}, named {', '.join(known)} (in any case, with spaces or _ or without)"
            )
            lines.refuse("header", ",".join(names), allowed)
        places.append(place)
    others = [name for place, name in enumerate(names) if place not in places and name]
    if others:
        lines.notes.append(f"columns that are not read: {', '.join(others[:MAX_NAMED])}")
    time, num_input, num_output = places
    return CsvColumns(names, time, num_input, num_output)


def _decoded(lines: TraceFile, text: bytes, decode: Callable[[bytes], _Line]) -> _Line:
    try:
        return decode(text)
    except msgspec.ValidationError as error:
        why = str(error)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        lines.refuse("line", text[:60], f"one JSON object ({error})")
    try:
        content = msgspec.json.decode(text)
        field, value, allowed = _fault(content, why)
    except (msgspec.DecodeError, LookupError, TypeError, ValueError, RecursionError):
        lines.refuse("line", text[:60], f"one JSON object ({why})")
    lines.refuse(field, value, allowed)


def _fault(content: Any, why: str) -> tuple[str, object, str]:
    """The field that msgspec rejects, its value and what is allowed."""
    if found := re.search(r"`\$\.([^`]*)`$", why):
        field = found.group(1)
        name, _, index = field.partition("[")
        value = content[name][int(index[:-1])] if index else content[name]
        return field, value, _ALLOWED.get(name, why.partition(" - at ")[0])
    if found := re.search(r"missing required field `(.*)`", why):
        allowed = f"{_ALLOWED[found.group(1)]}; every row needs timestamp, input_length and output_length"
        return found.group(1), None, allowed
    raise ValueError(why)


def _note_fields(lines: TraceFile, text: bytes, known: tuple[str, ...]) -> None:
    """Note the fields of the first row that are not read."""
    content: dict[str, Any] = _decoded(lines, text, msgspec.json.decode)
    others = [name for name in content if name not in known]
    if others:
        lines.notes.append(f"fields that are not read: {', '.join(others[:MAX_NAMED])}")


def _count(lines: TraceFile, ids: list[int], num_tokens: int, block_tokens: int, rounds_up: bool) -> None:
    """Refuse another number of ids than blocks."""
    num_blocks = _num_blocks(num_tokens, block_tokens, rounds_up)
    if len(ids) == num_blocks:
        return
    rounding = "rounded up" if rounds_up else "rounded down"
    allowed = f"{num_blocks} ids ({num_tokens} tokens / {block_tokens}, {rounding})"
    sizes = [
        size
        for size in USUAL_BLOCK_TOKENS
        if len(ids) in (_num_blocks(num_tokens, size, True), _num_blocks(num_tokens, size, False))
    ]
    if sizes:
        allowed += f"; --block-tokens {' or '.join(map(str, sizes))} would fit this row"
    lines.refuse("hash_ids", f"{len(ids)} ids", allowed)


def _num_blocks(num_tokens: int, block_tokens: int, rounds_up: bool) -> int:
    return -(-num_tokens // block_tokens) if rounds_up else num_tokens // block_tokens


def _num_shared(before: list[int], now: list[int]) -> int:
    """Number of equal leading ids. An equal id implies that all before it are equal."""
    low, high = 0, min(len(before), len(now))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if before[middle - 1] == now[middle - 1] else (low, middle - 1)
    return low


def _instant(lines: TraceFile, field: str, text: str) -> datetime.datetime:
    """The instant in UTC; a time without a zone counts as UTC."""
    if _INSTANT.fullmatch(text):
        try:
            found = datetime.datetime.fromisoformat(text)
            return found if found.tzinfo is not None else found.replace(tzinfo=datetime.UTC)
        except ValueError:
            pass
    allowed = "seconds, or a date and time as 2023-11-16 18:17:03.9799600, with or without +00:00"
    lines.refuse(field, text, allowed)


def _number(lines: TraceFile, field: str, text: str, least: int) -> int:
    found = re.fullmatch(r"\s*([0-9]{1,9})(\.0*)?\s*", text)
    if found is None or not least <= int(found[1]) <= MAX_TOKENS:
        lines.refuse(field, text, f"a whole number from {least} to {MAX_TOKENS}")
    return int(found[1])


_BLOCK_TOKENS: dict[Format, int] = {"mooncake": 512, "sessions": 64, "csv": 512, "azure": 512, "recording": 0}
RECORDING_SILENCE_S = 7 * 86400.0
"""Longest silence in a recording by default: its times were measured, and a weekend may be silent. One wrong
time would make a simulation sample the state of its cluster for years."""
_EXTRA_HALF = 1 << 62
"""Bit in the key of the half block that everything behind one first block shares (``is_halved``)."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """How to read a trace."""

    format: Literal["auto", "mooncake", "sessions", "csv", "azure", "recording"] = "auto"
    """Name of the format; ``auto``: by the first line."""
    time_unit: TimeUnit = "auto"
    """Unit of times that are numbers; ``auto``: seconds or a part of them where the first is a time since
    1970 in that, else seconds in CSV files and milliseconds in JSON."""
    block_tokens: int = 0
    """Tokens a key stands for in the file; 0: the format's own (512; sessions: 64; recording: header's)."""
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
    Between the turns of sessions it is cut to this instead. Recordings may be silent for a week, if that is
    longer."""
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
        self.format: Format = sniff_format(path) if options.format == "auto" else options.format
        in_file = options.block_tokens or _BLOCK_TOKENS[self.format]
        if self.format == "recording":
            in_file = recording_header(path).block_tokens
        divisor = options.divide_lengths * (2 if options.is_halved else 1)
        if in_file % divisor:
            raise InvalidArgument("divide_lengths", options.divide_lengths, f"a divisor of {in_file} tokens")
        if options.is_halved and self.format != "mooncake":
            raise InvalidArgument("is_halved", self.format, "format mooncake, whose blocks are halved")
        if options.time_unit != "auto" and self.format in ("sessions", "recording"):
            raise InvalidArgument(
                "time_unit", options.time_unit, f"left out: {self.format} are in milliseconds"
            )
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

    @property
    def notes(self) -> list[str]:
        """Sentences on how the file is read, once a row was read."""
        return self._lines.notes

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
            whole = session_rows(lines, self._block_tokens_in_file)
            return _side_by_side(whole, options.num_concurrent, options.stagger_s, options.max_silence_s)
        if self.format == "recording":
            rows = recording_rows(lines)
        elif self.format in ("csv", "azure"):
            rows = csv_rows(lines, self.options.time_unit)
        else:
            rows = mooncake_rows(lines, self._block_tokens_in_file, self.options.time_unit)
        return self._without_silence(rows, lines)

    def _without_silence(self, rows: Iterable[TraceRow], lines: TraceFile) -> Iterator[TraceRow]:
        most = self.options.max_silence_s
        if self.format == "recording" and most:
            most = max(most, RECORDING_SILENCE_S)
        last_s: float | None = None
        for row in rows:
            if most and last_s is not None and row.timestamp_s - last_s > most:
                lines.refuse(
                    "timestamp",
                    f"{row.timestamp_s - last_s:g} s after the row before",
                    f"at most {most:g} s, since rows may be lost or the unit be another (--time-unit); "
                    "--max-silence 0 allows any",
                )
            last_s = row.timestamp_s
            yield row

    def _reshape(self, row: TraceRow) -> TraceRow:
        options = self.options
        num_input, num_output, keys = row.num_input, row.num_output, row.keys
        if options.is_halved:
            keys = _halved(keys, num_input, self._block_tokens_in_file // 2)
        if options.coarsen > 1:
            has_partial = self.format not in ("sessions", "recording")
            tail = keys[-1:] if has_partial and len(keys) % options.coarsen else ()
            keys = keys[options.coarsen - 1 :: options.coarsen] + tail
        if options.divide_lengths > 1:
            # Rounded like the keys, so that as many blocks as before have keys.
            up = 0 if self.format in ("sessions", "recording") else options.divide_lengths - 1
            num_input = max(1, (num_input + up) // options.divide_lengths)
            num_output = -(-num_output // options.divide_lengths)
        return row._replace(
            timestamp_s=row.timestamp_s / options.speedup,
            num_input=num_input,
            num_output=num_output,
            keys=keys,
        )


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

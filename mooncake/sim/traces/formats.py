# SPDX-License-Identifier: Apache-2.0
"""The formats of traces, each a generator of rows that validates everything.

* ``mooncake``: JSON lines ``timestamp`` (ms), ``input_length``, ``output_length``, ``hash_ids``; one id per
  block of 512 tokens, the last of which may be partial.
* ``sessions``: JSON lines of agents' sessions, one session after the other, each from its own time 0, with
  ids of its own and one id per *full* block of 64 tokens.
* ``azure``: CSV ``TIMESTAMP,ContextTokens,GeneratedTokens``: arrivals and lengths, nothing about prefixes.

An id names a whole prefix, so behind each id there is one parent, and ``BlockParents`` holds every row to
that in bounded memory.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import msgspec
import numpy as np

from mooncake.sim.traces.trace_file import TraceFile, TraceRow

Format: TypeAlias = Literal["mooncake", "sessions", "azure"]

MAX_TOKENS = 100_000_000
MAX_ID = (1 << 60) - 1
MAX_SESSION_ID = (1 << 32) - 1
MAX_SESSIONS = 1 << 24
_CHAIN_SLOTS = 1 << 22
_ALLOWED = {
    "timestamp": "milliseconds from 0 to 1e12",
    "input_length": f"a whole number from 1 to {MAX_TOKENS}",
    "output_length": f"a whole number from 0 to {MAX_TOKENS}",
    "think_ms": "milliseconds, 0 or more",
    "api_ms": "milliseconds, 0 or more",
    "hash_ids": f"whole numbers from 0 to {MAX_ID}; within sessions to {MAX_SESSION_ID}",
    "session": "a name of 1 to 200 characters",
}

_Line = TypeVar("_Line")
_Millis = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
_Input = Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
_Output = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
_Id = Annotated[int, msgspec.Meta(ge=0, le=MAX_ID)]
_SessionId = Annotated[int, msgspec.Meta(ge=0, le=MAX_SESSION_ID)]


class MooncakeLine(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    timestamp: _Millis
    input_length: _Input
    output_length: _Output
    hash_ids: list[_Id]


class SessionLine(msgspec.Struct, forbid_unknown_fields=True, gc=False):
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
            twice = next(key for place, key in enumerate(keys) if key in keys[:place])
            lines.refuse("hash_ids", twice, "each id once in a row: it names one whole prefix")
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


def _after(parent: int) -> str:
    return f"after {parent - 1}" if parent else "in first place"


def sniff(path: str) -> Format:
    """The format of the first line."""
    lines = TraceFile(path)
    first = next(iter(lines))
    if first.lstrip()[:1] != b"{":
        return "azure"
    return "sessions" if b'"session"' in first else "mooncake"


def mooncake(lines: TraceFile, block_tokens: int) -> Iterator[TraceRow]:
    chain, last_ms = BlockParents(), 0.0
    decode = msgspec.json.Decoder(MooncakeLine).decode
    for text in lines:
        line = _decoded(lines, text, decode)
        if line.timestamp < last_ms:
            lines.refuse("timestamp", line.timestamp, f"{last_ms:g} (the row before) or more")
        last_ms = line.timestamp
        num_blocks = -(-line.input_length // block_tokens)
        _count(lines, line.hash_ids, num_blocks, f"{line.input_length} tokens / {block_tokens}, rounded up")
        chain.check(lines, line.hash_ids)
        yield TraceRow(last_ms / 1e3, line.input_length, line.output_length, tuple(line.hash_ids))


def sessions(lines: TraceFile, block_tokens: int) -> Iterator[list[TraceRow]]:
    """Whole sessions, in the order of the file; their ids are made global, their times stay their own."""
    decode = msgspec.json.Decoder(SessionLine).decode
    chain, seen = BlockParents(), set[str]()
    rows: list[TraceRow] = []
    ids: list[int] = []
    for text in lines:
        line = _decoded(lines, text, decode)
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
        elif line.timestamp < rows[-1].timestamp_s * 1e3:
            last_ms = rows[-1].timestamp_s * 1e3
            lines.refuse("timestamp", line.timestamp, f"{last_ms:g} (the turn before) or more")
        num_blocks = line.input_length // block_tokens
        _count(lines, line.hash_ids, num_blocks, f"{line.input_length} tokens / {block_tokens}, rounded down")
        chain.check(lines, line.hash_ids)
        # What a turn shares with the one before it is kept once in memory.
        num_same = _num_shared(ids, line.hash_ids)
        ids, base = line.hash_ids, len(seen) << 32
        keys = (rows[-1].keys[:num_same] if rows else ()) + tuple([base + key for key in ids[num_same:]])
        rows.append(TraceRow(line.timestamp / 1e3, line.input_length, line.output_length, keys, line.session))
    yield rows


def azure(lines: TraceFile) -> Iterator[TraceRow]:
    header = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
    begin: datetime.datetime | None = None
    last_s = 0.0
    for text in lines:
        cells = text.decode("utf-8", "backslashreplace").strip().split(",")
        if lines.row == 1:
            if cells != header:
                lines.refuse("header", ",".join(cells), ",".join(header))
            continue
        if len(cells) != len(header):
            lines.refuse("row", ",".join(cells), f"{len(header)} values: {','.join(header)}")
        now = _instant(lines, cells[0])
        begin = begin or now
        timestamp_s = (now - begin).total_seconds()
        if timestamp_s < last_s:
            lines.refuse("TIMESTAMP", cells[0], "not before the row above")
        last_s = timestamp_s
        num_input = _number(lines, header[1], cells[1], 1)
        yield TraceRow(timestamp_s, num_input, _number(lines, header[2], cells[2], 0), ())
    if begin is None:
        lines.refuse("file", "only a header", "at least one row")


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
        return field, value, _ALLOWED[name]
    if found := re.search(r"missing required field `(.*)`", why):
        return found.group(1), None, _ALLOWED[found.group(1)]
    if found := re.search(r"unknown field `(.*)`", why):
        return found.group(1), content[found.group(1)], "no such field; see docs/simulator.md"
    raise ValueError(why)


def _count(lines: TraceFile, ids: list[int], num_blocks: int, why: str) -> None:
    if len(ids) != num_blocks:
        lines.refuse("hash_ids", f"{len(ids)} ids", f"{num_blocks} ids ({why})")


def _num_shared(before: list[int], now: list[int]) -> int:
    """Number of equal leading ids. An equal id implies that all before it are equal."""
    low, high = 0, min(len(before), len(now))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if before[middle - 1] == now[middle - 1] else (low, middle - 1)
    return low


def _instant(lines: TraceFile, text: str) -> datetime.datetime:
    if re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(\.\d{1,9})?", text):
        try:
            return datetime.datetime.fromisoformat(text)
        except ValueError:
            pass
    lines.refuse("TIMESTAMP", text, "a date and time as 2023-11-16 18:17:03.9799600")


def _number(lines: TraceFile, field: str, text: str, least: int) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text) or not least <= int(text) <= MAX_TOKENS:
        lines.refuse(field, text, f"a whole number from {least} to {MAX_TOKENS}")
    return int(text)

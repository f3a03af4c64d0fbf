# SPDX-License-Identifier: Apache-2.0
"""Records in an append-only file: their framing with lengths and checksums, the file's header, and damage.

A process killed in the middle of a write, and a loss of power, leave a *torn tail*: a record that reaches or
passes the end of the file, or zeros where its end should be, with no whole record behind it. All other bytes
that are not a whole record are *damage*: the records that follow it still exist, and dropping them as if they
were a torn tail would lose acknowledged data. ``scan`` distinguishes the two and finds the records behind
damage again.

``BoundFraming`` is the current format: the checksums cover the offset in the file and a random number of the
file (its salt), so that bytes which look like a record, but were never written there as one (a block that the
disk holds twice, a value crafted by a client), do not pass for one. ``PLAIN`` is the earlier format; in it,
only records that follow each other to the end of the file are recovered after damage. The content of records
is defined by the modules that write them.

A file of bound records begins with a header: its kind, its id, and its salt. ::

    <magic><id> <salt> <CRC-32 of all before>\\n      twice

Twice, because without the salt no record of the file can be recognized.
"""

from __future__ import annotations

import dataclasses
import re
import struct
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable

import msgspec

_PLAIN = struct.Struct("<II")
_BOUND = struct.Struct("<III")
_PLACE = struct.Struct("<QI")

UNBEGUN_BYTES = 1024
"""Upper bound of the bytes written to a new file before its first sync."""

Body = bytes | memoryview


@dataclasses.dataclass(frozen=True, slots=True)
class Damage:
    """Bytes of a file that are not a whole record, with records behind them or no sign of a torn write."""

    offset: int
    num_bytes: int

    def __str__(self) -> str:
        return f"{self.num_bytes} bytes at offset {self.offset}"


@dataclasses.dataclass(frozen=True, slots=True)
class Scan:
    """Content of a file: its whole records and its damage."""

    bodies: list[memoryview]
    """Bodies of all whole records, in the order of the file."""
    num_before: int
    """Number of whole records before the first damage."""
    num_bytes: int
    """Length of the sound beginning: up to the first damage, the torn tail, or the end."""
    damages: list[Damage]
    torn: Damage | None = None
    """The torn tail."""


class Framing(ABC):
    """Format in which the records of a file are delimited and checked."""

    header_bytes: int

    @abstractmethod
    def frame(self, bodies: Iterable[Body], at: int) -> bytes:
        """Bytes of the records, to be appended at offset ``at``."""

    @abstractmethod
    def _end(self, content: memoryview, at: int) -> int | None:
        """End of the record at ``at`` if its header is valid, perhaps behind the end of the file."""

    @abstractmethod
    def _is_whole(self, content: memoryview, at: int, end: int) -> bool:
        """Whether the body of the record at ``at`` matches its checksum."""

    @abstractmethod
    def _next(self, content: memoryview, at: int) -> int | None:
        """Offset of the first whole record behind damage at ``at``."""

    def scan(self, content: Body, at: int = 0) -> Scan:
        """Find the records and the damage in ``content`` from ``at`` on."""
        view = memoryview(content)
        bodies: list[memoryview] = []
        damages: list[Damage] = []
        first: tuple[int, int] | None = None
        while at < len(view):
            end = self._whole(view, at)
            if end is not None:
                bodies.append(view[at + self.header_bytes : end])
                at = end
                continue
            after = self._next(view, at)
            if first is None:
                first = len(bodies), at
            if after is None and self._is_torn(view, at):
                return Scan(bodies, *first, damages, Damage(at, len(view) - at))
            after = len(view) if after is None else after
            damages.append(Damage(at, after - at))
            at = after
        return Scan(bodies, *(first or (len(bodies), at)), damages)

    def bodies(self, content: bytes) -> list[bytes]:
        """Bodies of the records that ``frame`` returned as ``content``."""
        bodies: list[bytes] = []
        at = 0
        while at < len(content):
            end = at + self.header_bytes + int.from_bytes(content[at : at + 4], "little")
            bodies.append(content[at + self.header_bytes : end])
            at = end
        return bodies

    def _whole(self, content: memoryview, at: int) -> int | None:
        """End of the record at ``at`` if it is whole."""
        end = self._end(content, at)
        return end if end is not None and end <= len(content) and self._is_whole(content, at, end) else None

    def _is_torn(self, content: memoryview, at: int) -> bool:
        """Whether the bytes from ``at`` on, with no whole record behind them, may be an unfinished write."""
        written = at + len(bytes(content[at:]).rstrip(b"\0"))
        end = self._end(content, at)
        if end is None:
            return written < at + self.header_bytes
        return end > len(content) or written < end


class BoundFraming(Framing):
    """u32 body bytes | u32 check of these and of the offset | u32 CRC-32 of the body | body. ``salt`` is the
    random number of the file."""

    header_bytes = _BOUND.size

    def __init__(self, salt: int) -> None:
        self.salt = salt

    def frame(self, bodies: Iterable[Body], at: int) -> bytes:
        parts: list[Body] = []
        for body in bodies:
            assert len(body), "a record must not be empty"
            check = self._check(at, len(body))
            parts += (_BOUND.pack(len(body), check, zlib.crc32(body, check)), body)
            at += _BOUND.size + len(body)
        return b"".join(parts)

    def _check(self, at: int, length: int) -> int:
        return zlib.crc32(_PLACE.pack(at, length), self.salt)

    def _end(self, content: memoryview, at: int) -> int | None:
        if at + _BOUND.size > len(content):
            return None
        length, check, _ = _BOUND.unpack_from(content, at)
        return at + _BOUND.size + length if length and check == self._check(at, length) else None

    def _is_whole(self, content: memoryview, at: int, end: int) -> bool:
        _, check, of_body = _BOUND.unpack_from(content, at)
        return bool(zlib.crc32(content[at + _BOUND.size : end], check) == of_body)

    def _next(self, content: memoryview, at: int) -> int | None:
        end = self._end(content, at)
        if end is not None and self._whole(content, end) is not None:
            return end
        for start in range(at + 1, len(content) - _BOUND.size):
            if self._whole(content, start) is not None:
                return start
        return None


class PlainFraming(Framing):
    """u32 body bytes | u32 CRC-32 of the body | body."""

    header_bytes = _PLAIN.size

    def frame(self, bodies: Iterable[Body], at: int) -> bytes:
        return framed(bodies)

    def _end(self, content: memoryview, at: int) -> int | None:
        if at + _PLAIN.size > len(content):
            return None
        length = _PLAIN.unpack_from(content, at)[0]
        return at + _PLAIN.size + length if length else None

    def _is_whole(self, content: memoryview, at: int, end: int) -> bool:
        return bool(zlib.crc32(content[at + _PLAIN.size : end]) == _PLAIN.unpack_from(content, at)[1])

    def _next(self, content: memoryview, at: int) -> int | None:
        start, last = at + 1, (at, at)
        while start < len(content) - _PLAIN.size:
            end = start
            while (after := self._whole(content, end)) is not None:
                end = after
            if end > start:
                last = start, end
            start = max(end, start + 1)
        begin, end = last
        return begin if end > begin and (end == len(content) or self._is_torn(content, end)) else None


PLAIN = PlainFraming()


def framed(bodies: Iterable[Body]) -> bytes:
    """Bytes of the records in the format ``PLAIN``."""
    parts: list[Body] = []
    for body in bodies:
        parts += (_PLAIN.pack(len(body), zlib.crc32(body)), body)
    return b"".join(parts)


def unframed(content: Body) -> tuple[list[memoryview], int]:
    """Bodies of the whole ``PLAIN`` records at the start of ``content``, and their length in bytes."""
    bodies: list[memoryview] = []
    view, at = memoryview(content), 0
    while at + _PLAIN.size < len(content):
        length, checksum = _PLAIN.unpack_from(content, at)
        body = view[at + _PLAIN.size : at + _PLAIN.size + length]
        if not length or len(body) < length or zlib.crc32(body) != checksum:
            break
        bodies.append(body)
        at += _PLAIN.size + length
    return bodies, at


def describe_damage(found: Scan) -> str:
    """Where a file is damaged and what is left of it, for messages."""
    where = ", ".join(map(str, found.damages[:3]))
    if len(found.damages) > 3:
        where += f" and {len(found.damages) - 3} more places"
    num_behind = len(found.bodies) - found.num_before
    return f"damage of {where}; {found.num_before} whole records before it, {num_behind} behind"


class LogHeader(msgspec.Struct, frozen=True):
    """One of the two lines of a header."""

    id: str
    salt: int
    is_whole: bool = True


def header_num_bytes(magic: bytes) -> int:
    """Length of both lines of the header."""
    return 2 * _line_bytes(magic)


def header_of(magic: bytes, log_id: str, salt: int) -> bytes:
    """Header of a new file."""
    line = magic + f"{log_id} {salt:08x} ".encode()
    return 2 * (line + f"{zlib.crc32(line):08x}\n".encode())


def headers_in(magic: bytes, content: bytes) -> list[LogHeader]:
    """The header lines from which a salt can be read, whole ones first; none in a file of another kind."""
    found: list[LogHeader] = []
    length = _line_bytes(magic)
    for line in (content[:length], content[length : 2 * length]):
        match = re.fullmatch(rb".{%d}(.{16}) ([0-9a-f]{8}) .{8}." % len(magic), line, re.DOTALL)
        if match is not None and _num_different(line, magic) <= 2:
            check = f"{zlib.crc32(line[:-9]):08x}\n".encode()
            is_whole = line.startswith(magic) and line.endswith(check)
            found.append(LogHeader(match[1].decode("ascii", "replace"), int(match[2], 16), is_whole))
    return sorted(found, key=lambda one: not one.is_whole)


def is_unbegun(magic: bytes, content: bytes) -> bool:
    """Whether the file is empty or its first write unfinished: a part of the header, perhaps zeros."""
    begun = content.rstrip(b"\0")
    if len(content) > UNBEGUN_BYTES:
        return False
    length = _line_bytes(magic)
    if len(begun) < length:
        return magic.startswith(begun[: len(magic)])
    first, second = begun[:length], begun[length:]
    return bool(len(second) < length and headers_in(magic, first)[:1] and first.startswith(second))


def _line_bytes(magic: bytes) -> int:
    return len(magic) + 16 + 1 + 8 + 1 + 8 + 1


def _num_different(line: bytes, magic: bytes) -> int:
    return sum(a != b for a, b in zip(line, magic, strict=False))

"""Records in a file that is only appended to: each with its length and checksums, and what damage looks like.

A process that is killed in the middle of a write, and a loss of power, leave a *torn tail*: a record that
reaches or passes the end of the file, or zeros where its end should be, and nothing that is whole behind
it. Anything else that is no whole record is *damage*: records that follow it are there still, and who takes
it for a torn tail drops what was acknowledged. ``scan`` tells one from the other and finds the records
behind damage again.

``BoundFraming`` is what files are written with: the checksums cover the place in the file and a number that
is drawn for each file, so that bytes which look like a record, but were never written there as one (a block
that lies twice on the disk, a value that somebody chose), are no record. ``PLAIN`` is what they were
written with before; there, only records that follow each other to the end of the file are taken back.
What is in a record, and which file it is, others know.
"""

from __future__ import annotations

import dataclasses
import struct
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable

_PLAIN = struct.Struct("<II")
_BOUND = struct.Struct("<III")
_PLACE = struct.Struct("<QI")

Body = bytes | memoryview


@dataclasses.dataclass(frozen=True, slots=True)
class Damage:
    """Bytes of a file that are no whole record, with more behind them or no sign that they were cut off."""

    offset: int
    num_bytes: int

    def __str__(self) -> str:
        return f"{self.num_bytes} bytes at offset {self.offset}"


@dataclasses.dataclass(frozen=True, slots=True)
class Scan:
    """What a file holds."""

    bodies: list[memoryview]
    """Of all records that are whole, in the order of the file."""
    num_before: int
    """How many of them come before the first damage."""
    num_bytes: int
    """Up to here, records are whole: to the first damage, the torn tail, or the end."""
    damages: list[Damage]
    torn: Damage | None = None
    """The torn tail."""


class Framing(ABC):
    """How the records of a file are told from everything else."""

    header_bytes: int

    @abstractmethod
    def frame(self, bodies: Iterable[Body], at: int) -> bytes:
        """The records' bytes, to be appended at offset ``at``."""

    @abstractmethod
    def _end(self, content: memoryview, at: int) -> int | None:
        """Where the record at ``at`` ends if its header is right, perhaps behind the end of the file."""

    @abstractmethod
    def _is_whole(self, content: memoryview, at: int, end: int) -> bool:
        """Its body is right."""

    @abstractmethod
    def _next(self, content: memoryview, at: int) -> int | None:
        """Where whole records begin again behind damage at ``at``."""

    def scan(self, content: Body, at: int = 0) -> Scan:
        """What is in ``content`` from ``at`` on."""
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
        """Of what ``frame`` returned."""
        bodies: list[bytes] = []
        at = 0
        while at < len(content):
            end = at + self.header_bytes + int.from_bytes(content[at : at + 4], "little")
            bodies.append(content[at + self.header_bytes : end])
            at = end
        return bodies

    def _whole(self, content: memoryview, at: int) -> int | None:
        """Where the record ends that is whole at ``at``."""
        end = self._end(content, at)
        return end if end is not None and end <= len(content) and self._is_whole(content, at, end) else None

    def _is_torn(self, content: memoryview, at: int) -> bool:
        """What is at ``at``, with nothing whole behind it, may be a write that did not come to its end."""
        written = at + len(bytes(content[at:]).rstrip(b"\0"))
        end = self._end(content, at)
        if end is None:
            return written < at + self.header_bytes
        return end > len(content) or written < end


class BoundFraming(Framing):
    """u32 body bytes | u32 check of these and of the place | u32 CRC-32 of the body | body. ``salt`` is the
    file's own number."""

    header_bytes = _BOUND.size

    def __init__(self, salt: int) -> None:
        self.salt = salt

    def frame(self, bodies: Iterable[Body], at: int) -> bytes:
        parts: list[Body] = []
        for body in bodies:
            assert len(body), "a record has something in it"
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
    """``PLAIN`` records' bytes."""
    parts: list[Body] = []
    for body in bodies:
        parts += (_PLAIN.pack(len(body), zlib.crc32(body)), body)
    return b"".join(parts)


def unframed(content: Body) -> tuple[list[memoryview], int]:
    """The ``PLAIN`` records at the start of ``content`` that are whole, and how many bytes they are."""
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

"""What a file of bound records begins with: its kind, its id, and the number its records are bound to.

::

    <magic><id> <salt> <CRC-32 of all before>\\n      twice

Twice, because without the salt no record of the file can be told from anything else.
"""

from __future__ import annotations

import re
import zlib

import msgspec

UNBEGUN_BYTES = 1024
"""More than is written to a new file before it is synced for the first time."""


class LogHeader(msgspec.Struct, frozen=True):
    """One of the two lines."""

    id: str
    salt: int
    is_whole: bool = True


def num_bytes(magic: bytes) -> int:
    """Of both lines."""
    return 2 * _line_bytes(magic)


def header_of(magic: bytes, log_id: str, salt: int) -> bytes:
    line = magic + f"{log_id} {salt:08x} ".encode()
    return 2 * (line + f"{zlib.crc32(line):08x}\n".encode())


def headers_in(magic: bytes, content: bytes) -> list[LogHeader]:
    """The lines from which a salt can be read, the whole ones first; none in a file of another kind."""
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
    """There is nothing, or the first write did not come to its end: a part of the header, perhaps zeros."""
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

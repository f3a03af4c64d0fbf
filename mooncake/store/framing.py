"""Records in a file that is only appended to: each with its length and a checksum.

A process that is killed in the middle of a write leaves a tail that is recognised and dropped; nothing
in it was ever acknowledged. What is in a record, and which file it is, others know.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable

_HEADER = struct.Struct("<II")


def framed(bodies: Iterable[bytes]) -> bytes:
    """The records' bytes, to be appended."""
    parts: list[bytes] = []
    for body in bodies:
        parts += (_HEADER.pack(len(body), zlib.crc32(body)), body)
    return b"".join(parts)


def unframed(content: bytes) -> tuple[list[memoryview], int]:
    """The records at the start of ``content``, and how many bytes they are; the rest is a torn tail."""
    bodies: list[memoryview] = []
    view, at = memoryview(content), 0
    while at + _HEADER.size <= len(content):
        length, checksum = _HEADER.unpack_from(content, at)
        body = view[at + _HEADER.size : at + _HEADER.size + length]
        if len(body) < length or zlib.crc32(body) != checksum:
            break
        bodies.append(body)
        at += _HEADER.size + length
    return bodies, at

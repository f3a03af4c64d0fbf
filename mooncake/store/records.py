"""What the master writes down so that its successor knows what it knew: records, and their bytes.

Few facts suffice: a segment was mounted or went, an object became readable or went, a replica was
added to it or dropped, it was pinned, a tenant got a quota.
Promises are not written down (that would cost a record per lookup): a successor assumes the longest
ones that could exist. Each record is framed with its length and a checksum, so that a master killed
in the middle of a write leaves a tail that is recognised and dropped; nothing in that tail was ever
acknowledged. The file is ``oplog.py``'s.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from typing import Any, TypeAlias

import msgspec

from mooncake.types import Tier

_FRAME = struct.Struct("<II")


class SegmentMounted(msgspec.Struct, frozen=True, array_like=True, tag="segment_mounted"):
    segment: str
    epoch: int
    host: str
    address: int
    size_bytes: int
    descriptor: bytes
    tier: Tier = Tier.MEMORY
    content_id: int = 0
    node: str = ""


class SegmentGone(msgspec.Struct, frozen=True, array_like=True, tag="segment_gone"):
    """With everything on it."""

    segment: str
    epoch: int


class ObjectReadable(msgspec.Struct, frozen=True, array_like=True, tag="object_readable"):
    key: str
    object_id: int
    size_bytes: int
    chunk_bytes: int
    checksums: bytes
    places: list[tuple[str, int]]
    """(segment, offset in it) of each replica."""
    is_hard_pinned: bool = False
    group: str = ""
    parent: str = ""
    data_type: int = 0


class ObjectGone(msgspec.Struct, frozen=True, array_like=True, tag="object_gone"):
    key: str
    object_id: int


class ReplicaAdded(msgspec.Struct, frozen=True, array_like=True, tag="replica_added"):
    key: str
    object_id: int
    segment: str
    offset: int


class ReplicaGone(msgspec.Struct, frozen=True, array_like=True, tag="replica_gone"):
    """The object has others."""

    key: str
    object_id: int
    segment: str


class ObjectPinned(msgspec.Struct, frozen=True, array_like=True, tag="object_pinned"):
    """Hard, or not any more. Soft pins are promises, and not written down."""

    key: str
    object_id: int
    is_hard_pinned: bool


class QuotaSet(msgspec.Struct, frozen=True, array_like=True, tag="quota_set"):
    tenant: str
    size_bytes: int | None


Record: TypeAlias = (
    SegmentMounted
    | SegmentGone
    | ObjectReadable
    | ObjectGone
    | ReplicaAdded
    | ReplicaGone
    | ObjectPinned
    | QuotaSet
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Record)


def encode(records: Iterable[Record]) -> bytes:
    """The records' bytes, to be appended."""
    parts: list[bytes] = []
    for record in records:
        body = _encoder.encode(record)
        parts += (_FRAME.pack(len(body), zlib.crc32(body)), body)
    return b"".join(parts)


def decode(content: bytes) -> tuple[list[Record], int]:
    """The records at the start of ``content``, and how many bytes they are; the rest is a torn tail."""
    records: list[Record] = []
    view, at = memoryview(content), 0
    while at + _FRAME.size <= len(content):
        length, checksum = _FRAME.unpack_from(content, at)
        body = view[at + _FRAME.size : at + _FRAME.size + length]
        if len(body) < length or zlib.crc32(body) != checksum:
            break
        records.append(_decoder.decode(body))
        at += _FRAME.size + length
    return records, at

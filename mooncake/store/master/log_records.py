# SPDX-License-Identifier: Apache-2.0
"""Records that the master writes down for its successor, and their encoding.

Few facts suffice: a segment was mounted or removed, an object became readable or was removed, a
replica was added to it or dropped, it was pinned, a tenant got a quota. Promises are not written
down (that would cost a record per lookup): a successor assumes the longest ones that could exist.
``frames.py`` defines how records lie in a file, ``oplog.py`` the file itself.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any, TypeAlias

import msgspec

from mooncake.files.frames import framed, unframed
from mooncake.types import Tier


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
    wants_report: bool = False
    """Not all of its content is known yet: what its node reports is entered."""


class SegmentGone(msgspec.Struct, frozen=True, array_like=True, tag="segment_gone"):
    """The segment is gone with everything on it."""

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
    num_replicas: int = 1
    """Number of replicas in memory that its writer wanted."""
    is_durable: bool = False
    """Its writer is answered when it is on SSD, by whichever master leads then."""


class ObjectGone(msgspec.Struct, frozen=True, array_like=True, tag="object_gone"):
    key: str
    object_id: int
    """0: there was no object, or it may be on a node that is away."""
    before: int = 0
    """Least object id that is accepted under the key from a node that returns. 0: the one that follows
    from the removed object."""


class ReplicaAdded(msgspec.Struct, frozen=True, array_like=True, tag="replica_added"):
    key: str
    object_id: int
    segment: str
    offset: int


class ReplicaGone(msgspec.Struct, frozen=True, array_like=True, tag="replica_gone"):
    """One replica was removed; the object has others."""

    key: str
    object_id: int
    segment: str


class ObjectPinned(msgspec.Struct, frozen=True, array_like=True, tag="object_pinned"):
    """A hard pin was set or removed. Soft pins are promises, and not written down."""

    key: str
    object_id: int
    is_hard_pinned: bool


class SpaceHeld(msgspec.Struct, frozen=True, array_like=True, tag="space_held"):
    """Space was promised to a writer, or still is to a reader of a removed replica: it must rest."""

    places: list[tuple[str, int]]
    """(segment, offset in it), each of ``size_bytes``."""
    size_bytes: int
    key: str = ""
    """The object whose replicas were there, if it is readable elsewhere: renewing it keeps these too."""
    object_id: int = 0


class LineBegan(msgspec.Struct, frozen=True, array_like=True, tag="line_began"):
    """The first record, and one whenever the bounds change: identifies this line of masters. All of them know
    each other's promises."""

    line: int
    lease_s: float = 0.0
    """Duration of the longest lease that any of them gave; 0 in records of a version without this field."""
    rest_s: float = 0.0
    """The same for any promise."""


class AllRemoved(msgspec.Struct, frozen=True, array_like=True, tag="all_removed"):
    """All objects of a tenant were removed, including those on nodes that are away."""

    tenant: str
    before: int
    """The least object id given out afterwards."""


class IdsGiven(msgspec.Struct, frozen=True, array_like=True, tag="ids_given"):
    """Object ids up to this one were given out; those without a record are removed."""

    last: int


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
    | SpaceHeld
    | LineBegan
    | AllRemoved
    | IdsGiven
    | QuotaSet
)


class LogOpened(msgspec.Struct, frozen=True, array_like=True, tag="opened"):
    """A master began to write here, on a system that had this ``boot_id``."""

    boot: str


class LogClosed(msgspec.Struct, frozen=True, array_like=True, tag="closed"):
    """The last record of a clean shutdown: nothing is missing."""


class LogRepaired(msgspec.Struct, frozen=True, array_like=True, tag="repaired"):
    """Some of the records that were here are missing."""


class LogComplete(msgspec.Struct, frozen=True, array_like=True, tag="whole"):
    """All nodes have reported: what was missing is here again, or is removed."""


Mark: TypeAlias = LogOpened | LogClosed | LogRepaired | LogComplete
"""A log's records about itself. No master applies them."""


class Doubt(enum.IntEnum):
    """What may be missing in another master's records, which is why nodes are asked to report."""

    NONE = 0
    END = 1
    """Some at the end, but no promise: the process ended without a clean shutdown."""
    PROMISES = 2
    """Some at the end, including space that was promised: the system went down."""
    ANY = 3
    """Some anywhere: the log was damaged."""


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Record | Mark)


def encode(records: Iterable[Record]) -> bytes:
    """Encode records in ``PLAIN`` frames, to be appended."""
    return framed(map(_encoder.encode, records))


def bodies_of(records: Iterable[Record | Mark]) -> list[bytes]:
    """Encode each record, without a frame."""
    return list(map(_encoder.encode, records))


def records_of(bodies: Iterable[bytes | memoryview]) -> list[Record | Mark]:
    """Decode records; raises msgspec.MsgspecError for unknown ones."""
    return list(map(_decoder.decode, bodies))


def decode(content: bytes) -> tuple[list[Record], int]:
    """Decode the records at the start of ``content``, in ``PLAIN`` frames; also returns the intact size."""
    bodies, num_bytes = unframed(content)
    return [_decoder.decode(body) for body in bodies], num_bytes

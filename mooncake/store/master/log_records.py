"""What the master writes down so that its successor knows what it knew: records, and their bytes.

Few facts suffice: a segment was mounted or went, an object became readable or went, a replica was
added to it or dropped, it was pinned, a tenant got a quota.
Promises are not written down (that would cost a record per lookup): a successor assumes the longest
ones that could exist. How records lie in a file is ``frames.py``'s; the file is ``oplog.py``'s.
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
    """Not all of its content is known yet: what its node reports is believed."""


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
    num_replicas: int = 1
    """How many its writer wanted in memory."""
    is_durable: bool = False
    """Its writer is answered when it is on SSD, whichever master does it."""


class ObjectGone(msgspec.Struct, frozen=True, array_like=True, tag="object_gone"):
    key: str
    object_id: int
    """0: there was none, it may be away with its node."""
    before: int = 0
    """What a node that was away brings back under the key is taken from this id on. 0: as it follows from
    what is gone."""


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


class SpaceHeld(msgspec.Struct, frozen=True, array_like=True, tag="space_held"):
    """Space was promised to a writer, or still is to a reader of what is gone: it must rest."""

    places: list[tuple[str, int]]
    """(segment, offset in it), each of ``size_bytes``."""
    size_bytes: int
    key: str = ""
    """Of the object whose replicas were there, if it can be read elsewhere: who renews it keeps these too."""
    object_id: int = 0


class LineBegan(msgspec.Struct, frozen=True, array_like=True, tag="line_began"):
    """The first record, and one whenever the rest changes: which line of masters these are. All of them know
    each other's promises."""

    line: int
    lease_s: float = 0.0
    """How long the longest lease lasts that any of them gave; 0 was written by a version that did not say."""
    rest_s: float = 0.0
    """The same of any promise."""


class AllRemoved(msgspec.Struct, frozen=True, array_like=True, tag="all_removed"):
    """Everything of a tenant, also what is away with its node: what it brings back is not taken."""

    tenant: str
    before: int
    """The least object id of what came afterwards."""


class IdsGiven(msgspec.Struct, frozen=True, array_like=True, tag="ids_given"):
    """Object ids up to this one were given out; whatever of them is not in the records is gone."""

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
    """It wrote its last word: nothing is missing."""


class LogRepaired(msgspec.Struct, frozen=True, array_like=True, tag="repaired"):
    """Some of the records that were here are missing."""


class LogComplete(msgspec.Struct, frozen=True, array_like=True, tag="whole"):
    """The nodes have said what they hold: what was missing is here again, or is gone."""


Mark: TypeAlias = LogOpened | LogClosed | LogRepaired | LogComplete
"""What a log says of itself. No master applies it."""


class Doubt(enum.IntEnum):
    """What may be missing in the records of another master, which is why nodes are asked."""

    NONE = 0
    END = 1
    """Some at the end, but none of a promise: the process ended without its last word."""
    PROMISES = 2
    """Some at the end, also of space that was promised: the system ended."""
    ANY = 3
    """Some anywhere: there was damage."""


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Record | Mark)


def encode(records: Iterable[Record]) -> bytes:
    """The records' bytes in ``PLAIN`` frames, to be appended."""
    return framed(map(_encoder.encode, records))


def bodies_of(records: Iterable[Record | Mark]) -> list[bytes]:
    """Each record's bytes, without a frame."""
    return list(map(_encoder.encode, records))


def records_of(bodies: Iterable[bytes | memoryview]) -> list[Record | Mark]:
    """The other way; raises msgspec.MsgspecError for what this version does not know."""
    return list(map(_decoder.decode, bodies))


def decode(content: bytes) -> tuple[list[Record], int]:
    """The records at the start of ``content``, in ``PLAIN`` frames, and how many bytes are whole."""
    bodies, num_bytes = unframed(content)
    return [_decoder.decode(body) for body in bodies], num_bytes

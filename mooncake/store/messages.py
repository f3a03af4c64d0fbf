"""What clients, nodes and the master say to each other. Only shapes; who decides what is elsewhere.

Every request takes many keys and its reply answers them in the same order. A miss is None, a
refusal is a ``Refusal`` with a code. Instants never travel, only durations: each side counts from
its own clock, the receiver of a promise from *before* it asked, so its deadline is never later than
the promiser's. Requests may arrive twice (a client that lost its connection asks again):
``PutStart`` is told apart by ``put_id``, everything after it by the object's id.
"""

from __future__ import annotations

import msgspec

from mooncake.errors import Refusal

MAX_KEYS = 4096
"""Keys in one message. Clients cut larger batches."""
MAX_KEY_BYTES = 1024
MAX_CHUNKS = 1 << 20
"""Checksummed chunks of one object."""


class Replica(msgspec.Struct, frozen=True, array_like=True):
    """Where one copy of an object lies: ``address`` is absolute, in the node that serves ``segment``."""

    segment: str
    epoch: int
    address: int


class Stored(msgspec.Struct, frozen=True, array_like=True):
    """A readable object. ``checksums``: CRC32C of each chunk, little-endian u32, in order."""

    object_id: int
    size_bytes: int
    chunk_bytes: int
    checksums: bytes
    replicas: list[Replica]


class Reserved(msgspec.Struct, frozen=True, array_like=True):
    """Space for an object that is being put."""

    object_id: int
    replicas: list[Replica]


# Clients ask the master.


class PutStart(msgspec.Struct, frozen=True, array_like=True, tag="put_start"):
    """Reserve space. Key i carries the identity ``put_id + i``; ``host`` is where the writer runs."""

    put_id: int
    host: str
    keys: list[str]
    sizes: list[int]
    chunk_bytes: list[int]
    avoid: list[str] = []
    """Segments that this writer could not reach."""


class PutStarted(msgspec.Struct, frozen=True, array_like=True, tag="put_started"):
    """``put_s``: stop writing so many seconds after asking."""

    put_s: float
    reserved: list[Reserved | None]
    """None: stored already, being written by another, or refused."""
    refusals: dict[int, Refusal]
    """By the key's place in the request."""


class PutEnd(msgspec.Struct, frozen=True, array_like=True, tag="put_end"):
    """Every byte is in place: make the objects visible."""

    keys: list[str]
    object_ids: list[int]
    checksums: list[bytes]


class PutAbort(msgspec.Struct, frozen=True, array_like=True, tag="put_abort"):
    """Give reservations up. Their space waits for the deadline: writes may still be on their way."""

    keys: list[str]
    object_ids: list[int]


class Outcomes(msgspec.Struct, frozen=True, array_like=True, tag="outcomes"):
    """True: done; False: there was nothing to do; a Refusal: not done."""

    outcomes: list[bool | Refusal]


class Lookup(msgspec.Struct, frozen=True, array_like=True, tag="lookup"):
    """Where are these objects? Grants a lease on each."""

    keys: list[str]


class Found(msgspec.Struct, frozen=True, array_like=True, tag="found"):
    """``lease_s``: don't touch the bytes later than so many seconds after asking."""

    lease_s: float
    objects: list[Stored | None]


class Exists(msgspec.Struct, frozen=True, array_like=True, tag="exists"):
    """Which of these can be read? Grants a lease, so that the get which follows finds them."""

    keys: list[str]


class Renew(msgspec.Struct, frozen=True, array_like=True, tag="renew"):
    """Extend leases on exactly these objects."""

    keys: list[str]
    object_ids: list[int]


class Flags(msgspec.Struct, frozen=True, array_like=True, tag="flags"):
    """One byte per key, 1 or 0. ``lease_s`` as in ``Found``."""

    lease_s: float
    flags: bytes


class Remove(msgspec.Struct, frozen=True, array_like=True, tag="remove"):
    """Remove objects; with ``force`` also leased ones (their space waits for the lease's end)."""

    keys: list[str]
    force: bool


class Corrupt(msgspec.Struct, frozen=True, array_like=True, tag="corrupt"):
    """A reader found bytes that don't match the checksums: drop exactly these objects."""

    keys: list[str]
    object_ids: list[int]


class Describe(msgspec.Struct, frozen=True, array_like=True, tag="describe"):
    """How are these segments (name, epoch) reached?"""

    segments: list[tuple[str, int]]


class Described(msgspec.Struct, frozen=True, array_like=True, tag="described"):
    """Transfer's descriptors, opaque to the master; None: not mounted (any more)."""

    descriptors: list[bytes | None]


# Nodes tell the master.


class Mount(msgspec.Struct, frozen=True, array_like=True, tag="mount"):
    """Serve this memory. ``epoch`` is new for each life of the process that owns it."""

    segment: str
    epoch: int
    host: str
    address: int
    size_bytes: int
    descriptor: bytes
    rest_s: float
    """0 when no master has used this memory yet; else how long promises of the last one may live."""


class Mounted(msgspec.Struct, frozen=True, array_like=True, tag="mounted"):
    refusal: Refusal | None
    num_objects: int
    """How many objects came back with the segment."""
    heartbeat_s: float
    rest_s: float
    """What to say in the next Mount, whichever master it goes to."""


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag="heartbeat"):
    segment: str
    epoch: int


class Beat(msgspec.Struct, frozen=True, array_like=True, tag="beat"):
    is_known: bool
    """False: mount again."""


class Unmount(msgspec.Struct, frozen=True, array_like=True, tag="unmount"):
    """The memory goes away now; answered by Beat."""

    segment: str
    epoch: int


# People and dashboards ask.


class Status(msgspec.Struct, frozen=True, array_like=True, tag="status"):
    pass


class SegmentStatus(msgspec.Struct, frozen=True):
    segment: str
    epoch: int
    host: str
    state: str
    size_bytes: int
    allocated_bytes: int
    largest_free_bytes: int
    num_objects: int
    rests_s: float
    """How long until space is given out here; 0 in normal operation."""


class MasterStatus(msgspec.Struct, frozen=True, array_like=True, tag="master_status"):
    num_objects: int
    num_writing: int
    capacity_bytes: int
    allocated_bytes: int
    counts: dict[str, int]
    segments: list[SegmentStatus]


class ListKeys(msgspec.Struct, frozen=True, array_like=True, tag="list_keys"):
    """Readable keys that start with ``prefix``, at most ``limit``; grants no lease."""

    prefix: str
    limit: int


class Keys(msgspec.Struct, frozen=True, array_like=True, tag="keys"):
    keys: list[str]


class Story(msgspec.Struct, frozen=True, array_like=True, tag="story"):
    """What happened to a key, and why?"""

    key: str


class Told(msgspec.Struct, frozen=True, array_like=True, tag="told"):
    lines: list[str]


REQUESTS: tuple[type[msgspec.Struct], ...] = (
    PutStart,
    PutEnd,
    PutAbort,
    Lookup,
    Exists,
    Renew,
    Remove,
    Corrupt,
    Describe,
    Mount,
    Heartbeat,
    Unmount,
    Status,
    ListKeys,
    Story,
)
REPLIES: tuple[type[msgspec.Struct], ...] = (
    PutStarted,
    Outcomes,
    Found,
    Flags,
    Described,
    Mounted,
    Beat,
    MasterStatus,
    Keys,
    Told,
)

"""What clients, nodes and the master say to each other. Only shapes; who decides what is elsewhere.

Every request takes many keys and its reply answers them in the same order. A miss is None, a
refusal is a ``Refusal`` with a code. Instants never travel, only durations: each side counts from
its own clock, the receiver of a promise from *before* it asked, so its deadline is never later than
the promiser's. Requests may arrive twice (a client that lost its connection asks again):
``PutStart`` and ``PutWritten`` are told apart by ``put_id``, everything after it by the object's id.

``tenant`` is the name space of the keys in a message; "" and "default" are the same one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from mooncake.errors import Refusal
from mooncake.security.principal import ADMINS, EVERYBODY, NODES, NODES_AND_ADMINS, TRUSTED, Level
from mooncake.types import Tier

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
    tier: Tier = Tier.MEMORY


class PutPolicy(msgspec.Struct, frozen=True, array_like=True):
    """What a writer wants for its objects; wishes are kept as far as the segments allow."""

    num_replicas: int = 1
    """Copies in memory, each on another segment, on other hosts first. One must fit, the others may."""
    preferred_segments: list[str] = []
    """Tried first, in this order; unknown ones are passed over."""
    soft_pin_ttl_s: float | None = None
    """Seconds from put-end on in which the object is evicted only when nothing else can be; None: not."""
    is_hard_pinned: bool = False
    """Never evicted; only removed."""
    is_durable: bool = False
    """Put-end is answered when a copy is on SSD."""
    is_same_host: bool = False
    """Only on the writer's own host."""
    data_type: int = 0
    """What kind of data it is, for statistics; a number of the existing package's ``ObjectDataType``."""


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


class PreallocatedSpace(msgspec.Struct, frozen=True, array_like=True):
    """Space given to a writer in advance, before it knows for which objects: pieces of one size."""

    advance_id: int
    put_s: float
    """Stop writing so many seconds after asking."""
    size_bytes: int
    """Of each piece."""
    replicas: list[Replica]
    """Where the pieces are. Piece ``i`` is named ``(advance_id, i)``."""


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
    policy: PutPolicy = PutPolicy()
    groups: list[str] = []
    """Empty, or one name per key ("": none): members are evicted together and share their leases."""
    parents: list[str] = []
    """Empty, or one key per key ("": none): the block before it in its prefix."""
    replace: bool = False
    """Put a new object in the place of one that is there; readers see the old one until put-end."""
    tenant: str = ""
    num_pieces: int = 0
    """So many pieces in advance, too, for ``PutWritten``."""
    piece_bytes: int = 0
    wait_s: float = 0.0
    """Where there is no room: wait so long for space that objects on their way to SSD are about to free."""


class PutStarted(msgspec.Struct, frozen=True, array_like=True, tag="put_started"):
    """``put_s``: stop writing so many seconds after asking."""

    put_s: float
    reserved: list[Reserved | None]
    """None: stored already, being written by another, or refused."""
    refusals: dict[int, Refusal]
    """By the key's place in the request."""
    advance: PreallocatedSpace | None = None
    """None also when nothing is given out in advance now; ask again some puts later."""


class PutWritten(msgspec.Struct, frozen=True, array_like=True, tag="put_written"):
    """Objects of one chunk, written already into pieces given in advance: show them.

    For puts with one replica that are not durable and replace nothing. Key i has the identity ``put_id + i``.
    """

    put_id: int
    host: str
    keys: list[str]
    sizes: list[int]
    checksums: list[bytes]
    pieces: list[tuple[int, int]]
    """(advance, number in it) for each key."""
    policy: PutPolicy | None = None
    """None: the default one; to say it would take longer than to keep to it."""
    groups: list[str] = []
    parents: list[str] = []
    tenant: str = ""
    num_pieces: int = 0
    """So many more pieces in advance."""
    piece_bytes: int = 0


class PutsWritten(msgspec.Struct, frozen=True, array_like=True, tag="puts_written"):
    """True: readable; False: the key is taken; a Refusal: not put.

    Only if it is True the piece is used up. ``expired``: it may not be written (any more), so start the put
    anew; the others are what ``PutStart`` would have refused.
    """

    outcomes: list[bool | Refusal]
    advance: PreallocatedSpace | None = None
    """As in ``PutStarted``."""


class PutEnd(msgspec.Struct, frozen=True, array_like=True, tag="put_end"):
    """Every byte is in place: make the objects visible."""

    keys: list[str]
    object_ids: list[int]
    checksums: list[bytes]
    failed: list[list[str]] = []
    """Empty, or per key the segments whose replica could not be written; one at least must have been."""
    tenant: str = ""


class PutAbort(msgspec.Struct, frozen=True, array_like=True, tag="put_abort"):
    """Give reservations up. Their space waits for the deadline: writes may still be on their way."""

    keys: list[str]
    object_ids: list[int]
    tenant: str = ""


class Outcomes(msgspec.Struct, frozen=True, array_like=True, tag="outcomes"):
    """True: done; False: there was nothing to do; a Refusal: not done."""

    outcomes: list[bool | Refusal]


class LookupObjects(msgspec.Struct, frozen=True, array_like=True, tag="lookup"):
    """Where are these objects? Grants a lease on each."""

    keys: list[str]
    tenant: str = ""


class LookupReply(msgspec.Struct, frozen=True, array_like=True, tag="found"):
    """``lease_s``: don't touch the bytes later than so many seconds after asking."""

    lease_s: float
    objects: list[Stored | None]


class Exists(msgspec.Struct, frozen=True, array_like=True, tag="exists"):
    """Which of these can be read? Grants a lease, so that the get which follows finds them."""

    keys: list[str]
    tenant: str = ""


class Renew(msgspec.Struct, frozen=True, array_like=True, tag="renew"):
    """Extend leases on exactly these objects.

    Of an object whose bytes a reader looks at where they lie, exactly that replica must still be kept for it:
    another one of the object is no help. The master may have dropped it, and a master that has come since
    does not know for whom its space rests.
    """

    keys: list[str]
    object_ids: list[int]
    tenant: str = ""
    replicas: list[Replica] = []
    """Empty, or which one is looked at, per key."""


class Flags(msgspec.Struct, frozen=True, array_like=True, tag="flags"):
    """One byte per key, 1 or 0. ``lease_s`` as in ``Found``."""

    lease_s: float
    flags: bytes


class Remove(msgspec.Struct, frozen=True, array_like=True, tag="remove"):
    """Remove objects; with ``force`` also leased ones (their space waits for the lease's end)."""

    keys: list[str]
    force: bool
    tenant: str = ""


class RemoveMatching(msgspec.Struct, frozen=True, array_like=True, tag="remove_matching"):
    """Remove every object of the tenant whose key the regular expression is found in; "" is all of them.

    Answered by Removed. Leased ones are left unless ``force``, and what is put after the question always. The
    expressions are RE2's (``key_patterns.py``).
    """

    pattern: str
    force: bool
    tenant: str = ""


class Removed(msgspec.Struct, frozen=True, array_like=True, tag="removed"):
    num_removed: int
    num_leased: int
    """Left because a reader may hold them."""


class Pin(msgspec.Struct, frozen=True, array_like=True, tag="pin"):
    """Keep objects from eviction; answered by Outcomes (False: there is none)."""

    keys: list[str]
    ttl_s: float | None
    """None: hard, until unpinned or removed; 0: unpin; else soft for so many seconds from now."""
    tenant: str = ""


class DropReplicas(msgspec.Struct, frozen=True, array_like=True, tag="drop_replicas"):
    """Drop the replicas on ``segment`` ("": all in memory); answered by Outcomes.

    An object loses its last replica too. A leased one is refused.
    """

    keys: list[str]
    segment: str
    tenant: str = ""


class Corrupt(msgspec.Struct, frozen=True, array_like=True, tag="corrupt"):
    """A reader found bytes twice that don't match the checksums: have the nodes of these replicas look.

    Only what its own node confirms is dropped. Answered by Outcomes: True: the node is asked; False: there is
    no such replica, or its node has just found it right; a Refusal (``limit``): too many reports.
    """

    keys: list[str]
    object_ids: list[int]
    segments: list[str] = []
    """Whose replica is wrong, per key; empty: every one."""
    tenant: str = ""
    reporter: str = ""
    """The machine that read it, so that the one at fault is found; its own word, and no more."""


class DescribeSegments(msgspec.Struct, frozen=True, array_like=True, tag="describe"):
    """How are these segments (name, epoch) reached?"""

    segments: list[tuple[str, int]]


class SegmentDescriptors(msgspec.Struct, frozen=True, array_like=True, tag="described"):
    """Transfer's descriptors, opaque to the master; None: not mounted (any more)."""

    descriptors: list[bytes | None]
    hosts: list[str] = []
    """Where each segment is, so that a reader takes the nearest replica."""


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
    tier: Tier = Tier.MEMORY
    content_id: int = 0
    """Names the bytes: they outlive the process on SSD. 0: the epoch, because memory's don't."""
    node: str = ""
    """The name under which one process serves several segments; "": that of the segment."""
    line: int = 0
    """``Mounted.line`` of the last master that used this memory; 0: there was none."""
    largest_id: int = 0
    """The largest object id that this node has heard of from any master: new objects get larger ones."""


class SegmentEntry(msgspec.Struct, frozen=True, array_like=True):
    """What a segment holds at ``offset``: everything that is needed to read it again."""

    key: str
    """As the master knows it, with its tenant."""
    object_id: int
    size_bytes: int
    chunk_bytes: int
    checksums: bytes
    offset: int
    is_hard_pinned: bool = False
    group: str = ""
    parent: str = ""
    is_durable: bool = False
    """Its writer was promised that it is on SSD."""


class ReportContents(msgspec.Struct, frozen=True, array_like=True, tag="report"):
    """A node tells a master that asked for it (``Mounted.wants_report``) what a segment holds.

    In as many messages as it takes, before the first heartbeat; answered by Reported.
    """

    segment: str
    epoch: int
    entries: list[SegmentEntry]
    is_last: bool


class Reported(msgspec.Struct, frozen=True, array_like=True, tag="reported"):
    unwanted: list[int]
    """Object ids that the master will not have (it knows better): the node drops them from its index."""


class CopyTask(msgspec.Struct, frozen=True, array_like=True):
    """Copy one replica into space reserved on the segment that asked."""

    task_id: int
    entry: SegmentEntry
    """Its ``offset`` is the target's."""
    source: Replica
    deadline_s: float
    """Seconds after the Poll was sent, beyond which nothing may be written."""


class Check(msgspec.Struct, frozen=True, array_like=True):
    """Read a replica of the segment that asked, and say whether its bytes are right."""

    check_id: int
    entry: SegmentEntry
    deadline_s: float
    """Seconds after the Poll was sent, beyond which nobody wants to know."""


class TaskDone(msgspec.Struct, frozen=True, array_like=True):
    """``refusal``: why not; its code ``corrupt`` means that the source's bytes are wrong."""

    task_id: int
    refusal: Refusal | None


class Poll(msgspec.Struct, frozen=True, array_like=True, tag="poll"):
    """A node asks for work on one of its segments; answered when there is some, or after a while."""

    segment: str
    epoch: int
    done: list[TaskDone]
    seen: int
    """The number of the last change that the node has noted; 0 at first."""
    max_tasks: int
    checked: list[TaskDone] = []
    """What came of checks, by their ids: None: the bytes are right; ``corrupt``: they are wrong."""


class Polled(msgspec.Struct, frozen=True, array_like=True, tag="polled"):
    first: int
    """The number of the first of ``changes``; more than ``seen + 1``: some were lost, report again."""
    changes: list[SegmentEntry | int]
    """What came to the segment (Entry), and the ids of the objects whose replica there went."""
    tasks: list[CopyTask]
    is_known: bool = True
    """False: mount again."""
    checks: list[Check] = []


class Mounted(msgspec.Struct, frozen=True, array_like=True, tag="mounted"):
    refusal: Refusal | None
    num_objects: int
    """How many objects came back with the segment."""
    heartbeat_s: float
    rest_s: float
    """What to say in the next Mount, whichever master it goes to."""
    wants_report: bool = False
    """The master does not know this content: say what it holds."""
    line: int = 0
    """Names the line of masters that know each other's promises: say it in the next Mount."""
    last_id: int = 0
    """The largest object id so far: say it in the next Mount."""


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag="heartbeat"):
    segment: str
    epoch: int


class Beat(msgspec.Struct, frozen=True, array_like=True, tag="beat"):
    is_known: bool
    """False: mount again."""
    last_id: int = 0
    """The largest object id so far: say it in the next Mount."""


class Unmount(msgspec.Struct, frozen=True, array_like=True, tag="unmount"):
    """The memory goes away now; answered by Beat."""

    segment: str
    epoch: int


# People and dashboards ask.


class GetMasterStatus(msgspec.Struct, frozen=True, array_like=True, tag="status"):
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
    tier: Tier = Tier.MEMORY
    node: str = ""
    address: int = 0
    is_draining: bool = False
    num_tasks: int = 0
    """Under way or waiting, with this segment as the target."""
    is_writable: bool = False
    """Space is given out here now."""


class ReporterStatus(msgspec.Struct, frozen=True):
    """A machine that reported wrong bytes. One whose reports are refuted is at fault itself."""

    reporter: str
    num_reports: int
    num_confirmed: int
    """By the node whose replica it was: the bytes were wrong."""
    num_refuted: int
    """By the same: they were right."""
    num_unanswered: int
    idle_s: float
    """Since its last report."""


class MasterStatus(msgspec.Struct, frozen=True, array_like=True, tag="master_status"):
    num_objects: int
    num_writing: int
    capacity_bytes: int
    allocated_bytes: int
    counts: dict[str, int]
    segments: list[SegmentStatus]
    reporters: list[ReporterStatus] = []
    """The last ones that reported wrong bytes."""


class ListKeys(msgspec.Struct, frozen=True, array_like=True, tag="list_keys"):
    """Readable keys that start with ``prefix``, at most ``limit``; grants no lease."""

    prefix: str
    limit: int
    tenant: str = ""


class Keys(msgspec.Struct, frozen=True, array_like=True, tag="keys"):
    keys: list[str]


class ObjectStory(msgspec.Struct, frozen=True, array_like=True, tag="story"):
    """What happened to a key, and why?"""

    key: str
    tenant: str = ""


class StoryLines(msgspec.Struct, frozen=True, array_like=True, tag="told"):
    lines: list[str]


class Inspect(msgspec.Struct, frozen=True, array_like=True, tag="inspect"):
    """All about these objects; grants no lease and counts as no use."""

    keys: list[str]
    tenant: str = ""


class ReplicaDetail(msgspec.Struct, frozen=True):
    segment: str
    host: str
    tier: Tier
    address: int
    is_complete: bool
    is_alive: bool


class ObjectStatus(msgspec.Struct, frozen=True):
    object_id: int
    size_bytes: int
    chunk_bytes: int
    num_uses: int
    leased_s: float
    """How long a reader may still hold it; 0: nobody does."""
    pinned_s: float | None
    """How long it is pinned softly; 0: not, None: hard."""
    group: str
    parent: str
    data_type: int
    is_writing: bool
    replicas: list[ReplicaDetail]


class Inspected(msgspec.Struct, frozen=True, array_like=True, tag="inspected"):
    objects: list[ObjectStatus | None]


# Jobs: what takes a while and can be asked about.


class CopyObject(msgspec.Struct, frozen=True, array_like=True, tag="copy_object"):
    """A further replica on each of ``targets``; with ``source``, that one goes when the first has come.

    Answered by Job or Refused.
    """

    key: str
    targets: list[str]
    source: str = ""
    tenant: str = ""


class DrainSegments(msgspec.Struct, frozen=True, array_like=True, tag="drain"):
    """Give nothing out on ``segments`` any more and move all that is there, to ``targets`` or anywhere.

    Answered by Job or Refused.
    """

    segments: list[str]
    targets: list[str]
    max_concurrency: int = 4
    unmount_after_s: float | None = None
    """Unmount the segments when they are empty, and no later than this; None: they stay mounted."""


class AskJob(msgspec.Struct, frozen=True, array_like=True, tag="ask_job"):
    """How far is it? ``cancel``: and stop it. Answered by Job or Refused (``not_found``)."""

    job_id: int
    cancel: bool = False


class JobStatus(msgspec.Struct, frozen=True):
    job_id: int
    kind: str
    """copy, move or drain."""
    state: str
    """waiting, running, done, failed or cancelled."""
    about: str
    """The key, or the segments."""
    num_done: int
    num_failed: int
    num_left: int
    moved_bytes: int
    reason: str
    """Why it failed; "" when it did not."""
    age_s: float
    idle_s: float
    """Since something last happened."""


class JobReply(msgspec.Struct, frozen=True, array_like=True, tag="job"):
    status: JobStatus


class RefusedReply(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    refusal: Refusal


# Tenants


class SetQuota(msgspec.Struct, frozen=True, array_like=True, tag="set_quota"):
    """How many bytes a tenant may keep in memory; None: it is forgotten. Answered by Quotas or Refused."""

    tenant: str
    size_bytes: int | None


class AskQuotas(msgspec.Struct, frozen=True, array_like=True, tag="ask_quotas"):
    pass


class QuotaStatus(msgspec.Struct, frozen=True):
    tenant: str
    quota_bytes: int | None
    """None: as much as there is."""
    used_bytes: int
    num_objects: int


class Quotas(msgspec.Struct, frozen=True, array_like=True, tag="quotas"):
    quotas: list[QuotaStatus]


ACCESS: dict[type[msgspec.Struct], frozenset[Level]] = {
    PutStart: EVERYBODY,
    PutWritten: EVERYBODY,
    PutEnd: EVERYBODY,
    PutAbort: EVERYBODY,
    LookupObjects: EVERYBODY,
    Exists: EVERYBODY,
    Renew: EVERYBODY,
    Remove: EVERYBODY,
    RemoveMatching: EVERYBODY,
    Pin: EVERYBODY,
    DropReplicas: EVERYBODY,
    Corrupt: EVERYBODY,
    DescribeSegments: EVERYBODY,
    Mount: NODES,
    ReportContents: NODES,
    Poll: NODES,
    Heartbeat: NODES,
    Unmount: NODES_AND_ADMINS,
    GetMasterStatus: TRUSTED,
    ListKeys: EVERYBODY,
    ObjectStory: EVERYBODY,
    Inspect: EVERYBODY,
    CopyObject: TRUSTED,
    DrainSegments: NODES_AND_ADMINS,
    AskJob: TRUSTED,
    SetQuota: ADMINS,
    AskQuotas: TRUSTED,
}
"""Who may ask what, where peers have to prove who they are. What names a tenant may be sent for that tenant
only by whoever is bound to one. A node may unmount and drain what it has mounted itself (``server.py``)."""


def remove_matching_access(message: RemoveMatching) -> frozenset[Level]:
    """By force also what readers hold, and many at once: for administrators."""
    return ADMINS if message.force else EVERYBODY


def ask_job_access(message: AskJob) -> frozenset[Level]:
    """Jobs are of everybody's; to stop one is another matter than to look."""
    return NODES_AND_ADMINS if message.cancel else TRUSTED


SPECIAL: dict[type[msgspec.Struct], Callable[[Any], frozenset[Level]]] = {
    RemoveMatching: remove_matching_access,
    AskJob: ask_job_access,
}

REQUESTS: tuple[type[msgspec.Struct], ...] = tuple(ACCESS)
REPLIES: tuple[type[msgspec.Struct], ...] = (
    PutStarted,
    PutsWritten,
    Outcomes,
    LookupReply,
    Flags,
    Removed,
    SegmentDescriptors,
    Mounted,
    Reported,
    Polled,
    Beat,
    MasterStatus,
    Keys,
    StoryLines,
    Inspected,
    JobReply,
    RefusedReply,
    Quotas,
)

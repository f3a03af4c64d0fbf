# SPDX-License-Identifier: Apache-2.0
"""Messages between clients, nodes and the master. Only their structure; other modules decide their content.

Every request takes many keys and its reply answers them in the same order. A miss is None, a
refusal is a ``Refusal`` with a code. Instants are never sent, only durations: each side counts by
its own clock, the receiver of a promise from *before* its request, so its deadline is never later
than the sender's. Requests may arrive twice (a client that lost its connection repeats them):
``PutStart`` and ``PutWritten`` are identified by ``put_id``, later requests by the object's id.

``tenant`` is the name space of the keys in a message; "" and "default" are the same one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from mooncake.errors import Refusal
from mooncake.security.principal import ADMINS, EVERYBODY, NODES, NODES_AND_ADMINS, TRUSTED, Level
from mooncake.types import Tier

MAX_KEYS = 4096
"""Maximum number of keys in one message. Clients split larger batches."""
MAX_AVOIDED = 1024
"""Most segments that a put may avoid: each segment of the cluster is compared with all of them."""
MAX_KEY_BYTES = 1024
MAX_VALUE_BYTES = 64 << 10
"""Most bytes of objects in one message: a longer one would delay the master's other clients."""
MAX_VALUES = 64
"""Most objects whose bytes are in one message."""
MAX_CONCURRENCY = 256
"""Copies of a drain at a time."""
MAX_CHUNKS = 1 << 20
"""Maximum number of checksummed chunks of one object."""


class Replica(msgspec.Struct, frozen=True, array_like=True):
    """One copy of an object: ``address`` is absolute, in the node that serves ``segment``."""

    segment: str
    epoch: int
    address: int
    tier: Tier = Tier.MEMORY


class PutPolicy(msgspec.Struct, frozen=True, array_like=True):
    """A writer's wishes for its objects; met as far as the segments allow."""

    num_replicas: int = 1
    """Copies in memory, each on another segment, other hosts first. One must fit, the others may."""
    preferred_segments: list[str] = []
    """Tried first, in this order; unknown ones are skipped."""
    soft_pin_ttl_s: float | None = None
    """Seconds from put-end in which the object is evicted only when no other can be; None: not pinned."""
    is_hard_pinned: bool = False
    """Never evicted; only removed."""
    is_durable: bool = False
    """Put-end is answered when a copy is on SSD."""
    is_same_host: bool = False
    """Only on the writer's own host."""
    data_type: int = 0
    """Kind of data, for statistics; a number of the existing package's ``ObjectDataType``."""


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
    """Space preallocated for a writer, before it knows for which objects: pieces of one size."""

    advance_id: int
    """Random: only who was sent it may use the pieces, and only for objects of the same tenant."""
    put_s: float
    """Seconds after the request at which writing must stop."""
    size_bytes: int
    """Size of each piece."""
    replicas: list[Replica]
    """Places of the pieces. Piece ``i`` is named ``(advance_id, i)``."""
    is_durable: bool = False
    """The nodes of the pieces have an SSD that takes objects: durable ones may be written to them. An earlier
    master gives pieces to a durable put as well, but refuses it when they are written."""


# Requests of clients.


class PutStart(msgspec.Struct, frozen=True, array_like=True, tag="put_start"):
    """Reserve space. Key i has the identity ``put_id + i``; ``host`` is the writer's host."""

    put_id: int
    host: str
    keys: list[str]
    sizes: list[int]
    chunk_bytes: list[int]
    avoid: Annotated[list[str], Meta(max_length=MAX_AVOIDED)] = []
    """Segments that this writer could not reach."""
    policy: PutPolicy = PutPolicy()
    groups: list[str] = []
    """Empty, or one name per key ("": none): members are evicted together and share their leases."""
    parents: list[str] = []
    """Empty, or one parent per key ("": none): the previous block of its prefix."""
    replace: bool = False
    """Replace an object that exists; readers see the old one until put-end."""
    tenant: str = ""
    num_pieces: int = 0
    """Number of pieces to preallocate as well, for ``PutWritten``."""
    piece_bytes: int = 0
    wait_s: float = 0.0
    """Seconds to wait, without room, for space that demotions to SSD are about to free."""


class PutStarted(msgspec.Struct, frozen=True, array_like=True, tag="put_started"):
    """``put_s``: seconds after the request at which writing must stop."""

    put_s: float
    reserved: list[Reserved | None]
    """None: stored already, or refused; ``being_written``: another put of the key is under way."""
    refusals: dict[int, Refusal]
    """By the key's index in the request."""
    advance: PreallocatedSpace | None = None
    """None also when nothing can be preallocated now; request again some puts later."""


class PutWritten(msgspec.Struct, frozen=True, array_like=True, tag="put_written"):
    """Make objects of one chunk readable that are written already, into preallocated pieces.

    For puts with one replica that replace nothing; durable ones only to pieces that are for them. Key i has
    the identity ``put_id + i``.
    """

    put_id: int
    host: str
    keys: list[str]
    sizes: list[int]
    checksums: list[bytes]
    pieces: list[tuple[int, int]]
    """(advance_id, index of the piece) for each key."""
    policy: PutPolicy | None = None
    """None: the default one, which is thus not sent."""
    groups: list[str] = []
    parents: list[str] = []
    tenant: str = ""
    num_pieces: int = 0
    """Number of further pieces to preallocate."""
    piece_bytes: int = 0
    is_remote: bool = False
    """The writer does not map the memory of its pieces: would the master take values?"""
    values: list[bytes] = []
    """Empty, or each object's bytes, which are not written yet: the master writes them, if it maps the memory
    of the pieces. Only for a master that has said that it takes values: an earlier one would ignore them."""


class PutsWritten(msgspec.Struct, frozen=True, array_like=True, tag="puts_written"):
    """True: readable, and on SSD if it is durable; False: the key is taken; a Refusal: not put.

    The piece is used up only if it is True, or if a durable object is readable but not on SSD (``no_ssd``).
    ``expired``: it may not be written, or no longer, so start the put again; ``not_here``: start the put, but
    the piece is as good as before: the master could not write the values, another put of the key is under
    way, or a durable put has to wait for room; the others are what ``PutStart`` would have refused.
    """

    outcomes: list[bool | Refusal]
    advance: PreallocatedSpace | None = None
    """As in ``PutStarted``."""
    takes_values: bool = False
    """The master maps the memory of these pieces: it may be sent values instead."""


PUT_AGAIN = "expired", "not_here"
"""Codes of refusals of ``PutWritten`` after which the client starts the put again."""


class PutEnd(msgspec.Struct, frozen=True, array_like=True, tag="put_end"):
    """Make the objects readable: every byte is written."""

    keys: list[str]
    object_ids: list[int]
    checksums: list[bytes]
    failed: list[list[str]] = []
    """Empty, or per key the segments whose replica could not be written; at least one must have been."""
    tenant: str = ""


class PutAbort(msgspec.Struct, frozen=True, array_like=True, tag="put_abort"):
    """Give up reservations. Their space waits for the deadline: writes may still be under way."""

    keys: list[str]
    object_ids: list[int]
    tenant: str = ""


class Outcomes(msgspec.Struct, frozen=True, array_like=True, tag="outcomes"):
    """True: done; False: nothing to do; a Refusal: not done."""

    outcomes: list[bool | Refusal]


class LookupObjects(msgspec.Struct, frozen=True, array_like=True, tag="lookup"):
    """Look up these objects. Grants a lease on each."""

    keys: list[str]
    tenant: str = ""
    value_bytes: int = 0
    """Answer with the objects' bytes, too, if the master maps their memory and they have no more than so many
    together."""


class LookupReply(msgspec.Struct, frozen=True, array_like=True, tag="found"):
    """``lease_s``: seconds after the request from which on the bytes must not be accessed."""

    lease_s: float
    objects: list[Stored | None]
    values: list[bytes] = []
    """Empty, or the bytes of each object, as its first replica has them; b"" for a miss."""


class Exists(msgspec.Struct, frozen=True, array_like=True, tag="exists"):
    """Test which of these are readable. Grants a lease, so that a following get finds them."""

    keys: list[str]
    tenant: str = ""


class Renew(msgspec.Struct, frozen=True, array_like=True, tag="renew"):
    """Extend leases on exactly these objects.

    For an object that a reader accesses in place, exactly that replica must still be kept for it: another
    one of the object is no help. The master may have dropped it, and a later master does not know for
    whom its space rests.
    """

    keys: list[str]
    object_ids: list[int]
    tenant: str = ""
    replicas: list[Replica] = []
    """Empty, or the replica accessed in place, per key."""


class Flags(msgspec.Struct, frozen=True, array_like=True, tag="flags"):
    """One byte per key, 1 or 0. ``lease_s`` as in ``LookupReply``."""

    lease_s: float
    flags: bytes


class Remove(msgspec.Struct, frozen=True, array_like=True, tag="remove"):
    """Remove objects; with ``force`` also leased ones (their space waits for the lease's end)."""

    keys: list[str]
    force: bool
    tenant: str = ""


class RemoveMatching(msgspec.Struct, frozen=True, array_like=True, tag="remove_matching"):
    """Remove every object of the tenant whose key contains a match of the regular expression; "" matches all.

    Answered by Removed. Leased ones are left unless ``force``, and later puts always. The expressions are
    RE2's (``key_scans.py``).
    """

    pattern: str
    force: bool
    tenant: str = ""


class Removed(msgspec.Struct, frozen=True, array_like=True, tag="removed"):
    num_removed: int
    num_leased: int
    """Left because a reader may hold a lease on them."""


class Pin(msgspec.Struct, frozen=True, array_like=True, tag="pin"):
    """Protect objects from eviction; answered by Outcomes (False: no such object)."""

    keys: list[str]
    ttl_s: float | None
    """None: hard, until unpinned or removed; 0: unpin; otherwise soft for this number of seconds."""
    tenant: str = ""


class DropReplicas(msgspec.Struct, frozen=True, array_like=True, tag="drop_replicas"):
    """Drop the replicas on ``segment`` ("": all in memory); answered by Outcomes.

    An object is removed with its last replica. A leased one is refused.
    """

    keys: list[str]
    segment: str
    tenant: str = ""


class Corrupt(msgspec.Struct, frozen=True, array_like=True, tag="corrupt"):
    """Report bytes that did not match the checksums in two reads: the replicas' nodes are to check them.

    Only what its own node confirms is dropped. Answered by Outcomes: True: the node is to check; False: there
    is no such replica, or its node has just found it right; a Refusal (``limit``): too many reports.
    """

    keys: list[str]
    object_ids: list[int]
    segments: list[str] = []
    """The segment of the corrupt replica, per key; empty: every replica."""
    tenant: str = ""
    reporter: str = ""
    """The machine that read it, by which a faulty one is found; a name of its own choice."""


class DescribeSegments(msgspec.Struct, frozen=True, array_like=True, tag="describe"):
    """Request the descriptors of these segments (name, epoch)."""

    segments: Annotated[list[tuple[str, int]], Meta(max_length=MAX_KEYS)]


class SegmentDescriptors(msgspec.Struct, frozen=True, array_like=True, tag="described"):
    """Transfer's descriptors, opaque to the master; None: not mounted, or no longer."""

    descriptors: list[bytes | None]
    hosts: list[str] = []
    """Host of each segment, so that a reader takes the nearest replica."""


# Requests of nodes.


class Mount(msgspec.Struct, frozen=True, array_like=True, tag="mount"):
    """Mount this memory. ``epoch`` is new for each run of the process that owns it."""

    segment: str
    epoch: int
    host: str
    address: int
    size_bytes: int
    descriptor: bytes
    rest_s: float
    """0 when no master has used this memory yet; otherwise how long promises of the last one may last."""
    tier: Tier = Tier.MEMORY
    content_id: int = 0
    """Identifies the content, which on SSD outlives the process. 0: the epoch, for memory."""
    node: str = ""
    """The name under which one process serves several segments; "": that of the segment."""
    line: int = 0
    """``Mounted.line`` of the last master that used this memory; 0: there was none."""
    largest_id: int = 0
    """The largest object id that this node has from any master: new objects get larger ones."""


class SegmentEntry(msgspec.Struct, frozen=True, array_like=True):
    """An object that a segment holds at ``offset``, with all that is needed to read it again."""

    key: str
    """The master's key, with the tenant."""
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
    """Report what a segment holds to a master that requested it (``Mounted.wants_report``).

    In as many messages as it takes, before the first heartbeat; answered by Reported.
    """

    segment: str
    epoch: int
    entries: list[SegmentEntry]
    is_last: bool


class Reported(msgspec.Struct, frozen=True, array_like=True, tag="reported"):
    unwanted: list[int]
    """Object ids that are out of date for the master: the node drops them from its index."""


class CopyTask(msgspec.Struct, frozen=True, array_like=True):
    """Copy one replica into space reserved on the polling segment."""

    task_id: int
    entry: SegmentEntry
    """The entry; its ``offset`` is the target's."""
    source: Replica
    deadline_s: float
    """Seconds after the Poll was sent beyond which nothing may be written."""


class Check(msgspec.Struct, frozen=True, array_like=True):
    """Read a replica of the polling segment, and report whether its bytes are right."""

    check_id: int
    entry: SegmentEntry
    deadline_s: float
    """Seconds after the Poll was sent beyond which the result is ignored."""


class TaskDone(msgspec.Struct, frozen=True, array_like=True):
    """``refusal``: why not; its code ``corrupt`` means that the source's bytes are wrong."""

    task_id: int
    refusal: Refusal | None


class Poll(msgspec.Struct, frozen=True, array_like=True, tag="poll"):
    """Request work for one of a node's segments; answered when there is some, or after a timeout."""

    segment: str
    epoch: int
    done: list[TaskDone]
    seen: int
    """The number of the last change that the node has noted; 0 at first."""
    max_tasks: int
    checked: list[TaskDone] = []
    """Results of checks, by their ids: None: the bytes are right; ``corrupt``: they are wrong."""


class Polled(msgspec.Struct, frozen=True, array_like=True, tag="polled"):
    first: int
    """The number of the first of ``changes``; more than ``seen + 1``: some were lost, report again."""
    changes: list[SegmentEntry | int]
    """New objects of the segment (SegmentEntry), and ids of objects whose replica there was removed."""
    tasks: list[CopyTask]
    is_known: bool = True
    """False: mount again."""
    checks: list[Check] = []


class Mounted(msgspec.Struct, frozen=True, array_like=True, tag="mounted"):
    refusal: Refusal | None
    num_objects: int
    """How many objects were restored with the segment."""
    heartbeat_s: float
    rest_s: float
    """To be sent in the next Mount, to any master."""
    wants_report: bool = False
    """The master does not know this content: report it."""
    line: int = 0
    """Identifies the line of masters that know each other's promises; to be sent in the next Mount."""
    last_id: int = 0
    """The largest object id so far; to be sent in the next Mount."""
    cluster_id: str = ""
    """Name of the cluster; "": a master that doesn't send it."""
    root_fs_dir: str = ""
    """Directory in which nodes without an SSD tier get one; "": none."""
    root_fs_size_bytes: int = 0
    """Limit of each process's SSD tier there; 0: as much as the node considers right."""


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag="heartbeat"):
    segment: str
    epoch: int


class Beat(msgspec.Struct, frozen=True, array_like=True, tag="beat"):
    is_known: bool
    """False: mount again."""
    last_id: int = 0
    """The largest object id so far; to be sent in the next Mount."""


class Unmount(msgspec.Struct, frozen=True, array_like=True, tag="unmount"):
    """Unmount a segment whose memory is released now; answered by Beat."""

    segment: str
    epoch: int


# Requests of operators and dashboards.


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
    """Objects that can be read from it."""
    rests_s: float
    """How long until space is allocated here; 0 in normal operation."""
    tier: Tier = Tier.MEMORY
    node: str = ""
    address: int = 0
    is_draining: bool = False
    num_tasks: int = 0
    """Tasks under way or waiting, with this segment as the target."""
    is_writable: bool = False
    """Space is allocated here now."""
    disk_full: str = ""
    """Why its node could not write the last copy, if its disk has no space."""


class ReporterStatus(msgspec.Struct, frozen=True):
    """A machine that reported wrong bytes. One whose reports are refuted is faulty itself."""

    reporter: str
    num_reports: int
    num_confirmed: int
    """Reports confirmed by the replica's node: the bytes were wrong."""
    num_refuted: int
    """Reports refuted by it: they were right."""
    num_unanswered: int
    idle_s: float
    """Time since its last report."""


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
    num_parts: int = 1
    """The keys are divided into as many equal parts, for more of them than one message holds."""
    part: int = 0
    """The part that is listed. A key is always in the same one, whatever is put or removed meanwhile."""


class Keys(msgspec.Struct, frozen=True, array_like=True, tag="keys"):
    keys: list[str]


class ListPrefixes(msgspec.Struct, frozen=True, array_like=True, tag="list_prefixes"):
    """Number and size of readable objects by the prefixes of their keys; grants no lease."""

    prefix: str
    depth: int
    "Levels below ``prefix``; what is deeper counts at the last one."
    limit: int
    "Maximum number of prefixes."
    separator: str = "/"
    tenant: str = ""


class Prefixes(msgspec.Struct, frozen=True, array_like=True, tag="prefixes"):
    """Objects and bytes of each prefix without those of prefixes below it, which have rows of their own."""

    rows: list[tuple[str, int, int]]
    num_folded: int
    "Objects that count at a prefix above their own, because ``limit`` was reached."


class ObjectStory(msgspec.Struct, frozen=True, array_like=True, tag="story"):
    """Request the history of a key, with reasons."""

    key: str
    tenant: str = ""


class StoryLines(msgspec.Struct, frozen=True, array_like=True, tag="told"):
    lines: list[str]


class Inspect(msgspec.Struct, frozen=True, array_like=True, tag="inspect"):
    """Request all details of these objects; grants no lease and counts as no use."""

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
    """How long a reader may still hold a lease; 0: no lease."""
    pinned_s: float | None
    """Remaining time of a soft pin; 0: not pinned, None: hard."""
    group: str
    parent: str
    data_type: int
    is_writing: bool
    replicas: list[ReplicaDetail]


class Inspected(msgspec.Struct, frozen=True, array_like=True, tag="inspected"):
    objects: list[ObjectStatus | None]


# Jobs: long-running requests with a status.


class CopyObject(msgspec.Struct, frozen=True, array_like=True, tag="copy_object"):
    """Make a replica on each of ``targets``; with ``source``, that one is removed after the first copy.

    Answered by JobReply or RefusedReply.
    """

    key: str
    targets: list[str]
    source: str = ""
    tenant: str = ""


class DrainSegments(msgspec.Struct, frozen=True, array_like=True, tag="drain"):
    """Place nothing new on ``segments`` and move their whole content, to ``targets`` or anywhere.

    Answered by JobReply or RefusedReply.
    """

    segments: list[str]
    targets: list[str]
    max_concurrency: int = 4
    unmount_after_s: float | None = None
    """Unmount the segments when they are empty, and at the latest after this time; None: keep them
    mounted."""


class AskJob(msgspec.Struct, frozen=True, array_like=True, tag="ask_job"):
    """Request a job's status; ``cancel`` also stops it. Answered by JobReply or RefusedReply
    (``not_found``)."""

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
    """Time since its last progress."""


class JobReply(msgspec.Struct, frozen=True, array_like=True, tag="job"):
    status: JobStatus


class RefusedReply(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    refusal: Refusal


# Tenants


class SetQuota(msgspec.Struct, frozen=True, array_like=True, tag="set_quota"):
    """Set how many bytes of memory a tenant may use; None: no quota. Answered by Quotas or RefusedReply."""

    tenant: str
    size_bytes: int | None


class AskQuotas(msgspec.Struct, frozen=True, array_like=True, tag="ask_quotas"):
    pass


class QuotaStatus(msgspec.Struct, frozen=True):
    tenant: str
    quota_bytes: int | None
    """None: no limit."""
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
    ListPrefixes: EVERYBODY,
    ObjectStory: EVERYBODY,
    Inspect: EVERYBODY,
    CopyObject: TRUSTED,
    DrainSegments: NODES_AND_ADMINS,
    AskJob: TRUSTED,
    SetQuota: ADMINS,
    AskQuotas: TRUSTED,
}
"""Permitted senders of each request, where peers must authenticate. A client bound to one tenant may name
only that one. A node may unmount and drain what it has mounted itself (``server.py``)."""


def remove_matching_access(message: RemoveMatching) -> frozenset[Level]:
    """By force it removes many objects at once that readers may hold: for administrators."""
    return ADMINS if message.force else EVERYBODY


def ask_job_access(message: AskJob) -> frozenset[Level]:
    """Any job may be queried; stopping one takes more."""
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
    Prefixes,
    StoryLines,
    Inspected,
    JobReply,
    RefusedReply,
    Quotas,
)

# SPDX-License-Identifier: Apache-2.0
"""An object's life: put-start, put-end, lease, pin, remove. Allocates no space and reads no clock.

::

    put-start ──▶ WRITING ──put-end──▶ READABLE ──evicted, removed, replaced, its node gone──▶ UNLINKED
                     └──aborted, put deadline passed──────────────────────────────────────────────┘

An object is immutable and visible whole or not at all. What can be read and what is being written
are two tables, so that a lookup is one dictionary access and a half-written object can't be found
by mistake. An unlinked object is in neither; its space may still be waiting for the last reader or
writer (``catalog.py``).

An object has one ``Extent`` per replica. While it is readable, extents may come (a copy, a demotion
to SSD: being written, then complete) and go; the complete ones stand first, the fastest tier in
front, so that the common object, one complete replica in memory, is recognised by one flag.

One number, ``lease_until``, is the lease *and* the age: it is when the last lookup's lease ends, so
the order of eviction is the order of lease ends, and a lookup costs one assignment. Objects of one
group share theirs (``Group``).
"""

from __future__ import annotations

import enum
from typing import Any

from mooncake.errors import Refusal
from mooncake.store.master.log_records import ObjectReadable
from mooncake.store.master.segments import Segment
from mooncake.store.messages import MAX_CHUNKS, MAX_KEY_BYTES, PutPolicy, Replica, Stored
from mooncake.types import ObjectKey, Tier

TIER_SPEED = {Tier.DEVICE: 0, Tier.MEMORY: 1, Tier.SSD: 2}
"""Rank of each tier, the fastest first."""

DEFAULT_POLICY = PutPolicy()
SMALL_CHUNK_BYTES = 4096
"""Smaller chunks are limited in number: the master keeps a checksum of four bytes for each."""
MAX_SMALL_CHUNKS = 4096


class ObjectState(enum.IntEnum):
    WRITING = 0
    READABLE = 1
    UNLINKED = 2


class Extent:
    """One replica's space: ``offset`` in ``segment``."""

    __slots__ = (
        "held_until",
        "is_charged",
        "is_complete",
        "is_requested",
        "is_resting",
        "offset",
        "place",
        "release_at",
        "segment",
        "write_until",
    )

    def __init__(self, segment: Segment, offset: int, is_complete: bool = False) -> None:
        self.segment = segment
        self.offset = offset
        self.is_complete = is_complete
        self.write_until = 0.0
        """When a replica that is still being written is dropped."""
        self.held_until = 0.0
        """The space is not reused before, whatever becomes of the object: a writer may still write it, or a
        task read it."""
        self.is_charged = False
        """Its bytes count in the account of its object's tenant."""
        self.is_requested = False
        """A user or an operator wants it here; not known of an earlier master's replicas."""
        self.is_resting = False
        """No longer a replica; the space waits for ``release_at``."""
        self.release_at = 0.0
        self.place: Any = None
        """Its entry in the order of eviction."""

    @property
    def is_extra(self) -> bool:
        """Whether it only makes reads faster (``device_tier.py``): what must stay readable needs another."""
        return self.segment.tier is Tier.DEVICE and not self.is_requested

    def __repr__(self) -> str:
        how = "resting" if self.is_resting else "complete" if self.is_complete else "being written"
        return f"<Extent {self.segment.name}+{self.offset} {how}>"


class Group:
    """Objects that are evicted together: one that is leased or pinned protects all."""

    __slots__ = ("_sole", "lease_until", "members", "name", "num_hard_pinned", "soft_pin_until")

    def __init__(self, name: str) -> None:
        self.name = name
        self.lease_until = 0.0
        self.soft_pin_until = 0.0
        """The latest of its members', or later: a member that leaves does not shorten it, the next change of
        a pin does."""
        self.num_hard_pinned = 0
        self.members: dict[ObjectKey, StoredObject] = {}
        self._sole: StoredObject | None = None
        """The member for which ``stays_readable`` was last false."""

    def join(self, stored: StoredObject) -> None:
        self.members[stored.key] = stored
        self.num_hard_pinned += stored.is_hard_pinned
        self.soft_pin_until = max(self.soft_pin_until, stored.soft_pin_until)
        stored.joint = self

    def leave(self, stored: StoredObject) -> None:
        del self.members[stored.key]
        self.num_hard_pinned -= stored.is_hard_pinned
        stored.joint = None

    def pin(self, stored: StoredObject, *, is_hard: bool, soft_until: float) -> bool:
        """Set a member's pins. Returns whether ``soft_pin_until`` may be too late now (``shorten``)."""
        is_shorter = soft_until < self.soft_pin_until
        self.num_hard_pinned += is_hard - stored.is_hard_pinned
        self.soft_pin_until = max(self.soft_pin_until, soft_until)
        stored.is_hard_pinned, stored.soft_pin_until = is_hard, soft_until
        return is_shorter

    def shorten(self) -> None:
        """Correct ``soft_pin_until`` after members' pins have become shorter."""
        self.soft_pin_until = max(member.soft_pin_until for member in self.members.values())

    def stays_readable(self, tier: Tier) -> bool:
        """Whether each member stays readable, from a slower tier, when all leave this one.

        A search asks for each member. The one that was in the way last is asked first, so that the answer
        does not take a visit of all of them each time.
        """
        last = self._sole
        if last is not None and last.joint is self and not last.stays_without(tier):
            return False
        sole = (member for member in self.members.values() if not member.stays_without(tier))
        self._sole = next(sole, None)
        return self._sole is None


class StoredObject:
    """One version of one key: a new put of the key makes a new object."""

    __slots__ = (
        "account",
        "before",
        "chunk_bytes",
        "data_type",
        "extents",
        "group",
        "is_hard_pinned",
        "is_plain",
        "joint",
        "kept",
        "key",
        "lease_until",
        "num_uses",
        "object_id",
        "parent",
        "policy",
        "put_id",
        "resting",
        "size_bytes",
        "soft_pin_until",
        "state",
        "stored",
        "write_until",
    )

    def __init__(
        self,
        key: ObjectKey,
        object_id: int,
        put_id: int,
        size_bytes: int,
        chunk_bytes: int,
        extents: list[Extent],
        write_until: float,
    ) -> None:
        self.key = key
        """The key with its tenant (``scoped``)."""
        self.object_id = object_id
        self.put_id = put_id
        self.size_bytes = size_bytes
        self.chunk_bytes = chunk_bytes
        self.extents = extents
        self.resting: list[Extent] = []
        """Space of removed replicas that is not released yet."""
        self.write_until = write_until
        self.lease_until = 0.0
        self.num_uses = 0
        """Lookups that found it."""
        self.soft_pin_until = 0.0
        """Until then evicted only when no other object can be."""
        self.is_hard_pinned = False
        """Never evicted."""
        self.policy = DEFAULT_POLICY
        self.data_type = 0
        self.parent: ObjectKey = ""
        """The key of the previous block of its prefix, with the tenant; "": none."""
        self.group = ""
        """The name of its group, with the tenant; "": none."""
        self.joint: Group | None = None
        """That group, while the object is readable."""
        self.before: StoredObject | None = None
        """The durable object whose place it took, until it is durable itself (``catalog.set_aside``)."""
        self.kept: ObjectReadable | None = None
        """The record that restores an object that was set aside."""
        self.account: Any = None
        """The account of its tenant (``tenants.py``)."""
        self.is_plain = False
        """One complete replica in memory and no group: the most common object."""
        self.state = ObjectState.WRITING
        self.stored: Stored | None = None
        """The answer to a lookup; kept up to date here, so that lookups build nothing."""

    @property
    def is_readable(self) -> bool:
        return self.state is ObjectState.READABLE

    @property
    def is_visible(self) -> bool:
        """Whether a live node has it."""
        is_written = self.state is ObjectState.READABLE
        return any(e.segment.is_alive and e.is_complete is is_written for e in self.extents)

    @property
    def num_chunks(self) -> int:
        return -(-self.size_bytes // self.chunk_bytes)

    @property
    def leased_until(self) -> float:
        """When the last reader's lease ends, those of its group included."""
        if self.joint is None:
            return self.lease_until
        return max(self.lease_until, self.joint.lease_until)

    def lease(self, until: float) -> None:
        """Extend the leases of the object and its group to ``until``. A lease never becomes shorter: a
        predecessor may have had a longer lease setting."""
        if self.lease_until < until:
            self.lease_until = until
        if self.joint is not None and self.joint.lease_until < until:
            self.joint.lease_until = until

    @property
    def pinned_until(self) -> float:
        return self.soft_pin_until if self.joint is None else self.joint.soft_pin_until

    @property
    def may_be_evicted(self) -> bool:
        return not (self.is_hard_pinned if self.joint is None else self.joint.num_hard_pinned)

    def complete(self, tier: Tier | None = None) -> list[Extent]:
        """Replicas that can be read, or could be if their node were alive."""
        return [e for e in self.extents if e.is_complete and (tier is None or e.segment.tier is tier)]

    def lasting(self) -> list[Extent]:
        """The complete replicas that are not extra."""
        return [extent for extent in self.extents if extent.is_complete and not extent.is_extra]

    def has_slower(self, extent: Extent) -> bool:
        """Whether it stays readable, from a slower tier, when it leaves the tier of ``extent``."""
        speed = TIER_SPEED[extent.segment.tier]
        return any(e.is_complete and TIER_SPEED[e.segment.tier] > speed for e in self.extents)

    def all_have_slower(self, extent: Extent) -> bool:
        """The same for the object and its group, which leaves with it."""
        if self.joint is None:
            return self.has_slower(extent)
        return self.joint.stays_readable(extent.segment.tier)

    def stays_without(self, tier: Tier) -> bool:
        """Whether it has nothing in this tier, or something in a slower one."""
        leaving = self.complete(tier)
        return not leaving or self.has_slower(leaving[0])

    def on(self, segment: Segment) -> Extent | None:
        """Its replica on ``segment``."""
        return next((extent for extent in self.extents if extent.segment is segment), None)

    def replicas(self) -> list[Replica]:
        """All replicas of an object that is being written, the complete ones of a readable object."""
        extents = self.extents if self.state is ObjectState.WRITING else self.complete()
        return [replica_of(extent) for extent in extents]

    def refresh(self) -> None:
        """Update what is derived from the extents after they were added, removed or moved."""
        self.extents.sort(key=_order)
        first = self.extents[0]
        assert self.stored is not None and first.is_complete, self
        self.stored = Stored(
            self.object_id, self.size_bytes, self.chunk_bytes, self.stored.checksums, self.replicas()
        )
        is_alone = len(self.extents) == 1 or not self.extents[1].is_complete
        self.is_plain = is_alone and first.segment.tier is Tier.MEMORY and not self.group

    def become_readable(self, checksums: bytes, lease_until: float) -> None:
        self.state = ObjectState.READABLE
        self.lease_until = lease_until
        for extent in self.extents:
            extent.is_complete = True
            extent.segment.num_objects += 1
        if len(self.extents) > 1:
            self.extents.sort(key=_order)
        replicas = [replica_of(extent) for extent in self.extents]
        self.stored = Stored(self.object_id, self.size_bytes, self.chunk_bytes, checksums, replicas)
        is_alone = len(replicas) == 1 and replicas[0].tier is Tier.MEMORY
        self.is_plain = is_alone and not self.group

    def __repr__(self) -> str:
        return f"<StoredObject {self.key!r} #{self.object_id} {self.state.name} {self.size_bytes} bytes>"


def _order(extent: Extent) -> tuple[bool, int]:
    return not extent.is_complete, TIER_SPEED[extent.segment.tier]


def replica_of(extent: Extent) -> Replica:
    segment = extent.segment
    return Replica(segment.name, segment.epoch, segment.address + extent.offset, segment.tier)


def scoped(tenant: str, name: str) -> str:
    """``name`` (a key, a group) as the master stores it. A user's name can't contain NUL: in the default
    tenant it would be another tenant's, so it becomes "", which matches nothing."""
    if tenant in ("", "default"):
        return "" if "\0" in name else name
    return f"{tenant}\0{name}"


def scoped_all(tenant: str, keys: list[ObjectKey]) -> list[ObjectKey]:
    """``scoped`` for many keys of objects. One that no object can have (empty, too long, or with NUL) becomes
    "", so that a request can neither name another tenant's objects nor have the master retain its text. A
    default tenant's keys cost only the search for such ones."""
    joined = "".join(keys)
    # Even if all characters take four bytes, for most keys there is nothing to count.
    is_long = 4 * len(joined) > MAX_KEY_BYTES and 4 * max(map(len, keys)) > MAX_KEY_BYTES
    if is_long or "\0" in joined:
        keys = [key if is_name(key) else "" for key in keys]
    if tenant in ("", "default"):
        return keys
    if not is_name(tenant):
        return [""] * len(keys)
    return [f"{tenant}\0{key}" if key else "" for key in keys]


def scoped_key(tenant: str, key: ObjectKey) -> ObjectKey:
    """``scoped_all`` for one key."""
    return scoped_all(tenant, [key])[0]


def is_name(name: str) -> bool:
    """Whether a key, group or tenant may have this name; "" is for the caller to judge."""
    return "\0" not in name and (4 * len(name) <= MAX_KEY_BYTES or len(name.encode()) <= MAX_KEY_BYTES)


def split_scoped(name: str) -> tuple[str, str]:
    """(tenant, its own name) for a scoped name; the default tenant is ""."""
    tenant, nul, rest = name.partition("\0")
    return (tenant, rest) if nul else ("", name)


def check_shape(key: ObjectKey, size_bytes: int, chunk_bytes: int) -> Refusal | None:
    """Why there can't be such an object, or None."""
    if not key or not is_name(key):
        return Refusal("invalid_key", f"a key has 1 to {MAX_KEY_BYTES} bytes of UTF-8 and no NUL")
    if size_bytes < 1 or chunk_bytes < 1:
        return Refusal("invalid_size", f"size {size_bytes} and chunk {chunk_bytes} must be at least 1 byte")
    if -(-size_bytes // chunk_bytes) > MAX_CHUNKS:
        return Refusal("invalid_size", f"{size_bytes} bytes in chunks of {chunk_bytes}: over {MAX_CHUNKS}")
    return None


def check_put(key: ObjectKey, size_bytes: int, chunk_bytes: int) -> Refusal | None:
    """Why such an object can't be put, or None. An earlier version may have accepted more."""
    refusal = check_shape(key, size_bytes, chunk_bytes)
    if refusal is not None:
        return refusal
    if chunk_bytes < SMALL_CHUNK_BYTES and size_bytes > chunk_bytes * MAX_SMALL_CHUNKS:
        most = f"over {MAX_SMALL_CHUNKS} chunks have at least {SMALL_CHUNK_BYTES} bytes each"
        return Refusal("invalid_size", f"{size_bytes} bytes in chunks of {chunk_bytes}: {most}")
    return None


def check_relation(name: str) -> Refusal | None:
    """Why an object can't have such a group or parent, or None. "" means none."""
    if not is_name(name):
        return Refusal("invalid_key", f"groups and parents have at most {MAX_KEY_BYTES} bytes and no NUL")
    return None


def is_of(tenant: str, scoped_name: str) -> bool:
    """Whether a node's report may give an object of this tenant such a group or parent."""
    if not scoped_name:
        return True
    owner, name = split_scoped(scoped_name)
    return owner == tenant and check_relation(name) is None


LEAP = 1 << 30
"""Larger than the number of ids that a master gives out without its successor knowing."""
MAX_ID = (1 << 63) - (1 << 36)
"""Larger than ids from clocks and terms (``role.py``), with room for LEAPs within 63 bits."""


class Objects:
    """The two tables. Every object in them has extents in mounted segments."""

    def __init__(self, last_id: int) -> None:
        self.readable: dict[ObjectKey, StoredObject] = {}
        self.writing: dict[ObjectKey, StoredObject] = {}
        self.groups: dict[str, Group] = {}
        """Groups of readable objects, by scoped name."""
        self.most_checksum_bytes = 0
        """Bytes of checksums of the object that had most of them so far."""
        self._last_id = last_id
        self.largest_seen = 0
        """The largest id that another master gave out, as far as its records show. ``last_id`` may be larger:
        it begins at a clock."""
        self._own_from = last_id + 1
        """From here to the last id, all were given out by this master."""
        self._own_before: list[tuple[int, int]] = []
        """Earlier such ranges: (first, last)."""

    @property
    def last_id(self) -> int:
        """The largest object id that was given out."""
        return self._last_id

    def new_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def saw(self, object_id: int) -> None:
        """Note an id that another master gave out."""
        self.largest_seen = max(self.largest_seen, object_id)
        if object_id > self._last_id:
            self._go_to(object_id)

    def ids_from(self, first: int) -> None:
        """Start at ``first``, beyond all ids that another master may have given out unknown to this one."""
        self._go_to(max(first, self._last_id + LEAP))

    def ids_above(self, object_id: int) -> None:
        """Continue above an id of an earlier master: newer objects must have larger ids."""
        if object_id > self._last_id:
            self._go_to(object_id + LEAP)

    def is_own(self, object_id: int) -> bool:
        """Whether this master gave the id out, so that its object is newer than earlier masters'."""
        if self._own_from <= object_id <= self._last_id:
            return True
        return any(first <= object_id <= last for first, last in self._own_before)

    def _go_to(self, last_id: int) -> None:
        if self._own_from <= self._last_id:
            self._own_before.append((self._own_from, self._last_id))
        self._last_id, self._own_from = last_id, last_id + 1

    def begin(
        self,
        key: ObjectKey,
        put_id: int,
        size_bytes: int,
        chunk_bytes: int,
        extents: list[Extent],
        write_until: float,
    ) -> StoredObject:
        """Put-start: ``extents`` are reserved for ``key`` until ``write_until``.

        A readable object of that key stays until put-end replaces it.
        """
        assert key not in self.writing, key
        stored = StoredObject(key, self.new_id(), put_id, size_bytes, chunk_bytes, extents, write_until)
        self.writing[key] = stored
        for extent in extents:
            extent.segment.holders[extent.offset] = stored
            extent.write_until = write_until
        return stored

    def find_writing(
        self, key: ObjectKey, object_id: int, checksums: bytes, now: float
    ) -> StoredObject | Refusal | None:
        """The reservation for put-end to finish; None when that very object is readable already (a repeated
        request)."""
        stored = self.writing.get(key)
        if stored is None or stored.object_id != object_id:
            done = self.readable.get(key)
            if done is not None and done.object_id == object_id:
                return None
            return Refusal("expired", "the reservation is gone: its deadline passed or its node was lost")
        if now >= stored.write_until:
            return Refusal("expired", "the deadline for writing has passed")
        if len(checksums) != 4 * stored.num_chunks:
            return Refusal("invalid_checksums", f"{len(checksums)} bytes for {stored.num_chunks} chunks")
        return stored

    def finish(self, stored: StoredObject, checksums: bytes, now: float) -> None:
        """Put-end. The caller has unlinked what was readable under the key."""
        assert self.writing.get(stored.key) is stored and stored.key not in self.readable, stored
        del self.writing[stored.key]
        self._show(stored, checksums, now)

    def adopt(self, record: ObjectReadable, extents: list[Extent], lease_until: float) -> StoredObject:
        """Enter a readable object of another master."""
        assert record.key not in self.readable, record.key
        stored = StoredObject(
            record.key, record.object_id, 0, record.size_bytes, record.chunk_bytes, extents, 0.0
        )
        stored.is_hard_pinned = record.is_hard_pinned
        stored.group, stored.parent = record.group, record.parent
        stored.data_type = record.data_type
        if record.num_replicas != 1 or record.is_durable:
            stored.policy = PutPolicy(record.num_replicas, is_durable=record.is_durable)
        self.saw(record.object_id)
        for extent in extents:
            extent.segment.holders[extent.offset] = stored
        self._show(stored, record.checksums, lease_until)
        return stored

    def _show(self, stored: StoredObject, checksums: bytes, lease_until: float) -> None:
        stored.become_readable(checksums, lease_until)
        if len(checksums) > self.most_checksum_bytes:
            self.most_checksum_bytes = len(checksums)
        self.readable[stored.key] = stored
        if stored.group:
            self.groups.setdefault(stored.group, Group(stored.group)).join(stored)

    def unlink(self, stored: StoredObject) -> None:
        """Remove the object from its table; its space stays taken until it is released."""
        table = self.writing if stored.state is ObjectState.WRITING else self.readable
        assert table.get(stored.key) is stored, stored
        del table[stored.key]
        stored.state = ObjectState.UNLINKED
        if stored.joint is not None:
            stored.joint.leave(stored)
            if not self.groups[stored.group].members:
                del self.groups[stored.group]

    def check(self) -> None:
        """Assert that tables, states, groups and segments agree."""
        for table, state in ((self.readable, ObjectState.READABLE), (self.writing, ObjectState.WRITING)):
            for key, stored in table.items():
                assert stored.key == key and stored.state is state, stored
                assert (stored.stored is not None) == (state is ObjectState.READABLE), stored
                assert stored.extents, stored
                assert len({extent.segment.name for extent in stored.extents}) == len(stored.extents), stored
                for extent in stored.extents:
                    assert extent.segment.is_mounted and not extent.is_resting, stored
                    assert extent.segment.holders[extent.offset] is stored, stored
        for stored in self.readable.values():
            assert stored.extents[0].is_complete, stored
            assert stored.stored is not None and stored.stored.replicas == stored.replicas(), stored
            assert stored.extents == sorted(stored.extents, key=_order), stored
            assert bool(stored.group) == (stored.joint is not None), stored
            is_plain = [e.segment.tier for e in stored.complete()] == [Tier.MEMORY] and not stored.group
            assert stored.is_plain == is_plain, stored
        for name, group in self.groups.items():
            assert group.members and group.name == name, name
            assert group.num_hard_pinned == sum(one.is_hard_pinned for one in group.members.values()), name
            assert all(one.soft_pin_until <= group.soft_pin_until for one in group.members.values()), name
            for key, member in group.members.items():
                assert self.readable[key] is member and member.joint is group, (name, key)

    def __repr__(self) -> str:
        return f"<Objects {len(self.readable)} readable, {len(self.writing)} being written>"

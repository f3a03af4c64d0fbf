"""An object's life: put-start, put-end, lease, remove. Knows no space and no time of its own.

::

    put-start ──▶ WRITING ──put-end──▶ READABLE ──evicted, removed, replaced, its node gone──▶ UNLINKED
                     └──aborted, put deadline passed──────────────────────────────────────────────┘

An object is immutable and visible whole or not at all. What can be read and what is being written
are two tables, so that a lookup is one dictionary access and a half-written object can't be found
by mistake. An unlinked object is in neither; its space may still be waiting for the last reader or
writer (``master.py``).

One number, ``lease_until``, is the lease *and* the age: it is when the last lookup's lease ends, so
the order of eviction is the order of lease ends, and a lookup costs one assignment.
"""

from __future__ import annotations

import enum

from mooncake.errors import Refusal
from mooncake.store.messages import MAX_CHUNKS, MAX_KEY_BYTES, Replica, Stored
from mooncake.store.segments import Segment
from mooncake.types import ObjectKey


class State(enum.IntEnum):
    WRITING = 0
    READABLE = 1
    UNLINKED = 2


class Extent:
    """One replica's space: ``offset`` in ``segment``."""

    __slots__ = ("offset", "segment")

    def __init__(self, segment: Segment, offset: int) -> None:
        self.segment = segment
        self.offset = offset


class StoredObject:
    """One version of one key. Never changes hands: a new put of the key is a new object."""

    __slots__ = (
        "chunk_bytes",
        "extents",
        "key",
        "lease_until",
        "object_id",
        "put_id",
        "release_at",
        "size_bytes",
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
        self.object_id = object_id
        self.put_id = put_id
        self.size_bytes = size_bytes
        self.chunk_bytes = chunk_bytes
        self.extents = extents
        self.write_until = write_until
        self.lease_until = 0.0
        self.release_at = 0.0
        """When the space of an unlinked object may be used again."""
        self.state = State.WRITING
        self.stored: Stored | None = None
        """What a lookup answers; set by put-end, so that lookups build nothing."""

    @property
    def is_readable(self) -> bool:
        return self.state is State.READABLE

    @property
    def is_visible(self) -> bool:
        """Some node that is alive has it."""
        return any(extent.segment.is_alive for extent in self.extents)

    @property
    def num_chunks(self) -> int:
        return -(-self.size_bytes // self.chunk_bytes)

    def replicas(self) -> list[Replica]:
        return [
            Replica(extent.segment.name, extent.segment.epoch, extent.segment.address + extent.offset)
            for extent in self.extents
        ]

    def become_readable(self, checksums: bytes, lease_until: float) -> None:
        self.state = State.READABLE
        self.lease_until = lease_until
        self.stored = Stored(self.object_id, self.size_bytes, self.chunk_bytes, checksums, self.replicas())

    def __repr__(self) -> str:
        return f"<StoredObject {self.key!r} #{self.object_id} {self.state.name} {self.size_bytes} bytes>"


def check_put(key: ObjectKey, size_bytes: int, chunk_bytes: int) -> Refusal | None:
    """Why such an object can't be put, or None."""
    num_key_bytes = len(key.encode())
    if not 0 < num_key_bytes <= MAX_KEY_BYTES or "\0" in key:
        return Refusal("invalid_key", f"a key has 1 to {MAX_KEY_BYTES} bytes of UTF-8 and no NUL")
    if size_bytes < 1 or chunk_bytes < 1:
        return Refusal("invalid_size", f"size {size_bytes} and chunk {chunk_bytes} must be at least 1 byte")
    if -(-size_bytes // chunk_bytes) > MAX_CHUNKS:
        return Refusal("invalid_size", f"{size_bytes} bytes in chunks of {chunk_bytes}: over {MAX_CHUNKS}")
    return None


class Objects:
    """The two tables. Every object in them has extents in segments that are mounted."""

    def __init__(self, last_id: int) -> None:
        self.readable: dict[ObjectKey, StoredObject] = {}
        self.writing: dict[ObjectKey, StoredObject] = {}
        self._last_id = last_id

    def begin(
        self,
        key: ObjectKey,
        put_id: int,
        size_bytes: int,
        chunk_bytes: int,
        extents: list[Extent],
        write_until: float,
    ) -> StoredObject:
        """Put-start: ``extents`` are reserved for ``key`` until ``write_until``."""
        assert key not in self.writing and key not in self.readable, key
        self._last_id += 1
        stored = StoredObject(key, self._last_id, put_id, size_bytes, chunk_bytes, extents, write_until)
        self.writing[key] = stored
        for extent in extents:
            extent.segment.holders[extent.offset] = stored
        return stored

    def finish(self, key: ObjectKey, object_id: int, checksums: bytes, now: float) -> bool | Refusal:
        """Put-end. False when that very object is readable already (the request came twice)."""
        stored = self.writing.get(key)
        if stored is None or stored.object_id != object_id:
            done = self.readable.get(key)
            if done is not None and done.object_id == object_id:
                return False
            return Refusal("expired", "the reservation is gone: its deadline passed or its node was lost")
        if now >= stored.write_until:
            return Refusal("expired", "the deadline for writing has passed")
        if len(checksums) != 4 * stored.num_chunks:
            return Refusal("invalid_checksums", f"{len(checksums)} bytes for {stored.num_chunks} chunks")
        del self.writing[key]
        self.readable[key] = stored
        stored.become_readable(checksums, now)
        return True

    def adopt(
        self,
        key: ObjectKey,
        object_id: int,
        size_bytes: int,
        chunk_bytes: int,
        checksums: bytes,
        extents: list[Extent],
        lease_until: float,
    ) -> StoredObject:
        """A readable object that an earlier master knew."""
        assert key not in self.readable, key
        stored = StoredObject(key, object_id, 0, size_bytes, chunk_bytes, extents, 0.0)
        stored.become_readable(checksums, lease_until)
        self.readable[key] = stored
        for extent in extents:
            extent.segment.holders[extent.offset] = stored
        return stored

    def unlink(self, stored: StoredObject) -> None:
        """Take the object out of its table; its space stays taken until it is released."""
        table = self.writing if stored.state is State.WRITING else self.readable
        assert table.get(stored.key) is stored, stored
        del table[stored.key]
        stored.state = State.UNLINKED

    def check(self) -> None:
        """Assert that tables, states and segments agree."""
        assert not self.readable.keys() & self.writing.keys()
        for table, state in ((self.readable, State.READABLE), (self.writing, State.WRITING)):
            for key, stored in table.items():
                assert stored.key == key and stored.state is state, stored
                assert (stored.stored is not None) == (state is State.READABLE), stored
                assert stored.extents, stored
                for extent in stored.extents:
                    assert extent.segment.is_mounted, stored
                    assert extent.segment.holders[extent.offset] is stored, stored

    def __repr__(self) -> str:
        return f"<Objects {len(self.readable)} readable, {len(self.writing)} being written>"

# SPDX-License-Identifier: Apache-2.0
"""The calls of a client of the store, written once for ``Store`` and ``AsyncStore``.

A call is a generator, or returns one, like the operations that it consists of: it prepares the caller's
memory (``buffers.py``), sets the deadline, and yields the effects of ``operations.py``, plus two of its own
for work that the blocking and the asyncio client do in different ways: ``RunConcurrently`` and
``RunFunction``. ``store.py`` performs them. The memory of a call stays registered until its generator has
ended or is closed.

Results are values: None is a miss, a ``Refusal`` says why an object was not stored or removed. Exceptions are
raised for a master that can't be reached before the deadline and for invalid input.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec
import numpy as np
from msgspec import Meta
from prometheus_client import Histogram

from mooncake import clock
from mooncake.config import Size
from mooncake.errors import InvalidArgument, Refusal
from mooncake.metrics import registry
from mooncake.security.principal import DEFAULT_TENANT
from mooncake.store import messages as m
from mooncake.store.client.admin import AdminOperations
from mooncake.store.client.buffers import Buffer, LocalMemory, RegisteredBuffers
from mooncake.store.client.effects import Effect, Operation
from mooncake.store.client.grants import PutGrant, ReadGrant
from mooncake.store.client.operations import Operations
from mooncake.store.master.objects import DEFAULT_POLICY
from mooncake.transfer import TransferEngine, crc32c_columns
from mooncake.transfer.batch import Addresses
from mooncake.types import ObjectKey

_BUCKETS_S = (50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 20e-3, 50e-3, 0.1, 0.5, 1.0, 5.0)
PUT_SECONDS = Histogram(
    "mooncake_store_put_seconds", "Time of one put call", registry=registry, buckets=_BUCKETS_S
)
GET_SECONDS = Histogram(
    "mooncake_store_get_seconds", "Time of one get call", registry=registry, buckets=_BUCKETS_S
)

MAX_TIMEOUT_S = 1_000_000
"""Eleven days; the system's waiting calls overflow at twice as much."""
REMOVAL_TIMEOUT_S = 600.0
"""Seconds that a removal by pattern may take: the master examines all keys, between other requests."""
DURABLE_PART_BYTES = 16 << 20
MAX_DURABLE_PARTS = 8


@dataclasses.dataclass(frozen=True)
class StoreSettings:
    """Settings of a client of the store."""

    timeout_s: Annotated[float, Meta(gt=0, le=MAX_TIMEOUT_S)] = 10.0
    "Seconds that one operation may take, including connecting and waiting for a restarted master."

    chunk_bytes: Annotated[int, Size, Meta(ge=4096)] = 1 << 20
    "Bytes covered by one checksum of a whole-object put."

    tenant: str = DEFAULT_TENANT
    "Tenant: namespace of all keys of this client, and owner of the quota that its objects count against."

    verify_local: bool = True
    "Whether reads from memory on this host are verified too; reads from elsewhere or from SSD always are."

    def __post_init__(self) -> None:
        if not (isinstance(self.timeout_s, int | float) and 0 < self.timeout_s <= MAX_TIMEOUT_S):
            raise InvalidArgument("timeout_s", self.timeout_s, f"seconds above 0, up to {MAX_TIMEOUT_S:,}")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RunConcurrently:
    """Run operations concurrently; resumed with the list of their results.

    When some of them raise, all are waited for, because until then their memory is in use.
    """

    operations: list[Operation[Any]]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RunFunction:
    """Call a function that takes long, but not on the event loop; resumed with its result."""

    function: Callable[[], Any]


CallEffect = Effect | RunConcurrently | RunFunction
ResultT = TypeVar("ResultT")
Call: TypeAlias = Generator[CallEffect, Any, ResultT]


class ClientCalls:
    """The calls of one client. Thread-safe."""

    def __init__(self, operations: Operations, memory: LocalMemory, settings: StoreSettings) -> None:
        self.operations = operations
        self._admin = AdminOperations(operations)
        self._memory = memory
        self._settings = settings

    def deadline(self, timeout_s: float | None = None, deadline: float | None = None) -> float:
        """Deadline of one call: its own timeout, limited by ``deadline`` of the task it is a step of."""
        own = clock.monotonic() + (self._settings.timeout_s if timeout_s is None else timeout_s)
        return own if deadline is None else min(own, deadline)

    # Whole objects

    def put(
        self,
        key: ObjectKey,
        data: Buffer,
        policy: m.PutPolicy = DEFAULT_POLICY,
        *,
        group: str = "",
        parent: ObjectKey = "",
        replace: bool = False,
    ) -> Call[Refusal | None]:
        """Store ``data``. None: stored, or the key existed already (its value is unchanged).

        While another client writes the key, this waits, for half of ``timeout_s`` in all. Then the outcome is
        a Refusal ``being_written``, and nothing was stored: put again later. A writer that was killed holds
        its key until its reservation ends (the master's ``--put-s``).

        ``policy``: replicas, pins, durability. ``group``: evict together with the other objects of that
        group. ``parent``: key of the preceding block of the prefix. ``replace``: replace an existing value.
        """
        outcomes = yield from self.put_batch(
            [key],
            [data],
            policy,
            groups=[group] if group else (),
            parents=[parent] if parent else (),
            replace=replace,
        )
        return outcomes[0]

    def put_batch(
        self,
        keys: Sequence[ObjectKey],
        buffers: Sequence[Buffer],
        policy: m.PutPolicy = DEFAULT_POLICY,
        *,
        groups: Sequence[str] = (),
        parents: Sequence[ObjectKey] = (),
        replace: bool = False,
    ) -> Call[list[Refusal | None]]:
        """Store many objects; results in the order of ``keys``. ``groups``, ``parents``: one per key.

        A key given more than once is put in order: the first value stays, or with ``replace`` the last one.
        """
        _check_texts(keys)
        _check_pairs(keys, buffers, "buffers")
        _check_names(keys, groups, parents)
        began = time.perf_counter()
        try:
            with self._memory.source(buffers) as prepared:
                puts = self._puts(keys, prepared, policy, groups, parents, replace)
                if len(puts) == 1:
                    return (yield from puts[0])
                parts: list[list[Refusal | None]] = yield RunConcurrently(list(puts))
                return list(itertools.chain.from_iterable(parts))
        finally:
            PUT_SECONDS.observe(time.perf_counter() - began)

    def _puts(
        self,
        keys: Sequence[ObjectKey],
        prepared: RegisteredBuffers,
        policy: m.PutPolicy,
        groups: Sequence[str],
        parents: Sequence[ObjectKey],
        replace: bool,
    ) -> list[Operation[list[Refusal | None]]]:
        """The batch as one operation, or a large durable batch as several, to be run concurrently.

        While one part is being copied to SSD, the next is written to memory.
        """
        deadline, chunk_bytes, put = self.deadline(), self._settings.chunk_bytes, self.operations.put
        if len(keys) == 1 or not policy.is_durable or len(set(keys)) < len(keys):
            addresses, sizes = prepared.addresses, prepared.sizes
            return [put(keys, addresses, sizes, chunk_bytes, deadline, policy, groups, parents, replace)]
        num_parts = min(sum(prepared.sizes) // DURABLE_PART_BYTES, MAX_DURABLE_PARTS, len(keys))
        num_parts = max(1, num_parts)
        borders = [len(keys) * number // num_parts for number in range(num_parts + 1)]
        return [
            put(
                keys[start:end],
                prepared.addresses[start:end],
                prepared.sizes[start:end],
                chunk_bytes,
                deadline,
                policy,
                groups[start:end],
                parents[start:end],
                replace,
            )
            for start, end in itertools.pairwise(borders)
        ]

    def get(self, key: ObjectKey) -> Call[bytes | None]:
        """The object's bytes, or None for a miss."""
        return (yield from self.get_batch([key]))[0]

    def get_batch(self, keys: Sequence[ObjectKey]) -> Call[list[bytes | None]]:
        """The bytes of many objects, None for each miss."""
        _check_texts(keys)
        deadline, is_single = self.deadline(), len(keys) == 1
        with GET_SECONDS.time():
            if is_single:
                answer = yield from self.operations.look_up(keys[0], m.MAX_VALUE_BYTES, deadline)
                if answer.reply.values and answer.reply.objects[0] is not None:
                    prepared, values = self._memory.fresh([answer.reply.objects[0].size_bytes])
                    with prepared:
                        if (yield from self.operations.take_value(answer, prepared.addresses[0])):
                            self._memory.unstage(prepared, values, [True])
                            return list(values)
                grants = yield from self.operations.granted(keys, answer, deadline)
            else:
                grants = yield from self.operations.open_reads(keys, deadline)
            present = [grant for grant in grants if grant is not None]
            prepared, values = self._memory.fresh([grant.size_bytes for grant in present])
            with prepared:
                arrived = yield from self.operations.read_whole(present, prepared.addresses, deadline)
                self._memory.unstage(prepared, values, arrived)
            if is_single and present and present[0].size_bytes <= m.MAX_VALUE_BYTES:
                self.operations.moved_small(present[0].segment)
        return _in_order(grants, values, arrived)

    def get_into(self, key: ObjectKey, buffer: Buffer) -> Call[int | None]:
        """Read the object into ``buffer``; its size, or None for a miss.

        Raises:
            InvalidArgument: the object is larger than the buffer.
        """
        return (yield from self.get_batch_into([key], [buffer]))[0]

    def get_batch_into(self, keys: Sequence[ObjectKey], buffers: Sequence[Buffer]) -> Call[list[int | None]]:
        """Read many objects, each into its buffer; sizes, None for each miss.

        The buffers must not overlap: the objects are read at the same time.
        """
        _check_texts(keys)
        _check_pairs(keys, buffers, "buffers")
        began = time.perf_counter()
        try:
            with self._memory.target(buffers) as prepared:
                return (
                    yield from self.operations.get_into(
                        keys, prepared.addresses, prepared.sizes, self.deadline()
                    )
                )
        finally:
            GET_SECONDS.observe(time.perf_counter() - began)

    # Metadata

    def exists(self, keys: Sequence[ObjectKey], deadline: float | None = None) -> Call[list[bool]]:
        """Which keys can be read; those are leased, so that a subsequent get finds them."""
        _check_texts(keys)
        return self.operations.exists(keys, self.deadline(None, deadline))

    def remove(
        self, keys: Sequence[ObjectKey], force: bool = False, deadline: float | None = None
    ) -> Call[list[bool | Refusal]]:
        """Remove objects. True: removed; False: there was none; a Refusal: leased, and ``force`` is false."""
        _check_texts(keys)
        return self.operations.remove(keys, force, self.deadline(None, deadline))

    def inspect(self, keys: Sequence[ObjectKey]) -> Call[list[m.ObjectStatus | None]]:
        """Status of objects: replicas, pins, leases. Grants no lease and does not count as a use."""
        _check_texts(keys)
        return self.operations.inspect(keys, self.deadline())

    def remove_matching(self, pattern: str, force: bool = False) -> Call[int]:
        """Remove this tenant's objects whose key matches the regular expression anywhere; returns how many.

        Leased ones are left unless ``force``. The master removes a few thousand objects per second, between
        other requests, so this may take longer than ``timeout_s``, up to 10 minutes if a master answers at
        all. After a DeadlineExceeded the removal goes on.
        """
        message = m.RemoveMatching(pattern, force, self.operations.tenant)
        removed: m.Removed = yield from self.ask(message)
        return removed.num_removed

    def remove_all(self, force: bool = False) -> Call[int]:
        """Remove this tenant's objects; returns how many. As ``remove_matching`` of all keys."""
        return self.remove_matching("", force)

    def pin(self, keys: Sequence[ObjectKey], ttl_s: float | None) -> Call[list[bool]]:
        """Protect objects from eviction: softly for ``ttl_s``, or with None until unpinned or removed.

        A soft pin is no longer than the master's ``--max-pin-s``, an hour by default. False: there is no such
        object.
        """
        _check_texts(keys)
        outcomes = yield from self.operations.pin(keys, ttl_s, self.deadline())
        return [outcome is True for outcome in outcomes]

    def unpin(self, keys: Sequence[ObjectKey]) -> Call[list[bool]]:
        """Let objects be evicted again."""
        return self.pin(keys, 0.0)

    def drop_replicas(self, keys: Sequence[ObjectKey], segment: str = "") -> Call[list[bool | Refusal]]:
        """Drop the replicas on ``segment`` ("": all in memory), even an object's last one."""
        _check_texts(keys)
        return self.operations.drop_replicas(keys, segment, self.deadline())

    def verify(self, keys: Sequence[ObjectKey]) -> Call[list[bool | None]]:
        """Read and verify every replica; corrupt ones are dropped.

        True: all are right; False: one was wrong or could not be read; None: a miss.
        """
        _check_texts(keys)
        results: list[bool | None] = []
        for key in keys:
            grant = (yield from self.open_reads([key]))[0]
            if grant is None:
                results.append(None)
                continue
            prepared, values = self._memory.fresh([grant.size_bytes])
            with prepared:
                results += yield from self.operations.verify([grant], prepared.addresses, self.deadline())
            del values  # not earlier: their memory was the target
        return results

    # Jobs and quotas

    def copy(self, key: ObjectKey, targets: Sequence[str]) -> Call[m.JobStatus | Refusal]:
        """Start to make a further replica on each of ``targets``."""
        _check_texts([key], "key")
        _check_texts(targets, "targets")
        return self._admin.copy(key, targets, "", self.deadline())

    def move(self, key: ObjectKey, source: str, target: str) -> Call[m.JobStatus | Refusal]:
        """Start to copy the object to ``target``; its replica on ``source`` is dropped afterwards."""
        _check_texts([key], "key")
        return self._admin.copy(key, [target], source, self.deadline())

    def drain(
        self, segments: Sequence[str], targets: Sequence[str] = (), max_concurrency: int = 4
    ) -> Call[m.JobStatus | Refusal]:
        """Start to move everything on ``segments`` to ``targets`` or anywhere; no new objects go there."""
        _check_texts(segments, "segments")
        _check_texts(targets, "targets")
        return self._admin.drain(segments, targets, max_concurrency, self.deadline())

    def job(self, job_id: int) -> Call[m.JobStatus | None]:
        """Status of a job; None: there is no such job."""
        return self._admin.job(job_id, self.deadline())

    def cancel(self, job_id: int) -> Call[bool]:
        """Stop a job; False: there is no such job."""
        return self._admin.cancel(job_id, self.deadline())

    def set_quota(self, tenant: str, size_bytes: int | None) -> Call[Refusal | None]:
        """Set how much memory a tenant may use; None: no limit."""
        return self._admin.set_quota(tenant, size_bytes, self.deadline())

    def quotas(self) -> Call[list[m.QuotaStatus]]:
        """Quota and usage of each tenant."""
        return self._admin.quotas(self.deadline())

    def ask(self, message: msgspec.Struct) -> Call[Any]:
        """Send any message of ``messages.py``, for status, listing and stories; returns the reply."""
        if isinstance(message, m.RemoveMatching):
            until = self.deadline(max(self._settings.timeout_s, REMOVAL_TIMEOUT_S))
            return self._admin.remove_matching(message, self.deadline(), until)
        return self.operations.ask(message, self.deadline())

    # Parts of objects. Local addresses must lie in memory registered with the client's engine. ``deadline``
    # (on ``clock.monotonic``) is that of the task a call is a step of: after it nothing is sent or moved.

    def start_puts(
        self,
        keys: Sequence[ObjectKey],
        sizes: Sequence[int],
        chunk_bytes: Sequence[int] | int,
        policy: m.PutPolicy = DEFAULT_POLICY,
        *,
        groups: Sequence[str] = (),
        parents: Sequence[ObjectKey] = (),
        replace: bool = False,
        deadline: float | None = None,
    ) -> Call[list[PutGrant | Refusal | None]]:
        """Reserve space; None: the object exists. Waits for no other writer: a Refusal ``being_written``."""
        _check_names(keys, groups, parents)
        _check_texts(keys)
        chunks = [chunk_bytes] * len(keys) if isinstance(chunk_bytes, int) else chunk_bytes
        until = self.deadline(None, deadline)
        return self.operations.start_puts(keys, sizes, chunks, until, (), policy, groups, parents, replace)

    def write_ranges(
        self,
        grants: Sequence[PutGrant],
        object_offsets: Addresses,
        local_addresses: Addresses,
        lengths: Addresses,
        timeout_s: float | None = None,
        deadline: float | None = None,
    ) -> Call[list[Refusal | None]]:
        """Write k slices for each grant; columns u64 [k * len(grants)], the slices of a grant adjacent.

        ``timeout_s``: timeout of this transfer, which may take longer than requests to the master.
        """
        until = self.deadline(timeout_s, deadline)
        return self.operations.write_ranges(grants, object_offsets, local_addresses, lengths, until)

    def end_puts(
        self, grants: Sequence[PutGrant], deadline: float | None = None
    ) -> Call[list[Refusal | None]]:
        """Make complete objects visible; incomplete or failed ones are aborted, with the reason."""
        return self.operations.end_puts(grants, self.deadline(None, deadline))

    def abort_puts(self, grants: Sequence[PutGrant], deadline: float | None = None) -> Call[None]:
        """Release reservations."""
        return self.operations.abort_puts(grants, self.deadline(None, deadline))

    def open_reads(
        self, keys: Sequence[ObjectKey], deadline: float | None = None
    ) -> Call[list[ReadGrant | None]]:
        """Look objects up and lease them."""
        _check_texts(keys)
        return self.operations.open_reads(keys, self.deadline(None, deadline))

    def report_corrupt(self, grants: Sequence[ReadGrant], deadline: float | None = None) -> Call[None]:
        """Have the nodes of the replicas that these grants name check their bytes, which the caller has found
        wrong; those that confirm it drop them."""
        return self.operations.report_corrupt(grants, self.deadline(None, deadline))

    def read_ranges(
        self,
        grants: Sequence[ReadGrant],
        object_offsets: Addresses,
        local_addresses: Addresses,
        lengths: Addresses,
        timeout_s: float | None = None,
        deadline: float | None = None,
    ) -> Call[list[bool]]:
        """Read whole chunks, k slices for each grant; for which grants the bytes are right."""
        until = self.deadline(timeout_s, deadline)
        return self.operations.read_ranges(grants, object_offsets, local_addresses, lengths, until)

    # For views

    def open_view(self, key: ObjectKey, verify: bool) -> Call[tuple[memoryview | None, ReadGrant | None]]:
        """The object's bytes, and the grant whose lease must last while they are in use.

        Without a grant they are a copy; (None, None): a miss.
        """
        grant = (yield from self.open_reads([key]))[0]
        if grant is None:
            return None, None
        view: memoryview | None = yield RunFunction(
            functools.partial(_mapped, self._memory.engine, grant, verify)
        )
        if view is not None and len(view):
            return view, grant
        # On another host, or wrong: a get copies the object, or reports it.
        value = yield from self.get(key)
        return (None if value is None else memoryview(value)), None

    def renew(self, grants: list[ReadGrant], timeout_s: float) -> Call[list[bool]]:
        """Extend leases; views renew theirs themselves."""
        return self.operations.renew(grants, self.deadline(timeout_s))


def _mapped(engine: TransferEngine, grant: ReadGrant, verify: bool) -> memoryview | None:
    """The object's bytes in place; None: not on this host; empty: their checksums are wrong."""
    view = engine.map(grant.segment, grant.address, grant.size_bytes)
    if view is None or not verify:
        return view
    first = np.frombuffer(view, dtype=np.uint8).ctypes.data
    offsets = np.arange(0, grant.size_bytes, grant.chunk_bytes, dtype=np.uint64)
    lengths = np.minimum(np.uint64(grant.chunk_bytes), np.uint64(grant.size_bytes) - offsets)
    if np.array_equal(crc32c_columns(offsets + np.uint64(first), lengths), grant.checksums):
        return view
    view.release()
    return memoryview(b"")


def _in_order(
    grants: Sequence[ReadGrant | None], values: Sequence[bytes], arrived: Sequence[bool]
) -> list[bytes | None]:
    good: Iterator[bytes | None] = (
        value if is_good else None for value, is_good in zip(values, arrived, strict=True)
    )
    return [None if grant is None else next(good) for grant in grants]


def _check_texts(texts: Sequence[str], name: str = "keys") -> None:
    """Refuse one string in place of a list: it would be taken letter by letter.

    Messages hold ``str`` itself and enumerations of strings, but no other subclasses, such as numpy's.
    """
    if type(texts) is not list and (isinstance(texts, str | bytes) or not isinstance(texts, Sequence)):
        raise InvalidArgument(name, texts, "a list of strings")
    for text in texts:
        if type(text) is not str and not (isinstance(text, str) and isinstance(text, enum.Enum)):
            raise InvalidArgument(name, text, f"a list of strings; {type(text).__name__} is none")


def _check_names(keys: Sequence[ObjectKey], groups: Sequence[str], parents: Sequence[ObjectKey]) -> None:
    for name, others in (("groups", groups), ("parents", parents)):
        if others:
            _check_texts(others, name)
            _check_pairs(keys, others, name)


def _check_pairs(keys: Sequence[ObjectKey], others: Sequence[Any], name: str) -> None:
    if len(keys) != len(others):
        raise InvalidArgument(name, len(others), f"as many as there are keys ({len(keys)})")

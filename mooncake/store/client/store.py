"""The client of the store: ``Store`` blocks, ``AsyncStore`` awaits. Same operations, same results.

Both only execute: the decisions are made by generators in ``operations.py``. A client performs the effects
that they yield (a message to the master, a transfer, a pause) and prepares the caller's memory
(``buffers.py``). Results are values: None is a miss, a ``Refusal`` says why an object was not stored or
removed. Exceptions are raised for a master that can't be reached before the deadline and for invalid input.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import random
import socket
import time
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta
from prometheus_client import Histogram
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from mooncake import clock
from mooncake.config import Size
from mooncake.errors import DeadlineExceeded, InvalidArgument, MooncakeError, Refusal
from mooncake.log import get_logger
from mooncake.metrics import registry
from mooncake.security import Identity, process_identity
from mooncake.security.principal import DEFAULT_TENANT
from mooncake.store import messages as m
from mooncake.store.client.admin import AdminOperations
from mooncake.store.client.buffers import Buffer, LocalMemory, RegisteredBuffers
from mooncake.store.client.grants import PutGrant, ReadGrant
from mooncake.store.client.operations import (
    CallMaster,
    MasterReply,
    MoveSlices,
    OpenSegment,
    Operation,
    Operations,
    Pause,
    Slices,
    SlicesMoved,
)
from mooncake.store.client.views import AsyncObjectView, LeaseKeeper, ObjectView
from mooncake.store.ha.master_client import AsyncMasterClient, BlockingMasterClient
from mooncake.store.master.objects import DEFAULT_POLICY
from mooncake.transfer import (
    Completion,
    Op,
    Status,
    TransferEngine,
    TransferSettings,
    crc32c_combine,
)
from mooncake.transfer.descriptor import decode_descriptor
from mooncake.types import ObjectKey

log = get_logger(__name__)

ResultT = TypeVar("ResultT")

DEFAULT_MASTER = "127.0.0.1:50051"

_BUCKETS_S = (50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 20e-3, 50e-3, 0.1, 0.5, 1.0, 5.0)
PUT_SECONDS = Histogram(
    "mooncake_store_put_seconds", "Time of one put call", registry=registry, buckets=_BUCKETS_S
)
GET_SECONDS = Histogram(
    "mooncake_store_get_seconds", "Time of one get call", registry=registry, buckets=_BUCKETS_S
)


@dataclasses.dataclass(frozen=True)
class StoreSettings:
    """Settings of a client of the store."""

    timeout_s: Annotated[float, Meta(gt=0)] = 10.0
    "Seconds that one operation may take, including connecting and waiting for a restarted master."

    chunk_bytes: Annotated[int, Size, Meta(ge=4096)] = 1 << 20
    "Bytes covered by one checksum of a whole-object put."

    tenant: str = DEFAULT_TENANT
    "Tenant: namespace of all keys of this client, and owner of the quota that its objects count against."

    verify_local: bool = True
    "Whether reads from memory on this host are verified too; reads from elsewhere or from SSD always are."


DURABLE_PART_BYTES = 16 << 20
MAX_DURABLE_PARTS = 8

_UNCHECKED = np.zeros(0, dtype=np.uint32)


def _identity_of(identity: Identity | None, engine: TransferEngine | None) -> Identity:
    if identity is not None:
        return identity
    return engine.identity if engine is not None else process_identity()


class _StoreBase:
    """State shared by the blocking and the asyncio client: the engine, the operations, the deadline."""

    def __init__(
        self, master: str, engine: TransferEngine | None, settings: StoreSettings, identity: Identity
    ) -> None:
        if identity.tenant and settings.tenant == DEFAULT_TENANT:
            settings = dataclasses.replace(settings, tenant=identity.tenant)
        self.settings = settings
        self.engine = engine if engine is not None else TransferEngine(TransferSettings(), identity=identity)
        self._owns_engine = engine is None
        self.operations = Operations(
            self.engine.describe().host,
            crc32c_combine,
            random.SystemRandom().getrandbits(62),
            settings.tenant,
            settings.verify_local,
            socket.gethostname(),
            settings.timeout_s / 2,
        )
        self._admin = AdminOperations(self.operations)
        self._memory = LocalMemory(self.engine)
        _counted.add(self.operations)

    def _deadline(self, timeout_s: float | None = None, deadline: float | None = None) -> float:
        """Deadline of one call: its own timeout, limited by ``deadline`` of the task it is a step of."""
        own = clock.monotonic() + (self.settings.timeout_s if timeout_s is None else timeout_s)
        return own if deadline is None else min(own, deadline)

    def _close(self) -> None:
        _counted.remove(self.operations)
        self._memory.close()
        if self._owns_engine:
            self.engine.close()

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
        deadline, chunk_bytes, put = self._deadline(), self.settings.chunk_bytes, self.operations.put
        if len(keys) == 1 or not policy.is_durable:
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

    def _open(self, effect: OpenSegment) -> Any:
        try:
            return self.engine.open(decode_descriptor(effect.descriptor))
        except MooncakeError as error:
            log.warning("segment_unreachable", segment=effect.segment, reason=str(error))
            return None

    def _moved(self, t: Slices, completion: Completion) -> SlicesMoved:
        if completion.status == Status.OK:
            checksums = completion.checksums if t.is_checked else _UNCHECKED
            return SlicesMoved(checksums, "", clock.monotonic())
        if completion.status == Status.PEER_LOST:
            self.engine.forget(t.handle)  # otherwise the engine would treat this path as dead permanently
        return SlicesMoved(None, completion.status.name.lower(), clock.monotonic())

    def __repr__(self) -> str:
        return f"<{type(self).__name__} [{self.operations.counts}]>"


class Store(_StoreBase):
    """Blocking client of the store; thread-safe.

    ``engine``: the process's transfer engine if it has one, so that memory registered there can be
    read and written directly; otherwise the store makes its own. ``identity``: identity of this client in the
    cluster, instead of that of the engine or the process. Connects at the first call.
    """

    def __init__(
        self,
        master: str = DEFAULT_MASTER,
        engine: TransferEngine | None = None,
        settings: StoreSettings = StoreSettings(),
        identity: Identity | None = None,
    ) -> None:
        identity = _identity_of(identity, engine)
        self._rpc = BlockingMasterClient(master, m.REPLIES, identity=identity)
        super().__init__(master, engine, settings, identity)
        self._keeper = LeaseKeeper(self._renew)

    def connect(self, timeout_s: float = 2.0) -> None:
        """Find the master now rather than at the first call.

        Raises:
            Unavailable: it does not answer; at once, if only one address is given and its port is closed.
        """
        self._rpc.connect(timeout_s)

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
    ) -> Refusal | None:
        """Store ``data``. None: stored, or the key existed already (its value is unchanged).

        ``policy``: replicas, pins, durability. ``group``: evict together with the other objects of that
        group. ``parent``: key of the preceding block of the prefix. ``replace``: replace an existing value.
        """
        return self.put_batch(
            [key],
            [data],
            policy,
            groups=[group] if group else (),
            parents=[parent] if parent else (),
            replace=replace,
        )[0]

    def put_batch(
        self,
        keys: Sequence[ObjectKey],
        buffers: Sequence[Buffer],
        policy: m.PutPolicy = DEFAULT_POLICY,
        *,
        groups: Sequence[str] = (),
        parents: Sequence[ObjectKey] = (),
        replace: bool = False,
    ) -> list[Refusal | None]:
        """Store many objects; results in the order of ``keys``. ``groups``, ``parents``: one per key."""
        _check_pairs(keys, buffers, "buffers")
        _check_names(keys, groups, parents)
        began = time.perf_counter()
        try:
            with self._memory.source(buffers) as prepared:
                puts = self._puts(keys, prepared, policy, groups, parents, replace)
                if len(puts) == 1:
                    return self._run(puts[0])
                with ThreadPoolExecutor(len(puts), "store-put") as threads:
                    return list(itertools.chain.from_iterable(threads.map(self._run, puts)))
        finally:
            PUT_SECONDS.observe(time.perf_counter() - began)

    def get(self, key: ObjectKey) -> bytes | None:
        """The object's bytes, or None for a miss."""
        return self.get_batch([key])[0]

    def get_batch(self, keys: Sequence[ObjectKey]) -> list[bytes | None]:
        """The bytes of many objects, None for each miss."""
        deadline = self._deadline()
        with GET_SECONDS.time():
            grants = self._run(self.operations.open_reads(keys, deadline))
            present = [grant for grant in grants if grant is not None]
            prepared, values = self._memory.fresh([grant.size_bytes for grant in present])
            with prepared:
                arrived = self._run(self.operations.read_whole(present, prepared.addresses, deadline))
                self._memory.unstage(prepared, values)
        return _in_order(grants, values, arrived)

    def get_into(self, key: ObjectKey, buffer: Buffer) -> int | None:
        """Read the object into ``buffer``; its size, or None for a miss.

        Raises:
            InvalidArgument: the object is larger than the buffer.
        """
        return self.get_batch_into([key], [buffer])[0]

    def get_batch_into(self, keys: Sequence[ObjectKey], buffers: Sequence[Buffer]) -> list[int | None]:
        """Read many objects, each into its buffer; sizes, None for each miss."""
        _check_pairs(keys, buffers, "buffers")
        with GET_SECONDS.time(), self._memory.target(buffers) as prepared:
            return self._run(
                self.operations.get_into(keys, prepared.addresses, prepared.sizes, self._deadline())
            )

    def view(self, key: ObjectKey, verify: bool | None = None) -> ObjectView:
        """``with store.view(key) as data:`` yields a read-only memoryview, or None for a miss.

        On the host of the object's node nothing is copied, and the lease is renewed while the view is
        open; elsewhere the object is fetched. ``verify=False`` skips the checksums, which makes the time
        independent of the size; the default is ``StoreSettings.verify_local``.

        Raises (when the block ends):
            Unavailable: the lease could not be renewed; the data read may be wrong.
        """
        return ObjectView(self, key, self.settings.verify_local if verify is None else verify)

    # Metadata

    def exists(self, keys: Sequence[ObjectKey], deadline: float | None = None) -> list[bool]:
        """Which keys can be read; those are leased, so that a subsequent get finds them."""
        return self._run(self.operations.exists(keys, self._deadline(None, deadline)))

    def remove(
        self, keys: Sequence[ObjectKey], force: bool = False, deadline: float | None = None
    ) -> list[bool | Refusal]:
        """Remove objects. True: removed; False: there was none; a Refusal: leased, and ``force`` is false."""
        return self._run(self.operations.remove(keys, force, self._deadline(None, deadline)))

    def inspect(self, keys: Sequence[ObjectKey]) -> list[m.ObjectStatus | None]:
        """Status of objects: replicas, pins, leases. Grants no lease and does not count as a use."""
        return self._run(self.operations.inspect(keys, self._deadline()))

    def remove_matching(self, pattern: str, force: bool = False) -> int:
        """Remove this tenant's objects whose key matches the regular expression anywhere; returns how many.

        Leased ones are left unless ``force``.
        """
        return self._run(self._admin.remove_matching(pattern, force, self._deadline()))

    def remove_all(self, force: bool = False) -> int:
        """Remove this tenant's objects; returns how many. Leased ones are left unless ``force``."""
        return self.remove_matching("", force)

    def pin(self, keys: Sequence[ObjectKey], ttl_s: float | None) -> list[bool]:
        """Protect objects from eviction: softly for ``ttl_s``, or with None until unpinned or removed.

        False: there is no such object.
        """
        return _flags(self._run(self.operations.pin(keys, ttl_s, self._deadline())))

    def unpin(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Let objects be evicted again."""
        return self.pin(keys, 0.0)

    def drop_replicas(self, keys: Sequence[ObjectKey], segment: str = "") -> list[bool | Refusal]:
        """Drop the replicas on ``segment`` ("": all in memory), even an object's last one."""
        return self._run(self.operations.drop_replicas(keys, segment, self._deadline()))

    def verify(self, keys: Sequence[ObjectKey]) -> list[bool | None]:
        """Read and verify every replica; corrupt ones are dropped.

        True: all are right; False: one was wrong or could not be read; None: a miss.
        """
        results: list[bool | None] = []
        for key in keys:
            grant = self.open_reads([key])[0]
            if grant is None:
                results.append(None)
                continue
            prepared, values = self._memory.fresh([grant.size_bytes])
            with prepared:
                results += self._run(self.operations.verify([grant], prepared.addresses, self._deadline()))
            del values  # not earlier: their memory was the target
        return results

    # Jobs and quotas

    def copy(self, key: ObjectKey, targets: Sequence[str]) -> m.JobStatus | Refusal:
        """Start to make a further replica on each of ``targets``."""
        return self._run(self._admin.copy(key, targets, "", self._deadline()))

    def move(self, key: ObjectKey, source: str, target: str) -> m.JobStatus | Refusal:
        """Start to copy the object to ``target``; its replica on ``source`` is dropped afterwards."""
        return self._run(self._admin.copy(key, [target], source, self._deadline()))

    def drain(
        self, segments: Sequence[str], targets: Sequence[str] = (), max_concurrency: int = 4
    ) -> m.JobStatus | Refusal:
        """Start to move everything on ``segments`` to ``targets`` or anywhere; no new objects go there."""
        return self._run(self._admin.drain(segments, targets, max_concurrency, self._deadline()))

    def job(self, job_id: int) -> m.JobStatus | None:
        """Status of a job; None: there is no such job."""
        return self._run(self._admin.job(job_id, self._deadline()))

    def cancel(self, job_id: int) -> bool:
        """Stop a job; False: there is no such job."""
        return self._run(self._admin.cancel(job_id, self._deadline()))

    def set_quota(self, tenant: str, size_bytes: int | None) -> Refusal | None:
        """Set how much memory a tenant may use; None: no limit."""
        return self._run(self._admin.set_quota(tenant, size_bytes, self._deadline()))

    def quotas(self) -> list[m.QuotaStatus]:
        """Quota and usage of each tenant."""
        return self._run(self._admin.quotas(self._deadline()))

    def ask(self, message: msgspec.Struct) -> Any:
        """Send any message of ``messages.py``, for status, listing and stories; returns the reply."""
        return self._run(self.operations.ask(message, self._deadline()))

    # Parts of objects. Local addresses must lie in memory registered with ``engine``. ``deadline`` (on
    # ``clock.monotonic``) is that of the task a call is a step of: after it nothing is sent or moved.

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
    ) -> list[PutGrant | Refusal | None]:
        """Reserve space; None: the object exists or is being written by another. See ``Operations``."""
        _check_names(keys, groups, parents)
        chunks = [chunk_bytes] * len(keys) if isinstance(chunk_bytes, int) else chunk_bytes
        return self._run(
            self.operations.start_puts(
                keys, sizes, chunks, self._deadline(None, deadline), (), policy, groups, parents, replace
            )
        )

    def write_ranges(
        self,
        grants: Sequence[PutGrant],
        object_offsets: npt.ArrayLike,
        local_addresses: npt.ArrayLike,
        lengths: npt.ArrayLike,
        timeout_s: float | None = None,
        deadline: float | None = None,
    ) -> list[Refusal | None]:
        """Write k slices for each grant; columns u64 [k * len(grants)], the slices of a grant adjacent.

        ``timeout_s``: timeout of this transfer, which may take longer than requests to the master.
        """
        deadline = self._deadline(timeout_s, deadline)
        return self._run(
            self.operations.write_ranges(grants, object_offsets, local_addresses, lengths, deadline)
        )

    def end_puts(self, grants: Sequence[PutGrant], deadline: float | None = None) -> list[Refusal | None]:
        """Make complete objects visible; incomplete or failed ones are aborted, with the reason."""
        return self._run(self.operations.end_puts(grants, self._deadline(None, deadline)))

    def abort_puts(self, grants: Sequence[PutGrant], deadline: float | None = None) -> None:
        """Release reservations."""
        self._run(self.operations.abort_puts(grants, self._deadline(None, deadline)))

    def open_reads(self, keys: Sequence[ObjectKey], deadline: float | None = None) -> list[ReadGrant | None]:
        """Look objects up and lease them."""
        return self._run(self.operations.open_reads(keys, self._deadline(None, deadline)))

    def read_ranges(
        self,
        grants: Sequence[ReadGrant],
        object_offsets: npt.ArrayLike,
        local_addresses: npt.ArrayLike,
        lengths: npt.ArrayLike,
        timeout_s: float | None = None,
        deadline: float | None = None,
    ) -> list[bool]:
        """Read whole chunks, k slices for each grant; for which grants the bytes are right."""
        deadline = self._deadline(timeout_s, deadline)
        return self._run(
            self.operations.read_ranges(grants, object_offsets, local_addresses, lengths, deadline)
        )

    def close(self) -> None:
        """Release all resources. Calls in progress fail."""
        self._keeper.close()
        self._rpc.close()
        self._close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # For views

    def keep(self, grant: ReadGrant) -> None:
        self._keeper.add(grant)

    def let_go(self, grant: ReadGrant) -> None:
        self._keeper.remove(grant)

    def _renew(self, grants: list[ReadGrant], timeout_s: float) -> None:
        self._run(self.operations.renew(grants, self._deadline(timeout_s)))

    # The trampoline

    def _run(self, operation: Operation[ResultT]) -> ResultT:
        try:
            effect = next(operation)
            while True:
                effect = operation.send(self._perform(effect))
        except StopIteration as stop:
            result: ResultT = stop.value
            return result

    def _perform(self, effect: CallMaster | OpenSegment | MoveSlices | Pause) -> Any:
        if isinstance(effect, CallMaster):
            asked_at = clock.monotonic()
            if asked_at >= effect.deadline and not effect.may_be_late:
                return _unsent(effect, asked_at)
            try:
                reply = self._rpc.call(effect.message, max(0.0, effect.deadline - asked_at))
            except MooncakeError as error:
                return MasterReply(None, error, asked_at, clock.monotonic())
            return MasterReply(reply, None, asked_at, clock.monotonic())
        if isinstance(effect, MoveSlices):
            return self._move(effect)
        if isinstance(effect, OpenSegment):
            return self._open(effect)
        time.sleep(effect.seconds)
        return None

    def _move(self, effect: MoveSlices) -> list[SlicesMoved]:
        op = Op.WRITE if effect.is_write else Op.READ
        timeout_s = effect.deadline - clock.monotonic()
        if timeout_s <= 0:
            return _too_late(effect)
        if len(effect.transfers) == 1:
            t = effect.transfers[0]
            timeout_s = _of_slices(timeout_s, t)
            done = self.engine.run(
                op, t.handle, t.local, t.remote, t.lengths, timeout_s=timeout_s, checksum=t.is_checked
            )
            return [self._moved(t, done)]
        queue = self.engine.new_queue()
        num_begun, failure = 0, None
        ended: dict[int, Completion] = {}
        # Each transfer ends by its own deadline, and its memory is in use until then: exceptions raised
        # meanwhile (an interrupt by Ctrl-C, memory that is not registered) are raised afterwards.
        while failure is None and num_begun < len(effect.transfers):
            t = effect.transfers[num_begun]
            try:
                self.engine.submit(
                    queue,
                    num_begun,
                    op,
                    t.handle,
                    t.local,
                    t.remote,
                    t.lengths,
                    checksum=t.is_checked,
                    timeout_s=_of_slices(timeout_s, t),
                )
                num_begun += 1
            except MooncakeError as error:
                failure = error
        interrupt: KeyboardInterrupt | None = None
        while len(ended) < num_begun:
            try:
                for completion in queue.drain(timeout_s=1.0):
                    ended[completion.token] = completion
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None or failure is not None:
            raise interrupt or failure  # type: ignore[misc]
        return [self._moved(t, ended[token]) for token, t in enumerate(effect.transfers)]


class AsyncStore(_StoreBase):
    """Asyncio client of the store, with the same operations as ``Store``, which documents them."""

    def __init__(
        self,
        master: str = DEFAULT_MASTER,
        engine: TransferEngine | None = None,
        settings: StoreSettings = StoreSettings(),
        identity: Identity | None = None,
    ) -> None:
        identity = _identity_of(identity, engine)
        self._rpc = AsyncMasterClient(master, m.REPLIES, identity=identity)
        super().__init__(master, engine, settings, identity)

    async def connect(self, timeout_s: float = 2.0) -> None:
        """As ``Store.connect``, but wait for a master that is not running yet."""
        await self._rpc.connect(timeout_s)

    async def put(
        self,
        key: ObjectKey,
        data: Buffer,
        policy: m.PutPolicy = DEFAULT_POLICY,
        *,
        group: str = "",
        parent: ObjectKey = "",
        replace: bool = False,
    ) -> Refusal | None:
        done = await self.put_batch(
            [key],
            [data],
            policy,
            groups=[group] if group else (),
            parents=[parent] if parent else (),
            replace=replace,
        )
        return done[0]

    async def put_batch(
        self,
        keys: Sequence[ObjectKey],
        buffers: Sequence[Buffer],
        policy: m.PutPolicy = DEFAULT_POLICY,
        *,
        groups: Sequence[str] = (),
        parents: Sequence[ObjectKey] = (),
        replace: bool = False,
    ) -> list[Refusal | None]:
        _check_pairs(keys, buffers, "buffers")
        _check_names(keys, groups, parents)
        with PUT_SECONDS.time(), self._memory.source(buffers) as prepared:
            puts = self._puts(keys, prepared, policy, groups, parents, replace)
            # Wait for each, whatever the outcome of the others: until then the memory is in use.
            done = await asyncio.gather(*(self._run(put) for put in puts), return_exceptions=True)
        outcomes: list[Refusal | None] = []
        for part in done:
            if isinstance(part, BaseException):
                raise part
            outcomes += part
        return outcomes

    async def get(self, key: ObjectKey) -> bytes | None:
        return (await self.get_batch([key]))[0]

    async def get_batch(self, keys: Sequence[ObjectKey]) -> list[bytes | None]:
        deadline = self._deadline()
        with GET_SECONDS.time():
            grants = await self._run(self.operations.open_reads(keys, deadline))
            present = [grant for grant in grants if grant is not None]
            prepared, values = self._memory.fresh([grant.size_bytes for grant in present])
            with prepared:
                arrived = await self._run(self.operations.read_whole(present, prepared.addresses, deadline))
                self._memory.unstage(prepared, values)
        return _in_order(grants, values, arrived)

    async def get_into(self, key: ObjectKey, buffer: Buffer) -> int | None:
        return (await self.get_batch_into([key], [buffer]))[0]

    async def get_batch_into(self, keys: Sequence[ObjectKey], buffers: Sequence[Buffer]) -> list[int | None]:
        _check_pairs(keys, buffers, "buffers")
        with GET_SECONDS.time(), self._memory.target(buffers) as prepared:
            return await self._run(
                self.operations.get_into(keys, prepared.addresses, prepared.sizes, self._deadline())
            )

    def view(self, key: ObjectKey, verify: bool | None = None) -> AsyncObjectView:
        """``async with store.view(key) as data:``, else as ``Store.view``."""
        return AsyncObjectView(self, key, self.settings.verify_local if verify is None else verify)

    async def exists(self, keys: Sequence[ObjectKey], deadline: float | None = None) -> list[bool]:
        return await self._run(self.operations.exists(keys, self._deadline(None, deadline)))

    async def remove(
        self, keys: Sequence[ObjectKey], force: bool = False, deadline: float | None = None
    ) -> list[bool | Refusal]:
        return await self._run(self.operations.remove(keys, force, self._deadline(None, deadline)))

    async def inspect(self, keys: Sequence[ObjectKey]) -> list[m.ObjectStatus | None]:
        return await self._run(self.operations.inspect(keys, self._deadline()))

    async def remove_matching(self, pattern: str, force: bool = False) -> int:
        return await self._run(self._admin.remove_matching(pattern, force, self._deadline()))

    async def remove_all(self, force: bool = False) -> int:
        return await self.remove_matching("", force)

    async def pin(self, keys: Sequence[ObjectKey], ttl_s: float | None) -> list[bool]:
        return _flags(await self._run(self.operations.pin(keys, ttl_s, self._deadline())))

    async def unpin(self, keys: Sequence[ObjectKey]) -> list[bool]:
        return await self.pin(keys, 0.0)

    async def drop_replicas(self, keys: Sequence[ObjectKey], segment: str = "") -> list[bool | Refusal]:
        return await self._run(self.operations.drop_replicas(keys, segment, self._deadline()))

    async def verify(self, keys: Sequence[ObjectKey]) -> list[bool | None]:
        results: list[bool | None] = []
        for key in keys:
            grant = (await self.open_reads([key]))[0]
            if grant is None:
                results.append(None)
                continue
            prepared, values = self._memory.fresh([grant.size_bytes])
            with prepared:
                results += await self._run(
                    self.operations.verify([grant], prepared.addresses, self._deadline())
                )
            del values  # not earlier: their memory was the target
        return results

    # Jobs and quotas

    async def copy(self, key: ObjectKey, targets: Sequence[str]) -> m.JobStatus | Refusal:
        return await self._run(self._admin.copy(key, targets, "", self._deadline()))

    async def move(self, key: ObjectKey, source: str, target: str) -> m.JobStatus | Refusal:
        return await self._run(self._admin.copy(key, [target], source, self._deadline()))

    async def drain(
        self, segments: Sequence[str], targets: Sequence[str] = (), max_concurrency: int = 4
    ) -> m.JobStatus | Refusal:
        return await self._run(self._admin.drain(segments, targets, max_concurrency, self._deadline()))

    async def job(self, job_id: int) -> m.JobStatus | None:
        return await self._run(self._admin.job(job_id, self._deadline()))

    async def cancel(self, job_id: int) -> bool:
        return await self._run(self._admin.cancel(job_id, self._deadline()))

    async def set_quota(self, tenant: str, size_bytes: int | None) -> Refusal | None:
        return await self._run(self._admin.set_quota(tenant, size_bytes, self._deadline()))

    async def quotas(self) -> list[m.QuotaStatus]:
        return await self._run(self._admin.quotas(self._deadline()))

    async def ask(self, message: msgspec.Struct) -> Any:
        return await self._run(self.operations.ask(message, self._deadline()))

    async def start_puts(
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
    ) -> list[PutGrant | Refusal | None]:
        _check_names(keys, groups, parents)
        chunks = [chunk_bytes] * len(keys) if isinstance(chunk_bytes, int) else chunk_bytes
        return await self._run(
            self.operations.start_puts(
                keys, sizes, chunks, self._deadline(None, deadline), (), policy, groups, parents, replace
            )
        )

    async def write_ranges(
        self,
        grants: Sequence[PutGrant],
        object_offsets: npt.ArrayLike,
        local_addresses: npt.ArrayLike,
        lengths: npt.ArrayLike,
        timeout_s: float | None = None,
        deadline: float | None = None,
    ) -> list[Refusal | None]:
        deadline = self._deadline(timeout_s, deadline)
        return await self._run(
            self.operations.write_ranges(grants, object_offsets, local_addresses, lengths, deadline)
        )

    async def end_puts(
        self, grants: Sequence[PutGrant], deadline: float | None = None
    ) -> list[Refusal | None]:
        return await self._run(self.operations.end_puts(grants, self._deadline(None, deadline)))

    async def abort_puts(self, grants: Sequence[PutGrant], deadline: float | None = None) -> None:
        await self._run(self.operations.abort_puts(grants, self._deadline(None, deadline)))

    async def open_reads(
        self, keys: Sequence[ObjectKey], deadline: float | None = None
    ) -> list[ReadGrant | None]:
        return await self._run(self.operations.open_reads(keys, self._deadline(None, deadline)))

    async def read_ranges(
        self,
        grants: Sequence[ReadGrant],
        object_offsets: npt.ArrayLike,
        local_addresses: npt.ArrayLike,
        lengths: npt.ArrayLike,
        timeout_s: float | None = None,
        deadline: float | None = None,
    ) -> list[bool]:
        deadline = self._deadline(timeout_s, deadline)
        return await self._run(
            self.operations.read_ranges(grants, object_offsets, local_addresses, lengths, deadline)
        )

    async def renew(self, grants: list[ReadGrant], timeout_s: float) -> list[bool]:
        """Extend leases; views renew theirs themselves."""
        return await self._run(self.operations.renew(grants, self._deadline(timeout_s)))

    async def close(self) -> None:
        await self._rpc.close()
        self._close()

    async def __aenter__(self) -> AsyncStore:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _run(self, operation: Operation[ResultT]) -> ResultT:
        try:
            effect = next(operation)
            while True:
                effect = operation.send(await self._perform(effect))
        except StopIteration as stop:
            result: ResultT = stop.value
            return result

    async def _perform(self, effect: CallMaster | OpenSegment | MoveSlices | Pause) -> Any:
        if isinstance(effect, CallMaster):
            asked_at = clock.monotonic()
            if asked_at >= effect.deadline and not effect.may_be_late:
                return _unsent(effect, asked_at)
            try:
                reply = await self._rpc.call(effect.message, max(0.0, effect.deadline - asked_at))
            except MooncakeError as error:
                return MasterReply(None, error, asked_at, clock.monotonic())
            return MasterReply(reply, None, asked_at, clock.monotonic())
        if isinstance(effect, MoveSlices):
            op = Op.WRITE if effect.is_write else Op.READ
            # Wait for each, even when one fails or this task is cancelled: until then the memory is in use.
            moves = (self._transfer(op, t, effect.deadline) for t in effect.transfers)
            done = await asyncio.gather(*moves, return_exceptions=True)
            return [_raised(one) for one in done]
        if isinstance(effect, OpenSegment):
            return await asyncio.to_thread(self._open, effect)
        await asyncio.sleep(effect.seconds)
        return None

    async def _transfer(self, op: Op, t: Slices, deadline: float) -> SlicesMoved:
        now = clock.monotonic()
        if now >= deadline:
            return SlicesMoved(None, "timed_out", now)
        timeout_s = _of_slices(deadline - now, t)
        completion = await self.engine.transfer(
            op, t.handle, t.local, t.remote, t.lengths, timeout_s=timeout_s, checksum=t.is_checked
        )
        return self._moved(t, completion)


def _of_slices(timeout_s: float, t: Slices) -> float:
    return timeout_s / 2 if t.has_others else timeout_s


def _unsent(effect: CallMaster, now: float) -> MasterReply:
    what = type(effect.message).__name__
    return MasterReply(None, DeadlineExceeded(f"{what} was not sent: the deadline has passed"), now, now)


def _raised(outcome: SlicesMoved | BaseException) -> SlicesMoved:
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


def _too_late(effect: MoveSlices) -> list[SlicesMoved]:
    now = clock.monotonic()
    return [SlicesMoved(None, "timed_out", now) for _ in effect.transfers]


def _in_order(
    grants: Sequence[ReadGrant | None], values: Sequence[bytes], arrived: Sequence[bool]
) -> list[bytes | None]:
    good: Iterator[bytes | None] = (
        value if is_good else None for value, is_good in zip(values, arrived, strict=True)
    )
    return [None if grant is None else next(good) for grant in grants]


def _flags(outcomes: Sequence[bool | Refusal]) -> list[bool]:
    return [outcome is True for outcome in outcomes]


def _check_names(keys: Sequence[ObjectKey], groups: Sequence[str], parents: Sequence[ObjectKey]) -> None:
    for name, others in (("groups", groups), ("parents", parents)):
        if others:
            _check_pairs(keys, others, name)


def _check_pairs(keys: Sequence[ObjectKey], others: Sequence[Any], name: str) -> None:
    if len(keys) != len(others):
        raise InvalidArgument(name, len(others), f"as many as there are keys ({len(keys)})")


class _OperationMetrics(Collector):
    """Exports the counters of this process's clients, including those that are closed."""

    def __init__(self) -> None:
        self._open: dict[int, Operations] = {}
        self._closed: dict[str, int] = {}
        """Totals of clients that are closed."""

    def add(self, operations: Operations) -> None:
        self._open[id(operations)] = operations

    def remove(self, operations: Operations) -> None:
        if self._open.pop(id(operations), None) is not None:
            for name, value in dataclasses.asdict(operations.counts).items():
                self._closed[name] = self._closed.get(name, 0) + value

    def collect(self) -> Generator[CounterMetricFamily, None, None]:
        totals = dict(self._closed)
        for operations in list(self._open.values()):
            for name, value in dataclasses.asdict(operations.counts).items():
                totals[name] = totals.get(name, 0) + value
        for field, (name, documentation) in _COUNTERS.items():
            yield CounterMetricFamily(f"mooncake_store_{name}", documentation, value=totals.get(field, 0))


_COUNTERS = {
    "checksum_mismatches": ("checksum_mismatch", "Reads whose bytes did not match the writer's checksums"),
    "expired_leases": ("expired_leases", "Reads that arrived after their lease had ended"),
    "failed_transfers": ("failed_transfers", "Transfers with a node that failed"),
    "repeated_requests": (
        "repeated_requests",
        "Requests repeated because the connection to the master broke",
    ),
}
_counted = _OperationMetrics()
registry.register(_counted)

# SPDX-License-Identifier: Apache-2.0
"""The client of the store: ``Store`` blocks, ``AsyncStore`` awaits. Same calls, same results.

The calls are defined in ``calls.py`` as generators, and documented there; the decisions are made in
``operations.py``. This module performs the effects that they yield (a message to the master, a transfer, a
pause), blocking and on asyncio.

It also has the views of objects without a copy: a memoryview of the node's memory. A view is valid only while
its lease is: afterwards the master may give the space to another object. An open view therefore renews its
lease well before it ends; when renewals fail for too long, the end of the ``with`` block raises, because the
data read in it can't be trusted.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import functools
import operator
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from mooncake import clock
from mooncake.errors import DeadlineExceeded, InvalidArgument, MooncakeError, Unavailable
from mooncake.log import get_logger
from mooncake.metrics import registry
from mooncake.security import Identity, process_identity
from mooncake.security.principal import DEFAULT_TENANT
from mooncake.store import messages as m
from mooncake.store.client.buffers import LocalMemory
from mooncake.store.client.calls import (
    Call,
    CallEffect,
    ClientCalls,
    RunConcurrently,
    RunFunction,
    StoreSettings,
)
from mooncake.store.client.effects import (
    CallMaster,
    MasterReply,
    MoveSlices,
    OpenSegment,
    ReadLocal,
    Slices,
    SlicesMoved,
    WriteLocal,
)
from mooncake.store.client.grants import OneSlice, ReadGrant
from mooncake.store.client.operations import Operations
from mooncake.store.ha.master_client import AsyncMasterClient, BlockingMasterClient
from mooncake.transfer import (
    Completion,
    Op,
    Status,
    TransferEngine,
    crc32c,
    crc32c_combine,
    transfer_from_environment,
)
from mooncake.transfer.descriptor import decode_descriptor
from mooncake.types import ObjectKey

log = get_logger(__name__)

P = ParamSpec("P")
ResultT = TypeVar("ResultT")

DEFAULT_MASTER = "127.0.0.1:50051"
_DEFAULT_SETTINGS = StoreSettings()

_UNCHECKED = np.zeros(0, dtype=np.uint32)

CANCELLED = Status.CANCELLED.name.lower()

LATE_SEND_S = 1.0
"""Time for the connection to take a message that is sent after its deadline; its answer is not awaited."""

MIN_RENEWAL_S = 0.02
"""Shortest time between two renewals of the leases of open views."""


_num_forks = 0
"""In how many generations this process is a forked child since the module was loaded."""


def _note_fork() -> None:
    global _num_forks
    _num_forks += 1


os.register_at_fork(after_in_child=_note_fork)


def _blocking(
    call: Callable[Concatenate[ClientCalls, P], Call[ResultT]],
) -> Callable[Concatenate[Store, P], ResultT]:
    """Method of ``Store`` that runs ``call`` and returns its result."""

    @functools.wraps(call)
    def run(store: Store, /, *args: P.args, **kwargs: P.kwargs) -> ResultT:
        return store._run(call(store._calls, *args, **kwargs))

    return run


def _awaited(
    call: Callable[Concatenate[ClientCalls, P], Call[ResultT]],
) -> Callable[Concatenate[AsyncStore, P], Coroutine[Any, Any, ResultT]]:
    """Method of ``AsyncStore`` that runs ``call`` and returns its result."""

    @functools.wraps(call)
    async def run(store: AsyncStore, /, *args: P.args, **kwargs: P.kwargs) -> ResultT:
        return await store._run(call(store._calls, *args, **kwargs))

    return run


def _identity_of(identity: Identity | None, engine: TransferEngine | None) -> Identity:
    if identity is not None:
        return identity
    return engine.identity if engine is not None else process_identity()


class _StoreBase:
    """State shared by the blocking and the asyncio client: the engine, the operations, the calls."""

    def __init__(
        self, master: str, engine: TransferEngine | None, settings: StoreSettings, identity: Identity
    ) -> None:
        if identity.tenant and settings.tenant == DEFAULT_TENANT:
            settings = dataclasses.replace(settings, tenant=identity.tenant)
        self.settings = settings
        self._is_closed, self._num_forks = False, _num_forks
        if engine is None:
            self.engine = TransferEngine(transfer_from_environment().for_tool(), identity=identity)
        else:
            self.engine = engine
        self._owns_engine = engine is None
        self.operations = Operations(
            self.engine.describe().host,
            crc32c_combine,
            random.SystemRandom().getrandbits(62),
            settings.tenant,
            settings.verify_local,
            socket.gethostname(),
            settings.timeout_s / 2,
            self.engine.is_on_one_device,
            operator.attrgetter("is_direct"),
        )
        self._memory = LocalMemory(self.engine)
        self._calls = ClientCalls(self.operations, self._memory, settings)
        _counted.add(self.operations)

    @property
    def _is_inherited(self) -> bool:
        """Whether it was made before this process was forked off: its connection and its memory are those of
        the parent, whose replies and bytes it would take for its own."""
        return self._num_forks != _num_forks

    def _check_usable(self) -> None:
        if self._is_inherited:
            allowed = "one that was made after the fork: make a store in each process"
            raise InvalidArgument("store", "a Store of the parent process", allowed)
        if self._is_closed:
            raise Unavailable("this store is closed")

    def _unanswered(self, error: MooncakeError, asked_at: float) -> MasterReply:
        # A lost connection would be repeated until the deadline.
        final = Unavailable("this store was closed") if self._is_closed else error
        return MasterReply(None, final, asked_at, clock.monotonic())

    def _close(self) -> None:
        _counted.remove(self.operations)
        self._memory.close()
        if self._owns_engine:
            self.engine.close()

    def _open(self, effect: OpenSegment) -> Any:
        try:
            return self.engine.open(decode_descriptor(effect.descriptor))
        except MooncakeError as error:
            log.warning("segment_unreachable", segment=effect.segment, reason=str(error))
            return None

    def _copy(self, effect: ReadLocal | WriteLocal) -> tuple[bytes, int] | int | None:
        """Copy a few KiB of host memory; None: it is not host memory."""
        if not self.engine.is_host_memory(effect.address):
            return None
        if isinstance(effect, ReadLocal):
            value = ctypes.string_at(effect.address, effect.length)
            return value, crc32c(value)
        ctypes.memmove(effect.address, effect.value, len(effect.value))
        return crc32c(effect.value)

    def _moved_one(self, t: OneSlice, done: int | Completion) -> SlicesMoved:
        if not isinstance(done, int):
            return self._moved(t, done)
        checksums = np.array((done,), dtype=np.uint32) if t.is_checked else _UNCHECKED
        return SlicesMoved(checksums, "", clock.monotonic())

    def _moved(self, t: Slices | OneSlice, completion: Completion) -> SlicesMoved:
        if completion.status == Status.OK:
            checksums = completion.checksums if t.is_checked else _UNCHECKED
            return SlicesMoved(checksums, "", clock.monotonic())
        if self._is_closed:
            raise Unavailable("this store was closed")  # the transfer was cancelled, which is no miss
        if completion.status == Status.PEER_LOST:
            self.engine.forget(t.handle)  # otherwise the engine would treat this path as dead permanently
        return SlicesMoved(None, completion.status.name.lower(), clock.monotonic())

    def __repr__(self) -> str:
        return f"<{type(self).__name__} [{self.operations.counts}]>"


class Store(_StoreBase):
    """Blocking client of the store; thread-safe. A forked child can't use its parent's: each makes its own.

    ``engine``: the process's transfer engine if it has one, so that memory registered there can be
    read and written directly; otherwise the store makes its own, with the settings of ``[transfer]``
    in the environment and in the file named by ``MOONCAKE_CONFIG``. ``identity``: identity of this client in
    the cluster, instead of that of the engine or the process. Connects at the first call.
    """

    def __init__(
        self,
        master: str = DEFAULT_MASTER,
        engine: TransferEngine | None = None,
        settings: StoreSettings = _DEFAULT_SETTINGS,
        identity: Identity | None = None,
    ) -> None:
        identity = _identity_of(identity, engine)
        self._rpc = BlockingMasterClient(master, m.REPLIES, identity=identity)
        super().__init__(master, engine, settings, identity)
        self._keeper = LeaseKeeper(self.renew)

    def connect(self, timeout_s: float = 2.0) -> None:
        """Find the master now rather than at the first call.

        Raises:
            Unavailable: it does not answer; at once, if only one address is given and its port is closed.
        """
        self._check_usable()
        self._rpc.connect(timeout_s)

    # Whole objects

    put = _blocking(ClientCalls.put)
    put_batch = _blocking(ClientCalls.put_batch)
    get = _blocking(ClientCalls.get)
    get_batch = _blocking(ClientCalls.get_batch)
    get_into = _blocking(ClientCalls.get_into)
    get_batch_into = _blocking(ClientCalls.get_batch_into)

    # Metadata

    exists = _blocking(ClientCalls.exists)
    remove = _blocking(ClientCalls.remove)
    inspect = _blocking(ClientCalls.inspect)
    remove_matching = _blocking(ClientCalls.remove_matching)
    remove_all = _blocking(ClientCalls.remove_all)
    pin = _blocking(ClientCalls.pin)
    unpin = _blocking(ClientCalls.unpin)
    drop_replicas = _blocking(ClientCalls.drop_replicas)
    verify = _blocking(ClientCalls.verify)

    # Jobs and quotas

    copy = _blocking(ClientCalls.copy)
    move = _blocking(ClientCalls.move)
    drain = _blocking(ClientCalls.drain)
    job = _blocking(ClientCalls.job)
    cancel = _blocking(ClientCalls.cancel)
    set_quota = _blocking(ClientCalls.set_quota)
    quotas = _blocking(ClientCalls.quotas)
    ask = _blocking(ClientCalls.ask)

    # Parts of objects

    start_puts = _blocking(ClientCalls.start_puts)
    write_ranges = _blocking(ClientCalls.write_ranges)
    end_puts = _blocking(ClientCalls.end_puts)
    abort_puts = _blocking(ClientCalls.abort_puts)
    open_reads = _blocking(ClientCalls.open_reads)
    report_corrupt = _blocking(ClientCalls.report_corrupt)
    read_ranges = _blocking(ClientCalls.read_ranges)

    # For views

    open_view = _blocking(ClientCalls.open_view)
    renew = _blocking(ClientCalls.renew)

    def view(self, key: ObjectKey, verify: bool | None = None) -> ObjectView:
        """``with store.view(key) as data:`` yields a read-only memoryview, or None for a miss.

        On the host of the object's node nothing is copied, and the lease is renewed while the view is
        open; elsewhere the object is fetched. ``verify=False`` skips the checksums, which makes the time
        independent of the size; the default is ``StoreSettings.verify_local``.

        Raises (when the block ends):
            Unavailable: the lease could not be renewed; the data read may be wrong.
        """
        return ObjectView(self, key, self.settings.verify_local if verify is None else verify)

    def close(self) -> None:
        """Release all resources. Calls in progress fail with Unavailable, and so do later ones."""
        if self._is_inherited:
            return  # everything belongs to the parent
        self._is_closed = True
        self._keeper.close()
        self._rpc.close()
        self._close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def keep(self, grant: ReadGrant) -> None:
        self._keeper.add(grant)

    def let_go(self, grant: ReadGrant) -> None:
        self._keeper.remove(grant)

    # The trampoline

    def _run(self, call: Call[ResultT]) -> ResultT:
        try:
            self._check_usable()
            effect = next(call)
            while True:
                try:
                    outcome = self._perform(effect)
                except BaseException as error:
                    effect = call.throw(error)  # which unregisters memory, and aborts puts
                else:
                    effect = call.send(outcome)
        except StopIteration as stop:
            result: ResultT = stop.value
            return result
        finally:
            call.close()

    def _perform(self, effect: CallEffect) -> Any:
        if isinstance(effect, CallMaster):
            asked_at = clock.monotonic()
            try:
                if asked_at >= effect.deadline:
                    if effect.may_be_late:
                        self._rpc.post(effect.message, LATE_SEND_S)
                    return _unanswered_late(effect, asked_at)
                reply = self._rpc.call(effect.message, max(0.0, effect.deadline - asked_at))
            except MooncakeError as error:
                return self._unanswered(error, asked_at)
            return MasterReply(reply, None, asked_at, clock.monotonic())
        if isinstance(effect, MoveSlices):
            moved = self._move(effect)
            again = _cancelled(effect, moved)
            return moved if again is None else _with_repeated(moved, self._move(again))
        if isinstance(effect, OpenSegment):
            return self._open(effect)
        if isinstance(effect, ReadLocal | WriteLocal):
            return self._copy(effect)
        if isinstance(effect, RunFunction):
            return effect.function()
        if isinstance(effect, RunConcurrently):
            with ThreadPoolExecutor(len(effect.operations), "store-put") as threads:
                # Each is run, as in the asyncio client: ``map`` drops those not begun when one fails.
                running = [threads.submit(self._run, operation) for operation in effect.operations]
            return [one.result() for one in running]
        time.sleep(effect.seconds_from(clock.monotonic()))
        return None

    def _move(self, effect: MoveSlices) -> list[SlicesMoved]:
        op = Op.WRITE if effect.is_write else Op.READ
        timeout_s = effect.deadline - clock.monotonic()
        if timeout_s <= 0:
            return _too_late(effect)
        if len(effect.transfers) == 1:
            t = effect.transfers[0]
            timeout_s = _of_slices(timeout_s, t)
            if isinstance(t, OneSlice):
                local, remote = t.local_address, t.remote_address
                moved = self.engine.run_slice(
                    op, t.handle, local, remote, t.length, timeout_s=timeout_s, checksum=t.is_checked
                )
                return [self._moved_one(t, moved)]
            done = self.engine.run(
                op, t.handle, t.local, t.remote, t.lengths, timeout_s=timeout_s, checksum=t.is_checked
            )
            return [self._moved(t, done)]
        return self._move_at_once(op, effect.transfers, timeout_s)

    def _move_at_once(
        self, op: Op, transfers: Sequence[Slices | OneSlice], timeout_s: float
    ) -> list[SlicesMoved]:
        """Make several transfers and wait until all of them have ended, each by its own deadline.

        Their memory is in use until then, also when one of them is invalid or an interrupt (Ctrl-C) comes.
        """
        queue = self.engine.new_queue()

        def begin(token: int, t: Slices | OneSlice) -> None:
            columns, seconds = (t.local, t.remote, t.lengths), _of_slices(timeout_s, t)
            self.engine.submit(queue, token, op, t.handle, *columns, checksum=t.is_checked, timeout_s=seconds)

        def cancel() -> None:
            for t in transfers:
                self.engine.cancel(t.handle)

        begins = [functools.partial(begin, token, t) for token, t in enumerate(transfers)]
        ended = {done.token: done for done in queue.run_all(begins, timeout_s, cancel)}
        return [self._moved(t, ended[token]) for token, t in enumerate(transfers)]


class AsyncStore(_StoreBase):
    """Asyncio client of the store, with the same calls as ``Store``."""

    def __init__(
        self,
        master: str = DEFAULT_MASTER,
        engine: TransferEngine | None = None,
        settings: StoreSettings = _DEFAULT_SETTINGS,
        identity: Identity | None = None,
    ) -> None:
        identity = _identity_of(identity, engine)
        self._rpc = AsyncMasterClient(master, m.REPLIES, identity=identity)
        super().__init__(master, engine, settings, identity)

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection to the master. A call without one makes one."""
        return not self._rpc.lost.is_set()

    async def connect(self, timeout_s: float = 2.0) -> None:
        """As ``Store.connect``, but wait for a master that is not running yet."""
        self._check_usable()
        await self._rpc.connect(timeout_s)

    # Whole objects

    put = _awaited(ClientCalls.put)
    put_batch = _awaited(ClientCalls.put_batch)
    get = _awaited(ClientCalls.get)
    get_batch = _awaited(ClientCalls.get_batch)
    get_into = _awaited(ClientCalls.get_into)
    get_batch_into = _awaited(ClientCalls.get_batch_into)

    # Metadata

    exists = _awaited(ClientCalls.exists)
    remove = _awaited(ClientCalls.remove)
    inspect = _awaited(ClientCalls.inspect)
    remove_matching = _awaited(ClientCalls.remove_matching)
    remove_all = _awaited(ClientCalls.remove_all)
    pin = _awaited(ClientCalls.pin)
    unpin = _awaited(ClientCalls.unpin)
    drop_replicas = _awaited(ClientCalls.drop_replicas)
    verify = _awaited(ClientCalls.verify)

    # Jobs and quotas

    copy = _awaited(ClientCalls.copy)
    move = _awaited(ClientCalls.move)
    drain = _awaited(ClientCalls.drain)
    job = _awaited(ClientCalls.job)
    cancel = _awaited(ClientCalls.cancel)
    set_quota = _awaited(ClientCalls.set_quota)
    quotas = _awaited(ClientCalls.quotas)
    ask = _awaited(ClientCalls.ask)

    # Parts of objects

    start_puts = _awaited(ClientCalls.start_puts)
    write_ranges = _awaited(ClientCalls.write_ranges)
    end_puts = _awaited(ClientCalls.end_puts)
    abort_puts = _awaited(ClientCalls.abort_puts)
    open_reads = _awaited(ClientCalls.open_reads)
    report_corrupt = _awaited(ClientCalls.report_corrupt)
    read_ranges = _awaited(ClientCalls.read_ranges)

    # For views

    open_view = _awaited(ClientCalls.open_view)
    renew = _awaited(ClientCalls.renew)

    def view(self, key: ObjectKey, verify: bool | None = None) -> AsyncObjectView:
        """``async with store.view(key) as data:``, else as ``Store.view``."""
        return AsyncObjectView(self, key, self.settings.verify_local if verify is None else verify)

    async def close(self) -> None:
        """As ``Store.close``."""
        if self._is_inherited:
            return
        self._is_closed = True
        await self._rpc.close()
        self._close()

    async def __aenter__(self) -> AsyncStore:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _run(self, call: Call[ResultT]) -> ResultT:
        try:
            self._check_usable()
            effect = next(call)
            while True:
                try:
                    outcome = await self._perform(effect)
                except BaseException as error:
                    effect = call.throw(error)  # as in the blocking client
                else:
                    effect = call.send(outcome)
        except StopIteration as stop:
            result: ResultT = stop.value
            return result
        finally:
            call.close()

    async def _perform(self, effect: CallEffect) -> Any:
        if isinstance(effect, CallMaster):
            asked_at = clock.monotonic()
            try:
                if asked_at >= effect.deadline:
                    if effect.may_be_late:
                        self._rpc.post(effect.message)
                    return _unanswered_late(effect, asked_at)
                reply = await self._rpc.call(effect.message, max(0.0, effect.deadline - asked_at))
            except MooncakeError as error:
                return self._unanswered(error, asked_at)
            return MasterReply(reply, None, asked_at, clock.monotonic())
        if isinstance(effect, MoveSlices):
            moved = await self._move(effect)
            again = _cancelled(effect, moved)
            return moved if again is None else _with_repeated(moved, await self._move(again))
        if isinstance(effect, OpenSegment):
            return await asyncio.to_thread(self._open, effect)
        if isinstance(effect, ReadLocal | WriteLocal):
            return self._copy(effect)
        if isinstance(effect, RunFunction):
            return await asyncio.to_thread(effect.function)
        if isinstance(effect, RunConcurrently):
            return await _all(map(self._run, effect.operations))
        await asyncio.sleep(effect.seconds_from(clock.monotonic()))
        return None

    async def _move(self, effect: MoveSlices) -> list[SlicesMoved]:
        op = Op.WRITE if effect.is_write else Op.READ
        return await _all(self._transfer(op, t, effect.deadline) for t in effect.transfers)

    async def _transfer(self, op: Op, t: Slices | OneSlice, deadline: float) -> SlicesMoved:
        now = clock.monotonic()
        if now >= deadline:
            return SlicesMoved(None, "timed_out", now)
        timeout_s = _of_slices(deadline - now, t)
        completion = await self.engine.transfer(
            op, t.handle, t.local, t.remote, t.lengths, timeout_s=timeout_s, checksum=t.is_checked
        )
        return self._moved(t, completion)


def _of_slices(timeout_s: float, t: Slices | OneSlice) -> float:
    return timeout_s / 2 if t.has_others else timeout_s


def _cancelled(effect: MoveSlices, moved: Sequence[SlicesMoved]) -> MoveSlices | None:
    """Those transfers of ``effect`` that were cancelled, to be made once more; None: there are none.

    Either their peer was given up by another thread, and they fail again, as unreachable; or a thread has
    unregistered their local memory, which is no fault of the peer: it may be registered for them as well, and
    else the second attempt raises InvalidArgument.
    """
    if all(one.reason != CANCELLED for one in moved):
        return None
    transfers = [t for t, one in zip(effect.transfers, moved, strict=True) if one.reason == CANCELLED]
    return MoveSlices(effect.is_write, transfers, effect.deadline)


def _with_repeated(moved: Sequence[SlicesMoved], repeated: Sequence[SlicesMoved]) -> list[SlicesMoved]:
    again = iter(repeated)
    return [next(again) if one.reason == CANCELLED else one for one in moved]


def _unanswered_late(effect: CallMaster, now: float) -> MasterReply:
    """What becomes of a message whose deadline has passed: it is not sent, or its answer not awaited."""
    what = "its answer is not awaited" if effect.may_be_late else "it was not sent"
    error = DeadlineExceeded(f"{type(effect.message).__name__}: the deadline has passed, and {what}")
    return MasterReply(None, error, now, now)


async def _all(work: Iterable[Coroutine[Any, Any, ResultT]]) -> list[ResultT]:
    """Results of all coroutines, run concurrently. Raises the first exception when all of them have ended."""
    # Wait for each, even when one fails or this task is cancelled: until then the memory is in use.
    done = await asyncio.gather(*work, return_exceptions=True)
    results: list[ResultT] = []
    for outcome in done:
        if isinstance(outcome, BaseException):
            raise outcome
        results.append(outcome)
    return results


def _too_late(effect: MoveSlices) -> list[SlicesMoved]:
    now = clock.monotonic()
    return [SlicesMoved(None, "timed_out", now) for _ in effect.transfers]


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


def _renewal_s(grant: ReadGrant) -> float:
    """Seconds until the next renewal: a third of the time left, so that two failures are survived."""
    return max(MIN_RENEWAL_S, (grant.expires_at - clock.monotonic()) / 3)


def _check_lease(grant: ReadGrant) -> None:
    if clock.monotonic() >= grant.expires_at:
        raise Unavailable(f"the lease on {grant.key!r} ended while it was viewed; discard what was read")


class ObjectView:
    """``with store.view(key) as data``: a read-only memoryview, or None for a miss."""

    def __init__(self, store: Store, key: ObjectKey, verify: bool) -> None:
        self._store = store
        self._key = key
        self._verify = verify
        self._grant: ReadGrant | None = None
        self._view: memoryview | None = None

    def __enter__(self) -> memoryview | None:
        self._view, self._grant = self._store.open_view(self._key, self._verify)
        if self._grant is not None:
            self._store.keep(self._grant)
        return self._view

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # First: the release raises BufferError while something still uses the bytes.
        if self._grant is not None:
            self._store.let_go(self._grant)
        if self._view is not None:
            self._view.release()
        if self._grant is not None and kind is None:
            _check_lease(self._grant)


class AsyncObjectView:
    """``async with store.view(key) as data``: as ``ObjectView``."""

    def __init__(self, store: AsyncStore, key: ObjectKey, verify: bool) -> None:
        self._store = store
        self._key = key
        self._verify = verify
        self._grant: ReadGrant | None = None
        self._view: memoryview | None = None
        self._renewing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> memoryview | None:
        self._view, self._grant = await self._store.open_view(self._key, self._verify)
        if self._grant is not None:
            self._renewing = asyncio.create_task(self._renew(self._grant))
        return self._view

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._renewing is not None:
            self._renewing.cancel()  # first, as in ``ObjectView``
        if self._view is not None:
            self._view.release()
        if self._grant is not None and kind is None:
            _check_lease(self._grant)

    async def _renew(self, grant: ReadGrant) -> None:
        while clock.monotonic() < grant.expires_at:
            wait_s = _renewal_s(grant)
            await asyncio.sleep(wait_s)
            with contextlib.suppress(MooncakeError):
                await self._store.renew([grant], wait_s)


class LeaseKeeper:
    """Renews the leases of open views from one thread, which ends when no view is open.

    A lease that has ended is renewed no more: the end of its view raises, whether or not the master is back.
    A get session whose lease has ended in an outage has none until its next read, which opens another: until
    then its object may be evicted.
    """

    def __init__(self, renew: Callable[[list[ReadGrant], float], object]) -> None:
        self._renew = renew
        self._changed = threading.Condition()
        self._grants: dict[int, ReadGrant] = {}
        self._thread: threading.Thread | None = None
        self._wakes_at = 0.0
        """Time of the thread's next renewal."""

    def add(self, grant: ReadGrant) -> None:
        with self._changed:
            self._grants[id(grant)] = grant
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="store-leases", daemon=True)
                self._thread.start()
            elif self._wakes_at > clock.monotonic() + _renewal_s(grant):
                # Only then: waking the thread for every short view would cost more than the view.
                self._changed.notify()

    def remove(self, grant: ReadGrant) -> None:
        with self._changed:
            self._grants.pop(id(grant), None)

    def close(self) -> None:
        with self._changed:
            self._grants.clear()
            self._changed.notify()

    def _run(self) -> None:
        is_cut_off = False
        while True:
            with self._changed:
                if not self._lasting():
                    self._thread = None
                    return
                wait_s = min(map(_renewal_s, self._grants.values()))
                self._wakes_at = clock.monotonic() + wait_s
                self._changed.wait(wait_s)
                grants = self._lasting()
            try:
                if grants:
                    self._renew(grants, wait_s)
                    is_cut_off = False
            except MooncakeError as error:
                if not is_cut_off:
                    log.warning("lease_not_renewed", num_views=len(grants), reason=str(error))
                is_cut_off = True

    def _lasting(self) -> list[ReadGrant]:
        """The grants whose leases have not ended; the others are dropped."""
        now = clock.monotonic()
        self._grants = {key: grant for key, grant in self._grants.items() if grant.expires_at > now}
        return list(self._grants.values())

# SPDX-License-Identifier: Apache-2.0
"""Queues of submitted batches: completions of parts go in, completions of batches come out.

Most batches are one part on one path and pass straight through. When a path fails, the retry is made
here, by the thread that drains the queue; the queue has no thread of its own. On an event loop the queue's
eventfd wakes the loop, which hands each completion to the future that waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import select
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from prometheus_client import Counter

from mooncake.errors import InvalidArgument
from mooncake.log import get_logger
from mooncake.metrics import registry
from mooncake.transfer.batch import (
    Batch,
    Carry,
    Finish,
    Indices,
    PartDone,
    StartBatch,
    TransferColumns,
)
from mooncake.transfer.descriptor import Column
from mooncake.transfer.transports import (
    SCHEMES,
    Completion,
    NativeQueue,
    Op,
    PeerConnection,
    Status,
    crc32c_combine,
)

log = get_logger(__name__)

_MOVED = Counter("mooncake_transfer_moved_bytes", "Bytes moved.", ["path", "op"], registry=registry)
_FAILED = Counter(
    "mooncake_transfer_failed_parts", "Parts of batches that failed.", ["path", "status"], registry=registry
)
_moved = {(path, op): _MOVED.labels(path, op.name.lower()) for path in SCHEMES for op in Op}


def count_part(path: str, op: Op, status: Status, num_bytes: int) -> None:
    """Count a part by its status. Rails are counted by their local device, of which there are few."""
    if status != Status.OK:
        _FAILED.labels(path.partition(">")[0], status.name.lower()).inc()
        return
    counter = _moved.get((path, op))
    if counter is None:
        counter = _moved[path, op] = _MOVED.labels(path.partition(">")[0], op.name.lower())
    counter.inc(num_bytes)


STALE_DESCRIPTOR_STATUSES = frozenset({Status.PEER_LOST, Status.ACCESS_DENIED})
"""Statuses that may result from an outdated descriptor, among other causes."""

MAX_OVERTIME_S = 1.0
"""How long the end of batches whose caller was interrupted is waited for after their time is over."""


class TransferTarget(Protocol):
    """What a queue needs from a segment."""

    may_be_stale: bool

    def connection(self, path: str, timeout_s: float) -> PeerConnection | None:
        """The connection over ``path``, or None when there is none."""
        ...


@dataclass(slots=True)
class BatchTransfer:
    """A batch and everything needed to carry its parts."""

    token: int
    op: Op
    segment: TransferTarget
    columns: TransferColumns
    batch: Batch
    checksum: bool
    priority: int = 0
    "Among batches to one peer, the one with the greater priority goes first."
    progress: Callable[[int], None] | None = None
    "Called with the number of bytes moved, by the thread that drains the queue."
    moved: dict[int, int] = field(default_factory=dict)
    "Bytes per part that is under way or has succeeded; kept only for ``progress``."
    lock: threading.Lock = field(default_factory=threading.Lock)
    "Protects the state that batches to one peer share: the measurements of its rails."

    def handle(self, event: StartBatch | PartDone) -> list[Carry | Finish]:
        """Let the batch decide, and log its path events."""
        with self.lock:
            effects = self.batch.handle(event, time.monotonic())
            path_events = self.batch.take_path_events()
        for name, path, reason in path_events:
            log.info(name, path=path, reason=reason)
        return effects


class CompletionQueue:
    """Completions of submitted batches, in the order in which they end. Thread-safe."""

    def __init__(self) -> None:
        self._native = NativeQueue()
        self._numbers = itertools.count()
        self._parts: dict[int, tuple[BatchTransfer, Carry] | Completion] = {}
        self._lock = threading.RLock()

    def fileno(self) -> int:
        """File descriptor that is readable while there is something to drain. Do not read from it."""
        return self._native.fileno()

    def __len__(self) -> int:
        """Parts under way or not drained yet."""
        return len(self._parts)

    def drain(self, max_items: int = 256, timeout_s: float = 0.0) -> list[Completion]:
        """Return up to ``max_items`` completions, after waiting up to ``timeout_s`` for an event.

        The event may be that a path failed and the batch goes on over the next one; then the list
        is empty although time is left.
        """
        done = self._native.drain(max_items, timeout_s)
        finished: list[Completion] = []
        for part in done:
            if part.is_partial:
                self._report(part)
                continue
            with self._lock:
                waiting = self._parts.pop(part.token)
                if isinstance(waiting, Completion):
                    finished.append(waiting)
                    continue
                move, carry = waiting
                count_part(carry.path, move.op, part.status, part.num_bytes)
                move.moved[carry.part] = part.num_bytes
                event = part_done(carry, part)
                ends = self._follow(move, event)
                finished += ends
            is_step = move.batch.is_sprayed and part.status == Status.OK and not ends
            if move.progress is not None and is_step:  # the completion itself reports the end
                move.progress(sum(move.moved.values()))
        return finished

    def run_all(
        self, begins: Sequence[Callable[[], None]], timeout_s: float, cancel: Callable[[], None]
    ) -> list[Completion]:
        """Call each of ``begins``, which start batches here that end within ``timeout_s``, and wait for all.

        What is raised meanwhile, by one of them or by the handler of a signal (Ctrl-C), is raised after the
        end of those that have begun, because their memory is in use until then. Such a handler runs between
        any two steps of this class, which may then expect a part that was never handed over, or whose
        completion is lost. ``cancel`` ends what may be under way when the time is over.
        """
        finished: list[Completion] = []
        failure: BaseException | None = None
        until = time.monotonic() + timeout_s + MAX_OVERTIME_S
        readable = select.poll()
        readable.register(self.fileno(), select.POLLIN)
        while True:
            try:
                if failure is None:
                    for begin in begins:
                        begin()
                while len(self) and (failure is None or time.monotonic() < until):
                    readable.poll(1000)  # an exception that is raised here loses no completion
                    finished += self.drain()
                if len(self):
                    cancel()
                break
            except BaseException as error:
                failure = error
        if failure is not None:
            raise failure
        return finished

    def _report(self, part: Completion) -> None:
        with self._lock:
            waiting = self._parts.get(part.token)
            if waiting is None or isinstance(waiting, Completion):
                return
            move, carry = waiting
            move.moved[carry.part] = part.num_bytes
            num_bytes = sum(move.moved.values())
        if move.progress is not None:
            move.progress(num_bytes)

    def start(self, move: BatchTransfer) -> None:
        """Begin a batch.

        Raises:
            InvalidArgument: local memory of a slice is not registered, and nothing was started.
        """
        with self._lock:
            for completion in self._follow(move, StartBatch()):
                if completion.status == Status.UNREGISTERED:
                    raise unregistered_error(move.op, move.columns, completion.failed_slice)
                number = next(self._numbers)  # ended before it began: returned by drain like any other
                self._parts[number] = completion
                self._native.push(Completion(number))

    def _follow(self, move: BatchTransfer, event: StartBatch | PartDone) -> list[Completion]:
        finished: list[Completion] = []
        effects = move.handle(event)
        while effects:
            effect = effects.pop(0)
            if isinstance(effect, Finish):
                finished.append(completion_of(move.token, effect, move.columns))
                if effect.status in STALE_DESCRIPTOR_STATUSES:
                    move.segment.may_be_stale = True
            else:
                failed = self._carry(move, effect)
                if failed is not None:
                    effects += move.handle(failed)
        return finished

    def _carry(self, move: BatchTransfer, carry: Carry) -> PartDone | None:
        """Hand a part to its path; return an event when that fails at once."""
        left_s = max(0.0, carry.deadline - time.monotonic())
        connection = move.segment.connection(carry.path, left_s)
        if connection is None:
            return PartDone(carry.part, no_connection_status(carry.deadline))
        left_s = max(0.0, carry.deadline - time.monotonic())
        number = next(self._numbers)
        self._parts[number] = (move, carry)
        rows = move.columns.rows(carry)
        failed = connection.submit(
            self._native,
            number,
            move.op,
            *rows,
            left_s,
            move.checksum,
            priority=move.priority,
            reports=move.progress is not None,
        )
        if failed < 0:
            return None
        del self._parts[number]
        return PartDone(carry.part, Status.UNREGISTERED, failed)


def run_parts_in_turn(move: BatchTransfer) -> Completion:
    """Carry a batch in the calling thread, one part after the other."""
    effects = move.handle(StartBatch())
    while True:
        effect = effects.pop(0)
        if isinstance(effect, Finish):
            return completion_of(move.token, effect, move.columns)
        left_s = max(0.0, effect.deadline - time.monotonic())
        connection = move.segment.connection(effect.path, left_s)
        if connection is None:
            event = PartDone(effect.part, no_connection_status(effect.deadline))
        else:
            left_s = max(0.0, effect.deadline - time.monotonic())
            part = connection.run(move.op, *move.columns.rows(effect), left_s, move.checksum)
            count_part(effect.path, move.op, part.status, part.num_bytes)
            event = part_done(effect, part)
        effects += move.handle(event)


def run_parts_at_once(move: BatchTransfer, timeout_s: float, cancel: Callable[[], None]) -> Completion:
    """Carry a batch whose parts are under way at the same time, and wait for its end (``run_all``)."""
    queue = CompletionQueue()
    return queue.run_all([lambda: queue.start(move)], timeout_s, cancel)[0]


def no_connection_status(deadline: float) -> Status:
    """Status when a path has no connection: connecting took all the time, or is impossible."""
    return Status.TIMED_OUT if time.monotonic() >= deadline else Status.PEER_LOST


def part_done(carry: Carry, part: Completion) -> PartDone:
    return PartDone(carry.part, part.status, part.failed_slice, part.num_bytes, part.checksums, part.reason)


def completion_of(token: int, end: Finish, columns: TransferColumns) -> Completion:
    """The result of a batch, in rows of the caller's columns."""
    sums = [] if end.checksums is None else end.checksums.tolist()
    failed = end.failed_slice
    if columns.origin is not None and columns.whole is not None:
        failed = int(columns.origin[failed]) if failed >= 0 else failed
        sums = _joined(sums, columns.origin, columns.lengths, len(columns.whole.lengths)) if sums else []
    return Completion(token, Status(end.status), failed, end.num_bytes, sums, reason=end.reason)


def _joined(sums: list[int], origin: Indices, lengths: Column, num_rows: int) -> list[int]:
    joined = [0] * num_rows
    for row, checksum, length in zip(origin.tolist(), sums, lengths.tolist(), strict=True):
        joined[row] = crc32c_combine(joined[row], checksum, length)
    return joined


def unregistered_error(op: Op, columns: TransferColumns, row: int) -> InvalidArgument:
    rows = columns.whole or columns
    where = f"[{int(rows.local[row]):#x}, +{int(rows.lengths[row])})"
    need = "registered memory" if op == Op.WRITE else "registered, writable memory"
    return InvalidArgument(f"local[{row}]", where, f"{need}; call register() first")


class AsyncCompletionQueue:
    """Completions of one event loop's transfers, handed to the futures that wait for them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._queue = CompletionQueue()
        self._loop_ref = weakref.ref(loop)
        self._futures: dict[int, asyncio.Future[Completion]] = {}
        self._tokens = itertools.count()
        self._is_watched = False
        self._is_closing = False

    def close_soon(self) -> None:
        """Take the queue from its loop when the last transfer has ended. From any thread.

        The loop's reader holds the queue and its descriptor, which would stay for as long as the loop.
        """
        loop = self._loop_ref()
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and its readers with it
                loop.call_soon_threadsafe(self._close)

    def _close(self) -> None:
        self._is_closing = True
        self._leave()

    def _leave(self) -> None:
        loop = self._loop_ref()
        if self._is_closing and self._is_watched and not self._futures and loop is not None:
            loop.remove_reader(self._queue.fileno())
            self._is_watched = False

    def expect(self) -> tuple[int, asyncio.Future[Completion]]:
        token = next(self._tokens)
        loop = self._loop_ref()
        assert loop is not None
        if not self._is_watched:
            loop.add_reader(self._queue.fileno(), self._arrive)
            self._is_watched = True
        future: asyncio.Future[Completion] = loop.create_future()
        self._futures[token] = future
        return token, future

    def forget(self, token: int) -> None:
        del self._futures[token]
        self._leave()

    def start(self, move: BatchTransfer) -> None:
        self._queue.start(move)

    def _arrive(self) -> None:
        for completion in self._queue.drain():
            future = self._futures.pop(completion.token)
            if not future.done():
                future.set_result(completion)
        self._leave()


ResultT = TypeVar("ResultT")


async def wait_until_done(future: asyncio.Future[ResultT]) -> ResultT:
    """The result; a cancellation, and each that follows it, is delivered only when the future is done."""
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        while not future.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([future])
        raise

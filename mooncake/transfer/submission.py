# SPDX-License-Identifier: Apache-2.0
"""How the engine moves batches: four ways, one meaning.

``run`` blocks the caller and is fastest, ``submit`` reports through a queue, ``transfer`` is for coroutines,
and ``write`` and ``read`` also take names, arrays and notifications, and raise an error that names its cause.
They move bytes and wait in native code,
without the interpreter lock; ``batch.Batch`` decides which path carries what and handles failures.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from mooncake.errors import (
    AccessDenied,
    DeadlineExceeded,
    InvalidArgument,
    PeerLost,
    ProtocolError,
    StorageError,
    Unavailable,
)
from mooncake.transfer.batch import (
    RETRIED_STATUSES,
    Addresses,
    Batch,
    TransferColumns,
    checked_column,
    piece_bytes_of,
    transfer_columns,
)
from mooncake.transfer.completion_queue import (
    STALE_DESCRIPTOR_STATUSES,
    AsyncCompletionQueue,
    BatchTransfer,
    CompletionQueue,
    count_part,
    no_connection_status,
    run_parts_at_once,
    run_parts_in_turn,
    unregistered_error,
    wait_until_done,
)
from mooncake.transfer.descriptor import scheme_of
from mooncake.transfer.memory import device_span_of, span_of
from mooncake.transfer.peers import PeerTable, RemoteSegment
from mooncake.transfer.settings import TransferSettings
from mooncake.transfer.topology import Matrix, Places, ranks
from mooncake.transfer.transports import Completion, Op, Region, Status

Memory = Any
"""A region, an array, a contiguous tensor, a buffer, or ``(address, size_bytes)``."""

Progress = Callable[[int, int], None]
"""Callback with (bytes moved, bytes in all)."""


@dataclass(frozen=True, slots=True)
class TransferOptions:
    """How a move is to be made."""

    priority: int = 0
    timeout_s: float = 30.0
    checksum: bool = False
    notify: tuple[str, bytes | str] | None = None
    progress: Progress | None = None


class TransferMethods(ABC):
    """Methods of ``TransferEngine`` that move bytes."""

    def __init__(self, settings: TransferSettings, peers: PeerTable, matrix: Matrix) -> None:
        self.settings = settings
        self._peers = peers
        self._matrix = matrix
        self._places = Places()
        self._loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncCompletionQueue] = (
            weakref.WeakKeyDictionary()
        )

    @abstractmethod
    def open_name(self, name: str) -> RemoteSegment | None: ...

    @abstractmethod
    def refresh(self, segment: RemoteSegment, timeout_s: float = 5.0) -> bool: ...

    @abstractmethod
    def notify(
        self, segment: RemoteSegment, name: str, message: bytes | str = b"", timeout_s: float = 5.0
    ) -> None: ...

    def run(
        self,
        op: Op,
        segment: RemoteSegment,
        local: Addresses,
        remote: Addresses,
        lengths: Addresses,
        *,
        timeout_s: float = 30.0,
        checksum: bool = False,
    ) -> Completion:
        """Move slices and wait for the end. Other Python threads run meanwhile.

        Row i moves ``lengths[i]`` bytes between address ``local[i]`` here and ``remote[i]`` in the
        peer. All bytes were moved if ``status`` is OK; after any other status the destination's bytes are
        undefined. A write over tcp that has failed may still land until the next operation over tcp to that
        process begins; operations over other paths (shm, file, cuda, rdma) do not wait for that. With
        ``checksum`` the completion has the CRC32C of each slice.

        Raises:
            InvalidArgument: columns that do not fit together, or local memory not registered.
        """
        columns = transfer_columns(local, remote, lengths)
        deadline = time.monotonic() + timeout_s
        done = self._run(op, segment, columns, deadline, timeout_s, checksum)
        if done.status in STALE_DESCRIPTOR_STATUSES:
            segment.may_be_stale = True
            if self.refresh(segment, max(0.0, deadline - time.monotonic())):
                left_s = max(0.0, deadline - time.monotonic())
                done = self._run(op, segment, columns, deadline, left_s, checksum)
        return done

    def run_slice(
        self,
        op: Op,
        segment: RemoteSegment,
        local: int,
        remote: int,
        length: int,
        *,
        timeout_s: float = 30.0,
        checksum: bool = False,
    ) -> int | Completion:
        """As ``run`` for one slice: its CRC32C, 0 without ``checksum``; or the completion of a failure.

        Without columns, whose making takes longer than moving a few KiB.
        """
        deadline = time.monotonic() + timeout_s
        if segment.is_uniform:
            path = segment.paths[0]
            connection = segment.connection(path, timeout_s)
            if connection is not None:
                done = connection.run_slice(op, local, remote, length, timeout_s, checksum)
                if type(done) is int:
                    count_part(path, op, Status.OK, length)
                    return done
                assert isinstance(done, Completion)
                count_part(path, op, done.status, 0)
                if done.status not in RETRIED_STATUSES | STALE_DESCRIPTOR_STATUSES:
                    return self._checked(op, transfer_columns([local], [remote], [length]), done)
        left_s = max(0.0, deadline - time.monotonic())
        moved = self.run(op, segment, [local], [remote], [length], timeout_s=left_s, checksum=checksum)
        if moved.status != Status.OK:
            return moved
        return 0 if moved.checksums is None else int(moved.checksums[0])

    def _run(
        self,
        op: Op,
        segment: RemoteSegment,
        columns: TransferColumns,
        deadline: float,
        timeout_s: float,
        checksum: bool,
    ) -> Completion:
        paths = segment.paths
        alone = self._alone(segment, columns)
        if alone is not None:
            connection, is_last = segment.connection(paths[alone], timeout_s), alone == len(paths) - 1
            if connection is not None:
                done = connection.run(op, columns.local, columns.remote, columns.lengths, timeout_s, checksum)
                count_part(paths[alone], op, done.status, done.num_bytes)
                if done.status not in RETRIED_STATUSES or is_last:
                    return self._checked(op, columns, done)
            elif is_last:
                return Completion(status=no_connection_status(deadline))
            paths = paths[alone + 1 :]
        elif segment.rails is not None and not self._places:
            num_bytes, least = int(columns.lengths.sum()), self.settings.spray_bytes
            if len(columns.lengths) and (num_bytes < least or not least):
                quick = segment.run_single_part(op, columns, num_bytes, deadline, checksum)
                if quick is not None:
                    count_part(quick[0], op, quick[1].status, quick[1].num_bytes)
                    return self._checked(op, columns, quick[1])
        move = self._move(0, op, segment, columns, paths, deadline, checksum)
        if not move.batch.is_sprayed:
            return self._checked(op, columns, run_parts_in_turn(move))
        left_s = max(0.0, deadline - time.monotonic())
        return self._checked(op, columns, run_parts_at_once(move, left_s, segment.cancel))

    def _alone(self, segment: RemoteSegment, columns: TransferColumns) -> int | None:
        """Index of the path that carries all slices, if those before it carry none: no batch is planned."""
        if segment.is_uniform:
            return 0
        if segment.rails is not None:
            return None
        for at, path in enumerate(segment.paths):
            able = segment.able(path, columns)
            if able is None or able.all():
                return at
            if able.any():
                return None
        return None

    def new_queue(self) -> CompletionQueue:
        """Make a queue for completions of ``submit``."""
        return CompletionQueue()

    def submit(
        self,
        queue: CompletionQueue,
        token: int,
        op: Op,
        segment: RemoteSegment,
        local: Addresses,
        remote: Addresses,
        lengths: Addresses,
        *,
        checksum: bool = False,
        timeout_s: float | None = None,
        priority: int = 0,
    ) -> None:
        """As ``run``, on a native thread; a completion with ``token`` (0 to 2**64 - 1) comes to ``queue``.

        The greater ``priority`` goes first among the batches to one peer: it overtakes those that wait,
        and one that is under way when its current piece (16 MiB) is done.
        The first call connects in the caller's thread, up to ``timeout_s``, unless ``RemoteSegment.connect``
        did before. A failed peer's descriptor is not renewed here, but by ``refresh`` or ``open_name``.

        Raises:
            InvalidArgument: as for ``run``; then no completion comes. Where slices that another path carries
                were started before, the completion's status is UNREGISTERED instead.
        """
        _check_priority(priority)
        columns = transfer_columns(local, remote, lengths)
        deadline = time.monotonic() + (self.settings.submit_timeout_s if timeout_s is None else timeout_s)
        queue.start(self._move(token, op, segment, columns, segment.paths, deadline, checksum, priority))

    async def transfer(
        self,
        op: Op,
        segment: RemoteSegment,
        local: Addresses,
        remote: Addresses,
        lengths: Addresses,
        *,
        timeout_s: float = 30.0,
        checksum: bool = False,
        priority: int = 0,
        progress: Callable[[int], None] | None = None,
    ) -> Completion:
        """Submit from a coroutine. Cancelling it waits for the end: the memory is in use until then.

        ``progress`` is called on the loop with the number of bytes moved, every 16 MiB or so.

        Raises:
            InvalidArgument: as for ``run``.
        """
        _check_priority(priority)
        columns = transfer_columns(local, remote, lengths)
        deadline = time.monotonic() + timeout_s
        done = await self._transfer(op, segment, columns, deadline, checksum, priority, progress)
        if done.status in STALE_DESCRIPTOR_STATUSES and self._peers.can_refresh(segment):
            left_s = max(0.0, deadline - time.monotonic())
            if await asyncio.to_thread(self.refresh, segment, left_s):
                done = await self._transfer(op, segment, columns, deadline, checksum, priority, progress)
        return self._checked(op, columns, done)

    async def _transfer(
        self,
        op: Op,
        segment: RemoteSegment,
        columns: TransferColumns,
        deadline: float,
        checksum: bool,
        priority: int,
        progress: Callable[[int], None] | None,
    ) -> Completion:
        if not segment.is_connected:  # connecting may take long and must not block this loop
            left_s = max(0.0, deadline - time.monotonic())
            if not await asyncio.to_thread(segment.connect, left_s):
                return Completion(status=Status.TIMED_OUT)
        loop = asyncio.get_running_loop()
        queue = self._loops.get(loop)
        if queue is None:
            queue = self._loops[loop] = AsyncCompletionQueue(loop)
        token, future = queue.expect()
        move = self._move(token, op, segment, columns, segment.paths, deadline, checksum, priority)
        if progress is not None:  # the loop handles what it raises

            def report(num_bytes: int, callback: Callable[[int], None] = progress) -> None:
                loop.call_soon(callback, num_bytes)

            move.progress = report
        try:
            queue.start(move)
        except InvalidArgument:
            queue.forget(token)
            raise
        return await wait_until_done(future)

    async def write(
        self,
        segment: RemoteSegment | str,
        local: Addresses | Memory | Sequence[Memory],
        remote: Addresses | int,
        lengths: Addresses | None = None,
        *,
        priority: int = 0,
        timeout_s: float = 30.0,
        checksum: bool = False,
        notify: tuple[str, bytes | str] | None = None,
        progress: Progress | None = None,
    ) -> Completion:
        """Move registered memory of this process into the peer's.

        With ``lengths``, ``local`` and ``remote`` are columns of addresses, as for ``run``. Without,
        ``local`` is memory that knows its own length (an array, a tensor, a buffer, a region, ``(address,
        size)``) and ``remote`` one address, or both are sequences of as many.

        Args:
            segment: the peer, or its name in the metadata service.
            priority: the greater one goes first among the batches to one peer; see ``submit``.
            notify: name and message that the peer's program gets once all bytes are in place.
            progress: called on the loop with (bytes moved, bytes in all), every 16 MiB and at the end.

        Raises:
            InvalidArgument: the rows do not fit together, or local memory is not registered.
            PeerLost, AccessDenied, DeadlineExceeded, ProtocolError, Unavailable: not everything was
                moved; the destination's bytes are undefined. Or all was, and the notification failed.
        """
        options = TransferOptions(priority, timeout_s, checksum, notify, progress)
        return await move(self, Op.WRITE, segment, local, remote, lengths, options)

    async def read(
        self,
        segment: RemoteSegment | str,
        local: Addresses | Memory | Sequence[Memory],
        remote: Addresses | int,
        lengths: Addresses | None = None,
        *,
        priority: int = 0,
        timeout_s: float = 30.0,
        checksum: bool = False,
        notify: tuple[str, bytes | str] | None = None,
        progress: Progress | None = None,
    ) -> Completion:
        """Move the peer's memory into registered memory of this process. Everything else as for ``write``;
        ``notify`` informs the peer that it may reuse its memory."""
        options = TransferOptions(priority, timeout_s, checksum, notify, progress)
        return await move(self, Op.READ, segment, local, remote, lengths, options)

    def cancel(self, segment: RemoteSegment) -> None:
        """Fail what is in flight to a peer; afterwards no local memory is accessed on its behalf."""
        segment.cancel()

    def _move(
        self,
        token: int,
        op: Op,
        segment: RemoteSegment,
        columns: TransferColumns,
        paths: Sequence[str],
        deadline: float,
        checksum: bool,
        priority: int = 0,
    ) -> BatchTransfer:
        able = {path: segment.able(path, columns) for path in paths}
        steps: dict[str, int] | None = None
        no_path = Status.ACCESS_DENIED if paths else Status.PEER_LOST
        rails, piece_bytes = segment.rails, 0
        if rails is not None:
            num_rails = sum(scheme_of(path) == scheme_of(paths[0]) for path in paths)
            num_bytes = int(columns.lengths.sum())
            if (self._places or segment.places) and len(columns.lengths):
                here, there = (
                    self._places.at(int(columns.local[0])),
                    segment.places.at(int(columns.remote[0])),
                )
                steps = ranks(paths, self._matrix, here, segment.descriptor.topology, there)
            least = self.settings.spray_bytes
            if num_rails > 1 and able[paths[0]] is None and 0 < least <= num_bytes:
                piece_bytes = piece_bytes_of(num_bytes, num_rails)
                columns = columns.cut(piece_bytes)
        batch = Batch(
            len(columns.lengths),
            able,
            deadline,
            no_path,
            checksum,
            lengths=columns.lengths,
            rails=rails,
            piece_bytes=piece_bytes,
            ranks=steps,
        )
        return BatchTransfer(token, op, segment, columns, batch, checksum, priority, lock=segment.rails_lock)

    def _checked(self, op: Op, columns: TransferColumns, done: Completion) -> Completion:
        if done.status == Status.UNREGISTERED:
            raise unregistered_error(op, columns, done.failed_slice)
        return done


def _check_priority(priority: int) -> None:
    if not -(1 << 31) <= priority < 1 << 31:
        raise InvalidArgument("priority", priority, "an integer of 32 bits")


class TransferInterface(Protocol):
    """What moving needs of the engine."""

    def open_name(self, name: str) -> RemoteSegment | None: ...

    def notify(self, segment: RemoteSegment, name: str, message: bytes | str, timeout_s: float) -> None: ...

    async def transfer(
        self,
        op: Op,
        segment: RemoteSegment,
        local: Addresses,
        remote: Addresses,
        lengths: Addresses,
        *,
        timeout_s: float,
        checksum: bool,
        priority: int,
        progress: Callable[[int], None] | None,
    ) -> Completion: ...


async def move(
    engine: TransferInterface,
    op: Op,
    peer: RemoteSegment | str,
    local: Addresses | Memory | Sequence[Memory],
    remote: Addresses | int,
    lengths: Addresses | None,
    options: TransferOptions,
) -> Completion:
    """See ``TransferEngine.write``."""
    deadline = time.monotonic() + options.timeout_s
    rows: tuple[Any, Any, Any] = (local, remote, lengths) if lengths is not None else rows_of(local, remote)
    segment = await _segment(engine, peer) if isinstance(peer, str) else peer
    num_bytes = int(checked_column(rows[2]).sum()) if options.progress is not None else 0

    def report(num_moved: int) -> None:
        if options.progress is not None:
            options.progress(num_moved, num_bytes)

    done = await engine.transfer(
        op,
        segment,
        *rows,
        timeout_s=max(0.0, deadline - time.monotonic()),
        checksum=options.checksum,
        priority=options.priority,
        progress=report if options.progress is not None else None,
    )
    if done.status != Status.OK:
        raise completion_error(op, segment, done, options.timeout_s)
    report(num_bytes)
    if options.notify is not None:
        name, message = options.notify
        left_s = max(0.001, deadline - time.monotonic())
        await asyncio.to_thread(engine.notify, segment, name, message, left_s)
    return done


async def _segment(engine: TransferInterface, name: str) -> RemoteSegment:
    segment = await asyncio.to_thread(engine.open_name, name)
    if segment is None:
        raise PeerLost(f"no segment is called {name!r}; is its process running, with the same metadata?")
    return segment


def rows_of(
    local: Memory | Sequence[Memory], remote: Addresses | int
) -> tuple[list[int], list[int], list[int]]:
    """Columns for memory that knows its own length: one piece and one address, or as many of each.

    Raises:
        InvalidArgument: they are not as many, or something is no contiguous memory.
    """
    if isinstance(remote, int | np.integer):
        local, remote = [local], [int(remote)]
    pieces, addresses = list(local), list(remote)
    if len(pieces) != len(addresses):
        raise InvalidArgument(
            "remote", f"{len(addresses)} addresses", f"one for each of {len(pieces)} pieces of local memory"
        )
    spans = [
        (piece.address, piece.size_bytes)
        if isinstance(piece, Region)
        else (device_span_of(piece) or span_of(piece))[:2]
        for piece in pieces
    ]
    return [address for address, _ in spans], addresses, [size for _, size in spans]


def completion_error(op: Op, segment: RemoteSegment, done: Completion, timeout_s: float) -> Exception:
    """What a completion that is not OK means for its caller."""
    where = f" (slice {done.failed_slice})" if done.failed_slice >= 0 else ""
    what = f"{op.name.lower()} {'to' if op == Op.WRITE else 'from'} {segment.name}{where}"
    match done.status:
        case Status.ACCESS_DENIED:
            return AccessDenied(
                f"{what}: the peer has not registered all of that memory, or not for this; "
                "compare addresses and lengths with its descriptor, and open the current one"
            )
        case Status.TIMED_OUT:
            return DeadlineExceeded(
                f"{what}: not done within {timeout_s:g} s; allow more, or see what slows the peer"
            )
        case Status.PROTOCOL_ERROR:
            why = done.reason or "the peer answered nonsense; do both run the same release?"
            return ProtocolError(f"{what}: {why}")
        case Status.UNREGISTERED:
            need = "registered" if op == Op.WRITE else "registered, writable"
            return InvalidArgument("local", what, f"{need} memory of this process; call register() first")
        case Status.CANCELLED:
            return Unavailable(
                f"{what}: cancelled, because the segment, the engine or the local memory was closed"
            )
        case Status.IO_ERROR:
            return StorageError(f"{what}: {done.reason or 'the device refused'}")
        case _:
            why = (
                (segment.reason if segment.is_replaced else done.reason)
                or segment.reason
                or "the peer is gone or cannot be reached; open its current descriptor"
            )
            return PeerLost(f"{what}: {why}")

"""``write`` and ``read``: moving bytes in one awaited sentence, by name, with arrays, and with a reason.

The engine's ``run`` and ``submit`` take columns and answer with a status, for those who count
microseconds. Here a peer may be a name, memory may be arrays and tensors, a notification may follow the
data, and what fails raises what a person can act on.
"""

from __future__ import annotations

import asyncio
import time
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
from mooncake.transfer.columns import Addresses
from mooncake.transfer.memory import device_span_of, span_of
from mooncake.transfer.remote_segment import RemoteSegment
from mooncake.transfer.transports import Completion, Op, Region, Status

Memory = Any
"""A region, an array, a contiguous tensor, a buffer, or ``(address, size_bytes)``."""

Progress = Callable[[int, int], None]
"""Callback with (bytes moved, bytes in all)."""


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


@dataclass(frozen=True, slots=True)
class TransferOptions:
    """How a move is to be made."""

    priority: int = 0
    timeout_s: float = 30.0
    checksum: bool = False
    notify: tuple[str, bytes | str] | None = None
    progress: Progress | None = None


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
    num_bytes = int(np.asarray(rows[2], dtype=np.uint64).sum()) if options.progress is not None else 0

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

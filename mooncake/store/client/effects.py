# SPDX-License-Identifier: Apache-2.0
"""Effects of client operations: what an operation requests of the client that runs it, and the results.

``operations.py`` yields them; ``store.py`` performs them, blocking and on asyncio, and the simulator does on
virtual time.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

import msgspec

from mooncake.errors import MooncakeError
from mooncake.store.client.grants import Checksums, OneSlice
from mooncake.transfer.descriptor import Column

FIRST_PAUSE_S = 0.02
MAX_PAUSE_S = 0.5


class CallMaster(msgspec.Struct, frozen=True, eq=False):
    """Send a message to the master; resumed with a ``MasterReply``.

    When ``deadline`` has already passed, nothing is sent: an abandoned operation must not take effect.
    """

    message: msgspec.Struct
    deadline: float
    may_be_late: bool = False
    """The message only releases or reports something. It is sent even after the deadline, if there is a
    connection; its answer is not awaited then."""


class MasterReply(msgspec.Struct, frozen=True, eq=False):
    """The master's ``reply``, or the ``error`` that prevented it."""

    reply: Any
    error: MooncakeError | None
    asked_at: float
    now: float


class OpenSegment(msgspec.Struct, frozen=True, eq=False):
    """Make a segment reachable; resumed with its transfer handle, or None when it can't be reached."""

    segment: str
    epoch: int
    descriptor: bytes


class Slices(msgspec.Struct, frozen=True, eq=False):
    """Columns of one transfer to or from one segment."""

    handle: Any
    local: Column
    remote: Column
    lengths: Column
    is_checked: bool = True
    """Checksums are required."""
    has_others: bool = False
    """All of it has other replicas: fail after half of the time, so that time is left to read those."""


class MoveSlices(msgspec.Struct, frozen=True, eq=False):
    """Move bytes, all transfers at once; resumed with one ``SlicesMoved`` for each.

    When ``deadline`` has already passed, no transfer may start: a write could then hit space that has been
    given to another object.
    """

    is_write: bool
    transfers: Sequence[Slices | OneSlice]
    deadline: float


class SlicesMoved(msgspec.Struct, frozen=True, eq=False):
    """``checksums``: CRC32C of every slice, or None when the transfer failed, with the ``reason``.

    The array is empty if no checksums were required."""

    checksums: Checksums | None
    reason: str
    now: float


class ReadLocal(msgspec.Struct, frozen=True, eq=False):
    """Copy local memory; resumed with its bytes and their CRC32C, or None if it is not host memory."""

    address: int
    length: int


class WriteLocal(msgspec.Struct, frozen=True, eq=False):
    """Copy bytes to local memory; resumed with their CRC32C, or None if it is not host memory."""

    address: int
    value: bytes


class Pause(msgspec.Struct, frozen=True, eq=False):
    """Wait, at most until ``deadline``; resumed with None."""

    seconds: float
    deadline: float = math.inf

    def seconds_from(self, now: float) -> float:
        """How long to wait from now on."""
        return max(0.0, min(self.seconds, self.deadline - now))


def pauses_within(patience_s: float) -> Iterator[float]:
    """Seconds to pause between attempts, each time twice as long, in total at most ``patience_s``."""
    pause_s = FIRST_PAUSE_S
    while pause_s <= patience_s:
        yield pause_s
        patience_s -= pause_s
        pause_s = min(2 * pause_s, MAX_PAUSE_S)


Effect = CallMaster | OpenSegment | MoveSlices | ReadLocal | WriteLocal | Pause
ResultT = TypeVar("ResultT")
Operation: TypeAlias = Generator[Effect, Any, ResultT]

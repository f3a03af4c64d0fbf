# SPDX-License-Identifier: Apache-2.0
"""Queue of the chunks that this process sends: which request is served next, and with which of its
candidates.

A chunk is sent from a slot of memory, which its reader returns; the number of slots bounds the memory, and a
slot that is not returned in time is taken back. Of a request's candidates the chunk is chosen that was sent
least often, so that a single source spreads one whole copy before it sends any chunk twice. Requests are
served in order, each requester with a bounded number of them, at a bounded rate. Bytes are with the caller.

A reader gives up a request after a time. A request that would wait for long is declined at once, and one that
has waited too long is dropped: otherwise a source with too many readers would send chunks only to readers
that have gone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from mooncake.errors import Refusal
from mooncake.machine import Wake
from mooncake.p2p.token_bucket import TokenBucket

MAX_WAITING_PER_REQUESTER = 8
STORY_LINES = 64


@dataclass(frozen=True, slots=True)
class UploadAsked:
    """``requester`` asks for any one of ``candidates`` of the version ``digest``; all of them are there."""

    request_id: int
    requester: int
    digest: str
    candidates: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SlotReturned:
    """The reader has done with the slot of a lease. ``requester`` must be the one that has the lease.

    ``is_read``: it has the chunk, and its digest is right.
    """

    requester: int
    lease: int
    is_read: bool = False


@dataclass(frozen=True, slots=True)
class SlotFilled:
    """The caller has ended writing into the slot of a lease, whatever came of it."""

    lease: int


@dataclass(frozen=True, slots=True)
class RequesterGone:
    """A requester's connection has ended."""

    requester: int


UploadEvent: TypeAlias = UploadAsked | SlotReturned | SlotFilled | RequesterGone


@dataclass(frozen=True, slots=True)
class SendChunk:
    """Put ``chunk`` into ``slot``, report ``SlotFilled``, and answer the request."""

    request_id: int
    lease: int
    slot: int
    digest: str
    chunk: int


@dataclass(frozen=True, slots=True)
class DeclineUpload:
    """Answer the request with a refusal."""

    request_id: int
    refusal: Refusal


UploadEffect: TypeAlias = SendChunk | DeclineUpload


@dataclass
class SlotLease:
    """A slot that its reader has not returned, or that is still being written to."""

    requester: int
    slot: int
    begun_at: float
    until: float
    digest: str
    chunk: int
    is_filling: bool = True
    is_over: bool = False
    """It was returned while it was written to: the slot is free when that ends."""


@dataclass(frozen=True, slots=True)
class WaitingRequest:
    """A request without a slot; ``size_bytes`` of its largest candidate."""

    asked: UploadAsked
    until: float
    size_bytes: int


class UploadQueue:
    """Core of the sending side.

    Args:
        num_slots: chunks that may be sent at the same time.
        bucket: bound of the sent bytes per second.
        lease_s: time that a reader has for one chunk, and after which it gives up a request.
        max_waiting: requests that may wait in all.
    """

    def __init__(self, num_slots: int, bucket: TokenBucket, lease_s: float, max_waiting: int = 4096) -> None:
        self._bucket = bucket
        self._lease_s = lease_s
        self._max_waiting = max_waiting
        self._num_slots = num_slots
        self._free = list(range(num_slots))
        self._max_leases = max(2, num_slots // 4)
        """Leases that one requester may have: the rest stays for others if it returns nothing."""
        self._waiting: deque[WaitingRequest] = deque()
        self._waiting_bytes = 0
        self._num_waiting: dict[int, int] = {}
        self._num_leases: dict[int, int] = {}
        self._usual_s = 0.0
        """Moving average of the time for which a reader keeps a slot."""
        self._leases: dict[int, SlotLease] = {}
        self._next_lease = 1
        self._sent: dict[str, NDArray[np.int32]] = {}
        self._read: dict[str, NDArray[np.int32]] = {}
        """Per version and chunk: how often a slot with it was returned."""
        self._sizes: dict[str, NDArray[np.int64]] = {}
        self._lines: deque[str] = deque(maxlen=STORY_LINES)
        self._now = 0.0

    def add(self, digest: str, chunk_sizes: Sequence[int]) -> None:
        """Begin to send chunks of a version."""
        self._sizes.setdefault(digest, np.asarray(chunk_sizes, dtype=np.int64))
        self._sent.setdefault(digest, np.zeros(len(chunk_sizes), dtype=np.int32))
        self._read.setdefault(digest, np.zeros(len(chunk_sizes), dtype=np.int32))

    def remove(self, digest: str) -> list[UploadEffect]:
        """Stop sending chunks of a version."""
        self._sizes.pop(digest, None)
        self._sent.pop(digest, None)
        self._read.pop(digest, None)
        refusal = Refusal("dropped", "this peer has just dropped that version; ask another peer")
        gone = [one for one in self._waiting if one.asked.digest == digest]
        for one in gone:
            self._remove(one)
        return [DeclineUpload(one.asked.request_id, refusal) for one in gone]

    def num_sent(self, digest: str) -> list[int]:
        """How often each chunk was sent."""
        found = self._sent.get(digest)
        return [] if found is None else [int(number) for number in found]

    def num_copies(self, digest: str) -> int:
        """Whole copies that readers have read: from 1 on, they can go on without this process."""
        found = self._read.get(digest)
        return 0 if found is None or not len(found) else int(found.min())

    def handle(self, event: UploadEvent | Wake, now: float) -> list[UploadEffect]:
        """Handle one event; see the events above."""
        self._now = now
        effects: list[UploadEffect] = []
        while self._waiting and self._waiting[0].until <= now:
            late = self._waiting[0]
            self._remove(late)
            refusal = Refusal("busy", "this peer had no slot in time; ask another peer")
            effects.append(DeclineUpload(late.asked.request_id, refusal))
        match event:
            case UploadAsked():
                self._ask(event, effects)
            case SlotReturned(requester, lease, is_read):
                found = self._leases.get(lease)
                if found is not None and found.requester == requester and not found.is_over:
                    if is_read and not found.is_filling and found.digest in self._read:
                        self._read[found.digest][found.chunk] += 1
                    self._take_back(lease)
            case SlotFilled(lease):
                found = self._leases.get(lease)
                if found is not None:
                    found.is_filling = False
                    found.until = now + self._lease_s
                    if found.is_over:
                        self._take_back(lease)
            case RequesterGone(requester):
                for lease in [key for key, one in self._leases.items() if one.requester == requester]:
                    self._take_back(lease)
                for one in [one for one in self._waiting if one.asked.requester == requester]:
                    self._remove(one)
            case Wake():
                late_leases = [
                    key for key, one in self._leases.items() if one.until <= now and not one.is_filling
                ]
                for lease in late_leases:
                    self._lines.append(f"{now:.3f} lease {lease} was not returned in time")
                    self._take_back(lease)
        while self._bucket.ready_at(now) <= now and (following := self._following()) is not None:
            self._remove(following)
            effects.append(self._send(following.asked))
        return effects

    def deadline(self) -> float | None:
        """When a lease or the time of a request ends, or when bytes may be sent again."""
        times = [one.until for one in self._leases.values() if not one.is_filling]
        if self._waiting:
            times.append(self._waiting[0].until)
        if self._following() is not None:
            times.append(self._bucket.ready_at(self._now))
        return min(times, default=None)

    def check(self) -> None:
        used = [one.slot for one in self._leases.values()]
        assert sorted(used + self._free) == list(range(self._num_slots))
        assert sum(self._num_waiting.values()) == len(self._waiting) <= self._max_waiting
        assert self._waiting_bytes == sum(one.size_bytes for one in self._waiting)
        assert all(one.asked.digest in self._sent for one in self._waiting)
        assert sum(self._num_leases.values()) == len(self._leases)
        assert all(0 < number <= self._max_leases for number in self._num_leases.values())
        assert all(one.is_filling for one in self._leases.values() if one.is_over)
        self._bucket.check()

    def story(self, key: str) -> list[str]:
        """Leases that ended too late, oldest first; ``key`` has no meaning."""
        return list(self._lines)

    def _ask(self, asked: UploadAsked, effects: list[UploadEffect]) -> None:
        if asked.digest not in self._sizes or not asked.candidates:
            refusal = Refusal("absent", "this peer has none of these chunks; ask another peer")
        elif self._num_waiting.get(asked.requester, 0) >= MAX_WAITING_PER_REQUESTER:
            refusal = Refusal(
                "too_many", f"{MAX_WAITING_PER_REQUESTER} requests of yours wait; wait for them"
            )
        elif len(self._waiting) >= self._max_waiting:
            refusal = Refusal("busy", "too many requests wait at this peer; ask another peer")
        elif self._expected_wait_s() > self._lease_s / 2:
            refusal = Refusal("busy", "a request would wait for too long at this peer; ask another peer")
        else:
            sizes = self._sizes[asked.digest]
            size_bytes = max(int(sizes[one]) for one in asked.candidates)
            self._waiting.append(WaitingRequest(asked, self._now + self._lease_s, size_bytes))
            self._waiting_bytes += size_bytes
            _count(self._num_waiting, asked.requester, 1)
            return
        effects.append(DeclineUpload(asked.request_id, refusal))

    def _expected_wait_s(self) -> float:
        """Time until a request would be served that comes now."""
        for_rate = self._bucket.wait_s(self._waiting_bytes, self._now)
        for_slot = self._usual_s * len(self._waiting) / self._num_slots
        return max(for_rate, for_slot)

    def _following(self) -> WaitingRequest | None:
        """The first request that a slot is free for."""
        if not self._free:
            return None
        leases, most = self._num_leases, self._max_leases
        return next((one for one in self._waiting if leases.get(one.asked.requester, 0) < most), None)

    def _remove(self, one: WaitingRequest) -> None:
        self._waiting.remove(one)
        self._waiting_bytes -= one.size_bytes
        _count(self._num_waiting, one.asked.requester, -1)

    def _send(self, asked: UploadAsked) -> SendChunk:
        sent = self._sent[asked.digest]
        chunk = min(asked.candidates, key=lambda one: int(sent[one]))  # the first of equals: its order counts
        sent[chunk] += 1
        self._bucket.take(int(self._sizes[asked.digest][chunk]), self._now)
        lease, self._next_lease = self._next_lease, self._next_lease + 1
        slot = self._free.pop()
        until = self._now + self._lease_s
        self._leases[lease] = SlotLease(asked.requester, slot, self._now, until, asked.digest, chunk)
        _count(self._num_leases, asked.requester, 1)
        return SendChunk(asked.request_id, lease, slot, asked.digest, chunk)

    def _take_back(self, lease: int) -> None:
        found = self._leases[lease]
        if not found.is_over:
            self._usual_s += (self._now - found.begun_at - self._usual_s) / 8
        if found.is_filling:
            found.is_over = True
            return
        del self._leases[lease]
        self._free.append(found.slot)
        _count(self._num_leases, found.requester, -1)


def _count(numbers: dict[int, int], key: int, change: int) -> None:
    number = numbers.get(key, 0) + change
    if number:
        numbers[key] = number
    else:
        numbers.pop(key, None)

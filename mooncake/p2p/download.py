# SPDX-License-Identifier: Apache-2.0
"""Download of one version from many peers: which chunk is requested from which peer, and when.

Rarest first: of the chunks that a peer has, those that the fewest known peers have are requested, ties at
random. A request names several candidates, and the peer sends the one that it has sent least often
(``upload.py``): so a source sends about one copy of the whole before it sends anything twice, whatever the
readers know of each other. Near the end a chunk that was requested long ago is requested from a second peer
as well.

A chunk with a wrong digest is requested from another peer; a peer that sent several is excluded. A peer that
does not answer within the deadline is left alone for a while. If no peer has a missing chunk, the download
waits for ``stall_s`` and gives up; what it has stays. Chunks are numbers here; bytes and digests are with the
caller.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from mooncake.machine import Wake
from mooncake.p2p.token_bucket import TokenBucket

Bits: TypeAlias = NDArray[np.bool_]

STORY_LINES = 64
MAX_CANDIDATES = 8


@dataclass(frozen=True)
class DownloadLimits:
    """Bounds of one download."""

    requests_per_peer: int = 2
    max_requests: int = 16
    deadline_s: float = 30.0
    "Time for one chunk, from the request to its last byte."
    endgame_s: float = 1.0
    "Age from which a request may be repeated at a second peer, when nothing else is left to request."
    max_wrong: int = 3
    "Wrong chunks after which a peer is excluded."
    pause_s: float = 1.0
    "Time that a peer is left alone after a failure; doubled with each further one."
    stall_s: float = 60.0


# Events


@dataclass(frozen=True, slots=True)
class PeerJoined:
    """A peer has this version, or a part of it."""

    peer: str


@dataclass(frozen=True, slots=True)
class PeerHas:
    """All chunks that a peer has."""

    peer: str
    bits: Bits


@dataclass(frozen=True, slots=True)
class PeerLeft:
    """A peer can't be reached; its requests have failed."""

    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class ChunkPromised:
    """A peer has chosen the chunk that it sends."""

    request_id: int
    chunk: int


@dataclass(frozen=True, slots=True)
class ChunkArrived:
    """A chunk arrived, its digest is right, and it is written."""

    request_id: int


@dataclass(frozen=True, slots=True)
class ChunkWrong:
    """A chunk arrived with a wrong digest."""

    request_id: int


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """A request ended without a chunk. ``is_polite``: the peer declined, for want of room or of the chunk."""

    request_id: int
    reason: str
    is_polite: bool = False


DownloadEvent: TypeAlias = (
    PeerJoined | PeerHas | PeerLeft | ChunkPromised | ChunkArrived | ChunkWrong | RequestFailed
)


# Effects


@dataclass(frozen=True, slots=True)
class RequestChunk:
    """Request any one of ``candidates`` from ``peer``."""

    request_id: int
    peer: str
    candidates: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AbandonRequest:
    """Cancel a request; no event of it is expected."""

    request_id: int


@dataclass(frozen=True, slots=True)
class ExcludePeer:
    """A peer sent wrong chunks: close its connection and remember it."""

    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class DownloadComplete:
    """Every chunk is there."""


@dataclass(frozen=True, slots=True)
class DownloadStalled:
    """No chunk arrived for ``stall_s``."""

    reason: str


DownloadEffect: TypeAlias = RequestChunk | AbandonRequest | ExcludePeer | DownloadComplete | DownloadStalled


@dataclass
class SourcePeer:
    """What a download knows of a peer."""

    bits: Bits
    requests: dict[int, None] = field(default_factory=dict)
    wrong: dict[int, None] = field(default_factory=dict)
    """Chunks that came wrong from it; they are requested from others."""
    num_wrong: int = 0
    num_failures: int = 0
    num_declined: int = 0
    """Since the last chunk of it."""
    free_at: float = 0.0


@dataclass
class ActiveRequest:
    """A request that has not ended."""

    peer: str
    candidates: tuple[int, ...]
    asked_at: float
    chunk: int | None = None


class Download:
    """Core of a download.

    Args:
        chunk_sizes: bytes of each chunk.
        have: chunks that are there already; not kept.
        limits: see ``DownloadLimits``.
        random: source of random ties.
        now: the present instant.
        bucket: bound of the received bytes per second; shared by all downloads of a process.
    """

    def __init__(
        self,
        chunk_sizes: Sequence[int],
        have: Bits,
        limits: DownloadLimits,
        random: np.random.Generator,
        now: float,
        bucket: TokenBucket | None = None,
    ) -> None:
        self._sizes = np.asarray(chunk_sizes, dtype=np.int64)
        self.have = have.copy()
        self._limits = limits
        self._random = random
        self._bucket = bucket or TokenBucket(0, 0)
        self._counts = np.zeros(len(self._sizes), dtype=np.int32)
        """Known peers that have each chunk."""
        self._reserved: dict[int, dict[int, None]] = {}
        """Requests that may bring a chunk, by chunk."""
        self._open = ~self.have
        """Chunks that are missing and in no request."""
        self._peers: dict[str, SourcePeer] = {}
        self._excluded: dict[str, None] = {}
        self._requests: dict[int, ActiveRequest] = {}
        self._next_id = 1
        self._progress_at = now
        self._has_ended = False
        self._lines: dict[str, deque[str]] = {}
        self._now = now

    @property
    def num_missing(self) -> int:
        return int(len(self.have) - np.count_nonzero(self.have))

    @property
    def num_unavailable(self) -> int:
        """Missing chunks that no known peer has."""
        return int(np.count_nonzero(~self.have & (self._counts == 0)))

    @property
    def peers(self) -> list[str]:
        return list(self._peers)

    def is_excluded(self, peer: str) -> bool:
        return peer in self._excluded

    def handle(self, event: DownloadEvent | Wake, now: float) -> list[DownloadEffect]:
        """Handle one event; see the events above."""
        if self._has_ended:
            return []
        self._now = now
        effects: list[DownloadEffect] = []
        match event:
            case PeerJoined(peer):
                self._join(peer)
            case PeerHas(peer, bits):
                self._has(peer, bits)
            case PeerLeft(peer, reason):
                self._leave(peer, reason, effects)
            case ChunkPromised(request_id, chunk):
                self._promised(request_id, chunk, effects)
            case ChunkArrived(request_id):
                self._arrived(request_id, effects)
            case ChunkWrong(request_id):
                self._wrong(request_id, effects)
            case RequestFailed(request_id, reason, is_polite):
                self._failed(request_id, reason, is_polite)
            case Wake():
                self._expire(effects)
        if not self.num_missing:
            self._has_ended = True
            effects += [AbandonRequest(one) for one in self._requests]
            effects.append(DownloadComplete())
        elif now >= self._progress_at + self._limits.stall_s:
            self._has_ended = True
            effects += [AbandonRequest(one) for one in self._requests]
            effects.append(DownloadStalled(self._stall_reason()))
        else:
            self._fill(effects)
        return effects

    def deadline(self) -> float | None:
        """When a request has to be repeated or given up, or a peer may be asked again."""
        if self._has_ended:
            return None
        times = [self._progress_at + self._limits.stall_s]
        times += [one.asked_at + self._limits.deadline_s for one in self._requests.values()]
        if self._open.any() or self._requests:
            times += [peer.free_at for peer in self._peers.values() if peer.free_at > self._now]
            times += [
                at
                for one in self._requests.values()
                if (at := one.asked_at + self._limits.endgame_s) > self._now
            ]
        ready_at = self._bucket.ready_at(self._now)
        if ready_at > self._now:
            times.append(ready_at)
        return min(times)

    def check(self) -> None:
        counts = np.zeros_like(self._counts)
        for name, peer in self._peers.items():
            assert name not in self._excluded
            assert len(peer.requests) <= self._limits.requests_per_peer
            assert all(self._requests[one].peer == name for one in peer.requests)
            counts += peer.bits
        assert (counts == self._counts).all()
        assert len(self._requests) <= self._limits.max_requests
        assert sum(len(peer.requests) for peer in self._peers.values()) == len(self._requests)
        for chunk, requests in self._reserved.items():
            assert requests and not self.have[chunk] and not self._open[chunk]
            assert all(chunk in self._requests[one].candidates for one in requests)
        expected = ~self.have
        expected[list(self._reserved)] = False
        assert (expected == self._open).all()
        self._bucket.check()

    def story(self, key: str) -> list[str]:
        """Events of a peer, oldest first."""
        return list(self._lines.get(key, ()))

    # Peers

    def _join(self, peer: str) -> None:
        if peer not in self._peers and peer not in self._excluded:
            self._peers[peer] = SourcePeer(np.zeros(len(self.have), dtype=np.bool_))
            self._note(peer, "joined")

    def _has(self, name: str, bits: Bits) -> None:
        self._join(name)
        peer = self._peers.get(name)
        if peer is None or len(bits) != len(self.have):
            return
        self._counts += bits.astype(np.int32) - peer.bits
        peer.bits = bits.copy()

    def _leave(self, name: str, reason: str, effects: list[DownloadEffect]) -> None:
        peer = self._peers.pop(name, None)
        if peer is None:
            return
        self._counts -= peer.bits
        for request_id in list(peer.requests):
            effects.append(AbandonRequest(request_id))
            self._release(request_id, peer)
        self._note(name, f"left: {reason}")

    # Requests

    def _promised(self, request_id: int, chunk: int, effects: list[DownloadEffect]) -> None:
        request = self._requests.get(request_id)
        if request is None:
            return
        if chunk not in request.candidates:
            effects.append(AbandonRequest(request_id))
            self._punish(request_id, f"promised chunk {chunk}, which was not requested", effects)
            return
        self._free(request_id, request, but=chunk)
        request.chunk, request.candidates = chunk, (chunk,)
        self._bucket.take(int(self._sizes[chunk]), self._now)
        if self.have[chunk]:
            effects.append(AbandonRequest(request_id))
            self._release(request_id, self._peers[request.peer])

    def _arrived(self, request_id: int, effects: list[DownloadEffect]) -> None:
        request = self._requests.get(request_id)
        if request is None:
            return
        assert request.chunk is not None, "a chunk is promised before it arrives"
        chunk, peer = request.chunk, self._peers[request.peer]
        peer.num_failures = peer.num_declined = 0
        self._release(request_id, peer)
        self.have[chunk] = True
        self._open[chunk] = False
        self._progress_at = self._now
        for other in list(self._reserved.get(chunk, ())):
            if self._requests[other].chunk == chunk:
                effects.append(AbandonRequest(other))
                self._release(other, self._peers[self._requests[other].peer])
            else:  # not chosen yet: if the peer chooses this chunk, it is abandoned then
                rest = tuple(one for one in self._requests[other].candidates if one != chunk)
                if not rest:
                    effects.append(AbandonRequest(other))
                    self._release(other, self._peers[self._requests[other].peer])
        self._reserved.pop(chunk, None)
        self._open[chunk] = False

    def _wrong(self, request_id: int, effects: list[DownloadEffect]) -> None:
        request = self._requests.get(request_id)
        if request is not None:
            self._punish(request_id, f"sent chunk {request.chunk} with a wrong digest", effects)

    def _punish(self, request_id: int, reason: str, effects: list[DownloadEffect]) -> None:
        request = self._requests[request_id]
        name, peer = request.peer, self._peers[request.peer]
        peer.num_wrong += 1
        if request.chunk is not None:
            peer.wrong[request.chunk] = None
        self._release(request_id, peer)
        self._note(name, reason)
        if peer.num_wrong >= self._limits.max_wrong:
            self._excluded[name] = None
            self._leave(name, "excluded", effects)
            effects.append(ExcludePeer(name, reason))

    def _failed(self, request_id: int, reason: str, is_polite: bool) -> None:
        request = self._requests.get(request_id)
        if request is None:
            return
        peer = self._peers[request.peer]
        self._release(request_id, peer)
        self._pause(request.peer, peer, reason, is_polite)

    def _pause(self, name: str, peer: SourcePeer, reason: str, is_polite: bool = False) -> None:
        """Leave a peer alone for a while, longer with each time: a short one if it declined."""
        if is_polite:
            peer.num_declined += 1
            factor = min(1.0, 0.1 * 2.0 ** min(peer.num_declined - 1, 6))
        else:
            peer.num_failures += 1
            factor = 2.0 ** min(peer.num_failures - 1, 6)
        peer.free_at = self._now + self._limits.pause_s * factor
        self._note(name, reason)

    def _expire(self, effects: list[DownloadEffect]) -> None:
        for request_id, request in list(self._requests.items()):
            if self._now >= request.asked_at + self._limits.deadline_s:
                effects.append(AbandonRequest(request_id))
                peer = self._peers[request.peer]
                self._release(request_id, peer)
                self._pause(request.peer, peer, f"no chunk within {self._limits.deadline_s:g} s")

    def _release(self, request_id: int, peer: SourcePeer) -> None:
        request = self._requests.pop(request_id)
        del peer.requests[request_id]
        self._free(request_id, request)

    def _free(self, request_id: int, request: ActiveRequest, but: int = -1) -> None:
        """Make the candidates of a request available to others."""
        for chunk in request.candidates:
            holders = self._reserved.get(chunk)
            if chunk == but or holders is None:
                continue
            holders.pop(request_id, None)
            if not holders:
                del self._reserved[chunk]
                self._open[chunk] = not self.have[chunk]

    # Choice

    def _fill(self, effects: list[DownloadEffect]) -> None:
        """Request chunks until every peer has its share of requests."""
        limits = self._limits
        names = [name for name, peer in self._peers.items() if peer.free_at <= self._now]
        self._random.shuffle(names)
        names.sort(key=lambda name: len(self._peers[name].requests))
        for _ in range(limits.requests_per_peer):
            for name in names:
                peer = self._peers[name]
                is_full = len(self._requests) >= limits.max_requests
                if is_full or self._bucket.ready_at(self._now) > self._now:
                    return
                if len(peer.requests) < limits.requests_per_peer:
                    candidates = self._candidates(peer)
                    if candidates:
                        self._request(name, peer, candidates, effects)

    def _request(
        self, name: str, peer: SourcePeer, candidates: tuple[int, ...], effects: list[DownloadEffect]
    ) -> None:
        request_id, self._next_id = self._next_id, self._next_id + 1
        self._requests[request_id] = ActiveRequest(name, candidates, self._now)
        peer.requests[request_id] = None
        for chunk in candidates:
            self._reserved.setdefault(chunk, {})[request_id] = None
            self._open[chunk] = False
        effects.append(RequestChunk(request_id, name, candidates))

    def _candidates(self, peer: SourcePeer) -> tuple[int, ...]:
        """The rarest chunks of a peer that are in no request; near the end one that is in one."""
        found = np.flatnonzero(self._open & peer.bits)
        if peer.wrong and len(found):
            found = found[~np.isin(found, list(peer.wrong))]
        if not len(found):
            return self._repeated(peer)
        num_wanted = min(
            len(found), MAX_CANDIDATES, max(1, self.num_missing // (4 * self._limits.max_requests))
        )
        keys = self._counts[found] + self._random.random(len(found))
        if num_wanted < len(found):
            rarest = np.argpartition(keys, num_wanted)[:num_wanted]
            found, keys = found[rarest], keys[rarest]
        return tuple(int(chunk) for chunk in found[np.argsort(keys)])

    def _repeated(self, peer: SourcePeer) -> tuple[int, ...]:
        """The chunk of the oldest request that may be repeated at ``peer``."""
        if (self._open & (self._counts > 0)).any():
            return ()
        for request in self._requests.values():  # oldest first
            if self._now < request.asked_at + self._limits.endgame_s:
                break
            for chunk in request.candidates:
                requests = self._reserved.get(chunk, {})
                is_there = peer.bits[chunk] and chunk not in peer.wrong and not self.have[chunk]
                if is_there and len(requests) == 1 and not any(one in peer.requests for one in requests):
                    return (chunk,)
        return ()

    def _stall_reason(self) -> str:
        return (
            f"no chunk arrived for {self._limits.stall_s:g} s; {self.num_missing} are missing, "
            f"{self.num_unavailable} of them at no known peer ({len(self._peers)} peers, "
            f"{len(self._excluded)} excluded)"
        )

    def _note(self, peer: str, line: str) -> None:
        lines = self._lines.get(peer)
        if lines is None and len(self._lines) < 1024:
            lines = self._lines[peer] = deque(maxlen=STORY_LINES)
        if lines is not None:
            lines.append(f"{self._now:.3f} {line}")

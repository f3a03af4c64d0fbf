# SPDX-License-Identifier: Apache-2.0
"""Load of one version from many peers: runs a ``Download`` on asyncio.

For each peer that has the version one task watches which chunks it has, and each request is a task that asks
for a chunk, reads it into memory of this process, compares its digest and only then writes it. A chunk that
was requested in vain is not waited for. Which chunk comes from where is decided in ``download.py``.
"""

from __future__ import annotations

import asyncio
import functools
import secrets
from collections.abc import Callable

import numpy as np
from prometheus_client import Counter

from mooncake import clock
from mooncake.driver import Driver
from mooncake.errors import MooncakeError, ProtocolError, StorageError, Unavailable
from mooncake.log import get_logger
from mooncake.metrics import registry
from mooncake.p2p import download as d
from mooncake.p2p.download import Download, DownloadEffect, DownloadEvent, DownloadLimits
from mooncake.p2p.held_version import HeldVersion
from mooncake.p2p.messages import (
    MAX_LEASE_S,
    MAX_NAMED_PEERS,
    ChunkReady,
    Declined,
    FetchChunk,
    VersionState,
    WatchVersion,
    unpack_bits,
)
from mooncake.p2p.peer_link import PeerLinks
from mooncake.p2p.slots import Slots
from mooncake.p2p.swarm_peers import SwarmPeers
from mooncake.p2p.token_bucket import TokenBucket

log = get_logger(__name__)

MAX_WATCHED = 40
"""Peers that one load is connected to."""
LOOK_S = 0.25
"""Interval at which new peers are looked for."""
WATCH_S = 10.0
ABSENT_S = 1.0
"""Time after which a peer that does not have the version is asked again."""

RECEIVED = Counter(
    "mooncake_p2p_received_bytes",
    "Bytes of chunks received from peers with the right digest",
    registry=registry,
)
WRONG = Counter(
    "mooncake_p2p_wrong_chunks", "Chunks received from peers with a wrong digest", registry=registry
)


class SwarmLoad:
    """Loads the missing chunks of ``held``.

    Args:
        held: the version; chunks are added to it as they come.
        write: ``write(chunk, content)`` stores a verified chunk; it is called in a thread.
        own_address: where other peers may load the same version from this process.
    """

    def __init__(
        self,
        held: HeldVersion,
        write: Callable[[int, memoryview], None],
        *,
        own_address: str,
        peers: SwarmPeers,
        links: PeerLinks,
        slots: Slots,
        limits: DownloadLimits,
        bucket: TokenBucket,
    ) -> None:
        self._held = held
        self._write = write
        self._own_address = own_address
        self._peers = peers
        self._links = links
        self._slots = slots
        self._limits = limits
        self.received_bytes = 0
        self._sizes = [chunk.size_bytes for chunk in held.manifest.chunks]
        self._download = Download(
            self._sizes,
            held.have,
            limits,
            np.random.default_rng(secrets.randbits(64)),
            clock.monotonic(),
            bucket,
        )
        self._driver: Driver[DownloadEvent, DownloadEffect] = Driver(self._download, self._perform)
        self._watching: dict[str, asyncio.Task[None]] = {}
        self._fetching: dict[int, asyncio.Task[None]] = {}
        self._abandoned: set[int] = set()
        self._absent_until: dict[str, float] = {}
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._has_ended = asyncio.Event()

    @property
    def num_peers(self) -> int:
        return len(self._download.peers)

    async def run(self) -> None:
        """Return when every chunk is there.

        Raises:
            Unavailable: no chunk came for ``stall_s``, or the load was closed.
            StorageError, OutOfSpace: a chunk can't be written.
        """
        if not self._download.num_missing:
            self._has_ended.set()
            return
        look = asyncio.create_task(self._look_for_peers())
        try:
            await self._end
        finally:
            look.cancel()
            self._driver.close()
            for task in (*self._watching.values(), *self._fetching.values()):
                task.cancel()
            try:
                await asyncio.gather(
                    look, *self._watching.values(), *self._fetching.values(), return_exceptions=True
                )
            finally:  # also when this task is cancelled meanwhile: ``close`` waits for it
                self._has_ended.set()

    async def close(self) -> None:
        """End the load, which has begun; returns when no peer is read any longer."""
        self._finish(Unavailable(f"load {self._held.name or 'the delta'}: this peer was closed"))
        await self._has_ended.wait()

    def story(self, peer: str) -> list[str]:
        """What happened with a peer, oldest first."""
        return self._download.story(peer)

    async def _look_for_peers(self) -> None:
        while True:
            now = clock.monotonic()
            for address in self._peers.usable(now):
                is_free = address not in self._watching and self._absent_until.get(address, 0.0) <= now
                if is_free and len(self._watching) < MAX_WATCHED and not self._download.is_excluded(address):
                    task = asyncio.create_task(self._watch(address))
                    self._watching[address] = task
                    task.add_done_callback(functools.partial(self._unwatch, address))
            await asyncio.sleep(LOOK_S)

    def _unwatch(self, address: str, task: asyncio.Task[None]) -> None:
        self._watching.pop(address, None)

    async def _watch(self, address: str) -> None:
        """Follow which chunks a peer has, until it is lost or does not have the version."""
        digest, revision = self._held.manifest.digest, -1
        try:
            while True:
                message = WatchVersion(digest, revision, WATCH_S, self._own_address)
                reply = await self._links.to(address).ask(message, WATCH_S + self._limits.deadline_s)
                now = clock.monotonic()
                self._peers.answered(address, now)
                if isinstance(reply, Declined):
                    self._absent_until[address] = now + ABSENT_S
                    self._driver.post(d.PeerLeft(address, reply.reason))
                    return
                if not isinstance(reply, VersionState):
                    raise ProtocolError(f"the peer at {address} sent {type(reply).__name__}")
                for other in reply.peers[:MAX_NAMED_PEERS]:
                    self._peers.add(other, now)
                revision = reply.revision
                self._driver.post(d.PeerHas(address, unpack_bits(reply.bits, len(self._held.have))))
        except (MooncakeError, OSError, ValueError) as error:
            self._peers.failed(address, clock.monotonic(), str(error))
            log.info("p2p_peer_lost", peer=address, reason=str(error))
            self._driver.post(d.PeerLeft(address, str(error)))
            await self._links.drop(address)

    def _perform(self, effect: DownloadEffect) -> None:
        match effect:
            case d.RequestChunk(request_id):
                task = asyncio.create_task(self._fetch(effect))
                self._fetching[request_id] = task
                task.add_done_callback(lambda _: self._fetching.pop(request_id, None))
            case d.AbandonRequest(request_id):
                self._abandoned.add(request_id)
            case d.ExcludePeer(peer, reason):
                log.warning("p2p_peer_excluded", peer=peer, reason=reason)
                self._peers.mark(peer, clock.monotonic(), reason)
                if peer in self._watching:
                    self._watching[peer].cancel()
            case d.DownloadComplete():
                self._finish(None)
            case d.DownloadStalled(reason):
                name = self._held.name or "the delta"
                self._finish(Unavailable(f"load {name}: {reason}; begin again when a peer has them"))

    def _finish(self, error: MooncakeError | None) -> None:
        if self._end.done():
            return
        if error is None:
            self._end.set_result(None)
        else:
            self._end.set_exception(error)

    async def _fetch(self, request: d.RequestChunk) -> None:
        """Carry out one request. Nothing is reported of one that was abandoned."""
        request_id = request.request_id
        event: DownloadEvent
        try:
            async with self._slots.one() as slot:
                event = await self._received(request, slot)
        except (StorageError, OSError) as error:
            self._finish(error if isinstance(error, MooncakeError) else StorageError(str(error)))
            return
        except (MooncakeError, ValueError) as error:
            event = d.RequestFailed(request_id, str(error))
        if request_id in self._abandoned:
            self._abandoned.discard(request_id)
        else:
            self._driver.post(event)

    async def _received(self, request: d.RequestChunk, slot: memoryview) -> DownloadEvent:
        request_id, link = request.request_id, self._links.to(request.peer)
        manifest = self._held.manifest
        message = FetchChunk(manifest.digest, list(request.candidates))
        ready = await link.ask(message, self._limits.deadline_s)
        if isinstance(ready, Declined):
            return d.RequestFailed(request_id, str(ready.reason), is_polite=True)
        if not isinstance(ready, ChunkReady):
            raise ProtocolError(f"the peer at {request.peer} sent {type(ready).__name__}")
        if not 1.0 <= ready.lease_s <= MAX_LEASE_S:
            raise ProtocolError(f"the peer at {request.peer} gives {ready.lease_s} s to read a chunk")
        ready_at = clock.monotonic()
        is_right = False
        try:
            if request_id in self._abandoned:
                return d.RequestFailed(request_id, "abandoned")
            self._driver.post(d.ChunkPromised(request_id, ready.chunk))
            if request_id in self._abandoned:
                return d.RequestFailed(request_id, "abandoned")
            if ready.size_bytes != self._sizes[ready.chunk]:
                return d.ChunkWrong(request_id)
            timeout_s = min(self._limits.deadline_s, ready.lease_s)
            await link.read(ready.address, self._slots.address_of(slot), ready.size_bytes, timeout_s)
            is_late = clock.monotonic() > ready_at + ready.lease_s
            is_right = await asyncio.to_thread(self._verified, ready.chunk, slot[: ready.size_bytes])
        finally:
            link.return_slot(ready.lease, is_right)
        if not is_right:
            if is_late:  # the peer may have used the memory for another chunk by then
                return d.RequestFailed(request_id, "the chunk was read after the end of its lease")
            WRONG.inc()
            log.warning("p2p_chunk_wrong", peer=request.peer, digest=manifest.digest, chunk=ready.chunk)
            return d.ChunkWrong(request_id)
        if not self._held.have[ready.chunk]:
            self._held.add(ready.chunk)
            self.received_bytes += ready.size_bytes
            RECEIVED.inc(ready.size_bytes)
        return d.ChunkArrived(request_id)

    def _verified(self, chunk: int, received: memoryview) -> bool:
        """Compare the digest, and write the chunk if it is right. In a thread.

        A copy is compared and written: the slot is memory that a transfer may still reach.
        """
        content = memoryview(bytes(received))
        if not self._held.manifest.holds(chunk, content):
            return False
        if not self._held.have[chunk]:
            self._write(chunk, content)
        return True

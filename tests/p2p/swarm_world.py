# SPDX-License-Identifier: Apache-2.0
"""Peers of the P2P store on virtual time: the cores as they are live, equal links, crashes, corrupt peers."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import numpy as np

from mooncake.machine import Wake
from mooncake.p2p import download as d
from mooncake.p2p import upload as u
from mooncake.p2p.download import Bits, Download, DownloadLimits
from mooncake.p2p.token_bucket import TokenBucket
from mooncake.sim.kernel import Kernel, Timer

DELAY_S = 0.001
GATHER_S = 0.05
SLOTS = 16


@dataclass
class Link:
    """One direction of a peer's link, on which bytes go one after another."""

    bytes_s: float
    free_at: float = 0.0

    def until(self, now: float, size_bytes: int) -> float:
        self.free_at = max(self.free_at, now) + size_bytes / self.bytes_s
        return self.free_at


@dataclass
class Node:
    """A peer: what it has, and its two cores."""

    name: str
    number: int
    have: Bits
    uploads: u.UploadQueue
    up: Link
    down: Link
    download: Download | None = None
    is_corrupt: bool = False
    is_alive: bool = True
    outcome: str = ""
    done_at: float = 0.0
    sent_bytes: int = 0
    timers: dict[str, Timer] = field(default_factory=dict)
    is_announced: bool = False


class World:
    """``num_chunks`` chunks of equal size; every peer knows every other."""

    def __init__(
        self, seed: int, num_chunks: int, chunk_bytes: int = 1 << 20, link_bytes_s: float = 25e6
    ) -> None:
        self.kernel = Kernel(seed)
        self.sizes = [chunk_bytes] * num_chunks
        self.link_bytes_s = link_bytes_s
        self.nodes: dict[str, Node] = {}
        self.num_accepted_wrong = 0
        self._asked: dict[tuple[str, int], tuple[Node, Node, int]] = {}
        self._ids = 0

    def add(self, name: str, have: Bits | None = None, *, limit: float = 0, is_corrupt: bool = False) -> Node:
        number = len(self.nodes) + 1
        found = np.zeros(len(self.sizes), dtype=np.bool_) if have is None else have.copy()
        uploads = u.UploadQueue(SLOTS, TokenBucket(limit, 1 << 20), 30.0)
        uploads.add("v", self.sizes)
        links = Link(self.link_bytes_s), Link(self.link_bytes_s)
        node = self.nodes[name] = Node(name, number, found, uploads, *links, is_corrupt=is_corrupt)
        self._announce(node)
        return node

    def whole(self) -> Bits:
        return np.ones(len(self.sizes), dtype=np.bool_)

    def load(self, node: Node, stall_s: float = 60.0) -> None:
        """Begin a load at ``node``."""
        random = np.random.default_rng(self.kernel.random.getrandbits(32))
        limits = DownloadLimits(stall_s=stall_s, deadline_s=10.0)
        node.outcome = ""
        node.download = Download(self.sizes, node.have, limits, random, self.kernel.now)
        for other in self.nodes.values():
            if other is not node and other.is_alive:
                self._post(node, d.PeerHas(other.name, other.have))

    def crash(self, node: Node) -> None:
        node.is_alive = False
        for timer in node.timers.values():
            timer.cancel()
        node.download = None
        for other in self.nodes.values():
            self._upload(other, u.RequesterGone(node.number))
            self._post(other, d.PeerLeft(node.name, "crashed"))

    def restart(self, node: Node) -> None:
        """Start a crashed peer again; it has what it had."""
        node.is_alive = True
        node.uploads = u.UploadQueue(SLOTS, TokenBucket(0, 0), 30.0)
        node.uploads.add("v", self.sizes)
        self._announce(node)
        if not node.have.all():
            self.load(node)

    def union(self) -> Bits:
        """Chunks that some peer has that is alive and not corrupt."""
        found = np.zeros(len(self.sizes), dtype=np.bool_)
        for node in self.nodes.values():
            if node.is_alive and not node.is_corrupt:
                found |= node.have
        return found

    def check(self) -> None:
        for node in self.nodes.values():
            node.uploads.check()
            if node.download is not None:
                node.download.check()

    # Cores and what they ask for

    def _post(self, node: Node, event: d.DownloadEvent | Wake) -> None:
        if node.download is None or not node.is_alive or node.outcome:
            return
        for effect in node.download.handle(event, self.kernel.now):
            match effect:
                case d.RequestChunk(request_id, peer, candidates):
                    self._request(node, self.nodes[peer], request_id, candidates)
                case d.DownloadComplete():
                    node.outcome, node.done_at = "complete", self.kernel.now
                case d.DownloadStalled(reason):
                    node.outcome, node.done_at = reason, self.kernel.now
        if not node.outcome:
            self._arm(node, "download", node.download.deadline(), lambda: self._post(node, Wake()))

    def _upload(self, node: Node, event: u.UploadEvent | Wake) -> None:
        if not node.is_alive:
            return
        for effect in node.uploads.handle(event, self.kernel.now):
            reader, sender, request_id = self._asked.pop((node.name, effect.request_id))
            if isinstance(effect, u.DeclineUpload):
                declined = d.RequestFailed(request_id, effect.refusal.reason, is_polite=True)
                self.kernel.after(DELAY_S, functools.partial(self._post, reader, declined))
            else:
                self._send(reader, sender, request_id, effect)
        self._arm(node, "upload", node.uploads.deadline(), lambda: self._upload(node, Wake()))

    def _arm(self, node: Node, which: str, deadline: float | None, action: object) -> None:
        if which in node.timers:
            node.timers[which].cancel()
        if deadline is not None:
            assert callable(action)
            node.timers[which] = self.kernel.after(deadline - self.kernel.now, action)

    def _request(self, reader: Node, sender: Node, request_id: int, candidates: tuple[int, ...]) -> None:
        self._ids += 1
        key = self._ids

        def arrives() -> None:
            if not sender.is_alive:
                return  # the reader has had PeerLeft
            there = tuple(one for one in candidates if sender.have[one])
            self._asked[sender.name, key] = reader, sender, request_id
            self._upload(sender, u.UploadAsked(key, reader.number, "v", there))

        self.kernel.after(DELAY_S, arrives)

    def _send(self, reader: Node, sender: Node, request_id: int, send: u.SendChunk) -> None:
        size = self.sizes[send.chunk]
        self._post(reader, d.ChunkPromised(request_id, send.chunk))
        download = reader.download
        is_wanted = download is not None and not reader.have[send.chunk]
        at = sender.up.until(self.kernel.now, size) if is_wanted else self.kernel.now
        at = max(at, reader.down.until(at - size / self.link_bytes_s, size)) if is_wanted else at
        sender.sent_bytes += size * is_wanted

        self.kernel.after(0.0, lambda: self._upload(sender, u.SlotFilled(send.lease)))

        def arrives() -> None:
            self._upload(sender, u.SlotReturned(reader.number, send.lease, is_wanted))
            if not sender.is_alive or not reader.is_alive or reader.download is not download:
                return
            if sender.is_corrupt:
                self._post(reader, d.ChunkWrong(request_id))
            elif is_wanted:
                reader.have[send.chunk] = True
                self._post(reader, d.ChunkArrived(request_id))
                self._announce(reader)

        self.kernel.after(at - self.kernel.now + DELAY_S, arrives)

    def _announce(self, node: Node) -> None:
        """Let all others know what a peer has, after changes have been gathered."""
        if node.is_announced:
            return
        node.is_announced = True

        def arrives() -> None:
            node.is_announced = False
            for other in self.nodes.values():
                if other is not node and node.is_alive:
                    self._post(other, d.PeerHas(node.name, node.have))

        self.kernel.after(GATHER_S, arrives)

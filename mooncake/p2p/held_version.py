# SPDX-License-Identifier: Apache-2.0
"""A version that this peer has, whole or in part, and what it says of it to others."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from mooncake.p2p.content import Content
from mooncake.p2p.download import Bits
from mooncake.p2p.manifest import Manifest
from mooncake.p2p.messages import (
    MAX_NAMED_PEERS,
    DeltaInfo,
    LoadProgress,
    VersionInfo,
    VersionState,
    pack_bits,
)
from mooncake.p2p.swarm_peers import is_peer_address

GATHER_S = 0.05
"""How long changes are gathered before those who watch are answered."""
WATCHER_S = 120.0
"""How long a peer that watched counts as one that has the version, too."""
MAX_WATCHERS = 512


class HeldVersion:
    """One version at this peer.

    Args:
        name: "" for one that is not listed (a delta).
        number: of the name's versions.
        folder: where its files are, if it is one of files.
        is_loaded: whether it came from peers; otherwise its files are not the store's.
        deltas: objects by which it can be made from other versions.
    """

    def __init__(
        self,
        name: str,
        number: int,
        manifest: Manifest,
        content: Content,
        have: Bits,
        *,
        folder: Path | None = None,
        is_loaded: bool = False,
        deltas: Iterable[DeltaInfo] = (),
    ) -> None:
        self.name = name
        self.number = number
        self.manifest = manifest
        self.content = content
        self.have = have
        self.folder = folder
        self.is_loaded = is_loaded
        self.deltas = list(deltas)
        self.revision = 0
        self.is_complete = bool(have.all())
        """Whether every chunk is there and the files have their final place."""
        self._changed = asyncio.Event()
        self._watchers: dict[str, float] = {}

    def info(self) -> VersionInfo:
        return VersionInfo(
            name=self.name,
            number=self.number,
            digest=self.manifest.digest,
            size_bytes=self.manifest.size_bytes,
            num_chunks=len(self.have),
            num_have=int(np.count_nonzero(self.have)),
            deltas=self.deltas,
        )

    def add(self, chunk: int) -> None:
        """Record that a chunk is there, verified and written."""
        self.have[chunk] = True
        self.touch()

    def lose(self, chunk: int) -> None:
        """Record that a chunk was found to be damaged."""
        self.have[chunk] = False
        self.touch()

    def touch(self) -> None:
        """Answer those who watch: chunks have changed, or the version was dropped."""
        self.revision += 1
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def changed_since(self, revision: int, wait_s: float) -> None:
        """Return when the revision is another one, or after ``wait_s``."""
        if revision == self.revision:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            if not self.have.all():
                await asyncio.sleep(GATHER_S)

    def watched_by(self, address: str, now: float) -> None:
        """Record that the peer at ``address`` has this version, too, or is loading it."""
        self._watchers.pop(address, None)
        if is_peer_address(address):
            self._watchers[address] = now
        if len(self._watchers) > MAX_WATCHERS:
            del self._watchers[next(iter(self._watchers))]

    def left_by(self, address: str) -> None:
        """Record that the peer at ``address`` has ended."""
        self._watchers.pop(address, None)

    def state(self, now: float) -> VersionState:
        """Chunks that are there, and other peers that have some of them."""
        known = [address for address, at in self._watchers.items() if now - at < WATCHER_S]
        return VersionState(self.revision, pack_bits(self.have), known[-MAX_NAMED_PEERS:])

    def progress(self, received_bytes: int, num_peers: int) -> LoadProgress:
        """How far its load is, with the bytes that came over the network from peers."""
        sizes = np.asarray([chunk.size_bytes for chunk in self.manifest.chunks], dtype=np.int64)
        have_bytes = int(np.dot(self.have, sizes)) if len(sizes) else 0
        return LoadProgress(have_bytes, self.manifest.size_bytes, received_bytes, num_peers, self.is_complete)

    def __repr__(self) -> str:
        return f"<HeldVersion {self.name} {self.number} {self.manifest!r}>"

# SPDX-License-Identifier: Apache-2.0
"""Connections to other peers: messages over RPC, and the memory that their chunks are read from; and the
metadata service in which peers find each other.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

from mooncake import clock
from mooncake.errors import MooncakeError, PeerLost, ProtocolError
from mooncake.log import get_logger
from mooncake.p2p.manifest import Manifest, decode_manifest
from mooncake.p2p.messages import (
    REPLIES,
    AskManifest,
    AskSegment,
    Declined,
    ManifestBytes,
    PeerSegment,
    ReturnSlot,
)
from mooncake.p2p.swarm_peers import SwarmPeers
from mooncake.rpc import AsyncClient
from mooncake.rpc.wire import Message
from mooncake.security import NODES, Identity
from mooncake.transfer import Op, RemoteSegment, Status, TransferEngine
from mooncake.transfer.descriptor import decode_descriptor
from mooncake.transfer.metadata import make_backend

log = get_logger(__name__)

SEGMENT_S = 5.0
MANIFEST_S = 60.0
NUM_ASKED_AT_ONCE = 3
"""Peers that are asked for a manifest at the same time."""
PUBLISH_S = 10.0
PUBLISHED_FOR_S = 30.0


class PeerLink:
    """Connection to the peer at ``address``; made when it is first used."""

    def __init__(self, address: str, engine: TransferEngine, identity: Identity) -> None:
        self.address = address
        self._engine = engine
        self._client = AsyncClient(
            address, REPLIES, "the peer", is_patient=False, identity=identity, servers=NODES
        )
        self._segment: RemoteSegment | None = None
        self._opening = asyncio.Lock()
        self._returns: set[asyncio.Task[None]] = set()

    async def ask(self, message: Message, timeout_s: float) -> Any:
        """Send a message; return the reply, which may be ``Declined``.

        Raises:
            PeerLost, DeadlineExceeded: the peer does not answer, or its address can't be used.
            MooncakeError: it answered with a failure.
        """
        try:
            return await self._client.call(message, timeout_s)
        except (OSError, ValueError) as error:  # of the address: names are resolved by other rules than ours
            raise PeerLost(f"the peer at {self.address} can't be asked: {error}") from error

    async def read(self, address: int, into: int, size_bytes: int, timeout_s: float) -> None:
        """Read memory of the peer into registered memory of this process at ``into``.

        Raises:
            PeerLost: it can't be read.
            ProtocolError: the peer's description of its memory can't be decoded.
        """
        try:
            segment = await self._opened()
            done = await self._engine.transfer(
                Op.READ, segment, [into], [address], [size_bytes], timeout_s=timeout_s
            )
        except (OSError, ValueError, OverflowError) as error:  # of places that the peer has named
            raise PeerLost(f"the memory of the peer at {self.address} can't be read: {error}") from error
        if done.status is not Status.OK:
            self._segment = None  # asked anew, in case that the peer was restarted
            raise PeerLost(f"reading a chunk from the peer at {self.address} ended with {done.status.name}")

    def return_slot(self, lease: int, is_read: bool) -> None:
        """Let the peer use a slot again, soon; it does so by itself when the lease ends.

        ``is_read``: the chunk has come, and its digest is right.
        """
        task = asyncio.ensure_future(self._return(lease, is_read))
        self._returns.add(task)
        task.add_done_callback(self._returns.discard)

    async def close(self) -> None:
        for task in list(self._returns):
            task.cancel()
        await self._client.close()
        if self._segment is not None:
            await asyncio.to_thread(self._engine.forget, self._segment)

    async def _opened(self) -> RemoteSegment:
        async with self._opening:
            if self._segment is None:
                reply = await self.ask(AskSegment(), SEGMENT_S)
                if isinstance(reply, Declined):
                    raise PeerLost(f"the peer at {self.address} sends no chunks: {reply.reason}")
                if not isinstance(reply, PeerSegment):
                    raise ProtocolError(f"the peer at {self.address} sent {type(reply).__name__}")
                self._segment = self._engine.open(decode_descriptor(reply.descriptor))
            return self._segment

    async def _return(self, lease: int, is_read: bool) -> None:
        with contextlib.suppress(MooncakeError):  # the lease ends by itself
            await self.ask(ReturnSlot(lease, is_read), SEGMENT_S)


class PeerLinks:
    """The connections of one process, by address."""

    def __init__(self, engine: TransferEngine, identity: Identity) -> None:
        self._engine = engine
        self._identity = identity
        self._links: dict[str, PeerLink] = {}

    def to(self, address: str) -> PeerLink:
        """The connection to ``address``; raises InvalidArgument for something else than ``host:port``."""
        link = self._links.get(address)
        if link is None:
            link = self._links[address] = PeerLink(address, self._engine, self._identity)
        return link

    async def drop(self, address: str) -> None:
        """Close a connection; the next use makes another one."""
        link = self._links.pop(address, None)
        if link is not None:
            await link.close()

    async def close(self) -> None:
        for address in list(self._links):
            await self.drop(address)


async def fetch_manifest(
    digest: str, addresses: Sequence[str], links: PeerLinks, peers: SwarmPeers
) -> Manifest:
    """The manifest that is named ``digest``, from the first of the peers that sends it.

    Raises:
        ProtocolError: a peer sent a wrong one, and none the right one.
        PeerLost: none sent one.
    """
    trouble: ProtocolError | None = None
    for at in range(0, len(addresses), NUM_ASKED_AT_ONCE):
        group = addresses[at : at + NUM_ASKED_AT_ONCE]
        asks = [asyncio.create_task(_manifest_of(one, digest, links, peers)) for one in group]
        try:
            for ask in asyncio.as_completed(asks):
                found = await ask
                if isinstance(found, Manifest):
                    return found
                trouble = found or trouble
        finally:
            for task in asks:
                task.cancel()
            await asyncio.gather(*asks, return_exceptions=True)
    raise trouble or PeerLost(f"no peer sent the manifest {digest[:12]}; is one of them running?")


async def _manifest_of(
    address: str, digest: str, links: PeerLinks, peers: SwarmPeers
) -> Manifest | ProtocolError | None:
    """The manifest as one peer sent it, why it is a wrong one, or None."""
    try:
        reply = await links.to(address).ask(AskManifest(digest), MANIFEST_S)
        if isinstance(reply, ManifestBytes):
            return await asyncio.to_thread(decode_manifest, reply.encoded, digest)
    except ProtocolError as error:
        peers.mark(address, clock.monotonic(), str(error))
        log.warning("p2p_manifest_wrong", peer=address, digest=digest, reason=str(error))
        return error
    except (MooncakeError, OSError, ValueError) as error:
        peers.failed(address, clock.monotonic(), str(error))
    return None


class PeerDirectory:
    """Addresses of peers in the metadata service at ``url``, where ``peers.own`` is published."""

    def __init__(self, url: str, cluster: str, identity: Identity, peers: SwarmPeers) -> None:
        self._prefix = f"mooncake/{cluster}/p2p/" if cluster else "mooncake/p2p/"
        self._peers = peers
        self._backend = make_backend(url, tls=identity.https_tls(), signer=identity.signer())

    async def publish(self) -> None:
        """Name this peer to the others, and learn their addresses, until cancelled."""
        try:
            while True:
                await self.refresh()
                await asyncio.sleep(PUBLISH_S)
        finally:
            with contextlib.suppress(MooncakeError):
                self._backend.remove(self._prefix + self._peers.own)
            self._backend.close()

    async def refresh(self) -> None:
        """Do it once. A service that does not answer is a line in the log."""
        key = self._prefix + self._peers.own
        try:
            await asyncio.to_thread(self._backend.put, key, b"peer", PUBLISHED_FOR_S)
            names = await asyncio.to_thread(self._backend.list, self._prefix)
        except MooncakeError as error:
            log.warning("p2p_metadata_failed", reason=str(error))
            return
        for name in names:
            self._peers.add(name.removeprefix(self._prefix), clock.monotonic())

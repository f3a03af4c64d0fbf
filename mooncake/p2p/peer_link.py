# SPDX-License-Identifier: Apache-2.0
"""Connections to other peers: messages over RPC, and the memory that their chunks are read from."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from mooncake.errors import MooncakeError, PeerLost, ProtocolError
from mooncake.p2p.messages import REPLIES, AskSegment, Declined, PeerSegment, ReturnSlot
from mooncake.rpc import AsyncClient
from mooncake.rpc.wire import Message
from mooncake.security import NODES, Identity
from mooncake.transfer import Op, RemoteSegment, Status, TransferEngine
from mooncake.transfer.descriptor import decode_descriptor

SEGMENT_S = 5.0


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

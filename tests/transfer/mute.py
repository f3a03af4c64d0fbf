# SPDX-License-Identifier: Apache-2.0
"""A peer that accepts and never answers, like a process that is stopped while it is connected to."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from types import TracebackType

import msgspec

from mooncake.transfer.descriptor import SegmentDescriptor

PATIENCE_S = 60.0


class Mute:
    """Listens at an address of the shm transport."""

    def __init__(self) -> None:
        self._name = f"mooncake-mute-{secrets.token_hex(8)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.settimeout(PATIENCE_S)
        self._listener.bind(f"\0{self._name}")
        self._listener.listen()
        self._met: socket.socket | None = None

    def __enter__(self) -> Mute:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the listener and the accepted connection."""
        for end in (self._listener, self._met):
            if end is not None:
                end.close()

    def instead_of(self, peer: SegmentDescriptor) -> SegmentDescriptor:
        """``peer`` with this listener as its shm endpoint."""
        return msgspec.structs.replace(peer, name=self._name, endpoints={"shm": self._name})

    async def met(self) -> None:
        """Accept the first connection."""
        self._met, _ = await asyncio.to_thread(self._listener.accept)

    def is_waited_for(self) -> bool:
        """Whether the accepted connection is still open."""
        assert self._met is not None
        with contextlib.suppress(BlockingIOError):
            while self._met.recv(1 << 16, socket.MSG_DONTWAIT):
                pass
            return False
        return True

"""A peer that accepts and never says a word: what a process looks like that is stopped as it is met."""

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
    """Listens where others' shared memory is asked for."""

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
        """Gone, for whoever comes and whoever waits."""
        for end in (self._listener, self._met):
            if end is not None:
                end.close()

    def instead_of(self, peer: SegmentDescriptor) -> SegmentDescriptor:
        """``peer`` as if this were where it answers."""
        return msgspec.structs.replace(peer, name=self._name, endpoints={"shm": self._name})

    async def met(self) -> None:
        """Returns when somebody has come."""
        self._met, _ = await asyncio.to_thread(self._listener.accept)

    def is_waited_for(self) -> bool:
        """Whoever came has not hung up."""
        assert self._met is not None
        with contextlib.suppress(BlockingIOError):
            while self._met.recv(1 << 16, socket.MSG_DONTWAIT):
                pass
            return False
        return True

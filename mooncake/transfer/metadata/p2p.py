# SPDX-License-Identifier: Apache-2.0
"""Metadata without a server: a name is the address where its engine answers handshakes.

``host:port`` is queried directly, so an entry is never stale and nothing has to be put. There is no
list of all names.
"""

from __future__ import annotations

from collections.abc import Callable

from mooncake.errors import InvalidArgument
from mooncake.rpc.client import split_address
from mooncake.transfer.descriptor import SegmentDescriptor


class PeerBackend:
    """The backend of ``P2PHANDSHAKE``. The engine that uses it listens for handshakes.

    Args:
        describe: queries the engine at an address for its descriptor (``HandshakeClient.describe``).
    """

    def __init__(self, describe: Callable[[str, float], SegmentDescriptor], timeout_s: float = 5.0) -> None:
        self._describe = describe
        self._timeout_s = timeout_s

    def __repr__(self) -> str:
        return "<PeerBackend>"

    def get(self, key: str) -> bytes | None:
        """The descriptor of the engine at the address after the last ``/`` of ``key``.

        Raises:
            InvalidArgument: that is no ``host:port``.
            PeerLost, DeadlineExceeded: no engine answers there.
            ProtocolError: an engine of another version answers.
        """
        name = key.rpartition("/")[2]
        try:
            split_address(name)
        except InvalidArgument:
            raise InvalidArgument(
                "name", name, "host:port of the peer's handshake, because metadata is P2PHANDSHAKE"
            ) from None
        return self._describe(name, self._timeout_s).encode()

    def put(self, key: str, value: bytes, ttl_s: float | None = None) -> None:
        """Do nothing: peers query the engine itself."""

    def remove(self, key: str) -> bool:
        return False

    def list(self, prefix: str) -> list[str]:
        raise InvalidArgument("metadata", "P2PHANDSHAKE", "a service that knows all names: http, etcd, redis")

    def close(self) -> None: ...

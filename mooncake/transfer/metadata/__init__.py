# SPDX-License-Identifier: Apache-2.0
"""Metadata backends: key-value services that store descriptors by name.

Entries are soft state: their owner puts them again before they expire, so a service that restarts
empty is soon refilled. A backend knows keys and bytes, not their meaning.
"""

from __future__ import annotations

import importlib
import ssl
from collections.abc import Callable
from typing import Any, Protocol

from mooncake.errors import InvalidArgument
from mooncake.security import Signer

P2P = "P2PHANDSHAKE"
"""Value in place of a URL: there is no service, peers are queried directly."""

BACKENDS = {
    "http": "mooncake.transfer.metadata.http:HttpBackend",
    "https": "mooncake.transfer.metadata.http:HttpBackend",
    "etcd": "mooncake.transfer.metadata.etcd:EtcdBackend",
    "redis": "mooncake.transfer.metadata.redis:RedisBackend",
}
_ALLOWED = f"{P2P}, http[s]://host:port/metadata, etcd://host:port[;host:port], redis://[:password@]host:port[/database]"


class Backend(Protocol):
    """A small key-value service. Thread-safe. Every call may raise PeerLost or DeadlineExceeded."""

    def get(self, key: str) -> bytes | None:
        """The value, or None when there is none or it has expired."""
        ...

    def put(self, key: str, value: bytes, ttl_s: float | None = None) -> None:
        """Set or replace a value, which expires after ``ttl_s`` unless put again."""
        ...

    def remove(self, key: str) -> bool:
        """Remove a value; False when there was none."""
        ...

    def list(self, prefix: str) -> list[str]:
        """Keys that start with ``prefix``, sorted."""
        ...

    def close(self) -> None:
        """Close connections; the next call opens them again."""
        ...


def make_backend(
    url: str,
    *,
    timeout_s: float = 5.0,
    password: str = "",
    database: int = 0,
    tls: ssl.SSLContext | None = None,
    signer: Signer | None = None,
) -> Backend:
    """Make the backend for ``url``. It connects with its first call, which fails if the service is absent.

    Args:
        url: as ``TransferSettings.metadata``; ``host:port`` without a scheme is etcd.
        timeout_s: time limit of each call.
        password, database: for Redis, where the URL names none.
        tls: for https; without it the authorities of this system are trusted.
        signer: for http and https, where the service requires the cluster's key.

    Raises:
        InvalidArgument: ``url`` has none of the known forms.
    """
    if url == P2P:
        from mooncake.transfer.handshake import HandshakeClient
        from mooncake.transfer.metadata.p2p import PeerBackend

        return PeerBackend(HandshakeClient().describe, timeout_s)
    scheme, found, _ = url.partition("://")
    if not found and ":" in url:
        scheme, url = "etcd", f"etcd://{url}"
    if scheme not in BACKENDS:
        raise InvalidArgument("metadata", url, _ALLOWED)
    module, name = BACKENDS[scheme].split(":")
    make: Callable[..., Backend] = getattr(importlib.import_module(module), name)
    more: dict[str, Any] = {}
    if scheme == "redis":
        more = {"password": password, "database": database}
    elif scheme in ("http", "https"):
        more = {"tls": tls, "signer": signer}
    return make(url, timeout_s, **more)

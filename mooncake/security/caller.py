"""How this process asks another HTTP server of its cluster: over TLS, signed, both, or plainly.

Owns nothing but the joint of an identity with a URL and headers; the HTTP client is somebody else's.
"""

from __future__ import annotations

import ssl

from mooncake.security.identity import Identity, process_identity


class HttpClientAuth:
    """A client's side: URL scheme and headers of requests as ``identity`` (by default the process's).

    Args:
        is_plain: no TLS with any identity, for foreign engines, which have no certificate of the cluster.
    """

    def __init__(self, identity: Identity | None = None, is_plain: bool = False) -> None:
        identity = identity or process_identity()
        self._signer = identity.signer()
        self.tls: ssl.SSLContext | None = None if is_plain else identity.client_tls

    def url(self, address: str, path: str) -> str:
        """``address``: ``host:port``."""
        return f"{'https' if self.tls is not None else 'http'}://{address}{path}"

    def headers(self, method: str, path: str, body: bytes = b"") -> dict[str, str]:
        """Headers that authenticate the request; ``path`` includes its query, as it is sent."""
        return {} if self._signer is None else self._signer.headers(method, path, body)

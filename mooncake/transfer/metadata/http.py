"""The metadata backend of the HTTP metadata service (``server.py``, or any with the same answers)."""

from __future__ import annotations

import json
import ssl
from urllib.parse import quote, urlsplit

from mooncake.errors import InvalidArgument, ProtocolError
from mooncake.security import Signer
from mooncake.transfer.metadata.connection import HttpConnection


class HttpBackend:
    """Client of ``url``, for instance ``http://10.0.0.1:8080/metadata``.

    Args:
        timeout_s: time limit of each call.
        tls: for an https URL; without it the authorities of this system are trusted.
        signer: signs every request with the cluster's key.

    Raises:
        InvalidArgument: not an http URL.
    """

    def __init__(
        self,
        url: str,
        timeout_s: float = 5.0,
        tls: ssl.SSLContext | None = None,
        signer: Signer | None = None,
    ) -> None:
        parts = urlsplit(url)
        try:
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:
            port = 0
        if parts.scheme not in ("http", "https") or not parts.hostname or not port:
            raise InvalidArgument("url", url, "http://host:port/metadata, or https://")
        if parts.scheme == "http":
            tls = None
        elif tls is None:
            tls = ssl.create_default_context()
        self.url = url
        self._path = parts.path.rstrip("/") or "/metadata"
        self._connection = HttpConnection(url, parts.hostname, port, timeout_s, tls, signer)

    def __repr__(self) -> str:
        return f"<HttpBackend {self.url}>"

    def get(self, key: str) -> bytes | None:
        status, body = self._call("GET", f"?key={quote(key, safe='')}")
        if status not in (200, 404):
            raise ProtocolError(self._refusal(f"to get {key}", status, body))
        return body if status == 200 else None

    def put(self, key: str, value: bytes, ttl_s: float | None = None) -> None:
        ttl = "" if ttl_s is None else f"&ttl_s={ttl_s:g}"
        status, body = self._call("PUT", f"?key={quote(key, safe='')}{ttl}", value)
        if status != 200:
            raise ProtocolError(self._refusal(f"to put {key}", status, body))

    def remove(self, key: str) -> bool:
        return self._call("DELETE", f"?key={quote(key, safe='')}")[0] == 200

    def list(self, prefix: str) -> list[str]:
        status, body = self._call("GET", f"/list?prefix={quote(prefix, safe='')}")
        if status != 200:
            raise ProtocolError(f"{self.url} cannot list keys ({status}); it is another metadata service")
        try:
            return [str(key) for key in json.loads(body)]
        except (ValueError, TypeError) as error:
            raise ProtocolError(f"{self.url} lists no keys; is it another metadata service?") from error

    def close(self) -> None:
        self._connection.close()

    def _call(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        return self._connection.call(method, self._path + path, body)

    def _refusal(self, what: str, status: int, body: bytes) -> str:
        return f"{self.url} refused {what}: {status} {body[:200].decode(errors='replace')}"

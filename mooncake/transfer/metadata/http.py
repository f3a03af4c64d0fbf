"""The metadata backend that speaks to the HTTP metadata service (``server.py``, or any with its answers).

Blocking, on the standard library: it runs a few times a minute, from threads. One connection, opened
again when the service restarted.
"""

from __future__ import annotations

import http.client
import json
import threading
from urllib.parse import quote, urlsplit

from mooncake.errors import DeadlineExceeded, InvalidArgument, PeerLost, ProtocolError


class HttpBackend:
    """A client of ``url``, for instance ``http://10.0.0.1:8080/metadata``.

    Args:
        timeout_s: for each call.

    Raises:
        InvalidArgument: not an http URL.
    """

    def __init__(self, url: str, timeout_s: float = 5.0) -> None:
        parts = urlsplit(url)
        try:
            port = parts.port or 80
        except ValueError:
            port = 0
        if parts.scheme != "http" or not parts.hostname or not port:
            raise InvalidArgument("url", url, "http://host:port/metadata")
        self.url = url
        self._path = parts.path.rstrip("/") or "/metadata"
        self._connection = http.client.HTTPConnection(parts.hostname, port, timeout=timeout_s)
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<HttpBackend {self.url}>"

    def get(self, key: str) -> bytes | None:
        status, body = self._call("GET", f"?key={quote(key, safe='')}")
        return body if status == 200 else None

    def put(self, key: str, value: bytes, ttl_s: float | None = None) -> None:
        ttl = "" if ttl_s is None else f"&ttl_s={ttl_s:g}"
        status, body = self._call("PUT", f"?key={quote(key, safe='')}{ttl}", value)
        if status != 200:
            raise ProtocolError(
                f"{self.url} refused to put {key}: {status} {body[:200].decode(errors='replace')}"
            )

    def remove(self, key: str) -> bool:
        return self._call("DELETE", f"?key={quote(key, safe='')}")[0] == 200

    def list(self, prefix: str) -> list[str]:
        status, body = self._call("GET", f"/list?prefix={quote(prefix, safe='')}")
        if status != 200:
            raise ProtocolError(f"{self.url} cannot list keys ({status}); it is another metadata service")
        return [str(key) for key in json.loads(body)]

    def close(self) -> None:
        self._connection.close()

    def _call(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        """Status and body. Every call may be repeated, so a connection gone stale is simply replaced."""
        with self._lock:
            for is_last in (False, True):
                try:
                    self._connection.request(
                        method, self._path + path, body, {"Content-Type": "application/json"}
                    )
                    response = self._connection.getresponse()
                    answer = response.status, response.read()
                    break
                except TimeoutError as error:
                    self._connection.close()
                    raise DeadlineExceeded(
                        f"metadata service {self.url} did not answer {method} in time"
                    ) from error
                except (OSError, http.client.HTTPException) as error:
                    self._connection.close()
                    if is_last or isinstance(error, ConnectionRefusedError):
                        raise PeerLost(
                            f"metadata service {self.url}: {error or type(error).__name__}; is it running?"
                        ) from error
        if answer[0] >= 500:
            raise PeerLost(f"metadata service {self.url} failed with {answer[0]}")
        return answer

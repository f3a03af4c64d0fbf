# SPDX-License-Identifier: Apache-2.0
"""The metadata backend of the HTTP metadata service (``server.py``, or any with the same answers).

``HttpConnection`` is also the etcd backend's way to its JSON gateway.
"""

from __future__ import annotations

import http.client
import json
import os
import ssl
import threading
from urllib.parse import quote, urlsplit

from mooncake.errors import AccessDenied, DeadlineExceeded, InvalidArgument, PeerLost, ProtocolError
from mooncake.security import Signer


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


class HttpConnection:
    """Requests to ``host:port``, one at a time, on one connection. ``url`` names the service in errors.

    Blocking, on the standard library: it is used a few times a minute, from threads. Reconnects when the
    service was restarted; every request may be repeated, so a broken connection is simply replaced.

    Raises:
        InvalidArgument: ``host`` is not a valid host name or address.
    """

    def __init__(
        self,
        url: str,
        host: str,
        port: int,
        timeout_s: float,
        tls: ssl.SSLContext | None = None,
        signer: Signer | None = None,
    ) -> None:
        self.url = url
        self._timeout_s = timeout_s
        self._address = host, port
        self._tls = tls
        self._signer = signer
        self._speaks_for_us = url.startswith("http")
        try:
            self._begin()
        except http.client.InvalidURL as error:
            raise InvalidArgument("host", host, f"a host name or address ({error})") from error

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._connection = (
            http.client.HTTPConnection(*self._address, timeout=self._timeout_s)
            if self._tls is None
            else http.client.HTTPSConnection(*self._address, timeout=self._timeout_s, context=self._tls)
        )
        self._lock = threading.Lock()

    def call(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        """Send a request and return status and body of the answer.

        Raises:
            PeerLost: no service listens there, the connection broke twice, or the service failed.
            DeadlineExceeded: no answer in time.
            AccessDenied: the service does not accept this process as a member of its cluster.
            ProtocolError: no TLS there, or a certificate that one side does not trust.
        """
        if os.getpid() != self._pid:  # forked: the connection belongs to the parent
            self._begin()
        with self._lock:
            for is_last in (False, True):
                try:
                    headers = {"Content-Type": "application/json"}
                    if self._signer is not None:  # signed anew each time: a signature is accepted once
                        headers |= self._signer.headers(method, path, body or b"")
                    self._connection.request(method, path, body, headers)
                    response = self._connection.getresponse()
                    answer = response.status, response.read()
                    break
                except TimeoutError as error:
                    self._connection.close()
                    raise DeadlineExceeded(
                        f"metadata service {self.url} did not answer {method} within {self._timeout_s:g} s; "
                        "is the address right?"
                    ) from error
                except ssl.SSLError as error:
                    self._connection.close()
                    raise ProtocolError(
                        f"metadata service {self.url}: TLS failed ({error}); check that it serves https,"
                        " `tls_ca` and the certificates of both sides"
                    ) from error
                except (OSError, http.client.HTTPException) as error:
                    self._connection.close()
                    if is_last or isinstance(error, ConnectionRefusedError):
                        raise PeerLost(
                            f"metadata service {self.url}: {error or type(error).__name__}; is it running?"
                        ) from error
        if answer[0] in (401, 403) and self._speaks_for_us:
            reason = answer[1][:300].decode(errors="replace")
            raise AccessDenied(f"metadata service {self.url} refused {method}: {reason}")
        if answer[0] >= 500:
            raise PeerLost(f"metadata service {self.url} failed with {answer[0]}; see its log")
        return answer

    def close(self) -> None:
        """Close the connection; the next call opens it again."""
        with self._lock:
            self._connection.close()

"""One kept HTTP connection to a metadata service, with errors that advise.

Blocking, on the standard library: it is used a few times a minute, from threads. Opened again when the
service was restarted. Every request may be repeated, so a connection gone stale is simply replaced.
"""

from __future__ import annotations

import http.client
import os
import ssl
import threading

from mooncake.errors import AccessDenied, DeadlineExceeded, InvalidArgument, PeerLost, ProtocolError
from mooncake.security import Signer


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

"""A blocking socket in TLS that one thread may read while another writes.

Python's own ``SSLSocket`` must not be used by two threads at once: below, OpenSSL changes the same session
in both directions. Here the session works on memory, under a lock, and the waiting is done outside
of it on the plain socket. As much of a socket's face as ``client.py`` uses; contexts come from above.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time

from mooncake.errors import ProtocolError

_CHUNK_BYTES = 64 << 10


class TlsSocket:
    """``sock``, connected, after a handshake of at most ``timeout_s``.

    Raises:
        ProtocolError: no TLS there, or a certificate that is not trusted.
        TimeoutError: the handshake is not over in time.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, host: str, timeout_s: float) -> None:
        self._sock = sock
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._session = context.wrap_bio(self._in, self._out, server_hostname=host)
        self._lock = threading.Lock()
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self._session.do_handshake()
                sock.sendall(self._out.read())
                return
            except ssl.SSLWantReadError:
                sock.sendall(self._out.read())
                self._take(deadline)
            except ssl.SSLError as error:
                raise ProtocolError(_words(error)) from error

    def _take(self, deadline: float) -> None:
        """What has arrived, into the session; waits for it."""
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError
        self._sock.settimeout(remaining_s)
        try:
            data = self._sock.recv(_CHUNK_BYTES)
        except ConnectionResetError:
            data = b""
        with self._lock:
            if data:
                self._in.write(data)
            else:
                self._in.write_eof()

    def fileno(self) -> int:
        return self._sock.fileno()

    def settimeout(self, timeout_s: float) -> None:
        self._sock.settimeout(timeout_s)

    def sendall(self, data: bytes | bytearray) -> None:
        """The caller sees to it that one thread sends at a time."""
        with self._lock:
            self._session.write(data)
            encrypted = self._out.read()
        self._sock.sendall(encrypted)

    def recv(self, size: int) -> bytes:
        """Up to ``size`` bytes, b"" at the end; raises as a socket's, and ProtocolError."""
        deadline = time.monotonic() + (self._sock.gettimeout() or 0.0)
        while True:
            try:
                with self._lock:
                    return self._session.read(size)
            except ssl.SSLWantReadError:
                self._take(deadline)
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                return b""
            except ssl.SSLError as error:
                raise ProtocolError(_words(error)) from error

    def shutdown(self, how: int) -> None:
        self._sock.shutdown(how)


def _words(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLEOFError):
        return "it hung up during the TLS handshake; use the same `tls` setting on both sides"
    if error.reason == "WRONG_VERSION_NUMBER":
        return "it does not speak TLS; use the same `tls` setting on both sides"
    why = getattr(error, "verify_message", "") or (error.reason or str(error)).lower().replace("_", " ")
    return f"no TLS with it: {why}; both sides need certificates of the same `tls_ca`"

# SPDX-License-Identifier: Apache-2.0
"""TLS for both kinds of clients and for the server, as sessions that work on memory.

``TlsSession`` encrypts what one thread sends while another decrypts what it received. Python's own
``SSLSocket`` must not be used by two threads at once: in it, OpenSSL changes the same session in both
directions, and all threads have one timeout. Here the session is used under a lock, and ``client.py`` lets
each thread wait on the plain socket until its own deadline. ``TlsTransport`` is a layer between an asyncio
protocol and its transport: so a connection is counted and timed from the moment it is accepted, not from the
end of its TLS handshake as with asyncio's own TLS. Callers pass in the contexts.
"""

from __future__ import annotations

import asyncio
import hashlib
import socket
import ssl
import threading
import time
from typing import Any

from mooncake.errors import ProtocolError

_CHUNK_BYTES = 64 << 10


class TlsSession:
    """A client's TLS on the connected ``sock``, after a handshake of at most ``timeout_s``.

    Raises:
        ProtocolError: no TLS there, or a certificate that is not trusted.
        TimeoutError: the handshake did not end in time.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, host: str, timeout_s: float) -> None:
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._session = context.wrap_bio(self._in, self._out, server_hostname=host)
        self._lock = threading.Lock()
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self._session.do_handshake()
                sock.sendall(self._out.read())
                break
            except ssl.SSLWantReadError:
                sock.sendall(self._out.read())
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0:
                    raise TimeoutError from None
                sock.settimeout(remaining_s)
                try:
                    self._feed(sock.recv(_CHUNK_BYTES))
                except ConnectionResetError:
                    self._feed(b"")
            except ssl.SSLError as error:
                raise ProtocolError(_reason_of(error)) from error
        self.certificate: dict[str, Any] | None = self._session.getpeercert()
        """Peer's certificate, in the form of Python's ``ssl``."""
        self.certificate_digest = _digest_of(self._session)
        """SHA-256 of the peer's certificate."""
        self._early = self._read() or b""

    def encrypt(self, data: bytes | bytearray) -> bytes:
        """The bytes to send for ``data``; they must be sent in the order of the calls."""
        with self._lock:
            self._session.write(data)
            return self._out.read()

    def decrypt(self, data: bytes) -> bytes | None:
        """What received bytes (b"" at the end) contain: b"" at the end, None while a record is not whole.

        Raises:
            ProtocolError: TLS failed.
        """
        with self._lock:
            self._feed(data)
            return self._read()

    def take_early(self) -> bytes:
        """What came with the end of the handshake; b"" after the first call."""
        early, self._early = self._early, b""
        return early

    def _feed(self, data: bytes) -> None:
        if data:
            self._in.write(data)
        else:
            self._in.write_eof()

    def _read(self) -> bytes | None:
        plain: list[bytes] = []
        try:
            while piece := self._session.read(_CHUNK_BYTES):
                plain.append(piece)
        except ssl.SSLWantReadError:
            return b"".join(plain) if plain else None
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            pass
        except ssl.SSLError as error:
            raise ProtocolError(_reason_of(error)) from error
        return b"".join(plain)


class TlsTransport:
    """TLS on ``transport``: the protocol above feeds it received bytes, and writes to it.

    Not thread-safe. ``host`` is the server's name on the client's side.
    """

    def __init__(self, transport: asyncio.Transport, context: ssl.SSLContext, host: str | None) -> None:
        self._transport = transport
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._session = context.wrap_bio(self._in, self._out, server_side=host is None, server_hostname=host)
        self.is_ready = False
        """Set when the handshake has ended."""
        self.has_ended = False
        """Set when the peer sends nothing more."""
        if host is not None:
            self.feed(b"")

    @property
    def certificate(self) -> dict[str, Any] | None:
        return self._session.getpeercert() if self.is_ready else None

    @property
    def certificate_digest(self) -> bytes:
        """SHA-256 of the peer's certificate."""
        return _digest_of(self._session)

    def feed(self, data: bytes) -> bytes:
        """Decrypt ``data``, once the handshake has ended.

        Raises:
            ProtocolError: no TLS there, or a certificate that is not trusted.
        """
        plain: list[bytes] = []
        try:
            if data:
                self._in.write(data)
            if not self.is_ready:
                self._session.do_handshake()
                self.is_ready = True
            while piece := self._session.read(_CHUNK_BYTES):
                plain.append(piece)
            self.has_ended = True
        except ssl.SSLWantReadError:
            pass
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            self.has_ended = True
        except ssl.SSLError as error:
            raise ProtocolError(_reason_of(error)) from error
        finally:
            self._flush()
        return b"".join(plain)

    def write(self, data: bytes | bytearray) -> None:
        if self._transport.is_closing():
            return
        self._session.write(data)
        self._flush()

    def _flush(self) -> None:
        if self._out.pending:
            self._transport.write(self._out.read())

    def write_eof(self) -> None:
        """Do nothing: peers differ about half-closed TLS connections."""
        self.close()

    def close(self) -> None:
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def get_write_buffer_size(self) -> int:
        return self._transport.get_write_buffer_size()

    def get_extra_info(self, name: str) -> Any:
        return self._transport.get_extra_info(name)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._transport.set_protocol(protocol)


def _digest_of(session: ssl.SSLObject) -> bytes:
    return hashlib.sha256(session.getpeercert(binary_form=True) or b"").digest()


def _reason_of(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLEOFError):
        return "it closed the connection during the TLS handshake; use the same `tls` settings on both sides"
    if error.reason == "WRONG_VERSION_NUMBER":
        return "it does not speak TLS; use the same `tls` settings on both sides"
    why = getattr(error, "verify_message", "") or (error.reason or str(error)).lower().replace("_", " ")
    return f"TLS failed: {why}; both sides need certificates of the same `tls_ca`"

# SPDX-License-Identifier: Apache-2.0
"""Metadata backends: services that store descriptors by name, over HTTP, in etcd, in Redis, or none (P2P).

Entries are soft state: their owner puts them again before they expire, so a service that restarts
empty is soon refilled. A backend knows keys and bytes, not their meaning. All are blocking, on the standard
library: they are used a few times a minute, from threads, so no client library has to fit the rest of an
installation.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import os
import socket
import ssl
import threading
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, Protocol
from urllib.parse import quote, unquote, urlsplit

from mooncake.errors import (
    AccessDenied,
    DeadlineExceeded,
    InvalidArgument,
    PeerLost,
    ProtocolError,
    Unavailable,
)
from mooncake.rpc.client import split_address
from mooncake.security import Signer
from mooncake.transfer.descriptor import SegmentDescriptor
from mooncake.transfer.handshake import HandshakeClient

P2P = "P2PHANDSHAKE"
"""Value in place of a URL: there is no service, peers are queried directly."""

_ALLOWED = f"{P2P}, http[s]://host:port/metadata, etcd://host:port[;host:port], redis://[:password@]host:port[/database]"

RedisReply = bytes | int | None | list["RedisReply"]

MAX_REPLY_BYTES = 64 << 20
MAX_REPLY_ITEMS = 1 << 20
REDIS_SWAP = b"""
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[2])
return 1
"""


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


class PeerBackend:
    """The backend of ``P2PHANDSHAKE``: a name is the address where its engine answers handshakes.

    ``host:port`` is queried directly, so an entry is never stale and nothing has to be put. There is no
    list of all names. The engine that uses this backend listens for handshakes.

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
        raise InvalidArgument("metadata", P2P, "a service that knows all names: http, etcd, redis")

    def close(self) -> None: ...


class HttpBackend:
    """Client of the HTTP metadata service (``metadata_server.py``, or any with the same answers).

    ``url`` is for instance ``http://10.0.0.1:8080/metadata``.

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


@contextlib.contextmanager
def _turn(lock: threading.Lock, timeout_s: float, name: str) -> Iterator[None]:
    """Context manager: this thread's turn on a connection that carries one request at a time.

    Raises:
        DeadlineExceeded: requests of other threads have not been answered within ``timeout_s``.
    """
    if not lock.acquire(timeout=timeout_s):
        raise DeadlineExceeded(
            f"{name} has not answered other threads' requests within {timeout_s:g} s; is the address right?"
        )
    try:
        yield
    finally:
        lock.release()


class CredentialHeaders(Protocol):
    """What proves to a service who sends a request: a ``Signer``, or a bearer's token."""

    def headers(self, method: str, path: str, body: bytes = b"") -> dict[str, str]: ...


class HttpConnection:
    """Requests to ``host:port``, one at a time, on one connection. ``service`` and ``url`` name it in errors.

    It is also the etcd backend's way to its JSON gateway, and an election's to a Kubernetes API server.
    Reconnects when the service was restarted; every request may be repeated, so a broken connection is simply
    replaced.

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
        signer: CredentialHeaders | None = None,
        service: str = "metadata service",
    ) -> None:
        self.url = url
        self._name = f"{service} {url}"
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
        with _turn(self._lock, self._timeout_s, self._name):
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
                        f"{self._name} did not answer {method} within {self._timeout_s:g} s; "
                        "is the address right?"
                    ) from error
                except ssl.SSLError as error:
                    self._connection.close()
                    raise ProtocolError(
                        f"{self._name}: TLS failed ({error}); check that it serves https,"
                        " `tls_ca` and the certificates of both sides"
                    ) from error
                # ValueError: no host can have this name
                except (OSError, ValueError, http.client.HTTPException) as error:
                    self._connection.close()
                    if is_last or isinstance(error, ConnectionRefusedError):
                        raise PeerLost(
                            f"{self._name}: {error or type(error).__name__}; is it running?"
                        ) from error
        if answer[0] in (401, 403) and self._speaks_for_us:
            reason = answer[1][:300].decode(errors="replace")
            raise AccessDenied(f"{self._name} refused {method}: {reason}")
        if answer[0] >= 500:
            raise PeerLost(f"{self._name} failed with {answer[0]}; see its log")
        return answer

    def close(self) -> None:
        """Close the connection; the next call opens it again."""
        with self._lock:
            self._connection.close()


class EtcdBackend:
    """Client of etcd (3.4 or newer) at ``etcd://host:port``, or several members with ``;`` between them.

    It uses the JSON gateway of etcd's v3 API, which needs only HTTP and no gRPC library. Keys and values are
    base64 there. An entry that expires is attached to a lease; every put takes a new lease, and the old one
    expires with no entry attached.

    Args:
        timeout_s: time limit of each call to one member; when one does not answer, the next is tried.

    Raises:
        InvalidArgument: not an etcd URL.
    """

    def __init__(self, url: str, timeout_s: float = 5.0) -> None:
        self.url = url
        self._members = [
            HttpConnection(f"etcd://{host}:{port}", host, port, timeout_s) for host, port in members_of(url)
        ]
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<EtcdBackend {self.url}>"

    def get(self, key: str) -> bytes | None:
        found = self._call("kv/range", {"key": _base64(key.encode())}).get("kvs", [])
        return b64decode(found[0].get("value", "")) if found else None

    def put(self, key: str, value: bytes, ttl_s: float | None = None) -> None:
        entry: dict[str, Any] = {"key": _base64(key.encode()), "value": _base64(value)}
        if ttl_s is not None:
            entry["lease"] = self._call("lease/grant", {"TTL": math.ceil(ttl_s)})["ID"]
        self._call("kv/put", entry)

    def remove(self, key: str) -> bool:
        return int(self._call("kv/deleterange", {"key": _base64(key.encode())}).get("deleted", 0)) > 0

    def swap(self, key: str, old: bytes | None, new: bytes) -> bool:
        """Set ``new`` if the value is ``old`` (None for no value). After an error the outcome is unknown."""
        at = _base64(key.encode())
        what = (
            {"target": "VERSION", "version": "0"}
            if old is None
            else {"target": "VALUE", "value": _base64(old)}
        )
        compare = [{"key": at, "result": "EQUAL", **what}]
        answer = self._call(
            "kv/txn", {"compare": compare, "success": [{"requestPut": {"key": at, "value": _base64(new)}}]}
        )
        return bool(answer.get("succeeded"))

    def list(self, prefix: str) -> list[str]:
        first = prefix.encode() or b"\0"
        query = {
            "key": _base64(first),
            "range_end": _base64(_end_of_range(prefix.encode())),
            "keys_only": True,
        }
        found = self._call("kv/range", query).get("kvs", [])
        return sorted(b64decode(entry["key"]).decode(errors="replace") for entry in found)

    def close(self) -> None:
        for member in self._members:
            member.close()

    def _call(self, what: str, message: dict[str, Any]) -> dict[str, Any]:
        """The answer of the first member that answers."""
        body = json.dumps(message).encode()
        with self._lock:
            members = list(self._members)
        for member in members:
            try:
                status, answer = member.call("POST", f"/v3/{what}", body)
            except Unavailable:
                if member is members[-1]:
                    raise
                continue
            if member is not members[0]:  # the next call begins with it
                with self._lock:
                    self._members.sort(key=lambda other: other is not member)
            return self._checked(member.url, what, status, answer)
        raise PeerLost(f"{self.url} has no members")  # not reached: there is at least one

    def _checked(self, url: str, what: str, status: int, answer: bytes) -> dict[str, Any]:
        try:
            decoded = json.loads(answer)
        except ValueError:
            decoded = None
        if status == 200 and isinstance(decoded, dict):
            return decoded
        reason = decoded.get("error") if isinstance(decoded, dict) else answer[:100].decode(errors="replace")
        raise ProtocolError(
            f"metadata service {url} refused {what}: {status} {reason}; is it etcd 3.4 or newer?"
        )


def members_of(url: str) -> list[tuple[str, int]]:
    """The addresses in ``etcd://host:port[;host:port]``; raises InvalidArgument."""
    found: list[tuple[str, int]] = []
    for member in url.removeprefix("etcd://").rstrip("/").replace(",", ";").split(";"):
        parts = urlsplit(f"//{member}")
        try:
            port = parts.port or 2379
        except ValueError:
            port = 0
        if not parts.hostname or not port or parts.path or parts.username:
            raise InvalidArgument("url", url, "etcd://host:port[;host:port]")
        found.append((parts.hostname, port))
    return found


def _base64(data: bytes) -> str:
    return b64encode(data).decode()


def _end_of_range(prefix: bytes) -> bytes:
    """The first key after all that start with ``prefix``; a zero byte means the end of all keys."""
    kept = prefix.rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1]) if kept else b"\0"


class RedisBackend:
    """Client of Redis (RESP2) at ``redis://[user:password@]host[:port][/database]``.

    Eight commands over one socket: less code than a client library, and nothing to install. The connection is
    opened again when the service was restarted, and every command here may be repeated.

    Args:
        timeout_s: time limit of each call.
        password: used if the URL has none.
        database: used if the URL has none.

    Raises:
        InvalidArgument: not a redis URL.
    """

    def __init__(self, url: str, timeout_s: float = 5.0, *, password: str = "", database: int = 0) -> None:
        parts = urlsplit(url)
        path = parts.path.strip("/")
        try:
            port = parts.port or 6379
        except ValueError:
            port = 0
        if parts.scheme != "redis" or not parts.hostname or not port or not (path or "0").isdecimal():
            raise InvalidArgument("url", url, "redis://[user:password@]host[:port][/database]")
        self._address = parts.hostname, port
        shown = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        self.url = f"redis://{shown}:{port}/{path or database}"
        self._user = unquote(parts.username or "")
        self._password = unquote(parts.password or "") or password
        self._database = int(path or database)
        self._timeout_s = timeout_s
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._stream: tuple[socket.socket, BinaryIO] | None = None
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<RedisBackend {self.url}>"

    def get(self, key: str) -> bytes | None:
        value = self._call(b"GET", key.encode())
        assert value is None or isinstance(value, bytes)
        return value

    def put(self, key: str, value: bytes, ttl_s: float | None = None) -> None:
        expiry = () if ttl_s is None else (b"PX", b"%d" % max(1, round(ttl_s * 1000)))
        self._call(b"SET", key.encode(), value, *expiry)

    def remove(self, key: str) -> bool:
        return self._call(b"DEL", key.encode()) == 1

    def swap(self, key: str, old: bytes | None, new: bytes) -> bool:
        """Set ``new`` if the value is ``old`` (None for no value). After an error the outcome is unknown."""
        if old is None:
            return self._call(b"SET", key.encode(), new, b"NX") is not None
        return self._call(b"EVAL", REDIS_SWAP, b"1", key.encode(), old, new) == 1

    def list(self, prefix: str) -> list[str]:
        pattern = (
            b"".join(b"\\" + char if char in b"*?[]\\^-" else char for char in _single_bytes(prefix)) + b"*"
        )
        cursor, keys = b"0", set[bytes]()
        while True:
            answer = self._call(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", b"1000")
            if not isinstance(answer, list) or len(answer) != 2 or not isinstance(answer[1], list):
                raise ProtocolError(f"metadata service {self.url} answered SCAN with something else")
            keys.update(key for key in answer[1] if isinstance(key, bytes))
            cursor = answer[0] if isinstance(answer[0], bytes) else b"0"
            if cursor == b"0":
                return sorted(key.decode(errors="replace") for key in keys)

    def close(self) -> None:
        """Close the connection; the next call opens it again."""
        with self._lock:
            self._hang_up()

    def _call(self, *arguments: bytes) -> RedisReply:
        if os.getpid() != self._pid:  # forked: the connection belongs to the parent
            self._begin()
        with _turn(self._lock, self._timeout_s, f"metadata service {self.url}"):
            for is_last in (False, True):
                is_fresh = self._stream is None
                try:
                    return self._send_command(self._stream or self._connect(), *arguments)
                except TimeoutError as error:
                    self._hang_up()
                    raise DeadlineExceeded(
                        f"metadata service {self.url} did not answer {arguments[0].decode()} within "
                        f"{self._timeout_s:g} s; is the address right?"
                    ) from error
                except (OSError, ValueError) as error:  # ValueError: no host can have this name
                    self._hang_up()
                    if is_last or is_fresh:
                        raise PeerLost(f"metadata service {self.url}: {error}; is it running?") from error
                except BaseException:  # half an answer may be left for the next call
                    self._hang_up()
                    raise
        raise AssertionError("the second attempt returns or raises")

    def _connect(self) -> tuple[socket.socket, BinaryIO]:
        sock = socket.create_connection(self._address, self._timeout_s)
        stream = sock, sock.makefile("rb")
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._password:
                user = (self._user.encode(),) if self._user else ()
                self._send_command(stream, b"AUTH", *user, self._password.encode())
            if self._database:
                self._send_command(stream, b"SELECT", b"%d" % self._database)
        except BaseException:  # a connection without a password, or to another database, must not be used
            stream[1].close()
            sock.close()
            raise
        self._stream = stream
        return stream

    def _send_command(self, stream: tuple[socket.socket, BinaryIO], *arguments: bytes) -> RedisReply:
        sock, answers = stream
        encoded = [b"$%d\r\n%s\r\n" % (len(one), one) for one in arguments]
        sock.sendall(b"".join([b"*%d\r\n" % len(arguments), *encoded]))
        return self._reply(answers, arguments[0])

    def _reply(self, answers: BinaryIO, command: bytes, depth: int = 0) -> RedisReply:
        line = answers.readline(65_536)
        if not line.endswith(b"\r\n"):
            raise ConnectionResetError("it closed the connection")
        kind, rest = line[:1], line[1:-2]
        if kind == b"+":
            return rest
        if kind == b"-":
            raise self._refusal(command, rest.decode(errors="replace"))
        if kind not in b":$*" or not rest.lstrip(b"-").isdigit():
            raise ProtocolError(f"metadata service {self.url} answered {line[:40]!r}; it is not Redis")
        number = int(rest)
        if kind == b":":
            return number
        if number < 0:
            return None
        if number > (MAX_REPLY_ITEMS if kind == b"*" else MAX_REPLY_BYTES) or depth > 2:
            raise ProtocolError(f"metadata service {self.url} sent an oversized answer; is it Redis?")
        if kind == b"*":
            return [self._reply(answers, command, depth + 1) for _ in range(number)]
        value = answers.read(number + 2)
        if len(value) != number + 2:
            raise ConnectionResetError("it closed the connection")
        return value[:-2]

    def _refusal(self, command: bytes, reason: str) -> AccessDenied | PeerLost | ProtocolError:
        what = f"metadata service {self.url} refused {command.decode()}: {reason}"
        if reason.startswith(("NOAUTH", "WRONGPASS", "NOPERM")) or command == b"AUTH":
            return AccessDenied(f"{what}; give the right password in the URL: redis://:password@host:port")
        if reason.startswith(("LOADING", "MASTERDOWN", "READONLY", "CLUSTERDOWN", "OOM", "MISCONF")):
            return PeerLost(what)
        return ProtocolError(what)

    def _hang_up(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream[1].close()
            stream[0].close()


def _single_bytes(text: str) -> list[bytes]:
    return [text.encode()[index : index + 1] for index in range(len(text.encode()))]


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
        return PeerBackend(HandshakeClient().describe, timeout_s)
    scheme, found, _ = url.partition("://")
    if not found and ":" in url:
        scheme, url = "etcd", f"etcd://{url}"
    if scheme in ("http", "https"):
        return HttpBackend(url, timeout_s, tls, signer)
    if scheme == "etcd":
        return EtcdBackend(url, timeout_s)
    if scheme == "redis":
        return RedisBackend(url, timeout_s, password=password, database=database)
    raise InvalidArgument("metadata", url, _ALLOWED)

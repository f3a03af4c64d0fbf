# SPDX-License-Identifier: Apache-2.0
"""The metadata backend of Redis (or any server of its protocol, RESP2).

Eight commands over one socket: less code than a client library, and nothing to install. Blocking;
one connection, opened again when the service was restarted. Every command here may be repeated.
"""

from __future__ import annotations

import os
import socket
import threading
from typing import BinaryIO
from urllib.parse import unquote, urlsplit

from mooncake.errors import AccessDenied, DeadlineExceeded, InvalidArgument, PeerLost, ProtocolError

Reply = bytes | int | None | list["Reply"]

MAX_REPLY_BYTES = 64 << 20
MAX_REPLY_ITEMS = 1 << 20
SWAP = b"""
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[2])
return 1
"""


class RedisBackend:
    """Client of ``url``: ``redis://[user:password@]host[:port][/database]``.

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
        return self._call(b"EVAL", SWAP, b"1", key.encode(), old, new) == 1

    def list(self, prefix: str) -> list[str]:
        pattern = b"".join(b"\\" + char if char in b"*?[]\\^-" else char for char in _chars(prefix)) + b"*"
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

    def _call(self, *arguments: bytes) -> Reply:
        if os.getpid() != self._pid:  # forked: the connection belongs to the parent
            self._begin()
        with self._lock:
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
                except OSError as error:
                    self._hang_up()
                    if is_last or is_fresh:
                        raise PeerLost(f"metadata service {self.url}: {error}; is it running?") from error
                except ProtocolError:
                    self._hang_up()
                    raise
        raise AssertionError("the second attempt returns or raises")

    def _connect(self) -> tuple[socket.socket, BinaryIO]:
        sock = socket.create_connection(self._address, self._timeout_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._stream = sock, sock.makefile("rb")
        if self._password:
            user = (self._user.encode(),) if self._user else ()
            self._send_command(self._stream, b"AUTH", *user, self._password.encode())
        if self._database:
            self._send_command(self._stream, b"SELECT", b"%d" % self._database)
        return self._stream

    def _send_command(self, stream: tuple[socket.socket, BinaryIO], *arguments: bytes) -> Reply:
        sock, answers = stream
        encoded = [b"$%d\r\n%s\r\n" % (len(one), one) for one in arguments]
        sock.sendall(b"".join([b"*%d\r\n" % len(arguments), *encoded]))
        return self._reply(answers, arguments[0])

    def _reply(self, answers: BinaryIO, command: bytes, depth: int = 0) -> Reply:
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


def _chars(text: str) -> list[bytes]:
    return [text.encode()[index : index + 1] for index in range(len(text.encode()))]

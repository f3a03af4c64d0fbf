# SPDX-License-Identifier: Apache-2.0
"""Who may see what in the console: visitors, their sessions, and which requests count as local.

A process of this host may read without a key where others need none either. Everyone else begins a
session with a key. Two things look like a local process and are not: a web page of a foreign site whose name
resolves to 127.0.0.1 (its Host header has that name), and a reverse proxy on this host (it forwards requests
of others). Both need a key, but a proxy is recognised only by the headers that it adds, and nginx adds
none by default: so no address replaces a key at a gateway that has keys of clients, and at a store whose
cluster has a credential. Sessions are
bounded in number and in age, are kept by the digest of their token, and hold the visitor's key, so that a
key that was withdrawn ends them.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Literal

import msgspec

from mooncake.security.http_auth import secret_bytes

MAX_SESSIONS = 256
SESSION_S = 12 * 3600.0
"""Longest life of a session."""
IDLE_S = 3600.0
"""A session that is not used for this long ends."""

MAX_FAILURES = 10
FAILURES_WITHIN_S = 60.0
_MAX_ADDRESSES = 1024

COOKIE = "mooncake_console"
CSRF_HEADER = "x-csrf-token"
_FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip", "x-forwarded-host", "via")


class Visitor(msgspec.Struct, frozen=True):
    """One who looks at the console. A ``reader`` is a process of this host without a key."""

    kind: Literal["reader", "client", "admin"]
    name: str = ""
    "A client's name in the file of keys."
    tenant: str = ""
    key: str = ""

    def __repr__(self) -> str:
        return f"<Visitor {self.kind} {self.name}>"

    @property
    def sees_all(self) -> bool:
        return self.kind != "client"


class ConsoleSession(msgspec.Struct):
    """A visitor's session between login and logout."""

    visitor: Visitor
    csrf: str
    "The value that every change must carry in its header; a foreign page can't read it."
    began_at: float
    used_at: float


class ConsoleSessions:
    """Sessions by their token. The oldest ones go first when there are too many."""

    def __init__(self, make_token: Callable[[], str]) -> None:
        """``make_token``: returns a secret that can't be guessed."""
        self._make_token = make_token
        self._by_digest: OrderedDict[bytes, ConsoleSession] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_digest)

    def begin(self, visitor: Visitor, now: float) -> tuple[str, ConsoleSession]:
        """Returns the token for the cookie, and the session."""
        token = self._make_token()
        session = ConsoleSession(visitor, self._make_token(), now, now)
        self._by_digest[_digest(token)] = session
        while len(self._by_digest) > MAX_SESSIONS:
            self._by_digest.popitem(last=False)
        return token, session

    def find(self, token: str, now: float) -> ConsoleSession | None:
        """The session of a token; None when there is none or it has ended."""
        digest = _digest(token)
        session = self._by_digest.get(digest)
        if session is None:
            return None
        if now - session.began_at > SESSION_S or now - session.used_at > IDLE_S:
            del self._by_digest[digest]
            return None
        session.used_at = now
        return session

    def end(self, token: str) -> None:
        self._by_digest.pop(_digest(token), None)

    def check(self) -> None:
        assert len(self._by_digest) <= MAX_SESSIONS


class LoginFailures:
    """Counts wrong keys by address, so that guessing is slow."""

    def __init__(self) -> None:
        self._by_address: OrderedDict[str, list[float]] = OrderedDict()

    def wait_s(self, address: str, now: float) -> float:
        """Seconds until ``address`` may try again; 0 when it may."""
        times = self._by_address.get(address, [])
        if len(times) < MAX_FAILURES:
            return 0.0
        return max(0.0, times[-MAX_FAILURES] + FAILURES_WITHIN_S - now)

    def failed(self, address: str, now: float) -> None:
        times = self._by_address.pop(address, [])
        self._by_address[address] = [*times, now][-MAX_FAILURES:]
        while len(self._by_address) > _MAX_ADDRESSES:
            self._by_address.popitem(last=False)

    def succeeded(self, address: str) -> None:
        self._by_address.pop(address, None)


def is_local(peer: str, headers: Mapping[str, str]) -> bool:
    """Whether a request comes from a process of this host that means this host.

    A proxy on this host that names neither itself nor its client looks the same.
    """
    if not _is_loopback_address(peer) or any(name in headers for name in _FORWARDED):
        return False
    host = host_of(headers.get("host", ""))
    return host == "localhost" or _is_loopback_address(host)


def is_same_site(headers: Mapping[str, str]) -> bool:
    """Whether a request that changes something was made by a page of this server, or by no page at all."""
    site = headers.get("sec-fetch-site", "none")
    origin = headers.get("origin")
    if site == "same-origin":
        return True  # compared by the browser with the URL that it shows; a proxy may have rewritten Host
    if site != "none":
        return False
    return origin is None or origin.partition("://")[2].lower() == headers.get("host", "").lower()


def is_equal(given: str, wanted: str) -> bool:
    """Compare secrets in constant time. Nothing equals an empty one."""
    return bool(wanted) and hmac.compare_digest(secret_bytes(given), secret_bytes(wanted))


def host_of(authority: str) -> str:
    """The host of a Host header, without its port."""
    if authority.startswith("["):
        return authority[1:].partition("]")[0]
    return authority.partition(":")[0].lower()


def retry_after(wait_s: float) -> str:
    """The value of a Retry-After header."""
    return str(max(1, math.ceil(wait_s)))


def _is_loopback_address(text: str) -> bool:
    try:
        found = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(found, "ipv4_mapped", None)
    return (mapped or found).is_loopback


def _digest(token: str) -> bytes:
    return hashlib.sha256(secret_bytes(token)).digest()

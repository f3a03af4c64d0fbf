# SPDX-License-Identifier: Apache-2.0
"""Signing and verification of HTTP requests with the cluster's key; a core without I/O.

One header has the signer, the time, a random number, the digest of the body, and the HMAC over all of that
with the method and the path (with its query). It can be checked before a byte of the body is read. A repeated
request, or one that is too old, is refused; the memory for that is bounded. The instants are
of the wall clock, because they are compared between hosts.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from mooncake.errors import AccessDenied
from mooncake.security.keys import Credential, KeyRing
from mooncake.security.principal import MAX_TENANT_BYTES, Principal, Role

HEADER = "X-Mooncake-Signature"
WINDOW_S = 30.0
"""Largest difference of two hosts' clocks, including the duration of a request."""
MAX_REMEMBERED = 1 << 17
"""Limit of remembered requests of one role and tenant."""
MAX_HEADER_BYTES = 1024
_NONCE_BYTES = 16


def digest_of(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()


class Signer:
    """Signer of requests with ``credential``; ``random_bytes(n)`` and ``wall()`` are passed in."""

    def __init__(
        self, credential: Credential, random_bytes: Callable[[int], bytes], wall: Callable[[], float]
    ) -> None:
        self._credential = credential
        self._random_bytes = random_bytes
        self._wall = wall

    def headers(self, method: str, path: str, body: bytes = b"") -> dict[str, str]:
        """Headers to send with the request. ``path`` is as it is sent, with its query."""
        one, at = self._credential, f"{self._wall():.3f}"
        nonce, digest = self._random_bytes(_NONCE_BYTES).hex(), digest_of(body).hex()
        fields = [one.role.value, one.tenant, one.key_id.hex(), at, nonce, digest]
        fields.append(_mac(one, method, path, fields).hex())
        return {HEADER: base64.urlsafe_b64encode(json.dumps(fields).encode()).decode()}


@dataclass
class _Remembered:
    """Remembered requests of one role and tenant."""

    seen: set[str] = field(default_factory=set)
    order: deque[tuple[float, float, str]] = field(default_factory=deque)
    """Time of arrival, time of signature and random number of each."""
    floor: float = 0.0
    """Requests signed before this instant are refused, because some of them are no longer remembered."""


class Verifier:
    """Verifier of requests against ``keys``. ``wall()`` is passed in.

    Requests are remembered separately for each role and tenant, so that a client which sends more than can be
    remembered has only its own requests refused.
    """

    def __init__(self, keys: KeyRing, wall: Callable[[], float]) -> None:
        self._keys = keys
        self._wall = wall
        self._remembered: dict[Principal, _Remembered] = {}

    def check(self, header: str | None, method: str, path: str) -> tuple[Principal, bytes]:
        """Return the signer, and the digest that the body must have (``digest_of``).

        Raises:
            AccessDenied: no signature, not of this cluster, of another request, too old, or repeated.
        """
        if not header:
            raise AccessDenied(f"not authenticated: sign requests with the cluster's key ({HEADER})")
        fields = _parse_header(header)
        role, tenant, key_id, at, nonce, digest, mac = fields
        try:
            if role not in [one.value for one in Role] or len(tenant.encode()) > MAX_TENANT_BYTES:
                raise ValueError  # same as ``encode`` raises for half a surrogate pair
            credential = self._keys.find(Role(role), tenant, bytes.fromhex(key_id))
            signed_at, digest_bytes, given = float(at), bytes.fromhex(digest), bytes.fromhex(mac)
        except ValueError:
            raise AccessDenied("the signature is malformed") from None
        if credential is None:
            raise AccessDenied(
                "not authenticated: the key is not (any longer) of this cluster, or not of that role"
            )
        if not hmac.compare_digest(_mac(credential, method, path, fields[:-1]), given):
            raise AccessDenied("the signature is not that of this request")
        principal = Principal(credential.role, credential.tenant)
        self._once(principal, signed_at, nonce)
        return principal, digest_bytes

    def _once(self, principal: Principal, signed_at: float, nonce: str) -> None:
        now = self._wall()
        if not abs(now - signed_at) <= WINDOW_S:
            raise AccessDenied(
                f"the request was signed {now - signed_at:.0f} s ago; at most {WINDOW_S:.0f} s are allowed: "
                "do the clocks of both hosts agree?"
            )
        known = self._remembered.setdefault(principal, _Remembered())
        # Entries are in the order of arrival. Requests signed more than a window in the future are refused,
        # so one that arrived two windows ago can't be accepted again.
        while known.order and known.order[0][0] < now - 2 * WINDOW_S:
            known.seen.discard(known.order.popleft()[2])
        if nonce in known.seen:
            raise AccessDenied("the request was received before")
        if signed_at <= known.floor:
            raise AccessDenied("the request is older than those remembered; sign it again")
        if len(known.order) >= MAX_REMEMBERED:
            _, forgotten_at, forgotten = known.order.popleft()
            known.seen.discard(forgotten)
            known.floor = max(known.floor, forgotten_at)
        known.seen.add(nonce)
        known.order.append((now, signed_at, nonce))

    @property
    def num_remembered(self) -> int:
        return sum(len(one.seen) for one in self._remembered.values())


def _parse_header(header: str) -> list[str]:
    try:
        if len(header) > MAX_HEADER_BYTES:
            raise ValueError
        fields = json.loads(base64.b64decode(header, altchars=b"-_", validate=True))
    except (binascii.Error, ValueError, RecursionError):
        raise AccessDenied("the signature is malformed") from None
    if (
        not isinstance(fields, list)
        or len(fields) != 7
        or not all(isinstance(field, str) for field in fields)
    ):
        raise AccessDenied("the signature is malformed")
    return fields


def _mac(credential: Credential, method: str, path: str, fields: list[str]) -> bytes:
    signed = json.dumps(["mooncake-http-1", method.upper(), path, *fields]).encode()
    return hmac.digest(credential.key, signed, "sha256")

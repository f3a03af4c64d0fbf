# SPDX-License-Identifier: Apache-2.0
"""The key for operators' calls over HTTP: one check, shared by all servers.

Without a key set such calls are refused, not allowed: an unconfigured server changes nothing for
unauthenticated clients. An authenticated node or administrator of the cluster needs no key in addition.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass

from mooncake.security.principal import NODES_AND_ADMINS, Principal


@dataclass(frozen=True)
class KeyRefusal:
    """Reason of a refused call: an HTTP status, a code for programs, text for people."""

    status: int
    code: str
    message: str


class AdminKey:
    """``key`` is what callers must send as ``X-API-Key``, or as ``Authorization: Bearer``; "" refuses all."""

    def __init__(self, key: str) -> None:
        self._key = key.encode()

    def __repr__(self) -> str:
        return f"<AdminKey {'set' if self._key else 'not set'}>"

    def matches(self, headers: Mapping[str, str]) -> bool:
        """Whether the request has the key. False when no key is set."""
        return bool(self._key) and hmac.compare_digest(_given(headers).encode(), self._key)

    def refusal(self, headers: Mapping[str, str], principal: Principal | None = None) -> KeyRefusal | None:
        """Check a call; None allows it. ``principal`` is that of the cluster credential, if any."""
        if principal is not None and not principal.is_open and principal.level in NODES_AND_ADMINS:
            return None
        if self.matches(headers):
            return None
        if not self._key:
            message = (
                "this call is for operators, and no key is set here: start the server with ADMIN_API_KEY "
                "(or --admin-api-key) set"
            )
            return KeyRefusal(403, "admin_key_not_set", message)
        what = "is wrong" if _given(headers) else "is missing"
        return KeyRefusal(401, "invalid_api_key", f"the header X-API-Key {what}; nothing was done")


def _given(headers: Mapping[str, str]) -> str:
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    is_bearer = scheme.lower() == "bearer"
    return headers.get("x-api-key", "") or (bearer.strip() if is_bearer else "")

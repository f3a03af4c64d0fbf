# SPDX-License-Identifier: Apache-2.0
"""Authentication of HTTP requests, by certificate, signature or key: ASGI middleware, and the client's side.

The middleware reads nothing of a request's body until the header has authenticated the sender,
and passes a body on only if its digest is the signed one. The principal is in the request's scope, under
``PRINCIPAL``; the server puts the peer's certificate there under ``CERTIFICATE`` (``mooncake.http.server``).

The key for operators' calls is one check, shared by all servers. Without a key set such calls are refused,
not allowed: an unconfigured server changes nothing for unauthenticated clients. An authenticated node or
administrator of the cluster needs no key in addition.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ssl
from collections.abc import Awaitable, Callable, Collection, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from mooncake.errors import AccessDenied
from mooncake.log import get_logger
from mooncake.security.identity import Identity, process_identity
from mooncake.security.principal import (
    EVERYBODY,
    NODES_AND_ADMINS,
    OPEN,
    Level,
    Principal,
    Role,
    principal_of,
)
from mooncake.security.request_signature import HEADER

log = get_logger(__name__)

PRINCIPAL = "mooncake.principal"
CERTIFICATE = "mooncake.certificate"

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class HttpAuth:
    """Middleware that admits only principals of ``levels`` to ``app``.

    Args:
        identity: the required credentials; by default those of the process's identity.
        open_paths: paths that need no authentication.
        api_key: key with which a request counts as an administrator's (``AdminKey``); empty for none.
    """

    def __init__(
        self,
        app: Callable[[Scope, Receive, Send], Awaitable[None]],
        identity: Identity | None = None,
        levels: Collection[Level] = EVERYBODY,
        open_paths: Collection[str] = (),
        api_key: str = "",
    ) -> None:
        self._app = app
        self._identity = identity or process_identity()
        self._verifier = self._identity.verifier()
        self._levels = levels
        self._open_paths = open_paths
        self._admin_key = AdminKey(api_key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._open_paths:
            await self._app(scope, receive, send)
            return
        try:
            scope[PRINCIPAL], digest = self._principal(scope)
        except AccessDenied as error:
            log.debug("request_refused", path=scope["path"], reason=str(error))
            await _refuse(send, 401, str(error))
            return
        principal = scope[PRINCIPAL]
        if not principal.is_open and principal.level not in self._levels:
            await _refuse(
                send,
                403,
                f"only for {', '.join(sorted(self._levels))}; the credential is that of {principal}",
            )
            return
        await self._app(scope, receive if digest is None else _checked(receive, digest), send)

    def _principal(self, scope: Scope) -> tuple[Principal, bytes | None]:
        """The request's principal, and the digest that the body must have; raises AccessDenied."""
        if self._identity.is_open:
            return OPEN, None
        headers = {key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]}
        if self._admin_key.matches(headers):
            return Principal(Role.ADMIN), None
        certified = principal_of(scope.get(CERTIFICATE)) if self._identity.has_tls else None
        if self._verifier is None:
            assert certified is not None
            return certified, None
        name = HEADER.lower().encode()
        header = next((value for key, value in scope["headers"] if key == name), b"")
        query = scope.get("query_string", b"")
        path = (scope.get("raw_path") or scope["path"].encode()) + (b"?" + query if query else b"")
        signed, digest = self._verifier.check(
            header.decode("latin-1"), scope["method"], path.decode("latin-1")
        )
        if certified is not None and certified not in (signed, Principal(Role.CLIENT)):
            raise AccessDenied(f"its certificate is that of {certified}, its key that of {signed}")
        return signed, digest


def _checked(receive: Receive, digest: bytes) -> Receive:
    """Pass the body on; when its digest is not the signed one, disconnect in place of its end."""
    seen = hashlib.sha256()

    async def checked() -> Message:
        message = await receive()
        if message["type"] == "http.request":
            seen.update(message.get("body", b""))
            if not message.get("more_body", False) and not hmac.compare_digest(seen.digest(), digest):
                return {"type": "http.disconnect"}
        return message

    return checked


def challenge(status: int) -> dict[str, str]:
    """Headers of an answer of that status: a 401 names the credential's scheme (RFC 9110, section 11.6.1)."""
    return {"WWW-Authenticate": "Bearer"} if status == 401 else {}


async def _refuse(send: Send, status: int, reason: str) -> None:
    body = reason.encode()
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", b"%d" % len(body))]
    headers.append((b"connection", b"close"))
    headers += [(name.lower().encode(), value.encode()) for name, value in challenge(status).items()]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class HttpClientAuth:
    """A client's side: URL scheme and headers of requests as ``identity`` (by default the process's).

    Args:
        is_plain: no TLS with any identity, for foreign engines, which have no certificate of the cluster.
    """

    def __init__(self, identity: Identity | None = None, is_plain: bool = False) -> None:
        identity = identity or process_identity()
        self._signer = identity.signer()
        self.tls: ssl.SSLContext | None = None if is_plain else identity.client_tls

    def url(self, address: str, path: str) -> str:
        """``address``: ``host:port``."""
        return f"{'https' if self.tls is not None else 'http'}://{address}{path}"

    def headers(self, method: str, path: str, body: bytes = b"") -> dict[str, str]:
        """Headers that authenticate the request; ``path`` includes its query, as it is sent."""
        return {} if self._signer is None else self._signer.headers(method, path, body)


@dataclass(frozen=True)
class KeyRefusal:
    """Reason of a refused call: an HTTP status, a code for programs, text for people."""

    status: int
    code: str
    message: str


class AdminKey:
    """``key`` is what callers must send as ``X-API-Key``, or as ``Authorization: Bearer``; "" refuses all."""

    def __init__(self, key: str) -> None:
        self._key = secret_bytes(key)

    def __repr__(self) -> str:
        return f"<AdminKey {'set' if self._key else 'not set'}>"

    def matches(self, headers: Mapping[str, str]) -> bool:
        """Whether the request has the key. False when no key is set."""
        given = _given_key(headers)
        forms = [secret_bytes(given)]
        with contextlib.suppress(UnicodeEncodeError):
            # ASGI servers read a header's bytes as Latin-1, others as UTF-8.
            forms.append(given.encode("latin-1"))
        return bool(self._key) and any(hmac.compare_digest(form, self._key) for form in forms)

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
        what = "is wrong" if _given_key(headers) else "is missing"
        return KeyRefusal(401, "invalid_api_key", f"the header X-API-Key {what}; nothing was done")


def secret_bytes(text: str) -> bytes:
    """Bytes of a key or a token, to compare or to hash.

    A header or a variable that is not UTF-8 is read as text with surrogates, and JSON may have half of a
    surrogate pair: such a secret is a wrong one, and no error.
    """
    return text.encode(errors="surrogatepass")


def _given_key(headers: Mapping[str, str]) -> str:
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    is_bearer = scheme.lower() == "bearer"
    return headers.get("x-api-key", "") or (bearer.strip() if is_bearer else "")

# SPDX-License-Identifier: Apache-2.0
"""The console's pages, their twins in JSON, login and admin actions, for a gateway or for a store alone.

Owns the routes and the rules of every answer: no script or style but the package's own, no frame, no cache
for data, no answer to a visitor that ``access.py`` did not admit. A page is one HTML file without data; its
script fetches the JSON twin, so that a person and a program see the same. Prompts and answers are not among
the data at all.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Awaitable, Callable
from importlib import resources
from typing import Any, Protocol

import msgspec
from fastapi import FastAPI, Request, Response
from prometheus_client import Counter
from starlette.exceptions import HTTPException

from mooncake import clock, metrics
from mooncake.console import access
from mooncake.console.access import ConsoleSession, ConsoleSessions, LoginFailures, Visitor
from mooncake.errors import MooncakeError
from mooncake.http.server import BodyTooLarge, read_body
from mooncake.log import get_logger
from mooncake.security.http_auth import challenge

log = get_logger(__name__)

_logins = Counter(
    "mooncake_console_logins",
    "Logins to the console, by outcome: admin, client, refused, or throttled after too many wrong keys.",
    ["outcome"],
    registry=metrics.registry,
)
_actions = Counter(
    "mooncake_console_actions",
    "Admin actions through the console, by action and by whether they were done.",
    ["action", "outcome"],
    registry=metrics.registry,
)

MAX_BODY_BYTES = 16 << 10
_MASTER_COUNTS_S = 86_400.0

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}

GATEWAY_VIEWS = ("overview", "cluster", "requests", "request", "store", "sessions", "key")
STORE_VIEWS = ("store", "key")
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}

Identify = Callable[[str], Visitor | None]
"""The visitor whose key this is; None: the key is not known."""


class Act(Protocol):
    """Carries out an admin action; returns a sentence about the outcome. Raises ConsoleRefusal."""

    async def __call__(self, visitor: Visitor, action: str, fields: dict[str, Any]) -> str: ...


class ConsoleRefusal(Exception):
    """An answer other than 200."""

    def __init__(self, status: int, code: str, message: str, wait_s: float = 0.0) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.wait_s = status, code, message, wait_s

    def response(self) -> Response:
        headers = challenge(self.status)
        if self.wait_s:
            headers["Retry-After"] = access.retry_after(self.wait_s)
        return json_response({"error": {"code": self.code, "message": self.message}}, self.status, headers)


class Gate:
    """Admits visitors, by session, by key, or because they are processes of this host.

    ``has_readers``: whether processes of this host may read without a key.
    """

    def __init__(self, identify: Identify, has_readers: bool = True) -> None:
        self._identify, self._has_readers = identify, has_readers
        self._sessions = ConsoleSessions(lambda: secrets.token_urlsafe(32))
        self._failures = LoginFailures()
        self._reader_csrf = secrets.token_urlsafe(32)

    def visitor(self, http: Request) -> Visitor:
        """Raises ConsoleRefusal, 401 or 429."""
        return self._admitted(http)[0]

    def session(self, http: Request) -> tuple[Visitor, str]:
        """The visitor, and the value that its changes must carry."""
        visitor, session = self._admitted(http)
        return visitor, self._reader_csrf if session is None else session.csrf

    def poster(self, http: Request) -> Visitor:
        """The visitor of a request with a body, which no page of a foreign site can have made."""
        visitor, session = self._admitted(http)
        if session is None and visitor.kind != "reader":
            return visitor  # a program: its key is in a header
        wanted = self._reader_csrf if session is None else session.csrf
        given = http.headers.get(access.CSRF_HEADER, "")
        if not access.is_same_site(http.headers) or not access.is_equal(given, wanted):
            raise ConsoleRefusal(
                403, "csrf", f"the header {access.CSRF_HEADER} is missing or wrong; nothing was done"
            )
        return visitor

    def login(self, http: Request, key: str) -> tuple[str, Visitor]:
        """Begin a session; returns its token. Raises ConsoleRefusal."""
        if not access.is_same_site(http.headers):
            raise ConsoleRefusal(403, "csrf", "a login comes from the console's own page")
        visitor = self._checked(http, key)
        token, _ = self._sessions.begin(visitor, clock.monotonic())
        _logins.labels(visitor.kind).inc()
        log.info("console_login", visitor=visitor.kind, client=visitor.name, peer=_peer(http))
        return token, visitor

    def logout(self, http: Request) -> None:
        self._sessions.end(http.cookies.get(access.COOKIE, ""))

    def _admitted(self, http: Request) -> tuple[Visitor, ConsoleSession | None]:
        token = http.cookies.get(access.COOKIE, "")
        session = self._sessions.find(token, clock.monotonic()) if token else None
        if session is not None:
            if self._identify(session.visitor.key) == session.visitor:
                return session.visitor, session
            self._sessions.end(token)  # its key was withdrawn or has changed hands
        scheme, _, bearer = http.headers.get("authorization", "").partition(" ")
        key = http.headers.get("x-api-key", "") or (bearer.strip() if scheme.lower() == "bearer" else "")
        if key:
            return self._checked(http, key), None
        if self._has_readers and access.is_local(_peer(http), http.headers):
            return Visitor("reader"), None
        raise ConsoleRefusal(401, "login_required", "log in with a client's key or the admin key")

    def _checked(self, http: Request, key: str) -> Visitor:
        """The visitor of a key. Wrong keys of one address are counted, and soon refused unseen."""
        peer, now = _peer(http), clock.monotonic()
        wait_s = self._failures.wait_s(peer, now)
        if wait_s > 0:
            _logins.labels("throttled").inc()
            raise ConsoleRefusal(429, "too_many_failures", "too many wrong keys from this address", wait_s)
        visitor = self._identify(key) if key else None
        if visitor is None:
            self._failures.failed(peer, now)
            _logins.labels("refused").inc()
            log.warning("console_login_refused", peer=peer)
            raise ConsoleRefusal(401, "invalid_api_key", "this key is not known here")
        self._failures.succeeded(peer)
        return visitor


# --- routes of every console


def add_frame(app: FastAPI, gate: Gate, views: tuple[str, ...], start: str) -> None:
    """Add the pages without data, their scripts and styles, login and logout."""
    files = assets()

    @app.get("/", include_in_schema=False)
    async def root(http: Request) -> Response:
        """Send browsers to the console."""
        if "text/html" not in http.headers.get("accept", ""):
            raise HTTPException(404, "Not Found")
        return Response(status_code=307, headers={**HEADERS, "Location": "/console"})

    @app.get("/console", include_in_schema=False)
    async def first() -> Response:
        """Send browsers to the first page."""
        return Response(status_code=307, headers={**HEADERS, "Location": f"/console/{start}"})

    async def page(http: Request) -> Response:
        return asset_response(http, *files["index.html"])

    for view in views:
        app.add_api_route(f"/console/{view}", page, methods=["GET"], include_in_schema=False)

    async def asset(http: Request) -> Response:
        return asset_response(http, *files[http.url.path.rpartition("/")[2]])

    for name in files:
        app.add_api_route(f"/console/static/{name}", asset, methods=["GET"], include_in_schema=False)

    @app.get("/console/session.json")
    async def session(http: Request) -> Response:
        """The visitor, what it may see and do, and the value that its changes must carry."""

        async def found() -> Any:
            visitor, csrf = gate.session(http)
            return {
                "visitor": visitor.kind,
                "name": visitor.name,
                "views": views if visitor.sees_all else _CLIENT_VIEWS,
                "may_act": visitor.kind == "admin",
                "csrf": csrf,
            }

        return await answer_with(found())

    @app.post("/console/session")
    async def login(http: Request) -> Response:
        """Begin a session with the key in the body, `{"key": ...}`; the answer sets a cookie."""

        async def found() -> Response:
            key = (await read_fields(http)).get("key")
            token, visitor = gate.login(http, key if isinstance(key, str) else "")
            secure = "; Secure" if http.url.scheme == "https" else ""
            cookie = f"{access.COOKIE}={token}; Path=/console; HttpOnly; SameSite=Strict{secure}"
            answer = json_response({"visitor": visitor.kind, "name": visitor.name})
            answer.headers["Set-Cookie"] = f"{cookie}; Max-Age={round(access.SESSION_S)}"
            return answer

        return await answer_with(found())

    @app.delete("/console/session")
    async def logout(http: Request) -> Response:
        """End the session."""
        gate.logout(http)
        answer = json_response({})
        answer.headers["Set-Cookie"] = (
            f"{access.COOKIE}=; Path=/console; HttpOnly; SameSite=Strict; Max-Age=0"
        )
        return answer


def add_actions(app: FastAPI, gate: Gate, act: Act) -> None:
    """Add what an administrator can do."""

    @app.post("/console/actions/{action}")
    async def action(http: Request, action: str) -> Response:
        """Drain, add or remove an instance; pin or unpin an object; drain a segment. Needs the admin key."""

        async def found() -> Any:
            visitor = gate.poster(http)
            if visitor.kind != "admin":
                raise ConsoleRefusal(
                    403, "not_admin", "this takes the admin key: log in with it; nothing was done"
                )
            label = action if action in ACTIONS else "unknown"
            try:
                message = await act(visitor, action, await read_fields(http))
            except (ConsoleRefusal, MooncakeError):
                _actions.labels(label, "refused").inc()
                raise
            _actions.labels(label, "done").inc()
            log.info("console_action", action=action, peer=_peer(http), outcome=message)
            return {"message": message}

        return await answer_with(found())


INSTANCE_ACTIONS = {"drain": "/instances/drain", "add": "/instances/add", "remove": "/instances/remove"}
STORE_ACTIONS = ("pin", "unpin", "drain_segment")
ACTIONS = (*INSTANCE_ACTIONS, *STORE_ACTIONS)
_CLIENT_VIEWS = ("overview", "requests", "request", "sessions")


# --- answers


async def answer_with(found: Awaitable[Any]) -> Response:
    """The JSON of a twin, or its refusal."""
    try:
        answer = await found
    except ConsoleRefusal as refusal:
        return refusal.response()
    except BodyTooLarge as error:
        return ConsoleRefusal(413, error.code, str(error)).response()
    except MooncakeError as error:
        return ConsoleRefusal(503, error.code, str(error), 1.0).response()
    return answer if isinstance(answer, Response) else json_response(answer)


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    fields = {
        **HEADERS,
        "Cache-Control": "no-store",
        "Vary": "Cookie, Authorization, X-API-Key",
        **(headers or {}),
    }
    return Response(msgspec.json.encode(content), status, fields, media_type="application/json")


def assets() -> dict[str, tuple[bytes, str, str]]:
    """Content, type and tag of each file of the pages, by name."""
    found: dict[str, tuple[bytes, str, str]] = {}
    for file in resources.files("mooncake.console").joinpath("static").iterdir():
        kind = _TYPES.get(file.name.rpartition(".")[2])
        if kind is not None:
            content = file.read_bytes()
            found[file.name] = (content, kind, f'"{hashlib.sha256(content).hexdigest()[:16]}"')
    return found


def asset_response(http: Request, content: bytes, kind: str, tag: str) -> Response:
    headers = {**HEADERS, "Cache-Control": "no-cache", "ETag": tag}
    if http.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(content, headers={**headers, "Content-Type": f"{kind}; charset=utf-8"})


async def read_fields(http: Request) -> dict[str, Any]:
    """The JSON object in a body. Raises ConsoleRefusal, BodyTooLarge."""
    if http.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise ConsoleRefusal(415, "invalid_content_type", "the body must be application/json")
    try:
        found = json.loads(await read_body(http, MAX_BODY_BYTES))
    except (ValueError, RecursionError) as error:
        raise ConsoleRefusal(400, "invalid_json", "the body is not valid JSON") from error
    if not isinstance(found, dict):
        raise ConsoleRefusal(400, "invalid_json", "the body is not a JSON object")
    return found


def named(http: Request, field: str) -> str:
    value = http.query_params.get(field, "")
    if not 0 < len(value) <= 1024 or not value.isprintable():
        raise ConsoleRefusal(400, "invalid_value", f"{field} is missing, too long or not printable")
    return value


def text_of(fields: dict[str, Any], field: str) -> str:
    value = fields.get(field)
    if not isinstance(value, str) or not 0 < len(value) <= 1024:
        raise ConsoleRefusal(400, "invalid_value", f"{field} must be a text of at most 1024 characters")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair, written as an escape
        raise ConsoleRefusal(400, "invalid_value", f"{field} is not valid Unicode") from error
    return value


def number_of(text: str | None, otherwise: float) -> float:
    """A positive number in a query, at most a day; ``otherwise`` where it is left out."""
    if text is None:
        return otherwise
    if not re.fullmatch(r"\d{1,9}(\.\d{1,9})?", text):
        raise ConsoleRefusal(400, "invalid_argument", f"{text[:40]!r} is not a number")
    return min(float(text), _MASTER_COUNTS_S)


def operator(visitor: Visitor) -> Visitor:
    if not visitor.sees_all:
        raise ConsoleRefusal(
            403, "not_admin", "a client's key shows its own requests; this page takes the admin key"
        )
    return visitor


def _peer(http: Request) -> str:
    return http.client.host if http.client is not None else ""


def message_of(answer: Any) -> str:
    error = answer.get("error") if isinstance(answer, dict) else None
    return str(error.get("message", "it failed")) if isinstance(error, dict) else "it failed"

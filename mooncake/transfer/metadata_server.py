# SPDX-License-Identifier: Apache-2.0
"""The small HTTP metadata service: descriptors by name, which expire when their owners stop putting them.

Keeps everything in memory. A restart loses nothing for long, because owners put their entries
again; a crashed owner leaves nothing for long, because entries put with ``ttl_s`` expire. The answers are
those of the metadata service that programs written for the existing package expect.

Where peers are authenticated, an entry belongs to the client that put it: another one can't replace or
remove it. The number and size of entries are bounded, in total and per client. Programs of the existing
package put entries without a time to live and only once, so such entries stay until they are removed.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Annotated

from fastapi import FastAPI, Query, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from mooncake import clock
from mooncake.config import Port
from mooncake.errors import Refusal
from mooncake.http import server as web
from mooncake.http.server import HttpServer, listen
from mooncake.log import get_logger
from mooncake.security import OPEN, HttpAuth, Identity, Principal, Role, check_address, process_identity
from mooncake.security.http_auth import PRINCIPAL

log = get_logger(__name__)

MAX_VALUE_BYTES = 16 << 20
MAX_KEY_BYTES = 1024
MAX_ENTRIES = 1 << 16
MAX_OWNED = 1 << 12
"""Limit of entries for one owner that is a client."""
MAX_BYTES = 256 << 20
"""Limit of all entries together."""
ENTRY_BYTES = 256
"""Bytes that an entry takes in addition to its key and value."""


@dataclass(frozen=True)
class MetadataSettings:
    """Keep the addresses of transfer engines."""

    host: str = "127.0.0.1"
    "Address to listen on."

    port: Port = 8080
    "Port of the HTTP server; 0 takes a free one."


async def serve(settings: MetadataSettings) -> None:
    """Run the service until cancelled.

    Raises:
        AddressInUse: the port is taken.
        InvalidArgument: other hosts can reach it, and no authentication is configured.
    """
    identity = process_identity()
    check_address(settings.host, identity)
    tls = identity.server_tls
    server = HttpServer(make_app(identity=identity), listen(settings.host, settings.port), tls=tls)
    try:
        await server.start()
        log.info(
            "ready", role="metadata", address=f"{'https' if tls else 'http'}://{settings.host}:{server.port}"
        )
        await server.wait()
    finally:
        await server.close()


@dataclass(frozen=True, slots=True)
class MetadataEntry:
    """Value of a key, its owner and its expiry; ``number`` distinguishes it from earlier entries."""

    value: bytes
    owner: str
    until: float | None
    number: int


class MetadataEntries:
    """Keys, values, owners and expiry instants; bounded.

    An owner is the authenticated name of the client that put an entry; "" means unowned. Only the owner and
    members that serve the cluster (``rules_all``) may replace or remove an entry before it expires.
    """

    def __init__(self) -> None:
        self._entries: dict[str, MetadataEntry] = {}
        self._expiring: list[tuple[float, int, str]] = []
        """Heap of expiry instants. One of a replaced or removed entry is skipped when it is due."""
        self._by_owner: dict[str, int] = {}
        self._num_bytes = 0
        self._number = 0

    def __repr__(self) -> str:
        return f"<MetadataEntries {len(self._entries)}>"

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def put(
        self,
        key: str,
        value: bytes,
        ttl_s: float | None,
        now: float,
        owner: str = "",
        rules_all: bool = True,
    ) -> Refusal | None:
        """Put an entry; returns a refusal if it was not put: ``not_owner``, or ``full``."""
        self._expire(now)
        old = self._entries.get(key)
        if old is not None and not rules_all and old.owner != owner:
            return Refusal("not_owner", f"{key} belongs to another client; it is free when it has expired")
        freed = 0 if old is None else _size_of(key, old.value)
        if self._num_bytes - freed + _size_of(key, value) > MAX_BYTES:
            return Refusal("full", f"all entries together have at most {MAX_BYTES} bytes")
        if old is None and len(self._entries) >= MAX_ENTRIES:
            return Refusal("full", f"there are at most {MAX_ENTRIES} entries")
        is_more = old is None or old.owner != owner
        if is_more and not rules_all and self._by_owner.get(owner, 0) >= MAX_OWNED:
            return Refusal("full", f"one owner has at most {MAX_OWNED} entries")
        if old is not None:
            self._forget(key)
        self._number += 1
        until = None if ttl_s is None else now + ttl_s
        self._entries[key] = MetadataEntry(value, owner, until, self._number)
        self._by_owner[owner] = self._by_owner.get(owner, 0) + 1
        self._num_bytes += _size_of(key, value)
        if until is not None:
            heapq.heappush(self._expiring, (until, self._number, key))
            if len(self._expiring) > 2 * len(self._entries) + 64:
                self._rebuild()
        return None

    def get(self, key: str, now: float) -> bytes | None:
        self._expire(now)
        entry = self._entries.get(key)
        return None if entry is None else entry.value

    def remove(self, key: str, now: float, owner: str = "", rules_all: bool = True) -> bool | Refusal:
        """Remove an entry; False when there was none, a Refusal when it belongs to another client."""
        self._expire(now)
        entry = self._entries.get(key)
        if entry is None:
            return False
        if not rules_all and entry.owner != owner:
            return Refusal("not_owner", f"{key} belongs to another client")
        self._forget(key)
        return True

    def list(self, prefix: str, now: float) -> list[str]:
        self._expire(now)
        return sorted(key for key in self._entries if key.startswith(prefix))

    def _forget(self, key: str) -> None:
        entry = self._entries.pop(key)
        self._num_bytes -= _size_of(key, entry.value)
        left = self._by_owner[entry.owner] - 1
        if left:
            self._by_owner[entry.owner] = left
        else:
            del self._by_owner[entry.owner]

    def _expire(self, now: float) -> None:
        while self._expiring and self._expiring[0][0] <= now:
            _, number, key = heapq.heappop(self._expiring)
            entry = self._entries.get(key)
            if entry is not None and entry.number == number:
                self._forget(key)

    def _rebuild(self) -> None:
        """Rebuild the heap without the instants of entries that were put again."""
        self._expiring = [
            (entry.until, entry.number, key)
            for key, entry in self._entries.items()
            if entry.until is not None
        ]
        heapq.heapify(self._expiring)


def _size_of(key: str, value: bytes) -> int:
    return len(key) + len(value) + ENTRY_BYTES


def _owner_of(request: Request) -> tuple[str, bool]:
    """Owner of an entry that this request puts, and whether it may change entries of every owner."""
    principal: Principal = request.scope.get(PRINCIPAL, OPEN)
    if principal.is_open:
        return "", True
    return str(principal), principal.role is not Role.CLIENT


def make_app(entries: MetadataEntries | None = None, identity: Identity | None = None) -> HttpAuth:
    """The service as an ASGI application, for clients that ``identity`` authenticates."""
    entries = MetadataEntries() if entries is None else entries
    app = FastAPI(title="Mooncake metadata", docs_url=None, redoc_url=None, openapi_url=None)

    @app.api_route("/metadata", methods=["GET", "PUT", "DELETE"])
    async def metadata(
        request: Request,
        key: str = "",
        ttl_s: Annotated[float | None, Query(gt=0, le=31_536_000)] = None,
    ) -> Response:
        """Read, replace or delete the value of a key; a value belongs to the credential that wrote it."""
        key = key.strip()
        if not key:
            return PlainTextResponse("metadata key is required", 400)
        if len(key.encode()) > MAX_KEY_BYTES:
            return PlainTextResponse(f"metadata key is longer than {MAX_KEY_BYTES} bytes", 400)
        now = clock.monotonic()
        if request.method == "GET":
            value = entries.get(key, now)
            if value is None:
                return PlainTextResponse("metadata not found", 404)
            return Response(value, media_type="application/json")
        owner, rules_all = _owner_of(request)
        if request.method == "DELETE":
            removed = entries.remove(key, now, owner, rules_all)
            if isinstance(removed, Refusal):
                return PlainTextResponse(str(removed), 403)
            if not removed:
                return PlainTextResponse("metadata not found", 404)
            return PlainTextResponse("metadata deleted")
        try:
            received = await web.read_body(request, MAX_VALUE_BYTES)
        except web.BodyTooLarge:
            return PlainTextResponse(f"metadata is larger than {MAX_VALUE_BYTES} bytes", 413)
        except web.BodyBudgetExceeded as error:
            return PlainTextResponse(str(error), 503)
        refusal = entries.put(key, received, ttl_s, now, owner, rules_all)
        if refusal is not None:
            return PlainTextResponse(str(refusal), 403 if refusal.code == "not_owner" else 507)
        return PlainTextResponse("metadata updated")

    @app.get("/metadata/list")
    async def listing(prefix: str = "") -> Response:
        """List the keys with a prefix."""
        return JSONResponse(entries.list(prefix, clock.monotonic()))

    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> Response:
        """Whether it serves."""
        return PlainTextResponse("OK")

    return HttpAuth(app, identity, open_paths=("/health",))

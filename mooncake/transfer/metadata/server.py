"""The small HTTP metadata service: descriptors by name, gone when their owners stop putting them.

Keeps everything in memory. Nothing is lost for long by a restart, because owners put their entries
again; nothing stays for long after a crash, because entries put with ``ttl_s`` expire. The answers are
those of the metadata service that programs written for the existing package expect.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import FastAPI, Query, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from mooncake import clock
from mooncake.config import Port
from mooncake.errors import InvalidArgument
from mooncake.log import get_logger
from mooncake.transfer.tls import server_context
from mooncake.web import WebServer, listen

log = get_logger(__name__)

MAX_VALUE_BYTES = 16 << 20
MAX_KEY_BYTES = 1024


@dataclass(frozen=True)
class MetadataSettings:
    """Keep the addresses of transfer engines."""

    host: str = "127.0.0.1"
    "Address to listen on."

    port: Port = 8080
    "Port of the HTTP server; 0 takes a free one."

    tls_cert: str = ""
    "PEM file with the certificate to serve https with; empty serves http."

    tls_key: str = ""
    "PEM file with its private key, without a password."

    tls_ca: str = ""
    "PEM file with the authority of which clients must show a certificate."

    def __post_init__(self) -> None:
        files = {"tls_cert": self.tls_cert, "tls_key": self.tls_key, "tls_ca": self.tls_ca}
        for field, path in files.items():
            if any(files.values()) and not path:
                raise InvalidArgument(field, path, "the path of a PEM file, or none of the three")


async def serve(settings: MetadataSettings) -> None:
    """Run the service until cancelled.

    Raises:
        AddressInUse: the port is taken.
        InvalidArgument: a TLS file is not what it should be.
    """
    tls = server_context(settings) if settings.tls_cert else None
    server = WebServer(make_app(), listen(settings.host, settings.port), tls=tls)
    try:
        await server.start()
        log.info(
            "ready", role="metadata", address=f"{'https' if tls else 'http'}://{settings.host}:{server.port}"
        )
        await server.wait()
    finally:
        await server.close()


class Entries:
    """Keys, values and instants of expiry."""

    def __init__(self) -> None:
        self._entries: dict[str, tuple[bytes, float | None]] = {}

    def __repr__(self) -> str:
        return f"<Entries {len(self._entries)}>"

    def put(self, key: str, value: bytes, ttl_s: float | None, now: float) -> None:
        self._entries[key] = (value, None if ttl_s is None else now + ttl_s)

    def get(self, key: str, now: float) -> bytes | None:
        self._expire(now)
        entry = self._entries.get(key)
        return None if entry is None else entry[0]

    def remove(self, key: str, now: float) -> bool:
        self._expire(now)
        return self._entries.pop(key, None) is not None

    def list(self, prefix: str, now: float) -> list[str]:
        self._expire(now)
        return sorted(key for key in self._entries if key.startswith(prefix))

    def _expire(self, now: float) -> None:
        """A few thousand nodes at most, so looking at each is cheap."""
        gone = [key for key, (_, until) in self._entries.items() if until is not None and until <= now]
        for key in gone:
            del self._entries[key]


def make_app(entries: Entries | None = None) -> FastAPI:
    """The service as an ASGI application."""
    entries = Entries() if entries is None else entries
    app = FastAPI(title="Mooncake metadata", docs_url=None, redoc_url=None, openapi_url=None)

    @app.api_route("/metadata", methods=["GET", "PUT", "DELETE"])
    async def metadata(
        request: Request,
        key: str = "",
        ttl_s: Annotated[float | None, Query(gt=0, le=31_536_000)] = None,
    ) -> Response:
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
        if request.method == "DELETE":
            if not entries.remove(key, now):
                return PlainTextResponse("metadata not found", 404)
            return PlainTextResponse("metadata deleted")
        received = bytearray()
        async for part in request.stream():
            received += part
            if len(received) > MAX_VALUE_BYTES:
                return PlainTextResponse(f"metadata is larger than {MAX_VALUE_BYTES} bytes", 413)
        entries.put(key, bytes(received), ttl_s, now)
        return PlainTextResponse("metadata updated")

    @app.get("/metadata/list")
    async def listing(prefix: str = "") -> Response:
        return JSONResponse(entries.list(prefix, clock.monotonic()))

    @app.get("/health")
    async def health() -> Response:
        return PlainTextResponse("OK")

    return app

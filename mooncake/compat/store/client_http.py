# SPDX-License-Identifier: Apache-2.0
"""The HTTP side of a client: health and metrics, for load balancers and scrapers.

``/health`` (200 or 503), ``/metrics`` in Prometheus' format with the existing package's names beside ours,
``/metrics/summary`` in one line. Where the cluster has a credential, unauthenticated callers only get
``/health``.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from mooncake.compat.store.client_metrics import ClientMetrics
from mooncake.errors import AddressInUse
from mooncake.http.server import HttpServerThread, listen
from mooncake.metrics import CONTENT_TYPE, page
from mooncake.security import TRUSTED, HttpAuth, Identity, process_identity

STATES = ("healthy", "not_initialized", "master_unreachable")
"""States, by the number that ``health_check`` returns."""


class ClientHttpServer:
    """HTTP server in a thread of its own, until ``close``.

    Raises:
        AddressInUse: the port is in use.
    """

    def __init__(
        self,
        port: int,
        health: Callable[[], int],
        client_metrics: ClientMetrics,
        identity: Identity | None = None,
    ) -> None:
        identity = identity or process_identity()
        key = os.environ.get("ADMIN_API_KEY", "")
        app = HttpAuth(_app(health, client_metrics), identity, TRUSTED, open_paths=("/health",), api_key=key)
        try:
            listening = listen("0.0.0.0", port)
        except AddressInUse as error:
            raise AddressInUse(f"client_http_port {port} is in use; free it or choose another") from error
        self._server = HttpServerThread(app, listening, identity.server_tls)
        self.port = self._server.port

    def close(self) -> None:
        self._server.close()


def _app(health: Callable[[], int], client_metrics: ClientMetrics) -> Starlette:
    async def state(_: Request) -> Response:
        """Health of the client; 503 unless it is healthy."""
        code = await asyncio.to_thread(health)
        return JSONResponse({"status": STATES[code], "code": code}, 503 if code else 200)

    def metrics(_: Request) -> Response:
        """Metrics in the text format of Prometheus."""
        return Response(page() + client_metrics.page(), headers={"Content-Type": CONTENT_TYPE})

    def summary(_: Request) -> Response:
        """Counts and latencies of the client's operations, as text."""
        return PlainTextResponse(client_metrics.summary())

    def not_found(_: Request) -> Response:
        """404 with the paths that there are."""
        return PlainTextResponse("not found: /health, /metrics or /metrics/summary\n", 404)

    routes = {"/health": state, "/metrics": metrics, "/metrics/summary": summary, "/{path:path}": not_found}
    return Starlette(routes=[Route(path, handler) for path, handler in routes.items()])

"""The HTTP side of a client: is it well, and what did it do. For load balancers and scrapers.

``/health`` (200 or 503), ``/metrics`` in Prometheus' format with the existing package's names beside ours,
``/metrics/summary`` in one line.
"""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from mooncake.errors import AddressInUse
from mooncake.metrics import CONTENT_TYPE, page
from mooncake.store.compat.measures import Measures

STATES = ("healthy", "not_initialized", "master_unreachable")
"""By what ``health_check`` answers."""


class ClientEndpoint:
    """Serves until ``close``.

    Raises:
        AddressInUse: the port is taken.
    """

    def __init__(self, port: int, health: Callable[[], int], measures: Measures) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                _answer(self, health, measures)

            def log_message(self, format: str, *args: object) -> None:
                """Scrapes are not worth a line each."""

        try:
            self._server = ThreadingHTTPServer(("0.0.0.0", port), Handler)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise AddressInUse(f"client_http_port {port} is in use; free it or choose another") from error
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="store-http", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _answer(request: BaseHTTPRequestHandler, health: Callable[[], int], measures: Measures) -> None:
    path = request.path.partition("?")[0]
    status, kind = 200, "text/plain; charset=utf-8"
    if path == "/health":
        state = STATES[health()]
        body = json.dumps({"status": state}).encode()
        status, kind = 200 if state == STATES[0] else 503, "application/json"
    elif path == "/metrics":
        body, kind = page() + measures.page(), CONTENT_TYPE
    elif path == "/metrics/summary":
        body = measures.summary().encode()
    else:
        status, body = 404, b"not found: /health, /metrics or /metrics/summary\n"
    request.send_response(status)
    request.send_header("Content-Type", kind)
    request.send_header("Content-Length", str(len(body)))
    request.end_headers()
    request.wfile.write(body)

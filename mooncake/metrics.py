"""The process's metrics registry and the page that shows it.

A metric is declared beside the thing it measures, bound to ``registry``; this module only owns the
registry and its page. Names: ``mooncake_<room>_<what>_<unit>``, base units, ``_total`` for counters.
"""

from __future__ import annotations

import errno
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, disable_created_metrics, generate_latest, start_http_server
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from mooncake.errors import AddressInUse

disable_created_metrics()  # type: ignore[no-untyped-call]
registry = CollectorRegistry()

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
"""Prometheus text format 0.0.4, which every scraper reads."""


def page() -> bytes:
    """The metrics of this process as Prometheus text."""
    return generate_latest(registry)


def serve_metrics(host: str, port: int, tls: tuple[str, str, str] | None = None) -> tuple[WSGIServer, int]:
    """Serve ``/metrics`` from a thread, for roles that have no HTTP server of their own.

    Returns the server (call ``shutdown()`` on it) and its port; ``port`` 0 takes a free one. ``tls``: the
    files of a certificate, its key and the authority of which those who ask must show one.

    Raises:
        AddressInUse: the port is taken.
    """
    try:
        if tls is None:
            server, _ = start_http_server(port, addr=host, registry=registry)
        else:
            cert, key, authority = tls
            server, _ = start_http_server(
                port, host, registry, cert, key, client_cafile=authority, client_auth_required=True
            )
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise AddressInUse(f"metrics port {host}:{port} is in use; free it or choose another") from error
        raise
    return server, server.server_port

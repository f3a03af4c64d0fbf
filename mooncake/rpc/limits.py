# SPDX-License-Identifier: Apache-2.0
"""Limits of a server in connections, bytes and seconds, and the log of its refusals.

A server's connections are bounded by the files that its process may open, because a process without free
descriptors can't answer. Refusals are counted, and logged at most once a second for each reason.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter, Gauge

from mooncake.log import get_logger
from mooncake.metrics import registry
from mooncake.rpc.wire import MAX_BODY_BYTES

log = get_logger(__name__)

CROWDED_GREETING_S = 0.3
"""Time limit of a greeting when three quarters of the connections are taken."""
LOG_EVERY_S = 1.0

CONNECTIONS = Gauge(
    "mooncake_rpc_connections", "Connections that a server has now", ["server"], registry=registry
)
PENDING_BYTES = Gauge(
    "mooncake_rpc_pending_bytes",
    "Bytes of unfinished frames that a server keeps",
    ["server"],
    registry=registry,
)
REFUSED = Counter(
    "mooncake_rpc_refused_total",
    "Connections that a server refused or cut off, and requests that it refused, by reason",
    ["server", "reason"],
    registry=registry,
)


@dataclass(frozen=True)
class Limits:
    """Bounds on what unauthenticated and faulty clients can cost a server."""

    greeting_s: float = 10.0
    "Time from accepting a connection to the end of its greeting, including the TLS handshake."
    stall_s: float = 60.0
    "Time for one request to arrive, or replies to be taken, and a second more per MiB."
    max_connections: int = 0
    "0: what the process's limit of files has room for (``mooncake.file_limit``)."
    max_body_bytes: int = MAX_BODY_BYTES
    max_pending_bytes: int = 2 * MAX_BODY_BYTES
    "Bytes of unfinished frames of all connections together."
    splice_idle_s: float = 600.0
    "Idle time after which a connection that was forwarded to another server is closed."


class RefusalLog:
    """Log of what a server refused: counts each refusal in metrics, logs at most one a second per reason."""

    def __init__(self, server: str) -> None:
        self._server = server
        self._logged: dict[str, tuple[float, int]] = {}
        """Per reason: time of the last log line, and number of refusals since."""

    def add(self, event: str, reason: str, **fields: Any) -> None:
        """Record a refusal. ``reason`` is a metric label with few values; details go into ``fields``."""
        REFUSED.labels(self._server, reason).inc()
        now = time.monotonic()
        logged_at, num_more = self._logged.get(reason, (-LOG_EVERY_S, 0))
        if now - logged_at < LOG_EVERY_S:
            self._logged[reason] = logged_at, num_more + 1
            return
        self._logged[reason] = now, 0
        more = {"num_more": num_more} if num_more else {}
        log.warning(event, server=self._server, reason=reason, **fields, **more)

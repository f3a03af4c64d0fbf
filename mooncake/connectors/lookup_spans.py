# SPDX-License-Identifier: Apache-2.0
"""The spans of a connector inside another engine, in the trace of its request.

The engine hands over the headers of the request, if it traces any itself. The spans go to the collector that
the standard variables name, as the engine's own do; nothing is kept in its process.
"""

from __future__ import annotations

from collections.abc import Mapping

from mooncake import config
from mooncake.connectors.block_transfer import PendingLookup
from mooncake.tracing import (
    TracingSettings,
    install_tracing,
    process_tracing,
    read_traceparent,
    tracing_of,
)

SERVICE = "mooncake-connector"


def start_tracing(environment: Mapping[str, str]) -> None:
    """Send spans from this process where ``environment`` names a collector."""
    settings, _ = config.load(TracingSettings, {"requests": 0}, environment, config.named_file(environment))
    if settings.url and not process_tracing().is_on:
        install_tracing(tracing_of(settings))


def trace_lookup(headers: Mapping[str, str] | None, lookup: PendingLookup) -> None:
    """Add the span of a lookup that has just ended, if its request is traced."""
    tracing = process_tracing()
    if not headers or not tracing.is_on:
        return
    parent = read_traceparent(headers.get("traceparent", ""))
    if parent is None:
        return
    scope = tracing.begin(
        "store lookup", SERVICE, "", parent, blocks=lookup.num_wanted, found_blocks=lookup.num_blocks
    )
    scope.span.start_s -= lookup.seconds
    scope.end("lookup_failed" if lookup.has_failed else "")

# SPDX-License-Identifier: Apache-2.0
"""A collector of OpenTelemetry for tests: it takes OTLP over HTTP and keeps the spans."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass(frozen=True)
class CollectedSpan:
    """One span of a request to the collector."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    service: str
    kind: int
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


@dataclass
class Collector:
    """``status``: what the next requests are answered with, once ``is_answering`` is set."""

    url: str = ""
    status: int = 200
    is_answering: threading.Event = field(default_factory=threading.Event)
    spans: list[CollectedSpan] = field(default_factory=list)
    resources: list[dict[str, Any]] = field(default_factory=list)

    def of(self, trace_id: str) -> list[CollectedSpan]:
        return [span for span in self.spans if span.trace_id == trace_id]

    def take(self, content: bytes) -> None:
        for group in ExportTraceServiceRequest.FromString(content).resource_spans:
            resource = {one.key: one.value.string_value for one in group.resource.attributes}
            self.resources.append(resource)
            for span in (span for scope in group.scope_spans for span in scope.spans):
                attributes = {
                    one.key: getattr(one.value, one.value.WhichOneof("value") or "string_value")
                    for one in span.attributes
                }
                self.spans.append(
                    CollectedSpan(
                        span.trace_id.hex(),
                        span.span_id.hex(),
                        span.parent_span_id.hex(),
                        span.name,
                        resource["service.name"],
                        span.kind,
                        span.start_time_unix_nano,
                        span.end_time_unix_nano,
                        attributes,
                    )
                )


@contextlib.contextmanager
def collector() -> Iterator[Collector]:
    """A running collector at a free port of this host."""
    found = Collector()
    found.is_answering.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"]))
            found.is_answering.wait()
            if found.status == 200:
                assert self.path == "/v1/traces" and self.headers["Content-Type"] == "application/x-protobuf"
                found.take(content)
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(found.status)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *arguments: Any) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        found.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield found
        finally:
            server.shutdown()
            thread.join()

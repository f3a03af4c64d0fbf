# SPDX-License-Identifier: Apache-2.0
"""Sends spans to an OpenTelemetry collector, by OTLP over HTTP.

Owns the conversion to OpenTelemetry's objects and the report of a collector that does not take them. The
queue, which is bounded, the sending and the sampling are the SDK's, with its standard variables
(``OTEL_BSP_...``, ``OTEL_EXPORTER_OTLP_HEADERS``, ``OTEL_TRACES_SAMPLER``, ``OTEL_SERVICE_NAME``,
``OTEL_RESOURCE_ATTRIBUTES`` and others). Imported only where a collector is configured
(``--tracing-endpoint``), as the SDK takes a while to load.

Nothing waits for a collector: spans that it does not take in time are dropped and counted, and the log has
one line when it stops taking them and one when it begins again.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from opentelemetry import trace as otel
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.export import SpanExporter as OtelSpanExporter
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client import Counter

import mooncake
from mooncake import metrics
from mooncake.log import get_logger
from mooncake.tracing.spans import RequestSpans, Span, SpanContext

log = get_logger(__name__)

CLOSE_TIMEOUT_S = 2.0

_spans = Counter(
    "mooncake_tracing_spans",
    "Spans by what became of them: exported, failed where the collector did not take them, or dropped where "
    "the queue had no room.",
    ["outcome"],
    registry=metrics.registry,
)

_KINDS = {
    "internal": otel.SpanKind.INTERNAL,
    "server": otel.SpanKind.SERVER,
    "client": otel.SpanKind.CLIENT,
}
_SAMPLED = otel.TraceFlags(otel.TraceFlags.SAMPLED)
_NOT_SAMPLED = otel.TraceFlags(otel.TraceFlags.DEFAULT)


class OtlpExporter:
    """The ``SpanExporter`` of a process."""

    def __init__(self, url: str) -> None:
        self._sending = _ReportingExporter(url)
        self._processor = BatchSpanProcessor(self._sending)
        # It evaluates the variables of the sampler; no tracer of it is used.
        self._sampler = TracerProvider(shutdown_on_exit=False).sampler
        self._from_environment = OTELResourceDetector().detect()
        self._resources: dict[tuple[str, str], Resource] = {}
        self._scope = InstrumentationScope("mooncake", mooncake.__version__)
        self._numbers = itertools.count(1)

    def samples(self, trace_id: str, name: str, parent: SpanContext | None) -> bool:
        above = None
        if parent is not None:
            above = otel.set_span_in_context(otel.NonRecordingSpan(_context(parent, is_remote=True)))
        decision = self._sampler.should_sample(above, int(trace_id, 16), name).decision
        return decision is Decision.RECORD_AND_SAMPLE

    def export(self, request: RequestSpans) -> None:
        for span in request.spans:
            self._processor.on_end(self._readable(span, span is request.root))

    def flush(self) -> None:
        """Send what is queued now. For tests: it waits."""
        self._processor.force_flush()

    def close(self) -> None:
        shutdown: Callable[[], None] = self._processor.shutdown
        closing = threading.Thread(target=shutdown, name="otlp-close", daemon=True)
        closing.start()
        closing.join(CLOSE_TIMEOUT_S)

    def _readable(self, span: Span, is_root: bool) -> _NumberedSpan:
        parent = None
        if span.parent_id:
            parent = _context(SpanContext(span.trace_id, span.parent_id), is_remote=is_root)
        return _NumberedSpan(
            next(self._numbers),
            span.name,
            _context(SpanContext(span.trace_id, span.span_id), is_remote=False),
            parent,
            self._resource(span.service, span.instance),
            span.attributes,
            kind=_KINDS[span.kind],
            status=otel.Status(otel.StatusCode.ERROR, span.error) if span.error else otel.Status(),
            start_time=round(span.start_s * 1e9),
            end_time=round(span.end_s * 1e9),
            instrumentation_scope=self._scope,
        )

    def _resource(self, service: str, instance: str) -> Resource:
        found = self._resources.get((service, instance))
        if found is None:
            ours = {"service.name": service, "service.instance.id": instance}
            found = Resource(ours).merge(self._from_environment)
            self._resources[(service, instance)] = found
        return found


def _context(span: SpanContext, is_remote: bool) -> otel.SpanContext:
    flags = _SAMPLED if span.is_sampled else _NOT_SAMPLED
    return otel.SpanContext(int(span.trace_id, 16), int(span.span_id, 16), is_remote, flags)


class _NumberedSpan(ReadableSpan):
    """``number``: how many spans have been queued with this one."""

    def __init__(self, number: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.number = number


class _ReportingExporter(OtelSpanExporter):
    """Counts what the collector takes, and logs when it stops and when it begins again to do so.

    The SDK's queue does not report the oldest spans that it drops, so a number that is missing is that of a
    dropped one; or of one that another thread is just adding, which makes the count of a later batch smaller.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._last_number = self._num_taken = self._num_dropped = 0
        self._inner = OTLPSpanExporter(endpoint=url)
        self._is_failing = False
        # Of its own the SDK logs every attempt.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        for span in spans:
            assert isinstance(span, _NumberedSpan)
            self._last_number = max(self._last_number, span.number)
        self._num_taken += len(spans)
        num_dropped = max(self._num_dropped, self._last_number - self._num_taken)
        _spans.labels("dropped").inc(num_dropped - self._num_dropped)
        self._num_dropped = num_dropped
        result = self._inner.export(spans)
        is_failure = result is not SpanExportResult.SUCCESS
        _spans.labels("failed" if is_failure else "exported").inc(len(spans))
        if is_failure and not self._is_failing:
            log.warning("spans_not_exported", url=self._url, spans=len(spans))
        elif self._is_failing and not is_failure:
            log.info("spans_exported_again", url=self._url)
        self._is_failing = is_failure
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()  # type: ignore[no-untyped-call]

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._inner.force_flush(timeout_millis)

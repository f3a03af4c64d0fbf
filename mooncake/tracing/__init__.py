# SPDX-License-Identifier: Apache-2.0
"""Traces of requests: what each process did for one, and when.

``spans.py`` has the shape of a span and the tree of several processes' spans, ``span_scope.py`` the
measuring, ``asgi.py`` the root of a request at an HTTP server, ``otlp.py`` the way to a collector,
``perfetto.py`` the format of other viewers. Any room may import this one; it knows none of them.
"""

from mooncake.tracing.span_scope import (
    SpanScope,
    Tracing,
    TracingSettings,
    call,
    code_of,
    current,
    enter,
    exemplar,
    install_tracing,
    leave,
    note,
    phase,
    process_tracing,
    split,
    tracing_of,
)
from mooncake.tracing.spans import TRACEPARENT, Attribute, RequestSpans, Span, SpanContext, read_traceparent

__all__ = [
    "TRACEPARENT",
    "Attribute",
    "RequestSpans",
    "Span",
    "SpanContext",
    "SpanScope",
    "Tracing",
    "TracingSettings",
    "call",
    "code_of",
    "current",
    "enter",
    "exemplar",
    "install_tracing",
    "leave",
    "note",
    "phase",
    "process_tracing",
    "read_traceparent",
    "split",
    "tracing_of",
]

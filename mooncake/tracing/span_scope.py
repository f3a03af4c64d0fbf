# SPDX-License-Identifier: Apache-2.0
"""Measures the spans of requests in this process.

Owns the process's one ``Tracing`` (its settings, the memory of the latest requests and the exporter) and the
``SpanScope`` of the running task, which is how code deep inside a request adds a span without being passed
one. Where nothing is installed, or a request is not traced, ``current`` returns None, and that is all that it
costs. What a span is and how several processes' spans fit together is in ``spans.py``.

The phases of a scope follow each other without a gap: one begins where the one before it ends. So the phases
of a request's root add up to its duration.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import random
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Protocol

from msgspec import Meta

from mooncake import clock
from mooncake.log import get_logger
from mooncake.setting_types import AlsoFrom
from mooncake.tracing.spans import (
    MAX_TEXT_CHARS,
    TRACEPARENT,
    Attribute,
    Kind,
    RequestSpans,
    Span,
    SpanContext,
    SpanRing,
)

log = get_logger(__name__)


@dataclass(frozen=True)
class TracingSettings:
    """Traces of requests, of every role. Other standard variables (`OTEL_...`) are read by OpenTelemetry."""

    requests: Annotated[int, Meta(ge=0, le=100_000)] = 256
    "Latest requests whose spans a process keeps for `mooncake trace`, and of failed ones a quarter as many."

    endpoint: Annotated[str, AlsoFrom("OTEL_EXPORTER_OTLP_ENDPOINT")] = ""
    "Collector that gets the spans by OTLP over HTTP, such as `http://127.0.0.1:4318`; empty for none."

    traces_endpoint: Annotated[str, AlsoFrom("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")] = ""
    "The same as a whole URL, such as `http://127.0.0.1:4318/v1/traces`; takes precedence over `endpoint`."

    disabled: Annotated[bool, AlsoFrom("OTEL_SDK_DISABLED")] = False
    "Send nothing to a collector, whatever the endpoints are."

    @property
    def url(self) -> str:
        """Where spans are posted; empty for nowhere."""
        if self.disabled:
            return ""
        return self.traces_endpoint or (f"{self.endpoint.rstrip('/')}/v1/traces" if self.endpoint else "")


class SpanExporter(Protocol):
    """Sends spans to a collector."""

    def samples(self, trace_id: str, name: str, parent: SpanContext | None) -> bool:
        """Whether the spans of a request that begins here are sent."""
        ...

    def export(self, request: RequestSpans) -> None:
        """Queue the spans to be sent. Returns at once; never raises."""
        ...

    def close(self) -> None:
        """Send what is queued, for a bounded time."""
        ...


class Tracing:
    """What a process does with its spans."""

    def __init__(self, num_requests: int, exporter: SpanExporter | None = None) -> None:
        self.ring = SpanRing(num_requests)
        self.exporter = exporter
        self.is_on = num_requests > 0 or exporter is not None
        self.instance = f"{socket.gethostname()}/{os.getpid()}"

    def begin(
        self,
        name: str,
        service: str,
        instance: str,
        parent: SpanContext | None,
        /,
        **attributes: Attribute,
    ) -> SpanScope:
        """Begin the spans of a request, below ``parent`` of another process if there is one.

        ``instance``: address of the server; empty for the name of the process.
        """
        trace_id = parent.trace_id if parent is not None else f"{random.getrandbits(128) or 1:032x}"
        is_sampled = parent.is_sampled if parent is not None else True
        if self.exporter is not None:
            is_sampled = self.exporter.samples(trace_id, name, parent)
        offset_s = clock.wall() - clock.monotonic()
        parent_id = parent.span_id if parent is not None else ""
        started = clock.monotonic() + offset_s
        instance = instance or self.instance
        root = Span(trace_id, _span_id(), parent_id, name, service, instance, started, kind="server")
        root.attributes = _cut(attributes)
        request = RequestSpans([root], is_sampled)
        self.ring.add(request)
        return SpanScope(self, request, root, offset_s)

    def close(self) -> None:
        if self.exporter is not None:
            self.exporter.close()


class SpanScope:
    """A span to which others are added: below it, or below its current phase."""

    __slots__ = ("_at_end", "_offset_s", "_phase", "_tracing", "request", "span")

    def __init__(self, tracing: Tracing, request: RequestSpans, span: Span, offset_s: float) -> None:
        self.request = request
        self.span = span
        self._tracing = tracing
        self._offset_s = offset_s
        self._phase: Span | None = None
        self._at_end: list[Callable[[], None]] = []

    @property
    def is_root(self) -> bool:
        return self.span is self.request.root

    def context(self, span: Span) -> SpanContext:
        return SpanContext(span.trace_id, span.span_id, self.request.is_sampled)

    @property
    def began(self) -> float:
        """When its span began, on the monotonic clock."""
        return self.span.start_s - self._offset_s

    @property
    def trace_id(self) -> str:
        return self.span.trace_id

    def note(self, **attributes: Attribute) -> None:
        """Add attributes to the scope's span.

        Two underscores in a name are a dot; a name without a dot gets the prefix ``mooncake.``.
        """
        self.span.attributes.update(_cut(attributes))

    def phase(self, name: str, **attributes: Attribute) -> None:
        """End the phase that lasts, if there is one, and begin the next. The same one again goes on."""
        if self._phase is not None and self._phase.name == name:
            return
        now = clock.monotonic() + self._offset_s
        if self._phase is not None:
            self._phase.end_s = now
        # The first one begins with its scope, so that nothing is left out.
        start_s = now if self._phase is not None else self.span.start_s
        self._phase = self._new(name, self.span, start_s, "internal", attributes)

    def begin(self, name: str, kind: Kind = "internal", /, **attributes: Attribute) -> Span:
        """Begin a span below the current phase; to be ended with ``end_span``."""
        return self._new(name, self._phase or self.span, clock.monotonic() + self._offset_s, kind, attributes)

    def end_span(self, span: Span, error: str = "") -> None:
        span.end_s = clock.monotonic() + self._offset_s
        span.error = error

    def add(
        self, name: str, began: float, ended: float, parent: Span | None = None, /, **attributes: Attribute
    ) -> Span:
        """Add a span that has ended, with instants of the monotonic clock."""
        span = self._new(name, parent or self.span, began + self._offset_s, "internal", attributes)
        span.end_s = max(began, ended) + self._offset_s
        return span

    def child(self, name: str, **attributes: Attribute) -> SpanScope:
        """A scope below this one's current phase, with phases of its own."""
        span = self.begin(name, **attributes)
        return SpanScope(self._tracing, self.request, span, self._offset_s)

    def at_end(self, act: Callable[[], None]) -> None:
        """Call ``act`` when the scope ends, to add what is known only then."""
        self._at_end.append(act)

    def end(self, error: str = "") -> None:
        """End the scope's span and its last phase. The root's end ends all others, and sends them."""
        if self.span.end_s:
            return
        for act in self._at_end:
            act()
        now = clock.monotonic() + self._offset_s
        if self._phase is not None:
            self._phase.end_s = now
        self.span.end_s = now
        self.span.error = self.span.error or error
        if self.is_root:
            for span in self.request.spans:
                span.end_s = span.end_s or now
            self._tracing.ring.end(self.request)
            if self._tracing.exporter is not None and self.request.is_sampled:
                self._tracing.exporter.export(self.request)

    def _new(
        self, name: str, parent: Span, start_s: float, kind: Kind, attributes: dict[str, Attribute]
    ) -> Span:
        service, instance = self.span.service, self.span.instance
        span = Span(
            self.span.trace_id, _span_id(), parent.span_id, name, service, instance, start_s, kind=kind
        )
        span.attributes = _cut(attributes)
        self.request.add(span)
        return span


def _span_id() -> str:
    return f"{random.getrandbits(64) or 1:016x}"


def _cut(attributes: dict[str, Attribute]) -> dict[str, Attribute]:
    return {
        name.replace("__", ".") if "__" in name else f"mooncake.{name}": (
            value[:MAX_TEXT_CHARS] if isinstance(value, str) else value
        )
        for name, value in attributes.items()
    }


# --- the process's own, and the scope of the running task


def tracing_of(settings: TracingSettings) -> Tracing:
    """What ``settings`` ask for. A collector without the packages to reach it is logged: requests go on."""
    exporter: SpanExporter | None = None
    if settings.url:
        try:
            from mooncake.tracing.otlp import OtlpExporter  # late: the SDK takes a while to load

            exporter = OtlpExporter(settings.url)
        except ModuleNotFoundError as error:
            log.error("tracing_unavailable", url=settings.url, reason=str(error), extra="otel")
    return Tracing(settings.requests, exporter)


_OFF = Tracing(0)
_installed = _OFF
_current: contextvars.ContextVar[SpanScope | None] = contextvars.ContextVar(
    "mooncake_span_scope", default=None
)


def install_tracing(tracing: Tracing | None) -> None:
    """Make ``tracing`` that of this process; None for none."""
    global _installed
    _installed = tracing or _OFF


def process_tracing() -> Tracing:
    return _installed


def current() -> SpanScope | None:
    """The scope of the running task; None where its request is not traced."""
    return _current.get()


def enter(scope: SpanScope | None) -> contextvars.Token[SpanScope | None]:
    """Make ``scope`` that of the running task, and of those that it starts from now on."""
    return _current.set(scope)


def leave(token: contextvars.Token[SpanScope | None]) -> None:
    _current.reset(token)


def phase(name: str, **attributes: Attribute) -> None:
    """Begin the next phase of the running task's scope, if it has one."""
    if (scope := _current.get()) is not None:
        scope.phase(name, **attributes)


def note(**attributes: Attribute) -> None:
    """Add attributes to the running task's scope, if it has one."""
    if (scope := _current.get()) is not None:
        scope.note(**attributes)


def split(name: str, **attributes: Attribute) -> None:
    """Give the running task, one of several for its request, a scope of its own up to its end."""
    if (outer := _current.get()) is not None:
        scope = outer.child(name, **attributes)
        _current.set(scope)
        if (task := asyncio.current_task()) is not None:
            task.add_done_callback(lambda done: scope.end())


@contextlib.contextmanager
def call(name: str, **attributes: Attribute) -> Iterator[dict[str, str]]:
    """A call to another process; yields the headers that name its span there, none without a trace."""
    if (scope := _current.get()) is None:
        yield {}
        return
    span = scope.begin(name, "client", **attributes)
    try:
        yield {TRACEPARENT: scope.context(span).traceparent}
    except GeneratorExit:  # its stream was closed at its end, with nothing left to read
        scope.end_span(span)
        raise
    except BaseException as error:
        scope.end_span(span, code_of(error))
        raise
    else:
        scope.end_span(span)


def code_of(error: BaseException) -> str:
    """The kind of an error. Not its message, which may repeat parts of a prompt."""
    return str(getattr(error, "code", None) or type(error).__name__)


def exemplar() -> dict[str, str] | None:
    """The labels that connect a measurement with its trace, where that is sent to a collector or kept."""
    scope = _current.get()
    return {"trace_id": scope.trace_id} if scope is not None and scope.request.is_sampled else None

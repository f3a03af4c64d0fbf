# SPDX-License-Identifier: Apache-2.0
"""Spans: the intervals of the work on a request, and the tree that those of several processes form.

Owns their shape, the header that names a span to another process (W3C ``traceparent``), the bounded memory of
the latest requests, and the correction for hosts whose clocks differ. It does not know who measures and where
spans are sent to. A span holds names and numbers, never a prompt's text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import msgspec

Attribute = str | int | float | bool
Kind = Literal["internal", "server", "client"]

TRACEPARENT = "traceparent"
MAX_SPANS = 128
"""Most spans of one request in one process; the root counts those beyond it."""
MAX_TEXT_CHARS = 256
"""Longest value of an attribute; a longer one is cut."""

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)


class SpanContext(NamedTuple):
    """A span as another process names it."""

    trace_id: str
    span_id: str
    is_sampled: bool = True
    """Whether the process that began the trace sends its spans to a collector."""

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{'01' if self.is_sampled else '00'}"


def read_traceparent(text: str) -> SpanContext | None:
    """The span that a header names; None where it is not valid, as the specification demands."""
    found = _TRACEPARENT.fullmatch(text.strip())
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == "ff" or (version == "00" and more) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    return SpanContext(trace_id, span_id, bool(int(flags, 16) & 1))


class Span(msgspec.Struct):
    """One interval. Instants are seconds since 1970, on the clock of the process that measured them."""

    trace_id: str
    span_id: str
    parent_id: str
    "Empty where it has none."
    name: str
    service: str
    instance: str
    start_s: float
    end_s: float = 0.0
    "0 while it lasts."
    kind: Kind = "internal"
    attributes: dict[str, Attribute] = {}
    error: str = ""
    "Code of the error with which it ended."


class RequestSpans(msgspec.Struct):
    """The spans of one request in one process; the first of them is the root."""

    spans: list[Span]
    is_sampled: bool = True
    num_dropped: int = 0

    @property
    def root(self) -> Span:
        return self.spans[0]

    def add(self, span: Span) -> None:
        if len(self.spans) < MAX_SPANS:
            self.spans.append(span)
        else:
            self.num_dropped += 1
            self.root.attributes["mooncake.dropped_spans"] = self.num_dropped


class SpanRing:
    """Remembers the spans of the latest ``num_requests`` requests of each service in one process.

    Requests that failed or were refused have places of their own, a quarter as many: under overload they
    come many times as often as those that are served, and would replace them within seconds.
    """

    def __init__(self, num_requests: int) -> None:
        self.num_requests = num_requests
        self._latest: dict[str, dict[str, RequestSpans]] = {}
        self._failed: dict[str, dict[str, RequestSpans]] = {}

    def add(self, request: RequestSpans) -> None:
        _keep(self._latest.setdefault(request.root.service, {}), request, self.num_requests)

    def end(self, request: RequestSpans) -> None:
        """A request has ended; its root's ``error`` says whether it failed."""
        service, span_id = request.root.service, request.root.span_id
        if request.root.error and self._latest.get(service, {}).pop(span_id, None) is not None:
            _keep(self._failed.setdefault(service, {}), request, (self.num_requests + 3) // 4)

    def latest(self, service: str) -> list[RequestSpans]:
        """The requests of ``service``, newest first."""
        found = [*self._latest.get(service, {}).values(), *self._failed.get(service, {}).values()]
        return sorted(found, key=lambda request: request.root.start_s, reverse=True)

    def below(self, parent_id: str) -> list[Span]:
        """The spans of requests that another process's span ``parent_id`` has sent here."""
        every = (
            request
            for kept in (self._latest, self._failed)
            for requests in kept.values()
            for request in requests.values()
        )
        return [span for one in every if one.root.parent_id == parent_id for span in one.spans]


def _keep(requests: dict[str, RequestSpans], request: RequestSpans, limit: int) -> None:
    """Add a request to at most ``limit``, the oldest of which makes room."""
    requests[request.root.span_id] = request
    if len(requests) > limit:
        del requests[next(iter(requests))]


def children_of(spans: Iterable[Span], root: Span) -> dict[str, list[Span]]:
    """``spans`` by the id of their parent, without ``root``.

    The root's parent is chosen by a client, which may name a span of the tree.
    """
    found: dict[str, list[Span]] = {}
    for span in spans:
        if span.span_id != root.span_id:
            found.setdefault(span.parent_id, []).append(span)
    return found


def reachable(root: Span, spans: Iterable[Span]) -> list[Span]:
    """``root`` and the spans below it, by their start.

    A trace id is chosen by a client, so that spans of other requests may have the same one.
    """
    below = children_of(spans, root)
    found, waiting = {root.span_id: root}, [root]
    while waiting:
        for span in below.get(waiting.pop().span_id, ()):
            if span.span_id not in found:
                found[span.span_id] = span
                waiting.append(span)
    return sorted(found.values(), key=lambda span: (span.start_s, -span.end_s))


SHIFT = "mooncake.clock_shift_s"
"""Attribute of a span that was shifted, because its host's clock differs from its parent's."""


def align_clocks(root: Span, spans: Sequence[Span]) -> list[Span]:
    """``root`` and the spans below it, with those of another process shifted into their parent's time.

    A call's server can't begin before its client and can't end after it. A span that does is shifted, with
    all that is below it in its process, by the least that puts it inside; or centred, where it is longer.
    The root comes first, as one within the tolerance may begin before it; the others by their start.
    """
    below = children_of(spans, root)
    result: list[Span] = []
    waiting: list[tuple[Span, float]] = [(root, 0.0)]
    while waiting:
        span, shift_s = waiting.pop()
        if shift_s:
            attributes = {**span.attributes, SHIFT: round(shift_s, 6)}
            span = msgspec.structs.replace(
                span, start_s=span.start_s + shift_s, end_s=span.end_s + shift_s, attributes=attributes
            )
        result.append(span)
        for child in below.pop(span.span_id, ()):  # taken out: no span is visited twice
            is_here = (child.service, child.instance) == (span.service, span.instance)
            waiting.append((child, shift_s if is_here else _shift_into(span, child)))
    return [result[0], *sorted(result[1:], key=lambda span: (span.start_s, -span.end_s))]


TOLERANCE_S = 0.005
"""A span may lie so far outside of its parent: a server ends after its client has read the last byte."""


def _shift_into(parent: Span, child: Span) -> float:
    early_s, late_s = parent.start_s - child.start_s, child.end_s - parent.end_s
    if early_s <= TOLERANCE_S and late_s <= TOLERANCE_S:
        return 0.0
    if early_s + late_s > 0.0:  # it is longer than its parent
        return (parent.start_s + parent.end_s - child.start_s - child.end_s) / 2.0
    return early_s if early_s > 0.0 else -late_s

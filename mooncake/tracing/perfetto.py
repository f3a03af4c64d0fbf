# SPDX-License-Identifier: Apache-2.0
"""Spans in the trace event format that Perfetto and Chrome's tracing page open.

Each process of the cluster is a process there, with as many tracks as it has spans at the same time that do
not contain one another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mooncake.tracing.spans import Span


def trace_events(spans: Sequence[Span]) -> dict[str, Any]:
    """The JSON object of a trace; the first of its spans begins at 0."""
    began_s = min((span.start_s for span in spans), default=0.0)
    events: list[dict[str, Any]] = []
    processes: dict[tuple[str, str], int] = {}
    tracks: dict[int, list[list[float]]] = {}
    for span in sorted(spans, key=lambda one: (one.start_s, -one.end_s)):
        place = (span.service, span.instance)
        if place not in processes:
            processes[place] = len(processes) + 1
            name = f"{span.service} {span.instance}"
            events.append(
                {"ph": "M", "name": "process_name", "pid": processes[place], "args": {"name": name}}
            )
        pid = processes[place]
        first_us, end_us = round((span.start_s - began_s) * 1e6), round((span.end_s - began_s) * 1e6)
        args = {**span.attributes, "span_id": span.span_id, "parent_id": span.parent_id}
        events.append(
            {
                "ph": "X",
                "name": span.name,
                "cat": span.kind,
                "pid": pid,
                "tid": _track(tracks.setdefault(pid, []), first_us, end_us),
                "ts": first_us,
                "dur": end_us - first_us,
                "args": args | ({"error": span.error} if span.error else {}),
            }
        )
    trace_id = spans[0].trace_id if spans else ""
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"trace_id": trace_id}}


def _track(tracks: list[list[float]], first_us: float, end_us: float) -> int:
    """The first track whose open slices all contain this one; ``tracks`` has the ends of those slices."""
    for number, ends in enumerate(tracks):
        while ends and ends[-1] <= first_us:
            ends.pop()
        if not ends or end_us <= ends[-1]:
            ends.append(end_us)
            return number
    tracks.append([end_us])
    return len(tracks) - 1

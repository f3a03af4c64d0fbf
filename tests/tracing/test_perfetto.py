# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from mooncake.tracing import Span
from mooncake.tracing.perfetto import trace_events

TRACE = "0af7651916cd43dd8448eb211c80319c"


def span(name: str, start_s: float, end_s: float, instance: str = "a") -> Span:
    return Span(TRACE, name, "parent", name, "worker", instance, start_s, end_s)


def test_slices_of_one_track_contain_one_another() -> None:
    spans = [
        span("root", 10.0, 20.0),
        span("first", 10.0, 14.0),
        span("inside", 11.0, 12.0),
        span("second", 14.0, 20.0),
        span("across", 12.0, 15.0),
        span("elsewhere", 11.0, 12.0, "b"),
    ]
    events = trace_events(spans)["traceEvents"]
    slices = {event["name"]: event for event in events if event["ph"] == "X"}
    assert (slices["root"]["ts"], slices["root"]["dur"]) == (0, 10_000_000)
    assert (slices["across"]["ts"], slices["across"]["dur"]) == (2_000_000, 3_000_000)
    tracks = {name: (event["pid"], event["tid"]) for name, event in slices.items()}
    assert tracks == {
        "root": (1, 0),
        "first": (1, 0),
        "inside": (1, 0),
        "second": (1, 0),
        "across": (1, 1),
        "elsewhere": (2, 0),
    }
    assert [event["args"]["name"] for event in events if event["ph"] == "M"] == ["worker a", "worker b"]


def test_a_trace_without_spans_is_a_file_as_well() -> None:
    assert trace_events([])["traceEvents"] == []

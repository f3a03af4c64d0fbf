# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from mooncake.tracing.spans import (
    MAX_SPANS,
    SHIFT,
    RequestSpans,
    Span,
    SpanContext,
    SpanRing,
    align_clocks,
    reachable,
    read_traceparent,
)

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


def span(
    name: str, parent: str, start_s: float, end_s: float, service: str = "gateway", trace: str = TRACE
) -> Span:
    return Span(trace, name, parent, name, service, "host", start_s, end_s)


@pytest.mark.parametrize("flags, is_sampled", [("01", True), ("00", False), ("03", True)])
def test_a_traceparent_names_a_span(flags: str, is_sampled: bool) -> None:
    assert read_traceparent(f"00-{TRACE}-{PARENT}-{flags}") == SpanContext(TRACE, PARENT, is_sampled)


def test_a_later_version_may_have_more_fields() -> None:
    assert read_traceparent(f"cc-{TRACE}-{PARENT}-01-what-comes") == SpanContext(TRACE, PARENT)


@pytest.mark.parametrize(
    "text",
    [
        "",
        f"00-{TRACE}-{PARENT}",
        f"00-{TRACE}-{PARENT}-01-more",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-01" * 1000,
        "00-" + "１" * 32 + f"-{PARENT}-01",
    ],
)
def test_anything_else_names_none(text: str) -> None:
    assert read_traceparent(text) is None


def test_what_is_written_can_be_read() -> None:
    for context in (SpanContext(TRACE, PARENT), SpanContext(TRACE, PARENT, False)):
        assert read_traceparent(context.traceparent) == context


def test_a_ring_keeps_the_latest_of_each_service() -> None:
    ring = SpanRing(2)
    for number in range(4):
        ring.add(RequestSpans([span(f"r{number}", f"p{number}", number, 9)]))
    ring.add(RequestSpans([span("c", "p3", 0, 1, "conductor")]))
    assert [one.root.name for one in ring.latest("gateway")] == ["r3", "r2"]
    assert [one.name for one in ring.below("p3")] == ["r3", "c"]
    assert ring.below("p0") == [] and ring.latest("worker") == []


def test_refused_requests_do_not_replace_those_that_were_served() -> None:
    ring = SpanRing(4)
    for number in range(20):
        request = RequestSpans([span(f"r{number}", f"p{number}", number, number + 1)])
        ring.add(request)
        if number > 3:
            request.root.error = "429"
        ring.end(request)
    assert [one.root.name for one in ring.latest("gateway")] == ["r19", "r3", "r2", "r1"]
    assert [one.name for one in ring.below("p19")] == ["r19"] and ring.below("p18") == []
    pushed_out = RequestSpans([span("r0", "p0", 0, 1)])
    pushed_out.root.error = "500"
    ring.end(pushed_out)
    assert len(ring.latest("gateway")) == 4, "what is no longer kept does not come back when it ends"


def test_a_request_has_a_bounded_number_of_spans() -> None:
    request = RequestSpans([span("root", "", 0, 1)])
    for number in range(MAX_SPANS + 9):
        request.add(span(f"s{number}", "root", 0, 1))
    assert len(request.spans) == MAX_SPANS
    assert request.root.attributes["mooncake.dropped_spans"] == 10


def test_spans_of_another_request_with_the_same_trace_id_are_left_out() -> None:
    root = span("root", PARENT, 0, 9)
    mine = [span("a", "root", 1, 5), span("b", "a", 2, 3)]
    others = [span("other", PARENT, 1, 2), span("its", "other", 1, 2), span("loop", "loop", 1, 2)]
    assert [one.name for one in reachable(root, [*others, *mine, root])] == ["root", "a", "b"]


def test_a_slow_clock_is_corrected_with_all_below_it() -> None:
    spans = [
        span("root", "", 100.0, 110.0),
        span("call", "root", 102.0, 108.0),
        span("server", "call", 95.0, 99.0, "worker"),
        span("step", "server", 96.0, 97.0, "worker"),
    ]
    found = {one.name: one for one in align_clocks(spans[0], spans)}
    assert (found["server"].start_s, found["server"].end_s) == (102.0, 106.0)
    assert (found["step"].start_s, found["step"].end_s) == (103.0, 104.0)
    assert found["step"].attributes[SHIFT] == found["server"].attributes[SHIFT] == 7.0
    assert SHIFT not in found["call"].attributes


def test_a_fast_clock_is_corrected_by_the_least() -> None:
    spans = [span("call", "", 0.0, 2.0), span("server", "call", 1.5, 2.5, "worker")]
    found = align_clocks(spans[0], spans)[1]
    assert (found.start_s, found.end_s) == (1.0, 2.0)


def test_a_span_longer_than_its_call_is_centred() -> None:
    spans = [span("call", "", 10.0, 12.0), span("server", "call", 30.0, 34.0, "worker")]
    found = align_clocks(spans[0], spans)
    server = next(one for one in found if one.name == "server")
    assert (server.start_s, server.end_s) == (9.0, 13.0)


def test_a_client_may_name_a_span_of_the_tree_as_the_root_s_parent() -> None:
    spans = [span("root", "b", 0.0, 4.0), span("a", "root", 1.0, 3.0), span("b", "a", 1.5, 2.5)]
    assert align_clocks(spans[0], spans) == reachable(spans[0], spans) == spans


def test_the_root_comes_first_though_a_worker_s_clock_is_slow() -> None:
    spans = [span("root", "", 100.0, 104.0), span("server", "root", 99.997, 103.9, "worker")]
    assert align_clocks(spans[0], reachable(spans[0], spans)) == spans


def test_a_server_that_ends_just_after_its_client_is_left_as_it_is() -> None:
    spans = [span("call", "", 0.0, 2.0), span("server", "call", 0.5, 2.001, "worker")]
    assert align_clocks(spans[0], spans) == spans

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools

from mooncake import clock
from mooncake.http.worker_stats import StageStats
from mooncake.inference.request import MAX_MARKS, Request, SamplingParams, Timings
from mooncake.inference.request_spans import SERVICE, trace_requests
from mooncake.kvlayout import KvLayout
from mooncake.tracing import Span, SpanContext, SpanScope, Tracing

LAYOUT = KvLayout(num_layers=2, num_kv_heads=2, head_dim=8, block_tokens=16, dtype="float32")
PARENT = SpanContext("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")


def begun() -> SpanScope:
    return Tracing(4).begin("worker", SERVICE, "host:1", PARENT)


def request_of(name: str = "r") -> Request:
    return Request(name, [*range(40)], SamplingParams(max_tokens=4))


def by_name(scope: SpanScope) -> dict[str, Span]:
    return {span.name: span for span in scope.request.spans}


def ended(request: Request, began: float) -> None:
    """The request as it is after it was answered with 4 tokens in 10 s."""
    request.timings = Timings(began, began + 1, began + 3, began + 6, began + 10)
    request.token_ids += [1, 2, 3, 4]
    request.num_external_hit_tokens = 32


def test_the_stages_of_a_request_follow_each_other() -> None:
    scope, request = begun(), request_of()
    trace_requests(scope, "worker decode", [request], LAYOUT)
    began = clock.monotonic()
    ended(request, began)
    mark = request.mark("load from pool", began + 1.5, blocks=2, source="node by shm")
    assert mark is not None
    mark.ended = began + 2.5
    request.mark("save", began + 5)  # has not ended, as its request was aborted
    scope.end()
    spans = by_name(scope)
    assert scope.span.name == "worker decode"
    stages = [spans[name] for name in ("queue", "fetch", "compute prompt", "generate")]
    assert [round(span.end_s - span.start_s, 3) for span in stages] == [1, 2, 3, 4]
    assert all(one.end_s == other.start_s for one, other in itertools.pairwise(stages))
    assert all(span.parent_id == scope.span.span_id for span in stages)
    load = spans["load from pool"]
    assert load.parent_id == spans["fetch"].span_id
    assert load.attributes == {
        "mooncake.blocks": 2,
        "mooncake.source": "node by shm",
        "mooncake.bytes": 2 * LAYOUT.object_bytes(16),
    }
    assert spans["compute prompt"].attributes["mooncake.tokens"] == 8
    assert spans["generate"].attributes["mooncake.tokens"] == 4
    assert "save" not in spans


def test_a_request_that_was_never_admitted_has_no_stages() -> None:
    scope, request = begun(), request_of()
    trace_requests(scope, "worker prefill", [request], LAYOUT)
    scope.end("429")
    assert [span.name for span in scope.request.spans] == ["worker prefill"]
    assert scope.span.error == "429"


def test_several_choices_have_spans_of_their_own() -> None:
    scope, requests = begun(), [request_of("a"), request_of("b")]
    trace_requests(scope, "worker generate", requests, LAYOUT)
    for request in requests:
        ended(request, clock.monotonic())
    scope.end()
    choices = [span for span in scope.request.spans if span.name == "choice"]
    assert len(choices) == 2
    for choice in choices:
        below = [span.name for span in scope.request.spans if span.parent_id == choice.span_id]
        assert below == ["queue", "fetch", "compute prompt", "generate"]


def test_the_stages_of_a_group_are_below_the_prompt() -> None:
    scope, request = begun(), request_of()
    trace_requests(scope, "worker prefill", [request], LAYOUT)
    ended(request, clock.monotonic())
    request.stages = [StageStats(0, 16, 4, 0.0, 2.0, 1.9, 0.1), StageStats(16, 30, 4, 1.0, 3.0, 1.5, 0.5)]
    scope.end()
    stages = [span for span in scope.request.spans if span.name == "stage"]
    assert [span.attributes["mooncake.layers"] for span in stages] == ["0-15", "16-29"]
    assert {span.parent_id for span in stages} == {by_name(scope)["compute prompt"].span_id}


def test_a_request_that_is_not_traced_notes_nothing() -> None:
    request = request_of()
    assert request.mark("save", 0.0) is None and request.marks is None


def test_the_marks_of_a_request_are_bounded() -> None:
    request = request_of()
    request.marks = []
    for number in range(2 * MAX_MARKS):
        request.mark("save", float(number))
    assert len(request.marks) == MAX_MARKS

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator

import pytest

from mooncake import tracing
from mooncake.errors import Unavailable
from mooncake.tracing import SpanScope, Tracing, TracingSettings
from mooncake.tracing.spans import MAX_TEXT_CHARS, RequestSpans, Span, SpanContext, read_traceparent


@pytest.fixture
def scope() -> Iterator[SpanScope]:
    found = Tracing(4).begin("chat", "gateway", "host:1", None)
    token = tracing.enter(found)
    yield found
    tracing.leave(token)


def by_name(request: RequestSpans) -> dict[str, Span]:
    return {span.name: span for span in request.spans}


def test_without_a_scope_nothing_happens() -> None:
    assert tracing.current() is None and tracing.exemplar() is None
    tracing.phase("a")
    tracing.note(b=1)
    tracing.split("c")
    with tracing.call("POST") as headers:
        assert headers == {}


def test_phases_follow_each_other_without_a_gap(scope: SpanScope) -> None:
    for name in ("receive", "place", "place", "stream"):
        tracing.phase(name)
    scope.end()
    root, *phases = scope.request.spans
    assert [span.name for span in phases] == ["receive", "place", "stream"]
    assert [span.parent_id for span in phases] == [root.span_id] * 3
    edges = [root.start_s, *(span.end_s for span in phases)]
    assert [span.start_s for span in phases] == edges[:-1]
    assert edges[-1] == root.end_s
    assert sum(span.end_s - span.start_s for span in phases) == pytest.approx(root.end_s - root.start_s)


def test_a_call_is_below_the_phase_and_names_itself(scope: SpanScope) -> None:
    tracing.phase("prefill")
    with tracing.call("POST /v1/completions", server__address="host:2") as headers:
        pass
    spans = by_name(scope.request)
    call = spans["POST /v1/completions"]
    assert read_traceparent(headers["traceparent"]) == SpanContext(scope.trace_id, call.span_id)
    assert (call.parent_id, call.kind) == (spans["prefill"].span_id, "client")
    assert call.attributes == {"server.address": "host:2"} and call.end_s >= call.start_s > 0.0


def test_an_error_is_named_by_its_code_and_not_by_its_text(scope: SpanScope) -> None:
    with contextlib.suppress(Unavailable), tracing.call("a"):
        raise Unavailable("the prompt is: my secret")
    with contextlib.suppress(ValueError), tracing.call("b"):
        raise ValueError("my secret")
    spans = by_name(scope.request)
    assert (spans["a"].error, spans["b"].error) == (Unavailable.code, "ValueError")


async def test_a_stream_that_is_closed_at_its_end_has_no_error(scope: SpanScope) -> None:
    async def events() -> AsyncGenerator[int, None]:
        with tracing.call("POST"):
            yield 1
            yield 2

    following = events()
    assert await anext(following) == 1
    await following.aclose()
    call = by_name(scope.request)["POST"]
    assert call.end_s > 0.0 and call.error == ""


async def test_tasks_of_one_request_have_phases_of_their_own(scope: SpanScope) -> None:
    tracing.phase("answer")

    async def serve(number: int) -> None:
        tracing.split("prompt", number=number)
        for name in ("place", "stream"):
            tracing.phase(name)
            await asyncio.sleep(0)

    await asyncio.gather(serve(0), serve(1))
    tracing.phase("end")
    scope.end()
    spans = scope.request.spans
    prompts = [span for span in spans if span.name == "prompt"]
    assert [span.attributes for span in prompts] == [{"mooncake.number": 0}, {"mooncake.number": 1}]
    assert {span.parent_id for span in prompts} == {by_name(scope.request)["answer"].span_id}
    for prompt in prompts:
        assert [span.name for span in spans if span.parent_id == prompt.span_id] == ["place", "stream"]
        assert all(span.end_s <= prompt.end_s for span in spans if span.parent_id == prompt.span_id)


def test_the_end_of_the_root_ends_all(scope: SpanScope) -> None:
    scope.phase("stream")
    lasting = scope.begin("POST", "client")
    scope.at_end(lambda: scope.note(tokens=3))
    scope.end("cancelled")
    assert scope.span.attributes == {"mooncake.tokens": 3} and scope.span.error == "cancelled"
    assert lasting.end_s == scope.span.end_s
    before = scope.span.end_s
    scope.end()
    assert scope.span.end_s == before


def test_a_trace_is_continued(scope: SpanScope) -> None:
    parent = SpanContext("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", False)
    found = Tracing(4).begin("worker", "worker", "host:2", parent)
    assert (found.trace_id, found.span.parent_id) == (parent.trace_id, parent.span_id)
    assert not found.request.is_sampled
    assert not found.context(found.span).is_sampled
    token = tracing.enter(found)
    assert tracing.exemplar() is None, "its trace is not sent anywhere"
    tracing.leave(token)
    assert tracing.exemplar() == {"trace_id": scope.trace_id}


def test_long_values_are_cut(scope: SpanScope) -> None:
    scope.note(gen_ai__request__model="m" * 5000)
    assert scope.span.attributes == {"gen_ai.request.model": "m" * MAX_TEXT_CHARS}


def test_the_endpoint_is_that_of_the_standard_variables() -> None:
    assert TracingSettings().url == ""
    assert TracingSettings(endpoint="http://c:4318/").url == "http://c:4318/v1/traces"
    one = TracingSettings(endpoint="http://c:4318", traces_endpoint="http://d/x")
    assert one.url == "http://d/x"
    assert TracingSettings(endpoint="http://c:4318", disabled=True).url == ""
    assert not Tracing(0).is_on and Tracing(1).is_on

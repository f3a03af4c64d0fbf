# SPDX-License-Identifier: Apache-2.0
"""The order of a proxy's messages: what is answered when, what a wrong, late or huge one does."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake.gateway.ext_proc_stream import (
    CHUNK_BYTES,
    TAIL_BYTES,
    AnswerMeter,
    BodyMode,
    Closed,
    Effect,
    Ended,
    EndStream,
    Event,
    ExtProcStream,
    FirstPiece,
    Immediate,
    Measured,
    Pick,
    Picked,
    ProxyReply,
    Refused,
    ReplyTo,
    RequestBody,
    RequestHeaders,
    RequestTrailers,
    ResponseBody,
    ResponseHeaders,
    ResponseTrailers,
    Served,
    StreamState,
    Unknown,
)
from mooncake.http.openai import ApiError
from mooncake.machine import Wake

HEADERS = [(":method", "POST"), (":path", "/v1/completions")]
HEAD = RequestHeaders(HEADERS)
PICKED = Picked("10.0.0.1:80,10.0.0.2:80", {"x-gateway-destination-endpoint": "10.0.0.1:80"}, ["x-evil"])
OK = ResponseHeaders([(":status", "200"), ("content-type", "text/event-stream")], False, "10.0.0.1:80")


def stream(max_body_bytes: int = 1 << 20) -> ExtProcStream:
    return ExtProcStream(max_body_bytes, 30.0, 600.0, 0.0)


def played(core: ExtProcStream, *events: Event, now: float = 1.0) -> list[Any]:
    effects: list[Any] = []
    for event in events:
        effects += core.handle(event, now)
        core.check()
    return effects


def of(kind: Any, effects: list[Effect]) -> list[Any]:
    return [one for one in effects if isinstance(one, kind)]


def streamed(to: ReplyTo, effects: list[Effect]) -> bytes:
    replies = [one for one in of(ProxyReply, effects) if one.to is to]
    assert all(one.is_streamed and len(one.body) <= CHUNK_BYTES for one in replies)
    return b"".join(one.body for one in replies)


# --- requests


def test_the_headers_are_answered_when_the_body_is_there() -> None:
    core = stream()
    assert played(core, HEAD, RequestBody(b"ab", False)) == []
    [pick] = played(core, RequestBody(b"cd", True))
    assert pick == Pick(HEAD, b"abcd")
    first, second = played(core, PICKED)
    assert first.to is ReplyTo.REQUEST_HEADERS
    assert first.endpoints == PICKED.endpoints
    assert first.set_headers == {**PICKED.set_headers, "content-length": "4"}
    assert first.remove_headers == ["x-evil"]
    assert second == ProxyReply(ReplyTo.REQUEST_BODY, body=b"abcd", is_streamed=True, is_last=True)
    assert core.state is StreamState.FORWARDED


def test_a_large_body_comes_back_in_bounded_pieces() -> None:
    core, body = stream(), bytes(range(256)) * 1000
    played(core, HEAD, RequestBody(body, True))
    replies = played(core, msgspec.structs.replace(PICKED, body=body + b"!"))
    assert streamed(ReplyTo.REQUEST_BODY, replies[1:]) == body + b"!"
    assert [one.is_last for one in of(ProxyReply, replies)[1:]] == [False] * 4 + [True]
    assert of(ProxyReply, replies)[0].set_headers["content-length"] == str(len(body) + 1)


def test_trailers_end_a_body_and_are_answered_last() -> None:
    core = stream()
    assert played(core, HEAD, RequestBody(b"ab", False), RequestTrailers()) == [Pick(HEAD, b"ab")]
    headers, body, trailers = played(core, PICKED)
    assert (headers.to, body.is_last) == (ReplyTo.REQUEST_HEADERS, False)
    assert trailers == ProxyReply(ReplyTo.REQUEST_TRAILERS)


@pytest.mark.parametrize("mode", BodyMode)
def test_a_request_without_a_body_is_picked_at_once(mode: BodyMode) -> None:
    core = stream()
    found = RequestHeaders(HEADERS, True, request_mode=mode)
    assert played(core, found) == [Pick(found, b"")]
    [reply] = played(core, PICKED)
    assert (reply.to, reply.endpoints, reply.set_headers) == (
        ReplyTo.REQUEST_HEADERS,
        PICKED.endpoints,
        PICKED.set_headers,
    )


@pytest.mark.parametrize("body", [None, b"changed"])
def test_a_buffered_body_is_answered_once(body: bytes | None) -> None:
    core = stream()
    head = RequestHeaders(HEADERS, request_mode=BodyMode.BUFFERED)
    assert played(core, head) == [ProxyReply(ReplyTo.REQUEST_HEADERS)]
    assert played(core, RequestBody(b"whole", False)) == [Pick(head, b"whole")], "trailers may follow"
    [reply] = played(core, msgspec.structs.replace(PICKED, body=body))
    assert (reply.to, reply.body, reply.is_streamed) == (ReplyTo.REQUEST_BODY, body, False)
    assert reply.endpoints == PICKED.endpoints
    assert reply.set_headers.get("content-length") == (None if body is None else "7")
    assert played(core, RequestTrailers()) == [ProxyReply(ReplyTo.REQUEST_TRAILERS)]


@pytest.mark.parametrize(
    "mode", [BodyMode.NONE, BodyMode.STREAMED, BodyMode.BUFFERED_PARTIAL, BodyMode.GRPC, BodyMode.of(99)]
)
def test_other_modes_are_refused_by_name(mode: BodyMode) -> None:
    [found] = played(stream(), RequestHeaders(HEADERS, request_mode=mode))
    assert (found.status, found.details) == (500, "proxy_misconfigured")
    assert mode.name.encode() in found.body


def test_a_proxy_that_only_observes_gets_nothing() -> None:
    core = stream()
    [found] = played(core, RequestHeaders(HEADERS, is_observing=True))
    assert isinstance(found, EndStream)
    assert core.state is StreamState.ENDED


def test_a_body_beyond_the_bound_is_refused_and_not_kept() -> None:
    core = stream(10)
    assert played(core, HEAD, RequestBody(b"12345", False)) == []
    [found] = played(core, RequestBody(b"678901", False))
    assert (found.status, found.details) == (413, "body_too_large")
    assert found.headers == {"content-type": "application/json"}
    assert played(core, RequestBody(b"more", True)) == [], "what was under way is ignored"


def test_a_refusal_has_its_reason_and_the_time_to_retry() -> None:
    core = stream()
    played(core, HEAD, RequestBody(b"{}", True))
    refused = Refused.of(
        ApiError(429, "full", code="overloaded", retry_after_s=2.5), headers={"X-Request-ID": "r"}
    )
    [found] = played(core, refused)
    assert isinstance(found, Immediate)
    assert (found.status, found.details) == (429, "overloaded")
    assert found.headers == {"content-type": "application/json", "X-Request-ID": "r", "Retry-After": "3"}
    assert msgspec.json.decode(found.body)["error"]["message"] == "full"


# --- deadlines


def test_a_body_that_stays_half_sent_is_refused() -> None:
    core = stream()
    played(core, HEAD, RequestBody(b"{", False), now=5.0)
    assert core.deadline() == 35.0
    assert core.handle(Wake(), 34.9) == []
    [found] = core.handle(Wake(), 35.0)
    assert isinstance(found, Immediate)
    assert (found.status, found.details) == (408, "body_timeout")


def test_an_answer_that_takes_too_long_ends_the_account() -> None:
    core = stream()
    played(core, HEAD, RequestBody(b"{}", True), PICKED, OK, now=5.0)
    played(core, ResponseBody(b"data: {}\n\ndata: {}\n\n", False), now=15.0)
    assert core.deadline() == 605.0
    measured = Measured(output_tokens=2, ttft_s=10.0, e2e_s=600.0, num_events=2)
    assert core.handle(Wake(), 605.0) == [
        Ended(False, measured),
        EndStream("the stream was answering for too long", is_late=True),
    ]
    assert core.deadline() is None


# --- answers


def test_an_answer_passes_by_unchanged_and_is_measured() -> None:
    core = stream()
    played(
        core, HEAD, RequestBody(b"{}", True), msgspec.structs.replace(PICKED, response_headers={"x-id": "1"})
    )
    reply, served = core.handle(OK, 2.0)
    assert reply == ProxyReply(ReplyTo.RESPONSE_HEADERS, {"x-id": "1"})
    assert served == Served(200, "10.0.0.1:80")
    pieces = [
        b"data: {}\n\nda",
        b"ta: {}\n\n",
        b'data: {"usage": {"prompt_tokens": 7, "completion_tokens": 3}}\n\n',
    ]
    effects: list[Any] = core.handle(ResponseBody(pieces[0], False), 3.0)
    assert len(of(FirstPiece, effects)) == 1
    effects += core.handle(ResponseBody(pieces[1], False), 4.0)
    effects += core.handle(ResponseBody(pieces[2], False), 7.0)
    effects += core.handle(ResponseBody(b"", True), 7.5)
    assert streamed(ReplyTo.RESPONSE_BODY, effects) == b"".join(pieces)
    assert len(of(FirstPiece, effects)) == 1
    assert of(ProxyReply, effects)[-1].is_last
    [ended] = of(Ended, effects)
    assert ended == Ended(True, Measured(7, 0, 3, 2.0, 3.0, 2.0, 6.5, 3))


@pytest.mark.parametrize("mode", [BodyMode.STREAMED, BodyMode.BUFFERED])
def test_the_proxy_keeps_bodies_in_other_modes(mode: BodyMode) -> None:
    core = stream()
    head = RequestHeaders(HEADERS, response_mode=mode)
    played(core, head, RequestBody(b"{}", True), PICKED, OK)
    found = played(core, ResponseBody(b"data: {}\n\n", True))
    assert ProxyReply(ReplyTo.RESPONSE_BODY) in found
    assert of(Ended, found)[0].measured.output_tokens == 1


def test_trailers_end_an_answer() -> None:
    core = stream()
    played(core, HEAD, RequestBody(b"{}", True), PICKED, OK, ResponseBody(b"x", False))
    ended, reply = played(core, ResponseTrailers())
    assert reply == ProxyReply(ReplyTo.RESPONSE_TRAILERS)
    assert ended.is_complete


def test_an_error_of_the_engine_is_not_a_complete_answer() -> None:
    core = stream()
    failed = ResponseHeaders([(":status", "500")], False, "10.0.0.1:80")
    effects = played(core, HEAD, RequestBody(b"{}", True), PICKED, failed, ResponseBody(b"oops", True))
    assert of(Served, effects) == [Served(500, "10.0.0.1:80")]
    assert not of(FirstPiece, effects)
    assert not of(Ended, effects)[0].is_complete


@pytest.mark.parametrize("status", ["", "20", "9999", "abc"])
def test_a_status_that_is_none_is_no_success(status: str) -> None:
    core = stream()
    effects = played(
        core, HEAD, RequestBody(b"{}", True), PICKED, ResponseHeaders([(":status", status)], True)
    )
    assert of(Served, effects) == [Served(0, "")]
    assert not of(Ended, effects)[0].is_complete


def test_an_answer_of_the_proxy_itself_has_no_account() -> None:
    core = stream()
    local = ResponseHeaders([(":status", "408")])
    effects = played(core, HEAD, RequestBody(b"{", False), local, ResponseBody(b"late", True))
    assert [type(one) for one in effects] == [ProxyReply, ProxyReply]
    assert core.state is StreamState.ENDED


@pytest.mark.parametrize("is_complete", [False, True])
def test_a_stream_that_is_closed_ends_its_account(is_complete: bool) -> None:
    core = stream()
    mode = BodyMode.NONE if is_complete else BodyMode.FULL_DUPLEX_STREAMED
    head = RequestHeaders(HEADERS, response_mode=mode)
    played(core, head, RequestBody(b"{}", True), PICKED, OK)
    [ended] = played(core, Closed())
    assert ended.is_complete is is_complete, "only a proxy that shows no body closes at the end of headers"
    assert played(core, Closed()) == []


@pytest.mark.parametrize("before", [(), (HEAD,), (HEAD, RequestBody(b"{", False))])
def test_a_stream_that_is_closed_early_has_nothing_to_end(before: tuple[Event, ...]) -> None:
    assert played(stream(), *before, Closed()) == []


# --- wrong order


@pytest.mark.parametrize(
    "events",
    [
        [RequestBody(b"", True)],
        [OK],
        [Unknown()],
        [HEAD, HEAD],
        [HEAD, ResponseBody(b"", True)],
        [HEAD, RequestBody(b"{}", True), PICKED, RequestBody(b"more", True)],
        [HEAD, RequestBody(b"{}", True), PICKED, HEAD],
        [HEAD, RequestBody(b"{}", True), PICKED, OK, OK],
        [HEAD, RequestBody(b"{}", True), PICKED, OK, RequestTrailers()],
    ],
)
def test_a_message_out_of_turn_ends_the_stream(events: list[Event]) -> None:
    core = stream()
    *before, last = events
    played(core, *before)
    state = core.state.value
    effects = played(core, last)
    assert effects[-1] == EndStream(f"{type(last).__name__} while {state}")
    assert bool(of(Ended, effects)) is (PICKED in before)
    assert core.state is StreamState.ENDED


EVENTS = [
    HEAD,
    RequestHeaders(HEADERS, True),
    RequestHeaders(HEADERS, request_mode=BodyMode.BUFFERED, response_mode=BodyMode.NONE),
    RequestBody(b"x" * 7, False),
    RequestBody(b"y", True),
    RequestTrailers(),
    OK,
    ResponseHeaders([], True),
    ResponseBody(b"data:", False),
    ResponseBody(b"", True),
    ResponseTrailers(),
    Unknown(),
    Wake(),
    Closed(),
]


@given(st.lists(st.sampled_from(EVENTS), max_size=12), st.lists(st.booleans(), min_size=12, max_size=12))
def test_whatever_comes_an_account_ends_once(events: list[Event], are_admitted: list[bool]) -> None:
    core, now = ExtProcStream(20, 3.0, 5.0, 0.0), 0.0
    num_picked = num_ended = 0
    for event, is_admitted in zip([*events, Closed()], [*are_admitted, True], strict=False):
        now += 1.0
        effects = core.handle(event, now)
        core.check()
        if of(Pick, effects):
            num_picked += is_admitted
            effects += core.handle(PICKED if is_admitted else Refused(503), now)
        num_ended += len(of(Ended, effects))
    num_ended += len(of(Ended, core.handle(Closed(), now)))
    assert num_ended == num_picked <= 1
    assert core.state is StreamState.ENDED


# --- measurement


@given(st.lists(st.binary(max_size=9), max_size=9))
def test_events_are_counted_wherever_they_are_cut(pieces: list[bytes]) -> None:
    meter = AnswerMeter(0.0)
    meter.is_stream = True
    whole = b"data: 1\n\ndata: 2\n\n" + b"".join(pieces).replace(b'"', b"")
    for start in range(0, len(whole), 3):
        meter.add(whole[start : start + 3], 1.0)
    assert meter.measured(1.0).output_tokens == (b"\n" + whole).count(b"\ndata:")


def test_an_answer_that_comes_whole_shows_no_times_of_its_tokens() -> None:
    meter = AnswerMeter(10.0)
    meter.add(b'{"choices": [], "usage": {"prompt_tokens": 7, ', 40.0)
    meter.add(b'"completion_tokens": 3}}', 41.0)
    assert meter.measured(42.0) == Measured(7, 0, 3, e2e_s=32.0)


def test_the_last_usage_counts_and_memory_is_bounded() -> None:
    meter = AnswerMeter(0.0)
    meter.add(b'"usage":{"input_tokens":1,"output_tokens":2}', 1.0)
    meter.add(b"x" * TAIL_BYTES * 3, 1.0)
    assert meter.measured(1.0).output_tokens == 0, "it is no longer kept"
    meter.add(b'"prompt_tokens_details":{"cached_tokens":64},"output_tokens": 5, "completion_tokens":9', 2.0)
    found = meter.measured(2.0)
    assert (found.cached_tokens, found.output_tokens) == (64, 9)

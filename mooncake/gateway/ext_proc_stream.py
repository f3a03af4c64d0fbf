# SPDX-License-Identifier: Apache-2.0
"""One request of a proxy that asks for its endpoint: the order of messages, as a core.

Owns what follows a message of the proxy (Envoy's external processing, ``ext_proc_messages.py``): the headers
and body of a request are collected up to a bound, then the endpoint is asked for (``Pick``), and the proxy
gets it with the whole body; afterwards the answer passes by and is measured. What the proxy may send in which
order is a table; anything out of turn ends the stream. Who picks, and how, is not known here
(``endpoint_picker.py``), nor is gRPC (``ext_proc_server.py``).

In the mode FULL_DUPLEX_STREAMED a proxy waits for nothing, and has no other copy of the bodies: each byte is
sent back. In the mode BUFFERED it sends the whole body when it has the reply to the headers, and keeps it.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from mooncake.http.openai import ApiError
from mooncake.machine import Wake
from mooncake.state_table import Move, StateTable, move

CHUNK_BYTES = 60 << 10
"""Largest piece of a body in one reply. Envoy's buffers, and so its limit, begin at 64 KiB."""

TAIL_BYTES = 16 << 10
"""The end of an answer that is kept, in which the engine's usage stands."""


class BodyMode(enum.Enum):
    """How a proxy sends bodies, by its name for it."""

    NONE = 0
    STREAMED = 1
    BUFFERED = 2
    BUFFERED_PARTIAL = 3
    FULL_DUPLEX_STREAMED = 4
    GRPC = 5
    UNKNOWN = -1

    @classmethod
    def of(cls, number: int) -> BodyMode:
        return next((one for one in cls if one.value == number), cls.UNKNOWN)


# --- events


class RequestHeaders(msgspec.Struct, frozen=True):
    """The begin of a request. ``headers``: names in lower case, those of HTTP/2 with their colon."""

    headers: list[tuple[str, str]]
    is_last: bool = False
    "There is no body."
    subset: list[str] | None = None
    "Endpoints (``ip:port``) that may be picked; None for all."
    request_mode: BodyMode = BodyMode.FULL_DUPLEX_STREAMED
    response_mode: BodyMode = BodyMode.FULL_DUPLEX_STREAMED
    is_observing: bool = False
    "The proxy only shows the request, and reads no reply."


class RequestBody(msgspec.Struct, frozen=True):
    data: bytes
    is_last: bool


class RequestTrailers(msgspec.Struct, frozen=True):
    pass


class ResponseHeaders(msgspec.Struct, frozen=True):
    headers: list[tuple[str, str]]
    is_last: bool = False
    served: str = ""
    "Endpoint that served the request, according to the proxy."


class ResponseBody(msgspec.Struct, frozen=True):
    data: bytes
    is_last: bool


class ResponseTrailers(msgspec.Struct, frozen=True):
    pass


class Unknown(msgspec.Struct, frozen=True):
    """A message of a kind that this protocol does not have."""


PeerEvent = (
    RequestHeaders
    | RequestBody
    | RequestTrailers
    | ResponseHeaders
    | ResponseBody
    | ResponseTrailers
    | Unknown
)


class Picked(msgspec.Struct, frozen=True):
    """The answer to ``Pick``."""

    endpoints: str
    "The endpoint, and those to try after it, with commas."
    set_headers: Mapping[str, str] = {}
    remove_headers: Sequence[str] = ()
    response_headers: Mapping[str, str] = {}
    "Headers to add to the answer for the client."
    body: bytes | None = None
    "A body in the place of the proxy's."


class Refused(msgspec.Struct, frozen=True):
    """The request is answered by the picker, with an error."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = {}
    code: str = ""

    @classmethod
    def of(
        cls, error: ApiError, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> Refused:
        """The refusal of an error; ``body``: in another form than OpenAI's."""
        found = {**(headers or {}), **error.headers()}
        return cls(error.status, error.body() if body is None else body, found, str(error.detail.code or ""))


class Closed(msgspec.Struct, frozen=True):
    """The proxy has ended the stream."""


Event = PeerEvent | Picked | Refused | Closed | Wake


# --- effects


class Pick(msgspec.Struct, frozen=True):
    """Ask for an endpoint; ``Picked`` or ``Refused`` is the answer."""

    head: RequestHeaders
    body: bytes


class ReplyTo(enum.Enum):
    """What a reply answers, by its name on the wire."""

    REQUEST_HEADERS = "request_headers"
    REQUEST_BODY = "request_body"
    REQUEST_TRAILERS = "request_trailers"
    RESPONSE_HEADERS = "response_headers"
    RESPONSE_BODY = "response_body"
    RESPONSE_TRAILERS = "response_trailers"


class ProxyReply(msgspec.Struct, frozen=True):
    """One message to the proxy."""

    to: ReplyTo
    set_headers: Mapping[str, str] = {}
    remove_headers: Sequence[str] = ()
    endpoints: str = ""
    "Destination in the metadata."
    body: bytes | None = None
    is_streamed: bool = False
    is_last: bool = False


class Immediate(msgspec.Struct, frozen=True):
    """Answer the client in the place of an engine."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    details: str


class EndStream(msgspec.Struct, frozen=True):
    """End the stream with an error."""

    reason: str
    is_late: bool = False
    "The proxy or the engine took too long, rather than being wrong."


class Served(msgspec.Struct, frozen=True):
    """The answer has begun."""

    status: int
    endpoint: str
    "As the proxy has reported it; empty if it has not."


class FirstPiece(msgspec.Struct, frozen=True):
    """The answer has begun to arrive, so its prompt is computed."""


class Measured(msgspec.Struct, frozen=True):
    """Counts and times of an answer, 0 where unknown. Times are counted from the pick; those of single tokens
    are seen only in a stream."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    ttft_s: float = 0.0
    longest_gap_s: float = 0.0
    tbt_s: float = 0.0
    e2e_s: float = 0.0
    num_events: int = 0
    "Events of a stream; the engine's count of output tokens comes only at its end."


class Ended(msgspec.Struct, frozen=True):
    """The request that was placed has ended."""

    is_complete: bool
    measured: Measured


Effect = Pick | ProxyReply | Immediate | EndStream | Served | FirstPiece | Ended


class StreamState(enum.Enum):
    OPENED = "opened"
    READING = "reading"
    PICKING = "picking"
    FORWARDED = "forwarded"
    ANSWERING = "answering"
    ENDED = "ended"


OUT_OF_TURN = "out_of_turn"


class ExtProcStream:
    """The core of one stream."""

    def __init__(
        self, max_body_bytes: int, body_timeout_s: float, request_timeout_s: float, now: float
    ) -> None:
        self.state = StreamState.OPENED
        self._max_body_bytes = max_body_bytes
        self._body_timeout_s, self._request_timeout_s = body_timeout_s, request_timeout_s
        self._wake_at = now + body_timeout_s
        self._head = RequestHeaders([])
        self._body = bytearray()
        self._has_trailers = False
        self._picked: Picked | None = None
        self._answer = AnswerMeter(now)
        self._is_ok = False

    def __repr__(self) -> str:
        return f"<ExtProcStream {self.state.value}>"

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Handle one event; after ``ENDED`` nothing more is done."""
        if self.state is StreamState.ENDED:
            return []
        known = not isinstance(event, PeerEvent) or (self.state, type(event)) in MOVES.moves
        return MOVES.handle(lambda: self.state, event if known else OUT_OF_TURN, self, event, now)

    def deadline(self) -> float | None:
        return None if self.state is StreamState.ENDED else self._wake_at

    def check(self) -> None:
        assert len(self._body) <= self._max_body_bytes
        assert self.state is not StreamState.READING or self._picked is None

    def story(self, key: str) -> list[str]:
        """Nothing: the conductor has the story of a request."""
        return []

    # --- the request

    def _began(self, event: RequestHeaders, now: float) -> list[Effect]:
        self._head = event
        self._wake_at = now + self._body_timeout_s
        if event.is_observing:
            reason = "the proxy is in observability mode, in which no endpoint can be picked"
            return self._cut(reason, now)
        if event.is_last:
            return self._pick(now)
        if event.request_mode is BodyMode.BUFFERED:
            self.state = StreamState.READING
            return [ProxyReply(ReplyTo.REQUEST_HEADERS)]
        if event.request_mode is not BodyMode.FULL_DUPLEX_STREAMED:
            message = (
                f"the proxy's request_body_mode is {event.request_mode.name}; allowed: "
                "FULL_DUPLEX_STREAMED or BUFFERED"
            )
            return self._refuse(Refused.of(ApiError(500, message, code="proxy_misconfigured")))
        self.state = StreamState.READING
        return []

    def _read(self, event: RequestBody, now: float) -> list[Effect]:
        if len(self._body) + len(event.data) > self._max_body_bytes:
            message = f"the body is larger than {self._max_body_bytes} bytes"
            return self._refuse(Refused.of(ApiError(413, message, code="body_too_large")))
        self._body += event.data
        # A buffered body comes in one message, whatever follows it.
        is_whole = event.is_last or self._head.request_mode is BodyMode.BUFFERED
        return self._pick(now) if is_whole else []

    def _read_trailers(self, event: RequestTrailers, now: float) -> list[Effect]:
        self._has_trailers = True
        return self._pick(now)

    def _pick(self, now: float) -> list[Effect]:
        self.state = StreamState.PICKING
        self._wake_at = now + self._request_timeout_s
        return [Pick(self._head, bytes(self._body))]

    def _forward(self, event: Picked, now: float) -> list[Effect]:
        self.state, self._picked = StreamState.FORWARDED, event
        self._answer = AnswerMeter(now)
        has_body = not self._head.is_last
        is_buffered = has_body and self._head.request_mode is BodyMode.BUFFERED
        body = bytes(self._body) if event.body is None else event.body
        self._body.clear()
        set_headers = dict(event.set_headers)
        if has_body and (not is_buffered or event.body is not None):
            set_headers["content-length"] = str(len(body))
        if is_buffered:
            changed = event.body  # None leaves the proxy's copy as it is
            return [
                ProxyReply(ReplyTo.REQUEST_BODY, set_headers, event.remove_headers, event.endpoints, changed)
            ]
        effects: list[Effect] = [
            ProxyReply(ReplyTo.REQUEST_HEADERS, set_headers, event.remove_headers, event.endpoints)
        ]
        if has_body:
            effects += _pieces(ReplyTo.REQUEST_BODY, body, not self._has_trailers)
        if self._has_trailers:
            effects.append(ProxyReply(ReplyTo.REQUEST_TRAILERS))
        return effects

    def _pass_trailers(self, event: RequestTrailers, now: float) -> list[Effect]:
        return [ProxyReply(ReplyTo.REQUEST_TRAILERS)]

    def _refuse(self, event: Refused, now: float = 0.0) -> list[Effect]:
        self.state = StreamState.ENDED
        self._body.clear()
        headers = {"content-type": "application/json", **event.headers}
        return [Immediate(event.status, headers, event.body, event.code)]

    # --- the answer

    def _answered(self, event: ResponseHeaders, now: float) -> list[Effect]:
        """The answer's headers; before a pick they are an answer of the proxy itself."""
        self.state = StreamState.ANSWERING
        self._body.clear()
        fields = dict(event.headers)
        found = fields.get(":status", "")
        status = int(found) if re.fullmatch(r"[1-5][0-9]{2}", found) else 0
        self._is_ok = 200 <= status < 300
        self._answer.is_stream = fields.get("content-type", "").startswith("text/event-stream")
        added = {} if self._picked is None else self._picked.response_headers
        reply = ProxyReply(ReplyTo.RESPONSE_HEADERS, added)
        served = [] if self._picked is None else [Served(status, event.served)]
        return [*served, *self._end(now), reply] if event.is_last else [reply, *served]

    def _answer_piece(self, event: ResponseBody, now: float) -> list[Effect]:
        effects: list[Effect] = []
        if event.data and not self._answer.has_begun and self._is_ok and self._picked is not None:
            effects.append(FirstPiece())
        self._answer.add(event.data, now)
        if event.is_last:  # before the reply: with it the proxy closes the stream
            effects += self._end(now)
        if self._head.response_mode is BodyMode.FULL_DUPLEX_STREAMED:
            effects += _pieces(ReplyTo.RESPONSE_BODY, event.data, event.is_last)
        else:
            effects.append(ProxyReply(ReplyTo.RESPONSE_BODY))
        return effects

    def _answer_trailers(self, event: ResponseTrailers, now: float) -> list[Effect]:
        return [*self._end(now), ProxyReply(ReplyTo.RESPONSE_TRAILERS)]

    def _end(self, now: float) -> list[Effect]:
        self.state = StreamState.ENDED
        if self._picked is None:
            return []
        return [Ended(self._is_ok, self._answer.measured(now))]

    # --- other ends

    def _closed(self, event: Closed, now: float) -> list[Effect]:
        was_answering = self.state is StreamState.ANSWERING
        effects = self._end(now)
        # Without the answer's body the end of the stream is all that shows the answer's.
        has_ended = was_answering and self._head.response_mode is BodyMode.NONE
        return [
            Ended(self._is_ok and has_ended, one.measured) if isinstance(one, Ended) else one
            for one in effects
        ]

    def _too_late(self, event: Wake, now: float) -> list[Effect]:
        if now < self._wake_at:
            return []
        if self.state is StreamState.READING:
            message = f"the body was not complete within {self._body_timeout_s:g} s"
            return self._refuse(Refused.of(ApiError(408, message, code="body_timeout")))
        return self._cut(f"the stream was {self.state.value} for too long", now, is_late=True)

    def _out_of_turn(self, event: PeerEvent, now: float) -> list[Effect]:
        return self._cut(f"{type(event).__name__} while {self.state.value}", now)

    def _cut(self, reason: str, now: float, is_late: bool = False) -> list[Effect]:
        is_placed = self._picked is not None
        self.state = StreamState.ENDED
        self._body.clear()
        ended: list[Effect] = [Ended(False, self._answer.measured(now))] if is_placed else []
        return [*ended, EndStream(reason, is_late)]


def _pieces(to: ReplyTo, body: bytes, is_last: bool) -> list[Effect]:
    """``body`` in replies of a bounded size; one even if it is empty."""
    starts = range(0, max(1, len(body)), CHUNK_BYTES)
    return [
        ProxyReply(
            to,
            body=body[start : start + CHUNK_BYTES],
            is_streamed=True,
            is_last=is_last and start + CHUNK_BYTES >= len(body),
        )
        for start in starts
    ]


class AnswerMeter:
    """Measures an answer as it passes by: times of its pieces, and the engine's counts of tokens at its end.

    A text can't contain the names that are searched, since its quotation marks are escaped.
    """

    _NAMES = (
        ("prompt_tokens", re.compile(rb'"(?:prompt_tokens|input_tokens)"\s*:\s*(\d{1,9})')),
        ("cached_tokens", re.compile(rb'"(?:cached_tokens|cache_read_input_tokens)"\s*:\s*(\d{1,9})')),
        ("output_tokens", re.compile(rb'"(?:completion_tokens|output_tokens)"\s*:\s*(\d{1,9})')),
    )
    _EVENT = b"\ndata:"

    def __init__(self, now: float) -> None:
        self.is_stream = False
        self._began = self._last = now
        self._first_at: float | None = None
        self._longest_gap_s = 0.0
        self._tail = b"\n"
        self._num_events = 0

    @property
    def has_begun(self) -> bool:
        return self._first_at is not None

    def add(self, data: bytes, now: float) -> None:
        if not data:
            return
        if self._first_at is None:
            self._first_at = now
        else:
            self._longest_gap_s = max(self._longest_gap_s, now - self._last)
        self._last = now
        overlap = self._tail[-len(self._EVENT) + 1 :]
        self._num_events += (overlap + data).count(self._EVENT)
        self._tail = (self._tail + data)[-TAIL_BYTES:]

    def measured(self, now: float) -> Measured:
        counts = {name: [*pattern.finditer(self._tail)][-1:] for name, pattern in self._NAMES}
        found = {name: int(matches[0][1]) for name, matches in counts.items() if matches}
        if not self.is_stream:
            return Measured(**found, e2e_s=now - self._began)
        found.setdefault("output_tokens", self._num_events)
        ttft_s = 0.0 if self._first_at is None else self._first_at - self._began
        tbt_s = (self._last - self._began - ttft_s) / max(1, found.get("output_tokens", 0) - 1)
        return Measured(
            **found,
            ttft_s=ttft_s,
            longest_gap_s=self._longest_gap_s,
            tbt_s=max(0.0, tbt_s),
            e2e_s=now - self._began,
            num_events=self._num_events,
        )


def _moves() -> Iterator[tuple[tuple[StreamState, type | str], Move[StreamState]]]:
    opened, reading, picking = StreamState.OPENED, StreamState.READING, StreamState.PICKING
    forwarded, answering, ended = StreamState.FORWARDED, StreamState.ANSWERING, StreamState.ENDED
    one = ExtProcStream
    yield (opened, RequestHeaders), move(reading, picking, ended, by=one._began)
    yield (opened, Refused), move(ended, by=one._refuse)
    yield (reading, RequestBody), move(reading, picking, ended, by=one._read)
    yield (reading, RequestTrailers), move(picking, by=one._read_trailers)
    yield (reading, ResponseHeaders), move(answering, ended, by=one._answered, meaning="the proxy answers")
    yield (reading, Refused), move(ended, by=one._refuse)
    yield (picking, Picked), move(forwarded, by=one._forward)
    yield (picking, Refused), move(ended, by=one._refuse)
    yield (forwarded, RequestTrailers), move(forwarded, by=one._pass_trailers)
    yield (forwarded, ResponseHeaders), move(answering, ended, by=one._answered)
    yield (answering, ResponseBody), move(answering, ended, by=one._answer_piece)
    yield (answering, ResponseTrailers), move(ended, by=one._answer_trailers)
    for state in (opened, reading, picking, forwarded, answering):
        yield (state, OUT_OF_TURN), move(ended, by=one._out_of_turn, meaning="any other message")
        yield (state, Closed), move(ended, by=one._closed)
        yield (state, Wake), move(state, ended, by=one._too_late)


MOVES: StateTable[StreamState] = StateTable("stream of ext_proc", StreamState, dict(_moves()))

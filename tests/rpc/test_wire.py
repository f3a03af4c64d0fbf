# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import tracemalloc

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake.errors import InvalidArgument, MooncakeError, OutOfMemory, ProtocolError
from mooncake.rpc.wire import (
    GREETING_ID,
    HEADER_BYTES,
    MAX_BODY_BYTES,
    OLD_PREFACE,
    OPEN_GREETING,
    PREFACE,
    Failure,
    FrameDecoder,
    GreetingDecoder,
    decoder_for,
    encode,
    error_of,
    header,
)
from mooncake.security.greeting import MAX_GREETING_BYTES, Hello


class Ask(msgspec.Struct, array_like=True, tag="ask"):
    text: str


class Other(msgspec.Struct, array_like=True, tag="other"):
    number: int


@given(
    texts=st.lists(st.text(max_size=50), max_size=6),
    cuts=st.lists(st.integers(min_value=1, max_value=40), min_size=1, max_size=20),
    greeting=st.booleans(),
)
def test_frames_survive_any_cutting_of_the_stream(texts: list[str], cuts: list[int], greeting: bool) -> None:
    stream = b"".join(encode(i, Ask(text)) for i, text in enumerate(texts))
    early = GreetingDecoder() if greeting else None
    if greeting:
        stream = OPEN_GREETING + stream
    frames, decode, seen, turn = FrameDecoder(), decoder_for([Ask]), [], 0
    while stream:
        length = cuts[turn % len(cuts)]
        piece, stream, turn = stream[:length], stream[length:], turn + 1
        if early is not None:
            if early.take(piece) is None:
                continue
            piece, early = early.rest, None
        seen += [(request_id, decode.decode(body).text) for request_id, body in frames.feed(piece)]
    assert seen == list(enumerate(texts))


def test_a_client_of_version_2_greets_as_one_without_a_key() -> None:
    frame = bytes(encode(7, Ask("hello")))
    stream = OLD_PREFACE + frame
    for cut in range(len(stream)):
        early = GreetingDecoder()
        first = early.take(stream[:cut])
        assert (first or early.take(stream[cut:])) == Hello()
        assert early.rest == (stream[:cut] if first else stream)[len(OLD_PREFACE) :]


def test_a_foreign_protocol_is_refused_at_its_first_byte() -> None:
    with pytest.raises(ProtocolError, match="GET"):
        GreetingDecoder().take(b"GET / HTTP/1.1\r\n")
    with pytest.raises(ProtocolError, match="mooncake-rpc-1"):
        GreetingDecoder().take(b"mooncake-rpc-1\r\n")
    early = GreetingDecoder()
    assert early.take(PREFACE[:3]) is None
    assert not early.is_ours


@pytest.mark.parametrize(
    "frame",
    [
        bytes(encode(GREETING_ID, Hello(tenant="x" * MAX_GREETING_BYTES))),
        bytes(encode(1, Hello())),
        bytes(encode(GREETING_ID, Ask("hello"))),
        bytes(encode(GREETING_ID, Failure("x", "y"))),
        header(MAX_BODY_BYTES, GREETING_ID, 0),
        bytes(encode(GREETING_ID, Hello()))[:-1] + b"!",
        b"\xff" * HEADER_BYTES,
    ],
    ids=["too long", "a request's id", "a request", "a failure", "a huge frame", "damaged", "no frame"],
)
def test_what_is_no_greeting_is_refused_at_once(frame: bytes) -> None:
    with pytest.raises(ProtocolError):
        GreetingDecoder().take(PREFACE + frame)


def test_small_pieces_take_little_more_memory_than_is_counted() -> None:
    frames = FrameDecoder()
    frame = bytes(encode(1, Ask("x" * 400_000)))
    frames.feed(frame[:20])
    tracemalloc.start()
    try:
        for at in range(20, len(frame) - 2, 2):
            assert not frames.feed(frame[at : at + 2])
        held_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held_bytes < 2 * frames.kept_bytes
    [(_, body)] = frames.feed(frame[frames.kept_bytes :])
    assert decoder_for([Ask]).decode(body) == Ask("x" * 400_000)


def test_an_oversized_frame_is_refused_before_it_is_buffered() -> None:
    with pytest.raises(ProtocolError, match="bytes"):
        FrameDecoder().feed(header(MAX_BODY_BYTES + 1, 1, 0))
    with pytest.raises(InvalidArgument, match="size of Ask"):
        encode(1, Ask("x" * (MAX_BODY_BYTES + 1)))


@given(at=st.integers(min_value=0), bit=st.integers(0, 7), text=st.text(max_size=50))
def test_a_bit_that_changed_on_the_way_is_noticed(at: int, bit: int, text: str) -> None:
    stream, decode = encode(3, Ask(text)) + encode(4, Ask("next")), decoder_for([Ask])
    stream[at % len(stream)] ^= 1 << bit
    frames, seen = FrameDecoder(), []
    try:
        for place in range(len(stream)):
            seen += [
                (i, decode.decode(body).text) for i, body in frames.feed(bytes(stream[place : place + 1]))
            ]
    except ProtocolError:
        pass
    assert seen in ([], [(3, text)]), "what came before the bit, and nothing else"


def test_a_damaged_length_does_not_swallow_what_comes_after_it() -> None:
    stream = encode(3, Ask("x"))
    stream[2] ^= 1
    with pytest.raises(ProtocolError, match="header"):
        FrameDecoder().feed(bytes(stream))


def test_messages_are_distinguished_by_their_tag() -> None:
    decode = decoder_for([Ask, Other])
    assert decode.decode(encode(7, Other(5))[HEADER_BYTES:]) == Other(5)
    assert decode.decode(encode(7, Failure("internal_error", "no"))[HEADER_BYTES:]) == Failure(
        "internal_error", "no"
    )
    with pytest.raises(msgspec.ValidationError):
        decoder_for([Ask]).decode(encode(7, Other(5))[HEADER_BYTES:])


def test_a_failure_becomes_the_error_its_code_names() -> None:
    error = error_of(Failure("out_of_memory", "no huge pages"), "the node at here:1")
    assert type(error) is OutOfMemory
    assert str(error) == "no huge pages (from the node at here:1)"
    assert type(error_of(Failure("invalid_argument", "key is empty"), "x")) is InvalidArgument
    assert type(error_of(Failure("from the future", "?"), "x")) is MooncakeError

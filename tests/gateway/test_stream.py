"""However the bytes are cut, the events are the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake.errors import ProtocolError
from mooncake.gateway import stream
from mooncake.gateway.stream import EventParser


@given(st.lists(st.integers(1, 9), max_size=20), st.sampled_from([b"\n", b"\r\n"]))
def test_cuts_do_not_matter(cuts: list[int], newline: bytes) -> None:
    wire = b'data: {"a": 1}|| data: x|data:b||: comment||event: e|data: one|data: two||data: [DONE]||'
    wire = wire.replace(b"|", newline).replace(newline + b" data", newline + b"data")
    parser, found = EventParser(), []
    for size in cuts:
        found += parser.feed(wire[:size])
        wire = wire[size:]
    found += parser.feed(wire)
    assert found == [b'{"a": 1}', b"x\nb", b"one\ntwo", b"[DONE]"]


def test_an_event_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "MAX_EVENT_BYTES", 100)
    with pytest.raises(ProtocolError):
        EventParser().feed(b"data: " + b"x" * 200)

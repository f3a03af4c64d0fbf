# SPDX-License-Identifier: Apache-2.0
"""However a large object is cut, the result is that of one call."""

from __future__ import annotations

import json
import threading
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake.http import large_json

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=8) | st.just('",[]{}\\'),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=30,
)


@given(st.dictionaries(st.text(max_size=4), values, max_size=5), st.integers(1, 40), st.booleans())
def test_the_pieces_make_the_whole(fields: dict[str, Any], size: int, is_spaced: bool) -> None:
    text = json.dumps(fields, indent=1 if is_spaced else None).encode()
    before, large_json.PIECE_BYTES = large_json.PIECE_BYTES, size
    try:
        assert large_json.decode(text) == fields
    finally:
        large_json.PIECE_BYTES = before


@given(st.dictionaries(st.text(max_size=4), values, min_size=1, max_size=5), st.integers(1, 40), st.data())
def test_what_is_no_json_is_none_in_pieces_either(fields: dict[str, Any], size: int, data: Any) -> None:
    text = json.dumps(fields).encode()
    at = data.draw(st.integers(0, len(text) - 1))
    damaged = text[:at] + data.draw(st.sampled_from([b"", b",", b"]", b'"', b"1"])) + text[at + 1 :]
    before, large_json.PIECE_BYTES = large_json.PIECE_BYTES, size
    try:
        expected = msgspec.json.decode(damaged)
    except msgspec.DecodeError:
        expected = "damaged"
    try:
        found = large_json.decode(damaged)
    except msgspec.DecodeError:
        found = "damaged"
    finally:
        large_json.PIECE_BYTES = before
    assert found == expected


def test_many_token_ids_come_in_order() -> None:
    ids = list(range(300_000))
    text = json.dumps({"prompt": ids, "text": "x" * 300_000, "n": 1}).encode()
    assert large_json.decode(text) == {"prompt": ids, "text": "x" * 300_000, "n": 1}


@pytest.mark.parametrize("text", [b"[1, 2]", b'"x"', b"7"])
def test_what_is_no_object_is_itself(text: bytes) -> None:
    assert large_json.decode(text) == json.loads(text)


def test_a_long_last_item_ends_the_cutting() -> None:
    """No comma follows the position of the next cut."""
    items = [*range(100_000), "x" * 400_000]
    assert large_json.decode(json.dumps({"prompt": items}).encode()) == {"prompt": items}


@pytest.mark.parametrize("pad", [0, large_json.PIECE_BYTES])
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}"), ('[1,{"a":', "}]")])
def test_values_nested_too_deep_are_no_json(opening: str, closing: str, pad: int) -> None:
    levels = opening.count("[") + opening.count("{")

    def nested(depth: int) -> bytes:
        num = depth // levels
        return ('{"pad": "' + "[" * pad + '", "deep": ' + opening * num + "1" + closing * num + "}").encode()

    most = large_json.MAX_NESTING - 2
    assert large_json.decode(nested(most)) == json.loads(nested(most))
    for depth in (large_json.MAX_NESTING + 1, 2_000, 200_000):
        with pytest.raises(msgspec.DecodeError, match="levels deep"):
            large_json.decode(nested(depth))


@pytest.mark.parametrize("pad", [0, large_json.PIECE_BYTES])
@pytest.mark.parametrize("value", [b'"\xff"', b'["a", "\xed\xa0\x80"]', b'{"\xc3": 1}'])
def test_strings_that_are_not_utf_8_are_no_json(value: bytes, pad: int) -> None:
    with pytest.raises(msgspec.DecodeError, match="UTF-8"):
        large_json.decode(b'{"pad": "' + b"x" * pad + b'", "prompt": ' + value + b"}")


@pytest.mark.parametrize(
    "content",
    [b"{", b'{"a": "\xff"}', b'{"a": "\\ud800"}', b'{"a": 1}', b"[" * 100_000],
    ids=["cut off", "bytes", "surrogate", "type", "deep"],
)
def test_what_is_not_of_the_shape_is_one_kind_of_error(content: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        large_json.decode_as(content, dict[str, str])


async def test_a_large_body_is_decoded_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_json, "LARGE_BYTES", 10)
    here = threading.get_ident()
    assert await large_json.decoded(b"short", lambda content: threading.get_ident()) == here
    assert await large_json.decoded(b"longer than ten", lambda content: threading.get_ident()) != here

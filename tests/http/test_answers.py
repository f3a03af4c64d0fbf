# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import copy
import json
from typing import Any

import msgspec
import pytest

from mooncake.http.answers import (
    MAX_WHOLE_LOGPROBS,
    AnswerPiece,
    ChatWriter,
    CompletionWriter,
    JoinedPieces,
    bound_logprobs,
    chat_logprobs,
)
from mooncake.http.openai import (
    AnyRequest,
    ApiError,
    ChatCompletionRequest,
    CompletionLogprobs,
    CompletionRequest,
    TokenLogprob,
    TopLogprob,
    Usage,
    parse_request,
)

HELLO = [{"role": "user", "content": "hello"}]
USAGE = Usage.of(10, 3, 4)
HALVES = [TopLogprob("\ufffd", -0.25, [0xC3]), TopLogprob("\ufffd", -2.0, [0xA9])]
COLUMNS = CompletionLogprobs(
    [0],
    [-0.25],
    ["\ufffd"],
    [{"\ufffd": -0.25, "token_id:9": -2.0}],
    [TokenLogprob("\ufffd", -0.25, [0xC3], HALVES)],
)


def event(data: bytes) -> Any:
    assert data.startswith(b"data: ") and data.endswith(b"\n\n")
    return json.loads(data[6:])


def body(answer: msgspec.Struct) -> Any:
    return json.loads(msgspec.json.encode(answer))


def test_pieces_join_in_order() -> None:
    par, is_ = TokenLogprob("Par", -0.5), TokenLogprob("is", -0.1)
    joined = JoinedPieces(1)
    first = CompletionLogprobs([0], [-0.5], ["Par"], [{"Par": -0.5}], [par])
    later = CompletionLogprobs([3], [-0.1], ["is"], [None], [is_])
    joined.add(AnswerPiece(1, "Par", [5], first))
    joined.add(AnswerPiece(1, "is", [6], later, "stop", "\n"))
    logprobs = CompletionLogprobs([0, 3], [-0.5, -0.1], ["Par", "is"], [{"Par": -0.5}, None], [par, is_])
    assert joined.whole() == AnswerPiece(1, "Paris", [5, 6], logprobs, "stop", "\n")


def test_an_end_without_a_text_leaves_what_was_joined() -> None:
    joined = JoinedPieces(0)
    joined.add(AnswerPiece(0, "Par", [5], CompletionLogprobs([0], [-0.5], ["Par"], [None]), None, 7))
    joined.add(AnswerPiece(0, finish_reason="length"))
    logprobs = CompletionLogprobs([0], [-0.5], ["Par"], [None], [])
    assert joined.whole() == AnswerPiece(0, "Par", [5], logprobs, "length", 7)
    assert JoinedPieces(3).whole() == AnswerPiece(3)


def test_joining_does_not_change_what_was_streamed() -> None:
    first = AnswerPiece(text="a", token_ids=[1], logprobs=CompletionLogprobs([0], [-0.5], ["a"], [None], []))
    before = copy.deepcopy(first)
    joined = JoinedPieces(0)
    joined.add(first)
    joined.add(AnswerPiece(text="b", token_ids=[2], logprobs=first.logprobs))
    assert first == before


def test_a_piece_costs_no_copy_of_those_before_it() -> None:
    def lists(joined: JoinedPieces) -> list[int]:
        """Where the columns are: a copy would be elsewhere."""
        fields = vars(joined)
        logprobs = fields["_logprobs"]
        columns = [getattr(logprobs, name) for name in logprobs.__struct_fields__]
        return [id(found) for found in [*fields.values(), *columns] if isinstance(found, list)]

    joined = JoinedPieces(0)
    row = TokenLogprob("a", -0.5)
    kept = []
    for number in range(100):
        logprobs = CompletionLogprobs([number], [-0.5], ["a"], [None], [row])
        joined.add(AnswerPiece(0, "a", [number], logprobs))
        kept.append(lists(joined))
        assert not any(isinstance(found, str) for found in vars(joined).values()), "a text is joined once"
    assert len(kept[0]) == 7
    assert all(places == kept[0] for places in kept)
    whole = joined.whole()
    assert (whole.text, whole.token_ids) == ("a" * 100, [*range(100)])


@pytest.mark.parametrize("writer", [CompletionWriter, ChatWriter])
@pytest.mark.parametrize("with_token_ids", [False, True])
def test_log_probabilities_that_will_not_be_written_are_not_kept(
    writer: type[CompletionWriter | ChatWriter], with_token_ids: bool
) -> None:
    written = writer("a-1", 123, "m", with_token_ids)
    joined, with_all = written.joined(2), JoinedPieces(2)
    for one in (joined, with_all):
        for number in range(3):
            one.add(AnswerPiece(2, "Ã", [number], COLUMNS))
    assert body(written.whole([joined.whole()], USAGE)) == body(written.whole([with_all.whole()], USAGE))
    logprobs = joined.whole().logprobs
    assert logprobs is not None and logprobs.content is not msgspec.UNSET
    kept = (len(logprobs.top_logprobs), len(logprobs.content))
    assert kept == ((0, 3) if writer is ChatWriter else (3, 3 * with_token_ids))


@pytest.mark.parametrize(
    ("fields", "num_logprobs"),
    [
        ({"prompt": "a", "logprobs": 20, "n": 2, "max_tokens": 7}, 2 * 7 * 21 * 3),
        ({"prompt": "a", "logprobs": 0, "max_tokens": 10**9}, 1000 + 10 + 500),
        ({"messages": HELLO, "logprobs": True, "top_logprobs": 4, "min_tokens": 504}, (1000 + 10 + 500) * 5),
        ({"messages": HELLO, "logprobs": True, "max_completion_tokens": 20}, 20 + 10 + 20),
        ({"messages": HELLO, "n": 128}, 0),
        ({"prompt": "a", "logprobs": 20, "n": 2, "stream": True}, 0),
    ],
)
def test_log_probabilities_of_a_whole_answer_are_bounded(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], num_logprobs: int
) -> None:
    request: AnyRequest
    if "prompt" in fields:
        request = parse_request(CompletionRequest, json.dumps(fields).encode())
    else:
        request = parse_request(ChatCompletionRequest, json.dumps(fields).encode())
    monkeypatch.setattr("mooncake.http.answers.MAX_WHOLE_LOGPROBS", num_logprobs)
    bound_logprobs(request, (1000, 10, 500))
    if num_logprobs:
        monkeypatch.setattr("mooncake.http.answers.MAX_WHOLE_LOGPROBS", num_logprobs - 1)
        with pytest.raises(ApiError, match=f"may have {num_logprobs} log probabilities"):
            bound_logprobs(request, (1000, 10, 500))


def test_a_chat_without_a_limit_gets_one_for_its_log_probabilities() -> None:
    """It was the default that asked for too many of them, and not the client."""
    fields = {"messages": HELLO, "logprobs": True, "top_logprobs": 20, "n": 2}
    request = parse_request(ChatCompletionRequest, json.dumps(fields).encode())
    bound_logprobs(request, [1000])
    assert request.output_limit is None, "an answer that fills this context has few enough"
    bound_logprobs(request, [262_144])
    assert request.output_limit == MAX_WHOLE_LOGPROBS // (2 * 21)


@pytest.mark.parametrize("with_token_ids", [False, True])
def test_a_text_completion_whole_and_in_chunks(with_token_ids: bool) -> None:
    writer = CompletionWriter("cmpl-1", 123, "m", with_token_ids)
    whole = body(
        writer.whole([AnswerPiece(0, "Paris", [5, 6], None, "stop")], USAGE, {"do_remote_prefill": True})
    )
    assert whole["object"] == "text_completion"
    assert whole["choices"][0]["text"] == "Paris"
    assert ("token_ids" in whole["choices"][0]) == with_token_ids
    assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == 4
    assert whole["kv_transfer_params"] == {"do_remote_prefill": True}
    assert writer.opening(2) == b""
    chunk = event(writer.chunk(AnswerPiece(0, "Par", [5])))
    assert chunk["choices"][0]["text"] == "Par"
    assert chunk["choices"][0]["finish_reason"] is None
    assert "usage" not in chunk
    last = event(writer.usage_chunk(USAGE))
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 13


def test_a_chat_says_who_speaks_first_and_text_afterwards() -> None:
    writer = ChatWriter("chatcmpl-1", 123, "m", False)
    opening = [event(part + b"\n\n") for part in writer.opening(2).split(b"\n\n") if part]
    assert [chunk["choices"][0]["delta"]["role"] for chunk in opening] == ["assistant", "assistant"]
    assert [chunk["choices"][0]["index"] for chunk in opening] == [0, 1]
    assert event(writer.chunk(AnswerPiece(1, "Par")))["choices"][0]["delta"] == {"content": "Par"}
    end = event(writer.chunk(AnswerPiece(1, "", [7], None, "length")))["choices"][0]
    assert end["delta"] == {}
    assert end["finish_reason"] == "length"


def test_a_whole_chat() -> None:
    writer = ChatWriter("chatcmpl-1", 123, "m", False)
    whole = body(writer.whole([AnswerPiece(0, "Paris", [5], None, "stop")], USAGE))
    assert whole["object"] == "chat.completion"
    assert whole["choices"][0]["message"] == {"content": "Paris", "role": "assistant", "refusal": None}
    assert "kv_transfer_params" not in whole


def test_logprobs_of_a_chat_are_rows_with_every_alternative() -> None:
    rows = chat_logprobs(COLUMNS)
    assert rows is not None and rows.content is not None
    row = rows.content[0]
    assert (row.token, row.logprob, row.bytes, row.top_logprobs) == ("\ufffd", -0.25, [0xC3], HALVES)
    assert chat_logprobs(None) is None


@pytest.mark.parametrize("with_token_ids", [False, True])
def test_rows_of_a_text_completion_are_for_a_gateway(with_token_ids: bool) -> None:
    writer = CompletionWriter("cmpl-1", 123, "m", with_token_ids)
    logprobs = event(writer.chunk(AnswerPiece(0, "", [5], COLUMNS)))["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [{"\ufffd": -0.25, "token_id:9": -2.0}]
    assert ("content" in logprobs) == with_token_ids
    assert COLUMNS.content, "the piece itself is not changed"

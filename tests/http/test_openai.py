# SPDX-License-Identifier: Apache-2.0
"""Requests are parsed as by the public API, and the error of an invalid one names the field."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mooncake.http import openai
from mooncake.http.openai import (
    UNSUPPORTED,
    ApiError,
    ChatCompletionRequest,
    CompletionChoice,
    CompletionRequest,
    CompletionResponse,
    Usage,
    parse_request,
)

HELLO = [{"role": "user", "content": "hello"}]


def completion(**fields: Any) -> CompletionRequest:
    return parse_request(CompletionRequest, json.dumps({"prompt": "hello", **fields}).encode())


def chat(**fields: Any) -> ChatCompletionRequest:
    return parse_request(ChatCompletionRequest, json.dumps({"messages": HELLO, **fields}).encode())


@pytest.mark.parametrize(
    ("prompt", "batch"),
    [
        ("one", ["one"]),
        ([1, 2, 3], [[1, 2, 3]]),
        (["one", "two"], ["one", "two"]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_every_form_of_prompt_is_a_batch(prompt: Any, batch: Any) -> None:
    assert completion(prompt=prompt).prompts == batch


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": 5}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, "two"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"max_tokens": "five"}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"stop": 5}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a", 5]}, "stop[1]"),
        ({"stop": ["a"] * 33}, "stop"),
        ({"stop": "a" * (openai.MAX_STOP_CHARS + 1)}, "stop"),
        ({"stop": ["a" * 1000] * 20}, "stop"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids"),
        ({"stop_token_ids": [10**4000]}, "stop_token_ids[0]"),
        ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias"),
        ({"logit_bias": {"a" * 10_000: 1}}, "logit_bias"),
        ({"cache_salt": "a" * 1025}, "cache_salt"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"echo": True}, "echo"),
        ({"suffix": "end"}, "suffix"),
        ({"logprobs": 100}, "logprobs"),
        ({"model": 5}, "model"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"kv_transfer_params": []}, "kv_transfer_params"),
        ({"seed": 2**64}, "seed"),
    ],
)
def test_a_wrong_completion_names_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        completion(**fields)
    assert (caught.value.status, caught.value.detail.param) == (400, param)
    assert caught.value.detail.type == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": "hello"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"logprobs": 5}, "logprobs"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs"),
    ],
)
def test_a_wrong_chat_names_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    assert (caught.value.status, caught.value.detail.param) == (400, param)


def test_a_missing_field_is_named() -> None:
    with pytest.raises(ApiError) as caught:
        parse_request(CompletionRequest, b"{}")
    assert (caught.value.status, caught.value.detail.param) == (400, "prompt")


@pytest.mark.parametrize("body", [b"", b"{", b'{"prompt": "\xff"}', b"[1]", b"null", b'"text"'])
def test_what_is_no_json_object_is_a_bad_request(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse_request(CompletionRequest, body)
    assert caught.value.status == 400


NEUTRAL = [(name, value) for name, values in UNSUPPORTED.items() for value in (*values, None)]


@pytest.mark.parametrize("shape", [completion, chat], ids=["completion", "chat"])
@pytest.mark.parametrize(("name", "value"), NEUTRAL, ids=[f"{name}={value}" for name, value in NEUTRAL])
def test_an_unsupported_field_may_ask_for_nothing(shape: Any, name: str, value: Any) -> None:
    assert shape(**{name: value}) == shape()


@pytest.mark.parametrize("shape", [completion, chat], ids=["completion", "chat"])
@pytest.mark.parametrize("name", UNSUPPORTED)
def test_an_unsupported_field_is_named(shape: Any, name: str) -> None:
    with pytest.raises(ApiError) as caught:
        shape(**{name: {"something": 5}})
    detail = caught.value.detail
    assert (caught.value.status, detail.param, detail.code) == (400, name, "unsupported")
    assert '{"something": 5}; allowed: ' in detail.message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"presence_penalty": 0.5}, "presence_penalty is 0.5; allowed: 0 or null, "),
        ({"logit_bias": {"5": -100}}, 'logit_bias is {"5": -100}; allowed: {} or null, '),
        ({"guided_regex": "x" * 200}, 'guided_regex is "' + "x" * 116 + "...; allowed: null, "),
        ({"guided_json": {}}, "guided_json is {}; allowed: null, "),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_the_error_of_an_unsupported_field_says_what_is_allowed(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    assert str(caught.value).startswith(message)


def test_special_tokens_around_a_prompt_are_as_they_are_by_default() -> None:
    assert completion(add_special_tokens=True) == completion()
    assert chat(add_special_tokens=False) == chat()
    for shape, value in ((completion, False), (chat, True)):
        with pytest.raises(ApiError) as caught:
            shape(add_special_tokens=value)
        assert caught.value.detail.param == "add_special_tokens"


def test_the_documentation_has_every_field() -> None:
    page = (Path(__file__).parents[2] / "docs" / "gateway.md").read_text()
    [section] = re.findall(r"\n## Fields of a request\n(.*?)\n## ", page, re.DOTALL)
    named = set(re.findall(r"`([a-z_]+)`", section))
    known = {*UNSUPPORTED, *CompletionRequest.model_fields, *ChatCompletionRequest.model_fields}
    assert not known - named
    assert not UNSUPPORTED.keys() & {*CompletionRequest.model_fields, *ChatCompletionRequest.model_fields}


def test_unknown_fields_are_harmless() -> None:
    assert chat(metadata={"a": 1}, temperature=0) == chat(temperature=0)


@pytest.mark.parametrize(
    ("shape", "required"),
    [(CompletionRequest, {"prompt": "hello"}), (ChatCompletionRequest, {"messages": HELLO})],
    ids=["completion", "chat"],
)
def test_null_is_the_default_of_every_optional_field(shape: Any, required: dict[str, Any]) -> None:
    nulls = dict.fromkeys(shape.model_fields)
    assert len(nulls) > 20
    request = parse_request(shape, json.dumps({**nulls, **required}).encode())
    assert request == parse_request(shape, json.dumps(required).encode())


def test_null_is_the_default_inside_of_options_too() -> None:
    request = chat(stream=True, stream_options={"include_usage": None, "continuous_usage_stats": None})
    assert request.stream_options == openai.StreamOptions()


@pytest.mark.parametrize(
    ("shape", "field"), [(CompletionRequest, "prompt"), (ChatCompletionRequest, "messages")]
)
def test_null_is_no_value_of_a_required_field(shape: Any, field: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_request(shape, json.dumps({field: None}).encode())
    assert (caught.value.status, caught.value.detail.param) == (400, field)


def call(arguments: Any = '{"city": "Paris"}', **more: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}, **more}


def test_tool_calls_of_earlier_answers_are_given_to_the_template() -> None:
    asked = {"role": "assistant", "content": None, "refusal": None, "tool_calls": [call()]}
    answered = {"role": "tool", "tool_call_id": "c1", "content": "mild"}
    request = chat(messages=[*HELLO, asked, answered])
    function = {"name": "weather", "arguments": {"city": "Paris"}}
    assert [message.for_template() for message in request.messages] == [
        *HELLO,
        {"role": "assistant", "content": "", "tool_calls": [{**call(), "function": function}]},
        answered,
    ]


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ("", {}),
        (None, {}),
        ("{}", {}),
        ("[1]", [1]),
        ('{"city": ', '{"city": '),
        ("[" * 100_000, "[" * 100_000),
    ],
    ids=["empty", "null", "no arguments", "a list", "no JSON", "too deep"],
)
def test_arguments_of_a_tool_call_are_an_object_for_the_template(arguments: Any, given: Any) -> None:
    request = chat(messages=[{"role": "assistant", "tool_calls": [call(arguments)]}])
    [made] = request.messages[0].for_template()["tool_calls"]
    assert made["function"]["arguments"] == given


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "assistant", "tool_calls": [{"type": "function"}]}, "messages[0].tool_calls[0].function"),
        ({"role": "assistant", "tool_calls": [call(5)]}, "messages[0].tool_calls[0].function.arguments"),
        ({"role": "assistant", "tool_calls": [call(type="custom")]}, "messages[0].tool_calls[0].type"),
        ({"role": "assistant", "tool_calls": {}}, "messages[0].tool_calls"),
        ({"role": "user", "content": "x", "tool_calls": [call()]}, "messages[0].tool_calls"),
        ({"role": "tool", "content": None, "tool_call_id": "c1"}, "messages[0].content"),
        ({"role": "tool", "content": "x", "tool_call_id": 5}, "messages[0].tool_call_id"),
    ],
)
def test_a_wrong_tool_call_names_the_field(message: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat(messages=[message])
    assert (caught.value.status, caught.value.detail.param) == (400, param)


def test_no_alternatives_may_be_asked_for_without_logprobs() -> None:
    assert not chat(top_logprobs=0).logprobs


def test_output_limits() -> None:
    assert completion().output_limit == 16
    assert chat(max_tokens=5, max_completion_tokens=7).output_limit == 7


def test_parts_of_text_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(messages=[{"role": "user", "content": parts}]).messages[0].content == "ab"


def test_an_error_is_an_openai_error_object() -> None:
    error = openai.context_length_exceeded(9000, 8192)
    detail = json.loads(error.body())["error"]
    assert detail["code"] == "context_length_exceeded"
    assert detail["param"] == "messages"
    assert "9000" in detail["message"] and "8192" in detail["message"]
    assert ApiError(429, "full", retry_after_s=1.2).headers() == {"Retry-After": "2"}
    assert len(openai.model_not_found("x" * 10**6, "m").body()) < 300


def test_answers_leave_out_what_was_not_asked_for() -> None:
    answer = CompletionResponse(id="c", created=1, model="m", choices=[CompletionChoice(0, "x")])
    encoded = json.loads(openai.to_json(answer))
    assert "usage" not in encoded and "token_ids" not in encoded["choices"][0]
    assert encoded["choices"][0]["finish_reason"] is None
    answer.usage = Usage.of(10, 1, 4)
    answer.choices[0].token_ids = [7]
    read = msgspec.json.decode(openai.to_json(answer), type=CompletionResponse)
    assert read == answer
    assert json.loads(openai.to_json(answer))["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}

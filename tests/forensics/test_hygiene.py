# SPDX-License-Identifier: Apache-2.0
"""Hygiene rules: what they change, what they leave alone, and that prompts hit after them."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Sequence
from typing import Any

import pytest

from mooncake.errors import InvalidArgument
from mooncake.forensics import hygiene
from mooncake.forensics.differences import Passages, difference
from mooncake.forensics.hygiene import AppliedRules, apply_rules, read_rules
from tests.forensics.agent_prompts import chatml, pair_of, prose, tool

CHAT = "/v1/chat/completions"


Json = dict[str, Any]


def applied(
    rules: list[str], request: dict[str, Any], route: str = CHAT
) -> tuple[dict[str, Any], AppliedRules]:
    changed = copy.deepcopy(request)
    return changed, apply_rules(read_rules(rules), changed, route)


def chat(*contents: str) -> dict[str, Any]:
    roles = ["system", "user", "assistant"]
    return {"messages": [{"role": roles[min(at, 2)], "content": one} for at, one in enumerate(contents)]}


@pytest.mark.parametrize(
    "rule",
    [
        "",
        "drop",
        "drop-line",
        "drop-line:",
        "sort-tools:x",
        "drop-line:(",
        "model= sort-tools",
        "drop-line:(?=a)",
    ],
)
def test_a_rule_that_can_not_be_read_is_refused(rule: str) -> None:
    with pytest.raises(InvalidArgument, match="hygiene_rules"):
        read_rules([rule])


def test_a_line_is_dropped_and_the_rest_stays() -> None:
    request = chat("x-billing: 5f0c\nBe helpful.\n", "Say x-billing: 1\nplease")
    changed, found = applied(["drop-line:^x-billing:"], request)
    assert [one["content"] for one in changed["messages"]] == ["Be helpful.\n", "Say x-billing: 1\nplease"]
    assert found.header() == "drop-line=1"


def test_a_part_of_a_message_that_is_left_empty_is_removed() -> None:
    parts = [{"type": "text", "text": "x-billing: 5f0c"}, {"type": "text", "text": "Be helpful."}]
    request = {"system": parts, "messages": [{"role": "user", "content": "hi"}]}
    changed, _ = applied(["drop-line:^x-billing:"], request, "/v1/messages")
    assert changed["system"] == [{"type": "text", "text": "Be helpful."}]


def test_a_line_moves_behind_the_last_message() -> None:
    request = chat("Now: 10:15\nBe helpful.", "hi")
    changed, found = applied(["move-line-to-end:^Now:"], request)
    assert [one["content"] for one in changed["messages"]] == ["Be helpful.", "hi\nNow: 10:15"]
    assert found.counts == {"move-line-to-end:^Now:": 1}
    parts = {
        "messages": [request["messages"][0], {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    }
    changed, _ = applied(["move-line-to-end:^Now:"], parts)
    assert changed["messages"][1]["content"][1] == {"type": "text", "text": "Now: 10:15"}
    responses = {"instructions": "Now: 10:15\nBe helpful.", "input": "hi"}
    changed, _ = applied(["move-line-to-end:^Now:"], responses, "/v1/responses")
    assert changed == {"instructions": "Be helpful.", "input": "hi\nNow: 10:15"}


def test_a_line_does_not_move_behind_an_answer_that_has_begun() -> None:
    changed, _ = applied(["move-line-to-end:^Now:"], chat("Now: 10:15\nBe helpful.", "hi", "Sure,"))
    assert changed["messages"][2] == {"role": "user", "content": "Now: 10:15"}
    assert changed["messages"][3]["content"] == "Sure,"


def test_a_completion_s_prompt_has_no_end_to_move_to() -> None:
    request = {"prompt": "Now: 10:15\nQ: hi\nA:"}
    assert applied(["move-line-to-end:^Now:"], request)[0] == request
    assert applied(["drop-line:^Now:"], request)[0] == {"prompt": "Q: hi\nA:"}
    assert applied(["drop-line:^Now:"], {"prompt": [1, 2, 3]})[0] == {"prompt": [1, 2, 3]}


def test_tools_are_sorted_wherever_they_are() -> None:
    random_ = random.Random(1)
    tools = [tool(random_, name) for name in ("write", "grep", "read")]
    by_name = sorted(tools, key=lambda one: one["function"]["name"])
    changed, found = applied(["sort-tools"], {**chat("hi", "hi"), "tools": tools})
    assert changed["tools"] == by_name and found.header() == "sort-tools=1"
    texts = [
        f"Tools:\n{json.dumps(one, indent=indent)}\nDone." for one in (tools, by_name) for indent in (None, 2)
    ]
    for given, expected in ((texts[0], texts[2]), (texts[1], texts[3])):
        assert applied(["sort-tools"], chat(given, "hi"))[0]["messages"][0]["content"] == expected
    lines = "<tools>\n{}\n</tools>"
    given, expected = (lines.format("\n".join(map(json.dumps, row))) for row in (tools, by_name))
    assert applied(["sort-tools"], chat(given, "hi"))[0]["messages"][0]["content"] == expected


def test_keys_are_sorted_and_the_layout_stays() -> None:
    request = {**chat('State: {"b": 1, "a": {"d": "é", "c": 2}} end', "hi"), "tools": [{"name": "x", "a": 1}]}
    changed, _ = applied(["sort-json-keys"], request)
    assert changed["messages"][0]["content"] == 'State: {"a": {"c": 2, "d": "é"}, "b": 1} end'
    assert json.dumps(changed["tools"]) == '[{"a": 1, "name": "x"}]'
    layout = '{\n  "a": 1,\n  "b": {\n    "c": 2\n  }\n}'
    shuffled = '{\n  "b": {\n    "c": 2\n  },\n  "a": 1\n}'
    assert applied(["sort-json-keys"], chat(shuffled, "hi"))[0] == chat(layout, "hi")
    sorted_ = chat('{"a":1,"b":2} and {not json}', "hi")
    changed, found = applied(["sort-json-keys"], sorted_)
    assert changed == sorted_ and not found.counts


def test_a_rule_is_limited_to_its_model_and_route() -> None:
    request = {**chat("Now: 10:15\nBe helpful.", "hi"), "model": "small"}
    for rule, matches in (
        ("model=small drop-line:^Now:", True),
        ("model=large drop-line:^Now:", False),
        ("model=small route=/v1/messages drop-line:^Now:", False),
        (f"model=small route={CHAT} drop-line:^Now:", True),
    ):
        assert bool(applied([rule], request)[1].counts) is matches, rule


@pytest.mark.parametrize(
    "request_",
    [{}, {"messages": 5}, {"messages": [None, {"content": {}}]}, {"tools": {}}, {"input": [[]], "system": 3}],
)
def test_what_is_no_request_stays_as_it_is(request_: dict[str, Any]) -> None:
    rules = ["drop-line:x", "move-line-to-end:x", "sort-tools", "sort-json-keys"]
    assert applied(rules, request_)[0] == request_


def test_the_gain_is_what_hits_behind_the_first_change_that_differs() -> None:
    rules = ["drop-line:^id:"]
    body = "The same text in every request of this agent.\n" * 10
    _, first = applied(rules, chat(f"{body}id: 1\n{body}", "hi"))
    _, same = applied(rules, chat(f"{body}id: 1\n{body}", "hi"))
    _, other = applied(rules, chat(f"{body}id: 2\n{body}", "hi"))
    _, none = applied(rules, chat(f"{body}{body}", "hi"))
    assert same.first_gain(first) is None, "it would have been a hit without the rule"
    for one in (other, none):
        gain = one.first_gain(first)
        assert gain is not None and abs(gain - 0.5) < 0.01


RULES_BY_SHAPE = {
    "nonce header": [
        r"drop-line:(?i)(x-anthropic-billing-header|x-request-id|session|cache-bust|nonce|trace|"
        r"conversation id|agent|env id|run_id|random seed)"
    ],
    "tools as JSON": ["sort-tools"],
    "JSON keys": ["sort-json-keys"],
}


@pytest.mark.parametrize("shape", RULES_BY_SHAPE)
def test_after_the_rules_a_session_hits(shape: str) -> None:
    """Both prompts are the same up to the end of the first: at least 95 % of it hits."""
    rules = RULES_BY_SHAPE[shape]
    num_common = num_whole = 0
    for seed in range(40):
        pair = pair_of(shape, seed)
        texts = [
            chatml(applied(rules, {"messages": messages})[0]["messages"])
            for messages in (pair.first_messages, pair.second_messages)
        ]
        first = texts[0].removesuffix("<|im_start|>assistant\n")
        same = next((at for at, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), len(first))
        num_common += min(same, len(first))
        num_whole += len(first)
    assert num_common >= 0.95 * num_whole, f"{num_common} of {num_whole}"


def test_prose_is_never_touched() -> None:
    request = chat(prose(random.Random(3), 400), prose(random.Random(4), 400))
    changed, found = applied(["drop-line:^x-billing", "sort-tools", "sort-json-keys"], request)
    assert changed == request and found.header() == "" and not found.changes


@pytest.mark.parametrize(
    "shape",
    [
        "nonce header",
        "nonce inside",
        "clock line",
        "date line",
        "counter line",
        "tools as JSON",
        "tools as lines",
        "JSON keys",
    ],
)
def test_the_rule_that_an_explanation_names_makes_the_next_prompt_hit(shape: str) -> None:
    """At least 95 % of the first prompt hits in the second one after the named rule."""
    num_common = num_whole = 0
    for seed in range(40):
        pair = pair_of(shape, seed)
        messages = [pair.first_messages, pair.second_messages]
        first, second = map(chatml, messages)
        at = next(at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
        passages = Passages(first[:at][-8000:], second[at:][:24_000], first[at:][:24_000], 0.9, 0.9)
        rule = difference(passages).rule
        first, second = (
            chatml(applied([rule] if rule else [], {"messages": one})[0]["messages"]) for one in messages
        )
        first = first.removesuffix("<|im_start|>assistant\n")
        pairs = zip(first, second, strict=False)
        num_common += next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
        num_whole += len(first)
    assert num_common >= 0.95 * num_whole, f"{num_common} of {num_whole}"


def test_tools_in_lines_and_sections_are_sorted_and_other_lists_are_not() -> None:
    bullets = "You have these tools:\n- write: Writes (a file).\n- `read`: Reads.\n- bash\n\nBe careful."
    changed, found = applied(["sort-tools"], chat(bullets, "hi"))
    expected = "You have these tools:\n- bash\n- `read`: Reads.\n- write: Writes (a file).\n\nBe careful."
    assert changed["messages"][0]["content"] == expected and found.header() == "sort-tools=1"
    numbers = "Available functions:\n1. write: Writes.\n2. read: Reads."
    changed, _ = applied(["sort-tools"], chat(numbers, "hi"))
    assert changed["messages"][0]["content"] == "Available functions:\n1. read: Reads.\n2. write: Writes."
    sections = "# Tools\n\n## write\nWrites.\nArguments: path\n\n## read\nReads.\n\nBe careful."
    changed, _ = applied(["sort-tools"], chat(sections, "hi"))
    expected = "# Tools\n\n## read\nReads.\n\n## write\nWrites.\nArguments: path\n\nBe careful."
    assert changed["messages"][0]["content"] == expected
    for text in ("Steps:\n- write: first\n- read: then", "Use tools:\nwrite: a\nread: b", "- b\n- a"):
        assert applied(["sort-tools"], chat(text, "hi"))[0] == chat(text, "hi")


def test_many_tools_in_a_text_are_left_alone() -> None:
    def listed(names: Sequence[str]) -> str:
        return "Tools:\n" + "\n".join(f"- {name}: x" for name in names)

    most = [f"t{number:05}" for number in reversed(range(hygiene._MOST_WRITTEN_TOOLS))]
    assert applied(["sort-tools"], chat(listed(most)))[0] == chat(listed(sorted(most)))
    text = f"{listed(['b', 'a'])}\n\n{listed(most)}"
    expected = text.replace("- b: x\n- a: x", "- a: x\n- b: x")
    assert applied(["sort-tools"], chat(text))[0] == chat(expected), "the list that is too long stays"


def test_a_list_within_a_tool_that_moves_goes_with_it() -> None:
    inner = '{"name": "y"}, {"name": "x"}'
    text = f"Tools:\n- write: {inner}\n- read: Reads."
    expected = f"Tools:\n- read: Reads.\n- write: {inner}"
    assert applied(["sort-tools"], chat(text))[0] == chat(expected)


@pytest.mark.parametrize(
    "text",
    [
        "Tools:\n- " + "_" * 100_000 + "!",
        "Tools:\n## " + "_" * 100_000 + "!",
        "Tools:\n- a" + "`" * 100_000 + " " * 100_000 + "!",
        '{"name": "b"}' + " " * 1_000_000 + '.{"name": "a"}',
        "word " * 100_000 + "\n" * 200_000,
    ],
    ids=["name", "heading", "marks", "gap", "blank lines"],
)
def test_the_work_grows_with_the_text_only(text: str) -> None:
    """With the square of its length, this would not end."""
    assert applied(["sort-tools"], chat(text))[0] == chat(text)


def test_parts_that_are_left_empty_are_removed_together() -> None:
    """With the square of their number, this would not end."""
    parts = [{"type": "text", "text": "id: 1"} for _ in range(50_000)]
    changed, _ = applied(["drop-line:^id:"], {"messages": [{"role": "user", "content": parts}]})
    assert changed["messages"][0]["content"] == [{"type": "text", "text": ""}]

# SPDX-License-Identifier: Apache-2.0
"""Pairs of prompts as agents send them, in which one thing changes from the first to the second.

A pair is drawn from a seed: the shape of the change, its wording, the texts around it and the chat template.
The offset of the first difference is known by construction (the characters that both have in common), and the
class is that of the shape. The tokenizer is a dictionary of words that grows: exact, and without a model.
"""

from __future__ import annotations

import base64
import datetime
import json
import random
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Messages = list[dict[str, str]]

_TEXT = (
    "the agent reads a file before it changes anything and reports every failed command to the user with its "
    "output because tests must pass while code stays small readable typed documented branch commit review "
    "path module function argument value error message server client request answer cache block prefix memory"
)
_WORDS = _TEXT.split()
_NAMES = (
    "read_file write_file list_directory grep run_command apply_patch web_search fetch_url create_branch "
    "open_issue send_mail query_database take_screenshot schedule_job translate_text"
)
_TOOL_NAMES = _NAMES.split()


class WordTokenizer:
    """Tokens are words with the space before them; the vocabulary grows with the texts."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._words: list[str] = []

    def encode(self, text: str) -> list[int]:
        found = []
        for word in re.findall(r"<\|\w+\|>| ?[A-Za-z]{1,7}|\d{1,3}|\s|[^\sA-Za-z\d]", text):
            if word not in self._ids:
                self._ids[word] = len(self._words)
                self._words.append(word)
            found.append(self._ids[word])
        return found

    def text_of(self, token_ids: list[int]) -> str:
        return "".join(self._words[token] for token in token_ids)


def chatml(messages: Messages) -> str:
    body = "".join(f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>\n" for one in messages)
    return body + "<|im_start|>assistant\n"


def llama(messages: Messages) -> str:
    body = "".join(
        f"<|start_header_id|>{one['role']}<|end_header_id|>\n\n{one['content']}<|eot_id|>" for one in messages
    )
    return "<|begin_of_text|>" + body + "<|start_header_id|>assistant<|end_header_id|>\n\n"


def plain(messages: Messages) -> str:
    return "".join(f"{one['role']}\n{one['content']}\n" for one in messages)


def mistral(messages: Messages) -> str:
    if messages[0]["role"] == "system":  # which these templates put before the first question
        text = f"{messages[0]['content']}\n\n{messages[1]['content']}"
        messages = [{"role": "user", "content": text}, *messages[2:]]
    parts = [
        f"{one['content']}</s>" if one["role"] == "assistant" else f"[INST] {one['content']} [/INST]"
        for one in messages
    ]
    return "<s>" + "".join(parts)


def gemma(messages: Messages) -> str:
    body = "".join(f"<start_of_turn>{one['role']}\n{one['content']}<end_of_turn>\n" for one in messages)
    return "<bos>" + body + "<start_of_turn>model\n"


def as_json(messages: Messages) -> str:
    return json.dumps(messages, separators=(",", ":"))


TEMPLATES: list[Callable[[Messages], str]] = [chatml, llama, plain, mistral, gemma, as_json]


@dataclass
class PromptPair:
    """Two prompts of one session."""

    shape: str
    kinds: tuple[str, ...]
    "Classes that are right."
    first: str
    second: str
    first_messages: Messages = field(default_factory=list)
    second_messages: Messages = field(default_factory=list)

    @property
    def offset(self) -> int:
        """The first character that differs."""
        pairs = zip(self.first, self.second, strict=False)
        return next(at for at, (one, other) in enumerate(pairs) if one != other)


def prose(random_: random.Random, num_words: int) -> str:
    words = [random_.choice(_WORDS) for _ in range(num_words)]
    lines = [" ".join(words[at : at + 14]) for at in range(0, num_words, 14)]
    return "\n".join(line.capitalize() + "." for line in lines)


def conversation(random_: random.Random, num_turns: int, words: int = 60) -> Messages:
    found: Messages = []
    for _ in range(num_turns):
        found.append({"role": "user", "content": prose(random_, words)})
        found.append({"role": "assistant", "content": prose(random_, words)})
    return found


def tool(random_: random.Random, name: str) -> dict[str, Any]:
    properties = {
        one: {"type": "string", "description": prose(random_, 6)} for one in random_.sample(_WORDS, 3)
    }
    parameters = {"type": "object", "properties": properties, "required": [next(iter(properties))]}
    return {
        "type": "function",
        "function": {"name": name, "description": prose(random_, 12), "parameters": parameters},
    }


# --- values that change


def _hex(random_: random.Random, num: int) -> str:
    return f"{random_.getrandbits(4 * num):0{num}x}"


def _alnum(random_: random.Random, num: int) -> str:
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
    return "".join(random_.choice(letters) for _ in range(num))


NONCE_LINES: list[Callable[[random.Random], str]] = [
    lambda r: (
        f"x-anthropic-billing-header: cc_version=2.1.37.{_hex(r, 3)}; cc_entrypoint=cli; cch={_hex(r, 5)};"
    ),
    lambda r: f"X-Request-Id: {uuid.UUID(int=r.getrandbits(128), version=4)}",
    lambda r: f"[session {base64.b64encode(r.randbytes(18)).decode()}]",
    lambda r: f"cache-bust={r.randrange(10**8, 10**9)}",
    lambda r: f"nonce: {_hex(r, 16)}",
    lambda r: f"<!-- trace {_hex(r, 32)} -->",
    lambda r: f"Conversation ID: conv_{_alnum(r, 24)}",
    lambda r: f"You are agent {_alnum(r, 12)} in workspace /tmp/agent-{_hex(r, 8)}/repo.",
    lambda r: f"traceparent: 00-{_hex(r, 32)}-{_hex(r, 16)}-01",
    lambda r: f'<env id="{_alnum(r, 10)}" salt="{_hex(r, 6)}">',
    lambda r: f"run_id = req_{_alnum(r, 16)}",
    lambda r: f"Random seed {r.randrange(10**9, 10**10)} applies to this request.",
]


def _instant(random_: random.Random) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(1_760_000_000 + random_.randrange(3 * 10**7), datetime.UTC)


CLOCK_LINES: list[Callable[[datetime.datetime], str]] = [
    lambda t: f"Current time: {t.isoformat()}",
    lambda t: f"The current date and time is {t:%A, %B %d, %Y at %I:%M:%S %p} UTC.",
    lambda t: f"Timestamp: {t.timestamp():.0f}",
    lambda t: f"now_ms={t.timestamp() * 1000:.0f}",
    lambda t: f"It is {t:%H:%M} now.",
    lambda t: f"Date: {t:%a, %d %b %Y %H:%M:%S} +0000",
    lambda t: f"Local time is {t:%a %b %d %H:%M:%S} UTC {t:%Y}",
    lambda t: f'{{"now": "{t:%Y-%m-%dT%H:%M:%S.%f}Z", "zone": "UTC"}}',
    lambda t: f"<timestamp>{t:%Y%m%dT%H%M%SZ}</timestamp>",
    lambda t: f"Clock: {t:%d.%m.%Y %H:%M:%S}",
]
DATE_LINES: list[Callable[[datetime.datetime], str]] = [
    lambda t: f"Today's date: {t:%Y-%m-%d}",
    lambda t: f"Today is {t:%A}, {t:%B} {t.day}, {t.year}.",
    lambda t: f"Date: {t:%d/%m/%Y}",
    lambda t: f"The date is {t.day} {t:%B %Y}.",
    lambda t: f"<date>{t:%m/%d/%y}</date>",
    lambda t: f"As of {t:%b} {t.day}, {t.year}, the following holds.",
    lambda t: f"今天是{t.year}年{t.month}月{t.day}日",
]
COUNTER_LINES: list[Callable[[int], str]] = [
    lambda n: f"Turn {n} of 50",
    lambda n: f"Tokens used so far: {n * 1373} of 200000",
    lambda n: f"Request #{n}",
    lambda n: f"You have {90 - n} messages left in this session.",
    lambda n: f"step={n}",
    lambda n: f"[{n}/60] Continue with the task.",
    lambda n: f"Iteration {n:04d}",
    lambda n: f"Remaining budget: ${20 - n * 0.137:.2f}",
    lambda n: f"attempt no. {n}",
    lambda n: f"<context_usage>{n}%</context_usage>",
]


# --- shapes


Pair = tuple[Messages, Messages]


def _with_line(random_: random.Random, first: str, second: str, at_head: bool) -> Pair:
    """The same conversation, one turn later, with another line in its system prompt."""
    before = "" if at_head else prose(random_, 50) + "\n"
    behind = "\n" + prose(random_, 220)
    history = conversation(random_, random_.randrange(1, 4))
    more = conversation(random_, 1)
    question = {"role": "user", "content": prose(random_, 30)}
    systems = [{"role": "system", "content": before + line + behind} for line in (first, second)]
    return [systems[0], *history, more[0]], [systems[1], *history, *more, question]


def _drawn_until_different(draw: Callable[[], str]) -> tuple[str, str]:
    first = draw()
    while (second := draw()) == first:
        pass
    return first, second


def nonce_header(random_: random.Random) -> Pair:
    line = random_.choice(NONCE_LINES)
    return _with_line(random_, *_drawn_until_different(lambda: line(random_)), at_head=True)


def nonce_inside(random_: random.Random) -> Pair:
    line = random_.choice(NONCE_LINES)
    return _with_line(random_, *_drawn_until_different(lambda: line(random_)), at_head=False)


def clock_line(random_: random.Random) -> Pair:
    line, first = random_.choice(CLOCK_LINES), _instant(random_)
    second = first + datetime.timedelta(seconds=random_.randrange(60, 9000))
    return _with_line(random_, line(first), line(second), at_head=random_.random() < 0.5)


def date_line(random_: random.Random) -> Pair:
    line, first = random_.choice(DATE_LINES), _instant(random_)
    second = first + datetime.timedelta(days=random_.randrange(1, 40))
    return _with_line(random_, line(first), line(second), at_head=random_.random() < 0.5)


def counter_line(random_: random.Random) -> Pair:
    line, number = random_.choice(COUNTER_LINES), random_.randrange(1, 40)
    return _with_line(random_, line(number), line(number + random_.randrange(1, 9)), random_.random() < 0.5)


def _system_pair(random_: random.Random, first: str, second: str) -> Pair:
    head, rest = prose(random_, 40), prose(random_, 80)
    history = conversation(random_, 2)
    systems = [{"role": "system", "content": f"{head}\n\n{one}\n\n{rest}"} for one in (first, second)]
    return [systems[0], *history[:-1]], [
        systems[1],
        *history,
        {"role": "user", "content": prose(random_, 20)},
    ]


def _shuffled(random_: random.Random, items: list[Any]) -> list[Any]:
    found = list(items)
    while found == items:
        random_.shuffle(found)
    return found


def tools_as_json(random_: random.Random) -> Pair:
    tools = [tool(random_, name) for name in random_.sample(_TOOL_NAMES, random_.randrange(3, 10))]
    indent = random_.choice([None, 2])
    texts = [json.dumps(one, indent=indent) for one in (tools, _shuffled(random_, tools))]
    head = random_.choice(["You have these tools:", "# Tools", "<tools>", "Available functions:"])
    return _system_pair(random_, f"{head}\n{texts[0]}", f"{head}\n{texts[1]}")


def tools_as_lines(random_: random.Random) -> Pair:
    tools = [tool(random_, name) for name in random_.sample(_TOOL_NAMES, random_.randrange(3, 10))]
    style = random_.choice(["json", "bullets", "numbers", "headings"])

    def lines(row: list[dict[str, Any]]) -> str:
        found = []
        for number, one in enumerate(row, 1):
            name, text = one["function"]["name"], one["function"]["description"].replace("\n", " ")
            if style == "json":
                found.append(json.dumps(one))
            elif style == "headings":
                found.append(f"## {name}\n{text}\nArguments: path, text\n")
            else:
                found.append(f"{number}. {name}: {text}" if style == "numbers" else f"- {name}: {text}")
        return "\n".join(found)

    head = random_.choice(["You have these tools:", "# Tools", "<tools>", "Available functions:"])
    return _system_pair(random_, f"{head}\n{lines(tools)}", f"{head}\n{lines(_shuffled(random_, tools))}")


def json_keys(random_: random.Random) -> Pair:
    def state() -> dict[str, Any]:
        found: dict[str, Any] = {one: prose(random_, 5) for one in random_.sample(_WORDS, 5)}
        found["limits"] = {"files": random_.randrange(90), "depth": random_.randrange(9), "mode": "safe"}
        return found

    first = state()
    second = {name: first[name] for name in _shuffled(random_, [*first])}
    if random_.random() < 0.4:
        second = dict(first)
        second["limits"] = {name: first["limits"][name] for name in _shuffled(random_, [*first["limits"]])}
    indent = random_.choice([None, 2])
    if random_.random() < 0.5:
        schema = tool(random_, "read_file")
        properties = schema["function"]["parameters"]["properties"]
        other = json.loads(json.dumps(schema))
        other["function"]["parameters"]["properties"] = {
            name: properties[name] for name in _shuffled(random_, [*properties])
        }
        first, second = schema, other
    texts = [json.dumps(one, indent=indent) for one in (first, second)]
    return _system_pair(random_, f"State:\n{texts[0]}", f"State:\n{texts[1]}")


_REASONING = [
    ("<think>\n{}\n</think>\n\n", ""),
    ("<think>\n{}\n</think>\n\n", "<think>\n\n</think>\n\n"),
    ("<thinking>{}</thinking>\n", ""),
    ("[THINK]{}[/THINK]", ""),
    ("<reasoning>\n{}\n</reasoning>\n", ""),
    ("Thought: {}\n", ""),
    ("<|channel|>analysis<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>", ""),
]


def dropped_reasoning(random_: random.Random) -> Pair:
    with_, without = random_.choice(_REASONING)
    thoughts = prose(random_, 80)
    answer, question = prose(random_, 60), {"role": "user", "content": prose(random_, 40)}
    system = {"role": "system", "content": prose(random_, 100)}
    result = {"role": random_.choice(["user", "tool"]), "content": prose(random_, 60)}
    kept = {"role": "assistant", "content": with_.format(thoughts) + answer}
    left = {"role": "assistant", "content": without + answer}
    more = conversation(random_, 1)
    return [system, question, kept, result], [system, question, left, result, *more[::-1]]


_SUMMARIES = [
    "This session is being continued from a previous conversation that ran out of context. Summary: {}",
    "Summary of the conversation so far:\n{}",
    "[Earlier messages were compacted]\n{}",
    "<conversation_summary>{}</conversation_summary>",
    "Here is a recap of what was done before:\n{}",
    "The older turns were condensed to save context: {}",
]


def compaction(random_: random.Random) -> Pair:
    system = {"role": "system", "content": prose(random_, 150)}
    history = conversation(random_, random_.randrange(5, 10))
    summary = {"role": "user", "content": random_.choice(_SUMMARIES).format(prose(random_, 50))}
    kept = history[-2:] if random_.random() < 0.5 else []
    question = {"role": "user", "content": prose(random_, 20)}
    return [system, *history, question], [
        system,
        summary,
        *kept,
        {"role": "user", "content": prose(random_, 25)},
    ]


def left_out(random_: random.Random) -> Pair:
    system = {"role": "system", "content": prose(random_, 150)}
    history = conversation(random_, random_.randrange(5, 10))
    question = {"role": "user", "content": prose(random_, 20)}
    return [system, *history, question], [system, *history[4:], question, *conversation(random_, 1)[::-1]]


def edited_history(random_: random.Random) -> Pair:
    system = {"role": "system", "content": prose(random_, 80)}
    history = conversation(random_, 4)
    at = random_.randrange(2, 6)
    words = history[at]["content"].split(" ")
    place = random_.randrange(3, len(words) - 8)
    how = random_.randrange(3)
    if how == 0:
        words[place : place + 3] = ["another", "wording", "stands", "here"]
    elif how == 1:
        del words[place : place + 4]
    else:
        words[place:place] = ["please", "also", "consider", "this"]
    changed = [*history]
    changed[at] = {**history[at], "content": " ".join(words)}
    question = {"role": "user", "content": prose(random_, 20)}
    return [system, *history, question], [system, *changed, question, *conversation(random_, 1)[::-1]]


def other_state(random_: random.Random) -> Pair:
    files = random_.sample(_WORDS, 6)
    first = "Git status:\n" + "\n".join(f" M src/{one}.py" for one in files[:3])
    second = "Git status:\n" + "\n".join(f"?? lib/{one}.txt" for one in files[3:])
    return _system_pair(random_, first, second)


def other_tools(random_: random.Random) -> Pair:
    tools = [tool(random_, name) for name in random_.sample(_TOOL_NAMES, 6)]
    return _system_pair(
        random_, f"Tools:\n{json.dumps(tools)}", f"Tools:\n{json.dumps(tools[:2] + tools[3:])}"
    )


def new_question(random_: random.Random) -> Pair:
    system = {"role": "system", "content": prose(random_, 200)}
    questions = [prose(random_, 120), prose(random_, 120)]
    return [system, {"role": "user", "content": questions[0]}], [
        system,
        {"role": "user", "content": questions[1]},
    ]


SHAPES: dict[str, tuple[Callable[[random.Random], Pair], tuple[str, ...]]] = {
    "nonce header": (nonce_header, ("nonce",)),
    "nonce inside": (nonce_inside, ("nonce",)),
    "clock line": (clock_line, ("clock",)),
    "date line": (date_line, ("clock",)),
    "counter line": (counter_line, ("counter",)),
    "tools as JSON": (tools_as_json, ("tool_order",)),
    "tools as lines": (tools_as_lines, ("tool_order",)),
    "JSON keys": (json_keys, ("json_key_order",)),
    "dropped reasoning": (dropped_reasoning, ("dropped_reasoning",)),
    "compaction": (compaction, ("compaction",)),
    "left out": (left_out, ("compaction",)),
    "edited history": (edited_history, ("edited_history",)),
    "other state": (other_state, ("other",)),
    "other tools": (other_tools, ("other",)),
    "new question": (new_question, ("new_text",)),
}


def pair_of(shape: str, seed: int) -> PromptPair:
    """A pair of prompts, the same one for the same arguments."""
    random_ = random.Random(f"{shape} {seed}")
    make, kinds = SHAPES[shape]
    first, second = make(random_)
    template = random_.choice(TEMPLATES)
    return PromptPair(shape, kinds, template(first), template(second), first, second)

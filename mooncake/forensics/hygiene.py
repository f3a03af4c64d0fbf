# SPDX-License-Identifier: Apache-2.0
"""Rules that keep the beginning of prompts the same from request to request; applied only where they are set.

It owns the syntax of the rules and what they do to a request of any of the served APIs, given as the decoded
JSON object. It also keeps what was changed, so that a rule's gain is not confused with what would have been
a hit without it. A rule is ``[model=NAME] [route=PATH] ACTION``, with these actions:

``drop-line:REGEX``         removes lines in which the expression (RE2) is found
``move-line-to-end:REGEX``  moves them behind the last message; a completion's prompt has no such place
``sort-tools``              sorts ``tools`` by name, and lists of them in system prompts: JSON or lines
``sort-json-keys``          sorts the keys of the objects in ``tools``, and of JSON objects in a system prompt

Nothing else of a request is touched. A request whose rules find nothing stays as it is.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import re2

from mooncake.errors import InvalidArgument

_ALLOWED = (
    "[model=NAME] [route=PATH] and drop-line:REGEX, move-line-to-end:REGEX, sort-tools or sort-json-keys"
)
_WITH_PATTERN = ("drop-line", "move-line-to-end")
_ACTIONS = (*_WITH_PATTERN, "sort-tools", "sort-json-keys")
_MAX_PATTERN_CHARS = 1_000
_MOST_JSON = 200
"""Most JSON values in one text that are looked at."""

_MOST_WRONG_JSON = 8
"""Beginnings of JSON in one text that turn out not to be JSON, after which the rest is left alone."""

_MOST_WRITTEN_TOOLS = 2_000
"""Tools in lines and sections of one text; the list that has more, and what follows it, is left alone."""

_OBJECT = re.compile(r"\{\s*\"")
_decoder = json.JSONDecoder()


@dataclass(frozen=True)
class HygieneRule:
    """One rule."""

    text: str
    "As it was written, without its model and route."
    action: str
    pattern: Any = None
    prefilter: Any = None
    "The same, to search a text of many lines at once; None where that may miss lines."
    model: str = ""
    "Model in the request to which it is limited; empty: all."
    route: str = ""
    "Path to which it is limited; empty: all."

    def matches(self, route: str, model: str) -> bool:
        return self.route in ("", route) and self.model in ("", model)


def read_rules(texts: Sequence[str]) -> list[HygieneRule]:
    """Parse rules. Raises InvalidArgument."""
    return [_read_rule(text) for text in texts]


def _read_rule(text: str) -> HygieneRule:
    rest, limits = text.strip(), {"model": "", "route": ""}
    while (limit := re.match(r"(model|route)=(\S+)\s+", rest)) is not None:
        limits[limit.group(1)] = limit.group(2)
        rest = rest[limit.end() :]
    action, _, expression = rest.partition(":")
    if action not in _ACTIONS or bool(expression) != (action in _WITH_PATTERN):
        raise InvalidArgument("hygiene_rules", text, _ALLOWED)
    if len(expression) > _MAX_PATTERN_CHARS:
        raise InvalidArgument("hygiene_rules", text[:100], f"at most {_MAX_PATTERN_CHARS} characters")
    pattern = prefilter = None
    if expression:
        options = re2.Options()
        options.log_errors = False
        try:
            pattern = re2.compile(expression, options)
            if not re.search(r"\\[Az]", expression):
                prefilter = re2.compile(f"(?m:{expression})", options)
        except re2.error as error:
            raise InvalidArgument("hygiene_rules", text, f"an expression of RE2 ({error})") from error
    return HygieneRule(rest, action, pattern, prefilter, limits["model"], limits["route"])


@dataclass
class AppliedRules:
    """What rules did to one request."""

    counts: dict[str, int] = field(default_factory=dict)
    "Lines, tools or objects that each rule has changed, by its text."
    changes: list[tuple[int, bytes]] = field(default_factory=list)
    "Position in characters of each change in the changed request, and a digest of what was there before."
    num_chars: int = 0

    def note(self, rule: HygieneRule, position: int, before: str, count: int = 1) -> None:
        self.counts[rule.text] = self.counts.get(rule.text, 0) + count
        digest = hashlib.blake2b(before.encode(errors="replace"), digest_size=8).digest()
        self.changes.append((position, digest))

    def first_gain(self, sibling: AppliedRules) -> float | None:
        """Where, as a part of the prompt, it would have left its sibling without the rules; None if nowhere.

        That is the first change before which both requests had something else.
        """
        ours, theirs = sorted(self.changes), sorted(sibling.changes)
        for number, (position, digest) in enumerate(ours):
            if number >= len(theirs) or theirs[number][1] != digest:
                return position / max(1, self.num_chars)
        if len(theirs) > len(ours):
            return theirs[len(ours)][0] / max(1, sibling.num_chars)
        return None

    def header(self) -> str:
        """The rules that changed something, for a header of the answer: without their expressions."""
        by_action: dict[str, int] = {}
        for text, count in self.counts.items():
            action = text.partition(":")[0]
            by_action[action] = by_action.get(action, 0) + count
        return ", ".join(f"{action}={count}" for action, count in by_action.items())


def apply_rules(rules: Sequence[HygieneRule], request: dict[str, Any], route: str) -> AppliedRules:
    """Change ``request`` in place."""
    applied = AppliedRules()
    chosen = [one for one in rules if one.matches(route, str(request.get("model") or ""))]
    moved: list[str] = []
    position = 0
    for rule in chosen:
        if rule.action == "sort-json-keys" and isinstance(request.get("tools"), list):
            _replace_tools(rule, request, applied, _with_sorted_keys)
    for rule in chosen:
        if rule.action == "sort-tools" and isinstance(request.get("tools"), list):
            _replace_tools(rule, request, applied, _sorted_tools)
    if isinstance(request.get("tools"), list):
        position = len(json.dumps(request["tools"]))
    for place in _places(request):
        text = place.text
        for rule in chosen:
            if rule.pattern is not None:
                if rule.action == "move-line-to-end" and not place.may_move:
                    continue
                text, lines = _without_lines(rule, text, position, applied)
                if rule.action == "move-line-to-end":
                    moved += lines
            elif place.is_system:
                sort = _sorted_lists if rule.action == "sort-tools" else _sorted_objects
                text = sort(rule, text, position, applied)
        if text != place.text:
            place.replace(text)
        position += len(text)
    if moved:
        _append(request, "\n".join(moved))
    applied.num_chars = position + sum(map(len, moved))
    return applied


# --- texts of a request


@dataclass(frozen=True)
class _Place:
    """A text in a request."""

    owner: Any
    key: Any
    is_system: bool
    may_move: bool = True

    @property
    def text(self) -> str:
        text: str = self.owner[self.key]
        return text

    def replace(self, text: str) -> None:
        self.owner[self.key] = text


def _places(request: dict[str, Any]) -> Iterator[_Place]:
    """The texts of a request in the order of its prompt."""
    for name in ("system", "instructions"):
        yield from _texts_of(request, name, True)
    for name in ("messages", "input"):
        if isinstance(request.get(name), str):
            yield _Place(request, name, False)
        elif isinstance(request.get(name), list):
            for message in request[name]:
                if isinstance(message, dict):
                    yield from _texts_of(message, "content", message.get("role") in ("system", "developer"))
    prompt = request.get("prompt")
    if isinstance(prompt, str):
        yield _Place(request, "prompt", True, may_move=False)
    elif isinstance(prompt, list):
        for at, one in enumerate(prompt):
            if isinstance(one, str):
                yield _Place(prompt, at, True, may_move=False)


def _texts_of(owner: dict[str, Any], name: str, is_system: bool) -> Iterator[_Place]:
    """The texts of a field that is text, or a list of parts; a part that a rule has emptied is removed."""
    content = owner.get(name)
    if isinstance(content, str):
        yield _Place(owner, name, is_system)
    elif isinstance(content, list):
        parts = [one for one in content if isinstance(one, dict) and isinstance(one.get("text"), str)]
        emptied: dict[int, dict[str, Any]] = {}
        for part in parts:
            was_empty = not part["text"]
            yield _Place(part, "text", is_system)
            if not part["text"] and not was_empty:
                emptied[id(part)] = part
        kept = [one for one in content if id(one) not in emptied]
        content[:] = kept or [*emptied.values()][-1:]  # no API takes a message without any


def _append(request: dict[str, Any], text: str) -> None:
    """Put lines behind the last message of a user or tool."""
    for name, kind in (("messages", "text"), ("input", "input_text")):
        found = request.get(name)
        if isinstance(found, str):
            request[name] = f"{found}\n{text}"
            return
        if not isinstance(found, list):
            continue
        last = found[-1] if found and isinstance(found[-1], dict) else {}
        if last.get("role") not in ("user", "tool"):
            last = {"role": "user", "content": ""}
            is_answer_begun = (
                bool(found) and isinstance(found[-1], dict) and found[-1].get("role") == "assistant"
            )
            found.insert(len(found) - 1 if is_answer_begun else len(found), last)
        content = last.get("content")
        if isinstance(content, list):
            content.append({"type": kind, "text": text})
        else:
            last["content"] = f"{content}\n{text}" if content else text
        return


# --- actions


def _without_lines(
    rule: HygieneRule, text: str, position: int, applied: AppliedRules
) -> tuple[str, list[str]]:
    """``text`` without the lines that a rule names, and these."""
    if rule.prefilter is not None and rule.prefilter.search(text) is None:
        return text, []
    kept: list[str] = []
    removed: list[str] = []
    for line in text.split("\n"):
        if rule.pattern.search(line) is None:
            kept.append(line)
            position += len(line) + 1
        else:
            removed.append(line)
            applied.note(rule, position, line)
    return ("\n".join(kept), removed) if removed else (text, [])


def _replace_tools(
    rule: HygieneRule, request: dict[str, Any], applied: AppliedRules, sort: Callable[[list[Any]], list[Any]]
) -> None:
    before = json.dumps(request["tools"])
    tools = sort(request["tools"])
    if json.dumps(tools) != before:
        request["tools"] = tools
        applied.note(rule, 0, before)


def _sorted_tools(tools: list[Any]) -> list[Any]:
    return sorted(tools, key=_name_of)


def _with_sorted_keys(tools: list[Any]) -> list[Any]:
    found: list[Any] = json.loads(json.dumps(tools, sort_keys=True))
    return found


def _name_of(tool: Any) -> str:
    """The name of a tool in any of the APIs; empty for what is no tool."""
    if not isinstance(tool, Mapping):
        return ""
    inner = tool.get("function")
    return str((inner if isinstance(inner, Mapping) else tool).get("name") or tool.get("type") or "")


def has_list_of_tools(text: str) -> bool:
    """Whether ``sort-tools`` finds a list of tools in a text of a system prompt."""
    return any(len(span) > 1 for span in (*_lists_of_tools(text), *_written_lists(text)))


def _sorted_lists(rule: HygieneRule, text: str, position: int, applied: AppliedRules) -> str:
    """``text`` with the tools sorted of each JSON list of them, or of adjacent lines or sections."""
    spans = sorted(span for span in (*_lists_of_tools(text), *_written_lists(text)) if len(span) > 1)
    parts: list[str] = []
    done = 0
    for span in spans:
        first, last = span[0][0], span[-1][1]
        if first < done:
            continue  # in a tool of a list that has been sorted
        tools = [(name, text[start:end]) for start, end, name in span]
        by_name = sorted(tools)
        if by_name == tools:
            continue
        applied.note(rule, position + first, text[first:last])
        for (start, end, _), (_, piece) in zip(span, by_name, strict=True):
            parts += text[done:start], piece
            done = end
    return "".join((*parts, text[done:]))


def _lists_of_tools(text: str) -> Iterator[list[tuple[int, int, str]]]:
    """Positions and names of the tools of each list in a text."""
    span: list[tuple[int, int, str]] = []
    for start, end, value in _objects(text):
        name = _name_of(value) if "name" in value or isinstance(value.get("function"), Mapping) else ""
        is_adjacent = bool(span) and text[span[-1][1] : start].strip() in ("", ",")
        if not name or not is_adjacent:
            if span:
                yield span
            span = []
        if name:
            span.append((start, end, name))
    if span:
        yield span


_ABOUT_TOOLS = re.compile(r"(?i:(?<!\w)(?:tools?|functions?|commands?|plugins?|skills?|apis?)(?!\w))")
# No character fits two of its parts that follow each other: else a long line would be tried in all ways.
_TOOL_NAME = r"[`*_]*([A-Za-z][\w.\-/]*)[`*]*"
_ITEM = re.compile(rf"([ \t]*(?:[-*•]|\d+[.)])[ \t]+){_TOOL_NAME}(?:\s*[:(]|\s+[-–—]\s|\s*$)")
_HEADING = re.compile(rf"#{{1,6}}[ \t]+{_TOOL_NAME}\s*$")


def _written_lists(text: str) -> Iterator[list[tuple[int, int, str]]]:
    """Positions and names of tools in lists that are no JSON: adjacent lines of one tool each, whose bullets
    and numbers stay where they are, or adjacent sections. The line before must be about tools."""
    lines = text.split("\n")
    starts = [0, *itertools.accumulate(len(line) + 1 for line in lines)]
    number = num_tools = 0
    is_about_tools = False  # whether the last line with text is
    while number < len(lines):
        line, span = lines[number], list[tuple[int, int, str]]()
        if is_about_tools and _ITEM.match(line):
            while number < len(lines) and (item := _ITEM.match(lines[number])) is not None:
                span.append((starts[number] + item.end(1), starts[number + 1] - 1, item.group(2)))
                number += 1
        elif is_about_tools and _HEADING.match(line) and _ABOUT_TOOLS.search(line) is None:
            while number < len(lines) and (heading := _HEADING.match(lines[number])) is not None:
                first = starts[number]
                while number < len(lines) and lines[number].strip():
                    number += 1
                span.append((first, starts[number] - 1, heading.group(1)))
                number += 1
        else:
            if line.strip():
                is_about_tools = _ABOUT_TOOLS.search(line) is not None
            number += 1
            continue
        num_tools += len(span)
        if num_tools > _MOST_WRITTEN_TOOLS:
            return
        is_about_tools = False
        yield span


def _sorted_objects(rule: HygieneRule, text: str, position: int, applied: AppliedRules) -> str:
    """``text`` with the keys sorted of each JSON object in it."""
    parts: list[str] = []
    done = 0
    for start, end, value in _objects(text):
        before = text[start:end]
        indent = re.match(r"\{\n( +|\t+)", before)
        after = json.dumps(
            value,
            sort_keys=True,
            ensure_ascii=before.isascii(),
            indent=None if indent is None else indent.group(1),
            separators=(", " if indent is None and ", " in before else ",", ": " if '": ' in before else ":"),
        )
        if after != before and json.dumps(value) != json.dumps(value, sort_keys=True):
            applied.note(rule, position + start, before)
            parts += text[done:start], after
            done = end
    return "".join((*parts, text[done:]))


def _objects(text: str) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """The outermost JSON objects in a text, with their positions."""
    at = num_found = num_wrong = 0
    while (
        num_found < _MOST_JSON
        and num_wrong < _MOST_WRONG_JSON
        and (found := _OBJECT.search(text, at)) is not None
    ):
        num_found += 1
        try:
            value, at = _decoder.raw_decode(text, found.start())
        except (ValueError, RecursionError):
            at, num_wrong = found.end(), num_wrong + 1
            continue
        if isinstance(value, dict):
            yield found.start(), at, value

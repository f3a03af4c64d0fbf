# SPDX-License-Identifier: Apache-2.0
"""What the difference between a prompt and its sibling is: a nonce, a clock, another order of tools, an edit.

It works on the text that both have before the difference and on what follows in each, so it knows no request,
tokenizer or chat template; role markers are recognised in the forms of common templates. A class is given
only where the texts prove it: an order of keys, because both sides are the same JSON value; a clock, because
the line is the same but for a time. All else is ``other``, with its text. The classes:

``nonce``             a random word or number in a line that is the same otherwise
``clock``             a time or date
``counter``           a number that counts or measures
``tool_order``        the same tools, or the same lines about tools, in another order
``json_key_order``    the same JSON object with its keys in another order
``dropped_reasoning`` reasoning that the sibling has was left out, as chat templates do with earlier answers
``compaction``        earlier messages were replaced by a summary, or left out
``edited_history``    an earlier message was changed, inserted or removed
``retokenized``       the same text in other tokens, as where an answer is sent back as text
``new_text``          from here on the prompts have nothing in common: another question, not a change
``other``             anything else
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any, Literal

import msgspec

from mooncake.forensics.hygiene import has_list_of_tools
from mooncake.forensics.volatile_text import MOST_CHARS, LinePair, kind_of

Class = Literal[
    "nonce",
    "clock",
    "counter",
    "tool_order",
    "json_key_order",
    "dropped_reasoning",
    "compaction",
    "edited_history",
    "retokenized",
    "new_text",
    "other",
]

_NO_LONGER_SAME = 0.15
"""Part of the rest that the sibling has, below which a prompt counts as another one from there on."""

_EXCERPT_CHARS = 200
_GRAM = 8
"""Words that two texts must share in order, to count as the same text again."""

_WORD = re.compile(r"<[|｜]?/?\w+[|｜]?>|\w+|[^\w\s]")
"""A word; a marker of a chat template counts as one."""


class Difference(msgspec.Struct, frozen=True):
    """The class of a difference, in words, with what both prompts have in its place."""

    kind: Class
    detail: str
    ours: str
    "Text of the prompt from the difference on, with the beginning of its line."
    theirs: str
    "The same of the sibling."
    rule: str = ""
    "Hygiene rule that would avoid it; empty if there is none."


class Passages(msgspec.Struct, frozen=True):
    """A prompt and its sibling around the place where they differ."""

    context: str
    "What both have before it."
    ours: str
    theirs: str
    ours_found: float = 1.0
    "Part of all that follows in the prompt that the sibling has, too."
    theirs_found: float = 1.0
    num_ours: int = 0
    "Size of all that follows, which may be more than the text here."
    num_theirs: int = 0
    is_in_answer: bool = False
    "Whether the sibling's text here is its answer rather than its prompt."


def difference(found: Passages) -> Difference:
    """Classify the difference between two prompts."""
    if not _is_escaped(found):
        return _classified(found)
    # Messages as JSON: classified as the text that they are, and shown as it is sent.
    changes = {name: _unescaped(getattr(found, name)) for name in ("context", "ours", "theirs")}
    made = _classified(msgspec.structs.replace(found, **changes))
    shown = _made(found, made.kind, made.detail)
    return msgspec.structs.replace(made, ours=shown.ours, theirs=shown.theirs)


_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r"}


def _is_escaped(found: Passages) -> bool:
    """Whether the texts are inside of a JSON string."""
    near = found.context[-2000:] + found.ours[:2000]
    return "\n" not in near and re.search(r'\\n|\\"', near) is not None


def _unescaped(text: str) -> str:
    def character(match: re.Match[str]) -> str:
        code, letter = match.groups()
        return chr(int(code, 16)) if code else _ESCAPED.get(letter, letter)

    return _ESCAPE.sub(character, text)


def _classified(found: Passages) -> Difference:
    common = _common_prefix(found.ours, found.theirs)
    is_same_text = common >= min(len(found.ours), len(found.theirs)) or common > 4 * _EXCERPT_CHARS
    if is_same_text and found.ours and found.theirs:
        return _made(found, "retokenized", "The text is the same, its tokens are others.")
    if common:  # the first characters of two different tokens
        found = msgspec.structs.replace(
            found,
            context=found.context + found.ours[:common],
            ours=found.ours[common:],
            theirs=found.theirs[common:],
        )
    rejoined = _rejoined(found.ours, found.theirs)
    for classify in (_of_json, _of_line, _of_order, _of_reasoning, _of_compaction, _of_history):
        made = classify(found, rejoined)
        if made is not None:
            return made
    if found.ours_found < _NO_LONGER_SAME:
        return _made(found, "new_text", "From here on the prompts have nothing in common.")
    tools = _changed_tools(found)
    return _made(found, "other", tools or "The texts differ, and what follows is partly the same.")


def _made(found: Passages, kind: Class, detail: str, rule: str = "") -> Difference:
    head = _line_start(found.context)[-_EXCERPT_CHARS // 2 :]
    return Difference(
        kind, detail, head + found.ours[:_EXCERPT_CHARS], head + found.theirs[:_EXCERPT_CHARS], rule
    )


# --- lines with a volatile value


_NEWLINE = re.compile(r"\n|\\n")
_NAMES = {
    "nonce": "A random value changes with every request.",
    "clock": "A time or date changes.",
    "counter": "A number that counts or measures changes.",
}


def _of_line(found: Passages, rejoined: tuple[int, int] | None) -> Difference | None:
    head = _line_start(found.context)
    ends = [
        match.start() if (match := _NEWLINE.search(text)) else len(text)
        for text in (found.ours, found.theirs)
    ]
    is_cut = max(ends) > MOST_CHARS
    if is_cut:
        if rejoined is None or max(rejoined) > MOST_CHARS:
            return None
        words = _words(found.ours[rejoined[0] :])[:_GRAM]
        ends = [one + sum(map(len, words)) for one in rejoined]
    ours, theirs = found.ours[: ends[0]], found.theirs[: ends[1]]
    kind = kind_of(LinePair(head + ours, head + theirs, len(head)))
    if kind is None:
        return None
    ours_behind, theirs_behind = found.ours[ends[0] :], found.theirs[ends[1] :]
    num_same = _common_prefix(ours_behind, theirs_behind)
    is_same_behind = num_same >= min(16, len(ours_behind), len(theirs_behind))
    if kind == "counter" and num_same < 48 and found.ours_found < 0.3:
        is_same_behind = False
    if not is_same_behind and found.ours_found < 0.5:
        return None
    rule = ""
    start = re.match(r"\s*(\S.{1,60}?)\s*$", head)
    action = "drop-line" if kind == "nonce" else "move-line-to-end"
    if not is_cut and start is not None and re.search(r"[^\W\d_]{2}", start.group(1)):
        named = re.match(r"[^:=]{2,50}[:=]", start.group(1))
        beginning = (
            named.group() if named else re.sub(r"\S*\d\S*$", "", start.group(1)).rstrip() or start.group(1)
        )
        rule = f"{action}:^\\s*{_escaped(beginning)}"
    elif not is_cut and re.search(r"[^\W\d_]{2}.*\S{2}", ending := _common_ending(ours, theirs)):
        rule = f"{action}:{_escaped(ending)}\\s*$"  # the value begins the line
    return _made(found, kind, _NAMES[kind], rule)


def _escaped(text: str) -> str:
    return re.escape(text).replace("\\ ", " ")


def _common_ending(ours: str, theirs: str) -> str:
    """What both lines end with, without the spaces around it."""
    size = _common_prefix(ours[::-1], theirs[::-1])
    return ours[len(ours) - size :].strip()[-60:]


def _line_start(context: str) -> str:
    """The beginning of the line at the end of a text."""
    near = context[-MOST_CHARS:]
    return near[max((match.end() for match in _NEWLINE.finditer(near)), default=0) :]


# --- order of JSON keys, tools and lines


_MOST_BRACKETS = 60
_TOOLS = re.compile(
    r"\"(?:parameters|input_schema|inputSchema|function|arguments)\"|(?i:(?<![a-z])(?:tools?|functions?|commands|"
    r"plugins?|skills)(?![a-z]))"
)
_NAME = re.compile(r"\"name\"\s*:\s*\"([^\"]{1,80})\"")
_decoder = json.JSONDecoder()


def _of_json(found: Passages, rejoined: tuple[int, int] | None) -> Difference | None:
    """Equal JSON values around the difference."""
    texts = [found.context + found.ours, found.context + found.theirs]
    at = len(found.context)
    brackets = [match.start() for match in re.finditer(r"[{\[]", texts[0][:at])][-_MOST_BRACKETS:]
    for start in reversed(brackets):
        values: list[Any] = []
        for text in texts:
            try:
                value, end = _decoder.raw_decode(text, start)
            except (ValueError, RecursionError):
                break
            if end <= at:
                break
            values.append(value)
        if len(values) < 2:
            continue
        ours, theirs = values
        if ours == theirs:
            detail = "The keys of a JSON object are in another order."
            return _made(found, "json_key_order", detail, "sort-json-keys")
        if isinstance(ours, list) and isinstance(theirs, list) and _canonical(ours) == _canonical(theirs):
            if _is_of_tools(found, json.dumps(ours)[:4000]):
                return _made(found, "tool_order", f"{len(ours)} tools are in another order.", "sort-tools")
            return _made(found, "other", f"{len(ours)} items of a list are in another order.")
    return None


def _canonical(values: list[Any]) -> Counter[str]:
    return Counter(json.dumps(one, sort_keys=True) for one in values)


def _is_of_tools(found: Passages, items: str) -> bool:
    return _TOOLS.search(found.context[-1500:]) is not None or _TOOLS.search(items) is not None


def _of_order(found: Passages, rejoined: tuple[int, int] | None) -> Difference | None:
    """The same lines, or the same items of one line, in another order."""
    head = _line_start(found.context)
    ours, theirs = (_NEWLINE.split(head + one) for one in (found.ours, found.theirs))
    num = _permuted(*([_item(line) for line in lines] for lines in (ours, theirs)))
    items = "\n".join(ours[:num]) if num else ""
    if not num:
        pairs = [
            [item.strip() for item in re.split(r"[,;|\s]+", lines[0]) if item.strip()]
            for lines in (ours, theirs)
        ]
        pairs = [[item.strip(".(){}[]'\"`") for item in row] for row in pairs]
        if sorted(pairs[0]) == sorted(pairs[1]) and len(pairs[0]) > 2:
            num, items = len(pairs[0]), ours[0]
    if not num:
        return _of_cut_tools(found)
    keys = [re.match(r"\s*\"[^\"]+\"\s*:", line) for line in items.splitlines()]
    if len(keys) > 1 and all(keys):
        detail = "The keys of a JSON object are in another order."
        return _made(found, "json_key_order", detail, "sort-json-keys")
    if len(re.findall(r"[\"'][\w.-]+[\"']\s*:", items)) >= 2 and "\n" not in items:
        detail = "The keys of a JSON object are in another order."
        return _made(found, "json_key_order", detail, "sort-json-keys")
    if _is_of_tools(found, items[:4000]):
        rule = "sort-tools" if has_list_of_tools(found.context[-300:] + found.ours[:4000]) else ""
        return _made(found, "tool_order", "The same lines about tools are in another order.", rule)
    return _made(found, "other", "The same lines or items are in another order.")


def _item(line: str) -> str:
    """A line without its bullet, number or comma."""
    return re.sub(r"^\s*(?:\d+[.)]|[-*•])\s*", "", line).strip().rstrip(",")


def _permuted(ours: list[str], theirs: list[str]) -> int:
    """The number of leading lines that both have in another order; 0 if there are none."""
    balance: Counter[str] = Counter()
    num_open = 0
    for number, (one, other) in enumerate(zip(ours[:2000], theirs[:2000], strict=False), 1):
        for line, step in ((one, 1), (other, -1)):
            before = balance[line]
            balance[line] = before + step
            num_open += abs(before + step) - abs(before)
        if not num_open:
            return number if number > 1 else 0
    return 0


def _of_cut_tools(found: Passages) -> Difference | None:
    """Tools in another order, where their list is longer than the text that was kept."""
    ours, theirs = (_NAME.findall(found.context[-80:] + one) for one in (found.ours, found.theirs))
    if len(ours) < 2 or len(theirs) < 2 or ours[:3] == theirs[:3]:
        return None
    if not _is_of_tools(found, found.ours[:4000]) or min(found.ours_found, found.theirs_found) < 0.8:
        return None
    first, other = next(
        ((one, other) for one, other in zip(ours, theirs, strict=False) if one != other), ("", "")
    )
    if first not in theirs or other not in ours:
        return None
    return _made(found, "tool_order", "The tools are in another order.", "sort-tools")


def _changed_tools(found: Passages) -> str:
    """Which tools only one side has, in words; empty where it is not about tools."""
    if not _is_of_tools(found, found.ours[:2000]):
        return ""
    ours, theirs = ({*_NAME.findall(found.context[-80:] + one)} for one in (found.ours, found.theirs))
    added, removed = sorted(ours - theirs)[:5], sorted(theirs - ours)[:5]
    if not (added or removed) or not ours & theirs:
        return ""
    changes = f"added {', '.join(added) or 'none'}, removed {', '.join(removed) or 'none'}"
    return f"The list of tools differs: {changes}."


# --- reasoning, compaction, history


_THOUGHTS = (
    r"think|thinking|thoughts?|reasoning|reasoning_content|reflection|scratchpad|analysis|inner_monologue|"
    r"internal_monologue|cot|antthinking|deliberation|rationale"
)
_OPENING = re.compile(
    rf"(?i:<\s*(?:{_THOUGHTS})\s*>|\[(?:{_THOUGHTS})\]|<\|channel\|>analysis|◁think▷|<\|?begin_of_thought\|?>|"
    rf"<\|START_THINKING\|>|\"(?:{_THOUGHTS})\"\s*:|\"type\"\s*:\s*\"(?:redacted_)?(?:thinking|reasoning)\"|"
    rf"(?:^|\n|\\n|\")\W{{0,4}}(?:{_THOUGHTS})\W{{0,3}}:)"
)
_CLOSING = re.compile(
    rf"(?i:</\s*(?:{_THOUGHTS})\s*>|\[/(?:{_THOUGHTS})\]|◁/think▷|<\|?end_of_thought\|?>|<\|END_THINKING\|>)"
)
_SUMMARY = re.compile(
    r"(?i:summar(?:y|ies|i[sz]ed|i[sz]ing)|compacted|compaction|condensed|"
    r"(?:conversation|discussion|work|progress|history|done) (?:so far|up to now|until now)|so far:|"
    r"(?:previous|prior|earlier|older|past|preceding) (?:\w+ )?"
    r"(?:conversation|messages?|context|turns?|discussion|exchanges?|session|history|steps|tool)|recap|omitted|"
    r"elided|truncated|cleared|continued from|abridged|tl;?dr|key points|context (?:was|has been|window)|"
    r"to save (?:space|tokens|context)|compressed|digest of|removed for brevity|checkpoint)"
)
_ROLE = re.compile(
    r"<\|im_start\|>(\w+)|<\|start_header_id\|>(\w+)|<start_of_turn>(\w+)|<\|start\|>(\w+)|<\|turn\|?>(\w+)|"
    r"<[|｜](system|user|assistant|tool|observation|developer)[|｜]>|\[(INST|/INST)\]|\"role\"\s*:\s*\"(\w+)\"|"
    r"(?:^|\n)(?:\#+ *)?(system|user|human|assistant|ai|tool|developer|instruction|response) ?:?\n|"
    r"(?:^|\n)(Human|Assistant|User|System|Tool|Developer|AI): ",
    re.IGNORECASE,
)


def _of_reasoning(found: Passages, rejoined: tuple[int, int] | None) -> Difference | None:
    """Reasoning of the sibling that this prompt does not have."""
    tail = found.context[-80:]
    theirs = tail + found.theirs[:400]
    their_end = 400 if rejoined is None else rejoined[1]
    opening = _last_unclosed(tail) or next(
        (
            match
            for match in _OPENING.finditer(theirs)
            if match.end() > len(tail) and match.start() - len(tail) < min(120, max(8, their_end))
        ),
        None,
    )
    if opening is None:
        return None
    ours = tail + found.ours[:400]
    if opening.end() > len(tail):
        ours_opening = next((one for one in _OPENING.finditer(ours) if one.end() > len(tail)), None)
        if ours_opening is not None and ours_opening.start() < len(tail) + 120:
            closing = _CLOSING.search(ours, ours_opening.end())
            if closing is None or ours[ours_opening.end() : closing.start()].strip():
                return None
    else:  # both have begun it: the prompt must end it at once
        closing = _CLOSING.search(ours, opening.end())
        if closing is None or ours[opening.end() : closing.start()].strip():
            return None
    return _made(found, "dropped_reasoning", "Reasoning that the sibling has was left out of this prompt.")


def _last_unclosed(text: str) -> re.Match[str] | None:
    """The opening of reasoning that ends a text."""
    found = [*_OPENING.finditer(text)]
    last = found[-1] if found else None
    return last if last is not None and not text[last.end() :].strip() else None


def _of_compaction(found: Passages, rejoined: tuple[int, int] | None) -> Difference | None:
    """Messages of the sibling that a shorter text, or nothing, replaces."""
    our_end, their_end = rejoined or (len(found.ours), len(found.theirs))
    ours, theirs = found.ours[:our_end], found.theirs[:their_end]
    per_char = found.num_theirs / max(1, len(found.theirs))
    num_removed = found.num_theirs if rejoined is None else their_end * per_char
    num_added = found.num_ours if rejoined is None else our_end * found.num_ours / max(1, len(found.ours))
    head = _line_start(found.context)[-60:]
    in_ours, in_theirs = (
        _SUMMARY.search(head + ours[:1500]),
        _SUMMARY.search(head + theirs[: len(ours[:1500])]),
    )
    if in_ours and num_removed > 1.2 * num_added and not (in_theirs and in_theirs.group() == in_ours.group()):
        return _made(found, "compaction", "Earlier messages were replaced by a summary.")
    num_messages = len(_ROLE.findall(theirs))
    if rejoined is not None:
        is_shorter = their_end > 3 * our_end
    else:
        is_shorter = found.ours_found > 0.4 and found.num_ours < 0.8 * found.num_theirs
    if num_messages >= 2 and is_shorter and found.ours_found >= 0.2:
        return _made(found, "compaction", "Earlier messages were left out.")
    return None


def _of_history(found: Passages, rejoined: tuple[int, int] | None) -> Difference | None:
    """A change of an earlier message."""
    roles = [
        next(group for group in match.groups() if group).lower() for match in _ROLE.finditer(found.context)
    ]
    role = roles[-1] if roles else ""
    if roles == ["inst"]:  # these templates have no role for a system prompt, which is here
        role = "system"
    if found.is_in_answer:
        role = "assistant"
    if role in ("", "system", "developer"):
        return None
    is_same_later = rejoined is not None and _is_followed(found.ours[rejoined[0] :])
    if not found.is_in_answer and not (is_same_later or found.ours_found >= 0.25):
        return None
    role = {"inst": "user", "/inst": "assistant", "human": "user", "ai": "assistant"}.get(role, role)
    if found.is_in_answer:
        detail = "The answer in the history is not the one that was generated."
    elif rejoined is not None and not found.ours[: rejoined[0]].strip():
        detail = f"Text of a message of {role} was removed."
    elif rejoined is not None and not found.theirs[: rejoined[1]].strip():
        detail = f"Text was inserted in or behind a message of {role}."
    else:
        detail = f"A message of {role} differs."
    return _made(found, "edited_history", detail)


def _is_followed(rest: str) -> bool:
    """Whether further messages follow, beyond the marker of the answer that comes next."""
    return len(_ROLE.findall(rest)) >= 2


# --- texts


def _words(text: str) -> list[str]:
    return re.findall(r"\w+|\s+|[^\w\s]", text)


def _common_prefix(ours: str, theirs: str) -> int:
    low, high = 0, min(len(ours), len(theirs))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if ours[low:middle] == theirs[low:middle] else (low, middle - 1)
    return low


def _rejoined(ours: str, theirs: str) -> tuple[int, int] | None:
    """Positions in both texts from which they are the same again for some words; None if there are none."""
    found = [[*_WORD.finditer(text)] for text in (ours, theirs)]
    words = [[match.group() for match in row] for row in found]
    places: dict[tuple[str, ...], int] = {}
    for at in range(len(words[1]) - _GRAM + 1):
        places.setdefault(tuple(words[1][at : at + _GRAM]), at)
    best: tuple[int, int] | None = None
    for at in range(len(words[0]) - _GRAM + 1):
        if best is not None and at >= sum(best):
            break
        gram = tuple(words[0][at : at + _GRAM])
        other = places.get(gram)
        if other is None or (best is not None and at + other >= sum(best)):
            continue
        if sum(word[0].isalnum() for word in gram) >= _GRAM // 2:  # not markers of the template only
            best = at, other
    if best is None:
        return None
    return found[0][best[0]].start(), found[1][best[1]].start()

# SPDX-License-Identifier: Apache-2.0
"""Words and numbers that change from request to request: clock times, counters, nonces.

It recognises them by two variants of the same line, never by one: a number is a counter only where the line
was the same but for that number. What fits no pattern is not named.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Literal, NamedTuple

Kind = Literal["clock", "counter", "nonce"]

_MONTH = (
    r"(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sept?(?:ember)?|"
    r"Oct(?:ober)?|Nov(?:ember)?|Dec(?:ember)?)"
)
_DAY = r"(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs?)?|Fri|Sat(?:ur)?|Sun)(?:day)?"
_ZONE = r"(?:\s?(?:Z|UTC|GMT|[A-Z]{2,4}T|[+-]\d\d:?\d\d)(?![A-Za-z0-9]))?"
_TIME = rf"\d{{1,2}}:\d{{2}}(?::\d{{2}}(?:[.,]\d+)?)?(?:\s?[AaPp]\.?[Mm]\b\.?)?{_ZONE}"
_CLOCK = re.compile(
    "|".join(
        (
            rf"\d{{4}}-\d{{1,2}}-\d{{1,2}}(?:[T_ ]\d{{1,2}}[:-]\d{{2}}(?:[:-]\d{{2}}(?:[.,]\d+)?)?{_ZONE})?",
            r"\d{4}-W\d{2}(?:-\d)?",
            r"\d{8}[T_-]?\d{4,6}Z?",
            r"(?:19|20)\d{2}(?:0[1-9]|1[0-2])(?:[0-2]\d|3[01])(?!\d)",
            r"\d{1,4}/\d{1,2}/\d{1,4}",
            r"\d{1,2}\.\d{1,2}\.(?:\d{4}|\d{2})(?!\d)",
            r"\d{4}年\d{1,2}月\d{1,2}日?|\d{1,2}时\d{1,2}分",
            rf"(?:{_DAY},?\s+)?(?:the\s+)?\d{{1,2}}(?:st|nd|rd|th)?(?:\s+of)?[\s-]{_MONTH}\b\.?,?"
            rf"(?:[\s-]\d{{4}})?(?:,?\s+(?:at\s+)?{_TIME})?",
            rf"(?:{_DAY},?\s+)?{_MONTH}\b\.?\s+\d{{1,2}}(?:st|nd|rd|th)?(?!\d)"
            rf"(?:,?\s+(?:at\s+)?{_TIME})?(?:,?\s+\d{{4}})?(?:,?\s+(?:at\s+)?{_TIME})?",
            rf"{_MONTH}\b,?\s+\d{{4}}",
            _TIME,
            r"\d{1,2}\s?[AaPp]\.?[Mm]\b\.?",
            rf"{_DAY}\b",
        )
    )
)
_CLOCK_WORDS = re.compile(
    r"(?i:(?<![a-z])(?:time|times|clock|now|date|dates|today|uptime|elapsed|timestamp|ts|age|ago|epoch|seconds|"
    r"secs?|minutes|mins?|hours?|ms|milliseconds|duration|morning|afternoon|evening|night|noon|midnight|"
    r"since|expires?|deadline|day|week|month|year)(?![a-z]))"
)
_PARTS_OF_DAY = re.compile(r"(?i:early|late|morning|afternoon|evening|night|noon|midnight|today|tonight)")
_COUNTER_WORDS = re.compile(
    r"(?i:(?<![a-z])(?:count|counter|tokens?|used|usage|total|remaining|left|bytes|turns?|steps?|"
    r"iterations?|attempts?|retry|retries|seq|sequence|index|number|no|num|budget|cost|page|messages?|"
    r"requests?|rounds?|calls?|version|rev|revision|progress|percent|level|round|n|of|line|lines|queue|"
    r"depth|score|size|generation|chunk|part|tries|try|items?|files?|context|window)(?![a-z]))"
)
_NONCE_WORDS = re.compile(
    r"(?i:(?<![a-z])(?:nonce|id|ids|uuid|guid|ulid|session|trace|traceparent|span|salt|seed|rand|random|token|"
    r"key|hash|sha\d*|md5|digest|cch|checksum|signature|sig|etag|boundary|correlation|conversation|thread|"
    r"request|req|run|cache|bust|buster|canary|commit|build|fingerprint|tag|ref|ticket|instance|user|client|"
    r"device|process|pid|job|tmp|temp|workspace|container|host|hostname|pod|header|identifier|handle)"
    r"(?![a-z]))"
)
_WORD = re.compile(r"[A-Za-z0-9]+|[^A-Za-z0-9]")
_RUN = re.compile(r"[A-Za-z]*\d[A-Za-z0-9]*|[A-Za-z]+|\d+")
_NUMBER = re.compile(r"[+-]?\d+(?:[.,]\d+)*")
_UUID = re.compile(r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}")
_OF_VALUE = "A-Za-z0-9+/=_.:%#@~$-"
_MIN_EPOCH, _MAX_EPOCH = 1_262_304_000, 2_208_988_800
"""2010 and 2040 in seconds."""

MOST_CHARS = 400
"""Longest part of a line on each side of a difference that is compared."""


class LinePair(NamedTuple):
    """Two variants of a line, and where they begin to differ."""

    ours: str
    theirs: str
    at: int


def kind_of(pair: LinePair) -> Kind | None:
    """What changes in a line whose variants are otherwise the same; None if that is not all."""
    ours, theirs, at = pair
    if _same_but(_CLOCK, pair):
        return "clock"
    hunks = _hunks(ours, theirs, at)
    if hunks is None:
        return None
    kinds: list[Kind | None] = []
    for our_start, our_end, their_start, their_end in hunks:
        before, behind = ours[max(0, our_start - 60) : our_start], ours[our_end : our_end + 30]
        kinds.append(_kind_of_values(ours[our_start:our_end], theirs[their_start:their_end], before, behind))
    if None in kinds and len(kinds) < 3:
        return None
    # Of several values one may look like a number by chance.
    return "nonce" if "nonce" in kinds else kinds[0]


def is_value(text: str) -> bool:
    """Whether a text is one word of the kind that a program writes."""
    return bool(text) and re.fullmatch(f"[{_OF_VALUE}]+", text) is not None


def _same_but(pattern: re.Pattern[str], pair: LinePair) -> bool:
    """Whether two lines are the same where the pattern's matches are left out, and differ in one of them."""
    texts: list[str] = []
    is_inside = True
    for text in (pair.ours, pair.theirs):
        matches = [match for match in pattern.finditer(text) if _is_whole(text, match)]
        is_inside = is_inside and any(match.start() <= pair.at <= match.end() for match in matches)
        parts, last = [], 0
        for match in matches:
            parts += [text[last : match.start()], "\0"]
            last = match.end()
        texts.append("".join([*parts, text[last:]]))
    return is_inside and texts[0] == texts[1]


def _is_whole(text: str, match: re.Match[str]) -> bool:
    """Whether a match is not a part of a longer number or word."""
    before, behind = text[: match.start()][-1:], text[match.end() :][:1]
    first, last = text[match.start()], text[match.end() - 1]
    return not (
        (first.isdigit() and before.isdigit())
        or (first.isalpha() and before.isalpha())
        or (last.isdigit() and behind.isdigit())
    )


def _hunks(ours: str, theirs: str, at: int) -> list[tuple[int, int, int, int]] | None:
    """Places where two lines differ, as whole values; None if they have too little in common."""
    left = at - len(re.search(f"[{_OF_VALUE}]*$", ours[:at]).group())  # type: ignore[union-attr]
    our_words = [
        (match.start(), match.group())
        for match in re.finditer(rf"[{_OF_VALUE}]+|[^{_OF_VALUE}]", ours[left:])
    ]
    their_words = [
        (match.start(), match.group())
        for match in re.finditer(rf"[{_OF_VALUE}]+|[^{_OF_VALUE}]", theirs[left:])
    ]
    if len(our_words) != len(their_words):
        return None
    found = []
    for (our_at, our_word), (their_at, their_word) in zip(our_words, their_words, strict=True):
        if our_word != their_word:
            if not (is_value(our_word) and is_value(their_word)):
                return None
            found.append(
                (
                    left + our_at,
                    left + our_at + len(our_word),
                    left + their_at,
                    left + their_at + len(their_word),
                )
            )
    return found if found and len(found) <= 8 else None


def _kind_of_values(ours: str, theirs: str, before: str, behind: str) -> Kind | None:
    """What two values are that stand in the same place of a line, between these texts."""
    # The name of a value may be joined with it: id=5f0c, req-0001, tokens:512.
    prefix = len(ours) - len(ours.lstrip())
    while prefix < min(len(ours), len(theirs)) and ours[prefix] == theirs[prefix]:
        prefix += 1
    named = re.match(r".*?(?=[A-Za-z0-9+/]*$)", ours[:prefix])
    start = named.end() if named else 0
    context = before + ours[:start]
    ours, theirs = ours[start:], theirs[start:]
    suffix = 0
    while suffix < min(len(ours), len(theirs)) and ours[-1 - suffix] == theirs[-1 - suffix]:
        suffix += 1
    tail = re.search(r"[^A-Za-z0-9].*$", ours[len(ours) - suffix :]) if suffix else None
    if tail is not None:
        length = len(ours) - (len(ours) - suffix + tail.start())
        ours, theirs, behind = ours[:-length], theirs[:-length], ours[-length:] + behind
    if not ours or not theirs:
        return None
    if _is_epoch(ours) and _is_epoch(theirs):
        return "clock"
    if _UUID.search(ours) and _UUID.search(theirs):
        return "nonce"
    if _PARTS_OF_DAY.fullmatch(ours) and _PARTS_OF_DAY.fullmatch(theirs):
        return "clock"
    if _NUMBER.fullmatch(ours) and _NUMBER.fullmatch(theirs):
        return _kind_of_numbers(ours, theirs, context, behind)
    our_runs, their_runs = _RUN.findall(ours), _RUN.findall(theirs)
    if len(our_runs) == len(their_runs) > 1:
        kinds = {
            _kind_of_runs(one, other, context, behind)
            for one, other in zip(our_runs, their_runs, strict=True)
            if one != other
        }
        if len(kinds) == 1:
            return kinds.pop()
        if "nonce" in kinds:
            return "nonce"
        return None
    return _kind_of_runs(ours, theirs, context, behind)


def _kind_of_numbers(ours: str, theirs: str, context: str, behind: str) -> Kind | None:
    is_named_nonce = _last_word(_NONCE_WORDS, context) > _last_word(_COUNTER_WORDS, context)
    near = _number_of(ours), _number_of(theirs)
    difference = abs(near[0] - near[1])
    is_small_step = difference <= 64 or difference <= 0.02 * max(near)
    digits = max(len(ours), len(theirs))
    if is_small_step and not (is_named_nonce and digits <= 3 and "seed" in context.lower()):
        if _CLOCK_WORDS.search(context[-24:]) and not _COUNTER_WORDS.search(context[-24:]):
            return "clock"
        if re.match(r"\s*(?:seconds|secs?|s|minutes|mins?|hours?|ms|milliseconds|days?)\b", behind):
            return "clock"
        return "counter"
    if is_named_nonce and digits >= 3:
        return "nonce"
    if re.match(r"\s*(?:seconds|secs?|s|minutes|mins?|hours?|ms|milliseconds|days?)\b", behind):
        return "clock"
    if _COUNTER_WORDS.search(context[-24:]) or _COUNTER_WORDS.match(behind.strip()):
        return "counter"
    if _CLOCK_WORDS.search(context[-24:]):
        return "clock"
    return "nonce" if digits >= 7 and "." not in ours + theirs else "counter"


def _kind_of_runs(ours: str, theirs: str, context: str, behind: str) -> Kind | None:
    """What two letters-and-digits are."""
    if ours.isdigit() and theirs.isdigit():
        return _kind_of_numbers(ours, theirs, context, behind)
    parts = [re.fullmatch(r"([A-Za-z]*?)(\d+)([A-Za-z]*)", one) for one in (ours, theirs)]
    if all(parts):
        (our_head, our_digits, our_tail), (their_head, their_digits, their_tail) = (
            one.groups() for one in parts if one is not None
        )
        if (our_head, our_tail) == (their_head, their_tail) and len(our_head + our_tail) <= max(
            4, len(our_digits)
        ):
            return _kind_of_numbers(our_digits, their_digits, context + our_head, our_tail + behind)
    looks = _looks_random(ours), _looks_random(theirs)
    if all(looks) or (any(looks) and len(ours) == len(theirs) >= 8):
        return "nonce"
    is_named = bool(_NONCE_WORDS.search(context[-40:]))
    if is_named and (any(looks) or len(ours) == len(theirs) >= 3):
        return "nonce"
    return None


def _looks_random(word: str) -> bool:
    """Whether a word looks as if a program had drawn it."""
    has_digit, has_letter = any(map(str.isdigit, word)), any(map(str.isalpha, word))
    if has_digit and has_letter:
        changes = sum(a.isdigit() != b.isdigit() for a, b in pairwise(word))
        humps = sum(a.islower() and b.isupper() for a, b in pairwise(word))
        return len(word) >= 5 and changes + humps >= (2 if len(word) >= 6 else 1)
    if has_digit:
        return len(word) >= 7
    if len(word) >= 10 and not word.islower() and not word.isupper():
        # Camel case has few humps for its length, and a word has vowels between its consonants.
        return sum(a.islower() and b.isupper() for a, b in pairwise(word)) >= len(word) / 5
    letters = word.lower()
    if len(letters) >= 8 and set(letters) <= set("abcdef"):
        return True
    longest = max((len(run) for run in re.findall(r"[^aeiouy]+", letters)), default=0)
    return len(letters) >= 8 and longest >= 5


def _is_epoch(word: str) -> bool:
    """Whether a number is an instant since 1970 in seconds, or thousandths, millionths, billionths of it."""
    digits, _, fraction = word.partition(".")
    if not digits.isdigit() or (fraction and not fraction.isdigit()) or len(digits) not in (10, 13, 16, 19):
        return False
    return _MIN_EPOCH <= int(digits[:10]) < _MAX_EPOCH


def _number_of(text: str) -> float:
    digits = text.replace(",", "")
    return float(digits) if digits.count(".") <= 1 else float(digits.replace(".", ""))


def _last_word(pattern: re.Pattern[str], text: str) -> int:
    """Position of the last match near the end of a text; -1 if there is none."""
    return max((match.start() for match in pattern.finditer(text[-40:])), default=-1)

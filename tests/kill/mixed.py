# SPDX-License-Identifier: Apache-2.0
"""Mixed requests for any server of OpenAI's API, and the verdict on an answer that was disturbed.

Greedy, so that whatever happens meanwhile there is one right answer. A disturbed answer must be that one, or
a proper error: an HTTP error whose body says why, or an error event in the stream after a beginning of the
right answer. Everything else is wrong, above all an answer that looks whole and is not.
"""

from __future__ import annotations

import dataclasses
import http.client
import json
from collections.abc import Iterator
from random import Random
from typing import Any
from urllib.parse import urlsplit

WITHIN_S = 240.0
"""Time after which a request counts as hanging, even on a busy machine."""
PROPER = (429, 500, 502, 503, 504)
"""Status codes of proper errors; 500 only from engines that report it themselves."""
_FIRST_TOKEN, _LAST_TOKEN = 1000, 40_000
_WORDS = (
    "blocks",
    "of",
    "keys",
    "and",
    "values",
    "move",
    "from",
    "prefill",
    "to",
    "decode",
    "over",
    "a",
    "path",
)


@dataclasses.dataclass(frozen=True)
class Request:
    """One request, complete except for its salt."""

    number: int
    path: str
    body: dict[str, Any]

    @property
    def is_streamed(self) -> bool:
        return bool(self.body.get("stream"))


@dataclasses.dataclass
class Seen:
    """An answer."""

    status: int = 0
    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    error: str = ""
    "The server's error message, if it reported one."
    cut: str = ""
    "How the connection ended, if neither an end nor an error was reported."


def requests(num: int, seed: int, model: str, longest: int = 400) -> list[Request]:
    """``num`` requests: half with one of four shared beginnings, a third chats, half streamed.

    Args:
        longest: tokens of a prompt, at most.
    """
    random = Random(seed)
    shared = [_tokens(random, longest // 2) for _ in range(4)]
    contexts = [_words(random, longest // 4) for _ in range(4)]
    found = []
    for number in range(num):
        body: dict[str, Any] = {
            "model": model,
            "temperature": 0,
            "max_tokens": random.randrange(8, 33),
            "return_token_ids": True,
            "stream": random.random() < 0.5,
        }
        if random.random() < 1 / 3:
            turns = [{"role": "system", "content": random.choice(contexts)}]
            turns += [{"role": "user", "content": _words(random, random.randrange(4, 30))}]
            found.append(Request(number, "/v1/chat/completions", {**body, "messages": turns}))
        else:
            begin = random.choice(shared) if random.random() < 0.5 else []
            prompt = begin + _tokens(random, random.randrange(8, longest - len(begin)))
            found.append(Request(number, "/v1/completions", {**body, "prompt": prompt}))
    return found


def _tokens(random: Random, num: int) -> list[int]:
    return [random.randrange(_FIRST_TOKEN, _LAST_TOKEN) for _ in range(num)]


def _words(random: Random, num: int) -> str:
    return " ".join(random.choice(_WORDS) for _ in range(num))


def ask(url: str, one: Request, salt: str = "") -> Seen:
    """Send a request; any outcome is returned as an answer.

    Args:
        salt: salt of the prefix cache; with a new one everything is computed again.
    """
    body = {**one.body, **({"cache_salt": salt} if salt else {})}
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=WITHIN_S)
    seen = Seen()
    try:
        connection.request("POST", one.path, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        seen.status = answer.status
        if answer.status == 200 and one.is_streamed:
            _read_stream(answer, seen)
        else:
            _read_whole(answer.read(), seen)
    except (OSError, http.client.HTTPException, ValueError) as error:
        seen.cut = repr(error)
    finally:
        connection.close()
    return seen


def _read_whole(body: bytes, seen: Seen) -> None:
    found = json.loads(body)
    if seen.status != 200:
        seen.error = str(found["error"]["message"]) if "error" in found else ""
        return
    _take(found["choices"][0], seen)


def _read_stream(answer: http.client.HTTPResponse, seen: Seen) -> None:
    for event in _events(answer):
        if event == "[DONE]":
            return
        found = json.loads(event)
        if "error" in found:
            seen.error = str(found["error"]["message"])
            return
        for choice in found["choices"]:
            _take(choice, seen)
    seen.cut = "the stream ended without [DONE]"


def _events(answer: http.client.HTTPResponse) -> Iterator[str]:
    for line in answer:
        if line.startswith(b"data:"):
            yield line[5:].strip().decode()


def _take(choice: dict[str, Any], seen: Seen) -> None:
    """Add a choice, or the next piece of it."""
    said = choice.get("message") or choice.get("delta") or {}
    seen.text += choice.get("text") or said.get("content") or ""
    seen.token_ids += choice.get("token_ids") or []
    seen.finish_reason = choice.get("finish_reason") or seen.finish_reason


def verdict(seen: Seen, right: Seen) -> str:
    """``equal`` or ``error``; any other text names the violation."""
    if seen.cut:
        return f"cut off: {seen.cut} (status {seen.status}, {len(seen.token_ids)} tokens came)"
    if seen.status != 200:
        if seen.status not in PROPER or not seen.error:
            return f"no proper error: status {seen.status}, {seen.error!r}"
        return "error"
    if seen.error:
        is_begun_right = right.text.startswith(seen.text) and _begins(right.token_ids, seen.token_ids)
        return "error" if is_begun_right else f"wrong before its error: {seen.text!r}, not {right.text!r}"
    if (seen.text, seen.token_ids, seen.finish_reason) != (right.text, right.token_ids, right.finish_reason):
        return f"wrong: {seen.text!r} ({seen.finish_reason}), not {right.text!r} ({right.finish_reason})"
    return "equal"


def _begins(whole: list[int], part: list[int]) -> bool:
    return whole[: len(part)] == part

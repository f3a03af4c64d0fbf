# SPDX-License-Identifier: Apache-2.0
"""Canaries: short random prompts whose answers show whether KV was reused.

It owns their length and content and the form of the requests. A prompt is random in every examination, so
that it can be cached only by the examination itself and reveals nothing of other prompts; it is a few blocks
long and its answer four tokens. Token ids below 256 exist in every vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import msgspec

from mooncake.doctor.engine_probe import EXTERNAL_HITS, HITS, MetricsPage, read_metrics
from mooncake.doctor.facts import EngineFacts, Shot
from mooncake.doctor.http_probe import HttpProbe, HttpReply, HttpServerAt, Unanswered

MAX_TOKENS = 4096
DEFAULT_BLOCK_TOKENS = 128
"""Assumed where an engine does not say: the largest of common sizes."""

ANSWER_TOKENS = 4
_FIRST_ID, _END_ID = 33, 256
_WORDS = ("river", "stone", "lamp", "seven", "cloud", "paper", "green", "north", "salt", "wheel")


def canary_length(engines: Sequence[EngineFacts]) -> int:
    """Tokens of a prompt that has at least two whole blocks on every engine, and fits all of them."""
    blocks = max((one.block_tokens or DEFAULT_BLOCK_TOKENS for one in engines), default=DEFAULT_BLOCK_TOKENS)
    longest = min((one.max_model_len for one in engines if one.max_model_len), default=MAX_TOKENS)
    return max(8, min(2 * blocks + 8, longest - 2 * ANSWER_TOKENS, MAX_TOKENS))


def random_prompt(seed: int, num_tokens: int) -> list[int]:
    """Token ids that any vocabulary has."""
    random = Random(seed)
    return [random.randrange(_FIRST_ID, _END_ID) for _ in range(num_tokens)]


def as_text(prompt: Sequence[int]) -> str:
    """A text of about as many tokens, for servers that take no token ids."""
    return " ".join(_WORDS[token % len(_WORDS)] for token in prompt)


class CanarySender:
    """Sends prompts. A server's form of requests is remembered after the first one that it accepts."""

    def __init__(self, http: HttpProbe, timeout_s: float) -> None:
        self._http, self._timeout_s = http, timeout_s
        self._forms: dict[str, int] = {}

    async def to_engine(
        self, server: HttpServerAt, model: str, prompt: Sequence[int], salt: str = ""
    ) -> Shot:
        """Send one prompt, and measure by how much the engine's own counters of cached tokens rise."""
        before = await read_metrics(self._http, server)
        shot = await self.send(server, model, prompt, salt)
        if shot.is_answered:
            count_hits(shot, before, await read_metrics(self._http, server))
        return shot

    async def send(self, server: HttpServerAt, model: str, prompt: Sequence[int], salt: str = "") -> Shot:
        """Send one prompt."""
        form = self._forms.get(server.url, 0)
        while True:
            shot = await self._send(server, _body(form, model, prompt, salt))
            if shot.status not in (400, 422) or form >= _NUM_FORMS - 1 or salt:
                self._forms[server.url] = form
                return shot
            form += 1

    async def _send(self, server: HttpServerAt, body: dict[str, Any]) -> Shot:
        try:
            reply = await self._http.post(server, "/v1/completions", body, self._timeout_s)
        except Unanswered as error:
            return Shot(error=error.reach.detail)
        return read_shot(reply)


_NUM_FORMS = 3
MAX_TEXT_CHARS = 200
UNREADABLE = 502
"""Status of an answer that is 200 and no completion."""


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Logprobs(msgspec.Struct):
    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None


class _Choice(msgspec.Struct):
    text: str = ""
    logprobs: _Logprobs | None = None


class _Completion(msgspec.Struct):
    """The fields of a completion that are read; servers leave some of them out."""

    choices: list[_Choice] = []
    usage: _Usage | None = None


def _body(form: int, model: str, prompt: Sequence[int], salt: str) -> dict[str, Any]:
    """The request: token ids with log probabilities, token ids, or text."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": [*prompt],
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
    }
    if form == 0:
        body["logprobs"] = 1
    if form == 2:
        body["prompt"] = as_text(prompt)
    if salt:
        body["cache_salt"] = salt
    return body


def read_shot(reply: HttpReply) -> Shot:
    """What a completion shows."""
    shot = Shot(reply.status, seconds=reply.seconds)
    shot.route = reply.headers.get("x-mooncake-route", "")
    shot.prefill, shot.decode = (
        reply.headers.get(f"x-mooncake-{role}", "") for role in ("prefill", "decode")
    )
    try:
        found = msgspec.json.decode(reply.body, type=_Completion)
    except msgspec.MsgspecError as error:
        shot.error = reply.message if reply.status != 200 else f"it is no completion: {error}"
        shot.status = reply.status if reply.status != 200 else UNREADABLE
        return shot
    if reply.status != 200:
        shot.error = reply.message
        return shot
    if found.usage is not None:
        details = found.usage.prompt_tokens_details
        shot.prompt_tokens = found.usage.prompt_tokens
        shot.cached_tokens = details.cached_tokens if details is not None else None
    for choice in found.choices[:1]:
        shot.text = choice.text[:MAX_TEXT_CHARS]
        logprobs = choice.logprobs
        if logprobs is not None and logprobs.tokens and logprobs.token_logprobs:
            shot.text, shot.logprob = logprobs.tokens[0][:MAX_TEXT_CHARS], logprobs.token_logprobs[0]
    return shot


def count_hits(shot: Shot, before: MetricsPage | None, after: MetricsPage | None) -> None:
    """Note by how much an engine's counters rose between two reads."""
    if before is None or after is None:
        return
    shot.counted_hits = _risen(HITS, before, after)
    shot.counted_external_hits = _risen(EXTERNAL_HITS, before, after)


def _risen(names: tuple[str, ...], before: MetricsPage, after: MetricsPage) -> int | None:
    first, last = before.get(names), after.get(names)
    return None if first is None or last is None else max(0, int(last - first))

# SPDX-License-Identifier: Apache-2.0
"""One OpenAI endpoint: what it serves, and one streamed completion with the instants of its tokens.

It owns what "measured at the client" means: a request is sent when the call begins, its first token is there
with the first event that carries one. What an answer reports (cached tokens, which workers) is taken from
usage and headers where a server sends it. The options that name an endpoint are here, too.
"""

from __future__ import annotations

import asyncio
import dataclasses
import email.utils
import json
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import aiohttp
import msgspec
import typer

from mooncake import clock
from mooncake.cli.output import reason_in, reason_of
from mooncake.errors import AccessDenied, InvalidArgument, ProtocolError, Unavailable, cause_of
from mooncake.http.sse import EventParser
from mooncake.security import tool_identity

Url = Annotated[
    str, typer.Option("--url", help="Address of the server: a gateway or any other server of the OpenAI API.")
]
ApiKey = Annotated[
    str,
    typer.Option(
        "--api-key",
        envvar="OPENAI_API_KEY",
        show_envvar=False,
        help="Key of the server's API; by default OPENAI_API_KEY.",
    ),
]

LOWEST_TOKEN, HIGHEST_TOKEN = 1000, 30_000
"""Plain tokens in every common vocabulary; special ones are at the ends."""


@dataclasses.dataclass
class TimedAnswer:
    """An answer and its times, in seconds since the request was sent."""

    status: int = 0
    """HTTP status; 0: none came."""
    error: str = ""
    retry_after_s: float | None = None
    token_at_s: list[float] = dataclasses.field(default_factory=list)
    """Times of all tokens; tokens of one event share an instant."""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    """Tokens, from a server that returns them."""
    num_tokens: int = 0
    """Tokens that came: from a server that returns none, as its usage counts them, or else as many as events
    with text."""
    num_events: int = 0
    """Events that brought tokens."""
    end_s: float = 0.0
    num_cached: int = 0
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        return self.status == 200 and not self.error and bool(self.token_at_s)

    @property
    def intervals_s(self) -> list[float]:
        pairs = zip(self.token_at_s, self.token_at_s[1:], strict=False)
        return [later - earlier for earlier, later in pairs]


class Endpoint:
    """Use as an async context manager.

    Raises on entering:
        Unavailable: no server answers there, or it lists no model.
        AccessDenied: it wants another key.
    """

    def __init__(self, url: str, model: str = "", api_key: str = "", timeout_s: float = 600.0) -> None:
        if not url.startswith(("http://", "https://")):
            raise InvalidArgument("--url", url, "an address that begins with http:// or https://")
        self.url = url.rstrip("/").removesuffix("/v1")
        self.model = model
        self._timeout_s = timeout_s
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Endpoint:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=tool_identity().client_tls or True),
            timeout=aiohttp.ClientTimeout(total=None, sock_read=self._timeout_s),
            headers=self._headers,
        )
        try:
            if not self.model:
                self.model = await self._first_model()
        except BaseException:
            await self._session.close()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def _first_model(self) -> str:
        assert self._session is not None
        try:
            async with self._session.get(f"{self.url}/v1/models") as response:
                status, content = response.status, await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise Unavailable(f"{self.url} does not answer: {cause_of(error)}") from error
        if status in (401, 403):
            raise AccessDenied(f"{self.url}/v1/models answers {status}: {reason_in(content)}; pass --api-key")
        if status not in (200, 404):  # a server of completions only has no such page
            raise Unavailable(f"{self.url}/v1/models answers {status}: {reason_in(content)}")
        try:
            return str(json.loads(content)["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            raise Unavailable(f"{self.url}/v1/models names no model; give one with --model") from error

    async def complete(
        self,
        prompt: Sequence[int],
        num_output: int,
        headers: Mapping[str, str] | None = None,
        cache_salt: str = "",
    ) -> TimedAnswer:
        """Request one greedy completion of exactly ``num_output`` tokens. Failures are in the answer, not
        raised. With a salt of its own no cache is used."""
        body = {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": num_output,
            "min_tokens": num_output,
            "ignore_eos": True,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            **({"cache_salt": cache_salt} if cache_salt else {}),
        }
        answer, began = TimedAnswer(), clock.monotonic()
        assert self._session is not None
        try:
            async with self._session.post(
                f"{self.url}/v1/completions", json=body, headers=headers
            ) as response:
                answer.status = response.status
                answer.headers = dict(response.headers)
                if response.status == 200:
                    await _follow(response, answer, began)
                else:
                    answer.error = reason_in(await response.read())
                    answer.retry_after_s = _seconds(response.headers.get("Retry-After"))
        except (aiohttp.ClientError, OSError, TimeoutError, ProtocolError) as error:
            answer.error = cause_of(error)
        answer.end_s = clock.monotonic() - began
        return answer


class _CompletionChoice(msgspec.Struct):
    text: str | None = None
    token_ids: list[int] | None = None


class _PromptTokensDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _CompletionUsage(msgspec.Struct):
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptTokensDetails | None = None


class _CompletionChunk(msgspec.Struct):
    """The part of an event that is read."""

    error: Any = None
    choices: list[_CompletionChoice] | None = None
    usage: _CompletionUsage | None = None


async def _follow(response: aiohttp.ClientResponse, answer: TimedAnswer, began: float) -> None:
    parser, is_over, num_counted = EventParser(), False, 0
    last_s: float | None = None
    async for data in response.content.iter_any():
        now_s = clock.monotonic() - began
        for event in parser.feed(data):
            if event == b"[DONE]":
                is_over = True
                continue
            chunk = _chunk(event)
            last_s = now_s if chunk.choices else last_s
            num_counted = (chunk.usage or _CompletionUsage()).completion_tokens or num_counted
            _read(chunk, answer, now_s)
    answer.num_tokens = len(answer.token_at_s)
    if not answer.token_ids and num_counted and last_s is not None:
        # Some tokens are part of a character and have no text, and an event may have the text of several.
        # When each of them came is not known; all were there with the last text.
        answer.num_tokens = num_counted
        last_s = answer.token_at_s[-1] if answer.token_at_s else last_s
        answer.token_at_s += [last_s] * (num_counted - len(answer.token_at_s))
        answer.num_events = max(1, answer.num_events)
    if not is_over and not answer.error:
        answer.error = "the stream ended before the answer did"


def _chunk(event: bytes) -> _CompletionChunk:
    try:
        return msgspec.convert(json.loads(event), _CompletionChunk, strict=False)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"an event that is none of a completion ({error}): {event[:80]!r}") from error


def _read(chunk: _CompletionChunk, answer: TimedAnswer, now_s: float) -> None:
    if chunk.error:
        answer.error = reason_of(chunk.error)
    num_before = len(answer.token_at_s)
    for choice in chunk.choices or ():
        token_ids = choice.token_ids
        num_tokens = len(token_ids) if token_ids is not None else bool(choice.text)
        answer.token_ids += token_ids or ()
        answer.token_at_s += [now_s] * num_tokens
    answer.num_events += len(answer.token_at_s) > num_before
    details = (chunk.usage or _CompletionUsage()).prompt_tokens_details or _PromptTokensDetails()
    answer.num_cached = details.cached_tokens or answer.num_cached


def _seconds(text: str | None) -> float | None:
    """A Retry-After, which is a number of seconds or a date; None for what is neither."""
    try:
        seconds = float(text or "")
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(text or "").timestamp() - clock.wall()
        except (ValueError, OverflowError):
            return None
    return max(0.0, seconds) if math.isfinite(seconds) else None


async def gather_at_once(
    endpoint: Endpoint, prompts: Sequence[Sequence[int]], num_output: int
) -> list[TimedAnswer]:
    """Run all of them concurrently."""
    return list(await asyncio.gather(*(endpoint.complete(prompt, num_output) for prompt in prompts)))

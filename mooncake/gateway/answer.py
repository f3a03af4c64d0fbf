"""One HTTP answer: every prompt of a request with all its choices, whole or as a stream.

Owns the fan-out (a walk per prompt, a decode per choice), the deadline, the counts of ``usage`` and the
latencies. Formats are ``inference/answers.py``, the single walk is ``route.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import msgspec

from mooncake import clock
from mooncake.conductor.messages import Finished
from mooncake.gateway.accounting import Slo, Timing, account
from mooncake.gateway.clients import Client
from mooncake.gateway.route import Choice, Walk
from mooncake.inference.answers import ChatWriter, Piece, TextWriter
from mooncake.inference.latency import itl_seconds, mean_of_longest, ttft_seconds
from mooncake.inference.openai import (
    STREAM_END,
    ApiError,
    ChatCompletionRequest,
    CompletionRequest,
    Usage,
)
from mooncake.log import get_logger

log = get_logger(__name__)

MAX_UNREAD_PIECES = 256
"""Pieces of an answer that wait for a client which does not read them."""

AnyRequest = CompletionRequest | ChatCompletionRequest

_PASSED_ON = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "min_tokens",
    "cache_salt",
    "user",
)


class Answer:
    """The answer to ``asked``. Use ``whole`` or ``stream``, once."""

    def __init__(
        self,
        asked: AnyRequest,
        walks: Sequence[Walk],
        *,
        answer_id: str,
        model: str,
        max_model_len: int,
        deadline: float,
        slo: Slo,
        client: Client | None = None,
    ) -> None:
        self._asked = asked
        self._answer_id = answer_id
        self._walks = walks
        self._choices = [Choice(index) for index in range(len(walks) * asked.n)]
        self._max_model_len = max_model_len
        self.deadline = deadline
        self._slo = slo
        self._client = client
        self._began = clock.monotonic()
        self._num_output_tokens = 0
        """In the pieces given out so far; workers may be ahead."""
        self._longest_gap_s = 0.0
        self._gaps_s: list[list[float]] = [[] for _ in walks]
        """Of each prompt, what lay between two pieces of its answers."""
        self._ttfts_s = [0.0] * len(walks)
        self._ttft_s: float | None = None
        writer = ChatWriter if isinstance(asked, ChatCompletionRequest) else TextWriter
        self._writer = writer(answer_id, int(clock.wall()), model, asked.return_token_ids)

    def headers(self) -> dict[str, str]:
        """Who worked for the (first) prompt, as far as it is known now."""
        return self._walks[0].route.headers()

    async def whole(self) -> msgspec.Struct:
        """The body of an answer that is not streamed. Raises ApiError."""
        pieces = [Piece(choice.index) for choice in self._choices]
        merged = self._merged()
        async with contextlib.aclosing(merged):
            async for piece in merged:
                pieces[piece.index].join(piece)
        return self._writer.whole(pieces, self._usage())

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events. The first comes with the first token; before it, raises ApiError."""
        opening: bytes | None = self._writer.opening(len(self._choices))
        options = self._asked.stream_options
        merged = self._merged()
        try:
            async with contextlib.aclosing(merged):
                async for piece in merged:
                    if not (piece.text or piece.token_ids or piece.finish_reason):
                        continue
                    if opening:
                        yield opening
                    opening = None
                    with_usage = options is not None and options.continuous_usage_stats
                    yield self._writer.chunk(piece, self._usage() if with_usage else None)
        except ApiError as error:
            if opening is not None:
                raise
            # Too late for a status: the error comes as an event, and no [DONE] follows.
            yield b"data: " + error.body() + b"\n\n"
            return
        if self._asked.include_usage:
            yield self._writer.usage_chunk(self._usage())
        yield STREAM_END

    async def _merged(self) -> AsyncGenerator[Piece, None]:
        """Pieces of all choices as they come. Raises ApiError, 504 after the deadline."""
        # Bounded: while a client reads nothing, nothing more is read from its workers either.
        news: asyncio.Queue[Piece | ApiError | None] = asyncio.Queue(MAX_UNREAD_PIECES)
        tasks = [
            asyncio.get_running_loop().create_task(self._walk(number, walk, news))
            for number, walk in enumerate(self._walks)
        ]
        num_open = len(tasks)
        try:
            while num_open:
                piece = await self._before_deadline(news)
                if isinstance(piece, ApiError):
                    raise piece
                if piece is None:
                    num_open -= 1
                else:
                    self._num_output_tokens += len(piece.token_ids)
                    yield piece
            self._account()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _before_deadline(self, news: asyncio.Queue[Piece | ApiError | None]) -> Piece | ApiError | None:
        try:
            async with asyncio.timeout(max(0.0, self.deadline - clock.monotonic())):
                return await news.get()
        except TimeoutError:
            waited_s = clock.monotonic() - self._began
            message = f"no complete answer within {waited_s:.0f} s; ask for fewer tokens or try again later"
            return ApiError(504, message, code="deadline_exceeded")

    async def _walk(self, number: int, walk: Walk, news: asyncio.Queue[Piece | ApiError | None]) -> None:
        """One prompt from prefill to the end of its last choice."""
        asked = self._asked
        first = number * asked.n
        is_complete = False
        try:
            await walk.prefill(asked.cache_salt)
            async with asyncio.TaskGroup() as group:
                for choice in self._choices[first : first + asked.n]:
                    group.create_task(self._decode(number, walk, choice, choice.index - first, news))
            is_complete = True
            await news.put(None)
        except* ApiError as errors:
            await news.put(self._as_asked(_first(errors)))
        except* Exception as errors:
            log.exception("answer_failed", error=repr(errors.exceptions[0]))
            message = "the gateway failed while answering; its log has the traceback"
            await news.put(ApiError(500, message, code="internal_error"))
        finally:
            num_tokens = max(len(choice.token_ids) for choice in self._choices[first : first + asked.n])
            tbt_s = mean_of_longest(self._gaps_s[number])
            walk.end(Finished(walk.place_id, num_tokens, self._ttfts_s[number], tbt_s, is_complete))

    async def _decode(
        self,
        number: int,
        walk: Walk,
        choice: Choice,
        seed_offset: int,
        news: asyncio.Queue[Piece | ApiError | None],
    ) -> None:
        last: float | None = None
        pieces = walk.decode(choice, self._sampling(seed_offset), self._max_tokens(walk))
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                now = clock.monotonic()
                if last is None:
                    ttft_seconds.observe(now - self._began)
                    self._ttft_s = max(self._ttft_s or 0.0, now - self._began)
                    self._ttfts_s[number] = max(self._ttfts_s[number], now - self._began)
                else:
                    self._gaps_s[number].append(now - last)
                    itl_seconds.observe(now - last)
                    self._longest_gap_s = max(self._longest_gap_s, now - last)
                last = now
                await news.put(piece)

    def _as_asked(self, error: ApiError) -> ApiError:
        """A worker sees only token ids; its complaint about them is one about what the client sent."""
        if error.detail.param == "prompt" and isinstance(self._asked, ChatCompletionRequest):
            error.detail.param = "messages"
        return error

    def _max_tokens(self, walk: Walk) -> int:
        room = self._max_model_len - len(walk.prompt)
        limit = self._asked.output_limit
        return room if limit is None else min(limit, room)

    def _sampling(self, seed_offset: int) -> Mapping[str, Any]:
        """The fields that a worker needs to sample one choice."""
        asked = self._asked
        given = asked.model_dump(include={*_PASSED_ON}, exclude_unset=True, exclude_none=True)
        if asked.seed is not None:
            # Wraps like the 64-bit number it is.
            given["seed"] = (asked.seed + seed_offset + 2**63) % 2**64 - 2**63
        if isinstance(asked, CompletionRequest):
            if asked.logprobs is not None:
                given["logprobs"] = asked.logprobs
        elif asked.logprobs:
            given["logprobs"] = asked.top_logprobs or 0
        return given

    def _usage(self) -> Usage:
        return Usage.of(
            sum(len(walk.prompt) for walk in self._walks),
            self._num_output_tokens,
            sum(walk.num_cached_tokens for walk in self._walks),
        )

    def _account(self) -> None:
        timing = Timing(self._ttft_s or 0.0, self._longest_gap_s, clock.monotonic() - self._began)
        account(self._answer_id, self._walks[0].route, self._usage(), timing, self._slo, self._client)


def _first(errors: BaseExceptionGroup[ApiError]) -> ApiError:
    """The first error in a group of groups."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, ApiError)
    return error

# SPDX-License-Identifier: Apache-2.0
"""One HTTP answer: every prompt of a request with all its choices, whole or as a stream.

Owns the fan-out (an ``OwnWorkersRequest`` per prompt, a decode per choice), the deadline, the counts of
``usage`` and the latencies. Formats are ``http/answers.py``, a single prompt is ``own_workers_request.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import msgspec

from mooncake import clock
from mooncake.conductor.messages import Finished
from mooncake.gateway.clients import Client
from mooncake.gateway.metrics import Slo, Timing, record_answer
from mooncake.gateway.own_workers_request import AnswerChoice, OwnWorkersRequest
from mooncake.http.answers import AnswerPiece, ChatWriter, CompletionWriter
from mooncake.http.latency import itl_seconds, mean_of_longest, ttft_seconds
from mooncake.http.openai import STREAM_END, ApiError, ChatCompletionRequest, CompletionRequest, Usage
from mooncake.log import get_logger

log = get_logger(__name__)

MAX_UNREAD_PIECES = 256
"""Most pieces of an answer that are buffered for a client that does not read them."""

AnyRequest = CompletionRequest | ChatCompletionRequest

_FORWARDED_FIELDS = (
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


class OwnWorkersAnswer:
    """The answer to ``request``. Use ``whole`` or ``stream``, once."""

    def __init__(
        self,
        request: AnyRequest,
        worker_requests: Sequence[OwnWorkersRequest],
        *,
        answer_id: str,
        model: str,
        max_model_len: int,
        deadline: float,
        slo: Slo,
        client: Client | None = None,
    ) -> None:
        self._request = request
        self._answer_id = answer_id
        self._worker_requests = worker_requests
        self._choices = [AnswerChoice(index) for index in range(len(worker_requests) * request.n)]
        self._max_model_len = max_model_len
        self.deadline = deadline
        self._slo = slo
        self._client = client
        self._began = clock.monotonic()
        self._num_output_tokens = 0
        """Output tokens in the pieces yielded so far; workers may be ahead."""
        self._longest_gap_s = 0.0
        self._gaps_s: list[list[float]] = [[] for _ in worker_requests]
        """By prompt: the times between two pieces of its answers."""
        self._ttfts_s = [0.0] * len(worker_requests)
        self._ttft_s: float | None = None
        writer = ChatWriter if isinstance(request, ChatCompletionRequest) else CompletionWriter
        self._writer = writer(answer_id, int(clock.wall()), model, request.return_token_ids)

    def headers(self) -> dict[str, str]:
        """Headers with the instances of the (first) prompt, as far as they are known now."""
        return self._worker_requests[0].route.headers()

    async def whole(self) -> msgspec.Struct:
        """The body of an answer that is not streamed. Raises ApiError."""
        pieces = [AnswerPiece(choice.index) for choice in self._choices]
        merged = self._merged()
        async with contextlib.aclosing(merged):
            async for piece in merged:
                pieces[piece.index].join(piece)
        return self._writer.whole(pieces, self._usage())

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Yield server-sent events. The first comes with the first token; errors before it raise ApiError."""
        opening: bytes | None = self._writer.opening(len(self._choices))
        options = self._request.stream_options
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
            # Too late for an HTTP status: the error is an event, and no [DONE] follows.
            yield b"data: " + error.body() + b"\n\n"
            return
        if self._request.include_usage:
            yield self._writer.usage_chunk(self._usage())
        yield STREAM_END

    async def _merged(self) -> AsyncGenerator[AnswerPiece, None]:
        """Yield pieces of all choices in order of arrival. Raises ApiError, 504 after the deadline."""
        # Bounded: while a client reads nothing, nothing more is read from its workers either.
        queue: asyncio.Queue[AnswerPiece | ApiError | None] = asyncio.Queue(MAX_UNREAD_PIECES)
        tasks = [
            asyncio.get_running_loop().create_task(self._serve_prompt(number, worker_request, queue))
            for number, worker_request in enumerate(self._worker_requests)
        ]
        num_open = len(tasks)
        try:
            while num_open:
                piece = await self._before_deadline(queue)
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

    async def _before_deadline(
        self, queue: asyncio.Queue[AnswerPiece | ApiError | None]
    ) -> AnswerPiece | ApiError | None:
        try:
            async with asyncio.timeout(max(0.0, self.deadline - clock.monotonic())):
                return await queue.get()
        except TimeoutError:
            waited_s = clock.monotonic() - self._began
            message = f"no complete answer within {waited_s:.0f} s; ask for fewer tokens or try again later"
            return ApiError(504, message, code="deadline_exceeded")

    async def _serve_prompt(
        self,
        number: int,
        worker_request: OwnWorkersRequest,
        queue: asyncio.Queue[AnswerPiece | ApiError | None],
    ) -> None:
        """Serve one prompt from prefill to the end of its last choice."""
        request = self._request
        first = number * request.n
        is_complete = False
        try:
            await worker_request.prefill(request.cache_salt)
            async with asyncio.TaskGroup() as group:
                for choice in self._choices[first : first + request.n]:
                    group.create_task(
                        self._decode(number, worker_request, choice, choice.index - first, queue)
                    )
            is_complete = True
            await queue.put(None)
        except* ApiError as errors:
            await queue.put(self._in_client_terms(_first(errors)))
        except* Exception as errors:
            log.exception("answer_failed", error=repr(errors.exceptions[0]))
            message = "the gateway failed while answering; its log has the traceback"
            await queue.put(ApiError(500, message, code="internal_error"))
        finally:
            num_tokens = max(len(choice.token_ids) for choice in self._choices[first : first + request.n])
            tbt_s = mean_of_longest(self._gaps_s[number])
            worker_request.end(
                Finished(worker_request.place_id, num_tokens, self._ttfts_s[number], tbt_s, is_complete)
            )

    async def _decode(
        self,
        number: int,
        worker_request: OwnWorkersRequest,
        choice: AnswerChoice,
        seed_offset: int,
        queue: asyncio.Queue[AnswerPiece | ApiError | None],
    ) -> None:
        last: float | None = None
        pieces = worker_request.decode(choice, self._sampling(seed_offset), self._max_tokens(worker_request))
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
                await queue.put(piece)

    def _in_client_terms(self, error: ApiError) -> ApiError:
        """Convert a worker's error about token ids to one about the field that the client sent."""
        if error.detail.param == "prompt" and isinstance(self._request, ChatCompletionRequest):
            error.detail.param = "messages"
        return error

    def _max_tokens(self, worker_request: OwnWorkersRequest) -> int:
        room = self._max_model_len - len(worker_request.prompt)
        limit = self._request.output_limit
        return room if limit is None else min(limit, room)

    def _sampling(self, seed_offset: int) -> Mapping[str, Any]:
        """The sampling fields of a worker's request for one choice."""
        request = self._request
        given = request.model_dump(include={*_FORWARDED_FIELDS}, exclude_unset=True, exclude_none=True)
        if request.seed is not None:
            # The seed is a 64-bit number and wraps.
            given["seed"] = (request.seed + seed_offset + 2**63) % 2**64 - 2**63
        if isinstance(request, CompletionRequest):
            if request.logprobs is not None:
                given["logprobs"] = request.logprobs
        elif request.logprobs:
            given["logprobs"] = request.top_logprobs or 0
        return given

    def _usage(self) -> Usage:
        return Usage.of(
            sum(len(worker_request.prompt) for worker_request in self._worker_requests),
            self._num_output_tokens,
            sum(worker_request.num_cached_tokens for worker_request in self._worker_requests),
        )

    def _account(self) -> None:
        timing = Timing(self._ttft_s or 0.0, self._longest_gap_s, clock.monotonic() - self._began)
        record_answer(
            self._answer_id, self._worker_requests[0].route, self._usage(), timing, self._slo, self._client
        )


def _first(errors: BaseExceptionGroup[ApiError]) -> ApiError:
    """The first error in a group of groups."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, ApiError)
    return error

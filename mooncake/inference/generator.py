# SPDX-License-Identifier: Apache-2.0
"""From a request to the pieces of its answer, on asyncio.

Owns the boundary between the engine's thread, which makes tokens, and the loop, on which each
answer is an asynchronous iterator of pieces. Text is made here, with one detokenizer and one matcher of
stop strings per answer. It knows no HTTP.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

from mooncake.errors import MooncakeError, Refusal
from mooncake.http.answers import AnswerPiece
from mooncake.http.openai import CompletionLogprobs, TokenLogprob, TopLogprob
from mooncake.http.worker_stats import PromptStats, ResumedStats
from mooncake.inference.blocks import BlockEvent
from mooncake.inference.engine import Engine, EngineThread, Output
from mooncake.inference.request import FinishReason, Request
from mooncake.inference.scheduler import TokenLogprobs
from mooncake.inference.tokenizer import CONTEXT_TOKENS, AnyTokenizer, Detokenizer, StopMatcher

MAX_UNREAD_OUTPUTS = 4096
"""Limit of one request's outputs that wait for their reader; beyond it the request is aborted."""


INLINE_PRIOR_TOKENS = 256
"""Longer beginnings of an answer, from another worker, become text in a thread and not on the event loop."""


class GenerationFailed(MooncakeError):
    """The engine ended the request with an error while it computed it; ``code`` is its kind."""

    code = "generation_failed"

    def __init__(self, reason: str, code: str | None = None) -> None:
        super().__init__(reason)
        self.code = code or self.code


class GenerationRefused(MooncakeError):
    """The engine refused the request, for the reason in ``refusal``."""

    code = "refused"

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.reason)
        self.refusal = refusal


@dataclasses.dataclass
class TokenCounts:
    """Token counts of one request, for ``usage`` and the hand-over to decode."""

    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens whose KV was found, in this worker or in the pool."""
    num_local_tokens: int = 0
    """Those of them that were found in this worker's own memory."""
    num_stored_tokens: int = 0
    measured: PromptStats | None = None


class Generator:
    """Runs an engine and serves its answers to coroutines of ``loop``.

    ``on_blocks`` is called on the loop with the blocks that were indexed or removed.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: AnyTokenizer,
        loop: asyncio.AbstractEventLoop,
        on_blocks: Callable[[Sequence[BlockEvent]], None] = lambda events: None,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self._loop = loop
        self._on_blocks = on_blocks
        self._waiting: dict[str, asyncio.Queue[Output | None]] = {}
        self._thread = EngineThread(engine, self._from_engine)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> bool:
        """Stop the engine's thread after the step it is in; False if something still touches the pool."""
        return self._thread.stop(timeout_s)

    async def pieces(
        self, request: Request, counts: TokenCounts, *, text_offset: int = 0, index: int = 0
    ) -> AsyncGenerator[AnswerPiece, None]:
        """The answer to ``request``, piece by piece; ``counts`` is filled meanwhile.

        An answer that another worker began (``request.num_prior_output_tokens``) goes on after its
        first ``text_offset`` characters. Closing the iterator early aborts the request.

        Raises:
            GenerationRefused: the engine can't take it now, or never.
            GenerationFailed: computing it failed.
        """
        outputs: asyncio.Queue[Output | None] = asyncio.Queue()
        counts.num_prompt_tokens = request.num_prompt_tokens - request.num_prior_output_tokens
        counts.num_output_tokens = request.num_prior_output_tokens
        self._waiting[request.id] = outputs
        ended, is_first = False, True
        try:
            # Before anything is awaited: a hand-over of a request that is not in the engine would be lost.
            refusal = self.engine.add(request)
            if refusal is not None:
                ended = True
                raise GenerationRefused(refusal)
            if request.num_prior_output_tokens > INLINE_PRIOR_TOKENS:
                text = await asyncio.to_thread(_Text, self.tokenizer, request, text_offset)
            else:
                text = _Text(self.tokenizer, request, text_offset)
            while not ended:
                output = await outputs.get()
                if output is None:
                    raise GenerationFailed("the answer was aborted: its client did not read it for too long")
                ended = output.finish_reason is not None
                if output.error is not None:
                    raise GenerationFailed(output.error, output.error_code)
                counts.num_output_tokens += len(output.token_ids)
                cached = output.num_local_cached + output.num_external_cached
                counts.num_cached_tokens = min(cached, counts.num_prompt_tokens)
                counts.num_local_tokens = min(output.num_local_cached, counts.num_prompt_tokens)
                counts.num_stored_tokens = output.num_stored_tokens
                counts.measured = output.measured
                piece = text.take(output)
                piece.index = index
                if is_first:
                    piece.weights, is_first = output.weights, False
                    piece.resumed = _resumed(request, output)
                yield piece
                if text.is_stopped:
                    return
        finally:
            self._waiting.pop(request.id, None)
            if not ended:
                self.engine.abort(request.id)

    def _from_engine(self, outputs: Sequence[Output], events: Sequence[BlockEvent]) -> None:
        """Called on the engine's thread after a step."""
        self._loop.call_soon_threadsafe(self._deliver, outputs, events)

    def _deliver(self, outputs: Sequence[Output], events: Sequence[BlockEvent]) -> None:
        for output in outputs:
            queue = self._waiting.get(output.request_id)
            if queue is None:
                continue
            if queue.qsize() < MAX_UNREAD_OUTPUTS:
                queue.put_nowait(output)
            else:
                del self._waiting[output.request_id]
                self.engine.abort(output.request_id)
                queue.put_nowait(None)
        if events:
            self._on_blocks(events)


def _resumed(request: Request, output: Output) -> ResumedStats | None:
    if not (request.num_prior_output_tokens and output.token_ids):
        return None
    num_cached = output.num_local_cached + output.num_external_cached
    return ResumedStats(
        output.num_local_cached,
        output.num_external_cached,
        max(0, request.num_prompt_tokens - num_cached),
        output.was_pushed,
    )


class _Text:
    """Turns one request's tokens into pieces of text."""

    def __init__(self, tokenizer: AnyTokenizer, request: Request, text_offset: int) -> None:
        first_output = request.num_prompt_tokens - request.num_prior_output_tokens
        prior = request.token_ids[first_output : request.num_prompt_tokens]
        self._tokenizer = tokenizer
        self._sampling = sampling = request.sampling
        self._detokenizer = Detokenizer(
            tokenizer.decode if sampling.skip_special_tokens else tokenizer.text_of,
            before=request.token_ids[max(0, first_output - CONTEXT_TOKENS) : first_output],
        )
        self._stops = StopMatcher(sampling.stop, sampling.include_stop_str_in_output)
        self._num_tokens = 0
        self._num_chars = 0
        """Number of characters that the answer's tokens have completed so far, those held back included."""
        self._starts: list[int] = []
        """Number of characters before each token that was fed last."""
        passed_over, searched = self._fed(prior)
        self._unsent = passed_over[text_offset:], searched[max(0, text_offset - len(passed_over)) :]
        """Text of another worker's tokens that the client has not received: it was held back there."""
        self.is_stopped = False

    def take(self, output: Output) -> AnswerPiece:
        stop_reason: str | int | None = None
        finish = output.finish_reason
        tokens = output.token_ids
        if finish is FinishReason.STOP and tokens:
            stop_reason = tokens[-1] if tokens[-1] in self._sampling.stop_token_ids else None
            if not self._sampling.include_stop_str_in_output:
                tokens = tokens[:-1]
        passed_over, text = map(str.__add__, self._unsent, self._fed(tokens))
        self._unsent = "", ""
        # The worker that continues a moved answer returns the text that is held back here.
        is_end = finish is not None and finish is not FinishReason.MOVED
        if is_end:
            text += self._detokenizer.finish()
        emitted = self._stops.pass_over(passed_over)
        text, found = self._stops.feed(text)
        text = emitted + text
        if found is None and is_end:
            text += self._stops.finish()
        if found is not None:
            self.is_stopped = True
            finish, stop_reason = FinishReason.STOP, found
        return AnswerPiece(
            text=text,
            token_ids=list(output.token_ids),
            logprobs=self._logprobs(output.logprobs),
            finish_reason=None if finish is None else str(finish),
            stop_reason=stop_reason,
        )

    def _fed(self, tokens: Sequence[int]) -> tuple[str, str]:
        """The text of further tokens: of those within ``min_tokens``, and of the others."""
        num_passed_over = max(0, self._sampling.min_tokens - self._num_tokens)
        self._num_tokens += len(tokens)
        self._starts, texts = [], []
        for token in tokens:
            self._starts.append(self._num_chars)
            texts.append(self._detokenizer.feed(token))
            self._num_chars += len(texts[-1])
        return "".join(texts[:num_passed_over]), "".join(texts[num_passed_over:])

    def _logprobs(self, rows: Sequence[TokenLogprobs] | None) -> CompletionLogprobs | None:
        if rows is None:
            return None
        content: list[TokenLogprob] = []
        columns = CompletionLogprobs(content=content)
        # Where a token begins in the answer, whatever of it is held back. A stop token was not fed.
        starts = self._starts + [self._num_chars] * (len(rows) - len(self._starts))
        for row, start in zip(rows, starts, strict=True):
            values = {row.token_id: row.logprob, **dict(row.top)}
            texts = {token: self._tokenizer.token_bytes(token) for token in values}
            found = {
                token: TopLogprob(texts[token].decode(errors="replace"), value, list(texts[token]))
                for token, value in values.items()
            }
            chosen, top = found[row.token_id], [found[token] for token, _ in row.top]
            columns.text_offset.append(start)
            columns.tokens.append(chosen.token)
            columns.token_logprobs.append(row.logprob)
            columns.top_logprobs.append(_by_text(found))
            content.append(TokenLogprob(chosen.token, row.logprob, chosen.bytes, top))
        return columns


def _by_text(tokens: Mapping[int, TopLogprob]) -> dict[str, float]:
    """Log probabilities by text; of tokens with equal texts all but the first are ``token_id:N``."""
    found: dict[str, float] = {}
    for token, one in tokens.items():
        found[f"token_id:{token}" if one.token in found else one.token] = one.logprob
    return found

"""What work took: of each request's prompt, and of the engine's latest steps.

It owns these numbers' shapes and their short memory, for whoever places requests and predicts from what was
measured; it judges nothing. Steps are kept only when they say something clean: one prompt's chunk alone, or
nothing but decoding, and no load that a layer waited for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec

from mooncake.inference.request import Request
from mooncake.inference.step import Chunk

_KEPT = 32


class PromptStats(msgspec.Struct, frozen=True):
    """How a request came to its first token."""

    queued_s: float
    "Until it had blocks."
    loaded_s: float
    "From then until its first step: asking the pool, and the first layer from there."
    computed_s: float
    "From its first step to its first token."
    num_local_tokens: int
    num_loaded_tokens: int
    num_computed_tokens: int


class StepStats(msgspec.Struct):
    """The latest steps. ``num_chunks`` and ``num_steps`` count all that ever were, so that a reader knows
    which of the rows are new to it."""

    num_chunks: int = 0
    chunks: list[tuple[int, int, float]] = []
    "First token, tokens, seconds."
    num_steps: int = 0
    steps: list[tuple[int, int, float]] = []
    "Requests, tokens of their contexts, seconds."


def prompt_stats_of(request: Request) -> PromptStats | None:
    """Of a request that has its first token."""
    timings = request.timings
    if timings.admitted is None or timings.started is None or timings.first_token is None:
        return None
    num_found = request.num_local_hit_tokens + request.num_external_hit_tokens
    return PromptStats(
        timings.admitted - timings.arrival,
        timings.started - timings.admitted,
        timings.first_token - timings.started,
        request.num_local_hit_tokens,
        request.num_external_hit_tokens,
        max(1, request.num_prompt_tokens - num_found),
    )


class StepLog:
    """Written by the engine's thread, read by any."""

    def __init__(self) -> None:
        self._chunks: deque[tuple[int, int, float]] = deque(maxlen=_KEPT)
        self._steps: deque[tuple[int, int, float]] = deque(maxlen=_KEPT)
        self._num_chunks = self._num_steps = 0

    def note(self, chunks: Sequence[Chunk], seconds: float) -> None:
        """A step has computed these."""
        if any(chunk.has_load for chunk in chunks):
            return
        if all(chunk.num_tokens == 1 and chunk.samples for chunk in chunks):
            self._steps.append((len(chunks), sum(chunk.end for chunk in chunks), seconds))
            self._num_steps += 1
        elif len(chunks) == 1:
            self._chunks.append((chunks[0].start, chunks[0].num_tokens, seconds))
            self._num_chunks += 1

    def read(self) -> StepStats:
        # A row that comes between two of these lines is read next time.
        num_chunks, num_steps = self._num_chunks, self._num_steps
        return StepStats(num_chunks, list(self._chunks), num_steps, list(self._steps))

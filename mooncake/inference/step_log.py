# SPDX-License-Identifier: Apache-2.0
"""Measured durations: of each request's prompt, and of the engine's latest steps.

It owns the list of the latest steps, for a conductor that predicts from measurements; it evaluates nothing.
The types of these numbers are ``http/worker_stats.py``'s, which both ends share. Steps are kept only when
they measure one thing: one prompt's chunk alone, or only decoding, and no load that a layer waited for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from mooncake.http.worker_stats import PromptStats, StepStats
from mooncake.inference.request import Request
from mooncake.inference.step import Chunk

_KEPT = 32


def prompt_stats_of(request: Request) -> PromptStats | None:
    """Prompt durations of a request that has its first token."""
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
    """Log of the latest steps, written by the engine's thread and read by any."""

    def __init__(self) -> None:
        self._chunks: deque[tuple[int, int, float]] = deque(maxlen=_KEPT)
        self._steps: deque[tuple[int, int, float]] = deque(maxlen=_KEPT)
        self._num_chunks = self._num_steps = 0

    def note(self, chunks: Sequence[Chunk], seconds: float) -> None:
        """Record a step that computed ``chunks``."""
        if any(chunk.has_load for chunk in chunks):
            return
        if all(chunk.num_tokens == 1 and chunk.samples for chunk in chunks):
            self._steps.append((len(chunks), sum(chunk.end for chunk in chunks), seconds))
            self._num_steps += 1
        elif len(chunks) == 1:
            self._chunks.append((chunks[0].start, chunks[0].num_tokens, seconds))
            self._num_chunks += 1

    def read(self) -> StepStats:
        # A row that is added between two of these lines is read next time.
        num_chunks, num_steps = self._num_chunks, self._num_steps
        return StepStats(num_chunks, list(self._chunks), num_steps, list(self._steps))

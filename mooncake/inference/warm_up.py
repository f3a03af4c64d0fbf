# SPDX-License-Identifier: Apache-2.0
"""Measures what prompts and steps take before a worker serves.

A conductor that knows nothing of a worker predicts with the costs of some machine. In a load that comes at
once, the first seconds are then admitted for queues that are many times as long as predicted, and all of that
is late. So a worker computes a few prompts and steps of made-up tokens first and reports them like others.
They are its warm-up, too: the first computation of a process takes longer than all further ones.

Nothing of this is in the cache or counted as a request: the blocks are free before and after.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from mooncake.inference.engine import Engine
from mooncake.inference.request import Request
from mooncake.inference.scheduler import Chunk, Step
from mooncake.log import get_logger

log = get_logger(__name__)

PROMPT_TOKENS = (16, 4, 48, 8, 64, 24, 96, 32)
"""Lengths of the prompts: as many as an estimate needs to be trusted, and short, as a start waits for all."""
MORE_TOKENS, FAST_S = (256, 512, 1024, 2048), 0.3
"""Where all of them took less than this together, a fixed cost hides what a token takes: longer ones, too."""
BATCH_SIZES = (1, 4, 2, 8, 1, 4, 2, 8)
CONTEXT_TOKENS = 32


def warm_up(engine: Engine, most_s: float, now: Callable[[], float] = time.perf_counter) -> None:
    """Compute the prompts, then the steps, and report them by ``engine.step_log``.

    ``engine`` must not compute meanwhile, and its runner's steps must not overlap. What has not begun after
    ``most_s`` is left out; 0 does nothing. Lengths that the engine does not allow are left out, too.
    """
    began, is_first = now(), True
    for chunks in _steps(engine, lambda: now() - began < FAST_S):
        if now() - began >= most_s:
            break
        for _ in range(1 + is_first):  # the very first is slow and not a sample
            step_began = now()
            engine.runner.run(chunks, [], [])
            seconds = now() - step_began
        is_first = False
        engine.step_log.note(Step(chunks), seconds)
    log.info("warmed_up", seconds=round(now() - began, 3))


def _steps(engine: Engine, is_fast: Callable[[], bool]) -> Iterator[list[Chunk]]:
    limits, block_tokens = engine.scheduler.settings, engine.runner.layout.block_tokens
    longest = min(limits.max_model_len, limits.max_batch_tokens, (limits.num_blocks - 1) * block_tokens)
    for num_tokens in PROMPT_TOKENS:
        if num_tokens <= longest:
            yield [_chunk(engine, 0, num_tokens)]
    for num_tokens in MORE_TOKENS:
        if num_tokens <= longest and is_fast():
            yield [_chunk(engine, 0, num_tokens)]
    for batch_size in BATCH_SIZES:
        if batch_size <= limits.max_running and longest >= CONTEXT_TOKENS:
            # All read and write the same blocks: what they compute is of no use to anything.
            yield [_chunk(engine, CONTEXT_TOKENS - 1, CONTEXT_TOKENS) for _ in range(batch_size)]


def _chunk(engine: Engine, start: int, end: int) -> Chunk:
    request = Request("warm-up", [place % engine.runner.vocab_size for place in range(end)])
    request.block_ids = [*range(1, 1 - (-end // engine.runner.layout.block_tokens))]
    return Chunk(request, start, end - start, start, samples=True, has_load=False)

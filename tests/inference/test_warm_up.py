# SPDX-License-Identifier: Apache-2.0
"""A worker measures itself before it serves, and leaves no trace of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mooncake.conductor.prediction import TRUSTED_SAMPLES
from mooncake.inference.engine import Engine
from mooncake.inference.scheduler import Chunk
from mooncake.inference.warm_up import BATCH_SIZES, CONTEXT_TOKENS, PROMPT_TOKENS, warm_up
from tests.inference.conftest import Reference, prompt_of
from tests.inference.test_engine import greedy, make_engine, run


class Recorder:
    """Stands for an engine's runner; every step takes a second of its clock."""

    def __init__(self, engine: Engine) -> None:
        self.steps: list[list[tuple[int, int]]] = []
        self._run = engine.runner.run
        engine.runner.run = self.run  # type: ignore[method-assign]

    def clock(self) -> float:
        return float(len(self.steps))

    def run(self, chunks: Sequence[Chunk], loads: Any, saves: Any) -> Any:
        self.steps.append([(chunk.start, chunk.num_tokens) for chunk in chunks])
        return self._run(chunks, loads, saves)


def test_enough_prompts_and_steps_are_reported_to_be_trusted(llama: Reference) -> None:
    engine = make_engine(llama)
    recorder = Recorder(engine)
    warm_up(engine, 60.0, recorder.clock)
    found = engine.step_log.read()
    assert [(first, num_tokens) for first, num_tokens, _ in found.chunks] == [
        (0, one) for one in PROMPT_TOKENS
    ]
    assert [(size, context) for size, context, _ in found.steps] == [
        (size, size * CONTEXT_TOKENS) for size in BATCH_SIZES
    ]
    assert min(len(found.chunks), len(found.steps)) >= TRUSTED_SAMPLES
    assert recorder.steps[0] == recorder.steps[1], "the first computation is slow and no sample"
    assert {seconds for *_, seconds in [*found.chunks, *found.steps]} == {1.0}


def test_answers_counts_and_blocks_are_those_of_an_engine_without_it(llama: Reference) -> None:
    engine, prompt = make_engine(llama), prompt_of(40)
    warm_up(engine, 60.0)
    assert engine.drain_events() == [] and engine.is_idle
    stats = engine.stats()
    assert stats.num_free_blocks == stats.num_blocks and stats.num_steps == stats.num_cached_blocks == 0
    assert run(engine, greedy(prompt))["r"] == llama.greedy(prompt, 20)
    engine.check()


def test_no_more_time_is_spent_than_is_given(llama: Reference) -> None:
    engine = make_engine(llama)
    recorder = Recorder(engine)
    warm_up(engine, 0.0, recorder.clock)
    assert not recorder.steps
    warm_up(engine, 4.0, recorder.clock)
    assert len(recorder.steps) == 4 and engine.step_log.read().num_chunks == 3


def test_a_small_engine_measures_what_it_allows(llama: Reference) -> None:
    engine = make_engine(llama, num_blocks=3, max_batch_tokens=32, max_running=2)
    warm_up(engine, 60.0)
    found = engine.step_log.read()
    assert sorted(num_tokens for _, num_tokens, _ in found.chunks) == [4, 8, 16, 24, 32]
    assert [size for size, _, _ in found.steps] == [1, 2, 1, 2]


def test_on_a_fast_machine_longer_prompts_tell_what_a_token_takes(llama: Reference) -> None:
    engine = make_engine(llama)
    warm_up(engine, 60.0, lambda: 0.0)
    lengths = [num_tokens for _, num_tokens, _ in engine.step_log.read().chunks]
    assert lengths == [*PROMPT_TOKENS, 256, 512], "as many tokens as a step may have"

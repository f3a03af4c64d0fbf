# SPDX-License-Identifier: Apache-2.0
"""An engine whose layers are divided among stages gives one worker's answers, however late the stages are.

The stages are in this process and compute when the test lets them, in any order that a group allows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from random import Random

import pytest
import torch

from mooncake.connectors.kv_link import KvLoad, KvSave
from mooncake.errors import PeerLost
from mooncake.inference.engine import Engine, InferenceSettings
from mooncake.inference.pipeline import ChunkPlan, ChunkRows, layer_ranges
from mooncake.inference.request import Request
from mooncake.inference.runner import LayerRunner, TorchRunner, new_pool, rows_of, sample
from mooncake.inference.scheduler import Chunk, Sampled
from mooncake.inference.weights import load_model
from tests.inference.conftest import FAMILIES, Reference, prompt_of
from tests.inference.test_engine import BLOCK, LENGTHS, NUM_TOKENS, finish, greedy, make_engine, run

Hop = tuple[list[ChunkRows], torch.Tensor, list[Request]]


class LateStages:
    """A ``PipelineRunner`` whose later stages compute one chunk whenever ``advance`` is called."""

    def __init__(self, reference: Reference, num_stages: int, num_blocks: int, random: Random) -> None:
        num_layers = load_model(reference.folder).config.num_layers
        self._stages = []
        for layers in layer_ranges(num_layers, num_stages):
            model = load_model(reference.folder, layers=layers)
            layout = model.kv_layout(BLOCK)
            pool = new_pool(model, BLOCK, num_blocks * layout.pool_bytes(1)).fill_(torch.nan)
            self._stages.append(LayerRunner(model, pool))
        config = self._stages[0].model.config
        self.layout = config.kv_layout(torch.float32, BLOCK)
        self.num_blocks = num_blocks
        self.vocab_size, self.max_positions = config.vocab_size, config.max_positions
        self.eos_token_ids = config.eos_token_ids
        self.is_lost = False
        self._random = random
        self._waiting: list[deque[Hop]] = [deque() for _ in self._stages]
        self._sampled: list[Sampled] = []
        self._wake: Callable[[], None] = lambda: None

    def attach(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def run(self, chunks: Sequence[Chunk], loads: Sequence[KvLoad], saves: Sequence[KvSave]) -> None:
        rows = rows_of(chunks, BLOCK)
        with torch.inference_mode():
            hidden = self._stages[0].embed(chunks)
            self._leave(0, rows, hidden, [c.request for c in chunks if c.samples])

    def _leave(
        self, stage: int, rows: list[ChunkRows], hidden: torch.Tensor, sampling: list[Request]
    ) -> None:
        runner = self._stages[stage]
        hidden = runner.forward(rows, hidden, lambda layer: None)
        if stage + 1 < len(self._stages):
            self._waiting[stage + 1].append((rows, hidden, sampling))
        elif sampling:
            logits = runner.logits(rows, hidden)
            self._sampled.append(sample(logits, sampling, self.eos_token_ids))
            self._wake()

    def advance(self) -> None:
        able = [stage for stage, waiting in enumerate(self._waiting) if waiting]
        if able:
            stage = self._random.choice(able)
            with torch.inference_mode():
                self._leave(stage, *self._waiting[stage].popleft())

    def collect(self) -> list[Sampled]:
        if self.is_lost:
            raise PeerLost("stage 1 is lost; send the request again")
        for _ in range(self._random.randrange(3)):
            self.advance()
        found, self._sampled = self._sampled, []
        return found


def staged(
    reference: Reference, num_stages: int, seed: int = 0, num_blocks: int = 64, budget: int = 512
) -> tuple[Engine, LateStages]:
    runner = LateStages(reference, num_stages, num_blocks, Random(seed))
    plan = ChunkPlan(num_stages, 1e-3, 2.0, max(budget, 4), 4)
    settings = InferenceSettings(max_batch_tokens=budget, max_running=min(16, budget), chunk_plan=plan)
    return Engine(settings, runner, pipeline=runner), runner


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("num_stages", [2, 3])
def test_layers_of_stages_make_the_whole_model(
    references: Callable[[str], Reference], name: str, num_stages: int
) -> None:
    """Logits are bit for bit those of the undivided decoder."""
    reference = references(name)
    whole = load_model(reference.folder)
    parts = [
        load_model(reference.folder, layers=layers)
        for layers in layer_ranges(whole.config.num_layers, num_stages)
    ]
    tokens = torch.tensor(prompt_of(25))
    positions = torch.arange(len(tokens))

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (q * (layer + 1)).reshape(len(tokens), -1)

    with torch.inference_mode():
        hidden = parts[0].embed(tokens)
        for part in parts:
            hidden = part.forward_hidden(hidden, positions, attend)
        expected = whole.logits(whole.forward(tokens, positions, attend))
        assert parts[-1].logits(hidden).equal(expected)
    with pytest.raises(AssertionError, match="only the last stage"):
        parts[0].logits(hidden)
    with pytest.raises(AssertionError, match="only the first stage"):
        parts[-1].embed(tokens)


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("length", LENGTHS)
def test_answers_equal_transformers(llama: Reference, num_stages: int, length: int) -> None:
    prompt = prompt_of(length)
    engine, _ = staged(llama, num_stages, seed=length)
    assert run(engine, greedy(prompt))["r"] == llama.greedy(prompt, NUM_TOKENS)


@pytest.mark.parametrize("seed", range(6))
def test_many_prompts_at_once_equal_transformers(llama: Reference, seed: int) -> None:
    """Prompts share prefixes while later stages have not computed them; some are preempted."""
    random = Random(seed)
    stems = [prompt_of(length, seed) for length in (BLOCK, 2 * BLOCK + 3, 70)]
    prompts = {str(n): random.choice(stems) + prompt_of(random.randint(1, 30), n) for n in range(8)}
    engine, _ = staged(llama, 3, seed, num_blocks=random.choice([12, 40]), budget=random.choice([7, 64]))
    answers = run(engine, *(greedy(prompt, name=name) for name, prompt in prompts.items()))
    assert answers == {name: llama.greedy(prompt, NUM_TOKENS) for name, prompt in prompts.items()}


@pytest.mark.parametrize("seed", range(4))
def test_aborted_requests_leave_no_trace(llama: Reference, seed: int) -> None:
    random = Random(seed)
    engine, _ = staged(llama, 2, seed, num_blocks=14)
    for number in range(12):
        engine.add(greedy(prompt_of(random.randint(5, 60), number), name=f"gone{number}"))
        for _ in range(random.randrange(6)):
            engine.step()
            engine.check()
        engine.abort(f"gone{number}")
    prompt = prompt_of(45, 99)
    engine.add(greedy(prompt, name="kept"))
    answers: dict[str, list[int]] = {"kept": []}
    outputs = {}
    for _ in range(2000):
        for output in engine.step()[1]:
            outputs[output.request_id] = output
            if output.request_id == "kept":
                answers["kept"] += output.token_ids
        engine.check()
        if "kept" in outputs and outputs["kept"].finish_reason is not None:
            break
    assert answers["kept"] == llama.greedy(prompt, NUM_TOKENS)


def test_the_first_stage_does_not_wait_for_the_others(llama: Reference) -> None:
    """Chunks of a prompt, and then another prompt, begin while nothing has left the last stage."""
    runner = LateStages(llama, 2, 64, Random(0))
    runner.collect = list  # type: ignore[method-assign]
    plan = ChunkPlan(2, 0.0, 4.0, 16, 4)
    settings = InferenceSettings(max_batch_tokens=16, saturating_tokens=4, chunk_plan=plan)
    engine = Engine(settings, runner, pipeline=runner)
    for name in ("first", "second"):
        engine.add(greedy(prompt_of(40, len(name)), 2, name=name))
    progress = []
    for _ in range(12):
        progress.append(engine.step()[0])
    assert engine.stats().num_prefill_tokens == 80
    assert progress[-1] is False, "requests that wait for their tokens must not be computed again"
    engine.check()


def test_a_lost_stage_fails_what_is_under_way(llama: Reference) -> None:
    engine, runner = staged(llama, 2)
    engine.add(greedy(prompt_of(30)))
    engine.step()
    runner.is_lost = True
    with pytest.raises(PeerLost):
        engine.step()
    outputs = engine.fail_all("a stage is lost")
    assert [(output.request_id, output.error) for output in outputs] == [("r", "a stage is lost")]
    assert engine.is_idle
    engine.check()


def test_a_plan_does_not_change_what_one_worker_computes(llama: Reference) -> None:
    """The engine without a pipeline goes the way it went: results at once."""
    engine = make_engine(llama)
    assert isinstance(engine.runner, TorchRunner)
    engine.add(greedy(prompt_of(30), 1))
    answers: dict[str, list[int]] = {"r": []}
    finish(engine, answers, max_steps=1)
    assert answers["r"] == llama.greedy(prompt_of(30), 1)

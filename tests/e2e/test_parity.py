# SPDX-License-Identifier: Apache-2.0
"""Greedy float32 output equals ``transformers``' token by token, however it was computed."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from mooncake.inference.engine import Engine, InferenceSettings
from mooncake.inference.gguf import resolve_model
from mooncake.inference.request import Request, SamplingParams
from mooncake.inference.runner import TorchRunner, new_pool
from mooncake.inference.weights import load_model
from tests.cluster import Cluster
from tests.e2e.corpus import LENGTHS, prompts

pytestmark = [pytest.mark.processes, pytest.mark.model, pytest.mark.timeout(1200)]

NUM_NEW = 12
Answers = list[list[int]]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """On a busy machine, threads that wait for each other after every layer take a hundred times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder() -> Path:
    return resolve_model("smollm2")


@pytest.fixture(scope="module")
def expected(folder: Path) -> Answers:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    answers = []
    for prompt in prompts(folder):
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NUM_NEW,
                min_new_tokens=NUM_NEW,
                do_sample=False,
            )
        answers.append(out[0, len(prompt) :].tolist())
    return answers


def run_engine(folder: Path, settings: InferenceSettings, together: bool) -> Answers:
    """All prompts through one engine, one after another or all at once."""
    model = load_model(folder, "float32")
    engine = Engine(settings, TorchRunner(model, new_pool(model, 32, 1 << 30)))
    answers: dict[str, list[int]] = {}

    def run_until_idle() -> None:
        while not engine.is_idle:
            _, outputs = engine.step()
            for output in outputs:
                answers.setdefault(output.request_id, []).extend(output.token_ids)

    # min_tokens, as the reference is made with, keeps the end-of-sequence token out on both sides.
    sampling = SamplingParams(max_tokens=NUM_NEW, min_tokens=NUM_NEW, temperature=0.0)
    for number, prompt in enumerate(prompts(folder)):
        assert engine.add(Request(str(number), prompt, sampling)) is None
        if not together:
            run_until_idle()
    run_until_idle()
    engine.check()
    return [answers[str(number)] for number in range(len(LENGTHS))]


def compare(found: Answers, expected: Answers) -> None:
    assert len(found) == len(expected)
    wrong = [length for length, a, b in zip(LENGTHS, found, expected, strict=False) if a != b]
    assert not wrong, f"answers to prompts of {wrong} tokens differ from transformers'"


def test_there_are_thirty_prompts_up_to_4000_tokens(folder: Path) -> None:
    lengths = [len(prompt) for prompt in prompts(folder)]
    assert lengths == list(LENGTHS)
    assert (len(lengths), min(lengths), max(lengths)) == (30, 1, 4000)


def test_one_process(folder: Path, expected: Answers) -> None:
    compare(run_engine(folder, InferenceSettings(), together=False), expected)


def test_one_process_in_chunks_batched_with_others(folder: Path, expected: Answers) -> None:
    settings = InferenceSettings(max_batch_tokens=100)
    compare(run_engine(folder, settings, together=True), expected)


def test_disaggregated_cold_then_warm(folder: Path, expected: Answers, cluster: Cluster) -> None:
    def ask(prompt: list[int]) -> tuple[list[int], int]:
        answer = cluster.complete(prompt, NUM_NEW, min_tokens=NUM_NEW)
        assert answer.status == 200, answer.body
        cached = answer.body["usage"]["prompt_tokens_details"]["cached_tokens"]
        return answer.body["choices"][0]["token_ids"], cached

    cold = [ask(prompt) for prompt in prompts(folder)]
    compare([tokens for tokens, _ in cold], expected)
    warm = [ask(prompt) for prompt in prompts(folder)]
    compare([tokens for tokens, _ in warm], expected)
    for length, (_, cached) in zip(LENGTHS, warm, strict=True):
        assert cached >= (length - 1) // 32 * 32, f"prompt of {length} tokens was not found in the cache"


def test_disaggregated_batched_with_others(folder: Path, expected: Answers, cluster: Cluster) -> None:
    """Without the three longest, which take as long as the others together and were cold above."""

    def ask(prompt: list[int]) -> list[int]:
        # Another salt: the prefixes are cold again.
        answer = cluster.complete(prompt, NUM_NEW, min_tokens=NUM_NEW, cache_salt="batched")
        assert answer.status == 200, answer.body
        tokens: list[int] = answer.body["choices"][0]["token_ids"]
        return tokens

    with ThreadPoolExecutor(8) as pool:
        compare(list(pool.map(ask, prompts(folder)[:-3])), expected[:-3])

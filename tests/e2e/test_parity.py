# SPDX-License-Identifier: Apache-2.0
"""A cluster's greedy float32 output equals ``transformers``' token by token, cold, warm and batched.

One engine's is compared in ``tests/inference/test_engine.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from mooncake.inference.gguf import resolve_model
from tests.cluster import Cluster
from tests.corpus import LENGTHS, NUM_NEW, NUM_SHORT, Answers, compare, prompts, reference

pytestmark = [pytest.mark.processes, pytest.mark.model, pytest.mark.timeout(1200)]


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
def expected(folder: Path, request: pytest.FixtureRequest) -> Answers:
    return reference(folder, request.config)


def test_disaggregated_cold_then_warm(folder: Path, expected: Answers, cluster: Cluster) -> None:
    """Without the longest, which the test of the engine alone has."""

    def ask(prompt: list[int]) -> tuple[list[int], int]:
        answer = cluster.complete(prompt, NUM_NEW, min_tokens=NUM_NEW)
        assert answer.status == 200, answer.body
        cached = answer.body["usage"]["prompt_tokens_details"]["cached_tokens"]
        return answer.body["choices"][0]["token_ids"], cached

    cold = [ask(prompt) for prompt in prompts(folder)[:-1]]
    compare([tokens for tokens, _ in cold], expected[:-1])
    warm = [ask(prompt) for prompt in prompts(folder)[:-1]]
    compare([tokens for tokens, _ in warm], expected[:-1])
    for length, (_, cached) in zip(LENGTHS[:-1], warm, strict=True):
        assert cached >= (length - 1) // 32 * 32, f"prompt of {length} tokens was not found in the cache"


def test_disaggregated_batched_with_others(folder: Path, expected: Answers, cluster: Cluster) -> None:
    """The short ones: the others were cold above."""

    def ask(prompt: list[int]) -> list[int]:
        # Another salt: the prefixes are cold again.
        answer = cluster.complete(prompt, NUM_NEW, min_tokens=NUM_NEW, cache_salt="batched")
        assert answer.status == 200, answer.body
        tokens: list[int] = answer.body["choices"][0]["token_ids"]
        return tokens

    with ThreadPoolExecutor(8) as pool:
        compare(list(pool.map(ask, prompts(folder)[:NUM_SHORT])), expected[:NUM_SHORT])

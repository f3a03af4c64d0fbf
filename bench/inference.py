# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode speed of one engine, beside transformers' with the same weights, threads and dtype.

Command: ``python -m bench.inference`` (``--dtype bfloat16``, ``--json``). Rounds alternate between the two
and the best of each is printed, so that a busy machine disturbs both alike. It first checks that both
give the same greedy tokens (float32). What it can't show: a GPU, and models that don't fit this machine.
"""

from __future__ import annotations

import os
import time
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as workers set it; read when torch is loaded

import torch

from bench.report import measured, options
from mooncake.inference.engine import Engine, InferenceSettings
from mooncake.inference.gguf import resolve_model
from mooncake.inference.request import Request, SamplingParams
from mooncake.inference.runner import TorchRunner, new_pool
from mooncake.inference.weights import load_model

PROMPT_TOKENS = 1024
CONTEXT_TOKENS = 128
DECODE_STEPS = 24
BATCHES = (1, 8)


def prompt_of(num_tokens: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [int(token) for token in torch.randint(5, 40_000, (num_tokens,), generator=generator)]


class Ours:
    """One engine; every prompt is new, so nothing is found in its cache."""

    def __init__(self, folder: Any, dtype: str) -> None:
        model = load_model(folder, dtype)
        self._engine = Engine(InferenceSettings(), TorchRunner(model, new_pool(model, 64, 1 << 30)))
        self._num_requests = 0

    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        self._add(prompt, num_tokens)
        return [token for _, tokens in self._steps() for token in tokens]

    def prefill(self, prompt: list[int]) -> float:
        """Tokens per second."""
        began = time.perf_counter()
        self.greedy(prompt, 1)
        return len(prompt) / (time.perf_counter() - began)

    def decode(self, prompts: list[list[int]]) -> float:
        """Tokens per second of all prompts together."""
        for prompt in prompts:
            self._add(prompt, DECODE_STEPS + 8)
        marks = [now for now, tokens in self._steps() if len(tokens) == len(prompts)]
        return len(prompts) * (len(marks) - 1) / (marks[-1] - marks[0])

    def _add(self, prompt: list[int], num_tokens: int) -> None:
        self._num_requests += 1
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
        refusal = self._engine.add(Request(f"r{self._num_requests}", prompt, sampling))
        assert refusal is None, refusal

    def _steps(self) -> list[tuple[float, list[int]]]:
        steps = []
        while not self._engine.is_idle:
            _, outputs = self._engine.step()
            steps.append((time.perf_counter(), [token for out in outputs for token in out.token_ids]))
        return steps


class Transformers:
    """The reference: ``generate``'s own loop over its own cache, without its bookkeeping."""

    def __init__(self, folder: Any, dtype: str) -> None:
        from transformers import AutoModelForCausalLM

        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))

    @torch.inference_mode()
    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        ids, cache, tokens = torch.tensor([prompt]), None, []
        for _ in range(num_tokens):
            out = self._model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            ids, cache = out.logits[:, -1].argmax(-1, keepdim=True), out.past_key_values
            tokens.append(int(ids))
        return tokens

    def prefill(self, prompt: list[int]) -> float:
        began = time.perf_counter()
        self.greedy(prompt, 1)
        return len(prompt) / (time.perf_counter() - began)

    @torch.inference_mode()
    def decode(self, prompts: list[list[int]]) -> float:
        out = self._model(torch.tensor(prompts), use_cache=True, logits_to_keep=1)
        began = time.perf_counter()
        for _ in range(DECODE_STEPS):
            ids = out.logits[:, -1].argmax(-1, keepdim=True)
            out = self._model(ids, past_key_values=out.past_key_values, use_cache=True)
        return len(prompts) * DECODE_STEPS / (time.perf_counter() - began)


def main() -> None:
    parser = options(__doc__, "bench.inference")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--rounds", type=int, help="number of rounds, 3 by default; the best is printed")
    arguments = parser.parse_args()
    rounds = arguments.rounds or (1 if arguments.quick else 3)
    prompt_tokens = CONTEXT_TOKENS if arguments.quick else PROMPT_TOKENS
    with measured("inference", arguments) as result:
        folder = resolve_model("smollm2")
        ours, reference = Ours(folder, arguments.dtype), Transformers(folder, arguments.dtype)
        engines: list[Ours | Transformers] = [ours, reference]
        if arguments.dtype == "float32":
            prompt = prompt_of(CONTEXT_TOKENS, 0)
            assert ours.greedy(prompt, 16) == reference.greedy(prompt, 16), "the two disagree"
        samples: dict[str, tuple[list[float], list[float]]] = {}
        for index in range(rounds):
            for column, engine in enumerate(engines):
                found = {
                    f"prefill, {prompt_tokens} tokens": engine.prefill(prompt_of(prompt_tokens, 100 + index))
                }
                for batch in BATCHES:
                    prompts = [prompt_of(CONTEXT_TOKENS, 1000 * index + 10 * batch + n) for n in range(batch)]
                    found[f"decode, {batch} at once"] = engine.decode(prompts)
                for name, speed in found.items():
                    samples.setdefault(name, ([], []))[column].append(speed)
        table = result.table(
            "tokens per second, the best",
            "mooncake",
            "transformers",
            ("ratio", 2),
            title=f"SmolLM2-135M-Instruct, {arguments.dtype}, {torch.get_num_threads()} threads",
        )
        for name, (mine, theirs) in samples.items():
            best = max(mine), max(theirs)
            table.add(name, *best, best[0] / best[1], samples={"mooncake": mine, "transformers": theirs})


if __name__ == "__main__":
    main()

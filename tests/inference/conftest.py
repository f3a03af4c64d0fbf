# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of each family, made by transformers, and transformers' answers with them."""

from __future__ import annotations

import os

# Threads that wait for each other by spinning make no progress when other processes use the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY = 199
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.4,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MAKERS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "llama-tied-biased": lambda: LlamaForCausalLM(
        LlamaConfig(**SIZES, tie_word_embeddings=True, attention_bias=True, mlp_bias=True)
    ),
    "llama-rope3": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE)),
    "llama-rope-linear": lambda: LlamaForCausalLM(
        LlamaConfig(**SIZES, rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0})
    ),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16)),
}
FAMILIES = list(MAKERS)


class Reference:
    """One tiny model: its folder, and transformers' answers."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        torch.manual_seed(FAMILIES.index(name))
        self.model = MAKERS[name]().eval()
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.1)  # biases and norms that matter
        self.model.save_pretrained(folder)

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """The next ``num_tokens`` tokens, end-of-sequence tokens ignored."""
        ids = torch.tensor([list(prompt)])
        with torch.no_grad():
            answer = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        found: list[int] = answer[0, len(prompt) :].tolist()
        return found


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    made: dict[str, Reference] = {}

    def get(name: str) -> Reference:
        if name not in made:
            made[name] = Reference(name, tmp_path_factory.mktemp(name))
        return made[name]

    return get


@pytest.fixture(scope="session")
def llama(references: Callable[[str], Reference]) -> Reference:
    return references("llama")


@pytest.fixture(scope="session", params=FAMILIES)
def reference(request: pytest.FixtureRequest, references: Callable[[str], Reference]) -> Reference:
    return references(request.param)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """A random prompt without special tokens."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return [int(token) for token in torch.randint(3, VOCABULARY, (length,), generator=generator)]

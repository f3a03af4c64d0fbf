# SPDX-License-Identifier: Apache-2.0
"""Prompts of natural text, cut from the licence in the repository, and what ``transformers`` answers."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

LICENCE = Path(__file__).parents[1] / "LICENSE"
NUM_NEW = 8
Answers = list[list[int]]

# Around the edges of blocks (32 tokens) and of prefill chunks (512), tiny, of three chunks, and long: one
# prompt of 4,000 tokens takes as much time as all others together.
LENGTHS = (1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 257, 511, 512, 513, 1023, 1025, 4000)
NUM_SHORT = LENGTHS.index(513) + 1
"""Prompts without the three longest, which take longer than all others together."""


@cache
def licence_tokens(folder: Path) -> list[int]:
    from mooncake.inference.tokenizer import Tokenizer

    return Tokenizer(folder).encode(LICENCE.read_text())


def prompts(folder: Path) -> list[list[int]]:
    """One prompt for each of ``LENGTHS``, each beginning elsewhere so that none shares a prefix."""
    tokens = licence_tokens(folder)
    rolled = [tokens[start:] + 2 * tokens for start in range(0, 37 * len(LENGTHS), 37)]
    return [text[:length] for text, length in zip(rolled, LENGTHS, strict=True)]


def reference(folder: Path, config: pytest.Config) -> Answers:
    """The first ``NUM_NEW`` tokens of the greedy float32 answer to each prompt, by ``transformers``.

    They take a minute, so pytest's cache keeps them for the next test of this checkout that asks.
    """
    import torch
    import transformers

    size = (folder / "model.safetensors").stat().st_size
    key = f"mooncake/answers-{folder.name}-{size}-{torch.__version__}-{transformers.__version__}"
    asked = prompts(folder)
    if config.cache is not None:
        kept: Any = config.cache.get(key, None)
        if kept is not None and kept["prompts"] == asked:
            answers: Answers = kept["answers"]
            return answers
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    answers = []
    for prompt in asked:
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
    if config.cache is not None:
        config.cache.set(key, {"prompts": asked, "answers": answers})
    return answers


def compare(found: Answers, expected: Answers) -> None:
    assert len(found) == len(expected)
    wrong = [length for length, a, b in zip(LENGTHS, found, expected, strict=False) if a != b]
    assert not wrong, f"answers to prompts of {wrong} tokens differ from transformers'"

# SPDX-License-Identifier: Apache-2.0
"""Prompts of natural text for end-to-end tests, cut from the licence in the repository."""

from __future__ import annotations

from functools import cache
from pathlib import Path

LICENCE = Path(__file__).parents[2] / "LICENSE"

# Around the edges of blocks (32 tokens) and of prefill chunks (512), tiny, and long.
LENGTHS = (
    *(1, 2, 3, 15, 16, 17, 31, 32, 33, 34, 63, 64, 65, 96, 127, 128, 129, 200, 255, 257),
    *(480, 511, 512, 513, 700, 1023, 1025, 1537, 2048, 4000),
)


@cache
def licence_tokens(folder: Path) -> list[int]:
    from mooncake.inference.tokenizer import Tokenizer

    return Tokenizer(folder).encode(LICENCE.read_text())


def prompts(folder: Path) -> list[list[int]]:
    """One prompt for each of ``LENGTHS``, each beginning elsewhere so that none shares a prefix."""
    tokens = licence_tokens(folder)
    rolled = [tokens[start:] + 2 * tokens for start in range(0, 37 * len(LENGTHS), 37)]
    return [text[:length] for text, length in zip(rolled, LENGTHS, strict=True)]

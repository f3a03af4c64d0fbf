# SPDX-License-Identifier: Apache-2.0
"""One step of the engine, as the scheduler decided it: what to compute, to save and to look up.

It owns these types and the result type of a runner, so that runners and the transfers from and to the
external cache need not know the scheduler. A step names requests and block ids; it holds no tensors and
changes nothing.
"""

from __future__ import annotations

import dataclasses

from mooncake.inference.request import Request
from mooncake.prefix import BlockHash


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """Positions ``[start, start + num_tokens)`` of one request, to be computed in one step."""

    request: Request
    start: int
    num_tokens: int
    num_cached: int
    """Positions below this one are in the cache already and must not be written again."""
    samples: bool
    """Whether the last position's logits are needed."""
    has_load: bool
    """Whether some of the cached positions are still arriving, layer by layer."""

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


@dataclasses.dataclass(frozen=True, slots=True)
class SavedBlock:
    """A block to be offered to the external cache."""

    hash: BlockHash
    num_tokens: int
    block_id: int


@dataclasses.dataclass(frozen=True, slots=True)
class SaveBlocks:
    """Blocks of one request that are complete once this step has run."""

    request: Request
    blocks: tuple[SavedBlock, ...]

    @property
    def block_ids(self) -> list[int]:
        return [block.block_id for block in self.blocks]


@dataclasses.dataclass(frozen=True, slots=True)
class CacheLookup:
    """A lookup of leading blocks in the external cache; the last may be partial."""

    request: Request
    blocks: tuple[tuple[BlockHash, int], ...]
    """(hash, tokens) of each block."""


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of probabilities before temperature and truncation."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """The most likely (token id, logprob), best first."""


Sampled = tuple[list[int], list[TokenLogprobs | None]]
"""A token, with its log probabilities if wanted, for each chunk that samples, in the order of the chunks."""


@dataclasses.dataclass(slots=True)
class Step:
    """Work of one step."""

    chunks: list[Chunk] = dataclasses.field(default_factory=list)
    saves: list[SaveBlocks] = dataclasses.field(default_factory=list)
    lookups: list[CacheLookup] = dataclasses.field(default_factory=list)
    gives_way_until: float | None = None
    """Time until which a prompt that could run waits for others whose lookups are under way."""

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)

# SPDX-License-Identifier: Apache-2.0
"""A transformer's flow of data in whole numbers: exact, deterministic, and sensitive to every byte it reads.

It owns the KV memory and what is computed from and written to it. A token's state is one 64-bit word. In
each layer the keys and values of a position are mixed from its state and written to its block, and the
state is mixed with the sum over *all* positions up to there of what lies in the pool. Sums of
whole numbers don't depend on how a prompt is cut into steps or batches; any bit of any block does
change them, as does the order of blocks. There are no tolerances to choose.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mooncake.connectors.kv_link import AnyLink, KvLoad, KvSave
from mooncake.connectors.memory import SlabMemory
from mooncake.errors import InvalidArgument
from mooncake.inference.step import Chunk
from mooncake.kvlayout import KvIdentity, KvLayout

Words = npt.NDArray[np.uint64]

ALPHABET = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 ."
"""Answers are made of these 64 characters; a token is a byte."""

_WORD_BYTES = 8
_GOLDEN = 0x9E3779B97F4A7C15


class FakeModel:
    """Weights derived from a seed, and a pool of KV blocks laid out as our own worker's is."""

    def __init__(self, seed: int, layout: KvLayout, num_blocks: int) -> None:
        """Raises InvalidArgument when a token's keys are not a whole number of 64-bit words."""
        if layout.token_bytes % _WORD_BYTES:
            raise InvalidArgument("head_dim", layout.head_dim, "keys of a multiple of 8 bytes per token")
        self.layout = layout
        self.seed = seed
        num_words = layout.token_bytes // _WORD_BYTES
        shape = (layout.num_layers, 2, num_blocks, layout.block_tokens, num_words)
        self.pool: Words = np.zeros(shape, dtype=np.uint64)
        weights = _mix(np.arange(1, 2 + 4 * layout.num_layers * num_words, dtype=np.uint64) + _word(seed))
        self._embedding = weights[0]
        parts = weights[1:].reshape(2, layout.num_layers, 2 * num_words)
        self._into: Words = parts[0]
        """[layer, k and v]: factors from the state to the keys and values of the layer."""
        self._out_of: Words = parts[1] | np.uint64(1)
        """Factors from keys and values to the state: odd, so that a changed word changes every sum."""

    @property
    def identity(self) -> KvIdentity:
        """The identity of these blocks, with everything that changes their bytes."""
        return KvIdentity(f"fake-{self.seed}", "bytes", self.layout)

    def memory(self) -> SlabMemory:
        """Memory of the blocks, as a connector needs it."""
        num_blocks = self.pool.shape[2]
        first = [
            self.layout.pool_addresses(self.pool.ctypes.data, num_blocks, layer, [0])
            for layer in range(self.layout.num_layers)
        ]
        return SlabMemory([self.pool], np.stack(first), self.layout.chunk_bytes(self.layout.block_tokens))

    def flip(self, block_id: int, layer: int) -> None:
        """Invert one bit of a block."""
        self.pool[layer, 1, block_id, 0, 0] ^= np.uint64(1)

    def run(
        self, chunks: Sequence[Chunk], link: AnyLink | None, loads: Sequence[KvLoad], saves: Sequence[KvSave]
    ) -> list[int]:
        """The next token of each chunk, while layers are written by ``loads`` and read by ``saves``."""
        states = [self._embed(chunk) for chunk in chunks]
        for layer in range(self.layout.num_layers):
            for chunk, state in zip(chunks, states, strict=True):
                self._write(layer, chunk, state)
            if link is not None:
                if loads:
                    link.wait_layer(loads, layer)
                for save in saves:
                    link.save_layer(save, layer)
            states = [self._attend(layer, c, state) for c, state in zip(chunks, states, strict=True)]
        return [ALPHABET[int(state[-1] >> np.uint64(58))] for state in states]

    def _embed(self, chunk: Chunk) -> Words:
        tokens = np.array(chunk.request.token_ids[chunk.start : chunk.end], dtype=np.uint64)
        positions = np.arange(chunk.start, chunk.end, dtype=np.uint64)
        return _mix(_mix(tokens + self._embedding) + positions)

    def _write(self, layer: int, chunk: Chunk, state: Words) -> None:
        """Write the keys and values of the positions that no block holds yet."""
        first = max(chunk.start, chunk.num_cached)
        positions = np.arange(first, chunk.end)
        blocks = np.array(chunk.request.block_ids)[positions // self.layout.block_tokens]
        words = _mix(state[first - chunk.start :, None] + self._into[layer])
        keys, values = np.split(words, 2, axis=1)
        offsets = positions % self.layout.block_tokens
        self.pool[layer, 0, blocks, offsets] = keys
        self.pool[layer, 1, blocks, offsets] = values

    def _attend(self, layer: int, chunk: Chunk, state: Words) -> Words:
        """Read every position up to the chunk's end out of the pool."""
        num_blocks = -(-chunk.end // self.layout.block_tokens)
        found = self.pool[layer][:, chunk.request.block_ids[:num_blocks]]
        keys, values = found.reshape(2, -1, found.shape[-1])[:, : chunk.end]
        out_of_keys, out_of_values = np.split(self._out_of[layer], 2)
        read = (keys * out_of_keys).sum(axis=1) + (values * out_of_values).sum(axis=1)
        read = _mix(read + np.arange(chunk.end, dtype=np.uint64) * np.uint64(_GOLDEN))
        return _mix(state ^ np.cumsum(read)[chunk.start :])


def _word(number: int) -> np.uint64:
    return np.uint64(number * _GOLDEN % 2**64)


def _mix(words: Words) -> Words:
    """SplitMix64's finalizer: a permutation of the words in which every bit depends on every other."""
    words = words + np.uint64(_GOLDEN)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))

# SPDX-License-Identifier: Apache-2.0
"""A step becomes tensors, tensors become tokens.

It owns the translation of chunks into rows, slots and spans, and the order of operations inside a
layer: write this step's keys, wait for the layer's loads, start its saves, attend. It
does not know why a chunk was scheduled, and leaves the choice of tokens to ``sampler.py``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from mooncake.connectors.kv_link import AnyLink, KvLoad, KvSave
from mooncake.inference.attention import SCRATCH_BLOCK, PagedAttention
from mooncake.inference.model import Decoder
from mooncake.inference.sampler import sample
from mooncake.inference.step import Chunk, Sampled


def new_pool(model: Decoder, block_tokens: int, size_bytes: int) -> Tensor:
    """Memory for the KV blocks of ``model``.

    Not zeroed: a slot is written before it is read, and untouched pages cost no memory.
    """
    layout = model.config.kv_layout(model.dtype, block_tokens)
    shape = layout.pool_shape(max(2, size_bytes // layout.pool_bytes(1)))
    return torch.empty(shape, dtype=model.dtype, device=model.device)


class TorchRunner:
    """Runs steps of one decoder over one KV pool."""

    def __init__(self, model: Decoder, pool: Tensor, link: AnyLink | None = None) -> None:
        """``pool``: as ``new_pool`` makes it."""
        config = model.config
        self.layout = config.kv_layout(model.dtype, pool.shape[3])
        self.num_blocks = pool.shape[2]
        self.vocab_size = config.vocab_size
        self.max_positions = config.max_positions
        self.eos_token_ids = config.eos_token_ids
        self.pool = pool
        self._model = model
        self._attention = PagedAttention(pool, self.layout, config.num_heads)
        self._link = link

    def run(
        self, chunks: Sequence[Chunk], loads: Sequence[KvLoad] = (), saves: Sequence[KvSave] = ()
    ) -> Sampled:
        """Compute ``chunks``: ``loads`` write cached positions of them meanwhile, layer by layer, and
        ``saves`` read the blocks that they complete.
        """
        with torch.inference_mode():
            logits = self._logits(chunks, loads, saves)
            return sample(logits, [c.request for c in chunks if c.samples], self.eos_token_ids)

    def _logits(self, chunks: Sequence[Chunk], loads: Sequence[KvLoad], saves: Sequence[KvSave]) -> Tensor:
        """float32 logits [chunks that sample, vocabulary], in the order of ``chunks``."""
        attention, link = self._attention, self._link
        first_rows = list(itertools.accumulate((chunk.num_tokens for chunk in chunks), initial=0))
        spans = [
            attention.span(row, chunk.num_tokens, chunk.start, chunk.request.block_ids)
            for row, chunk in zip(first_rows, chunks, strict=False)
        ]
        slots = self._column([slot for chunk in chunks for slot in self._slots(chunk)])

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            attention.write(layer, slots, k, v)
            if link is not None:
                if loads:
                    link.wait_layer(loads, layer)
                for save in saves:
                    link.save_layer(save, layer)
            return attention.attend(layer, q, spans)

        token_ids = [token for c in chunks for token in c.request.token_ids[c.start : c.end]]
        positions = [position for c in chunks for position in range(c.start, c.end)]
        hidden = self._model.forward(self._column(token_ids), self._column(positions), attend)
        rows = [row + c.num_tokens - 1 for row, c in zip(first_rows, chunks, strict=False) if c.samples]
        if len(rows) != hidden.shape[0]:
            hidden = hidden[self._column(rows)]
        # A step of unfinished prompts has no row to multiply with the vocabulary.
        if not rows:
            return torch.empty(0, self.vocab_size)
        return self._model.logits(hidden)

    def _slots(self, chunk: Chunk) -> list[int]:
        """The slot of each row's keys; cached positions get the scratch block."""
        size, block_ids = self.layout.block_tokens, chunk.request.block_ids
        return [
            block_ids[position // size] * size + position % size
            if position >= chunk.num_cached
            else SCRATCH_BLOCK * size
            for position in range(chunk.start, chunk.end)
        ]

    def _column(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._model.device)

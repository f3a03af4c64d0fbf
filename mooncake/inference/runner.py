"""A step becomes tensors, tensors become logits.

It owns the translation of chunks into rows, slots and spans, and the order of things inside a
layer: write this step's keys, wait for the layer's loads, announce it to the saves, attend. It
refuses to know why a chunk was scheduled and what its logits are for.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from mooncake.connectors.link import AnyLink, Load, Save
from mooncake.inference.attention import SCRATCH_BLOCK, PagedAttention
from mooncake.inference.model import Decoder
from mooncake.inference.step import Chunk


class Runner:
    """Runs steps of one decoder over one KV pool."""

    def __init__(self, model: Decoder, attention: PagedAttention, link: AnyLink | None = None) -> None:
        self._model = model
        self._attention = attention
        self._link = link
        self._block_tokens = attention.layout.block_tokens

    def run(self, chunks: Sequence[Chunk], loads: Sequence[Load] = (), saves: Sequence[Save] = ()) -> Tensor:
        """float32 logits [chunks that sample, vocabulary], in the order of ``chunks``.

        ``loads`` bring cached positions of these chunks while the layers compute; ``saves`` take
        blocks that these chunks complete.
        """
        attention, link = self._attention, self._link
        with torch.inference_mode():
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
                return torch.empty(0, self._model.config.vocab_size)
            return self._model.logits(hidden)

    def _slots(self, chunk: Chunk) -> list[int]:
        """Where each row's keys go; cached positions go to the scratch block."""
        size, block_ids = self._block_tokens, chunk.request.block_ids
        return [
            block_ids[position // size] * size + position % size
            if position >= chunk.num_cached
            else SCRATCH_BLOCK * size
            for position in range(chunk.start, chunk.end)
        ]

    def _column(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._model.device)

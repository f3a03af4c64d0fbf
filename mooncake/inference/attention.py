# SPDX-License-Identifier: Apache-2.0
"""Paged attention in plain torch: the pool, and reading and writing it for one step.

A step's rows are one flat column; each request owns a slice of it and a list of blocks. Blocks with
consecutive ids are one contiguous matrix in the pool, so a request whose blocks form one run is
attended to in place, without a copy::

    blocks  7 8 9        runs (7*B, 2*B + n)               a view of the pool
    blocks  7 8 9 | 3    runs (7*B, 3*B) (3*B, n)          two pieces, copied together

Grouped queries are never expanded: in decode the query group becomes rows, in prefill
``enable_gqa`` does it inside the kernel. It does not know layers' loads and saves; ``runner``
puts those between ``write`` and ``attend``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from mooncake.kvlayout import KvLayout

TILE_ROWS = 128
"""Prefill rows per kernel call: a tile skips the keys after its last row (30 % faster than one mask)."""

SCRATCH_BLOCK = 0
"""Scratch block that no request owns: rows whose keys are already cached are written here and never read."""


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """One request's part of a step: rows ``[first_row, first_row + num_rows)`` at ``start`` onwards."""

    first_row: int
    num_rows: int
    start: int
    """Position of the first row; it attends to itself and everything before."""
    runs: tuple[tuple[int, int], ...]
    """(first slot, tokens) of each contiguous piece of the request's keys, in order."""
    masks: tuple[Tensor, ...] = ()
    """One bool mask [rows, keys] per tile, shared by all layers; empty for a single row."""


def runs_of(block_ids: Sequence[int], num_tokens: int, block_tokens: int) -> tuple[tuple[int, int], ...]:
    """Contiguous slot ranges that hold the first ``num_tokens`` tokens of ``block_ids``."""
    runs: list[tuple[int, int]] = []
    first = previous = -1
    start = 0
    num_blocks = -(-num_tokens // block_tokens)
    for index in range(num_blocks):
        block = block_ids[index]
        if block != previous + 1 or index == 0:
            if index:
                runs.append((first * block_tokens, (index - start) * block_tokens))
            first, start = block, index
        previous = block
    runs.append((first * block_tokens, num_tokens - start * block_tokens))
    return tuple(runs)


class PagedAttention:
    """The KV pool of one device and the attention over it."""

    def __init__(self, pool: Tensor, layout: KvLayout, num_heads: int) -> None:
        """``pool``: ``layout.pool_shape(num_blocks)`` in ``layout.dtype``; block 0 is scratch."""
        assert pool.is_contiguous() and tuple(pool.shape) == layout.pool_shape(pool.shape[2])
        self.pool = pool
        self.layout = layout
        self._group = num_heads // layout.num_kv_heads
        flat = (-1, layout.num_kv_heads, layout.head_dim)
        self._keys = [pool[layer, 0].view(flat) for layer in range(layout.num_layers)]
        self._values = [pool[layer, 1].view(flat) for layer in range(layout.num_layers)]

    def span(self, first_row: int, num_rows: int, start: int, block_ids: Sequence[int]) -> Span:
        """The plan of one request's rows, computed once for all layers."""
        runs = runs_of(block_ids, start + num_rows, self.layout.block_tokens)
        masks = []
        if num_rows > 1:
            for row in range(0, num_rows, TILE_ROWS):
                rows = min(TILE_ROWS, num_rows - row)
                mask = torch.ones(rows, start + row + rows, dtype=torch.bool, device=self.pool.device)
                masks.append(mask.tril_(start + row))
        return Span(first_row, num_rows, start, runs, tuple(masks))

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Put k, v [rows, kv heads, dim] at int64 ``slots`` [rows] (block id * block_tokens + offset)."""
        self._keys[layer].index_copy_(0, slots, k)
        self._values[layer].index_copy_(0, slots, v)

    def attend(self, layer: int, q: Tensor, spans: Sequence[Span]) -> Tensor:
        """Attention of q [rows, q heads, dim] over the pool: [rows, q heads * dim]."""
        keys, values = self._keys[layer], self._values[layer]
        parts = []
        for span in spans:
            rows = q[span.first_row : span.first_row + span.num_rows]
            if span.num_rows == 1:
                parts.append(self._one_row(rows, keys, values, span.runs))
            else:
                parts.append(self._many_rows(rows, keys, values, span))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _one_row(self, q: Tensor, keys: Tensor, values: Tensor, runs: Sequence[tuple[int, int]]) -> Tensor:
        # [1, kv heads, query group, dim]: the query heads of one kv head are rows over the same keys
        q = q.reshape(1, self.layout.num_kv_heads, self._group, self.layout.head_dim)
        k = _gather(keys, runs).transpose(0, 1).unsqueeze(0)
        v = _gather(values, runs).transpose(0, 1).unsqueeze(0)
        return F.scaled_dot_product_attention(q, k, v).view(1, -1)

    def _many_rows(self, q: Tensor, keys: Tensor, values: Tensor, span: Span) -> Tensor:
        # [1, heads, tokens, dim] views: the kernel takes strides, so nothing is transposed in memory
        k = _gather(keys, span.runs).transpose(0, 1).unsqueeze(0)
        v = _gather(values, span.runs).transpose(0, 1).unsqueeze(0)
        q = q.transpose(0, 1).unsqueeze(0)
        tiles = []
        for index, mask in enumerate(span.masks):
            rows, num_keys = mask.shape
            tile = q[:, :, index * TILE_ROWS : index * TILE_ROWS + rows]
            seen_k, seen_v = k[:, :, :num_keys], v[:, :, :num_keys]
            out = F.scaled_dot_product_attention(tile, seen_k, seen_v, attn_mask=mask, enable_gqa=True)
            tiles.append(out.squeeze(0).transpose(0, 1).reshape(rows, -1))
        return tiles[0] if len(tiles) == 1 else torch.cat(tiles)


def _gather(pool: Tensor, runs: Sequence[tuple[int, int]]) -> Tensor:
    pieces = [pool[first : first + count] for first, count in runs]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

# SPDX-License-Identifier: Apache-2.0
"""Paged attention equals attention over one dense matrix for every order of the blocks in the pool."""

from __future__ import annotations

from random import Random

import pytest
import torch
from torch import Tensor

from mooncake.inference.attention import PagedAttention, runs_of
from mooncake.kvlayout import KvLayout

LAYOUT = KvLayout(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32", block_tokens=16)
NUM_HEADS = 6
NUM_BLOCKS = 40


def dense(q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
    """The definition, one row at a time: q [rows, q heads, dim], k and v [tokens, kv heads, dim]."""
    out = torch.empty_like(q)
    group = q.shape[1] // k.shape[1]
    for row in range(q.shape[0]):
        for head in range(q.shape[1]):
            seen = slice(0, start + row + 1)
            scores = k[seen, head // group] @ q[row, head] / q.shape[2] ** 0.5
            out[row, head] = torch.softmax(scores, 0) @ v[seen, head // group]
    return out.reshape(q.shape[0], -1)


def test_runs_are_maximal() -> None:
    assert runs_of([7, 8, 9, 3], 60, 16) == ((112, 48), (48, 12))
    assert runs_of([7, 8, 9, 3], 48, 16) == ((112, 48),)
    assert runs_of([5], 1, 16) == ((80, 1),)
    assert runs_of([3, 2, 1], 48, 16) == ((48, 16), (32, 16), (16, 16))


@pytest.mark.parametrize("is_contiguous", [True, False])
@pytest.mark.parametrize(
    ("start", "num_rows"), [(0, 1), (0, 40), (37, 1), (15, 2), (16, 33), (100, 200), (0, 300)]
)
def test_equals_dense(start: int, num_rows: int, is_contiguous: bool) -> None:
    torch.manual_seed(start + num_rows)
    end = start + num_rows
    block_ids = list(range(1, 1 + -(-end // 16)))
    if not is_contiguous:
        block_ids = Random(0).sample(range(1, NUM_BLOCKS), len(block_ids))
    attention = PagedAttention(torch.full(LAYOUT.pool_shape(NUM_BLOCKS), torch.nan), LAYOUT, NUM_HEADS)
    k, v = torch.randn(end, 2, 8), torch.randn(end, 2, 8)
    slots = torch.tensor([block_ids[p // 16] * 16 + p % 16 for p in range(end)])
    attention.write(1, slots, k, v)
    q = torch.randn(num_rows, NUM_HEADS, 8)
    out = attention.attend(1, q, [attention.span(0, num_rows, start, block_ids)])
    torch.testing.assert_close(out, dense(q, k, v, start), atol=1e-5, rtol=1e-5)
    assert attention.pool[0].isnan().all()


def test_spans_of_a_step_do_not_mix() -> None:
    torch.manual_seed(0)
    attention = PagedAttention(torch.full(LAYOUT.pool_shape(NUM_BLOCKS), torch.nan), LAYOUT, NUM_HEADS)
    sizes = [(0, 5, [1]), (20, 1, [4, 3]), (7, 30, [9, 10, 11])]
    spans, expected, queries = [], [], []
    first_row = 0
    for start, num_rows, block_ids in sizes:
        end = start + num_rows
        k, v, q = torch.randn(end, 2, 8), torch.randn(end, 2, 8), torch.randn(num_rows, NUM_HEADS, 8)
        slots = torch.tensor([block_ids[p // 16] * 16 + p % 16 for p in range(end)])
        attention.write(0, slots, k, v)
        spans.append(attention.span(first_row, num_rows, start, block_ids))
        expected.append(dense(q, k, v, start))
        queries.append(q)
        first_row += num_rows
    out = attention.attend(0, torch.cat(queries), spans)
    torch.testing.assert_close(out, torch.cat(expected), atol=1e-5, rtol=1e-5)

# SPDX-License-Identifier: Apache-2.0
"""Paged attention equals attention over one dense matrix for every order of the blocks in the pool.

Draws follow the requested distribution and depend on (seed, position) alone.
"""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from mooncake.errors import InvalidArgument
from mooncake.inference.request import Request, SamplingParams
from mooncake.inference.runner import PagedAttention, runs_of, sample, uniform
from mooncake.kvlayout import KvLayout

LAYOUT = KvLayout(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32", block_tokens=16)
NUM_HEADS = 6
NUM_BLOCKS = 40
ON_GPU = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="NOT RUN: torch has no CUDA device here; scripts/test-cuda runs it on one",
)


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


@ON_GPU
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("is_contiguous", [True, False])
@pytest.mark.parametrize(("start", "num_rows"), [(0, 1), (37, 1), (15, 2), (0, 300), (100, 200), (500, 130)])
def test_cuda_equals_dense(start: int, num_rows: int, is_contiguous: bool, dtype: str) -> None:
    torch.manual_seed(start + num_rows)
    layout = KvLayout(num_layers=1, num_kv_heads=2, head_dim=64, dtype=dtype, block_tokens=16)
    end, block_ids = start + num_rows, list(range(1, 1 + -(-(start + num_rows) // 16)))
    if not is_contiguous:
        block_ids = Random(0).sample(range(1, 60), len(block_ids))
    where: dict[str, Any] = {"dtype": getattr(torch, dtype), "device": "cuda"}
    attention = PagedAttention(torch.full(layout.pool_shape(60), torch.nan, **where), layout, NUM_HEADS)
    k, v = torch.randn(end, 2, 64, **where), torch.randn(end, 2, 64, **where)
    slots = torch.tensor([block_ids[p // 16] * 16 + p % 16 for p in range(end)], device="cuda")
    attention.write(0, slots, k, v)
    q = torch.randn(num_rows, NUM_HEADS, 64, **where)
    out = attention.attend(0, q, [attention.span(0, num_rows, start, block_ids)])
    expected = dense(q.double().cpu(), k.double().cpu(), v.double().cpu(), start)
    error = (out.double().cpu() - expected).norm() / expected.norm()
    assert error < {"float32": 1e-3, "float16": 2e-3, "bfloat16": 1e-2}[dtype]


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


@ON_GPU
def test_cuda_attends_to_single_rows_together() -> None:
    torch.manual_seed(0)
    layout = KvLayout(num_layers=1, num_kv_heads=2, head_dim=64, dtype="bfloat16", block_tokens=16)
    where: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    attention = PagedAttention(torch.full(layout.pool_shape(60), torch.nan, **where), layout, NUM_HEADS)
    spans, expected, queries = [], [], []
    first_row = 0
    for start, num_rows, block_ids in [
        (20, 1, [4, 3]),
        (7, 30, [9, 10, 11]),
        (0, 1, [1]),
        (90, 1, [*range(30, 36)]),
    ]:
        end = start + num_rows
        k, v = torch.randn(end, 2, 64, **where), torch.randn(end, 2, 64, **where)
        q = torch.randn(num_rows, NUM_HEADS, 64, **where)
        slots = torch.tensor([block_ids[p // 16] * 16 + p % 16 for p in range(end)], device="cuda")
        attention.write(0, slots, k, v)
        spans.append(attention.span(first_row, num_rows, start, block_ids))
        expected.append(dense(q.double().cpu(), k.double().cpu(), v.double().cpu(), start))
        queries.append(q)
        first_row += num_rows
    single = attention.single_rows(spans)
    assert single is not None and single.rows.tolist() == [0, 31, 32]
    out = attention.attend(0, torch.cat(queries), spans, single).double().cpu()
    for span, wanted in zip(spans, expected, strict=True):
        found = out[span.first_row : span.first_row + span.num_rows]
        assert (found - wanted).norm() / wanted.norm() < 1e-2


PROBABILITIES = [0.4, 0.3, 0.15, 0.1, 0.05]
LOGITS = torch.tensor(PROBABILITIES).log()
NUM_DRAWS = 3000


def draw(sampling: SamplingParams, position: int = 0, logits: torch.Tensor = LOGITS) -> int:
    request = Request("r", [0], sampling)
    request.token_ids += [0] * position
    return sample(logits.clone().unsqueeze(0), [request], (4,))[0][0]


def frequencies(**fields: float) -> list[float]:
    counts = Counter(
        draw(SamplingParams(max_tokens=NUM_DRAWS, seed=3, **fields), position)  # type: ignore[arg-type]
        for position in range(NUM_DRAWS)
    )
    return [counts[token] / NUM_DRAWS for token in range(5)]


def test_draws_are_counter_based() -> None:
    draws = [uniform(5, position) for position in range(100)]
    assert draws == [uniform(5, position) for position in range(100)]
    assert len(set(draws)) == 100 and all(0 <= value < 1 for value in draws)
    assert uniform(6, 0) != uniform(5, 0) != uniform(-5, 0)


def test_temperature_one_follows_the_distribution() -> None:
    assert frequencies() == pytest.approx(PROBABILITIES, abs=0.03)


def test_temperature_sharpens() -> None:
    weights = [p**2 for p in PROBABILITIES]
    assert frequencies(temperature=0.5) == pytest.approx([w / sum(weights) for w in weights], abs=0.03)


def test_top_k_keeps_the_likeliest() -> None:
    assert frequencies(top_k=2) == pytest.approx([4 / 7, 3 / 7, 0, 0, 0], abs=0.03)


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    assert frequencies(top_p=0.7) == pytest.approx([4 / 7, 3 / 7, 0, 0, 0], abs=0.03)
    assert frequencies(top_p=0.71) == pytest.approx([4 / 8.5, 3 / 8.5, 1.5 / 8.5, 0, 0], abs=0.03)
    assert frequencies(top_p=0.01)[0] == 1.0


def test_top_k_and_top_p_together() -> None:
    assert frequencies(top_k=3, top_p=0.8) == pytest.approx([4 / 7, 3 / 7, 0, 0, 0], abs=0.03)


def test_wide_nucleus_needs_the_whole_vocabulary() -> None:
    flat = torch.zeros(5000)
    sampling = SamplingParams(max_tokens=400, top_p=0.9, seed=1)
    assert len({draw(sampling, position, flat) for position in range(400)}) > 350


def test_zero_and_tiny_temperatures_take_the_likeliest() -> None:
    assert draw(SamplingParams(temperature=0)) == 0
    assert draw(SamplingParams(temperature=1e-9)) == 0


def test_ends_are_suppressed_before_min_tokens() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, 3.0, 9.0])
    early = SamplingParams(temperature=0, min_tokens=2, max_tokens=4, stop_token_ids=(3,))
    assert draw(early, 1, logits) == 2 and draw(early, 2, logits) == 4
    assert draw(SamplingParams(temperature=0, min_tokens=2, ignore_eos=True), 0, logits) == 4


def test_equal_seeds_agree_and_ids_differ() -> None:
    def answer(name: str, seed: int | None) -> list[int]:
        sampling = SamplingParams(max_tokens=30, seed=seed)
        request = Request(name, [0], sampling)
        for _ in range(30):
            request.token_ids += sample(LOGITS.clone().unsqueeze(0), [request], ())[0]
        return request.token_ids

    assert answer("a", 1) == answer("b", 1)
    assert answer("a", None) == answer("a", None) != answer("b", None)


def test_logprobs_are_those_before_temperature() -> None:
    request = Request("r", [0], SamplingParams(temperature=5.0, logprobs=2, seed=0))
    tokens, found = sample(LOGITS.clone().unsqueeze(0), [request], ())
    assert found[0] is not None
    assert found[0].token_id == tokens[0]
    assert found[0].logprob == pytest.approx(float(LOGITS[tokens[0]]), abs=1e-5)
    assert [token for token, _ in found[0].top] == [0, 1]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("min_tokens", 17),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("logprobs", 21),
        ("seed", 2**63),
    ],
)
def test_bad_parameters_name_the_field(field: str, value: float) -> None:
    with pytest.raises(InvalidArgument) as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert caught.value.field == field

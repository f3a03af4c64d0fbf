# SPDX-License-Identifier: Apache-2.0
"""Replayed layers compute what the layers compute. Tests with ``cuda`` in their name need a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mooncake.inference.layer_graphs import LayerGraphs
from mooncake.inference.weights import load_model
from tests.inference.conftest import Reference

ON_GPU = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="NOT RUN: torch has no CUDA device here; scripts/test-cuda runs it on one",
)


@ON_GPU
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("is_prepared", [True, False])
def test_cuda_graphs_equal_the_layers(reference: Reference, dtype: str, is_prepared: bool) -> None:
    decoder = load_model(reference.folder, dtype, "cuda")
    graphs = LayerGraphs(decoder)
    if is_prepared:
        graphs.prepare()
    seen: list[int] = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen.append(layer)
        mixed = q + (k + v).repeat_interleave(q.shape[1] // k.shape[1], 1)
        return mixed.reshape(q.shape[0], -1)

    torch.manual_seed(0)
    with torch.inference_mode():
        for num_rows in (1, 3, 8, 5, 64, 3):
            token_ids = torch.randint(0, 199, (num_rows,), device="cuda")
            positions = torch.randint(0, 400, (num_rows,), device="cuda")
            expected = decoder.forward_hidden(decoder.embed(token_ids), positions, attend)
            layers, seen[:] = list(seen), []
            found = graphs.forward_hidden(decoder.embed(token_ids), positions, attend)
            assert seen == layers
            error = (found - expected).float().norm() / expected.float().norm()
            assert error < {"float32": 1e-4, "bfloat16": 2e-2}[dtype]
            seen.clear()
            again = graphs.forward_hidden(decoder.embed(token_ids), positions, attend)
            assert torch.equal(found, again) and found.data_ptr() != again.data_ptr()
            seen.clear()

# SPDX-License-Identifier: Apache-2.0
"""Both forms of a weight give the same products: packed for the processor, and plain for other devices."""

from __future__ import annotations

import pytest
import torch

from mooncake.inference import model
from mooncake.inference.model import Linear, Rope
from mooncake.inference.weights import load_model
from tests.inference.conftest import Reference, prompt_of


@pytest.mark.parametrize("num_rows", [1, 2, 17, 130])
@pytest.mark.parametrize("has_bias", [True, False])
def test_packed_equals_plain(num_rows: int, has_bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(num_rows)
    weight, x = torch.randn(40, 48), torch.randn(num_rows, 48)
    bias = torch.randn(40) if has_bias else None
    with torch.inference_mode():
        expected = torch.nn.functional.linear(x, weight, bias)
        torch.testing.assert_close(Linear(weight, bias)(x), expected, atol=1e-4, rtol=1e-5)
        monkeypatch.setattr(model, "_can_pack", lambda dtype: False)
        torch.testing.assert_close(Linear(weight, bias)(x), expected, atol=0, rtol=0)


def test_logits_equal_transformers(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    """One pass over a whole prompt with dense attention, packed and plain."""
    prompt = torch.tensor(prompt_of(70))
    with torch.no_grad():
        expected = reference.model(prompt[None]).logits[0]

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (column.transpose(0, 1)[None] for column in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1).reshape(len(prompt), -1)

    for is_packed in (True, False):
        if not is_packed:
            monkeypatch.setattr(model, "_can_pack", lambda dtype: False)
        decoder = load_model(reference.folder)
        with torch.inference_mode():
            logits = decoder.logits(decoder.forward(prompt, torch.arange(len(prompt)), attend))
        torch.testing.assert_close(logits, expected, atol=2e-3, rtol=1e-3)


def test_linear_rope_divides_positions() -> None:
    plain, scaled = Rope(10000.0), Rope(10000.0, "linear", 4.0)
    torch.testing.assert_close(plain.inverse_frequencies(16) / 4, scaled.inverse_frequencies(16))


def test_llama3_rope_keeps_short_waves_and_stretches_long_ones() -> None:
    plain = Rope(500000.0).inverse_frequencies(128)
    scaled = Rope(500000.0, "llama3", 8.0, 1.0, 4.0, 8192).inverse_frequencies(128)
    assert scaled[0] == plain[0] and scaled[-1] == plain[-1] / 8
    assert ((scaled <= plain) & (scaled >= plain / 8)).all()

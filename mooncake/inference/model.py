# SPDX-License-Identifier: Apache-2.0
"""The decoder of the Llama and Qwen families, as plain functions over plain tensors.

It owns the arithmetic of one forward pass over a flat row of tokens that may belong to many
requests. It does not know requests, pages and caches: attention is a callback that receives the
rotated queries and keys of a layer. That is why the same code serves prefill, decode and tests.

On CPU, weights are packed once into oneDNN's blocked format: measured on a 2-core AVX-512 machine,
a packed float32 projection is 2 to 3 times faster than ``F.linear`` for one row and for 512.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from mooncake.kvlayout import KvLayout

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer of the model, q [rows, q heads, dim], k and v [rows, kv heads, dim]) -> [rows, q heads * dim]."""


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary embedding: the formula from positions to angles."""

    theta: float
    kind: str = "default"
    """``default``, ``linear`` (positions divided by factor) or ``llama3`` (low frequencies divided)."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192

    def inverse_frequencies(self, head_dim: int) -> Tensor:
        """float32 [head_dim / 2], radians per position."""
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        inverse = 1.0 / (self.theta**exponents)
        if self.kind == "linear":
            return inverse / self.factor
        if self.kind == "default":
            return inverse
        # Llama 3.1's published rule: wavelengths longer than the training context are stretched by
        # `factor`, short ones kept, those between blended.
        wavelengths = 2 * math.pi / inverse
        low, high = self.low_freq_factor, self.high_freq_factor
        blend = (self.original_max_positions / wavelengths - low) / (high - low)
        blended = (1 - blend) * inverse / self.factor + blend * inverse
        stretched = torch.where(
            wavelengths > self.original_max_positions / low, inverse / self.factor, blended
        )
        return torch.where(wavelengths < self.original_max_positions / high, inverse, stretched)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The fields of a ``config.json`` that matter here."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_positions: int
    rope: Rope
    has_tied_embeddings: bool
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    eos_token_ids: tuple[int, ...]

    def kv_layout(self, dtype: torch.dtype, block_tokens: int) -> KvLayout:
        name = str(dtype).removeprefix("torch.")
        return KvLayout(self.num_layers, self.num_kv_heads, self.head_dim, name, block_tokens)


class Linear:
    """y = x W^T + b, with the weight kept in whichever form this device multiplies fastest."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._bias = bias
        self._is_packed = weight.device.type == "cpu" and _can_pack(weight.dtype)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight) if self._is_packed else weight

    def __call__(self, x: Tensor) -> Tensor:
        if self._is_packed:
            packed: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
            return packed
        return F.linear(x, self._weight, self._bias)


class RmsNorm:
    """Root-mean-square normalisation over the last dimension, computed in float32."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight = weight
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        if x.is_cuda:
            # One kernel instead of six; it rounds once, behind the weight.
            if self._weight.dim() == 1:
                return F.rms_norm(x, self._weight.shape, self._weight, self._eps)
            return F.rms_norm(x, x.shape[-1:], None, self._eps).mul_(self._weight)
        if x.dtype == torch.float32:
            scale = x.pow(2).mean(-1, keepdim=True).add_(self._eps).rsqrt_()
            return (x * scale).mul_(self._weight)
        wide = x.float()
        scale = wide.pow(2).mean(-1, keepdim=True).add_(self._eps).rsqrt_()
        return wide.mul_(scale).to(x.dtype).mul_(self._weight)


class DecoderLayer:
    """One transformer block: attention and a gated MLP, each behind a norm and added to the stream."""

    def __init__(self, config: ModelConfig, layer: int, tensors: Mapping[str, Tensor]) -> None:
        at = f"model.layers.{layer}."

        def weights(*names: str) -> Tensor:
            return torch.cat([tensors[f"{at}{name}.weight"] for name in names])

        def biases(present: bool, *names: str) -> Tensor | None:
            return torch.cat([tensors[f"{at}{name}.bias"] for name in names]) if present else None

        qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        gate_up = ("mlp.gate_proj", "mlp.up_proj")
        self._config = config
        self._input_norm = RmsNorm(tensors[f"{at}input_layernorm.weight"], config.norm_eps)
        self._mlp_norm = RmsNorm(tensors[f"{at}post_attention_layernorm.weight"], config.norm_eps)
        self._qkv = Linear(weights(*qkv), biases(config.has_qkv_bias, *qkv))
        self._output = Linear(weights("self_attn.o_proj"), biases(config.has_output_bias, "self_attn.o_proj"))
        self._gate_up = Linear(weights(*gate_up), biases(config.has_mlp_bias, *gate_up))
        self._down = Linear(weights("mlp.down_proj"), biases(config.has_mlp_bias, "mlp.down_proj"))
        self._qk_norm = None
        if config.has_qk_norm:
            per_head = [tensors[f"{at}self_attn.q_norm.weight"]] * config.num_heads
            per_head += [tensors[f"{at}self_attn.k_norm.weight"]] * config.num_kv_heads
            self._qk_norm = RmsNorm(torch.stack(per_head), config.norm_eps)

    def queries(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated q [rows, q heads, dim] and k, and v [rows, kv heads, dim]."""
        config = self._config
        num_rotated = config.num_heads + config.num_kv_heads
        qkv = self._qkv(self._input_norm(hidden))
        qkv = qkv.view(hidden.shape[0], num_rotated + config.num_kv_heads, config.head_dim)
        qk, v = qkv[:, :num_rotated], qkv[:, num_rotated:]
        if self._qk_norm is not None:
            qk = self._qk_norm(qk)
        qk = torch.addcmul(qk * cos, torch.roll(qk, config.head_dim // 2, -1), sin)
        return qk[:, : config.num_heads], qk[:, config.num_heads :], v

    def behind_attention(self, hidden: Tensor, attended: Tensor) -> None:
        """Add the projection of ``attended`` [rows, q heads * dim] to ``hidden``, and then the MLP."""
        hidden.add_(self._output(attended))
        gate, up = self._gate_up(self._mlp_norm(hidden)).chunk(2, -1)
        hidden.add_(self._down(F.silu(gate).mul_(up)))


class Decoder:
    """Weights and arithmetic of one model, or of a range of its layers, on one device."""

    def __init__(
        self, config: ModelConfig, tensors: Mapping[str, Tensor], layers: range | None = None
    ) -> None:
        """``tensors`` by their Hugging Face names, on one device; ``weights.py`` checks them.

        One dtype too, but for the embedding, whose rows are converted when they are looked up. ``layers``:
        those of one stage of a pipeline. The first stage has the embedding, the last one the norm and head.
        """
        self.config = config
        self.layers = range(config.num_layers) if layers is None else layers
        norm = tensors["model.norm.weight"]
        self.dtype, self.device = norm.dtype, norm.device
        self._embedding: Tensor | None = None
        if self.is_first:
            self._embedding = tensors["model.embed_tokens.weight"]
        self._layers = [DecoderLayer(config, layer, tensors) for layer in self.layers]
        self._norm = RmsNorm(norm, config.norm_eps)
        self._head: Linear | None = None
        if self.is_last:
            if not config.has_tied_embeddings:
                head = tensors["lm_head.weight"]
            elif self._embedding is not None:
                head = self._embedding.to(self.dtype)
            else:
                head = tensors["model.embed_tokens.weight"].to(self.dtype)
            self._head = Linear(head)
        self._frequencies = config.rope.inverse_frequencies(config.head_dim).to(self.device)

    @property
    def is_first(self) -> bool:
        """Whether it has the embedding."""
        return self.layers.start == 0

    @property
    def is_last(self) -> bool:
        """Whether it has the final norm and the head."""
        return self.layers.stop == self.config.num_layers

    def kv_layout(self, block_tokens: int) -> KvLayout:
        """The layout of the KV blocks of its own layers."""
        whole = self.config.kv_layout(self.dtype, block_tokens)
        return dataclasses.replace(whole, num_layers=len(self.layers))

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Factors [rows, 1, dim] such that rotating x is ``x * cos + roll(x, dim / 2) * sin``.

        Computed for each step: a table for a long context would cost more memory than this costs time.
        """
        angles = torch.outer(positions.float(), self._frequencies)
        cos, sin = angles.cos(), angles.sin()
        cos, sin = torch.cat((cos, cos), -1).unsqueeze(1), torch.cat((-sin, sin), -1).unsqueeze(1)
        return cos.to(self.dtype), sin.to(self.dtype)

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states [rows, hidden] of int64 [rows] tokens at int64 [rows] positions."""
        return self.forward_hidden(self.embed(token_ids), positions, attend)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Hidden states [rows, hidden] before the first layer, of int64 [rows] tokens."""
        assert self._embedding is not None, "only the first stage has the embedding"
        return F.embedding(token_ids, self._embedding).to(self.dtype)

    def forward_hidden(self, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states behind its last layer; ``hidden``, those before its first one, is changed."""
        angles = self.angles(positions)
        for number, layer in enumerate(self.layers):
            attended = attend(layer, *self.queries(number, hidden, angles))
            self.behind_attention(number, hidden, attended)
        return hidden

    def queries(
        self, number: int, hidden: Tensor, angles: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q [rows, q heads, dim], k and v [rows, kv heads, dim] of its own layer ``number``, from 0."""
        return self._layers[number].queries(hidden, *angles)

    def behind_attention(self, number: int, hidden: Tensor, attended: Tensor) -> None:
        """Change ``hidden`` by its own layer ``number``, of which attention gave [rows, q heads * dim]."""
        self._layers[number].behind_attention(hidden, attended)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [rows, vocabulary] for the rows given: pass only those that need them."""
        assert self._head is not None, "only the last stage has the head"
        return self._head(self._norm(hidden)).float()


@functools.cache
def _can_pack(dtype: torch.dtype) -> bool:
    """Whether this torch, on this processor, multiplies with packed weights: tried, not guessed."""
    if dtype not in (torch.float32, torch.bfloat16):
        return False
    try:
        if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        packed = torch.ops.mkldnn._reorder_linear_weight(torch.ones(16, 16, dtype=dtype))
        product = torch.ops.mkldnn._linear_pointwise(
            torch.ones(1, 16, dtype=dtype), packed, None, "none", [], ""
        )
    except (AttributeError, RuntimeError):
        return False
    return bool((product == 16).all())

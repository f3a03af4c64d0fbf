# SPDX-License-Identifier: Apache-2.0
"""Doubles of SGLang's host pools: the same description of a page, in the same orders.

The comparison with the real pools is in ``tests/upstream_clients/real_clients.py``.
"""

from __future__ import annotations

import types
from typing import Any

import torch

LAYERS, TOKENS, HEADS, DIM, NUM_PAGES = 3, 4, 2, 64, 8


class MhaPool:
    """Keys and values of some heads; a page is contiguous in memory, or in pieces layer by layer."""

    def __init__(
        self,
        layout: str,
        seed: int,
        *,
        tokens: int = TOKENS,
        heads: int = HEADS,
        dtype: Any = torch.float32,
    ) -> None:
        self.layout, self.page_size, self.dtype = layout, tokens, dtype
        self.layer_num, self.head_num, self.head_dim, self.v_head_dim = LAYERS, heads, DIM, DIM
        self.start_layer, self.end_layer = 0, LAYERS
        row, size = (heads, DIM), NUM_PAGES * tokens
        dims = {
            "layer_first": (2, LAYERS, size, *row),
            "page_first": (2, size, LAYERS, *row),
            "page_head": (2, NUM_PAGES, heads, tokens, LAYERS, DIM),
        }[layout]
        self.kv_buffer = torch.randn(dims, generator=torch.Generator().manual_seed(seed)).to(dtype)

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        row_bytes = self.head_num * DIM * self.dtype.itemsize
        values = self.kv_buffer[0].numel() * self.dtype.itemsize
        layers = LAYERS if self.layout == "layer_first" else 1
        layer_stride = values // LAYERS
        first = [row_bytes * index * LAYERS // layers for index in indices.tolist()[:: self.page_size]]
        base = self.kv_buffer.data_ptr()
        pointers = [
            base + at + layer * layer_stride + part * values
            for at in first
            for layer in range(layers)
            for part in range(2)
        ]
        return pointers, [row_bytes * self.page_size * LAYERS // layers] * len(pointers)

    def get_split_heads_page_buffer_meta(
        self, indices: torch.Tensor, split_factor: int
    ) -> tuple[list[int], list[int]]:
        assert self.layout == "page_head"
        pointers, sizes = self.get_page_buffer_meta(indices)
        part = sizes[0] // split_factor
        pairs = [pointers[at : at + 2] for at in range(0, len(pointers), 2)]
        split = [one + head * part for pair in pairs for head in range(split_factor) for one in pair]
        return split, [part] * len(split)

    def page(self, number: int) -> torch.Tensor:
        """A copy, to compare."""
        start = number * self.page_size
        if self.layout == "layer_first":
            return self.kv_buffer[:, :, start : start + self.page_size].clone()
        if self.layout == "page_first":
            return self.kv_buffer[:, start : start + self.page_size].clone()
        return self.kv_buffer[:, number].clone()

    def get_data_page(self, index: int) -> torch.Tensor:
        return self.page(index // self.page_size).flatten()

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros_like(self.get_data_page(0))


class MlaPool(MhaPool):
    """Latents, the same on every rank; it has no heads."""

    def __init__(self, layout: str, seed: int) -> None:
        super().__init__(layout, seed)
        del self.head_num, self.head_dim, self.v_head_dim
        self.kv_cache_dim = HEADS * DIM
        self.kv_buffer = self.kv_buffer[0].clone()

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        row_bytes = self.kv_cache_dim * self.dtype.itemsize
        layers = LAYERS if self.layout == "layer_first" else 1
        layer_stride = self.kv_buffer.numel() * self.dtype.itemsize // LAYERS
        first = [row_bytes * index * LAYERS // layers for index in indices.tolist()[:: self.page_size]]
        base = self.kv_buffer.data_ptr()
        pointers = [base + at + layer * layer_stride for at in first for layer in range(layers)]
        return pointers, [row_bytes * self.page_size * LAYERS // layers] * len(pointers)

    def page(self, number: int) -> torch.Tensor:
        start = number * self.page_size
        dim = 1 if self.layout == "layer_first" else 0
        return self.kv_buffer.narrow(dim, start, self.page_size).clone()


def storage_config(**changes: Any) -> Any:
    """SGLang's ``HiCacheStorageConfig``."""
    fields: dict[str, Any] = dict.fromkeys(("tp_rank", "pp_rank", "attn_cp_rank", "dp_rank"), 0)
    fields |= dict.fromkeys(("tp_size", "pp_size", "attn_cp_size"), 1)
    fields |= dict.fromkeys(("is_mla_model", "enable_storage_metrics", "should_split_heads"), False)
    fields |= {"is_page_first_layout": True, "model_name": "model", "tp_lcm_size": None}
    return types.SimpleNamespace(**{**fields, **changes})


def tokens_of(pages: list[int], size: int = TOKENS) -> torch.Tensor:
    """Indices of the tokens of these pages."""
    return torch.cat([torch.arange(page * size, (page + 1) * size) for page in pages])

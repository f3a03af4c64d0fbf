# SPDX-License-Identifier: Apache-2.0
"""A step becomes tensors, tensors become tokens: the runner, paged attention in plain torch, and sampling.

``LayerRunner`` owns the translation of a step's rows into positions, slots and spans, for all layers of a
model or for those of one stage of a pipeline. ``TorchRunner`` owns the order of operations inside a layer:
write this step's keys, wait for the layer's loads, start its saves, attend. Neither knows why a chunk was
scheduled.

``PagedAttention`` owns the reading and writing of the pool for one step. A step's rows are one flat column;
each request owns a slice of it and a list of blocks. Blocks with consecutive ids are one contiguous matrix in
the pool, so a request whose blocks form one run is attended to in place, without a copy::

    blocks  7 8 9        runs (7*B, 2*B + n)               a view of the pool
    blocks  7 8 9 | 3    runs (7*B, 3*B) (3*B, n)          two pieces, copied together

Grouped queries are never expanded: in decode the query group becomes rows, in prefill ``enable_gqa`` does it
inside the kernel.

``sample`` owns every rule about choosing a token; it does not know how logits are computed. Randomness is
counter-based: the draw for position i of an answer depends on (seed, i) alone, so a request that is
preempted, or resumed on another worker, continues with the same draws.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import CausalBias, causal_lower_right

from mooncake.connectors.kv_link import AnyLink, KvLoad, KvSave
from mooncake.inference.layer_graphs import SIZES, LayerGraphs
from mooncake.inference.model import Decoder
from mooncake.inference.pipeline import ChunkRows
from mooncake.inference.request import Request
from mooncake.inference.scheduler import Chunk, Sampled, TokenLogprobs
from mooncake.kvlayout import KvLayout

try:
    from torch.nn.attention.varlen import varlen_attn

    HAS_VARLEN = True
except ImportError:  # before torch 2.10
    HAS_VARLEN = False

TILE_ROWS = 128
"""Prefill rows per kernel call: a tile skips the keys after its last row (30 % faster than one mask)."""

KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""All but cuDNN's, which torch prefers on recent GPUs and which builds a plan for each new shape: in decode,
where the number of keys grows with each token, that is a plan per step."""

LARGEST_GRAPH = SIZES[-1]
"""Most rows of a step, each of another request, that replays the layers' graphs on a GPU."""

SCRATCH_BLOCK = 0
"""Scratch block that no request owns: rows whose keys are already cached are written here and never read."""


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionSpan:
    """One request's part of a step: rows ``[first_row, first_row + num_rows)`` at ``start`` onwards."""

    first_row: int
    num_rows: int
    start: int
    """Position of the first row; it attends to itself and everything before."""
    runs: tuple[tuple[int, int], ...]
    """(first slot, tokens) of each contiguous piece of the request's keys, in order."""
    masks: tuple[Tensor | CausalBias, ...] = ()
    """One mask [rows, keys] per tile, shared by all layers; empty for a single row. bool tensors, or where a
    flash kernel runs, which skips the keys after a row by itself, one bias for all rows."""


@dataclasses.dataclass(frozen=True, slots=True)
class SingleRows:
    """The requests of a step with one row each, for one kernel call: on a GPU calls cost more than rows."""

    rows: Tensor
    """int64 [requests]: their rows of the step."""
    slots: Tensor
    """int64 [keys of all]: the slots of their keys, request after request."""
    row_ends: Tensor
    """int32 [requests + 1]: where the rows of each begin, a row for each query head of a group."""
    key_ends: Tensor
    """int32 [requests + 1]: where the keys of each begin."""
    most_keys: int


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
        self._has_flash = _has_flash(pool, layout.head_dim)
        flat = (-1, layout.num_kv_heads, layout.head_dim)
        self._keys = [pool[layer, 0].view(flat) for layer in range(layout.num_layers)]
        self._values = [pool[layer, 1].view(flat) for layer in range(layout.num_layers)]

    def span(self, first_row: int, num_rows: int, start: int, block_ids: Sequence[int]) -> AttentionSpan:
        """The plan of one request's rows, computed once for all layers."""
        runs = runs_of(block_ids, start + num_rows, self.layout.block_tokens)
        masks: list[Tensor | CausalBias] = []
        if num_rows > 1 and self._has_flash:
            masks.append(causal_lower_right(num_rows, start + num_rows))
        elif num_rows > 1:
            for row in range(0, num_rows, TILE_ROWS):
                rows = min(TILE_ROWS, num_rows - row)
                mask = torch.ones(rows, start + row + rows, dtype=torch.bool, device=self.pool.device)
                masks.append(mask.tril_(start + row))
        return AttentionSpan(first_row, num_rows, start, runs, tuple(masks))

    def single_rows(self, spans: Sequence[AttentionSpan]) -> SingleRows | None:
        """Those of ``spans`` with one row, if one kernel call can take them all, else None."""
        single = [span for span in spans if span.num_rows == 1]
        if not (self._has_flash and HAS_VARLEN) or len(single) < 2:
            return None
        device, counts = self.pool.device, [span.start + 1 for span in single]
        key_ends = [0, *itertools.accumulate(counts)]
        slots = [np.arange(first, first + count) for span in single for first, count in span.runs]
        return SingleRows(
            torch.tensor([span.first_row for span in single], device=device),
            torch.from_numpy(np.concatenate(slots)).to(device),
            torch.arange(0, (len(single) + 1) * self._group, self._group, dtype=torch.int32, device=device),
            torch.tensor(key_ends, dtype=torch.int32, device=device),
            max(counts),
        )

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Put k, v [rows, kv heads, dim] at int64 ``slots`` [rows] (block id * block_tokens + offset)."""
        self._keys[layer].index_copy_(0, slots, k)
        self._values[layer].index_copy_(0, slots, v)

    def attend(
        self, layer: int, q: Tensor, spans: Sequence[AttentionSpan], single: SingleRows | None = None
    ) -> Tensor:
        """Attention of q [rows, q heads, dim] over the pool: [rows, q heads * dim].

        ``single``: of the same spans.
        """
        keys, values = self._keys[layer], self._values[layer]
        if single is not None:
            out = q.new_empty(q.shape[0], q.shape[1] * q.shape[2])
            out[single.rows] = self._single_rows(q[single.rows], keys, values, single)
            for span in spans:
                if span.num_rows > 1:
                    its = slice(span.first_row, span.first_row + span.num_rows)
                    out[its] = self._many_rows(q[its], keys, values, span)
            return out
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
        return F.scaled_dot_product_attention(q, k, v).reshape(1, -1)

    def _single_rows(self, q: Tensor, keys: Tensor, values: Tensor, single: SingleRows) -> Tensor:
        # As in _one_row, the query heads of one kv head are rows over the same keys.
        heads, dim = self.layout.num_kv_heads, self.layout.head_dim
        q = q.reshape(-1, heads, self._group, dim).transpose(1, 2).reshape(-1, heads, dim)
        k, v = keys.index_select(0, single.slots), values.index_select(0, single.slots)
        out = varlen_attn(q, k, v, single.row_ends, single.key_ends, self._group, single.most_keys)
        assert isinstance(out, Tensor)
        return out.reshape(-1, self._group, heads, dim).transpose(1, 2).reshape(-1, heads * self._group * dim)

    def _many_rows(self, q: Tensor, keys: Tensor, values: Tensor, span: AttentionSpan) -> Tensor:
        # [1, heads, tokens, dim] views: the kernel takes strides, so nothing is transposed in memory
        k = _gather(keys, span.runs).transpose(0, 1).unsqueeze(0)
        v = _gather(values, span.runs).transpose(0, 1).unsqueeze(0)
        q = q.transpose(0, 1).unsqueeze(0)
        tiles, first_row = [], 0
        for mask in span.masks:
            rows, num_keys = (
                (mask.seq_len_q, mask.seq_len_kv) if isinstance(mask, CausalBias) else tuple(mask.shape)
            )
            tile = q[:, :, first_row : first_row + rows]
            first_row += rows
            seen_k, seen_v = k[:, :, :num_keys], v[:, :, :num_keys]
            out = F.scaled_dot_product_attention(tile, seen_k, seen_v, attn_mask=mask, enable_gqa=True)
            tiles.append(out.squeeze(0).transpose(0, 1).reshape(rows, -1))
        return tiles[0] if len(tiles) == 1 else torch.cat(tiles)


def _has_flash(pool: Tensor, head_dim: int) -> bool:
    """Whether torch's flash kernels take keys of this pool: their device, type and size."""
    if not pool.is_cuda or pool.dtype not in (torch.bfloat16, torch.float16):
        return False
    return torch.cuda.get_device_capability(pool.device) >= (8, 0) and head_dim % 8 == 0 and head_dim <= 256


def _gather(pool: Tensor, runs: Sequence[tuple[int, int]]) -> Tensor:
    pieces = [pool[first : first + count] for first, count in runs]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def new_pool(model: Decoder, block_tokens: int, size_bytes: int) -> Tensor:
    """Memory for the KV blocks of ``model``.

    Not zeroed: a slot is written before it is read, and untouched pages cost no memory.
    """
    layout = model.kv_layout(block_tokens)
    shape = layout.pool_shape(max(2, size_bytes // layout.pool_bytes(1)))
    return torch.empty(shape, dtype=model.dtype, device=model.device)


def rows_of(chunks: Sequence[Chunk], block_tokens: int) -> list[ChunkRows]:
    """The rows of a step, without what only the scheduler knows of their requests."""
    return [
        ChunkRows(
            chunk.start,
            chunk.num_tokens,
            chunk.num_cached,
            chunk.samples,
            chunk.request.block_ids[: -(-chunk.end // block_tokens)],
        )
        for chunk in chunks
    ]


class LayerRunner:
    """The layers of one decoder over the KV pool of these layers."""

    def __init__(self, model: Decoder, pool: Tensor) -> None:
        """``pool``: as ``new_pool`` makes it."""
        self.layout = model.kv_layout(pool.shape[3])
        self.model = model
        self._attention = PagedAttention(pool, self.layout, model.config.num_heads)
        self._graphs = LayerGraphs(model) if model.device.type == "cuda" else None
        if self._graphs is not None:
            self._graphs.prepare()  # before the first steps are measured

    def forward(
        self, rows: Sequence[ChunkRows], hidden: Tensor, before_attention: Callable[[int], None]
    ) -> Tensor:
        """Hidden states [rows, hidden] behind the last layer of those before the first one.

        ``hidden`` is changed. ``before_attention(layer)`` is called when the step's keys of a layer of the
        model are in the pool.
        """
        attention, first_layer = self._attention, self.model.layers.start
        first_rows = itertools.accumulate((one.num_tokens for one in rows), initial=0)
        spans = [
            attention.span(row, one.num_tokens, one.start, one.block_ids)
            for row, one in zip(first_rows, rows, strict=False)
        ]
        single = attention.single_rows(spans)
        slots = self._column([slot for one in rows for slot in self._slots(one)])

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            attention.write(layer - first_layer, slots, k, v)
            before_attention(layer)
            return attention.attend(layer - first_layer, q, spans, single)

        positions = self._column([position for one in rows for position in range(one.start, one.end)])
        with sdpa_kernel(KERNELS):
            if self._graphs is not None and len(rows) == hidden.shape[0] <= LARGEST_GRAPH:
                if self._graphs.model is not self.model:  # its weights were replaced
                    self._graphs = LayerGraphs(self.model)
                return self._graphs.forward_hidden(hidden, positions, attend)
            return self.model.forward_hidden(hidden, positions, attend)

    def embed(self, chunks: Sequence[Chunk]) -> Tensor:
        """Hidden states [rows, hidden] of a step before the first layer."""
        token_ids = [token for c in chunks for token in c.request.token_ids[c.start : c.end]]
        return self.model.embed(self._column(token_ids))

    def logits(self, rows: Sequence[ChunkRows], hidden: Tensor) -> Tensor:
        """float32 logits [rows that sample, vocabulary], in order, of hidden states behind the last layer."""
        ends = itertools.accumulate(one.num_tokens for one in rows)
        sampled = [end - 1 for end, one in zip(ends, rows, strict=True) if one.samples]
        # A step of unfinished prompts has no row to multiply with the vocabulary.
        if not sampled:
            return torch.empty(0, self.model.config.vocab_size)
        if len(sampled) != hidden.shape[0]:
            hidden = hidden[self._column(sampled)]
        return self.model.logits(hidden)

    def _slots(self, rows: ChunkRows) -> list[int]:
        """The slot of each row's keys; cached positions get the scratch block."""
        size, block_ids = self.layout.block_tokens, rows.block_ids
        return [
            block_ids[position // size] * size + position % size
            if position >= rows.num_cached
            else SCRATCH_BLOCK * size
            for position in range(rows.start, rows.end)
        ]

    def _column(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.model.device)


class TorchRunner:
    """Runs steps of one decoder over one KV pool."""

    def __init__(self, model: Decoder, pool: Tensor, link: AnyLink | None = None) -> None:
        """``pool``: as ``new_pool`` makes it."""
        config = model.config
        self._layers = LayerRunner(model, pool)
        self.layout = self._layers.layout
        self.num_blocks = pool.shape[2]
        self.vocab_size = config.vocab_size
        self.max_positions = config.max_positions
        self.eos_token_ids = config.eos_token_ids
        self.pool = pool
        self._link = link

    def replace_model(self, model: Decoder) -> None:
        """Compute with other weights from the next step on; shapes, type and device are the same."""
        assert model.config.kv_layout(model.dtype, self.layout.block_tokens) == self.layout
        assert model.config.vocab_size == self.vocab_size and model.device == self._layers.model.device
        self._layers.model = model
        self.eos_token_ids = model.config.eos_token_ids

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
        rows, link = rows_of(chunks, self.layout.block_tokens), self._link

        def before_attention(layer: int) -> None:
            if link is not None:
                if loads:
                    link.wait_layer(loads, layer)
                for save in saves:
                    link.save_layer(save, layer)

        hidden = self._layers.forward(rows, self._layers.embed(chunks), before_attention)
        return self._layers.logits(rows, hidden)


NUCLEUS_CANDIDATES = 1024
"""A nucleus almost always has at most this many tokens; otherwise the whole vocabulary is sorted."""


def sample(logits: Tensor, requests: Sequence[Request], eos_token_ids: Sequence[int]) -> Sampled:
    """One token for each row of float32 ``logits`` [rows, vocabulary]; changes ``logits``."""
    logprobs = [_logprobs_of(row, request) for row, request in zip(logits, requests, strict=True)]
    for row, request in zip(logits, requests, strict=True):
        if request.num_output_tokens < request.sampling.min_tokens:
            forbidden = list(request.sampling.stop_token_ids)
            forbidden += [] if request.sampling.ignore_eos else eos_token_ids
            row[forbidden] = -torch.inf
    tokens: list[int] = logits.argmax(-1).tolist()
    for index, request in enumerate(requests):
        if request.sampling.temperature > 0:
            tokens[index] = _draw(logits[index], request)
    found: list[TokenLogprobs | None] = []
    for token, request, row_logprobs in zip(tokens, requests, logprobs, strict=True):
        if row_logprobs is None:
            found.append(None)
            continue
        best, ids = row_logprobs.topk(request.sampling.logprobs or 0)
        top = tuple(zip(ids.tolist(), best.tolist(), strict=True))
        found.append(TokenLogprobs(token, float(row_logprobs[token]), top))
    return tokens, found


def uniform(seed: int, position: int) -> float:
    """The draw in [0, 1) for ``position`` of an answer with ``seed``."""
    counter = seed.to_bytes(8, "little", signed=True) + position.to_bytes(8, "little")
    return int.from_bytes(hashlib.sha256(counter).digest()[:7], "little") / (1 << 56)


def _logprobs_of(row: Tensor, request: Request) -> Tensor | None:
    return None if request.sampling.logprobs is None else torch.log_softmax(row, -1)


def _draw(row: Tensor, request: Request) -> int:
    """Invert the cumulative distribution of one row at the request's draw."""
    sampling = request.sampling
    # Below this temperature the scaled logits overflow; the limit is the most likely token.
    if sampling.temperature < 1e-5:
        return int(row.argmax())
    point = uniform(request.sampling_seed, request.num_output_tokens)
    scaled = row / sampling.temperature
    ids: Tensor | None = None
    if 0 < sampling.top_k < scaled.shape[0]:
        scaled, ids = scaled.topk(sampling.top_k)
    probabilities = torch.softmax(scaled, -1, dtype=torch.float64)
    if sampling.top_p < 1:
        if ids is None:
            probabilities, ids = _most_likely(probabilities, sampling.top_p)
        before = probabilities.cumsum(-1) - probabilities
        probabilities = probabilities[before < sampling.top_p]
    cumulative = probabilities.cumsum(-1)
    index = int(torch.searchsorted(cumulative, point * cumulative[-1], right=True))
    index = min(index, cumulative.shape[0] - 1)
    return int(ids[index]) if ids is not None else index


def _most_likely(probabilities: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """The likeliest tokens, best first: enough of them to hold ``top_p``."""
    size = probabilities.shape[0]
    best, ids = probabilities.topk(min(NUCLEUS_CANDIDATES, size))
    if float(best.sum()) < top_p and best.shape[0] < size:
        best, ids = probabilities.sort(descending=True)
    return best, ids

# SPDX-License-Identifier: Apache-2.0
"""Logits to tokens.

It owns every rule about choosing a token; it does not know how logits are computed. Randomness is
counter-based: the draw for position i of an answer depends on (seed, i) alone, so a request that is
preempted, or resumed on another worker, continues with the same draws.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from mooncake.inference.request import Request
from mooncake.inference.step import Sampled, TokenLogprobs

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

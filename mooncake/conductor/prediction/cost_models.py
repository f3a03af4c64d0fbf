# SPDX-License-Identifier: Apache-2.0
"""How long work takes: the formulas for a prefill, a step of decode and a transfer.

They are the one place where tokens become seconds; the conductor predicts with them, the simulator computes
with them. The forms are physics, not fits: attention makes a prompt's cost grow with the square of its
length, a step of decode reads all weights once and every request's KV once.
"""

from __future__ import annotations

import msgspec


class PrefillModel(msgspec.Struct, frozen=True):
    """Time to compute the prompt tokens [first, end) when the KV of those before is there."""

    c0: float
    "Seconds per prefill, whatever its length."
    c1: float
    "Seconds per token."
    c2: float
    "Seconds per pair of tokens that attend to each other, counted twice."

    def seconds(self, first: float, end: float) -> float:
        return self.c0 + self.c1 * (end - first) + self.c2 * (end * end - first * first)


class DecodeModel(msgspec.Struct, frozen=True):
    """Time of one step, which makes a token for every request of a batch."""

    base_s: float
    per_request_s: float
    per_token_s: float
    "Seconds per context token of all requests together."

    def seconds(self, batch_size: float, context_tokens: float) -> float:
        return self.base_s + self.per_request_s * batch_size + self.per_token_s * context_tokens


class LinkModel(msgspec.Struct, frozen=True):
    """Time to move bytes from one instance to another."""

    latency_s: float
    bytes_per_s: float

    def seconds(self, size_bytes: float) -> float:
        return self.latency_s + size_bytes / self.bytes_per_s


class CostModels(msgspec.Struct, frozen=True):
    """Estimates for every instance before anything was measured."""

    prefill: PrefillModel = PrefillModel(0.01, 1e-4, 1e-9)
    decode: DecodeModel = DecodeModel(0.02, 1e-4, 2e-8)
    link: LinkModel = LinkModel(1e-3, 1e10)
    kv_bytes_per_token: int = 131_072
    num_layers: int = 32
    "Layers of the model: a prompt's KV is loaded layer by layer while others are computed."
    ssd: LinkModel = LinkModel(1e-4, 3e9)
    "Reads of blocks from an instance's own SSD."

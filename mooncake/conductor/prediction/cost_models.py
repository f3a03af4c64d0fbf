"""How long work takes: the formulas for a prefill, a step of decode and a transfer.

They are the one place where tokens become seconds; the conductor predicts with them, the simulator computes
with them. The forms are physics, not fits: attention makes a prompt's cost grow with the square of its
length, a step of decode reads all weights once and every request's KV once.
"""

from __future__ import annotations

import msgspec


class PrefillModel(msgspec.Struct, frozen=True):
    """Computing the prompt tokens [first, end) when those before are there."""

    c0: float
    "Seconds a prefill costs whatever its length."
    c1: float
    "Seconds a token."
    c2: float
    "Seconds a pair of tokens that attend to each other, twice counted."

    def seconds(self, first: float, end: float) -> float:
        return self.c0 + self.c1 * (end - first) + self.c2 * (end * end - first * first)


class DecodeModel(msgspec.Struct, frozen=True):
    """One step: a token for every request of a batch."""

    base_s: float
    per_request_s: float
    per_token_s: float
    "Of the context of all requests together."

    def seconds(self, batch_size: float, context_tokens: float) -> float:
        return self.base_s + self.per_request_s * batch_size + self.per_token_s * context_tokens


class LinkModel(msgspec.Struct, frozen=True):
    """Moving bytes from one instance to another."""

    latency_s: float
    bytes_per_s: float

    def seconds(self, size_bytes: float) -> float:
        return self.latency_s + size_bytes / self.bytes_per_s


class CostModels(msgspec.Struct, frozen=True):
    """What is believed of every instance before anything was measured."""

    prefill: PrefillModel = PrefillModel(0.01, 1e-4, 1e-9)
    decode: DecodeModel = DecodeModel(0.02, 1e-4, 2e-8)
    link: LinkModel = LinkModel(1e-3, 1e10)
    kv_bytes_per_token: int = 131_072
    num_layers: int = 32
    "A prompt's KV is loaded layer by layer while others are computed."
    ssd: LinkModel = LinkModel(1e-4, 3e9)
    "Reading blocks from an instance's own SSD."

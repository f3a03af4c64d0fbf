# SPDX-License-Identifier: Apache-2.0
"""Chained block hashes of tokens; the only module that hashes a prefix.

A block hash names a *whole prefix*: it is SHA-256 over the parent's hash and the block's tokens, so
two prompts share a hash exactly when they share every token up to there, the salt and the adapter.
Conductor, inference and connectors must agree bit for bit, so all of them import this module. What makes
the bytes of a block valid (weights, dtype, layout) is not in here but in ``kvlayout.KvIdentity``: the
conductor routes by prefix alone and does not know how a worker lays out its cache.

SHA-256 rather than a fast hash: a collision would silently give one tenant another's tokens, and a
128k-token prompt costs under 10 ms.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

BlockHash = bytes
"""32 bytes naming a prefix that ends at a block boundary (or at a partial tail)."""

BlockKey = int
"""The first 64 bits of a block's hash, enough for the conductor: a hint may be wrong once in 2**64."""

_VERSION = b"mooncake-prefix-1"


def root_hash(salt: str = "", adapter: str = "") -> BlockHash:
    """The parent of every first block. ``salt`` separates tenants, ``adapter`` names a LoRA."""
    parts = [part.encode() for part in (salt, adapter)]
    framed = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
    return hashlib.sha256(_VERSION + framed).digest()


def short_key(block_hash: BlockHash) -> BlockKey:
    """The key of a block where only hints are kept."""
    return int.from_bytes(block_hash[:8], "little")


def extend(parent: BlockHash, tokens: Sequence[int]) -> BlockHash:
    """The hash of the prefix ``parent`` followed by ``tokens`` (ids below 2**32)."""
    return hashlib.sha256(parent + array("I", tokens).tobytes()).digest()


def block_hashes(
    tokens: Sequence[int],
    block_tokens: int,
    root: BlockHash,
    include_partial: bool = False,
) -> list[BlockHash]:
    """One hash per full block of ``block_tokens`` tokens, in order, chained from ``root``.

    With ``include_partial`` a last, shorter block gets a hash of its own; it equals the hash of no
    full block, because the number of tokens differs.
    """
    column = array("I", tokens)
    end = len(column) if include_partial else len(column) - len(column) % block_tokens
    hashes: list[BlockHash] = []
    parent = root
    for start in range(0, end, block_tokens):
        parent = hashlib.sha256(parent + column[start : start + block_tokens].tobytes()).digest()
        hashes.append(parent)
    return hashes

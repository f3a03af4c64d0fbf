# SPDX-License-Identifier: Apache-2.0
"""The block hashes that routers and stores of this ecosystem agree on: XXH3-64, chained.

The hash of a block's tokens (as little-endian u32) is its local hash; the first block's local hash names it,
and each further block is named by the hash of its predecessor's name and its own local hash (both as
little-endian u64). A seed is part of every hash, so all parties that compare names must use the same one. Our
own workers name blocks by SHA-256 (``mooncake.prefix``), because there a collision gives wrong tokens; here
it gives only a wrong hint.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from xxhash import xxh3_64_intdigest

from mooncake.prefix import BlockKey


def extend_sequence(parent: BlockKey | None, tokens: Sequence[int], seed: int) -> BlockKey:
    """The name of the block with ``tokens`` that follows ``parent`` (None: it is a prompt's first)."""
    local = xxh3_64_intdigest(np.asarray(tokens, "<u4").tobytes(), seed)
    if parent is None:
        return local
    return xxh3_64_intdigest(parent.to_bytes(8, "little") + local.to_bytes(8, "little"), seed)


def sequence_hashes(tokens: Sequence[int], block_tokens: int, seed: int) -> list[BlockKey]:
    """The names of all full blocks of a prompt, in order."""
    names: list[BlockKey] = []
    parent = None
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        parent = extend_sequence(parent, tokens[start : start + block_tokens], seed)
        names.append(parent)
    return names

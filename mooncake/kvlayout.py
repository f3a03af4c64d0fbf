# SPDX-License-Identifier: Apache-2.0
"""Where the keys and values of a token lie in memory; the only place that knows KV tensor shapes.

A worker's paged pool is one tensor ``[layer][k|v][block][token][head][dim]``. A KV *object* in the
store is one block: ``[layer][k|v][token][head][dim]``, without the tokens a partial tail lacks::

    pool    layer 0: K K K K ... (one slab per block)  V V V V ...   layer 1: K K ...
    object  layer 0: K V   layer 1: K V   ...          one slab = one checksummed chunk

K and V of a layer are separate runs of blocks in the pool so that blocks with consecutive ids are
one contiguous K and one contiguous V matrix, which attention can use without gathering.

Other engines are described by ``SlabLayout`` and ``ForeignIdentity``: the number of pieces of a block in a
layer and their length, but not their content, which only the engine knows.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from mooncake.errors import InvalidArgument
from mooncake.prefix import BlockHash
from mooncake.types import ObjectKey

KEY_PREFIX = "kv/"
"""Beginning of the store's key of every block; the digest of its identity follows, then its hash."""

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
Column = npt.NDArray[np.uint64]


@dataclasses.dataclass(frozen=True)
class KvLayout:
    """Shape of the KV cache of one model on one worker."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    block_tokens: int

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise InvalidArgument("dtype", self.dtype, ", ".join(ITEM_BYTES))
        for field in ("num_layers", "num_kv_heads", "head_dim", "block_tokens"):
            if getattr(self, field) < 1:
                raise InvalidArgument(field, getattr(self, field), "at least 1")

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of one token's keys (or values) in one layer."""
        return self.num_kv_heads * self.head_dim * ITEM_BYTES[self.dtype]

    @property
    def num_slabs(self) -> int:
        """Pieces of a block in one layer: its keys and its values."""
        return 2

    @property
    def num_chunks(self) -> int:
        """Chunks (and checksums) of one object: keys and values of every layer."""
        return self.num_slabs * self.num_layers

    def chunk_bytes(self, num_tokens: int) -> int:
        """Bytes of one chunk of an object that holds ``num_tokens`` tokens."""
        assert 0 < num_tokens <= self.block_tokens, num_tokens
        return num_tokens * self.token_bytes

    def object_bytes(self, num_tokens: int) -> int:
        """Bytes of an object that holds ``num_tokens`` tokens."""
        return self.num_chunks * self.chunk_bytes(num_tokens)

    def pool_shape(self, num_blocks: int) -> tuple[int, int, int, int, int, int]:
        """(layers, 2, blocks, tokens, heads, dim)."""
        return (self.num_layers, 2, num_blocks, self.block_tokens, self.num_kv_heads, self.head_dim)

    def pool_bytes(self, num_blocks: int) -> int:
        return num_blocks * self.object_bytes(self.block_tokens)

    def pool_addresses(self, base: int, num_blocks: int, layer: int, block_ids: Sequence[int]) -> Column:
        """Addresses of the slabs of ``block_ids`` in ``layer``: u64 [2 * n], K then V of each block.

        ``base`` is the address of a pool of ``num_blocks`` blocks.
        """
        slab = self.chunk_bytes(self.block_tokens)
        first = base + layer * 2 * num_blocks * slab
        ids = np.asarray(block_ids, dtype=np.uint64)
        column = np.empty((len(ids), 2), dtype=np.uint64)
        column[:, 0] = np.uint64(first) + ids * np.uint64(slab)
        column[:, 1] = column[:, 0] + np.uint64(num_blocks * slab)
        return column.reshape(-1)

    def object_offsets(self, layer: int, num_tokens: int) -> tuple[int, int]:
        """Offsets of the keys and of the values of ``layer`` in an object of ``num_tokens`` tokens."""
        chunk = self.chunk_bytes(num_tokens)
        return 2 * layer * chunk, (2 * layer + 1) * chunk


@dataclasses.dataclass(frozen=True)
class KvIdentity:
    """Everything that must be equal for two workers to read each other's blocks.

    A block hash identifies *which tokens*; the identity *whose numbers*. Both are in the object's
    key, so a block of other weights, dtype or layout can't be found, let alone loaded.
    """

    weights: str
    """Digest of the weights."""
    tokenizer: str
    """Digest of the tokenizer."""
    layout: KvLayout

    @cached_property
    def digest(self) -> str:
        """16 hex digits."""
        text = repr(("kv-1", self.weights, self.tokenizer, dataclasses.astuple(self.layout)))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def key(self, block_hash: BlockHash) -> ObjectKey:
        """The store's key for the block that ends the prefix ``block_hash``."""
        return f"{KEY_PREFIX}{self.digest}/{block_hash.hex()}"


@dataclasses.dataclass(frozen=True)
class SlabLayout:
    """The KV cache of an engine whose blocks are moved whole, because only the engine knows their content.

    A block is ``num_slabs`` pieces of ``slab_bytes`` in each layer; an object is all of them, layer by
    layer. There are no partial blocks: a packed slab can't be cut.
    """

    num_layers: int
    num_slabs: int
    slab_bytes: int
    block_tokens: int

    def __post_init__(self) -> None:
        for field in ("num_layers", "num_slabs", "slab_bytes", "block_tokens"):
            if getattr(self, field) < 1:
                raise InvalidArgument(field, getattr(self, field), "at least 1")

    def chunk_bytes(self, num_tokens: int) -> int:
        """Bytes of one chunk of an object."""
        assert num_tokens == self.block_tokens, num_tokens
        return self.slab_bytes

    def object_bytes(self, num_tokens: int) -> int:
        """Bytes of an object."""
        return self.num_layers * self.num_slabs * self.chunk_bytes(num_tokens)

    def object_offsets(self, layer: int, num_tokens: int) -> tuple[int, ...]:
        """Offsets of the slabs of ``layer`` in an object."""
        chunk = self.chunk_bytes(num_tokens)
        return tuple((layer * self.num_slabs + slab) * chunk for slab in range(self.num_slabs))


@dataclasses.dataclass(frozen=True)
class ForeignIdentity:
    """Everything that must be equal for two engines of another kind to read each other's blocks.

    ``KvIdentity`` is the same for our own worker. In another engine more facts determine what the bytes of
    a block mean: its name and version, the attention backend, how that packs a block, which part of the
    heads and layers is meant. The connector of the engine lists them; any difference is a miss.
    """

    facts: tuple[tuple[str, str], ...]
    """Pairs of name and value, sorted by name."""
    layout: SlabLayout

    @classmethod
    def of(cls, layout: SlabLayout, **facts: object) -> ForeignIdentity:
        return cls(tuple(sorted((name, str(value)) for name, value in facts.items())), layout)

    @cached_property
    def digest(self) -> str:
        """16 hex digits."""
        text = repr(("kv-foreign-1", self.facts, dataclasses.astuple(self.layout)))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def key(self, block_hash: BlockHash) -> ObjectKey:
        """The store's key for the block that ends the prefix ``block_hash``."""
        return foreign_key(self.digest, block_hash)


def foreign_key(digest: str, block_hash: BlockHash) -> ObjectKey:
    """The store's key for a block, by the ``ForeignIdentity.digest`` of its engine."""
    return f"{KEY_PREFIX}{digest}/{block_hash.hex()}"

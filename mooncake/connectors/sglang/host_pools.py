# SPDX-License-Identifier: Apache-2.0
"""SGLang's host pools: the addresses of a page's pieces, and the page's key in the store.

A pool describes a page by ``get_page_buffer_meta`` (pointers and sizes, in the order of its layout); the
pieces are used in that order, so pools of any layout can be moved, and the layout is in the key.
It also owns SGLang's rules for pages of several pools that belong together. Nothing here is imported from
SGLang or torch; it uses the objects it is given.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from mooncake.connectors.pages import Page, Span, num_leading
from mooncake.connectors.sglang.cache_identity import shard_facts
from mooncake.kvlayout import ForeignIdentity, SlabLayout, foreign_key
from mooncake.log import get_logger
from mooncake.transfer.memory import span_of
from mooncake.types import ObjectKey

log = get_logger(__name__)

KV = "kv"
SHAPE = (
    *("layout", "dtype", "layer_num", "start_layer", "end_layer", "head_dim", "v_head_dim", "kv_cache_dim"),
    *("storage_format_tag", "conv_dtype", "temporal_dtype"),
)
"""Attributes of a pool that describe its page layout; not every pool has each."""


class Indices(Protocol):
    """Indices of a pool's tokens: a tensor on the host."""

    def __getitem__(self, index: Any) -> Any: ...


def name_of(page: str) -> bytes:
    """The bytes of a page's hash, which SGLang writes in hexadecimal; for any other name, its hash."""
    try:
        return bytes.fromhex(page)
    except ValueError:
        return hashlib.sha256(page.encode()).digest()


def buffers_of(pool: Any) -> list[Span]:
    """The memory of a pool."""
    if hasattr(pool, "get_hybrid_pool_buffer"):
        tensors = list(pool.get_hybrid_pool_buffer())
    else:
        buffer = getattr(pool, "kv_buffer", None)
        tensors = list(buffer) if isinstance(buffer, (list, tuple)) else [buffer]
    return [_span(tensor) for tensor in tensors if tensor is not None and tensor.numel()]


def _span(tensor: Any) -> Span:
    address, size_bytes, _ = span_of(tensor)
    return address, size_bytes


class HostPool:
    """One pool, and the identity of its pages.

    Args:
        indices: those of the tokens of one page, to read the layout of pages from the pool.
        is_flat: whether SGLang moves pages in copies, in one piece each, instead of in place.
    """

    def __init__(
        self,
        name: str,
        pool: Any,
        indices: Any,
        config: Any,
        facts: Mapping[str, object],
        is_flat: bool = False,
    ) -> None:
        self._pool = pool
        self._is_split = bool(config.should_split_heads) and name == KV and not is_flat
        self.num_shards = config.tp_lcm_size // config.tp_size if self._is_split else 1
        if is_flat:
            sizes = [_span(pool.get_dummy_flat_data_page())[1]]
        else:
            sizes = [size for _, size in self._spans(indices, 1)[0]]
        num_heads = getattr(pool, "head_num", None)
        # Latent pages are the same on all ranks, and one rank writes them; states and heads differ by rank.
        is_replicated = bool(config.is_mla_model) and num_heads is None and name != "mamba"
        shape = {f"pool_{word}": getattr(pool, word, None) for word in SHAPE}
        layout = SlabLayout(1, len(sizes), sizes[0], len(indices))
        identities = [
            ForeignIdentity.of(
                layout,
                pool=name,
                kind=type(pool).__name__,
                sizes=sizes,
                is_flat=is_flat,
                num_heads=num_heads // self.num_shards if num_heads else None,
                **shape,
                **shard_facts(config, is_replicated, number, self.num_shards),
                **facts,
            )
            for number in range(self.num_shards)
        ]
        self.digests = [identity.digest for identity in identities]
        log.info("pool_registered", pool=name, page_bytes=sum(sizes), shards=",".join(self.digests))

    def keys(self, pages: Sequence[str]) -> list[ObjectKey]:
        """Keys of every shard of every page."""
        return [foreign_key(digest, name_of(page)) for page in pages for digest in self.digests]

    def pages(self, names: Sequence[str], indices: Indices, before: Sequence[str] | None) -> list[Page]:
        """Every shard of every page, with its memory; ``before``: the pages before them, if known."""
        return self._chained(names, self._spans(indices, len(names)), before)

    def flat_pages(self, names: Sequence[str], tensors: Sequence[Any]) -> list[Page]:
        """Pages in SGLang's copies, in one piece each."""
        spans = [[_span(tensor)] for tensor in tensors]
        return self._chained(names, spans, None)

    def whole(self, flags: Sequence[bool]) -> list[bool]:
        """Per page: whether the flags of all its shards are true."""
        return [all(flags[at : at + self.num_shards]) for at in range(0, len(flags), self.num_shards)]

    def _chained(
        self, names: Sequence[str], spans: Sequence[Sequence[Span]], before: Sequence[str] | None
    ) -> list[Page]:
        keys = self.keys(names)
        parents = self.keys(before[-1:]) if before else [""] * self.num_shards
        parents += keys[: len(keys) - self.num_shards]
        return [Page(*one) for one in zip(keys, spans, parents, strict=True)]

    def _spans(self, indices: Any, num_pages: int) -> list[list[Span]]:
        if self._is_split:
            meta = self._pool.get_split_heads_page_buffer_meta(indices, self.num_shards)
        else:
            meta = self._pool.get_page_buffer_meta(indices)
        spans = [(int(pointer), int(size)) for pointer, size in zip(*meta, strict=True)]
        num_spans, rest = divmod(len(spans), num_pages * self.num_shards)
        assert num_spans and not rest, "each page has equally many pieces"
        return [spans[at : at + num_spans] for at in range(0, len(spans), num_spans)]


def usable_prefixes(flags: Sequence[bool], policy: str, num_trailing: int) -> list[int] | None:
    """Lengths at which a prefix can end, for a pool that has pages ``flags``; None: the pool is irrelevant.

    ``policy`` is SGLang's ``PoolHitPolicy``: every page is needed, or the last ``num_trailing``.
    """
    if policy == "all_pages":
        return list(range(1, num_leading(flags) + 1))
    if policy == "trailing_pages":
        num_trailing = max(1, num_trailing)
        ends = range(1, len(flags) + 1)
        return [end for end in ends if all(flags[max(0, end - num_trailing) : end])]
    return None

# SPDX-License-Identifier: Apache-2.0
"""The store as SGLang's third level of KV cache (HiCache), by its interface for external backends.

``--hicache-storage-backend dynamic`` with an extra configuration of ``{"backend_name": "mooncake",
"module_path": "mooncake.connectors.sglang", "class_name": "MooncakeHiCache", "interface_v1": 1,
"mooncake_store_addr": "HOST:50051"}`` makes one of these in each rank. SGLang calls it from its threads
for prefetching and backup, with names of pages and their indices in its host pools; ``HostPool`` turns these
into memory and keys, ``pages`` moves the bytes. With ``interface_v1`` pages are moved in place, without it in
copies that SGLang makes.

A pool describes a page by ``get_page_buffer_meta`` (pointers and sizes, in the order of its layout); the
pieces are used in that order, so pools of any layout can be moved, and the layout is in the key. SGLang's
rules for pages of several pools that belong together are here, too.

The identity of pages names the weights that SGLang started with, and SGLang does not report to backends that
it has replaced them. So ``clear``, which is called after that, also moves this server to an identity that no
other server has: pages of the old weights that another one saves later are not found from here.

Imported without SGLang it is the same class without SGLang's base, which SGLang refuses.
"""

from __future__ import annotations

import functools
import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch.distributed import distributed_c10d

from mooncake.connectors.cache_identity import draft_facts, pool_facts, sglang_arguments, shard_facts
from mooncake.connectors.pages import Page, Pages, Span, link_settings_of, num_leading
from mooncake.connectors.session import PoolSettings, warn_of_unknown_options
from mooncake.kvlayout import ForeignIdentity, SlabLayout, foreign_key
from mooncake.log import get_logger, setup_library_logging
from mooncake.transfer.memory import span_of
from mooncake.types import ObjectKey

if TYPE_CHECKING:
    Base: Any = object
else:
    try:
        from sglang.srt.mem_cache.hicache_storage import HiCacheStorage as Base
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "sglang":
            raise  # SGLang is installed but lacks a module, which the error must name
        Base = object

log = get_logger(__name__)

KV = "kv"
SHAPE = (
    *("layout", "dtype", "layer_num", "start_layer", "end_layer", "head_dim", "v_head_dim", "kv_cache_dim"),
    *("storage_format_tag", "conv_dtype", "temporal_dtype"),
)
"""Attributes of a pool that describe its page layout; not every pool has each."""

KNOWN = {
    "backend_name",
    "class_name",
    "extra_backend_tag",
    "interface_v1",
    "load_timeout_s",
    "local_hostname",
    "lookup_timeout_s",
    "master_server_address",
    "module_path",
    "mooncake_store_addr",
    "protocol",
    "sampled_weights",
    "tenant_id",
    "weights_digest",
}
"""Options of the extra configuration that are known here."""


class MooncakeHiCache(Base):  # type: ignore[misc]
    """One rank's client. Every method may be called from any of SGLang's threads."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        setup_library_logging("sglang")
        extra = dict(storage_config.extra_config or {})
        warn_of_unknown_options(extra, KNOWN)
        if "master_server_address" in extra:  # as SGLang's own backend calls it
            extra.setdefault("mooncake_store_addr", extra["master_server_address"])
        self._config = storage_config
        self._is_flat = not extra.get("interface_v1", 0)
        self._extra = extra
        self._facts = pool_facts(storage_config, extra, sglang_arguments())
        self._generations = Generations(repr(sorted(self._facts.items())))
        self._pools: dict[str, HostPool] = {}
        self._pages = Pages(PoolSettings.read(extra, os.environ), link_settings_of(extra))
        self._rates: dict[str, list[tuple[int, float]]] = {"prefetch": [], "backup": []}

    # Registration of SGLang's memory

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host
        if getattr(mem_pool_host, "kv_buffer", None) is not None:  # else it is in the pools that follow
            self._add(KV, mem_pool_host, self._is_flat)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        if str(host_pool_name) == KV:
            return
        try:
            self._add(str(host_pool_name), host_pool, is_flat=False)
        except (ValueError, NotImplementedError, AssertionError) as error:
            # SGLang's error for a layout that can't be moved in place. Its pages are then never found.
            log.warning("pool_refused", pool=str(host_pool_name), reason=str(error))

    def _add(self, name: str, pool: Any, is_flat: bool) -> None:
        indices = torch.arange(pool.page_size or 1)
        facts = {**self._facts, **(self._draft_facts if has_draft(name, pool) else {})}
        generation = self._generations.current
        self._pools[name] = HostPool(name, pool, indices, self._config, facts, is_flat, generation)
        self._pages.register(buffers_of(pool))

    @functools.cached_property
    def _draft_facts(self) -> dict[str, object]:
        return draft_facts(self._extra, sglang_arguments())

    # Pages of the KV pool, in place

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        return self._move(self._pages.load, KV, keys, host_indices, extra_info)

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        return self._move(self._pages.save, KV, keys, host_indices, extra_info)

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Number of leading pages in the store."""
        return num_leading(self._found(KV, keys))

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    # Pages of several pools

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Sequence[Any] | None = None, extra_info: Any = None
    ) -> Any:
        """SGLang's ``PoolTransferResult``: the longest prefix that all pools together can restore."""
        from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransferResult

        num_pages = self.batch_exists(keys)
        hits: dict[Any, int] = {PoolName.KV: num_pages} if num_pages else {}
        ends = set(range(1, num_pages + 1))
        for transfer in pool_transfers or []:
            flags = self._found(str(transfer.name), keys[:num_pages])
            usable = usable_prefixes(flags, str(transfer.hit_policy.value), len(transfer.keys or ()))
            if usable is None:
                continue
            if usable:
                hits[transfer.name] = usable[-1]
            ends &= set(usable)
        return PoolTransferResult(max(ends, default=0), hits, sorted(ends))

    def batch_get_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        return {one.name: self._move_one(self._pages.load, one, extra_info) for one in transfers}

    def batch_set_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        return {one.name: self._move_one(self._pages.save, one, extra_info) for one in transfers}

    def _move_one(self, move: Callable[..., list[bool]], transfer: Any, extra_info: Any) -> list[bool]:
        keys = transfer.keys or []
        return self._move(move, str(transfer.name), keys, transfer.host_indices, extra_info)

    # Pages in copies

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[Any | None]:
        """Each page in its tensor of ``target_locations``, or None."""
        if target_locations is None or KV not in self._pools:
            return [None] * len(keys)
        pages = self._pools[KV].flat_pages(keys, target_locations)
        loaded = self._timed(self._pages.load, pages)
        return [target if flag else None for target, flag in zip(target_locations, loaded, strict=True)]

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Whether all of these tensors are stored."""
        if values is None or KV not in self._pools:
            return False
        tensors = [value.contiguous() for value in values]
        return all(self._timed(self._pages.save, self._pools[KV].flat_pages(keys, tensors)))

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any | None:
        return self.batch_get([key], None if target_location is None else [target_location])[0]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], None if value is None else [value])

    # The rest

    def clear(self) -> None:
        """Remove the pages with this rank's identity, and find and save none under it from now on.

        The new identity is that of this server alone, on all of its ranks. Pages of others stay.
        """
        before = [digest for pool in self._pools.values() for digest in pool.digests]
        generation = self._generations.begin()
        for pool in self._pools.values():
            pool.identify(generation)
        self._pages.forget([f"kv/{digest}/" for digest in before])

    def get_stats(self) -> Any:
        """Bytes and times since the last call, as SGLang's ``StorageMetrics``; None if they are disabled."""
        if not self._config.enable_storage_metrics:
            return None
        from sglang.srt.observability.metrics_collector import StorageMetrics

        rates, self._rates = self._rates, {"prefetch": [], "backup": []}
        pages = {f"{name}_pgs": [count for count, _ in moved] for name, moved in rates.items()}
        speeds = {f"{name}_bandwidth": [speed for _, speed in moved] for name, moved in rates.items()}
        return StorageMetrics(**pages, **speeds)

    def close(self) -> None:
        self._pages.close()

    def _found(self, name: str, keys: Sequence[str]) -> list[bool]:
        pool = self._pools.get(name)
        if pool is None:  # a KV pool without memory of its own: other pools hold its bytes
            return [name == KV] * len(keys)
        return pool.whole(self._pages.find(pool.keys(keys)))

    def _move(
        self, move: Callable[..., list[bool]], name: str, keys: Sequence[str], indices: Any, extra_info: Any
    ) -> list[bool]:
        pool = self._pools.get(name)
        if pool is None:
            return [name == KV] * len(keys)
        before = getattr(extra_info, "prefix_keys", None)
        pages = pool.pages(keys, indices, before) if len(keys) else []
        return pool.whole(self._timed(move, pages))

    def _timed(self, move: Callable[[Sequence[Page]], list[bool]], pages: Sequence[Page]) -> list[bool]:
        began = time.perf_counter()
        flags = move(pages)
        if self._config.enable_storage_metrics and any(flags):
            size_bytes = sum(page.size_bytes for page, flag in zip(pages, flags, strict=True) if flag)
            name = "prefetch" if move == self._pages.load else "backup"
            speed = size_bytes / (time.perf_counter() - began) / (1 << 30)
            self._rates[name].append((sum(flags), speed))
        return flags


@functools.cache
def server_start() -> str:
    """A name of this start of the server: equal on all of its ranks, and on no other server.

    One rank writes the latents that all ranks read, so a rank can't draw a name of its own. The ranks share
    the store of torch's process group, by which they have found each other; the first of them that asks it
    sets the name. A process without a process group is the server's only rank.

    Raises:
        RuntimeError: the process group's store does not answer.
    """
    own = os.urandom(16).hex()
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return own
    # Torch has no public call for the store of a process group that another library has made.
    store = distributed_c10d._get_default_store()
    return store.compare_set("mooncake/server_start", "", own).decode()


class Generations:
    """Names of the times between two calls of ``clear``, equal on all ranks of a server.

    Every call reaches every rank in the same order, so ranks count alike. The count outlives a backend that
    is detached and attached again: it would otherwise find the pages of weights replaced before.

    Args:
        identity: what the first of these times depends on, which is common to servers that share pages.
    """

    _counts: ClassVar[dict[str, int]] = {}
    """Number of calls in this process, by identity."""

    def __init__(self, identity: str) -> None:
        self._identity = identity
        self._count = self._counts.get(identity, 0)
        self._start = server_start()

    @property
    def current(self) -> str:
        """Empty before the first call."""
        return f"{self._start}/{self._count}" if self._count else ""

    def begin(self) -> str:
        """Begin the next one, and return its name."""
        self._count += 1
        self._counts[self._identity] = self._count
        return self.current


def has_draft(name: str, pool: Any) -> bool:
    """Whether a pool has, or may have, KV of a draft model: SGLang adds a draft's layers to some pools."""
    num_target_layers = getattr(pool, "target_layer_num", None)
    return name.startswith("draft") or num_target_layers is None or pool.layer_num > num_target_layers


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
        generation: as for ``identify``.
    """

    def __init__(
        self,
        name: str,
        pool: Any,
        indices: Any,
        config: Any,
        facts: Mapping[str, object],
        is_flat: bool = False,
        generation: str = "",
    ) -> None:
        self._pool, self._name = pool, name
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
        self._page_bytes = sum(sizes)
        self._layout = SlabLayout(1, len(sizes), sizes[0], len(indices))
        common = {
            "pool": name,
            "kind": type(pool).__name__,
            "sizes": sizes,
            "is_flat": is_flat,
            "num_heads": num_heads // self.num_shards if num_heads else None,
            **shape,
            **facts,
        }
        self._shards = [
            {**common, **shard_facts(config, is_replicated, number, self.num_shards)}
            for number in range(self.num_shards)
        ]
        self.identify(generation)

    def identify(self, generation: str) -> None:
        """Name pages by this ``generation`` of the server's identity; empty: one that servers share."""
        self.digests = [
            ForeignIdentity.of(self._layout, generation=generation, **facts).digest for facts in self._shards
        ]
        digests = ",".join(self.digests)
        log.info("pool_registered", pool=self._name, page_bytes=self._page_bytes, shards=digests)

    def keys(self, pages: Sequence[str]) -> list[ObjectKey]:
        """Keys of every shard of every page."""
        digests = self.digests  # one generation for all of them, whatever another thread clears meanwhile
        return [foreign_key(digest, name_of(page)) for page in pages for digest in digests]

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

# SPDX-License-Identifier: Apache-2.0
"""The store as SGLang's third level of KV cache (HiCache), by its interface for external backends.

``--hicache-storage-backend dynamic`` with an extra configuration of ``{"backend_name": "mooncake",
"module_path": "mooncake.connectors.sglang", "class_name": "MooncakeHiCache", "interface_v1": 1,
"mooncake_store_addr": "HOST:50051"}`` makes one of these in each rank. SGLang calls it from its threads
for prefetching and backup, with names of pages and their indices in its host pools; ``host_pools``
turns these into memory and keys, ``pages`` moves the bytes. With ``interface_v1`` pages are moved in place,
without it in copies that SGLang makes.

Imported without SGLang it is the same class without SGLang's base, which SGLang refuses.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from mooncake.connectors.pages import Page, Pages, link_settings_of, num_leading
from mooncake.connectors.session import PoolSettings, warn_of_unknown_options
from mooncake.connectors.sglang.cache_identity import facts_of, server_arguments
from mooncake.connectors.sglang.host_pools import KV, HostPool, buffers_of, usable_prefixes
from mooncake.log import get_logger, setup_library_logging

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
        self._facts = facts_of(storage_config, extra, server_arguments())
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
        self._pools[name] = HostPool(name, pool, indices, self._config, self._facts, is_flat)
        self._pages.register(buffers_of(pool))

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
        """Remove the objects with this rank's identity; those of other engines stay."""
        for pool in self._pools.values():
            for digest in pool.digests:
                self._pages.forget(f"kv/{digest}/")

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

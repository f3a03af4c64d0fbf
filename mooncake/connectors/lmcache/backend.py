# SPDX-License-Identifier: Apache-2.0
"""The store as a storage backend of LMCache, by its interface for external backends (``storage_plugins``).

``storage_plugins: ["mooncake"]`` with an ``extra_config`` of ``storage_plugin.mooncake.module_path:
mooncake.connectors.lmcache``, ``storage_plugin.mooncake.class_name: MooncakeBackend`` and
``mooncake_store_addr: HOST:50051`` makes one of these in each worker. LMCache names chunks and owns their
pinned memory; chunks are stored from it and loaded into it, on LMCache's threads and on its loop. A
chunk's key has a digest of the cache's identity (``cache_identity``); its size gives its number of tokens.

Imported without LMCache it is the same class without LMCache's base.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mooncake.connectors.lmcache.cache_identity import Chunks
from mooncake.connectors.pages import Page, Pages, Span, link_settings_of, num_leading
from mooncake.connectors.session import PoolSettings
from mooncake.errors import InvalidArgument
from mooncake.log import get_logger, setup_library_logging
from mooncake.store import ReadGrant

if TYPE_CHECKING:
    Base: Any = object
else:
    try:
        from lmcache.v1.storage_backend.abstract_backend import StoragePluginInterface as Base
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "lmcache":
            raise  # LMCache is installed but lacks a module, which the error must name
        Base = object

log = get_logger(__name__)


class MooncakeBackend(Base):  # type: ignore[misc]
    """One worker's client. Every method may be called from any of LMCache's threads."""

    def __init__(
        self,
        config: Any = None,
        metadata: Any = None,
        local_cpu_backend: Any = None,
        loop: Any = None,
        dst_device: str = "cpu",
    ) -> None:
        setup_library_logging("lmcache")
        self.config, self.metadata, self.loop, self.dst_device = config, metadata, loop, dst_device
        self.local_cpu_backend = local_cpu_backend
        if config.use_layerwise:
            raise InvalidArgument("use_layerwise", True, "false with this backend")
        extra = dict(config.extra_config or {})
        self._chunks = Chunks(config, metadata, extra)
        self._pages = Pages(PoolSettings.read(extra, os.environ), link_settings_of(extra))
        self._putting: set[Any] = set()
        self._lock = threading.Lock()
        self._pages.register(_pinned(local_cpu_backend))

    def __str__(self) -> str:
        return "MooncakeBackend"

    # Lookup of chunks

    def contains(self, key: Any, pin: bool = False) -> bool:
        return self.batched_contains([key], pin) == 1

    def batched_contains(self, keys: list[Any], pin: bool = False) -> int:
        """Number of leading chunks in the store; they stay long enough to be loaded next."""
        return num_leading(self._pages.find(self._chunks.keys(keys)))

    async def batched_async_contains(self, lookup_id: str, keys: list[Any], pin: bool = False) -> int:
        return num_leading(await self._pages.begin_find(self._chunks.keys(keys)).on_this_loop())

    def pin(self, key: Any) -> bool:
        """Renew the chunk's lease, as every lookup does; there is no other pin."""
        return self.contains(key)

    def unpin(self, key: Any) -> bool:
        return True

    # Into the store

    def exists_in_put_tasks(self, key: Any) -> bool:
        with self._lock:
            return key in self._putting

    def batched_submit_put_task(
        self,
        keys: Sequence[Any],
        objs: list[Any],
        transfer_spec: Any = None,
        on_complete_callback: Callable[[Any], None] | None = None,
    ) -> None:
        """Begin to store chunks; their memory is held until they are stored or have failed."""
        with self._lock:
            pairs = [
                (key, obj)
                for key, obj in zip(keys, objs, strict=True)
                if key not in self._putting and self._chunks.can_be_stored(obj)
            ]
            self._putting.update(key for key, _ in pairs)
        if not pairs:
            return
        for _, obj in pairs:
            obj.ref_count_up()
        names = self._chunks.keys([key for key, _ in pairs])
        parents = ["", *names[:-1]]
        pages = [
            Page(name, [(obj.data_ptr, obj.get_size())], parent)
            for name, parent, (_, obj) in zip(names, parents, pairs, strict=True)
        ]

        def done(saved: list[bool]) -> None:
            with self._lock:
                self._putting.difference_update(key for key, _ in pairs)
            for (key, obj), is_saved in zip(pairs, saved, strict=True):
                obj.ref_count_down()
                if is_saved and on_complete_callback is not None:
                    _call(on_complete_callback, key)

        self._pages.begin_save(pages).then(done)

    async def async_batched_submit_put_task(self, *args: Any, **kwargs: Any) -> None:
        self.batched_submit_put_task(*args, **kwargs)

    # Out of the store

    def get_blocking(self, key: Any) -> Any | None:
        return self.batched_get_blocking([key])[0]

    def batched_get_blocking(self, keys: list[Any]) -> list[Any | None]:
        """The chunks in memory of LMCache's own, None for each miss."""
        found = self._pages.open(self._chunks.keys(keys)).wait()
        objs, grants, spans = self._allocate(found)
        try:
            good = self._pages.read(grants, spans).wait()
        except BaseException:  # an interrupt, raised once nothing writes to the memory
            _kept(objs, [False] * len(grants))
            raise
        return _kept(objs, good)

    async def batched_get_non_blocking(
        self, lookup_id: str, keys: list[Any], transfer_spec: Any = None
    ) -> list[Any]:
        """The leading chunks that could be loaded."""
        found = await self._pages.open(self._chunks.keys(keys)).on_this_loop()
        objs, grants, spans = self._allocate(found[: num_leading([grant is not None for grant in found])])
        try:
            good = await self._pages.read(grants, spans).on_this_loop()
        except BaseException:  # cancelled, raised once nothing writes to the memory
            _kept(objs, [False] * len(grants))
            raise
        kept = _kept(objs, good)
        num_good = num_leading([obj is not None for obj in kept])
        for obj in kept[num_good:]:
            if obj is not None:
                obj.ref_count_down()
        return kept[:num_good]

    def _allocate(
        self, found: Sequence[ReadGrant | None]
    ) -> tuple[list[Any | None], list[ReadGrant], list[list[Span]]]:
        """Memory for the chunks found, as far as LMCache has some without waiting."""
        objs: list[Any | None] = []
        grants: list[ReadGrant] = []
        spans: list[list[Span]] = []
        for grant in found:
            obj = None
            shapes = None if grant is None else self._chunks.shapes_of(grant.size_bytes)
            if shapes is not None and self.local_cpu_backend is not None:
                obj = self.local_cpu_backend.allocate(
                    shapes, self._chunks.dtypes(), self._chunks.fmt, busy_loop=False
                )
            if obj is not None and grant is not None:
                grants.append(grant)
                spans.append([(obj.data_ptr, obj.get_size())])
            objs.append(obj)
        return objs, grants, spans

    # The rest

    def remove(self, key: Any, force: bool = True) -> bool:
        return self.batched_remove([key], force) == 1

    def batched_remove(self, keys: list[Any], force: bool = True) -> int:
        return sum(self._pages.remove(self._chunks.keys(keys)))

    def get_allocator_backend(self) -> Any:
        return self.local_cpu_backend

    def close(self) -> None:
        self._pages.close()


def _kept(objs: Sequence[Any | None], good: Sequence[bool]) -> list[Any | None]:
    """The memory objects that hold a chunk, None for the others, which are released."""
    flags = iter(good)
    kept: list[Any | None] = []
    for obj in objs:
        is_good = obj is not None and next(flags)
        if obj is not None and not is_good:
            obj.ref_count_down()
        kept.append(obj if is_good else None)
    return kept


def _call(callback: Callable[[Any], None], key: Any) -> None:
    try:
        callback(key)
    except Exception as error:  # LMCache's own code; the other chunks are reported all the same
        log.warning("callback_failed", error=str(error))


def _pinned(local_cpu_backend: Any) -> list[Span]:
    """LMCache's memory for chunks, if it is one contiguous buffer."""
    allocator = getattr(local_cpu_backend, "memory_allocator", None)
    buffer = getattr(allocator, "buffer", None)
    return [] if buffer is None else [(buffer.data_ptr(), buffer.numel() * buffer.element_size())]

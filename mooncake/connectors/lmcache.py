# SPDX-License-Identifier: Apache-2.0
"""The store as a storage backend of LMCache, by its interface for external backends (``storage_plugins``).

``storage_plugins: ["mooncake"]`` with an ``extra_config`` of ``storage_plugin.mooncake.module_path:
mooncake.connectors.lmcache``, ``storage_plugin.mooncake.class_name: MooncakeBackend`` and
``mooncake_store_addr: HOST:50051`` makes one of these in each worker. LMCache names chunks and owns their
pinned memory; chunks are stored from it and loaded into it, on LMCache's threads and on its loop.

A chunk is all layers of some tokens in LMCache's own order, one run of memory; its size gives its number of
tokens. LMCache's key identifies the tokens, the digest beside it everything else; when in doubt a fact is
included. LMCache exposes little of the engine around it (no rope scaling, quantization or kind of an 8-bit
cache), so these facts are read from the engine in this process. Its keys name neither a request's adapter nor
its salt, and no backend gets a request, so engines with adapters are refused.

Imported without LMCache it is the same class without LMCache's base.
"""

from __future__ import annotations

import hashlib
import math
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mooncake.connectors.cache_identity import (
    is_sampled,
    model_facts,
    sglang_arguments,
    sglang_facts,
    sglang_weights_unknown,
    vllm_weights_unknown,
    weights_of,
)
from mooncake.connectors.pages import Page, Pages, Span, link_settings_of, num_leading
from mooncake.connectors.session import PoolSettings
from mooncake.errors import InvalidArgument
from mooncake.kvlayout import ForeignIdentity, SlabLayout, foreign_key
from mooncake.log import get_logger, setup_library_logging
from mooncake.store import ReadGrant
from mooncake.types import ObjectKey

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
        refuse_adapters()
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
        """Number of leading chunks in the store. They stay until their lease at the master ends."""
        return num_leading(self._pages.find(self._chunks.keys(keys)))

    async def batched_async_contains(self, lookup_id: str, keys: list[Any], pin: bool = False) -> int:
        return num_leading(await self._pages.begin_find(self._chunks.keys(keys)).on_this_loop())

    def pin(self, key: Any) -> bool:
        """Renew the chunk's lease once, as every lookup does; when it ends, the chunk may be evicted."""
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

    def clear(self) -> int:
        """Remove the chunks with this worker's identity, and find and store none under it from now on.

        This is for weights that were replaced: another engine that still has the old ones may store their
        chunks later. The new identity is this worker's alone, until its process ends.

        Returns:
            The number of tokens that are known to be removed, as LMCache counts: the last chunk of a prompt
            counts as a full one.
        """
        found = self._pages.forget([f"kv/{digest}/" for digest in self._chunks.renew()])
        return sum(number or 0 for number in found) * int(self.metadata.chunk_size)

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


class Chunks:
    """The chunks of one worker. ``metadata`` and ``config`` are LMCache's."""

    def __init__(self, config: Any, metadata: Any, extra: Mapping[str, Any]) -> None:
        self._metadata = metadata
        owner = f"engine {metadata.engine_id or os.urandom(16).hex()}"
        # LMCache's own condition for workers that all have the same latents.
        is_shared = bool(metadata.use_mla and extra.get("remote_enable_mla_worker_id_as0"))
        self._is_reader = is_shared and metadata.worker_id != 0
        self._facts: dict[str, object] = {
            "engine": "lmcache",
            "version": _version(),
            "weights": extra.get("weights_digest")
            or weights_of(
                metadata.model_name, owner, unknown=weights_unknown(), is_sampled=is_sampled(extra)
            ),
            "around": extra.get("engine_facts") or engine_facts(owner),
            "tag": extra.get("extra_backend_tag", ""),
            "worker": "all" if is_shared else f"{metadata.worker_id} of {metadata.world_size}",
            "kv_dtype": metadata.kv_dtype,
            "kv_shape": tuple(metadata.kv_shape),
            "use_mla": metadata.use_mla,
            "hash": config.pre_caching_hash_algorithm,
            "blending": config.enable_blending,
        }
        self._digests: dict[tuple[str, str], str] = {}
        """Digests by generation and groups of layers."""
        self._generation = ""

    @cached_property
    def fmt(self) -> Any:
        """LMCache's memory format of a chunk."""
        from lmcache.v1.memory_management import MemoryFormat

        return MemoryFormat.KV_MLA_FMT if self._metadata.use_mla else MemoryFormat.KV_2LTD

    def keys(self, keys: Sequence[Any]) -> list[ObjectKey]:
        """Keys in the store for LMCache's keys."""
        digest = self._digest()
        return [foreign_key(digest, _name_of(key)) for key in keys]

    def dtypes(self) -> list[Any]:
        return list(self._metadata.get_dtypes())

    def shapes_of(self, size_bytes: int) -> list[Any] | None:
        """Shapes of a chunk of ``size_bytes``; None if no number of tokens has this size."""
        num_tokens, rest = divmod(size_bytes, self._size_bytes(1))
        if rest or not 0 < num_tokens <= self._metadata.chunk_size:
            return None
        return list(self._metadata.get_shapes(num_tokens))

    def can_be_stored(self, obj: Any) -> bool:
        """Whether it is a chunk as readers expect one, and this worker is the one that stores it."""
        shapes = self.shapes_of(obj.get_size())
        is_usual = shapes is not None and list(obj.get_shapes()) == shapes
        is_usual = (
            is_usual and obj.get_memory_format() == self.fmt and list(obj.get_dtypes()) == self.dtypes()
        )
        if not is_usual:
            log.warning("chunk_refused", size_bytes=obj.get_size(), order=str(obj.get_memory_format()))
        return is_usual and not self._is_reader

    def _digest(self) -> str:
        """The identity's digest. It changes when LMCache adds groups of layers, as caches are registered."""
        groups = repr([*map(tuple, self._metadata.get_shapes()), *self.dtypes()])
        generation = self._generation
        known = self._digests.get((generation, groups))
        if known is None:
            chunk_tokens = self._metadata.chunk_size
            layout = SlabLayout(1, 1, self._size_bytes(chunk_tokens), chunk_tokens)
            known = ForeignIdentity.of(layout, groups=groups, generation=generation, **self._facts).digest
            self._digests[generation, groups] = known
            log.info("chunks_registered", digest=known, groups=groups)
        return known

    def renew(self) -> list[str]:
        """Change to an identity that no other worker has; returns the digests of the one until now.

        Workers do not agree on it, because LMCache calls each of them at another time or not at all: one that
        was left out must not find what another has stored since.
        """
        self._digest()
        before, self._generation = self._generation, os.urandom(16).hex()
        return [digest for (generation, _), digest in list(self._digests.items()) if generation == before]

    def _size_bytes(self, num_tokens: int) -> int:
        shapes = self._metadata.get_shapes(num_tokens)
        sizes = zip(shapes, self.dtypes(), strict=True)
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in sizes)


def _name_of(key: Any) -> bytes:
    """The name of a chunk's tokens, with LMCache's tags; the digest has the rest of the identity.

    The hash is LMCache's: of the tokens alone, without a request's adapter or salt (``refuse_adapters``).
    """
    return hashlib.sha256(repr((key.chunk_hash, str(key.dtype), key.tags)).encode()).digest()


def engine_facts(owner: str) -> str:
    """Facts about the engine in this process; empty where there is none.

    An engine whose facts are unknown shares chunks with ``owner`` only.
    """
    for name, facts_of_engine in (("vllm", _vllm_facts), ("sglang", _sglang_facts)):
        engine = sys.modules.get(name)
        if engine is None:
            continue
        version = f"{name} {getattr(engine, '__version__', '')}"
        facts = facts_of_engine()
        if facts is None:
            consequence = "chunks are not shared; set engine_facts"
            log.warning("engine_unknown", engine=version, consequence=consequence)
            return f"{version} of {owner}"
        return repr([version, *sorted((fact, str(value)) for fact, value in facts.items())])
    return ""


def refuse_adapters() -> None:
    """Check that the engine in this process has no adapters (LoRA).

    Raises:
        InvalidArgument: it may have some. The base model's chunks would be loaded for a request with an
            adapter, and the other way round.
    """
    allowed = "none with this backend: LMCache's names of chunks do not distinguish adapters"
    adapters = getattr(_vllm_config(), "lora_config", None)
    if adapters is not None:
        raise InvalidArgument("lora_config", adapters, allowed)
    arguments = _sglang_arguments()
    for name in ("enable_lora", "lora_paths"):
        if getattr(arguments, name, None):
            raise InvalidArgument(name, getattr(arguments, name), allowed)


def weights_unknown() -> str:
    """Why the engine's weights are not known to be those of the model's folder; empty if they are."""
    load = getattr(_vllm_config(), "load_config", None)
    unknown = "" if load is None else vllm_weights_unknown(load)
    return unknown or sglang_weights_unknown(_sglang_arguments())


def _vllm_facts() -> dict[str, object] | None:
    config = _vllm_config()
    return None if config is None else model_facts(config)


def _sglang_facts() -> dict[str, object] | None:
    arguments = _sglang_arguments()
    return None if arguments is None else sglang_facts(arguments)


def _vllm_config() -> Any:
    """vLLM's configuration, None where this process has none."""
    if "vllm" not in sys.modules:
        return None
    try:
        from vllm.config import get_current_vllm_config_or_none
    except ImportError:
        return None
    return get_current_vllm_config_or_none()


def _sglang_arguments() -> Any:
    """SGLang's arguments, None where this process has none."""
    return sglang_arguments() if "sglang" in sys.modules else None


def _version() -> str:
    try:
        import lmcache
    except ImportError:
        return ""
    return str(getattr(lmcache, "__version__", ""))

# SPDX-License-Identifier: Apache-2.0
"""LMCache's chunks: their keys in the store, their sizes, and the identity of their contents.

A chunk is all layers of some tokens in LMCache's own order, one run of memory; LMCache's key identifies the
tokens, the digest beside it everything else; when in doubt a fact is included. LMCache exposes little of the
engine around it (no rope scaling, quantization or kind of an 8-bit cache), so these facts are read from the
engine in this process. Only versions, configurations and the name of an order are imported here.
"""

from __future__ import annotations

import hashlib
import math
import os
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from mooncake.connectors.sglang.cache_identity import ARGUMENTS, server_arguments
from mooncake.connectors.vllm.cache_identity import model_facts
from mooncake.connectors.weights import is_sampled, weights_of
from mooncake.kvlayout import ForeignIdentity, SlabLayout, foreign_key
from mooncake.log import get_logger
from mooncake.types import ObjectKey

log = get_logger(__name__)


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
            or weights_of(metadata.model_name, owner, is_sampled=is_sampled(extra)),
            "around": extra.get("engine_facts") or engine_facts(owner),
            "tag": extra.get("extra_backend_tag", ""),
            "worker": "all" if is_shared else f"{metadata.worker_id} of {metadata.world_size}",
            "kv_dtype": metadata.kv_dtype,
            "kv_shape": tuple(metadata.kv_shape),
            "use_mla": metadata.use_mla,
            "hash": config.pre_caching_hash_algorithm,
            "blending": config.enable_blending,
        }
        self._digests: dict[str, str] = {}

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
        if groups not in self._digests:
            chunk_tokens = self._metadata.chunk_size
            layout = SlabLayout(1, 1, self._size_bytes(chunk_tokens), chunk_tokens)
            self._digests[groups] = ForeignIdentity.of(layout, groups=groups, **self._facts).digest
            log.info("chunks_registered", digest=self._digests[groups], groups=groups)
        return self._digests[groups]

    def _size_bytes(self, num_tokens: int) -> int:
        shapes = self._metadata.get_shapes(num_tokens)
        sizes = zip(shapes, self.dtypes(), strict=True)
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in sizes)


def _name_of(key: Any) -> bytes:
    """The name of a chunk's tokens, with LMCache's tags; the digest has the rest of the identity."""
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


def _vllm_facts() -> dict[str, object] | None:
    try:
        from vllm.config import get_current_vllm_config_or_none
    except ImportError:
        return None
    config = get_current_vllm_config_or_none()
    return None if config is None else model_facts(config)


def _sglang_facts() -> dict[str, object] | None:
    arguments = server_arguments()
    return None if arguments is None else {name: getattr(arguments, name, None) for name in ARGUMENTS}


def _version() -> str:
    try:
        import lmcache
    except ImportError:
        return ""
    return str(getattr(lmcache, "__version__", ""))

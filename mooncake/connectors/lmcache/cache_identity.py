"""LMCache's chunks: what they are called in the store, how large they are, and whose numbers are in them.

A chunk is all layers of some tokens in LMCache's own order, one run of memory; a key of LMCache's says which
tokens. The digest beside it says the rest; when in doubt a fact is here. LMCache tells little of the engine
around it (no rope scaling, quantization or kind of an 8-bit cache), so the engine in this process is asked
itself. Nothing here is imported but versions, configurations and the name of an order.
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
        # LMCache's own word for workers that all have the same latents.
        is_shared = bool(metadata.use_mla and extra.get("remote_enable_mla_worker_id_as0"))
        self._is_silent = is_shared and metadata.worker_id != 0
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
        """LMCache's name for the order of a chunk."""
        from lmcache.v1.memory_management import MemoryFormat

        return MemoryFormat.KV_MLA_FMT if self._metadata.use_mla else MemoryFormat.KV_2LTD

    def keys(self, keys: Sequence[Any]) -> list[ObjectKey]:
        """Of LMCache's keys, in the store."""
        digest = self._digest()
        return [foreign_key(digest, _name_of(key)) for key in keys]

    def dtypes(self) -> list[Any]:
        return list(self._metadata.get_dtypes())

    def shapes_of(self, size_bytes: int) -> list[Any] | None:
        """Of a chunk of so many bytes; None: no number of tokens has so many."""
        num_tokens, rest = divmod(size_bytes, self._size_bytes(1))
        if rest or not 0 < num_tokens <= self._metadata.chunk_size:
            return None
        return list(self._metadata.get_shapes(num_tokens))

    def can_be_stored(self, obj: Any) -> bool:
        """It is a chunk as the readers expect one, and this worker's to store."""
        shapes = self.shapes_of(obj.get_size())
        is_usual = shapes is not None and list(obj.get_shapes()) == shapes
        is_usual = (
            is_usual and obj.get_memory_format() == self.fmt and list(obj.get_dtypes()) == self.dtypes()
        )
        if not is_usual:
            log.warning("chunk_refused", size_bytes=obj.get_size(), order=str(obj.get_memory_format()))
        return is_usual and not self._is_silent

    def _digest(self) -> str:
        """LMCache learns of groups of layers when the engine registers its caches, so this may change."""
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
    """Which tokens, and what else LMCache tells apart by tags; whose they are the digest says."""
    return hashlib.sha256(repr((key.chunk_hash, str(key.dtype), key.tags)).encode()).digest()


def engine_facts(owner: str) -> str:
    """What the engine in this process says of itself; empty where there is none.

    One that is there and says nothing shares with nobody but ``owner``.
    """
    for name, ask in (("vllm", _vllm_facts), ("sglang", _sglang_facts)):
        engine = sys.modules.get(name)
        if engine is None:
            continue
        version = f"{name} {getattr(engine, '__version__', '')}"
        facts = ask()
        if facts is None:
            consequence = "chunks are not shared; say engine_facts"
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

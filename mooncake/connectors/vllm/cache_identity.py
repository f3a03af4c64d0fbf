# SPDX-License-Identifier: Apache-2.0
"""Facts that decide the meaning of the bytes in a vLLM rank's KV blocks, for the blocks' keys.

If one of these differs, a block must not be found; so when in doubt a fact is included. Not included are
the tokens (vLLM's own block hash covers them, with adapters, images and salts), and options that change
speed only. Nothing here is imported from vLLM; it reads the objects it is given.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mooncake.connectors.weights import folder_digest, is_sampled, weights_of
from mooncake.errors import InvalidArgument, ModelError

_VOLATILE = {"_name_or_path", "name_or_path", "transformers_version", "_attn_implementation"}


@dataclasses.dataclass(frozen=True)
class Rank:
    """A rank's place among those of its engine."""

    tp_rank: int
    tp_size: int

    def heads(self, total: int, num_shards: int) -> list[tuple[int, int]]:
        """The range of KV heads, from and up to, in each of this rank's shards.

        Raises:
            InvalidArgument: the heads can't be divided into these shards.
        """
        local = max(1, total // self.tp_size)
        first = self.tp_rank * local if total >= self.tp_size else self.tp_rank * total // self.tp_size
        if local % num_shards:
            raise InvalidArgument("store_tp_size", num_shards * self.tp_size, f"a divisor of {total} heads")
        width = local // num_shards
        return [(first + shard * width, first + (shard + 1) * width) for shard in range(num_shards)]


def num_shards(store_tp_size: int | None, tp_size: int) -> int:
    """Number of shards into which a rank cuts its blocks.

    Raises:
        InvalidArgument: ``store_tp_size`` is not a multiple of this engine's tensor parallelism.
    """
    if not store_tp_size:
        return 1
    if store_tp_size < 1 or store_tp_size % tp_size:
        raise InvalidArgument("store_tp_size", store_tp_size, f"a multiple of {tp_size}")
    return store_tp_size // tp_size


def model_weights(config: Any, extra: Mapping[str, Any]) -> str:
    """A digest of the model's weights; a ``weights_digest`` in ``extra`` replaces it."""
    model, load = config.model_config, config.load_config
    return extra.get("weights_digest") or weights_of(
        model.model,
        f"engine {config.kv_transfer_config.engine_id}",
        revision=model.revision,
        cache_dir=load.download_dir,
        is_made_up=load.load_format == "dummy",
        is_sampled=is_sampled(extra),
    )


class Adapters:
    """Digests of adapters (LoRA) from their folders' contents; vLLM's hashes have their names only."""

    def __init__(self, engine_id: str) -> None:
        self._engine_id = engine_id
        self._known: dict[tuple[object, ...], bytes] = {}

    def digest(self, adapter: Any) -> bytes:
        """The adapter's digest, empty without an adapter."""
        if adapter is None:
            return b""
        folder = Path(adapter.lora_path)
        files = sorted(folder.iterdir()) if folder.is_dir() else []
        state = (str(folder), *((path.name, *_state(path)) for path in files))
        if state not in self._known:
            try:
                found = folder_digest(folder)
            except (ModelError, OSError):
                found = f"{adapter.lora_path} of engine {self._engine_id}"
            self._known[state] = hashlib.sha256(found.encode()).digest()
        return self._known[state]


def facts_of(
    config: Any, version: str, weights: str, layers: Sequence[str], backends: Sequence[str]
) -> dict[str, object]:
    """Facts that all shards of a rank share.

    Args:
        layers: names of the layers whose tensors the rank has, in order.
        backends: description of each layer's packing of keys and values.
    """
    return {
        "engine": "vllm",
        "version": version,
        "weights": weights,
        **model_facts(config),
        "hash": config.cache_config.prefix_caching_hash_algo,
        "layers": ",".join(layers),
        "backends": ",".join(sorted(set(backends))),
    }


def model_facts(config: Any) -> dict[str, object]:
    """Fields of vLLM's configuration that change the values computed for a prompt, or their layout."""
    model, cache = config.model_config, config.cache_config
    text = json.dumps(_stable(model.hf_config.to_dict()), sort_keys=True, default=str)
    return {
        "config": hashlib.sha256(text.encode()).hexdigest(),
        "dtype": model.dtype,
        "kv_dtype": cache.cache_dtype,
        "quantization": model.quantization,
        "disable_sliding_window": model.disable_sliding_window,
    }


def _state(path: Path) -> tuple[int, ...]:
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _stable(value: Any) -> Any:
    """A configuration without fields that may differ in a copy of the model elsewhere."""
    if isinstance(value, dict):
        return {str(key): _stable(inner) for key, inner in value.items() if key not in _VOLATILE}
    return value

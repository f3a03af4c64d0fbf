# SPDX-License-Identifier: Apache-2.0
"""A vLLM rank's KV memory: checks of its caches, the addresses of its blocks, and their identity.

Shared by all our connectors for vLLM. What is moved, where to and when, is their decision.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from vllm import __version__ as vllm_version
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import FullAttentionSpec

from mooncake.connectors.block_transfer import Shards
from mooncake.connectors.cache_identity import Rank, model_weights, num_shards, rank_facts
from mooncake.connectors.memory import SlabMemory, memory_of, order_of
from mooncake.connectors.session import warn_of_unknown_options
from mooncake.errors import InvalidArgument
from mooncake.kvlayout import ForeignIdentity
from mooncake.log import setup_library_logging

CPU_ATTN = "CPU_ATTN"
HEADS_DIM = 1
"""Dimension of the heads in that backend's tensors: [blocks, heads, tokens, keys and values]."""


def prepare(config: Any, kv_cache_config: Any, known: Collection[str]) -> None:
    """First step of each of our connectors; ``known``: its options of ``kv_connector_extra_config``.

    Raises:
        InvalidArgument: a cache that is not supported.
    """
    setup_library_logging("vllm")
    transfer = config.kv_transfer_config
    warn_of_unknown_options(transfer.kv_connector_extra_config, known)
    _check_cache(config, kv_cache_config)
    # A cache that fails is no reason to fail a request. vLLM reads this after the connector is made.
    transfer.kv_load_failure_policy = "recompute"


def _check_cache(config: Any, kv_cache_config: Any) -> None:
    """Refuse caches that are not supported."""
    parallel = config.parallel_config
    if parallel.prefill_context_parallel_size * parallel.decode_context_parallel_size > 1:
        raise InvalidArgument("decode_context_parallel_size", "more than 1", "1 with this connector")
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    if len(specs) != 1 or not isinstance(specs[0], FullAttentionSpec):
        kinds = [type(spec).__name__ for spec in specs]
        raise InvalidArgument("kv_cache_groups", kinds, "one of full attention")
    sizes = resolve_kv_cache_block_sizes(kv_cache_config, config)
    if set(sizes) != {specs[0].block_size}:
        raise InvalidArgument("hash_block_size", sizes[1], f"the block size, {specs[0].block_size}")


def registered_memory(
    config: Any, kv_cache_config: Any, kv_caches: Mapping[str, Any], store_tp_size: int | None = None
) -> tuple[Shards, SlabMemory]:
    """Shards and memory of the tensors that vLLM registers with a connector.

    Raises:
        InvalidArgument: the tensors' device or shape is not supported.
    """
    tensors = list(kv_caches.values())
    devices = {str(tensor.device) for tensor in tensors}
    if devices != {"cpu"}:
        allowed = "cpu; for other devices use vLLM's own connector, by kv_connector_module_path"
        raise InvalidArgument("device", ",".join(sorted(devices)), allowed)
    tp_size = config.parallel_config.tensor_parallel_size
    extra = config.kv_transfer_config.kv_connector_extra_config
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    count = num_shards(store_tp_size, tp_size)
    backends = _backends(config, spec, kv_caches)
    heads_dim = HEADS_DIM if all(name.startswith(CPU_ATTN) for name in backends) else None
    layout, memory = memory_of(tensors, kv_cache_config.num_blocks, spec.block_size, count, heads_dim)
    weights = model_weights(config, extra)
    facts = rank_facts(config, vllm_version, weights, list(kv_caches), backends)
    total = 1 if config.model_config.use_mla else config.model_config.get_total_num_kv_heads()
    heads = Rank(get_tensor_model_parallel_rank(), tp_size).heads(total, count)
    shards = [ForeignIdentity.of(layout, heads=f"{first}:{end} of {total}", **facts) for first, end in heads]
    return Shards(shards), memory


def _backends(config: Any, spec: Any, kv_caches: Mapping[str, Any]) -> list[str]:
    """Description of each layer's layout and packing of keys and values."""
    known = config.compilation_config.static_forward_context
    found = []
    for name, tensor in kv_caches.items():
        backend = known[name].get_attn_backend().get_name()
        isa = ""
        if backend == CPU_ATTN:  # it packs keys for the instruction set of this machine
            isa = _get_attn_isa(spec.dtype, spec.block_size, spec.head_size, config.cache_config.cache_dtype)
        found.append(f"{backend} {isa} {tensor.dtype} {order_of(tensor.stride())}")
    return found

# SPDX-License-Identifier: Apache-2.0
"""A vLLM rank's KV memory: checks of its caches, the addresses of its blocks, and their identity.

Shared by all our connectors for vLLM. What is moved, where to and when, is their decision.

vLLM 0.32 shows a connector each layer as [blocks, heads, tokens, contents of a token], in whatever order its
attention backends want that in memory (``KVCacheLayout``: layers or blocks outermost, heads before tokens or
after, one latent vector per token for MLA), and says how many bytes the blocks of a layer are apart. Slabs
are found by strides; a tensor that does not agree with what vLLM says is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from vllm import __version__ as vllm_version
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import FullAttentionSpec

from mooncake.connectors.block_transfer import Shards
from mooncake.connectors.cache_identity import Rank, model_weights, num_shards, rank_facts, vllm_draft_facts
from mooncake.connectors.cuda_device import device_of
from mooncake.connectors.device_streams import KvDevice
from mooncake.connectors.memory import HostMemory, SlabMemory, memory_of, order_of
from mooncake.connectors.session import warn_of_unknown_options
from mooncake.connectors.staged_memory import staged
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


STAGING_BYTES = 1 << 30
"""Default of ``staging_bytes``: pinned host memory of each rank whose KV memory is a device's."""


@dataclasses.dataclass(frozen=True)
class RankMemory:
    """The KV memory that vLLM has registered with a connector, and its device."""

    shards: Shards
    placed: SlabMemory
    """Where it is, one block for each shard of each block: to be read and written in place."""
    tensors: Sequence[torch.Tensor]
    num_blocks: int
    device: KvDevice | None
    """None: it is main memory."""

    def host_memory(self, staging_bytes: int) -> HostMemory:
        """The memory as host memory: of a device, behind a staging area of that size.

        Raises:
            InvalidArgument: a tensor's blocks reach beyond its storage.
            OutOfMemory: the system does not lock so much memory.
        """
        if self.device is None:
            return self.placed
        num_blocks = self.num_blocks * len(self.shards)
        slab_bytes = self.shards.layout.slab_bytes
        return staged(self.device, self.tensors, self.placed, num_blocks, slab_bytes, staging_bytes)


def registered_memory(
    config: Any, kv_cache_config: Any, kv_caches: Mapping[str, Any], store_tp_size: int | None = None
) -> RankMemory:
    """Shards and memory of the tensors that vLLM registers with a connector.

    Raises:
        InvalidArgument: the tensors' device or layout is not supported.
    """
    tensors = list(kv_caches.values())
    devices = {str(tensor.device) for tensor in tensors}
    if len(devices) != 1:
        raise InvalidArgument("device", ",".join(sorted(devices)), "one device for all layers")
    tp_size = config.parallel_config.tensor_parallel_size
    extra = config.kv_transfer_config.kv_connector_extra_config
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    num_blocks, count = kv_cache_config.num_blocks, num_shards(store_tp_size, tp_size)
    backends = _backends(config, spec, kv_caches)
    heads_dim = HEADS_DIM if all(name.startswith(CPU_ATTN) for name in backends) else None
    strides = {
        name: placed.block_stride for placed in kv_cache_config.kv_cache_tensors for name in placed.layers
    }
    block_strides = [strides.get(name) for name in kv_caches]
    layout, memory = memory_of(tensors, num_blocks, spec.block_size, count, heads_dim, block_strides)
    weights = model_weights(config, extra)
    facts = rank_facts(config, vllm_version, weights, list(kv_caches), backends)
    facts |= vllm_draft_facts(config, extra)
    total = 1 if config.model_config.use_mla else config.model_config.get_total_num_kv_heads()
    heads = Rank(get_tensor_model_parallel_rank(), tp_size).heads(total, count)
    shards = [ForeignIdentity.of(layout, heads=f"{first}:{end} of {total}", **facts) for first, end in heads]
    return RankMemory(Shards(shards), memory, tensors, num_blocks, device_of(tensors[0]))


def _backends(config: Any, spec: Any, kv_caches: Mapping[str, Any]) -> list[str]:
    """Description of each layer's layout and packing of keys and values."""
    known = config.compilation_config.static_forward_context
    found = []
    for name, tensor in kv_caches.items():
        backend = known[name].get_attn_backend().get_name()
        isa = ""
        if backend == CPU_ATTN:
            from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

            # It packs keys for the instruction set of this machine
            isa = _get_attn_isa(spec.dtype, spec.block_size, spec.head_size, config.cache_config.cache_dtype)
        found.append(f"{backend} {isa} {tensor.dtype} {order_of(tensor.stride())}")
    return found


def staging_bytes_of(extra: Mapping[str, Any]) -> int:
    """The option ``staging_bytes``: size of the staging area of a rank whose KV memory is a device's.

    Raises:
        InvalidArgument: not a number above 0.
    """
    given = extra.get("staging_bytes", STAGING_BYTES)
    if isinstance(given, bool) or not isinstance(given, int) or given <= 0:
        raise InvalidArgument("staging_bytes", given, "a whole number above 0")
    return given

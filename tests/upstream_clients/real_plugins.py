# SPDX-License-Identifier: Apache-2.0
"""Our plugins in the published engines that load them: one function is one process.

``python -m tests.upstream_clients.real_plugins NAME FOLDER``; FOLDER holds the packages without their
dependencies. Each function states what is real and what is a mock; the rest is as in ``real_clients``.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import signal
import sys
import tempfile
import traceback
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.cluster import wait_for
from tests.connectors.sglang_pools import tokens_of
from tests.contract.connectors import StoreConnector
from tests.upstream_clients import real_clients

LAYERS, TOKENS, HEADS, DIM, NUM_PAGES = 3, 4, 2, 16, 8
PATIENCE_S = 60.0

GPU_ONLY = (
    "sglang.kernels",
    "sglang.srt.layers",
    "sglang.srt.platforms",
    "sglang.srt.mem_cache.memory_pool",
    "sglang.srt.mem_cache.l2_transfer",
    "sglang.srt.mem_cache.deepseek_v4_memory_pool",
)
"""Parts of SGLang that compute, or copy between a device and the host; mocked."""


class Sglang:
    """SGLang's own storage factory, cache controller (with its threads) and host pools.

    Mocks: ``GPU_ONLY``, its utilities and arguments, and the hash of pages, which it compiles when it starts.
    """

    def __init__(self, folder: str) -> None:
        unreal = set(real_clients.MOCKED) - {"sglang.srt.mem_cache.pool_host"}
        real_clients.prepare(folder, [*sorted(unreal), *GPU_ONLY])
        utils: Any = importlib.import_module("sglang.srt.utils")
        for name in ("is_cuda", "is_hip", "is_npu", "is_xpu", "is_mps"):
            setattr(utils, name, lambda: False)
        ranks = ("tp", "pp", "attn_dcp", "attn_tp", "attn_dp")
        one = {f"{rank}_{field}": int(field == "size") for rank in ranks for field in ("rank", "size")}
        context: Any = importlib.import_module("sglang.srt.runtime_context")
        context.get_parallel = lambda: types.SimpleNamespace(**one)
        context.get_server_args = lambda: types.SimpleNamespace(model_path="model", dtype="float32")
        attention: Any = importlib.import_module("sglang.srt.layers.dp_attention")
        attention.is_dp_attention_enabled = lambda: False
        devices: Any = importlib.import_module("sglang.srt.mem_cache.memory_pool")
        self.latent = devices.MLATokenToKVPool = type("MLATokenToKVPool", (mock.MagicMock,), {})
        devices.HybridLinearKVPool = type("HybridLinearKVPool", (), {})
        deepseek: Any = importlib.import_module("sglang.srt.mem_cache.deepseek_v4_memory_pool")
        deepseek.DeepSeekV4TokenToKVPool = type("DeepSeekV4TokenToKVPool", (), {})
        root = "sglang.srt.mem_cache"
        self.mha: Any = importlib.import_module(f"{root}.pool_host.mha")
        self.mla: Any = importlib.import_module(f"{root}.pool_host.mla")
        self.info: Any = importlib.import_module(f"{root}.device_pool_info")
        self.storage: Any = importlib.import_module(f"{root}.hicache_storage")
        controllers: Any = importlib.import_module("sglang.srt.managers.cache_controller")
        controllers.get_storage_hash_str = _hashes
        self._make_controller = controllers.HiCacheController
        factory: Any = importlib.import_module(f"{root}.storage.backend_factory")
        package: Any = importlib.import_module(f"{root}.storage")
        package.StorageBackendFactory = factory.StorageBackendFactory

    def pool(self, is_mla: bool, layout: str, seed: int) -> Any:
        """A host pool over a small device pool, filled with random numbers."""
        rows = (1, DIM) if is_mla else (HEADS, DIM)
        layers = tuple(torch.zeros(TOKENS, *rows) for _ in range(LAYERS))
        tables = torch.tensor([layer.data_ptr() for layer in layers], dtype=torch.uint64)
        common = {"page_size": TOKENS, "dtype": torch.float32, "device": torch.device("cpu")}
        made = {"device_capacity_tokens": TOKENS, "host_token_capacity": NUM_PAGES * TOKENS}
        made |= {"start_layer": 0, "end_layer": LAYERS}
        if is_mla:
            ranges = {"layer_indices": tuple(range(LAYERS)), "device_layer_num": LAYERS}
            sizes = {"kv_lora_rank": DIM - 4, "qk_rope_head_dim": 4, "kv_cache_dim": DIM}
            info = self.info.MLABufferInfo(buffers=layers, data_ptrs=tables, **ranges, **sizes, **common)
            pool = self.mla.MLATokenToKVPoolHost(
                info, 1.0, 0, TOKENS, layout, False, target_layer_num=LAYERS, **made
            )
        else:
            order = self.info.KVBufferLayout.NHD
            buffers = self.info.KVBuffers(
                k=layers, v=layers, k_data_ptrs=tables, v_data_ptrs=tables, layout=order
            )
            sizes = {"head_num": HEADS, "head_dim": DIM, "v_head_dim": DIM}
            info = self.info.MHABufferInfo(buffers=buffers, **sizes, **common)
            pool = self.mha.MHATokenToKVPoolHost(info, 1.0, 0, TOKENS, layout, False, **made)
        pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape, generator=torch.Generator().manual_seed(seed)))
        return pool

    def controller(self, pool: Any, address: str, **extra: Any) -> Any:
        """SGLang's controller, with our backend attached and its threads running."""
        device = self.latent() if isinstance(pool, self.mla.MLATokenToKVPoolHost) else mock.MagicMock()
        device.layer_num = LAYERS
        fields: dict[str, Any] = {"backend_name": "mooncake", "module_path": "mooncake.connectors.sglang"}
        fields |= {"class_name": "MooncakeHiCache", "mooncake_store_addr": address, "lookup_timeout_s": 10}
        return self._make_controller(
            mock.MagicMock(get_kvcache=lambda: device),
            pool,
            TOKENS,
            None,
            mock.MagicMock(),
            storage_backend="dynamic",
            prefetch_threshold=TOKENS,
            model_name="model",
            storage_backend_extra_config={**fields, "weights_digest": "weights", **extra},
        )


def _hashes(tokens: Sequence[int], prior: str | None = None, page_size: int | None = None) -> list[str]:
    """Chained hashes of pages, as SGLang's own, which is compiled."""
    found, chain = [], bytes.fromhex(prior or "")
    assert page_size is not None
    for at in range(0, len(tokens), page_size):
        chain = hashlib.sha256(chain + repr(tokens[at : at + page_size]).encode()).digest()
        found.append(chain.hex())
    return found


def _back_up(controller: Any, tokens: list[int], pages: list[int]) -> int:
    """Back up pages; returns the number of tokens that SGLang's backup thread stored."""
    names = _hashes(tokens, page_size=TOKENS)
    controller.write_storage(tokens_of(pages, TOKENS), tokens, hash_value=names)
    return int(controller.ack_backup_queue.get(timeout=PATIENCE_S).completed_tokens)


def _prefetch(controller: Any, tokens: list[int], pages: list[int]) -> tuple[int, int]:
    """Prefetch with SGLang's threads; returns (tokens found, tokens loaded into ``pages``)."""
    controller.prefetch("request", tokens, None)
    operation = controller.prefetch_hit_queue.get(timeout=PATIENCE_S)
    num_found = int(operation.storage_hit_count)
    operation.host_indices = tokens_of(pages[: num_found // TOKENS] or [0], TOKENS)
    controller.prefetch_buffer.put(operation)
    num_loaded = 0
    while not (ack := controller.ack_prefetch_queue.get(timeout=PATIENCE_S)).completed_req:
        num_loaded = int(ack.completed_tokens)
    return num_found, num_loaded


def sglang(folder: str) -> None:
    engine, daemon = Sglang(folder), StoreConnector()
    daemon.start(Path(tempfile.mkdtemp()))
    try:
        for number, (is_mla, layout, extra) in enumerate(SGLANG_CASES):
            _sglang_pages(engine, daemon, number, is_mla, layout, extra)
        _sglang_pools(engine, daemon)
        _sglang_killed(engine, daemon)
    finally:
        daemon.stop()


SGLANG_CASES: list[tuple[bool, str, dict[str, Any]]] = [
    *((False, layout, {"interface_v1": 1}) for layout in ("layer_first", "page_first", "page_first_direct")),
    *((True, layout, {"interface_v1": 1}) for layout in ("layer_first", "page_first", "page_first_direct")),
    (False, "page_head", {"interface_v1": 1}),
    (False, "page_head", {"interface_v1": 1, "tp_lcm_size": 2}),
    *((False, layout, {}) for layout in ("layer_first", "page_first", "page_first_direct", "page_head")),
    *((True, layout, {}) for layout in ("layer_first", "page_first")),
]


def _sglang_pages(
    engine: Sglang, daemon: StoreConnector, number: int, is_mla: bool, layout: str, extra: dict[str, Any]
) -> None:
    """One server prefetches what another has backed up; a third, of other weights, finds nothing."""
    ours, theirs = (engine.pool(is_mla, layout, seed) for seed in (number, number + 100))
    extra = {"weights_digest": f"weights {number}", **extra}
    writer, reader = (engine.controller(pool, daemon.address, **extra) for pool in (ours, theirs))
    assert type(writer.storage_backend).__name__ == "MooncakeHiCache"
    tokens = list(range(4 * TOKENS))
    assert _back_up(writer, tokens[: 3 * TOKENS], [5, 1, 3]) == 3 * TOKENS
    assert _prefetch(reader, tokens, [0, 6, 2]) == (3 * TOKENS, 3 * TOKENS)
    for here, there in zip([5, 1, 3], [0, 6, 2], strict=True):
        assert torch.equal(ours.get_data_page(here * TOKENS), theirs.get_data_page(there * TOKENS))
    other = engine.controller(
        engine.pool(is_mla, layout, 1), daemon.address, **{**extra, "weights_digest": "b"}
    )
    assert _prefetch(other, tokens, [0]) == (0, 0)
    writer.storage_backend.clear()
    assert _prefetch(reader, tokens, [0]) == (0, 0)
    for controller in (writer, reader, other):
        controller.detach_storage_backend()


def _sglang_pools(engine: Sglang, daemon: StoreConnector) -> None:
    """A second pool beside the first, with SGLang's own descriptors."""
    storage = engine.storage
    pool, side = engine.pool(False, "page_first", 1), engine.pool(True, "layer_first", 2)
    controller = engine.controller(pool, daemon.address, interface_v1=1, weights_digest="pools")
    backend, names = controller.storage_backend, _hashes(list(range(16)), page_size=TOKENS)
    backend.register_mem_host_pool_v2(side, storage.PoolName.INDEXER)
    assert backend.batch_set_v1(names[:3], tokens_of([0, 1, 2], TOKENS)) == [True] * 3
    indexer = storage.PoolName.INDEXER
    stored = storage.PoolTransfer(indexer, host_indices=tokens_of([4, 5], TOKENS), keys=names[:2])
    assert backend.batch_set_v2([stored]) == {indexer: [True, True]}
    found = backend.batch_exists_v2(names, [stored])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (2, [1, 2])
    assert found.extra_pool_hit_pages == {storage.PoolName.KV: 3, indexer: 2}
    last = storage.PoolTransfer(indexer, keys=names[1:2], hit_policy=storage.PoolHitPolicy.TRAILING_PAGES)
    assert backend.batch_exists_v2(names, [last]).restorable_prefix_pages == [1, 2]
    wanted = storage.PoolTransfer(indexer, host_indices=tokens_of([6, 7], TOKENS), keys=names[1:3])
    assert storage.count_pool_hits(backend.batch_get_v2([wanted])) == {indexer: 1}
    assert torch.equal(side.get_data_page(6 * TOKENS), side.get_data_page(5 * TOKENS))
    controller.detach_storage_backend()


def _sglang_killed(engine: Sglang, daemon: StoreConnector) -> None:
    """SGLang's threads continue after the daemon was killed: lookups miss."""
    pool = engine.pool(False, "page_first", 1)
    controller = engine.controller(pool, daemon.address, interface_v1=1, weights_digest="killed")
    tokens = list(range(2 * TOKENS))
    assert _back_up(controller, tokens, [0, 1]) == 2 * TOKENS
    daemon.signal(signal.SIGKILL)
    assert _prefetch(controller, tokens, [2, 3]) == (0, 0)
    assert _back_up(controller, list(range(50, 50 + TOKENS)), [0]) == 0
    controller.detach_storage_backend()


class Memory:
    """LMCache's ``GPUConnectorInterface`` over an engine's KV on the host: [kv, layer, token, hidden]."""

    def __init__(self, seed: int, num_tokens: int, parts: int) -> None:
        shape = (parts, LAYERS, num_tokens, HEADS * DIM)
        self.kv = torch.randn(shape, generator=torch.Generator().manual_seed(seed))

    def get_shape(self, num_tokens: int) -> torch.Size:
        return torch.Size((self.kv.shape[0], LAYERS, num_tokens, HEADS * DIM))

    def batched_from_gpu(self, objs: list[Any], starts: list[int], ends: list[int], **_: Any) -> None:
        for obj, start, end in zip(objs, starts, ends, strict=True):
            obj.tensor.copy_(self.kv[:, :, start:end])

    def batched_to_gpu(self, objs: list[Any], starts: list[int], ends: list[int], **_: Any) -> None:
        for obj, start, end in zip(objs, starts, ends, strict=True):
            self.kv[:, :, start:end] = obj.tensor

    def initialize_kvcaches_ptr(self, **_: Any) -> None:
        pass


class Lmcache:
    """LMCache's own engine, token database, storage manager, plugin launcher and chunk memory, for a CPU.

    A double: the engine's KV memory, above. Mocks: libraries that are not installed, of unused backends.
    """

    def __init__(self, folder: str) -> None:
        os.environ["LMCACHE_TRACK_USAGE"] = "false"
        real_clients.prepare(folder, [])
        # Without vLLM, LMCache computes hashes itself. The modules of vLLM that it would import compile code
        # and need libraries that are missing here, so vLLM in the folder must not appear to be installed.
        for name in [name for name in (*sys.modules, "vllm") if name.partition(".")[0] == "vllm"]:
            sys.modules[name] = None  # type: ignore[assignment]
        root = "lmcache.v1"
        self._config: Any = importlib.import_module(f"{root}.config").LMCacheEngineConfig
        self._metadata: Any = importlib.import_module(f"{root}.metadata").LMCacheMetadata
        self._engine: Any = importlib.import_module(f"{root}.cache_engine").LMCacheEngine
        self._tokens: Any = importlib.import_module(f"{root}.token_database").ChunkedTokenDatabase

    def engine(self, address: str, memory: Memory, extra: dict[str, Any], **changes: Any) -> Any:
        plugin = "storage_plugin.mooncake"
        fields = {f"{plugin}.module_path": "mooncake.connectors.lmcache"}
        fields |= {f"{plugin}.class_name": "MooncakeBackend", "mooncake_store_addr": address}
        fields |= {"engine_facts": "the double above", **extra}  # there is no engine to query
        config = self._config.from_defaults(
            chunk_size=CHUNK,
            local_cpu=False,
            save_unfull_chunk=True,
            max_local_cpu_size=0.05,
            storage_plugins=["mooncake"],
            extra_config=fields,
            **changes,
        )
        parts = memory.kv.shape[0]
        metadata = self._metadata(
            model_name="model",
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=torch.float32,
            kv_shape=(LAYERS, parts, CHUNK, HEADS, DIM),
            use_mla=parts == 1,
            role="worker",
            chunk_size=CHUNK,
        )
        tokens = self._tokens(config, metadata)
        engine = self._engine(config, metadata, tokens, memory, lambda *_: None, lambda it, _: it)
        engine.post_init()
        assert "mooncake" in engine.storage_manager.storage_backends, "the plugin was not loaded"
        return engine


CHUNK = 16


def lmcache(folder: str) -> None:
    engines, daemon = Lmcache(folder), StoreConnector()
    daemon.start(Path(tempfile.mkdtemp()))
    try:
        for number, parts in enumerate((2, 1)):
            _lmcache_chunks(engines, daemon, number, parts)
        _lmcache_killed(engines, daemon)
    finally:
        daemon.stop()


def _stored(engine: Any, tokens: list[int]) -> None:
    """Store with LMCache, which does not wait for completion; this does."""
    engine.store(tokens)
    backend = engine.storage_manager.storage_backends["mooncake"]
    wait_for(lambda: not backend._putting, "all puts to end", PATIENCE_S)


def _lmcache_chunks(engines: Lmcache, daemon: StoreConnector, number: int, parts: int) -> None:
    """One engine retrieves what another stored, also the last, shorter chunk; a third finds nothing."""
    extra = {"weights_digest": f"weights {number}"}
    tokens = list(range(3 * CHUNK + 5))
    ours, theirs = (Memory(seed, len(tokens), parts) for seed in (number, number + 100))
    writer, reader = (engines.engine(daemon.address, memory, extra) for memory in (ours, theirs))
    _stored(writer, tokens)
    other = [*tokens[: 2 * CHUNK], *range(900, 900 + CHUNK)]
    assert reader.lookup(other) == 2 * CHUNK
    assert reader.lookup(tokens) == len(tokens)
    assert int(reader.retrieve(tokens).sum()) == len(tokens)
    assert torch.equal(ours.kv, theirs.kv)
    unrelated = engines.engine(daemon.address, Memory(1, len(tokens), parts), {"weights_digest": "others"})
    assert unrelated.lookup(tokens) == 0
    for engine in (writer, reader, unrelated):
        engine.close()


def _lmcache_killed(engines: Lmcache, daemon: StoreConnector) -> None:
    tokens = list(range(2 * CHUNK))
    memory = Memory(1, len(tokens), 2)
    engine = engines.engine(daemon.address, memory, {"weights_digest": "killed"})
    _stored(engine, tokens)
    assert engine.lookup(tokens) == len(tokens)
    daemon.signal(signal.SIGKILL)
    before = memory.kv.clone()
    assert int(engine.retrieve(tokens).sum()) == 0
    assert engine.lookup(tokens) == 0
    _stored(engine, list(range(500, 500 + CHUNK)))
    assert torch.equal(memory.kv, before)
    engine.close()


PLUGINS = (sglang, lmcache)

if __name__ == "__main__":
    try:
        {plugin.__name__: plugin for plugin in PLUGINS}[sys.argv[1]](sys.argv[2])
        print("done", flush=True)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(0)  # the engines' threads would keep the process alive

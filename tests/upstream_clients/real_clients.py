# SPDX-License-Identifier: Apache-2.0
"""The connectors of real packages, as they are published, on our store: one function is one process.

``python real_clients.py NAME MASTER FOLDER``; FOLDER holds the packages without their dependencies. Modules
that a package imports and this machine lacks (vllm, triton, ray, ...) are replaced by mocks, and so are the
parts of SGLang that need a GPU; the module that calls the store is the real one.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
import tempfile
import threading
import types
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import torch

from mooncake.cli.ports import free_ports

PACKAGES = ("sglang", "lmcache", "transfer_queue", "checkpoint_engine", "vllm", "vllm_omni")
MOCKED = (
    "sglang.srt.mem_cache.hybrid_cache",
    "sglang.srt.mem_cache.cache_init_params",
    "sglang.srt.mem_cache.pool_host",
    "sglang.srt.mem_cache.unified_cache",
    "sglang.srt.managers.schedule_batch",
    "sglang.srt.runtime_context",
    "sglang.srt.utils",
    "sglang.srt.mem_cache.memory_pool_host",
    "sglang.srt.observability",
    "sglang.srt.distributed",
    "vllm.config",
    "vllm.distributed.kv_events",
    "vllm.distributed.kv_transfer.kv_connector.v1.base",
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics",
    "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.coordinator",
    "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data",
    "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.metrics",
    "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.protocol",
    "vllm.envs",
    "vllm.logger",
    "vllm.utils",
    "vllm.v1",
)
BARE = (
    "vllm",
    "vllm.distributed",
    "vllm.distributed.ec_transfer",
    "vllm.distributed.ec_transfer.ec_connector",
    "vllm.distributed.ec_transfer.ec_connector.mooncake_store_embedding",
    "vllm.distributed.kv_transfer",
    "vllm.distributed.kv_transfer.kv_connector",
    "vllm.distributed.kv_transfer.kv_connector.v1",
    "vllm.distributed.kv_transfer.kv_connector.v1.mooncake",
    "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store",
    "vllm_omni",
    "vllm_omni.distributed",
    "vllm_omni.distributed.omni_connectors",
    "vllm_omni.distributed.omni_connectors.connectors",
    "sglang",
    "sglang.srt",
    "sglang.srt.mem_cache",
    "sglang.srt.mem_cache.storage",
    "sglang.srt.mem_cache.storage.mooncake_store",
)
"""Packages whose ``__init__`` imports all of the package; only some of their modules are needed."""
NOT_MOCKED = ("nvtx", "opentelemetry", "torch_neuronx")
"""Optional modules: imported if they are installed, otherwise not replaced."""


class Missing(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, mocked: Sequence[str]) -> None:
        self._mocked = mocked
        self._names: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        top = name.partition(".")[0]
        is_mocked = any(name == known or name.startswith(known + ".") for known in self._mocked)
        if not is_mocked and (top in (*PACKAGES, *NOT_MOCKED, "mooncake") or not self._is_theirs(top)):
            return None
        self._names.add(top)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def _is_theirs(self, top: str) -> bool:
        """Whether one of the packages imports it, not a library for which it is optional."""
        if top in self._names:
            return True
        frame = sys._getframe(1)
        while frame.f_back and (
            frame.f_globals.get("__name__") == __name__ or "importlib" in frame.f_code.co_filename
        ):
            frame = frame.f_back
        return str(frame.f_globals.get("__name__")).partition(".")[0] in PACKAGES

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        module = mock.MagicMock(name=spec.name)
        module.__path__, module.__spec__, module.__name__ = [], spec, spec.name
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def prepare(folder: str, mocked: Sequence[str] = MOCKED) -> None:
    sys.path.append(folder)
    finder = Missing(mocked)
    for name in BARE:
        package = finder.create_module(importlib.machinery.ModuleSpec(name, finder, is_package=True))
        package.__path__ = [str(Path(folder, *name.split(".")))]
        sys.modules[name] = package
    for name in mocked:
        spec = finder.find_spec(name, None)
        assert spec is not None
        sys.modules[name] = finder.create_module(spec)
    sys.meta_path.append(finder)


def _config(master: str) -> dict[str, Any]:
    return {
        "local_hostname": "127.0.0.1",
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": master,
        "global_segment_size": 16 << 20,
        "local_buffer_size": 16 << 20,
        "protocol": "tcp",
        "device_name": "",
    }


def transfer_queue(master: str) -> None:
    module = importlib.import_module("transfer_queue.storage.clients.mooncake_client")
    client = module.MooncakeStoreClient(_config(master))
    keys = [f"{row}@{field}" for row in range(3) for field in ("ids", "text")]
    values: list[Any] = []
    for row in range(3):
        values += [torch.arange(row, row + 5000), {"row": row, "text": "x" * 1000}]
    for _ in range(2):  # the second time replaces
        meta = client.put(keys, values)
    shapes = [list(v.shape) if isinstance(v, torch.Tensor) else None for v in values]
    dtypes = [v.dtype if isinstance(v, torch.Tensor) else None for v in values]
    found = client.get(keys, shapes, dtypes, meta)
    for value, got in zip(values, found, strict=True):
        assert torch.equal(got, value) if isinstance(value, torch.Tensor) else got == value
    client.clear(keys)
    assert client._store.batch_is_exist(keys) == [0] * len(keys)
    client.close()


def vllm_omni(master: str) -> None:
    module = importlib.import_module(
        "vllm_omni.distributed.omni_connectors.connectors.mooncake_store_connector"
    )
    connector = module.MooncakeStoreConnector(
        {"host": "127.0.0.1", "metadata_server": "P2PHANDSHAKE", "master": master, "segment": 16 << 20}
    )
    connector.serialize_obj, connector.deserialize_obj = lambda it: json.dumps(it).encode(), json.loads
    is_put, size, _ = connector.put("0", "1", "request", {"hidden": [1, 2, 3]})
    assert is_put and size > 0
    found = connector.get("0", "1", "request")
    assert found is not None and found[0] == {"hidden": [1, 2, 3]}
    connector.close()


class Blocks:
    """vLLM's token database and store layout, as its worker uses them: three layers of paged KV cache."""

    block_size = hash_block_size = 16

    def __init__(self, num_blocks: int) -> None:
        self.layers = [torch.randn(num_blocks, 16, 256) for _ in range(3)]
        self.metadata = types.SimpleNamespace(cache_prefix="", model_name="model", store_namespace="")
        self.store_layout = self
        self.local_shard_ids = [0]

    def process_tokens(self, token_len: int, hashes: list[str], mask_num: int = 0, **_: Any) -> Any:
        for number in range(mask_num // 16, token_len // 16):
            yield number * 16, number * 16 + 16, hashes[number]

    def key_for(self, shard: int, block_hash: str) -> str:
        return f"model@{shard}@{block_hash}"

    def prepare_values(self, chunks: Any, block_ids: list[int], _: Any) -> tuple[Any, Any, list[int]]:
        blocks = [block_ids[start // 16] for start, _ in chunks]
        addresses = [[layer[block].data_ptr() for layer in self.layers] for block in blocks]
        return addresses, [[layer[block].nbytes for layer in self.layers] for block in blocks], blocks


def vllm_store(master: str) -> None:
    """The threads that save and load blocks, and the reset; doubles choose the blocks."""
    from mooncake.store import MooncakeDistributedStore, ReplicateConfig

    root = "vllm.distributed"
    worker: Any = importlib.import_module(f"{root}.kv_transfer.kv_connector.v1.mooncake.store.worker")
    shared: Any = importlib.import_module(f"{root}.mooncake_store")
    worker.NULL_BLOCK_ID = 0
    worker.envs.VLLM_MOONCAKE_STORE_TIER_LOG = True
    fields = _config(master)
    config = shared.MooncakeStoreConfig("P2PHANDSHAKE", master, "tcp", "", global_segment_size=16 << 20)
    store = MooncakeDistributedStore()
    shared.setup_mooncake_store(store, config, fields["local_hostname"])
    blocks = Blocks(12)
    for layer in blocks.layers:
        assert store.register_buffer(layer.data_ptr(), layer.nbytes) == 0
    masks = types.SimpleNamespace(
        lcm_block_size=16,
        store_mask=lambda length, *_, **__: [[True] * (length // 16)],
        load_mask=lambda hashes, length: [[True] * (length // 16)],
    )
    replicas = ReplicateConfig()
    is_supported = worker._replicate_config_supports_group_ids(ReplicateConfig, replicas)
    sender = worker.KVCacheStoreSendingThread(
        store,
        masks,
        [blocks],
        16,
        0,
        [1],
        "kv_both",
        threading.Event(),
        False,
        replicas,
        is_supported,
        is_supported,
    )
    sender._maybe_offload_boundary_states = lambda _: True
    hashes = [f"h{number}" for number in range(5)]
    for job, length in enumerate((32, 64)):  # the second finds two of its four blocks stored
        sender.stored_requests["request"] = {job}
        request = types.SimpleNamespace(
            req_id="request", store_job_id=job, token_ids=None, token_ids_start=0, token_len_chunk=length
        )
        request.block_ids, request.block_hashes = [[1, 2, 3, 4]], hashes
        request.current_event, request.prefill_end_tokens = None, 64
        sender.add_request(request)
        sender._handle_request(sender.request_queue.get())
        assert sender._saved_offset["request"] == length
        sender._saved_offset.clear()
    receiver = worker.KVCacheStoreRecvingThread(store, masks, [blocks], 16, 0, threading.Event())
    load = types.SimpleNamespace(token_len=80, vllm_cached_tokens=0, tail_key_boundaries=[])
    request = types.SimpleNamespace(req_id="other", load_spec=load, block_ids=[[7, 8, 9, 10, 11]])
    request.block_hashes = hashes
    receiver.add_request(request)
    receiver._handle_request(receiver.request_queue.get())
    assert receiver.get_and_clear_block_ids_with_load_errors() == {11}, "the fifth was never saved"
    assert all(torch.equal(layer[1:5], layer[7:11]) for layer in blocks.layers)
    assert store.remove_all(force=True) == 4
    assert store.close() == 0


def vllm_embeddings(master: str) -> None:
    root = "vllm.distributed.ec_transfer.ec_connector.mooncake_store_embedding"
    module: Any = importlib.import_module(f"{root}.store_client")
    data = importlib.import_module(f"{root}.data")
    module.get_ip = lambda: "127.0.0.1"
    importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.mooncake.rdma_utils")
    fields = {**_config(master), "global_segment_size": "16MB", "tenant_id": "team"}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(fields, file)
        file.flush()
        os.environ["MOONCAKE_CONFIG_PATH"] = file.name
        client = module.create_mooncake_embedding_store_client(read_buffer_bytes=1 << 20)
    tensors = {f"emb{n}": torch.randn(10 + n, 512).to(torch.bfloat16) for n in range(3)}
    for key, tensor in tensors.items():
        client.put_tensor(key, tensor)
        client.put_tensor(key, tensor)
    assert client.batch_exists([*tensors, "none"]) == [True] * 3 + [False]
    wanted = {key: data.TensorSpec(tuple(t.shape), str(t.dtype), t.nbytes) for key, t in tensors.items()}
    found = client.load_tensors({**wanted, "none": wanted["emb0"]}, "cpu")
    assert set(found) == set(tensors)
    assert all(torch.equal(found[key], tensor) for key, tensor in tensors.items())
    client.close()


def sglang_embeddings(master: str) -> None:
    name = "sglang.srt.mem_cache.storage.mooncake_store.mooncake_embedding_store"
    module = importlib.import_module(name)
    store = module.MooncakeEmbeddingStore(types.SimpleNamespace(extra_config=_config(master)))
    data = torch.randn(2, 5000)
    store.register_buffer(data)
    pointers, sizes = [row.data_ptr() for row in data], [row.nbytes for row in data]
    assert store.batch_is_exist(["a", "b"]) == [False, False]
    assert store.batch_put(["a", "b"], pointers, sizes) == [True, True]
    assert store.batch_put(["a", "b"], pointers, sizes) == [True, True]
    target = torch.zeros_like(data)
    store.register_buffer(target)
    assert store.batch_get(["a", "b"], [row.data_ptr() for row in target], sizes) == [True, True]
    assert torch.equal(data, target)
    assert store.batch_put_from_multi_buffers(["c"], [pointers], [sizes]) == [True]
    target.zero_()
    rows = [[row.data_ptr() for row in target]]
    assert store.batch_get_into_multi_buffers(["c"], rows, [sizes]) == [True]
    assert torch.equal(data, target)


def sglang_embedding_cache(master: str) -> None:
    """Two encoders (EPD): what one computed the other finds, prefetches and uses."""
    module: Any = importlib.import_module("sglang.srt.mem_cache.embedding_cache_controller")
    name = "sglang.srt.mem_cache.storage.mooncake_store.mooncake_embedding_store"
    stores = importlib.import_module(name)
    group = types.SimpleNamespace(cpu_group=None)
    module.get_parallel = lambda: types.SimpleNamespace(tp_size=1, tp_rank=0, tp_group=group)
    image = module.Modality.IMAGE

    class Controller(module.EmbeddingCacheController):  # type: ignore[misc]
        def _create_pools(self, pin_memory: bool) -> Any:
            return super()._create_pools(False)  # which needs a GPU

    def encoder() -> Any:
        store = stores.MooncakeEmbeddingStore(types.SimpleNamespace(extra_config=_config(master)))
        return Controller(store, max_pool_size_gb=0.01, hidden_dims={image: 512}, dtype=torch.bfloat16)

    def computed(controller: Any, name: str, tensor: torch.Tensor) -> None:
        """As its copy from a GPU to the pool."""
        pool = controller.vision_pool
        runs = controller._allocate_with_eviction(pool, len(tensor))
        fields = (name, image, len(tensor), pool.dim, runs, module.EntryState.READY)
        controller.entries[name] = entry = module.EmbeddingCacheEntry(*fields)
        controller._copy_embedding_page_runs(tensor, pool.tensor, entry, pool, src_is_pool=False)

    first, second = encoder(), encoder()
    first.vision_pool.allocator.free_ranges = [(2 * page, 1) for page in range(10)]  # no two side by side
    embeddings = {f"image{n}": torch.randn(600 + 300 * n, 512).to(torch.bfloat16) for n in range(2)}
    for key, tensor in embeddings.items():
        computed(first, key, tensor)
    assert len(first.entries["image0"].page_runs) == 3
    first.insert_batch(list(embeddings), image)
    first.insert_queue.join()
    keys = [*embeddings, "none"]
    assert asyncio.run(second.batch_is_exist(keys)) == [True, True, False]
    second.prefetch("request", keys, [600, 900, 100], image)
    second.prefetch_queue.join()
    assert second.check_prefetch_progress("request")
    assert [second.has_local_embedding(key) for key in keys] == [True, True, False]
    for key, pieces in zip(embeddings, second.get_pool_views(list(embeddings)), strict=True):
        assert torch.equal(torch.cat(pieces), embeddings[key])
    for controller in (first, second):
        controller.stop_event.set()
        controller.io_thread.join()


class HostPool:
    """Pages of keys and values, page first."""

    page_size = 4

    def __init__(self, num_pages: int) -> None:
        self.kv_buffer = torch.randn(num_pages, 2, self.page_size * 64)

    def get_ksize_per_token(self) -> int:
        return 64 * 4

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        pages = (indices[:: self.page_size] // self.page_size).tolist()
        pointers = [self.kv_buffer[page, part].data_ptr() for page in pages for part in range(2)]
        return pointers, [self.page_size * 64 * 4] * len(pointers)


def sglang_hicache(master: str) -> None:
    cache = importlib.import_module("sglang.srt.mem_cache.hicache_storage")
    module = importlib.import_module("sglang.srt.mem_cache.storage.mooncake_store.mooncake_store")
    extra = {**_config(master), "enable_group_semantics": True, "tenant_id": "team"}
    config = cache.HiCacheStorageConfig(0, 1, 0, 1, 0, 1, False, False, True, "org/model", extra_config=extra)
    pool = HostPool(8)
    store = module.MooncakeStore(config, pool)
    store.register_mem_pool_host(pool)
    keys = [f"page{page}" for page in range(4)]
    first, second = torch.arange(16), torch.arange(16, 32)
    assert store.batch_exists(keys) == 0
    assert store.batch_set_v1(keys, first) == [True] * 4
    assert store.batch_set_v1(keys, first) == [True] * 4
    assert store.batch_exists([*keys, "none"]) == 4
    assert store.batch_get_v1(keys, second) == [True] * 4
    assert torch.equal(pool.kv_buffer[:4], pool.kv_buffer[4:])
    assert store.batch_get_v1(["none"], second[:4]) == [False]
    store.clear()


class LayeredPool:
    """A device pool of layers, and the offsets of a page's layers in its object."""

    def __init__(self, num_pages: int) -> None:
        self.layers = torch.zeros(4, num_pages, 3000)

    def prepare_locations(self, indices: torch.Tensor) -> list[int]:
        return indices.tolist()

    def get_prepared_layer_range_meta(self, pages: list[int], layer: int) -> Any:
        size = self.layers[layer, 0].nbytes
        pointers = [[self.layers[layer, page].data_ptr()] for page in pages]
        return pointers, [[size]] * len(pages), [[layer * size]] * len(pages)


def sglang_direct_linker(master: str) -> None:
    """Loads a batch layer by layer; two requests share a page."""
    from mooncake.store import MooncakeDistributedStore

    linker = "sglang.srt.mem_cache.unified_cache.unified_cache_linker"
    importlib.import_module(linker).UnifiedCacheLinker = object  # type: ignore[attr-defined]
    name = "sglang.srt.mem_cache.storage.mooncake_store.mooncake_direct_linker"
    module: Any = importlib.import_module(name)
    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 16 << 20, 16 << 20, "tcp", "", master) == 0
    pages = torch.randn(3, 4, 3000)
    keys = [f"page{number}" for number in range(3)]
    pointers = [[layer.data_ptr() for layer in page] for page in pages]
    sizes = [[layer.nbytes for layer in page] for page in pages]
    assert store.batch_put_from_multi_buffers(keys, pointers, sizes) == [0, 0, 0]
    pool, done = LayeredPool(6), mock.MagicMock()
    storage = types.SimpleNamespace(store=store, _tag_keys=lambda keys: keys)
    storage._get_hybrid_page_component_keys = lambda keys, _: (keys, 1)
    itself = types.SimpleNamespace(storage=storage, pools={"kv": pool}, num_layers=4, layer_done_counter=done)
    module.MooncakeDirectLinker.register_buffers(
        types.SimpleNamespace(
            storage=storage,
            pools={"kv": types.SimpleNamespace(get_hybrid_pool_buffer=lambda: [pool.layers])},
        )
    )
    requests = [
        [types.SimpleNamespace(name="kv", keys=["page0", "page1"], host_indices=torch.tensor([5, 0]))],
        [types.SimpleNamespace(name="kv", keys=["page0", "page2"], host_indices=torch.tensor([2, 3]))],
    ]
    module.MooncakeDirectLinker.load_layer_wise(itself, 7, requests)
    done.fail.assert_not_called()
    assert [call.args for call in done.complete.call_args_list] == [(7, layer) for layer in range(4)]
    for page, at in ((0, 5), (1, 0), (0, 2), (2, 3)):
        assert torch.equal(pool.layers[:, at], pages[page])
    missing = types.SimpleNamespace(name="kv", keys=["none"], host_indices=torch.tensor([1]))
    module.MooncakeDirectLinker.load_layer_wise(itself, 8, [[missing]])
    assert done.fail.called
    store.close()


class Chunk:
    """A chunk in LMCache's pinned memory."""

    def __init__(self, raw_tensor: torch.Tensor, shape: torch.Size, fmt: Any) -> None:
        self.raw_tensor, self._shape, self._fmt = raw_tensor, shape, fmt
        self.data_ptr = raw_tensor.data_ptr()
        array: Any = raw_tensor.numpy()
        self.byte_array = memoryview(array)

    def get_size(self) -> int:
        return self.raw_tensor.numel()

    def get_shapes(self) -> list[torch.Size]:
        return [self._shape]

    def get_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def get_memory_format(self) -> Any:
        return self._fmt

    def ref_count_down(self) -> None:
        pass


def lmcache(master: str) -> None:
    """Without and with metadata before the data, then the lookup client."""
    name = "lmcache.v1.storage_backend.connector.mooncakestore_connector"
    module: Any = importlib.import_module(name)
    fmt = importlib.import_module("lmcache.v1.memory_management").MemoryFormat.KV_2LTD
    shape = torch.Size((2, 4, 16, 32))
    size = shape.numel() * 2
    pinned = torch.randint(0, 256, (8, size), dtype=torch.uint8)
    unused = iter(pinned[4:])
    metadata = types.SimpleNamespace(
        get_shapes=lambda *_: [shape],
        get_dtypes=lambda: [torch.bfloat16],
        get_num_groups=lambda: 1,
        use_mla=False,
        chunk_size=16,
    )
    extra = {**_config(master), "save_chunk_meta": False, "mooncake_prefer_local_alloc": True}
    config = types.SimpleNamespace(extra_config=extra, use_layerwise=False)
    backend = types.SimpleNamespace(
        config=config,
        metadata=metadata,
        memory_allocator=types.SimpleNamespace(
            pin_allocator=types.SimpleNamespace(buffer=pinned), numa_mapping=mock.MagicMock()
        ),
        allocate=lambda *_: Chunk(next(unused), shape, fmt),
    )
    connector = module.MooncakestoreConnector(asyncio.new_event_loop(), backend, config)
    assert connector.registered_buffer_ptr == pinned.data_ptr()
    keys = [types.SimpleNamespace(to_string=lambda n=n: f"chunk{n}") for n in range(3)]
    chunks = [Chunk(pinned[n], shape, fmt) for n in range(2)]

    async def use() -> None:
        assert not await connector.exists(keys[0])
        await connector.batched_put(keys[:2], chunks)
        assert await connector.exists(keys[0])
        assert await connector.batched_async_contains("lookup", keys) == 2
        found = await connector.batched_get(keys[:2])
        assert all(torch.equal(a.raw_tensor, b.raw_tensor) for a, b in zip(found, chunks, strict=True))
        connector.save_chunk_meta = True
        await connector.put(keys[2], chunks[0])
        found = await connector.batched_get([keys[2], types.SimpleNamespace(to_string=lambda: "none")])
        assert torch.equal(found[0].raw_tensor, chunks[0].raw_tensor) and found[1] is None

    asyncio.run(use())
    _lmcache_lookup(master)
    asyncio.run(connector.close())


def _lmcache_lookup(master: str) -> None:
    module: Any = importlib.import_module("lmcache.v1.lookup_client.mooncake_lookup_client")

    class Key(module.CacheEngineKey):  # type: ignore[misc]
        def __init__(self, name: str) -> None:
            object.__setattr__(self, "_name", name)

        def to_string(self) -> str:
            return str(object.__getattribute__(self, "_name"))

    chunks = [(0, 16, Key("chunk0")), (16, 32, Key("chunk1")), (32, 48, Key("other"))]
    database = types.SimpleNamespace(process_tokens=lambda _: chunks)
    config = module.LMCacheEngineConfig.from_defaults()
    with mock.patch("lmcache.v1.token_database.ChunkedTokenDatabase", lambda *_: database):
        lookup = module.MooncakeLookupClient(config, None, master)
    assert lookup.lookup([1] * 48) == 32


def lmcache_channel(_: str) -> None:
    """Two peers of LMCache, of which one reads the other's chunks with the transfer engine."""
    name = "lmcache.v1.distributed.transfer_channel.impl.mooncake_te_impl"
    module: Any = importlib.import_module(name)
    describe = importlib.import_module("lmcache.v1.distributed.internal_api").L1MemoryDesc
    memory = [torch.randint(0, 256, (1 << 16,), dtype=torch.uint8) for _ in range(2)]
    urls = [f"127.0.0.1:{port}" for port in free_ports("127.0.0.1", 2, Random())]
    owner, reader = (
        module.MooncakeTeTransferChannelContext(describe(it.data_ptr(), it.numel(), 4096), url, url)
        for it, url in zip(memory, urls, strict=True)
    )
    chunks = [(0, 4096), (16384, 8192)]
    client = reader.get_transfer_channel_client(urls[0])
    addresses = [context.get_transfer_channel_address(chunks) for context in (reader, owner)]
    task = client.submit_read(*addresses)
    while not (found := client.query_read_status(task)).finished:
        pass
    assert found.succeeded_mask == [True, True]
    assert all(torch.equal(memory[0][at : at + size], memory[1][at : at + size]) for at, size in chunks)
    assert not torch.equal(memory[0], memory[1])


def sglang_transfer_engine(_: str) -> None:
    """Transfer of KV between SGLang's prefill and decode: one writes to the other's registered memory."""
    os.environ["MOONCAKE_PROTOCOL"], os.environ["MC_FORCE_TCP"] = "tcp", "1"
    path = Path(sys.argv[3], "sglang/srt/distributed/device_communicators/mooncake_transfer_engine.py")
    spec = importlib.util.spec_from_file_location("sglang.mooncake_transfer_engine", path)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.run_with_deadline = lambda work, **_: work()
    module.NetworkAddress = lambda host, port: mock.MagicMock(to_host_port_str=lambda: f"{host}:{port}")
    prefill, decode = (module.MooncakeTransferEngine("127.0.0.1", 0) for _ in range(2))
    source, target = torch.randn(3, 5000), torch.zeros(3, 5000)
    rows = [[row.data_ptr() for row in it] for it in (source, target)]
    sizes = [row.nbytes for row in source]
    assert prefill.batch_register(rows[0], sizes) == 0
    decode.register(target.data_ptr(), target.nbytes)
    peer = decode.get_session_id()
    assert prefill.send_probe(peer) == 0
    assert prefill.transfer_sync(peer, rows[0][0], rows[1][0], sizes[0]) == 0
    assert prefill.batch_transfer_sync(peer, rows[0][1:], rows[1][1:], sizes[1:]) == 0
    assert torch.equal(source, target)
    assert prefill.batch_transfer_sync("127.0.0.1:1", rows[0][:1], rows[1][:1], sizes[:1]) < 0
    assert prefill.batch_deregister(rows[0]) == 0
    decode.deregister(target.data_ptr())


def checkpoint_engine(_: str) -> None:
    os.environ["RANK"] = "0"
    module: Any = importlib.import_module("checkpoint_engine.p2p_store")
    module.get_ip = lambda: "127.0.0.1"
    device = types.SimpleNamespace(
        device_module=types.SimpleNamespace(device_count=lambda: 1),
        rdma_device=lambda _: "",
        transfer_engine_protocol="tcp",
    )
    owner, reader = module.P2PStore(device), module.P2PStore(device)
    weights = {"a": torch.randn(1000), "b": torch.randn(50, 70)}
    owner.register_named_tensors(weights)
    copies = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    reader.register_named_tensors(copies)
    reader.batch_transfer_sync_read(
        owner.addr,
        [tensor.data_ptr() for tensor in copies.values()],
        [tensor.data_ptr() for tensor in weights.values()],
        [tensor.nbytes for tensor in weights.values()],
    )
    assert all(torch.equal(weights[name], copies[name]) for name in weights)
    assert owner.unregister_named_tensors(["a", "b"]) == 2
    assert reader.unregister_named_tensors(["a", "b"]) == 2


CLIENTS = (
    transfer_queue,
    vllm_store,
    vllm_embeddings,
    vllm_omni,
    sglang_embeddings,
    sglang_embedding_cache,
    sglang_hicache,
    sglang_direct_linker,
    sglang_transfer_engine,
    lmcache,
    lmcache_channel,
    checkpoint_engine,
)

if __name__ == "__main__":
    prepare(sys.argv[3])
    {client.__name__: client for client in CLIENTS}[sys.argv[1]](sys.argv[2])
    print("done", flush=True)

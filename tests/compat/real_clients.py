"""The connectors of real packages, as they are published, against our store: one function is one process.

``python real_clients.py NAME MASTER FOLDER``; FOLDER holds the packages without their dependencies. What a
package wants to import and this machine lacks (vllm, triton, ray, ...) is replaced by a mock, and so are
the parts of SGLang that need a GPU; the module that talks to the store is the real one.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import json
import os
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

PACKAGES = ("sglang", "lmcache", "transfer_queue", "checkpoint_engine", "vllm_omni")
MOCKED = (
    "sglang.srt.mem_cache.hybrid_cache",
    "sglang.srt.mem_cache.pool_host",
    "sglang.srt.mem_cache.memory_pool_host",
    "sglang.srt.observability",
    "sglang.srt.distributed",
)
BARE = (
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
"""Packages whose ``__init__`` imports everything there is; only their modules are wanted."""
NOT_MOCKED = ("opentelemetry", "torch_neuronx")
"""Imported where they are, and done without where they are not."""


class Missing(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self) -> None:
        self._names: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        top = name.partition(".")[0]
        is_mocked = any(name == known or name.startswith(known + ".") for known in MOCKED)
        if not is_mocked and (top in (*PACKAGES, *NOT_MOCKED, "mooncake") or not self._is_theirs(top)):
            return None
        self._names.add(top)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def _is_theirs(self, top: str) -> bool:
        """One of the packages asks for it, not a library that does without."""
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


def prepare(folder: str) -> None:
    sys.path.append(folder)
    for name in BARE:
        package = types.ModuleType(name)
        package.__path__ = [str(Path(folder, *name.split(".")))]
        sys.modules[name] = package
    finder = Missing()
    for name in MOCKED:
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
    connector.serialize_obj, connector.deserialize_obj = json.dumps_bytes, json.loads  # type: ignore[attr-defined]
    is_put, size, _ = connector.put("0", "1", "request", {"hidden": [1, 2, 3]})
    assert is_put and size > 0
    found = connector.get("0", "1", "request")
    assert found is not None and found[0] == {"hidden": [1, 2, 3]}
    connector.close()


def _json_bytes(value: Any) -> bytes:
    return json.dumps(value).encode()


json.dumps_bytes = _json_bytes  # type: ignore[attr-defined]


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


def lmcache(master: str) -> None:
    module = importlib.import_module("lmcache.v1.storage_backend.connector.mooncakestore_connector")
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    words = {name: str(value) for name, value in _config(master).items()}
    module.setup_mooncake_store(store, module.MooncakeStoreConfig(setup_config=words))
    assert store.put("key", b"value") == 0 and store.get("key") == b"value"
    lookup_module = importlib.import_module("lmcache.v1.lookup_client.mooncake_lookup_client")
    lookup = lookup_module.MooncakeLookupClient.__new__(lookup_module.MooncakeLookupClient)
    lookup.store = MooncakeDistributedStore()
    words["global_segment_size"] = "0"
    lookup_module.setup_mooncake_store(lookup.store, lookup_module.MooncakeStoreConfig(setup_config=words))
    key_type = lookup_module.CacheEngineKey

    class Named(key_type):  # type: ignore[misc,valid-type]
        def __init__(self, name: str) -> None:
            object.__setattr__(self, "_name", name)

        def to_string(self) -> str:
            return str(object.__getattribute__(self, "_name"))

    chunks = [(0, 4, Named("key")), (4, 8, Named("other"))]
    lookup.token_database = types.SimpleNamespace(process_tokens=lambda _: chunks)
    assert lookup.lookup([1] * 8) == 4
    store.close()


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


CLIENTS = (transfer_queue, vllm_omni, sglang_embeddings, sglang_hicache, lmcache, checkpoint_engine)

if __name__ == "__main__":
    prepare(sys.argv[3])
    {client.__name__: client for client in CLIENTS}[sys.argv[1]](sys.argv[2])
    print("done", flush=True)

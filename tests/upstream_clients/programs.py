# SPDX-License-Identifier: Apache-2.0
"""Calls that programs of the ecosystem make to the store, in their order and with their own checks.

Each function is one process: ``python programs.py NAME MASTER``. It prints what it found as JSON lines and
continues when it reads a line. Modelled on the calls that those programs make, without their code.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

PAGE = 64 << 10
MIB = 1 << 20

SAFE_FOR_READS = {-200, -600, -702, -703, -704, -705, -707, -900, -901}
"""After any other negative number vLLM assumes that a transfer may still write to the memory."""


def pages(seed: int, count: int, size: int = PAGE) -> Any:
    return np.random.default_rng(seed).integers(0, 256, (count, size), dtype=np.uint8)


def send(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def receive() -> Any:
    return json.loads(sys.stdin.readline())


# vLLM: blocks of every layer, several buffers per key ------


def _vllm_store(master: str, segment_bytes: int) -> Any:
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    code = store.setup(
        "127.0.0.1", "P2PHANDSHAKE", segment_bytes, 16 * MIB, "tcp", "", master, tenant_id="t1"
    )
    if code != 0:
        raise RuntimeError(f"setup: {code}")
    return store


def _layers(pool: Any, block: int) -> tuple[list[int], list[int]]:
    """Addresses and sizes of one block in every layer's pool."""
    return [int(layer[block].ctypes.data) for layer in pool], [PAGE] * len(pool)


def vllm_prefill(master: str) -> None:
    from mooncake.store import ObjectDataType, ReplicateConfig

    store = _vllm_store(master, 16 * MIB)
    pool = np.stack([pages(layer, 4) for layer in range(3)])
    assert store.register_buffer(pool.ctypes.data, pool.nbytes) == 0
    config = ReplicateConfig()
    config.preferred_segment = store.get_hostname()
    config.data_type = ObjectDataType.KVCACHE
    keys = [f"model@{block}" for block in range(4)]
    config.group_ids = ["prompt"] * len(keys)
    assert [code == 1 for code in store.batch_is_exist(keys)] == [False] * 4
    rows = [_layers(pool, block) for block in range(4)]
    put = store.batch_put_from_multi_buffers(keys, [a for a, _ in rows], [s for _, s in rows], config)
    assert len(put) == 4 and not [code for code in put if code < 0]
    again = store.batch_put_from_multi_buffers(keys, [a for a, _ in rows], [s for _, s in rows], config)
    assert not [code for code in again if code < 0], "objects that exist count as stored"
    tiers = store.batch_get_replica_desc([*keys, "model@none"])
    assert set(tiers) == set(keys)
    assert all(replicas[0].is_memory_replica() for replicas in tiers.values())
    assert not any(replicas[0].is_local_disk_replica() for replicas in tiers.values())
    send(put=keys)
    receive()
    assert store.close() == 0


def vllm_decode(master: str) -> None:
    store = _vllm_store(master, 0)
    pool = np.zeros((3, 8, PAGE), dtype=np.uint8)
    assert store.register_buffer(pool.ctypes.data, pool.nbytes) == 0
    keys = [f"model@{block}" for block in (0, 1, 2, 3, 9)]
    assert [code == 1 for code in store.batch_is_exist(keys)] == [True] * 4 + [False]
    blocks = [7, 0, 3, 5, 6]
    rows = [_layers(pool, block) for block in blocks]
    got = store.batch_get_into_multi_buffers(keys, [a for a, _ in rows], [s for _, s in rows])
    failed = [key for key, code in zip(keys, got, strict=True) if code < 0]
    assert failed == ["model@9"] and got[4] in SAFE_FOR_READS
    for at, block in enumerate(blocks[:4]):
        for layer in range(3):
            assert np.array_equal(pool[layer, block], pages(layer, 4)[at])
    assert store.remove_all(force=True) >= 4
    assert store.batch_is_exist(keys) == [0] * 5
    store.close()
    send(done=True)


def vllm_embeddings(master: str) -> None:
    """An encoder's output after a header of its own; the memory is registered for each put."""
    from mooncake.store import MooncakeDistributedStore, ObjectDataType, ReplicateConfig

    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 8 * MIB, 16 * MIB, "tcp", "", master) == 0
    config = ReplicateConfig()
    config.data_type = ObjectDataType.TENSOR
    data = pages(5, 1, 300_001)[0]
    header = np.arange(24, dtype=np.uint8)
    for address, size in ((header.ctypes.data, 24), (data.ctypes.data, data.nbytes)):
        assert store.register_buffer(address, size) == 0
    put = store.batch_put_from_multi_buffers(
        ["emb"], [[header.ctypes.data, data.ctypes.data]], [[24, data.nbytes]], config
    )
    assert put == [0]
    for address in (header.ctypes.data, data.ctypes.data):
        assert store.unregister_buffer(address) == 0
    target = np.zeros(400_000, dtype=np.uint8)
    assert store.register_buffer(target.ctypes.data, target.nbytes) == 0
    (size,) = store.batch_get_into(["emb"], [target.ctypes.data], [target.nbytes])
    assert type(size) is int and size == 24 + data.nbytes
    assert bytes(target[:24]) == bytes(header) and np.array_equal(target[24:size], data)
    store.close()
    send(done=True)


def vllm_ascend(master: str) -> None:
    from mooncake.engine import TransferEngine
    from mooncake.store import MooncakeDistributedStore

    offers = inspect.signature(MooncakeDistributedStore.setup).parameters
    assert "enable_ssd_offload" in offers or "enable_ssd_offload" in (
        MooncakeDistributedStore.setup.__doc__ or ""
    )
    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 8 * MIB, 0, "tcp", "", master, engine.get_engine()) == 0
    pool = pages(6, 4)
    assert engine.register_memory(pool.ctypes.data, pool.nbytes) == 0
    store.register_buffer(pool.ctypes.data, pool.nbytes)
    addresses = [[int(pool[0].ctypes.data), int(pool[1].ctypes.data)]]
    put = store.batch_put_from_multi_buffers(["asc"], addresses, [[PAGE, PAGE]])
    assert not [code for code in put if code < 0]
    back = [[int(pool[3].ctypes.data), int(pool[2].ctypes.data)]]
    got = store.batch_get_into_multi_buffers(["asc"], back, [[PAGE, PAGE]])
    assert not [code for code in got if code < 0]
    assert np.array_equal(pool[0], pool[3]) and np.array_equal(pool[1], pool[2])
    store.close()
    send(done=True)


# SGLang: pages of a host pool, and the direct linker's sessions ------


def _sglang_store(master: str, **more: Any) -> Any:
    """Call ``setup`` again without each argument that it does not know, which the error names."""
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    arguments = {"enable_ssd_offload": False, "ssd_offload_path": "", "tenant_id": "default", **more}
    while True:
        try:
            code = store.setup(
                "127.0.0.1", "P2PHANDSHAKE", 16 * MIB // 2, 16 * MIB, "tcp", "", master, None, **arguments
            )
            break
        except TypeError as error:
            unknown = [name for name in arguments if name in str(error)]
            if not unknown:
                raise
            arguments.pop(unknown[0])
    if code:
        raise RuntimeError(f"setup: {code}")
    return store


def sglang_hicache(master: str) -> None:
    """Never closes its store; the segment that it contributed must be unmounted anyway."""
    from mooncake.store import ReplicateConfig

    store = _sglang_store(master, a_future_argument=1)
    warm = bytes(4096)
    for _ in range(10):
        if store.put("sglang_warmup", warm) == 0:
            break
    assert store.is_exist("sglang_warmup") == 1
    assert store.get("sglang_warmup") == warm
    pool = pages(7, 16)
    if store.register_buffer(pool.ctypes.data, pool.nbytes) != 0:
        raise RuntimeError("register_buffer")
    keys = [f"hash{page}_0_{part}" for page in range(4) for part in "kv"]
    addresses = [int(page.ctypes.data) for page in pool]
    exist = store.batch_is_exist(keys)
    assert len(exist) == len(keys) and not any(code == 1 for code in exist)
    config = ReplicateConfig()
    if hasattr(config, "group_ids"):
        config.group_ids = [f"sglang-hicache:{key}" for key in keys]
    if hasattr(config, "session_ids"):
        config.session_ids = ["session"] * len(keys)
    put = store.batch_put_from(keys, addresses[:8], [PAGE] * 8, config)
    assert [code == 0 for code in put] == [True] * 8
    got = store.batch_get_into([*keys, "none"], [*addresses[8:], addresses[15]], [PAGE] * 9)
    assert [code > 0 for code in got] == [True] * 8 + [False]
    assert np.array_equal(pool[:8], pool[8:])
    both = [[addresses[0], addresses[1]]]
    assert store.batch_put_from_multi_buffers(["hybrid"], both, [[PAGE, PAGE]], ReplicateConfig()) == [0]
    both = [[addresses[2], addresses[3]]]
    assert [n > 0 for n in store.batch_get_into_multi_buffers(["hybrid"], both, [[PAGE, PAGE]])] == [True]
    store.remove_all()
    send(done=True)


def sglang_direct_linker(master: str) -> None:
    """Fetches a page's layers one range after the other, directly to the device pool's layers."""
    store = _sglang_store(master)
    layers, page_bytes = 4, 10_000
    source = pages(8, 3, layers * page_bytes)
    keys = [f"linked{page}" for page in range(3)]
    assert store.register_buffer(source.ctypes.data, source.nbytes) == 0
    assert (
        store.batch_put_from(keys, [int(p.ctypes.data) for p in source], [layers * page_bytes] * 3) == [0] * 3
    )
    pool = np.zeros((layers, 3, page_bytes), dtype=np.uint8)
    assert store.register_buffer(pool.ctypes.data, pool.nbytes) == 0
    assert store.batch_get_session_start([*keys, "none"]) == [0, 0, 0, -704]
    for some in (range(1), range(1, layers)):
        pointers = [[int(pool[layer, page].ctypes.data) for layer in some] for page in range(3)]
        sizes = [[page_bytes] * len(some)] * 3
        offsets = [[layer * page_bytes for layer in some]] * 3
        got = store.batch_get_into_multi_buffer_ranges(keys, pointers, sizes, offsets)
        assert got == [page_bytes * len(some)] * 3
    assert store.batch_get_session_end(keys) == 0
    for page in range(3):
        assert np.array_equal(pool[:, page].reshape(-1), source[page])
    send(done=True)


def sglang_embeddings(master: str) -> None:
    store = _sglang_store(master)
    data = pages(9, 2, 12_345)
    keys = ["emb_1", "emb_2"]
    assert store.register_buffer(data.ctypes.data, data.nbytes) == 0
    addresses = [int(row.ctypes.data) for row in data]
    assert [code == 1 for code in store.batch_is_exist(keys)] == [False, False]
    assert all(code == 0 for code in store.batch_put_from(keys, addresses, [12_345] * 2))
    target = np.zeros_like(data)
    assert store.register_buffer(target.ctypes.data, target.nbytes) == 0
    got = store.batch_get_into(keys, [int(row.ctypes.data) for row in target], [12_345] * 2)
    assert all(code > 0 for code in got) and np.array_equal(target, data)
    send(done=True)


# LMCache: a dictionary for setup, chunks of a pinned allocator, bytes with their metadata ------


def _lmcache_store(master: str, segment: str) -> Any:
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    store.setup(
        {
            "local_hostname": "127.0.0.1",
            "metadata_server": "P2PHANDSHAKE",
            "global_segment_size": segment,
            "local_buffer_size": "16777216",
            "protocol": "tcp",
            "device_name": "",
            "master_server_address": master,
        }
    )
    return store


def lmcache(master: str) -> None:
    import torch

    from mooncake.store import ReplicateConfig, bind_to_numa_node

    bind_to_numa_node(0)
    store = _lmcache_store(master, "16777216")
    config = ReplicateConfig()
    config.replica_num = 1
    config.preferred_segment = store.get_hostname()
    assert isinstance(config.preferred_segment, str) and config.preferred_segment
    pinned = pages(10, 8)
    assert store.register_buffer(pinned.ctypes.data, pinned.nbytes) == 0
    addresses = [int(row.ctypes.data) for row in pinned]
    keys = [f"fmt@model@{n}" for n in range(3)]
    assert not store.is_exist(keys[0])
    put = store.batch_put_from(keys[:2], addresses[:2], [PAGE] * 2, config)
    assert not any(code < 0 for code in put)
    assert not store.put_from(keys[2], addresses[2], PAGE, config) < 0
    assert store.is_exist(keys[0])
    leading = 0
    for code in store.batch_is_exist([*keys, "fmt@model@none"]):
        if code != 1:
            break
        leading += 1
    assert leading == 3
    got = store.batch_get_into([*keys, "none"], addresses[3:7], [PAGE] * 4)
    assert [n > 0 and n == PAGE for n in got] == [True, True, True, False]
    assert np.array_equal(pinned[3:6], pinned[:3])

    metadata = b"\1" * 28

    async def put_with_metadata() -> None:
        view = memoryview(pinned[0])
        await asyncio.wait_for(asyncio.to_thread(store.put_parts, "meta", metadata, view), 1.0)

    asyncio.run(put_with_metadata())
    found, missing = store.batch_get_buffer(["meta", "none"])
    assert missing is None and found is not None
    view = memoryview(found)
    assert bytes(view[:28]) == metadata
    tensor = torch.frombuffer(found, dtype=torch.uint8, offset=28)
    assert np.array_equal(tensor.numpy(), pinned[0])
    lookup = _lmcache_store(master, "0")
    assert lookup.batch_is_exist([*keys, "none"]) == [1, 1, 1, 0]
    lookup.close()
    assert store.unregister_buffer(pinned.ctypes.data) == 0
    store.close()
    send(done=True)


# vLLM-omni, lmdeploy ------


def _omni_store(master: str, segment_bytes: int) -> tuple[Any, Any]:
    from mooncake import MooncakeDistributedStore, ReplicateConfig

    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", segment_bytes, 16 * MIB, "tcp", "", master) == 0
    config = ReplicateConfig()
    config.with_soft_pin = True
    return store, config


def omni_sender(master: str) -> None:
    store, config = _omni_store(master, 8 * MIB)
    send(waiting=True)
    receive()
    assert store.put("request/stage0", b"payload" * 10_000, config) == 0
    receive()
    store.close()


def omni_receiver(master: str) -> None:
    store, _ = _omni_store(master, 0)
    send(size_bytes=len(store.get("request/stage0")))
    for _ in range(100_000):
        data = store.get("request/stage0")
        if data:
            break
    assert data == b"payload" * 10_000
    store.close()
    send(done=True)


def lmdeploy(master: str) -> None:
    from mooncake.store import MooncakeDistributedStore, ReplicateConfig

    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 8 * MIB, 0, "tcp", "", master) == 0
    pool = pages(11, 4)
    assert store.register_buffer(pool.ctypes.data, pool.nbytes) == 0
    rows = [[int(pool[0].ctypes.data), int(pool[1].ctypes.data)]]
    sizes = [[PAGE, PAGE]]

    def plain(results: Any) -> bool:
        return isinstance(results, list) and all(type(code) is int for code in results)

    before = store.batch_is_exist(["lm", "none"])
    assert plain(before) and before == [0, 0]
    put = store.batch_put_from_multi_buffers(["lm"], rows, sizes, ReplicateConfig())
    assert plain(put) and put == [0]
    rows = [[int(pool[2].ctypes.data), int(pool[3].ctypes.data)]]
    got = store.batch_get_into_multi_buffers(["lm"], rows, sizes)
    assert plain(got) and got == [2 * PAGE]
    assert np.array_equal(pool[:2], pool[2:])
    after = store.batch_is_exist(["lm", "none"])
    assert plain(after) and after == [1, 0]
    store.close()
    send(done=True)


# TransferQueue: tensors that are replaced, from several threads ------


def transfer_queue(master: str) -> None:
    from mooncake.store import MooncakeDistributedStore, ReplicateConfig

    config = ReplicateConfig()
    config.with_hard_pin = True
    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 16 * MIB, 16 * MIB, "tcp", "", master) == 0

    def batch(number: int) -> list[str]:
        keys = [f"{number}@{field}" for field in range(4)]
        for seed in (number, number + 100):  # the second time replaces the first
            data = pages(seed, 4)
            addresses = [int(row.ctypes.data) for row in data]
            store.register_buffer(data.ctypes.data, data.nbytes)
            codes = store.batch_upsert_from(keys, addresses, [PAGE] * 4, config=config)
            for _ in range(3):
                failed = [at for at, code in enumerate(codes) if code != 0]
                if not failed:
                    break
                redone = store.batch_upsert_from(
                    [keys[at] for at in failed],
                    [addresses[at] for at in failed],
                    [PAGE] * len(failed),
                    config=config,
                )
                for at, code in zip(failed, redone, strict=True):
                    codes[at] = code
            assert codes == [0] * 4
            store.unregister_buffer(data.ctypes.data)
        target = np.zeros((4, PAGE), dtype=np.uint8)
        store.register_buffer(target.ctypes.data, target.nbytes)
        got = store.batch_get_into(keys, [int(row.ctypes.data) for row in target], [PAGE] * 4)
        assert not [code for code in got if code < 0]
        store.unregister_buffer(target.ctypes.data)
        assert np.array_equal(target, pages(number + 100, 4))
        return keys

    with ThreadPoolExecutor(4) as pool:
        keys = [key for some in pool.map(batch, range(8)) for key in some]
    removed = store.batch_remove([*keys, "never"], force=True)
    assert all(code in (0, -704) for code in removed) and removed[-1] == -704
    assert store.batch_is_exist(keys) == [0] * len(keys)
    store.close()
    send(done=True)


# checkpoint-engine: its part of the transfer engine ------


def _checkpoint_engine() -> tuple[Any, str]:
    from mooncake.engine import TransferEngine

    for _ in range(8):
        engine = TransferEngine()
        if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0:
            return engine, f"127.0.0.1:{engine.get_rpc_port()}"
    raise RuntimeError("initialize")


def checkpoint_owner(_: str) -> None:
    engine, session = _checkpoint_engine()
    buckets = [pages(12, 1, MIB)[0], pages(13, 1, 2 * MIB)[0]]
    pointers, sizes = [int(b.ctypes.data) for b in buckets], [b.nbytes for b in buckets]
    assert engine.batch_register_memory(pointers, sizes) == 0
    send(session=session, pointers=pointers, sizes=sizes)
    receive()
    assert engine.batch_unregister_memory(pointers) == 0


def checkpoint_reader(_: str) -> None:
    engine, _session = _checkpoint_engine()
    send(ready=True)
    owner = receive()
    target = np.zeros(3 * MIB, dtype=np.uint8)
    assert engine.batch_register_memory([int(target.ctypes.data)], [target.nbytes]) == 0
    at, buffers = int(target.ctypes.data), []
    for size in owner["sizes"]:
        buffers.append(at)
        at += size
    assert engine.batch_transfer_sync_read(owner["session"], buffers, owner["pointers"], owner["sizes"]) == 0
    assert np.array_equal(target[:MIB], pages(12, 1, MIB)[0])
    assert np.array_equal(target[MIB:], pages(13, 1, 2 * MIB)[0])
    assert engine.batch_unregister_memory([int(target.ctypes.data)]) == 0
    send(done=True)


def _programs() -> Iterator[Callable[[str], None]]:
    yield from (vllm_prefill, vllm_decode, vllm_embeddings, vllm_ascend)
    yield from (sglang_hicache, sglang_direct_linker, sglang_embeddings, lmcache)
    yield from (omni_sender, omni_receiver, lmdeploy, transfer_queue, checkpoint_owner, checkpoint_reader)


if __name__ == "__main__":
    {program.__name__: program for program in _programs()}[sys.argv[1]](sys.argv[2])

# SPDX-License-Identifier: Apache-2.0
"""The store behind LMCache, called as LMCache calls it, on doubles of its memory and its keys.

With LMCache's own modules: ``tests/upstream_clients/test_real_plugins.py``, which needs them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from mooncake.connectors.lmcache import Chunks, MooncakeBackend, refuse_adapters
from mooncake.errors import InvalidArgument
from tests.connectors.held_loop import Hold, held
from tests.contract.connectors import StoreConnector

LAYERS, TOKENS, HIDDEN = 3, 16, 64
DONE_S = 60.0

SHAPE = torch.Size((2, 3, 16, 64))


class MemoryFormat(enum.Enum):
    KV_2LTD = 1
    KV_T2D = 2
    KV_MLA_FMT = 3


@pytest.fixture(autouse=True)
def formats(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("lmcache.v1.memory_management")
    module.MemoryFormat = MemoryFormat
    monkeypatch.setitem(sys.modules, "lmcache.v1.memory_management", module)


@dataclasses.dataclass(frozen=True)
class Key:
    """LMCache's ``CacheEngineKey``."""

    chunk_hash: int
    dtype: torch.dtype = torch.float32
    tags: tuple[tuple[str, str], ...] | None = None


class Chunk:
    """LMCache's ``MemoryObj``."""

    def __init__(self, shapes: list[torch.Size], fmt: MemoryFormat, seed: int | None = None) -> None:
        (self._shape,) = shapes
        self._fmt = fmt
        generator = torch.Generator().manual_seed(seed or 0)
        self.tensor = torch.zeros(shapes[0]) if seed is None else torch.randn(shapes[0], generator=generator)
        self.ref_count = 1

    @property
    def data_ptr(self) -> int:
        return self.tensor.data_ptr()

    def get_size(self) -> int:
        return self.tensor.numel() * 4

    def get_shapes(self) -> list[torch.Size]:
        return [self._shape]

    def get_dtypes(self) -> list[torch.dtype]:
        return [torch.float32]

    def get_memory_format(self) -> MemoryFormat:
        return self._fmt

    def ref_count_up(self) -> None:
        self.ref_count += 1

    def ref_count_down(self) -> None:
        self.ref_count -= 1


def shapes(num_tokens: int = TOKENS, parts: int = 2) -> list[torch.Size]:
    return [torch.Size((parts, LAYERS, num_tokens, HIDDEN))]


def chunk(seed: int, num_tokens: int = TOKENS, parts: int = 2) -> Chunk:
    fmt = MemoryFormat.KV_2LTD if parts == 2 else MemoryFormat.KV_MLA_FMT
    return Chunk(shapes(num_tokens, parts), fmt, seed)


class Engines:
    """Backends as LMCache makes them, closed at the end."""

    def __init__(self, address: str, weights: str, lookup_timeout_s: float = 20.0) -> None:
        self._extra: dict[str, Any] = {"mooncake_store_addr": address, "weights_digest": weights}
        self._extra |= {"lookup_timeout_s": lookup_timeout_s, "load_timeout_s": 20.0}
        self._open: list[MooncakeBackend] = []
        self.allocated: list[Chunk] = []
        self.room = 100

    def start(self, extra: dict[str, Any] | None = None, **changes: Any) -> MooncakeBackend:
        chunk_size, parts = changes.pop("chunk_size", TOKENS), 1 if changes.get("use_mla") else 2
        fields: dict[str, Any] = {
            "model_name": "model",
            "engine_id": None,
            "use_mla": False,
            "worker_id": 0,
            "world_size": 1,
            "kv_dtype": torch.float32,
            "kv_shape": (LAYERS, parts, chunk_size, 1, HIDDEN),
            "chunk_size": chunk_size,
            "get_shapes": lambda num_tokens=chunk_size: shapes(num_tokens, parts),
            "get_dtypes": lambda: [torch.float32],
        }
        config = types.SimpleNamespace(
            extra_config={**self._extra, **(extra or {})},
            use_layerwise=changes.pop("use_layerwise", False),
            enable_blending=False,
            pre_caching_hash_algorithm="builtin",
        )
        metadata = types.SimpleNamespace(**{**fields, **changes})
        backend = MooncakeBackend(
            config=config, metadata=metadata, local_cpu_backend=self, dst_device="cpu", loop=None
        )
        self._open.append(backend)
        return backend

    def allocate(self, shapes: list[torch.Size], dtypes: Any, fmt: Any, busy_loop: bool) -> Chunk | None:
        """LMCache's ``LocalCPUBackend.allocate``."""
        assert not busy_loop, "a load does not wait for memory"
        if len(self.allocated) == self.room:
            return None
        self.allocated.append(Chunk(shapes, fmt))
        return self.allocated[-1]

    def close(self) -> None:
        for backend in self._open:
            backend.close()


@pytest.fixture
def engines(daemon: StoreConnector, request: pytest.FixtureRequest) -> Iterator[Engines]:
    running = Engines(daemon.address, str(request.node.name))
    yield running
    running.close()


def put(backend: MooncakeBackend, keys: list[Key], chunks: list[Chunk]) -> list[Key]:
    """The keys that were stored, once the operation has ended."""
    stored: list[Key] = []
    all_down = threading.Event()
    for one in chunks:
        one.ref_count_down = _watched(one, chunks, all_down)  # type: ignore[method-assign]
    backend.batched_submit_put_task(keys, chunks, on_complete_callback=stored.append)
    assert all_down.wait(DONE_S)
    assert not any(backend.exists_in_put_tasks(key) for key in keys)
    # The callback of the last chunk comes after its memory was released; a lookup takes the same thread.
    backend.contains(keys[0])
    return stored


def _watched(one: Chunk, chunks: list[Chunk], all_down: threading.Event) -> Any:
    def down() -> None:
        one.ref_count -= 1
        if all(each.ref_count == 1 for each in chunks):
            all_down.set()

    return down


@pytest.mark.processes
def test_chunks_come_back(engines: Engines) -> None:
    writer, reader = engines.start(), engines.start()
    keys = [Key(number) for number in range(3)]
    chunks = [chunk(1), chunk(2, num_tokens=5)]
    assert reader.batched_contains(keys) == 0
    assert put(writer, keys[:2], chunks) == keys[:2]
    assert reader.contains(keys[1]) and reader.pin(keys[1]) and reader.unpin(keys[1])
    assert reader.batched_contains(keys) == 2
    found = reader.batched_get_blocking([keys[1], keys[2], keys[0]])
    assert found[0] is not None and found[1] is None and found[2] is not None
    assert torch.equal(found[0].tensor, chunks[1].tensor), "the last chunk of a prompt is shorter"
    assert torch.equal(found[2].tensor, chunks[0].tensor)
    single = reader.get_blocking(keys[0])
    assert single is not None and torch.equal(single.tensor, chunks[0].tensor)
    assert reader.remove(keys[0]) and not reader.contains(keys[0])


@pytest.mark.processes
async def test_chunks_come_back_on_the_engines_loop(engines: Engines) -> None:
    backend, keys = engines.start(), [Key(number) for number in range(4)]
    chunks = [chunk(number + 1) for number in range(3)]
    await asyncio.to_thread(put, backend, [keys[0], keys[1], keys[3]], chunks)
    assert await backend.batched_async_contains("lookup", keys) == 2
    found = await backend.batched_get_non_blocking("lookup", keys)
    assert len(found) == 2, "up to the first gap"
    assert all(torch.equal(one.tensor, was.tensor) for one, was in zip(found, chunks, strict=False))


@pytest.mark.processes
@pytest.mark.parametrize(
    "changes",
    [
        {"chunk_size": 2 * TOKENS},
        {"use_mla": True},
        {"kv_dtype": torch.float16},
        {"kv_shape": (LAYERS, 2, TOKENS, 2, HIDDEN // 2)},
        {"worker_id": 1, "world_size": 2},
        {"extra": {"weights_digest": "others"}},
        {"extra": {"extra_backend_tag": "experiment"}},
        {"extra": {"tenant_id": "others"}},
    ],
    ids=["chunk size", "kind", "dtype", "heads", "worker", "weights", "tag", "tenant"],
)
def test_chunks_of_another_identity_are_not_found(engines: Engines, changes: dict[str, Any]) -> None:
    keys = [Key(1)]
    assert put(engines.start(), keys, [chunk(1)]) == keys
    other = engines.start(**changes)
    assert other.batched_contains(keys) == 0
    assert other.get_blocking(keys[0]) is None
    assert not engines.allocated


@pytest.mark.processes
def test_tags_are_distinguished(engines: Engines) -> None:
    backend = engines.start()
    put(backend, [Key(1, tags=(("tenant", "a"),))], [chunk(1)])
    assert backend.batched_contains([Key(1)]) == 0


@pytest.mark.processes
def test_latents_of_one_worker_are_shared_where_lmcache_is_configured_so(engines: Engines) -> None:
    extra, keys = {"remote_enable_mla_worker_id_as0": True}, [Key(1), Key(2)]
    first, second = (
        engines.start(extra, use_mla=True, worker_id=number, world_size=2) for number in range(2)
    )
    assert put(first, keys[:1], [chunk(1, parts=1)]) == keys[:1]
    second.batched_submit_put_task(keys[1:], [chunk(2, parts=1)])
    assert second.batched_contains(keys) == 1, "only the first worker stores"


@pytest.mark.processes
def test_chunks_end_where_memory_runs_out(engines: Engines) -> None:
    backend, keys = engines.start(), [Key(1), Key(2)]
    put(backend, keys, [chunk(1), chunk(2)])
    engines.room = 1
    found = backend.batched_get_blocking(keys)
    assert [one is not None for one in found] == [True, False]


@pytest.mark.processes
def test_another_order_is_not_stored(engines: Engines) -> None:
    backend, odd = engines.start(), Chunk(shapes(), MemoryFormat.KV_T2D, 1)
    backend.batched_submit_put_task([Key(1)], [odd])
    assert not backend.exists_in_put_tasks(Key(1)) and odd.ref_count == 1


@pytest.mark.processes
def test_layerwise_mode_is_refused(engines: Engines) -> None:
    with pytest.raises(InvalidArgument, match="use_layerwise"):
        engines.start(use_layerwise=True)


@pytest.mark.processes
def test_after_clearing_no_chunk_from_before_is_found_nor_one_that_another_engine_stores(
    engines: Engines,
) -> None:
    """The weights were replaced here, and the other engine still has the old ones."""
    updated, behind, tagged = engines.start(), engines.start(), engines.start({"extra_backend_tag": "other"})
    keys = [Key(1), Key(2)]
    for backend in (updated, tagged):
        assert put(backend, keys, [chunk(1), chunk(2)]) == keys
    assert updated.clear() == 2 * TOKENS
    assert (updated.batched_contains(keys), behind.batched_contains(keys)) == (0, 0)
    assert tagged.batched_contains(keys) == 2
    assert put(behind, keys, [chunk(1), chunk(2)]) == keys
    assert updated.batched_contains(keys) == 0
    assert updated.get_blocking(keys[0]) is None
    assert put(updated, keys[:1], [chunk(3)]) == keys[:1]
    assert (updated.batched_contains(keys), behind.batched_contains(keys)) == (1, 2)
    assert updated.clear() == TOKENS
    assert updated.clear() == 0


@pytest.mark.processes
def test_chunks_stored_before_a_worker_started_are_cleared(engines: Engines) -> None:
    """It has named none of them yet."""
    keys = [Key(1)]
    assert put(engines.start(), keys, [chunk(1)]) == keys
    assert engines.start().clear() == TOKENS
    assert engines.start().batched_contains(keys) == 0


@pytest.mark.processes
async def test_a_corrupted_chunk_is_a_miss_and_its_memory_is_released(
    daemon: StoreConnector, engines: Engines
) -> None:
    backend, keys = engines.start(), [Key(1), Key(2), Key(3)]
    await asyncio.to_thread(put, backend, keys, [chunk(1), chunk(2), chunk(3)])
    (name,) = backend._chunks.keys(keys[1:2])
    await daemon.spoil(Named(name), b"", 100)
    found = await asyncio.to_thread(backend.batched_get_blocking, keys)
    assert [one is not None for one in found] == [True, False, True]
    assert [one.ref_count for one in engines.allocated] == [1, 0, 1]


class Named:
    """An identity of one object."""

    layout: Any = None

    def __init__(self, key: str) -> None:
        self._key = key

    def key(self, block_hash: bytes) -> str:
        return self._key


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_without_the_daemon_everything_is_a_miss(tmp_path: Path, number: int) -> None:
    daemon = StoreConnector()
    daemon.start(tmp_path)
    engines = Engines(daemon.address, "gone", lookup_timeout_s=5.0)
    keys, last = [Key(1), Key(2)], chunk(3)
    try:
        backend = engines.start()
        await asyncio.to_thread(put, backend, keys, [chunk(1), chunk(2)])
        daemon.signal(number)
        assert await asyncio.to_thread(backend.batched_get_blocking, keys) == [None, None]
        assert await backend.batched_async_contains("lookup", keys) == 0
        assert await backend.batched_get_non_blocking("lookup", keys) == []
        assert await asyncio.to_thread(put, backend, [Key(3)], [last]) == []
        assert last.ref_count == 1, "the backend has released it"
        assert not await asyncio.to_thread(backend.remove, keys[0])
        await asyncio.to_thread(backend.close)
        assert not backend.contains(keys[0]), "after close, too, it is a miss"
    finally:
        daemon.stop()
        await asyncio.to_thread(engines.close)


PATIENT_S = 1.0
GIVEN_UP_S = 3.0
"""Much longer than LMCache's timeouts below."""


class Recycled(Chunk):
    """Memory that LMCache gives to another prefix as soon as its reference count is zero."""

    def ref_count_down(self) -> None:
        super().ref_count_down()
        if self.ref_count == 0:
            self.tensor.fill_(-1.0)


@pytest.mark.processes
@pytest.mark.parametrize("is_on_its_loop", [False, True], ids=["blocking", "on its loop"])
def test_chunks_of_an_abandoned_load_are_not_overwritten(
    daemon: StoreConnector, engines: Engines, monkeypatch: pytest.MonkeyPatch, is_on_its_loop: bool
) -> None:
    """The loop is blocked between the lookup and the load; LMCache gets its memory back only after that."""
    impatient = Engines(daemon.address, engines._extra["weights_digest"], 0.15)
    impatient._extra["load_timeout_s"] = PATIENT_S
    monkeypatch.setattr(sys.modules[__name__], "Chunk", Recycled)
    try:
        backend, keys = impatient.start(), [Key(1)]
        put(engines.start(), keys, [chunk(1)])
        loop, is_back, allocate = backend._pages._session.loop, threading.Event(), impatient.allocate
        hold = Hold()

        def allocate_and_hold(*args: Any, **kwargs: Any) -> Any:
            loop.call_soon_threadsafe(hold.begin)
            hold.wait()
            return allocate(*args, **kwargs)

        monkeypatch.setattr(impatient, "allocate", allocate_and_hold)

        def engine() -> list[Any]:
            found: list[Any] = [None]
            while not hold.has_begun():  # a slow machine: the lookup was a miss
                if is_on_its_loop:
                    found = asyncio.run(backend.batched_get_non_blocking("lookup", keys)) or [None]
                else:
                    found = backend.batched_get_blocking(keys)
            is_back.set()
            return found

        with ThreadPoolExecutor(1) as thread:
            answer = thread.submit(engine)
            hold.wait()
            is_back.wait(GIVEN_UP_S)
            hold.release()
            (found,) = answer.result(DONE_S)
        backend.close()
        (memory,) = impatient.allocated
        if found is None:
            assert memory.ref_count == 0 and bool((memory.tensor == -1.0).all()), "another prefix's memory"
        else:
            assert torch.equal(found.tensor, chunk(1).tensor)
    finally:
        impatient.close()


@pytest.mark.processes
def test_chunks_of_a_save_that_takes_longer_than_lmcache_waits_are_kept_until_it_has_ended(
    daemon: StoreConnector, engines: Engines
) -> None:
    impatient = Engines(daemon.address, engines._extra["weights_digest"], 0.15)
    impatient._extra["load_timeout_s"] = PATIENT_S
    try:
        backend, keys, one = impatient.start(), [Key(1)], chunk(1)
        assert not backend.contains(keys[0])
        is_down = threading.Event()
        one.ref_count_down = _watched(one, [one], is_down)  # type: ignore[method-assign]
        with held(backend._pages._session.loop):
            backend.batched_submit_put_task(keys, [one])
            assert not is_down.wait(GIVEN_UP_S), "something may still read it"
        assert is_down.wait(DONE_S)
        one.tensor.fill_(-1.0)
        backend.close()
        found = engines.start().get_blocking(keys[0])
        assert found is None or torch.equal(found.tensor, chunk(1).tensor)
    finally:
        impatient.close()


def chunks_of(**extra: Any) -> Chunks:
    config = types.SimpleNamespace(pre_caching_hash_algorithm="builtin", enable_blending=False)
    metadata = types.SimpleNamespace(
        model_name="model",
        engine_id="e",
        use_mla=False,
        worker_id=0,
        world_size=1,
        kv_dtype=torch.float32,
        kv_shape=(3, 2, 16, 1, 64),
        chunk_size=16,
        get_shapes=lambda num_tokens=16: [torch.Size((2, 3, num_tokens, 64))],
        get_dtypes=lambda: [torch.float32],
    )
    return Chunks(config, metadata, {"weights_digest": "w", **extra})


def key_of(some: Chunks) -> str:
    (name,) = some.keys([types.SimpleNamespace(chunk_hash=1, dtype=torch.float32, tags=None)])
    return name


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """vLLM in this process, with a configuration or without."""

    def start(version: str = "0.32", is_known: bool = True, **changes: Any) -> None:
        engine: Any = types.ModuleType("vllm")
        engine.__version__ = version
        fields: dict[str, Any] = {"rope_theta": 1.0, "quantization": None, "cache_dtype": "auto", **changes}
        hf_config = types.SimpleNamespace(to_dict=lambda: {"rope_theta": fields["rope_theta"]})
        model = types.SimpleNamespace(
            hf_config=hf_config,
            model="model",
            revision=None,
            dtype=torch.float16,
            quantization=fields["quantization"],
            disable_sliding_window=False,
        )
        known = types.SimpleNamespace(
            model_config=model,
            cache_config=types.SimpleNamespace(cache_dtype=fields["cache_dtype"]),
            load_config=types.SimpleNamespace(
                load_format=fields.get("load_format", "auto"), download_dir=None
            ),
            lora_config=fields.get("lora_config"),
        )
        config = known if is_known else None
        settings: Any = types.ModuleType("vllm.config")
        settings.get_current_vllm_config_or_none = lambda: config
        monkeypatch.setitem(sys.modules, "vllm", engine)
        monkeypatch.setitem(sys.modules, "vllm.config", settings)

    return start


@pytest.mark.parametrize(
    "change",
    [{"version": "0.33"}, {"rope_theta": 2.0}, {"quantization": "fp8"}, {"cache_dtype": "fp8_e5m2"}],
    ids=lambda change: next(iter(change)),
)
def test_an_engine_with_other_values_or_another_layout_finds_nothing(
    vllm: Callable[..., None], change: dict[str, Any]
) -> None:
    vllm()
    first = key_of(chunks_of())
    assert key_of(chunks_of()) == first
    vllm(**change)
    assert key_of(chunks_of()) != first


def test_an_unknown_engine_shares_with_itself_only_unless_the_user_gives_its_facts(
    vllm: Callable[..., None],
) -> None:
    vllm(is_known=False)
    one, other = chunks_of(), chunks_of()
    assert key_of(one) == key_of(other), "the ranks of one engine"
    other._metadata.engine_id = "f"
    assert key_of(one) != key_of(Chunks(_config(), other._metadata, {"weights_digest": "w"}))
    vouched = [
        key_of(Chunks(_config(), some._metadata, {"weights_digest": "w", "engine_facts": "ours"}))
        for some in (one, other)
    ]
    assert vouched[0] == vouched[1]


def test_an_engine_of_vllm_with_adapters_is_refused(vllm: Callable[..., None]) -> None:
    refuse_adapters()
    vllm()
    refuse_adapters()
    vllm(lora_config=types.SimpleNamespace(max_loras=1))
    with pytest.raises(InvalidArgument, match=r"lora_config.*adapters"):
        Engines("host:1", "w").start()
    with pytest.raises(InvalidArgument, match="lora_config"):
        Engines("host:1", "w").start({"engine_facts": "ours"})


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """SGLang in this process, with arguments."""

    def start(**arguments: Any) -> None:
        monkeypatch.setitem(sys.modules, "sglang", types.ModuleType("sglang"))
        given = types.SimpleNamespace(**arguments)
        monkeypatch.setattr("mooncake.connectors.lmcache.sglang_arguments", lambda: given)

    return start


@pytest.mark.parametrize("name", ["enable_lora", "lora_paths"])
def test_an_engine_of_sglang_with_adapters_is_refused(sglang: Callable[..., None], name: str) -> None:
    sglang(enable_lora=None, lora_paths=None)
    refuse_adapters()
    sglang(**{name: ["a=/adapter"]})
    with pytest.raises(InvalidArgument, match=rf"{name}.*adapters"):
        Engines("host:1", "w").start()


def test_weights_that_may_not_be_the_folders_are_one_engines(
    tmp_path: Path, vllm: Callable[..., None], sglang: Callable[..., None]
) -> None:
    (tmp_path / "model.bin").write_bytes(bytes(100))
    metadata = chunks_of()._metadata
    metadata.model_name = str(tmp_path)

    def name(engine_id: str) -> str:
        metadata.engine_id = engine_id
        return key_of(Chunks(_config(), metadata, {}))

    for start, unknown in (
        (vllm, {"load_format": "dummy"}),
        (vllm, {"load_format": "tensorizer"}),
        (sglang, {"custom_weight_loader": ["a.load"]}),
    ):
        start()
        assert name("e") == name("f")
        start(**unknown)
        assert name("e") != name("f")
        start()


def _config() -> Any:
    return types.SimpleNamespace(pre_caching_hash_algorithm="builtin", enable_blending=False)


def test_a_size_that_no_number_of_tokens_has_is_no_chunk() -> None:
    some, row_bytes = chunks_of(), 2 * 3 * 64 * 4
    assert some.shapes_of(5 * row_bytes) == [torch.Size((2, 3, 5, 64))]
    assert some.shapes_of(5 * row_bytes + 4) is None
    assert some.shapes_of(0) is None and some.shapes_of(17 * row_bytes) is None

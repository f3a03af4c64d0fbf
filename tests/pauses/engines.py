# SPDX-License-Identifier: Apache-2.0
"""Engines that save and load through our connectors, each with the calls of the engine that it simulates.

An engine has a few blocks of memory. ``save`` and ``load`` return when the connector has released them, and
the caller reuses them at once. ``DirectEngine`` sends blocks to another process instead of a store: its
"save" offers them and its "load" receives them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import hashlib
import sys
import threading
import types
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mooncake.connectors import pages, peer_push
from mooncake.connectors.block_transfer import DEFAULTS, RankTransfer, Shards, TransferReport
from mooncake.connectors.memory import SlabMemory
from mooncake.connectors.pages import Page, Pages
from mooncake.connectors.peer_push import BlockOffer, BlockRequest, Receiver, Sender
from mooncake.connectors.planner import LoadPlan, SavePlan
from mooncake.connectors.session import PoolSession, PoolSettings, TransferThread
from mooncake.connectors.store_link import LinkSettings
from mooncake.kvlayout import ForeignIdentity, SlabLayout
from mooncake.prefix import BlockHash
from tests.connectors.sglang_pools import MhaPool, storage_config, tokens_of

Bytes = npt.NDArray[np.uint8]

NUM_BLOCKS = 4
LONGEST_S = 300.0
"""Upper bound of any operation here; a longer one has hung."""


def content(name: str, size_bytes: int) -> Bytes:
    """Content that belongs to ``name``; different for all names."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    return np.random.default_rng(seed).integers(0, 256, size_bytes, dtype=np.uint8)


@dataclasses.dataclass(frozen=True)
class Patience:
    """Timeouts of an engine for its store, or for another engine."""

    lookup_s: float
    load_s: float
    grace_s: float
    """Timeout of a direct transfer."""

    @property
    def link(self) -> LinkSettings:
        return LinkSettings(self.lookup_s, self.load_s, retry_after_s=0.01)


SHORT = Patience(0.1, 0.4, 0.1)
USUAL = Patience(DEFAULTS.lookup_timeout_s, DEFAULTS.load_timeout_s, peer_push.GRACE_S)
GENEROUS = Patience(20.0, 20.0, 5.0)
"""Timeouts of the engine that checks."""


class Engine(ABC):
    """Some blocks of memory, and a connector."""

    block_bytes: int
    loop: asyncio.AbstractEventLoop
    """The connector's."""

    @abstractmethod
    def fill(self, number: int, data: Bytes) -> None: ...

    @abstractmethod
    def block(self, number: int) -> Bytes: ...

    @abstractmethod
    def save(self, names: Sequence[str]) -> None: ...

    @abstractmethod
    def load(self, names: Sequence[str]) -> list[bool]: ...

    @abstractmethod
    def close(self) -> None: ...

    def fill_all(self, names: Sequence[str]) -> None:
        for number, name in enumerate(names):
            self.fill(number, content(name, self.block_bytes))

    def wrong(self, names: Sequence[str]) -> list[int]:
        """Blocks whose content does not belong to their names."""
        pairs = ((number, content(name, self.block_bytes)) for number, name in enumerate(names))
        return [number for number, expected in pairs if not np.array_equal(self.block(number), expected)]

    def settle(self) -> None:
        """Wait until no operation is in progress on the loop."""

        async def others() -> None:
            rest = asyncio.all_tasks() - {asyncio.current_task()}
            if rest:
                await asyncio.wait(rest, timeout=0.5)
            await asyncio.sleep(0.02)

        asyncio.run_coroutine_threadsafe(others(), self.loop).result(LONGEST_S)


def _ask_again_at_once() -> None:
    """Disable the breaker; otherwise operations after a pause would be misses without a request."""
    vars(pages)["DEFAULTS"] = dataclasses.replace(DEFAULTS, retry_after_s=0.01)


class PagesEngine(Engine):
    """``Pages``; a block is two pieces."""

    def __init__(self, address: str, patience: Patience) -> None:
        self._client = Pages(PoolSettings(address), patience.link)
        self.loop = self._client._session.loop
        self.block_bytes = 1 << 20
        self._pieces = np.zeros((NUM_BLOCKS, 2, self.block_bytes // 2), dtype=np.uint8)
        self._client.register([(self._pieces.ctypes.data, self._pieces.nbytes)])

    def fill(self, number: int, data: Bytes) -> None:
        self._pieces[number] = data.reshape(2, -1)

    def block(self, number: int) -> Bytes:
        found: Bytes = self._pieces[number].reshape(-1)
        return found

    def _pages(self, names: Sequence[str]) -> list[Page]:
        pieces = [[(one.ctypes.data, one.nbytes) for one in block] for block in self._pieces]
        return [Page(name, spans) for name, spans in zip(names, pieces, strict=True)]

    def save(self, names: Sequence[str]) -> None:
        self._client.save(self._pages(names))

    def load(self, names: Sequence[str]) -> list[bool]:
        return self._client.load(self._pages(names))

    def close(self) -> None:
        self._client.close()


class SglangEngine(Engine):
    """SGLang's HiCache over a double of its host pool."""

    def __init__(self, address: str, patience: Patience) -> None:
        from mooncake.connectors.sglang import MooncakeHiCache

        _ask_again_at_once()
        self._pool = MhaPool("page_first", 1, tokens=64)
        extra: dict[str, Any] = {"mooncake_store_addr": address, "weights_digest": "w", "interface_v1": 1}
        extra |= {"lookup_timeout_s": patience.lookup_s, "load_timeout_s": patience.load_s}
        self._client = MooncakeHiCache(storage_config(extra_config=extra))
        self._client.register_mem_pool_host(self._pool)
        self.loop = self._client._pages._session.loop
        self.block_bytes = self.block(0).nbytes
        self._indices = tokens_of(list(range(NUM_BLOCKS)), self._pool.page_size)

    def _page(self, number: int) -> torch.Tensor:
        size = self._pool.page_size
        return self._pool.kv_buffer[:, number * size : (number + 1) * size]

    def fill(self, number: int, data: Bytes) -> None:
        page = self._page(number)
        page.view(torch.int32).copy_(torch.from_numpy(data.view(np.int32)).reshape(page.shape))

    def block(self, number: int) -> Bytes:
        found: Bytes = self._page(number).contiguous().view(torch.uint8).numpy().reshape(-1)
        return found

    def save(self, names: Sequence[str]) -> None:
        self._client.batch_set_v1(list(names), self._indices)

    def load(self, names: Sequence[str]) -> list[bool]:
        return self._client.batch_get_v1(list(names), self._indices)

    def close(self) -> None:
        self._client.close()


class _Chunk:
    """LMCache's ``MemoryObj``, in one of the engine's blocks."""

    def __init__(self, owner: LmcacheEngine, number: int) -> None:
        self._owner, self.number, self.ref_count = owner, number, 1

    @property
    def data_ptr(self) -> int:
        return int(self._owner.memory[self.number].ctypes.data)

    def get_size(self) -> int:
        return self._owner.block_bytes

    def get_shapes(self) -> list[torch.Size]:
        return self._owner.shapes()

    def get_dtypes(self) -> list[torch.dtype]:
        return [torch.float32]

    def get_memory_format(self) -> object:
        return _Format.KV_2LTD

    def ref_count_up(self) -> None:
        self.ref_count += 1

    def ref_count_down(self) -> None:
        self.ref_count -= 1
        self._owner.came_back.set()


class _Format(enum.Enum):
    KV_2LTD = 1
    KV_MLA_FMT = 3


class LmcacheEngine(Engine):
    """The plugin of LMCache, called as LMCache calls it: alternately on threads and on a loop."""

    def __init__(self, address: str, patience: Patience) -> None:
        from mooncake.connectors.lmcache import MooncakeBackend

        _ask_again_at_once()
        module: Any = types.ModuleType("lmcache.v1.memory_management")
        module.MemoryFormat = _Format
        sys.modules.setdefault("lmcache.v1.memory_management", module)
        self._tokens, layers, hidden = 64, 4, 256
        self._shape = (2, layers, hidden)
        self.block_bytes = 2 * layers * hidden * self._tokens * 4
        self.memory = np.zeros((NUM_BLOCKS, self.block_bytes), dtype=np.uint8)
        self.came_back = threading.Event()
        self._num_allocated = self._num_loads = 0
        extra: dict[str, Any] = {"mooncake_store_addr": address, "weights_digest": "w"}
        extra |= {"lookup_timeout_s": patience.lookup_s, "load_timeout_s": patience.load_s}
        words = types.SimpleNamespace(
            extra_config=extra,
            use_layerwise=False,
            enable_blending=False,
            pre_caching_hash_algorithm="builtin",
        )
        metadata = types.SimpleNamespace(
            model_name="m",
            engine_id="e",
            use_mla=False,
            worker_id=0,
            world_size=1,
            kv_dtype=torch.float32,
            kv_shape=(layers, 2, 64, 1, hidden),
            chunk_size=self._tokens,
            get_shapes=self.shapes,
            get_dtypes=lambda: [torch.float32],
        )
        self._client = MooncakeBackend(words, metadata, self, None, "cpu")
        self._client._pages.register([(self.memory.ctypes.data, self.memory.nbytes)])
        self.loop = self._client._pages._session.loop

    def shapes(self, num_tokens: int | None = None) -> list[torch.Size]:
        parts, layers, hidden = self._shape
        return [torch.Size((parts, layers, self._tokens if num_tokens is None else num_tokens, hidden))]

    def allocate(self, shapes: Any, dtypes: Any, fmt: Any, busy_loop: bool) -> _Chunk:
        """LMCache's ``LocalCPUBackend``."""
        self._num_allocated += 1
        return _Chunk(self, self._num_allocated - 1)

    def fill(self, number: int, data: Bytes) -> None:
        self.memory[number] = data

    def block(self, number: int) -> Bytes:
        found: Bytes = self.memory[number]
        return found

    def _keys(self, names: Sequence[str]) -> list[Any]:
        return [_Key(name) for name in names]

    def save(self, names: Sequence[str]) -> None:
        chunks = [_Chunk(self, number) for number in range(NUM_BLOCKS)]
        self._client.batched_submit_put_task(self._keys(names), chunks)
        while any(chunk.ref_count > 1 for chunk in chunks):
            assert self.came_back.wait(LONGEST_S), "LMCache's memory never came back"
            self.came_back.clear()

    def load(self, names: Sequence[str]) -> list[bool]:
        self._num_allocated, flags = 0, [False] * NUM_BLOCKS
        self._num_loads += 1
        if self._num_loads % 2:
            found = self._client.batched_get_blocking(self._keys(names))
        else:
            found = asyncio.run(self._client.batched_get_non_blocking("lookup", self._keys(names)))
        # Memory is handed out in the order of the chunks that were found: compare where both are the same.
        for number, chunk in enumerate(found):
            if chunk is not None and chunk.number == number:
                flags[number] = True
        return flags

    def close(self) -> None:
        self._client.close()


@dataclasses.dataclass(frozen=True)
class _Key:
    """LMCache's ``CacheEngineKey``."""

    chunk_hash: str
    dtype: torch.dtype = torch.float32
    tags: None = None


class LinkEngine(Engine):
    """A rank of vLLM: ``StoreLink`` behind ``Mover``; loads at once and, alternately, layer by layer."""

    def __init__(self, address: str, patience: Patience) -> None:
        layers, slab_bytes = 4, 64 << 10
        self._num_layers, self._number = layers, 0
        self.block_bytes = layers * slab_bytes
        self._memory = np.zeros((layers, NUM_BLOCKS, slab_bytes), dtype=np.uint8)
        self._session = PoolSession(PoolSettings(address), patience.lookup_s)
        layout = SlabLayout(layers, 1, slab_bytes, 16)
        bases = np.array([[layer.ctypes.data] for layer in self._memory], dtype=np.uint64)
        memory = SlabMemory([self._memory], bases, slab_bytes)
        shards = Shards([ForeignIdentity.of(layout, engine="pauses")])
        self._mover = RankTransfer(self._session, shards, memory, patience.link)
        self.loop = self._session.loop

    def fill(self, number: int, data: Bytes) -> None:
        self._memory[:, number] = data.reshape(self._num_layers, -1)

    def block(self, number: int) -> Bytes:
        return self._memory[:, number].reshape(-1)

    def _names(self, names: Sequence[str]) -> tuple[BlockHash, ...]:
        return tuple(hashlib.sha256(name.encode()).digest() for name in names)

    def _collected(self) -> TransferReport:
        while True:
            moved = self._mover.collect(1.0)
            if moved.saved or moved.loaded:
                return moved

    def save(self, names: Sequence[str]) -> None:
        self._number += 1
        self._mover.begin_step([SavePlan(self._number, self._names(names), tuple(range(NUM_BLOCKS)), 0)])
        for layer in range(self._num_layers):
            self._mover.layer_computed(layer)
        self._mover.end_step()
        self._collected()

    def load(self, names: Sequence[str]) -> list[bool]:
        self._number += 1
        is_layerwise = self._number % 2 == 0
        plan = LoadPlan("request", self._names(names), tuple(range(NUM_BLOCKS)), is_layerwise)
        self._mover.load([plan])
        if is_layerwise:
            for layer in range(self._num_layers):
                self._mover.wait_layer(layer)
            self._mover.end_step()
        moved = self._collected()
        return [number not in moved.bad_blocks for number in range(NUM_BLOCKS)]

    def close(self) -> None:
        self._mover.close()
        self._session.close()


class DirectEngine(Engine):
    """Both ends of a direct transfer, as in a vLLM that may prefill and decode; each has its own memory.

    ``fill`` and ``block`` use the memory of the last call, ``save`` or ``load``.
    """

    def __init__(self, address: str, patience: Patience) -> None:
        peer_push.GRACE_S = patience.grace_s
        layers, slab_bytes = 4, 64 << 10
        self._num_layers = layers
        self.block_bytes = layers * slab_bytes
        self.peer = ""
        """Address of the other engine's listener."""
        self._thread = TransferThread("127.0.0.1")
        self.loop = self._thread.loop
        self._arrays = {
            which: np.zeros((layers, NUM_BLOCKS, slab_bytes), dtype=np.uint8) for which in ("save", "load")
        }
        self._which = "save"
        slabs = {
            which: SlabMemory(
                [array], np.array([[layer.ctypes.data] for layer in array], dtype=np.uint64), slab_bytes
            )
            for which, array in self._arrays.items()
        }
        self._ended: dict[str, threading.Event] = {}
        layout, transfer = SlabLayout(layers, 1, slab_bytes, 16), self._thread.transfer
        transfer.register_all(slabs["save"].buffers)
        hold_s = 2 * (patience.load_s + patience.grace_s)
        self._sender = Sender(transfer, layout, "kind", slabs["save"], hold_s, lambda name: self._end(name))
        self._receiver = Receiver(transfer, layout, "kind", slabs["load"], patience.load_s)
        self._thread.wait(self._sender.start("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._sender.port}"

    def _end(self, name: str) -> None:
        self._ended[name].set()

    def use(self, which: str) -> None:
        self._which = which

    def fill(self, number: int, data: Bytes) -> None:
        self._arrays[self._which][:, number] = data.reshape(self._num_layers, -1)

    def block(self, number: int) -> Bytes:
        return self._arrays[self._which][:, number].reshape(-1)

    def offer(self, names: Sequence[str]) -> threading.Event:
        """Offer blocks; the event is set when they are released to the engine."""
        ended = self._ended[names[0]] = threading.Event()
        offer = BlockOffer(names[0], b"p", list(range(NUM_BLOCKS)))
        self.loop.call_soon_threadsafe(self._sender.offer, offer)
        return ended

    def save(self, names: Sequence[str]) -> None:
        assert self.offer(names).wait(LONGEST_S), "the offer never ended"

    def load(self, names: Sequence[str]) -> list[bool]:
        wanted = BlockRequest(names[0], b"p", 0, list(range(NUM_BLOCKS)), self.peer)
        reason = self._thread.wait(self._receiver.receive(wanted))
        return [not reason] * NUM_BLOCKS

    def settle(self) -> None:
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0.05), self.loop).result(LONGEST_S)

    def close(self) -> None:
        self._thread.wait(self._receiver.close())
        self._thread.wait(self._sender.close())
        self._thread.close()


ENGINES: dict[str, type[PagesEngine | SglangEngine | LmcacheEngine | LinkEngine | DirectEngine]] = {
    "pages": PagesEngine,
    "sglang": SglangEngine,
    "lmcache": LmcacheEngine,
    "link": LinkEngine,
    "direct": DirectEngine,
}

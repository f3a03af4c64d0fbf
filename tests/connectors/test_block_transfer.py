# SPDX-License-Identifier: Apache-2.0
"""Both sides of an engine at a real store: blocks found, loaded, saved in shards, and lost."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from mooncake.connectors.block_transfer import (
    FinishedLoad,
    PrefixLookup,
    RankTransfer,
    Shards,
    TransferReport,
)
from mooncake.connectors.memory import SlabMemory
from mooncake.connectors.planner import LoadPlan, SavePlan
from mooncake.connectors.session import PoolSession, PoolSettings
from mooncake.connectors.store_link import LinkSettings
from mooncake.kvlayout import ForeignIdentity, SlabLayout
from mooncake.store.node.node import Node, NodeSettings
from mooncake.store.server import MasterServer
from mooncake.store.settings import MasterSettings
from tests.connectors.held_loop import held

NUM_BLOCKS, NUM_LAYERS, HEADS, HEAD_BYTES = 6, 3, 4, 64
TIMEOUT_S = 20.0
NAMES = tuple(bytes([number]) * 32 for number in range(3))


class Rank:
    """The memory of heads ``first`` to ``end`` of each block, in ``num_shards`` shards."""

    def __init__(self, address: str, first: int = 0, end: int = HEADS, num_shards: int = 1) -> None:
        self.session = PoolSession(PoolSettings(address))
        width = (end - first) // num_shards
        block_bytes = (end - first) * HEAD_BYTES
        self.layers = [
            np.random.default_rng().integers(0, 256, (NUM_BLOCKS, block_bytes), dtype=np.uint8)
            for _ in range(NUM_LAYERS)
        ]
        layout = SlabLayout(NUM_LAYERS, 1, width * HEAD_BYTES, 16)
        bases = np.array([[layer.ctypes.data] for layer in self.layers], dtype=np.uint64)
        shards = [
            ForeignIdentity.of(layout, heads=f"{first + number * width}:{first + (number + 1) * width}")
            for number in range(num_shards)
        ]
        self.shards = Shards(shards)
        self.memory = SlabMemory(self.layers, bases, layout.slab_bytes)
        self.mover = RankTransfer(self.session, self.shards, self.memory)

    def block(self, block_id: int) -> list[bytes]:
        return [layer[block_id].tobytes() for layer in self.layers]

    def save(self, plan: SavePlan) -> TransferReport:
        self.mover.begin_saves([plan])
        for layer in range(NUM_LAYERS):
            self.mover.layer_computed(layer)
        self.mover.end_step()
        return self.mover.collect(TIMEOUT_S)

    def load(self, plan: LoadPlan) -> TransferReport:
        self.mover.load([plan])
        if plan.is_layerwise:
            for layer in range(NUM_LAYERS):
                self.mover.wait_layer(layer)
            self.mover.end_step()
        return self.mover.collect(TIMEOUT_S)

    def find(self, *others: Rank) -> int:
        finder = PrefixLookup(self.session)
        finder.digests = tuple(digest for rank in (self, *others) for digest in rank.shards.digests)
        finding = finder.find(NAMES)
        assert finding.wait(TIMEOUT_S)
        return finding.num_blocks

    def close(self) -> None:
        self.mover.close()
        self.session.close()


class Pool:
    def __init__(self, address: str, node: Node, master: MasterServer) -> None:
        self.address, self.node, self.master = address, node, master


@pytest.fixture
async def pool() -> AsyncIterator[Pool]:
    master = MasterServer(MasterSettings(port=0))
    address = f"127.0.0.1:{await master.start()}"
    node = Node(NodeSettings(master=address, pool_size_bytes=1 << 20))
    await node.start()
    await asyncio.wait_for(node.mounted.wait(), TIMEOUT_S)
    yield Pool(address, node, master)
    await node.close()
    master.master.check()
    await master.close()


@contextlib.asynccontextmanager
async def ranks(*make: Callable[[], Rank]) -> AsyncIterator[list[Rank]]:
    made = [await asyncio.to_thread(one) for one in make]
    try:
        yield made
    finally:
        for rank in made:
            await asyncio.to_thread(rank.close)


@pytest.mark.parametrize("is_layerwise", [False, True])
async def test_what_one_engine_saves_another_finds_and_loads(pool: Pool, is_layerwise: bool) -> None:
    async with ranks(lambda: Rank(pool.address), lambda: Rank(pool.address)) as (writer, reader):
        moved = await asyncio.to_thread(writer.save, SavePlan(7, NAMES[:2], (4, 1), 0))
        assert (moved.saved, moved.stored) == ([7], list(NAMES[:2]))
        assert await asyncio.to_thread(reader.find) == 2
        moved = await asyncio.to_thread(reader.load, LoadPlan("r", NAMES[:2], (0, 5), is_layerwise))
        assert moved.loaded == [FinishedLoad("r", True, is_layerwise)]
        assert not moved.bad_blocks
        assert (reader.block(0), reader.block(5)) == (writer.block(4), writer.block(1))


async def test_blocks_that_are_not_there_are_bad_and_the_others_good(pool: Pool) -> None:
    async with ranks(lambda: Rank(pool.address), lambda: Rank(pool.address)) as (writer, reader):
        await asyncio.to_thread(writer.save, SavePlan(0, NAMES[:1], (4,), 0))
        moved = await asyncio.to_thread(reader.load, LoadPlan("r", NAMES, (0, 1, 2), False))
        assert moved.loaded == [FinishedLoad("r", False, False)]
        assert moved.bad_blocks == {1, 2}
        assert reader.block(0) == writer.block(4)


async def test_engines_with_other_ranks_read_each_other_by_shards(pool: Pool) -> None:
    def whole() -> Rank:
        return Rank(pool.address, 0, 4, num_shards=2)

    async with ranks(
        whole, lambda: Rank(pool.address, 0, 2), lambda: Rank(pool.address, 2, 4), lambda: Rank(pool.address)
    ) as (one, left, right, other):
        await asyncio.to_thread(left.save, SavePlan(0, NAMES[:1], (3,), 0))
        assert await asyncio.to_thread(one.find) == 0, "half of a block does not count"
        await asyncio.to_thread(right.save, SavePlan(0, NAMES[:1], (3,), 0))
        assert await asyncio.to_thread(one.find) == 1
        assert await asyncio.to_thread(left.find, right) == 1
        assert await asyncio.to_thread(other.find) == 0, "the shards are cut differently"
        await asyncio.to_thread(one.load, LoadPlan("r", NAMES[:1], (2,), False))
        halves = zip(left.block(3), right.block(3), strict=True)
        assert one.block(2) == [first + second for first, second in halves]


async def test_without_the_store_a_lookup_misses_and_a_save_stores_nothing(pool: Pool) -> None:
    async with ranks(lambda: Rank(pool.address)) as (rank,):
        await asyncio.to_thread(rank.save, SavePlan(0, NAMES[:1], (4,), 0))
        await pool.node.close()
        await pool.master.close()
        moved = await asyncio.to_thread(rank.load, LoadPlan("r", NAMES[:1], (0,), False))
        assert moved.loaded == [FinishedLoad("r", False, False)]
        assert moved.bad_blocks == {0}
        moved = await asyncio.to_thread(rank.save, SavePlan(1, NAMES[1:], (1, 2), 1))
        assert (moved.saved, moved.stored) == ([1], [])


async def test_a_load_whose_lookup_does_not_return_is_abandoned_and_never_begins(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop is blocked while the engine waits for its first layer; then its blocks are computed."""
    monkeypatch.setattr("mooncake.connectors.block_transfer.LATENESS_S", 0.05)
    settings = LinkSettings(lookup_timeout_s=0.2)

    def impatient() -> Rank:
        rank = Rank(pool.address)
        rank.mover.close()
        rank.mover = RankTransfer(rank.session, rank.shards, rank.memory, settings)
        return rank

    async with ranks(lambda: Rank(pool.address), impatient) as (writer, reader):
        await asyncio.to_thread(writer.save, SavePlan(0, NAMES[:1], (4,), 0))
        assert await asyncio.to_thread(reader.find) == 1
        is_back = threading.Event()

        def engine() -> TransferReport:
            reader.mover.load([LoadPlan("r", NAMES[:1], (2,), True)])
            reader.mover.wait_layer(0)
            for layer in reader.layers:
                layer[2] = 0xEE
            is_back.set()
            reader.mover.end_step()
            return reader.mover.collect(TIMEOUT_S)

        with held(reader.session.loop) as hold, ThreadPoolExecutor(1) as thread:
            answer = asyncio.get_running_loop().run_in_executor(thread, engine)
            assert await asyncio.to_thread(is_back.wait, TIMEOUT_S), "the engine still waits"
            hold.release()
            moved = await answer
        assert moved.loaded == [FinishedLoad("r", False, True)] and moved.bad_blocks == {2}
        await asyncio.to_thread(reader.find)  # a lookup that comes after all earlier work of the loop
        assert all((layer[2] == 0xEE).all() for layer in reader.layers), "computed blocks were overwritten"


async def test_a_bug_in_a_lookup_is_a_miss(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    async with ranks(lambda: Rank(pool.address)) as (rank,):

        async def broken(*_: object, **__: object) -> None:
            raise KeyError("a bug")

        monkeypatch.setattr(rank.session.store, "open_reads", broken)
        assert await asyncio.to_thread(rank.find) == 0
        moved = await asyncio.to_thread(rank.load, LoadPlan("r", NAMES[:1], (0,), True))
        assert moved.loaded == [FinishedLoad("r", False, True)]

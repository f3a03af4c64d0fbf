# SPDX-License-Identifier: Apache-2.0
"""Both sides of an engine at a real store: blocks found, loaded, saved in shards, and lost."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from mooncake.connectors.block_transfer import (
    FinishedLoad,
    PrefixLookup,
    RankTransfer,
    Shards,
    TransferReport,
)
from mooncake.connectors.memory import SlabMemory
from mooncake.connectors.planner import LoadPlan, SavePlan
from mooncake.connectors.session import DEFAULT_TIMEOUT_S, PoolSession, PoolSettings
from mooncake.connectors.staged_memory import staged
from mooncake.connectors.store_link import LinkSettings
from mooncake.kvlayout import ForeignIdentity, SlabLayout
from mooncake.store.node.node import Node, NodeSettings
from mooncake.store.server import MasterServer
from mooncake.store.settings import MasterSettings
from tests.connectors.held_loop import held
from tests.connectors.late_device import LateDevice

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
        self.mover.begin_step([plan])
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
        assert (moved.saved, moved.stored) == ([7], [(7, name) for name in NAMES[:2]])
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


async def test_a_busy_store_costs_neither_saves_nor_requests_that_alone_wait(pool: Pool) -> None:
    """It answers everything after longer than a step may wait, as on a host whose cores engines use up."""

    async def late(work: Callable[[], Any]) -> Any:
        running = asyncio.get_running_loop().run_in_executor(None, work)
        time.sleep(1.3 * DEFAULT_TIMEOUT_S)  # noqa: ASYNC251 - master and node run on this loop
        return await running

    async with ranks(lambda: Rank(pool.address), lambda: Rank(pool.address)) as (writer, reader):
        for rank in (writer, reader):
            assert await asyncio.to_thread(rank.find) == 0  # connected from here on
        moved = await late(partial(writer.save, SavePlan(0, NAMES[:1], (4,), 0)))
        assert [name for _, name in moved.stored] == [NAMES[0]]
        assert await late(reader.find) == 1
        moved = await late(partial(reader.load, LoadPlan("r", NAMES[:1], (2,), False)))
        assert moved.loaded == [FinishedLoad("r", True, False)]
        assert reader.block(2) == writer.block(4)


@pytest.mark.parametrize("is_layerwise", [False, True])
async def test_a_late_lookup_costs_the_blocks_only_where_a_step_waits(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, is_layerwise: bool
) -> None:
    monkeypatch.setattr("mooncake.connectors.block_transfer.WAITING_LOOKUP", 1000.0)

    def with_late_answers() -> Rank:
        rank = Rank(pool.address)
        rank.mover.close()
        rank.mover = RankTransfer(rank.session, rank.shards, rank.memory, LinkSettings(lookup_timeout_s=0.05))
        in_time = rank.session.store.open_reads

        async def late(*args: Any, **kwargs: Any) -> Any:
            await asyncio.sleep(0.2)
            return await in_time(*args, **kwargs)

        monkeypatch.setattr(rank.session.store, "open_reads", late)
        return rank

    async with ranks(lambda: Rank(pool.address), with_late_answers) as (writer, reader):
        await asyncio.to_thread(writer.save, SavePlan(0, NAMES[:1], (4,), 0))
        assert await asyncio.to_thread(reader.find) == 1
        moved = await asyncio.to_thread(reader.load, LoadPlan("r", NAMES[:1], (2,), is_layerwise))
        assert moved.loaded == [FinishedLoad("r", not is_layerwise, is_layerwise)]
        assert (reader.block(2) == writer.block(4)) is not is_layerwise


async def test_a_bug_in_a_lookup_is_a_miss(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    async with ranks(lambda: Rank(pool.address)) as (rank,):

        async def broken(*_: object, **__: object) -> None:
            raise KeyError("a bug")

        monkeypatch.setattr(rank.session.store, "open_reads", broken)
        assert await asyncio.to_thread(rank.find) == 0
        moved = await asyncio.to_thread(rank.load, LoadPlan("r", NAMES[:1], (0,), True))
        assert moved.loaded == [FinishedLoad("r", False, True)]


Bytes = npt.NDArray[np.uint8]


class DeviceRank(Rank):
    """A rank whose layers are a device's, behind ``num_slots`` blocks of staging memory.

    Its engine computes as an engine on a device does: it begins work and does not wait for it.
    """

    def __init__(self, address: str, seed: int, num_slots: int, settings: LinkSettings | None = None) -> None:
        super().__init__(address)
        self.mover.close()
        self.device = LateDevice(seed)
        tensors = [torch.from_numpy(layer) for layer in self.layers]
        slab_bytes = self.shards.layout.slab_bytes
        area = num_slots * slab_bytes * NUM_LAYERS
        memory = staged(self.device, tensors, self.memory, NUM_BLOCKS, slab_bytes, area)
        more = () if settings is None else (settings,)
        self.mover = RankTransfer(self.session, self.shards, memory, *more)

    def fill(self, layer: int, block_ids: Sequence[int], content: Bytes) -> None:
        """Begin to compute a layer of some blocks: u8 [blocks, bytes]."""
        self.device.compute(lambda: self.layers[layer].__setitem__(list(block_ids), content))

    def step(self, plan: SavePlan, content: Bytes) -> None:
        """Begin a step that fills the plan's blocks with ``content``: u8 [layers, blocks, bytes]."""
        self.mover.begin_step([plan])
        for layer in range(NUM_LAYERS):
            self.fill(layer, plan.block_ids, content[layer])
            self.mover.layer_computed(layer)
        self.mover.end_step()

    def save_and_reuse(self, plan: SavePlan, content: Bytes) -> TransferReport:
        """Save blocks; once the save says that it does not need them, they have other contents at once."""
        self.step(plan, content)
        moved = self.mover.collect(TIMEOUT_S)
        for layer in self.layers:
            layer[list(plan.block_ids)] = 0xAA
        return moved

    def _see(self, layer: int, block_ids: list[int], seen: list[Bytes]) -> None:
        seen.append(self.layers[layer][block_ids].copy())

    def read(self, plan: LoadPlan, saving: SavePlan | None = None) -> tuple[TransferReport, Bytes]:
        """Load blocks that an earlier request's last work still writes to; what the engine reads of them."""
        ids = list(plan.block_ids)
        for layer in range(NUM_LAYERS):
            self.fill(layer, ids, np.full((len(ids), HEADS * HEAD_BYTES), 0xEE, dtype=np.uint8))
        seen: list[Bytes] = []
        self.mover.begin_step([] if saving is None else [saving])
        self.mover.load([plan])
        for layer in range(NUM_LAYERS if plan.is_layerwise else 0):
            self.mover.wait_layer(layer)
            self.device.compute(partial(self._see, layer, ids, seen))
            self.mover.layer_computed(layer)
        self.mover.end_step()
        moved = self.mover.collect(TIMEOUT_S)
        while not moved.loaded:
            more = self.mover.collect(TIMEOUT_S)
            moved.loaded, moved.saved = more.loaded, moved.saved + more.saved
            moved.bad_blocks |= more.bad_blocks
        if not plan.is_layerwise:  # the request is computed after the report, in order with nothing
            seen = [layer[ids].copy() for layer in self.layers]
        self.device.finish_all()
        return moved, np.array(seen)


def noise(num_blocks: int, seed: int) -> Bytes:
    shape = (NUM_LAYERS, num_blocks, HEADS * HEAD_BYTES)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


@pytest.mark.parametrize("num_slots", [4, 2 * NUM_BLOCKS], ids=["in pieces", "at once"])
@pytest.mark.parametrize("is_layerwise", [False, True], ids=["async", "layerwise"])
@pytest.mark.parametrize("seed", range(4))
async def test_a_device_s_blocks_are_read_as_they_were_computed(
    pool: Pool, seed: int, is_layerwise: bool, num_slots: int
) -> None:
    content = noise(3, seed)

    def rank() -> DeviceRank:
        return DeviceRank(pool.address, seed, num_slots)

    async with ranks(rank, rank) as (writer, reader):
        assert isinstance(writer, DeviceRank) and isinstance(reader, DeviceRank)
        moved = await asyncio.to_thread(writer.save_and_reuse, SavePlan(7, NAMES, (4, 1, 3), 0), content)
        assert (moved.saved, moved.stored) == ([7], [(7, name) for name in NAMES])
        moved, seen = await asyncio.to_thread(reader.read, LoadPlan("r", NAMES, (0, 5, 2), is_layerwise))
        assert moved.loaded == [FinishedLoad("r", True, is_layerwise)] and not moved.bad_blocks
        assert np.array_equal(seen, content), f"{reader.device} read other bytes"


@pytest.mark.parametrize("seed", range(2))
async def test_a_layerwise_load_of_many_pieces_does_not_wait_for_the_saves_of_its_own_step(
    pool: Pool, seed: int
) -> None:
    """The saves hold all of their room until the step is computed, and that needs the load."""
    content = noise(3, seed)
    async with ranks(lambda: DeviceRank(pool.address, seed, 2 * NUM_BLOCKS)) as (writer,):
        assert isinstance(writer, DeviceRank)
        await asyncio.to_thread(writer.save_and_reuse, SavePlan(0, NAMES, (4, 1, 3), 0), content)
    async with ranks(lambda: DeviceRank(pool.address, seed + 10, 2)) as (reader,):
        assert isinstance(reader, DeviceRank)
        others = tuple(bytes([number]) * 32 for number in range(10, 13))
        saving = SavePlan(1, others, (3, 4, 5), 3)
        moved, seen = await asyncio.to_thread(reader.read, LoadPlan("r", NAMES, (0, 1, 2), True), saving)
        assert moved.loaded == [FinishedLoad("r", True, True)]
        assert np.array_equal(seen, content), f"{reader.device} read other bytes"
        while not moved.saved:
            moved = await asyncio.to_thread(reader.mover.collect, TIMEOUT_S)
        assert (moved.saved, moved.stored) == ([1], [(1, name) for name in others])


async def test_a_load_in_pieces_ends_at_the_piece_that_fails(pool: Pool) -> None:
    content = noise(3, 1)
    async with ranks(lambda: DeviceRank(pool.address, 1, 2), lambda: DeviceRank(pool.address, 2, 2)) as (
        writer,
        reader,
    ):
        assert isinstance(writer, DeviceRank) and isinstance(reader, DeviceRank)
        await asyncio.to_thread(writer.save_and_reuse, SavePlan(0, NAMES, (4, 1, 3), 0), content)
        opened = reader.session.start(reader.session.store.open_reads([reader.shards.key(NAMES[1] + b"\0")]))
        (grant,) = await asyncio.wrap_future(opened)
        assert grant is not None
        ctypes.c_ubyte.from_address(grant.address).value ^= 1
        moved, seen = await asyncio.to_thread(reader.read, LoadPlan("r", NAMES, (0, 1, 2), False))
        assert moved.loaded == [FinishedLoad("r", False, False)]
        assert moved.bad_blocks == {1, 2}, "what follows a gap is not loaded"
        assert np.array_equal(seen[:, 0], content[:, 0])


@pytest.mark.parametrize("seed", range(4))
async def test_a_save_that_waits_for_room_is_copied_after_its_computation(pool: Pool, seed: int) -> None:
    content = noise(2, seed)
    async with ranks(lambda: DeviceRank(pool.address, seed, 2), lambda: Rank(pool.address)) as (rank, other):
        assert isinstance(rank, DeviceRank)

        def engine() -> TransferReport:
            link = rank.mover._link
            taken = link.start_save([(b"\x77" * 32 + b"\0", 16, 5)])
            rank.step(SavePlan(4, NAMES[:2], (0, 1), 0), content)
            assert not rank.mover.collect(0.0).saved
            link.abort_save(taken)
            return rank.mover.collect(TIMEOUT_S)

        moved = await asyncio.to_thread(engine)
        assert (moved.saved, moved.stored) == ([4], [(4, name) for name in NAMES[:2]])
        await asyncio.to_thread(other.load, LoadPlan("r", NAMES[:2], (3, 2), False))
        assert np.array_equal([layer[[3, 2]] for layer in other.layers], content), rank.device


async def test_a_save_that_finds_no_room_in_time_is_dropped_and_its_blocks_given_back(pool: Pool) -> None:
    """The room is held by a save whose step does not end; the scheduler gets the other's blocks back."""
    settings = LinkSettings(load_timeout_s=0.0)
    async with ranks(lambda: DeviceRank(pool.address, 3, 2, settings)) as (rank,):
        assert isinstance(rank, DeviceRank)

        def engine() -> TransferReport:
            link = rank.mover._link
            taken = link.start_save([(b"\x77" * 32 + b"\0", 16, 5)])
            assert taken.held is not None and not link.has_room(1, "save")
            rank.step(SavePlan(4, NAMES[:2], (0, 1), 0), noise(2, 3))
            moved = rank.mover.collect(TIMEOUT_S)
            link.abort_save(taken)
            return moved

        moved = await asyncio.to_thread(engine)
        assert (moved.saved, moved.stored) == ([4], [])
        assert moved.saves[0][:2] == (0, 2)

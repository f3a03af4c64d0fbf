"""The link between a worker's pool and a real store (master and node in this process)."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import torch

from bench.cluster import wait_for
from mooncake.inference.hostmem import HostMemory, StagedMemory
from mooncake.inference.layerwise import LinkSettings, Load, Lookup, Save, StoreLink
from mooncake.kvlayout import KvIdentity, KvLayout
from mooncake.prefix import BlockHash, block_hashes, root_hash
from mooncake.store import AsyncStore, StoreSettings
from mooncake.store.node import Node, NodeSettings
from mooncake.store.server import MasterServer
from mooncake.store.settings import MasterSettings
from mooncake.transfer import TransferEngine, TransferSettings
from mooncake.web import listen

LAYOUT = KvLayout(num_layers=4, num_kv_heads=2, head_dim=8, dtype="float32", block_tokens=4)
NUM_BLOCKS = 12
TIMEOUT_S = 10.0


class Worker:
    """A pool of random KV with a link, driven from a thread as an engine would."""

    def __init__(
        self, store: AsyncStore, transfer: TransferEngine, is_staged: bool, weights: str = "w"
    ) -> None:
        self.pool = torch.randn(LAYOUT.pool_shape(NUM_BLOCKS))
        self.memory: HostMemory | None = StagedMemory(LAYOUT, self.pool, NUM_BLOCKS) if is_staged else None
        identity = KvIdentity(weights, "t", LAYOUT)
        settings = LinkSettings(lookup_timeout_s=1.0, load_timeout_s=5.0, retry_after_s=0.2)
        loop = asyncio.get_running_loop()
        self.link = StoreLink(store, transfer, identity, self.pool, loop, settings, self.memory)

    async def save(self, blocks: Sequence[tuple[BlockHash, int, int]], num_layers: int = 4) -> Save:
        def engine() -> Save:
            save = self.link.start_save(blocks)
            for layer in range(num_layers):
                self.link.save_layer(save, layer)
            if num_layers == LAYOUT.num_layers:
                self.link.finish_save(save)
            else:
                self.link.abort_save(save)
            wait_for(lambda: save.done, "the save to be done", TIMEOUT_S)
            return save

        return await asyncio.to_thread(engine)

    async def lookup(self, blocks: Sequence[tuple[BlockHash, int]]) -> Lookup:
        def engine() -> Lookup:
            lookup = self.link.lookup(blocks)
            wait_for(lambda: lookup.done, "the lookup to be done", TIMEOUT_S)
            return lookup

        return await asyncio.to_thread(engine)

    async def load(self, lookup: Lookup, block_ids: Sequence[int]) -> Load:
        def engine() -> Load:
            load = self.link.start_load(lookup, block_ids)
            for layer in range(LAYOUT.num_layers):
                self.link.wait_layer([load], layer)
            wait_for(lambda: load.done, "the load to be done", TIMEOUT_S)
            return load

        return await asyncio.to_thread(engine)


class House:
    """A master, a node, and workers as a test wants them."""

    def __init__(self, master: MasterServer, port: int, node: Node, stack: contextlib.AsyncExitStack) -> None:
        self.master = master
        self.port = port
        self.node = node
        self._stack = stack

    async def worker(self, is_staged: bool, port: int | None = None, **more: Any) -> Worker:
        transfer = TransferEngine(TransferSettings())
        self._stack.callback(transfer.close)
        store = AsyncStore(f"127.0.0.1:{port or self.port}", transfer, StoreSettings(timeout_s=1.0))
        self._stack.push_async_callback(store.close)
        worker = Worker(store, transfer, is_staged, **more)
        self._stack.push_async_callback(worker.link.close)
        return worker


@pytest.fixture
async def house() -> AsyncIterator[House]:
    master = MasterServer(MasterSettings(port=0))
    port = await master.start()
    node = Node(NodeSettings(master=f"127.0.0.1:{port}", pool_size_bytes=1 << 20))
    await node.start()
    await asyncio.wait_for(node.mounted.wait(), TIMEOUT_S)
    async with contextlib.AsyncExitStack() as stack:
        yield House(master, port, node, stack)
    await node.close()
    master.master.check()
    await master.close()


def hashes_of(num_tokens: int) -> list[BlockHash]:
    return block_hashes(range(num_tokens), LAYOUT.block_tokens, root_hash(), include_partial=True)


@pytest.fixture(params=["direct", "staged"])
def is_staged(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "staged")


async def test_what_one_worker_saves_another_loads(house: House, is_staged: bool) -> None:
    writer, reader = await house.worker(is_staged), await house.worker(is_staged)
    first, second, tail = hashes_of(10)
    save = await writer.save([(first, 4, 7), (second, 4, 2), (tail, 2, 5)])
    assert save.num_stored_blocks == 3
    lookup = await reader.lookup([(first, 4), (second, 4), (tail, 2)])
    assert lookup.num_blocks == 3
    before = reader.pool.clone()
    load = await reader.load(lookup, [1, 10, 4])
    assert (load.failed, load.num_layers_loaded) == (False, LAYOUT.num_layers)
    for target, source, num_tokens in ((1, 7, 4), (10, 2, 4), (4, 5, 2)):
        assert torch.equal(reader.pool[:, :, target, :num_tokens], writer.pool[:, :, source, :num_tokens])
    untouched = [block for block in range(NUM_BLOCKS) if block not in (1, 10, 4)]
    assert torch.equal(reader.pool[:, :, untouched], before[:, :, untouched])


async def test_a_prefix_ends_at_the_first_gap(house: House, is_staged: bool) -> None:
    worker = await house.worker(is_staged)
    first, second, third = hashes_of(12)
    await worker.save([(first, 4, 1), (third, 4, 3)])
    lookup = await worker.lookup([(first, 4), (second, 4), (third, 4)])
    assert lookup.num_blocks == 1


async def test_other_weights_find_nothing(house: House) -> None:
    worker = await house.worker(False)
    other = await house.worker(False, weights="other")
    (first,) = hashes_of(4)
    await worker.save([(first, 4, 1)])
    assert (await worker.lookup([(first, 4)])).num_blocks == 1
    assert (await other.lookup([(first, 4)])).num_blocks == 0


async def test_saving_twice_stores_once_and_says_stored(house: House) -> None:
    worker = await house.worker(False)
    (first,) = hashes_of(4)
    assert (await worker.save([(first, 4, 1)])).num_stored_blocks == 1
    assert (await worker.save([(first, 4, 2)])).num_stored_blocks == 1


async def test_a_corrupted_block_fails_its_load(house: House, is_staged: bool) -> None:
    worker = await house.worker(is_staged)
    (first,) = hashes_of(4)
    await worker.save([(first, 4, 1)])
    lookup = await worker.lookup([(first, 4)])
    grant = lookup.grants[0]
    # Flip a bit of layer 2, where the node keeps the object.
    (region,) = house.node.engine.describe().regions
    offset = grant.address - region.address + LAYOUT.object_offsets(2, 4)[0]
    _flip(house.node, offset)
    load = await worker.load(lookup, [5])
    assert load.failed
    assert load.done


def _flip(node: Node, offset: int) -> None:
    (region,) = node.engine.describe().regions
    byte = ctypes.c_ubyte.from_address(region.address + offset)
    byte.value ^= 1


async def test_an_aborted_save_is_never_seen(house: House, is_staged: bool) -> None:
    worker = await house.worker(is_staged)
    (first,) = hashes_of(4)
    save = await worker.save([(first, 4, 1)], num_layers=2)
    assert save.num_stored_blocks == 0
    assert (await worker.lookup([(first, 4)])).num_blocks == 0
    assert (await worker.save([(first, 4, 1)])).num_stored_blocks == 1


async def test_a_store_that_is_away_costs_one_wait_and_then_none(house: House) -> None:
    with listen("127.0.0.1", 0) as free:
        nobody = free.getsockname()[1]
    worker = await house.worker(False, port=nobody)
    (first,) = hashes_of(4)
    assert (await worker.lookup([(first, 4)])).num_blocks == 0
    lookup = worker.link.lookup([(first, 4)])
    assert lookup.done, "while the store is known to be away it is not asked"
    assert worker.link.start_save([(first, 4, 1)]).done


async def test_no_room_is_refused_and_nothing_breaks(house: House) -> None:
    worker = await house.worker(False)
    object_bytes = LAYOUT.object_bytes(4)
    count = (1 << 20) // object_bytes + NUM_BLOCKS
    hashes = block_hashes(range(4 * count), 4, root_hash())
    stored = 0
    for start in range(0, count, 8):
        save = await worker.save([(h, 4, 1 + i) for i, h in enumerate(hashes[start : start + 8])])
        stored += save.num_stored_blocks
    assert 0 < stored <= count
    house.master.master.check()


def test_staging_gives_out_what_it_has_and_takes_it_back() -> None:
    pool = torch.randn(LAYOUT.pool_shape(NUM_BLOCKS))
    memory = StagedMemory(LAYOUT, pool, 3)
    held = memory.hold([1, 2])
    assert held is not None
    assert memory.hold([3, 4]) is None
    memory.release(held)
    memory.release(held)
    assert memory.hold([3, 4, 5]) is not None
    assert memory.hold([6]) is None

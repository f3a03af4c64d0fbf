# SPDX-License-Identifier: Apache-2.0
"""The link between an engine's memory and a real store (master and node in this process).

Over our own worker's pool, in place and staged, and over memory laid out as other engines lay it out.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from mooncake import clock
from mooncake.connectors import store_link as blocks
from mooncake.connectors.memory import CacheIdentity, HostMemory, SlabMemory
from mooncake.connectors.staged_memory import StagedMemory, slab_views
from mooncake.connectors.store_link import (
    CircuitBreaker,
    LinkSettings,
    StoreLink,
    StoreLoad,
    StoreLookup,
    StoreSave,
)
from mooncake.http.server import listen
from mooncake.inference.host_memory import host_memory
from mooncake.kvlayout import ForeignIdentity, KvIdentity, KvLayout, SlabLayout
from mooncake.prefix import BlockHash, block_hashes, root_hash
from mooncake.store import AsyncStore, PutGrant, StoreSettings
from mooncake.store.node.node import Node, NodeSettings
from mooncake.store.server import MasterServer
from mooncake.store.settings import MasterSettings
from mooncake.transfer import TransferEngine, TransferSettings
from tests.cluster import wait_for
from tests.connectors.late_device import LateDevice
from tests.transfer.mute import PATIENCE_S, Mute
from tests.waiting import until

LAYOUT = KvLayout(num_layers=4, num_kv_heads=2, head_dim=8, dtype="float32", block_tokens=4)
NUM_BLOCKS = 12
TIMEOUT_S = 10.0


class Driver:
    """A link driven from a thread, as an engine would."""

    def __init__(
        self,
        store: AsyncStore,
        transfer: TransferEngine,
        identity: CacheIdentity,
        memory: HostMemory,
        load_timeout_s: float = 5.0,
    ) -> None:
        settings = LinkSettings(lookup_timeout_s=1.0, load_timeout_s=load_timeout_s, retry_after_s=0.2)
        self.transfer = transfer
        self.num_layers = identity.layout.num_layers
        self.link = StoreLink(store, transfer, identity, memory, asyncio.get_running_loop(), settings)

    async def save(
        self, blocks: Sequence[tuple[BlockHash, int, int]], num_layers: int | None = None
    ) -> StoreSave:
        def engine() -> StoreSave:
            save = self.link.start_save(blocks)
            for layer in range(self.num_layers if num_layers is None else num_layers):
                self.link.save_layer(save, layer)
            if num_layers is None:
                self.link.finish_save(save)
            else:
                self.link.abort_save(save)
            wait_for(lambda: save.done, "the save to be done", TIMEOUT_S)
            return save

        return await asyncio.to_thread(engine)

    async def lookup(self, blocks: Sequence[tuple[BlockHash, int]]) -> StoreLookup:
        def engine() -> StoreLookup:
            lookup = self.link.lookup(blocks)
            wait_for(lambda: lookup.done, "the lookup to be done", TIMEOUT_S)
            return lookup

        return await asyncio.to_thread(engine)

    async def load(self, lookup: StoreLookup, block_ids: Sequence[int]) -> StoreLoad:
        def engine() -> StoreLoad:
            load = self.link.start_load(lookup, block_ids)
            for layer in range(self.num_layers):
                self.link.wait_layer([load], layer)
            wait_for(lambda: load.done, "the load to be done", TIMEOUT_S)
            return load

        return await asyncio.to_thread(engine)


class Worker(Driver):
    """Our own worker's pool, full of random KV."""

    def __init__(
        self,
        store: AsyncStore,
        transfer: TransferEngine,
        is_staged: bool,
        weights: str = "w",
        load_timeout_s: float = 5.0,
        device: LateDevice | None = None,
        num_slots: int = 2 * NUM_BLOCKS,
    ) -> None:
        self.pool = torch.randn(LAYOUT.pool_shape(NUM_BLOCKS))
        memory: HostMemory = host_memory(LAYOUT, self.pool, 0)
        if is_staged:
            assert isinstance(memory, SlabMemory)
            slab_bytes = LAYOUT.chunk_bytes(LAYOUT.block_tokens)
            views = slab_views([self.pool] * LAYOUT.num_layers, memory, NUM_BLOCKS, slab_bytes)
            memory = StagedMemory(device or LateDevice(), views, num_slots)
        super().__init__(store, transfer, KvIdentity(weights, "t", LAYOUT), memory, load_timeout_s)


FOREIGN = SlabLayout(num_layers=3, num_slabs=1, slab_bytes=96, block_tokens=32)


class Foreign(Driver):
    """Another engine's memory: a tensor for each layer, gaps between the blocks, contents of its own."""

    def __init__(
        self, store: AsyncStore, transfer: TransferEngine, layout: SlabLayout = FOREIGN, **facts: str
    ) -> None:
        random = np.random.default_rng()
        stride = layout.slab_bytes + 32
        shape = (layout.num_layers, layout.num_slabs, NUM_BLOCKS, stride)
        self.layers = list(random.integers(0, 256, shape, dtype=np.uint8))
        first = np.array(
            [[slab.ctypes.data for slab in layer] for layer in self.layers],
            dtype=np.uint64,
        )
        identity = ForeignIdentity.of(layout, engine="e", **facts)
        super().__init__(store, transfer, identity, SlabMemory(self.layers, first, stride))

    def block(self, block_id: int) -> list[bytes]:
        size = FOREIGN.slab_bytes
        return [bytes(slab[block_id, :size]) for layer in self.layers for slab in layer]


class Cluster:
    """A master, a node, and workers on request."""

    def __init__(self, master: MasterServer, port: int, node: Node, stack: contextlib.AsyncExitStack) -> None:
        self.master = master
        self.port = port
        self.node = node
        self._stack = stack

    async def worker(self, is_staged: bool, port: int | None = None, **more: Any) -> Worker:
        worker = Worker(*self._client(port or self.port), is_staged, **more)
        self._stack.push_async_callback(worker.link.close)
        return worker

    async def foreign(self, **more: Any) -> Foreign:
        engine = Foreign(*self._client(self.port), **more)
        self._stack.push_async_callback(engine.link.close)
        return engine

    def _client(self, port: int) -> tuple[AsyncStore, TransferEngine]:
        transfer = TransferEngine(TransferSettings())
        self._stack.callback(transfer.close)
        store = AsyncStore(f"127.0.0.1:{port}", transfer, StoreSettings(timeout_s=1.0))
        self._stack.push_async_callback(store.close)
        return store, transfer


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    master = MasterServer(MasterSettings(port=0))
    port = await master.start()
    node = Node(NodeSettings(master=f"127.0.0.1:{port}", pool_size_bytes=1 << 20))
    await node.start()
    await asyncio.wait_for(node.mounted.wait(), TIMEOUT_S)
    async with contextlib.AsyncExitStack() as stack:
        yield Cluster(master, port, node, stack)
    await node.close()
    master.master.check()
    await master.close()


def hashes_of(num_tokens: int) -> list[BlockHash]:
    return block_hashes(range(num_tokens), LAYOUT.block_tokens, root_hash(), include_partial=True)


@pytest.fixture(params=["direct", "staged"])
def is_staged(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "staged")


async def test_one_worker_loads_blocks_that_another_saved(cluster: Cluster, is_staged: bool) -> None:
    writer, reader = await cluster.worker(is_staged), await cluster.worker(is_staged)
    first, second, tail = hashes_of(10)
    save = await writer.save([(first, 4, 7), (second, 4, 2), (tail, 2, 5)])
    assert save.num_stored_blocks == 3
    lookup = await reader.lookup([(first, 4), (second, 4), (tail, 2)])
    assert lookup.num_blocks == 3
    before = reader.pool.clone()
    load = await reader.load(lookup, [1, 10, 4])
    assert (load.failed, load.num_layers_loaded) == (False, LAYOUT.num_layers)
    assert load.moved is not None
    num_loaded, seconds = load.moved
    assert num_loaded == 10 and 0 < seconds < TIMEOUT_S
    for target, source, num_tokens in ((1, 7, 4), (10, 2, 4), (4, 5, 2)):
        assert torch.equal(reader.pool[:, :, target, :num_tokens], writer.pool[:, :, source, :num_tokens])
    untouched = [block for block in range(NUM_BLOCKS) if block not in (1, 10, 4)]
    assert torch.equal(reader.pool[:, :, untouched], before[:, :, untouched])


async def test_a_load_that_can_not_be_submitted_fails(
    cluster: Cluster, is_staged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is submitted on the loop: the exception does not reach the engine."""
    worker = await cluster.worker(is_staged)
    first, second = hashes_of(8)
    await worker.save([(first, 4, 1), (second, 4, 2)])
    lookup = await worker.lookup([(first, 4), (second, 4)])
    submit, num_submitted = worker.link._submit_load, 0

    def broken(*arguments: Any) -> None:
        nonlocal num_submitted
        num_submitted += 1
        if num_submitted == 3:
            raise RuntimeError("a bug")
        submit(*arguments)

    monkeypatch.setattr(worker.link, "_submit_load", broken)
    load = await worker.load(lookup, [3, 4])
    assert load.failed and load.done and load.claim.num_inside == 0 and load.moved is None
    monkeypatch.undo()
    again = await worker.load(await worker.lookup([(first, 4), (second, 4)]), [3, 4])
    assert not again.failed and torch.equal(worker.pool[:, :, 3], worker.pool[:, :, 1])


async def test_a_prefix_ends_at_the_first_gap(cluster: Cluster, is_staged: bool) -> None:
    worker = await cluster.worker(is_staged)
    first, second, third = hashes_of(12)
    await worker.save([(first, 4, 1), (third, 4, 3)])
    lookup = await worker.lookup([(first, 4), (second, 4), (third, 4)])
    assert lookup.num_blocks == 1


async def test_other_weights_find_nothing(cluster: Cluster) -> None:
    worker = await cluster.worker(False)
    other = await cluster.worker(False, weights="other")
    (first,) = hashes_of(4)
    await worker.save([(first, 4, 1)])
    assert (await worker.lookup([(first, 4)])).num_blocks == 1
    assert (await other.lookup([(first, 4)])).num_blocks == 0


async def test_saving_twice_stores_once_and_reports_both_as_stored(cluster: Cluster) -> None:
    worker = await cluster.worker(False)
    (first,) = hashes_of(4)
    assert (await worker.save([(first, 4, 1)])).num_stored_blocks == 1
    assert (await worker.save([(first, 4, 2)])).num_stored_blocks == 1


async def test_a_corrupted_block_fails_its_load_and_is_dropped(cluster: Cluster, is_staged: bool) -> None:
    worker = await cluster.worker(is_staged)
    (first,) = hashes_of(4)
    await worker.save([(first, 4, 1)])
    lookup = await worker.lookup([(first, 4)])
    grant = lookup.grants[0]
    # Flip a bit of layer 2, where the node keeps the object.
    (region,) = cluster.node.engine.describe().regions
    offset = grant.address - region.address + LAYOUT.object_offsets(2, 4)[0]
    _flip(cluster.node, offset)
    load = await worker.load(lookup, [5])
    assert load.failed
    assert load.done
    # Its node has checked it; else every later load would fail, and a save would find it stored.
    for _ in range(600):
        if not (await worker.lookup([(first, 4)])).num_blocks:
            break
        await asyncio.sleep(0.05)
    assert (await worker.save([(first, 4, 1)])).num_stored_blocks == 1
    assert not (await worker.load(await worker.lookup([(first, 4)]), [5])).failed


def _flip(node: Node, offset: int) -> None:
    (region,) = node.engine.describe().regions
    byte = ctypes.c_ubyte.from_address(region.address + offset)
    byte.value ^= 1


async def test_an_aborted_save_is_never_seen(cluster: Cluster, is_staged: bool) -> None:
    worker = await cluster.worker(is_staged)
    (first,) = hashes_of(4)
    save = await worker.save([(first, 4, 1)], num_layers=2)
    assert save.num_stored_blocks == 0
    assert (await worker.lookup([(first, 4)])).num_blocks == 0
    assert (await worker.save([(first, 4, 1)])).num_stored_blocks == 1


async def test_a_save_aborted_after_all_its_layers_were_written_is_never_seen(
    cluster: Cluster, is_staged: bool
) -> None:
    """A load of the same step may turn out wrong when every layer was computed from it, and was written."""
    worker = await cluster.worker(is_staged)
    (first,) = hashes_of(4)
    save = worker.link.start_save([(first, 4, 1)])

    def engine() -> None:
        for layer in range(LAYOUT.num_layers):
            worker.link.save_layer(save, layer)
        wait_for(
            lambda: save.grants is not None and all(grant.is_written.all() for grant in save.grants),
            "all layers to be written",
            TIMEOUT_S,
        )
        wait_for(lambda: not save.claim.num_inside, "the writes to end", TIMEOUT_S)
        assert not save.done, "it may be aborted yet"
        worker.link.abort_save(save)
        wait_for(lambda: save.done, "the save to be done", TIMEOUT_S)

    await asyncio.to_thread(engine)
    assert save.num_stored_blocks == 0
    assert (await worker.lookup([(first, 4)])).num_blocks == 0


async def test_a_node_that_dies_half_way_through_a_save_leaves_nothing_to_find(
    cluster: Cluster, is_staged: bool
) -> None:
    worker, other = await cluster.worker(is_staged), await cluster.worker(is_staged)
    first, second = hashes_of(8)
    before = worker.pool.clone()
    half = LAYOUT.num_layers // 2

    def give(save: StoreSave, layers: range) -> None:
        for layer in layers:
            worker.link.save_layer(save, layer)

    def is_half_written() -> bool:
        return save.num_layers_submitted == half and not save.claim.num_inside

    save = worker.link.start_save([(first, 4, 1), (second, 4, 2)])
    await asyncio.to_thread(give, save, range(half))
    await asyncio.to_thread(wait_for, is_half_written, "half of the layers to be written", PATIENCE_S)
    cluster.node.engine.close()  # its memory is gone, and the master has not noticed
    await asyncio.to_thread(give, save, range(half, LAYOUT.num_layers))
    worker.link.finish_save(save)
    await asyncio.to_thread(wait_for, lambda: save.done, "the save to be done", PATIENCE_S)
    assert save.is_stored == [False, False]
    assert (await other.lookup([(first, 4), (second, 4)])).num_blocks == 0
    assert torch.equal(worker.pool, before)


async def test_an_unreachable_store_costs_one_wait_and_then_none(cluster: Cluster) -> None:
    with listen("127.0.0.1", 0) as free:
        unused_port = free.getsockname()[1]
    worker = await cluster.worker(False, port=unused_port)
    (first,) = hashes_of(4)
    assert (await worker.lookup([(first, 4)])).num_blocks == 0
    lookup = worker.link.lookup([(first, 4)])
    assert lookup.done, "no call follows shortly after a failure to reach the store"
    assert worker.link.start_save([(first, 4, 1)]).done


async def test_a_new_peer_that_does_not_answer_delays_no_other(cluster: Cluster) -> None:
    """It accepts and never answers; this test runs on the link's loop, so that any wait would delay it."""
    writer, reader = await cluster.worker(False), await cluster.worker(False, load_timeout_s=PATIENCE_S)
    (first,) = hashes_of(4)
    await writer.save([(first, 4, 1)])
    lookup = await reader.lookup([(first, 4)])
    (grant,) = lookup.grants
    with Mute() as mute:
        segment = reader.transfer.open(mute.instead_of(grant.segment.descriptor))
        expires_at = clock.monotonic() + PATIENCE_S
        lookup.grants = [dataclasses.replace(grant, segment=segment, expires_at=expires_at)]
        load = reader.link.start_load(lookup, [5])
        await mute.met()
        assert (mute.is_waited_for(), load.done) == (True, False)
    await asyncio.to_thread(wait_for, lambda: load.done, "the load to be done", PATIENCE_S)
    assert load.failed


async def test_no_room_is_refused_and_nothing_breaks(cluster: Cluster) -> None:
    worker = await cluster.worker(False)
    object_bytes = LAYOUT.object_bytes(4)
    count = (1 << 20) // object_bytes + NUM_BLOCKS
    hashes = block_hashes(range(4 * count), 4, root_hash())
    stored = 0
    for start in range(0, count, 8):
        save = await worker.save([(h, 4, 1 + i) for i, h in enumerate(hashes[start : start + 8])])
        stored += save.num_stored_blocks
    assert 0 < stored <= count
    cluster.master.master.check()


@pytest.mark.parametrize("num_slabs", [1, 2])
async def test_blocks_of_another_engine_arrive_as_they_were(cluster: Cluster, num_slabs: int) -> None:
    layout = dataclasses.replace(FOREIGN, num_slabs=num_slabs)
    writer, reader = await cluster.foreign(layout=layout), await cluster.foreign(layout=layout)
    first, second = block_hashes(range(64), 32, root_hash())
    save = await writer.save([(first, 32, 7), (second, 32, 2)])
    assert save.num_stored_blocks == 2
    before = [layer.copy() for layer in reader.layers]
    lookup = await reader.lookup([(first, 32), (second, 32)])
    load = await reader.load(lookup, [0, NUM_BLOCKS - 1])
    assert not load.failed
    assert reader.block(0) == writer.block(7)
    assert reader.block(NUM_BLOCKS - 1) == writer.block(2)
    for layer, was in zip(reader.layers, before, strict=True):
        assert np.array_equal(layer[:, 1:-1], was[:, 1:-1])
        assert np.array_equal(layer[:, :, FOREIGN.slab_bytes :], was[:, :, FOREIGN.slab_bytes :])


OTHERS: list[dict[str, Any]] = [
    {"dtype": "float32"},
    {"weights": "other"},
    {"layout": dataclasses.replace(FOREIGN, slab_bytes=48)},
    {"layout": dataclasses.replace(FOREIGN, block_tokens=16)},
]


@pytest.mark.parametrize("other", OTHERS, ids=["dtype", "weights", "slab", "block"])
async def test_blocks_of_another_kind_of_engine_are_not_found(
    cluster: Cluster, other: dict[str, Any]
) -> None:
    same = {"dtype": "bfloat16", "weights": "w", "layout": FOREIGN}
    writer = await cluster.foreign(**same)
    reader, stranger = await cluster.foreign(**same), await cluster.foreign(**{**same, **other})
    (first,) = block_hashes(range(32), 32, root_hash())
    await writer.save([(first, 32, 7)])
    assert (await reader.lookup([(first, 32)])).num_blocks == 1
    assert (await stranger.lookup([(first, 32)])).num_blocks == 0


class LateClock:
    """The real clock plus a test's offset."""

    def __init__(self) -> None:
        self.late_s = 0.0

    def monotonic(self) -> float:
        return clock.monotonic() + self.late_s


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> LateClock:
    """The clock of the link and its claims."""
    other = LateClock()
    monkeypatch.setattr(blocks, "clock", other)
    return other


async def test_a_load_that_ends_after_its_lease_has_failed(cluster: Cluster, late: LateClock) -> None:
    """Its bytes and checksums are right; but the space may have been reused meanwhile."""
    worker = await cluster.worker(False)
    (first,) = hashes_of(4)
    await worker.save([(first, 4, 1)])
    lookup = await worker.lookup([(first, 4)])
    load = worker.link.start_load(lookup, [5])
    late.late_s = 1000.0  # before this loop, which is the link's, processes any completion
    await asyncio.to_thread(wait_for, lambda: load.done, "the load to be done", TIMEOUT_S)
    assert load.failed


async def test_a_write_ends_before_its_space_may_be_reused(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await cluster.worker(False, load_timeout_s=1000.0)
    (first,) = hashes_of(4)
    start_puts, submit = worker.link._store.start_puts, worker.transfer.submit
    timeouts_s: list[float] = []

    async def short(*args: Any, **kwargs: Any) -> Any:
        grants = await start_puts(*args, **kwargs)
        for grant in grants:
            assert isinstance(grant, PutGrant)
            grant.expires_at = clock.monotonic() + TIMEOUT_S
        return grants

    def noted(*args: Any, timeout_s: float, **kwargs: Any) -> None:
        timeouts_s.append(timeout_s)
        submit(*args, timeout_s=timeout_s, **kwargs)

    monkeypatch.setattr(worker.link._store, "start_puts", short)
    monkeypatch.setattr(worker.transfer, "submit", noted)
    assert (await worker.save([(first, 4, 1)])).num_stored_blocks == 1
    assert len(timeouts_s) == LAYOUT.num_layers and max(timeouts_s) <= TIMEOUT_S


async def test_no_write_begins_in_expired_space(cluster: Cluster, late: LateClock) -> None:
    """The timer that expires it may be late, too: a thread that was paused checks the clock itself."""
    worker = await cluster.worker(False)
    (first,) = hashes_of(4)
    save = worker.link.start_save([(first, 4, 1)])
    worker.link.save_layer(save, 0)

    def is_written() -> bool:
        return save.grants is not None and not save.claim.num_inside

    await asyncio.to_thread(wait_for, is_written, "the first layer to be written", TIMEOUT_S)
    late.late_s = 1000.0
    worker.link.save_layer(save, 1)
    assert save.num_layers_submitted == 1 and not save.is_wanted
    worker.link.finish_save(save)
    await asyncio.to_thread(wait_for, lambda: save.done, "the save to be done", TIMEOUT_S)
    assert save.num_stored_blocks == 0
    assert (await (await cluster.worker(False)).lookup([(first, 4)])).num_blocks == 0


async def test_an_object_of_another_size_is_not_a_block(cluster: Cluster) -> None:
    worker = await cluster.worker(False)
    first, second = hashes_of(8)
    key, size_bytes = worker.link._identity.key(first), LAYOUT.object_bytes(4)
    assert await worker.link._store.put(key, bytes(size_bytes - 1)) is None
    await worker.save([(second, 4, 2)])
    assert (await worker.lookup([(second, 4), (first, 4)])).num_blocks == 1
    assert (await worker.lookup([(first, 4), (second, 4)])).num_blocks == 0


async def test_a_load_that_fails_is_counted_once(cluster: Cluster) -> None:
    worker, counter = await cluster.worker(False), blocks.failures.labels("load")
    (first,) = hashes_of(4)
    await worker.save([(first, 4, 1)])
    lookup = await worker.lookup([(first, 4)])
    (region,) = cluster.node.engine.describe().regions
    before = counter._value.get()
    assert not (await worker.load(lookup, [4])).failed
    assert counter._value.get() == before, "nothing has failed yet"
    for layer in range(LAYOUT.num_layers):
        _flip(cluster.node, lookup.grants[0].address - region.address + LAYOUT.object_offsets(layer, 4)[0])
    assert (await worker.load(lookup, [5])).failed
    assert counter._value.get() == before + 1


class Stuck(LateDevice):
    """A device that does nothing until the test lets it."""

    is_stuck = True

    def do_some(self) -> None:
        if not self.is_stuck:
            super().do_some()


async def test_the_last_wait_of_a_bad_load_ends_when_it_counts_as_failed(cluster: Cluster) -> None:
    """Otherwise the engine would take what it computed from the load for good."""
    device = Stuck()
    writer, reader = await cluster.worker(True), await cluster.worker(True, device=device)
    (first,) = hashes_of(4)
    await writer.save([(first, 4, 1)])
    lookup = await reader.lookup([(first, 4)])
    (region,) = cluster.node.engine.describe().regions
    _flip(cluster.node, lookup.grants[0].address - region.address + LAYOUT.object_offsets(3, 4)[0])
    load = reader.link.start_load(lookup, [5])

    def engine() -> bool:
        reader.link.wait_layer([load], LAYOUT.num_layers - 1)
        return load.failed

    waiting = asyncio.create_task(asyncio.to_thread(engine))
    await asyncio.to_thread(
        wait_for, lambda: load.num_layers_loaded == LAYOUT.num_layers, "the bytes to arrive", TIMEOUT_S
    )
    await asyncio.sleep(0.05)
    assert load.is_bad and not load.done and not waiting.done()
    device.is_stuck = False
    assert await asyncio.wait_for(waiting, TIMEOUT_S)


LONG = [(block_hash, 4) for block_hash in hashes_of(40)]
"""A prefix of ten blocks."""


async def saved_prefix(cluster: Cluster) -> Worker:
    """The worker that has saved the blocks of ``LONG``, in order, from block 1 on."""
    writer = await cluster.worker(False)
    save = await writer.save([(name, tokens, 1 + index) for index, (name, tokens) in enumerate(LONG)])
    assert save.num_stored_blocks == len(LONG)
    return writer


@pytest.mark.parametrize("num_slots", [2, 6, 16])
async def test_a_prefix_longer_than_the_staging_area_is_loaded_in_pieces(
    cluster: Cluster, num_slots: int
) -> None:
    writer = await saved_prefix(cluster)
    device = LateDevice()
    reader = await cluster.worker(True, device=device, num_slots=num_slots)
    before = reader.pool.clone()
    lookup = await reader.lookup(LONG)
    blocks_read = [11, *range(2, 11)]
    load = await reader.load(lookup, blocks_read)
    assert (load.failed, load.num_layers_loaded) == (False, LAYOUT.num_layers), device
    assert torch.equal(reader.pool[:, :, blocks_read], writer.pool[:, :, 1:11]), device
    assert torch.equal(reader.pool[:, :, :2], before[:, :, :2]), device
    assert reader.link.has_room(num_slots // 2, "load")


async def test_loads_that_wait_for_room_get_it_in_their_order(cluster: Cluster) -> None:
    """Before, those that found the staging area in use were refused."""
    writer = await saved_prefix(cluster)
    device = Stuck()
    reader = await cluster.worker(True, device=device, num_slots=4)
    lookup = await reader.lookup(LONG)
    begun = [reader.link.start_load(lookup, ids) for ids in ([1, 2, 3, 4], [5, 6, 7], [8])]
    await asyncio.sleep(0.05)
    assert not any(load.done for load in begun) and len(begun[0].held) == 2
    assert not begun[1].held and not begun[2].held, "the last one, which is short, has not overtaken"
    assert begun[0].num_layers_loaded == 0, "a step must not begin before all pieces have"
    device.is_stuck = False

    def ended() -> bool:
        return all(load.done for load in begun)

    await asyncio.to_thread(wait_for, ended, "the loads to be done", TIMEOUT_S)
    assert not any(load.failed for load in begun), device
    for first, num_blocks in ((1, 4), (5, 3), (8, 1)):
        found = reader.pool[:, :, first : first + num_blocks]
        assert torch.equal(found, writer.pool[:, :, 1 : 1 + num_blocks]), device


async def test_a_load_that_gets_no_room_in_time_fails(cluster: Cluster) -> None:
    await saved_prefix(cluster)
    reader = await cluster.worker(True, num_slots=4, load_timeout_s=0.3)
    counter = blocks.failures.labels("load")
    lookup = await reader.lookup(LONG)
    in_use = reader.link._memory.hold([0, 1], "load")
    assert in_use is not None
    before = counter._value.get()
    load = await reader.load(lookup, list(range(1, 11)))
    assert load.failed and not load.held and counter._value.get() == before + 1
    reader.link._memory.release(in_use)
    assert not (await reader.load(await reader.lookup(LONG), list(range(1, 11)))).failed


async def test_a_wrong_piece_fails_its_load_and_what_has_not_begun_of_it(cluster: Cluster) -> None:
    await saved_prefix(cluster)
    reader = await cluster.worker(True, num_slots=4)
    counter = blocks.failures.labels("load")
    lookup = await reader.lookup(LONG)
    (region,) = cluster.node.engine.describe().regions
    _flip(cluster.node, lookup.grants[1].address - region.address + LAYOUT.object_offsets(3, 4)[0])
    before = counter._value.get()
    load = await reader.load(lookup, list(range(1, 11)))
    assert load.failed and load.claim.num_inside == 0 and counter._value.get() == before + 1
    assert len(load.held) < len(LONG), "the rest is of no use"
    assert reader.link.has_room(2, "load")

    async def is_dropped() -> bool:
        return len((await reader.lookup(LONG)).grants) <= 1

    await until(is_dropped, "the end of the object whose damage the load has reported", TIMEOUT_S)
    await saved_prefix(cluster)
    assert not (await reader.load(await reader.lookup(LONG), list(range(1, 11)))).failed


async def test_a_link_that_is_closed_ends_the_loads_that_wait(cluster: Cluster) -> None:
    await saved_prefix(cluster)
    reader = await cluster.worker(True, num_slots=4)
    lookup = await reader.lookup(LONG)
    in_use = reader.link._memory.hold([0, 1], "load")
    load = reader.link.start_load(lookup, list(range(1, 11)))
    assert in_use is not None and not load.done
    await reader.link.close()
    assert load.failed


@pytest.mark.parametrize("when", ["load", "save"])
async def test_a_device_that_can_not_copy_costs_the_operation_and_no_other(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    first, second = hashes_of(8)
    device = LateDevice()
    worker, writer = await cluster.worker(True, device=device), await cluster.worker(True)
    await writer.save([(first, 4, 1), (second, 4, 2)])

    def refuse(*_: object) -> None:
        raise RuntimeError("out of memory")

    lookup = await worker.lookup([(first, 4)])
    with monkeypatch.context() as patch:
        memory = worker.link._memory
        name = "enter" if when == "load" else "leave"
        patch.setattr(memory, name, refuse)
        if when == "load":
            assert (await worker.load(lookup, [5])).failed
        else:
            (other,) = block_hashes(range(70, 74), LAYOUT.block_tokens, root_hash(), include_partial=True)
            assert (await worker.save([(other, 4, 3)])).num_stored_blocks == 0
    lookup = await worker.lookup([(first, 4), (second, 4)])
    assert not (await worker.load(lookup, [5, 6])).failed
    assert torch.equal(worker.pool[:, :, 5], writer.pool[:, :, 1])
    assert all(worker.link._memory.has_room(NUM_BLOCKS, purpose) for purpose in ("load", "save"))


async def test_a_load_is_done_when_its_copies_have_ended_and_no_sooner(cluster: Cluster) -> None:
    """Until then its blocks and its staging memory are in use, also after its deadline."""
    device = Stuck()
    writer = await cluster.worker(True)
    reader = await cluster.worker(True, device=device, load_timeout_s=0.5)
    (first,) = hashes_of(4)
    await writer.save([(first, 4, 1)])
    lookup = await reader.lookup([(first, 4)])
    memory = reader.link._memory
    load = reader.link.start_load(lookup, [5])
    await asyncio.to_thread(
        wait_for, lambda: load.num_layers_loaded == LAYOUT.num_layers, "the bytes to arrive", TIMEOUT_S
    )
    assert not load.claim.wait(load.deadline + 0.1)
    assert not (load.done or load.failed or memory.has_room(NUM_BLOCKS, "load"))
    device.is_stuck = False
    assert await asyncio.to_thread(load.claim.wait, clock.monotonic() + TIMEOUT_S)
    assert not load.failed and memory.has_room(NUM_BLOCKS, "load")
    assert torch.equal(reader.pool[:, :, 5], writer.pool[:, :, 1])


@pytest.mark.parametrize("ends_by", ["abort", "expiry", "refusal"])
async def test_a_save_is_done_when_its_copies_have_ended_and_no_sooner(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, ends_by: str
) -> None:
    """It may have failed long before: the device still reads the blocks, and writes its staging memory."""
    device = Stuck()
    worker = await cluster.worker(True, device=device)
    memory, link = worker.link._memory, worker.link
    (first,) = hashes_of(4)
    if ends_by == "refusal":
        await (await cluster.worker(True)).save([(first, 4, 1)])  # the store has it: nothing is granted
    save = link.start_save([(first, 4, 1)])
    link.save_layer(save, 0)
    if ends_by == "abort":
        link.abort_save(save)
    else:
        link.finish_save(save)
        ended = (lambda: save.is_ended) if ends_by == "refusal" else (lambda: save.grants is not None)
        await asyncio.to_thread(wait_for, ended, "the store's answer", TIMEOUT_S)
    if ends_by == "expiry":
        link._expire_save(save)
    assert save.claim.num_inside == 1 and not save.done
    link.save_layer(save, 1)
    assert save.claim.num_inside == 1, "a copy was begun for a save that has ended"
    assert not memory.has_room(NUM_BLOCKS, "save")
    device.is_stuck = False
    assert await asyncio.to_thread(save.claim.wait, clock.monotonic() + TIMEOUT_S)
    await asyncio.to_thread(wait_for, lambda: memory.has_room(NUM_BLOCKS, "save"), "its room", TIMEOUT_S)
    assert save.num_stored_blocks == (1 if ends_by == "refusal" else 0)


async def test_a_link_is_closed_when_no_copy_is_under_way(cluster: Cluster) -> None:
    device = Stuck()
    worker = await cluster.worker(True, device=device)
    (first,) = hashes_of(4)
    save = worker.link.start_save([(first, 4, 1)])
    worker.link.save_layer(save, 0)
    await asyncio.to_thread(wait_for, lambda: save.grants is not None, "the store's answer", TIMEOUT_S)
    assert save.claim.num_inside == 1
    await worker.link.close()
    assert save.done and not save.num_stored_blocks


async def test_unregistered_memory_fails_its_loads_and_saves_and_nothing_else(cluster: Cluster) -> None:
    worker = await cluster.worker(False)
    first, second = hashes_of(8)
    await worker.save([(first, 4, 1)])
    lookup = await worker.lookup([(first, 4)])
    for region in worker.link._regions:
        worker.transfer.unregister(region)
    assert (await worker.load(lookup, [5])).failed
    save = await worker.save([(second, 4, 2)])
    assert save.done and save.num_stored_blocks == 0


async def test_an_engine_whose_wake_fails_gets_its_blocks_back(cluster: Cluster) -> None:
    worker = await cluster.worker(False)

    def fail() -> None:
        raise RuntimeError("the engine's own")

    worker.link.attach(fail)
    (first,) = hashes_of(4)
    assert (await worker.save([(first, 4, 1)])).num_stored_blocks == 1
    lookup = await worker.lookup([(first, 4)])
    assert not (await worker.load(lookup, [5])).failed


def test_no_call_is_made_for_a_while_after_the_store_could_not_be_reached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    instants = [100.0]
    monkeypatch.setattr(clock, "monotonic", lambda: instants[-1])
    breaker = CircuitBreaker(retry_after_s=2.0)

    def is_open(at: float) -> bool:
        instants.append(at)
        return breaker.is_open

    assert not is_open(at=100.0)
    breaker.trip("load", TimeoutError())
    assert is_open(at=100.0) and is_open(at=101.9)
    assert not is_open(at=102.1)

# SPDX-License-Identifier: Apache-2.0
"""A worker's link to the store, and beside it the push of KV from one worker to another.

The engine has one link: what concerns the store goes on to the store's link, what is pushed goes over
``connectors.layer_push``. It owns the crossing from the engine's thread to the loop on which both ends of the
push live, the memory that is registered for it, and the metrics. Only a pool in main memory
is pushed: for that of a device the worker has no listener, and KV goes by the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import torch
from prometheus_client import Counter, Histogram

from mooncake import clock
from mooncake.connectors.kv_link import AnyLink, KvLoad, PushSource
from mooncake.connectors.layer_push import LayerReceiver, LayerSender, PushedLoad, PushPart
from mooncake.connectors.memory import SlabMemory
from mooncake.connectors.peer_push import BlockRequest, PushOutcome
from mooncake.inference.host_memory import host_memory
from mooncake.kvlayout import KvIdentity, KvLayout, SlabLayout
from mooncake.log import get_logger
from mooncake.metrics import registry
from mooncake.prefix import BlockHash
from mooncake.transfer import Region, TransferEngine, TransferSettings

log = get_logger(__name__)

HOLD_S = 5.0
"""How long a computed prompt's blocks are kept for a decode worker that has not requested them yet."""

REVOCABLE = ("rdma", "tcp")
"""Transports whose writes end at the receiver's host, so that it can end them. A process that maps the memory
could be stopped in the midst of a copy, and go on when the blocks have another prompt's KV."""

RECEIVE_TIMEOUT_S = 120.0
"""Longest time from a decode worker's request to the last layer: that of computing the prompt elsewhere."""

blocks_total = Counter(
    "mooncake_inference_push_blocks",
    "Blocks by outcome of their push: pushed, refused (sender), received, recomputed (receiver).",
    ["outcome"],
    registry=registry,
)
bytes_total = Counter(
    "mooncake_inference_push_bytes",
    "Bytes of KV that went from worker to worker.",
    ["outcome"],
    registry=registry,
)
seconds = Histogram(
    "mooncake_inference_push_seconds",
    "Seconds of transfers (pushed) and from the request of blocks to their arrival (received).",
    ["outcome"],
    registry=registry,
)


def count(push: PushOutcome) -> None:
    """Count what happened to some blocks."""
    blocks_total.labels(push.outcome).inc(push.num_blocks)
    bytes_total.labels(push.outcome).inc(push.num_bytes)
    if push.seconds is not None:
        seconds.labels(push.outcome).observe(push.seconds)


def registered_pool(
    transfer: TransferEngine, layout: KvLayout, size_bytes: int
) -> tuple[Region, torch.Tensor]:
    """Memory for KV blocks on the CPU, zeroed, and its region, to which other workers write.

    The tensor is ``layout.pool_shape(num_blocks)``, and keeps the memory mapped.

    Raises:
        OutOfMemory: the machine does not have that much.
    """
    num_blocks = max(2, size_bytes // layout.pool_bytes(1))
    region = transfer.allocate(layout.pool_bytes(num_blocks))
    flat = torch.frombuffer(memoryview(region), dtype=torch.uint8)
    return region, flat.view(getattr(torch, layout.dtype)).view(layout.pool_shape(num_blocks))


class PushLink:
    """A ``PushingLink``: ``link`` and both ends of the push.

    Args:
        pool, region: as ``registered_pool`` makes them with ``transfer``.
        loop: the loop on which ``start`` and ``close`` are called.
    """

    def __init__(
        self,
        link: Any,
        transfer: TransferEngine,
        identity: KvIdentity,
        pool: torch.Tensor,
        region: Region,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        layout = identity.layout
        memory = host_memory(layout, pool, 0)
        assert isinstance(memory, SlabMemory), "the pool of a device is not pushed"
        slabs = SlabLayout(
            layout.num_layers, layout.num_slabs, layout.chunk_bytes(layout.block_tokens), layout.block_tokens
        )
        self._link: AnyLink = link
        self._store_link = link
        self._loop = loop
        self._num_layers = layout.num_layers
        self._wake: Callable[[], None] = lambda: None
        self.sender = LayerSender(
            transfer, slabs, identity.digest, memory, HOLD_S, lambda part: self._wake(), count
        )
        self.receiver = LayerReceiver(
            transfer,
            slabs,
            identity.digest,
            memory,
            RECEIVE_TIMEOUT_S,
            count,
            lambda: self._wake(),
            [region],
        )
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, host: str, port: int) -> None:
        """Listen for decode workers. Raises as ``LayerSender.start``."""
        await self.sender.start(host, port)

    async def close(self) -> None:
        """Stop; nothing that is pushed touches the pool afterwards."""
        await self.sender.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.receiver.close()

    def replace_identity(self, identity: KvIdentity) -> None:
        """Use another identity of the same layout from now on; nothing may be under way."""
        self._store_link.replace_identity(identity)

        def replace() -> None:
            self.sender.digest = identity.digest
            self.receiver.replace_digest(identity.digest)

        self._loop.call_soon_threadsafe(replace)

    # -- pushes, on the engine's thread

    def start_receive(
        self, source: PushSource, prompt: bytes, first: int, block_ids: Sequence[int]
    ) -> PushedLoad:
        wanted = BlockRequest(source.transfer_id, prompt, first, list(block_ids), source.address)
        load = PushedLoad(wanted, self._num_layers)
        self._loop.call_soon_threadsafe(self._begin_load, load)
        return load

    def _begin_load(self, load: PushedLoad) -> None:
        task = self._loop.create_task(self.receiver.load(load))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def withdraw(self, load: KvLoad) -> None:
        assert isinstance(load, PushedLoad)
        self._loop.call_soon_threadsafe(self.receiver.withdraw, load)

    def start_push(
        self,
        transfer_id: str,
        prompt: bytes,
        num_blocks: int,
        first: int,
        block_ids: Sequence[int],
        load: KvLoad | None,
    ) -> PushPart:
        part = PushPart(transfer_id, prompt, num_blocks, first, block_ids, load)
        self._loop.call_soon_threadsafe(self.sender.begin, part)
        return part

    def end_push(self, transfer_id: str, reason: str) -> None:
        self._loop.call_soon_threadsafe(self.sender.drop, transfer_id, reason)

    # -- the engine's link

    def attach(self, wake: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                wake()
            except Exception:  # the engine's own code; transfers must end all the same
                log.exception("callback_failed")

        self._wake = guarded
        self._link.attach(wake)

    def lookup(self, blocks: Sequence[tuple[BlockHash, int]]) -> Any:
        return self._link.lookup(blocks)

    def release(self, lookup: Any) -> None:
        self._link.release(lookup)

    def start_load(self, lookup: Any, block_ids: Sequence[int]) -> Any:
        return self._link.start_load(lookup, block_ids)

    def wait_layer(self, loads: Sequence[Any], layer: int) -> None:
        others = []
        for load in loads:
            if isinstance(load, PushedLoad):
                load.wait_layer(layer)
            else:
                others.append(load)
        if others:
            self._link.wait_layer(others, layer)

    def start_save(self, blocks: Sequence[tuple[BlockHash, int, int]]) -> Any:
        return self._link.start_save(blocks)

    def save_layer(self, save: Any, layer: int) -> None:
        if not isinstance(save, PushPart):
            self._link.save_layer(save, layer)
        elif save.load is not None and save.load.failed:
            # What was computed with it is wrong. The step's other layers must not follow either.
            self.end_push(save.transfer_id, "prefill's load has failed")
        else:
            self._loop.call_soon_threadsafe(self.sender.layer_computed, save, clock.monotonic())

    def finish_save(self, save: Any) -> None:
        self._link.finish_save(save)

    def abort_save(self, save: Any) -> None:
        self._link.abort_save(save)


@contextlib.asynccontextmanager
async def push_transfer(settings: TransferSettings) -> AsyncIterator[TransferEngine]:
    """The transfer engine of a worker that pushes and is pushed to, beside the one of its store link."""
    paths = tuple(path for path in settings.transports if path in REVOCABLE) or ("tcp",)
    transfer = TransferEngine(dataclasses.replace(settings.for_tool(), transports=paths))
    with contextlib.closing(transfer):
        yield transfer

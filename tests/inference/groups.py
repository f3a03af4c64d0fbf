# SPDX-License-Identifier: Apache-2.0
"""Prefill groups whose stages are in this process, but connected as processes are."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Sequence

import torch

from mooncake.connectors.memory import SlabMemory
from mooncake.connectors.staged_memory import staged
from mooncake.connectors.store_link import StoreLink
from mooncake.inference.engine import Engine, EngineThread, InferenceSettings, Output
from mooncake.inference.group_link import GroupLink
from mooncake.inference.host_memory import host_memory
from mooncake.inference.pipeline import layer_ranges
from mooncake.inference.prefill_group import GroupRunner, GroupSettings, PrefillGroup, chunk_plan
from mooncake.inference.request import Request
from mooncake.inference.runner import TorchRunner, new_pool
from mooncake.inference.stage import Stage, stage_transfer
from mooncake.inference.weights import load_model, read_config
from mooncake.kvlayout import KvIdentity
from mooncake.transfer import TransferSettings
from tests.connectors.late_device import LateDevice
from tests.contract.connectors import StoreConnector
from tests.inference.conftest import Reference

HOST = "127.0.0.1"
BLOCK = 16
TIMEOUT_S = 60.0


@dataclasses.dataclass
class Answered:
    """An answer that has ended."""

    tokens: list[int]
    last: Output


class LiveEngine:
    """An engine on its thread."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._loop = asyncio.get_running_loop()
        self._tokens: dict[str, list[int]] = {}
        self._ended: dict[str, asyncio.Future[Answered]] = {}
        self._thread = EngineThread(engine, lambda outputs, events: self._from_thread(outputs))
        self._thread.start()

    def _from_thread(self, outputs: Sequence[Output]) -> None:
        self._loop.call_soon_threadsafe(self._take, outputs)

    def add(self, request: Request) -> asyncio.Future[Answered]:
        self._tokens[request.id] = []
        future = self._ended[request.id] = self._loop.create_future()
        refusal = self.engine.add(request)
        assert refusal is None, refusal
        return future

    async def ask(self, request: Request) -> Answered:
        return await asyncio.wait_for(self.add(request), TIMEOUT_S)

    def _take(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            self._tokens[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                answered = Answered(self._tokens[output.request_id], output)
                self._ended[output.request_id].set_result(answered)

    async def stop(self) -> None:
        assert await asyncio.to_thread(self._thread.stop), "a load or save did not end"
        self.engine.check()


class LiveGroup(LiveEngine):
    """A first stage's engine, its group, and the other stages."""

    def __init__(self, engine: Engine, group: PrefillGroup, stages: list[Stage]) -> None:
        super().__init__(engine)
        self.group, self.stages = group, stages


def pool_for(reference: Reference, num_blocks: int, layers: range) -> torch.Tensor:
    model = load_model(reference.folder, layers=layers)
    size = num_blocks * model.kv_layout(BLOCK).pool_bytes(1)
    # Unwritten memory must not be read: here it would turn every answer into NaN.
    return new_pool(model, BLOCK, size).fill_(torch.nan)


@contextlib.asynccontextmanager
async def running_stage(
    reference: Reference, layers: range, num_blocks: int = 64, weights: str = "w", is_staged: bool = False
) -> AsyncIterator[Stage]:
    """One stage that listens at a free port."""
    model = load_model(reference.folder, layers=layers)
    pool = pool_for(reference, num_blocks, layers)
    with contextlib.closing(stage_transfer(HOST, TransferSettings())) as transfer:
        stage = Stage(model, pool, weights, transfer)
        if is_staged:  # as with a device: blocks pass through other memory
            layout, placed = model.kv_layout(BLOCK), stage._memory
            assert isinstance(placed, SlabMemory)
            device, size_bytes = LateDevice(computes_now=True), 2 * num_blocks * layout.pool_bytes(1)
            tensors, slab_bytes = [pool] * layout.num_layers, layout.chunk_bytes(BLOCK)
            stage._memory = staged(device, tensors, placed, num_blocks, slab_bytes, size_bytes)
            stage._regions += transfer.register_all(stage._memory.buffers)
        await stage.server.start(HOST, 0)
        try:
            yield stage
        finally:
            await stage.close()


@contextlib.asynccontextmanager
async def running_group(
    reference: Reference,
    num_stages: int,
    *,
    store: StoreConnector | None = None,
    stages: Sequence[Stage] | None = None,
    identity: str = "w",
    num_blocks: int = 64,
    max_batch_tokens: int = 64,
    is_staged: bool = False,
    counts: tuple[int, ...] = (),
) -> AsyncIterator[LiveGroup]:
    """A group; ``stages``: existing ones, which it takes over; ``counts``: layers of each stage."""
    ranges = layer_ranges(read_config(reference.folder).num_layers, num_stages, counts)
    async with contextlib.AsyncExitStack() as stack:
        found = list(stages or ())
        for layers in ranges[1:] if stages is None else ():
            one = running_stage(reference, layers, num_blocks, is_staged=is_staged)
            found.append(await stack.enter_async_context(one))
        model = load_model(reference.folder, layers=ranges[0])
        pool = pool_for(reference, num_blocks, ranges[0])
        transfer = stack.enter_context(contextlib.closing(stage_transfer(HOST, TransferSettings())))
        addresses = tuple(f"{HOST}:{stage.server.port}" for stage in found)
        settings = GroupSettings(addresses, "w", BLOCK, max_batch_tokens, 16, counts)
        group = PrefillGroup(model, settings, transfer)
        stack.push_async_callback(group.close)
        await group.form()
        link = None
        if store is not None:
            client, link_transfer = await stack.enter_async_context(store._client())
            whole = KvIdentity(identity, "t", model.config.kv_layout(model.dtype, BLOCK))
            memory = host_memory(model.kv_layout(BLOCK), pool, 0)
            loop = asyncio.get_running_loop()
            link = GroupLink(client, link_transfer, whole, memory, loop, group)
            stack.push_async_callback(link.close)
        runner = GroupRunner(model, pool, group, link)
        plan = dataclasses.replace(chunk_plan(model, group.settings), overhead_tokens=4.0, granularity=8)
        limits = InferenceSettings(max_batch_tokens=max_batch_tokens, max_running=16, chunk_plan=plan)
        live = LiveGroup(Engine(limits, runner, link, pipeline=runner), group, found)
        stack.push_async_callback(live.stop)
        yield live


@contextlib.asynccontextmanager
async def running_worker(
    reference: Reference, store: StoreConnector, identity: str, num_blocks: int = 64
) -> AsyncIterator[LiveEngine]:
    """A single worker with a link to the store."""
    async with contextlib.AsyncExitStack() as stack:
        model = load_model(reference.folder)
        pool = pool_for(reference, num_blocks, model.layers)
        layout = model.kv_layout(BLOCK)
        client, transfer = await stack.enter_async_context(store._client())
        whole = KvIdentity(identity, "t", layout)
        link = StoreLink(client, transfer, whole, host_memory(layout, pool, 0), asyncio.get_running_loop())
        stack.push_async_callback(link.close)
        live = LiveEngine(Engine(InferenceSettings(), TorchRunner(model, pool, link), link))
        stack.push_async_callback(live.stop)
        yield live

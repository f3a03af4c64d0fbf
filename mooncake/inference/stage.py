# SPDX-License-Identifier: Apache-2.0
"""A stage of a prefill group: a process with some layers of the model, and the KV blocks of these layers.

The group's first stage is the worker that clients see (``prefill_group.py``); it decides what is computed,
and which blocks are whose. A stage follows: hidden states come by ``write(..., notify=)`` into its ring, it
computes its layers and writes them on to the next stage, the last one writes logits to the first. Requests to
copy its layers of blocks to the store, or from there, come over rpc, each behind the chunks that it must not
overtake; so a stage's bytes go straight between its memory and the store's nodes.

A stage belongs to one group at a time, the latest that asked. It leaves a group when the connection to its
first stage is lost: then everything that touches its memory is ended before it joins the next one, whose
ring has a key of its own, so that nothing sent by the former group can arrive.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from mooncake import clock
from mooncake.connectors.memory import DeviceEvent, StagedBlocks
from mooncake.errors import InvalidArgument, MooncakeError, PeerLost, ProtocolError
from mooncake.inference.host_memory import host_memory
from mooncake.inference.model import Decoder
from mooncake.inference.pipeline import ChunkRows, StageQueue, StageTime
from mooncake.inference.runner import LayerRunner
from mooncake.kvlayout import KvLayout
from mooncake.log import get_logger
from mooncake.rpc import Call, Connection, RpcServer
from mooncake.security import TRUSTED, Access, check_address
from mooncake.transfer import (
    Notification,
    Op,
    Region,
    RemoteSegment,
    Status,
    TransferEngine,
    TransferSettings,
)
from mooncake.transfer.descriptor import decode_descriptor

log = get_logger(__name__)

STAGING_BYTES = 1 << 30
"""Pinned host memory through which the blocks of a device pass; unused on a CPU."""

HOP_TIMEOUT_S = 30.0
"""Timeout of passing a chunk on, after which the stage that does not take it counts as lost."""

CHUNK, CHUNK_DONE = "stage chunk", "stage chunk done"
"""Names of the notifications between stages, and from a stage to the first one."""

MAX_SLOTS = 256
MAX_ROWS = 1 << 20


class JoinGroup(msgspec.Struct, frozen=True, array_like=True, tag="stage_join"):
    """Request to become a stage of a group; answered by ``StageJoined``. Ends membership in another one."""

    group: str
    first_layer: int
    end_layer: int
    num_stages: int
    weights: str
    """Digest of the model's weights."""
    dtype: str
    block_tokens: int
    num_slots: int
    """Buffers of each ring."""
    max_rows: int
    """Most rows of a chunk."""
    max_samples: int
    """Most rows of a chunk whose logits are wanted."""
    next_descriptor: bytes
    """The process that this stage writes to, and the address of the ring there."""
    next_address: int
    leader_descriptor: bytes
    """The group's first stage, for the report of an error."""


class StageJoined(msgspec.Struct, frozen=True, array_like=True, tag="stage_joined"):
    """The stage's process and ring, and the number of blocks for which it has memory."""

    descriptor: bytes
    address: int
    num_blocks: int


class StageProbe(msgspec.Struct, frozen=True, array_like=True, tag="stage_probe"):
    """Check whether a stage is alive; answered by ``StageAlive``."""


class StageAlive(msgspec.Struct, frozen=True, array_like=True, tag="stage_alive"):
    group: str
    """The group that the stage belongs to; empty when to none."""


class MoveBlocks(msgspec.Struct, frozen=True, array_like=True, tag="stage_move"):
    """Request to copy this stage's layers of blocks to objects of the store (``is_save``), or from there."""

    group: str
    is_save: bool
    after: int
    """Number of the chunk behind which it is done."""
    descriptor: bytes
    """The store's node that has the objects."""
    block_ids: list[int]
    num_tokens: list[int]
    addresses: list[int]
    """Addresses of the objects, one for each block."""
    timeout_s: float


class BlocksMoved(msgspec.Struct, frozen=True, array_like=True, tag="stage_moved"):
    """The end of a copy. The stage's blocks and the objects are not touched afterwards."""

    status: str
    """``OK``, or the name of another ``Status``."""
    checksums: bytes = b""
    """Little-endian u32 [layers, blocks, slabs]: CRC32C of each slab."""


class StageChunk(msgspec.Struct, frozen=True, array_like=True):
    """A chunk whose hidden states have been written into the slot of its number."""

    group: str
    number: int
    rows: list[ChunkRows]
    times: list[StageTime]
    """Times of the stages before."""


class ChunkDone(msgspec.Struct, frozen=True, array_like=True):
    """The end of a chunk. The logits of its rows that sample have been written into its slot."""

    group: str
    number: int
    times: list[StageTime]
    error: str = ""


ACCESS = Access({JoinGroup: TRUSTED, StageProbe: TRUSTED, MoveBlocks: TRUSTED})
"""Clients of a stage where peers authenticate: the first stage of a group, a node without a tenant."""

_decode_chunk = msgspec.msgpack.Decoder(StageChunk).decode


class Ring:
    """Registered buffers of equal size, one for each chunk that may be under way, as one tensor."""

    def __init__(
        self, transfer: TransferEngine, num_slots: int, rows: int, columns: int, dtype: torch.dtype
    ) -> None:
        self._transfer = transfer
        item_bytes = torch.empty(0, dtype=dtype).element_size()
        self.row_bytes = columns * item_bytes
        self.slot_bytes = rows * self.row_bytes
        self.num_slots = num_slots
        self.region: Region = transfer.allocate(num_slots * self.slot_bytes)
        memory = memoryview(self.region)[: num_slots * self.slot_bytes]
        self.slots: Tensor = torch.frombuffer(memory, dtype=dtype).view(num_slots, rows, columns)

    @property
    def address(self) -> int:
        return self.region.address

    def close(self) -> None:
        """Revoke access; nothing of a peer arrives afterwards."""
        self._transfer.unregister(self.region)


@dataclasses.dataclass(frozen=True)
class Hop:
    """One chunk's bytes on the way to the next process, and the message that follows them."""

    number: int
    num_rows: int
    name: str
    message: bytes


class NextStage:
    """The way to the next process of a group: hops in order, from one ring into the same slots of another."""

    def __init__(self, transfer: TransferEngine, outbox: Ring, segment: RemoteSegment, address: int) -> None:
        self._transfer, self._outbox, self._segment, self._address = transfer, outbox, segment, address
        self._hops: asyncio.Queue[Hop] = asyncio.Queue()

    def put(self, hop: Hop) -> None:
        """Queue a hop whose rows are in the outbox; called on the loop."""
        self._hops.put_nowait(hop)

    async def run(self) -> None:
        """Pass on hops until cancelled. Raises MooncakeError when the next process does not take one."""
        outbox = self._outbox
        while True:
            hop = await self._hops.get()
            if not hop.num_rows:
                notify = self._transfer.notify
                await asyncio.to_thread(notify, self._segment, hop.name, hop.message, HOP_TIMEOUT_S)
                continue
            offset = hop.number % outbox.num_slots * outbox.slot_bytes
            await self._transfer.write(
                self._segment,
                [outbox.address + offset],
                [self._address + offset],
                [hop.num_rows * outbox.row_bytes],
                timeout_s=HOP_TIMEOUT_S,
                notify=(hop.name, hop.message),
            )


@dataclasses.dataclass
class StageMembership:
    """What a stage has while it belongs to a group."""

    join: JoinGroup
    connection: Connection
    inbox: Ring
    outbox: Ring
    next: NextStage
    leader: RemoteSegment
    queue: StageQueue[tuple[StageChunk, float], asyncio.Future[None]] = dataclasses.field(
        default_factory=StageQueue
    )
    """Chunks with the time of their arrival."""
    arrived: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    tasks: set[asyncio.Task[Any]] = dataclasses.field(default_factory=set)


class Stage:
    """The layers of one decoder, for the group that asks for them. Its methods run on one loop."""

    def __init__(self, model: Decoder, pool: Tensor, weights: str, transfer: TransferEngine) -> None:
        """``pool``: as ``new_pool`` makes it; ``weights``: digest of the whole model's weights."""
        self._runner = LayerRunner(model, pool)
        self._model, self._weights, self._transfer = model, weights, transfer
        self._num_blocks = int(pool.shape[2])
        self._whole: KvLayout = model.config.kv_layout(model.dtype, int(pool.shape[3]))
        self._memory = host_memory(self._runner.layout, pool, STAGING_BYTES)
        self._regions = transfer.register_all(self._memory.buffers)
        self._computer = ThreadPoolExecutor(1, "mooncake-stage")
        self._member: StageMembership | None = None
        self._leaving: asyncio.Task[None] | None = None
        """The end of the latest membership, which goes on when the request that has begun it is cancelled."""
        self._joining = asyncio.Lock()
        self._is_closing = False
        self._notifications = asyncio.get_running_loop().create_task(self._receive())
        self._farewells: set[asyncio.Task[None]] = set()
        self.server = RpcServer(
            {JoinGroup: self._join, StageProbe: self._probe, MoveBlocks: self._move},
            on_lost=self._lost,
            access=ACCESS,
            name="stage",
            is_peer=True,
        )

    async def close(self) -> None:
        self._is_closing = True
        async with self._joining:
            await self._leave("the stage is stopping")
        await self.server.close()
        self._notifications.cancel()
        await asyncio.gather(self._notifications, *self._farewells, return_exceptions=True)
        self._computer.shutdown()
        for region in self._regions:
            self._transfer.unregister(region)

    # ── membership ──────────────────────────────────────────────────────────────────────────────

    async def _join(self, join: JoinGroup, call: Call) -> StageJoined:
        self._check(join)
        async with self._joining:
            if self._is_closing:
                raise PeerLost("the stage is stopping; try again")
            await self._leave(f"group {join.group} has taken its place")
            member = self._member = self._membership(join, call.connection)
            self._spawn(member, self._compute_chunks(member))
            self._spawn(member, self._pass_on(member))
        log.info("group_joined", group=join.group, layers=f"{join.first_layer}-{join.end_layer - 1}")
        return StageJoined(self._transfer.describe().encode(), member.inbox.address, self._num_blocks)

    def _membership(self, join: JoinGroup, connection: Connection) -> StageMembership:
        """The rings of a membership and its ways to other processes; no ring is left when one fails."""
        model, config = self._model, self._model.config
        num_slots, max_rows = join.num_slots, join.max_rows
        with contextlib.ExitStack() as undo:
            inbox = Ring(self._transfer, num_slots, max_rows, config.hidden_size, model.dtype)
            undo.callback(inbox.close)
            if model.is_last:
                outbox = Ring(self._transfer, num_slots, join.max_samples, config.vocab_size, torch.float32)
            else:
                outbox = Ring(self._transfer, num_slots, max_rows, config.hidden_size, model.dtype)
            undo.callback(outbox.close)
            segment = self._transfer.open(decode_descriptor(join.next_descriptor))
            leader = self._transfer.open(decode_descriptor(join.leader_descriptor))
            ahead = NextStage(self._transfer, outbox, segment, join.next_address)
            undo.pop_all()
        return StageMembership(join, connection, inbox, outbox, ahead, leader)

    def _check(self, join: JoinGroup) -> None:
        """Raises InvalidArgument when this process can't be that stage."""
        layers = self._model.layers
        own = {
            "layers": [layers.start, layers.stop],
            "weights": self._weights,
            "dtype": self._whole.dtype,
            "block_tokens": self._whole.block_tokens,
        }
        wanted = {
            "layers": [join.first_layer, join.end_layer],
            "weights": join.weights,
            "dtype": join.dtype,
            "block_tokens": join.block_tokens,
        }
        for field, value in wanted.items():
            if value != own[field]:
                allowed = f"{own[field]}, as this stage was started; start all with the same settings"
                raise InvalidArgument(field, value, allowed)
        for field, limit in (("num_slots", MAX_SLOTS), ("max_rows", MAX_ROWS), ("max_samples", MAX_ROWS)):
            if not 1 <= getattr(join, field) <= limit:
                raise InvalidArgument(field, getattr(join, field), f"1 to {limit}")

    def _lost(self, connection: Connection) -> None:
        """Leave the group when its first stage's connection is lost."""
        if self._member is not None and self._member.connection is connection:
            self._farewell("the connection to its first stage is lost")

    def _farewell(self, reason: str) -> None:
        async def leave(member: StageMembership | None = self._member) -> None:
            async with self._joining:
                if self._member is member:
                    await self._leave(reason)

        task = asyncio.get_running_loop().create_task(leave())
        self._farewells.add(task)
        task.add_done_callback(self._farewells.discard)

    async def _leave(self, reason: str) -> None:
        """Leave the group; afterwards nothing touches the pool or the rings."""
        if self._member is not None:
            member, self._member = self._member, None
            self._leaving = asyncio.get_running_loop().create_task(self._end(member, reason))
        if self._leaving is not None:  # maybe of a caller that was cancelled
            try:
                await asyncio.shield(self._leaving)
            finally:
                if self._leaving.done():
                    self._leaving = None

    async def _end(self, member: StageMembership, reason: str) -> None:
        tasks = list(member.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # The computation of a chunk is not cancelled with its task.
        await self._on_computer(lambda: None)
        for ring in (member.inbox, member.outbox):
            await asyncio.to_thread(ring.close)
        log.info("group_left", group=member.join.group, reason=reason)

    def _probe(self, probe: StageProbe, call: Call) -> StageAlive:
        return StageAlive(self._member.join.group if self._member is not None else "")

    # ── chunks ──────────────────────────────────────────────────────────────────────────────────

    async def _receive(self) -> None:
        """Take notifications and queue their chunks."""
        while True:
            for one in await asyncio.to_thread(self._transfer.notifications, 1.0):
                try:
                    self._queue_chunk(one)
                except (ProtocolError, msgspec.MsgspecError) as error:
                    log.warning("chunk_refused", sender=one.sender, reason=str(error))
                    if self._member is not None:
                        await self._report(self._member, -1, f"a chunk was refused: {error}")

    def _queue_chunk(self, one: Notification) -> None:
        member = self._member
        if one.name != CHUNK:
            raise ProtocolError(f"{one.sender} sent {one.name!r} to a stage")
        chunk = _decode_chunk(one.message)
        if member is None or chunk.group != member.join.group:
            log.info("chunk_dropped", group=chunk.group, reason="this stage has left that group")
            return
        num_rows = sum(max(0, rows.num_tokens) for rows in chunk.rows)
        num_samples = sum(rows.samples for rows in chunk.rows)
        if not 0 < num_rows <= member.join.max_rows or num_samples > member.join.max_samples:
            raise ProtocolError(f"chunk {chunk.number} has {num_rows} rows of which {num_samples} sample")
        for rows in chunk.rows:
            num_needed = -(-rows.end // self._whole.block_tokens)
            if rows.start < 0 or rows.num_tokens < 1 or len(rows.block_ids) < num_needed:
                raise ProtocolError(f"chunk {chunk.number} has rows without blocks")
            self._check_blocks(rows.block_ids)
        member.queue.add_chunk(chunk.number, (chunk, clock.monotonic()))
        member.arrived.set()

    def _check_blocks(self, block_ids: list[int]) -> None:
        if not all(0 < block < self._num_blocks for block in block_ids):
            raise ProtocolError(f"a block is outside of this stage's {self._num_blocks}")

    async def _compute_chunks(self, member: StageMembership) -> None:
        """Compute chunks in order until the group is left."""
        free_since = clock.monotonic()
        while True:
            for duty in member.queue.take_duties():
                if not duty.done():
                    duty.set_result(None)
            taken = member.queue.take_chunk()
            if taken is None:
                member.arrived.clear()
                await member.arrived.wait()
                continue
            number, (chunk, arrived) = taken
            began = clock.monotonic()
            try:
                num_rows = await self._on_computer(self._compute, member, chunk)
            except Exception as error:
                log.exception("chunk_failed", group=chunk.group, number=number)
                await self._report(member, number, f"{type(error).__name__}: {error}")
                return
            member.queue.computed(number)
            ended = clock.monotonic()
            times = [*chunk.times, StageTime(began - free_since, ended - began, began - arrived)]
            free_since = ended
            if self._model.is_last:
                done = ChunkDone(chunk.group, number, times)
                member.next.put(Hop(number, num_rows, CHUNK_DONE, msgspec.msgpack.encode(done)))
            else:
                passed = msgspec.structs.replace(chunk, times=times)
                member.next.put(Hop(number, num_rows, CHUNK, msgspec.msgpack.encode(passed)))

    def _compute(self, member: StageMembership, chunk: StageChunk) -> int:
        """Compute a chunk on the computing thread; the number of rows in the outbox."""
        slot = chunk.number % member.join.num_slots
        num_rows = sum(rows.num_tokens for rows in chunk.rows)
        with torch.inference_mode():
            hidden = member.inbox.slots[slot, :num_rows].to(self._model.device, copy=True)
            hidden = self._runner.forward(chunk.rows, hidden, lambda layer: None)
            if self._model.is_last:
                hidden = self._runner.logits(chunk.rows, hidden)
            member.outbox.slots[slot, : hidden.shape[0]].copy_(hidden)
        return int(hidden.shape[0])

    async def _pass_on(self, member: StageMembership) -> None:
        try:
            await member.next.run()
        except MooncakeError as error:
            log.warning("hop_failed", group=member.join.group, reason=str(error))
            await self._report(member, -1, f"passing on a chunk failed: {error}")

    async def _report(self, member: StageMembership, number: int, error: str) -> None:
        """Report an error to the group's first stage, which ends the group."""
        message = msgspec.msgpack.encode(ChunkDone(member.join.group, number, [], error[:1000]))
        try:
            await asyncio.to_thread(self._transfer.notify, member.leader, CHUNK_DONE, message)
        except MooncakeError as failed:
            log.warning("error_not_reported", group=member.join.group, reason=str(failed))
            if self._member is member:  # its probes, which may still arrive, find that it has left
                self._farewell("its first stage did not take the report of an error")

    # ── blocks of the store ─────────────────────────────────────────────────────────────────────

    async def _move(self, move: MoveBlocks, call: Call) -> BlocksMoved:
        member = self._member
        if member is None or member.join.group != move.group:
            return BlocksMoved(Status.CANCELLED.name)
        self._check_blocks(move.block_ids)
        counts = {len(move.block_ids), len(move.num_tokens), len(move.addresses)}
        if len(counts) != 1 or not all(0 < num <= self._whole.block_tokens for num in move.num_tokens):
            raise ProtocolError("a request to move blocks has columns that don't fit together")
        moved: BlocksMoved = await self._spawn(member, self._move_blocks(member, move))
        return moved

    async def _move_blocks(self, member: StageMembership, move: MoveBlocks) -> BlocksMoved:
        deadline = clock.monotonic() + min(move.timeout_s, 3600.0)
        duty: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        member.queue.add_duty(move.after, duty)
        member.arrived.set()
        done, _ = await asyncio.wait([duty], timeout=max(0.0, deadline - clock.monotonic()))
        if not done:
            duty.cancel()
            return BlocksMoved(Status.TIMED_OUT.name)
        computed = await self._on_computer(self._memory.computed)
        held = self._memory.hold(move.block_ids, "save" if move.is_save else "load", computed)
        if held is None:
            log.warning("move_refused", reason="no staging memory", num_blocks=len(move.block_ids))
            return BlocksMoved(Status.CANCELLED.name)
        try:
            if move.is_save:
                await self._on_computer(self._leave_device, held, computed)
            local, remote, lengths = self._columns(held, move)
            segment = self._transfer.open(decode_descriptor(move.descriptor))
            ended = await self._transfer.transfer(
                Op.WRITE if move.is_save else Op.READ,
                segment,
                local,
                remote,
                lengths,
                timeout_s=max(0.0, deadline - clock.monotonic()),
                checksum=True,
            )
            if ended.status != Status.OK:
                return BlocksMoved(ended.status.name)
            if not move.is_save:
                await self._on_computer(self._enter_device, held)
            assert ended.checksums is not None
            return BlocksMoved(Status.OK.name, np.asarray(ended.checksums, dtype="<u4").tobytes())
        finally:
            self._memory.release(held)

    def _leave_device(self, held: StagedBlocks, computed: DeviceEvent | None) -> None:
        """Copy all layers to host memory, and wait for it."""
        layers = range(self._runner.layout.num_layers)
        for event in [self._memory.leave(held, layer, computed) for layer in layers]:
            if event is not None:
                event.synchronize()

    def _enter_device(self, held: StagedBlocks) -> None:
        """Copy all layers into the pool, and wait for it."""
        layers, members = range(self._runner.layout.num_layers), range(len(held.block_ids))
        for event in [self._memory.enter(held, layer, members) for layer in layers]:
            if event is not None:
                event.synchronize()

    def _columns(self, held: StagedBlocks, move: MoveBlocks) -> tuple[Any, Any, Any]:
        """Columns (here, in the objects, lengths) of all slabs, layer by layer and then block by block."""
        whole, layers, members = self._whole, self._model.layers, range(len(move.block_ids))
        local = [self._memory.addresses(held, layer - layers.start, members) for layer in layers]
        remote, lengths = [], []
        for layer in layers:
            for address, num_tokens in zip(move.addresses, move.num_tokens, strict=True):
                remote += [address + offset for offset in whole.object_offsets(layer, num_tokens)]
                lengths += [whole.chunk_bytes(num_tokens)] * whole.num_slabs
        return np.concatenate(local), np.array(remote, np.uint64), np.array(lengths, np.uint64)

    # ── shared ──────────────────────────────────────────────────────────────────────────────────

    async def _on_computer(self, function: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._computer, function, *arguments)

    def _spawn(self, member: StageMembership, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        member.tasks.add(task)
        task.add_done_callback(member.tasks.discard)
        return task


async def serve_stage(stage: Stage, host: str, port: int) -> None:
    """Serve a stage until cancelled. Raises AddressInUse when the port is taken."""
    check_address(host)
    try:
        bound = await stage.server.start(host, port)
        log.info("ready", role="stage", address=f"{host}:{bound}")
        await asyncio.get_running_loop().create_future()
    finally:
        await stage.close()


def stage_transfer(host: str, settings: TransferSettings) -> TransferEngine:
    """The transfer engine of a member of a group, which takes notifications."""
    settings = settings.for_role(host, handshake_port=0)
    check_address(settings.listen_host)
    return TransferEngine(settings)

# SPDX-License-Identifier: Apache-2.0
"""The first stage of a prefill group: the worker that clients see, and its connections to the other stages.

``PrefillGroup`` owns the connections and the rings: it forms the group, passes on hidden states, takes logits
and notices the loss of a stage (at once when its connection breaks, after ``PROBE_TIMEOUT_S`` if it stands
still). ``GroupRunner`` is the engine's runner over it: it computes a step's first layers, leaves the others
to the group, and samples when the logits come; meanwhile the engine goes on with the next step.

A group lives and ends as a whole. What a lost stage had in its pool is lost, and the first stage's index of
cached blocks is wrong from then on; so the loss fails every request, none of which has got a wrong token, and
the worker ends with an error. What has started it starts it again, and it forms the group anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
from prometheus_client import Counter
from torch import Tensor

from mooncake import clock, metrics
from mooncake.connectors.kv_link import KvLoad, KvSave
from mooncake.errors import MooncakeError, PeerLost, ProtocolError
from mooncake.inference.model import Decoder
from mooncake.inference.pipeline import (
    BALANCE_AFTER,
    OVERHEAD_TOKENS,
    ChunkPass,
    ChunkPlan,
    ChunkRows,
    Pipeline,
    PromptPassage,
    StageTime,
    balanced_counts,
    layer_ranges,
)
from mooncake.inference.runner import LayerRunner, rows_of, sample
from mooncake.inference.scheduler import Chunk, Sampled
from mooncake.inference.stage import (
    CHUNK,
    CHUNK_DONE,
    BlocksMoved,
    ChunkDone,
    Hop,
    JoinGroup,
    MoveBlocks,
    NextStage,
    Ring,
    StageAlive,
    StageChunk,
    StageJoined,
    StageProbe,
)
from mooncake.log import get_logger
from mooncake.rpc import AsyncClient
from mooncake.security import TRUSTED
from mooncake.transfer import TransferEngine
from mooncake.transfer.descriptor import decode_descriptor

log = get_logger(__name__)

FORM_TIMEOUT_S = 240.0
"""Timeout of the stages' start: reading a large model from a slow disk takes minutes."""

PROBE_INTERVAL_S = 1.0
PROBE_TIMEOUT_S = 5.0
"""Silence after which a stage counts as lost, although its connection is open."""

SLOTS_PER_STAGE = 3
"""Chunks under way for each stage: one that it computes, one that waits, one on its way."""

MOVE_GRACE_S = 10.0
"""Time beyond a stage's own deadline in which its answer may arrive."""

ATTENTION_FACTOR = 1.3
"""How much longer attention takes than its multiplications: measured with SmolLM2 on a CPU."""

stage_seconds = Counter(
    "mooncake_inference_stage_seconds",
    "Seconds that each stage of a prefill group computed, or waited between two chunks.",
    ["stage", "state"],
    registry=metrics.registry,
)
bubble_seconds = Counter(
    "mooncake_inference_stage_bubble_seconds",
    "Seconds that each stage of a prefill group waited while other stages had work.",
    ["stage"],
    registry=metrics.registry,
)
hop_bytes = Counter(
    "mooncake_inference_hop_bytes",
    "Bytes of hidden states that the first stage passed on.",
    registry=metrics.registry,
)

_decode_done = msgspec.msgpack.Decoder(ChunkDone).decode


@dataclasses.dataclass(frozen=True)
class GroupSettings:
    """What a group is formed with."""

    addresses: tuple[str, ...]
    """``host:port`` of each further stage, in order."""
    weights: str
    """Digest of the model's weights."""
    block_tokens: int
    max_rows: int
    """Most rows of a step."""
    max_samples: int
    """Most rows of a step whose logits are wanted."""
    layers: tuple[int, ...] = ()
    """Number of layers of each stage; empty for equal ones."""

    @property
    def num_stages(self) -> int:
        return len(self.addresses) + 1


def chunk_plan(model: Decoder, settings: GroupSettings) -> ChunkPlan:
    """The plan of a group's chunks, from the sizes of its model.

    A token's work is two operations for each weight of its layers; that of a query and a key, four for each
    element of the query.
    """
    config = model.config
    attention = config.num_heads * config.head_dim
    kv = config.num_kv_heads * config.head_dim
    weights = config.hidden_size * (2 * attention + 2 * kv + 3 * config.intermediate_size)
    per_pair = ATTENTION_FACTOR * 4 * attention / (2 * weights)
    granularity = min(settings.block_tokens, settings.max_rows)
    overhead = OVERHEAD_TOKENS["cpu" if model.device.type == "cpu" else "cuda"]
    return ChunkPlan(settings.num_stages, per_pair, overhead, settings.max_rows, granularity)


@dataclasses.dataclass(frozen=True)
class FurtherStage:
    """One of the other stages."""

    number: int
    layers: range
    client: AsyncClient

    def __str__(self) -> str:
        return f"stage {self.number} at {self.client.address}"


class PrefillGroup:
    """The other stages of one group. Made by ``form``; lives on one loop."""

    def __init__(self, model: Decoder, settings: GroupSettings, transfer: TransferEngine) -> None:
        config = model.config
        self.id = secrets.token_hex(8)
        self.settings = settings
        self.ranges = layer_ranges(config.num_layers, settings.num_stages, settings.layers)
        assert model.layers == self.ranges[0], "the first stage has other layers"
        self.num_blocks = 0
        """Blocks that every other stage has memory for."""
        self._model, self._transfer = model, transfer
        self._loop = asyncio.get_running_loop()
        self.pipeline = Pipeline(settings.num_stages, SLOTS_PER_STAGE * settings.num_stages)
        num_slots = self.pipeline.num_slots
        self.outbox = Ring(transfer, num_slots, settings.max_rows, config.hidden_size, model.dtype)
        self._logits = Ring(transfer, num_slots, settings.max_samples, config.vocab_size, torch.float32)
        self._stages: list[FurtherStage] = []
        self._next: NextStage | None = None
        self._tasks: list[asyncio.Task[Any]] = []
        self._changed = threading.Condition()
        """Protects ``pipeline``, the ended chunks and the loss, which the engine's thread reads."""
        self._ended: deque[tuple[ChunkPass, Tensor | None]] = deque()
        self._loss: PeerLost | None = None
        self.lost: asyncio.Future[PeerLost] = self._loop.create_future()
        """Done when a stage is lost; the group is of no use afterwards."""
        self._wake: Callable[[], None] = lambda: None

    # ── on the loop ─────────────────────────────────────────────────────────────────────────────

    async def form(self) -> None:
        """Connect to the other stages, from the last to the second.

        Raises:
            DeadlineExceeded, PeerLost: a stage does not answer.
            InvalidArgument: a stage has other layers, weights or settings.
        """
        settings, config = self.settings, self._model.config
        leader = self._transfer.describe().encode()
        next_descriptor, next_address = leader, self._logits.address
        self.num_blocks = 1 << 31
        for number in range(settings.num_stages - 1, 0, -1):
            layers = self.ranges[number]
            client = AsyncClient(
                settings.addresses[number - 1],
                (StageJoined, StageAlive, BlocksMoved),
                f"stage {number}",
                servers=TRUSTED,
            )
            self._stages.insert(0, FurtherStage(number, layers, client))
            join = JoinGroup(
                group=self.id,
                first_layer=layers.start,
                end_layer=layers.stop,
                num_stages=settings.num_stages,
                weights=settings.weights,
                dtype=config.kv_layout(self._model.dtype, settings.block_tokens).dtype,
                block_tokens=settings.block_tokens,
                num_slots=self.pipeline.num_slots,
                max_rows=settings.max_rows,
                max_samples=settings.max_samples,
                next_descriptor=next_descriptor,
                next_address=next_address,
                leader_descriptor=leader,
            )
            joined: StageJoined = await client.call(join, FORM_TIMEOUT_S)
            next_descriptor, next_address = joined.descriptor, joined.address
            self.num_blocks = min(self.num_blocks, joined.num_blocks)
        segment = self._transfer.open(decode_descriptor(next_descriptor))
        self._next = NextStage(self._transfer, self.outbox, segment, next_address)
        work = [self._pass_on(self._next), self._receive(), *map(self._watch, self._stages)]
        self._tasks = [self._loop.create_task(one) for one in work]
        log.info("group_formed", group=self.id, stages=settings.num_stages, num_blocks=self.num_blocks)

    async def close(self) -> None:
        """End the group; the other stages wait for the next one."""
        self.fail("the worker is stopping")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for stage in self._stages:
            await stage.client.close()
        for ring in (self.outbox, self._logits):
            await asyncio.to_thread(ring.close)

    async def move_blocks(self, stage: int, move: MoveBlocks) -> BlocksMoved:
        """Have a stage copy its layers of blocks. Raises Unavailable when it is lost."""
        client = self._stages[stage - 1].client
        try:
            moved: BlocksMoved = await client.call(move, move.timeout_s + MOVE_GRACE_S)
        except MooncakeError as error:
            # Whether it still touches the blocks is unknown: nothing of this group is used again.
            self.fail(f"{self._stages[stage - 1]} did not move blocks: {error}")
            raise
        return moved

    def fail(self, reason: str) -> None:
        """End the group with an error; harmless when repeated."""
        with self._changed:
            if self._loss is not None:
                return
            self._loss = PeerLost(
                f"the prefill group has lost a stage ({reason}); the request may be sent again"
            )
            self._changed.notify_all()
        log.warning("group_lost", group=self.id, reason=reason)
        self._loop.call_soon_threadsafe(self._set_lost, self._loss)  # the engine's thread calls this, too
        self._wake()

    def _set_lost(self, loss: PeerLost) -> None:
        if not self.lost.done():
            self.lost.set_result(loss)

    async def _watch(self, stage: FurtherStage) -> None:
        """Notice that a stage is gone, stands still, or belongs to another group."""
        client = stage.client
        while True:
            try:
                alive: StageAlive = await client.call(StageProbe(), PROBE_TIMEOUT_S)
            except MooncakeError as error:
                self.fail(f"{stage}: {error}")
                return
            if alive.group != self.id:
                self.fail(f"{stage} belongs to {alive.group or 'no group'}; it was restarted or taken over")
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PROBE_INTERVAL_S):
                    await client.lost.wait()
                self.fail(f"{stage}: the connection broke")
                return

    async def _pass_on(self, ahead: NextStage) -> None:
        try:
            await ahead.run()
        except MooncakeError as error:
            self.fail(str(error))

    async def _receive(self) -> None:
        """Take the ends of chunks."""
        while True:
            for one in await asyncio.to_thread(self._transfer.notifications, 1.0):
                try:
                    if one.name != CHUNK_DONE:
                        raise ProtocolError(f"{one.sender} sent {one.name!r} to a first stage")
                    self._chunk_done(_decode_done(one.message))
                except (ProtocolError, msgspec.MsgspecError) as error:
                    self.fail(f"{one.sender}: {error}")

    def _chunk_done(self, done: ChunkDone) -> None:
        if done.group != self.id:
            log.info("chunk_dropped", group=done.group, reason="this stage has left that group")
            return
        if done.error:
            self.fail(f"computing a chunk failed: {done.error}")
            return
        with self._changed:
            ended = self.pipeline.done(done.number, done.times, clock.monotonic())
            logits: Tensor | None = None
            if ended.num_samples:
                slot = self.pipeline.slot(done.number)
                logits = self._logits.slots[slot, : ended.num_samples].clone()
            self._ended.append((ended, logits))
            self._changed.notify_all()
        bubbles_s = ended.bubbles_s(ended.busy_since)
        for stage, (one, bubble_s) in enumerate(zip(done.times, bubbles_s, strict=True)):
            stage_seconds.labels(str(stage), "computed").inc(one.computed_s)
            stage_seconds.labels(str(stage), "waited").inc(one.waited_s)
            bubble_seconds.labels(str(stage)).inc(bubble_s)
        if (done.number + 1) % BALANCE_AFTER == 0:
            self._log_balance()
        if ended.num_samples:
            self._wake()

    def _log_balance(self) -> None:
        counts, computed_s = [len(one) for one in self.ranges], self.pipeline.computed_s
        log.info(
            "group_balance",
            group=self.id,
            layers=counts,
            computed_s=[round(seconds, 3) for seconds in computed_s],
            balanced=balanced_counts(counts, computed_s),
        )

    # ── from the engine's thread ────────────────────────────────────────────────────────────────

    def attach(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def check_alive(self) -> None:
        """Raises PeerLost when a stage is lost."""
        if self._loss is not None:
            raise PeerLost(str(self._loss))

    def begin(self, num_rows: int, num_samples: int, began: float) -> int:
        """Begin a chunk, when a slot is free; its number. ``began``: when its computation did.

        Raises PeerLost when a stage is lost.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._loss is not None or self.pipeline.has_room)
            self.check_alive()
            return self.pipeline.begin(num_rows, num_samples, began)

    def pass_on(self, number: int, rows: list[ChunkRows], spent: StageTime) -> None:
        """Pass on a chunk, whose hidden states are in its slot of the outbox."""
        num_rows = sum(one.num_tokens for one in rows)
        message = msgspec.msgpack.encode(StageChunk(self.id, number, rows, [spent]))
        assert self._next is not None
        hop_bytes.inc(num_rows * self.outbox.row_bytes)
        self._loop.call_soon_threadsafe(self._next.put, Hop(number, num_rows, CHUNK, message))

    def take_ended(self) -> list[tuple[ChunkPass, Tensor | None]]:
        """The chunks that have ended, with the logits of rows that sample. Raises PeerLost when a stage is
        lost."""
        with self._changed:
            self.check_alive()
            found = list(self._ended)
            self._ended.clear()
        return found


class GroupRunner:
    """Runs steps in a group: its own layers here, the others in the other stages."""

    def __init__(self, model: Decoder, pool: Tensor, group: PrefillGroup, link: Any = None) -> None:
        """``link``: the group's ``GroupLink``, if there is a store."""
        config = model.config
        self._layers = LayerRunner(model, pool)
        self._group, self._link = group, link
        self.layout = config.kv_layout(model.dtype, int(pool.shape[3]))
        self.num_blocks = min(int(pool.shape[2]), group.num_blocks)
        self.vocab_size = config.vocab_size
        self.max_positions = config.max_positions
        self.eos_token_ids = config.eos_token_ids
        self._begun: deque[tuple[int, Sequence[Chunk]]] = deque()
        self._free_since = clock.monotonic()

    def attach(self, wake: Callable[[], None]) -> None:
        self._group.attach(wake)

    def run(
        self, chunks: Sequence[Chunk], loads: Sequence[KvLoad] = (), saves: Sequence[KvSave] = ()
    ) -> Sampled | None:
        """Begin ``chunks``. Raises PeerLost when a stage is lost.

        A load is waited for as a whole: it writes in other stages, too, and these do not wait for it.
        """
        group, link, num_layers = self._group, self._link, self.layout.num_layers
        group.check_alive()
        if loads:
            for layer in range(num_layers):
                link.wait_layer(loads, layer)
        rows = rows_of(chunks, self.layout.block_tokens)
        num_samples = sum(chunk.samples for chunk in chunks)
        began = clock.monotonic()

        def before_attention(layer: int) -> None:
            for save in saves:
                link.save_layer(save, layer)

        with torch.inference_mode():
            hidden = self._layers.forward(rows, self._layers.embed(chunks), before_attention)
            computed_at = clock.monotonic()
            number = group.begin(hidden.shape[0], num_samples, began)
            held_s = clock.monotonic() - computed_at
            try:
                slot = group.pipeline.slot(number)
                # A part of the computation: on a device it waits for the end.
                group.outbox.slots[slot, : hidden.shape[0]].copy_(hidden)
                copied_at = clock.monotonic()
                spent = StageTime(began - self._free_since, copied_at - began - held_s, held_s)
                self._free_since = copied_at - held_s
                group.pass_on(number, rows, spent)
                self._begun.append((number, chunks))
                for save in saves:
                    link.follow(save, number)
                    for layer in range(len(group.ranges[0]), num_layers):
                        link.save_layer(save, layer)
            except Exception as error:  # the engine fails this step, and the stages would go on with it
                group.fail(f"chunk {number} was not passed on: {type(error).__name__}: {error}")
                raise
        return None if num_samples else ([], [])

    def collect(self) -> list[Sampled]:
        """What the ended steps have sampled. Raises PeerLost when a stage is lost before they have ended."""
        if not self._begun:
            return []
        found = []
        for ended, logits in self._group.take_ended():
            number, chunks = self._begun.popleft()
            assert number == ended.number, (number, ended.number)
            for chunk in chunks:
                self._note(chunk, ended, len(chunks) == 1)
            if logits is not None:
                sampling = [chunk.request for chunk in chunks if chunk.samples]
                found.append(sample(logits, sampling, self.eos_token_ids))
        return found

    def _note(self, chunk: Chunk, ended: ChunkPass, is_alone: bool) -> None:
        """Add a chunk to its prompt's passage, which begins anew where the prompt's computation did."""
        request = chunk.request
        if chunk.start >= request.num_prompt_tokens:
            return
        passage = request.passage
        if passage is None or passage.end_token != chunk.start:
            passage = request.passage = PromptPassage(self._group.settings.num_stages)
        passage.add(ended, chunk.start, chunk.num_tokens, is_alone)
        if chunk.samples and request.timings.first_token is None:
            request.stages = passage.stats(self._group.ranges)

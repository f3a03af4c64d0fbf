# SPDX-License-Identifier: Apache-2.0
"""Push of a prompt's KV blocks layer by layer, while the prompt is computed, into the engine that decodes it.

The protocol is that of ``peer_push.py`` with an answer at each progress instead of one at the end. The
receiver's ``PushRequest`` is answered when the first layer of all its blocks is written, and each further
``PushProgress`` when more layers are. A prompt that is computed in several steps (chunks) has a ``PushPart``
for each; a layer counts as written when it is in all parts. The sender writes whatever is computed and not
yet written with one transfer, so that transfers slower than the computation become fewer and larger::

    prefill   chunk 1: layer 0, 1, 2 …      chunk 2: layer 0 ─ layer 1 ─ layer 2 …
    writes              └─ part 1 ──┘                  └─ 0 ───┴─ 1 ───┴─ 2 …
    decode                                              load: layer 0, 1, 2 …

A receiver that no longer wants its blocks withdraws (``PushWithdrawal``), which is answered when nothing is
written any longer. Only a sender that does not answer that, or that gets it over another connection than the
request, costs a revocation of the memory.

Everything here runs on one event loop. The engine's thread, tensors and steps are not known.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from mooncake import clock
from mooncake.connectors.claim import LOG_EVERY_S, Claim
from mooncake.connectors.kv_link import KvLoad
from mooncake.connectors.memory import SlabMemory, StagedBlocks
from mooncake.connectors.peer_push import (
    GRACE_S,
    GREETING_S,
    MAX_TIMEOUT_S,
    BlockRequest,
    PushOutcome,
    PushProbe,
    PushRequest,
    PushResult,
    Receiver,
    target_memory,
    wrong_timeout,
)
from mooncake.errors import MooncakeError
from mooncake.kvlayout import SlabLayout
from mooncake.log import get_logger
from mooncake.rpc import AsyncClient, Call, Connection, RpcServer
from mooncake.security import EVERYBODY, TRUSTED, Access
from mooncake.transfer import Region, RemoteSegment, TransferEngine
from mooncake.transfer.descriptor import decode_descriptor

log = get_logger(__name__)

MAX_TRANSFERS = 4096
"""Most transfers that one sender knows, those that requests wait for included."""

MAX_ENDED = 4 * MAX_TRANSFERS
"""Most ended transfers whose names are kept, so that late requests for them do not wait."""

PROGRESS_TIMEOUT_S = 5.0
"""Longest time from one layer to the next: the decoding engine may wait for them in the midst of a step."""

WITHDRAWAL_TIMEOUT_S = 2.0
"""Time that a sender has to answer a withdrawal before its access to the memory is revoked."""


class PushProgress(msgspec.Struct, frozen=True, array_like=True, tag="kv_more"):
    """Request for an answer when more than ``num_layers`` layers are written, or the transfer has ended."""

    transfer_id: str
    num_layers: int
    timeout_s: float


class PushWithdrawal(msgspec.Struct, frozen=True, array_like=True, tag="kv_stop"):
    """Request to write nothing more. The answer comes when nothing is written any longer."""

    transfer_id: str


ACCESS = Access({PushRequest: TRUSTED, PushProgress: TRUSTED, PushWithdrawal: TRUSTED, PushProbe: EVERYBODY})


# --- the computing end


class PushPart:
    """Blocks of a prompt that one step of the engine completes; a ``KvSave`` that stores nothing.

    Args:
        transfer_id, prompt: see ``PushRequest``.
        num_blocks: blocks of the whole prompt.
        first: index in the prompt of the first of ``block_ids``.
        load: the load of earlier blocks during the same step, if there is one.
    """

    num_stored_blocks = 0

    def __init__(
        self,
        transfer_id: str,
        prompt: bytes,
        num_blocks: int,
        first: int,
        block_ids: Sequence[int],
        load: KvLoad | None = None,
    ) -> None:
        self.transfer_id, self.prompt, self.num_blocks = transfer_id, prompt, num_blocks
        self.first, self.block_ids = first, list(block_ids)
        self.load = load
        self.done = False
        """Whether the blocks are read no longer."""
        self.computed_at: list[float] = []
        """By layer: when it was computed, ``clock.monotonic``."""
        self.num_layers_written = 0

    @property
    def is_last(self) -> bool:
        return self.first + len(self.block_ids) == self.num_blocks


@dataclasses.dataclass
class _Target:
    """The receiver's blocks."""

    memory: SlabMemory
    segment: RemoteSegment
    first: int
    """Index in the prompt of the first of ``block_ids``."""
    block_ids: list[int]
    deadline: float
    connection: Connection


class _Outgoing:
    """One transfer at the sender."""

    def __init__(self, transfer_id: str) -> None:
        self.id = transfer_id
        self.begun: PushPart | None = None
        """The first part; None until the prompt's computation has begun."""
        self.digest = ""
        """Identity and layout of the blocks, by the weights that compute them."""
        self.parts: list[PushPart] = []
        """Parts that are not written completely."""
        self.num_blocks_begun = 0
        """Leading blocks of the prompt that are in a part."""
        self.has_last = False
        self.target: _Target | None = None
        self.num_waiting = 0
        self.failure = ""
        """Why it has ended without success."""
        self.is_writing = False
        self.is_unsure = False
        """Whether a write has failed: a part of it may still land."""
        self.num_bytes, self.seconds = 0, 0.0
        self.changed = asyncio.Condition()
        self.news = asyncio.Event()

    @property
    def is_complete(self) -> bool:
        return self.has_last and not self.parts and not self.failure

    @property
    def is_over(self) -> bool:
        return bool(self.failure) or self.is_complete

    @property
    def may_land(self) -> bool:
        """Whether bytes may still reach the receiver's memory, which it must then revoke."""
        return self.is_writing or self.is_unsure


class LayerSender:
    """The computing end. All methods but the constructor are called on its loop.

    Args:
        memory: memory of the blocks, registered with ``transfer``.
        hold_s: how long a computed prompt waits for its receiver, and its end for late requests.
        ended: called with each part whose blocks are no longer needed.
        on_outcome: called with the outcome of a transfer's blocks.
    """

    def __init__(
        self,
        transfer: TransferEngine,
        layout: SlabLayout,
        digest: str,
        memory: SlabMemory,
        hold_s: float,
        ended: Callable[[PushPart], None],
        on_outcome: Callable[[PushOutcome], None] = lambda outcome: None,
    ) -> None:
        self._transfer, self._layout, self.digest, self._memory = transfer, layout, digest, memory
        self._hold_s, self._ended, self._on_outcome = hold_s, ended, on_outcome
        self._outgoing: dict[str, _Outgoing] = {}
        self._ended_transfers: OrderedDict[str, str] = OrderedDict()
        """Why there is nothing of a transfer any longer, by its name; the latest ``MAX_ENDED``."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._server = RpcServer(
            {
                PushRequest: self._take,
                PushProgress: self._more,
                PushWithdrawal: self._stop,
                PushProbe: lambda probe, call: PushResult(),
            },
            self._on_lost,
            access=ACCESS,
            name="push",
            is_peer=True,
        )
        self.port = 0

    async def start(self, host: str, port: int) -> None:
        """Listen.

        Raises:
            AddressInUse, InvalidArgument: as ``RpcServer.start``.
        """
        self.port = await self._server.start(host, port)

    async def close(self) -> None:
        """Stop; no block is read afterwards."""
        await self._server.close()
        for one in list(self._outgoing.values()):
            self._fail(one, "the engine is stopping")
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- the engine's side

    def begin(self, part: PushPart) -> None:
        """The layers of ``part`` are about to be computed. Parts of a prompt come in order."""
        one = self._known(part.transfer_id)
        if one is None:
            self._note_ended(part.transfer_id, f"{MAX_TRANSFERS} transfers were under way")
        elif not one.is_over and part.first != one.num_blocks_begun:
            # The name of a transfer whose beginning is forgotten: its first blocks would never be written.
            self._fail(one, "its first blocks are not pushed")
        if one is None or one.is_over:
            self._release(part)
            return
        if one.begun is None:
            one.begun, one.digest = part, self.digest
        one.num_blocks_begun += len(part.block_ids)
        one.parts.append(part)
        if part.is_last:
            one.has_last = True
            asyncio.get_running_loop().call_later(self._hold_s, self._expire, one)
        self._notify(one)

    def layer_computed(self, part: PushPart, at: float) -> None:
        """The next layer of ``part`` is in memory since ``at`` and does not change from now on."""
        part.computed_at.append(at)
        one = self._outgoing.get(part.transfer_id)
        if one is not None:
            one.news.set()

    def drop(self, transfer_id: str, reason: str) -> None:
        """End a transfer whose prompt will not be computed, or whose layers are not valid."""
        one = self._known(transfer_id)
        if one is not None:
            self._fail(one, reason)

    # -- the receiver's side

    async def _take(self, take: PushRequest, call: Call) -> PushResult:
        if reason := wrong_timeout(take):
            return self._refused(take, reason)
        if take.layout != self.digest:
            return self._refused(take, f"the blocks have layout {self.digest}, not {take.layout}")
        one = self._known(take.transfer_id)
        if one is None:
            ended = self._ended_transfers.get(take.transfer_id)
            return self._refused(take, ended or f"{MAX_TRANSFERS} transfers are under way")
        deadline = clock.monotonic() + take.timeout_s
        try:
            has_begun = await self._waits_for(
                one, lambda: one.begun is not None or bool(one.failure), deadline
            )
        finally:  # also when the connection is lost, which cancels this call
            is_unknown = one.begun is None and not one.failure and not one.num_waiting
            if is_unknown and self._outgoing.get(one.id) is one:
                del self._outgoing[one.id]
        if not has_begun:
            return self._refused(take, f"not computed within {take.timeout_s:g} s")
        if one.failure or one.begun is None:
            return self._refused(take, one.failure)
        if one.target is not None or one.is_over:
            return self._refused(take, "another receiver has taken it")
        if take.layout != one.digest:  # the weights were replaced while the request waited
            self._fail(one, f"the blocks have layout {one.digest}, not {take.layout}")
            return self._refused(take, one.failure)
        memory = target_memory(take, self._layout)
        wanted = take.first_block + len(take.block_ids)
        has_blocks = take.first_block >= 0 and bool(take.block_ids) and wanted == one.begun.num_blocks
        if take.prompt != one.begun.prompt or memory is None or not has_blocks:
            is_other = take.prompt != one.begun.prompt
            self._fail(one, "the prompts differ" if is_other else "the blocks don't fit each other")
            return self._refused(take, one.failure)
        try:
            segment = self._transfer.open(decode_descriptor(take.descriptor))
        except MooncakeError as error:
            self._fail(one, str(error))
            return self._refused(take, str(error))
        one.target = _Target(memory, segment, take.first_block, take.block_ids, deadline, call.connection)
        task = asyncio.get_running_loop().create_task(self._write(one, one.target))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await self._progress(one, 0, deadline)

    async def _more(self, more: PushProgress, call: Call) -> PushResult:
        one = self._outgoing.get(more.transfer_id)
        if one is None or one.target is None or one.target.connection is not call.connection:
            return PushResult("there is no such transfer", has_begun=True)  # see ``_stop``
        deadline = clock.monotonic() + min(max(0.0, more.timeout_s), MAX_TIMEOUT_S)
        return await self._progress(one, more.num_layers, deadline)

    async def _stop(self, stop: PushWithdrawal, call: Call) -> PushResult:
        one = self._outgoing.get(stop.transfer_id)
        if one is None or (one.target is not None and one.target.connection is not call.connection):
            # The connection of the request may have been lost without notice here, or this process be
            # another than the one that has begun to write: the receiver must revoke its memory.
            return PushResult("there is no such transfer", has_begun=True)
        self._fail(one, "the receiver has withdrawn")
        async with one.changed:
            await one.changed.wait_for(lambda: not one.is_writing)
        return PushResult(has_begun=one.may_land)

    async def _progress(self, one: _Outgoing, num_layers: int, deadline: float) -> PushResult:
        """The answer when more than ``num_layers`` layers are written, or the transfer has ended."""
        has_more = await self._waits_for(
            one, lambda: bool(one.failure) or self._num_written(one) > num_layers, deadline
        )
        if not has_more:
            self._fail(one, "it took too long")
        if one.failure:
            return PushResult(one.failure, has_begun=one.may_land)
        return PushResult(num_layers=self._num_written(one))

    async def _waits_for(self, one: _Outgoing, is_true: Callable[[], bool], deadline: float) -> bool:
        one.num_waiting += 1
        try:
            async with asyncio.timeout_at(deadline), one.changed:
                await one.changed.wait_for(is_true)
                return True
        except TimeoutError:
            return is_true()
        finally:
            one.num_waiting -= 1

    def _on_lost(self, connection: Connection) -> None:
        for one in list(self._outgoing.values()):
            if one.target is not None and one.target.connection is connection and not one.is_over:
                self._fail(one, "the receiver was lost")

    # -- writing

    async def _write(self, one: _Outgoing, target: _Target) -> None:
        """Write whatever is computed and not yet written, until the transfer is over."""
        try:
            while not one.is_over:
                work = [
                    (part, part.num_layers_written, len(part.computed_at))
                    for part in one.parts
                    if len(part.computed_at) > part.num_layers_written
                ]
                if not work:
                    one.news.clear()
                    await one.news.wait()
                    continue
                await self._write_layers(one, target, work)
                for part, _, end in work:
                    part.num_layers_written = end
                await self._settle(one)
        except asyncio.CancelledError:
            self._fail(one, "the engine is stopping")
            raise
        except MooncakeError as error:
            self._fail(one, str(error))
        except Exception as error:  # a bug of ours; the receiver must get an answer all the same
            log.exception("transfer_failed", transfer=one.id)
            self._fail(one, type(error).__name__)

    async def _write_layers(
        self, one: _Outgoing, target: _Target, work: Sequence[tuple[PushPart, int, int]]
    ) -> None:
        local, remote = [], []
        for layer in range(min(first for _, first, _ in work), max(end for _, _, end in work)):
            for part, first, end in work:
                if first <= layer < end:
                    skipped = max(0, target.first - part.first)
                    position = part.first + skipped - target.first
                    source = part.block_ids[skipped:]
                    local.append(_column(self._memory, source, layer))
                    wanted = target.block_ids[position : position + len(source)]
                    remote.append(_column(target.memory, wanted, layer))
        columns = np.concatenate(local), np.concatenate(remote)
        if not len(columns[0]):
            return
        lengths = np.full(len(columns[0]), self._layout.slab_bytes, dtype=np.uint64)
        began = clock.monotonic()
        one.is_writing = True
        try:
            left_s = max(0.001, target.deadline - began)
            await self._transfer.write(target.segment, *columns, lengths, timeout_s=left_s)
        except BaseException:
            one.is_unsure = True
            raise
        finally:  # a cancelled write has ended by now, too
            one.is_writing = False
            self._notify(one)
        ended = clock.monotonic()
        one.num_bytes += int(lengths.sum())
        one.seconds += ended - began
        log.debug(
            "layers_pushed",
            transfer=one.id,
            parts=[(part.first, len(part.block_ids), first, end) for part, first, end in work],
            computed_at=[part.computed_at[first:end] for part, first, end in work],
            began_at=began,
            ended_at=ended,
            num_bytes=int(lengths.sum()),
        )

    def _num_written(self, one: _Outgoing) -> int:
        """Leading layers that are written for all blocks of the prompt."""
        if not one.has_last:
            return 0
        return min((part.num_layers_written for part in one.parts), default=self._layout.num_layers)

    async def _settle(self, one: _Outgoing) -> None:
        """Release the parts that are written completely."""
        for part in [part for part in one.parts if part.num_layers_written == self._layout.num_layers]:
            one.parts.remove(part)
            self._release(part)
        if one.is_complete and one.target is not None:
            num_blocks = len(one.target.block_ids)
            self._on_outcome(PushOutcome("pushed", num_blocks, one.num_bytes, one.seconds))
            self._forget_later(one)
        async with one.changed:
            one.changed.notify_all()

    def _fail(self, one: _Outgoing, reason: str) -> None:
        if one.is_over:
            return
        one.failure = reason
        if one.begun is not None:
            self._on_outcome(PushOutcome("refused", one.begun.num_blocks))
            log.warning("transfer_failed", transfer=one.id, reason=reason)
        self._forget_later(one)
        self._notify(one)

    def _notify(self, one: _Outgoing) -> None:
        """Wake whatever waits for this transfer, and release its parts if it has failed."""
        one.news.set()
        if one.failure and not one.is_writing:
            parts, one.parts = one.parts, []
            for part in parts:
                self._release(part)

        async def notify() -> None:
            async with one.changed:
                one.changed.notify_all()

        task = asyncio.get_running_loop().create_task(notify())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _expire(self, one: _Outgoing) -> None:
        if one.target is None and not one.is_over:
            self._fail(one, f"no receiver has requested it within {self._hold_s:g} s")

    def _forget_later(self, one: _Outgoing) -> None:
        asyncio.get_running_loop().call_later(self._hold_s, self._forget, one)

    def _forget(self, one: _Outgoing) -> None:
        if self._outgoing.get(one.id) is one:
            del self._outgoing[one.id]
            self._note_ended(one.id, one.failure or "it was taken before")

    def _note_ended(self, transfer_id: str, reason: str) -> None:
        self._ended_transfers.setdefault(transfer_id, reason)
        while len(self._ended_transfers) > MAX_ENDED:
            self._ended_transfers.popitem(last=False)

    def _release(self, part: PushPart) -> None:
        part.done = True
        self._ended(part)

    def _known(self, transfer_id: str) -> _Outgoing | None:
        """The transfer, which may be new; None where it has ended, or there are too many."""
        one = self._outgoing.get(transfer_id)
        if one is None and transfer_id not in self._ended_transfers and len(self._outgoing) < MAX_TRANSFERS:
            one = self._outgoing[transfer_id] = _Outgoing(transfer_id)
        return one

    def _refused(self, take: PushRequest, reason: str) -> PushResult:
        log.warning("transfer_refused", transfer=take.transfer_id, reason=reason)
        return PushResult(reason)


def _column(memory: SlabMemory, block_ids: Sequence[int], layer: int) -> Any:
    return memory.addresses(StagedBlocks(list(block_ids)), layer, range(len(block_ids)))


# --- the decoding end


class PushedLoad:
    """A load whose layers another engine writes; a ``KvLoad``. Waited for by the engine's thread."""

    def __init__(self, wanted: BlockRequest, num_layers: int) -> None:
        self.wanted = wanted
        self.num_layers = num_layers
        self.num_layers_loaded = 0
        self.reason = ""
        """Why it has failed."""
        self.done = False
        self.is_withdrawn = False
        self.arrived = threading.Condition()
        self.withdrawn: asyncio.Event | None = None
        """Set on the loop when the blocks are no longer wanted; None until the request is sent."""

    @property
    def failed(self) -> bool:
        """Set only once nothing writes to the blocks."""
        return self.done and bool(self.reason)

    @property
    def moved(self) -> None:
        """Nothing: most of its time the other engine computes."""

    def advance(self, num_layers: int) -> None:
        with self.arrived:
            self.num_layers_loaded = max(self.num_layers_loaded, num_layers)
            self.arrived.notify_all()

    def end(self, reason: str) -> None:
        """Nothing writes to the blocks any longer; empty ``reason``: all layers were written."""
        with self.arrived:
            self.reason, self.done = reason, True
            if not reason:
                self.num_layers_loaded = self.num_layers
            self.arrived.notify_all()

    def wait_layer(self, layer: int) -> None:
        """Block until ``layer`` has arrived or the load has failed; the receiver's deadlines end the wait."""
        with self.arrived:
            while self.num_layers_loaded <= layer and not self.done:
                self.arrived.wait(LOG_EVERY_S)


class LayerReceiver(Receiver):
    """The decoding end. All methods but the constructor run on its loop."""

    def __init__(
        self,
        transfer: TransferEngine,
        layout: SlabLayout,
        digest: str,
        memory: SlabMemory,
        timeout_s: float,
        on_outcome: Callable[[PushOutcome], None] = lambda outcome: None,
        on_progress: Callable[[], None] = lambda: None,
        regions: Sequence[Region] | None = None,
    ) -> None:
        """``on_progress``: called when layers of some load have arrived, or it has ended."""
        super().__init__(transfer, layout, digest, memory, timeout_s, on_outcome, regions)
        self._on_progress = on_progress
        self._loads: dict[str, PushedLoad] = {}

    def replace_digest(self, digest: str) -> None:
        self._digest = digest

    async def load(self, load: PushedLoad) -> None:
        """Have the layers of ``load`` written; returns at its end."""
        transfer_id, reason = load.wanted.transfer_id, "cancelled"
        if transfer_id in self._loads:
            load.end("its transfer_id is in use")
            self._on_progress()
            return
        load.withdrawn = asyncio.Event()
        if load.is_withdrawn:
            load.withdrawn.set()
        self._loads[transfer_id] = load
        try:
            reason = await self.receive(load.wanted)
        except Exception as error:  # a bug of ours; the load must end all the same
            log.exception("transfer_failed", transfer=transfer_id)
            reason = type(error).__name__
        finally:
            del self._loads[transfer_id]
            load.end(reason)
            self._on_progress()

    def withdraw(self, load: PushedLoad) -> None:
        """The blocks of ``load`` are no longer wanted; it ends when nothing writes to them."""
        load.is_withdrawn = True
        if load.withdrawn is not None:
            load.withdrawn.set()

    async def _request(self, address: str, take: PushRequest, claim: Claim) -> PushResult:
        load = self._loads[take.transfer_id]
        assert load.withdrawn is not None
        asking = asyncio.ensure_future(self._ask(address, take, claim, load))
        leaving = asyncio.ensure_future(load.withdrawn.wait())
        try:
            await asyncio.wait({asking, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                taken = asking.result()
                if taken.reason and taken.has_begun:
                    taken = await self._stopped(address, take, taken.reason)
                return taken
            asking.cancel()
            if not claim.num_inside:
                return PushResult("withdrawn")
            return await self._stopped(address, take, "withdrawn")
        finally:
            for task in (asking, leaving):
                task.cancel()
            await asyncio.gather(asking, leaving, return_exceptions=True)

    async def _ask(self, address: str, take: PushRequest, claim: Claim, load: PushedLoad) -> PushResult:
        """The last result. From ``claim.enter`` on, the sender may write to the memory."""
        deadline = clock.monotonic() + self._timeout_s
        try:
            client: AsyncClient = self._client(address)
            await client.call(PushProbe(), GREETING_S)
            if not claim.enter(clock.monotonic()):
                return PushResult("no time is left")
            taken: PushResult = await client.call(take, self._timeout_s + GRACE_S)
            while not taken.reason and taken.num_layers < load.num_layers:
                load.advance(taken.num_layers)
                self._on_progress()
                left_s = min(deadline - clock.monotonic(), PROGRESS_TIMEOUT_S)
                if left_s <= 0:
                    return PushResult("it took too long", has_begun=True)
                more = PushProgress(take.transfer_id, taken.num_layers, left_s)
                taken = await client.call(more, left_s + GRACE_S)
            return taken
        except MooncakeError as error:
            return PushResult(str(error), has_begun=bool(claim.num_inside))
        except Exception as error:  # a bug of ours is no reason to fail the engine's request
            log.exception("transfer_failed", transfer=take.transfer_id)
            return PushResult(type(error).__name__, has_begun=bool(claim.num_inside))

    async def _stopped(self, address: str, take: PushRequest, reason: str) -> PushResult:
        """The result after a withdrawal; without a good answer to it, something may still be written."""
        has_begun = True
        with contextlib.suppress(MooncakeError):
            withdrawal = PushWithdrawal(take.transfer_id)
            has_begun = (await self._client(address).call(withdrawal, WITHDRAWAL_TIMEOUT_S)).has_begun
        return PushResult(reason, has_begun=has_begun)

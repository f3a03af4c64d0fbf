# SPDX-License-Identifier: Apache-2.0
"""Saves each layer's keys and values to the store while the next layer computes, and loads them likewise.

This is the ``KvLink`` of any engine that has a store: our own worker's, and that of others behind their
connectors. It knows an engine by the memory of its blocks (``memory.py``) and their identity, and
no framework. Two threads are involved. The *engine thread* computes; it passes columns of addresses
and goes on. The *loop* (an asyncio thread) calls the master and processes completions. Bytes move in
native threads and never pass through Python::

    engine thread   start_save ── layer 0 ── save_layer(0) ── layer 1 ── save_layer(1) …  finish_save
    loop               └ start_puts ─▶ grants                                └ completions ─▶ end_puts
    native                              └──── layer 0 ──┴──── layer 1 ──┴ …

Nothing here may make an answer wrong or late: a lookup that fails is a miss, a save that fails is
dropped, a load that fails (peer lost, checksum wrong, lease lapsed, too slow) is reported as failed and the
engine computes the blocks itself. A load or save is ``done`` once nothing touches the pool
(``claim.py``), even if a thread or process was stopped meanwhile. After a failure to reach the master no
call is sent for a while, so that a dead store costs one short wait and not one per request.

Where the pool is a device's, copies between it and host memory come before a layer is stored and after one is
loaded (``staged_memory.py``). They count as accesses to the pool: the loop looks at their events, and only
then is a save or load ``done``. A load of more blocks than there is host memory for is moved in pieces, in
order, as earlier ones release theirs; for the engine it is one load.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np
from prometheus_client import Counter

from mooncake import clock
from mooncake.connectors.claim import LOG_EVERY_S, Claim
from mooncake.connectors.device_streams import POLL_S
from mooncake.connectors.memory import CacheIdentity, DeviceEvent, HostMemory, Purpose, StagedBlocks
from mooncake.errors import MooncakeError
from mooncake.kvlayout import Column
from mooncake.log import get_logger
from mooncake.metrics import registry
from mooncake.prefix import BlockHash
from mooncake.store import AsyncStore, PutGrant, ReadGrant
from mooncake.store.client.grants import Checksums
from mooncake.transfer import Completion, Op, RemoteSegment, Status, TransferEngine

log = get_logger(__name__)

loaded_bytes = Counter(
    "mooncake_inference_kv_loaded_bytes", "Bytes of KV loaded from the store and verified.", registry=registry
)
saved_bytes = Counter(
    "mooncake_inference_kv_saved_bytes", "Bytes of KV saved to the store.", registry=registry
)
failures = Counter(
    "mooncake_inference_kv_link_failures",
    "Lookups, loads and saves that failed; their blocks were computed.",
    ["operation"],
    registry=registry,
)


@dataclasses.dataclass(frozen=True)
class LinkSettings:
    """Timeouts of an engine's operations at the store."""

    lookup_timeout_s: float = 1.0
    """Timeout of a lookup, which then counts as a miss."""
    load_timeout_s: float = 10.0
    """Timeout of a load, after which the blocks are computed, and of each call for a save."""
    retry_after_s: float = 1.0
    """Time without calls after the store could not be reached."""


def patience_s(store: AsyncStore, most_s: float, usual_s: float) -> float:
    """Timeout in seconds of a call for which no step of the engine waits: ``most_s``, since a busy store may
    be late. Without a connection the store is not busy but gone, and the timeout is ``usual_s``."""
    return most_s if store.is_connected else usual_s


class CircuitBreaker:
    """Circuit breaker of one caller of the store; its threads may share it.

    After a failure to reach the store no call is made for ``retry_after_s``, so that a dead store costs one
    short wait and not one per call. The first call after that is the probe.
    """

    def __init__(self, retry_after_s: float) -> None:
        self._retry_after_s = retry_after_s
        self._open_until = 0.0

    @property
    def is_open(self) -> bool:
        """Whether the store is not to be called now."""
        return clock.monotonic() < self._open_until

    def trip(self, operation: str, error: BaseException) -> None:
        """Record that the store could not be reached."""
        self._open_until = clock.monotonic() + self._retry_after_s
        log.warning("store_unreachable", operation=operation, error=str(error) or type(error).__name__)

    def __repr__(self) -> str:
        return f"<CircuitBreaker {'open' if self.is_open else 'closed'}>"


class StoreLookup:
    """A lookup of blocks; ``grants`` are those found, from the first without a gap."""

    def __init__(self, blocks: Sequence[tuple[BlockHash, int]]) -> None:
        self.blocks = list(blocks)
        self.done = False
        self.grants: list[ReadGrant] = []

    @property
    def source(self) -> str:
        """The segments in which the blocks were found, for the trace of a request."""
        segments = {id(grant.segment): grant.segment for grant in self.grants}
        return ", ".join(f"{one.name} by {one.paths[0]}" for one in segments.values() if one.paths)

    @property
    def num_blocks(self) -> int:
        return len(self.grants)


@dataclasses.dataclass(eq=False)
class LoadPiece:
    """The blocks of a load that are in host memory at the same time."""

    block_ids: Sequence[int]
    grants: Sequence[ReadGrant]
    lengths: Sequence[int]
    """Tokens of each block."""
    num_layers: int
    after: DeviceEvent | None
    """Work of the device that may still use the blocks."""
    held: StagedBlocks | None = None
    """None until there is room for it."""

    def __post_init__(self) -> None:
        self.parts = _by_segment(self.grants)
        self.num_left = self.num_layers * len(self.parts)
        """Transfers that have not ended."""


class StoreLoad:
    """A transfer of some blocks into the pool, in parts: one for each piece, segment and layer.

    ``is_bad``: the load was refused, and no part will arrive. ``num_tokens``: those of its blocks.
    """

    def __init__(
        self, num_layers: int, num_parts: int, deadline: float, is_bad: bool = False, num_tokens: int = 0
    ) -> None:
        self.claim = Claim("load", deadline)
        self.num_layers_loaded = 0
        """Leading layers in the pool, or on their way there on the device, which can wait for them."""
        self.arrived = threading.Condition()
        self.held: list[StagedBlocks] = []
        """Host memory of the pieces that have begun."""
        self._num_tokens = num_tokens
        self._began = clock.monotonic()
        self._seconds = 0.0
        """From its beginning to the end of its latest part."""
        self._is_bad = is_bad or not self.claim.enter(self._began, num_layers * num_parts)
        self._num_missing = [num_parts] * num_layers
        self.claim.close()

    @property
    def deadline(self) -> float:
        return self.claim.deadline

    @property
    def done(self) -> bool:
        """Whether the load no longer writes into the pool."""
        return self.claim.is_free

    @property
    def is_bad(self) -> bool:
        """Whether some layer is missing or wrong; the load may still write into the pool."""
        return self._is_bad

    @property
    def failed(self) -> bool:
        """Whether some layer is missing or wrong; set only once the load no longer writes into the pool."""
        return self._is_bad and self.done

    @property
    def moved(self) -> tuple[int, float] | None:
        return None if self._is_bad else (self._num_tokens, self._seconds)

    def land(self, layer: int, good: bool) -> bool:
        """Record the arrival of one part of ``layer``. True if this is the first that is not good."""
        with self.arrived:
            first_failure = not good and not self._is_bad
            self._is_bad = self._is_bad or not good
            self._num_missing[layer] -= 1
            while (
                self.num_layers_loaded < len(self._num_missing)
                and not self._num_missing[self.num_layers_loaded]
            ):
                self.num_layers_loaded += 1
            self.arrived.notify_all()
        return first_failure

    def leave(self) -> None:
        """Record that one part writes nothing more."""
        self._seconds = clock.monotonic() - self._began  # before the load may be seen as done
        self.claim.leave()
        with self.arrived:
            self.arrived.notify_all()


class StoreSave:
    """A transfer of some blocks into the store, layer by layer."""

    def __init__(self, blocks: Sequence[tuple[BlockHash, int, int]]) -> None:
        self.blocks = list(blocks)
        self.claim = Claim("save", float("inf"))
        """The claim, with the deadline of the reserved space, once there is some."""
        self.is_ended = False
        """Whether its end was reported to the master, or will not be."""
        self.is_stored = [False] * len(self.blocks)
        """Per block: whether the store holds it, written by this save or by another client."""
        self.is_wanted = True
        self.held: StagedBlocks | None = None
        self.grants: list[PutGrant] | None = None
        self.granted: list[int] = []
        """Indices in ``blocks`` of the grants."""
        self.is_given = False
        """Whether the engine passes no more layers."""
        self.num_layers_computed = 0
        self.num_layers_submitted = 0
        self.is_settled = False
        """Whether no write is left: every layer was written, or none will be."""
        self.lock = threading.Lock()

    @property
    def done(self) -> bool:
        """Whether the save no longer reads the pool, and will store nothing more."""
        return self.is_ended and self.claim.is_free

    @property
    def num_stored_blocks(self) -> int:
        """Number of leading blocks that the store holds."""
        return next((count for count, stored in enumerate(self.is_stored) if not stored), len(self.blocks))


@dataclasses.dataclass(frozen=True)
class _SegmentMove:
    """A move of bytes to or from one segment."""

    token: int
    op: Op
    segment: RemoteSegment
    columns: tuple[Column, Column, Column]
    deadline: float


class StoreLink:
    """Moves KV between one engine's memory and the store.

    Args:
        identity: identity of the blocks, with their layout as objects.
        memory: memory of the blocks; registered with ``transfer`` until ``close``.
        loop: the loop on which ``store`` lives.
    """

    def __init__(
        self,
        store: AsyncStore,
        transfer: TransferEngine,
        identity: CacheIdentity,
        memory: HostMemory,
        loop: asyncio.AbstractEventLoop,
        settings: LinkSettings = LinkSettings(),
    ) -> None:
        self._store = store
        self._transfer = transfer
        self._identity = identity
        self._layout = identity.layout
        self._loop = loop
        self._settings = settings
        self._memory = memory
        self._wake: Callable[[], None] = lambda: None
        self._breaker = CircuitBreaker(settings.retry_after_s)
        self._tasks: set[asyncio.Task[None]] = set()
        self._queue = transfer.new_queue()
        self._in_flight: dict[int, Callable[[Completion], None]] = {}
        self._next_token = 0
        self._token_lock = threading.Lock()
        self._waiting: dict[RemoteSegment, list[_SegmentMove]] = {}
        """Moves that wait for a peer's handshake."""
        self._copies: dict[Purpose, deque[tuple[DeviceEvent, Callable[[], None]]]] = {
            "load": deque(),
            "save": deque(),
        }
        """Copies of the device that were begun: the event of their end, and what follows it; in order."""
        self._pieces: deque[tuple[StoreLoad, LoadPiece]] = deque()
        """Pieces of loads that wait for host memory, in order; any thread appends, the loop removes."""
        self._is_polling = False
        self._is_closed = False
        """Whether what the device has copied is stored no longer."""
        self._regions = transfer.register_all(memory.buffers)
        self._loop.call_soon_threadsafe(self._loop.add_reader, self._queue.fileno(), self._drain)

    def replace_identity(self, identity: CacheIdentity) -> None:
        """Look up and save blocks under another identity, of the same layout, from now on.

        No lookup, load or save may be under way: blocks are named when their operation begins.
        """
        assert identity.layout == self._layout, "blocks of another layout need another link"
        self._identity = identity

    def attach(self, wake: Callable[[], None]) -> None:
        """Set ``wake``, which is called from the loop whenever a lookup, load or save has made progress."""

        def guarded() -> None:
            try:
                wake()
            except Exception:  # the engine's own code; operations in flight must end all the same
                log.exception("callback_failed")

        self._wake = guarded

    async def close(self) -> None:
        """Stop; nothing touches the pool afterwards."""
        self._loop.remove_reader(self._queue.fileno())
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for region in self._regions:
            self._transfer.unregister(region)
        self._is_closed = True
        for copies in self._copies.values():
            while copies:
                await asyncio.to_thread(copies[0][0].synchronize)
                self._poll_copies()
        self._begin_pieces()  # fails those that wait
        for token in list(self._in_flight):  # these have ended, and their completions are not processed
            self._complete(Completion(token, Status.CANCELLED))
        await asyncio.sleep(0)
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- lookups -------------------------------------------------------------------------------

    def lookup(self, blocks: Sequence[tuple[BlockHash, int]], timeout_s: float | None = None) -> StoreLookup:
        """Look up ``blocks`` ((hash, number of tokens) in prefix order) and lease those found. ``timeout_s``
        None: that of the settings."""
        lookup = StoreLookup(blocks)
        if not blocks or self._breaker.is_open:
            lookup.done = True
        else:
            self._spawn(
                self._look_up(lookup, self._settings.lookup_timeout_s if timeout_s is None else timeout_s)
            )
        return lookup

    def release(self, lookup: StoreLookup) -> None:
        """Release the blocks of a lookup. Nothing to do here: their leases lapse by themselves."""
        lookup.grants = []

    async def _look_up(self, lookup: StoreLookup, timeout_s: float) -> None:
        keys = [self._identity.key(block_hash) for block_hash, _ in lookup.blocks]
        try:
            async with asyncio.timeout(timeout_s):
                found = await self._store.open_reads(keys)
            for grant, (_, num_tokens) in zip(found, lookup.blocks, strict=True):
                if grant is None or grant.size_bytes != self._layout.object_bytes(num_tokens):
                    break
                lookup.grants.append(grant)
        except Exception as error:
            lookup.grants = []
            self._store_failed("lookup", error)
        finally:
            lookup.done = True
            self._wake()

    # -- loads ---------------------------------------------------------------------------------

    def computed(self) -> DeviceEvent | None:
        """The end of the engine's work so far, on whose thread this is called; None: it has ended."""
        return self._memory.computed()

    @property
    def most_blocks(self) -> int:
        """Number of blocks that one load or save should have at most."""
        return self._memory.most_blocks

    def has_room(self, num_blocks: int, purpose: Purpose) -> bool:
        """Whether there is host memory for so many blocks now."""
        return self._memory.has_room(num_blocks, purpose)

    def start_load(self, lookup: StoreLookup, block_ids: Sequence[int]) -> StoreLoad:
        """Load the first ``len(block_ids)`` blocks of ``lookup`` into the pool, layer by layer.

        Where they don't all fit into the free host memory, in pieces.
        """
        after = self.computed()
        # A load behind others that wait does not overtake them, or a long one might never get its room.
        held = None if self._pieces else self._memory.hold(block_ids, "load", after)
        most = self.most_blocks if held is None else len(block_ids)
        return self._load(lookup, 0, block_ids, held, most, after)

    def load_part(
        self, lookup: StoreLookup, first: int, block_ids: Sequence[int], after: DeviceEvent | None
    ) -> StoreLoad:
        """Load blocks of ``lookup`` from ``first`` on, at once. To be called from any thread.

        ``after``: ``computed`` when nothing of the engine's later work used the blocks.
        """
        held = self._memory.hold(block_ids, "load", after)
        if held is None:
            log.warning("load_refused", reason="no staging memory", num_blocks=len(block_ids))
            return StoreLoad(0, 0, clock.monotonic(), is_bad=True)
        return self._load(lookup, first, block_ids, held, len(block_ids), after)

    def _load(
        self,
        lookup: StoreLookup,
        first: int,
        block_ids: Sequence[int],
        held: StagedBlocks | None,
        most: int,
        after: DeviceEvent | None,
    ) -> StoreLoad:
        """Begin a load in pieces of at most ``most`` blocks; ``held``: the host memory of its only piece."""
        grants = lookup.grants[first : first + len(block_ids)]
        assert len(grants) == len(block_ids), "more blocks than were found"
        lengths = [num_tokens for _, num_tokens in lookup.blocks[first : first + len(block_ids)]]
        patience_s = min(grant.expires_at for grant in grants) - clock.monotonic()
        patience_s = max(0.0, min(patience_s, self._settings.load_timeout_s))
        num_layers = self._layout.num_layers
        cuts = [slice(start, start + most) for start in range(0, len(block_ids), most)]
        pieces = [
            LoadPiece(block_ids[cut], grants[cut], lengths[cut], num_layers, after, held) for cut in cuts
        ]
        num_parts = sum(len(piece.parts) for piece in pieces)
        load = StoreLoad(num_layers, num_parts, clock.monotonic() + patience_s, num_tokens=sum(lengths))
        if load.done:
            log.warning("load_refused", reason="its lease has lapsed", num_blocks=len(block_ids))
            if held is not None:
                self._memory.release(held)
        elif held is not None:
            # On the loop: the columns of a long prefix take milliseconds, in which the engine computes.
            self._loop.call_soon_threadsafe(self._begin_load, load, pieces[0])
        else:
            self._pieces.extend((load, piece) for piece in pieces)
            self._loop.call_soon_threadsafe(self._begin_pieces)
            self._loop.call_soon_threadsafe(self._loop.call_later, patience_s, self._begin_pieces)
        return load

    def _begin_pieces(self) -> None:
        """Begin the pieces that there is host memory for, and fail those that come too late; on the loop."""
        now = clock.monotonic()
        for load, piece in list(self._pieces):
            if load.is_bad or now >= load.deadline or self._is_closed:
                self._pieces.remove((load, piece))
                if not load.is_bad:
                    log.warning("load_refused", reason="no staging memory", num_blocks=len(piece.block_ids))
                    failures.labels("load").inc()
                self._fail_parts(load, piece, [layer for layer, _ in self._moves(piece)])
        while self._pieces:
            load, piece = self._pieces[0]
            piece.held = self._memory.hold(piece.block_ids, "load", piece.after)
            if piece.held is None:
                return
            self._pieces.popleft()
            self._begin_load(load, piece)

    def _moves(self, piece: LoadPiece) -> list[tuple[int, Sequence[int]]]:
        """(layer, members) of the transfers of a piece, first layer first."""
        return [(layer, members) for layer in range(piece.num_layers) for members in piece.parts]

    def _begin_load(self, load: StoreLoad, piece: LoadPiece) -> None:
        """Submit all parts of a piece, first layer first."""
        assert piece.held is not None
        load.held.append(piece.held)
        left = self._moves(piece)
        left.reverse()
        try:
            checksums = np.stack([grant.checksums for grant in piece.grants])
            while left:
                self._submit_load(load, piece, *left[-1], checksums)
                left.pop()
        except Exception:  # a bug of ours; the load must end all the same
            log.exception("operation_failed", operation="load")
            failures.labels("load").inc()
            self._fail_parts(load, piece, [layer for layer, _ in left])
        segments = [piece.grants[members[0]].segment for members in piece.parts]
        self._loop.call_later(max(0.0, load.deadline - clock.monotonic()), self._expire, load, segments)

    def _fail_parts(self, load: StoreLoad, piece: LoadPiece, layers: Sequence[int]) -> None:
        """Fail parts of a piece, one of each of ``layers``, that will not be moved."""
        for layer in layers:
            load.land(layer, False)
            self._leave(load, piece)
        self._wake()

    def _leave(self, load: StoreLoad, piece: LoadPiece) -> None:
        """Record that one part of a piece writes nothing more; on the loop."""
        piece.num_left -= 1
        if not piece.num_left and piece.held is not None:
            self._memory.release(piece.held)
            if self._pieces:
                self._loop.call_soon(self._begin_pieces)
        load.leave()

    def _expire(self, load: StoreLoad, segments: Sequence[RemoteSegment]) -> None:
        """Fail a load that has not ended by its deadline; its bytes must not arrive later."""
        if not load.done:
            log.warning("load_timed_out", num_layers_loaded=load.num_layers_loaded)
            for segment in segments:
                self._transfer.cancel(segment)

    def _submit_load(
        self,
        load: StoreLoad,
        piece: LoadPiece,
        layer: int,
        members: Sequence[int],
        all_checksums: Checksums,
    ) -> None:
        grants = [piece.grants[index] for index in members]
        lengths = [piece.lengths[index] for index in members]
        held = piece.held
        assert held is not None
        local = self._memory.addresses(held, layer, members)
        remote, sizes = self._columns(layer, lengths, [grant.address for grant in grants])
        expected = all_checksums[list(members), self._chunks(layer)].reshape(-1)
        num_bytes = int(sizes.sum())

        def arrived(completion: Completion) -> None:
            good = completion.status == Status.OK and clock.monotonic() <= load.deadline
            reason = completion.status.name
            corrupt: list[ReadGrant] = []
            if good:
                assert completion.checksums is not None
                wrong = np.flatnonzero(completion.checksums != expected) // self._layout.num_slabs
                corrupt = [grants[index] for index in np.unique(wrong)]
                if corrupt:
                    good = False
                    reason = f"checksum of {corrupt[0].key}"
                else:
                    loaded_bytes.inc(num_bytes)
            copied: DeviceEvent | None = None
            if good:
                try:
                    copied = self._memory.enter(held, layer, members)
                except Exception as error:  # such as a device without memory for it
                    log.exception("operation_failed", operation="load")
                    good, reason = False, str(error)
            if load.land(layer, good):
                failures.labels("load").inc()
                log.warning("load_failed", layer=layer, reason=reason)
                if corrupt:  # the other layers of these objects are reported no second time
                    self._spawn(self._report(corrupt))
            if copied is None:
                left()
            else:
                self._wake()
                self._when_copied("load", copied, left)

        def left() -> None:
            self._leave(load, piece)
            self._wake()

        self._submit(Op.READ, grants[0].segment, (local, remote, sizes), load.deadline, arrived)

    async def _report(self, grants: Sequence[ReadGrant]) -> None:
        """Have their nodes check the replicas; else every later load of these would fail as well."""
        try:
            async with asyncio.timeout(self._settings.load_timeout_s):
                await self._store.report_corrupt(grants)
        except (MooncakeError, TimeoutError) as error:
            reason = str(error) or type(error).__name__
            log.warning("corruption_not_reported", key=grants[0].key, num_objects=len(grants), reason=reason)

    def wait_layer(self, loads: Sequence[StoreLoad], layer: int) -> None:
        """Block the engine thread until ``layer`` of every load has arrived, or the load has failed.

        On a device the work that this thread begins afterwards waits for the copy into the pool.

        The wait ends: at its deadline a load is cancelled, which completes everything in flight. If the loop
        that does this is blocked, the engine keeps waiting, for its memory is in use; warnings are logged.
        """
        for load in loads:
            with load.arrived:
                # A bad load counts as failed at its end only, and the step must not end before.
                while (load.num_layers_loaded <= layer or load.is_bad) and not load.failed:
                    is_overdue = clock.monotonic() >= load.deadline
                    if not load.arrived.wait(LOG_EVERY_S) and is_overdue:
                        load.claim.log_overdue()
            if not load.failed:
                for held in load.held:
                    self._memory.compute_after(held, layer)

    # -- saves ---------------------------------------------------------------------------------

    def start_save(self, blocks: Sequence[tuple[BlockHash, int, int]]) -> StoreSave:
        """Begin to save ``blocks`` ((hash, tokens, block id)) whose layers are about to be computed."""
        save = StoreSave(blocks)
        if blocks and not self._breaker.is_open:
            save.held = self._memory.hold([block_id for _, _, block_id in blocks], "save")
        if save.held is None:
            save.claim.close()
            save.is_ended = True
        else:
            self._spawn(self._open_save(save))
        return save

    def save_layer(self, save: StoreSave, layer: int) -> None:
        """Save ``layer`` of the save's blocks, which the engine's thread has computed."""
        self.save_computed(save, layer, None if save.held is None else self.computed())

    def save_computed(self, save: StoreSave, layer: int, computed: DeviceEvent | None) -> None:
        """Save ``layer``, which is in the pool once ``computed`` is reached. To be called from any thread."""
        if save.held is None:
            return
        with save.lock:
            if not save.is_wanted or not save.claim.enter(clock.monotonic()):
                # Also when it is too late: the timer expires it, too, but may be late itself.
                save.is_wanted = False
                self._settle(save)
                return
        try:
            copied = self._memory.leave(save.held, layer, computed)
        except Exception:  # such as a device without memory for it
            log.exception("operation_failed", operation="save")
            failures.labels("save").inc()
            with save.lock:
                save.is_wanted = False
                save.claim.leave()
                self._settle(save)
                self._release_held(save)
            return
        if copied is None:
            self._left(save, layer + 1)
        else:
            self._when_copied("save", copied, lambda: self._left(save, layer + 1))

    def _left(self, save: StoreSave, num_layers: int) -> None:
        """Submit layers, of which ``num_layers`` are in host memory now."""
        with save.lock:
            save.claim.leave()
            save.is_wanted = save.is_wanted and not self._is_closed
            save.num_layers_computed = max(save.num_layers_computed, num_layers)
            self._advance(save)
            self._settle(save)
            self._release_held(save)
            is_done = save.done
        if is_done:  # it had ended before, and the copy was the last access to the pool
            self._wake()

    def finish_save(self, save: StoreSave) -> None:
        """End the layers; ``save.done`` turns true when the store has them or has refused."""
        with save.lock:
            save.is_given = True
            self._settle(save)
            self._release_held(save)

    def abort_save(self, save: StoreSave) -> None:
        """Revoke the save: its layers are not valid."""
        with save.lock:
            save.is_given = True
            save.is_wanted = False
            self._settle(save)
            self._release_held(save)

    @property
    def _save_timeout_s(self) -> float:
        return patience_s(self._store, self._settings.load_timeout_s, self._settings.lookup_timeout_s)

    async def _open_save(self, save: StoreSave) -> None:
        keys = [self._identity.key(block_hash) for block_hash, _, _ in save.blocks]
        sizes = [self._layout.object_bytes(num_tokens) for _, num_tokens, _ in save.blocks]
        chunks = [self._layout.chunk_bytes(num_tokens) for _, num_tokens, _ in save.blocks]
        try:
            async with asyncio.timeout(self._save_timeout_s):
                answers = await self._store.start_puts(keys, sizes, chunks)
        except BaseException as error:  # also when cancelled: nothing of it will be stored
            self._store_failed("save", error)
            self._end_save(save)
            if not isinstance(error, Exception):
                raise
            return
        grants: list[PutGrant] = []
        for position, answer in enumerate(answers):
            if isinstance(answer, PutGrant) and answer.failure is None:
                grants.append(answer)
                save.granted.append(position)
            elif isinstance(answer, PutGrant):
                failures.labels("save").inc()
                log.warning("save_failed", key=answer.key, reason=str(answer.failure))
            elif answer is None or answer.code == "being_written":
                save.is_stored[position] = True  # if the other writer fails, it will be a miss
            else:
                failures.labels("save").inc()
                log.info("save_refused", code=answer.code, reason=answer.reason)
        if not grants:
            self._end_save(save)
            return
        save.claim.deadline = min(grant.expires_at for grant in grants)
        patience_s = save.claim.deadline - clock.monotonic()
        self._loop.call_later(max(0.0, patience_s), self._expire_save, save)
        with save.lock:
            save.grants = grants
            self._advance(save)
            self._settle(save)

    def _expire_save(self, save: StoreSave) -> None:
        """Stop writing into space that was reserved too long ago: the master may reuse it."""
        if save.done:
            return
        assert save.grants is not None
        log.warning("save_timed_out", num_layers=save.num_layers_computed)
        with save.lock:
            save.is_wanted = False
            self._settle(save)
        for members in _by_segment(save.grants):
            self._transfer.cancel(save.grants[members[0]].segment)

    def _advance(self, save: StoreSave) -> None:
        """Submit every computed layer that is not submitted yet; the caller holds the save's lock."""
        if save.grants is None or not save.is_wanted:
            return
        parts = _by_segment(save.grants)
        for layer in range(save.num_layers_submitted, save.num_layers_computed):
            for members in parts:
                if not save.claim.enter(clock.monotonic()):
                    # The timer expires it, too, but may be late: no write may begin in others' space.
                    save.is_wanted = False
                    self._settle(save)
                    return
                self._submit_save(save, layer, members)
        save.num_layers_submitted = max(save.num_layers_submitted, save.num_layers_computed)

    def _submit_save(self, save: StoreSave, layer: int, members: Sequence[int]) -> None:
        assert save.grants is not None
        grants = [save.grants[index] for index in members]
        positions = [save.granted[index] for index in members]
        assert save.held is not None
        local = self._memory.addresses(save.held, layer, positions)
        lengths = [save.blocks[position][1] for position in positions]
        remote, sizes = self._columns(layer, lengths, [grant.address for grant in grants])

        def written(completion: Completion) -> None:
            with save.lock:
                save.claim.leave()
                if completion.status == Status.OK:
                    assert completion.checksums is not None
                    checksums = completion.checksums.reshape(len(grants), -1)
                    for position, grant in enumerate(grants):
                        grant.checksums[self._chunks(layer)] = checksums[position]
                        grant.is_written[self._chunks(layer)] = True
                elif save.is_wanted:
                    save.is_wanted = False
                    failures.labels("save").inc()
                    log.warning("save_failed", layer=layer, status=completion.status.name)
                self._settle(save)

        deadline = clock.monotonic() + self._settings.load_timeout_s
        deadline = min(deadline, save.claim.deadline)
        self._submit(Op.WRITE, grants[0].segment, (local, remote, sizes), deadline, written)

    def _settle(self, save: StoreSave) -> None:
        """Report the end to the master once nothing is in flight; the caller holds the save's lock."""
        # Until ``finish_save`` it may be aborted: a load of the same step may turn out wrong.
        is_whole = save.is_given and save.num_layers_submitted == self._layout.num_layers
        complete = is_whole or not save.is_wanted
        if save.grants is None or not complete or save.is_settled:
            return
        save.claim.close()
        if not save.claim.is_free:
            return
        save.is_settled = True
        self._spawn(self._close_save(save))

    async def _close_save(self, save: StoreSave) -> None:
        assert save.grants is not None
        try:
            async with asyncio.timeout(self._save_timeout_s):
                if not save.is_wanted:
                    await self._store.abort_puts(save.grants)
                else:
                    answers = await self._store.end_puts(save.grants)
                    for position, grant, answer in zip(save.granted, save.grants, answers, strict=True):
                        if answer is None:
                            save.is_stored[position] = True
                            saved_bytes.inc(grant.size_bytes)
        except Exception as error:
            self._store_failed("save", error)
        finally:
            self._end_save(save)

    def _end_save(self, save: StoreSave) -> None:
        with save.lock:
            save.claim.close()
            save.is_ended = True
            self._release_held(save)
        self._wake()

    def _release_held(self, save: StoreSave) -> None:
        """Release host memory once no layer is passed or moved; the caller holds the lock."""
        if save.held is not None and save.is_given and save.done:
            self._memory.release(save.held)

    # -- shared by both ------------------------------------------------------------------------

    def _when_copied(self, purpose: Purpose, copied: DeviceEvent, then: Callable[[], None]) -> None:
        """Call ``then`` from the loop once a copy of the device has ended."""
        with self._token_lock:
            self._copies[purpose].append((copied, then))
            is_polling, self._is_polling = self._is_polling, True
        if not is_polling:
            self._loop.call_soon_threadsafe(self._poll_copies)

    def _poll_copies(self) -> None:
        for copies in self._copies.values():
            while copies and copies[0][0].query():
                then = copies.popleft()[1]
                try:
                    then()
                except Exception:  # a bug of ours; the others are processed all the same
                    log.exception("operation_failed", operation="copy")
        with self._token_lock:
            self._is_polling = any(self._copies.values())
            if self._is_polling:
                self._loop.call_later(POLL_S, self._poll_copies)

    def _chunks(self, layer: int) -> slice:
        """The chunks of an object that belong to ``layer``."""
        num_slabs = self._layout.num_slabs
        return slice(layer * num_slabs, (layer + 1) * num_slabs)

    def _columns(self, layer: int, lengths: Sequence[int], addresses: Sequence[int]) -> tuple[Column, Column]:
        """(remote addresses, sizes) of the slabs of ``layer`` of objects, object by object."""
        # Whole blocks are alike, and a prefix has many: what depends on the length is computed once for each.
        layout = self._layout
        offsets = {
            num_tokens: layout.object_offsets(layer, num_tokens) for num_tokens in dict.fromkeys(lengths)
        }
        chunks = {num_tokens: layout.chunk_bytes(num_tokens) for num_tokens in offsets}
        first = np.array(addresses, dtype=np.uint64)[:, None]
        remote = first + np.array([offsets[num_tokens] for num_tokens in lengths], dtype=np.uint64)
        sizes = np.array([chunks[num_tokens] for num_tokens in lengths], dtype=np.uint64)
        return remote.reshape(-1), sizes.repeat(layout.num_slabs)

    def _submit(
        self,
        op: Op,
        segment: RemoteSegment,
        columns: tuple[Column, Column, Column],
        deadline: float,
        done: Callable[[Completion], None],
    ) -> None:
        """Submit a move. With a new peer it waits for the handshake; moves with other peers do not."""
        with self._token_lock:
            self._next_token += 1
            move = _SegmentMove(self._next_token, op, segment, columns, deadline)
            self._in_flight[move.token] = done
            waits = segment in self._waiting or not segment.is_connected
            is_first = waits and segment not in self._waiting
            if waits:
                self._waiting.setdefault(segment, []).append(move)
        if is_first:
            self._spawn(self._handshake(segment))
        elif not waits:
            self._send(move)

    def _send(self, move: _SegmentMove) -> None:
        timeout_s = move.deadline - clock.monotonic()
        status = Status.TIMED_OUT
        if timeout_s > 0:
            try:
                self._transfer.submit(
                    self._queue,
                    move.token,
                    move.op,
                    move.segment,
                    *move.columns,
                    checksum=True,
                    timeout_s=timeout_s,
                )
                return
            except MooncakeError as error:  # nothing was begun
                log.error("transfer_refused", reason=str(error))
                status = Status.UNREGISTERED
        # Not from here: the caller holds the lock that the completion takes.
        self._loop.call_soon_threadsafe(self._complete, Completion(move.token, status))

    async def _handshake(self, segment: RemoteSegment) -> None:
        """Submit the moves that wait for ``segment`` after its handshake; those past their deadline fail."""
        while True:
            with self._token_lock:
                soonest = min(move.deadline for move in self._waiting[segment])
            left_s = soonest - clock.monotonic()
            has_answered = left_s > 0 and await asyncio.to_thread(segment.connect, left_s)
            now = clock.monotonic()
            with self._token_lock:
                moves = self._waiting.pop(segment)
                in_time = [move for move in moves if move.deadline > now]
                if in_time and not has_answered:
                    self._waiting[segment] = in_time
            for move in moves:
                if move.deadline <= now:
                    self._complete(Completion(move.token, Status.TIMED_OUT))
                elif has_answered:
                    self._send(move)
            if has_answered or not in_time:
                return

    def _drain(self) -> None:
        for completion in self._queue.drain():
            try:
                self._complete(completion)
            except Exception:  # a bug of ours; the others are processed all the same
                log.exception("operation_failed", operation="completion")

    def _complete(self, completion: Completion) -> None:
        self._in_flight.pop(completion.token)(completion)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` on the loop, from any thread."""

        def begin() -> None:
            task = self._loop.create_task(work)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        self._loop.call_soon_threadsafe(begin)

    def _store_failed(self, operation: str, error: BaseException) -> None:
        failures.labels(operation).inc()
        if not isinstance(error, MooncakeError | TimeoutError | asyncio.CancelledError):
            log.exception("operation_failed", operation=operation)  # a bug of ours
            return
        self._breaker.trip(operation, error)


def _by_segment(grants: Sequence[PutGrant | ReadGrant]) -> list[list[int]]:
    """Indices of ``grants``, grouped by their segment, in order."""
    groups: dict[int, list[int]] = {}
    for position, grant in enumerate(grants):
        groups.setdefault(id(grant.segment), []).append(position)
    return list(groups.values())

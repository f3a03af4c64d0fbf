# SPDX-License-Identifier: Apache-2.0
"""An engine's two sides at the store: the scheduler's, which finds blocks, and a rank's, which moves them.

An engine has one scheduler and one process per rank, and each rank has its part of every block: some of
the heads, some of the layers. A part that two engines would cut in the same way is a *shard*, and has a
key of its own. The scheduler counts a block as found when all shards of all ranks are.

A failure is a miss, and an operation that has not begun in time never begins; one that touches the blocks
is waited for until it has ended: see ``store_link.py``.

Where blocks pass through a bounded staging area (``staged_memory.py``), a plan is moved in pieces that fit in
it. A piece for which there is no room yet waits: a load's until an earlier one has ended, a save's until the
step is computed and an earlier one has ended, since the scheduler keeps its blocks.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import Sequence

from mooncake import clock
from mooncake.connectors.memory import DeviceEvent, HostMemory
from mooncake.connectors.planner import BlockName, LoadPlan, SavePlan
from mooncake.connectors.session import DEFAULT_TIMEOUT_S, PoolSession
from mooncake.connectors.store_link import (
    CircuitBreaker,
    LinkSettings,
    StoreLink,
    StoreLoad,
    StoreLookup,
    StoreSave,
    failures,
    patience_s,
)
from mooncake.errors import MooncakeError
from mooncake.kvlayout import ForeignIdentity, SlabLayout, foreign_key
from mooncake.log import get_logger
from mooncake.prefix import BlockHash
from mooncake.types import ObjectKey

log = get_logger(__name__)

RETRY_AFTER_S = 1.0
"""How long no lookup is sent to a store that could not be reached."""

LATENESS_S = 0.5
"""Time beyond its timeout in which a lookup may report its end, before its load is abandoned."""

RETRY_ROOM_S = 0.05
"""Interval at which an engine that needs a layer looks itself whether the rest of its load can begin."""

WAITING_LOOKUP = 3.0
"""Timeout, in usual ones, of a lookup for which nothing but its request waits, the first one and that of the
load: to compute the blocks takes longer than a busy machine's answer."""

MARGIN_S = 2.0
"""Least remaining time of a lease when the ranks begin to load; with less, the lookup is repeated."""


DEFAULTS = LinkSettings(lookup_timeout_s=DEFAULT_TIMEOUT_S, retry_after_s=RETRY_AFTER_S)


class PendingLookup:
    """A lookup of the leading blocks of a request in the store."""

    def __init__(self, num_wanted: int) -> None:
        self.num_wanted = num_wanted
        self.num_blocks = 0
        self.good_until = float("inf")
        """When the leases on them are about to lapse."""
        self.seconds = 0.0
        self.has_failed = False
        self.is_counted = False
        """Whether the caller has added it to its statistics."""
        self._done = threading.Event()

    def is_stale(self) -> bool:
        """Whether its leases are about to lapse, so that the blocks found may be evicted."""
        return self._done.is_set() and clock.monotonic() > self.good_until

    def wait(self, timeout_s: float) -> bool:
        """Whether it is done, after waiting ``timeout_s`` at most."""
        return self._done.wait(timeout_s)

    def settle(self) -> None:
        self._done.set()


class PrefixLookup:
    """The scheduler's side. ``digests``: those of all shards of all ranks; while empty, nothing is found."""

    def __init__(self, session: PoolSession) -> None:
        self._session = session
        self._breaker = CircuitBreaker(RETRY_AFTER_S)
        self.digests: tuple[str, ...] = ()

    def find(self, names: Sequence[BlockName]) -> PendingLookup:
        """Begin to look for ``names``, in prefix order; blocks found are leased."""
        lookup = PendingLookup(len(names))
        if not names or not self.digests or self._breaker.is_open:
            lookup.settle()
        else:
            self._session.start(self._find(lookup, list(names)))
        return lookup

    async def _find(self, lookup: PendingLookup, names: list[BlockName]) -> None:
        began = time.perf_counter()
        keys = [foreign_key(digest, name) for name in names for digest in self.digests]
        try:
            store = self._session.store
            timeout_s = patience_s(store, WAITING_LOOKUP * DEFAULT_TIMEOUT_S, DEFAULT_TIMEOUT_S)
            async with asyncio.timeout(timeout_s):
                grants = await store.open_reads(keys)
            missing = next((index for index, grant in enumerate(grants) if grant is None), len(grants))
            lookup.num_blocks = missing // len(self.digests)
            leases = [grant.expires_at for grant in grants[:missing] if grant is not None]
            if leases:
                lookup.good_until = min(leases) - MARGIN_S
        except (MooncakeError, TimeoutError) as error:
            self._breaker.trip("find", error)
            lookup.has_failed = True
        except Exception:  # a bug of ours is no reason to fail the request
            lookup.has_failed = True
            log.exception("operation_failed", operation="find")
        finally:
            lookup.seconds = time.perf_counter() - began
            lookup.settle()


class Shards:
    """The identities of a rank's shards: a name's last byte is the number of the shard."""

    def __init__(self, shards: Sequence[ForeignIdentity]) -> None:
        assert 0 < len(shards) <= 256
        assert all(shard.layout == shards[0].layout for shard in shards)
        self._shards = list(shards)

    @property
    def layout(self) -> SlabLayout:
        return self._shards[0].layout

    @property
    def digests(self) -> list[str]:
        return [shard.digest for shard in self._shards]

    def __len__(self) -> int:
        return len(self._shards)

    def key(self, block_hash: BlockHash) -> ObjectKey:
        return self._shards[block_hash[-1]].key(block_hash[:-1])


@dataclasses.dataclass(frozen=True)
class FinishedLoad:
    """A load that has ended."""

    request_id: str
    is_complete: bool
    is_layerwise: bool


@dataclasses.dataclass
class TransferReport:
    """Events of a rank since its previous report."""

    saved: list[int] = dataclasses.field(default_factory=list)
    """Numbers of saves that no longer need their blocks."""
    stored: list[tuple[int, BlockName]] = dataclasses.field(default_factory=list)
    """(number of the save, name) of each of their blocks of which the store has this rank's shards."""
    loaded: list[FinishedLoad] = dataclasses.field(default_factory=list)
    """Loads that have ended."""
    bad_blocks: set[int] = dataclasses.field(default_factory=set)
    """Blocks that were to be loaded and whose contents are not valid."""
    loads: list[tuple[int, int, float]] = dataclasses.field(default_factory=list)
    """(blocks loaded, blocks that failed, seconds) of each load."""
    saves: list[tuple[int, int, float]] = dataclasses.field(default_factory=list)
    """The same of each save."""


class _ActiveLoad:
    """A load, from its plan to its end. ``after``: the engine's work that may still use its blocks."""

    def __init__(self, plan: LoadPlan, lookup: StoreLookup, after: DeviceEvent | None) -> None:
        self.plan = plan
        self.lookup = lookup
        self.after = after
        self.began = time.perf_counter()
        self.pieces: list[StoreLoad] = []
        self.parts: list[tuple[int, ...]] = []
        """By piece: the blocks that it loads."""
        self.num_found: int | None = None
        """Number of leading blocks to load; None during the lookup."""
        self.num_begun = 0
        self.num_bad = 0
        self.is_over = False

    def is_found(self) -> bool:
        return self.num_found is not None or self.is_over

    def has_begun(self) -> bool:
        """Whether no piece is left that has not begun."""
        return self.num_begun == self.num_found or self.is_over


class _ActiveSave:
    """A save, from its plan to its end. ``blocks``: (name, tokens, block id) of every shard."""

    def __init__(self, plan: SavePlan, blocks: list[tuple[BlockHash, int, int]]) -> None:
        self.plan = plan
        self.blocks = blocks
        self.began = time.perf_counter()
        self.pieces: list[StoreSave] = []
        self.num_begun = 0
        self.computed: DeviceEvent | None = None
        """The end of the step that fills the blocks, once the engine has begun all of it."""
        self.deadline = float("inf")
        """When pieces that have not begun are dropped."""


class RankTransfer:
    """A rank's side: loads and saves what the scheduler planned, from and to this rank's memory.

    Args:
        shards: this rank's parts of a block. ``memory`` has one block for each shard of each block,
            those of one block in a row.
    """

    def __init__(
        self, session: PoolSession, shards: Shards, memory: HostMemory, settings: LinkSettings = DEFAULTS
    ) -> None:
        self._session = session
        self._shards = shards
        self._num_layers = shards.layout.num_layers
        self._block_tokens = shards.layout.block_tokens
        self._link = StoreLink(session.store, session.transfer, shards, memory, session.loop, settings)
        self._link.attach(self._advance)
        self._changed = threading.Condition()
        self._loadings: list[_ActiveLoad] = []
        self._layerwise: list[_ActiveLoad] = []
        self._patience_s = settings.lookup_timeout_s + LATENESS_S
        self._lookup_s = settings.lookup_timeout_s
        self._waiting_lookup_s = WAITING_LOOKUP * settings.lookup_timeout_s
        self._save_patience_s = settings.load_timeout_s
        self._savings: list[_ActiveSave] = []
        self._open: list[_ActiveSave] = []
        """Saves of this step, which still receive layers."""
        self._num_given = 0
        self._before_step: DeviceEvent | None = None
        """The end of the work that the engine had begun before this step."""
        self._moved = TransferReport()

    def close(self) -> None:
        """Stop; nothing touches the memory afterwards."""
        self._session.wait(self._link.close())

    # -- loads -------------------------------------------------------------------------------------

    def load(self, plans: Sequence[LoadPlan]) -> None:
        """Begin to load. ``collect`` reports the end."""
        after = self._before_step or (self._link.computed() if plans else None)
        waiting_s = patience_s(self._session.store, self._waiting_lookup_s, self._lookup_s)
        for plan in plans:
            # A layer-wise load keeps the whole step waiting.
            timeout_s = self._lookup_s if plan.is_layerwise else waiting_s
            loading = _ActiveLoad(plan, self._link.lookup(self._flat(plan.names), timeout_s), after)
            with self._changed:
                self._loadings.append(loading)
                if plan.is_layerwise:
                    self._layerwise.append(loading)
        self._advance()

    def wait_layer(self, layer: int) -> None:
        """Block until ``layer`` of this step's layer-wise loads has arrived or failed.

        On a device the work that this thread begins afterwards waits until it is in the pool.
        """
        for loading in self._layerwise:
            with self._changed:
                if not self._changed.wait_for(loading.is_found, self._patience_s):
                    self._give_up(loading)
            self._wait_pieces(loading, layer)

    def _wait_pieces(self, loading: _ActiveLoad, layer: int) -> None:
        """Wait for ``layer`` of all pieces. Those that have not begun wait for the room of earlier ones."""
        index = 0
        while True:
            with self._changed:
                pieces = loading.pieces[index:]
                if not pieces:
                    if loading.has_begun():
                        return
                    self._changed.wait(RETRY_ROOM_S)
            if pieces:
                self._link.wait_layer(pieces, layer)
                index += len(pieces)
            else:
                self._advance()

    def _step(self, loading: _ActiveLoad, has_room: bool) -> bool:
        """Advance a load if possible; the caller holds the lock.

        ``has_room``, and the result: whether there may be room for the loads after it.
        """
        plan, num_shards = loading.plan, len(self._shards)
        if loading.num_found is None:
            if not loading.lookup.done:
                return has_room
            loading.num_found = min(loading.lookup.num_blocks // num_shards, len(plan.names))
            self._miss(loading, plan.block_ids[loading.num_found :])
        if any(piece.failed for piece in loading.pieces):  # what follows a gap is of no use
            self._miss(loading, plan.block_ids[loading.num_begun : loading.num_found])
            loading.num_found = loading.num_begun
        while has_room and loading.num_begun < loading.num_found:
            most = max(1, self._link.most_blocks // num_shards)
            part = plan.block_ids[loading.num_begun : min(loading.num_begun + most, loading.num_found)]
            has_room = self._link.has_room(len(part) * num_shards, "load")
            if has_room:
                first = loading.num_begun * num_shards
                ids = self._flat_ids(part)
                loading.pieces.append(self._link.load_part(loading.lookup, first, ids, loading.after))
                loading.parts.append(part)
                loading.num_begun += len(part)
        if loading.has_begun() and all(piece.done for piece in loading.pieces):
            for piece, part in zip(loading.pieces, loading.parts, strict=True):
                if piece.failed:
                    self._miss(loading, part)
            self._end(loading)
        return has_room

    def _give_up(self, loading: _ActiveLoad) -> None:
        """Abandon a load that has not begun in time; the caller holds the lock."""
        log.warning("load_abandoned", request=loading.plan.request_id, reason="its lookup has not ended")
        self._link.release(loading.lookup)
        self._miss(loading, loading.plan.block_ids)
        self._end(loading)
        self._loadings.remove(loading)

    def _miss(self, loading: _ActiveLoad, block_ids: Sequence[int]) -> None:
        loading.num_bad += len(block_ids)
        self._moved.bad_blocks.update(block_ids)

    def _end(self, loading: _ActiveLoad) -> None:
        loading.is_over = True
        seconds = time.perf_counter() - loading.began
        num_blocks = len(loading.plan.names) - loading.num_bad
        plan = loading.plan
        self._moved.loaded.append(FinishedLoad(plan.request_id, loading.num_bad == 0, plan.is_layerwise))
        self._moved.loads.append((num_blocks, loading.num_bad, seconds))

    # -- saves -------------------------------------------------------------------------------------

    def begin_step(self, plans: Sequence[SavePlan]) -> None:
        """Begin a step; reserve space for blocks that will be full at its end.

        Called when the engine has begun whatever precedes the step's loads and its computation, such as
        clearing new blocks.
        """
        if self._open or self._layerwise:
            # vLLM's first model runner leaves the end out where a stage of a pipeline guesses no tokens.
            self.end_step()
        self._before_step, self._num_given = self._link.computed(), 0
        with self._changed:
            for plan in plans:
                blocks = zip(self._flat(plan.names), self._flat_ids(plan.block_ids), strict=True)
                saving = _ActiveSave(plan, [(name, tokens, block) for (name, tokens), block in blocks])
                self._begin_pieces(saving)
                self._open.append(saving)

    def _begin_pieces(self, saving: _ActiveSave) -> list[StoreSave]:
        """Begin pieces for which there is room; the caller holds the lock."""
        begun = []
        while saving.num_begun < len(saving.blocks):
            part = saving.blocks[saving.num_begun : saving.num_begun + self._link.most_blocks]
            if not self._link.has_room(len(part), "save"):
                break
            begun.append(self._link.start_save(part))
            saving.num_begun += len(part)
        saving.pieces += begun
        return begun

    def layer_computed(self, layer: int) -> None:
        """Save ``layer`` of all blocks of this step, whose computation has been begun."""
        computed = self._link.computed() if self._open else None
        for saving in self._open:
            for piece in saving.pieces:
                for number in range(self._num_given, layer + 1):
                    self._link.save_computed(piece, number, computed)
        self._num_given = max(self._num_given, layer + 1)

    def end_step(self) -> None:
        """Finish the saves and layer-wise loads of a step whose computation has been begun."""
        if self._layerwise:
            self.wait_layer(self._num_layers - 1)
            self._layerwise = []
        self.layer_computed(self._num_layers - 1)
        computed = self._link.computed() if self._open else None
        for saving in self._open:
            for piece in saving.pieces:
                self._link.finish_save(piece)
            saving.computed = computed
            saving.deadline = clock.monotonic() + self._save_patience_s
        with self._changed:
            self._savings += self._open
        self._open, self._num_given, self._before_step = [], 0, None
        self._advance()

    def _save_rest(self, saving: _ActiveSave) -> None:
        """Save pieces of a computed step for which there was no room before; the caller holds the lock."""
        for piece in self._begin_pieces(saving):
            for layer in range(self._num_layers):
                self._link.save_computed(piece, layer, saving.computed)
            self._link.finish_save(piece)
        if saving.num_begun < len(saving.blocks) and clock.monotonic() >= saving.deadline:
            num_blocks = len(saving.blocks) - saving.num_begun
            failures.labels("save").inc()
            log.warning("save_dropped", reason="no staging memory", num_blocks=num_blocks)
            saving.num_begun = len(saving.blocks)

    # -- both --------------------------------------------------------------------------------------

    def collect(self, timeout_s: float = 0.0) -> TransferReport:
        """Events since the last call; without any but with work under way, wait ``timeout_s`` for one."""
        self._advance()  # a load that has just failed is reported with the step that used it
        with self._changed:
            if not self._has_news() and (self._loadings or self._savings):
                self._changed.wait_for(self._has_news, timeout_s)
            moved, self._moved = self._moved, TransferReport()
        return moved

    def _has_news(self) -> bool:
        return bool(self._moved.loaded or self._moved.saved)

    def _advance(self) -> None:
        """Advance all loads and saves; called from any thread."""
        with self._changed:
            has_room = True
            for loading in self._loadings:
                has_room = self._step(loading, has_room)
            self._loadings = [loading for loading in self._loadings if not loading.is_over]
            for saving in list(self._savings):
                self._save_rest(saving)
                if saving.num_begun == len(saving.blocks) and all(piece.done for piece in saving.pieces):
                    self._savings.remove(saving)
                    self._saved(saving)
            self._changed.notify_all()

    def _saved(self, saving: _ActiveSave) -> None:
        num_shards = len(self._shards)
        is_stored = [stored for piece in saving.pieces for stored in piece.is_stored]
        is_stored += [False] * (len(saving.blocks) - len(is_stored))  # dropped
        stored = [
            (saving.plan.number, name)
            for index, name in enumerate(saving.plan.names)
            if all(is_stored[index * num_shards : (index + 1) * num_shards])
        ]
        self._moved.saved.append(saving.plan.number)
        self._moved.stored += stored
        seconds = time.perf_counter() - saving.began
        self._moved.saves.append((len(stored), len(saving.plan.names) - len(stored), seconds))

    def _flat(self, names: Sequence[BlockName]) -> list[tuple[BlockName, int]]:
        """(name, tokens) of every shard of every block."""
        tokens, shards = self._block_tokens, range(len(self._shards))
        return [(name + bytes([shard]), tokens) for name in names for shard in shards]

    def _flat_ids(self, block_ids: Sequence[int]) -> list[int]:
        num_shards = len(self._shards)
        return [block_id * num_shards + shard for block_id in block_ids for shard in range(num_shards)]

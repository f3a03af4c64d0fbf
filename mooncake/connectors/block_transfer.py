# SPDX-License-Identifier: Apache-2.0
"""An engine's two sides at the store: the scheduler's, which finds blocks, and a rank's, which moves them.

An engine has one scheduler and one process per rank, and each rank has its part of every block: some of
the heads, some of the layers. A part that two engines would cut in the same way is a *shard*, and has a
key of its own. The scheduler counts a block as found when all shards of all ranks are.

A failure is a miss, and an operation that has not begun in time never begins; one that touches the blocks
is waited for until it has ended: see ``store_link.py``.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Sequence

from mooncake import clock
from mooncake.connectors.memory import HostMemory
from mooncake.connectors.planner import BlockName, LoadPlan, SavePlan
from mooncake.connectors.session import DEFAULT_TIMEOUT_S, PoolSession
from mooncake.connectors.store_link import (
    CircuitBreaker,
    LinkSettings,
    StoreLink,
    StoreLoad,
    StoreLookup,
    StoreSave,
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
            grants = await self._session.store.open_reads(keys)
            missing = next((index for index, grant in enumerate(grants) if grant is None), len(grants))
            lookup.num_blocks = missing // len(self.digests)
            leases = [grant.expires_at for grant in grants[:missing] if grant is not None]
            if leases:
                lookup.good_until = min(leases) - MARGIN_S
        except MooncakeError as error:
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
    stored: list[BlockName] = dataclasses.field(default_factory=list)
    """Blocks of them of which the store has this rank's shards."""
    loaded: list[FinishedLoad] = dataclasses.field(default_factory=list)
    """Loads that have ended."""
    bad_blocks: set[int] = dataclasses.field(default_factory=set)
    """Blocks that were to be loaded and whose contents are not valid."""
    loads: list[tuple[int, int, float]] = dataclasses.field(default_factory=list)
    """(blocks loaded, blocks that failed, seconds) of each load."""
    saves: list[tuple[int, int, float]] = dataclasses.field(default_factory=list)
    """The same of each save."""


class _ActiveLoad:
    """A load, from its plan to its end."""

    def __init__(self, plan: LoadPlan, lookup: StoreLookup) -> None:
        self.plan = plan
        self.lookup = lookup
        self.began = time.perf_counter()
        self.load: StoreLoad | None = None
        self.num_found = 0
        self.num_bad = 0
        self.is_over = False

    def has_begun(self) -> bool:
        return self.load is not None or self.is_over


@dataclasses.dataclass(eq=False)
class _ActiveSave:
    plan: SavePlan
    save: StoreSave
    began: float


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
        self._savings: list[_ActiveSave] = []
        self._open: list[_ActiveSave] = []
        """Saves of this step, which still receive layers."""
        self._num_given = 0
        self._moved = TransferReport()

    def close(self) -> None:
        """Stop; nothing touches the memory afterwards."""
        self._session.wait(self._link.close())

    # -- loads -------------------------------------------------------------------------------------

    def load(self, plans: Sequence[LoadPlan]) -> None:
        """Begin to load. ``collect`` reports the end."""
        for plan in plans:
            loading = _ActiveLoad(plan, self._link.lookup(self._flat(plan.names)))
            with self._changed:
                self._loadings.append(loading)
                if plan.is_layerwise:
                    self._layerwise.append(loading)
        self._advance()

    def wait_layer(self, layer: int) -> None:
        """Block until ``layer`` of this step's layer-wise loads has arrived or failed."""
        for loading in self._layerwise:
            with self._changed:
                if not self._changed.wait_for(loading.has_begun, self._patience_s):
                    self._give_up(loading)
            if loading.load is not None:
                self._link.wait_layer([loading.load], layer)

    def _step(self, loading: _ActiveLoad) -> None:
        """Advance a load if possible; the caller holds the lock."""
        plan, num_shards = loading.plan, len(self._shards)
        if loading.load is None and loading.lookup.done:
            loading.num_found = min(loading.lookup.num_blocks // num_shards, len(plan.names))
            self._miss(loading, plan.block_ids[loading.num_found :])
            if loading.num_found:
                block_ids = self._flat_ids(plan.block_ids[: loading.num_found])
                loading.load = self._link.start_load(loading.lookup, block_ids)
            else:
                self._end(loading)
        if loading.load is not None and loading.load.done:
            if loading.load.failed:
                self._miss(loading, plan.block_ids[: loading.num_found])
            self._end(loading)

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

    def begin_saves(self, plans: Sequence[SavePlan]) -> None:
        """Reserve space for blocks that will be full at the end of the step that begins now."""
        now = time.perf_counter()
        for plan in plans:
            blocks = zip(self._flat(plan.names), self._flat_ids(plan.block_ids), strict=True)
            save = self._link.start_save([(name, tokens, block) for (name, tokens), block in blocks])
            self._open.append(_ActiveSave(plan, save, now))

    def layer_computed(self, layer: int) -> None:
        """Save ``layer`` of all blocks of this step, which is in memory now."""
        for saving in self._open:
            for number in range(self._num_given, layer + 1):
                self._link.save_layer(saving.save, number)
        self._num_given = max(self._num_given, layer + 1)

    def end_step(self) -> None:
        """Finish the saves and layer-wise loads of a step that has been computed."""
        if self._layerwise:
            self.wait_layer(self._num_layers - 1)
            self._layerwise = []
        self.layer_computed(self._num_layers - 1)
        for saving in self._open:
            self._link.finish_save(saving.save)
        with self._changed:
            self._savings += self._open
        self._open, self._num_given = [], 0
        self._advance()

    # -- both --------------------------------------------------------------------------------------

    def collect(self, timeout_s: float = 0.0) -> TransferReport:
        """Events since the last call; without any but with work under way, wait ``timeout_s`` for one."""
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
            for loading in self._loadings:
                self._step(loading)
            self._loadings = [loading for loading in self._loadings if not loading.is_over]
            for saving in [saving for saving in self._savings if saving.save.done]:
                self._savings.remove(saving)
                self._saved(saving)
            self._changed.notify_all()

    def _saved(self, saving: _ActiveSave) -> None:
        num_shards = len(self._shards)
        is_stored = saving.save.is_stored
        stored = [
            name
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

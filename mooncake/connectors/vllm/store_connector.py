# SPDX-License-Identifier: Apache-2.0
"""vLLM's ``KVConnectorBase_V1`` over the pool: prefixes computed by one engine are loaded by another.

A thin shell around ``planner`` (which blocks), ``block_transfer`` (how) and ``cache_identity`` (under which
keys). One instance lives in the process of vLLM's scheduler and one in each rank::

    scheduler   find ─▶ matched ─▶ allocated ─▶ metadata(loads, saves)        unhold ◀─ worker metadata
    rank                                        └▶ start_load, save layer by layer, report ──┘

Loads are asynchronous (the request waits, others are computed) or, with ``load_async: false``, layer by
layer during the computation. Saves are always layer by layer. Blocks that fail are computed again. KV events
of stored blocks have the format of vLLM's own; a block's is published when all ranks have stored their shards
of it, because only then can it be found.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from vllm.distributed.kv_events import BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from mooncake.connectors.block_transfer import PendingLookup, PrefixLookup, RankTransfer, TransferReport
from mooncake.connectors.cache_identity import Adapters
from mooncake.connectors.claim import take_overdue_s
from mooncake.connectors.lookup_spans import start_tracing, trace_lookup
from mooncake.connectors.planner import BlockName, LoadPlan, Planner, SavePlan
from mooncake.connectors.session import PoolSession, PoolSettings
from mooncake.connectors.vllm.kv_memory import prepare, registered_memory, staging_bytes_of
from mooncake.connectors.vllm.stats import ConnectorStats, CountedConnector, StoreMetrics
from mooncake.log import get_logger

log = get_logger(__name__)

WAIT_S = 0.002
"""Time that a step waits for a lookup, or for a move when it has nothing else to do."""

KNOWN = {
    "enable_lookup",
    "load_async",
    "local_hostname",
    "mooncake_store_addr",
    "protocol",
    "sampled_weights",
    "save_decode_cache",
    "staging_bytes",
    "store_tp_size",
    "tenant_id",
    "weights_digest",
}
"""Options of ``kv_connector_extra_config``; others are vLLM's own connector's, or a mistake."""

MEDIUM = "cpu"
"""Medium of the pool's memory in the events, the same as in other projects' connectors."""


@dataclasses.dataclass
class StorePlans(KVConnectorMetadata):  # type: ignore[misc]
    """The scheduler's message to every rank, each step."""

    loads: list[LoadPlan]
    saves: list[SavePlan]
    is_idle: bool
    """Whether the step computes nothing."""
    step: int = 0
    """Number of the step, for the ranks to answer, if some connector loads blocks in it; otherwise 0."""


@dataclasses.dataclass
class ShardDigests(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """Digests of the shards of a rank."""

    digests: list[str]


@dataclasses.dataclass
class RankReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """The ranks' message to the scheduler, each step."""

    saved: dict[int, int]
    """By save, the number of ranks that are done with it."""
    loaded: dict[str, tuple[int, int]]
    """By request: (ranks whose load has ended, those on which it failed)."""
    stored: dict[tuple[int, BlockName], int]
    """By save and block, the number of ranks that have stored their shards of it."""
    digests: set[str]
    """Digests of the shards of ranks that report for the first time."""
    num_new_ranks: int
    step: int = 0
    """See ``StorePlans``."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> RankReport:
        assert isinstance(other, RankReport)
        for number, count in other.saved.items():
            self.saved[number] = self.saved.get(number, 0) + count
        for block, count in other.stored.items():
            self.stored[block] = self.stored.get(block, 0) + count
        for request_id, (ranks, failures) in other.loaded.items():
            mine = self.loaded.get(request_id, (0, 0))
            self.loaded[request_id] = (mine[0] + ranks, mine[1] + failures)
        self.digests |= other.digests
        self.num_new_ranks += other.num_new_ranks
        self.step = max(self.step, other.step)
        return self


class MooncakeStoreConnector(CountedConnector, KVConnectorBase_V1):  # type: ignore[misc]
    """The pool as vLLM's second-level prefix cache."""

    METRICS = StoreMetrics

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        prepare(vllm_config, kv_cache_config, KNOWN)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        session = PoolSession(PoolSettings.read(extra, os.environ))
        self._scheduler: StoreSchedulerSide | None = None
        self._worker: StoreWorkerSide | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = StoreSchedulerSide(vllm_config, kv_cache_config, session)
        else:
            self._worker = StoreWorkerSide(vllm_config, kv_cache_config, session)

    @property
    def requires_kv_delivery(self) -> bool:
        """False, because a block that was not saved is a miss."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return True

    def shutdown(self) -> None:
        side = self._scheduler or self._worker
        if side is not None:
            side.close()

    # In the scheduler's process

    @property
    def _s(self) -> StoreSchedulerSide:
        assert self._scheduler is not None
        return self._scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._s.pool = gpu_block_pool

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        found = [one for one in metadata.values() if isinstance(one, ShardDigests)]
        if len(found) == len(metadata):  # under MultiConnector it may be another's; reports follow
            self._s.know({digest for one in found for digest in one.digests}, len(found))

    def on_new_request(self, request: Any) -> None:
        self._s.arrived(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._s.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._s.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return self._s.plans(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, RankReport):
            self._s.reported(report)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._s.finished(request, block_ids)
        return False, None

    def take_events(self) -> Iterable[Any]:
        return self._s.take_events()

    def has_pending_push_work(self) -> bool:
        return self._s.planner.is_holding

    def has_pending_block_frees(self) -> bool:
        return self._s.will_free_blocks

    def reset_cache(self) -> bool:
        return self._s.forget()

    # In a rank's process

    @property
    def _w(self) -> StoreWorkerSide:
        assert self._worker is not None
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._w.register(kv_caches)

    def get_handshake_metadata(self) -> ShardDigests | None:
        return ShardDigests(self._w.digests)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StorePlans)
        self._w.transfer.begin_step(connector_metadata.saves)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        plans = self._get_connector_metadata()
        assert isinstance(plans, StorePlans)
        self._w.step = plans.step
        self._w.transfer.load(plans.loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        layer = self._w.layers.get(layer_name)
        if layer is not None:
            self._w.transfer.wait_layer(layer)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        layer = self._w.layers.get(layer_name)
        if layer is not None and self._w.is_layerwise:
            self._w.transfer.layer_computed(layer)

    def wait_for_save(self) -> None:
        self._w.transfer.end_step()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        plans = self._get_connector_metadata()
        assert isinstance(plans, StorePlans)
        return None, self._w.collect(WAIT_S if plans.is_idle else 0.0)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._w.moved.bad_blocks

    def build_connector_worker_meta(self) -> RankReport | None:
        return self._w.report()

    # In both

    def get_kv_connector_stats(self) -> ConnectorStats | None:
        side = self._scheduler or self._worker
        assert side is not None
        stats, side.stats = side.stats, ConnectorStats()
        return None if stats.is_empty() else stats


class _KnownRequest:
    """A request that the scheduler has announced."""

    def __init__(self, request: Any) -> None:
        self.request = request
        self.lookup: PendingLookup | None = None
        self.first_block = 0
        """First block of the load that is allocated next."""
        self.must_compute = False
        """Whether a load of it has failed: another may fail as well, and the one after that."""


class StoreSchedulerSide:
    """The connector's part in the process of vLLM's scheduler; all calls come from its thread."""

    def __init__(self, config: Any, kv_cache_config: Any, session: PoolSession) -> None:
        transfer = config.kv_transfer_config
        extra = transfer.kv_connector_extra_config
        start_tracing(os.environ)
        self._session = session
        self._block_tokens = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        self._num_ranks = config.parallel_config.world_size
        self._is_async = bool(extra.get("load_async", True))
        if not self._is_async and config.max_concurrent_batches > 1:
            # vLLM begins the next step before it knows that a load of this one failed, and sends its token.
            log.warning("layerwise_loads_off", reason="vLLM overlaps steps (--no-async-scheduling ends that)")
            self._is_async = True
        self._finds = bool(extra.get("enable_lookup", True))
        self._adapters = Adapters(transfer.engine_id)
        saves = transfer.is_kv_producer or bool(extra.get("save_decode_cache", False))
        self.planner = Planner(self._num_ranks, saves)
        self._prefix_lookup = PrefixLookup(session)
        self.pool: Any = None
        self.stats = ConnectorStats()
        self._events = StoredEvents(self._num_ranks, self._block_tokens) if _publishes(config) else None
        self._requests: dict[str, _KnownRequest] = {}
        self._generation = b""
        self._num_known_ranks = 0
        self._digests: set[str] = set()
        self._may_wait = True
        """Whether no lookup has been waited for in this step."""

    def close(self) -> None:
        self._session.close()

    def know(self, digests: set[str], num_ranks: int) -> None:
        """Add the shards of ``num_ranks`` more ranks; once all are known, blocks can be found."""
        self._num_known_ranks += num_ranks
        self._digests |= digests
        if self._num_known_ranks >= self._num_ranks:
            self._prefix_lookup.digests = tuple(sorted(self._digests))

    def arrived(self, request: Any) -> None:
        self._requests[request.request_id] = known = _KnownRequest(request)
        self._find(known)

    def _names(self, request: Any, end: int, first: int = 0) -> list[BlockName]:
        """Names of a request's full blocks up to ``end``. An adapter counts with its weights."""
        salt = self._generation + self._adapters.digest(request.lora_request)
        hashes = request.block_hashes[first:end]
        return [hashlib.sha256(salt + one).digest() if salt else bytes(one) for one in hashes]

    def _find(self, known: _KnownRequest) -> PendingLookup:
        # At least one token is computed: its logits are needed.
        num_blocks = (known.request.num_tokens - 1) // self._block_tokens
        names = self._names(known.request, num_blocks) if self._finds else []
        known.lookup = self._prefix_lookup.find(names)
        return known.lookup

    def matched(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Number of tokens beyond the computed ones that can be loaded; None during the lookup."""
        known = self._requests.setdefault(request.request_id, _KnownRequest(request))
        if known.must_compute:
            return 0, False
        lookup = known.lookup
        if lookup is None or lookup.is_stale():
            lookup = self._find(known)
        if not lookup.wait(WAIT_S if self._may_wait else 0.0):
            self._may_wait = False  # the other waiting requests are asked for in the same step
            return None, False
        if not lookup.is_counted and lookup.num_wanted:
            lookup.is_counted = True
            self.stats.add("lookups", 1)
            self.stats.add("lookup_failures", int(lookup.has_failed))
            row = (lookup.num_blocks, lookup.num_wanted - lookup.num_blocks, lookup.seconds)
            self.stats.moved([row], "found_blocks", "missed_blocks", "lookup_seconds")
            trace_lookup(getattr(request, "trace_headers", None), lookup)
        self.planner.found(request.request_id, lookup.num_blocks)
        known.first_block = num_computed_tokens // self._block_tokens
        num_tokens = lookup.num_blocks * self._block_tokens - num_computed_tokens
        return (num_tokens, self._is_async) if num_tokens > 0 else (0, False)

    def allocated(self, request: Any, block_ids: list[int], num_tokens: int) -> None:
        """Plan the load of ``num_tokens`` into the request's new blocks."""
        known = self._requests[request.request_id]
        known.lookup = None  # if it comes again it was preempted, and blocks found may have been evicted
        if num_tokens:
            part = slice(known.first_block, known.first_block + num_tokens // self._block_tokens)
            names = self._names(request, part.stop, part.start)
            self.planner.load(request.request_id, names, block_ids[part], not self._is_async)

    def plans(self, output: Any) -> StorePlans:
        """Work of the ranks in this step."""
        self._may_wait = True
        # Loads of this connector, or of another one under MultiConnector.
        step = self.planner.load_steps.begins(output.has_sync_kv_loads)
        if self.planner.may_save:
            self._plan_saves(output)
        loads, saves = self.planner.take()
        return StorePlans(loads, saves, output.total_num_scheduled_tokens == 0, step)

    def _plan_saves(self, output: Any) -> None:
        """Plan to save the blocks that this step fills."""
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            known = self._requests.get(request_id)
            if known is None:
                continue
            request = known.request
            num_guessed = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
            num_full = (request.num_computed_tokens + num_tokens - num_guessed) // self._block_tokens
            num_full = min(num_full, len(request.block_hashes))
            num_saved = self.planner.num_saved(request_id)
            if num_full <= num_saved:
                continue
            (block_ids,) = output.kv_connector_block_state.get_block_ids(request_id)
            plan = self.planner.computes(request_id, self._names(request, num_full, num_saved), block_ids)
            if plan is not None:
                self._hold(plan.block_ids)
                if self._events is not None:
                    self._events.saves(plan, request)

    def reported(self, report: RankReport) -> None:
        self.know(report.digests, report.num_new_ranks)
        for request_id, (_, num_failures) in report.loaded.items():
            if num_failures and request_id in self._requests:
                self._requests[request_id].must_compute = True
        if report.step:
            self.planner.load_steps.answered(report.step)
        released = self.planner.reported(report.saved, report.loaded)
        self.pool.free_blocks(self.pool.blocks[block_id] for block_id in reversed(released))
        if self._events is not None:
            self._events.stored(report.stored, report.saved)

    def finished(self, request: Any, block_ids: list[int]) -> None:
        self._requests.pop(request.request_id, None)
        num_full = (request.num_computed_tokens - request.num_in_flight_tokens) // self._block_tokens
        names = self._names(request, num_full) if self.planner.is_unconfirmed(request.request_id) else []
        self._hold(self.planner.finishes(request.request_id, names, block_ids, num_full))

    @property
    def will_free_blocks(self) -> bool:
        """Whether the end of a save frees a block that no request uses; vLLM preempts nothing until then."""
        held = self.planner.held_blocks
        return any(self.pool.blocks[block_id].ref_cnt == times for block_id, times in held.items())

    def _hold(self, block_ids: Sequence[int]) -> None:
        if block_ids:
            self.pool.touch([self.pool.blocks[block_id] for block_id in block_ids])

    def take_events(self) -> list[Any]:
        return [] if self._events is None else self._events.take()

    def forget(self) -> bool:
        """Separate this engine's later blocks from all others, because vLLM resets its caches.

        Its weights may have changed: this engine no longer finds blocks saved before, and others do not find
        those that it saves from now on.
        """
        self._generation = os.urandom(16)
        for known in self._requests.values():
            known.lookup = None
        return True


def _publishes(config: Any) -> bool:
    events = config.kv_events_config
    return bool(events and events.enable_kv_cache_events)


class StoreWorkerSide:
    """The connector's part in a rank's process."""

    def __init__(self, config: Any, kv_cache_config: Any, session: PoolSession) -> None:
        self._config = config
        self._cache = kv_cache_config
        self._session = session
        self._transfer: RankTransfer | None = None
        self._has_introduced = False
        self.is_layerwise = not config.parallel_config.enable_dbo
        """False with two batches in turns: then a layer is not computed yet at the first call for it."""
        self.layers: dict[str, int] = {}
        self.digests: list[str] = []
        self.moved = TransferReport()
        self.step = 0
        """The number to answer, 0 if there is none; see ``StorePlans``."""
        self.stats = ConnectorStats()

    @property
    def transfer(self) -> RankTransfer:
        assert self._transfer is not None, "vLLM registers its KV caches first"
        return self._transfer

    def register(self, kv_caches: dict[str, Any]) -> None:
        """Register the rank's KV memory; a device's is reached through a staging area."""
        extra = self._config.kv_transfer_config.kv_connector_extra_config
        found = registered_memory(self._config, self._cache, kv_caches, extra.get("store_tp_size"))
        shards, memory = found.shards, found.host_memory(staging_bytes_of(extra))
        self.layers = {name: layer for layer, name in enumerate(kv_caches)}
        self.digests = shards.digests
        self._transfer = RankTransfer(self._session, shards, memory)
        self._session.mount_segment()
        where = "main memory" if found.device is None else str(found.tensors[0].device)
        log.info("kv_registered", num_layers=len(kv_caches), shards=",".join(self.digests), where=where)

    def collect(self, timeout_s: float) -> set[str]:
        """Requests whose asynchronous load has ended."""
        self.moved = moved = self.transfer.collect(timeout_s)
        self.stats.moved(moved.loads, "loaded_blocks", "failed_blocks", "load_seconds")
        self.stats.moved(moved.saves, "saved_blocks", "unsaved_blocks", "save_seconds")
        self.stats.add("memory_overdue_seconds", take_overdue_s())
        return {one.request_id for one in moved.loaded if not one.is_layerwise}

    def report(self) -> RankReport | None:
        moved = self.moved
        step, self.step = self.step, 0
        if self._has_introduced and not (moved.saved or moved.loaded or step):
            return None
        digests = set() if self._has_introduced else set(self.digests)
        num_new_ranks, self._has_introduced = int(not self._has_introduced), True
        return RankReport(
            dict.fromkeys(moved.saved, 1),
            {one.request_id: (1, int(not one.is_complete)) for one in moved.loaded},
            dict.fromkeys(moved.stored, 1),
            digests,
            num_new_ranks,
            step,
        )

    def close(self) -> None:
        if self._transfer is not None:
            self._transfer.close()
            self._transfer = None
        self._session.close()


@dataclasses.dataclass
class _PendingEvent:
    """The event of a block that is being saved."""

    event: Any
    missing: dict[int, int]
    """By save of the block, the number of ranks that have not stored their shards of it."""


class StoredEvents:
    """Blocks that are being saved, until their events can be published or they are known not to be stored.

    A block that several requests compute has several saves. It can be found once all ranks have stored it in
    one of them; the ranks of different saves are not added up, because one rank may have failed in each.
    """

    def __init__(self, num_ranks: int, block_tokens: int) -> None:
        self._num_ranks = num_ranks
        self._block_tokens = block_tokens
        self._pending: dict[BlockName, _PendingEvent] = {}
        self._names: dict[int, tuple[tuple[BlockName, ...], int]] = {}
        """By save: its blocks, and the number of ranks that are not done with it."""
        self._events: list[Any] = []

    def saves(self, plan: SavePlan, request: Any) -> None:
        """Record that blocks of the request are being saved."""
        self._names[plan.number] = (plan.names, self._num_ranks)
        for index, name in enumerate(plan.names, plan.first_block):
            if name not in self._pending:
                self._pending[name] = _PendingEvent(self._event(request, index), {})
            self._pending[name].missing[plan.number] = self._num_ranks

    def _event(self, request: Any, index: int) -> Any:
        """The event of the request's block ``index``."""
        hashes, adapter, tokens = request.block_hashes, request.lora_request, self._block_tokens
        return BlockStored(
            block_hashes=[maybe_convert_block_hash(hashes[index])],
            parent_block_hash=maybe_convert_block_hash(hashes[index - 1]) if index else None,
            token_ids=list(request.all_token_ids[index * tokens : (index + 1) * tokens]),
            block_size=tokens,
            lora_id=adapter.adapter_id if adapter else None,
            medium=MEDIUM,
            lora_name=adapter.lora_name if adapter else None,
            group_idx=0,
        )

    def stored(self, stored: Mapping[tuple[int, BlockName], int], saved: Mapping[int, int]) -> None:
        """Record the numbers of ranks that have stored blocks and that are done with saves."""
        for (number, name), num_ranks in stored.items():
            pending = self._pending.get(name)
            if pending is None or number not in pending.missing:
                continue  # published after another save
            pending.missing[number] -= num_ranks
            if not pending.missing[number]:
                self._events.append(self._pending.pop(name).event)
        for number, num_ranks in saved.items():
            if number in self._names:
                names, missing = self._names[number]
                self._names[number] = (names, missing - num_ranks)
                if missing == num_ranks:
                    del self._names[number]
                    for name in names:
                        self._failed(number, name)

    def _failed(self, number: int, name: BlockName) -> None:
        """Record that the block will not be stored by this save, unless it has been."""
        pending = self._pending.get(name)
        if pending is not None:
            pending.missing.pop(number, None)
            if not pending.missing:
                del self._pending[name]

    def take(self) -> list[Any]:
        events, self._events = self._events, []
        return events

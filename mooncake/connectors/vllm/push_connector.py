# SPDX-License-Identifier: Apache-2.0
"""vLLM's ``KVConnectorBase_V1`` between two engines: one writes a prompt's KV into the other's blocks.

A thin shell around ``peer_push``. ``kv_transfer_params`` give a request's role (the gateway's ``push``)::

    to prefill   {"do_remote_decode": true, "transfer_id": ID}                      max_tokens 1
    to decode    {"do_remote_prefill": true, "transfer_id": ID}                     before, after or meanwhile
                 optionally "remote_host", "remote_port": this prefill's HTTP server or listener, one of
                 those in ``prefill_addr``; else the first of them

A request to prefill without ``transfer_id`` gets one, and prefill's answer has the parameters for decode, as
proxies that call one engine after the other expect (the gateway's ``sequential``).

A listener's port is that of the engine's HTTP server + ``listener_offset``. Rank r of an engine listens at
that port + r and serves rank r of the other. Decode computes blocks that fail.
"""

from __future__ import annotations

import dataclasses
import hashlib
import sys
import threading
import uuid
from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.platforms import current_platform

from mooncake import clock
from mooncake.connectors.cache_identity import Adapters
from mooncake.connectors.device_streams import KvDevice
from mooncake.connectors.memory import DeviceEvent
from mooncake.connectors.peer_push import (
    BlockOffer,
    BlockRequest,
    PushAddresses,
    PushOutcome,
    Receiver,
    Sender,
)
from mooncake.connectors.planner import LoadSteps
from mooncake.connectors.session import TransferThread, transports_of
from mooncake.connectors.vllm.command_line import http_port
from mooncake.connectors.vllm.kv_memory import prepare, registered_memory
from mooncake.connectors.vllm.stats import ConnectorStats, CountedConnector, PushMetrics
from mooncake.errors import InvalidArgument, MooncakeError
from mooncake.log import get_logger
from mooncake.rpc.client import split_address
from mooncake.security import warn_if_open
from mooncake.transfer.host import with_port

log = get_logger(__name__)

WAIT_S = 0.002
"""Time that a step with nothing to compute waits for blocks to arrive."""

TIMEOUT_S = 120.0

SOON_S = 2.0
"""Time within which decode usually takes an offer."""

SECONDS = {"pushed": "push_seconds", "received": "receive_seconds"}
"""Name of each outcome's time."""

KNOWN = {
    "decode_addr",
    "listen_addr",
    "listener_offset",
    "local_hostname",
    "prefill_addr",
    "protocol",
    "sampled_weights",
    "timeout_s",
    "weights_digest",
}
"""Options of ``kv_connector_extra_config``."""


@dataclasses.dataclass
class PushPlans(KVConnectorMetadata):  # type: ignore[misc]
    """The scheduler's message to every rank, each step."""

    offers: list[BlockOffer]
    """Offers of blocks that are valid at the end of this step."""
    confirmed: list[BlockOffer]
    """Offers of blocks that were computed in earlier steps."""
    dropped: list[tuple[str, str]]
    wanted: dict[str, BlockRequest]
    """Wanted blocks by request."""
    is_idle: bool
    step: int = 0
    """Number of the step, for the ranks to answer, if some connector loads blocks in it; otherwise 0."""


@dataclasses.dataclass
class EndedOffers(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """By offer, the number of ranks that no longer need its blocks."""

    offers: dict[str, int]
    step: int = 0
    """See ``PushPlans``."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> EndedOffers:
        assert isinstance(other, EndedOffers)
        for transfer_id, count in other.offers.items():
            self.offers[transfer_id] = self.offers.get(transfer_id, 0) + count
        return self


def check_parallelism(config: Any) -> None:
    """Check that the engine is parallel in no other way than by tensors.

    Raises:
        InvalidArgument: it has stages of a pipeline, or prefill has several data-parallel ranks behind one
            HTTP server. They would listen at the same port, and decode could not name the one it means.
    """
    parallel = config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        raise InvalidArgument("pipeline_parallel_size", "more than 1", "1 with this connector")
    # vLLM makes each rank of a dense model an engine of size 1; an index above 0 means that there are others.
    is_one_of_several = parallel.data_parallel_size > 1 or parallel.data_parallel_index > 0
    if (
        config.kv_transfer_config.is_kv_producer
        and is_one_of_several
        and not parallel.data_parallel_external_lb
    ):
        allowed = "1 on prefill with this connector; start servers of their own, or use --data-parallel-rank"
        raise InvalidArgument("data_parallel_size", "more than 1", allowed)


class MooncakeConnector(CountedConnector, KVConnectorBase_V1):  # type: ignore[misc]
    """Moves a prompt's KV from the engine that prefills to the one that decodes."""

    METRICS = PushMetrics

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        prepare(vllm_config, kv_cache_config, KNOWN)
        check_parallelism(vllm_config)
        self._scheduler: PushSchedulerSide | None = None
        self._worker: PushWorkerSide | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = PushSchedulerSide(vllm_config, kv_cache_config)
        else:
            self._worker = PushWorkerSide(vllm_config, kv_cache_config)

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()

    # In the scheduler's process

    @property
    def _s(self) -> PushSchedulerSide:
        assert self._scheduler is not None
        return self._scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._s.pool = gpu_block_pool

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._s.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._s.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return self._s.handovers(scheduler_output, clock.monotonic())

    def update_connector_output(self, connector_output: Any) -> None:
        ended = connector_output.kv_connector_worker_meta
        if isinstance(ended, EndedOffers):
            self._s.ended(ended.offers)
            if ended.step:
                self._s.loaded(ended.step, connector_output.invalid_block_ids)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return False, self._s.finished(request)

    def has_pending_push_work(self) -> bool:
        return self._s.is_busy

    def has_pending_block_frees(self) -> bool:
        return self._s.will_free_blocks(clock.monotonic())

    # In a rank's process

    @property
    def _w(self) -> PushWorkerSide:
        assert self._worker is not None
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._w.register(kv_caches)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._w.begin_step()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        handovers = self._get_connector_metadata()
        assert isinstance(handovers, PushPlans)
        self._w.begin(handovers)

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass  # loads are asynchronous: their requests are not in this step

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass  # a prompt is offered once all of it is computed

    def wait_for_save(self) -> None:
        handovers = self._get_connector_metadata()
        assert isinstance(handovers, PushPlans)
        self._w.offer(handovers.offers)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        handovers = self._get_connector_metadata()
        assert isinstance(handovers, PushPlans)
        return None, self._w.collect(WAIT_S if handovers.is_idle else 0.0)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._w.bad_blocks

    def build_connector_worker_meta(self) -> EndedOffers | None:
        return self._w.take_ended()

    # In both

    def get_kv_connector_stats(self) -> ConnectorStats | None:
        return None if self._worker is None else self._worker.take_stats()


@dataclasses.dataclass
class _PendingOffer:
    """A request whose prompt is to be offered."""

    request: Any
    transfer_id: str
    is_offered: bool = False
    is_named_here: bool = False
    """Whether its ``transfer_id`` is this engine's: prefill's answer has the parameters for decode."""


@dataclasses.dataclass
class _HeldBlocks:
    """Blocks of an offer, which are not used again until no rank needs them."""

    block_ids: list[int]
    num_ranks: int
    """Ranks that still need them."""
    since: float
    """``clock.monotonic`` of the offer."""


@dataclasses.dataclass
class _UnsureOffer:
    """An offer of blocks that may rest on a load which is not known to have succeeded."""

    offer: BlockOffer
    request_id: str
    step: int
    """The last step whose loads decide it."""


class PushSchedulerSide:
    """The connector's part in the process of vLLM's scheduler; all calls come from its thread."""

    def __init__(self, config: Any, kv_cache_config: Any) -> None:
        transfer = config.kv_transfer_config
        self._block_tokens = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        self._num_ranks = config.parallel_config.world_size
        self._sends, self._receives = transfer.is_kv_producer, transfer.is_kv_consumer
        self._addresses = PushAddresses.read(transfer.kv_connector_extra_config, http_port(sys.argv))
        self._listeners = self._addresses.listeners
        self._adapters = Adapters(transfer.engine_id)
        self._sendings: dict[str, _PendingOffer] = {}
        self._held: dict[str, _HeldBlocks] = {}
        """Blocks by offer."""
        self._load_steps = LoadSteps()
        self._unsure: list[_UnsureOffer] = []
        self._confirmed: list[BlockOffer] = []
        self._wanted: dict[str, BlockRequest] = {}
        self._dropped: list[tuple[str, str]] = []
        self._first_blocks: dict[str, int] = {}
        self.pool: Any = None

    @property
    def is_busy(self) -> bool:
        return bool(self._held or self._dropped)

    def will_free_blocks(self, now: float) -> bool:
        """Whether an offer's end is about to free a block that no request uses: vLLM preempts nothing then.

        An offer that decode has not taken for ``SOON_S`` may stay until its time is over.
        """
        blocks = self.pool.blocks if self._held else ()
        return any(
            blocks[block_id].ref_cnt == 1
            for held in self._held.values()
            if now < held.since + SOON_S
            for block_id in held.block_ids
        )

    def _digest(self, request: Any) -> bytes:
        """Digest of the prompt's tokens, with all else that decides their KV."""
        num_full = request.num_prompt_tokens // self._block_tokens
        rest = request.prompt_token_ids[num_full * self._block_tokens :]
        more = [feature.identifier for feature in request.mm_features]
        digest = hashlib.sha256(self._adapters.digest(request.lora_request))
        for block_hash in request.block_hashes[:num_full][-1:]:
            digest.update(bytes(block_hash))
        digest.update(repr((request.num_prompt_tokens, list(rest), more, request.cache_salt)).encode())
        return digest.digest()

    def matched(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Tokens to receive: all of the prompt beyond those that are computed."""
        params = request.kv_transfer_params or {}
        if not (self._receives and params.get("do_remote_prefill") and request.prompt_token_ids):
            return 0, False
        if not params.get("transfer_id"):
            log.warning("transfer_without_id", request=request.request_id)
            return 0, False
        if self._listeners.chosen(params) is None:
            named = f"{params.get('remote_host', '')}:{params.get('remote_port', '')}".strip(":")
            reason = f"{named} is not in this engine's prefill_addr" if named else "prefill_addr is empty"
            log.warning("transfer_refused", request=request.request_id, reason=reason)
            return 0, False  # the prompt is computed here
        num_tokens = request.num_prompt_tokens - num_computed_tokens
        self._first_blocks[request.request_id] = num_computed_tokens // self._block_tokens
        return (num_tokens, True) if num_tokens > 0 else (0, False)

    def allocated(self, request: Any, block_ids: list[int], num_tokens: int) -> None:
        params = request.kv_transfer_params or {}
        transfer_id = params.get("transfer_id")
        if params.get("do_remote_decode") and self._sends and request.prompt_token_ids:
            pending = _PendingOffer(
                request, str(transfer_id or uuid.uuid4().hex), is_named_here=not transfer_id
            )
            self._sendings.setdefault(request.request_id, pending)
        first = self._first_blocks.pop(request.request_id, 0)
        if not num_tokens or not params.get("do_remote_prefill"):
            return
        params["do_remote_prefill"] = False  # if it is preempted, it is computed here
        num_blocks = -(-request.num_prompt_tokens // self._block_tokens)
        address = self._listeners.chosen(params)
        assert address is not None, "matched() has refused it"
        self._wanted[request.request_id] = BlockRequest(
            str(transfer_id), self._digest(request), first, list(block_ids[first:num_blocks]), address
        )

    def handovers(self, output: Any, now: float) -> PushPlans:
        """Work of the ranks in this step."""
        # Loads of another connector, under MultiConnector.
        step = self._load_steps.begins(output.has_sync_kv_loads)
        offers = []
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            sending = self._sendings.get(request_id)
            if sending is None or sending.is_offered or sending.transfer_id in self._held:
                continue
            request = sending.request
            if request.num_computed_tokens + num_tokens < request.num_prompt_tokens:
                continue
            (block_ids,) = output.kv_connector_block_state.get_block_ids(request_id)
            block_ids = list(block_ids[: -(-request.num_prompt_tokens // self._block_tokens)])
            self.pool.touch([self.pool.blocks[block_id] for block_id in block_ids])
            self._held[sending.transfer_id] = _HeldBlocks(block_ids, self._num_ranks, now)
            sending.is_offered = True
            offer = BlockOffer(sending.transfer_id, self._digest(request), block_ids)
            if self._load_steps.unanswered:
                self._unsure.append(_UnsureOffer(offer, request_id, self._load_steps.unanswered))
            else:
                offers.append(offer)
        confirmed, self._confirmed = self._confirmed, []
        wanted, self._wanted = self._wanted, {}
        dropped, self._dropped = self._dropped, []
        is_idle = output.total_num_scheduled_tokens == 0
        return PushPlans(offers, confirmed, dropped, wanted, is_idle, step)

    def loaded(self, step: int, bad_blocks: set[int]) -> None:
        """The loads of ``step`` have ended, all but those of ``bad_blocks`` with success.

        Requests with a bad block are computed again, and offered then.
        """
        self._load_steps.answered(step)
        unsure, self._unsure = self._unsure, []
        for one in unsure:
            transfer_id = one.offer.transfer_id
            if not bad_blocks.isdisjoint(one.offer.block_ids):
                self._free(self._held.pop(transfer_id).block_ids)
                if one.request_id in self._sendings:
                    self._sendings[one.request_id].is_offered = False
                else:
                    self._dropped.append((transfer_id, "a load of its blocks has failed"))
            elif one.step <= step:
                self._confirmed.append(one.offer)
            else:
                self._unsure.append(one)

    def ended(self, offers: dict[str, int]) -> None:
        for transfer_id, count in offers.items():
            held = self._held[transfer_id]
            held.num_ranks -= count
            if held.num_ranks <= 0:
                self._free(self._held.pop(transfer_id).block_ids)

    def _free(self, block_ids: list[int]) -> None:
        self.pool.free_blocks(self.pool.blocks[block_id] for block_id in reversed(block_ids))

    def finished(self, request: Any) -> dict[str, Any] | None:
        """The request has ended; parameters for decode, if they are prefill's to name."""
        self._first_blocks.pop(request.request_id, None)
        sending = self._sendings.pop(request.request_id, None)
        if sending is None:
            return None
        if not sending.is_offered:
            self._dropped.append((sending.transfer_id, "prefill's request ended before it was computed"))
            return None
        if not sending.is_named_here:
            return None
        return {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "transfer_id": sending.transfer_id,
            "remote_host": self._addresses.listener_host,
            "remote_port": self._addresses.listen_port,
        }


class PushWorkerSide:
    """The connector's part in a rank's process."""

    def __init__(self, config: Any, kv_cache_config: Any) -> None:
        transfer = config.kv_transfer_config
        self._config, self._cache = config, kv_cache_config
        self._extra = extra = transfer.kv_connector_extra_config
        self._sends, self._receives = transfer.is_kv_producer, transfer.is_kv_consumer
        self._addresses = PushAddresses.read(extra, http_port(sys.argv))
        transports = transports_of(str(extra.get("protocol", "")))
        if transports and not current_platform.is_cpu():
            transports += ("cuda",)  # by which a device's memory is registered, whatever moves it
        self._thread = TransferThread(self._addresses.transfer_host, transports)
        self._sender: Sender | None = None
        self._receiver: Receiver | None = None
        self._rank = 0
        self._device: KvDevice | None = None
        self._before_step: DeviceEvent | None = None
        """The end of the work that the engine had begun before this step."""
        self._changed = threading.Condition()
        self._received: set[str] = set()
        self._bad_blocks: set[int] = set()
        self.bad_blocks: set[int] = set()
        """Blocks that failed, of the requests that ``collect`` returned last."""
        self._ended: dict[str, int] = {}
        self._step = 0
        """The number that this step is answered with."""
        self._stats = ConnectorStats()

    def register(self, kv_caches: dict[str, Any]) -> None:
        """Register the rank's KV memory; blocks are moved between it and the other engine's."""
        found = registered_memory(self._config, self._cache, kv_caches)
        shards, memory, self._device = found.shards, found.placed, found.device
        (digest,) = shards.digests
        self._rank = get_tensor_model_parallel_rank()
        timeout_s = float(self._extra.get("timeout_s", TIMEOUT_S))
        transfer = self._thread.transfer
        listens_at = ""
        if self._receives:
            self._receiver = Receiver(transfer, shards.layout, digest, memory, timeout_s, self._count)
        else:
            transfer.register_all(memory.buffers)
        if self._sends:
            accepts = self._addresses.accepts
            self._sender = Sender(
                transfer, shards.layout, digest, memory, timeout_s, self._has_ended, self._count, accepts
            )
            host, port = self._addresses.listen_host, self._addresses.listen_port + self._rank
            warn_if_open("MooncakeConnector", host)
            self._thread.wait(self._sender.start(host, port))
            listens_at = with_port(host, self._sender.port)
        log.info("kv_registered", num_layers=len(kv_caches), layout=digest, listens_at=listens_at)

    def begin_step(self) -> None:
        """Begin a step, when the engine has begun whatever precedes it, such as clearing new blocks."""
        self._before_step = self._computed()

    def _computed(self) -> DeviceEvent | None:
        return None if self._device is None else self._device.computed()

    def begin(self, handovers: PushPlans) -> None:
        self._step = handovers.step
        self._offer(handovers.confirmed, self._before_step)
        for transfer_id, reason in handovers.dropped:
            if self._sender is not None:
                self._thread.loop.call_soon_threadsafe(self._sender.drop, transfer_id, reason)
        for request_id, wanted in handovers.wanted.items():
            self._thread.start(self._receive(request_id, wanted, self._before_step))

    async def _receive(self, request_id: str, wanted: BlockRequest, after: DeviceEvent | None) -> None:
        assert self._receiver is not None
        try:
            host, port = split_address(wanted.address)
            own = dataclasses.replace(wanted, address=f"{host}:{port + self._rank}")
            reason = await self._receiver.receive(own, after)
        except MooncakeError as error:  # a request can name any address
            reason = str(error)
            self._count(PushOutcome("recomputed", len(wanted.block_ids)))
            log.warning("transfer_missed", transfer=wanted.transfer_id, reason=reason)
        except Exception as error:  # a bug of ours, before anything was begun
            reason = type(error).__name__
            self._count(PushOutcome("recomputed", len(wanted.block_ids)))
            log.exception("transfer_failed", transfer=wanted.transfer_id)
        with self._changed:
            self._received.add(request_id)
            if reason:
                self._bad_blocks.update(wanted.block_ids)
            self._changed.notify_all()

    def offer(self, offers: list[BlockOffer]) -> None:
        self._offer(offers, self._computed() if offers else None)

    def _offer(self, offers: list[BlockOffer], computed: DeviceEvent | None) -> None:
        for offer in offers:
            assert self._sender is not None
            self._thread.loop.call_soon_threadsafe(self._sender.offer, offer, computed)

    def _has_ended(self, transfer_id: str) -> None:
        with self._changed:
            self._ended[transfer_id] = 1
            self._changed.notify_all()

    def _count(self, push: PushOutcome) -> None:
        with self._changed:
            self._stats.add(f"{push.outcome}_blocks", push.num_blocks)
            self._stats.add(f"{push.outcome}_bytes", push.num_bytes)
            if push.seconds is not None:
                self._stats.observe(SECONDS[push.outcome], push.seconds)

    def take_stats(self) -> ConnectorStats | None:
        with self._changed:
            stats, self._stats = self._stats, ConnectorStats()
        return None if stats.is_empty() else stats

    def collect(self, timeout_s: float) -> set[str]:
        """Requests whose blocks have arrived or failed."""
        with self._changed:
            if not (self._received or self._ended):
                self._changed.wait_for(lambda: self._received or self._ended, timeout_s)
            received, self._received = self._received, set()
            self.bad_blocks, self._bad_blocks = self._bad_blocks, set()
        return received

    def take_ended(self) -> EndedOffers | None:
        with self._changed:
            ended, self._ended = self._ended, {}
        step, self._step = self._step, 0
        return EndedOffers(ended, step) if ended or step else None

    def close(self) -> None:
        for end in (self._sender, self._receiver):
            if end is not None and not self._thread.loop.is_closed():
                self._thread.wait(end.close())
        self._sender = self._receiver = None
        self._thread.close()

# SPDX-License-Identifier: Apache-2.0
"""vLLM's ``ECConnectorBase`` over the pool: an image that one engine has encoded, no engine encodes again.

A thin shell around ``encoder_cache`` (which items), ``encoder_transfer`` (how) and ``cache_identity`` (under
which keys). The scheduler's side looks items up and loads their outputs before it schedules them; the ranks
get them with the step, because a rank that finds nothing has no way back to its encoder. Rank 0 saves what
was computed::

    scheduler   look up ─▶ staged ─▶ has ─▶ allocated ─▶ metadata(loads, save keys)      counts ◀─┐
    ranks                                                └▶ into vLLM's cache │ encoded ─▶ save ──┘

``ec_role``: an ``ec_producer`` encodes and saves, and skips what the store has; an ``ec_consumer`` loads and
does not save; ``ec_both`` does both. Items that are sent without their content can't be named, so they fail.
"""

from __future__ import annotations

import dataclasses
import os
import weakref
from collections.abc import Iterable
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import torch
from vllm import __version__ as vllm_version
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
    ECConnectorWorkerMetadata,
)
from vllm.distributed.ec_transfer.ec_connector.utils import PlaceholderMetadataResolver
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

from mooncake import clock
from mooncake.connectors.cache_identity import Adapters, encoder_facts, model_weights
from mooncake.connectors.encoder_cache import EncoderCache
from mooncake.connectors.encoder_output import (
    ContentPart,
    EncoderIdentity,
    EncoderOutput,
    Expectation,
    content_digest,
)
from mooncake.connectors.encoder_transfer import EncoderLookup, EncoderSave, EncoderTransfer
from mooncake.connectors.session import PoolSession, PoolSettings, warn_of_unknown_options
from mooncake.connectors.store_link import LinkSettings
from mooncake.connectors.vllm.stats import EncoderMetrics, EncoderStats
from mooncake.errors import InvalidArgument
from mooncake.log import get_logger, setup_library_logging
from mooncake.types import ObjectKey

log = get_logger(__name__)

WAIT_S = 0.002
"""Time that a step waits for a lookup, once, for however many requests."""

LATENESS_S = 1.0
"""Time beyond the timeouts of a lookup in which it may report its end, before the item is encoded."""

KNOWN = {
    "load_timeout_s",
    "local_hostname",
    "lookup_timeout_s",
    "max_staged_bytes",
    "mooncake_store_addr",
    "protocol",
    "sampled_weights",
    "tenant_id",
    "weights_digest",
}
"""Options of ``ec_connector_extra_config``."""

MAX_STAGED_BYTES = 1 << 30
"""Default limit of the outputs that wait in the scheduler's process to be used."""

HANDLE_FIELDS = {"address", "monotonic_id", "signature"}
"""Arguments of an item that vLLM's processor cache of type ``shm`` keeps; what they name changes."""

OUTCOMES = {"hit": "hits", "miss": "misses", "refused": "refused", "failed": "failures", "late": "failures"}
"""Name in the statistics of each outcome of a lookup."""


@dataclasses.dataclass
class EncoderPlans(ECConnectorMetadata):  # type: ignore[misc]
    """The scheduler's message to every rank, each step."""

    loads: dict[str, EncoderOutput]
    """Outputs by the name that vLLM gives an item."""
    save_keys: dict[str, ObjectKey]
    """By the name of an item that is encoded in this step, the store's key for its output."""


@dataclasses.dataclass
class EncoderReport(ECConnectorWorkerMetadata):  # type: ignore[misc]
    """The ranks' message to the scheduler: counts and times of their saves."""

    stats: EncoderStats

    def aggregate(self, other: ECConnectorWorkerMetadata) -> EncoderReport:
        assert isinstance(other, EncoderReport)
        self.stats.aggregate(other.stats)
        return self


class MooncakeECConnector(ECConnectorBase):  # type: ignore[misc]
    """The pool as a cache of encoder outputs that engines share."""

    def __init__(self, vllm_config: Any, role: ECConnectorRole) -> None:
        super().__init__(vllm_config, role)
        setup_library_logging("vllm")
        if vllm_config.model_config.is_encoder_decoder:
            raise InvalidArgument("model", vllm_config.model_config.model, "one that is not encoder-decoder")
        extra = vllm_config.ec_transfer_config.ec_connector_extra_config
        warn_of_unknown_options(extra, KNOWN)
        settings = _link_settings(extra)
        session = PoolSession(PoolSettings.read(extra, os.environ), settings.load_timeout_s)
        self._scheduler: EncoderSchedulerSide | None = None
        self._worker: EncoderWorkerSide | None = None
        if role == ECConnectorRole.SCHEDULER:
            self._scheduler = EncoderSchedulerSide(vllm_config, session, settings)
        else:
            self._worker = EncoderWorkerSide(session, settings)

    def shutdown(self) -> None:
        side = self._scheduler or self._worker
        if side is not None:
            side.close()

    # In the process of the scheduler

    @property
    def _s(self) -> EncoderSchedulerSide:
        assert self._scheduler is not None
        return self._scheduler

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        return self._s.is_ready(request, num_computed_tokens)

    def has_cache_item(self, identifier: str) -> bool:
        return self._s.cache.has(identifier)

    def take_unavailable_requests(self) -> set[str]:
        failed, self._s.failed = self._s.failed, set()
        return failed

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        self._s.allocated(request, index)

    def build_connector_meta(self, scheduler_output: Any) -> EncoderPlans:
        return self._s.plans(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        report = connector_output.ec_connector_worker_meta
        if isinstance(report, EncoderReport):
            self._s.stats.aggregate(report.stats)

    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        self._s.cache.finished(request.request_id)
        return False, None

    def get_ec_connector_stats(self) -> EncoderStats | None:
        if self._scheduler is None:
            return None  # a rank's are in its report
        stats, self._s.stats = self._s.stats, EncoderStats()
        return None if stats.is_empty() else stats

    # In a rank's process

    @property
    def _w(self) -> EncoderWorkerSide:
        assert self._worker is not None
        return self._worker

    def _plans(self) -> EncoderPlans:
        plans = self._get_connector_metadata()
        assert isinstance(plans, EncoderPlans)
        return plans

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        self._w.load(self._plans().loads, encoder_cache)

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any) -> None:
        key = self._plans().save_keys.get(mm_hash)
        if key is not None:
            self._w.save(key, encoder_cache[mm_hash])

    def build_connector_worker_meta(self) -> EncoderReport | None:
        return self._w.report()

    # In vLLM's front end

    @classmethod
    def build_ec_connector_stats(cls, data: dict[str, Any] | None = None) -> EncoderStats:
        return EncoderStats() if data is None else EncoderStats(data=data)

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> EncoderMetrics:
        return EncoderMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _link_settings(extra: dict[str, Any]) -> LinkSettings:
    """Timeouts of the store's calls. Raises InvalidArgument."""
    given: dict[str, float] = {}
    for name in ("lookup_timeout_s", "load_timeout_s"):
        if name in extra:
            value = extra[name]
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 3600:
                raise InvalidArgument(name, value, "seconds, more than 0 and less than 3600")
            given[name] = float(value)
    return dataclasses.replace(LinkSettings(lookup_timeout_s=1.0, load_timeout_s=5.0), **given)


class EncoderSchedulerSide:
    """The connector's part in the process of vLLM's scheduler; all calls come from its thread."""

    def __init__(self, config: Any, session: PoolSession, settings: LinkSettings) -> None:
        transfer = config.ec_transfer_config
        extra = transfer.ec_connector_extra_config
        staged = extra.get("max_staged_bytes", MAX_STAGED_BYTES)
        if isinstance(staged, bool) or not isinstance(staged, int) or staged < 0:
            raise InvalidArgument("max_staged_bytes", staged, "a number of bytes")
        self._config = config
        self._loads = bool(transfer.is_ec_consumer)
        self._saves = bool(transfer.is_ec_producer)
        self._session = session
        self._transfer = EncoderTransfer(session, settings)
        timeout_s = settings.lookup_timeout_s + settings.load_timeout_s + LATENESS_S
        self.cache = EncoderCache(timeout_s, staged)
        self.stats = EncoderStats()
        self.failed: set[str] = set()
        """Requests that can't be computed."""
        weights = model_weights(config, extra, transfer.engine_id)
        self._facts = encoder_facts(config, vllm_version, weights)
        self._adapters = Adapters(transfer.engine_id)
        self._has_tower_adapters = bool(getattr(config.lora_config, "enable_tower_connector_lora", False))
        self._placeholders = PlaceholderMetadataResolver(config.model_config)
        self._generation = ""
        self._ended: SimpleQueue[tuple[int, EncoderLookup]] = SimpleQueue()
        self._plans = EncoderPlans({}, {})
        self._may_wait = True
        """Whether this step has not waited for a lookup yet."""
        self._knows_handles = False
        """Whether an item's handle was seen, and logged."""
        _forget_at_reset(self)
        log.info("encoder_cache_connected", role=transfer.ec_role, identity=self._identity().digest)

    def close(self) -> None:
        self._session.close()

    def forget(self) -> None:
        """Separate this engine's later outputs from all others: its encoder's weights may have changed."""
        self._generation = os.urandom(16).hex()
        self.cache.forget()
        self._plans = EncoderPlans({}, {})

    def is_ready(self, request: Any, num_computed_tokens: int) -> bool:
        """Whether the outputs that the request needs next are staged, or are known to be missing."""
        needed = [
            feature
            for feature in request.mm_features
            if feature.mm_position.offset + feature.mm_position.length > num_computed_tokens
        ]
        if any(self._lacks_content(feature) for feature in needed):
            self.failed.add(request.request_id)
            log.warning("encoder_input_missing", request=request.request_id, remedy="send the item itself")
            return False
        ambiguous = _ambiguous_names(request)
        features = {
            feature.identifier: feature
            for feature in needed
            if feature.identifier not in ambiguous and _is_encoded(feature) and self._has_content(feature)
        }
        now = clock.monotonic()
        for name, number in self.cache.wants(request.request_id, list(features), now).items():
            self._begin(number, request, features[name])
        self._collect()
        if not self.cache.is_waiting(request.request_id, now):
            return True
        if not self._may_wait:
            return False
        self._may_wait = False
        self._collect(WAIT_S)
        return not self.cache.is_waiting(request.request_id, clock.monotonic())

    def _lacks_content(self, feature: Any) -> bool:
        """Whether the item was sent by its metadata only, in the hope that a connector has its output."""
        data = feature.data
        if data is None or not len(data):
            return data is not None
        return bool(set(data) <= self._placeholders.fields_for(feature.modality))

    def _has_content(self, feature: Any) -> bool:
        """Whether the item's content is in this process, rather than a handle of it in shared memory."""
        if not set(feature.data) >= HANDLE_FIELDS:
            return True
        if not self._knows_handles:
            self._knows_handles = True
            remedy = "start vLLM with --mm-processor-cache-type lru"
            log.warning("encoder_input_in_shared_memory", remedy=remedy)
        return False

    def _begin(self, number: int, request: Any, feature: Any) -> None:
        identity = self._identity(request.lora_request, request.cache_salt)
        expected = self._expectation(feature)

        def content() -> bytes:
            return content_digest(_parts(feature))

        def done(lookup: EncoderLookup) -> None:
            self._ended.put((number, lookup))

        self._transfer.look_up(content, identity, expected, self._loads, done)

    def _identity(self, adapter: Any = None, salt: str | None = None) -> EncoderIdentity:
        digest = self._adapters.digest(adapter) if self._has_tower_adapters else b""
        return EncoderIdentity.of(
            **self._facts, adapter=digest.hex(), generation=self._generation, salt=salt or ""
        )

    def _expectation(self, feature: Any) -> Expectation:
        model, transfer = self._config.model_config, self._config.ec_transfer_config
        dtype = str(model.dtype).removeprefix("torch.")
        num_rows = feature.mm_position.get_num_embeds()
        width = transfer.mm_encoder_output_widths.get(feature.modality)
        if width is not None:
            return Expectation(dtype, num_rows, width)
        # Only producers measure it. A wider one is what an encoder of the same identity has computed.
        return Expectation(dtype, num_rows, model.get_inputs_embeds_size(), is_least=True)

    def _collect(self, wait_s: float = 0.0) -> None:
        """Record lookups that have ended; wait for one, at most ``wait_s``."""
        while True:
            try:
                number, lookup = self._ended.get(timeout=wait_s) if wait_s else self._ended.get_nowait()
            except Empty:
                return
            wait_s = 0.0
            outcome = lookup.outcome
            if outcome == "hit":
                assert lookup.key is not None
                outcome = self.cache.found(number, lookup.key, lookup.output)
            else:
                self.cache.missed(number, lookup.key, lookup.reason)
            self.stats.add(OUTCOMES[outcome], 1)
            self.stats.add("loaded_bytes", lookup.output.size_bytes if lookup.output else 0)
            self.stats.observe("lookup_seconds", lookup.seconds)

    def allocated(self, request: Any, index: int) -> None:
        """Plan what the ranks do for an item that vLLM's cache has room for, in this step."""
        name = request.mm_features[index].identifier
        plan = self.cache.take(request.request_id, name)
        # If vLLM has freed and allocated a name twice in this step, the ranks have the item of the last time.
        self._plans.loads.pop(name, None)
        self._plans.save_keys.pop(name, None)
        if plan.output is not None:
            self._plans.loads[name] = plan.output
        # Asked again, because a streaming session may have got more items since the lookup.
        if plan.save_key is not None and self._saves and name not in _ambiguous_names(request):
            self._plans.save_keys[name] = plan.save_key

    def plans(self, output: Any) -> EncoderPlans:
        """Work of the ranks in this step."""
        self.cache.evicted(output.free_encoder_mm_hashes)
        self.cache.end_step()
        self._may_wait = True
        plans, self._plans = self._plans, EncoderPlans({}, {})
        return plans


_schedulers: weakref.WeakSet[EncoderSchedulerSide] = weakref.WeakSet()


def _forget_at_reset(side: EncoderSchedulerSide) -> None:
    """Call ``side.forget`` when vLLM resets its encoder cache, as it does when weights are replaced.

    vLLM 0.32 calls no method of an EC connector then, so its cache's own method is extended.
    """
    if not _schedulers and not hasattr(EncoderCacheManager.reset, "is_ours"):
        reset = EncoderCacheManager.reset

        def reset_all(manager: Any) -> None:
            reset(manager)
            for one in list(_schedulers):
                one.forget()

        reset_all.is_ours = True  # type: ignore[attr-defined]
        EncoderCacheManager.reset = reset_all
    _schedulers.add(side)


def _is_encoded(feature: Any) -> bool:
    """Whether vLLM's encoder computes this item's output; else the output itself was sent."""
    names = [] if feature.data is None else list(feature.data)
    return bool(names) and not any(name.endswith("embeds") or name == "embedding" for name in names)


def _ambiguous_names(request: Any) -> set[str]:
    """Names that the request gives to more than one item, as a client's ``uuid`` may.

    vLLM encodes one of these items, by its place and by what is computed already, so an output under such a
    name can't be attributed to a content. Equal items that vLLM's processor cache has are one object.
    """
    first: dict[str, Any] = {}
    return {
        feature.identifier
        for feature in request.mm_features
        if first.setdefault(feature.identifier, feature.data) is not feature.data
    }


def _parts(feature: Any) -> list[ContentPart]:
    """What the encoder is given for an item. Raises TypeError for a value of an unknown type."""
    parts = [ContentPart("modality", "str", (), feature.modality.encode())]
    for name, field in feature.data.items():
        parts += _leaves(name, field.data)
    return parts


def _leaves(name: str, value: Any) -> Iterable[ContentPart]:
    if isinstance(value, torch.Tensor):
        yield ContentPart(name, str(value.dtype), tuple(value.shape), _bytes_of(value))
    elif isinstance(value, np.ndarray):
        yield ContentPart(name, str(value.dtype), value.shape, np.ascontiguousarray(value))
    elif isinstance(value, (list, tuple)):
        yield ContentPart(name, "list", (len(value),), b"")
        for index, inner in enumerate(value):
            yield from _leaves(f"{name}/{index}", inner)
    elif value is None or isinstance(value, (bool, int, float, str)):
        yield ContentPart(name, type(value).__name__, (), repr(value).encode())
    else:
        raise TypeError(f"{name} is a {type(value).__name__}, whose content can't be hashed")


def _bytes_of(tensor: torch.Tensor) -> Any:
    """The elements' bytes, on the host; they share the tensor's memory where that is possible."""
    return tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy()


class EncoderWorkerSide:
    """The connector's part in a rank's process."""

    def __init__(self, session: PoolSession, settings: LinkSettings) -> None:
        self._session = session
        self._transfer = EncoderTransfer(session, settings)
        self._ended: SimpleQueue[EncoderSave] = SimpleQueue()
        self._device: torch.device | None = None

    def close(self) -> None:
        self._session.close()

    def load(self, loads: dict[str, EncoderOutput], encoder_cache: dict[str, torch.Tensor]) -> None:
        """Put outputs into vLLM's encoder cache, on its device."""
        for name, output in loads.items():
            encoder_cache[name] = tensor_of(output).to(self._own_device())

    def _own_device(self) -> torch.device:
        if self._device is None:
            from vllm.platforms import current_platform

            self._device = torch.device(current_platform.device_type)
        return self._device

    def save(self, key: ObjectKey, tensor: torch.Tensor) -> None:
        """Begin to save a computed output. Every rank has it whole; the first one saves it."""
        if get_tensor_model_parallel_rank() == 0:
            self._transfer.save(key, output_of(tensor), self._ended.put)

    def report(self) -> EncoderReport | None:
        """Counts of the saves that have ended since the last report."""
        stats = EncoderStats()
        while not self._ended.empty():
            save = self._ended.get()
            is_saved = save.outcome == "saved"
            stats.add("saved_outputs" if is_saved else "unsaved_outputs", 1)
            stats.add("saved_bytes", save.size_bytes if is_saved else 0)
            stats.observe("save_seconds", save.seconds)
        return None if stats.is_empty() else EncoderReport(stats)


def output_of(tensor: torch.Tensor) -> EncoderOutput:
    """A tensor's elements, which share its memory where that is possible."""
    return EncoderOutput(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), _bytes_of(tensor))


def tensor_of(output: EncoderOutput) -> torch.Tensor:
    """A tensor on the host, in memory of its own."""
    flat = torch.empty(output.size_bytes, dtype=torch.uint8)
    flat.numpy()[:] = output.data
    return flat.view(getattr(torch, output.dtype)).reshape(output.shape)

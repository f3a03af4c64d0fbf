# SPDX-License-Identifier: Apache-2.0
"""The conductor's shell: the core on a driver, with its probes, event subscriptions and wire.

``ConductorService`` runs the core in this process, ``ConductorServer`` serves it to others by RPC; their side
is ``client.py``. A worker's answer to a probe carries the measurements of its own steps, from which the core
learns; an answer in another form counts as no measurements. Nothing here decides where a request goes.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Annotated, Any, TypeVar

import aiohttp
import msgspec
from msgspec import Meta
from prometheus_client import Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from mooncake import clock, metrics
from mooncake.conductor.admission import CODES
from mooncake.conductor.conductor import Conductor
from mooncake.conductor.event_subscriptions import EventSubscriptions
from mooncake.conductor.explanation import Explain, Explained, Explanation
from mooncake.conductor.health import ProbeOutcome
from mooncake.conductor.messages import (
    ACCESS,
    AddInstance,
    AdmissionStatus,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    ChunkMeasured,
    ClaimRequests,
    Decision,
    Drain,
    Effect,
    Event,
    Failed,
    FetchMeasured,
    Finished,
    FoundSpans,
    GetSpans,
    GetStatus,
    GetStory,
    InstanceStatus,
    Moved,
    Noted,
    Place,
    Prefilled,
    Probe,
    Probed,
    Refuse,
    RemoveInstance,
    Replicate,
    Replicated,
    ReportedFact,
    StateChanged,
    Status,
    StepMeasured,
    Story,
    TransferMeasured,
    Unwatch,
    Watch,
)
from mooncake.conductor.peers import Peers
from mooncake.conductor.placement_spans import traced_placement
from mooncake.conductor.prediction import QUANTITIES, RATIOS
from mooncake.conductor.query_server import PublisherSubscriptions, QueryServer, read_registrations
from mooncake.conductor.scaling_signal import DesiredChanged, ScalingStatus
from mooncake.conductor.settings import SchedulingSettings, Seconds
from mooncake.config import AlsoFrom, Port, Secret
from mooncake.driver import Driver
from mooncake.errors import InvalidArgument, cause_of
from mooncake.http.worker_stats import KvMemoryStats, StepStats
from mooncake.log import get_logger
from mooncake.rpc import Call, Connection, RpcServer
from mooncake.rpc.client import split_address
from mooncake.security import TRUSTED, Access, check_address
from mooncake.security.http_auth import HttpClientAuth
from mooncake.tracing import Span, process_tracing
from mooncake.types import InstanceId

log = get_logger(__name__)

_placements = Counter(
    "mooncake_conductor_placements",
    "Requested placements, by outcome: placed, degraded or the code of the refusal.",
    ["outcome"],
    registry=metrics.registry,
)
_kv_transfers = Counter(
    "mooncake_conductor_kv_transfers",
    "Placements on two instances, by how their KV goes from one to the other: push or pool.",
    ["way"],
    registry=metrics.registry,
)
_state_changes = Counter(
    "mooncake_conductor_state_changes",
    "State changes of instances, by the new state.",
    ["role", "state"],
    registry=metrics.registry,
)


@dataclass(frozen=True)
class ConductorSettings(SchedulingSettings):
    """Choose the workers of each request by their cached blocks and load."""

    host: str = "127.0.0.1"
    "Address to listen on for gateways."

    port: Port = 8400
    "Port to listen on; 0 takes a free one."

    peers: tuple[str, ...] = ()
    "`host:port` of the other conductors of this cluster; each has all that gateways report to any of them."

    leader_lease_s: Seconds = 1.0
    "A conductor whose leader has stated nothing for this time leads in its place."

    http_port: Port = 13333
    "Port of the index that other routers may register at and query, and of `/metrics`; 0 takes a free one."

    hash_seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1), AlsoFrom("CONDUCTOR_SEED")] = 0
    "Seed of the block hashes (XXH3-64) in other routers' queries; all that compare them need the same."

    registrations: Annotated[str, AlsoFrom("CONDUCTOR_CONFIG_PATH")] = ""
    "JSON file with publishers of KV events to follow from the start; `docs/conductor.md` shows one."

    admin_api_key: Annotated[str, Secret, AlsoFrom("ADMIN_API_KEY")] = ""
    "Key that `/register` and `/unregister` want in the header `X-API-Key`; empty refuses them."

    def __post_init__(self) -> None:
        super().__post_init__()
        for address in self.peers:
            try:
                split_address(address)
            except InvalidArgument as error:
                raise InvalidArgument("peers", address, "host:port of another conductor") from error


async def serve(settings: ConductorSettings) -> None:
    """Run a conductor until cancelled.

    Raises:
        AddressInUse: a port is taken.
        InvalidArgument: the file of registrations can't be used, or other hosts can reach this process
            without authentication.
    """
    check_address(settings.host)
    file_port, registrations = (
        read_registrations(settings.registrations) if settings.registrations else (None, [])
    )
    http_port = settings.http_port if file_port is None else file_port
    service = ConductorService(settings)
    server = ConductorServer(service, settings.peers, settings.leader_lease_s)
    publishers = PublisherSubscriptions(settings.hash_seed)
    queries = QueryServer(publishers, settings.host, http_port, settings.admin_api_key)
    try:
        port = await server.start(settings.host, settings.port)
        await service.start()
        await queries.start()
        for one in registrations:
            publishers.register(one)
        log.info("query_server_ready", url=f"http://{settings.host}:{queries.port}")
        log.info("ready", role="conductor", address=f"{settings.host}:{port}", scheduling=settings.scheduling)
        await asyncio.get_running_loop().create_future()
    finally:
        await queries.close()
        await server.close()
        await service.close()


class ConductorService:
    """The core in this process. Use it on one event loop: ``start``, then anything, then ``close``."""

    def __init__(self, settings: SchedulingSettings) -> None:
        self.settings = settings
        self.core = Conductor(settings, Random())
        self._driver: Driver[Event, Effect] = Driver(self.core, self._perform)
        self._answer: Decision | Refuse | None = None
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._caller = HttpClientAuth(is_plain=settings.plain_engines)
        self._followers = EventSubscriptions(settings, self._driver.post, self._caller)
        self._read: dict[InstanceId, StepStats] = {}  # how far its measurements have been read
        self._session: aiohttp.ClientSession | None = None
        self.is_leading: Callable[[], bool] = lambda: True
        "Whether no other conductor states the numbers of instances that are desired."

    async def start(self) -> None:
        _collector.shown[id(self.core)] = self.core
        _scaling_collector.shown[id(self)] = self
        timeout = aiohttp.ClientTimeout(total=self.settings.probe_timeout_s)
        connector = aiohttp.TCPConnector(ssl=self._caller.tls or True)
        self._session = aiohttp.ClientSession(timeout=timeout, connector=connector)
        await self._followers.start(self._session)

    async def close(self) -> None:
        self._driver.close()
        _collector.shown.pop(id(self.core), None)
        _scaling_collector.shown.pop(id(self), None)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._followers.close()
        if self._session is not None:
            await self._session.close()

    async def place(self, request: Place) -> Decision | Refuse:
        return self.place_now(request)

    def place_now(self, request: Place) -> Decision | Refuse:
        return traced_placement(request, self._place_now) if request.trace else self._place_now(request)

    def _place_now(self, request: Place) -> Decision | Refuse:
        self._driver.post(request)
        answer, self._answer = self._answer, None
        assert answer is not None
        if isinstance(answer, Decision):
            _placements.labels("degraded" if answer.degraded else "placed").inc()
            if answer.prefill is not None:
                _kv_transfers.labels("push" if answer.push_from else "pool").inc()
        else:
            _placements.labels(answer.refusal.code).inc()
        return answer

    async def prefilled(self, event: Prefilled) -> Refuse | None:
        return self.prefilled_now(event)

    def prefilled_now(self, event: Prefilled) -> Refuse | None:
        self._driver.post(event)
        answer, self._answer = self._answer, None
        assert not isinstance(answer, Decision)
        return answer

    def post(self, event: Event) -> None:
        self._driver.post(event)
        self._answer = None  # no caller waits for this one, and the next caller must not receive it

    async def change(self, event: AddInstance | RemoveInstance | Drain) -> None:
        self.post(event)

    async def status(self) -> list[InstanceStatus]:
        return self.core.status()

    async def admission(self) -> AdmissionStatus:
        return self.core.lifecycle.status()

    async def scaling(self) -> list[ScalingStatus]:
        return self.core.scaling.status()

    async def story(self, key: str) -> list[str]:
        return self.core.story(key)

    async def explain(self, request_id: str) -> Explanation | None:
        return self.explain_now(request_id)

    async def spans(self, parent_id: str) -> list[Span]:
        return process_tracing().ring.below(parent_id)

    def explain_now(self, request_id: str) -> Explanation | None:
        identities = self._followers.identities
        return self.core.explain(request_id, lambda one: identities.get(one, ""), clock.monotonic())

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Decision() | Refuse():
                self._answer = effect
            case Probe():
                self._spawn(self._probe(effect.instance))
            case Watch():
                self._followers.follow(effect.instance, effect.was_suspect)
            case Unwatch():
                self._followers.unfollow(effect.instance)
            case StateChanged():
                _state_changes.labels(effect.role, effect.after).inc()
                if effect.instance not in self.core.instances:
                    self._read.pop(effect.instance, None)
                log.info(
                    "instance_changed",
                    instance=effect.instance,
                    role=effect.role.value,
                    before=effect.before,
                    after=effect.after,
                    reason=effect.reason,
                )
            case DesiredChanged():
                log.info(
                    "desired_instances_changed",
                    role=effect.role.value,
                    before=effect.before,
                    after=effect.after,
                    reason=effect.reason,
                )

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)

    async def _probe(self, instance: InstanceId) -> None:
        try:
            probed = await self._query_health(instance)
        except TimeoutError:
            detail = f"no answer to a probe within {self.settings.probe_timeout_s:g} s"
            probed = Probed(instance, ProbeOutcome.FAILED, detail)
        except (aiohttp.ClientError, OSError) as error:
            probed = Probed(instance, ProbeOutcome.FAILED, f"probe failed: {cause_of(error)}")
        except Exception as error:  # a bug of ours; without a result the core would never probe it again
            log.exception("probe_broken", instance=instance)
            detail = f"probe failed: {type(error).__name__}: {error}"
            probed = Probed(instance, ProbeOutcome.FAILED, detail)
        self._driver.post(probed)

    async def _query_health(self, instance: InstanceId) -> Probed:
        async with self._get(instance, "/ready") as response:
            if response.status == 200:
                body = await response.read()
                self._take_measured(instance, body)
                port, memory = read_push_port(body), read_kv_memory(body)
                return Probed(instance, ProbeOutcome.READY, "answers", False, port, memory)
            if response.status != 404:
                return Probed(instance, ProbeOutcome.ALIVE, f"/ready answers {response.status}")
        # vLLM has no /ready; there /health is enough.
        async with self._get(instance, "/health") as response:
            if response.status != 200:
                return Probed(instance, ProbeOutcome.FAILED, f"/health answers {response.status}", True)
        return Probed(instance, ProbeOutcome.READY, "answers", True, 0, await self._engine_memory(instance))

    async def _engine_memory(self, instance: InstanceId) -> KvMemoryStats | None:
        """The memory of another engine, from its metrics; None where they do not show it."""
        try:
            async with self._get(instance, "/metrics") as response:
                body = await response.read() if response.status == 200 else b""
        except (TimeoutError, aiohttp.ClientError, OSError):
            return None
        return read_engine_memory(body)

    def _get(self, instance: InstanceId, path: str) -> Any:
        assert self._session is not None
        return self._session.get(self._caller.url(instance, path), headers=self._caller.headers("GET", path))

    def _take_measured(self, instance: InstanceId, body: bytes) -> None:
        """Post what the instance has measured since the last probe; only our workers report this."""
        found = read_step_stats(body)
        if found is not None and instance in self.core.instances:  # it may have left meanwhile
            for event in new_samples(found, self._read.get(instance), instance):
                self._driver.post(event)
            self._read[instance] = found


# --- the measurements of workers


class _Ready(msgspec.Struct):
    measured: StepStats | None = None


def read_step_stats(body: bytes) -> StepStats | None:
    """Parse the body of a worker's ``/ready``; None when it measures nothing."""
    try:
        return msgspec.json.decode(body, type=_Ready).measured
    except msgspec.MsgspecError:
        return None


class _Pushing(msgspec.Struct):
    push_port: Annotated[int, Meta(ge=0, lt=1 << 16)] = 0


def read_push_port(body: bytes) -> int:
    """Port of a worker's listener for pushes, from the body of its ``/ready``; 0 when it names none."""
    try:
        return msgspec.json.decode(body, type=_Pushing).push_port
    except msgspec.MsgspecError:
        return 0


class _Remembering(msgspec.Struct):
    kv_memory: KvMemoryStats | None = None


def read_kv_memory(body: bytes) -> KvMemoryStats | None:
    """A worker's memory for KV, from the body of its ``/ready``; None when it reports none."""
    try:
        return msgspec.json.decode(body, type=_Remembering).kv_memory
    except msgspec.MsgspecError:
        return None


_MOST_TOKENS = 1e15
"""Nothing above this is a number of tokens."""
_ENGINE_SAMPLE = re.compile(
    rb"^(vllm:(?:cache_config_info|kv_cache_usage_perc|gpu_cache_usage_perc|num_requests_running)"
    rb"|sglang:(?:max_total_num_tokens|num_used_tokens|num_running_reqs))(\{[^\n]*\})? ([0-9.eE+-]+)$",
    re.MULTILINE,
)
_CACHE_LABEL = re.compile(rb'\b(kv_cache_size_tokens|num_gpu_blocks|block_size)="(\d{1,15})"')


def read_engine_memory(page: bytes) -> KvMemoryStats | None:
    """The memory for KV of a vLLM or SGLang server, from its metrics in Prometheus' text format; None when
    they do not show it. Data-parallel ranks behind one address count as one."""
    sums, num_samples = dict[bytes, float](), dict[bytes, int]()
    total_tokens = 0.0
    for found in _ENGINE_SAMPLE.finditer(page):
        name, labels = found[1].replace(b"gpu_cache_usage", b"kv_cache_usage"), found[2] or b""
        try:
            value = float(found[3])
        except ValueError:
            return None
        sums[name] = sums.get(name, 0.0) + value
        num_samples[name] = num_samples.get(name, 0) + 1
        if name == b"vllm:cache_config_info":
            cache = {label: int(number) for label, number in _CACHE_LABEL.findall(labels)}
            # Earlier releases do not say how many tokens fit.
            num_tokens = cache.get(b"num_gpu_blocks", 0) * cache.get(b"block_size", 0)
            total_tokens += cache.get(b"kv_cache_size_tokens", num_tokens)
    usage = b"vllm:kv_cache_usage_perc"
    used_tokens = total_tokens * sums.get(usage, 0.0) / num_samples.get(usage, 1)
    num_running = sums.get(b"vllm:num_requests_running", 0.0)
    if not total_tokens:
        total_tokens = sums.get(b"sglang:max_total_num_tokens", 0.0)
        used_tokens = sums.get(b"sglang:num_used_tokens", 0.0)
        num_running = sums.get(b"sglang:num_running_reqs", 0.0)
    counts = (total_tokens, used_tokens, num_running)
    if not total_tokens or not all(0 <= count < _MOST_TOKENS for count in counts):
        return None
    return KvMemoryStats(int(total_tokens), int(used_tokens), int(num_running))


def new_samples(
    stats: StepStats, before: StepStats | None, instance: InstanceId
) -> Iterator[ChunkMeasured | StepMeasured | FetchMeasured]:
    """The rows that ``before`` did not have. A restarted worker counts from zero again."""
    if before is None or any(new < old for new, old in zip(_counts(stats), _counts(before), strict=True)):
        before = StepStats()
    for first, num_tokens, seconds in _newest(stats.chunks, stats.num_chunks - before.num_chunks):
        yield ChunkMeasured(instance, first, num_tokens, seconds)
    for num_requests, num_tokens, seconds in _newest(stats.steps, stats.num_steps - before.num_steps):
        yield StepMeasured(instance, num_requests, num_tokens, seconds)
    for num_tokens, seconds in _newest(stats.loads, stats.num_loads - before.num_loads):
        yield FetchMeasured(instance, num_tokens, seconds)


_Row = TypeVar("_Row")


def _counts(stats: StepStats) -> tuple[int, int, int]:
    return stats.num_chunks, stats.num_steps, stats.num_loads


def _newest(rows: list[_Row], num: int) -> list[_Row]:
    return rows[-num:] if num > 0 else []


# --- accuracy, for the metrics page


class _AccuracyCollector(Collector):
    """Accuracy of the predictions and admission results of this process's conductors, read at each scrape.

    A core only counts and knows no registry. A process normally runs one conductor.
    """

    def __init__(self) -> None:
        self.shown: dict[int, Conductor] = {}

    def collect(self) -> Iterator[HistogramMetricFamily | CounterMetricFamily]:
        yield self._ratios()
        yield from self._verdicts()

    def _ratios(self) -> HistogramMetricFamily:
        family = HistogramMetricFamily(
            "mooncake_conductor_prediction_ratio",
            "The measured value as a multiple of the predicted one, by quantity.",
            labels=["quantity"],
        )
        for quantity in QUANTITIES:
            counted = [core.predict.accuracy[quantity] for core in self.shown.values()]
            buckets, seen = [], 0
            for position, bound in enumerate([*RATIOS, float("inf")]):
                seen += sum(one.counts[position] for one in counted)
                buckets.append(("+Inf" if bound == float("inf") else f"{bound:g}", float(seen)))
            family.add_metric([quantity], buckets, sum(one.ratio_sum for one in counted))
        return family

    def _verdicts(self) -> Iterator[CounterMetricFamily]:
        rejected = CounterMetricFamily(
            "mooncake_conductor_rejected",
            "Requests that admission rejected, by reason; audited ones are among them.",
            labels=["code"],
        )
        audited = CounterMetricFamily(
            "mooncake_conductor_audited",
            "Rejected requests that were served as a check of the rejection, by whether they met their SLOs.",
            labels=["in_slo"],
        )
        found = [core.lifecycle.status() for core in self.shown.values()]
        for code in CODES:
            rejected.add_metric([code], float(sum(one.rejected.get(code, 0) for one in found)))
        num_met = sum(one.audited_in_slo for one in found)
        audited.add_metric(["yes"], float(num_met))
        audited.add_metric(["no"], float(sum(one.audited_ended for one in found) - num_met))
        yield from (rejected, audited)


class _ScalingCollector(Collector):
    """The scaling signal of this process's conductor, read at each scrape.

    Of several conductors only the one that leads states it: the others lack the rejected requests, and two
    numbers for one pool would have an autoscaler take the larger one. They observe the load all the same, so
    one that takes over goes on from there.
    """

    def __init__(self) -> None:
        self.shown: dict[int, ConductorService] = {}

    def collect(self) -> Iterator[GaugeMetricFamily]:
        desired = GaugeMetricFamily(
            "mooncake_conductor_desired_instances",
            "Instances that should serve so that SLOs are met, at the conductor that leads; for autoscalers.",
            labels=["role"],
        )
        serving = GaugeMetricFamily(
            "mooncake_conductor_serving_instances",
            "Instances that can be chosen: those that drain, start or are lost are not among them.",
            labels=["role"],
        )
        load = GaugeMetricFamily(
            "mooncake_conductor_offered_load",
            "Work that arrives, admitted or not, in instances that would do nothing else.",
            labels=["role"],
        )
        queue = GaugeMetricFamily(
            "mooncake_conductor_queue_seconds",
            "Predicted seconds of prompts that are placed and not computed, the role's instances together.",
            labels=["role"],
        )
        for service in self.shown.values():
            if service.is_leading():
                for one in service.core.scaling.status():
                    serving.add_metric([one.role], float(one.serving))
                    load.add_metric([one.role], one.load)
                    queue.add_metric([one.role], one.queue_s)
                    if one.desired:
                        desired.add_metric([one.role], float(one.desired))
        yield from (desired, serving, load, queue)


_collector = _AccuracyCollector()
_scaling_collector = _ScalingCollector()
metrics.registry.register(_collector)
metrics.registry.register(_scaling_collector)


# --- the wire


_FACTS = (
    Finished,
    Failed,
    Moved,
    ChunkMeasured,
    StepMeasured,
    TransferMeasured,
    FetchMeasured,
    AddInstance,
    RemoveInstance,
    Drain,
    BlocksStored,
    BlocksRemoved,
    BlocksCleared,
)


class ConductorServer:
    """Serves a ``ConductorService`` to gateways and to other conductors.

    A lost gateway's requests count as finished. What gateways report is passed on to the peers.
    """

    def __init__(self, service: ConductorService, peers: Sequence[str] = (), lease_s: float = 1.0) -> None:
        """``peers``: addresses of the other conductors. Raises InvalidArgument."""
        self._service = service
        self.peers = Peers(service.core, service.post, peers, lease_s)
        service.is_leading = lambda: self.peers.standing.is_leader
        handlers: dict[type[msgspec.Struct], Any] = dict.fromkeys(_FACTS, self._note)
        handlers |= {Prefilled: self._prefilled, Explain: self._explain}
        handlers |= {Place: self._place, GetStatus: self._status, GetStory: self._story}
        handlers |= {GetSpans: self._spans}
        handlers |= {ClaimRequests: self._claim, Replicate: self._replicate}
        access = Access({**ACCESS, Explain: TRUSTED})
        self.rpc = RpcServer(handlers, self._on_lost, access=access, name="conductor")

    async def start(self, host: str, port: int) -> int:
        """Listen; port 0 takes a free one. Returns the port. Raises as ``RpcServer.start``."""
        port = await self.rpc.start(host, port)
        self.peers.start()
        return port

    async def close(self) -> None:
        await self.peers.close()
        await self.rpc.close()

    def _place(self, request: Place, call: Call) -> Decision | Refuse:
        answer = self._service.place_now(request)
        if isinstance(answer, Decision):
            placed = self._service.core.placed_of(request, answer, clock.monotonic())
            self.peers.placed(placed, call.connection)
        else:
            self.peers.refused(request.request_id)
        return answer

    def _note(self, event: ReportedFact, call: Call) -> Noted:
        self._service.post(event)
        if isinstance(event, Finished):
            self.peers.ended(event)
        else:
            self.peers.share(event)
        return Noted()

    def _prefilled(self, event: Prefilled, call: Call) -> Noted | Refuse:
        self.peers.share(event)
        return self._service.prefilled_now(event) or Noted()

    def _claim(self, message: ClaimRequests, call: Call) -> Noted:
        self.peers.claim(message, call.connection)
        return Noted()

    def _replicate(self, message: Replicate, call: Call) -> Replicated:
        return self.peers.receive(message)

    def _explain(self, message: Explain, call: Call) -> Explained:
        return Explained(self._service.explain_now(message.request_id))

    def _status(self, message: GetStatus, call: Call) -> Status:
        core = self._service.core
        return Status(core.status(), core.lifecycle.status(), self.peers.standing, core.scaling.status())

    def _story(self, message: GetStory, call: Call) -> Story:
        return Story(self._service.core.story(message.key))

    def _spans(self, message: GetSpans, call: Call) -> FoundSpans:
        return FoundSpans(process_tracing().ring.below(message.parent_id))

    def _on_lost(self, connection: Connection) -> None:
        self.peers.lost(connection)

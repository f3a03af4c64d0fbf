# SPDX-License-Identifier: Apache-2.0
"""A simulated cluster: the specification of its machines, and what every cluster has.

``ClusterSpec`` says which machines there are and how they are used. A ``ServingCluster`` has requests that
arrive, a conductor that places them, and results. It owns the communication with the conductor: a request's
arrival is a ``Place``, everything else a fact at the instant at which a real one would be known. A subclass
has the nodes and carries out the decisions.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from random import Random
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from mooncake.conductor.conductor import Conductor
from mooncake.conductor.health import ProbeOutcome
from mooncake.conductor.messages import (
    POOL,
    AddInstance,
    BlocksRemoved,
    BlocksStored,
    Decision,
    Effect,
    Event,
    Finished,
    Place,
    Probed,
    Refuse,
    StepMeasured,
)
from mooncake.conductor.prediction import CostModels, LinkModel, PrefillModel
from mooncake.conductor.settings import SchedulingSettings
from mooncake.errors import InvalidArgument
from mooncake.inference.blocks import BlockPool
from mooncake.inference.scheduler import Scheduler, SchedulerSettings
from mooncake.kvlayout import KEY_PREFIX
from mooncake.machine import Wake
from mooncake.prefix import block_hashes, root_hash, short_key
from mooncake.sim.kernel import Kernel
from mooncake.sim.serving.node_costs import NodeCosts
from mooncake.sim.serving.nodes import DecodeBatch, NodeCache, SimRequest
from mooncake.sim.serving.results import DONE, FAILED, REJECTED, Recorder, RunResults, TimelineSampler
from mooncake.sim.serving.step_level import prompt_of
from mooncake.sim.traces.sessions import ClosedLoop, NextTurn, SessionKeys
from mooncake.sim.traces.trace import TraceRow
from mooncake.types import InstanceId, Tier, WorkerRole

_ONLY_DISAGGREGATED = (
    "decode_costs",
    "num_store",
    "store_tokens",
    "store_ssd_tokens",
    "spot",
    "cache_tokens",
    "ssd_tokens",
    "pipeline_nodes",
)
Count = Annotated[int, Meta(gt=0)]
Mode: TypeAlias = Literal["disaggregated", "vllm", "prefix", "chunked", "chunked_prefix"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """The machines, and how they are used."""

    costs: NodeCosts
    """Costs of every node, or of every prefill node."""
    decode_costs: NodeCosts | None = None
    """Costs of a decode node; None: as ``costs``."""
    num_prefill: Count = 8
    num_decode: Annotated[int, Meta(ge=0)] = 8
    """0 only where nodes are colocated."""
    mode: Mode = "disaggregated"
    """The values other than ``disaggregated`` are one pool of ``num_prefill + num_decode`` colocated nodes:
    ``vllm`` computes prompts before it continues decoding, ``prefix`` also keeps their blocks for later ones,
    ``chunked`` mixes chunks of prompts into the steps, ``chunked_prefix`` does both."""
    detail: Literal["flow", "step"] = "flow"
    """``step``: the real batch scheduler, step by step and block by block. For small traces."""
    block_tokens: Count = 512
    """Tokens that a key of the trace stands for."""
    cache_tokens: int | None = None
    """Cache of a prefill node in DRAM; None: as in ``costs``. Colocated nodes have none but device memory."""
    ssd_tokens: int = 0
    """Cache of a prefill node on its SSD."""
    num_store: Annotated[int, Meta(ge=0)] = 0
    """CPU nodes that compute nothing: their memory and SSD are a pool of blocks. Prefill nodes write every
    block to the pool and load from it, no longer from each other."""
    store_tokens: Annotated[int, Meta(ge=0)] | None = None
    """Memory of the pool on each store node (None: as a prefill node's), or, if there is no store node, on
    each decode node (None: no pool). With ``chunked_prefix`` it is on each of the nodes: they write every
    block of prompts and answers to the pool, and load from it what they lack."""
    store_ssd_tokens: Annotated[int, Meta(ge=0)] = 0
    """SSD of the pool on each of them."""
    spot: Literal["none", "prefill"] = "none"
    """``prefill``: prefill nodes are spot instances, interrupted at times, and back with empty memory."""
    interruptions_per_hour: Annotated[float, Meta(ge=0)] = 0.5
    """Mean number of interruptions of one spot instance in an hour in which it runs."""
    restart_s: Annotated[float, Meta(gt=0)] = 300.0
    """Time from an interruption until a new instance has loaded the weights."""
    nic_bytes_per_s: float = 0.0
    """Bandwidth of a node in one direction; 0: as in ``costs``."""
    pipeline_nodes: Count = 1
    """Prefill nodes that form one instance and compute the chunks of a prompt as a pipeline."""
    chunk_tokens: Count = 1024
    """Most tokens of such a chunk; its length is chosen as in a live group (``inference/pipeline.py``)."""
    step_tokens: Count = 512
    """Tokens of one step that prompts and answers share (``chunked``, ``step``)."""
    max_batch: Count = 256
    """Requests that one instance decodes at a time."""
    obeys_turns: bool = True
    """Whether waiting prompts are computed in the conductor's order, or first come first served."""
    measure_s: float = 10.0
    """Interval of an instance's measurements for the conductor; steps between them are reported without
    times."""
    sample_s: float = 10.0
    """The interval of the timeline."""
    watches_blocks: bool = False
    """Count how often each block is used, and where the most used ones are. Needs memory per block."""

    def __post_init__(self) -> None:
        if self.mode == "disaggregated" and not self.num_decode:
            allowed = "1 or more when prefill and decode are disaggregated"
            raise InvalidArgument("num_decode", self.num_decode, allowed)
        if self.mode != "disaggregated":
            for field in _ONLY_DISAGGREGATED:
                if field == "store_tokens" and self.mode == "chunked_prefix":
                    continue
                if getattr(self, field) not in (0, getattr(type(self), field)):
                    allowed = f"left out when mode is {self.mode}: nodes are colocated"
                    raise InvalidArgument(field, _shown(getattr(self, field)), allowed)
        self._check_decode_costs()
        if self.store_ssd_tokens and not self.has_pool:
            allowed = "0 without num_store or store_tokens"
            raise InvalidArgument("store_ssd_tokens", self.store_ssd_tokens, allowed)
        if self.num_prefill % self.pipeline_nodes:
            allowed = f"a divisor of num_prefill ({self.num_prefill})"
            raise InvalidArgument("pipeline_nodes", self.pipeline_nodes, allowed)
        if self.detail == "step":
            if self.mode not in ("disaggregated", "chunked"):
                raise InvalidArgument("detail", self.detail, f"flow when mode is {self.mode}")
            if self.pipeline_nodes > 1 or self.ssd_tokens:
                raise InvalidArgument("detail", self.detail, "flow with pipelines or SSDs")
            if self.has_pool or self.spot != "none":
                raise InvalidArgument("detail", self.detail, "flow with a pool or spot instances")
        self._check_numbers()

    def _check_numbers(self) -> None:
        for field in ("measure_s", "sample_s", "interruptions_per_hour", "restart_s", "nic_bytes_per_s"):
            value, may_be_0 = getattr(self, field), field in ("interruptions_per_hour", "nic_bytes_per_s")
            if not math.isfinite(value) or value < 0 or (value == 0 and not may_be_0):
                raise InvalidArgument(field, value, f"a number {'from 0 on' if may_be_0 else 'above 0'}")
        for field in ("cache_tokens", "ssd_tokens", "store_tokens", "store_ssd_tokens"):
            num_tokens, least = getattr(self, field), self.block_tokens
            may_be_0 = field != "cache_tokens"
            if num_tokens is not None and num_tokens < least and not (may_be_0 and num_tokens == 0):
                allowed = f"{'0' if may_be_0 else 'left out'}, or at least the {least} tokens of a block"
                raise InvalidArgument(field, num_tokens, allowed)
        if self.has_pool and self.pool_tokens < self.block_tokens:
            allowed = f"at least the {self.block_tokens} tokens of a block where there is a pool"
            raise InvalidArgument("store_tokens", self.pool_tokens, allowed)
        if self.mode != "disaggregated":
            memories = [(self.node_costs, "device_tokens")]
        else:
            memories = [(self.node_costs, "cache_tokens")]
            if self.detail == "step":
                memories.append((self.decode_node_costs, "device_tokens"))
        for costs, field in memories:
            if (num_tokens := getattr(costs, field)) < self.block_tokens:
                allowed = f"at least the {self.block_tokens} tokens of a block"
                raise InvalidArgument(f"{field} of {costs.title!r}", num_tokens, allowed)

    def _check_decode_costs(self) -> None:
        """Decode nodes must be able to read what prefill nodes write."""
        if self.decode_costs is None:
            return
        for field in ("kv_bytes_per_token", "num_layers"):
            wanted, found = getattr(self.costs, field), getattr(self.decode_costs, field)
            if wanted != found:
                allowed = f"{wanted} as of {self.costs.title!r}, whose nodes prefill"
                raise InvalidArgument(f"{field} of {self.decode_costs.title!r}", found, allowed)

    def scheduler(
        self, num_tokens: int, step_tokens: int, max_running: int, *, has_external_cache: bool = False
    ) -> Scheduler:
        """An engine's scheduler, with room for so many tokens of KV."""
        return Scheduler(
            SchedulerSettings(
                num_blocks=num_tokens // self.block_tokens + 1,
                block_tokens=self.block_tokens,
                max_model_len=1 << 30,
                max_batch_tokens=max(step_tokens, max_running),
                max_running=max_running,
                max_waiting=1 << 30,
                has_external_cache=has_external_cache,
            )
        )

    def pool(self, num_tokens: int) -> BlockPool[int]:
        return BlockPool(num_tokens // self.block_tokens + 1, self.block_tokens)

    @property
    def has_pool(self) -> bool:
        return bool(self.num_store or self.store_tokens)

    @property
    def num_pool_nodes(self) -> int:
        """Nodes on which the pool is."""
        num_others = self.num_decode + (self.mode != "disaggregated") * self.num_prefill
        return (self.num_store or num_others) if self.has_pool else 0

    @property
    def pool_tokens(self) -> int:
        """Memory of the pool on each of them."""
        return self.node_costs.cache_tokens if self.store_tokens is None else self.store_tokens

    @property
    def num_prefill_instances(self) -> int:
        return self.num_prefill // self.pipeline_nodes

    @property
    def models(self) -> CostModels:
        """What the conductor assumes about an instance before any measurement."""
        models, num_nodes = self.node_costs.models, self.pipeline_nodes
        models = msgspec.structs.replace(models, decode=self.decode_node_costs.decode)
        if num_nodes == 1:
            return models
        one = models.prefill
        fill_s = (num_nodes - 1) / num_nodes * one.seconds(0, self.chunk_tokens)
        piped = PrefillModel(one.c0 + fill_s, one.c1 / num_nodes, one.c2 / num_nodes)
        link = LinkModel(models.link.latency_s, models.link.bytes_per_s * num_nodes)
        return msgspec.structs.replace(models, prefill=piped, link=link)

    @property
    def node_costs(self) -> NodeCosts:
        """``costs`` with this spec's overrides."""
        return self._overridden(self.costs)

    @property
    def decode_node_costs(self) -> NodeCosts:
        """The same for a decode node."""
        return self._overridden(self.decode_costs or self.costs)

    def _overridden(self, costs: NodeCosts) -> NodeCosts:
        changes: dict[str, Any] = {}
        if self.cache_tokens is not None:
            changes["cache_tokens"] = self.cache_tokens
        if self.nic_bytes_per_s:
            changes["nic_bytes_per_s"] = self.nic_bytes_per_s
        return msgspec.structs.replace(costs, **changes)


def _shown(value: object) -> object:
    return value.title if isinstance(value, NodeCosts) else value


POOL_SCOPE = f"{KEY_PREFIX}sim"
LIFETIME_S = 1e9
"""No request is ever dropped: every end is reported."""


class _MissedTooOften(Exception):
    """The rest of the run can't change its verdict."""


class ServingCluster:
    """One run. It keeps no list of requests: each is referenced by whatever moves it next."""

    def __init__(
        self,
        cluster: ClusterSpec,
        settings: SchedulingSettings,
        objectives: tuple[float, float],
        seed: int,
        progress: Callable[[int, float], None] | None,
    ) -> None:
        self.cluster = cluster
        self.costs = cluster.node_costs
        self.decode_costs = cluster.decode_node_costs
        self.kernel = Kernel(seed)
        self.conductor = Conductor(settings, Random(seed), cluster.models)
        is_before_decode = cluster.mode == "disaggregated" and self.costs.decode_makes_first_token
        self.delivery_s = 0.0 if is_before_decode else self.costs.first_token_s
        """From a token's making to the client. Where decode makes the first token, that time precedes it."""
        self.recorder = Recorder()
        self.sampler = TimelineSampler(self.kernel, self.recorder, cluster.sample_s, progress)
        self._objectives = objectives
        self._rows: Iterator[TraceRow] = iter(())
        self._speedup = 1.0
        self._first_s = 0.0
        self._measures_at: dict[InstanceId, float] = {}
        self.num_interruptions = 0
        self.max_missed: int | None = None
        """The run ends early when more requests than so many missed an objective."""
        self._num_missed = 0
        self._loop: ClosedLoop | None = None
        self._conversations: dict[int, SessionKeys] = {}
        """By place of the closed load: that of the session which is there."""
        self._places: dict[int, int] = {}
        """By number of a request under way: the place that sent it."""

    def run(self, rows: Iterable[TraceRow], speedup: float) -> RunResults:
        self._rows = iter(rows)
        self._speedup = speedup
        first = next(self._rows, None)
        if first is not None:
            self._first_s = first.timestamp_s
            self.kernel.call_at(0.0, self._arrive, first)
            self._run_all()
        return self._outcome()

    def run_sessions(self, loop: ClosedLoop) -> RunResults:
        """Run a closed load: a row per request, those of its first phase first. What is under way when it is
        over is simulated to its end."""
        self._loop = loop
        self.sampler.has_more = False
        self._send_all(loop.start())
        self._run_all()
        return self._outcome()

    def _run_all(self) -> None:
        self.sampler.start(self)
        try:
            self.kernel.run_all()
        except _MissedTooOften:
            pass  # the rows of requests that have not ended count as failed
        else:
            self.check_end()

    def _outcome(self) -> RunResults:
        line = self.sampler.time_line()
        return self.recorder.outcome(line, *self._objectives, self.num_interruptions)

    # implemented by a subclass

    def serve(self, request: SimRequest, decision: Decision) -> None:
        raise NotImplementedError

    def caches(self) -> list[NodeCache[Any]]:
        """The caches in which prompts are looked up."""
        raise NotImplementedError

    def check_end(self) -> None:
        """Assert that nothing is left of any request; a subclass adds what its nodes hold."""
        assert not self.conductor.placements, self.conductor

    # used by a subclass

    def join(self, instance: InstanceId, role: WorkerRole) -> None:
        kv_tokens = self.decode_costs.device_tokens if role is WorkerRole.DECODE else 0
        self.post(AddInstance(instance, role, kv_tokens))
        self.post(Probed(instance, ProbeOutcome.READY))

    def post(self, event: Event) -> list[Effect]:
        conductor, now = self.conductor, self.kernel.now
        deadline = conductor.deadline()
        if deadline is not None and deadline <= now:
            conductor.handle(Wake(), now)
        return conductor.handle(event, now)

    def post_block_events(self, instance: InstanceId, cache: NodeCache[Any]) -> None:
        """Report blocks that were added to or removed from the node's cache since the last call. Those of the
        pool have a scope of their own, as the store's have."""
        scope = POOL_SCOPE if instance == POOL else ""
        if self.cluster.detail == "step":
            cache.removed = [short_key(block_hash) for block_hash in cache.removed]
            cache.stored = [short_key(block_hash) for block_hash in cache.stored]
        if cache.removed:
            self.post(BlocksRemoved(instance, cache.removed, Tier.MEMORY, scope))
            cache.removed = []
        if cache.stored:
            self.post(BlocksStored(instance, cache.stored, Tier.MEMORY, scope))
            cache.stored = []
        if cache.ssd_removed:
            self.post(BlocksRemoved(instance, cache.ssd_removed, Tier.SSD, scope))
            cache.ssd_removed = []
        if cache.ssd_stored:
            self.post(BlocksStored(instance, cache.ssd_stored, Tier.SSD, scope))
            cache.ssd_stored = []

    def post_step(self, instance: InstanceId, batch: DecodeBatch) -> None:
        """Report a step of ``batch``, which is at the end of one."""
        if self.measures(instance):
            self.post(StepMeasured(instance, len(batch), batch.context, batch.seconds(1)))

    def measures(self, instance: InstanceId) -> bool:
        """Whether it is time for the instance to report how long its work takes."""
        now = self.kernel.now
        if now < self._measures_at.get(instance, 0.0):
            return False
        self._measures_at[instance] = now + self.cluster.measure_s
        return True

    def done(self, request: SimRequest, at: float) -> None:
        """The last token was made at ``at``."""
        number, recorder = request.number, self.recorder
        ttft_s = request.first_token_at + self.delivery_s - request.arrived_at
        recorder.status[number] = DONE
        recorder.ttft_s[number] = ttft_s
        recorder.e2e_s[number] = at + self.delivery_s - request.arrived_at
        recorder.tbt_s[number] = request.tbt_s
        num_intervals = request.num_output - 1
        recorder.tbt_mean_s[number] = (at - request.first_token_at) / num_intervals if num_intervals else 0.0
        self.post(Finished(request.request_id, request.num_output, ttft_s, request.tbt_s, True))
        slo_ttft_s, slo_tbt_s = self._objectives
        if (slo_ttft_s and ttft_s > slo_ttft_s) or (slo_tbt_s and request.tbt_s > slo_tbt_s):
            self._note_missed()
        if self._loop is not None and self.delivery_s:  # the session goes on when it has its answer
            self.kernel.call_at(self.kernel.now + self.delivery_s, self._delivered, request)
        else:
            self._delivered(request)

    def _delivered(self, request: SimRequest) -> None:
        self.sampler.num_open -= 1
        self._go_on(request)

    def fail(self, request: SimRequest) -> None:
        """End a request that was placed where it can never fit. Until then the conductor counts it as work of
        its instances."""
        self.post(Finished(request.request_id))
        self.give_up(request, FAILED)

    def give_up(self, request: SimRequest, status: int) -> None:
        """End the request here, without an answer."""
        self.recorder.status[request.number] = status
        self.sampler.num_open -= 1
        self.sampler.num_rejected += 1
        self._note_missed()
        self._go_on(request)

    def _go_on(self, request: SimRequest) -> None:
        """In a closed load, have sent what follows the end of a request."""
        if self._loop is not None:
            self._send_all(self._loop.ended(self._places.pop(request.number)))

    def _note_missed(self) -> None:
        self._num_missed += 1
        if self.max_missed is not None and self._num_missed > self.max_missed:
            raise _MissedTooOften

    # arrivals

    def _arrive(self, row: TraceRow) -> None:
        now = self.kernel.now
        following = next(self._rows, None)
        if following is not None:
            at = (following.timestamp_s - self._first_s) / self._speedup
            self.kernel.call_at(max(at, now), self._arrive, following)
        num_input, num_output = row.num_input, max(1, row.num_output)
        number = self.recorder.add(now, num_input, num_output)
        self.sampler.num_open += 1
        self.sampler.has_more = following is not None
        keys: Sequence[int] = row.keys[: num_input // self.cluster.block_tokens]
        self.place(SimRequest(number, now, num_input, num_output, keys))

    def _send_all(self, turns: Iterable[NextTurn]) -> None:
        for turn in turns:
            self.sampler.num_open += 1  # also while it pauses, so that the timeline goes on
            self.kernel.call_at(self.kernel.now + turn.pause_s, self._send_turn, turn)

    def _send_turn(self, upcoming: NextTurn) -> None:
        assert self._loop is not None
        if self._loop.is_over:
            self.sampler.num_open -= 1
            return
        now, turn, size = self.kernel.now, upcoming.turn, self.cluster.block_tokens
        if not upcoming.index:
            self._conversations[upcoming.place] = SessionKeys(upcoming.session, upcoming.number, size)
        keys = self._conversations[upcoming.place].send(turn)
        number = self.recorder.add(now, turn.num_input, turn.num_output)
        self._places[number] = upcoming.place
        # At least the last token of a prompt is computed, and with it its block.
        found = keys[: (turn.num_input - 1) // size]
        request = SimRequest(number, now, turn.num_input, turn.num_output, found)
        request.all_keys = keys
        self.place(request)

    def place(self, request: SimRequest) -> None:
        """Have the conductor choose where the request is served, again if it was served before."""
        number = request.number
        keys = self._with_tokens(request) if self.cluster.detail == "step" else request.keys
        place = Place(request.request_id, request.num_input, list(keys), lifetime_s=LIFETIME_S)
        for effect in self.post(place):
            if isinstance(effect, Decision):
                self._note_prediction(number, effect)
                self.serve(request, effect)
            elif isinstance(effect, Refuse):
                self._note_prediction(number, effect)
                self.give_up(request, REJECTED)

    def _with_tokens(self, request: SimRequest) -> list[int]:
        """Give the request a prompt of tokens, and so block hashes; return their short keys."""
        block_tokens = self.cluster.block_tokens
        request.token_ids = prompt_of(request.keys, request.num_input, block_tokens, request.number)
        request.keys = block_hashes(request.token_ids, block_tokens, root_hash())
        return [short_key(block_hash) for block_hash in request.keys]

    def _note_prediction(self, number: int, effect: Decision | Refuse) -> None:
        prediction = effect.prediction
        if prediction is not None:
            self.recorder.predicted_ttft_s[number] = prediction.ttft_s
            self.recorder.predicted_tbt_s[number] = prediction.tbt_s

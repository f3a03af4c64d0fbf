# SPDX-License-Identifier: Apache-2.0
"""What every simulated cluster has: requests that arrive, a conductor that places them, results.

It owns the communication with the conductor: a request's arrival is a ``Place``, everything else a fact at
the instant at which a real one would be known. A subclass has the nodes and carries out the decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from random import Random
from typing import Any

from mooncake.conductor.conductor import Conductor
from mooncake.conductor.health import ProbeOutcome
from mooncake.conductor.messages import (
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
from mooncake.conductor.settings import SchedulingSettings
from mooncake.machine import Wake
from mooncake.prefix import block_hashes, root_hash, short_key
from mooncake.sim.kernel import Kernel
from mooncake.sim.serving.cluster_spec import ClusterSpec
from mooncake.sim.serving.decode_batch import DecodeBatch
from mooncake.sim.serving.node_cache import NodeCache
from mooncake.sim.serving.results import DONE, REJECTED, Recorder, RunResults
from mooncake.sim.serving.sim_request import SimRequest
from mooncake.sim.serving.step_level import prompt_of
from mooncake.sim.serving.timeline import TimelineSampler
from mooncake.sim.traces.trace_file import TraceRow
from mooncake.types import InstanceId, Tier, WorkerRole

LIFETIME_S = 1e9
"""No request is ever dropped: every end is reported."""


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
        self.kernel = Kernel(seed)
        self.conductor = Conductor(settings, Random(seed), cluster.models)
        self.recorder = Recorder()
        self.sampler = TimelineSampler(self.kernel, self.recorder, cluster.sample_s, progress)
        self._objectives = objectives
        self._rows: Iterator[TraceRow] = iter(())
        self._speedup = 1.0
        self._first_s = 0.0
        self._measures_at: dict[InstanceId, float] = {}

    def run(self, rows: Iterable[TraceRow], speedup: float) -> RunResults:
        self._rows = iter(rows)
        self._speedup = speedup
        first = next(self._rows, None)
        if first is not None:
            self._first_s = first.timestamp_s
            self.kernel.call_at(0.0, self._arrive, first)
            self.sampler.start(self)
            self.kernel.run_all()
        self.check_end()
        return self.recorder.outcome(self.sampler.time_line(), *self._objectives)

    # implemented by a subclass

    def serve(self, request: SimRequest, decision: Decision) -> None:
        raise NotImplementedError

    def caches(self) -> list[NodeCache[Any]]:
        """The caches in which prompts are looked up."""
        raise NotImplementedError

    def check_end(self) -> None:
        """Assert that nothing is left of any request."""
        raise NotImplementedError

    # used by a subclass

    def join(self, instance: InstanceId, role: WorkerRole) -> None:
        self.post(AddInstance(instance, role, self.costs.device_tokens if role is WorkerRole.DECODE else 0))
        self.post(Probed(instance, ProbeOutcome.READY))

    def post(self, event: Event) -> list[Effect]:
        conductor, now = self.conductor, self.kernel.now
        deadline = conductor.deadline()
        if deadline is not None and deadline <= now:
            conductor.handle(Wake(), now)
        return conductor.handle(event, now)

    def post_block_events(self, instance: InstanceId, cache: NodeCache[Any]) -> None:
        """Report blocks that were added to or removed from the node's cache since the last call."""
        if self.cluster.detail == "step":
            cache.removed = [short_key(block_hash) for block_hash in cache.removed]
            cache.stored = [short_key(block_hash) for block_hash in cache.stored]
        if cache.removed:
            self.post(BlocksRemoved(instance, cache.removed, Tier.MEMORY))
            cache.removed = []
        if cache.stored:
            self.post(BlocksStored(instance, cache.stored, Tier.MEMORY))
            cache.stored = []
        if cache.ssd_removed:
            self.post(BlocksRemoved(instance, cache.ssd_removed, Tier.SSD))
            cache.ssd_removed = []
        if cache.ssd_stored:
            self.post(BlocksStored(instance, cache.ssd_stored, Tier.SSD))
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
        ttft_s = request.first_token_at - request.arrived_at
        recorder.status[number] = DONE
        recorder.e2e_s[number] = at - request.arrived_at
        recorder.tbt_s[number] = request.tbt_s
        num_intervals = request.num_output - 1
        recorder.tbt_mean_s[number] = (at - request.first_token_at) / num_intervals if num_intervals else 0.0
        self.sampler.num_open -= 1
        self.post(Finished(request.request_id, request.num_output, ttft_s, request.tbt_s, True))

    def give_up(self, request: SimRequest, status: int) -> None:
        """End the request here, without an answer."""
        self.recorder.status[request.number] = status
        self.sampler.num_open -= 1
        self.sampler.num_rejected += 1

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
        request = SimRequest(number, now, num_input, num_output, keys)
        if self.cluster.detail == "step":
            keys = self._with_tokens(request)
        place = Place(request.request_id, num_input, list(keys), lifetime_s=LIFETIME_S)
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

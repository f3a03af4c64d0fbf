"""One pool of nodes that prefill and decode alike: the baseline of disaggregated serving.

It owns the path of a request through such a node, and its metrics. The conductor chooses the node by its
decode policy, since there is no separate prefill.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mooncake.conductor.messages import Decision, Prefilled
from mooncake.conductor.settings import SchedulingSettings
from mooncake.sim.serving.cluster_base import ServingCluster
from mooncake.sim.serving.cluster_spec import ClusterSpec
from mooncake.sim.serving.colocated_node import ChunkedPrefillNode, ColocatedNode, PrefillFirstNode
from mooncake.sim.serving.node_cache import NodeCache
from mooncake.sim.serving.results import FAILED
from mooncake.sim.serving.sim_request import SimRequest
from mooncake.sim.serving.step_level import StepDecodeNode
from mooncake.types import WorkerRole


class ColocatedCluster(ServingCluster):
    def __init__(
        self,
        cluster: ClusterSpec,
        settings: SchedulingSettings,
        objectives: tuple[float, float],
        seed: int,
        progress: Callable[[int, float], None] | None,
    ) -> None:
        super().__init__(cluster, settings, objectives, seed, progress)
        self.nodes = [self._node(number) for number in range(cluster.num_prefill + cluster.num_decode)]
        self._by_id = {node.id: node for node in self.nodes}
        for node in self.nodes:
            self.join(node.id, WorkerRole.DECODE)

    def _node(self, number: int) -> ColocatedNode | StepDecodeNode:
        cluster, costs = self.cluster, self.costs
        if cluster.detail == "step":
            return StepDecodeNode(
                self.kernel,
                number,
                costs,
                cluster.scheduler(costs.device_tokens, cluster.step_tokens, cluster.max_batch),
                done=self._decoded,
                began=self._began,
                prefilled=self._prefilled,
            )
        cache = NodeCache(cluster.pool(costs.device_tokens))
        shared = (self.kernel, number, costs, cache)
        callbacks = (self._began, self._prefilled, self._decoded, self.post_step)
        if cluster.mode == "chunked":
            return ChunkedPrefillNode(*shared, False, cluster.max_batch, *callbacks, cluster.step_tokens)
        return PrefillFirstNode(*shared, cluster.mode == "prefix", cluster.max_batch, *callbacks)

    def caches(self) -> list[NodeCache[Any]]:
        return [node.cache for node in self.nodes]

    def check_end(self) -> None:
        for node in self.nodes:
            assert node.is_idle, node
            assert node.cache.pool.num_free == node.cache.pool.num_usable, node
            node.cache.check()

    def serve(self, journey: SimRequest, decision: Decision) -> None:
        node = self._by_id[decision.decode]
        journey.prefill = journey.decode = node.number
        self.recorder.prefill_instance[journey.number] = node.number
        self.recorder.decode_instance[journey.number] = node.number
        if not node.takes(journey):
            self.give_up(journey, FAILED)
            return
        journey.estimate_s = self.costs.prefill_s(0, journey.num_input)
        self.sampler.queued(journey)
        node.enqueue(journey)

    def _began(self, journey: SimRequest) -> None:
        self.recorder.cached_tokens[journey.number] = journey.cached_tokens
        self.sampler.began(journey)

    def _prefilled(self, journey: SimRequest, at: float) -> None:
        number, recorder, node = journey.number, self.recorder, self.nodes[journey.decode]
        recorder.ttft_s[number] = at - journey.arrived_at
        recorder.prefill_gpu_s[number] = journey.computed_s
        self.post_block_events(node.id, node.cache)
        num_computed = journey.num_input - journey.cached_tokens
        queued_s = journey.prefill_began_at - journey.arrived_at
        self.post(
            Prefilled(
                journey.request_id,
                queued_s,
                journey.computed_s,
                num_computed,
                journey.cached_tokens,
                has_begun=True,
            )
        )
        self.sampler.num_running += 1

    def _decoded(self, journey: SimRequest, at: float) -> None:
        self.sampler.num_running -= 1
        self.done(journey, at)

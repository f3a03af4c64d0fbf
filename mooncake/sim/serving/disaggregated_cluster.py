# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode on separate instances, with the KV transferred from one to the other.

It owns a request's path between the nodes: what the decision fetches from peers or from SSD starts at once;
the KV of a prompt goes to its decode instance layer by layer while the prompt is computed, so that after the
last layer only that layer's bytes remain. A request ends at its last token, or where the conductor refuses
it. With a pool, the blocks of a prompt go there in the same way.

Prefill nodes may be spot instances. An interruption takes the node out of the conductor's hands with all that
it had in memory; the requests whose prompt it had not computed are placed again, and wait where no other node
is up. Transfers under way complete: they take less than the notice that clouds give (30 s or more). Which
nodes are interrupted when is drawn from the seed, by node, so that it does not depend on the load.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any, TypeAlias

from mooncake.conductor.messages import (
    POOL,
    BlocksStored,
    Decision,
    Fetch,
    FetchMeasured,
    Finished,
    Prefilled,
    Refuse,
    RemoveInstance,
    TransferMeasured,
)
from mooncake.conductor.settings import SchedulingSettings
from mooncake.inference.blocks import NO_BLOCKS, BlockColumn
from mooncake.sim.serving.cluster import ClusterSpec, ServingCluster
from mooncake.sim.serving.fabric import Fabric, Port
from mooncake.sim.serving.nodes import DecodeNode, NodeCache, PrefillNode, SimRequest, StorePool
from mooncake.sim.serving.results import REJECTED_AFTER_PREFILL
from mooncake.sim.serving.step_level import StepDecodeNode, StepPrefillNode
from mooncake.types import WorkerRole

STEP_TOKENS = 8192
"""Tokens of a prefill instance's step, in the step-level mode."""

_Node: TypeAlias = PrefillNode | StepPrefillNode
_Load: TypeAlias = tuple[SimRequest, _Node, _Node | StorePool, BlockColumn, int, float]
"""(request, target, source, blocks pinned there, first block, begun at)."""


class DisaggregatedCluster(ServingCluster):
    def __init__(
        self,
        cluster: ClusterSpec,
        settings: SchedulingSettings,
        objectives: tuple[float, float],
        seed: int,
        progress: Callable[[int, float], None] | None,
    ) -> None:
        super().__init__(cluster, settings, objectives, seed, progress)
        costs = self.costs
        self._block_bytes = cluster.block_tokens * costs.kv_bytes_per_token
        self.fabric = Fabric(self.kernel, costs.nic_latency_s)
        self.prefill = [self._prefill_node(number) for number in range(cluster.num_prefill_instances)]
        self.decode = [self._decode_node(number) for number in range(cluster.num_decode)]
        self._prefill_by_id = {node.id: node for node in self.prefill}
        self._decode_by_id = {node.id: node for node in self.decode}
        for prefill in self.prefill:
            self.join(prefill.id, WorkerRole.PREFILL)
        for decode in self.decode:
            self.join(decode.id, WorkerRole.DECODE)
        self.pool = self._store_pool() if cluster.has_pool else None
        if self.pool is not None:
            self.post(BlocksStored(POOL, []))  # from now on the conductor has prefixes loaded from there
        self._waiting: list[SimRequest] = []
        """Requests that arrived or were interrupted while no prefill node is up."""
        if cluster.spot == "prefill" and cluster.interruptions_per_hour:
            self._randoms = [Random(f"interruptions {seed} {node.number}") for node in self.prefill]
            for node in self.prefill:
                self._plan_interruption(node)

    def _store_pool(self) -> StorePool:
        cluster, num_nodes = self.cluster, self.cluster.num_pool_nodes
        ssd = cluster.pool(num_nodes * cluster.store_ssd_tokens) if cluster.store_ssd_tokens else None
        cache = NodeCache(cluster.pool(num_nodes * cluster.pool_tokens), ssd)
        return StorePool(cache, num_nodes, self.costs if cluster.num_store else self.decode_costs)

    def _prefill_node(self, number: int) -> PrefillNode | StepPrefillNode:
        cluster, costs, kernel = self.cluster, self.costs, self.kernel
        num_nodes = cluster.pipeline_nodes
        cache_tokens = num_nodes * costs.cache_tokens
        if cluster.detail == "step":
            return StepPrefillNode(
                kernel,
                number,
                costs,
                cluster.scheduler(cache_tokens, STEP_TOKENS, 1),
                began=self._began,
                planned=self._planned,
                prefilled=self._prefilled,
            )
        ssd = cluster.pool(num_nodes * cluster.ssd_tokens) if cluster.ssd_tokens else None
        return PrefillNode(
            kernel,
            number,
            costs,
            NodeCache(cluster.pool(cache_tokens), ssd),
            num_stages=num_nodes,
            chunk_tokens=cluster.chunk_tokens,
            obeys_turns=cluster.obeys_turns,
            began=self._began,
            planned=self._planned,
            prefilled=self._prefilled,
        )

    def _decode_node(self, number: int) -> DecodeNode | StepDecodeNode:
        cluster, costs, kernel = self.cluster, self.decode_costs, self.kernel
        if cluster.detail == "step":
            max_batch = cluster.max_batch
            scheduler = cluster.scheduler(costs.device_tokens, max_batch, max_batch, has_external_cache=True)
            return StepDecodeNode(
                kernel,
                number,
                costs,
                scheduler,
                makes_first_token=self.costs.decode_makes_first_token,
                done=self._decoded,
            )
        return DecodeNode(
            kernel,
            number,
            costs,
            max_batch=cluster.max_batch,
            makes_first_token=self.costs.decode_makes_first_token,
            done=self._decoded,
            stepped=self.post_step,
        )

    def caches(self) -> list[NodeCache[Any]]:
        return [node.cache for node in self.prefill]

    def check_end(self) -> None:
        super().check_end()
        for node in self.prefill:
            assert not node.num_queued and not node.is_computing, node
            node.cache.check()
        for decode in self.decode:
            assert decode.is_idle, decode
        assert not self._waiting, self._waiting
        if self.pool is not None:
            self.pool.cache.check()

    # interruptions

    def _plan_interruption(self, node: _Node) -> None:
        mean_s = 3600 / self.cluster.interruptions_per_hour
        at = self.kernel.now + self._randoms[node.number].expovariate(1 / mean_s)
        self.kernel.call_at(at, self._interrupt, node)

    def _interrupt(self, node: PrefillNode) -> None:
        if not self.sampler.num_open and not self.sampler.has_more:
            return
        self.num_interruptions += 1
        self.post(RemoveInstance(node.id))
        del self._prefill_by_id[node.id]
        self.kernel.call_at(self.kernel.now + self.cluster.restart_s, self._restart, node.number)
        for request in node.interrupt():
            number = request.number
            if request.prefill_began_at < 0:
                self.sampler.withdrawn(request)
            else:
                self.recorder.num_retries[number] += 1
            again = request.begin_anew(self.kernel.now)
            self.recorder.prefill_gpu_s[number] = again.lost_s
            self.place(again)

    def _restart(self, number: int) -> None:
        node = self.prefill[number] = self._prefill_node(number)
        self._prefill_by_id[node.id] = node
        self.join(node.id, WorkerRole.PREFILL)
        self._plan_interruption(node)
        waiting, self._waiting = self._waiting, []
        for request in waiting:
            self.place(request)

    # placement

    def place(self, request: SimRequest) -> None:
        """As for every cluster. While no prefill node is up, a request waits at the gateway: decode nodes
        compute no prompts here."""
        if self._prefill_by_id:
            super().place(request)
        else:
            self._waiting.append(request)

    def serve(self, request: SimRequest, decision: Decision) -> None:
        assert decision.prefill is not None, decision
        node = self._prefill_by_id[decision.prefill]
        request.prefill, request.decode = node.number, self._decode_by_id[decision.decode].number
        self.recorder.prefill_instance[request.number] = request.prefill
        self.recorder.decode_instance[request.number] = request.decode
        request.turn = decision.turn
        if not node.takes(request) or not self.decode[request.decode].takes(request):
            self.fail(request)
            return
        num_cached = decision.num_cached_tokens
        for fetch in decision.fetches:
            self._fetch(request, node, fetch)
        if node.cache.ssd is not None:
            self._read_ssd(request, node)
        num_cached = max(num_cached, request.loads[-1][1] * self.cluster.block_tokens if request.loads else 0)
        request.estimate_s = self.costs.prefill_s(min(num_cached, request.num_input - 1), request.num_input)
        self.sampler.queued(request)
        node.enqueue(request)

    # loading what is cached elsewhere

    def _fetch(self, request: SimRequest, node: _Node, fetch: Fetch) -> None:
        source = self._source(fetch)
        end = fetch.first_block + fetch.num_blocks
        keys = request.keys[fetch.first_block : end]
        in_memory = source.cache.match_column(keys)
        num_on_ssd = source.cache.num_on_ssd(keys[len(in_memory) :])
        first = fetch.first_block
        if len(in_memory) and source is not node:
            source.cache.pin(in_memory)
            self._load(request, node, source, in_memory, first, len(in_memory), (source.out, node.into))
        if num_on_ssd:
            ports = (source.ssd,) if source is node else (source.ssd, source.out, node.into)
            self._load(request, node, source, NO_BLOCKS, first + len(in_memory), num_on_ssd, ports)

    def _source(self, fetch: Fetch) -> _Node | StorePool:
        if fetch.source == POOL:
            assert self.pool is not None, fetch
            return self.pool
        return self._prefill_by_id[fetch.source]

    def _read_ssd(self, request: SimRequest, node: _Node) -> None:
        """A node reads from its own SSD the blocks that follow those in its memory."""
        first = len(node.cache.match_column(request.keys))
        if not request.loads:
            num_on_ssd = node.cache.num_on_ssd(request.keys[first:])
            if num_on_ssd:
                self._load(request, node, node, NO_BLOCKS, first, num_on_ssd, (node.ssd,))

    def _load(
        self,
        request: SimRequest,
        node: _Node,
        source: _Node | StorePool,
        pinned: BlockColumn,
        first: int,
        num_blocks: int,
        ports: Sequence[Port],
    ) -> None:
        request.loads.append((first, first + num_blocks))
        request.fetched_tokens += num_blocks * self.cluster.block_tokens
        if not request.num_fetching:
            request.fetch_began_at = self.kernel.now
        request.num_fetching += 1
        load = (request, node, source, pinned, first, self.kernel.now)
        self.fabric.start(ports, num_blocks * self._block_bytes, self._loaded, load)

    def _loaded(self, load: _Load) -> None:
        request, node, source, pinned, first, began_at = load
        now = self.kernel.now
        if len(pinned):
            source.cache.unpin(pinned)
        if request.is_abandoned:
            return
        end = next(end for start, end in request.loads if start == first)
        keys = request.keys[first:end]
        num_known = len(node.cache.match(keys))
        node.cache.unpin(node.cache.keep(keys[num_known:]))
        self.post_block_events(node.id, node.cache)
        if isinstance(source, StorePool):
            self.post(FetchMeasured(node.id, (end - first) * self.cluster.block_tokens, now - began_at))
        elif source is not node:
            size_bytes = (end - first) * self._block_bytes
            self.post(TransferMeasured(source.id, node.id, size_bytes, now - began_at))
        request.num_fetching -= 1
        if not request.num_fetching:
            request.fetch_ended_at = now
            node.fetched(request)

    # prefill

    def _began(self, request: SimRequest) -> None:
        number, recorder = request.number, self.recorder
        recorder.cached_tokens[number] = request.cached_tokens
        recorder.fetched_tokens[number] = min(request.fetched_tokens, request.cached_tokens)
        recorder.prefill_gpu_s[number] = request.lost_s + request.computed_s
        self.sampler.began(request)

    def _planned(self, request: SimRequest, done_at: float) -> None:
        """Send the KV of all layers but the last while they are computed."""
        size_bytes = request.num_input * self.costs.kv_bytes_per_token
        bytes_per_s = min(self.costs.nic_bytes_per_s, self.decode_costs.nic_bytes_per_s)
        sending_s = size_bytes / bytes_per_s * (1 - 1 / self.costs.num_layers)
        if request.num_output > 1 or self.costs.decode_makes_first_token:
            self.kernel.call_at(max(self.kernel.now, done_at - sending_s), self._send, request)
        if self.pool is not None and (num_blocks := self.pool.num_missing(request.keys)):
            sending_s = num_blocks * self._block_bytes / self.costs.nic_bytes_per_s
            self.kernel.call_at(max(self.kernel.now, done_at - sending_s), self._write, request)

    def _write(self, request: SimRequest) -> None:
        """Write the blocks of its prompt that the pool does not have, while they are computed."""
        if self.pool is not None and not request.is_abandoned:
            ports = (self.prefill[request.prefill].out, self.pool.into)
            size_bytes = self.pool.num_missing(request.keys) * self._block_bytes
            self.fabric.start(ports, size_bytes, self._written, request)

    def _written(self, request: SimRequest) -> None:
        if self.pool is not None and not request.is_abandoned:
            self.pool.put(request.keys)
            self.post_block_events(POOL, self.pool.cache)

    def _send(self, request: SimRequest) -> None:
        if request.is_abandoned:
            return
        size_bytes = request.num_input * self.costs.kv_bytes_per_token
        ports = (self.prefill[request.prefill].out, self.decode[request.decode].into)
        self.fabric.start(ports, size_bytes, self._sent, request)

    def _prefilled(self, request: SimRequest) -> None:
        now, node = self.kernel.now, self.prefill[request.prefill]
        # Decode may join no sooner than this where it makes the first token.
        request.first_token_at = now + self.costs.first_token_s - self.delivery_s
        self.recorder.ttft_s[request.number] = request.first_token_at + self.delivery_s - request.arrived_at
        self.post_block_events(node.id, node.cache)
        fact = self._measured(request) if self.measures(node.id) else Prefilled(request.request_id)
        for effect in self.post(fact):
            if isinstance(effect, Refuse) and effect.request_id == request.request_id:
                self.give_up(request, REJECTED_AFTER_PREFILL)
                self.post(Finished(request.request_id))
                request.decode = -1
                return
        if request.num_output == 1 and not self.costs.decode_makes_first_token:
            self.done(request, request.first_token_at)

    def _measured(self, request: SimRequest) -> Prefilled:
        loaded_s = request.fetch_ended_at - request.fetch_began_at if request.loads else 0.0
        num_loaded = min(request.fetched_tokens, request.cached_tokens)
        return Prefilled(
            request.request_id,
            request.prefill_began_at - request.arrived_at,
            request.lasted_s,
            request.num_input - request.cached_tokens,
            request.cached_tokens - num_loaded,
            loaded_s,
            num_loaded,
        )

    # decode

    def _sent(self, request: SimRequest) -> None:
        if request.decode < 0 or request.is_abandoned:
            return  # rejected or interrupted meanwhile
        if request.first_token_at < 0:  # the last byte can't come before the last layer
            self.kernel.call_at(self.kernel.now, self._sent, request)
            return
        if self.costs.decode_makes_first_token and self.kernel.now < request.first_token_at:
            self.kernel.call_at(request.first_token_at, self._sent, request)
            return
        self.sampler.num_running += 1
        self.decode[request.decode].join(request)

    def _decoded(self, request: SimRequest, at: float) -> None:
        self.sampler.num_running -= 1
        self.done(request, at)

# SPDX-License-Identifier: Apache-2.0
"""One pool of nodes that prefill and decode alike: the baseline of disaggregated serving.

It owns the path of a request through such a node, its metrics, and the priority between prefill and decode.
The conductor chooses the node by its policy for prefill: the node computes the prompt. Prefill first (vLLM
before chunks): whenever a prompt waits and finds memory, it is computed next, and all decoding requests wait
for that. Chunked (Sarathi-Serve): a step has a budget of tokens; decoding requests take one each and prompts,
first come first served, the rest. Memory is the block pool of an engine: a request takes blocks for its
prompt and its whole answer when it begins.

With a pool (``ClusterSpec.store_tokens``) chunked nodes write the blocks of every prompt and answer to it.
Blocks that a node lacks and the pool has are loaded while others are computed, one prompt's after another's.
Steps meanwhile take longer where the cores that compute also copy (``NodeCosts.move_s_per_byte``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from mooncake.conductor.messages import Decision, Prefilled
from mooncake.conductor.settings import SchedulingSettings
from mooncake.sim.kernel import Kernel
from mooncake.sim.serving.cluster import ClusterSpec, ServingCluster
from mooncake.sim.serving.node_costs import NodeCosts
from mooncake.sim.serving.nodes import DecodeBatch, NodeCache, SimRequest
from mooncake.sim.serving.step_level import StepDecodeNode
from mooncake.types import WorkerRole


class ColocatedNode:
    """Blocks of prompts can be found again if ``keeps_blocks``."""

    def __init__(
        self,
        kernel: Kernel,
        number: int,
        costs: NodeCosts,
        cache: NodeCache[Any],
        keeps_blocks: bool,
        max_batch: int,
        began: Callable[[SimRequest], None],
        prefilled: Callable[[SimRequest, float], None],
        done: Callable[[SimRequest, float], None],
        stepped: Callable[[str, DecodeBatch], None],
    ) -> None:
        self.number = number
        self.id = f"pool-{number}"
        self.cache = cache
        self.batch = DecodeBatch(costs.decode)
        self.waiting: deque[SimRequest] = deque()
        self._kernel = kernel
        self._costs = costs
        self._block_tokens = cache.pool.block_tokens
        self._block_bytes = cache.pool.block_tokens * costs.kv_bytes_per_token
        self._keeps_blocks = keeps_blocks
        self._max_batch = max_batch
        self._version = 0
        self.pool: NodeCache[Any] | None = None
        """The pool of all nodes."""
        self._move_s = 0.0
        """How much longer the next step takes for the loads and saves that have begun."""
        self._began, self._prefilled, self._done, self._stepped = began, prefilled, done, stepped

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id} batch={len(self.batch)} waiting={len(self.waiting)})"

    @property
    def is_idle(self) -> bool:
        return not self.batch and not self.waiting

    def takes(self, request: SimRequest) -> bool:
        """Whether the request could ever fit."""
        return self._num_blocks(request) <= self.cache.pool.num_usable

    def enqueue(self, request: SimRequest) -> None:
        raise NotImplementedError

    def _num_blocks(self, request: SimRequest) -> int:
        return -(-(request.num_input + request.num_output) // self._block_tokens)

    def _admit(self, num_running: int) -> SimRequest | None:
        """Return the first waiting request, with its blocks; None when there is none or no room for it."""
        if not self.waiting or num_running >= self._max_batch:
            return None
        request, pool = self.waiting[0], self.cache.pool
        found = self.cache.match(request.keys) if self._keeps_blocks else []
        num_fresh = self._num_blocks(request) - len(found)
        if num_fresh > pool.num_free_after_touch(found):
            return None
        self.waiting.popleft()
        pool.touch(found)
        fresh = pool.allocate(num_fresh)
        assert fresh is not None
        request.block_ids = found + fresh
        request.cached_tokens = min(len(found) * self._block_tokens, request.num_input - 1)
        request.computed_to = request.cached_tokens
        return request

    def _computed(self, request: SimRequest, at: float) -> None:
        """The prompt is computed and its first token made."""
        if self._keeps_blocks:
            self._keep(request, -(-request.cached_tokens // self._block_tokens), request.keys)
        request.first_token_at = at
        self._prefilled(request, at)
        if request.num_output == 1:
            self._end(request, at)

    def _keep(self, request: SimRequest, first: int, keys: Sequence[Any]) -> None:
        """The blocks ``keys`` of the request hold their KV; those from ``first`` on are new here."""
        self.cache.name(request.block_ids[first : len(keys)], keys[first:])
        if self.pool is not None:
            known = self.pool.match(keys)
            self.pool.pin(known)
            self.pool.unpin(known + self.pool.keep(keys[len(known) :]))
            self._move_s += (len(keys) - len(known)) * self._block_bytes * self._costs.move_s_per_byte
            self.pool.removed = []
            self.pool.stored = []

    def _end(self, request: SimRequest, at: float) -> None:
        if self._keeps_blocks and len(request.all_keys) > len(request.keys):
            self._keep(request, len(request.keys), request.all_keys)
        self.cache.unpin(request.block_ids)
        request.block_ids = []
        self._done(request, at)


class PrefillFirstNode(ColocatedNode):
    _is_prefilling = False
    _paused_at = 0.0

    @property
    def is_idle(self) -> bool:
        return super().is_idle and not self._is_prefilling

    def enqueue(self, request: SimRequest) -> None:
        self.waiting.append(request)
        batch = self.batch
        if self._is_prefilling:
            return
        if not batch:
            batch.at = max(batch.at, self._kernel.now)
        else:
            num_steps = batch.steps_until(self._kernel.now)
            if num_steps >= batch.next_leave:
                return
            batch.advance(num_steps)
        self._next([])

    def _next(self, joining: list[SimRequest]) -> None:
        """Decide what comes after a step or a prompt. ``joining``: prompts computed since decoding paused."""
        batch = self.batch
        began_at = max(batch.at, self._kernel.now) if joining or self._is_prefilling else batch.at
        request = self._admit(len(batch) + len(joining))
        if request is not None:
            if not self._is_prefilling:
                self._is_prefilling, self._paused_at = True, batch.at
            request.prefill_began_at = began_at
            request.computed_s = self._costs.prefill_s(request.cached_tokens, request.num_input)
            self._version += 1
            self._began(request)
            self._kernel.call_at(began_at + request.computed_s, self._prompt_ended, (request, joining))
            return
        if self._is_prefilling:
            self._is_prefilling = False
            batch.pause(self._kernel.now - self._paused_at)
            for one in joining:
                batch.join(one)
        self._version += 1
        if batch:
            at = batch.at + batch.seconds(batch.next_leave)
            self._kernel.call_at(at, self._leave, self._version)

    def _prompt_ended(self, what: tuple[SimRequest, list[SimRequest]]) -> None:
        request, joining = what
        self._computed(request, self._kernel.now)
        self._next([*joining, request] if request.num_output > 1 else joining)

    def _leave(self, version: int) -> None:
        if version != self._version:
            return
        batch = self.batch
        self._stepped(self.id, batch)
        batch.advance(batch.next_leave)
        for request in batch.leave():
            self._end(request, batch.at)
        self._next([])


class ChunkedPrefillNode(ColocatedNode):
    def __init__(
        self,
        kernel: Kernel,
        number: int,
        costs: NodeCosts,
        cache: NodeCache[Any],
        keeps_blocks: bool,
        max_batch: int,
        began: Callable[[SimRequest], None],
        prefilled: Callable[[SimRequest, float], None],
        done: Callable[[SimRequest, float], None],
        stepped: Callable[[str, DecodeBatch], None],
        step_tokens: int,
    ) -> None:
        super().__init__(
            kernel, number, costs, cache, keeps_blocks, max_batch, began, prefilled, done, stepped
        )
        self._step_tokens = step_tokens
        self._prompts: deque[SimRequest] = deque()
        """Requests whose prompt is begun and not complete."""
        self._loading: set[int] = set()
        """Numbers of requests whose blocks come from the pool."""
        self._loaded: deque[SimRequest] = deque()
        """Requests whose blocks have come, and which the next step computes."""
        self._card_free_at = 0.0
        self._steps = 0
        """Number of steps of one kind that are under way."""
        self._pieces: list[tuple[SimRequest, int]] = []
        """What each of them computes of which prompt."""

    @property
    def is_idle(self) -> bool:
        return super().is_idle and not (self._prompts or self._loading or self._loaded)

    def enqueue(self, request: SimRequest) -> None:
        self.waiting.append(request)
        self._wake()

    def _wake(self) -> None:
        """Take what waits into the next step."""
        batch = self.batch
        if self._prompts:
            return
        if not batch:
            batch.at = max(batch.at, self._kernel.now)
        else:
            num_steps = batch.steps_until(self._kernel.now)
            if num_steps >= self._steps:
                return
            batch.advance(num_steps)
        self._plan()

    def _plan(self) -> None:
        """Decide at the end of a step what the next ones are, and how many are of that kind."""
        batch, budget = self.batch, max(1, self._step_tokens - len(self.batch))
        self._pieces = []
        num_same = 1 << 62
        for request in self._prompts:
            if budget:
                budget -= self._add_piece(request, budget)
        while budget and (admitted := self._next_prompt()) is not None:
            self._prompts.append(admitted)
            admitted.prefill_began_at = batch.at
            admitted.computed_s = 0.0
            self._began(admitted)
            budget -= self._add_piece(admitted, budget)
        batch.extra_s = batch.extra_growth_s = 0.0
        if self._pieces:
            seconds, growth = self._chunk_s()
            batch.extra_s = max(0.0, seconds - batch.model.base_s)
            batch.extra_growth_s = growth if batch.extra_s else 0.0
            num_same = 1
            if len(self._pieces) == 1:
                request, size = self._pieces[0]
                num_same = max(1, (request.num_input - request.computed_to - 1) // size)
        if self._move_s:  # with nothing to compute it delays nothing
            batch.extra_s += self._move_s
            self._move_s, num_same = 0.0, 1
        self._steps = min(num_same, batch.next_leave) if batch else num_same
        self._version += 1
        if batch or self._pieces:
            self._kernel.call_at(batch.at + batch.seconds(self._steps), self._stepped_on, self._version)

    def _next_prompt(self) -> SimRequest | None:
        """The next request whose blocks are here; loads of others are begun on the way."""
        if self._loaded:
            return self._loaded.popleft()
        while True:
            num_running = len(self.batch) + len(self._prompts) + len(self._loading)
            request = self._admit(num_running)
            if request is None or self.pool is None or not self._load(request):
                return request

    def _load(self, request: SimRequest) -> bool:
        """Begin to load what the pool has of the prompt; whether that is anything."""
        assert self.pool is not None
        num_own = -(-request.cached_tokens // self._block_tokens)
        found = self.pool.match(request.keys[num_own:])
        if not found:
            return False
        self.pool.pin(found)
        costs, now = self._costs, max(self._kernel.now, self.batch.at)
        size_bytes = len(found) * self._block_bytes
        self._move_s += size_bytes * costs.move_s_per_byte
        self._card_free_at = max(self._card_free_at, now) + size_bytes / costs.nic_bytes_per_s
        self._loading.add(request.number)
        at = self._card_free_at + costs.nic_latency_s
        self._kernel.call_at(at, self._load_ended, (request, num_own, found))
        return True

    def _load_ended(self, what: tuple[SimRequest, int, list[int]]) -> None:
        request, num_own, found = what
        assert self.pool is not None
        self.pool.unpin(found)
        end = num_own + len(found)
        self.cache.name(request.block_ids[num_own:end], request.keys[num_own:end])
        # The last token is always computed: its logits yield the first token of the answer.
        request.cached_tokens = min(end * self._block_tokens, request.num_input - 1)
        request.computed_to = request.cached_tokens
        request.fetched_tokens = request.cached_tokens - num_own * self._block_tokens
        self._loading.remove(request.number)
        self._loaded.append(request)
        self._wake()

    def _add_piece(self, request: SimRequest, budget: int) -> int:
        size = min(budget, request.num_input - request.computed_to)
        self._pieces.append((request, size))
        return size

    def _chunk_s(self) -> tuple[float, float]:
        """How long the prompts' part of the next step takes, and how much more each later one."""
        model = self._costs.prefill
        seconds = growth = 0.0
        for request, size in self._pieces:
            seconds += model.seconds(request.computed_to, request.computed_to + size)
            growth += 2 * model.c2 * size * size
        return seconds, growth

    def _stepped_on(self, version: int) -> None:
        if version != self._version:
            return
        batch, num_steps = self.batch, self._steps
        if batch and not self._pieces:
            self._stepped(self.id, batch)
        batch.advance(num_steps)
        model = self._costs.prefill
        for request, size in self._pieces:
            end = request.computed_to + num_steps * size
            request.computed_s += model.seconds(request.computed_to, end) + (num_steps - 1) * model.c0
            request.computed_to = end
        for request in batch.leave():
            self._end(request, batch.at)
        while self._prompts and self._prompts[0].computed_to >= self._prompts[0].num_input:
            request = self._prompts.popleft()
            self._computed(request, batch.at)
            if request.num_output > 1:
                batch.join(request)
        self._plan()


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
        if cluster.has_pool:
            pool = NodeCache(cluster.pool(cluster.num_pool_nodes * cluster.pool_tokens))
            for node in self.nodes:
                assert isinstance(node, ColocatedNode)
                node.pool = pool
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
        if cluster.mode in ("chunked", "chunked_prefix"):
            keeps_blocks = cluster.mode == "chunked_prefix"
            return ChunkedPrefillNode(
                *shared, keeps_blocks, cluster.max_batch, *callbacks, cluster.step_tokens
            )
        return PrefillFirstNode(*shared, cluster.mode == "prefix", cluster.max_batch, *callbacks)

    def caches(self) -> list[NodeCache[Any]]:
        return [node.cache for node in self.nodes]

    def check_end(self) -> None:
        super().check_end()
        for node in self.nodes:
            assert node.is_idle, node
            assert node.cache.pool.num_free == node.cache.pool.num_usable, node
            node.cache.check()

    def serve(self, request: SimRequest, decision: Decision) -> None:
        node = self._by_id[decision.decode]
        request.prefill = request.decode = node.number
        self.recorder.prefill_instance[request.number] = node.number
        self.recorder.decode_instance[request.number] = node.number
        if not node.takes(request):
            self.fail(request)
            return
        request.estimate_s = self.costs.prefill_s(0, request.num_input)
        self.sampler.queued(request)
        node.enqueue(request)

    def _post_blocks(self, node: ColocatedNode | StepDecodeNode) -> None:
        """Report what changed in the node's cache. An engine that has written a block to the pool publishes
        it as in its host's memory, and does not withdraw that when it evicts the block."""
        if self.cluster.has_pool:
            node.cache.removed = []
        self.post_block_events(node.id, node.cache)

    def _began(self, request: SimRequest) -> None:
        self.recorder.cached_tokens[request.number] = request.cached_tokens
        self.recorder.fetched_tokens[request.number] = request.fetched_tokens
        self.sampler.began(request)

    def _prefilled(self, request: SimRequest, at: float) -> None:
        number, recorder, node = request.number, self.recorder, self.nodes[request.decode]
        recorder.ttft_s[number] = at + self.delivery_s - request.arrived_at
        recorder.prefill_gpu_s[number] = request.computed_s
        self._post_blocks(node)
        num_computed = request.num_input - request.cached_tokens
        queued_s = request.prefill_began_at - request.arrived_at
        self.post(
            Prefilled(
                request.request_id,
                queued_s,
                request.computed_s,
                num_computed,
                request.cached_tokens,
                has_begun=True,
            )
        )
        self.sampler.num_running += 1

    def _decoded(self, request: SimRequest, at: float) -> None:
        self.sampler.num_running -= 1
        node = self.nodes[request.decode]
        self._post_blocks(node)
        self.done(request, at)

# SPDX-License-Identifier: Apache-2.0
"""A simulated prefill instance: its queue, what it has cached, and when a prompt is computed.

It does not choose its prompts or their order: the conductor does. One prompt computes at a time. Blocks
that come from other nodes or from SSD have been on their way since the decision; computing may begin when
the first layer is there, and ends no sooner than one layer's work after the last byte::

    decision        queue ends                        prefilled
       ├──── queue ────┼──────────── compute ─────────────┤
       ├───────── load, layer by layer ─────────────┤+1 layer

An instance may be a pipeline of several nodes (chunked pipeline parallelism): each has some of the layers,
a prompt's chunks follow one another through them, and the next prompt enters when the first node is free.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

from mooncake.sim.kernel import Kernel
from mooncake.sim.serving.fabric import Port
from mooncake.sim.serving.node_cache import NodeCache
from mooncake.sim.serving.node_costs import NodeCosts
from mooncake.sim.serving.sim_request import SimRequest


class PrefillNode:
    """``began`` is called when a prompt's computation begins, ``planned`` when its end is known,
    ``prefilled`` at that end."""

    def __init__(
        self,
        kernel: Kernel,
        number: int,
        costs: NodeCosts,
        cache: NodeCache[Any],
        *,
        num_stages: int = 1,
        chunk_tokens: int = 0,
        obeys_turns: bool = True,
        began: Callable[[SimRequest], None],
        planned: Callable[[SimRequest, float], None],
        prefilled: Callable[[SimRequest], None],
    ) -> None:
        self.number = number
        self.id = f"prefill-{number}"
        self.cache = cache
        self.out = Port(f"{self.id} out", costs.nic_bytes_per_s * num_stages)
        self.into = Port(f"{self.id} in", costs.nic_bytes_per_s * num_stages)
        self.ssd = Port(f"{self.id} ssd", costs.ssd_bytes_per_s * num_stages)
        self.is_computing = False
        self._kernel = kernel
        self._costs = costs
        self._block_tokens = cache.pool.block_tokens
        self._chunk_tokens = chunk_tokens
        self._obeys_turns = obeys_turns
        self._stage_free_at = [0.0] * num_stages
        self._queue: list[tuple[float, int, SimRequest]] = []
        self._began, self._planned, self._prefilled = began, planned, prefilled

    def __repr__(self) -> str:
        return f"PrefillNode({self.id} queue={len(self._queue)} {self.cache})"

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    def enqueue(self, request: SimRequest) -> None:
        turn = request.turn if self._obeys_turns else 0.0
        heapq.heappush(self._queue, (turn, request.number, request))
        if not self.is_computing:
            self._next(None)

    def fetched(self, request: SimRequest) -> None:
        """The last byte of what the request loads has arrived."""
        if request.prefill_began_at >= 0:
            self._run(request)

    def _next(self, _: object) -> None:
        self.is_computing = bool(self._queue)
        if not self._queue:
            return
        request = heapq.heappop(self._queue)[2]
        request.prefill_began_at = self._kernel.now
        request.block_ids = block_ids = self.cache.match(request.keys)
        self.cache.pin(block_ids)
        num_cached = len(block_ids)
        for first, end in request.loads:
            if first <= num_cached:
                num_cached = max(num_cached, end)
        # The last token is always computed: its logits yield the first token of the answer.
        request.cached_tokens = min(num_cached * self._block_tokens, request.num_input - 1)
        request.computed_s = self._costs.prefill_s(request.cached_tokens, request.num_input)
        request.lasted_s = request.computed_s
        self._began(request)
        if not request.num_fetching:
            self._run(request)

    def _run(self, request: SimRequest) -> None:
        """All loads are known: compute when the prompt will be done."""
        began_at, computed_s = request.prefill_began_at, request.computed_s
        if len(self._stage_free_at) > 1:
            done_at = self._through_stages(request)
            request.lasted_s = done_at - self._kernel.now
            self._kernel.call_at(self._stage_free_at[0], self._next, None)
        else:
            done_at = began_at + computed_s
            if request.fetch_ended_at > began_at:
                done_at = max(done_at, request.fetch_ended_at + computed_s / self._costs.num_layers)
        self._planned(request, done_at)
        self._kernel.call_at(done_at, self._done, request)

    def _done(self, request: SimRequest) -> None:
        self._keep(request)
        if len(self._stage_free_at) == 1:
            self._next(None)
        self._prefilled(request)

    def _keep(self, request: SimRequest) -> None:
        """What was computed stays in the cache until room is needed."""
        cache, keys, block_ids = self.cache, request.keys, request.block_ids
        if request.loads:  # what was loaded may have arrived meanwhile
            more = cache.match(keys[len(block_ids) :])
            cache.pin(more)
            block_ids = block_ids + more
        if len(block_ids) < len(keys):
            block_ids = block_ids + cache.keep(keys[len(block_ids) :])
        cache.unpin(block_ids)
        request.block_ids = []

    def _through_stages(self, request: SimRequest) -> float:
        """Compute the times of its chunks through the pipeline, behind the prompt before; return when the
        last one leaves."""
        costs, free_at, num_stages = self._costs, self._stage_free_at, len(self._stage_free_at)
        began_at = self._kernel.now
        first, end = request.cached_tokens, request.num_input
        overhead_s = request.computed_s - costs.prefill.seconds(first, end)
        hop_s = costs.nic_latency_s
        leaves_at = began_at
        for start in range(first, end, self._chunk_tokens):
            stop = min(start + self._chunk_tokens, end)
            chunk_s = costs.prefill.seconds(start, stop) - (costs.prefill.c0 if start > first else 0.0)
            stage_s = (chunk_s + overhead_s) / num_stages
            overhead_s = 0.0
            leaves_at = began_at
            for stage in range(num_stages):
                leaves_at = free_at[stage] = max(leaves_at, free_at[stage]) + stage_s
                leaves_at += hop_s
        return leaves_at - hop_s

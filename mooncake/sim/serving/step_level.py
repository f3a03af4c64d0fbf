# SPDX-License-Identifier: Apache-2.0
"""The same instances in full detail: the engine's own batch scheduler and block pool, step by step.

It owns a loop that stands for an engine's, and refuses to schedule: ``inference.scheduler.Scheduler`` does.
Prompts become token ids that share blocks exactly where the trace's keys do, blocks have real hashes. It is
for small traces, and to validate the closed forms of ``nodes.py``. What it shows and they leave out: a
new request joins a running batch one step later, after its lookup; blocks fill up and requests are preempted;
a prompt begins when all that it loads has arrived, as in an engine with other requests, not its first layer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable

from mooncake.inference.request import Request, SamplingParams
from mooncake.inference.scheduler import Chunk, Scheduler, Step
from mooncake.prefix import BlockHash
from mooncake.sim.kernel import Kernel
from mooncake.sim.serving.fabric import Port
from mooncake.sim.serving.node_costs import NodeCosts
from mooncake.sim.serving.nodes import NodeCache, SimRequest


def prompt_of(keys: Iterable[int], num_input: int, block_tokens: int, number: int) -> list[int]:
    """Token ids of a prompt: those of a block come from its key, those behind the last key are its own."""
    tokens: list[int] = []
    for key in keys:
        tokens += [key % (1 << 31)] * block_tokens
    return tokens[:num_input] + [(1 << 31) + number % (1 << 31)] * (num_input - len(tokens))


class EngineLoop:
    """An engine that either runs a step or is idle."""

    def __init__(self, kernel: Kernel, scheduler: Scheduler, costs: NodeCosts) -> None:
        self.scheduler = scheduler
        self.cache: NodeCache[BlockHash] = NodeCache(scheduler.pool)
        self.is_computing = False
        self.sim_requests: dict[str, SimRequest] = {}
        self._kernel = kernel
        self._costs = costs

    def add(self, sim_request: SimRequest, request: Request) -> None:
        self.sim_requests[request.id] = sim_request
        refusal = self.scheduler.add(request, self._kernel.now)
        assert refusal is None, refusal
        if not self.is_computing:
            self._next()

    def _next(self) -> None:
        now, scheduler = self._kernel.now, self.scheduler
        step = scheduler.schedule(now)
        for lookup in step.lookups:
            # The whole request is known: a decode instance receives it when its KV has arrived.
            block_ids = scheduler.lookup_finished(lookup.request.id, len(lookup.blocks), now)
            assert block_ids is not None
            scheduler.load_ready(lookup.request.id, now)
            scheduler.release(block_ids)
        if step.lookups and not step.chunks:
            step = scheduler.schedule(now)
        self.is_computing = bool(step.chunks)
        if step.chunks:
            self._kernel.call_at(now + self._begin(step), self._ended, step)

    def _begin(self, step: Step) -> float:
        """Begin a step; return how long it takes."""
        raise NotImplementedError

    def _ended(self, step: Step) -> None:
        for save in step.saves:
            self.scheduler.release(save.block_ids)
        sampled = [chunk.request for chunk in step.chunks if chunk.samples]
        tokens = {request.id: 7 for request in sampled}
        finished = self.scheduler.step_finished(step, tokens, (), self._kernel.now)
        self.cache.note_events()
        for request in sampled:
            self._made_token(self.sim_requests[request.id])
        for request in finished:
            self._finished(self.sim_requests.pop(request.id))
        self._next()

    def _made_token(self, sim_request: SimRequest) -> None:
        raise NotImplementedError

    def _finished(self, sim_request: SimRequest) -> None:
        raise NotImplementedError

    def _prompt_s(self, chunk: Chunk, sim_request: SimRequest) -> float:
        """Time to compute a prompt's chunk; the first one includes the fixed cost."""
        model = self._costs.prefill
        seconds = model.seconds(chunk.start, chunk.end)
        if sim_request.computed_to:
            seconds -= model.c0
        sim_request.computed_to = chunk.end
        return seconds


class StepPrefillNode(EngineLoop):
    """``PrefillNode`` over a scheduler that runs one prompt at a time."""

    def __init__(
        self,
        kernel: Kernel,
        number: int,
        costs: NodeCosts,
        scheduler: Scheduler,
        *,
        began: Callable[[SimRequest], None],
        planned: Callable[[SimRequest, float], None],
        prefilled: Callable[[SimRequest], None],
    ) -> None:
        super().__init__(kernel, scheduler, costs)
        self.number = number
        self.id = f"prefill-{number}"
        self.out = Port(f"{self.id} out", costs.nic_bytes_per_s)
        self.into = Port(f"{self.id} in", costs.nic_bytes_per_s)
        self.ssd = Port(f"{self.id} ssd", costs.ssd_bytes_per_s)
        self._began, self._planned, self._prefilled = began, planned, prefilled

    @property
    def num_queued(self) -> int:
        return self.scheduler.num_waiting

    def takes(self, sim_request: SimRequest) -> bool:
        """Whether its prompt and the token that ends the request here could ever fit."""
        return sim_request.num_input < self.scheduler.max_total_tokens

    def enqueue(self, sim_request: SimRequest) -> None:
        if not sim_request.num_fetching:
            self.fetched(sim_request)

    def fetched(self, sim_request: SimRequest) -> None:
        turn_ms = int(sim_request.turn * 1000)
        request = Request(
            sim_request.request_id, sim_request.token_ids, SamplingParams(max_tokens=1), priority=turn_ms
        )
        self.add(sim_request, request)

    def _begin(self, step: Step) -> float:
        seconds = 0.0
        for chunk in step.chunks:
            sim_request = self.sim_requests[chunk.request.id]
            if sim_request.prefill_began_at < 0:
                sim_request.prefill_began_at = self._kernel.now
                sim_request.cached_tokens = chunk.start
                sim_request.computed_s = self._costs.prefill_s(chunk.start, sim_request.num_input)
                sim_request.lasted_s = sim_request.computed_s
                seconds += sim_request.computed_s - self._costs.prefill.seconds(
                    chunk.start, sim_request.num_input
                )
                self._began(sim_request)
                self._planned(sim_request, self._kernel.now + sim_request.computed_s)
            seconds += self._prompt_s(chunk, sim_request)
        return seconds

    def _made_token(self, sim_request: SimRequest) -> None:
        pass

    def _finished(self, sim_request: SimRequest) -> None:
        self._prefilled(sim_request)


class StepDecodeNode(EngineLoop):
    """``DecodeNode`` over a scheduler; with ``prefilled``, a colocated node."""

    def __init__(
        self,
        kernel: Kernel,
        number: int,
        costs: NodeCosts,
        scheduler: Scheduler,
        *,
        done: Callable[[SimRequest, float], None],
        makes_first_token: bool = False,
        began: Callable[[SimRequest], None] | None = None,
        prefilled: Callable[[SimRequest, float], None] | None = None,
    ) -> None:
        super().__init__(kernel, scheduler, costs)
        self._makes_first_token = makes_first_token
        self.number = number
        self.id = f"decode-{number}" if prefilled is None else f"pool-{number}"
        self.into = Port(f"{self.id} in", costs.nic_bytes_per_s)
        self._instants: dict[str, list[float]] = {}
        self._done, self._began, self._prefilled = done, began, prefilled

    @property
    def is_idle(self) -> bool:
        return not self.sim_requests

    def takes(self, sim_request: SimRequest) -> bool:
        return sim_request.num_input + sim_request.num_output < self.scheduler.max_total_tokens

    def join(self, sim_request: SimRequest) -> None:
        """Add a request whose KV is here, and whose first token is made unless this node makes it."""
        if self._makes_first_token:
            self.enqueue(sim_request)
            return
        self._instants[sim_request.request_id] = [sim_request.first_token_at]
        sampling = SamplingParams(max_tokens=sim_request.num_output, ignore_eos=True)
        request = Request(
            sim_request.request_id, [*sim_request.token_ids, 7], sampling, num_prior_output_tokens=1
        )
        self.add(sim_request, request)

    def enqueue(self, sim_request: SimRequest) -> None:
        """Add a request that is to be computed here as a whole."""
        self._instants[sim_request.request_id] = []
        sampling = SamplingParams(max_tokens=sim_request.num_output, ignore_eos=True)
        self.add(
            sim_request,
            Request(sim_request.request_id, sim_request.token_ids, sampling, salt=sim_request.request_id),
        )

    def _begin(self, step: Step) -> float:
        model = self._costs.decode
        decode_s, prompt_s = 0.0, 0.0
        for chunk in step.chunks:
            sim_request = self.sim_requests[chunk.request.id]
            is_last_again = self._makes_first_token and chunk.num_cached == chunk.end
            if chunk.end > sim_request.num_input or is_last_again:
                decode_s += model.per_request_s + model.per_token_s * chunk.end
                continue
            if sim_request.prefill_began_at < 0:
                sim_request.prefill_began_at = self._kernel.now
                if self._began is not None:
                    self._began(sim_request)
            chunk_s = self._prompt_s(chunk, sim_request)
            sim_request.computed_s += chunk_s
            prompt_s += chunk_s
        return max(model.base_s, prompt_s) + decode_s

    def _made_token(self, sim_request: SimRequest) -> None:
        instants = self._instants[sim_request.request_id]
        instants.append(self._kernel.now)
        if len(instants) == 1:
            sim_request.first_token_at = self._kernel.now
            if self._prefilled is not None:
                self._prefilled(sim_request, self._kernel.now)

    def _finished(self, sim_request: SimRequest) -> None:
        instants = self._instants.pop(sim_request.request_id)
        intervals = sorted((b - a for a, b in itertools.pairwise(instants)), reverse=True)
        longest = intervals[: math.ceil(len(intervals) / 10)]
        sim_request.tbt_s = sum(longest) / len(longest) if longest else 0.0
        self._done(sim_request, self._kernel.now)

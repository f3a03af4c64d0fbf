# SPDX-License-Identifier: Apache-2.0
"""The simulated instances in closed form: a request's path, the KV cache of a node, prefill and decode.

They carry out what the conductor decides and decide nothing about placement. ``SimRequest`` is a record of
one request, moved by the nodes that serve it.

``NodeCache`` has the blocks in a node's memory, and behind them those on its SSD, with the events that the
conductor gets; the order of eviction is that of ``inference.blocks.BlockPool``, the same object that an
engine has. What leaves memory goes to SSD if there is one; what is read from SSD is in memory again.

``PrefillNode`` computes one prompt at a time, in the conductor's order. Blocks that come from other nodes or
from SSD have been on their way since the decision; computing may begin when the first layer is there, and
ends no sooner than one layer's work after the last byte::

    decision        queue ends                        prefilled
       ├──── queue ────┼──────────── compute ─────────────┤
       ├───────── load, layer by layer ─────────────┤+1 layer

An instance may be a pipeline of several nodes (chunked pipeline parallelism): each has some of the layers, a
prompt's chunks, cut by the plan of a live group, follow one another through them, and the next prompt enters
when the first node is free.

``DecodeBatch`` is continuous batching between two changes of a batch. A step takes ``base + per_request *
batch + per_token * context``; the context grows by the batch with every step, so n steps are a quadratic in
n, and neither a step nor a token needs an event of its own. A request's intervals are kept as runs (how many
steps, how long each on average) from which the mean of its longest ones is read when it ends::

    at                                                    a change at ``now`` takes effect
    ├──────┼──────┼───────┼───────┼───────┤               at the end of the step it falls into
                              now ┘

``DecodeNode`` owns the account of an instance's memory. A request takes memory for its prompt and its whole
answer when it joins, so that none is preempted; one that finds none waits in order of arrival.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic

from mooncake.conductor.prediction import DecodeModel
from mooncake.inference.blocks import BlockColumn, BlockPool, KeyT, PoolBlocksStored, joined
from mooncake.inference.pipeline import OVERHEAD_TOKENS, ChunkPlan, pass_through
from mooncake.sim.kernel import Kernel
from mooncake.sim.serving.fabric import Port
from mooncake.sim.serving.node_costs import NodeCosts


class SimRequest:
    """Instants are those of the kernel; -1 while they have not been reached."""

    __slots__ = (
        "all_keys",
        "arrived_at",
        "block_ids",
        "cached_tokens",
        "computed_s",
        "computed_to",
        "decode",
        "estimate_s",
        "fetch_began_at",
        "fetch_ended_at",
        "fetched_tokens",
        "first_run",
        "first_token_at",
        "is_abandoned",
        "keys",
        "lasted_s",
        "loads",
        "lost_s",
        "num_fetching",
        "num_input",
        "num_output",
        "number",
        "pinned",
        "predicted_tbt_s",
        "predicted_ttft_s",
        "prefill",
        "prefill_began_at",
        "request_id",
        "tbt_s",
        "token_ids",
        "turn",
        "wait_s",
    )

    def __init__(
        self, number: int, arrived_at: float, num_input: int, num_output: int, keys: Sequence[Any]
    ) -> None:
        self.number = number
        self.request_id = str(number)
        self.arrived_at = arrived_at
        self.num_input = num_input
        self.num_output = num_output
        self.keys = keys
        """Keys of its full blocks, as the nodes' caches know them."""
        self.all_keys: Sequence[Any] = ()
        """In a closed load: those of its prompt and its answer."""
        self.token_ids: list[int] = []
        """Token ids of its prompt; only in the step-level mode."""
        self.turn = 0.0
        """Among those that wait for the same instance, the lowest is next."""
        self.prefill = -1
        self.decode = -1
        self.predicted_ttft_s = 0.0
        self.predicted_tbt_s = 0.0
        self.estimate_s = 0.0
        """Expected duration of its prefill, while it waits."""
        self.num_fetching = 0
        """Number of fetches under way."""
        self.fetch_began_at = -1.0
        self.fetch_ended_at = -1.0
        self.loads: list[tuple[int, int]] = []
        """Ranges of its blocks (first, end) that come from elsewhere."""
        self.fetched_tokens = 0
        self.cached_tokens = 0
        """Tokens that were not computed: cached where it was prefilled, or fetched to there."""
        self.computed_s = 0.0
        self.lasted_s = 0.0
        """From the first chunk to the last; less than ``computed_s`` in a pipeline of nodes."""
        self.computed_to = 0
        """Tokens of its prompt whose KV is there, while it is computed in chunks."""
        self.prefill_began_at = -1.0
        self.first_token_at = -1.0
        self.block_ids: list[int] = []
        """Its pinned blocks on a node that computes prompts and decodes."""
        self.pinned: BlockColumn | None = None
        """Its pinned blocks on the node that prefills it."""
        self.first_run = 0
        self.wait_s = 0.0
        """From its first token to the step that makes the second one."""
        self.tbt_s = 0.0
        self.is_abandoned = False
        """Its node was interrupted, and another ``SimRequest`` has its place."""
        self.lost_s = 0.0
        """What earlier ones had computed of its prompt."""

    def __repr__(self) -> str:
        return f"SimRequest({self.request_id} {self.num_input}+{self.num_output} at {self.arrived_at:.3f})"

    def begin_anew(self, now: float) -> SimRequest:
        """Abandon this one; return one that has still to be placed."""
        self.is_abandoned = True
        again = SimRequest(self.number, self.arrived_at, self.num_input, self.num_output, self.keys)
        again.lost_s = self.lost_s
        if self.prefill_began_at >= 0:
            again.lost_s += min(self.computed_s, now - self.prefill_began_at)
        return again


class NodeCache(Generic[KeyT]):
    """``stored``, ``removed`` and the like collect the changes until the caller takes and empties them."""

    __slots__ = ("pool", "removed", "ssd", "ssd_removed", "ssd_stored", "stored")

    def __init__(self, pool: BlockPool[KeyT], ssd: BlockPool[KeyT] | None = None) -> None:
        self.pool = pool
        self.ssd = ssd
        self.stored: list[KeyT] = []
        self.removed: list[KeyT] = []
        self.ssd_stored: list[KeyT] = []
        self.ssd_removed: list[KeyT] = []

    def __repr__(self) -> str:
        return f"NodeCache({self.pool} ssd={self.ssd})"

    def match(self, keys: Sequence[KeyT]) -> list[int]:
        """Ids of the leading blocks in memory."""
        return self.pool.match(keys)

    def num_on_ssd(self, keys: Sequence[KeyT]) -> int:
        """How many of ``keys``, from the first on, are on SSD."""
        return len(self.ssd.match(keys)) if self.ssd is not None else 0

    def match_column(self, keys: Sequence[KeyT]) -> BlockColumn:
        """The same for a whole prompt."""
        return self.pool.match_column(keys)

    def pin(self, block_ids: Sequence[int] | BlockColumn) -> None:
        self.pool.touch(block_ids)

    def unpin(self, block_ids: Sequence[int] | BlockColumn) -> None:
        self.pool.free(block_ids)

    def keep(self, keys: Sequence[KeyT]) -> list[int]:
        """Keep new blocks, as many from the first on as find room; return their ids, pinned."""
        block_ids = self.pool.allocate(min(len(keys), self.pool.num_free))
        assert block_ids is not None
        self.name(block_ids, keys[: len(block_ids)])
        return block_ids

    def name(self, block_ids: Sequence[int], keys: Sequence[KeyT]) -> None:
        """These pinned blocks now hold ``keys``, and can be found."""
        if keys:
            self.pool.publish(block_ids, keys, keys[0])
        self.note_events()

    def note_events(self) -> None:
        """Record what the pool did since the last call as events."""
        for event in self.pool.drain_events():
            if isinstance(event, PoolBlocksStored):
                self.stored.extend(event.hashes)
            else:
                self.removed.extend(event.hashes)
                if self.ssd is not None:
                    self._demote(event.hashes)

    def _demote(self, keys: Sequence[KeyT]) -> None:
        ssd = self.ssd
        assert ssd is not None
        known = [key for key in keys if ssd.match((key,))]
        for key in known:  # they were used: move them to the end of the eviction order
            ids = ssd.match((key,))
            ssd.touch(ids)
            ssd.free(ids)
        held = dict.fromkeys(known)
        # Memory evicts a prompt's last blocks first, and so must the SSD: the others are of use without them.
        # Of blocks that are freed together, a pool evicts the last ones first.
        fresh = [key for key in reversed(keys) if key not in held][: ssd.num_free]
        block_ids = ssd.allocate(len(fresh))
        assert block_ids is not None
        if fresh:
            ssd.publish(block_ids, fresh, fresh[0])
        ssd.free(block_ids)
        for event in ssd.drain_events():
            if isinstance(event, PoolBlocksStored):
                self.ssd_stored.extend(event.hashes)
            else:
                self.ssd_removed.extend(event.hashes)

    def check(self) -> None:
        self.pool.check()
        if self.ssd is not None:
            self.ssd.check()


class StorePool:
    """The store's memory and SSD on all nodes where it has some, as one cache: objects are spread evenly over
    them, so every transfer uses all their cards alike."""

    def __init__(self, cache: NodeCache[Any], num_nodes: int, costs: NodeCosts) -> None:
        self.cache = cache
        self.out = Port("pool out", costs.nic_bytes_per_s * num_nodes)
        self.into = Port("pool in", costs.nic_bytes_per_s * num_nodes)
        self.ssd = Port("pool ssd", costs.ssd_bytes_per_s * num_nodes)

    def __repr__(self) -> str:
        return f"StorePool({self.cache})"

    def num_missing(self, keys: Sequence[Any]) -> int:
        """How many blocks of a prompt a prefill node writes: those not in memory, also where SSD has them."""
        return len(keys) - len(self.cache.match(keys))

    def put(self, keys: Sequence[Any]) -> None:
        """The blocks of a prompt are here: those that were, too, move to the end of the eviction order."""
        known = self.cache.match(keys)
        self.cache.pin(known)
        self.cache.unpin(known + self.cache.keep(keys[len(known) :]))


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
        self.is_interrupted = False
        """It is gone for good; what comes back is another node of this number."""
        self._kernel = kernel
        self._costs = costs
        self._capacity_tokens = costs.device_tokens * num_stages
        self._begun: dict[int, SimRequest] = {}
        """Requests whose prompt is begun and not computed, by number."""
        self._block_tokens = cache.pool.block_tokens
        self._plan: ChunkPlan | None = None
        if num_stages > 1:
            model, granularity = costs.prefill, min(self._block_tokens, chunk_tokens)
            # A token costs no less than a pair, so that there is a plan where tokens cost nothing.
            per_pair = 2 * model.c2 / max(model.c1, model.c2) if model.c2 else 0.0
            self._plan = ChunkPlan(num_stages, per_pair, OVERHEAD_TOKENS["cuda"], chunk_tokens, granularity)
        self._obeys_turns = obeys_turns
        self._stage_free_at = [0.0] * num_stages
        self._queue: list[tuple[float, int, SimRequest]] = []
        self._began, self._planned, self._prefilled = began, planned, prefilled

    def __repr__(self) -> str:
        return f"PrefillNode({self.id} queue={len(self._queue)} {self.cache})"

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    def takes(self, request: SimRequest) -> bool:
        """Whether the KV of its prompt fits into device memory: prompts are computed one at a time."""
        return request.num_input <= self._capacity_tokens

    def interrupt(self) -> list[SimRequest]:
        """End the node; return the requests whose prompt it has not computed, those that are begun first."""
        self.is_interrupted = True
        left = [*self._begun.values(), *(entry[2] for entry in sorted(self._queue))]
        self._begun, self._queue, self.is_computing = {}, [], False
        return left

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
        if self.is_interrupted:
            return
        self.is_computing = bool(self._queue)
        if not self._queue:
            return
        request = heapq.heappop(self._queue)[2]
        request.prefill_began_at = self._kernel.now
        self._begun[request.number] = request
        request.pinned = pinned = self.cache.match_column(request.keys)
        self.cache.pin(pinned)
        num_cached = len(pinned)
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
        if request.is_abandoned:
            return
        del self._begun[request.number]
        self._keep(request)
        if len(self._stage_free_at) == 1:
            self._next(None)
        self._prefilled(request)

    def _keep(self, request: SimRequest) -> None:
        """What was computed stays in the cache until room is needed."""
        cache, keys, pinned = self.cache, request.keys, request.pinned
        assert pinned is not None
        if request.loads:  # what was loaded may have arrived meanwhile
            more = cache.match(keys[len(pinned) :])
            cache.pin(more)
            pinned = joined(pinned, more)
        if len(pinned) < len(keys):
            pinned = joined(pinned, cache.keep(keys[len(pinned) :]))
        cache.unpin(pinned)
        cache.pool.remember(keys[: len(pinned)], pinned)
        request.pinned = None

    def _through_stages(self, request: SimRequest) -> float:
        """Compute the times of its chunks through the pipeline, behind the prompt before; return when the
        last one leaves."""
        assert self._plan is not None
        costs, free_at, num_stages = self._costs, self._stage_free_at, len(self._stage_free_at)
        first, end = request.cached_tokens, request.num_input
        overhead_s = request.computed_s - costs.prefill.seconds(first, end)
        start, leaves_at = first, self._kernel.now
        for stop in self._plan.cuts(first, end):
            chunk_s = costs.prefill.seconds(start, stop) - (costs.prefill.c0 if start > first else 0.0)
            stage_s = [(chunk_s + overhead_s) / num_stages] * num_stages
            leaves_at = pass_through(free_at, self._kernel.now, stage_s, costs.nic_latency_s)
            start, overhead_s = stop, 0.0
        return leaves_at


RUNS_KEPT = 2048
"""Number of runs after which those that no request needs are dropped."""

RUN_SPREAD = 0.02
RUN_PARTS = 8
"""A run whose steps differ by more than that share of their mean is split into this many."""

IntervalRun = tuple[int, float]
"""``num`` intervals of ``seconds`` each. With ``num`` 0, the next interval is longer by ``seconds``."""


class DecodeBatch:
    """The requests that one instance decodes, at the end of its step number ``step``."""

    __slots__ = ("at", "context", "dropped", "extra_growth_s", "extra_s", "leaving", "model", "runs", "step")

    def __init__(self, model: DecodeModel) -> None:
        self.model = model
        self.at = 0.0
        """When its last step ended (in the future while one is under way)."""
        self.step = 0
        self.context = 0
        """Tokens of all requests in the batch."""
        self.leaving: list[tuple[int, int, SimRequest]] = []
        """A heap of (step after which it ends, number, request)."""
        self.extra_s = 0.0
        """How much a chunk of a prompt lengthens the next step, and every later one more."""
        self.extra_growth_s = 0.0
        self.runs: list[IntervalRun] = []
        self.dropped = 0
        """Number of runs that were dropped before the first in ``runs``."""

    def __len__(self) -> int:
        return len(self.leaving)

    def seconds(self, num_steps: int) -> float:
        """How long the next ``num_steps`` steps take."""
        model, size = self.model, len(self.leaving)
        first = model.base_s + model.per_request_s * size + model.per_token_s * self.context + self.extra_s
        growth = model.per_token_s * size + self.extra_growth_s
        return num_steps * (first + growth * (num_steps - 1) / 2)

    def steps_until(self, now: float) -> int:
        """How many steps end before ``now``, including the one under way."""
        elapsed = now - self.at
        if elapsed <= 0:
            return 0
        model, size = self.model, len(self.leaving)
        growth = model.per_token_s * size + self.extra_growth_s
        first = model.base_s + model.per_request_s * size + model.per_token_s * self.context + self.extra_s
        b = first - growth / 2
        return math.ceil(2 * elapsed / (b + math.sqrt(b * b + 2 * growth * elapsed)) - 1e-9)

    def advance(self, num_steps: int) -> None:
        if num_steps:
            seconds = self.seconds(num_steps)
            if self.extra_growth_s * num_steps * num_steps > RUN_SPREAD * seconds:
                self._add_uneven(num_steps)
            else:
                self.runs.append((num_steps, seconds / num_steps))
            self.at += seconds
            self.step += num_steps
            self.context += num_steps * len(self.leaving)
            self.extra_s += num_steps * self.extra_growth_s

    def _add_uneven(self, num_steps: int) -> None:
        """The last steps take noticeably longer than the first: add several runs instead of one."""
        begun, begun_s = 0, 0.0
        for part in range(1, RUN_PARTS + 1):
            end = num_steps * part // RUN_PARTS
            if end > begun:
                end_s = self.seconds(end)
                self.runs.append((end - begun, (end_s - begun_s) / (end - begun)))
                begun, begun_s = end, end_s

    def pause(self, seconds: float) -> None:
        """No request in the batch gets a token for so long."""
        self.runs.append((0, seconds))
        self.at += seconds

    @property
    def next_leave(self) -> int:
        """Steps until the next request ends. The batch must not be empty."""
        return self.leaving[0][0] - self.step

    def join(self, request: SimRequest) -> None:
        """Add a request that has its first token and gets the second with the next step."""
        request.first_run = self.dropped + len(self.runs)
        request.wait_s = self.at - request.first_token_at
        self.context += request.num_input + 1
        heapq.heappush(self.leaving, (self.step + request.num_output - 1, request.number, request))

    def join_without_token(self, request: SimRequest) -> None:
        """Add a request whose first token the next step makes; ``make_first_tokens`` makes that step."""
        self.context += request.num_input
        heapq.heappush(self.leaving, (self.step + request.num_output, request.number, request))

    def make_first_tokens(self, joined: Sequence[SimRequest]) -> None:
        """Make a step, in which requests get their first token."""
        self.advance(1)
        for request in joined:
            request.first_run = self.dropped + len(self.runs)
            request.first_token_at = self.at
            request.wait_s = 0.0

    def leave(self) -> list[SimRequest]:
        """Remove the requests that are complete."""
        done: list[SimRequest] = []
        while self.leaving and self.leaving[0][0] <= self.step:
            request = heapq.heappop(self.leaving)[2]
            self.context -= request.num_input + request.num_output
            request.tbt_s = longest_mean(
                self.runs[request.first_run - self.dropped :], request.wait_s, request.num_output - 1
            )
            done.append(request)
        if done:
            self._drop_runs()
        return done

    def _drop_runs(self) -> None:
        if not self.leaving:
            oldest = self.dropped + len(self.runs)
        elif len(self.runs) > RUNS_KEPT:
            oldest = min(entry[2].first_run for entry in self.leaving)
        else:
            return
        del self.runs[: oldest - self.dropped]
        self.dropped = oldest


def longest_mean(runs: Iterable[IntervalRun], wait_s: float, num_intervals: int, share: float = 0.1) -> float:
    """Mean of the longest ``share`` of the intervals; the first one is longer by ``wait_s``."""
    pieces: list[tuple[float, int]] = []
    longer_s = wait_s
    for count, seconds in runs:
        if not count:
            longer_s += seconds
        elif longer_s > 0:
            pieces.append((seconds + longer_s, 1))
            if count > 1:
                pieces.append((seconds, count - 1))
            longer_s = 0.0
        else:
            pieces.append((seconds, count))
    pieces.sort(reverse=True)
    wanted = left = math.ceil(num_intervals * share)
    total_s = 0.0
    for seconds, count in pieces:
        taken = min(count, left)
        total_s += taken * seconds
        left -= taken
        if not left:
            break
    return total_s / wanted if wanted else 0.0


class DecodeNode:
    """``done(request, at)`` is called for every complete answer, ``stepped(node)`` repeatedly."""

    def __init__(
        self,
        kernel: Kernel,
        number: int,
        costs: NodeCosts,
        *,
        max_batch: int,
        makes_first_token: bool = False,
        done: Callable[[SimRequest, float], None],
        stepped: Callable[[str, DecodeBatch], None],
    ) -> None:
        self.number = number
        self.id = f"decode-{number}"
        self.into = Port(f"{self.id} in", costs.nic_bytes_per_s)
        self.batch = DecodeBatch(costs.decode)
        self.used_tokens = 0
        self._kernel = kernel
        self._capacity_tokens = costs.device_tokens
        self._max_batch = max_batch
        self._makes_first_token = makes_first_token
        self._waiting: deque[SimRequest] = deque()
        self._version = 0
        self._done, self._stepped = done, stepped

    def __repr__(self) -> str:
        return f"DecodeNode({self.id} batch={len(self.batch)} waiting={len(self._waiting)})"

    @property
    def is_idle(self) -> bool:
        return not self.batch and not self.used_tokens and not self._waiting

    def takes(self, request: SimRequest) -> bool:
        """Whether the request could ever fit."""
        return request.num_input + request.num_output <= self._capacity_tokens

    def join(self, request: SimRequest) -> None:
        """The KV of a request has arrived: it decodes from the next step on."""
        self._waiting.append(request)
        batch = self.batch
        if batch:
            num_steps = batch.steps_until(self._kernel.now)
            if num_steps >= batch.next_leave or not self._has_room(self._waiting[0]):
                return  # a request that leaves lets it in
            batch.advance(num_steps)
        self._admit()

    def _has_room(self, request: SimRequest) -> bool:
        needed = request.num_input + request.num_output
        return self.used_tokens + needed <= self._capacity_tokens and len(self.batch) < self._max_batch

    def _admit(self) -> None:
        batch, waiting = self.batch, self._waiting
        if not batch:
            batch.at = max(batch.at, self._kernel.now)
        joined: list[SimRequest] = []
        while waiting and self._has_room(waiting[0]):
            request = waiting.popleft()
            self.used_tokens += request.num_input + request.num_output
            if self._makes_first_token:
                batch.join_without_token(request)
                joined.append(request)
            else:
                batch.join(request)
        if joined:
            batch.make_first_tokens(joined)
        self._version += 1
        if batch:
            at = batch.at + batch.seconds(batch.next_leave)
            self._kernel.call_at(at, self._leave, self._version)

    def _leave(self, version: int) -> None:
        if version != self._version:
            return
        batch = self.batch
        self._stepped(self.id, batch)
        batch.advance(batch.next_leave)
        done, at = batch.leave(), batch.at
        for request in done:
            self.used_tokens -= request.num_input + request.num_output
        self._admit()
        for request in done:
            self._done(request, at)

# SPDX-License-Identifier: Apache-2.0
"""Chooses the tokens of each step, and the request that is preempted when blocks run out.

It owns the queues and every request's state; it does not know tensors, clocks, and how an external cache is
reached: it names lookups, loads and saves and receives their results. A ``Step`` is what it decided: what to
compute, to save and to look up, as requests and block ids. One step::

    step = scheduler.schedule(now)          # chunks to run, lookups to start, blocks to save
    ...run it...
    scheduler.step_finished(step, tokens, failed_loads, now)

Policy: a step has a token budget. Requests that decode come first (one token each), then prompts already
begun, chunk by chunk, then the others in order of (priority, arrival). A new request gets blocks for its
whole prompt at once, so a prompt that was begun can finish; only decoding grows. When growing finds no block,
the request that ranks last is preempted: its blocks are freed, its full ones stay in the index, and it is
computed again later. Chunked prefill with decodes first is Sarathi-Serve's; preemption by recomputation is
vLLM's.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence

from mooncake.errors import InvalidArgument, Refusal
from mooncake.inference.blocks import BlockPool
from mooncake.inference.pipeline import ChunkPlan
from mooncake.inference.request import (
    FINISHED,
    FIRST_LAYER_LOADED,
    FOUND,
    LOAD_FAILED,
    LOADED,
    LOOK_UP,
    NOT_LOOKED_UP,
    NOTHING_FOUND,
    PREEMPTED,
    PUSH_FAILED,
    FinishReason,
    Request,
    RequestState,
)
from mooncake.prefix import BlockHash


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """Positions ``[start, start + num_tokens)`` of one request, to be computed in one step."""

    request: Request
    start: int
    num_tokens: int
    num_cached: int
    """Positions below this one are in the cache already and must not be written again."""
    samples: bool
    """Whether the last position's logits are needed."""
    has_load: bool
    """Whether this is the first step after some of the cached positions were loaded, or while they are."""

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


@dataclasses.dataclass(frozen=True, slots=True)
class SavedBlock:
    """A block to be offered to the external cache."""

    hash: BlockHash
    num_tokens: int
    block_id: int


@dataclasses.dataclass(frozen=True, slots=True)
class SaveBlocks:
    """Blocks of one request that are complete once this step has run."""

    request: Request
    blocks: tuple[SavedBlock, ...]

    @property
    def block_ids(self) -> list[int]:
        return [block.block_id for block in self.blocks]


@dataclasses.dataclass(frozen=True, slots=True)
class PushBlocks:
    """Blocks of a request that are pushed to another worker: complete once this step has run."""

    request: Request
    transfer_id: str
    first: int
    """Index of the first of them."""
    block_ids: tuple[int, ...]
    num_blocks: int
    """Blocks of the prompt, or of all tokens of a request that another worker continues."""
    has_load: bool
    """Whether a load writes some of them during this step."""


@dataclasses.dataclass(frozen=True, slots=True)
class CacheLookup:
    """A lookup of leading blocks in the external cache; the last may be partial."""

    request: Request
    blocks: tuple[tuple[BlockHash, int], ...]
    """(hash, tokens) of each block."""


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of probabilities before temperature and truncation."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """The most likely (token id, logprob), best first."""


Sampled = tuple[list[int], list[TokenLogprobs | None]]
"""A token, with its log probabilities if wanted, for each chunk that samples, in the order of the chunks."""


@dataclasses.dataclass(slots=True)
class Step:
    """Work of one step."""

    chunks: list[Chunk] = dataclasses.field(default_factory=list)
    saves: list[SaveBlocks] = dataclasses.field(default_factory=list)
    pushes: list[PushBlocks] = dataclasses.field(default_factory=list)
    lookups: list[CacheLookup] = dataclasses.field(default_factory=list)
    gives_way_until: float | None = None
    """Time until which a prompt that could run waits for others whose lookups are under way."""
    awaits_layers: bool = False
    """Whether its only request is computed while its load arrives, layer by layer."""

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)


MAX_STORIES = 512

PRIORITY_YIELD_S = 0.05
"""How long a prompt that could begin waits for one of better priority whose lookup is under way."""

MIN_YIELD_TOKENS = 512
"""Blocks reserved right behind the prompt's for an answer's first tokens, if enough are blank."""


@dataclasses.dataclass(frozen=True)
class SchedulerSettings:
    """Bounds of a step and of the queues."""

    num_blocks: int
    """Blocks of the KV pool, one of which is scratch space."""
    block_tokens: int = 64
    """Tokens of one block."""
    max_model_len: int = 8192
    """Most tokens of prompt and answer together."""
    max_batch_tokens: int = 512
    """Token budget of one step. Larger steps prefill faster and make decoding requests wait longer."""
    saturating_tokens: int = 0
    """Prompt tokens that keep the device busy: prompts share a step only up to this sum. Prompts in one step
    all end with it; one after another takes as long in total, but the shorter ones end sooner (DistServe,
    §3.1). 0: prompts share a step until the budget is used up."""
    max_running: int = 64
    """Most requests that hold blocks at the same time."""
    max_waiting: int = 1024
    """Most requests that wait; one more is refused."""
    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end an answer."""
    chunk_plan: ChunkPlan | None = None
    """How a prompt is cut for a pipeline of stages; None: into chunks as long as the budget."""
    has_external_cache: bool = False
    """Whether prompts are looked up in, and blocks saved to, a cache outside this process."""

    def __post_init__(self) -> None:
        for field in ("block_tokens", "max_model_len", "max_batch_tokens", "max_running", "max_waiting"):
            if getattr(self, field) < 1:
                raise InvalidArgument(field, getattr(self, field), "at least 1")
        if self.num_blocks < 2:
            raise InvalidArgument("num_blocks", self.num_blocks, "at least 2")
        if self.saturating_tokens < 0:
            raise InvalidArgument("saturating_tokens", self.saturating_tokens, "at least 0")
        if self.max_running > self.max_batch_tokens:
            allowed = f"at most max_batch_tokens ({self.max_batch_tokens})"
            raise InvalidArgument("max_running", self.max_running, allowed)


class Scheduler:
    """Continuous batching over one block pool."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self.settings = settings
        self.pool: BlockPool[BlockHash] = BlockPool(settings.num_blocks, settings.block_tokens)
        self._waiting: list[Request] = []
        self._admitted: dict[str, Request] = {}
        self._loading: dict[str, Request] = {}
        """Admitted requests that are loaded and have run no step since; a subset of ``_admitted``."""
        self._has_first_layer: set[str] = set()
        """Those of them whose first layer has arrived, and maybe not the others."""
        self._to_look_up: dict[str, Request] = {}
        """Admitted requests whose push has failed, and whose blocks are looked up in the next step."""
        self._ended_pushes: list[str] = []
        """Transfers of which not everything will be pushed, since the last call of ``take_ended_pushes``."""
        self._num_pinned = 0
        """References held for saves, pushes and loads, in addition to those of requests."""
        self._num_arrived = 0
        self.num_preemptions = 0
        self._stories: OrderedDict[str, deque[str]] = OrderedDict()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Number of requests that hold blocks."""
        return len(self._admitted)

    @property
    def num_context_tokens(self) -> int:
        """Number of tokens in blocks, those that requests share counted for each; any thread may ask."""
        return sum(request.num_computed_tokens for request in list(self._admitted.values()))

    @property
    def requests(self) -> list[Request]:
        """All unfinished requests."""
        return [*self._admitted.values(), *self._waiting]

    @property
    def max_total_tokens(self) -> int:
        """Most tokens of prompt plus answer; the last token needs no block."""
        return min(self.settings.max_model_len, self.pool.num_usable * self.settings.block_tokens + 1)

    # ── arrival and end of requests ─────────────────────────────────────────────────────────────

    def refusal(self, request: Request, num_ahead: int = 0) -> Refusal | None:
        """Why ``request`` can't be taken, or None. ``num_ahead``: requests not added yet."""
        longest = self.max_total_tokens - 1
        if request.num_prompt_tokens > longest:
            reason = f"the prompt has {request.num_prompt_tokens} tokens; this worker takes up to {longest}"
            return Refusal("context_length_exceeded", reason)
        num_ahead += len(self._waiting)
        if num_ahead >= self.settings.max_waiting:
            reason = f"{num_ahead} requests are waiting; the limit is {self.settings.max_waiting}"
            return Refusal("queue_full", reason)
        return None

    def add(self, request: Request, now: float) -> Refusal | None:
        """Queue ``request``, or say why not."""
        if (refused := self.refusal(request)) is None:
            self.accept(request, now)
        return refused

    def accept(self, request: Request, now: float) -> None:
        """Queue a request that ``refusal`` has let pass, whatever waits now."""
        self._num_arrived += 1
        request.sequence = self._num_arrived
        request.timings.arrival = now
        self._enqueue(request)
        self._note(request, now, f"arrived prompt={request.num_prompt_tokens}")

    def abort(self, request_id: str, now: float) -> Request | None:
        """Forget a request; its blocks are freed except those that a load or save still holds."""
        request = self._admitted.get(request_id)
        if request is None:
            request = next((r for r in self._waiting if r.id == request_id), None)
        if request is not None:
            self._finish(request, FinishReason.ABORT, now)
        return request

    def hand_over(self, request_id: str, transfer_id: str, now: float) -> Request | None:
        """End a request, which another worker continues after the tokens that it has now.

        One that is computed runs once more, so that the KV of its last token is there, and pushes all of it
        under ``transfer_id``; what that step samples is discarded, as the other worker samples it. Without a
        ``transfer_id``, and before it is computed, it ends at once and is returned.
        """
        request = self._admitted.get(request_id)
        if request is None:
            request = next((r for r in self._waiting if r.id == request_id), None)
        if request is None or request.is_leaving or request.save_tail:
            return None
        if transfer_id and request.state is RequestState.RUNNING and not request.awaits_token:
            request.is_leaving = True
            request.push_id, request.num_pushed_blocks = transfer_id, 0
            request.num_push_tokens = request.num_tokens
            self._note(request, now, f"leaves at {request.num_tokens} tokens")
            return None
        if transfer_id:
            # Or the other worker would wait for a push that never begins.
            self._ended_pushes.append(transfer_id)
        self._finish(request, FinishReason.MOVED, now)
        return request

    def fail(self, request: Request, error: str, now: float) -> None:
        """End a request whose step failed."""
        request.error = error
        self._finish(request, FinishReason.ERROR, now)

    # ── one step ────────────────────────────────────────────────────────────────────────────────

    def schedule(self, now: float) -> Step:
        """The next step. An empty one means that nothing can run until the scheduler receives an event."""
        step = Step(awaits_layers=self._runs_while_it_loads(now))
        self._look_up_again(step, now)
        budget = self.settings.max_batch_tokens
        running = [
            r for r in self._admitted.values() if r.state is RequestState.RUNNING and not r.awaits_token
        ]
        running.sort(key=lambda request: request.rank)
        decoding = [request for request in running if request.num_uncomputed_tokens <= 1]
        for request in decoding:
            if request.state is RequestState.RUNNING and self._grow(request, step, now):
                budget -= self._run(request, 1, step)
        # A request preempted for a growing answer waits again; the others stay in rank, those begun first.
        prompts = [r for r in running if r.state is RequestState.RUNNING and r.num_uncomputed_tokens > 1]
        prompts.sort(key=lambda request: not request.is_begun)
        num_shared = 0
        while (prompt := self._next_prompt(prompts, num_shared, budget, step, now)) is not None:
            num_tokens = self._run(prompt, budget, step)
            num_shared, budget = num_shared + num_tokens, budget - num_tokens
        for chunk in step.chunks:
            if chunk.request.timings.started is None:
                chunk.request.timings.started = now
        return step

    def step_begun(self, step: Step, failed_loads: Collection[str], now: float) -> None:
        """Apply a step of a pipeline, whose later stages compute it in the order of the steps.

        Chunks that don't sample count as computed: whatever uses their blocks comes later in every stage.
        Those that sample wait for ``step_finished``. Requests in ``failed_loads`` start again.
        """
        for chunk in step.chunks:
            request = chunk.request
            if request.id in failed_loads:
                self.load_failed(request.id, now)
                continue
            self._end_load(request.id)
            request.num_computed_tokens = max(request.num_computed_tokens, chunk.end)
            request.awaits_token = chunk.samples
            self._publish(request)

    def step_finished(
        self, step: Step, tokens: Mapping[str, int], failed_loads: Collection[str], now: float
    ) -> list[Request]:
        """Apply a step that ran: ``tokens`` are the sampled ones by request id.

        Requests in ``failed_loads`` computed on missing keys: their results are discarded and they
        start again from their local prefix. Returns the requests that finished.
        """
        finished = []
        for chunk in step.chunks:
            request = chunk.request
            request.awaits_token = False
            if request.state is not RequestState.RUNNING:
                continue
            if request.id in failed_loads:
                self.load_failed(request.id, now)
                continue
            self._end_load(request.id)
            if request.push_source is not None:
                request.push_source = None
                request.was_pushed = request.num_external_cached_tokens > 0
            request.num_computed_tokens = max(request.num_computed_tokens, chunk.end)
            self._publish(request)
            if chunk.samples and request.is_leaving:
                request.finish_reason = FinishReason.MOVED
            elif chunk.samples:
                self._append(request, tokens[request.id], now)
            if request.finish_reason is not None:
                self._finish(request, request.finish_reason, now)
                finished.append(request)
        return finished

    # ── the external cache ──────────────────────────────────────────────────────────────────────

    def lookup_finished(self, request_id: str, num_blocks: int, now: float) -> list[int] | None:
        """Block ids to load into, given that the cache has ``num_blocks`` of the requested blocks.

        None: there is nothing to load, the request runs without. The blocks returned have an extra
        reference, to be released (``release``) when nothing writes into them.
        """
        request = self._admitted[request_id]
        if num_blocks == 0:
            request.move(NOTHING_FOUND)
            self._note(request, now, "external cache has nothing")
            return None
        first = request.num_computed_tokens // self.settings.block_tokens
        block_ids = request.block_ids[first : first + num_blocks]
        covered = min((first + num_blocks) * self.settings.block_tokens, request.num_tokens)
        request.num_external_cached_tokens = covered - request.num_computed_tokens
        request.num_computed_tokens = covered
        request.move(FOUND)
        self._loading[request_id] = request
        self._pin(block_ids)
        self._note(request, now, f"loading external={request.num_external_cached_tokens}")
        return block_ids

    def first_layer_loaded(self, request_id: str) -> None:
        """Let a request run while the other layers of its load arrive, as long as it is alone.

        A step waits for every layer in turn, and all of its requests with it: so a request that is not alone
        waits for ``load_ready``."""
        if self._admitted[request_id].state is RequestState.LOADING:
            self._has_first_layer.add(request_id)

    def load_ready(self, request_id: str, now: float) -> None:
        """Let a request join a step, since all layers of its load have arrived."""
        request = self._admitted[request_id]
        if request.state is RequestState.LOADING:
            request.move(LOADED)
            self._note(request, now, "loaded")

    def load_failed(self, request_id: str, now: float) -> None:
        """Compute what a load should have written; it failed and writes no more.

        If another worker should have written it, it is looked up in the external cache first."""
        request = self._loading[request_id]
        self._end_load(request_id)
        request.num_computed_tokens = request.num_local_cached_tokens
        request.num_external_cached_tokens = 0
        request.num_saved_blocks = self._num_blocks_known_saved(request)
        request.is_tail_saved = False
        self._end_push(request)
        if request.push_source is not None:
            request.push_source = None
            request.move(PUSH_FAILED)
            self._to_look_up[request_id] = request
            self._note(request, now, "push failed; looking it up")
            return
        request.move(LOAD_FAILED)
        self._note(request, now, f"load failed; recomputing from {request.num_computed_tokens}")

    def take_ended_pushes(self) -> list[str]:
        """Transfers that have begun, or been announced, and of which not everything will be pushed."""
        ended, self._ended_pushes = self._ended_pushes, []
        return ended

    def release(self, block_ids: Sequence[int]) -> None:
        """Release the extra reference that a load, a save or a push had on these blocks."""
        self._num_pinned -= len(block_ids)
        self.pool.free(block_ids)

    # ── for tests and diagnosis ─────────────────────────────────────────────────────────────────

    def check(self) -> None:
        self.pool.check()
        assert self._waiting == sorted(self._waiting, key=lambda request: request.rank)
        num_references = self._num_pinned
        for request in self._admitted.values():
            num_references += len(request.block_ids)
            capacity = len(request.block_ids) * self.settings.block_tokens
            assert request.num_computed_tokens <= min(capacity, request.num_tokens), request
            assert len(set(request.block_ids)) == len(request.block_ids), f"{request} holds a block twice"
            assert request.num_published_blocks <= len(request.block_ids), request
            assert request.state in (RequestState.LOOKING, RequestState.LOADING, RequestState.RUNNING), (
                request
            )
        for request in self._waiting:
            assert request.state is RequestState.WAITING and not request.block_ids, request
        assert sum(self.pool._references) == num_references, "references do not add up"
        assert self._loading.keys() <= self._admitted.keys()
        assert self._has_first_layer <= self._loading.keys()
        assert all(one.state is RequestState.LOOKING for one in self._to_look_up.values())
        assert self._to_look_up.keys() <= self._admitted.keys()
        assert len(self._admitted) <= self.settings.max_running

    def story(self, request_id: str) -> list[str]:
        """What happened to a request and why, oldest first."""
        return list(self._stories.get(request_id, ()))

    def __repr__(self) -> str:
        return f"Scheduler(running={self.num_running} waiting={self.num_waiting} {self.pool})"

    # ── decisions ───────────────────────────────────────────────────────────────────────────────

    def _admit(self, request: Request, now: float) -> bool:
        """Give the first waiting request blocks for all its tokens, cached ones first."""
        block_tokens = self.settings.block_tokens
        found = self.pool.match(request.hash_blocks(block_tokens))
        num_needed = -(-request.num_tokens // block_tokens) - len(found)
        # Every running request may soon need one more block; a new one that would be preempted for it waits.
        if num_needed + len(self._admitted) > self.pool.num_free_after_touch(found):
            return False
        self._waiting.pop(0)
        self.pool.touch(found)
        num_to_come = min(request.sampling.max_tokens - request.num_output_tokens, MIN_YIELD_TOKENS)
        headroom = -(-num_to_come // block_tokens)
        fresh = self.pool.allocate(num_needed, found[-1] if found else None, headroom)
        assert fresh is not None
        request.block_ids = found + fresh
        request.num_local_cached_tokens = len(found) * block_tokens
        request.num_computed_tokens = request.num_local_cached_tokens
        request.num_external_cached_tokens = 0
        request.num_published_blocks = len(found)
        request.num_saved_blocks = self._num_blocks_known_saved(request)
        self._admitted[request.id] = request
        if request.timings.admitted is None:
            request.timings.admitted = now
        self._note(
            request, now, f"admitted local={request.num_local_cached_tokens} blocks={len(request.block_ids)}"
        )
        return True

    def _runs_while_it_loads(self, now: float) -> bool:
        """Let the only request there is run with the first layer of its load; False if it doesn't."""
        if self._waiting or len(self._admitted) != 1:
            return False
        [request] = self._admitted.values()
        if request.state is not RequestState.LOADING or request.id not in self._has_first_layer:
            return False
        request.move(FIRST_LAYER_LOADED)
        self._note(request, now, "first layer loaded; alone")
        return True

    def _end_load(self, request_id: str) -> None:
        self._loading.pop(request_id, None)
        self._has_first_layer.discard(request_id)

    def _look_up_again(self, step: Step, now: float) -> None:
        """Start the lookups of blocks that were not pushed."""
        requests, self._to_look_up = self._to_look_up, {}
        for request in requests.values():
            if blocks := self._missing_blocks(request):
                request.looked_up_at = now
                step.lookups.append(CacheLookup(request, blocks))
            else:
                request.move(NOTHING_FOUND)

    def _look_up(self, request: Request, step: Step, now: float) -> bool:
        """Start a lookup of the blocks that are not cached here; False when there are none."""
        blocks = self._missing_blocks(request)
        if not blocks:
            return False
        request.move(LOOK_UP)
        request.looked_up_at = now
        step.lookups.append(CacheLookup(request, blocks))
        return True

    def _missing_blocks(self, request: Request) -> tuple[tuple[BlockHash, int], ...]:
        """(hash, tokens) of the blocks that the external cache may have and that are not cached here."""
        if not self.settings.has_external_cache or request.num_computed_tokens >= request.num_tokens:
            return ()
        block_tokens = self.settings.block_tokens
        hashes = request.hash_blocks(block_tokens)[request.num_computed_tokens // block_tokens :]
        blocks = [(block_hash, block_tokens) for block_hash in hashes]
        if request.tail_hash is not None and request.num_tokens == request.num_prompt_tokens:
            blocks.append((request.tail_hash, request.num_tokens % block_tokens))
        if request.max_external_tokens is not None:
            blocks = blocks[
                : max(0, request.max_external_tokens - request.num_computed_tokens) // block_tokens
            ]
        return tuple(blocks)

    def _grow(self, request: Request, step: Step, now: float) -> bool:
        """Make room for the next token, preempting others or, if it ranks last, the request itself."""
        if request.num_tokens <= len(request.block_ids) * self.settings.block_tokens:
            return True
        while (block := self.pool.allocate(1, request.block_ids[-1])) is None:
            in_step = {chunk.request.id for chunk in step.chunks}
            victims = [
                other
                for other in self._admitted.values()
                if other.state is RequestState.RUNNING
                and not other.awaits_token
                and other.id not in in_step
                and other.id not in self._loading
            ]
            victim = max(victims, key=lambda other: other.rank, default=request)
            self._preempt(victim, now)
            if victim is request:
                return False
        request.block_ids += block
        return True

    def _next_prompt(
        self, ready: list[Request], num_shared: int, budget: int, step: Step, now: float
    ) -> Request | None:
        """The next prompt to join the step, out of ``ready`` or admitted now; None when no other can."""
        while len(self._admitted) < self.settings.max_running and self._waiting:
            request = self._waiting[0]
            if ready and (ready[0].is_begun or ready[0].rank < request.rank):
                break
            # How much the cache saves is known only once it is admitted, and then it must run.
            if not self._joins(request.num_tokens, num_shared, budget):
                return None
            if not self._admit(request, now):
                break
            if not self._look_up(request, step, now):
                request.move(NOT_LOOKED_UP)
                return request
        if not ready or not self._joins(ready[0].num_uncomputed_tokens, num_shared, budget):
            return None
        if not ready[0].is_begun and (until := self._gives_way_until(ready[0])) > now:
            step.gives_way_until = until
            return None
        return ready.pop(0)

    def _joins(self, num_tokens: int, num_shared: int, budget: int) -> bool:
        """Whether a prompt of ``num_tokens`` may join a step with ``num_shared`` prompt tokens so far."""
        most = self.settings.saturating_tokens or self.settings.max_batch_tokens
        return budget > 0 and (not num_shared or num_shared + min(num_tokens, budget) <= most)

    def _gives_way_until(self, request: Request) -> float:
        """Time until which a prompt waits for those of better rank that are being looked up.

        A prompt that was begun is not interrupted by others; without the wait, the first of a burst to arrive
        would begin before the first in priority."""
        return max(
            (
                other.looked_up_at + PRIORITY_YIELD_S
                for other in self._admitted.values()
                if other.state in (RequestState.LOOKING, RequestState.LOADING)
                and other.priority < request.priority
            ),
            default=0.0,
        )

    def _run(self, request: Request, budget: int, step: Step) -> int:
        """Add a chunk of up to ``budget`` tokens; returns its size."""
        # A prompt that is cached to its last token still needs that token's logits.
        start = min(request.num_computed_tokens, request.num_tokens - 1)
        num_tokens = min(budget, request.num_tokens - start)
        if self.settings.chunk_plan is not None:
            first = min(request.num_local_cached_tokens + request.num_external_cached_tokens, start)
            planned = self.settings.chunk_plan.chunk_end(first, start, request.num_tokens)
            num_tokens = min(num_tokens, planned - start)
        chunk = Chunk(
            request=request,
            start=start,
            num_tokens=num_tokens,
            num_cached=request.num_computed_tokens,
            samples=start + num_tokens == request.num_tokens,
            has_load=request.id in self._loading,
        )
        step.chunks.append(chunk)
        if self.settings.has_external_cache:
            self._save(chunk, step)
            if request.push_id:
                self._push(chunk, step)
        return num_tokens

    def _save(self, chunk: Chunk, step: Step) -> None:
        """Offer the blocks that this chunk completes to the external cache."""
        request, block_tokens = chunk.request, self.settings.block_tokens
        hashes = request.hash_blocks(block_tokens)
        num_full = chunk.end // block_tokens
        first_external = request.num_local_cached_tokens // block_tokens
        num_external = request.num_external_cached_tokens // block_tokens
        indices = [
            index
            for index in range(request.num_saved_blocks, num_full)
            if not first_external <= index < first_external + num_external
        ]
        blocks = [SavedBlock(hashes[index], block_tokens, request.block_ids[index]) for index in indices]
        request.num_saved_blocks = max(request.num_saved_blocks, num_full)
        is_prompt_end = chunk.samples and request.num_tokens == request.num_prompt_tokens
        if (
            request.save_tail
            and is_prompt_end
            and request.tail_hash is not None
            and not request.is_tail_saved
        ):
            request.is_tail_saved = True
            if request.num_local_cached_tokens + request.num_external_cached_tokens < request.num_tokens:
                tail = SavedBlock(request.tail_hash, chunk.end % block_tokens, request.block_ids[-1])
                blocks.append(tail)
        if blocks:
            save = SaveBlocks(request, tuple(blocks))
            self._pin(save.block_ids)
            step.saves.append(save)

    def _push(self, chunk: Chunk, step: Step) -> None:
        """Push the blocks that this chunk completes, and those before it that are there."""
        request, block_tokens = chunk.request, self.settings.block_tokens
        num_blocks = -(-request.num_push_tokens // block_tokens)
        first, end = request.num_pushed_blocks, min(chunk.end // block_tokens, num_blocks)
        if chunk.end >= request.num_push_tokens:
            end = num_blocks
        if end > first:
            block_ids = tuple(request.block_ids[first:end])
            push = PushBlocks(request, request.push_id, first, block_ids, num_blocks, chunk.has_load)
            request.num_pushed_blocks = end
            self._pin(block_ids)
            step.pushes.append(push)

    def _end_push(self, request: Request) -> None:
        """No more of the request's blocks will be pushed."""
        num_blocks = -(-request.num_push_tokens // self.settings.block_tokens)
        if request.push_id and request.num_pushed_blocks < num_blocks:
            self._ended_pushes.append(request.push_id)
        request.push_id = ""

    def _num_blocks_known_saved(self, request: Request) -> int:
        """Leading blocks that need not be offered to the external cache.

        Locally cached blocks were saved when they were computed, but the store may have dropped
        them since: a prefill request, for whose blocks a decode worker waits, offers them again."""
        return 0 if request.save_tail else request.num_local_cached_tokens // self.settings.block_tokens

    def _publish(self, request: Request) -> None:
        block_tokens = self.settings.block_tokens
        first, end = request.num_published_blocks, request.num_computed_tokens // block_tokens
        if end > first:
            hashes = request.hash_blocks(block_tokens)[first:end]
            tokens = request.token_ids[first * block_tokens : end * block_tokens]
            self.pool.publish(request.block_ids[first:end], hashes, request.parent_hash(first), tokens)
            request.num_published_blocks = end

    def _append(self, request: Request, token: int, now: float) -> None:
        sampling = request.sampling
        request.token_ids.append(token)
        if request.timings.first_token is None:
            request.timings.first_token = now
            self._note_hits(request)
        is_end = token in self.settings.eos_token_ids and not sampling.ignore_eos
        if (is_end or token in sampling.stop_token_ids) and request.num_output_tokens >= sampling.min_tokens:
            request.finish_reason = FinishReason.STOP
        elif request.num_output_tokens >= sampling.max_tokens or request.num_tokens >= self.max_total_tokens:
            request.finish_reason = FinishReason.LENGTH

    def _note_hits(self, request: Request) -> None:
        """Keep what the first admission has found: a later one finds what the request has computed itself."""
        if request.num_preemptions == 0:
            request.num_local_hit_tokens = request.num_local_cached_tokens
            request.num_external_hit_tokens = request.num_external_cached_tokens

    def _preempt(self, request: Request, now: float) -> None:
        if request.timings.first_token is None:
            self._note_hits(request)
        self._drop(request)
        request.num_preemptions += 1
        self.num_preemptions += 1
        request.move(PREEMPTED)
        self._enqueue(request)
        self._note(request, now, f"preempted at {request.num_tokens} tokens: no free block")

    def _finish(self, request: Request, reason: FinishReason, now: float) -> None:
        if request.state is RequestState.WAITING:
            self._waiting.remove(request)
            self._end_push(request)
        else:
            self._drop(request)
        request.move(FINISHED)
        request.finish_reason = reason
        request.timings.finished = now
        self._note(request, now, f"finished reason={reason} output={request.num_output_tokens}")

    def _drop(self, request: Request) -> None:
        self.pool.free(request.block_ids)
        request.block_ids = []
        request.num_computed_tokens = 0
        request.num_published_blocks = 0
        self._admitted.pop(request.id)
        self._end_load(request.id)
        self._to_look_up.pop(request.id, None)
        request.push_source = None
        self._end_push(request)

    def _enqueue(self, request: Request) -> None:
        bisect.insort(self._waiting, request, key=lambda queued: queued.rank)

    def _pin(self, block_ids: Iterable[int]) -> None:
        ids = list(block_ids)
        self.pool.touch(ids)
        self._num_pinned += len(ids)

    def _note(self, request: Request, now: float, what: str) -> None:
        story = self._stories.get(request.id)
        if story is None:
            story = self._stories[request.id] = deque(maxlen=32)
            if len(self._stories) > MAX_STORIES:
                self._stories.popitem(last=False)
        story.append(f"{now:.3f} {what}")

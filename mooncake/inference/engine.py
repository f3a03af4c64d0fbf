# SPDX-License-Identifier: Apache-2.0
"""The step loop: take new requests, schedule, run, apply, return outputs.

It owns the engine's one thread and the isolation of requests from each other's failures: a load that fails
costs its request a recomputation, a step that raises ends the requests in it with an error, and the engine
goes on. It does not know text, protocols and roles, and no tensors either: what computes a step is passed in.
``kv_transfers`` knows what is in flight to and from the external cache.

``StepLog`` has the durations of the latest steps, for a conductor that predicts from measurements; it
evaluates nothing. The types of these numbers are ``http/worker_stats.py``'s, which both ends share. Steps are
kept only when they measure one thing: one prompt's chunk alone, or only decoding, and no wait for a load.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Protocol

from mooncake import clock
from mooncake.connectors.kv_link import AnyLink, AnyPushingLink, KvLoad, KvSave
from mooncake.errors import InvalidArgument, Refusal
from mooncake.http.openai import WEIGHTS_REPLACED
from mooncake.http.worker_stats import PromptStats, StepStats
from mooncake.inference.blocks import BlockEvent
from mooncake.inference.kv_transfers import ActivePush, ActiveSave, KvTransfers
from mooncake.inference.pipeline import ChunkPlan
from mooncake.inference.request import FinishReason, Request, RequestState
from mooncake.inference.scheduler import Chunk, Sampled, Scheduler, SchedulerSettings, Step, TokenLogprobs
from mooncake.kvlayout import KvLayout
from mooncake.log import get_logger

log = get_logger(__name__)

_KEPT = 32
"""Number of the latest steps whose durations are kept, of each kind."""


OTHER_WEIGHTS = Refusal(
    WEIGHTS_REPLACED,
    "the answer was begun with other weights than the worker has; send the request again",
)


class Runner(Protocol):
    """A model over a pool of KV blocks, and its choice of tokens: what computes steps."""

    layout: KvLayout
    num_blocks: int
    """Blocks of the pool; one of them is scratch space."""
    vocab_size: int
    max_positions: int
    """Length of the model's context, tokens."""
    eos_token_ids: tuple[int, ...]

    def run(
        self, chunks: Sequence[Chunk], loads: Sequence[KvLoad], saves: Sequence[KvSave]
    ) -> Sampled | None:
        """Compute ``chunks`` while ``loads`` write what they read and ``saves`` read what they complete.

        None: a pipeline has begun them, and ``collect`` returns what they sample.
        """
        ...


class PipelineRunner(Runner, Protocol):
    """A runner whose steps overlap: the first stage is free again while later stages compute."""

    def collect(self) -> list[Sampled]:
        """The samples of the steps that have ended since the last call, in the order of the steps.

        Raises Unavailable when a stage is lost: then no step will end.
        """
        ...

    def attach(self, wake: Callable[[], None]) -> None:
        """Set the callback for the end of a step, and for the loss of a stage; called from any thread."""
        ...


class QuietChange(Protocol):
    """A change for which no request may be computed and no block may be in use."""

    ends_requests: Refusal | None
    """Why requests that are known are ended; None to let them end by themselves first."""

    def apply(self) -> None:
        """Make the change, soon; on the engine's thread. If it raises, nothing may have changed."""
        ...

    def ended(self, error: Exception | None) -> None:
        """Called after it, with what it raised; on the engine's thread, which computes requests again."""
        ...


@dataclasses.dataclass(frozen=True)
class InferenceSettings:
    """Limits of one engine."""

    max_model_len: int | None = None
    """Most tokens of prompt and answer together; None takes the model's context."""
    max_batch_tokens: int = 512
    """Token budget of one step."""
    saturating_tokens: int = 0
    """Most prompt tokens that share one step; 0: bounded by the budget alone."""
    max_running: int = 64
    """Most requests computed at the same time."""
    max_waiting: int = 1024
    """Most requests that wait; one more is refused."""
    chunk_plan: ChunkPlan | None = None
    """How prompts are cut for a pipeline of stages."""

    def scheduler_settings(self, runner: Runner, has_link: bool) -> SchedulerSettings:
        return SchedulerSettings(
            num_blocks=runner.num_blocks,
            block_tokens=runner.layout.block_tokens,
            max_model_len=min(self.max_model_len or runner.max_positions, runner.max_positions),
            max_batch_tokens=self.max_batch_tokens,
            saturating_tokens=self.saturating_tokens,
            max_running=min(self.max_running, self.max_batch_tokens),
            max_waiting=self.max_waiting,
            eos_token_ids=runner.eos_token_ids,
            chunk_plan=self.chunk_plan,
            has_external_cache=has_link,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
    """Result of one step for one request."""

    request_id: str
    token_ids: tuple[int, ...]
    """New tokens, a stop token included."""
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One per new token, if the request wants them."""
    num_prompt_tokens: int = 0
    num_local_cached: int = 0
    """Leading prompt tokens found in this worker's memory."""
    num_external_cached: int = 0
    """Prompt tokens after those that came from the external cache, or from another worker."""
    was_pushed: bool = False
    """Whether another worker has pushed them."""
    weights: str = ""
    """Digest of the weights that computed the tokens; empty if it is not known."""
    num_stored_tokens: int = 0
    """In the last output of a ``save_tail`` request: leading prompt tokens now in the external cache."""
    measured: PromptStats | None = None
    """Times up to the first token."""
    error: str | None = None
    error_code: str | None = None
    """Kind of ``error``, where a program must tell it from a failure."""


@dataclasses.dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot for metrics and for the router of requests."""

    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    num_context_tokens: int
    """Number of tokens of running requests in blocks, those in shared blocks counted for each."""
    num_cached_blocks: int
    num_steps: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_preemptions: int
    num_failed_loads: int


@dataclasses.dataclass(frozen=True, slots=True)
class BegunStep:
    """A step in a pipeline."""

    step: Step
    failed: Collection[str]
    """Requests whose load failed, so that they have begun again."""
    began: float


def prompt_stats_of(request: Request) -> PromptStats | None:
    """Prompt durations of a request that has its first token."""
    timings = request.timings
    if timings.admitted is None or timings.started is None or timings.first_token is None:
        return None
    num_found = request.num_local_hit_tokens + request.num_external_hit_tokens
    return PromptStats(
        timings.admitted - timings.arrival,
        timings.started - timings.admitted,
        timings.first_token - timings.started,
        request.num_local_hit_tokens,
        request.num_external_hit_tokens,
        max(1, request.num_prompt_tokens - num_found),
        request.stages,
    )


class StepLog:
    """Log of the latest steps and loads, written by the engine's thread and read by any."""

    def __init__(self) -> None:
        self._chunks: deque[tuple[int, int, float]] = deque(maxlen=_KEPT)
        self._steps: deque[tuple[int, int, float]] = deque(maxlen=_KEPT)
        self._loads: deque[tuple[int, float]] = deque(maxlen=_KEPT)
        self._num_chunks = self._num_steps = self._num_loads = 0

    def note(self, step: Step, seconds: float) -> None:
        """Record a step that took ``seconds``. Prompts that shared it have parts of it by their tokens: under
        load most steps are shared, and queues are as fast as these."""
        chunks = step.chunks
        if step.awaits_layers:
            return
        if all(chunk.num_tokens == 1 and chunk.samples for chunk in chunks):
            self._steps.append((len(chunks), sum(chunk.end for chunk in chunks), seconds))
            self._num_steps += 1
        elif all(chunk.start < chunk.request.num_prompt_tokens for chunk in chunks):
            num_tokens = sum(chunk.num_tokens for chunk in chunks)
            for chunk in chunks:
                self._note_chunk(chunk.start, chunk.num_tokens, seconds * chunk.num_tokens / num_tokens)

    def note_ended(self, step: Step, seconds: float) -> None:
        """Record a step that passed through a pipeline in ``seconds``; prompts as a whole.

        A prompt's chunks say nothing of it: the first stage's time for one is a part of what it takes, and
        the last one's time from end to end is that of all stages.
        """
        prompts = [c.request for c in step.chunks if c.start < c.request.num_prompt_tokens]
        for passage in (request.passage for request in prompts):
            if passage is not None and passage.is_alone:
                num_tokens = passage.end_token - passage.first_token
                self._note_chunk(passage.first_token, num_tokens, passage.alone_s)
        if not prompts:
            self.note(step, seconds)

    def _note_chunk(self, first: int, num_tokens: int, seconds: float) -> None:
        self._chunks.append((first, num_tokens, seconds))
        self._num_chunks += 1

    def note_load(self, num_tokens: int, seconds: float) -> None:
        """Record a load from the pool that has arrived."""
        self._loads.append((num_tokens, seconds))
        self._num_loads += 1

    def read(self) -> StepStats:
        # A row that is added between two of these lines is read next time.
        num_chunks, num_steps, num_loads = self._num_chunks, self._num_steps, self._num_loads
        chunks, steps, loads = list(self._chunks), list(self._steps), list(self._loads)
        return StepStats(num_chunks, chunks, num_steps, steps, num_loads, loads)


class Engine:
    """One runner, many requests. Only ``add``, ``abort``, ``hand_over`` and ``stats`` are thread-safe."""

    def __init__(
        self,
        settings: InferenceSettings,
        runner: Runner,
        link: AnyLink | None = None,
        now: Callable[[], float] = clock.monotonic,
        pipeline: PipelineRunner | None = None,
        weights: str = "",
        pushing: AnyPushingLink | None = None,
    ) -> None:
        """
        Args:
            link: the one whose loads ``runner`` waits for, if there is one.
            pipeline: ``runner`` itself, if its steps overlap.
            weights: digest of the weights that ``runner`` computes with; empty if it is not known.
            pushing: ``link`` itself, if it pushes; without it requests must not have pushes.
        """
        self.runner = runner
        self.scheduler = Scheduler(settings.scheduler_settings(runner, link is not None))
        self.step_log = StepLog()
        self.weights = weights
        """Digest of the weights; only a ``QuietChange`` replaces it."""
        self._clock = now
        self._traffic = (
            KvTransfers(link, self.scheduler, pushing, runner.layout.num_layers, self.step_log.note_load)
            if link is not None
            else None
        )
        self._can_push = pushing is not None
        self._pipeline = pipeline
        self._begun: deque[BegunStep] = deque()
        """Steps in the pipeline that sample, oldest first."""
        self._held: dict[str, tuple[Request, Output]] = {}
        """Last outputs of ``save_tail`` requests, until their saves are done."""

        self._computing = threading.RLock()
        """Guards ``_is_computing``; while that is set, the one who holds it may begin loads."""
        self._is_computing = False
        self._begin_loads_error: Exception | None = None
        self._changed = threading.Condition()
        self._inbox: list[Request] = []
        self._aborts: list[str] = []
        self._leaving: list[tuple[str, str]] = []
        """(request, transfer) of those that another worker is to continue."""
        self._known: set[str] = set()
        self._has_news = False
        self._gives_way_until: float | None = None
        self._change: QuietChange | None = None
        self._unreported: list[Output] = []
        """Outputs of a step that has not ended: when it raises, ``fail_all`` returns them."""
        self._num_steps = self._num_prefill = self._num_decode = 0
        if link is not None:
            link.attach(self.wake)
        if pipeline is not None:
            pipeline.attach(self.wake)

    # ── from any thread ─────────────────────────────────────────────────────────────────────────

    def add(self, request: Request) -> Refusal | None:
        """Queue a request, or say why not. Raises InvalidArgument for tokens outside the vocabulary.

        A request that is queued is not refused later, so that during a step, which takes what has arrived,
        more may be queued than ``max_waiting``."""
        vocab_size = self.runner.vocab_size
        stops = request.sampling.stop_token_ids
        for field, token_ids in (("prompt", request.token_ids), ("stop_token_ids", stops)):
            if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
                raise InvalidArgument(field, "a token id out of range", f"ids from 0 to {vocab_size - 1}")
        with self._changed:
            if request.id in self._known:
                raise InvalidArgument("request_id", request.id, "an id that is not in use")
            refused = self.scheduler.refusal(request, len(self._inbox))
            if refused is None:
                self._known.add(request.id)
                self._inbox.append(request)
                self._wake_locked()
            return refused

    def abort(self, request_id: str) -> None:
        """Stop a request; an unknown id is ignored. Its last output has the reason ``abort``."""
        with self._changed:
            self._aborts.append(request_id)
            self._wake_locked()

    def hand_over(self, request_id: str, transfer_id: str) -> None:
        """Let another worker continue a request; an unknown id is ignored.

        Its last output has the reason ``moved``, and its KV is pushed to the worker that requests the
        transfer, if this one pushes."""
        with self._changed:
            self._leaving.append((request_id, transfer_id if self._can_push else ""))
            self._wake_locked()

    def wake(self) -> None:
        """Signal that something a step may wait for has happened.

        While a step is computed, the loads of lookups that have ended begin at once: after it they would be a
        step late."""
        if self._traffic is not None:
            with self._computing:
                if self._is_computing:
                    self._begin_loads()
        with self._changed:
            self._wake_locked()

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when something happened since the last step began. The engine's thread sleeps here."""
        if self._gives_way_until is not None:
            patience_s = max(0.0, self._gives_way_until - self._clock())
            timeout_s = patience_s if timeout_s is None else min(timeout_s, patience_s)
        with self._changed:
            self._changed.wait_for(lambda: self._has_news, timeout_s)

    def change_when_quiet(self, change: QuietChange) -> None:
        """Call ``change.apply`` on the engine's thread, between two steps, when no request is known to the
        scheduler and no load or save is under way. Requests that arrive meanwhile wait for it.

        Raises:
            InvalidArgument: another change is waiting.
        """
        with self._changed:
            if self._change is not None:
                raise InvalidArgument("change", "a second one", "one at a time; wait for the first")
            self._change = change
            self._wake_locked()

    def withdraw_change(self) -> bool:
        """Forget a change that was not applied yet; False when there is none."""
        with self._changed:
            found, self._change = self._change, None
            self._wake_locked()
            return found is not None

    def stats(self) -> EngineStats:
        pool = self.scheduler.pool
        return EngineStats(
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting + len(self._inbox),
            num_blocks=pool.num_usable,
            num_free_blocks=pool.num_free,
            num_context_tokens=self.scheduler.num_context_tokens,
            num_cached_blocks=pool.num_cached,
            num_steps=self._num_steps,
            num_prefill_tokens=self._num_prefill,
            num_decode_tokens=self._num_decode,
            num_preemptions=self.scheduler.num_preemptions,
            num_failed_loads=self._traffic.num_failed_loads if self._traffic else 0,
        )

    # ── the engine's thread ─────────────────────────────────────────────────────────────────────

    @property
    def is_idle(self) -> bool:
        """Whether no request is known and no load or save is in flight."""
        return not self._known and not self._inbox and (self._traffic is None or self._traffic.is_quiet)

    def drain_events(self) -> list[BlockEvent]:
        """Blocks that were indexed or removed since the last call."""
        return self.scheduler.pool.drain_events()

    def step(self) -> tuple[bool, list[Output]]:
        """(whether tokens were computed, outputs). Without progress, call ``wait``."""
        if self._begin_loads_error is not None:
            error, self._begin_loads_error = self._begin_loads_error, None
            raise error
        with self._changed:
            change = self._change
            aborts, self._aborts = self._aborts, []
            leaving, self._leaving = self._leaving, []
            ending = {*aborts, *(request_id for request_id, _ in leaving)}
            held = [r for r in self._inbox if r.id not in ending] if change is not None else []
            arrived, self._inbox = [r for r in self._inbox if r not in held], held
            self._has_news = False
        now = self._clock()
        outputs = self._unreported
        if change is not None:
            outputs += self._prepare_change(change, now)
        for request in arrived:
            # Decided here and not when it was added: weights may have been replaced since.
            if request.weights.digest not in ("", self.weights):
                reason, code = OTHER_WEIGHTS.reason, OTHER_WEIGHTS.code
                outputs.append(self._last(request, FinishReason.ERROR, reason, code))
                continue
            # A change waits until this request has ended, but the answer's other requests may come after it.
            request.weights.digest = self.weights
            self.scheduler.accept(request, now)
        for request_id in aborts:
            outputs += self._abort(request_id, now)
        for request_id, transfer_id in leaving:
            if (ended := self.scheduler.hand_over(request_id, transfer_id, now)) is not None:
                outputs.append(self._last(ended, FinishReason.MOVED))
        if self._traffic is not None:
            self._traffic.poll(now)
        outputs += self._collect()
        if change is not None and self._is_quiet:
            self._apply_change(change)
            self._unreported = []
            return True, outputs
        step = self.scheduler.schedule(now)
        self._gives_way_until = step.gives_way_until
        if step.lookups:
            assert self._traffic is not None
            self._traffic.begin_lookups(step.lookups, now)
            self._has_news = True  # a lookup may finish at once, without a wake
        if step.chunks:
            outputs += self._run(step)
        outputs += self._release_held()
        if change is not None and self._is_quiet:
            self._has_news = True  # nothing else would wake this thread
        self._unreported = []
        return bool(step.chunks), outputs

    @property
    def _is_quiet(self) -> bool:
        """Whether nothing touches the pool, so that its content may become invalid."""
        traffic = self._traffic
        is_moving = traffic is not None and not (traffic.is_quiet and not traffic.is_looking_up)
        return not (self.scheduler.requests or self._held or self._begun or is_moving)

    def _prepare_change(self, change: QuietChange, now: float) -> list[Output]:
        """End the requests that must not see the change."""
        reason = change.ends_requests
        return [] if reason is None else self._end_known(reason.reason, now, reason.code)

    def _apply_change(self, change: QuietChange) -> None:
        with self._changed:
            if self._change is not change:
                return  # withdrawn
            self._change = None
            self._wake_locked()  # for the requests that have waited
        try:
            # First: if it fails, no block of the old content may be found by what computes with the new.
            self.scheduler.pool.clear()
            change.apply()
        except Exception as error:  # what waits for the change reports it
            log.exception("change_failed", error=error)
            change.ended(error)
            return
        eos_token_ids = self.runner.eos_token_ids
        self.scheduler.settings = dataclasses.replace(self.scheduler.settings, eos_token_ids=eos_token_ids)
        change.ended(None)

    def fail_all(self, error: str) -> list[Output]:
        """End every request; blocks that a load or save still touches stay in use."""
        with self._changed:
            arrived, self._inbox = self._inbox, []
            self._wake_locked()  # for a step that ends pushes at the other workers
        ended, self._unreported = self._unreported, []
        ended += [self._last(request, FinishReason.ERROR, error) for request in arrived]
        return ended + self._end_known(error, self._clock())

    def _end_known(self, error: str, now: float, code: str | None = None) -> list[Output]:
        """End every request but those that have just arrived."""
        held = [request for request, _ in self._held.values()]
        self._held.clear()
        running = self.scheduler.requests
        for request in running:
            self.scheduler.fail(request, error, now)
        return [self._last(request, FinishReason.ERROR, error, code) for request in running + held]

    def check(self) -> None:
        self.scheduler.check()
        if self._traffic is not None:
            self._traffic.check(self._known)

    def _run(self, step: Step) -> list[Output]:
        began = self._clock()
        traffic = self._traffic
        loads = traffic.loads_of(step) if traffic is not None else {}
        saves: list[ActiveSave] = []
        pushes: list[ActivePush] = []
        try:
            if traffic is not None:
                traffic.begin_saves(step, saves)
                traffic.begin_pushes(step, pushes)
            moved = [*(entry.push for entry in pushes), *(entry.save for entry in saves)]
            with self._computes():
                sampled_rows = self.runner.run(step.chunks, list(loads.values()), moved)
        except Exception as error:
            log.exception("step_failed", requests=len(step.chunks), error=error)
            return self._fail(step, saves, pushes, error)
        if self._pipeline is None:
            self._mark_chunks(step, began)
        failed = {request_id: None for request_id, load in loads.items() if load.failed}
        outputs: list[Output] = []
        if sampled_rows is None:
            self.scheduler.step_begun(step, failed, self._clock())
        else:
            outputs = self._apply(step, sampled_rows, failed)
        if traffic is not None:
            traffic.num_failed_loads += len(failed)
            traffic.finish_saves(step, saves, failed)
            traffic.finish_pushes(step, pushes, failed)
            for request_id in loads:
                traffic.end_load(request_id)
        self._count(step)
        if sampled_rows is None and any(chunk.samples for chunk in step.chunks):
            self._begun.append(BegunStep(step, failed, began))
        elif not failed and self._pipeline is None:
            self.step_log.note(step, self._clock() - began)
        return outputs

    def _apply(self, step: Step, sampled_rows: Sampled, failed: Collection[str]) -> list[Output]:
        """Apply what a step has sampled."""
        tokens, logprobs = sampled_rows
        sampling = [c.request for c in step.chunks if c.samples]
        sampled = {request.id: token for request, token in zip(sampling, tokens, strict=True)}
        extras = {request.id: found for request, found in zip(sampling, logprobs, strict=True)}
        # In a pipeline a request may have been aborted, or its load have failed, since the step began.
        present = [r for r in sampling if r.state is RequestState.RUNNING and r.id not in failed]
        self.scheduler.step_finished(step, sampled, failed, self._clock())
        return self._outputs(present, sampled, extras)

    def _collect(self) -> list[Output]:
        """Apply the steps of the pipeline that have ended."""
        outputs: list[Output] = []
        for sampled_rows in self._pipeline.collect() if self._pipeline is not None else ():
            begun = self._begun.popleft()
            rows = zip((c for c in begun.step.chunks if c.samples), *sampled_rows, strict=True)
            kept = [row for row in rows if row[0].request.id not in begun.failed]
            step = Step([chunk for chunk, _, _ in kept])
            outputs += self._apply(step, ([row[1] for row in kept], [row[2] for row in kept]), ())
            if not begun.failed:
                self.step_log.note_ended(begun.step, self._clock() - begun.began)
        return outputs

    @contextlib.contextmanager
    def _computes(self) -> Iterator[None]:
        """Let ``wake`` begin loads: meanwhile nothing else decides."""
        with self._computing:
            self._begin_loads()  # of lookups that ended since the step was chosen
            self._is_computing = True
        try:
            yield
        finally:
            with self._computing:
                self._is_computing = False

    def _begin_loads(self) -> None:
        """Begin the loads of lookups that have ended, beside a step.

        What raises here is a fault of the engine, as a load that can't begin does not raise: the next step
        ends all requests with it. The step beside it is sound, and some requests of the lookups may be in a
        state of which nothing else would get them out."""
        if self._traffic is not None:
            try:
                self._traffic.begin_loads(self._clock())
            except Exception as error:
                self._begin_loads_error = error

    def _outputs(
        self, sampling: Sequence[Request], tokens: dict[str, int], logprobs: dict[str, TokenLogprobs | None]
    ) -> list[Output]:
        outputs = []
        for request in sampling:
            found = logprobs[request.id]
            if request.num_output_tokens == 1:
                at, is_prefill = request.timings.first_token, request.save_tail
                log.debug("first_token", request=request.id, at=at, is_prefill=is_prefill)
            is_moved = request.finish_reason is FinishReason.MOVED
            output = Output(
                request_id=request.id,
                token_ids=() if is_moved else (tokens[request.id],),
                finish_reason=request.finish_reason,
                logprobs=None if found is None or is_moved else (found,),
                num_prompt_tokens=request.num_prompt_tokens,
                num_local_cached=request.num_local_hit_tokens,
                num_external_cached=request.num_external_hit_tokens,
                was_pushed=request.was_pushed,
                weights=self.weights,
                measured=prompt_stats_of(request),
            )
            if request.finish_reason is None:
                outputs.append(output)
            elif request.save_tail:
                self._held[request.id] = (request, output)
            else:
                self._known.discard(request.id)
                outputs.append(output)
        return outputs

    def _release_held(self) -> list[Output]:
        """Last outputs whose blocks are stored, or whose saves have failed."""
        outputs = []
        for request_id, (request, output) in list(self._held.items()):
            if self._traffic is None or not self._traffic.is_saving(request_id):
                num_stored = 0
                if self._traffic is not None:
                    num_stored = self._traffic.num_stored_tokens(request, self.runner.layout.block_tokens)
                    self._traffic.forget(request_id)
                del self._held[request_id]
                self._known.discard(request_id)
                outputs.append(dataclasses.replace(output, num_stored_tokens=num_stored))
        return outputs

    def _fail(
        self, step: Step, saves: Sequence[ActiveSave], pushes: Sequence[ActivePush], error: Exception
    ) -> list[Output]:
        """End the requests of a step that raised; keep their blocks as long as something touches them."""
        outputs = []
        for request in [chunk.request for chunk in step.chunks]:
            self.scheduler.fail(request, str(error), self._clock())
            text = f"computing request {request.id} failed ({type(error).__name__}: {error})"
            outputs.append(self._last(request, FinishReason.ERROR, f"{text}; it may be sent again"))
        if self._traffic is not None:
            failed = {output.request_id for output in outputs}
            self._traffic.finish_saves(step, saves, failed)
            self._traffic.finish_pushes(step, pushes, failed)
        return outputs

    def _last(
        self, request: Request, reason: FinishReason, error: str | None = None, code: str | None = None
    ) -> Output:
        if self._traffic is not None:
            self._traffic.forget(request.id)
        self._known.discard(request.id)
        num_tokens = request.num_prompt_tokens
        return Output(request.id, (), reason, num_prompt_tokens=num_tokens, error=error, error_code=code)

    def _abort(self, request_id: str, now: float) -> list[Output]:
        request, _ = self._held.pop(request_id, (None, None))
        request = self.scheduler.abort(request_id, now) or request
        return [] if request is None else [self._last(request, FinishReason.ABORT)]

    def _count(self, step: Step) -> None:
        self._num_steps += 1
        for chunk in step.chunks:
            if chunk.start < chunk.request.num_prompt_tokens:
                self._num_prefill += chunk.num_tokens
            else:
                self._num_decode += chunk.num_tokens

    def _mark_chunks(self, step: Step, began: float) -> None:
        """Note the chunks of prompts in the traces of those requests that have one."""
        for chunk in step.chunks:
            request = chunk.request
            if request.marks is not None and chunk.start < request.num_prompt_tokens:
                mark = request.mark("compute chunk", began, first_token=chunk.start, tokens=chunk.num_tokens)
                if mark is not None:
                    mark.attributes["requests_in_step"] = len(step.chunks)
                    mark.ended = self._clock()

    def _wake_locked(self) -> None:
        self._has_news = True
        self._changed.notify_all()


class EngineThread:
    """Runs an engine on a thread of its own, which sleeps when there is nothing to do."""

    def __init__(self, engine: Engine, on_step: Callable[[list[Output], list[BlockEvent]], None]) -> None:
        """``on_step`` is called on the engine's thread and must return soon."""
        self._engine = engine
        self._on_step = on_step
        self._is_stopping = False
        self._thread = threading.Thread(target=self._loop, name="mooncake-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> bool:
        """End every request and the thread; False if loads or saves did not end within ``timeout_s``."""
        self._is_stopping = True
        self._engine.wake()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _loop(self) -> None:
        engine = self._engine
        while not self._is_stopping:
            # A step clears the flag of a stop that came just before it.
            if not self._advance() and not self._is_stopping:
                engine.wait()
        self._on_step(engine.fail_all("the worker is stopping; send the request to another one"), [])
        while not engine.is_idle:  # loads and saves may still touch the pool
            if not self._advance() and not engine.is_idle:
                engine.wait()

    def _advance(self) -> bool:
        """Run one step; False if the engine has to wait for an event before the next one."""
        try:
            has_computed, outputs = self._engine.step()
        except Exception as error:
            log.exception("engine_step_failed", error=error)
            what = f"the engine failed ({type(error).__name__}: {error}); the request may be sent again"
            has_computed, outputs = False, self._engine.fail_all(what)
        events = self._engine.drain_events()
        if outputs or events:
            self._on_step(outputs, events)
        return has_computed

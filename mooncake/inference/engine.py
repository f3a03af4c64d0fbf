"""The step loop: take what arrived, schedule, run, apply, say what came out.

It owns the engine's one thread, the pairing of requests with their lookups, loads and saves, and
the rule that nobody suffers for another's trouble: a load that fails costs its request a
recomputation, a step that raises ends the requests in it with an error, and the engine goes on. It
refuses to know text, wires and roles.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mooncake import clock
from mooncake.errors import InvalidArgument, Refusal
from mooncake.inference.attention import PagedAttention
from mooncake.inference.blocks import BlockEvent
from mooncake.inference.link import AnyLink, Load, Lookup, Save
from mooncake.inference.model import Decoder
from mooncake.inference.request import FinishReason, Request, RequestState
from mooncake.inference.runner import Runner
from mooncake.inference.sampler import TokenLogprobs, sample
from mooncake.inference.scheduler import SaveBlocks, Scheduler, SchedulerSettings, Step
from mooncake.kvlayout import KvLayout
from mooncake.log import get_logger
from mooncake.prefix import BlockHash

log = get_logger(__name__)


@dataclasses.dataclass(frozen=True)
class EngineSettings:
    """What one engine may use."""

    block_tokens: int = 64
    """Tokens of one KV block. Small blocks share more of a prefix, large ones move faster."""
    kv_cache_bytes: int = 1 << 30
    """Size of the KV pool."""
    max_model_len: int | None = None
    """Tokens of prompt and answer together; None takes the model's context."""
    max_batch_tokens: int = 512
    """Token budget of one step."""
    max_running: int = 64
    """Requests computed at the same time."""
    max_waiting: int = 1024
    """Requests that may wait; one more is refused."""

    def scheduler_settings(self, model: Decoder, num_blocks: int, has_link: bool) -> SchedulerSettings:
        limit = model.config.max_positions
        return SchedulerSettings(
            num_blocks=num_blocks,
            block_tokens=self.block_tokens,
            max_model_len=min(self.max_model_len or limit, limit),
            max_batch_tokens=self.max_batch_tokens,
            max_running=min(self.max_running, self.max_batch_tokens),
            max_waiting=self.max_waiting,
            eos_token_ids=model.config.eos_token_ids,
            has_external_cache=has_link,
        )

    def num_blocks(self, layout: KvLayout) -> int:
        return max(2, self.kv_cache_bytes // layout.pool_bytes(1))


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
    """What one step did for one request."""

    request_id: str
    token_ids: tuple[int, ...]
    """New tokens; a stop token is among them."""
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One per new token, if asked for."""
    num_prompt_tokens: int = 0
    num_local_cached: int = 0
    """Leading prompt tokens found in this worker's memory."""
    num_external_cached: int = 0
    """Prompt tokens after those that came from the external cache."""
    num_stored_tokens: int = 0
    """With the last output of a ``save_tail`` request: leading prompt tokens now in the external cache."""
    error: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot for metrics and for whoever routes requests."""

    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_steps: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_preemptions: int
    num_failed_loads: int


@dataclasses.dataclass(slots=True)
class _ActiveLoad:
    load: Load
    block_ids: list[int]


@dataclasses.dataclass(slots=True)
class _ActiveSave:
    save: Save
    what: SaveBlocks


class Engine:
    """One decoder, one KV pool, many requests. Only ``add``, ``abort`` and ``stats`` are thread-safe."""

    def __init__(
        self,
        settings: EngineSettings,
        model: Decoder,
        link: AnyLink | None = None,
        pool: Tensor | None = None,
        now: Callable[[], float] = clock.monotonic,
    ) -> None:
        """``pool``: memory to use, ``layout.pool_shape(num_blocks)``; by default it is allocated here."""
        self.layout = model.config.kv_layout(model.dtype, settings.block_tokens)
        if pool is None:
            shape = self.layout.pool_shape(settings.num_blocks(self.layout))
            # Not zeroed: a slot is written before it is read, and pages nobody used cost no memory.
            pool = torch.empty(shape, dtype=model.dtype, device=model.device)
        self.pool = pool
        self.model = model
        self.scheduler = Scheduler(settings.scheduler_settings(model, pool.shape[2], link is not None))
        self._link = link
        self._clock = now
        self._runner = Runner(model, PagedAttention(pool, self.layout, model.config.num_heads), link)
        self._lookups: dict[str, Lookup] = {}
        self._loads: dict[str, _ActiveLoad] = {}
        self._ending_loads: list[_ActiveLoad] = []
        """Loads whose request is gone, and which may still write."""
        self._saves: dict[str, list[_ActiveSave]] = {}
        self._held: dict[str, tuple[Request, Output]] = {}
        """Last outputs of ``save_tail`` requests, until their saves are done."""
        self._stored: dict[str, set[BlockHash]] = {}
        """Blocks of ``save_tail`` requests that the external cache has taken."""

        self._changed = threading.Condition()
        self._inbox: list[Request] = []
        self._aborts: list[str] = []
        self._known: set[str] = set()
        self._has_news = False
        self._num_steps = self._num_prefill = self._num_decode = 0
        self._num_preemptions = self._num_failed_loads = 0
        if link is not None:
            link.attach(self.wake)

    # ── from any thread ─────────────────────────────────────────────────────────────────────────

    def add(self, request: Request) -> Refusal | None:
        """Queue a request, or say why not. Raises InvalidArgument for tokens outside the vocabulary."""
        vocab_size = self.model.config.vocab_size
        if not 0 <= min(request.token_ids) <= max(request.token_ids) < vocab_size:
            raise InvalidArgument("prompt", "a token id out of range", f"ids from 0 to {vocab_size - 1}")
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

    def wake(self) -> None:
        """Something that a step may wait for has happened."""
        with self._changed:
            self._wake_locked()

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when there is news since the last step began. The engine's thread sleeps here."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_news, timeout_s)

    def stats(self) -> EngineStats:
        pool = self.scheduler.pool
        return EngineStats(
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting + len(self._inbox),
            num_blocks=pool.num_usable,
            num_free_blocks=pool.num_free,
            num_cached_blocks=pool.num_cached,
            num_steps=self._num_steps,
            num_prefill_tokens=self._num_prefill,
            num_decode_tokens=self._num_decode,
            num_preemptions=self._num_preemptions,
            num_failed_loads=self._num_failed_loads,
        )

    # ── the engine's thread ─────────────────────────────────────────────────────────────────────

    @property
    def is_idle(self) -> bool:
        """No request is known and nothing is on its way in or out."""
        return not (self._known or self._inbox or self._ending_loads or any(self._saves.values()))

    def drain_events(self) -> list[BlockEvent]:
        """Blocks that became findable or were evicted since the last call."""
        return self.scheduler.pool.drain_events()

    def step(self) -> tuple[bool, list[Output]]:
        """(whether tokens were computed, what came out). Without progress, ``wait`` for news."""
        with self._changed:
            arrived, self._inbox = self._inbox, []
            aborts, self._aborts = self._aborts, []
            self._has_news = False
        now = self._clock()
        outputs: list[Output] = []
        for request in arrived:
            if (refused := self.scheduler.add(request, now)) is not None:
                outputs.append(self._last(request, FinishReason.ERROR, str(refused)))
        for request_id in aborts:
            outputs += self._abort(request_id, now)
        self._poll_link(now)
        outputs += self._poll_saves()
        step = self.scheduler.schedule(now)
        for lookup in step.lookups:
            assert self._link is not None
            self._lookups[lookup.request.id] = self._link.lookup(lookup.blocks)
        if step.lookups:
            self._has_news = True  # a lookup may be answered at once, without a wake
        if step.chunks:
            outputs += self._run(step)
            outputs += self._poll_saves()
        return bool(step.chunks), outputs

    def fail_all(self, error: str) -> list[Output]:
        """End every request; blocks that a load or save still touches stay taken."""
        with self._changed:
            arrived, self._inbox = self._inbox, []
        now = self._clock()
        for lookup in self._lookups.values():
            assert self._link is not None
            self._link.release(lookup)
        self._lookups.clear()
        requests = arrived + self.scheduler.requests + [request for request, _ in self._held.values()]
        self._held.clear()
        for request in requests:
            if request.state is not RequestState.FINISHED and request not in arrived:
                self.scheduler.fail(request, error, now)
            self._end_load(request.id)
        return [self._last(request, FinishReason.ERROR, error) for request in requests]

    def check(self) -> None:
        self.scheduler.check()
        assert self._lookups.keys().isdisjoint(self._loads.keys())

    def _run(self, step: Step) -> list[Output]:
        loads = {c.request.id: self._loads[c.request.id] for c in step.chunks if c.has_load}
        saves: list[_ActiveSave] = []
        try:
            for what in step.saves:
                assert self._link is not None
                columns = [(block.hash, block.num_tokens, block.block_id) for block in what.blocks]
                saves.append(_ActiveSave(self._link.start_save(columns), what))
            active = [entry.load for entry in loads.values()]
            logits = self._runner.run(step.chunks, active, [entry.save for entry in saves])
            failed = {request_id for request_id, entry in loads.items() if entry.load.failed}
            sampling = [c.request for c in step.chunks if c.samples]
            with torch.inference_mode():
                tokens, logprobs = sample(logits, sampling, self.model.config.eos_token_ids)
        except Exception as error:
            log.exception("step_failed", requests=len(step.chunks), error=error)
            return self._fail(step, saves, error)
        self._num_failed_loads += len(failed)
        self._finish_saves(step, saves, failed)
        sampled = {request.id: token for request, token in zip(sampling, tokens, strict=True)}
        self.scheduler.step_finished(step, sampled, failed, self._clock())
        for request_id in loads:
            self._end_load(request_id)
        self._count(step)
        extras = {request.id: found for request, found in zip(sampling, logprobs, strict=True)}
        return self._outputs([r for r in sampling if r.id not in failed], sampled, extras)

    def _outputs(
        self, sampling: Sequence[Request], tokens: dict[str, int], logprobs: dict[str, TokenLogprobs | None]
    ) -> list[Output]:
        outputs = []
        for request in sampling:
            found = logprobs[request.id]
            output = Output(
                request_id=request.id,
                token_ids=(tokens[request.id],),
                finish_reason=request.finish_reason,
                logprobs=None if found is None else (found,),
                num_prompt_tokens=request.num_prompt_tokens,
                num_local_cached=request.num_local_hit_tokens,
                num_external_cached=request.num_external_hit_tokens,
            )
            if request.finish_reason is None:
                outputs.append(output)
            elif request.save_tail:
                self._held[request.id] = (request, output)
            else:
                self._known.discard(request.id)
                outputs.append(output)
        return outputs

    def _fail(self, step: Step, saves: Sequence[_ActiveSave], error: Exception) -> list[Output]:
        """A step broke: end its requests, keep their blocks as long as something touches them."""
        outputs = []
        started = {id(entry.what) for entry in saves}
        for what in step.saves:
            if id(what) not in started:
                self.scheduler.release(what.block_ids)
        self._finish_saves(step, saves, {chunk.request.id for chunk in step.chunks})
        for chunk in step.chunks:
            request = chunk.request
            self.scheduler.fail(request, str(error), self._clock())
            self._end_load(request.id)
            text = f"computing request {request.id} failed ({type(error).__name__}: {error})"
            outputs.append(self._last(request, FinishReason.ERROR, f"{text}; it may be sent again"))
        return outputs

    def _last(self, request: Request, reason: FinishReason, error: str | None = None) -> Output:
        self._known.discard(request.id)
        self._stored.pop(request.id, None)
        return Output(request.id, (), reason, num_prompt_tokens=request.num_prompt_tokens, error=error)

    def _abort(self, request_id: str, now: float) -> list[Output]:
        if (lookup := self._lookups.pop(request_id, None)) is not None:
            assert self._link is not None
            self._link.release(lookup)
        held = self._held.pop(request_id, None)
        request = self.scheduler.abort(request_id, now)
        self._end_load(request_id)
        if held is not None:
            return [self._last(held[0], FinishReason.ABORT)]
        return [] if request is None else [self._last(request, FinishReason.ABORT)]

    def _count(self, step: Step) -> None:
        self._num_steps += 1
        for chunk in step.chunks:
            if chunk.num_tokens == 1:
                self._num_decode += 1
            else:
                self._num_prefill += chunk.num_tokens

    # ── lookups, loads and saves ────────────────────────────────────────────────────────────────

    def _poll_link(self, now: float) -> None:
        link = self._link
        if link is None:
            return
        for request_id, lookup in list(self._lookups.items()):
            if not lookup.done:
                continue
            del self._lookups[request_id]
            block_ids = self.scheduler.lookup_finished(request_id, lookup.num_blocks, now)
            if block_ids is None:
                link.release(lookup)
            else:
                self._loads[request_id] = _ActiveLoad(link.start_load(lookup, block_ids), block_ids)
        for request_id, entry in list(self._loads.items()):
            if entry.load.failed:
                self._num_failed_loads += 1
                self.scheduler.load_failed(request_id, now)
                self._end_load(request_id)
            elif entry.load.num_layers_loaded > 0:
                self.scheduler.load_ready(request_id, now)
        still_writing = []
        for entry in self._ending_loads:
            if entry.load.done:
                self.scheduler.release(entry.block_ids)
            else:
                still_writing.append(entry)
        self._ending_loads = still_writing

    def _end_load(self, request_id: str) -> None:
        """The request needs its load no more; its blocks stay until nothing writes into them."""
        if (entry := self._loads.pop(request_id, None)) is None:
            return
        if entry.load.done:
            self.scheduler.release(entry.block_ids)
        else:
            self._ending_loads.append(entry)

    def _finish_saves(self, step: Step, saves: Sequence[_ActiveSave], failed: set[str]) -> None:
        for entry in saves:
            assert self._link is not None
            if entry.what.request.id in failed:
                self._link.abort_save(entry.save)
            else:
                self._link.finish_save(entry.save)
            self._saves.setdefault(entry.what.request.id, []).append(entry)

    def _poll_saves(self) -> list[Output]:
        """Let go of the blocks of finished saves; give out the answers that waited for them."""
        outputs = []
        for request_id, entries in list(self._saves.items()):
            for entry in [entry for entry in entries if entry.save.done]:
                entries.remove(entry)
                self.scheduler.release(entry.what.block_ids)
                if entry.what.request.save_tail and request_id in self._known:
                    taken = entry.what.blocks[: entry.save.num_stored_blocks]
                    self._stored.setdefault(request_id, set()).update(block.hash for block in taken)
            if not entries:
                del self._saves[request_id]
        for request_id, (request, output) in list(self._held.items()):
            if request_id not in self._saves:
                del self._held[request_id]
                self._known.discard(request_id)
                num_stored = self._num_stored_tokens(request, self._stored.pop(request_id, set()))
                outputs.append(dataclasses.replace(output, num_stored_tokens=num_stored))
        return outputs

    def _num_stored_tokens(self, request: Request, stored: set[BlockHash]) -> int:
        """Leading prompt tokens in the external cache: those loaded from there, and those it took."""
        block_tokens = self.layout.block_tokens
        first = request.num_local_cached_tokens
        end = first + request.num_external_cached_tokens
        num_tokens = 0
        for block_hash in request.hash_blocks(block_tokens)[: request.num_prompt_tokens // block_tokens]:
            if block_hash not in stored and not first <= num_tokens < end:
                return num_tokens
            num_tokens += block_tokens
        is_tail_stored = request.tail_hash in stored or end >= request.num_prompt_tokens
        return request.num_prompt_tokens if is_tail_stored else num_tokens

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
            if not self._advance():
                engine.wait()
        self._on_step(engine.fail_all("the worker is stopping; send the request to another one"), [])
        while not engine.is_idle:  # loads and saves may still touch the pool
            if not self._advance() and not engine.is_idle:
                engine.wait()

    def _advance(self) -> bool:
        """One step; False if only news can bring the engine further."""
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

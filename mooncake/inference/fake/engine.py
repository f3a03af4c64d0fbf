"""The fake model under the real scheduler: continuous batching, preemption, lookups, loads and saves.

It owns one thread, in which steps run as they do in ``inference.engine``, and the way from there to
coroutines. What it injects is time: so much for each token of a prompt and of an answer. Connectors are
driven through ``Traffic`` as our worker drives them, so what holds here holds there.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import AsyncGenerator

from mooncake import clock
from mooncake.connectors.link import AnyLink
from mooncake.errors import Refusal
from mooncake.inference.fake.model import FakeModel
from mooncake.inference.request import FinishReason, Request
from mooncake.inference.scheduler import Scheduler, SchedulerSettings
from mooncake.inference.step import Step
from mooncake.inference.traffic import ActiveSave, Traffic
from mooncake.log import get_logger

log = get_logger(__name__)


@dataclasses.dataclass(frozen=True)
class Latency:
    """How slow the engine pretends to be."""

    prefill_token_s: float = 0.0
    """For each token of a prompt that is computed."""
    decode_token_s: float = 0.0
    """For each step that decodes, however many requests are in it."""


@dataclasses.dataclass(frozen=True, slots=True)
class News:
    """What a step did for one request."""

    token: int | None = None
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    """Prompt tokens that were found, here or outside."""
    num_external_tokens: int = 0
    """Those of them that were loaded."""
    num_stored_tokens: int = 0
    """With the last news of a ``save_tail`` request: leading prompt tokens that the cache has."""
    refusal: Refusal | None = None
    error: str | None = None


class FakeEngine:
    """One fake model, many requests. Make it on the loop that asks; ``close`` it there."""

    def __init__(
        self,
        model: FakeModel,
        settings: SchedulerSettings,
        link: AnyLink | None = None,
        latency: Latency = Latency(),
    ) -> None:
        settings = dataclasses.replace(
            settings,
            num_blocks=model.pool.shape[2],
            block_tokens=model.layout.block_tokens,
            has_external_cache=link is not None,
        )
        self.scheduler = Scheduler(settings)
        self._model = model
        self._link = link
        self._latency = latency
        self._traffic = Traffic(link, self.scheduler) if link is not None else None
        self._held: dict[str, tuple[Request, News]] = {}
        self._loop = asyncio.get_running_loop()
        self._queues: dict[str, asyncio.Queue[News]] = {}
        self._changed = threading.Condition()
        self._inbox: list[Request] = []
        self._aborts: list[str] = []
        self._has_news = self._is_stopping = False
        self._thread = threading.Thread(target=self._work, name="mooncake-fake-engine", daemon=True)
        if link is not None:
            link.attach(self._wake)
        self._thread.start()

    @property
    def num_failed_loads(self) -> int:
        return 0 if self._traffic is None else self._traffic.num_failed_loads

    async def answer(self, request: Request) -> AsyncGenerator[News, None]:
        """What becomes of ``request``, as it becomes known. Leaving early aborts it."""
        queue = self._queues[request.id] = asyncio.Queue()
        with self._changed:
            self._inbox.append(request)
        self._wake()
        try:
            while True:
                news = await queue.get()
                yield news
                if news.finish_reason is not None:
                    return
        finally:
            del self._queues[request.id]
            with self._changed:
                self._aborts.append(request.id)
            self._wake()

    async def close(self, timeout_s: float = 10.0) -> bool:
        """End all requests, then the thread, once nothing touches the pool; False if something still does."""
        self._is_stopping = True
        self._wake()
        await asyncio.to_thread(self._thread.join, timeout_s)
        for queue in self._queues.values():
            queue.put_nowait(News(finish_reason=FinishReason.ERROR, error="the engine has stopped"))
        return not self._thread.is_alive()

    # ── the engine's thread ─────────────────────────────────────────────────────────────────────

    def _work(self) -> None:
        while not self._is_stopping:
            patience_s = self._advance()
            if not self._is_stopping:  # a step takes the news of a stop that came just before it
                self._wait(patience_s)
        for request in self.scheduler.requests:
            self._end(request, "the engine is stopping")
        while not self._is_quiet:
            patience_s = self._advance()
            if not self._is_quiet:
                self._wait(patience_s)

    @property
    def _is_quiet(self) -> bool:
        """Nothing touches the pool."""
        return self._traffic is None or self._traffic.is_quiet

    def _wait(self, patience_s: float | None) -> None:
        """Sleep until there is news, unless there is more to do."""
        if patience_s is not None:
            with self._changed:
                self._changed.wait_for(lambda: self._has_news, patience_s or None)

    def _advance(self) -> float | None:
        """One step. None: there may be more to do at once; else how long to wait for news, 0 for ever."""
        with self._changed:
            arrived, self._inbox = self._inbox, []
            aborts, self._aborts = self._aborts, []
            self._has_news = False
        now = clock.monotonic()
        for request in arrived:
            if (refusal := self.scheduler.add(request, now)) is not None:
                self._tell(request.id, News(finish_reason=FinishReason.ERROR, refusal=refusal))
        for request_id in aborts:
            self._held.pop(request_id, None)
            if self.scheduler.abort(request_id, now) is not None and self._traffic is not None:
                self._traffic.forget(request_id)
        if self._traffic is not None:
            self._traffic.poll(now)
        step = self.scheduler.schedule(now)
        if step.lookups:
            assert self._traffic is not None
            self._traffic.begin_lookups(step.lookups)
            self._has_news = True  # a lookup may be answered at once, without a wake
        if step.chunks:
            self._run(step)
        self._release_held()
        if step.chunks:
            return None
        return max(1e-3, step.gives_way_until - now) if step.gives_way_until else 0.0

    def _run(self, step: Step) -> None:
        traffic = self._traffic
        loads = traffic.loads_of(step) if traffic is not None else {}
        saves: list[ActiveSave] = []
        try:
            if traffic is not None:
                traffic.begin_saves(step, saves)
            self._pass_time(step)
            tokens = self._model.run(
                step.chunks, self._link, list(loads.values()), [entry.save for entry in saves]
            )
        except Exception as error:
            log.exception("step_failed", requests=len(step.chunks), error=error)
            for chunk in step.chunks:
                self._end(chunk.request, f"computing failed ({type(error).__name__}: {error})")
            if traffic is not None:
                traffic.finish_saves(step, saves, {chunk.request.id for chunk in step.chunks})
            return
        failed = {request_id: None for request_id, load in loads.items() if load.failed}
        sampled = {c.request.id: token for c, token in zip(step.chunks, tokens, strict=True) if c.samples}
        self.scheduler.step_finished(step, sampled, failed, clock.monotonic())
        if traffic is not None:
            traffic.num_failed_loads += len(failed)
            traffic.finish_saves(step, saves, failed)
            for request_id in loads:
                traffic.end_load(request_id)
        for chunk in step.chunks:
            if chunk.samples and chunk.request.id not in failed:
                self._sampled(chunk.request, sampled[chunk.request.id])

    def _pass_time(self, step: Step) -> None:
        num_prompt = sum(c.num_tokens for c in step.chunks if c.start < c.request.num_prompt_tokens)
        has_answers = any(c.start >= c.request.num_prompt_tokens for c in step.chunks)
        seconds = num_prompt * self._latency.prefill_token_s + has_answers * self._latency.decode_token_s
        if seconds:
            time.sleep(seconds)

    def _sampled(self, request: Request, token: int) -> None:
        num_cached = request.num_local_hit_tokens + request.num_external_hit_tokens
        num_cached = min(num_cached, request.num_prompt_tokens - request.num_prior_output_tokens)
        news = News(token, request.finish_reason, num_cached, request.num_external_hit_tokens)
        if request.finish_reason is not None and request.save_tail:
            self._held[request.id] = (request, news)
        else:
            self._tell(request.id, news)

    def _release_held(self) -> None:
        """Answers that wait until their prompt's blocks are stored, or never will be."""
        for request_id, (request, news) in list(self._held.items()):
            if self._traffic is not None and self._traffic.is_saving(request_id):
                continue
            del self._held[request_id]
            num_stored = 0
            if self._traffic is not None:
                num_stored = self._traffic.num_stored_tokens(request, self._model.layout.block_tokens)
                self._traffic.forget(request_id)
            self._tell(request_id, dataclasses.replace(news, num_stored_tokens=num_stored))

    def _end(self, request: Request, error: str) -> None:
        self.scheduler.fail(request, error, clock.monotonic())
        if self._traffic is not None:
            self._traffic.forget(request.id)
        self._tell(request.id, News(finish_reason=FinishReason.ERROR, error=error))

    def _tell(self, request_id: str, news: News) -> None:
        def deliver() -> None:
            if (queue := self._queues.get(request_id)) is not None:
                queue.put_nowait(news)

        self._loop.call_soon_threadsafe(deliver)

    def _wake(self) -> None:
        with self._changed:
            self._has_news = True
            self._changed.notify_all()

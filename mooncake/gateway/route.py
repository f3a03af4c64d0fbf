"""The walk of one prompt: ask the conductor, run prefill, follow decode; retry, or say why not.

It owns what a client must never notice: which workers there are and that they die. The prompt travels as
token ids. An answer is followed token by token; when its decode worker is lost, what was generated so far
joins the prompt and another worker goes on behind it, so that the client sees one uninterrupted answer.
Correctness never rests on the hand-over: a decode worker that finds no KV computes it. HTTP towards the
client, and several choices or prompts in one request, are above (``answer.py``); calls are below
(``workers.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from prometheus_client import Counter

from mooncake import clock, metrics
from mooncake.conductor.client import Scheduling
from mooncake.conductor.messages import Decision, Failed, Finished, Place, Prefilled, Refuse
from mooncake.gateway.workers import WorkerBusy, WorkerFailed, Workers
from mooncake.inference.answers import Piece
from mooncake.inference.openai import ApiError, Usage
from mooncake.log import get_logger
from mooncake.types import InstanceId

log = get_logger(__name__)

MAX_FAILURES = 4
"""Workers that one request may take down before it counts as the cause itself."""

MAX_UNREACHABLE = 32
"""Workers that may be found dead before anything was asked of them."""

RETRY_PATIENCE_S = 2.0
"""How long a request whose worker failed waits for another one before it is refused."""

RESUME_PATIENCE_S = 30.0
"""How long an answer that has begun waits for a worker to go on: the client has half of it already."""

_retries = Counter(
    "mooncake_gateway_retries",
    "Calls that were tried on another worker, by stage: prefill, decode or resumed (in mid-answer).",
    ["stage"],
    registry=metrics.registry,
)


@dataclass
class Route:
    """Who worked for a prompt; shown in response headers."""

    prefill: InstanceId | None = None
    decode: InstanceId = ""
    degraded: str = ""

    def headers(self) -> dict[str, str]:
        walk = "prefill, decode" if self.prefill else "decode"
        shown = {
            "x-mooncake-decode": self.decode,
            "x-mooncake-route": f"degraded: {self.degraded}" if self.degraded else walk,
        }
        if self.prefill:
            shown["x-mooncake-prefill"] = self.prefill
        return shown


@dataclass
class Choice:
    """One answer to a prompt, as far as it is known."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    num_chars: int = 0
    is_finished: bool = False


@dataclass
class _Attempts:
    """What a retry must remember."""

    exclude: dict[InstanceId, None] = field(default_factory=dict)
    num_failures: int = 0
    num_unreachable: int = 0
    busy: ApiError | None = None
    "What the last busy worker said."


class _Measured(msgspec.Struct):
    """``measured`` in a worker's answer to prefill."""

    queued_s: float
    loaded_s: float
    computed_s: float
    num_local_tokens: int
    num_loaded_tokens: int
    num_computed_tokens: int


class Walk:
    """One prompt: ``prefill`` once, then ``decode`` once per choice, then ``end``."""

    def __init__(
        self,
        scheduling: Scheduling,
        workers: Workers,
        *,
        place: Place,
        prompt: list[int],
        headers: Mapping[str, str],
        block_tokens: int,
    ) -> None:
        """``place``: what the conductor is told of the prompt."""
        self.prompt = prompt
        self.route = Route()
        self.num_cached_tokens = 0
        """Prompt tokens whose KV whoever computed the prompt found in its memory or the pool."""
        self._scheduling = scheduling
        self._workers = workers
        self._request_id = place.request_id
        self._asked = place
        self._block_tokens = block_tokens
        self._headers = headers
        self._transfer: dict[str, Any] = {}
        self._is_prefilled = False
        self._is_computed = False
        self._placed: dict[str, None] = {}
        self._decision: Decision | None = None

    async def prefill(self, cache_salt: str | None) -> None:
        """Place the prompt and have its KV computed.

        Raises:
            ApiError: the request was refused, or nobody can serve it.
        """
        body: dict[str, Any] = {
            "prompt": self.prompt,
            "max_tokens": 1,
            "temperature": 0.0,
            "stream": False,
        }
        if cache_salt is not None:
            body["cache_salt"] = cache_salt
        attempts = _Attempts()
        while True:
            decision = await self._place(self._request_id, attempts, True, 0.0)
            self._decision = decision
            self.route = Route(decision.prefill, decision.decode, decision.degraded)
            if decision.prefill is None:
                return
            body["kv_transfer_params"] = self._hints(decision)
            began = clock.monotonic()
            try:
                answer = await self._workers.complete(decision.prefill, body, self._headers)
            except (WorkerFailed, WorkerBusy) as error:
                self._note(error, self._request_id, attempts, "prefill")
                continue
            self._transfer = answer.kv_transfer_params or {}
            measured = self._transfer.pop("measured", None)
            self._is_prefilled = self._is_computed = True
            if answer.usage is not None:
                self._count_cached(answer.usage)
            fact = self._prefilled(measured, decision, clock.monotonic() - began)
            refused = await self._scheduling.prefilled(fact)
            if refused is not None:
                raise _as_error(refused)
            return

    async def decode(
        self, choice: Choice, sampling: Mapping[str, Any], max_tokens: int
    ) -> AsyncGenerator[Piece, None]:
        """The pieces of one choice; the last has a ``finish_reason``. Raises as ``prefill``."""
        decision, self._decision = self._decision, None
        place_id = self._request_id if decision is not None else f"{self._request_id}/{choice.index}"
        attempts = _Attempts()
        while not choice.is_finished:
            if decision is None:
                patience_s = RESUME_PATIENCE_S if choice.token_ids else 0.0
                decision = await self._place(place_id, attempts, False, patience_s)
                self.route.decode = decision.decode
                self.route.degraded = self.route.degraded or decision.degraded
            if len(choice.token_ids) >= max_tokens:
                # The worker was lost between its last token and saying that it was the last.
                choice.is_finished = True
                yield Piece(choice.index, finish_reason="length")
                return
            pieces = self._follow(decision.decode, choice, sampling, max_tokens)
            try:
                async with contextlib.aclosing(pieces):
                    async for piece in pieces:
                        yield piece
            except (WorkerFailed, WorkerBusy) as error:
                if not choice.is_finished:
                    self._note(error, place_id, attempts, "resumed" if choice.token_ids else "decode")
            decision = None

    def end(self, finished: Finished) -> None:
        """Tell the conductor that the workers are free of this prompt, and how it was."""
        for place_id in self._placed:
            is_own = place_id == self._request_id
            self._scheduling.post(finished if is_own else Finished(place_id))
        self._placed.clear()

    @property
    def place_id(self) -> str:
        return self._request_id

    def _hints(self, decision: Decision) -> dict[str, Any]:
        """What a prefill worker of ours heeds, and others don't know."""
        hints: dict[str, Any] = {"do_remote_decode": True}
        if decision.turn > 0:
            hints["turn"] = round(decision.turn * 1000)
        if decision.fetches:
            end = max(fetch.first_block + fetch.num_blocks for fetch in decision.fetches)
            hints["max_load_tokens"] = end * self._block_tokens
        return hints

    def _prefilled(self, measured: Any, decision: Decision, elapsed_s: float) -> Prefilled:
        """What the worker measured; of one that measures nothing, what is seen from here."""
        with contextlib.suppress(msgspec.ValidationError):
            found = msgspec.convert(measured, _Measured)
            return Prefilled(
                self._request_id,
                found.queued_s,
                found.computed_s,
                found.num_computed_tokens,
                found.num_local_tokens,
                found.loaded_s,
                found.num_loaded_tokens,
            )
        # Who waited in a queue there can't be told from who was computed: only a prompt that was expected to
        # begin at once says how long computing takes.
        queue_s = decision.prediction.queue_s if decision.prediction is not None else 0.0
        computed_s = elapsed_s if queue_s < 0.05 * elapsed_s else 0.0
        num_cached = self.num_cached_tokens
        return Prefilled(
            self._request_id,
            computed_s=computed_s,
            num_computed_tokens=max(1, len(self.prompt) - num_cached),
            num_cached_tokens=num_cached,
        )

    async def _follow(
        self, instance: InstanceId, choice: Choice, sampling: Mapping[str, Any], max_tokens: int
    ) -> AsyncGenerator[Piece, None]:
        """Pieces from one worker, which goes on after what ``choice`` has."""
        transfer = dict(self._transfer)
        if choice.token_ids:
            transfer |= {
                "num_output_tokens": len(choice.token_ids),
                "output_text_offset": choice.num_chars,
            }
        body: dict[str, Any] = {
            **sampling,
            "prompt": self.prompt + choice.token_ids,
            "max_tokens": max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        if transfer:
            body["kv_transfer_params"] = transfer
        chunks = self._workers.stream(instance, body, self._headers)
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                if chunk.usage is not None and not self._is_prefilled:
                    self._count_cached(chunk.usage)
                if chunk.choices and not self._is_computed:
                    # No prefill instance was there: this one has computed the prompt.
                    self._is_computed = True
                    self._scheduling.post(Prefilled(self._request_id))
                for part in chunk.choices:
                    if part.finish_reason == "abort":
                        raise WorkerFailed(instance, "it gave the answer up")
                    token_ids = list(part.token_ids or [])
                    choice.token_ids += token_ids
                    choice.num_chars += len(part.text)
                    choice.is_finished = part.finish_reason is not None
                    yield Piece(
                        choice.index,
                        part.text,
                        token_ids,
                        part.logprobs,
                        part.finish_reason,
                        part.stop_reason,
                    )
        if not choice.is_finished:
            raise WorkerFailed(instance, "its stream ended before the answer did")

    def _count_cached(self, usage: Usage) -> None:
        if usage.prompt_tokens_details is not None:
            self.num_cached_tokens = usage.prompt_tokens_details.cached_tokens

    async def _place(
        self, place_id: str, attempts: _Attempts, needs_prefill: bool, patience_s: float
    ) -> Decision:
        if attempts.num_failures or attempts.num_unreachable:
            patience_s = max(patience_s, RETRY_PATIENCE_S)
        give_up_at = clock.monotonic() + patience_s
        while True:
            self._placed[place_id] = None
            answer = await self._scheduling.place(
                msgspec.structs.replace(
                    self._asked,
                    request_id=place_id,
                    exclude=list(attempts.exclude),
                    needs_prefill=needs_prefill,
                )
            )
            if isinstance(answer, Decision):
                return answer
            if attempts.busy is not None:
                raise attempts.busy
            if clock.monotonic() >= give_up_at:
                raise _as_error(answer)
            # Whoever failed may have come back by now: a restarted worker keeps its address.
            attempts.exclude.clear()
            await asyncio.sleep(min(0.25, answer.retry_after_s))

    def _note(self, error: WorkerFailed | WorkerBusy, place_id: str, attempts: _Attempts, stage: str) -> None:
        """Remember who failed and tell the conductor.

        Raises:
            ApiError: enough is enough.
        """
        attempts.exclude[error.instance] = None
        _retries.labels(stage).inc()
        if isinstance(error, WorkerBusy):
            attempts.busy = error.answer
            return
        log.warning("worker_failed", instance=error.instance, stage=stage, reason=error.reason)
        self._scheduling.post(Failed(error.instance, error.reason, place_id))
        if error.was_reached:
            attempts.num_failures += 1
        else:
            attempts.num_unreachable += 1
        if attempts.num_failures >= MAX_FAILURES or attempts.num_unreachable >= MAX_UNREACHABLE:
            num_tried = attempts.num_failures + attempts.num_unreachable
            message = f"{num_tried} attempts to {stage} failed, the last on {error}"
            raise ApiError(503, message, code="workers_failed", retry_after_s=RETRY_PATIENCE_S) from error


def _as_error(refuse: Refuse) -> ApiError:
    """What a client reads of a refusal: too much now (429), or nobody there (503)."""
    status = 503 if refuse.refusal.code == "no_instance" else 429
    return ApiError(
        status, refuse.refusal.reason, code=refuse.refusal.code, retry_after_s=refuse.retry_after_s
    )

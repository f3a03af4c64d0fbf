# SPDX-License-Identifier: Apache-2.0
"""Placement of a request, and its retries on other instances.

Owns the exchange with the conductor about one request: the end of every placement and every failed instance
is reported, and a request that fails everywhere is refused. The calls to an instance are not known here; they
differ between our workers (``own_workers.py``) and other engines (``any_engine.py``).

The prompts and choices of one answer wait for one another where there is no room for all of them: an answer
with more of them than the instances take at a time would be refused whenever it came.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
from prometheus_client import Counter

from mooncake import clock, metrics, tracing
from mooncake.conductor.client import ConductorClient
from mooncake.conductor.messages import Decision, Failed, Finished, Place, Prefilled, Refuse
from mooncake.errors import InvalidArgument
from mooncake.gateway.worker_client import WeightsReplaced, WorkerBusy, WorkerFailed
from mooncake.http.openai import ApiError
from mooncake.log import get_logger
from mooncake.types import InstanceId

log = get_logger(__name__)

MAX_FAILURES = 4
"""Workers that may fail during one request before the request counts as the cause."""

MAX_UNREACHABLE = 32
"""Workers that one request may find unreachable before it is refused."""

RETRY_TIMEOUT_S = 2.0
"""How long a request whose worker failed waits for another one before it is refused."""

_retries = Counter(
    "mooncake_gateway_retries",
    "Calls that were tried on another worker, by stage: prefill, decode or resumed (in mid-answer).",
    ["stage"],
    registry=metrics.registry,
)


@dataclass
class Route:
    """The instances that served a prompt; shown in response headers."""

    prefill: InstanceId | None = None
    decode: InstanceId = ""
    degraded: str = ""
    is_push: bool = False
    """Whether the KV was to be pushed from ``prefill`` to ``decode``."""

    def headers(self) -> dict[str, str]:
        stages = "prefill, decode" if self.prefill else "decode"
        shown = {
            "x-mooncake-decode": self.decode,
            "x-mooncake-route": f"degraded: {self.degraded}" if self.degraded else stages,
        }
        if self.prefill:
            shown["x-mooncake-prefill"] = self.prefill
            shown["x-mooncake-kv"] = "push" if self.is_push else "pool"
        return shown


@dataclass
class Attempts:
    """The state of a request's retries."""

    exclude: dict[InstanceId, None] = field(default_factory=dict)
    num_failures: int = 0
    num_unreachable: int = 0
    busy: ApiError | None = None
    "Error of the last busy worker, until a call has begun."

    busy_since: float = 0.0
    "When the first of them was busy."

    full_since: float = 0.0
    "When no instance had room and no other part of the answer was in progress; 0: not yet."

    def found_room(self) -> None:
        """Note that a worker serves a call: the next refusal begins a wait of its own."""
        self.busy, self.full_since = None, 0.0


FIRST_AT_ONCE = 128
"""Prompts and choices of one answer that are in progress before one of them has ended."""

ROOM_TIMEOUT_S = 30.0
"""How long an answer of which a part has ended waits for the place that its next part needs."""

POLL_S = 0.25


class AnswerConcurrency:
    """How many prompts and choices of one answer are in progress at a time.

    The limit grows by one with each that ends. When instances take no more, it becomes what they have taken.
    """

    def __init__(self, most: int = FIRST_AT_ONCE) -> None:
        """``most``: the limit does not grow beyond it."""
        self._most = most
        self._limit = min(most, FIRST_AT_ONCE)
        self._num_running = 0
        self._has_ended = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def enter(self) -> None:
        """Wait until another one may be in progress."""
        if self._num_running < self._limit:
            self._num_running += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        await turn

    def leave(self) -> None:
        """One has ended, and its places are released."""
        self._num_running -= 1
        self._has_ended = True
        self._limit = min(self._most, self._limit + 1)
        while self._waiting and self._num_running < self._limit:
            turn = self._waiting.popleft()
            if not turn.done():
                self._num_running += 1
                turn.set_result(None)

    async def wait_for_room(self, attempts: Attempts) -> bool:
        """Have one in progress for which instances have no room wait; True when it is to be tried again.

        It waits until another one has ended. Without another one, requests of others take all the room: an
        answer of which a part has ended waits for a while, and the client of another one is to come back.
        """
        if self._num_running > 1:
            self._num_running -= 1
            self._limit = self._num_running
            await self.enter()
            return True
        now = clock.monotonic()
        attempts.full_since = attempts.full_since or now
        if not self._has_ended or now >= attempts.full_since + ROOM_TIMEOUT_S:
            return False
        await asyncio.sleep(POLL_S)
        return True


EndListener = Callable[["PlacedRequest", Finished, Sequence[int]], None]
"""Called with a request that has ended, its report, and the answer's tokens as far as they are known."""


class PlacedRequest:
    """The placements of one request."""

    def __init__(self, scheduling: ConductorClient, place: Place) -> None:
        """``place``: the event that places the request."""
        self.route = Route()
        self.num_held_tokens = 0
        """Leading tokens of the prompt that some instance or the pool was believed to hold."""
        self.end_listeners: list[EndListener] = []
        """Called once, at its end."""
        self._scheduling = scheduling
        self._request_id = place.request_id
        self._place_event = place
        self._placed_ids: dict[str, None] = {}
        self._first_token_timer: asyncio.TimerHandle | None = None
        self.arrived_at = clock.monotonic()
        self.num_cached_tokens = 0
        """Prompt tokens whose KV the prefill instance found in its memory or the pool."""
        self.prefilled: Prefilled | None = None
        """Measurements of the prompt's computation."""
        self.refusal = ""
        """Code of the last refusal by the conductor."""
        # For a recording (``request_recorder.py``):
        self.tenant = ""
        self.prompt_tokens: Sequence[int] = ()
        self.tail = b""

    def end(self, finished: Finished, output: Sequence[int] = ()) -> None:
        """Report to the conductor that the workers are done with this prompt, and its measurements.

        ``output``: the answer's tokens, where they are known.
        """
        self._no_longer_expect_first_token()
        for place_id in self._placed_ids:
            is_own = place_id == self._request_id
            self._scheduling.post(finished if is_own else Finished(place_id))
        self._placed_ids.clear()
        listeners, self.end_listeners = self.end_listeners, []
        for listener in listeners:
            listener(self, finished, output)

    def release(self, finished: Finished) -> None:
        """Report the end of one placement while others of the request go on."""
        if finished.request_id in self._placed_ids:
            del self._placed_ids[finished.request_id]
            self._scheduling.post(finished)

    def _expect_first_token(self, decision: Decision) -> None:
        """Have the prompt count as computed at the instant that was predicted for its first token, up to the
        next placement: nothing shows when an answer that comes whole has begun."""
        if decision.prediction is not None:
            computed = Prefilled(self._request_id, has_begun=True, is_assumed=True)
            self._first_token_timer = asyncio.get_running_loop().call_later(
                decision.prediction.ttft_s, self._scheduling.post, computed
            )

    def _no_longer_expect_first_token(self) -> None:
        if self._first_token_timer is not None:
            self._first_token_timer.cancel()
            self._first_token_timer = None

    @property
    def place_event(self) -> Place:
        return self._place_event

    def _refused(self, refuse: Refuse) -> ApiError:
        """The client's error for a refusal, which is noted."""
        self.refusal = refuse.refusal.code
        return as_error(refuse)

    @property
    def place_id(self) -> str:
        return self._request_id

    async def _place(
        self, place_id: str, attempts: Attempts, needs_prefill: bool, timeout_s: float
    ) -> Decision:
        if attempts.num_failures or attempts.num_unreachable:
            timeout_s = max(timeout_s, RETRY_TIMEOUT_S)
        # Busy workers are tried again and again: from the first one on, or the wait would never end.
        began = attempts.busy_since if attempts.busy is not None else clock.monotonic()
        give_up_at = began + timeout_s
        tracing.phase("place")
        self._no_longer_expect_first_token()
        while True:
            self._placed_ids[place_id] = None
            with tracing.call("place request") as names:
                answer = await self._scheduling.place(
                    msgspec.structs.replace(
                        self._place_event,
                        request_id=place_id,
                        exclude=list(attempts.exclude),
                        needs_prefill=needs_prefill,
                        trace=names.get(tracing.TRACEPARENT, ""),
                    )
                )
            if isinstance(answer, Decision):
                self.num_held_tokens = max(self.num_held_tokens, answer.num_held_tokens)
                return answer
            if answer.refusal.code == InvalidArgument.code:
                raise self._refused(answer)
            if clock.monotonic() >= give_up_at:
                raise attempts.busy or self._refused(answer)
            # Failed instances may be back by now, as a restarted worker keeps its address, and busy ones have
            # room.
            attempts.exclude.clear()
            await asyncio.sleep(min(POLL_S, answer.retry_after_s))

    def _note(self, error: WorkerFailed | WorkerBusy, place_id: str, attempts: Attempts, stage: str) -> None:
        """Note the failed instance and report it to the conductor.

        Raises:
            ApiError: the limit of attempts is reached.
        """
        attempts.exclude[error.instance] = None
        _retries.labels(stage).inc()
        if isinstance(error, WorkerBusy):
            if attempts.busy is None:
                attempts.busy_since = clock.monotonic()
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
            raise ApiError(503, message, code="workers_failed", retry_after_s=RETRY_TIMEOUT_S) from error

    def _note_replaced(self, error: WeightsReplaced, attempts: Attempts, stage: str) -> None:
        """Note that a worker's weights were replaced. It did not fail, and serves the request with new ones.

        Raises:
            WeightsReplaced: the limit of attempts is reached.
        """
        _retries.labels(stage).inc()
        attempts.num_failures += 1
        if attempts.num_failures >= MAX_FAILURES:
            raise error

    def _estimated_prefilled(
        self, decision: Decision, num_tokens: int, num_cached_tokens: int, elapsed_s: float
    ) -> Prefilled:
        """Estimated measurements of a prompt whose instance measures nothing.

        Time in the queue can't be distinguished from time of computing: only a prompt that was expected to
        begin at once is a sample of the latter.
        """
        queue_s = decision.prediction.queue_s if decision.prediction is not None else 0.0
        computed_s = elapsed_s if queue_s < 0.05 * elapsed_s else 0.0
        self.prefilled = Prefilled(
            self._request_id,
            computed_s=computed_s,
            num_computed_tokens=max(1, num_tokens - num_cached_tokens),
            num_cached_tokens=num_cached_tokens,
        )
        return self.prefilled


def as_error(refuse: Refuse) -> ApiError:
    """A refusal as the client's error: overload (429), no instance (503), or a number out of range (400)."""
    code, reason = refuse.refusal.code, refuse.refusal.reason
    if code == InvalidArgument.code:
        return ApiError(400, reason, code=code)
    status = 503 if code == "no_instance" else 429
    return ApiError(status, reason, code=code, retry_after_s=refuse.retry_after_s)

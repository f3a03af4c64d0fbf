# SPDX-License-Identifier: Apache-2.0
"""Moves of answers from decode instances that drain to others, without computing again what they have.

Owns what a gateway knows of draining instances, and one answer's move: place it on another instance, have the
present one end its stream at a token and push the KV, report the outcome. The answer itself, and what follows
when the new instance fails, is ``own_workers.py``'s. The conductor alone decides that an instance drains and
where an answer goes; a move that can't be made leaves the answer where it is, as draining lets it end there.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
from prometheus_client import Counter, Histogram

from mooncake import clock, metrics
from mooncake.conductor.client import ConductorClient
from mooncake.conductor.messages import Decision, Finished, Moved, Place
from mooncake.errors import MooncakeError
from mooncake.gateway.worker_client import WorkerClient
from mooncake.http.worker_stats import ResumedStats
from mooncake.log import get_logger
from mooncake.types import InstanceId

log = get_logger(__name__)

POLL_S = 0.5
"""How often a gateway with answers in progress reads which instances drain."""

MAX_MOVES = 8
"""Moves of one gateway at a time. The other answers go on where they are: a hundred that arrive together
would wait for each other's KV."""

RETRY_S = 5.0
"""How long an answer that could not be moved stays where it is."""

HAND_OVER_TIMEOUT_S = 5.0

_moves = Counter(
    "mooncake_gateway_moves",
    "Moves of answers from draining decode instances, by outcome: source of the KV (pushed, pool, local, "
    "recomputed, unknown), refused (it stays), returned (the new instance failed).",
    ["outcome"],
    registry=metrics.registry,
)
_tokens = Counter(
    "mooncake_gateway_moved_tokens",
    "Tokens of moved answers and their prompts, by what their new instance did: kept or recomputed.",
    ["kind"],
    registry=metrics.registry,
)
_seconds = Histogram(
    "mooncake_gateway_move_seconds",
    "Seconds from a moved answer's end at the old instance to its next token from the new one.",
    registry=metrics.registry,
)


class Moves:
    """The draining instances, as one gateway knows them, and its places for moves."""

    def __init__(self, scheduling: ConductorClient, workers: WorkerClient) -> None:
        self.scheduling = scheduling
        self.workers = workers
        self.slots = asyncio.Semaphore(MAX_MOVES)
        self._draining: dict[InstanceId, None] = {}
        self._num_live = 0

    async def run(self) -> None:
        """Keep the draining instances up to date while answers are in progress, until cancelled."""
        while True:
            await asyncio.sleep(POLL_S)
            if self._num_live:
                await self.refresh()
            else:
                self._draining = {}

    async def refresh(self) -> None:
        """Read which instances drain; without an answer from the conductor nothing changes."""
        try:
            rows = await self.scheduling.status()
        except MooncakeError as error:
            log.debug("draining_unknown", reason=str(error))
            return
        self._draining = {row.instance: None for row in rows if row.health == "draining"}

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """An answer is in progress meanwhile."""
        self._num_live += 1
        try:
            yield
        finally:
            self._num_live -= 1

    def is_draining(self, instance: InstanceId) -> bool:
        return instance in self._draining


class AnswerMove:
    """One move of an answer. The constructor begins it; ``close`` it in any case."""

    def __init__(
        self, moves: Moves, place: Place, origin: Decision, move_id: str, headers: Mapping[str, str]
    ) -> None:
        """
        Args:
            place: the event that places the answer elsewhere, under a name of its own.
            origin: where it is now.
            move_id: the name of its stream there.
        """
        self.origin = origin
        self.target: Decision | None = None
        """Its new instance; None while that is not known, and if it stays."""
        self.has_left = False
        """Whether its stream has ended for ``target``."""
        self._moves, self._place, self._headers = moves, place, headers
        self._move_id = move_id
        # Not to be guessed: the one who knows it may request the KV.
        self._transfer_id = uuid.uuid4().hex
        self._push_from = ""
        self._left_at = 0.0
        self._has_slot = self._was_placed = False
        self._task = asyncio.get_running_loop().create_task(self._begin())

    @property
    def has_failed(self) -> bool:
        """Whether the answer stays where it is."""
        return self._task.done() and self.target is None

    @property
    def params(self) -> dict[str, Any]:
        """Fields of the request to ``target`` by which it gets the KV."""
        if not (self.has_left and self._push_from):
            return {}
        return {"transfer_id": self._transfer_id, "push_from": self._push_from}

    async def _begin(self) -> None:
        await self._moves.slots.acquire()
        self._has_slot = True
        try:
            reason = await self._hand_over()
        except Exception as error:  # a bug of ours; the answer goes on all the same
            log.exception("answer_not_moved", id=self._place.request_id)
            reason = type(error).__name__
        if reason:
            self.target = None
            _moves.labels("refused").inc()
            log.info(
                "answer_not_moved", id=self._place.request_id, instance=self.origin.decode, reason=reason
            )

    async def _hand_over(self) -> str:
        """Place the answer and have its stream ended. Returns why not, or ""."""
        origin = self.origin.decode
        try:
            self._was_placed = True
            found = await self._moves.scheduling.place(self._place)
            if not isinstance(found, Decision):
                return found.refusal.reason
            if found.degraded:
                return found.degraded
            self.target = found
            async with asyncio.timeout(HAND_OVER_TIMEOUT_S):
                port = await self._moves.workers.hand_over(
                    origin, self._move_id, self._transfer_id, self._headers
                )
        except MooncakeError as error:
            return str(error)
        except TimeoutError:
            return f"{origin} did not answer within {HAND_OVER_TIMEOUT_S:g} s"
        if port:
            self._push_from = f"{origin.rpartition(':')[0]}:{port}"
        return ""

    async def leave(self) -> Decision | None:
        """The stream has ended as moved: the instance that continues it, if one was found."""
        self._left_at = clock.monotonic()
        await asyncio.wait({self._task})
        self.has_left = self.target is not None
        return self.target

    def arrived(self, place_id: str, resumed: ResumedStats | None) -> None:
        """The first token of the new instance is here: the answer, placed as ``place_id``, is there now."""
        assert self.target is not None and self.has_left
        outcome, gap_s = outcome_of(resumed), clock.monotonic() - self._left_at
        self._moves.scheduling.post(Moved(place_id, self._place.request_id, outcome))
        _moves.labels(outcome).inc()
        _seconds.observe(gap_s)
        if resumed is not None:
            _tokens.labels("recomputed").inc(resumed.num_computed_tokens)
            _tokens.labels("kept").inc(resumed.num_local_tokens + resumed.num_loaded_tokens)
        log.info(
            "answer_moved",
            id=place_id,
            source=self.origin.decode,
            target=self.target.decode,
            outcome=outcome,
            recomputed_tokens=resumed.num_computed_tokens if resumed is not None else None,
            gap_ms=round(gap_s * 1000, 1),
        )

    def returned(self, reason: str) -> None:
        """The new instance has failed before its first token, and the answer goes on where it was."""
        assert self.target is not None
        _moves.labels("returned").inc()
        log.warning(
            "answer_returned",
            id=self._place.request_id,
            source=self.origin.decode,
            target=self.target.decode,
            reason=reason,
        )

    def close(self) -> None:
        """End the move: its own placement is forgotten, its place is free for the next one."""
        self._task.cancel()
        if self._was_placed:
            self._was_placed = False
            self._moves.scheduling.post(Finished(self._place.request_id))
        if self._has_slot:
            self._has_slot = False
            self._moves.slots.release()


class AnswerMoves:
    """The moves of one answer, one after another; a context manager."""

    def __init__(self, moves: Moves, place: Place, headers: Mapping[str, str]) -> None:
        """``place``: the event that has placed the prompt."""
        self._moves, self._place, self._headers = moves, place, headers
        self._move: AnswerMove | None = None
        self._move_id = ""
        self._may_move_at = 0.0

    def __enter__(self) -> AnswerMoves:
        self._following = self._moves.following()
        self._following.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._end()
        self._following.__exit__(None, None, None)

    def params(self) -> dict[str, Any]:
        """Fields of the next request to a worker: a new name of its stream, and where the KV is."""
        self._move_id = uuid.uuid4().hex
        return {"move_id": self._move_id, **(self._move.params if self._move is not None else {})}

    def advance(
        self,
        place_id: str,
        decision: Decision,
        num_tokens: int,
        exclude: Iterable[InstanceId],
        resumed: ResumedStats | None,
    ) -> None:
        """Tokens have arrived, and more will: begin a move where that is due, or end the one that is done.

        Args:
            place_id: the request, as it is placed where the tokens came from, by ``decision``.
            num_tokens: tokens of prompt and answer.
            exclude: instances to which it can't move.
            resumed: what the instance has reported, if it continues the answer.
        """
        move = self._move
        if move is None:
            if self._moves.is_draining(decision.decode) and clock.monotonic() >= self._may_move_at:
                place = msgspec.structs.replace(
                    self._place,
                    request_id=f"{place_id}/moved",
                    num_tokens=num_tokens,
                    exclude=[decision.decode, *exclude],
                    needs_prefill=False,
                )
                self._move = AnswerMove(self._moves, place, decision, self._move_id, self._headers)
        elif move.has_left:
            move.arrived(place_id, resumed)
            self._end()
        elif move.has_failed:
            self._may_move_at = clock.monotonic() + RETRY_S
            self._end()

    async def leave(self) -> Decision | None:
        """The stream has ended as moved: where it goes on; None where it is to be placed."""
        target = await self._move.leave() if self._move is not None else None
        if target is None:
            self._end()
        return target

    def failed(self, reason: str) -> Decision | None:
        """The worker has failed: where the answer is still, if it was about to leave from there."""
        move, origin = self._move, None
        if move is not None and move.has_left:
            move.returned(reason)
            origin = move.origin
            self._may_move_at = clock.monotonic() + RETRY_S
        self._end()
        return origin

    def _end(self) -> None:
        if self._move is not None:
            self._move.close()
            self._move = None


def outcome_of(resumed: ResumedStats | None) -> str:
    """Where the KV of a moved answer came from."""
    if resumed is None:
        return "unknown"
    if resumed.is_pushed:
        return "pushed"
    if resumed.num_loaded_tokens:
        return "pool"
    return "local" if resumed.num_local_tokens else "recomputed"

# SPDX-License-Identifier: Apache-2.0
"""Moves of answers from one decode instance to another, without computing again what they have.

Owns what a gateway knows of draining instances, and one answer's move: place it on another instance, have the
present one end its stream at a token and push the KV, report the outcome. The answer itself, and what follows
when the new instance fails, is ``own_workers.py``'s. An answer moves when its instance drains, and then the
conductor decides where it goes; or by an operator's order (``POST /v1/kv/move``), which names the instance,
by excluding all others. A move that can't be made leaves the answer where it is.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable, Mapping, Sequence
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
SLOT_S = 5.0
"""How long a move that has begun counts among ``MAX_MOVES`` at most."""

ORDER_TIMEOUT_S = 30.0
"""How long an operator's order waits for the first token from the new instance."""

_moves = Counter(
    "mooncake_gateway_moves",
    "Moves of answers, and of prompts by an operator, to another instance, by outcome: source of the KV "
    "(pushed, pool, local, recomputed, unknown), refused (it stays), returned (the new instance failed).",
    ["outcome"],
    registry=metrics.registry,
)
_tokens = Counter(
    "mooncake_gateway_moved_tokens",
    "Tokens of moved answers and prompts, by what their new instance did: kept or recomputed.",
    ["kind"],
    registry=metrics.registry,
)
_seconds = Histogram(
    "mooncake_gateway_move_seconds",
    "Seconds from a moved answer's end at the old instance to its next token from the new one.",
    registry=metrics.registry,
)


class MovedPrompt(msgspec.Struct):
    """What an instance did to have a prompt's KV. Blocks are full ones: the rest of a prompt has none."""

    id: str
    to: InstanceId
    outcome: str
    "As in ``mooncake_gateway_moves``: pool if any token was loaded, else local or recomputed."
    blocks_total: int
    blocks_local: int
    "Found in the instance's own memory."
    blocks_loaded: int
    "Loaded from the pool."
    blocks_computed: int
    "Found nowhere, and computed."
    seconds: float


class MovedChoice(msgspec.Struct):
    """Outcome of an order for one choice of an answer."""

    index: int
    outcome: str
    "As in ``mooncake_gateway_moves``."
    reason: str = ""


class MoveOrder:
    """An operator's order to move one choice of an answer to ``target``, until it has an ``outcome``."""

    def __init__(self, index: int, target: InstanceId, others: Sequence[InstanceId]) -> None:
        """``others``: all instances but ``target``."""
        self.index, self.target, self.others = index, target, others
        self.has_begun = False
        self.outcome: asyncio.Future[MovedChoice] = asyncio.get_running_loop().create_future()

    @property
    def is_over(self) -> bool:
        """Whether it was carried out or withdrawn."""
        return self.outcome.done()

    def end(self, outcome: str, reason: str = "") -> None:
        if not self.outcome.done():
            self.outcome.set_result(MovedChoice(self.index, outcome, reason))


class Moves:
    """The draining instances, as one gateway knows them; its answers in progress, and places for moves."""

    def __init__(self, scheduling: ConductorClient, workers: WorkerClient) -> None:
        self.scheduling = scheduling
        self.workers = workers
        self.slots = asyncio.Semaphore(MAX_MOVES)
        self._draining: dict[InstanceId, None] = {}
        self._live: dict[str, list[AnswerMoves]] = {}
        """The choices in progress of every answer, by its id."""

    async def run(self) -> None:
        """Keep the draining instances up to date while answers are in progress, until cancelled."""
        while True:
            await asyncio.sleep(POLL_S)
            if self._live:
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

    def began(self, answer_id: str, choice: AnswerMoves) -> None:
        """A choice of an answer is in progress from now on, until ``ended``."""
        self._live.setdefault(answer_id, []).append(choice)

    def ended(self, answer_id: str, choice: AnswerMoves) -> None:
        self._live[answer_id].remove(choice)
        if not self._live[answer_id]:
            del self._live[answer_id]

    def is_draining(self, instance: InstanceId) -> bool:
        return instance in self._draining

    async def move_answer(
        self, answer_id: str, target: InstanceId, others: Sequence[InstanceId]
    ) -> list[MovedChoice] | None:
        """Move the choices of an answer to ``target``, and wait for their first tokens from there.

        ``others``: all other instances. Returns the outcome of each choice; None where no choice of such an
        answer is generated through this gateway now.
        """
        if answer_id not in self._live:
            return None
        orders = [choice.order(target, others) for choice in self._live[answer_id]]
        try:
            await asyncio.wait([order.outcome for order in orders], timeout=ORDER_TIMEOUT_S)
            for order in orders:
                reason = f"no token from {target} within {ORDER_TIMEOUT_S:g} s"
                order.end("unknown" if order.has_begun else "refused", reason)
            return sorted((order.outcome.result() for order in orders), key=lambda moved: moved.index)
        finally:
            for order in orders:
                order.end("refused", "withdrawn")

    def prompt_moved(self, found: MovedPrompt, num_computed_tokens: int, num_kept_tokens: int) -> None:
        """Count a prompt that has moved."""
        _moves.labels(found.outcome).inc()
        _tokens.labels("recomputed").inc(num_computed_tokens)
        _tokens.labels("kept").inc(num_kept_tokens)
        log.info(
            "prompt_moved",
            id=found.id,
            target=found.to,
            outcome=found.outcome,
            blocks=found.blocks_total,
            local_blocks=found.blocks_local,
            loaded_blocks=found.blocks_loaded,
            computed_blocks=found.blocks_computed,
            seconds=found.seconds,
        )

    def prompt_refused(self, move_id: str, target: InstanceId, reason: str) -> None:
        """Count a prompt that could not be moved."""
        _moves.labels("refused").inc()
        log.info("prompt_not_moved", id=move_id, target=target, reason=reason)


class AnswerMove:
    """One move of an answer. The constructor begins it; ``close`` it in any case."""

    def __init__(
        self,
        moves: Moves,
        place: Place,
        origin: Decision,
        move_id: str,
        headers: Mapping[str, str],
        order: MoveOrder | None = None,
    ) -> None:
        """
        Args:
            place: the event that places the answer elsewhere, under a name of its own.
            origin: where it is now.
            move_id: the name of its stream there.
            order: the operator's order, if it moves for one.
        """
        self.origin = origin
        self.order = order
        self.reason = ""
        """Why it stays where it is."""
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
            self.target, self.reason = None, reason
            _moves.labels("refused").inc()
            log.info(
                "answer_not_moved", id=self._place.request_id, instance=self.origin.decode, reason=reason
            )
            self._release()
        else:
            # A client that reads nothing must not keep others from moving.
            asyncio.get_running_loop().call_later(SLOT_S, self._release)

    async def _hand_over(self) -> str:
        """Place the answer and have its stream ended. Returns why not, or ""."""
        origin, order = self.origin.decode, self.order
        if order is not None and order.is_over:
            return "the order was withdrawn"
        try:
            self._was_placed = True
            found = await self._moves.scheduling.place(self._place)
            if not isinstance(found, Decision):
                return found.refusal.reason
            if found.degraded:
                return found.degraded
            if order is not None and found.decode != order.target:  # it has joined since the order was made
                return f"it was placed on {found.decode}"
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
        if self.order is not None:
            self.order.end(outcome)
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
        if self.order is not None:
            self.order.end("returned", reason)
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
        if self.order is not None:
            ended = "the answer has ended, or was placed anew"
            self.order.end("unknown" if self.has_left else "refused", self.reason or ended)
        if self._was_placed:
            self._was_placed = False
            self._moves.scheduling.post(Finished(self._place.request_id))
        self._release()

    def _release(self) -> None:
        if self._has_slot:
            self._has_slot = False
            self._moves.slots.release()


class AnswerMoves:
    """The moves of one answer, one after another; a context manager."""

    def __init__(self, moves: Moves, place: Place, headers: Mapping[str, str], index: int) -> None:
        """``place``: the event that has placed the prompt. ``index`` of the choice in its answer."""
        self._moves, self._place, self._headers, self._index = moves, place, headers, index
        # Several prompts of an answer are placed as parts of its id.
        self._answer_id = place.request_id.partition("/")[0]
        self._move: AnswerMove | None = None
        self._order: MoveOrder | None = None
        self._move_id = ""
        self._num_moves = 0
        self._may_move_at = 0.0

    def __enter__(self) -> AnswerMoves:
        self._moves.began(self._answer_id, self)
        return self

    def __exit__(self, *exception: object) -> None:
        self._end()
        if self._order is not None:
            self._order.end("refused", "the answer has ended")
        self._moves.ended(self._answer_id, self)

    def order(self, target: InstanceId, others: Sequence[InstanceId]) -> MoveOrder:
        """Move to ``target`` at the next token, or after the move that is under way."""
        order = MoveOrder(self._index, target, others)
        if self._order is not None and not self._order.is_over:
            order.end("refused", f"it is being moved to {self._order.target}")
        else:
            self._order = order
        return order

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
            order = self._order_due(decision, exclude)
            is_drained = self._moves.is_draining(decision.decode) and clock.monotonic() >= self._may_move_at
            if order is not None or is_drained:
                # Of its own for each: the end of one move may be reported after the next one was placed.
                self._num_moves += 1
                place = msgspec.structs.replace(
                    self._place,
                    request_id=f"{place_id}/moved/{self._num_moves}",
                    num_tokens=num_tokens,
                    exclude=[decision.decode, *exclude] if order is None else [*order.others],
                    needs_prefill=False,
                )
                self._move = AnswerMove(self._moves, place, decision, self._move_id, self._headers, order)
        elif move.has_left:
            move.arrived(place_id, resumed)
            self._end()
        elif move.has_failed:
            self._may_move_at = clock.monotonic() + RETRY_S
            self._end()

    def _order_due(self, decision: Decision, exclude: Iterable[InstanceId]) -> MoveOrder | None:
        """The order that is to be carried out now; one that can't be is ended here."""
        order, self._order = self._order, None
        if order is None or order.is_over:
            return None
        if decision.decode == order.target:
            order.end("refused", "it is there already")
        elif order.target in exclude:
            order.end("refused", f"{order.target} has failed during this answer")
        else:
            order.has_begun, self._order = True, order
            return order
        return None

    async def leave(self) -> Decision | None:
        """The stream has ended as moved: where it goes on; None where it goes on as before."""
        target = await self._move.leave() if self._move is not None else None
        if target is None:
            self._may_move_at = clock.monotonic() + RETRY_S
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

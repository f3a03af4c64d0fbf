# SPDX-License-Identifier: Apache-2.0
"""Agents' sessions as a closed load: a session's next turn is sent after the former answer and a pause.

It owns what such a session is and which turn is sent next, for the simulator and for whatever drives a live
cluster, and knows neither tokens nor time. ``recipe_sessions`` makes sessions after a recipe, and
``trace_sessions`` cuts them from a trace of agents (one that names sessions).

``ClosedLoop`` keeps a number of sessions running. Places are filled with sessions that are under way, as
they are at any instant of a long run: the first one of each begins with a part of its turns in one prompt,
which is sent in a first phase, so that whatever caches there are have what they can. Only then does the load
begin.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from random import Random

from mooncake.errors import InvalidArgument
from mooncake.sim.traces.generators import Agentic
from mooncake.sim.traces.trace import TraceRow

_SESSION_BITS = 32
_BEGINNING_BITS = 20
_COMMON = 1 << 62
"""Set in the keys of beginnings, which are no session's own."""


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session."""

    num_kept: int
    """Tokens of the conversation so far, answers included, with which its prompt begins."""
    num_new: int
    """Tokens that follow them in its prompt."""
    num_output: int
    pause_s: float = 0.0
    """From the end of the former answer until it is sent."""

    @property
    def num_input(self) -> int:
        return self.num_kept + self.num_new


@dataclasses.dataclass(frozen=True, slots=True)
class AgentSession:
    """``beginning``: the first ``turns[0].num_kept`` tokens are common to all sessions with this number."""

    name: str
    beginning: int
    turns: tuple[Turn, ...]

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its answer."""
        return max(turn.num_input + turn.num_output for turn in self.turns)

    def from_turn(self, first: int) -> AgentSession:
        """The same session with the turns before ``first`` in the prompt of that one."""
        start, turn = self.turns[0], self.turns[first]
        num_common = min(start.num_kept, turn.num_input)
        whole = dataclasses.replace(turn, num_kept=num_common, num_new=turn.num_input - num_common)
        return dataclasses.replace(self, turns=(whole, *self.turns[first + 1 :]))


def recipe_sessions(recipe: Agentic, num_sessions: int) -> list[AgentSession]:
    """``num_sessions`` sessions after the recipe of the generator ``agentic``. Pauses are log-normal."""
    random = Random(recipe.seed)
    sigma = math.log(max(1.0, recipe.pause_p99_s / recipe.pause_s)) / 2.3263

    def drawn(amount: int) -> int:
        return (
            max(1, round(amount * (1 + recipe.jitter * random.uniform(-1, 1)))) if recipe.jitter else amount
        )

    found = []
    for number in range(num_sessions):
        num_turns, num_output = drawn(recipe.turns), drawn(recipe.output_tokens)
        first_tokens, turn_tokens = drawn(recipe.first_tokens), drawn(recipe.turn_tokens)
        turns = [Turn(recipe.common_tokens, first_tokens, num_output)]
        while len(turns) < num_turns:
            pause_s = random.lognormvariate(math.log(recipe.pause_s), sigma)
            num_before = turns[-1].num_input + turns[-1].num_output
            turns.append(Turn(num_before, turn_tokens, num_output, pause_s))
        found.append(AgentSession(f"s{number}", number % recipe.groups, tuple(turns)))
    return found


def trace_sessions(
    sessions: Iterable[Sequence[TraceRow]],
    *,
    block_tokens: int,
    divide_lengths: int,
    longest: int,
    common_tokens: int,
) -> list[AgentSession]:
    """Sessions of a trace, with lengths divided, each cut where a prompt and its answer exceed ``longest``
    tokens; those that have less than two turns then are left out.

    A turn keeps what its blocks have in common with the turn before; if that is all of them, its prompt goes
    on behind the answer. Sessions of such traces share no ids, though they have common instructions: the
    first ``common_tokens`` of each are taken for those.
    """
    found: list[AgentSession] = []
    for rows in sessions:
        turns: list[Turn] = []
        before: Sequence[int] = ()
        for row in rows:
            num_input = max(common_tokens + 1, row.num_input // divide_lengths)
            num_output = max(2, row.num_output // divide_lengths)
            if num_input + num_output > longest:
                break
            num_kept, pause_s = common_tokens, 0.0
            if turns:
                num_same = _num_same(row.keys, before)
                held = turns[-1].num_input + turns[-1].num_output
                if num_same < len(before):
                    held = max(common_tokens, num_same * block_tokens // divide_lengths)
                num_kept, pause_s = min(held, num_input - 1), row.pause_s
            turns.append(Turn(num_kept, num_input - num_kept, num_output, pause_s))
            before = row.keys
        if len(turns) > 1:
            found.append(AgentSession(rows[0].session or f"s{len(found)}", 0, tuple(turns)))
    return found


def _num_same(keys: Sequence[int], others: Sequence[int]) -> int:
    pairs = enumerate(zip(keys, others, strict=False))
    return next((at for at, (ours, theirs) in pairs if ours != theirs), min(len(keys), len(others)))


class SessionKeys:
    """A session's blocks in the course of its turns, as keys: an integer stands for a block's tokens and all
    before it."""

    __slots__ = ("_beginning", "_block_tokens", "_keys", "_next_key", "_num_tokens")

    def __init__(self, session: AgentSession, number: int, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._next_key = (number + 1) << _SESSION_BITS
        self._beginning = _COMMON | session.beginning << _BEGINNING_BITS
        num_common = session.turns[0].num_kept
        self._keys = list(range(self._beginning, self._beginning + num_common // block_tokens))
        self._num_tokens = num_common

    def send(self, turn: Turn) -> list[int]:
        """Keys of the full blocks of its prompt and, as far as their KV is computed, its answer."""
        size = self._block_tokens
        num_kept = min(turn.num_kept, self._num_tokens)
        del self._keys[num_kept // size :]
        self._num_tokens = turn.num_input + turn.num_output
        num_full = (self._num_tokens - 1) // size  # the answer's last token is never computed
        num_fresh = num_full - len(self._keys)
        self._keys.extend(range(self._next_key, self._next_key + num_fresh))
        self._next_key += max(0, num_fresh)
        return list(self._keys)


@dataclasses.dataclass(frozen=True, slots=True)
class NextTurn:
    """A turn that ``place`` sends ``pause_s`` from now on."""

    place: int
    session: AgentSession
    number: int
    """Number of the session in this run; no two have the same."""
    index: int
    """Which of the session's turns."""
    pause_s: float
    is_first_phase: bool

    @property
    def turn(self) -> Turn:
        return self.session.turns[self.index]


class ClosedLoop:
    """``num_at_once`` sessions at a time, until ``num_requests`` have ended after the first phase.

    Then the load is over: what is under way is not counted, and what pauses is not sent. (Were the last ones
    waited for, the longest pause would be measured, not the cluster.)
    """

    def __init__(
        self, sessions: Sequence[AgentSession], num_at_once: int, num_requests: int, seed: int = 0
    ) -> None:
        for name, value in (("sessions", len(sessions)), ("num_at_once", num_at_once)):
            if value < 1:
                raise InvalidArgument(name, value, "1 or more")
        self._random = Random(seed)
        self._left = self._sessions(sessions)
        self._num_at_once = num_at_once
        self._num_requests = num_requests
        self._num_first = num_at_once
        """Requests of the first phase that have not ended."""
        self._num_begun = 0
        self.is_over = False
        self._at: dict[int, NextTurn] = {}

    @staticmethod
    def _sessions(sessions: Sequence[AgentSession]) -> Iterator[AgentSession]:
        """All of them, then again under other names."""
        lap = 0
        while True:
            for session in sessions:
                yield dataclasses.replace(session, name=f"{session.name}/{lap}" if lap else session.name)
            lap += 1

    def start(self) -> list[NextTurn]:
        """The turns of the first phase."""
        found = []
        for place in range(self._num_at_once):
            whole = next(self._left)
            # Spread evenly, in an order without a pattern that a rotation among servers could follow.
            share = (place * 0.6180339887498949) % 1.0
            session = whole.from_turn(int(share * (len(whole.turns) - 1)))
            found.append(self._begin(place, session, 0.0, is_first_phase=True))
        return found

    def _begin(self, place: int, session: AgentSession, pause_s: float, is_first_phase: bool) -> NextTurn:
        turn = NextTurn(place, session, self._num_begun, 0, pause_s, is_first_phase)
        self._num_begun += 1
        self._at[place] = turn
        return turn

    def ended(self, place: int) -> list[NextTurn]:
        """The answer to the turn of ``place`` has ended, or failed: what is sent next, by any place."""
        if self._at[place].is_first_phase:
            self._num_first -= 1
            if self._num_first:
                return []
            self.is_over = not self._num_requests
            return [] if self.is_over else [self._next(number) for number in range(self._num_at_once)]
        self._num_requests -= 1
        self.is_over = self.is_over or self._num_requests <= 0
        return [] if self.is_over else [self._next(place)]

    def _next(self, place: int) -> NextTurn:
        now = self._at[place]
        if now.index + 1 == len(now.session.turns):
            return self._begin(place, next(self._left), now.turn.pause_s, is_first_phase=False)
        turn = dataclasses.replace(now, index=now.index + 1, is_first_phase=False)
        pause_s = turn.turn.pause_s
        if now.is_first_phase:  # it is in the middle of that pause when the load begins
            pause_s *= self._random.random()
        self._at[place] = dataclasses.replace(turn, pause_s=pause_s)
        return self._at[place]


def num_working_tokens(sessions: Iterable[AgentSession]) -> int:
    """Tokens that sessions hold which are at their first turn here, those in common counted once."""
    common: dict[int, int] = {}
    total = 0
    for session in sessions:
        turn = session.turns[0]
        common[session.beginning] = turn.num_kept
        total += turn.num_new + turn.num_output
    return total + sum(common.values())

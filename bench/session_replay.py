# SPDX-License-Identifier: Apache-2.0
"""Agents' sessions against a live endpoint: each next turn is sent after the former answer and its pause.

It owns the tokens of conversations (a prompt has the real answers before it) and what is measured of each
request, besides the hit rate that a cache without end, shared by all instances, would have had on the same
requests. Which turn is next is decided by ``ClosedLoop``, as in the simulator.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
from numpy.typing import NDArray

from mooncake import clock
from mooncake.cli.replay.endpoint import HIGHEST_TOKEN, LOWEST_TOKEN, Endpoint, TimedAnswer
from mooncake.prefix import BlockHash, block_hashes, root_hash
from mooncake.sim.serving.results import DONE, RunResults
from mooncake.sim.traces.sessions import AgentSession, ClosedLoop, NextTurn

DECODE_HEADER = "x-mooncake-decode"


@dataclass
class SentTurn:
    """A request that was sent and has ended."""

    upcoming: NextTurn
    prompt: list[int]
    sent_s: float
    attainable_tokens: int
    """Tokens that an endless cache, shared by all, had of the prompt when it was sent."""
    answer: TimedAnswer

    @property
    def instance(self) -> str:
        return self.answer.headers.get(DECODE_HEADER, "")


class EndlessTokenCache:
    """All blocks of prompts and answers that have ended."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._known: set[BlockHash] = set()

    def match(self, tokens: Sequence[int]) -> int:
        """How many leading tokens of a prompt are cached; at least the last one is computed."""
        hashes = self._hashes(tokens[:-1])
        found = next((at for at, one in enumerate(hashes) if one not in self._known), len(hashes))
        return found * self._block_tokens

    def add(self, tokens: Sequence[int]) -> None:
        self._known.update(self._hashes(tokens))

    def _hashes(self, tokens: Sequence[int]) -> list[BlockHash]:
        return block_hashes(tokens, self._block_tokens, root_hash())


class SessionReplay:
    """One run. ``between`` is called once, when the first phase has ended and before the load begins."""

    def __init__(
        self,
        endpoint: Endpoint,
        loop: ClosedLoop,
        block_tokens: int,
        seed: str,
        between: Callable[[], None] = lambda: None,
    ) -> None:
        self._endpoint = endpoint
        self._loop = loop
        self._seed = seed
        self._between = between
        self._cache = EndlessTokenCache(block_tokens)
        self._tokens: dict[int, list[int]] = {}
        """By place: the conversation of the session there, answers included."""
        self._randoms: dict[int, Random] = {}
        self._sent: list[SentTurn] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._began_s = 0.0

    async def run(self) -> list[SentTurn]:
        """Run the load until it is over; the requests of the first phase come first."""
        self._began_s = clock.monotonic()
        self._launch(self._loop.start())
        while self._tasks and not self._loop.is_over:
            done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
            self._tasks -= done
            for task in done:
                task.result()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        return sorted(self._sent, key=lambda one: (not one.upcoming.is_first_phase, one.sent_s))

    def _launch(self, turns: Iterable[NextTurn]) -> None:
        self._tasks |= {asyncio.create_task(self._one(turn)) for turn in turns}

    async def _one(self, upcoming: NextTurn) -> None:
        await asyncio.sleep(upcoming.pause_s)
        prompt = self._prompt(upcoming)
        attainable, sent_s = self._cache.match(prompt), clock.monotonic() - self._began_s
        num_output = upcoming.turn.num_output
        answer = await self._endpoint.complete(prompt, num_output)
        if self._loop.is_over:
            return
        self._sent.append(SentTurn(upcoming, prompt, sent_s, attainable, answer))
        # What did not come is made up, so that the session goes on with the same lengths.
        random = self._randoms[upcoming.place]
        missing = random.choices(range(LOWEST_TOKEN, HIGHEST_TOKEN), k=num_output)[len(answer.token_ids) :]
        self._tokens[upcoming.place] = tokens = prompt + answer.token_ids + missing
        self._cache.add(tokens[:-1])
        following = self._loop.ended(upcoming.place)
        if upcoming.is_first_phase and following:
            self._between()
        self._launch(following)

    def _prompt(self, upcoming: NextTurn) -> list[int]:
        turn, place, session = upcoming.turn, upcoming.place, upcoming.session
        if not upcoming.index:
            self._randoms[place] = Random(f"{self._seed}/{upcoming.number}")
            common = Random(f"{self._seed}/common {session.beginning}")
            self._tokens[place] = common.choices(range(LOWEST_TOKEN, HIGHEST_TOKEN), k=turn.num_kept)
        new = self._randoms[place].choices(range(LOWEST_TOKEN, HIGHEST_TOKEN), k=turn.num_new)
        return self._tokens[place][: turn.num_kept] + new


@dataclass(frozen=True)
class LoadFigures:
    """What a closed load came to, without its first phase."""

    num_done: int
    num_failed: int
    span_s: float
    """From the end of the first phase to the end of the last request that is counted."""
    ttft_s: NDArray[np.float64]
    latency_s: NDArray[np.float64]
    hit_rate: float

    @property
    def per_s(self) -> float:
        return self.num_done / self.span_s

    def ttft(self, share: float) -> float:
        return float(np.quantile(self.ttft_s, share))

    def latency(self, share: float) -> float:
        return float(np.quantile(self.latency_s, share))


def figures_of(sent: Sequence[SentTurn]) -> LoadFigures:
    """Measured figures."""
    began_s = max(one.sent_s + one.answer.end_s for one in sent if one.upcoming.is_first_phase)
    load = [one for one in sent if not one.upcoming.is_first_phase]
    done = [one for one in load if one.answer.is_complete]
    if not done:
        raise ValueError(f"no request was answered: {[one.answer.error for one in sent][:3]}")
    return LoadFigures(
        len(done),
        len(load) - len(done),
        max(one.sent_s + one.answer.end_s for one in load) - began_s,
        np.array([one.answer.token_at_s[0] for one in done]),
        np.array([one.answer.end_s for one in done]),
        sum(one.answer.num_cached for one in done) / sum(len(one.prompt) for one in done),
    )


def attainable_hit_rate(sent: Sequence[SentTurn]) -> float:
    """Hit rate of an endless shared cache on the same requests, without the first phase."""
    load = [one for one in sent if not one.upcoming.is_first_phase]
    return sum(one.attainable_tokens for one in load) / sum(len(one.prompt) for one in load)


def simulated_figures(results: RunResults, num_first: int, num_requests: int) -> LoadFigures:
    """The same figures of a simulated run, whose first ``num_first`` rows are the first phase. Only requests
    that ended before the load was over are counted: the first ``num_requests``."""
    ends_s = results.arrival_s + results.e2e_s
    began_s, load = float(np.nanmax(ends_s[:num_first])), slice(num_first, None)
    over_s = float(np.sort(ends_s[load])[min(num_requests, len(results) - num_first) - 1])
    counted = np.equal(results.status[load], DONE) & (ends_s[load] <= over_s)
    requested = float(results.num_input[load][counted].sum(dtype=np.float64))
    return LoadFigures(
        int(counted.sum()),
        num_requests - int(counted.sum()),
        over_s - began_s,
        results.ttft_s[load][counted].astype(np.float64),
        results.e2e_s[load][counted].astype(np.float64),
        float(results.cached_tokens[load][counted].sum(dtype=np.float64)) / requested,
    )


def mean_figures(runs: Sequence[LoadFigures]) -> LoadFigures:
    """Figures of several runs of one load: means, and the times of all of them together."""
    return LoadFigures(
        round(np.mean([one.num_done for one in runs])),
        round(np.mean([one.num_failed for one in runs])),
        float(np.mean([one.span_s for one in runs])),
        np.concatenate([one.ttft_s for one in runs]),
        np.concatenate([one.latency_s for one in runs]),
        float(np.mean([one.hit_rate for one in runs])),
    )


def running_sessions(sessions: Sequence[AgentSession], num_at_once: int) -> list[AgentSession]:
    """The sessions with which a closed load begins, each with what it has by then."""
    return [one.session for one in ClosedLoop(sessions, num_at_once, 0).start()]

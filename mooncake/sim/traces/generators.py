# SPDX-License-Identifier: Apache-2.0
"""Synthetic requests: agents' sessions, Poisson arrivals, bursts.

A generator is a frozen description; iterating it makes its rows, the same ones each time, one by one, with
only the running sessions in memory. Prefixes are small integers made on the way: tokens that don't exist are
not hashed. ``parse`` reads a command line's text: ``agentic:sessions=375,turns=30``.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Callable, Iterator
from random import Random
from typing import Any, TypeAlias

from mooncake.errors import InvalidArgument
from mooncake.sim.traces.trace import TraceRow

_TAIL = 1 << 19
"""Set in a session's keys of partial blocks, which no later turn has."""
_SESSION_BITS = 20
MAX_TOKENS = 100_000_000
_LEAST, _LARGEST = 1e-12, 1e12
_MOST = {"spread": 10.0, "jitter": 1.0, "peak": 1e4}
"""The largest values of other fields than tokens; the others' is ``_LARGEST``, and the least above 0
``_LEAST``."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Agentic:
    """Coding agents after the recipe of the vLLM project's Mooncake benchmark of May 2026: a long common
    prompt, a first input, then turns that append the last answer and the results of its tools.

    The pause between an answer and the next turn is log-normal, with the median and 99th percentile of the
    sessions that the recipe was made from.
    """

    sessions: int = 375
    """Sessions that run at once. When one ends and requests are left, another one begins."""
    turns: int = 30
    """Requests of a session."""
    requests: int = 0
    """Requests in total; 0: every session once."""
    common_tokens: int = 20_000
    """Tokens at the beginning of every prompt that are common to all."""
    first_tokens: int = 10_000
    """Tokens of a session's first input, behind the common ones."""
    turn_tokens: int = 2_048
    """Tokens that each further turn adds, besides the answer before it."""
    output_tokens: int = 900
    """Tokens of each answer."""
    groups: int = 1
    """Number of different common prompts: session n has number n modulo this."""
    jitter: float = 0.0
    """How much a session's turns and lengths differ: drawn within this fraction of the values above."""
    pause_s: float = 5.2
    """Median time from an answer to the next turn."""
    pause_p99_s: float = 81.4
    answer_s: float = 27.0
    """Assumed mean time from a request to its answer's end: a generator can't know how long it will take."""
    ramp_s: float = 0.0
    """Time over which the first sessions begin, at equal distances; 0: as long as a session takes, so that
    the load is level from then on."""
    block_tokens: int = 512
    seed: int = 0

    @property
    def num_rows(self) -> int:
        """Number of rows, for a progress bar; approximate with ``jitter`` and without ``requests``."""
        return self.requests or self.sessions * self.turns

    def __iter__(self) -> Iterator[TraceRow]:
        _check(
            self,
            ("sessions", "turns", "groups", "first_tokens", "output_tokens", "block_tokens"),
            ("pause_s",),
        )
        longest = (
            self.common_tokens + self.first_tokens + self.turns * (self.turn_tokens + self.output_tokens)
        )
        if longest * (1 + self.jitter) ** 2 // self.block_tokens >= _TAIL:
            raise InvalidArgument("turns", self.turns, f"prompts of at most {_TAIL} blocks")
        random = Random(self.seed)
        sigma = math.log(max(1.0, self.pause_p99_s / self.pause_s)) / 2.3263
        pause_mu = math.log(self.pause_s)
        mean_gap_s = self.answer_s + self.pause_s * math.exp(sigma * sigma / 2)
        apart_s = (self.ramp_s or mean_gap_s * self.turns) / self.sessions
        waiting = [
            (apart_s * number, number, _Session(self, number, random)) for number in range(self.sessions)
        ]
        num_begun, num_left = self.sessions, self.requests or math.inf
        while waiting and num_left:
            num_left -= 1
            now, number, session = waiting[0]
            yield session.turn(now)
            later_s = now + self.answer_s + random.lognormvariate(pause_mu, sigma)
            if session.is_over:
                if not self.requests:
                    heapq.heappop(waiting)
                    continue
                session, number = _Session(self, num_begun, random), num_begun
                num_begun += 1
            heapq.heapreplace(waiting, (later_s, number, session))


class _Session:
    """A conversation that grows."""

    __slots__ = ("_base", "_block_tokens", "_keys", "_name", "_num_left", "_num_tokens", "_output", "_step")

    def __init__(self, of: Agentic, number: int, random: Random) -> None:
        def drawn(amount: int) -> int:
            return max(1, round(amount * (1 + of.jitter * random.uniform(-1, 1)))) if of.jitter else amount

        self._name = f"s{number}"
        self._block_tokens = of.block_tokens
        self._base = (number + of.groups + 1) << _SESSION_BITS
        self._num_left = drawn(of.turns)
        self._output = drawn(of.output_tokens)
        self._step = drawn(of.turn_tokens) + self._output
        self._num_tokens = of.common_tokens + drawn(of.first_tokens)
        common = (number % of.groups) << _SESSION_BITS
        self._keys = list(range(common, common + of.common_tokens // of.block_tokens))

    @property
    def is_over(self) -> bool:
        return not self._num_left

    def turn(self, now: float) -> TraceRow:
        keys, num_tokens = self._keys, self._num_tokens
        num_full, num_partial = divmod(num_tokens, self._block_tokens)
        keys.extend(range(self._base + len(keys), self._base + num_full))
        tail = (self._base + _TAIL + num_full,) if num_partial else ()
        self._num_left -= 1
        self._num_tokens += self._step
        return TraceRow(now, num_tokens, self._output, (*keys, *tail), self._name)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Poisson:
    """Independent requests of log-normal lengths, at random times; some share one of a few beginnings.

    With ``peak`` above 1 there are bursts: for ``burst_s`` of each ``period_s`` the rate is multiplied by it.
    """

    rate: float = 1.0
    """Requests a second, between bursts."""
    requests: int = 1000
    input_tokens: int = 2_000
    """Median tokens of a prompt, shared beginnings included."""
    output_tokens: int = 200
    """Median."""
    spread: float = 0.8
    """Sigma of the logarithm of both lengths; 0: all equal."""
    prefixes: int = 0
    """Number of different beginnings, the k-th of them 1/k as frequent as the first; 0: nothing is shared."""
    prefix_tokens: int = 1_024
    peak: float = 1.0
    period_s: float = 300.0
    burst_s: float = 30.0
    block_tokens: int = 512
    seed: int = 0

    @property
    def num_rows(self) -> int:
        return self.requests

    def __iter__(self) -> Iterator[TraceRow]:
        _check(
            self, ("requests", "input_tokens", "output_tokens", "block_tokens"), ("rate", "peak", "period_s")
        )
        random = Random(self.seed)
        size = self.block_tokens
        weights = [1 / (rank + 1) for rank in range(self.prefixes)]
        num_shared = self.prefix_tokens // size if self.prefixes else 0
        now = 0.0
        for number in range(self.requests):
            now = self._next_arrival(now, random)
            num_input = self._length(self.input_tokens, random)
            num_blocks = -(-num_input // size)
            shared = min(num_shared, num_input // size)
            family = random.choices(range(self.prefixes), weights)[0] if shared else 0
            own = (number + self.prefixes + 1) << _SESSION_BITS
            keys = (
                *range(family << _SESSION_BITS, (family << _SESSION_BITS) + shared),
                *range(own + shared, own + num_blocks),
            )
            yield TraceRow(now, num_input, self._length(self.output_tokens, random), keys)

    def _next_arrival(self, now: float, random: Random) -> float:
        highest = self.rate * max(1.0, self.peak)
        while True:
            now += random.expovariate(highest)
            factor = self.peak if now % self.period_s < self.burst_s else 1.0
            if random.random() * highest < self.rate * factor:
                return now

    def _length(self, median: int, random: Random) -> int:
        if not self.spread:
            return median
        return max(1, min(MAX_TOKENS, round(random.lognormvariate(math.log(median), self.spread))))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bursts(Poisson):
    """Poisson arrivals, ten times as many for half a minute of every five."""

    peak: float = 10.0


Generator: TypeAlias = Agentic | Poisson
KINDS: dict[str, type[Generator]] = {"agentic": Agentic, "poisson": Poisson, "bursts": Bursts}


def parse(spec: str) -> Generator | None:
    """Parse ``agentic:sessions=375,turns=30`` into a generator; None if the text begins with no generator's
    name."""
    name, _, rest = spec.partition(":")
    kind = KINDS.get(name)
    if kind is None:
        return None
    readers: dict[str, Callable[[str], Any]] = {
        field.name: int if isinstance(field.default, int) else float for field in dataclasses.fields(kind)
    }
    given: dict[str, Any] = {}
    for pair in rest.split(",") if rest else ():
        field, _, text = pair.partition("=")
        if field not in readers:
            raise InvalidArgument(spec, field, ", ".join(readers))
        if field in given:
            raise InvalidArgument(f"{name}:{field}", text, f"one value; {given[field]} was given")
        try:
            given[field] = readers[field](text)
        except ValueError:
            allowed = "a whole number" if readers[field] is int else "a number"
            raise InvalidArgument(f"{name}:{field}", text, allowed) from None
    generator = kind(**given)
    next(iter(generator))  # refuse what is out of range now, not in the middle of a run
    return generator


def _check(generator: Generator, counts: tuple[str, ...], amounts: tuple[str, ...]) -> None:
    """Check that named fields are at least 1, or at least ``_LEAST``, and all others at least 0, and that
    none is so large that times drawn with it are no numbers."""
    for field in dataclasses.fields(generator):
        name, value = field.name, getattr(generator, field.name)
        most = _MOST.get(name, MAX_TOKENS if name.endswith("_tokens") else _LARGEST)
        if name in counts and not 1 <= value <= most:
            raise InvalidArgument(name, value, f"1 or more, up to {most:g}")
        if name in amounts and not _LEAST <= value <= most:
            raise InvalidArgument(name, value, f"{_LEAST:g} to {most:g}")
        if name != "seed" and not 0 <= value <= most:
            raise InvalidArgument(name, value, f"0 or more, up to {most:g}")

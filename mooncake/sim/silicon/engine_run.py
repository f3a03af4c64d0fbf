# SPDX-License-Identifier: Apache-2.0
"""One engine's measured run, step costs fitted to a part of its requests, and predictions of the others.

It owns a model of a continuous batch: the engine admits requests in the order of their arrival while it has
places and KV memory, computes prompts in chunks beside the tokens of running answers, at most so many tokens
a step, and preempts the newest request when its KV memory is full (vLLM's scheduler; Kwon et al., SOSP 2023,
section 4.5; chunked prefill as in Agrawal et al., OSDI 2024, section 4.2). A step's time is a sum of terms
whose coefficients are fitted to the times of known requests by the simplex method (Nelder and Mead, 1965):
steps themselves are not in such recordings. Knows nothing of clusters or caches; ``serving/`` does.
"""

from __future__ import annotations

import gzip
import heapq
import json
import math
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Annotated, Any, Self

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from mooncake.errors import InvalidArgument

Floats = NDArray[np.float64]

NUM_TERMS = 7
LONGEST_TOKEN_S = 5.0
"""A run whose median time per token is more is not in seconds: no engine that serves users is so slow."""
TIME_UNITS = ("s", "ms", "us", "ns")
"""Each a thousandth of the one before."""
SAME_LOSS = 1e-4
"""Relative difference of a simplex's values at which it has arrived."""


class StepCosts(msgspec.Struct, frozen=True):
    """Seconds of one step, by what is in it."""

    base_s: float
    per_token_s: float
    "Per token that is computed, of prompts and of answers."
    per_request_s: float
    "Per answer in progress."
    per_context_token_s: float
    "Per token of context that answers in progress read."
    per_pair_s: float
    "Per pair of a prompt's tokens that attend to each other."
    per_root_token_s: float
    "Per square root of the computed tokens: more tokens read more experts of a mixture, but not twice."
    answer_s: float
    "From a step's end to the client; no part of the step."


class EngineLimits(msgspec.Struct, frozen=True):
    """What the engine's configuration allows."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    kv_tokens: int = 0
    "Tokens of KV that fit; 0: not known, or no limit was ever reached."
    num_engines: int = 1
    "Engines that share the requests (data parallel)."
    is_lockstep: bool = False
    "Engines share the experts of a mixture: each step ends for all when the slowest engine's does."


class EngineLoad(msgspec.Struct, frozen=True):
    """Requests in the order of their arrival: seconds since the first one, and tokens, all of shape (n,)."""

    ids: list[str]
    queued_s: Floats
    num_input: NDArray[np.int64]
    num_output: NDArray[np.int64]


class EngineTimes(msgspec.Struct, frozen=True):
    """Seconds since the load's first request, shape (n,); NaN where a request's time is unknown."""

    first_token_s: Floats
    last_token_s: Floats

    def ttft_s(self, load: EngineLoad) -> Floats:
        return self.first_token_s - load.queued_s

    def tpot_s(self, load: EngineLoad) -> Floats:
        """Mean time per token behind the first; NaN for answers of one token."""
        behind = np.where(load.num_output > 1, load.num_output - 1, np.nan)
        return (self.last_token_s - self.first_token_s) / behind

    def latency_s(self, load: EngineLoad) -> Floats:
        return self.last_token_s - load.queued_s

    def where(self, is_kept: NDArray[np.bool_], other: Self) -> Self:
        """These times where kept, shape (n,), elsewhere those of ``other``."""
        return type(self)(
            np.where(is_kept, self.first_token_s, other.first_token_s),
            np.where(is_kept, self.last_token_s, other.last_token_s),
        )


class EngineRun(msgspec.Struct, frozen=True):
    """A recorded run: LLMServingSim's ``requests.jsonl`` and ``meta.json``."""

    name: str
    load: EngineLoad
    measured: EngineTimes
    limits: EngineLimits

    num_left_out: int = 0
    "Requests of the file without an answer or without any time: refused, failed or aborted."
    default_limits: tuple[str, ...] = ()
    "Limits that the run does not state: the engine's own defaults stand for them."
    num_repeated: int = 0
    "Lines of the file that an earlier line says word for word: the same request, which is read once."
    time_unit: str = "s"
    "One of ``TIME_UNITS``: that of the file's times, by what a token takes; here, all are in seconds."
    arrival: str = "queued_ts"
    "The file's field from which TTFT and latency count."
    delay_s: Floats | None = None
    """From ``arrival_time`` to ``queued_ts``, of shape (n,), beyond the smallest such difference (the fields
    may be of two clocks); NaN: one is unknown. None: no request has both, or ``arrival`` is the former."""

    @property
    def has_times(self) -> NDArray[np.bool_]:
        """Which requests have both times, of shape (n,): others are part of the load, and no more."""
        return ~np.isnan(self.measured.first_token_s) & ~np.isnan(self.measured.last_token_s)

    @property
    def median_token_s(self) -> float:
        """Median of the known times per token; 0: none is known."""
        token_s = self.measured.tpot_s(self.load)
        token_s = token_s[~np.isnan(token_s)]
        return float(np.median(token_s)) if len(token_s) else 0.0

    @property
    def num_shared_ids(self) -> int:
        """Requests whose id an earlier one has: an id is a name, so they are requests of their own."""
        return len(self.load.ids) - len(set(self.load.ids))

    @property
    def span_s(self) -> float:
        """From the first arrival to the last known time."""
        times = (self.load.queued_s, self.measured.first_token_s, self.measured.last_token_s)
        return float(np.nanmax(np.concatenate(times)))

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Raises InvalidArgument: a file is missing, or not of this form; it names the line and the field."""
        files = [place / name for place in (folder, folder / "vllm") for name in REQUESTS_NAMES]
        file = next((file for file in files if file.is_file()), files[0])
        lines = _text(folder, file).split("\n")  # JSON may have other ends of lines within a text
        found = [(number, _row(folder, number, line)) for number, line in enumerate(lines, 1) if line.strip()]
        num_lines = len(found)
        found = list({repr(row): (number, row) for number, row in reversed(found)}.values())[::-1]
        answered = [(number, row) for number, row in found if row.output_toks]
        _clear_unknown([row for _, row in answered])
        answered = [(number, row) for number, row in answered if row.has_a_time]
        arrival = _clock_of_arrivals([row for _, row in answered])
        for number, row in answered:
            _check_times(folder, number, row, arrival)
        rows = sorted((row for _, row in answered), key=lambda row: row.arrived_at)
        if not rows:
            raise InvalidArgument("RUN_DIR", str(folder), "a run with requests that were answered")
        meta = _meta(folder, file.parent)
        start = rows[0].arrived_at
        first, last = ([getattr(row, name) for row in rows] for name in ("first_token_ts", "last_token_ts"))
        load = EngineLoad(
            [str(row.request_id) for row in rows],
            np.array([row.arrived_at - start for row in rows]),
            np.array([row.input_toks for row in rows]),
            np.array([row.output_toks for row in rows]),
        )
        times = [
            np.array([np.nan if at is None else at - start for at in column]) for column in (first, last)
        ]
        name = meta.model or folder.name
        limits, defaults = _limits(meta)
        num_repeated, num_left_out = num_lines - len(found), len(found) - len(rows)
        delay_s = np.array([row.delay_s for row in rows])
        run = cls(
            name,
            load,
            EngineTimes(*times),
            limits,
            num_left_out,
            defaults,
            num_repeated,
            arrival=arrival,
            delay_s=None if arrival == "arrival_time" or np.isnan(delay_s).all() else delay_s,
        )
        return run._in_seconds()

    def _in_seconds(self) -> Self:
        """The run, whose times are as the file has them, in seconds."""
        place, median = 0, self.median_token_s
        while median / 1000**place > LONGEST_TOKEN_S and place < len(TIME_UNITS) - 1:
            place += 1
        if not place:
            return self
        times = (self.load.queued_s, self.measured.first_token_s, self.measured.last_token_s)
        queued_s, first_s, last_s = (one / 1000**place for one in times)
        return msgspec.structs.replace(
            self,
            load=msgspec.structs.replace(self.load, queued_s=queued_s),
            measured=EngineTimes(first_s, last_s),
            time_unit=TIME_UNITS[place],
            delay_s=None if self.delay_s is None else self.delay_s / 1000**place,
        )


REQUESTS_NAMES = ("requests.jsonl", "requests.jsonl.gz")
ARRIVALS = ("queued_ts", "arrival_time")
"""When a request came to the engine's scheduler, and when to the server."""

Tokens = Annotated[int, Meta(ge=0, le=100_000_000)]
Limit = Annotated[int, Meta(ge=1, le=1_000_000_000)]


class _Row(msgspec.Struct):
    input_toks: Annotated[int, Meta(ge=1, le=100_000_000)]
    output_toks: Tokens | None
    "0 or null: it was not answered."
    request_id: str | int | None = None
    queued_ts: float | None = None
    arrival_time: float | None = None
    first_token_ts: float | None = None
    last_token_ts: float | None = None
    arrived_at: float = 0.0
    "One of the two arrivals."
    delay_s: float = math.nan
    "As ``EngineRun.delay_s``."

    @property
    def token_times(self) -> list[float]:
        return [at for at in (self.first_token_ts, self.last_token_ts) if at is not None]

    @property
    def has_a_time(self) -> bool:
        arrivals = (self.queued_ts, self.arrival_time)
        return bool(self.token_times) or any(at is not None for at in arrivals)


class _Arguments(msgspec.Struct):
    """What of the engine's arguments its scheduler goes by; None: not stated."""

    max_num_seqs: Limit | None = None
    max_num_batched_tokens: Limit | None = None
    data_parallel_size: Limit | None = None
    enable_expert_parallel: bool | None = None
    kv_cache_size_tokens: Limit | None = None
    "KV memory of one engine, which only a resolved configuration has."


_SECTIONS = {
    "scheduler_config": ("max_num_seqs", "max_num_batched_tokens"),
    "parallel_config": ("data_parallel_size", "enable_expert_parallel"),
    "cache_config": ("kv_cache_size_tokens",),
}
"""Where the configuration that vLLM made of its arguments has them."""


class _Meta(msgspec.Struct):
    model: str | None = None
    engine_kwargs: _Arguments | None = None
    engine_args: _Arguments | None = None
    resolved_config: Any = None
    "With any fields: those of vLLM's own configuration, which change with its versions."

    def stated(self, name: str) -> int | None:
        """An argument's value by the first place that has it: as the engine ran, else as it was started."""
        places = (self._resolved(), self.engine_kwargs, self.engine_args)
        values = (getattr(place, name) for place in places if place is not None)
        return next((value for value in values if value is not None), None)

    def _resolved(self) -> _Arguments | None:
        sections = self.resolved_config if isinstance(self.resolved_config, dict) else {}
        fields = {
            name: section[name]
            for key, names in _SECTIONS.items()
            for section in [sections.get(key)]
            if isinstance(section, dict)
            for name in names
            if isinstance(section.get(name), int)  # the recorder writes a tag of what it cannot write
        }
        try:
            return msgspec.convert(fields, _Arguments)
        except msgspec.ValidationError:
            return None


def _text(folder: Path, file: Path) -> str:
    try:
        content = file.read_bytes()
        return (gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content).decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        allowed = f"a folder with requests.jsonl and meta.json of a run ({file.name}: {reason})"
        raise InvalidArgument("RUN_DIR", str(folder), allowed) from error


def _row(folder: Path, number: int, line: str) -> _Row:
    """A line's request; without an id, the line's number is its id."""
    try:
        try:
            row = msgspec.json.decode(line, type=_Row, strict=False)
        except msgspec.DecodeError:
            # Python's own writer of JSON writes NaN, which JSON does not have.
            row = msgspec.convert(json.loads(line), _Row, strict=False)
    except (msgspec.MsgspecError, ValueError) as error:
        raise _damaged(folder, f"requests.jsonl, line {number}", str(error)) from error
    row.request_id = number if row.request_id is None else row.request_id
    return row


def _clear_unknown(rows: Sequence[_Row]) -> None:
    """Set times that are NaN, 0 or less to None: writers have 0 where a time was never taken.

    An arrival of 0 stays where its clock begins with the run: no more time is before the first of the other
    times than between the first and the last of them.
    """
    for name in ("first_token_ts", "last_token_ts", "queued_ts", "arrival_time"):
        later = [
            at
            for row in rows
            for at in (getattr(row, name), *([] if getattr(row, name) else row.token_times))
            if at is not None and 0 < at < math.inf
        ]
        is_clock_new = name in ARRIVALS and bool(later) and min(later) <= max(later) - min(later)
        for row in rows:
            at = getattr(row, name)
            if at is None or at > 0 or (at == 0 and is_clock_new and row.token_times):
                continue
            setattr(row, name, None)


def _clock_of_arrivals(rows: Sequence[_Row]) -> str:
    """The field that has the arrivals of all requests on the clock of their tokens.

    ``queued_ts`` where every request has it, or none has the other; else ``arrival_time``, if no token came
    before it. Else that is another clock (the time of day), and what ``queued_ts`` lacks is filled in from it
    by the smallest difference of requests that have both.
    """
    differences = [
        math.nan if row.queued_ts is None or row.arrival_time is None else row.queued_ts - row.arrival_time
        for row in rows
    ]
    least = min((one for one in differences if math.isfinite(one)), default=math.nan)
    for row, difference in zip(rows, differences, strict=True):
        row.delay_s = difference - least
    if all(row.queued_ts is not None for row in rows) or all(row.arrival_time is None for row in rows):
        return "queued_ts"
    is_one_clock = all(
        row.arrival_time is None or at >= row.arrival_time for row in rows for at in row.token_times
    )
    if is_one_clock or math.isnan(least):
        return "arrival_time"
    for row in rows:
        if row.queued_ts is None and row.arrival_time is not None:
            row.queued_ts = row.arrival_time + least
    return "queued_ts"


def _check_times(folder: Path, number: int, row: _Row, arrival: str) -> None:
    """Set the request's arrival, and check its times against it."""

    def damaged(problem: str) -> InvalidArgument:
        return _damaged(folder, f"requests.jsonl, line {number}", problem)

    arrived_at: float | None = getattr(row, arrival)
    if arrived_at is None or not math.isfinite(arrived_at):
        raise damaged(f"{arrival} is {arrived_at}, not a time")
    earliest = row.arrived_at = arrived_at
    for name in ("first_token_ts", "last_token_ts"):
        at: float | None = getattr(row, name)
        if at is None:
            continue
        if at < earliest or at == math.inf:
            raise damaged(f"{name} {at} is before {earliest}" if at < earliest else f"{name} is {at}")
        if at == arrived_at:
            raise damaged(f"{name} {at} is {arrival}, but no token takes no time")
        earliest = at


def _meta(folder: Path, place: Path) -> _Meta:
    """The file beside the requests, or one level above ``vllm/``; without it, every limit is a default."""
    places = [place, place.parent] if place.name == "vllm" else [place, place / "vllm"]
    file = next((one / "meta.json" for one in places if (one / "meta.json").is_file()), None)
    if file is None:
        return _Meta()
    try:
        return msgspec.json.decode(_text(folder, file), type=_Meta, strict=False)
    except msgspec.MsgspecError as error:
        raise _damaged(folder, "meta.json", str(error)) from error


def _damaged(folder: Path, place: str, problem: str) -> InvalidArgument:
    problem = (problem if problem[:4] == "JSON" else problem[:1].lower() + problem[1:]).replace("`$.", "`")
    return InvalidArgument("RUN_DIR", str(folder), f"a run that can be read: {place}: {problem}")


def _limits(meta: _Meta) -> tuple[EngineLimits, tuple[str, ...]]:
    """Limits, and names of those that the run does not state: the engine's own defaults stand for them."""
    default, num_engines = EngineLimits(), meta.stated("data_parallel_size") or 1
    limits = EngineLimits(
        meta.stated("max_num_seqs") or default.max_num_seqs,
        meta.stated("max_num_batched_tokens") or default.max_num_batched_tokens,
        meta.stated("kv_cache_size_tokens") or 0,
        num_engines,
        bool(meta.stated("enable_expert_parallel")) and num_engines > 1,
    )
    names = ("max_num_seqs", "max_num_batched_tokens")
    return limits, tuple(name for name in names if meta.stated(name) is None)


# --- the engine


class _Engine:
    """One engine, which takes requests by their numbers and runs steps."""

    def __init__(self, costs: StepCosts, limits: EngineLimits, load: EngineLoad) -> None:
        self.now = 0.0
        self._costs, self._limits = costs, limits
        self._num_output = load.num_output.tolist()
        self._size = load.num_input.tolist()
        """Tokens to compute before the answer goes on: the prompt; after a preemption, the answer so far."""
        self._context = [0] * len(self._size)
        self._left = list(self._num_output)
        self.waiting: deque[int] = deque()
        self._prefills: list[int] = []
        self._decodes: dict[int, None] = {}
        self._ends: dict[int, list[int]] = {}
        """By the number of a step: answers that it completes."""
        self._next_ends: list[int] = []
        """The same numbers, as a heap."""
        self._end_of: dict[int, int] = {}
        self._step = 0
        self._num_context = 0
        """Tokens of KV of answers in progress."""
        self._num_computed = 0
        """Tokens of KV of prompts in progress."""
        self.peak_tokens = 0
        """Most tokens of KV that a step has needed."""
        self._finished: list[int] = []
        """Prompts whose last token the step computes."""
        self._num_stepped = 0
        """Answers that the step gives a token."""
        self.first_token_s: dict[int, float] = {}
        self.last_token_s: dict[int, float] = {}

    @property
    def is_idle(self) -> bool:
        return not (self.waiting or self._prefills or self._decodes)

    @property
    def num_queued(self) -> int:
        """How loaded it is for new requests: those that wait count four times (vLLM's balancer)."""
        return 4 * len(self.waiting) + len(self._prefills) + len(self._decodes)

    def leap(self, until_s: float) -> None:
        """Take all steps that begin before ``until_s`` and only give each answer in progress a token that is
        not its last: the sum of their times is known, so they need not be taken one by one."""
        num_decodes, limits = len(self._decodes), self._limits
        if not num_decodes or self._prefills or (self.waiting and num_decodes < limits.max_num_seqs):
            return
        while self._next_ends[0] not in self._ends:
            heapq.heappop(self._next_ends)
        most = self._next_ends[0] - self._step - 1
        if limits.kv_tokens:
            most = min(most, (limits.kv_tokens - self._num_context) // num_decodes)
        if most < 2:
            return
        costs = self._costs
        first_s = (
            costs.base_s
            + (costs.per_token_s + costs.per_request_s) * num_decodes
            + costs.per_context_token_s * self._num_context
            + costs.per_root_token_s * math.sqrt(num_decodes)
        )
        # Each step reads one more token of every answer, so step k takes ``first_s + 2 * k * half_s``.
        half_s = costs.per_context_token_s * num_decodes / 2
        taken = most
        if self.now + most * (first_s + half_s * (most - 1)) >= until_s:
            linear_s, gap_s = first_s - half_s, until_s - self.now
            if gap_s <= 0 or linear_s <= 0:
                return
            # The number of steps after which ``until_s`` is reached: the positive root of their sum's time.
            root = 2 * gap_s / (linear_s + math.sqrt(linear_s**2 + 4 * half_s * gap_s))
            taken = min(most, math.ceil(root))
        self.now += taken * (first_s + half_s * (taken - 1))
        self._step += taken
        self._num_context += taken * num_decodes

    def begin(self) -> float:
        """Begin a step, and return the seconds that it takes; ``end`` has to follow."""
        limits, num_decodes = self._limits, len(self._decodes)
        if limits.kv_tokens:
            while self._num_context + self._num_computed + num_decodes > limits.kv_tokens and num_decodes > 1:
                self._preempt(next(reversed(self._decodes)))
                num_decodes -= 1
        budget, num_new, num_pairs = limits.max_num_batched_tokens - num_decodes, 0, 0.0
        finished = self._finished = []
        for number in self._prefills:
            taken = min(budget, self._size[number] - self._context[number])
            num_pairs += self._compute(number, taken, finished)
            budget, num_new = budget - taken, num_new + taken
        while budget > 0 and self.waiting and num_decodes + len(self._prefills) < limits.max_num_seqs:
            number = self.waiting[0]
            used = self._num_context + self._num_computed + num_decodes
            if limits.kv_tokens and used + self._size[number] > limits.kv_tokens and used > 0:
                break
            self._prefills.append(self.waiting.popleft())
            taken = min(budget, self._size[number])
            num_pairs += self._compute(number, taken, finished)
            budget, num_new = budget - taken, num_new + taken
        self._num_stepped = num_decodes
        self.peak_tokens = max(self.peak_tokens, self._num_context + self._num_computed + num_decodes)
        costs, num_tokens = self._costs, num_new + num_decodes
        return (
            costs.base_s
            + costs.per_token_s * num_tokens
            + costs.per_request_s * num_decodes
            + costs.per_context_token_s * self._num_context
            + costs.per_pair_s * num_pairs
            + costs.per_root_token_s * math.sqrt(num_tokens)
        )

    def end(self, now: float) -> None:
        """End the step at ``now``."""
        self.now = now
        self._step += 1
        self._num_context += self._num_stepped
        for number in self._ends.pop(self._step, ()):
            if self._end_of.get(number) == self._step:
                self._leave(number)
                self.last_token_s[number] = self.now
        for number in self._finished:
            self._answer(number)

    def _compute(self, number: int, taken: int, finished: list[int]) -> float:
        first = self._context[number]
        self._context[number] += taken
        self._num_computed += taken
        if taken and first + taken == self._size[number]:
            finished.append(number)
        return taken * (first + taken / 2)

    def _answer(self, number: int) -> None:
        """The prompt is computed, and its step has made a token."""
        self._prefills.remove(number)
        self._num_computed -= self._size[number]
        self.first_token_s.setdefault(number, self.now)
        if self._left[number] == 1:
            self.last_token_s[number] = self.now
            return
        self._decodes[number] = None
        self._num_context += self._size[number]
        end = self._step + self._left[number] - 1
        if end not in self._ends:
            self._ends[end] = []
            heapq.heappush(self._next_ends, end)
        self._ends[end].append(number)
        self._end_of[number] = end

    def _leave(self, number: int) -> None:
        """An answer's KV is released."""
        del self._decodes[number]
        self._num_context -= self._size[number] + self._left[number] - 1 - self._remaining(number)

    def _remaining(self, number: int) -> int:
        return self._end_of.pop(number) - self._step

    def _preempt(self, number: int) -> None:
        """Its KV is released; it is computed again, with the tokens that it has made, before all who wait."""
        num_left = self._end_of[number] - self._step
        num_made = self._left[number] - num_left
        self._leave(number)
        self._size[number] += num_made
        self._left[number] = num_left
        self._context[number] = 0
        self.waiting.appendleft(number)


def simulate_engines(costs: StepCosts, limits: EngineLimits, load: EngineLoad) -> EngineTimes:
    """When every request's first and last token come."""
    return _simulated(costs, limits, load)[0]


def _simulated(costs: StepCosts, limits: EngineLimits, load: EngineLoad) -> tuple[EngineTimes, int]:
    """The same, and the most tokens of KV that an engine has needed."""
    engines = [_Engine(costs, limits, load) for _ in range(limits.num_engines)]
    arrivals = load.queued_s.tolist()
    place, num_requests = 0, len(arrivals)
    while True:
        busy = [engine for engine in engines if not engine.is_idle]
        group = busy if limits.is_lockstep else sorted(busy, key=lambda one: one.now)[:1]
        start_s = max([engine.now for engine in group], default=np.inf)
        if place < num_requests and arrivals[place] <= start_s:
            target = min(engines, key=lambda one: one.num_queued)
            if target.is_idle:
                target.now = max(target.now, arrivals[place])
            target.waiting.append(place)
            place += 1
        elif not group:
            break
        else:
            if len(group) == 1:
                group[0].leap(arrivals[place] if place < num_requests else math.inf)
                if place < num_requests and group[0].now >= arrivals[place]:
                    continue
                start_s = group[0].now
            end_s = start_s + max([engine.begin() for engine in group])
            for engine in group:
                engine.end(end_s)
    first, last = np.full(num_requests, np.nan), np.full(num_requests, np.nan)
    for engine in engines:
        first[list(engine.first_token_s)] = list(engine.first_token_s.values())
        last[list(engine.last_token_s)] = list(engine.last_token_s.values())
    times = EngineTimes(first + costs.answer_s, last + costs.answer_s)
    return times, max(engine.peak_tokens for engine in engines)


# --- the fit


class EngineFit(msgspec.Struct, frozen=True):
    """Costs and limits that describe a run best."""

    costs: StepCosts
    limits: EngineLimits
    loss: float
    "Sum of the mean relative errors of TTFT, TPOT (twice) and the last token's time."


def fit_engine(run: EngineRun, is_known: NDArray[np.bool_]) -> EngineFit:
    """Fit to the requests in ``is_known``, shape (n,), of which the measured times are used; of the others
    only arrival and lengths are. A memory limit that the run states is taken as it is.

    Raises:
        InvalidArgument: fewer than eight of them have times.
    """
    is_known = is_known & run.has_times
    if is_known.sum() < 2 * (NUM_TERMS - 3):
        raise InvalidArgument("requests", int(is_known.sum()), "at least 8 requests with measured times")
    unlimited = _fit(run, run.limits, is_known, _rough(run, is_known), 400)
    if run.limits.kv_tokens:
        return unlimited
    best = _best_limit(run, is_known, unlimited)
    # A memory limit shows in nothing but the times. It is accepted where it explains them much better.
    if best.loss > 0.8 * unlimited.loss:
        return unlimited
    for size in (0.2, 0.05):
        best = _fit_with_memory(run, is_known, best, size)
    is_reached = best.limits.kv_tokens < (run.load.num_input + run.load.num_output).sum()
    if is_reached and _limit_predicts(run, is_known, best.limits, unlimited):
        return best
    return unlimited


def fitted_share(run: EngineRun, share: float, random: Random) -> NDArray[np.bool_]:
    """Which requests the fit may see, of shape (n,): a random share of those with times, but not all of them,
    so that others are left to be graded."""
    numbers = np.flatnonzero(run.has_times).tolist()
    random.shuffle(numbers)
    is_known = np.zeros(len(run.load.ids), dtype=bool)
    is_known[numbers[: min(round(share * len(numbers)), len(numbers) - 1)]] = True
    return is_known


def refit_engine(run: EngineRun, is_known: NDArray[np.bool_], fit: EngineFit) -> EngineFit:
    """A fit to more requests, which begins with an earlier one and keeps its limits."""
    return _fit(run, fit.limits, is_known & run.has_times, _logarithms(fit.costs), 100)


def _best_limit(run: EngineRun, is_known: NDArray[np.bool_], unlimited: EngineFit) -> EngineFit:
    """The best fit of a row of memory limits, from the most tokens that were needed without one (above that,
    a limit changes nothing) to two requests' or to nonsense."""
    best, limit = unlimited, 1.3 * _simulated(unlimited.costs, run.limits, run.load)[1]
    while limit > 2 * int((run.load.num_input + run.load.num_output).max()):
        limit = int(limit / 1.3)
        limits = msgspec.structs.replace(run.limits, kv_tokens=limit)
        if _loss(run, limits, is_known, best.costs) > 3 * unlimited.loss + 0.1:
            break
        tried = _fit(run, limits, is_known, _logarithms(best.costs), 80)
        if tried.loss < best.loss:
            best = tried
    return best


def _limit_predicts(
    run: EngineRun, is_known: NDArray[np.bool_], limits: EngineLimits, unlimited: EngineFit
) -> bool:
    """Whether the memory limit also explains requests that a fit with it has not seen, each half of the known
    ones by the other (cross-validation: Stone, 1974): one coefficient more always explains those it has seen.

    A limit that was reached leaves a tenth of the error and less; one that only stands for what the model
    lacks leaves three quarters, and misleads where the load is another.
    """
    free = limited = 0.0
    for remainder in (0, 1):
        is_seen = is_known & (np.cumsum(is_known) % 2 == remainder)
        without = _fit(run, run.limits, is_seen, _logarithms(unlimited.costs), 100)
        beside = _fit(run, limits, is_seen, _logarithms(without.costs), 150)
        free += _loss(run, run.limits, is_known & ~is_seen, without.costs)
        limited += _loss(run, limits, is_known & ~is_seen, beside.costs)
    return limited < 0.5 * free


def _fit_with_memory(run: EngineRun, is_known: NDArray[np.bool_], best: EngineFit, size: float) -> EngineFit:
    """The memory limit is one more coefficient."""

    def loss(logarithms: Floats) -> float:
        limits = msgspec.structs.replace(best.limits, kv_tokens=int(np.exp(logarithms[-1])))
        return _loss(run, limits, is_known, _costs(logarithms[:-1]))

    start = np.append(_logarithms(best.costs), np.log(best.limits.kv_tokens))
    found, value = minimum(loss, start, 250, size)
    limits = msgspec.structs.replace(best.limits, kv_tokens=int(np.exp(found[-1])))
    return EngineFit(_costs(found[:-1]), limits, value)


def _logarithms(costs: StepCosts) -> Floats:
    return np.asarray(np.log(np.array(msgspec.structs.astuple(costs))))


def _costs(logarithms: Floats) -> StepCosts:
    return StepCosts(*np.exp(np.clip(logarithms, -40, 10)).tolist())


def _rough(run: EngineRun, is_known: NDArray[np.bool_]) -> Floats:
    """Logarithms of plausible coefficients, of shape (NUM_TERMS,)."""
    step_s = float(np.nanquantile(run.measured.tpot_s(run.load)[is_known], 0.1))
    base_s = max(1e-5, 0.5 * step_s)
    token_s = base_s / 300
    return np.log([base_s, token_s, base_s / 1000, base_s / 2e5, token_s / 2e4, base_s / 300, base_s / 10])


def _fit(
    run: EngineRun, limits: EngineLimits, is_known: NDArray[np.bool_], start: Floats, num_steps: int
) -> EngineFit:
    def loss(logarithms: Floats) -> float:
        return _loss(run, limits, is_known, _costs(logarithms))

    found, value = minimum(loss, start, num_steps)
    return EngineFit(_costs(found), limits, value)


def _loss(run: EngineRun, limits: EngineLimits, is_known: NDArray[np.bool_], costs: StepCosts) -> float:
    times, measured, load = simulate_engines(costs, limits, run.load), run.measured, run.load
    first = np.abs(times.first_token_s - measured.first_token_s)[is_known].mean()
    last = np.abs(times.last_token_s - measured.last_token_s)[is_known].mean()
    tpot_s = measured.tpot_s(load)
    is_answer = is_known & (np.nan_to_num(tpot_s) > 0)
    tokens = np.abs(times.tpot_s(load) / np.where(is_answer, tpot_s, 1) - 1)[is_answer]
    return float(
        first / measured.ttft_s(load)[is_known].mean()
        + 2 * (tokens.mean() if len(tokens) else 0.0)
        + last / measured.latency_s(load)[is_known].mean()
    )


def minimum(
    function: Callable[[Floats], float], start: Floats, num_steps: int, size: float = 0.4
) -> tuple[Floats, float]:
    """A local minimum near ``start``, shape (k,), and its value: the simplex method of Nelder and Mead."""
    points = [start, *(start + size * axis for axis in np.eye(len(start)))]
    values = [function(point) for point in points]
    for _ in range(num_steps):
        order = np.argsort(values, kind="stable")
        points, values = [points[one] for one in order], [values[one] for one in order]
        if values[-1] - values[0] < SAME_LOSS * abs(values[0]):
            break
        centre, worst = np.mean(points[:-1], axis=0), points[-1]
        reflected = 2 * centre - worst
        value = function(reflected)
        if value < values[0]:
            expanded = 3 * centre - 2 * worst
            further = function(expanded)
            points[-1], values[-1] = (expanded, further) if further < value else (reflected, value)
        elif value < values[-2]:
            points[-1], values[-1] = reflected, value
        else:
            nearer = (centre + worst) / 2
            value = function(nearer)
            if value < values[-1]:
                points[-1], values[-1] = nearer, value
            else:
                points = [points[0], *((points[0] + point) / 2 for point in points[1:])]
                values = [values[0], *(function(point) for point in points[1:])]
    best = int(np.argmin(values))
    return points[best], values[best]


# --- the grade


class PredictionError(msgspec.Struct, frozen=True):
    """A predicted statistic beside the measured one, in seconds."""

    measured: float
    predicted: float

    @property
    def relative(self) -> float:
        return self.predicted / self.measured - 1 if self.measured else 0.0


def graded(predicted: Floats, measured: Floats) -> dict[str, PredictionError]:
    """Mean and quantiles of two columns of shape (n,), without those that aren't known."""
    is_known = ~np.isnan(predicted) & ~np.isnan(measured)
    columns = predicted[is_known], measured[is_known]
    if not len(columns[0]):
        return {}
    found = {"mean": PredictionError(float(columns[1].mean()), float(columns[0].mean()))}
    for share in (0.5, 0.9, 0.95, 0.99):
        ours, theirs = (float(np.quantile(column, share)) for column in columns)
        found[f"p{share * 100:g}"] = PredictionError(theirs, ours)
    return found

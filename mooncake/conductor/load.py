# SPDX-License-Identifier: Apache-2.0
"""How much work each instance has, in seconds, as columns.

It owns the accounts of what was placed and not yet reported done, and refuses to know prompts, health and
policies. An instance's queue is the time until everything placed there is computed: the first prompt counts
down with the clock, those behind it count in full. Reports correct it: when a prompt is reported done, the
next one begins then, early or late, so a prediction error lasts no longer than its prompt. Columns (one
number per instance and slot) because a decision weighs every instance: at a thousand of them a loop over
objects would take a millisecond, an operation on a column takes a microsecond or two.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mooncake.conductor.keyed_prompt import NO_KEYS, KeyedPrompt
from mooncake.conductor.prediction import Floats, Slots
from mooncake.conductor.queued_prefixes import QueuedPrefixes
from mooncake.http.worker_stats import KvMemoryStats
from mooncake.prefix import BlockKey

LEAST_USED = 0.05
"""Part of an instance's memory from which on its use shows how much contexts share."""
MOST_SHARING = 16.0
SHARING_WEIGHT = 0.5
"""Weight of the newest report, against those before."""


@dataclass(slots=True)
class _Prompt:
    seconds: float
    num_tokens: int
    turn: float
    least_s: float
    "Seconds for which its turn was chosen: where it takes least."
    added: Sequence[BlockKey]
    "Keys under which it is in ``queued_prefixes``."


class _PromptQueue:
    """The prompts of one instance: the one being computed, and those behind it."""

    def __init__(self) -> None:
        self.first = ""
        self.all: dict[str, _Prompt] = {}
        self._turns: list[tuple[float, int, str]] = []
        """Heap of (turn, arrival, request) of those that wait, and of some that have left."""
        self._arrivals: dict[str, int] = {}
        """By request that waits: which of its entries in the heap is current."""
        self._next = itertools.count()

    def add(self, request_id: str, prompt: _Prompt) -> None:
        if self.all:
            self._arrivals[request_id] = arrival = next(self._next)
            heapq.heappush(self._turns, (prompt.turn, arrival, request_id))
        else:
            self.first = request_id
        self.all[request_id] = prompt

    def remove(self, request_id: str) -> _Prompt:
        """Remove a prompt; behind the first one, ``begin_next`` follows."""
        self._arrivals.pop(request_id, None)
        if len(self._turns) > 2 * len(self._arrivals) + 64:
            self._turns = [one for one in self._turns if self._is_current(one)]
            heapq.heapify(self._turns)
        return self.all.pop(request_id)

    def begin_next(self) -> str:
        """Make the prompt with the lowest turn the first, of several the one that came first."""
        while not self._is_current(self._turns[0]):
            heapq.heappop(self._turns)
        _, _, self.first = heapq.heappop(self._turns)
        del self._arrivals[self.first]
        return self.first

    def _is_current(self, entry: tuple[float, int, str]) -> bool:
        return self._arrivals.get(entry[2]) == entry[1]

    def check(self) -> None:
        assert self.all.keys() == self._arrivals.keys() | ({self.first} if self.all else set())
        entries = {
            request_id: (turn, arrival) for turn, arrival, request_id in filter(self._is_current, self._turns)
        }
        assert entries == {one: (self.all[one].turn, arrival) for one, arrival in self._arrivals.items()}
        assert len(self._turns) <= 2 * len(self._arrivals) + 64


class _WaitingPrompts:
    """The prompts of all instances that wait behind a first one, as columns without gaps."""

    def __init__(self) -> None:
        self.num_prompts = 0
        self._rows: dict[str, int] = {}
        self._ids: list[str] = []
        self._slots: Slots = np.empty(64, np.int64)
        self._columns: Floats = np.empty((3, 64))

    @property
    def slots(self) -> Slots:
        return self._slots[: self.num_prompts]

    @property
    def seconds(self) -> Floats:
        return self._columns[0, : self.num_prompts]

    @property
    def turns(self) -> Floats:
        return self._columns[1, : self.num_prompts]

    @property
    def least_s(self) -> Floats:
        return self._columns[2, : self.num_prompts]

    def add(self, request_id: str, slot: int, prompt: _Prompt) -> None:
        row = self.num_prompts
        if row == len(self._slots):
            self._slots = np.append(self._slots, self._slots)
            self._columns = np.hstack([self._columns, self._columns])
        self._slots[row], self._columns[:, row] = slot, (prompt.seconds, prompt.turn, prompt.least_s)
        self._rows[request_id] = row
        self._ids.append(request_id)
        self.num_prompts += 1

    def remove(self, request_id: str) -> None:
        """Remove a row; the last row takes its place."""
        row = self._rows.pop(request_id)
        last = self._ids.pop()
        self.num_prompts -= 1
        if last != request_id:
            self._slots[row] = self._slots[self.num_prompts]
            self._columns[:, row] = self._columns[:, self.num_prompts]
            self._ids[row], self._rows[last] = last, row


class LoadAccounts:
    """The accounts of all instances, by slot."""

    def __init__(self) -> None:
        self.first_ends_at: Floats = np.empty(0)
        "Predicted instant at which the first prompt is done; -inf with none."
        self.queued_tokens: Floats = np.empty(0)
        self.num_requests: Floats = np.empty(0)
        "Requests whose prompt waits or is computed here, or that decode here or are about to."
        self.num_placed: Floats = np.empty(0)
        "Requests ever placed here."
        self.tie_order: Floats = np.empty(0)
        """The same for breaking ties: an instance that joins continues from the others' least number. If it
        began at 0, it would get all ties until it had served as many as they ever did."""
        self.batch_size: Floats = np.empty(0)
        self.context_tokens: Floats = np.empty(0)
        "Context tokens of the batch, including requests about to join."
        self.capacity_tokens: Floats = np.empty(0)
        "Tokens of contexts that fit into the instance's memory; inf when not reported."
        self.sharing: Floats = np.empty(0)
        "Tokens of contexts by token of memory that they take: more than 1 where they share blocks."
        self.ready_since: Floats = np.empty(0)
        self.newest_at = -math.inf
        "When the newest instance became ready."
        self.queued_prefixes = QueuedPrefixes()
        self._prompts: list[_PromptQueue] = []
        self._waiting = _WaitingPrompts()
        self._decodes: list[dict[str, int]] = []

    _COLUMNS = (
        "first_ends_at",
        "queued_tokens",
        "num_requests",
        "num_placed",
        "tie_order",
        "batch_size",
        "context_tokens",
        "capacity_tokens",
        "sharing",
        "ready_since",
    )
    _EMPTY = (-math.inf, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, math.inf, 1.0, -math.inf)

    @property
    def num_slots(self) -> int:
        return len(self._prompts)

    def grow(self, num_slots: int) -> None:
        added = num_slots - self.num_slots
        for name, empty in zip(self._COLUMNS, self._EMPTY, strict=True):
            setattr(self, name, np.append(getattr(self, name), np.full(added, empty)))
        self._prompts += [_PromptQueue() for _ in range(added)]
        self._decodes += [{} for _ in range(added)]

    def forget(self, slot: int) -> None:
        """Reset a slot, which another instance has now."""
        for name, empty in zip(self._COLUMNS, self._EMPTY, strict=True):
            getattr(self, name)[slot] = empty
        prompts = self._prompts[slot]
        for request_id, prompt in prompts.all.items():
            self.queued_prefixes.remove(slot, prompt.added)
            if request_id != prompts.first:
                self._waiting.remove(request_id)
        self._prompts[slot] = _PromptQueue()
        self._decodes[slot] = {}

    # --- prompts

    def queue_s(
        self, slots: Slots, now: float, turn: float | Floats = math.inf
    ) -> tuple[Floats, Floats | None]:
        """Seconds until each slot can begin a prompt with this turn (one for all, or by slot), and the number
        of prompts that would wait for it (None: no prompt on any)."""
        queue: Floats = np.maximum(self.first_ends_at.take(slots) - now, 0.0)
        waiting = self._waiting
        if not waiting.num_prompts:
            return queue, None
        is_ahead = waiting.turns <= (turn.take(waiting.slots) if isinstance(turn, np.ndarray) else turn)
        ahead_s: Any = np.bincount(waiting.slots, waiting.seconds * is_ahead, self.num_slots)
        queue += ahead_s.take(slots)
        if np.count_nonzero(is_ahead) == len(is_ahead):
            return queue, None
        num_behind: Any = np.bincount(waiting.slots, 1.0 - is_ahead, self.num_slots)
        return queue, num_behind.take(slots)

    def turns_after(self, turn: float, least_s: float, last: float) -> Floats:
        """By slot: ``turn``, or the last one up to ``last`` of a waiting prompt that takes no longer, each
        where it takes least."""
        turns, waiting = np.full(self.num_slots, turn), self._waiting
        is_shorter = (waiting.least_s <= least_s * (1 + 1e-9)) & (waiting.turns <= last)
        np.maximum.at(turns, waiting.slots[is_shorter], waiting.turns[is_shorter])
        return turns

    def add_prompt(
        self,
        slot: int,
        request_id: str,
        seconds: float,
        num_tokens: int,
        turn: float,
        now: float,
        prompt: KeyedPrompt = NO_KEYS,
        least_s: float | None = None,
    ) -> None:
        """``seconds``: for which it keeps this instance busy; ``least_s``: those where it takes least."""
        prompts = self._prompts[slot]
        assert request_id not in prompts.all
        added = self.queued_prefixes.add(slot, prompt, turn if prompts.all else -math.inf)
        one = _Prompt(seconds, num_tokens, turn, seconds if least_s is None else least_s, added)
        if prompts.all:
            self._waiting.add(request_id, slot, one)
        else:
            self.first_ends_at[slot] = now + seconds
        prompts.add(request_id, one)
        self.queued_tokens[slot] += num_tokens
        self._count(slot, request_id not in self._decodes[slot])

    def end_prompt(self, slot: int, request_id: str, now: float) -> None:
        prompts = self._prompts[slot]
        if request_id not in prompts.all:
            return
        ended = prompts.remove(request_id)
        self.queued_prefixes.remove(slot, ended.added)
        self.queued_tokens[slot] -= ended.num_tokens
        self.num_requests[slot] -= request_id not in self._decodes[slot]
        if request_id != prompts.first:
            self._waiting.remove(request_id)
        elif prompts.all:
            begun = prompts.begin_next()
            self._waiting.remove(begun)
            self.queued_prefixes.begin(slot, prompts.all[begun].added)
            self.first_ends_at[slot] = now + prompts.all[begun].seconds
        else:
            self.first_ends_at[slot] = -math.inf

    # --- decode

    def add_decode(self, slot: int, request_id: str, num_tokens: int) -> None:
        """Add a request to the batch; ``num_tokens``: its expected average context."""
        assert request_id not in self._decodes[slot]
        self._decodes[slot][request_id] = num_tokens
        self.batch_size[slot] += 1
        self.context_tokens[slot] += num_tokens
        self._count(slot, request_id not in self._prompts[slot].all)

    def _count(self, slot: int, is_new: bool) -> None:
        """Count a request once on an instance that both computes its prompt and decodes it."""
        self.num_requests[slot] += is_new
        self.num_placed[slot] += is_new
        self.tie_order[slot] += is_new

    def end_decode(self, slot: int, request_id: str) -> None:
        num_tokens = self._decodes[slot].pop(request_id, None)
        if num_tokens is not None:
            self.batch_size[slot] -= 1
            self.context_tokens[slot] -= num_tokens
            self.num_requests[slot] -= request_id not in self._prompts[slot].all

    # --- memory

    def report_memory(self, slot: int, memory: KvMemoryStats | None) -> None:
        """Learn how many tokens of contexts fit, from what the instance reports of its memory now (None: of
        nothing). Contexts that share blocks take less memory than they are long, and they are counted here by
        their length, so the memory counts as larger by the same factor."""
        if memory is None or not memory.total_tokens:
            return
        mean_tokens = self.context_tokens[slot] / max(1.0, self.batch_size[slot])
        contexts = memory.context_tokens or memory.num_requests * mean_tokens
        if contexts and memory.used_tokens >= LEAST_USED * memory.total_tokens:
            found = min(MOST_SHARING, max(1.0, contexts / memory.used_tokens))
            self.sharing[slot] += SHARING_WEIGHT * (found - self.sharing[slot])
        self.capacity_tokens[slot] = memory.total_tokens * self.sharing[slot]

    # --- new instances

    def became_ready(self, slot: int, now: float, others: Slots) -> None:
        """``others``: instances of its role that were ready before."""
        self.ready_since[slot] = self.newest_at = now
        if len(others):
            self.tie_order[slot] = max(self.tie_order[slot], self.tie_order[others].min())

    def shares(self, slots: Slots, now: float, slow_start_s: float) -> Floats | None:
        """The part of a full share of work for each slot now: 0.1 rising to 1; None when all get 1."""
        if now - self.newest_at >= slow_start_s:
            return None
        return np.clip((now - self.ready_since[slots]) / slow_start_s, 0.1, 1.0)

    def prompt(self, slot: int, request_id: str) -> tuple[float, int, float] | None:
        """Seconds, tokens and turn of a prompt that waits or is computed there; None for any other."""
        found = self._prompts[slot].all.get(request_id)
        return None if found is None else (found.seconds, found.num_tokens, found.turn)

    def prompts_of(self, slot: int) -> list[str]:
        """Requests whose prompts are computed or wait there: the first, then in order of arrival."""
        prompts = self._prompts[slot]
        return sorted(prompts.all, key=lambda one: one != prompts.first)

    def decodes_of(self, slot: int) -> list[str]:
        return list(self._decodes[slot])

    def check(self) -> None:
        self.queued_prefixes.check()
        prompts_of_all = [prompt for prompts in self._prompts for prompt in prompts.all.values()]
        assert self.queued_prefixes.num_entries == sum(len(prompt.added) for prompt in prompts_of_all)
        for slot, (queue, decodes) in enumerate(zip(self._prompts, self._decodes, strict=True)):
            queue.check()
            prompts = queue.all
            [queue_s], _ = self.queue_s(np.array([slot]), math.inf)
            assert math.isclose(
                queue_s, sum(one.seconds for key, one in prompts.items() if key != queue.first), abs_tol=1e-6
            )
            assert (self.first_ends_at[slot] > -math.inf) == bool(prompts)
            assert self.queued_tokens[slot] == sum(one.num_tokens for one in prompts.values())
            assert self.batch_size[slot] == len(decodes)
            assert self.context_tokens[slot] == sum(decodes.values())
            assert self.num_requests[slot] == len(prompts.keys() | decodes.keys())
            assert all(one.seconds >= 0 for one in prompts.values())

"""Who serves a request: the policies, as plain functions from candidates to a choice with its reason.

It owns the formulas and refuses to know health, membership and the index: whoever calls has already
dropped the instances that may not be chosen. A policy weighs work in *tokens to compute before this
prompt is done*, the one unit in which a cached prefix and a queue can be compared, divided by the share
of work that a newcomer should get. The numbers behind a choice travel with it, so that "why did it land
there?" has an answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from mooncake.conductor.health import Instance
from mooncake.types import InstanceId


@dataclass(frozen=True, slots=True)
class Choice:
    instance: Instance
    reason: str


@dataclass(slots=True)
class Job:
    """What is to be placed, and what the policies remember between jobs."""

    num_tokens: int
    "Length of the prompt."

    cached_blocks: Mapping[InstanceId, int]
    "Leading blocks of the prompt that an instance holds; absent means none."

    block_tokens: int

    now: float
    slow_start_s: float
    affinity: str = ""
    "A hint that requests with the same word should meet again; empty for none."

    turns: dict[InstanceId, float] = field(default_factory=dict)
    "State of ``round_robin``, kept by the caller."

    random: Random = field(default_factory=lambda: Random(0))

    def shares(self, candidates: Sequence[Instance]) -> list[float]:
        """The part of a full share of work that each should get now, 1 for all but newcomers."""
        now, slow_start_s = self.now, self.slow_start_s
        return [
            1.0 if now - one.ready_since >= slow_start_s else one.share(now, slow_start_s)
            for one in candidates
        ]

    def cached_tokens(self, instance: Instance) -> int:
        return self.cached_blocks.get(instance.id, 0) * self.block_tokens


Policy = Callable[[Sequence[Instance], Job], Choice]


def prefill_by_cache(candidates: Sequence[Instance], job: Job) -> Choice:
    """Fewest tokens to compute until this prompt is done: the queue there, plus what is not cached there."""
    cached, num_tokens, block_tokens = job.cached_blocks, job.num_tokens, job.block_tokens
    costs = [
        (one.queued_tokens + num_tokens - cached.get(one.id, 0) * block_tokens) / share
        for one, share in zip(candidates, job.shares(candidates), strict=True)
    ]
    lowest = min(costs)
    best = _least_used(candidates, costs, lowest)
    preferred = _preferred(candidates, job)
    # The hint is worth one computation of this prompt: following it is what makes later turns hit.
    if preferred is not None and costs[preferred] <= lowest + num_tokens:
        chosen = candidates[preferred]
        return Choice(chosen, f"affinity {job.affinity[:40]!r}, {_queue(chosen, job)}")
    return Choice(best, f"least to compute: {_queue(best, job)}")


def prefill_by_load(candidates: Sequence[Instance], job: Job) -> Choice:
    """Shortest queue of prompt tokens."""
    num_tokens = job.num_tokens
    costs = [
        (one.queued_tokens + num_tokens) / share
        for one, share in zip(candidates, job.shares(candidates), strict=True)
    ]
    best = _least_used(candidates, costs, min(costs))
    return Choice(best, f"shortest queue: {best.queued_tokens} tokens")


def decode_by_load(candidates: Sequence[Instance], job: Job) -> Choice:
    """Fewest running requests; among equals the one that already holds most of the prompt."""
    costs = [
        (one.num_requests + 1) / share for one, share in zip(candidates, job.shares(candidates), strict=True)
    ]
    lowest = min(costs)
    equals = [one for one, cost in zip(candidates, costs, strict=True) if cost == lowest]
    cached = job.cached_blocks
    best = min(equals, key=lambda one: (-cached.get(one.id, 0), one.num_placed))
    return Choice(best, f"fewest running: {best.num_requests}")


def round_robin(candidates: Sequence[Instance], job: Job) -> Choice:
    """In turn, newcomers less often.

    Smooth weighted round robin as in nginx: everybody gains its share, the richest serves and pays all.
    """
    turns, total = job.turns, 0.0
    for instance, share in zip(candidates, job.shares(candidates), strict=True):
        turns[instance.id] = turns.get(instance.id, 0.0) + share
        total += share
    best = max(candidates, key=lambda instance: turns[instance.id])
    turns[best.id] -= total
    return Choice(best, "its turn")


def at_random(candidates: Sequence[Instance], job: Job) -> Choice:
    [best] = job.random.choices(candidates, weights=job.shares(candidates))
    return Choice(best, "by chance")


POLICIES: dict[str, tuple[Policy, Policy]] = {
    "cache_aware": (prefill_by_cache, decode_by_load),
    "load": (prefill_by_load, decode_by_load),
    "round_robin": (round_robin, round_robin),
    "random": (at_random, at_random),
}
"""By name: the policy for prefill and the one for decode."""


def _least_used(candidates: Sequence[Instance], costs: Sequence[float], lowest: float) -> Instance:
    """Among the cheapest, who has least to do and served least."""
    equals = [one for one, cost in zip(candidates, costs, strict=True) if cost == lowest]
    return min(equals, key=lambda one: (one.num_requests, one.num_placed))


def _preferred(candidates: Sequence[Instance], job: Job) -> int | None:
    """Position of the instance that the affinity hint points to.

    Highest random weight hashing: stable when other instances come and go, and needs no memory.
    """
    if not job.affinity:
        return None

    def weight(position: int) -> bytes:
        return hashlib.sha256(f"{job.affinity}\0{candidates[position].id}".encode()).digest()

    return max(range(len(candidates)), key=weight)


def _queue(instance: Instance, job: Job) -> str:
    cached = job.cached_tokens(instance)
    return f"{cached} of {job.num_tokens} tokens cached, {instance.queued_tokens} queued"

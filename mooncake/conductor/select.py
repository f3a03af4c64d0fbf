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

from mooncake.conductor.load import Instance
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

    cached_tokens: Mapping[InstanceId, int]
    "Leading prompt tokens that an instance holds; absent means none."

    now: float
    slow_start_s: float
    affinity: str = ""
    "A hint that requests with the same word should meet again; empty for none."

    turns: dict[InstanceId, float] = field(default_factory=dict)
    "State of ``round_robin``, kept by the caller."

    random: Random = field(default_factory=lambda: Random(0))

    def share(self, instance: Instance) -> float:
        return instance.share(self.now, self.slow_start_s)


Policy = Callable[[Sequence[Instance], Job], Choice]


def prefill_by_cache(candidates: Sequence[Instance], job: Job) -> Choice:
    """Fewest tokens to compute until this prompt is done: the queue there, plus what is not cached there."""
    cached, num_tokens = job.cached_tokens, job.num_tokens

    def cost(instance: Instance) -> tuple[float, int, int]:
        tokens = instance.queued_tokens + num_tokens - cached.get(instance.id, 0)
        return tokens / job.share(instance), instance.num_requests, instance.num_placed

    best = min(candidates, key=cost)
    preferred = _preferred(candidates, job)
    if preferred is not None and cost(preferred)[0] <= cost(best)[0] + num_tokens:
        # The hint is worth one computation of this prompt: following it is what makes later turns hit.
        return Choice(preferred, f"affinity {job.affinity[:40]!r}, {_queue(preferred, job)}")
    return Choice(best, f"least to compute: {_queue(best, job)}")


def prefill_by_load(candidates: Sequence[Instance], job: Job) -> Choice:
    """Shortest queue of prompt tokens."""

    def cost(instance: Instance) -> tuple[float, int, int]:
        tokens = instance.queued_tokens + job.num_tokens
        return tokens / job.share(instance), instance.num_requests, instance.num_placed

    best = min(candidates, key=cost)
    return Choice(best, f"shortest queue: {best.queued_tokens} tokens")


def decode_by_load(candidates: Sequence[Instance], job: Job) -> Choice:
    """Fewest running requests; among equals the one that already holds most of the prompt."""
    cached = job.cached_tokens

    def cost(instance: Instance) -> tuple[float, int, int]:
        running = (instance.num_requests + 1) / job.share(instance)
        return running, -cached.get(instance.id, 0), instance.num_placed

    best = min(candidates, key=cost)
    return Choice(best, f"fewest running: {best.num_requests}")


def round_robin(candidates: Sequence[Instance], job: Job) -> Choice:
    """In turn, newcomers less often.

    Smooth weighted round robin as in nginx: everybody gains its share, the richest serves and pays all.
    """
    turns, total = job.turns, 0.0
    for instance in candidates:
        share = job.share(instance)
        turns[instance.id] = turns.get(instance.id, 0.0) + share
        total += share
    best = max(candidates, key=lambda instance: turns[instance.id])
    turns[best.id] -= total
    return Choice(best, "its turn")


def at_random(candidates: Sequence[Instance], job: Job) -> Choice:
    [best] = job.random.choices(candidates, weights=[job.share(instance) for instance in candidates])
    return Choice(best, "by chance")


POLICIES: dict[str, tuple[Policy, Policy]] = {
    "cache_aware": (prefill_by_cache, decode_by_load),
    "load": (prefill_by_load, decode_by_load),
    "round_robin": (round_robin, round_robin),
    "random": (at_random, at_random),
}
"""By name: the policy for prefill and the one for decode."""


def _preferred(candidates: Sequence[Instance], job: Job) -> Instance | None:
    """Highest random weight hashing: stable when other instances come and go, and needs no memory."""
    if not job.affinity:
        return None

    def weight(instance: Instance) -> bytes:
        return hashlib.sha256(f"{job.affinity}\0{instance.id}".encode()).digest()

    return max(candidates, key=weight)


def _queue(instance: Instance, job: Job) -> str:
    cached = job.cached_tokens.get(instance.id, 0)
    return f"{cached} of {job.num_tokens} tokens cached, {instance.queued_tokens} queued"

# SPDX-License-Identifier: Apache-2.0
"""The policies that select instances, as plain functions from candidates to a choice with its reason.

It owns the formulas and refuses to know health, membership and the index: the caller has already dropped the
instances that may not be chosen. A policy weighs *seconds until this prompt is computed*, the one unit in
which a queue, a cached prefix and a transfer can be compared, divided by the share of work that a new
instance should get. The numbers behind a choice travel with it, so that it can be explained. Candidates are
an array of slots with columns of data: a policy is a dozen operations on arrays, however many there are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import numpy as np

from mooncake.conductor.index.prefix_match import PrefixMatch
from mooncake.conductor.prediction.load import LoadAccounts
from mooncake.conductor.prediction.predictor import Predictor
from mooncake.conductor.prediction.regression import Floats, Slots
from mooncake.conductor.settings import SchedulingSettings
from mooncake.types import InstanceId


@dataclass(slots=True)
class ClusterView:
    """The cluster as policies see it."""

    settings: SchedulingSettings
    random: Random
    loads: LoadAccounts
    predict: Predictor
    names: list[InstanceId] = field(default_factory=list)
    "Names by slot; empty where there is no instance."
    sources: Slots = field(default_factory=lambda: np.empty(0, np.int64))
    "Slots of instances whose blocks others may fetch."
    turns: Floats = field(default_factory=lambda: np.empty(0))
    "Credits of ``round_robin`` by slot."

    def estimate(self, job: PromptJob, slot: int) -> tuple[float, float]:
        """Seconds until an instance has computed its queue, and seconds it takes to compute this prompt."""
        [queue_s], [prefill_s] = (one.tolist() for one in estimates(self, job, np.array([slot])))
        return queue_s, prefill_s


@dataclass(slots=True)
class PromptJob:
    """A prompt to be placed."""

    now: float
    num_tokens: int
    "Length of the prompt."
    cached: Floats
    "Leading tokens of the prompt that each instance holds on any tier, by slot."
    in_memory: Floats
    "Leading tokens that it need not read from its SSD first, by slot."
    affinity: str = ""
    "Requests with the same hint should go to the same instance; empty for none."
    output_tokens: int = 0
    "Expected length of the answer; 0 when unknown."
    priority: int = 0
    "Lower goes first."
    matched: PrefixMatch | None = None
    "The match that ``cached`` comes from."

    def turn(self, compute_s: float) -> float:
        """Its turn, by which shorter prompts overtake longer ones, but none waits indefinitely.

        The turn is the arrival plus a few times the time to compute: a prompt of 20 s may be overtaken by
        short ones for a minute or so, then it is first.
        """
        return self.now + OVERTAKING_FACTOR * compute_s + self.priority * PRIORITY_S


@dataclass(slots=True)
class CandidateColumns:
    """The candidates that came closest, best first, as columns, for explanations."""

    slots: Slots
    score_s: Floats
    queue_s: Floats
    fetch_s: Floats
    prefill_s: Floats
    cached_tokens: Floats


@dataclass(slots=True)
class InstanceChoice:
    slot: int
    reason: str
    queue_s: float = 0.0
    prefill_s: float = 0.0
    "Seconds to compute what is neither cached nor fetched."
    done_s: float = 0.0
    "Seconds until the prompt is computed."
    busy_s: float = 0.0
    "Seconds for which it keeps the instance from computing others."
    fetch_s: float = 0.0
    card_s: float = 0.0
    "Seconds for which loading keeps both network cards busy."
    source: int = -1
    "Slot of the instance from which blocks are loaded; -1 for none."
    fetch_tokens: tuple[int, int] = (0, 0)
    "Range of prompt tokens to load: [first, end)."
    turn: float = 0.0
    "Among the prompts that wait there, the lowest turn is computed next; 0 for order of arrival."
    considered: CandidateColumns | None = None


Policy = Callable[[ClusterView, PromptJob, Slots], InstanceChoice]

NUM_CONSIDERED = 8

OVERTAKING_FACTOR = 4.0
"""Multiple of its own computing time for which a prompt lets shorter ones go first."""

PRIORITY_S = 1e6
"""Waiting time that one step of priority is worth: more than any request waits."""


def prefill_by_cache(cluster: ClusterView, job: PromptJob, slots: Slots) -> InstanceChoice:
    """The instance that computes the prompt first: least queue plus uncached part."""
    queue, prefill = estimates(cluster, job, slots)
    score, best, why = ranked(cluster, job, slots, queue + prefill)
    chosen = slots[best]
    reason = f"{why or 'soonest'}: {estimate_text(job, chosen, queue[best], prefill[best])}"
    return chosen_at(cluster, job, slots, best, reason, queue, prefill, score)


def prefill_by_load(cluster: ClusterView, job: PromptJob, slots: Slots) -> InstanceChoice:
    """The instance with the shortest queue."""
    queue, prefill = estimates(cluster, job, slots)
    # This prompt's own time counts in full everywhere: a new instance gets its share of it, too.
    whole = cluster.predict.prefill_s(slots, 0.0, job.num_tokens)
    score = shared(cluster, job, slots, queue + whole)
    best = least_used(cluster, slots, score)
    return chosen_at(cluster, job, slots, best, f"shortest queue: {queue[best]:.3f} s", queue, prefill, score)


def round_robin(cluster: ClusterView, job: PromptJob, slots: Slots) -> InstanceChoice:
    """Instances in turn, new ones less often.

    Smooth weighted round robin as in nginx: every instance gains its share of credit, the one with most
    serves and pays the sum.
    """
    shares = cluster.loads.shares(slots, job.now, cluster.settings.slow_start_s)
    gains = np.ones(len(slots)) if shares is None else shares
    cluster.turns[slots] += gains
    best = int(cluster.turns[slots].argmax())
    cluster.turns[slots[best]] -= gains.sum()
    return _alone(cluster, job, slots, best, "its turn")


def at_random(cluster: ClusterView, job: PromptJob, slots: Slots) -> InstanceChoice:
    shares = cluster.loads.shares(slots, job.now, cluster.settings.slow_start_s)
    if shares is None:
        best = cluster.random.randrange(len(slots))
    else:
        [best] = cluster.random.choices(range(len(slots)), weights=shares.tolist())
    return _alone(cluster, job, slots, best, "by chance")


def decode_by_load(cluster: ClusterView, job: PromptJob, slots: Slots) -> InstanceChoice:
    """The instance with the fewest running requests; among equals the one that holds most of the prompt."""
    running = cluster.loads.num_requests.take(slots)
    score = shared(cluster, job, slots, running + 1)
    equals = (score == score.min()).nonzero()[0]
    # Both in one number: blocks first, then fewest requests served.
    order = job.cached[slots[equals]] * 1e9 - cluster.loads.num_placed[slots[equals]]
    best = int(equals[order.argmax()])
    return InstanceChoice(int(slots[best]), f"fewest running: {running[best]:.0f}")


def decode_by_tbt(cluster: ClusterView, job: PromptJob, slots: Slots) -> InstanceChoice:
    """The instance with the shortest next step including this request, among those with memory for it."""
    loads = cluster.loads
    tokens = job.num_tokens + job.output_tokens
    context = loads.context_tokens.take(slots) + tokens
    capacity = loads.capacity_tokens.take(slots)
    fits = context <= capacity
    num_fit = np.count_nonzero(fits)
    if not num_fit:
        # A request has to wait wherever it goes: choose the least overcommitted memory.
        best = int((context / capacity).argmin())
        return InstanceChoice(
            int(slots[best]), f"no memory anywhere, least wanted: {context[best]:.0f} tokens"
        )
    step = cluster.predict.step_s(slots, loads.batch_size.take(slots) + 1, context)
    step = shared(cluster, job, slots, step if num_fit == len(slots) else np.where(fits, step, np.inf))
    best = int(step.argmin())
    equals = (step <= step[best] * (1 + 1e-9)).nonzero()[0]
    if len(equals) > 1:
        order = job.cached[slots[equals]] * 1e9 - loads.num_placed[slots[equals]]
        best = int(equals[order.argmax()])
    running = loads.batch_size[slots[best]]
    return InstanceChoice(
        int(slots[best]), f"shortest step: {step[best] * 1000:.1f} ms with {running:.0f} others"
    )


# --- what policies are made of


def estimates(cluster: ClusterView, job: PromptJob, slots: Slots) -> tuple[Floats, Floats]:
    """By candidate: seconds until it has computed its queue, and seconds to compute this prompt."""
    queue, _ = cluster.loads.queue_s(slots, job.now)
    return queue, cluster.predict.prefill_s(slots, job.cached.take(slots), job.num_tokens)


def shared(cluster: ClusterView, job: PromptJob, slots: Slots, score: Floats) -> Floats:
    """Scores divided by each instance's share of work, which is smaller for a new one."""
    shares = cluster.loads.shares(slots, job.now, cluster.settings.slow_start_s)
    return score if shares is None else score / shares


def least_used(cluster: ClusterView, slots: Slots, score: Floats) -> int:
    """Position of the best score; among equals, the one with least load that served least."""
    best = int(score.argmin())
    equals = (score <= score[best] * (1 + 1e-9) + 1e-12).nonzero()[0]
    if len(equals) == 1:
        return best
    loads, tied = cluster.loads, slots[equals]
    return int(equals[(loads.num_requests[tied] * 1e12 + loads.num_placed[tied]).argmin()])


def ranked(cluster: ClusterView, job: PromptJob, slots: Slots, done: Floats) -> tuple[Floats, int, str]:
    """Scores, the position of the best, and the reason if the affinity hint chose another than the lowest."""
    score = shared(cluster, job, slots, done)
    best = least_used(cluster, slots, score)
    if job.affinity:
        preferred = _preferred(cluster, job.affinity, slots)
        # The hint is worth one computation of this prompt: following it is what makes later turns hit.
        whole = cluster.predict.prefill_s(slots[preferred : preferred + 1], 0.0, job.num_tokens)[0]
        if score[preferred] <= score[best] + whole:
            return score, preferred, f"affinity {job.affinity[:40]!r}"
    return score, best, ""


def estimate_text(job: PromptJob, slot: int, queue_s: float, prefill_s: float) -> str:
    cached = int(job.cached[slot])
    return f"{cached} of {job.num_tokens} tokens cached, {queue_s:.3f} s queued, {prefill_s:.3f} s to compute"


def chosen_at(
    cluster: ClusterView,
    job: PromptJob,
    slots: Slots,
    best: int,
    reason: str,
    queue: Floats,
    prefill: Floats,
    score: Floats,
    fetch: Floats | None = None,
) -> InstanceChoice:
    """The choice of one candidate; with the few that came closest, if explanations are on."""
    queue_s, prefill_s = float(queue[best]), float(prefill[best])
    choice = InstanceChoice(int(slots[best]), reason, queue_s, prefill_s, queue_s + prefill_s, prefill_s)
    if cluster.settings.explained_requests:
        if len(slots) <= NUM_CONSIDERED:
            closest = score.argsort()
        else:
            closest = score.argpartition(NUM_CONSIDERED)[:NUM_CONSIDERED]
            closest = closest[score[closest].argsort()]
        near = slots[closest]
        choice.considered = CandidateColumns(
            near,
            score[closest],
            queue[closest],
            np.zeros(len(near)) if fetch is None else fetch[closest],
            prefill[closest],
            job.cached[near],
        )
    return choice


def _alone(cluster: ClusterView, job: PromptJob, slots: Slots, best: int, reason: str) -> InstanceChoice:
    """A choice made without estimates, which still carries those of its instance."""
    slot = int(slots[best])
    queue_s, prefill_s = cluster.estimate(job, slot)
    return InstanceChoice(slot, reason, queue_s, prefill_s, queue_s + prefill_s, prefill_s)


def _preferred(cluster: ClusterView, affinity: str, slots: Slots) -> int:
    """Position of the instance that the affinity hint points to.

    Highest random weight hashing: stable when other instances come and go, and needs no memory.
    """

    def weight(position: int) -> bytes:
        return hashlib.sha256(f"{affinity}\0{cluster.names[slots[position]]}".encode()).digest()

    return max(range(len(slots)), key=weight)

# SPDX-License-Identifier: Apache-2.0
"""The scheduling policies, which choose the instances for a request: plain functions from candidates to a
choice with its reason.

It owns the formulas and refuses to know health, membership and the index: the caller has already dropped the
instances that may not be chosen. A policy weighs *seconds until this prompt is computed*, the one unit in
which a queue, a cached prefix and a transfer can be compared, divided by the share of work that a new
instance should get. The numbers behind a choice travel with it, so that it can be explained. Candidates are
an array of slots with columns of data: a policy is a dozen operations on arrays, however many there are.

With two of the policies a prompt's cached blocks may be loaded from another instance instead of computed.
``kvcache_centric`` is Algorithm 1 of the paper: where the best prefix anywhere is longer than the candidate's
own by more than a factor, all of it is transferred, and the transfer time is added to queue and computing; a
transfer is also the only way in which hot blocks get copies.

``overlap`` is ours. That sum counts concurrent work twice: blocks are loaded while the
prompt waits for its turn, and layer by layer while it is computed. So a candidate's prompt is done at ::

    done(k) = max( queue + compute(k),                 the processor, if it waited for nothing
                   loaded(k) + compute(k) / layers )   the card, then the last layer

where tokens [own, k) are loaded and [k, n) computed. The first falls with k, the second rises: the best
split is where they meet, or all, or nothing when computing is faster than the card. There is no
threshold to adjust: a slow card, a busy source or an idle processor move the split.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np
from numpy.typing import NDArray

from mooncake.conductor.handover_windows import HandoverWindows
from mooncake.conductor.keyed_prompt import KeyedPrompt
from mooncake.conductor.load import LoadAccounts
from mooncake.conductor.prediction import Floats, Predictor, Slots
from mooncake.conductor.prefix_index import PrefixMatch
from mooncake.conductor.settings import SchedulingSettings
from mooncake.prefix import BlockKey
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
    handovers: HandoverWindows = field(default_factory=HandoverWindows)
    name_hashes: NDArray[np.uint64] = field(init=False)
    "Hashes of ``names``, the same in every process: conductors must agree where a session goes."

    def __post_init__(self) -> None:
        self.name_hashes = np.array([_hash(name) for name in self.names], np.uint64)

    def grow(self, num_slots: int) -> None:
        added = num_slots - len(self.names)
        self.names += [""] * added
        self.name_hashes = np.append(self.name_hashes, np.zeros(added, np.uint64))
        self.turns = np.append(self.turns, np.zeros(added))

    def set_name(self, slot: int, name: InstanceId) -> None:
        """Give a slot to another instance; empty: to none."""
        self.names[slot], self.name_hashes[slot], self.turns[slot] = name, _hash(name), 0.0

    def estimate(self, job: PromptJob, slot: int) -> tuple[float, float]:
        """Seconds until an instance has computed its queue, and seconds it takes to compute this prompt."""
        [queue_s], [prefill_s], _ = (one.tolist() for one in estimates(self, job, np.array([slot])))
        return queue_s, prefill_s

    def awaited(self, job: PromptJob, held: Floats) -> AwaitedPrefix | None:
        """What instances will have of a prompt beyond what they hold; None if nothing."""
        found: AwaitedPrefix | None = None
        for num_blocks, slots, turns in reversed(self.loads.queued_prefixes.reach(KeyedPrompt(job.keys))):
            of_slots, of_turns = np.array(slots), np.array(turns)
            num_tokens = float(num_blocks * self.settings.block_tokens)
            is_more = (held.take(of_slots) < num_tokens) & (of_turns <= job.last_turn)
            if np.count_nonzero(is_more):
                if found is None:
                    found = AwaitedPrefix(held.copy(), np.full(len(held), -np.inf))
                chosen = of_slots[is_more]
                found.tokens[chosen], found.turns[chosen] = num_tokens, of_turns[is_more]
        return found


@dataclass(slots=True)
class AwaitedPrefix:
    """The leading tokens of a prompt that each instance will have once the prompts are computed that wait."""

    tokens: Floats
    "By slot; where nothing is awaited those that it holds."
    turns: Floats
    "By slot: the turn of the prompt that brings them; -inf where none must be waited for."


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
    slo_ttft_s: float = 0.0
    "0: none."
    slo_tbt_s: float = 0.0
    moving_s: float = 0.0
    "Seconds for which its KV occupies a network card on its way to the decode instance; 0: it does not move."
    late_s: float = 0.0
    "Time by which the KV may reach the decode instance later than the first token is made."
    moves: tuple[float, float] = (0.0, 0.0)
    "Instants between which the KV moves, once it is known where the prompt is computed."
    matched: PrefixMatch | None = None
    "The match that ``cached`` comes from."
    keys: Sequence[BlockKey] = ()
    "Its full blocks."

    @property
    def hand_over_s(self) -> float:
        """Least time from the last loaded byte to the first token."""
        return max(0.0, self.moving_s - self.late_s)

    def keyed(self, num_cached: float, block_tokens: int) -> KeyedPrompt:
        """It by its blocks, of which leading ones with so many tokens need not be computed."""
        return KeyedPrompt(self.keys, int(num_cached) // block_tokens)

    def num_cached(self, choice: InstanceChoice) -> int:
        """Leading tokens that need not be computed where it was chosen to be."""
        return max(int(self.cached[choice.slot]), choice.fetch_tokens[1])

    def computed_at(self, choice: InstanceChoice) -> None:
        """Note where it is computed, and so when its KV moves: in the time before the first token, but not
        before all is there that is loaded. Predictions err, so the time is longer by half at both ends."""
        loaded_s = choice.fetch_s if choice.source >= 0 else 0.0
        begins_at = self.now + max(choice.done_s - self.moving_s, choice.queue_s, loaded_s)
        self.moves = begins_at - 0.5 * self.moving_s, begins_at + 1.5 * self.moving_s

    @property
    def last_turn(self) -> float:
        """No turn of a prompt of its priority is after this, and none of a lower priority before."""
        return self.now + (self.priority + 0.5) * PRIORITY_S

    def turn(self, compute_s: float, least_queue_s: float = 0.0) -> float:
        """Its turn, by which shorter prompts overtake longer ones, but none waits indefinitely.

        The turn is the arrival plus a few times the time to compute: a prompt of 20 s may be overtaken by
        short ones for a minute or so, then it is first. With an objective it is overtaken no longer than
        would leave it on time behind ``least_queue_s``, the shortest queue of all, because what overtakes it
        is added to that. If it can't meet its objective even so, or so many wait that others would miss
        theirs for it, short ones go on overtaking it.
        """
        waits_s = OVERTAKING_FACTOR * compute_s
        if least_queue_s + compute_s < self.slo_ttft_s:
            waits_s = min(waits_s, max(0.0, DUE_PART * self.slo_ttft_s - compute_s - least_queue_s))
        return self.now + waits_s + self.priority * PRIORITY_S


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
    least_s: float | None = None
    "Seconds to compute the prompt where that takes least; the turn was chosen for that."
    considered: CandidateColumns | None = None


Policy = Callable[[ClusterView, PromptJob, Slots], InstanceChoice]

NUM_CONSIDERED = 8

OVERTAKING_FACTOR = 4.0
"""Multiple of its own computing time for which a prompt lets shorter ones go first."""

DUE_PART = 0.5
"""Part of its TTFT objective within which a prompt's turn wants it computed. The rest is for what is being
computed when its turn comes, for more work than can be done meanwhile, and for errors of prediction: 0.3 to
0.6 serve nearly the same requests well, with 0.75 a burst of long prompts has 1.5 % more that are late
(`bench/policies.py`)."""

PRIORITY_S = 1e6
"""Waiting time that one step of priority is worth: more than any request waits."""


def prefill_by_cache(cluster: ClusterView, job: PromptJob, slots: Slots) -> InstanceChoice:
    """The instance that computes the prompt first: least queue plus uncached part."""
    queue, prefill, own = estimates(cluster, job, slots)
    score, best, why = ranked(cluster, job, slots, queue + prefill)
    reason = f"{why or 'soonest'}: {estimate_text(job, slots[best], own[best], queue[best], prefill[best])}"
    return chosen_at(cluster, job, slots, best, reason, queue, prefill, score)


def prefill_by_load(cluster: ClusterView, job: PromptJob, slots: Slots) -> InstanceChoice:
    """The instance with the shortest queue."""
    queue, prefill, _ = estimates(cluster, job, slots)
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
    order = job.cached[slots[equals]] * 1e9 - cluster.loads.tie_order[slots[equals]]
    best = int(equals[order.argmax()])
    return InstanceChoice(int(slots[best]), f"fewest running: {running[best]:.0f}")


def decode_by_tbt(cluster: ClusterView, job: PromptJob, slots: Slots) -> InstanceChoice:
    """The instance with the shortest next step including this request, among those with memory for it."""
    return _shortest_step(cluster, job, slots, None)


def decode_by_end(cluster: ClusterView, job: PromptJob, slots: Slots) -> InstanceChoice:
    """The instance that makes the last token first, by its step and by the KV that others await there.

    The second token waits for the prompt's KV. Where that of other prompts arrives at the same time, it is
    late by their time on the network card; per token of the answer this is as bad as a longer step.
    """
    begins_at, ends_at = job.moves
    if ends_at <= begins_at:
        return _shortest_step(cluster, job, slots, None)
    taken_s = cluster.handovers.taken_s(cluster.loads.num_slots, begins_at, ends_at)
    return _shortest_step(cluster, job, slots, taken_s)


def _shortest_step(
    cluster: ClusterView, job: PromptJob, slots: Slots, taken_s: Floats | None
) -> InstanceChoice:
    """``taken_s``: by slot, how late the second token is there."""
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
    score = step if taken_s is None else step + taken_s.take(slots) / max(1, job.output_tokens)
    score = shared(cluster, job, slots, score if num_fit == len(slots) else np.where(fits, score, np.inf))
    best = int(score.argmin())
    equals = (score <= score[best] * (1 + 1e-9)).nonzero()[0]
    if len(equals) > 1:
        order = job.cached[slots[equals]] * 1e9 - loads.tie_order[slots[equals]]
        best = int(equals[order.argmax()])
    slot = int(slots[best])
    reason = f"shortest step: {step[best] * 1000:.1f} ms with {loads.batch_size[slot]:.0f} others"
    if taken_s is not None and taken_s[slot] > 5e-5:
        reason += f", {taken_s[slot] * 1000:.1f} ms of other KV on its way there at the same time"
    return InstanceChoice(slot, reason)


# --- what policies are made of


def estimates(cluster: ClusterView, job: PromptJob, slots: Slots) -> tuple[Floats, Floats, Floats]:
    """By candidate, in order of arrival: seconds until its queue is computed, seconds to compute this prompt,
    and leading tokens of it that are there by then."""
    queue, _ = cluster.loads.queue_s(slots, job.now)
    awaited = cluster.awaited(job, job.cached)
    own = (job.cached if awaited is None else awaited.tokens).take(slots)
    return queue, cluster.predict.prefill_s(slots, own, job.num_tokens), own


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
    return int(equals[(loads.num_requests[tied] * 1e12 + loads.tie_order[tied]).argmin()])


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


def estimate_text(job: PromptJob, slot: int, own: float, queue_s: float, prefill_s: float) -> str:
    """``own``: leading tokens that are there when its turn comes."""
    cached = int(job.cached[slot])
    awaited = f", {own - cached:.0f} more by those before it" if own > cached else ""
    text = f"{cached} of {job.num_tokens} tokens cached{awaited}"
    return f"{text}, {queue_s:.3f} s queued, {prefill_s:.3f} s to compute"


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
    loaded_prefill: Floats | None = None,
) -> InstanceChoice:
    """The choice of one candidate; with the few that came closest, if explanations are on.

    ``loaded_prefill``: seconds to compute the prompt once all is loaded that should be, as in the scores.
    """
    queue_s, prefill_s = float(queue[best]), float(prefill[best])
    choice = InstanceChoice(int(slots[best]), reason, queue_s, prefill_s, queue_s + prefill_s, prefill_s)
    if cluster.settings.explained_requests:
        if len(slots) <= NUM_CONSIDERED:
            closest = score.argsort()
        else:
            closest = score.argpartition(NUM_CONSIDERED)[:NUM_CONSIDERED]
            closest = closest[score[closest].argsort()]
            if best not in closest:  # an affinity hint points to it
                closest[-1] = best
        near = slots[closest]
        choice.considered = CandidateColumns(
            near,
            score[closest],
            queue[closest],
            np.zeros(len(near)) if fetch is None else fetch[closest],
            (prefill if loaded_prefill is None else loaded_prefill)[closest],
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

    Highest random weight hashing: stable when other instances come and go, and needs no memory. A column of
    hashes is mixed with the hint's: to hash each pair of names takes milliseconds for a thousand instances.
    """
    return int(_mixed(cluster.name_hashes.take(slots) ^ np.uint64(_hash(affinity))).argmax())


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def _mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Each number's bits spread over all of them: the end of SplitMix64 (Steele et al., "Fast splittable
    pseudorandom number generators", 2014)."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


# --- sources of a prompt's blocks


@dataclass(slots=True)
class KvSource:
    """A source of more of the prompt, with the time it takes to reach each candidate."""

    slot: int
    "Slot of the source; -1: each candidate reads from its own SSD."
    is_on_ssd: bool
    reach: Floats | float
    "Number of leading tokens that it has."
    begun: Floats
    "Seconds until the first byte arrives."
    per_token: Floats | float
    rest: Floats
    "Seconds to compute what it does not have."


def longest_holder(cluster: ClusterView, job: PromptJob) -> tuple[int, float]:
    """The slot with most of the prompt, and its tokens; the least busy one of several; (-1, 0) for none."""
    sources = cluster.sources
    held = job.cached[sources]
    if not len(held) or not (reach := held.max()):
        return -1, 0.0
    most = sources[held == reach]
    return int(most[cluster.predict.links.egress_free_at[most].argmin()]), float(reach)


def best_source(
    cluster: ClusterView, job: PromptJob, slots: Slots, everywhere: Floats, with_ssd: Floats | None
) -> KvSource | None:
    """The best source among the other instances; None when none has any of the prompt. ``everywhere``:
    seconds to compute the prompt on each with its blocks in memory; ``with_ssd``: with those on SSD, too
    (None: no instance has more there).

    Unlike with ``longest_holder``, less of the prompt from an idle card may be better than all from a busy
    one, or than all from an SSD.
    """
    predict, sources = cluster.predict, cluster.sources
    per_token_ssd = predict.costs.kv_bytes_per_token / predict.costs.ssd.bytes_per_s
    in_memory = job.in_memory.take(sources)
    least_s, source, reach, is_on_ssd = np.inf, -1, 0.0, False
    # Computed for all and masked: selecting part of a column takes longer than a sum over all of it.
    busy_s = np.maximum(predict.links.egress_free_at.take(sources) - job.now, 0.0)
    if num_holders := np.count_nonzero(in_memory):
        cost = busy_s + everywhere.take(sources)
        if num_holders < len(sources):
            np.copyto(cost, np.inf, where=in_memory == 0)
        best = int(cost.argmin())
        least_s, source, reach = float(cost[best]), int(sources[best]), float(in_memory[best])
    if with_ssd is not None:
        # An instance with no more on its SSD than in memory gains nothing by being read from SSD.
        on_ssd = job.cached.take(sources)
        has_none = on_ssd <= in_memory
        if np.count_nonzero(has_none) < len(sources):
            cost = busy_s + on_ssd * per_token_ssd
            cost += with_ssd.take(sources)
            np.copyto(cost, np.inf, where=has_none)
            best = int(cost.argmin())
            if cost[best] < least_s:
                source, reach, is_on_ssd = int(sources[best]), float(on_ssd[best]), True
    if source < 0:
        return None
    latency_s, per_token = path_costs(cluster, source, slots)
    if is_on_ssd:
        per_token = np.maximum(per_token, per_token_ssd)
    begun = cards_wait_s(cluster, job, source, slots) + latency_s
    return KvSource(
        source, is_on_ssd, reach, begun, per_token, predict.prefill_s(slots, reach, job.num_tokens)
    )


def own_ssd(
    cluster: ClusterView, job: PromptJob, slots: Slots, own: Floats, with_ssd: Floats | None
) -> KvSource | None:
    """Each candidate's own SSD as a source; None when none has more there than in memory."""
    if with_ssd is None:
        return None
    reach, links = job.cached.take(slots), cluster.predict.links
    if not np.count_nonzero(reach > own):
        return None
    begun = np.maximum(links.ssd_free_at.take(slots) - job.now, 0.0) + cluster.predict.costs.ssd.latency_s
    per_token = cluster.predict.costs.kv_bytes_per_token / cluster.predict.costs.ssd.bytes_per_s
    return KvSource(-1, False, reach, begun, per_token, with_ssd.take(slots))


def path_costs(cluster: ClusterView, source: int, slots: Slots) -> tuple[float, Floats | float]:
    """Latency, and seconds per token of KV to each of these instances."""
    links, per_token_bytes = cluster.predict.links, cluster.predict.costs.kv_bytes_per_token
    s_per_byte = links.s_per_byte_from(source)
    if isinstance(s_per_byte, np.ndarray):
        s_per_byte = s_per_byte[slots]
    return links.latency_s, s_per_byte * per_token_bytes


def cards_wait_s(cluster: ClusterView, job: PromptJob, source: int, slots: Slots) -> Floats:
    """Seconds until both network cards have moved what was booked before."""
    links = cluster.predict.links
    free_at = np.maximum(links.ingress_free_at.take(slots), links.egress_free_at[source])
    wait: Floats = np.maximum(free_at - job.now, 0.0)
    return wait


# --- policies that load blocks from other instances


LOAD_PRICE = 0.1
"""Cost of a second of both cards in seconds of a request's waiting: the delay it causes to other loads."""


def kvcache_centric(cluster: ClusterView, job: PromptJob, slots: Slots) -> InstanceChoice:
    """Algorithm 1 of the paper: least transfer + queue + prefill."""
    queue, own_prefill, own = estimates(cluster, job, slots)
    source, reach = longest_holder(cluster, job)
    if source < 0:
        score, best, why = ranked(cluster, job, slots, queue + own_prefill)
        estimate = estimate_text(job, slots[best], own[best], queue[best], own_prefill[best])
        reason = f"{why or 'soonest'}: {estimate}"
        return chosen_at(cluster, job, slots, best, reason, queue, own_prefill, score)
    # Any factor of zero is exceeded: an instance that holds none of it has all of it transferred.
    transfers = reach > own * cluster.settings.kvcache_balancing_threshold
    transfers &= slots != source
    latency_s, per_token = path_costs(cluster, source, slots)
    moving = (reach - own) * per_token
    fetch = np.where(transfers, cards_wait_s(cluster, job, source, slots) + latency_s + moving, 0.0)
    prefill = np.where(transfers, cluster.predict.prefill_s(slots, reach, job.num_tokens), own_prefill)
    score, best, why = ranked(cluster, job, slots, queue + fetch + prefill)
    reason = f"{why or 'soonest'}: {estimate_text(job, slots[best], own[best], queue[best], prefill[best])}"
    choice = chosen_at(cluster, job, slots, best, reason, queue, prefill, score, fetch)
    if transfers[best]:
        choice.fetch_s = float(fetch[best])
        choice.card_s = float(moving[best])
        choice.done_s += choice.fetch_s
        choice.source, choice.fetch_tokens = source, (int(own[best]), int(reach))
        choice.reason += _loaded(cluster, choice)
    return choice


@dataclass(slots=True)
class _Candidates:
    """Times of each candidate when nothing is loaded."""

    slots: Slots
    own: Floats
    "Prompt tokens in its memory."
    prefill: Floats
    queue: Floats
    whole: Floats
    "Seconds until the prompt is computed."


@dataclass(slots=True)
class _Split:
    """The part of the source's blocks that each candidate should load, with the resulting times."""

    part: Floats
    done: Floats
    "Seconds until the prompt is computed."
    moving: Floats
    "Seconds for which loading keeps the cards busy."
    begun: Floats

    def improve(self, other: _Split, is_better: NDArray[np.bool_]) -> None:
        """Replace the split by ``other`` for the candidates where that is better."""
        np.copyto(self.part, other.part, where=is_better)
        np.copyto(self.done, other.done, where=is_better)
        np.copyto(self.moving, other.moving, where=is_better)
        np.copyto(self.begun, other.begun, where=is_better)


def overlap(cluster: ClusterView, job: PromptJob, slots: Slots) -> InstanceChoice:
    """Least time until the prompt is computed, where loading overlaps waiting and computing."""
    predict = cluster.predict
    everywhere, with_ssd = predict.prefill_everywhere_s(job.in_memory, job.num_tokens), None
    if job.cached is not job.in_memory:
        with_ssd = predict.prefill_everywhere_s(job.cached, job.num_tokens)
    own, prefill = job.in_memory.take(slots), everywhere.take(slots)
    source = best_source(cluster, job, slots, everywhere, with_ssd)
    ssd = own_ssd(cluster, job, slots, own, with_ssd)
    # Its turn is that of a prompt whose cached part is there: the choice of the instance must not delay it.
    compute_s = min(float(one.min()) for one in (prefill, *(one.rest for one in (source, ssd) if one)))
    short, awaited = prefill, cluster.awaited(job, job.in_memory)
    if awaited is not None:
        short = predict.prefill_s(slots, awaited.tokens.take(slots), job.num_tokens)
        is_sure = np.isneginf(awaited.turns.take(slots))
        compute_s = min(compute_s, float(short.min(initial=np.inf, where=is_sure)))
    turn = job.turn(
        compute_s, float(cluster.loads.queue_s(slots, job.now)[0].min()) if job.slo_ttft_s else 0.0
    )
    turns = cluster.loads.turns_after(turn, compute_s, job.last_turn)
    queue, num_behind = cluster.loads.queue_s(slots, job.now, turns)
    if awaited is not None:
        # Behind the prompt that brings more of it, or at its own turn without that, whatever is sooner.
        later = np.maximum(awaited.turns, turns)
        behind, num_behind_it = cluster.loads.queue_s(slots, job.now, later)
        is_sooner = behind + short < queue + prefill
        turns[slots[is_sooner]] = later[slots[is_sooner]]
        own = np.where(is_sooner, awaited.tokens.take(slots), own)
        prefill, queue = np.where(is_sooner, short, prefill), np.where(is_sooner, behind, queue)
        if num_behind is not None:
            num_behind = np.where(is_sooner, 0.0 if num_behind_it is None else num_behind_it, num_behind)
    candidates = _Candidates(slots, own, prefill, queue, queue + prefill)
    split, reads_ssd = _split(cluster, candidates, source, job.hand_over_s), np.zeros(len(slots), np.bool_)
    if ssd is not None:
        from_ssd = _split(cluster, candidates, ssd, job.hand_over_s)
        reads_ssd = ssd.reach > own
        if source is not None:
            reads_ssd &= from_ssd.done < split.done
        split.improve(from_ssd, reads_ssd)
    done, price = split.done, LOAD_PRICE * split.moving
    score = done + price if num_behind is None else done + num_behind * (done - queue) + price
    score, best, why = ranked(cluster, job, slots, score)
    fetch = np.where(split.part > 0, split.begun + split.moving, 0.0)
    choice = chosen_at(cluster, job, slots, best, "", queue, prefill, score, fetch, done - queue)
    choice.turn, choice.least_s = float(turns[choice.slot]), compute_s
    part = float(split.part[best])
    if part > 0:
        chosen = ssd if reads_ssd[best] else source
        assert chosen is not None
        _load_part(cluster, job, choice, chosen, best, int(own[best]), is_all=part >= 1)
        if (seen := choice.considered) is not None:
            is_chosen = seen.slots == choice.slot
            seen.fetch_s[is_chosen], seen.prefill_s[is_chosen] = choice.fetch_s, choice.prefill_s
    estimate = estimate_text(job, choice.slot, own[best], choice.queue_s, choice.prefill_s)
    choice.reason = f"{why or 'soonest'}: {estimate}"
    if choice.source >= 0:
        choice.reason += _loaded(cluster, choice)
    return choice


def _split(
    cluster: ClusterView, candidates: _Candidates, source: KvSource | None, hand_over_s: float
) -> _Split:
    """The part of the source's blocks that each candidate should load.

    Both curves are approximated by straight lines between loading nothing and loading all; the split of the
    chosen candidate is made exact afterwards.
    """
    prefill, whole = candidates.prefill, candidates.whole
    if source is None:
        nothing = np.zeros((3, len(whole)))
        return _Split(nothing[0], whole, nothing[1], nothing[2])
    begun, rest, layers = source.begun, source.rest, cluster.predict.costs.num_layers
    all_s = np.maximum(source.reach - candidates.own, 0.0) * source.per_token
    # Lead of the card over the processor when nothing is loaded, and its lag when all is.
    lead = whole - begun - np.maximum(prefill / layers, hand_over_s)
    late = begun + all_s + np.maximum(rest / layers, hand_over_s) - candidates.queue - rest
    part: Floats = np.minimum(np.maximum(lead / np.maximum(lead + late, 1e-12), 0.0), 1.0)
    np.copyto(part, 1.0, where=late <= 0)
    part *= (all_s > 0) & (rest < prefill)
    if source.is_on_ssd:
        part[candidates.slots == source.slot] = 0.0
    return _Split(part, whole - part * (prefill - rest), part * all_s, begun)


def _load_part(
    cluster: ClusterView,
    job: PromptJob,
    choice: InstanceChoice,
    source: KvSource,
    at: int,
    own: int,
    is_all: bool,
) -> None:
    """Set the split of the chosen candidate to where both curves meet, at a block's boundary.

    ``own``: leading tokens that it has itself.
    """
    block = cluster.settings.block_tokens
    prefill_s, layers = cluster.predict.prefill_at(choice.slot), cluster.predict.costs.num_layers
    reach, per_token = _at(source.reach, at), _at(source.per_token, at)
    begun = float(source.begun[at])

    def curves(num_blocks: int) -> tuple[float, float]:
        end = own + num_blocks * block
        compute_s = prefill_s(end, job.num_tokens)
        tail_s = max(compute_s / layers, job.hand_over_s)
        return choice.queue_s + compute_s, begun + num_blocks * block * per_token + tail_s

    fewest, most = 0, int(reach - own) // block
    num_blocks = most
    if not is_all:
        while fewest < most:  # the first split at which the card is later than the processor
            middle = (fewest + most) // 2
            processor_s, card_s = curves(middle)
            fewest, most = (fewest, middle) if card_s >= processor_s else (middle + 1, most)
        # Of the two splits beside the point where the curves meet, the better one.
        num_blocks = min((fewest - 1, fewest), key=lambda one: max(curves(one)) if one >= 0 else np.inf)
    if num_blocks <= 0:
        return
    end = own + num_blocks * block
    choice.prefill_s = prefill_s(end, job.num_tokens)
    loaded_s = begun + num_blocks * block * per_token
    choice.done_s = max(choice.queue_s + choice.prefill_s, loaded_s + choice.prefill_s / layers)
    choice.busy_s = choice.done_s - choice.queue_s
    choice.card_s = num_blocks * block * per_token
    choice.fetch_s = begun + choice.card_s
    choice.source = choice.slot if source.slot < 0 else source.slot
    choice.fetch_tokens = (own, end)


def _at(column: Floats | float, position: int) -> float:
    return float(column[position]) if isinstance(column, np.ndarray) else float(column)


def _loaded(cluster: ClusterView, choice: InstanceChoice) -> str:
    first, end = choice.fetch_tokens
    return f", {end - first} tokens from {cluster.names[choice.source]} in {choice.fetch_s:.3f} s"


POLICIES: dict[str, tuple[Policy, Policy]] = {
    "overlap": (overlap, decode_by_end),
    "kvcache_centric": (kvcache_centric, decode_by_tbt),
    "cache_aware": (prefill_by_cache, decode_by_load),
    "load": (prefill_by_load, decode_by_load),
    "round_robin": (round_robin, round_robin),
    "random": (at_random, at_random),
}
"""What ``SchedulingSettings.scheduling`` may be."""

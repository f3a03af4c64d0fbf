"""The policies that fetch: a prompt's cached blocks may be loaded from another instance instead of
computed.

``kvcache_centric`` is Algorithm 1 of the paper: where the best prefix anywhere is longer than the
candidate's own by more than a factor, all of it is transferred, the time of which is added to queue and
computing; a transfer is also the only way in which hot blocks get copies.

``overlap`` is ours. The same sum counts what happens at the same time twice: blocks are loaded while the
prompt waits for its turn, and layer by layer while it is computed. So a candidate's prompt is done at ::

    done(k) = max( queue + compute(k),                 the processor, if it waited for nothing
                   loaded(k) + compute(k) / layers )   the card, then the last layer

where tokens [own, k) are loaded and [k, n) computed. The first falls with k, the second rises: the best
split is where they meet, or all, or nothing when computing is faster than the card. There is no
threshold to adjust: a slow card, a busy source or an idle processor move the split.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mooncake.conductor.fit import Floats
from mooncake.conductor.load import Slots
from mooncake.conductor.select import Choice, Cluster, Job, chosen_at, estimates, ranked, told

LOAD_PRICE = 0.1
"""A second of both cards in seconds of a request's waiting: so much, others' loads suffer from it."""

_NOBODY: Slots = np.empty(0, np.int64)


def kvcache_centric(cluster: Cluster, job: Job, slots: Slots) -> Choice:
    """Algorithm 1: least transfer + queue + prefill."""
    queue, own_prefill = estimates(cluster, job, slots)
    source, reach = _longest(cluster, job)
    if source < 0:
        score, best, why = ranked(cluster, job, slots, queue + own_prefill)
        reason = f"{why or 'soonest'}: {told(job, slots[best], queue[best], own_prefill[best])}"
        return chosen_at(cluster, job, slots, best, reason, queue, own_prefill, score)
    own = job.cached.take(slots)
    # A factor of nothing is more than any: who holds none of it has all of it transferred.
    transfers = reach > own * cluster.settings.kvcache_balancing_threshold
    transfers &= slots != source
    latency_s, per_token = _path(cluster, source, slots)
    moving = (reach - own) * per_token
    fetch = np.where(transfers, _wait(cluster, job, source, slots) + latency_s + moving, 0.0)
    prefill = np.where(transfers, cluster.predict.prefill_s(slots, reach, job.num_tokens), own_prefill)
    score, best, why = ranked(cluster, job, slots, queue + fetch + prefill)
    reason = f"{why or 'soonest'}: {told(job, slots[best], queue[best], prefill[best])}"
    choice = chosen_at(cluster, job, slots, best, reason, queue, prefill, score, fetch)
    if transfers[best]:
        choice.fetch_s = float(fetch[best])
        choice.card_s = float(moving[best])
        choice.done_s += choice.fetch_s
        choice.source, choice.fetch_tokens = source, (int(own[best]), int(reach))
        choice.reason += _loaded(cluster, choice)
    return choice


@dataclass(slots=True)
class _Lender:
    """Somebody who has more of the prompt, and how that would come to each candidate."""

    slot: int
    "-1: each candidate reads from its own SSD."
    is_on_ssd: bool
    reach: Floats | float
    "Leading tokens that it has."
    begun: Floats
    "Until the first byte comes."
    per_token: Floats | float
    rest: Floats
    "Seconds to compute what it has not."


@dataclass(slots=True)
class _Candidates:
    """What is known of each without anything being loaded."""

    slots: Slots
    own: Floats
    "Tokens in its memory."
    prefill: Floats
    queue: Floats
    whole: Floats
    "Until the prompt is computed."

    def at(self, positions: Slots) -> _Candidates:
        columns = (self.own, self.prefill, self.queue, self.whole)
        return _Candidates(self.slots[positions], *(column[positions] for column in columns))


@dataclass(slots=True)
class _Split:
    """How much of what is lent each candidate had better load, and what comes of that."""

    part: Floats
    done: Floats
    "Until the prompt is computed."
    moving: Floats
    "Seconds for which it keeps the cards busy."
    begun: Floats

    def improve(self, at: Slots, other: _Split, *, is_better: NDArray[np.bool_]) -> Slots:
        """Those of the candidates ``at`` these positions for whom ``other`` is better take that."""
        better = at[is_better]
        if len(better):
            self.part[better], self.done[better] = other.part[is_better], other.done[is_better]
            self.moving[better], self.begun[better] = other.moving[is_better], other.begun[is_better]
        return better


def overlap(cluster: Cluster, job: Job, slots: Slots) -> Choice:
    """Least time until computed, where loading overlaps waiting and computing."""
    everywhere = cluster.predict.prefill_everywhere_s(job.in_memory, job.num_tokens)
    own, prefill = job.in_memory.take(slots), everywhere.take(slots)
    lender = _best_lender(cluster, job, slots, everywhere)
    with_ssd, ssd = _own_ssd(cluster, job, slots, own)
    # Its turn is that of a prompt whose cached part is there: nobody is late because of who serves it.
    turn = job.turn(min(float(one.min()) for one in (prefill, *(one.rest for one in (lender, ssd) if one))))
    queue, num_behind = cluster.loads.queue_s(slots, job.now, turn)
    candidates = _Candidates(slots, own, prefill, queue, queue + prefill)
    split, from_ssd = _split(cluster, candidates, lender), with_ssd
    if ssd is not None:
        its_split = _split(cluster, candidates.at(with_ssd), ssd)
        is_better = (its_split.done < split.done[with_ssd]) | (lender is None)
        from_ssd = split.improve(with_ssd, its_split, is_better=is_better)
    done, price = split.done, LOAD_PRICE * split.moving
    score = done + price if num_behind is None else done + num_behind * (done - queue) + price
    score, best, why = ranked(cluster, job, slots, score)
    choice = chosen_at(cluster, job, slots, best, "", queue, prefill, score, split.begun + split.moving)
    choice.turn = turn
    part = float(split.part[best])
    if part > 0:
        is_own = best in from_ssd
        chosen, at = (ssd, int((with_ssd == best).argmax())) if is_own else (lender, best)
        assert chosen is not None
        _load_part(cluster, job, choice, chosen, at, is_all=part >= 1)
    choice.reason = f"{why or 'soonest'}: {told(job, choice.slot, choice.queue_s, choice.prefill_s)}"
    if choice.source >= 0:
        choice.reason += _loaded(cluster, choice)
    return choice


def _split(cluster: Cluster, candidates: _Candidates, lender: _Lender | None) -> _Split:
    """Of each candidate: which part of what is lent it had better load.

    Both curves are taken for straight lines between loading nothing and loading all; the split of the one
    that is chosen is made exact afterwards.
    """
    prefill, whole = candidates.prefill, candidates.whole
    if lender is None:
        nothing = np.zeros((3, len(whole)))
        return _Split(nothing[0], whole, nothing[1], nothing[2])
    begun, rest, layers = lender.begun, lender.rest, cluster.predict.costs.num_layers
    all_s = np.maximum(lender.reach - candidates.own, 0.0) * lender.per_token
    # How far the card is ahead of the processor when nothing is loaded, and behind when all is.
    lead = whole - begun - prefill / layers
    late = begun + all_s + rest / layers - candidates.queue - rest
    part: Floats = np.minimum(np.maximum(lead / np.maximum(lead + late, 1e-12), 0.0), 1.0)
    np.copyto(part, 1.0, where=late <= 0)
    part *= all_s > 0
    if lender.is_on_ssd:
        part[candidates.slots == lender.slot] = 0.0
    return _Split(part, whole - part * (prefill - rest), part * all_s, begun)


def _load_part(cluster: Cluster, job: Job, choice: Choice, lender: _Lender, at: int, is_all: bool) -> None:
    """Put the split of the chosen candidate where both curves meet, at a block's boundary."""
    own, block = int(job.in_memory[choice.slot]), cluster.settings.block_tokens
    model, layers = cluster.predict.prefill_model(choice.slot), cluster.predict.costs.num_layers
    reach, per_token = _at(lender.reach, at), _at(lender.per_token, at)
    begun = float(lender.begun[at])

    def curves(num_blocks: int) -> tuple[float, float]:
        end = own + num_blocks * block
        compute_s = model.seconds(end, job.num_tokens)
        return choice.queue_s + compute_s, begun + num_blocks * block * per_token + compute_s / layers

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
    choice.prefill_s = model.seconds(end, job.num_tokens)
    choice.done_s = max(curves(num_blocks))
    choice.busy_s = choice.done_s - choice.queue_s
    choice.card_s = num_blocks * block * per_token
    choice.fetch_s = begun + choice.card_s
    choice.source = choice.slot if lender.slot < 0 else lender.slot
    choice.fetch_tokens = (own, end)


def _at(column: Floats | float, position: int) -> float:
    return float(column[position]) if isinstance(column, np.ndarray) else float(column)


def _loaded(cluster: Cluster, choice: Choice) -> str:
    first, end = choice.fetch_tokens
    return f", {end - first} tokens from {cluster.names[choice.source]} in {choice.fetch_s:.3f} s"


# --- where blocks come from, and how fast


def _longest(cluster: Cluster, job: Job) -> tuple[int, float]:
    """Who holds most of the prompt and how many tokens; the least busy one of several; (-1, 0) for nobody."""
    sources = cluster.sources
    held = job.cached[sources]
    if not len(held) or not (reach := held.max()):
        return -1, 0.0
    most = sources[held == reach]
    return int(most[cluster.predict.links.egress_free_at[most].argmin()]), float(reach)


def _best_lender(cluster: Cluster, job: Job, slots: Slots, everywhere: Floats) -> _Lender | None:
    """Who has more of the prompt than others, if anybody has any of it; ``everywhere``: to compute it there
    with what is in memory.

    As ``_longest``, but less of the prompt from an idle card may be better than all from a busy one, or than
    all from an SSD.
    """
    predict, sources = cluster.predict, cluster.sources
    per_token_ssd = predict.costs.kv_bytes_per_token / predict.costs.ssd.bytes_per_s
    in_memory = job.in_memory.take(sources)
    free_at = predict.links.egress_free_at
    least_s, source, reach, is_on_ssd = np.inf, -1, 0.0, False
    if num_holders := np.count_nonzero(in_memory):
        holders = sources if num_holders == len(sources) else sources[in_memory > 0]
        cost = np.maximum(free_at.take(holders) - job.now, 0.0) + everywhere.take(holders)
        best = int(cost.argmin())
        least_s, source = float(cost[best]), int(holders[best])
        reach = float(job.in_memory[source])
    if job.cached is not job.in_memory:
        # Who has no more on its SSD than in memory is no better for being read from there.
        on_ssd = job.cached.take(sources)
        has_more = on_ssd > in_memory
        if np.count_nonzero(has_more):
            holders, held = sources[has_more], on_ssd[has_more]
            cost = np.maximum(free_at[holders] - job.now, 0.0) + held * per_token_ssd
            cost += predict.prefill_s(holders, held, job.num_tokens)
            best = int(cost.argmin())
            if cost[best] < least_s:
                source, reach, is_on_ssd = int(holders[best]), float(held[best]), True
    if source < 0:
        return None
    latency_s, per_token = _path(cluster, source, slots)
    if is_on_ssd:
        per_token = np.maximum(per_token, per_token_ssd)
    begun = _wait(cluster, job, source, slots) + latency_s
    return _Lender(
        source, is_on_ssd, reach, begun, per_token, predict.prefill_s(slots, reach, job.num_tokens)
    )


def _own_ssd(cluster: Cluster, job: Job, slots: Slots, own: Floats) -> tuple[Slots, _Lender | None]:
    """The positions of candidates whose own SSD has more of the prompt than their memory, and how that comes
    to these."""
    if job.cached is job.in_memory:
        return _NOBODY, None
    cached, predict = job.cached.take(slots), cluster.predict
    at = (cached > own).nonzero()[0]
    if not len(at):
        return _NOBODY, None
    reach, those = cached[at], slots[at]
    begun = np.maximum(predict.links.ssd_free_at[those] - job.now, 0.0) + predict.costs.ssd.latency_s
    per_token = predict.costs.kv_bytes_per_token / predict.costs.ssd.bytes_per_s
    return at, _Lender(-1, False, reach, begun, per_token, predict.prefill_s(those, reach, job.num_tokens))


def _path(cluster: Cluster, source: int, slots: Slots) -> tuple[float, Floats | float]:
    """Latency, and seconds per token of KV to each of these instances."""
    links, per_token_bytes = cluster.predict.links, cluster.predict.costs.kv_bytes_per_token
    s_per_byte = links.s_per_byte_from(source)
    if isinstance(s_per_byte, np.ndarray):
        s_per_byte = s_per_byte[slots]
    return links.latency_s, s_per_byte * per_token_bytes


def _wait(cluster: Cluster, job: Job, source: int, slots: Slots) -> Floats:
    """Until both cards have moved what they were promised before."""
    links = cluster.predict.links
    free_at = np.maximum(links.ingress_free_at.take(slots), links.egress_free_at[source])
    wait: Floats = np.maximum(free_at - job.now, 0.0)
    return wait

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

from mooncake.conductor.fit import Floats
from mooncake.conductor.load import Slots
from mooncake.conductor.select import Choice, Cluster, Job, chosen_at, estimates, ranked, told

LOAD_PRICE = 0.1
"""A second of both cards in seconds of a request's waiting: so much, others' loads suffer from it."""


def kvcache_centric(cluster: Cluster, job: Job, slots: Slots) -> Choice:
    """Algorithm 1: least transfer + queue + prefill."""
    queue, own_prefill = estimates(cluster, job, slots)
    source, reach = _longest(cluster, job)
    if source < 0:
        score, best, why = ranked(cluster, job, slots, queue + own_prefill)
        reason = f"{why or 'soonest'}: {told(job, slots[best], queue[best], own_prefill[best])}"
        return chosen_at(job, slots, best, reason, queue, own_prefill, score)
    own = job.cached[slots]
    # A factor of nothing is more than any: who holds none of it has all of it transferred.
    transfers = reach > own * cluster.settings.kvcache_balancing_threshold
    transfers &= slots != source
    latency_s, per_token = _path(cluster, source, slots)
    moving = (reach - own) * per_token
    fetch = np.where(transfers, _wait(cluster, job, source, slots) + latency_s + moving, 0.0)
    prefill = np.where(transfers, cluster.predict.prefill_s(slots, reach, job.num_tokens), own_prefill)
    score, best, why = ranked(cluster, job, slots, queue + fetch + prefill)
    reason = f"{why or 'soonest'}: {told(job, slots[best], queue[best], prefill[best])}"
    choice = chosen_at(job, slots, best, reason, queue, prefill, score, fetch)
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
    reach: Floats | float
    "Leading tokens that it has."
    begun: Floats
    "Until the first byte comes."
    per_token: Floats | float


def overlap(cluster: Cluster, job: Job, slots: Slots) -> Choice:
    """Least time until computed, where loading overlaps waiting and computing."""
    own = job.in_memory[slots]
    prefill = cluster.predict.prefill_s(slots, own, job.num_tokens)
    lenders = _lenders(cluster, job, slots)
    rests = [cluster.predict.prefill_s(slots, one.reach, job.num_tokens) for one in lenders]
    # Its turn is that of a prompt whose cached part is there: nobody is late because of who serves it.
    turn = job.turn(float(min(one.min() for one in (prefill, *rests))))
    queue, num_behind = cluster.loads.queue_s(slots, job.now, turn)
    done = queue + prefill
    price: Floats | float = 0.0
    part, fetch, which = None, None, np.zeros(len(slots), np.int64)
    for number, (lender, rest) in enumerate(zip(lenders, rests, strict=True)):
        its_part, moving = _parts(cluster, lender, slots, own, queue, prefill, rest)
        its_done = queue + prefill - its_part * (prefill - rest)
        its_price, its_fetch = LOAD_PRICE * moving, lender.begun + moving
        if part is None or fetch is None:
            done, price, part, fetch = its_done, its_price, its_part, its_fetch
            continue
        is_better = its_done < done
        which[is_better] = number
        done, price, part, fetch = (
            np.where(is_better, its, other)
            for its, other in (
                (its_done, done),
                (its_price, price),
                (its_part, part),
                (its_fetch, fetch),
            )
        )
    busy = done - queue
    score, best, why = ranked(cluster, job, slots, done + num_behind * busy + price)
    choice = chosen_at(job, slots, best, "", queue, prefill, score, fetch)
    choice.turn = turn
    if part is not None and part[best] > 0:
        _load_part(cluster, job, choice, lenders[int(which[best])], best, is_all=bool(part[best] >= 1))
    choice.reason = f"{why or 'soonest'}: {told(job, choice.slot, choice.queue_s, choice.prefill_s)}"
    if choice.source >= 0:
        choice.reason += _loaded(cluster, choice)
    return choice


def _parts(
    cluster: Cluster,
    lender: _Lender,
    slots: Slots,
    own: Floats,
    queue: Floats,
    prefill: Floats,
    rest: Floats,
) -> tuple[Floats, Floats]:
    """Of each candidate: which part of what is lent it had better load, and how long that moves.

    Both curves are taken for straight lines between loading nothing and loading all; the split of the one
    that is chosen is made exact afterwards.
    """
    layers = cluster.predict.costs.num_layers
    all_s = np.maximum(lender.reach - own, 0.0) * lender.per_token
    # How far the card is ahead of the processor when nothing is loaded, and behind when all is.
    lead = queue + prefill - lender.begun - prefill / layers
    late = lender.begun + all_s + rest / layers - queue - rest
    part = np.minimum(np.maximum(lead / np.maximum(lead + late, 1e-12), 0.0), 1.0)
    part[late <= 0] = 1.0
    part[(all_s <= 0) | (slots == lender.slot)] = 0.0
    return part, part * all_s


def _load_part(cluster: Cluster, job: Job, choice: Choice, lender: _Lender, best: int, is_all: bool) -> None:
    """Put the split of the chosen candidate where both curves meet, at a block's boundary."""
    own, block = int(job.in_memory[choice.slot]), cluster.settings.block_tokens
    model, layers = cluster.predict.prefill_model(choice.slot), cluster.predict.costs.num_layers
    reach, per_token = _at(lender.reach, best), _at(lender.per_token, best)
    begun = float(lender.begun[best])

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


def _lenders(cluster: Cluster, job: Job, slots: Slots) -> list[_Lender]:
    """Who has more of the prompt: the best of the others, and each candidate's own SSD if it has anything."""
    lenders = []
    source, reach, is_on_ssd = _best_source(cluster, job)
    predict = cluster.predict
    per_token_ssd = predict.costs.kv_bytes_per_token / predict.costs.ssd.bytes_per_s
    if source >= 0:
        latency_s, per_token = _path(cluster, source, slots)
        if is_on_ssd:
            per_token = np.maximum(per_token, per_token_ssd)
        lenders.append(_Lender(source, reach, _wait(cluster, job, source, slots) + latency_s, per_token))
    if job.cached is not job.in_memory:
        wait = np.maximum(predict.links.ssd_free_at[slots] - job.now, 0.0)
        lenders.append(_Lender(-1, job.cached[slots], wait + predict.costs.ssd.latency_s, per_token_ssd))
    return lenders


def _best_source(cluster: Cluster, job: Job) -> tuple[int, float, bool]:
    """Slot, tokens, and whether they lie on its SSD; (-1, 0, False) for nobody.

    As ``_longest``, but less of the prompt from an idle card may be better than all from a busy one, or than
    all from an SSD.
    """
    predict, best = cluster.predict, (np.inf, -1, 0.0, False)
    per_token_ssd = predict.costs.kv_bytes_per_token / predict.costs.ssd.bytes_per_s
    holdings = [job.in_memory] if job.cached is job.in_memory else [job.in_memory, job.cached]
    for is_on_ssd, tokens in enumerate(holdings):
        holders = cluster.sources[tokens[cluster.sources] > 0]
        if not len(holders):
            continue
        held = tokens[holders]
        wait = np.maximum(predict.links.egress_free_at[holders] - job.now, 0.0)
        slow_s = held * per_token_ssd if is_on_ssd else 0.0
        cost = wait + slow_s + predict.prefill_s(holders, held, job.num_tokens)
        least = int(cost.argmin())
        if cost[least] < best[0]:
            best = (float(cost[least]), int(holders[least]), float(held[least]), bool(is_on_ssd))
    return best[1:]


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
    free_at = np.maximum(links.ingress_free_at[slots], links.egress_free_at[source])
    wait: Floats = np.maximum(free_at - job.now, 0.0)
    return wait

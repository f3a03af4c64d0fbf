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


def overlap(cluster: Cluster, job: Job, slots: Slots) -> Choice:
    """Least time until computed, where loading overlaps waiting and computing."""
    prefill = cluster.predict.prefill_s(slots, job.cached[slots], job.num_tokens)
    source, reach = _best_source(cluster, job)
    if source >= 0:
        rest = cluster.predict.prefill_s(slots, reach, job.num_tokens)
        turn = job.turn(float(np.minimum(prefill, rest).min()))
    else:
        rest, turn = prefill, job.turn(float(prefill.min()))
    queue, num_behind = cluster.loads.queue_s(slots, job.now, turn)
    done, fetch, part = queue + prefill, None, None
    price_s: Floats | float = 0.0
    if source >= 0:
        fetch, part, moving_s = _parts(cluster, job, slots, source, reach, queue, prefill, rest)
        done = done - part * (prefill - rest)
        price_s = LOAD_PRICE * moving_s
    busy = done - queue
    score, best, why = ranked(cluster, job, slots, done + num_behind * busy + price_s)
    choice = chosen_at(job, slots, best, "", queue, prefill, score, fetch)
    choice.turn = turn
    if part is not None and part[best] > 0:
        _load_part(cluster, job, choice, source, reach, is_all=bool(part[best] >= 1))
    choice.reason = f"{why or 'soonest'}: {told(job, choice.slot, choice.queue_s, choice.prefill_s)}"
    if choice.source >= 0:
        choice.reason += _loaded(cluster, choice)
    return choice


def _parts(
    cluster: Cluster,
    job: Job,
    slots: Slots,
    source: int,
    reach: float,
    queue: Floats,
    prefill: Floats,
    rest: Floats,
) -> tuple[Floats, Floats, Floats]:
    """Of each: until it would have loaded all, which part it had better load, and how long that moves.

    Both curves are taken for straight lines between loading nothing and loading all; the split of the one
    that is chosen is made exact afterwards.
    """
    layers = cluster.predict.costs.num_layers
    latency_s, per_token = _path(cluster, source, slots)
    begun = _wait(cluster, job, source, slots) + latency_s
    missing = np.maximum(reach - job.cached[slots], 0.0)
    fetch = begun + missing * per_token
    # How far the card is ahead of the processor when nothing is loaded, and behind when all is.
    lead = queue + prefill - begun - prefill / layers
    late = fetch + rest / layers - queue - rest
    part = np.where(late <= 0, 1.0, np.clip(lead / np.maximum(lead + late, 1e-12), 0.0, 1.0))
    part[(missing <= 0) | (prefill <= rest) | (slots == source)] = 0.0
    return fetch, part, part * missing * per_token


def _load_part(
    cluster: Cluster, job: Job, choice: Choice, source: int, reach: float, is_all: bool
) -> None:
    """Put the split of the chosen candidate where both curves meet, at a block's boundary."""
    own, block = int(job.cached[choice.slot]), cluster.settings.block_tokens
    model, layers = cluster.predict.prefill_model(choice.slot), cluster.predict.costs.num_layers
    here = np.array([choice.slot])
    latency_s, per_token_here = _path(cluster, source, here)
    per_token = float(np.max(per_token_here))
    begun = float(_wait(cluster, job, source, here)[0]) + latency_s

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
    choice.fetch_s = begun + num_blocks * block * per_token
    choice.card_s = num_blocks * block * per_token
    choice.source, choice.fetch_tokens = source, (own, end)


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


def _best_source(cluster: Cluster, job: Job) -> tuple[int, float]:
    """As ``_longest``, but less of the prompt from an idle card may be better than all from a busy one."""
    held = job.cached[cluster.sources]
    holders = cluster.sources[held > 0]
    if not len(holders):
        return -1, 0.0
    held = job.cached[holders]
    wait = np.maximum(cluster.predict.links.egress_free_at[holders] - job.now, 0.0)
    best = int((wait + cluster.predict.prefill_s(holders, held, job.num_tokens)).argmin())
    return int(holders[best]), float(held[best])


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

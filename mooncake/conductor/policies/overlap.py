# SPDX-License-Identifier: Apache-2.0
"""The policies that fetch: a prompt's cached blocks may be loaded from another instance instead of
computed.

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

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mooncake.conductor.policies.kv_sources import (
    KvSource,
    best_source,
    longest_holder,
    own_ssd,
    path,
    wait_s,
)
from mooncake.conductor.policies.selection import (
    ClusterView,
    InstanceChoice,
    PromptJob,
    chosen_at,
    estimate_text,
    estimates,
    ranked,
)
from mooncake.conductor.prediction.regression import Floats, Slots

LOAD_PRICE = 0.1
"""Cost of a second of both cards in seconds of a request's waiting: the delay it causes to other loads."""


def kvcache_centric(cluster: ClusterView, job: PromptJob, slots: Slots) -> InstanceChoice:
    """Algorithm 1 of the paper: least transfer + queue + prefill."""
    queue, own_prefill = estimates(cluster, job, slots)
    source, reach = longest_holder(cluster, job)
    if source < 0:
        score, best, why = ranked(cluster, job, slots, queue + own_prefill)
        reason = f"{why or 'soonest'}: {estimate_text(job, slots[best], queue[best], own_prefill[best])}"
        return chosen_at(cluster, job, slots, best, reason, queue, own_prefill, score)
    own = job.cached.take(slots)
    # Any factor of zero is exceeded: an instance that holds none of it has all of it transferred.
    transfers = reach > own * cluster.settings.kvcache_balancing_threshold
    transfers &= slots != source
    latency_s, per_token = path(cluster, source, slots)
    moving = (reach - own) * per_token
    fetch = np.where(transfers, wait_s(cluster, job, source, slots) + latency_s + moving, 0.0)
    prefill = np.where(transfers, cluster.predict.prefill_s(slots, reach, job.num_tokens), own_prefill)
    score, best, why = ranked(cluster, job, slots, queue + fetch + prefill)
    reason = f"{why or 'soonest'}: {estimate_text(job, slots[best], queue[best], prefill[best])}"
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
    turn = job.turn(min(float(one.min()) for one in (prefill, *(one.rest for one in (source, ssd) if one))))
    queue, num_behind = cluster.loads.queue_s(slots, job.now, turn)
    candidates = _Candidates(slots, own, prefill, queue, queue + prefill)
    split, reads_ssd = _split(cluster, candidates, source), np.zeros(len(slots), np.bool_)
    if ssd is not None:
        from_ssd = _split(cluster, candidates, ssd)
        reads_ssd = ssd.reach > own
        if source is not None:
            reads_ssd &= from_ssd.done < split.done
        split.improve(from_ssd, reads_ssd)
    done, price = split.done, LOAD_PRICE * split.moving
    score = done + price if num_behind is None else done + num_behind * (done - queue) + price
    score, best, why = ranked(cluster, job, slots, score)
    choice = chosen_at(cluster, job, slots, best, "", queue, prefill, score, split.begun + split.moving)
    choice.turn = turn
    part = float(split.part[best])
    if part > 0:
        chosen = ssd if reads_ssd[best] else source
        assert chosen is not None
        _load_part(cluster, job, choice, chosen, best, is_all=part >= 1)
    choice.reason = f"{why or 'soonest'}: {estimate_text(job, choice.slot, choice.queue_s, choice.prefill_s)}"
    if choice.source >= 0:
        choice.reason += _loaded(cluster, choice)
    return choice


def _split(cluster: ClusterView, candidates: _Candidates, source: KvSource | None) -> _Split:
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
    lead = whole - begun - prefill / layers
    late = begun + all_s + rest / layers - candidates.queue - rest
    part: Floats = np.minimum(np.maximum(lead / np.maximum(lead + late, 1e-12), 0.0), 1.0)
    np.copyto(part, 1.0, where=late <= 0)
    part *= all_s > 0
    if source.is_on_ssd:
        part[candidates.slots == source.slot] = 0.0
    return _Split(part, whole - part * (prefill - rest), part * all_s, begun)


def _load_part(
    cluster: ClusterView, job: PromptJob, choice: InstanceChoice, source: KvSource, at: int, is_all: bool
) -> None:
    """Set the split of the chosen candidate to where both curves meet, at a block's boundary."""
    own, block = int(job.in_memory[choice.slot]), cluster.settings.block_tokens
    model, layers = cluster.predict.prefill_model(choice.slot), cluster.predict.costs.num_layers
    reach, per_token = _at(source.reach, at), _at(source.per_token, at)
    begun = float(source.begun[at])

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
    choice.source = choice.slot if source.slot < 0 else source.slot
    choice.fetch_tokens = (own, end)


def _at(column: Floats | float, position: int) -> float:
    return float(column[position]) if isinstance(column, np.ndarray) else float(column)


def _loaded(cluster: ClusterView, choice: InstanceChoice) -> str:
    first, end = choice.fetch_tokens
    return f", {end - first} tokens from {cluster.names[choice.source]} in {choice.fetch_s:.3f} s"

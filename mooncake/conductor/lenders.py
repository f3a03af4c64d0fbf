"""Where the blocks of a prompt may come from, and how fast.

It owns the question who lends: the best of the other instances, and each candidate's own SSD. How much of
what is lent had better be loaded is for ``fetching.py`` to say.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mooncake.conductor.fit import Floats
from mooncake.conductor.load import Slots
from mooncake.conductor.select import Cluster, Job

_NOBODY: Slots = np.empty(0, np.int64)


@dataclass(slots=True)
class Lender:
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


def longest(cluster: Cluster, job: Job) -> tuple[int, float]:
    """Who holds most of the prompt and how many tokens; the least busy one of several; (-1, 0) for nobody."""
    sources = cluster.sources
    held = job.cached[sources]
    if not len(held) or not (reach := held.max()):
        return -1, 0.0
    most = sources[held == reach]
    return int(most[cluster.predict.links.egress_free_at[most].argmin()]), float(reach)


def best_lender(cluster: Cluster, job: Job, slots: Slots, everywhere: Floats) -> Lender | None:
    """Who has more of the prompt than others, if anybody has any of it; ``everywhere``: to compute it there
    with what is in memory.

    As ``longest``, but less of the prompt from an idle card may be better than all from a busy one, or than
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
    latency_s, per_token = path(cluster, source, slots)
    if is_on_ssd:
        per_token = np.maximum(per_token, per_token_ssd)
    begun = wait_s(cluster, job, source, slots) + latency_s
    return Lender(source, is_on_ssd, reach, begun, per_token, predict.prefill_s(slots, reach, job.num_tokens))


def own_ssd(cluster: Cluster, job: Job, slots: Slots, own: Floats) -> tuple[Slots, Lender | None]:
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
    return at, Lender(-1, False, reach, begun, per_token, predict.prefill_s(those, reach, job.num_tokens))


def path(cluster: Cluster, source: int, slots: Slots) -> tuple[float, Floats | float]:
    """Latency, and seconds per token of KV to each of these instances."""
    links, per_token_bytes = cluster.predict.links, cluster.predict.costs.kv_bytes_per_token
    s_per_byte = links.s_per_byte_from(source)
    if isinstance(s_per_byte, np.ndarray):
        s_per_byte = s_per_byte[slots]
    return links.latency_s, s_per_byte * per_token_bytes


def wait_s(cluster: Cluster, job: Job, source: int, slots: Slots) -> Floats:
    """Until both cards have moved what they were promised before."""
    links = cluster.predict.links
    free_at = np.maximum(links.ingress_free_at.take(slots), links.egress_free_at[source])
    wait: Floats = np.maximum(free_at - job.now, 0.0)
    return wait

# SPDX-License-Identifier: Apache-2.0
"""Where the blocks of a prompt may come from, and how fast.

It owns the choice of the source: the best of the other instances, and each candidate's own SSD. How much of
the source's blocks should be loaded is decided by ``overlap.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mooncake.conductor.policies.selection import ClusterView, PromptJob
from mooncake.conductor.prediction.regression import Floats, Slots


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
    latency_s, per_token = path(cluster, source, slots)
    if is_on_ssd:
        per_token = np.maximum(per_token, per_token_ssd)
    begun = wait_s(cluster, job, source, slots) + latency_s
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


def path(cluster: ClusterView, source: int, slots: Slots) -> tuple[float, Floats | float]:
    """Latency, and seconds per token of KV to each of these instances."""
    links, per_token_bytes = cluster.predict.links, cluster.predict.costs.kv_bytes_per_token
    s_per_byte = links.s_per_byte_from(source)
    if isinstance(s_per_byte, np.ndarray):
        s_per_byte = s_per_byte[slots]
    return links.latency_s, s_per_byte * per_token_bytes


def wait_s(cluster: ClusterView, job: PromptJob, source: int, slots: Slots) -> Floats:
    """Seconds until both network cards have moved what was booked before."""
    links = cluster.predict.links
    free_at = np.maximum(links.ingress_free_at.take(slots), links.egress_free_at[source])
    wait: Floats = np.maximum(free_at - job.now, 0.0)
    return wait

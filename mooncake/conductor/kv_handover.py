# SPDX-License-Identifier: Apache-2.0
"""Whether a prompt's KV is pushed from its prefill instance to its decode instance, or goes through the pool.

It compares the predicted times from the end of prefill to the last layer at decode, by the measured links and
what is booked on them. Through the pool, the last layer is stored and then all of the prompt is read. A push
follows the computation layer by layer, so that after prefill only the last layer is left, or what the link
could not move in time; but decode's memory is reserved from the beginning. It decides only where both
instances can push. The pool gets its copy in either case.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from mooncake.conductor.policies import ClusterView, InstanceChoice, PromptJob, cards_wait_s, path_costs
from mooncake.conductor.prediction import Slots
from mooncake.types import KvTransfer

MOST_RESERVED_S = 30.0
"""Longest time for which decode's memory is reserved while the prompt waits and is computed elsewhere."""


@dataclasses.dataclass(frozen=True)
class KvHandover:
    """How KV goes from prefill to decode, and why."""

    is_push: bool
    reason: str


def expect_move(cluster: ClusterView, job: PromptJob, decode: Slots) -> None:
    """Note how long the prompt's KV takes from its prefill instance to one of these decode instances, all
    layers but the last, and how much later than the first token it may be there within the TBT SLO."""
    if cluster.settings.kv_transfer == "pool":
        return  # decode reads all of it from the pool in any case, when the prompt is computed
    costs, links = cluster.predict.costs, cluster.predict.links
    num_bytes = job.num_tokens * costs.kv_bytes_per_token
    job.moving_s = num_bytes * links.s_per_byte * (1 - 1 / costs.num_layers)
    if job.slo_tbt_s and len(decode):
        loads = cluster.loads
        context = loads.context_tokens.take(decode) + job.num_tokens
        step_s = cluster.predict.step_s(decode, loads.batch_size.take(decode) + 1, context)
        job.late_s = max(0.0, job.slo_tbt_s - float(step_s.min()))


def choose_handover(
    cluster: ClusterView,
    job: PromptJob,
    prefill: InstanceChoice,
    decode: int,
    pool: int,
    wanted: KvTransfer,
) -> KvHandover:
    """The way that is predicted to take less time after prefill, unless the settings want one of them.

    Args:
        decode: slot of the decode instance, whose account has the request; it and ``prefill`` can push.
        pool: slot of the pool; negative when nothing is known of it.
    """
    if wanted != "auto":
        return KvHandover(wanted == "push", f"KV by {wanted}: kv_transfer is set")
    if cluster.loads.context_tokens[decode] > cluster.loads.capacity_tokens[decode]:
        return KvHandover(False, f"KV by pool: decode's memory has no room for {job.num_tokens} tokens now")
    if prefill.done_s > MOST_RESERVED_S:
        return KvHandover(False, f"KV by pool: prefill ends in {prefill.done_s:.1f} s")
    slots = np.array([decode], np.int64)
    missing = max(1.0, job.num_tokens - float(job.cached[decode]))
    push_s = _push_s(cluster, job, prefill, slots, missing)
    pool_s = _pool_s(cluster, job, prefill, slots, pool, missing)
    times = f"{push_s * 1e3:.1f} ms after prefill, by pool {pool_s * 1e3:.1f} ms"
    if push_s < pool_s:
        return KvHandover(True, f"KV by push: {times}")
    return KvHandover(False, f"KV by pool: by push {times}")


def book_push(cluster: ClusterView, job: PromptJob, prefill: int, decode: int) -> None:
    """Book the network cards of both instances for a push."""
    _, per_token = path_costs(cluster, prefill, np.array([decode], np.int64))
    missing = max(0.0, job.num_tokens - float(job.cached[decode]))
    cluster.predict.links.book(prefill, decode, missing * _number(per_token), job.now)


def _push_s(
    cluster: ClusterView, job: PromptJob, prefill: InstanceChoice, slots: np.ndarray, missing: float
) -> float:
    latency_s, per_token = path_costs(cluster, prefill.slot, slots)
    moving_s = missing * _number(per_token)
    # The cards are free again at some time, and only then the first layer goes.
    busy_s = float(cards_wait_s(cluster, job, prefill.slot, slots)[0])
    begun_s = max(busy_s, prefill.done_s - prefill.prefill_s)
    ends_s = max(begun_s + moving_s, prefill.done_s + moving_s / cluster.predict.costs.num_layers)
    return ends_s - prefill.done_s + latency_s


def _pool_s(
    cluster: ClusterView,
    job: PromptJob,
    prefill: InstanceChoice,
    slots: np.ndarray,
    pool: int,
    missing: float,
) -> float:
    source = pool if pool >= 0 else prefill.slot
    latency_s, per_token = path_costs(cluster, source, slots)
    moving_s = missing * _number(per_token)
    busy_s = max(0.0, float(cards_wait_s(cluster, job, source, slots)[0]) - prefill.done_s)
    return busy_s + 2 * latency_s + moving_s / cluster.predict.costs.num_layers + moving_s


def _number(per_token: object) -> float:
    return float(np.asarray(per_token).reshape(-1)[0])

# SPDX-License-Identifier: Apache-2.0
"""Requests of clients and operators beyond puts and gets: drains, copies, quotas, patterns, long views.

A ``WorkloadMix`` says how often each is made. The history checker records what they do to keys, like any
change.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from random import Random

import msgspec

from mooncake.errors import Refusal
from mooncake.sim.faults.checkers import SpaceGrant
from mooncake.sim.faults.clients import SimClient
from mooncake.sim.faults.workload import WorkloadClient, any_policy
from mooncake.sim.faults.workload_mix import WorkloadMix
from mooncake.store import messages as m
from mooncake.store.client.grants import ReadGrant

RENEWALS = 3
"""A view renews when this fraction of the rest of its lease has passed, as ``LeaseKeeper`` does."""
MIN_RENEWAL_S = 0.02


class MixedWorkloadClient(WorkloadClient):
    """A client with a workload mix."""

    def __init__(
        self,
        client: SimClient,
        keys: list[str],
        max_bytes: int,
        load: WorkloadMix,
        patterns: list[str],
        own: list[str] | None = None,
        policy: Callable[[Random], m.PutPolicy] = any_policy,
    ) -> None:
        self._load = load
        self._patterns = patterns
        """Patterns that match only keys of its own."""
        has_parents = load.eviction_policy == "chain"
        super().__init__(client, keys, max_bytes, own, policy, has_parents=has_parents)

    def _choices(self) -> list[tuple[Callable[[], None], float]]:
        load = self._load
        further = [
            (self._drain, load.drain),
            (self._copy, load.copy),
            (self._set_quota, load.quota),
            (self._remove_matching, load.remove_matching),
            (self._drop_replicas, load.drop_replicas),
            (self._view, load.view),
        ]
        return super()._choices() + [(work, weight) for work, weight in further if weight]

    def _ask(self, message: msgspec.Struct, then: Callable[[object], None]) -> None:
        """Send; ``then`` gets the reply. Without one the client continues with another request."""
        deadline = self._client.now + 3.0
        self._client.cluster.num_jobs += isinstance(message, (m.DrainSegments, m.CopyObject))

        def done(reply: object, error: Exception | None) -> None:
            self._checkers.counts["requests"] = self._checkers.counts.get("requests", 0) + 1
            if error is not None:
                self._checkers.counts["errors"] += 1
                self._next()
            else:
                then(reply)

        self._client.run(self._client.operations.ask(message, deadline), deadline, done)

    def _some_segments(self, least: int) -> list[str]:
        names = [name for node in self._client.cluster.nodes.values() for name in node.segments]
        return self._kernel.random.sample(names, self._kernel.random.randint(least, min(2, len(names))))

    # Jobs

    def _drain(self) -> None:
        random = self._kernel.random
        segments = self._some_segments(1)
        targets = [name for name in self._some_segments(0) if name not in segments]
        unmount_after_s = random.choice((None, None, None, 2.0, 10.0))
        self._ask(m.DrainSegments(segments, targets, random.randint(1, 4), unmount_after_s), self._job_begun)

    def _copy(self) -> None:
        """Copy to other segments, or move from one where the object is to another."""
        random, key = self._kernel.random, self._kernel.random.choice(self._keys)
        stored = self._client.cluster.master.master.objects.readable.get(self._known(key))
        held = [] if stored is None else [extent.segment.name for extent in stored.complete()]
        source = random.choice(held) if held and random.random() < 0.6 else ""
        targets = [name for name in self._some_segments(1) if name != source]
        self._ask(m.CopyObject(key, targets, source, self._client.tenant), self._job_begun)

    def _job_begun(self, reply: object) -> None:
        if not isinstance(reply, m.JobReply):
            self._next()
            return
        random, job_id = self._kernel.random, reply.status.job_id
        cancel = random.random() < 0.6
        ask = m.AskJob(job_id, cancel)
        self._client.process.after(random.choice((0.0, 0.5, 4.0)), lambda: self._ask(ask, self._next))

    # Tenants and keys

    def _set_quota(self) -> None:
        size_bytes = self._kernel.random.choice((None, 0, 500, 4000, 20000))
        self._ask(m.SetQuota(self._client.tenant, size_bytes), self._next)

    def _remove_matching(self) -> None:
        pattern, force = self._kernel.random.choice(self._patterns), self._kernel.chance(0.7)
        change = self._begin([key for key in self._own if re.search(pattern, key)])
        deadline = self._deadline

        def done(reply: object, error: Exception | None) -> None:
            if isinstance(reply, m.Removed) and force:
                self._checkers.history.matching_removed(change, is_all=not pattern)
            elif error is not None:
                self._checkers.history.failed(change)
            else:
                self._checkers.history.ended(change)
            self._next()

        message = m.RemoveMatching(pattern, force, self._client.tenant)
        self._client.run(self._client.operations.ask(message, deadline), deadline, done)

    def _drop_replicas(self) -> None:
        keys, deadline = self._some_own_keys()[:2], self._deadline
        segment = self._kernel.random.choice(["", *self._some_segments(1)])
        change = self._begin(keys)

        def done(outcomes: list[bool | Refusal] | None, error: Exception | None) -> None:
            if error is not None:
                self._checkers.history.failed(change)
            else:
                self._checkers.history.ended(change)
            self._next()

        self._client.run(self._client.operations.drop_replicas(keys, segment, deadline), deadline, done)

    # Views that stay open

    def _view(self) -> None:
        """Lease an object, and read the node's memory while the lease is renewed, for longer than a master
        lives."""

        def leased(grant: ReadGrant, first: bytes, promises: list[SpaceGrant]) -> None:
            until = self._client.now + self._kernel.random.choice((5.0, 15.0, 40.0))
            self._view_again(grant, first, promises, until)

        self._lease(leased)

    def _view_again(self, grant: ReadGrant, first: bytes, promises: list[SpaceGrant], until: float) -> None:
        now = self._client.now
        if not self._still_there(grant, first) or now >= until or self.is_stopped:
            self._next()
            return
        left_s = grant.expires_at - now
        wait_s = max(MIN_RENEWAL_S, left_s / RENEWALS)
        self._client.process.after(wait_s, lambda: self._view_again(grant, first, promises, until))

        def renewed(flags: list[bool] | None, error: Exception | None) -> None:
            if flags == [True]:
                self._checkers.renewed(self._client, grant, promises)

        deadline = now + wait_s
        self._client.run(self._client.operations.renew([grant], deadline), deadline, renewed)

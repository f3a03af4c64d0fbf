# SPDX-License-Identifier: Apache-2.0
"""The workload of simulated clients: what they request, how often, and what they may expect.

A ``WorkloadClient`` puts, gets, reads in place and removes, in whole objects and in parts. Every value is
unique, so that a reader that gets another object's bytes, or an older version's, can't be right by accident.
A ``MixedWorkloadClient`` adds what clients and operators request beyond that: drains, copies, quotas,
patterns, long views; the history checker records what they do to keys, like any change. How often each is
made, and the settings of the cluster that go with them, are a ``WorkloadMix``, which one seed draws. As with
faults, a seed decides which kinds of requests occur at all; ``PLAIN`` is the mix without any.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Callable
from random import Random
from typing import Any, Literal

import msgspec

from mooncake.errors import Refusal
from mooncake.sim.faults.clients import SimClient
from mooncake.sim.faults.invariants import Invariant, KeyChange, SpaceGrant, Violation
from mooncake.store import messages as m
from mooncake.store.client.effects import Operation
from mooncake.store.client.grants import PutGrant, ReadGrant
from mooncake.store.master.objects import scoped
from mooncake.store.settings import MasterSettings

SETTINGS = MasterSettings(
    lease_s=4.0, put_s=6.0, grace_s=2.0, heartbeat_s=0.5, segment_ttl_s=3.0, high_watermark=0.9
)


@dataclasses.dataclass(frozen=True)
class WorkloadMix:
    """Weights are relative to those of ``workload.WorkloadClient``: a get has 6."""

    eviction_policy: Literal["lru", "lfu", "chain"] = "lru"
    hot_uses_per_s: float = 100.0
    """When low, objects that are read often are copied to other nodes."""
    demote_watermark: float = 0.5
    promote_after_hits: int = 2
    evict_undemoted: bool = True
    drain: float = 0.0
    """Drain segments, query the progress, and cancel it or not."""
    copy: float = 0.0
    """Copy or move one object."""
    quota: float = 0.0
    """Set a tenant's quota."""
    remove_matching: float = 0.0
    """Remove what matches a pattern."""
    drop_replicas: float = 0.0
    """Drop the replicas of objects on one segment, or in memory."""
    view: float = 0.0
    """Keep a view open for long, with its lease renewed."""
    tenants: tuple[str, ...] = ("",)
    """Tenants of clients, in turn; "" is the default one."""

    device_bytes: int = 0
    """Device memory of each node."""
    device_uses_per_s: float = 5.0
    durable_small_puts: float = 0.0
    """Share of the rows of small puts that are durable."""

    def settings(self) -> MasterSettings:
        return dataclasses.replace(
            SETTINGS,
            eviction_policy=self.eviction_policy,
            hot_uses_per_s=self.hot_uses_per_s,
            demote_watermark=self.demote_watermark,
            promote_after_hits=self.promote_after_hits,
            evict_undemoted=self.evict_undemoted,
            device_uses_per_s=self.device_uses_per_s,
            device_hot_s=0.0,
            device_cool_s=3.0,
        )


PLAIN = WorkloadMix()


def draw_mix(random: Random) -> WorkloadMix:
    """Draw a swarm: each kind of request is present or absent, and then rare or frequent."""

    def often(choices: tuple[float, ...]) -> float:
        return random.choice(choices) if random.random() < 0.4 else 0.0

    return WorkloadMix(
        eviction_policy=random.choice(("lru", "lfu", "chain")),
        hot_uses_per_s=random.choice((0.0, 0.5, 2.0, 100.0)),
        demote_watermark=random.choice((0.0, 0.2, 0.5)),
        promote_after_hits=random.choice((0, 1, 2)),
        evict_undemoted=random.random() < 0.7,
        drain=often((0.2, 1.0)),
        copy=often((0.5, 2.0)),
        quota=often((0.2, 1.0)),
        remove_matching=often((0.1, 0.5)),
        drop_replicas=often((0.2, 1.0)),
        view=often((1.0, 4.0)),
        tenants=random.choice((("",), ("",), ("", "bank"), ("shop", "bank"))),
        # Drawn last: seeds without device memory stay what they were.
        device_bytes=random.choice((0, 0, 1024, 8192)),
        device_uses_per_s=random.choice((0.2, 1.0)),
        durable_small_puts=random.choice((0.0, 0.0, 0.5)),
    )


CHUNK_BYTES = 256
TIMEOUT_S = 6.0
MAX_PAUSE_S = 0.4


@dataclasses.dataclass(eq=False)
class PartialPut:
    """A put that is written in parts."""

    grants: list[PutGrant]
    promises: list[list[SpaceGrant]]
    values: dict[str, bytes]
    change: KeyChange


def any_policy(random: Random) -> m.PutPolicy:
    if random.random() < 0.5:
        return m.PutPolicy()
    return m.PutPolicy(
        num_replicas=random.choice((1, 2, 3)),
        soft_pin_ttl_s=random.choice((None, None, 1.0, 10.0)),
        is_durable=random.random() < 0.5,
    )


def several_replicas(random: Random) -> m.PutPolicy:
    return m.PutPolicy(num_replicas=random.choice((2, 2, 3)), is_durable=random.random() < 0.1)


class WorkloadClient:
    """One client's endless sequence of operations, until ``stop``.

    It changes only ``own`` keys: if no other client does, the history checker always knows their values.
    """

    def __init__(
        self,
        client: SimClient,
        keys: list[str],
        max_bytes: int,
        own: list[str] | None = None,
        policy: Callable[[Random], m.PutPolicy] = any_policy,
        *,
        has_parents: bool = False,
        durable_small_puts: float = 0.0,
    ) -> None:
        self._client = client
        self._durable_small_puts = durable_small_puts
        self._kernel = client.kernel
        self._checkers = client.cluster.checkers
        self._keys = keys
        self._own = keys if own is None else own
        self._policy = policy
        self._max_bytes = max_bytes
        self._has_parents = has_parents
        self._num_values = 0
        self.is_stopped = False
        self._next()

    def stop(self) -> None:
        self.is_stopped = True

    def _next(self, *_: Any) -> None:
        if self.is_stopped:
            return
        random, choices = self._kernel.random, self._choices()
        work = random.choices([one for one, _ in choices], [weight for _, weight in choices])[0]
        self._client.process.after(random.uniform(0, MAX_PAUSE_S), work)

    def _choices(self) -> list[tuple[Callable[[], None], float]]:
        """The possible next operations, with their weights."""
        return [
            (self._put, 4),
            (self._put_small, 3),
            (self._get, 6),
            (self._put_parts, 3),
            (self._look, 3),
            (self._exists, 1),
            (self._remove, 1),
            (self._pin, 0.5),
        ]

    def _known(self, key: str) -> str:
        """The key as the master and the checkers name it."""
        return scoped(self._client.tenant, key)

    def _begin(self, keys: list[str]) -> KeyChange:
        return self._checkers.history.begin(self._client, [self._known(key) for key in keys])

    def _some_keys(self) -> list[str]:
        return self._kernel.random.sample(self._keys, self._kernel.random.randint(1, 4))

    def _some_own_keys(self) -> list[str]:
        return self._kernel.random.sample(self._own, self._kernel.random.randint(1, 4))

    def _new_value(self, key: str, length: int = 0) -> bytes:
        self._num_values += 1
        name = f"{key} {self._client.name} {self._kernel.now!r} {self._num_values}"
        digest = hashlib.blake2b(name.encode()).digest()
        length = length or self._kernel.random.randint(1, self._max_bytes)
        value = (digest * (length // len(digest) + 1))[:length]
        self._checkers.value_put(self._known(key), value)
        return value

    def _place(self, value: bytes) -> int:
        address = self._client.allocate(len(value))
        self._client.memory[address : address + len(value)] = value
        return address

    @property
    def _deadline(self) -> float:
        return self._client.now + TIMEOUT_S

    def _run_for_each(
        self,
        operation: Operation[Any],
        num_results: int,
        deadline: float,
        done: Callable[[Any, Exception | None], None],
    ) -> None:
        """Run an operation that answers for each of so many objects."""
        name = getattr(operation, "__name__", "operation")

        def checked(results: Any, error: Exception | None) -> None:
            if results is not None and len(results) != num_results:
                what = f"{name} answered {self._client.name} {len(results)} results for {num_results} objects"
                raise Violation(what, Invariant.ANSWER)
            done(results, error)

        self._client.run(operation, deadline, checked)

    # Whole objects

    def _put(self) -> None:
        keys, policy = self._some_own_keys(), self._policy(self._kernel.random)
        replace = self._kernel.chance(0.3)
        change = self._begin(keys)
        values = [self._new_value(key) for key in keys]
        addresses = [self._place(value) for value in values]
        deadline = self._deadline
        operation = self._client.operations.put(
            keys,
            addresses,
            [len(value) for value in values],
            CHUNK_BYTES,
            deadline,
            policy,
            [self._kernel.random.choice(("", "a", "b")) for _ in keys] if self._kernel.chance(0.2) else (),
            self._parents(keys),
            replace=replace,
        )

        def done(outcomes: list[Refusal | None] | None, error: Exception | None) -> None:
            if outcomes is None:
                self._checkers.history.failed(change)
            else:
                for key, value, outcome in zip(keys, values, outcomes, strict=True):
                    self._checkers.history.put(
                        change, self._known(key), value, outcome, policy.is_durable, replace
                    )
            self._count_puts(outcomes, error)

        self._run_for_each(operation, len(keys), deadline, done)

    def _parents(self, keys: list[str]) -> list[str]:
        """The key before it, for most keys; empty where eviction ignores parents."""
        if not self._has_parents:
            return []
        before = {key: self._own[number - 1] for number, key in enumerate(self._own) if number}
        return [before.get(key, "") if self._kernel.chance(0.7) else "" for key in keys]

    def _put_small(self) -> None:
        """A few puts in a row, of objects of one size: what space is preallocated for."""
        random = self._kernel.random
        length = min(self._max_bytes, random.choice((40, 64, 200)))
        num_puts = random.randint(1, 8)
        # Nothing is drawn without such puts, so that these seeds stay what they were.
        is_durable = self._durable_small_puts > 0.0 and random.random() < self._durable_small_puts
        self._put_next(length, num_puts, is_durable)

    def _put_next(self, length: int, num_left: int, is_durable: bool) -> None:
        random = self._kernel.random
        key, deadline = random.choice(self._own), self._deadline
        change = self._begin([key])
        value = self._new_value(key, length)
        group = random.choice(("a", "b")) if random.random() < 0.1 else ""
        ttl_s = 1.0 if random.random() < 0.1 else None
        policy = m.PutPolicy(soft_pin_ttl_s=ttl_s, is_durable=is_durable)
        operation = self._client.operations.put(
            [key], [self._place(value)], [length], CHUNK_BYTES, deadline, policy, [group] if group else ()
        )

        def done(outcomes: list[Refusal | None] | None, error: Exception | None) -> None:
            if outcomes is None:
                self._checkers.history.failed(change)
            else:
                self._checkers.history.put(change, self._known(key), value, outcomes[0], is_durable, False)
            if num_left > 1 and error is None:
                self._checkers.counts["puts" if outcomes and outcomes[0] is None else "refusals"] += 1
                pause_s = random.choice((0.0, 0.0, 0.05, 3.0))
                self._client.process.after(pause_s, lambda: self._put_next(length, num_left - 1, is_durable))
            else:
                self._count_puts(outcomes, error)

        self._run_for_each(operation, 1, deadline, done)

    def _count_puts(self, outcomes: list[Refusal | None] | None, error: Exception | None) -> None:
        if error is not None:
            self._checkers.counts["errors"] += 1
        for outcome in outcomes or ():
            self._checkers.counts["puts" if outcome is None else "refusals"] += 1
        self._next()

    def _get(self) -> None:
        keys, deadline = self._some_keys(), self._deadline
        addresses = [self._client.allocate(self._max_bytes) for _ in keys]
        operation = self._client.operations.get_into(keys, addresses, [self._max_bytes] * len(keys), deadline)
        look = self._checkers.history.begin_read([self._known(key) for key in keys])

        def done(sizes: list[int | None] | None, error: Exception | None) -> None:
            if sizes is None:
                self._checkers.counts["errors"] += 1
                self._next()
                return
            for key, address, size in zip(keys, addresses, sizes, strict=True):
                self._checkers.counts["misses" if size is None else "hits"] += 1
                if size is not None:
                    value = bytes(self._client.memory[address : address + size])
                    self._checkers.value_read(self._known(key), value, f"{self._client.name}'s get", look)
                else:
                    self._checkers.presence_answered(
                        self._known(key), False, f"{self._client.name}'s get", look
                    )
            self._next()

        self._run_for_each(operation, len(keys), deadline, done)

    # Puts in parts, with time between them

    def _put_parts(self) -> None:
        """Start, write in pieces with pauses, then end, abort, or abandon it."""
        keys, deadline = self._some_own_keys()[:2], self._deadline
        values = {key: self._new_value(key) for key in keys}
        change = self._begin(keys)
        policy, replace = self._policy(self._kernel.random), self._kernel.chance(0.3)
        operation = self._client.operations.start_puts(
            keys,
            [len(values[key]) for key in keys],
            [CHUNK_BYTES] * len(keys),
            deadline,
            policy=policy,
            replace=replace,
        )

        def started(outcomes: list[PutGrant | Refusal | None] | None, error: Exception | None) -> None:
            grants = [
                outcome
                for outcome in outcomes or ()
                if isinstance(outcome, PutGrant) and outcome.segment is not None
            ]
            promises = [self._checkers.promised(self._client, grant) for grant in grants]
            if grants:
                self._write_next(
                    PartialPut(grants, promises, values, change), 0, self._kernel.random.randint(1, 3)
                )
            else:
                self._checkers.history.failed(change)
                self._next()

        self._run_for_each(operation, len(keys), deadline, started)

    def _write_next(self, work: PartialPut, part: int, parts: int) -> None:
        """Write part ``part`` of ``parts`` of every object."""
        deadline = self._deadline
        offsets, addresses, lengths = [], [], []
        for grant in work.grants:
            value = work.values[grant.key]
            start, end = len(value) * part // parts, len(value) * (part + 1) // parts
            offsets.append(start)
            lengths.append(end - start)
            addresses.append(self._place(value[start:end] or b"\0"))
        operation = self._client.operations.write_ranges(work.grants, offsets, addresses, lengths, deadline)

        def written(outcomes: list[Refusal | None] | None, error: Exception | None) -> None:
            if part + 1 < parts and error is None:
                pause_s = self._kernel.random.choice((0.0, 0.1, 3.0))
                self._client.process.after(pause_s, lambda: self._write_next(work, part + 1, parts))
            else:
                self._finish(work)

        self._run_for_each(operation, len(work.grants), deadline, written)

    def _finish(self, work: PartialPut) -> None:
        choice = self._kernel.random.random()
        deadline = self._deadline
        self._checkers.history.failed(work.change)  # whatever the result
        if choice < 0.1:
            self._next()
        elif choice < 0.2:
            operation: Operation[Any] = self._client.operations.abort_puts(work.grants, deadline)
            self._run_for_each(operation, len(work.grants), deadline, self._next)
        else:
            for grant, promise in zip(work.grants, work.promises, strict=True):
                if grant.failure is None:
                    # All its writes have ended: it no longer needs the space, whatever the result of the end
                    # request.
                    self._checkers.released(promise)
            operation = self._client.operations.end_puts(work.grants, deadline)
            self._run_for_each(operation, len(work.grants), deadline, self._count_puts)

    # Reads of memory in place, as a view does

    def _look(self) -> None:
        """Lease, and read the node's memory again and again until just before the lease ends."""

        def leased(grant: ReadGrant, first: bytes, promises: list[SpaceGrant]) -> None:
            if not self._checkers.has_corruption:
                # A writer that overran its deadline or a flipped bit: only checksums detect those.
                self._checkers.value_read(self._known(grant.key), first, f"{self._client.name}'s look")
            self._look_again(grant, first, promises, self._kernel.random.randint(0, 2))

        self._lease(leased)

    def _lease(self, leased: Callable[[ReadGrant, bytes, list[SpaceGrant]], None]) -> None:
        """Lease one object and read the node's memory once; without a lease the next request begins."""
        keys, deadline = self._some_keys()[:1], self._deadline

        def opened(grants: list[ReadGrant | None] | None, error: Exception | None) -> None:
            grant = grants[0] if grants else None
            # A client that was paused may get the answer after the end of the lease.
            if grant is None or not grant.segment.is_alive or not self._may_look(grant):
                self._next()
                return
            promises = self._checkers.promised(self._client, grant)
            if self._checkers.is_resurrected(grant.object_id):
                self._next()
                return
            first = grant.segment.read(grant.address, grant.size_bytes)
            leased(grant, first, promises)

        self._run_for_each(self._client.operations.open_reads(keys, deadline), len(keys), deadline, opened)

    def _may_look(self, grant: ReadGrant) -> bool:
        """Whether the lease has not ended, by a clock that may be a little slow."""
        return grant.expires_at - self._checkers.last_look_s > self._client.now

    def _still_there(self, grant: ReadGrant, first: bytes) -> bool:
        """Whether the lease holds and the bytes are what they were."""
        self._checkers.counts["looks"] += 1
        if grant.expires_at <= self._client.now or not grant.segment.is_alive:
            return False
        now = grant.segment.read(grant.address, grant.size_bytes)
        if now != first and not self._checkers.has_corruption:
            raise Violation(f"{grant.key!r} changed under {self._client.name}'s lease", Invariant.LEASE)
        return True

    def _look_again(
        self, grant: ReadGrant, first: bytes, promises: list[SpaceGrant], num_renewals: int
    ) -> None:
        if not self._still_there(grant, first):
            self._next()
            return
        left_s = grant.expires_at - self._client.now
        if num_renewals and left_s < 2.0:
            deadline = self._client.now + min(left_s, 1.0)

            def renewed(flags: list[bool] | None, error: Exception | None) -> None:
                if flags == [True]:
                    self._checkers.renewed(self._client, grant, promises)
                self._look_again(grant, first, promises, num_renewals - 1)

            self._run_for_each(self._client.operations.renew([grant], deadline), 1, deadline, renewed)
            return
        # The last read is just before the end, by a clock that may be a little slow.
        last_s = self._checkers.last_look_s
        wait_s = left_s - last_s if left_s < 0.5 else left_s * self._kernel.random.uniform(0.3, 0.95)
        if left_s <= 2 * last_s:
            self._next()
            return
        self._client.process.after(wait_s, lambda: self._look_again(grant, first, promises, num_renewals))

    # Metadata

    def _exists(self) -> None:
        keys, deadline = self._some_keys(), self._deadline
        operation = self._client.operations.exists(keys, deadline)
        self._run_for_each(operation, len(keys), deadline, self._presence_checked(keys, "exists"))

    def _presence_checked(
        self, keys: list[str], name: str
    ) -> Callable[[list[Any] | None, Exception | None], None]:
        """What takes the answer to a request that begins now: whether there are objects under the keys."""
        look = self._checkers.history.begin_read([self._known(key) for key in keys])

        def done(flags: list[Any] | None, error: Exception | None) -> None:
            if flags is not None:
                how = f"{self._client.name}'s {name}"
                for key, is_there in zip(keys, flags, strict=True):
                    self._checkers.presence_answered(self._known(key), is_there is True, how, look)
            self._next()

        return done

    def _remove(self) -> None:
        deadline, keys = self._deadline, self._some_own_keys()[:2]
        force = self._kernel.chance(0.5)
        change = self._begin(keys)

        def done(outcomes: list[bool | Refusal] | None, error: Exception | None) -> None:
            if outcomes is None:
                self._checkers.history.failed(change)
            else:
                for key, outcome in zip(keys, outcomes, strict=True):
                    self._checkers.history.removed(change, self._known(key), outcome)
            self._next()

        self._run_for_each(self._client.operations.remove(keys, force, deadline), len(keys), deadline, done)

    def _pin(self) -> None:
        deadline, ttl_s = self._deadline, self._kernel.random.choice((0.0, 1.0, 20.0))
        keys = self._some_keys()
        operation = self._client.operations.pin(keys, ttl_s, deadline)
        self._run_for_each(operation, len(keys), deadline, self._presence_checked(keys, "pin"))


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
        super().__init__(
            client,
            keys,
            max_bytes,
            own,
            policy,
            has_parents=load.eviction_policy == "chain",
            durable_small_puts=load.durable_small_puts,
        )

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

    def _ask(
        self,
        message: msgspec.Struct,
        then: Callable[[object], None],
        failed: Callable[[], None] = lambda: None,
    ) -> None:
        """Send; ``then`` gets the reply. Without one, call ``failed``, and the client continues with another
        request."""
        deadline = self._client.now + 3.0
        self._client.cluster.num_jobs += isinstance(message, (m.DrainSegments, m.CopyObject))

        def done(reply: object, error: Exception | None) -> None:
            self._checkers.counts["requests"] = self._checkers.counts.get("requests", 0) + 1
            if error is not None:
                self._checkers.counts["errors"] += 1
                failed()
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
        answers = self._checkers.answers
        change = answers.quota_began(self._client)

        def set_it(reply: object) -> None:
            answers.quota_set(change, size_bytes, reply)
            self._next()

        message = m.SetQuota(self._client.tenant, size_bytes)
        self._ask(message, set_it, lambda: answers.quota_changes.failed(change))

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

        operation = self._client.operations.drop_replicas(keys, segment, deadline)
        self._run_for_each(operation, len(keys), deadline, done)

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
        self._run_for_each(self._client.operations.renew([grant], deadline), 1, deadline, renewed)

# SPDX-License-Identifier: Apache-2.0
"""Plausible bugs, each with the rule of the simulated store that finds it.

Every rule has at least one, and a test checks that. The faults and workload mixes of a bug have many of the
kind that triggers it, so that a few seeds suffice; without the bug nothing is violated under them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from mooncake.sim.faults.cluster_faults import ClusterFaults
from mooncake.sim.faults.invariants import Invariant
from mooncake.sim.faults.workload import PLAIN, WorkloadMix
from mooncake.store import messages
from mooncake.store.client import operations, preallocated
from mooncake.store.client.effects import MasterReply, Operation
from mooncake.store.master import (
    catalog,
    jobs,
    log_records,
    object_requests,
    objects,
    put,
    put_queue,
    segments,
    snapshot,
    tasks,
    tenants,
    tiering,
)
from mooncake.store.node import membership, task_agent


def reuses_space_at_once(patch: pytest.MonkeyPatch) -> None:
    unlink = catalog.Catalog.unlink

    def broken(
        self: catalog.Catalog, stored: objects.StoredObject, reason: str, now: float, **how: bool
    ) -> int:
        stored.lease_until = now
        return unlink(self, stored, reason, now, **how)

    patch.setattr(catalog.Catalog, "unlink", broken)


def forgets_the_last_master(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(segments.Segment, "takes_objects", lambda self, now: self.is_alive)


def takes_a_restarted_node_for_its_predecessor(patch: pytest.MonkeyPatch) -> None:
    mount = segments.Segments.mount

    def broken(self: segments.Segments, message: object, connection: object, now: float) -> object:
        known = self.mounted.get(message.segment)  # type: ignore[attr-defined]
        if known is not None:
            known.epoch = message.epoch  # type: ignore[attr-defined]
        return mount(self, message, connection, now)  # type: ignore[arg-type]

    patch.setattr(segments.Segments, "mount", broken)


def accepts_any_bytes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(operations.Operations, "_mismatches", lambda self, grants, part, checksums: [])


def forgets_to_write_some_objects_down(patch: pytest.MonkeyPatch) -> None:
    record_of = catalog.record_of

    def broken(stored: objects.StoredObject) -> object:
        return record_of(stored) if stored.object_id % 7 else log_records.ObjectGone(stored.key, 0)

    patch.setattr(catalog, "record_of", broken)


def forgets_what_its_predecessor_promised(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(snapshot.LogReplay, "_space_held", lambda self, record, now: None)


def never_recognizes_a_repeated_request(patch: pytest.MonkeyPatch) -> None:
    """A put-start that is repeated because its answer was lost looks like another client's put."""
    reserve = put.PutRequests._reserve

    def broken(self: put.PutRequests, put_id: int, *rest: object) -> object:
        return reserve(self, -1, *rest)  # type: ignore[arg-type]

    patch.setattr(put.PutRequests, "_reserve", broken)


def acknowledges_what_is_not_on_ssd(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(put_queue.DurablePuts, "is_awaited", lambda self, stored: False)
    patch.setattr(tiering.Tiering, "_make_durable", lambda self, stored, now: None)


def acknowledges_small_puts_before_they_are_on_ssd(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(put.PreallocatedPuts, "_as_durable", lambda self, message, index, outcome, waiting: outcome)
    patch.setattr(tiering.Tiering, "_make_durable", lambda self, stored, now: None)


def forgets_what_was_removed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(snapshot.LogReplay, "_object_gone", lambda self, record, now: None)


def never_notifies_nodes_of_removals(patch: pytest.MonkeyPatch) -> None:
    note = tasks.Tasks.note

    def broken(self: tasks.Tasks, segment: segments.Segment, change: object, now: float) -> None:
        if not isinstance(change, int):
            note(self, segment, change, now)  # type: ignore[arg-type]

    patch.setattr(tasks.Tasks, "note", broken)


def lets_nodes_write_late(patch: pytest.MonkeyPatch) -> None:
    answered = task_agent.TaskAgent._answered

    def broken(
        self: task_agent.TaskAgent, event: task_agent.PollAnswered, now: float
    ) -> list[task_agent.Effect]:
        effects = answered(self, event, now)
        # Otherwise a task where an earlier one still writes would be refused, and nothing overwritten.
        self._running = dict.fromkeys(self._running, (0, 0))
        return [
            task_agent.RunTask(one.task, one.deadline + 60.0, one.life)
            if isinstance(one, task_agent.RunTask)
            else one
            for one in effects
        ]

    patch.setattr(task_agent.TaskAgent, "_answered", broken)


def leaves_half_a_copy(patch: pytest.MonkeyPatch) -> None:
    """A failed task keeps its space as if it were under way, and is not retried."""
    done, add_extent = tasks.Tasks._done, catalog.Catalog.add_extent

    def ignored(self: tasks.Tasks, message: messages.TaskDone, *rest: object) -> None:
        if message.refusal is None:
            done(self, message, *rest)  # type: ignore[arg-type]

    def without_end(self: catalog.Catalog, *given: object) -> object:
        return add_extent(self, *given[:-1], given[-1] + 1e4)  # type: ignore[arg-type, operator, call-arg]

    patch.setattr(tasks.Tasks, "_done", ignored)
    patch.setattr(catalog.Catalog, "add_extent", without_end)


def loses_an_object_with_any_of_its_nodes(patch: pytest.MonkeyPatch) -> None:
    drop = catalog.Catalog.drop_extent

    def broken(
        self: catalog.Catalog,
        stored: objects.StoredObject,
        extent: objects.Extent,
        reason: str,
        now: float,
        **how: bool,
    ) -> int:
        if "another process took its name" in reason and stored.is_readable and extent.is_complete:
            return self.unlink(stored, reason, now)
        return drop(self, stored, extent, reason, now, **how)

    patch.setattr(catalog.Catalog, "drop_extent", broken)


def lets_pieces_be_written_without_end(patch: pytest.MonkeyPatch) -> None:
    add = preallocated.PreallocatedPieces.add

    def broken(
        self: preallocated.PreallocatedPieces, advance: messages.PreallocatedSpace | None, *rest: object
    ) -> None:
        patient = None if advance is None else msgspec.structs.replace(advance, put_s=1000.0)
        add(self, patient, *rest)  # type: ignore[arg-type]

    patch.setattr(preallocated.PreallocatedPieces, "add", broken)


def releases_pieces_at_their_deadline(patch: pytest.MonkeyPatch) -> None:
    give = catalog.Catalog.preallocate

    def broken(self: catalog.Catalog, extents: list[objects.Extent], size_bytes: int, until: float) -> None:
        give(self, extents, size_bytes, until - self.settings.grace_s)

    patch.setattr(catalog.Catalog, "preallocate", broken)


def logs_no_preallocations(patch: pytest.MonkeyPatch) -> None:
    give = catalog.Catalog.preallocate

    def broken(self: catalog.Catalog, *given: object) -> None:
        give(self, *given)  # type: ignore[arg-type]
        self.records.pop()

    patch.setattr(catalog.Catalog, "preallocate", broken)


def takes_its_clock_for_that_of_all(patch: pytest.MonkeyPatch) -> None:
    """Deadlines of puts are taken as instants of the master's clock."""
    put_start = put.PutRequests.put_start

    def broken(self: put.PutRequests, message: messages.PutStart, *rest: object) -> object:
        reply = put_start(self, message, *rest)  # type: ignore[arg-type]
        now: float = rest[-1]  # type: ignore[assignment]
        if now <= 500.0 or not isinstance(reply, messages.PutStarted):
            return reply
        return msgspec.structs.replace(reply, put_s=reply.put_s + now)

    patch.setattr(put.PutRequests, "put_start", broken)


def loses_count_of_what_a_tenant_uses(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tenants.Tenants, "discharge", lambda self, stored, extent: None)


def answers_removed_and_keeps_it(patch: pytest.MonkeyPatch) -> None:
    remove = object_requests.RemoveRequests._remove

    def broken(
        self: object_requests.RemoveRequests, stored: objects.StoredObject | None, *rest: object
    ) -> object:
        if stored is not None and stored.is_readable and stored.object_id % 2:
            return True
        return remove(self, stored, *rest)  # type: ignore[arg-type]

    patch.setattr(object_requests.RemoveRequests, "_remove", broken)


def answers_replaced_and_keeps_the_old_one(patch: pytest.MonkeyPatch) -> None:
    put_end = put.PutRequests.put_end

    def broken(self: put.PutRequests, message: messages.PutEnd, *rest: object) -> object:
        readable = self._catalog.objects.readable
        kept = [key for key in message.keys if key in readable and message.object_ids[0] % 2]
        if kept and not message.tenant:
            return messages.Outcomes([True] * len(message.keys))
        return put_end(self, message, *rest)  # type: ignore[arg-type]

    patch.setattr(put.PutRequests, "put_end", broken)


def logs_no_renewed_space(patch: pytest.MonkeyPatch) -> None:
    renew = catalog.Catalog.renew

    def broken(self: catalog.Catalog, stored: objects.StoredObject, lease_until: float) -> None:
        num_records = len(self.records)
        renew(self, stored, lease_until)
        del self.records[num_records:]

    patch.setattr(catalog.Catalog, "renew", broken)


def gives_no_reason(patch: pytest.MonkeyPatch) -> None:
    add_story = catalog.Catalog.add_story

    def broken(self: catalog.Catalog, now: float, key: str, what: str, *of: object) -> None:
        if "unlinked" not in what:
            add_story(self, now, key, what, *of)

    patch.setattr(catalog.Catalog, "add_story", broken)


def leaves_before_it_has_arrived(patch: pytest.MonkeyPatch) -> None:
    """A drain assumes that every replica has a copy elsewhere."""

    def broken(
        self: jobs.Jobs,
        job: jobs.DrainJob,
        stored: objects.StoredObject,
        segment: segments.Segment,
        now: float,
    ) -> None:
        extent = stored.on(segment) if stored.is_readable else None
        if extent is not None and extent.is_complete:
            self._catalog.drop_extent(stored, extent, "drained, and others have it", now)

    patch.setattr(jobs.Jobs, "_move_from", broken)


def counts_no_quota(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tenants.Account, "has_room", lambda self, size_bytes: True)


def retries_beyond_the_deadline(patch: pytest.MonkeyPatch, by_s: float = 60.0) -> None:
    ask_again = operations.Operations._ask_again

    def broken(
        self: operations.Operations, message: msgspec.Struct, deadline: float, answer: MasterReply
    ) -> Operation[MasterReply]:
        return ask_again(self, message, deadline + by_s, answer)

    patch.setattr(operations.Operations, "_ask_again", broken)


def retries_a_moment_beyond_the_deadline(patch: pytest.MonkeyPatch) -> None:
    retries_beyond_the_deadline(patch, 0.3)


def never_gives_a_drained_segment_back(patch: pytest.MonkeyPatch) -> None:
    cancel = jobs.Jobs._cancel

    def broken(self: jobs.Jobs, job: jobs.ReplicationJob, now: float) -> None:
        drained = getattr(job, "segments", [])
        cancel(self, job, now)
        for segment in drained:
            segment.is_draining = True

    patch.setattr(jobs.Jobs, "_cancel", broken)


def never_mounts_again(patch: pytest.MonkeyPatch) -> None:
    """A node that has lost its master twice waits for it without end."""
    back_off = membership.Membership._back_off

    def broken(self: membership.Membership, reason: str, now: float) -> object:
        effects = back_off(self, reason, now)
        if self.phase is membership.MembershipPhase.WAITING:
            self._wake_at = now + 1e6
        return effects

    patch.setattr(membership.Membership, "_back_off", broken)


def lets_writers_write_without_end(patch: pytest.MonkeyPatch) -> None:
    begin = catalog.Catalog.begin

    def broken(self: catalog.Catalog, *given: object) -> objects.StoredObject:
        return begin(self, *given[:-1], given[-1] + 1e4)  # type: ignore[arg-type, operator, call-arg]

    patch.setattr(catalog.Catalog, "begin", broken)


def keeps_pieces_without_end(patch: pytest.MonkeyPatch) -> None:
    """Preallocated space is quarantined without end when its content was never reported."""
    give = catalog.Catalog.preallocate

    def broken(self: catalog.Catalog, extents: list[objects.Extent], size_bytes: int, until: float) -> None:
        give(self, extents, size_bytes, until + 1e4)

    patch.setattr(catalog.Catalog, "preallocate", broken)


def misses_objects_before_their_nodes_are_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(put_queue.NodeReturns, "holds", lambda self, event, now: False)


def change_answers(patch: pytest.MonkeyPatch, name: str, changed: Callable[[list[Any]], list[Any]]) -> None:
    """The client's operation of this name returns something else than its results."""
    correct = getattr(operations.Operations, name)

    def broken(self: operations.Operations, *given: object, **named: object) -> Operation[list[Any]]:
        results = yield from correct(self, *given, **named)
        return changed(results)

    patch.setattr(operations.Operations, name, broken)


def answers_the_opposite_of_exists(patch: pytest.MonkeyPatch) -> None:
    change_answers(patch, "exists", lambda flags: [not flag for flag in flags])


def answers_for_the_first_object_only(patch: pytest.MonkeyPatch) -> None:
    change_answers(patch, "put", lambda outcomes: outcomes[:1])


def answers_dropped_and_keeps_them(patch: pytest.MonkeyPatch) -> None:
    def broken(self: object, message: messages.DropReplicas, *_: object) -> messages.Outcomes:
        return messages.Outcomes([True] * len(message.keys))

    patch.setattr(object_requests.RemoveRequests, "drop_replicas", broken)


def misses_what_others_read(patch: pytest.MonkeyPatch) -> None:
    found = object_requests.LookupRequests._found

    def broken(
        self: object_requests.LookupRequests, stored: objects.StoredObject, lease_until: float, now: float
    ) -> messages.Stored | None:
        return None if stored.lease_until > now else found(self, stored, lease_until, now)

    patch.setattr(object_requests.LookupRequests, "_found", broken)


def reads_nothing(patch: pytest.MonkeyPatch) -> None:
    change_answers(patch, "get_into", lambda sizes: [None] * len(sizes))


def reserves_one_replica(patch: pytest.MonkeyPatch) -> None:
    put_start = put.PutRequests.put_start

    def broken(self: put.PutRequests, message: messages.PutStart, *rest: object) -> object:
        policy = msgspec.structs.replace(message.policy, num_replicas=1)
        return put_start(self, msgspec.structs.replace(message, policy=policy), *rest)  # type: ignore[arg-type]

    patch.setattr(put.PutRequests, "put_start", broken)


def keeps_the_first_replica_only(patch: pytest.MonkeyPatch) -> None:
    end = put.PutRequests._end

    def broken(self: put.PutRequests, key: str, *rest: object) -> object:
        outcome = end(self, key, *rest)  # type: ignore[arg-type]
        stored = self._catalog.objects.readable.get(key)
        for extent in stored.complete()[1:] if outcome is True and stored is not None else ():
            self._catalog.drop_extent(stored, extent, "one is enough", rest[-1])  # type: ignore[arg-type]
        return outcome

    patch.setattr(put.PutRequests, "_end", broken)


def forgets_quotas(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tenants.Tenants, "set_quota", lambda self, *given: None)


def looks_up_a_key_that_is_not_there(patch: pytest.MonkeyPatch) -> None:
    """A core that fails by another error than an assertion."""
    put_end = put.PutRequests.put_end

    def broken(self: put.PutRequests, message: messages.PutEnd, *rest: object) -> object:
        if message.object_ids and message.object_ids[0] % 16 == 0:
            raise KeyError("lost")
        return put_end(self, message, *rest)  # type: ignore[arg-type]

    patch.setattr(put.PutRequests, "put_end", broken)


@dataclasses.dataclass(frozen=True)
class Bug:
    """A bug that ``rule`` finds, in some seeds; in others another rule may detect it first."""

    plant: Callable[[pytest.MonkeyPatch], None]
    rule: Invariant
    faults: ClusterFaults | None = None
    """None: what a seed draws."""
    load: WorkloadMix = PLAIN
    begin: int = 0
    """The first seed of the search."""

    @property
    def name(self) -> str:
        return self.plant.__name__


LATE = ClusterFaults(transfer_failure_chance=0.3, slow_transfer_chance=0.3, has_checksums=False)
LATE_SUCCESSION = dataclasses.replace(LATE, crash_master_every_s=4.0, has_oplog=True)
SUCCESSION = ClusterFaults(crash_master_every_s=4.0, has_oplog=True)
QUICK_TAKEOVER = ClusterFaults(crash_master_every_s=14.0, restart_s=0.1, has_oplog=True, has_standby=True)
MOVES = WorkloadMix(view=10.0, copy=10.0)
OPERATED = WorkloadMix(drain=2.0, copy=1.0)
DROPS = WorkloadMix(drop_replicas=2.0)
TENANTS = WorkloadMix(quota=2.0, tenants=("shop", "bank"))

BUGS = (
    Bug(loses_count_of_what_a_tenant_uses, Invariant.CORE),
    Bug(looks_up_a_key_that_is_not_there, Invariant.CORE),
    Bug(accepts_any_bytes, Invariant.VALUE, ClusterFaults(corruption_every_s=0.5)),
    Bug(forgets_what_was_removed, Invariant.VALUE, SUCCESSION, begin=67),
    Bug(answers_removed_and_keeps_it, Invariant.PHANTOM, ClusterFaults()),
    Bug(answers_replaced_and_keeps_the_old_one, Invariant.STALE, ClusterFaults()),
    Bug(answers_the_opposite_of_exists, Invariant.PHANTOM, ClusterFaults()),
    Bug(answers_for_the_first_object_only, Invariant.ANSWER, ClusterFaults()),
    Bug(answers_dropped_and_keeps_them, Invariant.ANSWER, ClusterFaults(), DROPS),
    Bug(misses_what_others_read, Invariant.MISS, ClusterFaults()),
    Bug(reads_nothing, Invariant.MISS, ClusterFaults()),
    Bug(reserves_one_replica, Invariant.REPLICAS, ClusterFaults()),
    Bug(keeps_the_first_replica_only, Invariant.REPLICAS, ClusterFaults()),
    Bug(reuses_space_at_once, Invariant.LEASE, begin=4),
    Bug(forgets_the_last_master, Invariant.SPACE, dataclasses.replace(LATE, crash_master_every_s=4.0)),
    Bug(logs_no_renewed_space, Invariant.SPACE, QUICK_TAKEOVER, MOVES, begin=58),
    Bug(
        lets_nodes_write_late,
        Invariant.SPACE,
        ClusterFaults(slow_transfer_chance=0.4, slow_disk_chance=0.4, slow_disk_s=20.0),
    ),
    Bug(forgets_what_its_predecessor_promised, Invariant.SPACE, LATE_SUCCESSION),
    Bug(logs_no_preallocations, Invariant.SPACE, LATE_SUCCESSION),
    Bug(lets_pieces_be_written_without_end, Invariant.SPACE),
    Bug(releases_pieces_at_their_deadline, Invariant.SPACE),
    Bug(takes_its_clock_for_that_of_all, Invariant.SPACE),
    Bug(takes_a_restarted_node_for_its_predecessor, Invariant.CAUSE, ClusterFaults(crash_node_every_s=3.0)),
    Bug(gives_no_reason, Invariant.REASON, ClusterFaults()),
    Bug(leaves_before_it_has_arrived, Invariant.CAUSE, ClusterFaults(), OPERATED),
    Bug(
        loses_an_object_with_any_of_its_nodes,
        Invariant.REPLICA,
        ClusterFaults(crash_node_every_s=5.0, has_oplog=True),
    ),
    Bug(misses_objects_before_their_nodes_are_back, Invariant.RETURNING, SUCCESSION),
    Bug(counts_no_quota, Invariant.QUOTA, ClusterFaults(), TENANTS),
    Bug(forgets_quotas, Invariant.QUOTA, ClusterFaults(), TENANTS),
    Bug(
        retries_beyond_the_deadline,
        Invariant.DEADLINE,
        ClusterFaults(crash_master_every_s=5.0, restart_s=8.0, slow_chance=0.5),
    ),
    Bug(
        retries_a_moment_beyond_the_deadline,
        Invariant.DEADLINE,
        ClusterFaults(crash_master_every_s=5.0, restart_s=8.0, slow_chance=0.5),
    ),
    Bug(never_gives_a_drained_segment_back, Invariant.HEALTH, ClusterFaults(), OPERATED),
    Bug(never_mounts_again, Invariant.HEALTH, ClusterFaults(crash_master_every_s=15.0)),
    Bug(acknowledges_what_is_not_on_ssd, Invariant.PROMISE, ClusterFaults(crash_node_every_s=2.0), begin=8),
    Bug(
        acknowledges_small_puts_before_they_are_on_ssd,
        Invariant.PROMISE,
        ClusterFaults(crash_node_every_s=2.0, power_loss_chance=0.5),
        WorkloadMix(durable_small_puts=1.0),
        begin=303,
    ),
    Bug(forgets_to_write_some_objects_down, Invariant.REASON, SUCCESSION),
    Bug(lets_writers_write_without_end, Invariant.WRITING, ClusterFaults(crash_client_every_s=3.0)),
    Bug(leaves_half_a_copy, Invariant.COPYING, ClusterFaults(transfer_failure_chance=0.3)),
    Bug(keeps_pieces_without_end, Invariant.LEAK, ClusterFaults()),
    Bug(never_notifies_nodes_of_removals, Invariant.JOURNAL),
    Bug(never_recognizes_a_repeated_request, Invariant.CAUSE, ClusterFaults(break_chance=0.05)),
)

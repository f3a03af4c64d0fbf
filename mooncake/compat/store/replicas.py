# SPDX-License-Identifier: Apache-2.0
"""The calls for single replicas of objects: to describe, copy, move and drop them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from mooncake.compat.store.arguments import check_key, check_keys, is_good_key, number, text
from mooncake.compat.store.error_codes import StoreCode, code_of_refusal
from mooncake.compat.store.lifecycle import StoreLifecycle
from mooncake.compat.store.public_types import (
    Descriptor,
    DiskDescriptor,
    MemoryDescriptor,
    QueryTaskResponse,
    ReplicaDescriptor,
    ReplicaStatus,
    TaskStatus,
    TaskType,
)
from mooncake.compat.store.store_session import StoreSession
from mooncake.errors import InvalidArgument, Refusal
from mooncake.store.messages import JobStatus, ObjectStatus
from mooncake.types import Tier

NO_TASK = (0, 0)
_FIRST_HALF = int.from_bytes(b"mooncake")
"""First of the two numbers of a task's id, so that one that a program makes up is unknown."""

_STATES = {
    "waiting": TaskStatus.PENDING,
    "running": TaskStatus.PROCESSING,
    "done": TaskStatus.SUCCESS,
    "failed": TaskStatus.FAILED,
    "cancelled": TaskStatus.FAILED,
}


class ReplicaCalls(StoreLifecycle):
    """Replicas of objects, and the tasks that copy and move them."""

    def get_replica_desc(self, key: str) -> list[ReplicaDescriptor]:
        """Replicas of an object, which is leased as by ``is_exist``; [] for a miss."""
        key = check_key("get_replica_desc", key)
        return self._describe("get_replica_desc", [key]).get(key, [])

    def batch_get_replica_desc(self, keys: Sequence[str]) -> dict[str, list[ReplicaDescriptor]]:
        """Replicas of each object that exists; these are leased as by ``batch_is_exist``."""
        return self._describe("batch_get_replica_desc", check_keys("batch_get_replica_desc", keys))

    def batch_replica_clear(self, keys: Sequence[str], segment_name: str = "") -> list[str]:
        """Drop the replicas on a segment, or all in memory; the keys that had some."""
        keys = check_keys("batch_replica_clear", keys)
        segment_name = text("batch_replica_clear", "segment_name", segment_name)

        def clear(session: StoreSession) -> list[str]:
            good = [key for key in keys if is_good_key(key)]
            outcomes = session.store.drop_replicas(good, segment_name)
            return [key for key, outcome in zip(good, outcomes, strict=True) if outcome is True]

        return self._in_session("batch_replica_clear", clear, lambda _: [])

    def create_copy_task(self, key: str, targets: Sequence[str]) -> tuple[tuple[int, int], int]:
        """Create a task that copies to each of ``targets``: (id, 0), or ((0, 0), code)."""
        what = "create_copy_task"
        key = check_key(what, key)
        segments = check_keys(what, targets)

        def begin(session: StoreSession) -> JobStatus | Refusal:
            if not segments:
                raise InvalidArgument("targets", segments, "at least one segment")
            return session.store.copy(key, segments)

        return self._begin_task(what, begin)

    def create_move_task(self, key: str, source: str, target: str) -> tuple[tuple[int, int], int]:
        """As ``create_copy_task``, for a replica that is moved from ``source``; -600 if it has none there."""
        what = "create_move_task"
        key, source, target = check_key(what, key), check_key(what, source), check_key(what, target)

        def begin(session: StoreSession) -> JobStatus | Refusal:
            outcome = session.store.move(key, source, target) if source and source != target else None
            if outcome is None or (isinstance(outcome, Refusal) and outcome.code == "not_found"):
                if session.store.inspect([key])[0] is not None:
                    raise InvalidArgument("source", source, "another segment than target, with a replica")
                return Refusal("not_found", f"there is no {key!r}")
            return outcome

        return self._begin_task(what, begin)

    def query_task(self, task_id: tuple[int, int]) -> tuple[QueryTaskResponse | None, int]:
        """State of a task: (response, 0), or (None, -1400) for an unknown or forgotten one."""
        if not isinstance(task_id, tuple | list) or len(task_id) != 2:
            raise TypeError(f"query_task(): task_id must be a pair of int, not {task_id!r}")
        first, job_id = (number("query_task", "task_id", half) for half in task_id)
        unknown: tuple[QueryTaskResponse | None, int] = (None, int(StoreCode.TASK_NOT_FOUND))

        def query(session: StoreSession) -> tuple[QueryTaskResponse | None, int]:
            if first != _FIRST_HALF or not 0 < job_id < 1 << 63:
                return unknown
            status = session.store.job(job_id)
            return unknown if status is None else (_response(status), 0)

        return self._in_session("query_task", query, lambda code: (None, code))

    def get_offload_rpc_read_count(self) -> int:
        """Return 0: clients read an SSD's file themselves, without a call to its owner."""
        return 0

    def _describe(self, what: str, keys: list[str]) -> dict[str, list[ReplicaDescriptor]]:
        def describe(session: StoreSession) -> dict[str, list[ReplicaDescriptor]]:
            good = [key for key in keys if is_good_key(key)]
            # With a lease, so that nothing is evicted or removed while the program uses the addresses.
            there = [key for key, flag in zip(good, session.store.exists(good), strict=True) if flag]
            found = zip(there, session.store.inspect(there), strict=True)
            return {key: rows for key, status in found if status is not None and (rows := _copies(status))}

        return self._in_session(what, describe, lambda _: {})

    def _begin_task(
        self, what: str, begin: Callable[[StoreSession], JobStatus | Refusal]
    ) -> tuple[tuple[int, int], int]:
        def create(session: StoreSession) -> tuple[tuple[int, int], int]:
            outcome = begin(session)
            if isinstance(outcome, Refusal):
                return NO_TASK, code_of_refusal(outcome)
            return (_FIRST_HALF, outcome.job_id), 0

        return self._in_session(what, create, lambda code: (NO_TASK, code))


def _copies(status: ObjectStatus) -> list[ReplicaDescriptor]:
    """Replicas that can be read; an object that is being written has none yet."""
    if status.is_writing:
        return []
    copies: list[ReplicaDescriptor] = []
    for replica in status.replicas:
        if not replica.is_alive:
            continue
        place: MemoryDescriptor | DiskDescriptor
        if replica.tier is Tier.SSD:
            place = DiskDescriptor(replica.segment, status.size_bytes)
        else:
            place = MemoryDescriptor(Descriptor(status.size_bytes, replica.address, replica.segment))
        state = ReplicaStatus.COMPLETE if replica.is_complete else ReplicaStatus.PROCESSING
        copies.append(ReplicaDescriptor(state, place))
    return copies


def _response(status: JobStatus) -> QueryTaskResponse:
    response = QueryTaskResponse()
    now_ms = time.time() * 1000
    response.id = (_FIRST_HALF, status.job_id)
    response.type = TaskType.REPLICA_MOVE if status.kind == "move" else TaskType.REPLICA_COPY
    response.status = _STATES[status.state]
    response.created_at_ms_epoch = int(now_ms - 1000 * status.age_s)
    response.last_updated_at_ms_epoch = int(now_ms - 1000 * status.idle_s)
    is_done = response.status is TaskStatus.SUCCESS and not status.reason
    response.message = "Task completed successfully" if is_done else status.reason
    return response

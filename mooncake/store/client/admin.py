"""What is asked of a master besides put and get: copies, jobs, quotas, patterns.

As operations, so that both faces of the client share them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from mooncake.errors import Refusal
from mooncake.store import messages as m
from mooncake.store.client.operations import Operation, Operations
from mooncake.types import ObjectKey


class AdminOperations:
    """The requests of one client, asked through its ``operations``."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations

    def remove_matching(self, pattern: str, force: bool, deadline: float) -> Operation[int]:
        """How many were removed."""
        message = m.RemoveMatching(pattern, force, self._operations.tenant)
        reply: m.Removed = yield from self._operations.ask(message, deadline)
        return reply.num_removed

    def copy(
        self, key: ObjectKey, targets: Sequence[str], source: str, deadline: float
    ) -> Operation[m.JobStatus | Refusal]:
        """With ``source``, that replica goes when the first copy has come."""
        message = m.CopyObject(key, list(targets), source, self._operations.tenant)
        return (yield from self._job(message, deadline))

    def drain(
        self, segments: Sequence[str], targets: Sequence[str], max_concurrency: int, deadline: float
    ) -> Operation[m.JobStatus | Refusal]:
        message = m.DrainSegments(list(segments), list(targets), max_concurrency)
        return (yield from self._job(message, deadline))

    def job(self, job_id: int, deadline: float) -> Operation[m.JobStatus | None]:
        status = yield from self._job(m.AskJob(job_id), deadline)
        return None if isinstance(status, Refusal) else status

    def cancel(self, job_id: int, deadline: float) -> Operation[bool]:
        """Whether there is such a job, and it stops or has ended."""
        status = yield from self._job(m.AskJob(job_id, cancel=True), deadline)
        return not isinstance(status, Refusal)

    def _job(self, message: msgspec.Struct, deadline: float) -> Operation[m.JobStatus | Refusal]:
        reply: Any = yield from self._operations.ask(message, deadline)
        if isinstance(reply, m.RefusedReply):
            return reply.refusal
        assert isinstance(reply, m.JobReply), reply
        return reply.status

    def set_quota(self, tenant: str, size_bytes: int | None, deadline: float) -> Operation[Refusal | None]:
        """None: done."""
        reply: Any = yield from self._operations.ask(m.SetQuota(tenant, size_bytes), deadline)
        return reply.refusal if isinstance(reply, m.RefusedReply) else None

    def quotas(self, deadline: float) -> Operation[list[m.QuotaStatus]]:
        reply: m.Quotas = yield from self._operations.ask(m.AskQuotas(), deadline)
        return reply.quotas

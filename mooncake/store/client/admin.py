# SPDX-License-Identifier: Apache-2.0
"""Requests to a master besides put and get: copies, jobs, quotas, patterns.

They are operations, so that the blocking and the asyncio client share them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from mooncake.errors import Refusal
from mooncake.store import messages as m
from mooncake.store.client.effects import Operation
from mooncake.store.client.operations import Operations
from mooncake.types import ObjectKey


class AdminOperations:
    """Administrative requests of one client, sent through its ``operations``."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations

    def remove_matching(
        self, message: m.RemoveMatching, deadline: float, until: float
    ) -> Operation[m.Removed]:
        """Remove objects whose key matches, ``until`` then at most. ``deadline``: by then a master must have
        answered a short request, so that one that is away is not waited for that long."""
        yield from self._operations.ask(m.Exists([], message.tenant), deadline)
        reply: m.Removed = yield from self._operations.ask(message, until)
        return reply

    def copy(
        self, key: ObjectKey, targets: Sequence[str], source: str, deadline: float
    ) -> Operation[m.JobStatus | Refusal]:
        """Copy an object; with ``source``, the replica there is dropped after the first copy is complete."""
        message = m.CopyObject(key, list(targets), source, self._operations.tenant)
        return (yield from self._job(message, deadline))

    def drain(
        self, segments: Sequence[str], targets: Sequence[str], max_concurrency: int, deadline: float
    ) -> Operation[m.JobStatus | Refusal]:
        """Start to empty ``segments``."""
        message = m.DrainSegments(list(segments), list(targets), max_concurrency)
        return (yield from self._job(message, deadline))

    def job(self, job_id: int, deadline: float) -> Operation[m.JobStatus | None]:
        """Status of a job; None: there is no such job."""
        status = yield from self._job(m.AskJob(job_id), deadline)
        return None if isinstance(status, Refusal) else status

    def cancel(self, job_id: int, deadline: float) -> Operation[bool]:
        """Cancel a job; whether it exists and is stopping or has ended."""
        status = yield from self._job(m.AskJob(job_id, cancel=True), deadline)
        return not isinstance(status, Refusal)

    def _job(self, message: msgspec.Struct, deadline: float) -> Operation[m.JobStatus | Refusal]:
        reply: Any = yield from self._operations.ask(message, deadline)
        if isinstance(reply, m.RefusedReply):
            return reply.refusal
        assert isinstance(reply, m.JobReply), reply
        return reply.status

    def set_quota(self, tenant: str, size_bytes: int | None, deadline: float) -> Operation[Refusal | None]:
        """Set or clear a tenant's quota; None: done."""
        reply: Any = yield from self._operations.ask(m.SetQuota(tenant, size_bytes), deadline)
        return reply.refusal if isinstance(reply, m.RefusedReply) else None

    def quotas(self, deadline: float) -> Operation[list[m.QuotaStatus]]:
        """Quotas and usage of all tenants."""
        reply: m.Quotas = yield from self._operations.ask(m.AskQuotas(), deadline)
        return reply.quotas

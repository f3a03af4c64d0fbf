# SPDX-License-Identifier: Apache-2.0
"""Changes that operators make by HTTP: drain segments, set quotas, remove all objects."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query, Request, Response
from msgspec import Meta

from mooncake.compat.master.responses import HttpRefusal, check_key, json, read_body, unwrap_reply
from mooncake.security.http_auth import AdminKey
from mooncake.store import messages as m
from mooncake.store.master import tenants_file
from mooncake.store.master.context import MasterContext
from mooncake.store.master.tenants import MAX_QUOTA_BYTES

_STATES = {
    "waiting": "CREATED",
    "running": "RUNNING",
    "done": "SUCCEEDED",
    "failed": "FAILED",
    "cancelled": "CANCELED",
}
JobNumber = Annotated[int, Query(ge=0, lt=1 << 63)]
TenantName = Annotated[str, Query(min_length=1, max_length=256)]


class DrainRequest(msgspec.Struct):
    segments: Annotated[list[str], Meta(min_length=1)]
    target_segments: list[str] = []
    max_concurrency: Annotated[int, Meta(ge=1, le=m.MAX_CONCURRENCY)] = 4


class QuotaRequest(msgspec.Struct):
    requested_quota_bytes: Annotated[int, Meta(ge=0, le=MAX_QUOTA_BYTES)]


def router(context: MasterContext) -> APIRouter:
    routes = APIRouter(prefix="/api/v1")
    key = AdminKey(context.settings.admin_api_key)

    @routes.post("/drain_jobs")
    async def drain(http: Request) -> Response:
        """Begin to move the objects of segments elsewhere; needs the admin key."""
        check_key(http, key)
        body: DrainRequest = await read_body(http, DrainRequest)
        message = m.DrainSegments(body.segments, body.target_segments, body.max_concurrency)
        job: m.JobReply = unwrap_reply(await context.ask(message), "unknown_segment")
        return json({"success": True, "job_id": str(job.status.job_id), "status": "CREATED"})

    @routes.get("/drain_jobs/query")
    async def query(job_id: JobNumber) -> Response:
        """Progress of a drain."""
        return json(_job(unwrap_reply(await context.ask(m.AskJob(job_id)), "unknown_job")))

    @routes.post("/drain_jobs/cancel")
    async def cancel(http: Request, job_id: JobNumber) -> Response:
        """End a drain early; needs the admin key."""
        check_key(http, key)
        return json(_job(unwrap_reply(await context.ask(m.AskJob(job_id, cancel=True)), "unknown_job")))

    @routes.get("/tenant_quotas")
    async def quotas(tenant_id: str = "") -> Response:
        """Quota and use of one tenant or of all."""
        found = [_quota(one) for one in unwrap_reply(await context.ask(m.AskQuotas())).quotas]
        if not tenant_id:
            return json({"success": True, "tenant_quotas": found})
        for one in found:
            if one["tenant_id"] == tenant_id:
                return json({"success": True, **one})
        raise HttpRefusal("unknown_tenant", f"tenant {tenant_id!r} has neither a quota nor objects")

    @routes.put("/tenant_quotas")
    async def set_quota(http: Request, tenant_id: TenantName) -> Response:
        """Set the quota of a tenant, and write it to the tenants file; needs the admin key."""
        check_key(http, key)
        body: QuotaRequest = await read_body(http, QuotaRequest)
        return await _set(context, tenant_id, body.requested_quota_bytes)

    @routes.delete("/tenant_quotas")
    async def remove_quota(http: Request, tenant_id: TenantName) -> Response:
        """Remove the quota of a tenant; needs the admin key."""
        check_key(http, key)
        return await _set(context, tenant_id, None)

    @routes.post("/remove_all")
    async def remove_all(http: Request, force: bool = False, tenant_id: str = "") -> Response:
        """Remove all objects of a tenant, leased ones only with ``force``; needs the admin key."""
        check_key(http, key)
        removed: m.Removed = unwrap_reply(await context.ask(m.RemoveMatching("", force, tenant_id)))
        answer = {"removed_count": removed.num_removed, "leased_count": removed.num_leased}
        return json({"success": True, **answer})

    return routes


async def _set(context: MasterContext, tenant: str, size_bytes: int | None) -> Response:
    quotas: m.Quotas = unwrap_reply(await context.ask(m.SetQuota(tenant, size_bytes)), "unknown_tenant")
    if context.settings.tenants_file:
        tenants_file.write(context.settings.tenants_file, quotas.quotas)
    found = next((_quota(one) for one in quotas.quotas if one.tenant == tenant), {"tenant_id": tenant})
    return json({"success": True, **found})


def _quota(one: m.QuotaStatus) -> dict[str, Any]:
    return {
        "tenant_id": one.tenant,
        "requested_quota_bytes": one.quota_bytes,
        "effective_quota_bytes": one.quota_bytes,
        "charged_bytes": one.used_bytes,
        "object_count": one.num_objects,
    }


def _job(job: m.JobReply) -> dict[str, Any]:
    status = job.status
    state = _STATES[status.state]
    return {
        "success": True,
        "job_id": str(status.job_id),
        "type": status.kind.upper(),
        "status": state,
        "segments": status.about,
        "succeeded_units": status.num_done,
        "failed_units": status.num_failed,
        "blocked_units": 0 if state == "RUNNING" else status.num_left,
        "active_units": status.num_left if state == "RUNNING" else 0,
        "migrated_bytes": status.moved_bytes,
        "error_message": status.reason,
    }

# SPDX-License-Identifier: Apache-2.0
"""The application: health, leadership, metrics; ``query_routes`` and ``operator_routes`` add the rest."""

from __future__ import annotations

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse
from starlette.exceptions import HTTPException

import mooncake
from mooncake import metrics
from mooncake.compat.master import master_metrics, operator_routes, query_routes
from mooncake.compat.master.responses import HttpRefusal, check_key, json
from mooncake.errors import StorageError
from mooncake.security.http_auth import AdminKey
from mooncake.store import messages as m
from mooncake.store.master.context import MasterContext

OPEN_PATHS = ("/health", "/ready", "/version")
"""Paths that need no authentication, also where the cluster has a credential."""


def make_app(context: MasterContext) -> FastAPI:
    """Make the HTTP side of the master of ``context`` as an ASGI application."""
    app = FastAPI(title="Mooncake master", version=mooncake.__version__, docs_url=None, redoc_url=None)
    key = AdminKey(context.settings.admin_api_key)

    @app.exception_handler(HttpRefusal)
    async def _refused(_: Request, error: HttpRefusal) -> Response:
        return error.response()

    @app.exception_handler(StorageError)
    async def _not_stored(_: Request, error: StorageError) -> Response:
        return HttpRefusal("internal_error", str(error)).response()

    @app.exception_handler(RequestValidationError)
    async def _invalid(_: Request, error: RequestValidationError) -> Response:
        wrong = "; ".join(f"{one['loc'][-1]}: {one['msg']}" for one in error.errors())
        return HttpRefusal("invalid_argument", wrong).response()

    @app.exception_handler(HTTPException)
    async def _not_served(http: Request, error: HTTPException) -> Response:
        reason = f"{http.method} {http.url.path}: {error.detail}"
        body = {"success": False, "error_code": -600, "error_message": "INVALID_PARAMS", "error": reason}
        return json(body, error.status_code)

    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> Response:
        """State of this master and the leader's address; 200 on a standby as well."""
        lead = context.leadership
        return json(
            {
                "status": "ok",
                "role": "leader" if lead.is_leader else "standby",
                "ha_state": lead.state,
                "service_ready": lead.is_leader,
                "leader_address": lead.leader,
                "view_version": lead.term,
            }
        )

    @app.head("/ready", include_in_schema=False)
    @app.get("/ready")
    async def ready() -> Response:
        """Report whether this master serves clients."""
        is_leader = context.leadership.is_leader
        return PlainTextResponse("OK" if is_leader else context.leadership.state, 200 if is_leader else 503)

    @app.get("/version")
    async def version() -> Response:
        """Version of the program."""
        return json({"version": mooncake.__version__})

    @app.get("/role")
    async def role() -> Response:
        """`leader` or `standby`."""
        return PlainTextResponse("leader" if context.leadership.is_leader else "standby")

    @app.get("/ha_status")
    async def ha_status() -> Response:
        """State in the election, as one word."""
        return PlainTextResponse(context.leadership.state)

    @app.get("/leader")
    async def leader() -> Response:
        """Address and term of the leader, as far as this master knows."""
        lead = context.leadership
        known = {"present": bool(lead.leader), "leader_address": lead.leader, "view_version": lead.term}
        return json(known)

    @app.get("/status")
    async def status(http: Request) -> Response:
        """Report segments, counts and reporters of corruption; needs the admin key, as it names hosts."""
        check_key(http, key)
        return json(msgspec.structs.asdict(master_metrics.local_status(context)))

    @app.get("/metrics")
    async def page() -> Response:
        """Metrics of this program, and those of the existing master under their names."""
        status = master_metrics.local_status(context)
        quotas = await context.ask(m.AskQuotas())
        existing = master_metrics.page(context, status, quotas.quotas if isinstance(quotas, m.Quotas) else [])
        return Response(metrics.page() + existing.encode(), media_type=metrics.CONTENT_TYPE)

    @app.get("/metrics/summary")
    async def summary() -> Response:
        """The state of the store in one line."""
        return PlainTextResponse(master_metrics.summary(context, master_metrics.local_status(context)) + "\n")

    @app.get("/kv_events/status")
    async def kv_events() -> Response:
        """Whether this master publishes KV events, where, and how many."""
        off = {"enabled": False, "published_batches": 0, "published_events": 0, "dropped_events": 0}
        return json(off if context.publisher is None else context.publisher.status())

    app.include_router(query_routes.router(context))
    app.include_router(operator_routes.router(context))
    return app

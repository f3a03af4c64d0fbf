# SPDX-License-Identifier: Apache-2.0
"""The console's pages about the store: beside those of a gateway, or alone at a master without one."""

from __future__ import annotations

import math
from typing import Any

from fastapi import FastAPI, Request, Response

from mooncake.console import contents
from mooncake.console.access import Visitor
from mooncake.console.site import (
    STORE_ACTIONS,
    STORE_VIEWS,
    ConsoleRefusal,
    Gate,
    add_actions,
    add_frame,
    answer_with,
    assets,
    named,
    operator,
    text_of,
)
from mooncake.console.store_source import StoreSource
from mooncake.security import process_identity
from mooncake.security.http_auth import AdminKey
from mooncake.store import messages as m
from mooncake.store.master.context import MasterContext


def add_store_data(app: FastAPI, gate: Gate, store: StoreSource | None) -> None:
    """Add the JSON of the pages about the store."""

    def present() -> StoreSource:
        if store is None:
            raise ConsoleRefusal(404, "no_master", "this gateway knows no store; start it with --master")
        return store

    @app.get("/console/store.json")
    async def store_data(http: Request) -> Response:
        """Tiers, what is in them by tenant and model, tenants' use, and the hottest prefixes."""

        async def found() -> Any:
            operator(gate.visitor(http))
            status = await present().status()
            age_s, pool, quotas = await present().contents()
            return {
                **contents.master_view(status),
                "contents": pool.summary(status.num_objects, age_s),
                "tenants": contents.tenants_of(quotas),
            }

        return await answer_with(found())

    @app.get("/console/key.json")
    async def key_data(http: Request) -> Response:
        """One object by `key` and `tenant`: its replicas, what protects it, and what happened to it."""

        async def found() -> Any:
            operator(gate.visitor(http))
            key, tenant = named(http, "key"), http.query_params.get("tenant", "")[:256]
            return contents.key_story(key, tenant, *await present().story(key, tenant))

        return await answer_with(found())


async def act_on_store(store: StoreSource | None, action: str, fields: dict[str, Any]) -> str:
    """Pin or unpin an object, or drain a segment. Raises ConsoleRefusal, MooncakeError."""
    if store is None or action not in STORE_ACTIONS:
        raise ConsoleRefusal(404, "no_such_action", f"there is no action {action[:64]!r} here")
    if action == "drain_segment":
        segment = text_of(fields, "segment")
        reply: m.JobReply = await store.ask(m.DrainSegments([segment], []))
        return f"drain of {segment} is job {reply.status.job_id}: {reply.status.state}"
    key, tenant = text_of(fields, "key"), text_of(fields, "tenant") if fields.get("tenant") else ""
    ttl_s = 0.0 if action == "unpin" else _pin_span(fields.get("seconds"))
    tenant = "" if tenant == "default" else tenant
    outcomes: m.Outcomes = await store.ask(m.Pin([key], ttl_s, tenant))
    if outcomes.outcomes[0] is not True:
        raise ConsoleRefusal(404, "not_found", f"there is no object {key[:128]!r}")
    return f"{action}ned {key}"


def _pin_span(seconds: Any) -> float | None:
    """How long a pin lasts; None: until it is unpinned. Never 0, which would unpin."""
    if seconds is None:
        return None
    try:
        span_s = 0.0 if isinstance(seconds, bool) else float(seconds)
    except (TypeError, ValueError, OverflowError):
        span_s = 0.0
    if not 0.0 < span_s < math.inf:
        raise ConsoleRefusal(400, "invalid_value", "seconds must be a finite number above 0")
    return span_s


STORE_PATHS = (
    *("/", "/console", "/console/session", "/console/session.json"),
    *(path for view in STORE_VIEWS for path in (f"/console/{view}", f"/console/{view}.json")),
    *(f"/console/actions/{action}" for action in STORE_ACTIONS),
)
"""Paths at which the console itself authenticates visitors, whatever credential the cluster has."""


def add_store_pages(app: FastAPI, context: MasterContext) -> FastAPI:
    """Add the console of a store without a gateway to the master's HTTP side."""
    admin = AdminKey(context.settings.admin_api_key)
    store = StoreSource(context.ask)

    def identify(key: str) -> Visitor | None:
        return Visitor("admin", key=key) if admin.matches({"x-api-key": key}) else None

    async def act(visitor: Visitor, action: str, fields: dict[str, Any]) -> str:
        return await act_on_store(store, action, fields)

    # As at the server's other pages: where the cluster has a credential, no address replaces it.
    gate = Gate(identify, has_readers=process_identity().is_open)
    add_frame(app, gate, STORE_VIEWS, "store")
    add_store_data(app, gate, store)
    add_actions(app, gate, act)
    return app


def open_paths() -> tuple[str, ...]:
    """``STORE_PATHS`` and the files of the pages."""
    return (*STORE_PATHS, *(f"/console/static/{name}" for name in assets()))

# SPDX-License-Identifier: Apache-2.0
"""The console of a gateway: the JSON of its pages, and the actions on instances."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request, Response

from mooncake import clock
from mooncake.console import contents
from mooncake.console.access import Visitor
from mooncake.console.cluster_map import cluster_map
from mooncake.console.endpoint_answers import miss_facts, missed_tokens, what_if_rows
from mooncake.console.gateway_source import GatewaySource
from mooncake.console.history import KEPT_S, MetricHistory
from mooncake.console.overview import FAMILIES, client_overview, overview
from mooncake.console.recorder import MetricRecorder, samples
from mooncake.console.session_rows import session_rows
from mooncake.console.site import (
    GATEWAY_VIEWS,
    INSTANCE_ACTIONS,
    ConsoleRefusal,
    Gate,
    add_actions,
    add_frame,
    answer_with,
    message_of,
    named,
    number_of,
    operator,
    read_fields,
)
from mooncake.console.store_site import act_on_store, add_store_data
from mooncake.console.store_source import RemoteMaster, StoreSource
from mooncake.console.waterfall import waterfall
from mooncake.errors import MooncakeError
from mooncake.gateway.gateway import Gateway
from mooncake.http.openai import ApiError


def add_gateway_data(
    app: FastAPI, gate: Gate, source: GatewaySource, history: MetricHistory, store: StoreSource | None
) -> None:
    """Add the JSON of the pages about requests and instances."""

    @app.get("/console/overview.json")
    async def overview_data(http: Request) -> Response:
        """Hit rate, savings, latencies, SLOs and rejections over time; a client's key: its own totals."""

        async def found() -> Any:
            visitor = gate.visitor(http)
            misses = missed_tokens(await source.get(visitor, "/v1/cache/misses"))
            if not visitor.sees_all:
                families = ("mooncake_gateway_client_requests", "mooncake_gateway_client_tokens")
                return {**client_overview(samples(families), visitor.name), "misses": misses}
            span_s = number_of(http.query_params.get("seconds"), KEPT_S)
            totals = samples(FAMILIES)
            rejected = await source.rejected()
            return {**overview(history, clock.monotonic() - span_s, totals, rejected), "misses": misses}

        return await answer_with(found())

    @app.get("/console/cluster.json")
    async def cluster_data(http: Request) -> Response:
        """Hosts with instances and segments, tiers, and which requests wait for what."""

        async def found() -> Any:
            visitor = operator(gate.visitor(http))
            status, requests = await source.status(), await source.requests(visitor)
            segments: list[dict[str, Any]] = []
            trouble = "no master is set: start the gateway with --master" if store is None else ""
            if store is not None:
                try:
                    segments = contents.master_view(await store.status())["segments"]
                except MooncakeError as error:
                    trouble = str(error)
            return {**cluster_map(status, segments, requests), "store_trouble": trouble}

        return await answer_with(found())

    @app.get("/console/requests.json")
    async def requests_data(http: Request) -> Response:
        """The latest requests; a client's key: its own."""

        async def found() -> Any:
            return {"requests": await source.requests(gate.visitor(http))}

        return await answer_with(found())

    @app.get("/console/request.json")
    async def request_data(http: Request) -> Response:
        """One request by `id`: its explanation, its trace if there is one, and both as bars over time."""

        async def found() -> Any:
            visitor, name = gate.visitor(http), named(http, "id")
            explained = await source.get(visitor, f"/v1/requests/{name}/explain")
            prompts = explained["prompts"] if isinstance(explained, dict) else []
            trace = await source.get(visitor, f"/v1/requests/{name}/trace")
            if not prompts and not trace:
                raise ConsoleRefusal(404, "request_not_found", "no such request is remembered")
            return {
                "id": name,
                "prompts": prompts,
                "misses": [miss_facts(one) for one in explained.get("misses") or []] if prompts else [],
                "has_trace": trace is not None,
                "waterfall": waterfall(prompts[0] if prompts else None, trace),
            }

        return await answer_with(found())

    @app.get("/console/sessions.json")
    async def sessions_data(http: Request) -> Response:
        """The latest requests by session, with each session's hit rate."""

        async def found() -> Any:
            return session_rows(await source.requests(gate.visitor(http)))

        return await answer_with(found())

    @app.post("/console/what_if.json")
    async def what_if(http: Request) -> Response:
        """Predict the last minutes with one change: `{"memory": 2}`, `{"decode": 1}` or `{"policy": ...}`."""

        async def found() -> Any:
            visitor = gate.poster(http)
            answer = await source.what_if(visitor, await read_fields(http))
            if answer.status in (404, 405):
                return {"is_available": False, "message": "this gateway has no recording to simulate"}
            if answer.status != 200:
                raise ConsoleRefusal(answer.status, "what_if_failed", message_of(answer.json()))
            result = answer.json()
            notes = result.get("notes", []) if isinstance(result, dict) else []
            return {"is_available": True, "rows": what_if_rows(result), "notes": notes}

        return await answer_with(found())


@contextlib.asynccontextmanager
async def gateway_pages(gateway: Gateway, app: FastAPI, operator_app: FastAPI) -> AsyncIterator[None]:
    """Serve the console at ``app`` while this context is open. Raises InvalidArgument: a wrong master."""
    source = GatewaySource(gateway, app, operator_app)
    master = RemoteMaster(gateway.settings.master) if gateway.settings.master else None
    store = StoreSource(master) if master is not None else None
    recorder = MetricRecorder(source.costs)
    recording = asyncio.create_task(recorder.run())

    def identify(key: str) -> Visitor | None:
        if gateway.admin_key.matches({"x-api-key": key}):
            return Visitor("admin", key=key)
        if gateway.clients is None:
            return None
        try:
            client = gateway.clients.of({"authorization": f"Bearer {key}"})
        except ApiError:
            return None
        return Visitor("client", client.name, client.entry.tenant_name, key)

    async def act(visitor: Visitor, action: str, fields: dict[str, Any]) -> str:
        path = INSTANCE_ACTIONS.get(action)
        if path is None:
            return await act_on_store(store, action, fields)
        answer = await source.post(visitor, path, fields)
        if answer.status != 200:
            raise ConsoleRefusal(answer.status, "action_refused", message_of(answer.json()))
        return str(answer.json()["message"])

    # A proxy on this host may look like a process of it: where clients have keys, everyone needs one.
    gate = Gate(identify, has_readers=gateway.clients is None)
    add_frame(app, gate, GATEWAY_VIEWS, "overview")
    add_gateway_data(app, gate, source, recorder.history, store)
    add_store_data(app, gate, store)
    add_actions(app, gate, act)
    try:
        yield
    finally:
        recording.cancel()
        await asyncio.gather(recording, return_exceptions=True)
        if master is not None:
            await master.close()

# SPDX-License-Identifier: Apache-2.0
"""What a gateway says of itself and of its instances; for other routers only what the OpenAI API has."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Any

from mooncake.doctor.engine_probe import reach_of_models
from mooncake.doctor.facts import GatewayFacts, InstanceFacts, Trouble
from mooncake.doctor.http_probe import HttpProbe, HttpServerAt, Unanswered

MAX_INSTANCES = 1024

_CONDUCTOR = re.compile(r"(\S+:\d+) \(([^)]*)\)")
"""Address and state of one conductor in a gateway's text."""


async def read_gateway(http: HttpProbe, server: HttpServerAt, admin_api_key: str) -> GatewayFacts:
    """The facts of a gateway, without any prompt."""
    facts = GatewayFacts(server.address)
    try:
        models = await http.get(server, "/v1/models")
    except Unanswered as error:
        facts.reach = error.reach
        return facts
    facts.clock_skew_s = models.skew_s
    reach = reach_of_models(models)
    if reach.trouble is Trouble.DENIED:
        facts.key_refused = reach.detail
    elif not reach.is_fine:
        facts.reach = reach  # its status may name the reason
    else:
        cards = [one for one in models.json()["data"] if isinstance(one, dict)]
        facts.models = tuple(str(one.get("id", "")) for one in cards)
    await asyncio.gather(_read_version(http, server, facts), read_status(http, server, admin_api_key, facts))
    return facts


async def _read_version(http: HttpProbe, server: HttpServerAt, facts: GatewayFacts) -> None:
    try:
        reply = await http.get(server, "/version")
    except Unanswered:
        return
    found = reply.json()
    if reply.status == 200 and isinstance(found, dict):
        facts.version = str(found.get("version", ""))


async def read_status(http: HttpProbe, server: HttpServerAt, admin_api_key: str, facts: GatewayFacts) -> None:
    """Read the gateway's status; other routers have none in this form."""
    headers = {**server.headers, **({"X-API-Key": admin_api_key} if admin_api_key else {})}
    try:
        reply = await http.get(HttpServerAt(server.url, headers, server.is_signed), "/status")
    except Unanswered:
        return
    found = reply.json()
    if reply.status != 200 or not isinstance(found, dict) or "prefill_node_count" not in found:
        return
    facts.is_ours = True
    facts.degraded = str(found.get("degraded") or "")
    rows = found.get("instances")
    if not isinstance(rows, list):
        facts.status_refused = "GET /status shows the number of instances only, without a valid admin key"
        return
    facts.scheduling, facts.protocol = str(found.get("scheduling", "")), str(found.get("protocol", ""))
    facts.conductor = str(found.get("conductor", ""))
    links = found.get("conductors")
    facts.conductors = _conductors(links) if isinstance(links, list) else _described(facts.conductor)
    size = found.get("block_tokens")
    facts.block_tokens = size if isinstance(size, int) else None
    facts.instances = [_instance(row) for row in rows if isinstance(row, dict)][:MAX_INSTANCES]


def _conductors(links: Sequence[Any]) -> dict[str, bool]:
    rows = [one for one in links if isinstance(one, dict)]
    return {str(row.get("address", "")): bool(row.get("is_connected")) for row in rows}


def _described(conductor: str) -> dict[str, bool]:
    """The conductors of a gateway of an earlier release, which shows them as text only."""
    return {address: "can't be reached" not in state for address, state in _CONDUCTOR.findall(conductor)}


def _instance(row: Mapping[str, Any]) -> InstanceFacts:
    silent, answered = row.get("is_silent"), row.get("has_answered")
    return InstanceFacts(
        address=str(row.get("instance", "")),
        role=str(row.get("role", "")),
        health=str(row.get("health", "")),
        detail=str(row.get("detail", "")),
        num_blocks=blocks if isinstance(blocks := row.get("num_blocks"), int) else 0,
        is_silent=silent if isinstance(silent, bool) else None,
        has_answered=answered if isinstance(answered, bool) else None,
    )

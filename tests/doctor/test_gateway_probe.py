# SPDX-License-Identifier: Apache-2.0
"""Our gateway shows its instances to operators; other routers have only the OpenAI API."""

from __future__ import annotations

from typing import Any

import pytest

from mooncake.doctor.checks import examine
from mooncake.doctor.facts import Expectations, Facts, GatewayFacts, Trouble
from mooncake.doctor.findings import Severity
from mooncake.doctor.gateway_probe import read_gateway
from mooncake.doctor.http_probe import HttpProbe
from mooncake.security import Identity
from tests.doctor.test_engine_probe import a_server, models

STATUS: dict[str, Any] = {
    "model": "m",
    "degraded": "",
    "prefill_node_count": 0,
    "decode_node_count": 1,
}
DETAILS = {"scheduling": "overlap", "protocol": "workers", "conductor": "inside", "block_tokens": 32}
ROW = {
    "instance": "a:1",
    "role": "decode",
    "health": "ready",
    "detail": "",
    "num_blocks": 3,
    "is_silent": True,
    "has_answered": False,
}


async def facts_of(pages: dict[str, Any], status: int = 200) -> GatewayFacts:
    async with a_server(pages, status) as server, HttpProbe(Identity(), 5.0) as http:
        return await read_gateway(http, server, "key")


async def test_ours_with_the_admin_key() -> None:
    pages = {"/v1/models": models("mooncake", "m"), "/version": {"version": "1"}}
    facts = await facts_of({**pages, "/status": {**STATUS, **DETAILS, "instances": [ROW]}})
    assert facts.is_ours and facts.version == "1" and facts.block_tokens == 32
    assert facts.instances is not None
    (row,) = facts.instances
    assert (row.address, row.role, row.num_blocks, row.is_silent) == ("a:1", "decode", 3, True)
    assert row.has_answered is False


async def test_ours_without_it() -> None:
    facts = await facts_of({"/v1/models": models("mooncake", "m"), "/status": STATUS})
    assert facts.is_ours and facts.instances is None and "admin key" in facts.status_refused


async def test_rows_of_another_version_or_form() -> None:
    row = {"instance": "a:1", "num_blocks": "many"}
    pages = {"/v1/models": models("mooncake", "m")}
    facts = await facts_of({**pages, "/status": {**STATUS, "instances": [row, 7], "conductors": [7]}})
    assert facts.instances is not None and len(facts.instances) == 1
    assert facts.instances[0].is_silent is None and facts.instances[0].num_blocks == 0
    assert facts.instances[0].has_answered is None and facts.conductors == {}


async def test_conductors_that_it_reaches() -> None:
    links = [{"address": "h:1", "is_connected": True}, {"address": "h:2", "is_connected": False}]
    status = {**STATUS, **DETAILS, "instances": [ROW], "conductors": links}
    facts = await facts_of({"/v1/models": models("mooncake", "m"), "/status": status})
    assert facts.conductors == {"h:1": True, "h:2": False}


@pytest.mark.parametrize(
    ("state", "conductors", "codes"),
    [
        ("inside this gateway", {}, []),
        ("h:1 (connected)", {"h:1": True}, []),
        ("h:1 (leads), h:2 (follows)", {"h:1": True, "h:2": True}, []),
        ("[::1]:1 (leads), h:2 (can't be reached)", {"[::1]:1": True, "h:2": False}, ["conductor_lost"]),
        (
            "h:1 (can't be reached: workers are chosen without it)",
            {"h:1": False},
            ["conductor_unreachable"],
        ),
    ],
)
async def test_a_gateway_of_an_earlier_release(
    state: str, conductors: dict[str, bool], codes: list[str]
) -> None:
    """It has neither a list of conductors nor knows which instances have answered."""
    row = {name: value for name, value in ROW.items() if name != "has_answered"}
    status = {**STATUS, **DETAILS, "conductor": state, "instances": [row]}
    facts = await facts_of({"/v1/models": models("mooncake", "m"), "/status": status})
    assert facts.conductors == conductors and not facts.absent
    assert [one.code for one in examine(Facts([], facts), Expectations())] == codes


async def test_another_router() -> None:
    facts = await facts_of({"/v1/models": models("vllm", "m"), "/status": {"status": "ok"}})
    assert facts.reach.is_fine and not facts.is_ours and facts.instances is None and not facts.status_refused


@pytest.mark.parametrize(
    ("pages", "status", "seen"),
    [
        ({}, 200, "answered with 404: Not Found"),
        ({"/v1/models": "the upstream is down"}, 502, "answered with 502: the upstream is down"),
        ({"/v1/models": "<html>welcome</html>"}, 200, "answered with 200: <html>"),
        ({"/v1/models": {"status": "ok"}}, 200, "answered with 200"),
    ],
)
async def test_what_has_no_list_of_models_is_no_gateway(
    pages: dict[str, Any], status: int, seen: str
) -> None:
    facts = await facts_of(pages, status)
    assert facts.reach.trouble is Trouble.OTHER and seen in facts.reach.detail
    (found,) = examine(Facts([], facts), Expectations())
    assert (found.code, found.severity) == ("gateway_unreachable", Severity.BROKEN)


async def test_a_refused_key() -> None:
    facts = await facts_of({"/v1/models": {"error": {"message": "no such key"}}}, status=401)
    assert "no such key" in facts.key_refused and not facts.is_ours

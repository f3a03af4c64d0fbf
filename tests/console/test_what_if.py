# SPDX-License-Identifier: Apache-2.0
"""The endpoint: who may ask, what is refused, and that an answer comes from another process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from mooncake.conductor.messages import AdmissionStatus
from mooncake.conductor.settings import SchedulingSettings
from mooncake.console import what_if
from mooncake.console.what_if import BesideSimulation, WhatIfBody, add_what_if
from mooncake.gateway.app import create_operator_app
from mooncake.http.server import HttpServer, listen
from mooncake.inference.tokenizer import Tokenizer
from mooncake.sim.serving.what_if import Change, WhatIfQuestion
from tests.gateway.conftest import ADMIN_KEY, Stack, running, tokenizer

__all__ = ["tokenizer"]

NUM_REQUESTS = 30
DECODE = {"change": {"decode": 1}}


class Asked:
    """A gateway with requests in its memory, and the endpoint."""

    def __init__(self, stack: Stack, url: str) -> None:
        self.stack, self.url = stack, url

    async def ask(self, body: Any, key: str | None = ADMIN_KEY) -> tuple[int, dict[str, Any]]:
        headers = {} if key is None else {"X-API-Key": key}
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.stack.session.post(f"{self.url}/v1/what_if", data=data, headers=headers) as response:
            return response.status, await response.json()


@contextlib.asynccontextmanager
async def asked(
    tokenizer: Tokenizer, num_requests: int = NUM_REQUESTS, is_inside: bool = False, **settings: Any
) -> AsyncIterator[Asked]:
    async with running(tokenizer, 1, 1, **settings) as stack:
        for number in range(num_requests):
            await stack.complete([number % 7 + 1] * (4 + number), 8)
        app = create_operator_app(stack.gateway)
        add_what_if(app, stack.gateway, BesideSimulation(), is_inside)
        server = HttpServer(app, listen("127.0.0.1", 0))
        await server.start()
        try:
            yield Asked(stack, f"http://127.0.0.1:{server.port}")
        finally:
            await server.close()


async def test_an_operator_gets_figures_with_and_without_the_change(tokenizer: Tokenizer) -> None:
    async with asked(tokenizer) as cluster:
        status, found = await cluster.ask(DECODE)
    assert status == 200, found
    assert found["rows"] == NUM_REQUESTS
    assert found["change"] == {"decode": 1}
    assert found["measured"]["num_done"] == NUM_REQUESTS
    assert set(found["effect"]) == set(found["expected"]) == set(found["model_error"])
    for effect in found["effect"].values():
        assert effect["low"] <= effect["value"] <= effect["high"]


async def test_only_operators_may_ask(tokenizer: Tokenizer) -> None:
    async with asked(tokenizer, 0) as cluster:
        assert (await cluster.ask(DECODE, None))[0] == 401
        assert (await cluster.ask(DECODE, "wrong"))[0] == 401
    async with asked(tokenizer, 0, admin_api_key="") as cluster:
        assert (await cluster.ask(DECODE, "anything"))[0] == 403
    async with asked(tokenizer, 0, is_inside=True) as cluster:
        assert (await cluster.ask(DECODE, None))[0] == 400  # it has no requests


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{", None),
        ({}, None),
        ({"change": {"decode": "many"}}, "change.decode"),
        ({"change": {"disk": 1}}, "change"),
        ({"change": {"memory": 0}}, "change.memory"),
        ({"change": {"policy": "best"}}, "policy"),
        ({"change": {"decode": -1}}, "change"),
        ({"change": {}, "minutes": -1}, "minutes"),
    ],
)
async def test_a_wrong_question_is_refused_by_field(
    tokenizer: Tokenizer, body: Any, param: str | None
) -> None:
    async with asked(tokenizer) as cluster:
        status, found = await cluster.ask(body)
    assert status == 400, found
    assert found["error"].get("param") == param


async def test_too_few_requests_are_refused(tokenizer: Tokenizer) -> None:
    async with asked(tokenizer, 3) as cluster:
        status, found = await cluster.ask(DECODE)
        assert (status, found["error"]["param"]) == (400, "minutes")
        assert "3 requests" in found["error"]["message"]
    async with asked(tokenizer, 3, recent_requests=0) as cluster:
        status, found = await cluster.ask(DECODE)
        assert (status, found["error"]["code"]) == (400, "nothing_recorded")


async def test_one_question_at_a_time(tokenizer: Tokenizer) -> None:
    async with asked(tokenizer) as cluster:
        answers = await asyncio.gather(*(cluster.ask(DECODE) for _ in range(3)))
        assert sorted(status for status, _ in answers) == [200, 429, 429]
        assert {found["error"]["code"] for status, found in answers if status == 429} == {"what_if_busy"}
        assert (await cluster.ask(DECODE))[0] == 200


async def test_a_simulation_that_takes_too_long_is_ended(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(what_if, "TIMEOUT_S", 0.001)
    async with asked(tokenizer) as cluster:
        status, found = await cluster.ask(DECODE)
        assert (status, found["error"]["code"]) == (504, "deadline_exceeded")


async def test_a_simulation_that_fails_is_an_error_of_its_own(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with asked(tokenizer) as cluster:
        monkeypatch.setattr(sys, "executable", "/bin/false")
        status, found = await cluster.ask(DECODE)
        assert (status, found["error"]["code"]) == (503, "what_if_failed")


async def test_a_question_has_the_settings_that_the_conductor_states(tokenizer: Tokenizer) -> None:
    """A conductor of its own may place and admit by other rules than the gateway's settings say."""
    own: dict[str, Any] = {"scheduling": "cache_aware", "admission": "early", "slo_ttft_s": 5.0}
    async with asked(tokenizer, 1, **own) as cluster:
        gateway = cluster.stack.gateway
        inside = await what_if._question(gateway, WhatIfBody(Change()))
        stated = AdmissionStatus("predicted", scheduling="load", slo_ttft_s=2.0, turn_share=0.1)

        async def admission() -> AdmissionStatus:
            return stated

        gateway.scheduling.admission = admission  # type: ignore[method-assign]
        outside = await what_if._question(gateway, WhatIfBody(Change(), slo_ttft_s=1.0))
        stated = AdmissionStatus("rule of another version", scheduling="load")
        unknown = await what_if._question(gateway, WhatIfBody(Change()))
    found = inside.settings
    assert (found.scheduling, found.admission, found.slo_ttft_s) == ("cache_aware", "early", 5.0)
    assert inside.slo_ttft_s == 5.0 and not inside.notes
    found = outside.settings
    assert (found.scheduling, found.admission, found.slo_ttft_s) == ("load", "predicted", 2.0)
    assert outside.slo_ttft_s == 1.0 and not outside.notes
    assert (unknown.settings.scheduling, unknown.settings.admission) == ("cache_aware", "none")
    assert "does not state its settings" in unknown.notes[0]


async def test_the_ids_of_a_question_are_within_its_form(tokenizer: Tokenizer) -> None:
    async with asked(tokenizer, 2) as cluster:
        rows = what_if.rows_of(cluster.stack.gateway.recorder.recent(0.0))
    question = WhatIfQuestion(rows, 4, 1, 1, SchedulingSettings(), Change())
    encoded = msgspec.msgpack.encode(question)
    assert msgspec.msgpack.decode(encoded, type=WhatIfQuestion) == question

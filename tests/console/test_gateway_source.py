# SPDX-License-Identifier: Apache-2.0
"""What a list shows of a request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from mooncake.conductor.explanation import ActualTimes, Explanation
from mooncake.console.gateway_source import GatewaySource


async def shown(actual: ActualTimes, state: str) -> dict[str, Any]:
    explanation = Explanation("r", 9.0, 64, state, "", "", None, "d1", "", 1, [], None, actual, None, [])

    async def explain(name: str) -> Explanation:
        return explanation

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError

    gateway: Any = SimpleNamespace(scheduling=SimpleNamespace(explain=explain))
    found = await GatewaySource(gateway, app, app)._summary("r", ["r"])
    return cast(dict[str, Any], found)


@pytest.mark.parametrize(
    ("actual", "state", "latency_s"),
    [
        (ActualTimes(ttft_s=0.5, tbt_s=0.1, output_tokens=6, e2e_s=1.1, is_complete=True), "finished", 1.0),
        (ActualTimes(output_tokens=6, e2e_s=1.1, is_complete=True), "finished", 1.1),
        (ActualTimes(output_tokens=6, is_complete=True), "finished", None),  # from an older conductor
        (ActualTimes(e2e_s=1.1), "failed", None),
        (ActualTimes(), "decode", None),
    ],
    ids=["stream", "whole", "older", "failed", "in progress"],
)
async def test_a_finished_answer_has_its_latency(
    actual: ActualTimes, state: str, latency_s: float | None
) -> None:
    assert (await shown(actual, state))["latency_s"] == latency_s

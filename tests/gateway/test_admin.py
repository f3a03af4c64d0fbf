"""Instances come and go with the right key, and nothing happens without it."""

from __future__ import annotations

from typing import Any

import pytest

from mooncake.inference.tokenizer import Tokenizer
from tests.gateway.conftest import ADMIN_KEY, House, running

KEY = {"X-API-Key": ADMIN_KEY}


async def instances(house: House) -> dict[str, str]:
    _, status = await house.get("/status")
    return {row["instance"]: row["role"] for row in status["instances"]}


async def test_an_instance_leaves_and_comes_back(house: House) -> None:
    change = {"type": "decode", "instance": house.decode[0].address}
    status, answer, _ = await house.post("/instances/remove", change, KEY)
    assert (status, answer["status"]) == (200, "removed")
    assert house.decode[0].address not in await instances(house)
    for _ in range(3):
        await house.complete([20, 21])
    assert not house.decode[0].calls
    status, answer, _ = await house.post("/instances/add", change, KEY)
    assert (status, answer["status"]) == (200, "added")
    await house.until(lambda health: health.get(house.decode[0].address) == "ready")
    for _ in range(2):
        await house.complete([20, 21])
    assert house.decode[0].calls


async def test_draining_ends_with_leaving(house: House) -> None:
    change = {"type": "decode", "instance": house.decode[0].address}
    status, _, _ = await house.post("/instances/drain", change, KEY)
    assert status == 200
    assert house.decode[0].address not in await instances(house)


@pytest.mark.parametrize("headers", [{}, {"X-API-Key": "wrong"}, {"X-API-Key": ""}])
@pytest.mark.parametrize("action", ["add", "remove", "drain"])
async def test_without_the_key_nothing_changes(house: House, action: str, headers: dict[str, str]) -> None:
    before = await instances(house)
    for address in ("127.0.0.1:9", house.decode[0].address):
        body = {"type": "decode", "instance": address}
        status, answer, _ = await house.post(f"/instances/{action}", body, headers)
        assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
    assert await instances(house) == before


async def test_without_a_key_set_it_says_how_to_set_one(tokenizer: Tokenizer) -> None:
    async with running(tokenizer, admin_api_key="") as house:
        body = {"type": "decode", "instance": "127.0.0.1:9"}
        for headers in ({}, {"X-API-Key": ""}, KEY):
            status, answer, _ = await house.post("/instances/add", body, headers)
            assert status == 403
            assert "ADMIN_API_KEY" in answer["error"]["message"]
        assert len(await house.health()) == 3


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (b"{", 400, None),
        (b"[]", 400, None),
        ({"type": "decode"}, 400, "instance"),
        ({"instance": "127.0.0.1:9"}, 400, "type"),
        ({"type": "king", "instance": "127.0.0.1:9"}, 400, "type"),
        ({"type": "decode", "instance": 9}, 400, "instance"),
        ({"type": "decode", "instance": "nowhere"}, 400, "instance"),
        ({"type": "decode", "instance": "host:99999"}, 400, "instance"),
    ],
)
async def test_a_wrong_change_names_the_field(
    house: House, body: Any, status: int, param: str | None
) -> None:
    found, answer, _ = await house.post("/instances/add", body, KEY)
    assert (found, answer["error"]["param"]) == (status, param)
    assert len(await instances(house)) == 3


async def test_removing_what_is_not_there_is_a_404(house: House) -> None:
    for body in (
        {"type": "decode", "instance": "127.0.0.1:9"},
        {"type": "prefill", "instance": house.decode[0].address},
    ):
        status, answer, _ = await house.post("/instances/remove", body, KEY)
        assert (status, answer["error"]["code"]) == (404, "no_such_instance")


async def test_status_tells_who_serves(house: House) -> None:
    await house.complete([20, 21])
    _, status = await house.get("/status")
    assert status["prefill_nodes"] == [house.prefill[0].address]
    assert status["decode_node_count"] == 2
    assert (status["model"], status["conductor"], status["degraded"]) == ("tiny", "inside this gateway", "")
    [prefill] = [row for row in status["instances"] if row["role"] == "prefill"]
    assert (prefill["health"], prefill["num_placed"]) == ("ready", 1)


async def test_the_story_says_why(house: House) -> None:
    answer = await house.complete([20, 21])
    _, told = await house.get(f"/story/{answer['id']}")
    assert any("its turn" in line for line in told["story"])
    _, told = await house.get(f"/story/{house.decode[0].address}")
    assert any("is ready" in line for line in told["story"])


async def test_health_ready_and_version(house: House) -> None:
    for path in ("/health", "/ready", "/version"):
        status, _ = await house.get(path)
        assert status == 200

"""Instances come and go with the right key, and nothing happens without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mooncake.errors import InvalidArgument
from mooncake.gateway.app import check_exposure, create_operator_app
from mooncake.gateway.gateway import GatewaySettings
from mooncake.http.server import HttpServer, listen
from mooncake.inference.tokenizer import Tokenizer
from mooncake.security import Identity, SecuritySettings
from mooncake.security.keys import format_secret
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


# --- what strangers learn


@pytest.mark.parametrize("headers", [{}, {"X-API-Key": "wrong"}, {"Authorization": "Bearer wrong"}])
async def test_strangers_learn_neither_instances_nor_answers(house: House, headers: dict[str, str]) -> None:
    answer = await house.complete([20, 21])
    addresses = [one.address for one in (*house.prefill, *house.decode)]
    for path in ("/status", "/story/" + addresses[0], "/story/" + answer["id"], "/metrics", "/ready"):
        async with house.session.get(house.url + path, headers=headers) as response:
            text = await response.text()
            assert response.status == (200 if path in ("/status", "/ready") else 401), path
        assert not any(address in text for address in addresses) and answer["id"] not in text, path
    _, status = await house.get("/status", headers)
    assert status == {"model": "tiny", "degraded": "", "prefill_node_count": 1, "decode_node_count": 2}


async def test_operators_learn_all_at_a_port_of_their_own(house: House) -> None:
    answer = await house.complete([20, 21])
    desk = HttpServer(create_operator_app(house.gateway), listen("127.0.0.1", 0))
    await desk.start()
    url = f"http://127.0.0.1:{desk.port}"
    try:
        for path in ("/metrics", "/status", f"/story/{answer['id']}", f"/v1/requests/{answer['id']}/explain"):
            async with house.session.get(url + path) as response:
                assert response.status == 200, path
        async with house.session.get(url + "/status") as response:
            assert len((await response.json())["instances"]) == 3
        async with house.session.post(url + "/v1/completions", json={"prompt": "w20"}) as response:
            assert response.status == 404, "it serves no clients"
        change = {"type": "decode", "instance": house.decode[0].address}
        async with house.session.post(url + "/instances/remove", json=change) as response:
            assert response.status == 401, "who sees may not change"
    finally:
        await desk.close()


async def test_a_scraper_may_send_the_key_as_its_token(house: House) -> None:
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    async with house.session.get(house.url + "/metrics", headers=headers) as response:
        assert response.status == 200 and "mooncake_gateway_requests" in await response.text()


async def test_elsewhere_than_on_loopback_operators_need_the_key(tokenizer: Tokenizer) -> None:
    async with running(tokenizer, metrics_host="0.0.0.0") as house:
        desk = HttpServer(create_operator_app(house.gateway), listen("127.0.0.1", 0))
        await desk.start()
        try:
            for headers, status in (({}, 401), (KEY, 200)):
                async with house.session.get(
                    f"http://127.0.0.1:{desk.port}/metrics", headers=headers
                ) as response:
                    assert response.status == status
        finally:
            await desk.close()


@pytest.mark.parametrize(
    ("fields", "may"),
    [
        ({}, True),
        ({"host": "0.0.0.0"}, False),
        ({"host": "0.0.0.0", "api_keys_file": "keys"}, True),
        ({"metrics_host": "0.0.0.0"}, False),
        ({"metrics_host": "0.0.0.0", "admin_api_key": "k"}, True),
    ],
)
def test_beyond_loopback_clients_must_be_known(fields: dict[str, Any], may: bool) -> None:
    settings = GatewaySettings(**fields)
    if may:
        check_exposure(settings, Identity())
    else:
        with pytest.raises(InvalidArgument, match="loopback"):
            check_exposure(settings, Identity())


def test_the_cluster_s_key_is_none_of_clients(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(format_secret(b"k" * 32))
    file.chmod(0o600)
    identity = Identity(SecuritySettings(cluster_key_file=str(file)))
    with pytest.raises(InvalidArgument, match="api-keys-file"):
        check_exposure(GatewaySettings(host="0.0.0.0"), identity)
    insecure = Identity(SecuritySettings(cluster_key_file=str(file), insecure=True))
    check_exposure(GatewaySettings(host="0.0.0.0"), insecure)

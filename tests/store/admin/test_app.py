"""The master's HTTP side over a real socket: every path, its shape, and what it says of bad input."""

from __future__ import annotations

import pytest

from tests.store.admin.conftest import KEY, House


async def test_health_and_leadership(house: House) -> None:
    status, health = await house.ask("/health")
    assert status == 200
    assert health == {
        "status": "ok",
        "role": "leader",
        "ha_state": "serving",
        "service_ready": True,
        "leader_address": f"127.0.0.1:{house.server.port}",
        "view_version": 0,
    }
    assert await house.ask("/role") == (200, "leader")
    assert await house.ask("/ha_status") == (200, "serving")
    assert await house.ask("/ready") == (200, "OK")
    _, leader = await house.ask("/leader")
    assert leader["present"] and leader["leader_address"] == health["leader_address"]


async def test_segments_appear_when_they_are_mounted(house: House) -> None:
    assert await house.ask("/get_all_segments") == (200, "")
    await house.mount()
    assert await house.ask("/get_all_segments") == (200, "a\n")
    assert await house.ask("/query_segment?segment=a") == (
        200,
        "a\nUsed(bytes): 0\nCapacity(bytes): 1048576\n",
    )
    status, text = await house.ask("/query_segment?segment=b")
    assert status == 500 and "'b'" in text
    _, detail = await house.ask("/get_segments_detail")
    assert detail["total_segments"] == 1
    segment = detail["segments"][0]
    assert segment["segment_name"] == "a" and segment["status"] == "OK" and segment["size_human"] == "1MiB"
    assert segment["allocator_usage_percent"] == 0
    assert (await house.ask("/api/v1/segments/status?segment=a"))[1]["status"] == "OK"
    assert (await house.ask("/api/v1/segments/status?segment=b"))[0] == 404


async def test_all_keys_are_listed_in_pieces(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mooncake.store.admin.looking.KEYS_A_PIECE", 3)
    assert await house.ask("/get_all_keys") == (200, "")
    await house.mount()
    await house.put(*(f"k{number}" for number in range(10)))
    assert await house.ask("/get_all_keys") == (200, "".join(f"k{number}\n" for number in range(10)))


async def test_metrics_are_a_page(house: House) -> None:
    status, text = await house.ask("/metrics")
    assert status == 200 and "mooncake_store_objects " in text


@pytest.mark.parametrize(
    "path",
    ["/query_key", "/query_key?key=", "/batch_query_keys", "/query_segment", "/api/v1/segments/status"],
)
async def test_what_is_missing_is_named(house: House, path: str) -> None:
    status, answer = await house.ask(path)
    assert (status, answer["success"], answer["error_code"]) == (400, False, -600)
    assert answer["error"].startswith("key" if "key" in path else "segment")


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/api/v1/drain_jobs", "{"),
        ("POST", "/api/v1/drain_jobs", "{}"),
        ("POST", "/api/v1/drain_jobs", '{"segments": []}'),
        ("POST", "/api/v1/drain_jobs", '{"segments": ["a"], "max_concurrency": 0}'),
        ("POST", "/api/v1/drain_jobs/cancel?job_id=x", ""),
        ("POST", "/api/v1/drain_jobs/cancel", ""),
        ("PUT", "/api/v1/tenant_quotas", '{"requested_quota_bytes": 1}'),
        ("PUT", "/api/v1/tenant_quotas?tenant_id=t", '{"requested_quota_bytes": -1}'),
        ("PUT", "/api/v1/tenant_quotas?tenant_id=t", '{"requested_quota_bytes": "1"}'),
        ("DELETE", "/api/v1/tenant_quotas", ""),
        ("POST", "/api/v1/remove_all?force=perhaps", ""),
        ("GET", "/api/v1/drain_jobs/query?job_id=-1", ""),
    ],
)
async def test_bad_input_is_refused(house: House, method: str, path: str, body: str) -> None:
    status, answer = await house.ask(path, method, data=body)
    assert (status, answer["success"], answer["error_code"]) == (400, False, -600), answer
    assert answer["error"]


async def test_unknown_paths_and_methods(house: House) -> None:
    assert (await house.ask("/nothing"))[0] == 404
    status, answer = await house.ask("/api/v1/remove_all")
    assert status == 405 and "GET /api/v1/remove_all" in answer["error"]


CHANGES = [
    ("POST", "/api/v1/drain_jobs", '{"segments": ["a"]}'),
    ("POST", "/api/v1/drain_jobs/cancel?job_id=1", ""),
    ("PUT", "/api/v1/tenant_quotas?tenant_id=t", '{"requested_quota_bytes": 1}'),
    ("DELETE", "/api/v1/tenant_quotas?tenant_id=t", ""),
    ("POST", "/api/v1/remove_all", ""),
]


@pytest.mark.parametrize(("method", "path", "body"), CHANGES)
@pytest.mark.parametrize("headers", [{}, {"X-API-Key": "wrong"}])
async def test_changes_need_the_key(
    locked: House, method: str, path: str, body: str, headers: dict[str, str]
) -> None:
    status, answer = await locked.ask(path, method, data=body, headers=headers)
    assert status == 401 and "X-API-Key" in answer["error"]
    assert (await locked.ask(path, method, data=body, headers={"X-API-Key": KEY}))[0] != 401
    assert (await locked.ask("/get_all_keys"))[0] == 200


async def test_kv_events_are_off_unless_asked_for(house: House) -> None:
    assert await house.ask("/kv_events/status") == (200, {"enabled": False})

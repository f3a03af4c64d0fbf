# SPDX-License-Identifier: Apache-2.0
"""The master's HTTP side over a real socket: every path, the shape of its response, and its errors."""

from __future__ import annotations

import pytest

from mooncake.store import messages as m
from tests.compat.master.conftest import KEY, MasterWithHttp


async def test_health_and_leadership(served: MasterWithHttp) -> None:
    status, health = await served.ask("/health")
    assert status == 200
    assert health == {
        "status": "ok",
        "role": "leader",
        "ha_state": "serving",
        "service_ready": True,
        "leader_address": f"127.0.0.1:{served.server.port}",
        "view_version": 0,
    }
    assert await served.ask("/role") == (200, "leader")
    assert await served.ask("/ha_status") == (200, "serving")
    assert await served.ask("/ready") == (200, "OK")
    _, leader = await served.ask("/leader")
    assert leader["present"] and leader["leader_address"] == health["leader_address"]


async def test_segments_appear_when_they_are_mounted(served: MasterWithHttp) -> None:
    assert await served.ask("/get_all_segments") == (200, "")
    await served.mount()
    assert await served.ask("/get_all_segments") == (200, "a\n")
    assert await served.ask("/query_segment?segment=a") == (
        200,
        "a\nUsed(bytes): 0\nCapacity(bytes) : 1048576\n",
    )
    status, text = await served.ask("/query_segment?segment=b")
    assert status == 500 and "'b'" in text
    _, detail = await served.ask("/get_segments_detail")
    assert detail["total_segments"] == 1
    segment = detail["segments"][0]
    assert (
        segment["segment_name"] == "a"
        and segment["status"] == "OK"
        and segment["size_human"].endswith(" GiB")
    )
    assert segment["allocator_usage_percent"] == 0 and int(segment["base_address"], 16) > 0
    state = (await served.ask("/api/v1/segments/status?segment=a"))[1]
    assert (state["status"], state["status_name"], state["error_code"]) == (1, "OK", 0)
    assert (await served.ask("/api/v1/segments/status?segment=b"))[0] == 404


async def test_all_keys_are_listed_in_chunks(served: MasterWithHttp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mooncake.compat.master.query_routes.KEYS_PER_CHUNK", 3)
    assert await served.ask("/get_all_keys") == (200, "")
    await served.mount()
    await served.put(*(f"k{number}" for number in range(10)))
    assert await served.ask("/get_all_keys") == (200, "".join(f"k{number}\n" for number in range(10)))


async def test_the_metrics_page(served: MasterWithHttp) -> None:
    status, text = await served.ask("/metrics")
    assert status == 200 and "mooncake_store_objects " in text


@pytest.mark.parametrize(
    "path",
    ["/query_key", "/query_key?key=", "/batch_query_keys", "/query_segment", "/api/v1/segments/status"],
)
async def test_a_missing_parameter_is_named(served: MasterWithHttp, path: str) -> None:
    status, answer = await served.ask(path)
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
        ("PUT", "/api/v1/tenant_quotas?tenant_id=t", '{"requested_quota_bytes": 9223372036854775808}'),
        ("PUT", "/api/v1/tenant_quotas?tenant_id=t", '{"requested_quota_bytes": 18446744073709551616}'),
        ("DELETE", "/api/v1/tenant_quotas", ""),
        ("POST", "/api/v1/remove_all?force=perhaps", ""),
        ("GET", "/api/v1/drain_jobs/query?job_id=-1", ""),
    ],
)
async def test_bad_input_is_refused(served: MasterWithHttp, method: str, path: str, body: str) -> None:
    status, answer = await served.ask(path, method, data=body)
    assert (status, answer["success"], answer["error_code"]) == (400, False, -600), answer
    assert answer["error"]
    assert (await served.ask("/api/v1/tenant_quotas"))[1]["tenant_quotas"] == []


async def test_unknown_paths_and_methods(served: MasterWithHttp) -> None:
    assert (await served.ask("/nothing"))[0] == 404
    status, answer = await served.ask("/api/v1/remove_all")
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
    served: MasterWithHttp, method: str, path: str, body: str, headers: dict[str, str]
) -> None:
    status, answer = await served.ask(path, method, data=body, headers=headers)
    assert status == 401 and "X-API-Key" in answer["error"]
    assert (await served.ask(path, method, data=body, headers={"X-API-Key": KEY}))[0] != 401
    assert (await served.ask("/get_all_keys", headers={}))[0] == 200


@pytest.mark.parametrize(("method", "path", "body"), CHANGES)
@pytest.mark.parametrize("headers", [{}, {"X-API-Key": ""}, {"X-API-Key": KEY}])
async def test_without_a_configured_key_all_changes_are_refused(
    keyless: MasterWithHttp, method: str, path: str, body: str, headers: dict[str, str]
) -> None:
    status, answer = await keyless.ask(path, method, data=body, headers=headers)
    assert status == 403 and "ADMIN_API_KEY" in answer["error"]
    assert (await keyless.ask("/get_all_keys", headers={}))[0] == 200


async def test_kv_events_are_off_by_default(served: MasterWithHttp) -> None:
    assert await served.ask("/kv_events/status") == (
        200,
        {"enabled": False, "published_batches": 0, "published_events": 0, "dropped_events": 0},
    )


async def test_locations_of_keys(served: MasterWithHttp) -> None:
    await served.mount()
    await served.put("a", "b")
    status, found = await served.ask("/query_key?key=a")
    assert status == 200 and found["success"]
    place = found["data"][0]
    assert place == {
        "size_": 100,
        "buffer_address_": 4096,
        "protocol_": "tcp",
        "transport_endpoint_": "a",
    }
    status, found = await served.ask("/query_key?key=c")
    assert status == 404
    assert found == {"success": False, "error_code": -704, "error_message": "OBJECT_NOT_FOUND"}
    _, batch = await served.ask("/batch_query_keys?keys=a,c")
    assert batch["success"] and batch["data"]["a"]["ok"] and batch["data"]["a"]["values"] == [place]
    assert batch["data"]["a"]["error"] is None and batch["data"]["a"]["local_disk_values"] is None
    missing = batch["data"]["c"]
    assert (missing["ok"], missing["error"], missing["values"]) == (False, "OBJECT_NOT_FOUND", None)
    outcomes = (await served.rpc.call(m.Remove(["a", "b"], False), 5)).outcomes
    assert outcomes == [True, True], "a query grants no lease"


async def test_everything_of_a_tenant_is_removed(served: MasterWithHttp) -> None:
    await served.mount()
    await served.put("a", "b")
    await served.put("a", tenant="t")
    assert await served.ask("/get_all_keys?tenant_id=t") == (200, "a\n")
    await served.rpc.call(m.LookupObjects(["a"]), 5)
    _, removed = await served.ask("/api/v1/remove_all", "POST")
    assert (removed["success"], removed["removed_count"], removed["leased_count"]) == (True, 1, 1)
    _, removed = await served.ask("/api/v1/remove_all?force=true&tenant_id=t", "POST")
    assert removed["removed_count"] == 1
    assert await served.ask("/get_all_keys") == (200, "a\n")


async def test_quotas_are_set_reported_and_removed(served: MasterWithHttp) -> None:
    await served.mount()
    path = "/api/v1/tenant_quotas"
    assert await served.ask(path) == (200, {"success": True, "tenant_quotas": []})
    assert (await served.ask(f"{path}?tenant_id=t"))[0] == 404
    status, set_ = await served.ask(f"{path}?tenant_id=t", "PUT", data='{"requested_quota_bytes": 4096}')
    assert (status, set_["requested_quota_bytes"]) == (200, 4096)
    await served.put("a", tenant="t")
    _, reply = await served.ask(f"{path}?tenant_id=t")
    assert (reply["effective_quota_bytes"], reply["charged_bytes"], reply["object_count"]) == (4096, 128, 1)
    _, page = await served.ask("/metrics")
    assert 'mooncake_tenant_quota_requested_bytes{tenant_id="t"} 4096.0' in page
    assert 'mooncake_tenant_quota_charged_bytes{tenant_id="t"} 128.0' in page
    await served.rpc.call(m.PutStart(2, "h", ["b"], [8192], [8192], tenant="t"), 5)
    _, page = await served.ask("/metrics")
    assert 'mooncake_tenant_quota_reject_total{tenant_id="t",reason="quota_exceeded"} 1.0' in page
    await served.rpc.call(m.Remove(["a"], True, tenant="t"), 5)
    assert (await served.ask(f"{path}?tenant_id=t", "DELETE"))[0] == 200
    assert (await served.ask(path))[1]["tenant_quotas"] == []


async def test_a_segment_is_drained_by_a_job(served: MasterWithHttp) -> None:
    await served.mount()
    await served.mount("b")
    status, job = await served.ask("/api/v1/drain_jobs", "POST", data='{"segments": ["a"]}')
    assert (status, job["status"]) == (200, "CREATED")
    _, reply = await served.ask(f"/api/v1/drain_jobs/query?job_id={job['job_id']}")
    assert (reply["status"], reply["failed_units"], reply["active_units"]) == ("SUCCEEDED", 0, 0)
    assert (await served.ask("/api/v1/segments/status?segment=a"))[1]["status_name"] == "DRAINED"
    status, answer = await served.ask("/api/v1/drain_jobs", "POST", data='{"segments": ["c"]}')
    assert (status, answer["error_code"]) == (404, -101)
    for path, method in (("query", "GET"), ("cancel", "POST")):
        status, answer = await served.ask(f"/api/v1/drain_jobs/{path}?job_id=77", method)
        assert (status, answer["error_code"]) == (404, -1402)


async def test_a_running_drain_is_cancelled(served: MasterWithHttp) -> None:
    await served.mount()
    await served.put("k")
    await served.mount("b")
    _, job = await served.ask("/api/v1/drain_jobs", "POST", data='{"segments": ["a"]}')
    _, reply = await served.ask(f"/api/v1/drain_jobs/query?job_id={job['job_id']}")
    assert reply["status"] in ("CREATED", "RUNNING") and reply["succeeded_units"] == 0
    assert (await served.ask("/api/v1/segments/status?segment=a"))[1]["status_name"] == "DRAINING"
    _, reply = await served.ask(f"/api/v1/drain_jobs/cancel?job_id={job['job_id']}", "POST")
    assert reply["status"] == "CANCELED"


async def test_the_status_and_the_metrics_name_reporters_of_corruption(served: MasterWithHttp) -> None:
    await served.mount()
    await served.put("k")
    object_id = served.server.master.objects.readable["k"].object_id
    await served.rpc.call(m.Corrupt(["k"], [object_id], reporter='bad "one"'), 5)
    assert (await served.ask("/status", headers={}))[0] == 401, "the status names hosts"
    code, status = await served.ask("/status", headers={"X-API-Key": KEY})
    assert code == 200 and status["counts"]["corrupt_reports"] == 1 and status["num_objects"] == 1
    (reporter,) = status["reporters"]
    assert (reporter["reporter"], reporter["num_reports"], reporter["num_refuted"]) == ('bad "one"', 1, 0)
    _, text = await served.ask("/metrics")
    assert 'mooncake_store_reporters{outcome="all",reporter="bad \\"one\\""} 1.0' in text
    assert "mooncake_store_corrupt_reports_total 1.0" in text

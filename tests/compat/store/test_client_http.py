# SPDX-License-Identifier: Apache-2.0
"""Health and metrics of a client over HTTP."""

from __future__ import annotations

import json
import socket
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from mooncake.compat.store.client_http import ClientHttpServer
from mooncake.compat.store.client_metrics import ClientMetrics, kind_of
from mooncake.security import Identity, SecuritySettings
from mooncake.security.keys import format_secret
from mooncake.store import MooncakeDistributedStore
from tests.compat.store.servers import RunningMaster, a_store
from tests.contract.metadata_servers import free_port

MIB = 1 << 20


def fetch(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_a_healthy_client(master: RunningMaster, caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    with a_store(master, enable_client_http_server=True, client_http_port=port) as store:
        assert store.put("k", b"v" * 1000) == 0 and len(store.get("k")) == 1000
        assert store.batch_is_exist(["k"]) == [1]
        status, body = fetch(port, "/health")
        assert (status, json.loads(body)) == (200, {"status": "healthy", "code": 0})
        _, metrics = fetch(port, "/metrics")
        lines = metrics.splitlines()
        assert "mooncake_transfer_read_bytes 1000" in lines and "mooncake_transfer_write_bytes 1000" in lines
        assert "mooncake_transfer_put_latency_count 1" in lines
        assert 'mooncake_transfer_get_latency_bucket{le="+Inf"} 1' in lines
        assert "mooncake_store_put_seconds_count" in metrics, "this package's own metrics are there, too"
        assert fetch(port, "/metrics/summary")[1].startswith("read 1000 B; write 1000 B; get 1 calls")
        assert fetch(port, "/elsewhere")[0] == 404
        other = MooncakeDistributedStore()
        arguments = ("127.0.0.1", "P2PHANDSHAKE", 0, MIB, "tcp", "", master.address)
        assert other.setup(*arguments, enable_client_http_server=True, client_http_port=port) == 0
        assert f"client_http_port {port} is in use" in caplog.text
        assert other.get("k") == b"v" * 1000
        other.close()
        assert fetch(port, "/health")[0] == 200, "the first one has kept its port"
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=30)


@pytest.mark.parametrize(("health", "state"), [(1, "not_initialized"), (2, "master_unreachable")])
def test_an_unhealthy_client(health: int, state: str) -> None:
    endpoint = ClientHttpServer(0, lambda: health, ClientMetrics())
    status, body = fetch(endpoint.port, "/health")
    assert (status, json.loads(body)) == (503, {"status": state, "code": health})
    endpoint.close()


def test_unauthenticated_callers_get_no_page_and_no_thread(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.touch(0o600)
    file.write_text(format_secret(b"k" * 32))
    identity = Identity(SecuritySettings(cluster_key_file=str(file)))
    endpoint = ClientHttpServer(0, lambda: 0, ClientMetrics(), identity)
    num_threads = threading.active_count()
    idle = [socket.create_connection(("127.0.0.1", endpoint.port), timeout=30) for _ in range(100)]
    try:
        assert fetch(endpoint.port, "/health")[0] == 200
        assert [fetch(endpoint.port, path)[0] for path in ("/metrics", "/metrics/summary", "/x")] == [401] * 3
        assert threading.active_count() < num_threads + 50
    finally:
        for one in idle:
            one.close()
        endpoint.close()


def test_kinds_of_calls() -> None:
    assert [kind_of(call) for call in ("get", "get_into", "batch_get_into", "get_batch")] == [
        "get",
        "get",
        "batch_get",
        "batch_get",
    ]
    assert [kind_of(call) for call in ("put_parts", "upsert", "batch_put_from", "upsert_batch")] == [
        "put",
        "put",
        "batch_put",
        "batch_put",
    ]
    for call in ("is_exist", "remove", "batch_get_session_start", "get_size", "register_buffer"):
        assert kind_of(call) == ""

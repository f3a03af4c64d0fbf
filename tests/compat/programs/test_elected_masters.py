# SPDX-License-Identifier: Apache-2.0
"""Two ``mooncake_master`` processes: what the leader and the standby answer by HTTP, and the failover."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from mooncake.compat.programs.master import main
from tests.contract.metadata_servers import MetadataServer
from tests.waiting import wait_until

pytestmark = pytest.mark.processes
PATIENCE_S = 30.0
KEY = {"X-API-Key": "a key of this test"}


class Program:
    """One ``mooncake_master``."""

    def __init__(self, *flags: str) -> None:
        command = [sys.executable, "-c", f"from {main.__module__} import main; main()"]
        ports = ["--rpc_port=0", "--port=0", "--metrics_port=0", "--rpc_address=127.0.0.1"]
        self.process = subprocess.Popen(
            [*command, *ports, "--metrics_host=127.0.0.1", *flags],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "ADMIN_API_KEY": KEY["X-API-Key"]},
        )
        assert self.process.stderr is not None
        self.url = self.address = ""
        for line in self.process.stderr:
            found = re.search(r"ready role=master address=(\S+) metrics=(\S+)", line)
            if found:
                self.address, self.url = found[1], f"http://{found[2]}"
            if self.address and line.rstrip().endswith(
                f"Master service started on port {self.address.rpartition(':')[2]}"
            ):
                return  # a standby logs it as well
        pytest.fail("the master did not start")

    def ask(self, path: str, method: str = "GET") -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(
                urllib.request.Request(self.url + path, method=method, headers=KEY), timeout=10
            ) as answer:
                text = answer.read().decode()
                return answer.status, json.loads(text) if text.startswith("{") else text
        except urllib.error.HTTPError as error:
            text = error.read().decode()
            return error.code, json.loads(text) if text.startswith("{") else text

    def stop(self) -> None:
        self.process.kill()
        self.process.wait(10)


@pytest.fixture(params=["etcd", "redis"])
def flags(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    server = MetadataServer(request.param)
    if request.param == "etcd":
        yield ["--enable_ha=true", f"--etcd_endpoints={server.address}"]
    else:
        yield ["--enable-ha", "--ha-backend-type=redis", f"--ha_backend_connstring={server.address}"]
    server.stop()


def test_one_leads_and_the_other_takes_over(flags: list[str]) -> None:
    first = Program(*flags)
    second = None
    try:
        wait_until(lambda: first.ask("/role") == (200, "leader"))
        second = Program(*flags)
        wait_until(lambda: second.ask("/leader")[1]["leader_address"] == first.address)
        wait_until(lambda: second.ask("/ha_status")[1] == "standby")
        _, health = second.ask("/health")
        assert (health["status"], health["role"], health["service_ready"]) == ("ok", "standby", False)
        assert second.ask("/role") == (200, "standby")
        assert second.ask("/ready") == (503, "standby") and first.ask("/ready") == (200, "OK")
        status, answer = second.ask("/api/v1/remove_all", "POST")
        assert (status, answer["error_code"]) == (503, -1010)
        assert first.address in answer["error"]
        assert second.ask("/metrics")[0] == 200
        assert first.ask("/api/v1/remove_all", "POST")[0] == 200
        first.process.send_signal(signal.SIGKILL)
        wait_until(lambda: second.ask("/role") == (200, "leader"))
        assert second.ask("/api/v1/remove_all", "POST")[0] == 200
        assert second.ask("/leader")[1]["leader_address"] == second.address
    finally:
        first.stop()
        if second is not None:
            second.stop()

# SPDX-License-Identifier: Apache-2.0
"""The flags of the demos' proxies become the gateway's."""

from __future__ import annotations

import subprocess
import sys

import pytest

from mooncake.compat.programs.proxy import gateway_flags
from mooncake.gateway.gateway import GatewaySettings, read_instances


def flags_of(*given: str) -> dict[str, list[str]]:
    """Values of each flag."""
    found: dict[str, list[str]] = {}
    for one in gateway_flags(given, "k"):
        if one.startswith("--"):
            flag = one
            found[flag] = []
        else:
            found[flag].append(one)
    return found


def test_hosts_and_ports_are_paired() -> None:
    flags = flags_of(
        "--port",
        "9000",
        "--prefiller-hosts",
        "a",
        "b",
        "--prefiller-ports",
        "1",
        "2",
        "--decoder-host",
        "c",
        "--decoder-port",
        "3",
    )
    assert (flags["--prefill"], flags["--decode"]) == (["a:1", "b:2"], ["c:3"])
    assert (flags["--port"], flags["--protocol"], flags["--scheduling"]) == (
        ["9000"],
        ["sequential"],
        ["round_robin"],
    )
    assert flags["--engine-api-key"] == ["k"]
    assert flags_of()["--prefill"] == ["localhost:8100"] and flags_of()["--decode"] == ["localhost:8200"]
    with pytest.raises(SystemExit, match="prefiller"):
        flags_of("--prefiller-hosts", "a", "b")


def test_flags_of_both_vllm_proxies() -> None:
    flags = flags_of("--prefill", "http://a:1", "8998", "--prefill", "http://b:1", "--decode", "http://c:2")
    assert flags["--protocol"] == ["bootstrap"]
    assert read_instances("prefill", flags["--prefill"]) == [("a:1", 8998), ("b:1", None)]
    flags = flags_of(
        "-m", "M", "-p", "a:1", "b:1", "-d", "c:2", "--scheduling", "random", "--log-level", "debug"
    )
    assert (flags["--model"], flags["--prefill"], flags["--protocol"]) == (
        ["M"],
        ["a:1", "b:1"],
        ["sequential"],
    )
    assert (flags["--scheduling"], flags["--log-level"]) == (["random"], ["debug"])
    assert flags_of("-p", "a:1", "-d", "c:2", "--protocol", "push")["--protocol"] == ["push"]


def test_it_listens_where_the_demo_with_these_flags_does() -> None:
    assert flags_of()["--host"] == flags_of("--decoder-host", "c")["--host"] == ["127.0.0.1"]
    assert flags_of("-p", "a:1", "-d", "c:2")["--host"] == flags_of("-d", "c:2")["--host"] == ["0.0.0.0"]
    assert flags_of("-p", "a:1", "-d", "c:2", "--host", "127.0.0.2")["--host"] == ["127.0.0.2"]


def test_the_module_starts_a_gateway_with_them() -> None:
    command = [
        sys.executable,
        "-m",
        "mooncake.vllm_v1_proxy_server",
        "--decoder-ports",
        "7",
        "--print-config",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "localhost:7" in done.stdout and "sequential" in done.stdout


def test_invalid_instances_name_the_flag() -> None:
    with pytest.raises(Exception, match="prefill"):
        GatewaySettings(prefill=("8998",))
    with pytest.raises(Exception, match="decode"):
        GatewaySettings(decode=("host",))

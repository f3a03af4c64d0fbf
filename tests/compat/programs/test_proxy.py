"""The flags of the demos' proxies become the gateway's."""

from __future__ import annotations

import subprocess
import sys

import pytest

from mooncake.compat.programs.proxy import gateway_words
from mooncake.gateway.gateway import GatewaySettings, read_instances


def words(*given: str) -> dict[str, list[str]]:
    """Of each flag its values."""
    found: dict[str, list[str]] = {}
    for word in gateway_words(given, "k"):
        if word.startswith("--"):
            flag = word
            found[flag] = []
        else:
            found[flag].append(word)
    return found


def test_hosts_and_ports_are_paired() -> None:
    asked = words(
        *("--port", "9000", "--prefiller-hosts", "a", "b", "--prefiller-ports", "1", "2"),
        *("--decoder-host", "c", "--decoder-port", "3"),
    )
    assert (asked["--prefill"], asked["--decode"]) == (["a:1", "b:2"], ["c:3"])
    assert (asked["--port"], asked["--protocol"], asked["--scheduling"]) == (
        ["9000"],
        ["sequential"],
        ["round_robin"],
    )
    assert asked["--engine-api-key"] == ["k"]
    assert words()["--prefill"] == ["localhost:8100"] and words()["--decode"] == ["localhost:8200"]
    with pytest.raises(SystemExit, match="prefiller"):
        words("--prefiller-hosts", "a", "b")


def test_both_proxies_of_vllm_are_understood() -> None:
    asked = words("--prefill", "http://a:1", "8998", "--prefill", "http://b:1", "--decode", "http://c:2")
    assert asked["--protocol"] == ["bootstrap"]
    assert read_instances("prefill", asked["--prefill"]) == [("a:1", 8998), ("b:1", None)]
    asked = words(
        "-m", "M", "-p", "a:1", "b:1", "-d", "c:2", "--scheduling", "random", "--log-level", "debug"
    )
    assert (asked["--model"], asked["--prefill"], asked["--protocol"]) == (
        ["M"],
        ["a:1", "b:1"],
        ["sequential"],
    )
    assert (asked["--scheduling"], asked["--log-level"]) == (["random"], ["debug"])
    assert words("-p", "a:1", "-d", "c:2", "--protocol", "push")["--protocol"] == ["push"]


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


def test_what_is_no_instance_is_named() -> None:
    with pytest.raises(Exception, match="prefill"):
        GatewaySettings(prefill=("8998",))
    with pytest.raises(Exception, match="decode"):
        GatewaySettings(decode=("host",))

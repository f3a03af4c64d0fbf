# SPDX-License-Identifier: Apache-2.0
"""Bad input on every interface: the error names what is wrong, and nothing else is affected."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import ADMIN_KEY, Cluster

pytestmark = [pytest.mark.processes, pytest.mark.model, pytest.mark.timeout(600)]

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]

CASES: list[tuple[str, str, Any, int, str | None, str | None]] = [
    ("malformed JSON", CHAT, b'{"model": ', 400, None, "invalid_json"),
    ("not an object", CHAT, b"[1]", 400, None, None),
    ("unknown model", CHAT, {"model": "gpt-7", "messages": HELLO}, 404, "model", "model_not_found"),
    ("messages missing", CHAT, {"model": "smollm2"}, 400, "messages", None),
    ("messages empty", CHAT, {"model": "smollm2", "messages": []}, 400, "messages", None),
    ("role unknown", CHAT, {"messages": [{"role": "king", "content": "x"}]}, 400, "messages[0].role", None),
    ("temperature text", CHAT, {"messages": HELLO, "temperature": "hot"}, 400, "temperature", "invalid_type"),
    ("temperature high", CHAT, {"messages": HELLO, "temperature": 9}, 400, "temperature", None),
    ("max_tokens zero", TEXT, {"prompt": "x", "max_tokens": 0}, 400, "max_tokens", None),
    ("prompt of wrong type", TEXT, {"prompt": {"a": 1}}, 400, "prompt", None),
    ("token out of range", TEXT, {"prompt": [1, 10**7]}, 400, "prompt", None),
    ("prompt too long", TEXT, {"prompt": [7] * 9000}, 400, "prompt", "context_length_exceeded"),
]


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "code"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_a_bad_request_is_named(
    cluster: Cluster, path: str, body: Any, status: int, param: str | None, code: str | None
) -> None:
    answer = cluster.post(path, body)
    assert answer.status == status, answer
    error = answer.body["error"]
    assert error["message"]
    assert error["type"]
    assert error["param"] == param
    if code is not None:
        assert error["code"] == code
    assert cluster.complete("Hello", 1).status == 200


def test_a_wrong_admin_key_changes_nothing(cluster: Cluster) -> None:
    before = cluster.get("/status").body["instances"]
    change = {"type": "prefill", "instance": "127.0.0.1:9"}
    for headers in ({"X-API-Key": "wrong"}, {}):
        for path in ("/instances/add", "/instances/remove"):
            answer = cluster.post(path, change, headers)
            assert answer.status == 401, answer
            assert answer.body["error"]["message"]
    after = cluster.get("/status").body["instances"]
    assert [entry["instance"] for entry in after] == [entry["instance"] for entry in before]


def test_instances_are_added_and_removed_with_the_right_key(cluster: Cluster) -> None:
    headers = {"X-API-Key": ADMIN_KEY}
    address = cluster.address("decode-1")
    change = {"type": "decode", "instance": address}
    removed = cluster.post("/instances/remove", change, headers)
    assert removed.status == 200, removed
    names = [entry["instance"] for entry in cluster.get("/status").body["instances"]]
    assert address not in names
    assert cluster.complete("Hello", 1).status == 200
    added = cluster.post("/instances/add", change, headers)
    assert added.status == 200, added
    cluster.wait_until_routable()
    names = [entry["instance"] for entry in cluster.get("/status").body["instances"]]
    assert address in names


def mooncake(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mooncake", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("role", ["gateway", "master", "prefill-0", "metadata", "node", "conductor"])
def test_a_port_in_use_is_named(cluster: Cluster, role: str) -> None:
    port = cluster.address(role).rpartition(":")[2]
    command = "worker" if role.startswith("prefill") else role
    flags = {"node": ("--pool-size", "16MiB", "--master", cluster.address("master"))}.get(command, ())
    done = mooncake(command, "--port", port, *flags)
    assert done.returncode == 2, done
    assert port in done.stderr
    assert "Traceback" not in done.stderr
    assert cluster.complete("Hello", 1).status == 200


def test_a_missing_or_damaged_model_is_named(tmp_path: Path) -> None:
    missing = mooncake("worker", "--port", "0", "--model", str(tmp_path / "nowhere"))
    assert missing.returncode == 2
    assert "nowhere" in missing.stderr
    assert "Traceback" not in missing.stderr
    (tmp_path / "config.json").write_text("{")
    damaged = mooncake("worker", "--port", "0", "--model", str(tmp_path))
    assert damaged.returncode == 2
    assert "config.json" in damaged.stderr
    assert "Traceback" not in damaged.stderr

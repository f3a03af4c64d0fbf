# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import io
import json
from pathlib import Path

from rich.console import Console

from mooncake.cli.processes import Processes, RolePlan
from mooncake.cli.status_board import Credentials, StatusBoard, welcome, write_status
from mooncake.cli.supervisor import RoleExited, RoleReady, RoleSpec, StartAll
from mooncake.security import SecuritySettings


def some_processes(folder: Path) -> Processes:
    plans = [
        RolePlan(RoleSpec("master"), ("true",), "127.0.0.1", 50051),
        RolePlan(RoleSpec("node", ("master",)), ("true",), "127.0.0.1", 50052),
        RolePlan(RoleSpec("gateway", ("node",)), ("true",), "127.0.0.1", 8000),
    ]
    processes = Processes(plans, folder, lambda *rest: None, lambda: None, lambda: None)
    for event in (StartAll(), RoleReady("master"), RoleExited("node", 1)):
        processes.supervisor.handle(event, 10.0)  # the core alone: no process is started
    return processes


def test_the_table_shows_every_role(tmp_path: Path) -> None:
    out = io.StringIO()
    board = StatusBoard(Console(file=out, width=120))
    board.processes = some_processes(tmp_path)
    board.console.print(board.table())
    lines = {line.split()[0]: line for line in out.getvalue().splitlines() if line.strip()}
    assert "ready" in lines["master"]
    assert "127.0.0.1:50051" in lines["master"]
    assert "died, restart in" in lines["node"]
    assert "waiting" in lines["gateway"]


def test_without_a_terminal_there_are_plain_lines() -> None:
    out = io.StringIO()
    with StatusBoard(Console(file=out, width=20)) as board:
        board.say("node", "died (exit status 1); restarting in 0.5 s", ["error: [red]no[/red] memory"])
        board.say("", "everything has stopped")
    assert out.getvalue() == (
        "node: died (exit status 1); restarting in 0.5 s\n"
        "    node | error: [red]no[/red] memory\n"
        "mooncake: everything has stopped\n"
    )


def test_the_status_file_is_replaced_whole(tmp_path: Path) -> None:
    processes = some_processes(tmp_path)
    path = tmp_path / "status.json"
    for is_ready in (False, True):
        write_status(path, processes, "http://127.0.0.1:8000", is_ready)
        status = json.loads(path.read_text())
        assert status["is_ready"] is is_ready
    assert status["url"] == "http://127.0.0.1:8000"
    assert status["roles"]["master"] == {
        "state": "ready",
        "pid": None,
        "address": "127.0.0.1:50051",
        "num_starts": 1,
        "log": str(tmp_path / "master.log"),
    }
    assert [file.name for file in tmp_path.iterdir()] == ["status.json"]


def test_the_welcome_has_a_line_that_can_be_pasted() -> None:
    text = welcome("http://127.0.0.1:8000", "smollm2", "127.0.0.1:50051", "key", Path("/logs"))
    [body] = [line.strip().removeprefix("-d ") for line in text.splitlines() if line.strip().startswith("-d")]
    assert json.loads(body.strip("'")) == {
        "model": "smollm2",
        "temperature": 0,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
    }
    assert "curl -s http://127.0.0.1:8000/v1/chat/completions" in text
    assert "X-API-Key: key" in text


def test_the_welcome_says_what_to_show() -> None:
    security = SecuritySettings("/c/node.pem", "/c/node.key", "/c/the ca.pem", cluster_key_file="/c/k")
    for shows in (True, False):
        given = Credentials(security, shows)
        text = welcome("https://127.0.0.1:8000", "m", "127.0.0.1:50051", "key", Path("/logs"), given)
        curl = (
            "curl -s --cacert '/c/the ca.pem' --cert /c/node.pem --key /c/node.key https://127.0.0.1:8000/v1/"
        )
        chat = "--tls-ca '/c/the ca.pem' --tls-cert /c/node.pem --tls-key /c/node.key"
        assert (curl in text, chat in text) == (shows, shows)
        for name in ("TLS_CERT=/c/node.pem", "TLS_CA='/c/the ca.pem'", "CLUSTER_KEY_FILE=/c/k"):
            assert f"MOONCAKE_SECURITY_{name}" in text

# SPDX-License-Identifier: Apache-2.0
"""``mooncake top`` with and without a gateway, a store and a key, wide and narrow."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from mooncake.cli import main
from tests.cli.test_cluster_status import page
from tests.store.test_daemon import daemon

pytestmark = pytest.mark.processes

KEY = "operators-key"
STATUS = {
    "model": "tiny",
    "degraded": "",
    "prefill_node_count": 1,
    "decode_node_count": 1,
    "instances": [
        {
            "instance": "10.0.0.1:8100",
            "role": "decode",
            "health": "ready",
            "detail": "answers",
            "num_requests": 3,
        },
        {
            "instance": "10.0.0.2:8100",
            "role": "prefill",
            "health": "lost",
            "detail": "\x1b[2Jgone",
            "queued_tokens": 77,
        },
    ],
    "requests_in_flight": 3,
    "scheduling": "overlap",
    "conductor": "inside this gateway",
    "scaling": [{"role": "prefill", "desired": 2, "serving": 1, "reason": "not of interest here"}],
}
PUBLIC = {name: STATUS[name] for name in ("model", "degraded", "prefill_node_count", "decode_node_count")}
UNREACHABLE = "127.0.0.1:1"


class GatewayPages(BaseHTTPRequestHandler):
    """A gateway's two pages."""

    def do_GET(self) -> None:
        if self.path.startswith("/elsewhere/"):
            self.send_response(302)
            self.send_header("Location", "/status")
            self.end_headers()
            return
        knows = self.headers.get("X-API-Key") == KEY
        content = json.dumps(STATUS if knows else PUBLIC).encode()
        if self.path == "/metrics":
            content = page(20, failed=2, cached=30, prompt=40).encode() if knows else b"{}"
        self.send_response(200 if knows or self.path == "/status" else 401)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def gateway() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), GatewayPages)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def master() -> Iterator[str]:
    with daemon("--capacity-dram", "0.064", "--name", "here") as (address, _, _):
        yield address


def shown(capsys: pytest.CaptureFixture[str], *words: str, key: str = KEY) -> tuple[str, str, int]:
    with pytest.raises(SystemExit) as ended:
        main(["top", "--admin-api-key", key, *words])
    assert isinstance(ended.value.code, int)
    return *capsys.readouterr(), ended.value.code


def test_everything(
    gateway: str, master: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "150")
    text, _, status = shown(capsys, "--url", gateway, "--master", master)
    assert status == 0 and "\x1b" not in text, "no colours, and no commands to a terminal, in a pipe"
    for part in (
        "model tiny",
        "prefill 0 of 1 ready",
        "decode 1 of 1 ready",
        "3 in flight",
        "desired: prefill 2",
    ):
        assert part in text
    assert "requests 20, rejected 0, failed 2, output tokens 200" in text
    assert "prompt tokens cached 75%; TTFT p50 175 ms, p95 242 ms; TBT -" in text
    rows = text[text.index("instance") :].splitlines()
    assert rows[1].split()[:5] == ["10.0.0.2:8100", "prefill", "lost", "0", "77"]
    assert rows[2].split()[:4] == ["10.0.0.1:8100", "decode", "ready", "3"]
    assert "here" in text and "61 MiB" in text


def test_a_narrow_terminal(
    gateway: str, master: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("COLUMNS", "60"), ("LINES", "25"), ("FORCE_COLOR", "1"), ("TERM", "dumb")):
        monkeypatch.setenv(name, value)  # a terminal without colours
    text, _, _ = shown(capsys, "--once", "--url", gateway, "--master", master)
    tables = [
        line for line in text.splitlines() if line.startswith(("10.0.0", "instance", "here", "segment"))
    ]
    assert len(tables) == 5 and all(len(line) <= 60 for line in tables), tables
    assert "detail" not in text and "tasks" not in text


def test_a_pipe_gets_whole_values(
    gateway: str, master: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    text, _, _ = shown(capsys, "--once", "--url", gateway, "--master", master)
    assert "…" not in text and "tasks" in text and "detail" in text, text


def test_without_a_store(gateway: str, capsys: pytest.CaptureFixture[str]) -> None:
    text, _, status = shown(capsys, "--url", gateway, "--master", UNREACHABLE)
    assert status == 0 and "10.0.0.1:8100" in text and f"no store answers at {UNREACHABLE}" in text


def test_without_a_gateway(master: str, capsys: pytest.CaptureFixture[str]) -> None:
    text, _, status = shown(capsys, "--url", f"http://{UNREACHABLE}", "--master", master)
    assert status == 0 and "no gateway answers" in text and "61 MiB" in text


def test_with_neither(capsys: pytest.CaptureFixture[str]) -> None:
    _, errors, status = shown(capsys, "--url", f"http://{UNREACHABLE}", "--master", UNREACHABLE)
    assert status == 1 and "neither the gateway nor the store" in errors


def test_without_the_key_only_numbers_are_shown(gateway: str, capsys: pytest.CaptureFixture[str]) -> None:
    text, _, _ = shown(capsys, "--url", gateway, "--master", UNREACHABLE, key="wrong")
    assert "1 prefill, 1 decode instances" in text and "--admin-api-key" in text
    assert "10.0.0.1" not in text


def test_each_master_of_a_list_is_shown(master: str, capsys: pytest.CaptureFixture[str]) -> None:
    text, _, _ = shown(capsys, "--url", f"http://{UNREACHABLE}", "--master", f"{master},{UNREACHABLE}")
    assert f"{master}  leader in term 0" in text and "unreachable: " in text


def test_json(gateway: str, master: str, capsys: pytest.CaptureFixture[str]) -> None:
    text, _, status = shown(capsys, "--json", "--url", gateway, "--master", master)
    found = json.loads(text)
    assert status == 0 and found["gateway"]["instances"][0]["num_requests"] == 3
    assert found["traffic"]["cached_share"] == 0.75
    assert found["store"]["segments"][0]["segment"] == "here" and found["masters"] == []


def test_a_terminal_is_refreshed_until_ctrl_c(gateway: str, master: str) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "mooncake", "top", "--url", gateway, "--master", master]
    environment = {**os.environ, "ADMIN_API_KEY": KEY, "TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
    # Under a shell's background job SIGINT is ignored, by children as well.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(
            [*command, "--every-s", "0.2"], stdout=theirs, stderr=subprocess.PIPE, env=environment
        )
    finally:
        signal.signal(signal.SIGINT, before)
    os.close(theirs)
    shown, is_stopped = b"", False
    with contextlib.suppress(OSError):  # the other side was closed
        while part := os.read(ours, 1 << 16):
            shown += part
            if b"last " in shown and not is_stopped:  # the second look has a span of time
                is_stopped = True
                process.send_signal(signal.SIGINT)
    os.close(ours)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, b"")
    assert b"10.0.0.1:8100" in shown and b"61 MiB" in shown
    assert b"\x1b[?1049l" in shown and b"\x1b[?25h" in shown, "the screen and the cursor are restored"


def test_the_key_is_not_sent_where_a_server_redirects(
    gateway: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text, _, _ = shown(capsys, "--url", f"{gateway}/elsewhere", "--master", UNREACHABLE)
    assert "answers 302" in text and "tiny" not in text


def test_a_wrong_address_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    _, errors, status = shown(capsys, "--url", "gateway:8000")
    assert status == 2 and "--url" in errors

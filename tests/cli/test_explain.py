# SPDX-License-Identifier: Apache-2.0
"""What ``mooncake explain`` prints of an answer; a query that succeeds is tested with a cluster.

What becomes of a URL that is none, and of a server that is no gateway, is the same for all commands with a
``--url``.
"""

from __future__ import annotations

import http.server
import io
import json
import socketserver
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from mooncake.cli.certs import CertsSettings, make
from mooncake.cli.explain import misses, show, show_misses
from mooncake.conductor.explanation import ActualTimes, CandidateInstance, Explanation
from mooncake.http.worker_stats import StageStats
from mooncake.security import Identity, SecuritySettings, install_identity
from tests.cli.conftest import Run

QUERIES = ("explain x", "misses", "trace x", "what-if", "top --once --master 127.0.0.1:1", "chat")


class NoHttp(socketserver.BaseRequestHandler):
    """Answers each connection as a server of another protocol does."""

    def handle(self) -> None:
        self.request.recv(4096)
        self.request.sendall(b"SSH-2.0-\x1b[2J\r\n")


@pytest.fixture(scope="module")
def no_http() -> Iterator[str]:
    """URL of a server that does not speak HTTP."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), NoHttp) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def shown(actual: ActualTimes, *candidates: CandidateInstance) -> str:
    explanation = Explanation(
        "r",
        1.0,
        100,
        "finished",
        "overlap",
        "soonest",
        "p",
        "d",
        "",
        1,
        [*candidates],
        None,
        actual,
        None,
        [],
    )
    found: dict[str, Any] = msgspec.to_builtins(explanation)
    output = io.StringIO()
    show(Console(file=output, width=120), found)
    return output.getvalue()


def test_the_stages_of_a_group_are_bars_on_one_axis() -> None:
    stages = [StageStats(0, 16, 4, 0.0, 3.0, 2.9, 0.1), StageStats(16, 30, 4, 1.0, 4.0, 2.5, 1.4)]
    lines = shown(ActualTimes(prefill_s=4.1, stages=stages)).splitlines()
    assert any("4 chunks in 4.000 s" in line for line in lines)
    first, second = (line for line in lines if "━━━━━" in line and " s " in line)
    assert "0-15" in first and "2.900 s" in first and "0.100 s" in first
    assert "16-29" in second and "2.500 s" in second and "1.400 s" in second
    assert first.count("━") == second.count("━") == 30, "three quarters of the time each"
    assert first.index("━") + 10 == second.index("━")


def test_without_a_group_there_is_no_such_table() -> None:
    assert "stages" not in shown(ActualTimes(prefill_s=4.1))


def test_an_instance_s_ipv6_address_keeps_its_brackets() -> None:
    text = shown(
        ActualTimes(),
        CandidateInstance("[fd00::11]:8101", 1.0),
        CandidateInstance("[fd00::12]:8101", why_not="it drains"),
    )
    assert "[fd00::11]:8101" in text and "[fd00::12]:8101" in text


LEFT = {
    "offset": 31,
    "unit": "tokens",
    "token": "9",
    "kind": "tool_order",
    "detail": "3 tools are in another order.",
    "lost_tokens": 40,
    "sibling": "cmpl-first",
    "sibling_age_s": 2.5,
    "is_same_session": True,
    "ours": "tools: [a] b",
    "theirs": "tools: [b] a",
    "rule": "sort-tools",
}
TOKENS = {
    "hit": 50,
    "prompt_changed": 40,
    "evicted": 0,
    "elsewhere": 0,
    "in_flight": 0,
    "block_tail": 0,
    "new": 10,
}


def shown_misses(left: dict[str, Any] | None) -> str:
    report = {"tokens": TOKENS, "attainable_tokens": 90, "left_sibling": left}
    output = io.StringIO()
    show_misses(Console(file=output, width=120), report)
    return output.getvalue()


def test_the_token_is_named_at_which_a_prompt_left_its_sibling() -> None:
    text = shown_misses(LEFT)
    assert "50 hit, 40 prompt changed, 10 new; hit rate 50.0%, attainable 90.0%" in text
    assert "left its nearest sibling at token 31: tool order. 3 tools are in another order. Lost: 40" in text
    assert "tools: [a] b" in text and "tools: [b] a" in text and "cmpl-first" in text
    assert "avoid it: sort-tools" in text


def test_a_sibling_s_text_that_is_not_shown_says_how_to_see_it() -> None:
    assert "--admin-api-key" in shown_misses({**LEFT, "theirs": None, "sibling": ""})
    assert "sibling" not in shown_misses(None)


def test_sums_are_shown_as_parts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"tenant": "", "model": "m", "tokens": TOKENS, "hit_rate": 0.5, "attainable_hit_rate": 0.9}
    difference = {"kind": "tool_order", "prompts": 3, "lost_tokens": 40, "rule": "sort-tools"}
    answer = {"tenants": [row], "differences": [difference], "prompts_remembered": 4}
    monkeypatch.setattr("mooncake.cli.explain._ask", lambda *arguments: answer)
    for width in ("150", "80", "60"):
        monkeypatch.setenv("COLUMNS", width)
        misses("http://127.0.0.1:1", "", as_json=False)
        text = capsys.readouterr().out
        assert all(number in text for number in (" 100 ", "50.0%", "40.0%", "10.0%", "90.0%")), text
        assert text.count("0.0%") == 9 and "…" not in text, f"no number is cut at {width} columns"
        assert "default" in text, "the tenant of requests that name none"
        assert "tool order" in text and "sort-tools" in text


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:abc", "http://[::1", "http://a..b", "http://a b", "ftp://a"]
)
@pytest.mark.parametrize("query", QUERIES)
def test_a_url_that_is_none_is_named(mooncake: Run, query: str, url: str) -> None:
    done = mooncake(*query.split(), "--url", url)
    assert done.returncode == 2
    assert f"is {url!r}; allowed: an address such as http://127.0.0.1:8000" in done.stderr


@pytest.mark.parametrize("query", QUERIES)
def test_a_server_of_another_protocol_is_named(mooncake: Run, query: str, no_http: str) -> None:
    done = mooncake(*query.split(), "--url", no_http)
    assert done.returncode in (1, 2)
    assert no_http in done.stdout + done.stderr and "Traceback" not in done.stderr
    assert "\x1b" not in done.stdout + done.stderr


@contextmanager
def answering(
    status: int, headers: dict[str, str], tls: ssl.SSLContext | None = None
) -> Iterator[tuple[str, list[str]]]:
    """A server with one answer; yields its URL and the admin keys that it was sent."""
    keys: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            keys.append(self.headers.get("X-API-Key", ""))
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(json.dumps({"tenants": [], "differences": []}).encode())

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"{'http' if tls is None else 'https'}://127.0.0.1:{server.server_address[1]}", keys
        finally:
            server.shutdown()
            thread.join()


def test_the_admin_key_follows_no_redirection(mooncake: Run) -> None:
    with (
        answering(200, {}) as (other, keys),
        answering(302, {"Location": f"{other}/v1/cache/misses"}) as (url, own_keys),
    ):
        done = mooncake("misses", "--url", url, "--admin-api-key", "swordfish")
    assert done.returncode == 2 and f"{url} answered 302" in done.stderr, done
    assert (own_keys, keys) == (["swordfish"], [])


def test_no_proxy_of_the_environment_gets_the_admin_key(
    mooncake: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with answering(200, {}) as (proxy, seen), answering(200, {}) as (url, keys):
        monkeypatch.setenv("http_proxy", proxy)
        done = mooncake("misses", "--url", url, "--admin-api-key", "swordfish")
    assert done.returncode == 0 and (keys, seen) == (["swordfish"], []), done


def test_a_gateway_that_requires_certificates_gets_ours(mooncake: Run, tmp_path: Path) -> None:
    make(CertsSettings(folder=tmp_path))
    files = SecuritySettings(str(tmp_path / "node.pem"), str(tmp_path / "node.key"), str(tmp_path / "ca.pem"))
    install_identity(identity := Identity(files))
    try:
        with answering(200, {}, identity.server_tls) as (url, keys):
            done = mooncake("misses", "--url", url, "--admin-api-key", "swordfish")
    finally:
        install_identity(None)
    assert done.returncode == 0 and keys == ["swordfish"], done


@pytest.mark.parametrize("words", [("misses",), ("explain", "x")])
@pytest.mark.parametrize("body", [b"{}", b"[]"])
def test_json_of_another_server_is_one_line(
    mooncake: Run, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], body: bytes
) -> None:
    monkeypatch.setattr("mooncake.cli.explain.ask_gateway", lambda *_: body)
    done = mooncake(*words, "--url", "http://127.0.0.1:1")
    assert done.returncode == 2 and "did not answer like a Mooncake gateway: its answer has no" in done.stderr

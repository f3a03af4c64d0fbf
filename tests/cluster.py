# SPDX-License-Identifier: Apache-2.0
"""A whole cluster on this host, started as a user starts it, for end-to-end tests and benches.

Owns the lifetime of one ``mooncake up`` and the common HTTP calls to it. It knows roles only by the names and
pids in the status file that ``up`` keeps.
"""

from __future__ import annotations

import dataclasses
import http.client
import json
import os
import signal
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from mooncake.cli.up import security_flags
from mooncake.security import Identity
from mooncake.security.http_auth import HttpClientAuth

T = TypeVar("T")

READY_WITHIN_S = 240.0
ADMIN_KEY = "test-admin-key"


@dataclasses.dataclass
class Answer:
    """One HTTP answer: status, headers in lower case, and the decoded body."""

    status: int
    headers: dict[str, str]
    body: Any


@dataclasses.dataclass
class Streamed:
    """One streamed completion."""

    headers: dict[str, str]
    token_ids: list[int]
    text: str
    ttft_s: float
    total_s: float
    usage: dict[str, Any]
    error: dict[str, Any] | None = None


class OpenAiServer:
    """Any server of the OpenAI API at ``url``."""

    tls: ssl.SSLContext | None = None
    """TLS context for an https address."""
    model = "smollm2"
    """The served model's name."""

    @property
    def url(self) -> str:
        raise NotImplementedError

    def post(self, path: str, body: object, headers: dict[str, str] | None = None) -> Answer:
        return self.request("POST", path, body, None, headers)

    def request(
        self,
        method: str,
        path: str,
        body: object,
        base: str | None = None,
        headers: dict[str, str] | None = None,
        timeout_s: float = 300.0,
    ) -> Answer:
        """Send one request; ``body`` is JSON unless it is bytes. HTTP errors are answers, too."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        request = urllib.request.Request((base or self.url) + path, data, method=method)
        request.add_header("Content-Type", "application/json")
        for name, value in (headers or {}).items():
            request.add_header(name, value)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s, context=self.tls) as answer:
                return _answer(answer.status, answer.headers, answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return _answer(error.code, error.headers, error.read())

    def complete(self, prompt: str | list[int], max_tokens: int, **more: Any) -> Answer:
        """Request a greedy completion, not streamed."""
        body = {
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "return_token_ids": True,
            **more,
        }
        return self.post("/v1/completions", {"model": self.model, **body})

    def stream(
        self, prompt: str | list[int], max_tokens: int, timeout_s: float = 300.0, **more: Any
    ) -> Streamed:
        """Request a greedy streamed completion, timed on this side."""
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "return_token_ids": True,
            "stream_options": {"include_usage": True},
            **more,
        }
        scheme, _, address = self.url.partition("://")
        connection = (
            http.client.HTTPSConnection(address, timeout=timeout_s, context=self.tls)
            if scheme == "https"
            else http.client.HTTPConnection(address, timeout=timeout_s)
        )
        began = time.perf_counter()
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        headers = {name.lower(): value for name, value in answer.getheaders()}
        result = Streamed(headers, [], "", 0.0, 0.0, {})
        if answer.status != 200:
            result.error = json.loads(answer.read())["error"]
            return result
        for line in answer:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                result.error = event["error"]
                break
            for choice in event["choices"]:
                if choice.get("token_ids") and not result.token_ids:
                    result.ttft_s = time.perf_counter() - began
                result.token_ids += choice.get("token_ids") or []
                result.text += choice["text"]
            result.usage = event.get("usage") or result.usage
        result.total_s = time.perf_counter() - began
        connection.close()
        return result


class Cluster(OpenAiServer):
    """A running ``mooncake up``."""

    def __init__(
        self, process: subprocess.Popen[str], folder: Path, identity: Identity | None = None
    ) -> None:
        self.process = process
        self.folder = folder
        self.caller = HttpClientAuth(identity or Identity())
        self.tls = self.caller.tls

    @property
    def status(self) -> dict[str, Any]:
        """The present state of the roles, from ``up``."""
        found: dict[str, Any] = json.loads((self.folder / "status.json").read_text())
        return found

    @property
    def url(self) -> str:
        url: str = self.status["url"]
        return url

    def address(self, role: str) -> str:
        address: str = self.status["roles"][role]["address"]
        return address

    def pid(self, role: str) -> int:
        pid: int = self.status["roles"][role]["pid"]
        return pid

    def log(self, role: str) -> str:
        return Path(self.status["roles"][role]["log"]).read_text()

    def kill(self, role: str, number: signal.Signals = signal.SIGKILL) -> int:
        """Signal a role's process; returns its pid."""
        pid = self.pid(role)
        os.kill(pid, number)
        return pid

    def wait_until_restarted(self, role: str, old_pid: int, timeout_s: float = 120.0) -> None:
        """Return when ``role`` serves again under another pid."""

        def is_back() -> bool:
            entry = self.status["roles"][role]
            return entry["pid"] not in (None, old_pid) and entry["state"] == "ready"

        wait_for(is_back, f"{role} to be restarted", timeout_s)

    def wait_until_routable(self, timeout_s: float = 60.0) -> None:
        """Return when the gateway counts every worker as ready."""

        def all_ready() -> bool:
            body = self.get("/status").body
            return all(instance["health"] == "ready" for instance in body["instances"])

        wait_for(all_ready, "every instance to be ready in /status", timeout_s)

    def get(self, path: str, role: str | None = None) -> Answer:
        """``GET path`` of the gateway as an operator, or of another role that speaks HTTP."""
        base = None if role is None else self.caller.url(self.address(role), "")
        headers = {"X-API-Key": ADMIN_KEY, **self.caller.headers("GET", path)}
        return self.request("GET", path, None, base, headers)


def _answer(status: int, headers: Any, body: bytes) -> Answer:
    found = {name.lower(): value for name, value in headers.items()}
    is_json = found.get("content-type", "").startswith("application/json")
    return Answer(status, found, json.loads(body) if is_json else body.decode())


def wait_for(is_true: Callable[[], T], what: str, timeout_s: float) -> T:
    """Poll until ``is_true()`` is truthy; errors of a server that isn't there yet count as false."""
    deadline = time.monotonic() + timeout_s
    problem: object = "false"
    while time.monotonic() < deadline:
        try:
            found = is_true()
            if found:
                return found
        except (OSError, KeyError, ValueError) as error:
            problem = error
        time.sleep(0.05)
    raise TimeoutError(f"waited {timeout_s} s for {what}; last: {problem}")


@contextmanager
def running_cluster(
    *flags: str, environment: dict[str, str] | None = None, identity: Identity | None = None
) -> Iterator[Cluster]:
    """Run ``mooncake up`` on free ports until it answers; at the end, stop it and remove its files.

    ``identity``: the credential of all its roles, and of their clients here.
    """
    flags = (*flags, *(security_flags(identity.settings) if identity is not None else ()))
    with tempfile.TemporaryDirectory(prefix="mooncake-cluster-") as folder:
        command = [sys.executable, "-m", "mooncake", "up", "--port", "0"]
        command += ["--json-status", f"{folder}/status.json", "--log-dir", f"{folder}/logs", *flags]
        environ = {**os.environ, "ADMIN_API_KEY": ADMIN_KEY, "HF_HUB_OFFLINE": "1", **(environment or {})}
        with open(f"{folder}/up.log", "w") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, text=True, env=environ)
        cluster = Cluster(process, Path(folder), identity)
        if "--model" in flags:
            cluster.model = Path(flags[flags.index("--model") + 1]).name
        try:
            wait_for(
                lambda: process.poll() is not None or cluster.status["is_ready"],
                "the cluster to be ready",
                READY_WITHIN_S,
            )
            if process.poll() is not None:
                raise RuntimeError(f"mooncake up ended with {process.returncode}")
            yield cluster
        except BaseException:
            print(_logs(Path(folder)), file=sys.stderr)
            raise
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _logs(folder: Path, num_lines: int = 40) -> str:
    parts = []
    for path in [folder / "up.log", *sorted((folder / "logs").glob("*.log"))]:
        lines = path.read_text(errors="replace").splitlines()[-num_lines:]
        parts.append(f"--- {path.name}\n" + "\n".join(lines))
    return "\n".join(parts)

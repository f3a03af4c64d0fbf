# SPDX-License-Identifier: Apache-2.0
"""A real vLLM server, and the store process beside it, for tests of the connectors and benches.

Owns the life of the processes: the server is started as vLLM's users start it, in a session of its own, so
that a SIGKILL takes all of its processes at once. Runs in the environment of ``scripts/test-vllm``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

from mooncake.cli.ports import free_ports
from mooncake.rpc import BlockingClient
from mooncake.store import messages as m
from tests.cluster import ADMIN_KEY, Answer, OpenAiServer, wait_for

READY_WITHIN_S = 600.0
HOST = "127.0.0.1"
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": HOST,
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
"""Environment of every vLLM process of ours: no traffic leaves this host, and 1 GiB of KV memory."""


_given_ports: set[int] = set()


def free_port() -> int:
    """A port that no other test gets: vLLM takes half a minute from its start until it listens."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    num_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    others = {port for port in range(1 << 16) if port % num_workers != worker}
    [port] = free_ports(HOST, 1, Random(), _given_ports | others)
    _given_ports.add(port)
    return port


class VllmServer(OpenAiServer):
    """``python -m vllm.entrypoints.openai.api_server`` on a free port, computing on one core."""

    def __init__(
        self,
        name: str,
        model: Path,
        folder: Path,
        connector: Mapping[str, Any] | None = None,
        core: int = 0,
        dtype: str = "bfloat16",
        environment: Mapping[str, str] | None = None,
        flags: tuple[str, ...] = (),
        cwd: Path | None = None,
    ) -> None:
        self._port = free_port()
        self.log_path = folder / f"{name}.log"
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += ["--served-model-name", "smollm2", "--host", HOST, "--port", str(self._port)]
        command += ["--max-model-len", "2048", "--dtype", dtype, "--enforce-eager"]
        command += ["--enable-prompt-tokens-details", *flags]
        if connector is not None:
            command += ["--kv-transfer-config", json.dumps(connector)]
        self._command, self._cwd = command, cwd
        self._environ = {**os.environ, **QUIET, "VLLM_CPU_OMP_THREADS_BIND": str(core), **(environment or {})}
        self.start()

    def start(self) -> None:
        """Start it; after ``kill`` again, as another process at the same address."""
        with self.log_path.open("a") as log:
            self._process = subprocess.Popen(
                self._command,
                stdout=log,
                stderr=log,
                env=self._environ,
                cwd=self._cwd,
                start_new_session=True,
            )

    @property
    def address(self) -> str:
        return f"{HOST}:{self._port}"

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def wait_until_ready(self, timeout_s: float = READY_WITHIN_S) -> None:
        def is_healthy() -> bool:
            if self._process.poll() is not None:
                # The process that failed writes before the one that waited for it: the end says too little.
                log = self.log()
                errors = [line for line in log.splitlines() if "ERROR" in line or "Error:" in line][:40]
                found = "\n".join([*errors, "...", log[-2000:]])
                raise RuntimeError(f"vLLM ended with {self._process.returncode}:\n{found}")
            return self.request("GET", "/health", None, timeout_s=5).status == 200

        wait_for(is_healthy, f"{self.log_path.name} to say that vLLM serves", timeout_s)

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def metric(self, name: str) -> float:
        """Sum of a metric's samples."""
        lines = self.request("GET", "/metrics", None).body.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.split("{")[0] == name)

    def kill(self) -> None:
        """SIGKILL to the API server, the engine's core and its workers."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(30)

    def kill_engine(self) -> None:
        """SIGKILL to the engine's core alone; the API server above it detects that by itself, and ends."""
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(ProcessLookupError, FileNotFoundError):
                is_core = (folder / "comm").read_text().startswith("VLLM::EngineCor")
                if is_core and os.getpgid(int(folder.name)) == self._process.pid:
                    os.kill(int(folder.name), signal.SIGKILL)

    def wait_until_over(self, timeout_s: float = 60.0) -> None:
        """Return when none of its processes is left; one that does not end by itself is killed."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        self.kill()

    def close(self) -> None:
        self._process.terminate()
        self.wait_until_over(30)


def start_store(folder: Path, size_gb: float = 1.0) -> tuple[subprocess.Popen[bytes], str]:
    """Start ``mooncaked``, a master and this much memory in one process; returns it and its address.

    The master answers before the memory is mounted, and refuses objects until then; this waits for both.
    """
    port = free_port()
    command = [sys.executable, "-m", "mooncake", "daemon", "--port", str(port)]
    command += ["--capacity-dram", str(size_gb)]
    log_path = folder / f"mooncaked-{port}.log"
    with log_path.open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        wait_for(lambda: "ready role=daemon" in log_path.read_text(), "the store to be ready", 60.0)
    except BaseException:
        process.kill()
        process.wait()
        raise
    return process, f"{HOST}:{port}"


@contextmanager
def running_store(folder: Path, size_gb: float = 1.0) -> Iterator[str]:
    """Run ``mooncaked``; yields its address."""
    process, address = start_store(folder, size_gb)
    try:
        yield address
    finally:
        process.terminate()
        process.wait(30)


def num_stored(store: str) -> int:
    """Number of blocks in the store."""
    keys = BlockingClient(store, (m.Keys,)).call(m.ListKeys("", 1000), 10.0)
    assert isinstance(keys, m.Keys)
    return len(keys.keys)


class Gateway(OpenAiServer):
    """A running ``mooncake gateway``."""

    def __init__(self, port: int, log_path: Path) -> None:
        self._port = port
        self.log_path = log_path

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self._port}"

    def details(self, path: str) -> Answer:
        """``GET path`` as an operator."""
        return self.request("GET", path, None, headers={"X-API-Key": ADMIN_KEY})

    def wait_until_routable(self, timeout_s: float = 120.0) -> None:
        """Return when it counts every engine as ready."""

        def all_ready() -> bool:
            rows = self.details("/status").body["instances"]
            return bool(rows) and all(row["health"] == "ready" for row in rows)

        wait_for(all_ready, "every engine to be ready in /status", timeout_s)


@contextmanager
def running_gateway(folder: Path, model: Path, *flags: str) -> Iterator[Gateway]:
    """Run ``mooncake gateway`` in front of the engines in ``flags``; it may start before they do."""
    gateway = Gateway(free_port(), folder / "gateway.log")
    command = [sys.executable, "-m", "mooncake", "gateway", "--model", str(model)]
    command += ["--served-model-name", "smollm2", "--host", HOST, "--port", gateway.url.rpartition(":")[2]]
    with gateway.log_path.open("a") as log:
        environment = {**os.environ, "ADMIN_API_KEY": ADMIN_KEY}
        process = subprocess.Popen([*command, *flags], stdout=log, stderr=log, env=environment)
    try:
        wait_for(
            lambda: process.poll() is not None or gateway.request("GET", "/health", None).status > 0,
            "the gateway to answer",
            120.0,
        )
        if process.poll() is not None:
            raise RuntimeError(
                f"the gateway ended with {process.returncode}:\n{gateway.log_path.read_text()}"
            )
        yield gateway
    finally:
        process.terminate()
        process.wait(30)


def store_connector(store: str, role: str = "kv_both") -> dict[str, Any]:
    """Configuration of our ``MooncakeStoreConnector``."""
    return _ours("MooncakeStoreConnector", role, {"mooncake_store_addr": store})


def direct_connector(role: str, **extra: Any) -> dict[str, Any]:
    """Configuration of our ``MooncakeConnector``."""
    return _ours("MooncakeConnector", role, extra)


def _ours(name: str, role: str, extra: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": name,
        "kv_connector_module_path": "mooncake.connectors.vllm",
        "kv_role": role,
        "kv_connector_extra_config": extra,
    }


def store_configuration(folder: Path, master: str) -> dict[str, str]:
    """The environment with which vLLM's own store connector uses a store whose memory is another
    process's."""
    path = folder / "mooncake.json"
    settings = {
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": master,
        "protocol": "tcp",
        "device_name": "",
        "mode": "standalone-store",
        "global_segment_size": 0,
        "local_buffer_size": "64MB",
    }
    path.write_text(json.dumps(settings))
    return {"MOONCAKE_CONFIG_PATH": str(path)}

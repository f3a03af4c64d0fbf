# SPDX-License-Identifier: Apache-2.0
"""The other processes of a fault run: peers and a metadata service, killed, stopped and started again."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from random import Random
from typing import Any

from mooncake.cli.ports import free_ports
from tests.faults.peer import initial
from tests.faults.plan import AREA_BYTES, NUM_WORKERS, Plan
from tests.faults.proxy import Proxy

PATIENCE_S = 60.0
"""Time for a process to start or to answer on a busy machine; no fault lasts so long."""
ROOT = Path(__file__).parents[2]


class Process:
    """A child process that answers lines with lines."""

    def __init__(self, words: list[str]) -> None:
        self.child = subprocess.Popen(
            [sys.executable, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if os.environ.get("FAULTS_VERBOSE") else subprocess.DEVNULL,
            cwd=ROOT,
        )
        self._unread = b""

    def say(self, line: str) -> str:
        assert self.child.stdin is not None
        self.child.stdin.write(line.encode() + b"\n")
        self.child.stdin.flush()
        return self.line()

    def line(self) -> str:
        """The next line it prints."""
        assert self.child.stdout is not None
        deadline = time.monotonic() + PATIENCE_S
        while b"\n" not in self._unread:
            ready, _, _ = select.select([self.child.stdout], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"process {self.child.pid} said nothing for {PATIENCE_S:g} s"
            data = os.read(self.child.stdout.fileno(), 65536)
            assert data, f"process {self.child.pid} ended with {self.child.wait(PATIENCE_S)}"
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode()

    def freeze(self, is_frozen: bool) -> None:
        self.child.send_signal(signal.SIGSTOP if is_frozen else signal.SIGCONT)

    def kill(self) -> None:
        self.child.kill()
        self.child.wait()
        for stream in (self.child.stdin, self.child.stdout):
            if stream is not None:
                stream.close()


class MetadataService:
    """``mooncake metadata`` on a port that stays the same."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.process = self._start()

    def _start(self) -> Process:
        code = (
            "import asyncio\n"
            "from mooncake.transfer.metadata_server import MetadataSettings, serve\n"
            f"asyncio.run(serve(MetadataSettings(port={self.port})))"
        )
        return Process(["-c", code])

    def restart(self) -> None:
        self.process = self._start()


class PeerProcess:
    """A peer behind its proxy. ``number`` counts its restarts; ``lock`` is held during a restart."""

    def __init__(self, plan: Plan, index: int, port: int, metadata_url: str) -> None:
        self.name = f"peer-{index}"
        self.proxy = Proxy(port, plan.bytes_per_s)
        self.lock = threading.RLock()
        self.number = 0
        self.is_alive = False
        self._config: dict[str, Any] = {
            "name": self.name,
            "proxy": f"127.0.0.1:{self.proxy.port}",
            "port": port,
            "transports": plan.transports,
            "handshake_port": 0 if plan.has_handshake else -1,
            "num_streams": plan.num_streams,
            "metadata": metadata_url,
            "size_bytes": NUM_WORKERS * AREA_BYTES,
        }
        self._fill = plan.seed * 1000 + index * 100
        self.process = self._start()

    def _start(self) -> Process:
        self._config["fill"] = self._fill + self.number
        return Process(["-m", "tests.faults.peer", json.dumps(self._config)])

    def wait_until_ready(self) -> None:
        assert self.process.line() == "ready"
        self.is_alive = True

    def contents(self) -> bytes:
        """Initial memory content of the running process."""
        return initial(self._fill + self.number, NUM_WORKERS * AREA_BYTES)

    def sums(self, ranges: list[tuple[int, int]]) -> list[int]:
        """CRC-32 per range, computed by the peer."""
        result: list[int] = json.loads(self.process.say(json.dumps(ranges)))
        return result

    def kill(self) -> None:
        with self.lock:
            self.is_alive = False
            self.number += 1
            self.process.kill()

    def restart(self) -> None:
        with self.lock:
            self.process = self._start()
            self.wait_until_ready()

    def close(self) -> None:
        self.process.kill()
        self.proxy.close()


def start(plan: Plan) -> tuple[MetadataService, list[PeerProcess]]:
    """All processes of a plan, ready."""
    ports = free_ports("127.0.0.1", plan.num_peers + 1, Random())
    metadata = MetadataService(ports[0])
    url = f"http://127.0.0.1:{ports[0]}/metadata"
    peers = [PeerProcess(plan, index, port, url) for index, port in enumerate(ports[1:])]
    for peer in peers:
        peer.wait_until_ready()
    return metadata, peers

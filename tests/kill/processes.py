# SPDX-License-Identifier: Apache-2.0
"""The processes of a kill run: a master, nodes, a journaling client, each to be killed and started again."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from typing import IO, ClassVar

from mooncake.cli.ports import free_ports
from mooncake.store.ha.election import LeaderLease, decode_lease
from mooncake.store.ha.lease_store import make_lease_store
from tests.contract.metadata_servers import PROGRAMS, MetadataServer

ROOT = Path(__file__).parents[2]
PATIENCE_S = 30.0
"""Time for a process to start or to answer on a busy machine."""

POOL = "256MiB"
"""Far more memory than is ever used: an evicted object would count as lost."""

MASTER_FLAGS = {
    "--lease-s": "0.5",
    "--put-s": "1",
    "--grace-s": "0.2",
    "--heartbeat-s": "0.2",
    "--segment-ttl-s": "3",
}
"""Short leases: memory rests for the longest of them after the death of a master."""


class Client:
    """One process of the journaling client."""

    def __init__(self, folder: Path, name: str, master: str, kinds: tuple[str, ...], log: IO[bytes]) -> None:
        self.journal = folder / f"{name}.journal"
        self.journal.touch()
        config = {
            "name": name,
            "master": master,
            "journal": str(self.journal),
            "kinds": kinds,
            "timeout_s": 15.0,
        }
        self.child = subprocess.Popen(
            [sys.executable, "-m", "tests.kill.client", json.dumps(config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            cwd=ROOT,
        )

    def say(self, line: str) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write(line.encode() + b"\n")
        self.child.stdin.flush()
        self.wait_for("done")

    def wait_for(self, word: str) -> None:
        assert self.child.stdout is not None
        ready, _, _ = select.select([self.child.stdout], [], [], PATIENCE_S)
        assert ready, f"the client said nothing for {PATIENCE_S:g} s"
        line = self.child.stdout.readline()
        assert line == word.encode() + b"\n", f"the client said {line!r} instead of {word!r}"


def elector() -> MetadataServer | None:
    """A service for leader election; None if none is installed: then the masters use a file."""
    kind = next((kind for kind, (program, _) in PROGRAMS.items() if shutil.which(program)), None)
    return None if kind is None else MetadataServer(kind)


class Cluster:
    """All processes of a run, in one folder. Killed at the end in any case."""

    master_flags: ClassVar[dict[str, str]] = MASTER_FLAGS

    def __init__(
        self,
        folder: Path,
        kinds: tuple[str, ...],
        num_nodes: int,
        has_ssd: bool = False,
        num_masters: int = 1,
    ) -> None:
        self.has_ssd = has_ssd
        self.folder = folder
        self.kinds = kinds
        self.ports = free_ports("127.0.0.1", num_masters, Random())
        self.masters = [f"master{number}" for number in range(num_masters)] if num_masters > 1 else ["master"]
        self._service = elector() if num_masters > 1 else None
        self._elects = f"file://{folder}" if self._service is None else self._service.url
        self._lease_store = make_lease_store(self._elects) if num_masters > 1 else None
        self.log: IO[bytes] = (folder / "log").open("ab")
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.nodes = [f"node{number}" for number in range(num_nodes)]
        self.client: Client | None = None
        self.journals: list[Path] = []
        self._num_clients = 0

    @property
    def master(self) -> str:
        """Address or addresses at which clients and nodes find the masters."""
        return ",".join(f"127.0.0.1:{port}" for port in self.ports)

    def lease(self) -> LeaderLease | None:
        """The record of the leader and of the standbys that have all acknowledged records."""
        assert self._lease_store is not None, "there is one master only"
        found = self._lease_store.read()
        return None if found is None else decode_lease(found)

    def leader(self) -> str:
        """The master that leads according to the record."""
        lease = self.lease()
        assert lease is not None, "no master has led yet"
        return self.masters[self.ports.index(int(lease.address.rpartition(":")[2]))]

    def wait_for_standbys(self) -> None:
        """Wait until all standbys have all acknowledged records."""
        until = time.monotonic() + PATIENCE_S
        while (lease := self.lease()) is None or len(lease.standbys) < len(self.masters) - 1:
            assert time.monotonic() < until, f"the standbys don't get in sync: {lease}"
            time.sleep(0.02)

    def start(self) -> None:
        for name in self.masters:
            self.start_master(name)
        for name in self.nodes:
            self.start_node(name)

    def start_master(self, name: str = "master") -> None:
        flags = [word for flag in self.master_flags.items() for word in flag]
        flags += ["--port", str(self.ports[self.masters.index(name)])]
        if len(self.masters) == 1:
            flags += ["--oplog", str(self.folder / "oplog")]
        else:  # what one of them acknowledged, only the others keep
            flags += ["--election", self._elects, "--election-lease-s", "1"]
        self._start(name, "master", *flags)

    def start_node(self, name: str) -> None:
        flags = ["--master", self.master, "--name", name, "--pool-size", POOL, "--no-huge-pages"]
        if self.has_ssd:
            flags += ["--ssd-path", str(self.folder / name), "--ssd-size", "256MiB"]
        self._start(name, "node", *flags)

    def _start(self, name: str, role: str, *flags: str) -> None:
        command = [sys.executable, "-m", "mooncake", role, *flags, "--parent", str(os.getpid())]
        self.running[name] = subprocess.Popen(command, stdout=self.log, stderr=self.log, cwd=ROOT)

    def start_client(self) -> Client:
        self._num_clients += 1
        client = Client(self.folder, f"c{self._num_clients}", self.master, self.kinds, self.log)
        self.client = client
        self.journals.append(client.journal)
        self.running["client"] = client.child
        client.wait_for("ready")
        return client

    def kill(self, *names: str) -> float:
        """Send SIGKILL to all of them at once; returns the time."""
        processes = [self.running.pop(name) for name in names]
        killed_at = time.monotonic()
        for process in processes:
            process.send_signal(signal.SIGKILL)
        for process in processes:
            process.wait(PATIENCE_S)
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with contextlib.suppress(BrokenPipeError):
                        stream.close()
        if "client" in names:
            self.client = None
        return killed_at

    def ended(self) -> list[str]:
        """Processes that ended without having been killed."""
        return [
            f"{name} ended with {p.returncode}" for name, p in self.running.items() if p.poll() is not None
        ]

    def close(self) -> None:
        self.kill(*self.running)
        self.log.close()
        if self._lease_store is not None:
            self._lease_store.close()
        if self._service is not None:
            self._service.stop()

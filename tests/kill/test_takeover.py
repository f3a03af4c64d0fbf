# SPDX-License-Identifier: Apache-2.0
"""Masters as real processes, elected through etcd, Redis or a file: killed, stopped and replaced under load.

``scripts/kill`` measures frequency and duration; here each event happens once. Acknowledged objects are
recorded in a journal in this process and read afterwards.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from mooncake import clock
from mooncake.cli.ports import free_ports
from mooncake.errors import Unavailable
from mooncake.store import Store, StoreSettings
from mooncake.store.ha.election import LeaderLease, decode_lease
from mooncake.store.ha.lease_store import make_lease_store
from tests.contract.metadata_servers import MetadataServer, skip_without
from tests.waiting import wait_until

pytestmark = pytest.mark.processes

LEASE_S = 1.0
FLAGS = {
    "--lease-s": "0.4",
    "--put-s": "0.8",
    "--grace-s": "0.2",
    "--heartbeat-s": "0.2",
    "--segment-ttl-s": "5",
    "--election-lease-s": str(LEASE_S),
}


class Load:
    """Puts until ``stop``; acknowledged objects are in ``journal``."""

    def __init__(self, master: str) -> None:
        self.store = Store(master, settings=StoreSettings(timeout_s=20.0))
        self.journal: list[int] = []
        self.errors: list[str] = []
        self.longest_pause_s = 0.0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        number, last = 0, math.inf
        while not self._is_over.is_set():
            try:
                refusal = self.store.put(f"k{number}", content(number))
                if refusal is None:
                    self.journal.append(number)
                    now = clock.monotonic()
                    self.longest_pause_s, last = max(self.longest_pause_s, now - last), now
                else:  # memory rests for a while after a takeover
                    time.sleep(0.01)
            except Unavailable as error:
                self.errors.append(str(error))
            number += 1

    def wait_for(self, more: int) -> None:
        first = len(self.journal)
        wait_until(lambda: len(self.journal) >= first + more)

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join(30)

    def check(self) -> None:
        """Assert that all acknowledged objects exist and are right."""
        keys = [f"k{number}" for number in self.journal]
        for first in range(0, len(keys), 100):
            part = self.journal[first : first + 100]
            values = self.store.get_batch(keys[first : first + 100])
            lost = [number for number, value in zip(part, values, strict=True) if value is None]
            assert not lost, f"lost {lost} of {len(keys)}; {self.errors}"
            assert values == [content(number) for number in part]


def content(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest() * 8


class Masters:
    """Master processes with leader election, and one node."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.folder = folder
        self.ports = free_ports("127.0.0.1", 3, Random())
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self._lease_store = make_lease_store(url)

    @property
    def addresses(self) -> str:
        return ",".join(f"127.0.0.1:{port}" for port in self.ports)

    def start_master(self, number: int, *, has_log: bool = False) -> None:
        flags = [word for flag in FLAGS.items() for word in flag]
        flags += ["--port", str(self.ports[number]), "--election", self.url]
        if has_log:
            flags += ["--oplog", str(self.folder / f"oplog{number}")]
        self._start(f"m{number}", "master", *flags)

    def start_node(self, master: str) -> None:
        flags = ["--master", master, "--name", "node", "--pool-size", "64MiB", "--no-huge-pages"]
        self._start("node", "node", *flags)

    def _start(self, name: str, role: str, *flags: str) -> None:
        command = [sys.executable, "-m", "mooncake", role, *flags, "--parent", str(os.getpid())]
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(command, stdout=log, stderr=log)

    def lease(self) -> LeaderLease | None:
        found = self._lease_store.read()
        return None if found is None else decode_lease(found)

    def leader(self, *, besides: str = "") -> str:
        """Name of the leading master, once one leads that is not ``besides``."""

        def name() -> str:
            lease = self.lease()
            if lease is None:
                return ""
            number = self.ports.index(int(lease.address.rpartition(":")[2]))
            return f"m{number}" if f"m{number}" != besides else ""

        wait_until(name)
        return name()

    def wait_for_standbys(self, count: int) -> None:
        def has_them() -> bool:
            lease = self.lease()
            return lease is not None and len(lease.standbys) == count

        wait_until(has_them)

    def send(self, name: str, number: signal.Signals) -> int:
        process = self.running.pop(name)
        process.send_signal(number)
        return process.wait(20)

    def close(self) -> None:
        for process in self.running.values():
            process.kill()
        for process in self.running.values():
            process.wait(10)
        self._lease_store.close()


@pytest.fixture(params=["etcd", "redis", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "file":
        yield f"file://{tmp_path}"
        return
    skip_without(request.param)
    server = MetadataServer(request.param)
    yield server.url
    server.stop()


@pytest.fixture
def masters(url: str, tmp_path: Path) -> Iterator[Masters]:
    with contextlib.closing(Masters(url, tmp_path)) as masters:
        yield masters


@contextlib.contextmanager
def load_on(master: str) -> Iterator[Load]:
    load = Load(master)
    try:
        load.wait_for(50)
        yield load
    finally:
        load.stop()
        load.store.close()


def pair(masters: Masters, *, has_log: bool = False) -> str:
    """Two masters and a node; and the name of the leader."""
    masters.start_master(0, has_log=has_log)
    masters.start_master(1, has_log=has_log)
    masters.wait_for_standbys(1)
    masters.start_node(masters.addresses)
    return masters.leader()


def test_the_leader_is_killed_under_load(masters: Masters) -> None:
    leader = pair(masters)
    with load_on(masters.url) as load:
        killed_at = clock.monotonic()
        masters.send(leader, signal.SIGKILL)
        masters.leader(besides=leader)
        wait_until(lambda: load.store.get(f"k{load.journal[0]}") is not None)
        print(f"read again after {clock.monotonic() - killed_at:.2f} s")
        load.wait_for(50)
        print(f"puts paused for {load.longest_pause_s:.2f} s")
        load.stop()
        load.check()


def test_masters_are_replaced_one_by_one_under_load(masters: Masters) -> None:
    leader = pair(masters, has_log=True)
    with load_on(masters.addresses) as load:
        for _ in range(2):
            assert masters.send(leader, signal.SIGTERM) == 0
            successor = masters.leader(besides=leader)
            masters.start_master(int(leader[1:]), has_log=True)
            masters.wait_for_standbys(1)
            load.wait_for(20)
            leader = successor
        print(f"puts paused for {load.longest_pause_s:.2f} s at most")
        load.stop()
        load.check()


@pytest.mark.parametrize("url", ["file"], indirect=True)
def test_the_standby_is_killed_while_it_takes_over(masters: Masters) -> None:
    """Then the one that had all records and its log comes back, whichever of the two that is."""
    leader = pair(masters, has_log=True)
    standby = "m1" if leader == "m0" else "m0"
    with load_on(masters.addresses) as load:
        masters.send(leader, signal.SIGKILL)
        masters.leader(besides=leader)
        masters.send(standby, signal.SIGKILL)
        masters.start_master(int(leader[1:]), has_log=True)
        masters.start_master(int(standby[1:]), has_log=True)
        load.wait_for(20)
        assert masters.leader() == standby, "the other has not seen the last term"
        load.stop()
        load.check()


@pytest.mark.parametrize("url", ["file"], indirect=True)
def test_a_stopped_leader_is_replaced_and_follows_when_it_continues(masters: Masters) -> None:
    leader = pair(masters)
    with load_on(masters.addresses) as load:
        masters.running[leader].send_signal(signal.SIGSTOP)
        successor = masters.leader(besides=leader)
        load.wait_for(20)
        masters.running[leader].send_signal(signal.SIGCONT)
        masters.wait_for_standbys(1)
        load.wait_for(20)
        assert masters.leader() == successor
        load.stop()
        load.check()

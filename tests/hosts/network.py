# SPDX-License-Identifier: Apache-2.0
"""Hosts of a test: namespaces of this kernel with own addresses, process ids and shared memory.

Each host has a network namespace with one interface in each of two networks, a pid namespace, and a
``/dev/shm`` of its own, so that processes of two hosts share neither memory nor the sockets by which they
would pass it on: bytes between them pass the interfaces, whose counters are the kernel's. Links are limited
and cut with ``tc`` at both ends, where no process notices: a cut link drops packets, as a broken cable does,
and does not refuse them. It needs root, and the kernel's namespaces and token bucket.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[2]

NUM_NETWORKS = 2
NUM_OUTSIDE = 254
"""Last part of this process's own address in the networks."""

HOST_PROGRAM = (
    "mount --make-rprivate / && mount -t tmpfs tmpfs /dev/shm && mount -t proc proc /proc && "
    "echo up && exec sleep infinity"
)
"""First process of a host."""

DROPPED = "tbf rate 8bit burst 10 limit 10"
"""A token bucket smaller than any packet: every packet is dropped."""


def run(*words: str) -> str:
    """Run a command of the system.

    Raises:
        OSError: it failed; the message has its error output.
    """
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def why_impossible() -> str:
    """Why this process cannot make hosts; empty if it can."""
    missing = [name for name in ("ip", "tc", "unshare", "nsenter") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed (Debian: iproute2, util-linux)"
    if os.geteuid() != 0:
        return "only root makes network namespaces"
    name = f"mc{os.getpid()}try"
    try:
        run("unshare", "--net", "--pid", "--mount", "--fork", "true")
        run("ip", "link", "add", name, "type", "bridge")
        try:
            run(*f"tc qdisc add dev {name} root {DROPPED}".split())
        finally:
            run("ip", "link", "del", name)
    except OSError as error:
        return f"this kernel refuses it ({error})"
    return ""


class Host:
    """One host; ``number`` counts from 1."""

    def __init__(self, network: Network, number: int) -> None:
        self._network = network
        self.number = number
        self.last = number
        """Last part of the addresses."""
        self.namespace = f"mc{os.getpid()}h{number}"
        self._first: subprocess.Popen[bytes] | None = None
        run("ip", "netns", "add", self.namespace)
        for net in range(NUM_NETWORKS):
            port = self.port(net)
            peer = ("type", "veth", "peer", "name", f"eth{net}", "netns", self.namespace)
            run("ip", "link", "add", port, *peer)
            run("ip", "link", "set", port, "master", network.bridge(net), "up")
            run("ip", "-n", self.namespace, "link", "set", f"eth{net}", "up")
        run("ip", "-n", self.namespace, "link", "set", "lo", "up")
        self.readdress(number)
        self.boot()

    def port(self, net: int) -> str:
        """The bridge's port that leads to this host."""
        return f"mc{os.getpid()}p{self.number}n{net}"

    def address(self, net: int = 0) -> str:
        return self._network.address(net, self.last)

    @property
    def addresses(self) -> str:
        return ",".join(self.address(net) for net in range(NUM_NETWORKS))

    def readdress(self, last: int) -> None:
        """Give the interfaces addresses that end with ``last``, instead of those that they had."""
        self.last = last
        for net in range(NUM_NETWORKS):
            run("ip", "-n", self.namespace, "addr", "flush", "dev", f"eth{net}")
            run("ip", "-n", self.namespace, "addr", "add", f"{self.address(net)}/24", "dev", f"eth{net}")

    def boot(self) -> None:
        """Start the host's first process, with whose end the kernel kills all others."""
        assert self._first is None
        words = f"ip netns exec {self.namespace} unshare --pid --mount --fork --kill-child sh -c".split()
        self._first = subprocess.Popen([*words, HOST_PROGRAM], stdout=subprocess.PIPE)
        assert self._first.stdout is not None
        assert self._first.stdout.readline() == b"up\n", "the host does not start"

    def start(self, *words: str, log: IO[bytes], **more: Any) -> subprocess.Popen[bytes]:
        """Start a process on this host."""
        assert self._first is not None
        [first] = Path(f"/proc/{self._first.pid}/task/{self._first.pid}/children").read_text().split()
        enter = ["nsenter", f"--target={first}", "--net", "--pid", "--mount", f"--wd={ROOT}"]
        return subprocess.Popen([*enter, "--", *words], stderr=log, **more)

    def kill(self) -> None:
        """Lose the host: its links are cut, then its processes killed, so that no peer is notified."""
        for net in range(NUM_NETWORKS):
            self.cut(net)
        self.halt()

    def halt(self) -> None:
        if self._first is not None:
            self._first.send_signal(signal.SIGKILL)
            self._first.wait()
            assert self._first.stdout is not None
            self._first.stdout.close()
            self._first = None

    def cut(self, net: int, *, outgoing: bool = True, incoming: bool = True) -> None:
        """Drop what this host sends to, or gets from, a network."""
        if incoming:
            run("tc", "qdisc", "replace", "dev", self.port(net), "root", *DROPPED.split())
        if outgoing:
            inside = ("ip", "netns", "exec", self.namespace)
            run(*inside, "tc", "qdisc", "replace", "dev", f"eth{net}", "root", *DROPPED.split())

    def mend(self, net: int) -> None:
        """Undo ``cut``; the limit holds again."""
        limit = self._network.limit
        for prefix, device in (((), self.port(net)), (("ip", "netns", "exec", self.namespace), f"eth{net}")):
            if limit:
                run(*prefix, "tc", "qdisc", "replace", "dev", device, "root", *limit.split())
            else:
                with contextlib.suppress(OSError):  # it was not cut
                    run(*prefix, "tc", "qdisc", "del", "dev", device, "root")

    def num_received(self, net: int) -> int:
        """Bytes that the network has carried to this host, headers included."""
        return int(Path(f"/sys/class/net/{self.port(net)}/statistics/tx_bytes").read_text())

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.halt()
        with contextlib.suppress(OSError):
            run("ip", "netns", "del", self.namespace)
        for net in range(NUM_NETWORKS):  # the namespace's own end may be removed a little later
            with contextlib.suppress(OSError):
                run("ip", "link", "del", self.port(net))


class Network:
    """Two bridges and the hosts on them.

    Args:
        mbit: speed of each link in each direction, in Mbit/s; 0: no limit.
    """

    def __init__(self, num_hosts: int, mbit: int = 0) -> None:
        self.limit = f"tbf rate {mbit}mbit burst 256k latency 50ms" if mbit else ""
        self.hosts: list[Host] = []
        try:
            for net in range(NUM_NETWORKS):
                run("ip", "link", "add", self.bridge(net), "type", "bridge")
                run("ip", "link", "set", self.bridge(net), "up")
                run("ip", "addr", "add", f"{self.address(net, NUM_OUTSIDE)}/24", "dev", self.bridge(net))
            for number in range(1, num_hosts + 1):
                self.hosts.append(Host(self, number))
                for net in range(NUM_NETWORKS):
                    self.hosts[-1].mend(net)
        except BaseException:
            self.close()
            raise

    def address(self, net: int, last: int) -> str:
        """Addresses of the range for benchmarks, in which no real network is; other processes use others."""
        return f"198.18.{2 * (os.getpid() % 128) + net}.{last}"

    def bridge(self, net: int) -> str:
        return f"mc{os.getpid()}b{net}"

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for host in self.hosts:
            host.close()
        for net in range(NUM_NETWORKS):
            with contextlib.suppress(OSError):
                run("ip", "link", "del", self.bridge(net))


def wait_for_line(process: subprocess.Popen[bytes], log: Path, within_s: float = 60.0) -> None:
    """Wait until a role has written ``ready`` to its log."""
    until = time.monotonic() + within_s
    while " ready " not in f" {_text(log)} ":
        assert process.poll() is None, f"ended with {process.returncode}: {_text(log)[-2000:]}"
        assert time.monotonic() < until, f"not ready within {within_s:g} s: {_text(log)[-2000:]}"
        time.sleep(0.05)


def _text(log: Path) -> str:
    return log.read_text(errors="replace") if log.exists() else ""

# SPDX-License-Identifier: Apache-2.0
"""A cluster over four hosts, under load, and what happens to their links and to one of them.

Host 1 has the master, the conductor and the gateway; where etcd is installed, it runs there and hosts 4 and 3
have a master each, too. Hosts 2 and 3 have a node and two engines each; clients are on host 4. Nodes and
engines use both networks, all have a cluster key. The engines are those without a model (``mooncake dev
fake-engine``): their KV bytes are real and every answer has one right value. Nothing here asserts a duration:
``Figures`` has what was measured.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import IO, Any

from tests.gateway.doubles import save_tokenizer
from tests.hosts.network import ROOT, Host, Network, wait_for_line
from tests.kill.journal import Book
from tests.kill.mixed import Request, Seen, ask, verdict

PATIENCE_S = 60.0
MBIT = 800
MIB = 1 << 20
BATCH_BYTES = 32 * MIB
RAIL_PATIENCE_S = 0.1
CLOCKS_APART_S = (0, 12, -12, 5)
"""Offsets of the hosts' wall clocks; signed requests bear up to 30 s between two of them."""
WRONG_CLOCK = """import os, time
right, offset_s = time.time, float(os.environ.get("WRONG_CLOCK_S", "0"))
time.time = lambda: right() + offset_s
"""
"""Imported by every Python process at its start. A monotonic clock is compared with no other host's."""
MASTER_PORT, GATEWAY_PORT, CONDUCTOR_PORT, ENGINE_PORT = 50051, 8000, 8400, 8100
ETCD_PORT = 2379
MASTER_FLAGS = ("--lease-s", "0.5", "--put-s", "2", "--grace-s", "0.2", "--heartbeat-s", "0.2")
WATCHED_S = 4.0
"""How long lookups for a lost host's objects go on."""


@dataclasses.dataclass
class Figures:
    """What a run measured, and everything that was wrong."""

    rails_mb_s: dict[str, float] = dataclasses.field(default_factory=dict)
    """Speed by the networks used, and what the limits of both allow together."""
    after_cut_s: list[float] = dataclasses.field(default_factory=list)
    """Times from the cut of one rail in the middle of a batch to its end."""
    false_hits_s: list[float] = dataclasses.field(default_factory=list)
    """Times from the loss of a host to the last lookup that reported one of its objects."""
    num_bytes: int = 0
    """Bytes of acknowledged objects, once per replica."""
    num_carried: int = 0
    """Bytes that the networks carried to the nodes meanwhile."""
    num_acknowledged: int = 0
    num_checked: int = 0
    num_answers: int = 0
    num_errors: int = 0
    broken: list[str] = dataclasses.field(default_factory=list)
    """Lost, wrong and false results, by name."""


class Agent:
    """The process ``tests.hosts.agent`` on a host."""

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        self._child = child
        self._answer()

    def begin(self, do: str, **arguments: Any) -> None:
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        self._child.stdin.flush()

    def end(self) -> Any:
        answer = self._answer()
        assert "error" not in answer, answer
        return answer

    def ask(self, do: str, **arguments: Any) -> Any:
        self.begin(do, **arguments)
        return self.end()

    def _answer(self) -> Any:
        assert self._child.stdout is not None
        ready, _, _ = select.select([self._child.stdout], [], [], PATIENCE_S)
        assert ready, f"the agent said nothing for {PATIENCE_S:g} s"
        line = self._child.stdout.readline()
        assert line, "the agent ended; its log says why"
        return json.loads(line)


class Chat(threading.Thread):
    """Requests to the gateway, one after another, until it is ended; the first answers are the right ones."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._url = url
        self._requests = [self._request(number) for number in range(8)]
        self._is_ended = threading.Event()
        self.right: list[Seen] = []
        self.verdicts: list[str] = []

    @staticmethod
    def _request(number: int) -> Request:
        random = Random(number)
        prompt = [random.randrange(1, 200) for _ in range(200)]
        body = {"model": "fake", "prompt": prompt, "max_tokens": 8, "temperature": 0}
        return Request(number, "/v1/completions", {**body, "stream": number % 2 == 0})

    def learn(self) -> None:
        """Get the right answers while nothing disturbs."""
        for one in self._requests:
            seen = ask(self._url, one)
            assert seen.status == 200 and not seen.error and not seen.cut, seen
            self.right.append(seen)

    def run(self) -> None:
        number = 0
        while not self._is_ended.wait(0.05):
            one, right = self._requests[number % 8], self.right[number % 8]
            self.verdicts.append(verdict(ask(self._url, one, salt=f"{number}" if number % 3 else ""), right))
            number += 1

    def end(self) -> None:
        self._is_ended.set()
        self.join(PATIENCE_S)


class Cluster:
    """All processes of a run."""

    def __init__(self, folder: Path, network: Network) -> None:
        self.folder = folder
        self.hosts = network.hosts
        self.figures = Figures()
        self._random = Random(7)
        self._log: IO[bytes] = (folder / "clients.log").open("ab")
        self._children: list[subprocess.Popen[bytes]] = []
        self._has_etcd = shutil.which("etcd") is not None
        self._num_starts = 0
        key = folder / "cluster.key"
        subprocess.run(
            [sys.executable, "-m", "mooncake", "certs", "--cluster-key", str(key)],
            check=True, cwd=ROOT, stdout=self._log, stderr=self._log,
        )  # fmt: skip
        save_tokenizer(folder)
        config = folder / "mooncake.toml"
        config.write_text(
            f'[security]\ncluster_key_file = "{key}"\n[transfer]\ntransports = ["shm", "rdma", "tcp"]\n'
            f"rail_patience_s = {RAIL_PATIENCE_S}\n"
        )
        (folder / "sitecustomize.py").write_text(WRONG_CLOCK)
        self._environment = {**os.environ, "MOONCAKE_CONFIG": str(config), "PYTHONPATH": str(folder)}

    @property
    def master(self) -> str:
        first = self.hosts[0].address()
        return f"etcd://{first}:{ETCD_PORT}" if self._has_etcd else f"{first}:{MASTER_PORT}"

    @property
    def masters(self) -> list[Host]:
        """The hosts of the masters, the first one's first."""
        first, _, third, fourth = self.hosts
        return [first, fourth, third] if self._has_etcd else [first]

    # Processes

    def environment(self, host: Host) -> dict[str, str]:
        """The environment of a process on ``host``, with that one's wall clock."""
        return {**self._environment, "WRONG_CLOCK_S": str(CLOCKS_APART_S[host.number - 1])}

    def start_role(self, host: Host, name: str, *words: str) -> Callable[[], None]:
        """Start a role; the result waits until it is ready."""
        self._num_starts += 1
        path = self.folder / f"{name}-{self._num_starts}.log"
        with path.open("wb") as log:
            environment = self.environment(host)
            child = host.start(sys.executable, "-m", "mooncake", *words, log=log, stdout=log, env=environment)
        self._children.append(child)
        return lambda: wait_for_line(child, path, PATIENCE_S)

    def start(self) -> None:
        first = self.hosts[0]
        if self._has_etcd:
            client, peer = (f"http://{first.address()}:{port}" for port in (ETCD_PORT, ETCD_PORT + 1))
            etcd = f"etcd --data-dir {self.folder}/etcd --initial-cluster default={peer}"
            etcd += f" --listen-client-urls {client} --advertise-client-urls {client}"
            etcd += f" --listen-peer-urls {peer} --initial-advertise-peer-urls {peer}"
            self._children.append(first.start(*etcd.split(), log=self._log, stdout=self._log))
        waits = []
        for number, host in enumerate(self.masters):
            words = ["--host", host.address(), "--port", str(MASTER_PORT), *MASTER_FLAGS]
            words += ["--segment-ttl-s", "60"]
            if self._has_etcd:
                words += ["--election", self.master, "--election-lease-s", "1"]
            else:
                words += ["--oplog", str(self.folder / "oplog")]
            waits.append(self.start_role(host, f"master{number}", "master", *words))
        for number in (1, 2):
            waits.append(self.start_node(number))
        for number in (1, 2):
            waits += self._start_engines(number)
        waits.append(self._start_gateway())
        for wait in waits:
            wait()

    def start_node(self, number: int) -> Callable[[], None]:
        """Start the node of a host, on both of its addresses."""
        host = self.hosts[number]
        words = ["--master", self.master, "--name", f"node{number}", "--host", host.addresses]
        words += ["--pool-size", "512MiB", "--no-huge-pages"]
        return self.start_role(host, f"node{number}", "node", *words)

    def _start_engines(self, number: int) -> Iterator[Callable[[], None]]:
        host = self.hosts[number]
        for offset, role in enumerate(("prefill", "decode")):
            words = ["--role", role, "--master", self.master, "--host", host.address()]
            words += ["--port", str(ENGINE_PORT + offset), "--transfer-listen-host", host.addresses]
            yield self.start_role(host, f"{role}{number}", "dev", "fake-engine", *words)

    def _start_gateway(self) -> Callable[[], None]:
        first = self.hosts[0]
        scheduling = ["--probe-interval-s", "0.2", "--probe-timeout-s", "1", "--scheduling", "round_robin"]
        conductor = [*scheduling, "--host", first.address(), "--port", str(CONDUCTOR_PORT)]
        self.start_role(first, "conductor", "conductor", *conductor)()
        engines = [
            word
            for number in (1, 2)
            for offset, role in enumerate(("prefill", "decode"))
            for word in (f"--{role}", f"{self.hosts[number].address()}:{ENGINE_PORT + offset}")
        ]
        words = ["--conductor", f"{first.address()}:{CONDUCTOR_PORT}", *engines, "--stall-timeout-s", "5"]
        words += ["--host", first.address(), "--port", str(GATEWAY_PORT), "--model", str(self.folder)]
        words += ["--served-model-name", "fake", "--protocol", "workers", "--insecure"]
        return self.start_role(first, "gateway", "gateway", *words)

    @contextlib.contextmanager
    def agent(self, host: Host) -> Iterator[Agent]:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": self.environment(host)}
        words = (sys.executable, "-m", "tests.hosts.agent", self.master)
        child = host.start(*words, log=self._log, **pipes)
        try:
            yield Agent(child)
        finally:
            _close(child)

    @contextlib.contextmanager
    def journaling(self) -> Iterator[subprocess.Popen[bytes]]:
        """The client of the kill runs, which puts with two replicas and notes what was acknowledged."""
        config = {
            "name": "load", "master": self.master, "journal": str(self.folder / "journal"),
            "kinds": ["replicated"], "timeout_s": 10.0,
        }  # fmt: skip
        (self.folder / "journal").touch()
        words = (sys.executable, "-m", "tests.kill.client", json.dumps(config))
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": self.environment(self.hosts[3])}
        child = self.hosts[3].start(*words, log=self._log, **pipes)
        try:
            _expect(child, b"ready\n")
            yield child
        finally:
            _close(child)

    def close(self) -> None:
        """Wait for the processes, whose hosts are gone by now."""
        for child in self._children:
            child.kill()
            child.wait()
        self._log.close()


def _close(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(BrokenPipeError):
        child.communicate(timeout=PATIENCE_S)


def _expect(child: subprocess.Popen[bytes], wanted: bytes) -> None:
    assert child.stdout is not None
    ready, _, _ = select.select([child.stdout], [], [], PATIENCE_S)
    line = child.stdout.readline() if ready else b""
    assert line == wanted, f"the client said {line!r} instead of {wanted!r}"


# What happens ---------------------------------------------------------------------------------------


def measure_rails(cluster: Cluster, rounds: int) -> None:
    """One rail, the other, both; then one is cut in the middle of a batch, again and again."""
    figures, near, far = cluster.figures, cluster.hosts[1], cluster.hosts[2]
    figures.rails_mb_s["limits"] = 2 * MBIT / 8
    with cluster.agent(near) as ours, cluster.agent(far) as theirs:

        def move(nets: tuple[int, ...], rounds: int, verify: bool = False) -> dict[str, Any]:
            sources, targets = (",".join(host.address(net) for net in nets) for host in (near, far))
            serving = theirs.ask("serve", hosts=targets, size=BATCH_BYTES)
            ends = {"descriptor": serving["descriptor"], "hosts": sources, "patience_s": RAIL_PATIENCE_S}
            return {**ends, "size": BATCH_BYTES, "rounds": rounds, "verify": verify}

        for name, nets in (("one", (0,)), ("other", (1,)), ("both", (0, 1))):
            before = sum(far.num_received(net) for net in nets)
            done = ours.ask("move", **move(nets, rounds + 1, verify=True))
            figures.rails_mb_s[name] = BATCH_BYTES / sorted(done["took"])[rounds // 2] / 1e6
            carried = sum(far.num_received(net) for net in nets) - before
            if carried < BATCH_BYTES * (rounds + 1):
                figures.broken.append(f"only {carried} bytes of {rounds + 1} batches passed the network")
            if not done["is_right"] or any("shm" in path for path in done["paths"]):
                figures.broken.append(f"{name}: wrong bytes, or the paths {done['paths']}")
        for _ in range(rounds):
            ours.begin("move", **move((0, 1), 12, verify=False))
            cut_at = _cut_under_way(cluster, far)
            done = ours.end()
            ends = [begun + took for begun, took in zip(done["begun"], done["took"], strict=True)]
            during = [end for begun, end in zip(done["begun"], ends, strict=True) if begun < cut_at < end]
            figures.after_cut_s += [end - cut_at for end in during]
            far.mend(1)


def _cut_under_way(cluster: Cluster, far: Host) -> float:
    """Cut the second network of ``far`` once several batches have passed, when about a third of one has."""
    before = far.num_received(1)
    until = time.monotonic() + PATIENCE_S
    while far.num_received(1) - before < int(2.3 * BATCH_BYTES / 2):
        assert time.monotonic() < until, "the batches do not pass"
        time.sleep(0.002)
    far.cut(1)
    return time.monotonic()


def put_on_two_hosts(cluster: Cluster, agent: Agent, number: int) -> dict[str, list[int]]:
    """Puts with two replicas: bytes pass the network to both nodes, and reads give them back."""
    figures, keys = cluster.figures, [f"both-{number}-{each}" for each in range(30)]
    before = _received(cluster)
    done = agent.ask("put", keys=keys, num_replicas=2)
    figures.num_bytes += done["num_bytes"]
    figures.num_carried += _received(cluster) - before
    halves = [key for key in keys if sorted(done["places"].get(key, [])) != ["node1", "node2"]]
    if halves:
        figures.broken.append(f"{len(halves)} objects have no replica on each host: {halves[:3]}")
    if figures.num_carried < figures.num_bytes:
        figures.broken.append(
            f"{figures.num_bytes} bytes were stored, and {figures.num_carried} passed the network"
        )
    promised = {key: [1] for key in done["done"]}
    check(cluster, agent, promised, "after the put")
    return promised


def check(cluster: Cluster, agent: Agent, promised: dict[str, list[int]], when: str) -> None:
    """Read everything that was acknowledged; a read that fails is repeated, as a client would."""
    figures, left = cluster.figures, promised
    figures.num_checked += len(promised)
    until = time.monotonic() + PATIENCE_S
    while left:
        found = agent.ask("check", keys=left)
        figures.broken += [f"wrong {when}: {key}" for key in found["wrong"]]
        left = {key: promised[key] for key in found["missing"]}
        if time.monotonic() > until:
            figures.broken += [f"lost {when}: {key}" for key in left]
            return


def cut_one_way(cluster: Cluster, seconds: float) -> None:
    """What host 3 sends is lost on both networks for a while; what is sent to it arrives."""
    for net in (0, 1):
        cluster.hosts[2].cut(net, incoming=False)
    time.sleep(seconds)
    for net in (0, 1):
        cluster.hosts[2].mend(net)


def cut_rail(cluster: Cluster, seconds: float) -> None:
    """One of the two networks of host 3 is gone for a while."""
    cluster.hosts[2].cut(1)
    time.sleep(seconds)
    cluster.hosts[2].mend(1)


def cut_switch(cluster: Cluster, seconds: float) -> None:
    """The second network is gone for all hosts for a while."""
    for host in cluster.hosts:
        host.cut(1)
    time.sleep(seconds)
    for host in cluster.hosts:
        host.mend(1)


def lose_host(cluster: Cluster, agent: Agent) -> None:
    """Host 2 is gone at once; lookups for what only it had give nothing soon after."""
    figures, last = cluster.figures, cluster.hosts[1].last
    only_there, until, number = list[str](), time.monotonic() + PATIENCE_S, 0
    while not only_there:  # a node that was late with a heartbeat is given nothing until its next one
        if time.monotonic() > until:
            figures.broken.append("no object lies on host 2 alone")
            break
        keys = [f"one-{last}-{number}-{each}" for each in range(40)]
        places = agent.ask("put", keys=keys, num_replicas=1)["places"]
        only_there = [key for key, where in places.items() if where == ["node1"]]
        number += 1
    cluster.hosts[1].kill()
    lost_at = time.monotonic()
    seen = agent.ask("watch", keys=only_there, until=lost_at + WATCHED_S)
    figures.false_hits_s.append(max(0.0, seen["last"] - lost_at))
    if seen["last"] > lost_at + WATCHED_S - 1 or not seen["num_lookups"]:
        figures.broken.append(f"lookups still report objects of a host that is gone: {seen}")


def come_back_elsewhere(cluster: Cluster, agent: Agent, last: int) -> None:
    """Host 2 returns with other addresses and an empty memory; puts reach it there."""
    host = cluster.hosts[1]
    host.readdress(last)
    for net in (0, 1):
        host.mend(net)
    host.boot()
    cluster.start_node(1)()
    keys = [f"again-{last}-{number}" for number in range(10)]
    before = host.num_received(0) + host.num_received(1)
    done = agent.ask("put", keys=keys, num_replicas=2)
    if any(sorted(done["places"].get(key, [])) != ["node1", "node2"] for key in keys):
        cluster.figures.broken.append(f"the host is not used at its new address: {done['places']}")
    if host.num_received(0) + host.num_received(1) - before < done["num_bytes"] / 2:
        cluster.figures.broken.append("no bytes passed the network to the new address")
    check(cluster, agent, {key: [1] for key in done["done"]}, "at the new address")


def _received(cluster: Cluster) -> int:
    return sum(cluster.hosts[number].num_received(net) for number in (1, 2) for net in (0, 1))


def play(folder: Path, rounds: int = 1) -> Figures:
    """Everything, with a load of puts and chat requests from the first cut on."""
    with Network(4, MBIT) as network:
        cluster = Cluster(folder, network)
        try:
            measure_rails(cluster, rounds)
            cluster.start()
            _play_under_load(cluster, rounds)
        finally:
            network.close()
            cluster.close()
    return cluster.figures


def _play_under_load(cluster: Cluster, rounds: int) -> None:
    figures, book = cluster.figures, Book()
    chat = Chat(f"http://{cluster.hosts[0].address()}:{GATEWAY_PORT}")
    with cluster.agent(cluster.hosts[3]) as agent, cluster.journaling() as client:
        promised = put_on_two_hosts(cluster, agent, 0)
        chat.learn()
        chat.start()
        for number in range(rounds):
            cut_rail(cluster, 2.0)
            check(cluster, agent, promised, "after a rail was cut")
            cut_switch(cluster, 2.0)
            check(cluster, agent, promised, "after a switch was lost")
            cut_one_way(cluster, 2.0)
            check(cluster, agent, promised, "after a link was cut one way")
            lose_host(cluster, agent)
            check(cluster, agent, promised, "after a host was lost")
            come_back_elsewhere(cluster, agent, 20 + number)
            promised = put_on_two_hosts(cluster, agent, number + 1)
        chat.end()
        assert client.stdin is not None
        client.stdin.write(b"pause\n")
        client.stdin.flush()
        _expect(client, b"done\n")
        book.read(cluster.folder / "journal")
        figures.broken += [f"wrong: {line}" for line in book.wrong]
        figures.num_acknowledged = book.num_acknowledged
        kept = {key: one.versions for key, one in book.keys.items() if one.is_promised}
        survivors = {key: kept[key] for key in kept if "node2" in book.keys[key].places}
        check(cluster, agent, survivors, "of the load")
    figures.num_answers = chat.verdicts.count("equal")
    figures.num_errors = chat.verdicts.count("error")
    figures.broken += [one for one in chat.verdicts if one not in ("equal", "error")]

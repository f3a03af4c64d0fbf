# SPDX-License-Identifier: Apache-2.0
"""``mooncake up --on ray`` on four Ray nodes of this machine, each with an address of its own on loopback.

The nodes share memory and processor, so nothing here shows a speed, and copies between them go over shared
memory. The tests show where Ray places roles, that roles come back under their names, also on another node,
and that answers go on while a node is killed.
"""

from __future__ import annotations

import contextlib
import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mooncake.cli.certs import make_cluster_key
from mooncake.security import Identity, SecuritySettings
from tests.cluster import ADMIN_KEY, Cluster, running_cluster, wait_for

pytestmark = [pytest.mark.processes, pytest.mark.model, pytest.mark.timeout(900)]

# Not 127.0.0.1: Ray takes that for a name of the machine and replaces it.
HEAD, *OTHERS = [f"127.0.0.{number}" for number in range(2, 6)]
SPARE = "127.0.0.6"
OBJECT_STORE_BYTES = 80 << 20
PROMPTS = [[*range(1000 * number, 1000 * number + 160)] for number in range(1, 9)]
NUM_TOKENS = 8
FLAGS = ("--prefill", "2", "--decode", "2", "--pool-size", "128MiB", "--kv-cache-size", "64MiB")


class RayNodes:
    """A Ray cluster of this machine, without a dashboard and with the smallest object stores."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster as RayCluster

        self._cluster = RayCluster()
        self._nodes: dict[str, Any] = {}

    @property
    def address(self) -> str:
        address: str = self._cluster.address
        return address

    def add(self, host: str) -> None:
        self._nodes[host] = self._cluster.add_node(
            node_ip_address=host,
            num_cpus=4,
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
        )

    def kill(self, host: str) -> None:
        """As a host that loses its power: no process of the node gets to say anything."""
        self._cluster.remove_node(self._nodes.pop(host), allow_graceful=False)

    def files(self) -> list[Path]:
        """What Ray keeps of this session on disk."""
        folder = Path(self._cluster.head_node.get_session_dir_path())
        return [path for path in folder.rglob("*") if path.is_file()]

    def close(self) -> None:
        self._cluster.shutdown()


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    found = RayNodes()
    try:
        for host in (HEAD, *OTHERS):
            found.add(host)
        yield found
    finally:
        found.close()


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("key") / "cluster.key"
    make_cluster_key(path)
    return path


@pytest.fixture(scope="module")
def cluster(nodes: RayNodes, key_file: Path) -> Iterator[Cluster]:
    identity = Identity(SecuritySettings(cluster_key_file=str(key_file)))
    with running_cluster("--on", "ray", "--ray-address", nodes.address, *FLAGS, identity=identity) as found:
        found.wait_until_routable()
        yield found


@pytest.fixture(scope="module")
def answers(cluster: Cluster) -> list[list[int]]:
    """The right answer to each prompt, computed by an undisturbed cluster."""
    return [answer(cluster, prompt)[0] for prompt in PROMPTS]


def answer(cluster: Cluster, prompt: list[int]) -> tuple[list[int], int]:
    """Token ids of the answer, and how many tokens of the prompt were cached at the prefill worker."""
    found = cluster.complete(prompt, NUM_TOKENS)
    assert found.status == 200, found.body
    cached: int = found.body["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found.body["choices"][0]["token_ids"], cached


def host_of(cluster: Cluster, role: str) -> str:
    return cluster.address(role).rpartition(":")[0]


def roles(cluster: Cluster, *kinds: str) -> list[str]:
    return [name for name in cluster.status["roles"] if name.startswith(kinds)]


class Load:
    """Requests one after another from two threads, until closed: wrong answers and failures are kept."""

    def __init__(self, cluster: Cluster, answers: list[list[int]]) -> None:
        self._cluster = cluster
        self._answers = answers
        self._ends = threading.Event()
        self.num_right = 0
        self.wrong: list[str] = []
        self._threads = [threading.Thread(target=self._run, args=[first]) for first in (0, 4)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()

    def _run(self, number: int) -> None:
        while not self._ends.is_set():
            number = (number + 1) % len(PROMPTS)
            try:
                found = self._cluster.stream(PROMPTS[number], NUM_TOKENS)
            except OSError as error:
                self.wrong.append(repr(error))
                continue
            if found.error is None and found.token_ids == self._answers[number]:
                self.num_right += 1
            else:
                self.wrong.append(f"prompt {number}: {found.error or found.token_ids}")


def test_every_ray_node_has_a_daemon_and_workers_are_spread(cluster: Cluster) -> None:
    assert {host_of(cluster, name) for name in roles(cluster, "node-")} == {HEAD, *OTHERS}
    workers = roles(cluster, "prefill-", "decode-")
    assert len(workers) == 4 and {host_of(cluster, name) for name in workers} == {HEAD, *OTHERS}
    assert {host_of(cluster, name) for name in ("metadata", "master", "conductor")} == {HEAD}
    assert "ready" in cluster.log("decode-0"), "its log is copied to this host"


def test_ray_sees_no_secret(
    cluster: Cluster, nodes: RayNodes, key_file: Path, answers: list[list[int]]
) -> None:
    [*keys] = [line.split()[-1].encode() for line in key_file.read_text().splitlines() if line.strip()]
    hidden = [ADMIN_KEY.encode(), *(key for key in keys if len(key) >= 16)]
    assert len(hidden) > 1
    shown = {str(path): path.read_bytes() for path in nodes.files()}
    assert any("mooncake-gateway" in name for name in shown), "Ray keeps the roles' logs"
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            shown[str(path)] = path.read_bytes()
    for secret in hidden:
        assert [name for name, content in shown.items() if secret in content] == []


def test_a_killed_worker_comes_back_at_its_address(cluster: Cluster, answers: list[list[int]]) -> None:
    before = cluster.address("decode-0")
    pid = cluster.kill("decode-0", signal.SIGKILL)
    cluster.wait_until_restarted("decode-0", pid)
    assert cluster.address("decode-0") == before
    cluster.wait_until_routable()
    assert [answer(cluster, prompt)[0] for prompt in PROMPTS] == answers


def test_a_killed_node_under_load(
    cluster: Cluster, nodes: RayNodes, answers: list[list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    before = {name: cluster.address(name) for name in cluster.status["roles"]}
    lost_host = next(
        host for host in OTHERS if host in {host_of(cluster, "decode-0"), host_of(cluster, "decode-1")}
    )
    lost = [name for name, address in before.items() if address.startswith(f"{lost_host}:")]
    workers = [name for name in lost if not name.startswith("node-")]
    [daemon] = [name for name in lost if name.startswith("node-")]
    assert workers

    def are_back() -> bool:
        entries = [cluster.status["roles"][name] for name in workers]
        return all(one["state"] == "ready" and lost_host not in one["address"] for one in entries)

    def gateway_knows() -> bool:
        rows = cluster.get("/status").body["instances"]
        ready = {row["instance"] for row in rows if row["health"] == "ready"}
        return ready == {cluster.address(name) for name in roles(cluster, "prefill-", "decode-")}

    with Load(cluster, answers) as load:
        wait_for(lambda: load.num_right >= 4, "answers before the loss", 120)
        nodes.kill(lost_host)
        done = load.num_right
        wait_for(lambda: load.num_right >= done + 8, "answers without the node", 240)
        found = [answer(cluster, prompt) for prompt in PROMPTS]
        wait_for(are_back, f"{workers} on other nodes", 300)
        wait_for(gateway_knows, "the gateway to know the workers' new addresses", 120)
        done = load.num_right
        wait_for(lambda: load.num_right >= done + 8, "answers with the new workers", 120)
    assert load.wrong == []
    assert [tokens for tokens, _ in found] == answers
    share = sum(cached for _, cached in found) / sum(len(prompt) for prompt in PROMPTS)
    with capsys.disabled():
        print(
            f"\n{lost_host} lost with {lost}: {load.num_right} right answers, {share:.0%} of prompts cached"
        )
    assert share >= 0.5, "the cache is warm"
    kept = [name for name in before if name not in lost]
    assert {name: cluster.address(name) for name in kept} == {name: before[name] for name in kept}
    assert cluster.status["roles"][daemon]["state"] != "ready", "there is no further Ray node for it"

    nodes.add(SPARE)
    wait_for(lambda: cluster.status["roles"][daemon]["state"] == "ready", f"{daemon} on the new node", 240)
    assert host_of(cluster, daemon) == SPARE
    assert [answer(cluster, prompt)[0] for prompt in PROMPTS] == answers


def test_the_status_file_shows_every_role(cluster: Cluster) -> None:
    entries = json.loads((cluster.folder / "status.json").read_text())["roles"]
    assert len(entries) == 12 and all(entry["num_starts"] >= 1 for entry in entries.values())

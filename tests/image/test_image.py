# SPDX-License-Identifier: Apache-2.0
"""The image and the rendered compose file in real containers, with the rules of the network policies.

``scripts/test-image`` builds the image from ``deploy/Containerfile`` and runs these in a network namespace.
"""

from __future__ import annotations

import json
import os
import re
import ssl
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mooncake.cli import boards, compose, kubernetes
from mooncake.cli.alerts import ALERTS
from mooncake.cli.deploy import DeploySettings, files_of, make_credentials
from mooncake.cli.metric_declarations import declared_metrics
from mooncake.cli.panels import series_in
from tests.cluster import wait_for
from tests.image.containers import LIMITS, TMPFS, Compose, Engine, Firewall, engine_of_this_run
from tests.inference.conftest import Reference
from tests.inference.test_api import make_tokenizer

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]
PATIENCE_S = 300.0
USER = kubernetes.USER
SETTINGS = DeploySettings(
    masters=2,
    nodes=2,
    prefill=1,
    max_prefill=1,
    decode=1,
    max_decode=1,
    gpus=0,
    pool_size_bytes=64 << 20,
    kv_cache_size_bytes=16 << 20,
)
IMAGE = SETTINGS.image
CONFINED: tuple[str, ...] = (
    "--network",
    "none",
    "--read-only",
    "--read-only-tmpfs=false",
    "--tmpfs",
    f"/tmp:{TMPFS}",
)
CONFINED += ("--cap-drop", "ALL", "--security-opt", "no-new-privileges:true", *LIMITS)
BUILD_TOOLS = ("gcc", "g++", "cc", "c++", "clang", "make", "cmake", "ninja", "git", "ld", "as")


@pytest.fixture(scope="module")
def engine() -> Engine:
    return engine_of_this_run()


@pytest.fixture(scope="module")
def settings_of_image(engine: Engine) -> Any:
    return json.loads(engine("inspect", "--type", "image", IMAGE))[0]


class Cluster:
    """The compose file of ``SETTINGS``, running, with a firewall at each container."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.engine, self.folder = engine, folder
        model = folder / "models" / "model"
        Reference("llama", model)
        make_tokenizer(model)
        for file in model.iterdir():  # as an operator's models: any user may read them
            file.chmod(0o644)
        for path, text in files_of(SETTINGS).items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
        make_credentials(folder / "secrets")
        for file in [folder / "secrets", *(folder / "secrets").iterdir()]:
            os.chown(file, USER, USER)
        self.programs = compose.programs_of(SETTINGS)
        self.compose = Compose(
            engine,
            folder / "compose.yaml",
            {"MOONCAKE_MODELS": str(folder / "models")},
            left_out=("grafana",),  # not among Debian's packages
        )
        self.firewall = Firewall(self.compose.addresses)
        self.policies = {
            one["metadata"]["name"]: one["spec"]["ingress"] for one in kubernetes.network_policies(SETTINGS)
        }

    def confine(self, name: str) -> None:
        """Let only those connect to a container whom the NetworkPolicy of its role names."""
        if name not in self.programs:
            return
        state = self.compose.state(name)
        assert state is not None
        program = self.programs[name]
        allowed: list[tuple[str, int | None]] = []
        for rule in self.policies[program.role]:
            ports = [program.ports.get(one["port"], -1) for one in rule.get("ports", [])]
            for source in self._sources(rule.get("from")):
                allowed += [(source, port) for port in ports if port != -1]
                allowed += [(source, None)] if not ports else []
        self.firewall.close(name, state["Pid"], allowed)

    def _sources(self, origins: list[Any] | None) -> list[str]:
        """Containers that a rule's ``from`` selects; the empty name, for all, where there is none."""
        if origins is None:
            return [""]
        found = []
        for origin in origins:
            if "namespaceSelector" in origin:
                found.append("prometheus")
                continue
            wanted = origin["podSelector"]["matchLabels"][kubernetes.COMPONENT]
            found += [name for name, program in self.programs.items() if program.role == wanted]
        return found

    def ask(self, prompt: str) -> tuple[str, dict[str, str]]:
        """The text of a completion, and the answer's headers."""
        (key,) = re.findall(r'^key = "(.+)"', (self.folder / "secrets" / "clients.toml").read_text(), re.M)
        tls = ssl.create_default_context(cafile=str(self.folder / "secrets" / "ca.pem"))
        tls.check_hostname = False
        body = {"model": SETTINGS.model_name, "prompt": prompt, "max_tokens": 8, "temperature": 0}
        request = urllib.request.Request(
            f"https://{self.compose.addresses['gateway']}:8000/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", "Authorization": f"Bearer {key}"},
        )
        with urllib.request.urlopen(request, timeout=120, context=tls) as answer:
            headers = {name.lower(): value for name, value in answer.headers.items()}
            return json.loads(answer.read())["choices"][0]["text"], headers

    def prometheus(self, path: str, **query: str) -> Any:
        """What Prometheus answers at ``path`` of its API."""
        address = self.compose.addresses["prometheus"]
        url = f"http://{address}:9090/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            return json.loads(answer.read())["data"]


@pytest.fixture(scope="module")
def cluster(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    found = Cluster(engine, tmp_path_factory.mktemp("compose"))
    try:
        found.compose.start(found.confine, PATIENCE_S)
        wait_for(lambda: found.compose.is_healthy("gateway"), "the gateway to be healthy", PATIENCE_S)
        yield found
    finally:
        for name in found.compose.services:
            (found.folder / f"{name}.log").write_text(found.compose.said([name]))
        found.compose.stop()


def test_its_user_has_no_rights_and_no_build_tools(engine: Engine, settings_of_image: Any) -> None:
    assert settings_of_image["Config"]["User"] == f"{USER}:{USER}"
    assert settings_of_image["Healthcheck"]["Test"][0] == "CMD"
    program = (
        "import json, os, shutil, stat; print(json.dumps({"
        "'uid': os.getuid(), 'groups': os.getgroups(),"
        f"'tools': [one for one in {BUILD_TOOLS!r} if shutil.which(one)],"
        "'status': dict(line.split(':', 1) for line in open('/proc/self/status')),"
        "'writable': [at for at, _, _ in os.walk('/') if not at.startswith(('/proc', '/sys', '/dev'))"
        " and os.access(at, os.W_OK)],"
        "'keys': [f'{at}/{one}' for at, folders, files in os.walk('/opt') for one in files"
        " if one.endswith(('.key', '.toml')) or one in ('admin.env', '.git')]}))"
    )
    found = json.loads(engine("run", "--rm", *CONFINED, IMAGE, "python", "-c", program))
    assert found["uid"] == USER and set(found["groups"]) <= {USER}
    assert found["tools"] == []
    assert int(found["status"]["CapEff"], 16) == int(found["status"]["CapBnd"], 16) == 0
    assert found["status"]["NoNewPrivs"].strip() == "1" and found["status"]["Seccomp"].strip() == "2"
    assert found["writable"] == ["/tmp"], "a read-only root has one folder to write to"
    assert not [one for one in found["keys"] if one.endswith(".key")], "credentials of the checkout"


def test_programs_of_the_user_cannot_change_the_installation(engine: Engine) -> None:
    """Even with a root that can be written to: nothing that runs belongs to the user."""
    program = (
        "import os; print([at for at, folders, files in os.walk('/opt/mooncake')"
        " if any(os.access(one, os.W_OK) and not os.path.islink(one)"
        " for one in [at, *(f'{at}/{file}' for file in files)])])"
    )
    confined = ("--network", "none", "--cap-drop", "ALL", *LIMITS)
    assert engine("run", "--rm", *confined, IMAGE, "python", "-c", program).strip() == "[]"


def test_without_a_command_it_prints_its_commands(engine: Engine) -> None:
    printed = engine("run", "--rm", *CONFINED, IMAGE)
    for role in ("master", "node", "worker", "conductor", "gateway"):
        assert re.search(rf"\b{role}\b", printed)


def test_its_own_health_check_needs_a_listener(engine: Engine) -> None:
    """The image's own check, without any of compose's: it fails until the program listens."""
    name = "own-check"
    try:
        engine("run", "--detach", "--name", name, *CONFINED, IMAGE, "sleep", "300")
        assert engine.tried("healthcheck", "run", name)[0] == 1
        engine("rm", "--force", "--time", "0", name)
        words = ("mooncake", "master", "--host", "127.0.0.1", "--oplog", "/tmp/oplog")
        engine("run", "--detach", "--name", name, *CONFINED, IMAGE, *words)
        wait_for(lambda: engine.tried("healthcheck", "run", name)[0] == 0, "a passed check", 60)
        engine("stop", "--time", "30", name)
        state = json.loads(engine("inspect", "--type", "container", name))[0]["State"]
        assert state["ExitCode"] == 0, "SIGTERM ends the program in order"
    finally:
        engine.tried("rm", "--force", "--time", "0", name)


def test_every_service_is_healthy_and_confined(cluster: Cluster) -> None:
    for name in cluster.programs:
        wait_for(lambda name=name: cluster.compose.is_healthy(name), f"{name} to be healthy", PATIENCE_S)  # type: ignore[misc]
        state = cluster.compose.state(name)
        assert state is not None
        status = dict(
            line.split(":", 1) for line in Path(f"/proc/{state['Pid']}/status").read_text().splitlines()
        )
        assert status["Uid"].split() == [str(USER)] * 4, name
        assert int(status["CapEff"], 16) == 0 and status["NoNewPrivs"].strip() == "1", name
        assert status["Seccomp"].strip() == "2", name
        written = cluster.engine.tried("exec", name, "touch", "/opt/mooncake/here")
        assert written[0] != 0 and "Read-only file system" in written[2], name


def test_it_answers_and_no_policy_refuses_a_connection_that_a_role_makes(cluster: Cluster) -> None:
    prompt = "0123456789" * 20
    first, _ = cluster.ask(prompt)
    again, _ = cluster.ask(prompt)
    assert first and again == first
    ways = set()
    for number in range(12):
        text, headers = cluster.ask(f"{number}" * 150)
        assert text
        ways.add(headers["x-mooncake-kv"])
    assert "push" in ways, "how KV goes by default within one cluster"
    assert cluster.firewall.dropped() == set()


def test_a_policy_refuses_what_no_role_needs(cluster: Cluster) -> None:
    """The rules of this test are in force: the gateway has no business at a node."""
    before = cluster.firewall.dropped()
    program = "import socket; socket.create_connection(('node-0', 12345), 2)"
    status, _, error = cluster.engine.tried("exec", "gateway", "python", "-c", program)
    assert status != 0 and "timed out" in error
    assert cluster.firewall.dropped() - before == {("gateway", "node-0")}


def test_listeners_are_the_ports_of_the_manifests(cluster: Cluster) -> None:
    """What listens beyond loopback is a port of the program's table, or one that a policy opens."""
    for name, program in cluster.programs.items():
        state = cluster.compose.state(name)
        assert state is not None
        command = ["nsenter", "--target", str(state["Pid"]), "--net", "ss", "-Hltn"]
        lines = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout
        addresses = [line.split()[3].rpartition(":") for line in lines.splitlines()]
        ports = {int(port) for host, _, port in addresses if not host.startswith(("127.", "[::1]"))}
        assert set(program.ports.values()) <= ports, f"{name} listens on {ports}"
        opened = any("ports" not in rule for rule in cluster.policies[program.role])
        assert opened or ports <= set(program.ports.values()), f"{name} listens on {ports}"


def test_prometheus_reads_every_page_and_every_query(cluster: Cluster) -> None:
    def is_read() -> bool:
        targets = cluster.prometheus("targets")["activeTargets"]
        up = {one["labels"]["instance"].partition(":")[0] for one in targets if one["health"] == "up"}
        return up == set(cluster.programs)

    wait_for(is_read, "Prometheus to read every page", 120)
    names = set(cluster.prometheus("label/__name__/values"))
    connectors = [one for one in declared_metrics() if one.module.startswith("connectors/vllm/")]
    of_vllm = {name for one in connectors for name in one.series}
    for query in boards.queries("1m", with_others=False):
        assert cluster.prometheus("query", query=query)["resultType"] == "vector"
        unlabelled = series_in(query) - names - of_vllm
        # A family with labels has no series before its first event; its page has its type all the same.
        for name in unlabelled:
            family = re.sub(r"_(bucket|sum|count)$", "", name)
            assert cluster.prometheus("metadata", metric=name) or cluster.prometheus(
                "metadata", metric=family
            ), name

    def are_evaluated() -> bool:
        (group,) = cluster.prometheus("rules")["groups"]
        return all(rule["health"] == "ok" for rule in group["rules"])

    wait_for(are_evaluated, "every alert to be evaluated", 60)
    (group,) = cluster.prometheus("rules")["groups"]
    assert len(group["rules"]) == len(ALERTS)
    firing = {rule["name"] for rule in group["rules"] if rule["state"] == "firing"}
    assert not firing, "alerts of a cluster that is in order"

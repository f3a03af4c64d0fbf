# SPDX-License-Identifier: Apache-2.0
"""The cluster that rendered manifests describe, with processes for containers, loopback addresses for pods.

Every command is the one of its container: arguments, variables, init containers, Secrets, volumes. Replaced
are what Kubernetes replaces (variables, names in DNS, paths of mounts) and the address of the API server, a
double.
"""

from __future__ import annotations

import copy
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from mooncake.cli import boards
from mooncake.cli.deploy import CREDENTIALS, DeploySettings, files_of, make_credentials
from mooncake.cli.metric_declarations import declared_metrics
from mooncake.cli.panels import series_in
from tests import kustomize
from tests.cluster import wait_for
from tests.contract.kubernetes_api import NAMESPACE, KubernetesApi
from tests.inference.conftest import Reference
from tests.inference.test_api import make_tokenizer

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]
PATIENCE_S = 240.0
SETTINGS = DeploySettings(
    masters=2,
    prefill=1,
    max_prefill=1,
    decode=1,
    max_decode=1,
    gpus=0,
    pool_size_bytes=64 << 20,
    kv_cache_size_bytes=16 << 20,
)
NUM_HOSTS = 2
"""Hosts with the label of nodes."""


@dataclass
class Pod:
    """One pod: its template, name and address, and the process of its container."""

    name: str
    role: str
    address: str
    template: dict[str, Any]
    process: subprocess.Popen[bytes] | None = None
    log: Path = field(default_factory=Path)


class Kubelet:
    """Starts every pod of ``objects`` as processes; ``folder`` has volumes, Secrets and logs."""

    def __init__(
        self, objects: list[Any], folder: Path, secrets: Path, model: Path, api: KubernetesApi
    ) -> None:
        self.folder, self.secrets, self.model, self.api = folder, secrets, model, api
        self.objects = objects
        self.pods: list[Pod] = []
        self.beside: list[subprocess.Popen[bytes]] = []
        """Processes of containers that run beside a pod's own."""
        self.names: dict[str, str] = {}
        for one in objects:
            kind, name, spec = one["kind"], one["metadata"]["name"], one.get("spec", {})
            if kind == "StatefulSet":
                self._add(
                    name, spec["template"], [f"{name}-{n}" for n in range(spec["replicas"])], service=name
                )
            elif kind == "DaemonSet":
                self._add(name, spec["template"], [f"{name}-{n}" for n in range(NUM_HOSTS)])
            elif kind == "Deployment":
                self._add(name, spec["template"], [f"{name}-0"])
                self.names[name] = self.pods[-1].address
            elif kind == "LeaderWorkerSet":
                template = spec["leaderWorkerTemplate"]["workerTemplate"]
                (fewest,) = [
                    scaler["spec"]["minReplicas"]
                    for scaler in objects
                    if scaler["kind"] == "HorizontalPodAutoscaler"
                    and scaler["spec"]["scaleTargetRef"]["name"] == name
                ]
                self._add(name, template, [f"{name}-{n}" for n in range(fewest)], service=name)
            elif kind == "Lease":
                lease = copy.deepcopy(one)
                lease["metadata"]["resourceVersion"] = "1"
                api.store.leases[one["metadata"]["namespace"], name] = lease
            elif kind == "Role":
                (rule,) = spec.get("rules") or one["rules"]
                api.store.verbs = set(rule["verbs"])

    def _add(self, role: str, template: dict[str, Any], names: list[str], service: str = "") -> None:
        for name in names:
            address = f"127.0.7.{len(self.pods) + 1}"
            self.pods.append(Pod(name, role, address, template))
            if service:
                self.names[f"{name}.{service}"] = address

    def start(self) -> None:
        for pod in self.pods:
            mounts = self._volumes(pod)
            spec = pod.template["spec"]
            for container in spec.get("initContainers", []):
                command = self._command(pod, container, mounts)
                if container.get("restartPolicy") == "Always":
                    self.beside.append(subprocess.Popen(command))
                else:
                    subprocess.run(command, check=True, timeout=60)
            (container,) = spec["containers"]
            pod.log = self.folder / f"{pod.name}.log"
            with pod.log.open("wb") as output:
                pod.process = subprocess.Popen(
                    self._command(pod, container, mounts),
                    env=self._environment(pod, container, mounts),
                    stdout=output,
                    stderr=output,
                )

    def stop(self) -> None:
        for process in self.beside:
            process.kill()
            process.wait(30)
        for pod in self.pods:
            if pod.process is not None:
                pod.process.kill()
                pod.process.wait(30)

    def _volumes(self, pod: Pod) -> dict[str, Path]:
        """The folder of each volume, by its name."""
        spec, found = pod.template["spec"], {}
        generators = yaml.safe_load((self.secrets / "kustomization.yaml").read_text())["secretGenerator"]
        for volume in [*spec["volumes"], {"name": "oplog"}]:
            path = self.folder / pod.name / volume["name"]
            path.mkdir(parents=True)
            if "secret" in volume:
                (secret,) = [one for one in generators if one["name"] == volume["secret"]["secretName"]]
                for name in secret["files"]:
                    (path / name).write_bytes((self.secrets / name).read_bytes())
                    (path / name).chmod(volume["secret"].get("defaultMode", 0o644))
            if "persistentVolumeClaim" in volume:
                (path / Path(SETTINGS.model).name).symlink_to(self.model)
            found[volume["name"]] = path
        return found

    def _command(self, pod: Pod, container: dict[str, Any], volumes: dict[str, Path]) -> list[str]:
        words = [*container["command"], *container.get("args", [])]
        words = [self._word(pod, container, volumes, word) for word in words]
        return [sys.executable, "-m", *words] if words[0] == "mooncake" else words

    def _word(self, pod: Pod, container: dict[str, Any], volumes: dict[str, Path], word: str) -> str:
        for mount in container["volumeMounts"]:
            path = mount["mountPath"]
            if word == path or word.startswith(f"{path}/"):
                return str(volumes[mount["name"]]) + word.removeprefix(path)
            word = word.replace(f" {path}/", f" {volumes[mount['name']]}/")  # in a shell's script
        word = word.replace("$(POD_IP)", pod.address).replace("$(POD_NAME)", pod.name)
        assert "$(" not in word
        if word.startswith("k8s://"):
            return f"{word}?{self.api.url().partition('?')[2]}"
        for name in sorted(self.names, key=len, reverse=True):
            word = re.sub(rf"(?<![\w.-]){re.escape(name)}:", f"{self.names[name]}:", word)
        return word

    def _environment(self, pod: Pod, container: dict[str, Any], volumes: dict[str, Path]) -> dict[str, str]:
        found = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
        for one in container["env"]:
            if "value" in one:
                found[one["name"]] = self._word(pod, container, volumes, one["value"])
            elif "secretKeyRef" in one["valueFrom"]:
                found[one["name"]] = self.admin_key
            else:
                path = one["valueFrom"]["fieldRef"]["fieldPath"]
                found[one["name"]] = {"status.podIP": pod.address, "metadata.name": pod.name}[path]
        return found

    @property
    def admin_key(self) -> str:
        name, _, value = (self.secrets / "admin.env").read_text().strip().partition("=")
        assert name == "ADMIN_API_KEY"
        return value

    def probe(self, pod: Pod) -> bool:
        """The readiness probe of a pod's container, as a kubelet makes it."""
        assert pod.process is not None and pod.process.poll() is None, pod.log.read_text()[-3000:]
        (container,) = pod.template["spec"]["containers"]
        ports = {one["name"]: one["containerPort"] for one in container["ports"]}
        probe = container["readinessProbe"]
        try:
            if "exec" in probe:
                mounted = str(self.folder / pod.name / "tls")
                words = [word.replace(CREDENTIALS, mounted) for word in probe["exec"]["command"][1:]]
                environment = {"POD_IP": pod.address}
                done = subprocess.run([sys.executable, *words], env=environment, capture_output=True)
                return done.returncode == 0
            if "tcpSocket" in probe:
                socket.create_connection((pod.address, ports[probe["tcpSocket"]["port"]]), 5).close()
                return True
            get = probe["httpGet"]
            url = f"{get['scheme'].lower()}://{pod.address}:{ports[get['port']]}{get['path']}"
            tls = ssl._create_unverified_context()
            with urllib.request.urlopen(url, timeout=5, context=tls) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def scrape(self) -> dict[str, str]:
        """The page of each pod, read as its ServiceMonitor says, by the pod's name."""
        found: dict[str, str] = {}
        for monitor in self.objects:
            if monitor["kind"] != "ServiceMonitor":
                continue
            wanted = monitor["spec"]["selector"]["matchLabels"]
            (endpoint,) = monitor["spec"]["endpoints"]
            for pod in self.pods:
                if not wanted.items() <= pod.template["metadata"]["labels"].items():
                    continue
                (container,) = pod.template["spec"]["containers"]
                ports = {one["name"]: one["containerPort"] for one in container["ports"]}
                url = f"{endpoint['scheme']}://{pod.address}:{ports[endpoint['port']]}{endpoint['path']}"
                found[pod.name] = self._page(url, endpoint)
        return found

    def _page(self, url: str, endpoint: dict[str, Any]) -> str:
        headers = {"Authorization": f"Bearer {self.admin_key}"} if "authorization" in endpoint else {}
        tls = None
        if "tlsConfig" in endpoint:
            config = endpoint["tlsConfig"]
            tls = ssl.create_default_context(cafile=str(self.secrets / config["ca"]["secret"]["key"]))
            tls.check_hostname = False  # Prometheus checks it for serverName, not for the address
            files = config["cert"]["secret"]["key"], config["keySecret"]["key"]
            tls.load_cert_chain(*(self.secrets / name for name in files))
        with urllib.request.urlopen(
            urllib.request.Request(url, headers=headers), timeout=30, context=tls
        ) as answer:
            text: str = answer.read().decode()
            return text

    def console(self, page: str) -> Any:
        """The JSON of a page of the gateway's console, with the operators' key."""
        tls = ssl.create_default_context(cafile=str(self.secrets / "ca.pem"))
        tls.check_hostname = False
        url = f"https://{self.names['gateway']}:8000/console/{page}.json"
        request = urllib.request.Request(url, headers={"X-API-Key": self.admin_key})
        with urllib.request.urlopen(request, timeout=60, context=tls) as answer:
            return json.loads(answer.read())

    def ask(self, prompt: str, key: str) -> tuple[int, Any]:
        """A completion by the gateway's port for clients."""
        tls = ssl.create_default_context(cafile=str(self.secrets / "ca.pem"))
        tls.check_hostname = False
        body = {"model": SETTINGS.model_name, "prompt": prompt, "max_tokens": 8, "temperature": 0}
        request = urllib.request.Request(
            f"https://{self.names['gateway']}:8000/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", "Authorization": f"Bearer {key}"},
        )
        try:
            with urllib.request.urlopen(request, timeout=120, context=tls) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())


@pytest.fixture(scope="module")
def kubelet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kubelet]:
    folder = tmp_path_factory.mktemp("rendered")
    model = folder / "model"
    Reference("llama", model)
    make_tokenizer(model)
    for path, text in files_of(SETTINGS).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    make_credentials(folder / "secrets")
    api = KubernetesApi(folder)
    api.store.verbs = set()
    objects = kustomize.build(folder / "kubernetes" / "overlays" / "workers-lws")
    kubelet = Kubelet(objects, folder / "pods", folder / "secrets", model, api)
    try:
        kubelet.start()
        wait_for(lambda: all(kubelet.probe(pod) for pod in kubelet.pods), "every pod to be ready", PATIENCE_S)
        yield kubelet
    finally:
        kubelet.stop()
        api.stop()


def client_key(kubelet: Kubelet) -> str:
    (found,) = re.findall(r'^key = "(.+)"', (kubelet.secrets / "clients.toml").read_text(), re.M)
    return str(found)


def test_it_answers_before_and_after_a_change_of_the_leader(kubelet: Kubelet) -> None:
    roles = sorted(pod.role for pod in kubelet.pods)
    assert roles == ["conductor", "decode", "gateway", "master", "master", "node", "node", "prefill"]
    key, prompt = client_key(kubelet), "0123456789" * 20
    assert kubelet.ask(prompt, "sk-a key that is not in the file")[0] == 401
    status, first = kubelet.ask(prompt, key)
    assert status == 200 and first["usage"]["prompt_tokens"] > 100, first
    wait_for(lambda: leader(kubelet) is not None, "a leader", PATIENCE_S)
    was = leader(kubelet)
    assert was is not None and was.process is not None
    was.process.send_signal(signal.SIGTERM)
    assert was.process.wait(60) == 0
    wait_for(lambda: leader(kubelet) not in (None, was), "another master to lead", PATIENCE_S)
    status, again = kubelet.ask(prompt, key)
    assert status == 200 and again["choices"][0]["text"] == first["choices"][0]["text"]


def leader(kubelet: Kubelet) -> Pod | None:
    """The master that the Lease names as its holder."""
    lease = kubelet.api.store.leases[NAMESPACE, "masters"]
    holder = lease.get("spec", {}).get("holderIdentity", "").partition(":")[0]
    return next((pod for pod in kubelet.pods if pod.address == holder), None)


def test_the_console_shows_the_store(kubelet: Kubelet) -> None:
    assert not kubelet.console("cluster")["store_trouble"]
    found = kubelet.console("store")["segments"]
    assert len(found) >= NUM_HOSTS, found


def test_every_query_of_the_boards_finds_its_metrics(kubelet: Kubelet) -> None:
    kubelet.pods = [pod for pod in kubelet.pods if pod.process is not None and pod.process.poll() is None]
    pages = kubelet.scrape()
    assert pages.keys() == {pod.name for pod in kubelet.pods}
    names: set[str] = set()
    for page in pages.values():
        for name, kind in re.findall(r"^# TYPE (\S+) (\w+)$", page, re.M):
            ends = ("_bucket", "_count", "_sum") if kind == "histogram" else ("",)
            names |= {name + end for end in ends}
    of_vllm = [one for one in declared_metrics() if one.module.startswith("connectors/vllm/")]
    names |= {name for one in of_vllm for name in one.series}  # of another overlay
    for query in boards.queries(with_others=False):
        assert series_in(query) <= names | {"up"}, query


def test_a_key_is_withdrawn_and_another_added_without_a_restart(kubelet: Kubelet) -> None:
    """A kubelet changes a Secret's files in the pods that have it. The last test, as it changes the key."""
    old, new = client_key(kubelet), "sk-another-key-which-is-long-enough"
    assert kubelet.ask("0123456789", old)[0] == 200
    given = kubelet.folder / "gateway-0" / "given" / "clients.toml"
    given.write_text(given.read_text().replace(old, new))
    wait_for(lambda: kubelet.ask("0123456789", old)[0] == 401, "the withdrawn key to be refused", PATIENCE_S)
    assert kubelet.ask("0123456789", new)[0] == 200

# SPDX-License-Identifier: Apache-2.0
"""Rendered files: the repository has what the code writes, and every tool that reads them accepts them."""

from __future__ import annotations

import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography import x509

from mooncake import config
from mooncake.cli import kubernetes
from mooncake.cli.commands import COMMANDS
from mooncake.cli.deploy import (
    CLIENTS_FILE,
    CREDENTIALS,
    NODE_CHECK,
    NODE_WEB_PORT,
    DeploySettings,
    files_of,
    make_credentials,
)
from mooncake.console.store_source import RemoteMaster
from mooncake.errors import InvalidArgument
from mooncake.http.server import serve_metrics
from mooncake.security import Identity, SecuritySettings
from mooncake.store.node.node import IS_MOUNTED
from tests import kustomize
from tests.cluster import wait_for

ROOT = Path(__file__).parent.parent.parent
OVERLAYS = ("workers-lws", "workers-rbg", "vllm-lws", "vllm-rbg")
KINDS_OF_OTHERS = {"LeaderWorkerSet", "RoleBasedGroup", "ServiceMonitor", "PrometheusRule"}
VERSIONS = ("1.29.0", "1.32.0", "1.34.0")
VARIANTS = {
    "default": DeploySettings(),
    "one master, no GPU": DeploySettings(masters=1, gpus=0, prefill=1, decode=1, max_prefill=1, max_decode=1),
    "stages": DeploySettings(stages=3),
    "two GPUs each": DeploySettings(gpus=2),
    "hosts": DeploySettings(host_network=True, ssd_path="/mnt/nvme", ssd_size_bytes=1 << 40),
}


def written(settings: DeploySettings, folder: Path) -> Path:
    for path, text in files_of(settings).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


@pytest.fixture(params=VARIANTS)
def rendered(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return written(VARIANTS[request.param], tmp_path)


def pods(objects: list[Any]) -> list[Any]:
    """Every template of a pod in ``objects``, wherever it stands."""
    found: list[Any] = []

    def search(value: Any) -> None:
        if isinstance(value, dict):
            if "containers" in value.get("spec", {}):
                found.append(value)
            for inner in value.values():
                search(inner)
        elif isinstance(value, list):
            for inner in value:
                search(inner)

    search(objects)
    return found


def test_the_repository_has_what_the_defaults_render() -> None:
    expected = files_of(DeploySettings())
    for path, text in expected.items():
        assert (ROOT / "deploy" / path).read_text() == text, (
            f"deploy/{path} differs; run `mooncake deploy render`"
        )
    ours = {"Containerfile"}
    found = {
        str(path.relative_to(ROOT / "deploy")) for path in (ROOT / "deploy").rglob("*") if path.is_file()
    }
    others = {path for path in found if not path.startswith("secrets/")} - expected.keys() - ours
    assert not others, "files that no setting renders"


def test_overlays_are_built_and_valid(rendered: Path) -> None:
    """Objects against the schemas of Kubernetes, strictly; templates of pods in objects of others as pods."""
    validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    built = sorted((rendered / "kubernetes" / "overlays").iterdir())
    assert {path.name for path in built} <= set(OVERLAYS) and len(built) >= 3
    for overlay in built:
        objects = kustomize.build(overlay)
        for version in VERSIONS:
            for one in objects:
                if one["kind"] not in KINDS_OF_OTHERS:
                    validator.validate(one, version, strict=True)
            for template in pods(objects):
                pod = {**template, "apiVersion": "v1", "kind": "Pod"}
                validator.validate(pod, version, strict=True)


def test_objects_refer_to_each_other(rendered: Path) -> None:
    for overlay in sorted((rendered / "kubernetes" / "overlays").iterdir()):
        objects = kustomize.build(overlay)
        labels = [template["metadata"]["labels"] for template in pods(objects)]
        names = {(one["kind"], one["metadata"]["name"]) for one in objects}
        secrets = yaml.safe_load((rendered / "secrets" / "kustomization.yaml").read_text())["secretGenerator"]
        known = {one["name"] for one in secrets}
        for one in objects:
            spec = one.get("spec", {})
            selector = spec.get("selector", {})
            wanted = selector.get("matchLabels", selector if one["kind"] == "Service" else None)
            wanted = wanted or spec.get("podSelector", {}).get("matchLabels")
            if wanted:
                assert any(wanted.items() <= one_pod.items() for one_pod in labels), one["metadata"]
            if one["kind"] == "HorizontalPodAutoscaler" and spec["scaleTargetRef"]["kind"] in (
                "Deployment",
                "LeaderWorkerSet",
            ):
                assert (spec["scaleTargetRef"]["kind"], spec["scaleTargetRef"]["name"]) in names
        for text in re.findall(r"'secretName': '([^']+)'", str(objects)):
            assert text in known
        leases = {name for kind, name in names if kind == "Lease"}
        elections = set(re.findall(r"k8s://mooncake/([a-z]+)", str(objects)))
        assert elections == leases


def test_pods_have_no_rights(rendered: Path) -> None:
    for overlay in sorted((rendered / "kubernetes" / "overlays").iterdir()):
        for template in pods(kustomize.build(overlay)):
            spec, role = template["spec"], template["metadata"]["labels"]["app.kubernetes.io/component"]
            assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] > 0
            assert role == "master" or not spec["automountServiceAccountToken"]
            for container in [*spec["containers"], *spec.get("initContainers", [])]:
                confined = container["securityContext"]
                assert not confined["allowPrivilegeEscalation"] and confined["readOnlyRootFilesystem"]
                assert confined["capabilities"] == {"drop": ["ALL"]}
                assert "memory" in container["resources"]["limits"]


def test_engines_may_push_kv_to_each_other_and_others_reach_one_port(rendered: Path) -> None:
    objects = kustomize.build(sorted((rendered / "kubernetes" / "overlays").iterdir())[0])
    rules = {
        one["metadata"]["name"]: one["spec"]["ingress"] for one in objects if one["kind"] == "NetworkPolicy"
    }
    for role in ("prefill", "decode"):
        everywhere = [rule for rule in rules[role] if "ports" not in rule]
        sources = {
            origin["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
            for rule in everywhere
            for origin in rule["from"]
        }
        assert sources == {"prefill", "decode", "conductor"}
    for role in rules.keys() - {"prefill", "decode"}:
        assert all("ports" in rule for rule in rules[role]), role
    # No selector matches what pods with their host's network send, so masters can't name their callers then.
    of_hosts = any(one["spec"].get("hostNetwork") for one in pods(objects))
    open_to_all = [role for role, found in rules.items() if any("from" not in one for one in found)]
    assert open_to_all == (["master", "gateway"] if of_hosts else ["gateway"])
    (rpc,) = [rule for rule in rules["master"] if rule["ports"] == [{"port": "rpc", "protocol": "TCP"}]]
    origins = [
        one["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for one in rpc.get("from", [])
    ]
    assert origins == ([] if of_hosts else ["master", "node", "prefill", "decode", "gateway"])


def test_what_is_scraped_has_a_page(tmp_path: Path) -> None:
    """A Service that a ServiceMonitor selects has no pod of a later stage, which has no HTTP server."""
    overlay = written(DeploySettings(stages=3), tmp_path) / "kubernetes" / "overlays" / "workers-lws"
    objects = kustomize.build(overlay)
    stages = [one for one in pods(objects) if "--pipeline-stage" in one["spec"]["containers"][0]["args"]]
    first = [one for one in pods(objects) if "--pipeline-peers" in one["spec"]["containers"][0]["args"]]
    assert len(stages) == len(first) == 1
    found = 0
    for service in (one for one in objects if one["kind"] == "Service"):
        wanted = service["spec"]["selector"].items()
        found += wanted <= first[0]["metadata"]["labels"].items()
        assert not wanted <= stages[0]["metadata"]["labels"].items(), service["metadata"]["name"]
    assert found == 1


def test_a_node_is_ready_when_its_memory_is_mounted(rendered: Path) -> None:
    """An update waits for it, and so do the services of compose that need nodes: ports are open before."""
    overlay = sorted((rendered / "kubernetes" / "overlays").iterdir())[0]
    containers = [one["spec"]["containers"][0] for one in pods(kustomize.build(overlay))]
    (node,) = [one for one in containers if one["name"] == "node"]
    assert node["readinessProbe"]["exec"]["command"] == list(NODE_CHECK)
    assert "tcpSocket" in node["livenessProbe"], "a node without a master is not started again"
    services = yaml.safe_load((rendered / "compose.yaml").read_text())["services"]
    assert services["node-0"]["healthcheck"]["test"] == ["CMD", *NODE_CHECK]


def test_the_check_of_a_node_reads_its_page(tmp_path: Path) -> None:
    make_credentials(tmp_path)
    certificate, key, authority = (str(tmp_path / name) for name in ("node.pem", "node.key", "ca.pem"))
    tls = Identity(SecuritySettings(certificate, key, authority)).server_tls
    web = serve_metrics("127.0.0.1", 0, tls)
    try:
        code = NODE_CHECK[-1].replace(CREDENTIALS, str(tmp_path)).replace(str(NODE_WEB_PORT), str(web.port))
        found = []
        for is_mounted in (False, True):
            IS_MOUNTED.set(is_mounted)
            done = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True, text=True)
            assert not done.stderr
            found.append(done.returncode)
        assert found == [1, 0]
    finally:
        IS_MOUNTED.set(False)
        web.close()


def test_an_update_leaves_the_numbers_that_autoscalers_set(rendered: Path) -> None:
    found = 0
    for overlay in sorted((rendered / "kubernetes" / "overlays").iterdir()):
        objects = kustomize.build(overlay)
        targets = [
            one["spec"]["scaleTargetRef"] for one in objects if one["kind"] == "HorizontalPodAutoscaler"
        ]
        scaled = {(target["kind"], target["name"]) for target in targets}
        for one in objects:
            if (one["kind"], one["metadata"]["name"]) in scaled:
                assert "replicas" not in one["spec"], f"{overlay.name}: {one['kind']}"
                found += 1
            if one["kind"] == "RoleBasedGroup":  # each role is scaled through an adapter of its own
                for role in one["spec"]["roles"]:
                    assert ("RoleBasedGroupScalingAdapter", f"engines-{role['name']}") in scaled
                    assert "replicas" not in role, f"{overlay.name}: {role['name']}"
                    found += 1
    assert found >= 9, "gateways and all engines"


def test_the_volume_of_the_clients_keys_holds_the_largest_secret_while_it_is_replaced(rendered: Path) -> None:
    for overlay in sorted((rendered / "kubernetes" / "overlays").iterdir()):
        volumes = [one for template in pods(kustomize.build(overlay)) for one in template["spec"]["volumes"]]
        (keys,) = [one["emptyDir"] for one in volumes if one["name"] == "clients"]
        size = keys["sizeLimit"]
        assert size.endswith("Mi") and int(size.removesuffix("Mi")) << 20 > 2 * kubernetes.MAX_SECRET_BYTES


def test_the_operators_key_is_sent_over_tls_only(rendered: Path) -> None:
    seen = set()
    for overlay in sorted((rendered / "kubernetes" / "overlays").iterdir()):
        for one in kustomize.build(overlay):
            if one["kind"] == "ServiceMonitor":
                (endpoint,) = one["spec"]["endpoints"]
                assert ("authorization" in endpoint) == (endpoint["scheme"] == "https"), one["metadata"]
                seen.add((one["metadata"]["name"], endpoint["scheme"]))
    assert ("gateway", "https") in seen and ("prefill", "http") in seen, "vLLM has no TLS of its own"
    for job in yaml.safe_load((rendered / "monitoring" / "prometheus.yaml").read_text())["scrape_configs"]:
        assert job["scheme"] == "https" and "authorization" in job, job["job_name"]
    services = yaml.safe_load((rendered / "compose.yaml").read_text())["services"]
    assert "--metrics-host" not in services["gateway"]["command"], "that port has no TLS: on loopback only"


def test_gateways_know_the_masters(rendered: Path) -> None:
    """Without them the console has no pages about the store."""
    services = yaml.safe_load((rendered / "compose.yaml").read_text())["services"]
    commands = [services["gateway"]["command"]]
    for overlay in sorted((rendered / "kubernetes" / "overlays").iterdir()):
        for template in pods(kustomize.build(overlay)):
            commands += [one["args"] for one in template["spec"]["containers"] if one["name"] == "gateway"]
    assert len(commands) >= 4
    for words in commands:
        assert "--master" in words
        address = words[words.index("--master") + 1]
        assert address.startswith("master-0") and ":50051" in address
        RemoteMaster(address)


def test_a_gateway_that_stops_has_time_to_end_its_answers(rendered: Path) -> None:
    service = yaml.safe_load((rendered / "compose.yaml").read_text())["services"]["gateway"]
    lives = [(service["command"], float(service["stop_grace_period"].removesuffix("s")))]
    for overlay in sorted((rendered / "kubernetes" / "overlays").iterdir()):
        for template in pods(kustomize.build(overlay)):
            for one in template["spec"]["containers"]:
                if one["name"] == "gateway":
                    waits_s = float(one["lifecycle"]["preStop"]["exec"]["command"][1])
                    lives.append((one["args"], template["spec"]["terminationGracePeriodSeconds"] - waits_s))
    assert len(lives) >= 4
    for words, grace_s in lives:
        drain_s = float(words[words.index("--drain-s") + 1])
        assert 60 <= drain_s <= grace_s - 10, "what still runs then has to be cut and to be recorded"


def test_a_withdrawn_key_reaches_a_gateway_that_runs(tmp_path: Path) -> None:
    """The container beside the gateway, as a process: it repeats the copy, and ends at SIGTERM."""
    overlay = written(DeploySettings(), tmp_path / "out") / "kubernetes" / "overlays" / "workers-lws"
    (gateway,) = [
        one for one in pods(kustomize.build(overlay)) if one["spec"]["containers"][0]["name"] == "gateway"
    ]
    once, again = gateway["spec"]["initContainers"]
    assert again["restartPolicy"] == "Always" and "restartPolicy" not in once
    given, copied = tmp_path / "given.toml", tmp_path / "clients.toml"

    def here(words: list[str]) -> list[str]:
        replaced = {kubernetes.GIVEN_CLIENTS: str(given), CLIENTS_FILE: str(copied), "sleep 5": "sleep 0.05"}
        for old, new in replaced.items():
            words = [word.replace(old, new) for word in words]
        return words

    given.write_text("first")
    subprocess.run(here(once["command"]), check=True, timeout=60)
    assert copied.read_text() == "first"
    inode = copied.stat().st_ino
    given.write_text("second")
    process = subprocess.Popen(here(again["command"]))
    try:
        wait_for(lambda: copied.read_text() == "second", "the changed file", 60)
        assert stat.S_IMODE(copied.stat().st_mode) == 0o600 and copied.stat().st_ino != inode
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()


def test_every_role_s_flags_exist(rendered: Path) -> None:
    """Every argument of ours is a flag of its role with a value that the role accepts."""
    commands = {command.name: command for command in COMMANDS}
    containers = [
        container
        for overlay in sorted((rendered / "kubernetes" / "overlays").iterdir())
        for template in pods(kustomize.build(overlay))
        for container in template["spec"]["containers"]
    ]
    lines = [[*one["command"], *one["args"]] for one in containers]
    services = yaml.safe_load((rendered / "compose.yaml").read_text())["services"]
    lines += [one["command"] for one in services.values() if one.get("command", [""])[0] == "mooncake"]
    assert len(lines) > 20
    checked = 0
    for program, role, *words in lines:
        if program != "mooncake":
            assert (program, role) == ("vllm", "serve")
            continue
        settings_class = commands[role].settings_class()
        known = {option.flag: option for option in config.options(settings_class)}
        flags: dict[str, Any] = {}
        at = 0
        while at < len(words):
            flag, value = words[at], words[at + 1] if at + 1 < len(words) else ""
            if flag.startswith(("--tls-", "--log-")):
                at += 2
            elif flag.startswith("--no-"):
                flags[known["--" + flag.removeprefix("--no-")].field] = False
                at += 1
            elif value.startswith("--") or not value:
                flags[known[flag].field] = True
                at += 1
            else:
                option = known[flag]
                value = value.replace("$(LWS_WORKER_INDEX)", "1")
                flags[option.field] = [*flags.get(option.field, []), value] if option.takes_many else value
                at += 2
        config.load(settings_class, flags, {})
        checked += 1
    assert checked > 20


def test_compose_is_whole(rendered: Path) -> None:
    content = yaml.safe_load((rendered / "compose.yaml").read_text())
    services = content["services"]
    secrets = {path.name for path in make_credentials(rendered / "secrets")}
    for name, service in services.items():
        for needed, how in service.get("depends_on", {}).items():
            assert needed in services, f"{name} needs {needed}"
            if how["condition"] == "service_healthy":
                assert "healthcheck" in services[needed]
        confined = service["read_only"], service["cap_drop"], service["security_opt"]
        assert confined == (True, ["ALL"], ["no-new-privileges:true"]), name
        if name == "volumes":  # the only one with a right, and it has no network
            assert (service["cap_add"], service["network_mode"]) == (["CHOWN"], "none")
        else:
            assert "cap_add" not in service and service["user"] == "${MOONCAKE_USER:-10001:10001}", name
        for mount in service["volumes"]:
            if isinstance(mount, str):
                assert mount.partition(":")[0] in content["volumes"]
            elif mount["source"].startswith("./"):
                path = rendered / mount["source"]
                assert path.exists(), f"{name} mounts {path}"
                assert path.parent.name != "secrets" or path.name in secrets
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])) or name == "gateway"
        # What compose would replace: only the two variables that have a default.
        for variable in re.findall(r"\$\S*", str(service)):
            assert variable.startswith(("${MOONCAKE_USER:-", "${MOONCAKE_MODELS:-")), variable
    owned = {one.rpartition("/")[2] for one in services["volumes"]["command"][2:]}
    assert owned == content["volumes"].keys(), "every volume is given to the services' user"
    others = yaml.safe_load((rendered / "compose.gpu.yaml").read_text())["services"]
    assert others.keys() <= services.keys() and len(others) >= 2
    devices = [one["deploy"]["resources"]["reservations"]["devices"] for one in others.values()]
    assert all("count" not in one for (one,) in devices), (
        "a count is the host's first ones, for every service"
    )
    given = [number for (one,) in devices for number in one["device_ids"]]
    assert given == [str(number) for number in range(len(given))] and len(given) >= len(others)


def test_compose_waits_for_nodes_and_workers_at_least_as_long_as_kubernetes(rendered: Path) -> None:
    waited: dict[str, int] = {}
    for overlay in sorted((rendered / "kubernetes" / "overlays").glob("workers-*")):
        for template in pods(kustomize.build(overlay)):
            (first, *_), labels = template["spec"]["containers"], template["metadata"]["labels"]
            probe = first["startupProbe"]
            waited[labels["app.kubernetes.io/component"]] = probe["periodSeconds"] * probe["failureThreshold"]
    services = yaml.safe_load((rendered / "compose.yaml").read_text())["services"]
    for role, name in (("node", "node-0"), ("prefill", "prefill-0"), ("decode", "decode-0")):
        assert int(services[name]["healthcheck"]["start_period"].removesuffix("s")) >= waited[role], role


def test_promtool_accepts_rules_and_configuration(rendered: Path) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed, so rules were NOT TESTED; run scripts/install-servers")
    for words in (["rules", "rules.yaml"], ["config", "--syntax-only", "prometheus.yaml"]):
        command = ["promtool", "check", *words]
        done = subprocess.run(
            command, cwd=rendered / "monitoring", capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_credentials_are_private_and_kept(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    made = make_credentials(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for path in made:
        assert path.suffix == ".pem" or stat.S_IMODE(path.stat().st_mode) == 0o600, path
    before = {path: path.read_bytes() for path in made}
    (folder / "admin.env").unlink()
    assert make_credentials(folder) == [folder / "admin.env"]
    assert {path: path.read_bytes() for path in made} == before
    (folder / "admin.key").unlink()
    assert make_credentials(folder) == [folder / "admin.key"]
    assert {path: path.read_bytes() for path in made} == before


def test_a_folder_that_exists_becomes_private(tmp_path: Path) -> None:
    folder = written(DeploySettings(), tmp_path) / "secrets"
    folder.chmod(0o755)
    make_credentials(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_git_ignores_secrets_and_a_file_of_the_folder_s_owner_stays(tmp_path: Path) -> None:
    (tmp_path / ".gitignore").write_text("mine\n")
    make_credentials(written(DeploySettings(), tmp_path) / "secrets")
    assert (tmp_path / ".gitignore").read_text() == "mine\n"
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True, timeout=60)
    command = ["git", "-C", str(tmp_path), "ls-files", "--others", "--exclude-standard", "secrets"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines() == ["secrets/.gitignore", "secrets/kustomization.yaml"]


def test_other_variables_beside_the_operators_key_stay(tmp_path: Path) -> None:
    make_credentials(tmp_path)
    environment, key = tmp_path / "admin.env", (tmp_path / "admin.key").read_text()
    more = environment.read_text() + '# for the collector\nOTEL_SERVICE_NAME="my cluster"\n'
    environment.write_text(more)
    (tmp_path / "admin.key").unlink()
    assert make_credentials(tmp_path) == [tmp_path / "admin.key"]
    assert (tmp_path / "admin.key").read_text() == key and environment.read_text() == more


@pytest.mark.parametrize("text", ["", "OTHER=1\n", "ADMIN_API_KEY=\n", "ADMIN_API_KEY='a'\n"])
def test_a_file_without_a_usable_key_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "admin.env").write_text(text)
    with pytest.raises(InvalidArgument, match=r"admin\.env.*ADMIN_API_KEY=KEY"):
        make_credentials(tmp_path)


def test_two_keys_of_operators_are_refused(tmp_path: Path) -> None:
    make_credentials(tmp_path)
    (tmp_path / "admin.key").write_text("another")
    with pytest.raises(InvalidArgument, match=r"admin\.key.*admin\.env"):
        make_credentials(tmp_path)


def test_the_certificate_is_for_the_gateway_s_names(tmp_path: Path) -> None:
    make_credentials(tmp_path, ("llm.example", "10.0.0.7"))
    found = x509.load_pem_x509_certificate((tmp_path / "node.pem").read_bytes())
    names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost", "llm.example"]
    assert "10.0.0.7" in map(str, names.get_values_for_type(x509.IPAddress))


def test_a_certificate_that_lacks_a_name_of_the_gateway_is_refused(tmp_path: Path) -> None:
    make_credentials(tmp_path, ("llm.example", "*.apps.example"))
    assert make_credentials(tmp_path, ("LLM.example", "a.apps.example", "0:0::1")) == []
    for host in ("other.example", "a.b.apps.example", "10.0.0.7"):
        with pytest.raises(InvalidArgument, match=rf"gateway_hosts.*{host}.*node\.pem.*node\.key"):
            make_credentials(tmp_path, (host,))


def test_the_image_has_every_extra_that_a_container_uses() -> None:
    text = (ROOT / "deploy" / "Containerfile").read_text()
    (extras,) = re.findall(r'extras="([a-z,]+)', text)
    assert set(extras.split(",")) == {"cli", "gateway", "grpc", "otel", "tls"}
    assert "[otel]" in text.partition(" AS vllm")[2].partition("\nFROM")[0], "engines send spans, too"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prefill": 9}, "prefill"),
        ({"ssd_path": "/ssd"}, "ssd_size"),
        ({"ssd_size_bytes": 1}, "ssd_size"),
    ],
)
def test_settings_that_contradict_each_other_are_named(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument, match=field):
        DeploySettings(**fields)


@pytest.mark.parametrize(
    "flags",
    [
        {"model": "/models/a b"},
        {"model": "/etc"},
        {"image": "a\nb"},
        {"namespace": "Mooncake"},
        {"models_path": "relative"},
        {"models_path": "/a}b"},
        {"model": "/models/$(POD_IP)"},
        {"served_model_name": "a$HOME"},
        {"ssd_path": "/$a"},
    ],
)
def test_values_that_would_change_a_manifest_s_meaning_are_refused(flags: dict[str, str]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(flags))):
        config.load(DeploySettings, flags, {})


def test_a_pattern_is_described_in_words() -> None:
    with pytest.raises(InvalidArgument, match=r"allowed: text that is a path below /models without \$$"):
        config.load(DeploySettings, {"model": "/m"}, {})


def test_the_command_writes_from_one_file_of_settings(tmp_path: Path) -> None:
    (tmp_path / "m.toml").write_text('[deploy]\nmasters = 1\nnodes = 3\nimage = "here/mooncake:1"\n')
    command = [sys.executable, "-m", "mooncake", "deploy", "render", "--config", str(tmp_path / "m.toml")]
    command += ["--model", "/models/small", "--nodes", "4", "--out", str(tmp_path / "out"), "--make-secrets"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    services = yaml.safe_load((tmp_path / "out" / "compose.yaml").read_text())["services"]
    assert services["gateway"]["image"] == "here/mooncake:1"
    assert "/models/small" in services["prefill-0"]["command"]
    assert len([name for name in services if name.startswith("node-")]) == 4, "a flag beats the file"
    assert (tmp_path / "out" / "secrets" / "node.key").exists()
    shown = done.stdout
    assert "compose.yaml" in shown and (tmp_path / "out/secrets/admin.key").read_text() not in shown

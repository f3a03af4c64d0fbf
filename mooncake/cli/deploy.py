# SPDX-License-Identifier: Apache-2.0
"""``mooncake deploy render``: the files that start a cluster in containers, from one table of settings.

This module owns what runs in each container: the command of every role, its ports and how it is scraped,
whatever starts the containers. ``compose.py`` and ``kubernetes.py`` place these programs, ``boards.py``
watches them. One certificate of the cluster is required on every connection, because only then a Prometheus
in a container of its own can read every page of metrics. Files are replaced whole; credentials are created
when asked for, and never replaced.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml
from cryptography import x509
from msgspec import Meta

import mooncake
from mooncake.cli.certs import CertsSettings, is_for, make
from mooncake.cli.output import write_new, write_whole
from mooncake.cli.role_command import Invocation
from mooncake.config import Size, format_size
from mooncake.errors import InvalidArgument

HEADING = "# Written by `mooncake deploy render`: change the settings, not this file.\n"
CREDENTIALS = "/etc/mooncake/tls"
"""Where containers find the cluster's certificate."""
CLIENTS_FILE = "/run/mooncake/clients.toml"
"""Where the gateway finds its clients' keys, in a file of its own."""
SECRETS = "secrets"
"""Folder of the credentials, beside the other files."""
NAME = "^([a-z0-9]|[a-z0-9][-a-z0-9]{0,61}[a-z0-9])$"
NO_VARIABLE = "^[^$]*$"
"""Compose replaces what begins with ``$``, and Kubernetes what is in ``$( )``."""
IMAGE = "^[A-Za-z0-9][-A-Za-z0-9._/:@]{0,254}$"

MASTER_PORT, MASTER_WEB_PORT = 50051, 9003
NODE_PORT, NODE_WEB_PORT = 12345, 9004
ENGINE_PORT, EVENTS_PORT, REPLAY_PORT = 8100, 5557, 5558
CONDUCTOR_PORT, CONDUCTOR_WEB_PORT = 8400, 13333
GATEWAY_PORT = 8000
ENVIRONMENT_KEY = "ADMIN_API_KEY"

NODE_CHECK = (
    "python",
    "-c",
    f"""\
import http.client, os, ssl, sys
tls = ssl.create_default_context(cafile="{CREDENTIALS}/ca.pem")
tls.check_hostname = False
tls.load_cert_chain("{CREDENTIALS}/node.pem", "{CREDENTIALS}/node.key")
host = os.environ.get("POD_IP", "127.0.0.1")
page = http.client.HTTPSConnection(host, {NODE_WEB_PORT}, timeout=4, context=tls)
page.request("GET", "/metrics")
sys.exit(b"\\nmooncake_store_mounted 1" not in page.getresponse().read())
""",
)
"""Command that succeeds in a node's container while the node's memory is part of the store.

Its ports are open before: an update that went by them would empty the pool, node after node.
"""


@dataclass(frozen=True)
class DeploySettings:
    """Write the files that start a cluster in containers: for compose, Kubernetes, Prometheus and Grafana."""

    out: Path = Path("deploy")
    "Folder to write to; files of the same names are replaced."

    image: Annotated[str, Meta(pattern=IMAGE)] = f"mooncake:{mooncake.__version__}"
    "Image of all roles (`deploy/Containerfile`)."

    vllm_image: Annotated[str, Meta(pattern=IMAGE)] = f"mooncake-vllm:{mooncake.__version__}"
    "Image of vLLM with this package in it (the stage `vllm` of that file)."

    namespace: Annotated[str, Meta(pattern=NAME)] = "mooncake"
    "Namespace in Kubernetes."

    model: Annotated[
        str, Meta(pattern=r"^/models/[^\s$]+$", description="that is a path below /models without $")
    ] = "/models/model"
    "Folder of the model in the containers, below `/models`."

    served_model_name: Annotated[str, Meta(pattern=NO_VARIABLE, description="without $")] = ""
    "The model's name in the API; empty takes the last part of `model`."

    models_path: Annotated[
        str, Meta(pattern="^/[^$}]*$", description="that is an absolute path without $ and }")
    ] = "/srv/models"
    "Folder of the host that compose mounts as `/models`."

    models_claim: Annotated[str, Meta(pattern=NAME)] = "models"
    "Persistent volume claim that Kubernetes mounts as `/models`; many pods read it."

    masters: Annotated[int, Meta(ge=1, le=9)] = 3
    "Number of masters, one of which leads."

    nodes: Annotated[int, Meta(ge=1, le=64)] = 2
    "Nodes of the store in compose; in Kubernetes each host with the label `mooncake/node=true` runs one."

    prefill: Annotated[int, Meta(ge=1, le=64)] = 2
    "Prefill instances to start with."

    max_prefill: Annotated[int, Meta(ge=1, le=64)] = 8
    "Most prefill instances that Kubernetes scales to."

    decode: Annotated[int, Meta(ge=1, le=64)] = 2
    "Decode instances to start with."

    max_decode: Annotated[int, Meta(ge=1, le=64)] = 8
    "Most decode instances that Kubernetes scales to."

    stages: Annotated[int, Meta(ge=1, le=64)] = 1
    "Pods of a prefill instance of our workers, with some layers each; beyond 1 for LeaderWorkerSets only."

    gpus: Annotated[int, Meta(ge=0, le=16)] = 1
    "GPUs of each pod that computes; 0 computes on the CPU."

    pool_size_bytes: Annotated[int, Size, Meta(ge=1 << 20)] = 64 << 30
    "Memory that each node contributes to the store."

    kv_cache_size_bytes: Annotated[int, Size, Meta(ge=1 << 20)] = 8 << 30
    "Memory of each of our workers for its own KV blocks."

    worker_memory_bytes: Annotated[int, Size, Meta(ge=1 << 20)] = 64 << 30
    "Main memory of each pod that computes, with the model where there is no GPU."

    ssd_path: Annotated[
        str, Meta(pattern="^(/[^$]*)?$", description="that is an absolute path without $, or empty")
    ] = ""
    "Folder on each node's host for the SSD tier; empty: none."

    ssd_size_bytes: Annotated[int, Size, Meta(ge=0)] = 0
    "Capacity of that tier."

    host_network: bool = False
    "Nodes and engines use their host's network (`docs/deployment.md` has what else RDMA needs)."

    docs_url: Annotated[str, Meta(pattern="^[^\\s#?]+$")] = "docs"
    "Where alerts link to for what to do: the address of a copy of `docs/`, or its path in the checkout."

    gateway_hosts: tuple[str, ...] = ()
    "Host names and addresses of the gateway that the certificate of `make_secrets` must be for, too."

    make_secrets: bool = False
    "Also create the credentials that the folder `secrets` lacks; existing ones stay."

    def __post_init__(self) -> None:
        for name in ("prefill", "decode"):
            if getattr(self, name) > getattr(self, f"max_{name}"):
                raise InvalidArgument(name, getattr(self, name), f"at most max_{name}")
        if bool(self.ssd_path) != bool(self.ssd_size_bytes):
            raise InvalidArgument("ssd_size", self.ssd_size_bytes, "more than 0 with ssd_path, and 0 without")

    @property
    def model_name(self) -> str:
        """Name of the model for clients."""
        return self.served_model_name or self.model.rstrip("/").rpartition("/")[2]


@dataclass(frozen=True)
class Addresses:
    """Where a program and the others run; ``kubernetes.py`` and ``compose.py`` make it.

    A value may contain ``$(NAME)``, which Kubernetes replaces by a variable of the container.
    """

    listens_on: str
    own_name: str
    """Name at which others reach the container itself."""
    masters: str
    """Addresses of all masters, with commas between them."""
    election: str
    """Service of the election; empty where there is one master."""
    conductor: str
    prefill: tuple[str, ...]
    """Addresses of all prefill instances that there may be, and of ..."""
    decode: tuple[str, ...]


@dataclass(frozen=True)
class Program:
    """What runs in a container. ``ports`` by name; ``web``: scheme of the metrics, and their port's name."""

    role: str
    command: tuple[str, ...]
    ports: Mapping[str, int]
    image: str
    web: tuple[str, str]
    environment: Mapping[str, str]

    @property
    def computes(self) -> bool:
        """Whether it reads the model's weights."""
        return self.role in ("prefill", "decode")


def master(settings: DeploySettings, place: Addresses) -> Program:
    """A master, with a log that outlives its container."""
    command = _mooncake("master", "--host", place.listens_on, "--port", MASTER_PORT)
    command += ["--advertise", f"{place.own_name}:{MASTER_PORT}", "--metrics-port", str(MASTER_WEB_PORT)]
    command += ["--oplog", "/var/lib/mooncake/master.oplog"]
    if place.election:
        # An API server or an etcd that elects may take seconds for its own failover.
        command += ["--election", place.election, "--election-lease-s", "10"]
    else:
        command += ["--kv-events-endpoint", f"tcp://*:{EVENTS_PORT}"]
        command += ["--kv-events-replay-endpoint", f"tcp://*:{REPLAY_PORT}"]
    ports = {"rpc": MASTER_PORT, "web": MASTER_WEB_PORT}
    if not place.election:
        ports |= {"events": EVENTS_PORT, "replay": REPLAY_PORT}
    return _program("master", command, ports, settings.image, ("https", "web"))


def node(settings: DeploySettings, place: Addresses) -> Program:
    """A node of the store."""
    command = _mooncake("node", "--master", place.masters, "--host", place.listens_on, "--port", NODE_PORT)
    command += ["--advertise-host", place.own_name, "--metrics-port", str(NODE_WEB_PORT)]
    command += ["--pool-size", format_size(settings.pool_size_bytes), "--no-accept-root-fs-dir"]
    if settings.ssd_path:
        command += ["--ssd-path", "/ssd", "--ssd-size", format_size(settings.ssd_size_bytes)]
    return _program(
        "node", command, {"data": NODE_PORT, "web": NODE_WEB_PORT}, settings.image, ("https", "web")
    )


def worker(settings: DeploySettings, place: Addresses, role: str, stage: int | None = None) -> Program:
    """One of our workers; ``stage``: of a group of several, None where a worker has the whole model.

    The first stage knows the others by the names that a LeaderWorkerSet gives to its pods.
    """
    command = _mooncake("worker", "--role", role, "--model", settings.model)
    command += ["--served-model-name", settings.model_name, "--host", place.listens_on]
    command += ["--port", str(ENGINE_PORT), "--master", place.masters]
    command += ["--kv-cache-size", format_size(settings.kv_cache_size_bytes)]
    command += ["--device", "auto"]
    if stage == 0:
        for number in range(1, settings.stages):
            command += ["--pipeline-peers", f"$(POD_NAME)-{number}.{role}:{ENGINE_PORT}"]
    elif stage is not None:
        command += ["--pipeline-stage", "$(LWS_WORKER_INDEX)", "--pipeline-stages", str(settings.stages)]
    if not stage:
        command += ["--kv-events-port", str(EVENTS_PORT)]
    return _program(role, command, {"http": ENGINE_PORT}, settings.image, ("https", "http"))


def vllm(settings: DeploySettings, place: Addresses, role: str) -> Program:
    """A server of vLLM whose blocks go to the pool and come from it."""
    transfer = {
        "kv_connector": "MooncakeStoreConnector",
        "kv_role": "kv_producer" if role == "prefill" else "kv_consumer",
        "kv_connector_extra_config": {
            "mooncake_store_addr": place.masters,
            "local_hostname": place.own_name,
        },
    }
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{EVENTS_PORT}",
        "replay_endpoint": f"tcp://*:{REPLAY_PORT}",
    }
    command = ["vllm", "serve", settings.model, "--served-model-name", settings.model_name]
    command += ["--host", place.listens_on, "--port", str(ENGINE_PORT), "--enable-prompt-tokens-details"]
    command += ["--tensor-parallel-size", str(max(1, settings.gpus))]
    command += ["--kv-transfer-config", json.dumps(transfer), "--kv-events-config", json.dumps(events)]
    files = {
        "MOONCAKE_SECURITY_TLS_CERT": f"{CREDENTIALS}/node.pem",
        "MOONCAKE_SECURITY_TLS_KEY": f"{CREDENTIALS}/node.key",
        "MOONCAKE_SECURITY_TLS_CA": f"{CREDENTIALS}/ca.pem",
    }
    return Program(
        role, tuple(command), {"http": ENGINE_PORT}, settings.vllm_image, ("http", "http"), _home(files)
    )


def conductor(settings: DeploySettings, place: Addresses, engine: str) -> Program:
    """The conductor for instances of ``engine``: ``workers`` or ``vllm``."""
    command = _mooncake("conductor", "--host", place.listens_on, "--port", CONDUCTOR_PORT)
    command += ["--http-port", str(CONDUCTOR_WEB_PORT)]
    if not place.election:
        leader = place.masters.partition(":")[0]
        command += ["--pool-events", f"tcp://{leader}:{EVENTS_PORT}"]
        command += ["--pool-events-replay", f"tcp://{leader}:{REPLAY_PORT}"]
    if engine == "vllm":
        command += ["--plain-engines", "--engines-share-blocks"]
    ports = {"rpc": CONDUCTOR_PORT, "web": CONDUCTOR_WEB_PORT}
    return _program("conductor", command, ports, settings.image, ("https", "web"))


def gateway(settings: DeploySettings, place: Addresses, engine: str) -> Program:
    """The gateway, with every instance that there may be: it probes those that do not exist yet.

    Its metrics are read at the port of its clients, with the operators' key: that one has TLS, and the
    operators' own port, which has none, stays on loopback.
    """
    command = _mooncake("gateway", "--host", place.listens_on, "--port", GATEWAY_PORT)
    command += ["--model", settings.model, "--served-model-name", settings.model_name]
    command += ["--conductor", place.conductor, "--master", place.masters]
    command += ["--api-keys-file", CLIENTS_FILE]
    command += ["--protocol", "pool" if engine == "vllm" else "workers"]
    # Within the 120 s that its container has to stop, of which the pod waits 5 s first.
    command += ["--drain-s", "100"]
    for flag, instances in (("--prefill", place.prefill), ("--decode", place.decode)):
        for instance in instances:
            command += [flag, instance]
    return _program("gateway", command, {"https": GATEWAY_PORT}, settings.image, ("https", "https"))


def _mooncake(role: str, *words: object) -> list[str]:
    return ["mooncake", role, *map(str, words)]


def _program(
    role: str, command: Sequence[str], ports: Mapping[str, int], image: str, web: tuple[str, str]
) -> Program:
    files = ["--tls-cert", f"{CREDENTIALS}/node.pem", "--tls-key", f"{CREDENTIALS}/node.key"]
    files += ["--tls-ca", f"{CREDENTIALS}/ca.pem", "--log-format", "json"]
    return Program(role, (*command, *files), ports, image, web, _home({}))


def _home(environment: Mapping[str, str]) -> dict[str, str]:
    """``/tmp`` is the only folder beside their volumes that programs may write to."""
    return {"HOME": "/tmp", **environment}


def render(given: Invocation) -> None:
    """The entry point of ``mooncake deploy render``.

    Raises:
        InvalidArgument: the folder can't be written, or the certificate in it lacks one of ``gateway_hosts``.
    """
    settings = given.settings
    assert isinstance(settings, DeploySettings)
    try:
        _check_hosts(settings.out / SECRETS / "node.pem", settings.gateway_hosts)
        for path, text in files_of(settings).items():
            file = settings.out / path
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, text, "out")
            print(file)
        if settings.make_secrets:
            for file in make_credentials(settings.out / SECRETS, settings.gateway_hosts):
                print(file)
    except OSError as error:
        raise InvalidArgument("out", str(settings.out), f"a folder to write to ({error})") from error


def files_of(settings: DeploySettings) -> dict[str, str]:
    """Every file with its text, by path below the folder."""
    from mooncake.cli import boards, compose, kubernetes  # here, as they describe the programs above

    found: dict[str, Any] = {}
    found |= boards.files(settings)
    found |= compose.files(settings)
    found |= kubernetes.files(settings)
    # Here and not above, where the folder's owner may have a file of this name.
    found[f"{SECRETS}/.gitignore"] = "*\n!.gitignore\n!kustomization.yaml\n"
    return {path: _text(path, content) for path, content in sorted(found.items())}


def _text(path: str, content: Any) -> str:
    """The text of a file: a text as it is; an object, or a list of them, as YAML or JSON."""
    if isinstance(content, str):
        return content
    if path.endswith(".json"):
        return json.dumps(content, indent=1) + "\n"
    many = content if isinstance(content, list) else [content]
    return HEADING + yaml.dump_all(many, Dumper=_Dumper, sort_keys=False, width=105, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    """YAML without references, which Kubernetes' tools read but people do not."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text_of(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text_of)


def make_credentials(folder: Path, hosts: Sequence[str] = ()) -> list[Path]:
    """Create what ``folder`` lacks: certificates, the operators' key, and a key of one client.

    Returns the files that were created. Keys are of mode 0600 and the folder of 0700.

    Args:
        hosts: names of the gateway for which the programs' certificate is, too.

    Raises:
        InvalidArgument: the certificate exists and is not for one of ``hosts``, or both files with the
            operators' key exist and have different ones.
    """
    _check_hosts(folder / "node.pem", hosts)
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)  # it may exist with a wider one: its kustomization was written before
    made: list[Path] = []
    if not (folder / "node.pem").exists():
        names = tuple(dict.fromkeys((*CertsSettings.host, *hosts)))
        made += make(CertsSettings(folder=folder, name="node", host=names))
    if not (folder / "prometheus.pem").exists():
        made += make(CertsSettings(folder=folder, name="prometheus", role="admin"))
    made += _operators_key(folder / "admin.key", folder / "admin.env")
    clients = folder / "clients.toml"
    if not clients.exists():
        entry = f'[[keys]]\nname = "first"\nkey = "sk-{secrets.token_urlsafe(24)}"\n'
        made += [_secret(clients, entry)]
    return made


def _check_hosts(certificate: Path, hosts: Sequence[str]) -> None:
    """Check that a certificate that exists is for ``hosts``, since it is never replaced.

    Raises:
        InvalidArgument: it is not, or can't be read.
    """
    if not hosts or not certificate.exists():
        return
    try:
        found = x509.load_pem_x509_certificate(certificate.read_bytes())
        missing = next((host for host in hosts if not is_for(found, host)), None)
    except ValueError as error:
        raise InvalidArgument("out", str(certificate), f"a certificate in PEM ({error})") from error
    if missing is not None:
        allowed = f"names in {certificate}; remove it and {certificate.with_suffix('.key')} for new ones"
        raise InvalidArgument("gateway_hosts", missing, allowed)


def _operators_key(key_file: Path, environment: Path) -> list[Path]:
    """Create what is missing of the two files with the operators' key, with the key of the other one.

    Raises:
        InvalidArgument: both exist and have different keys, or one has no key that can be used.
    """
    keys = {file: _key_in(file) for file in (key_file, environment) if file.exists()}
    if len(set(keys.values())) > 1:
        raise InvalidArgument("out", str(key_file), f"the key in {environment}; remove one of both, or both")
    key = next(iter(keys.values()), secrets.token_urlsafe(24))
    texts = {key_file: key, environment: f"{ENVIRONMENT_KEY}={key}\n"}
    return [_secret(file, text) for file, text in texts.items() if file not in keys]


def _key_in(file: Path) -> str:
    """The operators' key in a file that has only it, or in one of environment variables.

    Raises:
        InvalidArgument: there is none or more than one, or it is in quotes: only compose removes these.
    """
    text = file.read_text()
    keys = text.split()
    allowed = "a file with the operators' key and nothing else"
    if file.suffix == ".env":
        start = f"{ENVIRONMENT_KEY}="
        lines = map(str.strip, text.splitlines())
        keys = [line.removeprefix(start) for line in lines if line.startswith(start)]
        allowed = f"a file with one line {start}KEY, whose key is not in quotes"
    if len(keys) != 1 or not keys[0] or keys[0][0] in "\"'":
        raise InvalidArgument("out", str(file), allowed)
    return keys[0]


def _secret(file: Path, text: str) -> Path:
    write_new(file, text.encode(), 0o600)
    return file
